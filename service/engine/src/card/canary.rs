//! A computation whose result is known: a card that cannot do it is of no use, whatever it answers otherwise.

use candle_core::{DType, Device, Tensor};

/// Rows and columns of the numbers from 0 on that it multiplies by twos, in f32.
const SIDE: usize = 16;

/// Rows of the matrices of ones that it multiplies: their products are exact in any dtype that pipelines compute in.
const ROWS: usize = 32;

/// Computes on the device, reads the results back, and compares each number: a product in f32, and one in the dtype that
/// pipelines compute in, since those are different kernels. Nothing of it stays on the card. No kernel of the tensor library
/// is used: the driver would compile those before the first picture.
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

/// The product of two matrices of the system's memory, computed on the device.
fn product(left: &Tensor, right: &Tensor, device: &Device) -> candle_core::Result<Vec<Vec<f32>>> {
    let product = left.to_device(device)?.matmul(&right.to_device(device)?)?;
    product.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2()
}

/// Whether it is a square of this side, with the right number in each row's places.
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
    fn every_dtype_computes_it_and_one_wrong_number_is_seen() {
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
