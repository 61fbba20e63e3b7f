//! Wan against its references in diffusers and transformers, on the tiny pipelines of `fixtures/make_wan_fixtures.py`.

// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../numbers/mod.rs"]
mod numbers;
mod schedules;
mod text;
