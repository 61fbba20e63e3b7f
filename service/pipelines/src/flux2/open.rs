//! Opens a FLUX.2 checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;
use serde::Deserialize;

use super::checkpoint::MARKS;
use super::config::TransformerConfig;
use super::model::{FAMILY, Flux2Model, TEXT_ENCODER, TRANSFORMER, VAE, Variant};
use super::quantize_rule::role_of;
use crate::adapters::AdapterSet;
use crate::autoencoders::kl;
use crate::checkpoint::{ComponentSet, Recognised, TransformerPlace, Wanted, open_single_file};
use crate::defaults::folder_defaults;
use crate::files::{check_pairs, read_json, unsupported};
use crate::flow_match::SchedulerConfig;
use crate::mmdit;
use crate::text::qwen3::{self, Qwen3Config};
use crate::text::tokenizers::QwenTokenizer;
use crate::{Image, Medium, ModelError, ModelParts, Precision, Request};

/// The components of a model.
const COMPONENTS: [&str; 3] = [TRANSFORMER, VAE, TEXT_ENCODER];

/// Components that presets quantize.
const LARGE: [&str; 2] = [TRANSFORMER, TEXT_ENCODER];

/// Hidden states of the text encoder that make the encoding of a token.
const STATES: usize = 3;

/// Default request of a variant, from its pipeline and its model card.
fn defaults(variant: Variant) -> Request {
    let of = |steps| Request::of(Medium::Image(Image::of(1024, 1024)), steps, 0.0, 512);
    match variant {
        Variant::Distilled => of(4),
        Variant::Base => Request {
            negative_prompt: Some(String::new()),
            true_guidance: 4.0,
            ..of(50)
        },
    }
}

impl Flux2Model {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is not FLUX.2.
    ///
    /// # Errors
    /// When it is FLUX.2 and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<Flux2Model>, ModelError> {
        Flux2Model::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`Flux2Model::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Flux2Model>, ModelError> {
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let base = base.as_path();
        let single = matches!(transformer, TransformerPlace::SingleFile { .. }).then_some(path);
        let variant = variant_of(base, single)?;
        let (transformer, transformer_files): (TransformerConfig, _) =
            transformer.open(base, wanted.of(TRANSFORMER))?;
        let vae = kl::Place::of(base, single, kl::Published::Flux2, transformer.in_channels)?;
        let published = qwen3::Published::of_width(transformer.joint_attention_dim / STATES);
        let text = qwen3::Place::of(base, single, published)?;
        let taken = taken(base, &text.config)?;
        let pairs = [(
            "three states of the text encoder",
            STATES * text.config.hidden_size,
            transformer.joint_attention_dim,
        )];
        check_pairs(base, &pairs)?;
        let depth = taken[STATES - 1];
        let files = [
            (TRANSFORMER, transformer_files),
            (VAE, vae.files(wanted.of(VAE))?),
            (TEXT_ENCODER, text.files(depth, wanted.of(TEXT_ENCODER))?),
        ];
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        let blocks = transformer.blocks();
        components.in_blocks(TRANSFORMER, |name| mmdit::block_of(&blocks, name));
        components.in_blocks(TEXT_ENCODER, qwen3::block_of);
        let problems = |request: &Request| variant.problems(request);
        let defaults = folder_defaults(base, defaults(variant), variant.reads(), problems)?;
        let tokenizer = QwenTokenizer::shared(&base.join("tokenizer"))?;
        Ok(Some(Flux2Model {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            scheduler: SchedulerConfig::of_pipeline(base)?,
            pad: tokenizer.pad()?,
            tokenizer,
            transformer,
            vae: vae.config,
            text: text.config,
            taken,
            variant,
        }))
    }
}

/// Whether a checkpoint is distilled: as its `model_index.json` says, which without a word means that it is not. No tensor of a
/// single file shows it: a file with `base` in its name is not, and others are as their companions' folder says.
fn variant_of(base: &Path, single: Option<&Path>) -> Result<Variant, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(default)]
        is_distilled: bool,
    }
    let name = single.and_then(Path::file_name).unwrap_or_default();
    if name.to_string_lossy().to_ascii_lowercase().contains("base") {
        return Ok(Variant::Base);
    }
    let Index { is_distilled } = read_json(&base.join("model_index.json"))?;
    Ok(match is_distilled {
        true => Variant::Distilled,
        false => Variant::Base,
    })
}

/// The numbers of layers after which the states of the text encoder are taken: quarters of all, which are 9, 18 and 27 of the
/// published encoders' 36. The layers after them are not read.
fn taken(base: &Path, text: &Qwen3Config) -> Result<[usize; STATES], ModelError> {
    let quarter = text.num_hidden_layers / 4;
    match quarter > 0 && text.num_hidden_layers.is_multiple_of(4) {
        true => Ok([quarter, 2 * quarter, 3 * quarter]),
        false => Err(unsupported(
            base,
            format!(
                "its text encoder has {} layers, no multiple of 4: states are taken at its quarters",
                text.num_hidden_layers
            ),
        )),
    }
}
