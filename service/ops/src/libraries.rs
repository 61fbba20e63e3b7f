//! Libraries that are loaded at run time rather than linked: today cuDNN.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Result};

use crate::planned::Planned;

/// Attention calls since the process started: on CUDA devices by cuDNN and by our own kernels, and on the CPU.
static BY_CUDNN: AtomicU64 = AtomicU64::new(0);
static BY_OWN_KERNELS: AtomicU64 = AtomicU64::new(0);
static ON_CPU: AtomicU64 = AtomicU64::new(0);
/// Those of them that were in e4m3.
static IN_FP8: AtomicU64 = AtomicU64::new(0);

/// Name of the path in reports, the alternative to `cudnn` with its version.
const OWN_KERNELS: &str = "own kernels";
const CPU_LOOPS: &str = "cpu loops";

/// Compiled plans, by kind ([`PlansMade`]).
static MADE_AHEAD: AtomicU64 = AtomicU64::new(0);
static MADE_IN_STAGES: AtomicU64 = AtomicU64::new(0);

/// Libraries found at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// Version of cuDNN, such as `9.19.0`, or the reason why it is not used.
    pub cudnn: std::result::Result<String, String>,
}

/// Loads the libraries at the first call. Opens no card.
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

/// Sets the folder in which compiled cuDNN plans are cached on disk, at most 512 files of some 70 KB. The first call
/// counts, and must precede [`prepare`]. Without it, plans are not cached on disk.
pub fn keep_plans_in(folder: &Path) {
    #[cfg(feature = "cuda")]
    crate::cudnn::keep_plans_in(folder);
    #[cfg(not(feature = "cuda"))]
    let _ = folder; // without CUDA there are no plans
}

/// Loads the libraries that operations need on a device: our kernels, and cuDNN with its workspace. Memory allocated here is part
/// of the process's context. A no-op for the CPU.
///
/// # Errors
/// When the card fails. A missing library is not an error ([`libraries`]).
pub fn prepare(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        crate::cuda::prepare(device)?;
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
    Ok(())
}

/// Implementation of attention on a device: `cudnn 9.19.0`, `own kernels: ` with the reason why cuDNN is not used, or
/// `cpu loops`. Shapes without a cuDNN plan use our own kernels: [`AttentionPaths`] reports the paths that a stage used. Opens
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

/// [`attention_by`] of a CUDA device, given the libraries and whether cuDNN is open there.
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

/// Compiles cuDNN plans for these shapes on background threads, in this order, so that operations find them ready.
/// Returns at once. Best effort: never fails, ignores shapes that were requested before, and is a no-op on a device
/// without cuDNN.
pub fn make_plans(device: &Device, planned: &[Planned]) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && let Err(error) = crate::cuda::make_plans(device, planned)
    {
        tracing::debug!(%error, "no plans are made ahead: stages make them");
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (device, planned); // without CUDA there are no plans
}

/// Number of cuDNN plans compiled since the process started, successfully or not. Plans loaded from the disk cache
/// are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlansMade {
    /// On background threads ([`make_plans`]).
    pub ahead: u64,
    /// By operations that did not find a plan.
    pub in_stages: u64,
}

impl PlansMade {
    /// The current counts.
    #[must_use]
    pub fn now() -> PlansMade {
        PlansMade {
            ahead: MADE_AHEAD.load(Ordering::Relaxed),
            in_stages: MADE_IN_STAGES.load(Ordering::Relaxed),
        }
    }
}

/// Which thread compiles a plan.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum MadeBy {
    Ahead,
    Stage,
}

#[cfg(any(feature = "cuda", test))]
impl MadeBy {
    /// Name of its parts in the timeline.
    pub(crate) fn timeline(self) -> &'static str {
        match self {
            MadeBy::Ahead => "plans made ahead",
            MadeBy::Stage => "plans in a stage",
        }
    }
}

/// Counts a compiled plan.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_plan(by: MadeBy) {
    let made = match by {
        MadeBy::Ahead => &MADE_AHEAD,
        MadeBy::Stage => &MADE_IN_STAGES,
    };
    made.fetch_add(1, Ordering::Relaxed);
}

/// Attention calls by path since the process started. The difference over a stage shows which paths it used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionPaths {
    /// On CUDA devices, by cuDNN.
    pub cudnn: u64,
    /// On CUDA devices, by our own kernels.
    pub own: u64,
    pub cpu: u64,
    /// Those of them in e4m3 ([`crate::attention_in_fp8`]).
    pub in_fp8: u64,
}

impl AttentionPaths {
    /// The current counts.
    #[must_use]
    pub fn now() -> AttentionPaths {
        AttentionPaths {
            cudnn: BY_CUDNN.load(Ordering::Relaxed),
            own: BY_OWN_KERNELS.load(Ordering::Relaxed),
            cpu: ON_CPU.load(Ordering::Relaxed),
            in_fp8: IN_FP8.load(Ordering::Relaxed),
        }
    }

    /// Paths used since `before`, for a report: `cudnn 9.19.0`, `own kernels`, `cpu loops`, and `in fp8` if some of it was,
    /// separated by commas, or empty.
    #[must_use]
    pub fn since(before: AttentionPaths) -> String {
        AttentionPaths::now().beyond(before, || libraries().cudnn.unwrap_or_default())
    }

    /// The calls since `before`.
    #[cfg(feature = "cuda")]
    pub(crate) fn less(self, before: AttentionPaths) -> AttentionPaths {
        AttentionPaths {
            cudnn: self.cudnn - before.cudnn,
            own: self.own - before.own,
            cpu: self.cpu - before.cpu,
            in_fp8: self.in_fp8 - before.in_fp8,
        }
    }

    fn beyond(self, before: AttentionPaths, version: impl FnOnce() -> String) -> String {
        let cudnn = (self.cudnn > before.cudnn).then(|| format!("cudnn {}", version()));
        let own = (self.own > before.own).then(|| OWN_KERNELS.to_owned());
        let cpu = (self.cpu > before.cpu).then(|| CPU_LOOPS.to_owned());
        let in_fp8 = (self.in_fp8 > before.in_fp8).then(|| "in fp8".to_owned());
        let paths: Vec<String> = [cudnn, own, cpu, in_fp8].into_iter().flatten().collect();
        paths.join(", ")
    }
}

/// Counts an attention call on a CUDA device.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn count_attention(by_cudnn: bool) {
    let path = if by_cudnn { &BY_CUDNN } else { &BY_OWN_KERNELS };
    path.fetch_add(1, Ordering::Relaxed);
}

/// Counts attention calls that are made again by recorded work.
pub(crate) fn count_attention_paths(calls: AttentionPaths) {
    let all = [
        (&BY_CUDNN, calls.cudnn),
        (&BY_OWN_KERNELS, calls.own),
        (&ON_CPU, calls.cpu),
        (&IN_FP8, calls.in_fp8),
    ];
    for (path, count) in all {
        path.fetch_add(count, Ordering::Relaxed);
    }
}

/// Counts an attention call in e4m3, beside its path.
pub(crate) fn count_attention_in_fp8() {
    IN_FP8.fetch_add(1, Ordering::Relaxed);
}

/// Counts an attention call on the CPU.
pub(crate) fn count_attention_on_cpu() {
    ON_CPU.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_the_attention_paths_that_were_used() {
        let paths = |cudnn, own, cpu| AttentionPaths {
            cudnn,
            own,
            cpu,
            in_fp8: 0,
        };
        let before = paths(7, 5, 3);
        let report = |now: AttentionPaths| now.beyond(before, || "9.19.0".to_owned());
        assert_eq!(report(before), "");
        assert_eq!(report(paths(8, 5, 3)), "cudnn 9.19.0");
        assert_eq!(report(paths(7, 9, 3)), "own kernels");
        assert_eq!(report(paths(8, 6, 3)), "cudnn 9.19.0, own kernels");
        assert_eq!(report(paths(7, 5, 4)), "cpu loops");
        let in_fp8 = AttentionPaths {
            in_fp8: 1,
            ..paths(8, 5, 3)
        };
        assert_eq!(report(in_fp8), "cudnn 9.19.0, in fp8");
    }

    #[test]
    fn each_attention_is_counted_for_its_path() {
        // Other tests of this process compute meanwhile: counts only grow.
        let before = AttentionPaths::now();
        count_attention(true);
        count_attention(false);
        count_attention_on_cpu();
        let now = AttentionPaths::now();
        assert!(now.cudnn > before.cudnn && now.own > before.own && now.cpu > before.cpu);
    }

    #[test]
    fn a_device_reports_its_attention_implementation_and_the_reason() {
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
    fn a_missing_library_has_a_reason() {
        if let Err(reason) = libraries().cudnn {
            assert!(!reason.is_empty());
        }
        assert!(prepare(&Device::Cpu).is_ok());
    }
}
