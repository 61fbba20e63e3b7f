//! The linear layer of all families, for any weight format.

use candle_core::{DType, Device, Tensor};
use gpu::{MissingTensor, Weight};
use ops::{Activation, Epilogue, LayerTo, LinearLayer, Scratch};

use crate::adapters::{AdaptedTensors, Copy, LayerTerm};

/// Layers over the same rows whose terms may be computed at once: the projections of an attention.
pub(crate) const SIDE_BY_SIDE: usize = 3;

/// `x Wᵀ + b`, as `torch.nn.Linear`, with the terms of adapters.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    /// `[outputs, inputs]`.
    weight: Weight,
    bias: Option<Tensor>,
    terms: Vec<LayerTerm>,
    /// The weight with the terms, where a copy is kept.
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
            weight,
            bias: None,
            terms: tensors.terms(name, inputs, outputs)?,
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
        let terms = tensors.terms(whole, sizes.iter().sum(), outputs)?;
        let terms = terms.iter().map(|term| term.of_columns(first, inputs));
        let terms = terms.collect::<candle_core::Result<Vec<_>>>();
        Ok(Linear {
            terms: terms.map_err(|error| MissingTensor {
                name: whole.to_owned(),
                problem: error.to_string(),
            })?,
            copy: None,
            ..Linear::new(tensors, name, inputs, outputs)?
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
            weight: Weight::Full(weight),
            bias: Some(tensors.shaped(&format!("{name}.bias"), &[outputs])?),
            terms: tensors.terms(name, inputs, outputs)?,
            copy: None,
        })
    }

    /// The layer at the current strengths of its adapters, whose terms are on `device`.
    fn now(&self, device: &Device) -> candle_core::Result<LinearLayer<'_>> {
        match &self.copy {
            None => self.with_terms(device),
            Some(copy) => {
                let weight = copy.weight(|| self.with_terms(device))?;
                Ok(LinearLayer::new(weight, self.bias.as_ref()))
            }
        }
    }

    fn with_terms(&self, device: &Device) -> candle_core::Result<LinearLayer<'_>> {
        let terms = self.terms.iter().map(|term| term.now(device));
        let terms = terms.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(LinearLayer {
            low_rank: terms.into_iter().flatten().collect(),
            ..LinearLayer::new(&self.weight, self.bias.as_ref())
        })
    }

    /// `x` is `[.., inputs]`; the result is `[.., outputs]`.
    ///
    /// # Errors
    /// Errors of [`ops::linear`].
    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        ops::linear(x, &self.now(x.device())?)
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
        ops::linear_into(x, &self.now(out.device())?, then, out, scratch)
    }

    /// The layer with its output, for [`ops::linears_into`].
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn to<'a>(&'a self, out: &'a Tensor) -> candle_core::Result<LayerTo<'a>> {
        Ok(LayerTo {
            layer: self.now(out.device())?,
            out,
        })
    }

    /// Whether the layer's input rows, of this dtype, should be quantized where they are computed, for products in fp8. Terms
    /// of adapters read the rows unquantized.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn takes_codes(&self, dtype: DType) -> candle_core::Result<bool> {
        if !self.terms.is_empty() && self.copy.is_none() {
            return Ok(false);
        }
        let device = match &self.weight {
            Weight::Full(weight) => weight.device(),
            Weight::Quantized(weight) => weight.bytes.device(),
        };
        ops::multiplies_fp8(device, &self.weight, dtype)
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
        match self.terms.iter().map(LayerTerm::rank).max() {
            Some(rank) => of_weight.max(ops::low_rank_scratch(
                [outputs, inputs],
                SIDE_BY_SIDE * rank,
                tokens,
                dtype,
            )),
            None => of_weight,
        }
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
