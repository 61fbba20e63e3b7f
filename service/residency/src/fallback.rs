//! What would fit instead: computed from the ledger for this very request, never a canned suggestion.

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::nouns::{Bytes, Millis, StageNeed};
use crate::plan::{Move, Policy, Verdict, WaitCause, plan};

/// The same request, asked for a little differently.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// What differs: `8-bit`, `512x512`, `strips of 8`.
    pub label: String,
    /// How close it comes to what was asked; higher is closer.
    pub fidelity: u32,
    /// Its stages.
    pub stages: Vec<StageNeed>,
}

/// When an alternative would fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fits {
    /// Beside everything that is resident now.
    Now,
    /// After idle components left, or after our own stages or late bytes came to their end.
    AfterEvictions,
}

/// An alternative that would run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// What differs from the request.
    pub label: String,
    /// Its largest stage's peak.
    pub peak: Bytes,
    /// When it would fit.
    pub fits: Fits,
    /// By how much its peak is less than that of the closest alternative offered. Offer the request itself as the
    /// closest one, and this is what is saved.
    pub saved: Bytes,
}

/// Those of the alternatives that would run on this card, the closest first. What needs memory of others to come free,
/// or what is reserved for them, is not among them.
pub fn fallbacks(
    ledger: &Ledger,
    alternatives: &[Alternative],
    policy: Policy,
    now: Millis,
) -> Vec<Fallback> {
    let mut closest_first: Vec<&Alternative> = alternatives.iter().collect();
    closest_first.sort_by_key(|a| std::cmp::Reverse(a.fidelity));
    let most = closest_first.first().map_or(Bytes::ZERO, |a| peak_of(&a.stages));
    let fitting = closest_first.into_iter().filter_map(|alternative| {
        let fits = fits(ledger, &alternative.stages, policy, now)?;
        let peak = peak_of(&alternative.stages);
        Some(Fallback {
            label: alternative.label.clone(),
            peak,
            fits,
            saved: most - peak,
        })
    });
    fitting.collect()
}

/// The largest peak among stages, each component of a stage counted once.
pub fn peak_of(stages: &[StageNeed]) -> Bytes {
    let peaks = stages.iter().map(|stage| {
        let mut components: Vec<_> = stage.components.iter().collect();
        components.sort_by_key(|c| &c.id);
        components.dedup_by_key(|c| &c.id);
        components.iter().map(|c| c.bytes).sum::<Bytes>() + stage.scratch
    });
    peaks.max().unwrap_or(Bytes::ZERO)
}

fn fits(ledger: &Ledger, stages: &[StageNeed], policy: Policy, now: Millis) -> Option<Fits> {
    let mut fits = Fits::Now;
    for stage in stages {
        match plan(ledger, stage, policy, now) {
            Verdict::Run { moves } if !moves.iter().any(|m| matches!(m, Move::Evict(_))) => {}
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
