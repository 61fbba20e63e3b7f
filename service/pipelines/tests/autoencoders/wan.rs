//! Wan's autoencoders of films against diffusers (fixtures/make_wan_vae_fixtures.py), and their streams against the whole.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::wan::{
    Chunking, Decoding, FrameDecoding, WanVaeConfig, WanVaeDecoder, WanVaeEncoder, decode_ladder,
    decode_scratch, encode_ladder, encode_scratch, frames_to_rgb8,
};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::formula::{film, latents, projected, weights_of_wan as weights};
use crate::numbers::{distance, json, resident, tensors};
use crate::shapes_asked::{asked, words};
use crate::{alone, on_two_threads, settled_peak, together};

/// Sides of the fixtures' latents.
const SIDES: (usize, usize) = (3, 2);

/// One row of every map at a time, some rows, and all.
const CHUNKINGS: [Chunking; 3] = [
    Chunking::Whole,
    Chunking::Strips { bytes: 1 },
    Chunking::Strips { bytes: 12_000 },
];

/// Of Wan 2.1 and of Wan 2.2.
struct Kind {
    config: WanVaeConfig,
    expected: HashMap<String, Tensor>,
}

fn kinds() -> [Kind; 2] {
    ["2.1", "2.2"].map(|kind| Kind {
        config: json(&format!("wan-vae-tiny/{kind}/config.json")),
        expected: tensors(&format!("wan-vae-tiny/{kind}/expected.safetensors")),
    })
}

impl Kind {
    fn decoder(&self) -> WanVaeDecoder {
        WanVaeDecoder::new(&self.config, &resident(&weights(&self.config))).expect("a decoder")
    }

    fn encoder(&self) -> WanVaeEncoder {
        WanVaeEncoder::new(&self.config, &resident(&weights(&self.config))).expect("an encoder")
    }

    fn latents(&self, length: usize) -> Tensor {
        latents(&length.to_string(), self.config.z_dim, length, SIDES)
    }

    /// Width and height of frames.
    fn size(&self) -> (usize, usize) {
        let factor = self.config.factor();
        (SIDES.1 * factor, SIDES.0 * factor)
    }

    fn film(&self, count: usize) -> Vec<u8> {
        let cells = self.config.factor() / 8;
        film(count, (SIDES.0 * cells, SIDES.1 * cells))
    }
}

fn host(tensor: &Tensor) -> Tensor {
    let tensor = tensor.to_device(&Device::Cpu).expect("numbers");
    tensor.to_dtype(DType::F32).expect("numbers")
}

/// All frames, f32 in host memory, clamped as the reference clamps them.
fn decode(decoder: &WanVaeDecoder, latents: &Tensor, chunking: Chunking) -> Tensor {
    let how = FrameDecoding {
        chunking,
        cancelled: &|| false,
    };
    let mut all: Vec<Tensor> = Vec::new();
    let mut next = 0;
    let mut deliver = |first: usize, frames: Tensor| {
        assert_eq!(first, next, "frames in order");
        next += frames.dim(0)?;
        all.push(host(&frames));
        Ok(())
    };
    decoder
        .decode_frames(&here(latents), &how, &mut deliver)
        .expect("frames");
    joined(&all)
}

fn joined(frames: &[Tensor]) -> Tensor {
    let frames = Tensor::cat(frames, 0).expect("frames");
    frames.clamp(-1f32, 1f32).expect("frames")
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let numbers = host(tensor).flatten_all().unwrap().to_vec1::<f32>().unwrap();
    numbers.into_iter().map(f32::to_bits).collect()
}

/// Equal bits on the CPU; on a card, whose library chooses by shape how to add, within rounding.
fn assert_equal(found: &Tensor, expected: &Tensor, what: &str) {
    if test_device().is_cpu() {
        assert!(bits(found) == bits(expected), "{what}");
    } else {
        let error = distance(found, expected);
        assert!(error < tolerances().strips, "{what}: {error:e}");
    }
}

#[test]
fn films_of_every_length_are_decoded_as_diffusers_decodes_them() {
    let _together = together();
    for kind in kinds() {
        let decoder = kind.decoder();
        let (width, height) = kind.size();
        for length in 1..=13 {
            let frames = decode(&decoder, &kind.latents(length), Chunking::Whole);
            assert_eq!(frames.dims(), [4 * (length - 1) + 1, height, width, 3]);
            let expected = &kind.expected[&format!("decode.{length}.projected")];
            let error = distance(&projected(&frames), expected);
            println!("{length} latents of {}: {error:.2e}", kind.config.z_dim);
            assert!(error < tolerances().component, "{length}: {error:e}");
        }
        let frames = decode(&decoder, &kind.latents(3), Chunking::Whole);
        let error = distance(&frames, &kind.expected["decode.3.frames"]);
        assert!(error < tolerances().component, "{error:e}");
    }
}

#[test]
fn pieces_of_rows_change_no_bit() {
    let _together = together();
    for kind in kinds() {
        let (decoder, encoder) = (kind.decoder(), kind.encoder());
        let expected = decode(&decoder, &kind.latents(4), Chunking::Whole);
        let film = kind.film(9);
        let encode = |chunking| {
            let moments = encoder.encode_rgb8(&film, 9, kind.size(), chunking, &|| false);
            moments.expect("moments").mean
        };
        for chunking in CHUNKINGS {
            let frames = decode(&decoder, &kind.latents(4), chunking);
            assert_equal(&frames, &expected, &chunking.label());
            let mean = encode(chunking);
            assert_equal(&mean, &encode(Chunking::Whole), &chunking.label());
        }
    }
}

#[test]
fn a_decode_goes_on_after_any_latent() {
    let _together = together();
    for kind in kinds() {
        let decoder = kind.decoder();
        let films = [kind.latents(13), kind.latents(7)];
        let expected = films
            .each_ref()
            .map(|film| decode(&decoder, film, Chunking::Whole));
        let begin = || decoder.begin(SIDES, Chunking::Whole).expect("a decode");
        // Two films in turns, of which one waits for longer each time, and a third one that is dropped after each latent.
        let mut decodings = [begin(), begin()];
        let mut found: [Vec<Tensor>; 2] = [Vec::new(), Vec::new()];
        let mut turn = |which: usize, decodings: &mut [Decoding<'_>; 2]| {
            let index = found[which].len();
            if index < films[which].dim(2).unwrap() {
                let latent = here(&films[which].narrow(2, index, 1).unwrap());
                let frames = decodings[which].next(&latent, &|| false).expect("frames");
                found[which].push(host(&frames));
            }
        };
        for round in 0..13 {
            turn(0, &mut decodings);
            if round % 3 > 0 {
                turn(1, &mut decodings);
            }
            let latent = here(&films[1].narrow(2, 3, 1).unwrap());
            begin().next(&latent, &|| false).expect("frames");
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert_equal(&joined(found), expected, "in turns");
        }
    }
}

#[test]
fn a_latent_that_was_not_finished_ends_the_film() {
    let _together = together();
    let [_, kind] = kinds();
    let decoder = kind.decoder();
    let film = kind.latents(2);
    let latent = |index: usize| here(&film.narrow(2, index, 1).unwrap());
    let expected = decode(&decoder, &film, Chunking::Whole);
    for checks in [1, 5, 20, 40] {
        let mut decoding = decoder.begin(SIDES, CHUNKINGS[2]).expect("a decode");
        decoding.next(&latent(0), &|| false).expect("a frame");
        let left = Cell::new(checks);
        let cancelled = || {
            left.set(left.get() - 1);
            left.get() == 0
        };
        let result = decoding.next(&latent(1), &cancelled);
        assert!(matches!(result, Err(StageError::Cancelled)), "{checks}");
        let result = decoding.next(&latent(1), &|| false);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{checks}");
        assert_equal(
            &decode(&decoder, &film, CHUNKINGS[2]),
            &expected,
            "after a cancelled one",
        );
    }
}

#[test]
fn films_of_every_length_are_encoded_as_diffusers_encodes_them() {
    let _together = together();
    for kind in kinds() {
        let encoder = kind.encoder();
        let (width, height) = kind.size();
        for count in (1..=13).chain([31]) {
            let bytes = kind.film(count);
            let moments = encoder
                .encode_rgb8(&bytes, count, (width, height), Chunking::Whole, &|| false)
                .expect("moments");
            let expected = |name: &str| &kind.expected[&format!("encode.{count}.{name}")];
            let mean = distance(&moments.mean, expected("mean"));
            let spread = distance(&moments.log_variance, expected("logvar"));
            println!("{count} frames: {mean:.2e} {spread:.2e}");
            let most = tolerances().component;
            assert!(mean < most && spread < most, "{count}: {mean:e} {spread:e}");
        }
        let numbers = kind.film(5).into_iter();
        let numbers = numbers.map(|b| 2.0 * (f32::from(b) / 255.0) - 1.0).collect();
        let frames = here(&Tensor::from_vec(numbers, (5, height, width, 3), &Device::Cpu).unwrap());
        let moments = encoder.encode(&frames, Chunking::Whole, &|| false);
        let error = distance(&moments.expect("moments").mean, &kind.expected["encode.5.mean"]);
        assert!(error < tolerances().component, "{error:e}");
    }
}

#[test]
fn the_planned_shapes_are_those_that_are_used_in_order() {
    let _together = together();
    for kind in kinds() {
        let (decoder, encoder, config) = (kind.decoder(), kind.encoder(), &kind.config);
        for chunking in CHUNKINGS {
            for length in [1, 2, 4] {
                let (shapes, _) = asked(|| decode(&decoder, &kind.latents(length), chunking));
                let planned = config.planned_to_decode(SIDES, length, chunking, DType::F32);
                assert_eq!(shapes, words(&planned), "{length} {chunking:?}");
            }
            for count in [1, 8, 13] {
                let film = kind.film(count);
                let encode = || encoder.encode_rgb8(&film, count, kind.size(), chunking, &|| false);
                let (shapes, moments) = asked(encode);
                moments.expect("moments");
                let planned = config.planned_to_encode(SIDES, count, chunking, DType::F32);
                assert_eq!(shapes, words(&planned), "{count} {chunking:?}");
            }
        }
    }
}

#[test]
fn bf16_equals_f32_within_rounding() {
    let _together = together();
    for kind in kinds() {
        let tensors = resident(&weights(&kind.config));
        let decoder = WanVaeDecoder::in_dtype(&kind.config, &tensors, DType::BF16).expect("a decoder");
        let frames = decode(&decoder, &kind.latents(3), CHUNKINGS[2]);
        let error = distance(&frames, &kind.expected["decode.3.frames"]);
        println!("decode in bf16: {error:.2e}");
        assert!(error < BF16_COMPONENT, "{error:e}");
        let encoder = WanVaeEncoder::in_dtype(&kind.config, &tensors, DType::BF16).expect("an encoder");
        let moments = encoder
            .encode_rgb8(&kind.film(13), 13, kind.size(), Chunking::Whole, &|| false)
            .expect("moments");
        let error = distance(&moments.mean, &kind.expected["encode.13.mean"]);
        println!("encode in bf16: {error:.2e}");
        assert!(error < BF16_COMPONENT, "{error:e}");
    }
}

#[test]
fn every_mutation_of_the_weights_is_seen() {
    let _together = together();
    for kind in kinds() {
        let latents = kind.latents(2);
        let bytes = kind.film(5);
        let right = weights(&kind.config);
        for (name, _) in kind.config.tensor_shapes() {
            let mut tensors = right.clone();
            tensors.insert(name.clone(), (&right[&name] * 1.5).unwrap());
            let tensors = resident(&tensors);
            let is_encoder = name.starts_with("encoder.") || name.starts_with("quant_conv");
            let error = if is_encoder {
                let encoder = WanVaeEncoder::new(&kind.config, &tensors).expect("an encoder");
                let moments = encoder.encode_rgb8(&bytes, 5, kind.size(), Chunking::Whole, &|| false);
                distance(&moments.expect("moments").mean, &kind.expected["encode.5.mean"])
            } else {
                let decoder = WanVaeDecoder::new(&kind.config, &tensors).expect("a decoder");
                let frames = decode(&decoder, &latents, Chunking::Whole);
                distance(&projected(&frames), &kind.expected["decode.2.projected"])
            };
            assert!(error > 1e-3, "{name}: {error:e}");
        }
    }
}

#[test]
fn inputs_that_do_not_match_are_refused_by_name() {
    let _together = together();
    for kind in kinds() {
        let (decoder, encoder, channels) = (kind.decoder(), kind.encoder(), kind.config.z_dim);
        let name = "decoder.mid_block.attentions.0.to_qkv.bias";
        let mut tensors = weights(&kind.config);
        tensors.remove(name);
        let error = WanVaeDecoder::new(&kind.config, &resident(&tensors)).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        let refused = |dims: &[usize]| {
            let latents = Tensor::zeros(dims, DType::F32, test_device()).unwrap();
            let how = FrameDecoding {
                chunking: Chunking::Whole,
                cancelled: &|| false,
            };
            let result = decoder.decode_frames(&latents, &how, &mut |_, _| Ok(()));
            assert!(matches!(result, Err(StageError::BadInput(_))), "{dims:?}");
            let mut decoding = decoder.begin(SIDES, Chunking::Whole).expect("a decode");
            let result = decoding.next(&latents, &|| false);
            assert!(matches!(result, Err(StageError::BadInput(_))), "{dims:?}");
        };
        refused(&[1, channels + 1, 1, 3, 2]);
        refused(&[1, channels, 3, 2]);
        refused(&[2, channels, 1, 3, 2]);
        refused(&[1, channels, 0, 3, 2]);
        for dims in [[1, channels, 2, 3, 2], [1, channels, 1, 2, 3]] {
            let latents = Tensor::zeros(&dims, DType::F32, test_device()).unwrap();
            let mut decoding = decoder.begin(SIDES, Chunking::Whole).expect("a decode");
            let result = decoding.next(&latents, &|| false);
            assert!(matches!(result, Err(StageError::BadInput(_))), "{dims:?}");
        }
        assert!(decoder.begin((0, 2), Chunking::Whole).is_err());
        let (width, height) = kind.size();
        for (bytes, count, size) in [
            (height * width * 3, 2, (width, height)),
            ((height - 4) * width * 3, 1, (width, height - 4)),
            (0, 0, (width, height)),
        ] {
            let result = encoder.encode_rgb8(&vec![0; bytes], count, size, Chunking::Whole, &|| false);
            assert!(
                matches!(result, Err(StageError::BadInput(_))),
                "{count} of {size:?}"
            );
        }
        let strange = WanVaeConfig {
            attn_scales: vec![0.5],
            ..kind.config.clone()
        };
        assert!(WanVaeDecoder::new(&strange, &resident(&weights(&kind.config))).is_err());
    }
}

#[test]
fn values_that_are_not_finite_are_reported() {
    let _together = together();
    let [kind, _] = kinds();
    let mut tensors = weights(&kind.config);
    for name in ["encoder.conv_out.bias", "decoder.conv_out.bias"] {
        let infinite = (tensors[name].ones_like().unwrap() * f64::INFINITY).unwrap();
        tensors.insert(name.to_owned(), infinite);
    }
    let tensors = resident(&tensors);
    let encoder = WanVaeEncoder::new(&kind.config, &tensors).expect("an encoder");
    let result = encoder.encode_rgb8(&kind.film(1), 1, kind.size(), Chunking::Whole, &|| false);
    assert!(matches!(result, Err(StageError::NotFinite { .. })));
    let decoder = WanVaeDecoder::new(&kind.config, &tensors).expect("a decoder");
    let mut decoding = decoder.begin(SIDES, Chunking::Whole).expect("a decode");
    let frames = decoding
        .next(&here(&kind.latents(1)), &|| false)
        .expect("a frame");
    assert!(matches!(
        frames_to_rgb8(&frames),
        Err(StageError::NotFinite { .. })
    ));
}

#[test]
fn latents_in_the_scale_of_the_transformer_are_scaled_by_channel() {
    for kind in kinds() {
        let latents = kind.latents(2);
        let unscaled = kind.config.unscaled(&latents).expect("latents");
        let (mean, std) = (&kind.config.latents_mean, &kind.config.latents_std);
        let of = |latents: &Tensor, channel: usize| {
            let plane = latents.get(0).unwrap().get(channel).unwrap();
            f64::from(plane.flatten_all().unwrap().to_vec1::<f32>().unwrap()[3])
        };
        for channel in 0..kind.config.z_dim {
            let expected = of(&latents, channel) * std[channel] + mean[channel];
            assert!((of(&unscaled, channel) - expected).abs() < 1e-5);
        }
        let back = kind.config.scaled(&unscaled).expect("latents");
        assert!(distance(&back, &latents) < 1e-6);
    }
}

/// Larger than the fixtures', so that maps outweigh the buffers that threads keep.
fn larger(config: WanVaeConfig) -> WanVaeConfig {
    WanVaeConfig {
        base_dim: 16,
        decoder_base_dim: Some(16),
        ..config
    }
}

/// Those of both kinds, and one of pictures alone.
fn larger_ones() -> Vec<WanVaeConfig> {
    let all = kinds().map(|kind| larger(kind.config));
    let pictures = WanVaeConfig {
        is_of_pictures: true,
        ..all[0].clone()
    };
    all.into_iter().chain([pictures]).collect()
}

/// Strips of some rows of them.
const STRIPS: Chunking = Chunking::Strips { bytes: 1 << 17 };

#[test]
fn a_decode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(decode_needs_what_was_predicted);
}

fn decode_needs_what_was_predicted() {
    let sides = (8, 10);
    for config in larger_ones() {
        let decoder = WanVaeDecoder::new(&config, &ComponentTensors::new(weights(&config))).unwrap();
        for (length, chunkings) in [(1, &CHUNKINGS[..1]), (3, &[Chunking::Whole, STRIPS])] {
            if config.is_of_pictures && length > 1 {
                continue;
            }
            let latents = latents("scratch", config.z_dim, length, sides);
            for &chunking in chunkings {
                let how = FrameDecoding {
                    chunking,
                    cancelled: &|| false,
                };
                let run = || {
                    decoder.decode_frames(&latents, &how, &mut |_, frames| frames_to_rgb8(&frames).map(drop))
                };
                let measured = settled_peak(|| run().unwrap());
                let predicted = decode_scratch(&config, sides, length, chunking, DType::F32).0;
                assert_predicted(
                    &format!("decode {length} {}", chunking.label()),
                    predicted,
                    measured,
                );
            }
        }
    }
}

#[test]
fn an_encode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(encode_needs_what_was_predicted);
}

fn encode_needs_what_was_predicted() {
    let sides = (8, 10);
    for config in larger_ones() {
        let encoder = WanVaeEncoder::new(&config, &ComponentTensors::new(weights(&config))).unwrap();
        let (factor, cells) = (config.factor(), config.factor() / 8);
        for (count, chunkings) in [(1, &CHUNKINGS[..1]), (9, &[Chunking::Whole, STRIPS])] {
            if config.is_of_pictures && count > 1 {
                continue;
            }
            let film = film(count, (sides.0 * cells, sides.1 * cells));
            let size = (sides.1 * factor, sides.0 * factor);
            for &chunking in chunkings {
                let run = || encoder.encode_rgb8(&film, count, size, chunking, &|| false);
                let measured = settled_peak(|| run().unwrap());
                let predicted = encode_scratch(&config, sides, count, chunking, DType::F32).0;
                assert_predicted(
                    &format!("encode {count} {}", chunking.label()),
                    predicted,
                    measured,
                );
            }
        }
    }
}

fn assert_predicted(what: &str, predicted: u64, measured: u64) {
    let ratio = predicted as f64 / measured as f64;
    println!("{what}: predicted {predicted} measured {measured} ({ratio:.2})");
    assert!((0.9..1.15).contains(&ratio), "{what}: {ratio:.2}");
}

#[test]
fn every_rung_needs_less_than_the_one_before() {
    for config in [WanVaeConfig::default(), WanVaeConfig::wan_2_2()] {
        let cells = config.factor() / 8;
        for (height, width, frames) in [(480, 832, 81), (704, 1280, 121)] {
            let sides = (height / 8 / cells, width / 8 / cells);
            let decode = decode_ladder(&config, sides, config.latents(frames), DType::BF16);
            let encode = encode_ladder(&config, sides, frames, DType::BF16);
            for rungs in [decode, encode] {
                for (_, rung) in &rungs {
                    let gib = rung.scratch.0 as f64 / (1u64 << 30) as f64;
                    println!("{} {width}x{height} {}: {gib:.2} GiB", config.z_dim, rung.label);
                    assert!(!rung.approximate);
                }
                assert!(rungs.windows(2).all(|pair| pair[1].1.scratch < pair[0].1.scratch));
            }
        }
    }
    let config = WanVaeConfig::wan_2_2();
    let film = decode_ladder(&config, (44, 80), 31, DType::BF16);
    assert!(film[0].1.scratch.0 < 4 << 30, "{:?}", film[0].1);
}

/// A picture is a film of one frame, which layers in time do not change.
#[test]
fn an_autoencoder_of_pictures_makes_of_one_frame_what_one_of_films_does() {
    let [film_kind, _] = kinds();
    let film = film_kind.config;
    let pictures = WanVaeConfig {
        is_of_pictures: true,
        ..film.clone()
    };
    let in_time = |config: &WanVaeConfig| {
        let names = config.tensor_shapes().into_iter();
        names.filter(|(name, _)| name.contains("time_conv")).count()
    };
    assert_eq!((in_time(&film), in_time(&pictures)), (8, 0));
    let latents = latents("picture", film.z_dim, 1, SIDES);
    let decoded = |config: &WanVaeConfig| {
        let decoder = WanVaeDecoder::new(config, &ComponentTensors::new(weights(config))).unwrap();
        let how = FrameDecoding {
            chunking: Chunking::Whole,
            cancelled: &|| false,
        };
        let mut frame = None;
        let taken = decoder.decode_frames(&latents, &how, &mut |_, frames| {
            frame = Some(frames);
            Ok(())
        });
        taken.unwrap();
        frame.expect("a frame")
    };
    let apart = distance(&decoded(&pictures), &decoded(&film));
    println!("decoded: {apart:.2e}");
    assert!(apart < 1e-6, "{apart:e}");
    let (height, width) = (SIDES.0 * 8, SIDES.1 * 8);
    let rgb: Vec<u8> = (0..3 * height * width).map(|i| (i % 251) as u8).collect();
    let encoded = |config: &WanVaeConfig| {
        let encoder = WanVaeEncoder::new(config, &ComponentTensors::new(weights(config))).unwrap();
        let moments = encoder.encode_rgb8(&rgb, 1, (width, height), Chunking::Whole, &|| false);
        moments.unwrap().mean
    };
    let apart = distance(&encoded(&pictures), &encoded(&film));
    println!("encoded: {apart:.2e}");
    assert!(apart < 1e-6, "{apart:e}");
}
