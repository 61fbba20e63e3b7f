//! Formats with scales of blocks of columns, or of rows and columns: nvfp4, mxfp8, fp8 in blocks, and integers of four bits.

use gpu::{
    FP8_BLOCK, MXFP8_BLOCK, NVFP4_BLOCK, Nvfp4Order, ScaleOrder, W4A8Codes, W4A8Scales, e2m1_to_f32,
    e4m3_to_f32, e8m0_to_f32,
};

use super::{ReadCodes, f32_at, rows};

/// The nibble of an element, of which the low one comes first.
pub(super) fn low_first(codes: &[u8], at: usize) -> u8 {
    codes[at / 2] >> (at % 2 * 4) & 15
}

/// The value of a nibble in two's complement, of which the low one comes first.
pub(super) fn signed_nibble(codes: &[u8], at: usize) -> f32 {
    f32::from(((low_first(codes, at) << 4) as i8) >> 4)
}

/// `code * scale` with signed nibbles and a scale for each row.
pub(super) struct Int4<'a> {
    scales: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Int4<'a> {
    pub(super) fn new(scales: &'a [u8], codes: &'a [u8], columns: usize) -> Int4<'a> {
        Int4 {
            scales,
            codes,
            columns,
        }
    }
}

impl ReadCodes for Int4<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        for (at, out) in (first..).zip(out) {
            *out = signed_nibble(self.codes, at) * f32_at(self.scales, at / self.columns);
        }
    }
}

/// `clamp(round(value(code) * group scale), ±127) * row scale`, rounded to even: the grid of int8.
pub(super) struct W4A8<'a> {
    pub(super) kind: W4A8Codes,
    /// Values of codes of four bits.
    pub(super) table: [f32; 16],
    pub(super) rows: &'a [u8],
    pub(super) groups: (W4A8Scales, &'a [u8]),
    pub(super) codes: &'a [u8],
    pub(super) columns: usize,
    /// Columns of a group.
    pub(super) group: usize,
}

impl W4A8<'_> {
    /// The value of the code of a row and a column.
    fn value(&self, row: usize, column: usize) -> f32 {
        match self.kind {
            W4A8Codes::Four => self.table[usize::from(low_first(self.codes, row * self.columns + column))],
            W4A8Codes::Six => {
                let line = &self.codes[row * (self.columns / 4 * 3)..];
                let upper = line[self.columns / 2 + column / 4] >> (column % 4 * 2) & 3;
                f32::from((low_first(line, column) | upper << 4) as i8 - 32)
            }
        }
    }
}

impl ReadCodes for W4A8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        for (at, out) in (first..).zip(out) {
            let (row, column) = (at / self.columns, at % self.columns);
            let in_group = match self.groups {
                (W4A8Scales::E4M3, scales) => e4m3_to_f32(scales[at / self.group]),
                (W4A8Scales::F32, scales) => f32_at(scales, at / self.group),
            };
            let scaled = self.value(row, column) * in_group;
            let on_grid = scaled.round_ties_even().clamp(-127.0, 127.0);
            *out = on_grid * f32_at(self.rows, row);
        }
    }
}

/// `code * scale` with codes in e4m3 and a scale for each block of rows and columns.
pub(super) struct BlockFp8<'a> {
    scales: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> BlockFp8<'a> {
    pub(super) fn new(scales: &'a [u8], codes: &'a [u8], columns: usize) -> BlockFp8<'a> {
        BlockFp8 {
            scales,
            codes,
            columns,
        }
    }
}

impl ReadCodes for BlockFp8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let (values, across) = (rows::e4m3(), self.columns.div_ceil(FP8_BLOCK));
        for (at, out) in (first..).zip(out) {
            let (row, column) = (at / self.columns, at % self.columns);
            let scale = f32_at(self.scales, row / FP8_BLOCK * across + column / FP8_BLOCK);
            *out = values[usize::from(self.codes[at])] * scale;
        }
    }
}

/// `code * (block scale * tensor scale)` with codes in e2m1 and block scales in e4m3.
pub(super) struct Nvfp4<'a> {
    order: Nvfp4Order,
    scale: f32,
    blocks: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Nvfp4<'a> {
    pub(super) fn new(
        order: Nvfp4Order,
        scale: f32,
        blocks: &'a [u8],
        codes: &'a [u8],
        columns: usize,
    ) -> Nvfp4<'a> {
        Nvfp4 {
            order,
            scale,
            blocks,
            codes,
            columns,
        }
    }
}

impl ReadCodes for Nvfp4<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let across = self.columns / NVFP4_BLOCK;
        for (index, out) in out.chunks_mut(NVFP4_BLOCK).enumerate() {
            let at = first + index * NVFP4_BLOCK;
            let (row, block) = (at / self.columns, at % self.columns / NVFP4_BLOCK);
            let place = self.order.scales().place(row, block, across);
            let scale = e4m3_to_f32(self.blocks[place]) * self.scale;
            for (at, out) in (at..).zip(out) {
                let code = match self.order {
                    Nvfp4Order::TensorCores => low_first(self.codes, at ^ 1),
                    Nvfp4Order::Rows | Nvfp4Order::LowFirst => low_first(self.codes, at),
                };
                *out = e2m1_to_f32(code) * scale;
            }
        }
    }
}

/// `code * 2^(exponent - 127)` with codes in e4m3.
pub(super) struct Mxfp8<'a> {
    order: ScaleOrder,
    blocks: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Mxfp8<'a> {
    pub(super) fn new(order: ScaleOrder, blocks: &'a [u8], codes: &'a [u8], columns: usize) -> Mxfp8<'a> {
        Mxfp8 {
            order,
            blocks,
            codes,
            columns,
        }
    }
}

impl ReadCodes for Mxfp8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let (values, across) = (rows::e4m3(), self.columns / MXFP8_BLOCK);
        for (index, out) in out.chunks_mut(MXFP8_BLOCK).enumerate() {
            let at = first + index * MXFP8_BLOCK;
            let (row, block) = (at / self.columns, at % self.columns / MXFP8_BLOCK);
            let scale = e8m0_to_f32(self.blocks[self.order.place(row, block, across)]);
            for (out, &code) in out.iter_mut().zip(&self.codes[at..]) {
                *out = values[usize::from(code)] * scale;
            }
        }
    }
}
