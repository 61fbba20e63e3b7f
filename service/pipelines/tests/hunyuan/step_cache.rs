//! Passes that are left out, beside diffusers' first-block cache.

use pipelines::Medium;

use crate::given::{film_folder, open, request};
use crate::numbers::{distance, json, tensors};
use crate::open_model::{CountsPasses, F32, StepCacheCase, on_cpu};

#[test]
fn the_passes_that_the_reference_leaves_out_are_left_out() {
    let expected = tensors("hunyuan-tiny/expected/step_cache.safetensors");
    let cases: Vec<StepCacheCase> = json("hunyuan-tiny/expected/step_cache.json");
    let folder = film_folder();
    let opened = open(folder.path(), &F32);
    for case in cases {
        let mut asked = case.of(request(9, None, case.steps, case.seed));
        if let Medium::Video(video) = &mut asked.medium {
            (video.width, video.height) = (case.width, case.height);
        }
        let mut counted = CountsPasses::default();
        let latent = opened.latent(&asked, &mut counted).expect("a latent");
        let apart = distance(&on_cpu(&latent), &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}, {:?}", case.name, counted.0);
        assert_eq!(counted.0, Some(case.left_out()), "{}", case.name);
        assert!(apart < 1e-4, "{}: {apart:e}", case.name);
    }
}
