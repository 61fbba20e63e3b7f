//! Wan 2.1 and 2.2: films from text, and from a picture.
//!
//! References are diffusers' `WanPipeline` and `WanImageToVideoPipeline` with their models; tensors have diffusers' names. Its
//! checkpoints are in `checkpoint`, `places`, `base` and `authors`, the parts of its blocks in `blocks`, its stages in `plan` and `stages`.

mod authors;
mod base;
pub(crate) mod blocks;
pub(crate) mod buffers;
mod checkpoint;
mod config;
mod layout;
mod model;
pub(crate) mod modulation;
mod open;
mod places;
mod plan;
pub(crate) mod shape;
mod stages;
pub(crate) mod times;
pub(crate) mod tokens;
mod transformer;

pub(crate) use base::{Base, WantedBase};
pub(crate) use checkpoint::no_embedding;
pub use config::TransformerConfig;
pub(crate) use layout::layout;
pub use model::{Wan, WanModel};
pub use times::{Times, TokenCounts};
pub(crate) use transformer::patches_last;
pub use transformer::{Seen, StepBuffers, Texts, Transformer, denoise_scratch};

/// The further names of the transformer's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    (layout::NAMES, layout::layout(config))
}
