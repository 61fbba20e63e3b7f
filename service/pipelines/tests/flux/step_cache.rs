//! Passes that are left out, beside diffusers' first-block cache.

use candle_core::Tensor;
use pipelines::flux::FluxModel;
use pipelines::{Image, Medium, Model, PassesLeftOut, Request, Unobserved};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{folder, open};
use crate::numbers::{distance, json, tensors};
use crate::open_model::{CountsPasses, OpenModel, on_cpu};

/// An entry of `expected/step_cache.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    step_cache: f32,
    steps: u32,
    seed: u64,
    width: u32,
    height: u32,
    prompt: String,
    #[serde(default)]
    negative_prompt: Option<String>,
    #[serde(default)]
    true_guidance: f32,
    passes: u32,
    computed: u32,
}

impl Case {
    fn request(&self) -> Request {
        let image = Medium::Image(Image::of(self.width, self.height));
        let request = Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            step_cache: self.step_cache,
            ..Request::of(image, self.steps, 3.5, 48)
        };
        match &self.negative_prompt {
            None => request,
            Some(negative) => Request {
                negative_prompt: Some(negative.clone()),
                true_guidance: self.true_guidance,
                ..request
            },
        }
    }
}

fn latent(opened: &OpenModel<FluxModel>, request: &Request) -> (Tensor, Option<PassesLeftOut>) {
    let mut counted = CountsPasses::default();
    let latent = opened.latent(request, &mut counted).expect("a latent");
    (on_cpu(&latent), counted.0)
}

#[test]
fn the_passes_that_the_reference_leaves_out_are_left_out() {
    let expected = tensors("flux-tiny/expected/step_cache.safetensors");
    let cases: Vec<Case> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    for case in &cases {
        let (found, passes) = latent(&opened, &case.request());
        let apart = distance(&found, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}, {passes:?}", case.name);
        let all = PassesLeftOut {
            left_out: case.passes - case.computed,
            of: case.passes,
        };
        assert_eq!(passes, Some(all), "{}", case.name);
        assert!(apart < tolerances().pipeline, "{}: {apart:e}", case.name);
    }
}

#[test]
fn without_the_field_every_pass_is_computed_and_with_it_what_is_left_out_is_told() {
    let cases: Vec<Case> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    let cached = cases[0].request();
    let whole = Request {
        step_cache: 0.0,
        ..cached.clone()
    };
    let (of_all, passes) = latent(&opened, &whole);
    assert_eq!(passes, None);
    assert!(distance(&latent(&opened, &cached).0, &of_all) > 1e-3);
    // A change that no pass is below leaves none out, and changes no bit.
    let none = Request {
        step_cache: 1e-9,
        ..cached.clone()
    };
    let (of_none, passes) = latent(&opened, &none);
    assert_eq!(passes.map(|passes| passes.left_out), Some(0));
    assert_eq!(distance(&of_none, &of_all), 0.0);

    let denoise = |request: &Request| opened.stage(request, "denoise");
    assert!(denoise(&cached).rungs[0].scratch > denoise(&whole).rungs[0].scratch);
    assert_ne!(denoise(&cached).shape, denoise(&whole).shape);
    for wrong in [-0.1, 1.5, f32::NAN] {
        let asked = Request {
            step_cache: wrong,
            ..cached.clone()
        };
        let problems = opened.model.plan(&asked).expect_err("a change out of bounds");
        assert_eq!(problems[0].field, "step_cache");
    }
}

/// A second request begins without what the first one kept.
#[test]
fn nothing_is_kept_between_requests() {
    let cases: Vec<Case> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    let request = cases[1].request();
    let (first, passes) = latent(&opened, &request);
    opened
        .latent(&cases[2].request(), &mut Unobserved)
        .expect("a latent");
    let (second, again) = latent(&opened, &request);
    assert_eq!((distance(&first, &second), again), (0.0, passes));
}
