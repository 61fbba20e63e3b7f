//! Codes in groups of columns with scales and zeros, codes in the order of other programs' kernels, and factors of columns.

use gpu::{
    GroupNumbers, Int4Order, SVDQUANT_FP4_GROUP, SVDQUANT_INT4_GROUP, SvdquantCodes, autoawq_nibble,
    e2m1_to_f32, e4m3_to_f32, svdquant_down, svdquant_fp4_scale, svdquant_nibble, svdquant_number,
    svdquant_up, tinychat_word,
};
use half::{bf16, f16};

use super::blocks::{low_first, signed_nibble};
use super::{ReadCodes, f32_at};

/// The number of this type at an index of unaligned bytes.
fn number_at(numbers: GroupNumbers, bytes: &[u8], index: usize) -> f32 {
    let two = |index: usize| [bytes[2 * index], bytes[2 * index + 1]];
    match numbers {
        GroupNumbers::F16 => f16::from_le_bytes(two(index)).to_f32(),
        GroupNumbers::Bf16 => bf16::from_le_bytes(two(index)).to_f32(),
        GroupNumbers::F32 => f32_at(bytes, index),
    }
}

/// The parts of a weight in groups of columns.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
    pub(super) numbers: GroupNumbers,
    pub(super) scales: &'a [u8],
    pub(super) zeros: &'a [u8],
    pub(super) codes: &'a [u8],
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Columns of a group.
    pub(super) group: usize,
}

/// Nibbles with a scale and a zero for each group ([`Int4Order`] says what they are).
pub(super) struct Int4Groups<'a> {
    pub(super) order: Int4Order,
    pub(super) of: Groups<'a>,
}

impl ReadCodes for Int4Groups<'_> {
    // Groups are multiples of eight columns, and so are pieces.
    fn read(&self, first: usize, out: &mut [f32]) {
        let Groups {
            numbers,
            scales,
            zeros,
            codes,
            rows,
            columns,
            group,
        } = self.of;
        for (eight, out) in out.chunks_mut(8).enumerate() {
            let at = first + 8 * eight;
            let (row, column) = (at / columns, at % columns);
            let row = self.order.stored_row(row, rows);
            let of_group = column / group * rows;
            let scale = number_at(numbers, scales, of_group + row);
            let zero = match self.order {
                Int4Order::AutoAwq => f32::from(low_first(zeros, of_group + autoawq_nibble(row))),
                _ => number_at(numbers, zeros, of_group + row),
            };
            for (column, out) in (column..).zip(out) {
                let at = row * columns + column;
                *out = match self.order {
                    Int4Order::LessEight => f32::from(low_first(codes, at) as i8 - 8) * scale + zero,
                    Int4Order::Signed => signed_nibble(codes, at) * scale + zero,
                    Int4Order::AutoAwq => {
                        let code = low_first(codes, column * rows + autoawq_nibble(row));
                        (f32::from(code) - zero) * scale
                    }
                    Int4Order::TinyChat { .. } => {
                        let (word, shift) = tinychat_word(row, column, columns);
                        let code = low_first(codes, 4 * word + shift / 4);
                        f32::from(code) * scale + zero
                    }
                };
            }
        }
    }
}

/// `(code - zero) * scale` with signed bytes; scales and zeros row by row.
pub(super) struct Int8Groups<'a>(pub(super) Groups<'a>);

impl ReadCodes for Int8Groups<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let of = &self.0;
        for (at, out) in (first..).zip(out) {
            let group = at / of.group;
            let code = f32::from(of.codes[at] as i8) - f32::from(of.zeros[group] as i8);
            *out = code * number_at(of.numbers, of.scales, group);
        }
    }
}

/// A weight whose columns are multiplied by a factor each after they are read.
pub(super) struct ByColumns<'a, T> {
    read: T,
    /// In f32; empty where there are none.
    factors: &'a [u8],
    columns: usize,
}

impl<'a, T> ByColumns<'a, T> {
    pub(super) fn new(read: T, factors: &'a [u8], columns: usize) -> ByColumns<'a, T> {
        ByColumns {
            read,
            factors,
            columns,
        }
    }
}

impl<T: ReadCodes> ReadCodes for ByColumns<'_, T> {
    fn read(&self, first: usize, out: &mut [f32]) {
        self.read.read(first, out);
        if !self.factors.is_empty() {
            for (at, out) in (first..).zip(out) {
                *out *= f32_at(self.factors, at % self.columns);
            }
        }
    }
}

/// The codes of a weight of SVDQuant by their scales.
pub(super) struct SvdquantNibbles<'a> {
    pub(super) kind: SvdquantCodes,
    /// Of rows, in fp4; of groups, in int4.
    pub(super) scales: &'a [u8],
    /// Of groups, in fp4.
    pub(super) blocks: &'a [u8],
    pub(super) codes: &'a [u8],
    pub(super) columns: usize,
}

impl ReadCodes for SvdquantNibbles<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let columns = self.columns;
        for (eight, out) in out.chunks_mut(8).enumerate() {
            let at = first + 8 * eight;
            let (row, column) = (at / columns, at % columns);
            let nibbles = svdquant_nibble(row, column, columns)..;
            match self.kind {
                SvdquantCodes::Int4(_) => {
                    let group =
                        svdquant_number(row, column / SVDQUANT_INT4_GROUP, columns / SVDQUANT_INT4_GROUP);
                    let scale = number_at(GroupNumbers::Bf16, self.scales, group);
                    for (nibble, out) in nibbles.zip(out) {
                        *out = signed_nibble(self.codes, nibble) * scale;
                    }
                }
                SvdquantCodes::Fp4 => {
                    let group =
                        svdquant_fp4_scale(row, column / SVDQUANT_FP4_GROUP, columns / SVDQUANT_FP4_GROUP);
                    let scale = e4m3_to_f32(self.blocks[group]) * f32_at(self.scales, row);
                    for (nibble, out) in nibbles.zip(out) {
                        *out = e2m1_to_f32(low_first(self.codes, nibble)) * scale;
                    }
                }
            }
        }
    }
}

/// A weight to which the product of two factors in bf16 is added, in the order of SVDQuant. The sum of a number's products is
/// taken from the first rank to the last.
pub(super) struct WithLowRank<T> {
    read: T,
    /// `[ranks, columns]`.
    down: Vec<f32>,
    /// `[rows, ranks]`.
    up: Vec<f32>,
    ranks: usize,
    columns: usize,
}

impl<T> WithLowRank<T> {
    /// `factors` are the first and the second.
    pub(super) fn new(
        read: T,
        (down, up): (&[u8], &[u8]),
        ranks: usize,
        (rows, columns): (usize, usize),
    ) -> WithLowRank<T> {
        let of = |bytes: &[u8], index: usize| number_at(GroupNumbers::Bf16, bytes, index);
        let of_down = |at: usize| of(down, svdquant_down(at / columns, at % columns, ranks));
        let of_up = |at: usize| of(up, svdquant_up(at / ranks, at % ranks, ranks));
        WithLowRank {
            read,
            down: (0..ranks * columns).map(of_down).collect(),
            up: (0..rows * ranks).map(of_up).collect(),
            ranks,
            columns,
        }
    }
}

impl<T: ReadCodes> ReadCodes for WithLowRank<T> {
    fn read(&self, first: usize, out: &mut [f32]) {
        self.read.read(first, out);
        let mut at = first;
        let mut rest = out;
        while !rest.is_empty() {
            let (row, column) = (at / self.columns, at % self.columns);
            let count = (self.columns - column).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            let mut sums = vec![0.0f32; count];
            for rank in 0..self.ranks {
                let up = self.up[row * self.ranks + rank];
                let down = &self.down[rank * self.columns + column..][..count];
                for (sum, down) in sums.iter_mut().zip(down) {
                    *sum += up * down;
                }
            }
            for (out, sum) in now.iter_mut().zip(sums) {
                *out += sum;
            }
            (rest, at) = (later, at + count);
        }
    }
}
