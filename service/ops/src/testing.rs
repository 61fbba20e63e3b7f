//! What the tests of every operation need.

use candle_core::{DType, Device, Result, Tensor};

#[path = "../tests/device/mod.rs"]
mod device;

pub(crate) use device::{BF16_OPERATION, here, test_device, tolerances};

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

/// Asserts shapes, and that the distance is at most `tolerance` of the expected length, or what the device of the
/// tests is allowed if that is more.
pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(found.dims(), expected.dims());
    let tolerance = match test_device().is_cpu() {
        true => tolerance,
        false => tolerance.max(tolerances().operation),
    };
    let numbers = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (found, expected) = (numbers(found)?, numbers(expected)?);
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

/// Asserts that an operation gives on the device of the tests, in f32 and in bf16, what `expected` is: its definition,
/// computed from the same inputs on the CPU in f32.
pub(crate) fn assert_defined(
    inputs: &[&Tensor],
    operation: impl Fn(&[Tensor]) -> Result<Tensor>,
    expected: &Tensor,
    tolerance: f64,
) -> Result<()> {
    let exact: Vec<Tensor> = inputs.iter().map(|input| here(input)).collect();
    assert_close(&operation(&exact)?, expected, tolerance)?;
    let narrow = exact.iter().map(|input| input.to_dtype(DType::BF16));
    let found = operation(&narrow.collect::<Result<Vec<_>>>()?)?;
    assert_eq!(found.dtype(), DType::BF16);
    assert_close(&found, expected, BF16_OPERATION)
}
