//! FLUX against its diffusers reference, on the tiny pipelines of `fixtures/make_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod adapters;
mod checkpoints;
mod components;
mod controls;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod edits;
mod mutations;
mod numbers;
mod pictures;
mod quantized;
mod refusals;
#[path = "../resident/mod.rs"]
mod resident;
mod stages;
mod workshop;
