//! Opens a checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;

use super::checkpoint::{Places, audio_vae, vocoder};
use super::config::FusionConfig;
use super::layout::{block_of, layout, role};
use super::model::{AUDIO_VAE, FAMILY, OviModel, RATE, TEXT_ENCODER, TRANSFORMER, VAE, VOCODER, most_frames};
use super::prompts::negative_prompt;
use super::variant::Variant;
use crate::autoencoders::mmaudio::MmAudioConfig;
use crate::autoencoders::mmaudio::vocoder::VocoderConfig;
use crate::autoencoders::wan::{WanVaeConfig, diffusers_name_of_original};
use crate::checkpoint::{
    Checkpoint, ComponentFiles, ComponentSet, QuantizeRole, RoleOf, TensorSpec, Wanted,
    component_of_checkpoint, exact_component, open_single_file,
};
use crate::files::{check_pairs, unsupported};
use crate::text::t5::{self, T5Config};
use crate::text::umt5;
use crate::{Medium, ModelError, ModelParts, Precision, Request, Video, autoencoders};

/// The components of a model.
const COMPONENTS: [&str; 5] = [TRANSFORMER, TEXT_ENCODER, VAE, AUDIO_VAE, VOCODER];

/// Components that presets quantize: nearly all bytes.
const LARGE: [&str; 2] = [TRANSFORMER, TEXT_ENCODER];

/// The rule of a component: the decoders of the sound, which are small, are in full precision.
fn role_of(component: &str) -> RoleOf {
    match component {
        TRANSFORMER => role,
        TEXT_ENCODER => t5::role,
        VAE => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The default request of a variant, as its authors publish it.
fn defaults(variant: Variant) -> Request {
    let (width, height) = match variant {
        Variant::Of720For5s => (960, 544),
        Variant::Of960For5s | Variant::Of960For10s => (1280, 704),
    };
    let video = Video {
        width,
        height,
        frames: most_frames(variant),
        frames_per_second: RATE,
        ..Video::default()
    };
    Request {
        negative_prompt: Some(negative_prompt()),
        true_guidance: 4.0,
        ..Request::of(Medium::Video(video), 50, 1.0, umt5::MOST_TOKENS as u32)
    }
}

impl OviModel {
    /// Opens a checkpoint by headers and configurations; `None` if it is not Ovi.
    ///
    /// # Errors
    /// When it is Ovi and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<OviModel>, ModelError> {
        OviModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`OviModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<OviModel>, ModelError> {
        let Some(mut places) = Places::of(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let transformer = places.fusion_config()?;
        transformer
            .check()
            .map_err(|problem| unsupported(path, problem))?;
        let fusion = std::mem::take(&mut places.fusion);
        let transformer_files = fusion_files(&transformer, fusion, &wanted)?;
        let (text, place) = places.base.text_encoder()?;
        let tokenizer = places.base.tokenizer(&place)?;
        let text_files = place.files(wanted.of(TEXT_ENCODER), umt5::transformers_name, |has| {
            text.tensor_shapes(has)
        })?;
        let (vae, place) = places.base.vae(transformer.video.in_dim)?;
        let vae_files = place.files(wanted.of(VAE), diffusers_name_of_original, |_| {
            vae.tensor_shapes()
        })?;
        let (audio_vae, checkpoint) = audio_vae(&places.audio_vae)?;
        let shapes = audio_vae.tensor_shapes();
        let wanted_vae = wanted.of(AUDIO_VAE);
        let audio_files = component_of_checkpoint(&places.audio_vae, checkpoint, wanted_vae, |_| shapes)?;
        let (vocoder, checkpoint) = vocoder(&places.vocoder)?;
        let shapes = match checkpoint.has("conv_pre.weight") {
            true => vocoder.folded_tensor_shapes(),
            false => vocoder.tensor_shapes(),
        };
        let wanted_vocoder = wanted.of(VOCODER);
        let vocoder_files = component_of_checkpoint(&places.vocoder, checkpoint, wanted_vocoder, |_| shapes)?;
        check_parts(path, &transformer, &text, &vae, &audio_vae, &vocoder)?;
        let files = vec![
            (TRANSFORMER, transformer_files),
            (TEXT_ENCODER, text_files),
            (VAE, vae_files),
            (AUDIO_VAE, audio_files),
            (VOCODER, vocoder_files),
        ];
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        components.in_blocks(TRANSFORMER, block_of);
        components.in_blocks(TEXT_ENCODER, t5::block_of);
        let defaults = defaults(places.variant);
        Ok(Some(OviModel {
            variant: places.variant,
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            tokenizer,
            transformer,
            text,
            vae,
            audio_vae,
            vocoder,
        }))
    }
}

/// The fusion model of one file, or of two.
fn fusion_files(
    config: &FusionConfig,
    files: Vec<(std::path::PathBuf, Checkpoint)>,
    wanted: &Wanted,
) -> Result<ComponentFiles, ModelError> {
    let all = layout(config);
    let is_alone = files.len() == 1;
    let mut component: Option<ComponentFiles> = None;
    for (path, checkpoint) in files {
        let is_in = |spec: &&TensorSpec| is_alone || checkpoint.has(&spec.tensor);
        let specs: Vec<TensorSpec> = all.iter().filter(is_in).cloned().collect();
        let files = exact_component(&path, checkpoint, &specs, wanted.of(TRANSFORMER), "an Ovi model")?;
        component = Some(match component {
            None => files,
            Some(first) => first.with(files),
        });
    }
    component.ok_or_else(|| unsupported(Path::new(""), "it has no files"))
}

/// Checks that the components of one model match.
fn check_parts(
    place: &Path,
    transformer: &FusionConfig,
    text: &T5Config,
    vae: &WanVaeConfig,
    audio_vae: &MmAudioConfig,
    vocoder: &VocoderConfig,
) -> Result<(), ModelError> {
    check_pairs(
        place,
        &[
            (
                "the text encoder's width",
                text.d_model,
                transformer.video.text_dim,
            ),
            ("the VAE's latent channels", vae.z_dim, transformer.video.in_dim),
            ("the VAE's pixels per latent cell", vae.factor(), 16),
            (
                "the audio VAE's latent channels",
                audio_vae.latent_channels,
                transformer.audio.in_dim,
            ),
            ("the vocoder's bins", vocoder.num_mels, audio_vae.mel_bins),
        ],
    )
}
