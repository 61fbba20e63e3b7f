//! Stand-ins until the fused operations are merged. The CPU's bodies are simple; a card has none.

use std::cell::Cell;

use candle_core::{D, Device, Result, Tensor};
use gpu::Weight;

use crate::place::{with_rows, write_rows};
use crate::rows::{accumulate, sum};
use crate::{Nonlinearity, activate, copy_rows, linear};

/// How a row is normalised, in f32.
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// `torch.nn.LayerNorm`.
    Layer {
        /// Weight and bias, `[d]` each.
        affine: Option<(&'a Tensor, &'a Tensor)>,
        /// Added to the variance.
        eps: f64,
    },
    /// `torch.nn.RMSNorm`.
    Rms {
        /// `[d]`.
        weight: Option<&'a Tensor>,
        /// Added to the mean square.
        eps: f64,
    },
}

/// `* (1 + scale) + shift`.
#[derive(Clone, Copy, Debug)]
pub struct Modulation<'a> {
    /// Less one.
    pub scale: &'a Tensor,
    /// What is added.
    pub shift: Option<&'a Tensor>,
}

/// What a branch is multiplied by.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// `[b, d]`.
    pub vector: &'a Tensor,
}

/// What follows a product.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// GELU by tanh.
    GeluTanh,
}

/// What products work in.
#[derive(Debug)]
pub struct Scratch;

impl Scratch {
    /// Nothing, for now.
    ///
    /// # Errors
    /// None.
    pub fn new(_: &Device) -> Result<Scratch> {
        Ok(Scratch)
    }
}

fn vector(x: Option<&Tensor>, width: usize, otherwise: f32) -> Result<Vec<f32>> {
    match x {
        Some(x) => x.to_dtype(candle_core::DType::F32)?.to_vec1(),
        None => Ok(vec![otherwise; width]),
    }
}

/// `out = norm(x)`.
///
/// # Errors
/// On a card.
pub fn norm_modulate(
    x: &Tensor,
    norm: Norm<'_>,
    modulation: Option<Modulation<'_>>,
    out: &Tensor,
) -> Result<()> {
    if modulation.is_some() || !x.device().is_cpu() {
        candle_core::bail!("a modulation or a card");
    }
    let width = x.dim(D::Minus1)?;
    let (weight, bias, eps) = match norm {
        Norm::Layer { affine, eps } => (affine.map(|(w, _)| w), affine.map(|(_, b)| b), eps),
        Norm::Rms { weight, eps } => (weight, None, eps),
    };
    let (weight, bias) = (vector(weight, width, 1.0)?, vector(bias, width, 0.0)?);
    with_rows(x, width, |x| {
        write_rows(out, width, |index, numbers| {
            let row = x.row(index);
            let mean = match norm {
                Norm::Layer { .. } => sum(row) / width as f32,
                Norm::Rms { .. } => 0.0,
            };
            let variance = accumulate(row, |v| (v - mean) * (v - mean)) / width as f32;
            let factor = 1.0 / (variance + eps as f32).sqrt();
            for (i, number) in numbers.iter_mut().enumerate() {
                *number = (row[i] - mean) * factor * weight[i] + bias[i];
            }
        })
    })
}

/// `x += y`.
///
/// # Errors
/// On a card.
pub fn add_residual(x: &Tensor, y: &Tensor, gate: Option<Gate<'_>>) -> Result<()> {
    if gate.is_some() || !x.device().is_cpu() {
        candle_core::bail!("a gate or a card");
    }
    let width = x.dim(D::Minus1)?;
    with_rows(y, width, |y| {
        write_rows(x, width, |row, numbers| {
            numbers.iter_mut().zip(y.row(row)).for_each(|(x, y)| *x += y);
        })
    })
}

/// `x += y`, then [`norm_modulate`].
///
/// # Errors
/// On a card.
pub fn residual_norm_modulate(
    x: &Tensor,
    y: &Tensor,
    gate: Option<Gate<'_>>,
    norm: Norm<'_>,
    modulation: Option<Modulation<'_>>,
    out: &Tensor,
) -> Result<()> {
    add_residual(x, y, gate)?;
    norm_modulate(x, norm, modulation, out)
}

/// `out = then(x Wᵀ + b)`.
///
/// # Errors
/// Those of [`linear`].
pub fn linear_into(
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Tensor>,
    then: Epilogue,
    out: &Tensor,
    _: &Scratch,
) -> Result<()> {
    let product = linear(x, weight, bias)?;
    if matches!(then, Epilogue::GeluTanh) {
        activate(&product, Nonlinearity::GeluTanh)?;
    }
    copy_rows(&product, out)
}

/// Whether everything that was told of it was finite.
#[derive(Debug)]
pub struct Finite(Cell<bool>);

impl Finite {
    /// So far, all is.
    ///
    /// # Errors
    /// None.
    pub fn new(_: &Device) -> Result<Finite> {
        Ok(Finite(Cell::new(true)))
    }

    /// Whether all is finite.
    ///
    /// # Errors
    /// None.
    pub fn is_finite(&self) -> Result<bool> {
        Ok(self.0.get())
    }
}

/// `latent += velocity * by`, and the same to `seen`.
///
/// # Errors
/// On a card.
pub fn euler(latent: &Tensor, velocity: &Tensor, by: f64, seen: &Tensor, finite: &Finite) -> Result<()> {
    let width = latent.dim(D::Minus1)?;
    with_rows(velocity, width, |velocity| {
        write_rows(latent, width, |row, numbers| {
            for (number, velocity) in numbers.iter_mut().zip(velocity.row(row)) {
                *number += velocity * by as f32;
            }
        })
    })?;
    finite.0.set(finite.0.get() && crate::all_finite(latent)?);
    copy_rows(latent, seen)
}
