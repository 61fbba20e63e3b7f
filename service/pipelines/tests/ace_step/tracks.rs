//! Parity of whole pipelines: from a prompt, lyrics and tracks to a latent, and to a track.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::{Audio, AudioTask, Medium, Precision, Request, Role, Unobserved, Values};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{edit, folder, new_track, of_source, open, track};
use crate::numbers::{distance, json, numbers, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

/// An entry of `expected/pipelines.json`: the arguments of the pipeline.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    lyrics: String,
    seed: u64,
    #[serde(default)]
    is_base: bool,
    #[serde(default)]
    source: u64,
    #[serde(default)]
    reference: u64,
    audio_duration: Option<f32>,
    num_inference_steps: Option<u32>,
    guidance_scale: Option<f32>,
    audio_cover_strength: Option<f32>,
    shift: Option<f32>,
    task_type: Option<String>,
    repainting_start: Option<f32>,
    repainting_end: Option<f32>,
    track_name: Option<String>,
    complete_track_classes: Option<Vec<String>>,
    bpm: Option<u32>,
    keyscale: Option<String>,
    timesignature: Option<String>,
    vocal_language: Option<String>,
}

impl Case {
    fn task(&self) -> AudioTask {
        let (start_seconds, end_seconds) = (
            self.repainting_start.unwrap_or(0.0),
            self.repainting_end.unwrap_or(0.0),
        );
        let named = || self.track_name.clone().expect("a track");
        match self.task_type.as_deref() {
            None => AudioTask::TextToMusic,
            Some("repaint") => AudioTask::Repaint {
                start_seconds,
                end_seconds,
            },
            Some("cover") => AudioTask::Cover,
            Some("extract") => AudioTask::Extract { track: named() },
            Some("lego") => AudioTask::Lego {
                track: named(),
                start_seconds,
                end_seconds,
            },
            Some("complete") => AudioTask::Complete {
                tracks: self.complete_track_classes.clone().expect("tracks"),
            },
            Some(other) => panic!("{other}"),
        }
    }

    fn request(&self) -> Request {
        let clip = |samples: u64, number| (samples > 0).then(|| track(samples, number));
        let audio = Audio {
            seconds: self.audio_duration.unwrap_or(60.0),
            lyrics: self.lyrics.clone(),
            init_audio: clip(self.source, 0),
            reference: clip(self.reference, 5),
            task: self.task(),
            beats_per_minute: self.bpm,
            key: self.keyscale.clone().unwrap_or_default(),
            time_signature: self.timesignature.clone().unwrap_or_default(),
            language: self.vocal_language.clone().unwrap_or_default(),
            ..Audio::default()
        };
        let guidance = match self.is_base {
            true => self.guidance_scale.unwrap_or(7.0),
            false => 1.0,
        };
        Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            strength: self.audio_cover_strength.unwrap_or(1.0),
            ..Request::of(
                Medium::Audio(audio),
                self.num_inference_steps.unwrap_or(8),
                guidance,
                256,
            )
        }
    }
}

fn cases() -> (Vec<Case>, HashMap<String, Tensor>) {
    (
        json::<Vec<Case>>("ace-tiny/expected/pipelines.json"),
        tensors("ace-tiny/expected/pipelines.safetensors"),
    )
}

/// Opens the model of a case.
fn opened(case: &Case, precision: &Precision) -> OpenModel {
    let folder = folder(case.is_base);
    if let Some(shift) = case.shift {
        let sidecar = folder.path().join("moored.json");
        std::fs::write(&sidecar, "{}").expect("a file");
        edit(&sidecar, "shift", shift.into());
    }
    open(folder.path(), precision)
}

#[test]
fn tracks_equal_the_references() {
    let (cases, expected) = cases();
    for case in &cases {
        let opened = opened(case, &F32);
        let request = case.request();
        let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
        let latent = &values["latent"];
        assert_eq!(latent.shape, opened.stage(&request, "decode").takes[0].shape);
        let of_latent = on_cpu(latent).squeeze(0).expect("a latent");
        let apart = distance(&of_latent, &expected[&format!("{}.latent", case.name)]);
        println!("{}: latent {apart:.2e}", case.name);
        assert!(apart < tolerances().pipeline, "{}: {apart:e}", case.name);
        let Some(samples) = expected.get(&format!("{}.audio", case.name)) else {
            continue;
        };
        let rungs = opened.stage(&request, "decode").rungs.len();
        for rung in 0..rungs {
            let levels = opened.decoded(&request, latent, rung);
            let expected = numbers(samples);
            assert_eq!(levels.len(), expected.len());
            let worst = levels
                .iter()
                .zip(&expected)
                .map(|(level, sample)| (f32::from(*level) - sample.clamp(-1.0, 1.0) * 32767.0).abs());
            let worst = worst.fold(0.0, f32::max);
            println!("{}: samples within {worst} of 32767", case.name);
            assert!(worst < 4.0, "{}, rung {rung}: {worst}", case.name);
            let heard = expected.iter().any(|sample| sample.abs() > 0.05);
            assert!(heard, "a fixture that is silent shows nothing");
        }
    }
}

#[test]
fn bf16_makes_every_track() {
    for case in &cases().0 {
        let opened = opened(case, &Precision::full(DType::BF16));
        let request = case.request();
        let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
        let levels = opened.decoded(&request, &values["latent"], 0);
        assert!(
            levels.iter().any(|level| level.abs() > 1000),
            "{} is silent",
            case.name
        );
    }
}

#[test]
fn strength_sets_how_many_steps_run_from_a_supplied_latent() {
    let folder = folder(false);
    let opened = open(folder.path(), &F32);
    let source = of_source(AudioTask::TextToMusic);
    let brought = opened.sampled(&source, &mut Unobserved).expect("a latent");
    let latent = brought["latent"].clone();
    let sampled = |strength: f32| {
        let request = Request {
            strength,
            steps: 4,
            from_values: true,
            ..new_track()
        };
        let mut values = Values::from([("latent".to_owned(), latent.clone())]);
        let plans = opened.model.plan(&request).expect("a valid request");
        let steps = plans
            .iter()
            .find(|plan| plan.name == "denoise")
            .expect("a stage")
            .steps;
        for plan in plans.iter().filter(|plan| plan.role != Role::Decode) {
            let given = opened.run(plan, 0, &request, &values, &mut Unobserved);
            values.extend(given.expect("values"));
        }
        (steps, on_cpu(&values["latent"]))
    };
    let ((few, near), (all, far)) = (sampled(0.25), sampled(1.0));
    assert_eq!((few, all), (1, 4));
    assert!(distance(&near, &far) > 1e-3);
    // At full strength the result does not depend on the start.
    let anew = Request {
        steps: 4,
        ..new_track()
    };
    let anew = opened.sampled(&anew, &mut Unobserved).expect("a latent");
    assert!(distance(&far, &on_cpu(&anew["latent"])) < 1e-5);
}
