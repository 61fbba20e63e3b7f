//! Plans without a job, and alternatives for jobs that are refused: the shortage, and changes with which the job would fit.

use std::cell::LazyCell;
use std::collections::BTreeSet;

use model::Request;
use residency::{
    Alternative, Bytes, Component, ComponentId, Fits, Move, Part, Parts, PinId, StageNeed, WaitCause,
    fallbacks, part_after, peak_of,
};

use super::placing::Placement;
use super::record::JobRecord;
use super::reductions::Reduction;
use super::report::{PlanReport, PlannedStage, StageVerdict};
use super::steps::needed;
use super::view::View;
use crate::admission::{Admission, choose_rung};
use crate::error::{Change, ChangedTo, Error, Fallback, Shortfall};
use crate::job::JobWork;
use crate::library::OpenModel;
use crate::messages::Shortage;
use crate::need::{Need, ids_of};

impl View<'_> {
    /// The plan of a job that was not submitted, on a card or on the card that would be chosen.
    pub(super) fn plan_report(&self, job: &JobRecord, card: &str) -> Result<PlanReport, Error> {
        if let Some(error) = self.refusal_of_cards(job) {
            return Err(error);
        }
        let index = self
            .card_to_plan_on(job, card)
            .ok_or_else(|| self.not_ready(card))?;
        let dtype = self.cards[index].description.compute_dtype.clone();
        // The alternatives are the same for all stages that are short, and reported only if the model's other formats are known.
        let offered = LazyCell::new(|| match job.knows_reductions() {
            true => self.fallbacks(job, &[index]),
            false => Vec::new(),
        });
        let planned = (0..job.steps.len()).filter_map(|step| {
            let mut stage = self.planned_stage(job, step, index, &dtype)?;
            if let Some(shortfall) = &mut stage.shortfall {
                shortfall.fallbacks.clone_from(&offered);
            }
            Some(stage)
        });
        let stages: Vec<PlannedStage> = planned.collect();
        let ahead = (0..job.steps.len()).filter_map(|step| self.need_on(job, step, index));
        let first = ahead.take(self.next_step(job, &dtype) + 1).last();
        let (ledger, policy) = (&self.cards[index].ledger, self.policy(job, index));
        let seconds = first.map_or(0.0, |need| {
            let need = need.least();
            residency::predicted_move_seconds(ledger, &need, policy, self.cards[index].ledger_now(self.now))
        });
        Ok(PlanReport {
            card: self.cards[index].description.id.clone(),
            has_fp8_products: self.cards[index].description.has_fp8_products(),
            runs_now: stages.iter().all(|stage| stage.verdict == StageVerdict::Run),
            fits: stages.iter().all(|stage| match stage.verdict {
                StageVerdict::Run | StageVerdict::Wait(WaitCause::Leases | WaitCause::LateEviction) => true,
                StageVerdict::Wait(WaitCause::Foreign | WaitCause::Reservation) | StageVerdict::Never => {
                    false
                }
            }),
            // Only where nothing more of it would be streamed.
            upgrades: self.in_formats(job, index, &job.upgrades, resident),
            stages,
            predicted_move_seconds: if seconds.is_finite() { seconds } else { 0.0 },
        })
    }

    fn card_to_plan_on(&self, job: &JobRecord, card: &str) -> Option<usize> {
        let ready = |index: &usize| self.cards[*index].is_ready();
        if !card.is_empty() {
            return self
                .cards
                .iter()
                .position(|c| c.description.id == card)
                .filter(ready);
        }
        match self.place(job, &self.seconds_ahead()) {
            Placement::Start { card, .. }
            | Placement::Alone { card }
            | Placement::Behind { card }
            | Placement::Never { card, .. } => Some(card),
            Placement::Held | Placement::Short { .. } | Placement::Nowhere => None,
        }
        .filter(ready)
        .or_else(|| (0..self.cards.len()).find(ready))
    }

    /// A step of a plan, without alternatives.
    fn planned_stage(&self, job: &JobRecord, step: usize, card: usize, dtype: &str) -> Option<PlannedStage> {
        let need = self.need_on(job, step, card)?;
        let (ledger, description) = (&self.cards[card].ledger, &self.cards[card].description);
        let ledger_now = self.cards[card].ledger_now(self.now);
        let admission = choose_rung(ledger, &need, self.policy(job, card), ledger_now);
        let cached = self.is_cached(job, step, dtype);
        let last = need.rungs().len().saturating_sub(1);
        let (rung, verdict, moves, capacity): (usize, _, Vec<Move>, _) = match admission {
            _ if cached => (0, StageVerdict::Run, Vec::new(), None),
            Admission::Run { rung, moves } => (rung, StageVerdict::Run, moves, None),
            Admission::Wait { rung, cause, .. } => {
                let total = ledger.total();
                (rung, StageVerdict::Wait(cause), Vec::new(), Some(total))
            }
            Admission::Never { capacity, .. } => (last, StageVerdict::Never, Vec::new(), Some(capacity)),
        };
        let chosen = need.rungs().get(rung);
        let scratch = chosen.map_or(Bytes::ZERO, |rung| rung.scratch);
        let family = job.models.get(dtype)?.model.family();
        let label = chosen.map(|rung| rung.label.clone()).unwrap_or_default();
        let here = |c: &&residency::Component| ledger.is_resident(&c.id);
        let part = |c: &Component| match verdict {
            StageVerdict::Run if !cached => part_after(ledger, &moves, c),
            _ => Part::WHOLE,
        };
        let parts: Vec<(Component, Part)> = need.components.iter().map(|c| (c.clone(), part(c))).collect();
        let seconds = self.seconds_of(job, step, card, &need, &parts);
        Some(PlannedStage {
            name: need.name.clone(),
            resident_already: need
                .components
                .iter()
                .filter(here)
                .map(|c| c.name.clone())
                .collect(),
            component_bytes: need.components.iter().map(|c| c.bytes).sum(),
            scratch,
            scratch_learned: self.learned.knows_scratch(&need, &label, family, description),
            streamed: self.streamed(self.pass_time(job, step, card, &need), card, &parts),
            seconds: if cached { None } else { seconds },
            passes: need.passes(),
            moves,
            verdict,
            shortfall: capacity.map(|capacity| Shortfall {
                capacity,
                ..self.cards[card].shortfall(&need, need.least().least_peak())
            }),
            chunking: label,
            approximate: chosen.is_some_and(|rung| rung.approximate),
            cached,
            components: need.components,
        })
    }

    /// The error of a job that exceeds every card.
    pub(super) fn exceeds_every_card(
        &self,
        job: &JobRecord,
        card: usize,
        index: usize,
        needed: Bytes,
        capacity: Bytes,
    ) -> Error {
        let Some(need) = self.need_on(job, index, card) else {
            return Error::Internal("a step was refused that the job does not have".to_owned());
        };
        let fallbacks = self.fallbacks(job, &self.usable_cards(job));
        let smallest = match fallbacks.is_empty() {
            true => self.smallest(job, card),
            false => None,
        };
        Error::NeverFits(Box::new(Shortfall {
            capacity,
            fallbacks,
            smallest,
            ..self.cards[card].shortfall(&need, needed)
        }))
    }

    /// The shortage at the end of a job's patience.
    pub(super) fn shortfall_after_waiting(&self, job: &JobRecord, shortage: &Shortage) -> Shortfall {
        let usable = self.usable_cards(job);
        let card = usable.first().copied().unwrap_or(0);
        Shortfall {
            stage: job.stage_name().to_string(),
            needed: shortage.needed,
            free: shortage.usable,
            capacity: self.cards[card].ledger.total(),
            holders: shortage.holders.clone(),
            fallbacks: self.fallbacks(job, &usable),
            smallest: None,
            instead: None,
            pinned: Bytes::ZERO,
        }
    }

    /// The formats in which the job's model needs the least on a card, and the bytes that it needs; `None` if nothing is smaller.
    fn smallest(&self, job: &JobRecord, card: usize) -> Option<(String, Bytes)> {
        let dtype = &self.cards[card].description.compute_dtype;
        let request = job.run().map(|run| run.request.without_media_data());
        let needs = job.reductions().iter().filter_map(|reduction| {
            let open = reduction.models.get(dtype)?;
            let stages = self.stages_with(job, open, request.as_ref(), card)?;
            Some((reduction.label.clone(), peak_of(&stages)))
        });
        needs.min_by_key(|(_, needed)| *needed)
    }

    /// Alternatives that would fit on one of these cards, the closest first: the same request of the model in fewer bytes, then
    /// in smaller sizes or, for a load, in parts.
    pub(super) fn fallbacks(&self, job: &JobRecord, cards: &[usize]) -> Vec<Fallback> {
        let reduced: Vec<Fallback> = cards.iter().flat_map(|&card| self.reduced(job, card)).collect();
        let mut closest_first: Vec<Fallback> = Vec::new();
        for reduction in job.reductions() {
            let same = reduced
                .iter()
                .filter(|fallback| fallback.change.label == reduction.label);
            closest_first.extend(
                same.min_by_key(|fallback| fallback.fits == Fits::AfterEvictions)
                    .cloned(),
            );
        }
        // A card with more room offers the same alternatives and more.
        let less = cards.iter().rev().map(|&card| self.with_less_of_it(job, card));
        let most = less.max_by_key(|fallbacks| fallbacks.first().map(|closest| closest.peak));
        closest_first.extend(most.unwrap_or_default());
        let unpinned = cards.iter().find_map(|&card| self.unpinned(job, card));
        closest_first.extend(unpinned);
        closest_first
    }

    /// Pins of other models without which a job would fit a card: the largest first, and no more than
    /// necessary.
    fn unpinned(&self, job: &JobRecord, card: usize) -> Option<Fallback> {
        let steps = (0..job.steps.len()).filter_map(|step| self.need_on(job, step, card));
        let stages: Vec<StageNeed> = steps.map(|need| need.least()).collect();
        let needed = stages.iter().flat_map(|stage| &stage.components);
        let needed: BTreeSet<&ComponentId> = needed.map(|component| &component.id).collect();
        let mut ledger = self.ledger_for(job, card).into_owned();
        let bytes_here = |known: &[ComponentId]| -> Bytes {
            let here = known.iter().filter_map(|id| ledger.resident(id));
            here.map(|resident| resident.bytes()).sum()
        };
        let dtype = &self.cards[card].description.compute_dtype;
        let pinned = self.claims.pinned().into_iter().map(|key| {
            let ids = self.claims.component_ids(&key, dtype);
            let ids: Vec<ComponentId> = ids.into_iter().filter(|id| !needed.contains(id)).collect();
            (bytes_here(&ids), key)
        });
        let mut pinned: Vec<_> = pinned.filter(|(bytes, _)| *bytes > Bytes::ZERO).collect();
        pinned.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let (policy, now) = (self.policy(job, card), self.cards[card].ledger_now(self.now));
        let mut keys = Vec::new();
        for (_, key) in pinned {
            ledger.unpin(&PinId::new(key.as_str()));
            keys.push(key);
            let without = Alternative {
                change: Change {
                    label: format!("unpin {}", keys.join(", ")),
                    to: ChangedTo::Unpinned(keys.clone()),
                },
                fidelity: 0,
                stages: stages.clone(),
            };
            if let Some(fallback) = fallbacks(&ledger, &[without], policy, now).pop() {
                return Some(fallback);
            }
        }
        None
    }

    /// The quantizations of the job's model in which it is smaller, and would fit.
    fn reduced(&self, job: &JobRecord, card: usize) -> Vec<Fallback> {
        let steps = (0..job.steps.len()).filter_map(|step| self.need_on(job, step, card));
        let asked: Vec<StageNeed> = steps.map(|need| need.least()).collect();
        let whole = peak_of(&asked);
        let mut smaller = self.in_formats(job, card, job.reductions(), |stages| stages);
        smaller.retain(|fallback| fallback.peak < whole);
        for fallback in &mut smaller {
            fallback.saved = whole - fallback.peak;
        }
        smaller
    }

    /// The job's model in those of these formats that would fit a card, in their order. `change` changes what its stages need.
    fn in_formats(
        &self,
        job: &JobRecord,
        card: usize,
        formats: &[Reduction],
        change: fn(Vec<StageNeed>) -> Vec<StageNeed>,
    ) -> Vec<Fallback> {
        let dtype = &self.cards[card].description.compute_dtype;
        let request = job.run().map(|run| run.request.without_media_data());
        let changes = formats.iter().filter_map(|format| {
            let open = format.models.get(dtype)?;
            let stages = self.stages_with(job, open, request.as_ref(), card)?;
            Some((format.change(), change(stages)))
        });
        self.fitting(job, card, changes)
    }

    /// The changes with which a job would fit a card, the closest to the original request first.
    fn fitting(
        &self,
        job: &JobRecord,
        card: usize,
        changes: impl Iterator<Item = (Change, Vec<StageNeed>)>,
    ) -> Vec<Fallback> {
        let alternatives = changes.zip((0..=u32::MAX).rev());
        let alternatives: Vec<Alternative<Change>> = alternatives
            .map(|((change, stages), fidelity)| Alternative {
                change,
                fidelity,
                stages,
            })
            .collect();
        let (ledger, policy) = (self.ledger_for(job, card), self.policy(job, card));
        fallbacks(
            &ledger,
            &alternatives,
            policy,
            self.cards[card].ledger_now(self.now),
        )
    }

    /// The job's stages with its model opened in another way, or for another request, which has no media data: memos are
    /// not needed here, and hashing the media would block the queue.
    fn stages_with(
        &self,
        job: &JobRecord,
        open: &OpenModel,
        request: Option<&Request>,
        card: usize,
    ) -> Option<Vec<StageNeed>> {
        let description = &self.cards[card].description;
        let mut stages = Vec::new();
        if let (Some(run), Some(request)) = (job.run(), request) {
            let plan = open.model.plan(request).ok()?;
            for index in needed(&plan, run) {
                let plan = plan.get(index)?.clone();
                let need = Need::of_stage(plan, &open.components, Vec::new(), job.options.headroom);
                let mut need = need.on_card(description);
                self.learned.improve(&mut need, open.model.family(), description);
                stages.push(need.least());
            }
        }
        let loaded = match &job.work {
            JobWork::Load {
                components: names, ..
            } => {
                let all = open.components.iter();
                let named = all.filter(|c| names.is_empty() || names.contains(&c.name));
                Some(StageNeed {
                    name: "load".to_owned(),
                    components: named.cloned().collect(),
                    scratch: Bytes::ZERO,
                    headroom: job.options.headroom,
                    later: Vec::new(),
                    model: ids_of(&open.components),
                    passes: u32::MAX,
                })
            }
            JobWork::Run(_) => None,
        };
        let all: Vec<StageNeed> = loaded.into_iter().chain(stages).collect();
        (!all.is_empty()).then_some(all)
    }

    fn with_less_of_it(&self, job: &JobRecord, card: usize) -> Vec<Fallback> {
        let run = match &job.work {
            JobWork::Run(run) => run,
            JobWork::Load { .. } => return self.parts_of_load(job, card),
        };
        let dtype = &self.cards[card].description.compute_dtype;
        // A run that starts from a client's values cannot be made smaller: the shapes of those values are fixed.
        let Some(open) = job.models.get(dtype).filter(|_| run.start.is_none()) else {
            return Vec::new();
        };
        let smaller = open.model.smaller(&run.request.without_media_data()).into_iter();
        let changes = smaller.filter_map(|(label, request)| {
            let stages = self.stages_with(job, open, Some(&request), card)?;
            let to = ChangedTo::Request(Box::new(request));
            Some((Change { label, to }, stages))
        });
        self.fitting(job, card, changes)
    }

    /// Loads of some components in place of all: as many as would fit together, the largest first. Empty if there is
    /// nothing to leave out.
    fn parts_of_load(&self, job: &JobRecord, card: usize) -> Vec<Fallback> {
        let Some(need) = self.need_on(job, job.cursor, card) else {
            return Vec::new();
        };
        let whole = need.with_scratch(Bytes::ZERO).peak();
        let try_them = |components: &[Component]| {
            let names: Vec<&str> = components.iter().map(|c| c.name.as_str()).collect();
            let stage = StageNeed {
                name: need.name.to_string(),
                components: components.to_vec(),
                scratch: Bytes::ZERO,
                headroom: job.options.headroom,
                later: Vec::new(),
                model: need.model.clone(),
                passes: u32::MAX,
            };
            let change = Change {
                label: format!("components {}", names.join(", ")),
                to: ChangedTo::Components(names.iter().map(|&name| name.to_owned()).collect()),
            };
            self.fitting(job, card, std::iter::once((change, vec![stage])))
                .pop()
        };
        let mut left = need.components.clone();
        left.sort_by_key(|component| std::cmp::Reverse(component.bytes));
        let mut parts = Vec::new();
        loop {
            let (mut taken, mut fallback) = (Vec::new(), None);
            left.retain(|component| {
                taken.push(component.clone());
                let fits = try_them(&taken);
                if fits.is_none() {
                    taken.pop();
                    return true;
                }
                fallback = fits;
                false
            });
            match fallback {
                Some(fallback) if fallback.peak < whole => parts.push(Fallback {
                    saved: whole - fallback.peak,
                    ..fallback
                }),
                _ => return parts,
            }
        }
    }
}

/// The stages with all of their components on the card.
fn resident(mut stages: Vec<StageNeed>) -> Vec<StageNeed> {
    for stage in &mut stages {
        for component in &mut stage.components {
            component.parts = Parts::default();
        }
    }
    stages
}
