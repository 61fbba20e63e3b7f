//! A computation whose result is known: a card that cannot do it is of no use, whatever it answers otherwise.

use candle_core::{Device, Tensor};

/// Numbers that it adds up.
const COUNT: u32 = 256;

/// Twice the sum of 0 to 255.
const EXPECTED: f32 = 65_280.0;

/// Computes on the device, reads the result back, and compares it. Nothing of it stays on the card.
pub(super) fn sing(device: &Device) -> Result<(), String> {
    let sum = || -> candle_core::Result<f32> {
        let numbers = Tensor::arange(0_u32, COUNT, device)?.to_dtype(candle_core::DType::F32)?;
        (&numbers + &numbers)?.sum_all()?.to_scalar()
    };
    match sum() {
        Ok(EXPECTED) => Ok(()),
        Ok(other) => Err(format!("it computed {other} where {EXPECTED} is right")),
        Err(error) => Err(error.to_string()),
    }
}
