//! Components as files: their headers, and which of their tensors are read. Every tensor that the mathematics
//! asks for is looked up here, by name and shape, so that a checkpoint that lacks one is refused when it is
//! opened.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{CheckpointFile, LoadError, LoadPlan, Stored, Target, TensorSource, WeightFormat};

use super::role::{Role, RoleOf};
use super::spec::TensorSpec;
use super::stored::{Checkpoint, Held, SUPPORTED, StoredTensor, foreign, quantized_by};
use crate::ModelError;
use crate::family::format_of_plan;
use crate::files::{damaged, unsupported};

/// Names and shapes of tensors.
pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// One component as files: how it is read and what it consists of.
#[derive(Debug, Clone)]
pub(crate) struct ComponentFiles {
    /// The folder or file that names it.
    pub(crate) place: PathBuf,
    /// Which bytes become which tensors.
    pub(crate) plan: LoadPlan,
    /// All files whose content it depends on.
    pub(crate) files: Vec<Arc<Path>>,
}

/// What is wanted of a component.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The component's name.
    pub(crate) component: &'static str,
    /// The dtype of what is held in full precision.
    pub(crate) dtype: DType,
    /// What it is to be quantized to while it is loaded.
    pub(crate) format: Option<WeightFormat>,
    /// Which of its tensors are.
    pub(crate) role_of: RoleOf,
}

/// A header that could not be read, in the words of a model.
pub(crate) fn of_header(path: &Path, error: LoadError) -> ModelError {
    match error {
        LoadError::Io { file, source } => damaged(&file, format!("it cannot be read: {source}")),
        LoadError::Damaged { file, problem } => ModelError::Damaged { path: file, problem },
        LoadError::Unsupported(problem) => {
            // The reader names the file, and so does what this becomes.
            let named = format!("{}: ", path.display());
            unsupported(path, of_type(problem.strip_prefix(&named).unwrap_or(&problem)))
        }
        error @ (LoadError::Cancelled
        | LoadError::OutOfMemory { .. }
        | LoadError::NotFinite { .. }
        | LoadError::Lost(_)) => damaged(path, error.to_string()),
    }
}

/// What the reader says of a tensor whose type it does not know, and whose quantization that is: the reader stops there,
/// before anybody looks at names.
fn of_type(problem: &str) -> String {
    let tensor = problem.strip_prefix("tensor ");
    let Some((name, _)) = tensor.and_then(|tensor| tensor.split_once(" is stored as ")) else {
        return problem.to_owned();
    };
    match foreign(&[name]) {
        Some(foreign) => format!("{problem}: {}", quantized_by(foreign)),
        // Of GGUF the reader says what is read.
        None if problem.contains("what is read") => problem.to_owned(),
        None => format!("{problem}; {SUPPORTED}"),
    }
}

pub(crate) fn open(path: &Path) -> Result<CheckpointFile, ModelError> {
    CheckpointFile::open(path).map_err(|e| of_header(path, e))
}

/// The sources of a component's tensors.
///
/// # Errors
/// The first tensor that is missing, of another shape, or stored in a way that cannot be held; and a component that
/// is stored quantized where a format is asked for.
fn sources(
    checkpoint: &Checkpoint,
    specs: &[TensorSpec],
    wanted: Wanted,
) -> Result<Vec<TensorSource>, ModelError> {
    // Fused tensors are named by several: each is looked at once.
    let mut found: BTreeMap<&str, (StoredTensor, usize)> = BTreeMap::new();
    let mut sources = Vec::with_capacity(specs.len());
    for spec in specs {
        let tensor = spec.tensor.as_str();
        if !found.contains_key(tensor) {
            found.insert(tensor, (checkpoint.tensor(tensor)?, 0));
        }
        let Some((stored, covered)) = found.get_mut(tensor) else {
            continue;
        };
        *covered += spec.rows.iter().map(|rows| rows.count).sum::<usize>();
        sources.push(source(stored, spec, wanted)?);
    }
    for (name, (stored, covered)) in &found {
        if stored.shape.first() != Some(covered) {
            let problem = format!("tensor {name} is {:?} where {covered} rows belong", stored.shape);
            return Err(damaged(stored.file(), problem));
        }
    }
    let stored: Vec<&TensorSource> = sources
        .iter()
        .filter(|source| !source.is_made_at_load())
        .collect();
    if wanted.format.is_some()
        && let Some(format) = format_of_plan(stored.iter().copied())
    {
        return Err(ModelError::stored_quantized(wanted.component, format));
    }
    Ok(sources)
}

/// The source of one tensor.
fn source(stored: &StoredTensor, spec: &TensorSpec, wanted: Wanted) -> Result<TensorSource, ModelError> {
    let TensorSpec {
        name,
        shape,
        tensor,
        rows,
    } = spec;
    let role = (wanted.role_of)(name);
    let mut stored = match role {
        Role::Quantized => stored.clone().into_unscaled_fp8(),
        Role::AsStored | Role::Full => stored.clone(),
    };
    // BFL keeps some matrices as convolutions of one cell: the same numbers in the same order.
    if let [outputs, inputs, 1, 1] = *stored.shape
        && shape.len() == 2
    {
        stored.shape = vec![outputs, inputs];
    }
    let wrong = |expected: &str| {
        let (held, found) = (&stored.held, &stored.shape);
        let problem = match held {
            Held::Plain(numbers) => format!("tensor {tensor} is {numbers:?} {found:?} where {expected}"),
            Held::Quantized(format) => format!("tensor {tensor} is {format} {found:?} where {expected}"),
        };
        (stored.file().to_owned(), problem)
    };
    let last_row = rows.iter().map(|rows| rows.first + rows.count).max();
    if stored.shape.get(1..) != shape.get(1..) || stored.shape.first().copied() < last_row {
        let (file, problem) = wrong(&format!("{shape:?} is expected"));
        return Err(damaged(&file, problem));
    }
    let (as_stored, target) = match stored.held {
        Held::Plain(numbers) if numbers.is_float() || numbers == Stored::F8E4M3 => {
            let target = match (role, wanted.format) {
                (Role::Quantized, Some(format)) => Target::Quantized(format),
                _ => Target::Full(wanted.dtype),
            };
            (numbers, target)
        }
        Held::Plain(_) => {
            let (file, problem) = wrong(&format!("floats of {shape:?} are expected"));
            return Err(damaged(&file, problem));
        }
        Held::Quantized(_) if role == Role::Full => {
            let (file, problem) = wrong("full precision is needed");
            return Err(unsupported(&file, format!("{problem}; {SUPPORTED}")));
        }
        Held::Quantized(format) => {
            let (_, columns) = gpu::rows_and_columns(shape);
            if !format.fits(columns) {
                let (file, problem) = wrong(&format!("rows of {columns} do not divide into its blocks"));
                return Err(unsupported(&file, problem));
            }
            (Stored::U8, Target::Quantized(format))
        }
    };
    let mut pieces = stored.pieces(rows)?;
    pieces.retain(|piece| piece.length() > 0);
    Ok(TensorSource {
        name: name.clone(),
        pieces,
        stored: as_stored,
        shape: shape.clone(),
        target,
    })
}

/// Tensors that a checkpoint has under the same names.
pub(crate) fn whole(shapes: Shapes) -> Vec<TensorSpec> {
    let whole = |(name, shape)| TensorSpec::whole(name, shape);
    shapes.into_iter().map(whole).collect()
}

/// A component in a folder: the tensors that its configuration asks for. `shapes` may ask which names there are.
/// What there is beside them is not read.
pub(crate) fn component_of_folder(
    folder: &Path,
    wanted: Wanted,
    shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
) -> Result<ComponentFiles, ModelError> {
    component_of_checkpoint(folder, Checkpoint::of_folder(folder)?, wanted, shapes)
}

/// The same of a checkpoint that is open, in a folder or a file.
pub(crate) fn component_of_checkpoint(
    place: &Path,
    checkpoint: Checkpoint,
    wanted: Wanted,
    shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
) -> Result<ComponentFiles, ModelError> {
    let shapes = shapes(&|name| checkpoint.has(name));
    let sources = sources(&checkpoint, &whole(shapes), wanted)?;
    Ok(component_files(
        place.to_owned(),
        sources,
        checkpoint.files,
        Some(place.join("config.json")),
    ))
}

/// A component of exactly these tensors, in a folder or a file: a tensor that is none of them, nor belongs to one, is no
/// part of `what`.
///
/// # Errors
/// Those of every component, and that there is such a tensor.
pub(crate) fn exact_component(
    place: &Path,
    checkpoint: Checkpoint,
    specs: &[TensorSpec],
    wanted: Wanted,
    what: &str,
) -> Result<ComponentFiles, ModelError> {
    let sources = sources(&checkpoint, specs, wanted)?;
    let known: BTreeSet<String> = specs.iter().map(|spec| spec.tensor.clone()).collect();
    if let Some((name, file)) = checkpoint.left_over(&known) {
        let problem = format!("tensor {name} is no part of {what}; {SUPPORTED}");
        return Err(unsupported(file, problem));
    }
    Ok(component_files(
        place.to_owned(),
        sources,
        checkpoint.files,
        Some(place.join("config.json")),
    ))
}

/// A component in a single file, whose tensors go by the names that `rename` gives them.
pub(crate) fn component_of_file(
    file: &Path,
    rename: impl Fn(&str) -> Option<String>,
    shapes: Shapes,
    wanted: Wanted,
) -> Result<ComponentFiles, ModelError> {
    let checkpoint = Checkpoint::of_file(&open(file)?, rename)?;
    let sources = sources(&checkpoint, &whole(shapes), wanted)?;
    Ok(component_files(file.to_owned(), sources, checkpoint.files, None))
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
