//! Adapters attached to the layers of a component, at the strengths of a request.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor, Weight};
use ops::{Filter, Gate, LowRank, Onto, Steps};

use super::StrengthCurve;
use super::copies::{Copies, Copy};
use super::open::AdapterPart;
use super::side_by_side::side_by_side;
use crate::StageError;

/// The strength of an attached adapter in the step that is computed.
#[derive(Clone, Debug)]
struct CurrentStrength(Arc<AtomicU32>);

impl CurrentStrength {
    fn new(strength: f32) -> CurrentStrength {
        CurrentStrength(Arc::new(AtomicU32::new(strength.to_bits())))
    }

    fn get(&self) -> f32 {
        f32::from_bits(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, strength: f32) {
        self.0.store(strength.to_bits(), Ordering::Relaxed);
    }
}

/// The low-rank term of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerTerm {
    /// `[rank, inputs]`; contiguous, but for the columns that a part of a layer takes.
    down: Tensor,
    /// `[outputs, rank]`.
    up: Tensor,
    /// Alpha by the rank.
    scale: f64,
    strength: CurrentStrength,
}

impl LayerTerm {
    /// The term at its current strength, on the device that computes. Factors in host memory are copied to the device. `None`
    /// at strength 0, at which the base computes alone.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn now(&self, device: &Device) -> candle_core::Result<Option<LowRank>> {
        let strength = self.strength.get();
        if strength == 0.0 {
            return Ok(None);
        }
        Ok(Some(LowRank {
            down: gpu::to_device(&self.down.contiguous()?, device)?,
            up: gpu::to_device(&self.up, device)?,
            factor: self.scale * f64::from(strength),
        }))
    }

    /// The term `(x downᵀ) upᵀ`, of no strength but its numbers'.
    pub(super) fn of_factors(down: Tensor, up: Tensor) -> LayerTerm {
        LayerTerm {
            down,
            up,
            scale: 1.0,
            strength: CurrentStrength::new(1.0),
        }
    }

    /// The rank of the term.
    pub(crate) fn rank(&self) -> usize {
        self.down.dims()[0]
    }

    /// The term of a layer over these columns of the inputs alone. Its factor is copied for each product.
    ///
    /// # Errors
    /// When the layer does not have these columns.
    pub(crate) fn of_columns(&self, first: usize, count: usize) -> candle_core::Result<LayerTerm> {
        Ok(LayerTerm {
            down: self.down.narrow(1, first, count)?,
            ..self.clone()
        })
    }
}

/// The term of a convolution: a convolution to as many channels as its rank, each of whose positions is projected up.
#[derive(Clone, Debug)]
pub(crate) struct ConvolutionTerm {
    /// `[rank, inputs, rows, columns]`.
    down: Tensor,
    /// `[outputs, rank]`.
    up: Tensor,
    /// Alpha by the rank.
    scale: f64,
    strength: CurrentStrength,
}

impl ConvolutionTerm {
    /// Adds the term at its current strength to the result `[items, rows, columns, outputs]` of the convolution of a map; at
    /// strength 0 it changes nothing. It takes the memory that is predicted of [`ConvolutionRanks`](super::ConvolutionRanks).
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn add(&self, map: &Tensor, steps: &Steps, out: &Tensor) -> candle_core::Result<()> {
        let strength = self.strength.get();
        if strength == 0.0 {
            return Ok(());
        }
        let (dtype, device) = (out.dtype(), out.device());
        let (outputs, rank) = self.up.dims2()?;
        let positions = out.elem_count() / outputs;
        let mut shape = out.dims().to_vec();
        shape.pop();
        shape.push(rank);
        let narrow = ops::blank(&shape, dtype, device)?;
        let down = Weight::Full(gpu::to_device(&self.down, device)?);
        let filter = Filter::new(&down, dtype)?;
        ops::convolve(map, &filter, None, steps, &narrow, Onto::Nothing)?;
        drop((filter, down));
        let branch = ops::blank(&[positions, outputs], dtype, device)?;
        let up = Weight::Full(gpu::to_device(&self.up, device)?);
        let filter = Filter::new(&up, dtype)?;
        let narrow = narrow.reshape((positions, rank))?;
        ops::convolve(&narrow, &filter, None, &Steps::EACH, &branch, Onto::Nothing)?;
        let factor = (self.scale * f64::from(strength)) as f32;
        let factor = Tensor::full(factor, (1, outputs), &Device::Cpu)?;
        let factor = factor.to_dtype(dtype)?.to_device(device)?;
        let out = out.reshape((positions, outputs))?;
        ops::add_residual(&out, &branch, Some(Gate::from(&factor)))
    }
}

/// An adapter's part for a component, with its tensors.
#[derive(Clone)]
struct AttachedAdapter {
    component: String,
    tensors: Arc<ComponentTensors>,
    scales: Arc<BTreeMap<String, f64>>,
    curve: StrengthCurve,
    strength: CurrentStrength,
}

/// The adapters that a request attaches to one component.
#[derive(Clone, Default)]
pub(crate) struct AttachedAdapters {
    all: Vec<AttachedAdapter>,
    /// Copies of weights, where the stage keeps some: those of all sets that it has.
    copies: Option<Copies>,
}

impl fmt::Debug for AttachedAdapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.all.iter().map(|attached| &attached.component))
            .finish()
    }
}

impl AttachedAdapters {
    /// Adds an adapter's part with its tensors, at the strengths of a curve.
    pub(super) fn add(&mut self, part: &AdapterPart, tensors: Arc<ComponentTensors>, curve: StrengthCurve) {
        self.all.push(AttachedAdapter {
            component: part.component.clone(),
            tensors,
            scales: Arc::clone(&part.scales),
            strength: CurrentStrength::new(curve.first()),
            curve,
        });
    }

    /// The same adapters, with copies of weights.
    pub(super) fn with_copies(self, copies: Copies) -> AttachedAdapters {
        AttachedAdapters {
            copies: Some(copies),
            ..self
        }
    }

    /// Whether strengths are the same in every step.
    pub(crate) fn are_constant(&self) -> bool {
        self.all.iter().all(|attached| attached.curve.is_constant())
    }

    /// Sets the strengths of step `step` (from 0) of `steps`, for all layers.
    pub(crate) fn set_step(&self, step: usize, steps: usize) {
        for attached in &self.all {
            attached.strength.set(attached.curve.at(step, steps));
        }
    }

    /// The terms of a layer.
    ///
    /// # Errors
    /// When a tensor is missing.
    fn of_layer(&self, layer: &str, inputs: usize, outputs: usize) -> Result<Vec<LayerTerm>, MissingTensor> {
        let with_layer = self.all.iter().filter_map(|attached| {
            let scale = attached.scales.get(layer)?;
            Some((attached, *scale))
        });
        let terms = with_layer.map(|(attached, scale)| {
            let down = attached.tensors.get(&format!("{layer}.down"))?;
            let rank = down.dims().first().copied().unwrap_or_default();
            attached
                .tensors
                .shaped(&format!("{layer}.down"), &[rank, inputs])?;
            Ok(LayerTerm {
                down,
                up: attached
                    .tensors
                    .shaped(&format!("{layer}.up"), &[outputs, rank])?,
                scale,
                strength: attached.strength.clone(),
            })
        });
        terms.collect()
    }

    /// The terms of a convolution with a weight of this shape, `[outputs, inputs, rows, columns]`.
    ///
    /// # Errors
    /// When a tensor is missing.
    fn of_convolution(&self, layer: &str, weight: &[usize]) -> Result<Vec<ConvolutionTerm>, MissingTensor> {
        let with_layer = self.all.iter().filter_map(|attached| {
            let scale = attached.scales.get(layer)?;
            Some((attached, *scale))
        });
        let terms = with_layer.map(|(attached, scale)| {
            let name = format!("{layer}.down");
            let rank = attached.tensors.get(&name)?.dims().first().copied();
            let rank = rank.unwrap_or_default();
            let (outputs, kernel) = weight.split_first().unwrap_or((&0, &[]));
            let shape: Vec<usize> = std::iter::once(rank).chain(kernel.iter().copied()).collect();
            Ok(ConvolutionTerm {
                down: attached.tensors.shaped(&name, &shape)?,
                up: attached
                    .tensors
                    .shaped(&format!("{layer}.up"), &[*outputs, rank])?,
                scale,
                strength: attached.strength.clone(),
            })
        });
        terms.collect()
    }

    /// The first tensor of these adapters with a number that is not finite: its component and its name. It reads all their
    /// numbers, so it is only called for the error of a stage that failed.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn not_finite(&self) -> candle_core::Result<Option<(&str, String)>> {
        for attached in &self.all {
            for layer in attached.scales.keys() {
                for name in ["down", "up"].map(|factor| format!("{layer}.{factor}")) {
                    let Ok(tensor) = attached.tensors.get(&name) else {
                        continue;
                    };
                    let numbers = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    let numbers: Vec<f32> = numbers.flatten_all()?.to_vec1()?;
                    if !numbers.iter().all(|number| number.is_finite()) {
                        return Ok(Some((&attached.component, name)));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Replaces the error of a stage by one that names the adapter, if an adapter is its cause.
    pub(crate) fn named_as_cause(&self, error: StageError) -> StageError {
        match error {
            StageError::NotFinite { .. } => match self.not_finite() {
                Ok(Some((component, tensor))) => StageError::NotFinite {
                    component: format!("{component} (its tensor {tensor})"),
                    step: 0,
                },
                Ok(None) | Err(_) => error,
            },
            other => other,
        }
    }
}

/// The tensors of a component, and the adapters that are attached to it: one set, or several, each for some items of a batch.
#[derive(Debug)]
pub(crate) struct AdaptedTensors<'a> {
    base: &'a ComponentTensors,
    /// At least one, which may have no adapter.
    sets: Vec<AttachedAdapters>,
}

impl<'a> AdaptedTensors<'a> {
    /// A component with adapters.
    pub(crate) fn new(base: &'a ComponentTensors, adapters: &AttachedAdapters) -> AdaptedTensors<'a> {
        AdaptedTensors::of_sets(base, std::slice::from_ref(adapters))
    }

    /// A component with sets of adapters, at least one. Where there are several, their strengths do not change.
    pub(crate) fn of_sets(base: &'a ComponentTensors, sets: &[AttachedAdapters]) -> AdaptedTensors<'a> {
        AdaptedTensors {
            base,
            sets: sets.to_vec(),
        }
    }

    /// The terms of a layer of this name, of each set. Those of several sets are copied side by side where that makes them one product,
    /// unless there are copies of the weight.
    ///
    /// # Errors
    /// When a tensor of an adapter is missing, or cannot be copied.
    pub(crate) fn terms(
        &self,
        layer: &str,
        inputs: usize,
        outputs: usize,
        device: &Device,
    ) -> Result<Vec<Vec<LayerTerm>>, MissingTensor> {
        let of_set = |adapters: &AttachedAdapters| adapters.of_layer(layer, inputs, outputs);
        let terms = self.sets.iter().map(of_set).collect::<Result<Vec<_>, _>>()?;
        if terms.len() < 2 || self.keeps_copy(layer) {
            return Ok(terms);
        }
        let beside = side_by_side(&terms, device).map_err(|error| MissingTensor {
            name: layer.to_owned(),
            problem: error.to_string(),
        })?;
        Ok(beside.unwrap_or(terms))
    }

    /// The copies that are kept, for all sets.
    fn copies(&self) -> Option<&Copies> {
        let first = self.sets.first();
        first.and_then(|first| first.copies.as_ref())
    }

    /// Whether a copy of the weight of a layer of this name is kept.
    pub(crate) fn keeps_copy(&self, layer: &str) -> bool {
        self.copies().is_some_and(|copies| copies.has(layer))
    }

    /// The copy of the weight of a layer of this name with its terms, if one is kept.
    pub(crate) fn copy_of(&self, layer: &str, weight: &Weight) -> Option<Copy> {
        self.copies()?.of_layer(layer, weight)
    }

    /// The terms of a convolution of this name, with a weight of this shape, of the first set: models with such terms have no other.
    ///
    /// # Errors
    /// When a tensor of an adapter is missing.
    pub(crate) fn convolution_terms(
        &self,
        layer: &str,
        weight: &[usize],
    ) -> Result<Vec<ConvolutionTerm>, MissingTensor> {
        let first = self.sets.first();
        first.map_or(Ok(Vec::new()), |first| first.of_convolution(layer, weight))
    }
}

impl<'a> From<&'a ComponentTensors> for AdaptedTensors<'a> {
    fn from(base: &'a ComponentTensors) -> AdaptedTensors<'a> {
        AdaptedTensors {
            base,
            sets: vec![AttachedAdapters::default()],
        }
    }
}

impl Deref for AdaptedTensors<'_> {
    type Target = ComponentTensors;

    fn deref(&self) -> &ComponentTensors {
        self.base
    }
}
