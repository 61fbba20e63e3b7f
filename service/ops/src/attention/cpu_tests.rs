use candle_core::{DType, Device, Result, Tensor};

use super::{KEYS, QUERIES};
use crate::attention::{Mask, attention};
use crate::testing::{assert_close, random};

/// Tolerance of f32 sums against f64.
const F32: f64 = 2e-6;

/// Reference implementation in f64, element by element. `bias` has all four axes.
fn defined(
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    sees: impl Fn(usize, usize, usize) -> bool,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (batch, queries, heads, width) = q.dims4()?;
    let (_, keys, key_heads, _) = k.dims4()?;
    let numbers = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (q, k, v) = (numbers(q)?, numbers(k)?, numbers(v)?);
    let bias = bias.map(numbers).transpose()?;
    let mut out = Vec::new();
    for row in 0..batch * queries * heads {
        let (b, n, h) = (row / heads / queries, row / heads % queries, row % heads);
        let key_row = |m: usize| ((b * keys + m) * key_heads + h / (heads / key_heads)) * width;
        let weight = |m: usize| {
            let products = (0..width).map(|c| q[row * width + c] * k[key_row(m) + c]);
            let bias = bias
                .as_ref()
                .map_or(0.0, |bias| bias[((b * heads + h) * queries + n) * keys + m]);
            (products.sum::<f64>() * scale + bias).exp()
        };
        let seen: Vec<(usize, f64)> = (0..keys)
            .filter(|&m| sees(b, n, m))
            .map(|m| (m, weight(m)))
            .collect();
        let total: f64 = seen.iter().map(|(_, weight)| weight).sum();
        out.extend((0..width).map(|c| {
            let sum: f64 = seen.iter().map(|&(m, weight)| weight * v[key_row(m) + c]).sum();
            (sum / total) as f32
        }));
    }
    Tensor::from_vec(out, (batch, queries, heads, width), &Device::Cpu)
}

fn poisoned(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::full(f32::NAN, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Queries, keys and values of these sizes: `[batch, queries, keys, heads, key heads, width]`.
fn operands([b, n, m, h, g, d]: [usize; 6]) -> Result<[Tensor; 3]> {
    let q = (random(&[b, n, h, d], 1)? * 3.0)?;
    Ok([q, random(&[b, m, g, d], 2)?, random(&[b, m, g, d], 3)?])
}

#[test]
fn attention_equals_the_reference_for_every_mask_and_size() -> Result<()> {
    let sizes = [
        [1, 1, 1, 1, 1, 1],
        [2, 5, 7, 3, 3, 8],
        [1, 112, 112, 2, 2, 32],
        [1, QUERIES + 1, KEYS + 1, 4, 2, 5],
        [2, 2 * QUERIES + 17, 2 * KEYS + 3, 6, 1, 16],
        [1, 33, 300, 2, 1, 72],
        [1, 65, 129, 2, 2, 1],
        [1, 1, 129, 2, 1, 17],
        [1, 65, 1, 2, 2, 33],
    ];
    for size in sizes {
        let [q, k, v] = operands(size)?;
        let [b, n, m, h, ..] = size;
        let check = |mask: Mask<'_>, sees: &dyn Fn(usize, usize, usize) -> bool, bias: Option<&Tensor>| {
            let out = poisoned(q.dims(), DType::F32)?;
            attention(&q, &k, &v, 0.2, mask, &out)?;
            assert_close(&out, &defined([&q, &k, &v], 0.2, sees, bias)?, F32)
        };
        check(Mask::None, &|_, _, _| true, None)?;
        check(Mask::Causal, &|_, n, m| m <= n, None)?;
        // Every query attends to a key: with fewer keys than queries, the window reaches back far enough.
        let (before, after) = (9 + n.saturating_sub(m), 4);
        let near = |_: usize, n: usize, m: usize| m + before >= n && m <= n + after;
        check(Mask::Window { before, after }, &near, None)?;
        let lengths: Vec<u32> = (0..b).map(|b| (m / (b + 2)).max(1) as u32).collect();
        let some = |b: usize, _: usize, m: usize| m < lengths[b] as usize;
        let told = Tensor::new(lengths.as_slice(), &Device::Cpu)?;
        let queries = Tensor::full(n as u32, b, &Device::Cpu)?;
        let keys = &told;
        check(
            Mask::Lengths {
                queries: &queries,
                keys,
            },
            &some,
            None,
        )?;
        for shape in [
            [b, h, n, m],
            [1, h, n, m],
            [1, 1, n, m],
            [b, 1, 1, m],
            [1, h, 1, 1],
        ] {
            let bias = (random(&shape, 4)? * 2.0)?;
            let whole = bias.broadcast_as((b, h, n, m))?.contiguous()?;
            check(Mask::Bias(&bias), &|_, _, _| true, Some(&whole))?;
        }
    }
    Ok(())
}

#[test]
fn attention_reads_and_writes_strided_views() -> Result<()> {
    // One buffer of all three, with tokens that are not attended to, and a result beside other columns.
    let joint = random(&[2, 90, 3 * 4, 24], 1)?;
    let of = |first: usize| joint.narrow(1, 10, 75)?.narrow(2, first, 4);
    let (q, k, v) = (of(0)?, of(4)?, of(8)?);
    let all = Tensor::zeros((2, 75, 11, 24), DType::F32, &Device::Cpu)?;
    attention(&q, &k, &v, 0.3, Mask::None, &all.narrow(2, 5, 4)?)?;
    let expected = defined([&q, &k, &v], 0.3, |_, _, _| true, None)?;
    assert_close(&all.narrow(2, 5, 4)?, &expected, F32)?;
    let square_sum = |x: Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
    assert_eq!(square_sum(all.narrow(2, 0, 5)?)?, 0.0);
    assert_eq!(square_sum(all.narrow(2, 9, 2)?)?, 0.0);
    // The result may be in the buffer of the operands if it does not overlap them.
    let place = joint.narrow(1, 0, 10)?;
    let (q, k, v) = (of(0)?.narrow(1, 0, 10)?, of(4)?, of(8)?);
    let expected = defined([&q, &k, &v], 0.3, |_, _, _| true, None)?;
    attention(&q, &k, &v, 0.3, Mask::None, &place.narrow(2, 3, 4)?)?;
    assert_close(&place.narrow(2, 3, 4)?, &expected, F32)
}

#[test]
fn extreme_scores_neither_overflow_nor_underflow() -> Result<()> {
    let [q, k, v] = operands([1, 70, 3 * KEYS, 2, 2, 8])?;
    // Scores of thousands, with the maximum in the first or the last block of keys.
    let ramp = Tensor::arange(0f32, (3 * KEYS) as f32, &Device::Cpu)?.reshape((1, 1, 1, 3 * KEYS))?;
    for slope in [7.0, -7.0] {
        let bias = (&ramp * slope)?;
        let out = poisoned(q.dims(), DType::F32)?;
        attention(&q, &k, &v, 1.0, Mask::Bias(&bias), &out)?;
        let lowered = (&bias - f64::from(bias.max_all()?.to_scalar::<f32>()?))?;
        let lowered = lowered.broadcast_as((1, 2, 70, 3 * KEYS))?.contiguous()?;
        assert_close(
            &out,
            &defined([&q, &k, &v], 1.0, |_, _, _| true, Some(&lowered))?,
            2e-5,
        )?;
    }
    Ok(())
}

#[test]
fn narrow_dtypes_are_computed_in_f32() -> Result<()> {
    for (dtype, tolerance) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
        let [q, k, v] = operands([1, 40, 50, 2, 1, 16])?;
        let narrow = |x: &Tensor| x.to_dtype(dtype);
        let (q, k, v) = (narrow(&q)?, narrow(&k)?, narrow(&v)?);
        let out = poisoned(q.dims(), dtype)?;
        attention(&q, &k, &v, 0.25, Mask::Causal, &out)?;
        assert_close(
            &out,
            &defined([&q, &k, &v], 0.25, |_, n, m| m <= n, None)?,
            tolerance,
        )?;
    }
    Ok(())
}

#[test]
fn the_result_does_not_depend_on_the_thread_count() -> Result<()> {
    let [q, k, v] = operands([2, 150, 170, 3, 3, 32])?;
    let with = |threads: usize| -> Result<Vec<f32>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let out = poisoned(q.dims(), DType::F32)?;
        pool.map_err(candle_core::Error::wrap)?
            .install(|| attention(&q, &k, &v, 0.2, Mask::None, &out))?;
        out.flatten_all()?.to_vec1()
    };
    assert_eq!(with(1)?, with(5)?);
    Ok(())
}

#[test]
fn a_result_with_overlapping_elements_is_refused() -> Result<()> {
    let [q, k, v] = operands([1, 4, 4, 2, 2, 8])?;
    let out = Tensor::zeros((1, 1, 2, 8), DType::F32, &Device::Cpu)?.broadcast_as((1, 4, 2, 8))?;
    assert!(attention(&q, &k, &v, 1.0, Mask::None, &out).is_err());
    Ok(())
}
