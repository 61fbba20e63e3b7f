//! Sinusoidal embedding of numbers, which timesteps are told to a transformer by.

use candle_core::{DType, Device, Result, Tensor};

/// `Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)`: cosines, then sines, `[values, width]`, of angles
/// `value * 10000^(-i / (width / 2))`, computed in f32. The angles are rounded to f32 as the references round them: at 3,500
/// (a guidance of 3.5) that is 1e-4. The frequencies are rounded correctly; torch's depend on the machine in their last
/// bit, which moves a whole model's output by 1.5e-5.
///
/// # Errors
/// Those of the device.
pub(crate) fn sinusoids(values: &[f32], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let half = width / 2;
    let minus_ln_of_period = -(10_000f64.ln()) as f32;
    let frequencies: Vec<f32> = (0..half)
        .map(|i| f64::from(minus_ln_of_period * i as f32 / half as f32).exp() as f32)
        .collect();
    let numbers: Vec<f32> = values
        .iter()
        .flat_map(|value| {
            let cosines = frequencies.iter().map(move |frequency| (value * frequency).cos());
            cosines.chain(frequencies.iter().map(move |frequency| (value * frequency).sin()))
        })
        .collect();
    Tensor::from_vec(numbers, (values.len(), width), &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}
