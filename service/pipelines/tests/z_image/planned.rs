//! The planned cuDNN shapes of a Z-Image request equal those that its stages use.

use candle_core::DType;
use pipelines::{FULL, Image, Medium, Precision, Preset, Quantization, Request, Values};

use crate::device;
use crate::given::{folder, from_picture, open, request};
use crate::open_model::{F32, OpenModel, WantsPreviews};
use crate::shapes_asked::{asked, words};

fn assert_planned(opened: &OpenModel, request: &Request, is_text_planned: bool) {
    let mut values = Values::new();
    for plan in opened.stages(request) {
        let run = || opened.run(&plan, 0, request, &values, &mut WantsPreviews);
        let (asked, given) = asked(run);
        let planned = words(&opened.model.planned(&plan.name, request));
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
        let opened = open(folder.path(), &precision);
        let guided = |negative: &str| Request {
            negative_prompt: Some(negative.to_owned()),
            true_guidance: 4.0,
            ..request()
        };
        let longer = guided(&"a red circle ".repeat(30));
        for request in [request(), from_picture(), guided("a square"), longer] {
            assert_planned(&opened, &request, is_text_planned);
        }
    }
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
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
        let planned = opened.model.planned(stage, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}
