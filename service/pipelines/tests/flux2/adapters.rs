//! Adapters: the same latents as diffusers, and one adapter in every spelling.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use pipelines::flux2::Flux2Model;
use pipelines::{
    AdapterError, AdapterFile, AdapterUse, Image, Medium, ModelError, Request, StrengthCurve, Unobserved,
};
use serde::Deserialize;
use tempfile::TempDir;

use crate::device::tolerances;
use crate::given::{base_folder, folder, of_autoencoder};
use crate::numbers::{distance, fixtures, json, numbers, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

/// The adapter as diffusers writes it.
const ADAPTER: &str = "diffusers-peft.safetensors";

fn adapted(base: &Path, path: PathBuf) -> Result<Flux2Model, ModelError> {
    let model = Flux2Model::open(base, &F32)
        .expect("a sound model")
        .expect("FLUX.2");
    model.adapted(&[AdapterFile {
        name: "one".to_owned(),
        kind: pipelines::Families::kind_of_folder(&pipelines::families(), &path)
            .unwrap_or(pipelines::AdapterKind::Lora),
        path,
        ignores_unknown: false,
    }])
}

/// A model with an adapter of the fixture. Its folder is only needed until its components are loaded.
fn with(base: &TempDir, name: &str) -> OpenModel {
    let path = fixtures().join("flux2-lora-tiny").join(name);
    OpenModel::of(Arc::new(adapted(base.path(), path).expect("an adapter")))
}

fn used(strength: f32) -> Vec<AdapterUse> {
    vec![AdapterUse {
        name: "one".to_owned(),
        strength: StrengthCurve::constant(strength).expect("a strength"),
        text_strength: strength,
    }]
}

/// An entry of `flux2-lora-tiny/expected.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    adapters: Vec<String>,
    strengths: Vec<Vec<f32>>,
    prompt: String,
    seed: u64,
    width: u32,
    height: u32,
    steps: u32,
    max_sequence_length: u32,
}

impl Case {
    fn request(&self) -> Request {
        let medium = Medium::Image(Image::of(self.width, self.height));
        Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            adapters: self
                .strengths
                .first()
                .map(|strengths| used(strengths[0]))
                .unwrap_or_default(),
            ..Request::of(medium, self.steps, 0.0, self.max_sequence_length)
        }
    }
}

/// The autoencoder's latent that a request makes.
fn latent(opened: &OpenModel, request: &Request) -> Tensor {
    let latent = opened.latent(request, &mut Unobserved).expect("a latent");
    of_autoencoder(&on_cpu(&latent))
}

#[test]
fn pictures_with_adapters_equal_the_references() {
    let expected = tensors("flux2-lora-tiny/expected.safetensors");
    let cases: Vec<Case> = json("flux2-lora-tiny/expected.json");
    for case in &cases {
        let name = case.adapters.first().map_or(ADAPTER, String::as_str);
        let found = latent(&with(&folder(), name), &case.request());
        let apart = distance(&found, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}", case.name);
        assert!(apart < tolerances().pipeline, "{}: {apart:e}", case.name);
    }
    assert_eq!(cases.len(), 3);
}

/// The tensors of an adapter of the fixture, by name.
fn content(name: &str) -> BTreeMap<String, Vec<f32>> {
    let opened = with(&folder(), name);
    let tensors = opened.tensors("adapter:one:transformer");
    let names = tensors.names().map(str::to_owned);
    names
        .map(|name| (name.clone(), numbers(&tensors.get(&name).expect("a tensor"))))
        .collect()
}

#[test]
fn one_adapter_in_every_spelling_is_the_same_tensors() {
    let expected = content(ADAPTER);
    // Twelve layers of a double block and two of a single one.
    assert_eq!(expected.len(), 2 * 14);
    for name in ["bfl", "kohya"] {
        assert_eq!(content(&format!("{name}.safetensors")), expected, "{name}");
    }
}

#[test]
fn an_adapter_without_alpha_has_it_in_its_factors() {
    const FOLDED: &str = "bfl-folded.safetensors";
    let (expected, found) = (content(ADAPTER), content(FOLDED));
    assert!(found.keys().eq(expected.keys()));
    for (name, numbers) in &expected {
        // Alpha by the rank, in the upper factor.
        let by: f32 = if name.ends_with(".up") { 1.5 } else { 1.0 };
        let scaled: Vec<f32> = numbers.iter().map(|number| by * number).collect();
        assert_eq!(found[name], scaled, "{name}");
    }
    let request = Request {
        adapters: used(1.0),
        ..crate::given::request()
    };
    let of = |name: &str| latent(&with(&folder(), name), &request);
    let apart = distance(&of(FOLDED), &of(ADAPTER));
    println!("folded: latent {apart:.2e}");
    assert!(apart < tolerances().pipeline, "{apart:e}");
}

/// Why an adapter of another family is refused.
fn refusal(name: &str) -> AdapterError {
    match adapted(folder().path(), fixtures().join(name)).expect_err("a refusal") {
        ModelError::Adapter { error, .. } => error,
        other => panic!("{other}"),
    }
}

#[test]
fn an_adapter_of_another_family_is_refused() {
    let z_image = refusal("z-image-lora-tiny/diffusers-peft.safetensors");
    assert!(
        matches!(z_image, AdapterError::OtherFamily { family: "FLUX.2", .. }),
        "{z_image}"
    );
    // Some layers of FLUX.1 have the names of FLUX.2's.
    let flux = refusal("flux-lora-tiny/diffusers-peft.safetensors");
    assert!(
        matches!(flux, AdapterError::Unknown { family: "FLUX.2", .. }),
        "{flux}"
    );
}

#[test]
fn a_control_net_is_refused_as_a_control_net() {
    let refused = refusal("flux-controlnet-tiny/single");
    assert!(
        matches!(refused, AdapterError::ControlNetNotTaken { family: "FLUX.2" }),
        "{refused}"
    );
}

#[test]
fn an_adapter_strength_curve_is_applied_in_each_step() {
    let opened = with(&base_folder(), ADAPTER);
    for negative in [None, Some("a blue square")] {
        let latent = |points: Vec<(f32, f32)>| {
            let request = Request {
                prompt: "a red circle".to_owned(),
                negative_prompt: negative.map(str::to_owned),
                true_guidance: 2.0,
                adapters: vec![AdapterUse {
                    strength: StrengthCurve::of(points).expect("a curve"),
                    ..used(1.0).remove(0)
                }],
                ..Request::of(Medium::Image(Image::of(48, 32)), 3, 0.0, 64)
            };
            latent(&opened, &request)
        };
        let constant = latent(vec![(0.0, 0.5)]);
        // Computed step by step, and the same.
        let nearly = latent(vec![(0.0, 0.5), (1.0, 0.500_001)]);
        assert!(distance(&nearly, &constant) < tolerances().pipeline);
        let ramp = latent(vec![(0.0, 1.0), (1.0, 0.0)]);
        assert!(distance(&ramp, &constant) > 100.0 * tolerances().pipeline);
    }
}
