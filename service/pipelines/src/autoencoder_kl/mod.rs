//! The autoencoder of FLUX.1 and of the families that took it over: diffusers' `AutoencoderKL`.
//!
//! Maps have their channels side by side, `[h, w, c]`: rows are one run of memory, and convolutions read them as they
//! lie.
//!
//! Decoding (and encoding) whole and in strips is one road: every layer goes through its map strip by strip,
//! and "whole" is one strip. What spans strips is taken of the whole map: group norm measures it first, the
//! middle attention sees all of it, and convolutions read the rows around their strip. So the size of the
//! strips changes the memory that is needed, and nothing else.

/// What pipelines call the component.
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

pub use config::VaeConfig;
pub use decoder::VaeDecoder;
pub use encoder::{Moments, VaeEncoder};
pub(crate) use names::autoencoder_of_single_file;
pub use names::diffusers_name_of_bfl;
pub use picture::{Rgb8, from_rgb8, to_rgb8};
pub(crate) use role::role;
pub use scratch::{Chunking, decode_scratch, encode_ladder, encode_scratch, ladder};
