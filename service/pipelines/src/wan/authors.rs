//! The repositories of Wan's authors, as they are downloaded, and the settings that their programs have for each model.
//!
//! | what | where |
//! |---|---|
//! | the transformer | `diffusion_pytorch_model*.safetensors` with `config.json`, at the top |
//! | two transformers | the same in `high_noise_model` and `low_noise_model` |
//! | `text_encoder` | `models_t5_umt5-xxl-enc-bf16.pth` |
//! | `tokenizer` | `google/umt5-xxl` |
//! | `vae` | `Wan2.1_VAE.pth`, `Wan2.2_VAE.pth` |

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::config::TransformerConfig;
use crate::checkpoint::{Checkpoint, Naming, TransformerPlace, known_by_names};
use crate::files::{read_json, unsupported};
use crate::unipc::UniPcConfig;
use crate::{ModelError, OwnLayout};

/// The folder of the tokenizer.
pub(super) const TOKENIZER: &str = "google/umt5-xxl";
/// The folders of two transformers: of high noise, and of low noise.
const NOISES: [&str; 2] = ["high_noise_model", "low_noise_model"];
/// The file of the text encoder.
const TEXT_ENCODER: &str = "models_t5_umt5-xxl-enc-bf16.pth";
/// The files of the autoencoders.
const VAES: [&str; 2] = ["Wan2.1_VAE.pth", "Wan2.2_VAE.pth"];
/// The file of the picture encoder of models that do not run here.
const CLIP: &str = "models_clip";
/// Beginning of the names of a transformer's files.
const WEIGHTS: &str = "diffusion_pytorch_model";
const CONFIGURATION: &str = "config.json";
/// The class that the configuration of a transformer names.
const CLASS: &str = "WanModel";
/// Channels of the latents of Wan 2.2's autoencoder.
pub(super) const CHANNELS_OF_2_2: usize = 48;

/// `config.json` of a transformer. Missing numbers are those of the published models, which all have heads of one width.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Configuration {
    #[serde(rename = "_class_name")]
    class: String,
    dim: Option<usize>,
    num_heads: Option<usize>,
    eps: Option<f64>,
}

/// The files that are read of a repository of the authors, from the names of all files there.
pub(super) fn own_layout(files: &[&str]) -> Option<OwnLayout> {
    let has = |name: &str| files.contains(&name);
    let vae = VAES.into_iter().find(|name| has(name))?;
    let is_of_tokenizer = |file: &&str| file.starts_with(TOKENIZER) && file.ends_with(".json");
    let has_clip = files.iter().any(|file| file.starts_with(CLIP));
    if has_clip || !has(TEXT_ENCODER) || !files.iter().any(is_of_tokenizer) {
        return None;
    }
    let has_two = NOISES
        .iter()
        .all(|folder| has(&format!("{folder}/{CONFIGURATION}")));
    let mut folders = vec![TOKENIZER.to_owned()];
    let mut read = vec![TEXT_ENCODER.to_owned(), vae.to_owned()];
    let configuration = match has_two {
        true => {
            folders.extend(NOISES.map(str::to_owned));
            format!("{}/{CONFIGURATION}", NOISES[0])
        }
        false => {
            let of_weights = |file: &&&str| {
                file.starts_with(WEIGHTS)
                    && (file.ends_with(".safetensors") || file.ends_with(".safetensors.index.json"))
            };
            let weights: Vec<&&str> = files.iter().filter(of_weights).collect();
            if weights.is_empty() || !has(CONFIGURATION) {
                return None;
            }
            read.push(CONFIGURATION.to_owned());
            read.extend(weights.into_iter().map(|file| (*file).to_owned()));
            CONFIGURATION.to_owned()
        }
    };
    Some(OwnLayout {
        folders,
        files: read,
        configuration: Some(configuration),
    })
}

/// The folders of the transformers of a folder: the one, or that of high noise and that of low noise. `None` for a folder of
/// another kind.
fn folders_in(folder: &Path) -> Option<(PathBuf, Option<PathBuf>)> {
    let [high, low] = NOISES.map(|name| folder.join(name));
    match is_transformer(&high) || is_transformer(&low) {
        true => Some((high, Some(low))),
        false => is_transformer(folder).then(|| (folder.to_owned(), None)),
    }
}

/// Whether a folder holds a transformer of the authors.
fn is_transformer(folder: &Path) -> bool {
    let path = folder.join(CONFIGURATION);
    let is_ours = || read_json::<Configuration>(&path).is_ok_and(|config| config.class == CLASS);
    path.is_file() && !folder.join("model_index.json").is_file() && is_ours()
}

/// Whether a folder holds a model as the authors publish it.
pub(super) fn has_own_layout(folder: &Path) -> bool {
    folders_in(folder).is_some()
}

/// The transformer of a folder, or that of high noise and that of low noise; `None` for a folder of another kind.
///
/// # Errors
/// When one of two is missing, or one is damaged or of a kind that does not run here.
pub(super) fn transformers_in(
    folder: &Path,
) -> Result<Option<(TransformerPlace, Option<TransformerPlace>)>, ModelError> {
    let Some((first, second)) = folders_in(folder) else {
        return Ok(None);
    };
    let second = second.map(|second| transformer_in(&second)).transpose()?;
    Ok(Some((transformer_in(&first)?, second)))
}

fn transformer_in(folder: &Path) -> Result<TransformerPlace, ModelError> {
    let checkpoint = Checkpoint::of_folder(folder)?;
    let names: Vec<&str> = checkpoint.names().collect();
    if let Some(other) = known_by_names(&names) {
        return Err(unsupported(folder, format!("it is {other}")));
    }
    Ok(TransformerPlace::SingleFile {
        path: folder.to_owned(),
        checkpoint,
        naming: Naming::Authors,
    })
}

/// What the configuration of a transformer in a folder says that its tensors do not show.
///
/// # Errors
/// When it cannot be read.
pub(super) fn configuration_in(folder: &Path) -> Result<TransformerConfig, ModelError> {
    let published = TransformerConfig::default();
    let Some((first, _)) = folders_in(folder) else {
        return Ok(published);
    };
    let config: Configuration = read_json(&first.join(CONFIGURATION))?;
    let head = match (config.dim, config.num_heads) {
        (Some(width), Some(heads)) if heads > 0 => width / heads,
        _ => published.attention_head_dim,
    };
    Ok(TransformerConfig {
        attention_head_dim: head,
        eps: config.eps.unwrap_or(published.eps),
        ..published
    })
}

/// The settings of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// Whether tokens of a first picture have a time of their own (Wan 2.2 5B).
    pub(super) expand_timesteps: bool,
    /// The part of the training steps from which on noise is high, if there is a transformer for each.
    pub(super) boundary_ratio: Option<f64>,
    pub(super) scheduler: UniPcConfig,
}

impl Settings {
    /// The settings of the authors' programs (`wan/configs` of Wan 2.2, and of Wan 2.1 what its `generate.py` has) for a model
    /// without settings of its own. The times are those of diffusers in any case.
    pub(super) fn of_authors(transformer: &TransformerConfig, has_two: bool) -> Settings {
        let from_picture = transformer.is_conditioned();
        let (boundary_ratio, shift) = match (has_two, from_picture) {
            (true, false) => (Some(0.875), 12.0),
            (true, true) => (Some(0.9), 5.0),
            (false, _) => (None, 5.0),
        };
        Settings {
            expand_timesteps: !from_picture && transformer.out_channels == CHANNELS_OF_2_2,
            boundary_ratio,
            scheduler: UniPcConfig::shifted(shift),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTS: [&str; 4] = [
        "models_t5_umt5-xxl-enc-bf16.pth",
        "google/umt5-xxl/tokenizer.json",
        "google/umt5-xxl/spiece.model",
        "README.md",
    ];

    fn layout(further: &[&str]) -> Option<OwnLayout> {
        own_layout(&[&PARTS, further].concat())
    }

    #[test]
    fn repositories_of_the_authors_are_known_by_their_files() {
        let shards = [
            "config.json",
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model-00002-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
            "Wan2.2_VAE.pth",
        ];
        let found = layout(&shards).expect("the 5B");
        assert_eq!(found.folders, ["google/umt5-xxl"]);
        assert_eq!(found.files.len(), 6, "{found:?}");
        let two = [
            "high_noise_model/config.json",
            "low_noise_model/config.json",
            "Wan2.1_VAE.pth",
        ];
        let found = layout(&two).expect("the A14B");
        assert_eq!(
            found.folders,
            ["google/umt5-xxl", "high_noise_model", "low_noise_model"]
        );
        assert_eq!(found.files, ["models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"]);
        let of_clip = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth";
        let with_clip = [&shards[..], &[of_clip]].concat();
        assert_eq!(layout(&with_clip), None, "it sees pictures through CLIP");
        assert_eq!(layout(&two[1..]), None, "one of two is missing");
        assert_eq!(layout(&shards[..4]), None, "there is nothing to decode with");
        assert_eq!(own_layout(&[&shards[..], &PARTS[..1]].concat()), None);
    }

    #[test]
    fn the_settings_are_those_of_the_authors() {
        let text = TransformerConfig::default();
        let picture = TransformerConfig {
            in_channels: 36,
            ..text.clone()
        };
        let ti2v = TransformerConfig {
            in_channels: 48,
            out_channels: 48,
            ..text.clone()
        };
        for (config, has_two, expected) in [
            (&text, false, (false, None, 5.0)),
            (&text, true, (false, Some(0.875), 12.0)),
            (&picture, true, (false, Some(0.9), 5.0)),
            (&ti2v, false, (true, None, 5.0)),
        ] {
            let Settings {
                expand_timesteps,
                boundary_ratio,
                scheduler,
            } = Settings::of_authors(config, has_two);
            assert_eq!((expand_timesteps, boundary_ratio, scheduler.flow_shift), expected);
            assert_eq!(scheduler.check(), Ok(()));
        }
    }
}
