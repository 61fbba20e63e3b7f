//! Our own kernels on a CUDA device. They are enqueued on the device's stream without synchronization. Memory is
//! allocated from candle's device, that is from the card's activations.
#![allow(unsafe_code)] // Launches, and cuBLASLt.

mod apply_norm;
mod attention;
mod attention_in_fp8;
mod blocks;
mod capture;
mod code;
mod convolve;
mod elementwise;
mod euler;
mod exchange;
mod linear;
mod moments;
mod norm;
mod pictures;
mod product;
mod recorded;
mod rope;
mod sequence;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, WrapErr as _};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Shape, Storage, Tensor, WithDType};
use cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, CudaView, DevicePtr as _, DeviceRepr, LaunchConfig,
    PushKernelArg as _,
};
use cudarc::nvrtc::Ptx;
use gpu::{
    ColumnFactors, Fp8Scales, GgufType, GroupNumbers, Int4Order, Int8Scales, Nvfp4Order, QuantizedWeight,
    Rotation, ScaleOrder, SvdquantCodes, Timeline, W4A8Codes, W4A8Scales, WeightFormat, WeightPart,
    rows_and_columns,
};
use half::{bf16, f16};

use crate::cudnn::{self, OfCard};
use crate::planned::Planned;

pub(crate) use apply_norm::{add_rows, apply_norm};
pub(crate) use attention::attention;
pub(crate) use attention_in_fp8::attention_in_fp8;
pub(crate) use blocks::{add_repeated, average_blocks, patched, unpatched};
pub(crate) use code::Recorder;
pub(crate) use convolve::{convolve, taps_first, unwritten};
pub(crate) use elementwise::{all_finite, copy_rows, glu, relative_bias, sums_of_change};
pub(crate) use euler::euler;
pub(crate) use exchange::{CardEnd, OwnEnd, allocated as exchange_allocated};
#[cfg(test)]
pub(crate) use linear::requantized;
pub(crate) use linear::{
    adapted_weight, add_low_rank, add_product, linear_as_one, linear_into, linears_in_codes,
    linears_of_parts_as_one, multiplies_fp8, quantize_weight, shifted_bias,
};
pub(crate) use moments::group_moments;
pub(crate) use norm::norm;
pub(crate) use pictures::{blend, bytes_to_map, map_to_bytes, map_to_planes, planes_to_map};
pub(crate) use recorded::{Graph, note_plan};
pub(crate) use rope::qk_norm_rope;
pub(crate) use sequence::{antialiased_snake, folded, pcm16, snake, weight_scales};

/// Fat binary of `kernels.cu`. Empty in type checks.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Elements that a thread writes at once, how often a dequantizing thread does so, and block size (`dequantize.cuh`).
const UNIT: usize = 8;
const UNITS: usize = 4;
const THREADS: usize = 256;

/// Alignment of wide loads.
const ALIGNMENT: u64 = 16;

/// Workspace of libraries if none was provided.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The first compute capability with bf16 arithmetic.
const BF16_SINCE: (i32, i32) = (8, 0);

/// Any of our kernels, by which their module is found.
const ANY_KERNEL: &str = "finish_product_bf16";

/// State of one context, which lives as long as the process.
struct Card {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<String, CudaFunction>>,
    /// Major and minor version.
    compute_capability: (i32, i32),
    /// Number of multiprocessors.
    processors: usize,
    products: Arc<Mutex<product::Products>>,
    /// Workspace of libraries: address and bytes.
    workspace: OnceLock<(u64, usize)>,
    cudnn: OfCard,
}

impl Card {
    /// The state of a device; loads its kernels at the first call.
    fn of(device: &CudaDevice) -> Result<Arc<Card>> {
        static CARDS: LazyLock<Mutex<HashMap<usize, Arc<Card>>>> = LazyLock::new(Mutex::default);
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let key = context.cu_ctx() as usize;
        if let Some(card) = cards.get(&key) {
            return Ok(Arc::clone(card));
        }
        let card = Arc::new(Card {
            module: context.load_module(Ptx::from_binary(KERNELS.to_vec())).w()?,
            functions: Mutex::default(),
            compute_capability: context.compute_capability().w()?,
            processors: context
                .attribute(
                    cudarc::driver::sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                )
                .w()? as usize,
            products: Arc::new(Mutex::new(product::Products::new(context)?)),
            workspace: OnceLock::new(),
            cudnn: OfCard::default(),
        });
        cards.insert(key, Arc::clone(&card));
        Ok(card)
    }

    /// Workspace for library calls: that which was allocated when the card was opened (all work uses one stream, so
    /// one workspace serves all libraries), or a new one, once.
    fn workspace(&self, device: &CudaDevice) -> Result<(u64, usize)> {
        if let Some(workspace) = self.workspace.get() {
            return Ok(*workspace);
        }
        let stream = device.cuda_stream();
        let given = gpu::library_workspace(stream.context());
        let workspace = match given {
            Some(given) => given,
            None => {
                // SAFETY: a workspace is written before it is read.
                let own = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
                let address = own.device_ptr(&stream).0;
                std::mem::forget(own); // lives as long as the process
                (address, WORKSPACE_BYTES)
            }
        };
        Ok(*self.workspace.get_or_init(|| workspace))
    }

    /// Loads code that stages are likely to launch: our kernels in the dtype that this card computes in, and those of
    /// products that earlier processes used.
    fn load_code(&self, device: &CudaDevice) -> Result<()> {
        let mut timeline = Timeline::begin("code brought ahead");
        let stream = device.cuda_stream();
        let context = stream.context();
        let dtype = if self.compute_capability >= BF16_SINCE {
            "bf16"
        } else {
            "f16"
        };
        let is_of_stages = |name: &str| {
            let mut words = name.split('_');
            !name.starts_with("dequantize_") && words.any(|word| word == dtype)
        };
        let loaded =
            code::load_functions(&self.function(ANY_KERNEL.to_owned())?, context, is_of_stages).w()?;
        timeline.part("our kernels");
        let keys = {
            let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
            products.of_before()
        };
        timeline.part("read which products there were");
        let recorder = Recorder::new(context).w()?;
        let workspace = self.workspace(device)?;
        for key in &keys {
            let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = products.choose_ahead(key, workspace, &recorder) {
                tracing::debug!(%error, ?key, "a product could not be chosen ahead; stages choose it");
            }
            drop(products);
            timeline.part("a product");
        }
        tracing::debug!(kernels = loaded, products = keys.len(), "code is on the card");
        timeline.end();
        Ok(())
    }

    /// Enqueues a kernel whose only argument is a struct, by value.
    ///
    /// # Safety
    /// The struct has the kernel's layout, and its addresses point to memory of the stated size, on the card of the
    /// stream, that lives until the work on the stream is done.
    unsafe fn launch<A: DeviceRepr>(
        &self,
        stream: &CudaStream,
        name: String,
        grid: (usize, usize, usize),
        threads: usize,
        arguments: &A,
    ) -> Result<()> {
        let counts = [grid.0, grid.1, grid.2, threads].map(u32::try_from);
        let [Ok(x), Ok(y), Ok(z), Ok(threads)] = counts else {
            candle_core::bail!("{name} over {grid:?} blocks of {threads} threads");
        };
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's obligation.
        unsafe { self.launch_as(stream, name, config, arguments) }
    }

    /// [`Card::launch`] of a configuration.
    ///
    /// # Safety
    /// As for [`Card::launch`], and the shared memory is as large as the kernel takes it to be.
    unsafe fn launch_as<A: DeviceRepr>(
        &self,
        stream: &CudaStream,
        name: String,
        config: LaunchConfig,
        arguments: &A,
    ) -> Result<()> {
        let (x, y, z) = config.grid_dim;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let function = self.function(name)?;
        let mut launch = stream.launch_builder(&function);
        launch.arg(arguments);
        // SAFETY: the caller's obligation.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }

    fn function(&self, name: String) -> Result<CudaFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&name) {
            return Ok(function.clone());
        }
        let function = self.module.load_function(&name).w()?;
        functions.insert(name, function.clone());
        Ok(function)
    }
}

/// Loads the state of a device's context: its kernels, and cuDNN if it is installed. Code of kernels is loaded
/// meanwhile, on a background thread.
pub(crate) fn prepare(device: &CudaDevice) -> Result<()> {
    let card = Card::of(device)?;
    let of_thread = device.clone();
    spawn_background("code", move || card.load_code(&of_thread));
    has_cudnn(device)?;
    Ok(())
}

/// Runs best-effort work on a background thread.
fn spawn_background(name: &str, work: impl FnOnce() -> Result<()> + Send + 'static) {
    let told = name.to_owned();
    let work = move || {
        if let Err(error) = work() {
            tracing::debug!(%error, thread = told, "work ahead of stages failed; stages do it");
        }
    };
    let thread = std::thread::Builder::new().name(name.to_owned());
    if let Err(error) = thread.spawn(work) {
        tracing::debug!(%error, "nothing is done ahead: stages do it");
    }
}

/// Whether cuDNN is open for a device's context; opens it at the first call.
pub(crate) fn has_cudnn(device: &CudaDevice) -> Result<bool> {
    let opened = Card::of(device)?.cudnn.with(device, |_| Ok(()))?;
    Ok(opened.is_some())
}

/// Compiles cuDNN plans ahead of time, if it is installed.
pub(crate) fn make_plans(device: &CudaDevice, planned: &[Planned]) -> Result<()> {
    let card = Card::of(device)?;
    let asked = card
        .cudnn
        .with(device, |cudnn| Ok(cudnn::make_plans(cudnn, planned)))?;
    let fresh = asked.unwrap_or_default();
    if !fresh.is_empty() {
        let of_thread = device.clone();
        spawn_background("plans", move || card.cudnn.take_ahead(&of_thread, &fresh));
    }
    Ok(())
}

/// Element types that our kernels write.
trait Number: CudaDType + DeviceRepr + WithDType {}

impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}

/// [`crate::dequantize()`] on a CUDA device, of a validated weight that is not empty.
pub(crate) fn dequantize(weight: &QuantizedWeight, dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::F32 => dequantize_to::<f32>(weight),
        DType::F16 => dequantize_to::<f16>(weight),
        DType::BF16 => dequantize_to::<bf16>(weight),
        other => candle_core::bail!("a weight is dequantized to f32, f16 or bf16, not {other:?}"),
    }
}

fn dequantize_to<T: Number>(weight: &QuantizedWeight) -> Result<Tensor> {
    let device = weight.bytes.device().as_cuda_device()?;
    // SAFETY: the kernel writes every element before any is read: all work is on this stream.
    let out = unsafe { device.alloc::<T>(weight.shape.iter().product())? };
    let stream = device.cuda_stream();
    dequantize_to_address(weight, T::DTYPE, out.device_ptr(&stream).0)?;
    Ok(tensor(out, device, weight.shape.as_slice()))
}

/// Dequantizes a weight to f32, f16 or bf16, at an address on its card that has space for it.
pub(crate) fn dequantize_to_address(weight: &QuantizedWeight, dtype: DType, out: u64) -> Result<()> {
    let device = weight.bytes.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let stream = device.cuda_stream();
    let (rows, columns) = rows_and_columns(&weight.shape);
    let numbers = rows * columns;
    let (Ok(count), Ok(width)) = (u32::try_from(numbers), u32::try_from(columns)) else {
        candle_core::bail!("a weight of shape {:?} has more than 2^32 numbers", weight.shape);
    };
    let bytes = aligned(&weight.bytes)?;
    let (storage, layout) = bytes.storage_and_layout();
    let bytes = view::<u8>(&storage, layout)?;
    let place = |wanted| place_of(weight.format, rows, columns, wanted) as u64;
    let (scales_at, codes_at) = (place(WeightPart::Scales), place(WeightPart::Codes));
    let name = format!("dequantize_{}_{}", kernel_of(weight.format), kernel_dtype(dtype)?);
    let function = card.function(name)?;
    let mut launch = stream.launch_builder(&function);
    launch.arg(&bytes);
    launch.arg(&scales_at);
    launch.arg(&codes_at);
    launch.arg(&count);
    launch.arg(&width);
    launch.arg(&out);
    let config = match weight.format {
        WeightFormat::Svdquant { rank, .. } => tiles_of(rows, columns, rank),
        _ => blocks_of(numbers),
    };
    // SAFETY: the arguments are those of `DEQUANTIZE_TO` and of `DEQUANTIZE_SVDQUANT_TO` in `kernels.cu`. The bytes are as many as
    // format and shape require (`dequantize::checked`) and aligned; the result has space for every element; nothing else is read
    // or written.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Rows and columns of a weight of SVDQuant that a block computes, and its threads; ranks that it keeps in shared memory. They mirror
/// `svdquant.cuh`.
const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 128;
const TILE_THREADS: usize = 64;
const KEPT_RANKS: usize = 128;

/// A launch with a block per tile of a weight of SVDQuant.
fn tiles_of(rows: usize, columns: usize, rank: u16) -> LaunchConfig {
    let (x, y) = (columns.div_ceil(TILE_COLUMNS), rows / TILE_ROWS);
    LaunchConfig {
        grid_dim: (x as u32, y as u32, 1),
        block_dim: (TILE_THREADS as u32, 1, 1),
        shared_mem_bytes: (usize::from(rank).min(KEPT_RANKS) * 2 * TILE_COLUMNS) as u32,
    }
}

/// A launch with a thread per [`UNITS`] of [`UNIT`] elements. There are fewer than 2^32 of those, so the block count
/// fits.
fn blocks_of(numbers: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (numbers.div_ceil(UNITS * UNIT * THREADS) as u32, 1, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Offset of a part of a weight. A part that the format lacks is not read.
fn place_of(format: WeightFormat, rows: usize, columns: usize, wanted: WeightPart) -> usize {
    let layout = format.layout(rows, columns);
    let range = layout.into_iter().find(|(part, _)| *part == wanted);
    range.map_or(0, |(_, range)| range.start)
}

/// Suffix of a format in the kernels' names.
fn kernel_of(format: WeightFormat) -> String {
    let rotation = format.rotation();
    let of_codes = match format {
        WeightFormat::Int8 => "int8",
        WeightFormat::Fp8(Fp8Scales::None) => "fp8_none",
        WeightFormat::Fp8(Fp8Scales::Tensor) => "fp8_tensor",
        WeightFormat::Fp8(Fp8Scales::Rows) => "fp8_rows",
        WeightFormat::Nf4 | WeightFormat::Fp4 => "nf4",
        WeightFormat::Nf4Double | WeightFormat::Fp4Double => "nf4_double",
        WeightFormat::E5M2(Fp8Scales::None) => "e5m2_none",
        WeightFormat::E5M2(Fp8Scales::Tensor) => "e5m2_tensor",
        WeightFormat::E5M2(Fp8Scales::Rows) => "e5m2_rows",
        WeightFormat::BlockFp8 => "fp8_blocks",
        WeightFormat::Mxfp8(ScaleOrder::TensorCores) => "mxfp8",
        WeightFormat::Mxfp8(ScaleOrder::Rows) => "mxfp8_rows",
        WeightFormat::Nvfp4(Nvfp4Order::TensorCores, ColumnFactors::None) => "nvfp4",
        WeightFormat::Nvfp4(Nvfp4Order::TensorCores, ColumnFactors::F32) => "nvfp4_columns",
        WeightFormat::Nvfp4(Nvfp4Order::Rows, ColumnFactors::None) => "nvfp4_rows",
        WeightFormat::Nvfp4(Nvfp4Order::Rows, ColumnFactors::F32) => "nvfp4_rows_columns",
        WeightFormat::Nvfp4(Nvfp4Order::LowFirst, ColumnFactors::None) => "nvfp4_low",
        WeightFormat::Nvfp4(Nvfp4Order::LowFirst, ColumnFactors::F32) => "nvfp4_low_columns",
        WeightFormat::Svdquant {
            codes: SvdquantCodes::Int4(_),
            ..
        } => "svdquant_int4",
        WeightFormat::Svdquant {
            codes: SvdquantCodes::Fp4,
            ..
        } => "svdquant_fp4",
        WeightFormat::Int8Groups { numbers, .. } => match numbers {
            GroupNumbers::F16 => "int8_groups_f16",
            GroupNumbers::Bf16 => "int8_groups_bf16",
            GroupNumbers::F32 => "int8_groups_f32",
        },
        WeightFormat::Int4Groups { order, numbers, .. } => return kernel_of_groups(order, numbers),
        WeightFormat::Int8Scaled(Int8Scales::Tensor, _) => "int8_tensor",
        WeightFormat::Int8Scaled(Int8Scales::Rows, _) => "int8_rows",
        WeightFormat::Int4(_) => "int4",
        WeightFormat::W4A8 { codes, scales, .. } => match (codes, scales) {
            (W4A8Codes::Four, W4A8Scales::E4M3) => "w4a8",
            (W4A8Codes::Four, W4A8Scales::F32) => "w4a8_f32",
            (W4A8Codes::Six, W4A8Scales::E4M3) => "w6a8",
            (W4A8Codes::Six, W4A8Scales::F32) => "w6a8_f32",
        },
        WeightFormat::Gguf(kind) => match kind {
            GgufType::Q4_0 => "q4_0",
            GgufType::Q4_1 => "q4_1",
            GgufType::Q5_0 => "q5_0",
            GgufType::Q5_1 => "q5_1",
            GgufType::Q8_0 => "q8_0",
            GgufType::Q2K => "q2_k",
            GgufType::Q3K => "q3_k",
            GgufType::Q4K => "q4_k",
            GgufType::Q5K => "q5_k",
            GgufType::Q6K => "q6_k",
            GgufType::IQ4NL => "iq4_nl",
            GgufType::IQ4XS => "iq4_xs",
            GgufType::Mxfp4 => "mxfp4",
            GgufType::Nvfp4 => "nvfp4_blocks",
        },
    };
    match rotation {
        Rotation::None => of_codes.to_owned(),
        Rotation::By16 | Rotation::By64 | Rotation::By256 => format!("{of_codes}_by_{}", rotation.group()),
    }
}

/// Suffix of nibbles in groups of columns in the kernels' names. There are none for scales in f32, nor for other numbers of
/// parts: no program stores them.
fn kernel_of_groups(order: Int4Order, numbers: GroupNumbers) -> String {
    let order = match order {
        Int4Order::LessEight => "less_eight".to_owned(),
        Int4Order::Signed => "signed".to_owned(),
        Int4Order::AutoAwq => "autoawq".to_owned(),
        Int4Order::TinyChat { parts: 0 | 1 } => "tinychat".to_owned(),
        Int4Order::TinyChat { parts } => format!("tinychat_{parts}"),
    };
    let numbers = match numbers {
        GroupNumbers::F16 => "f16",
        GroupNumbers::Bf16 => "bf16",
        GroupNumbers::F32 => "f32",
    };
    format!("int4_{order}_{numbers}")
}

/// The bytes of a weight at an address aligned for wide loads. A separate allocation, as every weight is, needs no
/// copy.
fn aligned(bytes: &Tensor) -> Result<Tensor> {
    let is_aligned = {
        let (storage, layout) = bytes.storage_and_layout();
        layout.is_contiguous() && {
            let stream = bytes.device().as_cuda_device()?.cuda_stream();
            address(&view::<u8>(&storage, layout)?, &stream).is_multiple_of(ALIGNMENT)
        }
    };
    if is_aligned {
        address_of(bytes)?; // recorded work keeps it
        Ok(bytes.clone())
    } else {
        bytes.force_contiguous()
    }
}

/// A contiguous tensor on a CUDA device as a slice of elements.
fn view<'a, T: CudaDType>(storage: &'a Storage, layout: &candle_core::Layout) -> Result<CudaView<'a, T>> {
    let (Storage::Cuda(storage), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
        candle_core::bail!("a contiguous tensor on a CUDA device is expected");
    };
    Ok(storage.as_cuda_slice::<T>()?.slice(start..end))
}

fn address<T>(view: &CudaView<'_, T>, stream: &CudaStream) -> u64 {
    view.device_ptr(stream).0
}

/// Address of a tensor's first element. The caller keeps the tensor until the work is enqueued: memory freed
/// afterwards is freed in stream order.
pub(crate) fn address_of(x: &Tensor) -> Result<u64> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("a tensor on a CUDA device is expected");
    };
    let begin = match &storage.slice {
        CudaStorageSlice::U8(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::U32(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::I64(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F32(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F16(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::BF16(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F64(slice) => slice.device_ptr(&stream).0,
        _ => candle_core::bail!("numbers of type {:?} have no use on a CUDA device", x.dtype()),
    };
    let address = begin + (layout.start_offset() * x.dtype().size_in_bytes()) as u64;
    recorded::note(x, address);
    Ok(address)
}

/// Suffix of a dtype in the kernels' names.
fn kernel_dtype(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => candle_core::bail!("a card computes in f32, f16 or bf16, not {other:?}"),
    }
}

/// A tensor that owns an allocation.
fn tensor<T: CudaDType>(slice: CudaSlice<T>, device: &CudaDevice, shape: impl Into<Shape>) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
