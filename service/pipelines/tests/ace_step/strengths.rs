//! Strengths of parts of a track, against a loop over the same steps that is written out here.

use candle_core::{Device, Tensor};
use pipelines::ace_step::sigmas;
use pipelines::noise::Generator;
use pipelines::{AudioTask, HostTensor, Medium, Request, Role, StrengthPoint, Unobserved, Values};

use crate::given::{edit, folder, of_source, open};
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};

/// Frames of a second of the fixture.
const PER_SECOND: f64 = 25.0;
const STEPS: u32 = 5;
const SHIFT: f32 = 2.0;

fn request(strength: f32, points: &[(f32, f32)]) -> Request {
    let mut request = Request {
        strength,
        steps: STEPS,
        ..of_source(AudioTask::TextToMusic)
    };
    if let Medium::Audio(audio) = &mut request.medium {
        let points = points.iter();
        audio.strengths = points
            .map(|&(seconds, strength)| StrengthPoint { seconds, strength })
            .collect();
    }
    request
}

fn opened() -> (tempfile::TempDir, OpenModel) {
    let folder = folder(false);
    let sidecar = folder.path().join("moored.json");
    std::fs::write(&sidecar, "{}").expect("a file");
    edit(&sidecar, "shift", SHIFT.into());
    let opened = open(folder.path(), &F32);
    (folder, opened)
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor
        .flatten_all()
        .and_then(|flat| flat.to_vec1())
        .expect("numbers")
}

/// Source and noise of a request, `[frames, channels]` each, as they are drawn.
fn source_and_noise(values: &Values, seed: u64) -> (Vec<f32>, Vec<f32>, usize) {
    let moments = on_cpu(&values["source"]);
    let (_, frames, channels) = moments.dims3().expect("moments");
    let mut generator = Generator::new(seed);
    let drawn = Tensor::from_vec(
        generator.normal(frames * channels),
        (channels, frames),
        &Device::Cpu,
    );
    let drawn = drawn.and_then(|drawn| drawn.t()?.contiguous()).expect("numbers");
    let of = |row: usize| numbers(&moments.get(row).expect("moments"));
    let parts = of(0).into_iter().zip(of(1)).zip(numbers(&drawn));
    let source = parts
        .map(|((mean, deviation), drawn)| mean + deviation * drawn)
        .collect();
    (source, generator.normal(frames * channels), channels)
}

#[test]
fn each_frame_starts_at_the_step_of_its_strength() {
    let (_folder, opened) = opened();
    // From 0 over a quarter of a second of silence to 0.9, and down to a half.
    let points = [(0.2, 0.0), (0.6, 0.9), (0.6, 0.3), (0.9, 0.5)];
    let asked = request(1.0, &points);
    let found = opened.sampled(&asked, &mut Unobserved).expect("a latent");
    assert_eq!(opened.stage(&asked, "denoise").steps, STEPS);

    // The request of the largest strength, step by step; frames that have not begun are put back between them.
    let stepped = Request {
        slots: STEPS,
        ..request(0.9, &[])
    };
    let strength_at = |seconds: f64| -> f64 {
        let line = |(from, low): (f64, f64), (to, high): (f64, f64)| {
            low + (high - low) * (seconds - from) / (to - from)
        };
        match seconds {
            s if s < 0.2 => 0.0,
            s if s < 0.6 => line((0.2, 0.0), (0.6, 0.9)),
            s if s < 0.9 => line((0.6, 0.3), (0.9, 0.5)),
            _ => 0.5,
        }
    };
    let sigmas = sigmas(STEPS, SHIFT);
    let mut values = Values::new();
    let mut step = 0;
    for plan in opened.model.plan(&stepped).expect("a valid request") {
        if plan.role == Role::Decode {
            break;
        }
        let given = opened.run(&plan, 0, &stepped, &values, &mut Unobserved);
        values.extend(given.expect("values"));
        if plan.role != Role::Sample {
            continue;
        }
        step += 1;
        let (source, noise, channels) = source_and_noise(&values, stepped.seed);
        let state: &mut HostTensor = values.get_mut(&plan.gives[0]).expect("a state");
        let mut latent = numbers(&on_cpu(state));
        let sigma = sigmas[step as usize];
        for (at, number) in latent.iter_mut().enumerate() {
            let strength = strength_at((at / channels) as f64 / PER_SECOND);
            let begins = STEPS - (f64::from(STEPS) * (strength * 1e6).round() / 1e6).ceil() as u32;
            if begins >= step {
                *number = noise[at] * sigma + source[at] * (1.0 - sigma);
            }
        }
        state.data = latent.iter().flat_map(|number| number.to_le_bytes()).collect();
    }
    let (found, expected) = (on_cpu(&found["latent"]), on_cpu(&values["latent"]));
    let apart = distance(&found, &expected);
    println!("strengths: {apart:.2e}");
    assert!(apart < 1e-6, "{apart:e}");
    let (source, _, channels) = source_and_noise(&values, stepped.seed);
    let kept = 4 * channels;
    assert_eq!(
        numbers(&found)[..kept],
        source[..kept],
        "a strength of 0 is the source itself"
    );
    assert!(
        numbers(&found)[15 * channels..]
            .iter()
            .zip(&source[15 * channels..])
            .all(|(a, b)| a != b)
    );
}

#[test]
fn a_constant_strength_curve_equals_the_strength_of_the_request() {
    let (_folder, opened) = opened();
    for strength in [0.3, 0.6, 1.0] {
        let latent = |request: &Request| {
            let values = opened.sampled(request, &mut Unobserved).expect("a latent");
            values["latent"].clone()
        };
        let everywhere = request(1.0, &[(0.5, strength)]);
        assert_eq!(latent(&everywhere), latent(&request(strength, &[])), "{strength}");
        let steps = |request: &Request| opened.stage(request, "denoise").steps;
        assert_eq!(steps(&everywhere), steps(&request(strength, &[])));
    }
}
