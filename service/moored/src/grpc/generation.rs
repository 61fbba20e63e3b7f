//! `moored.v1.Generation`.

use std::pin::Pin;
use std::sync::Arc;

use engine::Error;
use engine::job::{JobOptions, JobSpec, JobWork, Run, Start};
use engine::library::{Entry, OpenModel};
use futures::Stream;
use pipelines::{Clip, Image, InitImage, MediaFormat, Medium, Role};
use tonic::{Request, Response, Status, Streaming};

use super::asked::{Asked, LONGEST_SIDE_PIXELS, StartFrom, check_output};
use super::caller::Caller;
use super::choose::{Chosen, left_open};
use super::convert::{latent_out, resolved};
use super::given_pictures::{GivenPictures, controls_of, mask_of};
use super::latent_upload::receive_latent;
use super::limits::Taken;
use super::media::Media;
use super::server::Service;
use super::sessions::SessionStream;
use super::status::{invalid, short, status_of};
use super::stream::{CHUNK_BYTES, Encoding, EventStream, Output, events_of};
use crate::models::Models;
use crate::pictures::Recipe;
use crate::proto::v1;
use crate::proto::v1::generation_server::Generation;
use crate::threads::on_thread;

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
        let (values, decoder_id) = receive_latent(request.into_inner(), self.latents).await?;
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
    /// Opens a model away from the async threads: headers are read.
    pub(super) async fn open(&self, entry: &Arc<Entry>) -> Result<OpenModel, Error> {
        let (library, card, entry) = (self.library.clone(), self.first_card(), entry.clone());
        let path = entry.path.clone();
        let opened = self.library.aside(&path, move || library.open(&entry, &card));
        opened.await
    }

    /// The entry that a reference means: folders may be looked through, and formats chosen.
    pub(super) async fn entry(&self, model: Option<v1::ModelRef>) -> Result<Arc<Entry>, Error> {
        Ok(self.chosen(model, &[], &JobOptions::default()).await?.entry)
    }

    /// As [`Service::entry`], with these ControlNets, and the reason for the formats where the service chose them for a job with
    /// these options.
    pub(super) async fn chosen(
        &self,
        model: Option<v1::ModelRef>,
        controls: &[v1::Control],
        options: &JobOptions,
    ) -> Result<Chosen, Error> {
        model.as_ref().map_or(Ok(()), check_reference)?;
        if let Some(open) = model.as_ref().map(left_open).transpose()?.flatten() {
            let stored = self.models.entry(Some(open)).await?;
            let stored = self.with_control_nets(stored, controls).await?;
            return self.choose(stored, controls, options.clone()).await;
        }
        let entry = self.library.canonical(self.models.entry(model).await?).await?;
        Ok(Chosen {
            entry: self.with_control_nets(entry, controls).await?,
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
        let adapters = self.models.adapters_named(asked.model.as_ref())?;
        let resolved_for = async {
            let chosen = self
                .chosen(asked.model.clone(), &asked.controls, &options)
                .await?;
            let open = self.open(&chosen.entry).await?;
            Ok::<_, Error>((chosen, open))
        };
        let (Chosen { entry, reason }, open) = resolved_for
            .await
            .map_err(|error| self.named_by_field(error, &adapters, &asked.controls))?;
        let mut request = self.models.defaults(&entry.id, open.model.defaults());
        request.adapters = Models::uses_of(&entry, &adapters)?;
        if let Some(id) = &asked.init_latent {
            let values = self.queue.latent(id).await?.info.values;
            if let Some(of_latent) = open.model.request_of(&values) {
                request.medium = of_latent.medium;
            }
        }
        let (given, start) = self.given_pictures(&asked, &request.medium, &*open.model).await?;
        let references = Service::references_of(&given, &*open.model)?;
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
            let size = (image.width, image.height);
            image.mask = mask_of(&given, size);
            image.references = references;
            image.controls = controls_of(&asked.controls, &entry, size);
        }
        let decoded = self.decode_pictures(&mut request, given, &open.model, caller.client());
        let decoded = decoded.await?;
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
        Ok(Prepared {
            spec,
            model,
            output,
            decoded,
        })
    }

    /// An uploaded track, by its id.
    fn track(&self, field: &'static str, id: &str) -> Result<Clip, Error> {
        match self.media.get(field, id)? {
            Media::Clip(clip) if matches!(clip.format, MediaFormat::Audio { .. }) => Ok(clip),
            Media::Clip(_) | Media::Picture(_) => Err(invalid(field, "is no track")),
        }
    }

    /// An error of opening a model, where an adapter is at fault, as that of the field that names the adapter.
    fn named_by_field(&self, error: Error, adapters: &[v1::Adapter], controls: &[v1::Control]) -> Error {
        let Error::Adapter { name, problem } = &error else {
            return error;
        };
        let is_it = |id: &str| self.models.adapter_name(id).is_some_and(|known| known == *name);
        let control = controls.iter().position(|control| is_it(&control.id));
        let adapter = adapters.iter().position(|adapter| is_it(&adapter.id));
        let field = match (control, adapter) {
            (Some(index), _) => format!("controls[{index}].id"),
            (None, Some(index)) => format!("model.adapters[{index}].id"),
            (None, None) => return error,
        };
        invalid(&field, format!("{name:?} cannot be attached: {problem}"))
    }

    /// The entry with the ControlNets that a request names.
    async fn with_control_nets(
        &self,
        entry: Arc<Entry>,
        controls: &[v1::Control],
    ) -> Result<Arc<Entry>, Error> {
        if controls.is_empty() {
            return Ok(entry);
        }
        let ids: Vec<String> = controls.iter().map(|control| control.id.clone()).collect();
        let models = self.models.clone();
        let with = on_thread(move || models.with_control_nets(&entry, &ids)).await?;
        with.map(Arc::new)
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
        let given = self.given_picture("image", request.image).await?;
        let (width, height) = asked.unwrap_or(given.size);
        check_sides(width, height)?;
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
            Medium::Image(_) => Encoding::Png,
            Medium::Audio(_) => Encoding::Wav,
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
