//! The vocoder of MMAudio at 16 kHz: BigVGAN (Lee et al. 2022), as its authors publish it (`best_netG.pt`).
//!
//! It makes a track of a mel spectrogram: transposed convolutions lengthen it, and residual blocks of several kernels, whose
//! results are averaged, shape it. Their activation, Snake with own heights, runs at twice the rate between two filters
//! (`antialias`), so that it adds no frequencies that the rate cannot have. Weights are stored as a length and a direction
//! for each row, or folded.

mod antialias;
mod config;
mod layers;
mod run;
mod scratch;
mod shapes;
mod table;

pub use config::VocoderConfig;
pub use run::Vocoder;
pub use scratch::vocode_scratch;
pub use shapes::vocoder_name;

/// Name of the component in pipelines.
pub(crate) const COMPONENT: &str = "vocoder";
