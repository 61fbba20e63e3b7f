//! [`crate::linear_into`] on a CUDA device.

use std::sync::PoisonError;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{CudaDevice, DType, Error, Result, Tensor};
use cudarc::driver::result::memset_d8_async;
use cudarc::driver::{CudaStream, DeviceRepr};
use gpu::{
    Fp8Scales, Int8Scales, QuantizedWeight, Rotation, Weight, WeightFormat, WeightPart, rows_and_columns,
};

use super::product::{At, ProductEpilogue, ProductShape, ProductTypes, ResultAt, WeightOrder};
use super::{
    ALIGNMENT, Card, THREADS, UNIT, address_of, aligned, dequantize_to_address, kernel_dtype, kernel_of,
    place_of, tensor, tiles_of,
};
use crate::linear::{adapts_weight, rows_of_sums};
use crate::place::Rows;
use crate::{Activation, Epilogue, LayerTo, LinearLayer, LowRank, Scratch};

/// The first compute capability with native fp8 products.
const SINCE: (i32, i32) = (gpu::FP8_PRODUCTS_SINCE.0 as i32, gpu::FP8_PRODUCTS_SINCE.1 as i32);

/// The first compute capability with tensor cores for int8.
const INT8_SINCE: (i32, i32) = (7, 5);

/// The compute capability of cards whose tensor cores multiply int8 far slower than bf16 (Blackwell Ultra).
const SLOW_INT8: (i32, i32) = (10, 3);

/// Columns of a weight in int8 beyond which a sum of products of at most 127² could pass i32.
const INT8_COLUMNS: usize = 1 << 17;

/// The compute capability on which cuBLASLt applies per-row scales of both operands within the product.
const BY_ROWS: (i32, i32) = (9, 0);

/// Dimensions of a weight must be multiples of this for a native fp8 product.
const MULTIPLE: usize = 16;

/// Maximum threads of a block that quantizes a row, and maximum units per thread.
const MAX_THREADS: usize = 1024;
const MAX_CHUNKS: usize = 4;

/// Units per thread of a block that quantizes a row of a weight (`fp8.cuh`).
const REQUANTIZED: usize = 2;

/// What to do where cuBLASLt has no algorithm for a product that every card should have one for.
const REPORT: &str = "report this, with the name of the card and the version of cuBLASLt";

/// Alignment of the parts of the scratch.
const APART: usize = 256;

/// Mirrors the struct in `digest.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DigestArguments {
    start: u64,
    sum: u64,
    row_bytes: u64,
    rows: u32,
    words: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for DigestArguments {}

/// The bits of a product's result as one number; the stream is waited for.
fn digest(card: &Card, device: &CudaDevice, result: &ResultAt) -> Result<u64> {
    const BLOCKS: usize = 1024;
    let ResultAt {
        start,
        row_bytes,
        rows,
        words,
    } = *result;
    let (Ok(rows), Ok(words)) = (u32::try_from(rows), u32::try_from(words)) else {
        candle_core::bail!("a result of {rows} rows of {words} words");
    };
    let sum = tensor(device.alloc_zeros::<u32>(2)?, device, 2);
    let arguments = DigestArguments {
        start,
        sum: address_of(&sum)?,
        row_bytes,
        rows,
        words,
    };
    let stream = device.cuda_stream();
    // SAFETY: the arguments have the kernel's layout; it reads the result, whose rows are as stated, and adds to one
    // number of eight bytes, which an allocation begins with.
    unsafe { card.launch(&stream, "digest".to_owned(), (BLOCKS, 1, 1), THREADS, &arguments)? };
    let halves = sum.to_vec1::<u32>()?;
    Ok(halves
        .iter()
        .rev()
        .fold(0, |all, half| all << 32 | u64::from(*half)))
}

/// Whether this card multiplies this weight in fp8, with rows of this dtype or codes of them.
pub(crate) fn multiplies_fp8(device: &CudaDevice, weight: &QuantizedWeight, dtype: DType) -> Result<bool> {
    let (rows, columns) = rows_and_columns(&weight.shape);
    let chunks = match weight.format {
        WeightFormat::Fp8(_) => MAX_CHUNKS,
        _ => REQUANTIZED,
    };
    Ok(crate::is_multiplied_in_fp8(weight.format)
        && matches!(dtype, DType::BF16 | DType::F16)
        && rows.is_multiple_of(MULTIPLE)
        && columns.is_multiple_of(MULTIPLE)
        && columns <= MAX_THREADS * chunks * UNIT
        && Card::of(device)?.compute_capability >= SINCE)
}

/// In which codes rows are multiplied by a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowCodes {
    Fp8,
    /// Rotated as the columns of the weight were.
    Int8(Rotation),
}

impl RowCodes {
    /// Those for rows of a dtype on a card; `None` for a weight that is dequantized.
    fn of(device: &CudaDevice, weight: &QuantizedWeight, dtype: DType) -> Result<Option<RowCodes>> {
        if multiplies_fp8(device, weight, dtype)? {
            return Ok(Some(RowCodes::Fp8));
        }
        let (rows, columns) = rows_and_columns(&weight.shape);
        let Some(rotation) = crate::int8_rotation(weight.format) else {
            return Ok(None);
        };
        let fits = matches!(dtype, DType::BF16 | DType::F16)
            && rows.is_multiple_of(MULTIPLE)
            && columns.is_multiple_of(rotation.group())
            && columns <= (MAX_THREADS * MAX_CHUNKS * UNIT).min(INT8_COLUMNS);
        let capability = Card::of(device)?.compute_capability;
        let is_faster = capability >= INT8_SINCE && capability != SLOW_INT8;
        Ok((fits && is_faster).then_some(RowCodes::Int8(rotation)))
    }
}

/// A layer with validated shapes.
pub(crate) fn linear_into(
    x: Activation<'_>,
    layer: &LinearLayer<'_>,
    then: Epilogue,
    out: &Tensor,
    scratch: &Scratch,
) -> Result<()> {
    let device = out.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let (outputs, columns) = (layer.weight.dims()[0], layer.weight.dims()[1]);
    let order = match x {
        Activation::Numbers(x) => Order::of(
            layer,
            Rows::of(x, columns)?.count(),
            (&card, device),
            out.dtype(),
            scratch,
        )?,
        Activation::Codes(_) if layer.low_rank.is_empty() => Order::NoTerms,
        Activation::Codes(_) => candle_core::bail!("codes of fp8 by low-rank terms"),
    };
    if order == Order::TermsFirst {
        let Activation::Numbers(x) = x else {
            candle_core::bail!("codes of fp8 by low-rank terms");
        };
        add_terms(x, &[layer], &[out], Epilogue::None, false, scratch)?;
    }
    let product = Layer {
        device,
        card: &card,
        stream: &device.cuda_stream(),
        outputs,
        bias: layer.bias,
        then: match order {
            Order::NoTerms | Order::InWeight | Order::TermsFirst => then,
            Order::TermsLast => Epilogue::None,
        },
        adds: order == Order::TermsFirst,
        out,
        scratch,
    };
    match (x, layer.weight) {
        (Activation::Numbers(x), Weight::Full(weight)) => {
            if weight.dtype() != out.dtype() || !weight.is_contiguous() {
                candle_core::bail!(
                    "a linear layer of {:?} with a weight of {:?}",
                    out.dtype(),
                    weight.dtype()
                );
            }
            let stored = address_of(weight)?;
            let place = match order {
                Order::InWeight => scratch.place(0, outputs * columns * out.dtype().size_in_bytes())?,
                _ => stored,
            };
            if order == Order::InWeight {
                product.add_to_weights(&[layer], &[stored], place)?;
            }
            product.multiply(x, columns, place)?;
        }
        (Activation::Numbers(x), Weight::Quantized(weight)) => {
            if let Some(kind) = RowCodes::of(device, weight, out.dtype())? {
                let (codes, taken) = product.quantize(x, columns, kind)?;
                product.multiply_codes(kind, codes, Rows::of(x, columns)?.count(), weight, taken)?;
            } else {
                let (rows, columns) = rows_and_columns(&weight.shape);
                let place = scratch.place(0, rows * columns * out.dtype().size_in_bytes())?;
                dequantize_to_address(weight, out.dtype(), place)?;
                if order == Order::InWeight {
                    product.add_to_weights(&[layer], &[place], place)?;
                }
                product.multiply(x, columns, place)?;
            }
        }
        (Activation::Codes(codes), Weight::Quantized(weight)) => {
            let at = (address_of(&codes.codes)?, address_of(&codes.scales)?);
            product.multiply_codes(RowCodes::Fp8, at, codes.codes.dim(0)?, weight, 0)?;
        }
        (Activation::Codes(_), Weight::Full(_)) => {
            candle_core::bail!("codes of fp8 by a weight in full precision")
        }
    }
    match x {
        _ if order != Order::TermsLast => Ok(()),
        Activation::Numbers(x) => add_terms(x, &[layer], &[out], then, true, scratch),
        Activation::Codes(_) => candle_core::bail!("codes of fp8 by low-rank terms"),
    }
}

/// [`crate::adapted_weight`], with validated shapes.
pub(crate) fn adapted_weight(layer: &LinearLayer<'_>, out: &Tensor) -> Result<()> {
    let device = out.device().as_cuda_device()?;
    let to = address_of(out)?;
    let from = match layer.weight {
        Weight::Full(weight) if weight.dtype() == out.dtype() && weight.is_contiguous() => {
            if layer.low_rank.is_empty() {
                return crate::copy_rows(weight, out);
            }
            address_of(weight)?
        }
        Weight::Full(weight) => {
            candle_core::bail!("a copy in {:?} of a weight of {:?}", out.dtype(), weight.dtype())
        }
        Weight::Quantized(weight) => {
            dequantize_to_address(weight, out.dtype(), to)?;
            to
        }
    };
    let product = Layer {
        device,
        card: &*Card::of(device)?,
        stream: &device.cuda_stream(),
        outputs: layer.weight.dims()[0],
        bias: None,
        then: Epilogue::None,
        adds: false,
        out,
        scratch: &Scratch::new(0, out.device())?,
    };
    product.add_to_weights(&[layer], &[from], to)
}

/// Quantizes the rows of a weight to the codes and scales of one in fp8.
pub(crate) fn quantize_weight(weight: &Tensor, quantized: &QuantizedWeight) -> Result<()> {
    let device = weight.device().as_cuda_device()?;
    let (_, columns) = weight.dims2()?;
    let at = stored_codes(quantized)?;
    quantize_rows(
        &*Card::of(device)?,
        &device.cuda_stream(),
        weight,
        columns,
        RowCodes::Fp8,
        at,
    )
}

/// `out += x weightᵀ + bias`, rounded once: `x` is `[n, inputs]`, `weight` `[outputs, .., inputs]` and contiguous, `out`
/// `[n, outputs]`. Shapes are validated by the caller.
pub(crate) fn add_product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
    let device = out.device().as_cuda_device()?;
    if weight.dtype() != out.dtype() || !weight.is_contiguous() {
        candle_core::bail!("rows of {:?} and a weight of {:?}", out.dtype(), weight.dtype());
    }
    let product = Layer {
        device,
        card: &*Card::of(device)?,
        stream: &device.cuda_stream(),
        outputs: weight.dim(0)?,
        bias,
        then: Epilogue::None,
        adds: true,
        out,
        scratch: &Scratch::new(0, out.device())?,
    };
    product.multiply(x, x.dim(candle_core::D::Minus1)?, address_of(weight)?)
}

/// When low-rank terms are computed, and to which numbers they are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    NoTerms,
    /// Before the layer's product, to a copy of the weight in the scratch: of many rows, this moves fewer bytes.
    InWeight,
    /// Before the layer's product, they are written to its result, and the product reads them while it computes.
    TermsFirst,
    /// After the layer's product, where scales are applied to the finished product: terms written before it would be scaled
    /// too.
    TermsLast,
}

impl Order {
    /// For `tokens` rows of a dtype.
    fn of(
        layer: &LinearLayer<'_>,
        tokens: usize,
        (card, device): (&Card, &CudaDevice),
        dtype: DType,
        scratch: &Scratch,
    ) -> Result<Order> {
        if layer.low_rank.is_empty() {
            return Ok(Order::NoTerms);
        }
        let (outputs, inputs) = (layer.weight.dims()[0], layer.weight.dims()[1]);
        let in_weight = adapts_weight([outputs, inputs], tokens)
            && scratch.holds(outputs * inputs * dtype.size_in_bytes());
        let before = match in_weight {
            true => Order::InWeight,
            false => Order::TermsFirst,
        };
        let Weight::Quantized(weight) = layer.weight else {
            return Ok(before);
        };
        match RowCodes::of(device, weight, dtype)? {
            None => return Ok(before),
            // They are added where scales are applied to sums.
            Some(RowCodes::Int8(_)) => return Ok(Order::TermsFirst),
            Some(RowCodes::Fp8) => {}
        }
        let by_rows = match weight.format {
            WeightFormat::Fp8(kind) => kind == Fp8Scales::Rows,
            _ => true, // they become fp8 with a scale a row
        };
        Ok(match by_rows && card.compute_capability == BY_ROWS {
            true => Order::TermsFirst,
            false => Order::TermsLast,
        })
    }
}

/// Computes the low-rank terms of layers over the same rows; all layers have the same number of terms. Adds them to the results
/// or (the first, unless `adds`) overwrites the results, and applies the activation. Terms of several layers are two batched
/// products where they are alike.
fn add_terms(
    x: &Tensor,
    layers: &[&LinearLayer<'_>],
    outs: &[&Tensor],
    then: Epilogue,
    adds: bool,
    scratch: &Scratch,
) -> Result<()> {
    let terms = layers.first().map_or(0, |layer| layer.low_rank.len());
    for number in 0..terms {
        let is_last = number + 1 == terms;
        let then = if is_last { then } else { Epilogue::None };
        let parts = layers.iter().zip(outs);
        let parts: Vec<TermOf<'_>> = parts
            .map(|(layer, out)| (x, *out, &layer.low_rank[number]))
            .collect();
        add_each(&parts, (then, adds || number > 0), scratch)?;
    }
    Ok(())
}

/// Rows, the results of a layer over them, and one of its terms.
type TermOf<'a> = (&'a Tensor, &'a Tensor, &'a LowRank);

/// Rows, the results that terms are added to, and the terms.
type AddedTo<'a> = (&'a Tensor, &'a Tensor, &'a [LowRank]);

/// [`crate::add_low_rank`], with validated shapes: each of the parts of a batch with its terms. The terms of all parts are two batched
/// products where they are alike.
pub(crate) fn add_low_rank(parts: &[AddedTo<'_>], scratch: &Scratch) -> Result<()> {
    let most = parts.iter().map(|(_, _, terms)| terms.len()).max();
    for number in 0..most.unwrap_or(0) {
        let with_term = parts
            .iter()
            .filter_map(|(x, out, terms)| Some((*x, *out, terms.get(number)?)));
        let with_term: Vec<TermOf<'_>> = with_term.collect();
        add_each(&with_term, (Epilogue::None, true), scratch)?;
    }
    Ok(())
}

/// Adds a term to each of several results, or overwrites them, and applies the activation: all at once where that can be done, else one
/// after the other.
fn add_each(parts: &[TermOf<'_>], how: (Epilogue, bool), scratch: &Scratch) -> Result<()> {
    if parts.len() > 1 && add_at_once(parts, how, scratch)? {
        return Ok(());
    }
    for part in parts {
        if !add_at_once(std::slice::from_ref(part), how, scratch)? {
            let (_, _, term) = part;
            candle_core::bail!(
                "cuBLASLt has no algorithm for a low-rank term of {:?}",
                term.up.dims()
            );
        }
    }
    Ok(())
}

/// Does what [`add_each`] does by two batched products. Returns `false`, and changes nothing, where these cannot do it: for parts of
/// different shapes, or at different distances.
fn add_at_once(parts: &[TermOf<'_>], (then, adds): (Epilogue, bool), scratch: &Scratch) -> Result<bool> {
    let Some(&(x, out, first)) = parts.first() else {
        return Ok(true);
    };
    let device = x.device().as_cuda_device()?;
    let (rank, inputs) = first.down.dims2()?;
    let outputs = first.up.dims()[0];
    let size = x.dtype().size_in_bytes();
    let (rows, results) = (Rows::of(x, inputs)?, Rows::of(out, outputs)?);
    let mut at = Vec::with_capacity(parts.len());
    for (x, out, term) in parts {
        let is_alike = term.down.dims() == first.down.dims()
            && term.up.dims() == first.up.dims()
            && term.factor.to_bits() == first.factor.to_bits()
            && is_like(Rows::of(x, inputs)?, rows)
            && is_like(Rows::of(out, outputs)?, results);
        if !is_alike {
            return Ok(false);
        }
        let [x, down, up, out] = [*x, &term.down, &term.up, *out].map(address_of);
        at.push([x?, down?, up?, out?]);
    }
    let Some([xs, downs, ups, outs]) = distances(&at, size) else {
        return Ok(false);
    };
    let card = Card::of(device)?;
    let stream = device.cuda_stream();
    let layer = Layer {
        device,
        card: &card,
        stream: &stream,
        outputs,
        bias: None,
        then,
        adds: false,
        out,
        scratch,
    };
    let one = layer.shape(rows, inputs, layer.numbers()?)?;
    // The matrices of a part are a batch of their own.
    let (batch, x_batch, out_batch) = match (parts.len(), one.batch) {
        (1, batch) => (batch, one.x_batch, one.out_batch),
        (count, 1) => (count, xs, outs),
        _ => return Ok(false),
    };
    // Rows of `x` in separate matrices stay separate: the projected rows of one matrix follow those of another.
    let of_matrix = one.tokens * rank;
    let projected = scratch.place(0, batch * of_matrix * size)?;
    let down = ProductShape {
        batch,
        outputs: rank,
        x_batch,
        out_row: rank,
        out_batch: of_matrix,
        added_batch: of_matrix,
        weight_batch: downs,
        ..one
    };
    let places = At {
        weight: at[0][1],
        x: at[0][0],
        out: projected,
        bias: None,
        scales: None,
        factor: first.factor as f32,
        added: None,
        workspace: card.workspace(device)?,
    };
    if !layer.try_to(&down, ProductEpilogue::Nothing, &places)? {
        return Ok(false);
    }
    let up = ProductShape {
        batch,
        inputs: rank,
        x_row: rank,
        x_batch: of_matrix,
        out_batch,
        added_batch: out_batch,
        weight_batch: ups,
        ..one
    };
    let places = At {
        weight: at[0][2],
        x: projected,
        out: at[0][3],
        factor: 1.0,
        added: adds.then_some(at[0][3]),
        ..places
    };
    let finish = layer.finish();
    if finish != ProductEpilogue::Nothing && layer.try_to(&up, finish, &places)? {
        return Ok(true);
    }
    if !layer.try_to(&up, ProductEpilogue::Nothing, &places)? {
        return Ok(false);
    }
    let each: Vec<&Tensor> = parts.iter().map(|(_, out, _)| *out).collect();
    layer.finish_each(&each).map(|()| true)
}

/// Distances in elements between the addresses of each kind, where they are equal; 0 for a single address.
fn distances<const KINDS: usize>(at: &[[u64; KINDS]], size: usize) -> Option<[usize; KINDS]> {
    let mut distances = [0; KINDS];
    for (kind, distance) in distances.iter_mut().enumerate() {
        let mut all = at.windows(2).map(|pair| pair[1][kind].checked_sub(pair[0][kind]));
        match all.next() {
            None => {}
            Some(Some(apart))
                if apart.is_multiple_of(size as u64) && all.all(|other| other == Some(apart)) =>
            {
                *distance = apart as usize / size;
            }
            Some(_) => return None,
        }
    }
    Some(distances)
}

/// Computes layers over the same rows in codes of one kind. The rows are quantized once, and the terms of all layers are computed at
/// once. Returns `false`, and does nothing, where the layers are not multiplied so, or where terms are added after their products.
pub(crate) fn linears_in_codes(
    x: &Tensor,
    layers: &[LayerTo<'_>],
    then: Epilogue,
    scratch: &Scratch,
) -> Result<bool> {
    let Some(first) = layers.first() else {
        return Ok(false);
    };
    let device = x.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let columns = first.layer.weight.dims()[1];
    let tokens = Rows::of(x, columns)?.count();
    let terms = first.layer.low_rank.len();
    let mut weights = Vec::with_capacity(layers.len());
    let mut kind = None;
    for LayerTo { layer, out } in layers {
        let Weight::Quantized(weight) = layer.weight else {
            return Ok(false);
        };
        let of_layer = RowCodes::of(device, weight, x.dtype())?;
        kind = kind.or(of_layer);
        let order = Order::of(layer, tokens, (&card, device), x.dtype(), scratch)?;
        if of_layer.is_none()
            || of_layer != kind
            || out.dtype() != x.dtype()
            || order == Order::TermsLast
            || layer.low_rank.len() != terms
        {
            return Ok(false);
        }
        weights.push(weight);
    }
    let Some(kind) = kind else {
        return Ok(false);
    };
    if terms > 0 {
        let outs: Vec<&Tensor> = layers.iter().map(|to| to.out).collect();
        let with_terms: Vec<&LinearLayer<'_>> = layers.iter().map(|to| &to.layer).collect();
        add_terms(x, &with_terms, &outs, Epilogue::None, false, scratch)?;
    }
    let product = Layer {
        device,
        card: &card,
        stream: &device.cuda_stream(),
        outputs: first.layer.weight.dims()[0],
        bias: first.layer.bias,
        then,
        adds: terms > 0,
        out: first.out,
        scratch,
    };
    let (codes, taken) = product.quantize(x, columns, kind)?;
    for (LayerTo { layer, out }, weight) in layers.iter().zip(weights) {
        let each = Layer {
            outputs: layer.weight.dims()[0],
            bias: layer.bias,
            out,
            ..product
        };
        each.multiply_codes(kind, codes, tokens, weight, taken)?;
    }
    Ok(true)
}

/// A product with a weight in the dtype of its rows: where its operands and its results are, and the places of its results' rows.
#[derive(Clone, Copy)]
struct Placed {
    weight: u64,
    bias: Option<u64>,
    out: u64,
    outputs: usize,
    rows: Rows,
}

impl Placed {
    /// That of a layer whose weight is at this address.
    fn of(LayerTo { layer, out }: &LayerTo<'_>, weight: u64) -> Result<Placed> {
        let outputs = layer.weight.dims()[0];
        Ok(Placed {
            weight,
            bias: layer.bias.map(address_of).transpose()?,
            out: address_of(out)?,
            outputs,
            rows: Rows::of(out, outputs)?,
        })
    }

    /// One product with both weights `[.., columns]`, where those, the biases, and the results in each row follow each other.
    fn and(self, next: Placed, columns: usize, dtype: DType) -> Option<Placed> {
        let bytes = (self.outputs * dtype.size_in_bytes()) as u64;
        let outputs = self.outputs + next.outputs;
        let biases_follow = match (self.bias, next.bias) {
            (None, None) => true,
            (Some(own), Some(next)) => next == own + bytes,
            (None, Some(_)) | (Some(_), None) => false,
        };
        let like_own = Rows {
            columns: self.rows.columns,
            ..next.rows
        };
        let follows = next.weight == self.weight + columns as u64 * bytes
            && biases_follow
            && next.out == self.out + bytes
            && is_like(like_own, self.rows)
            && self.rows.rows > 1
            && self.rows.row_stride >= outputs;
        follows.then_some(Placed { outputs, ..self })
    }
}

/// Whether rows are as many, as long and as far apart as others.
fn is_like(rows: Rows, others: Rows) -> bool {
    Rows {
        start: others.start,
        ..rows
    } == others
}

/// The products of layers over the same rows in full precision: one where they follow each other in memory, as copies with the terms of
/// adapters do, else one for each. `None` where a layer is quantized, or has terms.
fn placed(layers: &[LayerTo<'_>], columns: usize, dtype: DType) -> Result<Option<Vec<Placed>>> {
    let mut each = Vec::with_capacity(layers.len());
    for to in layers {
        match to.layer.weight {
            Weight::Full(weight)
                if to.layer.low_rank.is_empty()
                    && weight.dims()[1] == columns
                    && weight.is_contiguous()
                    && [weight.dtype(), to.out.dtype()] == [dtype, dtype] =>
            {
                each.push(Placed::of(to, address_of(weight)?)?);
            }
            Weight::Full(_) | Weight::Quantized(_) => return Ok(None),
        }
    }
    let Some((first, others)) = each.split_first() else {
        return Ok(Some(each));
    };
    let all = others
        .iter()
        .try_fold(*first, |all, next| all.and(*next, columns, dtype));
    Ok(Some(all.map_or(each, |all| vec![all])))
}

/// Rows, and the layers over them.
type LayersOver<'a> = (&'a Tensor, &'a [LayerTo<'a>]);

/// Computes layers over several parts of a batch, in full precision and without terms, each part with its own, as batched products.
/// Returns `false` where the parts are not alike, or not at equal distances in memory; some results may be written then.
pub(crate) fn linears_of_parts_as_one(parts: &[LayersOver<'_>], scratch: &Scratch) -> Result<bool> {
    let Some(&(x, [first, ..])) = parts.first() else {
        return Ok(false);
    };
    let device = x.device().as_cuda_device()?;
    let (columns, dtype) = (first.layer.weight.dims()[1], x.dtype());
    let mut products = Vec::with_capacity(parts.len());
    for (x, layers) in parts {
        let Some(placed) = placed(layers, columns, dtype)? else {
            return Ok(false);
        };
        products.push((address_of(x)?, Rows::of(x, columns)?, placed));
    }
    let Some((_, rows, of_first)) = products.first() else {
        return Ok(false);
    };
    let card = Card::of(device)?;
    for (number, one) in of_first.iter().enumerate() {
        let mut at = Vec::with_capacity(products.len());
        for (x, rows_of_part, placed) in &products {
            let like = placed.get(number).filter(|other| {
                placed.len() == of_first.len()
                    && is_like(*rows_of_part, *rows)
                    && other.outputs == one.outputs
                    && other.bias.is_some() == one.bias.is_some()
                    && is_like(other.rows, one.rows)
            });
            let Some(other) = like else {
                return Ok(false);
            };
            at.push([*x, other.weight, other.bias.unwrap_or(0), other.out]);
        }
        let Some([xs, weights, biases, outs]) = distances(&at, dtype.size_in_bytes()) else {
            return Ok(false);
        };
        let layer = Layer {
            device,
            card: &card,
            stream: &device.cuda_stream(),
            outputs: one.outputs,
            bias: first.layer.bias,
            then: Epilogue::None,
            adds: false,
            out: first.out,
            scratch,
        };
        let shape = layer.shape_to(*rows, columns, one.rows, layer.numbers()?);
        if shape.batch != 1 {
            return Ok(false);
        }
        let shape = ProductShape {
            batch: parts.len(),
            x_batch: xs,
            weight_batch: weights,
            bias_batch: biases,
            out_batch: outs,
            added_batch: outs,
            ..shape
        };
        if !layer.try_to(&shape, layer.finish(), &layer.at(x, one)?)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Computes layers over the same rows as one batched product, if all have the same shape, and weights, biases and
/// results have equal strides. Quantized weights get equal strides in the scratch, if it is large enough. Otherwise
/// returns `false`; terms may have been written into the results.
pub(crate) fn linear_as_one(
    x: &Tensor,
    layers: &[LayerTo<'_>],
    then: Epilogue,
    scratch: &Scratch,
) -> Result<bool> {
    let Some(first) = layers.first() else {
        return Ok(false);
    };
    let device = x.device().as_cuda_device()?;
    let (outputs, columns) = (first.layer.weight.dims()[0], first.layer.weight.dims()[1]);
    let dequantized = outputs * columns * x.dtype().size_in_bytes();
    let terms = first.layer.low_rank.len();
    let rows = Rows::of(x, columns)?;
    let in_weight = terms > 0
        && adapts_weight([outputs, columns], rows.count())
        && scratch.holds(layers.len() * dequantized)
        && dequantized.is_multiple_of(APART);
    let mut at = Vec::with_capacity(layers.len());
    let mut stored = Vec::with_capacity(layers.len());
    for (which, LayerTo { layer, out }) in layers.iter().enumerate() {
        let weight = match layer.weight {
            Weight::Full(weight) if weight.is_contiguous() && weight.dtype() == x.dtype() => {
                stored.push(address_of(weight)?);
                match in_weight {
                    true => scratch.place(which * dequantized, dequantized)?,
                    false => address_of(weight)?,
                }
            }
            Weight::Quantized(weight)
                if scratch.holds(layers.len() * dequantized)
                    && dequantized.is_multiple_of(APART)
                    && RowCodes::of(device, weight, x.dtype())?.is_none() =>
            {
                let place = scratch.place(which * dequantized, dequantized)?;
                stored.push(place);
                place
            }
            Weight::Full(_) | Weight::Quantized(_) => return Ok(false),
        };
        let is_alike = layer.weight.dims() == [outputs, columns]
            && layer.low_rank.len() == terms
            && out.dtype() == x.dtype()
            && out.layout().stride() == first.out.layout().stride();
        let (true, Some(bias)) = (is_alike, layer.bias) else {
            return Ok(false);
        };
        at.push([weight, address_of(bias)?, address_of(out)?]);
    }
    let Some(distances) = distances(&at, x.dtype().size_in_bytes()) else {
        return Ok(false);
    };
    let card = Card::of(device)?;
    let product = Layer {
        device,
        card: &card,
        stream: &device.cuda_stream(),
        outputs,
        bias: first.layer.bias,
        then,
        adds: terms > 0 && !in_weight,
        out: first.out,
        scratch,
    };
    let shape = product.shape(rows, columns, product.numbers()?)?;
    let finish = product.finish();
    if shape.batch != 1 || finish == ProductEpilogue::Nothing {
        return Ok(false);
    }
    let with_terms: Vec<&LinearLayer<'_>> = layers.iter().map(|to| &to.layer).collect();
    if product.adds {
        let outs: Vec<&Tensor> = layers.iter().map(|to| to.out).collect();
        add_terms(x, &with_terms, &outs, Epilogue::None, false, scratch)?;
    }
    for (to, [place, ..]) in layers.iter().zip(&at) {
        if let Weight::Quantized(weight) = to.layer.weight {
            dequantize_to_address(weight, x.dtype(), *place)?;
        }
    }
    if in_weight {
        product.add_to_weights(&with_terms, &stored, at[0][0])?;
    }
    let shape = ProductShape {
        batch: layers.len(),
        x_batch: 0,
        weight_batch: distances[0],
        bias_batch: distances[1],
        out_batch: distances[2],
        added_batch: distances[2],
        ..shape
    };
    let at = At {
        weight: at[0][0],
        x: address_of(x)?,
        out: at[0][2],
        bias: Some(at[0][1]),
        scales: None,
        factor: 1.0,
        added: product.adds.then_some(at[0][2]),
        workspace: card.workspace(device)?,
    };
    product.try_to(&shape, finish, &at)
}

/// Mirrors the arguments of `quantize_rows` in `fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct QuantizeArguments {
    x: u64,
    codes: u64,
    scales: u64,
    batch_stride: u64,
    row_stride: u64,
    rows: u32,
    columns: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for QuantizeArguments {}

/// Mirrors the arguments of `finish_product` in `fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FinishArguments {
    product: u64,
    x_scales: u64,
    w_scales: u64,
    bias: u64,
    batch_stride: u64,
    row_stride: u64,
    rows: u32,
    columns: u32,
    w_stride: u32,
    factor: f32,
    is_gelu: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for FinishArguments {}

/// Mirrors the struct in `int8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FinishSumsArguments {
    sums: u64,
    result: u64,
    x_scales: u64,
    w_scales: u64,
    bias: u64,
    batch_stride: u64,
    row_stride: u64,
    first: u32,
    rows: u32,
    columns: u32,
    w_stride: u32,
    is_gelu: u32,
    adds: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for FinishSumsArguments {}

/// Addresses of the codes and scales of rows.
type CodesAt = (u64, u64);

#[derive(Clone, Copy)]
struct Layer<'a> {
    device: &'a CudaDevice,
    card: &'a Card,
    stream: &'a CudaStream,
    outputs: usize,
    bias: Option<&'a Tensor>,
    then: Epilogue,
    /// Whether products are added to the numbers in `out`.
    adds: bool,
    out: &'a Tensor,
    scratch: &'a Scratch,
}

impl Layer<'_> {
    fn numbers(&self) -> Result<ProductTypes> {
        match self.out.dtype() {
            DType::F32 => Ok(ProductTypes::F32),
            DType::F16 => Ok(ProductTypes::F16),
            DType::BF16 => Ok(ProductTypes::Bf16),
            other => candle_core::bail!("a linear layer of {other:?}"),
        }
    }

    /// The part of the epilogue that cuBLASLt may apply. Its GELU is less accurate than f32.
    fn finish(&self) -> ProductEpilogue {
        match (self.bias, self.then, self.out.dtype()) {
            (None, Epilogue::None, _) => ProductEpilogue::Nothing,
            (Some(_), Epilogue::None, _) => ProductEpilogue::Bias,
            (_, Epilogue::GeluTanh, DType::F32) => ProductEpilogue::Nothing,
            (None, Epilogue::GeluTanh, _) => ProductEpilogue::GeluTanh,
            (Some(_), Epilogue::GeluTanh, _) => ProductEpilogue::BiasGeluTanh,
        }
    }

    /// Multiplies rows by a weight `[outputs, columns]` of the same dtype at an address.
    fn multiply(&self, x: &Tensor, columns: usize, weight: u64) -> Result<()> {
        if x.dtype() != self.out.dtype() {
            candle_core::bail!("a linear layer of {:?} to {:?}", x.dtype(), self.out.dtype());
        }
        let rows = Rows::of(x, columns)?;
        let at = At {
            weight,
            x: address_of(x)?,
            out: address_of(self.out)?,
            bias: self.bias.map(address_of).transpose()?,
            scales: None,
            factor: 1.0,
            added: self.added()?,
            workspace: self.card.workspace(self.device)?,
        };
        let shape = self.shape(rows, columns, self.numbers()?)?;
        if self.try_to(&shape, self.finish(), &at)? {
            return match self.finish() {
                ProductEpilogue::Nothing => self.finish_apart((0, 0, 0), 1.0),
                _ => Ok(()),
            };
        }
        if !self.try_to(&shape, ProductEpilogue::Nothing, &at)? {
            return Err(self.no_algorithm(&shape, REPORT));
        }
        self.finish_apart((0, 0, 0), 1.0)
    }

    /// Multiplies codes of rows by a weight. Of the scratch the first `taken` bytes are in use.
    fn multiply_codes(
        &self,
        kind: RowCodes,
        codes: CodesAt,
        tokens: usize,
        weight: &QuantizedWeight,
        taken: usize,
    ) -> Result<()> {
        match kind {
            RowCodes::Fp8 => self.multiply_fp8(codes, tokens, weight, taken),
            RowCodes::Int8(_) => self.multiply_int8(codes, tokens, weight, taken),
        }
    }

    /// Multiplies codes of rows by codes of a weight in int8, some rows at a time, whose sums are in the scratch.
    fn multiply_int8(
        &self,
        (codes, scales): CodesAt,
        tokens: usize,
        weight: &QuantizedWeight,
        taken: usize,
    ) -> Result<()> {
        let (outputs, columns) = rows_and_columns(&weight.shape);
        let (stored, weight_scales) = stored_codes(weight)?;
        let count = rows_of_sums(outputs, tokens);
        let sums = self.scratch.place(taken, count * outputs * size_of::<i32>())?;
        let out = Rows::of(self.out, outputs)?;
        for first in (0..tokens).step_by(count.max(1)) {
            let count = count.min(tokens - first);
            let shape = ProductShape {
                batch: 1,
                tokens: count,
                inputs: columns,
                outputs,
                x_row: columns,
                x_batch: 0,
                out_row: outputs,
                out_batch: 0,
                weight_batch: 0,
                bias_batch: 0,
                added_batch: 0,
                weight_order: WeightOrder::OutputsFirst,
                numbers: ProductTypes::Int8,
                finish: ProductEpilogue::Nothing,
            };
            let at = At {
                weight: stored,
                x: codes + (first * columns) as u64,
                out: sums,
                bias: None,
                scales: None,
                factor: 1.0,
                added: None,
                workspace: self.card.workspace(self.device)?,
            };
            if !self.try_to(&shape, ProductEpilogue::Nothing, &at)? {
                return Err(self.no_algorithm(&shape, "set cards.int8_products to \"never\""));
            }
            let arguments = FinishSumsArguments {
                sums,
                result: address_of(self.out)?,
                x_scales: scales,
                w_scales: weight_scales,
                bias: self.bias.map(address_of).transpose()?.unwrap_or(0),
                batch_stride: out.batch_stride as u64,
                row_stride: out.row_stride as u64,
                first: first as u32,
                rows: out.rows as u32,
                columns: outputs as u32,
                w_stride: match weight.format {
                    WeightFormat::Int8Scaled(Int8Scales::Rows, _) => 1,
                    _ => 0,
                },
                is_gelu: u32::from(self.then == Epilogue::GeluTanh),
                adds: u32::from(self.adds),
            };
            let name = format!("finish_sums_{}", kernel_dtype(self.out.dtype())?);
            let grid = (count, outputs.div_ceil(UNIT * THREADS), 1);
            // SAFETY: the structure mirrors `int8.cuh`, with the rows, columns and strides of the result; there is a sum for each
            // number of these rows, and scales and bias have as many elements as its rows and columns, which are whole units.
            unsafe { self.card.launch(self.stream, name, grid, THREADS, &arguments)? };
        }
        Ok(())
    }

    /// Multiplies codes of rows by codes of a weight. Those of a weight in another format are made in the scratch, of
    /// which the first `taken` bytes are in use.
    fn multiply_fp8(
        &self,
        (codes, scales): CodesAt,
        tokens: usize,
        weight: &QuantizedWeight,
        taken: usize,
    ) -> Result<()> {
        let is_bf16 = match self.out.dtype() {
            DType::BF16 => true,
            DType::F16 => false,
            other => candle_core::bail!("a product of fp8 to {other:?}"),
        };
        let (outputs, columns) = rows_and_columns(&weight.shape);
        let ((stored, weight_scales), kind) = match weight.format {
            WeightFormat::Fp8(kind) => (stored_codes(weight)?, kind),
            _ => {
                let at = self.scratch_for_codes(taken, outputs, columns)?;
                (
                    requantize_rows(self.card, self.stream, weight, at)?,
                    Fp8Scales::Rows,
                )
            }
        };
        let rows = Rows {
            start: 0,
            batch: 1,
            rows: tokens,
            columns,
            batch_stride: 0,
            row_stride: columns,
        };
        let by_rows = kind == Fp8Scales::Rows
            && self.card.compute_capability == BY_ROWS
            && scales.is_multiple_of(ALIGNMENT)
            && weight_scales.is_multiple_of(ALIGNMENT);
        let mut at = At {
            weight: stored,
            x: codes,
            out: address_of(self.out)?,
            bias: self.bias.map(address_of).transpose()?,
            scales: by_rows.then_some((weight_scales, scales)),
            factor: 1.0,
            added: self.added()?,
            workspace: self.card.workspace(self.device)?,
        };
        let shape = self.shape(rows, columns, ProductTypes::Fp8 { is_bf16, by_rows })?;
        if by_rows {
            if self.try_to(&shape, self.finish(), &at)? {
                return Ok(());
            }
            if self.try_to(&shape, ProductEpilogue::Nothing, &at)? {
                return self.finish_apart((0, 0, 0), 1.0);
            }
        }
        if self.adds {
            candle_core::bail!(
                "cuBLASLt has no algorithm for {shape:?} with scales by rows, added to low-rank terms"
            );
        }
        // A row's sum of products of at most 448² must fit f16: it is scaled by a power of two, which loses
        // nothing.
        let factor = if is_bf16 {
            1.0
        } else {
            (4 * columns).next_power_of_two() as f32
        };
        (at.scales, at.factor, at.bias) = (None, 1.0 / factor, None);
        let shape = ProductShape {
            numbers: ProductTypes::Fp8 {
                is_bf16,
                by_rows: false,
            },
            ..shape
        };
        if !self.try_to(&shape, ProductEpilogue::Nothing, &at)? {
            return Err(self.no_algorithm(&shape, REPORT));
        }
        let (of_weight, stride) = match kind {
            Fp8Scales::None => (0, 0),
            Fp8Scales::Tensor => (weight_scales, 0),
            Fp8Scales::Rows => (weight_scales, 1),
        };
        self.finish_apart((scales, of_weight, stride), factor)
    }

    /// A product over rows of so many columns.
    fn shape(&self, rows: Rows, columns: usize, numbers: ProductTypes) -> Result<ProductShape> {
        let out = Rows::of(self.out, self.outputs)?;
        Ok(self.shape_to(rows, columns, out, numbers))
    }

    /// A product over rows of so many columns, to these rows.
    fn shape_to(&self, rows: Rows, columns: usize, out: Rows, numbers: ProductTypes) -> ProductShape {
        let batch = rows.batch.max(out.batch);
        let stride = |rows: Rows| match rows.batch == batch {
            true => rows.batch_stride,
            false => rows.count() / batch * rows.row_stride,
        };
        // Codes are contiguous over batches, in the order of the rows.
        ProductShape {
            batch,
            tokens: rows.count() / batch,
            inputs: columns,
            outputs: self.outputs,
            x_row: rows.row_stride,
            x_batch: stride(rows),
            out_row: out.row_stride,
            out_batch: stride(out),
            weight_batch: 0,
            bias_batch: 0,
            added_batch: stride(out),
            weight_order: WeightOrder::OutputsFirst,
            numbers,
            finish: ProductEpilogue::Nothing,
        }
    }

    /// The operands of a product in full precision over rows.
    fn at(&self, x: &Tensor, placed: &Placed) -> Result<At> {
        Ok(At {
            weight: placed.weight,
            x: address_of(x)?,
            out: placed.out,
            bias: placed.bias,
            scales: None,
            factor: 1.0,
            added: None,
            workspace: self.card.workspace(self.device)?,
        })
    }

    /// The error for a product that cuBLASLt cannot compute, with what to do about it.
    fn no_algorithm(&self, shape: &ProductShape, remedy: &str) -> Error {
        let capability = self.card.compute_capability;
        Error::Msg(format!(
            "cuBLASLt has no algorithm for {shape:?} on compute capability {capability:?}: {remedy}"
        ))
    }

    /// Address of the numbers to which the product is added.
    fn added(&self) -> Result<Option<u64>> {
        self.adds.then(|| address_of(self.out)).transpose()
    }

    /// Writes the weights of layers of one shape with their low-rank terms, one layer after another, to the address `to`. All
    /// layers have the same number of terms. `from` has the addresses of the weights; they may be at `to` already.
    fn add_to_weights(&self, layers: &[&LinearLayer<'_>], from: &[u64], to: u64) -> Result<()> {
        let Some(first) = layers.first() else {
            return Ok(());
        };
        let [outputs, inputs] = [0, 1].map(|axis| first.weight.dims()[axis]);
        let bytes = (outputs * inputs * self.out.dtype().size_in_bytes()) as u64;
        let places: Vec<u64> = (0..layers.len() as u64).map(|which| to + which * bytes).collect();
        let mut from = from;
        for term in 0..first.low_rank.len() {
            let terms: Vec<&LowRank> = layers.iter().map(|layer| &layer.low_rank[term]).collect();
            if !self.add_to_weight(&terms, from, to)? {
                for which in 0..terms.len() {
                    let one = which..which + 1;
                    if !self.add_to_weight(&terms[one.clone()], &from[one], places[which])? {
                        candle_core::bail!(
                            "cuBLASLt has no algorithm that adds a low-rank term of {:?} and {:?} to a weight",
                            terms[which].up.dims(),
                            terms[which].down.dims()
                        );
                    }
                }
            }
            from = &places;
        }
        Ok(())
    }

    /// Writes weights with a low-rank term each, one after another, to the address `to`, as one batched product; `false` if
    /// this cannot be done at once, or at all.
    fn add_to_weight(&self, terms: &[&LowRank], from: &[u64], to: u64) -> Result<bool> {
        let Some(first) = terms.first() else {
            return Ok(true);
        };
        let ((rank, inputs), outputs) = (first.down.dims2()?, first.up.dims()[0]);
        let mut at = Vec::with_capacity(terms.len());
        for (term, from) in terms.iter().zip(from) {
            let is_alike =
                term.down.dims() == first.down.dims() && term.factor.to_bits() == first.factor.to_bits();
            if !is_alike {
                return Ok(false);
            }
            at.push([address_of(&term.down)?, address_of(&term.up)?, *from]);
        }
        let Some([downs, ups, weights]) = distances(&at, self.out.dtype().size_in_bytes()) else {
            return Ok(false);
        };
        let shape = ProductShape {
            batch: terms.len(),
            tokens: outputs,
            inputs: rank,
            outputs: inputs,
            x_row: rank,
            x_batch: ups,
            out_row: inputs,
            out_batch: outputs * inputs,
            weight_batch: downs,
            bias_batch: 0,
            added_batch: weights,
            weight_order: WeightOrder::InputsFirst,
            numbers: self.numbers()?,
            finish: ProductEpilogue::Nothing,
        };
        let places = At {
            weight: at[0][0],
            x: at[0][1],
            out: to,
            bias: None,
            scales: None,
            factor: first.factor as f32,
            added: Some(at[0][2]),
            workspace: self.card.workspace(self.device)?,
        };
        self.try_to(&shape, ProductEpilogue::Nothing, &places)
    }

    fn try_to(&self, shape: &ProductShape, finish: ProductEpilogue, at: &At) -> Result<bool> {
        let at = At {
            bias: match finish {
                ProductEpilogue::Bias | ProductEpilogue::BiasGeluTanh => at.bias,
                ProductEpilogue::Nothing | ProductEpilogue::GeluTanh => None,
            },
            ..*at
        };
        let shape = ProductShape { finish, ..*shape };
        let digest = |result: &ResultAt| digest(self.card, self.device, result);
        let mut products = self.card.products.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the addresses are those of tensors that the caller keeps for the duration of the call, or of its
        // scratch, and the shape was derived from them.
        let multiplied = unsafe { products.multiply(&shape, &at, self.stream, &digest) };
        products.write_soon(&self.card.products);
        multiplied
    }

    /// Applies scales, bias and activation in a separate pass, where the product did not. `scales`: addresses for the
    /// rows of `x` and for the weight (0: none), and the stride of the latter.
    fn finish_apart(&self, scales: (u64, u64, u32), factor: f32) -> Result<()> {
        let is_plain = scales.0 == 0 && scales.1 == 0 && self.bias.is_none() && self.then == Epilogue::None;
        if is_plain {
            return Ok(());
        }
        let outputs = self.outputs;
        let out = Rows::of(self.out, outputs)?;
        let arguments = FinishArguments {
            product: address_of(self.out)?,
            x_scales: scales.0,
            w_scales: scales.1,
            bias: self.bias.map(address_of).transpose()?.unwrap_or(0),
            batch_stride: out.batch_stride as u64,
            row_stride: out.row_stride as u64,
            rows: out.rows as u32,
            columns: outputs as u32,
            w_stride: scales.2,
            factor,
            is_gelu: u32::from(self.then == Epilogue::GeluTanh),
        };
        let name = format!("finish_product_{}", kernel_dtype(self.out.dtype())?);
        let grid = (out.count(), outputs.div_ceil(UNIT * THREADS), 1);
        // SAFETY: the structure mirrors `fp8.cuh`, with the rows, columns and strides of the result; scales and bias
        // have as many elements as its rows and columns.
        unsafe { self.card.launch(self.stream, name, grid, THREADS, &arguments) }
    }

    /// Applies the activation to results, in a separate pass each.
    fn finish_each(&self, outs: &[&Tensor]) -> Result<()> {
        let each = outs.iter().map(|out| Layer { out, ..*self });
        each.into_iter()
            .try_for_each(|layer| layer.finish_apart((0, 0, 0), 1.0))
    }

    /// Quantizes rows to codes with scales, at the beginning of the scratch; returns its bytes in use as well.
    fn quantize(&self, x: &Tensor, columns: usize, kind: RowCodes) -> Result<(CodesAt, usize)> {
        let rows = Rows::of(x, columns)?.count();
        let at = self.scratch_for_codes(0, rows, columns)?;
        quantize_rows(self.card, self.stream, x, columns, kind, at)?;
        Ok((at, bytes_of_codes(rows, columns)))
    }

    /// A part of the scratch for the codes and scales of rows, after the first `taken` bytes.
    fn scratch_for_codes(&self, taken: usize, rows: usize, columns: usize) -> Result<CodesAt> {
        let codes = rows * columns;
        let scales = codes.next_multiple_of(APART);
        Ok((
            self.scratch.place(taken, codes)?,
            self.scratch.place(taken + scales, rows * size_of::<f32>())?,
        ))
    }
}

/// Bytes of scratch that the codes and scales of rows take.
fn bytes_of_codes(rows: usize, columns: usize) -> usize {
    (rows * columns).next_multiple_of(APART) + (rows * size_of::<f32>()).next_multiple_of(APART)
}

/// Addresses of the codes and scales of a weight in fp8.
fn stored_codes(weight: &QuantizedWeight) -> Result<CodesAt> {
    let (outputs, columns) = rows_and_columns(&weight.shape);
    let bytes = address_of(&weight.bytes)?;
    let place = |wanted| bytes + place_of(weight.format, outputs, columns, wanted) as u64;
    let at = (place(WeightPart::Codes), place(WeightPart::Scales));
    if !at.0.is_multiple_of(ALIGNMENT) || !weight.bytes.is_contiguous() {
        candle_core::bail!(
            "the codes of a weight in {} are not contiguous, or not aligned to {ALIGNMENT} bytes: give the weight an \
             allocation of its own",
            weight.format
        );
    }
    Ok(at)
}

/// Mirrors the struct in `shifted_bias.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ShiftedBiasArguments {
    bytes: u64,
    scales_at: u64,
    codes_at: u64,
    bias: u64,
    out: u64,
    rows: u32,
    columns: u32,
    shift: f32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for ShiftedBiasArguments {}

/// The bias of a layer of SVDQuant in int4 whose inputs are shifted before they are multiplied by its codes.
pub(crate) fn shifted_bias(weight: &QuantizedWeight, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let (rows, columns) = rows_and_columns(&weight.shape);
    let device = weight.bytes.device().as_cuda_device()?;
    let fits = weight.format.fits(columns)
        && rows.is_multiple_of(weight.format.multiple_of_rows())
        && weight.bytes.elem_count() as u64 == weight.format.bytes(rows, columns).0;
    let (Ok(row_count), Ok(width), true, true) = (
        u32::try_from(rows),
        u32::try_from(columns),
        u32::try_from(rows * columns).is_ok(),
        fits,
    ) else {
        candle_core::bail!(
            "a weight of shape {:?} in {} is not {} bytes in whole tiles",
            weight.shape,
            weight.format,
            weight.bytes.elem_count()
        );
    };
    if bias.is_some_and(|bias| bias.dtype() != dtype || bias.dims() != [rows] || !bias.is_contiguous()) {
        candle_core::bail!("a bias of {rows} numbers of {dtype:?} is expected");
    }
    let bytes = aligned(&weight.bytes)?;
    let out = Tensor::zeros(rows, dtype, weight.bytes.device())?;
    let place = |wanted| place_of(weight.format, rows, columns, wanted) as u64;
    let arguments = ShiftedBiasArguments {
        bytes: address_of(&bytes)?,
        scales_at: place(WeightPart::Scales),
        codes_at: place(WeightPart::Codes),
        bias: bias.map(address_of).transpose()?.unwrap_or(0),
        out: address_of(&out)?,
        rows: row_count,
        columns: width,
        shift: weight.format.input_shift().number(),
    };
    let name = format!("shifted_bias_{}", kernel_dtype(dtype)?);
    let card = Card::of(device)?;
    // SAFETY: the structure mirrors `shifted_bias.cuh`; the bytes are as many as format and shape require and aligned, bias and
    // result have a number for each row.
    unsafe { card.launch(&device.cuda_stream(), name, (rows, 1, 1), THREADS, &arguments)? };
    Ok(out)
}

/// Mirrors the arguments of `requantize_rows` in `fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RequantizeArguments {
    bytes: u64,
    scales_at: u64,
    codes_at: u64,
    codes: u64,
    scales: u64,
    made: u64,
    rows: u32,
    columns: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for RequantizeArguments {}

/// Quantizes the rows of a quantized weight to e4m3 codes with a scale each, at these addresses. Returns where they are: a weight
/// that has room for its scales keeps them, so that they are made once.
pub(crate) fn requantize_rows(
    card: &Card,
    stream: &CudaStream,
    weight: &QuantizedWeight,
    (codes, scales): CodesAt,
) -> Result<CodesAt> {
    let (rows, columns) = rows_and_columns(&weight.shape);
    let bytes = aligned(&weight.bytes)?;
    let place = |wanted| place_of(weight.format, rows, columns, wanted) as u64;
    let (Ok(row_count), Ok(width), true) = (
        u32::try_from(rows),
        u32::try_from(columns),
        u32::try_from(rows * columns).is_ok() && columns.is_multiple_of(MULTIPLE),
    ) else {
        candle_core::bail!(
            "a weight of shape {:?} cannot be quantized to fp8: its rows must be a multiple of {MULTIPLE} numbers long, with \
             fewer than 2^32 numbers in all",
            weight.shape
        );
    };
    let own = address_of(&weight.bytes)?;
    let keeps = matches!(weight.format, WeightFormat::Svdquant { .. }) && own == address_of(&bytes)?;
    let (scales, made) = match keeps {
        true => (
            own + place(WeightPart::MadeScales),
            own + place(WeightPart::MadeFlag),
        ),
        false => (scales, 0),
    };
    let arguments = RequantizeArguments {
        bytes: address_of(&bytes)?,
        scales_at: place(WeightPart::Scales),
        codes_at: place(WeightPart::Codes),
        codes,
        scales,
        made,
        rows: row_count,
        columns: width,
    };
    let (format, named) = (kernel_of(weight.format), "requantize_rows");
    if let WeightFormat::Svdquant { rank, .. } = weight.format {
        let tiles = tiles_of(rows, columns, rank);
        // SAFETY: the structure mirrors `fp8.cuh`; the bytes are as many as format and shape require and aligned, their rows fill
        // whole tiles, and the destination has space for as many codes. Scales are in the scratch or in the weight, in a part that
        // nothing but these kernels reads or writes, on this stream.
        unsafe {
            if !keeps {
                memset_d8_async(scales, 0, rows * size_of::<f32>(), stream.cu_stream()).w()?;
            }
            card.launch_as(stream, format!("scale_rows_{format}"), tiles, &arguments)?;
            card.launch_as(stream, format!("{named}_{format}"), tiles, &arguments)?;
        }
        return Ok((codes, scales));
    }
    let threads = columns.div_ceil(UNIT * REQUANTIZED).next_multiple_of(32);
    if threads > MAX_THREADS {
        candle_core::bail!("rows of {columns} numbers are too long to be quantized");
    }
    // SAFETY: the structure mirrors `fp8.cuh`; the bytes are as many as format and shape require and aligned, and the
    // destination has space for as many codes and a scale per row.
    unsafe {
        card.launch(
            stream,
            format!("{named}_{format}"),
            (rows, 1, 1),
            threads,
            &arguments,
        )?;
    }
    Ok((codes, scales))
}

/// The codes of a weight in another format, u8 of its shape, and the scales of its rows, if it does not keep them.
#[cfg(test)]
pub(crate) fn requantized(weight: &QuantizedWeight) -> Result<(Tensor, Tensor)> {
    let of = weight.bytes.device();
    let device = of.as_cuda_device()?;
    let (rows, columns) = rows_and_columns(&weight.shape);
    let codes = Tensor::zeros(weight.shape.as_slice(), DType::U8, of)?;
    let scales = Tensor::zeros(rows, DType::F32, of)?;
    let at = (address_of(&codes)?, address_of(&scales)?);
    if requantize_rows(&*Card::of(device)?, &device.cuda_stream(), weight, at)? == at {
        return Ok((codes, scales));
    }
    let first = place_of(weight.format, rows, columns, WeightPart::MadeScales);
    let kept = weight
        .bytes
        .narrow(0, first, rows * size_of::<f32>())?
        .to_vec1::<u8>()?;
    let kept: Vec<f32> = kept
        .chunks_exact(size_of::<f32>())
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    Ok((codes, Tensor::new(kept, of)?))
}

/// Quantizes rows of bf16 or f16 to codes with a scale each, at these addresses.
pub(crate) fn quantize_rows(
    card: &Card,
    stream: &CudaStream,
    x: &Tensor,
    columns: usize,
    kind: RowCodes,
    (codes, scales): CodesAt,
) -> Result<()> {
    let rows = Rows::of(x, columns)?;
    let arguments = QuantizeArguments {
        x: address_of(x)?,
        codes,
        scales,
        batch_stride: rows.batch_stride as u64,
        row_stride: rows.row_stride as u64,
        rows: rows.rows as u32,
        columns: columns as u32,
    };
    let size = x.dtype().size_in_bytes() as u64;
    let is_aligned = [
        arguments.x,
        arguments.batch_stride * size,
        arguments.row_stride * size,
    ]
    .iter()
    .all(|at| at.is_multiple_of(ALIGNMENT));
    if !is_aligned || !columns.is_multiple_of(MULTIPLE) || x.dtype() == DType::F32 {
        candle_core::bail!(
            "rows of {columns} {:?} cannot be quantized: they must be bf16 or f16, a multiple of {MULTIPLE} numbers \
             long, and aligned to {ALIGNMENT} bytes",
            x.dtype()
        );
    }
    let units = columns.div_ceil(UNIT);
    let chunks = units.div_ceil(MAX_THREADS).next_power_of_two();
    let threads = units.div_ceil(chunks).next_multiple_of(32);
    if chunks > MAX_CHUNKS {
        candle_core::bail!("rows of {columns} numbers are too long to be quantized");
    }
    let of_kind = match kind {
        RowCodes::Fp8 => String::new(),
        RowCodes::Int8(rotation) => format!("int8_by_{}_", rotation.group()),
    };
    let name = format!("quantize_rows_{of_kind}{}_{chunks}", kernel_dtype(x.dtype())?);
    // SAFETY: the structure mirrors `fp8.cuh`; rows and strides are those of the tensor, and the destination has
    // space for as many codes and a scale per row.
    unsafe { card.launch(stream, name, (rows.count(), 1, 1), threads, &arguments) }
}
