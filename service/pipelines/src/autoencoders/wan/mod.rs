//! The causal autoencoders of films of Wan 2.1 and Wan 2.2, and of models built upon them: diffusers' `AutoencoderKLWan`.
//!
//! They stream: norms are of one position, attention is of one frame, and convolutions in time see two frames before their own.
//! So a film is decoded latent by latent, and encoded by one frame and then four at a time. What layers remember of the
//! frames before is owned by a [`Decoding`], which can wait after any latent for as long as its owner likes, and which takes it
//! along when it is dropped.
//!
//! Within a latent, maps stream too, by rows (`layers.rs`): a piece of a map passes through all layers before the next piece is
//! computed. Maps of the finest levels are never whole in memory, and no row is computed twice. How large the pieces are
//! changes the memory that is needed, and nothing else.
//!
//! A picture is a film of one frame. An autoencoder of pictures alone (`pictures.rs`: Qwen-Image) has no layers in time.
//!
//! The walk is written once, for tensors and for their sizes (`arithmetic.rs`): memory and shapes are predicted by the
//! walk itself.

mod arithmetic;
mod colours;
mod config;
mod decoder;
mod encoder;
mod latent;
mod layers;
mod names;
mod pictures;
mod pieces;
mod resample;
mod scratch;
mod sketch;
mod stream;
mod table;
mod tensors;

pub use colours::LinearColours;
pub use config::WanVaeConfig;
pub use decoder::{Decoding, FrameDecoding, WanVaeDecoder};
pub use encoder::WanVaeEncoder;
pub use names::diffusers_name_of_original;
pub(crate) use pictures::{PictureAutoencoder, PicturePlace};
pub use scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder, encode_scratch};

pub use super::frames::frames_to_rgb8;
