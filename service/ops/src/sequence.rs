//! Convolutions of sequences `[time, channels]`: dilated, strided and transposed ones, as [`crate::convolve()`] of a view
//! of the same memory. No patches are unrolled for them:
//!
//! - The taps of a convolution dilated by `d` are `d` rows apart. Seen as a map of `d` columns, they are the rows of one
//!   column: a filter of `[taps, 1]`.
//! - A convolution of stride `s` and `2 s` taps sees two neighbours of a sequence of `s` rows each.
//! - A transposed convolution of stride `s` and `2 s` taps makes `s` rows of two neighbours each. These rows are
//!   consecutive: they are two taps to `s` times as many channels.

use candle_core::{DType, Result, Tensor};

use crate::convolve::{Filter, Onto, Steps, convolve, convolve_scratch};
use crate::copy_rows;
use crate::planned::Planned;
use crate::rows::with_numbers;
use crate::snake::NormedWeight;

/// How a convolution runs over time, as `torch.nn.Conv1d` and `ConvTranspose1d` do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Through {
    /// An odd number of taps that are `dilation` rows apart, padded so that the length stays the same.
    Dilated { dilation: usize },
    /// `2 stride` taps, with a padding of `ceil(stride / 2)`.
    Strided { stride: usize },
    /// Transposed, with `2 stride` taps and a padding of `ceil(stride / 2)`.
    Transposed { stride: usize },
}

/// Shape of a convolution of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceShape {
    pub through: Through,
    pub taps: usize,
    /// Channels of the sequences that are read and written; those beyond the weight's are zeros.
    pub inputs: usize,
    pub outputs: usize,
}

/// Numbers of rows that a convolution reads and writes for a sequence of some length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Rows that are read: zeros, the sequence from row `before` on, zeros ([`crate::pad_sequence`]).
    pub read: usize,
    pub before: usize,
    /// Rows that are written, of which those from `skipped` on are the result.
    pub written: usize,
    pub skipped: usize,
    /// Rows of the result.
    pub length: usize,
}

/// A convolution with the dimensions of the view that is convolved.
struct View {
    /// Dimensions of the views that are read and written.
    read: Vec<usize>,
    written: Vec<usize>,
    /// `[out, in, spatial..]`.
    filter: Vec<usize>,
}

impl SequenceShape {
    /// For a sequence of `rows` rows; `None` for one that is too short, or for an invalid shape.
    pub fn reach(&self, rows: usize) -> Option<Reach> {
        if rows == 0 {
            return None;
        }
        match self.through {
            Through::Dilated { dilation } => {
                let sides = (self.taps.checked_sub(1)? / 2).checked_mul(dilation)?;
                let written = rows.checked_next_multiple_of(dilation)?;
                (self.taps % 2 == 1).then_some(Reach {
                    read: written + 2 * sides,
                    before: sides,
                    written,
                    skipped: 0,
                    length: rows,
                })
            }
            Through::Strided { stride } => {
                let padding = stride.div_ceil(2);
                let beyond = (rows + 2 * padding).checked_sub(2 * stride)?;
                let length = beyond.checked_div(stride)? + 1;
                (self.taps == 2 * stride).then_some(Reach {
                    read: (length + 1) * stride,
                    before: padding,
                    written: length,
                    skipped: 0,
                    length,
                })
            }
            Through::Transposed { stride } => {
                let (written, padding) = ((rows + 1) * stride, stride.div_ceil(2));
                let length = written.checked_sub(2 * padding).filter(|length| *length > 0)?;
                (stride > 0 && self.taps == 2 * stride).then_some(Reach {
                    read: rows + 2,
                    before: 1,
                    written,
                    skipped: padding,
                    length,
                })
            }
        }
    }

    fn view(&self, reach: Reach) -> View {
        let SequenceShape {
            taps,
            inputs,
            outputs,
            ..
        } = *self;
        match self.through {
            Through::Dilated { dilation: 1 } => View {
                read: vec![reach.read, inputs],
                written: vec![reach.written, outputs],
                filter: vec![outputs, inputs, taps],
            },
            Through::Dilated { dilation } => View {
                read: vec![reach.read / dilation, dilation, inputs],
                written: vec![reach.written / dilation, dilation, outputs],
                filter: vec![outputs, inputs, taps, 1],
            },
            Through::Strided { stride } => View {
                read: vec![reach.length + 1, stride * inputs],
                written: vec![reach.length, outputs],
                filter: vec![outputs, stride * inputs, 2],
            },
            Through::Transposed { stride } => View {
                read: vec![reach.read, inputs],
                written: vec![reach.read - 1, stride * outputs],
                filter: vec![stride * outputs, inputs, 2],
            },
        }
    }

    /// The shape for which cuDNN compiles a plan, for a sequence of `rows` rows; `None` where it is a product.
    pub fn planned(&self, rows: usize, dtype: DType, has_bias: bool) -> Option<Planned> {
        let view = self.view(self.reach(rows)?);
        match Planned::convolution(&view.read, &view.filter, &Steps::EACH, dtype)? {
            Planned::Convolution(shape) => Some(Planned::Convolution(crate::ConvolutionShape {
                has_bias,
                ..shape
            })),
            other => Some(other),
        }
    }

    /// Most bytes that [`SequenceFilter::convolve`] takes on a card for a sequence of `rows` rows, in addition to the
    /// sequence and the result.
    pub fn scratch(&self, rows: usize, dtype: DType) -> usize {
        let Some(reach) = self.reach(rows) else {
            return 0;
        };
        let view = self.view(reach);
        let positions = |dims: &[usize]| dims[..dims.len() - 1].iter().product::<usize>();
        let taps = view.filter[2..].iter().product();
        convolve_scratch(
            (positions(&view.read), positions(&view.written)),
            (view.filter[1], view.filter[0]),
            taps,
            dtype.size_in_bytes(),
            Onto::Nothing,
        )
    }

    /// Numbers of a [`SequenceFilter`] of this shape.
    pub fn filter_numbers(&self) -> usize {
        let repeated = match self.through {
            Through::Transposed { stride } => stride,
            Through::Dilated { .. } | Through::Strided { .. } => 1,
        };
        self.taps * self.inputs * self.outputs + repeated * self.outputs
    }
}

/// The layout of the numbers from which a filter is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    /// Dimensions of the filter `[out, taps, in]`.
    pub(crate) outputs: usize,
    pub(crate) taps: usize,
    pub(crate) inputs: usize,
    /// Dimensions of the weight: `[known outputs, known inputs, taps]`, or transposed `[known inputs, known outputs,
    /// taps]`.
    pub(crate) weight: [usize; 3],
    /// Stride of a transposed convolution, else 0.
    pub(crate) transposed: usize,
}

impl Fold {
    /// Row and index of a number of the weight; `None` for a zero.
    fn source(&self, output: usize, tap: usize, input: usize) -> Option<(usize, usize)> {
        let [rows, columns, taps] = self.weight;
        let (row, column, tap) = match self.transposed {
            0 => (output, input, tap),
            stride => {
                let of_row = self.outputs / stride;
                (input, output % of_row, output / of_row + stride * (1 - tap))
            }
        };
        (row < rows && column < columns).then_some((row, (row * columns + column) * taps + tap))
    }
}

/// A convolution's weight and bias in the layout of the device.
#[derive(Clone, Debug)]
pub struct SequenceFilter {
    shape: SequenceShape,
    filter: Filter,
    bias: Option<Tensor>,
}

impl SequenceFilter {
    /// Folds a weight for sequences of this dtype: `[out, in, taps]`, or transposed `[in, out, taps]`, with as many
    /// channels as the shape or fewer. `bias` is `[out]`, of as many as the weight has. Allocates
    /// [`SequenceShape::filter_numbers`] of the dtype (f32 on the CPU).
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn new(
        weight: NormedWeight<'_>,
        bias: Option<&Tensor>,
        shape: SequenceShape,
        dtype: DType,
    ) -> Result<SequenceFilter> {
        let refused = || {
            let (weight, bias) = (weight.direction.dims(), bias.map(Tensor::dims));
            candle_core::Error::Msg(format!("a weight {weight:?} and bias {bias:?} of {shape:?}"))
        };
        let &[rows, columns, taps] = weight.direction.dims() else {
            return Err(refused());
        };
        let transposed = match shape.through {
            Through::Transposed { stride } => stride,
            Through::Dilated { .. } | Through::Strided { .. } => 0,
        };
        let (known_outputs, known_inputs) = if transposed > 0 {
            (columns, rows)
        } else {
            (rows, columns)
        };
        let fits = taps == shape.taps
            && known_outputs <= shape.outputs
            && known_inputs <= shape.inputs
            && bias.is_none_or(|bias| bias.dims() == [known_outputs])
            && shape.reach(2 * taps).is_some();
        if !fits {
            return Err(refused());
        }
        let held_dtype = if weight.direction.device().is_cpu() {
            DType::F32
        } else {
            dtype
        };
        let direction = weight.direction.contiguous()?;
        let weight = NormedWeight {
            direction: &direction,
            ..weight
        };
        let fold = Fold {
            outputs: shape.outputs * transposed.max(1),
            taps: if transposed > 0 { 2 } else { taps },
            inputs: shape.inputs,
            weight: [rows, columns, taps],
            transposed,
        };
        let held = folded(weight, &fold, held_dtype)?;
        // Rows of a strided convolution lie side by side, as its taps do.
        let dims = shape.view(shape.reach(2 * taps).ok_or_else(refused)?).filter;
        let bias = bias.map(|bias| repeated(bias, shape.outputs, transposed.max(1), dtype));
        Ok(SequenceFilter {
            shape,
            filter: Filter::folded(held, &dims)?,
            bias: bias.transpose()?,
        })
    }

    /// The shape.
    pub fn shape(&self) -> &SequenceShape {
        &self.shape
    }

    /// Convolves a sequence of `rows`: `x` has [`Reach::read`] rows, `out` [`Reach::written`], each contiguous. On the
    /// CPU the order of the sums of a row does not depend on the other rows.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn convolve(&self, x: &Tensor, rows: usize, out: &Tensor) -> Result<()> {
        let Some(reach) = self.shape.reach(rows) else {
            candle_core::bail!("{:?} of {rows} rows", self.shape);
        };
        let view = self.shape.view(reach);
        let (read, written) = (x.reshape(view.read)?, out.reshape(view.written)?);
        convolve(
            &read,
            &self.filter,
            self.bias.as_ref(),
            &Steps::EACH,
            &written,
            Onto::Nothing,
        )
    }

    /// Adds the convolution of every row by itself to `out`: `x` is `[n, in]`, `out` `[n, out]`, for a filter of one
    /// tap. Sums are f32, rounded once.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add_rows_to(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        if self.shape.taps != 1 {
            candle_core::bail!("{:?} of rows by themselves", self.shape);
        }
        #[cfg(feature = "cuda")]
        if out.device().is_cuda() {
            let (rows, inputs) = x.dims2()?;
            if inputs != self.shape.inputs || out.dims() != [rows, self.shape.outputs] {
                candle_core::bail!("{:?} of {:?} to {:?}", self.shape, x.dims(), out.dims());
            }
            return crate::cuda::add_product(x, &self.filter.held, self.bias.as_ref(), out);
        }
        convolve(
            x,
            &self.filter,
            self.bias.as_ref(),
            &Steps::EACH,
            out,
            Onto::Itself,
        )
    }
}

/// The filter `[out, taps, in]` of a weight on a card; on the CPU `[taps, in, out]`, or `[out, 1, in]` of one tap.
fn folded(weight: NormedWeight<'_>, fold: &Fold, dtype: DType) -> Result<Tensor> {
    let scales = weight.scales()?;
    #[cfg(feature = "cuda")]
    if scales.device().is_cuda() {
        return crate::cuda::folded(weight.direction, &scales, fold, dtype);
    }
    let scales = scales.to_vec1::<f32>()?;
    let Fold {
        outputs,
        taps,
        inputs,
        ..
    } = *fold;
    with_numbers(weight.direction, |numbers| {
        let number = |output, tap, input| {
            let source = fold.source(output, tap, input);
            source.map_or(0.0, |(row, at)| numbers[at] * scales[row])
        };
        let mut held = Vec::with_capacity(outputs * taps * inputs);
        let dims = match taps {
            1 => {
                (0..outputs)
                    .for_each(|output| held.extend((0..inputs).map(|input| number(output, 0, input))));
                (outputs, 1, inputs)
            }
            _ => {
                for tap in 0..taps {
                    for input in 0..inputs {
                        held.extend((0..outputs).map(|output| number(output, tap, input)));
                    }
                }
                (taps, inputs, outputs)
            }
        };
        Tensor::from_vec(held, dims, weight.direction.device())?.to_dtype(dtype)
    })
}

/// A bias followed by zeros up to `channels` elements, repeated `times` times.
fn repeated(bias: &Tensor, channels: usize, times: usize, dtype: DType) -> Result<Tensor> {
    let known = bias.dim(0)?;
    let all = Tensor::zeros((times, channels), dtype, bias.device())?;
    for time in 0..times {
        copy_rows(bias, &all.narrow(0, time, 1)?.narrow(1, 0, known)?)?;
    }
    all.flatten_all()
}

#[cfg(test)]
mod tests;
