//! Layers of Nunchaku's files: SVDQuant in four bits, and the modulators beside it, in AWQ.
//!
//! Two parts of a layer are stored in another way than other programs store them: biases of SVDQuant are in the order of its
//! kernels, and those of modulators have the rows of [`Int4Order::TinyChat`](gpu::Int4Order) and 1 added to what scales. They are
//! read when the file is opened, and put into place.

use gpu::{
    InputShift, SVDQUANT_INT4_GROUP, SourcePiece, Stored, SvdquantCodes, WeightFormat, WeightPart,
    svdquant_number,
};

use super::groups::parts_of_modulator;
use super::parts::f32s;
use super::{Checkpoint, LocatedTensor, StoredAs, StoredTensor, plain, quantized_by};
use crate::ModelError;
use crate::files::{damaged, unsupported};

/// Names of the parts of a layer in newer files, and in those of FLUX.1.
const SMOOTH: [&str; 2] = [".smooth_factor", ".smooth"];
const DOWN: [&str; 2] = [".proj_down", ".lora_down"];
const UP: [&str; 2] = [".proj_up", ".lora_up"];

/// Ends of the names of layers that read what a GELU gives.
const AFTER_GELU: [&str; 6] = [
    "mlp_fc2",
    "mlp_context_fc2",
    ".ff.net.2",
    ".ff_context.net.2",
    ".img_mlp.net.2",
    ".txt_mlp.net.2",
];

impl Checkpoint {
    /// Whether a layer is in SVDQuant.
    pub(super) fn is_svdquant(&self, layer: &str) -> bool {
        self.has(&format!("{layer}.wscales")) && !self.has(&format!("{layer}.wzeros"))
    }

    /// A layer of SVDQuant: `X.qweight`, its scales, the factors of the columns and those of the low-rank product.
    pub(super) fn svdquant(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        let &[rows, bytes] = place.entry.shape.as_slice() else {
            return Err(unsupported(
                &place.file,
                quantized_by("SVDQuant in tiles of its own"),
            ));
        };
        if !matches!(place.entry.stored, Stored::I8 | Stored::U8) {
            return Err(unsupported(&place.file, quantized_by("SVDQuant in words")));
        }
        let columns = 2 * bytes;
        let of = |names: [&str; 2]| {
            let names = names.map(|behind| format!("{layer}{behind}"));
            let found = names.iter().find(|name| self.has(name));
            found.unwrap_or(&names[0]).clone()
        };
        let (smooth, down, up) = (of(SMOOTH), of(DOWN), of(UP));
        let scales = format!("{layer}.wscales");
        let codes = match self.located(&scales)?.entry.stored {
            Stored::Bf16 if AFTER_GELU.iter().any(|end| layer.ends_with(end)) => {
                SvdquantCodes::Int4(InputShift::Gelu)
            }
            Stored::Bf16 => SvdquantCodes::Int4(InputShift::None),
            Stored::F8E4M3 => SvdquantCodes::Fp4,
            other => {
                let problem = format!("tensor {scales} is {other:?}; BF16 (int4) and F8_E4M3 (fp4) are read");
                return Err(unsupported(&place.file, problem));
            }
        };
        let [_, rank] = self.matrix(&down)?;
        let Ok(rank) = u16::try_from(rank) else {
            return Err(damaged(
                &place.file,
                format!("tensor {down} has a rank of {rank}"),
            ));
        };
        let format = WeightFormat::Svdquant { codes, rank };
        self.check_parts(name, layer, place, format)?;
        self.in_parts(name, place, [rows, columns], format, |part, bytes| {
            match (codes, part) {
                (_, WeightPart::ColumnFactors) => {
                    let smooth = self.in_tiles(&smooth, columns)?;
                    Ok(f32s(smooth.into_iter().map(|factor| 1.0 / factor)))
                }
                (SvdquantCodes::Int4(_), WeightPart::Scales) => {
                    self.bytes_of(name, &scales, &[Stored::Bf16], bytes)
                }
                (SvdquantCodes::Fp4, WeightPart::Scales) => self.row_factors(layer, rows),
                (_, WeightPart::BlockScales) => self.bytes_of(name, &scales, &[Stored::F8E4M3], bytes),
                (_, WeightPart::LowRankDown) => self.bytes_of(name, &down, &[Stored::Bf16], bytes),
                (_, WeightPart::LowRankUp) => self.bytes_of(name, &up, &[Stored::Bf16], bytes),
                (_, other) => self.no_part(place, format, other),
            }
        })
    }

    /// The factors of the rows in fp4: those of channels by that of the tensor, each 1 where it is missing.
    fn row_factors(&self, layer: &str, rows: usize) -> Result<SourcePiece, ModelError> {
        let (channels, tensor) = (format!("{layer}.wcscales"), format!("{layer}.wtscale"));
        let mut factors = match self.has(&channels) {
            true => self.in_tiles(&channels, rows)?,
            false => vec![1.0; rows],
        };
        if self.has(&tensor) {
            let of_tensor = self.small_numbers(&tensor, 1)?;
            for factor in &mut factors {
                *factor *= of_tensor[0];
            }
        }
        Ok(f32s(factors))
    }

    /// Numbers in the order of the kernels, a number for each row or column, put into place.
    fn in_tiles(&self, name: &str, count: usize) -> Result<Vec<f32>, ModelError> {
        let stored = self.small_numbers(name, count)?;
        if !count.is_multiple_of(2 * SVDQUANT_INT4_GROUP) {
            let problem = format!("tensor {name} has {count} numbers, which are no whole tiles of 128");
            return Err(damaged(&self.place, problem));
        }
        Ok((0..count).map(|at| stored[svdquant_number(at, 0, 1)]).collect())
    }

    /// The bias of a layer of Nunchaku's; `None` if the bias of this layer is stored as others are.
    pub(super) fn bias_of_nunchaku(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
    ) -> Result<Option<StoredTensor>, ModelError> {
        let count = place.entry.elements();
        let numbers = match (
            self.is_svdquant(layer),
            self.tensors.get(&format!("{layer}.weight")),
        ) {
            (true, _) => self.in_tiles(name, count)?,
            (false, Some(weight)) if self.has(&format!("{layer}.wzeros")) => {
                let columns = weight.entry.shape.get(1).map_or(0, |words| 2 * words);
                let parts = usize::from(parts_of_modulator(count, columns));
                if parts == 1 {
                    return Ok(None);
                }
                let stored = self.small_numbers(name, count)?;
                let in_part = count / parts;
                let number = |row: usize| {
                    let (part, channel) = (row / in_part, row % in_part);
                    // Shift, scale, gate: the scale is stored as the factor.
                    let added = if part % 3 == 1 { 1.0 } else { 0.0 };
                    stored[channel * parts + part] - added
                };
                (0..count).map(number).collect()
            }
            _ => return Ok(None),
        };
        Ok(Some(StoredTensor {
            held: StoredAs::Plain(Stored::F32),
            parts: vec![f32s(numbers)],
            ..plain(name, place)
        }))
    }
}
