//! Passes that are left out, beside diffusers' first-block cache.

use pipelines::{Medium, PassesLeftOut, Request};
use serde::Deserialize;

use crate::given::{film_folder, open, request};
use crate::numbers::{distance, json, tensors};
use crate::open_model::{CountsPasses, F32, on_cpu};

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

#[test]
fn the_passes_that_the_reference_leaves_out_are_left_out() {
    let expected = tensors("hunyuan-tiny/expected/step_cache.safetensors");
    let cases: Vec<Case> = json("hunyuan-tiny/expected/step_cache.json");
    let folder = film_folder();
    let opened = open(folder.path(), &F32);
    for case in cases {
        let mut asked = Request {
            prompt: case.prompt,
            step_cache: case.step_cache,
            ..request(9, None, case.steps, case.seed)
        };
        if let Medium::Video(video) = &mut asked.medium {
            (video.width, video.height) = (case.width, case.height);
        }
        if case.negative_prompt.is_some() {
            (asked.negative_prompt, asked.true_guidance) = (case.negative_prompt, case.true_guidance);
        }
        let mut counted = CountsPasses::default();
        let latent = opened.latent(&asked, &mut counted).expect("a latent");
        let apart = distance(&on_cpu(&latent), &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}, {:?}", case.name, counted.0);
        let all = PassesLeftOut {
            left_out: case.passes - case.computed,
            of: case.passes,
        };
        assert_eq!(counted.0, Some(all), "{}", case.name);
        assert!(apart < 1e-4, "{}: {apart:e}", case.name);
    }
}
