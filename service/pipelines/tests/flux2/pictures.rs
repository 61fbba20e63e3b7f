//! Parity of whole pipelines: from a prompt, reference pictures, or a picture and its mask, to a picture.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::{
    HostTensor, Image, InitImage, Mask, Medium, Precision, ReferenceFit, Request, Unobserved, Values, resized,
};
use serde::Deserialize;

use crate::device::{BF16_PIPELINE, tolerances};
use crate::given::{base_folder, folder, of_autoencoder, open};
use crate::numbers::{distance, init_image, json, largest_difference, numbers, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

/// An entry of `expected/pipelines.json` or `masks.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    distilled: bool,
    prompt: String,
    negative_prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    guidance: f32,
    seed: u64,
    max_sequence_length: u32,
    references: Vec<String>,
    #[serde(default)]
    strength: Option<f32>,
}

/// A picture as a client sends it, scaled and cut as the model takes it.
fn taken(picture: &InitImage, fit: ReferenceFit) -> InitImage {
    let size = (picture.width, picture.height);
    let scaled = resized(&picture.rgb, 3, size, fit.scaled);
    InitImage {
        width: fit.size.0,
        height: fit.size.1,
        rgb: fit.cut(scaled, 3).into(),
    }
}

impl Case {
    fn request(&self, opened: &OpenModel, expected: &HashMap<String, Tensor>) -> Request {
        let pictures = tensors("flux2-tiny/expected/references.safetensors");
        let reference = |name: &String| {
            let picture = init_image(&pictures[name]);
            let fit = opened.model.reference_fit(picture.width, picture.height);
            taken(&picture, fit.expect("a size"))
        };
        let of = |what: &str| expected.get(&format!("{}.{what}", self.name));
        let size = (self.width, self.height);
        let start = of("init").map(|picture| taken(&init_image(picture), ReferenceFit::scaled_to(size)));
        let mask = of("mask").map(|grey| {
            let (height, width) = grey.dims2().expect("a mask");
            let bytes: Vec<u8> = grey.flatten_all().and_then(|grey| grey.to_vec1()).expect("bytes");
            Mask {
                width: self.width,
                height: self.height,
                grey: resized(&bytes, 1, (width as u32, height as u32), size).into(),
            }
        });
        let image = Image {
            references: self.references.iter().map(reference).collect(),
            init_image: start,
            mask,
            ..Image::of(self.width, self.height)
        };
        let request = Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            strength: self.strength.unwrap_or(1.0),
            ..Request::of(Medium::Image(image), self.steps, 0.0, self.max_sequence_length)
        };
        match self.distilled {
            true => request,
            false => Request {
                negative_prompt: Some(self.negative_prompt.clone()),
                true_guidance: self.guidance,
                ..request
            },
        }
    }
}

/// The models of the cases: distilled, and not.
struct Both {
    distilled: OpenModel,
    base: OpenModel,
}

impl Both {
    fn open(precision: &Precision) -> Both {
        Both {
            distilled: open(folder().path(), precision),
            base: open(base_folder().path(), precision),
        }
    }

    fn of(&self, case: &Case) -> &OpenModel {
        match case.distilled {
            true => &self.distilled,
            false => &self.base,
        }
    }
}

fn all_cases() -> Vec<(Vec<Case>, HashMap<String, Tensor>)> {
    let read = |what: &str| {
        (
            json::<Vec<Case>>(&format!("flux2-tiny/expected/{what}.json")),
            tensors(&format!("flux2-tiny/expected/{what}.safetensors")),
        )
    };
    vec![read("pipelines"), read("masks")]
}

#[test]
fn pictures_equal_the_references() {
    let both = Both::open(&F32);
    let mut compared = 0;
    for (cases, expected) in all_cases() {
        for case in &cases {
            let opened = both.of(case);
            let request = case.request(opened, &expected);
            let host = opened.latent(&request, &mut Unobserved).expect("a latent");
            let latent = on_cpu(&host);
            assert_eq!(latent.dims(), opened.stage(&request, "decode").takes[0].shape);
            let own = of_autoencoder(&latent);
            let apart = distance(&own, &expected[&format!("{}.latent", case.name)]);
            println!("{}: latent {apart:.2e}", case.name);
            let tolerance = tolerances().pipeline;
            assert!(apart < tolerance, "{}: {apart:e}", case.name);
            compared += 1;
            let Some(reference) = expected.get(&format!("{}.picture", case.name)) else {
                continue;
            };
            let picture = opened.picture(&own);
            let largest = largest_difference(&picture, reference);
            println!("{}: picture, largest {largest:.2e}", case.name);
            assert!(
                f64::from(largest) < tolerance.max(1e-4),
                "{}: {largest:e}",
                case.name
            );
            assert_rounded(opened, &request, &host, reference);
        }
    }
    assert_eq!(compared, 17);
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
fn bf16_generates_the_same_pictures_within_its_rounding() {
    let both = Both::open(&Precision::full(DType::BF16));
    for (cases, expected) in all_cases() {
        for case in &cases {
            let opened = both.of(case);
            let host = opened.latent(&case.request(opened, &expected), &mut Unobserved);
            let own = of_autoencoder(&on_cpu(&host.expect("a latent")));
            let apart = distance(&own, &expected[&format!("{}.latent", case.name)]);
            println!("{} in bf16: latent {apart:.2e}", case.name);
            assert!(apart < BF16_PIPELINE, "{}: {apart:e}", case.name);
        }
    }
}

#[test]
fn references_are_scaled_and_cut_as_by_the_reference() {
    #[derive(Deserialize)]
    struct Size {
        reference: (u32, u32),
        scaled: (u32, u32),
        crop: [u32; 4],
    }
    let opened = open(folder().path(), &F32);
    for size in json::<Vec<Size>>("flux2-tiny/expected/sizes.json") {
        let fit = opened
            .model
            .reference_fit(size.reference.0, size.reference.1)
            .expect("a size");
        let [left, top, right, bottom] = size.crop;
        assert_eq!(fit.scaled, size.scaled);
        assert_eq!(fit.size, (right - left, bottom - top));
        let middle = |whole: u32, part: u32| (whole - part) / 2;
        assert_eq!(
            (left, top),
            (middle(fit.scaled.0, fit.size.0), middle(fit.scaled.1, fit.size.1))
        );
    }
}
