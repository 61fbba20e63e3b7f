//! ACE-Step against its diffusers reference, on the tiny pipeline of `fixtures/make_ace_step_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "../flux_parity/numbers.rs"]
mod numbers;
mod refusals;
#[path = "../resident/mod.rs"]
mod resident;
mod rounds;
mod strengths;
mod text;
mod tracks;
mod workshop;
