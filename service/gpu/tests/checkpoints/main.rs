//! Headers of checkpoints, valid and invalid.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod gguf_and_pytorch;
mod headers;
