//! Which components may leave a card, and why others stay: on request, after a swap, or when unused for long.

use std::collections::BTreeSet;

use residency::{Component, ComponentId};
use tokio::time::Instant;

use super::claims::Known;
use super::record::JobRecord;
use super::view::View;
use crate::messages::KeptBecause;
use crate::moved::Kept;

/// The entries to unload.
pub(super) enum Leaving<'a> {
    Everything,
    /// An entry, with the components that it has on cards of one dtype.
    Entry {
        key: &'a str,
        components: &'a [Component],
    },
    /// Entries that are unused for long.
    Idle(&'a BTreeSet<String>),
}

impl Leaving<'_> {
    fn has(&self, entry: &str) -> bool {
        match self {
            Leaving::Everything => true,
            Leaving::Entry { key, .. } => *key == entry,
            Leaving::Idle(keys) => keys.contains(entry),
        }
    }

    /// Whether another entry has all components of this one: it is the same model by another name, or with adapters, and whoever unloads
    /// the model does not want that one kept.
    fn is_within(&self, others: &[Component]) -> bool {
        let Leaving::Entry { components, .. } = self else {
            return false;
        };
        let is_there = |own: &Component| others.iter().any(|other| other.id == own.id);
        components.iter().all(is_there)
    }
}

impl<'a> View<'a> {
    /// Whether a job came after an unload of its entry: the job starts once the unload is done.
    pub(super) fn waits_for_unload(&self, job: &JobRecord) -> bool {
        self.unloads.iter().any(|unload| unload.is_before(job))
    }

    /// Which of the components may leave a card; the others with the reason why they stay.
    pub(super) fn partition_leaving(
        &self,
        leaving: &Leaving<'_>,
        residents: Vec<Component>,
        index: usize,
    ) -> (Vec<ComponentId>, Vec<Kept>) {
        let card = &self.cards[index].description;
        let (mut leave, mut keep) = (Vec::new(), Vec::new());
        for component in residents {
            match self.reason_to_keep(leaving, &component.id, index) {
                Some(reason) => keep.push(Kept {
                    component,
                    card: card.id.clone(),
                    reason,
                }),
                None => leave.push(component.id),
            }
        }
        (leave, keep)
    }

    fn reason_to_keep(&self, leaving: &Leaving<'_>, id: &ComponentId, index: usize) -> Option<KeptBecause> {
        let dtype = &self.cards[index].description.compute_dtype;
        let users = self
            .claims
            .known()
            .filter(|(_, known)| known.components(dtype).iter().any(|c| c.id == *id));
        let mut shared = None;
        for (key, known) in users {
            let is_own = leaving.has(key);
            let holder = self.claims.holder(key);
            let in_use = || {
                self.jobs
                    .values()
                    .any(|job| job.entry.key == *key && !self.waits_for_unload(job))
            };
            if is_own && self.claims.is_pinned(key) {
                return Some(KeptBecause::Pinned);
            }
            if let Some(holder) = holder.filter(|_| is_own) {
                return Some(KeptBecause::Held(Some(holder.to_owned())));
            }
            let is_whole =
                || !leaving.is_within(known.components(dtype)) && self.stays_whole(key, known, index);
            if !is_own && (self.claims.is_pinned(key) || holder.is_some() || in_use() || is_whole()) {
                shared.get_or_insert_with(|| KeptBecause::Shared(key.to_owned()));
            }
        }
        shared
    }

    /// Whether a card has all components of an entry that is not to be unloaded. Without one of them, it would have to be loaded again.
    fn stays_whole(&self, key: &str, known: &Known, index: usize) -> bool {
        let card = &self.cards[index];
        let mut own = known.components(&card.description.compute_dtype).iter();
        own.all(|c| card.ledger.is_resident(&c.id)) && !self.unloads.iter().any(|unload| unload.takes(key))
    }

    /// Components of these entries that have been unused for long and may leave a card.
    pub(super) fn idle_to_unload(&self, idle: &BTreeSet<String>, index: usize) -> Vec<ComponentId> {
        let card = &self.cards[index];
        if !card.is_ready() {
            return Vec::new();
        }
        let dtype = &card.description.compute_dtype;
        let known: Vec<&Known> = idle.iter().filter_map(|key| self.claims.get(key)).collect();
        let is_idle = |c: &&Component| {
            known
                .iter()
                .any(|known| known.components(dtype).iter().any(|own| own.id == c.id))
        };
        let moving =
            |c: &&Component| card.ledger.resident(&c.id).is_some() && !card.ledger.is_resident(&c.id);
        let there = card.ledger.on_card_or_host();
        let mut residents: Vec<Component> = there.filter(|c| is_idle(c) && !moving(c)).cloned().collect();
        residents.sort_by(|a, b| a.id.cmp(&b.id));
        residents.dedup_by(|a, b| a.id == b.id);
        self.partition_leaving(&Leaving::Idle(idle), residents, index).0
    }

    /// Entries that have been unused for long enough to leave.
    pub(super) fn idle_entries(&self) -> BTreeSet<String> {
        let idle = self.unused().filter(|(_, known)| {
            let leaves = self.leaves_at(known, known.last_used);
            leaves.is_some_and(|at| at <= self.now)
        });
        idle.map(|(key, _)| key.clone()).collect()
    }

    pub(super) fn next_idle_unload(&self) -> Option<Instant> {
        let asked_or_used = |known: &Known| known.asked.unwrap_or(known.last_used).max(known.last_used);
        self.unused()
            .filter_map(|(_, known)| self.leaves_at(known, asked_or_used(known)))
            .min()
    }

    /// When an unused entry is to be unloaded: its own keep-alive after `since`, or when there has been no job at all for so long
    /// that everything is unloaded.
    fn leaves_at(&self, known: &Known, since: Instant) -> Option<Instant> {
        let settings = &self.settings;
        let keep_alive = settings.keep_alive_of.get(&known.entry.id);
        let keep_alive = keep_alive.copied().unwrap_or(settings.keep_alive);
        let own = keep_alive.map(|keep_alive| since + keep_alive);
        let last_use = self.claims.known().map(|(_, known)| known.last_used).max();
        let with_all = settings
            .unload_when_idle
            .filter(|_| self.jobs.is_empty())
            .map(|idle| since.max(last_use.unwrap_or(since)) + idle);
        own.into_iter().chain(with_all).min()
    }

    /// Entries without jobs.
    fn unused(&self) -> impl Iterator<Item = (&'a String, &'a Known)> {
        let (known, jobs) = (self.claims.known(), self.jobs);
        known.filter(move |(key, _)| !jobs.values().any(|job| job.concerns(key)))
    }
}
