//! Opens a Z-Image checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;

use super::checkpoint::MARKS;
use super::config::TransformerConfig;
use super::model::{FAMILY, TEXT_ENCODER, TRANSFORMER, VAE, ZImageModel};
use super::quantize_rule::role_of;
use super::transformer::block_of;
use super::variant::Variant;
use crate::adapters::AdapterSet;
use crate::autoencoders::kl;
use crate::checkpoint::{ComponentSet, Recognised, TransformerPlace, Wanted, open_single_file};
use crate::defaults::{GuidanceRule, folder_defaults, shift_of};
use crate::files::{check_pairs, unsupported};
use crate::flow_match::SchedulerConfig;
use crate::text::qwen3::{self, Qwen3Config};
use crate::text::tokenizers::QwenTokenizer;
use crate::{ModelError, ModelParts, Precision, Request};

/// The components of a model.
const COMPONENTS: [&str; 3] = [TRANSFORMER, VAE, TEXT_ENCODER];

/// Components that presets quantize.
const LARGE: [&str; 2] = [TRANSFORMER, TEXT_ENCODER];

impl ZImageModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is not
    /// Z-Image.
    ///
    /// # Errors
    /// When it is Z-Image and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<ZImageModel>, ModelError> {
        ZImageModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`ZImageModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<ZImageModel>, ModelError> {
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let base = base.as_path();
        let single = matches!(transformer, TransformerPlace::SingleFile { .. }).then_some(path);
        let (transformer, transformer_files): (TransformerConfig, _) =
            transformer.open(base, wanted.of(TRANSFORMER))?;
        let vae = kl::Place::of(base, single, kl::Published::Flux1, transformer.in_channels)?;
        let text = qwen3::Place::of(base, single, Some(qwen3::Published::Qwen3_4B))?;
        check_parts(base, &transformer, &text.config)?;
        // The encoding is the hidden states before the last layer.
        let depth = text.config.num_hidden_layers - 1;
        let files = [
            (TRANSFORMER, transformer_files),
            (VAE, vae.files(wanted.of(VAE))?),
            (TEXT_ENCODER, text.files(depth, wanted.of(TEXT_ENCODER))?),
        ];
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        components.in_blocks(TRANSFORMER, |name| block_of(&transformer, name));
        // Layers of candle-transformers run all of them at once, so that none can be waited for.
        if components.is_quantized(TEXT_ENCODER) {
            components.in_blocks(TEXT_ENCODER, qwen3::block_of);
        }
        let scheduler = SchedulerConfig::of_pipeline(base)?;
        let variant = Variant::of(single, &scheduler);
        let mut scheduler = variant.scheduler(scheduler);
        if let Some(shift) = shift_of(path, base)? {
            scheduler = scheduler.with_shift(f64::from(shift));
        }
        let problems = |request: &Request| variant.problems(request);
        let defaults = folder_defaults(base, variant.defaults(), variant.reads(), problems)?;
        Ok(Some(ZImageModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            scheduler,
            guidance: GuidanceRule::of(path, base)?,
            variant,
            tokenizer: QwenTokenizer::shared(&base.join("tokenizer"))?,
            transformer,
            vae: vae.config,
            text: text.config,
            depth,
        }))
    }
}

/// Checks that the components of one pipeline match.
fn check_parts(base: &Path, transformer: &TransformerConfig, text: &Qwen3Config) -> Result<(), ModelError> {
    let pairs = [(
        "the text encoder's width",
        text.hidden_size,
        transformer.cap_feat_dim,
    )];
    check_pairs(base, &pairs)?;
    match text.num_hidden_layers {
        0 | 1 => Err(unsupported(
            base,
            "its text encoder has nothing in front of its last layer",
        )),
        _ => Ok(()),
    }
}
