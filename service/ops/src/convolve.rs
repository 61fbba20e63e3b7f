//! Convolutions over one, two or three axes of maps whose channels lie side by side.

use candle_core::{DType, Device, Result, Tensor};
use gpu::Weight;

use crate::convolve_cpu;
use crate::dequantize;
use crate::planned::{ConvolutionShape, Planned, tell_asked};

/// Bounds of what patches are unrolled into on a card that has no convolution of its own for a shape, unless the patches
/// of one position are more.
const LEAST_UNROLLED_BYTES: usize = 1 << 20;
const MOST_UNROLLED_BYTES: usize = 16 << 20;

/// How a filter steps over a map: by frame, row, column. Axes that a map does not have are the first ones; they have no
/// padding, and strides of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Steps {
    /// Zeros that are thought before the map.
    pub before: [usize; 3],
    /// Zeros that are thought behind it.
    pub after: [usize; 3],
    /// From what an output looks at to what the next one does.
    pub strides: [usize; 3],
}

impl Steps {
    /// To each position, and not beyond the map.
    pub const EACH: Steps = Steps {
        before: [0; 3],
        after: [0; 3],
        strides: [1; 3],
    };
}

/// The sides of a filter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    outputs: usize,
    inputs: usize,
    kernel: [usize; 3],
    /// Spatial axes; 0 for a matrix.
    axes: usize,
}

impl Sides {
    /// Of a weight `[out, in, spatial..]` with up to three spatial axes, none of which is 0.
    pub(crate) fn of(weight: &[usize]) -> Option<Sides> {
        let [outputs, inputs, ref spatial @ ..] = *weight else {
            return None;
        };
        let mut kernel = [1; 3];
        kernel[3usize.checked_sub(spatial.len())?..].copy_from_slice(spatial);
        (!weight.contains(&0)).then_some(Sides {
            outputs,
            inputs,
            kernel,
            axes: spatial.len(),
        })
    }
}

/// A convolution's weight as the device reads it.
#[derive(Clone, Debug)]
pub struct Filter {
    /// On a card `[out, taps, in]` in the dtype of maps. On the CPU f32 `[taps, in, out]`, or `[out, in]` for one tap.
    pub(crate) held: Tensor,
    sides: Sides,
}

impl Filter {
    /// Of a weight `[out, in, spatial..]` with up to three spatial axes (as `torch.nn.ConvNd` keeps them), for maps of
    /// this dtype. A quantized weight is dequantized. It takes as much memory as the weight has in that dtype, except for
    /// a weight in full precision of one tap.
    ///
    /// # Errors
    /// When the shape is another.
    pub fn new(weight: &Weight, dtype: DType) -> Result<Filter> {
        let Some(sides) = Sides::of(weight.dims()) else {
            candle_core::bail!("a filter of shape {:?}", weight.dims());
        };
        let (outputs, inputs) = (sides.outputs, sides.inputs);
        let taps: usize = sides.kernel.iter().product();
        let device = match weight {
            Weight::Full(weight) => weight.device(),
            Weight::Quantized(quantized) => quantized.bytes.device(),
        };
        let held_dtype = if device.is_cpu() { DType::F32 } else { dtype };
        let dense = match weight {
            Weight::Full(weight) if weight.dtype() == held_dtype => weight.clone(),
            Weight::Full(weight) => weight.to_dtype(held_dtype)?,
            Weight::Quantized(quantized) => dequantize(quantized, held_dtype)?,
        };
        let dense = dense.contiguous()?.reshape((outputs, inputs, taps))?;
        let held = match (taps, dense.device()) {
            (1, _) => dense.reshape((outputs, 1, inputs))?,
            (_, Device::Cpu) => convolve_cpu::taps_first(&dense)?,
            #[cfg(feature = "cuda")]
            (_, Device::Cuda(_)) => crate::cuda::taps_first(&dense)?,
            (_, other) => {
                candle_core::bail!("maps are convolved on the CPU and on CUDA devices, not on {other:?}")
            }
        };
        Ok(Filter { held, sides })
    }

    /// Channels of what it gives.
    pub fn outputs(&self) -> usize {
        self.sides.outputs
    }
}

/// A convolution whose shapes fit: a map of so many frames, rows and columns, some of them side by side (`batch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) sides: [usize; 3],
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) kernel: [usize; 3],
    pub(crate) steps: Steps,
    /// Sides of what is written.
    pub(crate) out: [usize; 3],
    /// Spatial axes, 1 to 3.
    pub(crate) axes: usize,
}

impl Shape {
    /// Of a map `[spatial.., in]` or `[n, spatial.., in]` of these dims.
    pub(crate) fn of(dims: &[usize], filter: Sides, steps: &Steps) -> Option<Shape> {
        let axes = filter.axes.max(1);
        // A matrix is a filter of one tap over any axes.
        let axes = match filter.axes {
            0 => dims.len().checked_sub(1)?.clamp(1, 3),
            _ => axes,
        };
        let (batch, sides_of_x) = match dims.len().checked_sub(axes)? {
            1 => (1, &dims[..axes]),
            2 => (dims[0], &dims[1..=axes]),
            _ => return None,
        };
        let mut sides = [1; 3];
        sides[3 - axes..].copy_from_slice(sides_of_x);
        let mut out = [0; 3];
        for axis in 0..3 {
            let padded = sides[axis] + steps.before[axis] + steps.after[axis];
            out[axis] = padded
                .checked_sub(filter.kernel[axis])?
                .checked_div(steps.strides[axis])?
                + 1;
        }
        let unused = 3 - axes;
        let is_unused = steps.before[..unused]
            .iter()
            .chain(&steps.after[..unused])
            .all(|&pad| pad == 0);
        (dims.last() == Some(&filter.inputs) && !dims.contains(&0) && is_unused).then_some(Shape {
            batch,
            sides,
            inputs: filter.inputs,
            outputs: filter.outputs,
            kernel: filter.kernel,
            steps: *steps,
            out,
            axes,
        })
    }

    pub(crate) fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Positions that are written.
    pub(crate) fn positions(&self) -> usize {
        self.batch * self.out.iter().product::<usize>()
    }

    /// Whether each output looks at its own position alone.
    pub(crate) fn is_product(&self) -> bool {
        self.taps() == 1 && self.steps == Steps::EACH
    }

    /// What cuDNN is asked for; `None` where it is a product.
    pub(crate) fn planned(&self, dtype: DType, has_bias: bool) -> Option<ConvolutionShape> {
        // Spatial axes that are not used stand first.
        let of = |all: &[usize; 3]| all[3 - self.axes..].to_vec();
        (!self.is_product()).then(|| ConvolutionShape {
            batch: self.batch,
            spatial: of(&self.sides),
            channels_in: self.inputs,
            channels_out: self.outputs,
            filter: of(&self.kernel),
            before: of(&self.steps.before),
            after: of(&self.steps.after),
            strides: of(&self.steps.strides),
            dilations: vec![1; self.axes],
            dtype,
            has_bias,
        })
    }
}

/// What becomes of the numbers where a convolution writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// They are written over.
    Nothing,
    /// They are added to.
    Itself,
}

/// Convolves (`torch.nn.functional.conv1d` to `conv3d`, channels last): `x` is `[spatial.., in]` or
/// `[n, spatial.., in]`, `bias` `[out]`, and `out` has the spatial sides that follow from them. All are contiguous and of one
/// dtype; `out` may be a window that is one run of memory, and must not overlap `x`. Sums are f32.
///
/// On a card cuDNN convolves in f16 and bf16 where it is there; else patches are unrolled some at a time and multiplied
/// ([`convolve_scratch`]).
///
/// # Errors
/// When shapes do not fit.
pub fn convolve(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    steps: &Steps,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let shape = Shape::of(x.dims(), filter.sides, steps).filter(|shape| {
        let mut written = x.dims().to_vec();
        let rank = written.len();
        written[rank - 1 - shape.axes..rank - 1].copy_from_slice(&shape.out[3 - shape.axes..]);
        written[rank - 1] = shape.outputs;
        out.dims() == written
            && bias.is_none_or(|bias| bias.dims() == [shape.outputs] && bias.dtype() == x.dtype())
            && out.dtype() == x.dtype()
            && x.is_contiguous()
            && out.is_contiguous()
    });
    let Some(shape) = shape else {
        candle_core::bail!(
            "a filter {:?} of {} to {} channels over {:?} to {:?}",
            filter.sides.kernel,
            filter.sides.inputs,
            filter.sides.outputs,
            x.dims(),
            out.dims()
        );
    };
    tell_asked(|| shape.planned(x.dtype(), bias.is_some()).map(Planned::Convolution));
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::convolve(x, filter, bias, &shape, out, onto);
    }
    convolve_cpu::convolve(x, filter, bias, &shape, out, onto)
}

/// Positions whose patches are unrolled at a time on a card, where each has so many bytes, over a map of so many.
pub(crate) fn unrolled_positions(bytes_of_x: usize, bytes_of_patch: usize) -> usize {
    (bytes_of_x.clamp(LEAST_UNROLLED_BYTES, MOST_UNROLLED_BYTES) / bytes_of_patch.max(1)).max(1)
}

/// Bytes that [`convolve`] takes at most on a card beside its operands: of a map of so many positions to as many as are
/// written, by a filter of so many taps, in numbers of this size. On the CPU it takes none that grow with the map.
pub fn convolve_scratch(
    (positions_in, positions_out): (usize, usize),
    (inputs, outputs): (usize, usize),
    taps: usize,
    number: usize,
    onto: Onto,
) -> usize {
    let sum = match onto {
        Onto::Nothing => 0,
        Onto::Itself => positions_out * outputs * number,
    };
    if taps == 1 {
        return positions_out * outputs * number;
    }
    let patch = taps * inputs * number;
    let positions = unrolled_positions(positions_in * inputs * number, patch).min(positions_out);
    sum.max(positions * (patch + outputs * number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// One product after the other, in f64; axes that are missing are 1.
    fn naive(x: &[f32], weight: &[f32], bias: &[f32], shape: &Shape) -> Vec<f32> {
        let Shape {
            batch,
            sides,
            inputs,
            kernel,
            steps,
            out,
            ..
        } = *shape;
        let mut result = Vec::new();
        for n in 0..batch {
            for place in 0..out.iter().product() {
                let place = [place / (out[1] * out[2]), place / out[2] % out[1], place % out[2]];
                for (output, bias) in bias.iter().enumerate() {
                    let mut sum = f64::from(*bias);
                    for tap in 0..shape.taps() {
                        let of_tap = [
                            tap / (kernel[1] * kernel[2]),
                            tap / kernel[2] % kernel[1],
                            tap % kernel[2],
                        ];
                        let at = [0, 1, 2]
                            .map(|i| (place[i] * steps.strides[i] + of_tap[i]).wrapping_sub(steps.before[i]));
                        if at.iter().zip(sides).any(|(&at, side)| at >= side) {
                            continue;
                        }
                        let begin = ((n * sides[0] + at[0]) * sides[1] + at[1]) * sides[2] + at[2];
                        for input in 0..inputs {
                            let weight = weight[(output * inputs + input) * shape.taps() + tap];
                            sum += f64::from(x[begin * inputs + input]) * f64::from(weight);
                        }
                    }
                    result.push(sum as f32);
                }
            }
        }
        result
    }

    struct Case {
        x: &'static [usize],
        outputs: usize,
        kernel: &'static [usize],
        steps: Steps,
    }

    fn steps(before: [usize; 3], after: [usize; 3], strides: [usize; 3]) -> Steps {
        Steps {
            before,
            after,
            strides,
        }
    }

    fn cases() -> Vec<Case> {
        let case = |x, outputs, kernel, steps| Case {
            x,
            outputs,
            kernel,
            steps,
        };
        let around = steps([0, 1, 1], [0, 1, 1], [1; 3]);
        vec![
            case(&[7, 9, 8], 16, &[3, 3], around),
            case(&[1, 1, 16], 8, &[3, 3], around),
            case(&[70, 33, 24], 3, &[3, 3], around),
            case(&[13, 5, 3], 7, &[3, 3], steps([0, 1, 1], [0, 0, 1], [1; 3])),
            case(&[12, 10, 16], 16, &[3, 3], steps([0; 3], [0, 1, 1], [1, 2, 2])),
            case(&[2, 6, 5, 8], 8, &[3, 3], around),
            case(&[9, 11, 40], 24, &[1, 1], Steps::EACH),
            case(&[9, 11, 40], 24, &[], Steps::EACH),
            case(&[9, 5], 24, &[], Steps::EACH),
            case(&[8, 6, 4], 5, &[1, 1], steps([0; 3], [0; 3], [1, 2, 3])),
            case(&[2, 50, 8], 12, &[7], steps([0, 0, 3], [0, 0, 3], [1; 3])),
            case(&[90, 6], 4, &[4], steps([0, 0, 1], [0, 0, 2], [1, 1, 2])),
            case(&[4, 5, 6, 8], 8, &[3, 3, 3], steps([2, 1, 1], [0, 1, 1], [1; 3])),
            case(
                &[2, 3, 5, 6, 4],
                3,
                &[2, 3, 1],
                steps([1, 1, 0], [0, 1, 0], [1, 2, 1]),
            ),
        ]
    }

    #[test]
    fn maps_are_convolved_as_it_is_defined() -> Result<()> {
        for Case {
            x,
            outputs,
            kernel,
            steps,
        } in cases()
        {
            let inputs = x[x.len() - 1];
            let weight = random(&[&[outputs, inputs], kernel].concat(), 1)?;
            let (bias, x) = (random(&[outputs], 2)?, random(x, 3)?);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let there = |t: &Tensor| here(t).to_dtype(dtype);
                let back = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
                let numbers = |t: &Tensor| back(t)?.flatten_all()?.to_vec1::<f32>();
                let (x, bias, weight) = (there(&x)?, there(&bias)?, there(&weight)?);
                let filter = Filter::new(&Weight::Full(weight.clone()), dtype)?;
                let shape = Shape::of(x.dims(), filter.sides, &steps).expect("a shape that fits");
                let sums = naive(&numbers(&x)?, &numbers(&weight)?, &numbers(&bias)?, &shape);
                let mut dims = x.dims().to_vec();
                let rank = dims.len();
                dims[rank - 1] = outputs;
                dims[rank - 1 - shape.axes..rank - 1].copy_from_slice(&shape.out[3 - shape.axes..]);
                let expected = Tensor::from_vec(sums, dims.as_slice(), &Device::Cpu)?;
                let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };

                // Over what was there, in the middle of a buffer.
                dims.insert(0, 3);
                let buffer = here(&Tensor::full(f32::NAN, dims.as_slice(), &Device::Cpu)?).to_dtype(dtype)?;
                let out = buffer.get(1)?;
                convolve(&x, &filter, Some(&bias), &steps, &out, Onto::Nothing)?;
                assert_close(&back(&out)?, &expected, most)?;
                for beside in [0, 2] {
                    assert!(
                        numbers(&buffer.get(beside)?)?
                            .iter()
                            .all(|number| number.is_nan())
                    );
                }
                // And added to it.
                convolve(&x, &filter, Some(&bias), &steps, &out, Onto::Itself)?;
                assert_close(&back(&out)?, &(&expected * 2.0)?, most)?;
                // Without a bias.
                convolve(&x, &filter, None, &steps, &out, Onto::Nothing)?;
                let bias = back(&bias)?;
                assert_close(&back(&out)?.broadcast_add(&bias)?, &expected, 2.0 * most)?;
            }
        }
        Ok(())
    }

    #[test]
    fn parts_that_are_given_their_neighbours_make_the_whole() -> Result<()> {
        let x = here(&random(&[23, 14, 16], 1)?);
        let weight = Weight::Full(here(&random(&[24, 16, 3, 3], 2)?));
        let filter = Filter::new(&weight, DType::F32)?;
        let bias = here(&random(&[24], 3)?);
        let zeros = || Tensor::zeros((23, 14, 24), DType::F32, x.device());
        let whole = zeros()?;
        let around = steps([0, 1, 1], [0, 1, 1], [1; 3]);
        convolve(&x, &filter, Some(&bias), &around, &whole, Onto::Nothing)?;
        for rows in [1, 2, 7, 22] {
            let parts = zeros()?;
            for first in (0..23usize).step_by(rows) {
                let count = rows.min(23 - first);
                let (low, high) = (first.saturating_sub(1), (first + count + 1).min(23));
                let strip = x.narrow(0, low, high - low)?;
                let pads = steps(
                    [0, usize::from(first == 0), 1],
                    [0, usize::from(first + count == 23), 1],
                    [1; 3],
                );
                let out = parts.narrow(0, first, count)?;
                convolve(&strip, &filter, Some(&bias), &pads, &out, Onto::Nothing)?;
            }
            let most = if x.device().is_cpu() { 0.0 } else { 1e-6 };
            assert_close(&parts, &whole.to_device(&Device::Cpu)?, most)?;
        }
        Ok(())
    }

    #[test]
    fn a_quantized_filter_is_the_filter_of_its_numbers() -> Result<()> {
        use crate::testing::{formats, quantized, random_bytes};
        let x = here(&random(&[6, 5, 256], 1)?);
        for format in formats() {
            let bytes = random_bytes(format, 4, 256 * 9, 3);
            let held = quantized(format, &[4, 256, 3, 3], bytes);
            let numbers = Weight::Full(dequantize(&held, DType::F32)?);
            let around = steps([0, 1, 1], [0, 1, 1], [1; 3]);
            let convolved = |weight: &Weight| {
                let out = Tensor::zeros((6, 5, 4), DType::F32, x.device())?;
                convolve(
                    &x,
                    &Filter::new(weight, DType::F32)?,
                    None,
                    &around,
                    &out,
                    Onto::Nothing,
                )?;
                out.to_device(&Device::Cpu)
            };
            let found = convolved(&Weight::Quantized(held))?
                .flatten_all()?
                .to_vec1::<f32>()?;
            let expected = convolved(&numbers)?.flatten_all()?.to_vec1::<f32>()?;
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(found.iter().zip(&expected).all(same), "{format}");
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let x = here(&random(&[6, 5, 8], 1)?);
        let weight = |shape: &[usize]| Ok::<_, candle_core::Error>(Weight::Full(here(&random(shape, 1)?)));
        let out = here(&random(&[6, 5, 4], 1)?);
        let tried = |shape: &[usize], steps: &Steps| {
            let filter = Filter::new(&weight(shape)?, DType::F32)?;
            convolve(&x, &filter, None, steps, &out, Onto::Nothing)
        };
        let around = steps([0, 1, 1], [0, 1, 1], [1; 3]);
        assert!(tried(&[4, 8, 3, 3], &around).is_ok());
        assert!(tried(&[4, 8, 3, 3], &Steps::EACH).is_err());
        assert!(tried(&[4, 7, 3, 3], &around).is_err());
        assert!(tried(&[5, 8, 3, 3], &around).is_err());
        assert!(tried(&[4, 8, 9, 9], &around).is_err());
        assert!(tried(&[4, 8, 3, 3], &steps([0, 1, 1], [0, 1, 1], [1, 0, 1])).is_err());
        assert!(Filter::new(&weight(&[4])?, DType::F32).is_err());
        Ok(())
    }
}
