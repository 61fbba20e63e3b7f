//! MMAudio's autoencoder of sound and its vocoder against diffusers (fixtures/make_mmaudio_fixtures.py).

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::mmaudio::vocoder::{Vocoder, VocoderConfig, vocode_scratch};
use pipelines::autoencoders::mmaudio::{MmAudioConfig, MmAudioDecoder, decode_scratch};
use serde::Deserialize;

use crate::device::{BF16_COMPONENT, here, test_device};
use crate::formula::{mmaudio_weights, tensor, vocoder_weights};
use crate::numbers::{distance, json, resident, tensors};
use crate::shapes_asked::{asked, words};
use crate::{alone, on_two_threads, settled_peak, together};

type Tensors = HashMap<String, Tensor>;

/// Names of the fixtures' configurations.
const NAMES: [&str; 2] = ["published", "few"];

/// f32 against the reference, whose norms are f32 too.
fn tolerance() -> f64 {
    if test_device().is_cpu() { 5e-6 } else { 1e-5 }
}

fn expected() -> Tensors {
    tensors("mmaudio-tiny/expected.safetensors")
}

#[derive(Deserialize)]
struct Configs {
    vae: HashMap<String, MmAudioConfig>,
    vocoder: HashMap<String, VocoderConfig>,
}

fn vae_config(name: &str) -> MmAudioConfig {
    let mut all: Configs = json("mmaudio-tiny/configs.json");
    all.vae.remove(name).expect("a configuration")
}

fn vocoder_config(name: &str) -> VocoderConfig {
    let mut all: Configs = json("mmaudio-tiny/configs.json");
    all.vocoder.remove(name).expect("a configuration")
}

fn decoder(config: &MmAudioConfig) -> MmAudioDecoder {
    MmAudioDecoder::new(config, &resident(&mmaudio_weights(config))).expect("a decoder")
}

fn vocoder(config: &VocoderConfig) -> Vocoder {
    Vocoder::new(config, &resident(&vocoder_weights(config))).expect("a vocoder")
}

fn latents(config: &MmAudioConfig, frames: usize) -> Tensor {
    let shape = [1, frames, config.latent_channels];
    here(&tensor(&format!("latents.{frames}"), &shape, 1.0, 0.0))
}

fn mel(config: &VocoderConfig, frames: usize) -> Tensor {
    here(&tensor(
        &format!("mel.{frames}"),
        &[frames, config.num_mels],
        1.0,
        0.0,
    ))
}

/// The lengths in the names of the expected tensors.
fn lengths(expected: &Tensors, what: &str, name: &str) -> Vec<usize> {
    let prefix = format!("{what}.{name}.");
    let length = |key: &String| key.strip_prefix(&prefix)?.parse().ok();
    let mut lengths: Vec<usize> = expected.keys().filter_map(length).collect();
    lengths.sort_unstable();
    assert!(lengths.len() > 1, "{what} {name}");
    lengths
}

fn decode(decoder: &MmAudioDecoder, latents: &Tensor) -> Tensor {
    decoder.decode(latents, &|| false).expect("a spectrogram")
}

/// A track `[samples]`.
fn vocode(vocoder: &Vocoder, mel: &Tensor) -> Tensor {
    let track = vocoder.vocode(mel, &|| false).expect("a track");
    track.squeeze(1).unwrap()
}

#[test]
fn latents_of_every_length_become_the_spectrograms_of_diffusers() {
    let _together = together();
    let expected = expected();
    for name in NAMES {
        let config = vae_config(name);
        let decoder = decoder(&config);
        for frames in lengths(&expected, "vae", name) {
            let found = decode(&decoder, &latents(&config, frames));
            assert_eq!(found.dims(), [2 * frames, config.mel_bins]);
            let error = distance(&found, &expected[&format!("vae.{name}.{frames}")]);
            println!("decode {name} {frames}: {error:.2e}");
            assert!(error < tolerance(), "{name} {frames}: {error:e}");
        }
    }
}

#[test]
fn spectrograms_of_every_length_become_the_tracks_of_the_reference() {
    let _together = together();
    let expected = expected();
    for name in NAMES {
        let config = vocoder_config(name);
        let vocoder = vocoder(&config);
        for frames in lengths(&expected, "vocoder", name) {
            let found = vocode(&vocoder, &mel(&config, frames));
            assert_eq!(found.dims(), [config.hop() * frames]);
            let error = distance(&found, &expected[&format!("vocoder.{name}.{frames}")]);
            println!("vocode {name} {frames}: {error:.2e}");
            assert!(error < tolerance(), "{name} {frames}: {error:e}");
        }
    }
}

#[test]
fn normalised_and_folded_weights_give_the_same() {
    let _together = together();
    let config = vae_config("few");
    let mut tensors = mmaudio_weights(&config);
    for (name, weight) in &mut tensors {
        if !name.ends_with("weight") {
            continue;
        }
        let shape = weight.dims().to_vec();
        let row: usize = shape[1..].iter().product();
        let lengths = weight
            .flatten_from(1)
            .unwrap()
            .sqr()
            .unwrap()
            .sum_keepdim(1)
            .unwrap();
        let divisors = (lengths.sqrt().unwrap() + 1e-4 * (row as f64).sqrt()).unwrap();
        let divisors = divisors.reshape((shape[0], 1, 1)).unwrap();
        *weight = weight.broadcast_div(&divisors).unwrap();
    }
    let normalised = MmAudioConfig {
        has_normalised_weights: true,
        ..config.clone()
    };
    let normalised = MmAudioDecoder::new(&normalised, &resident(&tensors)).expect("a decoder");
    let latents = latents(&config, 8);
    let raw = decode(&decoder(&config), &latents);
    let error = distance(&decode(&normalised, &latents), &raw);
    assert!(error < tolerance(), "{error:e}");
    // The authors' norm is no part of the file: as if it were, the result differs.
    let as_if = MmAudioDecoder::new(&config, &resident(&tensors)).expect("a decoder");
    assert!(distance(&decode(&as_if, &latents), &raw) > 10.0 * tolerance());

    let config = vocoder_config("few");
    let mut tensors = vocoder_weights(&config);
    let names: Vec<String> = tensors.keys().cloned().collect();
    for name in names.iter().filter_map(|name| name.strip_suffix("_g")) {
        let lengths = tensors.remove(&format!("{name}_g")).expect("lengths");
        let directions = tensors.remove(&format!("{name}_v")).expect("directions");
        let norms = directions.flatten_from(1).unwrap().sqr().unwrap().sum(1).unwrap();
        let scales = (lengths.flatten_all().unwrap() / norms.sqrt().unwrap()).unwrap();
        let scales = scales.reshape(lengths.dims()).unwrap();
        tensors.insert(name.to_owned(), directions.broadcast_mul(&scales).unwrap());
    }
    for (name, shape) in config.folded_tensor_shapes() {
        assert_eq!(tensors[&name].dims(), shape, "{name}");
    }
    let folded = Vocoder::new(&config, &resident(&tensors)).expect("a vocoder");
    let mel = mel(&config, 8);
    let error = distance(&vocode(&folded, &mel), &vocode(&vocoder(&config), &mel));
    assert!(error < tolerance(), "{error:e}");
}

#[test]
fn bf16_equals_f32_within_rounding() {
    let _together = together();
    let expected = expected();
    let config = vae_config("few");
    let tensors = resident(&mmaudio_weights(&config));
    let decoder = MmAudioDecoder::in_dtype(&config, &tensors, DType::BF16).expect("a decoder");
    let error = distance(&decode(&decoder, &latents(&config, 40)), &expected["vae.few.40"]);
    println!("decode in bf16: {error:.2e}");
    assert!(error < BF16_COMPONENT, "{error:e}");
    let config = vocoder_config("few");
    let tensors = resident(&vocoder_weights(&config));
    let vocoder = Vocoder::in_dtype(&config, &tensors, DType::BF16).expect("a vocoder");
    let error = distance(&vocode(&vocoder, &mel(&config, 40)), &expected["vocoder.few.40"]);
    println!("vocode in bf16: {error:.2e}");
    assert!(error < BF16_COMPONENT, "{error:e}");
}

#[test]
fn the_planned_shapes_are_those_that_are_used_in_order() {
    let _together = together();
    let (config, frames) = (vae_config("published"), 19);
    let decoder = decoder(&config);
    let (shapes, _) = asked(|| decode(&decoder, &latents(&config, frames)));
    let planned = config.planned_to_decode(frames, DType::F32);
    assert!(!planned.is_empty());
    assert_eq!(shapes, words(&planned));
    let config = vocoder_config("published");
    let vocoder = vocoder(&config);
    let (shapes, _) = asked(|| vocode(&vocoder, &mel(&config, frames)));
    let planned = config.planned_to_vocode(frames, DType::F32);
    assert!(!planned.is_empty());
    assert_eq!(shapes, words(&planned));
}

#[test]
fn a_cancelled_decode_or_track_ends_early() {
    let _together = together();
    let asked = Cell::new(0);
    let cancelled = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    let config = vae_config("few");
    let result = decoder(&config).decode(&latents(&config, 3), &cancelled);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(asked.get(), 4);
    asked.set(0);
    let config = vocoder_config("few");
    let result = vocoder(&config).vocode(&mel(&config, 3), &cancelled);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(asked.get(), 4);
}

#[test]
fn other_shapes_and_numbers_that_are_not_finite_are_errors() {
    let _together = together();
    let config = vae_config("few");
    let weights = mmaudio_weights(&config);
    for shape in [vec![1, 3, 4], vec![2, 3, 3], vec![1, 0, 3], vec![3, 3]] {
        let latents = Tensor::zeros(shape.as_slice(), DType::F32, test_device()).unwrap();
        let result = decoder(&config).decode(&latents, &|| false);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{shape:?}");
    }
    let mut broken = weights.clone();
    let mean = (broken["data_mean"].ones_like().unwrap() * f64::NAN).unwrap();
    broken.insert("data_mean".to_owned(), mean);
    let result = MmAudioDecoder::new(&config, &resident(&broken))
        .expect("a decoder")
        .decode(&latents(&config, 2), &|| false);
    assert!(
        matches!(result, Err(StageError::NotFinite { ref component, step: 0 }) if component == "audio_vae")
    );
    let large = MmAudioConfig {
        mel_bins: 128,
        ..config.clone()
    };
    let refused = MmAudioDecoder::new(&large, &resident(&weights)).expect_err("a refusal");
    assert!(refused.to_string().contains("44.1 kHz"), "{refused}");

    let config = vocoder_config("few");
    for shape in [vec![3, 5], vec![0, 6], vec![1, 3, 6]] {
        let mel = Tensor::zeros(shape.as_slice(), DType::F32, test_device()).unwrap();
        let result = vocoder(&config).vocode(&mel, &|| false);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{shape:?}");
    }
    let mut broken = vocoder_weights(&config);
    let bias = (broken["conv_post.bias"].ones_like().unwrap() * f64::NAN).unwrap();
    broken.insert("conv_post.bias".to_owned(), bias);
    let result = Vocoder::new(&config, &resident(&broken))
        .expect("a vocoder")
        .vocode(&mel(&config, 2), &|| false);
    assert!(
        matches!(result, Err(StageError::NotFinite { ref component, step: 0 }) if component == "vocoder")
    );
}

#[test]
fn every_mutation_of_the_weights_is_seen() {
    let _together = together();
    let expected = expected();
    // A direction has no length: one of its rows is turned.
    let changed = |name: &str, tensor: &Tensor, shape: &[usize]| match shape {
        [_, columns, _] if name.ends_with("weight") || name.ends_with("weight_v") => {
            let factors: Vec<f32> = (0..*columns).map(|i| 1.0 + 0.5 * (i % 2) as f32).collect();
            let columns = Tensor::from_vec(factors, (1, *columns, 1), &Device::Cpu).unwrap();
            tensor.broadcast_mul(&columns).unwrap()
        }
        _ => (tensor * 1.5).unwrap(),
    };
    let config = vae_config("few");
    let weights = mmaudio_weights(&config);
    for (name, shape) in config.tensor_shapes() {
        let mut tensors = weights.clone();
        tensors.insert(name.clone(), changed(&name, &weights[&name], &shape));
        let decoder = MmAudioDecoder::new(&config, &resident(&tensors)).expect("a decoder");
        let error = distance(&decode(&decoder, &latents(&config, 8)), &expected["vae.few.8"]);
        assert!(error > 1e-3, "{name}: {error:e}");
    }
    let config = vocoder_config("few");
    let weights = vocoder_weights(&config);
    for (name, shape) in config.tensor_shapes() {
        let mut tensors = weights.clone();
        tensors.insert(name.clone(), changed(&name, &weights[&name], &shape));
        let vocoder = Vocoder::new(&config, &resident(&tensors)).expect("a vocoder");
        let error = distance(&vocode(&vocoder, &mel(&config, 8)), &expected["vocoder.few.8"]);
        assert!(error > 1e-4, "{name}: {error:e}");
    }
}

fn assert_predicted(what: &str, predicted: u64, run: impl Fn()) {
    let measured = settled_peak(run);
    let ratio = predicted as f64 / measured as f64;
    println!("{what}: predicted {predicted} measured {measured} ({ratio:.2})");
    assert!((0.95..1.2).contains(&ratio), "{what}: {ratio:.2}");
}

#[test]
fn a_decode_or_track_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(|| {
        let config = MmAudioConfig {
            hidden_channels: 24,
            ..MmAudioConfig::default()
        };
        let tensors = ComponentTensors::new(mmaudio_weights(&config));
        let frames = 700;
        let latents = latents(&config, frames);
        let scratch = decode_scratch(&config, frames, DType::F32);
        assert_predicted("decode", scratch.0, || {
            decode(&MmAudioDecoder::new(&config, &tensors).unwrap(), &latents);
        });
        let config = VocoderConfig {
            upsample_initial_channel: 64,
            upsample_rates: vec![4, 4, 2],
            upsample_kernel_sizes: vec![8, 8, 4],
            ..VocoderConfig::default()
        };
        let tensors = ComponentTensors::new(vocoder_weights(&config));
        let mel = mel(&config, 800);
        let scratch = vocode_scratch(&config, 800, DType::F32);
        assert_predicted("track", scratch.0, || {
            vocode(&Vocoder::new(&config, &tensors).unwrap(), &mel);
        });
    });
}
