//! nf4: indices into a table of 16 values, in blocks over the flattened weight.

use gpu::{NF4_BLOCK, NF4_NESTED_BLOCK};

use super::{ReadCodes, f32_at};

/// `table[index] * absmax`, as `bitsandbytes.functional.dequantize_4bit`.
pub(super) struct Nf4<'a> {
    table: [f32; 16],
    absmax: Absmax<'a>,
    codes: &'a [u8],
}

/// Absolute maxima of blocks.
pub(super) enum Absmax<'a> {
    /// Stored in f32.
    Plain(&'a [u8]),
    /// Stored in 8 bits: `table[code] * absmax + offset`, the product rounded before the sum.
    Nested {
        table: &'a [u8],
        offset: f32,
        absmax: &'a [u8],
        codes: &'a [u8],
    },
}

impl Absmax<'_> {
    fn of(&self, block: usize) -> f32 {
        match *self {
            Absmax::Plain(absmax) => f32_at(absmax, block),
            Absmax::Nested {
                table,
                offset,
                absmax,
                codes,
            } => f32_at(table, usize::from(codes[block])) * f32_at(absmax, block / NF4_NESTED_BLOCK) + offset,
        }
    }
}

impl<'a> Nf4<'a> {
    pub(super) fn new(table: &[u8], absmax: Absmax<'a>, codes: &'a [u8]) -> Nf4<'a> {
        let table = std::array::from_fn(|index| f32_at(table, index));
        Nf4 { table, absmax, codes }
    }
}

impl ReadCodes for Nf4<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let codes = self.codes[first / 2..].chunks(NF4_BLOCK / 2);
        for ((index, out), codes) in out.chunks_mut(NF4_BLOCK).enumerate().zip(codes) {
            let absmax = self.absmax.of(first / NF4_BLOCK + index);
            // Sixteen products serve the whole block.
            let values = self.table.map(|value| value * absmax);
            let mut pairs = out.chunks_exact_mut(2);
            for (pair, code) in (&mut pairs).zip(codes) {
                pair[0] = values[usize::from(code >> 4)];
                pair[1] = values[usize::from(code & 15)];
            }
            if let ([odd], Some(code)) = (pairs.into_remainder(), codes.last()) {
                *odd = values[usize::from(code >> 4)];
            }
        }
    }
}
