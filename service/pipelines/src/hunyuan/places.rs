//! Where the parts of a pipeline are. A pipeline's folder has them all. A transformer that comes alone, as a single file
//! or as a folder like FramePack's own repositories, has a base beside it, a folder of a HunyuanVideo pipeline, and
//! FramePack a folder with SigLIP. Both are found beside it, or named in a sidecar: `X.moored.json` beside a file
//! `X.safetensors`, `moored.json` in a folder.
//!
//! Components whose weights a base lacks may be single files, as ComfyUI's users have them:
//!
//! | component | file | ComfyUI's folder |
//! |---|---|---|
//! | `vae` | `hunyuan_video_vae*` | `vae` |
//! | `text_encoder` | `llava_llama3*` | `text_encoders` |
//! | `text_encoder_2` | `clip_l*` | `text_encoders` |
//! | `image_encoder` | `sigclip_vision_patch14_384*` | `clip_vision` |

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::checkpoint::{FRAMEPACK, MARKS};
use super::model::{CLIP, LLAMA, VAE, VISION};
use super::sections::Order;
use crate::ModelError;
use crate::checkpoint::{
    ComponentPlace, Recognised, TransformerPlace, base_beside, beside, companion, named_base, of_hub_cache,
    sidecar_of,
};
use crate::files::{damaged, pipeline_class, read_json, transformer_class, unsupported};

/// Classes of transformers: diffusers' two, and that of FramePack's own repositories.
pub(super) const TRANSFORMERS: [&str; 3] = [
    "HunyuanVideoTransformer3DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "HunyuanVideoTransformer3DModelPacked",
];

/// The folder of SigLIP's processor of pictures.
pub(super) const PROCESSOR: &str = "feature_extractor";

/// Stem and folder of the single file that replaces a component's folder.
fn single_file_of(component: &str) -> Option<(&'static str, &'static str)> {
    match component {
        VAE => Some(("hunyuan_video_vae", "vae")),
        LLAMA => Some(("llava_llama3", "text_encoders")),
        CLIP => Some(("clip_l", "text_encoders")),
        VISION => Some(("sigclip_vision_patch14_384", "clip_vision")),
        _ => None,
    }
}

/// The contents of a sidecar; the default request in it is read elsewhere (`folder_defaults`).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Written {
    /// The folder of the pipeline; for a single file it is read elsewhere (`base_folder`).
    base: Option<PathBuf>,
    /// A folder with `image_encoder` and `feature_extractor`.
    image_encoder: Option<PathBuf>,
    /// `backward` (FramePack's I2V) or `forward` (FramePack-F1).
    sampling_order: Option<WrittenOrder>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WrittenOrder {
    Backward,
    Forward,
}

impl Written {
    fn of(path: &Path) -> Result<Written, ModelError> {
        match path.is_file() {
            true => read_json(path),
            false => Ok(Written::default()),
        }
    }

    fn order(&self) -> Option<Order> {
        self.sampling_order.map(|order| match order {
            WrittenOrder::Backward => Order::Backward,
            WrittenOrder::Forward => Order::Forward,
        })
    }
}

/// The places of the parts of a pipeline.
pub(super) struct Places {
    /// The opened path: the pipeline's folder, or a transformer that comes alone.
    opened: PathBuf,
    /// The pipeline's folder.
    pub(super) base: PathBuf,
    /// Whether the transformer comes alone.
    pub(super) is_alone: bool,
    sidecar: PathBuf,
    written: Written,
}

impl Places {
    /// The places of the model at a path; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family and damaged, or its base is not found.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
    ) -> Result<Option<(Places, TransformerPlace)>, ModelError> {
        let is_of_family = |folder: &Path| MARKS.is_folder(folder);
        let (sidecar, base, transformer) = if is_transformer_folder(path) {
            let sidecar = path.join("moored.json");
            let base = match Written::of(&sidecar)?.base {
                Some(base) => named_base(&sidecar, MARKS.family, &path.join(base), &is_of_family)?,
                None => base_beside(path, &sidecar, MARKS.family, &is_of_family)?,
            };
            (sidecar, base, TransformerPlace::Folder(path.to_owned()))
        } else {
            let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
                return Ok(None);
            };
            let sidecar = match transformer {
                TransformerPlace::Folder(_) => base.join("moored.json"),
                TransformerPlace::SingleFile { .. } => sidecar_of(path),
            };
            (sidecar, base, transformer)
        };
        let is_alone = match &transformer {
            TransformerPlace::Folder(folder) => folder == path,
            TransformerPlace::SingleFile { .. } => true,
        };
        let places = Places {
            opened: path.to_owned(),
            base: std::fs::canonicalize(&base).map_err(|e| damaged(&base, e.to_string()))?,
            is_alone,
            written: Written::of(&sidecar)?,
            sidecar,
        };
        Ok(Some((places, transformer)))
    }

    /// Whether [`Places::folder_of_defaults`] belongs to the same kind of transformer: a FramePack's base may be a text to film
    /// pipeline with other defaults.
    ///
    /// # Errors
    /// When the base's index cannot be read.
    pub(super) fn has_defaults_of(&self, is_framepack: bool) -> Result<bool, ModelError> {
        let of_base = pipeline_class(&self.base)?.is_some_and(|class| class == FRAMEPACK);
        Ok(self.opened.is_dir() || of_base == is_framepack)
    }

    /// The folder whose `moored.json` has the default request of this transformer.
    pub(super) fn folder_of_defaults(&self) -> &Path {
        match self.opened.is_dir() {
            true => &self.opened,
            false => &self.base,
        }
    }

    /// The order in which a FramePack samples sections. No configuration has it: it is written in the sidecar, or is in the
    /// name, where published files of FramePack-F1 have it, or is that of the base.
    ///
    /// # Errors
    /// When the base's `moored.json` cannot be read.
    pub(super) fn order(&self) -> Result<Order, ModelError> {
        let written = self.written.order();
        let order = written.or_else(|| is_named_f1(&self.opened).then_some(Order::Forward));
        Ok(match order {
            Some(order) => order,
            None => {
                let of_base = Written::of(&self.base.join("moored.json"))?;
                of_base.order().unwrap_or(Order::Backward)
            }
        })
    }

    /// The folder with `image_encoder` and `feature_extractor`; the base if a single file replaces them.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub(super) fn vision_root(&self) -> Result<PathBuf, ModelError> {
        let has_both = |folder: &Path| folder.join(VISION).is_dir() && folder.join(PROCESSOR).is_dir();
        if let Some(named) = &self.written.image_encoder {
            let folder = self.sidecar.parent().unwrap_or(Path::new(".")).join(named);
            return match has_both(&folder) {
                true => Ok(folder),
                false => Err(damaged(
                    &self.sidecar,
                    format!(
                        "its image_encoder {} has no {VISION} and {PROCESSOR} in it",
                        folder.display()
                    ),
                )),
            };
        }
        if !self.is_alone || has_both(&self.base) || self.companion_of(VISION).is_some() {
            return Ok(self.base.clone());
        }
        let mut beside = beside(&self.opened)?;
        beside.retain(|folder| has_both(folder));
        match beside.as_slice() {
            [one] => Ok(one.clone()),
            _ => Err(unsupported(
                &self.opened,
                format!(
                    "FramePack sees its first picture through SigLIP, and {} folders beside it have {VISION} and \
                     {PROCESSOR}: write {} with {{\"image_encoder\": \"path of a folder with both\"}}",
                    beside.len(),
                    self.sidecar.display()
                ),
            )),
        }
    }

    /// Configuration and place of a component in `root`. A single file without a configuration has the published configuration.
    ///
    /// # Errors
    /// When its configuration cannot be read, or is not supported.
    pub(super) fn component<C: DeserializeOwned>(
        &self,
        root: &Path,
        component: &str,
        published: fn() -> C,
        check: fn(&C) -> Result<(), String>,
    ) -> Result<(C, ComponentPlace), ModelError> {
        let companion = || self.companion_of(component);
        ComponentPlace::of(&root.join(component), None, companion, |_| Ok(published()), check)
    }

    /// The single file of a component; none for a pipeline's own folder, which is complete.
    fn companion_of(&self, component: &str) -> Option<PathBuf> {
        let (stem, folder) = single_file_of(component).filter(|_| self.is_alone)?;
        // Companions of a folder are searched beside the files that it contains.
        let file = match self.opened.is_dir() {
            true => self.opened.join("config.json"),
            false => self.opened.clone(),
        };
        companion(&file, &self.base, folder, stem)
    }
}

/// Whether a folder has a transformer of this family at its root, as FramePack's own repositories do, and no pipeline.
fn is_transformer_folder(folder: &Path) -> bool {
    transformer_class(folder).is_some_and(|class| TRANSFORMERS.contains(&class.as_str()))
}

/// Whether a file or folder is named as FramePack-F1's are: `FramePack_F1_I2V_HY_20250503`. A snapshot in a hub cache has
/// the name of its repository.
fn is_named_f1(path: &Path) -> bool {
    let own = path.file_name().unwrap_or_default().to_string_lossy();
    let name = match of_hub_cache(path) {
        Some(place) if place.is_snapshot => place.name.to_lowercase(),
        _ => own.to_lowercase(),
    };
    name.split(|letter: char| !letter.is_alphanumeric())
        .any(|word| word == "f1" || word == "framepackf1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framepack_f1_is_known_by_its_name() {
        for name in [
            "FramePack_F1_I2V_HY_20250503",
            "FramePack-F1.safetensors",
            "framepackf1_fp8",
            "hub/models--lllyasviel--FramePack_F1_I2V_HY_20250503/snapshots/0123",
        ] {
            assert!(is_named_f1(Path::new(name)), "{name}");
        }
        for name in [
            "FramePackI2V_HY",
            "models/F1x",
            "film1",
            "hub/models--lllyasviel--FramePackI2V_HY/snapshots/f1",
        ] {
            assert!(!is_named_f1(Path::new(name)), "{name}");
        }
    }
}
