//! Checkpoints that are opened: folders, and single files for ComfyUI; and refusals.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::WeightFormat;
use pipelines::{
    FULL, Image, InitImage, Medium, ModelError, Precision, Preset, Quantization, Request, Unobserved, Values,
    families,
};

use crate::components::WEIGHTS;
use crate::device::{BF16_PIPELINE, ON_CPU};
use crate::given::{folder, from_picture, open, request};
use crate::numbers::{distance, json, tensors};
use crate::open_model::{F32, on_cpu};

fn write(tensors: &HashMap<String, Tensor>, path: &Path) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// The single file for ComfyUI: names as diffusers reads them, with an unused norm.
fn comfy(prefix: &str) -> HashMap<String, Tensor> {
    let parts: BTreeMap<String, Vec<String>> = json("z-image-tiny/expected/comfy.json");
    let source = tensors(WEIGHTS);
    let mut all: HashMap<String, Tensor> = parts
        .iter()
        .map(|(name, parts)| {
            let parts: Vec<&Tensor> = parts.iter().map(|part| &source[part]).collect();
            (
                format!("{prefix}{name}"),
                Tensor::cat(&parts, 0).expect("a tensor"),
            )
        })
        .collect();
    let unused = Tensor::ones(48, DType::BF16, &Device::Cpu).expect("a tensor");
    all.insert(format!("{prefix}norm_final.weight"), unused);
    all
}

/// ComfyUI's folders, with a pipeline's small files in a folder beside the transformer.
pub(crate) fn comfy_folders(root: &Path, prefix: &str) -> PathBuf {
    let file = root.join("diffusion_models/z_image_turbo_bf16.safetensors");
    write(&comfy(prefix), &file);
    let whole = folder();
    let base = root.join("diffusion_models/z-image");
    std::fs::create_dir_all(&base).expect("a folder");
    for name in [
        "tokenizer",
        "scheduler",
        "model_index.json",
        "vae",
        "text_encoder",
        "transformer",
    ] {
        std::fs::rename(whole.path().join(name), base.join(name)).expect("a move");
    }
    std::fs::remove_file(base.join("transformer/diffusion_pytorch_model.safetensors")).expect("a file");
    file
}

#[test]
fn a_single_file_equals_the_folder() {
    let whole = folder();
    let expected = open(whole.path(), &F32);
    let expected = expected.latent(&request(), &mut Unobserved).expect("a latent");
    for prefix in ["", "model.diffusion_model."] {
        let root = tempfile::TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), prefix);
        let opened = open(&file, &F32);
        let found = opened.latent(&request(), &mut Unobserved).expect("a latent");
        assert_eq!(found, expected, "{prefix:?}");
    }
}

/// Queries, keys and values are one layer there, and so are both first layers of a feed-forward, what is gated before the gate.
#[test]
fn nunchakus_names_are_read() {
    let folder = folder();
    let expected = open(folder.path(), &F32);
    let expected = expected.latent(&request(), &mut Unobserved).expect("a latent");
    let mut theirs = tensors(WEIGHTS);
    let mut fuse = |block: &str, layers: &[&str], fused: &str| {
        let parts = layers.iter().map(|layer| {
            let name = format!("{block}.{layer}.weight");
            theirs.remove(&name).expect("a layer")
        });
        let parts: Vec<Tensor> = parts.collect();
        let whole = Tensor::cat(&parts, 0).expect("a fused layer");
        theirs.insert(format!("{block}.{fused}.weight"), whole);
    };
    let blocks: BTreeSet<String> = tensors(WEIGHTS)
        .keys()
        .filter_map(|name| Some(name.split_once(".attention.to_q.")?.0.to_owned()))
        .collect();
    assert!(blocks.len() >= 3);
    for block in &blocks {
        let layers = ["attention.to_q", "attention.to_k", "attention.to_v"];
        fuse(block, &layers, "attention.to_qkv");
        fuse(
            block,
            &["feed_forward.w3", "feed_forward.w1"],
            "feed_forward.net.0.proj",
        );
        fuse(block, &["feed_forward.w2"], "feed_forward.net.2");
    }
    let file = folder.path().join("svdq-int4_r32-z-image-turbo.safetensors");
    write(&theirs, &file);
    let found = open(&file, &F32).latent(&request(), &mut Unobserved);
    assert_eq!(found.expect("a latent"), expected);
}

#[test]
fn companions_may_be_single_files_in_comfyuis_folders() {
    let root = tempfile::TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), "");
    let base = root.path().join("diffusion_models/z-image");
    for name in ["vae", "text_encoder"] {
        std::fs::remove_dir_all(base.join(name)).expect("a folder");
    }
    let missing = |error: ModelError| error.to_string();
    let error = families()
        .open(&file, &F32)
        .map(|_| ())
        .expect_err("no companions");
    assert!(missing(error).contains("vae"));
    // Existing companion files are read, and these do not have the published sizes: the error is about them.
    write(
        &tensors("flux-tiny/vae/diffusion_pytorch_model.safetensors"),
        &root.path().join("vae/ae.safetensors"),
    );
    let error = families()
        .open(&file, &F32)
        .map(|_| ())
        .expect_err("no text encoder");
    assert!(missing(error).contains("text_encoder"));
    let text = tensors("z-image-tiny/text_encoder/model.safetensors");
    write(&text, &root.path().join("text_encoders/qwen_3_4b.safetensors"));
    let error = families()
        .open(&file, &F32)
        .map(|_| ())
        .expect_err("another size");
    assert!(missing(error).contains("text encoder's width: 2560"));
}

/// A whole model as ComfyUI saves it, beside the small files of a pipeline: its parts come before those of the folder.
#[test]
fn a_file_of_the_whole_model_has_its_text_encoder_and_autoencoder() {
    let whole = folder();
    let expected = open(whole.path(), &F32);
    let expected = expected
        .latent(&from_picture(), &mut Unobserved)
        .expect("a latent");
    let root = tempfile::TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), "");
    let mut all = comfy("model.diffusion_model.");
    for (prefix, part) in [
        ("vae.", "flux-tiny/vae/diffusion_pytorch_model.safetensors"),
        (
            "text_encoders.qwen3_4b.transformer.",
            "z-image-tiny/text_encoder/model.safetensors",
        ),
    ] {
        let part = tensors(part).into_iter();
        all.extend(part.map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
    }
    let logits = Tensor::ones((), DType::F32, &Device::Cpu).expect("a number");
    all.insert("text_encoders.qwen3_4b.logit_scale".to_owned(), logits);
    write(&all, &file);
    let base = root.path().join("diffusion_models/z-image");
    let weights = [
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    ];
    for weights in weights {
        std::fs::remove_file(base.join(weights)).expect("a file");
    }
    let opened = open(&file, &F32);
    let found = opened.latent(&from_picture(), &mut Unobserved).expect("a latent");
    assert_eq!(found, expected);
    // The folder's own would be read instead, if the file's were not looked for.
    all.retain(|name, _| !name.starts_with("text_encoders."));
    write(&all, &file);
    let error = families().open(&file, &F32).map(|_| ()).expect_err("no encoder");
    assert!(error.to_string().contains("text_encoder"), "{error}");
}

#[test]
fn an_unknown_tensor_is_refused() {
    let root = tempfile::TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), "");
    let mut all = comfy("");
    all.insert("layers.0.attention.q_bias".to_owned(), all["x_pad_token"].clone());
    write(&all, &file);
    let error = families()
        .open(&file, &F32)
        .map(|_| ())
        .expect_err("another model");
    assert!(
        error.to_string().contains("no part of a Z-Image transformer"),
        "{error}"
    );
    all.remove("layers.0.attention.q_bias");
    all.remove("layers.1.ffn_norm2.weight");
    write(&all, &file);
    let error = families().open(&file, &F32).map(|_| ()).expect_err("a gap");
    assert!(error.to_string().contains("layers.1.ffn_norm2.weight"), "{error}");
}

#[test]
fn other_pipelines_of_the_family_are_named() {
    let whole = folder();
    let index = whole.path().join("model_index.json");
    let text = std::fs::read_to_string(&index).expect("an index");
    std::fs::write(&index, text.replace("ZImagePipeline", "ZImageOmniPipeline")).expect("an index");
    let error = families()
        .open(whole.path(), &F32)
        .map(|_| ())
        .expect_err("another");
    assert!(
        error.to_string().contains("it is a ZImageOmniPipeline"),
        "{error}"
    );
}

#[test]
fn unsupported_configurations_are_refused() {
    for (file, from, to, says) in [
        (
            "transformer",
            "\"n_kv_heads\": 3",
            "\"n_kv_heads\": 1",
            "heads of keys",
        ),
        (
            "transformer",
            "\"siglip_feat_dim\": null",
            "\"siglip_feat_dim\": 8",
            "SigLIP",
        ),
        (
            "transformer",
            "\"qk_norm\": true",
            "\"qk_norm\": false",
            "normalised",
        ),
        ("text_encoder", "\"silu\"", "\"gelu\"", "only silu"),
        (
            "text_encoder",
            "\"rope_type\": \"default\"",
            "\"rope_type\": \"yarn\"",
            "rotary",
        ),
        (
            "text_encoder",
            "\"num_key_value_heads\": 2",
            "\"num_key_value_heads\": 4",
            "6 heads",
        ),
        (
            "text_encoder",
            "\"num_hidden_layers\": 5",
            "\"num_hidden_layers\": 1",
            "last layer",
        ),
    ] {
        let whole = folder();
        let path = whole.path().join(file).join("config.json");
        let text = std::fs::read_to_string(&path).expect("a configuration");
        assert!(text.contains(from), "{from}");
        std::fs::write(&path, text.replace(from, to)).expect("a configuration");
        let error = families().open(whole.path(), &F32).map(|_| ()).expect_err(says);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn requests_out_of_bounds_are_refused_by_field() {
    let whole = folder();
    let model = families().open(whole.path(), &F32).expect("a model");
    assert!(model.plan(&request()).is_ok());
    let narrow = Request {
        medium: Medium::Image(Image::of(40, 48)),
        ..request()
    };
    let with = |change: fn(&mut Request)| {
        let mut request = request();
        change(&mut request);
        request
    };
    for (field, request) in [
        ("width", narrow),
        ("guidance", with(|request| request.guidance = 3.5)),
        ("true_guidance", with(|request| request.true_guidance = f32::NAN)),
        (
            "negative_prompt",
            with(|request| request.negative_prompt = Some("x".repeat(100_000))),
        ),
        (
            "references",
            with(|request| {
                if let Medium::Image(image) = &mut request.medium {
                    image.references = vec![InitImage::of_size((16, 16))];
                }
            }),
        ),
        ("steps", with(|request| request.steps = 0)),
        (
            "max_sequence_length",
            with(|request| request.max_sequence_length = 513),
        ),
    ] {
        let problems = model.plan(&request).expect_err(field);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].field, field);
    }
    let defaults = model.defaults();
    assert_eq!((defaults.steps, defaults.guidance), (8, 0.0));
    assert_eq!(defaults.medium.size(), Some((1024, 1024)));
    // The smallest request, and the fallbacks, are valid requests.
    for request in model.smaller(&defaults).into_iter().map(|(_, request)| request) {
        assert!(model.plan(&request).is_ok());
    }
    let stages = model.plan(&model.smallest()).expect("a valid request");
    let decode = stages.last().expect("a decode");
    assert_eq!(
        model.request_of(&decode.takes).map(|request| request.medium),
        Some(model.smallest().medium)
    );
}

/// A precision with formats by component.
fn quantized(formats: &[(&str, &str)]) -> Precision {
    Precision {
        dtype: DType::F32,
        quantization: Quantization::of(Preset::named(FULL).expect("a preset"), formats.iter().copied())
            .expect("formats"),
    }
}

#[test]
fn quantized_models_generate_similar_pictures() {
    let whole = folder();
    let exact = open(whole.path(), &F32);
    let expected = on_cpu(&exact.latent(&request(), &mut Unobserved).expect("a latent"));
    for (formats, format, most) in [
        (&[("transformer", "int8")][..], WeightFormat::Int8, 0.1),
        (&[("text_encoder", "int8")], WeightFormat::Int8, 0.1),
        (
            &[("transformer", "nf4"), ("text_encoder", "nf4")],
            WeightFormat::Nf4,
            0.8,
        ),
    ] {
        let opened = open(whole.path(), &quantized(formats));
        for (component, _) in formats {
            assert_eq!(opened.model.format_of(component), Some(format));
        }
        let found = opened.latent(&request(), &mut Unobserved).expect("a latent");
        let apart = distance(&on_cpu(&found), &expected);
        println!("{formats:?}: {apart:.2e}");
        assert!(apart > ON_CPU.pipeline && apart < most, "{formats:?}: {apart:e}");
    }
    let unknown = families()
        .open(whole.path(), &quantized(&[("unet", "int8")]))
        .map(|_| ())
        .expect_err("no such component");
    assert!(unknown.to_string().contains("unet"), "{unknown}");
}

#[test]
fn a_preset_quantizes_the_transformer_and_the_text_encoder() {
    let whole = folder();
    let bytes = |preset: Preset, formats: &[(&str, &str)]| {
        let precision = Precision {
            dtype: DType::F32,
            quantization: Quantization::of(preset, formats.iter().copied()).expect("formats"),
        };
        let model = families().open(whole.path(), &precision).expect("a model");
        let formats = ["transformer", "text_encoder", "vae"].map(|name| model.format_of(name));
        let bytes: u64 = model.components().iter().map(|c| c.bytes.0).sum();
        (formats, bytes)
    };
    let full = bytes(Preset::Full, &[]);
    assert_eq!(full.0, [None; 3]);
    let (formats, taken) = bytes(Preset::EightBit, &[]);
    // Columns are rotated in the largest groups that a component's layers have.
    let is_rotated_int8 = |format| matches!(format, Some(WeightFormat::Int8Scaled(gpu::Int8Scales::Rows, _)));
    assert!(
        is_rotated_int8(formats[0]) && is_rotated_int8(formats[1]) && formats[2].is_none(),
        "{formats:?}"
    );
    assert!(taken < full.1);
    let (formats, _) = bytes(Preset::FourBit, &[("text_encoder", FULL)]);
    assert_eq!(formats, [Some(WeightFormat::Nf4), None, None]);
}

/// A quantized encoder is computed by other code than a full-precision one: with dequantized weights,
/// candle-transformers must give the same encoding.
#[test]
fn the_quantized_encoder_equals_the_full_precision_encoder() {
    let whole = folder();
    let encode = |precision: &Precision| {
        let opened = open(whole.path(), precision);
        let plan = opened.stage(&request(), "encode_text");
        let given = opened.run(&plan, 0, &request(), &Values::new(), &mut Unobserved);
        on_cpu(&given.expect("an encoding")["caption"])
    };
    let apart = distance(&encode(&quantized(&[("text_encoder", "int8")])), &encode(&F32));
    println!("int8: {apart:.2e}");
    assert!(apart > 1e-4 && apart < BF16_PIPELINE, "{apart:e}");
}
