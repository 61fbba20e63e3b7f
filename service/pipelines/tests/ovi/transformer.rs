//! Passes and whole samplings.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Tensor};
use pipelines::StageError;
use pipelines::ovi::{FusionTransformer, Guidance, Progress, PromptStates, Start, sample};
use pipelines::unipc::{Grid, Schedule};

use crate::device::{BF16_COMPONENT, here, test_device};
use crate::given::{Given, Tensors, tokens_of};
use crate::numbers::{distance, json, numbers, resident, tensors};

/// Most that a component, and a whole sampling, differ from the reference (relative, L2).
const COMPONENT: f64 = 1e-5;
const SAMPLED: f64 = 1e-4;
/// Least that a changed tensor changes: the bias of a key, which is normalized after it, changes little.
const MUTATION: f64 = 5.0 * COMPONENT;

fn expected() -> Tensors {
    tensors("ovi-tiny/expected.safetensors")
}

/// The velocities of a pass, of the sampled tokens.
fn velocities(
    given: &Given,
    weights: &Tensors,
    (from_picture, skipped): (bool, Option<usize>),
    dtype: DType,
) -> [Tensor; 2] {
    let narrow = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
    let weights = weights
        .iter()
        .map(|(name, tensor)| (name.clone(), narrow(tensor)));
    let transformer = FusionTransformer::new(&given.config, &resident(&weights.collect())).expect("a model");
    let on = (dtype, test_device());
    let times = transformer.times(&[given.time], on).expect("times");
    let mut go_on = || Ok(());
    let (prompt, other) = (narrow(&given.text(0)), narrow(&given.text(1)));
    let texts = transformer.texts([&prompt, &other], &mut go_on).expect("texts");
    let tokens = narrow(&here(&tokens_of(&given.film())));
    let of_frame = tokens.dim(1).unwrap() / given.size[0];
    let first = if from_picture { of_frame } else { 0 };
    let picture = tokens.narrow(1, 0, of_frame).unwrap().contiguous().unwrap();
    let film = tokens.narrow(1, first, tokens.dim(1).unwrap() - first).unwrap();
    let film = film.contiguous().unwrap();
    let sound = narrow(&here(&given.sound())).unsqueeze(0).unwrap();
    let buffers = transformer
        .step_buffers(&given.tokens(from_picture), from_picture.then_some(&picture), on)
        .expect("buffers");
    let velocity = transformer.velocity(
        [&film, &sound],
        (&times, 0),
        &texts,
        skipped,
        &buffers,
        &mut go_on,
    );
    velocity
        .expect("velocities")
        .map(|velocity| velocity.copy().unwrap())
}

/// The expected velocities of a pass, of the sampled tokens.
fn expected_velocities(given: &Given, name: &str, from_picture: bool) -> [Tensor; 2] {
    let mut expected = expected();
    let film = expected.remove(&format!("{name}.video")).expect("a film");
    let first = usize::from(from_picture);
    let film = film
        .narrow(1, first, given.size[0] - first)
        .unwrap()
        .contiguous()
        .unwrap();
    let sound = expected.remove(&format!("{name}.audio")).expect("a sound");
    [tokens_of(&film), sound.unsqueeze(0).unwrap()]
}

fn worst(found: &[Tensor; 2], expected: &[Tensor; 2]) -> f64 {
    let errors = found
        .iter()
        .zip(expected)
        .map(|(found, expected)| distance(found, expected));
    errors.fold(0.0, f64::max)
}

/// Passes: from text, from a picture, and without a block.
fn passes(given: &Given) -> [(&'static str, (bool, Option<usize>)); 3] {
    [
        ("text", (false, None)),
        ("picture", (true, None)),
        ("skipped", (false, Some(given.skipped))),
    ]
}

#[test]
fn passes_are_those_of_the_authors() {
    let given = Given::read();
    let weights = given.weights();
    for (name, pass) in passes(&given) {
        let found = velocities(&given, &weights, pass, DType::F32);
        let error = worst(&found, &expected_velocities(&given, name, pass.0));
        println!("{name}: {error:.2e}");
        assert!(error < COMPONENT, "{name}: {error:e}");
    }
}

#[test]
fn bf16_equals_f32_within_rounding() {
    let given = Given::read();
    let found = velocities(&given, &given.weights(), (true, None), DType::BF16);
    let error = worst(&found, &expected_velocities(&given, "picture", true));
    println!("bf16: {error:.2e}");
    assert!(error < BF16_COMPONENT, "{error:e}");
}

#[test]
fn every_mutation_of_the_weights_is_seen() {
    let given = Given::read();
    let weights = given.weights();
    let expected = expected_velocities(&given, "picture", true);
    // Keys are normalized after their layer, so a factor of all of its weights would nearly vanish: every other column has one.
    let changed = |tensor: &Tensor| match tensor.dims() {
        [_, columns, rest @ ..] if *columns > 1 => {
            let factors: Vec<f32> = (0..*columns).map(|i| 1.0 + 0.5 * (i % 2) as f32).collect();
            let shape: Vec<usize> = [1, *columns].into_iter().chain(rest.iter().map(|_| 1)).collect();
            let factors = Tensor::from_vec(factors, shape, tensor.device()).unwrap();
            tensor.broadcast_mul(&factors).unwrap()
        }
        _ => (tensor * 1.5).unwrap(),
    };
    for (name, tensor) in &weights {
        let mut mutated = weights.clone();
        mutated.insert(name.clone(), changed(tensor));
        let found = velocities(&given, &mutated, (true, None), DType::F32);
        let error = worst(&found, &expected);
        assert!(error > MUTATION, "{name}: {error:e}");
    }
}

#[test]
fn tensors_are_those_of_the_authors_classes() {
    let files: HashMap<String, BTreeMap<String, Vec<usize>>> = json("ovi-tiny/shapes.json");
    let found = Given::read().config.authors_tensor_shapes();
    assert_eq!(BTreeMap::from_iter(found), files["Ovi-960x960-5s"]);
}

#[test]
fn the_schedule_is_that_of_the_authors() {
    let expected = expected();
    for steps in [Given::read().steps, 50] {
        let schedule = Schedule::new(Grid::Authors, steps, 5.0);
        let of = |what: &str| numbers(&expected[&format!("steps.{steps}.{what}")]);
        assert_eq!(schedule.times, of("times"));
        let sigmas = of("sigmas");
        assert_eq!(schedule.sigmas.len(), sigmas.len());
        for (found, expected) in schedule.sigmas.iter().zip(sigmas) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }
}

/// Counts steps, and cancels at a number of calls of `go_on`.
struct Counted {
    steps: usize,
    calls: usize,
    most: usize,
}

impl Progress for Counted {
    fn go_on(&mut self) -> Result<(), StageError> {
        self.calls += 1;
        match self.calls > self.most {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        }
    }

    fn step(&mut self, step: usize, _: usize) {
        assert_eq!(step, self.steps + 1);
        self.steps = step;
    }
}

fn sampled(
    given: &Given,
    picture: Option<&Tensor>,
    most: usize,
) -> (Result<[Tensor; 2], StageError>, Counted) {
    let transformer = FusionTransformer::new(&given.config, &resident(&given.weights())).expect("a model");
    let texts = [0, 1, 2].map(|number| given.text(number));
    let guidance = Guidance {
        film: given.guidance["video"],
        sound: given.guidance["audio"],
        skipped: Some(given.skipped),
    };
    let mut progress = Counted {
        steps: 0,
        calls: 0,
        most,
    };
    let result = sample(
        &transformer,
        &Start {
            film: &given.film(),
            sound: &given.sound(),
            picture,
        },
        &PromptStates {
            prompt: &texts[0],
            negative: Some([&texts[1], &texts[2]]),
        },
        (&Schedule::new(Grid::Authors, given.steps, 5.0), &guidance),
        (DType::F32, test_device()),
        &mut progress,
    );
    (result, progress)
}

#[test]
fn samplings_are_those_of_the_authors() {
    let (given, expected) = (Given::read(), expected());
    let picture = given.picture();
    for (name, picture) in [("text", None), ("picture", Some(&picture))] {
        let (found, progress) = sampled(&given, picture, usize::MAX);
        let found = found.expect("latents");
        assert_eq!(progress.steps, given.steps as usize);
        let of = |what: &str| expected[&format!("sampled.{name}.{what}")].clone();
        let error = worst(&found, &[of("video"), of("audio")]);
        println!("sampled from {name}: {error:.2e}");
        assert!(error < SAMPLED, "{name}: {error:e}");
    }
}

#[test]
fn a_cancelled_sampling_ends_before_the_next_block() {
    let given = Given::read();
    let (result, progress) = sampled(&given, None, 17);
    assert!(matches!(result, Err(StageError::Cancelled)));
    // Two passes over the texts' layers, and two over the blocks in each step.
    assert_eq!((progress.calls, progress.steps), (18, 1));
}
