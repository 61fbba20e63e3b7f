//! What a request is planned to ask of cuDNN is what its stages ask for: shape by shape on every device, and on a card by
//! the plans that stages do not have to make.

#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/numbers.rs"]
mod numbers;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/workshop.rs"]
mod workshop;

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;

use candle_core::DType;
use ops::{ASKED, Planned};
use pipelines::autoencoder_kl::VaeConfig;
use pipelines::{
    ImageRequest, InitImage, Model, Observer, StageInput, StageKind, StageOutput, StagePlan, Unobserved,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use workshop::{Workshop, folder, request};

thread_local! {
    /// Shapes that this thread asked for, each once.
    static SHAPES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Hears which shapes are asked for.
struct Asked;

impl Visit for Asked {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let shape = format!("{value:?}");
        SHAPES.with_borrow_mut(|all| {
            if field.name() == "planned" && !all.contains(&shape) {
                all.push(shape);
            }
        });
    }
}

impl Subscriber for Asked {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == ASKED
    }
    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut Asked);
    }
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

/// What some work asks for, and what it gives. One subscriber serves all threads: what threads without one ask for first is
/// not told to others either.
fn asked<R>(work: impl FnOnce() -> R) -> (Vec<String>, R) {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Asked).expect("the only subscriber"));
    SHAPES.take();
    let result = work();
    (SHAPES.take(), result)
}

fn words(planned: &[Planned]) -> Vec<String> {
    planned.iter().map(|shape| format!("{shape:?}")).collect()
}

/// Wants every preview.
struct Curious;

impl Observer for Curious {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn cancelled(&self) -> bool {
        false
    }
}

/// Runs all stages of a request, each through `run`, and hands on what they give.
fn through_stages(
    workshop: &Workshop,
    request: &ImageRequest,
    mut run: impl FnMut(&StagePlan, &StageInput) -> StageOutput,
) {
    let mut input = StageInput::default();
    for plan in workshop.model.stages(request) {
        match run(&plan, &input) {
            StageOutput::Text(text) => input.text = Some(text),
            StageOutput::Latent(latent) => input.latent = Some(latent),
            StageOutput::Picture { .. } => assert_eq!(plan.kind, StageKind::Decode),
        }
    }
}

/// An odd size, so that no side is taken for another.
fn odd() -> ImageRequest {
    ImageRequest {
        width: 96,
        height: 48,
        max_sequence_length: 40,
        steps: 2,
        ..request()
    }
}

fn from_picture() -> ImageRequest {
    let ImageRequest { width, height, .. } = odd();
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    ImageRequest {
        init_image: Some(InitImage {
            width,
            height,
            rgb: rgb.collect(),
        }),
        preview: true,
        steps: 4,
        strength: 0.8,
        ..odd()
    }
}

#[test]
fn stages_ask_for_what_is_planned_in_its_order() {
    let workshop = Workshop::open(folder("dev").path());
    for request in [odd(), from_picture()] {
        through_stages(&workshop, &request, |plan, input| {
            let run = || workshop.run(plan, 0, &request, input, &mut Curious);
            let (asked, output) = asked(run);
            let planned = words(&workshop.model.planned(plan.kind, &request));
            assert!(!planned.is_empty());
            assert_eq!(asked, planned, "{:?}", plan.kind);
            output.expect("a stage")
        });
    }
}

#[test]
fn strips_ask_for_what_is_planned_of_strips() {
    let dev = folder("dev");
    let workshop = Workshop::open(dev.path());
    let config = std::fs::read(dev.path().join("vae/config.json")).expect("a configuration");
    let config: VaeConfig = serde_json::from_slice(&config).expect("a configuration");
    let (h, w) = (48 / config.factor(), 96 / config.factor());
    let request = from_picture();
    let latent = workshop.denoised(&request, &mut Unobserved).expect("a latent");
    let input = StageInput {
        text: None,
        latent: Some(latent),
    };
    let mut strips = 0;
    for kind in [StageKind::EncodeImage, StageKind::Decode] {
        let plan = workshop.model.lone_stage(kind, request.width, request.height);
        for (index, rung) in plan.rungs.iter().enumerate() {
            let Some(rows) = rung.label.strip_prefix("strips of ") else {
                continue;
            };
            let rows = rows.parse().expect("rows");
            let (asked, output) = asked(|| workshop.run(&plan, index, &request, &input, &mut Unobserved));
            output.expect("a stage");
            let planned = match kind {
                StageKind::Decode => config.planned_to_decode((h, w), rows, DType::F32),
                _ => config.planned_to_encode((h, w), rows, DType::F32),
            };
            assert_eq!(asked, words(&planned), "{kind:?} in {}", rung.label);
            strips += 1;
        }
    }
    assert!(strips > 1, "{strips} rungs in strips");
}

#[test]
fn what_cannot_be_is_planned_without_harm() {
    let workshop = Workshop::open(folder("dev").path());
    let nothing = ImageRequest {
        width: 0,
        height: 0,
        max_sequence_length: 0,
        ..from_picture()
    };
    for kind in StageKind::ALL {
        let planned = workshop.model.planned(kind, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}

/// The first thing that this process does with cuDNN: run by name, or with one thread.
#[cfg(feature = "cuda")]
#[test]
fn stages_make_no_plans_that_were_made_ahead() {
    use ops::{AttentionPaths, PlansMade, libraries, make_plans};
    use workshop::BF16;

    let device = device::test_device();
    if device.is_cpu() {
        return;
    }
    assert!(libraries().cudnn.is_ok(), "{:?}", libraries().cudnn);
    let workshop = Workshop::open_in(folder("dev").path(), BF16);
    let request = from_picture();
    let planned: Vec<Planned> = StageKind::ALL
        .into_iter()
        .flat_map(|kind| workshop.model.planned(kind, &request))
        .collect();
    let shapes: std::collections::HashSet<&Planned> = planned.iter().collect();
    let run = |request: &ImageRequest| {
        through_stages(&workshop, request, |plan, input| {
            workshop
                .run(plan, 0, request, input, &mut Curious)
                .expect("a stage")
        });
    };
    let (before, paths) = (PlansMade::now(), AttentionPaths::now());
    for _ in 0..2 {
        make_plans(device, &planned);
    }
    // A plan that is still queued would be made by its stage.
    while PlansMade::now().ahead < before.ahead + shapes.len() as u64 {
        std::thread::yield_now();
    }
    for _ in 0..2 {
        run(&request);
        make_plans(device, &planned);
    }
    let now = PlansMade::now();
    assert_eq!(now.ahead - before.ahead, shapes.len() as u64);
    assert_eq!(now.in_stages, before.in_stages);
    assert!(AttentionPaths::now().cudnn > paths.cudnn);

    // The counter counts: a picture of another size was planned by nobody.
    let other = ImageRequest {
        width: 64,
        height: 64,
        ..odd()
    };
    run(&other);
    assert!(PlansMade::now().in_stages > now.in_stages);
}
