//! The library: identities of components, kept copies of those that are quantized at load, and files that are replaced.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod identities;
mod idle_model;
mod kept_copies;
mod loads;
mod one_tensor;
mod opened_once;
mod replaced_files;
mod streamed_files;
#[path = "../watched/mod.rs"]
mod watched;
