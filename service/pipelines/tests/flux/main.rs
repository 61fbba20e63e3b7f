//! FLUX against its diffusers reference, on the tiny pipelines of `fixtures/make_fixtures.py`; its text encoders and tokenizers
//! against transformers' own.

#![allow(clippy::unwrap_used, clippy::expect_used)] // What tests share is outside of them.

mod adapters;
mod checkpoints;
mod components;
mod controls;
mod cut_off;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod edits;
mod given;
mod mutations;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod pictures;
mod planned;
#[path = "../processor_time/mod.rs"]
mod processor_time;
mod quantized;
mod refusals;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod stages;
mod step_cache;
mod text;
