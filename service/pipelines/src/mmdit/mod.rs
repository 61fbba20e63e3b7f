//! The blocks of multimodal diffusion transformers (Esser et al. 2024): double blocks, in which text tokens and generated
//! tokens have separate weights and one joint attention, then single blocks over both together (Black Forest Labs, FLUX.1).
//! FLUX.1 and HunyuanVideo have them in the same form and with the same names in diffusers, FLUX.2 and Qwen-Image in forms of
//! their own ([`Design`]). A family adds the layers before and after the blocks: embedders, positions, and the last layer.

mod blocks;
mod buffers;
mod embedder;
mod layout;
mod shape;
mod stack;
mod step_cache;

pub(crate) use blocks::Modulator;
pub(crate) use buffers::{Added, Apart, Buffers, Next, Part};
pub(crate) use embedder::{SINUSOIDS, StepEmbedder, TwoLayers};
pub(crate) use layout::{BlockNames, SingleNames, StreamNames};
pub(crate) use shape::{BlocksShape, Design, block_of, flops_of_pass, is_modulator, role, rows_of};
pub(crate) use stack::{BlockHook, BlockPlace, Blocks, Modulations, NoHook, Pass};
pub(crate) use step_cache::{CacheOfPass, StepCache};
