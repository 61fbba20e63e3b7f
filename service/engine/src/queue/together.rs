//! The two cards of a step that two cards run together: which cards are alike, and whether two of them are free for it.
//!
//! The first part is on the card that a job of one card would be placed on, the second on the best other card that is like it. A job
//! that finds one such card free, and another that other jobs have now, holds the free one: no later job of the pass starts there
//! ([`Pass`](super::decide::Pass)), else short jobs on either card could keep the two from ever being free at once. Among cards that
//! are alike only the first such job in the fair order holds one, so no two wait for the card that the other holds.

use gpu::CardKind;
use model::RequestError;
use residency::WaitCause;

use super::placing::{CardAnswer, Companion, Steps};
use super::record::JobRecord;
use super::view::View;
use crate::error::Error;

impl View<'_> {
    /// Whether two cards can run a stage together: cards that exchange data by themselves, which the processor does not, and that
    /// compute alike.
    pub(super) fn are_alike(&self, one: usize, other: usize) -> bool {
        let (a, b) = (&self.cards[one].description, &self.cards[other].description);
        one != other
            && a.kind != CardKind::Cpu
            && a.kind == b.kind
            && a.compute_capability == b.compute_capability
            && a.compute_dtype == b.compute_dtype
    }

    /// Cards that can run a stage together with this one, now or once their workers have started.
    fn companions(&self, card: usize) -> impl Iterator<Item = usize> {
        (0..self.cards.len()).filter(move |other| self.are_alike(card, *other))
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
        if !all().any(|card| can_run(&card) && self.has_companion(card)) {
            let found = match all().filter(can_run).count() {
                0 => "no card that can run it with another",
                1 => "one card that can run it",
                _ => "no two cards of one kind that can run it",
            };
            return refuse(format!(
                "is 2, and this service has {found}: leave it out, or start the service with two cards of one kind"
            ));
        }
        let hint = &job.options.card_hint;
        let named = all().find(|card| self.cards[*card].description.id == *hint);
        if named.is_some_and(|card| !self.has_companion(card)) {
            return refuse(format!(
                "is 2, and no other card is of the kind of {hint}: leave it out, or name no card or another one"
            ));
        }
        None
    }

    /// The answer of a card, with the best other one, to a job whose next step it would run with that. `ahead` is as for
    /// [`View::place`].
    pub(super) fn ask_two(&self, job: &JobRecord, card: usize, ahead: &[f64]) -> Option<CardAnswer> {
        // Who has to wait for a card that an earlier job of the pass holds waits as for one that is busy.
        let is_kept = |card: usize| ahead[card].is_infinite();
        let finish = |card: usize, seconds: f64| ahead[card] + seconds;
        let own = self.ask(job, card, Steps::AllLeft)?;
        let mut free: Option<(f64, Companion)> = None;
        let (mut busy, mut is_busy_now): (Option<f64>, bool) = (None, false);
        let (mut refusal, mut short): (Option<CardAnswer>, Option<CardAnswer>) = (None, None);
        for other in self.companions(card) {
            match self.ask(job, other, Steps::Next)? {
                CardAnswer::Start {
                    seconds, low_memory, ..
                } if !is_kept(other) => {
                    if free.as_ref().is_none_or(|(least, _)| seconds < *least) {
                        let companion = Companion {
                            card: other,
                            low_memory,
                        };
                        free = Some((seconds, companion));
                    }
                }
                CardAnswer::Start { seconds, .. }
                | CardAnswer::Behind { seconds }
                | CardAnswer::Alone { seconds, .. } => {
                    // A card whose worker does not run may stay away for long: nothing is held for it.
                    is_busy_now |= self.cards[other].is_ready();
                    let seconds = finish(other, seconds);
                    busy = Some(busy.map_or(seconds, |least| least.min(seconds)));
                }
                CardAnswer::Short(shortage) => {
                    let is_held = shortage.cause == WaitCause::Leases;
                    let is_less = match &short {
                        Some(CardAnswer::Short(least)) => {
                            least.cause != WaitCause::Leases && (is_held || shortage.short < least.short)
                        }
                        _ => true,
                    };
                    if is_less {
                        short = Some(CardAnswer::Short(shortage));
                    }
                }
                never @ CardAnswer::Never { .. } => refusal = Some(never),
            }
        }
        let (is_free, seconds) = match own {
            CardAnswer::Start { seconds, .. } => (!is_kept(card), finish(card, seconds)),
            CardAnswer::Behind { seconds } | CardAnswer::Alone { seconds, .. } => {
                (false, finish(card, seconds))
            }
            CardAnswer::Never { .. } => return Some(own),
            CardAnswer::Short(_) if free.is_some() || busy.is_some() || short.is_some() => return Some(own),
            CardAnswer::Short(_) => return refusal,
        };
        let low_memory = matches!(own, CardAnswer::Start { low_memory: true, .. });
        Some(match (free, busy) {
            (Some((other, companion)), _) if is_free => CardAnswer::Start {
                seconds: seconds.max(other),
                low_memory,
                companion: Some(companion),
            },
            (None, Some(other)) if is_free && is_busy_now => CardAnswer::Alone {
                seconds: seconds.max(other),
                free: card,
            },
            (Some((other, companion)), _) if self.cards[card].is_ready() => CardAnswer::Alone {
                seconds: seconds.max(other),
                free: companion.card,
            },
            (Some((other, _)), _) | (None, Some(other)) => CardAnswer::Behind {
                seconds: seconds.max(other),
            },
            (None, None) => return short.or(refusal),
        })
    }
}
