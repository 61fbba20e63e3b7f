//! Whole pipelines: from a prompt, or a prompt and a picture, to a picture.

use std::collections::HashMap;

use candle_core::Tensor;
use pipelines::{HostTensor, ImageRequest, Model, StageInput, StageKind, StageOutput, Unobserved};
use serde::Deserialize;

use crate::device::{BF16_PIPELINE, ON_CPU, tolerances};
use crate::numbers::{distance, json, largest_difference, numbers, tensors};
use crate::workshop::{BF16, Workshop, folder, init_image, on_cpu};

/// An entry of `expected/pipelines.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    kind: String,
    prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    guidance: f32,
    seed: u64,
    max_sequence_length: u32,
    strength: f32,
}

impl Case {
    fn request(&self, expected: &HashMap<String, Tensor>) -> ImageRequest {
        ImageRequest {
            prompt: self.prompt.clone(),
            width: self.width,
            height: self.height,
            steps: self.steps,
            guidance: self.guidance,
            seed: self.seed,
            max_sequence_length: self.max_sequence_length,
            init_image: expected.get(&format!("{}.init", self.name)).map(init_image),
            strength: if self.strength > 0.0 { self.strength } else { 1.0 },
            preview: false,
        }
    }
}

#[test]
fn pictures_equal_the_references() {
    let expected = tensors("flux-tiny/expected/pipelines.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/pipelines.json");
    let folders = ["dev", "schnell"].map(|kind| (kind, folder(kind)));
    let workshops = folders
        .each_ref()
        .map(|(kind, folder)| (*kind, Workshop::open(folder.path())));
    for case in &cases {
        let (_, workshop) = workshops
            .iter()
            .find(|(kind, _)| *kind == case.kind)
            .expect("a model");
        let request = case.request(&expected);
        let host = workshop.denoised(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        assert_eq!(
            latent.dims(),
            workshop.model.latent_shape(case.width, case.height)
        );
        let of_latent = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = workshop.picture(&request, &latent);
        let reference = &expected[&format!("{}.picture", case.name)];
        let of_picture = distance(&picture, reference);
        let largest = largest_difference(&picture, reference);
        println!(
            "{}: latent {of_latent:.2e}, picture {of_picture:.2e}, largest {largest:.2e}",
            case.name
        );
        let tolerance = tolerances().pipeline;
        assert!(of_latent < tolerance, "{}: {of_latent:e}", case.name);
        assert!(
            of_picture < tolerance && f64::from(largest) < tolerance,
            "{}: {of_picture:e}, {largest:e}",
            case.name
        );
        assert_rounded(workshop, &request, &host, reference);
    }
}

#[test]
fn bf16_generates_the_same_pictures_within_its_rounding() {
    // All components in bf16, as on a card. What must stay in f32 there (angles, norms' statistics, sinusoids, the
    // sums of the text encoder, the latent between steps) would be far outside if it did not.
    let expected = tensors("flux-tiny/expected/pipelines.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/pipelines.json");
    for case in &cases {
        let folder = folder(&case.kind);
        let workshop = Workshop::open_in(folder.path(), BF16);
        let request = case.request(&expected);
        let host = workshop.denoised(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        let of_latent = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = workshop.picture(&request, &latent);
        let of_picture = distance(&picture, &expected[&format!("{}.picture", case.name)]);
        println!(
            "{} in bf16: latent {of_latent:.2e}, picture {of_picture:.2e}",
            case.name
        );
        assert!(of_latent < BF16_PIPELINE, "{}: {of_latent:e}", case.name);
        assert!(of_picture < BF16_PIPELINE, "{}: {of_picture:e}", case.name);
    }
}

/// The bytes that the decode stage gives are the reference's floats, rounded, on every exact rung.
fn assert_rounded(workshop: &Workshop, request: &ImageRequest, latent: &HostTensor, reference: &Tensor) {
    let plan = workshop
        .model
        .lone_stage(StageKind::Decode, request.width, request.height);
    let input = StageInput {
        text: None,
        latent: Some(latent.clone()),
    };
    for rung in (0..plan.rungs.len()).filter(|&rung| !plan.rungs[rung].approximate) {
        let output = workshop
            .run(&plan, rung, request, &input, &mut Unobserved)
            .expect("a picture");
        let StageOutput::Picture { width, height, rgb } = output else {
            panic!("no picture")
        };
        assert_eq!((width, height), (request.width, request.height));
        let row_major = reference
            .squeeze(0)
            .and_then(|r| r.permute((1, 2, 0)))
            .expect("a picture");
        let worst = numbers(&row_major.contiguous().expect("a picture"))
            .iter()
            .zip(&rgb)
            .map(|(float, &byte)| (float * 255.0 - f32::from(byte)).abs())
            .fold(0.0, f32::max);
        assert!(worst < 0.55, "{}: {worst}", plan.rungs[rung].label);
    }
}

#[test]
fn the_order_of_draws_matters() {
    // The same request whose noise were drawn first gives another latent: that the order is right is
    // visible in the fixtures.
    let expected = tensors("flux-tiny/expected/pipelines.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/pipelines.json");
    let case = cases
        .iter()
        .find(|case| case.name == "from_image")
        .expect("the case");
    let folder = folder("dev");
    let workshop = Workshop::open(folder.path());
    let request = case.request(&expected);
    let stages = workshop.model.stages(&request);
    let mut input = StageInput::default();
    for plan in &stages[..2] {
        match workshop
            .run(plan, 0, &request, &input, &mut Unobserved)
            .expect("a stage")
        {
            StageOutput::Text(text) => input.text = Some(text),
            StageOutput::Latent(latent) => input.latent = Some(latent),
            StageOutput::Picture { .. } => panic!("a picture"),
        }
    }
    // A latent without an init image is one that a client brought: nothing was sampled for it.
    let brought = ImageRequest {
        init_image: None,
        ..request
    };
    let output = workshop
        .run(&stages[2], 0, &brought, &input, &mut Unobserved)
        .expect("a latent");
    let StageOutput::Latent(latent) = output else {
        panic!("no latent")
    };
    assert!(distance(&on_cpu(&latent), &expected["from_image.latent"]) > 100.0 * ON_CPU.pipeline);
}
