//! HunyuanVideo and FramePack against their diffusers reference, on the tiny pipelines of
//! `fixtures/make_hunyuan_fixtures.py`.

// What tests share is outside of them; figures are for whoever reads the tests' output.
#![allow(clippy::expect_used, clippy::print_stdout)]

mod adapters;
mod checkpoints;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod films;
#[allow(dead_code)] // each binary takes what it needs
#[path = "../flux_parity/numbers.rs"]
mod numbers;
mod plans;
mod quantized;
mod refusals;
#[path = "../resident/mod.rs"]
mod resident;
mod spellings;
mod workshop;
