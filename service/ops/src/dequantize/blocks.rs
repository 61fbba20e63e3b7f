//! Formats with scales of blocks of columns, or of rows and columns: nvfp4, mxfp8, fp8 in blocks, and integers of four bits.

use gpu::{FP8_BLOCK, MXFP8_BLOCK, NVFP4_BLOCK, Nvfp4Order, e2m1_to_f32, e4m3_to_f32, e8m0_to_f32, swizzled};

use super::{ReadCodes, f32_at, rows};

/// The nibble of an element, of which the low one comes first.
fn low_first(codes: &[u8], at: usize) -> u8 {
    codes[at / 2] >> (at % 2 * 4) & 15
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
            // Sign extension of four bits.
            let code = ((low_first(self.codes, at) << 4) as i8) >> 4;
            *out = f32::from(code) * f32_at(self.scales, at / self.columns);
        }
    }
}

/// `clamp(round(table[code] * group scale), ±127) * row scale`, rounded to even: the grid of int8.
pub(super) struct W4A8<'a> {
    table: [f32; 16],
    rows: &'a [u8],
    groups: &'a [u8],
    codes: &'a [u8],
    columns: usize,
    group: usize,
}

impl<'a> W4A8<'a> {
    /// `scales` are those of rows and of groups of columns.
    pub(super) fn new(
        table: &[u8],
        (rows, groups): (&'a [u8], &'a [u8]),
        codes: &'a [u8],
        (columns, group): (usize, usize),
    ) -> W4A8<'a> {
        W4A8 {
            table: std::array::from_fn(|index| f32_at(table, index)),
            rows,
            groups,
            codes,
            columns,
            group,
        }
    }
}

impl ReadCodes for W4A8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        for (at, out) in (first..).zip(out) {
            let value = self.table[usize::from(low_first(self.codes, at))];
            let scaled = value * e4m3_to_f32(self.groups[at / self.group]);
            let on_grid = scaled.round_ties_even().clamp(-127.0, 127.0);
            *out = on_grid * f32_at(self.rows, at / self.columns);
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
            let place = match self.order {
                Nvfp4Order::TensorCores => swizzled(row, block, across),
                Nvfp4Order::Rows => row * across + block,
            };
            let scale = e4m3_to_f32(self.blocks[place]) * self.scale;
            for (at, out) in (at..).zip(out) {
                let code = match self.order {
                    Nvfp4Order::TensorCores => low_first(self.codes, at ^ 1),
                    Nvfp4Order::Rows => low_first(self.codes, at),
                };
                *out = e2m1_to_f32(code) * scale;
            }
        }
    }
}

/// `code * 2^(exponent - 127)` with codes in e4m3.
pub(super) struct Mxfp8<'a> {
    blocks: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Mxfp8<'a> {
    pub(super) fn new(blocks: &'a [u8], codes: &'a [u8], columns: usize) -> Mxfp8<'a> {
        Mxfp8 {
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
            let scale = e8m0_to_f32(self.blocks[swizzled(row, block, across)]);
            for (out, &code) in out.iter_mut().zip(&self.codes[at..]) {
                *out = values[usize::from(code)] * scale;
            }
        }
    }
}
