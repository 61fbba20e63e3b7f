//! GENERATES. Model families: detection and reading of their checkpoints, the stages of a request, and their
//! mathematics. A family never loads or evicts, and does not know the client.

pub mod ace_step;
mod adapters;
mod attention;
pub mod autoencoders;
mod checkpoint;
mod defaults;
mod family;
mod files;
mod film_lengths;
pub mod flow_match;
pub mod flux;
pub mod flux2;
pub mod hunyuan;
pub mod instant;
mod layer_norm;
mod linear;
mod maps;
mod mmdit;
pub mod noise;
pub mod ovi;
mod place;
pub mod qwen_image;
mod resident;
pub mod rotary;
mod rounds;
pub mod samplers;
mod sampling;
pub mod sdxl;
mod shared_stage;
mod sinusoids;
mod stage;
mod start;
mod tensors;
pub mod text;
pub mod unipc;
pub mod vision;
pub mod wan;
pub mod z_image;

pub use family::{Family, FamilyList};
pub use model::*;
pub use ops::{
    AttentionPaths, Fp8Products, Int8Products, Libraries, Planned, attention_by, keep_plans_in, libraries,
    make_plans, prepare, set_adapter_copies, set_fp8_products, set_int8_products,
};

/// All families of this build. A new family is a folder and a line here.
pub fn families() -> FamilyList {
    FamilyList::new(vec![
        Box::new(flux2::Flux2),
        Box::new(flux::Flux),
        Box::new(z_image::ZImage),
        Box::new(sdxl::Sdxl),
        Box::new(qwen_image::QwenImage),
        Box::new(hunyuan::Hunyuan),
        Box::new(ovi::Ovi),
        Box::new(wan::Wan),
        Box::new(ace_step::AceStep),
        Box::new(instant::Instant),
    ])
}
