//! The planned cuDNN shapes of an SDXL request equal those that its stages use.

use pipelines::{Image, Medium, Request, Values};

use crate::device;
use crate::given::{folder, from_picture, inpaint_folder, open, request, with_mask};
use crate::open_model::{F32, OpenModel, WantsPreviews};
use crate::shapes_asked::{asked, words};

fn assert_planned(opened: &OpenModel, request: &Request) {
    let mut values = Values::new();
    for plan in opened.stages(request) {
        let run = || opened.run(&plan, 0, request, &values, &mut WantsPreviews);
        let (asked, given) = asked(run);
        let planned = words(&opened.model.planned(&plan.name, request));
        assert!(!planned.is_empty(), "{}", plan.name);
        assert_eq!(asked, planned, "{}", plan.name);
        values.extend(given.expect("a stage"));
    }
}

#[test]
fn stages_use_the_planned_shapes_in_order() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let long = Request {
        prompt: "a red circle ".repeat(60),
        ..request()
    };
    let alone = Request {
        true_guidance: 1.0,
        ..request()
    };
    for request in [request(), from_picture(), with_mask(), long, alone] {
        assert_planned(&opened, &request);
    }
    assert_planned(&open(inpaint_folder().path(), &F32), &with_mask());
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let nothing = Request {
        max_sequence_length: 0,
        medium: Medium::Image(Image {
            init_image: from_picture().medium.init_image().cloned(),
            ..Image::of(0, 0)
        }),
        ..from_picture()
    };
    for stage in [
        "encode_text",
        "encode_image",
        "encode_masked",
        "denoise",
        "decode",
        "none",
    ] {
        let planned = opened.model.planned(stage, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}
