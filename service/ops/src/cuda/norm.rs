//! [`crate::norm_modulate`] and related operations on a CUDA device.

use candle_core::{D, DType, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::{ALIGNMENT, Card, UNIT, address_of, kernel_dtype};
use crate::norm::{Activation, Branch, Norm, Pass, dtypes};
use crate::place::Rows;

/// Preferred and maximum threads per row.
const FEW_THREADS: usize = 128;
const MAX_THREADS: usize = 512;

/// Resident blocks per multiprocessor: limited by the registers of the kernel with 128 threads and three units.
const BLOCKS_OF_PROCESSOR: usize = 3;

/// Units per thread of a long row, and of the longest.
const LONG: usize = 4;
const LONGEST: usize = 8;

/// Mirrors the struct in `norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NormArguments {
    x: u64,
    y: u64,
    gate: u64,
    y_weight: u64,
    weight: u64,
    bias: u64,
    scale: u64,
    shift: u64,
    out: u64,
    out_scales: u64,
    x_batch: u64,
    x_row: u64,
    y_batch: u64,
    y_row: u64,
    out_batch: u64,
    out_row: u64,
    gate_batch: u64,
    scale_batch: u64,
    shift_batch: u64,
    rows: u32,
    columns: u32,
    eps: f32,
    is_rms: u32,
    is_tanh: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for NormArguments {}

/// The layout of the tensors that a pass reads, and whether all of them allow wide loads.
struct NormLayout {
    columns: usize,
    batch: usize,
    is_wide: bool,
}

impl NormLayout {
    /// Address, and strides of batch items and rows.
    fn rows(&mut self, x: &Tensor) -> Result<(u64, u64, u64)> {
        let rows = Rows::of(x, self.columns)?;
        if rows.count() == 1 {
            // Broadcast to all rows.
            let address = address_of(x)?;
            self.align(address, &[], x.dtype());
            return Ok((address, 0, 0));
        }
        let rows_per_batch = rows.count() / self.batch;
        let batch_stride = match (rows.batch, self.batch) {
            (found, wanted) if found == wanted => rows.batch_stride,
            (1, _) => rows_per_batch * rows.row_stride,
            _ => candle_core::bail!("a norm of {} batches over {rows:?}", self.batch),
        };
        let address = address_of(x)?;
        self.align(address, &[batch_stride, rows.row_stride], x.dtype());
        Ok((address, batch_stride as u64, rows.row_stride as u64))
    }

    /// Address of a vector `[b, d]` or `[d]`, and its batch stride. Zero for `None`.
    fn vector(&mut self, vector: Option<&Tensor>, dtype: DType) -> Result<(u64, u64)> {
        let Some(vector) = vector else {
            return Ok((0, 0));
        };
        if vector.dtype() != dtype {
            candle_core::bail!("a norm in {dtype:?} with a vector of {:?}", vector.dtype());
        }
        let rows = Rows::of(vector, self.columns)?;
        let stride = match rows.count() {
            1 => 0,
            _ => rows.row_stride,
        };
        let address = address_of(vector)?;
        self.align(address, &[stride], dtype);
        Ok((address, stride as u64))
    }

    fn align(&mut self, address: u64, strides: &[usize], dtype: DType) {
        let of = |stride: &usize| (stride * dtype.size_in_bytes()) as u64;
        self.is_wide &= strides
            .iter()
            .map(of)
            .chain([address])
            .all(|at| at.is_multiple_of(ALIGNMENT));
    }
}

/// Runs one validated pass.
pub(crate) fn norm(pass: &Pass<'_>) -> Result<()> {
    let columns = pass.x.dim(D::Minus1)?;
    if pass.x.elem_count() == 0 {
        return Ok(());
    }
    let (of_x, dtype) = dtypes(pass)?;
    let gate = pass.branch.and_then(|branch| branch.gate);
    let mut batch = Rows::of(pass.x, columns)?.batch;
    let scale = pass.modulation.map(|modulation| modulation.scale);
    let shift = pass.modulation.and_then(|modulation| modulation.shift);
    let vectors = [gate.map(|gate| gate.vector), scale, shift];
    let tensors = [
        pass.branch.map(|branch| branch.y),
        match pass.out {
            Some(Activation::Numbers(out)) => Some(out),
            _ => None,
        },
    ];
    for tensor in tensors.into_iter().flatten() {
        batch = batch.max(Rows::of(tensor, columns)?.batch);
    }
    for vector in vectors.into_iter().flatten() {
        batch = batch.max(vector.dim(0)?);
    }
    let mut layout = NormLayout {
        columns,
        batch,
        is_wide: columns.is_multiple_of(UNIT),
    };
    let mut arguments = NormArguments {
        columns: columns as u32,
        ..NormArguments::default()
    };
    let a = &mut arguments;
    (a.x, a.x_batch, a.x_row) = layout.rows(pass.x)?;
    if let Some(Branch { y, .. }) = pass.branch {
        (a.y, a.y_batch, a.y_row) = layout.rows(y)?;
    }
    (a.gate, a.gate_batch) = layout.vector(gate.map(|gate| gate.vector), dtype)?;
    (a.y_weight, _) = layout.vector(gate.and_then(|gate| gate.branch_norm), dtype)?;
    a.is_tanh = u32::from(gate.is_some_and(|gate| gate.tanh));
    match pass.norm {
        Some(Norm::Layer { affine, eps }) => {
            (a.weight, _) = layout.vector(affine.map(|(weight, _)| weight), dtype)?;
            (a.bias, _) = layout.vector(affine.map(|(_, bias)| bias), dtype)?;
            a.eps = eps as f32;
        }
        Some(Norm::Rms { weight, eps }) => {
            (a.weight, _) = layout.vector(weight, dtype)?;
            (a.eps, a.is_rms) = (eps as f32, 1);
        }
        None => {}
    }
    (a.scale, a.scale_batch) = layout.vector(scale, dtype)?;
    (a.shift, a.shift_batch) = layout.vector(shift, dtype)?;
    match pass.out {
        Some(Activation::Numbers(out)) => (a.out, a.out_batch, a.out_row) = layout.rows(out)?,
        Some(Activation::Codes(codes)) => {
            if !codes.codes.is_contiguous() || !codes.scales.is_contiguous() {
                candle_core::bail!("codes of rows have gaps");
            }
            (a.out, a.out_scales) = (address_of(&codes.codes)?, address_of(&codes.scales)?);
        }
        None => {}
    }
    let rows = pass.x.elem_count() / columns / batch;
    a.rows = rows as u32;

    let units = columns.div_ceil(UNIT);
    let chunks = match units.div_ceil(FEW_THREADS) {
        few @ 0..LONG if layout.is_wide => few,
        _ if units <= LONG * MAX_THREADS => LONG,
        _ => LONGEST,
    };
    let threads = units.div_ceil(chunks).next_multiple_of(32);
    if threads > MAX_THREADS {
        candle_core::bail!(
            "a norm over {columns} numbers: at most {} fit",
            MAX_THREADS * LONGEST * UNIT
        );
    }
    let name = format!(
        "norm_{}_{}_{}_{chunks}",
        kernel_dtype(of_x)?,
        kernel_dtype(dtype)?,
        if layout.is_wide { "wide" } else { "single" }
    );
    let device = pass.x.device().as_cuda_device()?;
    let card = Card::of(device)?;
    // Rows are distributed evenly over the blocks.
    let at_once = (BLOCKS_OF_PROCESSOR * card.processors).div_ceil(batch);
    let blocks = rows.div_ceil(rows.div_ceil(at_once).max(1));
    // SAFETY: the structure mirrors `norm.cuh`, and the kernel stays within the rows, columns and strides of the
    // tensors, which have these dtypes. The caller keeps them for the duration of the call.
    unsafe {
        card.launch(
            &device.cuda_stream(),
            name,
            (blocks, batch, 1),
            threads,
            &arguments,
        )
    }
}
