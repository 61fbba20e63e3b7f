//! FLUX's autoencoder against diffusers (fixtures/make_fixtures.py), and its strips and tiles against the whole.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::autoencoders::kl::{
    Chunking, VaeConfig, VaeDecoder, VaeEncoder, decode_ladder, decode_scratch, diffusers_name_of_bfl,
    encode_ladder, encode_scratch,
};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::made_up::{latent, made_up, noise};
use crate::numbers::{distance, json, resident, tensors};
use crate::{alone, peak_of, together};

type Tensors = HashMap<String, Tensor>;

fn load(path: &str) -> Tensors {
    tensors(&format!("flux-tiny/{path}"))
}

fn weights() -> Tensors {
    load("vae/diffusion_pytorch_model.safetensors")
}

fn config() -> VaeConfig {
    json("flux-tiny/vae/config.json")
}

fn decoder_of(tensors: Tensors) -> VaeDecoder {
    VaeDecoder::new(&config(), &resident(&tensors)).expect("a decoder")
}

fn decode(decoder: &VaeDecoder, latent: &Tensor, chunking: Chunking) -> Tensor {
    decode_there(decoder, &here(latent), chunking)
}

/// Where the decoder and the latent are.
fn decode_there(decoder: &VaeDecoder, latent: &Tensor, chunking: Chunking) -> Tensor {
    decoder.decode(latent, chunking, &|| false).expect("a picture")
}

fn picture_of(bytes: &Tensor) -> Tensor {
    let (height, width, _) = bytes.dims3().unwrap();
    let bytes = bytes.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    from_rgb8(&bytes, width, height, test_device())
}

/// diffusers' `VaeImageProcessor.postprocess`: `[1, 3, height, width]` of -1 to 1 to RGB, row-major. Values are clamped; halves are
/// rounded to even, as numpy does.
fn to_rgb8(picture: &Tensor) -> Vec<u8> {
    let (_, _, height, width) = picture.dims4().unwrap();
    let values = picture
        .to_dtype(DType::F32)
        .unwrap()
        .to_device(&Device::Cpu)
        .unwrap();
    let values = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let byte = |value: f32| ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
    let plane = height * width;
    (0..plane)
        .flat_map(|pixel| [0, 1, 2].map(|channel| byte(values[channel * plane + pixel])))
        .collect()
}

/// diffusers' `VaeImageProcessor.preprocess`: RGB, row-major, to f32 `[1, 3, height, width]` of -1 to 1.
fn from_rgb8(rgb: &[u8], width: usize, height: usize, device: &Device) -> Tensor {
    let value = |byte: &u8| 2.0 * (f32::from(*byte) / 255.0) - 1.0;
    let values: Vec<f32> = (0..3)
        .flat_map(|channel| rgb.iter().skip(channel).step_by(3).map(value))
        .collect();
    Tensor::from_vec(values, (1, 3, height, width), device).unwrap()
}

#[test]
fn decoding_equals_diffusers() {
    let _together = together();
    let (decoder, expected) = (decoder_of(weights()), load("expected/vae.safetensors"));
    for name in ["square", "tall"] {
        let picture = decode(
            &decoder,
            &expected[&format!("decode.{name}.latent")],
            Chunking::Whole,
        );
        let error = distance(&picture, &expected[&format!("decode.{name}.picture")]);
        println!("decode {name}: {error:.2e}");
        assert!(error < tolerances().component, "{name}: {error:e}");
    }
}

#[test]
fn encoding_equals_diffusers_whole_and_in_strips() {
    let _together = together();
    let encoder = VaeEncoder::new(&config(), &resident(&weights())).expect("an encoder");
    let expected = load("expected/vae.safetensors");
    for name in ["square", "wide"] {
        let picture = picture_of(&expected[&format!("encode.{name}.picture")]);
        for chunking in [1, 2, 3, 5]
            .map(|latent_rows| Chunking::Strips { latent_rows })
            .into_iter()
            .chain([Chunking::Whole])
        {
            let moments = encoder.encode(&picture, chunking, &|| false).expect("moments");
            let mean = distance(&moments.mean, &expected[&format!("encode.{name}.mean")]);
            let spread = distance(&moments.log_variance, &expected[&format!("encode.{name}.logvar")]);
            println!("encode {name} {}: {mean:.2e} {spread:.2e}", chunking.label());
            let most = tolerances().component;
            assert!(
                mean < most && spread < most,
                "{name} {chunking:?}: {mean:e} {spread:e}"
            );
        }
    }
}

#[test]
fn decoded_bytes_equal_the_rounded_picture() {
    let _together = together();
    let decoder = decoder_of(weights());
    let scaled = here(&latent(7, 5));
    let unscaled = config().unscaled(&scaled).expect("a latent");
    for chunking in [Chunking::Whole, Chunking::Strips { latent_rows: 2 }] {
        let expected = to_rgb8(&decode_there(&decoder, &unscaled, chunking));
        let found = decoder
            .decode_to_rgb8(&scaled, chunking, &|| false)
            .expect("bytes");
        assert_eq!((found.width, found.height), (40, 56));
        assert_eq!(found.rgb.len(), expected.len());
        // A value in the middle between two bytes may be rounded to either.
        let apart = |(a, b): (&u8, &u8)| a.abs_diff(*b);
        let worst = found.rgb.iter().zip(&expected).map(apart).max();
        assert!(worst <= Some(1), "{chunking:?}: {worst:?}");
        let different: std::collections::HashSet<u8> = found.rgb.iter().copied().collect();
        assert!(different.len() > 10, "a picture of something");
    }
}

#[test]
fn encoding_bytes_equals_encoding_the_picture() {
    let _together = together();
    let encoder = VaeEncoder::new(&config(), &resident(&weights())).expect("an encoder");
    let expected = load("expected/vae.safetensors");
    let bytes = &expected["encode.wide.picture"];
    let (height, width, _) = bytes.dims3().unwrap();
    let rgb = bytes.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let moments = encoder
        .encode_rgb8(&rgb, (width, height), Chunking::Whole, &|| false)
        .expect("moments");
    let error = distance(&moments.mean, &expected["encode.wide.mean"]);
    assert!(error < tolerances().component, "{error:e}");
    let few = encoder.encode_rgb8(&rgb[3..], (width, height), Chunking::Whole, &|| false);
    assert!(few.is_err());
    let odd = encoder.encode_rgb8(&rgb, (width - 1, height), Chunking::Whole, &|| false);
    assert!(matches!(odd, Err(StageError::BadInput(_))));
}

#[test]
fn strips_of_any_size_equal_the_whole() {
    let _together = together();
    let decoder = decoder_of(weights());
    let mut worst = 0f64;
    for (h, w) in [(13, 9), (6, 17), (1, 5), (16, 16)] {
        let latent = latent(h, w);
        let whole = decode(&decoder, &latent, Chunking::Whole);
        for latent_rows in 1..=h + 1 {
            let strips = decode(&decoder, &latent, Chunking::Strips { latent_rows });
            let error = distance(&strips, &whole);
            worst = worst.max(error);
            assert!(
                error < tolerances().strips,
                "{h}x{w} in strips of {latent_rows}: {error:e}"
            );
        }
    }
    println!("strips: {worst:.2e}");
}

#[test]
fn tiles_equal_diffusers_tiles() {
    let _together = together();
    let (decoder, expected) = (decoder_of(weights()), load("expected/vae.safetensors"));
    let latent = &expected["decode.tall.latent"];
    let tiled = decode(&decoder, latent, Chunking::Tiles { latent_size: 8 });
    let error = distance(&tiled, &expected["decode.tall.tiled_8"]);
    println!("tiles: {error:.2e}");
    assert!(error < tolerances().pipeline, "{error:e}");
    let from_whole = distance(&tiled, &expected["decode.tall.picture"]);
    assert!(from_whole > 1e-3, "tiles are an approximation: {from_whole:e}");
    // A latent that fits in one tile is not tiled.
    let one = decode(&decoder, latent, Chunking::Tiles { latent_size: 16 });
    assert!(distance(&one, &decode(&decoder, latent, Chunking::Whole)) == 0.0);
}

#[test]
fn wrong_tensor_mappings_exceed_the_tolerance() {
    let _together = together();
    let expected = load("expected/vae.safetensors");
    let latent = &expected["decode.square.latent"];
    let decode_error = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = weights();
        change(&mut tensors);
        distance(
            &decode(&decoder_of(tensors), latent, Chunking::Whole),
            &expected["decode.square.picture"],
        )
    };
    let swap = |tensors: &mut Tensors, a: &str, b: &str| {
        let (first, second) = (tensors[a].clone(), tensors[b].clone());
        tensors.insert(a.to_owned(), second);
        tensors.insert(b.to_owned(), first);
    };
    let drop_it = |tensors: &mut Tensors, name: &str| {
        let zeros = tensors[name].zeros_like().unwrap();
        assert!(tensors.insert(name.to_owned(), zeros).is_some());
    };
    let resnet = "decoder.up_blocks.1.resnets.0";
    let attention = "decoder.mid_block.attentions.0";
    type Change<'a> = Box<dyn Fn(&mut Tensors) + 'a>;
    let mut mutations: Vec<(String, Change<'_>)> = Vec::new();
    for name in [
        "decoder.conv_in.bias",
        "decoder.mid_block.resnets.1.norm1.bias",
        "decoder.mid_block.attentions.0.to_v.bias",
        "decoder.mid_block.attentions.0.to_out.0.bias",
        "decoder.mid_block.attentions.0.group_norm.bias",
        "decoder.up_blocks.0.upsamplers.0.conv.bias",
        "decoder.up_blocks.2.resnets.1.conv1.bias",
        "decoder.up_blocks.3.resnets.0.conv_shortcut.bias",
        "decoder.conv_norm_out.bias",
        "decoder.conv_out.bias",
    ] {
        mutations.push((format!("no {name}"), Box::new(move |t| drop_it(t, name))));
    }
    for part in ["weight", "bias"] {
        mutations.push((
            format!("norms swapped: {part}"),
            Box::new(move |t| {
                swap(
                    t,
                    &format!("{resnet}.norm1.{part}"),
                    &format!("{resnet}.norm2.{part}"),
                )
            }),
        ));
        mutations.push((
            format!("q and v swapped: {part}"),
            Box::new(move |t| {
                swap(
                    t,
                    &format!("{attention}.to_q.{part}"),
                    &format!("{attention}.to_v.{part}"),
                )
            }),
        ));
        mutations.push((
            format!("middle blocks swapped: {part}"),
            Box::new(move |t| {
                let name = |i: usize| format!("decoder.mid_block.resnets.{i}.conv1.{part}");
                swap(t, &name(0), &name(1));
            }),
        ));
    }
    mutations.push((
        "a norm's scale and shift swapped".to_owned(),
        Box::new(|t| {
            swap(
                t,
                &format!("{resnet}.norm1.weight"),
                &format!("{resnet}.norm1.bias"),
            )
        }),
    ));
    mutations.push((
        "a kernel transposed".to_owned(),
        Box::new(|t| {
            let name = "decoder.conv_in.weight";
            let transposed = t[name].transpose(2, 3).unwrap().contiguous().unwrap();
            t.insert(name.to_owned(), transposed);
        }),
    ));
    for (name, change) in &mutations {
        let error = decode_error(change);
        assert!(error > 1e-3, "{name}: {error:e}");
    }
}

#[test]
fn bfl_names_cover_the_whole_autoencoder() {
    let _together = together();
    // Every diffusers name, converted to BFL's, is mapped back.
    for name in weights().keys() {
        let mut bfl = name
            .replace("mid_block.resnets.0", "mid.block_1")
            .replace("mid_block.resnets.1", "mid.block_2")
            .replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
            .replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
            .replace("mid_block.attentions.0.to_", "mid.attn_1.")
            .replace("conv_norm_out", "norm_out")
            .replace("conv_shortcut", "nin_shortcut")
            .replace("downsamplers.0", "downsample")
            .replace("upsamplers.0", "upsample")
            .replace("resnets", "block")
            .replace("down_blocks", "down");
        for level in 0..4 {
            bfl = bfl.replace(&format!("up_blocks.{level}"), &format!("up.{}", 3 - level));
        }
        assert_eq!(diffusers_name_of_bfl(&bfl).as_ref(), Some(name), "{bfl}");
    }
    for strange in [
        "",
        "decoder",
        "decoder.up.4.block.0.conv1.weight",
        "encoder.up.0.block.0.conv1.weight",
    ] {
        assert_eq!(diffusers_name_of_bfl(strange), None, "{strange}");
    }
    for strange in [
        "decoder.mid.attn_1.q.scale",
        "double_blocks.0.img_mod.lin.weight",
        "decoder.conv_in",
    ] {
        assert_eq!(diffusers_name_of_bfl(strange), None, "{strange}");
    }
}

#[test]
fn attention_may_be_stored_as_1x1_convolutions() {
    let _together = together();
    let latent = latent(4, 4);
    let expected = decode(&decoder_of(weights()), &latent, Chunking::Whole);
    let mut tensors = weights();
    for layer in ["to_q", "to_k", "to_v", "to_out.0"] {
        let name = format!("decoder.mid_block.attentions.0.{layer}.weight");
        let (out, into) = tensors[&name].dims2().unwrap();
        let convolution = tensors[&name].reshape((out, into, 1, 1)).unwrap();
        tensors.insert(name, convolution);
    }
    assert_eq!(
        distance(&decode(&decoder_of(tensors), &latent, Chunking::Whole), &expected),
        0.0
    );
}

/// Layers after the encoder and before the decoder, which double every number.
fn doubling(tensors: &mut Tensors, name: &str, channels: usize) {
    let twice = (Tensor::eye(channels, DType::F32, &Device::Cpu).unwrap() * 2.0).unwrap();
    let weight = twice.reshape((channels, channels, 1, 1)).unwrap();
    tensors.insert(format!("{name}.weight"), weight);
    let bias = Tensor::zeros(channels, DType::F32, &Device::Cpu).unwrap();
    tensors.insert(format!("{name}.bias"), bias);
}

#[test]
fn layers_beside_the_halves_change_the_latent() {
    let _together = together();
    let config = VaeConfig {
        use_quant_conv: true,
        use_post_quant_conv: true,
        ..config()
    };
    let (latent, picture) = (latent(6, 4), here(&noise(&[1, 3, 48, 32], 0.5)));
    let mut with = weights();
    doubling(&mut with, "quant_conv", 2 * config.latent_channels);
    doubling(&mut with, "post_quant_conv", config.latent_channels);
    let decoder = VaeDecoder::new(&config, &resident(&with)).expect("a decoder");
    let encoder = VaeEncoder::new(&config, &resident(&with)).expect("an encoder");
    let plain = VaeEncoder::new(&self::config(), &resident(&with)).expect("an encoder");
    for chunking in [Chunking::Whole, Chunking::Strips { latent_rows: 2 }] {
        let decoded = decode(&decoder, &latent, chunking);
        let expected = decode(&decoder_of(weights()), &(&latent * 2.0).unwrap(), chunking);
        let error = distance(&decoded, &expected);
        assert!(error < tolerances().component, "{chunking:?}: {error:e}");
        let mean = |encoder: &VaeEncoder| encoder.encode(&picture, chunking, &|| false).unwrap().mean;
        let error = distance(&mean(&encoder), &(mean(&plain) * 2.0).unwrap());
        assert!(error < tolerances().component, "{chunking:?}: {error:e}");
    }
}

#[test]
fn a_cancelled_decode_ends_early() {
    let _together = together();
    let decoder = decoder_of(weights());
    for chunking in [
        Chunking::Whole,
        Chunking::Strips { latent_rows: 1 },
        Chunking::Tiles { latent_size: 8 },
    ] {
        let asked = Cell::new(0);
        let cancelled = || {
            asked.set(asked.get() + 1);
            asked.get() > 7
        };
        let result = decoder.decode(&here(&latent(16, 16)), chunking, &cancelled);
        assert!(matches!(result, Err(StageError::Cancelled)), "{chunking:?}");
        assert_eq!(asked.get(), 8, "{chunking:?}");
    }
}

#[test]
fn values_that_are_not_finite_are_reported() {
    let _together = together();
    let mut tensors = weights();
    let name = "decoder.up_blocks.1.resnets.0.conv2.bias";
    let infinite = (tensors[name].ones_like().unwrap() * f64::INFINITY).unwrap();
    tensors.insert(name.to_owned(), infinite);
    let result = decoder_of(tensors).decode(&here(&latent(4, 4)), Chunking::Whole, &|| false);
    assert!(matches!(result, Err(StageError::NotFinite { ref component, step: 0 }) if component == "vae"));
}

#[test]
fn inputs_that_do_not_match_are_refused_by_name() {
    let _together = together();
    let mut tensors = weights();
    tensors.remove("decoder.mid_block.attentions.0.to_k.bias");
    let error = VaeDecoder::new(&config(), &ComponentTensors::new(tensors)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("decoder.mid_block.attentions.0.to_k.bias"),
        "{error}"
    );
    let wrong = decoder_of(weights()).decode(&here(&noise(&[1, 4, 8, 8], 1.0)), Chunking::Whole, &|| false);
    assert!(matches!(wrong, Err(StageError::BadInput(_))));
    let strange = VaeConfig {
        act_fn: "mish".to_owned(),
        ..config()
    };
    assert!(VaeDecoder::new(&strange, &ComponentTensors::new(weights())).is_err());
}

#[test]
fn the_reference_conversion_equals_diffusers() {
    let _together = together();
    let values: Vec<f32> = vec![
        -2.0,
        -1.0,
        0.0,
        1.0 / 255.0,
        1.0,
        3.0,
        -0.5,
        0.5,
        0.25,
        0.1,
        0.2,
        0.3,
    ];
    let picture = Tensor::from_vec(values, (1, 3, 2, 2), &Device::Cpu).unwrap();
    let expected = [0, 255, 159, 0, 255, 140, 128, 64, 153, 128, 191, 166];
    assert_eq!(to_rgb8(&picture), expected);
    let bytes: Vec<u8> = (0..=254).collect();
    assert_eq!(to_rgb8(&from_rgb8(&bytes, 17, 5, &Device::Cpu)), bytes);
}

/// Slightly larger than the demo model.
fn small_config() -> VaeConfig {
    VaeConfig {
        block_out_channels: vec![32, 64, 64, 64],
        layers_per_block: 1,
        norm_num_groups: 8,
        sample_size: 256,
        ..VaeConfig::flux()
    }
}

/// Two threads on any machine: each keeps a buffer of about a megabyte for its products.
fn on_two_threads(measure: impl FnOnce() + Send) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.expect("two threads").install(measure);
}

#[test]
fn a_decode_allocates_the_predicted_scratch() {
    let _alone = alone();
    on_two_threads(decode_needs_what_was_predicted);
}

#[allow(clippy::print_stdout)] // it prints figures
fn decode_needs_what_was_predicted() {
    let wide = VaeConfig {
        block_out_channels: vec![64, 64],
        ..small_config()
    };
    let shallow = VaeConfig {
        block_out_channels: vec![64],
        ..small_config()
    };
    for (config, h, w) in [(small_config(), 16, 12), (wide, 24, 24), (shallow, 32, 32)] {
        let decoder = VaeDecoder::new(&config, &ComponentTensors::new(made_up(&config))).expect("a decoder");
        let latent = latent(h, w);
        for (chunking, rung) in decode_ladder(&config, h, w, DType::F32) {
            drop(decode_there(&decoder, &latent, chunking)); // threads, and the buffers that they keep for products
            let (measured, picture) = peak_of(|| decode_there(&decoder, &latent, chunking));
            drop(picture);
            let ratio = rung.scratch.0 as f64 / measured as f64;
            println!(
                "{:?} {h}x{w} {}: predicted {} measured {measured} ({ratio:.2})",
                config.block_out_channels, rung.label, rung.scratch.0
            );
            assert!((0.9..1.15).contains(&ratio), "{chunking:?}");
            assert_eq!(rung.scratch, decode_scratch(&config, h, w, chunking, DType::F32));
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
    let encoder = VaeEncoder::new(&config(), &ComponentTensors::new(weights())).expect("an encoder");
    let picture = noise(&[1, 3, 256, 192], 0.5);
    let (own, _) = peak_of(|| picture.copy().expect("a copy"));
    for (chunking, rung) in encode_ladder(&config(), 32, 24, DType::F32) {
        drop(encoder.encode(&picture, chunking, &|| false)); // threads, and the buffers that they keep for products
        let (measured, moments) = peak_of(|| encoder.encode(&picture, chunking, &|| false));
        drop(moments);
        let ratio = rung.scratch.0 as f64 / (measured + own) as f64;
        println!(
            "{}: predicted {} measured {} ({ratio:.2})",
            rung.label,
            rung.scratch.0,
            measured + own
        );
        assert!((0.9..1.15).contains(&ratio), "{chunking:?}");
    }
}

#[test]
fn bf16_decoding_and_encoding_equal_f32_within_rounding() {
    let _together = together();
    let expected = load("expected/vae.safetensors");
    let decoder = VaeDecoder::in_dtype(&config(), &resident(&weights()), DType::BF16).expect("a decoder");
    for name in ["square", "tall"] {
        let latent = &expected[&format!("decode.{name}.latent")];
        for chunking in [Chunking::Whole, Chunking::Strips { latent_rows: 3 }] {
            let picture = decode(&decoder, latent, chunking);
            let error = distance(&picture, &expected[&format!("decode.{name}.picture")]);
            println!("decode {name} in bf16, {}: {error:.2e}", chunking.label());
            assert!(error < BF16_COMPONENT, "{name}: {error:e}");
        }
    }
    let encoder = VaeEncoder::in_dtype(&config(), &resident(&weights()), DType::BF16).expect("an encoder");
    for name in ["square", "wide"] {
        let picture = picture_of(&expected[&format!("encode.{name}.picture")]);
        let moments = encoder
            .encode(&picture, Chunking::Whole, &|| false)
            .expect("moments");
        let error = distance(&moments.mean, &expected[&format!("encode.{name}.mean")]);
        println!("encode {name} in bf16: {error:.2e}");
        assert!(error < BF16_COMPONENT, "{name}: {error:e}");
    }
}

#[test]
fn every_rung_is_predicted_to_need_less_than_the_one_before() {
    let _together = together();
    for (h, w) in [(128, 128), (64, 96), (256, 256), (16, 16), (2, 2)] {
        let rungs = decode_ladder(&VaeConfig::flux(), h, w, DType::BF16);
        println!("{h}x{w}");
        for (_, rung) in &rungs {
            println!("  {} {} MiB", rung.label, rung.scratch.0 >> 20);
        }
        assert_eq!(rungs[0].0, Chunking::Whole);
        assert!(rungs.windows(2).all(|pair| pair[1].1.scratch < pair[0].1.scratch));
        assert!(
            rungs
                .iter()
                .all(|(chunking, rung)| chunking.is_approximate() == rung.approximate)
        );
        let encode = encode_ladder(&VaeConfig::flux(), h, w, DType::BF16);
        assert!(
            encode
                .windows(2)
                .all(|pair| pair[1].1.scratch < pair[0].1.scratch)
        );
        assert_eq!(
            encode[0].1.scratch,
            encode_scratch(&VaeConfig::flux(), h, w, Chunking::Whole, DType::BF16)
        );
    }
}

/// `cargo test -p pipelines --test autoencoders --release -- --ignored --nocapture duration_of_a_decode`
#[test]
#[ignore = "prints times"]
fn duration_of_a_decode() {
    let _alone = alone();
    let demo = VaeConfig {
        block_out_channels: vec![16, 32, 64, 96],
        ..small_config()
    };
    for (config, h, w) in [
        (demo, 16, 16),
        (small_config(), 16, 16),
        (VaeConfig::flux(), 16, 16),
    ] {
        let decoder = VaeDecoder::new(&config, &resident(&made_up(&config))).expect("a decoder");
        for chunking in [Chunking::Whole, Chunking::Strips { latent_rows: 4 }] {
            for _ in 0..3 {
                let start = std::time::Instant::now();
                drop(decode(&decoder, &latent(h, w), chunking));
                println!(
                    "{:?} {h}x{w} {}: {:?}",
                    config.block_out_channels,
                    chunking.label(),
                    start.elapsed()
                );
            }
        }
    }
}
