//! DEFINES. Requests, plans, and the interface of a model to the code that runs it. Families implement it; the queue, the cards
//! and the protocol servers use only this interface.

mod adapter;
pub mod bounds;
mod component_set;
mod covered;
mod errors;
mod families;
mod host;
mod identity;
mod kept;
mod left_out;
mod media;
mod memo;
mod model;
mod out_of_memory;
mod parts;
pub mod plan;
mod precision;
mod quantization;
mod reads;
mod request;
mod resize;
mod sampler;
mod sampling;
mod smaller;
mod stage_run;
mod steps;
mod weight_files;

pub use adapter::{
    AdapterError, AdapterFile, AdapterKind, AdapterReport, AdapterUse, CurveError, MAX_POINTS, MAX_STRENGTH,
    StrengthCurve,
};
pub use bounds::{MAX_SIDE, MAX_SLOTS, PIXELS_PER_TOKEN};
pub use component_set::{ComponentFiles, ComponentSet};
pub use covered::{Covered, Twice};
pub use errors::{ModelError, StageError};
pub use families::{BASE_CONFIGURATION, Families, OwnLayout};
pub use host::{HostTensor, HostType};
pub use identity::{ModelFile, digest_of_names, provisional_identity};
pub use kept::Kept;
pub use left_out::LeftOut;
pub use media::{MediaFormat, Piece, SOUND_OF_FILM, SampleFormat, Sound};
pub use memo::{Memo, identity_of_values};
pub use model::{Model, ModelOpener, format_of_plan};
pub use out_of_memory::is_out_of_memory;
pub use parts::{ModelParts, ReadFiles};
pub use plan::{
    Flops, MAX_SETS, Passes, PreviewNeed, Role, Rung, Section, SharedPass, StagePlan, ValueShape, Values,
};
pub use precision::Precision;
pub use quantization::{FULL, Formats, Preset, Quantization};
pub use reads::{Field, Reads};
pub use request::{
    Audio, AudioTask, Clip, ControlUse, Image, InitImage, Mask, Medium, Picture, PictureMut, PictureSlot,
    Request, RequestError, StrengthPoint, Video,
};
pub use resize::{Filter, ReferenceFit, resized, resized_by, resized_while};
pub use sampler::Sampler;
pub use sampling::{MAX_CARDS, MAX_PROMPT_BYTES, MAX_STEPS, MAX_TOKENS, Sampling};
pub use smaller::{nearest_frames, smaller_lengths, smaller_sides};
pub use stage_run::{Observer, PassesLeftOut, StageRun, Unobserved};
pub use steps::{decimal, first_step, first_whole_step};
pub use weight_files::{ADAPTER_CONFIGURATION, ADAPTER_WEIGHTS, WeightNames, adapter_stem, is_shard};
