//! Wan against its references in diffusers and transformers, on the tiny pipelines of `fixtures/make_wan_fixtures.py`.

// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod adapters;
mod authors;
mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../film/mod.rs"]
mod film;
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
mod plans;
mod refusals;
mod schedules;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod spellings;
mod stored;
mod text;
mod two_cards;
#[path = "../two_devices/mod.rs"]
mod two_devices;
