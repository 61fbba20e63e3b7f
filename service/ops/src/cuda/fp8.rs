//! Products of fp8 with fp8 on the card's own units (compute capability 8.9 and more), through cuBLASLt.
//!
//! Each row of `x` is quantized by its own absolute maximum, so that the result is within a few hundredths of the product
//! with the same weight dequantized: four bits of each number of `x` are what is lost. Sums are in f32.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, PoisonError};

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{DType, Error, Result, Tensor};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaContext, DevicePtr as _, DevicePtrMut as _, LaunchConfig, PushKernelArg as _};
use gpu::{Fp8Scales, QuantizedWeight, WeightFormat, WeightPart, rows_and_columns};
use half::{bf16, f16};

use super::{ALIGNMENT, Card, Number, THREADS, UNIT, address, tensor, view};

/// What a product may use beside its operands. It is taken from the pool of activations for as long as the product
/// takes; algorithms that want more are not chosen.
pub(crate) const WORKSPACE_BYTES: usize = 4 << 20;

/// The first compute capability whose units multiply fp8.
const SINCE: (i32, i32) = (8, 9);

/// What both sides of a weight must be multiples of.
const MULTIPLE: usize = 16;

/// Shapes whose algorithm is remembered, at most.
const REMEMBERED: usize = 4096;

/// A product's shape and dtype, with how its operands are aligned always being the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    tokens: usize,
    rows: usize,
    columns: usize,
    /// bf16 rather than f16.
    is_bf16: bool,
}

/// cuBLASLt of one context, and what it chose.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    /// None where it has no algorithm.
    chosen: HashMap<Product, Option<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: a handle may be used from any thread, one at a time: it is behind a mutex. It lives as long as the process.
unsafe impl Send for Products {}

impl Products {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Products> {
        context.bind_to_thread().w()?;
        let handle = result::create_handle().map_err(failed)?;
        Ok(Products {
            handle,
            chosen: HashMap::new(),
        })
    }

    /// The algorithm of a product, from its first time on the same.
    fn algorithm(&mut self, product: Product, forms: &Forms) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        if let Some(chosen) = self.chosen.get(&product) {
            return Ok(*chosen);
        }
        // SAFETY: the handle and all forms are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                forms.product,
                forms.weight,
                forms.x,
                forms.out,
                forms.out,
                forms.preference,
            )
        };
        use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
        let found = match found {
            Ok(found) => Some(found.algo),
            Err(CublasError(CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE)) => None,
            Err(error) => return Err(failed(error)),
        };
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(product, found);
        Ok(found)
    }
}

/// `x Wᵀ + b` by the card's own units, or `None` where they do not: another format or dtype, an older card, sides that are
/// no multiples of 16, or a shape that cuBLASLt has no algorithm for. `x` is `[tokens, columns]`.
pub(crate) fn linear_fp8(
    x: &Tensor,
    weight: &QuantizedWeight,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    match x.dtype() {
        DType::BF16 => linear_of::<bf16>(x, weight, bias),
        DType::F16 => linear_of::<f16>(x, weight, bias),
        _ => Ok(None),
    }
}

fn linear_of<T: Number>(
    x: &Tensor,
    weight: &QuantizedWeight,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let WeightFormat::Fp8(kind) = weight.format else {
        return Ok(None);
    };
    let (tokens, columns) = x.dims2()?;
    let (rows, width) = rows_and_columns(&weight.shape);
    let fits = columns == width && rows.is_multiple_of(MULTIPLE) && columns.is_multiple_of(MULTIPLE);
    let counts = [tokens, rows, columns].map(|n| i32::try_from(n).unwrap_or(0));
    let ([token_count, row_count, column_count], true) = (counts, fits && !counts.contains(&0)) else {
        return Ok(None);
    };
    if !x.is_contiguous() || !weight.bytes.is_contiguous() {
        return Ok(None);
    }
    let device = x.device().as_cuda_device()?;
    let card = Card::of(device)?;
    if card.compute_capability < SINCE {
        return Ok(None);
    }
    let stream = device.cuda_stream();
    let (x_storage, x_layout) = x.storage_and_layout();
    let numbers = view::<T>(&x_storage, x_layout)?;
    let (weight_storage, weight_layout) = weight.bytes.storage_and_layout();
    let bytes = view::<u8>(&weight_storage, weight_layout)?;
    let bias = bias
        .map(|bias| bias.to_dtype(x.dtype())?.contiguous())
        .transpose()?;
    let bias = bias.as_ref().map(Tensor::storage_and_layout);
    let bias = bias
        .as_ref()
        .map(|(storage, layout)| view::<T>(storage, layout))
        .transpose()?;
    let place = |wanted| super::place_of(weight.format, rows, columns, wanted);
    let codes_at = place(WeightPart::Codes);
    let stored = bytes.slice(codes_at..codes_at + rows * columns);
    // Addresses of two bytes and more are enough for the bias, of four for scales: those have them.
    if [address(&numbers, &stream), address(&stored, &stream)]
        .iter()
        .any(|at| !at.is_multiple_of(ALIGNMENT))
    {
        return Ok(None);
    }
    let product = Product {
        tokens,
        rows,
        columns,
        is_bf16: x.dtype() == DType::BF16,
    };
    let forms = Forms::new(product).map_err(failed)?;
    let mut products = card.products.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(algorithm) = products.algorithm(product, &forms)? else {
        return Ok(None);
    };

    let (x_codes, x_scales) = {
        // SAFETY: the kernel writes all of both before they are read, on the same stream.
        let (codes, scales) = unsafe {
            (
                device.alloc::<u8>(tokens * columns)?,
                device.alloc::<f32>(tokens)?,
            )
        };
        let function = card.function(format!("quantize_rows_{}", T::NAME))?;
        let mut launch = stream.launch_builder(&function);
        launch.arg(&numbers);
        launch.arg(&codes);
        launch.arg(&scales);
        launch.arg(&column_count);
        // SAFETY: the arguments are those of `quantize_rows` in `kernels.cu`: `[tokens, columns]` numbers whose rows are
        // aligned, as many codes, and a scale for each row, which has a block of its own.
        unsafe { launch.launch(blocks(token_count as u32, 1)) }.w()?;
        (codes, scales)
    };

    // SAFETY: beta is 0: the product writes every number without reading one.
    let mut out = unsafe { device.alloc::<T>(tokens * rows)? };
    // SAFETY: a workspace is written before it is read.
    let mut workspace = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
    // A sum of so many products of at most 448² must fit f16: it is kept smaller by a power of two, which costs nothing.
    let factor = if product.is_bf16 {
        1.0
    } else {
        (4 * columns).next_power_of_two() as f32
    };
    let (alpha, beta) = (1.0 / factor, 0f32);
    {
        let (stored_at, _stored_use) = stored.device_ptr(&stream);
        let (x_at, _x_use) = x_codes.device_ptr(&stream);
        let (out_at, _out_use) = out.device_ptr_mut(&stream);
        let (workspace_at, _workspace_use) = workspace.device_ptr_mut(&stream);
        // SAFETY: the forms describe the operands: `[rows, columns]` and `[tokens, columns]` codes, `[tokens, rows]`
        // numbers out, aligned as the preference says; the workspace is of the size that the algorithm was chosen for;
        // alpha and beta are read before the call returns. All of it is used on this stream alone.
        let multiplied = unsafe {
            result::matmul(
                products.handle,
                forms.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                stored_at as *const c_void,
                forms.weight,
                x_at as *const c_void,
                forms.x,
                out_at as *const c_void,
                forms.out,
                out_at as *mut c_void,
                forms.out,
                &raw const algorithm,
                workspace_at as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream().cast(),
            )
        };
        multiplied.map_err(failed)?;
    }
    drop((products, workspace, x_codes));

    let scales_at = place(WeightPart::Scales);
    let (scale_count, stride) = match kind {
        Fp8Scales::None => (0, 0u32),
        Fp8Scales::Tensor => (1, 0),
        Fp8Scales::Rows => (rows, 1),
    };
    let scales = bytes.slice(scales_at..scales_at + 4 * scale_count);
    let null = 0u64;
    let function = card.function(format!("scale_product_{}", T::NAME))?;
    let mut launch = stream.launch_builder(&function);
    launch.arg(&mut out);
    launch.arg(&x_scales);
    match kind {
        Fp8Scales::None => launch.arg(&null),
        Fp8Scales::Tensor | Fp8Scales::Rows => launch.arg(&scales),
    };
    launch.arg(&stride);
    match &bias {
        Some(bias) => launch.arg(bias),
        None => launch.arg(&null),
    };
    launch.arg(&row_count);
    launch.arg(&factor);
    // SAFETY: the arguments are those of `scale_product` in `kernels.cu`: `[tokens, rows]` numbers, `tokens` scales, and
    // those of the weight and `rows` numbers of bias or null for none. `rows` is a multiple of eight.
    unsafe { launch.launch(blocks(token_count as u32, rows.div_ceil(UNIT * THREADS) as u32)) }.w()?;
    Ok(Some(tensor(out, device, (tokens, rows))))
}

/// What cuBLASLt is told of a product. It counts columns first: `outᵀ = W xᵀ` of matrices whose columns are our rows, the
/// weight transposed, which is the one order that fp8 has.
struct Forms {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    preference: sys::cublasLtMatmulPreference_t,
}

impl Forms {
    fn new(product: Product) -> std::result::Result<Forms, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let Product {
            tokens,
            rows,
            columns,
            is_bf16,
        } = product;
        // Whatever was made before an error is given back by the drop.
        let mut forms = Forms {
            product: ptr::null_mut(),
            weight: ptr::null_mut(),
            x: ptr::null_mut(),
            out: ptr::null_mut(),
            preference: ptr::null_mut(),
        };
        forms.product = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        // `CUBLAS_OP_T`, which these bindings do not name.
        let transposed = 1i32;
        // SAFETY: the form is alive; the attribute is one of these.
        unsafe {
            result::set_matmul_desc_attribute(
                forms.product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        let codes = sys::cudaDataType_t::CUDA_R_8F_E4M3;
        let numbers = if is_bf16 {
            sys::cudaDataType_t::CUDA_R_16BF
        } else {
            sys::cudaDataType_t::CUDA_R_16F
        };
        let (inputs, outputs, tokens) = (columns as u64, rows as u64, tokens as u64);
        forms.weight = result::create_matrix_layout(codes, inputs, outputs, columns as i64)?;
        forms.x = result::create_matrix_layout(codes, inputs, tokens, columns as i64)?;
        forms.out = result::create_matrix_layout(numbers, outputs, tokens, rows as i64)?;
        forms.preference = result::create_matmul_pref()?;
        // Codes of a weight begin behind its scales, where their addresses are multiples of 16 and often no more.
        let (alignment, workspace) = (ALIGNMENT as u32, WORKSPACE_BYTES);
        // SAFETY: the preference is alive; the attributes are of these types.
        unsafe {
            result::set_matmul_pref_attribute(
                forms.preference,
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )?;
            for operand in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                result::set_matmul_pref_attribute(
                    forms.preference,
                    operand,
                    (&raw const alignment).cast(),
                    size_of_val(&alignment),
                )?;
            }
        }
        Ok(forms)
    }
}

impl Drop for Forms {
    fn drop(&mut self) {
        // What cannot be given back is a few hundred bytes of the host, and nobody could act on it.
        // SAFETY: each is alive and given back once; null is what was not made.
        unsafe {
            if !self.product.is_null() {
                let _ = result::destroy_matmul_desc(self.product);
            }
            for layout in [self.weight, self.x, self.out] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            if !self.preference.is_null() {
                let _ = result::destroy_matmul_pref(self.preference);
            }
        }
    }
}

fn blocks(x: u32, y: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (x, y, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}

fn failed(error: CublasError) -> Error {
    Error::Msg(format!("cuBLASLt: {:?}", error.0))
}
