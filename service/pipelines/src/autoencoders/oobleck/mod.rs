//! The autoencoder of sound of ACE-Step 1.5 and Stable Audio: diffusers' `AutoencoderOobleck`.
//!
//! Sequences are channels-last, `[time, channels]`, so that a convolution in time is a product whose rows overlap
//! (`ops::SequenceFilter`). There are only convolutions, so a sample depends on its neighbourhood alone. A track is therefore
//! processed in windows of latent frames. They overlap by as much as the layers see, which follows from the configuration, and
//! each sample is kept from a window that has all inputs on which it depends. At the ends of the track a window ends too, and
//! is padded there as the track would be. The length of the windows changes the memory that is needed, and nothing else.

mod config;
mod decoder;
mod encoder;
mod layers;
mod moments;
mod role;
mod samples;
mod scratch;
mod shapes;
mod table;
mod windows;

pub use config::OobleckConfig;
pub use decoder::OobleckDecoder;
pub use encoder::OobleckEncoder;
pub(super) use layers::convolve_written;
pub use moments::OobleckMoments;
pub(crate) use role::role;
pub use samples::{pcm16_from_samples, samples_from_pcm16};
pub(super) use scratch::Account;
pub use scratch::{decode_ladder, decode_scratch, encode_ladder, encode_scratch};
pub use shapes::diffusers_name_of_original;
pub(super) use table::dilated;
pub use windows::Windows;
