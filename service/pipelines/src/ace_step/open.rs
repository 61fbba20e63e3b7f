//! Opens an ACE-Step checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;

use super::authors::parts_of_authors;
use super::checkpoint::Places;
use super::config::{ConditionConfig, TokenConfig, TransformerConfig};
use super::layout::SILENCE;
use super::model::{
    AceStepModel, CONDITION_ENCODER, DETOKENIZER, FAMILY, TEXT_ENCODER, TOKENIZER, TRANSFORMER, TokenConfigs,
    VAE,
};
use super::plan::is_supported;
use super::prompts::MAX_TEXT_TOKENS;
use super::quantize_rule::role_of;
use super::tasks::{self, Abilities};
use super::transformer::block_of;
use crate::adapters::AdapterSet;
use crate::autoencoders::oobleck::OobleckConfig;
use crate::checkpoint::{
    Checkpoint, ComponentFiles, ComponentSet, Wanted, component_of_checkpoint, component_of_folder,
    exact_component, open_single_file, whole,
};
use crate::defaults::{folder_defaults, folder_shift};
use crate::files::{check_pairs, checked, damaged, unsupported};
use crate::text::qwen3::Qwen3Config;
use crate::text::tokenizers::QwenTokenizer;
use crate::{Audio, Medium, ModelError, ModelParts, Precision, Request};

/// The components of a model.
const COMPONENTS: [&str; 6] = [
    TRANSFORMER,
    VAE,
    TEXT_ENCODER,
    CONDITION_ENCODER,
    TOKENIZER,
    DETOKENIZER,
];

/// Components that presets quantize: nearly all bytes.
const LARGE: [&str; 3] = [TRANSFORMER, CONDITION_ENCODER, TEXT_ENCODER];

/// Name of the component in messages about unexpected tensors.
const WHAT: &str = "an ACE-Step transformer";

/// Shift of the times of steps, as in the reference.
const SHIFT: f32 = 3.0;

/// The default request, as the authors publish it.
fn defaults(is_turbo: bool) -> Request {
    let audio = Medium::Audio(Audio {
        seconds: 60.0,
        ..Audio::default()
    });
    match is_turbo {
        true => Request::of(audio, 8, 1.0, MAX_TEXT_TOKENS),
        false => Request::of(audio, 50, 7.0, MAX_TEXT_TOKENS),
    }
}

/// The components of a checkpoint, with their configurations.
pub(super) struct Parts {
    pub(super) transformer: (TransformerConfig, ComponentFiles),
    pub(super) condition: (ConditionConfig, ComponentFiles),
    pub(super) text: (Qwen3Config, ComponentFiles),
    pub(super) vae: (OobleckConfig, ComponentFiles),
    pub(super) tokens: Option<(TokenConfigs, [ComponentFiles; 2])>,
}

impl AceStepModel {
    /// Opens a checkpoint by headers and configurations; `None` if it is not ACE-Step.
    ///
    /// # Errors
    /// When it is ACE-Step and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<AceStepModel>, ModelError> {
        AceStepModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`AceStepModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<AceStepModel>, ModelError> {
        let path = &match path.exists() {
            true => std::fs::canonicalize(path).map_err(|e| damaged(path, e.to_string()))?,
            false => path.to_owned(),
        };
        let Some(places) = Places::of(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        if !is_supported(precision.dtype) {
            return Err(unsupported(
                path,
                "ACE-Step overflows in f16, which gives silence or noise: bf16 and f32 are supported",
            ));
        }
        let (parts, tokenizer, base) = match &places {
            Places::Diffusers(folder) => (
                parts_of_folder(folder, &wanted)?,
                folder.join("tokenizer"),
                folder.clone(),
            ),
            Places::Authors(places) => (
                parts_of_authors(places, &wanted)?,
                places.tokenizer.clone(),
                places.folder.clone(),
            ),
        };
        let tokenizer = QwenTokenizer::shared(&tokenizer)?;
        check_parts(path, &parts)?;
        let Parts {
            transformer,
            condition,
            text,
            vae,
            tokens,
        } = parts;
        let able = Abilities {
            is_turbo: transformer.0.is_turbo(),
            has_tokens: tokens.is_some(),
            rate: vae.0.sampling_rate,
        };
        let mut files = vec![
            (TRANSFORMER, transformer.1),
            (VAE, vae.1),
            (TEXT_ENCODER, text.1),
            (CONDITION_ENCODER, condition.1),
        ];
        let tokens = tokens.map(|(configs, [tokenizer, detokenizer])| {
            files.extend([(TOKENIZER, tokenizer), (DETOKENIZER, detokenizer)]);
            configs
        });
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        components.in_blocks(TRANSFORMER, block_of);
        let defaults = folder_defaults(&base, defaults(able.is_turbo), tasks::READS, |request| {
            tasks::problems(request, able)
        })?;
        Ok(Some(AceStepModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            shift: folder_shift(&base)?.unwrap_or(SHIFT),
            transformer: transformer.0,
            condition: condition.0,
            text: text.0,
            vae: vae.0,
            tokens,
            tokenizer,
        }))
    }
}

/// The components of a folder in diffusers' layout.
fn parts_of_folder(base: &Path, wanted: &Wanted) -> Result<Parts, ModelError> {
    let config_of = |component: &str| base.join(component).join("config.json");
    let transformer = checked(&config_of(TRANSFORMER), TransformerConfig::check)?;
    let folder = base.join(TRANSFORMER);
    let specs = whole(transformer.tensor_shapes());
    let checkpoint = Checkpoint::of_folder(&folder)?;
    let transformer_files = exact_component(&folder, checkpoint, &specs, wanted.of(TRANSFORMER), WHAT)?;

    let condition = checked(&config_of(CONDITION_ENCODER), ConditionConfig::check)?;
    let folder = base.join(CONDITION_ENCODER);
    let checkpoint = Checkpoint::of_folder(&folder)?;
    let silence = (SILENCE.to_owned(), checkpoint.tensor(SILENCE)?.shape);
    check_silence(&folder, &silence.1, &condition)?;
    let shapes = |_: &dyn Fn(&str) -> bool| [condition.tensor_shapes(), vec![silence]].concat();
    let condition_files = component_of_checkpoint(&folder, checkpoint, wanted.of(CONDITION_ENCODER), shapes)?;

    let text = checked(&config_of(TEXT_ENCODER), Qwen3Config::check)?;
    let text_files = component_of_folder(&base.join(TEXT_ENCODER), wanted.of(TEXT_ENCODER), |has| {
        text.tensor_shapes_with_norm(has)
    })?;
    let vae = checked(&config_of(VAE), OobleckConfig::check)?;
    let vae_files = component_of_folder(&base.join(VAE), wanted.of(VAE), |_| vae.tensor_shapes())?;

    let has_tokens = [TOKENIZER, DETOKENIZER]
        .iter()
        .all(|name| base.join(name).is_dir());
    let tokens = || -> Result<_, ModelError> {
        let configs = TokenConfigs {
            tokenizer: checked(&config_of(TOKENIZER), TokenConfig::check)?,
            detokenizer: checked(&config_of(DETOKENIZER), TokenConfig::check_detokenizer)?,
        };
        let tokenizer = component_of_folder(&base.join(TOKENIZER), wanted.of(TOKENIZER), |_| {
            configs.tokenizer.tokenizer_shapes()
        })?;
        let detokenizer = component_of_folder(&base.join(DETOKENIZER), wanted.of(DETOKENIZER), |_| {
            configs.detokenizer.detokenizer_shapes()
        })?;
        Ok((configs, [tokenizer, detokenizer]))
    };
    Ok(Parts {
        transformer: (transformer, transformer_files),
        condition: (condition, condition_files),
        text: (text, text_files),
        vae: (vae, vae_files),
        tokens: has_tokens.then(tokens).transpose()?,
    })
}

/// Checks the shape of the latents of silence: `[1, frames, channels]`, or the authors' `[1, channels, frames]`.
pub(super) fn check_silence(
    place: &Path,
    shape: &[usize],
    config: &ConditionConfig,
) -> Result<(), ModelError> {
    let channels = config.timbre_hidden_dim;
    match *shape {
        [1, frames, last] if last == channels && (1..=1 << 24).contains(&frames) => Ok(()),
        [1, first, frames] if first == channels && (1..=1 << 24).contains(&frames) => Ok(()),
        _ => Err(damaged(
            place,
            format!("{SILENCE} is {shape:?}; frames of {channels} channels are expected"),
        )),
    }
}

/// Checks that the components of one pipeline match.
fn check_parts(place: &Path, parts: &Parts) -> Result<(), ModelError> {
    let (transformer, condition) = (&parts.transformer.0, &parts.condition.0);
    let (text, vae) = (&parts.text.0, &parts.vae.0);
    let acoustic = transformer.audio_acoustic_hidden_dim;
    let mut pairs = vec![
        ("the VAE's latent channels", vae.decoder_input_channels, acoustic),
        (
            "the VAE's channels of moments",
            vae.encoder_hidden_size,
            2 * acoustic,
        ),
        (
            "the channels of the timbre",
            condition.timbre_hidden_dim,
            acoustic,
        ),
        (
            "the condition encoder's width",
            condition.layer.hidden_size,
            transformer.condition_width(),
        ),
        (
            "the text encoder's width",
            text.hidden_size,
            condition.text_hidden_dim,
        ),
    ];
    if let Some((tokens, _)) = &parts.tokens {
        let TokenConfigs {
            tokenizer,
            detokenizer,
        } = tokens;
        pairs.extend([
            (
                "the audio tokenizer's channels",
                tokenizer.audio_acoustic_hidden_dim,
                acoustic,
            ),
            (
                "the audio detokenizer's channels",
                detokenizer.audio_acoustic_hidden_dim,
                acoustic,
            ),
            (
                "the audio detokenizer's width",
                detokenizer.layer.hidden_size,
                tokenizer.layer.hidden_size,
            ),
            (
                "the audio detokenizer's frames of a token",
                detokenizer.pool_window_size,
                tokenizer.pool_window_size,
            ),
        ]);
    }
    check_pairs(place, &pairs)
}
