//! Parity of whole pipelines: from a prompt, a picture, or a picture and its mask, to a picture.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::{HostTensor, Image, Mask, Medium, Precision, Request, Unobserved, Values};
use serde::Deserialize;

use crate::device::{BF16_PIPELINE, tolerances};
use crate::given::{folder, inpaint_folder, open, predict};
use crate::numbers::{distance, init_image, json, largest_difference, numbers, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

/// An entry of `expected/pipelines.json`.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    kind: String,
    sampler: String,
    prediction: String,
    prompt: String,
    negative_prompt: Option<String>,
    width: u32,
    height: u32,
    steps: u32,
    guidance: f32,
    seed: u64,
    strength: f32,
}

impl Case {
    pub(crate) fn all() -> Vec<Case> {
        json("sdxl-tiny/expected/pipelines.json")
    }

    pub(crate) fn request(&self, expected: &HashMap<String, Tensor>) -> Request {
        let of = |what: &str| expected.get(&format!("{}.{what}", self.name));
        let mask = of("mask").map(|grey| {
            let bytes: Vec<u8> = grey.flatten_all().and_then(|grey| grey.to_vec1()).expect("bytes");
            Mask {
                width: self.width,
                height: self.height,
                grey: bytes.into(),
            }
        });
        let image = Image {
            init_image: of("init").map(init_image),
            mask,
            ..Image::of(self.width, self.height)
        };
        Request {
            prompt: self.prompt.clone(),
            negative_prompt: Some(self.negative_prompt.clone().unwrap_or_default()),
            true_guidance: self.guidance,
            sampler: Some(self.sampler.parse().expect("a sampler")),
            seed: self.seed,
            strength: self.strength,
            ..Request::of(Medium::Image(image), self.steps, 0.0, 225)
        }
    }

    fn open(&self, precision: &Precision) -> OpenModel {
        let folder = match self.kind.as_str() {
            "nine" => inpaint_folder(),
            _ => folder(),
        };
        predict(folder.path(), &self.prediction);
        open(folder.path(), precision)
    }
}

#[test]
fn pictures_equal_the_references() {
    let expected = tensors("sdxl-tiny/expected/pipelines.safetensors");
    let mut failed = Vec::new();
    for case in Case::all() {
        let (opened, request) = (case.open(&F32), case.request(&expected));
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        assert_eq!(latent.dims(), opened.stage(&request, "decode").takes[0].shape);
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}", case.name);
        if apart >= tolerances().pipeline {
            failed.push(case.name.clone());
        }
        if let Some(reference) = expected.get(&format!("{}.picture", case.name)) {
            let picture = opened.picture(&latent);
            let largest = largest_difference(&picture, reference);
            println!("{}: picture, largest {largest:.2e}", case.name);
            assert!(
                f64::from(largest) < tolerances().pipeline,
                "{}: {largest:e}",
                case.name
            );
            assert_rounded(&opened, &request, &host, reference);
        }
    }
    assert_eq!(failed, [""; 0]);
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
fn conditions_one_after_the_other_give_the_same_latent() {
    let expected = tensors("sdxl-tiny/expected/pipelines.safetensors");
    for case in Case::all().iter().filter(|case| case.guidance > 1.0).take(3) {
        let (opened, request) = (case.open(&F32), case.request(&expected));
        let values = opened.sampled(&request, &mut Unobserved).expect("values");
        let plan = opened.stage(&request, "denoise");
        let [with_filters, whole, one_by_one] = &plan.rungs[..] else {
            panic!("{:?}", plan.rungs)
        };
        assert!(one_by_one.scratch < whole.scratch && whole.scratch < with_filters.scratch);
        assert!(with_filters.copies.iter().any(|layer| layer == "conv_in"));
        let run = |rung: usize| {
            let given = opened.run(&plan, rung, &request, &values, &mut Unobserved);
            given.expect("a latent")
        };
        // Filters that are kept change no bit.
        assert_eq!(run(1)["latent"], values["latent"]);
        let given = run(2);
        let apart = distance(&on_cpu(&given["latent"]), &on_cpu(&values["latent"]));
        println!("{}: {apart:.2e}", case.name);
        assert!(apart < tolerances().component, "{}: {apart:e}", case.name);
    }
}

#[test]
fn bf16_generates_the_same_pictures_within_its_rounding() {
    let expected = tensors("sdxl-tiny/expected/pipelines.safetensors");
    for case in Case::all().iter().filter(|case| case.steps < 10) {
        let opened = case.open(&Precision::full(DType::BF16));
        let host = opened
            .latent(&case.request(&expected), &mut Unobserved)
            .expect("a latent");
        let apart = distance(&on_cpu(&host), &expected[&format!("{}.latent", case.name)]);
        println!("{} in bf16: latent {apart:.2e}", case.name);
        assert!(apart < 2.0 * BF16_PIPELINE, "{}: {apart:e}", case.name);
    }
}
