//! Placement: the card with the least predicted finish time. A warm card is preferred while its saved moves outweigh
//! its queue.

use crate::ledger::Ledger;
use crate::nouns::{Millis, StageNeed};
use crate::plan::{Move, Policy, Verdict, plan, plan_low_memory};

/// Measured: 40 ms until the driver shows 21.5 GB as free on an H100; a few milliseconds at least.
const EVICT_SECONDS: f64 = 0.005;
const EVICT_SECONDS_PER_BYTE: f64 = 0.040 / 21.5e9;
const TRIM_SECONDS: f64 = 0.005;

/// A card that could run a job.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The card's ledger, as last published.
    pub ledger: &'a Ledger,
    /// Predicted seconds until the card has finished the work assigned to it.
    pub work_ahead_seconds: f64,
}

/// Predicted seconds of moves before a stage can run here. Infinite for [`Verdict::Never`]; for [`Verdict::Wait`],
/// the moves that follow the wait (the wait itself is not included).
pub fn predicted_move_seconds(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> f64 {
    match plan(ledger, need, policy, now) {
        Verdict::Run { moves } => moves.iter().map(seconds_of).sum(),
        Verdict::Wait { .. } => plan_low_memory(ledger, need, policy, now)
            .moves
            .iter()
            .map(seconds_of)
            .sum(),
        Verdict::Never { .. } => f64::INFINITY,
    }
}

/// Index of the candidate with the least predicted finish time for a job's stages, the first of equals; `None` if the
/// job can run on none of them.
pub fn choose(
    candidates: &[Candidate<'_>],
    stages: &[StageNeed],
    policy: Policy,
    now: Millis,
) -> Option<usize> {
    let seconds = candidates.iter().map(|candidate| {
        let moves = stages
            .iter()
            .map(|need| predicted_move_seconds(candidate.ledger, need, policy, now));
        candidate.work_ahead_seconds + moves.sum::<f64>()
    });
    let finite = seconds.enumerate().filter(|(_, seconds)| seconds.is_finite());
    finite
        .min_by(|(_, a), (_, b)| a.total_cmp(b))
        .map(|(index, _)| index)
}

fn seconds_of(a_move: &Move) -> f64 {
    match a_move {
        Move::Load(component) => component.reload_seconds.max(0.0),
        Move::Evict(component) => EVICT_SECONDS + component.bytes.0 as f64 * EVICT_SECONDS_PER_BYTE,
        Move::Trim => TRIM_SECONDS,
    }
}
