//! Products of rows with a weight through cuBLASLt: full precision, and fp8 by fp8 on the card's own units (compute
//! capability 8.9 and more). The result is written where it belongs, bias and GELU come with it.
//!
//! In fp8 each row of `x` is quantized by its own absolute maximum, so that the result is within a few hundredths of the
//! product with the same weight dequantized: four bits of each number of `x` are what is lost. Sums are in f32, those of
//! Hopper's units in a little less (`FAST_ACCUM`).

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Error, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaContext, CudaStream};

use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;

/// Plans that are remembered at most.
const REMEMBERED: usize = 4096;

/// The alignment beyond which nothing is gained, in bytes.
const MOST_ALIGNED: u64 = 256;

/// What operands and results are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Numbers {
    F32,
    F16,
    Bf16,
    /// e4m3 by e4m3 to this dtype. `by_rows`: a scale for each row of `x` and of the weight is applied within.
    Fp8 {
        is_bf16: bool,
        by_rows: bool,
    },
}

impl Numbers {
    /// Of operands, and of the result.
    fn types(self) -> (sys::cudaDataType_t, sys::cudaDataType_t) {
        use sys::cudaDataType_t::{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        match self {
            Numbers::F32 => (CUDA_R_32F, CUDA_R_32F),
            Numbers::F16 => (CUDA_R_16F, CUDA_R_16F),
            Numbers::Bf16 => (CUDA_R_16BF, CUDA_R_16BF),
            Numbers::Fp8 { is_bf16: true, .. } => (CUDA_R_8F_E4M3, CUDA_R_16BF),
            Numbers::Fp8 { is_bf16: false, .. } => (CUDA_R_8F_E4M3, CUDA_R_16F),
        }
    }
}

/// What is done to a sum before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Finish {
    Nothing,
    Bias,
    GeluTanh,
    BiasGeluTanh,
}

impl Finish {
    fn epilogue(self) -> sys::cublasLtEpilogue_t {
        use sys::cublasLtEpilogue_t as Epilogue;
        match self {
            Finish::Nothing => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            Finish::Bias => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            Finish::GeluTanh => Epilogue::CUBLASLT_EPILOGUE_GELU,
            Finish::BiasGeluTanh => Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS,
        }
    }
}

/// `[batch, tokens, inputs]` by `[outputs, inputs]` to `[batch, tokens, outputs]`, with distances in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) x_row: usize,
    pub(super) x_batch: usize,
    pub(super) out_row: usize,
    pub(super) out_batch: usize,
    /// From the weight of one of the batch to the next; 0 for one weight.
    pub(super) weight_batch: usize,
    pub(super) bias_batch: usize,
    pub(super) numbers: Numbers,
    pub(super) finish: Finish,
}

/// Where everything is on the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) weight: u64,
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) bias: Option<u64>,
    /// Of rows of the weight, and of `x`.
    pub(super) scales: Option<(u64, u64)>,
    /// The sum is multiplied by it.
    pub(super) factor: f32,
    /// Address and bytes.
    pub(super) workspace: (u64, usize),
}

/// cuBLASLt of one context, and what it chose for each shape.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    /// None where it has no algorithm.
    plans: HashMap<(Shape, [u32; 3]), Option<Plan>>,
}

// SAFETY: a handle and what is made for it may be used from any thread, one at a time: it is behind a mutex. It lives as
// long as the process.
unsafe impl Send for Products {}

impl Products {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Products> {
        context.bind_to_thread().w()?;
        let handle = result::create_handle().map_err(failed)?;
        Ok(Products {
            handle,
            plans: HashMap::new(),
        })
    }

    /// Queues a product. `false` where cuBLASLt has no algorithm for it, and nothing was done.
    ///
    /// # Safety
    /// The addresses are on the card of the stream, and what is there is as the shape says.
    pub(super) unsafe fn multiply(&mut self, shape: &Shape, at: &At, stream: &CudaStream) -> Result<bool> {
        let (operands, result) = shape.numbers.types();
        let align = |address: u64, strides: [usize; 2], size: usize| {
            let strides = strides.map(|stride| (stride * size) as u64);
            let lowest = |n: u64| {
                if n == 0 {
                    MOST_ALIGNED
                } else {
                    n & n.wrapping_neg()
                }
            };
            let all = [address, strides[0], strides[1]].map(lowest);
            all.into_iter().min().unwrap_or(1).min(MOST_ALIGNED) as u32
        };
        let alignments = [
            align(
                at.weight,
                [shape.inputs, shape.weight_batch],
                size_of_type(operands),
            ),
            align(at.x, [shape.x_row, shape.x_batch], size_of_type(operands)),
            align(at.out, [shape.out_row, shape.out_batch], size_of_type(result)),
        ];
        let key = (*shape, alignments);
        if !self.plans.contains_key(&key) {
            if self.plans.len() >= REMEMBERED {
                self.plans.clear();
            }
            let plan = Plan::new(self.handle, shape, alignments, at).map_err(failed)?;
            self.plans.insert(key, plan);
        }
        let Some(Some(plan)) = self.plans.get(&key) else {
            return Ok(false);
        };
        plan.point_at(at).map_err(failed)?;
        let (alpha, beta) = (at.factor, 0f32);
        // SAFETY: the plan describes the operands as the caller promises that they are; the workspace is as large as the
        // algorithm was chosen for; alpha and beta are read before the call returns. With beta 0 nothing is read from the
        // result.
        let multiplied = unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at.weight as *const c_void,
                plan.weight,
                at.x as *const c_void,
                plan.x,
                at.out as *const c_void,
                plan.out,
                at.out as *mut c_void,
                plan.out,
                &raw const plan.algorithm,
                at.workspace.0 as *mut c_void,
                at.workspace.1,
                stream.cu_stream().cast(),
            )
        };
        multiplied.map_err(failed)?;
        Ok(true)
    }
}

/// What cuBLASLt is told of a product, and how it is done. It counts columns first: `outᵀ = W xᵀ` of matrices whose columns
/// are our rows, the weight transposed, which is the one order that fp8 has.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// `None` where there is no algorithm.
    fn new(
        handle: sys::cublasLtHandle_t,
        shape: &Shape,
        alignments: [u32; 3],
        at: &At,
    ) -> std::result::Result<Option<Plan>, CublasError> {
        let (operands, out) = shape.numbers.types();
        // Whatever was made before an error is given back by the drop.
        let mut plan = Plan {
            product: ptr::null_mut(),
            weight: ptr::null_mut(),
            x: ptr::null_mut(),
            out: ptr::null_mut(),
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        plan.product = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        // `CUBLAS_OP_T`, which these bindings do not name.
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 1i32)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, shape.finish.epilogue())?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out)?;
        if let Numbers::Fp8 { by_rows, .. } = shape.numbers {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1i8)?;
            if by_rows {
                let by_rows = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
                for attribute in [
                    Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                    Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                ] {
                    match plan.set(attribute, by_rows) {
                        Err(error) if is_unsupported(error) => return Ok(None),
                        other => other?,
                    }
                }
            }
        }
        plan.point_at(at)?;
        let (inputs, outputs) = (shape.inputs as u64, shape.outputs as u64);
        plan.weight = result::create_matrix_layout(operands, inputs, outputs, shape.inputs as i64)?;
        plan.x = result::create_matrix_layout(operands, inputs, shape.tokens as u64, shape.x_row as i64)?;
        plan.out = result::create_matrix_layout(out, outputs, shape.tokens as u64, shape.out_row as i64)?;
        if shape.batch > 1 {
            plan.set(
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE,
                shape.bias_batch as i64,
            )?;
            for (layout, stride) in [
                (plan.weight, shape.weight_batch),
                (plan.x, shape.x_batch),
                (plan.out, shape.out_batch),
            ] {
                let (count, stride) = (shape.batch as i32, stride as i64);
                // SAFETY: the layout is alive; the attributes are of these types.
                unsafe {
                    result::set_matrix_layout_attribute(
                        layout,
                        LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                        (&raw const count).cast(),
                        size_of_val(&count),
                    )?;
                    result::set_matrix_layout_attribute(
                        layout,
                        LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                        (&raw const stride).cast(),
                        size_of_val(&stride),
                    )?;
                }
            }
        }
        let chosen = plan.choose(handle, alignments, at.workspace.1)?;
        Ok(chosen.map(|algorithm| {
            plan.algorithm = algorithm;
            plan
        }))
    }

    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        [weight, x, out]: [u32; 3],
        workspace: usize,
    ) -> std::result::Result<Option<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = OwnPreference(result::create_matmul_pref()?);
        // SAFETY: the preference is alive; the attributes are of these types.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )?;
            for (attribute, alignment) in [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, weight),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
            ] {
                result::set_matmul_pref_attribute(
                    preference.0,
                    attribute,
                    (&raw const alignment).cast(),
                    size_of_val(&alignment),
                )?;
            }
        }
        // SAFETY: the handle, the plan and the preference are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                handle,
                self.product,
                self.weight,
                self.x,
                self.out,
                self.out,
                preference.0,
            )
        };
        match found {
            Ok(found) => Ok(Some(found.algo)),
            Err(error) if is_unsupported(error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Bias and scales of this call.
    fn point_at(&self, at: &At) -> std::result::Result<(), CublasError> {
        if let Some(bias) = at.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        if let Some((weight, x)) = at.scales {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x)?;
        }
        Ok(())
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> std::result::Result<(), CublasError> {
        // SAFETY: the description is alive; every attribute is set with a value of its own size.
        unsafe {
            result::set_matmul_desc_attribute(
                self.product,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
    }
}

impl Drop for Plan {
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
        }
    }
}

struct OwnPreference(sys::cublasLtMatmulPreference_t);

impl Drop for OwnPreference {
    fn drop(&mut self) {
        // SAFETY: alive, and given back once.
        unsafe {
            let _ = result::destroy_matmul_pref(self.0);
        }
    }
}

fn size_of_type(of: sys::cudaDataType_t) -> usize {
    match of {
        sys::cudaDataType_t::CUDA_R_32F => 4,
        sys::cudaDataType_t::CUDA_R_16F | sys::cudaDataType_t::CUDA_R_16BF => 2,
        _ => 1,
    }
}

fn is_unsupported(error: CublasError) -> bool {
    use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
    matches!(error.0, CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE)
}

fn failed(error: CublasError) -> Error {
    Error::Msg(format!("cuBLASLt: {:?}", error.0))
}
