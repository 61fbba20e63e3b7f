//! Sampling in rounds of a few steps, so that requests at different steps can share passes of a model. Each round is a stage,
//! and begins with the state of the round before.

use std::collections::BTreeMap;
use std::ops::Range;

use residency::Bytes;

use model::Request;
use model::{MAX_SETS, SharedPass, StagePlan};
use model::{StageError, StageRun};

/// A range of the steps of a sampling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    /// Numbers of its steps, from 0.
    pub(crate) steps: Range<u32>,
    /// Number of all steps that are run.
    pub(crate) of: u32,
}

/// The name of a value after `steps` steps.
pub(crate) fn value_after(value: &str, steps: u32) -> String {
    format!("{value}_{steps}")
}

impl Round {
    /// The rounds of a request's sampling of `steps` steps: as many as slots, of about as many steps each, and of at least
    /// one. A sampling that shares no passes is one round.
    pub(crate) fn all(request: &Request, steps: u32) -> Vec<Round> {
        let rounds = match is_in_rounds(request) {
            true => request.slots.min(steps.max(1)),
            false => 1,
        };
        let edge = |round: u32| (u64::from(steps) * u64::from(round) / u64::from(rounds)) as u32;
        let round = |number: u32| Round {
            steps: edge(number)..edge(number + 1),
            of: steps,
        };
        (0..rounds).map(round).collect()
    }

    /// The round of a stage whose state is named `value`, of `of` steps in all.
    ///
    /// # Errors
    /// [`StageError::BadInput`] if the round ends after these steps.
    pub(crate) fn of_plan(plan: &StagePlan, value: &str, of: u32) -> Result<Round, StageError> {
        let taken = plan.takes.iter();
        let number = |name: &str| name.strip_prefix(value)?.strip_prefix('_')?.parse().ok();
        let first: u32 = taken.filter_map(|taken| number(&taken.name)).next().unwrap_or(0);
        match first.checked_add(plan.steps) {
            Some(end) if end <= of => Ok(Round {
                steps: first..end,
                of,
            }),
            _ => Err(StageError::BadInput(format!(
                "{} of {} steps from {first} on, of {of}",
                plan.name, plan.steps
            ))),
        }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.steps.start == 0
    }

    pub(crate) fn is_last(&self) -> bool {
        self.steps.end >= self.of
    }

    /// The name of a value of the state that it begins with; `None` in the first round.
    pub(crate) fn begins_with(&self, value: &str) -> Option<String> {
        (!self.is_first()).then(|| value_after(value, self.steps.start))
    }

    /// The name of a value of the state that it leaves; `None` in the last round.
    pub(crate) fn leaves(&self, value: &str) -> Option<String> {
        (!self.is_last()).then(|| value_after(value, self.steps.end))
    }
}

/// How the sampling of a request shares passes, in rounds. `None` with one slot, or where strengths of adapters change over the
/// steps, since a whole pass has one strength; such a request is sampled in one stage.
/// `scratch_each`, `scratch_of_set` and `copies` are those of [`SharedPass`].
pub(crate) fn shared_pass(
    request: &Request,
    key: String,
    (scratch_each, scratch_of_set): (Bytes, Bytes),
    copies: BTreeMap<String, Bytes>,
) -> Option<SharedPass> {
    is_in_rounds(request).then(|| SharedPass {
        key,
        adapters: set_of_adapters(request),
        slots: request.slots,
        scratch_each,
        scratch_of_set,
        copies,
    })
}

/// Whether a request is sampled in rounds.
pub(crate) fn is_in_rounds(request: &Request) -> bool {
    request.slots > 1 && !request.has_curves()
}

/// The adapters that change the steps of a request, with their strengths: [`SharedPass::adapters`]. Names are quoted, so that no name
/// reads as several.
pub(crate) fn set_of_adapters(request: &Request) -> String {
    let uses = request.adapters.iter().filter(|each| !each.strength.is_zero());
    let named = uses.map(|each| format!("{:?}*{}", each.name, each.strength.first()));
    named.collect::<Vec<_>>().join(",")
}

/// Checks that stages may share passes.
///
/// # Errors
/// [`StageError::BadInput`] if one of them runs alone, if their keys differ, if there are more of them than slots, or if they have more
/// than [`MAX_SETS`] sets of adapters.
pub(crate) fn check_shared(stages: &[StageRun<'_>]) -> Result<(), StageError> {
    let mut keys = stages.iter().map(|stage| stage.plan.shared.as_ref());
    let slots = keys
        .clone()
        .map(|shared| shared.map_or(1, |shared| shared.slots as usize));
    let most = slots.max().unwrap_or(0);
    let first = keys.clone().next().flatten().map(|shared| &shared.key);
    let is_equal = first.is_some() && keys.all(|shared| shared.map(|shared| &shared.key) == first);
    let sets = SharedPass::sets(stages.iter().filter_map(|stage| stage.plan.shared.as_ref()));
    match is_equal && stages.len() <= most && sets <= MAX_SETS {
        true => Ok(()),
        false => Err(StageError::BadInput(format!(
            "{} stages of {sets} sets of adapters that cannot share a pass",
            stages.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Audio, Medium};

    #[test]
    fn rounds_are_all_steps_in_parts_of_about_equal_length() {
        for (steps, slots, expected) in [
            (8, 1, vec![0..8]),
            (8, 4, vec![0..2, 2..4, 4..6, 6..8]),
            (8, 3, vec![0..2, 2..5, 5..8]),
            (2, 4, vec![0..1, 1..2]),
            (1, 8, vec![0..1]),
        ] {
            let request = Request {
                slots,
                ..Request::of(Medium::Audio(Audio::default()), steps, 1.0, 1)
            };
            let rounds = Round::all(&request, steps);
            let found: Vec<Range<u32>> = rounds.iter().map(|round| round.steps.clone()).collect();
            assert_eq!(found, expected, "{steps} steps, {slots} slots");
            for pair in rounds.windows(2) {
                assert!(pair[0].leaves("x").is_some());
                assert_eq!(pair[0].leaves("x"), pair[1].begins_with("x"));
            }
            let (first, last) = (&rounds[0], &rounds[rounds.len() - 1]);
            assert_eq!((first.begins_with("x"), last.leaves("x")), (None, None));
        }
    }
}
