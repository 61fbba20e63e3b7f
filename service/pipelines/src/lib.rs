//! GENERATES. Model families: how their checkpoints are recognised and read, the stages of a request, and
//! their mathematics. A family never loads, evicts, or knows who asked.

pub mod autoencoder_kl;
mod checkpoint;
mod family;
mod files;
pub mod flow_match;
pub mod flux;
mod host;
pub mod instant;
mod linear;
pub mod noise;
mod out_of_memory;
mod quantization;
mod request;
pub mod rotary;
mod sinusoids;
mod tensors;
pub mod text;

pub use family::{
    Catalogue, EncodedText, Family, Model, ModelError, Observer, Precision, Rung, StageError, StageInput,
    StageKind, StageOutput, StagePlan, Unobserved, provisional_identity,
};
pub use host::{HostTensor, HostType};
pub use ops::{
    AttentionPaths, Libraries, Planned, attention_by, keep_plans_in, libraries, make_plans, prepare,
};
pub use out_of_memory::is_out_of_memory;
pub use quantization::{FULL, Preset, Quantization};
pub use request::{Defaults, ImageRequest, InitImage, RequestError};

/// Every family that this build knows. Adding one is a folder and a line here.
pub fn catalogue() -> Catalogue {
    Catalogue::new(vec![Box::new(flux::Flux), Box::new(instant::Instant)])
}
