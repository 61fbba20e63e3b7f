//! Linear layers, `x Wᵀ + b`, for full-precision and quantized weights.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use gpu::{Fp8Scales, InputShift, QuantizedWeight, Weight, WeightFormat};

use crate::dequantize::sums_of_rows;
use crate::linear_cpu::product_into;
use crate::loops::{add_in_place, gelu_tanh_in_place};
use crate::narrow_products::{int8_rotation, is_multiplied_in_fp8};
use crate::place::{with_rows, write_rows};
use crate::rows::with_numbers;
use crate::{Activation, allocated, dequantize};

/// Activation fused into a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// No activation.
    None,
    /// `torch.nn.GELU(approximate="tanh")`.
    GeluTanh,
}

/// A low-rank term of a linear layer, `factor · (x downᵀ) upᵀ`: an adapter (LoRA, Hu et al. 2021).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// `[rank, inputs]`.
    pub down: Tensor,
    /// `[outputs, rank]`.
    pub up: Tensor,
    pub factor: f64,
}

impl LowRank {
    /// Whether it is a term of layers of a shape `[outputs, inputs]`, in a dtype.
    fn is_of(&self, [outputs, inputs]: [usize; 2], dtype: DType) -> bool {
        let rank = self.down.dims().first().copied().unwrap_or_default();
        rank > 0
            && self.down.dims() == [rank, inputs]
            && self.up.dims() == [outputs, rank]
            && [&self.down, &self.up]
                .iter()
                .all(|factor| factor.dtype() == dtype && factor.is_contiguous())
    }
}

/// The low-rank terms of some items of a batch, whose other items have others or none.
#[derive(Clone, Debug)]
pub struct TermsOfItems {
    /// Numbers of the items, from 0.
    pub items: Range<usize>,
    /// As of [`LinearLayer::low_rank`].
    pub terms: Vec<LowRank>,
}

/// A linear layer: `x Wᵀ + b`, and low-rank terms, which are added to it before any activation.
#[derive(Clone, Debug)]
pub struct LinearLayer<'a> {
    /// `[outputs, inputs]`.
    pub weight: &'a Weight,
    /// `[outputs]`.
    pub bias: Option<&'a Tensor>,
    /// Full precision, in the dtype of the rows, each contiguous.
    pub low_rank: Vec<LowRank>,
}

impl<'a> LinearLayer<'a> {
    /// A layer without low-rank terms.
    #[must_use]
    pub fn new(weight: &'a Weight, bias: Option<&'a Tensor>) -> LinearLayer<'a> {
        LinearLayer {
            weight,
            bias,
            low_rank: Vec::new(),
        }
    }

    /// Whether the parts fit together, and to rows of `numbers` elements in all.
    fn fits(&self, numbers: usize, out: &Tensor) -> bool {
        let &[outputs, inputs] = self.weight.dims() else {
            return false;
        };
        let is_term = |term: &LowRank| term.is_of([outputs, inputs], out.dtype());
        inputs > 0
            && outputs > 0
            && numbers.is_multiple_of(inputs)
            && out.elem_count() == numbers / inputs * outputs
            && self
                .bias
                .is_none_or(|bias| bias.dims() == [outputs] && bias.dtype() == out.dtype())
            && self.low_rank.iter().all(is_term)
    }

    /// Whether it shifts its inputs before it multiplies them by the codes of its weight.
    #[cfg(feature = "cuda")]
    fn shifts_inputs(&self) -> bool {
        match self.weight {
            Weight::Full(_) => false,
            Weight::Quantized(weight) => weight.format.input_shift() != InputShift::None,
        }
    }

    /// Scratch bytes for `tokens` rows of a dtype.
    fn scratch_bytes(&self, tokens: usize, dtype: DType) -> u64 {
        let (outputs, inputs) = (self.weight.dims()[0], self.weight.dims()[1]);
        let of_weight = match self.weight {
            Weight::Full(_) => 0,
            Weight::Quantized(weight) => {
                let (rows, columns) = gpu::rows_and_columns(&weight.shape);
                linear_scratch(weight.format, rows, columns, tokens, dtype)
            }
        };
        let ranks = self.low_rank.iter().map(|term| term.up.dims()[1]);
        match ranks.max() {
            Some(rank) => of_weight.max(low_rank_scratch([outputs, inputs], rank, tokens, dtype)),
            None => of_weight,
        }
    }
}

/// Bytes of [`Scratch`] that low-rank terms need of layers of a shape `[outputs, inputs]` over the same rows, whose ranks
/// together are `rank`: the rows, projected down, or a copy of a weight with its terms. Terms of one layer are added one
/// after the other.
#[must_use]
pub fn low_rank_scratch(shape: [usize; 2], rank: usize, tokens: usize, dtype: DType) -> u64 {
    let adapted = match adapts_weight(shape, tokens) {
        true => allocated(shape[0] * shape[1] * dtype.size_in_bytes()),
        false => 0,
    };
    projected_rows(rank, tokens, dtype).max(adapted)
}

/// Bytes of [`Scratch`] that [`add_low_rank`] needs of a layer over so many rows, whose largest term has this rank: the rows, projected
/// down.
#[must_use]
pub fn projected_rows(rank: usize, tokens: usize, dtype: DType) -> u64 {
    allocated(tokens * rank * dtype.size_in_bytes().max(size_of::<f32>()))
}

/// Whether a card adds low-rank terms to a copy of the weight `[outputs, inputs]` rather than to the results: to read and
/// write the weight moves no more bytes than to read the rows, and to write and read their results.
#[must_use]
pub fn adapts_weight([outputs, inputs]: [usize; 2], tokens: usize) -> bool {
    2 * outputs * inputs <= tokens * (inputs + 2 * outputs)
}

/// Workspace shared by consecutive layers, allocated once per request. The CPU needs none.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// u8, on a card.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    bytes: Option<Tensor>,
}

impl Scratch {
    /// Allocates `bytes` on a card: the maximum of [`linear_scratch`] over the layers.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(bytes: u64, device: &Device) -> Result<Scratch> {
        Ok(Scratch {
            bytes: match device {
                Device::Cpu => None,
                _ if bytes == 0 => None,
                _ => Some(Tensor::zeros(bytes as usize, DType::U8, device)?),
            },
        })
    }

    /// Whether the scratch has at least `bytes`.
    #[cfg(feature = "cuda")]
    pub(crate) fn holds(&self, bytes: usize) -> bool {
        self.bytes.as_ref().map_or(0, Tensor::elem_count) >= bytes
    }

    /// Address of a part of the scratch.
    #[cfg(feature = "cuda")]
    pub(crate) fn place(&self, begin: usize, bytes: usize) -> Result<u64> {
        let found = self.bytes.as_ref().map_or(0, Tensor::elem_count);
        match &self.bytes {
            Some(all) if begin + bytes <= found => Ok(crate::cuda::address_of(all)? + begin as u64),
            _ => candle_core::bail!("a scratch of {found} bytes where {} are needed", begin + bytes),
        }
    }
}

/// Whether this device multiplies this weight in fp8 by rows of this dtype, so that activations should be quantized to
/// [`crate::Codes`] where they are computed: a format that [`crate::Fp8Products`] takes with dimensions that are multiples
/// of 16, bf16 or f16 rows, and compute capability 8.9 or later.
///
/// # Errors
/// Errors of the device.
pub fn multiplies_fp8(device: &Device, weight: &Weight, dtype: DType) -> Result<bool> {
    match weight {
        Weight::Full(_) => Ok(false),
        Weight::Quantized(weight) => multiplies_codes(device, weight, dtype),
    }
}

#[cfg(feature = "cuda")]
fn multiplies_codes(device: &Device, weight: &QuantizedWeight, dtype: DType) -> Result<bool> {
    match device {
        Device::Cuda(device) => crate::cuda::multiplies_fp8(device, weight, dtype),
        _ => Ok(false),
    }
}

#[cfg(not(feature = "cuda"))]
fn multiplies_codes(_: &Device, _: &QuantizedWeight, _: DType) -> Result<bool> {
    Ok(false)
}

/// `act(x Wᵀ + b + Σ terms)`, as `torch.nn.Linear` with adapters, written to `out`. `x` is `[.., inputs]` and `out`
/// `[.., outputs]` with as many rows, in one dtype, and each may be a strided view (strided rows in strided matrices);
/// the last axes of a row may be split (`[.., heads, width]`).
///
/// A quantized weight is dequantized as a whole to the dtype of `x`, into `scratch`. From compute capability 8.9 on,
/// weights that [`crate::Fp8Products`] takes are multiplied in fp8 by rows of bf16 or f16: each row of `x`, and of a weight in
/// another format, is quantized to e4m3 by its absolute maximum, unless it is already; the result is within 0.05 of
/// the product with the dequantized weight (relative, L2), within 0.07 where the weight is rounded as well. Weights that
/// [`crate::Int8Products`] takes are multiplied in int8 by such rows; the result is within 0.02. Low-rank
/// terms are computed in the dtype of `x`, with sums in f32, and need `x` in numbers; of many rows on a card they are added
/// to a copy of the weight in `scratch`, unless it is multiplied in eight bits.
///
/// # Errors
/// When shapes or dtypes do not match, or the scratch is too small; errors of [`dequantize()`] and of the device.
pub fn linear_into<'a>(
    x: impl Into<Activation<'a>>,
    layer: &LinearLayer<'_>,
    then: Epilogue,
    out: &Tensor,
    scratch: &Scratch,
) -> Result<()> {
    let x = x.into();
    let numbers = match x {
        Activation::Numbers(x) => x.elem_count(),
        Activation::Codes(codes) => codes.codes.elem_count(),
    };
    if !layer.fits(numbers, out) {
        let terms = layer.low_rank.iter();
        let terms: Vec<_> = terms.map(|term| (term.down.dims(), term.up.dims())).collect();
        candle_core::bail!(
            "a linear layer with weight {:?}, bias {:?} and low-rank terms {terms:?} of {numbers} numbers to {:?} of {:?}",
            layer.weight.dims(),
            layer.bias.map(|bias| (bias.dims(), bias.dtype())),
            out.dims(),
            out.dtype()
        );
    }
    let shifted = shifted_bias(layer, out)?;
    let layer = match &shifted {
        None => layer,
        Some(bias) => &LinearLayer {
            bias: Some(bias),
            ..layer.clone()
        },
    };
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::linear_into(x, layer, then, out, scratch);
    }
    let _ = scratch;
    match x {
        Activation::Numbers(x) => on_cpu(x, layer, then, out),
        Activation::Codes(_) => candle_core::bail!("only cards multiply codes of fp8"),
    }
}

/// The bias `b + shift · W 1` of a layer that shifts its inputs before it multiplies them by the codes of its weight
/// ([`WeightFormat::input_shift`]), in the dtype of the result; `None` for all others. `W` is without its low-rank product.
fn shifted_bias(layer: &LinearLayer<'_>, out: &Tensor) -> Result<Option<Tensor>> {
    let Weight::Quantized(weight) = layer.weight else {
        return Ok(None);
    };
    if weight.format.input_shift() == InputShift::None {
        return Ok(None);
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::shifted_bias(weight, layer.bias, out.dtype()).map(Some);
    }
    let shift = f64::from(weight.format.input_shift().number());
    let mut numbers = sums_of_rows(weight)?;
    numbers.iter_mut().for_each(|sum| *sum *= shift);
    if let Some(bias) = layer.bias {
        with_numbers(bias, |bias| {
            for (number, bias) in numbers.iter_mut().zip(bias) {
                *number += f64::from(*bias);
            }
            Ok(())
        })?;
    }
    let shifted = Tensor::new(numbers, out.device())?.to_dtype(out.dtype())?;
    Ok(Some(shifted))
}

/// A layer and its output.
#[derive(Clone, Debug)]
pub struct LayerTo<'a> {
    pub layer: LinearLayer<'a>,
    /// `[.., outputs]`.
    pub out: &'a Tensor,
}

/// [`linear_into`] for several layers over the same rows. On a card it is one batched product if the layers have the
/// same shape and equal strides in memory, as the projections of one attention do; for products in fp8 the rows are
/// quantized once.
///
/// # Errors
/// Errors of [`linear_into`].
pub fn linears_into<'a>(
    x: impl Into<Activation<'a>>,
    layers: &[LayerTo<'_>],
    then: Epilogue,
    scratch: &Scratch,
) -> Result<()> {
    let x = x.into();
    #[cfg(feature = "cuda")]
    if let Activation::Numbers(x) = x
        && x.device().is_cuda()
        && layers.len() > 1
        && !layers.iter().any(|to| to.layer.shifts_inputs())
        && layers.iter().all(|to| to.layer.fits(x.elem_count(), to.out))
        && (crate::cuda::linears_in_codes(x, layers, then, scratch)?
            || crate::cuda::linear_as_one(x, layers, then, scratch)?)
    {
        return Ok(());
    }
    for LayerTo { layer, out } in layers {
        linear_into(x, layer, then, out, scratch)?;
    }
    Ok(())
}

/// Layers over the rows of some items of a batch, whose other items have others.
#[derive(Clone, Debug)]
pub struct LayersOfItems<'a> {
    /// Numbers of the items, from 0.
    pub items: Range<usize>,
    /// As many as for other items.
    pub layers: Vec<LinearLayer<'a>>,
}

/// [`linears_into`] over the items of a batch, some with other layers than others: `x` is `[items, ..]` with rows of the layers'
/// inputs, and each of `outs` `[items, ..]` with rows of the outputs of the layers in its place. Results of items that are not named keep
/// their bits. On a card, layers of one shape in full precision that are at equal distances, for as many items each, are one
/// batched product; so are several layers together whose weights, and results in each row, follow each other. The last bits of a
/// result depend on where the weights are in memory.
///
/// # Errors
/// When there is no such item, or not a layer for each of `outs`; errors of [`linear_into`].
pub fn linears_of_items_into(
    x: &Tensor,
    of_items: &[LayersOfItems<'_>],
    outs: &[&Tensor],
    scratch: &Scratch,
) -> Result<()> {
    let mut parts = Vec::with_capacity(of_items.len());
    for LayersOfItems { items, layers } in of_items {
        let part = |all: &Tensor| all.narrow(0, items.start, items.len());
        if items.is_empty() || layers.len() != outs.len() {
            candle_core::bail!(
                "{} layers for {} results of items {items:?}",
                layers.len(),
                outs.len()
            );
        }
        let outs = outs.iter().map(|out| part(out)).collect::<Result<Vec<_>>>()?;
        parts.push((part(x)?, layers, outs));
    }
    let mut over = Vec::with_capacity(parts.len());
    for (x, layers, outs) in &parts {
        let layers = layers.iter().cloned().zip(outs);
        let layers: Vec<LayerTo<'_>> = layers.map(|(layer, out)| LayerTo { layer, out }).collect();
        over.push((x, layers));
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && over.iter().all(|(x, layers)| {
            let mut layers = layers.iter();
            layers.all(|to| to.layer.fits(x.elem_count(), to.out))
        })
    {
        let parts: Vec<_> = over.iter().map(|(x, layers)| (*x, &layers[..])).collect();
        if crate::cuda::linears_of_parts_as_one(&parts, scratch)? {
            return Ok(());
        }
    }
    for (x, layers) in over {
        linears_into(x, &layers, Epilogue::None, scratch)?;
    }
    Ok(())
}

/// `out += Σ terms` of a layer of a shape `[outputs, inputs]`, to the results of some items of a batch: `x` is `[items, ..]` with rows
/// of `inputs` numbers, and `out` `[items, ..]` with as many of `outputs`, in one dtype; both may be strided views. The results of the
/// other items keep their bits. Terms are computed in the dtype of `x`, with sums in f32. It takes as much of `scratch` as
/// [`projected_rows`] says of all rows. On a card, terms of one shape and factor that are at equal distances, of as many
/// items each, are one batched product.
///
/// # Errors
/// When shapes or dtypes do not match, or the scratch is too small; errors of the device.
pub fn add_low_rank(
    x: &Tensor,
    [outputs, inputs]: [usize; 2],
    of_items: &[TermsOfItems],
    out: &Tensor,
    scratch: &Scratch,
) -> Result<()> {
    let (items, rows) = (out.dim(0)?, x.elem_count() / inputs.max(1));
    let fits = |of: &TermsOfItems| {
        of.items.start < of.items.end
            && of.items.end <= items
            && of
                .terms
                .iter()
                .all(|term| term.is_of([outputs, inputs], out.dtype()))
    };
    let is_layer = inputs > 0
        && x.dim(0)? == items
        && x.elem_count() == rows * inputs
        && out.elem_count() == rows * outputs
        && x.dtype() == out.dtype();
    if !is_layer || !of_items.iter().all(fits) {
        let terms = of_items.iter().flat_map(|of| &of.terms);
        let terms: Vec<_> = terms.map(|term| (term.down.dims(), term.up.dims())).collect();
        candle_core::bail!(
            "low-rank terms {terms:?} of a layer {:?} over {:?}, to {:?} of {:?}",
            [outputs, inputs],
            x.dims(),
            out.dims(),
            out.dtype()
        );
    }
    let part = |of: &TermsOfItems| {
        let part = |all: &Tensor| all.narrow(0, of.items.start, of.items.len());
        Ok((part(x)?, part(out)?))
    };
    let parts = of_items.iter().map(part).collect::<Result<Vec<_>>>()?;
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        let of_items = of_items.iter().map(|of| &of.terms[..]);
        let parts = parts.iter().zip(of_items);
        let parts: Vec<_> = parts.map(|((x, out), terms)| (x, out, terms)).collect();
        return crate::cuda::add_low_rank(&parts, scratch);
    }
    let _ = scratch;
    for ((x, out), of) in parts.iter().zip(of_items) {
        for term in &of.terms {
            let (down, up) = projected_down(x, term)?;
            let sums = Tensor::zeros((down.dim(0)?, outputs), DType::F32, out.device())?;
            product_into(&down, &up, &[], &sums, &|_, _, _| {})?;
            with_rows(&sums, outputs, |sums| {
                write_rows(out, outputs, |row, numbers| add_in_place(numbers, sums.row(row)))
            })?;
        }
    }
    Ok(())
}

/// Writes the weight of a layer with its low-rank terms to `out`, `[outputs, inputs]`, contiguous, in the dtype of the terms. On a
/// card it is the copy that [`linear_into`] makes of a weight for many rows, to the bit.
///
/// # Errors
/// When shapes or dtypes do not match; errors of [`dequantize()`] and of the device.
pub fn adapted_weight(layer: &LinearLayer<'_>, out: &Tensor) -> Result<()> {
    if out.dims() != layer.weight.dims() || !out.is_contiguous() {
        candle_core::bail!(
            "a weight {:?} with terms, written to {:?}",
            layer.weight.dims(),
            out.dims()
        );
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::adapted_weight(layer, out);
    }
    let mut whole = match layer.weight {
        Weight::Full(weight) => weight.to_dtype(DType::F32)?,
        Weight::Quantized(weight) => dequantize(weight, DType::F32)?,
    };
    for term in &layer.low_rank {
        let (up, down) = (term.up.to_dtype(DType::F32)?, term.down.to_dtype(DType::F32)?);
        whole = (whole + (up.matmul(&down)? * term.factor)?)?;
    }
    crate::copy_rows(&whole, out)
}

/// Quantizes a weight `[outputs, inputs]` of bf16 or f16 by rows to e4m3, into `bytes`, u8 in the layout of fp8 with a scale a row.
/// Only cards with native products of fp8 do.
///
/// # Errors
/// When it has other bytes, or inputs that are no multiple of 16; errors of the device.
pub fn fp8_of_rows(weight: &Tensor, bytes: &Tensor) -> Result<QuantizedWeight> {
    let (outputs, inputs) = weight.dims2()?;
    let format = WeightFormat::Fp8(Fp8Scales::Rows);
    let expected = format.bytes(outputs, inputs).0;
    if bytes.dtype() != DType::U8 || bytes.elem_count() as u64 != expected || !bytes.is_contiguous() {
        candle_core::bail!("a weight {:?} in fp8 has {expected} bytes", weight.dims());
    }
    let quantized = QuantizedWeight {
        bytes: bytes.clone(),
        format,
        shape: vec![outputs, inputs],
    };
    #[cfg(feature = "cuda")]
    if bytes.device().is_cuda() {
        crate::cuda::quantize_weight(weight, &quantized)?;
        return Ok(quantized);
    }
    candle_core::bail!("{quantized:?} is quantized by cards alone")
}

fn on_cpu(x: &Tensor, layer: &LinearLayer<'_>, then: Epilogue, out: &Tensor) -> Result<()> {
    let weight = match layer.weight {
        Weight::Full(weight) => weight.clone(),
        Weight::Quantized(quantized) => dequantize(quantized, DType::F32)?,
    };
    let terms = layer.low_rank.iter().map(|term| projected_down(x, term));
    let terms = terms.collect::<Result<Vec<_>>>()?;
    let activate = |numbers: &mut [f32]| match then {
        Epilogue::None => {}
        Epilogue::GeluTanh => gelu_tanh_in_place(numbers),
    };
    match layer.bias {
        None => product_into(x, &weight, &terms, out, &|_, _, numbers| activate(numbers)),
        Some(bias) => with_numbers(bias, |bias| {
            product_into(x, &weight, &terms, out, &|_, column, numbers| {
                add_in_place(numbers, &bias[column..column + numbers.len()]);
                activate(numbers);
            })
        }),
    }
}

/// The rows of `x` times `down` and the factor, `[rows, rank]` in f32, and `up`.
fn projected_down(x: &Tensor, term: &LowRank) -> Result<(Tensor, Tensor)> {
    let (rank, inputs) = term.down.dims2()?;
    let rows = x.elem_count() / inputs;
    let down = Tensor::zeros((rows, rank), DType::F32, x.device())?;
    let factor = term.factor as f32;
    let scale = |_: usize, _: usize, numbers: &mut [f32]| numbers.iter_mut().for_each(|n| *n *= factor);
    product_into(x, &term.down, &[], &down, &scale)?;
    Ok((down, term.up.clone()))
}

/// [`linear_into`] a newly allocated tensor: `x` is `[.., inputs]`, the result `[.., outputs]`.
///
/// # Errors
/// Errors of [`linear_into`].
pub fn linear(x: &Tensor, layer: &LinearLayer<'_>) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let (Some(inputs), &[outputs, columns]) = (shape.pop(), layer.weight.dims()) else {
        candle_core::bail!(
            "a linear layer with weight {:?} over {:?}",
            layer.weight.dims(),
            x.dims()
        );
    };
    if columns != inputs {
        candle_core::bail!(
            "a linear layer with weight {:?} over {inputs} inputs",
            layer.weight.dims()
        );
    }
    shape.push(outputs);
    let out = Tensor::zeros(shape, x.dtype(), x.device())?;
    let tokens = x.elem_count() / inputs.max(1);
    let scratch = Scratch::new(layer.scratch_bytes(tokens, x.dtype()), x.device())?;
    let contiguous;
    let x = match x.is_contiguous() {
        true => x,
        false => {
            contiguous = x.contiguous()?;
            &contiguous
        }
    };
    linear_into(x, layer, Epilogue::None, &out, &scratch)?;
    Ok(out)
}

/// Bytes of [`Scratch`] that [`linear_into`] needs for a layer in this format: the dequantized weight, or, for a
/// product in fp8, the codes and scales of `x`, and of a weight in another format; for one in int8, the codes and scales of `x`, and
/// sums of some rows. On the CPU it is the dequantized
/// weight and the product before it is written; thread-local packing buffers, which do not grow with the shapes, are
/// not included.
pub fn linear_scratch(format: WeightFormat, rows: usize, columns: usize, tokens: usize, dtype: DType) -> u64 {
    let dequantized = allocated(rows * columns * dtype.size_in_bytes());
    let in_codes = |rows: usize| allocated(rows * columns) + allocated(4 * rows);
    let in_fp8 = match (format, dtype) {
        (_, DType::BF16 | DType::F16) if !is_multiplied_in_fp8(format) => 0,
        (WeightFormat::Fp8(_), DType::BF16 | DType::F16) => in_codes(tokens),
        (_, DType::BF16 | DType::F16) => in_codes(tokens) + in_codes(rows),
        _ => 0,
    };
    let in_int8 = match dtype {
        DType::BF16 | DType::F16 if int8_rotation(format).is_some() => {
            in_codes(tokens) + allocated(rows_of_sums(rows, tokens) * rows * size_of::<i32>())
        }
        _ => 0,
    };
    dequantized.max(in_fp8).max(in_int8)
}

/// Rows of which a card has the sums of a product in int8 at a time, for `outputs` sums a row: few enough that a card's cache holds
/// them until they are read.
pub(crate) fn rows_of_sums(outputs: usize, tokens: usize) -> usize {
    const BYTES: usize = 32 << 20;
    const MULTIPLE: usize = 128;
    let fitting = BYTES / (outputs.max(1) * size_of::<i32>()) / MULTIPLE * MULTIPLE;
    tokens.min(fitting.max(MULTIPLE))
}

#[cfg(test)]
mod tests;
