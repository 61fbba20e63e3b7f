use gpu::{
    ColumnFactors, FP8_BLOCK, Fp8Scales, GgufType, GroupNumbers, INT8_STEP, Int4Order, MXFP8_BLOCK,
    NF4_BLOCK, NF4_NESTED_BLOCK, NVFP4_BLOCK, Nvfp4Order, Rotation, ScaleOrder, W4A8Scales, e2m1_to_f32,
    e4m3_to_f32, e5m2_to_f32, e8m0_to_f32,
};
use proptest::prelude::*;

use super::*;
use crate::testing::{fitting_rows, fixtures, formats, least_columns, quantized, random_bytes, test_device};

/// Reference implementation, by index arithmetic over the whole weight, without blocks, rows or tasks.
fn defined(format: WeightFormat, rows: usize, columns: usize, bytes: &[u8]) -> Vec<f32> {
    let scaled = |index: usize| defined_scaled(format, rows, columns, bytes, index);
    let mut numbers: Vec<f32> = (0..rows * columns).map(scaled).collect();
    let group = format.rotation().group();
    for apart in [1, 4, 16, 64].into_iter().filter(|apart| *apart < group) {
        let before = numbers.clone();
        for (index, number) in numbers.iter_mut().enumerate() {
            let digit = index / apart % 4;
            let at = |other: usize| before[index - digit * apart + other * apart];
            let sum = (at(0) + at(1)) + (at(2) + at(3));
            *number = sum - 2.0 * at(3 - digit);
        }
    }
    let root = (group as f32).sqrt();
    numbers.iter().map(|number| number / root).collect()
}

/// The place of a scale for tensor cores, by the indices of its tile of 128 by 4: 32 rows, 4 times 32 rows, 4 blocks.
fn in_tiles(row: usize, block: usize, blocks: usize) -> usize {
    let tiles_across = blocks.div_ceil(4);
    let tile = (row / 128) * tiles_across + block / 4;
    let (upper, lower) = (row % 128 / 32, row % 32);
    ((tile * 32 + lower) * 4 + upper) * 4 + block % 4
}

/// An element of [`defined`], before a rotation is turned back.
fn defined_scaled(format: WeightFormat, rows: usize, columns: usize, bytes: &[u8], index: usize) -> f32 {
    let part = |wanted| part(format, rows, columns, wanted, bytes);
    let (scales, codes) = (part(WeightPart::Scales), part(WeightPart::Codes));
    let nibble = || match index % 2 {
        0 => usize::from(codes[index / 2] >> 4),
        _ => usize::from(codes[index / 2] & 15),
    };
    let block = index / NF4_BLOCK;
    let (row, column) = (index / columns, index % columns);
    let of_blocks = part(WeightPart::BlockScales);
    let low_nibble = |index: usize| match index % 2 {
        0 => codes[index / 2] & 15,
        _ => codes[index / 2] >> 4,
    };
    match format {
        WeightFormat::E5M2(kind) => {
            let scale = match kind {
                Fp8Scales::None => 1.0,
                Fp8Scales::Tensor => f32_at(scales, 0),
                Fp8Scales::Rows => f32_at(scales, row),
            };
            e5m2_to_f32(codes[index]) * scale
        }
        WeightFormat::BlockFp8 => {
            let across = columns.div_ceil(FP8_BLOCK);
            e4m3_to_f32(codes[index]) * f32_at(scales, row / FP8_BLOCK * across + column / FP8_BLOCK)
        }
        WeightFormat::Int8Scaled(kind, _) => {
            let scale = match kind {
                Int8Scales::Tensor => f32_at(scales, 0),
                Int8Scales::Rows => f32_at(scales, row),
            };
            f32::from(codes[index] as i8) * scale
        }
        WeightFormat::Int4(_) => {
            let code = i16::from(low_nibble(index));
            f32::from(if code > 7 { code - 16 } else { code }) * f32_at(scales, row)
        }
        WeightFormat::W4A8 {
            group,
            codes: kind,
            scales: of_groups,
            ..
        } => {
            let value = match kind {
                W4A8Codes::Four => f32_at(part(WeightPart::Table), low_nibble(index).into()),
                W4A8Codes::Six => {
                    let line = &codes[row * columns * 3 / 4..];
                    let lower = line[column / 2] >> (4 * (column % 2)) & 15;
                    let upper = line[columns / 2 + column / 4] >> (2 * (column % 4)) & 3;
                    f32::from(upper) * 16.0 + f32::from(lower) - 32.0
                }
            };
            let of_group = index / usize::from(group);
            let scaled = value
                * match of_groups {
                    W4A8Scales::E4M3 => e4m3_to_f32(of_blocks[of_group]),
                    W4A8Scales::F32 => f32_at(of_blocks, of_group),
                };
            scaled.round_ties_even().clamp(-127.0, 127.0) * f32_at(scales, row)
        }
        WeightFormat::Nvfp4(order, factors) => {
            let (block, blocks) = (column / NVFP4_BLOCK, columns / NVFP4_BLOCK);
            let (place, code) = match order {
                Nvfp4Order::TensorCores => (in_tiles(row, block, blocks), nibble() as u8),
                Nvfp4Order::Rows => (row * blocks + block, low_nibble(index)),
                Nvfp4Order::LowFirst => (in_tiles(row, block, blocks), low_nibble(index)),
            };
            let scaled = e2m1_to_f32(code) * (e4m3_to_f32(of_blocks[place]) * f32_at(scales, 0));
            match factors {
                ColumnFactors::None => scaled,
                ColumnFactors::F32 => scaled * f32_at(part(WeightPart::ColumnFactors), column),
            }
        }
        WeightFormat::Mxfp8(order) => {
            let (block, blocks) = (column / MXFP8_BLOCK, columns / MXFP8_BLOCK);
            let place = match order {
                ScaleOrder::TensorCores => in_tiles(row, block, blocks),
                ScaleOrder::Rows => row * blocks + block,
            };
            e4m3_to_f32(codes[index]) * e8m0_to_f32(of_blocks[place])
        }
        WeightFormat::Int4Groups {
            order,
            group,
            numbers,
        } => {
            let of_group = column / usize::from(group);
            let row = match order {
                Int4Order::TinyChat { parts } => {
                    let parts = usize::from(parts);
                    row % (rows / parts) * parts + row / (rows / parts)
                }
                _ => row,
            };
            let scale = defined_number(numbers, scales, of_group * rows + row);
            let zeros = part(WeightPart::Zeros);
            let zero = |at| defined_number(numbers, zeros, at);
            match order {
                Int4Order::LessEight => {
                    (f32::from(low_nibble(index)) - 8.0) * scale + zero(of_group * rows + row)
                }
                Int4Order::Signed => {
                    let code = i16::from(low_nibble(index));
                    let signed = if code > 7 { code - 16 } else { code };
                    f32::from(signed) * scale + zero(of_group * rows + row)
                }
                Int4Order::AutoAwq => {
                    // The nibble of row r of eight: even rows first, then odd ones.
                    let of_word = |words: &[u8], line: usize| {
                        let word = &words[(line * rows + row / 8 * 8) / 2..][..4];
                        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                        (word >> (4 * (row % 8 / 2 + row % 2 * 4)) & 15) as f32
                    };
                    (of_word(codes, column) - of_word(zeros, of_group)) * scale
                }
                Int4Order::TinyChat { .. } => {
                    // Lines of four rows; in them 64 columns of each, in eights of words of four columns.
                    let line = row / 4 * columns + column / 64 * 64;
                    let word = line + row % 4 * 16 + column / 32 % 2 * 8 + column % 8;
                    let word = u16::from_le_bytes([codes[2 * word], codes[2 * word + 1]]);
                    let code = word >> (column / 8 % 4 * 4) & 15;
                    f32::from(code) * scale + zero(of_group * rows + row)
                }
            }
        }
        WeightFormat::Int8Groups { group, numbers } => {
            let of_group = index / group as usize;
            let zero = part(WeightPart::Zeros)[of_group] as i8;
            (f32::from(codes[index] as i8) - f32::from(zero)) * defined_number(numbers, scales, of_group)
        }
        WeightFormat::Svdquant { codes: kind, rank } => {
            let half = |bytes: &[u8], at| defined_number(GroupNumbers::Bf16, bytes, at);
            // A tile of 128 rows and 64 columns: [p 8][l 8][c 4][a 2][b 2], with n = 16p + 8a + l and k = 32b + 8c + i.
            let (n, k) = (row % 128, column % 64);
            let tile = row / 128 * (columns / 64) + column / 64;
            let place = [
                (n / 16, 8),
                (n % 8, 8),
                (k % 32 / 8, 4),
                (n % 16 / 8, 2),
                (k / 32, 2),
            ];
            let word = place.iter().fold(tile, |at, (digit, size)| at * size + digit);
            let code = codes[4 * word + k % 8 / 2] >> (k % 2 * 4) & 15;
            let scaled = match kind {
                SvdquantCodes::Int4(_) => {
                    let place = [(n / 16, 8), (n % 8 / 2, 4), (n / 8 % 2, 2), (n % 2, 2)];
                    let at = place.iter().fold(tile, |at, (digit, size)| at * size + digit);
                    let code = i16::from(code);
                    f32::from(if code > 7 { code - 16 } else { code }) * half(scales, at)
                }
                SvdquantCodes::Fp4 => {
                    let group = column / 16 % 4;
                    let place = [(n % 8, 8), (n / 8 % 4, 4), (n / 32, 4), (group, 4)];
                    let at = place.iter().fold(tile, |at, (digit, size)| at * size + digit);
                    e2m1_to_f32(code) * (e4m3_to_f32(of_blocks[at]) * f32_at(scales, row))
                }
            };
            let smoothed = scaled * f32_at(part(WeightPart::ColumnFactors), column);
            let (down, up) = (part(WeightPart::LowRankDown), part(WeightPart::LowRankUp));
            let ranks = usize::from(rank);
            let at = |tile: usize, i: usize, j: usize| {
                let place = [
                    (i % 8, 8),
                    (j % 8 / 2, 4),
                    (i % 16 / 8, 2),
                    (j % 16 / 8, 2),
                    (j % 2, 2),
                ];
                place.iter().fold(tile, |at, (digit, size)| at * size + digit)
            };
            let mut sum = 0.0;
            for r in 0..ranks {
                let of_down = half(down, at(column / 16 * (ranks / 16) + r / 16, r, column));
                sum += half(up, at(row / 16 * (ranks / 16) + r / 16, row, r)) * of_down;
            }
            smoothed + sum
        }
        WeightFormat::Int8 => (f32::from(codes[index] as i8) * f32_at(scales, index / columns)) * INT8_STEP,
        WeightFormat::Fp8(Fp8Scales::None) => e4m3_to_f32(codes[index]),
        WeightFormat::Fp8(Fp8Scales::Tensor) => e4m3_to_f32(codes[index]) * f32_at(scales, 0),
        WeightFormat::Fp8(Fp8Scales::Rows) => e4m3_to_f32(codes[index]) * f32_at(scales, index / columns),
        WeightFormat::Nf4 | WeightFormat::Fp4 => {
            f32_at(part(WeightPart::Table), nibble()) * f32_at(scales, block)
        }
        WeightFormat::Nf4Double | WeightFormat::Fp4Double => {
            let nested = f32_at(part(WeightPart::NestedTable), usize::from(scales[block]));
            let absmax = nested * f32_at(part(WeightPart::NestedAbsmax), block / NF4_NESTED_BLOCK);
            f32_at(part(WeightPart::Table), nibble()) * (absmax + f32_at(part(WeightPart::Offset), 0))
        }
        WeightFormat::Gguf(kind) => {
            let (numbers, size) = kind.block();
            defined_in_block(kind, &codes[index / numbers * size..][..size], index % numbers)
        }
    }
}

/// A number of this type at an index.
fn defined_number(kind: GroupNumbers, bytes: &[u8], at: usize) -> f32 {
    match kind {
        GroupNumbers::F16 => f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        GroupNumbers::Bf16 => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        GroupNumbers::F32 => f32_at(bytes, at),
    }
}

/// Element `j` of a block.
fn defined_in_block(kind: GgufType, b: &[u8], j: usize) -> f32 {
    let half = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
    let bit = |at: usize, bit: usize| i32::from(b[at + bit / 8] >> (bit % 8) & 1);
    // Bits of a byte, shifted and masked.
    let bits = |at: usize, shift: usize, mask: u8| i32::from(b[at] >> shift & mask);
    let nibble = |codes: usize| bits(codes + j % 16, j / 16 * 4, 15);
    let k_scales = |at: usize| {
        let g = j / 32;
        let high = |byte: usize| bits(byte, 6, 3) << 4;
        if g < 4 {
            (bits(at + g, 0, 63), bits(at + g + 4, 0, 63))
        } else {
            (
                bits(at + g + 4, 0, 15) | high(at + g - 4),
                bits(at + g + 4, 4, 15) | high(at + g),
            )
        }
    };
    match kind {
        GgufType::Q4_0 => half(0) * (nibble(2) - 8) as f32,
        GgufType::Q4_1 => half(0) * nibble(4) as f32 + half(2),
        GgufType::Q5_0 => half(0) * ((nibble(6) | bit(2, j) << 4) - 16) as f32,
        GgufType::Q5_1 => half(0) * (nibble(8) | bit(4, j) << 4) as f32 + half(2),
        GgufType::Q8_0 => half(0) * f32::from(b[2 + j] as i8),
        GgufType::Q2K => {
            let code = bits(16 + j / 128 * 32 + j % 32, j % 128 / 32 * 2, 3) as f32;
            let (scale, least) = (bits(j / 16, 0, 15) as f32, bits(j / 16, 4, 15) as f32);
            (half(80) * scale) * code - half(82) * least
        }
        GgufType::Q3K => {
            let code = bits(32 + j / 128 * 32 + j % 32, j % 128 / 32 * 2, 3);
            let missing = if bits(j % 32, j / 32, 1) == 0 { 4 } else { 0 };
            let g = j / 16;
            let scale = bits(96 + g % 8, g / 8 * 4, 15) | bits(104 + g % 4, g / 4 * 2, 3) << 4;
            (half(108) * (scale - 32) as f32) * (code - missing) as f32
        }
        GgufType::Q4K => {
            let (scale, least) = k_scales(4);
            let code = bits(16 + j / 64 * 32 + j % 32, j % 64 / 32 * 4, 15);
            (half(0) * scale as f32) * code as f32 - half(2) * least as f32
        }
        GgufType::Q5K => {
            let (scale, least) = k_scales(4);
            let code =
                bits(48 + j / 64 * 32 + j % 32, j % 64 / 32 * 4, 15) | bits(16 + j % 32, j / 32, 1) << 4;
            (half(0) * scale as f32) * code as f32 - half(2) * least as f32
        }
        GgufType::IQ4NL => half(0) * super::gguf::IQ4[nibble(2) as usize],
        GgufType::IQ4XS => {
            let g = j / 32;
            let upper = bits(2 + g / 4, g % 4 * 2, 3);
            let scale = (bits(4 + g / 2, g % 2 * 4, 15) | upper << 4) - 32;
            let code = bits(8 + 16 * g + j % 16, j % 32 / 16 * 4, 15);
            (half(0) * scale as f32) * super::gguf::IQ4[code as usize]
        }
        GgufType::Mxfp4 => {
            let half_scale = match b[0] {
                code @ (0 | 1) => f32::from_bits(0x0020_0000 << code),
                code => f32::from_bits((u32::from(code) - 1) << 23),
            };
            half_scale * (2.0 * e2m1_to_f32(nibble(1) as u8))
        }
        GgufType::Nvfp4 => {
            let scale = match b[j / 16] & 127 {
                127 => 0.0,
                code => e4m3_to_f32(code),
            };
            scale * e2m1_to_f32(bits(4 + j / 16 * 8 + j % 8, j % 16 / 8 * 4, 15) as u8)
        }
        GgufType::Q6K => {
            let low = bits(j / 128 * 64 + j % 64, j % 128 / 64 * 4, 15);
            let high = bits(128 + j / 128 * 32 + j % 32, j % 128 / 32 * 2, 3);
            let scale = b[192 + j / 16] as i8;
            (half(208) * f32::from(scale)) * ((low | high << 4) - 32) as f32
        }
    }
}

/// Asserts that a weight dequantizes to exactly this in f32, and to this rounded once in f16 and bf16. All NaNs are
/// equal. Cards compute the low-rank products of SVDQuant with tensor cores, whose sums are in no defined order: those are close.
fn assert_bits(weight: &QuantizedWeight, expected: &[f32]) {
    let is_exact = test_device().is_cpu() || !matches!(weight.format, WeightFormat::Svdquant { .. });
    let rounded = |number: f32, dtype| match dtype {
        DType::F16 => f16::from_f32(number).to_f32(),
        DType::BF16 => bf16::from_f32(number).to_f32(),
        _ => number,
    };
    for (dtype, epsilon) in [
        (DType::F32, f32::EPSILON),
        (DType::F16, f16::EPSILON.to_f32()),
        (DType::BF16, bf16::EPSILON.to_f32()),
    ] {
        let found = dequantize(weight, dtype).unwrap();
        assert_eq!((found.dims(), found.dtype()), (weight.shape.as_slice(), dtype));
        assert!(found.device().same_device(test_device()));
        let found = found.flatten_all().unwrap().to_device(&Device::Cpu).unwrap();
        let found = found.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
            let expected = rounded(*expected, dtype);
            let is_close = (found - expected).abs() <= 1e-5 + epsilon * expected.abs();
            assert!(
                found.to_bits() == expected.to_bits()
                    || found.is_nan() && expected.is_nan()
                    || !is_exact && is_close,
                "{} {:?} {dtype:?} at {index}: {found:e} is not {expected:e}",
                weight.format,
                weight.shape,
            );
        }
    }
}

fn assert_defined_everywhere(format: WeightFormat, rows: usize, columns: usize, seed: u64) {
    let rows = fitting_rows(format, rows);
    let bytes = random_bytes(format, rows, columns, seed);
    let expected = defined(format, rows, columns, &bytes);
    assert_bits(&quantized(format, &[rows, columns], bytes), &expected);
}

#[test]
fn dequantized_values_are_bit_identical_to_bitsandbytes_and_gguf() {
    let cases =
        candle_core::safetensors::load(fixtures().join("dequantize.safetensors"), &Device::Cpu).unwrap();
    let mut seen: Vec<WeightFormat> = Vec::new();
    for (name, expected) in &cases {
        let Some(case) = name.strip_suffix("/expected") else {
            continue;
        };
        let format_name = case.split('/').next().unwrap();
        let format = formats()
            .into_iter()
            .find(|format| format.to_string() == format_name);
        let format = format.unwrap_or_else(|| panic!("{case} is of no format"));
        let bytes = cases[&format!("{case}/bytes")].to_vec1::<u8>().unwrap();
        let expected_numbers = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_bits(&quantized(format, expected.dims(), bytes), &expected_numbers);
        seen.push(format);
    }
    // Formats of other programs are read from their files in `pipelines/src/checkpoint/stored/tests.rs`.
    let made = WeightFormat::MADE_AT_LOAD
        .into_iter()
        .filter(|format| format.rotation() == Rotation::None);
    let old = GgufType::ALL[..10].iter().copied().map(WeightFormat::Gguf);
    for format in made.chain(old) {
        assert!(seen.contains(&format), "{format} has no fixture");
    }
}

#[test]
fn dequantized_values_equal_the_reference_across_pieces_and_tasks() {
    // More than a task: rows end within pieces, the last block and the last byte are partial.
    for format in formats() {
        match least_columns(format) {
            1 => assert_defined_everywhere(format, 31, 1201, 2),
            least => assert_defined_everywhere(format, 19, 2048 / least * least, 1),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn dequantized_values_equal_the_reference_in_every_shape(
        which in 0..formats().len(), rows in 1..40usize, columns in 1..150usize, seed in any::<u64>(),
    ) {
        let format = formats()[which];
        let columns = match least_columns(format) {
            1 => columns,
            least => columns.div_ceil(40) * least,
        };
        assert_defined_everywhere(format, rows, columns, seed);
    }
}

#[test]
fn a_weight_may_have_any_rank() {
    for shape in [vec![6, 2, 3, 3], vec![108], vec![108, 1]] {
        let bytes = random_bytes(WeightFormat::Int8, shape[0], 108 / shape[0], 3);
        let expected = defined(WeightFormat::Int8, shape[0], 108 / shape[0], &bytes);
        assert_bits(&quantized(WeightFormat::Int8, &shape, bytes), &expected);
    }
    for format in [
        WeightFormat::Nf4,
        WeightFormat::Fp8(Fp8Scales::Rows),
        WeightFormat::Gguf(GgufType::Q4K),
    ] {
        let empty = quantized(format, &[0, 256], vec![0; format.bytes(0, 256).0 as usize]);
        assert_eq!(dequantize(&empty, DType::BF16).unwrap().dims(), [0, 256]);
    }
}

#[test]
fn a_view_into_an_allocation_is_dequantized_from_its_offset() {
    for format in formats() {
        let rows = fitting_rows(format, 3);
        let bytes = random_bytes(format, rows, 256, 5);
        let expected = defined(format, rows, 256, &bytes);
        let count = bytes.len();
        let mut whole = quantized(format, &[rows, 256], [vec![7; 3], bytes, vec![7; 2]].concat());
        whole.bytes = whole.bytes.narrow(0, 3, count).unwrap();
        assert_bits(&whole, &expected);
    }
}

#[test]
fn bytes_that_do_not_match_the_shape_are_refused() {
    for format in formats() {
        let rows = fitting_rows(format, 3);
        let right = format.bytes(rows, 256).0 as usize;
        for wrong in [0, right - 1, right + 1] {
            let error = dequantize(&quantized(format, &[rows, 256], vec![0; wrong]), DType::F32);
            assert!(
                error.unwrap_err().to_string().contains("damaged"),
                "{format} {wrong}"
            );
        }
        let right = quantized(format, &[rows, 256], vec![0; right]);
        assert!(dequantize(&right, DType::F64).is_err());
        let huge = quantized(format, &[1 << 40, 1 << 40], vec![]);
        assert!(dequantize(&huge, DType::F32).is_err());
        let wrong_dtype = QuantizedWeight {
            bytes: right.bytes.to_dtype(DType::F32).unwrap(),
            ..right
        };
        assert!(dequantize(&wrong_dtype, DType::F32).is_err());
    }
    for format in formats()
        .into_iter()
        .filter(|format| format.multiple_of_rows() > 1)
    {
        let odd = format.multiple_of_rows() + 1;
        let bytes = vec![0; format.bytes(odd, 256).0 as usize];
        let error = dequantize(&quantized(format, &[odd, 256], bytes), DType::F32).unwrap_err();
        assert!(error.to_string().contains("no multiple of"), "{format}: {error}");
    }
    let partial = quantized(WeightFormat::Gguf(GgufType::Q4K), &[2, 128], vec![0; 144]);
    assert!(
        dequantize(&partial, DType::F32)
            .unwrap_err()
            .to_string()
            .contains("whole blocks")
    );
}
