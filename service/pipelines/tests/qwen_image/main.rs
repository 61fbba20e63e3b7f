//! Qwen-Image and Qwen-Image-Edit against their diffusers references, on the tiny pipeline of
//! `fixtures/make_qwen_image_fixtures.py`.

#![allow(clippy::expect_used)] // What tests share is outside of them.

mod adapters;
mod autoencoder;
mod checkpoints;
mod components;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../gguf_file/mod.rs"]
mod gguf_file;
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
