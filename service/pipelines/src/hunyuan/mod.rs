//! HunyuanVideo (text to film) and FramePack (picture to film, in sections).
//!
//! References are diffusers' `HunyuanVideoPipeline` and `HunyuanVideoFramepackPipeline` with their models; tensors have
//! diffusers' names. Its checkpoints are in `checkpoint`, the sections of a film in `sections`, its stages in `plan` and
//! `stages`.

mod checkpoint;
mod config;
mod film;
mod layout;
mod model;
mod open;
mod patches;
mod places;
mod plan;
mod positions;
pub(crate) mod preview;
mod quantize_rule;
mod refiner;
mod sections;
mod stages;
mod transformer;

pub use self::model::{Hunyuan, HunyuanModel};
pub use config::TransformerConfig;

/// The further names of the transformer's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    (layout::NAMES, layout::layout(config))
}
