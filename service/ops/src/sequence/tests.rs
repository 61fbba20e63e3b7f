use candle_core::Device;

use super::*;
use crate::testing::{BF16_OPERATION, assert_close, here, random};
use crate::{RowLength, pad_sequence};

/// The reference in f64: `torch.nn.functional.conv1d` and `conv_transpose1d` of `x`, `[n, in]`.
fn naive(x: &Tensor, weight: &Tensor, bias: &[f64], through: Through) -> Result<Tensor> {
    let numbers = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (rows, inputs) = x.dims2()?;
    let (first, second, taps) = weight.dims3()?;
    let (x, weight) = (numbers(x)?, numbers(weight)?);
    let outputs = bias.len();
    let (length, stride, padding, dilation) = match through {
        Through::Dilated { dilation } => (rows, 1, (taps - 1) / 2 * dilation, dilation),
        Through::Strided { stride } => {
            let padding = stride.div_ceil(2);
            ((rows + 2 * padding - taps) / stride + 1, stride, padding, 1)
        }
        Through::Transposed { stride } => {
            let padding = stride.div_ceil(2);
            ((rows - 1) * stride + taps - 2 * padding, stride, padding, 1)
        }
    };
    let mut sums: Vec<f64> = (0..length * outputs).map(|i| bias[i % outputs]).collect();
    for time in 0..length {
        for tap in 0..taps {
            let at = match through {
                Through::Transposed { .. } => {
                    let from = (time + padding) as i64 - tap as i64;
                    (from % stride as i64 == 0).then_some(from / stride as i64)
                }
                _ => Some((time * stride + tap * dilation) as i64 - padding as i64),
            };
            let Some(at) = at.filter(|at| (0..rows as i64).contains(at)) else {
                continue;
            };
            for output in 0..outputs {
                for input in 0..inputs {
                    let place = match through {
                        Through::Transposed { .. } => (input * second + output) * taps + tap,
                        _ => (output * second + input) * taps + tap,
                    };
                    sums[time * outputs + output] += x[at as usize * inputs + input] * weight[place];
                }
            }
        }
    }
    assert!(first * second == inputs * outputs);
    Tensor::from_vec(sums, (length, outputs), &Device::Cpu)?.to_dtype(DType::F32)
}

/// `g v / ‖v‖` over all but the first axis.
fn normed(direction: &Tensor, length: &Tensor) -> Result<Tensor> {
    let wide = direction.to_dtype(DType::F64)?;
    let norm = wide.sqr()?.sum_keepdim(2)?.sum_keepdim(1)?.sqrt()?;
    wide.broadcast_div(&norm)?
        .broadcast_mul(&length.to_dtype(DType::F64)?)
}

fn shapes() -> Vec<SequenceShape> {
    let shape = |through, taps, inputs, outputs| SequenceShape {
        through,
        taps,
        inputs,
        outputs,
    };
    let mut all = vec![
        shape(Through::Dilated { dilation: 1 }, 7, 5, 12),
        shape(Through::Dilated { dilation: 1 }, 3, 8, 8),
        shape(Through::Dilated { dilation: 1 }, 1, 24, 16),
        shape(Through::Dilated { dilation: 3 }, 7, 16, 16),
        shape(Through::Dilated { dilation: 9 }, 7, 24, 8),
        shape(Through::Dilated { dilation: 9 }, 7, 3, 3),
    ];
    for stride in [1, 2, 3, 4, 5, 6, 10] {
        all.push(shape(Through::Strided { stride }, 2 * stride, 8, 16));
        all.push(shape(Through::Transposed { stride }, 2 * stride, 16, 8));
    }
    all
}

fn of(shape: &SequenceShape) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, columns) = match shape.through {
        Through::Transposed { .. } => (shape.inputs, shape.outputs),
        _ => (shape.outputs, shape.inputs),
    };
    let direction = random(&[rows, columns, shape.taps], 1)?;
    Ok((direction, random(&[rows, 1, 1], 2)?, random(&[shape.outputs], 3)?))
}

fn run(filter: &SequenceFilter, x: &Tensor) -> Result<Tensor> {
    let (rows, inputs) = x.dims2()?;
    let reach = filter
        .shape()
        .reach(rows)
        .expect("a sequence that is long enough");
    let new = |rows: usize, channels: usize| {
        here(&Tensor::full(f32::NAN, (rows, channels), &Device::Cpu)?).to_dtype(x.dtype())
    };
    let padded = new(reach.read, inputs)?;
    pad_sequence(x, None, reach.before, &padded)?;
    let out = new(reach.written, filter.shape().outputs)?;
    filter.convolve(&padded, rows, &out)?;
    out.narrow(0, reach.skipped, reach.length)?
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .contiguous()
}

#[test]
fn sequences_are_convolved_as_defined() -> Result<()> {
    for shape in shapes() {
        let (direction, length, bias) = of(&shape)?;
        for rows in [1, 2, 3, 19, 20, 64] {
            let x = random(&[rows, shape.inputs], 4)?;
            if shape.reach(rows).is_none() {
                continue;
            }
            for dtype in [DType::F32, DType::BF16] {
                let there = |t: &Tensor| here(t).to_dtype(dtype);
                let rounded = |t: &Tensor| t.to_dtype(dtype)?.to_dtype(DType::F32);
                let weight = normed(&rounded(&direction)?, &rounded(&length)?)?;
                let biases = rounded(&bias)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                let expected = naive(&rounded(&x)?, &weight, &biases, shape.through)?;
                let (v, b) = (there(&direction)?, there(&bias)?);
                let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
                // Files have lengths in the dtype of directions or in f32.
                for of_lengths in [dtype, DType::F32] {
                    let weight = NormedWeight {
                        direction: &v,
                        length: RowLength::Stored(&there(&length)?.to_dtype(of_lengths)?),
                    };
                    let filter = SequenceFilter::new(weight, Some(&b), shape, dtype)?;
                    assert_close(&run(&filter, &there(&x)?)?, &expected, most)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn rows_keep_their_length_or_get_a_gain() -> Result<()> {
    let shape = SequenceShape {
        through: Through::Dilated { dilation: 1 },
        taps: 7,
        inputs: 5,
        outputs: 12,
    };
    let (direction, _, bias) = of(&shape)?;
    let (x, biases) = (random(&[20, 5], 4)?, bias.to_dtype(DType::F64)?.to_vec1::<f64>()?);
    let (gain, epsilon) = (1.75, 0.125);
    let own = RowLength::Own { gain };
    for (length, added) in [(own, None), (RowLength::Gain { gain, epsilon }, Some(epsilon))] {
        for dtype in [DType::F32, DType::BF16] {
            let there = |t: &Tensor| here(t).to_dtype(dtype);
            let rounded = |t: &Tensor| t.to_dtype(dtype)?.to_dtype(DType::F32);
            let wide = rounded(&direction)?.to_dtype(DType::F64)?;
            let weight = match added {
                None => (wide * gain)?,
                Some(epsilon) => {
                    let norm = wide.sqr()?.sum_keepdim(2)?.sum_keepdim(1)?.sqrt()?;
                    let divisor = (norm + epsilon * 35f64.sqrt())?;
                    (wide.broadcast_div(&divisor)? * gain)?
                }
            };
            let biases: Vec<f64> = match dtype {
                DType::F32 => biases.clone(),
                _ => rounded(&bias)?.to_dtype(DType::F64)?.to_vec1()?,
            };
            let expected = naive(&rounded(&x)?, &weight, &biases, shape.through)?;
            let v = there(&direction)?;
            let weight = NormedWeight {
                direction: &v,
                length,
            };
            let filter = SequenceFilter::new(weight, Some(&there(&bias)?), shape, dtype)?;
            let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
            assert_close(&run(&filter, &there(&x)?)?, &expected, most)?;
        }
    }
    Ok(())
}

#[test]
fn channels_beyond_the_weight_are_zeros() -> Result<()> {
    let narrow = SequenceShape {
        through: Through::Dilated { dilation: 1 },
        taps: 7,
        inputs: 2,
        outputs: 3,
    };
    let wide = SequenceShape {
        inputs: 8,
        outputs: 8,
        ..narrow
    };
    let (direction, length, bias) = of(&narrow)?;
    let (v, g, b) = (here(&direction), here(&length), here(&bias));
    let weight = NormedWeight {
        direction: &v,
        length: RowLength::Stored(&g),
    };
    let x = random(&[30, 8], 4)?;
    let found = run(
        &SequenceFilter::new(weight, Some(&b), wide, DType::F32)?,
        &here(&x),
    )?;
    let few = here(&x.narrow(1, 0, 2)?.contiguous()?);
    let expected = run(&SequenceFilter::new(weight, Some(&b), narrow, DType::F32)?, &few)?;
    assert_close(&found.narrow(1, 0, 3)?.contiguous()?, &expected, 1e-6)?;
    let rest = found.narrow(1, 3, 5)?.abs()?.sum_all()?.to_scalar::<f32>()?;
    assert_eq!(rest, 0.0);
    Ok(())
}

#[test]
fn a_row_does_not_depend_on_the_rows_computed_with_it() -> Result<()> {
    let with = |inputs, outputs| {
        move |shape: SequenceShape| SequenceShape {
            inputs,
            outputs,
            ..shape
        }
    };
    let wide = shapes().into_iter().map(with(200, 72));
    for shape in shapes().into_iter().chain(wide) {
        let (direction, length, bias) = of(&shape)?;
        let (v, g, b) = (here(&direction), here(&length), here(&bias));
        let weight = NormedWeight {
            direction: &v,
            length: RowLength::Stored(&g),
        };
        let filter = SequenceFilter::new(weight, Some(&b), shape, DType::F32)?;
        let all = here(&random(&[700, shape.inputs], 4)?);
        let whole = run(&filter, &all)?;
        // Input rows of 60, whose results are those of the whole at a distance from the edges.
        for (first, rows) in [(60, 90), (120, 241), (180, 520)] {
            let part = run(&filter, &all.narrow(0, first, rows)?)?;
            let (at, apart) = match shape.through {
                Through::Dilated { .. } => (first, 27),
                Through::Strided { stride } => (first / stride, 2),
                Through::Transposed { stride } => (first * stride, 2 * stride),
            };
            let kept = part.dim(0)?.saturating_sub(2 * apart);
            let found = part.narrow(0, apart, kept)?.contiguous()?;
            let expected = whole.narrow(0, at + apart, kept)?.contiguous()?;
            let most = if v.device().is_cpu() { 0.0 } else { 1e-6 };
            assert_close(&found, &expected, most)?;
        }
    }
    Ok(())
}

#[test]
fn a_filter_of_one_tap_adds_to_each_row() -> Result<()> {
    let shape = SequenceShape {
        through: Through::Dilated { dilation: 1 },
        taps: 1,
        inputs: 24,
        outputs: 16,
    };
    let (direction, length, bias) = of(&shape)?;
    let x = random(&[33, 24], 4)?;
    let before = random(&[35, 16], 5)?;
    for dtype in [DType::F32, DType::BF16] {
        let there = |t: &Tensor| here(t).to_dtype(dtype);
        let (v, g, b) = (there(&direction)?, there(&length)?, there(&bias)?);
        let weight = NormedWeight {
            direction: &v,
            length: RowLength::Stored(&g),
        };
        let filter = SequenceFilter::new(weight, Some(&b), shape, dtype)?;
        let product = run(&filter, &there(&x)?)?;
        let buffer = there(&before)?.copy()?;
        let out = buffer.narrow(0, 1, 33)?;
        filter.add_rows_to(&there(&x)?, &out)?;
        let host = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous();
        let expected = (product + before.narrow(0, 1, 33)?)?;
        let most = if dtype == DType::F32 {
            1e-6
        } else {
            2.0 * BF16_OPERATION
        };
        assert_close(&host(&out)?, &expected, most)?;
        assert_close(
            &host(&buffer.narrow(0, 34, 1)?)?,
            &before.narrow(0, 34, 1)?,
            BF16_OPERATION,
        )?;
    }
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_refused() -> Result<()> {
    let shape = shapes()[0];
    let (direction, length, bias) = of(&shape)?;
    let (v, g, b) = (here(&direction), here(&length), here(&bias));
    let weight = NormedWeight {
        direction: &v,
        length: RowLength::Stored(&g),
    };
    let tried = |shape| SequenceFilter::new(weight, Some(&b), shape, DType::F32);
    assert!(tried(shape).is_ok());
    assert!(tried(SequenceShape { inputs: 4, ..shape }).is_err());
    assert!(tried(SequenceShape { taps: 5, ..shape }).is_err());
    let through = Through::Strided { stride: 3 };
    assert!(tried(SequenceShape { through, ..shape }).is_err());
    let through = Through::Dilated { dilation: 0 };
    assert!(tried(SequenceShape { through, ..shape }).is_err());
    let filter = tried(shape)?;
    let x = here(&random(&[30, shape.inputs], 4)?);
    assert!(filter.convolve(&x, 30, &x).is_err());
    assert!(filter.add_rows_to(&x, &x).is_err());
    Ok(())
}
