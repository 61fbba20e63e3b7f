//! How FLUX checkpoints are recognised and read: by headers alone.
//!
//! Two shapes are known. A **folder in diffusers' layout** has `model_index.json`, and each component in a
//! folder of its own (in one file, or sharded with an index). A **single file of Black Forest Labs**
//! (`flux1-dev.safetensors`) has the transformer only. Its companions come from a diffusers folder: the one
//! that `X.moored.json` beside `X.safetensors` names (`{"base": "relative/path"}`), or else the folder that
//! the file lies in, or else the only FLUX folder beside it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{LoadError, LoadPlan, SafetensorsFile, Stored, TensorSource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::config::TransformerConfig;
use super::layout::{TensorSpec, layout};
use crate::ModelError;

/// Pipelines whose checkpoints are run here.
const PIPELINES: [&str; 2] = ["FluxPipeline", "FluxImg2ImgPipeline"];

/// What some single files put in front of every name of the transformer.
const PREFIXES: [&str; 2] = ["", "model.diffusion_model."];

/// A tensor that only a transformer of Black Forest Labs has.
const BFL_MARK: &str = "double_blocks.0.img_attn.qkv.weight";

/// One component as files: how it is read and what it consists of.
#[derive(Debug, Clone)]
pub(super) struct ComponentFiles {
    /// The folder or file that names it.
    pub(super) place: PathBuf,
    /// Which bytes become which tensors.
    pub(super) plan: LoadPlan,
    /// All files whose content it depends on.
    pub(super) files: Vec<Arc<Path>>,
}

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

pub(super) fn damaged(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::Damaged {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

pub(super) fn unsupported(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::Unsupported {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// A header that could not be read, in the words of a model.
fn of_header(path: &Path, error: LoadError) -> ModelError {
    match error {
        LoadError::Io { file, source } => damaged(&file, format!("it cannot be read: {source}")),
        LoadError::Damaged { file, problem } => ModelError::Damaged { path: file, problem },
        LoadError::Unsupported(problem) => unsupported(path, problem),
        error @ (LoadError::Cancelled | LoadError::OutOfMemory { .. } | LoadError::Lost(_)) => {
            damaged(path, error.to_string())
        }
    }
}

/// Reads a JSON file.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = std::fs::read_to_string(path).map_err(|e| damaged(path, format!("it cannot be read: {e}")))?;
    serde_json::from_str(&text).map_err(|e| damaged(path, format!("it cannot be parsed: {e}")))
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
    #[derive(Deserialize)]
    struct Index {
        #[serde(rename = "_class_name", default)]
        class_name: String,
    }
    let index = path.join("model_index.json");
    if !index.is_file() {
        return Ok(false);
    }
    let Index { class_name } = read_json(&index)?;
    if class_name.starts_with("Flux") && !PIPELINES.contains(&class_name.as_str()) {
        return Err(unsupported(
            &index,
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

/// The headers of a component's folder: one file, or the shards of an index.
struct Headers {
    /// The file of each tensor.
    tensors: BTreeMap<String, Arc<SafetensorsFile>>,
    files: Vec<Arc<Path>>,
}

fn headers(folder: &Path) -> Result<Headers, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let open = |path: &Path| {
        SafetensorsFile::open(path)
            .map(Arc::new)
            .map_err(|e| of_header(path, e))
    };
    for stem in ["diffusion_pytorch_model", "model"] {
        let single = folder.join(format!("{stem}.safetensors"));
        if single.is_file() {
            let file = open(&single)?;
            let tensors = file
                .tensors()
                .map(|(name, _)| (name.to_owned(), Arc::clone(&file)))
                .collect();
            return Ok(Headers {
                tensors,
                files: vec![Arc::clone(file.path())],
            });
        }
        let index_path = folder.join(format!("{stem}.safetensors.index.json"));
        if !index_path.is_file() {
            continue;
        }
        let Index { weight_map } = read_json(&index_path)?;
        let mut shards: BTreeMap<String, Arc<SafetensorsFile>> = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        for (name, shard) in weight_map {
            if Path::new(&shard).components().count() != 1 || shard.contains("..") {
                return Err(damaged(&index_path, format!("{shard:?} is no plain file name")));
            }
            if !shards.contains_key(&shard) {
                shards.insert(shard.clone(), open(&folder.join(&shard))?);
            }
            let file = &shards[&shard];
            if file.get(&name).is_none() {
                return Err(damaged(
                    file.path(),
                    format!("tensor {name} is not in it, and the index says so"),
                ));
            }
            tensors.insert(name, Arc::clone(file));
        }
        let files = shards.values().map(|file| Arc::clone(file.path())).collect();
        return Ok(Headers { tensors, files });
    }
    Err(damaged(
        folder,
        "it has neither diffusion_pytorch_model.safetensors, model.safetensors nor an index",
    ))
}

/// A component all of whose floating-point tensors are read under their own names, but for those that
/// `skip` picks.
pub(super) fn whole_component(
    folder: &Path,
    target: DType,
    skip: impl Fn(&str) -> bool,
) -> Result<ComponentFiles, ModelError> {
    let Headers { tensors, files } = headers(folder)?;
    let mut sources = Vec::with_capacity(tensors.len());
    for (name, file) in &tensors {
        let Some(source) = file.source(name, name.as_str(), target) else {
            continue;
        };
        // Position ids and the like: the mathematics counts for itself.
        if source.stored == Stored::I64 || skip(name) {
            continue;
        }
        if source.stored == Stored::U8 {
            return Err(unsupported(file.path(), format!("tensor {name} is quantized")));
        }
        sources.push(source);
    }
    Ok(component_files(
        folder.to_owned(),
        sources,
        files,
        Some(folder.join("config.json")),
    ))
}

fn component_files(
    place: PathBuf,
    sources: Vec<TensorSource>,
    mut files: Vec<Arc<Path>>,
    config: Option<PathBuf>,
) -> ComponentFiles {
    files.extend(config.filter(|path| path.is_file()).map(Arc::from));
    files.sort();
    ComponentFiles {
        place,
        plan: LoadPlan::Files(sources),
        files,
    }
}

/// The transformer of a diffusers folder: exactly the tensors that its configuration asks for.
pub(super) fn transformer_of_folder(
    folder: &Path,
    config: &TransformerConfig,
    target: DType,
) -> Result<ComponentFiles, ModelError> {
    let Headers { mut tensors, files } = headers(folder)?;
    let mut sources = Vec::new();
    for TensorSpec { name, shape, .. } in layout(config) {
        let file = tensors.remove(&name);
        let source = file
            .as_ref()
            .and_then(|file| file.source(&name, name.as_str(), target));
        let Some(source) = source else {
            return Err(damaged(folder, format!("tensor {name} is missing")));
        };
        if source.shape != shape || !is_float(source.stored) {
            let found = (source.stored, &source.shape);
            let problem = format!("tensor {name} is {found:?} where {shape:?} is expected");
            return Err(damaged(&source.file, problem));
        }
        sources.push(source);
    }
    if let Some((name, file)) = tensors.first_key_value() {
        let problem = format!("tensor {name} is no part of a FLUX transformer in full precision");
        return Err(unsupported(file.path(), problem));
    }
    Ok(component_files(
        folder.to_owned(),
        sources,
        files,
        Some(folder.join("config.json")),
    ))
}

fn is_float(stored: Stored) -> bool {
    matches!(stored, Stored::F32 | Stored::F16 | Stored::Bf16 | Stored::F64)
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
