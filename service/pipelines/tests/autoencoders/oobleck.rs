//! The autoencoder of sound against diffusers (fixtures/make_oobleck_fixtures.py), and its windows against the whole.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::oobleck::{
    OobleckConfig, OobleckDecoder, OobleckEncoder, OobleckMoments, Windows, decode_ladder, decode_scratch,
    diffusers_name_of_original, encode_ladder, encode_scratch,
};

use crate::device::{BF16_COMPONENT, here, test_device};
use crate::formula::{projected, tensor};
use crate::numbers::{distance, json, resident, tensors};
use crate::shapes_asked::{asked, words};
use crate::{alone, on_two_threads, settled_peak, together};

type Tensors = HashMap<String, Tensor>;

/// Names of the fixtures' configurations.
const NAMES: [&str; 4] = ["published", "few", "odd", "thirds"];

/// f32 against the reference in f64.
fn tolerance() -> f64 {
    if test_device().is_cpu() { 1e-6 } else { 5e-6 }
}

fn expected() -> Tensors {
    tensors("oobleck-tiny/expected.safetensors")
}

fn config(name: &str) -> OobleckConfig {
    let mut all: HashMap<String, OobleckConfig> = json("oobleck-tiny/configs.json");
    all.remove(name).expect("a configuration")
}

/// An autoencoder of this configuration with everything randomised.
fn weights(config: &OobleckConfig) -> Tensors {
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

fn decoder(config: &OobleckConfig) -> OobleckDecoder {
    OobleckDecoder::new(config, &resident(&weights(config))).expect("a decoder")
}

fn encoder(config: &OobleckConfig) -> OobleckEncoder {
    OobleckEncoder::new(config, &resident(&weights(config))).expect("an encoder")
}

fn latents(config: &OobleckConfig, frames: usize) -> Tensor {
    let shape = [1, frames, config.decoder_input_channels];
    here(&tensor(&format!("latents.{frames}"), &shape, 1.0, 0.0))
}

fn samples(config: &OobleckConfig, count: usize) -> Tensor {
    tensor(
        &format!("samples.{count}"),
        &[count, config.audio_channels],
        0.5,
        0.0,
    )
}

/// All samples, f32 in host memory, and the number of pieces that they came in.
fn decode(decoder: &OobleckDecoder, latents: &Tensor, windows: Windows) -> (Tensor, usize) {
    let mut pieces: Vec<Tensor> = Vec::new();
    let mut next = 0;
    let mut deliver = |first: usize, samples: Tensor| {
        assert_eq!((first, samples.dtype()), (next, DType::F32), "samples in order");
        next += samples.dim(0)?;
        pieces.push(samples.to_device(&Device::Cpu)?);
        Ok(())
    };
    decoder
        .decode(latents, windows, &|| false, &mut deliver)
        .expect("samples");
    (Tensor::cat(&pieces, 0).unwrap(), pieces.len())
}

fn encode(encoder: &OobleckEncoder, samples: &Tensor, windows: Windows) -> OobleckMoments {
    encoder.encode(samples, windows, &|| false).expect("moments")
}

/// The same bits on the CPU, within rounding on a card.
fn assert_same(found: &Tensor, whole: &Tensor, what: &str) {
    assert_eq!(found.dims(), whole.dims(), "{what}");
    if test_device().is_cpu() {
        let bits = |t: &Tensor| -> Vec<u32> {
            let numbers = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            numbers.into_iter().map(f32::to_bits).collect()
        };
        let (found, whole) = (bits(found), bits(whole));
        let other = found.iter().zip(&whole).position(|(found, whole)| found != whole);
        assert_eq!(other, None, "{what} of {}", whole.len());
    } else {
        let error = distance(found, whole);
        assert!(error < tolerance(), "{what}: {error:e}");
    }
}

/// The numbers in the names of the expected tensors of a configuration.
fn counts(expected: &Tensors, name: &str, what: &str) -> Vec<usize> {
    let prefix = format!("{name}.{what}.");
    let number = |key: &String| key.strip_prefix(&prefix)?.split('.').next()?.parse().ok();
    let mut counts: Vec<usize> = expected.keys().filter_map(number).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

#[test]
fn tracks_of_every_length_are_decoded_as_diffusers_decodes_them() {
    let _together = together();
    let expected = expected();
    for name in NAMES {
        let config = config(name);
        let decoder = decoder(&config);
        let lengths = counts(&expected, name, "decode");
        assert!(!lengths.is_empty());
        let mut worst = 0f64;
        for frames in lengths {
            let (mut track, _) = decode(&decoder, &latents(&config, frames), Windows::Whole);
            assert_eq!(track.dims(), [config.samples(frames), config.audio_channels]);
            if name == "published" {
                let of_frame = config.hop() * config.audio_channels;
                track = projected(&track.reshape((frames, of_frame)).unwrap());
            }
            let error = distance(&track, &expected[&format!("{name}.decode.{frames}")]);
            assert!(error < tolerance(), "{name} {frames}: {error:e}");
            worst = worst.max(error);
        }
        println!("decode {name}: {worst:.2e}");
    }
}

#[test]
fn tracks_of_every_length_are_encoded_as_diffusers_encodes_them() {
    let _together = together();
    let expected = expected();
    for name in NAMES {
        let config = config(name);
        let encoder = encoder(&config);
        let lengths = counts(&expected, name, "encode");
        assert!(!lengths.is_empty());
        let mut worst = 0f64;
        for count in lengths {
            let moments = encode(&encoder, &samples(&config, count), Windows::Whole);
            let flat = |t: &Tensor| t.squeeze(0).unwrap();
            let of = |what: &str| &expected[&format!("{name}.encode.{count}.{what}")];
            let errors = [
                distance(&flat(&moments.mean), of("mean")),
                distance(&flat(&moments.deviation), of("std")),
            ];
            assert!(
                errors.iter().all(|e| *e < tolerance()),
                "{name} {count}: {errors:?}"
            );
            worst = worst.max(errors[0]).max(errors[1]);
            if let Some(sample) = expected.get(&format!("{name}.sample.{count}")) {
                // Drawn as [1, channels, frames].
                let (_, frames, channels) = moments.mean.dims3().unwrap();
                let noise = tensor(&format!("noise.{count}"), &[1, channels, frames], 1.0, 0.0);
                let found = moments.sample(&noise.transpose(1, 2).unwrap()).unwrap();
                let error = distance(&flat(&found), sample);
                assert!(error < tolerance(), "{name} {count}: {error:e}");
            }
        }
        println!("encode {name}: {worst:.2e}");
    }
    let sampled = NAMES
        .iter()
        .filter(|name| !counts(&expected, name, "sample").is_empty());
    assert_eq!(sampled.count(), NAMES.len());
}

/// Lengths of windows: the shortest, some odd ones, and one as long as some tracks.
const WINDOWS: [usize; 6] = [1, 37, 41, 48, 55, 77];

#[test]
fn windows_change_no_bit_of_a_decode() {
    let _together = together();
    for (name, lengths) in [
        ("few", vec![1, 5, 38, 39, 40, 57, 64, 77, 78, 90, 121]),
        ("odd", vec![2, 59, 131, 160, 201]),
        ("thirds", vec![1, 20, 41, 60]),
        ("published", vec![3, 19, 20, 26, 45]),
    ] {
        let config = config(name);
        let decoder = decoder(&config);
        for frames in lengths {
            let latents = latents(&config, frames);
            let (whole, _) = decode(&decoder, &latents, Windows::Whole);
            let mut most = 0;
            // A window of one frame decodes all that its layers see anew for each: short tracks show as much.
            for length in WINDOWS.into_iter().filter(|length| *length > 1 || frames < 60) {
                let windows = Windows::Of { frames: length };
                let (track, pieces) = decode(&decoder, &latents, windows);
                assert_same(&track, &whole, &format!("{name} {frames} {length}"));
                most = most.max(pieces);
            }
            assert!(most > 1 || frames < 60, "{name} {frames} is cut");
        }
    }
}

#[test]
fn parts_of_a_track_are_those_of_the_whole() {
    let _together = together();
    for (name, frames) in [("few", 121), ("odd", 131), ("thirds", 60), ("published", 24)] {
        let config = config(name);
        let decoder = decoder(&config);
        let latents = latents(&config, frames);
        let (whole, _) = decode(&decoder, &latents, Windows::Whole);
        for (kept, length) in [
            (0..1, 1),
            (3..9, 90),
            (frames / 2..frames / 2 + 5, 40),
            (frames - 2..frames, 50),
        ] {
            for windows in [Windows::Whole, Windows::Of { frames: length }] {
                let first = kept.start * config.hop();
                let count = (kept.end * config.hop()).min(config.samples(frames)) - first;
                let mut next = first;
                let mut deliver = |at: usize, samples: Tensor| {
                    assert_eq!(at, next, "samples in order");
                    next += samples.dim(0)?;
                    let expected = whole.narrow(0, at, samples.dim(0)?)?.contiguous()?;
                    assert_same(
                        &samples.to_device(&Device::Cpu)?,
                        &expected,
                        &format!("{name} {kept:?}"),
                    );
                    Ok(())
                };
                let done = decoder.decode_part(&latents, kept.clone(), windows, &|| false, &mut deliver);
                done.expect("samples");
                assert_eq!(next, first + count, "{name} {kept:?}");
            }
        }
        let beyond = frames - 1..frames + 1;
        let refused = decoder.decode_part(&latents, beyond, Windows::Whole, &|| false, &mut |_, _| Ok(()));
        assert!(matches!(refused, Err(StageError::BadInput(_))));
    }
}

#[test]
fn a_decode_that_begins_inside_has_the_same_windows_in_another_order() {
    let _together = together();
    let config = config("few");
    let (decoder, frames) = (decoder(&config), 121);
    let latents = latents(&config, frames);
    let windows = Windows::Of { frames: 70 };
    let pieces_from = |from: usize| {
        let mut pieces: Vec<(usize, Tensor)> = Vec::new();
        let mut deliver = |first: usize, samples: Tensor| {
            pieces.push((first, samples.to_device(&Device::Cpu)?));
            Ok(())
        };
        let done = decoder.decode_from(&latents, from, windows, &|| false, &mut deliver);
        done.expect("samples");
        pieces
    };
    let usual = pieces_from(0);
    assert!(usual.len() > 2, "{} pieces", usual.len());
    let hop = config.hop();
    for from in [1, 60, 61, frames - 1, frames, 5000] {
        let found = pieces_from(from);
        let begins = usual
            .iter()
            .rposition(|(first, _)| first / hop <= from)
            .filter(|_| from < frames)
            .unwrap_or(0);
        let expected = usual[begins..].iter().chain(&usual[..begins]);
        assert_eq!(found.len(), usual.len());
        for ((first, samples), (expected_first, expected)) in found.iter().zip(expected) {
            assert_eq!(first, expected_first, "from {from}");
            assert_same(samples, expected, &format!("from {from}"));
        }
    }
}

#[test]
fn windows_change_no_bit_of_an_encode() {
    let _together = together();
    for (name, lengths) in [
        ("few", vec![8, 15, 300, 301, 307, 487, 600, 719, 1001]),
        ("odd", vec![1, 2, 100, 257, 300]),
        ("thirds", vec![31, 701, 1259, 1800]),
        ("published", vec![1920, 16 * 1920 + 1919, 23 * 1920]),
    ] {
        let config = config(name);
        let encoder = encoder(&config);
        for count in lengths {
            let samples = samples(&config, count);
            let whole = encode(&encoder, &samples, Windows::Whole);
            assert_eq!(whole.mean.dim(1).unwrap(), config.frames(count));
            for length in WINDOWS {
                let found = encode(&encoder, &samples, Windows::Of { frames: length });
                let what = format!("{name} {count} {length}");
                assert_same(&found.mean, &whole.mean, &what);
                assert_same(&found.deviation, &whole.deviation, &what);
            }
        }
    }
}

#[test]
fn the_planned_shapes_are_those_that_are_used_in_order() {
    let _together = together();
    for (name, frames) in [("few", 90), ("odd", 131), ("published", 21)] {
        let config = config(name);
        let (decoder, encoder) = (decoder(&config), encoder(&config));
        for windows in [Windows::Whole, Windows::Of { frames: 50 }] {
            let latents = latents(&config, frames);
            let (shapes, _) = asked(|| decode(&decoder, &latents, windows));
            let planned = config.planned_to_decode(frames, windows, DType::F32);
            assert_eq!(shapes, words(&planned), "{name} {windows:?}");
            assert!(!planned.is_empty());
            let count = frames * config.hop();
            let samples = samples(&config, count);
            let (shapes, _) = asked(|| encode(&encoder, &samples, windows));
            let planned = config.planned_to_encode(count, windows, DType::F32);
            assert_eq!(shapes, words(&planned), "{name} {windows:?}");
        }
    }
}

#[test]
fn bf16_equals_f32_within_rounding() {
    let _together = together();
    let (config, expected) = (config("few"), expected());
    let tensors = resident(&weights(&config));
    let decoder = OobleckDecoder::in_dtype(&config, &tensors, DType::BF16).expect("a decoder");
    for windows in [Windows::Whole, Windows::Of { frames: 48 }] {
        let (track, _) = decode(&decoder, &latents(&config, 64), windows);
        let error = distance(&track, &expected["few.decode.64"]);
        println!("decode in bf16, {}: {error:.2e}", windows.label());
        assert!(error < BF16_COMPONENT, "{error:e}");
    }
    let encoder = OobleckEncoder::in_dtype(&config, &tensors, DType::BF16).expect("an encoder");
    let moments = encode(&encoder, &samples(&config, 333), Windows::Whole);
    let error = distance(
        &moments.mean.squeeze(0).unwrap(),
        &expected["few.encode.333.mean"],
    );
    println!("encode in bf16: {error:.2e}");
    assert!(error < BF16_COMPONENT, "{error:e}");
}

#[test]
fn a_cancelled_decode_or_encode_ends_early() {
    let _together = together();
    let config = config("few");
    let asked = Cell::new(0);
    let cancelled = || {
        asked.set(asked.get() + 1);
        asked.get() > 5
    };
    let windows = Windows::Of { frames: 40 };
    let never = &mut |_: usize, _: Tensor| panic!("no sample");
    let result = decoder(&config).decode(&latents(&config, 90), windows, &cancelled, never);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(asked.get(), 6);
    asked.set(0);
    let result = encoder(&config).encode(&samples(&config, 719), windows, &cancelled);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(asked.get(), 6);
}

#[test]
fn a_reader_that_fails_ends_the_decode() {
    let _together = together();
    let config = config("few");
    let mut seen = 0;
    let result = decoder(&config).decode(
        &latents(&config, 90),
        Windows::Of { frames: 45 },
        &|| false,
        &mut |_, _| {
            seen += 1;
            Err(StageError::Cancelled)
        },
    );
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(seen, 1);
}

#[test]
fn inputs_that_do_not_match_are_refused_by_name() {
    let _together = together();
    let config = config("few");
    for name in [
        "decoder.block.1.res_unit2.snake1.beta",
        "decoder.block.0.conv_t1.weight_g",
    ] {
        let mut tensors = weights(&config);
        tensors.remove(name);
        let error = OobleckDecoder::new(&config, &resident(&tensors)).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    let decoder = decoder(&config);
    for shape in [vec![1, 6, 4, 1], vec![2, 4, 6], vec![1, 0, 6], vec![1, 4, 5]] {
        let latents = Tensor::zeros(shape.as_slice(), DType::F32, test_device()).unwrap();
        let result = decoder.decode(&latents, Windows::Whole, &|| false, &mut |_, _| Ok(()));
        assert!(matches!(result, Err(StageError::BadInput(_))), "{shape:?}");
    }
    let encoder = encoder(&config);
    for shape in [vec![7, 2], vec![0, 2], vec![80, 1], vec![1, 80, 2]] {
        let samples = Tensor::zeros(shape.as_slice(), DType::F32, test_device()).unwrap();
        let result = encoder.encode(&samples, Windows::Whole, &|| false);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{shape:?}");
    }
    let strange = OobleckConfig {
        audio_channels: 6,
        ..config.clone()
    };
    assert!(OobleckEncoder::new(&strange, &resident(&weights(&config))).is_err());
}

#[test]
fn values_that_are_not_finite_are_reported() {
    let _together = together();
    let config = config("few");
    let mut tensors = weights(&config);
    let name = "encoder.conv2.bias";
    let infinite = (tensors[name].ones_like().unwrap() * f64::INFINITY).unwrap();
    tensors.insert(name.to_owned(), infinite);
    let encoder = OobleckEncoder::new(&config, &resident(&tensors)).expect("an encoder");
    let result = encoder.encode(&samples(&config, 64), Windows::Whole, &|| false);
    assert!(matches!(result, Err(StageError::NotFinite { ref component, step: 0 }) if component == "vae"));
}

#[test]
fn every_mutation_of_the_weights_is_seen() {
    let _together = together();
    let (config, expected) = (config("few"), expected());
    let tensors = weights(&config);
    let (latents, samples) = (latents(&config, 29), samples(&config, 333));
    for (name, shape) in config.tensor_shapes() {
        let mut tensors = tensors.clone();
        // A direction has no length: one of its rows is turned.
        let changed = match name.ends_with("weight_v") {
            true => {
                let factors: Vec<f32> = (0..shape[1]).map(|i| 1.0 + 0.5 * (i % 2) as f32).collect();
                let columns = Tensor::from_vec(factors, (1, shape[1], 1), &Device::Cpu).unwrap();
                tensors[&name].broadcast_mul(&columns).unwrap()
            }
            false => (&tensors[&name] * 1.5).unwrap(),
        };
        tensors.insert(name.clone(), changed);
        let tensors = resident(&tensors);
        let error = match name.starts_with("decoder.") {
            true => {
                let decoder = OobleckDecoder::new(&config, &tensors).expect("a decoder");
                let (track, _) = decode(&decoder, &latents, Windows::Whole);
                distance(&track, &expected["few.decode.29"])
            }
            false => {
                let encoder = OobleckEncoder::new(&config, &tensors).expect("an encoder");
                let moments = encode(&encoder, &samples, Windows::Whole);
                distance(
                    &moments.mean.squeeze(0).unwrap(),
                    &expected["few.encode.333.mean"],
                ) + distance(
                    &moments.deviation.squeeze(0).unwrap(),
                    &expected["few.encode.333.std"],
                )
            }
        };
        assert!(error > 1e-4, "{name}: {error:e}");
    }
}

#[test]
fn files_of_the_original_naming_give_the_same() {
    let _together = together();
    let config = config("few");
    let flat: Tensors = weights(&config)
        .into_iter()
        .map(|(name, tensor)| match tensor.dims() {
            &[1, channels, 1] if name.contains("snake") => (name, tensor.reshape(channels).unwrap()),
            _ => (name, tensor),
        })
        .collect();
    for (name, shape) in config.original_tensor_shapes() {
        assert_eq!(flat[&name].dims(), shape, "{name}");
        assert_eq!(diffusers_name_of_original(&name).as_ref(), Some(&name));
    }
    let latents = latents(&config, 7);
    let original = OobleckDecoder::new(&config, &resident(&flat)).expect("a decoder");
    let (whole, _) = decode(&decoder(&config), &latents, Windows::Whole);
    assert_same(&decode(&original, &latents, Windows::Whole).0, &whole, "original");
}

/// Larger than the fixtures', so that sequences outweigh the buffers that threads keep.
fn small_config() -> OobleckConfig {
    OobleckConfig {
        encoder_hidden_size: 32,
        decoder_channels: 32,
        decoder_input_channels: 16,
        channel_multiples: vec![1, 1, 2],
        downsampling_ratios: vec![2, 4, 10],
        ..OobleckConfig::default()
    }
}

fn assert_predicted(what: &str, predicted: u64, run: impl Fn()) {
    let measured = settled_peak(run);
    let ratio = predicted as f64 / measured as f64;
    println!("{what}: predicted {predicted} measured {measured} ({ratio:.2})");
    assert!((0.95..1.2).contains(&ratio), "{what}: {ratio:.2}");
}

#[test]
fn a_decode_or_encode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(|| {
        let config = small_config();
        let tensors = ComponentTensors::new(weights(&config));
        let frames = 600;
        let latents = latents(&config, frames);
        let count = frames * config.hop();
        let samples = samples(&config, count);
        for windows in [300, 120].map(|frames| Windows::Of { frames }) {
            let scratch = decode_scratch(&config, frames, windows, DType::F32);
            assert_predicted(&format!("decode in {}", windows.label()), scratch.0, || {
                let decoder = OobleckDecoder::new(&config, &tensors).unwrap();
                decoder
                    .decode(&latents, windows, &|| false, &mut |_, _| Ok(()))
                    .unwrap();
            });
            let scratch = encode_scratch(&config, count, windows, DType::F32);
            assert_predicted(&format!("encode in {}", windows.label()), scratch.0, || {
                encode(
                    &OobleckEncoder::new(&config, &tensors).unwrap(),
                    &samples,
                    windows,
                );
            });
        }
        for ladder in [
            decode_ladder(&config, frames, DType::F32),
            encode_ladder(&config, count, DType::F32),
        ] {
            assert!(ladder.len() > 2);
            assert!(ladder.is_sorted_by(|(_, a), (_, b)| a.scratch > b.scratch));
        }
    });
}
