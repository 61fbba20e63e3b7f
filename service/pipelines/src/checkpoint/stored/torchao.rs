//! Weights that torchao quantized, in safetensors: the header says of each what it is, and its parts are tensors of their own.

use std::collections::BTreeMap;

use gpu::{
    CheckpointFile, ColumnFactors, GroupNumbers, Int4Order, Int8Scales, MXFP8_BLOCK, Nvfp4Order, Rotation,
    ScaleOrder, SourcePiece, Stored, WeightFormat, WeightPart,
};
use serde::Deserialize;

use super::groups::{OfGroups, group_numbers};
use super::parts::{Float8, f32s};
use super::{Checkpoint, LocatedTensor, StoredTensor, quantized_by};
use crate::ModelError;
use crate::files::{damaged, unsupported};

/// Suffixes of the parts of a layer.
pub(super) const CODES: &str = "._weight_qdata";
const SCALES: &str = "._weight_scale";
const ZEROS: &str = "._weight_zero_point";
const OF_TENSOR: &str = "._weight_per_tensor_scale";

/// What the header says of a weight.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct TorchaoWeight {
    #[serde(rename = "_type")]
    kind: String,
    #[serde(rename = "_data", default)]
    data: TorchaoOptions,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct TorchaoOptions {
    is_swizzled_scales: bool,
    elem_dtype: Option<TorchType>,
    target_dtype: Option<TorchType>,
    /// Of blocks along columns, a number or a shape.
    block_size: serde_json::Value,
}

/// A type of torch's.
#[derive(Clone, Debug, Deserialize)]
struct TorchType {
    #[serde(rename = "_data")]
    name: String,
}

/// The weights that the header of a file of torchao's describes, by their names after `rename`.
///
/// # Errors
/// When one cannot be parsed.
pub(super) fn weights_of_header(
    file: &CheckpointFile,
    rename: &impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, TorchaoWeight>, ModelError> {
    let metadata = file.metadata();
    let mut weights = BTreeMap::new();
    if !metadata.contains_key("tensor_names") {
        return Ok(weights);
    }
    for (name, text) in metadata {
        if !name.ends_with(".weight") || !text.contains("\"_type\"") {
            continue;
        }
        let weight: TorchaoWeight = serde_json::from_str(text).map_err(|e| {
            damaged(
                file.path(),
                format!("what its header says of {name} cannot be parsed: {e}"),
            )
        })?;
        if weight.kind != "Tensor"
            && let Some(name) = rename(name)
        {
            weights.insert(name, weight);
        }
    }
    Ok(weights)
}

impl Checkpoint {
    /// The weight of a layer that the header describes.
    pub(super) fn torchao_layer(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        weight: &TorchaoWeight,
    ) -> Result<StoredTensor, ModelError> {
        let shape = &place.entry.shape;
        let &[rows, stored_columns] = shape.as_slice() else {
            let problem = format!(
                "tensor {name} is torchao's {} {shape:?}; matrices are read",
                weight.kind
            );
            return Err(unsupported(&place.file, problem));
        };
        let refused = |what: &str| {
            let problem = quantized_by(&format!("torchao's {}{what}", weight.kind));
            Err(unsupported(&place.file, problem))
        };
        let scales = format!("{layer}{SCALES}");
        let order = match weight.data.is_swizzled_scales {
            true => ScaleOrder::TensorCores,
            false => ScaleOrder::Rows,
        };
        match (weight.kind.as_str(), place.entry.stored) {
            ("Float8Tensor", stored @ (Stored::F8E4M3 | Stored::F8E5M2)) => {
                let kind = match stored {
                    Stored::F8E5M2 => Float8::E5M2,
                    _ => Float8::E4M3,
                };
                self.fp8(name, place, kind, Some(self.located(&scales)?))
            }
            ("Int8Tensor" | "IntxUnpackedToInt8Tensor", Stored::I8) => {
                self.int8_groups(name, layer, place, [rows, stored_columns])
            }
            ("Int4Tensor", Stored::I8 | Stored::U8) => {
                let of = OfGroups {
                    scales: SCALES,
                    zeros: ZEROS,
                };
                let shape = [rows, 2 * stored_columns];
                self.int4_groups(name, layer, place, (shape, Int4Order::Signed), of)
            }
            ("NVFP4Tensor", Stored::U8) => {
                let nibbles = match order {
                    ScaleOrder::TensorCores => Nvfp4Order::LowFirst,
                    ScaleOrder::Rows => Nvfp4Order::Rows,
                };
                let format = WeightFormat::Nvfp4(nibbles, ColumnFactors::None);
                self.check_parts(name, layer, place, format)?;
                let of_tensor = format!("{layer}{OF_TENSOR}");
                let shape = [rows, 2 * stored_columns];
                self.in_parts(name, place, shape, format, |part, bytes| match part {
                    WeightPart::Scales if !self.has(&of_tensor) => Ok(f32s([1.0])),
                    WeightPart::Scales => self.bytes_of(name, &of_tensor, &[Stored::F32], bytes),
                    WeightPart::BlockScales => {
                        self.bytes_of(name, &scales, &[Stored::F8E4M3, Stored::U8], bytes)
                    }
                    other => self.no_part(place, format, other),
                })
            }
            ("MXTensor", Stored::F8E4M3) => {
                let is_of_blocks = weight.data.block_size.as_u64() == Some(MXFP8_BLOCK as u64);
                if !is_of_blocks || !stored_columns.is_multiple_of(MXFP8_BLOCK) {
                    return refused(" in other blocks than 32 columns");
                }
                let format = WeightFormat::Mxfp8(order);
                self.check_parts(name, layer, place, format)?;
                let shape = [rows, stored_columns];
                self.in_parts(name, place, shape, format, |part, bytes| match part {
                    WeightPart::BlockScales => {
                        self.bytes_of(name, &scales, &[Stored::F8E8M0, Stored::U8], bytes)
                    }
                    other => self.no_part(place, format, other),
                })
            }
            (_, stored) => {
                let types = [&weight.data.elem_dtype, &weight.data.target_dtype];
                let of = types.into_iter().flatten().map(|kind| kind.name.as_str()).next();
                let of = of.map(|name| format!(" of {name}")).unwrap_or_default();
                refused(&format!("{of}, stored as {stored:?}"))
            }
        }
    }

    /// Signed bytes with a scale, and a zero, for each group of columns, row or tensor.
    fn int8_groups(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        [rows, columns]: [usize; 2],
    ) -> Result<StoredTensor, ModelError> {
        let (scales, zeros) = (format!("{layer}{SCALES}"), format!("{layer}{ZEROS}"));
        let located = self.located(&scales)?;
        let (stored, count) = (located.entry.stored, located.entry.elements());
        let groups = count.checked_div(rows).filter(|groups| groups * rows == count);
        let wrong = || {
            let found = &located.entry.shape;
            let problem =
                format!("the scales of tensor {name} are {stored:?} {found:?} for [{rows}, {columns}]");
            unsupported(&place.file, quantized_by(&format!("torchao, and {problem}")))
        };
        let numbers = group_numbers(stored).ok_or_else(wrong)?;
        let by = match (count, groups) {
            (1, _) if rows != 1 => Some(Int8Scales::Tensor),
            (_, Some(1)) => Some(Int8Scales::Rows),
            _ => None,
        };
        // Weights without zeros are multiplied as integers where a card can.
        if let Some(by) = by
            && numbers == GroupNumbers::F32
            && self.is_zero(&zeros)?
        {
            let format = WeightFormat::Int8Scaled(by, Rotation::None);
            self.check_parts(name, layer, place, format)?;
            return self.in_parts(name, place, [rows, columns], format, |part, bytes| match part {
                WeightPart::Scales => self.bytes_of(name, &scales, &[Stored::F32], bytes),
                other => self.no_part(place, format, other),
            });
        }
        let groups = groups
            .filter(|groups| *groups > 0 && columns.is_multiple_of(*groups))
            .ok_or_else(wrong)?;
        let group = u32::try_from(columns / groups).map_err(|_| wrong())?;
        let format = WeightFormat::Int8Groups { group, numbers };
        self.check_parts(name, layer, place, format)?;
        self.in_parts(name, place, [rows, columns], format, |part, bytes| match part {
            WeightPart::Scales => self.bytes_of(name, &scales, &[stored], bytes),
            WeightPart::Zeros if !self.has(&zeros) => Ok(SourcePiece::Inline(vec![0; bytes].into())),
            WeightPart::Zeros => self.bytes_of(name, &zeros, &[Stored::I8], bytes),
            other => self.no_part(place, format, other),
        })
    }

    /// Whether all bytes of a tensor are zero, or it is missing.
    fn is_zero(&self, name: &str) -> Result<bool, ModelError> {
        match self.tensors.get(name) {
            None => Ok(true),
            Some(place) => Ok(self.small(place)?.iter().all(|byte| *byte == 0)),
        }
    }
}
