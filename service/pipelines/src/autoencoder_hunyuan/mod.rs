//! The causal autoencoder of films of HunyuanVideo and FramePack: diffusers' `AutoencoderKLHunyuanVideo`.
//!
//! Maps are `[h, t, w, c]`: rows, then frames. So a strip of rows is contiguous with all of its frames, and is
//! convolved and written in place, as strips of a picture are in [`crate::autoencoder_kl`]. Group norms take the
//! statistics of the whole map first; attention runs frame by frame, each over the frames up to it. So the size of the
//! strips changes the memory that is needed, and nothing else.
//!
//! In time, a film is cut into tiles as the reference does by default (`use_framewise_decoding`): that is part of the
//! result, and inside of a tile time is not cut, because statistics span it. Frames are given out tile by tile.

mod blocks;
mod config;
mod conv;
mod decoder;
mod encoder;
mod film;
mod planned;
mod scratch;
mod shapes;
mod space;
mod time;

pub use config::HunyuanVaeConfig;
pub use decoder::HunyuanVaeDecoder;
pub use encoder::HunyuanVaeEncoder;
pub use film::{FrameDecoding, frames_to_rgb8};
pub use scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder, encode_scratch};
pub use shapes::diffusers_name_of_original;
