//! Swaps: a model takes another's place, and the other is not forgotten before the new one has proven itself.
//!
//! A swap is a load that names what it replaces. Its steps are the load, the stages of the model's smallest request, and
//! then the unload of the replaced model. Where both models do not fit, another unload of the replaced one is put before
//! the load, its pins and holds notwithstanding; jobs that need it queue until the swap is over. The last step is the
//! turning point: from there on the pins and holds of the replaced model are the new one's. A failure before it puts the
//! undo list in place of the steps: what came in for the new model leaves, what left for it comes back, and then the job
//! ends with the error.
//!
//! All of this is part of the job's own record: when the job is gone, so is everything that it changed for others.

use std::collections::BTreeSet;
use std::sync::Arc;

use residency::{Component, ComponentId};
use tokio::time::Instant;

use super::record::JobRecord;
use super::request::OpenModels;
use crate::error::Error;
use crate::job::{JobId, JobWork};
use crate::library::Entry;

/// What a load replaces, and how far that is.
pub(super) struct Swap {
    pub(super) old: Arc<Entry>,
    pub(super) old_models: OpenModels,
    /// None: no step of it has run.
    pub(super) begun: Option<Begun>,
    /// What the job ends with when its undo list is done.
    pub(super) failed: Option<Error>,
}

/// What a swap found on its card when it began, and what it did since.
pub(super) struct Begun {
    pub(super) card: usize,
    /// The worker that it began on.
    pub(super) generation: u64,
    /// What the card had of the replaced entry...
    pub(super) before: Vec<Component>,
    /// ...and of that what the new one does not share.
    pub(super) alone: Vec<Component>,
    /// What the card had of the new entry.
    pub(super) new_before: BTreeSet<ComponentId>,
    /// Whether the replaced entry has to leave first.
    pub(super) away: bool,
    /// The worker that was told so.
    pub(super) told: Option<u64>,
    /// An unload that workers have not answered.
    pub(super) unloading: Option<Unloading>,
}

/// How many workers have not answered, and since when.
pub(super) struct Unloading {
    pub(super) outstanding: usize,
    pub(super) since: Instant,
}

impl Swap {
    pub(super) fn new(old: Arc<Entry>, old_models: OpenModels) -> Swap {
        Swap {
            old,
            old_models,
            begun: None,
            failed: None,
        }
    }

    /// The card that it has begun on.
    pub(super) fn card(&self) -> Option<usize> {
        self.begun.as_ref().map(|begun| begun.card)
    }

    /// Whether a component is of the entry that is replaced.
    pub(super) fn names(&self, id: &ComponentId) -> bool {
        self.old_models
            .values()
            .flat_map(|open| &open.components)
            .any(|component| component.id == *id)
    }
}

impl JobRecord {
    /// Whether what it generates is for the proof alone.
    pub(super) fn is_load(&self) -> bool {
        matches!(self.work, JobWork::Load { .. })
    }

    /// Whether an entry is the job's own, or the one that it replaces.
    pub(super) fn concerns(&self, key: &str) -> bool {
        self.entry.key == key || self.swap.as_ref().is_some_and(|swap| swap.old.key == key)
    }

    /// Whether a component is of the entry that it replaces.
    pub(super) fn replaces(&self, id: &ComponentId) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.names(id))
    }

    /// Its swap as it has begun on a card.
    pub(super) fn swap_on(&self, card: usize) -> Option<&Begun> {
        let begun = self.swap.as_ref()?.begun.as_ref()?;
        (begun.card == card).then_some(begun)
    }

    /// Whether its swap is past the turning point: the new entry is proven, and only the replaced one is left to unload.
    pub(super) fn is_proven(&self) -> bool {
        let open = self.swap.as_ref().filter(|swap| swap.failed.is_none());
        open.is_some() && self.cursor + 1 >= self.steps.len()
    }

    /// Whether nothing but the end of the service can stop its swap: the new entry is proven, or the swap is undone.
    pub(super) fn is_decided(&self) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.failed.is_some()) || self.is_proven()
    }

    /// Whether the replaced entry is off a card, or may be at any moment, in spite of its pins and holds.
    pub(super) fn displaces_from(&self, card: usize) -> bool {
        self.swap_on(card).is_some_and(|begun| begun.away) && !self.is_proven()
    }

    /// What the replaced entry has on cards of a dtype, and the new one does not share.
    pub(super) fn replaced_alone(&self, dtype: &str) -> impl Iterator<Item = &Component> {
        let old = self
            .swap
            .iter()
            .filter_map(move |swap| swap.old_models.get(dtype));
        let new = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        old.flat_map(|open| &open.components)
            .filter(|component| new.iter().all(|own| own.id != component.id))
    }

    /// A worker says that memory is short: the replaced entry does not stay beside the new one any longer. False: there is
    /// nothing that could leave.
    pub(super) fn displace_replaced(&mut self) -> bool {
        if self.is_decided() {
            return false;
        }
        let begun = self.swap.as_mut().and_then(|swap| swap.begun.as_mut());
        begun.is_some_and(|begun| !std::mem::replace(&mut begun.away, true) && !begun.alone.is_empty())
    }
}

pub(super) fn ids(components: &[Component]) -> Vec<ComponentId> {
    components.iter().map(|c| c.id.clone()).collect()
}

/// What holds the replaced entry while it stands beside the new one.
pub(super) fn hold_of(job: &JobId) -> String {
    format!("swap of {job}")
}
