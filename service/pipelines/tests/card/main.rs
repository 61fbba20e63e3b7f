//! Stages of full size on a card: memory against the prediction, and times.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // what was measured is worth seeing

#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod flux;
mod hunyuan_vae;
mod oobleck;
mod wan_vae;

use candle_core::Device;

/// The card, if the tests compute on one.
fn card() -> Option<&'static Device> {
    Some(device::test_device()).filter(|device| !device.is_cpu())
}
