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
//! | torchao | `X._weight_qdata`, `._weight_scale` and more; the header says what each weight is (`torchao`) |
//! | AWQ of AutoAWQ | `X.qweight` (I32, eight rows a word), `.qzeros`, `.scales` (`groups`) |
//! | SVDQuant, and AWQ beside it (Nunchaku) | `X.qweight`, `.wscales` and more (`svdquant`) |
//! | GGUF | `X.weight` in blocks |
//!
//! Shapes and types of all parts are validated by headers. Values are not examined: scales that are not finite are
//! accepted, and the stage that computes with them fails (`StageError::NotFinite`). Few values are read here: the offset of
//! doubly quantized scales, which must be finite, some codes of fp8 without scales (`scales_beside`), and small tensors that are
//! put into another order: factors of columns, biases.

mod comfy;
mod files;
mod groups;
mod parts;
mod scales_beside;
mod svdquant;
mod torchao;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{
    ByteRange, CheckpointFile, ColumnFactors, FP8_BLOCK, Fp8Scales, Int4Order, Int8Scales, MXFP8_BLOCK,
    NF4_BLOCK, NF4_NESTED_BLOCK, NVFP4_BLOCK, Nvfp4Order, ScaleOrder, SourcePiece, Stored, SvdquantCodes,
    TensorEntry, W4A8Codes, WeightFormat, WeightPart, rows_and_columns,
};
use serde::Deserialize;

use comfy::{COMFY_QUANT, ComfyLayer, layers_of_header};
use files::{WeightFiles, no_weights};
use parts::Float8;
use torchao::{TorchaoWeight, weights_of_header};
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
const BEHIND_LAYER: [&str; 7] = [
    ".SCB",
    ".weight_format",
    ".weight_scale",
    ".scale_weight",
    ".input_scale",
    ".scale_input",
    COMFY_QUANT,
];
/// Suffixes of tensors that weights of some formats have, and without which those of others would be wrong.
const PARTS_OF_FORMATS: [&str; 26] = [
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_s_rel",
    ".weight_s_channel",
    ".weight_codebook",
    ".weight_correction",
    ".pre_quant_scale",
    ".weight_zeros",
    "._weight_scale",
    "._weight_zero_point",
    "._weight_per_tensor_scale",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".wscales",
    ".wzeros",
    ".wcscales",
    ".wtscale",
    ".smooth_factor",
    ".smooth_factor_orig",
    ".smooth",
    ".smooth_orig",
    ".proj_down",
    ".proj_up",
    ".lora_down",
    ".lora_up",
];
/// Suffixes of codes in files that call no tensor `X.weight`.
const CODES: [&str; 2] = [".qweight", torchao::CODES];
/// Suffix of a tensor that says how ComfyUI computes attention, which is not read.
const ATTENTION: &str = ".comfy_attention.config";
/// Suffixes of scales.
const SCALES: [&str; 2] = [".weight_scale", ".scale_weight"];
/// Name of the tensor with which ComfyUI marks files of scaled fp8.
const MARKER: &str = "scaled_fp8";

/// Suffixes of all tensors that belong to a layer.
fn behind_layer() -> impl Iterator<Item = &'static str> {
    BEHIND_LAYER.iter().chain(&PARTS_OF_FORMATS).copied()
}

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
        let cuts: Vec<Cut> = match self.held {
            StoredAs::Plain(stored) => {
                let (numbers, bytes) = stored.block();
                vec![Cut::Blocks { numbers, bytes }]
            }
            StoredAs::Quantized(format) => {
                let parts = format.layout(all, columns).into_iter();
                parts.map(|(part, _)| cut(format, part, columns)).collect()
            }
        };
        let crosses = |blocks: &str| {
            let (name, held) = (&self.name, self.format_name());
            let problem = format!(
                "tensor {name} holds several layers, and in {held} its {blocks} reach over the ends of them: take a file of single \
                 layers (in diffusers' names), or another format"
            );
            Err(unsupported(&self.file, problem))
        };
        let mut pieces = Vec::new();
        for (part, cut) in self.parts.iter().zip(cuts) {
            match cut {
                Cut::Shared => pieces.push(part.clone()),
                Cut::Never => return crosses("blocks"),
                Cut::Blocks { numbers, bytes } => {
                    for &Rows { first, count } in rows {
                        let (begin, length) = (first * columns, count * columns);
                        if begin % numbers != 0 || length % numbers != 0 {
                            return crosses(&format!("blocks of {numbers}"));
                        }
                        pieces.push(piece_of(part, begin / numbers * bytes, length / numbers * bytes));
                    }
                }
                Cut::Lines { lines, bytes } => {
                    for line in 0..lines {
                        for &Rows { first, count } in rows {
                            pieces.push(piece_of(part, (line * all + first) * bytes, count * bytes));
                        }
                    }
                }
            }
        }
        if let StoredAs::Quantized(format) = self.held {
            let count: usize = rows.iter().map(|rows| rows.count).sum();
            if !count.is_multiple_of(format.multiple_of_rows()) {
                return crosses("tiles");
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

/// A part of a piece.
fn piece_of(piece: &SourcePiece, from: usize, length: usize) -> SourcePiece {
    match piece {
        SourcePiece::File { file, range } => SourcePiece::File {
            file: Arc::clone(file),
            range: ByteRange {
                offset: range.offset + from as u64,
                length: length as u64,
            },
        },
        SourcePiece::Inline(bytes) => SourcePiece::Inline(bytes[from..from + length].into()),
    }
}

/// How a part of a weight is cut into rows.
#[derive(Clone, Copy)]
enum Cut {
    /// It is shared by the whole weight.
    Shared,
    /// Each so many numbers of the weight have so many bytes of it.
    Blocks { numbers: usize, bytes: usize },
    /// So many lines of so many bytes a row.
    Lines { lines: usize, bytes: usize },
    /// Its rows do not follow each other.
    Never,
}

/// How a part of a weight of so many columns is cut.
fn cut(format: WeightFormat, part: WeightPart, columns: usize) -> Cut {
    use WeightFormat as F;
    let by = |numbers, bytes| Cut::Blocks { numbers, bytes };
    // Scales in the order of tensor cores: tiles of 128 rows by four blocks.
    let of_blocks = |order: ScaleOrder, block: usize| match order {
        ScaleOrder::TensorCores => by(128 * columns, (columns / block).div_ceil(4) * 512),
        ScaleOrder::Rows => by(block, 1),
    };
    let in_tiles = |part: WeightPart| {
        let layout = format.layout(128, columns).into_iter();
        let bytes = layout
            .filter(|(each, _)| *each == part)
            .map(|(_, range)| range.len());
        by(128 * columns, bytes.sum())
    };
    match (format, part) {
        (
            _,
            WeightPart::Table
            | WeightPart::NestedTable
            | WeightPart::Offset
            | WeightPart::Padding
            | WeightPart::MadeFlag
            | WeightPart::ColumnFactors
            | WeightPart::LowRankDown,
        ) => Cut::Shared,
        (F::Fp8(kind) | F::E5M2(kind), WeightPart::Scales) if kind != Fp8Scales::Rows => Cut::Shared,
        (F::Int8Scaled(Int8Scales::Tensor, _) | F::Nvfp4(..), WeightPart::Scales) => Cut::Shared,
        (F::Nf4Double | F::Fp4Double, WeightPart::Scales) => by(NF4_BLOCK, 1),
        (F::Nf4 | F::Fp4, WeightPart::Scales) => by(NF4_BLOCK, 4),
        (F::BlockFp8, WeightPart::Scales) => by(FP8_BLOCK * columns, 4 * columns.div_ceil(FP8_BLOCK)),
        (_, WeightPart::MadeScales) => by(columns, 4),
        // What lies in tiles of 128 rows: all but the factors of rows.
        (
            F::Svdquant {
                codes: SvdquantCodes::Fp4,
                ..
            },
            WeightPart::Scales,
        ) => by(columns, 4),
        (F::Svdquant { .. }, part) => in_tiles(part),
        // Interleaved rows, and rows side by side in words.
        (
            F::Int4Groups {
                order: Int4Order::AutoAwq,
                ..
            },
            WeightPart::Codes | WeightPart::Zeros,
        ) => Cut::Never,
        (
            F::Int4Groups {
                order: Int4Order::TinyChat { parts },
                ..
            },
            _,
        ) if parts > 1 => Cut::Never,
        (
            F::Int4Groups {
                order: Int4Order::TinyChat { .. },
                ..
            },
            WeightPart::Codes,
        ) => by(4 * columns, 2 * columns),
        (F::Int4Groups { group, numbers, .. }, WeightPart::Scales | WeightPart::Zeros) => Cut::Lines {
            lines: columns / usize::from(group.max(1)),
            bytes: numbers.width(),
        },
        (F::Int8Groups { group, numbers }, WeightPart::Scales) => by(group as usize, numbers.width()),
        (F::Int8Groups { group, .. }, WeightPart::Zeros) => by(group as usize, 1),
        (_, WeightPart::Zeros | WeightPart::LowRankUp) => Cut::Never,
        (_, WeightPart::Scales) => by(columns, 4),
        (_, WeightPart::NestedAbsmax) => by(NF4_BLOCK * NF4_NESTED_BLOCK, 4),
        (F::Nvfp4(order, _), WeightPart::BlockScales) => of_blocks(order.scales(), NVFP4_BLOCK),
        (F::Mxfp8(order), WeightPart::BlockScales) => of_blocks(order, MXFP8_BLOCK),
        (F::W4A8 { group, scales, .. }, WeightPart::BlockScales) => by(group.into(), scales.width()),
        (_, WeightPart::BlockScales) => Cut::Never,
        (F::Gguf(kind), WeightPart::Codes) => {
            let (numbers, bytes) = kind.block();
            by(numbers, bytes)
        }
        (
            F::Int8
            | F::Fp8(_)
            | F::E5M2(_)
            | F::BlockFp8
            | F::Int8Scaled(..)
            | F::Int8Groups { .. }
            | F::Mxfp8(_),
            WeightPart::Codes,
        ) => by(1, 1),
        (
            F::W4A8 {
                codes: W4A8Codes::Six,
                ..
            },
            WeightPart::Codes,
        ) => by(columns, columns / 4 * 3),
        (_, WeightPart::Codes) => by(2, 1),
    }
}

/// The tensors of a component: of one file, or of the shards of an index.
pub(crate) struct Checkpoint {
    /// The file, or the index.
    place: PathBuf,
    tensors: BTreeMap<String, LocatedTensor>,
    /// The layers of which ComfyUI's metadata say how they are quantized, by their names.
    comfy: BTreeMap<String, ComfyLayer>,
    /// The weights that torchao's headers describe, by their names.
    torchao: BTreeMap<String, TorchaoWeight>,
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
        let tensors: Vec<_> = tensors.collect();
        check_codes(file, tensors.iter().map(|(name, _)| name.as_str()))?;
        let checkpoint = Checkpoint {
            place: file.path().to_path_buf(),
            tensors: tensors.into_iter().collect(),
            comfy: layers_of_header(file, &rename)?,
            torchao: weights_of_header(file, &rename)?,
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
        let (mut tensors, mut comfy, mut torchao) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let same = |name: &str| Some(name.to_owned());
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
                comfy.extend(layers_of_header(&file, &same)?);
                torchao.extend(weights_of_header(&file, &same)?);
                shards.insert(shard.clone(), file);
            }
            let file = &shards[&shard];
            let entry = file.get(&name).cloned().ok_or_else(|| {
                let problem = format!("tensor {name} is not in it, and the index says so");
                damaged(file.path(), problem)
            })?;
            let located = LocatedTensor {
                file: Arc::clone(file.path()),
                entry,
            };
            if let Some(name) = rename_with_parts(&name, &same)
                && tensors.insert(name.clone(), located).is_some()
            {
                return Err(unsupported(file.path(), two_weights(&name)));
            }
        }
        let checkpoint = Checkpoint {
            place: index.to_owned(),
            tensors,
            comfy,
            torchao,
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
            let layer = behind_layer().find_map(|behind| name.strip_suffix(behind));
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
            return match name.strip_suffix(".bias") {
                Some(layer) => {
                    let bias = self.bias_of_nunchaku(name, layer, place)?;
                    Ok(bias.unwrap_or_else(|| plain(name, place)))
                }
                None => Ok(plain(name, place)),
            };
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
        if let Some(weight) = self.torchao.get(name) {
            return self.torchao_layer(name, layer, place, weight);
        }
        if self.has(&format!("{layer}.wzeros")) {
            return self.tinychat(name, layer, place);
        }
        if self.is_svdquant(layer) {
            return self.svdquant(name, layer, place);
        }
        if place.entry.stored == Stored::I32 && self.has(&format!("{layer}.qzeros")) {
            return self.autoawq(name, layer, place);
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
            WeightFormat::Nvfp4(order, self.column_factors(layer)),
        )
    }

    /// Whether the columns of a layer have factors.
    fn column_factors(&self, layer: &str) -> ColumnFactors {
        match self.has(&format!("{layer}.pre_quant_scale")) {
            true => ColumnFactors::F32,
            false => ColumnFactors::None,
        }
    }

    /// The place of a tensor.
    ///
    /// # Errors
    /// When it is missing.
    fn located(&self, name: &str) -> Result<&LocatedTensor, ModelError> {
        let missing = || damaged(&self.place, format!("tensor {name} is missing"));
        self.tensors.get(name).ok_or_else(missing)
    }

    /// A tensor of this layer that is neither weight, bias, nor a known part of the weight. It may contain scales
    /// under another name, without which the weight would be wrong.
    fn unknown_part(&self, layer: &str) -> Option<&str> {
        let of_layer = format!("{layer}.");
        let known = |behind: &str| {
            let is_known = |known: &str| known.strip_prefix('.') == Some(behind);
            ["weight", "bias"].contains(&behind) || behind_layer().any(is_known)
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
    let codes = CODES.iter().find_map(|behind| name.strip_suffix(behind));
    let of_codes = codes.and_then(|layer| rename(&format!("{layer}.weight")));
    BEHIND_WEIGHT
        .iter()
        .find_map(of_weight)
        .or_else(|| behind_layer().find_map(|behind| of_layer(&behind)))
        .or(of_codes)
        .or_else(|| rename(name))
}

/// Refuses a file in which codes have the same name as another weight.
fn check_codes<'a>(file: &CheckpointFile, names: impl Iterator<Item = &'a str>) -> Result<(), ModelError> {
    let has_codes = |(name, _): (&str, _)| CODES.iter().any(|behind| name.ends_with(behind));
    if !file.tensors().any(has_codes) {
        return Ok(());
    }
    let mut seen = BTreeSet::new();
    match names.into_iter().find(|name| !seen.insert(*name)) {
        None => Ok(()),
        Some(twice) => Err(unsupported(file.path(), two_weights(twice))),
    }
}

fn two_weights(name: &str) -> String {
    format!("two tensors are {name}: the codes of a quantized weight, and a weight beside them; {SUPPORTED}")
}

#[cfg(test)]
mod tests;
