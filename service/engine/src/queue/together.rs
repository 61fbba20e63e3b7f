//! The two cards of a step that two cards run together: which cards can compute together, and whether two of them are free for it.
//!
//! The first part is on the card that a job of one card would be placed on, the second on the best other card that can compute with
//! it. A job that finds one such card free, and another that other jobs have now, holds the free one: no later job of the pass starts
//! there ([`Pass`](super::decide::Pass)), else short jobs on either card could keep the two from ever being free at once. Among cards
//! that can compute together only the first such job in the fair order holds one, so no two wait for the card that the other holds.

use gpu::CardKind;
use model::RequestError;
use residency::WaitCause;

use super::placing::{CardAnswer, Companion, Steps};
use super::record::JobRecord;
use super::view::View;
use crate::error::Error;
use crate::messages::Shortage;

/// What helps where no two cards are of one kind.
const TWO_OF_A_KIND: &str = ", or start the service with two cards of one kind";

impl View<'_> {
    /// Whether two cards can run a stage together: they compute alike, and each writes to the other's memory by itself.
    pub(super) fn can_compute_together(&self, one: usize, other: usize) -> bool {
        let (a, b) = (&self.cards[one].description, &self.cards[other].description);
        self.are_alike(one, other) && a.peers.has(&b.id) && b.peers.has(&a.id)
    }

    /// Whether two cards compute alike, and neither is the processor.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let (a, b) = (&self.cards[one].description, &self.cards[other].description);
        one != other
            && a.kind != CardKind::Cpu
            && a.kind == b.kind
            && a.compute_capability == b.compute_capability
            && a.compute_dtype == b.compute_dtype
    }

    /// Cards that can run a stage together with this one, now or once their workers have started.
    fn companions(&self, card: usize) -> impl Iterator<Item = usize> {
        (0..self.cards.len()).filter(move |other| self.can_compute_together(card, *other))
    }

    pub(super) fn has_companion(&self, card: usize) -> bool {
        self.companions(card).next().is_some()
    }

    /// Whether two cards run the next step of a job together, of those whose values are not cached.
    pub(super) fn is_next_on_two_cards(&self, job: &JobRecord, card: usize) -> bool {
        let dtype = &self.cards[card].description.compute_dtype;
        job.needs_two_cards() && job.is_on_two_cards(self.next_step(job, dtype))
    }

    /// The refusal of a job that needs two cards, where the service has no two that could ever run it together, or none with the card
    /// that the client prefers.
    pub(super) fn refusal_of_cards(&self, job: &JobRecord) -> Option<Error> {
        if !job.needs_two_cards() {
            return None;
        }
        let all = || 0..self.cards.len();
        let can_run = |card: &usize| {
            let card = &self.cards[*card].description;
            card.kind != CardKind::Cpu && job.models.contains_key(&card.compute_dtype)
        };
        let refuse = |problem: String| Some(Error::Invalid(vec![RequestError::new("cards", problem)]));
        let is_alone = |card: &usize| !all().any(|other| self.are_alike(*card, other));
        if !all().any(|card| can_run(&card) && self.has_companion(card)) {
            let (found, remedy) = match all().filter(can_run).count() {
                0 => ("no card that can run it with another", TWO_OF_A_KIND),
                1 => ("one card that can run it", TWO_OF_A_KIND),
                _ if all().filter(can_run).all(|card| is_alone(&card)) => {
                    ("no two cards of one kind that can run it", TWO_OF_A_KIND)
                }
                _ => ("no two cards that reach each other's memory", ""),
            };
            return refuse(format!(
                "is 2, and this service has {found}: leave it out{remedy}"
            ));
        }
        let hint = &job.options.card_hint;
        let named = all().find(|card| self.cards[*card].description.id == *hint);
        match named.filter(|card| !self.has_companion(*card)) {
            None => None,
            Some(card) => refuse(format!(
                "is 2, and no other card {} {hint}: leave it out, or name no card or another one",
                match is_alone(&card) {
                    true => "is of the kind of",
                    false => "of its kind reaches the memory of",
                }
            )),
        }
    }

    /// The answer of a card, with the best other one, to a job whose next step it would run with that. `ahead` is as for
    /// [`View::place`].
    pub(super) fn ask_two(&self, job: &JobRecord, card: usize, ahead: &[f64]) -> Option<CardAnswer> {
        let own = self.ask(job, card, Steps::AllLeft)?;
        let mut best = Second::None;
        for other in self.companions(card) {
            let answer = self.ask(job, other, Steps::Next)?;
            best = best.or(self.second(other, answer, ahead));
        }
        // Who has to wait for a card that an earlier job of the pass holds waits as for one that is busy.
        let is_free = matches!(own, CardAnswer::Start { .. }) && ahead[card].is_finite();
        let seconds = match own {
            CardAnswer::Start { seconds, .. }
            | CardAnswer::Behind { seconds }
            | CardAnswer::Alone { seconds, .. } => ahead[card] + seconds,
            CardAnswer::Never { .. } => return Some(own),
            CardAnswer::Short(_) => {
                return match best {
                    Second::Free { .. } | Second::Busy { .. } | Second::Short(_) => Some(own),
                    Second::Never(never) => Some(never),
                    Second::None => None,
                };
            }
        };
        let both = |other: f64| seconds.max(other);
        Some(match best {
            Second::Free { seconds, companion } if is_free => CardAnswer::Start {
                seconds: both(seconds),
                low_memory: matches!(own, CardAnswer::Start { low_memory: true, .. }),
                companion: Some(companion),
            },
            // A card whose worker does not run may stay away for long: nothing is held for it.
            Second::Free { seconds, companion } if self.cards[card].is_ready() => CardAnswer::Alone {
                seconds: both(seconds),
                free: companion.card,
            },
            Second::Busy {
                seconds,
                is_ready: true,
            } if is_free => CardAnswer::Alone {
                seconds: both(seconds),
                free: card,
            },
            Second::Free { seconds, .. } | Second::Busy { seconds, .. } => CardAnswer::Behind {
                seconds: both(seconds),
            },
            Second::Short(shortage) => CardAnswer::Short(shortage),
            Second::Never(never) => never,
            Second::None => return None,
        })
    }

    /// Another card as the second one, by its answer.
    fn second(&self, other: usize, answer: CardAnswer, ahead: &[f64]) -> Second {
        match answer {
            CardAnswer::Start {
                seconds, low_memory, ..
            } if ahead[other].is_finite() => Second::Free {
                seconds: ahead[other] + seconds,
                companion: Companion {
                    card: other,
                    low_memory,
                },
            },
            CardAnswer::Start { seconds, .. }
            | CardAnswer::Behind { seconds }
            | CardAnswer::Alone { seconds, .. } => Second::Busy {
                seconds: ahead[other] + seconds,
                is_ready: self.cards[other].is_ready(),
            },
            CardAnswer::Short(shortage) => Second::Short(shortage),
            never @ CardAnswer::Never { .. } => Second::Never(never),
        }
    }
}

/// The best of the other cards for a step that two cards run together, from the best kind to the worst.
enum Second {
    /// A card that could start now; seconds until it would have ended the step.
    Free { seconds: f64, companion: Companion },
    /// Cards that other jobs have now: the least seconds until the step would have ended on one, and whether the worker of one runs.
    Busy { seconds: f64, is_ready: bool },
    /// No card has the memory for it: the shortage of a card that waits for leases, else the least one.
    Short(Shortage),
    /// No card will ever have the memory for it.
    Never(CardAnswer),
    /// There is no other card.
    None,
}

impl Second {
    /// The better of two.
    fn or(self, other: Second) -> Second {
        match (self, other) {
            (
                Second::Busy { seconds, is_ready },
                Second::Busy {
                    seconds: of_other,
                    is_ready: other_is_ready,
                },
            ) => Second::Busy {
                seconds: seconds.min(of_other),
                is_ready: is_ready || other_is_ready,
            },
            (one, other) if other.is_better_than(&one) => other,
            (one, _) => one,
        }
    }

    fn is_better_than(&self, other: &Second) -> bool {
        match (self, other) {
            (Second::Free { seconds, .. }, Second::Free { seconds: least, .. }) => seconds < least,
            (Second::Short(shortage), Second::Short(least)) => {
                let is_held = shortage.cause == WaitCause::Leases;
                least.cause != WaitCause::Leases && (is_held || shortage.short < least.short)
            }
            _ => self.kind() < other.kind(),
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Second::Free { .. } => 0,
            Second::Busy { .. } => 1,
            Second::Short(_) => 2,
            Second::Never(_) => 3,
            Second::None => 4,
        }
    }
}
