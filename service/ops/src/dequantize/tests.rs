use gpu::{Fp8Scales, GgufType, INT8_STEP, NF4_BLOCK, NF4_NESTED_BLOCK, e4m3_to_f32};
use proptest::prelude::*;

use super::*;
use crate::testing::{fixtures, formats, quantized, random_bytes, test_device};

/// Reference implementation of one element, by index arithmetic over the whole weight, without blocks, rows or tasks.
fn defined(format: WeightFormat, rows: usize, columns: usize, bytes: &[u8], index: usize) -> f32 {
    let part = |wanted| part(format, rows, columns, wanted, bytes);
    let (scales, codes) = (part(WeightPart::Scales), part(WeightPart::Codes));
    let nibble = || match index % 2 {
        0 => usize::from(codes[index / 2] >> 4),
        _ => usize::from(codes[index / 2] & 15),
    };
    let block = index / NF4_BLOCK;
    match format {
        WeightFormat::Int8 => (f32::from(codes[index] as i8) * f32_at(scales, index / columns)) * INT8_STEP,
        WeightFormat::Fp8(Fp8Scales::None) => e4m3_to_f32(codes[index]),
        WeightFormat::Fp8(Fp8Scales::Tensor) => e4m3_to_f32(codes[index]) * f32_at(scales, 0),
        WeightFormat::Fp8(Fp8Scales::Rows) => e4m3_to_f32(codes[index]) * f32_at(scales, index / columns),
        WeightFormat::Nf4 => f32_at(part(WeightPart::Table), nibble()) * f32_at(scales, block),
        WeightFormat::Nf4Double => {
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
        GgufType::Q6K => {
            let low = bits(j / 128 * 64 + j % 64, j % 128 / 64 * 4, 15);
            let high = bits(128 + j / 128 * 32 + j % 32, j % 128 / 32 * 2, 3);
            let scale = b[192 + j / 16] as i8;
            (half(208) * f32::from(scale)) * ((low | high << 4) - 32) as f32
        }
    }
}

/// Asserts that a weight dequantizes to exactly this in f32, and to this rounded once in f16 and bf16. All NaNs are
/// equal.
fn assert_bits(weight: &QuantizedWeight, expected: &[f32]) {
    let read = |dtype| {
        let found = dequantize(weight, dtype).unwrap();
        assert_eq!((found.dims(), found.dtype()), (weight.shape.as_slice(), dtype));
        assert!(found.device().same_device(test_device()));
        found.flatten_all().unwrap().to_device(&Device::Cpu).unwrap()
    };
    let same = |name: &str, found: u32, expected: u32, nan: bool, expected_nan: bool, index: usize| {
        let (format, shape) = (weight.format, &weight.shape);
        assert!(
            found == expected || nan && expected_nan,
            "{format} {shape:?} {name} at {index}: {found:#x} is not {expected:#x}"
        );
    };
    let found = read(DType::F32).to_vec1::<f32>().unwrap();
    assert_eq!(found.len(), expected.len());
    for (index, (f, e)) in found.iter().zip(expected).enumerate() {
        same("f32", f.to_bits(), e.to_bits(), f.is_nan(), e.is_nan(), index);
    }
    for (index, (f, e)) in read(DType::F16)
        .to_vec1::<f16>()
        .unwrap()
        .iter()
        .zip(expected)
        .enumerate()
    {
        let e = f16::from_f32(*e);
        same(
            "f16",
            f.to_bits().into(),
            e.to_bits().into(),
            f.is_nan(),
            e.is_nan(),
            index,
        );
    }
    for (index, (f, e)) in read(DType::BF16)
        .to_vec1::<bf16>()
        .unwrap()
        .iter()
        .zip(expected)
        .enumerate()
    {
        let e = bf16::from_f32(*e);
        same(
            "bf16",
            f.to_bits().into(),
            e.to_bits().into(),
            f.is_nan(),
            e.is_nan(),
            index,
        );
    }
}

fn assert_defined_everywhere(format: WeightFormat, rows: usize, columns: usize, seed: u64) {
    let bytes = random_bytes(format, rows, columns, seed);
    let expected = (0..rows * columns).map(|index| defined(format, rows, columns, &bytes, index));
    let expected: Vec<f32> = expected.collect();
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
    for format in formats() {
        assert!(seen.contains(&format), "{format} has no fixture");
    }
}

#[test]
fn dequantized_values_equal_the_reference_across_pieces_and_tasks() {
    // More than a task: rows end within pieces, the last block and the last byte are partial.
    for format in formats() {
        match format {
            WeightFormat::Gguf(_) => assert_defined_everywhere(format, 19, 2048, 1),
            _ => assert_defined_everywhere(format, 31, 1201, 2),
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
        let columns = match format {
            WeightFormat::Gguf(kind) => columns.div_ceil(40) * kind.block().0,
            _ => columns,
        };
        assert_defined_everywhere(format, rows, columns, seed);
    }
}

#[test]
fn a_weight_may_have_any_rank() {
    for shape in [vec![6, 2, 3, 3], vec![108], vec![108, 1]] {
        let bytes = random_bytes(WeightFormat::Int8, shape[0], 108 / shape[0], 3);
        let expected = (0..108).map(|i| defined(WeightFormat::Int8, shape[0], 108 / shape[0], &bytes, i));
        let expected: Vec<f32> = expected.collect();
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
        let bytes = random_bytes(format, 3, 256, 5);
        let expected = (0..3 * 256).map(|index| defined(format, 3, 256, &bytes, index));
        let expected: Vec<f32> = expected.collect();
        let count = bytes.len();
        let mut whole = quantized(format, &[3, 256], [vec![7; 3], bytes, vec![7; 2]].concat());
        whole.bytes = whole.bytes.narrow(0, 3, count).unwrap();
        assert_bits(&whole, &expected);
    }
}

#[test]
fn bytes_that_do_not_match_the_shape_are_refused() {
    for format in formats() {
        let right = format.bytes(3, 256).0 as usize;
        for wrong in [0, right - 1, right + 1] {
            let error = dequantize(&quantized(format, &[3, 256], vec![0; wrong]), DType::F32);
            assert!(
                error.unwrap_err().to_string().contains("damaged"),
                "{format} {wrong}"
            );
        }
        let right = quantized(format, &[3, 256], vec![0; right]);
        assert!(dequantize(&right, DType::F64).is_err());
        let huge = quantized(format, &[1 << 40, 1 << 40], vec![]);
        assert!(dequantize(&huge, DType::F32).is_err());
        let wrong_dtype = QuantizedWeight {
            bytes: right.bytes.to_dtype(DType::F32).unwrap(),
            ..right
        };
        assert!(dequantize(&wrong_dtype, DType::F32).is_err());
    }
    let partial = quantized(WeightFormat::Gguf(GgufType::Q4K), &[2, 128], vec![0; 144]);
    assert!(
        dequantize(&partial, DType::F32)
            .unwrap_err()
            .to_string()
            .contains("whole blocks")
    );
}
