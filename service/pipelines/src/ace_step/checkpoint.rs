//! Detection of ACE-Step checkpoints, by files and headers alone. Three layouts are supported.
//!
//! - A **folder in diffusers' layout** has `model_index.json`, and each component in a folder of its own.
//! - The **authors' folder** of a model (`acestep-v15-turbo`) has `config.json`, `model.safetensors` or its shards, and
//!   `silence_latent.pt`. Beside it, or in it, are `vae` and `Qwen3-Embedding-0.6B`. The folder around them can be opened too,
//!   if it has one model.
//! - A **single file**, as for ComfyUI (`acestep_v1.5_turbo.safetensors`), has the same tensors. Its companions are searched
//!   beside it, in the folder that `X.moored.json` names as `base`, and where ComfyUI keeps such files: `vae` or
//!   `ace_1.5_vae*`, `Qwen3-Embedding-0.6B`, of which the tokenizer suffices with `qwen_0.6b_ace15*`, and
//!   `silence_latent.pt` or `.safetensors`, which no file for ComfyUI has.

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;

use super::layout::NAMES;
use crate::checkpoint::{
    Checkpoint, authors_names, companion, folders_in, has_marks, prefixes, written_base,
};
use crate::files::{pipeline_class, read_json, unsupported};
use crate::{ModelError, OwnLayout};

/// The supported pipeline class.
pub(super) const PIPELINES: [&str; 1] = ["AceStepPipeline"];

/// The folders of such a pipeline. Its scheduler is not read: the pipeline computes the times of steps itself.
pub(super) const FOLDERS: [&str; 7] = [
    "audio_token_detokenizer",
    "audio_tokenizer",
    "condition_encoder",
    "text_encoder",
    "tokenizer",
    "transformer",
    "vae",
];

/// The folder of the authors' text encoder and tokenizer.
const QWEN: &str = "Qwen3-Embedding-0.6B";
/// Stem and extensions of the latents of silence.
const SILENCE_FILES: [&str; 2] = ["silence_latent.pt", "silence_latent.safetensors"];
/// Tensors that the authors' model has, and no other.
const MARKS: [&str; 3] = [
    "encoder.lyric_encoder.",
    "decoder.condition_embedder.",
    "null_condition_emb",
];

/// The places of the parts of a checkpoint.
pub(super) enum Places {
    /// A folder in diffusers' layout.
    Diffusers(PathBuf),
    Authors(Box<AuthorsPlaces>),
}

/// The places of the parts of a checkpoint with the authors' tensors.
pub(super) struct AuthorsPlaces {
    /// The folder or the file of the model.
    pub(super) place: PathBuf,
    pub(super) checkpoint: Checkpoint,
    /// The model's configuration, where it is a folder.
    pub(super) config: Option<PathBuf>,
    pub(super) silence: PathBuf,
    /// A folder in diffusers' layout, or a file.
    pub(super) vae: PathBuf,
    /// A folder of transformers, or a file.
    pub(super) text_encoder: PathBuf,
    pub(super) tokenizer: PathBuf,
    /// The folder of `moored.json`.
    pub(super) folder: PathBuf,
}

impl Places {
    /// The places of the model at a path; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family, and parts are missing.
    pub(super) fn of(path: &Path, file: Option<&CheckpointFile>) -> Result<Option<Places>, ModelError> {
        if pipeline_class(path)?.is_some_and(|class| PIPELINES.contains(&class.as_str())) {
            return Ok(Some(Places::Diffusers(path.to_owned())));
        }
        let found = match file {
            Some(file) => of_file(path, file)?,
            None => of_folder(path)?,
        };
        Ok(found.map(|places| Places::Authors(Box::new(places))))
    }
}

/// The files that are read of a repository in the authors' layout: the autoencoder, the text encoder, and one model. Of several
/// models this is the turbo model, as the authors' programs take it, or else the first by name.
pub(super) fn own_layout(files: &[&str]) -> Option<OwnLayout> {
    let has = |folder: &str| files.iter().any(|file| *file == format!("{folder}/config.json"));
    let silence = SILENCE_FILES[0];
    let models = files
        .iter()
        .filter_map(|file| file.strip_suffix(silence)?.strip_suffix('/'));
    let mut models: Vec<&str> = models
        .filter(|folder| !folder.contains('/') && has(folder))
        .collect();
    models.sort_unstable();
    let turbo = models.iter().find(|folder| folder.ends_with("turbo"));
    let model = turbo.or(models.first()).filter(|_| has(QWEN) && has("vae"))?;
    Some(OwnLayout {
        folders: ["vae", QWEN, model].map(str::to_owned).to_vec(),
        files: vec![format!("{model}/{silence}")],
        configuration: None,
    })
}

/// Whether a folder is the authors' folder of one model, or the folder around one.
pub(super) fn has_own_layout(folder: &Path) -> bool {
    let models = || {
        folders_in(folder)
            .unwrap_or_default()
            .into_iter()
            .filter(|f| is_model(f))
    };
    is_model(folder) || (folder.join(QWEN).is_dir() && models().count() == 1)
}

/// Whether a folder has the authors' configuration of a model.
fn is_model(folder: &Path) -> bool {
    #[derive(Deserialize)]
    struct Class {
        #[serde(default)]
        model_type: String,
        #[serde(default)]
        architectures: Vec<String>,
    }
    let path = folder.join("config.json");
    let is_ours = |class: Class| {
        let named = |name: &str| name.to_lowercase().replace(['-', '_'], "").starts_with("acestep");
        named(&class.model_type) || class.architectures.iter().any(|name| named(name))
    };
    path.is_file() && Checkpoint::is_in(folder) && read_json::<Class>(&path).is_ok_and(is_ours)
}

fn of_folder(path: &Path) -> Result<Option<AuthorsPlaces>, ModelError> {
    let is_root = path.join(QWEN).is_dir() && !is_model(path);
    let folder = match (is_model(path), is_root) {
        (true, _) => path.to_owned(),
        (false, false) => return Ok(None),
        (false, true) => {
            let models: Vec<PathBuf> = folders_in(path)?.into_iter().filter(|f| is_model(f)).collect();
            match models.as_slice() {
                [] => return Ok(None),
                [one] => one.clone(),
                several => {
                    let named: Vec<String> = several.iter().map(|f| f.display().to_string()).collect();
                    let problem = format!(
                        "it has {} models: open one of {}",
                        several.len(),
                        named.join(", ")
                    );
                    return Err(unsupported(path, problem));
                }
            }
        }
    };
    let checkpoint = Checkpoint::of_folder(&folder)?;
    let around = folder.parent().map(Path::to_owned);
    let places: Vec<PathBuf> = std::iter::once(folder.clone()).chain(around).collect();
    let config = Some(folder.join("config.json"));
    parts(&folder, checkpoint, config, &places, folder.clone()).map(Some)
}

/// The prefix of all names of a file's tensors; `None` if the file is no such model.
pub(super) fn prefix_of<'a>(names: &[&'a str]) -> Option<&'a str> {
    let mut prefixes = prefixes(names.iter().copied()).into_iter();
    prefixes.find(|prefix| has_marks(&authors_names(names, prefix, NAMES), MARKS.into_iter()))
}

fn of_file(path: &Path, file: &CheckpointFile) -> Result<Option<AuthorsPlaces>, ModelError> {
    let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
    let Some(prefix) = prefix_of(&names) else {
        return Ok(None);
    };
    let name_of = |name: &str| name.strip_prefix(prefix).map(|name| NAMES.authors(name));
    let checkpoint = Checkpoint::of_file(file, name_of)?;
    let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
    let around = folder.parent().map(Path::to_owned);
    let base = written_base(path, &[])?;
    let places: Vec<PathBuf> = base.into_iter().chain([folder.clone()]).chain(around).collect();
    parts(path, checkpoint, None, &places, folder).map(Some)
}

/// The parts of a model that are in these folders; earlier folders take precedence.
fn parts(
    place: &Path,
    checkpoint: Checkpoint,
    config: Option<PathBuf>,
    folders: &[PathBuf],
    folder: PathBuf,
) -> Result<AuthorsPlaces, ModelError> {
    let missing = |what: &str| {
        let searched: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        let problem = format!(
            "{what} is missing: it was searched for in {}",
            searched.join(", ")
        );
        unsupported(place, problem)
    };
    let in_folders = |name: &str, is_it: &dyn Fn(&Path) -> bool| {
        folders.iter().map(|f| f.join(name)).find(|path| is_it(path))
    };
    let alone = |comfy: &str, stem: &str| {
        let mut found = folders
            .iter()
            .filter_map(|folder| companion(place, folder, comfy, stem));
        found.next()
    };
    let silence = SILENCE_FILES
        .iter()
        .find_map(|name| in_folders(name, &|path| path.is_file()))
        .ok_or_else(|| {
            missing(
                "silence_latent.pt (latents of silence, without which tracks drone; it is in the authors' \
                 repositories, ACE-Step/Ace-Step1.5 and others, in the folder of each model)",
            )
        })?;
    let qwen = [QWEN, "text_encoder"];
    let qwen = qwen.iter().find_map(|name| in_folders(name, &Checkpoint::is_in));
    let tokenizers = [QWEN, "tokenizer"];
    let is_tokenizer =
        |path: &Path| path.join("tokenizer.json").is_file() || path.join("vocab.json").is_file();
    Ok(AuthorsPlaces {
        silence,
        vae: in_folders("vae", &Checkpoint::is_in)
            .or_else(|| alone("vae", "ace_1.5_vae"))
            .ok_or_else(|| missing("the autoencoder (vae, or ace_1.5_vae.safetensors)"))?,
        text_encoder: qwen
            .or_else(|| alone("text_encoders", "qwen_0.6b_ace15"))
            .ok_or_else(|| {
                missing("the text encoder (Qwen3-Embedding-0.6B, or qwen_0.6b_ace15.safetensors)")
            })?,
        tokenizer: tokenizers
            .iter()
            .find_map(|name| in_folders(name, &is_tokenizer))
            .ok_or_else(|| missing("the tokenizer (Qwen3-Embedding-0.6B/tokenizer.json)"))?,
        place: place.to_owned(),
        checkpoint,
        config,
        folder,
    })
}
