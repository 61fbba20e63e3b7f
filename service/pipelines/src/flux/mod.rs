//! FLUX.1: its checkpoints (`checkpoint`), stages (`stages`), and transformer.
//!
//! References are diffusers' `FluxPipeline` and `FluxImg2ImgPipeline` with their models; tensors have diffusers'
//! names.

mod adapter_targets;
mod checkpoint;
mod config;
mod control_net;
mod edit;
mod layout;
mod model;
mod open;
mod planned;
mod positions;
mod quantize_rule;
mod stages;
mod transformer;
mod trunk;

pub use self::model::{Flux, FluxModel};
pub use ::model::bounds::{MAX_SIDE, PIXELS_PER_TOKEN};
pub use ::model::{MAX_PROMPT_BYTES, MAX_STEPS, MAX_TOKENS};
pub use config::TransformerConfig;
pub use positions::{positions, rotations};
pub use stages::{POOLED, SEQUENCE};
pub use transformer::{
    Conditioning, Prompted, StepBuffers, Transformer, denoise_scratch, negative_scratch, pack, unpack,
};

/// The further names of the transformer's layers, those in adapters of XLabs, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (
    crate::checkpoint::LayerNames,
    crate::checkpoint::LayerNames,
    Vec<crate::checkpoint::TensorSpec>,
) {
    (layout::NAMES, layout::XLABS, layout::layout(config))
}
