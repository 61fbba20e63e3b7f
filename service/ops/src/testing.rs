//! Fixtures and assertions shared by the tests.

use candle_core::{DType, Device, Result, Tensor};
use gpu::{
    ColumnFactors, Fp8Scales, GgufType, GroupNumbers, InputShift, Int4Order, Int8Scales, Nvfp4Order,
    QuantizedWeight, Rotation, ScaleOrder, SvdquantCodes, W4A8Codes, W4A8Scales, WeightFormat, WeightPart,
};
use half::{bf16, f16};

#[path = "../tests/device/mod.rs"]
mod device;

#[cfg(feature = "cuda")]
pub(crate) use device::pool::peak_of;
pub(crate) use device::{BF16_OPERATION, here, test_device, tolerances};

/// Folder of the fixtures.
pub(crate) fn fixtures() -> std::path::PathBuf {
    device::crate_folder().join("tests/fixtures")
}

/// Pseudorandom numbers from -1 to 1 that depend on the seed alone.
pub(crate) fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

/// Random bytes of a quantized weight, in which scales are finite: f32 from -1 to 1, f16 below 2.
pub(crate) fn random_bytes(format: WeightFormat, rows: usize, columns: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; format.bytes(rows, columns).0 as usize];
    let numbers = random(&[bytes.len()], seed).unwrap().to_vec1::<f32>().unwrap();
    for (byte, number) in bytes.iter_mut().zip(&numbers) {
        *byte = (number.abs() * 65536.0) as u32 as u8;
    }
    for (part, range) in format.layout(rows, columns) {
        if matches!(part, WeightPart::MadeScales | WeightPart::MadeFlag) {
            bytes[range].fill(0);
            continue;
        }
        let of_part = numbers[range.start..].iter().cycle();
        match numbers_of(format, part) {
            None => {}
            Some(GroupNumbers::F32) => {
                for (scale, number) in bytes[range].chunks_exact_mut(4).zip(of_part) {
                    scale.copy_from_slice(&number.to_le_bytes());
                }
            }
            Some(kind) => {
                for (scale, number) in bytes[range].chunks_exact_mut(2).zip(of_part) {
                    let bits = match kind {
                        GroupNumbers::F16 => f16::from_f32(*number).to_bits(),
                        _ => bf16::from_f32(*number).to_bits(),
                    };
                    scale.copy_from_slice(&bits.to_le_bytes());
                }
            }
        }
    }
    if let WeightFormat::Gguf(kind) = format {
        for block in bytes.chunks_exact_mut(kind.block().1) {
            for at in halves(kind) {
                block[at + 1] &= 0xBF; // the exponent's highest bit
            }
        }
    }
    bytes
}

/// Type of the numbers of a part; `None` where every byte is a code or a number.
fn numbers_of(format: WeightFormat, part: WeightPart) -> Option<GroupNumbers> {
    use WeightFormat as F;
    use WeightPart as P;
    match (format, part) {
        (_, P::Codes) => None,
        (
            F::W4A8 {
                scales: W4A8Scales::F32,
                ..
            },
            P::BlockScales,
        ) => Some(GroupNumbers::F32),
        (_, P::BlockScales) => None,
        (F::Nf4Double | F::Fp4Double, P::Scales) => None,
        (F::Int8Groups { .. }, P::Zeros) => None,
        (
            F::Int4Groups {
                order: Int4Order::AutoAwq,
                ..
            },
            P::Zeros,
        ) => None,
        (F::Int4Groups { numbers, .. } | F::Int8Groups { numbers, .. }, P::Scales | P::Zeros) => {
            Some(numbers)
        }
        (_, P::LowRankDown | P::LowRankUp) => Some(GroupNumbers::Bf16),
        (
            F::Svdquant {
                codes: SvdquantCodes::Int4(_),
                ..
            },
            P::Scales,
        ) => Some(GroupNumbers::Bf16),
        _ => Some(GroupNumbers::F32),
    }
}

/// Offsets of the f16 numbers of a block.
fn halves(kind: GgufType) -> Vec<usize> {
    match kind {
        GgufType::Q4_0 | GgufType::Q5_0 | GgufType::Q8_0 | GgufType::IQ4NL | GgufType::IQ4XS => vec![0],
        GgufType::Q4_1 | GgufType::Q5_1 | GgufType::Q4K | GgufType::Q5K => vec![0, 2],
        GgufType::Q2K => vec![80, 82],
        GgufType::Q3K => vec![108],
        GgufType::Q6K => vec![208],
        GgufType::Mxfp4 | GgufType::Nvfp4 => vec![],
    }
}

/// All weight formats.
pub(crate) fn formats() -> Vec<WeightFormat> {
    let scales = [Fp8Scales::None, Fp8Scales::Tensor, Fp8Scales::Rows];
    let floats = scales
        .map(WeightFormat::Fp8)
        .into_iter()
        .chain(scales.map(WeightFormat::E5M2));
    let others = [
        WeightFormat::Int8,
        WeightFormat::Nf4,
        WeightFormat::Nf4Double,
        WeightFormat::Fp4,
        WeightFormat::Fp4Double,
        WeightFormat::BlockFp8,
        WeightFormat::Mxfp8(ScaleOrder::TensorCores),
        WeightFormat::Mxfp8(ScaleOrder::Rows),
        WeightFormat::Int8Groups {
            group: 32,
            numbers: GroupNumbers::Bf16,
        },
        WeightFormat::Int8Groups {
            group: 64,
            numbers: GroupNumbers::F32,
        },
        WeightFormat::Svdquant {
            codes: SvdquantCodes::Int4(InputShift::None),
            rank: 32,
        },
        WeightFormat::Svdquant {
            codes: SvdquantCodes::Fp4,
            rank: 16,
        },
    ];
    let nvfp4 = [Nvfp4Order::TensorCores, Nvfp4Order::Rows, Nvfp4Order::LowFirst]
        .into_iter()
        .flat_map(|order| [ColumnFactors::None, ColumnFactors::F32].map(|of| WeightFormat::Nvfp4(order, of)));
    let orders = [
        Int4Order::LessEight,
        Int4Order::Signed,
        Int4Order::AutoAwq,
        Int4Order::TinyChat { parts: 1 },
        Int4Order::TinyChat { parts: 3 },
        Int4Order::TinyChat { parts: 6 },
    ];
    let groups = orders.into_iter().flat_map(|order| {
        [GroupNumbers::F16, GroupNumbers::Bf16].map(|numbers| WeightFormat::Int4Groups {
            order,
            group: 32,
            numbers,
        })
    });
    let rotations = [Rotation::None, Rotation::By16, Rotation::By64, Rotation::By256];
    let rotated = rotations.into_iter().flat_map(|rotation| {
        [
            WeightFormat::Int8Scaled(Int8Scales::Tensor, rotation),
            WeightFormat::Int8Scaled(Int8Scales::Rows, rotation),
            WeightFormat::Int4(rotation),
            w4a8(W4A8Codes::Four, W4A8Scales::E4M3, rotation),
            w4a8(W4A8Codes::Four, W4A8Scales::F32, rotation),
            w4a8(W4A8Codes::Six, W4A8Scales::E4M3, rotation),
            w4a8(W4A8Codes::Six, W4A8Scales::F32, rotation),
        ]
    });
    let gguf = GgufType::ALL.map(WeightFormat::Gguf);
    let packed = nvfp4.chain(groups);
    floats
        .chain(others)
        .chain(packed)
        .chain(rotated)
        .chain(gguf)
        .collect()
}

fn w4a8(codes: W4A8Codes, scales: W4A8Scales, rotation: Rotation) -> WeightFormat {
    WeightFormat::W4A8 {
        group: 16,
        codes,
        scales,
        rotation,
    }
}

/// So many rows, or more: as many as a weight in a format can have.
pub(crate) fn fitting_rows(format: WeightFormat, rows: usize) -> usize {
    rows.next_multiple_of(format.multiple_of_rows())
}

/// The least number of columns of a weight in a format, of which others are multiples.
pub(crate) fn least_columns(format: WeightFormat) -> usize {
    [1, 8, 16, 32, 64, 256]
        .into_iter()
        .find(|columns| format.fits(*columns))
        .unwrap()
}

/// A quantized weight on the device of the tests.
pub(crate) fn quantized(format: WeightFormat, shape: &[usize], bytes: Vec<u8>) -> QuantizedWeight {
    let count = bytes.len();
    QuantizedWeight {
        bytes: here(&Tensor::from_vec(bytes, count, &Device::Cpu).unwrap()),
        format,
        shape: shape.to_vec(),
    }
}

/// Asserts equal shapes, and that the relative L2 distance is at most `tolerance`, or that of the device of the tests
/// if it is larger.
pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(found.dims(), expected.dims());
    let tolerance = match test_device().is_cpu() {
        true => tolerance,
        false => tolerance.max(tolerances().operation),
    };
    let numbers = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (found, expected) = (numbers(found)?, numbers(expected)?);
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let distance = square(
        &mut found
            .iter()
            .zip(&expected)
            .map(|(f, e)| f64::from(*f) - f64::from(*e)),
    );
    let length = square(&mut expected.iter().map(|e| f64::from(*e)));
    let relative = (distance / length).sqrt();
    assert!(relative <= tolerance, "relative distance {relative:e}");
    Ok(())
}
