//! Ovi 1.0 and 1.1: films with speech and sound, from text and from a picture.
//!
//! The reference are the classes of its authors (character-ai/Ovi), whose names of tensors its files have. The film is that of
//! Wan 2.2, with its text encoder and its autoencoder; the sound is decoded by MMAudio's autoencoder and vocoder
//! (`autoencoders/mmaudio`).

mod branch;
mod captions;
mod checkpoint;
mod config;
mod fusion;
mod layout;
mod model;
mod open;
mod plan;
mod prompts;
mod sampling;
mod sizes;
mod sound_embedding;
mod stages;
mod transformer;
mod variant;

pub use self::model::{Ovi, OviModel};
pub use captions::in_spelling;
pub use config::{BranchConfig, FusionConfig};
pub use sampling::{Guidance, Progress, PromptStates, Start, sample};
pub use sizes::size_near;
pub use transformer::{FilmTokens, FusionTransformer, StepBuffers, Texts, Times, denoise_scratch};
pub use variant::{SoundCaption, Variant};
