//! Codes and scales that other programs store in the order of their kernels: where those of a row and a column are.

use serde::{Deserialize, Serialize};

/// Columns of a group of SVDQuant in int4.
pub const SVDQUANT_INT4_GROUP: usize = 64;
/// Columns of a group of SVDQuant in fp4.
pub const SVDQUANT_FP4_GROUP: usize = 16;
/// Rows and columns of which a weight of SVDQuant has a multiple: its tiles.
pub(super) const SVDQUANT_ROWS: usize = 128;
pub(super) const SVDQUANT_COLUMNS: usize = 64;

/// Type of the scales and zeros of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupNumbers {
    F16,
    Bf16,
    F32,
}

impl GroupNumbers {
    /// Bytes of a number.
    pub fn width(self) -> usize {
        match self {
            GroupNumbers::F16 | GroupNumbers::Bf16 => 2,
            GroupNumbers::F32 => 4,
        }
    }
}

/// Whether the columns of a weight are multiplied by a factor each, in f32, after their codes are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ColumnFactors {
    None,
    F32,
}

/// Codes of [`WeightFormat::W4A8`](super::WeightFormat::W4A8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum W4A8Codes {
    /// Nibbles, the low one first, that index a table of 16 values.
    Four,
    /// Each row is its nibbles as above, and two more bits of each code, four codes a byte, the low bits first. The value is the
    /// code less 32.
    Six,
}

impl W4A8Codes {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            W4A8Codes::Four => 4,
            W4A8Codes::Six => 6,
        }
    }
}

/// Codes of [`WeightFormat::Svdquant`](super::WeightFormat::Svdquant), with scales of groups of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SvdquantCodes {
    /// Integers in two's complement, and a scale in bf16 for each [`SVDQUANT_INT4_GROUP`] columns: `code * scale`.
    Int4(InputShift),
    /// Floats (e2m1), a scale in e4m3 for each [`SVDQUANT_FP4_GROUP`] columns, and one in f32 for each row: `code * (group *
    /// row)`.
    Fp4,
}

/// What is added to the inputs of a layer before they are multiplied by its codes; the low-rank product reads them without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InputShift {
    None,
    /// The opposite of GELU's least value, rounded up: Nunchaku's layers after a GELU read unsigned codes of four bits, and their
    /// bias presumes it.
    Gelu,
}

impl InputShift {
    /// The number that is added.
    pub fn number(self) -> f32 {
        match self {
            InputShift::None => 0.0,
            InputShift::Gelu => 0.171_875,
        }
    }
}

/// Order of the codes, scales and zeros of [`WeightFormat::Int4Groups`](super::WeightFormat::Int4Groups), and their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Int4Order {
    /// `(code - 8) * scale + zero`. Rows of nibbles, the low one first; scales and zeros `[groups, rows]` (ComfyUI's
    /// `awq_w4a16`).
    LessEight,
    /// As [`Int4Order::LessEight`], with codes in two's complement: `code * scale + zero` (torchao's `Int4Tensor`).
    Signed,
    /// `(code - zero) * scale`. Words of eight rows for each column ([`autoawq_nibble`]); scales `[groups, rows]`, and zeros that
    /// are packed as the codes of a column (AutoAWQ's `gemm`).
    AutoAwq,
    /// `code * scale + zero`. Words in the order of TinyChat ([`tinychat_word`]); scales and zeros `[groups, rows]`. A row is
    /// stored as row `row % (rows / parts) * parts + row / (rows / parts)`: Nunchaku interleaves the parts of a modulator.
    TinyChat { parts: u8 },
}

impl Int4Order {
    /// The number of which the rows of a weight in this order are a multiple.
    pub(super) fn multiple_of_rows(self) -> usize {
        match self {
            Int4Order::LessEight | Int4Order::Signed => 1,
            Int4Order::AutoAwq => 8,
            Int4Order::TinyChat { parts } => 4 * usize::from(parts.max(1)),
        }
    }

    /// The number of which the columns of a weight in this order are a multiple.
    pub(super) fn multiple_of_columns(self) -> usize {
        match self {
            Int4Order::LessEight | Int4Order::Signed | Int4Order::AutoAwq => 8,
            Int4Order::TinyChat { .. } => 64,
        }
    }

    /// The row where a row is stored.
    pub fn stored_row(self, row: usize, rows: usize) -> usize {
        match self {
            Int4Order::TinyChat { parts } if parts > 1 => {
                let parts = usize::from(parts);
                let in_part = (rows / parts).max(1);
                row % in_part * parts + row / in_part
            }
            _ => row,
        }
    }
}

/// Index of the nibble of a row in a line of AutoAWQ's: words of 32 bits hold eight rows in the order 0 2 4 6 1 3 5 7.
/// Source: `AWQ_ORDER` of AutoAWQ.
pub fn autoawq_nibble(row: usize) -> usize {
    const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
    row / 8 * 8 + PLACES[row % 8]
}

/// The word of 16 bits of a row and a column in TinyChat's order, and the lowest bit of its code there: four rows are
/// interleaved in lines of 64 columns, and a word holds four columns that are eight apart.
pub fn tinychat_word(row: usize, column: usize, columns: usize) -> (usize, usize) {
    let line = row / 4 * columns + column / 64 * 64;
    let word = line + row % 4 * 16 + column % 64 / 32 * 8 + column % 8;
    (word, column % 32 / 8 * 4)
}

/// Index of the nibble of a row and a column of a weight of SVDQuant: tiles of 128 rows by 64 columns in the order of the
/// registers of a tensor core's product.
pub fn svdquant_nibble(row: usize, column: usize, columns: usize) -> usize {
    let tile = row / 128 * (columns / 64) + column / 64;
    let lane = row % 128 / 16 * 32 + row % 8 * 4 + column % 32 / 8;
    let word = tile * 1024 + lane * 4 + row % 16 / 8 * 2 + column % 64 / 32;
    8 * word + column % 8
}

/// Index of a number of 16 bits of a row and a group of SVDQuant, where a row has so many `groups`: scales of int4, and, of one
/// group, biases and factors.
pub fn svdquant_number(row: usize, group: usize, groups: usize) -> usize {
    let place = row % 128 / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
    (row / 128 * groups + group) * 128 + place
}

/// Index of the scale of a row and a group of SVDQuant in fp4, where a row has so many `groups`, a multiple of four.
pub fn svdquant_fp4_scale(row: usize, group: usize, groups: usize) -> usize {
    let tile = (row / 128 * (groups / 4) + group / 4) * 512;
    tile + row % 8 * 64 + row / 8 % 4 * 16 + row % 128 / 32 * 4 + group % 4
}

/// Index of a rank and a column in the first factor of SVDQuant's low-rank product.
pub fn svdquant_down(rank: usize, column: usize, ranks: usize) -> usize {
    (column / 16 * (ranks / 16) + rank / 16) * 256 + in_fragment(rank, column)
}

/// Index of a row and a rank in the second factor of SVDQuant's low-rank product.
pub fn svdquant_up(row: usize, rank: usize, ranks: usize) -> usize {
    (row / 16 * (ranks / 16) + rank / 16) * 256 + in_fragment(row, rank)
}

/// Index in a fragment of 16 by 16 numbers.
fn in_fragment(i: usize, j: usize) -> usize {
    let lane = i % 8 * 4 + j % 8 / 2;
    lane * 8 + i % 16 / 8 * 4 + j % 16 / 8 * 2 + j % 2
}
