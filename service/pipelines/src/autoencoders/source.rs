//! The tensors of an autoencoder's layers, and the checks of its results.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, Weight};
use model::StageError;

use super::COMPONENT;
use super::kernels::Kernels;
use crate::maps::{Convolution, GroupNorm};

/// The epsilon of every group norm of an autoencoder (`resnet_eps`).
const EPSILON: f64 = 1e-6;

/// Takes tensors out of a component, in the dtype of maps.
#[derive(Clone, Copy)]
pub(super) struct TensorSource<'a> {
    pub(super) tensors: &'a ComponentTensors,
    pub(super) dtype: DType,
}

impl TensorSource<'_> {
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, StageError> {
        let tensor = self.tensors.shaped(name, shape).map_err(missing)?;
        Ok(ops::in_dtype(&tensor, self.dtype)?)
    }

    /// A layer with a weight of this shape: if in full precision, in the dtype of maps.
    pub(super) fn layer(&self, name: &str, shape: &[usize]) -> Result<Convolution, StageError> {
        let weight = format!("{name}.weight");
        let weight = match self.tensors.shaped_weight(&weight, shape).map_err(missing)? {
            Weight::Full(tensor) => Weight::Full(ops::in_dtype(&tensor, self.dtype)?),
            quantized @ Weight::Quantized(_) => quantized,
        };
        let bias = self.tensor(&format!("{name}.bias"), &shape[..1])?;
        Ok(Convolution::new(weight, bias)?)
    }
}

/// Takes the tensors of one layer out of a component.
#[derive(Clone, Copy)]
pub(super) struct LayerSource<'a> {
    pub(super) tensors: TensorSource<'a>,
    pub(super) kernels: Kernels,
    /// Groups of group norms.
    pub(super) groups: usize,
}

impl LayerSource<'_> {
    /// A convolution of neighbourhoods.
    pub(super) fn convolution(
        &self,
        name: &str,
        channels: (usize, usize),
    ) -> Result<Convolution, StageError> {
        self.tensors
            .layer(&self.kernels.layer(name), &self.kernels.filter(channels))
    }

    /// A convolution of single positions that is named as one of neighbourhoods.
    pub(super) fn shortcut(&self, name: &str, channels: (usize, usize)) -> Result<Convolution, StageError> {
        self.tensors
            .layer(&self.kernels.layer(name), &self.kernels.weight(channels, 1))
    }

    /// A convolution of single positions.
    pub(super) fn of_positions(&self, name: &str, channels: usize) -> Result<Convolution, StageError> {
        self.tensors
            .layer(name, &self.kernels.weight((channels, channels), 1))
    }

    /// A linear layer `[c, c]`, which BFL's checkpoints store as a convolution of single positions `[c, c, 1, 1]`.
    pub(super) fn square(&self, name: &str, channels: usize) -> Result<Convolution, StageError> {
        let found = self.tensors.tensors.weight(&format!("{name}.weight"));
        match found.is_ok_and(|weight| weight.dims().len() > 2) {
            true => self.of_positions(name, channels),
            false => self.tensors.layer(name, &[channels, channels]),
        }
    }

    pub(super) fn norm(&self, name: &str, channels: usize) -> Result<GroupNorm, StageError> {
        let weight = self.tensors.tensor(&format!("{name}.weight"), &[channels])?;
        let bias = self.tensors.tensor(&format!("{name}.bias"), &[channels])?;
        Ok(GroupNorm::new(weight, bias, self.groups, EPSILON)?)
    }
}

/// The error for a tensor that is missing, or has another shape.
pub(super) fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: COMPONENT.to_owned(),
        missing,
    }
}

/// The dtype of maps: on a card that of the biases, which are always in full precision; on the CPU f32.
pub(super) fn dtype_of_maps(tensors: &ComponentTensors, bias: &str) -> Result<DType, StageError> {
    let tensor = tensors.get(bias).map_err(missing)?;
    Ok(match tensor.device() {
        Device::Cpu => DType::F32,
        _ => tensor.dtype(),
    })
}

/// The device of a tensor.
pub(super) fn device_of(tensors: &ComponentTensors, name: &str) -> Result<Device, StageError> {
    Ok(tensors.get(name).map_err(missing)?.device().clone())
}

/// The error for an autoencoder that is not supported.
pub(super) fn unsupported(problem: String) -> StageError {
    StageError::BadInput(format!("the VAE has {problem}"))
}

/// Refuses a result that is not finite.
pub(super) fn finite(is_finite: bool) -> Result<(), StageError> {
    if is_finite {
        return Ok(());
    }
    Err(StageError::NotFinite {
        component: COMPONENT.to_owned(),
        step: 0,
    })
}
