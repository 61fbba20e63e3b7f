//! Opens a Qwen-Image checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;

use super::checkpoint::{MARKS, ZERO_MARK};
use super::config::TransformerConfig;
use super::model::{FAMILY, QwenImageModel, TEXT_ENCODER, TRANSFORMER, VAE, VISION};
use super::quantize_rule::role_of;
use super::variant::Variant;
use crate::adapters::AdapterSet;
use crate::autoencoders::wan::PicturePlace;
use crate::checkpoint::{ComponentSet, Recognised, TransformerPlace, Wanted, open_single_file};
use crate::defaults::{folder_defaults, shift_of};
use crate::files::{check_pairs, pipeline_class};
use crate::flow_match::SchedulerConfig;
use crate::text::qwen2_vl;
use crate::text::tokenizers::QwenTokenizer;
use crate::vision::qwen2_vl::QwenImageProcessor;
use crate::{ModelError, ModelParts, Precision, Request, mmdit, vision};

/// The components of a model; only those that edit have the last.
const COMPONENTS: [&str; 4] = [TRANSFORMER, VAE, TEXT_ENCODER, VISION];

/// Components that presets quantize.
const LARGE: [&str; 2] = [TRANSFORMER, TEXT_ENCODER];

/// Name of the autoencoder's single file without its ending.
const VAE_FILE: &str = "qwen_image_vae";

/// Folder of the configuration of the processor of pictures.
const PROCESSOR: &str = "processor";

impl QwenImageModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is not Qwen-Image.
    ///
    /// # Errors
    /// When it is Qwen-Image and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<QwenImageModel>, ModelError> {
        QwenImageModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`QwenImageModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<QwenImageModel>, ModelError> {
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let base = base.as_path();
        let single = matches!(transformer, TransformerPlace::SingleFile { .. }).then_some(path);
        let is_marked = file.is_some_and(|file| file.tensors().any(|(name, _)| name.ends_with(ZERO_MARK)));
        let class = pipeline_class(base)?.unwrap_or_default();
        let variant = Variant::of(&class, single, is_marked);
        let known = &COMPONENTS[..if variant.edits() { 4 } else { 3 }];
        let wanted = Wanted::new(precision, known, &LARGE, role_of)?;
        let (mut transformer, transformer_files): (TransformerConfig, _) =
            transformer.open(base, wanted.of(TRANSFORMER))?;
        transformer.zero_cond_t = has_time_zero(&transformer, variant, single, is_marked);
        let channels = transformer.latent_channels();
        let vae = PicturePlace::of(base, single, VAE_FILE, channels)?;
        let text = qwen2_vl::Place::of(base, single)?;
        let pairs = [(
            "the text encoder's width",
            text.config.hidden_size,
            transformer.joint_attention_dim,
        )];
        check_pairs(base, &pairs)?;
        let vae_config = vae.config.clone();
        let mut files = vec![
            (TRANSFORMER, transformer_files),
            (VAE, vae.files(wanted.of(VAE))?),
            (TEXT_ENCODER, text.files(wanted.of(TEXT_ENCODER))?),
        ];
        if variant.edits() {
            files.push((VISION, text.vision_files(wanted.of(VISION))?));
        }
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        let blocks = transformer.blocks();
        components.in_blocks(TRANSFORMER, |name| mmdit::block_of(&blocks, name));
        components.in_blocks(TEXT_ENCODER, qwen2_vl::block_of);
        if variant.edits() {
            components.in_blocks(VISION, vision::qwen2_vl::block_of);
        }
        // A default request has no pictures to edit: the client supplies them.
        let problems = |request: &Request| {
            let problems = variant.problems(request).into_iter();
            problems.filter(|problem| problem.field != "references").collect()
        };
        let defaults = folder_defaults(base, variant.defaults(), variant.reads(), problems)?;
        let mut scheduler = SchedulerConfig::of_pipeline(base)?;
        if let Some(shift) = shift_of(path, base)? {
            scheduler = scheduler.with_shift(f64::from(shift));
        }
        let processor = base.join(PROCESSOR);
        Ok(Some(QwenImageModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            tokenizer: QwenTokenizer::shared(&base.join("tokenizer"))?,
            processor: match variant.edits() && processor.is_dir() {
                true => QwenImageProcessor::open(&processor)?,
                false => QwenImageProcessor::published(),
            },
            scheduler,
            transformer,
            vae: vae_config,
            text: text.config,
            variant,
        }))
    }
}

/// Whether references are modulated at time 0: as the configuration says, or of a single file its mark, which some GGUF files have
/// lost, or its name.
fn has_time_zero(
    config: &TransformerConfig,
    variant: Variant,
    single: Option<&Path>,
    is_marked: bool,
) -> bool {
    let name = single.and_then(Path::file_name).unwrap_or_default();
    let name = name.to_string_lossy();
    let of_model = match (name.contains("2511"), name.contains("2509")) {
        (true, _) => true,
        (false, true) => false,
        (false, false) => config.zero_cond_t,
    };
    is_marked || (of_model && variant == Variant::EditPlus)
}
