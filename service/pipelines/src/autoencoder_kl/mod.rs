//! The autoencoder of FLUX.1 and of the families that share it: diffusers' `AutoencoderKL`.
//!
//! Maps are channels-last, `[h, w, c]`: rows are contiguous, and convolutions read them in place.
//!
//! Whole and strip-wise processing share one code path: every layer processes its map strip by strip, and "whole" is
//! one strip. Operations that span strips use the whole map: group norm takes its statistics first, the middle
//! attention sees all positions, and convolutions read the rows around their strip. So the size of the strips changes
//! the memory that is needed, and nothing else.

/// Name of the component in pipelines.
const COMPONENT: &str = "vae";

mod blocks;
mod config;
mod conv;
mod decoder;
mod encoder;
mod names;
mod norm;
mod picture;
pub(crate) mod plan;
mod planned;
mod role;
mod scratch;
mod shapes;
pub(crate) mod stages;
mod tiles;

pub(crate) use blocks::LayerSource;
pub use config::VaeConfig;
pub(crate) use conv::MAX_STRIP_BYTES;
pub use decoder::VaeDecoder;
pub(crate) use decoder::{dtype_of_maps, finite};
pub use encoder::{Moments, VaeEncoder};
pub(crate) use names::autoencoder_of_single_file;
pub use names::diffusers_name_of_bfl;
pub(crate) use norm::GroupNorm;
pub use picture::Rgb8;
pub(crate) use role::role;
pub use scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder, encode_scratch};
pub(crate) use shapes::AutoencoderLayers;
pub(crate) use tiles::{Cut, edges};
