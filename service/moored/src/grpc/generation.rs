//! `moored.v1.Generation`.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::Pin;
use std::sync::Arc;

use engine::Error;
use engine::job::{Generate, JobSpec, JobWork};
use engine::library::{Entry, OpenModel};
use futures::Stream;
use pipelines::{Defaults, ImageRequest, InitImage};
use tonic::{Request, Response, Status, Streaming};

use super::caller::Caller;
use super::convert::{latent_out, resolved};
use super::latent_upload::receive_latent;
use super::server::Service;
use super::status::{invalid, status_of};
use super::stream::{CHUNK_BYTES, EventStream, Output, events_of};
use crate::pictures::{self, Pixels, Recipe};
use crate::proto::v1;
use crate::proto::v1::generation_server::Generation;

/// Longest prompt, in characters. T5 reads 512 tokens at the most: what is longer is a mistake.
const LONGEST_PROMPT_CHARACTERS: usize = 10_000;
/// Longest side of a picture that is painted or encoded; a model may take less.
const LONGEST_SIDE_PIXELS: u32 = 4096;
/// Pictures of one request.
const MOST_PICTURES: u32 = 64;
/// Least time between previews.
const LEAST_PREVIEW_INTERVAL_MS: u32 = 100;
/// Strength where a request for image to image names none.
const DEFAULT_STRENGTH: f32 = 0.6;
#[tonic::async_trait]
impl Generation for Service {
    type GenerateImageStream = EventStream;

    async fn generate_image(
        &self,
        request: Request<v1::GenerateImageRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let prepared = self
            .prepare_generate(request.into_inner(), &caller)
            .await
            .map_err(|e| status_of(&e))?;
        let job = self
            .queue
            .submit(prepared.spec)
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(events_of(job, prepared.model, prepared.output)))
    }

    type EncodeImageStream = EventStream;

    async fn encode_image(
        &self,
        request: Request<v1::EncodeImageRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let stream = self.start_encode(request.into_inner(), &caller).await;
        stream.map(Response::new).map_err(|e| status_of(&e))
    }

    type DecodeLatentStream = EventStream;

    async fn decode_latent(
        &self,
        request: Request<v1::DecodeLatentRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let stream = self.start_decode(request.into_inner(), &caller).await;
        stream.map(Response::new).map_err(|e| status_of(&e))
    }

    type GetLatentStream = Pin<Box<dyn Stream<Item = Result<v1::LatentChunk, Status>> + Send>>;

    async fn get_latent(
        &self,
        request: Request<v1::GetLatentRequest>,
    ) -> Result<Response<Self::GetLatentStream>, Status> {
        let id = request.into_inner().latent_id;
        let latent = self.queue.latent(&id).await.map_err(|e| status_of(&e))?;
        let info = latent_out(&latent.info);
        let data = latent.tensor.data;
        let chunks = (0..data.len().max(1)).step_by(CHUNK_BYTES).map(move |start| {
            let end = (start + CHUNK_BYTES).min(data.len());
            let info = (start == 0).then(|| info.clone());
            Ok(v1::LatentChunk {
                info,
                chunk: data.slice(start..end),
            })
        });
        Ok(Response::new(Box::pin(futures::stream::iter(
            chunks.collect::<Vec<_>>(),
        ))))
    }

    async fn put_latent(
        &self,
        request: Request<Streaming<v1::LatentChunk>>,
    ) -> Result<Response<v1::LatentInfo>, Status> {
        let (tensor, vae_id) = receive_latent(request.into_inner()).await?;
        let info = self
            .queue
            .put_latent(tensor, vae_id)
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(latent_out(&info)))
    }

    async fn release_latent(
        &self,
        request: Request<v1::ReleaseLatentRequest>,
    ) -> Result<Response<v1::ReleaseLatentResponse>, Status> {
        let released = self.queue.release_latent(&request.into_inner().latent_id).await;
        Ok(Response::new(v1::ReleaseLatentResponse { released }))
    }
}

/// A job that is ready to be queued, with what its stream will need.
pub(super) struct Prepared {
    pub(super) spec: JobSpec,
    pub(super) model: v1::ResolvedModel,
    pub(super) output: Output,
}

impl Service {
    /// Opens a model away from the async threads: headers are read.
    pub(super) async fn open(&self, entry: &Arc<Entry>) -> Result<OpenModel, Error> {
        let (library, card, entry) = (self.library.clone(), self.first_card(), entry.clone());
        let opened = tokio::task::spawn_blocking(move || library.open(&entry, &card)).await;
        opened.map_err(|panic| Error::Internal(panic.to_string()))?
    }

    /// The entry that a reference means: folders may be looked through.
    pub(super) async fn entry(&self, model: Option<v1::ModelRef>) -> Result<Arc<Entry>, Error> {
        let models = self.models.clone();
        let resolved = tokio::task::spawn_blocking(move || models.resolve(model.as_ref())).await;
        resolved.map_err(|panic| Error::Internal(panic.to_string()))?
    }

    /// Turns a request into a job, with the model's defaults in.
    pub(super) async fn prepare_generate(
        &self,
        request: v1::GenerateImageRequest,
        caller: &Caller,
    ) -> Result<Prepared, Error> {
        check_generate(&request)?;
        let entry = self.entry(request.model.clone()).await?;
        let open = self.open(&entry).await?;
        let defaults = self.models.defaults(&entry.id, open.model.defaults());
        let (width, height, init_image) = self.size_and_start(&request, defaults).await?;
        let image = ImageRequest {
            prompt: request.prompt,
            width,
            height,
            steps: or(request.steps, defaults.steps),
            guidance: request.guidance.unwrap_or(defaults.guidance),
            seed: request.seed.unwrap_or_else(|| seed_of(request.options.as_ref())),
            max_sequence_length: or(request.max_sequence_length, defaults.max_sequence_length),
            strength: request.strength.unwrap_or(DEFAULT_STRENGTH),
            init_image,
            preview: request.preview_interval_ms > 0,
        };
        let output = Output {
            raw: request.output == v1::OutputFormat::RawRgb as i32,
            recipe: recipe_of(&image, &entry, !request.init_latent_id.is_empty()),
            omit_metadata: request.omit_metadata,
        };
        let work = JobWork::Generate(Generate {
            request: image,
            count: request.count.max(1),
            keep_latent: request.keep_latent || request.latent_only,
            latent_only: request.latent_only,
            preview_interval_ms: request.preview_interval_ms,
            init_latent: Some(request.init_latent_id).filter(|id| !id.is_empty()),
        });
        let model = resolved(&entry, &open);
        let spec = JobSpec {
            options: caller.options(request.options)?,
            entry,
            work,
        };
        Ok(Prepared { spec, model, output })
    }

    /// Size of the picture and the image to start from. A size that is left open is that of what it starts
    /// from, cut to a multiple of 16, or the model's default.
    async fn size_and_start(
        &self,
        request: &v1::GenerateImageRequest,
        defaults: Defaults,
    ) -> Result<(u32, u32, Option<InitImage>), Error> {
        if !request.init_latent_id.is_empty() {
            let latent = self.queue.latent(&request.init_latent_id).await?;
            let side = |n: usize| u32::try_from(n * 8).unwrap_or(u32::MAX);
            let (height, width) = match latent.info.shape[..] {
                [_, _, h, w] => (side(h), side(w)),
                _ => (defaults.height, defaults.width),
            };
            return Ok((or(request.width, width), or(request.height, height), None));
        }
        if request.init_image.is_empty() {
            return Ok((
                or(request.width, defaults.width),
                or(request.height, defaults.height),
                None,
            ));
        }
        let asked = (request.width > 0 && request.height > 0).then_some((request.width, request.height));
        let pixels = self
            .decode_picture("init_image", request.init_image.clone(), asked)
            .await?;
        let cut = |side: u32| (side / 16 * 16).min(LONGEST_SIDE_PIXELS);
        let width = or(request.width, cut(pixels.width));
        let height = or(request.height, cut(pixels.height));
        let pixels = if (pixels.width, pixels.height) == (width, height) {
            pixels
        } else {
            self.decode_picture("init_image", request.init_image.clone(), Some((width, height)))
                .await?
        };
        Ok((width, height, Some(init_image(pixels))))
    }

    /// Decodes and scales a client's picture, as many at a time as there are processors: each may take a quarter
    /// of a GiB.
    async fn decode_picture(
        &self,
        field: &'static str,
        data: bytes::Bytes,
        scale_to: Option<(u32, u32)>,
    ) -> Result<Pixels, Error> {
        let _turn = self
            .decoding
            .acquire()
            .await
            .map_err(|closed| Error::Internal(closed.to_string()))?;
        let decoded = tokio::task::spawn_blocking(move || pictures::decode(&data, scale_to)).await;
        decoded
            .map_err(|panic| Error::Internal(panic.to_string()))?
            .map_err(|problem| invalid(field, problem.to_string()))
    }

    async fn start_encode(
        &self,
        request: v1::EncodeImageRequest,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let entry = self.entry(request.model.clone()).await?;
        let open = self.open(&entry).await?;
        let asked = (request.width > 0 && request.height > 0).then_some((request.width, request.height));
        match asked {
            Some((width, height)) => check_sides(width, height)?,
            None if request.width != request.height => {
                let problem = "one side is named: name both, or neither".to_owned();
                return Err(invalid(
                    if request.width == 0 { "width" } else { "height" },
                    problem,
                ));
            }
            None => {}
        }
        let pixels = self.decode_picture("image", request.image, asked).await?;
        check_sides(pixels.width, pixels.height)?;
        let image = ImageRequest {
            prompt: String::new(),
            width: pixels.width,
            height: pixels.height,
            steps: 1,
            guidance: 0.0,
            seed: request.seed,
            max_sequence_length: 1,
            strength: 1.0,
            init_image: Some(init_image(pixels)),
            preview: false,
        };
        let output = Output {
            raw: false,
            recipe: recipe_of(&image, &entry, false),
            omit_metadata: true,
        };
        let model = resolved(&entry, &open);
        let work = JobWork::Encode { request: image };
        let spec = JobSpec {
            options: caller.options(request.options)?,
            entry,
            work,
        };
        Ok(events_of(self.queue.submit(spec).await?, model, output))
    }

    async fn start_decode(
        &self,
        request: v1::DecodeLatentRequest,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let entry = self.entry(request.model.clone()).await?;
        let open = self.open(&entry).await?;
        let output = Output {
            raw: request.output == v1::OutputFormat::RawRgb as i32,
            recipe: Recipe::default(),
            omit_metadata: true,
        };
        let model = resolved(&entry, &open);
        let work = JobWork::Decode {
            latent: request.latent_id,
        };
        let spec = JobSpec {
            options: caller.options(request.options)?,
            entry,
            work,
        };
        Ok(events_of(self.queue.submit(spec).await?, model, output))
    }
}

/// What can be said of a request before its model is known: all of it at once.
fn check_generate(request: &v1::GenerateImageRequest) -> Result<(), Error> {
    let mut problems = Vec::new();
    let mut problem = |field: &str, problem: String| {
        problems.push(pipelines::RequestError {
            field: field.to_owned(),
            problem,
        });
    };
    let characters = request.prompt.chars().count();
    if characters > LONGEST_PROMPT_CHARACTERS {
        problem(
            "prompt",
            format!("has {characters} characters; {LONGEST_PROMPT_CHARACTERS} are the most"),
        );
    }
    for (field, value) in [("width", request.width), ("height", request.height)] {
        if !value.is_multiple_of(16) {
            let below = (value / 16 * 16).max(16);
            let above = below.saturating_add(16);
            problem(
                field,
                format!("{value} is no multiple of 16; {below} and {above} are"),
            );
        } else if value > LONGEST_SIDE_PIXELS {
            problem(field, format!("{value} is more than {LONGEST_SIDE_PIXELS}"));
        }
    }
    if request.count > MOST_PICTURES {
        problem("count", format!("{} is more than {MOST_PICTURES}", request.count));
    }
    if (1..LEAST_PREVIEW_INTERVAL_MS).contains(&request.preview_interval_ms) {
        problem(
            "preview_interval_ms",
            format!("is less than {LEAST_PREVIEW_INTERVAL_MS}; 0 leaves previews off"),
        );
    }
    if let Some(strength) = request.strength
        && !(strength > 0.0 && strength <= 1.0)
    {
        problem("strength", format!("{strength} is not over 0 and up to 1"));
    }
    if !request.init_image.is_empty() && !request.init_latent_id.is_empty() {
        problem("init_latent_id", "excludes init_image: leave one out".to_owned());
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(Error::Invalid(problems))
    }
}

fn check_sides(width: u32, height: u32) -> Result<(), Error> {
    let fits = |side: u32| side > 0 && side.is_multiple_of(16) && side <= LONGEST_SIDE_PIXELS;
    if fits(width) && fits(height) {
        return Ok(());
    }
    let problem = format!(
        "{width}x{height} is no multiple of 16 up to {LONGEST_SIDE_PIXELS} on both sides; name width and height to \
         scale it"
    );
    Err(invalid("image", problem))
}

fn init_image(pixels: Pixels) -> InitImage {
    InitImage {
        width: pixels.width,
        height: pixels.height,
        rgb: pixels.rgb.into(),
    }
}

fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

/// A seed for a request that names none: random, but for an idempotency key always the same, so that asking
/// again is the same request. Of 32 bits: other tools take no more.
fn seed_of(options: Option<&v1::JobOptions>) -> u64 {
    let key = options.map_or("", |options| options.idempotency_key.as_str());
    let seed = if key.is_empty() {
        uuid::Uuid::new_v4().as_u128() as u64
    } else {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        hasher.finish()
    };
    seed & 0xffff_ffff
}

fn recipe_of(image: &ImageRequest, entry: &Entry, from_latent: bool) -> Recipe {
    Recipe {
        prompt: image.prompt.clone(),
        seed: image.seed,
        width: image.width,
        height: image.height,
        steps: image.steps,
        guidance: image.guidance,
        max_sequence_length: image.max_sequence_length,
        strength: (image.init_image.is_some() || from_latent).then_some(image.strength),
        model: entry.id.clone(),
        model_key: entry.key.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_field_is_told_at_once() {
        let request = v1::GenerateImageRequest {
            prompt: "x".repeat(100_000),
            width: 17,
            height: 130,
            count: 1000,
            strength: Some(f32::NAN),
            preview_interval_ms: 5,
            ..Default::default()
        };
        let Err(Error::Invalid(problems)) = check_generate(&request) else {
            panic!("it passed")
        };
        let fields: Vec<&str> = problems.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "prompt",
                "width",
                "height",
                "count",
                "preview_interval_ms",
                "strength"
            ]
        );
    }
}
