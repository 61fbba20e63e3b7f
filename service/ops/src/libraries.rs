//! Libraries that are looked for when the program runs, rather than linked: today cuDNN.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Result};

use crate::planned::Planned;

/// Attentions that cuDNN computed, and that our own kernels did, on cards, since the process began.
static BY_CUDNN: AtomicU64 = AtomicU64::new(0);
static BY_OWN_KERNELS: AtomicU64 = AtomicU64::new(0);

/// Plans that were made, by [`PlansMade`]'s words.
static MADE_AHEAD: AtomicU64 = AtomicU64::new(0);
static MADE_IN_STAGES: AtomicU64 = AtomicU64::new(0);

/// What was found of the libraries that are looked for when the program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// The version of cuDNN, `9.19.0`, or in words why it is not used.
    pub cudnn: std::result::Result<String, String>,
}

/// What was found; looked for at the first call. Opens no card.
#[must_use]
pub fn libraries() -> Libraries {
    #[cfg(feature = "cuda")]
    let cudnn = crate::cudnn::Library::get()
        .map(crate::cudnn::Library::version)
        .map_err(str::to_owned);
    #[cfg(not(feature = "cuda"))]
    let cudnn = Err("built without CUDA".to_owned());
    Libraries { cudnn }
}

/// Says where compiled plans of cuDNN are kept beyond this process, at most 512 files of some 70 KB. Before any card is
/// prepared; what is said first counts. Without it none are kept.
pub fn keep_plans_in(folder: &Path) {
    #[cfg(feature = "cuda")]
    crate::cudnn::keep_plans_in(folder);
    #[cfg(not(feature = "cuda"))]
    let _ = folder; // there are no plans
}

/// Loads what operations need on a device beside its memory: our kernels, and cuDNN with its workspace. Memory of the card
/// that is taken here is part of its context. A device that is no card needs nothing.
///
/// # Errors
/// When the card fails. A library that is missing is no failure ([`libraries`]).
pub fn prepare(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        crate::cuda::prepare(device)?;
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
    Ok(())
}

/// Has plans of cuDNN made for these shapes on threads of their own, the first first, so that operations find them ready.
/// Returns at once. It is advice: nothing fails by it, shapes that were asked for before cost nothing, and a device without
/// cuDNN needs none.
pub fn make_plans(device: &Device, planned: &[Planned]) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && let Err(error) = crate::cuda::make_plans(device, planned)
    {
        tracing::debug!(%error, "no plans are made ahead: stages make them");
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (device, planned); // there are no plans
}

/// How many plans of cuDNN were compiled since the process began, whether or not there was one. Those that were kept are
/// not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlansMade {
    /// On threads of their own ([`make_plans`]).
    pub ahead: u64,
    /// By operations that did not find them.
    pub in_stages: u64,
}

impl PlansMade {
    /// Those of this process.
    #[must_use]
    pub fn now() -> PlansMade {
        PlansMade {
            ahead: MADE_AHEAD.load(Ordering::Relaxed),
            in_stages: MADE_IN_STAGES.load(Ordering::Relaxed),
        }
    }
}

/// Who makes a plan.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Maker {
    Ahead,
    Stage,
}

#[cfg(any(feature = "cuda", test))]
impl Maker {
    /// What the parts of its time are of.
    pub(crate) fn timeline(self) -> &'static str {
        match self {
            Maker::Ahead => "plans made ahead",
            Maker::Stage => "plans in a stage",
        }
    }
}

/// Counts a plan that is compiled.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_plan(by: Maker) {
    let made = match by {
        Maker::Ahead => &MADE_AHEAD,
        Maker::Stage => &MADE_IN_STAGES,
    };
    made.fetch_add(1, Ordering::Relaxed);
}

/// How many attentions on cards each path has computed since the process began. The difference over a stage says which
/// it went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionPaths {
    /// By cuDNN.
    pub cudnn: u64,
    /// By our own kernels.
    pub own: u64,
}

impl AttentionPaths {
    /// Those of this process.
    #[must_use]
    pub fn now() -> AttentionPaths {
        AttentionPaths {
            cudnn: BY_CUDNN.load(Ordering::Relaxed),
            own: BY_OWN_KERNELS.load(Ordering::Relaxed),
        }
    }

    /// What came since, in words for a report: `cudnn 9.19.0`, `own kernels`, both, or nothing.
    #[must_use]
    pub fn since(before: AttentionPaths) -> String {
        let now = AttentionPaths::now();
        let version = libraries().cudnn.unwrap_or_default();
        let cudnn = (now.cudnn > before.cudnn).then(|| format!("cudnn {version}"));
        let own = (now.own > before.own).then(|| "own kernels".to_owned());
        cudnn.into_iter().chain(own).collect::<Vec<_>>().join(", ")
    }
}

/// Counts an attention that was computed on a card.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_attention(by_cudnn: bool) {
    let path = if by_cudnn { &BY_CUDNN } else { &BY_OWN_KERNELS };
    path.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_the_paths_that_were_gone() {
        let before = AttentionPaths::now();
        count_attention(false);
        assert_eq!(AttentionPaths::since(before), "own kernels");
        count_attention(true);
        let both = AttentionPaths::since(before);
        assert!(
            both.starts_with("cudnn ") && both.ends_with(", own kernels"),
            "{both}"
        );
        assert_eq!(AttentionPaths::since(AttentionPaths::now()), "");
    }

    #[test]
    fn what_is_missing_has_a_reason() {
        if let Err(reason) = libraries().cudnn {
            assert!(!reason.is_empty());
        }
        assert!(prepare(&Device::Cpu).is_ok());
    }
}
