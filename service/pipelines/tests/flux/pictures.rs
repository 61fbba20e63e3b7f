//! Parity of whole pipelines: from a prompt, or a prompt and a picture, to a picture.

use std::collections::HashMap;

use candle_core::Tensor;
use pipelines::flux::FluxModel;
use pipelines::{ControlUse, HostTensor, Image, MediaFormat, Medium, Request, Unobserved, Values};
use serde::Deserialize;

use crate::controls::{used, with_control_net};
use crate::device::{BF16_PIPELINE, ON_CPU, tolerances};
use crate::given::{BF16, copy_of, folder, open, open_in};
use crate::numbers::{distance, init_image, json, largest_difference, numbers, tensors};
use crate::open_model::{Delivered, OpenModel, on_cpu};

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
    fn request(&self, expected: &HashMap<String, Tensor>) -> Request {
        let image = Image {
            init_image: expected.get(&format!("{}.init", self.name)).map(init_image),
            ..Image::of(self.width, self.height)
        };
        Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            strength: if self.strength > 0.0 { self.strength } else { 1.0 },
            ..Request::of(
                Medium::Image(image),
                self.steps,
                self.guidance,
                self.max_sequence_length,
            )
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
        .map(|(kind, folder)| (*kind, open(folder.path())));
    for case in &cases {
        let (_, opened) = workshops
            .iter()
            .find(|(kind, _)| *kind == case.kind)
            .expect("a model");
        let request = case.request(&expected);
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        assert_eq!(latent.dims(), opened.stage(&request, "decode").takes[0].shape);
        let of_latent = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = opened.picture(&latent);
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
        assert_rounded(opened, &request, &host, reference);
    }
}

/// An entry of `expected/negatives.json`.
#[derive(Deserialize)]
struct Guided {
    #[serde(flatten)]
    case: Unguided,
    negative_prompt: String,
    true_guidance: f32,
    /// Of a ControlNet.
    #[serde(default)]
    scale: f32,
    #[serde(default)]
    end: f32,
}

/// The fields that all cases have.
#[derive(Deserialize)]
struct Unguided {
    name: String,
    prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    guidance: f32,
    seed: u64,
    max_sequence_length: u32,
    strength: f32,
}

#[test]
fn negative_prompts_with_true_guidance_equal_the_references() {
    let expected = tensors("flux-tiny/expected/negatives.safetensors");
    let cases: Vec<Guided> = json("flux-tiny/expected/negatives.json");
    let dev = folder("dev");
    let dev = open(dev.path());
    let kontext = copy_of(&["flux-tiny", "flux-kontext-tiny"]);
    let kontext = open(kontext.path());
    let controlled = with_control_net("single");
    for Guided {
        case,
        negative_prompt,
        true_guidance,
        scale,
        end,
    } in cases
    {
        let name = &case.name;
        let given = |what: &str| expected.get(&format!("{name}.{what}")).map(init_image);
        let control = given("control").map(|image| ControlUse {
            scale,
            end,
            ..used(image)
        });
        let image = Image {
            init_image: given("init"),
            references: given("reference").into_iter().collect(),
            controls: control.into_iter().collect(),
            ..Image::of(case.width, case.height)
        };
        let opened = match (image.references.is_empty(), image.controls.is_empty()) {
            (true, true) => &dev,
            (false, _) => &kontext,
            (true, false) => &controlled,
        };
        let request = Request {
            prompt: case.prompt.clone(),
            negative_prompt: Some(negative_prompt),
            true_guidance,
            seed: case.seed,
            strength: if case.strength > 0.0 { case.strength } else { 1.0 },
            ..Request::of(
                Medium::Image(image),
                case.steps,
                case.guidance,
                case.max_sequence_length,
            )
        };
        let latent = |request: &Request| {
            let host = opened.latent(request, &mut Unobserved).expect("a latent");
            on_cpu(&host)
        };
        let guided = latent(&request);
        let of_latent = distance(&guided, &expected[&format!("{name}.latent")]);
        println!("{name}: latent {of_latent:.2e}");
        assert!(of_latent < tolerances().pipeline, "{name}: {of_latent:e}");

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
fn bf16_generates_the_same_pictures_within_its_rounding() {
    // All components in bf16, as on a card. If the values that must stay in f32 (angles, norm statistics, sinusoids,
    // the residual stream of the text encoder, the latent between steps) did not, the error would be far above the
    // tolerance.
    let expected = tensors("flux-tiny/expected/pipelines.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/pipelines.json");
    for case in &cases {
        let folder = folder(&case.kind);
        let opened = open_in(folder.path(), BF16);
        let request = case.request(&expected);
        let host = opened.latent(&request, &mut Unobserved).expect("a latent");
        let latent = on_cpu(&host);
        let of_latent = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = opened.picture(&latent);
        let of_picture = distance(&picture, &expected[&format!("{}.picture", case.name)]);
        println!(
            "{} in bf16: latent {of_latent:.2e}, picture {of_picture:.2e}",
            case.name
        );
        assert!(of_latent < BF16_PIPELINE, "{}: {of_latent:e}", case.name);
        assert!(of_picture < BF16_PIPELINE, "{}: {of_picture:e}", case.name);
    }
}

/// The delivered bytes of the decode stage are the rounded reference floats, on every exact rung.
fn assert_rounded(opened: &OpenModel<FluxModel>, request: &Request, latent: &HostTensor, reference: &Tensor) {
    let plan = opened.stage(request, "decode");
    let values = Values::from([("latent".to_owned(), latent.clone())]);
    let (width, height) = request.medium.size().expect("a picture");
    for rung in (0..plan.rungs.len()).filter(|&rung| !plan.rungs[rung].approximate) {
        let mut delivered = Delivered::default();
        let given = opened.run(&plan, rung, request, &values, &mut delivered);
        assert_eq!(given.expect("a picture"), Values::new());
        let [piece] = &delivered.0[..] else {
            panic!("{} pieces of a picture", delivered.0.len())
        };
        assert_eq!(piece.format, MediaFormat::Image { width, height });
        assert!(piece.track.is_empty() && piece.first == 0 && piece.is_last());
        let row_major = reference
            .squeeze(0)
            .and_then(|r| r.permute((1, 2, 0)))
            .expect("a picture");
        let worst = numbers(&row_major.contiguous().expect("a picture"))
            .iter()
            .zip(&piece.data)
            .map(|(float, &byte)| (float * 255.0 - f32::from(byte)).abs())
            .fold(0.0, f32::max);
        assert!(worst < 0.55, "{}: {worst}", plan.rungs[rung].label);
    }
}

#[test]
fn random_draws_are_in_the_reference_order() {
    // Drawing the noise first gives another latent: the fixtures show that the order is correct.
    let expected = tensors("flux-tiny/expected/pipelines.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/pipelines.json");
    let case = cases
        .iter()
        .find(|case| case.name == "from_image")
        .expect("the case");
    let folder = folder("dev");
    let opened = open(folder.path());
    let request = case.request(&expected);
    let mut values = Values::new();
    for plan in &opened.stages(&request)[..2] {
        let given = opened.run(plan, 0, &request, &values, &mut Unobserved);
        values.extend(given.expect("a stage"));
    }
    // A latent from the client needs no random draw.
    let brought = Request {
        from_values: true,
        medium: Medium::Image(Image::of(case.width, case.height)),
        ..request.clone()
    };
    for (request, is_the_references) in [(&request, true), (&brought, false)] {
        let plan = opened.stage(request, "denoise");
        let given = opened.run(&plan, 0, request, &values, &mut Unobserved);
        let given = given.expect("a latent");
        let apart = distance(&on_cpu(&given["latent"]), &expected["from_image.latent"]);
        if is_the_references {
            assert!(apart < tolerances().pipeline, "{apart:e}");
        } else {
            assert!(apart > 100.0 * ON_CPU.pipeline, "{apart:e}");
        }
    }
}
