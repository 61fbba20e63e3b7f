//! Opens an SDXL checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;
use serde::Deserialize;

use super::checkpoint::{MARKS, SingleFile, TEXT_ENCODERS, unet_of_base, with_projection};
use super::config::{LATENT_CHANNELS, UnetConfig};
use super::model::{FAMILY, READS, SdxlModel, TEXT_ENCODER, TEXT_ENCODER_2, UNET, VAE, problems};
use super::quantize_rule::role_of;
use crate::adapters::AdapterSet;
use crate::autoencoders::kl::{self, VaeConfig};
use crate::checkpoint::{
    ComponentFiles, ComponentSet, Recognised, TransformerPlace, Wanted, component_of_folder,
    component_of_specs, open_single_file, whole,
};
use crate::defaults::folder_defaults;
use crate::files::{check_pairs, checked, read_json, unsupported};
use crate::samplers::NoiseConfig;
use crate::text::clip::ClipConfig;
use crate::text::tokenizers::ClipTokenizer;
use crate::{Image, Medium, ModelError, ModelParts, Precision, Request};

/// Component names, in the order of [`crate::Model::components`].
const COMPONENTS: [&str; 4] = [UNET, VAE, TEXT_ENCODER, TEXT_ENCODER_2];

/// Components that presets quantize: nearly all bytes.
const LARGE: [&str; 1] = [UNET];

/// Tokens of a prompt that are read unless the request says otherwise: three chunks of CLIP.
const TOKENS: u32 = 225;

/// Steps and guidance of the model card's example, with a third fewer steps than diffusers' default.
fn defaults(unet: &UnetConfig) -> Request {
    let defaults = Request {
        negative_prompt: Some(String::new()),
        true_guidance: 5.0,
        ..Request::of(Medium::Image(Image::of(1024, 1024)), 30, 0.0, TOKENS)
    };
    match unet.takes_mask() {
        true => Request {
            strength: 1.0,
            ..defaults
        },
        false => defaults,
    }
}

/// What `model_index.json` says besides its parts.
#[derive(Deserialize)]
#[serde(default)]
struct PipelineConfig {
    /// Whether an absent negative prompt is zeros rather than an encoded empty text.
    force_zeros_for_empty_prompt: bool,
    /// Whether scores of the picture are embedded, as in the refiner.
    requires_aesthetics_score: bool,
}

impl Default for PipelineConfig {
    fn default() -> PipelineConfig {
        PipelineConfig {
            force_zeros_for_empty_prompt: true,
            requires_aesthetics_score: false,
        }
    }
}

impl SdxlModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is not SDXL.
    ///
    /// # Errors
    /// When it is SDXL and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<SdxlModel>, ModelError> {
        SdxlModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`SdxlModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<SdxlModel>, ModelError> {
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let base = base.as_path();
        let index: PipelineConfig = read_json(&base.join("model_index.json"))?;
        if index.requires_aesthetics_score {
            let problem =
                "it is the refiner of Stable Diffusion XL, which does not run here: the base model does";
            return Err(unsupported(base, problem));
        }
        let single = match (&transformer, file) {
            (TransformerPlace::SingleFile { .. }, Some(file)) => Some(SingleFile::new(path, file)),
            _ => None,
        };
        let (unet, unet_files): (UnetConfig, _) =
            transformer.open_over(|| unet_of_base(base), wanted.of(UNET))?;
        let (vae, vae_files) = open_vae(base, single.as_ref(), &wanted)?;
        let mut encoders = TEXT_ENCODERS
            .into_iter()
            .map(|name| open_text_encoder(name, base, single.as_ref(), &wanted));
        let mut next = || {
            encoders
                .next()
                .unwrap_or_else(|| Err(unsupported(base, "it has no text encoder")))
        };
        let ((clip, clip_files), (big, big_files)) = (next()?, next()?);
        let pairs = [
            ("the VAE's latent channels", vae.latent_channels, LATENT_CHANNELS),
            (
                "the widths of both text encoders",
                clip.hidden_size + big.hidden_size,
                unet.cross_attention_dim,
            ),
            (
                "the width of the second text encoder's projection",
                big.projection_dim,
                unet.pooled_width(),
            ),
        ];
        check_pairs(base, &pairs)?;
        let tokenizers = ["tokenizer", "tokenizer_2"].map(|name| ClipTokenizer::shared(&base.join(name)));
        let [tokenizer, tokenizer_2] = tokenizers;
        let (tokenizer, tokenizer_2) = (tokenizer?, tokenizer_2?);
        for (tokenizer, encoder) in [(&tokenizer, &clip), (&tokenizer_2, &big)] {
            encoder.check_length(base, tokenizer.length())?;
        }
        let lengths = [(
            "tokens in a chunk of the second tokenizer",
            tokenizer_2.length(),
            tokenizer.length(),
        )];
        check_pairs(base, &lengths)?;
        let noise = NoiseConfig::of_pipeline(base)?;
        let noise = match &single {
            Some(single) => single.noise(noise)?,
            None => noise,
        };
        let files = [unet_files, vae_files, clip_files, big_files];
        let mut components =
            ComponentSet::new(COMPONENTS.into_iter().zip(files), precision.dtype, wanted.formats);
        components.in_blocks(UNET, unet.block_of());
        let defaults = folder_defaults(base, defaults(&unet), READS, problems)?;
        Ok(Some(SdxlModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            zeros_for_empty: index.force_zeros_for_empty_prompt,
            noise,
            tokenizers: [tokenizer, tokenizer_2],
            unet,
            vae,
            encoders: [clip, big],
        }))
    }
}

/// The autoencoder, in a single file or in its folder.
fn open_vae(
    base: &Path,
    single: Option<&SingleFile<'_>>,
    wanted: &Wanted,
) -> Result<(VaeConfig, ComponentFiles), ModelError> {
    let config = base.join(VAE).join("config.json");
    if let Some(single) = single
        && let Some(checkpoint) = single.vae()?
    {
        let vae = match config.is_file() {
            true => checked(&config, VaeConfig::check)?,
            false => VaeConfig::sdxl(),
        };
        let specs = whole(vae.tensor_shapes());
        let files = component_of_specs(single.path(), &checkpoint, &specs, wanted.of(VAE), None)?;
        return Ok((vae, files));
    }
    let place = kl::Place::of(base, None, kl::Published::Flux1, LATENT_CHANNELS)?;
    let files = place.files(wanted.of(VAE))?;
    Ok((place.config, files))
}

/// A text encoder, in a single file or in its folder.
fn open_text_encoder(
    name: &'static str,
    base: &Path,
    single: Option<&SingleFile<'_>>,
    wanted: &Wanted,
) -> Result<(ClipConfig, ComponentFiles), ModelError> {
    let folder = base.join(name);
    let config = folder.join("config.json");
    let config: ClipConfig = match single.is_some() && !config.is_file() {
        true if name == TEXT_ENCODER => ClipConfig::clip_l(),
        true => ClipConfig::big_g(),
        false => checked(&config, ClipConfig::check)?,
    };
    if let Some(single) = single
        && let Some((checkpoint, specs)) = single.text_encoder(name, &config)?
    {
        let files = component_of_specs(single.path(), &checkpoint, &specs, wanted.of(name), None)?;
        return Ok((config, files));
    }
    let files = component_of_folder(&folder, wanted.of(name), |has| match name {
        TEXT_ENCODER => config.tensor_shapes(has),
        _ => with_projection(&config, has),
    })?;
    Ok((config, files))
}
