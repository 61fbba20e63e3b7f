//! Wan's autoencoders of films on a card: memory against the prediction, and times.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::wan::{
    Chunking, FrameDecoding, WanVaeConfig, WanVaeDecoder, WanVaeEncoder, decode_ladder, encode_ladder,
    frames_to_rgb8,
};

use crate::card;
use crate::device::pool::peak_of;

/// An autoencoder of full size with random weights of about unit gain, in bf16.
fn component(config: &WanVaeConfig, device: &Device) -> ComponentTensors {
    let random = |(name, shape): (String, Vec<usize>)| {
        let (gain, centre) = match shape.len() {
            1 => (0.1, 0.0),
            _ if name.ends_with("gamma") => (0.1, 1.0),
            _ => ((shape[1..].iter().product::<usize>() as f32).powf(-0.5), 0.0),
        };
        let tensor = Tensor::randn(centre, gain, shape, device).expect("numbers");
        (name, tensor.to_dtype(DType::BF16).expect("numbers in bf16"))
    };
    let tensors = config.tensor_shapes().into_iter().map(random);
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

fn decode(decoder: &WanVaeDecoder, latents: &Tensor, chunking: Chunking) -> Result<(), StageError> {
    let how = FrameDecoding {
        chunking,
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
    for config in [WanVaeConfig::default(), WanVaeConfig::wan_2_2()] {
        let tensors = component(&config, device);
        let decoder = WanVaeDecoder::new(&config, &tensors).expect("a decoder");
        let encoder = WanVaeEncoder::new(&config, &tensors).expect("an encoder");
        let (width, height) = (640, 384);
        let (h, w) = config.latent_sides(width as u32, height as u32);
        for length in [1, 3] {
            let latents = Tensor::randn(0f32, 1.0, (1, config.z_dim, length, h, w), device).expect("latents");
            decode(&decoder, &latents, Chunking::Whole).expect("frames"); // modules and workspaces
            for (chunking, rung) in decode_ladder(&config, (h, w), length, DType::BF16) {
                let (taken, done) = peak_of(device, || decode(&decoder, &latents, chunking));
                done.expect("frames");
                assert_predicted(&format!("decode {length}, {}", rung.label), rung.scratch.0, taken);
            }
            let frames = config.frames(length);
            let film = vec![127; frames * height * width * 3];
            for (chunking, rung) in encode_ladder(&config, (h, w), frames, DType::BF16) {
                let encode = || encoder.encode_rgb8(&film, frames, (width, height), chunking, &|| false);
                let (taken, moments) = peak_of(device, encode);
                moments.expect("moments");
                assert_predicted(&format!("encode {frames}, {}", rung.label), rung.scratch.0, taken);
            }
        }
    }
}

/// Whole films, and their frames as bytes in host memory. For comparison: tests/gpu/wan_decode.py.
///
/// `MOORED_TEST_DEVICE=cuda card wan_vae --ignored --nocapture --test-threads=1`
#[test]
#[ignore = "prints times"]
fn duration_of_a_film() {
    let Some(device) = card() else { return };
    for (config, width, height, frames) in [
        (WanVaeConfig::wan_2_2(), 1280, 704, 121),
        (WanVaeConfig::default(), 832, 480, 81),
    ] {
        let decoder = WanVaeDecoder::new(&config, &component(&config, device)).expect("a decoder");
        let ((h, w), length) = (config.latent_sides(width, height), config.latents(frames));
        let latents = Tensor::randn(0f32, 1.0, (1, config.z_dim, length, h, w), device).expect("latents");
        for chunking in [
            Chunking::Strips { bytes: 512 << 20 },
            Chunking::Strips { bytes: 128 << 20 },
            Chunking::Whole,
            Chunking::Strips { bytes: 32 << 20 },
            Chunking::Strips { bytes: 16 << 20 },
            Chunking::Strips { bytes: 4 << 20 },
        ] {
            let begin = latents.narrow(2, 0, 2).expect("latents");
            decode(&decoder, &begin, chunking).expect("frames"); // plans, modules and workspaces
            let film = || {
                device.synchronize().expect("a device that answers");
                let start = Instant::now();
                decode(&decoder, &latents, chunking).expect("frames");
                start.elapsed().as_secs_f64()
            };
            let (peak, first) = peak_of(device, film);
            let best = first.min(film());
            let label = chunking.label();
            println!(
                "{width}x{height}, {frames} frames, {label}: {best:.2} s, peak {} MiB",
                peak >> 20
            );
        }
    }
}
