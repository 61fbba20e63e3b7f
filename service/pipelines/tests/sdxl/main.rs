//! Stable Diffusion XL against its diffusers reference, on the tiny pipeline of `fixtures/make_sdxl_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod mutations;
#[path = "../numbers/mod.rs"]
mod numbers;
