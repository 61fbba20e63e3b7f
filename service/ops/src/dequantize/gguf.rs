//! Block types of llama.cpp. The order of operations is that of the `gguf` Python package (`quants.py`).

use gpu::{GgufType, e2m1_to_f32, e4m3_to_f32};
use half::f16;

use super::ReadCodes;

/// Consecutive blocks of one type.
pub(super) struct Blocks<'a> {
    numbers: usize,
    bytes: usize,
    read: fn(&[u8], &mut [f32]),
    blocks: &'a [u8],
}

impl<'a> Blocks<'a> {
    pub(super) fn new(kind: GgufType, blocks: &'a [u8]) -> Blocks<'a> {
        let (numbers, bytes) = kind.block();
        let read = match kind {
            GgufType::Q4_0 => q4_0,
            GgufType::Q4_1 => q4_1,
            GgufType::Q5_0 => q5_0,
            GgufType::Q5_1 => q5_1,
            GgufType::Q8_0 => q8_0,
            GgufType::Q2K => q2_k,
            GgufType::Q3K => q3_k,
            GgufType::Q4K => q4_k,
            GgufType::Q5K => q5_k,
            GgufType::Q6K => q6_k,
            GgufType::IQ4NL => iq4_nl,
            GgufType::IQ4XS => iq4_xs,
            GgufType::Mxfp4 => mxfp4,
            GgufType::Nvfp4 => nvfp4,
        };
        Blocks {
            numbers,
            bytes,
            read,
            blocks,
        }
    }
}

impl ReadCodes for Blocks<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let blocks = self.blocks[first / self.numbers * self.bytes..].chunks_exact(self.bytes);
        for (block, out) in blocks.zip(out.chunks_exact_mut(self.numbers)) {
            (self.read)(block, out);
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale, then 16 bytes: low nibbles are the first half, high ones the second; 8 is zero.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &code) in low.iter_mut().zip(high).zip(&block[2..18]) {
        *low = d * (i32::from(code & 15) - 8) as f32;
        *high = d * (i32::from(code >> 4) - 8) as f32;
    }
}

/// Scale, minimum, then nibbles as in [`q4_0`].
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, least) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &code) in low.iter_mut().zip(high).zip(&block[4..20]) {
        *low = d * f32::from(code & 15) + least;
        *high = d * f32::from(code >> 4) + least;
    }
}

/// The 32 codes of [`q5_0`] and [`q5_1`]: a fifth bit for each, the first one lowest, then nibbles as in [`q4_0`].
fn five_bits(codes: &[u8], out: &mut [f32], value: impl Fn(u32) -> f32) {
    let fifth = u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]);
    let (low, high) = out.split_at_mut(16);
    for (i, ((low, high), &code)) in low.iter_mut().zip(high).zip(&codes[4..20]).enumerate() {
        *low = value(u32::from(code & 15) | (fifth >> i & 1) << 4);
        *high = value(u32::from(code >> 4) | (fifth >> (i + 16) & 1) << 4);
    }
}

/// Scale, then codes of five bits; 16 is zero.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    five_bits(&block[2..], out, |code| d * (code as i32 - 16) as f32);
}

/// Scale, minimum, then codes of five bits.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, least) = (half_at(block, 0), half_at(block, 2));
    five_bits(&block[4..], out, |code| d * code as i32 as f32 + least);
}

/// Scale, then signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (out, &code) in out.iter_mut().zip(&block[2..34]) {
        *out = f32::from(code as i8) * d;
    }
}

/// 16 bytes of scale (low nibble) and minimum (high nibble) per 16 elements, 64 bytes of codes, the scale of scales
/// and that of minima. A byte has the codes of four elements, 32 apart.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (d, d_least) = (half_at(block, 80), half_at(block, 82));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let (half, shift) = (group / 8, group / 2 % 4 * 2);
        let scale = d * f32::from(block[group] & 15);
        let least = d_least * f32::from(block[group] >> 4);
        let codes = &block[16 + 32 * half + group % 2 * 16..][..16];
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(code >> shift & 3) - least;
        }
    }
}

/// 32 bytes of high bits, 64 of codes as in [`q2_k`], 12 of 6-bit scales, and the scale of scales. A byte of high
/// bits is for eight elements, 32 apart; where the bit is clear, 4 is subtracted.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 108);
    let scales = &block[96..108];
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = d * (i32::from(low | high << 4) - 32) as f32;
        let (half, shift, bit) = (group / 8, group / 2 % 4 * 2, group / 2);
        let within = group % 2 * 16;
        let codes = &block[32 + 32 * half + within..][..16];
        for ((out, &code), &mask) in out.iter_mut().zip(codes).zip(&block[within..within + 16]) {
            let missing = i32::from(!mask >> bit & 1) << 2;
            *out = scale * (i32::from(code >> shift & 3) - missing) as f32;
        }
    }
}

/// Scale and minimum of 32 elements, 6 bits each: the first four are contiguous, the upper two bits of the others are
/// above those.
fn scale_and_least(scales: &[u8], group: usize) -> (f32, f32) {
    let (scale, least) = match group {
        0..4 => (scales[group] & 63, scales[group + 4] & 63),
        _ => (
            scales[group + 4] & 15 | scales[group - 4] >> 2 & 0x30,
            scales[group + 4] >> 4 | scales[group] >> 2 & 0x30,
        ),
    };
    (f32::from(scale), f32::from(least))
}

/// The scale of scales and that of minima, 12 bytes of both, and 128 of codes: low nibbles are 32 elements, high ones
/// the next 32.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, d_least) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, least) = scale_and_least(&block[4..16], group);
        let (scale, least, shift) = (d * scale, d_least * least, group % 2 * 4);
        for (out, &code) in out.iter_mut().zip(&block[16 + group / 2 * 32..][..32]) {
            *out = scale * f32::from(code >> shift & 15) - least;
        }
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits before the codes, each for eight elements, 32 apart.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, d_least) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, least) = scale_and_least(&block[4..16], group);
        let (scale, least, shift) = (d * scale, d_least * least, group % 2 * 4);
        let codes = block[48 + group / 2 * 32..][..32].iter().zip(&block[16..48]);
        for (out, (&code, &fifth)) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(code >> shift & 15 | (fifth >> group & 1) << 4) - least;
        }
    }
}

/// 128 bytes of low nibbles, 64 of upper two bits, 16 of signed scales per 16 elements, and the scale of scales; 32
/// is zero. In each half, low nibbles are 64 elements, high ones the next 64.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(block[192 + group] as i8);
        let (half, within) = (group / 8, group % 8);
        let low = &block[64 * half + within % 4 * 16..][..16];
        let high = &block[128 + 32 * half + within % 2 * 16..][..16];
        let (low_shift, high_shift) = (within / 4 * 4, within / 2 * 2);
        for ((out, &low), &high) in out.iter_mut().zip(low).zip(high) {
            let code = low >> low_shift & 15 | (high >> high_shift & 3) << 4;
            *out = scale * (i32::from(code) - 32) as f32;
        }
    }
}

/// The values of a code of [`iq4_nl`] and [`iq4_xs`]: denser around zero.
pub(super) const IQ4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// Scale, then nibbles as in [`q4_0`] that index a table.
fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &code) in low.iter_mut().zip(high).zip(&block[2..18]) {
        *low = d * IQ4[usize::from(code & 15)];
        *high = d * IQ4[usize::from(code >> 4)];
    }
}

/// Eight groups of 32 numbers as in [`iq4_nl`], each with a scale of 6 bits less 32: the upper two bits of all first, then the
/// lower four.
fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let upper = u16::from_le_bytes([block[2], block[3]]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let high = (upper >> (2 * group) & 3) as u8;
        let scale = d * f32::from((low | high << 4) as i8 - 32);
        let (first, second) = out.split_at_mut(16);
        for ((low, high), &code) in first.iter_mut().zip(second).zip(&block[8 + 16 * group..]) {
            *low = scale * IQ4[usize::from(code & 15)];
            *high = scale * IQ4[usize::from(code >> 4)];
        }
    }
}

/// An exponent, then nibbles in e2m1 as in [`q4_0`]: `2^(exponent - 128)` by twice the value, so that no exponent overflows.
fn mxfp4(block: &[u8], out: &mut [f32]) {
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (exponent - 1) << 23,
    });
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &code) in low.iter_mut().zip(high).zip(&block[1..17]) {
        *low = d * (2.0 * e2m1_to_f32(code & 15));
        *high = d * (2.0 * e2m1_to_f32(code >> 4));
    }
}

/// Four scales in e4m3 without a sign, of which the highest is 0, then for each 16 numbers nibbles in e2m1: low ones are the
/// first eight, high ones the second.
fn nvfp4(block: &[u8], out: &mut [f32]) {
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = match block[group] & 0x7F {
            0x7F => 0.0,
            code => e4m3_to_f32(code),
        };
        let (low, high) = out.split_at_mut(8);
        for ((low, high), &code) in low.iter_mut().zip(high).zip(&block[4 + 8 * group..]) {
            *low = scale * e2m1_to_f32(code & 15);
            *high = scale * e2m1_to_f32(code >> 4);
        }
    }
}
