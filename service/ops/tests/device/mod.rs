//! The device that tests compute on, and its tolerances. Shared by the crates that compute; outside of their sources
//! because it reads the environment, which only the configuration may do there.
//!
//! Tests compute on the CPU, or with the feature `cuda` and `MOORED_TEST_DEVICE=cuda` on the first CUDA device, with
//! `--test-threads=1` (`tests/gpu/parity`). TF32 must be off there (`NVIDIA_TF32_OVERRIDE=0`): its ten bits would
//! exceed the tolerance.
#![allow(dead_code, clippy::expect_used)] // Each crate takes what it needs; what tests share is outside of them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{Device, Tensor};

#[cfg(feature = "cuda")]
pub(crate) mod pool;

/// The device of all tests of this process.
pub(crate) fn test_device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| match std::env::var("MOORED_TEST_DEVICE").as_deref() {
        Ok("cuda") => cuda(),
        Ok("cpu" | "") | Err(_) => Device::Cpu,
        Ok(other) => panic!("MOORED_TEST_DEVICE is {other:?}; cpu and cuda are known"),
    })
}

#[cfg(feature = "cuda")]
fn cuda() -> Device {
    let device = Device::new_cuda_with_stream(0).expect("a CUDA device");
    let card = device.as_cuda_device().expect("a CUDA device");
    // SAFETY: nothing is allocated yet, and all of a test process's work goes through this one stream.
    #[allow(unsafe_code)]
    unsafe {
        card.disable_event_tracking();
    }
    device
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Device {
    panic!("MOORED_TEST_DEVICE=cuda needs tests that were built with the feature cuda")
}

/// A tensor on the device of the tests.
pub(crate) fn here(tensor: &Tensor) -> Tensor {
    tensor.to_device(test_device()).expect("a copy on the device")
}

/// Tolerances of results, relative L2 error unless noted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerances {
    /// An operation in f32 against its definition, with another order of rounding.
    pub(crate) operation: f64,
    /// A component in f32 (transformer, encoder, autoencoder) against the reference.
    pub(crate) component: f64,
    /// A whole pipeline in f32: the picture before rounding, and its largest difference.
    pub(crate) pipeline: f64,
    /// Strips of a map against the whole map, in f32.
    pub(crate) strips: f64,
}

/// Tolerances of our CPU loops, whose sums are blocked and deterministic.
pub(crate) const ON_CPU: Tolerances = Tolerances {
    operation: 1e-6,
    component: 1e-5,
    pipeline: 1e-4,
    strips: 1e-5,
};

/// Tolerances of a CUDA device. cuBLAS orders its sums by the shape, reductions are trees, and `expf` and `tanhf` are
/// accurate to two units in the last place: a few 1e-7 per operation, some 1e-6 per component, accumulated over
/// steps. A real mistake is 1e-3 or more (the tests of mutations).
pub(crate) const ON_CUDA: Tolerances = Tolerances {
    operation: 5e-6,
    component: 1e-4,
    pipeline: 5e-4,
    strips: 2e-5,
};

/// bf16 against f32. A number has eight bits: each rounding has an error of 2^-9, 2e-3, and `n` layers about
/// `sqrt(n)` times as much. Values that must not be in bf16 have far larger errors: rotations at 64 tokens and more
/// (tenths), the variance of a norm whose mean is large, sinusoids of a timestep near 1000 (whole turns).
pub(crate) const BF16_OPERATION: f64 = 6e-3;
/// A component in bf16.
pub(crate) const BF16_COMPONENT: f64 = 5e-2;
/// A pipeline in bf16: its latent after some steps.
pub(crate) const BF16_PIPELINE: f64 = 3e-2;

/// Tolerances of the device of the tests.
pub(crate) fn tolerances() -> Tolerances {
    if test_device().is_cpu() { ON_CPU } else { ON_CUDA }
}

/// The folder of the crate under test. A test binary that was copied to another machine finds it from the root of the
/// repository, where it is started.
pub(crate) fn crate_folder() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built.is_dir() {
        return built.to_owned();
    }
    let carried = Path::new("service").join(env!("CARGO_PKG_NAME"));
    std::path::absolute(carried).expect("a current folder")
}
