//! GENERATES. Model families: detection and reading of their checkpoints, the stages of a request, and their
//! mathematics. A family never loads or evicts, and does not know the client.

pub mod ace_step;
mod adapters;
pub mod autoencoder_hunyuan;
pub mod autoencoder_kl;
pub mod autoencoder_oobleck;
mod bounds;
mod checkpoint;
mod covered;
mod defaults;
mod family;
mod files;
pub mod flow_match;
pub mod flux;
mod host;
pub mod hunyuan;
mod identity;
pub mod instant;
mod layer_norm;
mod linear;
mod media;
mod memo;
mod mmdit;
pub mod noise;
mod out_of_memory;
mod parts;
mod plan;
mod quantization;
mod request;
mod resident;
mod resize;
pub mod rotary;
mod rounds;
mod sampling;
mod sinusoids;
mod start;
mod tensors;
pub mod text;
pub mod vision;
pub mod z_image;

pub use adapters::{
    ADAPTER_CONFIGURATION, ADAPTER_WEIGHTS, AdapterError, AdapterFile, AdapterKind, AdapterReport,
    AdapterUse, CurveError, MAX_POINTS, MAX_STRENGTH, StrengthCurve, adapter_stem, kind_of_folder,
};
pub use bounds::{MAX_PROMPT_BYTES, MAX_SIDE, MAX_SLOTS, MAX_STEPS, MAX_TOKENS, PIXELS_PER_TOKEN};
pub use checkpoint::{WeightNames, is_shard};
pub use covered::{Covered, Twice};
pub use family::{
    BASE_CONFIGURATION, Catalogue, Family, LeftOut, Model, ModelError, Observer, OwnLayout, Precision,
    StageError, StageRun, Unobserved,
};
pub use host::{HostTensor, HostType};
pub use identity::{ModelFile, digest_of_names, provisional_identity};
pub use media::{MediaFormat, Piece, SampleFormat};
pub use memo::{Memo, identity_of_values};
pub use ops::{
    AttentionPaths, Fp8Products, Libraries, Planned, attention_by, keep_plans_in, libraries, make_plans,
    prepare, set_fp8_products,
};
pub use out_of_memory::is_out_of_memory;
pub use parts::ModelParts;
pub use plan::{PreviewNeed, Role, Rung, Section, SharedPass, StagePlan, ValueShape, Values};
pub use quantization::{FULL, Formats, Preset, Quantization};
pub use request::{
    Audio, AudioTask, Clip, ControlUse, Image, InitImage, Mask, Medium, Picture, PictureMut, PictureSlot,
    Request, RequestError, StrengthPoint, Video,
};
pub use resize::resized;

/// All families of this build. Adding one is a folder and a line here.
pub fn catalogue() -> Catalogue {
    Catalogue::new(vec![
        Box::new(flux::Flux),
        Box::new(z_image::ZImage),
        Box::new(hunyuan::Hunyuan),
        Box::new(ace_step::AceStep),
        Box::new(instant::Instant),
    ])
}
