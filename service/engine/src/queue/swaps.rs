//! Effects of swaps on cards and on other jobs: where a swap runs, which jobs wait for it, and which components it unloads and
//! restores.

use std::borrow::Cow;
use std::collections::BTreeSet;

use residency::{Bytes, Component, ComponentId, HoldId, Ledger, Parts, PinId, StageNeed, Verdict, plan};

use super::leaving::Leaving;
use super::record::JobRecord;
use super::steps::{JobStepKind, Model};
use super::swap::{Begun, hold_of};
use super::view::View;
use crate::moved::Kept;
use crate::need::ids_of;

impl View<'_> {
    /// The card that a swap is tied to: where it has begun, else where most of the replaced entry is.
    pub(super) fn card_of_swap(&self, job: &JobRecord) -> Option<usize> {
        let swap = job.swap.as_ref()?;
        if swap.begun.is_some() {
            return swap.card();
        }
        let there = |index: usize| -> Bytes {
            let card = &self.cards[index];
            let alone = job.replaced_alone(&card.description.compute_dtype);
            alone
                .filter(|c| card.ledger.is_resident(&c.id))
                .map(|c| c.bytes)
                .sum()
        };
        let most = (0..self.cards.len()).rev().max_by_key(|&index| there(index))?;
        (there(most) > Bytes::ZERO).then_some(most)
    }

    /// Whether a job has to wait for a swap on a card: it needs unloaded components, or is a swap of the same models.
    pub(super) fn waits_for_swap(&self, job: &JobRecord, index: usize) -> bool {
        let dtype = &self.cards[index].description.compute_dtype;
        let needs = |component: &Component| {
            let own = job.models.get(dtype).map_or(&[][..], |open| &open.components);
            own.iter().any(|own| own.id == component.id)
        };
        let begun = |job: &JobRecord| job.swap.as_ref().is_some_and(|swap| swap.begun.is_some());
        let others = self.jobs.values().filter(|other| other.id != job.id);
        others.into_iter().any(|other| {
            let Some(swap) = &other.swap else { return false };
            let same = job.concerns(&other.entry.key) || job.concerns(&swap.old.key);
            let displaced = other.swap_on(index).filter(|_| other.displaces_from(index));
            displaced.is_some_and(|swap| swap.alone.iter().any(needs))
                || (job.swap.is_some() && !begun(job) && begun(other) && same)
        })
    }

    /// A card's ledger as a job's plan may see it: components that a swap replaces may be evicted despite pins and holds.
    pub(super) fn ledger_for(&self, job: &JobRecord, index: usize) -> Cow<'_, Ledger> {
        let card = &self.cards[index];
        let ledger = Cow::Borrowed(&*card.ledger);
        let Some(swap) = job.swap.as_ref().filter(|_| !job.is_decided()) else {
            return ledger;
        };
        let mut ledger = ledger.into_owned();
        ledger.unpin(&PinId::new(swap.old.key.as_str()));
        for hold in self.claims.holds_of(&swap.old.key) {
            ledger.release_hold(&HoldId::new(hold));
        }
        ledger.release_hold(&HoldId::new(hold_of(&job.id)));
        Cow::Owned(ledger)
    }

    /// Entries whose pins and holds do not count on a card during a swap, and the holds of components that take their place.
    pub(super) fn swaps_on(&self, index: usize) -> (BTreeSet<String>, Vec<(String, Vec<ComponentId>)>) {
        let (mut away, mut beside) = (BTreeSet::new(), Vec::new());
        for job in self.jobs.values() {
            let (Some(swap), Some(begun)) = (&job.swap, job.swap_on(index)) else {
                continue;
            };
            if job.displaces_from(index) {
                away.insert(swap.old.key.clone());
            } else if !job.is_proven() {
                beside.push((hold_of(&job.id), ids_of(&begun.alone)));
            }
        }
        (away, beside)
    }

    /// Records the components on a swap's card before its first step.
    pub(super) fn begin_swap(&self, job: &JobRecord, index: usize) -> Begun {
        let card = &self.cards[index];
        let dtype = &card.description.compute_dtype;
        let resident = |c: &&Component| card.ledger.is_resident(&c.id);
        let old = job.swap.iter().filter_map(|swap| swap.old_models.get(dtype));
        let old = old.flat_map(|open| &open.components);
        let own = job.models.get(dtype).map_or(&[][..], |open| &open.components);
        Begun {
            card: index,
            generation: card.generation,
            before: old.filter(resident).cloned().collect(),
            alone: job.replaced_alone(dtype).filter(resident).cloned().collect(),
            new_before: own.iter().filter(resident).map(|c| c.id.clone()).collect(),
            away: false,
            told: None,
            unloading: None,
        }
    }

    /// Whether the whole of the new entry and the proof's largest stage fit beside `alone`, the remaining components of the
    /// replaced one.
    pub(super) fn fits_beside(&self, job: &JobRecord, alone: &[Component], index: usize) -> bool {
        let card = &self.cards[index];
        let Some(open) = job.models.get(&card.description.compute_dtype) else {
            return true;
        };
        let needs = (0..job.steps.len()).filter_map(|step| self.need_on(job, step, index));
        let scratch = needs
            .map(|need| need.least_scratch())
            .max()
            .unwrap_or(Bytes::ZERO);
        let mut ledger = (*card.ledger).clone();
        ledger.hold(HoldId::new(hold_of(&job.id)), ids_of(alone));
        let whole = StageNeed {
            name: "load".to_owned(),
            // Beside the old one the new one is whole, or it comes after it.
            components: open
                .components
                .iter()
                .map(|component| Component {
                    parts: Parts::default(),
                    ..component.clone()
                })
                .collect(),
            scratch,
            headroom: job.options.headroom,
            later: Vec::new(),
            model: ids_of(&open.components),
            passes: 1,
        };
        let verdict = plan(
            &ledger,
            &whole,
            self.policy(job, index),
            card.ledger_now(self.now),
        );
        matches!(verdict, Verdict::Run { .. })
    }

    /// Whether a job may take cached values of other jobs' stages. A proof may if the components of those stages were on the card
    /// before the swap began and are still there, as the values were computed by exactly these. Components that were loaded for
    /// the swap have to be proven by a computation.
    pub(super) fn may_take_cached_values(&self, job: &JobRecord) -> bool {
        if !job.is_load() {
            return true;
        }
        let Some(begun) = job.swap.as_ref().and_then(|swap| swap.begun.as_ref()) else {
            return false;
        };
        let card = &self.cards[begun.card];
        let dtype = &card.description.compute_dtype;
        let kept = job.plan(dtype).iter().filter(|stage| stage.memo.is_some());
        let mut components = kept.flat_map(|stage| job.components(&stage.components, dtype));
        card.generation == begun.generation
            && components.all(|c| begun.new_before.contains(&c.id) && card.ledger.is_resident(&c.id))
    }

    /// Components of the replaced entry that were on a swap's card and are no longer there.
    pub(super) fn displaced(&self, job: &JobRecord) -> Vec<Component> {
        let begun = job.swap.as_ref().and_then(|swap| swap.begun.as_ref());
        let gone = begun.into_iter().flat_map(|begun| {
            let ledger = &self.cards[begun.card].ledger;
            begun.before.iter().filter(move |c| !ledger.is_resident(&c.id))
        });
        gone.cloned().collect()
    }

    /// The unload that is a swap's next step: components to unload by card, and components that stay, with the reasons.
    pub(super) fn unload_of_swap(&self, job: &JobRecord) -> (Vec<(usize, Vec<Component>)>, Vec<Kept>) {
        let (Some(swap), Some(step)) = (&job.swap, job.step()) else {
            return Default::default();
        };
        let Some(begun) = &swap.begun else {
            return Default::default();
        };
        let card = &self.cards[begun.card];
        let resident = |c: &&Component| card.ledger.is_resident(&c.id);
        let here: Vec<Component> = match step.kind {
            JobStepKind::Unload(Model::Replaced) if job.is_proven() => return self.replaced_to_unload(job),
            JobStepKind::Unload(Model::Replaced) => begun.alone.iter().filter(resident).cloned().collect(),
            JobStepKind::Unload(Model::Own) => {
                let own = job.models.get(&card.description.compute_dtype);
                let own = own.map_or(&[][..], |open| &open.components);
                let came = own.iter().filter(resident);
                came.filter(|c| !begun.new_before.contains(&c.id) && !swap.names(&c.id))
                    .cloned()
                    .collect()
            }
            JobStepKind::Stage(_) | JobStepKind::Load(_) => Vec::new(),
        };
        let leaves = (!here.is_empty() && card.is_ready()).then_some((begun.card, here));
        (leaves.into_iter().collect(), Vec::new())
    }

    /// Components of the replaced entry that the new one does not share, on all cards.
    fn replaced_to_unload(&self, job: &JobRecord) -> (Vec<(usize, Vec<Component>)>, Vec<Kept>) {
        let (mut leave, mut keep) = (Vec::new(), Vec::new());
        for (index, card) in self.cards.iter().enumerate() {
            let dtype = &card.description.compute_dtype;
            let resident = |c: &&Component| card.ledger.is_resident(&c.id);
            let there: Vec<Component> = job.replaced_alone(dtype).filter(resident).cloned().collect();
            let old = job.swap.as_ref().map(|swap| {
                let components = swap.old_models.get(dtype).map(|open| &open.components[..]);
                (&swap.old.key, components.unwrap_or_default())
            });
            let Some((key, components)) = old else { continue };
            let leaving = Leaving::Entry { key, components };
            let (ids, kept) = self.partition_leaving(&leaving, there.clone(), index);
            keep.extend(kept);
            let leaves: Vec<Component> = there.into_iter().filter(|c| ids.contains(&c.id)).collect();
            if !leaves.is_empty() && card.is_ready() {
                leave.push((index, leaves));
            }
        }
        (leave, keep)
    }
}
