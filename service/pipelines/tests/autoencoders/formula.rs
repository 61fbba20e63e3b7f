//! Weights and inputs as functions of a name and an index, as in fixtures/make_hunyuan_vae_fixtures.py.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use pipelines::autoencoders::hunyuan::HunyuanVaeConfig;
use pipelines::autoencoders::mmaudio::MmAudioConfig;
use pipelines::autoencoders::mmaudio::vocoder::VocoderConfig;
use pipelines::autoencoders::wan::WanVaeConfig;

/// Numbers of unit variance: splitmix64 of the name's FNV-1a hash and the index, uniform.
pub(crate) fn numbers(name: &str, count: usize) -> Vec<f64> {
    let hash = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    (1..=count as u64)
        .map(|index| {
            let z = index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed);
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let unit = ((z ^ (z >> 31)) >> 40) as f64 / f64::from(1 << 24);
            (2.0 * unit - 1.0) * 1.75
        })
        .collect()
}

pub(crate) fn tensor(name: &str, shape: &[usize], gain: f64, centre: f64) -> Tensor {
    let numbers = numbers(name, shape.iter().product());
    let numbers: Vec<f32> = numbers.iter().map(|n| (centre + gain * n) as f32).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).expect("a tensor")
}

/// An autoencoder of HunyuanVideo's kind with everything randomised.
pub(crate) fn weights(config: &HunyuanVaeConfig) -> HashMap<String, Tensor> {
    randomised(config.tensor_shapes(), |_| 1.0)
}

/// One of Wan's kinds: attention is not uniform, and frames are hardly clamped.
pub(crate) fn weights_of_wan(config: &WanVaeConfig) -> HashMap<String, Tensor> {
    randomised(config.tensor_shapes(), |name| match name {
        _ if name.contains("to_qkv") => 3.0,
        _ if name.starts_with("decoder.conv_out") => 0.25,
        _ => 1.0,
    })
}

pub(crate) fn randomised(
    shapes: Vec<(String, Vec<usize>)>,
    times: impl Fn(&str) -> f64,
) -> HashMap<String, Tensor> {
    let weight = |(name, shape): (String, Vec<usize>)| {
        let (gain, centre) = match shape.len() {
            1 if name.ends_with("bias") => (0.2, 0.0),
            _ if shape.len() == 1 || name.ends_with("gamma") => (0.3, 1.0),
            _ => ((shape[1..].iter().product::<usize>() as f64).powf(-0.5), 0.0),
        };
        let tensor = tensor(&name, &shape, gain * times(&name), centre);
        (name, tensor)
    };
    shapes.into_iter().map(weight).collect()
}

/// Latents of a film.
pub(crate) fn latents(name: &str, channels: usize, length: usize, (h, w): (usize, usize)) -> Tensor {
    tensor(&format!("latents.{name}"), &[1, channels, length, h, w], 1.0, 0.0)
}

/// 8-bit frames of a film.
pub(crate) fn film(count: usize, (h, w): (usize, usize)) -> Vec<u8> {
    let levels = numbers(&format!("film.{count}"), count * 8 * h * 8 * w * 3);
    let byte = |number: f64| ((number / 3.5 + 0.5) * 255.0).floor() as u8;
    levels.into_iter().map(byte).collect()
}

/// Every frame of `[n, h, w, c]` as 16 sums of its numbers, weighted by other ones.
pub(crate) fn projected(frames: &Tensor) -> Tensor {
    const SUMS: usize = 16;
    let count = frames.dim(0).expect("frames");
    let flat = frames
        .flatten_all()
        .expect("numbers")
        .to_vec1::<f32>()
        .expect("numbers");
    let of_frame = flat.len() / count;
    let weights: Vec<Vec<f64>> = (0..SUMS)
        .map(|i| numbers(&format!("sum.{i}"), of_frame))
        .collect();
    let sums = flat.chunks(of_frame).flat_map(|frame| {
        weights.iter().map(move |weights| {
            let sum: f64 = frame.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum();
            (sum / (of_frame as f64).sqrt()) as f32
        })
    });
    Tensor::from_vec(sums.collect::<Vec<_>>(), (count, SUMS), &Device::Cpu).expect("sums")
}

/// The weights of MMAudio's autoencoder as the authors store them, with everything randomised.
pub(crate) fn mmaudio_weights(config: &MmAudioConfig) -> HashMap<String, Tensor> {
    let weight = |(name, shape): (String, Vec<usize>)| {
        let numbers = match name.as_str() {
            "decoder.learnable_gain" => tensor(&name, &shape, 0.3, 0.2),
            "data_mean" => tensor(&name, &shape, 0.5, -1.8),
            "data_std" => tensor(&name, &shape, 0.2, 0.9),
            _ => tensor(&name, &shape, 0.7, 0.1),
        };
        (name, numbers)
    };
    config.tensor_shapes().into_iter().map(weight).collect()
}

/// The weights of its vocoder as the authors store them.
pub(crate) fn vocoder_weights(config: &VocoderConfig) -> HashMap<String, Tensor> {
    let weight = |(name, shape): (String, Vec<usize>)| {
        let (gain, centre) = match name.rsplit('.').next() {
            Some("weight_g") => (0.15, 0.5),
            Some("weight_v") => (1.0, 0.1),
            Some("bias") => (0.2, 0.0),
            _ => (0.4, 0.1),
        };
        let tensor = tensor(&name, &shape, gain, centre);
        (name, tensor)
    };
    config.tensor_shapes().into_iter().map(weight).collect()
}
