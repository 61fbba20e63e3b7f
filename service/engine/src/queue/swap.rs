//! Swaps: a model replaces another, which can be restored until the new one is proven.
//!
//! A swap is a load that names the model to replace. Its steps are the load, the stages of the model's smallest request, and
//! then the unload of the replaced model. Where both models do not fit, another unload of the replaced one is put before
//! the load, its pins and holds notwithstanding; jobs that need it queue until the swap is over. The last step is the
//! turning point: from there on the pins and holds of the replaced model are the new one's. A failure before it puts
//! the undo list in place of the steps: components of the new model are unloaded, displaced ones are loaded again, and then
//! the job ends with the error.
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

/// The replaced entry of a load, and the progress of the swap.
pub(super) struct Swap {
    pub(super) old: Arc<Entry>,
    pub(super) old_models: OpenModels,
    /// None: no step of it has run.
    pub(super) begun: Option<Begun>,
    /// The error with which the job ends when its undo list is done.
    pub(super) failed: Option<Error>,
}

/// The components that a swap found on its card when it began, and its progress since.
pub(super) struct Begun {
    pub(super) card: usize,
    /// Generation of the worker that it began on.
    pub(super) generation: u64,
    /// Components of the replaced entry that were on the card...
    pub(super) before: Vec<Component>,
    /// ...and those of them that the new entry does not share.
    pub(super) alone: Vec<Component>,
    /// Components of the new entry that were on the card.
    pub(super) new_before: BTreeSet<ComponentId>,
    /// Whether the replaced entry must be unloaded before the load.
    pub(super) away: bool,
    /// Generation of the worker that was sent the claims without those of the replaced entry.
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
    /// Whether the job is a load: the results of its stages are for the proof alone.
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

    /// Whether the replaced entry is or may be unloaded from a card, despite its pins and holds.
    pub(super) fn displaces_from(&self, card: usize) -> bool {
        self.swap_on(card).is_some_and(|begun| begun.away) && !self.is_proven()
    }

    /// Components of the replaced entry on cards of a dtype that the new one does not share.
    pub(super) fn replaced_alone(&self, dtype: &str) -> impl Iterator<Item = &Component> {
        let old = self
            .swap
            .iter()
            .filter_map(move |swap| swap.old_models.get(dtype));
        let new = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        old.flat_map(|open| &open.components)
            .filter(|component| new.iter().all(|own| own.id != component.id))
    }

    /// A worker reports that memory is short, so the replaced entry must be unloaded before the load. False: there is
    /// nothing to unload.
    pub(super) fn displace_replaced(&mut self) -> bool {
        if self.is_decided() {
            return false;
        }
        let begun = self.swap.as_mut().and_then(|swap| swap.begun.as_mut());
        begun.is_some_and(|begun| !std::mem::replace(&mut begun.away, true) && !begun.alone.is_empty())
    }
}

/// Id of the hold on the replaced entry while both entries are on the card.
pub(super) fn hold_of(job: &JobId) -> String {
    format!("swap of {job}")
}
