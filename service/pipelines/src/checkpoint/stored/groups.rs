//! Weights of four bits in groups of columns, each with a scale and a zero (AWQ): as ComfyUI, AutoAWQ and TinyChat store them.

use gpu::{GroupNumbers, Int4Order, Stored, WeightFormat, WeightPart};

use super::{Checkpoint, LocatedTensor, StoredTensor, quantized_by};
use crate::ModelError;
use crate::files::unsupported;

/// Rows of words of AutoAWQ.
const AUTOAWQ_ROWS: usize = 8;

/// The type of scales and zeros that are stored so.
pub(super) fn group_numbers(stored: Stored) -> Option<GroupNumbers> {
    match stored {
        Stored::F16 => Some(GroupNumbers::F16),
        Stored::Bf16 => Some(GroupNumbers::Bf16),
        Stored::F32 => Some(GroupNumbers::F32),
        _ => None,
    }
}

/// Suffixes of the scales and the zeros of a layer.
#[derive(Clone, Copy)]
pub(super) struct OfGroups {
    pub(super) scales: &'static str,
    pub(super) zeros: &'static str,
}

impl Checkpoint {
    /// A layer of AutoAWQ's `gemm`: `X.qweight`, `X.qzeros` and `X.scales`.
    ///
    /// # Errors
    /// When the shapes are those of another layout (GPTQ, `gemv`), or a part is missing.
    pub(super) fn autoawq(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        let of = OfGroups {
            scales: ".scales",
            zeros: ".qzeros",
        };
        let [_, rows] = self.matrix(&format!("{layer}{}", of.scales))?;
        let is_gemm = place.entry.stored == Stored::I32
            && matches!(place.entry.shape.as_slice(), &[_, words] if words * AUTOAWQ_ROWS == rows)
            && !self.has(&format!("{layer}.g_idx"));
        let &[columns, _] = place.entry.shape.as_slice() else {
            return Err(unsupported(&place.file, quantized_by("AWQ that is no matrix")));
        };
        if !is_gemm {
            return Err(unsupported(
                &place.file,
                quantized_by("GPTQ, or AWQ in another layout than gemm"),
            ));
        }
        self.int4_groups(name, layer, place, ([rows, columns], Int4Order::AutoAwq), of)
    }

    /// A layer of TinyChat, as Nunchaku stores the modulators of denoisers: `X.qweight`, `X.wscales` and `X.wzeros`.
    ///
    /// The rows of a modulator of three or six times as many rows as columns are in the order (channel, part) there; they are read
    /// in the order (part, channel).
    pub(super) fn tinychat(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
    ) -> Result<StoredTensor, ModelError> {
        let of = OfGroups {
            scales: ".wscales",
            zeros: ".wzeros",
        };
        let &[lines, words] = place.entry.shape.as_slice() else {
            return Err(unsupported(&place.file, quantized_by("AWQ that is no matrix")));
        };
        let (rows, columns) = (4 * lines, 2 * words);
        let order = Int4Order::TinyChat {
            parts: parts_of_modulator(rows, columns),
        };
        self.int4_groups(name, layer, place, ([rows, columns], order), of)
    }

    /// A weight of this shape in groups: scales, and zeros of the same shape or packed as codes, are `[groups, rows]`.
    pub(super) fn int4_groups(
        &self,
        name: &str,
        layer: &str,
        place: &LocatedTensor,
        ([rows, columns], order): ([usize; 2], Int4Order),
        of: OfGroups,
    ) -> Result<StoredTensor, ModelError> {
        let scales = format!("{layer}{}", of.scales);
        let [groups, of_rows] = self.matrix(&scales)?;
        let stored = self.tensors.get(&scales).map(|scales| scales.entry.stored);
        let numbers = stored
            .and_then(group_numbers)
            .filter(|numbers| numbers.width() == 2);
        let group = columns
            .checked_div(groups)
            .filter(|group| group * groups == columns && of_rows == rows);
        let (Some(numbers), Some(group)) = (numbers, group.and_then(|group| u16::try_from(group).ok()))
        else {
            let problem = format!(
                "scales {stored:?} [{groups}, {of_rows}] of four bits [{rows}, {columns}], where F16 or BF16 [groups, {rows}] are read"
            );
            return Err(unsupported(&place.file, format!("tensor {name} has {problem}")));
        };
        let format = WeightFormat::Int4Groups {
            order,
            group,
            numbers,
        };
        self.check_parts(name, layer, place, format)?;
        self.in_parts(name, place, [rows, columns], format, |part, bytes| match part {
            WeightPart::Scales => self.bytes_of(name, &scales, &[stored_as(numbers)], bytes),
            WeightPart::Zeros => {
                let kinds = match order {
                    Int4Order::AutoAwq => Stored::I32,
                    _ => stored_as(numbers),
                };
                self.bytes_of(name, &format!("{layer}{}", of.zeros), &[kinds], bytes)
            }
            other => self.no_part(place, format, other),
        })
    }

    /// The shape of a tensor that is a matrix.
    pub(super) fn matrix(&self, name: &str) -> Result<[usize; 2], ModelError> {
        let place = self.located(name)?;
        match place.entry.shape.as_slice() {
            &[rows, columns] => Ok([rows, columns]),
            other => {
                let problem = format!("tensor {name} is {other:?} where a matrix is expected");
                Err(crate::files::damaged(&place.file, problem))
            }
        }
    }
}

fn stored_as(numbers: GroupNumbers) -> Stored {
    match numbers {
        GroupNumbers::F16 => Stored::F16,
        GroupNumbers::Bf16 => Stored::Bf16,
        GroupNumbers::F32 => Stored::F32,
    }
}

/// How many parts the rows of a layer of Nunchaku's are interleaved of: the shifts, scales and gates of a modulator.
pub(super) fn parts_of_modulator(rows: usize, columns: usize) -> u8 {
    match rows.checked_div(columns) {
        Some(parts @ (3 | 6)) if parts * columns == rows => parts as u8,
        _ => 1,
    }
}
