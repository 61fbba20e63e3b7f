//! The checkpoints that open: single files in the names of Tencent and of diffusers, GGUF, files that replace components, and
//! FramePack's own repositories. Each gives the tensors of the whole folder.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use gpu::Weight;
use pipelines::{Families, Precision, families};

use crate::device::tolerances;
use crate::given::{film_folder, open, request, section_folder, start};
use crate::numbers::tensors;
use crate::open_model::{F32, OpenModel, copy, on_cpu};
use crate::spellings::{
    FILM, FRAMEPACK, InGguf, base, bytes_of, framepack_repositories, single_file, tencents, write, write_gguf,
};

/// The error of a checkpoint that is refused.
pub(crate) fn refused(path: &Path, precision: &Precision) -> pipelines::ModelError {
    let opened = families().open(path, precision).map(|_| ());
    opened.expect_err("a refusal")
}

/// Shapes and bytes of all tensors of a component, by their names without the prefixes that programs differ in.
fn content(opened: &OpenModel, component: &str) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let tensors = opened.tensors(component);
    let content = tensors.names().map(|name| {
        let Weight::Full(tensor) = tensors.weight(name).expect("a tensor") else {
            panic!("{name} is quantized")
        };
        let short = ["model.", "vision_model.", "text_model."]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix));
        let on_cpu = tensor.to_device(&Device::Cpu).expect("a copy");
        (
            short.unwrap_or(name).to_owned(),
            (tensor.dims().to_vec(), bytes_of(&on_cpu)),
        )
    });
    content.collect()
}

fn assert_same(found: &OpenModel, expected: &OpenModel) {
    let names = |opened: &OpenModel| -> Vec<String> {
        let components = opened.model.components().iter();
        components.map(|component| component.name.clone()).collect()
    };
    assert_eq!(names(found), names(expected));
    for component in names(expected) {
        assert!(
            content(found, &component) == content(expected, &component),
            "{component}"
        );
    }
}

/// Whether the sections of a film are sampled in its order.
fn is_forward(opened: &OpenModel) -> bool {
    // The start picture's latent is kept with the section next to it: the first that is sampled, or the last.
    let plan = opened
        .model
        .plan(&request(109, Some(start()), 1, 7))
        .expect("a plan");
    let decodes = || plan.iter().filter(|stage| stage.role == pipelines::Role::Decode);
    let first = decodes()
        .flat_map(|stage| &stage.takes)
        .find(|value| value.name == "latent_1");
    first.expect("the first section").shape[2] == 10
}

#[test]
fn a_single_file_in_any_naming_gives_the_tensors_of_the_folder() {
    let expected = open(film_folder().path(), &F32);
    for file in [
        tencents(&tensors(FILM), ""),
        tencents(&tensors(FILM), "model.diffusion_model."),
        tensors(FILM),
    ] {
        let (_root, path) = single_file("hunyuan_video_t2v_720p_bf16.safetensors", &file);
        assert_same(&open(&path, &F32), &expected);
    }
}

#[test]
fn gguf_gives_the_tensors_of_the_folder_with_convolutions_in_five_axes_or_reshaped() {
    let expected = open(film_folder().path(), &F32);
    for reshaped in [InGguf::Reshaped, InGguf::F32] {
        let (root, file) = single_file("unused.safetensors", &tensors(FILM));
        std::fs::remove_file(&file).expect("a file");
        let path = root
            .path()
            .join("diffusion_models/hunyuan-video-t2v-720p-F16.gguf");
        let stored = |_: &str, tensor: &Tensor| match tensor.rank() {
            5 => reshaped,
            1 => InGguf::F32,
            _ => InGguf::Bf16, // holds the fixtures' numbers exactly
        };
        write_gguf(&tencents(&tensors(FILM), ""), stored, &path);
        assert_same(&open(&path, &F32), &expected);
    }
}

/// ComfyUI's folders: the base has configurations and tokenizers, and no weights.
#[test]
fn companions_may_be_single_files_in_comfyuis_folders() {
    let whole = section_folder(false);
    let (root, file) = single_file("FramePackI2V_HY_bf16.safetensors", &tensors(FRAMEPACK));
    let base = root.path().join("diffusion_models/HunyuanVideo");
    let renamed = |path: &str, rename: &dyn Fn(&str) -> String| -> HashMap<String, Tensor> {
        let named = tensors(path).into_iter();
        named.map(|(name, tensor)| (rename(&name), tensor)).collect()
    };
    copy(&whole.path().join("image_encoder"), &base.join("image_encoder"));
    for weights in [
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder_2/model.safetensors",
        "image_encoder/model.safetensors",
    ] {
        std::fs::remove_file(base.join(weights)).expect("weights");
    }
    let mut llama = renamed("hunyuan-tiny/text_encoder/model.safetensors", &|name| {
        format!("model.{}", name.trim_start_matches("model."))
    });
    llama.insert(
        "lm_head.weight".to_owned(),
        Tensor::ones((3, 32), DType::BF16, &Device::Cpu).expect("a tensor"),
    );
    let mut clip = tensors("flux-tiny/text_encoder/model.safetensors");
    clip.insert(
        "logit_scale".to_owned(),
        Tensor::ones((), DType::F32, &Device::Cpu).expect("a tensor"),
    );
    let files = [
        (
            "vae",
            "vae/hunyuan_video_vae_bf16.safetensors",
            renamed("hunyuan-tiny/vae/diffusion_pytorch_model.safetensors", &|name| {
                format!("vae.{name}")
            }),
        ),
        (
            "text_encoder",
            "text_encoders/llava_llama3_fp16.safetensors",
            llama,
        ),
        ("text_encoder_2", "text_encoders/clip_l.safetensors", clip),
        (
            "image_encoder",
            "clip_vision/sigclip_vision_patch14_384.safetensors",
            tensors("framepack-tiny/image_encoder/model.safetensors"),
        ),
    ];
    for (component, path, tensors) in &files {
        let said = refused(&file, &F32).to_string();
        let expected = match *component {
            // Nowhere is a folder with both, so neither is the file.
            "image_encoder" => "SigLIP",
            component => component,
        };
        assert!(said.contains(expected), "{component}: {said}");
        write(tensors, &root.path().join(path));
    }
    // The picture's processor of published files is that of their side, which the tiny one's is, too.
    let expected = open(whole.path(), &F32);
    let found = open(&file, &F32);
    assert_same(&found, &expected);
    let film = |opened: &OpenModel| opened.film(&request(37, Some(start()), 1, 7), 0).1.frames();
    assert_eq!(film(&found), film(&expected));

    // Without a configuration they are taken for the published ones.
    std::fs::remove_dir_all(base.join("text_encoder")).expect("a folder");
    let said = refused(&file, &F32).to_string();
    assert!(said.contains("LLaMA's width: 4096"), "{said}");
}

#[test]
fn framepacks_own_repository_finds_hunyuan_video_and_siglip_beside_it() {
    for (name, forward) in [("FramePackI2V_HY", false), ("FramePack_F1_I2V_HY_20250503", true)] {
        let (_root, folder) = framepack_repositories(name);
        assert!(Families::has_transformer(&families(), &folder));
        let (found, expected) = (open(&folder, &F32), open(section_folder(forward).path(), &F32));
        assert_same(&found, &expected);
        assert_eq!(is_forward(&found), forward);
        assert_eq!(found.model.defaults(), expected.model.defaults());
    }
    assert!(!Families::has_transformer(
        &families(),
        section_folder(false).path()
    ));
}

/// The folders of a hub cache, where nothing else is beside a snapshot.
#[test]
fn framepacks_own_repository_finds_its_companions_in_a_hub_cache() {
    let (root, folder) = framepack_repositories("FramePack_F1_I2V_HY_20250503");
    let cache = root.path().join("hub");
    let snapshot = |id: &str, commit: &str| cache.join(format!("models--{id}/snapshots/{commit}"));
    let own = snapshot("lllyasviel--FramePack_F1_I2V_HY_20250503", "abc");
    copy(&folder, &own);
    for (from, id) in [
        ("HunyuanVideo", "hunyuanvideo-community--HunyuanVideo"),
        ("flux_redux_bfl", "lllyasviel--flux_redux_bfl"),
    ] {
        copy(&root.path().join(from), &snapshot(id, "old"));
        copy(&root.path().join(from), &snapshot(id, "new"));
        let refs = cache.join(format!("models--{id}/refs"));
        std::fs::create_dir_all(&refs).expect("a folder");
        std::fs::write(refs.join("main"), "new").expect("a file");
    }
    assert!(is_forward(&open(&own, &F32)));
}

#[test]
fn sidecars_name_the_base_siglip_and_the_order() {
    let (root, folder) = framepack_repositories("FramePackI2V_HY");
    let at = |name: &str| root.path().join(name);
    base(&at("Another"));
    copy(&at("flux_redux_bfl"), &at("models/redux"));
    copy(&at("flux_redux_bfl"), &at("redux"));
    let says = |words: &[&str]| {
        let said = refused(&folder, &F32).to_string();
        for word in words {
            assert!(said.contains(word), "{word}: {said}");
        }
    };
    let write = |said: &str| std::fs::write(folder.join("moored.json"), said).expect("a file");
    says(&["2 folders beside it", "moored.json", "\"base\""]);
    write(r#"{"base": "../redux"}"#);
    says(&["no HunyuanVideo folder"]);
    write(r#"{"base": "../HunyuanVideo"}"#);
    says(&[
        "2 folders beside it",
        "SigLIP",
        "moored.json",
        "\"image_encoder\"",
    ]);
    write(r#"{"base": "../HunyuanVideo", "image_encoder": "../Another"}"#);
    says(&["Another", "feature_extractor"]);
    write(
        r#"{"base": "../HunyuanVideo", "image_encoder": "../models/redux", "sampling_order": "forward", "steps": 11}"#,
    );
    let found = open(&folder, &F32);
    let expected = open(section_folder(true).path(), &F32);
    assert_same(&found, &expected);
    assert!(is_forward(&found));
    assert_eq!(found.model.defaults().steps, 11);

    // The same of a single file, whose name says the order.
    let file = at("FramePack_F1_I2V_HY.safetensors");
    crate::spellings::write(&tensors(FRAMEPACK), &file);
    let sidecar = at("FramePack_F1_I2V_HY.moored.json");
    std::fs::write(&sidecar, r#"{"base": "HunyuanVideo", "image_encoder": "redux"}"#).expect("a file");
    assert!(is_forward(&open(&file, &F32)));
    let backward = r#"{"base": "HunyuanVideo", "image_encoder": "redux", "sampling_order": "backward"}"#;
    std::fs::write(&sidecar, backward).expect("a file");
    assert!(!is_forward(&open(&file, &F32)));
    std::fs::write(&sidecar, r#"{"base": "HunyuanVideo", "vision": "redux"}"#).expect("a file");
    let said = refused(&file, &F32).to_string();
    assert!(said.contains("it has vision"), "{said}");
}

/// A text to film pipeline's own defaults are not FramePack's.
#[test]
fn a_base_of_another_pipeline_gives_no_defaults() {
    let (root, folder) = framepack_repositories("FramePackI2V_HY");
    let written = r#"{"frames": 129, "steps": 3}"#;
    std::fs::write(root.path().join("HunyuanVideo/moored.json"), written).expect("a file");
    let file = root.path().join("FramePackI2V_HY.safetensors");
    crate::spellings::write(&tensors(FRAMEPACK), &file);
    for path in [folder, file] {
        let model = families().open(&path, &F32).expect("a model");
        assert_eq!(model.defaults().steps, 25);
        let film = model.defaults().medium;
        assert!(matches!(film, pipelines::Medium::Video(video) if video.frames == 145));
    }
}

/// FramePack as published in fp8 without scales: matrices in codes, and norms, biases and some matrices in full.
#[test]
fn unscaled_fp8_is_read_tensor_by_tensor() {
    let codes: HashMap<String, Tensor> = tensors(FRAMEPACK)
        .into_iter()
        .map(|(name, tensor)| {
            let is_wide = ["norm", "bias", "clean_x"].iter().any(|part| name.contains(part));
            let dtype = if is_wide { DType::F32 } else { DType::F8E4M3 };
            (name, tensor.to_dtype(dtype).expect("a cast"))
        })
        .collect();
    let values: HashMap<String, Tensor> = codes
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.to_dtype(DType::F32).expect("a cast")))
        .collect();
    let open = |name: &str, tensors: &HashMap<String, Tensor>| {
        let (root, file) = single_file(name, tensors);
        for part in ["image_encoder", "feature_extractor"] {
            let to = root.path().join("diffusion_models/siglip").join(part);
            copy(&section_folder(false).path().join(part), &to);
        }
        open(&file, &F32)
    };
    let found = open("FramePackI2V_HY_fp8_e4m3fn.safetensors", &codes);
    let expected = open("FramePackI2V_HY_fp32.safetensors", &values);
    let format = found
        .model
        .format_of("transformer")
        .map(|format| format.to_string());
    assert_eq!(format.as_deref(), Some("fp8-unscaled"));
    let latent = |opened: &OpenModel| {
        let (values, _) = opened.film(&request(37, Some(start()), 1, 7), 0);
        let name = values.keys().find(|name| name.starts_with("latent_")).cloned();
        on_cpu(&values[&name.expect("a section")])
    };
    let apart = crate::numbers::distance(&latent(&found), &latent(&expected));
    println!("fp8: {apart:e}");
    assert!(apart < tolerances().pipeline, "{apart:e}");
}
