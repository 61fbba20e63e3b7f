//! Checkpoints that are opened: folders, and single files as ComfyUI's users have them; and refusals.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::{Weight, WeightFormat};
use pipelines::autoencoders::wan::diffusers_name_of_original;
use pipelines::{FULL, Field, Precision, Preset, Quantization, Request, Unobserved, families};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::autoencoder::{self, config};
use crate::components::WEIGHTS;
use crate::device::ON_CPU;
use crate::gguf_file::{write_f32, write_q8_0};
use crate::given::{EDIT_PLUS, folder, folder_of, folder_of_2511, guided, open, request, with_references};
use crate::numbers::{distance, tensors};
use crate::open_model::{F32, copy, on_cpu};

/// A single file's name.
const NAME: &str = "qwen_image_bf16.safetensors";

/// A tensor of files of 2511.
const MARK: &str = "__index_timestep_zero__";

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

fn prefixed(prefix: &str) -> HashMap<String, Tensor> {
    let all = tensors(WEIGHTS).into_iter();
    all.map(|(name, tensor)| (format!("{prefix}{name}"), tensor))
        .collect()
}

/// ComfyUI's folders with a transformer of these tensors, and with the other files of a pipeline in a folder beside it.
fn comfy_folders(root: &Path, name: &str, all: &HashMap<String, Tensor>) -> PathBuf {
    let file = root.join("diffusion_models").join(name);
    write(all, &file);
    let base = root.join("diffusion_models/qwen-image");
    copy(folder().path(), &base);
    std::fs::remove_file(base.join("transformer/diffusion_pytorch_model.safetensors")).expect("a file");
    file
}

fn latent(path: &Path, request: &Request) -> Tensor {
    let latent = open(path, &F32).latent(request, &mut Unobserved);
    on_cpu(&latent.expect("a latent"))
}

#[test]
fn a_single_file_equals_the_folder() {
    let whole = folder();
    let expected = latent(whole.path(), &guided());
    for prefix in ["", "model.diffusion_model."] {
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), NAME, &prefixed(prefix));
        assert_eq!(distance(&latent(&file, &guided()), &expected), 0.0, "{prefix}");
    }
}

/// A whole model as ComfyUI saves it, which has its vision tower too.
#[test]
fn a_file_of_the_whole_model_has_its_text_encoder_and_autoencoder() {
    let whole = folder_of(EDIT_PLUS);
    let expected = latent(whole.path(), &with_references());
    let root = TempDir::new().expect("a folder");
    let name = "qwen-image-edit-2509-all.safetensors";
    let mut all = prefixed("model.diffusion_model.");
    for (prefix, part) in [
        ("vae.", autoencoder::WEIGHTS),
        (
            "text_encoders.qwen25_7b.transformer.",
            "qwen-vl-tiny/text_encoder/model.safetensors",
        ),
    ] {
        let part = tensors(part).into_iter();
        // ComfyUI has the names of earlier versions of transformers.
        let earlier = |name: &str| match name.strip_prefix("model.visual.") {
            Some(of_tower) => format!("visual.{of_tower}"),
            None => name.replace("model.language_model.", "model."),
        };
        all.extend(part.map(|(name, tensor)| (format!("{prefix}{}", earlier(&name)), tensor)));
    }
    let file = comfy_folders(root.path(), name, &all);
    let base = root.path().join("diffusion_models/qwen-image");
    for weights in [
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    ] {
        std::fs::remove_file(base.join(weights)).expect("a file");
    }
    assert_eq!(distance(&latent(&file, &with_references()), &expected), 0.0);
}

#[test]
fn gguf_stands_for_its_numbers() {
    let whole = folder();
    let root = TempDir::new().expect("a folder");
    let exact = comfy_folders(root.path(), "exact.gguf", &HashMap::new());
    write_f32(&tensors(WEIGHTS), &exact);
    let expected = latent(whole.path(), &guided());
    assert_eq!(distance(&latent(&exact, &guided()), &expected), 0.0);

    let coded = exact.with_file_name("Qwen-Image-Q8_0.gguf");
    let held = write_q8_0(&tensors(WEIGHTS), &coded);
    let decoded = exact.with_file_name("decoded.safetensors");
    write(&held, &decoded);
    let opened = open(&coded, &F32);
    let down = "transformer_blocks.0.img_mlp.net.2.weight";
    let tensors = opened.tensors("transformer");
    assert!(matches!(tensors.weight(down), Ok(Weight::Quantized(_))));
    let apart = distance(&latent(&coded, &guided()), &latent(&decoded, &guided()));
    println!("Q8_0: {apart:.2e}");
    assert!(apart < ON_CPU.pipeline, "{apart:e}");
}

#[test]
fn the_autoencoder_may_be_a_file_in_the_names_of_wan() {
    let theirs: BTreeMap<String, BTreeMap<String, Vec<usize>>> =
        crate::numbers::json("wan-vae-tiny/authors.json");
    let ours = tensors(autoencoder::WEIGHTS);
    // The widths of the fixture need a shortcut where the published ones have none.
    let shortcut = ["weight", "bias"].map(|kind| format!("decoder.upsamples.8.shortcut.{kind}"));
    let renamed: HashMap<String, Tensor> = theirs["2.1"]
        .keys()
        .chain(&shortcut)
        .map(|name| {
            let own = diffusers_name_of_original(name).expect("a name");
            (name.clone(), ours[&own].clone())
        })
        .collect();
    assert_eq!(renamed.len(), ours.len());
    let root = TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), NAME, &prefixed(""));
    let expected = latent(&file, &request());
    let base = root.path().join("diffusion_models/qwen-image");
    std::fs::remove_file(base.join("vae/diffusion_pytorch_model.safetensors")).expect("a file");
    assert!(refused(&file).contains("vae"));
    write(&renamed, &root.path().join("vae/qwen_image_vae.safetensors"));
    assert_eq!(distance(&latent(&file, &request()), &expected), 0.0);
    let opened = open(&file, &F32);
    let tensors = opened.tensors("vae");
    assert!(tensors.names().all(|name| !name.contains("time_conv")));
    assert_eq!(tensors.names().count(), config().tensor_shapes().len());
    // Without a configuration it is the published one, which has other sizes.
    std::fs::remove_dir_all(base.join("vae")).expect("a folder");
    assert!(refused(&file).contains("qwen_image_vae"));
}

#[test]
fn a_file_of_2511_is_known_by_its_mark_or_its_name() {
    let whole = folder_of_2511();
    let expected = latent(whole.path(), &with_references());
    let earlier = folder_of(EDIT_PLUS);
    let earlier = latent(earlier.path(), &with_references());
    assert!(distance(&earlier, &expected) > 100.0 * ON_CPU.pipeline);
    let marks = [
        Tensor::zeros(0, DType::BF16, &Device::Cpu).expect("a tensor"),
        Tensor::new(0f32, &Device::Cpu).expect("a number"),
    ];
    for prefix in ["", "model.diffusion_model."] {
        for mark in &marks {
            let mut all = prefixed(prefix);
            all.insert(format!("{prefix}{MARK}"), mark.clone());
            let root = TempDir::new().expect("a folder");
            let file = comfy_folders(root.path(), "mine.safetensors", &all);
            assert_eq!(distance(&latent(&file, &with_references()), &expected), 0.0);
        }
    }
    for (name, of_name) in [
        ("qwen_image_edit_2511_bf16.safetensors", &expected),
        ("qwen_image_edit_2509_bf16.safetensors", &earlier),
    ] {
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), name, &prefixed(""));
        assert_eq!(
            distance(&latent(&file, &with_references()), of_name),
            0.0,
            "{name}"
        );
    }
}

/// As Nunchaku's files have them, and diffusers after `fuse_qkv_projections`.
#[test]
fn fused_queries_keys_and_values_are_cut() {
    let expected = latent(folder().path(), &request());
    for [fused, of_text] in [["to_qkv", "add_qkv_proj"], ["to_qkv", "to_added_qkv"]] {
        let mut all = prefixed("");
        let blocks =
            (0..).take_while(|i| all.contains_key(&format!("transformer_blocks.{i}.attn.to_q.weight")));
        for block in 0..blocks.count() {
            for kind in ["weight", "bias"] {
                for (fused, layers) in [
                    (fused, ["to_q", "to_k", "to_v"]),
                    (of_text, ["add_q_proj", "add_k_proj", "add_v_proj"]),
                ] {
                    let parts = layers.map(|layer| {
                        let name = format!("transformer_blocks.{block}.attn.{layer}.{kind}");
                        all.remove(&name).expect("a projection")
                    });
                    let whole = Tensor::cat(&parts, 0).expect("a fused tensor");
                    all.insert(format!("transformer_blocks.{block}.attn.{fused}.{kind}"), whole);
                }
            }
        }
        let root = TempDir::new().expect("a folder");
        let file = comfy_folders(root.path(), NAME, &all);
        assert_eq!(distance(&latent(&file, &request()), &expected), 0.0, "{of_text}");
    }
}

#[test]
fn the_shift_of_a_distilled_adapter_can_be_written_down() {
    let expected = {
        let folder = folder();
        let scheduler = folder.path().join("scheduler/scheduler_config.json");
        change(&scheduler, |config| {
            let shift = 3f64.ln();
            config["base_shift"] = json!(shift);
            config["max_shift"] = json!(shift);
            config["shift_terminal"] = Value::Null;
        });
        latent(folder.path(), &request())
    };
    let whole = folder();
    std::fs::write(
        whole.path().join("moored.json"),
        r#"{"shift": 3, "steps": 4, "true_guidance": 1}"#,
    )
    .expect("a file");
    assert_eq!(distance(&latent(whole.path(), &request()), &expected), 0.0);
    let defaults = families().open(whole.path(), &F32).expect("a model").defaults();
    assert_eq!((defaults.steps, defaults.true_guidance), (4, 1.0));
    let root = TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), NAME, &prefixed(""));
    let sidecar = file.with_extension("moored.json");
    std::fs::write(&sidecar, r#"{"shift": 3.0}"#).expect("a file");
    assert_eq!(distance(&latent(&file, &request()), &expected), 0.0);
    std::fs::write(&sidecar, r#"{"shift": 0}"#).expect("a file");
    assert!(refused(&file).contains("shift is 0"));
}

#[test]
fn a_tensor_that_is_unknown_or_missing_is_named() {
    let root = TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), NAME, &prefixed(""));
    let mut all = prefixed("");
    let unknown = "transformer_blocks.0.img_mod.2.weight";
    all.insert(unknown.to_owned(), all["img_in.weight"].clone());
    write(&all, &file);
    let error = refused(&file);
    let expected = format!("tensor {unknown} is no part of a Qwen-Image transformer");
    assert!(error.contains(&expected), "{error}");
    all.remove(unknown);
    all.remove("transformer_blocks.1.txt_mlp.net.2.weight");
    write(&all, &file);
    let error = refused(&file);
    assert!(
        error.contains("transformer_blocks.1.txt_mlp.net.2.weight"),
        "{error}"
    );
}

#[test]
fn each_variant_has_its_defaults() {
    for (folder, steps, side, references) in [
        (folder(), 50, 1328, 0),
        (folder_of("QwenImageEditPipeline"), 50, 1024, 1),
        (folder_of(EDIT_PLUS), 40, 1024, 3),
    ] {
        let model = families().open(folder.path(), &F32).expect("a model");
        let defaults = model.defaults();
        assert_eq!((defaults.steps, defaults.true_guidance), (steps, 4.0));
        assert_eq!(defaults.negative_prompt.as_deref(), Some(" "));
        assert_eq!(defaults.medium.size(), Some((side, side)));
        assert_eq!(model.most_references(), references);
        assert_eq!(model.reads().has(Field::References), references > 0);
        assert_eq!(model.reads().has(Field::InitImage), references == 0);
        // The smallest request, and the fallbacks, are valid requests.
        let whole = model.with_required_pictures(defaults);
        assert!(model.plan(&whole).is_ok());
        for (_, request) in model.smaller(&whole) {
            assert!(model.plan(&request).is_ok());
        }
        let stages = model.plan(&model.smallest()).expect("a valid request");
        let decode = stages.last().expect("a decode");
        let made = model.request_of(&decode.takes).expect("a request");
        assert_eq!(made.medium.size(), model.smallest().medium.size());
        let opened = open(folder.path(), &F32);
        opened
            .latent(&model.smallest(), &mut Unobserved)
            .expect("a latent");
    }
}

#[test]
fn the_vision_tower_is_read_where_pictures_are_edited() {
    let names = |folder: TempDir| -> Vec<String> {
        let model = families().open(folder.path(), &F32).expect("a model");
        let components = model.components().iter();
        components.map(|component| component.name.clone()).collect()
    };
    assert_eq!(names(folder()), ["transformer", "vae", "text_encoder"]);
    assert_eq!(
        names(folder_of(EDIT_PLUS)),
        ["transformer", "vae", "text_encoder", "vision"]
    );
}

#[test]
fn relatives_are_refused_by_name() {
    for (class, name) in [
        ("QwenImageLayeredPipeline", "Qwen-Image-Layered"),
        ("QwenImage21Pipeline", "Qwen-Image 2.1"),
        ("QwenImageControlNetPipeline", "ControlNet of Qwen-Image"),
        ("QwenImageOtherPipeline", "it is a QwenImageOtherPipeline"),
    ] {
        let folder = folder();
        change(&folder.path().join("model_index.json"), |index| {
            index["_class_name"] = class.into();
        });
        let error = refused(folder.path());
        assert!(error.contains(name) && error.contains(class), "{error}");
    }
    let mut all = prefixed("");
    let added = Tensor::zeros((2, 48), DType::BF16, &Device::Cpu).expect("a tensor");
    all.insert("time_text_embed.addition_t_embedding.weight".to_owned(), added);
    let root = TempDir::new().expect("a folder");
    let error = refused(&comfy_folders(root.path(), NAME, &all));
    assert!(error.contains("Qwen-Image-Layered"), "{error}");
}

#[test]
fn unsupported_configurations_are_refused() {
    for (component, key, value, says) in [
        (
            "transformer",
            "guidance_embeds",
            json!(true),
            "guidance is embedded",
        ),
        ("transformer", "patch_size", json!(1), "patch_size is 1"),
        ("transformer", "out_channels", json!(16), "out_channels"),
        (
            "transformer",
            "use_layer3d_rope",
            json!(true),
            "Qwen-Image-Layered",
        ),
        ("transformer", "joint_attention_dim", json!(72), "txt_in.weight"),
        (
            "transformer",
            "axes_dims_rope",
            json!([4, 6, 8]),
            "do not add up to attention_head_dim",
        ),
        (
            "transformer",
            "num_layers",
            json!(1),
            "no part of a Qwen-Image transformer",
        ),
        ("vae", "z_dim", json!(8), "means of 8 channels"),
        (
            "vae",
            "input_channels",
            json!(4),
            "channels of a picture to encode: 4",
        ),
        (
            "vae",
            "dim_mult",
            json!([1, 2, 3]),
            "resizing layers for 3 resolutions",
        ),
    ] {
        let whole = folder();
        let path = whole.path().join(component).join("config.json");
        change(&path, |config| config[key] = value);
        let error = refused(whole.path());
        assert!(error.contains(says), "{key}: {error}");
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
        (&[("vae", "int8")], "int8", 0.1),
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
        // The autoencoder is not read before the decode.
        let least = if formats[0].0 == "vae" {
            -1.0
        } else {
            ON_CPU.pipeline
        };
        assert!(apart > least && apart < most, "{formats:?}: {apart:e}");
    }
    let unknown = families().open(whole.path(), &quantized(&[("vision", "int8")]));
    let unknown = unknown.map(|_| ()).expect_err("no such component");
    assert!(unknown.to_string().contains("vision"), "{unknown}");
}

#[test]
fn the_layers_of_blocks_are_quantized_and_modulators_are_not() {
    let whole = folder();
    let opened = open(whole.path(), &quantized(&[("transformer", "int8")]));
    let tensors = opened.tensors("transformer");
    let is_quantized = |name: &str| matches!(tensors.weight(name), Ok(Weight::Quantized(_)));
    for name in [
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.1.txt_mlp.net.2.weight",
    ] {
        assert!(is_quantized(name), "{name}");
    }
    for name in [
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.1.txt_mod.1.weight",
        "norm_out.linear.weight",
        "img_in.weight",
        "txt_norm.weight",
        "transformer_blocks.0.attn.norm_q.weight",
    ] {
        assert!(tensors.contains(name) && !is_quantized(name), "{name}");
    }
}
