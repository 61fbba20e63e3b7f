//! The convolutions of the UNet over maps `[items, h, w, c]`, with the terms of adapters.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{Onto, Steps};

use crate::adapters::{AdaptedTensors, ConvolutionTerm};
use crate::maps;

/// A convolution of 3 by 3 positions with a border of zeros.
pub(super) const AROUND: Steps = Steps {
    before: [0, 1, 1],
    after: [0, 1, 1],
    strides: [1; 3],
};

/// The same to half the sides.
pub(super) const HALVING: Steps = Steps {
    strides: [1, 2, 2],
    ..AROUND
};

/// A convolution, and the terms of adapters.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    base: maps::Convolution,
    terms: Vec<ConvolutionTerm>,
}

impl Convolution {
    /// The convolution of this name, with a weight of this shape.
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &[usize],
    ) -> std::result::Result<Convolution, MissingTensor> {
        let full_name = format!("{name}.weight");
        let weight = tensors.shaped_weight(&full_name, shape)?;
        let bias = tensors.shaped(&format!("{name}.bias"), &shape[..1])?;
        let base = maps::Convolution::new(weight, bias).map_err(|error| MissingTensor {
            name: full_name,
            problem: error.to_string(),
        })?;
        let base = match tensors.keeps_copy(name) {
            true => base.keeping_filter(),
            false => base,
        };
        let terms = tensors.convolution_terms(name, shape)?;
        Ok(Convolution { base, terms })
    }

    /// Convolves all items into a new map. Sides of 3 positions have a border of one on either end.
    pub(super) fn forward(&self, map: &Tensor, steps: &Steps) -> Result<Tensor> {
        let (items, height, width, _) = map.dims4()?;
        let side = |side: usize, axis: usize| (side - 1) / steps.strides[axis] + 1;
        let shape = [items, side(height, 1), side(width, 2), self.base.outputs()];
        let out = ops::blank(&shape, map.dtype(), map.device())?;
        self.forward_into(map, steps, &out)?;
        Ok(out)
    }

    /// Convolves all items over `out`.
    pub(super) fn forward_into(&self, map: &Tensor, steps: &Steps, out: &Tensor) -> Result<()> {
        let filter = self.base.filter(map.dtype())?;
        ops::convolve(map, &filter, Some(&self.base.bias), steps, out, Onto::Nothing)?;
        drop(filter);
        self.add_terms(map, steps, out)
    }

    /// Adds the convolution of single positions to `out`.
    pub(super) fn add_positions(&self, map: &Tensor, out: &Tensor) -> Result<()> {
        self.base.of_positions(map, out, Onto::Itself)?;
        self.add_terms(map, &Steps::EACH, out)
    }

    fn add_terms(&self, map: &Tensor, steps: &Steps, out: &Tensor) -> Result<()> {
        self.terms.iter().try_for_each(|term| term.add(map, steps, out))
    }
}
