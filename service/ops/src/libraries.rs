//! Libraries that are looked for when the program runs, rather than linked: today cuDNN.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Result};

use crate::planned::Planned;

/// Attentions since the process began: those of CUDA devices that cuDNN computed, and that our own kernels did; and the CPU's.
static BY_CUDNN: AtomicU64 = AtomicU64::new(0);
static BY_OWN_KERNELS: AtomicU64 = AtomicU64::new(0);
static ON_CPU: AtomicU64 = AtomicU64::new(0);

/// The paths in words, beside `cudnn` with its version.
const OWN_KERNELS: &str = "own kernels";
const CPU_LOOPS: &str = "cpu loops";

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

/// What computes attention on a device: `cudnn 9.19.0`, `own kernels: ` with the reason why cuDNN does not, `cpu loops`. cuDNN
/// has no plan for some shapes, and our own kernels compute those: [`AttentionPaths`] says what a stage went by. Opens
/// cuDNN on a CUDA device, if [`prepare`] has not.
#[must_use]
pub fn attention_by(device: &Device) -> String {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let opened = crate::cuda::has_cudnn(device).map_err(|error| error.to_string());
            attention_on_cuda(libraries().cudnn, opened)
        }
        _ => CPU_LOOPS.to_owned(),
    }
}

/// [`attention_by`] a CUDA device: by what was found of cuDNN, and whether it is open there.
#[cfg(any(feature = "cuda", test))]
fn attention_on_cuda(
    cudnn: std::result::Result<String, String>,
    opened: std::result::Result<bool, String>,
) -> String {
    match (cudnn, opened) {
        (Ok(version), Ok(true)) => format!("cudnn {version}"),
        (Ok(version), Ok(false)) => {
            format!("{OWN_KERNELS}: cudnn {version} cannot be opened on this device; the log says why")
        }
        (Err(reason), _) | (_, Err(reason)) => format!("{OWN_KERNELS}: {reason}"),
    }
}

/// Has cuDNN's plans for these shapes made on threads of their own, in this order, so that operations find them ready.
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
pub(crate) enum MadeBy {
    Ahead,
    Stage,
}

#[cfg(any(feature = "cuda", test))]
impl MadeBy {
    /// What the parts of its time are of.
    pub(crate) fn timeline(self) -> &'static str {
        match self {
            MadeBy::Ahead => "plans made ahead",
            MadeBy::Stage => "plans in a stage",
        }
    }
}

/// Counts a plan that is compiled.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_plan(by: MadeBy) {
    let made = match by {
        MadeBy::Ahead => &MADE_AHEAD,
        MadeBy::Stage => &MADE_IN_STAGES,
    };
    made.fetch_add(1, Ordering::Relaxed);
}

/// How many attentions each path has computed since the process began. The difference over a stage says which it went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionPaths {
    /// On CUDA devices, by cuDNN.
    pub cudnn: u64,
    /// On CUDA devices, by our own kernels.
    pub own: u64,
    /// On the CPU.
    pub cpu: u64,
}

impl AttentionPaths {
    /// Those of this process.
    #[must_use]
    pub fn now() -> AttentionPaths {
        AttentionPaths {
            cudnn: BY_CUDNN.load(Ordering::Relaxed),
            own: BY_OWN_KERNELS.load(Ordering::Relaxed),
            cpu: ON_CPU.load(Ordering::Relaxed),
        }
    }

    /// What came since, in words for a report: `cudnn 9.19.0`, `own kernels`, `cpu loops`, several with commas between, or
    /// nothing.
    #[must_use]
    pub fn since(before: AttentionPaths) -> String {
        AttentionPaths::now().beyond(before, || libraries().cudnn.unwrap_or_default())
    }

    fn beyond(self, before: AttentionPaths, version: impl FnOnce() -> String) -> String {
        let cudnn = (self.cudnn > before.cudnn).then(|| format!("cudnn {}", version()));
        let own = (self.own > before.own).then(|| OWN_KERNELS.to_owned());
        let cpu = (self.cpu > before.cpu).then(|| CPU_LOOPS.to_owned());
        let paths: Vec<String> = [cudnn, own, cpu].into_iter().flatten().collect();
        paths.join(", ")
    }
}

/// Counts an attention that was computed on a CUDA device.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_attention(by_cudnn: bool) {
    let path = if by_cudnn { &BY_CUDNN } else { &BY_OWN_KERNELS };
    path.fetch_add(1, Ordering::Relaxed);
}

/// Counts one that was computed on the CPU.
pub(crate) fn count_attention_on_cpu() {
    ON_CPU.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_the_paths_that_were_gone() {
        let paths = |cudnn, own, cpu| AttentionPaths { cudnn, own, cpu };
        let before = paths(7, 5, 3);
        let report = |now: AttentionPaths| now.beyond(before, || "9.19.0".to_owned());
        assert_eq!(report(before), "");
        assert_eq!(report(paths(8, 5, 3)), "cudnn 9.19.0");
        assert_eq!(report(paths(7, 9, 3)), "own kernels");
        assert_eq!(report(paths(8, 6, 3)), "cudnn 9.19.0, own kernels");
        assert_eq!(report(paths(7, 5, 4)), "cpu loops");
    }

    #[test]
    fn each_attention_is_counted_for_its_path() {
        // Other tests of this process compute on the CPU meanwhile, or where they are told to: counts only grow.
        let before = AttentionPaths::now();
        count_attention(true);
        count_attention(false);
        count_attention_on_cpu();
        let now = AttentionPaths::now();
        assert!(now.cudnn > before.cudnn && now.own > before.own && now.cpu > before.cpu);
    }

    #[test]
    fn a_device_says_what_computes_attention_on_it_and_why() {
        assert_eq!(attention_by(&Device::Cpu), "cpu loops");
        let found = || Ok("9.19.0".to_owned());
        assert_eq!(attention_on_cuda(found(), Ok(true)), "cudnn 9.19.0");
        assert_eq!(
            attention_on_cuda(found(), Ok(false)),
            "own kernels: cudnn 9.19.0 cannot be opened on this device; the log says why"
        );
        let missing = || Err("libcudnn.so.9 cannot be loaded".to_owned());
        assert_eq!(
            attention_on_cuda(missing(), Ok(false)),
            "own kernels: libcudnn.so.9 cannot be loaded"
        );
        assert_eq!(
            attention_on_cuda(found(), Err("the device failed".to_owned())),
            "own kernels: the device failed"
        );
    }

    #[test]
    fn what_is_missing_has_a_reason() {
        if let Err(reason) = libraries().cudnn {
            assert!(!reason.is_empty());
        }
        assert!(prepare(&Device::Cpu).is_ok());
    }
}
