//! Where a job could go: each card's answer for its next step, and the best of them.

use residency::{Bytes, Ledger, Millis, StageNeed, WaitCause, predicted_move_seconds};
use tokio::time::Instant;

use super::actor::Actor;
use super::memos::Memos;
use super::record::{JobRecord, Need};
use super::steps::StepKind;
use crate::admission::{Admission, choose_rung, choose_rung_low_memory, not_resident_yet};
use crate::messages::Shortage;

/// Where a job goes.
#[derive(Clone, Debug)]
pub(super) enum Placement {
    /// To this card, now.
    Start {
        card: usize,
        /// Only because it may run although memory is short.
        low_memory: bool,
    },
    /// Behind what a card is doing.
    Behind { card: usize },
    /// Behind what clients hold, or what is on its way: nothing of others, and nothing that runs.
    Held,
    /// To wait for memory that is late or that others have.
    Short { shortage: Shortage },
    /// Nowhere: it exceeds every card.
    Never {
        card: usize,
        index: usize,
        needed: Bytes,
        capacity: Bytes,
    },
    /// No card that it could use is there at all.
    Nowhere,
}

/// What one card says.
enum Answer {
    Start {
        seconds: f64,
        low_memory: bool,
    },
    Behind {
        seconds: f64,
    },
    Short(Shortage),
    Never {
        index: usize,
        needed: Bytes,
        capacity: Bytes,
    },
}

impl Actor {
    /// The best place for a job's next step. `ahead` is seconds of work that each card has before it.
    pub(super) fn place(&self, job: &JobRecord, ahead: &[f64], now: Instant) -> Placement {
        let hinted = self.hinted(job);
        let mut best: Option<(f64, Placement)> = None;
        let mut held = false;
        let mut short: Option<Shortage> = None;
        let (mut never, mut most): (Option<Placement>, Option<Bytes>) = (None, None);
        for (card, seconds_ahead) in ahead.iter().enumerate() {
            if hinted.is_some_and(|hinted| hinted != card) {
                continue;
            }
            let Some(answer) = self.ask(job, card, now) else {
                continue;
            };
            let (seconds, placement) = match answer {
                Answer::Start { seconds, low_memory } => (seconds, Placement::Start { card, low_memory }),
                Answer::Behind { seconds } => (seconds, Placement::Behind { card }),
                Answer::Short(shortage) if shortage.cause == WaitCause::Leases => {
                    held = true;
                    continue;
                }
                Answer::Short(shortage) => {
                    if short.as_ref().is_none_or(|least| shortage.short < least.short) {
                        short = Some(shortage);
                    }
                    continue;
                }
                Answer::Never {
                    index,
                    needed,
                    capacity,
                } => {
                    // The card that gives the most says what is missing.
                    if most.is_none_or(|most| most < capacity) {
                        most = Some(capacity);
                        never = Some(Placement::Never {
                            card,
                            index,
                            needed,
                            capacity,
                        });
                    }
                    continue;
                }
            };
            let finish = seconds_ahead + seconds;
            if best.as_ref().is_none_or(|(least, _)| finish < *least) {
                best = Some((finish, placement));
            }
        }
        match (best, short) {
            (Some((_, placement)), _) => placement,
            (None, _) if held => Placement::Held,
            (None, Some(shortage)) => Placement::Short { shortage },
            (None, None) => never.unwrap_or(Placement::Nowhere),
        }
    }

    /// The card that the client prefers, as long as it is there; a swap's is where the old model is.
    fn hinted(&self, job: &JobRecord) -> Option<usize> {
        if let Some(begun) = job.swap.as_ref().and_then(|swap| swap.card()) {
            return Some(begun);
        }
        let hint = &job.options.card_hint;
        let named = self.cards.iter().position(|card| card.description.id == *hint);
        let card = named.or_else(|| self.card_of_swap(job))?;
        self.cards[card].is_ready().then_some(card)
    }

    /// Whether a job may use a card at all.
    pub(super) fn may_use(&self, job: &JobRecord, card: usize) -> bool {
        self.hinted(job).is_none_or(|hinted| hinted == card)
            && job
                .models
                .contains_key(&self.cards[card].description.compute_dtype)
    }

    fn ask(&self, job: &JobRecord, index: usize, now: Instant) -> Option<Answer> {
        let card = &self.cards[index];
        let dtype = &card.description.compute_dtype;
        let ledger_now = card.ledger_now(now);
        let ledger = &*self.ledger_for(job, index);
        let next = self.next_step(job, dtype);
        let needs: Vec<(usize, Need)> = self.remaining_needs(job, next, index)?;
        if let Some(never) = self.never(job, index, ledger, &needs, ledger_now) {
            return Some(never);
        }
        let (_, need) = needs.first()?;
        let policy = self.settings.policy;
        let low = job.low_memory || (job.options.allow_low_memory && self.exceeds(ledger, need, ledger_now));
        if self.is_behind_a_swap(job, index) {
            return Some(Answer::Behind {
                seconds: card.busy_seconds(now),
            });
        }
        if !card.is_free() {
            // Whether it fits will be seen when the card is free; memory of others is waited for meanwhile.
            let admission = choose_rung(ledger, &need.components, need.rungs(), policy, ledger_now);
            return Some(match admission {
                Admission::Wait { rung, short, cause } if cause != WaitCause::Leases && !low => {
                    Answer::Short(self.shortage(index, need, rung, short, cause))
                }
                _ => Answer::Behind {
                    seconds: self.move_seconds(ledger, &needs, ledger_now),
                },
            });
        }
        if let Some(refusal) = job
            .refusals
            .get(&index)
            .filter(|r| r.snapshot == card.snapshots && now < r.until)
        {
            return Some(Answer::Short(refusal.shortage.clone()));
        }
        if low {
            let seconds = self.move_seconds(ledger, &needs, ledger_now);
            return Some(Answer::Start {
                seconds,
                low_memory: true,
            });
        }
        Some(
            match choose_rung(ledger, &need.components, need.rungs(), policy, ledger_now) {
                Admission::Run { .. } => Answer::Start {
                    seconds: self.move_seconds(ledger, &needs, ledger_now),
                    low_memory: false,
                },
                Admission::Wait { rung, short, cause } => {
                    Answer::Short(self.shortage(index, need, rung, short, cause))
                }
                Admission::Never { needed, capacity } => Answer::Never {
                    index: next,
                    needed,
                    capacity,
                },
            },
        )
    }

    /// The first step that is not answered by a cache.
    pub(super) fn next_step(&self, job: &JobRecord, dtype: &str) -> usize {
        job.cursor + usize::from(self.is_cached(job, job.cursor, dtype))
    }

    /// Whether what a step gives is known already, as another job's stage gave it.
    pub(super) fn is_cached(&self, job: &JobRecord, index: usize, dtype: &str) -> bool {
        let Some(StepKind::Stage(stage)) = job.steps.get(index).map(|step| step.kind) else {
            return false;
        };
        memo_key(job, stage, dtype)
            .is_some_and(|key| self.memos.contains(&key) && self.may_take_known_values(job))
    }

    /// A step's need on a card, with all that was learned.
    pub(super) fn need_on(&self, job: &JobRecord, index: usize, card: usize) -> Option<Need> {
        let description = &self.cards[card].description;
        let mut need = job.need(index, &description.compute_dtype)?;
        let model = &job.models.get(&description.compute_dtype)?.model;
        self.learned.improve(&mut need, model.family(), description);
        Some(need)
    }

    /// Needs of the steps that are left, each kind of step once.
    fn remaining_needs(&self, job: &JobRecord, next: usize, card: usize) -> Option<Vec<(usize, Need)>> {
        let mut kinds = Vec::new();
        let mut needs = Vec::new();
        for index in next..job.steps.len() {
            if !kinds.contains(&job.steps[index].kind) {
                kinds.push(job.steps[index].kind);
                needs.push((index, self.need_on(job, index, card)?));
            }
        }
        Some(needs)
    }

    fn never(
        &self,
        job: &JobRecord,
        card: usize,
        ledger: &Ledger,
        needs: &[(usize, Need)],
        now: Millis,
    ) -> Option<Answer> {
        needs.iter().find_map(|(index, need)| {
            let admission = choose_rung(ledger, &need.components, need.rungs(), self.settings.policy, now);
            match admission {
                Admission::Never { needed, capacity } => {
                    let risks_it = job.options.allow_low_memory && self.could_risk(ledger, need, now);
                    (!risks_it).then_some(Answer::Never {
                        index: *index,
                        needed,
                        capacity,
                    })
                }
                _ if job.never_on.contains(&card) => {
                    let (needed, capacity) = (need.with_scratch(need.least_scratch()).peak(), ledger.total());
                    Some(Answer::Never {
                        index: *index,
                        needed,
                        capacity,
                    })
                }
                Admission::Run { .. } | Admission::Wait { .. } => None,
            }
        })
    }

    fn exceeds(&self, ledger: &Ledger, need: &Need, now: Millis) -> bool {
        let admission = choose_rung(ledger, &need.components, need.rungs(), self.settings.policy, now);
        matches!(admission, Admission::Never { .. })
    }

    fn could_risk(&self, ledger: &Ledger, need: &Need, now: Millis) -> bool {
        choose_rung_low_memory(ledger, &need.components, need.rungs(), self.settings.policy, now).is_some()
    }

    fn move_seconds(&self, ledger: &Ledger, needs: &[(usize, Need)], now: Millis) -> f64 {
        let seconds = |need: &StageNeed| predicted_move_seconds(ledger, need, self.settings.policy, now);
        let each = needs
            .iter()
            .map(|(_, need)| seconds(&need.with_scratch(need.least_scratch())));
        each.filter(|seconds| seconds.is_finite()).sum()
    }

    pub(super) fn shortage(
        &self,
        card: usize,
        need: &Need,
        rung: usize,
        short: Bytes,
        cause: WaitCause,
    ) -> Shortage {
        let ledger = &self.cards[card].ledger;
        let scratch = need.rungs().get(rung).map_or(Bytes::ZERO, |rung| rung.scratch);
        Shortage {
            short,
            needed: not_resident_yet(ledger, &need.components, scratch),
            usable: ledger.usable(),
            cause,
            holders: ledger.holders(),
        }
    }

    /// Bytes of the components that a job still needs and that are not on a card.
    pub(super) fn missing_bytes(&self, job: &JobRecord, card: usize) -> Bytes {
        let dtype = &self.cards[card].description.compute_dtype;
        let ledger = &self.cards[card].ledger;
        let next = self.next_step(job, dtype);
        let needs = (next..job.steps.len()).filter_map(|index| job.need(index, dtype));
        let mut components: Vec<_> = needs.flat_map(|need| need.components).collect();
        components.sort_by(|a, b| a.id.cmp(&b.id));
        components.dedup_by(|a, b| a.id == b.id);
        components
            .iter()
            .filter(|c| !ledger.is_resident(&c.id))
            .map(|c| c.bytes)
            .sum()
    }
}

/// The key of what a stage of a job gives, on cards of a dtype; `None`: it is this job's alone.
pub(super) fn memo_key(job: &JobRecord, stage: usize, dtype: &str) -> Option<String> {
    let stage = job.plan(dtype).get(stage)?;
    let memo = stage.memo.as_ref()?;
    Some(Memos::key(&job.components(&stage.components, dtype), memo))
}
