//! Convolutions over one, two or three axes of channels-last feature maps.

use candle_core::{DType, Device, Result, Tensor};
use gpu::Weight;

use crate::convolve_cpu;
use crate::copy_rows::in_dtype;
use crate::dequantize;
use crate::planned::{ConvolutionShape, Planned, log_shape};

/// Bounds of the buffer of unrolled patches (im2col) on a card without a cuDNN plan, unless the patches of one
/// position exceed them.
const MIN_UNROLLED_BYTES: usize = 1 << 20;
const MAX_UNROLLED_BYTES: usize = 16 << 20;

/// Padding and strides of a filter, by frame, row and column. Missing axes come first; they have no padding, and
/// strides of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Steps {
    /// Zero padding before the map.
    pub before: [usize; 3],
    /// Zero padding after the map.
    pub after: [usize; 3],
    /// Distance between the inputs of neighbouring outputs.
    pub strides: [usize; 3],
}

impl Steps {
    /// Stride 1 without padding.
    pub const EACH: Steps = Steps {
        before: [0; 3],
        after: [0; 3],
        strides: [1; 3],
    };
}

/// Dimensions of a filter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    outputs: usize,
    inputs: usize,
    kernel: [usize; 3],
    /// Number of spatial axes; 0 for a matrix.
    axes: usize,
}

impl Sides {
    /// The sides of a weight `[out, in, spatial..]` with up to three spatial axes, each at least 1.
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

/// Order in which a filter holds its taps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TapOrder {
    /// Sides of the part of the weight that is held: frames, rows, columns.
    pub(crate) kernel: [usize; 3],
    /// Whether rows come before frames.
    pub(crate) exchanged: bool,
    /// Taps of the weight before that part.
    pub(crate) before: usize,
}

impl TapOrder {
    /// Frames, rows and columns of the weight. Unless rows come first in the filter, frames and rows are one axis.
    pub(crate) fn sides(self) -> [usize; 3] {
        let [frames, rows, columns] = self.kernel;
        match self.exchanged {
            true => [frames, rows, columns],
            false => [1, frames * rows, columns],
        }
    }

    /// The tap of the weight at a place of the filter.
    pub(crate) fn source(self, tap: usize) -> usize {
        let [frames, rows, columns] = self.sides();
        let (line, column) = (tap / columns, tap % columns);
        let (row, frame) = (line / frames, line % frames);
        self.before + (frame * rows + row) * columns + column
    }
}

/// The part of a weight that a filter holds, and the order of its axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    All,
    RowsFirst,
    LastFrame,
}

/// A convolution's weight in the layout of the device.
#[derive(Clone, Debug)]
pub struct Filter {
    /// On a card `[out, taps, in]` in the dtype of maps. On the CPU f32 `[taps, in, out]`, or `[out, in]` for one
    /// tap.
    pub(crate) held: Tensor,
    sides: Sides,
}

impl Filter {
    /// Converts a weight `[out, in, spatial..]` with up to three spatial axes (`torch.nn.ConvNd`) for maps of this
    /// dtype. A quantized weight is dequantized. Allocates the bytes of the weight in that dtype, except for a
    /// full-precision weight of one tap, which is shared.
    ///
    /// # Errors
    /// When the shape is not of this form.
    pub fn new(weight: &Weight, dtype: DType) -> Result<Filter> {
        Filter::of_taps(weight, dtype, Taken::All)
    }

    /// The last frame of a weight `[out, in, frames, rows, columns]`, as the filter of a weight `[out, in, rows, columns]`: of a
    /// convolution that sees a frame and those before it, what it does where there is one frame.
    ///
    /// # Errors
    /// Errors of [`Filter::new`], a weight of another rank, and one of single positions of a frame.
    pub fn last_frame(weight: &Weight, dtype: DType) -> Result<Filter> {
        let is_of_frames = matches!(*weight.dims(), [_, _, _, rows, columns] if rows * columns > 1);
        if !is_of_frames {
            candle_core::bail!("a filter of shape {:?} over frames and rows", weight.dims());
        }
        Filter::of_taps(weight, dtype, Taken::LastFrame)
    }

    /// [`Filter::new`] of a weight `[out, in, frames, rows, columns]` (`torch.nn.Conv3d`) for maps `[rows, frames,
    /// columns, in]`.
    ///
    /// # Errors
    /// Errors of [`Filter::new`], and a weight of another rank.
    pub fn rows_first(weight: &Weight, dtype: DType) -> Result<Filter> {
        if weight.dims().len() != 5 {
            candle_core::bail!("a filter of shape {:?} over frames and rows", weight.dims());
        }
        Filter::of_taps(weight, dtype, Taken::RowsFirst)
    }

    fn of_taps(weight: &Weight, dtype: DType, taken: Taken) -> Result<Filter> {
        let Some(mut sides) = Sides::of(weight.dims()) else {
            candle_core::bail!("a filter of shape {:?}", weight.dims());
        };
        let (outputs, inputs) = (sides.outputs, sides.inputs);
        let all: usize = sides.kernel.iter().product();
        if taken == Taken::LastFrame {
            (sides.kernel[0], sides.axes) = (1, 2);
        }
        let taps: usize = sides.kernel.iter().product();
        let order = TapOrder {
            kernel: sides.kernel,
            exchanged: taken == Taken::RowsFirst,
            before: all - taps,
        };
        if order.exchanged {
            sides.kernel.swap(0, 1);
        }
        let device = match weight {
            Weight::Full(weight) => weight.device(),
            Weight::Quantized(quantized) => quantized.bytes.device(),
        };
        let held_dtype = if device.is_cpu() { DType::F32 } else { dtype };
        let dense = match weight {
            Weight::Full(weight) => in_dtype(weight, held_dtype)?,
            Weight::Quantized(quantized) => dequantize(quantized, held_dtype)?,
        };
        let dense = dense.reshape((outputs, inputs, all))?;
        let held = match (all, dense.device()) {
            (1, _) => dense.reshape((outputs, 1, inputs))?,
            (_, Device::Cpu) => convolve_cpu::taps_first(&dense, order)?,
            #[cfg(feature = "cuda")]
            (_, Device::Cuda(_)) => crate::cuda::taps_first(&dense, order)?,
            (_, other) => {
                candle_core::bail!("maps are convolved on the CPU and on CUDA devices, not on {other:?}")
            }
        };
        Ok(Filter { held, sides })
    }

    /// A filter with converted numbers, of a weight with these dimensions ([`Sides::of`]).
    ///
    /// # Errors
    /// When the dimensions are not of a weight, or of another number of elements.
    pub(crate) fn folded(held: Tensor, weight: &[usize]) -> Result<Filter> {
        let sides = Sides::of(weight).filter(|_| held.elem_count() == weight.iter().product::<usize>());
        let Some(sides) = sides else {
            candle_core::bail!("a filter of shape {weight:?} held as {:?}", held.dims());
        };
        Ok(Filter { held, sides })
    }

    /// Number of output channels.
    pub fn outputs(&self) -> usize {
        self.sides.outputs
    }
}

/// A convolution with validated shapes, over `batch` maps of frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MapShape {
    pub(crate) batch: usize,
    pub(crate) sides: [usize; 3],
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) kernel: [usize; 3],
    pub(crate) steps: Steps,
    /// Dimensions of the output.
    pub(crate) out: [usize; 3],
    /// Number of spatial axes, 1 to 3.
    pub(crate) axes: usize,
}

impl MapShape {
    /// The shape of the convolution of a map `[spatial.., in]` or `[n, spatial.., in]` with these dimensions.
    pub(crate) fn of(dims: &[usize], filter: Sides, steps: &Steps) -> Option<MapShape> {
        let axes = filter.axes.max(1);
        // A matrix is a filter of one tap over any number of axes.
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
        (dims.last() == Some(&filter.inputs) && !dims.contains(&0) && is_unused).then_some(MapShape {
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

    /// Number of output positions.
    pub(crate) fn positions(&self) -> usize {
        self.batch * self.out.iter().product::<usize>()
    }

    /// Whether each output depends on its own position only (a 1x1 convolution).
    pub(crate) fn is_product(&self) -> bool {
        self.taps() == 1 && self.steps == Steps::EACH
    }

    /// Whether the filter is a column, without padding: each tap is at one distance for all positions of a map.
    pub(crate) fn is_by_columns(&self) -> bool {
        let [frames, taps, columns] = self.kernel;
        let is_flat = frames == 1 && columns == 1 && self.sides[0] == 1;
        is_flat && taps > 1 && self.steps == Steps::EACH
    }

    /// The shape to plan with cuDNN; `None` for a 1x1 convolution, which is a matrix product.
    pub(crate) fn planned(&self, dtype: DType, has_bias: bool) -> Option<ConvolutionShape> {
        // Unused spatial axes come first.
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

/// How a convolution writes its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// Overwrite.
    Nothing,
    /// Accumulate.
    Itself,
}

/// Convolution (`torch.nn.functional.conv1d` to `conv3d`, channels-last): `x` is `[spatial.., in]` or `[n, spatial..,
/// in]`, `bias` `[out]`, and `out` has the resulting spatial dimensions. All are contiguous and of one dtype; `out`
/// may be a contiguous view, and must not overlap `x`. Sums are f32.
///
/// On a card, f16 and bf16 are convolved by cuDNN if it has a plan; otherwise patches are unrolled in batches and
/// multiplied ([`convolve_scratch`]).
///
/// # Errors
/// When shapes do not match.
pub fn convolve(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    steps: &Steps,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let shape = MapShape::of(x.dims(), filter.sides, steps).filter(|shape| {
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
    log_shape(|| shape.planned(x.dtype(), bias.is_some()).map(Planned::Convolution));
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::convolve(x, filter, bias, &shape, out, onto);
    }
    convolve_cpu::convolve(x, filter, bias, &shape, out, onto)
}

/// Number of positions whose patches are unrolled at a time on a card, given the bytes of the map and of a patch.
pub(crate) fn unrolled_positions(bytes_of_x: usize, bytes_of_patch: usize) -> usize {
    (bytes_of_x.clamp(MIN_UNROLLED_BYTES, MAX_UNROLLED_BYTES) / bytes_of_patch.max(1)).max(1)
}

/// Maximum workspace in bytes of [`convolve`] on a card: for input and output positions, filter taps and element
/// size. On the CPU no workspace grows with the map.
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

    /// Reference implementation in f64; missing axes are 1.
    fn naive(x: &[f32], weight: &[f32], bias: &[f32], shape: &MapShape) -> Vec<f32> {
        let MapShape {
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
    fn convolutions_equal_the_reference() -> Result<()> {
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
                let shape = MapShape::of(x.dims(), filter.sides, &steps).expect("a shape that fits");
                let sums = naive(&numbers(&x)?, &numbers(&weight)?, &numbers(&bias)?, &shape);
                let mut dims = x.dims().to_vec();
                let rank = dims.len();
                dims[rank - 1] = outputs;
                dims[rank - 1 - shape.axes..rank - 1].copy_from_slice(&shape.out[3 - shape.axes..]);
                let expected = Tensor::from_vec(sums, dims.as_slice(), &Device::Cpu)?;
                let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };

                // Overwrites a region in the middle of a buffer.
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
                // Accumulates into it.
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
    fn strips_with_their_neighbouring_rows_equal_the_whole() -> Result<()> {
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
    fn a_filter_of_one_tap_gives_the_same_for_any_number_of_positions() -> Result<()> {
        for (inputs, outputs) in [(16, 8), (7, 3), (9, 1), (3, 300)] {
            let x = here(&random(&[40, inputs], 1)?);
            let filter = Filter::new(&Weight::Full(here(&random(&[outputs, inputs], 2)?)), DType::F32)?;
            let whole = here(&Tensor::zeros((40, outputs), DType::F32, &Device::Cpu)?);
            convolve(&x, &filter, None, &Steps::EACH, &whole, Onto::Nothing)?;
            for count in [1, 2, 9, 31] {
                let part = here(&Tensor::zeros((count, outputs), DType::F32, &Device::Cpu)?);
                let some = x.narrow(0, 4, count)?;
                convolve(&some, &filter, None, &Steps::EACH, &part, Onto::Nothing)?;
                let most = if x.device().is_cpu() { 0.0 } else { 1e-6 };
                let expected = whole.narrow(0, 4, count)?.to_device(&Device::Cpu)?;
                assert_close(&part, &expected.contiguous()?, most)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_filter_of_rows_before_frames_convolves_a_map_of_rows_before_frames() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let x = here(&random(&[4, 6, 7, 16], 1)?).to_dtype(dtype)?;
            let weight = Weight::Full(here(&random(&[8, 16, 2, 3, 1], 2)?).to_dtype(dtype)?);
            let plain = here(&Tensor::zeros((3, 4, 7, 8), dtype, &Device::Cpu)?);
            let filter = Filter::new(&weight, dtype)?;
            convolve(&x, &filter, None, &Steps::EACH, &plain, Onto::Nothing)?;
            let turned = here(&Tensor::zeros((4, 3, 7, 8), dtype, &Device::Cpu)?);
            let filter = Filter::rows_first(&weight, dtype)?;
            let x = x.permute((1, 0, 2, 3))?.contiguous()?;
            convolve(&x, &filter, None, &Steps::EACH, &turned, Onto::Nothing)?;
            let host = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
            let expected = host(&plain)?.permute((1, 0, 2, 3))?.contiguous()?;
            let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
            assert_close(&host(&turned)?, &expected, most)?;
        }
        let flat = Weight::Full(here(&random(&[8, 16, 3, 3], 2)?));
        assert!(Filter::rows_first(&flat, DType::F32).is_err());
        Ok(())
    }

    #[test]
    fn the_last_frame_of_a_filter_convolves_one_frame_behind_zeros_as_all_frames_do() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let x = here(&random(&[1, 6, 7, 16], 1)?).to_dtype(dtype)?;
            let weight = Weight::Full(here(&random(&[8, 16, 3, 2, 3], 2)?).to_dtype(dtype)?);
            let [all, last] = [(); 2].map(|()| Tensor::zeros((1, 6, 7, 8), DType::F32, &Device::Cpu));
            let (all, last) = (here(&all?).to_dtype(dtype)?, here(&last?).to_dtype(dtype)?);
            let filter = Filter::new(&weight, dtype)?;
            let around = steps([2, 1, 1], [0, 0, 1], [1; 3]);
            convolve(&x, &filter, None, &around, &all, Onto::Nothing)?;
            let filter = Filter::last_frame(&weight, dtype)?;
            let around = steps([0, 1, 1], [0, 0, 1], [1; 3]);
            convolve(&x, &filter, None, &around, &last, Onto::Nothing)?;
            let host = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
            let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
            assert_close(&host(&last)?, &host(&all)?, most)?;
        }
        for refused in [&[8, 16, 3, 3][..], &[8, 16, 3, 1, 1]] {
            let weight = Weight::Full(here(&random(refused, 2)?));
            assert!(Filter::last_frame(&weight, DType::F32).is_err(), "{refused:?}");
        }
        Ok(())
    }

    #[test]
    fn a_quantized_filter_equals_its_dequantized_weight() -> Result<()> {
        use crate::testing::{fitting_rows, formats, quantized, random_bytes};
        let x = here(&random(&[6, 5, 256], 1)?);
        for format in formats() {
            let rows = fitting_rows(format, 4);
            let bytes = random_bytes(format, rows, 256 * 9, 3);
            let held = quantized(format, &[rows, 256, 3, 3], bytes);
            let numbers = Weight::Full(dequantize(&held, DType::F32)?);
            let around = steps([0, 1, 1], [0, 1, 1], [1; 3]);
            let convolved = |weight: &Weight| {
                let out = Tensor::zeros((6, 5, rows), DType::F32, x.device())?;
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
