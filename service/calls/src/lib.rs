//! ANSWERS. Calls of clients, in plain types: requests are checked, resolved to models and turned into jobs, and their results are
//! encoded. The layer of each protocol (such as gRPC) translates it into these calls, and uses nothing else of the service.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod allowance;
mod asked;
mod bounds;
mod budget;
mod by_medium;
mod caller;
mod card_memory;
mod choose;
mod chunks;
mod claims;
mod durations;
mod encodings;
mod entries;
mod errors;
mod generation;
mod host;
mod jobs;
#[allow(clippy::disallowed_methods)] // what waits for the disk takes a turn of its own threads
mod kept;
mod latent_upload;
mod log_interval;
mod media_store;
mod metrics;
#[allow(clippy::disallowed_methods)] // it looks through folders: its callers run it on threads that may block
pub mod models;
mod other_process;
pub mod paths;
mod playback;
mod pulls;
mod references;
mod request_pictures;
mod resolved;
mod result_files;
mod results;
mod runs;
mod sessions;
mod shared_files;
mod threads;
mod told;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use engine::Error;
use engine::library::Library;
use engine::queue::Queue;
use hub::Pulls;
use journal::Journal;
use residency::{Bytes, Policy};
use tokio::sync::watch;

pub use asked::{Asked, AskedTask, AskedTrack, OfMedium};
pub use bounds::Bounds;
pub use budget::{Budget, Client, Exceeded, Taken, Who, client_at, client_with};
pub use caller::{AskedOptions, Caller, account_of_token, is_of_token};
pub use card_memory::{
    AskedLoad, AskedReservation, CardMemory, ListedModel, Listing, ModelDetails, Plan, Planned,
    ServiceStatus, policy_name,
};
pub use chunks::{CHUNK_BYTES, Chunk, ChunkHead, Encoding};
pub use durations::millis;
use encodings::Encodings;
use entries::Entries;
pub use entries::first_card_of;
pub use errors::{LONGEST_MESSAGE_CHARACTERS, LONGEST_TEXT_CHARACTERS, MOST_LISTED, invalid, words_of};
pub use generation::{AskedDecode, AskedEncode, Generation};
pub use host::{Host, HostMemory, WorkerPids, watch as watch_host};
pub use jobs::{Jobs, ListedEnd, ListedJob};
pub use kept::KeepSettings;
use kept::Kept;
pub use latent_upload::{LatentDescription, LatentUpload};
pub use log_interval::LogInterval;
use media_store::MediaStore;
pub use media_store::{KeptMedia, MediaDescription, MediaUpload};
pub use metrics::Metrics;
pub use models::Models;
pub use playback::{Gap, Rendered, SegmentStart};
pub use pulls::{PullEvent, Pulling};
pub use references::{AskedAdapter, AskedControl, AskedFormats, ModelRef, PictureInput};
pub use resolved::ResolvedModel;
pub use results::{Event, EventKind, Events, Started};
pub use runs::load_for;
pub use sessions::{
    AskedSession, FromClient, OpenedSession, SESSION_MESSAGE_BYTES, SegmentFailure, SessionEnd, SessionEvent,
    SessionEvents, SessionRequest,
};
pub use told::{Kind, Told, told};

/// The parts of a service that its calls use.
pub struct Parts {
    pub queue: Queue,
    pub library: Arc<Library>,
    pub models: Arc<Models>,
    pub pulls: Pulls,
    pub bounds: Bounds,
    pub host: Arc<Host>,
    pub workers: WorkerPids,
    /// Eviction policy; `None`: by the model.
    pub policy: Option<Policy>,
    /// Bound on the bytes of all latents.
    pub latents: Bytes,
    /// Time without a use after which media of clients is dropped.
    pub media_ttl: Duration,
    /// What outlives the service.
    pub journal: Journal,
    pub keep: KeepSettings,
    /// What the service counts of itself; also an observer of its queue.
    pub metrics: Arc<Metrics>,
    /// True once the service says that it is not ready, which is before it is shutting down.
    pub leaving: watch::Receiver<bool>,
    /// True once the service is shutting down: endless streams end then.
    pub stopping: watch::Receiver<bool>,
}

/// All calls of a service, for the protocol layers. Cheap to clone.
#[derive(Clone)]
pub struct Service {
    pub generation: Generation,
    pub card_memory: CardMemory,
    pub jobs: Jobs,
    pub pulling: Pulling,
    /// Bytes of requests under way: the protocol servers count those that arrive.
    pub uploads: Arc<Budget>,
    pub metrics: Arc<Metrics>,
    /// True once the service is not ready for good: health says so.
    pub leaving: watch::Receiver<bool>,
    /// True once the service is shutting down.
    pub stopping: watch::Receiver<bool>,
}

impl Service {
    /// A service of these parts. Jobs that it accepted before a restart are held until [`Service::resume`].
    ///
    /// # Errors
    /// [`Error::NotKept`] where the journal cannot be read.
    pub fn new(parts: Parts) -> Result<Service, Error> {
        let entries = Entries {
            queue: parts.queue.clone(),
            library: parts.library,
            models: parts.models.clone(),
        };
        let media = MediaStore::new(parts.bounds.media.clone(), parts.media_ttl);
        let encodings = Arc::new(Encodings::new(parts.bounds.results.clone()));
        let kept = Kept::open(
            parts.journal,
            parts.keep,
            parts.queue.clone(),
            encodings.clone(),
            parts.stopping.clone(),
        )?;
        let generation = Generation::new(
            entries,
            kept.clone(),
            encodings,
            parts.bounds.clone(),
            media,
            parts.latents,
            parts.stopping.clone(),
        );
        let uploads = parts.bounds.uploads.clone();
        Ok(Service {
            uploads,
            metrics: parts.metrics,
            card_memory: CardMemory::new(
                generation.clone(),
                parts.bounds,
                parts.policy,
                parts.host,
                parts.workers,
                parts.stopping.clone(),
            ),
            generation,
            jobs: Jobs::new(parts.queue, kept),
            pulling: Pulling::new(parts.pulls, parts.models, parts.stopping.clone()),
            leaving: parts.leaving,
            stopping: parts.stopping,
        })
    }

    /// Puts back what was claimed and learned before a restart, and submits the jobs again that had not ended.
    pub fn resume(&self) {
        self.generation.kept.start();
    }

    /// The accounts of jobs from before a restart that are not in the queue yet.
    pub fn accounts_of_held_jobs(&self) -> BTreeSet<String> {
        let held = self.generation.kept.held();
        held.into_iter().map(|job| job.account).collect()
    }

    /// Ends the jobs of an account, whose token was withdrawn, and releases its holds.
    pub async fn withdraw(&self, account: String) {
        self.generation.kept.withdraw(&account).await;
        self.generation.queue.withdraw(account).await;
        self.generation.kept.save_claims().await;
    }

    /// Writes what was learned, at the end of the service.
    pub async fn save(&self) {
        self.generation.kept.save_learned().await;
        self.generation.kept.save_claims().await;
    }
}
