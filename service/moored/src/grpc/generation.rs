//! `moored.v1.Generation`.

use std::pin::Pin;

use api::v1;
use api::v1::generation_server::Generation;
use engine::Error;
use engine::job::{Call, JobOptions, JobSpec, JobWork, Run, Start};
use engine::library::{Entry, OpenModel};
use futures::Stream;
use hub::catalogue::Makes;
use media::{MadeWith, Recipe};
use pipelines::{Image, InitImage, Medium, Model, Role};
use tonic::{Request, Response, Status, Streaming};

use super::asked::{Asked, StartFrom, check_output, encoding_of_film};
use super::caller::Caller;
use super::choose::Chosen;
use super::convert::{latent_out, left_out_out, resolved};
use super::given_pictures::{GivenPictures, controls_of, mask_of};
use super::latent_upload::receive_latent;
use super::limits::Taken;
use super::server::Service;
use super::sessions::SessionStream;
use super::status::{invalid, status_of};
use super::stream::{CHUNK_BYTES, Encoding, EventStream, Output, events_of};
use crate::models::Models;

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
        let account = Caller::of(&request).account();
        let (values, decoder_id) = receive_latent(request.into_inner(), self.latents).await?;
        let info = self
            .queue
            .put_latent(values, decoder_id, account)
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
        let info = self
            .media
            .receive(request.into_inner(), client, &self.decoding)
            .await?;
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
    /// Bytes of its pictures, which count against the client until it is dropped: the queue has the job then, and bounds it.
    pub(super) decoded: Option<Taken>,
}

impl Service {
    async fn generate(&self, asked: Asked, caller: &Caller) -> Result<Response<EventStream>, Status> {
        let started = async {
            let prepared = self.prepare(asked, caller).await?;
            let Prepared {
                spec,
                model,
                output,
                decoded: _until_it_is_queued,
            } = prepared;
            self.start(spec, model, output, caller).await
        };
        started.await.map(Response::new).map_err(|e| status_of(&e))
    }

    /// Queues a job; its events go to the caller.
    pub(super) async fn start(
        &self,
        spec: JobSpec,
        model: v1::ResolvedModel,
        output: Output,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let instead = match &spec.work {
            JobWork::Run(run) => self.fitting_instead(Makes::of(&run.request.medium), &spec.entry.id),
            JobWork::Load { .. } => None,
        };
        let job = self.queue.submit(spec).await?;
        for left_out in &output.left_out {
            tracing::warn!(job = %job.id, "{}", left_out.message);
        }
        Ok(events_of(job, model, output, self.encoder(caller), instead))
    }

    /// Turns a request into a job, with the model's defaults in.
    pub(super) async fn prepare(&self, mut asked: Asked, caller: &Caller) -> Result<Prepared, Error> {
        asked.check()?;
        asked.model = Some(self.of_medium(asked.model.take(), asked.makes()).await?);
        let options = caller.options(asked.options.clone(), &self.cards())?;
        let opened = self.opened(asked.model.clone(), &asked.controls, &options);
        let (Chosen { entry, reason }, open, adapters) = opened.await?;
        let mut defaults = self.models.defaults(&entry.id, open.model.defaults());
        defaults.adapters = Models::uses_of(&entry, &adapters)?;
        let (request, decoded) = self
            .resolved_request(&asked, defaults, &entry, &open, caller)
            .await?;
        let ignores = entry.adapters.iter().filter(|file| file.ignores_unknown);
        let with = MadeWith {
            model: &entry.id,
            model_key: entry.base_key(),
            ignores_unknown: &ignores.map(|file| file.name.as_str()).collect::<Vec<_>>(),
        };
        let output = Output {
            encoding: asked.encoding,
            recipe: Recipe::of(&request, &with, asked.init_latent.is_some()),
            omit_metadata: asked.omit_metadata,
            left_out: open.model.left_out(&request).iter().map(left_out_out).collect(),
        };
        let role = Role::Sample;
        let run = Run {
            count: asked.count.max(1),
            start: asked.init_latent.map(|latent| Start { latent, role }),
            until: if asked.latent_only {
                Role::Sample
            } else {
                Role::Decode
            },
            keep_latent: asked.keep_latent || asked.latent_only,
            preview_interval_ms: asked.preview_interval_ms,
            ..whole_run(asked.call, request)
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
        Ok(Prepared {
            spec,
            model,
            output,
            decoded,
        })
    }

    /// The default request of a model as a job to be planned.
    pub(super) async fn prepare_default(&self, model: v1::ModelRef) -> Result<Prepared, Error> {
        let options = JobOptions::default();
        let opened = self.opened(Some(model), &[], &options);
        let (Chosen { entry, reason }, open, adapters) = opened.await?;
        let mut request = self.default_request(&entry, &*open.model);
        request.adapters = Models::uses_of(&entry, &adapters)?;
        let model = v1::ResolvedModel {
            choice: reason,
            ..resolved(&entry, &open)
        };
        Ok(Prepared {
            spec: JobSpec {
                options,
                entry,
                work: JobWork::Run(whole_run(Call::Plan, request)),
            },
            model,
            output: Output::without_recipe(Encoding::Raw),
            decoded: None,
        })
    }

    /// What is asked for, over the defaults of an open model: with sizes, and media decoded. The bytes of its pictures count
    /// against the client until they are dropped.
    async fn resolved_request(
        &self,
        asked: &Asked,
        mut defaults: pipelines::Request,
        entry: &Entry,
        open: &OpenModel,
        caller: &Caller,
    ) -> Result<(pipelines::Request, Option<Taken>), Error> {
        let model = &*open.model;
        if let Some(id) = &asked.init_latent {
            let values = self.queue.latent(id).await?.info.values;
            if let Some(of_latent) = model.request_of(&values) {
                defaults.medium = of_latent.medium;
            }
        }
        if Makes::of(&defaults.medium) != asked.makes() {
            return Err(self
                .other_medium(&entry.id, &defaults.medium, asked.makes())
                .await);
        }
        let (given, start) = self.given_pictures(asked, &defaults.medium, model).await?;
        let references = Service::references_of(&given, model)?;
        if let (Medium::Image(image), [first, ..]) = (&mut defaults.medium, &references[..])
            && matches!(start, StartFrom::Nothing)
            && asked.init_latent.is_none()
        {
            (image.width, image.height) = (first.width, first.height);
        }
        let size_near = |width, height| model.size_near(width, height);
        let mut request = asked.request(defaults, start, size_near)?;
        if let (Some(seconds), Medium::Video(video)) = (asked.film_seconds(), &mut request.medium) {
            video.frames = model.frames_of(seconds, video.frames_per_second);
        }
        asked.check_output(&request)?;
        if let Medium::Image(image) = &mut request.medium {
            let size = (image.width, image.height);
            image.mask = mask_of(&given, size);
            image.references = references;
            image.controls = controls_of(&asked.controls, entry, size);
        }
        let decoded = self.decode_pictures(&mut request, given, &open.model, caller.client());
        let decoded = decoded.await?;
        if let (Medium::Audio(audio), Some(id)) = (&mut request.medium, asked.reference_media()) {
            audio.reference = Some(self.media.track(REFERENCE_MEDIA, id)?);
        }
        Ok((request, decoded))
    }

    async fn start_encode(
        &self,
        request: v1::EncodeImageRequest,
        caller: &Caller,
    ) -> Result<EventStream, Error> {
        let entry = self.entry(request.model.clone()).await?;
        let open = self.open(&entry).await?;
        let asked = (request.width > 0 && request.height > 0).then_some((request.width, request.height));
        if asked.is_none() && request.width != request.height {
            let field = if request.width == 0 { "width" } else { "height" };
            return Err(invalid(field, "one side is named: name both, or neither"));
        }
        let given = self
            .given_picture("image", request.image.unwrap_or_default())
            .await?;
        let (width, height) = asked.unwrap_or(given.size);
        check_size((width, height), &*open.model)?;
        let image = Image {
            init_image: Some(InitImage::of_size((width, height))),
            ..Image::of(width, height)
        };
        let mut image = pipelines::Request::of(Medium::Image(image), 1, 0.0, 1);
        image.seed = request.seed;
        let given = GivenPictures::of_start(given);
        let decoded = self.decode_pictures(&mut image, given, &open.model, caller.client());
        let _decoded = decoded.await?;
        let run = Run {
            until: Role::Encode,
            keep_latent: true,
            ..whole_run(Call::EncodeImage, image)
        };
        let model = resolved(&entry, &open);
        let spec = JobSpec {
            options: caller.options(request.options, &self.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(Encoding::Png);
        self.start(spec, model, output, caller).await
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
            Medium::Video(_) => encoding_of_film(request.film_output),
            _ if request.output == v1::OutputFormat::RawRgb as i32 => Encoding::Raw,
            Medium::Image(_) => Encoding::Png,
            Medium::Audio(_) => Encoding::Wav,
        };
        check_output("film_output", encoding, &of_latent)?;
        let run = Run {
            start: Some(Start {
                latent: request.latent_id,
                role: Role::Decode,
            }),
            ..whole_run(Call::DecodeLatent, of_latent)
        };
        let model = resolved(&entry, &open);
        let spec = JobSpec {
            options: caller.options(request.options, &self.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(encoding);
        self.start(spec, model, output, caller).await
    }
}

/// The field with the id of the track whose timbre is taken.
const REFERENCE_MEDIA: &str = "reference_media_id";

/// All stages of one result, of which nothing else is kept or shown.
pub(super) fn whole_run(call: Call, request: pipelines::Request) -> Run {
    Run {
        call,
        request,
        count: 1,
        start: None,
        until: Role::Decode,
        keep_latent: false,
        preview_interval_ms: 0,
    }
}

fn check_size((width, height): (u32, u32), model: &dyn Model) -> Result<(), Error> {
    let near = model.size_near(width, height);
    if near == (width, height) {
        return Ok(());
    }
    let problem = format!(
        "{width}x{height} is no size that this model makes, and {}x{} is; name width and height to scale it",
        near.0, near.1
    );
    Err(invalid("image", problem))
}
