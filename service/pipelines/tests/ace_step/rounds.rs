//! Sampling in rounds, and rounds of several requests in shared passes, against the same requests alone.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;
use gpu::ComponentTensors;
use pipelines::{
    Audio, AudioTask, HostTensor, Kept, Medium, Observer, Piece, Precision, Request, Role, SharedPass,
    StageError, StagePlan, StageRun, StrengthCurve, StrengthPoint, Unobserved, Values,
};

use crate::device::{BF16_COMPONENT, test_device, tolerances};
use crate::given::{Lora, RATE, folder, new_track, of_source, open, open_with, request, track, uses};
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};

/// Steps that were reported, by the number of their stage; 0 of one that is alone.
#[derive(Default)]
struct Steps {
    made: Vec<(usize, u32, u32)>,
    /// Slots to cancel, each after a number of steps.
    cancelled: Vec<(usize, usize)>,
}

impl Observer for Steps {
    fn step(&mut self, n: u32, of: u32) {
        self.made.push((0, n, of));
    }
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn step_of(&mut self, stage: usize, n: u32, of: u32) {
        self.made.push((stage, n, of));
    }
    fn is_cancelled(&self, stage: usize) -> bool {
        let made = self.made.iter().filter(|(of, _, _)| *of == stage).count();
        self.cancelled
            .iter()
            .any(|(cancelled, behind)| *cancelled == stage && made >= *behind)
    }
}

/// Runs the stages up to the decode, or up to a round; returns all values.
fn sampled(opened: &OpenModel, request: &Request, rounds: usize, steps: &mut Steps) -> Values {
    let mut values = Values::new();
    let mut left = rounds;
    for plan in opened.model.plan(request).expect("a valid request") {
        if plan.role == Role::Decode || plan.role == Role::Sample && left == 0 {
            break;
        }
        left -= usize::from(plan.role == Role::Sample);
        let given = opened.run(&plan, 0, request, &values, steps);
        values.extend(given.expect("values"));
    }
    values
}

fn audio(request: &mut Request) -> &mut Audio {
    match &mut request.medium {
        Medium::Audio(audio) => audio,
        other => panic!("{}", other.name()),
    }
}

/// A new track that begins at a source.
fn of_strength(strength: f32) -> Request {
    Request {
        strength,
        ..of_source(AudioTask::TextToMusic)
    }
}

/// A new track that begins at a source, with strengths at seconds.
fn of_strengths(points: &[(f32, f32)]) -> Request {
    let mut request = of_source(AudioTask::TextToMusic);
    let points = points.iter();
    audio(&mut request).strengths = points
        .map(|&(seconds, strength)| StrengthPoint { seconds, strength })
        .collect();
    request
}

/// Requests of every kind that a base model takes, all of one length.
fn kinds() -> Vec<(&'static str, Request)> {
    let mut sung = new_track();
    (sung.prompt, sung.guidance) = (
        "fast and loud, with a choir and a great many drums".to_owned(),
        7.0,
    );
    audio(&mut sung).lyrics = "la la la\nlo lo".to_owned();
    audio(&mut sung).reference = Some(track(u64::from(RATE), 5));
    let repaint = AudioTask::Repaint {
        start_seconds: 0.25,
        end_seconds: 0.75,
    };
    let cover = Request {
        strength: 0.5,
        guidance: 3.0,
        ..of_source(AudioTask::Cover)
    };
    let kinds = [
        ("new", new_track()),
        ("sung", sung),
        ("repaint", of_source(repaint)),
        ("cover", cover),
        ("from a source", of_strength(0.7)),
        ("strengths", of_strengths(&[(0.0, 0.0), (1.0, 0.9)])),
    ];
    let seeded = kinds.into_iter().zip(1..);
    seeded
        .map(|((name, request), seed)| (name, Request { seed, ..request }))
        .collect()
}

#[test]
fn rounds_give_the_bits_of_the_whole() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    for (name, request) in kinds() {
        for steps in [1, 5] {
            let with = |slots: u32| Request {
                slots,
                steps,
                ..request.clone()
            };
            let mut told = Steps::default();
            if opened.model.plan(&with(1)).is_err() {
                assert_eq!(steps, 1, "a strength that leaves no step");
                continue;
            }
            let whole = sampled(&opened, &with(1), usize::MAX, &mut told);
            let plain = opened.stage(&with(1), "denoise");
            assert!(plain.shared.is_none() && plain.gives == ["latent"]);
            for slots in [2, 3, 16] {
                let plans = opened.model.plan(&with(slots)).expect("a valid request");
                let rounds: Vec<&StagePlan> = plans.iter().filter(|plan| plan.name == "denoise").collect();
                assert_eq!(rounds.len(), plain.steps.min(slots) as usize, "{name}");
                assert_eq!(rounds.iter().map(|plan| plan.steps).sum::<u32>(), plain.steps);
                let mut told_in_rounds = Steps::default();
                let values = sampled(&opened, &with(slots), usize::MAX, &mut told_in_rounds);
                assert_eq!(values["latent"], whole["latent"], "{name}, {steps}, {slots}");
                assert_eq!(told_in_rounds.made, told.made);
            }
        }
    }
}

#[test]
fn only_stages_that_encode_tracks_read_their_data() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    for (name, request) in kinds() {
        for plan in opened.model.plan(&request).expect("a valid request") {
            let encodes = ["encode_source", "encode_reference"].contains(&plan.name.as_str());
            assert_eq!(plan.reads_media, encodes, "{name}: {}", plan.name);
            let without = request.without_media_data();
            let planned = |request: &Request| opened.model.planned(&plan.name, request);
            assert_eq!(planned(&without), planned(&request), "{name}: {}", plan.name);
        }
    }
}

/// A request in a round, with the values of the stages before.
type Slot = (StagePlan, Request, Values);

fn slot(opened: &OpenModel, request: &Request, round: usize) -> Slot {
    let values = sampled(opened, request, round, &mut Steps::default());
    let plans = opened.model.plan(request).expect("a valid request");
    let mut rounds = plans.into_iter().filter(|plan| plan.role == Role::Sample);
    let plan = rounds.nth(round).expect("a round");
    (plan, request.without_media_data(), values)
}

fn shared(
    opened: &OpenModel,
    slots: &[Slot],
    observer: &mut dyn Observer,
) -> Result<Vec<Result<Values, StageError>>, StageError> {
    let tensors = |name: &str| Ok(opened.tensors(name));
    shared_after((opened, &tensors), slots, &mut Kept::default(), observer)
}

/// Gives the tensors of a component.
type Tensors<'a> = &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>;

/// [`shared`], with what passes before it have kept.
fn shared_after(
    (opened, tensors): (&OpenModel, Tensors<'_>),
    slots: &[Slot],
    kept: &mut Kept,
    observer: &mut dyn Observer,
) -> Result<Vec<Result<Values, StageError>>, StageError> {
    let stages: Vec<StageRun<'_>> = slots
        .iter()
        .map(|(plan, request, values)| StageRun {
            plan,
            rung: 0,
            request,
            values,
            tensors,
            device: test_device(),
            part: None,
        })
        .collect();
    opened.model.run_shared(&stages, kept, observer)
}

/// Slots of every kind in separate rounds, with other numbers of steps.
fn slots(opened: &OpenModel) -> Vec<Slot> {
    let kinds = kinds()
        .into_iter()
        .zip([(8, 0), (8, 3), (6, 2), (11, 1), (9, 2), (8, 1)]);
    kinds
        .map(|((_, request), (steps, round))| {
            let request = Request {
                steps,
                slots: 6,
                ..request
            };
            slot(opened, &request, round)
        })
        .collect()
}

/// Largest distance of a value that was computed in a shared pass. Differences of velocities, which are near each other,
/// have fewer digits.
fn rounding(name: &str) -> f64 {
    let of_values = match test_device().is_cpu() {
        true => 1e-6,
        false => tolerances().component,
    };
    match name.starts_with("guidance") {
        true => 10.0 * of_values,
        false => of_values,
    }
}

fn apart(found: &HostTensor, expected: &HostTensor) -> f64 {
    assert_eq!(found.shape, expected.shape);
    distance(&on_cpu(found), &on_cpu(expected))
}

#[test]
fn a_shared_pass_gives_the_same_values_as_separate_runs() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    let all = slots(&opened);
    let key = |slot: &Slot| slot.0.shared.clone().expect("it shares passes").key;
    assert!(all.iter().all(|slot| key(slot) == key(&all[0])));
    // Requests with one condition attend to it together, also where another's place is between theirs.
    for chosen in [&[0, 1][..], &[1, 3], &[0, 3, 0, 0], &[5, 4, 3, 2, 1, 0]] {
        let slots: Vec<Slot> = chosen.iter().map(|&kind| all[kind].clone()).collect();
        let mut told = Steps::default();
        let given = shared(&opened, &slots, &mut told).expect("values");
        for (number, ((plan, request, values), given)) in slots.iter().zip(given).enumerate() {
            let given = given.expect("values");
            let mut told_alone = Steps::default();
            let alone = opened
                .run(plan, 0, request, values, &mut told_alone)
                .expect("values");
            assert!(given.keys().eq(alone.keys()) && given.keys().eq(&plan.gives));
            for (name, value) in &given {
                let apart = apart(value, &alone[name]);
                let is_equal = value == &alone[name];
                println!("{chosen:?}, {number}, {name}: {apart:.2e}, equal bits: {is_equal}");
                assert!(apart <= rounding(name), "{chosen:?}, {number}, {name}: {apart:e}");
            }
            let made = told.made.iter().filter(|(of, _, _)| *of == number);
            assert!(
                made.map(|made| (made.1, made.2))
                    .eq(told_alone.made.iter().map(|made| (made.1, made.2)))
            );
        }
    }
    // A pass over one is that of one alone.
    let given = shared(&opened, &all[..1], &mut Unobserved).expect("values");
    let (plan, request, values) = &all[0];
    let alone = opened.run(plan, 0, request, values, &mut Unobserved);
    let (given, alone) = (given[0].as_ref().expect("values"), alone.expect("values"));
    assert!(apart(&given["sampling_1"], &alone["sampling_1"]) <= rounding("sampling_1"));
}

#[test]
fn conditions_of_any_lengths_share_a_pass() {
    conditions_share_passes(&F32, rounding);
}

/// On a card passes that come again are recorded in bf16 alone: attention in f32 allocates there.
#[test]
fn conditions_share_recorded_passes_in_bf16() {
    conditions_share_passes(&Precision::full(DType::BF16), |name| {
        if name.starts_with("guidance") {
            10.0 * BF16_COMPONENT
        } else {
            BF16_COMPONENT
        }
    });
}

/// Runs passes over several conditions, with what each leaves to the next, and compares their values with those of the requests alone.
fn conditions_share_passes(precision: &Precision, bound: impl Fn(&str) -> f64) {
    let folder = folder(true);
    let opened = open(folder.path(), precision);
    let sung = |words: usize| {
        let mut request = Request {
            steps: 16,
            slots: 4,
            guidance: 7.0,
            ..new_track()
        };
        audio(&mut request).lyrics = "la ".repeat(words);
        slot(&opened, &request, 1)
    };
    // The last one is in longer rows than the others.
    let all = [sung(3), sung(20), sung(12), sung(300)];
    let tokens: Vec<usize> = (all.iter())
        .map(|(_, _, values)| values["condition"].shape[0])
        .collect();
    assert!(
        tokens[..3].iter().all(|tokens| *tokens < 256) && tokens[3] > 256,
        "{tokens:?}"
    );
    let alone: Vec<Values> = (all.iter())
        .map(|(plan, request, values)| opened.run(plan, 0, request, values, &mut Unobserved))
        .collect::<Result<_, _>>()
        .expect("values");
    let tensors = |name: &str| Ok(opened.tensors(name));
    let mut kept = Kept::default();
    for chosen in [
        &[0, 1][..],
        &[1, 0],
        &[2, 0, 1],
        &[1, 2],
        &[0, 3],
        &[3, 3],
        &[1, 0, 2, 1],
        &[2, 1, 1, 0],
    ] {
        let slots: Vec<Slot> = chosen.iter().map(|&number| all[number].clone()).collect();
        let given = shared_after((&opened, &tensors), &slots, &mut kept, &mut Unobserved);
        for (number, given) in chosen.iter().zip(given.expect("values")) {
            for (name, value) in &given.expect("values") {
                let apart_of = |other: usize| apart(value, &alone[other][name]);
                let (own, others) = (apart_of(*number), (0..all.len()).filter(|other| other != number));
                let next = others.map(apart_of).fold(f64::INFINITY, f64::min);
                assert!(own <= bound(name), "{chosen:?}, {number}, {name}: {own:e}");
                assert!(
                    next > 2.0 * own,
                    "{chosen:?}, {number}, {name}: {own:e} of {next:e}"
                );
            }
        }
        assert!(!kept.is_empty(), "{chosen:?}");
    }
}

#[test]
fn a_sampling_in_shared_rounds_equals_that_of_one_stage() {
    let folder = folder(false);
    let opened = open(folder.path(), &F32);
    let with = |seed: u64, slots: u32| Request {
        seed,
        slots,
        steps: 6,
        ..new_track()
    };
    let mut both: Vec<Slot> = [1, 2].map(|seed| slot(&opened, &with(seed, 3), 0)).to_vec();
    for round in 0..3 {
        let given = shared(&opened, &both, &mut Unobserved).expect("values");
        for ((plan, request, values), given) in both.iter_mut().zip(given) {
            values.extend(given.expect("values"));
            let plans = opened.model.plan(request).expect("a valid request");
            let mut rounds = plans.into_iter().filter(|plan| plan.role == Role::Sample);
            *plan = rounds.nth(round + 1).unwrap_or_else(|| plan.clone());
        }
    }
    for (seed, (_, _, values)) in (1..).zip(&both) {
        let alone = sampled(&opened, &with(seed, 1), 1, &mut Steps::default());
        assert!(apart(&values["latent"], &alone["latent"]) <= rounding("latent"));
    }
    assert_ne!(both[0].2["latent"], both[1].2["latent"]);
}

#[test]
fn a_failed_or_cancelled_request_does_not_change_the_others_in_its_pass() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    let all = slots(&opened);
    let undisturbed = shared(&opened, &all, &mut Unobserved).expect("values");
    // In a pass over as many nothing changes; over fewer, products have other shapes.
    let expect_others = |given: &[Result<Values, StageError>], left: usize, are_fewer: bool| {
        for (number, (given, before)) in given.iter().zip(&undisturbed).enumerate() {
            if number == left {
                continue;
            }
            let (given, before) = (given.as_ref().expect("values"), before.as_ref().expect("values"));
            for (name, value) in given {
                let is_same = match are_fewer {
                    true => apart(value, &before[name]) <= rounding(name),
                    false => value == &before[name],
                };
                assert!(is_same, "{number} without {left}: {name}");
            }
        }
    };
    for number in 0..all.len() {
        let mut broken = all.clone();
        let condition = broken[number].2.get_mut("condition").expect("a condition");
        let mut data = condition.data.to_vec();
        data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        condition.data = data.into();
        let given = shared(&opened, &broken, &mut Unobserved).expect("values");
        let first = all[number]
            .0
            .takes
            .iter()
            .find_map(|taken| taken.name.strip_prefix("sampling_"));
        let first: u32 = first.map_or(0, |first| first.parse().expect("a step"));
        match &given[number] {
            Err(StageError::NotFinite { component, step }) => {
                assert_eq!((component.as_str(), *step), ("transformer", first + 1));
            }
            other => panic!("{other:?}"),
        }
        expect_others(&given, number, false);

        // Before it begins, and after its first step: some rounds have no second.
        for steps in [0, 1] {
            let mut told = Steps {
                cancelled: vec![(number, steps)],
                ..Steps::default()
            };
            let given = shared(&opened, &all, &mut told).expect("values");
            let made = told.made.iter().filter(|(of, _, _)| *of == number).count();
            assert_eq!(made, steps);
            if all[number].0.steps > steps as u32 {
                assert!(matches!(given[number], Err(StageError::Cancelled)), "{number}");
            }
            expect_others(&given, number, steps == 0);
        }
        let mut lacks = all.clone();
        lacks[number].2.remove("condition");
        let given = shared(&opened, &lacks, &mut Unobserved).expect("values");
        assert!(matches!(given[number], Err(StageError::BadInput(_))));
        expect_others(&given, number, true);
    }
    let mut told = Steps {
        cancelled: (0..all.len()).map(|number| (number, 0)).collect(),
        ..Steps::default()
    };
    let given = shared(&opened, &all, &mut told).expect("answers");
    assert!(
        given
            .iter()
            .all(|given| matches!(given, Err(StageError::Cancelled)))
    );
}

#[test]
fn stages_that_cannot_share_a_pass_are_refused() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    let asked = |seconds: f32, slots: u32| Request {
        slots,
        ..request(Audio {
            seconds,
            ..Audio::default()
        })
    };
    let one = slot(&opened, &asked(1.0, 2), 0);
    let longer = slot(&opened, &asked(1.2, 2), 0);
    let alone = slot(&opened, &asked(1.0, 1), 0);
    let key = |slot: &Slot| slot.0.shared.clone().expect("it shares passes").key;
    assert_ne!(key(&one), key(&longer));
    for wrong in [
        vec![one.clone(), longer],
        vec![one.clone(), alone],
        vec![one.clone(), one.clone(), one.clone()],
        Vec::new(),
    ] {
        let refused = shared(&opened, &wrong, &mut Unobserved);
        assert!(matches!(refused, Err(StageError::BadInput(_))), "{}", wrong.len());
    }
}

#[test]
fn a_finished_request_keeps_its_values_when_the_others_are_cancelled() {
    let folder = folder(true);
    let opened = open(folder.path(), &F32);
    let asked = Request {
        steps: 8,
        slots: 6,
        ..new_track()
    };
    // Of one step, and of two.
    let both = [0, 2].map(|round| slot(&opened, &asked, round));
    assert_eq!(both.each_ref().map(|slot| slot.0.steps), [1, 2]);
    let mut told = Steps {
        cancelled: vec![(0, 1), (1, 1)],
        ..Steps::default()
    };
    let given = shared(&opened, &both, &mut told).expect("values");
    assert!(given[0].is_ok() && matches!(given[1], Err(StageError::Cancelled)));
    assert_eq!(told.made, [(0, 1, 8), (1, 3, 8)]);
}

const INK: Lora = Lora {
    name: "ink",
    rank: 4,
    seed: 1,
};
const OIL: Lora = Lora {
    name: "oil",
    rank: 4,
    seed: 2,
};
/// Of another rank, so that its terms are a product of their own.
const CHALK: Lora = Lora {
    name: "chalk",
    rank: 3,
    seed: 3,
};
const BROKEN: Lora = Lora {
    name: "broken",
    rank: 4,
    seed: 0,
};

/// A set of adapters: names and strengths.
type Set = &'static [(&'static str, f32)];

/// Requests of one condition or of every kind, each with its set, in the same rounds as [`slots`].
fn adapted(opened: &OpenModel, kinds_of: &[(usize, Set)]) -> Vec<Slot> {
    let all = kinds();
    let rounds = [(8, 0), (8, 3), (6, 2), (11, 1), (9, 2), (8, 1)];
    let of = |(seed, &(kind, set)): (u64, &(usize, Set))| {
        let (steps, round) = rounds[kind];
        let request = Request {
            seed,
            steps,
            slots: 6,
            adapters: uses(set),
            ..all[kind].1.clone()
        };
        slot(opened, &request, round)
    };
    (1..).zip(kinds_of).map(of).collect()
}

/// Requests of one condition: without adapters, two of one set, and one of another set.
const PLAIN_INK_INK_CHALK: [(usize, Set); 4] = [
    (0, &[]),
    (0, &[("ink", 1.0)]),
    (0, &[("ink", 1.0)]),
    (0, &[("chalk", 1.0)]),
];

fn pass_of(slot: &Slot) -> &SharedPass {
    slot.0.shared.as_ref().expect("it shares passes")
}

fn adapters_of(slot: &Slot) -> &str {
    &pass_of(slot).adapters
}

#[test]
fn requests_with_different_adapters_in_one_pass_equal_each_alone() {
    let folder = folder(true);
    let (_files, opened) = open_with(folder.path(), &[INK, OIL, CHALK]);
    let cases: [&[(usize, Set)]; 5] = [
        // One condition, none of which is attended to with other adapters.
        &[(0, &[]), (0, &[("ink", 1.0)])],
        &[
            (0, &[("ink", 1.0)]),
            (0, &[("oil", 1.0)]),
            (0, &[("ink", 0.5)]),
            (0, &[]),
        ],
        // Ranks that differ, or do not add up to the same; one set at several places.
        &[
            (0, &[("chalk", 0.7)]),
            (1, &[("ink", 1.0), ("oil", -0.5)]),
            (0, &[]),
            (2, &[("chalk", 0.7)]),
            (1, &[("ink", 1.0), ("oil", -0.5)]),
        ],
        // Every kind, some of them guided: passes of other sets than the first.
        &[
            (0, &[("ink", 1.0)]),
            (1, &[("oil", 1.0)]),
            (2, &[]),
            (3, &[("oil", 1.0)]),
            (4, &[("ink", 0.3), ("chalk", 1.0)]),
            (5, &[("ink", 1.0)]),
        ],
        // A strength of 0 is none.
        &[(0, &[("ink", 0.0)]), (0, &[]), (0, &[("oil", 1.0)])],
    ];
    // With copies of weights, which only a card keeps, and without.
    for (chosen, keeps_copies) in cases
        .into_iter()
        .flat_map(|chosen| [(chosen, true), (chosen, false)])
    {
        let mut slots = adapted(&opened, chosen);
        assert!(
            slots
                .iter()
                .all(|slot| pass_of(slot).key == pass_of(&slots[0]).key)
        );
        let own = slots[0].0.clone();
        slots[0].0 = own
            .clone()
            .shared_with(&slots[1..].iter().map(pass_of).collect::<Vec<_>>());
        slots[0]
            .0
            .rungs
            .retain(|rung| rung.copies.is_empty() != keeps_copies);
        assert_eq!(slots[0].0.rungs.len(), 1);
        let given = shared(&opened, &slots, &mut Unobserved).expect("values");
        slots[0].0 = own;
        for (number, ((plan, request, values), given)) in slots.iter().zip(given).enumerate() {
            let given = given.expect("values");
            let alone = |request: &Request| {
                let whole = plan.rungs.iter().position(|rung| rung.copies.is_empty());
                let given = opened.run(plan, whole.expect("a rung"), request, values, &mut Unobserved);
                given.expect("values")
            };
            let expected = alone(request);
            let plain = alone(&Request {
                adapters: Vec::new(),
                ..request.clone()
            });
            assert!(given.keys().eq(&plan.gives));
            for (name, value) in &given {
                let apart_from_plain = apart(value, &plain[name]);
                let apart = apart(value, &expected[name]);
                println!("{chosen:?}, {number}, {name}: {apart:.2e}; {apart_from_plain:.2e} from the base's");
                assert!(apart <= rounding(name), "{chosen:?}, {number}, {name}: {apart:e}");
                let has_adapters = !adapters_of(&slots[number]).is_empty();
                assert_eq!(
                    apart_from_plain > 1e-4,
                    has_adapters,
                    "{number}: {apart_from_plain:e}"
                );
            }
        }
    }
    let none = adapted(&opened, &[(0, &[("ink", 0.0)])]);
    assert_eq!(adapters_of(&none[0]), "");
}

#[test]
fn a_request_that_fails_changes_no_bit_of_those_with_other_adapters() {
    let folder = folder(true);
    let (_files, opened) = open_with(folder.path(), &[INK, OIL, BROKEN]);
    let with = |second: Set| {
        let kinds: [(usize, Set); 4] = [(0, &[("ink", 1.0)]), (0, second), (1, &[]), (0, &[("ink", 1.0)])];
        adapted(&opened, &kinds)
    };
    let undisturbed = shared(&opened, &with(&[("oil", 1.0)]), &mut Unobserved).expect("values");
    let expect_others = |given: &[Result<Values, StageError>]| {
        for number in [0, 2, 3] {
            let (given, before) = (&given[number], &undisturbed[number]);
            assert_eq!(given.as_ref().expect("values"), before.as_ref().expect("values"));
        }
    };
    // An adapter whose numbers are not finite is named.
    let given = shared(&opened, &with(&[("broken", 1.0)]), &mut Unobserved).expect("values");
    match &given[1] {
        Err(StageError::NotFinite { component, .. }) => {
            assert!(component.starts_with("adapter:broken:transformer"), "{component}");
        }
        other => panic!("{other:?}"),
    }
    expect_others(&given);
    // A condition that is not finite, beside a finite one of the same value with another set.
    let mut broken = with(&[("oil", 1.0)]);
    let condition = broken[1].2.get_mut("condition").expect("a condition");
    let mut data = condition.data.to_vec();
    data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    condition.data = data.into();
    let given = shared(&opened, &broken, &mut Unobserved).expect("values");
    assert!(matches!(&given[1], Err(StageError::NotFinite { component, .. }) if component == "transformer"));
    expect_others(&given);
    let mut told = Steps {
        cancelled: vec![(1, 1)],
        ..Steps::default()
    };
    let given = shared(&opened, &with(&[("oil", 1.0)]), &mut told).expect("values");
    assert!(given[1].is_ok(), "its round has one step");
    expect_others(&given);
}

#[test]
fn a_pass_has_four_sets_of_adapters_at_most_and_none_that_the_model_lacks() {
    let folder = folder(false);
    let (_files, opened) = open_with(folder.path(), &[INK, OIL]);
    let sets: [(usize, Set); 5] = [
        (0, &[]),
        (0, &[("ink", 1.0)]),
        (0, &[("ink", 0.5)]),
        (0, &[("oil", 1.0)]),
        (0, &[("ink", 1.0), ("oil", 1.0)]),
    ];
    let slots = adapted(&opened, &sets);
    let refused = shared(&opened, &slots, &mut Unobserved);
    assert!(matches!(refused, Err(StageError::BadInput(_))));
    let five = [&slots[..4], &slots[1..2]].concat();
    let given = shared(&opened, &five, &mut Unobserved).expect("values");
    assert!(given.iter().all(Result::is_ok), "several of one set");
    // A model without one of the adapters would leave its terms out.
    let (_own_file, other) = open_with(folder.path(), &[INK]);
    let given = shared(&other, &slots[1..4], &mut Unobserved).expect("values");
    assert!(given[0].is_ok() && given[1].is_ok());
    assert!(matches!(&given[2], Err(StageError::BadInput(problem)) if problem.contains("oil")));
}

#[test]
fn only_a_pass_of_several_sets_takes_memory_for_copies_of_factors() {
    let folder = folder(false);
    let (_files, opened) = open_with(folder.path(), &[INK, CHALK]);
    let slots = adapted(&opened, &PLAIN_INK_INK_CHALK);
    let pass = |number: usize| pass_of(&slots[number]);
    let scratch = |own: usize, others: &[usize]| {
        let others: Vec<_> = others.iter().map(|&other| pass(other)).collect();
        let plan = slots[own].0.clone().shared_with(&others);
        let whole = plan
            .rungs
            .iter()
            .find(|rung| rung.copies.is_empty() && rung.from_host.is_empty());
        whole.expect("a rung without copies").scratch
    };
    assert_eq!(scratch(1, &[2]), scratch(1, &[]) + pass(2).scratch_each);
    let of_sets = pass(1).scratch_of_set + pass(3).scratch_of_set;
    assert_eq!(scratch(1, &[3]), scratch(1, &[]) + pass(3).scratch_each + of_sets);
    assert_eq!(
        scratch(1, &[2, 3]),
        scratch(1, &[2]) + pass(3).scratch_each + of_sets,
        "a set counts once"
    );
    assert_eq!(pass(0).scratch_of_set, residency::Bytes::ZERO);
    // Its factors, and more.
    let components = opened.model.components().iter();
    let factors = components.filter(|component| component.name == "adapter:ink:transformer");
    assert!(factors.map(|component| component.bytes).sum::<residency::Bytes>() < pass(1).scratch_of_set);
}

#[test]
fn copies_of_weights_take_memory_for_each_set_of_a_pass() {
    let folder = folder(false);
    let (_files, opened) = open_with(folder.path(), &[INK, CHALK]);
    let slots = adapted(&opened, &PLAIN_INK_INK_CHALK);
    let pass = |number: usize| pass_of(&slots[number]);
    assert!(pass(0).copies.is_empty() && !pass(1).copies.is_empty());
    let is_adapted = |layer: &String| {
        let of_conditions = ["cross_attn.to_k", "cross_attn.to_v"];
        layer.starts_with("layers.") && !of_conditions.iter().any(|name| layer.ends_with(name))
    };
    assert!(pass(1).copies.keys().all(is_adapted), "layers of steps");
    for (others, sets) in [(&[2][..], 1), (&[0], 2), (&[0, 3], 3)] {
        let all: Vec<_> = others.iter().map(|&other| pass(other)).collect();
        let rungs = slots[1].0.clone().shared_with(&all).rungs;
        let [with_copies, whole] = &rungs[..] else {
            panic!("{rungs:?}")
        };
        let changed = [&[pass(1)][..], &all].concat();
        let copies: BTreeMap<_, _> = changed.iter().flat_map(|pass| &pass.copies).collect();
        assert_eq!(
            copies.keys().copied().cloned().collect::<Vec<String>>(),
            with_copies.copies
        );
        let of_set: u64 = copies.values().map(|bytes| bytes.0).sum();
        assert_eq!(with_copies.scratch.0, whole.scratch.0 + sets * of_set);
    }
    // Their strength changes: no copy has its terms.
    let mut request = slots[1].1.clone();
    request.adapters[0].strength = StrengthCurve::of(vec![(0.0, 1.0), (1.0, 0.5)]).expect("a curve");
    let plan = opened.model.plan(&request).expect("a plan");
    assert!(
        plan.iter()
            .flat_map(|stage| &stage.rungs)
            .all(|rung| rung.copies.is_empty())
    );
}

#[test]
fn what_a_pass_keeps_for_the_next_changes_no_value_and_is_made_once() {
    let folder = folder(true);
    let (_files, opened) = open_with(folder.path(), &[INK, OIL]);
    let asked = Cell::new(0);
    let tensors = |name: &str| {
        asked.set(asked.get() + usize::from(name == "transformer"));
        Ok(opened.tensors(name))
    };
    let sets: [(usize, Set); 4] = [
        (0, &[("ink", 1.0)]),
        (1, &[]),
        (3, &[("oil", 0.5)]),
        (0, &[("ink", 1.0)]),
    ];
    let requests: Vec<Request> = (sets.iter().zip(1..))
        .map(|(&(kind, set), seed)| Request {
            seed,
            steps: 4,
            slots: 4,
            adapters: uses(set),
            ..kinds()[kind].1.clone()
        })
        .collect();
    let mut kept = Kept::default();
    // All rounds one after the other; in the third, two requests have changed places, and one of another set of adapters has come.
    let rounds = |round: usize, order: &[usize]| -> Vec<Slot> {
        let slots = order
            .iter()
            .map(|&number| slot(&opened, &requests[number], round));
        slots.collect()
    };
    let passes = [
        (0, vec![0, 1, 2, 3], true),
        (1, vec![0, 1, 2, 3], false),
        (2, vec![2, 1, 0], false),
        (2, vec![0, 1], true),
        (3, vec![0, 1], false),
    ];
    for (number, (round, order, made)) in passes.into_iter().enumerate() {
        let slots = rounds(round, &order);
        let alone = shared(&opened, &slots, &mut Unobserved).expect("values");
        asked.set(0);
        let after = shared_after((&opened, &tensors), &slots, &mut kept, &mut Unobserved).expect("values");
        for (after, alone) in after.into_iter().zip(alone) {
            let (after, alone) = (after.expect("values"), alone.expect("values"));
            assert!(after.keys().eq(alone.keys()));
            for (name, value) in &after {
                // Sets have other numbers where the first pass of all had another order, and a card rounds for each order otherwise.
                let is_same = match test_device().is_cpu() {
                    true => *value == alone[name],
                    false => apart(value, &alone[name]) <= rounding(name),
                };
                assert!(is_same, "pass {number}: {name}");
            }
        }
        assert_eq!(asked.get() > 0, made, "pass {number}");
        let is_last = round == 3;
        assert_eq!(kept.is_empty(), is_last, "pass {number}");
    }
    // Nothing stays for requests that are all cancelled.
    let slots = rounds(0, &[0, 1]);
    let mut told = Steps {
        cancelled: vec![(0, 0), (1, 0)],
        ..Steps::default()
    };
    let given = shared_after((&opened, &tensors), &slots, &mut kept, &mut told).expect("answers");
    assert!(given.iter().all(Result::is_err) && kept.is_empty());
}
