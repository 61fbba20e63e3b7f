//! Components as files: their headers, and the tensors that are read from them. Every required tensor is looked up
//! here, by name and shape, so that an incomplete checkpoint is refused when it is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::DType;
use gpu::{CheckpointFile, LoadError, LoadPlan, Stored, Target, TensorSource, WeightFormat};
use model::ComponentFiles;
use model::format_of_plan;

use super::role::{QuantizeRole, RoleOf};
use super::single_file::is_single_file;
use super::spec::TensorSpec;
use super::stored::{Checkpoint, SUPPORTED, StoredAs, StoredTensor, foreign, quantized_by};

use crate::files::{damaged, incomplete, unsupported};
use crate::{Formats, ModelError, ModelFile, Precision};

/// Names and shapes of tensors.
pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// Requested representation of a component.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requested {
    pub(crate) component: &'static str,
    /// Dtype of full-precision tensors.
    pub(crate) dtype: DType,
    /// Format to quantize to at load.
    pub(crate) format: Option<WeightFormat>,
    /// Which tensors are quantized.
    pub(crate) role_of: RoleOf,
}

/// The requested precision of the components of a model.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    dtype: DType,
    /// Formats to quantize to at load.
    pub(crate) formats: Formats,
    role_of: fn(&str) -> RoleOf,
}

impl Wanted {
    /// The precision requested for a model with the components `known`, of which presets quantize the `large` ones.
    ///
    /// # Errors
    /// [`ModelError::Quantization`] for a format of a component that is not known.
    pub(crate) fn new(
        precision: &Precision,
        known: &[&str],
        large: &[&str],
        role_of: fn(&str) -> RoleOf,
    ) -> Result<Wanted, ModelError> {
        let formats = precision.quantization.formats(large);
        if let Some((unknown, _)) = formats.iter().find(|(name, _)| !known.contains(name)) {
            return Err(ModelError::no_such_component(unknown, known));
        }
        Ok(Wanted {
            dtype: precision.dtype,
            formats,
            role_of,
        })
    }

    /// The requested representation of a component.
    pub(crate) fn of(&self, component: &'static str) -> Requested {
        Requested {
            component,
            dtype: self.dtype,
            format: self.formats.of(component),
            role_of: (self.role_of)(component),
        }
    }
}

/// Converts an error of a header reader.
pub(crate) fn of_header(path: &Path, error: LoadError) -> ModelError {
    match error {
        LoadError::Io { file, source } if source.kind() == ErrorKind::NotFound => incomplete(
            &file,
            "it is missing: was its download interrupted? Download it again",
        ),
        LoadError::Io { file, source } => damaged(&file, format!("it cannot be read: {source}")),
        LoadError::Damaged { file, problem } => ModelError::Damaged { path: file, problem },
        LoadError::Incomplete { file, problem } => incomplete(&file, problem),
        LoadError::UnsupportedTensor {
            file,
            tensor,
            stored,
            readable,
        } => unsupported(&file, of_type(&tensor, &stored, readable.as_deref())),
        LoadError::Unsupported(problem) => {
            // The error repeats the path, which the new error names too.
            let named = format!("{}: ", path.display());
            unsupported(path, problem.strip_prefix(&named).unwrap_or(&problem).to_owned())
        }
        error @ (LoadError::Cancelled
        | LoadError::OutOfMemory { .. }
        | LoadError::Fragmented { .. }
        | LoadError::NotFinite { .. }
        | LoadError::StillInUse(_)
        | LoadError::HostMemory { .. }
        | LoadError::Lost(_)) => damaged(path, error.to_string()),
    }
}

/// The message about a tensor of an unsupported type. The reader fails before it knows the names of the other tensors, so the
/// quantization is recognized by the name of this one.
fn of_type(tensor: &str, stored: &str, readable: Option<&str>) -> String {
    let problem = format!("tensor {tensor} is stored as {stored}");
    match (foreign(&[tensor]), readable) {
        (Some(foreign), _) => format!("{problem}: {}", quantized_by(foreign)),
        (None, Some(readable)) => format!("{problem}; what is read is {readable}"),
        (None, None) => format!("{problem}; {SUPPORTED}"),
    }
}

pub(crate) fn open(path: &Path) -> Result<CheckpointFile, ModelError> {
    CheckpointFile::open(path).map_err(|e| of_header(path, e))
}

/// The checkpoint at a path, if that is a single file.
///
/// # Errors
/// When its header cannot be read.
pub(crate) fn open_single_file(path: &Path) -> Result<Option<CheckpointFile>, ModelError> {
    is_single_file(path).then(|| open(path)).transpose()
}

/// The sources of a component's tensors.
///
/// # Errors
/// The first tensor that is missing, of another shape, or stored in an unsupported way; a format requested for a component that
/// is stored quantized.
fn sources(
    checkpoint: &Checkpoint,
    specs: &[TensorSpec],
    wanted: Requested,
) -> Result<Vec<TensorSource>, ModelError> {
    // Several specs refer to a fused tensor: each is looked up once.
    let mut found: BTreeMap<&str, (StoredTensor, usize)> = BTreeMap::new();
    let mut sources = Vec::with_capacity(specs.len());
    for spec in specs {
        let tensor = spec.tensor.as_str();
        if !found.contains_key(tensor) {
            let stored = checkpoint.tensor(tensor)?.with_ones_of(&spec.shape);
            found.insert(tensor, (stored, 0));
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
fn source(stored: &StoredTensor, spec: &TensorSpec, wanted: Requested) -> Result<TensorSource, ModelError> {
    let TensorSpec {
        name,
        shape,
        tensor,
        rows,
    } = spec;
    let role = (wanted.role_of)(name);
    let stored = match role {
        QuantizeRole::Quantized => stored.clone().into_unscaled_fp8(),
        QuantizeRole::AsStored | QuantizeRole::Full => stored.clone(),
    };
    let wrong = |expected: &str| {
        let (held, found) = (&stored.held, &stored.shape);
        let problem = match held {
            StoredAs::Plain(numbers) => format!("tensor {tensor} is {numbers:?} {found:?} where {expected}"),
            StoredAs::Quantized(format) => format!("tensor {tensor} is {format} {found:?} where {expected}"),
        };
        (stored.file().to_owned(), problem)
    };
    let last_row = rows.iter().map(|rows| rows.first + rows.count).max();
    if stored.shape.get(1..) != shape.get(1..) || stored.shape.first().copied() < last_row {
        let (file, problem) = wrong(&format!("{shape:?} is expected"));
        return Err(damaged(&file, problem));
    }
    let (as_stored, target) = match stored.held {
        StoredAs::Plain(numbers)
            if numbers.is_float() || matches!(numbers, Stored::F8E4M3 | Stored::F8E5M2) =>
        {
            let target = match (role, wanted.format) {
                (QuantizeRole::Quantized, Some(format)) => {
                    let (_, columns) = gpu::rows_and_columns(shape);
                    Target::Quantized(format.for_columns(columns))
                }
                _ => Target::Full(wanted.dtype),
            };
            (numbers, target)
        }
        StoredAs::Plain(_) => {
            let (file, problem) = wrong(&format!("floats of {shape:?} are expected"));
            return Err(damaged(&file, problem));
        }
        StoredAs::Quantized(_) if role == QuantizeRole::Full => {
            let (file, problem) = wrong("full precision is needed");
            return Err(unsupported(&file, format!("{problem}; {SUPPORTED}")));
        }
        StoredAs::Quantized(format) => {
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
        block: None,
    })
}

/// Specs of tensors that a checkpoint has under the same names.
pub(crate) fn whole(shapes: Shapes) -> Vec<TensorSpec> {
    let whole = |(name, shape)| TensorSpec::whole(name, shape);
    shapes.into_iter().map(whole).collect()
}

/// A component in a folder, with the tensors that its configuration requires. `shapes` may query which names exist.
/// Other tensors are ignored.
pub(crate) fn component_of_folder(
    folder: &Path,
    wanted: Requested,
    shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
) -> Result<ComponentFiles, ModelError> {
    component_of_checkpoint(folder, Checkpoint::of_folder(folder)?, wanted, shapes)
}

/// [`component_of_folder`] for an open checkpoint, in a folder or a file.
pub(crate) fn component_of_checkpoint(
    place: &Path,
    checkpoint: Checkpoint,
    wanted: Requested,
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

/// A component of a checkpoint that has others too, with these tensors of it. `config` is its configuration, if there is one.
///
/// # Errors
/// Errors of every component.
pub(crate) fn component_of_specs(
    place: &Path,
    checkpoint: &Checkpoint,
    specs: &[TensorSpec],
    wanted: Requested,
    config: Option<&Path>,
) -> Result<ComponentFiles, ModelError> {
    let sources = sources(checkpoint, specs, wanted)?;
    let config = config.map(Path::to_owned);
    Ok(component_files(
        place.to_owned(),
        sources,
        checkpoint.files.clone(),
        config,
    ))
}

/// A component with exactly these tensors, in a folder or a file: any other tensor that is not a part of one of them
/// is an error, in which `what` names the component.
///
/// # Errors
/// Errors of every component, and an unexpected tensor.
pub(crate) fn exact_component(
    place: &Path,
    checkpoint: Checkpoint,
    specs: &[TensorSpec],
    wanted: Requested,
    what: &str,
) -> Result<ComponentFiles, ModelError> {
    let sources = sources(&checkpoint, specs, wanted)?;
    checkpoint.check_unscaled(specs)?;
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

fn component_files(
    place: PathBuf,
    sources: Vec<TensorSource>,
    mut files: Vec<ModelFile>,
    config: Option<PathBuf>,
) -> ComponentFiles {
    files.extend(config.and_then(|path| ModelFile::at(&path).ok()));
    files.sort();
    ComponentFiles {
        place,
        plan: LoadPlan::Files(sources),
        files,
    }
}
