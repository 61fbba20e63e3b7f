//! Codes and scales that are made on the card, from numbers that have just arrived there (`quantize.cu`). The bytes are
//! those that the CPU makes (`crate::quantize`).

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

/// Compiled by `build.rs`.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/quantize.fatbin"));

/// What parts of a workspace are aligned to: more than any load of a kernel needs.
const ALIGNMENT: u64 = 256;

/// Threads of a block that does not depend on its rows.
const THREADS: u32 = 256;

/// In [`Workspace`], where no tensor has a number that is not finite.
const ALL_FINITE: u32 = u32::MAX;

/// As the kernels take it: by value.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Table<const N: usize>([f32; N]);

// SAFETY: floats and nothing else, as in the kernels' declarations.
unsafe impl<const N: usize> DeviceRepr for Table<N> {}

/// The kernels, in this card's memory from the start: nothing is compiled or loaded while a component is.
#[derive(Debug)]
pub(super) struct Kernels {
    int8_rows: OfDtypes,
    fp8_rows: OfDtypes,
    nf4: OfDtypes,
    write_tables: CudaFunction,
    nested_offset: CudaFunction,
    nested_scales: CudaFunction,
    table: Table<16>,
    nested: Table<256>,
}

/// One kernel for each dtype that numbers can arrive in.
#[derive(Debug)]
struct OfDtypes {
    f32: CudaFunction,
    f16: CudaFunction,
    bf16: CudaFunction,
}

/// Finds a kernel, and has the driver bring its code to the card, which it would put off to the first launch.
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

/// How numbers arrive on the card.
#[derive(Clone, Copy, Debug)]
enum Arriving {
    F32,
    F16,
    Bf16,
}

/// How a tensor is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Making {
    format: WeightFormat,
    arriving: Arriving,
    rows: usize,
    columns: usize,
    /// Its number in the plan, by which a kernel names it.
    tensor: u32,
}

/// Memory on the card that one lane has for a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bench {
    /// As many bytes for each slot as it has.
    inputs: sys::CUdeviceptr,
    /// Absolute maxima of the tensor of nf4 with double quantization that the lane is at.
    absmax: sys::CUdeviceptr,
    /// The least number of a tensor that has a number that is not finite: one `u32` for all lanes.
    not_finite: sys::CUdeviceptr,
    chunk: u64,
}

/// The memory that a load which quantizes has besides its component's: in a pool of its own, which ends with the load.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Ended by [`Workspace::close`] alone: nothing of a lost card may be touched.
    pool: ManuallyDrop<Pool>,
    pointer: sys::CUdeviceptr,
    size: WorkspaceSize,
}

/// How large a [`Workspace`] is.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkspaceSize {
    lanes: u64,
    slots: u64,
    chunk: u64,
    /// For each lane.
    absmax: u64,
}

impl Making {
    /// How this source is made from pieces of at most `chunk` bytes. `None` where it is taken as it is stored.
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

    /// The dtype that its numbers are read as.
    pub(super) fn dtype(&self) -> DType {
        match self.arriving {
            Arriving::F32 => DType::F32,
            Arriving::F16 => DType::F16,
            Arriving::Bf16 => DType::BF16,
        }
    }

    /// Numbers that share a scale.
    pub(super) fn unit(&self) -> usize {
        unit(self.format, self.columns).unwrap_or(1)
    }

    /// The most numbers that come in one piece of `chunk` bytes.
    pub(super) fn most(&self, chunk: usize) -> usize {
        chunk / self.dtype().size_in_bytes()
    }

    /// Whether all scales must be known before any can be written: its chunks are one lane's, in order.
    pub(super) fn is_nested(&self) -> bool {
        self.format == WeightFormat::Nf4Double
    }

    /// Of how many numbers.
    pub(super) fn numbers(&self) -> usize {
        self.rows * self.columns
    }

    fn blocks(&self) -> usize {
        self.numbers().div_ceil(NF4_BLOCK)
    }

    /// Bytes of absolute maxima that must be kept until all are there.
    fn absmax_bytes(&self) -> u64 {
        if self.is_nested() {
            4 * self.blocks() as u64
        } else {
            0
        }
    }

    /// Where a part begins in the tensor's bytes.
    fn begin_of(&self, wanted: WeightPart) -> u64 {
        let layout = self.format.layout(self.rows, self.columns);
        let found = layout.into_iter().find(|(part, _)| *part == wanted);
        found.map_or(0, |(_, range)| range.start as u64)
    }
}

impl WorkspaceSize {
    /// What these tensors take on lanes of so many slots. `None` if none of them is made at load.
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

    /// In all.
    pub(super) fn bytes(self) -> Bytes {
        Bytes(ALIGNMENT + self.lanes * self.of_lane())
    }
}

impl Workspace {
    /// Takes the memory, in the order of `stream`.
    pub(super) fn new(size: WorkspaceSize, stream: &CudaStream) -> Result<Workspace, DriverError> {
        let pool = Pool::new(stream.context())?;
        let pointer = pool.allocate(size.bytes().0, stream)?;
        // SAFETY: the allocation begins with the mark, of one `u32`.
        unsafe { sys::cuMemsetD32Async(pointer, ALL_FINITE, 1, stream.cu_stream()) }.result()?;
        Ok(Workspace {
            pool: ManuallyDrop::new(pool),
            pointer,
            size,
        })
    }

    /// What a lane has of it.
    pub(super) fn bench(&self, lane: usize) -> Bench {
        let inputs = self.pointer + ALIGNMENT + lane as u64 * self.size.of_lane();
        Bench {
            inputs,
            absmax: inputs + self.size.slots * self.size.chunk,
            not_finite: self.pointer,
            chunk: self.size.chunk,
        }
    }

    /// Gives the memory back, and says which tensor, by its number in the plan, has a number that is not finite. All
    /// lanes must be quiet.
    pub(super) fn close(self, stream: &CudaStream) -> Result<Option<usize>, DriverError> {
        let mut first = [ALL_FINITE];
        stream.synchronize()?;
        // SAFETY: the mark is one `u32`, and nothing writes to it any more.
        unsafe { result::memcpy_dtoh_sync(&mut first, self.pointer) }?;
        // SAFETY: allocated by `new`, and freed once; the lanes are quiet.
        unsafe { pool::free(self.pointer, stream) }?;
        stream.synchronize()?;
        self.pool.trim()?;
        drop(ManuallyDrop::into_inner(self.pool));
        Ok((first[0] != ALL_FINITE).then_some(first[0] as usize))
    }
}

impl Bench {
    /// Where the numbers of a slot arrive.
    pub(super) fn input(&self, slot: usize) -> sys::CUdeviceptr {
        self.inputs + slot as u64 * self.chunk
    }
}

/// A run of numbers that has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    /// Where.
    pub(super) at: sys::CUdeviceptr,
    /// Its first number, counted within the tensor.
    pub(super) first: usize,
    /// How many: whole units, but for the tensor's last.
    pub(super) count: usize,
}

impl Kernels {
    /// Brings the kernels to the card.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Kernels, DriverError> {
        let module = context.load_module(Ptx::from_binary(KERNELS.to_vec()))?;
        Ok(Kernels {
            int8_rows: OfDtypes::new(&module, "int8_rows")?,
            fp8_rows: OfDtypes::new(&module, "fp8_rows")?,
            nf4: OfDtypes::new(&module, "nf4")?,
            write_tables: kernel(&module, "write_tables")?,
            nested_offset: kernel(&module, "nested_offset")?,
            nested_scales: kernel(&module, "nested_scales")?,
            table: Table(*nf4_table()),
            nested: Table(*nested_table()),
        })
    }

    /// Asks for the codes and scales of a run of numbers at their place in the tensor at `to`; with its first numbers for
    /// the tables as well. In nf4 with double quantization the scales wait at the bench for [`Kernels::nest`].
    ///
    /// # Safety
    /// `to` is an allocation of the tensor's bytes, `arrived` lies within its numbers, and both and the bench may be used
    /// in the order of `stream`.
    pub(super) unsafe fn quantize(
        &self,
        making: &Making,
        arrived: Arrived,
        to: sys::CUdeviceptr,
        bench: &Bench,
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
            // SAFETY: the kernel takes these, and writes as many floats as the layout has tables.
            unsafe { launch.launch(blocks_of(1, THREADS)) }?;
        }
        if count == 0 {
            return Ok(());
        }
        if is_nf4 {
            let block = (first / NF4_BLOCK) as u64;
            let absmax = 4 * block + if making.is_nested() { bench.absmax } else { scales };
            let (codes, count) = (codes + first as u64 / 2, count as u64);
            let warps = u64::from(THREADS / 32);
            let blocks = count.div_ceil(NF4_BLOCK as u64).div_ceil(warps) as u32;
            let mut launch = stream.launch_builder(self.nf4.of(making.arriving));
            launch.arg(&at).arg(&count).arg(&absmax).arg(&codes);
            launch.arg(&bench.not_finite).arg(&making.tensor).arg(&self.table);
            // SAFETY: the kernel takes these; it writes a scale for each block and a byte for each two numbers, which the
            // tensor and the bench have at these places.
            unsafe { launch.launch(blocks_of(blocks, THREADS)) }?;
        } else {
            let rows = match making.format {
                WeightFormat::Int8 => &self.int8_rows,
                _ => &self.fp8_rows,
            };
            let (columns, row) = (making.columns as u64, first / making.columns);
            let (scales, codes) = (scales + 4 * row as u64, codes + first as u64);
            let threads = making.columns.next_power_of_two().clamp(32, THREADS as usize) as u32;
            let blocks = (count / making.columns) as u32;
            let mut launch = stream.launch_builder(rows.of(making.arriving));
            launch.arg(&at).arg(&columns).arg(&scales).arg(&codes);
            launch.arg(&bench.not_finite).arg(&making.tensor);
            // SAFETY: the kernel takes these; it writes a scale for each row and a byte for each number, which the tensor has
            // at these places.
            unsafe { launch.launch(blocks_of(blocks, threads)) }?;
        }
        Ok(())
    }

    /// Asks for the scales of a tensor in nf4 with double quantization, all of whose absolute maxima are at the bench.
    ///
    /// # Safety
    /// As for [`Kernels::quantize`], which all numbers of this tensor went through, in the order of this stream.
    pub(super) unsafe fn nest(
        &self,
        making: &Making,
        to: sys::CUdeviceptr,
        bench: &Bench,
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
        launch.arg(&bench.absmax).arg(&blocks).arg(&offset);
        // SAFETY: the kernel takes these, and writes one float.
        unsafe { launch.launch(blocks_of(1, THREADS)) }?;
        let mut launch = stream.launch_builder(&self.nested_scales);
        launch.arg(&bench.absmax).arg(&blocks).arg(&offset);
        launch.arg(&nested_absmax).arg(&codes).arg(&self.nested);
        let groups = blocks.div_ceil(NF4_NESTED_BLOCK as u64) as u32;
        // SAFETY: the kernel takes these; it writes a byte for each block and a float for each 256, which the layout has.
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
