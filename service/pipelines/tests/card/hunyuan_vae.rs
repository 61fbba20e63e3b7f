//! HunyuanVideo's autoencoder of films on a card: memory against the prediction, and times.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::hunyuan::{
    Chunking, FrameDecoding, HunyuanVaeConfig, HunyuanVaeDecoder, HunyuanVaeEncoder, decode_ladder,
    encode_ladder, frames_to_rgb8,
};

use crate::card;
use crate::device::pool::peak_of;

/// An autoencoder of full size with random weights of about unit gain, in bf16.
fn component(config: &HunyuanVaeConfig, device: &Device) -> ComponentTensors {
    let random = |(name, shape): (String, Vec<usize>)| {
        let (gain, centre) = match shape.len() {
            1 if name.ends_with("bias") => (0.1, 0.0),
            1 => (0.1, 1.0),
            _ => ((shape[1..].iter().product::<usize>() as f32).powf(-0.5), 0.0),
        };
        let tensor = Tensor::randn(centre, gain, shape, device).expect("numbers");
        (name, tensor.to_dtype(DType::BF16).expect("numbers in bf16"))
    };
    let tensors = config.tensor_shapes().into_iter().map(random);
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

fn decode(decoder: &HunyuanVaeDecoder, latents: &Tensor, chunking: Chunking) -> Result<(), StageError> {
    let how = FrameDecoding {
        chunking,
        frames_at_a_time: 16,
        factor: 1.0,
        cancelled: &|| false,
    };
    decoder.decode_frames(latents, &how, &mut |_, frames| frames_to_rgb8(&frames).map(drop))
}

/// Prints both, and asserts that the prediction is close to the measurement.
fn assert_predicted(what: &str, predicted: u64, taken: u64) {
    let ratio = predicted as f64 / taken as f64;
    let (predicted_mib, taken_mib) = (predicted >> 20, taken >> 20);
    println!("{what}: {predicted_mib} MiB predicted, {taken_mib} MiB taken ({ratio:.2})");
    assert!(
        (0.9..1.35).contains(&ratio) || predicted.abs_diff(taken) < 48 << 20,
        "{what}: {ratio:.2}"
    );
}

#[test]
fn every_rung_allocates_the_predicted_bytes() {
    let Some(device) = card() else { return };
    let config = HunyuanVaeConfig::default();
    let tensors = component(&config, device);
    let decoder = HunyuanVaeDecoder::new(&config, &tensors).expect("a decoder");
    let encoder = HunyuanVaeEncoder::new(&config, &tensors).expect("an encoder");
    let (h, w) = (40, 48);
    for length in [1, 6] {
        let latents = Tensor::randn(0f32, 1.0, (1, 16, length, h, w), device).expect("latents");
        decode(&decoder, &latents, Chunking::Whole).expect("frames"); // modules and workspaces
        for (chunking, rung) in decode_ladder(&config, (h, w), length, DType::BF16) {
            let (taken, done) = peak_of(device, || decode(&decoder, &latents, chunking));
            done.expect("frames");
            assert_predicted(&format!("decode {length}, {}", rung.label), rung.scratch.0, taken);
        }
        let frames = config.frames(length);
        let film = vec![127; frames * h * 8 * w * 8 * 3];
        for (chunking, rung) in encode_ladder(&config, (h, w), frames, DType::BF16) {
            let encode = || encoder.encode_rgb8(&film, frames, (w * 8, h * 8), chunking, &|| false);
            let (taken, moments) = peak_of(device, encode);
            moments.expect("moments");
            assert_predicted(&format!("encode {frames}, {}", rung.label), rung.scratch.0, taken);
        }
    }
}

/// One tile of five latents at 832x480, and the frames as bytes in host memory. For comparison: tests/gpu/film_decode.py.
///
/// `MOORED_TEST_DEVICE=cuda card hunyuan_vae --ignored --nocapture --test-threads=1`
#[test]
#[ignore = "prints times"]
fn duration_of_a_tile() {
    let Some(device) = card() else { return };
    let config = HunyuanVaeConfig::default();
    let decoder = HunyuanVaeDecoder::new(&config, &component(&config, device)).expect("a decoder");
    for (h, w) in [(60, 104), (80, 80), (90, 160)] {
        let latents = Tensor::randn(0f32, 1.0, (1, 16, 5, h, w), device).expect("latents");
        for chunking in [
            Chunking::Whole,
            Chunking::Strips { bytes: 256 << 20 },
            Chunking::Strips { bytes: 128 << 20 },
            Chunking::Strips { bytes: 64 << 20 },
            Chunking::Strips { bytes: 32 << 20 },
            Chunking::Strips { bytes: 8 << 20 },
        ] {
            let tile = || first_tile(&decoder, &latents, chunking);
            tile(); // plans, modules and workspaces
            let (peak, ()) = peak_of(device, tile);
            let times: Vec<f64> = (0..5)
                .map(|_| {
                    device.synchronize().expect("a device that answers");
                    let start = Instant::now();
                    tile();
                    start.elapsed().as_secs_f64() * 1e3
                })
                .collect();
            let best = times.iter().copied().fold(f64::INFINITY, f64::min);
            let (width, height, label) = (8 * w, 8 * h, chunking.label());
            println!(
                "{width}x{height} {label}: best {best:.1} ms of {times:.1?}, peak {} MiB",
                peak >> 20
            );
        }
    }
}

/// Decodes the first tile of a film, and ends there.
fn first_tile(decoder: &HunyuanVaeDecoder, latents: &Tensor, chunking: Chunking) {
    let how = FrameDecoding {
        chunking,
        frames_at_a_time: 16,
        factor: 1.0,
        cancelled: &|| false,
    };
    let ended = decoder.decode_frames(latents, &how, &mut |_, frames| {
        frames_to_rgb8(&frames)?;
        Err(StageError::Cancelled)
    });
    assert!(matches!(ended, Err(StageError::Cancelled)), "{ended:?}");
}
