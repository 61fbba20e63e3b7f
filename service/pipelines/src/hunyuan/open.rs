//! Opens a checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;
use model::bounds::PIXELS_PER_TOKEN;

use super::config::TransformerConfig;
use super::model::{CLIP, FAMILY, FramePack, HunyuanModel, LLAMA, TRANSFORMER, VAE, VISION, problems, reads};
use super::places::{PROCESSOR, Places};
use super::quantize_rule::role_of;
use crate::adapters::AdapterSet;
use crate::autoencoders::hunyuan::{HunyuanVaeConfig, diffusers_name_of_original};
use crate::checkpoint::{ComponentSet, Wanted, open_single_file};
use crate::defaults::folder_defaults;
use crate::files::check_pairs;
use crate::flow_match::SchedulerConfig;
use crate::mmdit;
use crate::text::clip::ClipConfig;
use crate::text::llama::{self, LlamaConfig};
use crate::text::tokenizers::{ClipTokenizer, LlamaTokenizer};
use crate::vision::processor::ImageProcessor;
use crate::vision::siglip::SiglipConfig;
use crate::{Medium, ModelError, ModelParts, Precision, Request, Video};

/// The components of a model.
const COMPONENTS: [&str; 5] = [TRANSFORMER, VAE, LLAMA, CLIP, VISION];

/// Components that presets quantize: nearly all bytes.
const LARGE: [&str; 2] = [TRANSFORMER, LLAMA];

/// The default request of HunyuanVideo or FramePack, as their authors publish it.
fn defaults(is_framepack: bool) -> Request {
    let video = |width, height, frames, frames_per_second| {
        Medium::Video(Video {
            width,
            height,
            frames,
            frames_per_second,
            ..Video::default()
        })
    };
    match is_framepack {
        true => Request::of(video(640, 640, 145, 30.0), 25, 10.0, 256),
        false => Request::of(video(1280, 720, 129, 24.0), 50, 6.0, 256),
    }
}

impl HunyuanModel {
    /// Opens a pipeline's folder in diffusers' layout, a transformer's folder or a single file, by headers and
    /// configurations; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<HunyuanModel>, ModelError> {
        HunyuanModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`HunyuanModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<HunyuanModel>, ModelError> {
        let Some((places, transformer_place)) = Places::of(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let base = places.base.as_path();
        let (transformer, transformer_files): (TransformerConfig, _) =
            transformer_place.open(base, wanted.of(TRANSFORMER))?;
        let (vae, vae_place) =
            places.component(base, VAE, HunyuanVaeConfig::default, HunyuanVaeConfig::check)?;
        let (llama, llama_place) =
            places.component(base, LLAMA, LlamaConfig::llava_llama3_8b, LlamaConfig::check)?;
        let (clip, clip_place) = places.component(base, CLIP, ClipConfig::clip_l, ClipConfig::check)?;
        check_parts(base, &transformer, &vae, &llama, &clip)?;
        let as_named = |name: &str| Some(name.to_owned());
        let vae_files = vae_place.files(wanted.of(VAE), diffusers_name_of_original, |_| {
            vae.tensor_shapes()
        })?;
        let llama_files = llama_place.files(wanted.of(LLAMA), as_named, |has| llama.tensor_shapes(has))?;
        let clip_files = clip_place.files(wanted.of(CLIP), as_named, |has| clip.tensor_shapes(has))?;
        let mut files = vec![
            (TRANSFORMER, transformer_files),
            (VAE, vae_files),
            (LLAMA, llama_files),
            (CLIP, clip_files),
        ];
        let framepack = match transformer.is_framepack() {
            false => None,
            true => {
                let root = places.vision_root()?;
                let (vision, place): (SiglipConfig, _) = places.component(
                    &root,
                    VISION,
                    SiglipConfig::so400m_patch14_384,
                    SiglipConfig::check,
                )?;
                let processor = root.join(PROCESSOR);
                let processor = match processor.is_dir() || !places.is_alone {
                    true => ImageProcessor::open(&processor)?,
                    false => ImageProcessor::of_side(vision.image_size as u32),
                };
                check_vision(base, &transformer, &vision, &processor)?;
                let vision_files =
                    place.files(wanted.of(VISION), as_named, |has| vision.tensor_shapes(has))?;
                files.push((VISION, vision_files));
                Some(FramePack {
                    order: places.order()?,
                    vision,
                    processor,
                })
            }
        };
        let clip_tokenizer = ClipTokenizer::shared(&base.join("tokenizer_2"))?;
        clip.check_length(base, clip_tokenizer.length())?;
        let order = framepack.as_ref().map(|framepack| framepack.order);
        // A default request has no picture to start from: the client supplies it.
        let check = |request: &Request| {
            let problems = problems(order, request).into_iter();
            problems.filter(|problem| problem.field != "init_image").collect()
        };
        let defaults = match places.has_defaults_of(framepack.is_some())? {
            true => folder_defaults(
                places.folder_of_defaults(),
                defaults(framepack.is_some()),
                reads(order),
                check,
            )?,
            false => defaults(framepack.is_some()),
        };
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        let blocks = transformer.blocks();
        components.in_blocks(TRANSFORMER, |name| mmdit::block_of(&blocks, name));
        components.in_blocks(LLAMA, llama::block_of);
        Ok(Some(HunyuanModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            scheduler: SchedulerConfig::of_pipeline(base)?,
            llama_tokenizer: LlamaTokenizer::shared(&base.join("tokenizer"))?,
            clip_tokenizer,
            transformer,
            vae,
            llama,
            clip,
            framepack,
        }))
    }
}

/// Checks that the components of one pipeline match.
fn check_parts(
    base: &Path,
    transformer: &TransformerConfig,
    vae: &HunyuanVaeConfig,
    llama: &LlamaConfig,
    clip: &ClipConfig,
) -> Result<(), ModelError> {
    check_pairs(
        base,
        &[
            (
                "the VAE's latent channels",
                vae.latent_channels,
                transformer.in_channels,
            ),
            (
                "the VAE's pixels per latent cell",
                vae.factor(),
                PIXELS_PER_TOKEN as usize / 2,
            ),
            ("the VAE's frames per latent", vae.frames(2) - 1, 4),
            ("the VAE's channels of a picture", vae.out_channels, 3),
            ("the VAE's channels of a picture to encode", vae.in_channels, 3),
            ("LLaMA's width", llama.hidden_size, transformer.text_embed_dim),
            (
                "CLIP's width",
                clip.hidden_size,
                transformer.pooled_projection_dim,
            ),
        ],
    )
}

fn check_vision(
    base: &Path,
    transformer: &TransformerConfig,
    vision: &SiglipConfig,
    processor: &ImageProcessor,
) -> Result<(), ModelError> {
    let size = processor.size;
    check_pairs(
        base,
        &[
            (
                "the picture encoder's width",
                vision.hidden_size,
                transformer.image_proj_dim,
            ),
            ("its processor's width", size.width as usize, vision.image_size),
            ("its processor's height", size.height as usize, vision.image_size),
        ],
    )
}
