//! The planned cuDNN shapes of a request equal those that its stages use: by shape on every device, and on a card by
//! the number of plans that stages compile.

#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/numbers.rs"]
mod numbers;
#[path = "resident/mod.rs"]
mod resident;
mod shapes_asked;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/workshop.rs"]
mod workshop;

use candle_core::DType;
#[cfg(feature = "cuda")]
use ops::Planned;
use pipelines::autoencoder_kl::VaeConfig;
use pipelines::{Image, InitImage, Medium, Model, Observer, Piece, Request, StagePlan, Unobserved, Values};

use shapes_asked::{asked, words};
use workshop::{Workshop, folder, from_image, sized};

/// Wants every preview.
struct Curious;

impl Observer for Curious {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
}

/// Names of all possible stages of a request.
const STAGES: [&str; 4] = ["encode_text", "encode_image", "denoise", "decode"];

/// Runs all stages of a request through `run`, and passes their values on.
fn through_stages(
    workshop: &Workshop,
    request: &Request,
    mut run: impl FnMut(&StagePlan, &Values) -> Values,
) {
    let mut values = Values::new();
    for plan in workshop.stages(request) {
        let given = run(&plan, &values);
        values.extend(given);
    }
}

/// An odd size, so that no dimensions are confused.
fn odd() -> Request {
    Request {
        max_sequence_length: 40,
        steps: 2,
        ..sized(96, 48)
    }
}

fn from_picture() -> Request {
    let (width, height) = (96, 48);
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    let image = InitImage {
        width,
        height,
        rgb: rgb.collect(),
    };
    Request {
        max_sequence_length: 40,
        preview: true,
        ..from_image(image, 0.8)
    }
}

#[test]
fn stages_use_the_planned_shapes_in_order() {
    let workshop = Workshop::open(folder("dev").path());
    for request in [odd(), from_picture()] {
        through_stages(&workshop, &request, |plan, values| {
            let run = || workshop.run(plan, 0, &request, values, &mut Curious);
            let (asked, given) = asked(run);
            let planned = words(&workshop.model.planned(&plan.name, &request));
            assert!(!planned.is_empty());
            assert_eq!(asked, planned, "{}", plan.name);
            given.expect("a stage")
        });
    }
}

#[test]
fn strips_use_the_planned_shapes() {
    let dev = folder("dev");
    let workshop = Workshop::open(dev.path());
    let config = std::fs::read(dev.path().join("vae/config.json")).expect("a configuration");
    let config: VaeConfig = serde_json::from_slice(&config).expect("a configuration");
    let (h, w) = (48 / config.factor(), 96 / config.factor());
    let request = from_picture();
    let values = workshop.values(&request, &mut Unobserved).expect("a latent");
    let mut strips = 0;
    for name in ["encode_image", "decode"] {
        let plan = workshop.stage(&request, name);
        for (index, rung) in plan.rungs.iter().enumerate() {
            let Some(rows) = rung.label.strip_prefix("strips of ") else {
                continue;
            };
            let rows = rows.parse().expect("rows");
            let (asked, output) = asked(|| workshop.run(&plan, index, &request, &values, &mut Unobserved));
            output.expect("a stage");
            let planned = match name {
                "decode" => config.planned_to_decode((h, w), rows, DType::F32),
                _ => config.planned_to_encode((h, w), rows, DType::F32),
            };
            assert_eq!(asked, words(&planned), "{name} in {}", rung.label);
            strips += 1;
        }
    }
    assert!(strips > 1, "{strips} rungs in strips");
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let workshop = Workshop::open(folder("dev").path());
    let picture = from_picture();
    let init_image = picture.medium.init_image().cloned();
    let nothing = Request {
        max_sequence_length: 0,
        medium: Medium::Image(Image {
            init_image,
            ..Image::of(0, 0)
        }),
        ..picture
    };
    for name in STAGES.into_iter().chain(["none"]) {
        let planned = workshop.model.planned(name, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}

/// Must be the first use of cuDNN in this process: run by name, or with one thread.
#[cfg(feature = "cuda")]
#[test]
fn stages_compile_no_plans_that_were_compiled_ahead() {
    use ops::{AttentionPaths, PlansMade, libraries, make_plans};
    use workshop::BF16;

    let device = device::test_device();
    if device.is_cpu() {
        return;
    }
    assert!(libraries().cudnn.is_ok(), "{:?}", libraries().cudnn);
    let workshop = Workshop::open_in(folder("dev").path(), BF16);
    let request = from_picture();
    let planned: Vec<Planned> = STAGES
        .into_iter()
        .flat_map(|name| workshop.model.planned(name, &request))
        .collect();
    let shapes: std::collections::HashSet<&Planned> = planned.iter().collect();
    let run = |request: &Request| {
        through_stages(&workshop, request, |plan, values| {
            workshop
                .run(plan, 0, request, values, &mut Curious)
                .expect("a stage")
        });
    };
    let (before, paths) = (PlansMade::now(), AttentionPaths::now());
    for _ in 0..2 {
        make_plans(device, &planned);
    }
    // A plan that is still queued would be compiled by its stage.
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

    // Control: a picture of another size was not planned.
    let other = Request {
        medium: Medium::Image(Image::of(64, 64)),
        ..odd()
    };
    run(&other);
    assert!(PlansMade::now().in_stages > now.in_stages);
}
