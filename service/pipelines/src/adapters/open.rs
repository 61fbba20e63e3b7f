//! Opens adapters by their headers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use gpu::{CheckpointFile, LoadError, LoadPlan, Stored, TensorEntry, TensorSource};

use super::scales::{Configured, read_number};
use super::spelling::{PairPart, layers_and_parts, unsupported_kind};
use super::targets::{LayerPart, TargetComponent};
use super::{AdapterError, AdapterFile, AdapterKind, AdapterReport};
use crate::checkpoint::{ComponentFiles, Rows, known_by_names};
use crate::files::root_class;
use crate::{ADAPTER_CONFIGURATION, ADAPTER_WEIGHTS, ModelError, ModelFile};

/// The part of an adapter that changes one component.
#[derive(Clone, Debug)]
pub(crate) struct AdapterPart {
    /// Name of the base's component.
    pub(crate) base: &'static str,
    /// Name of this component.
    pub(crate) component: String,
    /// By layer of the base, the scale of its term. Its factors are the tensors `{layer}.down` and `{layer}.up`.
    pub(crate) scales: Arc<BTreeMap<String, f64>>,
    /// The largest rank of a linear layer's term.
    pub(crate) rank: usize,
    /// Numbers of the factors of the largest layer.
    pub(crate) largest_numbers: usize,
    /// Numbers of each factor of each linear layer.
    pub(crate) numbers: Vec<usize>,
    /// Shapes of the linear layers that it changes, `[outputs, inputs]`.
    pub(crate) shapes: BTreeSet<[usize; 2]>,
    /// The convolutions that it changes, by layer the rank.
    pub(crate) convolutions: BTreeMap<String, usize>,
}

impl AdapterPart {
    /// The part of this name with these terms.
    fn of(component: String, terms: &[Term], target: &TargetComponent) -> AdapterPart {
        let mut part = AdapterPart {
            base: target.name,
            component,
            scales: Arc::default(),
            rank: 0,
            largest_numbers: 0,
            numbers: Vec::new(),
            shapes: BTreeSet::new(),
            convolutions: BTreeMap::new(),
        };
        let mut scales = BTreeMap::new();
        for term in terms {
            let layer = &target.layers[term.layer];
            scales.insert(layer.name.clone(), term.scale);
            part.largest_numbers = part.largest_numbers.max(layer.numbers(term.rank));
            if layer.kernel.is_some() {
                part.convolutions.insert(layer.name.clone(), term.rank);
            } else {
                part.rank = part.rank.max(term.rank);
                part.numbers
                    .extend([layer.inputs, layer.outputs].map(|side| side * term.rank));
                part.shapes.insert([layer.outputs, layer.inputs]);
            }
        }
        part.scales = Arc::new(scales);
        part
    }
}

/// An open adapter, known by its header.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    pub(crate) report: AdapterReport,
    pub(crate) parts: Vec<AdapterPart>,
}

/// A pair of factors, as stored in the file.
#[derive(Default)]
struct Pair<'a> {
    down: Option<(&'a str, &'a TensorEntry)>,
    up: Option<(&'a str, &'a TensorEntry)>,
    alpha: Option<(&'a str, &'a TensorEntry)>,
}

/// The file of an adapter's weights, with its header.
struct WeightsFile<'a> {
    header: &'a CheckpointFile,
    opened: File,
}

/// A layer's term: its name, rank and scale, and its sources.
struct Term {
    layer: usize,
    rank: usize,
    scale: f64,
    down: TensorSource,
    up: TensorSource,
    /// The layer's name in the file.
    in_file: String,
}

/// Opens adapters for a model of `family`, each with its target components: each with its components' files, in `dtype`.
///
/// # Errors
/// [`ModelError::Adapter`] for the first that cannot be used.
pub(crate) fn open_adapters<'t>(
    files: &[AdapterFile],
    family: &'static str,
    targets_of: &dyn Fn(&AdapterFile) -> &'t [TargetComponent],
    dtype: DType,
) -> Result<Vec<(Adapter, Vec<ComponentFiles>)>, ModelError> {
    let opened = files.iter().map(|file| {
        open(file, family, targets_of(file), dtype).map_err(|error| ModelError::Adapter {
            name: file.name.clone(),
            error,
        })
    });
    opened.collect()
}

fn open(
    file: &AdapterFile,
    family: &'static str,
    targets: &[TargetComponent],
    dtype: DType,
) -> Result<(Adapter, Vec<ComponentFiles>), AdapterError> {
    if file.kind == AdapterKind::ControlNet {
        return Err(AdapterError::ControlNetNotTaken { family });
    }
    let is_folder = file.path.is_dir();
    let weights = match is_folder {
        true => {
            let mut there = ADAPTER_WEIGHTS.iter().map(|name| file.path.join(name));
            there.find(|path| path.is_file()).ok_or_else(|| {
                AdapterError::File(format!(
                    "its folder has neither of {}",
                    ADAPTER_WEIGHTS.join(", ")
                ))
            })?
        }
        false => file.path.clone(),
    };
    let checkpoint = CheckpointFile::open(&weights).map_err(of_header)?;
    let configuration =
        Some(file.path.join(ADAPTER_CONFIGURATION)).filter(|path| is_folder && path.is_file());

    let (pairs, unknown) = pairs(&checkpoint, targets, file.ignores_unknown)?;
    let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
    if let Some(first) = unknown.first() {
        if pairs.is_empty() {
            if let Some(kind) = unsupported_kind(first) {
                return Err(kind.refusal(first));
            }
            let is_pair = |name: &&str| layers_and_parts(name).next().is_some();
            if let Some(known) = known_by_names(&names).filter(|_| !names.iter().any(is_pair)) {
                return Err(AdapterError::File(format!("it is no LoRA: it is {known}")));
            }
            return Err(AdapterError::OtherFamily {
                family,
                tensors: names.len(),
                first: first.clone(),
            });
        }
        if !file.ignores_unknown {
            return Err(AdapterError::Unknown {
                family,
                count: unknown.len(),
                first: first.clone(),
            });
        }
    }
    if pairs.is_empty() {
        return Err(AdapterError::File("it has no tensors".to_owned()));
    }

    let mut files = vec![ModelFile::of(&checkpoint)];
    if let Some(path) = &configuration {
        let problem = |e: std::io::Error| AdapterError::File(format!("{}: {e}", path.display()));
        files.push(ModelFile::at(path).map_err(problem)?);
    }
    let of_folder = configuration.as_deref().map(Configured::of_folder).transpose()?;
    let unreadable =
        |e: std::io::Error| AdapterError::File(format!("{} cannot be read: {e}", weights.display()));
    let weights_file = WeightsFile {
        header: &checkpoint,
        opened: gpu::open_regular(&weights).map_err(unreadable)?,
    };
    let mut adapter = Adapter {
        report: AdapterReport {
            name: file.name.clone(),
            ignored: unknown,
            ..AdapterReport::default()
        },
        parts: Vec::new(),
    };
    let mut components = Vec::new();
    for (index, target) in targets.iter().enumerate() {
        let of_metadata;
        let configured = match &of_folder {
            Some(configured) => configured,
            None => {
                of_metadata = Configured::of_metadata(checkpoint.metadata(), target.name)?;
                &of_metadata
            }
        };
        let of_target = pairs.iter().filter(|((component, _), _)| *component == index);
        let mut terms = Vec::new();
        for ((_, layer), (parts, pair)) in of_target {
            terms.extend(terms_of(
                layer,
                parts,
                pair,
                target,
                configured,
                &weights_file,
                dtype,
            )?);
        }
        if terms.is_empty() {
            continue;
        }
        terms.sort_by_key(|term| term.layer);
        if let Some(twice) = terms.windows(2).find(|pair| pair[0].layer == pair[1].layer) {
            return Err(AdapterError::Twice {
                layer: target.layers[twice[0].layer].name.clone(),
                first: twice[0].in_file.clone(),
                second: twice[1].in_file.clone(),
            });
        }
        adapter.report.layers.insert(target.name.to_owned(), terms.len());
        let rank = terms.iter().map(|term| term.rank).max().unwrap_or_default();
        adapter.report.rank = adapter.report.rank.max(rank);
        let component = format!("adapter:{}:{}", file.name, target.name);
        adapter.parts.push(AdapterPart::of(component, &terms, target));
        components.push(ComponentFiles {
            place: file.path.clone(),
            plan: LoadPlan::Files(terms.into_iter().flat_map(|term| [term.down, term.up]).collect()),
            files: files.clone(),
        });
    }
    Ok((adapter, components))
}

fn of_header(error: LoadError) -> AdapterError {
    AdapterError::File(error.to_string())
}

/// Pairs by target component and by the layer's name in the file, with the layers that the name denotes.
type Pairs<'a> = BTreeMap<(usize, &'a str), (&'a [LayerPart], Pair<'a>)>;

/// The pairs of a file, and the names of its tensors that are of no target, or of an unsupported kind that may be left out. Such a
/// kind beside pairs is an error, unless unknown tensors are ignored.
fn pairs<'a>(
    checkpoint: &'a CheckpointFile,
    targets: &'a [TargetComponent],
    ignores_unknown: bool,
) -> Result<(Pairs<'a>, Vec<String>), AdapterError> {
    let mut pairs = Pairs::new();
    let mut unknown = Vec::new();
    let mut separate = None;
    for (tensor, entry) in checkpoint.tensors() {
        match unsupported_kind(tensor) {
            Some(kind) if kind.is_separate => {
                separate = separate.or(Some((kind, tensor)));
                unknown.push(tensor.to_owned());
                continue;
            }
            Some(kind) => return Err(kind.refusal(tensor)),
            None => {}
        }
        let found = layers_and_parts(tensor).find_map(|(layer, part)| {
            let targets = targets.iter().enumerate();
            let found = targets.filter_map(|(index, target)| Some((index, target.find(layer)?)));
            let found: Vec<(usize, &[LayerPart])> = found.collect();
            (!found.is_empty()).then_some((layer, part, found))
        });
        let Some((layer, part, found)) = found else {
            unknown.push(tensor.to_owned());
            continue;
        };
        for (index, parts) in found {
            let (_, pair) = pairs
                .entry((index, layer))
                .or_insert_with(|| (parts, Pair::default()));
            let slot = match part {
                PairPart::Down => &mut pair.down,
                PairPart::Up => &mut pair.up,
                PairPart::Alpha => &mut pair.alpha,
            };
            if let Some((first, _)) = slot.replace((tensor, entry)) {
                return Err(AdapterError::Twice {
                    layer: layer.to_owned(),
                    first: first.to_owned(),
                    second: tensor.to_owned(),
                });
            }
        }
    }
    match separate {
        Some((kind, tensor)) if !ignores_unknown && !pairs.is_empty() => Err(AdapterError::Separate {
            kind: kind.name,
            tensor: tensor.to_owned(),
        }),
        _ => Ok((pairs, unknown)),
    }
}

/// The terms of a pair: one for each layer that its name denotes. Layers that are fused in the file share `down`,
/// and have rows of `up` each.
fn terms_of(
    in_file: &str,
    parts: &[LayerPart],
    pair: &Pair<'_>,
    target: &TargetComponent,
    configured: &Configured,
    weights: &WeightsFile<'_>,
    dtype: DType,
) -> Result<Vec<Term>, AdapterError> {
    let ((down_name, down), (up_name, up)) = match (pair.down, pair.up) {
        (Some(down), Some(up)) => (down, up),
        (Some((found, _)), None) | (None, Some((found, _))) => {
            return Err(AdapterError::Half {
                found: found.to_owned(),
            });
        }
        (None, None) => {
            let found = pair.alpha.map_or(in_file, |(name, _)| name);
            return Err(AdapterError::Half {
                found: found.to_owned(),
            });
        }
    };
    let shape = |tensor: &str, entry: &TensorEntry, expected: String| AdapterError::Shape {
        tensor: tensor.to_owned(),
        found: entry.shape.clone(),
        expected,
    };
    let first = &target.layers[parts[0].layer];
    let outputs: usize = parts
        .iter()
        .flat_map(|part| &part.rows)
        .map(|rows| rows.count)
        .sum();
    let rank = down.shape.first().copied().unwrap_or_default();
    let down_shape = first.down_shape(rank);
    // A convolution of one pixel and a linear layer are the same, and files have either.
    let is_same = down.shape == down_shape
        || (first.kernel.is_none_or(|kernel| kernel == [1, 1]) && matrix(down) == Some([rank, first.inputs]));
    if rank == 0 || !is_same {
        let sides: Vec<String> = down_shape[1..].iter().map(usize::to_string).collect();
        return Err(shape(down_name, down, format!("[rank, {}]", sides.join(", "))));
    }
    if matrix(up) != Some([outputs, rank]) {
        return Err(shape(up_name, up, format!("[{outputs}, {rank}]")));
    }
    for (name, entry) in [(down_name, down), (up_name, up)] {
        if !entry.stored.is_float() && entry.stored != Stored::F8E4M3 {
            let problem = format!("tensor {name} is stored as {:?}, which is no float", entry.stored);
            return Err(AdapterError::File(problem));
        }
    }
    let own = pair
        .alpha
        .map(|(name, entry)| read_number(&weights.opened, name, entry));
    let scale = configured.scale(in_file, rank, own.transpose()?)?;
    let source = |name: String, entry: &TensorEntry, rows: &[Rows], shape: Vec<usize>| {
        let ranges = rows.iter().filter_map(|rows| entry.rows(rows.first, rows.count));
        let ranges: Vec<_> = ranges.map(|entry| entry.range).collect();
        TensorSource::full(name, weights.header.path(), ranges, entry.stored, shape, dtype)
    };
    let all_of_down = [Rows {
        first: 0,
        count: rank,
    }];
    let terms = parts.iter().map(|part| {
        let layer = &target.layers[part.layer];
        Term {
            layer: part.layer,
            rank,
            scale,
            down: source(
                format!("{}.down", layer.name),
                down,
                &all_of_down,
                layer.down_shape(rank),
            ),
            up: source(
                format!("{}.up", layer.name),
                up,
                &part.rows,
                vec![layer.outputs, rank],
            ),
            in_file: in_file.to_owned(),
        }
    });
    Ok(terms.collect())
}

/// Rows and columns of a matrix, or of a convolution of one pixel.
fn matrix(entry: &TensorEntry) -> Option<[usize; 2]> {
    match *entry.shape.as_slice() {
        [rows, columns] | [rows, columns, 1, 1] => Some([rows, columns]),
        _ => None,
    }
}

/// The kind of a folder: a ControlNet, if its configuration says so, or an adapter of peft or of diffusers; `None` for another
/// folder.
pub(crate) fn kind_of_folder(path: &Path) -> Option<AdapterKind> {
    if root_class(path).is_some_and(|class| is_control_net_class(&class)) {
        return Some(AdapterKind::ControlNet);
    }
    let is_adapter = path.is_dir() && ADAPTER_WEIGHTS.iter().any(|name| path.join(name).is_file());
    is_adapter.then_some(AdapterKind::Lora)
}

/// Whether a configuration's `_class_name` is that of a ControlNet.
pub(crate) fn is_control_net_class(class: &str) -> bool {
    class.contains("ControlNet")
}
