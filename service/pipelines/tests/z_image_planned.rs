//! The planned cuDNN shapes of a Z-Image request equal those that its stages use.

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
#[path = "z_image_parity/workshop.rs"]
mod workshop;

use candle_core::DType;
use pipelines::{FULL, Image, Medium, Observer, Piece, Precision, Preset, Quantization, Request, Values};

use shapes_asked::{asked, words};
use workshop::{F32, Workshop, folder, from_picture, request};

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

fn assert_planned(workshop: &Workshop, request: &Request, is_text_planned: bool) {
    let mut values = Values::new();
    for plan in workshop.stages(request) {
        let run = || workshop.run(&plan, 0, request, &values, &mut Curious);
        let (asked, given) = asked(run);
        let planned = words(&workshop.model.planned(&plan.name, request));
        assert_eq!(!planned.is_empty(), plan.name != "encode_text" || is_text_planned);
        assert_eq!(asked, planned, "{}", plan.name);
        values.extend(given.expect("a stage"));
    }
}

#[test]
fn stages_use_the_planned_shapes_in_order() {
    let folder = folder();
    // candle-transformers does not use cuDNN; our own layers do.
    let quantization = Quantization::of(Preset::named(FULL).expect("a preset"), [("text_encoder", "int8")]);
    let quantized = Precision {
        dtype: DType::F32,
        quantization: quantization.expect("formats"),
    };
    for (precision, is_text_planned) in [(F32, false), (quantized, true)] {
        let workshop = Workshop::open(folder.path(), &precision);
        for request in [request(), from_picture()] {
            assert_planned(&workshop, &request, is_text_planned);
        }
    }
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let folder = folder();
    let workshop = Workshop::open(folder.path(), &F32);
    let picture = from_picture();
    let nothing = Request {
        max_sequence_length: 0,
        medium: Medium::Image(Image {
            init_image: picture.medium.init_image().cloned(),
            ..Image::of(0, 0)
        }),
        ..picture
    };
    for stage in ["encode_text", "encode_image", "denoise", "decode", "none"] {
        let planned = workshop.model.planned(stage, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}
