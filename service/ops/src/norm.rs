//! Residual, norm and modulation of tokens in one pass, as between two linear layers of a transformer.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::loops::{add_in_place, gated_in_place, modulate_in_place, multiply_in_place, normalised_row};
use crate::place::{RowsOf, apart_from, with_rows, write_rows};

/// Normalization of a row, in f32.
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// `torch.nn.LayerNorm`. Mean and variance are two passes: a single pass loses the variance to cancellation if
    /// the mean is large.
    Layer {
        /// Weight and bias, `[d]` each.
        affine: Option<(&'a Tensor, &'a Tensor)>,
        /// Added to the variance.
        eps: f64,
    },
    /// `torch.nn.RMSNorm`, transformers' `T5LayerNorm`: the mean is not subtracted.
    Rms {
        /// `[d]`.
        weight: Option<&'a Tensor>,
        /// Added to the mean square.
        eps: f64,
    },
}

impl Norm<'_> {
    fn eps(&self) -> f64 {
        match self {
            Norm::Layer { eps, .. } | Norm::Rms { eps, .. } => *eps,
        }
    }
}

/// Modulation of adaptive norms: `* (1 + scale) + shift`. `[b, d]` each, or `[1, d]` for every batch item.
#[derive(Clone, Copy, Debug)]
pub struct Modulation<'a> {
    /// The scale minus one.
    pub scale: &'a Tensor,
    /// Added after scaling.
    pub shift: Option<&'a Tensor>,
}

/// Gate of a branch, multiplied before it is added to the residual.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// `[b, d]`, or `[1, d]` for every batch item.
    pub vector: &'a Tensor,
    /// Apply tanh to the vector.
    pub tanh: bool,
    /// `[d]`: the branch is first normalized by RMS norm with this weight, with the epsilon of the norm that follows.
    pub branch_norm: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Gate<'a> {
    fn from(vector: &'a Tensor) -> Gate<'a> {
        Gate {
            vector,
            tanh: false,
            branch_norm: None,
        }
    }
}

/// Input rows of a linear layer: full precision, or quantized for native fp8 products.
#[derive(Clone, Copy, Debug)]
pub enum Activation<'a> {
    /// `[.., d]` of f32, f16 or bf16.
    Numbers(&'a Tensor),
    /// e4m3 codes with a scale per row.
    Codes(&'a Codes),
}

impl<'a> From<&'a Tensor> for Activation<'a> {
    fn from(numbers: &'a Tensor) -> Activation<'a> {
        Activation::Numbers(numbers)
    }
}

impl<'a> From<&'a Codes> for Activation<'a> {
    fn from(codes: &'a Codes) -> Activation<'a> {
        Activation::Codes(codes)
    }
}

/// Rows in e4m3, each scaled by its absolute maximum: a value is its code times the scale of its row. Only cards with
/// native fp8 products accept them.
#[derive(Clone, Debug)]
pub struct Codes {
    /// u8 `[rows, d]`, contiguous.
    pub codes: Tensor,
    /// f32 `[rows]`, contiguous. cuBLASLt applies them within the product where they begin at a multiple of 16 bytes.
    pub scales: Tensor,
}

/// Memory for the codes of all rows of a buffer, any part of which can be used.
#[derive(Clone, Debug)]
pub struct CodesOfRows {
    codes: Tensor,
    /// f32. The scales of the part from row `r` on begin at `SCALES_APART * r`: aligned for any `r`. Parts that do not overlap
    /// have scales that do not.
    scales: Tensor,
}

/// Distance of the scales of two rows in f32 numbers: 16 bytes, so that any part begins aligned.
const SCALES_APART: usize = 4;

impl CodesOfRows {
    /// For `rows` rows of this width.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn new(rows: usize, width: usize, device: &Device) -> Result<CodesOfRows> {
        Ok(CodesOfRows {
            codes: Tensor::zeros((rows, width), DType::U8, device)?,
            scales: Tensor::zeros(SCALES_APART * rows, DType::F32, device)?,
        })
    }

    /// Bytes of the memory for `rows` rows of this width.
    pub fn bytes(rows: usize, width: usize) -> u64 {
        (rows * (width + SCALES_APART * size_of::<f32>())) as u64
    }

    /// The place of `count` rows from `first` on.
    ///
    /// # Errors
    /// When there are fewer rows.
    pub fn part(&self, first: usize, count: usize) -> Result<Codes> {
        Ok(Codes {
            codes: self.codes.narrow(0, first, count)?,
            scales: self.scales.narrow(0, SCALES_APART * first, count)?,
        })
    }
}

/// A branch that is added to the residual before the norm.
#[derive(Clone, Copy)]
pub(crate) struct Branch<'a> {
    pub(crate) y: &'a Tensor,
    pub(crate) gate: Option<Gate<'a>>,
}

/// The operations of one pass. `norm` is `None` if only the residual is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) branch: Option<Branch<'a>>,
    pub(crate) norm: Option<Norm<'a>>,
    pub(crate) modulation: Option<Modulation<'a>>,
    pub(crate) out: Option<Activation<'a>>,
}

/// `out = norm(x) * (1 + scale) + shift` for `x` `[.., d]`; modulation is for `[b, .., d]`. Dtypes are equal, except
/// that `x` may be f32 while all others are narrower.
///
/// # Errors
/// When shapes do not match.
pub fn norm_modulate<'a>(
    x: &'a Tensor,
    norm: Norm<'a>,
    modulation: Option<Modulation<'a>>,
    out: impl Into<Activation<'a>>,
) -> Result<()> {
    run(&Pass {
        x,
        branch: None,
        norm: Some(norm),
        modulation,
        out: Some(out.into()),
    })
}

/// `x += gate * y`, in place, then [`norm_modulate`] of `x`. `out` may be `y` itself.
///
/// # Errors
/// When shapes do not match.
pub fn residual_norm_modulate<'a>(
    x: &'a Tensor,
    y: &'a Tensor,
    gate: Option<Gate<'a>>,
    norm: Norm<'a>,
    modulation: Option<Modulation<'a>>,
    out: impl Into<Activation<'a>>,
) -> Result<()> {
    run(&Pass {
        x,
        branch: Some(Branch { y, gate }),
        norm: Some(norm),
        modulation,
        out: Some(out.into()),
    })
}

/// `x += gate * y`, in place: `x` and `y` are `[b, .., d]`; `y` may be `[1, d]`, broadcast to every row.
///
/// # Errors
/// When shapes do not match.
pub fn add_residual<'a>(x: &'a Tensor, y: &'a Tensor, gate: Option<Gate<'a>>) -> Result<()> {
    run(&Pass {
        x,
        branch: Some(Branch { y, gate }),
        norm: None,
        modulation: None,
        out: None,
    })
}

fn run(pass: &Pass<'_>) -> Result<()> {
    check(pass)?;
    #[cfg(feature = "cuda")]
    if pass.x.device().is_cuda() {
        return crate::cuda::norm(pass);
    }
    on_cpu(pass)
}

fn check(pass: &Pass<'_>) -> Result<()> {
    let width = pass.x.dim(D::Minus1)?;
    let rows = pass.x.elem_count() / width.max(1);
    let batch = pass.x.dim(0)?;
    let refuse = |what: &str, found: &Tensor| -> Result<()> {
        candle_core::bail!("a norm of {:?} with {what} {:?}", pass.x.dims(), found.dims())
    };
    let vectors = match pass.norm {
        Some(Norm::Layer {
            affine: Some((weight, bias)),
            ..
        }) => vec![weight, bias],
        Some(Norm::Rms {
            weight: Some(weight), ..
        }) => vec![weight],
        _ => vec![],
    };
    let gate = pass.branch.and_then(|branch| branch.gate);
    let vectors = vectors.into_iter().chain(gate.and_then(|gate| gate.branch_norm));
    for vector in vectors {
        if vector.dims() != [width] {
            return refuse("a weight", vector);
        }
    }
    let of_batch = [
        gate.map(|gate| gate.vector),
        pass.modulation.map(|modulation| modulation.scale),
        pass.modulation.and_then(|modulation| modulation.shift),
    ];
    for vector in of_batch.into_iter().flatten() {
        if vector.dims() != [1, width] && vector.dims() != [batch, width] {
            return refuse("a modulation", vector);
        }
    }
    if let Some(Branch { y, .. }) = pass.branch
        && y.dims() != pass.x.dims()
        && (y.dims() != [1, width] || pass.norm.is_some())
    {
        return refuse("a branch", y);
    }
    match pass.out {
        Some(Activation::Numbers(out)) if out.dims() != pass.x.dims() => refuse("a result", out),
        Some(Activation::Codes(codes)) if codes.codes.dims() != [rows, width] => {
            refuse("codes", &codes.codes)
        }
        _ => Ok(()),
    }
}

/// A vector `[b, d]` per batch item, selected by the row of a tensor.
struct ByBatch<'a> {
    rows: &'a RowsOf<'a>,
    rows_per_batch: usize,
}

impl<'a> ByBatch<'a> {
    fn of(&self, row: usize) -> &'a [f32] {
        let batch = row / self.rows_per_batch.max(1);
        self.rows.row(batch.min(self.rows.count() - 1))
    }
}

/// Calls `f` with the rows of an optional tensor.
fn with_optional<R>(
    x: Option<&Tensor>,
    columns: usize,
    f: impl FnOnce(Option<&RowsOf<'_>>) -> Result<R>,
) -> Result<R> {
    match x {
        Some(x) => with_rows(x, columns, |rows| f(Some(rows))),
        None => f(None),
    }
}

fn on_cpu(pass: &Pass<'_>) -> Result<()> {
    let width = pass.x.dim(D::Minus1)?;
    let rows_per_batch = pass.x.elem_count() / (width * pass.x.dim(0)?).max(1);
    let eps = pass.norm.map_or(0.0, |norm| norm.eps()) as f32;
    if let Some(Branch { y, gate }) = pass.branch {
        let y = apart_from(y, pass.x)?;
        with_rows(&y, width, |y| {
            with_optional(gate.map(|gate| gate.vector), width, |vectors| {
                with_optional(gate.and_then(|gate| gate.branch_norm), width, |weight| {
                    write_rows(pass.x, width, |row, numbers| {
                        let given = y.row(row.min(y.count() - 1));
                        let mut normed = Vec::new();
                        let branch = match weight {
                            Some(weight) => {
                                normed.resize(width, 0.0);
                                normalised_row(given, false, eps, &mut normed);
                                multiply_in_place(&mut normed, weight.row(0));
                                &normed
                            }
                            None => given,
                        };
                        match (vectors, gate) {
                            (Some(rows), Some(Gate { tanh: true, .. })) => {
                                let vector = ByBatch { rows, rows_per_batch };
                                let gate: Vec<f32> = vector.of(row).iter().map(|v| v.tanh()).collect();
                                gated_in_place(numbers, branch, &gate);
                            }
                            (Some(rows), _) => {
                                gated_in_place(numbers, branch, ByBatch { rows, rows_per_batch }.of(row));
                            }
                            (None, _) => add_in_place(numbers, branch),
                        }
                    })
                })
            })
        })?;
    }
    let (Some(norm), Some(out)) = (pass.norm, pass.out) else {
        return Ok(());
    };
    let Activation::Numbers(out) = out else {
        candle_core::bail!("rows become codes of fp8 on a card only");
    };
    let (weight, bias) = match norm {
        Norm::Layer { affine, .. } => (affine.map(|(weight, _)| weight), affine.map(|(_, bias)| bias)),
        Norm::Rms { weight, .. } => (weight, None),
    };
    let (scale, shift) = (
        pass.modulation.map(|modulation| modulation.scale),
        pass.modulation.and_then(|modulation| modulation.shift),
    );
    let x = apart_from(pass.x, out)?;
    with_rows(&x, width, |x| {
        with_optional(weight, width, |weight| {
            with_optional(bias, width, |bias| {
                with_optional(scale, width, |scale| {
                    with_optional(shift, width, |shift| {
                        write_rows(out, width, |row, numbers| {
                            normalised_row(x.row(row), matches!(norm, Norm::Layer { .. }), eps, numbers);
                            if let Some(weight) = weight {
                                multiply_in_place(numbers, weight.row(0));
                            }
                            if let Some(bias) = bias {
                                add_in_place(numbers, bias.row(0));
                            }
                            if let Some(rows) = scale {
                                modulate_in_place(numbers, ByBatch { rows, rows_per_batch }.of(row));
                            }
                            if let Some(rows) = shift {
                                add_in_place(numbers, ByBatch { rows, rows_per_batch }.of(row));
                            }
                        })
                    })
                })
            })
        })
    })
}

/// Dtypes of a pass: that of `x`, and that of everything else.
#[cfg(feature = "cuda")]
pub(crate) fn dtypes(pass: &Pass<'_>) -> Result<(DType, DType)> {
    let other = match (pass.branch, pass.out) {
        (Some(Branch { y, .. }), _) => y.dtype(),
        (None, Some(Activation::Numbers(out))) => out.dtype(),
        // Codes are made for layers in the dtype of the card: the dtype of the modulation, or of the rows themselves.
        (None, _) => pass
            .modulation
            .map_or(pass.x.dtype(), |modulation| modulation.scale.dtype()),
    };
    let x = pass.x.dtype();
    if x != other && x != DType::F32 {
        candle_core::bail!("a norm of {x:?} beside {other:?}");
    }
    Ok((x, other))
}

#[cfg(test)]
mod tests;
