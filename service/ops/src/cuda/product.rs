//! Matrix products with a weight through cuBLASLt: full precision, native fp8 (compute capability 8.9 and later), and int8, whose
//! sums are exact. The result is written directly to its destination, with bias and GELU in the epilogue.
//!
//! cuBLASLt names several algorithms for a product, and not always the fastest first. Of large products those whose
//! result equals the first one's bit for bit are timed at the first use, and the fastest is written down for later
//! processes: which one it is changes no result.
//!
//! In fp8 each row of `x` is quantized by its absolute maximum, so that the result is within a few hundredths of the
//! product with the dequantized weight: `x` loses precision to four significant bits. Accumulation is in f32, on
//! Hopper with slightly less precision (`FAST_ACCUM`).

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Error, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaContext, CudaStream};

use super::code::Recorder;
use crate::cudnn::Folder;

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT as TIMING;
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;

/// Capacity of the in-memory cache of plans.
const REMEMBERED: usize = 4096;

/// Capacity of the on-disk list of recent products: some models in some sizes.
const KEPT: usize = 96;

/// Algorithms of a product that are timed, at most.
const CANDIDATES: usize = 8;

/// Operations from which on algorithms are timed: some 0.1 ms of a Hopper card.
const TIMED_FROM: usize = 50_000_000_000;

/// Runs of an algorithm that are timed together, after one that is not.
const TIMED_RUNS: u32 = 3;

/// An algorithm takes the first one's place if it takes at most this share of its time: less is noise.
const FASTER: f32 = 0.98;

/// Delay before the list is written, to batch further products.
const KEPT_AFTER: Duration = Duration::from_millis(50);

/// Alignment beyond which cuBLASLt gains nothing, in bytes.
const MAX_ALIGNMENT: u64 = 256;

/// Dtypes of operands and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ProductTypes {
    F32,
    F16,
    Bf16,
    /// e4m3 by e4m3 to this dtype. `by_rows`: scales per row of `x` and of the weight are applied within the product.
    Fp8 {
        is_bf16: bool,
        by_rows: bool,
    },
    /// int8 by int8 to sums in i32, without an addend, a factor or an epilogue.
    Int8,
}

impl ProductTypes {
    /// Types of the operands, and of the result.
    fn types(self) -> (sys::cudaDataType_t, sys::cudaDataType_t) {
        use sys::cudaDataType_t::{
            CUDA_R_8F_E4M3, CUDA_R_8I, CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F, CUDA_R_32I,
        };
        match self {
            ProductTypes::F32 => (CUDA_R_32F, CUDA_R_32F),
            ProductTypes::F16 => (CUDA_R_16F, CUDA_R_16F),
            ProductTypes::Bf16 => (CUDA_R_16BF, CUDA_R_16BF),
            ProductTypes::Fp8 { is_bf16: true, .. } => (CUDA_R_8F_E4M3, CUDA_R_16BF),
            ProductTypes::Fp8 { is_bf16: false, .. } => (CUDA_R_8F_E4M3, CUDA_R_16F),
            ProductTypes::Int8 => (CUDA_R_8I, CUDA_R_32I),
        }
    }

    /// Types of sums, and of the factors of the product and of the addend.
    fn computed_in(self) -> (sys::cublasComputeType_t, sys::cudaDataType_t) {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32I};
        match self {
            ProductTypes::Int8 => (CUBLAS_COMPUTE_32I, sys::cudaDataType_t::CUDA_R_32I),
            _ => (CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F),
        }
    }
}

/// Epilogue of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ProductEpilogue {
    Nothing,
    Bias,
    GeluTanh,
    BiasGeluTanh,
}

impl ProductEpilogue {
    fn epilogue(self) -> sys::cublasLtEpilogue_t {
        use sys::cublasLtEpilogue_t as Epilogue;
        match self {
            ProductEpilogue::Nothing => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            ProductEpilogue::Bias => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            ProductEpilogue::GeluTanh => Epilogue::CUBLASLT_EPILOGUE_GELU,
            ProductEpilogue::BiasGeluTanh => Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS,
        }
    }
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum WeightOrder {
    /// `[outputs, inputs]`, as in a linear layer.
    OutputsFirst,
    /// `[inputs, outputs]`. Not for fp8.
    InputsFirst,
}

/// `[batch, tokens, inputs]` by a weight to `[batch, tokens, outputs]`, with strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProductShape {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) x_row: usize,
    pub(super) x_batch: usize,
    pub(super) out_row: usize,
    pub(super) out_batch: usize,
    /// Batch stride of the weight; 0 for a shared weight.
    pub(super) weight_batch: usize,
    pub(super) bias_batch: usize,
    /// Batch stride of the addend. Its rows are as far apart as those of the result.
    pub(super) added_batch: usize,
    pub(super) weight_order: WeightOrder,
    pub(super) numbers: ProductTypes,
    pub(super) finish: ProductEpilogue,
}

impl ProductShape {
    /// Elements of a row of the weight as it is stored.
    fn weight_row(&self) -> usize {
        match self.weight_order {
            WeightOrder::OutputsFirst => self.inputs,
            WeightOrder::InputsFirst => self.outputs,
        }
    }

    /// Whether the algorithms of this product are worth timing, and their results can be compared.
    fn is_timed(&self, at: &At) -> bool {
        let operations = 2 * self.tokens * self.inputs * self.outputs;
        let size = size_of_type(self.numbers.types().1);
        // The result is compared in words of four bytes, and must not be an operand.
        let is_in_words = (self.outputs * size).is_multiple_of(4)
            && (self.out_row * size).is_multiple_of(4)
            && at.out.is_multiple_of(4);
        self.batch == 1 && operations >= TIMED_FROM && is_in_words && at.added != Some(at.out)
    }

    /// Where its result is, for the kernel that compares results.
    pub(super) fn result_at(&self, at: &At) -> ResultAt {
        let size = size_of_type(self.numbers.types().1);
        ResultAt {
            start: at.out,
            row_bytes: (self.out_row * size) as u64,
            rows: self.tokens,
            words: self.outputs * size / 4,
        }
    }

    /// All dimensions and strides, in the order of the fields.
    fn sides(&self) -> [usize; 11] {
        let ProductShape {
            batch,
            tokens,
            inputs,
            outputs,
            x_row,
            x_batch,
            out_row,
            out_batch,
            weight_batch,
            bias_batch,
            added_batch,
            weight_order: _,
            numbers: _,
            finish: _,
        } = *self;
        [
            batch,
            tokens,
            inputs,
            outputs,
            x_row,
            x_batch,
            out_row,
            out_batch,
            weight_batch,
            bias_batch,
            added_batch,
        ]
    }
}

/// Orders of weights, dtypes and epilogues, in the order by which the on-disk list numbers them.
const ORDERS: [WeightOrder; 2] = [WeightOrder::OutputsFirst, WeightOrder::InputsFirst];
const KINDS: [ProductTypes; 8] = [
    ProductTypes::F32,
    ProductTypes::F16,
    ProductTypes::Bf16,
    ProductTypes::Fp8 {
        is_bf16: false,
        by_rows: false,
    },
    ProductTypes::Fp8 {
        is_bf16: false,
        by_rows: true,
    },
    ProductTypes::Fp8 {
        is_bf16: true,
        by_rows: false,
    },
    ProductTypes::Fp8 {
        is_bf16: true,
        by_rows: true,
    },
    ProductTypes::Int8,
];
const FINISHES: [ProductEpilogue; 4] = [
    ProductEpilogue::Nothing,
    ProductEpilogue::Bias,
    ProductEpilogue::GeluTanh,
    ProductEpilogue::BiasGeluTanh,
];

/// Addresses of the operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) weight: u64,
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) bias: Option<u64>,
    /// Scales of the rows of the weight, and of `x`.
    pub(super) scales: Option<(u64, u64)>,
    /// The sum is multiplied by this.
    pub(super) factor: f32,
    /// Address of the addend of the product, before bias and activation: the result itself, or another matrix.
    pub(super) added: Option<u64>,
    /// Address and bytes.
    pub(super) workspace: (u64, usize),
}

/// The rows of a result on the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultAt {
    pub(super) start: u64,
    pub(super) row_bytes: u64,
    pub(super) rows: usize,
    /// Words of four bytes in a row.
    pub(super) words: usize,
}

/// Key of a plan: the product, and the alignments of the weight, `x` and the result, in bytes.
type Key = (ProductShape, [u32; 3]);

/// cuBLASLt of one context, with a cache of plans by shape.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    /// `None` for a product without an algorithm.
    plans: HashMap<Key, Option<ProductPlan>>,
    /// The folder of the on-disk list, and its key there; `None` if it is not persisted.
    folder: Option<(Folder, String)>,
    /// Products in the on-disk list, written or not yet.
    kept: VecDeque<Key>,
    /// The algorithms that were the fastest, by their places in cuBLASLt's list.
    fastest: HashMap<Key, usize>,
    /// Whether there are products that are not written yet.
    has_further: bool,
    /// Whether a thread is about to write them.
    has_writer: bool,
}

// SAFETY: the handle and its descriptors may be used from any thread, one at a time: they are behind a mutex. It
// lives as long as the process.
unsafe impl Send for Products {}

impl Products {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Products> {
        context.bind_to_thread().w()?;
        let handle = result::create_handle().map_err(failed)?;
        // SAFETY: it takes nothing and returns a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (major, minor) = context.compute_capability().w()?;
        let key = format!(
            "cuBLASLt {version} sm_{major}{minor} {}: products",
            context.name().w()?
        );
        Ok(Products {
            handle,
            plans: HashMap::new(),
            folder: Folder::of_process().map(|folder| (folder, key)),
            kept: VecDeque::new(),
            fastest: HashMap::new(),
            has_further: false,
            has_writer: false,
        })
    }

    /// The recent products of earlier processes.
    pub(super) fn of_before(&mut self) -> Vec<Key> {
        let text = self.folder.as_ref().and_then(|(folder, key)| folder.read(key));
        let text = String::from_utf8(text.unwrap_or_default()).unwrap_or_default();
        let lines: Vec<(Key, Option<usize>)> = text.lines().filter_map(of_line).take(KEPT).collect();
        let known = lines.iter().filter_map(|(key, place)| Some((*key, (*place)?)));
        self.fastest.extend(known);
        let keys: Vec<Key> = lines.into_iter().map(|(key, _)| key).collect();
        let new = keys.iter().filter(|key| !self.kept.contains(key));
        self.kept = new.copied().chain(self.kept.iter().copied()).collect();
        keys
    }

    /// Chooses cuBLASLt's algorithm for a product, and loads the code of its kernels to the card.
    pub(super) fn choose_ahead(
        &mut self,
        key: &Key,
        workspace: (u64, usize),
        recorder: &Recorder,
    ) -> Result<()> {
        if self.plans.contains_key(key) {
            return Ok(());
        }
        let (shape, _) = key;
        // Nothing is computed, and no address is dereferenced.
        let everywhere = workspace.0;
        let at = At {
            weight: everywhere,
            x: everywhere,
            out: everywhere,
            bias: matches!(
                shape.finish,
                ProductEpilogue::Bias | ProductEpilogue::BiasGeluTanh
            )
            .then_some(everywhere),
            scales: match shape.numbers {
                ProductTypes::Fp8 { by_rows: true, .. } => Some((everywhere, everywhere)),
                _ => None,
            },
            factor: 1.0,
            added: None,
            workspace,
        };
        let Some(plan) = self.plan(key, &at)? else {
            return Ok(());
        };
        let mut outcome = Ok(());
        // SAFETY: the work is captured, and never runs.
        let queue = || outcome = unsafe { plan.queue(plan.chosen, &at, recorder.stream()) };
        recorder.load_queued(queue).w()?;
        outcome
    }

    /// Starts a thread that writes the list soon, if there are new products.
    pub(super) fn write_soon(&mut self, this: &Arc<Mutex<Products>>) {
        if !self.has_further || self.has_writer || self.folder.is_none() {
            return;
        }
        self.has_writer = true;
        let this = Arc::clone(this);
        let write = move || {
            std::thread::sleep(KEPT_AFTER);
            let (folder, text) = {
                let mut products = this.lock().unwrap_or_else(PoisonError::into_inner);
                (products.has_further, products.has_writer) = (false, false);
                let line = |key| line_of(key, products.fastest.get(key).copied());
                let lines: Vec<String> = products.kept.iter().map(line).collect();
                (products.folder.clone(), lines.join("\n"))
            };
            if let Some((folder, key)) = folder {
                folder.write(&key, text.as_bytes());
            }
        };
        let thread = std::thread::Builder::new().name("products".to_owned());
        if let Err(error) = thread.spawn(write) {
            tracing::debug!(%error, "which products there are is not written down");
        }
    }

    /// The plan of a product, made at its first use; `None` if cuBLASLt has no algorithm.
    fn plan(&mut self, key: &Key, at: &At) -> Result<Option<&mut ProductPlan>> {
        if !self.plans.contains_key(key) {
            if self.plans.len() >= REMEMBERED {
                self.plans.clear();
            }
            let (shape, alignments) = key;
            let mut plan = ProductPlan::new(self.handle, shape, *alignments, at).map_err(failed)?;
            if let (Some(plan), Some(&place)) = (&mut plan, self.fastest.get(key)) {
                plan.chosen = place.min(plan.algorithms.len() - 1);
                plan.is_timed = true;
            }
            self.plans.insert(*key, plan);
        }
        Ok(self.plans.get_mut(key).and_then(Option::as_mut))
    }

    /// Enqueues a product. Returns `false` if cuBLASLt has no algorithm for it; nothing is done then. At the first use of a
    /// large product its algorithms are timed; `digest` is of the bits of the result at that point of the stream.
    ///
    /// # Safety
    /// The addresses are on the card of the stream, and point to operands of this shape.
    pub(super) unsafe fn multiply(
        &mut self,
        shape: &ProductShape,
        at: &At,
        stream: &CudaStream,
        digest: &dyn Fn(&ResultAt) -> Result<u64>,
    ) -> Result<bool> {
        let (operands, result) = shape.numbers.types();
        let align = |address: u64, strides: [usize; 2], size: usize| {
            let strides = strides.map(|stride| (stride * size) as u64);
            let lowest = |n: u64| {
                if n == 0 {
                    MAX_ALIGNMENT
                } else {
                    n & n.wrapping_neg()
                }
            };
            let all = [address, strides[0], strides[1]].map(lowest);
            all.into_iter().min().unwrap_or(1).min(MAX_ALIGNMENT) as u32
        };
        let of_added = at.added.map_or(MAX_ALIGNMENT as u32, |added| {
            align(added, [shape.out_row, shape.added_batch], size_of_type(result))
        });
        let of_out = align(at.out, [shape.out_row, shape.out_batch], size_of_type(result));
        let alignments = [
            align(
                at.weight,
                [shape.weight_row(), shape.weight_batch],
                size_of_type(operands),
            ),
            align(at.x, [shape.x_row, shape.x_batch], size_of_type(operands)),
            of_out.min(of_added),
        ];
        let key = (*shape, alignments);
        let is_new = !self.plans.contains_key(&key);
        if is_new && !self.kept.contains(&key) {
            self.kept.push_back(key);
            if self.kept.len() > KEPT {
                self.kept.pop_front();
            }
            self.has_further = true;
        }
        let Some(plan) = self.plan(&key, at)? else {
            return Ok(false);
        };
        let timed = (!plan.is_timed && plan.algorithms.len() > 1 && shape.is_timed(at)).then(|| {
            // SAFETY: the plan describes the operands, as the caller promises; the result is no operand.
            unsafe { plan.time(at, stream, &|| digest(&shape.result_at(at))) }
        });
        let timed = timed.transpose()?;
        // SAFETY: the plan describes the operands, as the caller promises.
        unsafe { plan.queue(plan.chosen, at, stream) }?;
        if let Some(fastest) = timed {
            self.fastest.insert(key, fastest);
            self.has_further = true;
        }
        Ok(true)
    }
}

/// Descriptors of a product for cuBLASLt, and its algorithm. cuBLASLt is column-major: `outᵀ = W xᵀ` of matrices
/// whose columns are our rows, with the weight of a linear layer transposed, the only order that fp8 supports.
struct ProductPlan {
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    added: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    /// In cuBLASLt's order, at least one.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    /// The place of the one that is used.
    chosen: usize,
    /// Whether that is known to be the fastest.
    is_timed: bool,
    /// Whether sums and factors are whole numbers.
    is_whole: bool,
}

impl ProductPlan {
    /// `None` if there is no algorithm.
    fn new(
        handle: sys::cublasLtHandle_t,
        shape: &ProductShape,
        alignments: [u32; 3],
        at: &At,
    ) -> std::result::Result<Option<ProductPlan>, CublasError> {
        let (operands, out) = shape.numbers.types();
        // After an error, the drop frees the objects created before it.
        let mut plan = ProductPlan {
            handle,
            product: ptr::null_mut(),
            weight: ptr::null_mut(),
            x: ptr::null_mut(),
            added: ptr::null_mut(),
            out: ptr::null_mut(),
            algorithms: Vec::new(),
            chosen: 0,
            is_timed: false,
            is_whole: shape.numbers == ProductTypes::Int8,
        };
        let (sums, factors) = shape.numbers.computed_in();
        plan.product = result::create_matmul_desc(sums, factors)?;
        // `CUBLAS_OP_T` or `CUBLAS_OP_N`, which these bindings do not define.
        let transposes = i32::from(shape.weight_order == WeightOrder::OutputsFirst);
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transposes)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, shape.finish.epilogue())?;
        if shape.numbers != ProductTypes::Int8 {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out)?;
        }
        if let ProductTypes::Fp8 { by_rows, .. } = shape.numbers {
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
        let (of_row, rows) = match shape.weight_order {
            WeightOrder::OutputsFirst => (inputs, outputs),
            WeightOrder::InputsFirst => (outputs, inputs),
        };
        plan.weight = result::create_matrix_layout(operands, of_row, rows, shape.weight_row() as i64)?;
        plan.x = result::create_matrix_layout(operands, inputs, shape.tokens as u64, shape.x_row as i64)?;
        let of_result =
            || result::create_matrix_layout(out, outputs, shape.tokens as u64, shape.out_row as i64);
        plan.added = of_result()?;
        plan.out = of_result()?;
        if shape.batch > 1 {
            plan.set(
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE,
                shape.bias_batch as i64,
            )?;
            for (layout, stride) in [
                (plan.weight, shape.weight_batch),
                (plan.x, shape.x_batch),
                (plan.added, shape.added_batch),
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
        plan.algorithms = plan.candidates(alignments, at.workspace.1)?;
        Ok((!plan.algorithms.is_empty()).then_some(plan))
    }

    /// The algorithms that cuBLASLt names, the one first that it takes for the fastest.
    fn candidates(
        &self,
        [weight, x, out]: [u32; 3],
        workspace: usize,
    ) -> std::result::Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
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
        let none = sys::cublasLtMatmulHeuristicResult_t {
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = ([none; CANDIDATES], 0);
        // SAFETY: the handle, the plan and the preference are alive; the list has space for as many as are asked for.
        let asked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                self.product,
                self.weight,
                self.x,
                self.added,
                self.out,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        match asked.result() {
            Ok(()) => {}
            Err(error) if is_unsupported(error) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let usable = found[..usize::try_from(count).unwrap_or(0).min(CANDIDATES)].iter();
        let usable = usable.filter(|one| one.state.result().is_ok());
        Ok(usable.map(|one| one.algo).collect())
    }

    /// Times the algorithms whose result has the bits of the first one's, and chooses the fastest. Returns its place. The
    /// stream is waited for.
    ///
    /// # Safety
    /// As for [`ProductPlan::queue`]; the stream is not capturing, and the result is no operand.
    unsafe fn time(
        &mut self,
        at: &At,
        stream: &CudaStream,
        digest: &dyn Fn() -> Result<u64>,
    ) -> Result<usize> {
        let mut first: Option<(u64, f32)> = None;
        let (mut fastest, mut least) = (0, f32::INFINITY);
        for place in 0..self.algorithms.len() {
            // SAFETY: the caller's obligation. An algorithm that does not take these operands is refused, not run.
            let is_run = unsafe { self.queue(place, at, stream) };
            if place > 0 && is_run.is_err() {
                continue;
            }
            is_run?;
            let bits = digest()?;
            let is_equal = first.is_none_or(|(of_first, _)| of_first == bits);
            let begin = stream.record_event(Some(TIMING)).w()?;
            for _ in 0..TIMED_RUNS {
                // SAFETY: as before.
                unsafe { self.queue(place, at, stream) }?;
            }
            let end = stream.record_event(Some(TIMING)).w()?;
            let ms = begin.elapsed_ms(&end).w()? / TIMED_RUNS as f32;
            let (_, of_first) = *first.get_or_insert((bits, ms));
            tracing::debug!(place, ms, of_first, is_equal, "an algorithm was timed");
            if is_equal && ms < least && (place == 0 || ms <= FASTER * of_first) {
                (fastest, least) = (place, ms);
            }
        }
        (self.chosen, self.is_timed) = (fastest, true);
        Ok(fastest)
    }

    /// Enqueues the product, by the algorithm at a place.
    ///
    /// # Safety
    /// The addresses point to operands of the shape that the plan was made for, on the card of the stream; or the
    /// stream is capturing.
    unsafe fn queue(&self, place: usize, at: &At, stream: &CudaStream) -> Result<()> {
        self.point_at(at).map_err(failed)?;
        let (alpha, beta) = (at.factor, f32::from(u8::from(at.added.is_some())));
        let whole = (1i32, 0i32);
        let (alpha, beta): (*const c_void, *const c_void) = match self.is_whole {
            true => ((&raw const whole.0).cast(), (&raw const whole.1).cast()),
            false => ((&raw const alpha).cast(), (&raw const beta).cast()),
        };
        // SAFETY: the plan describes the operands, as the caller promises; the workspace is as large as the algorithm
        // was chosen for; alpha and beta are read before the call returns. With beta 0 the result is not read before.
        let multiplied = unsafe {
            result::matmul(
                self.handle,
                self.product,
                alpha,
                beta,
                at.weight as *const c_void,
                self.weight,
                at.x as *const c_void,
                self.x,
                at.added.unwrap_or(at.out) as *const c_void,
                self.added,
                at.out as *mut c_void,
                self.out,
                &raw const self.algorithms[place],
                at.workspace.0 as *mut c_void,
                at.workspace.1,
                stream.cu_stream().cast(),
            )
        };
        multiplied.map_err(failed)
    }

    /// Sets the pointers of bias and scales for this call.
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
        // SAFETY: the descriptor is alive; every attribute is set with a value of its own size.
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

impl Drop for ProductPlan {
    fn drop(&mut self) {
        // A failure cannot be handled: it leaks a few hundred bytes on the host.
        // SAFETY: each is alive and destroyed once; null was never created.
        unsafe {
            if !self.product.is_null() {
                let _ = result::destroy_matmul_desc(self.product);
            }
            for layout in [self.weight, self.x, self.added, self.out] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
        }
    }
}

/// Serializes a product for the on-disk list: sides and strides, order of the weight, dtypes, epilogue, alignments, and the
/// number of the fastest algorithm from one on, 0 where none was timed.
fn line_of((shape, alignments): &Key, fastest: Option<usize>) -> String {
    let numbers = shape.sides().into_iter().map(|side| side.to_string());
    let kinds = [
        ORDERS.iter().position(|order| *order == shape.weight_order),
        KINDS.iter().position(|kind| *kind == shape.numbers),
        FINISHES.iter().position(|one| *one == shape.finish),
    ];
    let kinds = kinds
        .into_iter()
        .map(|place| place.unwrap_or(usize::MAX).to_string());
    let alignments = alignments.iter().map(u32::to_string);
    numbers
        .chain(kinds)
        .chain(alignments)
        .chain([fastest.map_or(0, |place| place + 1).to_string()])
        .collect::<Vec<_>>()
        .join(" ")
}

/// Parses a line of [`line_of`]; `None` if it is malformed.
fn of_line(line: &str) -> Option<(Key, Option<usize>)> {
    let numbers: Vec<usize> = line
        .split(' ')
        .map(|word| word.parse().ok())
        .collect::<Option<_>>()?;
    let [
        batch,
        tokens,
        inputs,
        outputs,
        x_row,
        x_batch,
        out_row,
        out_batch,
        weight_batch,
        bias_batch,
        added_batch,
        order,
        kind,
        finish,
        alignments @ ..,
        fastest,
    ] = numbers.as_slice()
    else {
        return None;
    };
    let alignments: Vec<u32> = alignments
        .iter()
        .map(|n| u32::try_from(*n).ok())
        .collect::<Option<_>>()?;
    let shape = ProductShape {
        batch: *batch,
        tokens: *tokens,
        inputs: *inputs,
        outputs: *outputs,
        x_row: *x_row,
        x_batch: *x_batch,
        out_row: *out_row,
        out_batch: *out_batch,
        weight_batch: *weight_batch,
        bias_batch: *bias_batch,
        added_batch: *added_batch,
        weight_order: *ORDERS.get(*order)?,
        numbers: *KINDS.get(*kind)?,
        finish: *FINISHES.get(*finish)?,
    };
    let fastest = (*fastest <= CANDIDATES).then_some(fastest.checked_sub(1))?;
    Some(((shape, alignments.try_into().ok()?), fastest))
}

struct OwnPreference(sys::cublasLtMatmulPreference_t);

impl Drop for OwnPreference {
    fn drop(&mut self) {
        // SAFETY: alive, and destroyed once.
        unsafe {
            let _ = result::destroy_matmul_pref(self.0);
        }
    }
}

fn size_of_type(of: sys::cudaDataType_t) -> usize {
    match of {
        sys::cudaDataType_t::CUDA_R_32F | sys::cudaDataType_t::CUDA_R_32I => 4,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_line_round_trips() {
        for (numbers, finish) in KINDS
            .into_iter()
            .flat_map(|kind| FINISHES.map(|finish| (kind, finish)))
        {
            for weight_order in ORDERS {
                let shape = ProductShape {
                    batch: 1,
                    tokens: 2,
                    inputs: 3,
                    outputs: 4,
                    x_row: 5,
                    x_batch: 6,
                    out_row: 7,
                    out_batch: 8,
                    weight_batch: 9,
                    bias_batch: 10,
                    added_batch: 11,
                    weight_order,
                    numbers,
                    finish,
                };
                let key = (shape, [16, 32, 256]);
                for fastest in [None, Some(0), Some(CANDIDATES - 1)] {
                    assert_eq!(of_line(&line_of(&key, fastest)), Some((key, fastest)));
                }
            }
        }
    }

    #[test]
    fn malformed_product_lines_are_rejected() {
        for line in [
            "",
            "1 2 3",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 0 16 32 256",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 0 16 32 256 1 1",
            "1 2 3 4 5 6 7 8 9 10 11 0 8 0 16 32 256 1",
            "1 2 3 4 5 6 7 8 9 10 11 2 0 0 16 32 256 1",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 4 16 32 256 1",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 0 16 32 -256 1",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 0 16 32 4294967296 1",
            "1 2 3 4 5 6 7 8 9 10 11 0 0 0 16 32 256 9",
        ] {
            assert_eq!(of_line(line), None, "{line}");
        }
    }
}
