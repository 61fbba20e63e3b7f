//! HunyuanVideo and FramePack against their diffusers reference, on the tiny pipelines of
//! `fixtures/make_hunyuan_fixtures.py`; their encoders against transformers and diffusers.

// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod adapters;
mod checkpoints;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod encoders;
#[path = "../film/mod.rs"]
mod film;
mod films;
mod given;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod planned;
mod plans;
mod quantized;
mod refusals;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod spellings;
mod step_cache;
mod two_cards;
#[path = "../two_devices/mod.rs"]
mod two_devices;
