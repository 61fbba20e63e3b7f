//! ControlNets: the same latents and pictures as diffusers.

use std::sync::Arc;

use pipelines::flux::FluxModel;
use pipelines::{
    AdapterError, AdapterFile, ControlUse, Image, InitImage, Medium, Model, ModelError, Request, Unobserved,
};
use serde::Deserialize;

use crate::edits::{assert_equal, scaled};
use crate::given::{black, folder, open, request};
use crate::numbers::{distance, fixtures, init_image, json, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

fn adapted(folder_of_net: &str) -> Result<FluxModel, ModelError> {
    let base = folder("dev");
    let model = FluxModel::open(base.path(), &F32)
        .expect("a sound model")
        .expect("a FLUX model");
    model.adapted(&[AdapterFile {
        name: "net".to_owned(),
        path: fixtures().join(folder_of_net),
        kind: pipelines::AdapterKind::ControlNet,
        ignores_unknown: false,
    }])
}

/// FLUX.1 dev with a ControlNet.
pub(crate) fn with_control_net(net: &str) -> OpenModel<FluxModel> {
    OpenModel::of(Arc::new(
        adapted(&format!("flux-controlnet-tiny/{net}")).expect("a ControlNet"),
    ))
}

/// Its use with a control picture.
pub(crate) fn used(image: InitImage) -> ControlUse {
    ControlUse {
        name: "net".to_owned(),
        image,
        scale: 0.7,
        start: 0.0,
        end: 1.0,
        mode: None,
    }
}

fn picture(controls: Vec<ControlUse>) -> Request {
    Request {
        medium: Medium::Image(Image {
            controls,
            ..Image::of(64, 64)
        }),
        ..request()
    }
}

#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    seed: u64,
    max_sequence_length: u32,
    guidance: f32,
    controlnet: String,
    control_mode: Option<u32>,
    controlnet_conditioning_scale: f32,
    control_guidance_start: f32,
    control_guidance_end: f32,
}

#[test]
fn pictures_with_control_nets_equal_the_references() {
    let expected = tensors("flux-controlnet-tiny/expected/pipelines.safetensors");
    for case in json::<Vec<Case>>("flux-controlnet-tiny/expected/pipelines.json") {
        let opened = with_control_net(&case.controlnet);
        let control = init_image(&expected[&format!("{}.control", case.name)]);
        let control = scaled(&control, (case.width, case.height));
        let image = Image {
            controls: vec![ControlUse {
                scale: case.controlnet_conditioning_scale,
                start: case.control_guidance_start,
                end: case.control_guidance_end,
                mode: case.control_mode,
                ..used(control)
            }],
            ..Image::of(case.width, case.height)
        };
        let request = Request {
            prompt: case.prompt.clone(),
            seed: case.seed,
            ..Request::of(
                Medium::Image(image),
                case.steps,
                case.guidance,
                case.max_sequence_length,
            )
        };
        assert_equal(&opened, &request, &case.name, &expected);
    }
}

#[test]
fn a_control_net_is_a_component_of_the_stage_that_uses_it() {
    let opened = with_control_net("single");
    let named = |request: &Request| opened.stage(request, "denoise").components;
    assert!(!named(&request()).contains(&"controlnet:net".to_owned()));
    let request = picture(vec![used(black(64, 64))]);
    assert!(named(&request).contains(&"controlnet:net".to_owned()));
    let stages: Vec<String> = opened
        .stages(&request)
        .into_iter()
        .map(|stage| stage.name)
        .collect();
    assert_eq!(stages, ["encode_text", "encode_control_0", "denoise", "decode"]);
}

#[test]
fn a_control_net_that_acts_in_no_step_is_not_needed() {
    let opened = with_control_net("single");
    let idle = |scale: f32, start: f32, end: f32| ControlUse {
        scale,
        start,
        end,
        ..used(black(64, 64))
    };
    let plan = |controls: Vec<ControlUse>| {
        let stages = opened.model.plan(&picture(controls)).expect("a plan");
        let named = stages.iter().map(|stage| stage.name.clone()).collect::<Vec<_>>();
        let denoise = stages.into_iter().find(|stage| stage.name == "denoise");
        (named, denoise.expect("a sampling"))
    };
    let (_, without) = plan(Vec::new());
    for control in [idle(0.0, 0.0, 1.0), idle(0.7, 0.0, 0.0), idle(0.7, 1.0, 1.0)] {
        let (stages, denoise) = plan(vec![control]);
        assert_eq!(stages, ["encode_text", "denoise", "decode"]);
        assert_eq!(denoise, without);
    }
    // The others keep their numbers, on which their draws depend.
    let (stages, denoise) = plan(vec![idle(0.0, 0.0, 1.0), idle(0.7, 0.0, 1.0)]);
    assert_eq!(stages, ["encode_text", "encode_control_1", "denoise", "decode"]);
    assert!(denoise.components.contains(&"controlnet:net".to_owned()));
}

#[test]
fn a_request_is_planned_by_the_sizes_of_its_pictures() {
    let opened = with_control_net("single");
    let whole = Request {
        medium: Medium::Image(Image {
            init_image: Some(black(64, 64)),
            mask: Some(pipelines::Mask {
                width: 64,
                height: 64,
                grey: vec![255; 64 * 64].into(),
            }),
            controls: vec![used(black(64, 64))],
            ..Image::of(64, 64)
        }),
        ..request()
    };
    let sizes = whole.without_media_data();
    assert!(sizes.lacks_media_data() && !whole.lacks_media_data());
    let plan = opened.model.plan(&whole).expect("a plan");
    assert_eq!(opened.model.plan(&sizes).expect("the same plan"), plan);
    let smaller = opened.model.smaller(&whole);
    assert_eq!(smaller.len(), 3);
    for (label, smaller) in smaller {
        assert!(
            smaller.lacks_media_data(),
            "{label}: nothing is resampled to plan it"
        );
        assert!(opened.model.plan(&smaller).is_ok(), "{label}");
    }
}

#[test]
fn several_control_nets_add_up_and_scale_zero_adds_nothing() {
    let opened = with_control_net("single");
    let latent = |scales: &[f32]| {
        let controls = scales.iter().map(|scale| ControlUse {
            scale: *scale,
            ..used(black(64, 64))
        });
        let request = picture(controls.collect());
        on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
    };
    // As many draws are made before the noise.
    let none = latent(&[0.0, 0.0]);
    assert!(distance(&latent(&[0.7, 0.0]), &none) > 1e-3);
    assert!(distance(&latent(&[0.0, 0.7]), &latent(&[0.7, 0.0])) > 0.0);
    assert!(distance(&latent(&[0.7, 0.7]), &latent(&[0.7, 0.0])) > 1e-3);
}

#[test]
fn wrong_controls_are_refused_by_their_fields() {
    let field = |opened: &OpenModel<FluxModel>, control: ControlUse| {
        opened.model.plan(&picture(vec![control])).unwrap_err()[0]
            .field
            .clone()
    };
    let single = with_control_net("single");
    let control = || used(black(64, 64));
    let other = ControlUse {
        name: "other".to_owned(),
        ..control()
    };
    assert_eq!(field(&single, other), "controls[0].id");
    assert_eq!(field(&single, used(black(64, 48))), "controls[0].image");
    let backwards = ControlUse {
        start: 0.8,
        end: 0.2,
        ..control()
    };
    assert_eq!(field(&single, backwards), "controls[0].end");
    let early = ControlUse {
        start: -0.5,
        ..control()
    };
    assert_eq!(field(&single, early), "controls[0].start");
    let loud = ControlUse {
        scale: f32::INFINITY,
        ..control()
    };
    assert_eq!(field(&single, loud), "controls[0].scale");
    let union = with_control_net("union");
    assert_eq!(field(&union, control()), "controls[0].mode");
    let beyond = ControlUse {
        mode: Some(4),
        ..control()
    };
    assert_eq!(field(&union, beyond.clone()), "controls[0].mode");
    let sound = ControlUse {
        mode: Some(0),
        ..control()
    };
    let second = union.model.plan(&picture(vec![sound, beyond])).unwrap_err();
    assert_eq!(second[0].field, "controls[1].mode");
    let base = folder("dev");
    let without = open(base.path());
    assert_eq!(field(&without, control()), "controls[0].id");
}

#[test]
fn a_folder_that_is_no_control_net_is_refused() {
    let text_encoder = adapted("flux-tiny/text_encoder").unwrap_err();
    let is_file = |error: &ModelError| {
        matches!(
            error,
            ModelError::Adapter {
                error: AdapterError::File(_),
                ..
            }
        )
    };
    assert!(is_file(&text_encoder), "{text_encoder}");
}
