//! A sampling whose tokens two devices share equals that of one.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use candle_core::DType;
use pipelines::{
    HostTensor, Model as _, Observer, Piece, Precision, Request, StageError, StagePlan, Unobserved, Values,
};
use tempfile::TempDir;

use crate::given::{film_folder, open, request, section_folder, start};
use crate::numbers::distance;
use crate::open_model::{F32, on_cpu};
use crate::shapes_asked::{asked, words};

/// One of two runs of a stage.
struct Together {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    /// The step after which it is cancelled.
    until: u32,
    done: u32,
    /// Previews after each step.
    previews: Vec<Vec<u8>>,
    /// Whether it shows previews.
    shows: bool,
}

impl Observer for Together {
    fn step(&mut self, n: u32, _of: u32) {
        self.done = n;
    }
    fn wants_preview(&mut self) -> bool {
        self.shows
    }
    fn preview(&mut self, _width: u32, _height: u32, rgb: Vec<u8>) {
        self.previews.push(rgb);
    }
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        self.done >= self.until
    }
    fn meet(&mut self, offer: &[u8]) -> Result<Vec<u8>, StageError> {
        // The other end may be gone.
        let _ = self.to.send(offer.to_vec());
        self.from.recv().map_err(|_| StageError::Cancelled)
    }
}

/// A run of one of two devices: its result, its previews, and the shapes of attention that it used.
type Ran = (Result<Values, StageError>, Vec<Vec<u8>>, Vec<String>);

/// Runs a sampling on two devices, the second of which is cancelled after this step.
fn shared(
    (folder, precision): (&Path, &Precision),
    (plan, request, values): (&StagePlan, &Request, &Values),
    until: u32,
) -> [Ran; 2] {
    let (to_second, from_first) = channel();
    let (to_first, from_second) = channel();
    let run = |part: u32, to: Sender<Vec<u8>>, from: Receiver<Vec<u8>>| {
        let mut observer = Together {
            to,
            from,
            until: if part == 1 { until } else { u32::MAX },
            done: 0,
            previews: Vec::new(),
            shows: part == 0,
        };
        let opened = open(folder, precision);
        let (shapes, given) =
            asked(|| opened.run_part(Some(part), (plan, 0), request, values, &mut observer));
        (given, observer.previews, shapes)
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| run(1, to_first, from_first));
        let first = run(0, to_second, from_second);
        [first, second.join().expect("it does not panic")]
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
    let (to, from) = channel();
    let mut observer = Together {
        to,
        from,
        until: u32::MAX,
        done: 0,
        previews: Vec::new(),
        shows: true,
    };
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
