//! Gated residuals.

use candle_core::{Result, Tensor};

use crate::loops::gated_row;
use crate::rows::{map_rows, on_cpu, with_numbers};

/// `x + gate * y`: `x` and `y` are `[b, n, d]`, `gate` is `[b, d]`.
///
/// # Errors
/// When shapes do not fit.
pub fn gated_add(x: &Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let (batch, tokens, width) = x.dims3()?;
    if y.dims() != x.dims() || gate.dims() != [batch, width] {
        candle_core::bail!("{:?} plus {:?} gated by {:?}", x.dims(), y.dims(), gate.dims());
    }
    if !on_cpu(x) {
        return composed(x, y, gate);
    }
    with_numbers(y, |y| {
        with_numbers(gate, |gate| {
            map_rows(x, |row_index, row, out| {
                let gate = &gate[(row_index / tokens) * width..][..width];
                let y = &y[row_index * width..][..width];
                gated_row(row, y, gate, out);
            })
        })
    })
}

fn composed(x: &Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    x + y.broadcast_mul(&gate.unsqueeze(1)?)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_defined, random};

    #[test]
    fn the_gate_is_per_batch() -> Result<()> {
        let (x, y, gate) = (
            random(&[2, 5, 9], 1)?,
            random(&[2, 5, 9], 2)?,
            random(&[2, 9], 3)?,
        );
        let expected = composed(&x, &y, &gate)?;
        assert_defined(
            &[&x, &y, &gate],
            |t| gated_add(&t[0], &t[1], &t[2]),
            &expected,
            1e-6,
        )
    }
}
