//! Components as files: their headers, and which of their tensors are read. Every tensor that the mathematics
//! asks for is looked up here, by name and shape, so that a checkpoint that lacks one is refused when it is
//! opened.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{LoadError, LoadPlan, SafetensorsFile, Stored, TensorSource};
use serde::Deserialize;

use super::config::TransformerConfig;
use super::vae::diffusers_name_of_bfl;
use crate::ModelError;
use crate::files::{damaged, read_json, unsupported};

/// Names and shapes of tensors.
pub(super) type Shapes = Vec<(String, Vec<usize>)>;

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

/// A header that could not be read, in the words of a model.
pub(super) fn of_header(path: &Path, error: LoadError) -> ModelError {
    match error {
        LoadError::Io { file, source } => damaged(&file, format!("it cannot be read: {source}")),
        LoadError::Damaged { file, problem } => ModelError::Damaged { path: file, problem },
        LoadError::Unsupported(problem) => {
            // The reader names the file, and so does what this becomes.
            let named = format!("{}: ", path.display());
            unsupported(path, problem.strip_prefix(&named).unwrap_or(&problem))
        }
        error @ (LoadError::Cancelled | LoadError::OutOfMemory { .. } | LoadError::Lost(_)) => {
            damaged(path, error.to_string())
        }
    }
}

fn open(path: &Path) -> Result<SafetensorsFile, ModelError> {
    SafetensorsFile::open(path).map_err(|e| of_header(path, e))
}

/// The headers of a component: one file, or the shards of an index.
struct Headers {
    /// The file, or the index.
    place: PathBuf,
    /// The whole of each tensor.
    tensors: BTreeMap<String, TensorSource>,
    files: Vec<Arc<Path>>,
}

impl Headers {
    /// Those of one file, whose tensors go by the names that `rename` gives them.
    fn of_file(
        path: &Path,
        target: DType,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Headers, ModelError> {
        let file = open(path)?;
        let tensors = file.tensors().filter_map(|(name, _)| {
            let to = rename(name)?;
            Some((to.clone(), file.source(name, to, target)?))
        });
        Ok(Headers {
            place: path.to_owned(),
            tensors: tensors.collect(),
            files: vec![Arc::clone(file.path())],
        })
    }

    /// Those that an index names.
    fn of_index(index: &Path, folder: &Path, target: DType) -> Result<Headers, ModelError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let Index { weight_map } = read_json(index)?;
        let mut shards: BTreeMap<String, SafetensorsFile> = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        for (name, shard) in weight_map {
            if Path::new(&shard).components().count() != 1 || shard.contains("..") {
                return Err(damaged(index, format!("{shard:?} is no plain file name")));
            }
            if !shards.contains_key(&shard) {
                shards.insert(shard.clone(), open(&folder.join(&shard))?);
            }
            let file = &shards[&shard];
            let source = file.source(&name, name.as_str(), target).ok_or_else(|| {
                let problem = format!("tensor {name} is not in it, and the index says so");
                damaged(file.path(), problem)
            })?;
            tensors.insert(name, source);
        }
        Ok(Headers {
            place: index.to_owned(),
            tensors,
            files: shards.values().map(|file| Arc::clone(file.path())).collect(),
        })
    }

    /// Those of a component's folder.
    fn of_folder(folder: &Path, target: DType) -> Result<Headers, ModelError> {
        for stem in ["diffusion_pytorch_model", "model"] {
            let single = folder.join(format!("{stem}.safetensors"));
            if single.is_file() {
                return Headers::of_file(&single, target, |name| Some(name.to_owned()));
            }
            let index = folder.join(format!("{stem}.safetensors.index.json"));
            if index.is_file() {
                return Headers::of_index(&index, folder, target);
            }
        }
        Err(damaged(
            folder,
            "it has neither diffusion_pytorch_model.safetensors, model.safetensors nor an index",
        ))
    }

    /// Takes one tensor, which must be of this shape and of floating-point numbers.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<TensorSource, ModelError> {
        let Some(mut source) = self.tensors.remove(name) else {
            return Err(damaged(&self.place, format!("tensor {name} is missing")));
        };
        if source.stored == Stored::U8 {
            return Err(unsupported(&source.file, format!("tensor {name} is quantized")));
        }
        // BFL keeps some matrices as convolutions of one cell: the same numbers in the same order.
        if let [rows, columns, 1, 1] = *source.shape
            && shape == [rows, columns]
        {
            source.shape = shape.to_vec();
        }
        if source.shape != shape || !is_float(source.stored) {
            let found = (source.stored, &source.shape);
            let problem = format!("tensor {name} is {found:?} where {shape:?} is expected");
            return Err(damaged(&source.file, problem));
        }
        Ok(source)
    }

    fn take_all(&mut self, shapes: Shapes) -> Result<Vec<TensorSource>, ModelError> {
        shapes
            .into_iter()
            .map(|(name, shape)| self.take(&name, &shape))
            .collect()
    }
}

/// A component in a folder: the tensors that its configuration asks for. `shapes` may ask which names there are.
/// What there is beside them is not read.
pub(super) fn component_of_folder(
    folder: &Path,
    target: DType,
    shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
) -> Result<ComponentFiles, ModelError> {
    let mut headers = Headers::of_folder(folder, target)?;
    let shapes = shapes(&|name| headers.tensors.contains_key(name));
    let sources = headers.take_all(shapes)?;
    Ok(component_files(
        folder.to_owned(),
        sources,
        headers.files,
        Some(folder.join("config.json")),
    ))
}

/// The transformer of a diffusers folder: exactly the tensors that its configuration asks for.
pub(super) fn transformer_of_folder(
    folder: &Path,
    config: &TransformerConfig,
    target: DType,
) -> Result<ComponentFiles, ModelError> {
    let mut headers = Headers::of_folder(folder, target)?;
    let sources = headers.take_all(config.tensor_shapes().collect())?;
    if let Some((name, source)) = headers.tensors.first_key_value() {
        let problem = format!("tensor {name} is no part of a FLUX transformer in full precision");
        return Err(unsupported(&source.file, problem));
    }
    Ok(component_files(
        folder.to_owned(),
        sources,
        headers.files,
        Some(folder.join("config.json")),
    ))
}

/// The autoencoder in a single file of Black Forest Labs.
pub(super) fn autoencoder_of_single_file(
    file: &Path,
    shapes: Shapes,
    target: DType,
) -> Result<ComponentFiles, ModelError> {
    let mut headers = Headers::of_file(file, target, diffusers_name_of_bfl)?;
    let sources = headers.take_all(shapes)?;
    Ok(component_files(file.to_owned(), sources, headers.files, None))
}

pub(super) fn component_files(
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

pub(super) fn is_float(stored: Stored) -> bool {
    matches!(stored, Stored::F32 | Stored::F16 | Stored::Bf16 | Stored::F64)
}
