//! The autoencoder of FLUX.1 and of the families that share it: diffusers' `AutoencoderKL`, and `AutoencoderKLFlux2`, which is
//! the same but for the scale of latents.
//!
//! Strips have a fixed number of rows at the latent's resolution. On the CPU they are smaller where they would not fit into a
//! cache.

mod config;
mod decoder;
mod encoder;
mod names;
mod picture;
mod place;
pub(crate) mod plan;
mod scratch;
pub(crate) mod stages;
mod statistics;
mod table;

pub use super::moments::Moments;
pub use config::VaeConfig;
pub use decoder::VaeDecoder;
pub use encoder::VaeEncoder;
pub use names::diffusers_name_of_bfl;
pub(crate) use names::name_in_single_file;
pub use picture::Rgb8;
pub(crate) use place::{Place, Published};
pub use scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder, encode_scratch};
