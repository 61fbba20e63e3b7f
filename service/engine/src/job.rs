//! Jobs as seen by their clients: specification and events.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use model::{Medium, PassesLeftOut, Piece, Request, Role, Section, ValueShape, Values};
use residency::{Bytes, Component, Holder, MemorySummary};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::Error;
use crate::library::Entry;
use crate::messages::StageMemory;
use crate::moved::{Freed, Kept};
use crate::wall_clock;

/// Id of a job, displayed and used for cancellation.
pub type JobId = Arc<str>;

/// Name of a stage, as its family defines it; or `load`, `restore`, `unload`.
pub type StageName = Arc<str>;

/// Priority of a job: the card time charged to its client is divided by the weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    /// Weight 1/4: four times its card time is charged.
    Low,
    /// Weight 1: its card time is charged.
    #[default]
    Normal,
    /// Weight 4: a quarter of its card time is charged.
    High,
}

/// Parameters of a job that are independent of its work.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobOptions {
    /// The id that it had before a restart; `None`: it gets one.
    #[serde(default)]
    pub id: Option<JobId>,
    /// Name of the client, for fair queueing.
    pub client: String,
    /// Account by which jobs, latents and unread results are bounded: the client's address, whichever names it sends; empty without one.
    pub account: String,
    /// What the job may use of what others have made.
    #[serde(default)]
    pub reach: Reach,
    /// Most jobs of its account in the queue; `None`: the queue's own bounds.
    #[serde(default)]
    pub most_jobs: Option<u64>,
    pub priority: Priority,
    /// How long the job waits for late or foreign memory; `None` for the service's setting.
    pub patience: Option<Duration>,
    /// Run a stage even if it may be short of memory.
    pub allow_low_memory: bool,
    /// Id of a preferred card; empty for any.
    pub card_hint: String,
    /// Jobs with the same key are one job; empty for none.
    pub idempotency_key: String,
    /// Bytes of the card to keep free while it runs, if that is more than the service keeps.
    pub headroom: Bytes,
    /// Continue without listeners, and past the deadline.
    pub detach: bool,
    /// Deadline of the job; if several clients join it, the latest counts. It is serialized as a time of the wall clock.
    #[serde(with = "wall_clock")]
    pub deadline: Option<Instant>,
    /// The client's trace that it is a part of: `traceparent` of W3C Trace Context; empty: none.
    #[serde(default)]
    pub trace: String,
}

/// Whose jobs, latents and holds a call may use. What is out of its reach is not there for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// Everybody's: ids are all that is needed.
    All,
    /// Those of one account.
    Own(String),
}

/// What is forgotten opens nothing: what is nobody's in particular, and nothing of any account.
impl Default for Reach {
    fn default() -> Reach {
        Reach::Own(String::new())
    }
}

impl Reach {
    /// Whether the things of an account are within it.
    pub fn has(&self, account: &str) -> bool {
        match self {
            Reach::All => true,
            Reach::Own(own) => own == account,
        }
    }

    /// The account that new things belong to; empty: nobody's in particular.
    pub(crate) fn account(&self) -> &str {
        match self {
            Reach::All => "",
            Reach::Own(own) => own,
        }
    }
}

/// A job to submit. Its serialized form is enough to submit it again, in another process and after a restart of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    pub options: JobOptions,
    pub entry: Arc<Entry>,
    pub work: JobWork,
}

/// The work of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(
    clippy::large_enum_variant,
    reason = "jobs are few, and most of them are runs"
)]
pub enum JobWork {
    /// Run stages of a request.
    Run(Run),
    /// Load components.
    Load {
        /// Component names; empty for all. Must be all if anything follows the load.
        components: Vec<String>,
        /// The entry to unload once this one is proven, or to restore otherwise.
        replace: Option<Arc<Entry>>,
        /// Run the smallest request afterwards, as a proof; implied by `replace`.
        prove: bool,
    },
}

/// The call of the API that submitted a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    #[default]
    GenerateImage,
    GenerateVideo,
    GenerateAudio,
    /// A segment of a session of sound.
    StreamAudio,
    EncodeImage,
    DecodeLatent,
    Load,
    /// No job: only a plan is requested.
    Plan,
}

impl Call {
    /// Its name in lists of jobs.
    pub fn as_str(self) -> &'static str {
        match self {
            Call::GenerateImage => "GenerateImage",
            Call::GenerateVideo => "GenerateVideo",
            Call::GenerateAudio => "GenerateAudio",
            Call::StreamAudio => "StreamAudio",
            Call::EncodeImage => "EncodeImage",
            Call::DecodeLatent => "DecodeLatent",
            Call::Load => "Load",
            Call::Plan => "Plan",
        }
    }
}

/// Stages of a request to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The call that submitted it, for display.
    pub call: Call,
    /// The request of the first item; item i uses seed + i.
    pub request: Request,
    /// Number of items.
    pub count: u32,
    /// Stored values to start from.
    pub start: Option<Start>,
    /// The last role to run: up to [`Role::Sample`] the job ends with values in the store, up to [`Role::Encode`]
    /// with those of the client's input.
    pub until: Role,
    /// Store the values that each item's decode takes.
    pub keep_latent: bool,
    /// Minimum milliseconds between previews; 0 for none.
    pub preview_interval_ms: u32,
}

/// Stored values from which a run starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Handle of the values.
    pub latent: String,
    /// The first role that takes them.
    pub role: Role,
}

/// An event of a job. Events are in order; the last is exactly one of `Done` and `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub struct JobEvent {
    /// Milliseconds since the job was accepted.
    pub at_ms: u64,
    pub kind: JobEventKind,
}

/// Kinds of events. Queue, waiting, loading, step and preview are coalesced for a slow reader (the latest wins); the
/// others are never dropped: a listener with too many unread pictures is closed.
#[derive(Clone, Debug, PartialEq)]
pub enum JobEventKind {
    /// The job was recorded.
    Accepted {
        /// Whether it joined an existing job with the same idempotency key.
        joined: bool,
    },
    /// Queued after other jobs of this service.
    Queued {
        /// Number of jobs ahead.
        position: u32,
        /// Estimated time until it starts.
        estimate: Option<Duration>,
    },
    /// Waiting for late or foreign memory.
    Waiting {
        stage: StageName,
        /// Bytes needed that are not resident.
        needed: Bytes,
        /// Bytes usable now.
        free: Bytes,
        /// Holders of the memory.
        holders: Vec<Holder>,
        /// Remaining wait budget.
        patience_left: Duration,
        /// `late_eviction`, `foreign`, `leases`, `reservation`.
        cause: &'static str,
    },
    /// A component is being evicted.
    Evicting { component: Component, card: String },
    /// A component is being loaded.
    Loading {
        component: Component,
        /// Bytes loaded so far.
        done: Bytes,
        card: String,
    },
    /// Something is retried.
    Retrying {
        /// Stable identifier of the reason.
        reason: String,
        /// For display.
        message: String,
        stage: StageName,
    },
    /// A stage starts.
    Stage {
        name: StageName,
        /// Index of the stage, from 1.
        index: u32,
        /// Number of stages.
        of: u32,
        /// Label of the rung.
        chunking: String,
        /// Taken from the cache, and not run.
        cached: bool,
        card: String,
        item: u32,
        /// The card's memory as it starts; `None` if nothing runs.
        memory: Option<MemorySummary>,
        /// Which section of the result; `None` where it is not made in sections.
        section: Option<Section>,
    },
    /// A step is done.
    Step {
        /// Index of the step, from 1.
        n: u32,
        /// Number of steps.
        of: u32,
        item: u32,
        /// Which section of the result; `None` where it is not made in sections.
        section: Option<Section>,
    },
    /// A preview of the current state.
    Preview {
        step: u32,
        item: u32,
        width: u32,
        height: u32,
        /// RGB, 8 bits each, row-major.
        rgb: bytes::Bytes,
    },
    /// A piece of a result, as pixels or samples; encoded by the server.
    Piece {
        item: u32,
        seed: u64,
        /// The next piece of its track.
        piece: Piece,
    },
    /// A latent was stored.
    Latent { info: LatentInfo, item: u32 },
    /// The job succeeded.
    Done(Arc<JobReport>),
    /// The job failed.
    Failed(Error),
}

/// The size of a picture, a film or a track. Zeros where it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MadeSize {
    pub width: u32,
    pub height: u32,
    pub seconds: f32,
}

impl JobWork {
    /// The size of each thing that it makes; `None`: it makes nothing.
    pub fn makes(&self) -> Option<MadeSize> {
        let JobWork::Run(run) = self else { return None };
        Some(match &run.request.medium {
            Medium::Image(image) => MadeSize {
                width: image.width,
                height: image.height,
                seconds: 0.0,
            },
            Medium::Video(film) => MadeSize {
                width: film.width,
                height: film.height,
                seconds: film.frames as f32 / film.frames_per_second.max(f32::MIN_POSITIVE),
            },
            Medium::Audio(track) => MadeSize {
                seconds: track.seconds,
                ..MadeSize::default()
            },
        })
    }
}

/// Figures of a finished job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// Seed of the first item.
    pub seed: u64,
    /// In order of execution.
    pub stages: Vec<StageReport>,
    /// Components that did not have to be loaded.
    pub resident_already: Vec<String>,
    /// Approximations that were necessary, for lack of memory or because a latent lacks values, or asked for.
    pub approximations: Vec<String>,
    /// Time from acceptance to the end.
    pub total: Duration,
    /// Unloaded components of the replaced model.
    pub freed: Vec<Freed>,
    /// Components of the replaced model that stayed.
    pub kept: Vec<Kept>,
}

/// Figures of one stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    pub name: StageName,
    /// Time of computation.
    pub run: Duration,
    /// Time of loads and evictions.
    pub moves: Duration,
    /// Time waiting for memory.
    pub wait: Duration,
    /// Peak of activation bytes.
    pub peak_scratch: Bytes,
    /// Peak of our bytes on the card.
    pub peak_bytes: Bytes,
    pub predicted_scratch: Bytes,
    /// Label of the rung.
    pub chunking: String,
    /// Implementation of attention: `cudnn 9.19.0`, `own kernels`, `cpu loops`, separated by commas; empty if none
    /// was computed.
    pub attention: String,
    /// Passes over the model's blocks that were left out; `None`: it was not asked for.
    #[serde(default)]
    pub passes_left_out: Option<PassesLeftOut>,
    /// The card's memory before and after; `None` if nothing ran.
    pub memory: Option<StageMemory>,
    /// Taken from the cache, and not run.
    pub cached: bool,
    pub item: u32,
    pub card: String,
}

/// Description of a stored latent: values that can be decoded, or started from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentInfo {
    /// Handle, for clients.
    pub id: String,
    /// Names and shapes of its tensors.
    pub values: Vec<ValueShape>,
    /// Identity of the decoding component.
    pub decoder_id: String,
    /// Remaining time to live.
    pub expires_in: Duration,
    pub bytes: Bytes,
    /// Why a decode of this latent is only an approximation of its job's own result; `None`: it is exact.
    pub approximation: Option<Cow<'static, str>>,
}

/// A stored latent with its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latent {
    pub info: LatentInfo,
    pub values: Values,
}

#[cfg(test)]
mod tests {
    use model::{Audio, Quantization};

    use super::*;

    #[test]
    fn a_reach_that_was_not_set_reaches_nothing_of_an_account() {
        let kept = serde_json::to_value(JobOptions::default()).unwrap();
        let mut without = kept.clone();
        without.as_object_mut().unwrap().remove("reach");
        for options in [kept, without] {
            let options: JobOptions = serde_json::from_value(options).unwrap();
            assert!(!options.reach.has("token \"alice\"") && !options.reach.has("10.0.0.1"));
            assert!(options.reach.has(""), "what is nobody's");
        }
    }

    #[tokio::test]
    async fn a_job_is_serialized_with_its_deadline_as_a_time_of_the_wall_clock() {
        let left = Duration::from_secs(3600);
        let entry = |id: &str| {
            let path = format!("/models/{id}").into();
            Arc::new(Entry::new(id.to_owned(), String::new(), path, Quantization::NONE))
        };
        let options = JobOptions {
            client: "ann".to_owned(),
            priority: Priority::High,
            patience: Some(Duration::from_millis(1500)),
            deadline: Some(Instant::now() + left),
            ..JobOptions::default()
        };
        let run = Run {
            call: Call::GenerateAudio,
            request: Request::of(Medium::Audio(Audio::default()), 8, 2.0, 16),
            count: 3,
            start: Some(Start {
                latent: "latent-1".to_owned(),
                role: Role::Decode,
            }),
            until: Role::Decode,
            keep_latent: true,
            preview_interval_ms: 0,
        };
        let load = JobWork::Load {
            components: vec!["vae".to_owned()],
            replace: Some(entry("old")),
            prove: true,
        };
        for work in [JobWork::Run(run), load] {
            let (entry, options) = (entry("new"), options.clone());
            let spec = JobSpec { options, entry, work };
            let kept = serde_json::to_string(&spec).unwrap();
            let mut again: JobSpec = serde_json::from_str(&kept).unwrap();
            let deadline = again.options.deadline.unwrap();
            let moved = deadline.saturating_duration_since(Instant::now());
            assert!(
                moved <= left && moved > left - Duration::from_secs(60),
                "{moved:?}"
            );
            again.options.deadline = spec.options.deadline;
            assert_eq!(again, spec);
        }
        let over = JobOptions {
            deadline: Some(Instant::now()),
            ..JobOptions::default()
        };
        let kept = serde_json::to_string(&over).unwrap();
        let again: JobOptions = serde_json::from_str(&kept).unwrap();
        assert!(again.deadline.unwrap() <= Instant::now(), "it is over");
    }
}
