//! How FLUX checkpoints are recognised and read: by headers alone.
//!
//! Two shapes are known. A **folder in diffusers' layout** has `model_index.json`, and each component in a
//! folder of its own (in one file, or sharded with an index). A **single file of Black Forest Labs**
//! (`flux1-dev.safetensors`) has the transformer only. Its companions come from a diffusers folder: the one
//! that `X.moored.json` beside `X.safetensors` names (`{"base": "relative/path"}`), or else the folder that
//! the file lies in, or else the only FLUX folder beside it. If that folder has no `vae/`, the autoencoder is
//! `ae.safetensors` beside the file or in that folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{SafetensorsFile, Stored, TensorSource};
use serde::Deserialize;

use super::components::{ComponentFiles, component_files, is_float, of_header};
use super::config::TransformerConfig;
use super::layout::{TensorSpec, layout};
use crate::ModelError;
use crate::files::{damaged, pipeline_class, read_json, unsupported};

/// Pipelines whose checkpoints are run here.
pub(super) const PIPELINES: [&str; 2] = ["FluxPipeline", "FluxImg2ImgPipeline"];

/// What some single files put in front of every name of the transformer.
const PREFIXES: [&str; 2] = ["", "model.diffusion_model."];

/// A tensor that only a transformer of Black Forest Labs has.
const BFL_MARK: &str = "double_blocks.0.img_attn.qkv.weight";

/// What a path turned out to be.
pub(super) enum Recognised {
    /// A folder in diffusers' layout.
    Folder(PathBuf),
    /// A single file, the prefix of its names, and the folder of its companions.
    SingleFile {
        file: SafetensorsFile,
        prefix: &'static str,
        base: PathBuf,
    },
}

/// Looks what a path is. `None`: nothing of this family.
///
/// # Errors
/// When it is of this family and cannot be run, or a file is too damaged to tell.
pub(super) fn recognise(path: &Path) -> Result<Option<Recognised>, ModelError> {
    if path.is_dir() {
        return Ok(is_flux_folder(path)?.then(|| Recognised::Folder(path.to_owned())));
    }
    if path
        .extension()
        .is_none_or(|extension| extension != "safetensors")
        || !path.is_file()
    {
        return Ok(None);
    }
    let file = SafetensorsFile::open(path).map_err(|e| of_header(path, e))?;
    let marked = |prefix: &&str| file.get(&format!("{prefix}{BFL_MARK}")).is_some();
    let Some(prefix) = PREFIXES.into_iter().find(marked) else {
        return Ok(None);
    };
    let base = base_folder(path)?;
    Ok(Some(Recognised::SingleFile { file, prefix, base }))
}

/// Whether a folder's `model_index.json` names a pipeline of this family.
fn is_flux_folder(path: &Path) -> Result<bool, ModelError> {
    let Some(class_name) = pipeline_class(path)? else {
        return Ok(false);
    };
    if class_name.starts_with("Flux") && !PIPELINES.contains(&class_name.as_str()) {
        return Err(unsupported(
            &path.join("model_index.json"),
            format!("it is a {class_name}; {} are supported", PIPELINES.join(" and ")),
        ));
    }
    Ok(PIPELINES.contains(&class_name.as_str()))
}

/// Where the companions of a single file are.
fn base_folder(file: &Path) -> Result<PathBuf, ModelError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sidecar {
        base: PathBuf,
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    let sidecar = file.with_extension("moored.json");
    if sidecar.is_file() {
        let Sidecar { base } = read_json(&sidecar)?;
        let base = folder.join(base);
        return match is_flux_folder(&base)? {
            true => Ok(base),
            false => Err(damaged(
                &sidecar,
                format!("its base {} is no FLUX folder", base.display()),
            )),
        };
    }
    if is_flux_folder(folder)? {
        return Ok(folder.to_owned());
    }
    let entries =
        std::fs::read_dir(folder).map_err(|e| damaged(folder, format!("it cannot be listed: {e}")))?;
    let mut beside: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && is_flux_folder(path).unwrap_or(false))
        .collect();
    beside.sort();
    match beside.as_slice() {
        [one] => Ok(one.clone()),
        _ => Err(unsupported(
            file,
            format!(
                "it holds a transformer only, and {} folders beside it hold the VAE, text encoders and \
                 tokenizers of a FLUX pipeline: write {} with {{\"base\": \"path of a FLUX folder in \
                 diffusers' layout\"}}",
                beside.len(),
                sidecar.display()
            ),
        )),
    }
}

/// The configuration of a single file's transformer, from the shapes of its tensors. The widths of the
/// rotary axes cannot be seen there: they are the base's, or those of every published FLUX.1.
pub(super) fn config_of_single_file(
    file: &SafetensorsFile,
    prefix: &str,
    base: &TransformerConfig,
) -> Result<TransformerConfig, ModelError> {
    let shape = |name: &str| {
        let entry = file.get(&format!("{prefix}{name}"));
        entry
            .map(|entry| entry.shape.clone())
            .ok_or_else(|| damaged(file.path(), format!("tensor {name} is missing")))
    };
    let columns = |name: &str| {
        shape(name)?
            .get(1)
            .copied()
            .ok_or_else(|| damaged(file.path(), format!("tensor {name} is no matrix")))
    };
    let head = shape("double_blocks.0.img_attn.norm.query_norm.scale")?
        .iter()
        .product::<usize>();
    let width = shape("img_in.weight")?.first().copied().unwrap_or_default();
    if head == 0 || !width.is_multiple_of(head) {
        return Err(damaged(
            file.path(),
            format!("{width} channels do not divide into heads of {head}"),
        ));
    }
    let blocks = |kind: &str| {
        let has = |i: &usize| {
            file.tensors()
                .any(|(name, _)| name.starts_with(&format!("{prefix}{kind}.{i}.")))
        };
        (0..).take_while(has).count()
    };
    let axes = match base.axes_dims_rope.iter().sum::<usize>() == head {
        true => base.axes_dims_rope,
        false => TransformerConfig::default().axes_dims_rope,
    };
    Ok(TransformerConfig {
        in_channels: columns("img_in.weight")?,
        out_channels: shape("final_layer.linear.weight")?.first().copied(),
        num_layers: blocks("double_blocks"),
        num_single_layers: blocks("single_blocks"),
        attention_head_dim: head,
        num_attention_heads: width / head,
        joint_attention_dim: columns("txt_in.weight")?,
        pooled_projection_dim: columns("vector_in.in_layer.weight")?,
        guidance_embeds: file
            .get(&format!("{prefix}guidance_in.in_layer.weight"))
            .is_some(),
        axes_dims_rope: axes,
        ..TransformerConfig::default()
    })
}

/// The transformer of a single file: rows of fused tensors become tensors of diffusers' names. What lies
/// beside the transformer's prefix is not looked at.
pub(super) fn transformer_of_single_file(
    file: &SafetensorsFile,
    prefix: &str,
    config: &TransformerConfig,
    target: DType,
) -> Result<ComponentFiles, ModelError> {
    let path = file.path();
    let mut covered: HashMap<String, usize> = HashMap::new();
    let mut sources = Vec::new();
    for TensorSpec { name, shape, rows } in layout(config) {
        let mut ranges = Vec::with_capacity(rows.len());
        let mut stored = Stored::U8;
        for part in &rows {
            let full_name = format!("{prefix}{}", part.tensor);
            let Some(entry) = file.get(&full_name) else {
                return Err(damaged(path, format!("tensor {full_name} is missing")));
            };
            let taken = entry
                .rows(part.first, part.count)
                .filter(|taken| taken.shape[1..] == shape[1..]);
            let Some(taken) = taken.filter(|taken| is_float(taken.stored)) else {
                let found = (entry.stored, &entry.shape);
                return Err(damaged(
                    path,
                    format!("tensor {full_name} is {found:?}, which cannot hold {name}"),
                ));
            };
            ranges.push(taken.range);
            stored = taken.stored;
            *covered.entry(full_name).or_default() += part.count;
        }
        sources.push(TensorSource {
            name,
            file: Arc::clone(path),
            ranges,
            stored,
            shape,
            target,
        });
    }
    for (name, entry) in file.tensors().filter(|(name, _)| name.starts_with(prefix)) {
        match covered.get(name) {
            Some(rows) if entry.shape.first() == Some(rows) => {}
            Some(rows) => {
                return Err(damaged(
                    path,
                    format!("tensor {name} has {:?} where {rows} rows belong", entry.shape),
                ));
            }
            None => {
                let problem = format!("tensor {name} is no part of a FLUX transformer in full precision");
                return Err(unsupported(path, problem));
            }
        }
    }
    Ok(component_files(
        path.to_path_buf(),
        sources,
        vec![Arc::clone(path)],
        None,
    ))
}
