//! Checkpoints that are opened: folders, and single files of Black Forest Labs for ComfyUI; and refusals.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::{Weight, WeightFormat};
use pipelines::autoencoders::kl::diffusers_name_of_bfl;
use pipelines::{FULL, Field, Precision, Preset, Quantization, Unobserved, families};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::components::WEIGHTS;
use crate::device::ON_CPU;
use crate::given::{base_folder, folder, open, request};
use crate::numbers::{distance, fixtures, tensors};
use crate::open_model::{F32, copy, on_cpu};

/// A single file's name.
const NAME: &str = "flux-2-klein-4b.safetensors";

fn write(tensors: &HashMap<String, Tensor>, path: &Path) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// Changes a JSON file.
fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let text = std::fs::read_to_string(path).expect("a file");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut json);
    std::fs::write(path, json.to_string()).expect("a file");
}

/// Why a path is not opened.
fn refused(path: &Path) -> String {
    let opened = families().open(path, &F32).map(|_| ());
    opened.expect_err("a refusal").to_string()
}

/// The tensors of a single file, by a table of the tensors of which each is made: `NAME#K` is half `K` of the rows of one.
fn renamed(table: &str, source: &HashMap<String, Tensor>, prefix: &str) -> HashMap<String, Tensor> {
    let table: BTreeMap<String, Vec<String>> = crate::numbers::json(table);
    let part = |name: &String| match name.split_once('#') {
        None => source[name].clone(),
        Some((name, half)) => {
            let half: usize = half.parse().expect("a half");
            source[name].chunk(2, 0).expect("halves")[half].clone()
        }
    };
    table
        .iter()
        .map(|(name, parts)| {
            let parts: Vec<Tensor> = parts.iter().map(&part).collect();
            (
                format!("{prefix}{name}"),
                Tensor::cat(&parts, 0).expect("a tensor"),
            )
        })
        .collect()
}

/// The transformer in the names of Black Forest Labs.
fn bfl(prefix: &str) -> HashMap<String, Tensor> {
    renamed("flux2-tiny/expected/bfl.json", &tensors(WEIGHTS), prefix)
}

/// ComfyUI's folders with a transformer of these tensors, and with the other files of a pipeline in a folder beside it.
fn comfy_folders(root: &Path, name: &str, all: &HashMap<String, Tensor>) -> PathBuf {
    let file = root.join("diffusion_models").join(name);
    write(all, &file);
    let base = root.join("diffusion_models/flux2");
    copy(&fixtures().join("flux2-tiny"), &base);
    std::fs::remove_file(base.join("transformer/diffusion_pytorch_model.safetensors")).expect("a file");
    file
}

#[test]
fn a_single_file_equals_the_folder() {
    let whole = folder();
    let expected = open(whole.path(), &F32);
    let expected = expected.latent(&request(), &mut Unobserved).expect("a latent");
    for (names, all) in [
        ("Black Forest Labs'", bfl("")),
        ("ComfyUI's", bfl("model.diffusion_model.")),
        ("diffusers'", tensors(WEIGHTS)),
    ] {
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), NAME, &all);
        let found = open(&file, &F32).latent(&request(), &mut Unobserved);
        assert!(found.expect("a latent") == expected, "{names} names");
    }
}

#[test]
fn companions_may_be_single_files_in_comfyuis_folders() {
    let root = TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), NAME, &bfl(""));
    let base = root.path().join("diffusion_models/flux2");
    for name in ["vae", "text_encoder"] {
        std::fs::remove_dir_all(base.join(name)).expect("a folder");
    }
    assert!(refused(&file).contains("vae/config.json"));
    // Existing companion files are read as the published ones, and these have other sizes: the errors are about them.
    let vae = tensors("flux2-tiny/vae/diffusion_pytorch_model.safetensors");
    let vae = renamed("flux2-tiny/expected/bfl_vae.json", &vae, "");
    write(&vae, &root.path().join("vae/flux2-vae.safetensors"));
    let error = refused(&file);
    assert!(
        error.contains("the VAE's latent channels: 128, and the pipeline takes 32"),
        "{error}"
    );

    copy(&fixtures().join("flux2-tiny/vae"), &base.join("vae"));
    let text = tensors("flux2-tiny/text_encoder/model.safetensors");
    for (stem, width) in [("qwen_3_4b", 2560), ("qwen_3_8b", 4096)] {
        // Which of the published encoders it is, the transformer's width of a text says.
        let mut all = bfl("");
        let reads = Tensor::zeros((48, 3 * width), DType::BF16, &Device::Cpu).expect("a tensor");
        all.insert("txt_in.weight".to_owned(), reads);
        write(&all, &file);
        let error = refused(&file);
        assert!(error.contains("text_encoder/config.json"), "{error}");
        write(
            &text,
            &root.path().join(format!("text_encoders/{stem}.safetensors")),
        );
        let error = refused(&file);
        assert!(error.contains(&format!("[151936, {width}]")), "{error}");
    }
}

#[test]
fn an_autoencoder_in_its_authors_names_is_one_in_diffusers_names() {
    let table: BTreeMap<String, Vec<String>> = crate::numbers::json("flux2-tiny/expected/bfl_vae.json");
    let of_both = |name: &str| name.starts_with("bn.") || name.contains("quant_conv.");
    let mut compared = 0;
    for (theirs, ours) in table.iter().filter(|(name, _)| !of_both(name)) {
        assert_eq!(diffusers_name_of_bfl(theirs).as_ref(), ours.first(), "{theirs}");
        compared += 1;
    }
    // All others have the names of diffusers, behind their half of the autoencoder.
    for (theirs, ours) in table.iter().filter(|(name, _)| of_both(name)) {
        assert!(theirs.ends_with(&ours[0]), "{theirs}");
    }
    assert!(compared > 100, "{compared} compared");
}

#[test]
fn a_tensor_that_is_unknown_or_missing_is_named() {
    let root = TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), NAME, &bfl(""));
    let mut all = bfl("");
    let unknown = "double_blocks.0.img_mod.lin.weight";
    all.insert(unknown.to_owned(), all["img_in.weight"].clone());
    write(&all, &file);
    let error = refused(&file);
    let expected = format!("tensor {unknown} is no part of a FLUX.2 transformer");
    assert!(error.contains(&expected), "{error}");
    all.remove(unknown);
    all.remove("single_blocks.1.linear2.weight");
    write(&all, &file);
    let error = refused(&file);
    assert!(error.contains("single_blocks.1.linear2.weight"), "{error}");
}

/// Steps, true guidance and negative prompt of a model's default request, and whether it reads the latter two.
type Sampled = (u32, f32, Option<String>, [bool; 2]);

fn sampled(path: &Path) -> Sampled {
    let model = families().open(path, &F32).expect("a model");
    let defaults = model.defaults();
    assert_eq!((defaults.guidance, defaults.max_sequence_length), (0.0, 512));
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
    let reads = [Field::TrueGuidance, Field::NegativePrompt].map(|field| model.reads().has(field));
    (
        defaults.steps,
        defaults.true_guidance,
        defaults.negative_prompt,
        reads,
    )
}

#[test]
fn a_model_is_distilled_as_its_index_says_unless_its_file_is_called_base() {
    let distilled: Sampled = (4, 1.0, None, [false; 2]);
    let base: Sampled = (50, 4.0, Some(String::new()), [true; 2]);
    assert_eq!(sampled(folder().path()), distilled);
    assert_eq!(sampled(base_folder().path()), base);
    let without_word = |index: &mut Value| {
        let removed = index.as_object_mut().map(|index| index.remove("is_distilled"));
        assert!(removed.flatten().is_some());
    };
    let silent = folder();
    change(&silent.path().join("model_index.json"), without_word);
    assert_eq!(sampled(silent.path()), base);

    for (name, in_distilled, otherwise) in [
        (NAME, &distilled, &base),
        ("flux-2-klein-base-4b.safetensors", &base, &base),
        ("FLUX.2-klein-Base.safetensors", &base, &base),
    ] {
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), name, &bfl(""));
        assert_eq!(sampled(&file), *in_distilled, "{name}");
        let index = root.path().join("diffusion_models/flux2/model_index.json");
        change(&index, without_word);
        assert_eq!(sampled(&file), *otherwise, "{name}");
    }
}

#[test]
fn flux_2_dev_is_refused_by_name() {
    let folder = folder();
    let index = folder.path().join("model_index.json");
    change(&index, |index| index["_class_name"] = "Flux2Pipeline".into());
    let error = refused(folder.path());
    assert!(
        error.contains("it is FLUX.2 dev") && error.contains("(Flux2Pipeline)"),
        "{error}"
    );
    for (mut all, guidance) in [
        (bfl(""), "guidance_in.in_layer.weight"),
        (
            bfl("model.diffusion_model."),
            "model.diffusion_model.guidance_in.in_layer.weight",
        ),
        (
            tensors(WEIGHTS),
            "time_guidance_embed.guidance_embedder.linear_1.weight",
        ),
    ] {
        let embedder = Tensor::zeros((48, 256), DType::BF16, &Device::Cpu).expect("a tensor");
        all.insert(guidance.to_owned(), embedder);
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), NAME, &all);
        let error = refused(&file);
        assert!(error.contains("it is FLUX.2 dev"), "{guidance}: {error}");
    }
}

#[test]
fn other_pipelines_of_the_family_are_named() {
    let folder = folder();
    let index = folder.path().join("model_index.json");
    change(&index, |index| {
        index["_class_name"] = "Flux2KleinTurboPipeline".into();
    });
    let error = refused(folder.path());
    assert!(error.contains("it is a Flux2KleinTurboPipeline"), "{error}");
    change(&index, |index| {
        index["_class_name"] = "Flux2KleinInpaintPipeline".into();
    });
    assert_eq!(open(folder.path(), &F32).model.family(), "flux2");
}

#[test]
fn unsupported_configurations_are_refused() {
    for (component, key, value, says) in [
        ("transformer", "guidance_embeds", json!(true), "FLUX.2 dev"),
        ("transformer", "patch_size", json!(2), "patch_size is 2"),
        ("transformer", "out_channels", json!(16), "out_channels"),
        ("transformer", "mlp_ratio", json!(4.0), "mlp_ratio 4"),
        ("transformer", "eps", json!(1e-5), "1e-6 are supported"),
        (
            "transformer",
            "joint_attention_dim",
            json!(73),
            "three times the width of a text encoder",
        ),
        (
            "transformer",
            "axes_dims_rope",
            json!([4, 4, 4, 8]),
            "do not add up to attention_head_dim",
        ),
        (
            "transformer",
            "num_layers",
            json!(1),
            "no part of a FLUX.2 transformer",
        ),
        (
            "text_encoder",
            "num_hidden_layers",
            json!(5),
            "5 layers, no multiple of 4",
        ),
        (
            "text_encoder",
            "num_hidden_layers",
            json!(2),
            "2 layers, no multiple of 4",
        ),
        (
            "text_encoder",
            "hidden_size",
            json!(32),
            "three states of the text encoder: 96, and the pipeline takes 72",
        ),
        ("text_encoder", "hidden_act", json!("gelu"), "only silu"),
        (
            "text_encoder",
            "num_key_value_heads",
            json!(4),
            "6 heads of queries over 4 of keys",
        ),
        ("vae", "patch_size", json!([4, 4]), "patches of [4, 4]"),
        (
            "vae",
            "latent_channels",
            json!(4),
            "the VAE's latent channels: 16, and the pipeline takes 32",
        ),
    ] {
        let whole = folder();
        let path = whole.path().join(component).join("config.json");
        change(&path, |config| config[key] = value);
        let error = refused(whole.path());
        assert!(error.contains(says), "{key}: {error}");
    }
}

#[test]
fn a_decoder_of_other_widths_is_refused() {
    let whole = folder();
    let path = whole.path().join("vae/config.json");
    change(&path, |config| {
        config["decoder_block_out_channels"] = json!([4, 6, 8, 16]);
    });
    let error = refused(whole.path());
    assert!(error.contains("decoder_block_out_channels"), "{error}");
}

#[test]
fn a_flux_1_checkpoint_is_not_taken_for_one_of_flux_2() {
    let root = TempDir::new().expect("a folder");
    for fixture in ["flux-tiny", "flux-tiny-bfl"] {
        copy(&fixtures().join(fixture), root.path());
    }
    for path in [root.path().to_owned(), root.path().join("flux-tiny.safetensors")] {
        let model = families().open(&path, &F32).expect("FLUX.1");
        assert_eq!(model.family(), "flux", "{}", path.display());
    }
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
        (&[("transformer", "int8")][..], "int8", 0.1),
        (&[("text_encoder", "int8")], "int8", 0.1),
        (&[("transformer", "fp8")], "fp8", 0.3),
        (&[("transformer", "nf4"), ("text_encoder", "nf4")], "nf4", 0.8),
    ] {
        let opened = open(whole.path(), &quantized(formats));
        let format: WeightFormat = format.parse().expect("a format");
        for (component, _) in formats {
            assert_eq!(opened.model.format_of(component), Some(format));
        }
        let found = opened.latent(&request(), &mut Unobserved).expect("a latent");
        let apart = distance(&on_cpu(&found), &expected);
        println!("{formats:?}: {apart:.2e}");
        assert!(apart > ON_CPU.pipeline && apart < most, "{formats:?}: {apart:e}");
    }
    let unknown = families().open(whole.path(), &quantized(&[("unet", "int8")]));
    let unknown = unknown.map(|_| ()).expect_err("no such component");
    assert!(unknown.to_string().contains("unet"), "{unknown}");
}

#[test]
fn the_layers_of_blocks_are_quantized_and_modulators_are_not() {
    let whole = folder();
    let opened = open(whole.path(), &quantized(&[("transformer", "int8")]));
    let tensors = opened.tensors("transformer");
    let is_quantized = |name: &str| matches!(tensors.weight(name), Ok(Weight::Quantized(_)));
    for name in [
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.1.ff_context.linear_in.weight",
        "single_transformer_blocks.2.attn.to_qkv_mlp_proj.weight",
    ] {
        assert!(is_quantized(name), "{name}");
    }
    for name in [
        "double_stream_modulation_img.linear.weight",
        "single_stream_modulation.linear.weight",
        "norm_out.linear.weight",
        "x_embedder.weight",
        "transformer_blocks.0.attn.norm_q.weight",
    ] {
        assert!(tensors.contains(name) && !is_quantized(name), "{name}");
    }
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
