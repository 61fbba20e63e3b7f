//! Ovi's fusion model against the classes of its authors (fixtures/make_ovi_fixtures.py).

// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod checkpoints;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod films;
#[path = "../autoencoders/formula.rs"]
#[allow(dead_code)] // Each binary takes what it needs.
mod formula;
#[path = "../gguf_file/mod.rs"]
mod gguf_file;
mod given;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
mod stored;
#[path = "../tiny_ovi/mod.rs"]
mod tiny_ovi;
mod transformer;
