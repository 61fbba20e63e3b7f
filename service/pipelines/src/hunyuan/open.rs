//! Opens a checkpoint by its headers and configurations, and validates that its components match.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::checkpoint::{HunyuanNaming, MARKS, config_of_single_file};
use super::config::TransformerConfig;
use super::model::{CLIP, FramePack, HunyuanModel, LLAMA, TRANSFORMER, VAE, VISION, problems};
use super::quantize_rule::role_of;
use super::sections::Order;
use crate::adapters::AdapterSet;
use crate::autoencoder_hunyuan::HunyuanVaeConfig;
use crate::bounds::PIXELS_PER_TOKEN;
use crate::checkpoint::{
    Checkpoint, ComponentFiles, ComponentSet, Recognised, Requested, component_of_folder, exact_component,
    whole,
};
use crate::defaults::folder_defaults;
use crate::files::{checked, damaged, read_json, unsupported};
use crate::flow_match::SchedulerConfig;
use crate::text::clip::ClipConfig;
use crate::text::llama::LlamaConfig;
use crate::text::tokenizers::{ClipTokenizer, LlamaTokenizer};
use crate::vision::processor::ImageProcessor;
use crate::vision::siglip::SiglipConfig;
use crate::{Medium, ModelError, Precision, Request, Video};

/// Its components.
const COMPONENTS: [&str; 5] = [TRANSFORMER, VAE, LLAMA, CLIP, VISION];

/// Components that presets quantize: nearly all bytes.
pub(super) const LARGE: [&str; 2] = [TRANSFORMER, LLAMA];

/// Name of the component in messages about unexpected tensors.
const WHAT: &str = "a HunyuanVideo transformer";

/// What `moored.json` in a FramePack's folder may say beside a default request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Written {
    /// `backward` (FramePack's I2V) or `forward` (FramePack-F1).
    sampling_order: Option<WrittenOrder>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WrittenOrder {
    Backward,
    Forward,
}

/// The order in which a FramePack samples sections. No configuration tells: it is written in `moored.json`, or in the name,
/// where published files of FramePack-F1 have it.
fn order_of(base: &Path, name: &Path) -> Result<Order, ModelError> {
    let path = base.join("moored.json");
    let written: Written = match path.is_file() {
        true => read_json(&path)?,
        false => Written::default(),
    };
    Ok(match written.sampling_order {
        Some(WrittenOrder::Backward) => Order::Backward,
        Some(WrittenOrder::Forward) => Order::Forward,
        None if is_named_f1(name) => Order::Forward,
        None => Order::Backward,
    })
}

/// Whether a file or folder is named as FramePack-F1's are: `FramePack_F1_I2V_HY_20250503`.
fn is_named_f1(path: &Path) -> bool {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    name.split(|letter: char| !letter.is_alphanumeric())
        .any(|word| word == "f1" || word == "framepackf1")
}

/// The default request of HunyuanVideo or FramePack: what their authors say.
fn defaults(is_framepack: bool) -> Request {
    let video = |width, height, frames, frames_per_second| {
        Medium::Video(Video {
            width,
            height,
            frames,
            frames_per_second,
            init_image: None,
            init_video: None,
        })
    };
    match is_framepack {
        true => Request::of(video(640, 640, 145, 30.0), 25, 10.0, 256),
        false => Request::of(video(1280, 720, 129, 24.0), 50, 6.0, 256),
    }
}

impl HunyuanModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is of another
    /// family.
    ///
    /// # Errors
    /// When it is of this family and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<HunyuanModel>, ModelError> {
        let Some(recognised) = MARKS.recognise(path)? else {
            return Ok(None);
        };
        let formats = precision.quantization.formats(&LARGE);
        if let Some((unknown, _)) = formats.iter().find(|(name, _)| !COMPONENTS.contains(name)) {
            return Err(ModelError::no_such_component(unknown, &COMPONENTS));
        }
        let wanted = |component: &'static str| Requested {
            component,
            dtype: precision.dtype,
            format: formats.of(component),
            role_of: role_of(component),
        };
        let base = match &recognised {
            Recognised::Folder(folder) => folder,
            Recognised::SingleFile { base, .. } => base,
        };
        let base = &std::fs::canonicalize(base).map_err(|e| damaged(base, e.to_string()))?;
        let (transformer, transformer_files) = transformer(recognised, base, wanted(TRANSFORMER))?;
        let config_of = |folder: &str| -> PathBuf { base.join(folder).join("config.json") };
        let vae: HunyuanVaeConfig = checked(&config_of(VAE), HunyuanVaeConfig::check)?;
        let llama: LlamaConfig = checked(&config_of(LLAMA), LlamaConfig::check)?;
        let clip: ClipConfig = checked(&config_of(CLIP), ClipConfig::check)?;
        check_parts(base, &transformer, &vae, &llama, &clip)?;
        let mut files = vec![
            (TRANSFORMER, transformer_files),
            (
                VAE,
                component_of_folder(&base.join(VAE), wanted(VAE), |_| vae.tensor_shapes())?,
            ),
            (
                LLAMA,
                component_of_folder(&base.join(LLAMA), wanted(LLAMA), |has| llama.tensor_shapes(has))?,
            ),
            (
                CLIP,
                component_of_folder(&base.join(CLIP), wanted(CLIP), |has| clip.tensor_shapes(has))?,
            ),
        ];
        let framepack = match transformer.is_framepack() {
            false => None,
            true => {
                let vision: SiglipConfig = checked(&config_of(VISION), SiglipConfig::check)?;
                let processor = ImageProcessor::open(&base.join("feature_extractor"))?;
                check_vision(base, &transformer, &vision, &processor)?;
                let shapes = component_of_folder(&base.join(VISION), wanted(VISION), |has| {
                    vision.tensor_shapes(has)
                })?;
                files.push((VISION, shapes));
                Some(FramePack {
                    order: order_of(base, path)?,
                    vision,
                    processor,
                })
            }
        };
        let clip_tokenizer = ClipTokenizer::shared(&base.join("tokenizer_2"))?;
        if clip_tokenizer.length() > clip.max_position_embeddings {
            let (tokens, places) = (clip_tokenizer.length(), clip.max_position_embeddings);
            let problem = format!("its CLIP has {places} positions for {tokens} tokens");
            return Err(unsupported(base, problem));
        }
        let order = framepack.as_ref().map(|framepack| framepack.order);
        // A default request has no picture to start from: whoever asks brings it.
        let check = |request: &Request| {
            let problems = problems(order, request).into_iter();
            problems.filter(|problem| problem.field != "init_image").collect()
        };
        Ok(Some(HunyuanModel {
            adapters: AdapterSet::default(),
            precision: precision.clone(),
            components: ComponentSet::new(files, precision.dtype, formats),
            scheduler: checked(
                &base.join("scheduler/scheduler_config.json"),
                SchedulerConfig::check,
            )?,
            llama_tokenizer: LlamaTokenizer::shared(&base.join("tokenizer"))?,
            clip_tokenizer,
            defaults: folder_defaults(base, defaults(framepack.is_some()), check)?,
            transformer,
            vae,
            llama,
            clip,
            framepack,
        }))
    }
}

fn transformer(
    recognised: Recognised<HunyuanNaming>,
    base: &Path,
    wanted: Requested,
) -> Result<(TransformerConfig, ComponentFiles), ModelError> {
    let folder = base.join(TRANSFORMER);
    let config_file = folder.join("config.json");
    match recognised {
        Recognised::Folder(_) => {
            let config: TransformerConfig = checked(&config_file, TransformerConfig::check)?;
            let specs = whole(config.tensor_shapes().collect());
            let checkpoint = Checkpoint::of_folder(&folder)?;
            let files = exact_component(&folder, checkpoint, &specs, wanted, WHAT)?;
            Ok((config, files))
        }
        Recognised::SingleFile {
            path,
            checkpoint,
            naming,
            ..
        } => {
            let of_base = match config_file.is_file() {
                true => read_json(&config_file)?,
                false => TransformerConfig::default(),
            };
            let config = config_of_single_file(&path, &checkpoint, naming, &of_base)?;
            config.check().map_err(|problem| unsupported(&path, problem))?;
            let specs = naming.specs(&config);
            let files = exact_component(&path, checkpoint, &specs, wanted, WHAT)?;
            Ok((config, files))
        }
    }
}

/// Refuses the first of these pairs of numbers that differ.
fn check_pairs(base: &Path, pairs: &[(&str, usize, usize)]) -> Result<(), ModelError> {
    match pairs.iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(unsupported(
            base,
            format!("{what}: {found}, and the pipeline takes {expected}"),
        )),
        None => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framepack_f1_is_known_by_its_name() {
        for name in [
            "FramePack_F1_I2V_HY_20250503",
            "FramePack-F1.safetensors",
            "framepackf1_fp8",
        ] {
            assert!(is_named_f1(Path::new(name)), "{name}");
        }
        for name in ["FramePackI2V_HY", "models/F1x", "film1"] {
            assert!(!is_named_f1(Path::new(name)), "{name}");
        }
    }
}
