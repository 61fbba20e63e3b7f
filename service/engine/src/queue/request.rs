//! What handles ask of the actor.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pipelines::{StagePlan, Values};
use residency::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::listener::Job;
use super::reductions::Reduction;
use super::report::{JobInfo, PlanReport, Reserved, StatusReport, UnloadReport};
use crate::error::Error;
use crate::job::{JobId, JobSpec, Latent, LatentInfo, Run};
use crate::library::{Entry, OpenModel};

/// An entry as every kind of card would hold it, by compute dtype.
pub(super) type OpenModels = BTreeMap<String, OpenModel>;

/// Where an answer goes.
pub(super) type Reply<T> = oneshot::Sender<T>;

/// A specification with its model opened and its request validated, outside the actor: that reads files.
pub(super) struct Submission {
    pub(super) spec: JobSpec,
    pub(super) models: OpenModels,
    /// What it replaces.
    pub(super) old: Option<(Arc<Entry>, OpenModels)>,
    /// Stages by compute dtype: of the request, or of the proof.
    pub(super) plans: BTreeMap<String, Vec<StagePlan>>,
    /// What proves a load's model.
    pub(super) proof: Option<Run>,
    /// The model in fewer bytes, where that is known already.
    pub(super) reductions: Option<Vec<Reduction>>,
}

pub(super) enum Request {
    Submit {
        submission: Box<Submission>,
        reply: Reply<Result<Job, Error>>,
    },
    /// The actor's own: what it had opened for a refusal.
    Reductions {
        job: JobId,
        reductions: Vec<Reduction>,
    },
    Left {
        job: JobId,
        listener: u64,
    },
    Cancel {
        /// Whether the job's latents go too.
        release_latents: bool,
        job: String,
        reply: Reply<Result<bool, Error>>,
    },
    Jobs {
        include_ended: bool,
        reply: Reply<Vec<JobInfo>>,
    },
    Plan {
        submission: Box<Submission>,
        card: String,
        reply: Reply<Result<PlanReport, Error>>,
    },
    Unload {
        entry: Option<(Arc<Entry>, OpenModels)>,
        force: bool,
        reply: Reply<Result<UnloadReport, Error>>,
    },
    Pin {
        entry: Arc<Entry>,
        models: OpenModels,
        unpin: bool,
        reply: Reply<Vec<String>>,
    },
    Hold {
        entry: Arc<Entry>,
        models: OpenModels,
        client: String,
        ttl: Duration,
        reply: Reply<String>,
    },
    ReleaseHold {
        id: String,
        reply: Reply<bool>,
    },
    Trim {
        card: String,
        reply: Reply<Result<Bytes, Error>>,
    },
    Reserve {
        card: String,
        bytes: Bytes,
        ttl: Duration,
        label: String,
        reply: Reply<Result<Reserved, Error>>,
    },
    ReleaseReservation {
        id: String,
        reply: Reply<bool>,
    },
    Latent {
        id: String,
        reply: Reply<Result<Latent, Error>>,
    },
    PutLatent {
        values: Values,
        decoder_id: String,
        reply: Reply<Result<LatentInfo, Error>>,
    },
    ReleaseLatent {
        id: String,
        reply: Reply<bool>,
    },
    Census {
        reply: Reply<Vec<(&'static str, usize)>>,
    },
    Drain {
        deadline: Instant,
        reply: Reply<()>,
    },
    Status {
        reply: Reply<Arc<StatusReport>>,
    },
}
