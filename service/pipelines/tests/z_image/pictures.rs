//! Parity of whole pipelines: from a prompt, or a prompt and a picture, to a picture.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::{HostTensor, Image, Mask, Medium, Precision, Request, Unobserved, Values, resized};
use serde::Deserialize;

use crate::device::{BF16_PIPELINE, tolerances};
use crate::given::{folder, open};
use crate::numbers::{distance, init_image, json, largest_difference, numbers, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

/// An entry of `expected/pipelines.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    seed: u64,
    max_sequence_length: u32,
    strength: f32,
}

impl Case {
    fn request(&self, expected: &HashMap<String, Tensor>) -> Request {
        let image = Image {
            init_image: expected.get(&format!("{}.init", self.name)).map(init_image),
            ..Image::of(self.width, self.height)
        };
        Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            strength: if self.strength > 0.0 { self.strength } else { 1.0 },
            ..Request::of(Medium::Image(image), self.steps, 0.0, self.max_sequence_length)
        }
    }
}

fn cases() -> (Vec<Case>, HashMap<String, Tensor>) {
    (
        json::<Vec<Case>>("z-image-tiny/expected/pipelines.json"),
        tensors("z-image-tiny/expected/pipelines.safetensors"),
    )
}

#[test]
fn pictures_equal_the_references() {
    let (cases, expected) = cases();
    let folder = folder();
    let opened = open(folder.path(), &F32);
    for case in &cases {
        let request = case.request(&expected);
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        assert_eq!(latent.dims(), opened.stage(&request, "decode").takes[0].shape);
        let of_latent = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {of_latent:.2e}", case.name);
        let tolerance = tolerances().pipeline;
        assert!(of_latent < tolerance, "{}: {of_latent:e}", case.name);
        let Some(reference) = expected.get(&format!("{}.picture", case.name)) else {
            continue;
        };
        let picture = opened.picture(&latent);
        let (apart, largest) = (
            distance(&picture, reference),
            largest_difference(&picture, reference),
        );
        println!("{}: picture {apart:.2e}, largest {largest:.2e}", case.name);
        assert!(
            apart < tolerance && f64::from(largest) < tolerance,
            "{}: {apart:e}, {largest:e}",
            case.name
        );
        assert_rounded(&opened, &request, &host, reference);
    }
}

/// The bytes of the decode stage are the rounded reference floats, on every exact rung.
fn assert_rounded(opened: &OpenModel, request: &Request, latent: &HostTensor, reference: &Tensor) {
    let plan = opened.stage(request, "decode");
    let values = Values::from([("latent".to_owned(), latent.clone())]);
    for rung in (0..plan.rungs.len()).filter(|&rung| !plan.rungs[rung].approximate) {
        let mut delivered = Delivered::default();
        let result = opened.run(&plan, rung, request, &values, &mut delivered);
        result.expect("a picture");
        let [piece] = delivered.0.as_slice() else {
            panic!("{} pieces", delivered.0.len())
        };
        assert!(request.medium.is_made_as(&piece.format) && piece.is_last());
        let rgb = &piece.data;
        let row_major = reference.squeeze(0).and_then(|r| r.permute((1, 2, 0)));
        let row_major = row_major.and_then(|r| r.contiguous()).expect("a picture");
        let worst = numbers(&row_major)
            .iter()
            .zip(rgb)
            .map(|(float, &byte)| (float * 255.0 - f32::from(byte)).abs())
            .fold(0.0, f32::max);
        assert!(worst < 0.55, "{}: {worst}", plan.rungs[rung].label);
    }
}

#[test]
fn bf16_generates_the_same_pictures_within_its_rounding() {
    let (cases, expected) = cases();
    let folder = folder();
    let opened = open(folder.path(), &Precision::full(DType::BF16));
    for case in &cases {
        let request = case.request(&expected);
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let of_latent = distance(&on_cpu(&host), &expected[&format!("{}.latent", case.name)]);
        println!("{} in bf16: latent {of_latent:.2e}", case.name);
        assert!(of_latent < BF16_PIPELINE, "{}: {of_latent:e}", case.name);
    }
}

#[test]
fn negative_prompts_with_true_guidance_equal_the_references() {
    #[derive(Deserialize)]
    struct Guided {
        #[serde(flatten)]
        case: Case,
        negative_prompt: String,
        true_guidance: f32,
    }
    let expected = tensors("z-image-tiny/expected/negatives.safetensors");
    let cases: Vec<Guided> = json("z-image-tiny/expected/negatives.json");
    let folder = folder();
    let opened = open(folder.path(), &F32);
    for Guided {
        case,
        negative_prompt,
        true_guidance,
    } in cases
    {
        let name = &case.name;
        let request = Request {
            negative_prompt: Some(negative_prompt),
            true_guidance,
            ..case.request(&expected)
        };
        let latent = |request: &Request| on_cpu(&opened.latent(request, &mut Unobserved).expect("a latent"));
        let guided = latent(&request);
        let apart = distance(&guided, &expected[&format!("{name}.latent")]);
        println!("{name}: latent {apart:.2e}");
        assert!(apart < tolerances().pipeline, "{name}: {apart:e}");

        // Without the negative prompt it is another result, but where the scale leaves it off.
        let without = Request {
            negative_prompt: None,
            ..request.clone()
        };
        let apart = distance(&latent(&without), &guided);
        assert_eq!(apart > 1e-3, request.negative().is_some(), "{name}: {apart:e}");
    }
}

#[test]
fn masked_pictures_equal_the_references() {
    #[derive(Deserialize)]
    struct Masked {
        name: String,
        prompt: String,
        width: u32,
        height: u32,
        steps: u32,
        seed: u64,
        max_sequence_length: u32,
        strength: f32,
    }
    let expected = tensors("z-image-tiny/expected/masks.safetensors");
    let folder = folder();
    let opened = open(folder.path(), &F32);
    for case in json::<Vec<Masked>>("z-image-tiny/expected/masks.json") {
        let grey = &expected[&format!("{}.mask", case.name)];
        let (from_height, from_width) = grey.dims2().expect("a mask");
        let bytes = grey
            .flatten_all()
            .and_then(|grey| grey.to_vec1::<u8>())
            .expect("bytes");
        let from = (from_width as u32, from_height as u32);
        let image = Image {
            init_image: Some(init_image(&expected[&format!("{}.init", case.name)])),
            mask: Some(Mask {
                width: case.width,
                height: case.height,
                grey: resized(&bytes, 1, from, (case.width, case.height)).into(),
            }),
            ..Image::of(case.width, case.height)
        };
        let request = Request {
            prompt: case.prompt.clone(),
            seed: case.seed,
            strength: case.strength,
            ..Request::of(Medium::Image(image), case.steps, 0.0, case.max_sequence_length)
        };
        let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = opened.picture(&latent);
        let reference = &expected[&format!("{}.picture", case.name)];
        let largest = f64::from(largest_difference(&picture, reference));
        println!("{}: latent {apart:.2e}, picture {largest:.2e}", case.name);
        let tolerance = tolerances().pipeline;
        assert!(apart < tolerance, "{}: {apart:e}", case.name);
        assert!(largest < tolerance.max(1e-4), "{}: {largest:e}", case.name);
    }
}
