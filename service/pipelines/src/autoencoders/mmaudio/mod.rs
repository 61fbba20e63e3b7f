//! The autoencoder of sound of MMAudio at 16 kHz, as diffusers' `MMAudioVAE` has it, and its vocoder ([`vocoder`]).
//!
//! Latents are decoded to a mel spectrogram of two frames each, and the vocoder makes a track of it. The layers preserve the
//! magnitude of what they read instead of normalising it with learned scales (Karras et al. 2024): weights have unit rows,
//! and sums are divided by their expected length. The authors' files have the weights before this normalisation; it is done
//! when a layer's filter is made. The constants of activations and sums are part of the filters too.
//!
//! The attention in the middle sees the whole track, so a track is decoded whole: five seconds take some megabytes.
//! Sequences are `[time, channels]`, and convolutions are those of the autoencoder of music (`oobleck`).

mod attention;
mod config;
mod decoder;
mod layers;
mod scratch;
mod shapes;
mod table;
pub mod vocoder;

pub use config::MmAudioConfig;
pub use decoder::MmAudioDecoder;
pub use scratch::decode_scratch;

/// Name of the component in pipelines.
pub(crate) const COMPONENT: &str = "audio_vae";

/// Channels of the sequences that a model reads or writes are a multiple of this: cards' convolutions have them in words of
/// 16 bytes. Those beyond the model's are zeros.
const LANES: usize = 8;
