//! Z-Image against its diffusers reference, on the tiny pipeline of `fixtures/make_z_image_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod adapters;
mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod mutations;
#[allow(dead_code)] // each binary takes what it needs
#[path = "../flux_parity/numbers.rs"]
mod numbers;
mod pictures;
#[path = "../resident/mod.rs"]
mod resident;
mod stages;
mod text;
mod workshop;
