//! What handles bring to the core.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::StagePlan;
use tokio::sync::oneshot;

use super::reductions::Reduction;
use crate::job::{JobSpec, Run};
use crate::library::{Entry, OpenModel};

/// An entry as every kind of card would hold it, by compute dtype.
pub(super) type OpenModels = BTreeMap<String, OpenModel>;

/// Where an answer goes.
pub(super) type Reply<T> = oneshot::Sender<T>;

/// A specification with its model opened and its request validated, outside the core: that reads files.
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
    /// The model in formats that lose less, for a plan that is only asked for.
    pub(super) upgrades: Vec<Reduction>,
}
