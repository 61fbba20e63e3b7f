//! `moored.v1.Generation`.

use std::pin::Pin;
use std::sync::Arc;

use engine::Error;
use engine::job::{JobOptions, JobSpec, JobWork, Run, Start};
use engine::library::{Entry, OpenModel};
use futures::Stream;
use pipelines::{Clip, ControlUse, Image, InitImage, Mask, MediaFormat, Medium, Model, Role};
use tonic::{Request, Response, Status, Streaming};

use super::asked::{Asked, LONGEST_SIDE_PIXELS, StartFrom, check_output};
use super::caller::Caller;
use super::choose::{Chosen, left_open};
use super::convert::{latent_out, resolved};
use super::latent_upload::receive_latent;
use super::media::Media;
use super::server::Service;
use super::sessions::SessionStream;
use super::status::{invalid, short, status_of};
use super::stream::{CHUNK_BYTES, Encoding, EventStream, Output, events_of};
use crate::models::Models;
use crate::pictures::{self, PictureError, Pixels, Recipe};
use crate::proto::v1;
use crate::proto::v1::generation_server::Generation;

#[tonic::async_trait]
impl Generation for Service {
    type GenerateImageStream = EventStream;

    async fn generate_image(
        &self,
        request: Request<v1::GenerateImageRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let asked = Asked::image(request.into_inner());
        self.generate(asked, &caller).await
    }

    type GenerateVideoStream = EventStream;

    async fn generate_video(
        &self,
        request: Request<v1::GenerateVideoRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let asked = Asked::video(request.into_inner());
        self.generate(asked, &caller).await
    }

    type GenerateAudioStream = EventStream;

    async fn generate_audio(
        &self,
        request: Request<v1::GenerateAudioRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let asked = Asked::audio(request.into_inner());
        self.generate(asked, &caller).await
    }

    type StreamAudioStream = SessionStream;

    async fn stream_audio(
        &self,
        request: Request<Streaming<v1::StreamAudioRequest>>,
    ) -> Result<Response<SessionStream>, Status> {
        let caller = Caller::of(&request);
        let session = self.open_session(request.into_inner(), caller).await;
        session.map(Response::new)
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
        let mut info = Some(latent_out(&latent.info));
        // Tensor after tensor, in the order of `info.tensors`, none of them copied.
        let slices = latent.values.into_values().flat_map(|tensor| {
            let bytes = tensor.data.len();
            let starts = (0..bytes.max(1)).step_by(CHUNK_BYTES);
            starts.map(move |start| tensor.data.slice(start..(start + CHUNK_BYTES).min(bytes)))
        });
        let chunks = slices.map(|chunk| {
            let info = info.take();
            Ok(v1::LatentChunk { info, chunk })
        });
        Ok(Response::new(Box::pin(futures::stream::iter(
            chunks.collect::<Vec<_>>(),
        ))))
    }

    async fn put_latent(
        &self,
        request: Request<Streaming<v1::LatentChunk>>,
    ) -> Result<Response<v1::LatentInfo>, Status> {
        let (values, decoder_id) = receive_latent(request.into_inner()).await?;
        let info = self
            .queue
            .put_latent(values, decoder_id)
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

    async fn put_media(
        &self,
        request: Request<Streaming<v1::MediaChunk>>,
    ) -> Result<Response<v1::MediaInfo>, Status> {
        let client = Caller::of(&request).client();
        let info = self.media.receive(request.into_inner(), client).await?;
        Ok(Response::new(info))
    }

    async fn release_media(
        &self,
        request: Request<v1::ReleaseMediaRequest>,
    ) -> Result<Response<v1::ReleaseMediaResponse>, Status> {
        let released = self.media.release(&request.into_inner().media_id);
        Ok(Response::new(v1::ReleaseMediaResponse { released }))
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
        let path = entry.path.clone();
        let opened = self.library.aside(&path, move || library.open(&entry, &card));
        opened.await
    }

    /// The entry that a reference means: folders may be looked through, and formats chosen.
    pub(super) async fn entry(&self, model: Option<v1::ModelRef>) -> Result<Arc<Entry>, Error> {
        Ok(self.chosen(model, &JobOptions::default()).await?.entry)
    }

    /// As [`Service::entry`], with the reason for the formats where the service chose them for a job with these options.
    pub(super) async fn chosen(
        &self,
        model: Option<v1::ModelRef>,
        options: &JobOptions,
    ) -> Result<Chosen, Error> {
        model.as_ref().map_or(Ok(()), check_reference)?;
        if let Some(open) = model.as_ref().map(left_open).transpose()?.flatten() {
            let stored = self.models.entry(Some(open)).await?;
            return self.choose(stored, options.clone()).await;
        }
        let entry = self.library.canonical(self.models.entry(model).await?).await?;
        Ok(Chosen {
            entry,
            reason: String::new(),
        })
    }

    /// As [`Service::entry`], for what ends a use: where the files are gone, the entry as it was used.
    pub(super) async fn entry_in_use(&self, model: &v1::ModelRef) -> Result<Arc<Entry>, Error> {
        let gone = match self.entry(Some(model.clone())).await {
            Err(gone @ Error::ModelNotFound { .. }) => gone,
            Err(gone @ Error::Invalid(_)) if model.id.contains('&') || !model.adapters.is_empty() => gone,
            resolved => return resolved,
        };
        let known = self.queue.known_entries().await;
        let found = match left_open(model)? {
            Some(open) => known.into_iter().find(|entry| entry.id == open.id),
            None => self.models.find_known(model, known),
        };
        found.ok_or(gone)
    }

    async fn generate(&self, asked: Asked, caller: &Caller) -> Result<Response<EventStream>, Status> {
        let prepared = self.prepare(asked, caller).await.map_err(|e| status_of(&e))?;
        let job = self.queue.submit(prepared.spec).await;
        let job = job.map_err(|e| status_of(&e))?;
        Ok(Response::new(events_of(
            job,
            prepared.model,
            prepared.output,
            self.encoder(caller),
        )))
    }

    /// Turns a request into a job, with the model's defaults in.
    pub(super) async fn prepare(&self, asked: Asked, caller: &Caller) -> Result<Prepared, Error> {
        asked.check()?;
        let options = caller.options(asked.options.clone(), &self.cards())?;
        let Chosen { entry, reason } = self.chosen(asked.model.clone(), &options).await?;
        let entry = self.with_control_nets(entry, &asked).await?;
        let open = self.open(&entry).await?;
        let mut request = self.models.defaults(&entry.id, open.model.defaults());
        let adapters = self.models.adapters_named(asked.model.as_ref())?;
        request.adapters = Models::uses_of(&entry, &adapters)?;
        if let Some(id) = &asked.init_latent {
            let values = self.queue.latent(id).await?.info.values;
            if let Some(of_latent) = open.model.request_of(&values) {
                request.medium = of_latent.medium;
            }
        }
        let start = self.start_of(&asked, &request.medium).await?;
        let references = self.references_of(&asked, &*open.model).await?;
        if let (Medium::Image(image), [first, ..]) = (&mut request.medium, &references[..])
            && matches!(start, StartFrom::Nothing)
            && asked.init_latent.is_none()
        {
            (image.width, image.height) = (first.width, first.height);
        }
        let mut request = asked.request(request, start)?;
        if let (Some(seconds), Medium::Video(video)) = (asked.film_seconds(), &mut request.medium) {
            video.frames = open.model.frames_of(seconds, video.frames_per_second);
        }
        asked.check_output(&request)?;
        if let Medium::Image(image) = &mut request.medium {
            image.mask = self.mask_of(&asked, (image.width, image.height)).await?;
            image.references = references;
            image.controls = self
                .controls_of(&asked, &entry, (image.width, image.height))
                .await?;
        }
        if let (Medium::Audio(audio), Some(id)) = (&mut request.medium, asked.reference_media()) {
            audio.reference = Some(self.track(REFERENCE_MEDIA, id)?);
        }
        let output = Output {
            encoding: asked.encoding,
            recipe: Recipe::of(&request, &entry, asked.init_latent.is_some()),
            omit_metadata: asked.omit_metadata,
        };
        let role = Role::Sample;
        let run = Run {
            call: asked.call,
            request,
            count: asked.count.max(1),
            start: asked.init_latent.map(|latent| Start { latent, role }),
            until: if asked.latent_only {
                Role::Sample
            } else {
                Role::Decode
            },
            keep_latent: asked.keep_latent || asked.latent_only,
            preview_interval_ms: asked.preview_interval_ms,
        };
        let model = v1::ResolvedModel {
            choice: reason,
            ..resolved(&entry, &open)
        };
        let spec = JobSpec {
            options,
            entry,
            work: JobWork::Run(run),
        };
        Ok(Prepared { spec, model, output })
    }

    /// What a request starts from, other than a latent.
    async fn start_of(&self, asked: &Asked, defaults: &Medium) -> Result<StartFrom, Error> {
        const MEDIA: &str = "init_media_id";
        if let Some(clip) = &asked.source {
            return Ok(StartFrom::Clip(clip.clone()));
        }
        let (field, picture) = match &asked.init_media {
            None => ("init_image", asked.init_image.clone()),
            Some(id) => match self.media.get(MEDIA, id)? {
                Media::Clip(clip) => return Ok(StartFrom::Clip(clip)),
                Media::Picture(_) if defaults.size().is_none() => {
                    return Err(invalid(MEDIA, "is a picture, and a track starts from a track"));
                }
                Media::Picture(picture) => (MEDIA, picture),
            },
        };
        if picture.is_empty() || defaults.size().is_none() {
            return Ok(StartFrom::Nothing);
        }
        let image = self
            .init_image(field, picture, (asked.width, asked.height))
            .await?;
        Ok(StartFrom::Picture(image))
    }

    /// An uploaded track, by its id.
    fn track(&self, field: &'static str, id: &str) -> Result<Clip, Error> {
        match self.media.get(field, id)? {
            Media::Clip(clip) if matches!(clip.format, MediaFormat::Audio { .. }) => Ok(clip),
            Media::Clip(_) | Media::Picture(_) => Err(invalid(field, "is no track")),
        }
    }

    /// The bytes of a picture in a request.
    fn picture_data(&self, field: &'static str, picture: &v1::PictureInput) -> Result<bytes::Bytes, Error> {
        if picture.media_id.is_empty() {
            return Ok(picture.data.clone());
        }
        match self.media.get(field, &picture.media_id)? {
            Media::Picture(picture) => Ok(picture),
            Media::Clip(_) => Err(invalid(field, "is no picture")),
        }
    }

    /// The mask of a request, in the size of its picture.
    async fn mask_of(&self, asked: &Asked, size: (u32, u32)) -> Result<Option<Mask>, Error> {
        const MASK: &str = "mask";
        let Some(mask) = &asked.mask else {
            return Ok(None);
        };
        let data = self.picture_data(MASK, mask)?;
        let grey = self
            .decoded(MASK, move || pictures::decode_mask(&data, size))
            .await?;
        Ok(Some(Mask {
            width: size.0,
            height: size.1,
            grey: grey.into(),
        }))
    }

    /// The entry with the ControlNets that a request names.
    async fn with_control_nets(&self, entry: Arc<Entry>, asked: &Asked) -> Result<Arc<Entry>, Error> {
        if asked.controls.is_empty() {
            return Ok(entry);
        }
        let ids: Vec<String> = asked.controls.iter().map(|control| control.id.clone()).collect();
        let models = self.models.clone();
        let with = tokio::task::spawn_blocking(move || models.with_control_nets(&entry, &ids)).await;
        with.map_err(|panic| Error::Internal(panic.to_string()))?
            .map(Arc::new)
    }

    /// The ControlNets of a request, with their pictures in its size.
    async fn controls_of(
        &self,
        asked: &Asked,
        entry: &Entry,
        size: (u32, u32),
    ) -> Result<Vec<ControlUse>, Error> {
        const CONTROLS: &str = "controls.image";
        let mut controls = Vec::new();
        for control in &asked.controls {
            let image = control.image.clone().unwrap_or_default();
            let data = self.picture_data(CONTROLS, &image)?;
            let pixels = self.decode_picture(CONTROLS, data, Some(size)).await?;
            controls.push(ControlUse {
                name: Models::name_in(entry, &control.id),
                image: init_image(pixels),
                scale: control.scale.unwrap_or(1.0),
                start: control.start.unwrap_or(0.0),
                end: control.end.unwrap_or(1.0),
                mode: control.mode,
            });
        }
        Ok(controls)
    }

    /// The reference pictures of a request, in the sizes that the model takes.
    async fn references_of(&self, asked: &Asked, model: &dyn Model) -> Result<Vec<InitImage>, Error> {
        const REFERENCES: &str = "references";
        // Before they are decoded: each may take hundreds of megabytes.
        if let Some(problem) = model.too_many_references(asked.references.len()) {
            return Err(Error::Invalid(vec![problem]));
        }
        let mut references = Vec::new();
        for reference in &asked.references {
            let data = self.picture_data(REFERENCES, reference)?;
            let pixels = self.decode_picture(REFERENCES, data.clone(), None).await?;
            let size = model.reference_size(pixels.width, pixels.height);
            let size = size.map_err(|problem| Error::Invalid(vec![problem]))?;
            references.push(init_image(match size {
                Some(size) if size != (pixels.width, pixels.height) => {
                    self.decode_picture(REFERENCES, data, Some(size)).await?
                }
                Some(_) | None => pixels,
            }));
        }
        Ok(references)
    }

    /// A picture to start from. A side that is left open (0) is that of the picture, cut to a multiple of 16.
    async fn init_image(
        &self,
        field: &'static str,
        picture: bytes::Bytes,
        asked: (u32, u32),
    ) -> Result<InitImage, Error> {
        let named = (asked.0 > 0 && asked.1 > 0).then_some(asked);
        let pixels = self.decode_picture(field, picture.clone(), named).await?;
        let cut = |side: u32| (side / 16 * 16).min(LONGEST_SIDE_PIXELS);
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        let size = (or(asked.0, cut(pixels.width)), or(asked.1, cut(pixels.height)));
        let pixels = if (pixels.width, pixels.height) == size {
            pixels
        } else {
            self.decode_picture(field, picture, Some(size)).await?
        };
        Ok(init_image(pixels))
    }

    /// Decodes and scales a client's picture, as many at a time as there are processors: each may take a quarter
    /// of a GiB.
    async fn decode_picture(
        &self,
        field: &'static str,
        data: bytes::Bytes,
        scale_to: Option<(u32, u32)>,
    ) -> Result<Pixels, Error> {
        self.decoded(field, move || pictures::decode(&data, scale_to))
            .await
    }

    async fn decoded<T: Send + 'static>(
        &self,
        field: &'static str,
        decode: impl FnOnce() -> Result<T, PictureError> + Send + 'static,
    ) -> Result<T, Error> {
        let _turn = self
            .decoding
            .acquire()
            .await
            .map_err(|closed| Error::Internal(closed.to_string()))?;
        let decoded = tokio::task::spawn_blocking(decode).await;
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
        let (pixels_width, pixels_height) = (pixels.width, pixels.height);
        check_sides(pixels_width, pixels_height)?;
        let image = Image {
            init_image: Some(init_image(pixels)),
            ..Image::of(pixels_width, pixels_height)
        };
        let mut image = pipelines::Request::of(Medium::Image(image), 1, 0.0, 1);
        image.seed = request.seed;
        let run = Run {
            call: "EncodeImage",
            request: image,
            count: 1,
            start: None,
            until: Role::Encode,
            keep_latent: true,
            preview_interval_ms: 0,
        };
        let model = resolved(&entry, &open);
        let spec = JobSpec {
            options: caller.options(request.options, &self.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(Encoding::Png);
        Ok(events_of(
            self.queue.submit(spec).await?,
            model,
            output,
            self.encoder(caller),
        ))
    }

    async fn start_decode(
        &self,
        request: v1::DecodeLatentRequest,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let entry = self.entry(request.model.clone()).await?;
        let open = self.open(&entry).await?;
        let values = self.queue.latent(&request.latent_id).await?.info.values;
        let of_latent = open.model.request_of(&values).ok_or_else(|| {
            let (id, shapes) = (
                &request.latent_id,
                values.iter().map(|value| format!("{:?}", value.shape)),
            );
            let shapes = shapes.collect::<Vec<_>>().join(", ");
            Error::LatentMismatch(format!(
                "latent {id} is {shapes}, which {} does not decode",
                entry.key
            ))
        })?;
        let encoding = match of_latent.medium {
            Medium::Video(_) if request.film_output == v1::FilmFormat::Mp4 as i32 => Encoding::Mp4,
            Medium::Video(_) => Encoding::Raw,
            _ if request.output == v1::OutputFormat::RawRgb as i32 => Encoding::Raw,
            _ => Encoding::Png,
        };
        check_output("film_output", encoding, &of_latent)?;
        let run = Run {
            call: "DecodeLatent",
            request: of_latent,
            count: 1,
            start: Some(Start {
                latent: request.latent_id,
                role: Role::Decode,
            }),
            until: Role::Decode,
            keep_latent: false,
            preview_interval_ms: 0,
        };
        let model = resolved(&entry, &open);
        let spec = JobSpec {
            options: caller.options(request.options, &self.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(encoding);
        Ok(events_of(
            self.queue.submit(spec).await?,
            model,
            output,
            self.encoder(caller),
        ))
    }
}

/// The field with the id of the track whose timbre is taken.
const REFERENCE_MEDIA: &str = "reference_media_id";

/// Most components that formats can be named for.
const MOST_FORMATS: usize = 64;

/// The formats of a model are kept with its jobs, holds and pins; an id and a revision are those of a model that is here.
fn check_reference(model: &v1::ModelRef) -> Result<(), Error> {
    let Some(quantization) = &model.quantization else {
        return Ok(());
    };
    short("model.quantization.preset", &quantization.preset)?;
    if quantization.components.len() > MOST_FORMATS {
        let problem = format!(
            "names {} components; {MOST_FORMATS} are the most",
            quantization.components.len()
        );
        return Err(invalid("model.quantization.components", problem));
    }
    let mut words = quantization
        .components
        .iter()
        .flat_map(|(name, format)| [name, format]);
    words.try_for_each(|word| short("model.quantization.components", word))
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
