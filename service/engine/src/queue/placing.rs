//! The placement of jobs: each card's answer for a job's next step, and the best of them.

use residency::{Bytes, Ledger, Millis, Policy, StageNeed, WaitCause, predicted_move_seconds};

use super::record::JobRecord;
use super::view::View;
use crate::admission::{Admission, choose_rung, choose_rung_low_memory, not_resident_yet};
use crate::messages::Shortage;
use crate::need::Need;

/// The placement of a job.
#[derive(Clone, Debug)]
pub(super) enum Placement {
    /// To this card, now.
    Start {
        card: usize,
        /// The job starts only because it accepts that memory may be short.
        low_memory: bool,
        /// The card of the second part, where two cards run the step together.
        companion: Option<Companion>,
    },
    /// The step needs two cards: this one is free, and the other job's work on the second is to end.
    Alone { card: usize },
    /// After the current work of a card.
    Behind { card: usize },
    /// After claims of clients, or after memory that is about to be freed: neither other programs nor running jobs are the cause.
    Held,
    /// The job waits for memory that is late or that other programs hold.
    Short { shortage: Shortage },
    /// The job exceeds every card.
    Never {
        card: usize,
        index: usize,
        needed: Bytes,
        capacity: Bytes,
    },
    /// No card that it may use is there.
    Nowhere,
}

/// The card that runs the second part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Companion {
    pub(super) card: usize,
    pub(super) low_memory: bool,
}

/// The steps for which a card is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Steps {
    /// Those that are left.
    AllLeft,
    /// The next one alone.
    Next,
}

/// The answer of one card, or of two to a step that they run together.
pub(super) enum CardAnswer {
    Start {
        seconds: f64,
        low_memory: bool,
        companion: Option<Companion>,
    },
    /// Of two cards only this one is free.
    Alone {
        seconds: f64,
        free: usize,
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

impl View<'_> {
    /// The best place for a job's next step. `ahead` is seconds of work that each card has before it; on a card where that is infinite it
    /// does not start.
    pub(super) fn place(&self, job: &JobRecord, ahead: &[f64]) -> Placement {
        let only = self.only_card(job);
        let mut best: Option<(f64, Placement)> = None;
        let mut held = false;
        let mut short: Option<Shortage> = None;
        let (mut never, mut most): (Option<Placement>, Option<Bytes>) = (None, None);
        for (card, seconds_ahead) in ahead.iter().enumerate() {
            if only.is_some_and(|only| only != card) {
                continue;
            }
            if job.needs_two_cards() && !self.has_companion(card) {
                continue; // as the step that needs them does
            }
            let needs_two = self.is_next_on_two_cards(job, card);
            let answer = match needs_two {
                true => self.ask_two(job, card, ahead),
                false => self.ask(job, card, Steps::AllLeft),
            };
            let Some(answer) = answer else {
                continue;
            };
            let (seconds, placement) = match answer {
                CardAnswer::Start { seconds, .. } if seconds_ahead.is_infinite() => {
                    (seconds, Placement::Behind { card })
                }
                CardAnswer::Start {
                    seconds,
                    low_memory,
                    companion,
                } => {
                    let start = Placement::Start {
                        card,
                        low_memory,
                        companion,
                    };
                    (seconds, start)
                }
                CardAnswer::Alone { seconds, free } => (seconds, Placement::Alone { card: free }),
                CardAnswer::Behind { seconds } => (seconds, Placement::Behind { card }),
                CardAnswer::Short(shortage) if shortage.cause == WaitCause::Leases => {
                    held = true;
                    continue;
                }
                CardAnswer::Short(shortage) => {
                    if short.as_ref().is_none_or(|least| shortage.short < least.short) {
                        short = Some(shortage);
                    }
                    continue;
                }
                CardAnswer::Never {
                    index,
                    needed,
                    capacity,
                } => {
                    // The shortage is that of the card with the largest capacity.
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
            // The answer of two cards has what is before each of them already.
            let finish = if needs_two {
                seconds
            } else {
                seconds_ahead + seconds
            };
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

    pub(super) fn ask(&self, job: &JobRecord, index: usize, steps: Steps) -> Option<CardAnswer> {
        let card = &self.cards[index];
        let dtype = &card.description.compute_dtype;
        let ledger_now = card.ledger_now(self.now);
        let ledger = &*self.ledger_for(job, index);
        let next = self.next_step(job, dtype);
        job.models.get(dtype)?;
        let mut needs = self.remaining_needs(job, next, index);
        if steps == Steps::Next {
            needs.truncate(1);
        }
        let policy = self.policy(job, index);
        if let Some(never) = self.never(job, index, ledger, &needs, ledger_now) {
            return Some(never);
        }
        let (_, need) = needs.first()?;
        let low = job.attempt.low_memory
            || (job.options.allow_low_memory && exceeds(ledger, need, policy, ledger_now));
        if self.waits_for_swap(job, index) {
            return Some(CardAnswer::Behind {
                seconds: card.busy_seconds(self.now),
            });
        }
        if !card.is_free() {
            // Whether the job fits is decided when the card is free. Meanwhile it waits for memory of other programs.
            let admission = choose_rung(ledger, need, policy, ledger_now);
            return Some(match admission {
                Admission::Wait { rung, short, cause } if cause != WaitCause::Leases && !low => {
                    CardAnswer::Short(self.shortage(index, need, rung, short, cause))
                }
                _ => CardAnswer::Behind {
                    seconds: self.seconds_on(job, next, index, ledger, &needs),
                },
            });
        }
        if let Some(refusal) = job
            .attempt
            .refusals
            .get(&index)
            .filter(|r| r.snapshot == card.snapshots && self.now < r.until)
        {
            return Some(CardAnswer::Short(refusal.shortage.clone()));
        }
        if low {
            let seconds = self.seconds_on(job, next, index, ledger, &needs);
            return Some(CardAnswer::Start {
                seconds,
                low_memory: true,
                companion: None,
            });
        }
        Some(match choose_rung(ledger, need, policy, ledger_now) {
            Admission::Run { .. } => CardAnswer::Start {
                seconds: self.seconds_on(job, next, index, ledger, &needs),
                low_memory: false,
                companion: None,
            },
            Admission::Wait { rung, short, cause } => {
                CardAnswer::Short(self.shortage(index, need, rung, short, cause))
            }
            Admission::Never { needed, capacity } => CardAnswer::Never {
                index: next,
                needed,
                capacity,
            },
        })
    }

    /// Needs of the steps that are left, each kind of step once.
    fn remaining_needs(&self, job: &JobRecord, next: usize, card: usize) -> Vec<(usize, Need)> {
        let mut kinds = Vec::new();
        let mut needs = Vec::new();
        for index in next..job.steps.len() {
            if !kinds.contains(&job.steps[index].kind) {
                kinds.push(job.steps[index].kind);
                needs.extend(self.need_on(job, index, card).map(|need| (index, need)));
            }
        }
        needs
    }

    fn never(
        &self,
        job: &JobRecord,
        card: usize,
        ledger: &Ledger,
        needs: &[(usize, Need)],
        now: Millis,
    ) -> Option<CardAnswer> {
        let policy = self.policy(job, card);
        needs.iter().find_map(|(index, need)| {
            let admission = choose_rung(ledger, need, policy, now);
            match admission {
                Admission::Never { needed, capacity } => {
                    let risks_it = job.options.allow_low_memory && could_risk(ledger, need, policy, now);
                    (!risks_it).then_some(CardAnswer::Never {
                        index: *index,
                        needed,
                        capacity,
                    })
                }
                _ if job.attempt.never_on.contains(&card) => {
                    let (needed, capacity) = (need.least().peak(), ledger.total());
                    Some(CardAnswer::Never {
                        index: *index,
                        needed,
                        capacity,
                    })
                }
                Admission::Run { .. } | Admission::Wait { .. } => None,
            }
        })
    }

    /// Seconds that a card takes for the steps of a job from `next` on: moves, then computing.
    fn seconds_on(
        &self,
        job: &JobRecord,
        next: usize,
        card: usize,
        ledger: &Ledger,
        needs: &[(usize, Need)],
    ) -> f64 {
        let steps = next..job.steps.len();
        let run_ms: f64 = steps
            .map(|index| self.expected_step_ms(job, index, Some(card)).0)
            .sum();
        let now = self.cards[card].ledger_now(self.now);
        move_seconds(ledger, needs, self.policy(job, card), now) + run_ms / 1000.0
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
        Shortage {
            short,
            needed: not_resident_yet(ledger, &need.components_on(rung), need.scratch(rung)),
            usable: ledger.usable(),
            cause,
            holders: ledger.holders(),
        }
    }
}

fn exceeds(ledger: &Ledger, need: &Need, policy: Policy, now: Millis) -> bool {
    let admission = choose_rung(ledger, need, policy, now);
    matches!(admission, Admission::Never { .. })
}

fn could_risk(ledger: &Ledger, need: &Need, policy: Policy, now: Millis) -> bool {
    choose_rung_low_memory(ledger, need, policy, now).is_some()
}

fn move_seconds(ledger: &Ledger, needs: &[(usize, Need)], policy: Policy, now: Millis) -> f64 {
    let seconds = |need: &StageNeed| predicted_move_seconds(ledger, need, policy, now);
    let each = needs.iter().map(|(_, need)| seconds(&need.least()));
    each.filter(|seconds| seconds.is_finite()).sum()
}
