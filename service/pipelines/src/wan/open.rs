//! Opens a checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;

use super::authors::Settings;
use super::base::Base;
use super::config::TransformerConfig;
use super::model::{
    FAMILY, Kind, NEGATIVE_PROMPT, SECOND, TEXT_ENCODER, TRANSFORMER, VAE, WanModel, problems, reads,
};
use super::places::Places;
use super::shape::{block_of, role};
use crate::adapters::AdapterSet;
use crate::autoencoders::wan::{WanVaeConfig, diffusers_name_of_original};
use crate::checkpoint::{ComponentFiles, ComponentSet, QuantizeRole, RoleOf, Wanted, open_single_file};
use crate::defaults::{folder_defaults, shift_of};
use crate::files::{check_pairs, unsupported};
use crate::text::t5::{self, T5Config};
use crate::text::umt5;
use crate::{Medium, ModelError, ModelParts, Precision, Request, Video, autoencoders};

/// The components of a model.
const COMPONENTS: [&str; 4] = [TRANSFORMER, SECOND, VAE, TEXT_ENCODER];

/// Components that presets quantize: nearly all bytes.
const LARGE: [&str; 3] = [TRANSFORMER, SECOND, TEXT_ENCODER];

/// The quantization rule of a component.
fn role_of(component: &str) -> RoleOf {
    match component {
        TRANSFORMER | SECOND => role,
        TEXT_ENCODER => t5::role,
        VAE => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The default request of a model, as its authors publish it; of two transformers the larger films are left to those who ask.
fn defaults(kind: Kind, has_two: bool) -> Request {
    let video = |width, height, frames, frames_per_second| {
        Medium::Video(Video {
            width,
            height,
            frames,
            frames_per_second,
            ..Video::default()
        })
    };
    let (medium, steps, true_guidance, guidance) = match (kind, has_two) {
        (Kind::TextOrPicture, _) => (video(1280, 704, 121, 24.0), 50, 5.0, 0.0),
        (Kind::Text, false) => (video(832, 480, 81, 16.0), 50, 5.0, 0.0),
        (Kind::Text, true) => (video(832, 480, 81, 16.0), 40, 4.0, 3.0),
        (Kind::Picture, _) => (video(832, 480, 81, 16.0), 40, 3.5, 0.0),
    };
    Request {
        negative_prompt: Some(NEGATIVE_PROMPT.to_owned()),
        true_guidance,
        ..Request::of(medium, steps, guidance, umt5::MOST_TOKENS as u32)
    }
}

impl WanModel {
    /// Opens a pipeline's folder in diffusers' layout, a repository of the authors, or a single file, by headers and
    /// configurations; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<WanModel>, ModelError> {
        WanModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`WanModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<WanModel>, ModelError> {
        let Some(places) = Places::of(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let Opened {
            base,
            transformer,
            settings,
            mut files,
        } = Opened::of(path, places, &wanted)?;
        let has_two = settings.boundary_ratio.is_some();
        let (vae, vae_place) = base.vae(transformer.out_channels)?;
        let (text, text_place) = base.text_encoder()?;
        check_parts(&base.folder, &transformer, &vae, &text)?;
        let Settings {
            expand_timesteps,
            boundary_ratio,
            scheduler,
        } = settings;
        let kind = Kind::of(&transformer, expand_timesteps);
        let tokenizer = base.tokenizer(&text_place)?;
        files.push((
            VAE,
            vae_place.files(wanted.of(VAE), diffusers_name_of_original, |_| {
                vae.tensor_shapes()
            })?,
        ));
        files.push((
            TEXT_ENCODER,
            text_place.files(wanted.of(TEXT_ENCODER), umt5::transformers_name, |has| {
                text.tensor_shapes(has)
            })?,
        ));
        let grain = 2 * vae.factor() as u32;
        let most = vae.frames(transformer.rope_max_seq_len) as u32;
        // A default request has no picture to start from: the client supplies it.
        let check = |request: &Request| {
            let problems = problems(kind, has_two, (grain, most), request).into_iter();
            problems.filter(|problem| problem.field != "init_image").collect()
        };
        let defaults = folder_defaults(&base.folder, defaults(kind, has_two), reads(kind), check)?;
        let mut components = ComponentSet::new(files, precision.dtype, wanted.formats);
        components.in_blocks(TRANSFORMER, block_of);
        if has_two {
            components.in_blocks(SECOND, block_of);
        }
        components.in_blocks(TEXT_ENCODER, t5::block_of);
        Ok(Some(WanModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            scheduler,
            tokenizer,
            boundary: boundary_ratio,
            kind,
            transformer,
            vae,
            text,
        }))
    }
}

/// The transformers of a model, with the settings of their pipeline.
struct Opened {
    base: Base,
    /// The configuration of the transformer, or of both.
    transformer: TransformerConfig,
    settings: Settings,
    /// Their components.
    files: Vec<(&'static str, ComponentFiles)>,
}

impl Opened {
    fn of(path: &Path, places: Places, wanted: &Wanted) -> Result<Opened, ModelError> {
        let Places {
            base,
            transformer,
            second,
        } = places;
        let has_two = second.is_some();
        let of_base = || base.transformer_config();
        let (transformer, first): (TransformerConfig, _) =
            transformer.open_over(of_base, wanted.of(TRANSFORMER))?;
        let mut files = vec![(TRANSFORMER, first)];
        if let Some(second) = second {
            let (config, second): (TransformerConfig, _) = second.open_over(of_base, wanted.of(SECOND))?;
            if config != transformer {
                let problem =
                    "its two transformers are of different kinds or sizes; two of one pipeline are expected";
                return Err(unsupported(path, problem));
            }
            files.push((SECOND, second));
        }
        let mut settings = base.settings_of(&transformer, has_two)?;
        if let Some(shift) = shift_of(path, &base.folder)? {
            settings.scheduler.flow_shift = f64::from(shift);
        }
        Ok(Opened {
            base,
            transformer,
            settings,
            files,
        })
    }
}

/// Checks that the components of one pipeline match.
fn check_parts(
    base: &Path,
    transformer: &TransformerConfig,
    vae: &WanVaeConfig,
    text: &T5Config,
) -> Result<(), ModelError> {
    check_pairs(
        base,
        &[
            ("the VAE's latent channels", vae.z_dim, transformer.out_channels),
            ("the VAE's frames per latent", vae.frames(2) - 1, 4),
            ("the text encoder's width", text.d_model, transformer.text_dim),
        ],
    )
}
