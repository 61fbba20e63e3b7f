//! Detection and reading of SDXL checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a separate folder.
//! A **single file** has the UNet in the names of the original repository (`model.diffusion_model.input_blocks...`) or of
//! diffusers, and mostly the text encoders (`conditioner.`) and the autoencoder (`first_stage_model.`) too. Tokenizers and
//! scheduler, and components that the file lacks, are in a diffusers folder: the one that `X.moored.json` beside
//! `X.safetensors` names (`{"base": "relative/path"}`), or else the folder of the file, or else the only SDXL folder beside it.
//!
//! A single file predicts a velocity where it has a tensor `v_pred`, or its sidecar says `{"prediction_type": "v_prediction"}`;
//! with a tensor `ztsnr` the last of its times is noise alone. Otherwise it is as the scheduler of its base says.

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;

use super::config::UnetConfig;
use super::layout::{NAMES, layout};
use super::model::{FAMILY_TITLE, TEXT_ENCODER, TEXT_ENCODER_2, UNET};
use crate::ModelError;
use crate::autoencoders::kl::name_in_single_file;
use crate::checkpoint::{
    Checkpoint, Marks, Naming, Shapes, TensorSpec, TransformerFiles, VAE_IN_MODEL, sidecar_of, whole,
};
use crate::files::read_json;
use crate::samplers::{NoiseConfig, Prediction, Spacing};
use crate::text::clip::{ClipConfig, TRANSPOSED_PROJECTION};

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 3] = [
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 7] = [
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "unet",
    "vae",
];

/// Key of a sidecar.
const PREDICTION_TYPE: &str = "prediction_type";

/// Detection rules of SDXL.
pub(super) const MARKS: Marks = Marks {
    family: FAMILY_TITLE,
    component: UNET,
    class_prefix: "StableDiffusionXL",
    pipelines: &PIPELINES,
    namings: &[
        (Naming::Authors, &["input_blocks.0.0.", "label_emb.0.0."]),
        (
            Naming::Diffusers,
            &[
                "down_blocks.0.resnets.0.time_emb_proj.",
                "add_embedding.linear_1.",
            ],
        ),
    ],
    names: NAMES,
    unused: None,
    sidecar_keys: &[PREDICTION_TYPE],
};

impl TransformerFiles for UnetConfig {
    const WHAT: &'static str = "an SDXL UNet";

    fn of_single_file(
        _path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &UnetConfig,
    ) -> Result<UnetConfig, ModelError> {
        let first = match naming {
            Naming::Authors => "input_blocks.0.0.weight",
            Naming::Diffusers => "conv_in.weight",
        };
        Ok(UnetConfig {
            in_channels: checkpoint.length(first, 1)?,
            ..base.clone()
        })
    }

    fn check(&self) -> Result<(), String> {
        UnetConfig::check(self)
    }

    fn layout(&self) -> Vec<TensorSpec> {
        layout(self)
    }
}

/// The configuration of the UNet of a base, or else the published one.
///
/// # Errors
/// When it cannot be read.
pub(super) fn unet_of_base(base: &Path) -> Result<UnetConfig, ModelError> {
    let path = base.join(UNET).join("config.json");
    match path.is_file() {
        true => read_json(&path),
        false => Ok(UnetConfig::default()),
    }
}

/// Parts of a single file besides the UNet.
pub(super) struct SingleFile<'a> {
    path: PathBuf,
    file: &'a CheckpointFile,
}

/// Prefixes of the names of the text encoders in a single file.
const CLIP_L: [&str; 2] = [
    "conditioner.embedders.0.transformer.",
    "text_encoders.clip_l.transformer.",
];
const BIG_G: [&str; 1] = ["conditioner.embedders.1.model."];
/// That of the second text encoder in the names of transformers.
const BIG_G_OF_TRANSFORMERS: [&str; 1] = ["text_encoders.clip_g.transformer."];

impl<'a> SingleFile<'a> {
    pub(super) fn new(path: &Path, file: &'a CheckpointFile) -> SingleFile<'a> {
        SingleFile {
            path: path.to_owned(),
            file,
        }
    }

    /// The tensors whose names begin with one of `prefixes`, without it and renamed; `None` if there are none.
    fn part(
        &self,
        prefixes: &[&str],
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Checkpoint>, ModelError> {
        let own = |name: &str| {
            let bare = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
            bare.and_then(&rename)
        };
        let is_there = self.file.tensors().any(|(name, _)| own(name).is_some());
        is_there.then(|| Checkpoint::of_file(self.file, own)).transpose()
    }

    /// The place of its parts, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The autoencoder, if it is there.
    ///
    /// # Errors
    /// When it is quantized in an unsupported way.
    pub(super) fn vae(&self) -> Result<Option<Checkpoint>, ModelError> {
        self.part(VAE_IN_MODEL.prefixes, name_in_single_file)
    }

    /// A text encoder, if it is there, and the tensors of this configuration in it.
    ///
    /// # Errors
    /// When it is quantized in an unsupported way.
    pub(super) fn text_encoder(
        &self,
        component: &str,
        config: &ClipConfig,
    ) -> Result<Option<(Checkpoint, Vec<TensorSpec>)>, ModelError> {
        let same = |name: &str| Some(name.to_owned());
        Ok(match component {
            TEXT_ENCODER => self.part(&CLIP_L, same)?.map(|checkpoint| {
                let specs = whole(config.tensor_shapes(&|name| checkpoint.has(name)));
                (checkpoint, specs)
            }),
            _ => match self.part(&BIG_G, same)? {
                Some(checkpoint) => Some((checkpoint, open_clip(config))),
                None => self.part(&BIG_G_OF_TRANSFORMERS, same)?.map(|checkpoint| {
                    let specs = whole(with_projection(config, &|name| checkpoint.has(name)));
                    (checkpoint, specs)
                }),
            },
        })
    }

    /// The noise that the file's model was trained with, where it says so.
    ///
    /// # Errors
    /// When its sidecar cannot be read.
    pub(super) fn noise(&self, of_base: NoiseConfig) -> Result<NoiseConfig, ModelError> {
        #[derive(Default, Deserialize)]
        struct Sidecar {
            prediction_type: Option<Prediction>,
        }
        let has = |mark: &str| self.file.tensors().any(|(name, _)| name == mark);
        let sidecar = sidecar_of(&self.path);
        let Sidecar { prediction_type } = match sidecar.is_file() {
            true => read_json(&sidecar)?,
            false => Sidecar::default(),
        };
        let mut noise = of_base;
        if has("v_pred") {
            noise.prediction_type = Prediction::VPrediction;
        }
        if has("ztsnr") {
            noise.rescale_betas_zero_snr = true;
            // Steps at multiples from the first time on would leave out the last, which is noise alone.
            noise.timestep_spacing = Spacing::Trailing;
        }
        noise.prediction_type = prediction_type.unwrap_or(noise.prediction_type);
        Ok(noise)
    }
}

/// The tensors of the second text encoder in OpenCLIP's names, which fuse queries, keys and values, and transpose the projection.
fn open_clip(config: &ClipConfig) -> Vec<TensorSpec> {
    let mut specs = whole(with_projection(config, &|_| true));
    for spec in &mut specs {
        if let Some((tensor, first)) = open_clip_name(&spec.name, config.hidden_size) {
            spec.tensor = tensor;
            for rows in &mut spec.rows {
                rows.first = first;
            }
        }
    }
    if let Some(projection) = specs.last_mut() {
        projection.name = TRANSPOSED_PROJECTION.to_owned();
        projection.tensor = TRANSPOSED_PROJECTION.to_owned();
        projection.shape.reverse();
        for rows in &mut projection.rows {
            rows.count = config.hidden_size;
        }
    }
    specs
}

/// The tensors of a text encoder with its projection, the last.
pub(super) fn with_projection(config: &ClipConfig, has: &dyn Fn(&str) -> bool) -> Shapes {
    let mut shapes = config.tensor_shapes(has);
    shapes.push(config.projection_shape());
    shapes
}

/// The name in OpenCLIP of a tensor of CLIP, and its first row there.
fn open_clip_name(name: &str, width: usize) -> Option<(String, usize)> {
    let name = name.strip_prefix("text_model.")?;
    let of_layer = |name: &str| {
        let (number, rest) = crate::checkpoint::numbered(name, "encoder.layers.")?;
        let (layer, kind) = rest.rsplit_once('.')?;
        let (own, first) = match layer {
            "layer_norm1" => ("ln_1.", 0),
            "layer_norm2" => ("ln_2.", 0),
            "mlp.fc1" => ("mlp.c_fc.", 0),
            "mlp.fc2" => ("mlp.c_proj.", 0),
            "self_attn.out_proj" => ("attn.out_proj.", 0),
            "self_attn.q_proj" => ("attn.in_proj_", 0),
            "self_attn.k_proj" => ("attn.in_proj_", width),
            "self_attn.v_proj" => ("attn.in_proj_", 2 * width),
            _ => return None,
        };
        Some((format!("transformer.resblocks.{number}.{own}{kind}"), first))
    };
    match name {
        "embeddings.token_embedding.weight" => Some(("token_embedding.weight".to_owned(), 0)),
        "embeddings.position_embedding.weight" => Some(("positional_embedding".to_owned(), 0)),
        "final_layer_norm.weight" => Some(("ln_final.weight".to_owned(), 0)),
        "final_layer_norm.bias" => Some(("ln_final.bias".to_owned(), 0)),
        other => of_layer(other),
    }
}

/// The names of the text encoders' components.
pub(super) const TEXT_ENCODERS: [&str; 2] = [TEXT_ENCODER, TEXT_ENCODER_2];
