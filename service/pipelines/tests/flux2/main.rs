//! FLUX.2 klein against its diffusers reference, on the tiny pipeline of `fixtures/make_flux2_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod autoencoder;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod given;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod pictures;
mod text;
