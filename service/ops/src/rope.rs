//! QK-norm and rotary position embedding, in place.

use candle_core::{DType, Result, Tensor};

use crate::loops::{rms_norm_in_place, rotate_in_place};
use crate::place::{with_rows, write_rows};

/// RMS norm of queries and keys, `x / sqrt(mean(x²) + eps) * weight`.
#[derive(Clone, Copy, Debug)]
pub enum QkNorm<'a> {
    None,
    /// Per head, weights `[d]`: FLUX, Hunyuan, Z-Image, Qwen3.
    PerHead {
        q: &'a Tensor,
        k: &'a Tensor,
        /// Added to the mean square.
        eps: f64,
    },
    /// Over all heads of a token, weights `[h d]`: Wan.
    AcrossHeads {
        q: &'a Tensor,
        k: &'a Tensor,
        /// Added to the mean square.
        eps: f64,
    },
}

/// Rotation angles: f32 `[n, d / 2]` each, one per pair (diffusers' `apply_rotary_emb` holds each twice).
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
}

/// Which elements of a head are rotated as a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// `2 i` and `2 i + 1`: FLUX and similar models.
    Neighbours,
    /// `i` and `i + d / 2`: LLaMA, Qwen.
    Halves,
}

/// Normalizes queries `[b, n, h, d]` and keys `[b, n, g, d]`, then rotates each pair `(a, b)` to `(a cos - b sin, b
/// cos + a sin)`, in f32, in place (Su et al. 2021). They may be views of one buffer, with contiguous heads; `d` is
/// even.
///
/// # Errors
/// When shapes do not match.
pub fn qk_norm_rope(
    q: &Tensor,
    k: &Tensor,
    norm: QkNorm<'_>,
    angles: Option<Angles<'_>>,
    pairs: Pairs,
) -> Result<()> {
    let (batch, tokens, _, width) = q.dims4()?;
    let (key_batch, key_tokens, _, key_width) = k.dims4()?;
    if (batch, tokens, width) != (key_batch, key_tokens, key_width) || !width.is_multiple_of(2) {
        candle_core::bail!("rotation of {:?} and {:?}", q.dims(), k.dims());
    }
    if let Some(Angles { cos, sin }) = angles
        && (cos.dims() != [tokens, width / 2] || sin.dims() != [tokens, width / 2])
    {
        candle_core::bail!(
            "rotation of {:?} by {:?} and {:?}",
            q.dims(),
            cos.dims(),
            sin.dims()
        );
    }
    let of_norm = match norm {
        QkNorm::None => None,
        QkNorm::PerHead { q: of_q, k: of_k, .. } => Some((of_q, of_k, width, width)),
        QkNorm::AcrossHeads { q: of_q, k: of_k, .. } => {
            Some((of_q, of_k, width * q.dim(2)?, width * k.dim(2)?))
        }
    };
    if let Some((of_q, of_k, q_width, k_width)) = of_norm
        && (of_q.dims() != [q_width] || of_k.dims() != [k_width])
    {
        candle_core::bail!(
            "norms of {:?} by {:?} and {:?}",
            q.dims(),
            of_q.dims(),
            of_k.dims()
        );
    }
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return crate::cuda::qk_norm_rope(q, k, norm, angles, pairs);
    }
    let of = |norm: QkNorm<'_>, is_q: bool| match norm {
        QkNorm::None => Ok(None),
        QkNorm::PerHead { q, k, eps } => {
            let weight = if is_q { q } else { k };
            Ok::<_, candle_core::Error>(Some((numbers_of(weight)?, eps as f32, width)))
        }
        QkNorm::AcrossHeads { q, k, eps } => {
            let weight = numbers_of(if is_q { q } else { k })?;
            let group = weight.len();
            Ok(Some((weight, eps as f32, group)))
        }
    };
    on_cpu(q, of(norm, true)?.as_ref(), angles, pairs)?;
    on_cpu(k, of(norm, false)?.as_ref(), angles, pairs)
}

fn numbers_of(x: &Tensor) -> Result<Vec<f32>> {
    x.to_dtype(DType::F32)?.to_vec1()
}

/// `norm` is a weight, its epsilon, and the number of elements normalized together.
fn on_cpu(
    x: &Tensor,
    norm: Option<&(Vec<f32>, f32, usize)>,
    angles: Option<Angles<'_>>,
    pairs: Pairs,
) -> Result<()> {
    let (_, tokens, heads, width) = x.dims4()?;
    if heads == 0 {
        return Ok(());
    }
    let half = width / 2;
    let rotate = |cos: Option<(&[f32], &[f32])>, numbers: &mut [f32]| {
        if let Some((weight, eps, group)) = norm {
            for numbers in numbers.chunks_exact_mut(*group) {
                rms_norm_in_place(numbers, weight, *eps);
            }
        }
        let Some((cos, sin)) = cos else {
            return;
        };
        for head in numbers.chunks_exact_mut(width) {
            match pairs {
                Pairs::Neighbours => rotate_in_place(head, cos, sin),
                Pairs::Halves => {
                    let (first, second) = head.split_at_mut(half);
                    let angles = cos.iter().zip(sin);
                    for ((first, second), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                        let (a, b) = (*first, *second);
                        (*first, *second) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
            }
        }
    };
    match angles {
        Some(Angles { cos, sin }) => with_rows(cos, half, |cos| {
            with_rows(sin, half, |sin| {
                write_rows(x, heads * width, |row, numbers| {
                    let token = row % tokens;
                    rotate(Some((cos.row(token), sin.row(token))), numbers);
                })
            })
        }),
        None => write_rows(x, heads * width, |_, numbers| rotate(None, numbers)),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device};

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// Queries and keys in one buffer `[b, n + 1, (h + g + 1) d]`, with an extra token and head that must not change.
    fn joint(q: &Tensor, k: &Tensor, dtype: DType) -> Result<[Tensor; 3]> {
        let (batch, tokens, heads, width) = q.dims4()?;
        let of_keys = k.dim(2)?;
        let both = Tensor::cat(&[q, k], 2)?.pad_with_zeros(2, 0, 1)?;
        let all = here(&both.pad_with_zeros(1, 1, 0)?.to_dtype(dtype)?);
        assert_eq!(all.dims(), [batch, tokens + 1, heads + of_keys + 1, width]);
        let of_tokens = all.narrow(1, 1, tokens)?;
        Ok([
            of_tokens.narrow(2, 0, heads)?,
            of_tokens.narrow(2, heads, of_keys)?,
            all,
        ])
    }

    fn found(x: &Tensor) -> Result<Tensor> {
        x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()
    }

    /// Reference implementation by candle's operations: `[b, n, h, d]`.
    fn defined(
        x: &Tensor,
        weight: Option<(&Tensor, bool)>,
        angles: Option<&Tensor>,
        pairs: Pairs,
    ) -> Result<Tensor> {
        let (batch, tokens, heads, width) = x.dims4()?;
        let mut x = x.clone();
        if let Some((weight, is_across)) = weight {
            let flat = if is_across { x.flatten_from(2)? } else { x.clone() };
            let square = flat.sqr()?.mean_keepdim(D::Minus1)?;
            x = flat
                .broadcast_div(&(square + 1e-5)?.sqrt()?)?
                .broadcast_mul(weight)?
                .reshape((batch, tokens, heads, width))?;
        }
        let Some(angles) = angles else {
            return Ok(x);
        };
        let split = match pairs {
            Pairs::Neighbours => (batch, tokens, heads, width / 2, 2),
            Pairs::Halves => (batch, tokens, heads, 2, width / 2),
        };
        let axis = if pairs == Pairs::Neighbours { 4 } else { 3 };
        let x = x.reshape(split)?;
        let (a, b) = (x.narrow(axis, 0, 1)?, x.narrow(axis, 1, 1)?);
        let angles = match pairs {
            Pairs::Neighbours => angles.reshape((1, tokens, 1, width / 2, 1))?,
            Pairs::Halves => angles.reshape((1, tokens, 1, 1, width / 2))?,
        };
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], axis)?.reshape((batch, tokens, heads, width))
    }

    #[test]
    fn norms_and_rotations_equal_the_reference() -> Result<()> {
        // The width with a specialized kernel, odd ones, and fewer key heads than query heads.
        for (tokens, heads, of_keys, width) in [(5, 3, 3, 128), (7, 4, 2, 6), (3, 12, 12, 40), (2, 9, 1, 256)]
        {
            let q = random(&[2, tokens, heads, width], 1)?;
            let k = random(&[2, tokens, of_keys, width], 2)?;
            let angles = (random(&[tokens, width / 2], 3)? * 3.0)?;
            let (cos, sin) = (here(&angles.cos()?), here(&angles.sin()?));
            let of_head = [random(&[width], 4)?, random(&[width], 5)?];
            let of_all = [random(&[width * heads], 6)?, random(&[width * of_keys], 7)?];
            for (dtype, tolerance) in [
                (DType::F32, 2e-6),
                (DType::BF16, BF16_OPERATION),
                (DType::F16, 2e-3),
            ] {
                let to = |x: &Tensor| here(x).to_dtype(dtype);
                let (head_q, head_k) = (to(&of_head[0])?, to(&of_head[1])?);
                let (all_q, all_k) = (to(&of_all[0])?, to(&of_all[1])?);
                let per_head = QkNorm::PerHead {
                    q: &head_q,
                    k: &head_k,
                    eps: 1e-5,
                };
                let across = QkNorm::AcrossHeads {
                    q: &all_q,
                    k: &all_k,
                    eps: 1e-5,
                };
                let turned = Some(Angles { cos: &cos, sin: &sin });
                let cases = [
                    (per_head, Some((&of_head, false)), turned),
                    (across, Some((&of_all, true)), turned),
                    (QkNorm::None, None, turned),
                    (per_head, Some((&of_head, false)), None),
                ];
                for (norm, weights, turned) in cases {
                    for pairs in [Pairs::Neighbours, Pairs::Halves] {
                        let [q_, k_, all] = joint(&q, &k, dtype)?;
                        qk_norm_rope(&q_, &k_, norm, turned, pairs)?;
                        let angles = turned.map(|_| &angles);
                        let of = |i: usize| weights.map(|(weights, is_across)| (&weights[i], is_across));
                        assert_close(&found(&q_)?, &defined(&q, of(0), angles, pairs)?, tolerance)?;
                        assert_close(&found(&k_)?, &defined(&k, of(1), angles, pairs)?, tolerance)?;
                        // The rest of the buffer is unchanged.
                        let rest = found(&all)?.narrow(2, heads + of_keys, 1)?;
                        assert_eq!(rest.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn queries_or_keys_alone_are_normalized_as_with_the_others() -> Result<()> {
        for (dtype, width) in [(DType::F32, 6), (DType::BF16, 128)] {
            let to = |x: &Tensor| here(x).to_dtype(dtype);
            let weights = [to(&random(&[width], 4)?)?, to(&random(&[width], 5)?)?];
            let norm = QkNorm::PerHead {
                q: &weights[0],
                k: &weights[1],
                eps: 1e-5,
            };
            let both = || -> Result<[Tensor; 2]> {
                let q = to(&random(&[2, 5, 4, width], 1)?)?;
                Ok([q, to(&random(&[2, 5, 2, width], 2)?)?])
            };
            let ([q, k], [alone_q, alone_k]) = (both()?, both()?);
            qk_norm_rope(&q, &k, norm, None, Pairs::Halves)?;
            qk_norm_rope(&alone_q, &alone_k.narrow(2, 0, 0)?, norm, None, Pairs::Halves)?;
            qk_norm_rope(&alone_q.narrow(2, 0, 0)?, &alone_k, norm, None, Pairs::Halves)?;
            for (one, other) in [(q, alone_q), (k, alone_k)] {
                assert_close(&found(&one)?, &found(&other)?, 0.0)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_rotation_by_90_degrees_swaps_the_pair() -> Result<()> {
        let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu)?.reshape((1, 1, 1, 4))?;
        let cos = here(&Tensor::new(&[[0f32, 1.0]], &Device::Cpu)?);
        let sin = here(&Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?);
        let turned = Some(Angles { cos: &cos, sin: &sin });
        for (pairs, expected) in [
            (Pairs::Neighbours, [-2.0, 1.0, 3.0, 4.0]),
            (Pairs::Halves, [-3.0, 2.0, 1.0, 4.0]),
        ] {
            let (q, k) = (here(&x).copy()?, here(&x).copy()?);
            qk_norm_rope(&q, &k, QkNorm::None, turned, pairs)?;
            for x in [q, k] {
                assert_eq!(x.flatten_all()?.to_vec1::<f32>()?, expected);
            }
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let x = here(&random(&[1, 3, 2, 8], 1)?);
        let angles = here(&random(&[3, 3], 2)?);
        let wrong = Some(Angles {
            cos: &angles,
            sin: &angles,
        });
        assert!(qk_norm_rope(&x, &x.copy()?, QkNorm::None, wrong, Pairs::Halves).is_err());
        let weight = here(&random(&[7], 3)?);
        let norm = QkNorm::PerHead {
            q: &weight,
            k: &weight,
            eps: 1e-6,
        };
        assert!(qk_norm_rope(&x, &x.copy()?, norm, None, Pairs::Halves).is_err());
        Ok(())
    }
}
