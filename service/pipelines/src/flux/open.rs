//! Opens a FLUX checkpoint by its headers and configurations: what it consists of, and whether its parts fit together.

use std::path::{Path, PathBuf};

use residency::Component;
use serde::Deserialize;

use super::bounds::{PIXELS_PER_TOKEN, problems};
use super::checkpoint::{Recognised, config_of_single_file, recognise};
use super::components::{transformer_of_folder, transformer_of_single_file};
use super::config::TransformerConfig;
use super::model::FluxModel;
use super::quantize_rule::role_of;
use crate::autoencoder_kl::{VaeConfig, autoencoder_of_single_file};
use crate::checkpoint::{ComponentFiles, Wanted, component_of_folder};
use crate::files::{damaged, read_json, unsupported};
use crate::flow_match::SchedulerConfig;
use crate::text::clip::ClipConfig;
use crate::text::t5::T5Config;
use crate::text::tokenizers::{ClipTokenizer, T5Tokenizer};
use crate::{Defaults, ModelError, Precision, RequestError, provisional_identity};

/// Its components, in the order of [`FluxModel::components`].
const COMPONENTS: [&str; 4] = ["transformer", "vae", "text_encoder", "text_encoder_2"];

/// Bytes a second that a reload is predicted to take until it was measured.
const RELOAD_BYTES_PER_SECOND: f64 = 4e9;

impl FluxModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is neither.
    ///
    /// # Errors
    /// When it is FLUX and damaged or not supported, or cannot be quantized as it is asked for.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<FluxModel>, ModelError> {
        let Some(recognised) = recognise(path)? else {
            return Ok(None);
        };
        let formats = &precision.quantization;
        if let Some((unknown, _)) = formats.formats().find(|(name, _)| !COMPONENTS.contains(name)) {
            return Err(ModelError::no_such_component(unknown, &COMPONENTS));
        }
        let wanted = |component: &'static str| Wanted {
            component,
            dtype: precision.dtype,
            format: formats.format_of(component),
            role_of: role_of(component),
        };
        let base = match &recognised {
            Recognised::Folder(folder) => folder,
            Recognised::SingleFile { base, .. } => base,
        };
        let base = &std::fs::canonicalize(base).map_err(|e| damaged(base, e.to_string()))?;
        let folder_config = base.join("transformer").join("config.json");
        let is_folder = matches!(recognised, Recognised::Folder(_));
        let (transformer, transformer_files) = match recognised {
            Recognised::Folder(_) => {
                let config: TransformerConfig = checked(&folder_config, TransformerConfig::check)?;
                let files = transformer_of_folder(&base.join("transformer"), &config, wanted("transformer"))?;
                (config, files)
            }
            Recognised::SingleFile {
                path,
                checkpoint,
                naming,
                ..
            } => {
                let of_base = match folder_config.is_file() {
                    true => read_json(&folder_config)?,
                    false => TransformerConfig::default(),
                };
                let config = config_of_single_file(&path, &checkpoint, naming, &of_base)?;
                config.check().map_err(|problem| unsupported(&path, problem))?;
                let specs = naming.specs(&config);
                let files = transformer_of_single_file(&path, checkpoint, &specs, wanted("transformer"))?;
                (config, files)
            }
        };
        let bfl_vae = match is_folder {
            true => None,
            false => bfl_vae(path, base),
        };
        let vae = match bfl_vae {
            Some(_) => VaeConfig::flux(),
            None => checked(&base.join("vae/config.json"), VaeConfig::check)?,
        };
        let clip: ClipConfig = checked(&base.join("text_encoder/config.json"), ClipConfig::check)?;
        let t5: T5Config = checked(&base.join("text_encoder_2/config.json"), T5Config::check)?;
        check_widths(base, &transformer, &vae, &clip, &t5)?;
        // Vocabularies are most of the time that it takes to open a model: two threads read them.
        let (clip_tokenizer, t5_tokenizer) = std::thread::scope(|scope| {
            let t5 = scope.spawn(|| T5Tokenizer::open(&base.join("tokenizer_2")));
            let clip = ClipTokenizer::open(&base.join("tokenizer"));
            (
                clip,
                t5.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            )
        });
        let clip_tokenizer = clip_tokenizer?;
        if clip_tokenizer.length() > clip.max_position_embeddings {
            let (tokens, places) = (clip_tokenizer.length(), clip.max_position_embeddings);
            let problem = format!("its CLIP has {places} positions for {tokens} tokens");
            return Err(unsupported(base, problem));
        }
        let files = vec![
            transformer_files,
            match bfl_vae {
                Some(file) => autoencoder_of_single_file(&file, vae.tensor_shapes(), wanted("vae"))?,
                None => component_of_folder(&base.join("vae"), wanted("vae"), |_| vae.tensor_shapes())?,
            },
            component_of_folder(&base.join("text_encoder"), wanted("text_encoder"), |has| {
                clip.tensor_shapes(has)
            })?,
            component_of_folder(&base.join("text_encoder_2"), wanted("text_encoder_2"), |has| {
                t5.tensor_shapes(has)
            })?,
        ];
        let components = COMPONENTS
            .iter()
            .zip(&files)
            .map(|(name, files)| component(name, files, precision));
        Ok(Some(FluxModel {
            precision: precision.clone(),
            components: components.collect(),
            files,
            scheduler: checked(
                &base.join("scheduler/scheduler_config.json"),
                SchedulerConfig::check,
            )?,
            clip_tokenizer,
            t5_tokenizer: t5_tokenizer?,
            defaults: defaults(base, transformer.guidance_embeds)?,
            transformer,
            vae,
            clip,
            t5,
        }))
    }
}

/// A component's identity and size.
fn component(name: &str, files: &ComponentFiles, precision: &Precision) -> Component {
    let bytes = files.plan.bytes();
    Component {
        id: provisional_identity(&files.place, name, precision),
        name: name.to_owned(),
        bytes,
        reload_seconds: bytes.0 as f64 / RELOAD_BYTES_PER_SECOND,
    }
}

/// A configuration that this build knows.
fn checked<T: serde::de::DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), String>,
) -> Result<T, ModelError> {
    let config = read_json(path)?;
    check(&config).map_err(|problem| unsupported(path, problem))?;
    Ok(config)
}

/// Components of one pipeline fit together.
fn check_widths(
    base: &Path,
    transformer: &TransformerConfig,
    vae: &VaeConfig,
    clip: &ClipConfig,
    t5: &T5Config,
) -> Result<(), ModelError> {
    let pairs = [
        (
            "the VAE's latent channels",
            vae.latent_channels,
            transformer.latent_channels(),
        ),
        (
            "the VAE's pixels per latent cell",
            vae.factor(),
            PIXELS_PER_TOKEN as usize / 2,
        ),
        ("the VAE's channels of a picture", vae.out_channels, 3),
        ("the VAE's channels of a picture to encode", vae.in_channels, 3),
        (
            "CLIP's width",
            clip.hidden_size,
            transformer.pooled_projection_dim,
        ),
        ("T5's width", t5.d_model, transformer.joint_attention_dim),
    ];
    match pairs.into_iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(unsupported(
            base,
            format!("{what}: {found}, and the transformer takes {expected}"),
        )),
        None => Ok(()),
    }
}

/// The autoencoder of Black Forest Labs that belongs to a single file: beside it or in its base, if the base
/// has none in diffusers' layout.
fn bfl_vae(file: &Path, base: &Path) -> Option<PathBuf> {
    if base.join("vae").is_dir() {
        return None;
    }
    let folders = [file.parent().unwrap_or(Path::new(".")), base];
    folders
        .into_iter()
        .map(|folder| folder.join("ae.safetensors"))
        .find(|path| path.is_file())
}

/// What `moored.json` in the model's folder says, over what dev or schnell are used with.
fn defaults(base: &Path, guided: bool) -> Result<Defaults, ModelError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Told {
        steps: Option<u32>,
        guidance: Option<f32>,
        max_sequence_length: Option<u32>,
        width: Option<u32>,
        height: Option<u32>,
    }
    let path = base.join("moored.json");
    let told: Told = if path.is_file() {
        read_json(&path)?
    } else {
        Told::default()
    };
    let (steps, guidance, tokens) = if guided { (28, 3.5, 512) } else { (4, 0.0, 256) };
    let defaults = Defaults {
        steps: told.steps.unwrap_or(steps),
        guidance: told.guidance.unwrap_or(guidance),
        max_sequence_length: told.max_sequence_length.unwrap_or(tokens),
        width: told.width.unwrap_or(1024),
        height: told.height.unwrap_or(1024),
    };
    let problems = problems(&defaults.request());
    if problems.is_empty() {
        return Ok(defaults);
    }
    let problems: Vec<String> = problems
        .into_iter()
        .map(|RequestError { field, problem }| format!("{field} {problem}"))
        .collect();
    Err(damaged(&path, problems.join("; ")))
}
