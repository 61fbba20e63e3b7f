//! Requests of handles to the core.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::StagePlan;
use tokio::sync::oneshot;

use super::reductions::Reduction;
use crate::job::{JobSpec, Run};
use crate::library::{Entry, OpenModel};

/// The open models of an entry, by the compute dtypes of the cards.
pub(super) type OpenModels = BTreeMap<String, OpenModel>;

/// Channel for an answer.
pub(super) type Reply<T> = oneshot::Sender<T>;

/// A specification with its model opened and its request validated, outside the core: that reads files.
pub(super) struct Submission {
    pub(super) spec: JobSpec,
    pub(super) models: OpenModels,
    /// The entry that it replaces.
    pub(super) old: Option<(Arc<Entry>, OpenModels)>,
    /// Stages by compute dtype: of the request, or of the proof.
    pub(super) plans: BTreeMap<String, Vec<StagePlan>>,
    /// The run that proves a load's model.
    pub(super) proof: Option<Run>,
    /// The model in smaller formats, where they are open already.
    pub(super) reductions: Option<Vec<Reduction>>,
    /// The model in formats that lose less, for a plan without a job.
    pub(super) upgrades: Vec<Reduction>,
}
