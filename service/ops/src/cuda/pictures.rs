//! Conversion of images and latents on a CUDA device ([`crate::map_to_planes()`] and related operations).

use candle_core::{CudaDevice, DType, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::convolve::unwritten;
use super::{Card, address_of, kernel_dtype, tensor};
use crate::place::Rows;

const THREADS: usize = 256;

/// Mirrors the struct in `pictures.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ConversionArguments {
    x: u64,
    out: u64,
    not_finite: u64,
    positions: u64,
    channels: u32,
    factor: f32,
    summand: f32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for ConversionArguments {}

/// A pass from one contiguous tensor to another with as many elements.
struct ConversionPass<'a> {
    kernel: &'static str,
    /// The dtype of the map, which is either of the tensors.
    dtype: DType,
    x: &'a Tensor,
    out: &'a Tensor,
    /// u32 flag of one element, set if a value is not finite.
    not_finite: Option<&'a Tensor>,
    channels: usize,
    affine: (f64, f64),
}

impl ConversionPass<'_> {
    fn run(self, device: &CudaDevice) -> Result<()> {
        let numbers = self.out.elem_count();
        let fits = self.x.elem_count() == numbers && self.x.is_contiguous() && self.out.is_contiguous();
        if !fits || self.channels == 0 || !numbers.is_multiple_of(self.channels) {
            candle_core::bail!(
                "{} from {:?} to {:?}",
                self.kernel,
                self.x.dims(),
                self.out.dims()
            );
        }
        let arguments = ConversionArguments {
            x: address_of(self.x)?,
            out: address_of(self.out)?,
            not_finite: self.not_finite.map(address_of).transpose()?.unwrap_or(0),
            positions: (numbers / self.channels) as u64,
            channels: self.channels as u32,
            factor: self.affine.0 as f32,
            summand: self.affine.1 as f32,
        };
        let name = format!("{}_{}", self.kernel, kernel_dtype(self.dtype)?);
        let grid = (numbers.div_ceil(THREADS), 1, 1);
        // SAFETY: the arguments have the kernel's layout, and point to equally many elements that are read and
        // written; the tensors live until this is enqueued.
        unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
    }
}

/// A zeroed flag for a kernel to set.
pub(super) fn cleared_flag(device: &CudaDevice) -> Result<Tensor> {
    Ok(tensor(device.alloc_zeros::<u32>(1)?, device, 1))
}

pub(super) fn is_finite(not_finite: &Tensor) -> Result<bool> {
    Ok(not_finite.to_vec1::<u32>()? == [0])
}

pub(crate) fn planes_to_map(planes: &Tensor, affine: (f64, f64), dtype: DType) -> Result<Tensor> {
    let (_, channels, height, width) = planes.dims4()?;
    let device = planes.device().as_cuda_device()?;
    let out = unwritten(&[height, width, channels], dtype, device)?;
    let pass = ConversionPass {
        kernel: "planes_to_map",
        dtype,
        x: planes,
        out: &out,
        not_finite: None,
        channels,
        affine,
    };
    pass.run(device)?;
    Ok(out)
}

pub(crate) fn map_to_planes(map: &Tensor) -> Result<(Tensor, bool)> {
    let (height, width, channels) = map.dims3()?;
    let device = map.device().as_cuda_device()?;
    let (out, not_finite) = (
        unwritten(&[1, channels, height, width], DType::F32, device)?,
        cleared_flag(device)?,
    );
    let pass = ConversionPass {
        kernel: "map_to_planes",
        dtype: map.dtype(),
        x: map,
        out: &out,
        not_finite: Some(&not_finite),
        channels,
        affine: (1.0, 0.0),
    };
    pass.run(device)?;
    Ok((out, is_finite(&not_finite)?))
}

pub(crate) fn map_to_bytes(map: &Tensor) -> Result<(Vec<u8>, bool)> {
    let device = map.device().as_cuda_device()?;
    let (out, not_finite) = (
        unwritten(&[map.elem_count()], DType::U8, device)?,
        cleared_flag(device)?,
    );
    let pass = ConversionPass {
        kernel: "map_to_bytes",
        dtype: map.dtype(),
        x: map,
        out: &out,
        not_finite: Some(&not_finite),
        channels: map.dim(candle_core::D::Minus1)?,
        affine: (1.0, 0.0),
    };
    pass.run(device)?;
    Ok((out.to_vec1::<u8>()?, is_finite(&not_finite)?))
}

pub(crate) fn bytes_to_map(bytes: &Tensor, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let device = bytes.device().as_cuda_device()?;
    let out = unwritten(shape, dtype, device)?;
    let pass = ConversionPass {
        kernel: "bytes_to_map",
        dtype,
        x: bytes,
        out: &out,
        not_finite: None,
        channels: shape[shape.len() - 1],
        affine: (1.0, 0.0),
    };
    pass.run(device)?;
    Ok(out)
}

/// Mirrors the struct in `pictures.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BlendArguments {
    before: u64,
    x: u64,
    before_row: u64,
    x_row: u64,
    rows: u32,
    columns: u32,
    channels: u32,
    by_row: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for BlendArguments {}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn blend(before: &Tensor, x: &Tensor, by_row: bool) -> Result<()> {
    let (rows, columns, channels) = x.dims3()?;
    let width = columns * channels;
    let row_of = |map: &Tensor| Ok::<_, candle_core::Error>(Rows::of(map, width)?.row_stride as u64);
    let arguments = BlendArguments {
        before: address_of(before)?,
        x: address_of(x)?,
        before_row: row_of(before)?,
        x_row: row_of(x)?,
        rows: rows as u32,
        columns: columns as u32,
        channels: channels as u32,
        by_row: u32::from(by_row),
    };
    let device = x.device().as_cuda_device()?;
    let name = format!("blend_{}", kernel_dtype(x.dtype())?);
    let grid = ((rows * width).div_ceil(THREADS), 1, 1);
    // SAFETY: the arguments have the kernel's layout, and describe views of these dimensions at their strides; both
    // tensors live until this is enqueued.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
}
