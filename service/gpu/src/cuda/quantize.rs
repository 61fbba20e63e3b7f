//! Quantization on the card, of numbers that have just been copied there (`quantize.cu`). The bytes are identical to
//! those of the CPU (`crate::quantize`).

use std::mem::ManuallyDrop;
use std::sync::Arc;

use candle_core::DType;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg as _, result, sys,
};
use cudarc::nvrtc::Ptx;
use residency::Bytes;

use super::pool::{self, Pool};
use crate::format::{NF4_BLOCK, NF4_NESTED_BLOCK, WeightFormat, WeightPart, rows_and_columns};
use crate::load::{LoadError, Stored, Target, TensorSource};
use crate::quantize::{nested_table, nf4_table, unit};

/// Fat binary compiled by `build.rs`.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/quantize.fatbin"));

/// Alignment of the parts of a workspace: at least that of any load in a kernel.
const ALIGNMENT: u64 = 256;

/// Block size of kernels that do not work by rows.
const THREADS: u32 = 256;

/// Initial value of the mark in [`Workspace`]: all tensors are finite.
const ALL_FINITE: u32 = u32::MAX;

/// A table as kernels take it: by value.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Table<const N: usize>([f32; N]);

// SAFETY: only floats, as in the kernels' declarations.
unsafe impl<const N: usize> DeviceRepr for Table<N> {}

/// The kernels, loaded to the card at the start: nothing is compiled or loaded during a load.
#[derive(Debug)]
pub(super) struct Kernels {
    int8_rows: OfDtypes,
    int8_rotated: OfDtypes,
    fp8_rows: OfDtypes,
    nf4: OfDtypes,
    write_tables: CudaFunction,
    nested_offset: CudaFunction,
    nested_scales: CudaFunction,
    table: Table<16>,
    nested: Table<256>,
}

/// One kernel per arriving dtype.
#[derive(Debug)]
struct OfDtypes {
    f32: CudaFunction,
    f16: CudaFunction,
    bf16: CudaFunction,
}

/// Finds a kernel, and loads its code now rather than at the first launch.
fn kernel(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, DriverError> {
    let kernel = module.load_function(name)?;
    kernel.num_regs()?;
    Ok(kernel)
}

impl OfDtypes {
    fn new(module: &Arc<CudaModule>, name: &str) -> Result<OfDtypes, DriverError> {
        Ok(OfDtypes {
            f32: kernel(module, &format!("{name}_f32"))?,
            f16: kernel(module, &format!("{name}_f16"))?,
            bf16: kernel(module, &format!("{name}_bf16"))?,
        })
    }

    fn of(&self, dtype: Arriving) -> &CudaFunction {
        match dtype {
            Arriving::F32 => &self.f32,
            Arriving::F16 => &self.f16,
            Arriving::Bf16 => &self.bf16,
        }
    }
}

/// Dtype of numbers as they arrive on the card.
#[derive(Clone, Copy, Debug)]
enum Arriving {
    F32,
    F16,
    Bf16,
}

/// How a tensor is quantized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Making {
    format: WeightFormat,
    arriving: Arriving,
    rows: usize,
    columns: usize,
    /// Index in the plan, by which a kernel reports it.
    tensor: u32,
}

/// Temporary memory of one lane on the card, during a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneMemory {
    /// Temporary memory for arriving numbers, as many bytes as each slot has.
    inputs: sys::CUdeviceptr,
    /// Absolute maxima of the nf4-double tensor that the lane works on.
    absmax: sys::CUdeviceptr,
    /// Lowest index of a tensor with a number that is not finite: one `u32` for all lanes.
    not_finite: sys::CUdeviceptr,
    chunk: u64,
}

/// Temporary memory of a load that quantizes: a pool of its own, freed with the load.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Destroyed by [`Workspace::close`] only: nothing of a lost card may be touched.
    pool: ManuallyDrop<Pool>,
    pointer: sys::CUdeviceptr,
    size: WorkspaceSize,
}

/// Sizes of a [`Workspace`].
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkspaceSize {
    lanes: u64,
    slots: u64,
    chunk: u64,
    /// Bytes per lane.
    absmax: u64,
}

impl Making {
    /// How this source is quantized in pieces of at most `chunk` bytes. `None` if it is not quantized at load.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`].
    pub(super) fn of(
        source: &TensorSource,
        tensor: usize,
        chunk: usize,
    ) -> Result<Option<Making>, LoadError> {
        let (true, Target::Quantized(format)) = (source.is_made_at_load(), source.target) else {
            return Ok(None);
        };
        let refuse = |problem: String| LoadError::Unsupported(format!("tensor {} {problem}", source.name));
        let arriving = match source.stored {
            Stored::F32 | Stored::F64 => Arriving::F32,
            Stored::F16 => Arriving::F16,
            Stored::Bf16 => Arriving::Bf16,
            other => {
                return Err(refuse(format!(
                    "is stored as {other:?}, from which {format} is not made"
                )));
            }
        };
        let (rows, columns) = rows_and_columns(&source.shape);
        let making = Making {
            format,
            arriving,
            rows,
            columns,
            tensor: tensor as u32,
        };
        let unit = unit(format, columns).ok_or_else(|| {
            refuse(format!(
                "is to be made {format} while it is loaded, which is only read as it is stored"
            ))
        })?;
        let most = making.most(chunk);
        if unit > most {
            return Err(refuse(format!(
                "has rows of {columns} numbers, and {format} is made of at most {most} at a time: choose nf4, or load it in \
                 full precision"
            )));
        }
        Ok(Some(making))
    }

    /// The dtype in which its numbers are read.
    pub(super) fn dtype(&self) -> DType {
        match self.arriving {
            Arriving::F32 => DType::F32,
            Arriving::F16 => DType::F16,
            Arriving::Bf16 => DType::BF16,
        }
    }

    /// Unit size: numbers that share a scale.
    pub(super) fn unit(&self) -> usize {
        unit(self.format, self.columns).unwrap_or(1)
    }

    /// Maximum of numbers in one piece of `chunk` bytes.
    pub(super) fn most(&self, chunk: usize) -> usize {
        chunk / self.dtype().size_in_bytes()
    }

    /// Whether all scales must be known before any is written: one lane processes its chunks, in order.
    pub(super) fn is_nested(&self) -> bool {
        self.format == WeightFormat::Nf4Double
    }

    /// Count of numbers.
    pub(super) fn numbers(&self) -> usize {
        self.rows * self.columns
    }

    fn blocks(&self) -> usize {
        self.numbers().div_ceil(NF4_BLOCK)
    }

    /// Bytes of absolute maxima to keep until all are known.
    fn absmax_bytes(&self) -> u64 {
        if self.is_nested() {
            4 * self.blocks() as u64
        } else {
            0
        }
    }

    /// Offset of a part in the tensor's bytes.
    fn begin_of(&self, wanted: WeightPart) -> u64 {
        let layout = self.format.layout(self.rows, self.columns);
        let found = layout.into_iter().find(|(part, _)| *part == wanted);
        found.map_or(0, |(_, range)| range.start as u64)
    }
}

impl WorkspaceSize {
    /// Size for these tensors on lanes with `slots` slots. `None` if none of them is quantized at load.
    pub(super) fn of(
        makings: &[Option<Making>],
        lanes: usize,
        slots: usize,
        chunk: usize,
    ) -> Option<WorkspaceSize> {
        let absmax = makings.iter().flatten().map(Making::absmax_bytes).max()?;
        Some(WorkspaceSize {
            lanes: lanes as u64,
            slots: slots as u64,
            chunk: (chunk as u64).next_multiple_of(ALIGNMENT),
            absmax: absmax.next_multiple_of(ALIGNMENT),
        })
    }

    fn of_lane(self) -> u64 {
        self.slots * self.chunk + self.absmax
    }

    /// Total bytes.
    pub(super) fn bytes(self) -> Bytes {
        Bytes(ALIGNMENT + self.lanes * self.of_lane())
    }
}

impl Workspace {
    /// Allocates the memory, in the order of `stream`.
    pub(super) fn new(size: WorkspaceSize, stream: &CudaStream) -> Result<Workspace, DriverError> {
        let pool = Pool::new(stream.context())?;
        let pointer = pool.allocate(size.bytes().0, stream)?;
        // SAFETY: the allocation begins with the mark, one `u32`.
        unsafe { sys::cuMemsetD32Async(pointer, ALL_FINITE, 1, stream.cu_stream()) }.result()?;
        Ok(Workspace {
            pool: ManuallyDrop::new(pool),
            pointer,
            size,
        })
    }

    /// The memory of one lane.
    pub(super) fn lane_memory(&self, lane: usize) -> LaneMemory {
        let inputs = self.pointer + ALIGNMENT + lane as u64 * self.size.of_lane();
        LaneMemory {
            inputs,
            absmax: inputs + self.size.slots * self.size.chunk,
            not_finite: self.pointer,
            chunk: self.size.chunk,
        }
    }

    /// The index among the sources of a load of a tensor with a number that is not finite, if any; the next load begins without
    /// one. All lanes must be idle.
    pub(super) fn take_not_finite(&self) -> Result<Option<usize>, DriverError> {
        let mut first = [ALL_FINITE];
        // SAFETY: the mark is one `u32`, and no lane writes it now.
        unsafe { result::memcpy_dtoh_sync(&mut first, self.pointer) }?;
        if first[0] == ALL_FINITE {
            return Ok(None);
        }
        // SAFETY: as above.
        unsafe { result::memcpy_htod_sync(self.pointer, &[ALL_FINITE]) }?;
        Ok(Some(first[0] as usize))
    }

    /// Frees the memory. All lanes must be idle.
    pub(super) fn close(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: allocated by `new`, and freed once; the lanes are idle.
        unsafe { pool::free(self.pointer, stream) }?;
        stream.synchronize()?;
        self.pool.trim()?;
        drop(ManuallyDrop::into_inner(self.pool));
        Ok(())
    }
}

impl LaneMemory {
    /// Address at which the numbers of a slot arrive.
    pub(super) fn input(&self, slot: usize) -> sys::CUdeviceptr {
        self.inputs + slot as u64 * self.chunk
    }
}

/// A run of numbers that has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    pub(super) at: sys::CUdeviceptr,
    /// Index of its first number within the tensor.
    pub(super) first: usize,
    /// Count of numbers: whole units, except for the tensor's last.
    pub(super) count: usize,
}

impl Kernels {
    /// Loads the kernels to the card.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Kernels, DriverError> {
        let module = context.load_module(Ptx::from_binary(KERNELS.to_vec()))?;
        Ok(Kernels {
            int8_rows: OfDtypes::new(&module, "int8_rows")?,
            int8_rotated: OfDtypes::new(&module, "int8_rotated")?,
            fp8_rows: OfDtypes::new(&module, "fp8_rows")?,
            nf4: OfDtypes::new(&module, "nf4")?,
            write_tables: kernel(&module, "write_tables")?,
            nested_offset: kernel(&module, "nested_offset")?,
            nested_scales: kernel(&module, "nested_scales")?,
            table: Table(*nf4_table()),
            nested: Table(*nested_table()),
        })
    }

    /// Enqueues the quantization of a run of numbers to its place in the tensor at `to`; with the first run also the
    /// tables. In nf4-double the scales stay in the lane's memory for [`Kernels::nest`].
    ///
    /// # Safety
    /// `to` is an allocation of the tensor's bytes, `arrived` is within its numbers, and both and the lane's memory are
    /// usable in the order of `stream`.
    pub(super) unsafe fn quantize(
        &self,
        making: &Making,
        arrived: Arrived,
        to: sys::CUdeviceptr,
        lane_memory: &LaneMemory,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let Arrived { at, first, count } = arrived;
        let scales = to + making.begin_of(WeightPart::Scales);
        let codes = to + making.begin_of(WeightPart::Codes);
        let is_nf4 = matches!(making.format, WeightFormat::Nf4 | WeightFormat::Nf4Double);
        if is_nf4 && first == 0 {
            let numbers: u32 = if making.is_nested() { 16 + 256 } else { 16 };
            let mut launch = stream.launch_builder(&self.write_tables);
            launch.arg(&to).arg(&numbers).arg(&self.table).arg(&self.nested);
            // SAFETY: matches the kernel's parameters; it writes as many floats as the layout has tables.
            unsafe { launch.launch(blocks_of(1, THREADS)) }?;
        }
        if count == 0 {
            return Ok(());
        }
        if is_nf4 {
            let block = (first / NF4_BLOCK) as u64;
            let absmax = 4 * block
                + if making.is_nested() {
                    lane_memory.absmax
                } else {
                    scales
                };
            let (codes, count) = (codes + first as u64 / 2, count as u64);
            let warps = u64::from(THREADS / 32);
            let blocks = count.div_ceil(NF4_BLOCK as u64).div_ceil(warps) as u32;
            let mut launch = stream.launch_builder(self.nf4.of(making.arriving));
            launch.arg(&at).arg(&count).arg(&absmax).arg(&codes);
            launch
                .arg(&lane_memory.not_finite)
                .arg(&making.tensor)
                .arg(&self.table);
            // SAFETY: matches the kernel's parameters; it writes a scale per block and a byte per two numbers, for
            // which the tensor and the lane's memory have space at these places.
            unsafe { launch.launch(blocks_of(blocks, THREADS)) }?;
        } else {
            let group = match making.format {
                WeightFormat::Int8Scaled(_, rotation) => Some(rotation.group() as u32),
                _ => None,
            };
            let rows = match making.format {
                WeightFormat::Int8 => &self.int8_rows,
                WeightFormat::Int8Scaled(..) => &self.int8_rotated,
                _ => &self.fp8_rows,
            };
            let (columns, row) = (making.columns as u64, first / making.columns);
            let (scales, codes) = (scales + 4 * row as u64, codes + first as u64);
            let threads = making.columns.next_power_of_two().clamp(32, THREADS as usize) as u32;
            let blocks = (count / making.columns) as u32;
            let mut launch = stream.launch_builder(rows.of(making.arriving));
            launch.arg(&at).arg(&columns);
            if let Some(group) = &group {
                launch.arg(group);
            }
            launch.arg(&scales).arg(&codes);
            launch.arg(&lane_memory.not_finite).arg(&making.tensor);
            // SAFETY: matches the kernel's parameters; it writes a scale per row and a byte per number, for which the
            // tensor has space at these places.
            unsafe { launch.launch(blocks_of(blocks, threads)) }?;
        }
        Ok(())
    }

    /// Enqueues the quantization of the scales of an nf4-double tensor, all of whose absolute maxima are in
    /// the lane's memory.
    ///
    /// # Safety
    /// As for [`Kernels::quantize`], which was called for all numbers of this tensor, on this stream.
    pub(super) unsafe fn nest(
        &self,
        making: &Making,
        to: sys::CUdeviceptr,
        lane_memory: &LaneMemory,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let blocks = making.blocks() as u64;
        if blocks == 0 {
            return Ok(());
        }
        let offset = to + making.begin_of(WeightPart::Offset);
        let nested_absmax = to + making.begin_of(WeightPart::NestedAbsmax);
        let codes = to + making.begin_of(WeightPart::Scales);
        let mut launch = stream.launch_builder(&self.nested_offset);
        launch.arg(&lane_memory.absmax).arg(&blocks).arg(&offset);
        // SAFETY: matches the kernel's parameters, and it writes one float.
        unsafe { launch.launch(blocks_of(1, THREADS)) }?;
        let mut launch = stream.launch_builder(&self.nested_scales);
        launch.arg(&lane_memory.absmax).arg(&blocks).arg(&offset);
        launch.arg(&nested_absmax).arg(&codes).arg(&self.nested);
        let groups = blocks.div_ceil(NF4_NESTED_BLOCK as u64) as u32;
        // SAFETY: matches the kernel's parameters; it writes a byte per block and a float per 256, which the layout
        // has.
        unsafe { launch.launch(blocks_of(groups, THREADS)) }?;
        Ok(())
    }
}

fn blocks_of(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}
