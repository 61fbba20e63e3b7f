//! A computation whose result is known: a card that cannot do it is of no use, whatever it answers otherwise.

use candle_core::{DType, Device, Tensor};

/// Numbers that it adds up.
const COUNT: u32 = 256;

/// Twice the sum of 0 to 255.
const EXPECTED: f32 = 65_280.0;

/// Rows of the matrices that it multiplies: their products are exact in any dtype that pipelines compute in.
const ROWS: usize = 32;

/// Computes on the device, reads the results back, and compares them: sums in f32, and a product in the dtype that
/// pipelines compute in, since that is another library's work. Nothing of it stays on the card.
pub(super) fn sing(device: &Device, dtype: DType) -> Result<(), String> {
    let sum = || -> candle_core::Result<f32> {
        let numbers = Tensor::arange(0_u32, COUNT, device)?.to_dtype(DType::F32)?;
        (&numbers + &numbers)?.sum_all()?.to_scalar()
    };
    let product = || -> candle_core::Result<f32> {
        let ones = Tensor::ones((ROWS, ROWS), dtype, device)?;
        ones.matmul(&ones)?.to_dtype(DType::F32)?.sum_all()?.to_scalar()
    };
    expect(sum(), EXPECTED)?;
    expect(product(), (ROWS * ROWS * ROWS) as f32)
}

fn expect(computed: candle_core::Result<f32>, right: f32) -> Result<(), String> {
    match computed {
        Ok(other) if other == right => Ok(()),
        Ok(other) => Err(format!("it computed {other} where {right} is right")),
        Err(error) => Err(error.to_string()),
    }
}
