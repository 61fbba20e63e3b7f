//! Parity of whole pipelines: from a prompt, from a picture and its mask, or from pictures that are edited, to a picture.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::autoencoders::wan::{Chunking, WanVaeDecoder};
use pipelines::vision::qwen2_vl::size_of_area;
use pipelines::{
    HostTensor, Image, InitImage, Mask, Medium, Precision, Request, Unobserved, Values, resized,
};
use serde::Deserialize;
use tempfile::TempDir;

use crate::autoencoder::{config, decoded};
use crate::device::{BF16_PIPELINE, tolerances};
use crate::given::{EDIT_PLUS, folder, folder_of, folder_of_2511, open, seen};
use crate::numbers::{distance, init_image, json, largest_difference, numbers, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

const ANSWERS: &str = "qwen-image-tiny/expected/pipelines.safetensors";

/// An entry of `expected/pipelines.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    pipeline: String,
    prompt: String,
    negative_prompt: Option<String>,
    width: u32,
    height: u32,
    steps: u32,
    guidance: f32,
    seed: u64,
    max_sequence_length: u32,
    references: Vec<String>,
    strength: Option<f32>,
}

impl Case {
    fn folder(&self) -> TempDir {
        match self.pipeline.as_str() {
            "text" | "image" | "mask" => folder(),
            "lightning" => {
                let folder = folder();
                std::fs::write(folder.path().join("moored.json"), r#"{"shift": 3}"#).expect("a file");
                folder
            }
            "edit" => folder_of("QwenImageEditPipeline"),
            "edit_plus" => folder_of(EDIT_PLUS),
            "edit_zero" => folder_of_2511(),
            other => panic!("{other}"),
        }
    }

    fn request(&self, expected: &HashMap<String, Tensor>) -> Request {
        let pictures = tensors("qwen-image-tiny/expected/references.safetensors");
        let of = |what: &str| expected.get(&format!("{}.{what}", self.name));
        let references = self.references.iter().map(|name| init_image(&pictures[name]));
        let references: Vec<InitImage> = references.collect();
        let mask = of("mask").map(|grey| {
            let (height, width) = grey.dims2().expect("a mask");
            let bytes: Vec<u8> = grey.flatten_all().and_then(|grey| grey.to_vec1()).expect("bytes");
            Mask {
                width: width as u32,
                height: height as u32,
                grey: bytes.into(),
            }
        });
        let image = Image {
            seen: match self.pipeline.as_str() {
                "edit" => Vec::new(),
                _ => seen(&references),
            },
            references,
            init_image: of("init").map(init_image),
            mask,
            ..Image::of(self.width, self.height)
        };
        Request {
            prompt: self.prompt.clone(),
            negative_prompt: self.negative_prompt.clone(),
            true_guidance: self.guidance,
            seed: self.seed,
            strength: self.strength.unwrap_or(1.0),
            ..Request::of(Medium::Image(image), self.steps, 0.0, self.max_sequence_length)
        }
    }
}

/// The autoencoder's latent `[1, channels, h, w]` of a transformer's.
fn unscaled(latent: &Tensor) -> Tensor {
    let own = latent
        .unsqueeze(2)
        .and_then(|latent| config().unscaled(&latent))
        .and_then(|latent| latent.squeeze(2));
    own.expect("a latent")
}

/// Decodes a latent in the transformer's scale to floats of 0 to 1, as `output_type="pt"`.
fn picture(opened: &OpenModel, latent: &Tensor) -> Tensor {
    let decoder = WanVaeDecoder::new(&config(), &opened.tensors("vae")).expect("a decoder");
    decoded(&decoder, &unscaled(latent), Chunking::Whole)
        .affine(0.5, 0.5)
        .and_then(|picture| picture.clamp(0f32, 1f32))
        .expect("a picture")
}

#[test]
fn pictures_equal_the_references() {
    let (cases, expected): (Vec<Case>, _) =
        (json("qwen-image-tiny/expected/pipelines.json"), tensors(ANSWERS));
    for case in &cases {
        let folder = case.folder();
        let opened = open(folder.path(), &F32);
        let request = case.request(&expected);
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        assert_eq!(latent.dims(), opened.stage(&request, "decode").takes[0].shape);
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}", case.name);
        let tolerance = tolerances().pipeline;
        assert!(apart < tolerance, "{}: {apart:e}", case.name);
        let Some(reference) = expected.get(&format!("{}.picture", case.name)) else {
            continue;
        };
        let largest = largest_difference(&picture(&opened, &latent), reference);
        println!("{}: picture, largest {largest:.2e}", case.name);
        assert!(f64::from(largest) < 1e-4, "{}: {largest:e}", case.name);
        assert_rounded(&opened, &request, &host, reference);
    }
    assert_eq!(cases.len(), 13);
}

/// The bytes of the decode stage are the rounded reference floats, on every rung.
fn assert_rounded(opened: &OpenModel, request: &Request, latent: &HostTensor, reference: &Tensor) {
    let plan = opened.stage(request, "decode");
    let values = Values::from([("latent".to_owned(), latent.clone())]);
    for rung in 0..plan.rungs.len() {
        let mut delivered = Delivered::default();
        let result = opened.run(&plan, rung, request, &values, &mut delivered);
        result.expect("a picture");
        let [piece] = delivered.0.as_slice() else {
            panic!("{} pieces", delivered.0.len())
        };
        assert!(request.medium.is_made_as(&piece.format) && piece.is_last());
        let row_major = reference.squeeze(0).and_then(|r| r.permute((1, 2, 0)));
        let row_major = row_major.and_then(|r| r.contiguous()).expect("a picture");
        let worst = numbers(&row_major)
            .iter()
            .zip(&piece.data)
            .map(|(float, &byte)| (float * 255.0 - f32::from(byte)).abs())
            .fold(0.0, f32::max);
        assert!(worst < 0.55, "{}: {worst}", plan.rungs[rung].label);
    }
}

#[test]
fn bf16_generates_the_same_pictures_within_its_rounding() {
    let expected = tensors(ANSWERS);
    for case in json::<Vec<Case>>("qwen-image-tiny/expected/pipelines.json") {
        let folder = case.folder();
        let opened = open(folder.path(), &Precision::full(DType::BF16));
        let host = opened.latent(&case.request(&expected), &mut Unobserved);
        let apart = distance(
            &on_cpu(&host.expect("a latent")),
            &expected[&format!("{}.latent", case.name)],
        );
        println!("{} in bf16: latent {apart:.2e}", case.name);
        assert!(apart < BF16_PIPELINE, "{}: {apart:e}", case.name);
    }
}

#[test]
fn references_are_scaled_as_by_the_reference() {
    #[derive(Deserialize)]
    struct Size {
        reference: (u32, u32),
        scaled: (u32, u32),
        seen: (u32, u32),
    }
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    for size in json::<Vec<Size>>("qwen-image-tiny/expected/sizes.json") {
        let fit = opened
            .model
            .reference_fit(size.reference.0, size.reference.1)
            .expect("a size");
        assert_eq!((fit.scaled, fit.size), (size.scaled, size.scaled));
        assert_eq!(fit.seen, Some(size.seen));
    }
    let edit = folder_of("QwenImageEditPipeline");
    let fit = open(edit.path(), &F32)
        .model
        .reference_fit(1920, 1080)
        .expect("a size");
    assert_eq!(fit.seen, None);
}

#[test]
fn the_text_encoder_sees_the_clients_picture_and_not_the_scaled_one() {
    let (case, expected): (Case, _) = (
        json("qwen-image-tiny/expected/seen.json"),
        tensors("qwen-image-tiny/expected/seen.safetensors"),
    );
    let original = init_image(&expected["picture"]);
    let from = (original.width, original.height);
    let scaled = |size: (u32, u32)| InitImage {
        rgb: resized(&original.rgb, 3, from, size).into(),
        ..InitImage::of_size(size)
    };
    // The size that the fixture's pipeline scales to in place of a megapixel.
    let reference = scaled((96, 64));
    let folder = case.folder();
    let opened = open(folder.path(), &F32);
    let latent = |seen: InitImage| {
        let mut request = case.request(&expected);
        let Medium::Image(image) = &mut request.medium else {
            panic!("a picture")
        };
        (image.references, image.seen) = (vec![reference.clone()], vec![seen]);
        on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
    };
    let apart = |latent: &Tensor| distance(latent, &expected["seen.latent"]);
    let of_original = apart(&latent(scaled(size_of_area(from, 384 * 384))));
    println!("seen: latent {of_original:.2e}");
    assert!(of_original < tolerances().pipeline, "{of_original:e}");
    let [of_scaled] = &seen(std::slice::from_ref(&reference))[..] else {
        panic!("a picture")
    };
    let of_scaled = apart(&latent(of_scaled.clone()));
    assert!(of_scaled > 1e-3, "{of_scaled:e}");
}
