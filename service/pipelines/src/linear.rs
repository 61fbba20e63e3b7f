//! The linear layer of all families, for any weight format.

use candle_core::{DType, Device, Tensor};
use gpu::{MissingTensor, Weight};
use ops::{Activation, Epilogue, LayerTo, LayersOfItems, LinearLayer, LowRank, Scratch, TermsOfItems};

use crate::adapters::{AdaptedTensors, Copy, LayerTerm, SetsOfItems};

/// Layers over the same rows whose terms may be computed at once: the projections of an attention.
pub(crate) const SIDE_BY_SIDE: usize = 3;

/// `x Wᵀ + b`, as `torch.nn.Linear`, with the terms of adapters.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    /// `[outputs, inputs]`.
    weight: Weight,
    bias: Option<Tensor>,
    /// Of each set of adapters.
    terms: Vec<Vec<LayerTerm>>,
    /// The weight with the terms of each set, where copies are kept.
    copy: Option<Copy>,
}

impl Linear {
    /// Takes `{name}.weight` `[outputs, inputs]` and `{name}.bias` `[outputs]` from a component, and the terms of its
    /// adapters.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let bias = tensors.shaped(&format!("{name}.bias"), &[outputs])?;
        Ok(Linear {
            bias: Some(bias),
            ..Linear::without_bias(tensors, name, inputs, outputs)?
        })
    }

    /// As [`Linear::new`], without a bias.
    ///
    /// # Errors
    /// When it is missing or of another shape.
    pub(crate) fn without_bias(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let weight = tensors.shaped_weight(&format!("{name}.weight"), &[outputs, inputs])?;
        Ok(Linear {
            copy: tensors.copy_of(name, &weight),
            terms: tensors.terms(name, inputs, outputs, device_of(&weight))?,
            weight,
            bias: None,
        })
    }

    /// One of two layers, over the first and over the last columns of what adapters know as one layer, `whole`: its `sizes` are
    /// the inputs of both, and `which` is 0 or 1. Takes `{name}.weight` and `{name}.bias`, and its columns of the terms of the
    /// whole.
    ///
    /// # Errors
    /// When a tensor is missing or of another shape.
    pub(crate) fn of_columns(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        (whole, sizes, which): (&str, [usize; 2], usize),
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let first: usize = sizes[..which].iter().sum();
        let inputs = sizes[which];
        let own = Linear::new(tensors, name, inputs, outputs)?;
        let terms = tensors.terms(whole, sizes.iter().sum(), outputs, device_of(&own.weight))?;
        let of_set = |terms: &Vec<LayerTerm>| {
            let terms = terms.iter().map(|term| term.of_columns(first, inputs));
            terms.collect::<candle_core::Result<Vec<_>>>()
        };
        let terms = terms.iter().map(of_set).collect::<candle_core::Result<Vec<_>>>();
        Ok(Linear {
            terms: terms.map_err(|error| MissingTensor {
                name: whole.to_owned(),
                problem: error.to_string(),
            })?,
            copy: None,
            ..own
        })
    }

    /// A layer with a weight `[outputs, inputs]` and a bias `[outputs]`, without terms of adapters.
    pub(crate) fn of(weight: Tensor, bias: Option<Tensor>) -> Linear {
        Linear {
            weight: Weight::Full(weight),
            bias,
            terms: Vec::new(),
            copy: None,
        }
    }

    /// A convolution whose steps are as long as its filter, as a layer over patches: takes `{name}.weight`
    /// `[outputs, patch..]` and `{name}.bias` `[outputs]`. The weight is in full precision.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn of_patches(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        patch: &[usize],
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let shape: Vec<usize> = std::iter::once(outputs).chain(patch.iter().copied()).collect();
        let inputs: usize = patch.iter().product();
        let full_name = format!("{name}.weight");
        let weight = tensors.shaped(&full_name, &shape)?;
        let weight = weight.reshape((outputs, inputs)).map_err(|error| MissingTensor {
            name: full_name,
            problem: error.to_string(),
        })?;
        Ok(Linear {
            terms: tensors.terms(name, inputs, outputs, weight.device())?,
            weight: Weight::Full(weight),
            bias: Some(tensors.shaped(&format!("{name}.bias"), &[outputs])?),
            copy: None,
        })
    }

    /// The layer at the current strengths of a set of its adapters, whose terms are on `device`.
    fn now(&self, set: usize, device: &Device) -> candle_core::Result<LinearLayer<'_>> {
        match &self.copy {
            None => self.with_terms(set, device),
            Some(copy) => {
                let weight = copy.weight(set, |set| self.with_terms(set, device))?;
                Ok(LinearLayer::new(weight, self.bias.as_ref()))
            }
        }
    }

    fn with_terms(&self, set: usize, device: &Device) -> candle_core::Result<LinearLayer<'_>> {
        Ok(LinearLayer {
            low_rank: self.terms_now(set, device)?,
            ..self.base()
        })
    }

    /// The layer without adapters.
    fn base(&self) -> LinearLayer<'_> {
        LinearLayer::new(&self.weight, self.bias.as_ref())
    }

    /// The terms of a set at their current strengths, on `device`.
    fn terms_now(&self, set: usize, device: &Device) -> candle_core::Result<Vec<LowRank>> {
        let terms = self.terms.get(set).into_iter().flatten();
        let terms = terms.map(|term| term.now(device));
        let terms = terms.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(terms.into_iter().flatten().collect())
    }

    /// Whether a set has a term of it.
    fn is_adapted(&self) -> bool {
        self.terms.iter().any(|terms| !terms.is_empty())
    }

    /// Adds to the results of items of a batch `[items, ..]` the terms of each item's set.
    fn add_terms_of_items(
        &self,
        x: &Tensor,
        sets: &SetsOfItems,
        out: &Tensor,
        scratch: &Scratch,
    ) -> candle_core::Result<()> {
        let mut of_items = Vec::new();
        for (items, set) in sets.runs() {
            let terms = self.terms_now(set, out.device())?;
            if !terms.is_empty() {
                of_items.push(TermsOfItems { items, terms });
            }
        }
        match (&of_items[..], self.weight.dims()) {
            ([], _) => Ok(()),
            (_, &[outputs, inputs]) => ops::add_low_rank(x, [outputs, inputs], &of_items, out, scratch),
            (_, other) => candle_core::bail!("low-rank terms of a layer {other:?}"),
        }
    }

    /// `x` is `[.., inputs]`; the result is `[.., outputs]`. It has the adapters of the first set.
    ///
    /// # Errors
    /// Errors of [`ops::linear`].
    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        ops::linear(x, &self.now(0, x.device())?)
    }

    /// [`Linear::forward`] over items of a batch `[items, .., inputs]`, each with the adapters of its set.
    ///
    /// # Errors
    /// Errors of [`ops::linear`] and [`ops::add_low_rank`].
    pub(crate) fn forward_of_items(&self, x: &Tensor, sets: &SetsOfItems) -> candle_core::Result<Tensor> {
        if let Some(set) = sets.only() {
            return ops::linear(x, &self.now(set, x.device())?);
        }
        let out = ops::linear(x, &self.base())?;
        let rows = out.elem_count() / self.weight.dims()[0].max(1);
        let rank = self.terms.iter().flatten().map(LayerTerm::rank).max();
        let bytes = ops::projected_rows(rank.unwrap_or(0), rows, x.dtype());
        let scratch = Scratch::new(bytes, x.device())?;
        self.add_terms_of_items(x, sets, &out, &scratch)?;
        Ok(out)
    }

    /// [`Linear::forward`] with an activation, written to `out`, which may be a strided view.
    ///
    /// # Errors
    /// Errors of [`ops::linear_into`].
    pub(crate) fn forward_into<'a>(
        &self,
        x: impl Into<Activation<'a>>,
        then: Epilogue,
        out: &Tensor,
        scratch: &Scratch,
    ) -> candle_core::Result<()> {
        ops::linear_into(x, &self.now(0, out.device())?, then, out, scratch)
    }

    /// The layer with its output, for [`ops::linears_into`].
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn to<'a>(&'a self, out: &'a Tensor) -> candle_core::Result<LayerTo<'a>> {
        Ok(LayerTo {
            layer: self.now(0, out.device())?,
            out,
        })
    }

    /// Whether the layer's input rows, of this dtype, should be quantized where they are computed, for products in fp8. Terms
    /// of adapters read the rows unquantized.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn takes_codes(&self, dtype: DType) -> candle_core::Result<bool> {
        if self.is_adapted() && self.copy.is_none() {
            return Ok(false);
        }
        ops::multiplies_fp8(device_of(&self.weight), &self.weight, dtype)
    }

    /// Scratch bytes for `tokens` tokens.
    fn scratch_bytes(&self, tokens: usize, dtype: DType) -> u64 {
        let of_weight = match &self.weight {
            Weight::Full(_) => 0,
            Weight::Quantized(weight) => {
                let (rows, columns) = gpu::rows_and_columns(&weight.shape);
                ops::linear_scratch(weight.format, rows, columns, tokens, dtype)
            }
        };
        let &[outputs, inputs] = self.weight.dims() else {
            return of_weight;
        };
        let Some(rank) = self.terms.iter().flatten().map(LayerTerm::rank).max() else {
            return of_weight;
        };
        let rank = SIDE_BY_SIDE * rank;
        of_weight.max(match self.terms.len() {
            ..2 => ops::low_rank_scratch([outputs, inputs], rank, tokens, dtype),
            _ => ops::projected_rows(rank, tokens, dtype),
        })
    }
}

fn device_of(weight: &Weight) -> &Device {
    match weight {
        Weight::Full(weight) => weight.device(),
        Weight::Quantized(weight) => weight.bytes.device(),
    }
}

/// Layers over the same rows of items of a batch `[items, ..]`, each item with the adapters of its set. Where copies of the weights are
/// kept, items with different sets have products with different copies. Else the products with the weights are over all items at once,
/// and terms are added to the results of their items.
///
/// # Errors
/// Errors of [`ops::linears_into`], [`ops::linears_of_items_into`] and [`ops::add_low_rank`].
pub(crate) fn linears_of_items_into(
    x: &Tensor,
    layers: &[(&Linear, &Tensor)],
    sets: &SetsOfItems,
    scratch: &Scratch,
) -> candle_core::Result<()> {
    if let Some(set) = sets.only() {
        return linears_of_set_into(x, layers, |layer, out| layer.now(set, out.device()), scratch);
    }
    type Layers<'a> = Vec<(&'a Linear, &'a Tensor)>;
    let (copied, others): (Layers<'_>, Layers<'_>) =
        layers.iter().partition(|(layer, _)| layer.copy.is_some());
    if !copied.is_empty() {
        let mut of_items = Vec::new();
        for (items, set) in sets.runs() {
            let layers = copied.iter().map(|(layer, out)| layer.now(set, out.device()));
            let layers = layers.collect::<candle_core::Result<_>>()?;
            of_items.push(LayersOfItems { items, layers });
        }
        let outs: Vec<&Tensor> = copied.iter().map(|(_, out)| *out).collect();
        ops::linears_of_items_into(x, &of_items, &outs, scratch)?;
    }
    linears_of_set_into(x, &others, |layer, _| Ok(layer.base()), scratch)?;
    for (layer, out) in others {
        layer.add_terms_of_items(x, sets, out, scratch)?;
    }
    Ok(())
}

/// Layers over the same rows, as `of` gives them.
fn linears_of_set_into<'a>(
    x: &Tensor,
    layers: &[(&'a Linear, &'a Tensor)],
    of: impl Fn(&'a Linear, &Tensor) -> candle_core::Result<LinearLayer<'a>>,
    scratch: &Scratch,
) -> candle_core::Result<()> {
    let mut to = Vec::with_capacity(layers.len());
    for &(layer, out) in layers {
        let layer = of(layer, out)?;
        to.push(LayerTo { layer, out });
    }
    match &to[..] {
        [only] => ops::linear_into(x, &only.layer, Epilogue::None, only.out, scratch),
        all => ops::linears_into(x, all, Epilogue::None, scratch),
    }
}

/// Maximum scratch bytes of these layers for `tokens` tokens: they run one after the other.
pub(crate) fn largest_scratch<'a>(
    layers: impl IntoIterator<Item = &'a Linear>,
    tokens: usize,
    dtype: DType,
) -> u64 {
    let of_each = layers.into_iter().map(|layer| layer.scratch_bytes(tokens, dtype));
    of_each.max().unwrap_or(0)
}
