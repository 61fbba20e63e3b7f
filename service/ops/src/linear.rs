//! `x Wᵀ + b` for a weight however it is held.

use candle_core::{DType, Tensor};
use gpu::{Weight, WeightFormat};

use crate::dequantize;
use crate::linear_cpu::product_into;
use crate::loops::add_in_place;
use crate::rows::{on_cpu, with_numbers};

/// What one allocation takes at most beside what was asked for.
const GRANULARITY: u64 = 512;

/// Workspace of a native product of fp8 on a card.
#[cfg(feature = "cuda")]
const NATIVE_WORKSPACE: u64 = crate::cuda::WORKSPACE_BYTES as u64;
#[cfg(not(feature = "cuda"))]
const NATIVE_WORKSPACE: u64 = 0;

/// `x Wᵀ + b`, as `torch.nn.Linear`. `x` is `[tokens, inputs]`, contiguous, in the dtype of the card; `weight` is
/// `[outputs, inputs]`, `bias` `[outputs]`; the result is `[tokens, outputs]`.
///
/// A quantized weight is dequantized as a whole to the dtype of `x`, and what that took is given back before the bias is
/// added. In fp8 with `x` in bf16 or f16, cards of compute capability 8.9 and more multiply natively instead: each
/// row of `x` is quantized to e4m3 by its absolute maximum, and sums are in f32; the result is within 0.05 of the product
/// with the same weight dequantized (relative, L2). Sides that are no multiples of 16 are dequantized.
///
/// # Errors
/// When shapes do not fit; those of [`dequantize()`] and of candle.
pub fn linear(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    if let (Some(bias), Some(outputs)) = (bias, weight.dims().first())
        && bias.dims() != [*outputs]
    {
        candle_core::bail!(
            "a linear layer with weight {:?} and bias {:?}",
            weight.dims(),
            bias.dims()
        );
    }
    if on_cpu(x) {
        return linear_on_cpu(x, weight, bias);
    }
    let product = match weight {
        Weight::Full(weight) => x.matmul(&weight.t()?)?,
        Weight::Quantized(quantized) => {
            let (inputs, shape) = (x.dim(candle_core::D::Minus1)?, &quantized.shape);
            if shape.len() != 2 || shape[1] != inputs {
                candle_core::bail!("a linear layer with weight {shape:?} over {inputs} inputs");
            }
            #[cfg(feature = "cuda")]
            if x.device().is_cuda()
                && let Some(product) = crate::cuda::linear_fp8(x, quantized, bias)?
            {
                return Ok(product);
            }
            x.matmul(&dequantize(quantized, x.dtype())?.t()?)?
        }
    };
    match bias {
        Some(bias) => product.broadcast_add(bias),
        None => Ok(product),
    }
}

fn linear_on_cpu(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    let inputs = x.dim(candle_core::D::Minus1)?;
    if weight.dims().len() != 2 || weight.dims()[1] != inputs {
        candle_core::bail!(
            "a linear layer with weight {:?} over {inputs} inputs",
            weight.dims()
        );
    }
    let weight = match weight {
        Weight::Full(weight) => weight.clone(),
        Weight::Quantized(quantized) => dequantize(quantized, DType::F32)?,
    };
    let out = Tensor::zeros((x.dim(0)?, weight.dim(0)?), x.dtype(), x.device())?;
    match bias {
        None => product_into(x, &weight, &out, &|_, _, _| ())?,
        Some(bias) => with_numbers(bias, |bias| {
            product_into(x, &weight, &out, &|_, column, numbers| {
                add_in_place(numbers, &bias[column..column + numbers.len()]);
            })
        })?,
    }
    Ok(out)
}

/// Activation bytes that [`linear`] takes at its peak beside `x` and its result, on whichever path: what a weight of so
/// many rows and columns is dequantized to, a second result while the bias is added, or what a native product of fp8
/// has (codes and scales of `x`, and its workspace).
///
/// On the CPU the matrix product packs parts of its operands besides, in buffers of its own threads that do not grow with
/// the shapes.
pub fn linear_scratch(format: WeightFormat, rows: usize, columns: usize, tokens: usize, dtype: DType) -> u64 {
    let rounded = |bytes: usize| (bytes as u64).next_multiple_of(GRANULARITY);
    let dequantized = rounded(rows * columns * dtype.size_in_bytes());
    // The sum has the shapes and strides of its operands on the card besides.
    let before_bias = rounded(tokens * rows * dtype.size_in_bytes()) + GRANULARITY;
    let native = match (format, dtype) {
        (WeightFormat::Fp8(_), DType::BF16 | DType::F16) => {
            rounded(tokens * columns) + rounded(4 * tokens) + NATIVE_WORKSPACE
        }
        _ => 0,
    };
    dequantized.max(before_bias).max(native)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Result};
    use gpu::Fp8Scales;

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, formats, here, quantized, random, random_bytes};

    /// Sums of up to 768 products in f32 beside those in f64.
    const F32_PRODUCT: f64 = 1e-5;

    /// `x Wᵀ + b` in f64, one number after the other.
    fn defined(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let numbers = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2::<f64>();
        let (x, weight) = (numbers(x)?, numbers(weight)?);
        let bias = match bias {
            Some(bias) => bias.to_dtype(DType::F64)?.to_vec1::<f64>()?,
            None => vec![0.0; weight.len()],
        };
        let mut out = Vec::new();
        for row in &x {
            for (weights, bias) in weight.iter().zip(&bias) {
                let product: f64 = row.iter().zip(weights).map(|(a, b)| a * b).sum();
                out.push((product + bias) as f32);
            }
        }
        Tensor::from_vec(out, (x.len(), weight.len()), &Device::Cpu)
    }

    /// Bytes of a weight whose numbers are about 1: codes of fp8 without NaN.
    fn moderate_bytes(format: WeightFormat, rows: usize, columns: usize, seed: u64) -> Vec<u8> {
        let mut bytes = random_bytes(format, rows, columns, seed);
        if let (WeightFormat::Fp8(_), Some((_, codes))) = (format, format.layout(rows, columns).last()) {
            for code in &mut bytes[codes.clone()] {
                *code &= 0xBF;
            }
        }
        bytes
    }

    #[test]
    fn a_quantized_layer_is_the_layer_of_its_numbers() -> Result<()> {
        for (tokens, rows, columns) in [(1, 11, 256), (5, 7, 512), (3, 19, 768)] {
            let x = here(&random(&[tokens, columns], 1)?);
            let bias = random(&[rows], 2)?;
            for format in formats() {
                let held = quantized(format, &[rows, columns], moderate_bytes(format, rows, columns, 3));
                let numbers = dequantize(&held, DType::F32)?;
                let weight = Weight::Quantized(held.clone());
                let expected = defined(&x, &numbers, None)?;
                assert_close(&linear(&x, &weight, None)?, &expected, F32_PRODUCT)?;
                let expected = defined(&x, &numbers, Some(&bias))?;
                let bias = here(&bias);
                assert_close(&linear(&x, &weight, Some(&bias))?, &expected, F32_PRODUCT)?;
                assert_close(
                    &linear(&x, &Weight::Full(numbers), Some(&bias))?,
                    &expected,
                    F32_PRODUCT,
                )?;
                // Odd rows: fp8 is dequantized on a card as well.
                let (x, bias) = (x.to_dtype(DType::BF16)?, bias.to_dtype(DType::BF16)?);
                let found = linear(&x, &weight, Some(&bias))?;
                assert_eq!(found.dtype(), DType::BF16);
                let numbers = dequantize(&held, DType::BF16)?;
                let bias = bias.to_device(&Device::Cpu)?;
                assert_close(&found, &defined(&x, &numbers, Some(&bias))?, BF16_OPERATION)?;
            }
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let format = WeightFormat::Fp8(Fp8Scales::Rows);
        let weight = |shape: &[usize]| {
            let bytes = random_bytes(format, shape[0], shape[1..].iter().product(), 1);
            Weight::Quantized(quantized(format, shape, bytes))
        };
        let x = here(&random(&[2, 16], 1)?);
        assert!(linear(&x, &weight(&[16, 16]), Some(&here(&random(&[16], 2)?))).is_ok());
        let refused = |weight: &Weight, bias: Option<&Tensor>| {
            let error = linear(&x, weight, bias).unwrap_err().to_string();
            assert!(error.contains("a linear layer with"), "{error}");
        };
        refused(&weight(&[16, 32]), None);
        refused(&weight(&[16, 4, 4]), None);
        for wrong in [1, 15, 32] {
            refused(&weight(&[16, 16]), Some(&here(&random(&[wrong], 2)?)));
        }
        Ok(())
    }

    /// What only a card does.
    #[cfg(feature = "cuda")]
    mod on_a_card {
        use gpu::e4m3_to_f32;

        use super::*;
        use crate::testing::{peak_of, test_device};

        /// How far fp8 times fp8 may be from the product with the same weight dequantized: a number of `x` in e4m3 has
        /// four bits, and is off by up to 2^-4, about 0.026 in L2.
        const NATIVE: f64 = 0.05;

        /// Whether the card of the tests multiplies fp8.
        fn is_native() -> Result<bool> {
            let Device::Cuda(device) = test_device() else {
                return Ok(false);
            };
            let capability = device.cuda_stream().context().compute_capability();
            Ok(capability.map_err(candle_core::Error::wrap)? >= (8, 9))
        }

        /// Rows as the card quantizes them: by their absolute maximum, to the nearest of e4m3, to the even one of two.
        fn rows_in_e4m3(x: &Tensor) -> Result<Tensor> {
            let values: Vec<f32> = (0..0x7F).map(e4m3_to_f32).collect();
            let nearest = |size: f32| {
                let above = values
                    .partition_point(|&value| value < size)
                    .clamp(1, values.len() - 1);
                let (down, up) = (size - values[above - 1], values[above] - size);
                let is_above = up < down || up == down && above % 2 == 0;
                values[if is_above { above } else { above - 1 }]
            };
            let mut out = Vec::new();
            for row in x
                .to_dtype(DType::F32)?
                .to_device(&Device::Cpu)?
                .to_vec2::<f32>()?
            {
                let scale = row.iter().fold(0f32, |most, v| most.max(v.abs())) / 448.0;
                let quantized = |v: &f32| {
                    if scale == 0.0 {
                        0.0
                    } else {
                        nearest((v / scale).abs()).copysign(*v) * scale
                    }
                };
                out.extend(row.iter().map(quantized));
            }
            Tensor::from_vec(out, x.shape(), &Device::Cpu)
        }

        #[test]
        fn fp8_multiplies_natively_as_it_is_defined() -> Result<()> {
            if !is_native()? {
                return Ok(());
            }
            for (tokens, rows, columns) in [(1, 16, 16), (7, 48, 64), (33, 256, 1040), (300, 3072, 512)] {
                let mut x = random(&[tokens, columns], 1)?;
                if tokens > 1 {
                    // A row of zeros, and one of large numbers.
                    x = x.slice_assign(
                        &[0..1, 0..columns],
                        &Tensor::zeros((1, columns), DType::F32, &Device::Cpu)?,
                    )?;
                    let large = (x.narrow(0, 1, 1)? * 1000.0)?;
                    x = x.slice_assign(&[1..2, 0..columns], &large)?;
                }
                for (dtype, kind) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| {
                    [Fp8Scales::None, Fp8Scales::Tensor, Fp8Scales::Rows].map(|kind| (dtype, kind))
                }) {
                    let x = here(&x).to_dtype(dtype)?;
                    let bias = here(&random(&[rows], 2)?).to_dtype(dtype)?;
                    let format = WeightFormat::Fp8(kind);
                    let mut bytes = moderate_bytes(format, rows, columns, 3);
                    if kind == Fp8Scales::Tensor {
                        bytes[..4].copy_from_slice(&0.37f32.to_le_bytes());
                    }
                    let weight = quantized(format, &[rows, columns], bytes);
                    let numbers = dequantize(&weight, DType::F32)?;
                    for bias in [None, Some(&bias)] {
                        let native = crate::cuda::linear_fp8(&x, &weight, bias)?;
                        assert!(native.is_some(), "{format} {dtype:?} {tokens} {rows} {columns}");
                        let found = linear(&x, &Weight::Quantized(weight.clone()), bias)?;
                        assert_eq!((found.dims(), found.dtype()), ([tokens, rows].as_slice(), dtype));
                        let host = bias.map(|bias| bias.to_device(&Device::Cpu)).transpose()?;
                        let exact = defined(&rows_in_e4m3(&x)?, &numbers, host.as_ref())?;
                        assert_close(&found, &exact, BF16_OPERATION)?;
                        let dequantized = defined(&x.to_dtype(DType::F32)?, &numbers, host.as_ref())?;
                        assert_close(&found, &dequantized, NATIVE)?;
                    }
                }
            }
            Ok(())
        }

        #[test]
        fn no_layer_takes_more_than_its_scratch() -> Result<()> {
            let device = test_device();
            if device.is_cpu() {
                return Ok(());
            }
            for (tokens, rows, columns) in [(64, 2048, 1024), (4096, 1024, 512)] {
                for dtype in [DType::F32, DType::BF16] {
                    let x = here(&random(&[tokens, columns], 1)?).to_dtype(dtype)?;
                    let bias = here(&random(&[rows], 2)?).to_dtype(dtype)?;
                    for format in formats() {
                        let bytes = moderate_bytes(format, rows, columns, 3);
                        let weight = Weight::Quantized(quantized(format, &[rows, columns], bytes));
                        // Kernels and cuBLAS's own workspace come with the first.
                        linear(&x, &weight, Some(&bias))?;
                        let (peak, result) = peak_of(device, || linear(&x, &weight, Some(&bias)));
                        let result = (result?.elem_count() * dtype.size_in_bytes()) as u64;
                        let result = result.next_multiple_of(GRANULARITY);
                        let most = linear_scratch(format, rows, columns, tokens, dtype) + result;
                        assert!(
                            peak <= most,
                            "{format} {dtype:?}: {peak} bytes where {most} are predicted"
                        );
                    }
                }
            }
            Ok(())
        }
    }
}
