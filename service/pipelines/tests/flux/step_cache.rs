//! Passes that are left out, beside diffusers' first-block cache.

use candle_core::Tensor;
use pipelines::flux::FluxModel;
use pipelines::{Image, Medium, Model, PassesLeftOut, Request, Unobserved};

use crate::device::tolerances;
use crate::given::{folder, open};
use crate::numbers::{distance, json, tensors};
use crate::open_model::{CountsPasses, OpenModel, StepCacheCase, on_cpu};

fn request_of(case: &StepCacheCase) -> Request {
    let image = Medium::Image(Image::of(case.width, case.height));
    case.of(Request {
        seed: case.seed,
        ..Request::of(image, case.steps, 3.5, 48)
    })
}

fn latent(opened: &OpenModel<FluxModel>, request: &Request) -> (Tensor, Option<PassesLeftOut>) {
    let mut counted = CountsPasses::default();
    let latent = opened.latent(request, &mut counted).expect("a latent");
    (on_cpu(&latent), counted.0)
}

#[test]
fn the_passes_that_the_reference_leaves_out_are_left_out() {
    let expected = tensors("flux-tiny/expected/step_cache.safetensors");
    let cases: Vec<StepCacheCase> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    for case in &cases {
        let (found, passes) = latent(&opened, &request_of(case));
        let apart = distance(&found, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}, {passes:?}", case.name);
        assert_eq!(passes, Some(case.left_out()), "{}", case.name);
        assert!(apart < tolerances().pipeline, "{}: {apart:e}", case.name);
    }
}

#[test]
fn without_the_field_every_pass_is_computed_and_with_it_what_is_left_out_is_told() {
    let cases: Vec<StepCacheCase> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    let cached = request_of(&cases[0]);
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
    let cases: Vec<StepCacheCase> = json("flux-tiny/expected/step_cache.json");
    let dev = folder("dev");
    let opened = open(dev.path());
    let request = request_of(&cases[1]);
    let (first, passes) = latent(&opened, &request);
    opened
        .latent(&request_of(&cases[2]), &mut Unobserved)
        .expect("a latent");
    let (second, again) = latent(&opened, &request);
    assert_eq!((distance(&first, &second), again), (0.0, passes));
}
