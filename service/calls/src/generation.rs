//! Calls that generate: pictures, films and tracks of a request, latents of pictures, and results of latents.

use std::sync::Arc;

use bytes::Bytes as Data;
use engine::Error;
use engine::job::{Call, JobOptions, JobSpec, JobWork, Latent, LatentInfo, Run, Start};
use engine::library::{Entry, OpenModel};
use engine::queue::{Job, Queue};
use hub::catalogue::Makes;
use media::{MadeWith, Recipe};
use model::{Image, InitImage, Medium, Model, Request, Role};
use residency::Bytes;
use tokio::sync::watch;

use crate::allowance::check_models;
use crate::asked::{Asked, StartFrom, check_output};
use crate::bounds::Bounds;
use crate::budget::{Budget, Taken};
use crate::caller::{AskedOptions, Caller};
use crate::choose::Chosen;
use crate::chunks::{Encoding, Output};
use crate::encodings::Encodings;
use crate::entries::Entries;
use crate::errors::{invalid, to_its_end};
use crate::kept::{ByKey, Detached, Kept};
use crate::latent_upload::LatentUpload;
use crate::media_store::{MediaStore, MediaUpload};
use crate::models::Models;
use crate::references::ModelRef;
use crate::request_pictures::{RequestPictures, end_of, mask_of};
use crate::resolved::ResolvedModel;
use crate::results::{ResultEncoder, Started, started};
use crate::runs::{controls_of, whole_run};
use crate::threads::Turns;

/// The kind of work that reads uploaded latents, with its own share of the turns of a client.
const LATENTS: &str = "latents";

/// Answers requests to generate. Cheap to clone.
#[derive(Clone)]
pub struct Generation {
    pub(crate) queue: Queue,
    pub(crate) kept: Kept,
    pub(crate) entries: Entries,
    pub(crate) bounds: Bounds,
    encodings: Arc<Encodings>,
    /// Media that clients have uploaded for later requests.
    pub(crate) media: Arc<MediaStore>,
    pub(crate) decoding: Turns,
    /// Bound on the bytes of all latents.
    latents: Bytes,
    /// Bytes of latents that clients read. They stay in memory until they are read, even if they are released meanwhile.
    read_latents: Arc<Budget>,
    /// True once the service is shutting down: sessions end then.
    pub(crate) stopping: watch::Receiver<bool>,
}

/// A picture to be encoded to a latent.
#[derive(Clone, Debug, Default)]
pub struct AskedEncode {
    pub model: ModelRef,
    /// PNG, JPEG or WebP.
    pub image: Data,
    /// Sides to which it is scaled; both 0: its own.
    pub width: u32,
    pub height: u32,
    pub seed: u64,
    pub options: Option<AskedOptions>,
}

/// A latent to be decoded.
#[derive(Clone, Debug, Default)]
pub struct AskedDecode {
    pub model: ModelRef,
    pub latent_id: String,
    /// Pictures and tracks as pixels and samples, not as files.
    pub raw: bool,
    /// How a film is sent.
    pub film: Encoding,
    pub options: Option<AskedOptions>,
}

impl Generation {
    pub(crate) fn new(
        entries: Entries,
        kept: Kept,
        encodings: Arc<Encodings>,
        bounds: Bounds,
        media: Arc<MediaStore>,
        latents: Bytes,
        stopping: watch::Receiver<bool>,
    ) -> Generation {
        Generation {
            queue: entries.queue.clone(),
            entries,
            kept,
            encodings,
            bounds,
            media,
            decoding: Turns::of_decoding(),
            latents,
            read_latents: Budget::with_places_kept(latents.0, latents.0),
            stopping,
        }
    }

    /// A stored latent, and its bytes, which count until they are dropped.
    ///
    /// # Errors
    /// [`Error::LatentNotFound`], and when this client or all of them read too many at a time.
    pub async fn latent(&self, id: &str, caller: &Caller) -> Result<(Latent, Taken), Error> {
        let latent = self.stored_latent(id, caller).await?;
        let taken = self.read_latents.take(caller.client(), latent.info.bytes.0);
        let taken = taken.map_err(|_| {
            let most = self.latents;
            Error::ClientLimit(format!(
                "the latents that are being read take more than {most} in all, or than is left of it: read one after another, or \
                 raise queue.latents"
            ))
        })?;
        Ok((latent, taken))
    }

    /// A latent of the store, or one that is kept with a detached job.
    async fn stored_latent(&self, id: &str, caller: &Caller) -> Result<Latent, Error> {
        let store = self.queue.within(caller.reach());
        match store.latent(id).await {
            Err(Error::LatentNotFound(missing)) => match self.kept.restore_latent(id, &caller.reach()).await?
            {
                true => store.latent(id).await,
                false => Err(Error::LatentNotFound(missing)),
            },
            found => found,
        }
    }

    /// Begins the upload of a latent.
    pub fn latent_upload(&self) -> LatentUpload {
        LatentUpload::new(self.latents)
    }

    /// Counts bytes of media and latents that a caller sends.
    ///
    /// # Errors
    /// When its token may send no more now.
    pub fn receive(&self, bytes: usize, caller: &Caller) -> Result<(), Error> {
        self.bounds.allowances.receive(bytes as u64, caller.holder())
    }

    /// Stores an uploaded latent.
    ///
    /// # Errors
    /// When it is not what its description says, or there is no room for it.
    pub async fn put_latent(&self, upload: LatentUpload, caller: &Caller) -> Result<LatentInfo, Error> {
        let owner = (LATENTS, caller.client());
        let read = self.decoding.run_of(owner, move |_| upload.finish()).await;
        let (values, decoder_id) = read??;
        self.queue.put_latent(values, decoder_id, caller.account()).await
    }

    /// Drops a latent; false when there was none.
    pub async fn release_latent(&self, id: &str, caller: &Caller) -> bool {
        let released = self.queue.within(caller.reach()).release_latent(id).await;
        self.kept.forget_latent(id, &caller.reach()).await || released
    }

    /// Begins the upload of media.
    pub fn media_upload(&self, caller: &Caller) -> MediaUpload {
        self.media
            .upload(caller.client(), caller.account(), &self.decoding)
    }

    /// Drops media; false when there was none. Jobs that use the media keep their copy.
    pub fn release_media(&self, id: &str, caller: &Caller) -> bool {
        self.media.release(id, &caller.reach())
    }

    /// Queues a request to generate.
    ///
    /// # Errors
    /// When the request is wrong, its model cannot be opened, or the queue has no room.
    pub async fn generate(&self, asked: Asked, caller: &Caller) -> Result<Started, Error> {
        let Prepared {
            spec,
            model,
            output,
            decoded: _until_it_is_queued,
        } = self.prepare(asked, caller).await?;
        self.start(spec, model, output, caller).await
    }

    /// Queues a job; its events go to the caller.
    pub(crate) async fn start(
        &self,
        spec: JobSpec,
        model: ResolvedModel,
        output: Output,
        caller: &Caller,
    ) -> Result<Started, Error> {
        let makes = match &spec.work {
            JobWork::Run(run) => Some(Makes::of(&run.request.medium)),
            JobWork::Load { .. } => None,
        };
        let (entries, id) = (self.entries.clone(), spec.entry.id.clone());
        let instead = move || entries.fitting_instead(makes?, &id);
        if let ByKey::Ended(id) = self.kept.by_key(&spec).await? {
            return self.kept.fetch(&id, &caller.reach());
        }
        let (job, keeper) = self.submit_kept(spec.clone(), caller).await?;
        let as_file = output.as_file_of(&spec.work);
        for left_out in &output.left_out {
            tracing::warn!(job = %job.id, "{left_out}");
        }
        let client = caller.client();
        let job = match keeper {
            Some(keeper) => {
                let detached = Detached {
                    spec,
                    output: output.clone(),
                    model: model.clone(),
                    client,
                };
                let (kept, instead) = (self.kept.clone(), instead.clone());
                to_its_end(async move { kept.take(job, keeper, detached, instead).await }).await?
            }
            None => job,
        };
        let encoder = ResultEncoder {
            encodings: self.encodings.clone(),
            client,
        };
        Ok(started(job, model, output, as_file, encoder, instead))
    }

    /// Puts a job into the queue that is not kept, if its caller's token may have it.
    pub(crate) async fn submit(&self, spec: JobSpec, caller: &Caller) -> Result<Job, Error> {
        Ok(self.submit_kept(spec, caller).await?.0)
    }

    /// Puts a job into the queue, if its caller's token may have it. Every job of a caller comes by here. A job that is detached by it
    /// has a second handle, for its keeper.
    async fn submit_kept(&self, mut spec: JobSpec, caller: &Caller) -> Result<(Job, Option<Job>), Error> {
        let (allowances, holder) = (&self.bounds.allowances, caller.holder());
        check_models(&spec, holder)?;
        let amounts = match allowances.admit(&spec, holder) {
            // A request that is sent again asks for nothing new if its job is there: it was counted the first time. Without places for
            // more jobs it can join that job, and nothing else.
            Err(refused) if !spec.options.idempotency_key.is_empty() => {
                spec.options.most_jobs = Some(0);
                return match self.queue.submit_kept(spec).await {
                    Err(Error::TokenLimit { .. }) => Err(refused),
                    joined => joined,
                };
            }
            amounts => amounts?,
        };
        let job = self.queue.submit_kept(spec).await;
        if job.as_ref().map_or(true, |(job, _)| job.joined) {
            allowances.forget(amounts, holder);
        }
        job
    }

    /// Turns a request into a job, with the model's defaults filled in.
    pub(crate) async fn prepare(&self, mut asked: Asked, caller: &Caller) -> Result<Prepared, Error> {
        asked.check()?;
        self.receive(asked.sent_bytes(), caller)?;
        let model = std::mem::take(&mut asked.model);
        asked.model = self.entries.of_medium(model, asked.makes()).await?;
        let options = caller.options(asked.options.clone(), &self.entries.cards())?;
        let opened = self
            .entries
            .opened(asked.model.clone(), &asked.controls, &options);
        let (Chosen { entry, reason }, open, adapters) = opened.await?;
        let mut defaults = self.entries.models.defaults(&entry.id, open.model.defaults());
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
            encoding: asked.encoding(),
            recipe: Recipe::of(&request, &with, asked.init_latent.is_some()),
            omit_metadata: asked.omit_metadata,
            left_out: open.model.left_out(&request),
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
        let model = ResolvedModel::of(&entry, &open, reason);
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

    /// The default request of a model, as a job to plan.
    pub(crate) async fn prepare_default(&self, model: ModelRef) -> Result<Prepared, Error> {
        let options = JobOptions::default();
        let opened = self.entries.opened(model, &[], &options);
        let (Chosen { entry, reason }, open, adapters) = opened.await?;
        let mut request = self.entries.default_request(&entry, &*open.model);
        request.adapters = Models::uses_of(&entry, &adapters)?;
        let model = ResolvedModel::of(&entry, &open, reason);
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

    /// The request with the defaults of an open model: sizes are set, and media are decoded. The bytes of its pictures count
    /// against the client until they are dropped.
    async fn resolved_request(
        &self,
        asked: &Asked,
        mut defaults: Request,
        entry: &Entry,
        open: &OpenModel,
        caller: &Caller,
    ) -> Result<(Request, Option<Taken>), Error> {
        let model = &*open.model;
        if let Some(id) = &asked.init_latent {
            let values = self.stored_latent(id, caller).await?.info.values;
            if let Some(of_latent) = model.request_of(&values) {
                defaults.medium = of_latent.medium;
            }
        }
        if Makes::of(&defaults.medium) != asked.makes() {
            return Err(self
                .entries
                .other_medium(&entry.id, &defaults.medium, asked.makes())
                .await);
        }
        let (pictures, start) = self
            .request_pictures(asked, &defaults.medium, model, &caller.reach())
            .await?;
        let [references, seen] = Generation::references_of(&pictures, model)?;
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
        check_output("output", asked.encoding(), &request)?;
        match &mut request.medium {
            Medium::Image(image) => {
                let size = (image.width, image.height);
                image.mask = mask_of(&pictures, size);
                image.references = references;
                image.seen = seen;
                image.controls = controls_of(&asked.controls, entry, size);
            }
            Medium::Video(video) => video.end_image = end_of(&pictures, (video.width, video.height)),
            Medium::Audio(_) => {}
        }
        let decoded = self.decode_pictures(&mut request, pictures, &open.model, caller.client());
        let decoded = decoded.await?;
        if let (Medium::Audio(audio), Some(id)) = (&mut request.medium, asked.reference_media()) {
            audio.reference = Some(self.media.track(REFERENCE_MEDIA, id, &caller.reach())?);
        }
        Ok((request, decoded))
    }

    /// Queues the encoding of a picture to a latent.
    ///
    /// # Errors
    /// When the request is wrong, its model cannot be opened, or the queue has no room.
    pub async fn encode(&self, request: AskedEncode, caller: &Caller) -> Result<Started, Error> {
        self.receive(request.image.len(), caller)?;
        let entry = self.entries.entry(request.model).await?;
        let open = self.entries.open(&entry).await?;
        let asked = (request.width > 0 && request.height > 0).then_some((request.width, request.height));
        if asked.is_none() && request.width != request.height {
            let field = if request.width == 0 { "width" } else { "height" };
            return Err(invalid(field, "one side is named: name both, or neither"));
        }
        let pictures = self.request_picture("image", request.image).await?;
        let (width, height) = asked.unwrap_or(pictures.size);
        check_size((width, height), &*open.model)?;
        let image = Image {
            init_image: Some(InitImage::of_size((width, height))),
            ..Image::of(width, height)
        };
        let mut image = Request::of(Medium::Image(image), 1, 0.0, 1);
        image.seed = request.seed;
        let pictures = RequestPictures::of_start(pictures);
        let decoded = self.decode_pictures(&mut image, pictures, &open.model, caller.client());
        let _decoded = decoded.await?;
        let run = Run {
            until: Role::Encode,
            keep_latent: true,
            ..whole_run(Call::EncodeImage, image)
        };
        let model = ResolvedModel::of(&entry, &open, String::new());
        let spec = JobSpec {
            options: caller.options(request.options, &self.entries.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(Encoding::Png);
        self.start(spec, model, output, caller).await
    }

    /// Queues the decoding of a latent.
    ///
    /// # Errors
    /// When there is no such latent, its model cannot be opened or does not decode it, or the queue has no room.
    pub async fn decode(&self, request: AskedDecode, caller: &Caller) -> Result<Started, Error> {
        let entry = self.entries.entry(request.model).await?;
        let open = self.entries.open(&entry).await?;
        let values = self.stored_latent(&request.latent_id, caller).await?.info.values;
        let of_latent = open.model.request_of(&values).ok_or_else(|| {
            let (id, shapes) = (
                &request.latent_id,
                values.iter().map(|value| format!("{:?}", value.shape)),
            );
            let shapes = shapes.collect::<Vec<_>>().join(", ");
            Error::LatentMismatch(format!(
                "latent {id} is {shapes}, which {} does not decode: name the model that it was made with",
                entry.key
            ))
        })?;
        let encoding = match of_latent.medium {
            Medium::Video(_) => request.film,
            _ if request.raw => Encoding::Raw,
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
        let model = ResolvedModel::of(&entry, &open, String::new());
        let spec = JobSpec {
            options: caller.options(request.options, &self.entries.cards())?,
            entry,
            work: JobWork::Run(run),
        };
        let output = Output::without_recipe(encoding);
        self.start(spec, model, output, caller).await
    }
}

/// A job that is ready to be queued, with the data that its stream needs.
pub(crate) struct Prepared {
    pub(crate) spec: JobSpec,
    pub(crate) model: ResolvedModel,
    pub(crate) output: Output,
    /// Bytes of its pictures, which count against the client until this is dropped. By then the queue has the job, and bounds those bytes.
    pub(crate) decoded: Option<Taken>,
}

/// The field with the id of the track whose timbre is taken.
const REFERENCE_MEDIA: &str = "reference_media_id";

fn check_size((width, height): (u32, u32), model: &dyn Model) -> Result<(), Error> {
    let near = model.size_near(width, height);
    if near == (width, height) {
        return Ok(());
    }
    let problem = format!(
        "is {width}x{height}, a size that this model does not support: set width and height (for example {}x{}) to scale it",
        near.0, near.1
    );
    Err(invalid("image", problem))
}
