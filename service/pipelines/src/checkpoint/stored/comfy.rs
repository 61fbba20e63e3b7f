//! Layers that are quantized as ComfyUI's files say: JSON in a tensor `X.comfy_quant`, or `_quantization_metadata` in the header of
//! the file.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{
    CheckpointFile, Int4Order, Int8Scales, MXFP8_BLOCK, Nvfp4Order, Rotation, ScaleOrder, Stored, W4A8Codes,
    W4A8Scales, WeightFormat,
};
use serde::Deserialize;

use super::groups::OfGroups;
use super::parts::Float8;
use super::{Checkpoint, LocatedTensor, SUPPORTED, StoredTensor, quantized_by};
use crate::ModelError;
use crate::files::{damaged, unsupported};

/// Suffix of the tensor that says how a layer is quantized.
pub(super) const COMFY_QUANT: &str = ".comfy_quant";

/// Columns of a group that is rotated, where nothing is said.
const ROTATED_COLUMNS: usize = 256;

/// How a layer is quantized.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ComfyLayer {
    format: String,
    #[serde(flatten)]
    options: Options,
    /// Options may be here instead.
    #[serde(default)]
    params: Option<serde_json::Value>,
}

/// Options of a format. Others say how ComfyUI multiplies, which is not read.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Options {
    convrot: Option<bool>,
    convrot_groupsize: Option<usize>,
}

impl ComfyLayer {
    fn options(&self) -> Options {
        let params = self.params.clone().unwrap_or_default();
        // What is no object is ignored, as in ComfyUI.
        let params: Options = serde_json::from_value(params).unwrap_or_default();
        Options {
            convrot: self.options.convrot.or(params.convrot),
            convrot_groupsize: self.options.convrot_groupsize.or(params.convrot_groupsize),
        }
    }

    /// The rotation of the layer. `otherwise` is whether there is one where nothing is said.
    fn rotation(&self, otherwise: bool) -> Result<Rotation, String> {
        let options = self.options();
        if !options.convrot.unwrap_or(otherwise) {
            return Ok(Rotation::None);
        }
        let columns = options.convrot_groupsize.unwrap_or(ROTATED_COLUMNS);
        Rotation::of(columns)
            .ok_or_else(|| format!("rotated by groups of {columns}, where 16, 64 and 256 are read"))
    }
}

/// The layers that the header of a file says to be quantized, by their names after `rename`. Names in the header may lack a
/// prefix of the tensors' names.
///
/// # Errors
/// When it cannot be parsed, or names a layer that is not there.
pub(super) fn layers_of_header(
    file: &CheckpointFile,
    rename: &impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, ComfyLayer>, ModelError> {
    #[derive(Deserialize)]
    struct Quantized {
        #[serde(default)]
        layers: BTreeMap<String, ComfyLayer>,
    }
    let Some(text) = file.metadata().get("_quantization_metadata") else {
        return Ok(BTreeMap::new());
    };
    let problem = |problem: String| damaged(file.path(), format!("its _quantization_metadata {problem}"));
    let Quantized { layers } =
        serde_json::from_str(text).map_err(|e| problem(format!("cannot be parsed: {e}")))?;
    let (mut found, mut there) = (BTreeMap::new(), BTreeSet::new());
    for layer in file
        .tensors()
        .filter_map(|(name, _)| name.strip_suffix(".weight"))
    {
        // The name, then what is left of it without one prefix after the other.
        let mut shorter = std::iter::successors(Some(layer), |name| Some(name.split_once('.')?.1));
        let Some((named, quantized)) = shorter.find_map(|name| layers.get_key_value(name)) else {
            continue;
        };
        there.insert(named);
        // A layer of another component of the file has no name here.
        if let Some(renamed) = rename(&format!("{layer}.weight"))
            && let Some(layer) = renamed.strip_suffix(".weight")
        {
            found.insert(layer.to_owned(), quantized.clone());
        }
    }
    match layers.keys().find(|layer| !there.contains(layer)) {
        None => Ok(found),
        Some(layer) => Err(problem(format!(
            "says how {layer} is quantized, which is not there"
        ))),
    }
}

impl Checkpoint {
    /// Adds the layers that have a tensor which says how they are quantized.
    ///
    /// # Errors
    /// When one cannot be read.
    pub(super) fn with_layers_of_tensors(mut self) -> Result<Checkpoint, ModelError> {
        let mut layers = BTreeMap::new();
        for name in self.names() {
            if let Some(layer) = name.strip_suffix(COMFY_QUANT) {
                layers.insert(layer.to_owned(), self.state(name)?);
            }
        }
        self.comfy.extend(layers);
        Ok(self)
    }

    /// The weight of a layer that is quantized in this way.
    pub(super) fn comfy_layer(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        quantized: &ComfyLayer,
    ) -> Result<StoredTensor, ModelError> {
        let shape = &place.entry.shape;
        let &[rows, stored_columns] = shape.as_slice() else {
            let problem = format!(
                "tensor {name} is {} {shape:?}; matrices are read",
                quantized.format
            );
            return Err(unsupported(&place.file, problem));
        };
        let refused = |problem: String| unsupported(&place.file, format!("tensor {name} is {problem}"));
        let is_stored_as = |kinds: &[Stored]| match kinds.contains(&place.entry.stored) {
            true => Ok(()),
            false => Err(refused(format!(
                "{} and stored as {:?}, where {kinds:?} is expected ({SUPPORTED})",
                quantized.format, place.entry.stored
            ))),
        };
        let scales = format!("{layer}.weight_scale");
        match quantized.format.as_str() {
            "float8_e4m3fn" | "float8_e5m2" => {
                let (kind, stored) = match quantized.format.as_str() {
                    "float8_e5m2" => (Float8::E5M2, Stored::F8E5M2),
                    _ => (Float8::E4M3, Stored::F8E4M3),
                };
                is_stored_as(&[stored, Stored::U8])?;
                self.fp8(name, place, kind, self.tensors.get(&scales))
            }
            "int8_tensorwise" => {
                is_stored_as(&[Stored::I8])?;
                let rotation = quantized.rotation(false).map_err(refused)?;
                let by = match self.count_of(&scales) {
                    Some(1) if rows != 1 => Int8Scales::Tensor,
                    _ => Int8Scales::Rows,
                };
                let format = WeightFormat::Int8Scaled(by, rotation);
                self.in_format(name, layer, place, [rows, stored_columns], format)
            }
            "convrot_w4a4" => {
                is_stored_as(&[Stored::I8, Stored::U8])?;
                let format = WeightFormat::Int4(quantized.rotation(true).map_err(refused)?);
                self.in_format(name, layer, place, [rows, 2 * stored_columns], format)
            }
            "asym_w4a8_int8" => {
                is_stored_as(&[Stored::I8, Stored::U8])?;
                let rotation = quantized.rotation(true).map_err(refused)?;
                let name_of_scales = format!("{layer}.weight_s_rel");
                let groups = self.count_of(&name_of_scales).filter(|groups| *groups > 0);
                let stored_as = self.tensors.get(&name_of_scales).map(|place| place.entry.stored);
                let scales = match stored_as {
                    Some(Stored::F32) => W4A8Scales::F32,
                    _ => W4A8Scales::E4M3,
                };
                // Rows of six bits are half as long again: columns in whole groups are of one of both.
                let found = [W4A8Codes::Four, W4A8Codes::Six].into_iter().find_map(|codes| {
                    let columns = stored_columns * 8 / codes.bits();
                    let group = u8::try_from((rows * columns).checked_div(groups?)?).ok()?;
                    let is_whole = rows * columns == usize::from(group) * groups?;
                    let is_known =
                        [8, 16, 32, 64].contains(&group) && (codes == W4A8Codes::Four || group >= 16);
                    (is_whole && is_known).then_some((codes, columns, group))
                });
                let Some((codes, columns, group)) = found else {
                    return Err(refused(format!(
                        "asym_w4a8_int8 in groups that are not of 8, 16, 32 or 64 codes of four bits or six: {SUPPORTED}"
                    )));
                };
                let format = WeightFormat::W4A8 {
                    group,
                    codes,
                    scales,
                    rotation,
                };
                self.in_format(name, layer, place, [rows, columns], format)
            }
            "awq_w4a16" => {
                is_stored_as(&[Stored::I8, Stored::U8])?;
                let of = OfGroups {
                    scales: ".weight_scale",
                    zeros: ".weight_zeros",
                };
                let shape = [rows, 2 * stored_columns];
                self.int4_groups(name, layer, place, (shape, Int4Order::LessEight), of)
            }
            "nvfp4" => {
                is_stored_as(&[Stored::U8])?;
                let format = WeightFormat::Nvfp4(Nvfp4Order::TensorCores, self.column_factors(layer));
                self.in_format(name, layer, place, [rows, 2 * stored_columns], format)
            }
            "mxfp8" => {
                is_stored_as(&[Stored::F8E4M3, Stored::U8])?;
                if !stored_columns.is_multiple_of(MXFP8_BLOCK) {
                    return Err(refused(format!("mxfp8 in rows of {stored_columns}")));
                }
                let format = WeightFormat::Mxfp8(ScaleOrder::TensorCores);
                self.in_format(name, layer, place, [rows, stored_columns], format)
            }
            other => Err(unsupported(&place.file, quantized_by(other))),
        }
    }

    /// Elements of a tensor.
    fn count_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|place| place.entry.elements())
    }
}
