//! The planned cuDNN shapes of a request equal those that its stages use.

use candle_core::DType;
use pipelines::{FULL, Image, InitImage, Medium, Precision, Preset, Quantization, Request, Values};

use crate::device;
use crate::given::{EDIT_PLUS, folder, folder_of, from_picture, guided, open, request, with_references};
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
    let quantization = Quantization::of(Preset::named(FULL).expect("a preset"), [("text_encoder", "int8")]);
    let quantized = Precision {
        dtype: DType::F32,
        quantization: quantization.expect("formats"),
    };
    let folder = folder();
    for precision in [F32, quantized] {
        let opened = open(folder.path(), &precision);
        let longest = Request {
            prompt: "a red circle ".repeat(60),
            ..guided()
        };
        for request in [request(), guided(), from_picture(), longest] {
            assert_planned(&opened, &request);
        }
    }
    let folder = folder_of(EDIT_PLUS);
    assert_planned(&open(folder.path(), &F32), &with_references());
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    let picture = from_picture();
    let nothing = Request {
        max_sequence_length: 0,
        medium: Medium::Image(Image {
            init_image: picture.medium.init_image().cloned(),
            references: vec![InitImage::of_size((0, 0))],
            seen: vec![InitImage::of_size((0, 0))],
            ..Image::of(0, 0)
        }),
        ..picture
    };
    for stage in [
        "encode_text",
        "encode_image",
        "encode_picture_0",
        "encode_picture_9",
        "encode_reference_0",
        "encode_reference_9",
        "encode_reference_",
        "denoise",
        "decode",
        "none",
    ] {
        let planned = opened.model.planned(stage, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}
