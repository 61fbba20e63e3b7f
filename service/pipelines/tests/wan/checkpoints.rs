//! Single files in the names of other programs, beside a base: each makes the film that the pipeline's folder makes.

use std::fs::{create_dir_all, remove_dir_all, remove_file, rename};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use gpu::WeightFormat;
use pipelines::{Precision, Preset, Quantization, Request, families};
use tempfile::TempDir;

use crate::gguf_file::{write_f32, write_q8_0};
use crate::given::{A14B, Made, T2V, TI2V, open};
use crate::numbers::{distance, tensors};
use crate::open_model::{F32, on_cpu};
use crate::spellings::{Tensors, authors_name, authors_name_of_umt5, renamed, write};

/// A short request.
pub(crate) fn short(made: Made) -> Request {
    Request {
        steps: 2,
        ..made.request()
    }
}

pub(crate) fn latent(path: &Path, made: Made) -> Tensor {
    on_cpu(&open(path, &F32).film(&short(made), 0).0["latent"])
}

/// The weights of a component of a model.
pub(crate) fn weights(folder: &str, component: &str) -> Tensors {
    let file = match component {
        "text_encoder" => "model.safetensors",
        _ => "diffusion_pytorch_model.safetensors",
    };
    tensors(&format!("{folder}/{component}/{file}"))
}

/// A folder with a base in it, which has no transformers but their configuration, and the path of a file beside it.
pub(crate) fn beside(made: Made, file: &str) -> (TempDir, PathBuf) {
    let root = TempDir::new().expect("a folder");
    let base = root.path().join("Wan");
    let whole = made.folder();
    crate::open_model::copy(whole.path(), &base);
    remove_file(base.join("transformer/diffusion_pytorch_model.safetensors")).expect("a file");
    if base.join("transformer_2").is_dir() {
        remove_dir_all(base.join("transformer_2")).expect("a folder");
    }
    let file = root.path().join(file);
    create_dir_all(file.parent().expect("a folder")).expect("a folder");
    (root, file)
}

#[test]
fn files_in_other_names_make_the_same_film() {
    for made in [T2V, TI2V] {
        let folder = made.folder();
        let expected = latent(folder.path(), made);
        let own = weights(made.folder, "transformer");
        let authors = renamed(&own, authors_name);
        let wrapped = renamed(&authors, |name| format!("model.diffusion_model.{name}"));
        for (file, tensors) in [
            ("own.safetensors", &own),
            ("wan.safetensors", &authors),
            ("all.safetensors", &wrapped),
        ] {
            let (_root, path) = beside(made, file);
            write(tensors, &path);
            assert_eq!(distance(&latent(&path, made), &expected), 0.0, "{file}");
        }
        let (_root, path) = beside(made, "wan.gguf");
        write_f32(&authors, &path);
        assert_eq!(distance(&latent(&path, made), &expected), 0.0, "GGUF");
    }
}

/// Blocks in Q8_0, the rest in f16 and f32. city96's converter leaves out the embedding of patches, which has five dimensions, and
/// his `fix_5d_tensors.py` adds it again.
#[test]
fn gguf_stands_for_its_numbers() {
    let authors = renamed(&weights("wan-tiny", "transformer"), authors_name);
    let (_root, path) = beside(T2V, "wan2.1-t2v-Q8_0.gguf");
    let held = write_q8_0(&authors, &path);
    let found = latent(&path, T2V);
    let (_root, of_numbers) = beside(T2V, "wan.safetensors");
    write(&held, &of_numbers);
    let apart = distance(&found, &latent(&of_numbers, T2V));
    println!("Q8_0: {apart:e}");
    assert!(apart <= 1e-5, "{apart:e}");
    let mut left_out = authors;
    left_out.remove("patch_embedding.weight");
    write_q8_0(&left_out, &path);
    let refused = families()
        .open(&path, &F32)
        .map(|_| ())
        .expect_err("a refusal")
        .to_string();
    assert!(
        refused.contains("patch_embedding.weight") && refused.contains("fix_5d_tensors"),
        "{refused}"
    );
}

/// Both spellings of UMT5, and an autoencoder, as files where ComfyUI has them.
#[test]
fn companions_may_be_single_files() {
    let folder = T2V.folder();
    let expected = latent(folder.path(), T2V);
    let text = weights("wan-tiny", "text_encoder");
    let authors = renamed(&text, authors_name_of_umt5);
    for (name, tensors) in [("umt5_xxl_fp16", &text), ("umt5-xxl-enc-bf16", &authors)] {
        let (root, path) = beside(T2V, "diffusion_models/wan.safetensors");
        // The base is beside the file.
        rename(root.path().join("Wan"), root.path().join("diffusion_models/Wan")).expect("a folder");
        let base = root.path().join("diffusion_models/Wan");
        write(&weights("wan-tiny", "transformer"), &path);
        remove_file(base.join("text_encoder/model.safetensors")).expect("a file");
        remove_file(base.join("vae/diffusion_pytorch_model.safetensors")).expect("a file");
        for folder in ["text_encoders", "vae"] {
            create_dir_all(root.path().join(folder)).expect("a folder");
        }
        write(
            tensors,
            &root.path().join(format!("text_encoders/{name}.safetensors")),
        );
        write(
            &weights("wan-tiny", "vae"),
            &root.path().join("vae/wan_2.1_vae.safetensors"),
        );
        assert_eq!(distance(&latent(&path, T2V), &expected), 0.0, "{name}");
    }
}

/// A whole model as ComfyUI saves it.
#[test]
fn a_file_of_the_whole_model_has_its_text_encoder_and_autoencoder() {
    let folder = T2V.folder();
    let expected = latent(folder.path(), T2V);
    let transformer = renamed(&weights("wan-tiny", "transformer"), |name| {
        format!("model.diffusion_model.{}", authors_name(name))
    });
    let text = renamed(&weights("wan-tiny", "text_encoder"), |name| {
        format!("text_encoders.umt5xxl.transformer.{name}")
    });
    let vae = renamed(&weights("wan-tiny", "vae"), |name| format!("vae.{name}"));
    let all: Tensors = transformer.into_iter().chain(text).chain(vae).collect();
    let (root, path) = beside(T2V, "wan-all.safetensors");
    write(&all, &path);
    let base = root.path().join("Wan");
    remove_file(base.join("text_encoder/model.safetensors")).expect("a file");
    remove_file(base.join("vae/diffusion_pytorch_model.safetensors")).expect("a file");
    assert_eq!(distance(&latent(&path, T2V), &expected), 0.0);

    // Without a base none is asked for: the heads are those of the published models, which the fixture's are not.
    let alone = TempDir::new().expect("a folder");
    let path = alone.path().join("wan-all.safetensors");
    write(&all, &path);
    let refused = families().open(&path, &F32).map(|_| ()).expect_err("other heads");
    assert!(refused.to_string().contains("heads of 128"), "{refused}");
}

/// Of two transformers the other one is found by its name, or in the sidecar; either may be opened.
#[test]
fn the_other_transformer_of_two_is_found() {
    let folder = A14B.folder();
    let expected = latent(folder.path(), A14B);
    let [high, low] =
        ["transformer", "transformer_2"].map(|part| renamed(&weights(A14B.folder, part), authors_name));
    for (of_high, of_low) in [
        (
            "wan2.2_t2v_high_noise_14B.safetensors",
            "wan2.2_t2v_low_noise_14B.safetensors",
        ),
        ("Wan2.2-HighNoise.safetensors", "Wan2.2-LowNoise.safetensors"),
        (
            "HighNoise/a-HighNoise.safetensors",
            "LowNoise/a-LowNoise.safetensors",
        ),
    ] {
        let (root, path) = beside(A14B, of_high);
        if of_high.contains('/') {
            rename(root.path().join("Wan"), root.path().join("HighNoise/Wan")).expect("a folder");
        }
        let other = root.path().join(of_low);
        create_dir_all(other.parent().expect("a folder")).expect("a folder");
        write(&high, &path);
        write(&low, &other);
        assert_eq!(distance(&latent(&path, A14B), &expected), 0.0, "{of_high}");
        if !of_high.contains('/') {
            assert_eq!(distance(&latent(&other, A14B), &expected), 0.0, "{of_low}");
        }
    }
    let (root, path) = beside(A14B, "first.safetensors");
    write(&high, &path);
    write(&low, &root.path().join("second.safetensors"));
    let refused = families()
        .open(&path, &F32)
        .map(|_| ())
        .expect_err("a refusal")
        .to_string();
    assert!(
        refused.contains("first.moored.json") && refused.contains("high noise"),
        "{refused}"
    );
    std::fs::write(
        root.path().join("first.moored.json"),
        r#"{"transformer_2": "second.safetensors"}"#,
    )
    .expect("a file");
    assert_eq!(distance(&latent(&path, A14B), &expected), 0.0);
}

/// Both transformers and the text encoder.
#[test]
fn blocks_are_quantized_at_load() {
    let folder = A14B.folder();
    let full = latent(folder.path(), A14B);
    let components = ["transformer", "transformer_2", "text_encoder"];
    let int8 = Precision {
        quantization: Quantization::of(Preset::Full, components.map(|name| (name, "int8"))).expect("formats"),
        ..F32
    };
    let opened = open(folder.path(), &int8);
    for component in components {
        assert_eq!(
            opened.model.format_of(component),
            Some(WeightFormat::Int8),
            "{component}"
        );
    }
    let found = on_cpu(&opened.film(&short(A14B), 0).0["latent"]);
    let apart = distance(&found, &full);
    println!("int8: {apart:e}");
    assert!(apart > 1e-4 && apart < 0.2, "{apart:e}");
}
