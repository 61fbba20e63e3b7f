//! HunyuanVideo's autoencoder of films against diffusers (fixtures/make_hunyuan_vae_fixtures.py), and its strips and
//! pieces against the whole.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::hunyuan::{
    Chunking, FrameDecoding, HunyuanVaeConfig, HunyuanVaeDecoder, HunyuanVaeEncoder, decode_ladder,
    decode_scratch, diffusers_name_of_original, encode_ladder, encode_scratch, frames_to_rgb8,
};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::formula::{film, latents, projected, weights};
use crate::numbers::{distance, json, resident, tensors};
use crate::shapes_asked::{asked, words};
use crate::{alone, on_two_threads, settled_peak, together};

type Tensors = HashMap<String, Tensor>;

/// Sides of the fixtures' latents.
const SIDES: (usize, usize) = (3, 2);
const WIDE_SIDES: (usize, usize) = (12, 10);

/// Strips of one row of the largest maps, of some rows, and of all.
const CHUNKINGS: [Chunking; 4] = [
    Chunking::Whole,
    Chunking::Strips { bytes: 1 },
    Chunking::Strips { bytes: 60_000 },
    Chunking::Strips { bytes: 200_000 },
];

fn expected() -> Tensors {
    tensors("hunyuan-vae-tiny/expected.safetensors")
}

fn config() -> HunyuanVaeConfig {
    json("hunyuan-vae-tiny/config.json")
}

fn decoder() -> HunyuanVaeDecoder {
    HunyuanVaeDecoder::new(&config(), &resident(&weights(&config()))).expect("a decoder")
}

fn encoder() -> HunyuanVaeEncoder {
    HunyuanVaeEncoder::new(&config(), &resident(&weights(&config()))).expect("an encoder")
}

fn whole(chunking: Chunking) -> FrameDecoding<'static> {
    FrameDecoding {
        chunking,
        frames_at_a_time: usize::MAX,
        factor: 1.0,
        cancelled: &|| false,
    }
}

/// The groups of frames that are delivered, with the index of the first of each.
fn delivered(decoder: &HunyuanVaeDecoder, latents: &Tensor, how: &FrameDecoding<'_>) -> Vec<(usize, Tensor)> {
    let mut groups = Vec::new();
    let mut deliver = |first: usize, frames: Tensor| {
        groups.push((first, frames));
        Ok(())
    };
    decoder
        .decode_frames(&here(latents), how, &mut deliver)
        .expect("frames");
    groups
}

/// All frames, f32 in host memory.
fn decode(decoder: &HunyuanVaeDecoder, latents: &Tensor, how: &FrameDecoding<'_>) -> Tensor {
    let groups = delivered(decoder, latents, how);
    let mut next = 0;
    for (first, frames) in &groups {
        assert_eq!(*first, next, "frames in order");
        next += frames.dim(0).unwrap();
    }
    let host = |t: &Tensor| t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let frames: Vec<Tensor> = groups.iter().map(|(_, frames)| host(frames)).collect();
    Tensor::cat(&frames, 0).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let numbers = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    numbers.into_iter().map(f32::to_bits).collect()
}

#[test]
fn films_of_every_length_are_decoded_as_diffusers_decodes_them() {
    let _together = together();
    let (decoder, expected) = (decoder(), expected());
    for length in 1..=13 {
        let frames = decode(
            &decoder,
            &latents(&length.to_string(), 4, length, SIDES),
            &whole(Chunking::Whole),
        );
        assert_eq!(frames.dims(), [4 * (length - 1) + 1, 24, 16, 3]);
        let error = distance(
            &projected(&frames),
            &expected[&format!("decode.{length}.projected")],
        );
        println!("{length} latents: {error:.2e}");
        assert!(error < tolerances().component, "{length}: {error:e}");
    }
}

#[test]
fn decoded_bytes_equal_those_of_the_reference() {
    let _together = together();
    let reference = &expected()["decode.6.frames"];
    let how = whole(Chunking::Whole);
    let frames = decode(&decoder(), &latents("6", 4, 6, SIDES), &how);
    let error = distance(&frames, reference);
    assert!(error < tolerances().component, "{error:e}");
    let (found, right) = (
        frames_to_rgb8(&frames).unwrap(),
        frames_to_rgb8(reference).unwrap(),
    );
    let values = reference.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let mut compared = 0;
    for ((found, right), value) in found.iter().zip(&right).zip(values) {
        // A value in the middle between two bytes may be rounded to either.
        let level = (value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
        if (level.fract() - 0.5).abs() > 1e-2 {
            assert_eq!(found, right);
            compared += 1;
        }
    }
    assert!(compared > reference.elem_count() * 9 / 10);
}

#[test]
fn strips_and_pieces_change_no_bit() {
    let _together = together();
    let decoder = decoder();
    for length in [1, 2, 6, 9] {
        let latents = latents(&length.to_string(), 4, length, SIDES);
        let expected = decode(&decoder, &latents, &whole(Chunking::Whole));
        for chunking in CHUNKINGS {
            for frames_at_a_time in [16, 4, 1] {
                let how = FrameDecoding {
                    frames_at_a_time,
                    ..whole(chunking)
                };
                let frames = decode(&decoder, &latents, &how);
                if test_device().is_cpu() {
                    assert!(bits(&frames) == bits(&expected), "{length} {}", chunking.label());
                } else {
                    let error = distance(&frames, &expected);
                    assert!(
                        error < tolerances().strips,
                        "{length} {}: {error:e}",
                        chunking.label()
                    );
                }
            }
        }
    }
}

#[test]
fn pieces_have_at_most_the_requested_frames() {
    let _together = together();
    let (decoder, latents) = (decoder(), latents("9", 4, 9, SIDES));
    for (most, counts) in [
        (100, vec![13, 12, 8]),
        (8, vec![8, 5, 8, 4, 8]),
        (1, vec![1; 33]),
        (0, vec![1; 33]),
    ] {
        let how = FrameDecoding {
            frames_at_a_time: most,
            ..whole(Chunking::Whole)
        };
        let groups = delivered(&decoder, &latents, &how);
        let found: Vec<usize> = groups.iter().map(|(_, frames)| frames.dim(0).unwrap()).collect();
        assert_eq!(found, counts, "{most}");
    }
}

#[test]
fn latents_in_the_scale_of_the_transformer_are_scaled() {
    let _together = together();
    let (decoder, config) = (decoder(), config());
    let latents = latents("2", 4, 2, SIDES);
    let how = FrameDecoding {
        factor: config.unscaling(),
        ..whole(Chunking::Whole)
    };
    let scaled = decode(&decoder, &(&latents * config.scaling_factor).unwrap(), &how);
    let expected = decode(&decoder, &latents, &whole(Chunking::Whole));
    assert!(distance(&scaled, &expected) < tolerances().component);
    assert!((config.scaling_factor - 0.476986).abs() < 1e-12);
}

#[test]
fn tiles_in_space_equal_those_of_diffusers() {
    let _together = together();
    let expected = expected();
    let tiles = Chunking::Tiles { latent_size: 8 };
    let frames = decode(&decoder(), &latents("tiles", 4, 6, WIDE_SIDES), &whole(tiles));
    let error = distance(&projected(&frames), &expected["tiles.projected"]);
    println!("decode in tiles: {error:.2e}");
    assert!(error < tolerances().component, "{error:e}");
    let (size, film) = ((80, 96), film(5, WIDE_SIDES));
    let moments = encoder().encode_rgb8(&film, 5, size, tiles, &|| false).unwrap();
    let error = distance(&moments.mean, &expected["encode_tiles.mean"]);
    println!("encode in tiles: {error:.2e}");
    assert!(error < tolerances().component, "{error:e}");
}

#[test]
fn pictures_and_films_are_encoded_as_diffusers_encodes_them() {
    let _together = together();
    let (encoder, expected) = (encoder(), expected());
    for count in [1, 5, 17, 29, 30] {
        let bytes = film(count, SIDES);
        for chunking in CHUNKINGS {
            let moments = encoder
                .encode_rgb8(&bytes, count, (16, 24), chunking, &|| false)
                .expect("moments");
            let mean = distance(&moments.mean, &expected[&format!("encode.{count}.mean")]);
            let spread = distance(
                &moments.log_variance,
                &expected[&format!("encode.{count}.logvar")],
            );
            println!("{count} frames, {}: {mean:.2e} {spread:.2e}", chunking.label());
            let most = tolerances().component;
            assert!(
                mean < most && spread < most,
                "{count} {chunking:?}: {mean:e} {spread:e}"
            );
        }
        let numbers = bytes
            .iter()
            .map(|b| 2.0 * (f32::from(*b) / 255.0) - 1.0)
            .collect();
        let frames = here(&Tensor::from_vec(numbers, (count, 24, 16, 3), &Device::Cpu).unwrap());
        let moments = encoder
            .encode(&frames, Chunking::Whole, &|| false)
            .expect("moments");
        let error = distance(&moments.mean, &expected[&format!("encode.{count}.mean")]);
        assert!(error < tolerances().component, "{count}: {error:e}");
    }
}

#[test]
fn the_planned_shapes_are_those_that_are_used_in_order() {
    let _together = together();
    let (decoder, encoder, config) = (decoder(), encoder(), config());
    let dtype = DType::F32;
    for chunking in CHUNKINGS {
        for length in [1, 5, 9] {
            let latents = latents(&length.to_string(), 4, length, SIDES);
            let (shapes, _) = asked(|| decode(&decoder, &latents, &whole(chunking)));
            let planned = config.planned_to_decode(SIDES, length, chunking, dtype);
            assert_eq!(shapes, words(&planned), "{length} {chunking:?}");
        }
        for count in [1, 29] {
            let film = film(count, SIDES);
            let encode = || encoder.encode_rgb8(&film, count, (16, 24), chunking, &|| false);
            let (shapes, moments) = asked(encode);
            moments.expect("moments");
            let planned = config.planned_to_encode(SIDES, count, chunking, dtype);
            assert_eq!(shapes, words(&planned), "{count} {chunking:?}");
        }
    }
}

#[test]
fn bf16_equals_f32_within_rounding() {
    let _together = together();
    let expected = expected();
    let tensors = resident(&weights(&config()));
    let decoder = HunyuanVaeDecoder::in_dtype(&config(), &tensors, DType::BF16).expect("a decoder");
    for chunking in [Chunking::Whole, CHUNKINGS[2]] {
        let frames = decode(&decoder, &latents("6", 4, 6, SIDES), &whole(chunking));
        let error = distance(&frames, &expected["decode.6.frames"]);
        println!("decode in bf16, {}: {error:.2e}", chunking.label());
        assert!(error < BF16_COMPONENT, "{error:e}");
    }
    let encoder = HunyuanVaeEncoder::in_dtype(&config(), &tensors, DType::BF16).expect("an encoder");
    let moments = encoder
        .encode_rgb8(&film(17, SIDES), 17, (16, 24), Chunking::Whole, &|| false)
        .expect("moments");
    let error = distance(&moments.mean, &expected["encode.17.mean"]);
    println!("encode in bf16: {error:.2e}");
    assert!(error < BF16_COMPONENT, "{error:e}");
}

#[test]
fn a_cancelled_decode_ends_early() {
    let _together = together();
    let (decoder, latents) = (decoder(), latents("tiles", 4, 6, WIDE_SIDES));
    for chunking in [CHUNKINGS[0], CHUNKINGS[1], Chunking::Tiles { latent_size: 8 }] {
        let asked = Cell::new(0);
        let cancelled = || {
            asked.set(asked.get() + 1);
            asked.get() > 7
        };
        let how = FrameDecoding {
            cancelled: &cancelled,
            ..whole(chunking)
        };
        let result = decoder.decode_frames(&here(&latents), &how, &mut |_, _| panic!("no frame"));
        assert!(matches!(result, Err(StageError::Cancelled)), "{chunking:?}");
        assert_eq!(asked.get(), 8, "{chunking:?}");
    }
}

#[test]
fn a_reader_that_fails_ends_the_decode() {
    let _together = together();
    let mut seen = 0;
    let result = decoder().decode_frames(
        &here(&latents("9", 4, 9, SIDES)),
        &whole(Chunking::Whole),
        &mut |_, frames| {
            seen += frames.dim(0).unwrap();
            Err(StageError::Cancelled)
        },
    );
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(seen, 13);
}

#[test]
fn inputs_that_do_not_match_are_refused_by_name() {
    let _together = together();
    let name = "decoder.mid_block.attentions.0.to_k.bias";
    let mut tensors = weights(&config());
    tensors.remove(name);
    let error = HunyuanVaeDecoder::new(&config(), &resident(&tensors)).unwrap_err();
    assert!(error.to_string().contains(name), "{error}");
    for shape in [
        vec![1, 5, 2, 3, 2],
        vec![1, 4, 3, 2],
        vec![2, 4, 2, 3, 2],
        vec![1, 4, 0, 3, 2],
    ] {
        let latents = Tensor::zeros(shape.as_slice(), DType::F32, test_device()).unwrap();
        let how = whole(Chunking::Whole);
        let result = decoder().decode_frames(&latents, &how, &mut |_, _| Ok(()));
        assert!(matches!(result, Err(StageError::BadInput(_))), "{shape:?}");
    }
    let encoder = encoder();
    for (bytes, count, size) in [
        (24 * 16 * 3, 2, (16, 24)),
        (20 * 16 * 3, 1, (16, 20)),
        (0, 0, (16, 24)),
    ] {
        let result = encoder.encode_rgb8(&vec![0; bytes], count, size, Chunking::Whole, &|| false);
        assert!(
            matches!(result, Err(StageError::BadInput(_))),
            "{count} of {size:?}"
        );
    }
    let strange = HunyuanVaeConfig {
        act_fn: "mish".to_owned(),
        ..config()
    };
    assert!(HunyuanVaeDecoder::new(&strange, &resident(&weights(&config()))).is_err());
}

#[test]
fn values_that_are_not_finite_are_reported() {
    let _together = together();
    let frames = Tensor::full(f32::INFINITY, (1, 2, 2, 3), test_device()).unwrap();
    let result = frames_to_rgb8(&frames);
    assert!(matches!(result, Err(StageError::NotFinite { ref component, step: 0 }) if component == "vae"));
    let mut tensors = weights(&config());
    let name = "encoder.conv_norm_out.bias";
    let infinite = (tensors[name].ones_like().unwrap() * f64::INFINITY).unwrap();
    tensors.insert(name.to_owned(), infinite);
    let encoder = HunyuanVaeEncoder::new(&config(), &resident(&tensors)).expect("an encoder");
    let result = encoder.encode_rgb8(&film(1, SIDES), 1, (16, 24), Chunking::Whole, &|| false);
    assert!(matches!(result, Err(StageError::NotFinite { .. })));
}

#[test]
fn every_mutation_of_the_weights_is_seen() {
    let _together = together();
    let right = &expected()["decode.6.frames"];
    let latents = latents("6", 4, 6, SIDES);
    for (name, _) in config().tensor_shapes() {
        if name.starts_with("encoder.") || name.starts_with("quant_conv") {
            continue;
        }
        // Keys' biases add the same to all scores of a query.
        if name.ends_with("to_k.bias") {
            continue;
        }
        let mut tensors = weights(&config());
        let changed = (&tensors[&name] * 1.5).unwrap();
        tensors.insert(name.clone(), changed);
        let decoder = HunyuanVaeDecoder::new(&config(), &resident(&tensors)).expect("a decoder");
        let frames = decode(&decoder, &latents, &whole(Chunking::Whole));
        let error = distance(&frames, right);
        assert!(error > 5e-5, "{name}: {error:e}");
    }
}

#[test]
fn names_of_the_original_checkpoint_are_those_of_diffusers() {
    for (name, _) in HunyuanVaeConfig::default().tensor_shapes() {
        assert_eq!(diffusers_name_of_original(&name), Some(name.clone()));
        assert_eq!(diffusers_name_of_original(&format!("vae.{name}")), Some(name));
    }
    for strange in ["", "decoder", "transformer.x", "vae.", "loss.logvar"] {
        assert_eq!(diffusers_name_of_original(strange), None, "{strange}");
    }
    let weights = HunyuanVaeConfig::default().tensor_shapes();
    let count: usize = weights
        .iter()
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum();
    assert_eq!(count / 100_000, 2464, "{count}");
}

/// Larger than the fixtures', so that maps outweigh the buffers that threads keep.
fn small_config() -> HunyuanVaeConfig {
    HunyuanVaeConfig {
        block_out_channels: vec![16, 32, 32, 32],
        layers_per_block: 1,
        norm_num_groups: 8,
        ..HunyuanVaeConfig::default()
    }
}

#[test]
fn a_decode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(decode_needs_what_was_predicted);
}

#[allow(clippy::print_stdout)] // it prints figures
fn decode_needs_what_was_predicted() {
    let config = small_config();
    let not_halved = HunyuanVaeConfig {
        block_out_channels: vec![32, 32, 32, 32],
        ..small_config()
    };
    let sides = (12, 10);
    for (config, length) in [(config.clone(), 6), (config, 1), (not_halved, 2)] {
        let decoder = HunyuanVaeDecoder::new(&config, &ComponentTensors::new(weights(&config))).unwrap();
        let latents = latents("scratch", 16, length, sides);
        for chunking in [
            Chunking::Whole,
            Chunking::Strips { bytes: 1 << 20 },
            Chunking::Strips { bytes: 1 << 17 },
            Chunking::Tiles { latent_size: 8 },
        ] {
            let run = || {
                let how = FrameDecoding {
                    frames_at_a_time: 4,
                    ..whole(chunking)
                };
                decoder.decode_frames(&latents, &how, &mut |_, frames| frames_to_rgb8(&frames).map(drop))
            };
            let measured = settled_peak(|| run().unwrap());
            let scratch = decode_scratch(&config, sides, length, chunking, DType::F32);
            let ratio = scratch.0 as f64 / measured as f64;
            println!(
                "{:?} {length} {}: predicted {} measured {measured} ({ratio:.2})",
                config.block_out_channels,
                chunking.label(),
                scratch.0
            );
            // The largest tile in space is the first, before there are edges and a whole to join.
            let most = if chunking.is_approximate() { 1.25 } else { 1.15 };
            assert!((0.9..most).contains(&ratio), "{chunking:?}");
        }
    }
}

#[test]
fn an_encode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(encode_needs_what_was_predicted);
}

#[allow(clippy::print_stdout)] // it prints figures
fn encode_needs_what_was_predicted() {
    let config = small_config();
    let encoder = HunyuanVaeEncoder::new(&config, &ComponentTensors::new(weights(&config))).unwrap();
    let sides = (12, 10);
    for count in [1, 21] {
        let film = film(count, sides);
        for chunking in [
            Chunking::Whole,
            Chunking::Strips { bytes: 1 << 18 },
            Chunking::Tiles { latent_size: 8 },
        ] {
            let run = || {
                encoder
                    .encode_rgb8(&film, count, (80, 96), chunking, &|| false)
                    .unwrap()
            };
            let measured = settled_peak(run);
            let scratch = encode_scratch(&config, sides, count, chunking, DType::F32);
            let ratio = scratch.0 as f64 / measured as f64;
            println!(
                "{count} frames {}: predicted {} measured {measured} ({ratio:.2})",
                chunking.label(),
                scratch.0
            );
            assert!((0.9..1.15).contains(&ratio), "{chunking:?}");
        }
    }
}

#[test]
#[allow(clippy::print_stdout)] // it prints figures
fn every_rung_is_predicted_to_need_less_than_the_one_before() {
    let _together = together();
    let config = HunyuanVaeConfig::default();
    for (h, w) in [(60, 104), (80, 80), (90, 160), (16, 16), (2, 2)] {
        for length in [1, 5, 33] {
            let rungs = decode_ladder(&config, (h, w), length, DType::BF16);
            println!("{h}x{w}, {length} latents");
            for (_, rung) in &rungs {
                println!("  {} {} MiB", rung.label, rung.scratch.0 >> 20);
            }
            assert_eq!(rungs[0].0, Chunking::Whole);
            assert!(rungs.windows(2).all(|pair| pair[1].1.scratch < pair[0].1.scratch));
            let declared = |(chunking, rung): &(Chunking, pipelines::Rung)| {
                chunking.is_approximate() == rung.approximate
            };
            assert!(rungs.iter().all(declared));
            let encode = encode_ladder(&config, (h, w), 4 * length + 1, DType::BF16);
            assert!(
                encode
                    .windows(2)
                    .all(|pair| pair[1].1.scratch < pair[0].1.scratch)
            );
        }
    }
    // The target for a tile of 832x480.
    let scratch = decode_scratch(&config, (60, 104), 5, Chunking::Whole, DType::BF16);
    assert!(scratch.0 < 5 << 30, "{}", scratch.0);
}
