//! The planned cuDNN shapes of an SDXL request equal those that its stages use.

use pipelines::{
    AdapterFile, AdapterKind, AdapterUse, Image, Medium, Request, StrengthCurve, Values, families,
};

use crate::device;
use crate::given::{folder, from_picture, inpaint_folder, open, request, with_mask};
use crate::numbers::fixtures;
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
fn terms_of_convolutions_are_planned_too() {
    let folder = folder();
    let model = families().open(folder.path(), &F32).expect("a model");
    let file = AdapterFile {
        name: "a".to_owned(),
        path: fixtures().join("sdxl-convolution-lora-tiny/kohya.safetensors"),
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    };
    let opened = OpenModel::of(model.with_adapters(&[file]).expect("an adapter"));
    let adapted = Request {
        adapters: vec![AdapterUse {
            name: "a".to_owned(),
            strength: StrengthCurve::constant(0.5).expect("a strength"),
            text_strength: 0.0,
        }],
        ..request()
    };
    let planned = |request: &Request| opened.model.planned("denoise", request).len();
    assert!(planned(&adapted) > planned(&request()));
    assert_planned(&opened, &adapted);
    assert_planned(&opened, &request());
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
