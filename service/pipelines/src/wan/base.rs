//! The rest of a model beside its transformer. It is in a folder in diffusers' layout, or in single files in the names of ComfyUI's
//! users and of the authors:
//!
//! | component | file | ComfyUI's folder |
//! |---|---|---|
//! | `vae` | `wan_2.1_vae*`, `wan2.2_vae*`, `Wan2.1_VAE*`, `Wan2_1_VAE*`, `Wan2.2_VAE*`, `Wan2_2_VAE*` | `vae` |
//! | `text_encoder` | `umt5_xxl*`, `umt5-xxl*`, `models_t5_umt5-xxl*` | `text_encoders` |
//! | `tokenizer` | the folders `google/umt5-xxl`, `umt5-xxl` and `tokenizer`, or inside the text encoder's file | `text_encoders` |
//!
//! A model's latents have the channels of its autoencoder, so of several bases and files only those that fit are taken.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::authors::{self, CHANNELS_OF_2_2, Settings};
use super::checkpoint::{MARKS, PipelineConfig};
use super::config::TransformerConfig;
use super::model::{TEXT_ENCODER, VAE};
use crate::ModelError;
use crate::autoencoders::wan::{WanVaeConfig, diffusers_name_of_original};
use crate::checkpoint::{
    ComponentPlace, FilePart, NamesInModel, VAE_IN_MODEL, base_beside, bases_beside, companion, file_in,
    named_base, of_base, open, sidecar_of, written_base,
};
use crate::files::{damaged, incomplete, read_json, unsupported};
use crate::text::t5::T5Config;
use crate::text::tokenizers::T5Tokenizer;
use crate::text::umt5;
use crate::unipc::UniPcConfig;

/// Stems of files of the autoencoder of Wan 2.1, and of that of Wan 2.2.
const OF_2_1: [&str; 3] = ["wan_2.1_vae", "Wan2.1_VAE", "Wan2_1_VAE"];
const OF_2_2: [&str; 3] = ["wan2.2_vae", "Wan2.2_VAE", "Wan2_2_VAE"];
/// Stems of files of the text encoder.
const UMT5: [&str; 3] = ["umt5_xxl", "umt5-xxl", "models_t5_umt5-xxl"];
/// The folders that a tokenizer may be in, beside single files.
const TOKENIZERS: [&str; 3] = [authors::TOKENIZER, "umt5-xxl", "tokenizer"];
/// The names of the text encoder in the file of a whole model.
const IN_MODEL: NamesInModel = NamesInModel {
    prefixes: &["text_encoders.umt5xxl.transformer."],
    marks: &["shared.weight", "encoder.embed_tokens.weight"],
};
/// ComfyUI's folder of text encoders.
const TEXT_ENCODERS: &str = "text_encoders";

/// Stems of files of the autoencoder for latents of so many channels, the fitting ones first.
fn stems_of_vae(channels: usize) -> Vec<&'static str> {
    match channels {
        CHANNELS_OF_2_2 => [OF_2_2, OF_2_1].concat(),
        _ => [OF_2_1, OF_2_2].concat(),
    }
}

/// Which folders may be the base of a single file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WantedBase<'a> {
    /// Display name of the base.
    pub(crate) name: &'static str,
    /// Keys that the sidecar may have in addition to `base`.
    pub(crate) keys: &'a [&'static str],
    /// Channels of the latents.
    pub(crate) channels: usize,
    /// Whether all bases of so many channels have the same parts of the model, so that the first will do.
    pub(crate) any: bool,
}

/// Where the rest of a model is.
pub(crate) struct Base {
    /// The folder in diffusers' layout, or that of single files.
    pub(crate) folder: PathBuf,
    is_pipeline: bool,
    /// A file in whose folder, and in ComfyUI's folders beside which, single files are searched; none for a pipeline's own folder.
    near: Option<PathBuf>,
}

impl Base {
    /// The base of a model that is a folder: the folder itself.
    ///
    /// # Errors
    /// When the folder cannot be resolved.
    pub(super) fn of_folder(folder: &Path, is_pipeline: bool) -> Result<Base, ModelError> {
        let folder = std::fs::canonicalize(folder).map_err(|e| damaged(folder, e.to_string()))?;
        Ok(Base {
            near: (!is_pipeline).then(|| folder.join(model::BASE_CONFIGURATION)),
            folder,
            is_pipeline,
        })
    }

    /// The base of a single file: the folder that its sidecar names, its own folder, the fitting one beside it, or the single
    /// files around it.
    ///
    /// # Errors
    /// When there is none, or more than one. The message says what to do.
    pub(crate) fn of_file(file: &Path, wanted: WantedBase<'_>) -> Result<Base, ModelError> {
        let sidecar = sidecar_of(file);
        let is_any = |folder: &Path| is_base(folder);
        let fits = |folder: &Path| Ok(is_base(folder)? && fits(folder, wanted.channels));
        let own = file.parent().unwrap_or(Path::new("."));
        let named = written_base(file, wanted.keys)?;
        let folder = match named {
            Some(named) => named_base(&sidecar, wanted.name, &named, &is_any)?,
            None if is_base(own)? => own.to_owned(),
            None => {
                let mut found = bases_beside(file, &fits)?;
                // The authors of Ovi download its model into `Ovi`, and the folder with the rest beside that.
                if found.is_empty() && own.ends_with("Ovi") {
                    found = bases_beside(own, &fits)?;
                }
                let is_whole = FilePart::of_model(Some(file), IN_MODEL)?.is_some();
                match found.first() {
                    None if is_whole || has_files(file, own, wanted.channels) => own.to_owned(),
                    Some(first) if wanted.any || found.len() == 1 => first.clone(),
                    _ => base_beside(file, &sidecar, wanted.name, &fits)?,
                }
            }
        };
        let is_pipeline = MARKS.is_folder(&folder)?;
        let base = Base::of_folder(&folder, is_pipeline)?;
        Ok(Base {
            near: Some(file.to_owned()),
            ..base
        })
    }

    /// The settings of the pipeline, where the folder has some.
    ///
    /// # Errors
    /// When they cannot be read, or are not supported.
    pub(super) fn settings(&self) -> Result<Option<Settings>, ModelError> {
        if !self.is_pipeline {
            return Ok(None);
        }
        let PipelineConfig {
            expand_timesteps,
            boundary_ratio,
        } = PipelineConfig::of(&self.folder)?;
        Ok(Some(Settings {
            expand_timesteps,
            boundary_ratio,
            scheduler: UniPcConfig::of_pipeline(&self.folder)?,
        }))
    }

    /// The settings of the pipeline of this transformer: those of the folder, or else of the authors.
    ///
    /// # Errors
    /// As [`Base::settings`].
    pub(super) fn settings_of(
        &self,
        transformer: &TransformerConfig,
        has_two: bool,
    ) -> Result<Settings, ModelError> {
        // A base of a model with one transformer does not know how two are run.
        let of_folder = self.settings()?;
        let of_folder = of_folder.filter(|settings| settings.boundary_ratio.is_some() == has_two);
        Ok(of_folder.unwrap_or_else(|| Settings::of_authors(transformer, has_two)))
    }

    /// The settings of the transformer that its tensors do not show.
    ///
    /// # Errors
    /// When a configuration cannot be read.
    pub(crate) fn transformer_config(&self) -> Result<TransformerConfig, ModelError> {
        match self.is_pipeline {
            true => of_base(&self.folder),
            false => authors::configuration_in(&self.folder),
        }
    }

    fn component<C: serde::de::DeserializeOwned>(
        &self,
        component: &'static str,
        (stems, comfy, in_model): (&[&'static str], &str, NamesInModel),
        of_file: impl FnOnce(&FilePart) -> Result<C, ModelError>,
        check: fn(&C) -> Result<(), String>,
    ) -> Result<(C, ComponentPlace), ModelError> {
        let own = FilePart::of_model(self.near.as_deref(), in_model)?;
        let file = self.near.as_deref().and_then(|near| {
            let mut stems = stems.iter();
            stems.find_map(|stem| companion(near, &self.folder, comfy, stem))
        });
        let folder = self.folder.join(component);
        match file {
            None if own.is_none() && !self.is_pipeline && !folder.is_dir() => {
                let names: Vec<String> = stems.iter().map(|stem| format!("{stem}*")).collect();
                let names = names.join(", ");
                let problem = format!(
                    "its {component} is not there: put it beside the model, or into ComfyUI's folder {comfy}, under one of the \
                     names {names}"
                );
                Err(incomplete(self.near.as_deref().unwrap_or(&self.folder), problem))
            }
            file => ComponentPlace::of(&folder, own, || file, of_file, check),
        }
    }

    /// Configuration and place of the autoencoder for latents of so many channels. A file without a configuration has that which
    /// its shapes show.
    ///
    /// # Errors
    /// When it is missing, or no autoencoder of Wan.
    pub(crate) fn vae(&self, channels: usize) -> Result<(WanVaeConfig, ComponentPlace), ModelError> {
        let stems = (&*stems_of_vae(channels), "vae", VAE_IN_MODEL);
        self.component(VAE, stems, vae_config, WanVaeConfig::check)
    }

    /// Configuration and place of the text encoder, likewise.
    ///
    /// # Errors
    /// When it is missing, or no UMT5.
    pub(crate) fn text_encoder(&self) -> Result<(T5Config, ComponentPlace), ModelError> {
        let stems = (&UMT5[..], TEXT_ENCODERS, IN_MODEL);
        self.component(TEXT_ENCODER, stems, text_config, T5Config::check)
    }

    /// The tokenizer: a folder of its own, or the pieces inside the text encoder's file.
    ///
    /// # Errors
    /// When there is none, or it is damaged.
    pub(crate) fn tokenizer(&self, text_encoder: &ComponentPlace) -> Result<Arc<T5Tokenizer>, ModelError> {
        let own = self.folder.join("tokenizer");
        if self.is_pipeline && (own.is_dir() || text_encoder.file().is_none()) {
            return T5Tokenizer::shared(&own);
        }
        let beside = text_encoder.file().and_then(Path::parent);
        let near = self.near.as_deref().and_then(Path::parent);
        let around = [Some(self.folder.as_path()), near, beside];
        let mut folders = around
            .into_iter()
            .flatten()
            .flat_map(|folder| TOKENIZERS.map(|name| folder.join(name)));
        if let Some(folder) = folders.find(|folder| folder.is_dir()) {
            return T5Tokenizer::shared(&folder);
        }
        let inside = text_encoder.file().map(T5Tokenizer::shared_in_file).transpose()?;
        inside.flatten().ok_or_else(|| {
            unsupported(
                text_encoder.file().unwrap_or(&self.folder),
                format!(
                    "the model's tokenizer is not found: it is not inside this text encoder, as it is in ComfyUI's \
                     umt5_xxl_fp8_e4m3fn_scaled.safetensors. Take that file, or download the folder {} of Wan's authors and \
                     put it into {}",
                    authors::TOKENIZER,
                    self.folder.display()
                ),
            )
        })
    }
}

/// Whether a folder may be a base: a pipeline, or a folder with a text encoder and an autoencoder in single files.
fn is_base(folder: &Path) -> Result<bool, ModelError> {
    let has = |stems: &[&str]| stems.iter().any(|stem| file_in(folder, stem).is_some());
    Ok(MARKS.is_folder(folder)? || (has(&UMT5) && (has(&OF_2_1) || has(&OF_2_2))))
}

/// Whether a base has the autoencoder for latents of so many channels, as far as its names and its configuration say.
fn fits(folder: &Path, channels: usize) -> bool {
    #[derive(Deserialize)]
    struct Channels {
        z_dim: Option<usize>,
    }
    let path = folder.join(VAE).join("config.json");
    if path.is_file() {
        let Channels { z_dim } = read_json(&path).unwrap_or(Channels { z_dim: None });
        return z_dim.is_none_or(|found| found == channels);
    }
    if folder.join("model_index.json").is_file() {
        return true; // its autoencoder is elsewhere
    }
    let has = |stems: &[&str]| stems.iter().any(|stem| file_in(folder, stem).is_some());
    match channels {
        CHANNELS_OF_2_2 => has(&OF_2_2),
        _ => has(&OF_2_1),
    }
}

/// Whether a text encoder and an autoencoder are around a single file, as ComfyUI's users have them.
fn has_files(file: &Path, own: &Path, channels: usize) -> bool {
    let has = |stems: &[&str], comfy: &str| {
        stems
            .iter()
            .any(|stem| companion(file, own, comfy, stem).is_some())
    };
    has(&UMT5, TEXT_ENCODERS) || has(&stems_of_vae(channels), "vae")
}

/// The configuration of an autoencoder in a file.
fn vae_config(file: &FilePart) -> Result<WanVaeConfig, ModelError> {
    let checkpoint = file.checkpoint(diffusers_name_of_original)?;
    WanVaeConfig::of_shapes(|name| checkpoint.shape(name)).ok_or_else(|| {
        unsupported(
            file.path(),
            "it is named as an autoencoder of Wan 2.1 or 2.2, and its tensors are of something else: of another model, or of \
             sound. Download wan_2.1_vae or wan2.2_vae again",
        )
    })
}

/// The configuration of a text encoder in a file.
fn text_config(file: &FilePart) -> Result<T5Config, ModelError> {
    let path = file.path();
    let checkpoint = file.checkpoint(umt5::transformers_name)?;
    let all = open(path)?;
    umt5::of_shapes(|name| checkpoint.shape(name)).ok_or_else(|| {
        let is_of_llama_cpp = all.tensors().any(|(name, _)| name.starts_with("enc.blk."));
        let problem = match is_of_llama_cpp {
            true => "a text encoder in GGUF is not read: take umt5_xxl_fp8_e4m3fn_scaled.safetensors in its place",
            false => {
                "it is named as UMT5's encoder, and its tensors are of something else: of T5, or of another model. Download \
                 umt5_xxl again"
            }
        };
        unsupported(path, problem)
    })
}
