//! Stored representation of a checkpoint's tensors, full-precision or quantized by other programs: which tensors
//! belong to one weight, and which of their bytes are its rows.
//!
//! | format | tensors of a weight `X.weight` |
//! |---|---|
//! | bitsandbytes nf4 | `X.weight` (U8, or its bytes as another type), `.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4` (JSON); doubly quantized also `.nested_absmax`, `.nested_quant_map` |
//! | bitsandbytes int8 | `X.weight` (I8), `X.SCB` |
//! | ComfyUI fp8 | `X.weight` (F8_E4M3), and `X.weight_scale` or `X.scale_weight` (F32, `[]`, `[1]`) unless it is unscaled |
//! | fp8 of Black Forest Labs | the same with a scale for each row (F32, `[rows]`, `[rows, 1]`) |
//! | fp8 in blocks | `X.weight` (F8_E4M3), and `X.weight_scale_inv` (F32) for each 128 rows and columns |
//! | ComfyUI's others | `X.comfy_quant` or the header says which (`comfy`): e5m2, int8 (rotated too), int4, w4a8, mxfp8, nvfp4 |
//! | nvfp4 of ModelOpt | `X.weight` (U8, two codes a byte), `X.weight_scale` (F8_E4M3), `X.weight_scale_2` (F32) |
//! | GGUF | `X.weight` in blocks |
//!
//! Shapes and types of all parts are validated by headers. Values are not examined: scales that are not finite are
//! accepted, and the stage that computes with them fails (`StageError::NotFinite`). Few values are read here: the offset of
//! doubly quantized scales, which must be finite, and some codes of fp8 without scales (`scales_beside`).

mod comfy;
mod files;
mod parts;
mod scales_beside;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{
    ByteRange, CheckpointFile, FP8_BLOCK, Fp8Scales, Int8Scales, MXFP8_BLOCK, NF4_BLOCK, NF4_NESTED_BLOCK,
    NVFP4_BLOCK, Nvfp4Order, SourcePiece, Stored, TensorEntry, WeightFormat, WeightPart, rows_and_columns,
};
use serde::Deserialize;

use comfy::{COMFY_QUANT, ComfyLayer, layers_of_header};
use files::{WeightFiles, no_weights};
use parts::Float8;
use unread::check_configuration;

use super::components::open;
use super::spec::Rows;
use crate::files::{damaged, incomplete, read_json, unsupported};
use crate::{ModelError, ModelFile};

pub(crate) use unread::{SUPPORTED, foreign, quantized_by};

/// Suffixes of the states of bitsandbytes' formats of four bits.
const NF4_STATE: &str = ".quant_state.bitsandbytes__nf4";
const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";

/// Suffixes of tensors that belong to a weight `X.weight`.
const BEHIND_WEIGHT: [&str; 6] = [
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    NF4_STATE,
    FP4_STATE,
];
/// Suffixes of tensors that belong to a layer `X`: scales, and quantization metadata. Scales of activations are not
/// used: activations are not quantized, or by their own maxima.
const BEHIND_LAYER: [&str; 14] = [
    ".SCB",
    ".weight_format",
    ".weight_scale",
    ".scale_weight",
    ".input_scale",
    ".scale_input",
    COMFY_QUANT,
    PARTS_OF_FORMATS[0],
    PARTS_OF_FORMATS[1],
    PARTS_OF_FORMATS[2],
    PARTS_OF_FORMATS[3],
    PARTS_OF_FORMATS[4],
    PARTS_OF_FORMATS[5],
    PARTS_OF_FORMATS[6],
];
/// Suffixes of tensors that weights of some formats have, and without which those of others would be wrong.
const PARTS_OF_FORMATS: [&str; 7] = [
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_s_rel",
    ".weight_s_channel",
    ".weight_codebook",
    ".weight_correction",
    ".pre_quant_scale",
];
/// Suffix of a tensor that says how ComfyUI computes attention, which is not read.
const ATTENTION: &str = ".comfy_attention.config";
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
        let unscaled = match self.held {
            StoredAs::Plain(Stored::F8E4M3) => WeightFormat::Fp8(Fp8Scales::None),
            StoredAs::Plain(Stored::F8E5M2) => WeightFormat::E5M2(Fp8Scales::None),
            _ => return self,
        };
        self.held = StoredAs::Quantized(unscaled);
        self.parts.insert(0, SourcePiece::Inline(Arc::from([])));
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
    use WeightFormat as F;
    // Scales in the order of tensor cores: tiles of 128 rows by four blocks.
    let tiles = |block: usize| Some((128 * columns, (columns / block).div_ceil(4) * 512));
    match (format, part) {
        (_, WeightPart::Table | WeightPart::NestedTable | WeightPart::Offset | WeightPart::Padding) => None,
        (F::Fp8(kind) | F::E5M2(kind), WeightPart::Scales) if kind != Fp8Scales::Rows => None,
        (F::Int8Scaled(Int8Scales::Tensor, _) | F::Nvfp4(_), WeightPart::Scales) => None,
        (F::Nf4Double | F::Fp4Double, WeightPart::Scales) => Some((NF4_BLOCK, 1)),
        (F::Nf4 | F::Fp4, WeightPart::Scales) => Some((NF4_BLOCK, 4)),
        (F::BlockFp8, WeightPart::Scales) => Some((FP8_BLOCK * columns, 4 * columns.div_ceil(FP8_BLOCK))),
        (_, WeightPart::Scales) => Some((columns, 4)),
        (_, WeightPart::NestedAbsmax) => Some((NF4_BLOCK * NF4_NESTED_BLOCK, 4)),
        (F::Nvfp4(Nvfp4Order::TensorCores), WeightPart::BlockScales) => tiles(NVFP4_BLOCK),
        (F::Nvfp4(Nvfp4Order::Rows), WeightPart::BlockScales) => Some((NVFP4_BLOCK, 1)),
        (F::W4A8 { group, .. }, WeightPart::BlockScales) => Some((group.into(), 1)),
        (_, WeightPart::BlockScales) => tiles(MXFP8_BLOCK),
        (F::Gguf(kind), WeightPart::Codes) => Some(kind.block()),
        (
            F::Int8 | F::Fp8(_) | F::E5M2(_) | F::BlockFp8 | F::Int8Scaled(..) | F::Mxfp8,
            WeightPart::Codes,
        ) => Some((1, 1)),
        (_, WeightPart::Codes) => Some((2, 1)),
    }
}

/// The tensors of a component: of one file, or of the shards of an index.
pub(crate) struct Checkpoint {
    /// The file, or the index.
    place: PathBuf,
    tensors: BTreeMap<String, LocatedTensor>,
    /// The layers of which ComfyUI's metadata say how they are quantized, by their names.
    comfy: BTreeMap<String, ComfyLayer>,
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
        let read = file.tensors().filter(|(name, _)| !name.ends_with(ATTENTION));
        let tensors = read.filter_map(|(name, entry)| {
            let place = LocatedTensor {
                file: Arc::clone(file.path()),
                entry: entry.clone(),
            };
            Some((rename_with_parts(name, &rename)?, place))
        });
        let checkpoint = Checkpoint {
            place: file.path().to_path_buf(),
            tensors: tensors.collect(),
            comfy: layers_of_header(file, &rename)?,
            files: vec![ModelFile::of(file)],
        };
        checkpoint.check_foreign()?;
        checkpoint.with_layers_of_tensors()
    }

    /// The tensors that an index names.
    fn of_index(index: &Path, folder: &Path) -> Result<Checkpoint, ModelError> {
        #[derive(Deserialize)]
        struct ShardIndex {
            weight_map: BTreeMap<String, String>,
        }
        let ShardIndex { weight_map } = read_json(index)?;
        let mut shards: BTreeMap<String, CheckpointFile> = BTreeMap::new();
        let (mut tensors, mut comfy) = (BTreeMap::new(), BTreeMap::new());
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
                comfy.extend(layers_of_header(&file, &|name| Some(name.to_owned()))?);
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
            comfy,
            files: shards.values().map(ModelFile::of).collect(),
        };
        checkpoint.check_foreign()?;
        checkpoint.with_layers_of_tensors()
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
        for state in [NF4_STATE, FP4_STATE] {
            if self.has(&format!("{name}{state}")) {
                return self.four_bits(name, state, place);
            }
        }
        if let Some(quantized) = self.comfy.get(layer) {
            return self.comfy_layer(name, layer, place, quantized);
        }
        match place.entry.stored {
            Stored::U8 if self.has(&format!("{layer}.weight_scale_2")) => self.nvfp4(name, layer, place),
            Stored::U8 | Stored::F8E8M0 => Err(unsupported(
                &place.file,
                format!("tensor {name} is quantized in a way that is not known here: {SUPPORTED}"),
            )),
            Stored::I8 => self.int8(name, layer, place),
            Stored::F8E4M3 if self.has(&format!("{layer}.weight_scale_inv")) => {
                let (rows, columns) = rows_and_columns(&place.entry.shape);
                let scales = self.tensors.get(&format!("{layer}.weight_scale_inv"));
                let blocks = [rows, columns].map(|side| side.div_ceil(FP8_BLOCK));
                if let Some(scales) = scales.filter(|scales| scales.entry.shape != blocks) {
                    let problem = format!(
                        "tensor {layer}.weight_scale_inv is {:?} where {blocks:?} is expected, a scale for each {FP8_BLOCK} rows and \
                         columns: {SUPPORTED}",
                        scales.entry.shape
                    );
                    return Err(unsupported(&place.file, problem));
                }
                self.in_format(name, layer, place, [rows, columns], WeightFormat::BlockFp8)
            }
            Stored::F8E5M2 if scales.is_some() => self.fp8(name, place, Float8::E5M2, scales),
            Stored::F8E5M2 => self
                .check_parts(name, layer, place, WeightFormat::E5M2(Fp8Scales::None))
                .map(|()| plain(name, place)),
            Stored::F8E4M3 => match (scales, self.unknown_part(layer)) {
                (Some(_), _) => self.fp8(name, place, Float8::E4M3, scales),
                (None, None) => self
                    .check_parts(name, layer, place, WeightFormat::Fp8(Fp8Scales::None))
                    .map(|()| plain(name, place)),
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

    /// A weight in nvfp4 without ComfyUI's metadata. Both layouts have the same shapes: Black Forest Labs' files, which have
    /// their own names, are in ComfyUI's, others in ModelOpt's.
    fn nvfp4(&self, name: &str, layer: &str, place: &LocatedTensor) -> Result<StoredTensor, ModelError> {
        let order = match self.names().any(|name| name.contains("_attn.qkv.")) {
            true => Nvfp4Order::TensorCores,
            false => Nvfp4Order::Rows,
        };
        let (rows, columns) = rows_and_columns(&place.entry.shape);
        self.in_format(
            name,
            layer,
            place,
            [rows, 2 * columns],
            WeightFormat::Nvfp4(order),
        )
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

#[cfg(test)]
mod tests;
