//! Stored representation of a checkpoint's tensors, full-precision or quantized by other programs: which tensors
//! belong to one weight, and which of their bytes are its rows.
//!
//! | format | tensors of a weight `X.weight` |
//! |---|---|
//! | bitsandbytes nf4 | `X.weight` (U8, or its bytes as another type), `.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4` (JSON); doubly quantized also `.nested_absmax`, `.nested_quant_map` |
//! | bitsandbytes int8 | `X.weight` (I8), `X.SCB` |
//! | ComfyUI fp8 | `X.weight` (F8_E4M3), and `X.weight_scale` or `X.scale_weight` (F32, `[]`, `[1]`) unless it is unscaled |
//! | fp8 of Black Forest Labs | the same with a scale for each row (F32, `[rows]`, `[rows, 1]`) |
//! | GGUF | `X.weight` in blocks |
//!
//! Shapes and types of all parts are validated by headers. Values are not examined: scales that are not finite are
//! accepted, and the stage that computes with them fails (`StageError::NotFinite`). Few values are read here: the offset of
//! doubly quantized scales, which must be finite, and some codes of fp8 without scales (`scales_beside`).

mod files;
mod parts;
mod scales_beside;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{
    ByteRange, CheckpointFile, Fp8Scales, NF4_BLOCK, NF4_NESTED_BLOCK, SourcePiece, Stored, TensorEntry,
    WeightFormat, WeightPart, rows_and_columns,
};
use serde::Deserialize;

use files::{WeightFiles, no_weights};
use unread::{check_configuration, check_metadata};

use super::components::open;
use super::spec::Rows;
use crate::files::{damaged, incomplete, read_json, unsupported};
use crate::{ModelError, ModelFile};

pub(crate) use unread::{SUPPORTED, foreign, quantized_by};

const NF4_STATE: &str = ".quant_state.bitsandbytes__nf4";

/// Suffixes of tensors that belong to a weight `X.weight`.
const BEHIND_WEIGHT: [&str; 5] = [
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    NF4_STATE,
];
/// Suffixes of tensors that belong to a layer `X`: scales, and quantization metadata. Scales of activations are not
/// used: activations are not quantized, or by their own maxima.
const BEHIND_LAYER: [&str; 7] = [
    ".SCB",
    ".weight_format",
    ".weight_scale",
    ".scale_weight",
    ".input_scale",
    ".scale_input",
    ".comfy_quant",
];
/// Suffixes of scales.
const SCALES: [&str; 2] = [".weight_scale", ".scale_weight"];
/// Name of the tensor with which ComfyUI marks files of scaled fp8.
const MARKER: &str = "scaled_fp8";

/// A tensor and its file.
#[derive(Clone, Debug)]
struct LocatedTensor {
    file: Arc<Path>,
    entry: TensorEntry,
}

impl LocatedTensor {
    fn piece(&self) -> SourcePiece {
        SourcePiece::File {
            file: Arc::clone(&self.file),
            range: self.entry.range,
        }
    }
}

/// How a weight is stored.
#[derive(Clone, Debug)]
pub(crate) enum StoredAs {
    /// Full precision, of this type.
    Plain(Stored),
    /// Quantized, as the parts of this format.
    Quantized(WeightFormat),
}

/// A tensor of a checkpoint, with all tensors that belong to it.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    name: String,
    file: Arc<Path>,
    /// The logical shape, not that of the packed bytes.
    pub(crate) shape: Vec<usize>,
    pub(crate) held: StoredAs,
    /// The parts in the order of the format; for full precision, the tensor itself.
    parts: Vec<SourcePiece>,
}

impl StoredTensor {
    /// The file of its data.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// The tensor with as many dimensions of one in front and after the others as `expected` has. Programs write a
    /// matrix as a convolution of one pixel, and a row as `[n]` or `[1, n]`.
    pub(crate) fn with_ones_of(mut self, expected: &[usize]) -> StoredTensor {
        let inner = |shape: &[usize]| {
            let first = shape.iter().position(|&side| side != 1).unwrap_or(shape.len());
            let last = shape
                .iter()
                .rposition(|&side| side != 1)
                .map_or(first, |last| last + 1);
            (first, last)
        };
        let (first, last) = inner(expected);
        let (own_first, own_last) = inner(&self.shape);
        let fitted = [
            &expected[..first],
            &self.shape[own_first..own_last],
            &expected[last..],
        ];
        let fitted = fitted.concat();
        // The rows of quantized weights have their scales.
        let keeps_rows = rows_and_columns(&fitted) == rows_and_columns(&self.shape);
        if fitted.len() == expected.len() && (keeps_rows || matches!(self.held, StoredAs::Plain(_))) {
            self.shape = fitted;
        }
        self
    }

    /// Reinterprets fp8 as codes without scales.
    pub(crate) fn into_unscaled_fp8(mut self) -> StoredTensor {
        if matches!(self.held, StoredAs::Plain(Stored::F8E4M3)) {
            self.held = StoredAs::Quantized(WeightFormat::Fp8(Fp8Scales::None));
            self.parts.insert(0, SourcePiece::Inline(Arc::from([])));
        }
        self
    }

    /// The source pieces of some of its rows, concatenated.
    ///
    /// # Errors
    /// When blocks of the format cross the ends of these rows.
    pub(crate) fn pieces(&self, rows: &[Rows]) -> Result<Vec<SourcePiece>, ModelError> {
        let (all, columns) = rows_and_columns(&self.shape);
        if let [Rows { first: 0, count }] = rows
            && *count == all
        {
            return Ok(self.parts.clone());
        }
        let units: Vec<Option<(usize, usize)>> = match self.held {
            StoredAs::Plain(stored) => vec![Some(stored.block())],
            StoredAs::Quantized(format) => {
                let parts = format.layout(all, columns).into_iter();
                parts.map(|(part, _)| unit(format, part, columns)).collect()
            }
        };
        let mut pieces = Vec::new();
        for (part, unit) in self.parts.iter().zip(units) {
            let Some((numbers, bytes)) = unit else {
                pieces.push(part.clone());
                continue;
            };
            for &Rows { first, count } in rows {
                let (begin, length) = (first * columns, count * columns);
                if begin % numbers != 0 || length % numbers != 0 {
                    let (name, held) = (&self.name, self.format_name());
                    let problem = format!(
                        "tensor {name} holds several layers, and in {held} its blocks of {numbers} reach over the ends of \
                         them: take a file of single layers (in diffusers' names), or another format"
                    );
                    return Err(unsupported(&self.file, problem));
                }
                let from = (begin / numbers * bytes) as u64;
                let length = (length / numbers * bytes) as u64;
                if let SourcePiece::File { file, range } = part {
                    pieces.push(SourcePiece::File {
                        file: Arc::clone(file),
                        range: ByteRange {
                            offset: range.offset + from,
                            length,
                        },
                    });
                }
            }
        }
        Ok(pieces)
    }

    fn format_name(&self) -> String {
        match self.held {
            StoredAs::Plain(stored) => format!("{stored:?}"),
            StoredAs::Quantized(format) => format.to_string(),
        }
    }
}

/// Elements per entry of a part, and the entry's bytes; `None` for parts shared by the whole weight.
fn unit(format: WeightFormat, part: WeightPart, columns: usize) -> Option<(usize, usize)> {
    match (format, part) {
        (_, WeightPart::Table | WeightPart::NestedTable | WeightPart::Offset | WeightPart::Padding) => None,
        (WeightFormat::Fp8(Fp8Scales::None | Fp8Scales::Tensor), WeightPart::Scales) => None,
        (WeightFormat::Nf4Double, WeightPart::Scales) => Some((NF4_BLOCK, 1)),
        (WeightFormat::Nf4, WeightPart::Scales) => Some((NF4_BLOCK, 4)),
        (_, WeightPart::Scales) => Some((columns, 4)),
        (_, WeightPart::NestedAbsmax) => Some((NF4_BLOCK * NF4_NESTED_BLOCK, 4)),
        (WeightFormat::Nf4 | WeightFormat::Nf4Double, WeightPart::Codes) => Some((2, 1)),
        (WeightFormat::Gguf(kind), WeightPart::Codes) => Some(kind.block()),
        (WeightFormat::Int8 | WeightFormat::Fp8(_), WeightPart::Codes) => Some((1, 1)),
    }
}

/// The tensors of a component: of one file, or of the shards of an index.
pub(crate) struct Checkpoint {
    /// The file, or the index.
    place: PathBuf,
    tensors: BTreeMap<String, LocatedTensor>,
    pub(crate) files: Vec<ModelFile>,
}

impl Checkpoint {
    /// The tensors of one file, renamed by `rename`; tensors without a new name are ignored. Tensors that belong to a
    /// weight are renamed with it.
    ///
    /// # Errors
    /// When it is quantized in an unsupported way.
    pub(crate) fn of_file(
        file: &CheckpointFile,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Checkpoint, ModelError> {
        let tensors = file.tensors().filter_map(|(name, entry)| {
            let place = LocatedTensor {
                file: Arc::clone(file.path()),
                entry: entry.clone(),
            };
            Some((rename_with_parts(name, &rename)?, place))
        });
        let checkpoint = Checkpoint {
            place: file.path().to_path_buf(),
            tensors: tensors.collect(),
            files: vec![ModelFile::of(file)],
        };
        check_metadata(file)?;
        checkpoint.check_foreign()?;
        Ok(checkpoint)
    }

    /// The tensors that an index names.
    fn of_index(index: &Path, folder: &Path) -> Result<Checkpoint, ModelError> {
        #[derive(Deserialize)]
        struct ShardIndex {
            weight_map: BTreeMap<String, String>,
        }
        let ShardIndex { weight_map } = read_json(index)?;
        let mut shards: BTreeMap<String, CheckpointFile> = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        for (name, shard) in weight_map {
            if Path::new(&shard).components().count() != 1 || shard.contains("..") {
                return Err(damaged(index, format!("{shard:?} is no plain file name")));
            }
            if !shards.contains_key(&shard) {
                let path = folder.join(&shard);
                if !path.exists() {
                    let problem = format!(
                        "{shard}, of which {} tells, is missing: was a download interrupted? Download it again",
                        index.file_name().unwrap_or_default().display()
                    );
                    return Err(incomplete(folder, problem));
                }
                let file = open(&path)?;
                check_metadata(&file)?;
                shards.insert(shard.clone(), file);
            }
            let file = &shards[&shard];
            let entry = file.get(&name).cloned().ok_or_else(|| {
                let problem = format!("tensor {name} is not in it, and the index says so");
                damaged(file.path(), problem)
            })?;
            let file = Arc::clone(file.path());
            tensors.insert(name, LocatedTensor { file, entry });
        }
        let checkpoint = Checkpoint {
            place: index.to_owned(),
            tensors,
            files: shards.values().map(ModelFile::of).collect(),
        };
        checkpoint.check_foreign()?;
        Ok(checkpoint)
    }

    /// The tensors of a component's folder, whose configuration may describe a quantization.
    ///
    /// # Errors
    /// When there are none, or they are quantized in an unsupported way.
    pub(crate) fn of_folder(folder: &Path) -> Result<Checkpoint, ModelError> {
        check_configuration(&folder.join("config.json"))?;
        match WeightFiles::in_folder(folder)? {
            Some(WeightFiles::Single(file)) => {
                Checkpoint::of_file(&open(&file)?, |name| Some(name.to_owned()))
            }
            Some(WeightFiles::Index(index)) => Checkpoint::of_index(&index, folder),
            None => Err(no_weights(folder)),
        }
    }

    /// Whether a folder has the weights of a component.
    pub(crate) fn is_in(folder: &Path) -> bool {
        !matches!(WeightFiles::in_folder(folder), Ok(None))
    }

    /// Number of blocks whose tensors have names that begin with `{kind}.0.`, `{kind}.1.` and so on.
    pub(crate) fn blocks(&self, kind: &str) -> usize {
        let has = |i: &usize| {
            let block = format!("{kind}.{i}.");
            self.names().any(|name| name.starts_with(&block))
        };
        (0..).take_while(has).count()
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Names of all tensors, in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor; `None` if it is missing, or stored in an unsupported way.
    pub(crate) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensor(name).ok().map(|tensor| tensor.shape)
    }

    /// The length of an axis of a tensor.
    ///
    /// # Errors
    /// When it is missing, has no such axis, or is stored in an unsupported way.
    pub(crate) fn length(&self, name: &str, axis: usize) -> Result<usize, ModelError> {
        let shape = self.tensor(name)?.shape;
        let length = shape.get(axis).copied();
        length.ok_or_else(|| damaged(&self.place, format!("tensor {name} has {} axes", shape.len())))
    }

    /// A tensor that is not among these names and does not belong to one of them: its name and file.
    pub(crate) fn left_over<'a>(&'a self, known: &BTreeSet<String>) -> Option<(&'a str, &'a Path)> {
        let belongs = |name: &str| {
            let weight = BEHIND_WEIGHT.iter().find_map(|behind| name.strip_suffix(behind));
            let layer = BEHIND_LAYER.iter().find_map(|behind| name.strip_suffix(behind));
            name == MARKER
                || weight.is_some_and(|weight| known.contains(weight))
                || layer.is_some_and(|layer| known.contains(&format!("{layer}.weight")))
        };
        self.tensors
            .iter()
            .find(|(name, _)| !known.contains(*name) && !belongs(name))
            .map(|(name, place)| (name.as_str(), &*place.file))
    }

    /// A tensor by name, with all tensors that belong to it.
    ///
    /// # Errors
    /// When it is missing, or stored in an unsupported way.
    pub(crate) fn tensor(&self, name: &str) -> Result<StoredTensor, ModelError> {
        let Some(place) = self.tensors.get(name) else {
            return Err(damaged(&self.place, format!("tensor {name} is missing")));
        };
        let Some(layer) = name.strip_suffix(".weight") else {
            return Ok(plain(name, place));
        };
        let scales = SCALES
            .iter()
            .find_map(|behind| self.tensors.get(&format!("{layer}{behind}")));
        // Its bytes may have another declared type (`bnb_4bit_quant_storage`).
        if self.has(&format!("{name}{NF4_STATE}")) {
            return self.nf4(name, place);
        }
        match place.entry.stored {
            Stored::U8 => Err(unsupported(
                &place.file,
                format!("tensor {name} is quantized in a way that is not known here: {SUPPORTED}"),
            )),
            Stored::I8 => self.int8(name, layer, place),
            Stored::F8E4M3 => match (scales, self.unknown_part(layer)) {
                (Some(scales), _) => self.fp8(name, place, scales),
                (None, None) => Ok(plain(name, place)),
                (None, Some(unknown)) => Err(unsupported(
                    &place.file,
                    format!("tensor {name} is fp8 with {unknown}, which is not known here: {SUPPORTED}"),
                )),
            },
            Stored::Gguf(kind) => Ok(StoredTensor {
                held: StoredAs::Quantized(WeightFormat::Gguf(kind)),
                ..plain(name, place)
            }),
            Stored::F32 | Stored::F16 | Stored::Bf16 | Stored::F64 | Stored::I64 | Stored::I32 => {
                match scales {
                    Some(_) => Err(unsupported(
                        &place.file,
                        format!(
                            "tensor {name} has a scale and is stored as {:?}: {SUPPORTED}",
                            place.entry.stored
                        ),
                    )),
                    None => Ok(plain(name, place)),
                }
            }
        }
    }

    /// A tensor of this layer that is neither weight, bias, nor a known part of the weight. It may contain scales
    /// under another name, without which the weight would be wrong.
    fn unknown_part(&self, layer: &str) -> Option<&str> {
        let of_layer = format!("{layer}.");
        let known = |behind: &str| {
            ["weight", "bias"].contains(&behind) || BEHIND_LAYER.contains(&&*format!(".{behind}"))
        };
        self.names()
            .find(|name| name.strip_prefix(&of_layer).is_some_and(|behind| !known(behind)))
    }
}

/// The number of heads of width `head` in `width` channels.
///
/// # Errors
/// When they do not divide.
pub(crate) fn heads(path: &Path, width: usize, head: usize) -> Result<usize, ModelError> {
    match head > 0 && width.is_multiple_of(head) {
        true => Ok(width / head),
        false => Err(damaged(
            path,
            format!("{width} channels do not divide into heads of {head}"),
        )),
    }
}

/// A tensor without further parts.
fn plain(name: &str, place: &LocatedTensor) -> StoredTensor {
    StoredTensor {
        name: name.to_owned(),
        file: Arc::clone(&place.file),
        shape: place.entry.shape.clone(),
        held: StoredAs::Plain(place.entry.stored),
        parts: vec![place.piece()],
    }
}

/// The new name of a tensor, or of one that belongs to a renamed weight.
fn rename_with_parts(name: &str, rename: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let of_weight = |behind: &&str| {
        name.strip_suffix(*behind)
            .and_then(rename)
            .map(|to| format!("{to}{behind}"))
    };
    let of_layer = |behind: &&str| {
        let weight = rename(&format!("{}.weight", name.strip_suffix(*behind)?))?;
        Some(format!("{}{behind}", weight.strip_suffix(".weight")?))
    };
    BEHIND_WEIGHT
        .iter()
        .find_map(of_weight)
        .or_else(|| BEHIND_LAYER.iter().find_map(of_layer))
        .or_else(|| rename(name))
}
