//! The tensors of quantized weights, validated.

use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;

use gpu::{
    ByteRange, Fp8Scales, Int4Order, NF4_BLOCK, NF4_NESTED_BLOCK, SourcePiece, Stored, W4A8Scales,
    WeightFormat, WeightPart, rows_and_columns,
};
use serde::Deserialize;

use super::{Checkpoint, LocatedTensor, PARTS_OF_FORMATS, SCALES, SUPPORTED, StoredAs, StoredTensor, plain};
use crate::ModelError;
use crate::checkpoint::number_of;
use crate::files::{damaged, unsupported};

/// Maximum length of the JSON of one tensor in bytes.
const MAX_STATE_BYTES: u64 = 64 << 10;

fn zeros(bytes: usize) -> SourcePiece {
    SourcePiece::Inline(vec![0; bytes].into())
}

/// Numbers in f32.
pub(super) fn f32s(numbers: impl IntoIterator<Item = f32>) -> SourcePiece {
    let bytes = numbers.into_iter().flat_map(f32::to_le_bytes);
    SourcePiece::Inline(bytes.collect())
}

/// A float of eight bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float8 {
    E4M3,
    E5M2,
}

impl Float8 {
    fn with(self, scales: Fp8Scales) -> WeightFormat {
        match self {
            Float8::E4M3 => WeightFormat::Fp8(scales),
            Float8::E5M2 => WeightFormat::E5M2(scales),
        }
    }
}

/// The values of four bits without a table: the codes less eight.
fn less_eight() -> SourcePiece {
    f32s((0..16u8).map(|code| f32::from(code) - 8.0))
}

impl Checkpoint {
    /// A tensor that belongs to `of`, with an expected type and element count.
    fn part(&self, of: &str, name: &str, stored: Stored, count: usize) -> Result<SourcePiece, ModelError> {
        let Some(place) = self.tensors.get(name) else {
            let problem = format!("tensor {name} is missing, and {of} cannot be read without it");
            return Err(damaged(&self.place, problem));
        };
        if place.entry.stored != stored || place.entry.elements() != count {
            let (found, shape) = (place.entry.stored, &place.entry.shape);
            let problem =
                format!("tensor {name} is {found:?} {shape:?} where {count} of {stored:?} are expected");
            return Err(damaged(&place.file, problem));
        }
        Ok(place.piece())
    }

    /// A weight of bitsandbytes' in four bits, with its state in a tensor of this suffix.
    pub(super) fn four_bits(
        &self,
        name: &str,
        state: &str,
        place: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        #[derive(Deserialize)]
        struct State {
            quant_type: String,
            blocksize: usize,
            shape: Vec<usize>,
            nested_blocksize: Option<usize>,
            nested_offset: Option<f64>,
        }
        let state_name = format!("{name}{state}");
        let State {
            quant_type,
            blocksize,
            shape,
            nested_blocksize,
            nested_offset,
        } = self.state(&state_name)?;
        let is_nf4 = quant_type == "nf4";
        let is_named_so = state
            .strip_suffix(quant_type.as_str())
            .is_some_and(|rest| rest.ends_with("__"));
        if !is_named_so || blocksize != NF4_BLOCK {
            let problem = format!(
                "tensor {state_name} says {quant_type} in blocks of {blocksize}; what it is named after is read, nf4 or fp4, in blocks \
                 of {NF4_BLOCK}"
            );
            return Err(unsupported(&place.file, problem));
        }
        let numbers = shape
            .iter()
            .try_fold(1usize, |product, &side| product.checked_mul(side));
        let packed = place.entry.range.length;
        if numbers.is_none_or(|numbers| numbers == 0 || numbers.div_ceil(2) as u64 != packed) {
            let problem = format!("tensor {name} has {packed} bytes for a shape of {shape:?}");
            return Err(damaged(&place.file, problem));
        }
        let (rows, columns) = rows_and_columns(&shape);
        let format = match (nested_offset, is_nf4) {
            (None, true) => WeightFormat::Nf4,
            (Some(_), true) => WeightFormat::Nf4Double,
            (None, false) => WeightFormat::Fp4,
            (Some(_), false) => WeightFormat::Fp4Double,
        };
        if let Some(offset) = nested_offset
            && !(offset as f32).is_finite()
        {
            let problem = format!("tensor {state_name} says an offset of {offset}, which is no f32");
            return Err(damaged(&place.file, problem));
        }
        if let Some(nested) = nested_blocksize
            && nested != NF4_NESTED_BLOCK
        {
            let problem = format!(
                "tensor {name} has scales in blocks of {nested}; blocks of {NF4_NESTED_BLOCK} are read"
            );
            return Err(unsupported(&place.file, problem));
        }
        let part = |(part, range): (WeightPart, std::ops::Range<usize>)| {
            let of = |behind: &str, stored: Stored| {
                let count = range.len() / stored.width();
                self.part(name, &format!("{name}{behind}"), stored, count)
            };
            match part {
                WeightPart::Table => of(".quant_map", Stored::F32),
                WeightPart::NestedTable => of(".nested_quant_map", Stored::F32),
                WeightPart::NestedAbsmax => of(".nested_absmax", Stored::F32),
                WeightPart::Scales if nested_offset.is_some() => of(".absmax", Stored::U8),
                WeightPart::Scales => of(".absmax", Stored::F32),
                WeightPart::Codes => Ok(place.piece()),
                WeightPart::Padding
                | WeightPart::BlockScales
                | WeightPart::Zeros
                | WeightPart::ColumnFactors
                | WeightPart::LowRankDown
                | WeightPart::LowRankUp
                | WeightPart::MadeScales
                | WeightPart::MadeFlag => Ok(zeros(range.len())),
                WeightPart::Offset => {
                    let offset = nested_offset.unwrap_or_default() as f32;
                    Ok(SourcePiece::Inline(Arc::from(offset.to_le_bytes())))
                }
            }
        };
        let parts = format.layout(rows, columns).into_iter().map(part);
        Ok(StoredTensor {
            held: StoredAs::Quantized(format),
            parts: parts.collect::<Result<_, _>>()?,
            shape,
            ..plain(name, place)
        })
    }

    pub(super) fn int8(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        let (rows, _) = rows_and_columns(&place.entry.shape);
        if let Some(scales) = SCALES.iter().find(|behind| self.has(&format!("{layer}{behind}"))) {
            let problem = format!("tensor {name} is int8 with scales in {layer}{scales}: {SUPPORTED}");
            return Err(unsupported(&place.file, problem));
        }
        let order = format!("{layer}.weight_format");
        if let Some(order) = self.tensors.get(&order)
            && self.small(order)?.iter().any(|&byte| byte != 0)
        {
            let problem =
                format!("tensor {name} is stored in the order of a card of NVIDIA's; rows are read");
            return Err(unsupported(&place.file, problem));
        }
        self.check_parts(name, layer, place, WeightFormat::Int8)?;
        Ok(StoredTensor {
            held: StoredAs::Quantized(WeightFormat::Int8),
            parts: vec![
                self.part(name, &format!("{layer}.SCB"), Stored::F32, rows)?,
                place.piece(),
            ],
            ..plain(name, place)
        })
    }

    /// A weight in floats of eight bits, unscaled or with these scales.
    pub(super) fn fp8(
        &self,
        name: &str,
        place: &LocatedTensor,
        kind: Float8,
        scales: Option<&LocatedTensor>,
    ) -> Result<StoredTensor, ModelError> {
        let (rows, columns) = rows_and_columns(&place.entry.shape);
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        self.check_parts(name, layer, place, kind.with(Fp8Scales::None))?;
        let Some(scales) = scales else {
            return Ok(StoredTensor {
                held: StoredAs::Quantized(kind.with(Fp8Scales::None)),
                parts: vec![zeros(0), place.piece()],
                ..plain(name, place)
            });
        };
        // Scales per column, or per block of the matrix, may have the same count as rows: the shape is decisive.
        let held = match (scales.entry.stored, scales.entry.shape.as_slice()) {
            (stored, [] | [1] | [1, 1]) if stored.is_float() => Fp8Scales::Tensor,
            (Stored::F32, &[count] | &[count, 1]) if count == rows => Fp8Scales::Rows,
            (stored, shape) => {
                let problem = format!(
                    "the scales of tensor {name} are {stored:?} {shape:?}; one or {rows} (one a row) of F32 are read \
                     ({SUPPORTED})"
                );
                return Err(unsupported(&place.file, problem));
            }
        };
        let scale_piece = match scales.entry.stored {
            Stored::F32 => scales.piece(),
            stored => {
                let number = number_of(stored, &self.small(scales)?).unwrap_or(f64::NAN) as f32;
                SourcePiece::Inline(Arc::from(number.to_le_bytes()))
            }
        };
        let format = kind.with(held);
        let parts = format
            .layout(rows, columns)
            .into_iter()
            .map(|(part, range)| match part {
                WeightPart::Scales => scale_piece.clone(),
                WeightPart::Padding => zeros(range.len()),
                _ => place.piece(),
            });
        Ok(StoredTensor {
            held: StoredAs::Quantized(format),
            parts: parts.collect(),
            ..plain(name, place)
        })
    }

    /// Refuses a layer with a part that its format does not have: the weight would be wrong without it.
    pub(super) fn check_parts(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        format: WeightFormat,
    ) -> Result<(), ModelError> {
        const SVDQUANT: [&str; 11] = [
            ".wscales",
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
        let of_torchao = [
            "._weight_scale",
            "._weight_zero_point",
            "._weight_per_tensor_scale",
        ];
        let is_of_torchao = self.torchao.contains_key(name);
        let of_format: &[&str] = match format {
            _ if is_of_torchao => &of_torchao,
            WeightFormat::Nvfp4(..) => &[".weight_scale_2", ".pre_quant_scale"],
            WeightFormat::Int4Groups { order, .. } => match order {
                Int4Order::LessEight => &[".weight_zeros"],
                Int4Order::AutoAwq => &[".qzeros", ".scales"],
                Int4Order::TinyChat { .. } => &[".wscales", ".wzeros"],
                Int4Order::Signed => &[],
            },
            WeightFormat::Svdquant { .. } => &SVDQUANT,
            WeightFormat::W4A8 { .. } => &[".weight_s_rel", ".weight_s_channel", ".weight_codebook"],
            WeightFormat::BlockFp8 => &[".weight_scale_inv"],
            _ => &[],
        };
        let others = PARTS_OF_FORMATS.iter().filter(|part| !of_format.contains(part));
        let mut found = others.map(|part| format!("{layer}{part}"));
        match found.find(|part| self.has(part)) {
            None => Ok(()),
            Some(part) => {
                let problem =
                    format!("tensor {name} is {format} with {part}, which is not known here: {SUPPORTED}");
                Err(unsupported(&place.file, problem))
            }
        }
    }

    /// A weight of a layer in a format whose parts all are tensors of the layer, with this shape.
    pub(super) fn in_format(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        [rows, columns]: [usize; 2],
        format: WeightFormat,
    ) -> Result<StoredTensor, ModelError> {
        self.check_parts(name, layer, place, format)?;
        // Block scales are bytes, which some programs do not give the type that they have.
        const E4M3: [Stored; 2] = [Stored::F8E4M3, Stored::U8];
        const E8M0: [Stored; 2] = [Stored::F8E8M0, Stored::U8];
        const F32: [Stored; 1] = [Stored::F32];
        let of = |behind: &str, kinds: &[Stored], bytes: usize| {
            self.bytes_of(name, &format!("{layer}{behind}"), kinds, bytes)
        };
        self.in_parts(name, place, [rows, columns], format, |part, bytes| {
            match (format, part) {
                (WeightFormat::W4A8 { .. }, WeightPart::Table) => {
                    match self.has(&format!("{layer}.weight_codebook")) {
                        true => of(".weight_codebook", &F32, bytes),
                        false => Ok(less_eight()),
                    }
                }
                (WeightFormat::W4A8 { .. }, WeightPart::Scales) => of(".weight_s_channel", &F32, bytes),
                (WeightFormat::W4A8 { scales, .. }, WeightPart::BlockScales) => match scales {
                    W4A8Scales::E4M3 => of(".weight_s_rel", &E4M3, bytes),
                    W4A8Scales::F32 => of(".weight_s_rel", &F32, bytes),
                },
                (WeightFormat::Nvfp4(..), WeightPart::Scales) => of(".weight_scale_2", &F32, bytes),
                (WeightFormat::Nvfp4(..), WeightPart::ColumnFactors) => {
                    self.padded_factors(&format!("{layer}.pre_quant_scale"), columns)
                }
                (WeightFormat::Nvfp4(..), WeightPart::BlockScales) => of(".weight_scale", &E4M3, bytes),
                (WeightFormat::Mxfp8(_), WeightPart::BlockScales) => of(".weight_scale", &E8M0, bytes),
                (WeightFormat::BlockFp8, WeightPart::Scales) => of(".weight_scale_inv", &F32, bytes),
                (_, WeightPart::Scales) => of(".weight_scale", &F32, bytes),
                (_, other) => self.no_part(place, format, other),
            }
        })
    }

    /// A weight in a format with this shape, whose codes are the tensor itself, and whose other parts `part` gives, by their bytes.
    pub(super) fn in_parts(
        &self,
        name: &str,
        place: &LocatedTensor,
        [rows, columns]: [usize; 2],
        format: WeightFormat,
        part: impl Fn(WeightPart, usize) -> Result<SourcePiece, ModelError>,
    ) -> Result<StoredTensor, ModelError> {
        if !format.fits(columns) || !rows.is_multiple_of(format.multiple_of_rows()) {
            let problem =
                format!("tensor {name} is {format}, and its {rows} rows of {columns} are no whole blocks");
            return Err(unsupported(&place.file, problem));
        }
        let part = |(wanted, range): (WeightPart, std::ops::Range<usize>)| {
            let found = match wanted {
                WeightPart::Codes => place.piece(),
                WeightPart::Padding | WeightPart::MadeScales | WeightPart::MadeFlag => zeros(range.len()),
                other => part(other, range.len())?,
            };
            if found.length() != range.len() as u64 {
                let (has, expected) = (found.length(), range.len());
                let problem = format!(
                    "tensor {name} has {has} bytes of {wanted:?} where {expected} are expected of {format}"
                );
                return Err(damaged(&place.file, problem));
            }
            Ok(found)
        };
        let parts = format.layout(rows, columns).into_iter().map(part);
        Ok(StoredTensor {
            held: StoredAs::Quantized(format),
            parts: parts.collect::<Result<_, _>>()?,
            shape: vec![rows, columns],
            ..plain(name, place)
        })
    }

    /// A tensor of one of these types and so many bytes, which is a part of the weight `name`.
    pub(super) fn bytes_of(
        &self,
        name: &str,
        part: &str,
        kinds: &[Stored],
        bytes: usize,
    ) -> Result<SourcePiece, ModelError> {
        let Some(found) = self.tensors.get(part) else {
            let problem = format!("tensor {part} is missing, and {name} cannot be read without it");
            return Err(damaged(&self.place, problem));
        };
        let is_alike = kinds.contains(&found.entry.stored) && found.entry.range.length == bytes as u64;
        if !is_alike {
            let (stored, shape) = (found.entry.stored, &found.entry.shape);
            let problem = format!(
                "tensor {part} is {stored:?} {shape:?} where {bytes} bytes of {kinds:?} are expected ({SUPPORTED})"
            );
            return Err(unsupported(&found.file, problem));
        }
        Ok(found.piece())
    }

    /// The error for a part that a format does not have.
    pub(super) fn no_part(
        &self,
        place: &LocatedTensor,
        format: WeightFormat,
        part: WeightPart,
    ) -> Result<SourcePiece, ModelError> {
        Err(damaged(&place.file, format!("{format} has no {part:?}")))
    }

    /// Factors of columns in f32; columns that pad rows have none.
    fn padded_factors(&self, name: &str, columns: usize) -> Result<SourcePiece, ModelError> {
        let count = self.located(name)?.entry.elements();
        if count > columns {
            let problem = format!("tensor {name} has {count} numbers for {columns} columns");
            return Err(damaged(&self.place, problem));
        }
        let factors = self.small_numbers(name, count)?;
        let padding = std::iter::repeat_n(1.0, columns - count);
        Ok(f32s(factors.into_iter().chain(padding)))
    }

    /// The numbers of a small tensor.
    ///
    /// # Errors
    /// When they are not so many, or no floats.
    pub(super) fn small_numbers(&self, name: &str, count: usize) -> Result<Vec<f32>, ModelError> {
        let place = self.located(name)?;
        let stored = place.entry.stored;
        if !stored.is_float() || place.entry.elements() != count {
            let shape = &place.entry.shape;
            let problem = format!("tensor {name} is {stored:?} {shape:?} where {count} floats are expected");
            return Err(damaged(&place.file, problem));
        }
        let bytes = self.small(place)?;
        let numbers = bytes.chunks_exact(stored.width());
        Ok(numbers
            .filter_map(|bytes| number_of(stored, bytes))
            .map(|number| number as f32)
            .collect())
    }

    /// The bytes of a small tensor.
    pub(super) fn small(&self, place: &LocatedTensor) -> Result<Vec<u8>, ModelError> {
        let ByteRange { offset, length } = place.entry.range;
        if length > MAX_STATE_BYTES {
            let problem =
                format!("{length} bytes say how one tensor is quantized; {MAX_STATE_BYTES} are read");
            return Err(damaged(&place.file, problem));
        }
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = gpu::open_regular(&place.file)?;
            file.seek(SeekFrom::Start(offset))?;
            let mut bytes = vec![0; length as usize];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(|e| damaged(&place.file, format!("it cannot be read: {e}")))
    }

    /// A tensor that contains JSON.
    pub(super) fn state<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, ModelError> {
        let Some(place) = self.tensors.get(name) else {
            return Err(damaged(&self.place, format!("tensor {name} is missing")));
        };
        let bytes = self.small(place)?;
        serde_json::from_slice(&bytes)
            .map_err(|e| damaged(&place.file, format!("tensor {name} cannot be parsed: {e}")))
    }
}
