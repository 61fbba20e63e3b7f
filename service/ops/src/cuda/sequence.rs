//! [`crate::pad_sequence`], [`crate::pcm16()`] and the filters of [`crate::SequenceFilter`] on a CUDA device.

use candle_core::{DType, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::convolve::unwritten;
use super::moments::is_wide;
use super::pictures::{cleared_flag, is_finite};
use super::{Card, THREADS, UNIT, address_of, kernel_dtype};
use crate::sequence::Fold;
use crate::{ANTIALIAS_TAPS, RowLength, Snake};

/// Rows that a thread activates, with the factors of its channels.
const ROWS_OF_THREAD: usize = 8;

/// Rows that a thread activates at twice the rate, as in `sequence.cuh`.
const ANTIALIASED_ROWS: usize = 32;

/// Mirrors the struct in `sequence.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SnakeArguments {
    x: u64,
    alpha: u64,
    beta: u64,
    out: u64,
    rows: u64,
    written: u64,
    before: u64,
    apart: u64,
    channels: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for SnakeArguments {}

/// Mirrors the struct in `sequence.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AntialiasArguments {
    x: u64,
    alpha: u64,
    beta: u64,
    out: u64,
    rows: u64,
    channels: u32,
    unused: u32,
    taps: [f32; ANTIALIAS_TAPS],
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for AntialiasArguments {}

/// Mirrors the struct in `sequence.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pcm16Arguments {
    x: u64,
    out: u64,
    strange: u64,
    numbers: u64,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for Pcm16Arguments {}

/// Mirrors the struct in `sequence.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ScalesArguments {
    direction: u64,
    length: u64,
    out: u64,
    columns: u64,
    gain: f32,
    added: f32,
    keeps: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for ScalesArguments {}

/// Mirrors the struct in `sequence.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FoldArguments {
    direction: u64,
    scales: u64,
    out: u64,
    numbers: u64,
    outputs: u32,
    taps: u32,
    inputs: u32,
    rows: u32,
    columns: u32,
    weight_taps: u32,
    transposed: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for FoldArguments {}

/// Shapes and dtypes are validated by the caller. `out` may be `x`, with no rows before.
pub(crate) fn snake(x: &Tensor, snake: Option<&Snake>, before: usize, out: &Tensor) -> Result<()> {
    let ((rows, channels), (written, _)) = (x.dims2()?, out.dims2()?);
    let apart = written.div_ceil(ROWS_OF_THREAD);
    let arguments = SnakeArguments {
        x: address_of(x)?,
        alpha: snake.map_or(Ok(0), |snake| address_of(&snake.alpha))?,
        beta: snake.map_or(Ok(0), |snake| address_of(&snake.beta))?,
        out: address_of(out)?,
        rows: rows as u64,
        written: written as u64,
        before: before as u64,
        apart: apart as u64,
        channels: channels as u32,
        unused: 0,
    };
    let addresses = [arguments.x, arguments.alpha, arguments.beta, arguments.out];
    let wide = addresses
        .iter()
        .all(|&address| is_wide(address, &[channels], channels, x.dtype()));
    let wide = if wide { "wide_" } else { "" };
    let name = format!("snake_{wide}{}", kernel_dtype(x.dtype())?);
    let grid = ((apart * channels.div_ceil(UNIT)).div_ceil(THREADS), 1, 1);
    let device = out.device().as_cuda_device()?;
    // SAFETY: the arguments have the kernel's layout, and point to tensors of these rows and channels that live until
    // this is enqueued. A thread reads and writes its own numbers alone.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
}

/// [`crate::antialiased_snake`] of a sequence that is not empty. Shapes, dtypes and layouts are validated by the caller.
pub(crate) fn antialiased_snake(
    x: &Tensor,
    snake: &Snake,
    taps: &[f32; ANTIALIAS_TAPS],
    out: &Tensor,
) -> Result<()> {
    let (rows, channels) = x.dims2()?;
    let arguments = AntialiasArguments {
        x: address_of(x)?,
        alpha: address_of(&snake.alpha)?,
        beta: address_of(&snake.beta)?,
        out: address_of(out)?,
        rows: rows as u64,
        channels: channels as u32,
        unused: 0,
        taps: *taps,
    };
    let name = format!("antialiased_snake_{}", kernel_dtype(out.dtype())?);
    let grid = (
        (rows.div_ceil(ANTIALIASED_ROWS) * channels).div_ceil(THREADS),
        1,
        1,
    );
    let device = out.device().as_cuda_device()?;
    // SAFETY: the arguments have the kernel's layout, and point to tensors of these rows and channels that live until
    // this is enqueued. Rows that are read are within the sequence; a thread writes its own numbers alone.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
}

/// [`crate::pcm16()`] of contiguous f32.
pub(crate) fn pcm16(samples: &Tensor) -> Result<(Vec<u8>, bool)> {
    let device = samples.device().as_cuda_device()?;
    let numbers = samples.elem_count();
    let (out, strange) = (
        unwritten(&[2 * numbers], DType::U8, device)?,
        cleared_flag(device)?,
    );
    let arguments = Pcm16Arguments {
        x: address_of(samples)?,
        out: address_of(&out)?,
        strange: address_of(&strange)?,
        numbers: numbers as u64,
    };
    let grid = (numbers.div_ceil(THREADS), 1, 1);
    // SAFETY: the arguments have the kernel's layout, and point to `numbers` numbers, two bytes for each, and a flag; all
    // threads that write it write the same value. All live until this is enqueued.
    unsafe {
        Card::of(device)?.launch(
            &device.cuda_stream(),
            "pcm16".to_owned(),
            grid,
            THREADS,
            &arguments,
        )?
    };
    Ok((out.to_vec1::<u8>()?, is_finite(&strange)?))
}

/// `length / ‖direction‖` of each row, f32; as many lengths as rows where they are stored, and at least one row.
pub(crate) fn weight_scales(direction: &Tensor, length: RowLength<'_>) -> Result<Tensor> {
    let direction = direction.contiguous()?;
    let rows = direction.dim(0)?;
    let columns = direction.elem_count() / rows;
    let device = direction.device().as_cuda_device()?;
    // Files may hold lengths in another dtype than directions.
    let stored = match length {
        RowLength::Stored(lengths) => Some(crate::in_dtype(lengths, DType::F32)?),
        RowLength::Own { .. } | RowLength::Gain { .. } => None,
    };
    let (gain, added, keeps) = match length {
        RowLength::Stored(_) => (1.0, 0.0, false),
        RowLength::Own { gain } => (gain, 0.0, true),
        RowLength::Gain { gain, epsilon } => (gain, epsilon * (columns as f64).sqrt(), false),
    };
    let scales = unwritten(&[rows], DType::F32, device)?;
    let arguments = ScalesArguments {
        direction: address_of(&direction)?,
        length: stored.as_ref().map_or(Ok(0), address_of)?,
        out: address_of(&scales)?,
        columns: columns as u64,
        gain: gain as f32,
        added: added as f32,
        keeps: keeps.into(),
        unused: 0,
    };
    let name = format!("weight_scales_{}", kernel_dtype(direction.dtype())?);
    // SAFETY: the arguments have the kernel's layout, and point to `rows` rows, which live until this is enqueued; a
    // block writes the scale of its row.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, (rows, 1, 1), THREADS, &arguments)? };
    Ok(scales)
}

/// The filter `[outputs, taps, inputs]` of a contiguous weight, whose rows have these scales.
pub(crate) fn folded(direction: &Tensor, scales: &Tensor, fold: &Fold, dtype: DType) -> Result<Tensor> {
    let direction = crate::in_dtype(direction, dtype)?;
    let Fold {
        outputs,
        taps,
        inputs,
        weight: [rows, columns, weight_taps],
        transposed,
    } = *fold;
    if direction.elem_count() != rows * columns * weight_taps || scales.elem_count() != rows {
        candle_core::bail!("a weight {:?} as {fold:?}", direction.dims());
    }
    let device = direction.device().as_cuda_device()?;
    let held = unwritten(&[outputs, taps, inputs], dtype, device)?;
    let arguments = FoldArguments {
        direction: address_of(&direction)?,
        scales: address_of(scales)?,
        out: address_of(&held)?,
        numbers: held.elem_count() as u64,
        outputs: outputs as u32,
        taps: taps as u32,
        inputs: inputs as u32,
        rows: rows as u32,
        columns: columns as u32,
        weight_taps: weight_taps as u32,
        transposed: transposed as u32,
        unused: 0,
    };
    let name = format!("fold_weight_{}", kernel_dtype(dtype)?);
    let grid = (held.elem_count().div_ceil(THREADS), 1, 1);
    // SAFETY: the arguments have the kernel's layout; a number is read within the weight's dimensions alone, and each
    // number of the filter is written once. All tensors live until this is enqueued.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments)? };
    Ok(held)
}
