//! Dequantization of weights, by groups of formats.
//!
//! Elements are computed in f32, with products and sums rounded one by one in the order of the format's reference
//! library, and rounded once more to the requested dtype. The CPU loops use all cores; the CUDA kernels
//! (`cuda/dequantize.cuh`) give identical bits.

mod blocks;
mod gguf;
mod nf4;
mod packed;
mod rotated;
mod rows;

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use gpu::{
    Fp8Scales, Int8Scales, QuantizedWeight, SvdquantCodes, W4A8Codes, WeightFormat, WeightPart,
    rows_and_columns,
};
use half::slice::HalfFloatSliceExt as _;
use half::vec::HalfBitsVecExt as _;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements read at a time: whole blocks of every format, and in f32 at most the L1 cache.
const PIECE: usize = 2048;

/// Maximum of elements per task.
const TASK: usize = 16 * PIECE;

/// Reads codes on the CPU, with random access.
trait ReadCodes: Sync {
    /// Writes the elements from `first` on. `first` is the beginning of a block, and `out` is at most [`PIECE`] long and
    /// ends with a block or with the weight.
    fn read(&self, first: usize, out: &mut [f32]);
}

/// Dequantizes a weight to `dtype` (f32, f16 or bf16), in its shape, on its device. On a card the work is enqueued on
/// the device's stream, without synchronization.
///
/// In f32 the result is bit-identical to `bitsandbytes` (int8, nf4, fp4), to the `gguf` Python package, and to the product
/// of code and scale (the others). Rotated rows are turned back: sums in f32. The payload of NaN depends on the device.
///
/// # Errors
/// When the byte count does not match format and shape, blocks do not fit the rows, or for another dtype; errors of
/// candle.
pub fn dequantize(weight: &QuantizedWeight, dtype: DType) -> Result<Tensor> {
    let numbers = checked(weight)?;
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        candle_core::bail!(
            "a weight in {} is dequantized to f32, f16 or bf16, not {dtype:?}",
            weight.format
        );
    }
    if numbers == 0 {
        return Tensor::zeros(weight.shape.as_slice(), dtype, weight.bytes.device());
    }
    match weight.bytes.device() {
        Device::Cpu => on_cpu(weight, numbers, dtype),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::cuda::dequantize(weight, dtype),
        other => candle_core::bail!("a weight in {} is not dequantized on {other:?}", weight.format),
    }
}

/// Number of elements of a weight, after validating its byte count against format and shape.
fn checked(weight: &QuantizedWeight) -> Result<usize> {
    let QuantizedWeight { bytes, format, shape } = weight;
    // No format takes more than a few bytes per element or row, so that no size overflows below these bounds.
    let numbers = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    let Some(numbers) = numbers.filter(|&numbers| numbers <= isize::MAX as usize / 16) else {
        candle_core::bail!("a weight of shape {shape:?} has more numbers than there is memory for");
    };
    let (rows, columns) = rows_and_columns(shape);
    if rows > isize::MAX as usize / 16 {
        candle_core::bail!("a weight of shape {shape:?} has more rows than there is memory for");
    }
    if !format.fits(columns) {
        candle_core::bail!("a weight of shape {shape:?} does not have whole blocks of {format} in each row");
    }
    if !rows.is_multiple_of(format.multiple_of_rows()) {
        let multiple = format.multiple_of_rows();
        candle_core::bail!("a weight of shape {shape:?} in {format} has no multiple of {multiple} rows");
    }
    let expected = format.bytes(rows, columns).0;
    if bytes.dtype() != DType::U8 || bytes.rank() != 1 || bytes.elem_count() as u64 != expected {
        candle_core::bail!(
            "a weight of shape {shape:?} in {format} is {expected} bytes, not {:?} of {:?}: the file it came from is \
             damaged or of another format",
            bytes.dtype(),
            bytes.dims()
        );
    }
    Ok(numbers)
}

/// The bytes of one part of a weight; empty if the format has no such part.
fn part(format: WeightFormat, rows: usize, columns: usize, wanted: WeightPart, bytes: &[u8]) -> &[u8] {
    let layout = format.layout(rows, columns);
    let range = layout.into_iter().find(|(part, _)| *part == wanted);
    range.map_or(&[], |(_, range)| &bytes[range])
}

/// The f32 at an index of unaligned bytes.
fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let at = 4 * index;
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Calls `read` with the bytes of a weight on the CPU.
fn with_bytes<R>(weight: &QuantizedWeight, read: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    let bytes = weight.bytes.contiguous()?;
    let (storage, layout) = bytes.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::U8(bytes)), Some((start, end))) => read(&bytes[start..end]),
        _ => candle_core::bail!("contiguous bytes on the CPU are expected"),
    }
}

/// The sums of the rows of a weight of SVDQuant on the CPU, without its low-rank product.
pub(crate) fn sums_of_rows(weight: &QuantizedWeight) -> Result<Vec<f64>> {
    checked(weight)?;
    let (rows, columns) = rows_and_columns(&weight.shape);
    with_bytes(weight, |bytes| {
        let read = svdquant_without_low_rank(weight.format, (rows, columns), bytes);
        let sum = |row: usize| {
            let mut sum = 0.0;
            for first in (0..columns).step_by(PIECE) {
                let count = PIECE.min(columns - first);
                with_piece(&read, row * columns + first, count, |piece| {
                    sum += piece.iter().map(|number| f64::from(*number)).sum::<f64>();
                });
            }
            sum
        };
        Ok((0..rows).into_par_iter().map(sum).collect())
    })
}

fn on_cpu(weight: &QuantizedWeight, numbers: usize, dtype: DType) -> Result<Tensor> {
    with_bytes(weight, |bytes| of_bytes(weight, bytes, numbers, dtype))
}

fn of_bytes(weight: &QuantizedWeight, bytes: &[u8], numbers: usize, dtype: DType) -> Result<Tensor> {
    let (rows, columns) = rows_and_columns(&weight.shape);
    let part = |wanted| part(weight.format, rows, columns, wanted, bytes);
    let codes: Box<dyn ReadCodes + '_> = match weight.format {
        WeightFormat::Int8 => Box::new(rows::Int8::new(
            part(WeightPart::Scales),
            part(WeightPart::Codes),
            columns,
        )),
        WeightFormat::Fp8(scales) => {
            let (scale, codes) = (part(WeightPart::Scales), part(WeightPart::Codes));
            Box::new(rows::Fp8::new(rows::e4m3, scales, scale, codes, columns))
        }
        WeightFormat::E5M2(scales) => {
            let (scale, codes) = (part(WeightPart::Scales), part(WeightPart::Codes));
            Box::new(rows::Fp8::new(rows::e5m2, scales, scale, codes, columns))
        }
        WeightFormat::Int8Scaled(scales, rotation) => {
            let (scales, scale) = match scales {
                Int8Scales::Rows => (Fp8Scales::Rows, part(WeightPart::Scales)),
                Int8Scales::Tensor => (Fp8Scales::Tensor, part(WeightPart::Scales)),
            };
            let int8 = rows::Fp8::new(rows::int8, scales, scale, part(WeightPart::Codes), columns);
            Box::new(rotated::Rotated::new(int8, rotation))
        }
        WeightFormat::Int4(rotation) => {
            let int4 = blocks::Int4::new(part(WeightPart::Scales), part(WeightPart::Codes), columns);
            Box::new(rotated::Rotated::new(int4, rotation))
        }
        WeightFormat::W4A8 {
            group,
            codes,
            scales,
            rotation,
        } => {
            let table = part(WeightPart::Table);
            let w4a8 = blocks::W4A8 {
                kind: codes,
                table: match codes {
                    W4A8Codes::Four => std::array::from_fn(|index| f32_at(table, index)),
                    W4A8Codes::Six => [0.0; 16],
                },
                rows: part(WeightPart::Scales),
                groups: (scales, part(WeightPart::BlockScales)),
                codes: part(WeightPart::Codes),
                columns,
                group: usize::from(group),
            };
            Box::new(rotated::Rotated::new(w4a8, rotation))
        }
        WeightFormat::BlockFp8 => Box::new(blocks::BlockFp8::new(
            part(WeightPart::Scales),
            part(WeightPart::Codes),
            columns,
        )),
        WeightFormat::Nvfp4(order, _) => {
            let nvfp4 = blocks::Nvfp4::new(
                order,
                f32_at(part(WeightPart::Scales), 0),
                part(WeightPart::BlockScales),
                part(WeightPart::Codes),
                columns,
            );
            let factors = part(WeightPart::ColumnFactors);
            Box::new(packed::ByColumns::new(nvfp4, factors, columns))
        }
        WeightFormat::Mxfp8(order) => Box::new(blocks::Mxfp8::new(
            order,
            part(WeightPart::BlockScales),
            part(WeightPart::Codes),
            columns,
        )),
        WeightFormat::Int4Groups {
            order,
            group,
            numbers,
        } => {
            let of = packed::Groups {
                numbers,
                scales: part(WeightPart::Scales),
                zeros: part(WeightPart::Zeros),
                codes: part(WeightPart::Codes),
                rows,
                columns,
                group: usize::from(group),
            };
            Box::new(packed::Int4Groups { order, of })
        }
        WeightFormat::Int8Groups { group, numbers } => Box::new(packed::Int8Groups(packed::Groups {
            numbers,
            scales: part(WeightPart::Scales),
            zeros: part(WeightPart::Zeros),
            codes: part(WeightPart::Codes),
            rows,
            columns,
            group: group as usize,
        })),
        WeightFormat::Svdquant { rank, .. } => {
            let factors = (part(WeightPart::LowRankDown), part(WeightPart::LowRankUp));
            let smoothed = svdquant_without_low_rank(weight.format, (rows, columns), bytes);
            let (ranks, shape) = (usize::from(rank), (rows, columns));
            Box::new(packed::WithLowRank::new(smoothed, factors, ranks, shape))
        }
        WeightFormat::Nf4 | WeightFormat::Fp4 => Box::new(nf4::Nf4::new(
            part(WeightPart::Table),
            nf4::Absmax::Plain(part(WeightPart::Scales)),
            part(WeightPart::Codes),
        )),
        WeightFormat::Nf4Double | WeightFormat::Fp4Double => Box::new(nf4::Nf4::new(
            part(WeightPart::Table),
            nf4::Absmax::Nested {
                table: part(WeightPart::NestedTable),
                offset: f32_at(part(WeightPart::Offset), 0),
                absmax: part(WeightPart::NestedAbsmax),
                codes: part(WeightPart::Scales),
            },
            part(WeightPart::Codes),
        )),
        WeightFormat::Gguf(kind) => Box::new(gguf::Blocks::new(kind, part(WeightPart::Codes))),
    };
    let codes = &*codes;
    let shape = weight.shape.as_slice();
    match dtype {
        DType::F32 => {
            let mut out = vec![0f32; numbers];
            in_pieces(&mut out, |first, out| codes.read(first, out));
            Tensor::from_vec(out, shape, &Device::Cpu)
        }
        // Integers are zeroed lazily by the system, so that the tasks are the first to touch the memory.
        DType::BF16 => {
            let mut out = vec![0u16; numbers];
            in_pieces(&mut out, |first, out| {
                with_piece(codes, first, out.len(), |piece| {
                    for (bits, &number) in out.iter_mut().zip(piece) {
                        *bits = bf16_bits(number);
                    }
                });
            });
            Tensor::from_vec(out.reinterpret_into::<bf16>(), shape, &Device::Cpu)
        }
        _ => {
            let mut out = vec![0u16; numbers];
            in_pieces(&mut out, |first, out| {
                use half::slice::HalfBitsSliceExt as _;
                with_piece(codes, first, out.len(), |piece| {
                    out.reinterpret_cast_mut::<f16>().convert_from_f32_slice(piece);
                });
            });
            Tensor::from_vec(out.reinterpret_into::<f16>(), shape, &Device::Cpu)
        }
    }
}

/// A weight of SVDQuant without its low-rank product.
fn svdquant_without_low_rank(
    format: WeightFormat,
    (rows, columns): (usize, usize),
    bytes: &[u8],
) -> impl ReadCodes {
    let part = |wanted| part(format, rows, columns, wanted, bytes);
    let kind = match format {
        WeightFormat::Svdquant { codes, .. } => codes,
        _ => SvdquantCodes::Fp4,
    };
    let nibbles = packed::SvdquantNibbles {
        kind,
        scales: part(WeightPart::Scales),
        blocks: part(WeightPart::BlockScales),
        codes: part(WeightPart::Codes),
        columns,
    };
    packed::ByColumns::new(nibbles, part(WeightPart::ColumnFactors), columns)
}

/// Calls `read` with every piece of `out` and its first index, on all cores.
fn in_pieces<T: Send>(out: &mut [T], read: impl Fn(usize, &mut [T]) + Sync) {
    out.par_chunks_mut(TASK).enumerate().for_each(|(task, out)| {
        for (piece, out) in out.chunks_mut(PIECE).enumerate() {
            read(task * TASK + piece * PIECE, out);
        }
    });
}

fn with_piece(codes: &dyn ReadCodes, first: usize, length: usize, then: impl FnOnce(&[f32])) {
    let mut piece = [0f32; PIECE];
    codes.read(first, &mut piece[..length]);
    then(&piece[..length]);
}

/// Rounds to bf16, to nearest even, as `half` does but branch-free, so that the loop vectorizes.
#[inline(always)]
fn bf16_bits(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if number.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests;
