//! A family's transformer as files: a component of a folder in diffusers' layout, or alone in a single file.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::components::{Requested, exact_component};
use super::spec::{Rows, TensorSpec};
use super::stored::Checkpoint;
use crate::files::{read_json, unsupported};
use crate::{ComponentFiles, ModelError};

/// Who named the tensors of a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// The model's authors, who fuse some tensors that are separate in diffusers.
    Authors,
    Diffusers,
}

/// The place of a transformer.
pub(crate) enum TransformerPlace {
    /// In a separate folder, with its configuration.
    Folder(PathBuf),
    /// Alone in a file, or in a folder of its authors, whose names it has.
    SingleFile {
        path: PathBuf,
        checkpoint: Checkpoint,
        naming: Naming,
    },
}

/// The configuration of a family's transformer. Missing fields are those of the published model.
pub(crate) trait TransformerFiles: DeserializeOwned + Default {
    /// Name of the component in messages about unexpected tensors.
    const WHAT: &'static str;

    /// The configuration of a single file's transformer, from the shapes of its tensors. Fields that the shapes do not show are
    /// those of the base folder, or of the published model.
    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &Self,
    ) -> Result<Self, ModelError>;

    /// Adds the fields that a folder's tensors show and its configuration lacks.
    fn completed(self, _checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        Ok(self)
    }

    /// Refuses unsupported settings, with a message.
    fn check(&self) -> Result<(), String>;

    /// All tensors, and where they are in a file of the authors.
    fn layout(&self) -> Vec<TensorSpec>;
}

impl TransformerPlace {
    /// The transformer at the place: exactly the tensors of its configuration. `base` is the folder of its pipeline.
    ///
    /// # Errors
    /// When it is damaged or not supported, or cannot be quantized as requested.
    pub(crate) fn open<C: TransformerFiles>(
        self,
        base: &Path,
        wanted: Requested,
    ) -> Result<(C, ComponentFiles), ModelError> {
        self.open_over(|| of_base(base), wanted)
    }

    /// As [`TransformerPlace::open`], with the settings that the tensors of a single file do not show.
    ///
    /// # Errors
    /// As [`TransformerPlace::open`].
    pub(crate) fn open_over<C: TransformerFiles>(
        self,
        of_base: impl FnOnce() -> Result<C, ModelError>,
        wanted: Requested,
    ) -> Result<(C, ComponentFiles), ModelError> {
        let (config, of_config, place, checkpoint, naming) = match self {
            TransformerPlace::Folder(folder) => {
                let path = folder.join("config.json");
                let written: C = read_json(&path)?;
                let checkpoint = Checkpoint::of_folder(&folder)?;
                let config = written.completed(&checkpoint)?;
                (config, path, folder, checkpoint, Naming::Diffusers)
            }
            TransformerPlace::SingleFile {
                path,
                checkpoint,
                naming,
            } => {
                let config = C::of_single_file(&path, &checkpoint, naming, &of_base()?)?;
                (config, path.clone(), path, checkpoint, naming)
            }
        };
        let checked = config.check();
        checked.map_err(|problem| unsupported(&of_config, problem))?;
        let mut specs = config.layout();
        if naming == Naming::Diffusers {
            let named = |spec: TensorSpec| in_diffusers(spec, &checkpoint);
            specs = specs.into_iter().map(named).collect();
        }
        let files = exact_component(&place, checkpoint, &specs, wanted, C::WHAT)?;
        Ok((config, files))
    }
}

/// A layer or a norm under another name than diffusers' class has for it. What precedes the name is the same in both.
struct OtherName {
    name: &'static str,
    in_file: &'static str,
    /// Which of the equal shares of the rows of a fused layer it is; `None` where the layer is not fused.
    share: Option<usize>,
}

const fn renamed(name: &'static str, in_file: &'static str) -> OtherName {
    OtherName {
        name,
        in_file,
        share: None,
    }
}

const fn fused(name: &'static str, in_file: &'static str, share: usize) -> OtherName {
    OtherName {
        name,
        in_file,
        share: Some(share),
    }
}

/// Names in files that otherwise have diffusers': of layers that diffusers fuses (`fuse_qkv_projections`), which Nunchaku's files
/// have too, and of layers of FLUX.1 and Z-Image in Nunchaku's files (its `NunchakuFluxTransformer2dModel` and
/// `NunchakuZImageTransformer2DModel`).
const OTHER_NAMES: [OtherName; 30] = [
    fused("to_q", "to_qkv", 0),
    fused("to_k", "to_qkv", 1),
    fused("to_v", "to_qkv", 2),
    fused("add_q_proj", "add_qkv_proj", 0),
    fused("add_k_proj", "add_qkv_proj", 1),
    fused("add_v_proj", "add_qkv_proj", 2),
    fused("add_q_proj", "to_added_qkv", 0),
    fused("add_k_proj", "to_added_qkv", 1),
    fused("add_v_proj", "to_added_qkv", 2),
    // FLUX.1.
    fused("attn.to_q", "qkv_proj", 0),
    fused("attn.to_k", "qkv_proj", 1),
    fused("attn.to_v", "qkv_proj", 2),
    fused("attn.add_q_proj", "qkv_proj_context", 0),
    fused("attn.add_k_proj", "qkv_proj_context", 1),
    fused("attn.add_v_proj", "qkv_proj_context", 2),
    renamed("attn.to_out.0", "out_proj"),
    renamed("attn.to_add_out", "out_proj_context"),
    renamed("ff.net.0.proj", "mlp_fc1"),
    renamed("ff.net.2", "mlp_fc2"),
    renamed("ff_context.net.0.proj", "mlp_context_fc1"),
    renamed("ff_context.net.2", "mlp_context_fc2"),
    renamed("proj_mlp", "mlp_fc1"),
    renamed("attn.to_out", "out_proj"),
    renamed("attn.norm_q", "norm_q"),
    renamed("attn.norm_k", "norm_k"),
    renamed("attn.norm_added_q", "norm_added_q"),
    renamed("attn.norm_added_k", "norm_added_k"),
    // Z-Image: diffusers' `SwiGLU` has what is gated before the gate.
    fused("feed_forward.w3", "feed_forward.net.0.proj", 0),
    fused("feed_forward.w1", "feed_forward.net.0.proj", 1),
    renamed("feed_forward.w2", "feed_forward.net.2"),
];

/// The other name in a file of the tensor that diffusers calls so, and which share of its rows it is.
fn other_name(name: &str, checkpoint: &Checkpoint) -> Option<(String, Option<usize>)> {
    if checkpoint.has(name) {
        return None;
    }
    let (layer, kind) = name.rsplit_once('.')?;
    OTHER_NAMES.iter().find_map(|other| {
        let block = layer.strip_suffix(other.name)?.strip_suffix('.')?;
        let tensor = format!("{block}.{}.{kind}", other.in_file);
        checkpoint.has(&tensor).then_some((tensor, other.share))
    })
}

/// The length of an axis of a tensor by its name in diffusers, whatever the file calls it.
///
/// # Errors
/// As [`Checkpoint::length`].
pub(crate) fn length_in_diffusers(
    checkpoint: &Checkpoint,
    name: &str,
    axis: usize,
) -> Result<usize, ModelError> {
    let other = other_name(name, checkpoint);
    checkpoint.length(other.as_ref().map_or(name, |(other, _)| other), axis)
}

/// The place of a tensor in a file with diffusers' names: a tensor of its name, of another name, or rows of one of a fused layer.
fn in_diffusers(spec: TensorSpec, checkpoint: &Checkpoint) -> TensorSpec {
    let whole = TensorSpec::whole(spec.name, spec.shape);
    match other_name(&whole.name, checkpoint) {
        None => whole,
        Some((tensor, None)) => TensorSpec { tensor, ..whole },
        Some((tensor, Some(share))) => {
            let count = whole.shape.first().copied().unwrap_or_default();
            let first = share * count;
            TensorSpec {
                tensor,
                rows: vec![Rows { first, count }],
                ..whole
            }
        }
    }
}

/// The configuration of the transformer of a base, or else the published one.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn of_base<C: TransformerFiles>(base: &Path) -> Result<C, ModelError> {
    let path = base.join(model::BASE_CONFIGURATION);
    match path.is_file() {
        true => read_json(&path),
        false => Ok(C::default()),
    }
}

/// The lengths of the axes of a rotary embedding, which no tensor shows: those of the base if they are of heads of this width,
/// or the published ones.
pub(crate) fn rotary_axes<const N: usize>(
    head: usize,
    of_base: [usize; N],
    published: [usize; N],
) -> [usize; N] {
    match of_base.iter().sum::<usize>() == head {
        true => of_base,
        false => published,
    }
}
