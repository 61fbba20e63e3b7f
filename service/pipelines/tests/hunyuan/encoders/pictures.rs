//! SigLIP, and the preprocessing of its pictures.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::StageError;
use pipelines::vision::processor::{ImageProcessor, bytes_through_floats};
use pipelines::vision::siglip::{SiglipConfig, SiglipEncoder};

use super::{Mutation, error_of, narrow, neutral, path, renamed, swap, weights};
use crate::device::{BF16_COMPONENT, test_device, tolerances};
use crate::numbers::{distance, fixtures, json, numbers, resident, tensors};

fn processor() -> ImageProcessor {
    ImageProcessor::open(&fixtures().join(path("feature_extractor"))).expect("a processor")
}

/// A picture's bytes and its size (width, height).
fn picture(of: &Tensor) -> (Vec<u8>, (u32, u32)) {
    let (height, width, _) = of.dims3().expect("a picture");
    let bytes = of.flatten_all().and_then(|bytes| bytes.to_vec1()).expect("bytes");
    (bytes, (width as u32, height as u32))
}

#[test]
fn pictures_are_scaled_to_the_byte_and_normalized_as_by_the_reference() {
    let expected = tensors(&path("expected/image_encoder.safetensors"));
    // Neither brightest number nor mean: the bytes themselves.
    let bare = r#"{"size": {"height": 22, "width": 22}, "rescale_factor": 1.0, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}"#;
    let bare: ImageProcessor = serde_json::from_str(bare).expect("a processor");
    let names: Vec<&str> = expected
        .keys()
        .filter_map(|name| name.strip_suffix(".rgb"))
        .collect();
    assert_eq!(names.len(), 4);
    for name in names {
        let (rgb, size) = picture(&expected[&format!("{name}.rgb")]);
        let scaled = bare
            .pixels(&rgb, size)
            .expect("pixels")
            .to_dtype(DType::U8)
            .unwrap();
        let scaled: Vec<u8> = scaled.flatten_all().unwrap().to_vec1().unwrap();
        let reference: Vec<u8> = expected[&format!("{name}.scaled")]
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap();
        assert!(scaled == reference, "{name}");
    }
    let (rgb, size) = picture(&expected["thin.rgb"]);
    let pixels = processor().pixels(&rgb, size).expect("pixels");
    let reference = &expected["thin.pixels"];
    assert_eq!(pixels.dims(), reference.dims());
    assert_eq!(numbers(&pixels), numbers(reference));
}

#[test]
fn bytes_change_on_their_way_through_floats_as_in_the_reference() {
    let expected = tensors(&path("expected/image_encoder.safetensors"));
    let all: Vec<u8> = (0..=255).collect();
    let reference = expected["framepack.bytes"].flatten_all().unwrap();
    let reference: Vec<u8> = reference.to_vec1().unwrap();
    assert_eq!(bytes_through_floats(&all), reference);
    assert_ne!(all, reference);
}

#[test]
fn another_processor_is_refused() {
    for (file, is_known) in [
        ("{}", true),
        (r#"{"resample": 1}"#, true),
        (r#"{"resample": 2}"#, false),
        (r#"{"do_resize": false}"#, false),
        (r#"{"do_normalize": false}"#, false),
        (r#"{"size": {"height": 0, "width": 22}}"#, false),
        (r#"{"size": {"height": 22, "width": 999999}}"#, false),
        (r#"{"image_std": [0.5, 0.0, 0.5]}"#, false),
        (r#"{"size": {"shortest_edge": 22}}"#, false),
    ] {
        let folder = tempfile::TempDir::new().expect("a folder");
        std::fs::write(folder.path().join("preprocessor_config.json"), file).expect("a file");
        assert_eq!(ImageProcessor::open(folder.path()).is_ok(), is_known, "{file}");
    }
    let processor = processor();
    assert!(processor.pixels(&[0; 11], (2, 2)).is_err());
    assert!(processor.pixels(&[], (0, 0)).is_err());
}

fn siglip_config() -> SiglipConfig {
    json(&path("image_encoder/config.json"))
}

fn see(tensors: &ComponentTensors, pixels: &Tensor) -> Tensor {
    SiglipEncoder::new(&siglip_config(), "image_encoder", tensors)
        .and_then(|encoder| encoder.forward(pixels, &|| false))
        .expect("an encoding")
}

#[test]
fn encoding_of_pictures_equals_the_reference() {
    let expected = tensors(&path("expected/image_encoder.safetensors"));
    let weights = weights("image_encoder");
    let bare = renamed(weights.clone(), |name| name.replace("vision_model.", ""));
    let (rgb, size) = picture(&expected["large.rgb"]);
    let framepack = processor()
        .pixels(&bytes_through_floats(&rgb), size)
        .expect("pixels");
    for weights in [&weights, &bare] {
        let weights = resident(weights);
        for (name, pixels) in [("thin", &expected["thin.pixels"]), ("framepack", &framepack)] {
            let found = see(&weights, pixels);
            let apart = distance(&found, &expected[&format!("{name}.hidden")]);
            println!("{name}: {apart:.2e}");
            assert!(apart < tolerances().component, "{name}: {apart:e}");
        }
    }
}

#[test]
fn encoding_of_pictures_in_half_precision_equals_f32_within_its_rounding() {
    let expected = tensors(&path("expected/image_encoder.safetensors"));
    // candle's convolution on a CPU has no bf16, and pipelines are not computed in it there.
    let dtype = match test_device().is_cpu() {
        true => DType::F16,
        false => DType::BF16,
    };
    let weights = narrow(weights("image_encoder"), dtype);
    let found = see(&resident(&weights), &expected["thin.pixels"]);
    assert_eq!(found.dtype(), dtype);
    let apart = distance(&found, &expected["thin.hidden"]);
    println!("{dtype:?}: {apart:.2e}");
    assert!(apart < BF16_COMPONENT, "{apart:e}");
}

#[test]
fn a_wrong_weight_of_the_encoder_of_pictures_exceeds_the_tolerance() {
    let mutations: [Mutation; 5] = [
        ("no positions", |t| {
            neutral(t, "vision_model.embeddings.position_embedding.weight", 0.0);
        }),
        ("no bias of patches", |t| {
            neutral(t, "vision_model.embeddings.patch_embedding.bias", 0.0);
        }),
        ("queries and keys of layers", |t| {
            let name = |layer: usize| format!("vision_model.encoder.layers.{layer}.self_attn.q_proj.weight");
            swap(t, &name(0), &name(1));
        }),
        ("norms of a layer", |t| {
            let name = |norm: usize| format!("vision_model.encoder.layers.1.layer_norm{norm}.bias");
            swap(t, &name(1), &name(2));
        }),
        ("a neutral last norm", |t| {
            neutral(t, "vision_model.post_layernorm.weight", 1.0)
        }),
    ];
    let expected = tensors(&path("expected/image_encoder.safetensors"));
    for (name, mutate) in mutations {
        let mut weights = weights("image_encoder");
        mutate(&mut weights);
        let found = see(&resident(&weights), &expected["thin.pixels"]);
        let factor = error_of(&found, &expected["thin.hidden"]);
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}

#[test]
fn the_encoder_of_pictures_refuses_invalid_input() {
    let mut weights = weights("image_encoder");
    let tensors = resident(&weights);
    let encoder = SiglipEncoder::new(&siglip_config(), "image_encoder", &tensors).expect("an encoder");
    let pixels = |side: usize| Tensor::zeros((1, 3, side, side), DType::F32, &Device::Cpu).unwrap();
    let wrong = encoder.forward(&pixels(21), &|| false);
    assert!(matches!(wrong, Err(StageError::BadInput(_))), "{wrong:?}");
    let cancelled = encoder.forward(&pixels(22), &|| true);
    assert!(matches!(cancelled, Err(StageError::Cancelled)));

    for (file, is_known) in [
        ("{}", true),
        (
            r#"{"vision_config": {"patch_size": 14, "image_size": 384}, "text_config": {}}"#,
            true,
        ),
        (r#"{"patch_size": 0}"#, false),
        (r#"{"patch_size": 300}"#, false),
        (r#"{"num_channels": 4}"#, false),
        (r#"{"num_attention_heads": 5}"#, false),
        (r#"{"hidden_act": "gelu"}"#, false),
        (r#"{"image_size": 16384, "patch_size": 1}"#, false),
        (r#"{"layer_norm_eps": 0}"#, false),
    ] {
        let config: SiglipConfig = serde_json::from_str(file).expect(file);
        assert_eq!(config.check().is_ok(), is_known, "{file}");
    }
    let published = SiglipConfig::so400m_patch14_384();
    assert_eq!((published.check(), published.tokens()), (Ok(()), 729));
    let parameters: usize = published
        .tensor_shapes(&|_| false)
        .iter()
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum();
    assert_eq!(parameters / 1_000_000, 412);

    weights.remove("vision_model.encoder.layers.1.mlp.fc1.bias");
    let error = SiglipEncoder::new(&siglip_config(), "image_encoder", &resident(&weights)).unwrap_err();
    assert!(error.to_string().contains("layers.1.mlp.fc1.bias"), "{error}");
}
