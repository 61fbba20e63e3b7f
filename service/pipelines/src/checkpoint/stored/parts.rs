//! The tensors of quantized weights, validated.

use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;

use gpu::{
    ByteRange, Fp8Scales, NF4_BLOCK, NF4_NESTED_BLOCK, SourcePiece, Stored, WeightFormat, WeightPart,
    rows_and_columns,
};
use serde::Deserialize;

use super::{Checkpoint, LocatedTensor, NF4_STATE, SCALES, SUPPORTED, StoredAs, StoredTensor, plain};
use crate::ModelError;
use crate::checkpoint::number_of;
use crate::files::{damaged, unsupported};

/// Maximum length of the JSON of one tensor in bytes.
const MAX_STATE_BYTES: u64 = 64 << 10;

fn zeros(bytes: usize) -> SourcePiece {
    SourcePiece::Inline(vec![0; bytes].into())
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

    pub(super) fn nf4(&self, name: &str, place: &LocatedTensor) -> Result<StoredTensor, ModelError> {
        #[derive(Deserialize)]
        struct State {
            quant_type: String,
            blocksize: usize,
            shape: Vec<usize>,
            nested_blocksize: Option<usize>,
            nested_offset: Option<f64>,
        }
        let state_name = format!("{name}{NF4_STATE}");
        let State {
            quant_type,
            blocksize,
            shape,
            nested_blocksize,
            nested_offset,
        } = self.state(&state_name)?;
        if quant_type != "nf4" || blocksize != NF4_BLOCK {
            let problem = format!(
                "tensor {name} is {quant_type} in blocks of {blocksize}; nf4 in blocks of {NF4_BLOCK} is read"
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
        let format = match nested_offset {
            None => WeightFormat::Nf4,
            Some(_) => WeightFormat::Nf4Double,
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
                WeightPart::Scales if format == WeightFormat::Nf4Double => of(".absmax", Stored::U8),
                WeightPart::Scales => of(".absmax", Stored::F32),
                WeightPart::Codes => Ok(place.piece()),
                WeightPart::Padding => Ok(zeros(range.len())),
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
        Ok(StoredTensor {
            held: StoredAs::Quantized(WeightFormat::Int8),
            parts: vec![
                self.part(name, &format!("{layer}.SCB"), Stored::F32, rows)?,
                place.piece(),
            ],
            ..plain(name, place)
        })
    }

    pub(super) fn fp8(
        &self,
        name: &str,
        place: &LocatedTensor,
        scales: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        let (rows, columns) = rows_and_columns(&place.entry.shape);
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
        let format = WeightFormat::Fp8(held);
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

    /// The bytes of a small tensor.
    fn small(&self, place: &LocatedTensor) -> Result<Vec<u8>, ModelError> {
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
