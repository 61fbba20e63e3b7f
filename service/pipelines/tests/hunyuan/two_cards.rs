//! A sampling whose tokens two devices share equals that of one.

use std::path::Path;

use candle_core::DType;
use pipelines::{HostTensor, Precision, Request, StageError, StagePlan, Unobserved, Values};
use tempfile::TempDir;

use crate::given::{film_folder, open, request, section_folder, start};
use crate::numbers::distance;
use crate::open_model::{F32, on_cpu};
use crate::shapes_asked::words;
use crate::two_devices::{Ran, Together, together};

/// Runs a sampling on two devices, the second of which is cancelled after this step.
fn shared(
    (folder, precision): (&Path, &Precision),
    (plan, request, values): (&StagePlan, &Request, &Values),
    until: u32,
) -> [Ran; 2] {
    together(until, |part, observer| {
        let opened = open(folder, precision);
        opened.run_part(Some(part), (plan, 0), request, values, observer)
    })
}

/// The first sampling of a request, with the values that it takes.
fn to_sample(folder: &Path, precision: &Precision, request: &Request) -> (StagePlan, Values) {
    let opened = open(folder, precision);
    let mut values = Values::new();
    for plan in opened.stages(request) {
        if plan.name == "denoise" {
            return (plan, values);
        }
        values.extend(
            opened
                .run(&plan, 0, request, &values, &mut Unobserved)
                .expect("a stage"),
        );
    }
    panic!("nothing is sampled");
}

fn only(values: &Values) -> &HostTensor {
    values.values().next().expect("a latent")
}

/// A film in one piece, one in sections, and one whose halves differ by a token.
fn films() -> [(TempDir, Request); 3] {
    let odd = Request {
        medium: pipelines::Medium::Video(pipelines::Video {
            width: 48,
            height: 48,
            ..request(9, None, 1, 1).video().expect("a film").clone()
        }),
        ..request(9, None, 3, 5)
    };
    [
        (film_folder(), request(9, None, 3, 7)),
        (section_folder(false), request(37, Some(start()), 3, 7)),
        (film_folder(), odd),
    ]
}

fn on_two(request: &Request) -> Request {
    Request {
        cards: 2,
        ..request.clone()
    }
}

#[test]
fn two_devices_sample_what_one_does() {
    for (folder, alone) in films() {
        let guided = Request {
            prompt: "a cat".to_owned(),
            negative_prompt: Some("a large green circle on the left of a small red square".to_owned()),
            true_guidance: 3.0,
            ..alone.clone()
        };
        for alone in [alone.clone(), guided] {
            let (plan, values) = to_sample(folder.path(), &F32, &alone);
            let opened = open(folder.path(), &F32);
            let expected = opened
                .run(&plan, 0, &alone, &values, &mut Unobserved)
                .expect("a latent");
            let request = on_two(&alone);
            let (plan, values) = to_sample(folder.path(), &F32, &request);
            let planned = words(&opened.model.planned("denoise", &request));
            let mut used = Vec::new();
            for (given, _, shapes) in shared((folder.path(), &F32), (&plan, &request, &values), u32::MAX) {
                let given = given.expect("a latent");
                let apart = distance(&on_cpu(only(&given)), &on_cpu(only(&expected)));
                assert!(apart < 2e-6, "{apart:e}");
                used.extend(shapes);
            }
            used.dedup();
            assert!(
                used.iter().all(|shape| planned.contains(shape)),
                "{used:?}, planned {planned:?}"
            );
            assert!(
                planned.iter().all(|shape| used.contains(shape)),
                "{used:?}, planned {planned:?}"
            );
        }
    }
}

#[test]
fn what_is_shown_is_the_whole_film() {
    let [_, (folder, alone), _] = films(); // its colours are learned from its picture
    let shown = Request {
        preview: true,
        ..alone
    };
    let (plan, values) = to_sample(folder.path(), &F32, &shown);
    let mut observer = Together::alone();
    let opened = open(folder.path(), &F32);
    opened
        .run(&plan, 0, &shown, &values, &mut observer)
        .expect("a latent");
    let request = on_two(&shown);
    let [(_, first, _), (_, second, _)] = shared((folder.path(), &F32), (&plan, &request, &values), u32::MAX);
    assert_eq!(first.len(), 2, "none after the last step");
    assert!(second.is_empty());
    for (one, other) in first.iter().zip(&observer.previews) {
        let most = one
            .iter()
            .zip(other)
            .map(|(one, other)| one.abs_diff(*other))
            .max();
        assert!(most <= Some(1), "{most:?}");
    }
}

#[test]
fn a_device_that_is_cancelled_ends_the_other() {
    let [(folder, alone), ..] = films();
    let request = on_two(&alone);
    let (plan, values) = to_sample(folder.path(), &F32, &request);
    let [(first, ..), (second, ..)] = shared((folder.path(), &F32), (&plan, &request, &values), 1);
    assert!(first.is_err(), "the other one is gone");
    assert!(matches!(second, Err(StageError::Cancelled)), "{second:?}");
}

#[test]
fn half_of_the_tokens_take_less_memory() {
    let [(folder, alone), ..] = films();
    let opened = open(folder.path(), &F32);
    let scratch = |request: &Request| opened.stage(request, "denoise").rungs[0].scratch;
    let (whole, half) = (scratch(&alone), scratch(&on_two(&alone)));
    assert!(half < whole, "{half} of {whole}");
    assert_eq!(opened.model.parts().dtype(), DType::F32);
}

#[test]
fn passes_are_not_left_out_on_two_cards() {
    let [(folder, alone), ..] = films();
    let opened = open(folder.path(), &F32);
    let request = Request {
        step_cache: 0.1,
        ..on_two(&alone)
    };
    let problems = opened.model.plan(&request).expect_err("a refusal");
    assert!(
        problems.iter().any(|problem| problem.field == "cards"),
        "{problems:?}"
    );
}
