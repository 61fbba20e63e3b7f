//! Quantization of full-precision weights, at load.
//!
//! All arithmetic is IEEE single precision, each operation rounded by itself (Rust fuses none), so that every machine
//! and every card produces the same bytes. A run of numbers that shares a scale is called a unit: a row of int8 and
//! fp8, a block of [`NF4_BLOCK`] numbers of nf4.

use crate::format::{Fp8Scales, Int8Scales, NF4_BLOCK, NF4_NESTED_BLOCK, Rotation, WeightFormat, WeightPart};

/// The 16 values of nf4: quantiles of a normal distribution, scaled to -1..1, with an exact 0.
///
/// Source: QLoRA (Dettmers et al., 2023), appendix E.
const NF4_TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Midpoints between adjacent values of the table: a number above the midpoint rounds up.
const NF4_MIDPOINTS: [f32; 15] = midpoints(&NF4_TABLE);

static NESTED_TABLE: [f32; 256] = make_nested_table();

static NESTED_MIDPOINTS: [f32; 255] = midpoints(&NESTED_TABLE);

/// The largest value of e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// Partial sums of the mean of absolute maxima: the thread count of the kernel that computes the same sum on a card.
const MEAN_LANES: usize = 256;

/// Why numbers cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantizeError {
    /// A number is NaN or infinite.
    #[error("a number is not finite and cannot be quantized: load the weight in full precision")]
    NotFinite,
    /// A format that can be read and not made.
    #[error(
        "{0} is read as it is stored and not made at load: choose one of int8-convrot, int8, fp8, nf4, nf4-double"
    )]
    NotMadeAtLoad(WeightFormat),
    /// The number count does not match the shape.
    #[error("{given} numbers for {rows} rows of {columns}: give as many as the shape has")]
    Count {
        given: usize,
        rows: usize,
        columns: usize,
    },
}

/// A number that is NaN or infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotFinite;

impl From<NotFinite> for QuantizeError {
    fn from(_: NotFinite) -> QuantizeError {
        QuantizeError::NotFinite
    }
}

/// The table of nf4: code `i` means `nf4_table()[i] * absmax`.
pub fn nf4_table() -> &'static [f32; 16] {
    &NF4_TABLE
}

/// The table of absolute maxima in nf4 with double quantization, ascending: bitsandbytes' signed dynamic map of 8 bits.
///
/// Source: 8-bit Optimizers via Block-wise Quantization (Dettmers et al., 2021), dynamic tree quantization.
pub fn nested_table() -> &'static [f32; 256] {
    &NESTED_TABLE
}

/// For each power of ten from 1e-6 to 1, the midpoints of 1, 2, 4, .. 64 equal parts of 0.1..1 times that power, with
/// both signs; and 0, and 1. Bit-identical to PyTorch's `linspace` as bitsandbytes uses it: the limits of parts are
/// computed from the nearer end, each rounded once.
const fn make_nested_table() -> [f32; 256] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut table = [0.0; 256];
    let (mut power, mut i) = (0, 0);
    while power < POWERS.len() {
        let parts = 1 << power;
        let mut part = 0;
        while part < parts {
            let middle = (part_limit(part, parts) + part_limit(part + 1, parts)) / 2.0;
            let value = POWERS[power] * middle;
            table[126 - i] = -value;
            table[128 + i] = value;
            (part, i) = (part + 1, i + 1);
        }
        power += 1;
    }
    table[255] = 1.0;
    table
}

/// Lower limit of one of `parts` equal parts of 0.1..1.
const fn part_limit(part: usize, parts: usize) -> f32 {
    const FIRST: f32 = 0.1;
    let step = ((1.0 - FIRST) / parts as f32) as f64;
    if part < parts.div_ceil(2) {
        (FIRST as f64 + step * part as f64) as f32
    } else {
        (1.0 - step * (parts - part) as f64) as f32
    }
}

/// Quantizes a weight of `rows` times `columns` numbers, row-major, into the bytes of its format
/// ([`WeightFormat::layout`]).
///
/// # Errors
/// [`QuantizeError`].
pub fn quantize(
    format: WeightFormat,
    numbers: &[f32],
    rows: usize,
    columns: usize,
) -> Result<Vec<u8>, QuantizeError> {
    let unit = unit(format, columns).ok_or(QuantizeError::NotMadeAtLoad(format))?;
    if rows.checked_mul(columns) != Some(numbers.len()) {
        let given = numbers.len();
        return Err(QuantizeError::Count { given, rows, columns });
    }
    let mut bytes = vec![0; format.bytes(rows, columns).0 as usize];
    let parts = Parts::of(&mut bytes, format, rows, columns);
    let mut scales = vec![0.0; numbers.len().div_ceil(unit)];
    make_codes(format, unit, numbers, &mut scales, parts.codes)?;
    match parts.scales {
        Scales::Plain(to) => write_f32s(to, &scales),
        Scales::Nested(nested) => nested.fill(scales),
    }
    Ok(bytes)
}

/// Unit size: how many numbers share a scale, at least 1. `None` for a format that is not made at load.
pub(crate) fn unit(format: WeightFormat, columns: usize) -> Option<usize> {
    match format {
        WeightFormat::Int8
        | WeightFormat::Int8Scaled(Int8Scales::Rows, _)
        | WeightFormat::Fp8(Fp8Scales::Rows) => Some(columns.max(1)),
        WeightFormat::Nf4 | WeightFormat::Nf4Double => Some(NF4_BLOCK),
        _ => None,
    }
}

/// Bytes of the codes of `numbers` numbers.
pub(crate) fn code_bytes(format: WeightFormat, numbers: usize) -> usize {
    match format {
        WeightFormat::Nf4 | WeightFormat::Nf4Double => numbers.div_ceil(2),
        _ => numbers,
    }
}

/// The bytes of a weight under construction, split into its parts. Tables are filled in already.
pub(crate) struct Parts<'a> {
    pub(crate) scales: Scales<'a>,
    pub(crate) codes: &'a mut [u8],
}

/// Destination of scales.
pub(crate) enum Scales<'a> {
    /// Stored as they are: f32, one per unit.
    Plain(&'a mut [u8]),
    /// Quantized themselves, once all are known.
    Nested(Nested<'a>),
}

/// Destination of the nested scales of nf4-double.
pub(crate) struct Nested<'a> {
    offset: &'a mut [u8],
    absmax: &'a mut [u8],
    codes: &'a mut [u8],
}

impl<'a> Parts<'a> {
    /// Splits the bytes of a weight into its parts, and fills in its tables.
    pub(crate) fn of(bytes: &'a mut [u8], format: WeightFormat, rows: usize, columns: usize) -> Parts<'a> {
        let mut rest = bytes;
        let (mut offset, mut nested): (&mut [u8], &mut [u8]) = (&mut [], &mut []);
        let (mut scales, mut codes): (&mut [u8], &mut [u8]) = (&mut [], &mut []);
        for (part, range) in format.layout(rows, columns) {
            let (bytes, behind) = rest.split_at_mut(range.len());
            rest = behind;
            match part {
                WeightPart::Table => write_f32s(bytes, nf4_table()),
                WeightPart::NestedTable => write_f32s(bytes, nested_table()),
                WeightPart::Offset => offset = bytes,
                WeightPart::NestedAbsmax => nested = bytes,
                WeightPart::Scales => scales = bytes,
                WeightPart::Padding
                | WeightPart::BlockScales
                | WeightPart::Zeros
                | WeightPart::ColumnFactors
                | WeightPart::LowRankDown
                | WeightPart::LowRankUp
                | WeightPart::MadeScales
                | WeightPart::MadeFlag => bytes.fill(0),
                WeightPart::Codes => codes = bytes,
            }
        }
        let scales = match format {
            WeightFormat::Nf4Double => Scales::Nested(Nested {
                offset,
                absmax: nested,
                codes: scales,
            }),
            _ => Scales::Plain(scales),
        };
        Parts { scales, codes }
    }
}

/// Writes numbers as little-endian bytes.
pub(crate) fn write_f32s(to: &mut [u8], numbers: &[f32]) {
    for (to, number) in to.chunks_exact_mut(4).zip(numbers) {
        to.copy_from_slice(&number.to_le_bytes());
    }
}

impl Nested<'_> {
    /// Quantizes the absolute maxima of all blocks of a weight, in order.
    pub(crate) fn fill(self, mut absmax: Vec<f32>) {
        let offset = mean(&absmax);
        self.offset.copy_from_slice(&offset.to_le_bytes());
        for scale in &mut absmax {
            *scale -= offset;
        }
        let blocks = absmax.chunks(NF4_NESTED_BLOCK);
        let codes = self.codes.chunks_mut(NF4_NESTED_BLOCK);
        for ((block, codes), to) in blocks.zip(codes).zip(self.absmax.chunks_exact_mut(4)) {
            let nested = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            to.copy_from_slice(&nested.to_le_bytes());
            // All are 0 then, and 0 / 1 is the wanted result.
            let divisor = if nested == 0.0 { 1.0 } else { nested };
            for (code, centred) in codes.iter_mut().zip(block) {
                *code = midpoints_below(&NESTED_MIDPOINTS, centred / divisor);
            }
        }
    }
}

/// Mean in f64, summed in the order of the card's kernel; 0 of nothing.
fn mean(numbers: &[f32]) -> f32 {
    if numbers.is_empty() {
        return 0.0;
    }
    let mut partial = [0.0f64; MEAN_LANES];
    for row in numbers.chunks(MEAN_LANES) {
        for (sum, x) in partial.iter_mut().zip(row) {
            *sum += f64::from(*x);
        }
    }
    let mut stride = MEAN_LANES / 2;
    while stride > 0 {
        let (lower, upper) = partial.split_at_mut(stride);
        for (sum, x) in lower.iter_mut().zip(upper) {
            *sum += *x;
        }
        stride /= 2;
    }
    (partial[0] / numbers.len() as f64) as f32
}

/// Number of midpoints (ascending) below `y`: a branch-free binary search of eight steps.
fn midpoints_below(midpoints: &[f32; 255], y: f32) -> u8 {
    let mut below = 0;
    for step in [128, 64, 32, 16, 8, 4, 2, 1] {
        below += usize::from(y > midpoints[below + step - 1]) * step;
    }
    below as u8
}

const fn midpoints<const N: usize, const M: usize>(table: &[f32; N]) -> [f32; M] {
    assert!(M + 1 == N);
    let mut midpoints = [0.0; M];
    let mut i = 0;
    while i < M {
        midpoints[i] = (table[i] + table[i + 1]) * 0.5;
        i += 1;
    }
    midpoints
}

/// Scales and codes of units; only the last unit of a weight may be short. `scales` has one element per unit, `codes`
/// has [`code_bytes`].
pub(crate) fn make_codes(
    format: WeightFormat,
    unit: usize,
    numbers: &[f32],
    scales: &mut [f32],
    codes: &mut [u8],
) -> Result<(), NotFinite> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the features that the function is compiled for.
        return unsafe { make_codes_avx2(format, unit, numbers, scales, codes) };
    }
    make_codes_here(format, unit, numbers, scales, codes)
}

/// The same arithmetic compiled for AVX2. Without fused multiply-add, which would change results.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn make_codes_avx2(
    format: WeightFormat,
    unit: usize,
    numbers: &[f32],
    scales: &mut [f32],
    codes: &mut [u8],
) -> Result<(), NotFinite> {
    make_codes_here(format, unit, numbers, scales, codes)
}

#[inline(always)]
fn make_codes_here(
    format: WeightFormat,
    unit: usize,
    numbers: &[f32],
    scales: &mut [f32],
    codes: &mut [u8],
) -> Result<(), NotFinite> {
    let units = numbers.chunks(unit).zip(scales);
    match format {
        WeightFormat::Int8 => {
            for ((row, scale), codes) in units.zip(codes.chunks_mut(unit)) {
                *scale = int8_row(row, codes)?;
            }
        }
        WeightFormat::Int8Scaled(_, rotation) => {
            let mut turned = vec![0.0; unit];
            for ((row, scale), codes) in units.zip(codes.chunks_mut(unit)) {
                let turned = &mut turned[..row.len()];
                turned.copy_from_slice(row);
                *scale = rotated_row(turned, rotation, codes)?;
            }
        }
        WeightFormat::Fp8(_) => {
            for ((row, scale), codes) in units.zip(codes.chunks_mut(unit)) {
                *scale = fp8_row(row, codes)?;
            }
        }
        _ => {
            for ((block, scale), codes) in units.zip(codes.chunks_mut(NF4_BLOCK / 2)) {
                *scale = nf4_block(block, codes)?;
            }
        }
    }
    Ok(())
}

/// The largest absolute value, computed on integers: the bits of floats without sign have the order of the floats,
/// with infinity and NaN above all numbers, and an integer maximum vectorizes.
#[inline(always)]
fn absmax(numbers: &[f32]) -> Result<f32, NotFinite> {
    let size = |x: &f32| (x.to_bits() & 0x7fff_ffff) as i32;
    let most = numbers.iter().fold(0, |most, x| size(x).max(most));
    let most = f32::from_bits(most as u32);
    if most.is_finite() {
        Ok(most)
    } else {
        Err(NotFinite)
    }
}

/// At this magnitude a float has no fraction bits: the addition rounds half to even and leaves the integer in the low bits, as
/// two's complement.
const ROUND: f32 = (3 << 22) as f32;

/// Turns the groups of a row, and returns the scale: the absolute maximum of what it becomes, over 127.
#[inline(always)]
fn rotated_row(row: &mut [f32], rotation: Rotation, codes: &mut [u8]) -> Result<f32, NotFinite> {
    rotation.turn(row);
    let scale = absmax(row)? / 127.0;
    let divisor = if scale == 0.0 { f32::INFINITY } else { scale };
    for (code, x) in codes.iter_mut().zip(row) {
        // A scale that is denormal is rounded by so much that quotients are beyond 127.
        *code = ((*x / divisor).clamp(-127.0, 127.0) + ROUND).to_bits() as u8;
    }
    Ok(scale)
}

/// Returns the scale, the absolute maximum.
#[inline(always)]
fn int8_row(row: &[f32], codes: &mut [u8]) -> Result<f32, NotFinite> {
    let absmax = absmax(row)?;
    let divisor = if absmax == 0.0 { 1.0 } else { absmax };
    for (code, x) in codes.iter_mut().zip(row) {
        *code = (x / divisor * 127.0 + ROUND).to_bits() as u8;
    }
    Ok(absmax)
}

#[inline(always)]
fn fp8_row(row: &[f32], codes: &mut [u8]) -> Result<f32, NotFinite> {
    let scale = absmax(row)? / E4M3_MAX;
    if scale == 0.0 {
        codes.fill(0);
        return Ok(scale);
    }
    for (code, x) in codes.iter_mut().zip(row) {
        *code = f32_to_e4m3(x / scale);
    }
    Ok(scale)
}

/// Rounds to e4m3, ties to even, saturating. The sign of zero is kept; what is no number becomes the largest.
#[inline(always)]
#[must_use]
pub fn f32_to_e4m3(x: f32) -> u8 {
    // The smallest normal number, 2^-6; and the number whose last place is the smallest denormal step, 2^-9.
    const NORMAL: u32 = 0x3c80_0000;
    const ROUND: f32 = 16384.0;
    let size = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    let bits = (if size > E4M3_MAX { E4M3_MAX } else { size }).to_bits();
    // 20 of 23 mantissa bits are dropped; the exponent's bias changes from 127 to 7. Wrapping sums have no branch,
    // which would prevent vectorization.
    let rounded = bits.wrapping_add(0x7_ffff).wrapping_add(bits >> 20 & 1) >> 20;
    let normal = rounded.wrapping_sub((127 - 7) << 3);
    let subnormal = (f32::from_bits(bits) + ROUND).to_bits() & 0xff;
    let code = if bits < NORMAL { subnormal } else { normal };
    (code | x.to_bits() >> 24 & 0x80) as u8
}

/// Returns the scale, the absolute maximum. A short block fills only its own codes; the second half of an odd block's
/// last byte is 0.
#[inline(always)]
fn nf4_block(block: &[f32], codes: &mut [u8]) -> Result<f32, NotFinite> {
    let mut padded = [0.0; NF4_BLOCK];
    let whole: &[f32; NF4_BLOCK] = match block.try_into() {
        Ok(block) => block,
        Err(_) => {
            padded[..block.len()].copy_from_slice(block);
            &padded
        }
    };
    let absmax = absmax(whole)?;
    let divisor = if absmax == 0.0 { 1.0 } else { absmax };
    let mut indices = [0i32; NF4_BLOCK];
    for (index, x) in indices.iter_mut().zip(whole) {
        let y = x / divisor;
        // Branch-free, so that it vectorizes to a comparison and a subtraction.
        *index = NF4_MIDPOINTS
            .iter()
            .fold(0i32, |below, m| below.wrapping_add(i32::from(y > *m)));
    }
    let mut pairs = [0u8; NF4_BLOCK / 2];
    for (pair, index) in pairs.iter_mut().zip(indices.chunks_exact(2)) {
        *pair = (index[0] << 4 | index[1]) as u8;
    }
    codes.copy_from_slice(&pairs[..codes.len()]);
    if let (1, Some(last)) = (block.len() % 2, codes.last_mut()) {
        *last &= 0xf0;
    }
    Ok(absmax)
}
