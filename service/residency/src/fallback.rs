//! Fallbacks: which alternatives to a refused request would run, computed from the ledger.

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::nouns::{Bytes, Millis, StageNeed};
use crate::plan::{Move, Policy, Verdict, WaitCause, plan};

/// The request with smaller demands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative<C> {
    /// The difference from the request, in the caller's words.
    pub change: C,
    /// Closeness to the original request; higher is closer.
    pub fidelity: u32,
    pub stages: Vec<StageNeed>,
}

/// When an alternative would fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fits {
    /// Without evicting anything.
    Now,
    /// After evictions of idle components, or after a wait for our own stages or late bytes.
    AfterEvictions,
}

/// An alternative that would run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback<C> {
    /// The difference from the request.
    pub change: C,
    /// The largest peak among its stages.
    pub peak: Bytes,
    pub fits: Fits,
    /// Bytes saved at the peak, relative to the closest alternative offered. Offer the request itself as the closest
    /// one to make this the saving over the request.
    pub saved: Bytes,
}

/// The alternatives that would run on this card, the closest first. Alternatives that need foreign or reserved memory
/// to be released are left out.
pub fn fallbacks<C: Clone>(
    ledger: &Ledger,
    alternatives: &[Alternative<C>],
    policy: Policy,
    now: Millis,
) -> Vec<Fallback<C>> {
    let mut closest_first: Vec<&Alternative<C>> = alternatives.iter().collect();
    closest_first.sort_by_key(|a| std::cmp::Reverse(a.fidelity));
    let most = closest_first.first().map_or(Bytes::ZERO, |a| peak_of(&a.stages));
    let fitting = closest_first.into_iter().filter_map(|alternative| {
        let fits = fits(ledger, &alternative.stages, policy, now)?;
        let peak = peak_of(&alternative.stages);
        Some(Fallback {
            change: alternative.change.clone(),
            peak,
            fits,
            saved: most - peak,
        })
    });
    fitting.collect()
}

/// The largest peak among stages, each component of a stage counted once, and in its smallest part: what the card must have.
pub fn peak_of(stages: &[StageNeed]) -> Bytes {
    let peaks = stages.iter().map(|stage| {
        let mut components: Vec<_> = stage.components.iter().collect();
        components.sort_by_key(|c| &c.id);
        components.dedup_by_key(|c| &c.id);
        components.iter().map(|c| c.bytes_of(c.least())).sum::<Bytes>() + stage.scratch
    });
    peaks.max().unwrap_or(Bytes::ZERO)
}

fn fits(ledger: &Ledger, stages: &[StageNeed], policy: Policy, now: Millis) -> Option<Fits> {
    let mut fits = Fits::Now;
    for stage in stages {
        match plan(ledger, stage, policy, now) {
            Verdict::Run { moves }
                if !moves
                    .iter()
                    .any(|m| matches!(m, Move::Evict(_) | Move::Resize(..))) => {}
            Verdict::Run { .. } => fits = Fits::AfterEvictions,
            Verdict::Wait {
                cause: WaitCause::Foreign | WaitCause::Reservation,
                ..
            }
            | Verdict::Never { .. } => return None,
            Verdict::Wait { .. } => fits = Fits::AfterEvictions,
        }
    }
    Some(fits)
}
