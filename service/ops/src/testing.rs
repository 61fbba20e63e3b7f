//! What the tests of every operation need.

use candle_core::{Device, Result, Tensor};

/// Numbers over -1 to 1 that depend on the seed alone.
pub(crate) fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

/// Asserts shapes, and that the distance is at most `tolerance` of the expected length.
pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(found.dims(), expected.dims());
    let found = found.flatten_all()?.to_vec1::<f32>()?;
    let expected = expected.flatten_all()?.to_vec1::<f32>()?;
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let distance = square(
        &mut found
            .iter()
            .zip(&expected)
            .map(|(f, e)| f64::from(*f) - f64::from(*e)),
    );
    let length = square(&mut expected.iter().map(|e| f64::from(*e)));
    let relative = (distance / length).sqrt();
    assert!(relative <= tolerance, "relative distance {relative:e}");
    Ok(())
}
