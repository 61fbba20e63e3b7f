//! Formats of one byte per element with a scale per row: int8, e4m3 and e5m2.

use std::sync::LazyLock;

use gpu::{Fp8Scales, INT8_STEP, e4m3_to_f32, e5m2_to_f32};

use super::{ReadCodes, f32_at};

/// `code * absmax * INT8_STEP`, multiplied in this order, as `bitsandbytes.functional.int8_vectorwise_dequant`.
pub(super) struct Int8<'a> {
    absmax: &'a [u8],
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Int8<'a> {
    pub(super) fn new(absmax: &'a [u8], codes: &'a [u8], columns: usize) -> Int8<'a> {
        Int8 {
            absmax,
            codes,
            columns,
        }
    }
}

impl ReadCodes for Int8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        by_row(self.codes, self.columns, first, out, |row, codes, out| {
            let absmax = f32_at(self.absmax, row);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = f32::from(code as i8) * absmax * INT8_STEP;
            }
        });
    }
}

/// The values of all codes of a byte.
type Values = [f32; 256];

/// Values of E4M3.
pub(super) fn e4m3() -> &'static Values {
    static VALUES: LazyLock<Values> = LazyLock::new(|| std::array::from_fn(|code| e4m3_to_f32(code as u8)));
    &VALUES
}

/// Values of E5M2.
pub(super) fn e5m2() -> &'static Values {
    static VALUES: LazyLock<Values> = LazyLock::new(|| std::array::from_fn(|code| e5m2_to_f32(code as u8)));
    &VALUES
}

/// Values of signed bytes.
pub(super) fn int8() -> &'static Values {
    static VALUES: LazyLock<Values> =
        LazyLock::new(|| std::array::from_fn(|code| f32::from(code as u8 as i8)));
    &VALUES
}

/// `code * scale`, where a code is a byte.
pub(super) struct Fp8<'a> {
    values: &'static Values,
    /// A scale for each row, or empty for a single scale.
    scales: &'a [u8],
    scale: f32,
    codes: &'a [u8],
    columns: usize,
}

impl<'a> Fp8<'a> {
    pub(super) fn new(
        values: fn() -> &'static Values,
        which: Fp8Scales,
        scales: &'a [u8],
        codes: &'a [u8],
        columns: usize,
    ) -> Fp8<'a> {
        let (scales, scale) = match which {
            Fp8Scales::Rows => (scales, 1.0),
            Fp8Scales::Tensor => (&[][..], f32_at(scales, 0)),
            Fp8Scales::None => (&[][..], 1.0),
        };
        Fp8 {
            values: values(),
            scales,
            scale,
            codes,
            columns,
        }
    }
}

impl ReadCodes for Fp8<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let values = self.values;
        by_row(self.codes, self.columns, first, out, |row, codes, out| {
            let scale = if self.scales.is_empty() {
                self.scale
            } else {
                f32_at(self.scales, row)
            };
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = values[usize::from(code)] * scale;
            }
        });
    }
}

/// Calls `read(row, codes, out)` for each row's part of the elements from `first` on.
fn by_row(
    codes: &[u8],
    columns: usize,
    first: usize,
    mut out: &mut [f32],
    read: impl Fn(usize, &[u8], &mut [f32]),
) {
    let mut at = first;
    while !out.is_empty() {
        let row = at / columns;
        let count = ((row + 1) * columns - at).min(out.len());
        let (now, rest) = out.split_at_mut(count);
        read(row, &codes[at..at + count], now);
        (out, at) = (rest, at + count);
    }
}
