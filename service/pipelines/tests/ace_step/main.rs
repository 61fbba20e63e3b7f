//! ACE-Step against its diffusers reference, on the tiny pipeline of `fixtures/make_ace_step_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod given;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod planned;
mod refusals;
mod rounds;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod strengths;
mod text;
mod tracks;
