//! Linear layers against reference implementations in f64.

use candle_core::{Device, Result};
use gpu::{Fp8Scales, GgufType, Int8Scales, Rotation, SvdquantCodes, W4A8Codes, W4A8Scales, WeightPart};

use super::*;
use crate::narrow_products::{Fp8Products, Int8Products};
use crate::testing::{
    BF16_OPERATION, assert_close, fitting_rows, formats, here, quantized, random, random_bytes,
};

/// Tolerance of sums of up to 768 products in f32 against f64.
const F32_PRODUCT: f64 = 1e-5;

/// A layer without low-rank terms.
fn linear(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Result<Tensor> {
    super::linear(x, &LinearLayer::new(weight, bias))
}

/// Reference `x Wᵀ + b` in f64.
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

/// Bytes of a weight with elements of about 1: codes and scales in fp8 without NaN, and powers of two of about 1.
fn moderate_bytes(format: WeightFormat, rows: usize, columns: usize, seed: u64) -> Vec<u8> {
    let mut bytes = random_bytes(format, rows, columns, seed);
    let has_codes_in_fp8 = matches!(
        format,
        WeightFormat::Fp8(_) | WeightFormat::E5M2(_) | WeightFormat::BlockFp8 | WeightFormat::Mxfp8(_)
    );
    let is_mxfp8 = matches!(format, WeightFormat::Mxfp8(_));
    // Exponents of about 0, and scales without a sign.
    if let WeightFormat::Gguf(kind @ (GgufType::Mxfp4 | GgufType::Nvfp4)) = format {
        for block in bytes.chunks_exact_mut(kind.block().1) {
            match kind {
                GgufType::Mxfp4 => block[0] = 124 + (block[0] & 3),
                _ => block[..4].iter_mut().for_each(|scale| *scale &= 0x3F),
            }
        }
    }
    let wide_scales = matches!(
        format,
        WeightFormat::W4A8 {
            scales: W4A8Scales::F32,
            ..
        }
    );
    // The values of these codes are up to 127, and their scales a factor of 32 more.
    if let WeightFormat::Gguf(kind @ (GgufType::IQ4NL | GgufType::IQ4XS)) = format {
        for block in bytes.chunks_exact_mut(kind.block().1) {
            block[1] &= 0x8F;
        }
    }
    for (part, range) in format.layout(rows, columns) {
        for byte in &mut bytes[range] {
            match part {
                WeightPart::Codes if has_codes_in_fp8 => *byte &= 0xBF,
                WeightPart::BlockScales if wide_scales => {}
                WeightPart::BlockScales if is_mxfp8 => *byte = 124 + (*byte & 3),
                WeightPart::BlockScales => *byte &= 0x3F,
                _ => {}
            }
        }
    }
    bytes
}

#[test]
fn a_quantized_layer_equals_its_dequantized_layer() -> Result<()> {
    for (tokens, rows, columns) in [(1, 11, 256), (5, 7, 512), (3, 19, 768)] {
        let x = here(&random(&[tokens, columns], 1)?);
        for format in formats() {
            let rows = fitting_rows(format, rows);
            let bias = random(&[rows], 2)?;
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
            // With odd row counts all are dequantized on a card too; others have separate tests.
            if rounds_rows(&weight, DType::BF16)? {
                continue;
            }
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

/// The codes of a layer after a GELU of Nunchaku's are multiplied by shifted inputs, its low-rank product by the inputs.
#[test]
fn a_shift_of_inputs_does_not_reach_the_low_rank_product() -> Result<()> {
    let (tokens, rows, columns) = (3, 256, 128);
    let format = |shift| WeightFormat::Svdquant {
        codes: SvdquantCodes::Int4(shift),
        rank: 16,
    };
    let bytes = moderate_bytes(format(InputShift::Gelu), rows, columns, 3);
    let weight = |bytes: &[u8], shift| quantized(format(shift), &[rows, columns], bytes.to_vec());
    let mut without_low_rank = bytes.clone();
    for (part, range) in format(InputShift::Gelu).layout(rows, columns) {
        if part == WeightPart::LowRankUp {
            without_low_rank[range].fill(0);
        }
    }
    let x = random(&[tokens, columns], 1)?;
    let bias = random(&[rows], 2)?;
    let ones = Tensor::full(InputShift::Gelu.number(), x.dims(), &Device::Cpu)?;
    let plain = dequantize(&weight(&bytes, InputShift::None), DType::F32)?;
    let codes = dequantize(&weight(&without_low_rank, InputShift::None), DType::F32)?;
    let shift = defined(&ones, &codes, None)?;
    let most = |t: &Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
    assert!(most(&shift)? > 0.1);
    let shifted = Weight::Quantized(weight(&bytes, InputShift::Gelu));
    for bias in [None, Some(&bias)] {
        let expected = (defined(&x, &plain, bias)? + &shift)?;
        let found = linear(&here(&x), &shifted, bias.map(here).as_ref())?;
        assert_close(&found, &expected, F32_PRODUCT)?;
        let short = here(&x).to_dtype(DType::BF16)?;
        let bias = match bias {
            Some(bias) => Some(here(bias).to_dtype(DType::BF16)?),
            None => None,
        };
        let most = match multiplies_fp8(crate::testing::test_device(), &shifted, DType::BF16)? {
            true => 0.07,
            false => 2.0 * BF16_OPERATION,
        };
        assert_close(&linear(&short, &shifted, bias.as_ref())?, &expected, most)?;
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

/// A view with a margin, which must not be read or written.
fn window(rows: usize, columns: usize, dtype: DType) -> Result<[Tensor; 2]> {
    let all = (Tensor::zeros((2, rows + 3, columns + 24), DType::F32, &Device::Cpu)? + 7.0)?;
    let all = here(&all.to_dtype(dtype)?);
    let window = all.narrow(1, 2, rows)?.narrow(2, 16, columns)?;
    Ok([all, window])
}

#[test]
fn a_layer_reads_and_writes_views_and_leaves_the_rest_unchanged() -> Result<()> {
    let scratch = Scratch::new(1 << 20, crate::testing::test_device())?;
    for (tokens, outputs, inputs) in [(5, 16, 32), (64, 48, 256), (7, 11, 24)] {
        for (dtype, tolerance) in [(DType::F32, F32_PRODUCT), (DType::BF16, BF16_OPERATION)] {
            let x = random(&[2, tokens, inputs], 1)?;
            let weight = random(&[outputs, inputs], 2)?;
            let bias = random(&[outputs], 3)?;
            let to = |x: &Tensor| here(x).to_dtype(dtype);
            let held = Weight::Full(to(&weight)?);
            let [_, x_] = window(tokens, inputs, dtype)?;
            crate::copy_rows(&to(&x)?, &x_)?;
            let plain = defined(&x.flatten_to(1)?, &weight, Some(&bias))?;
            for (then, expected) in [
                (Epilogue::None, plain.clone()),
                (Epilogue::GeluTanh, plain.gelu()?),
            ] {
                let [all, out] = window(tokens, outputs, dtype)?;
                linear_into(
                    &x_,
                    &LinearLayer::new(&held, Some(&to(&bias)?)),
                    then,
                    &out,
                    &scratch,
                )?;
                let host = all.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let found = host.narrow(1, 2, tokens)?.narrow(2, 16, outputs)?.contiguous()?;
                assert_close(&found.flatten_to(1)?, &expected, tolerance)?;
                let rest = (
                    host.sum_all()?.to_scalar::<f32>()?,
                    found.sum_all()?.to_scalar::<f32>()?,
                );
                let sevens = 7.0 * (host.elem_count() - found.elem_count()) as f32;
                assert!((rest.0 - rest.1 - sevens).abs() < 1e-2 * sevens, "{rest:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn batched_layers_equal_each_layer_alone() -> Result<()> {
    let scratch = Scratch::new(1 << 20, crate::testing::test_device())?;
    let device = crate::testing::test_device();
    for dtype in [DType::F32, DType::BF16] {
        let x = random(&[1, 9, 32], 1)?;
        let weights = random(&[3, 64, 32], 2)?;
        let biases = random(&[3, 64], 3)?;
        let x_ = here(&x).to_dtype(dtype)?;
        let (weights_, biases_) = (here(&weights).to_dtype(dtype)?, here(&biases).to_dtype(dtype)?);
        let joint = Tensor::zeros((1, 9, 192), dtype, device)?;
        let held = (0..3)
            .map(|i| {
                Ok((
                    Weight::Full(weights_.get(i)?),
                    biases_.get(i)?,
                    joint.narrow(2, 64 * i, 64)?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        let mut layers: Vec<LayerTo<'_>> = held
            .iter()
            .map(|(weight, bias, out)| LayerTo {
                layer: LinearLayer::new(weight, Some(bias)),
                out,
            })
            .collect();
        for _ in 0..2 {
            linears_into(&x_, &layers, Epilogue::None, &scratch)?;
            for i in 0..3 {
                let expected = defined(&x.get(0)?, &weights.get(i)?, Some(&biases.get(i)?))?;
                let host = joint
                    .to_device(&Device::Cpu)?
                    .narrow(2, 64 * i, 64)?
                    .contiguous()?;
                assert_close(&host.get(0)?, &expected, BF16_OPERATION)?;
            }
            // In reverse order the strides are negative.
            layers.reverse();
        }
    }
    Ok(())
}

/// On a card they are batched products where the weights of the parts are at equal distances.
#[test]
fn parts_of_a_batch_have_the_layers_of_their_own() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(1 << 20, device)?;
    let (items, tokens, columns, heights) = (4, 5, 32, [48, 16]);
    let all = heights[0] + heights[1];
    let at_distances = vec![(0..1, 0), (1..2, 1), (2..3, 2)];
    let pairs = vec![(0..2, 2), (2..4, 0)];
    let unequal = vec![(0..2, 0), (2..3, 1)];
    for (parts, dtype) in [&at_distances, &pairs, &unequal]
        .into_iter()
        .flat_map(|parts| [(parts, DType::F32), (parts, DType::BF16)])
    {
        let x = random(&[items, tokens, columns], 1)?;
        let (weights, biases) = (random(&[3, all, columns], 2)?, random(&[3, all], 3)?);
        let (weights_, biases_) = (here(&weights).to_dtype(dtype)?, here(&biases).to_dtype(dtype)?);
        let joint = Tensor::ones((items, tokens, all), dtype, device)?;
        let held = (0..3).map(|which| {
            let part = |first, count| {
                let weight = weights_.get(which)?.narrow(0, first, count)?;
                Ok::<_, candle_core::Error>((
                    Weight::Full(weight),
                    biases_.get(which)?.narrow(0, first, count)?,
                ))
            };
            Ok([part(0, heights[0])?, part(heights[0], heights[1])?])
        });
        let held = held.collect::<Result<Vec<_>>>()?;
        let of_items = parts.iter().map(|(items, which)| LayersOfItems {
            items: items.clone(),
            layers: held[*which]
                .iter()
                .map(|(weight, bias)| LinearLayer::new(weight, Some(bias)))
                .collect(),
        });
        let of_items: Vec<LayersOfItems<'_>> = of_items.collect();
        let outs = [
            joint.narrow(2, 0, heights[0])?,
            joint.narrow(2, heights[0], heights[1])?,
        ];
        let outs: Vec<&Tensor> = outs.iter().collect();
        linears_of_items_into(&here(&x).to_dtype(dtype)?, &of_items, &outs, &scratch)?;
        let numbers = joint.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        for item in 0..items {
            let found = numbers.get(item)?;
            match parts.iter().find(|(items, _)| items.contains(&item)) {
                None => {
                    let found = found.flatten_all()?.to_vec1::<f32>()?;
                    assert!(found.iter().all(|number| *number == 1.0), "{item} is not named");
                }
                Some((_, which)) => {
                    let (weight, bias) = (weights.get(*which)?, biases.get(*which)?);
                    let expected = defined(&x.get(item)?, &weight, Some(&bias))?;
                    assert_close(&found, &expected, BF16_OPERATION)?;
                }
            }
        }
        let layers = |which: usize, count: usize| LayersOfItems {
            items: which..which + 1,
            layers: of_items[0].layers[..count].to_vec(),
        };
        let x = here(&x).to_dtype(dtype)?;
        assert!(linears_of_items_into(&x, &[layers(0, 1)], &outs, &scratch).is_err());
        assert!(linears_of_items_into(&x, &[layers(items, 2)], &outs, &scratch).is_err());
    }
    Ok(())
}

/// On a card they are one product if the scratch can hold all of them, else one after the other.
#[test]
fn batched_quantized_layers_equal_each_layer_alone() -> Result<()> {
    let device = crate::testing::test_device();
    let (tokens, columns) = (9, 256);
    let x = random(&[1, tokens, columns], 1)?;
    for format in formats() {
        let outputs = fitting_rows(format, 64);
        let biases = random(&[3, outputs], 2)?;
        let biases_ = here(&biases);
        let one = linear_scratch(format, outputs, columns, tokens, DType::F32);
        for scratch in [one, 3 * one] {
            let scratch = Scratch::new(scratch, device)?;
            let joint = Tensor::zeros((1, tokens, 3 * outputs), DType::F32, device)?;
            let held = (0..3)
                .map(|i| {
                    let bytes = moderate_bytes(format, outputs, columns, 5 + i as u64);
                    let weight = quantized(format, &[outputs, columns], bytes);
                    let numbers = dequantize(&weight, DType::F32)?;
                    let out = joint.narrow(2, outputs * i, outputs)?;
                    Ok((Weight::Quantized(weight), numbers, biases_.get(i)?, out))
                })
                .collect::<Result<Vec<_>>>()?;
            let layers: Vec<LayerTo<'_>> = held
                .iter()
                .map(|(weight, _, bias, out)| LayerTo {
                    layer: LinearLayer::new(weight, Some(bias)),
                    out,
                })
                .collect();
            linears_into(&here(&x), &layers, Epilogue::None, &scratch)?;
            for (i, (_, numbers, _, out)) in held.iter().enumerate() {
                let expected = defined(&x.get(0)?, numbers, Some(&biases.get(i)?))?;
                let found = out.to_device(&Device::Cpu)?.contiguous()?;
                assert_close(&found.get(0)?, &expected, F32_PRODUCT)?;
            }
        }
    }
    Ok(())
}

/// The factors of a low-rank term, `[rank, columns]` and `[rows, rank]`, in a dtype, and the factor.
struct Term {
    down: Tensor,
    up: Tensor,
    factor: f64,
}

impl Term {
    fn random(
        (rank, rows, columns): (usize, usize, usize),
        factor: f64,
        seed: u64,
        dtype: DType,
    ) -> Result<Term> {
        let part = |shape: &[usize], seed: u64| here(&random(shape, seed)?).to_dtype(dtype);
        Ok(Term {
            down: part(&[rank, columns], seed)?,
            up: part(&[rows, rank], seed + 1)?,
            factor,
        })
    }

    fn as_term(&self) -> LowRank {
        LowRank {
            down: self.down.clone(),
            up: self.up.clone(),
            factor: self.factor,
        }
    }
}

/// Reference `x (W + Σ factor up down)ᵀ + b` in f64.
fn defined_with_terms(x: &Tensor, weight: &Tensor, bias: &Tensor, terms: &[Term]) -> Result<Tensor> {
    let wide = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let mut merged = wide(weight)?;
    for term in terms {
        merged = (merged + (wide(&term.up)?.matmul(&wide(&term.down)?)? * term.factor)?)?;
    }
    let product = wide(x)?.matmul(&merged.t()?)?;
    product.broadcast_add(&wide(bias)?)?.to_dtype(DType::F32)
}

/// A layer in full precision, its rows, and two terms.
struct Adapted {
    terms: Vec<Term>,
    x: Tensor,
    bias: Tensor,
    full: Weight,
}

impl Adapted {
    fn random((tokens, rows, columns): (usize, usize, usize), dtype: DType) -> Result<Adapted> {
        let terms = [(4, 0.7, 5), (3, -1.3, 7)]
            .map(|(rank, factor, seed)| Term::random((rank, rows, columns), factor, seed, dtype));
        let numbers = |shape: &[usize], seed| here(&random(shape, seed)?).to_dtype(dtype);
        Ok(Adapted {
            terms: terms.into_iter().collect::<Result<_>>()?,
            x: numbers(&[tokens, columns], 1)?,
            bias: numbers(&[rows], 2)?,
            full: Weight::Full(numbers(&[rows, columns], 3)?),
        })
    }
}

/// Whether a weight is multiplied in eight bits, so that the rows are rounded.
fn rounds_rows(weight: &Weight, dtype: DType) -> Result<bool> {
    let device = crate::testing::test_device();
    let is_int8 = !device.is_cpu()
        && dtype != DType::F32
        && weight.dims()[0].is_multiple_of(16)
        && format_of(weight).is_some_and(|format| int8_rotation(format).is_some());
    Ok(is_int8 || multiplies_fp8(device, weight, dtype)?)
}

fn format_of(weight: &Weight) -> Option<WeightFormat> {
    match weight {
        Weight::Full(_) => None,
        Weight::Quantized(weight) => Some(weight.format),
    }
}

#[test]
fn low_rank_terms_equal_a_merged_weight_in_every_format() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(8 << 20, device)?;
    // Of the last, terms are added to the weight on a card.
    for (tokens, rows, columns) in [(1, 11, 256), (9, 64, 512), (130, 64, 512)] {
        // A card rounds each term to bf16 for itself.
        let of_bf16 = if device.is_cpu() { 1.0 } else { 2.0 } * BF16_OPERATION;
        for (dtype, tolerance) in [(DType::F32, F32_PRODUCT), (DType::BF16, of_bf16)] {
            let Adapted { terms, x, bias, full } = Adapted::random((tokens, rows, columns), dtype)?;
            let fitting = formats()
                .into_iter()
                .filter(|format| rows.is_multiple_of(format.multiple_of_rows()));
            let quantized = fitting.map(|format| {
                let bytes = moderate_bytes(format, rows, columns, 3);
                Weight::Quantized(quantized(format, &[rows, columns], bytes))
            });
            for weight in quantized.chain([full]) {
                // Products in eight bits on a card have separate tests, and another tolerance.
                if rounds_rows(&weight, dtype)? {
                    continue;
                }
                let numbers = match &weight {
                    Weight::Full(weight) => weight.clone(),
                    Weight::Quantized(weight) => dequantize(weight, dtype)?,
                };
                for count in 1..=terms.len() {
                    let layer = LinearLayer {
                        low_rank: terms[..count].iter().map(Term::as_term).collect(),
                        ..LinearLayer::new(&weight, Some(&bias))
                    };
                    let plain = defined_with_terms(&x, &numbers, &bias, &terms[..count])?;
                    for (then, expected) in [
                        (Epilogue::None, plain.clone()),
                        (Epilogue::GeluTanh, plain.gelu()?),
                    ] {
                        let out = Tensor::zeros((tokens, rows), dtype, device)?;
                        linear_into(&x, &layer, then, &out, &scratch)?;
                        let format = format_of(&weight);
                        println!("{format:?} {dtype:?} {tokens}x{rows}x{columns}, {count} terms");
                        assert_close(&out, &expected, tolerance)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A copy of a weight with its terms gives what the layer gives with them; of many rows on a card, to the bit.
#[test]
fn a_copy_of_a_weight_with_its_terms_equals_the_layer_with_them() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(8 << 20, device)?;
    let (tokens, rows, columns) = (130, 64, 512);
    for (dtype, tolerance) in [(DType::F32, F32_PRODUCT), (DType::BF16, BF16_OPERATION)] {
        let Adapted { terms, x, bias, full } = Adapted::random((tokens, rows, columns), dtype)?;
        let int8 = quantized(
            WeightFormat::Int8,
            &[rows, columns],
            moderate_bytes(WeightFormat::Int8, rows, columns, 3),
        );
        for weight in [full, Weight::Quantized(int8)] {
            let layer = LinearLayer {
                low_rank: terms.iter().map(Term::as_term).collect(),
                ..LinearLayer::new(&weight, Some(&bias))
            };
            let copy = Tensor::zeros((rows, columns), dtype, device)?;
            adapted_weight(&layer, &copy)?;
            let out = || Tensor::zeros((tokens, rows), dtype, device);
            let (found, expected) = (out()?, out()?);
            let copy = Weight::Full(copy);
            linear_into(
                &x,
                &LinearLayer::new(&copy, Some(&bias)),
                Epilogue::None,
                &found,
                &scratch,
            )?;
            linear_into(&x, &layer, Epilogue::None, &expected, &scratch)?;
            match device.is_cpu() {
                true => assert_close(&found, &expected, tolerance)?,
                false => assert_close(&found, &expected.to_device(&Device::Cpu)?, 0.0)?,
            }
        }
    }
    let weight = Weight::Full(here(&random(&[4, 8], 1)?));
    let layer = LinearLayer::new(&weight, None);
    let other = Tensor::zeros((8, 4), DType::F32, device)?;
    assert!(adapted_weight(&layer, &other).is_err());
    Ok(())
}

#[test]
fn low_rank_terms_of_layers_side_by_side_equal_each_alone() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(1 << 20, device)?;
    let (outputs, columns) = (64, 32);
    // Of many rows, terms are added to the weight on a card.
    for (tokens, dtype) in [9, 40]
        .into_iter()
        .flat_map(|tokens| [(tokens, DType::F32), (tokens, DType::BF16)])
    {
        let part = |shape: &[usize], seed: u64| here(&random(shape, seed)?).to_dtype(dtype);
        let (x, biases) = (part(&[1, tokens, columns], 1)?, part(&[3, outputs], 3)?);
        let weights = part(&[3, outputs, columns], 2)?;
        // At equal distances, as in an adapter's memory, and apart.
        let (downs, ups) = (part(&[3, 8, columns], 4)?, part(&[3, outputs, 8], 5)?);
        for is_together in [true, false] {
            let joint = Tensor::zeros((1, tokens, 3 * outputs), dtype, device)?;
            let held = (0..3)
                .map(|i| {
                    let factor = if is_together { 0.5 } else { 0.5 + i as f64 };
                    let term = Term {
                        down: downs.get(i)?,
                        up: ups.get(i)?,
                        factor,
                    };
                    let out = joint.narrow(2, outputs * i, outputs)?;
                    Ok((Weight::Full(weights.get(i)?), biases.get(i)?, term, out))
                })
                .collect::<Result<Vec<_>>>()?;
            let layers: Vec<LayerTo<'_>> = held
                .iter()
                .map(|(weight, bias, term, out)| LayerTo {
                    layer: LinearLayer {
                        low_rank: vec![term.as_term()],
                        ..LinearLayer::new(weight, Some(bias))
                    },
                    out,
                })
                .collect();
            linears_into(&x, &layers, Epilogue::None, &scratch)?;
            for (i, (_, bias, term, out)) in held.iter().enumerate() {
                let terms = std::slice::from_ref(term);
                let expected = defined_with_terms(&x.get(0)?, &weights.get(i)?, bias, terms)?;
                assert_close(&out.contiguous()?.get(0)?, &expected, BF16_OPERATION)?;
            }
        }
    }
    Ok(())
}

#[test]
fn terms_of_some_items_are_added_to_their_results_alone() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(1 << 20, device)?;
    let (items, tokens, outputs, inputs) = (5, 3, 48, 32);
    let shape = [outputs, inputs];
    // One item each, at equal distances, as copies beside each other are; several items, with one term, with two and with none.
    let together = vec![(0..1, vec![0]), (1..2, vec![1]), (2..3, vec![2])];
    let apart = vec![(0..2, vec![2, 0]), (3..4, vec![1]), (4..5, Vec::new())];
    for (sets, dtype) in [&together, &apart]
        .into_iter()
        .flat_map(|sets| [(sets, DType::F32), (sets, DType::BF16)])
    {
        let part = |shape: &[usize], seed: u64| here(&random(shape, seed)?).to_dtype(dtype);
        let (downs, ups) = (part(&[3, 4, inputs], 1)?, part(&[3, outputs, 4], 2)?);
        let term = |which: usize| {
            Ok(Term {
                down: downs.get(which)?,
                up: ups.get(which)?,
                factor: if sets == &together {
                    0.5
                } else {
                    0.5 - which as f64
                },
            })
        };
        // Rows of views: of heads beside others, and beside other rows.
        let x = part(&[items, tokens, 2 * inputs], 3)?.narrow(2, inputs, inputs)?;
        let whole = part(&[items, tokens, 6, 16], 4)?;
        let before = whole.copy()?;
        let out = whole.narrow(2, 1, 3)?;
        let mut of_items = Vec::new();
        for (items, terms) in sets {
            let terms = terms.iter().map(|&which| Ok(term(which)?.as_term()));
            of_items.push(TermsOfItems {
                items: items.clone(),
                terms: terms.collect::<Result<_>>()?,
            });
        }
        add_low_rank(&x, shape, &of_items, &out, &scratch)?;
        let numbers = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
        for item in 0..items {
            let set = sets.iter().find(|(items, _)| items.contains(&item));
            let terms = set.map_or(&[][..], |(_, terms)| terms).iter();
            let terms = terms.map(|&which| term(which)).collect::<Result<Vec<_>>>()?;
            let given = numbers(&before.get(item)?.narrow(1, 1, 3)?.contiguous()?)?;
            let given = given.reshape((tokens, outputs))?;
            let zeros = Tensor::zeros(&shape, DType::F32, &Device::Cpu)?;
            let none = Tensor::zeros(outputs, DType::F32, &Device::Cpu)?;
            let added = defined_with_terms(&x.get(item)?.contiguous()?, &zeros, &none, &terms)?;
            let found = numbers(&out.get(item)?.contiguous()?)?.reshape((tokens, outputs))?;
            match terms.is_empty() {
                true => assert_eq!(found.to_vec2::<f32>()?, given.to_vec2::<f32>()?),
                false => assert_close(&found, &(given + added)?, BF16_OPERATION)?,
            }
            for others in [0..1, 4..6] {
                let part = |all: &Tensor| {
                    numbers(
                        &all.get(item)?
                            .narrow(1, others.start, others.len())?
                            .contiguous()?,
                    )
                };
                let (found, given) = (part(&whole)?.flatten_all()?, part(&before)?.flatten_all()?);
                assert_eq!(found.to_vec1::<f32>()?, given.to_vec1::<f32>()?);
            }
        }
        // Items that are not there, and terms of another shape.
        let beyond = TermsOfItems {
            items: 4..6,
            terms: vec![term(0)?.as_term()],
        };
        assert!(add_low_rank(&x, shape, &[beyond], &out, &scratch).is_err());
        let other = LowRank {
            down: term(0)?.down,
            up: part(&[outputs - 1, 4], 5)?,
            factor: 1.0,
        };
        let other = TermsOfItems {
            items: 0..1,
            terms: vec![other],
        };
        assert!(add_low_rank(&x, shape, &[other], &out, &scratch).is_err());
    }
    Ok(())
}

#[test]
fn low_rank_terms_that_do_not_fit_are_refused() -> Result<()> {
    let device = crate::testing::test_device();
    let scratch = Scratch::new(1 << 20, device)?;
    let weight = Weight::Full(here(&random(&[16, 32], 1)?));
    let x = here(&random(&[2, 32], 2)?);
    let out = Tensor::zeros((2, 16), DType::F32, device)?;
    let refused = |shapes: [[usize; 2]; 2], dtype: DType| -> Result<bool> {
        let part = |shape: [usize; 2]| here(&random(&shape, 3)?).to_dtype(dtype);
        let (down, up) = (part(shapes[0])?, part(shapes[1])?);
        let term = LowRank {
            down,
            up,
            factor: 1.0,
        };
        let layer = LinearLayer {
            low_rank: vec![term],
            ..LinearLayer::new(&weight, None)
        };
        Ok(linear_into(&x, &layer, Epilogue::None, &out, &scratch).is_err())
    };
    assert!(!refused([[4, 32], [16, 4]], DType::F32)?);
    assert!(refused([[4, 31], [16, 4]], DType::F32)?);
    assert!(refused([[4, 32], [15, 4]], DType::F32)?);
    assert!(refused([[4, 32], [16, 3]], DType::F32)?);
    assert!(refused([[4, 32], [16, 4]], DType::BF16)?);
    Ok(())
}

#[test]
fn formats_of_four_bits_or_fewer_are_multiplied_in_fp8_by_default() {
    use GgufType::{IQ4NL, IQ4XS, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let coarse = [Q2K, Q3K, Q4_0, Q4_1, Q4K, IQ4NL, IQ4XS, Mxfp4, Nvfp4].map(WeightFormat::Gguf);
    let fine = [Q5_0, Q5_1, Q5K, Q6K, Q8_0].map(WeightFormat::Gguf);
    for format in formats() {
        let is_rotated = format.rotation() != Rotation::None;
        let is_wide = matches!(
            format,
            WeightFormat::Int8
                | WeightFormat::Int8Scaled(..)
                | WeightFormat::Int8Groups { .. }
                | WeightFormat::W4A8 {
                    codes: W4A8Codes::Six,
                    ..
                }
        );
        let is_fine = fine.contains(&format) || is_wide;
        assert!(!coarse.contains(&format) || !is_fine);
        assert_eq!(
            Fp8Products::default().takes(format),
            !is_fine && !is_rotated,
            "{format}"
        );
        assert_eq!(Fp8Products::Always.takes(format), !is_rotated, "{format}");
        assert!(!Fp8Products::Never.takes(format), "{format}");
    }
}

#[test]
fn scratch_of_a_product_in_fp8_holds_the_codes_of_both_sides() {
    let (rows, columns, tokens) = (256, 512, 4096);
    let codes = |rows: usize| allocated(rows * columns) + allocated(4 * rows);
    let scratch = |format, dtype| linear_scratch(format, rows, columns, tokens, dtype);
    assert_eq!(
        scratch(WeightFormat::Nf4, DType::BF16),
        codes(tokens) + codes(rows)
    );
    assert_eq!(
        scratch(WeightFormat::Fp8(Fp8Scales::Rows), DType::BF16),
        codes(tokens)
    );
    assert_eq!(
        scratch(WeightFormat::Int8, DType::BF16),
        allocated(2 * rows * columns)
    );
    assert_eq!(
        scratch(WeightFormat::Nf4, DType::F32),
        allocated(4 * rows * columns)
    );
}

#[test]
fn scratch_of_a_product_in_int8_holds_the_codes_of_rows_and_some_sums() {
    let rotated = WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::By256);
    let plain = WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::None);
    let (rows, columns) = (4096, 256);
    let codes = |tokens: usize| allocated(tokens * columns) + allocated(4 * tokens);
    // Sums of 2,048 rows are 32 MiB.
    for (tokens, at_once) in [(700, 700), (9000, 2048)] {
        assert_eq!(
            linear_scratch(rotated, rows, columns, tokens, DType::BF16),
            codes(tokens) + allocated(at_once * rows * 4)
        );
    }
    let dequantized = allocated(2 * rows * columns);
    assert_eq!(
        linear_scratch(plain, rows, columns, 9000, DType::BF16),
        dequantized
    );
    assert_eq!(
        linear_scratch(rotated, rows, columns, 9000, DType::F32),
        2 * dequantized
    );
    assert_eq!(Int8Products::Never.takes(rotated), None);
}

/// Tests of card-only behaviour.
#[cfg(feature = "cuda")]
mod on_a_card {
    use gpu::e4m3_to_f32;

    use super::*;
    use crate::testing::{peak_of, test_device};

    /// Tolerance of native fp8 against the product with the dequantized weight: an element of `x` in e4m3 has four
    /// significant bits, an error of up to 2^-4, about 0.026 in L2.
    const NATIVE: f64 = 0.05;

    /// The same where the weight becomes e4m3 as well: about 0.037 in L2, and more where random scales of blocks make
    /// few numbers of a row large.
    const BOTH_IN_FP8: f64 = 0.07;

    /// Tolerance of rows in int8, whose error is about 0.009 in L2.
    const IN_INT8: f64 = 0.02;

    /// Whether the card of the tests has native fp8.
    fn is_native() -> Result<bool> {
        let Device::Cuda(device) = test_device() else {
            return Ok(false);
        };
        let capability = device.cuda_stream().context().compute_capability();
        Ok(capability.map_err(candle_core::Error::wrap)? >= (8, 9))
    }

    /// Rows as the card quantizes them: by their absolute maximum, to the nearest e4m3, ties to even.
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
            // By the reciprocal, as the kernels do: a number halfway between two codes is rounded alike.
            let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let quantized = |v: &f32| nearest((v * by).abs()).copysign(*v) * scale;
            out.extend(row.iter().map(quantized));
        }
        Tensor::from_vec(out, x.shape(), &Device::Cpu)
    }

    #[test]
    fn native_fp8_products_equal_the_reference() -> Result<()> {
        if !is_native()? {
            return Ok(());
        }
        for (tokens, rows, columns) in [(1, 16, 16), (7, 48, 64), (33, 256, 1040), (300, 3072, 512)] {
            let mut x = random(&[tokens, columns], 1)?;
            if tokens > 1 {
                // A row of zeros, and one of large values.
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
                    let held = Weight::Quantized(weight.clone());
                    let is_native = multiplies_fp8(test_device(), &held, dtype)?;
                    assert!(is_native, "{format} {dtype:?} {tokens} {rows} {columns}");
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
    fn weights_of_other_formats_become_fp8_by_rows() -> Result<()> {
        if test_device().is_cpu() {
            return Ok(());
        }
        let others = formats()
            .into_iter()
            .filter(|format| Fp8Products::Always.takes(*format) && !matches!(format, WeightFormat::Fp8(_)));
        for format in others {
            for (rows, columns) in [(1, 256), (19, 1024), (64, 15360)] {
                let rows = fitting_rows(format, rows);
                let bytes = moderate_bytes(format, rows, columns, 3);
                let weight = quantized(format, &[rows, columns], bytes);
                // At the second time with scales that a weight has kept.
                crate::cuda::requantized(&weight)?;
                let (codes, scales) = crate::cuda::requantized(&weight)?;
                let values: Vec<f32> = codes
                    .to_device(&Device::Cpu)?
                    .flatten_all()?
                    .to_vec1::<u8>()?
                    .into_iter()
                    .map(e4m3_to_f32)
                    .collect();
                let found = Tensor::from_vec(values, (rows, columns), &Device::Cpu)?
                    .broadcast_mul(&scales.to_device(&Device::Cpu)?.reshape((rows, 1))?)?;
                let numbers = dequantize(&weight, DType::F32)?;
                assert_close(&found, &rows_in_e4m3(&numbers)?, 1e-6)?;
            }
        }
        Ok(())
    }

    #[test]
    fn weights_of_four_bits_multiplied_in_fp8_equal_the_reference() -> Result<()> {
        if !is_native()? {
            return Ok(());
        }
        for (tokens, rows, columns) in [(7, 48, 256), (33, 256, 1024), (300, 3072, 512)] {
            let x = random(&[tokens, columns], 1)?;
            let least = rows;
            for (dtype, format) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| {
                let coarse = formats().into_iter().filter(|format| {
                    Fp8Products::Auto.takes(*format) && !matches!(format, WeightFormat::Fp8(_))
                });
                coarse.map(move |format| (dtype, format))
            }) {
                // A product in fp8 needs multiples of 16 rows.
                let fitting = (fitting_rows(format, least)..).step_by(format.multiple_of_rows());
                let rows = fitting.into_iter().find(|rows| rows.is_multiple_of(16));
                let rows = rows.expect("a multiple of both");
                let x = here(&x).to_dtype(dtype)?;
                let bias = here(&random(&[rows], 2)?).to_dtype(dtype)?;
                let bytes = moderate_bytes(format, rows, columns, 3);
                let weight = quantized(format, &[rows, columns], bytes);
                let numbers = dequantize(&weight, DType::F32)?;
                let held = Weight::Quantized(weight);
                assert!(multiplies_fp8(test_device(), &held, dtype)?, "{format} {dtype:?}");
                let found = linear(&x, &held, Some(&bias))?;
                let bias = bias.to_device(&Device::Cpu)?;
                let exact = defined(&rows_in_e4m3(&x)?, &rows_in_e4m3(&numbers)?, Some(&bias))?;
                assert_close(&found, &exact, BF16_OPERATION)?;
                let dequantized = defined(&x.to_dtype(DType::F32)?, &numbers, Some(&bias))?;
                println!("{format} {dtype:?} {tokens}x{rows}x{columns}");
                assert_close(&found, &dequantized, BOTH_IN_FP8)?;
            }
        }
        Ok(())
    }

    /// Rows in int8 with a scale each, rotated and rotated back: f32 on the CPU, of their shape.
    fn rows_in_int8(x: &Tensor, rotation: Rotation) -> Result<Tensor> {
        let mut out = Vec::new();
        for mut row in x
            .to_dtype(DType::F32)?
            .to_device(&Device::Cpu)?
            .to_vec2::<f32>()?
        {
            rotation.turn(&mut row);
            let scale = row.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
            let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            row.iter_mut()
                .for_each(|v| *v = (*v * by).round_ties_even() * scale);
            rotation.turn(&mut row);
            out.extend(row);
        }
        Tensor::from_vec(out, x.shape(), &Device::Cpu)
    }

    /// With channels that are far larger than others, as activations have them; with and without terms; more rows than there are sums
    /// at a time; rows that are views.
    #[test]
    fn weights_with_rotated_columns_are_multiplied_in_int8() -> Result<()> {
        let device = test_device();
        if device.is_cpu() {
            return Ok(());
        }
        for (tokens, rows, columns, rotation) in [
            (1, 16, 16, Rotation::By16),
            (7, 48, 64, Rotation::By64),
            (300, 3072, 512, Rotation::By256),
            (2100, 4096, 256, Rotation::By256),
            (2, 32, 15_360, Rotation::By256),
        ] {
            let loud: Vec<f32> = (0..columns)
                .map(|column| if column % 97 == 5 { 20.0 } else { 1.0 })
                .collect();
            let x = random(&[tokens, columns], 1)?.broadcast_mul(&Tensor::new(loud, &Device::Cpu)?)?;
            for (dtype, kind) in [DType::BF16, DType::F16]
                .into_iter()
                .flat_map(|dtype| [Int8Scales::Tensor, Int8Scales::Rows].map(|kind| (dtype, kind)))
            {
                let wide = Tensor::zeros((tokens, columns + 8), dtype, device)?;
                let x_here = wide.narrow(1, 8, columns)?;
                crate::copy_rows(&here(&x).to_dtype(dtype)?, &x_here)?;
                let x = x.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let bias = here(&random(&[rows], 2)?).to_dtype(dtype)?;
                let format = WeightFormat::Int8Scaled(kind, rotation);
                let mut bytes = moderate_bytes(format, rows, columns, 3);
                if kind == Int8Scales::Tensor {
                    bytes[..4].copy_from_slice(&0.37f32.to_le_bytes());
                }
                let held = quantized(format, &[rows, columns], bytes);
                let numbers = dequantize(&held, DType::F32)?;
                let weight = Weight::Quantized(held);
                assert!(rounds_rows(&weight, dtype)?);
                let terms = [Term::random((8, rows, columns), 0.3, 5, dtype)?];
                let none = Tensor::zeros(rows, DType::F32, &Device::Cpu)?;
                let by_weight = |x: &Tensor| defined_with_terms(x, &numbers, &none, &[]);
                let products = [by_weight(&rows_in_int8(&x, rotation)?)?, by_weight(&x)?];
                let zeros = Tensor::zeros((rows, columns), DType::F32, &Device::Cpu)?;
                for (count, then) in [(0, Epilogue::None), (1, Epilogue::None), (1, Epilogue::GeluTanh)] {
                    let layer = LinearLayer {
                        low_rank: terms[..count].iter().map(Term::as_term).collect(),
                        ..LinearLayer::new(&weight, Some(&bias))
                    };
                    let scratch = Scratch::new(layer.scratch_bytes(tokens, dtype), device)?;
                    let out = Tensor::zeros((tokens, rows), dtype, device)?;
                    linear_into(&x_here, &layer, then, &out, &scratch)?;
                    let added = defined_with_terms(&x, &zeros, &bias, &terms[..count])?;
                    println!("{format} {dtype:?} {tokens}x{rows}x{columns}, {count} terms, {then:?}");
                    for (product, tolerance) in products.iter().zip([2.0 * BF16_OPERATION, IN_INT8]) {
                        let sum = (product + &added)?;
                        let expected = match then {
                            Epilogue::None => sum,
                            Epilogue::GeluTanh => sum.gelu()?,
                        };
                        assert_close(&out, &expected, tolerance)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Of several layers over the same rows, these are quantized once.
    #[test]
    fn layers_over_the_same_rows_in_int8_equal_each_alone() -> Result<()> {
        let device = test_device();
        if device.is_cpu() {
            return Ok(());
        }
        let (tokens, rows, columns, dtype) = (130, 64, 512, DType::BF16);
        let format = WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::By256);
        let x = here(&random(&[1, tokens, columns], 1)?).to_dtype(dtype)?;
        let weights: Vec<Weight> = (0..3)
            .map(|seed| {
                quantized(
                    format,
                    &[rows, columns],
                    moderate_bytes(format, rows, columns, seed),
                )
            })
            .map(Weight::Quantized)
            .collect();
        let scratch = Scratch::new(linear_scratch(format, rows, columns, tokens, dtype), device)?;
        let joint = Tensor::zeros((1, tokens, 3 * rows), dtype, device)?;
        let outs = (0..3)
            .map(|i| joint.narrow(2, rows * i, rows))
            .collect::<Result<Vec<_>>>()?;
        let layers: Vec<LayerTo<'_>> = weights
            .iter()
            .zip(&outs)
            .map(|(weight, out)| LayerTo {
                layer: LinearLayer::new(weight, None),
                out,
            })
            .collect();
        linears_into(&x, &layers, Epilogue::None, &scratch)?;
        for (weight, out) in weights.iter().zip(&outs) {
            let alone = Tensor::zeros((1, tokens, rows), dtype, device)?;
            linear_into(
                &x,
                &LinearLayer::new(weight, None),
                Epilogue::None,
                &alone,
                &scratch,
            )?;
            let on_cpu = |x: &Tensor| x.to_device(&Device::Cpu)?.contiguous()?.squeeze(0);
            assert_close(&on_cpu(out)?, &on_cpu(&alone)?, 0.0)?;
        }
        Ok(())
    }

    /// A copy in fp8 of a weight with its terms, beside the layer with the terms in bf16.
    #[test]
    fn a_copy_in_fp8_of_a_weight_with_its_terms_is_within_the_rounding_of_fp8() -> Result<()> {
        if !is_native()? {
            return Ok(());
        }
        let device = test_device();
        let scratch = Scratch::new(64 << 20, device)?;
        let (tokens, rows, columns, dtype) = (300, 768, 512, DType::BF16);
        let x = here(&random(&[tokens, columns], 1)?).to_dtype(dtype)?;
        for format in [WeightFormat::Fp8(Fp8Scales::Rows), WeightFormat::Nf4] {
            let held = quantized(format, &[rows, columns], moderate_bytes(format, rows, columns, 3));
            let numbers = dequantize(&held, DType::F32)?;
            let weight = Weight::Quantized(held);
            let term = Term::random((16, rows, columns), 0.3, 5, dtype)?;
            let layer = LinearLayer {
                low_rank: vec![term.as_term()],
                ..LinearLayer::new(&weight, None)
            };
            let copy = Tensor::zeros((rows, columns), dtype, device)?;
            adapted_weight(&layer, &copy)?;
            let bytes = WeightFormat::Fp8(Fp8Scales::Rows).bytes(rows, columns).0 as usize;
            let bytes = Tensor::zeros(bytes, DType::U8, device)?;
            let copy = Weight::Quantized(fp8_of_rows(&copy, &bytes)?);
            let found = Tensor::zeros((tokens, rows), dtype, device)?;
            linear_into(
                &x,
                &LinearLayer::new(&copy, None),
                Epilogue::None,
                &found,
                &scratch,
            )?;
            let expected = defined_with_terms(
                &x.to_dtype(DType::F32)?,
                &numbers,
                &Tensor::zeros(rows, DType::F32, device)?,
                std::slice::from_ref(&term),
            )?;
            assert_close(&found, &expected, BOTH_IN_FP8)?;
        }
        Ok(())
    }

    #[test]
    fn no_layer_allocates_more_than_its_predicted_scratch() -> Result<()> {
        let device = test_device();
        if device.is_cpu() {
            return Ok(());
        }
        for (tokens, rows, columns) in [(64, 2048, 1024), (4096, 1024, 512)] {
            for dtype in [DType::F32, DType::BF16] {
                let x = here(&random(&[tokens, columns], 1)?).to_dtype(dtype)?;
                let bias = here(&random(&[rows], 2)?).to_dtype(dtype)?;
                let fitting = formats()
                    .into_iter()
                    .filter(|format| rows.is_multiple_of(format.multiple_of_rows()));
                for format in fitting {
                    let bytes = moderate_bytes(format, rows, columns, 3);
                    let weight = Weight::Quantized(quantized(format, &[rows, columns], bytes));
                    // Kernels and cuBLAS's own workspace are loaded with the first call.
                    linear(&x, &weight, Some(&bias))?;
                    let (peak, result) = peak_of(device, || linear(&x, &weight, Some(&bias)));
                    let result = allocated(result?.elem_count() * dtype.size_in_bytes());
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
