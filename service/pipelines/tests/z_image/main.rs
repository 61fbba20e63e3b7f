//! Z-Image against its diffusers reference, on the tiny pipeline of `fixtures/make_z_image_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod adapters;
mod base;
mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod given;
mod mutations;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod pictures;
mod planned;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod stages;
mod text;
