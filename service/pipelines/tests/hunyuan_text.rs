//! HunyuanVideo's text encoder and tokenizer, and FramePack's encoder of pictures, against transformers and diffusers
//! (`fixtures/make_hunyuan_text_fixtures.py`).
#![allow(clippy::unwrap_used, clippy::expect_used)] // What tests share is outside of them.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, Fp8Scales, QuantizedWeight, Weight, WeightFormat};
use pipelines::text::llama::{LlamaConfig, LlamaEncoder};
use pipelines::text::tokenizers::{LlamaTokenizer, TemplatedIds};
use pipelines::vision::processor::{ImageProcessor, bytes_through_floats};
use pipelines::vision::siglip::{SiglipConfig, SiglipEncoder};
use pipelines::{ModelError, StageError};
use serde::Deserialize;

#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/numbers.rs"]
mod numbers;
mod shapes_asked;

use device::{BF16_COMPONENT, ON_CPU, here, test_device, tolerances};
use numbers::{distance, fixtures, json, numbers, resident, tensors};
use shapes_asked::{asked, words};

const FOLDER: &str = "hunyuan-text-tiny";

/// Tokens of the template before the prompt, with the start token: `crop_start` of the reference.
const HEAD: usize = 95;

/// A file of the fixtures.
fn path(file: &str) -> String {
    format!("{FOLDER}/{file}")
}

type Tensors = HashMap<String, Tensor>;

/// Weights in f32: the fixtures have them in bf16.
fn weights(component: &str) -> Tensors {
    let wide = |t: Tensor| t.to_dtype(DType::F32).expect("f32");
    let tensors = tensors(&path(&format!("{component}/model.safetensors")));
    tensors.into_iter().map(|(name, t)| (name, wide(t))).collect()
}

fn narrow(tensors: Tensors, dtype: DType) -> Tensors {
    let narrow = |t: Tensor| t.to_dtype(dtype).expect("numbers");
    tensors.into_iter().map(|(name, t)| (name, narrow(t))).collect()
}

fn renamed(tensors: Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.into_iter().map(|(name, t)| (rename(&name), t)).collect()
}

fn error_of(mutated: &Tensor, expected: &Tensor) -> f64 {
    distance(mutated, expected) / ON_CPU.component
}

// -----------------------------------------------------------------------------------------------------------------
// Tokens

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    length: usize,
    ids: Vec<u32>,
}

impl Case {
    fn templated(&self) -> TemplatedIds {
        TemplatedIds {
            ids: self.ids.clone(),
            head: HEAD,
        }
    }
}

fn cases() -> Vec<Case> {
    json(&path("expected/prompts.json"))
}

fn tokenizer() -> LlamaTokenizer {
    LlamaTokenizer::open(&fixtures().join(path("tokenizer"))).expect("a tokenizer")
}

#[test]
fn prompts_are_tokenized_in_the_template() {
    let tokenizer = tokenizer();
    let cases = cases();
    for case in &cases {
        let found = tokenizer
            .encode_video_prompt(&case.prompt, case.length)
            .expect("tokens");
        assert_eq!(found, case.templated(), "{}", case.name);
    }
    // A newline merges with those that end the head; truncation takes the end of the template.
    let by_name = |name: &str| &cases.iter().find(|case| case.name == name).expect(name).ids;
    assert_ne!(by_name("4.256")[..HEAD], by_name("0.256")[..HEAD]);
    assert_eq!(by_name("4.256")[..HEAD - 1], by_name("0.256")[..HEAD - 1]);
    assert_eq!(by_name("2.256").len(), HEAD + 1);
    assert_eq!(by_name("6.256").len(), HEAD + 256);
    assert_ne!(by_name("6.256").last(), by_name("2.256").last());
}

#[test]
fn a_damaged_tokenizer_is_refused() {
    let from = fixtures().join(path("tokenizer"));
    let folder = tempfile::TempDir::new().expect("a folder");
    let error = LlamaTokenizer::open(folder.path()).expect_err("nothing there");
    assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
    let text = std::fs::read_to_string(from.join("tokenizer.json")).expect("a file");
    for mark in ["<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"] {
        let without = text.replace(mark, "<|other|>");
        std::fs::write(folder.path().join("tokenizer.json"), without).expect("a file");
        let error = LlamaTokenizer::open(folder.path()).expect_err(mark).to_string();
        assert!(error.contains(mark), "{error}");
    }
    for broken in ["{", "{}", r#"{"model": {"type": "BPE"}}"#, "[]"] {
        std::fs::write(folder.path().join("tokenizer.json"), broken).expect("a file");
        let error = LlamaTokenizer::open(folder.path()).expect_err(broken);
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
    }
}

// -----------------------------------------------------------------------------------------------------------------
// Text

fn llama_config() -> LlamaConfig {
    json(&path("text_encoder/config.json"))
}

fn encode(tensors: &ComponentTensors, prompt: &TemplatedIds) -> Tensor {
    LlamaEncoder::new(&llama_config(), "text_encoder", tensors)
        .and_then(|encoder| encoder.forward(prompt, &|| false))
        .expect("an encoding")
}

/// The first prompt, and the states of its tokens.
fn first() -> (TemplatedIds, Tensor) {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let states = expected["0.256.hidden"].unsqueeze(0).expect("a batch");
    (cases()[0].templated(), states)
}

#[test]
fn text_encoding_equals_the_reference() {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let weights = resident(&weights("text_encoder"));
    let mut compared = 0;
    for case in cases() {
        let Some(expected) = expected.get(&format!("{}.hidden", case.name)) else {
            continue;
        };
        let found = encode(&weights, &case.templated());
        assert_eq!(found.dims(), [1, case.ids.len() - HEAD, 32]);
        let apart = distance(&found.squeeze(0).unwrap(), expected);
        println!("{}: {apart:.2e}", case.name);
        assert!(apart < tolerances().component, "{}: {apart:e}", case.name);
        compared += 1;
    }
    assert!(compared > 4, "{compared}");
}

#[test]
fn attention_has_the_planned_shape() {
    let (prompt, _) = first();
    let weights = resident(&weights("text_encoder"));
    let (asked, _) = asked(|| encode(&weights, &prompt));
    let planned = llama_config().planned(prompt.ids.len(), DType::F32);
    assert_eq!(asked, words(&[planned]));
}

#[test]
fn text_encoding_in_bf16_equals_f32_within_its_rounding() {
    let (prompt, expected) = first();
    let found = encode(&resident(&narrow(weights("text_encoder"), DType::BF16)), &prompt);
    assert_eq!(found.dtype(), DType::BF16);
    let apart = distance(&found, &expected);
    println!("bf16: {apart:.2e}");
    assert!(apart < BF16_COMPONENT, "{apart:e}");
}

#[test]
fn the_decoder_is_found_under_the_names_of_all_programs() {
    let (prompt, expected) = first();
    for prefix in ["model.", "language_model.model.", "model.language_model."] {
        let weights = renamed(weights("text_encoder"), |name| format!("{prefix}{name}"));
        let names: Vec<String> = llama_config()
            .tensor_shapes(&|name| weights.contains_key(name))
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert!(names.iter().all(|name| weights.contains_key(name)), "{prefix}");
        let apart = distance(&encode(&resident(&weights), &prompt), &expected);
        assert!(apart < tolerances().component, "{prefix}: {apart:e}");
    }
    // As a part of LLaVA, with the defaults of transformers.
    let llava = r#"{"image_token_index": 1, "hidden_size": 7, "text_config": {"vocab_size": 128320, "model_type": "llama",
        "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}}"#;
    let llava: LlamaConfig = serde_json::from_str(llava).expect("a configuration");
    assert_eq!(llava, LlamaConfig::llava_llama3_8b());
    assert_eq!(llava.check(), Ok(()));
}

#[test]
fn the_last_two_layers_are_neither_needed_nor_used() {
    let (prompt, expected) = first();
    let shapes = llama_config().tensor_shapes(&|name| name == "embed_tokens.weight");
    assert_eq!(shapes.len(), 1 + 2 * 9);
    let is_used = |name: &String| shapes.iter().any(|(used, _)| used == name);
    let mut some = weights("text_encoder");
    some.retain(|name, _| is_used(name));
    assert_eq!(some.len(), shapes.len());
    let apart = distance(&encode(&resident(&some), &prompt), &expected);
    assert!(apart < tolerances().component, "{apart:e}");

    some.remove("layers.1.self_attn.k_proj.weight");
    let error = LlamaEncoder::new(&llama_config(), "text_encoder", &resident(&some)).unwrap_err();
    assert!(error.to_string().contains("layers.1.self_attn.k_proj"), "{error}");
}

/// A weight quantized as at load.
fn quantized(weight: &Tensor, format: WeightFormat) -> Weight {
    let (rows, columns) = weight.dims2().unwrap();
    let numbers: Vec<f32> = weight.flatten_all().unwrap().to_vec1().unwrap();
    let bytes = gpu::quantize(format, &numbers, rows, columns).expect("a format");
    let length = bytes.len();
    Weight::Quantized(QuantizedWeight {
        bytes: here(&Tensor::from_vec(bytes, length, &Device::Cpu).unwrap()),
        format,
        shape: vec![rows, columns],
    })
}

#[test]
fn text_encoding_with_quantized_weights_equals_the_reference_with_dequantized_ones() {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let prompt = cases()[0].templated();
    for (name, format) in [
        ("int8", WeightFormat::Int8),
        ("fp8", WeightFormat::Fp8(Fp8Scales::Rows)),
        ("nf4", WeightFormat::Nf4),
    ] {
        let weight = |(name, tensor): (String, Tensor)| match name.contains("_proj.") {
            true => (name, quantized(&tensor, format)),
            false => (name, Weight::Full(here(&tensor))),
        };
        let weights = weights("text_encoder").into_iter().map(weight).collect();
        let found = encode(&ComponentTensors::of_weights(weights), &prompt);
        let expected = expected[&format!("0.256.{name}")].unsqueeze(0).unwrap();
        let apart = distance(&found, &expected);
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().component, "{name}: {apart:e}");
        // The formats differ by more than the tolerance.
        assert!(error_of(&first().1, &expected) > 100.0, "{name}");
    }
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (of_one, of_other) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), of_other);
    tensors.insert(other.to_owned(), of_one);
}

fn neutral(tensors: &mut Tensors, name: &str, number: f64) {
    let ones = tensors[name].ones_like().unwrap();
    tensors.insert(name.to_owned(), (ones * number).unwrap());
}

#[test]
fn a_wrong_weight_of_the_decoder_exceeds_the_tolerance() {
    let mutations: [Mutation; 5] = [
        ("keys and values", |t| {
            swap(
                t,
                "layers.0.self_attn.k_proj.weight",
                "layers.0.self_attn.v_proj.weight",
            );
        }),
        ("queries and outputs", |t| {
            swap(
                t,
                "layers.1.self_attn.q_proj.weight",
                "layers.1.self_attn.o_proj.weight",
            );
        }),
        ("gate and raised", |t| {
            swap(t, "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight");
        }),
        ("norms of a layer", |t| {
            let (one, other) = ("input_layernorm.weight", "post_attention_layernorm.weight");
            swap(t, &format!("layers.0.{one}"), &format!("layers.0.{other}"));
        }),
        ("a neutral norm", |t| {
            neutral(t, "layers.1.post_attention_layernorm.weight", 1.0)
        }),
    ];
    let (prompt, expected) = first();
    for (name, mutate) in mutations {
        let mut weights = weights("text_encoder");
        mutate(&mut weights);
        let factor = error_of(&encode(&resident(&weights), &prompt), &expected);
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
    // Other constants, and one layer more.
    let text = std::fs::read_to_string(fixtures().join(path("text_encoder/config.json"))).unwrap();
    for (this, that) in [
        ("500000.0", "10000.0"),
        ("1e-05", "1e-02"),
        (r#""num_hidden_layers": 4"#, r#""num_hidden_layers": 5"#),
    ] {
        let config: LlamaConfig = serde_json::from_str(&text.replace(this, that)).expect(that);
        let weights = resident(&weights("text_encoder"));
        let encoder = LlamaEncoder::new(&config, "text_encoder", &weights).expect("an encoder");
        let factor = error_of(&encoder.forward(&prompt, &|| false).unwrap(), &expected);
        assert!(factor > 100.0, "{that}: {factor:.1}");
    }
}

#[test]
fn the_text_encoder_refuses_what_it_cannot_encode() {
    let weights = resident(&weights("text_encoder"));
    let encoder = LlamaEncoder::new(&llama_config(), "text_encoder", &weights).expect("an encoder");
    for (ids, head) in [
        (vec![1; HEAD], HEAD),
        (vec![], 0),
        (vec![1; 4097], HEAD),
        (vec![9999; 100], HEAD),
    ] {
        let error = encoder.forward(&TemplatedIds { ids, head }, &|| false);
        assert!(matches!(error, Err(StageError::BadInput(_))), "{error:?}");
    }
    let cancelled = encoder.forward(&cases()[0].templated(), &|| true);
    assert!(matches!(cancelled, Err(StageError::Cancelled)));

    let text = std::fs::read_to_string(fixtures().join(path("text_encoder/config.json"))).unwrap();
    for (this, that) in [
        (r#""num_hidden_layers": 4"#, r#""num_hidden_layers": 2"#),
        (r#""mlp_bias": false"#, r#""mlp_bias": true"#),
        (r#""attention_bias": false"#, r#""attention_bias": true"#),
        ("silu", "gelu"),
        (r#""rope_type": "default""#, r#""rope_type": "llama3""#),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#),
        (r#""hidden_size": 32"#, r#""hidden_size": 99999999999"#),
        (r#""head_dim": 8"#, r#""head_dim": 7"#),
    ] {
        let config: LlamaConfig = serde_json::from_str(&text.replace(this, that)).expect(that);
        assert!(config.check().is_err(), "{that}");
        let encoder = LlamaEncoder::new(&config, "text_encoder", &weights);
        assert!(matches!(encoder, Err(StageError::BadInput(_))), "{that}");
    }
}

// -----------------------------------------------------------------------------------------------------------------
// Pictures

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
fn the_encoder_of_pictures_refuses_what_it_cannot_encode() {
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
