//! The causal autoencoder of films of HunyuanVideo and FramePack: diffusers' `AutoencoderKLHunyuanVideo`.
//!
//! Strips have a fixed size in bytes, since those of a film are larger than a card's cache anyway. Attention runs frame by
//! frame, each over the frames up to it.
//!
//! In time, a film is cut into tiles as the reference does by default (`use_framewise_decoding`): that is part of the
//! result, and inside of a tile time is not cut, because statistics span it. Frames are delivered tile by tile.

mod config;
mod decoder;
mod encoder;
mod film;
mod scratch;
mod table;
mod time;

pub use config::HunyuanVaeConfig;
pub use decoder::HunyuanVaeDecoder;
pub use encoder::HunyuanVaeEncoder;
pub use film::FrameDecoding;
pub use scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder, encode_scratch};
pub use table::diffusers_name_of_original;

pub use super::frames::frames_to_rgb8;
