//! Sinusoidal embedding of scalars, such as timesteps.

use candle_core::{DType, Device, Result, Tensor};

/// `Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)`: cosines, then sines, `[values, width]`, of
/// angles `value * 10000^(-i / (width / 2))`, computed in f32. Angles are rounded to f32 as in the references: at
/// 3,500 (a guidance of 3.5) that is an error of 1e-4. Frequencies are correctly rounded; torch's last bit depends on
/// the machine, which changes a whole model's output by 1.5e-5.
///
/// # Errors
/// Errors of the device.
pub(crate) fn sinusoids(values: &[f32], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    sinusoids_of(values, 1.0, width, (dtype, device))
}

/// [`sinusoids`] of values that are multiplied by `scale` after the frequency, as `Timesteps(.., scale=scale)` does: where it
/// rounds, it rounds otherwise than for values that were multiplied before.
///
/// # Errors
/// Errors of the device.
pub(crate) fn sinusoids_of(
    values: &[f32],
    scale: f32,
    width: usize,
    (dtype, device): (DType, &Device),
) -> Result<Tensor> {
    let half = width / 2;
    let minus_ln_of_period = -(10_000f64.ln()) as f32;
    let frequencies: Vec<f32> = (0..half)
        .map(|i| f64::from(minus_ln_of_period * i as f32 / half as f32).exp() as f32)
        .collect();
    let numbers: Vec<f32> = values
        .iter()
        .flat_map(|value| {
            let angles = frequencies
                .iter()
                .map(move |frequency| scale * (value * frequency));
            angles.clone().map(f32::cos).chain(angles.map(f32::sin))
        })
        .collect();
    Tensor::from_vec(numbers, (values.len(), width), &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}

/// [`sinusoids`] with angles in f64, as Wan's authors compute them.
///
/// # Errors
/// Errors of the device.
pub(crate) fn precise_sinusoids(
    values: &[f32],
    width: usize,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let half = width / 2;
    let angles = |value: &f32| -> Vec<f64> {
        let angle = |i: usize| f64::from(*value) * 10_000f64.powf(-(i as f64) / half as f64);
        (0..half).map(angle).collect()
    };
    let of_value = |value: &f32| {
        let angles = angles(value);
        let cosines = angles.iter().map(|angle| angle.cos() as f32);
        let sines = angles.iter().map(|angle| angle.sin() as f32);
        cosines.chain(sines).collect::<Vec<f32>>()
    };
    let numbers: Vec<f32> = values.iter().flat_map(of_value).collect();
    Tensor::from_vec(numbers, (values.len(), width), &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}
