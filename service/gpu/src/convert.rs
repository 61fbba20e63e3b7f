//! Conversion from the dtypes of checkpoints to those of cards.

use std::fs::File;
use std::os::unix::fs::FileExt;

use candle_core::{CpuStorage, DType, Device, Tensor};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

use crate::format::{e4m3_to_f32, e5m2_to_f32};
use crate::load::Stored;

// Checkpoints are little-endian, and bytes are read directly into numbers.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "moored runs on little-endian machines only"
);

/// Numbers converted at a time: few enough that they are still in the L2 cache when they are read again.
const PIECE: usize = 64 << 10;

/// A number type of which every bit pattern is a valid value.
///
/// # Safety
/// The type has no padding and no invalid bit pattern.
unsafe trait Plain: Copy + Default {}
// SAFETY: primitive numbers, or (halves) a transparent wrapper of u16.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}

fn as_bytes<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: the bytes are those of `numbers`, borrowed for as long; `Plain` has no padding to read and no
    // bit pattern that writing could make invalid; bytes have no alignment.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), std::mem::size_of_val(numbers)) }
}

fn bytes_of<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: as above, and nothing is written.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), std::mem::size_of_val(numbers)) }
}

/// Owned numbers of a tensor, while it is being read.
pub(crate) enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    U8(Vec<u8>),
    I64(Vec<i64>),
}

/// A mutable slice of [`Numbers`], filled by one thread.
pub(crate) enum Part<'a> {
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
    U8(&'a mut [u8]),
    I64(&'a mut [i64]),
}

/// Where numbers are read from.
pub(crate) trait ReadAt {
    /// Fills `to` with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`std::io::ErrorKind::UnexpectedEof`] if there are fewer; errors of the system.
    fn fill(&self, to: &mut [u8], offset: u64) -> std::io::Result<()>;
}

impl ReadAt for File {
    fn fill(&self, to: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.read_exact_at(to, offset)
    }
}

impl ReadAt for [u8] {
    fn fill(&self, to: &mut [u8], offset: u64) -> std::io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.get(at..));
        match from.and_then(|from| from.get(..to.len())) {
            Some(from) => {
                to.copy_from_slice(from);
                Ok(())
            }
            None => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Whether numbers of this stored type can become a tensor of that dtype. Integers stay integers or become floats;
/// floats never become integers.
pub(crate) fn converts(stored: Stored, target: DType) -> bool {
    match target {
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => {
            stored.is_float() || matches!(stored, Stored::U8 | Stored::I64 | Stored::F8E4M3 | Stored::F8E5M2)
        }
        DType::U8 => stored == Stored::U8,
        DType::I64 => matches!(stored, Stored::I64 | Stored::U8),
        _ => false,
    }
}

impl Numbers {
    /// Buffer of `count` zeros, lazily zeroed by the system. `None` for a dtype that is not read into system memory.
    pub(crate) fn zeroed(target: DType, count: usize) -> Option<Numbers> {
        Some(match target {
            DType::F32 => Numbers::F32(vec![0.0; count]),
            DType::F64 => Numbers::F64(vec![0.0; count]),
            // Allocated as bits: the zeros of a type that is not a primitive would be written one by one.
            DType::F16 => Numbers::F16(vec![0u16; count].reinterpret_into()),
            DType::BF16 => Numbers::Bf16(vec![0u16; count].reinterpret_into()),
            DType::U8 => Numbers::U8(vec![0; count]),
            DType::I64 => Numbers::I64(vec![0; count]),
            _ => return None,
        })
    }

    /// No numbers, as the storage of a tensor of this dtype. `None` for a dtype that is not read into system memory.
    pub(crate) fn none_of(target: DType) -> Option<CpuStorage> {
        Numbers::zeroed(target, 0).and_then(Numbers::into_storage)
    }

    /// The numbers as the storage of a tensor.
    pub(crate) fn into_storage(self) -> Option<CpuStorage> {
        Some(match self {
            Numbers::F32(n) => CpuStorage::F32(n),
            Numbers::F64(n) => CpuStorage::F64(n),
            Numbers::F16(n) => CpuStorage::F16(n),
            Numbers::Bf16(n) => CpuStorage::BF16(n),
            Numbers::U8(n) => CpuStorage::U8(n),
            Numbers::I64(n) => CpuStorage::I64(n),
        })
    }

    pub(crate) fn part(&mut self) -> Part<'_> {
        match self {
            Numbers::F32(n) => Part::F32(n),
            Numbers::F64(n) => Part::F64(n),
            Numbers::F16(n) => Part::F16(n),
            Numbers::Bf16(n) => Part::Bf16(n),
            Numbers::U8(n) => Part::U8(n),
            Numbers::I64(n) => Part::I64(n),
        }
    }

    /// The bytes in memory order, which is that of files.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Numbers::F32(n) => bytes_of(n),
            Numbers::F64(n) => bytes_of(n),
            Numbers::F16(n) => bytes_of(n),
            Numbers::Bf16(n) => bytes_of(n),
            Numbers::U8(n) => n,
            Numbers::I64(n) => bytes_of(n),
        }
    }

    pub(crate) fn into_tensor(self, shape: &[usize]) -> candle_core::Result<Tensor> {
        match self {
            Numbers::F32(n) => Tensor::from_vec(n, shape, &Device::Cpu),
            Numbers::F64(n) => Tensor::from_vec(n, shape, &Device::Cpu),
            Numbers::F16(n) => Tensor::from_vec(n, shape, &Device::Cpu),
            Numbers::Bf16(n) => Tensor::from_vec(n, shape, &Device::Cpu),
            Numbers::U8(n) => Tensor::from_vec(n, shape, &Device::Cpu),
            Numbers::I64(n) => Tensor::from_vec(n, shape, &Device::Cpu),
        }
    }
}

/// Reinterprets bytes as numbers. `None` if they are not aligned for `T`.
fn numbers_in<T: Plain>(bytes: &mut [u8]) -> Option<&mut [T]> {
    // SAFETY: `Plain` has no bit pattern that is invalid, and no padding that reading it as bytes would reach.
    let (before, numbers, behind) = unsafe { bytes.align_to_mut::<T>() };
    (before.is_empty() && behind.is_empty()).then_some(numbers)
}

impl<'a> Part<'a> {
    /// Reinterprets bytes as numbers of this dtype. `None` for a dtype that is not read, and for misaligned bytes.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // pinned memory is CUDA's
    pub(crate) fn over(bytes: &'a mut [u8], target: DType) -> Option<Part<'a>> {
        Some(match target {
            DType::F32 => Part::F32(numbers_in(bytes)?),
            DType::F64 => Part::F64(numbers_in(bytes)?),
            DType::F16 => Part::F16(numbers_in(bytes)?),
            DType::BF16 => Part::Bf16(numbers_in(bytes)?),
            DType::U8 => Part::U8(bytes),
            DType::I64 => Part::I64(numbers_in(bytes)?),
            _ => return None,
        })
    }

    /// Number of elements.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // pinned memory is CUDA's
    pub(crate) fn len(&self) -> usize {
        match self {
            Part::F32(n) => n.len(),
            Part::F64(n) => n.len(),
            Part::F16(n) => n.len(),
            Part::Bf16(n) => n.len(),
            Part::U8(n) => n.len(),
            Part::I64(n) => n.len(),
        }
    }

    /// Splits after the first `count` numbers.
    pub(crate) fn split(self, count: usize) -> (Part<'a>, Part<'a>) {
        macro_rules! halves {
            ($variant:ident, $numbers:expr) => {{
                let (first, rest) = $numbers.split_at_mut(count);
                (Part::$variant(first), Part::$variant(rest))
            }};
        }
        match self {
            Part::F32(n) => halves!(F32, n),
            Part::F64(n) => halves!(F64, n),
            Part::F16(n) => halves!(F16, n),
            Part::Bf16(n) => halves!(Bf16, n),
            Part::U8(n) => halves!(U8, n),
            Part::I64(n) => halves!(I64, n),
        }
    }

    /// Fills the slice with the numbers at `offset` in the file, or in bytes. Without a conversion the bytes are read in place and
    /// NaN keeps its payload; otherwise NaN stays NaN.
    pub(crate) fn read(
        self,
        file: &(impl ReadAt + ?Sized),
        offset: u64,
        stored: Stored,
    ) -> std::io::Result<()> {
        match (self, stored) {
            (Part::F32(to), Stored::F32) => file.fill(as_bytes(to), offset),
            (Part::F64(to), Stored::F64) => file.fill(as_bytes(to), offset),
            (Part::F16(to), Stored::F16) => file.fill(as_bytes(to), offset),
            (Part::Bf16(to), Stored::Bf16) => file.fill(as_bytes(to), offset),
            (Part::I64(to), Stored::I64) => file.fill(as_bytes(to), offset),
            (Part::U8(to), Stored::U8) => file.fill(to, offset),
            (Part::F32(to), stored) => read_f32(file, offset, stored, to),
            (Part::F64(to), stored) => read_f64(file, offset, stored, to),
            (Part::F16(to), stored) => read_f16(file, offset, stored, to),
            (Part::Bf16(to), stored) => read_bf16(file, offset, stored, to),
            (Part::I64(to), Stored::U8) => {
                through(file, offset, to, |from: &[u8], to| each(from, to, i64::from))
            }
            (Part::U8(_) | Part::I64(_), _) => Err(not_converted()),
        }
    }
}

/// Error for a conversion that [`converts`] rejects; unreachable after that check.
fn not_converted() -> std::io::Error {
    std::io::Error::other("these numbers are not read so")
}

/// Reads piece by piece through a buffer of the stored type, converting each piece.
fn through<S: Plain, D>(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    to: &mut [D],
    convert: impl Fn(&[S], &mut [D]),
) -> std::io::Result<()> {
    let mut buffer = vec![S::default(); PIECE.min(to.len())];
    let mut offset = offset;
    for piece in to.chunks_mut(PIECE) {
        let from = &mut buffer[..piece.len()];
        let bytes = as_bytes(from);
        file.fill(bytes, offset)?;
        offset += bytes.len() as u64;
        convert(from, piece);
    }
    Ok(())
}

/// A loop that the compiler vectorizes.
fn each<S: Copy, D>(from: &[S], to: &mut [D], convert: impl Fn(S) -> D) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = convert(*from);
    }
}

fn read_f32(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    stored: Stored,
    to: &mut [f32],
) -> std::io::Result<()> {
    match stored {
        Stored::F32 => file.fill(as_bytes(to), offset),
        // bf16 is the upper half of f32: a shift vectorizes, where `to_f32` branches.
        Stored::Bf16 => through(file, offset, to, |from: &[bf16], to| {
            each(from, to, |x| f32::from_bits(u32::from(x.to_bits()) << 16));
        }),
        Stored::F16 => through(file, offset, to, |from: &[f16], to| from.convert_to_f32_slice(to)),
        Stored::F64 => through(file, offset, to, |from: &[f64], to| each(from, to, |x| x as f32)),
        Stored::U8 => through(file, offset, to, |from: &[u8], to| each(from, to, f32::from)),
        Stored::F8E4M3 => through(file, offset, to, |from: &[u8], to| each(from, to, e4m3_to_f32)),
        Stored::F8E5M2 => through(file, offset, to, |from: &[u8], to| each(from, to, e5m2_to_f32)),
        Stored::I8 | Stored::I32 | Stored::F8E8M0 | Stored::Gguf(_) => Err(not_converted()),
        Stored::I64 => through(file, offset, to, |from: &[i64], to| each(from, to, |x| x as f32)),
    }
}

fn read_f64(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    stored: Stored,
    to: &mut [f64],
) -> std::io::Result<()> {
    match stored {
        Stored::F64 => file.fill(as_bytes(to), offset),
        Stored::F32 => through(file, offset, to, |from: &[f32], to| each(from, to, f64::from)),
        Stored::Bf16 => through(file, offset, to, |from: &[bf16], to| each(from, to, bf16::to_f64)),
        Stored::F16 => through(file, offset, to, |from: &[f16], to| from.convert_to_f64_slice(to)),
        Stored::U8 => through(file, offset, to, |from: &[u8], to| each(from, to, f64::from)),
        Stored::F8E4M3 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| f64::from(e4m3_to_f32(x)));
        }),
        Stored::F8E5M2 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| f64::from(e5m2_to_f32(x)));
        }),
        Stored::I8 | Stored::I32 | Stored::F8E8M0 | Stored::Gguf(_) => Err(not_converted()),
        Stored::I64 => through(file, offset, to, |from: &[i64], to| each(from, to, |x| x as f64)),
    }
}

fn read_f16(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    stored: Stored,
    to: &mut [f16],
) -> std::io::Result<()> {
    match stored {
        Stored::F16 => file.fill(as_bytes(to), offset),
        Stored::F32 => through(file, offset, to, |from: &[f32], to| {
            to.convert_from_f32_slice(from)
        }),
        Stored::F64 => through(file, offset, to, |from: &[f64], to| {
            to.convert_from_f64_slice(from)
        }),
        Stored::Bf16 => through(file, offset, to, |from: &[bf16], to| {
            each(from, to, |x| f16::from_f32(x.to_f32()));
        }),
        Stored::U8 => through(file, offset, to, |from: &[u8], to| each(from, to, f16::from)),
        Stored::F8E4M3 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| f16::from_f32(e4m3_to_f32(x)));
        }),
        Stored::F8E5M2 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| f16::from_f32(e5m2_to_f32(x)));
        }),
        Stored::I8 | Stored::I32 | Stored::F8E8M0 | Stored::Gguf(_) => Err(not_converted()),
        Stored::I64 => through(file, offset, to, |from: &[i64], to| {
            each(from, to, |x| f16::from_f64(x as f64));
        }),
    }
}

fn read_bf16(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    stored: Stored,
    to: &mut [bf16],
) -> std::io::Result<()> {
    match stored {
        Stored::Bf16 => file.fill(as_bytes(to), offset),
        Stored::F32 => through(file, offset, to, |from: &[f32], to| {
            to.convert_from_f32_slice(from)
        }),
        Stored::F64 => through(file, offset, to, |from: &[f64], to| {
            to.convert_from_f64_slice(from)
        }),
        Stored::F16 => through(file, offset, to, |from: &[f16], to| {
            each(from, to, |x| bf16::from_f32(x.to_f32()));
        }),
        Stored::U8 => through(file, offset, to, |from: &[u8], to| each(from, to, bf16::from)),
        Stored::F8E4M3 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| bf16::from_f32(e4m3_to_f32(x)));
        }),
        Stored::F8E5M2 => through(file, offset, to, |from: &[u8], to| {
            each(from, to, |x| bf16::from_f32(e5m2_to_f32(x)));
        }),
        Stored::I8 | Stored::I32 | Stored::F8E8M0 | Stored::Gguf(_) => Err(not_converted()),
        Stored::I64 => through(file, offset, to, |from: &[i64], to| {
            each(from, to, |x| bf16::from_f64(x as f64));
        }),
    }
}
