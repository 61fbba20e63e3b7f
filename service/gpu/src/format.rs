//! Memory layout of quantized weights. A quantized weight is plain bytes: scales first, then codes, in one allocation
//! of its component's pool. The bytes on the card and in a kept copy are the same; the bytes of a checkpoint that is
//! quantized already are taken over unchanged, piece after piece.
//!
//! A weight of any shape is treated as a matrix: the first dimension is its rows (output channels), all others
//! together its columns.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use residency::Bytes;
use serde::{Deserialize, Serialize};

/// Block size of nf4: numbers that share a scale.
pub const NF4_BLOCK: usize = 64;
/// Block size of the nested scales of nf4-double.
pub const NF4_NESTED_BLOCK: usize = 256;
/// Step of int8, 1/127, as bitsandbytes rounds it: a value is `code * absmax * INT8_STEP`.
pub const INT8_STEP: f32 = 7.874_016e-3;

/// Format of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightFormat {
    /// Signed bytes, and an absolute maximum in f32 for each row: `code * absmax * INT8_STEP`.
    Int8,
    /// Floats of 8 bits (1 sign, 4 exponent, 3 mantissa), with scales in f32: `code * scale`.
    Fp8(Fp8Scales),
    /// 4-bit indices into a table of 16 values, high nibble first, in blocks of [`NF4_BLOCK`] over the flattened
    /// weight, each with an absolute maximum in f32: `table[index] * absmax`. Source: QLoRA (Dettmers et al., 2023).
    Nf4,
    /// As [`WeightFormat::Nf4`], with the absolute maxima in 8 bits themselves, in blocks of [`NF4_NESTED_BLOCK`]:
    /// `absmax = nested_table[code] * nested_absmax + offset`.
    Nf4Double,
    /// Blocks of llama.cpp, along each row.
    Gguf(GgufType),
}

/// Granularity of the scales of an fp8 weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Scales {
    /// No scale: codes are values.
    None,
    /// One scale per tensor.
    Tensor,
    /// One scale per row.
    Rows,
}

/// Block types of llama.cpp. Source: the `gguf` Python package, `constants.py` and `quants.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum GgufType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// A part of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightPart {
    /// nf4: 16 values in f32.
    Table,
    /// nf4-double: 256 values in f32.
    NestedTable,
    /// nf4-double: one f32.
    Offset,
    /// nf4-double: one f32 per [`NF4_NESTED_BLOCK`] blocks.
    NestedAbsmax,
    /// Scales, per block, row or tensor: f32 (u8 in nf4-double).
    Scales,
    /// Zero bytes, unread: they align codes after a single scale to 16 bytes.
    Padding,
    /// The codes, or the blocks of GGUF.
    Codes,
}

impl GgufType {
    /// All types.
    pub const ALL: [GgufType; 10] = [
        GgufType::Q4_0,
        GgufType::Q4_1,
        GgufType::Q5_0,
        GgufType::Q5_1,
        GgufType::Q8_0,
        GgufType::Q2K,
        GgufType::Q3K,
        GgufType::Q4K,
        GgufType::Q5K,
        GgufType::Q6K,
    ];

    /// Block size in numbers and in bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            GgufType::Q4_0 => (32, 18),
            GgufType::Q4_1 => (32, 20),
            GgufType::Q5_0 => (32, 22),
            GgufType::Q5_1 => (32, 24),
            GgufType::Q8_0 => (32, 34),
            GgufType::Q2K => (256, 84),
            GgufType::Q3K => (256, 110),
            GgufType::Q4K => (256, 144),
            GgufType::Q5K => (256, 176),
            GgufType::Q6K => (256, 210),
        }
    }

    /// The type's name in llama.cpp: `Q4_K`.
    pub fn as_str(self) -> &'static str {
        match self {
            GgufType::Q4_0 => "Q4_0",
            GgufType::Q4_1 => "Q4_1",
            GgufType::Q5_0 => "Q5_0",
            GgufType::Q5_1 => "Q5_1",
            GgufType::Q8_0 => "Q8_0",
            GgufType::Q2K => "Q2_K",
            GgufType::Q3K => "Q3_K",
            GgufType::Q4K => "Q4_K",
            GgufType::Q5K => "Q5_K",
            GgufType::Q6K => "Q6_K",
        }
    }
}

impl WeightFormat {
    /// Formats to which a full-precision checkpoint can be quantized at load, the most accurate first.
    pub const MADE_AT_LOAD: [WeightFormat; 4] = [
        WeightFormat::Int8,
        WeightFormat::Fp8(Fp8Scales::Rows),
        WeightFormat::Nf4,
        WeightFormat::Nf4Double,
    ];

    /// The parts of a weight in order, with their byte ranges. Parts of wider numbers come first, so that each is
    /// aligned if the whole is. Codes of int8 and fp8 are aligned to 16 bytes if the row count is a multiple of 4 or
    /// all rows share one scale.
    pub fn layout(self, rows: usize, columns: usize) -> Vec<(WeightPart, Range<usize>)> {
        let numbers = rows * columns;
        let blocks = numbers.div_ceil(NF4_BLOCK);
        let parts: Vec<(WeightPart, usize)> = match self {
            WeightFormat::Int8 => vec![(WeightPart::Scales, 4 * rows), (WeightPart::Codes, numbers)],
            WeightFormat::Fp8(Fp8Scales::None) => vec![(WeightPart::Scales, 0), (WeightPart::Codes, numbers)],
            WeightFormat::Fp8(Fp8Scales::Tensor) => vec![
                (WeightPart::Scales, 4),
                (WeightPart::Padding, 12),
                (WeightPart::Codes, numbers),
            ],
            WeightFormat::Fp8(Fp8Scales::Rows) => {
                vec![(WeightPart::Scales, 4 * rows), (WeightPart::Codes, numbers)]
            }
            WeightFormat::Nf4 => vec![
                (WeightPart::Table, 4 * 16),
                (WeightPart::Scales, 4 * blocks),
                (WeightPart::Codes, numbers.div_ceil(2)),
            ],
            WeightFormat::Nf4Double => vec![
                (WeightPart::Table, 4 * 16),
                (WeightPart::NestedTable, 4 * 256),
                (WeightPart::Offset, 4),
                (WeightPart::NestedAbsmax, 4 * blocks.div_ceil(NF4_NESTED_BLOCK)),
                (WeightPart::Scales, blocks),
                (WeightPart::Codes, numbers.div_ceil(2)),
            ],
            WeightFormat::Gguf(kind) => {
                let (in_block, bytes) = kind.block();
                vec![(WeightPart::Codes, numbers / in_block * bytes)]
            }
        };
        let mut end = 0;
        let place = |(part, bytes): (WeightPart, usize)| {
            let begin = end;
            end += bytes;
            (part, begin..end)
        };
        parts.into_iter().map(place).collect()
    }

    /// Exact bytes of a weight of this shape.
    pub fn bytes(self, rows: usize, columns: usize) -> Bytes {
        let end = self
            .layout(rows, columns)
            .last()
            .map_or(0, |(_, range)| range.end);
        Bytes(end as u64)
    }

    /// Whether a weight with this many columns can have this format. Blocks of llama.cpp do not cross the end of a
    /// row.
    pub fn fits(self, columns: usize) -> bool {
        match self {
            WeightFormat::Gguf(kind) => columns.is_multiple_of(kind.block().0),
            WeightFormat::Int8 | WeightFormat::Fp8(_) | WeightFormat::Nf4 | WeightFormat::Nf4Double => true,
        }
    }
}

/// Decodes E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, 0x7F is NaN.
///
/// Source: FP8 Formats for Deep Learning (Micikevicius et al., 2022), E4M3.
pub fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits(((exponent - 7 + 127) as u32) << 23),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Rows and columns of a weight of this shape. Without rows the column count saturates at `usize::MAX`.
pub fn rows_and_columns(shape: &[usize]) -> (usize, usize) {
    match shape.split_first() {
        Some((rows, rest)) => (*rows, rest.iter().fold(1, |all: usize, &n| all.saturating_mul(n))),
        None => (1, 1),
    }
}

impl fmt::Display for WeightFormat {
    /// The requested name (`int8`, `fp8`, `nf4`, `nf4-double`), or the stored one (`fp8-scaled`, `Q4_K`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::Int8 => "int8",
            WeightFormat::Fp8(Fp8Scales::Rows) => "fp8",
            WeightFormat::Fp8(Fp8Scales::Tensor) => "fp8-scaled",
            WeightFormat::Fp8(Fp8Scales::None) => "fp8-unscaled",
            WeightFormat::Nf4 => "nf4",
            WeightFormat::Nf4Double => "nf4-double",
            WeightFormat::Gguf(kind) => kind.as_str(),
        })
    }
}

/// Not the name of a format that can be made at load.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is none of int8, fp8, nf4, nf4-double")]
pub struct WeightFormatError {
    pub given: String,
}

impl FromStr for WeightFormat {
    type Err = WeightFormatError;

    fn from_str(text: &str) -> Result<WeightFormat, WeightFormatError> {
        WeightFormat::MADE_AT_LOAD
            .into_iter()
            .find(|format| format.to_string() == text)
            .ok_or_else(|| WeightFormatError {
                given: text.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_contiguous_and_aligned() {
        let stored = [Fp8Scales::None, Fp8Scales::Tensor].map(WeightFormat::Fp8);
        for format in WeightFormat::MADE_AT_LOAD.into_iter().chain(stored) {
            for (rows, columns) in [(1, 1), (3, 5), (64, 64), (7, 4099), (4, 33)] {
                let mut end = 0;
                for (part, range) in format.layout(rows, columns) {
                    assert_eq!(range.start, end);
                    let wide = matches!(
                        part,
                        WeightPart::Table
                            | WeightPart::NestedTable
                            | WeightPart::Offset
                            | WeightPart::NestedAbsmax
                    );
                    assert!(!wide || range.start % 4 == 0, "{format} {part:?}");
                    let by_rows = [WeightFormat::Int8, WeightFormat::Fp8(Fp8Scales::Rows)].contains(&format);
                    let is_aligned =
                        matches!(format, WeightFormat::Fp8(_)) && !by_rows || by_rows && rows % 4 == 0;
                    if part == WeightPart::Codes && is_aligned {
                        assert_eq!(range.start % 16, 0, "{format} {rows}x{columns}");
                    }
                    end = range.end;
                }
                assert_eq!(Bytes(end as u64), format.bytes(rows, columns));
            }
        }
    }

    #[test]
    fn columns_without_rows_saturate() {
        let shape = [0, usize::MAX / 2, 3];
        for format in WeightFormat::MADE_AT_LOAD {
            let (rows, columns) = rows_and_columns(&shape);
            assert_eq!(format.bytes(rows, columns), format.bytes(0, 1));
        }
    }

    #[test]
    fn format_names_round_trip() {
        for format in WeightFormat::MADE_AT_LOAD {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("int7".parse::<WeightFormat>().is_err());
    }
}
