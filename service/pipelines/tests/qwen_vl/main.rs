//! Qwen2.5-VL as Qwen-Image's text encoder against transformers, on the tiny model of `fixtures/make_qwen_vl_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod mutations;
#[path = "../numbers/mod.rs"]
mod numbers;
mod pictures;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod text;
