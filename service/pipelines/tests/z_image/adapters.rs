//! Adapters: the same pictures as diffusers, and one adapter in every spelling.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pipelines::z_image::ZImageModel;
use pipelines::{
    AdapterError, AdapterFile, AdapterUse, Image, Medium, ModelError, Request, StrengthCurve, Unobserved,
};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::folder;
use crate::numbers::{distance, fixtures, json, largest_difference, numbers, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

/// The largest difference of a picture that is allowed on a CPU, from 0 to 1.
const PICTURE: f64 = 1e-4;

fn adapted(base: &Path, path: PathBuf) -> Result<ZImageModel, ModelError> {
    let model = ZImageModel::open(base, &F32)
        .expect("a sound model")
        .expect("Z-Image");
    model.adapted(&[AdapterFile {
        name: "one".to_owned(),
        kind: pipelines::Families::kind_of_folder(&pipelines::families(), &path)
            .unwrap_or(pipelines::AdapterKind::Lora),
        path,
        ignores_unknown: false,
    }])
}

fn with(name: &str) -> OpenModel {
    let path = fixtures().join("z-image-lora-tiny").join(name);
    let base = folder(); // until its components are loaded
    OpenModel::of(Arc::new(adapted(base.path(), path).expect("an adapter")))
}

fn used(strength: f32) -> Vec<AdapterUse> {
    vec![AdapterUse {
        name: "one".to_owned(),
        strength: StrengthCurve::constant(strength).expect("a strength"),
        text_strength: strength,
    }]
}

/// An entry of `z-image-lora-tiny/expected.json`.
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

#[test]
fn pictures_with_adapters_equal_the_references() {
    let expected = tensors("z-image-lora-tiny/expected.safetensors");
    for case in json::<Vec<Case>>("z-image-lora-tiny/expected.json") {
        let name = case
            .adapters
            .first()
            .map_or("diffusers-peft.safetensors", String::as_str);
        let opened = with(name);
        let request = case.request();
        let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = opened.picture(&latent);
        let largest = f64::from(largest_difference(
            &picture,
            &expected[&format!("{}.picture", case.name)],
        ));
        println!("{}: latent {apart:.2e}, picture {largest:.2e}", case.name);
        let tolerance = tolerances().pipeline;
        assert!(apart < tolerance, "{}: {apart:e}", case.name);
        assert!(largest < tolerance.max(PICTURE), "{}: {largest:e}", case.name);
    }
}

#[test]
fn one_adapter_in_every_spelling_is_the_same_tensors() {
    let content = |name: &str| -> BTreeMap<String, Vec<f32>> {
        let opened = with(name);
        let tensors = opened.tensors("adapter:one:transformer");
        let names = tensors.names().map(str::to_owned);
        names
            .map(|name| (name.clone(), numbers(&tensors.get(&name).expect("a tensor"))))
            .collect()
    };
    let expected = content("diffusers-peft.safetensors");
    for name in ["kohya", "kohya-fused", "comfy", "comfy-fused", "comfy-fused-down"] {
        assert_eq!(content(&format!("{name}.safetensors")), expected, "{name}");
    }
}

#[test]
fn an_adapter_of_flux_is_refused() {
    let path = fixtures().join("flux-lora-tiny/diffusers-peft.safetensors");
    match adapted(folder().path(), path).unwrap_err() {
        ModelError::Adapter { error, .. } => {
            assert!(matches!(error, AdapterError::OtherFamily { .. }), "{error}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_control_net_is_refused_as_a_control_net() {
    let net = fixtures().join("flux-controlnet-tiny/single");
    let refused = adapted(folder().path(), net).unwrap_err();
    assert!(matches!(
        refused,
        ModelError::Adapter {
            error: AdapterError::ControlNetNotTaken { family: "Z-Image" },
            ..
        }
    ));
}

#[test]
fn an_adapter_strength_curve_is_applied_in_each_step() {
    let opened = with("diffusers-peft.safetensors");
    for negative in [None, Some("a blue square")] {
        let request = |points: Vec<(f32, f32)>| Request {
            prompt: "a red circle".to_owned(),
            negative_prompt: negative.map(str::to_owned),
            true_guidance: 2.0,
            adapters: vec![AdapterUse {
                strength: StrengthCurve::of(points).expect("a curve"),
                ..used(1.0).remove(0)
            }],
            ..Request::of(Medium::Image(Image::of(48, 32)), 3, 0.0, 64)
        };
        let latent = |points: Vec<(f32, f32)>| {
            on_cpu(
                &opened
                    .latent(&request(points), &mut Unobserved)
                    .expect("a latent"),
            )
        };
        let constant = latent(vec![(0.0, 0.5)]);
        // Computed step by step, and the same.
        let nearly = latent(vec![(0.0, 0.5), (1.0, 0.500_001)]);
        assert!(distance(&nearly, &constant) < tolerances().pipeline);
        let ramp = latent(vec![(0.0, 1.0), (1.0, 0.0)]);
        assert!(distance(&ramp, &constant) > 100.0 * tolerances().pipeline);
    }
}
