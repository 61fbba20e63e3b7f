//! A computation with a known result, by which a card is checked for health.

use candle_core::{DType, Device, Tensor};

/// Side of the matrix of consecutive numbers that is multiplied by twos, in f32.
const SIDE: usize = 16;

/// Side of the matrices of ones: their products are exact in any computation dtype.
const ROWS: usize = 32;

/// Computes products in f32 and in the computation dtype (which use different kernels) on the device, copies the
/// results back, and compares each number. Frees everything. Uses no kernel of the tensor library, which the driver
/// would have to compile.
pub(super) fn compute(device: &Device, dtype: DType) -> Result<(), String> {
    let numbers: Vec<f32> = (0..SIDE * SIDE).map(|number| number as f32).collect();
    let right = |row: usize| {
        (0..SIDE)
            .map(|column| 2.0 * numbers[row * SIDE + column])
            .sum::<f32>()
    };
    let counted = || -> candle_core::Result<Vec<Vec<f32>>> {
        let numbers = Tensor::from_slice(&numbers, (SIDE, SIDE), &Device::Cpu)?;
        let twos = Tensor::full(2.0_f32, (SIDE, SIDE), &Device::Cpu)?;
        product(&numbers, &twos, device)
    };
    expect(counted(), SIDE, right)?;
    let of_ones = || -> candle_core::Result<Vec<Vec<f32>>> {
        let ones = Tensor::ones((ROWS, ROWS), dtype, &Device::Cpu)?;
        product(&ones, &ones, device)
    };
    expect(of_ones(), ROWS, |_| ROWS as f32)
}

/// The product of two host matrices, computed on the device.
fn product(left: &Tensor, right: &Tensor, device: &Device) -> candle_core::Result<Vec<Vec<f32>>> {
    let product = left.to_device(device)?.matmul(&right.to_device(device)?)?;
    product.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2()
}

/// Checks that the result is a square of this side with the expected value in each position.
fn expect(
    computed: candle_core::Result<Vec<Vec<f32>>>,
    side: usize,
    right: impl Fn(usize) -> f32,
) -> Result<(), String> {
    let rows = computed.map_err(|error| error.to_string())?;
    if rows.len() != side || rows.iter().any(|row| row.len() != side) {
        return Err(format!("it computed {} rows where {side} are right", rows.len()));
    }
    for (number, row) in rows.iter().enumerate() {
        let right = right(number);
        if let Some(other) = row.iter().find(|other| **other != right) {
            return Err(format!("it computed {other} where {right} is right"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_canary_passes_in_every_dtype_and_detects_one_wrong_number() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            compute(&Device::Cpu, dtype).unwrap();
        }
        let right = |row: usize| row as f32;
        let rows = vec![vec![0.0, 0.0], vec![1.0, 1.0]];
        assert_eq!(expect(Ok(rows.clone()), 2, right), Ok(()));
        for (row, column) in [(0, 1), (1, 0)] {
            let mut wrong = rows.clone();
            wrong[row][column] += 0.5;
            assert!(expect(Ok(wrong), 2, right).unwrap_err().contains("is right"));
        }
        let mut short = rows;
        short[1].pop();
        assert!(expect(Ok(short), 2, right).is_err(), "a number is missing");
        assert!(expect(Ok(vec![vec![f32::NAN]]), 1, right).is_err());
    }
}
