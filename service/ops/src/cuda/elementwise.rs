//! Elementwise operations on a CUDA device. Shapes and dtypes are validated by the callers.

use candle_core::{D, DType, Error, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::{ALIGNMENT, Card, THREADS, UNIT, address_of, kernel_dtype};
use crate::Nonlinearity;
use crate::place::Rows;

/// Address and strides of a tensor, mirroring `elementwise.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct StridedRows {
    start: u64,
    batch_stride: u64,
    row_stride: u64,
    rows: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CopyArguments {
    from: StridedRows,
    to: StridedRows,
    ids: u64,
    rows: u32,
    columns: u32,
    table: u32,
    wide: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GluArguments {
    gate: StridedRows,
    up: StridedRows,
    out: StridedRows,
    rows: u32,
    columns: u32,
    by: u32,
    has_up: u32,
    wide: u32,
    most: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FiniteArguments {
    x: StridedRows,
    flag: u64,
    rows: u32,
    columns: u32,
    wide: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RelativeBiasArguments {
    table: u64,
    buckets: u64,
    out: u64,
    heads: u32,
    queries: u32,
    keys: u32,
    known: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ChangeArguments {
    x: StridedRows,
    base: StridedRows,
    kept: StridedRows,
    sums: u64,
    rows: u32,
    columns: u32,
    wide: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for CopyArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for GluArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for FiniteArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for RelativeBiasArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for ChangeArguments {}

/// The common row layout of tensors, and whether all of them allow wide loads.
struct RowLayout {
    columns: usize,
    is_wide: bool,
}

impl RowLayout {
    fn in_rows_of(columns: usize) -> RowLayout {
        RowLayout {
            columns,
            is_wide: columns.is_multiple_of(UNIT),
        }
    }

    fn place(&mut self, x: &Tensor) -> Result<(StridedRows, u32)> {
        let rows = Rows::of(x, self.columns)?;
        let start = address_of(x)?;
        let bytes = |stride: usize| (stride * x.dtype().size_in_bytes()) as u64;
        self.is_wide &= [start, bytes(rows.batch_stride), bytes(rows.row_stride)]
            .iter()
            .all(|at| at.is_multiple_of(ALIGNMENT));
        let place = StridedRows {
            start,
            batch_stride: rows.batch_stride as u64,
            row_stride: rows.row_stride as u64,
            rows: narrow(rows.rows)?,
            unused: 0,
        };
        Ok((place, narrow(rows.count())?))
    }

    /// Rows one after the other at an address.
    fn place_at(&mut self, start: u64, rows: u32) -> StridedRows {
        self.is_wide &= start.is_multiple_of(ALIGNMENT);
        StridedRows {
            start,
            batch_stride: u64::from(rows) * self.columns as u64,
            row_stride: self.columns as u64,
            rows,
            unused: 0,
        }
    }
}

fn narrow(number: usize) -> Result<u32> {
    u32::try_from(number).map_err(Error::wrap)
}

/// Launch grid with a thread per [`UNIT`] elements of a row.
fn blocks(rows: u32, columns: usize) -> Result<(usize, usize, usize)> {
    let units = rows as usize * columns.div_ceil(UNIT);
    if units > u32::MAX as usize - THREADS {
        candle_core::bail!("{rows} rows of {columns} numbers are too many for one launch");
    }
    Ok((units.div_ceil(THREADS), 1, 1))
}

/// [`crate::copy_rows()`], or with `ids` [`crate::embed`].
pub(crate) fn copy_rows(x: &Tensor, ids: Option<&Tensor>, out: &Tensor, columns: usize) -> Result<()> {
    if out.elem_count() == 0 {
        return Ok(());
    }
    let mut layout = RowLayout::in_rows_of(columns);
    let (from, to) = (layout.place(x)?, layout.place(out)?);
    // SAFETY: both tensors have these rows and columns, and there is an id per written row. An id out of range is not dereferenced.
    unsafe { copy_places((x, from), ids, (out, to), &layout) }
}

/// Copies the rows of a tensor to this address, one after the other, in the dtype of the tensor.
///
/// # Safety
/// The address is one that the tensor's card can write so many numbers to.
pub(super) unsafe fn copy_rows_to(x: &Tensor, address: u64) -> Result<()> {
    let mut layout = RowLayout::in_rows_of(x.dim(D::Minus1)?);
    let (from, rows) = layout.place(x)?;
    let to = layout.place_at(address, rows);
    // SAFETY: the caller's promise; the rows of the tensor are as many.
    unsafe { copy_places((x, (from, rows)), None, (x, (to, rows)), &layout) }
}

/// Copies rows of the dtype of `out`, one after the other from this address, to `out`.
///
/// # Safety
/// The address is one that the tensor's card can read so many numbers from.
pub(super) unsafe fn copy_rows_from(address: u64, out: &Tensor) -> Result<()> {
    let mut layout = RowLayout::in_rows_of(out.dim(D::Minus1)?);
    let (to, rows) = layout.place(out)?;
    let from = layout.place_at(address, rows);
    // SAFETY: the caller's promise; the rows of the tensor are as many.
    unsafe { copy_places((out, (from, rows)), None, (out, (to, rows)), &layout) }
}

/// Copies between places that hold rows of the dtypes of these tensors.
///
/// # Safety
/// Both places have these rows, of the columns of the layout, and there is an id for each written row.
unsafe fn copy_places(
    (x, (from, table)): (&Tensor, (StridedRows, u32)),
    ids: Option<&Tensor>,
    (out, (to, rows)): (&Tensor, (StridedRows, u32)),
    layout: &RowLayout,
) -> Result<()> {
    let columns = layout.columns;
    let arguments = CopyArguments {
        from,
        to,
        ids: ids.map_or(Ok(0), address_of)?,
        rows,
        columns: narrow(columns)?,
        table,
        wide: layout.is_wide.into(),
    };
    let device = out.device().as_cuda_device()?;
    let name = format!(
        "copy_rows_{}_{}",
        kernel_dtype(x.dtype())?,
        kernel_dtype(out.dtype())?
    );
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    // SAFETY: the structure mirrors `elementwise.cuh`; the rest is the caller's promise.
    unsafe { card.launch(&stream, name, blocks(rows, columns)?, THREADS, &arguments) }
}

/// [`crate::glu()`], or without `up` [`crate::activate`].
pub(crate) fn glu(gate: &Tensor, up: Option<&Tensor>, by: Nonlinearity, out: &Tensor) -> Result<()> {
    let columns = out.dim(D::Minus1)?;
    if out.elem_count() == 0 {
        return Ok(());
    }
    let mut layout = RowLayout::in_rows_of(columns);
    let (of_gate, rows) = layout.place(gate)?;
    let (of_out, _) = layout.place(out)?;
    let of_up = up.map(|up| layout.place(up)).transpose()?;
    // In the order of `elementwise.cuh`.
    let (by, most) = match by {
        Nonlinearity::Gelu => (0, 0.0),
        Nonlinearity::GeluTanh => (1, 0.0),
        Nonlinearity::QuickGelu => (2, 0.0),
        Nonlinearity::Silu => (3, 0.0),
        Nonlinearity::Tanh => (4, 0.0),
        Nonlinearity::HardTanh { most } => (5, most),
    };
    let arguments = GluArguments {
        gate: of_gate,
        up: of_up.map_or(StridedRows::default(), |(place, _)| place),
        out: of_out,
        rows,
        columns: narrow(columns)?,
        by,
        has_up: up.is_some().into(),
        wide: layout.is_wide.into(),
        most,
    };
    let device = out.device().as_cuda_device()?;
    let name = format!("glu_{}", kernel_dtype(out.dtype())?);
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    // SAFETY: the structure mirrors `elementwise.cuh`; all tensors have these rows and columns. A thread writes only
    // elements that no other thread reads.
    unsafe { card.launch(&stream, name, blocks(rows, columns)?, THREADS, &arguments) }
}

/// [`crate::all_finite`].
pub(crate) fn all_finite(x: &Tensor) -> Result<bool> {
    let columns = x.dim(D::Minus1)?;
    let mut layout = RowLayout::in_rows_of(columns);
    let (place, rows) = layout.place(x)?;
    let flag = Tensor::zeros(1, DType::U32, x.device())?;
    let arguments = FiniteArguments {
        x: place,
        flag: address_of(&flag)?,
        rows,
        columns: narrow(columns)?,
        wide: layout.is_wide.into(),
        unused: 0,
    };
    let device = x.device().as_cuda_device()?;
    let name = format!("find_not_finite_{}", kernel_dtype(x.dtype())?);
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    // SAFETY: the structure mirrors `elementwise.cuh`; the tensor has these rows and columns, and the flag is one
    // element. All threads that write it write the same value.
    unsafe { card.launch(&stream, name, blocks(rows, columns)?, THREADS, &arguments)? };
    Ok(flag.to_vec1::<u32>()? == [0])
}

/// Blocks that sum changes, at most: each writes two sums, which are added in host memory.
const SUMMING_BLOCKS: usize = 512;

/// The sums of `|x - base - kept|` and of `|kept|`, for [`crate::relative_change`]. The stream is waited for.
pub(crate) fn sums_of_change(x: &Tensor, base: &Tensor, kept: &Tensor) -> Result<[f64; 2]> {
    let columns = x.dim(D::Minus1)?;
    let mut layout = RowLayout::in_rows_of(columns);
    let ((of_x, rows), (of_base, _), (of_kept, _)) =
        (layout.place(x)?, layout.place(base)?, layout.place(kept)?);
    let count = blocks(rows, columns)?.0.min(SUMMING_BLOCKS);
    let sums = Tensor::zeros(2 * count, DType::F32, x.device())?;
    let arguments = ChangeArguments {
        x: of_x,
        base: of_base,
        kept: of_kept,
        sums: address_of(&sums)?,
        rows,
        columns: narrow(columns)?,
        wide: layout.is_wide.into(),
        unused: 0,
    };
    let device = x.device().as_cuda_device()?;
    let name = format!("sum_changes_{}", kernel_dtype(x.dtype())?);
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    // SAFETY: the structure mirrors `elementwise.cuh`; the three tensors have these rows and columns and one dtype, and there are
    // two sums for each block.
    unsafe { card.launch(&stream, name, (count, 1, 1), THREADS, &arguments)? };
    let mut all = [0.0; 2];
    for (number, sum) in sums.to_vec1::<f32>()?.into_iter().enumerate() {
        all[number % 2] += f64::from(sum);
    }
    Ok(all)
}

/// [`crate::relative_bias()`].
pub(crate) fn relative_bias(table: &Tensor, buckets: &Tensor, out: &Tensor) -> Result<()> {
    let (known, heads) = table.dims2()?;
    let (queries, keys) = (out.dim(D::Minus2)?, out.dim(D::Minus1)?);
    if out.elem_count() == 0 {
        return Ok(());
    }
    let arguments = RelativeBiasArguments {
        table: address_of(table)?,
        buckets: address_of(buckets)?,
        out: address_of(out)?,
        heads: narrow(heads)?,
        queries: narrow(queries)?,
        keys: narrow(keys)?,
        known: narrow(known)?,
    };
    let device = out.device().as_cuda_device()?;
    let name = format!("relative_bias_{}", kernel_dtype(out.dtype())?);
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    let grid = blocks(narrow(heads * queries)?, keys)?;
    // SAFETY: the structure mirrors `elementwise.cuh`; all three tensors are contiguous and of these dimensions, and
    // a bucket out of range is not dereferenced.
    unsafe { card.launch(&stream, name, grid, THREADS, &arguments) }
}
