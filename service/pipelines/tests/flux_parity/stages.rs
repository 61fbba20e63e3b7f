//! What stages promise besides numbers: steps, previews, cancelling, and errors that say what happened.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::Tensor;
use pipelines::{
    ImageRequest, InitImage, Model, Observer, StageError, StageInput, StageKind, StageOutput, Unobserved,
};

use crate::numbers::tensors;
use crate::workshop::{Workshop, folder, on_cpu, request};

/// Notes what it sees, wants every preview, and cancels when it was asked often enough.
#[derive(Default)]
struct Notes {
    steps: Vec<(u32, u32)>,
    previews: Vec<(u32, u32, usize)>,
    asked: Cell<u32>,
    cancel_at: Option<u32>,
}

impl Observer for Notes {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        self.previews.push((width, height, rgb.len()));
    }
    fn cancelled(&self) -> bool {
        self.asked.set(self.asked.get() + 1);
        self.cancel_at.is_some_and(|at| self.asked.get() >= at)
    }
}

fn workshop() -> Workshop {
    Workshop::open(folder("dev").path())
}

#[test]
fn steps_and_previews_are_shown() {
    let workshop = workshop();
    let mut notes = Notes::default();
    let plain = workshop.denoised(&request(), &mut notes).expect("a latent");
    assert_eq!(notes.steps, [(1, 4), (2, 4), (3, 4), (4, 4)]);
    assert!(notes.previews.is_empty());

    let with_previews = ImageRequest {
        preview: true,
        ..request()
    };
    let mut notes = Notes::default();
    let watched = workshop.denoised(&with_previews, &mut notes).expect("a latent");
    assert_eq!(
        notes.previews,
        [(32, 32, 32 * 32 * 3); 3],
        "half the size, and none of the last step"
    );
    assert_eq!(plain, watched, "who watches changes nothing");
}

#[test]
fn every_question_can_cancel() {
    let workshop = workshop();
    let mut notes = Notes::default();
    workshop.denoised(&request(), &mut notes).expect("a latent");
    // Four steps of four blocks, and once before each step, at least.
    let questions = notes.asked.get();
    assert!(questions > 4 * 5, "{questions}");
    for at in 1..=questions {
        let mut notes = Notes {
            cancel_at: Some(at),
            ..Notes::default()
        };
        let result = workshop.denoised(&request(), &mut notes);
        assert!(
            matches!(result, Err(StageError::Cancelled)),
            "question {at}: {result:?}"
        );
        assert_eq!(notes.asked.get(), at, "it goes on after it was told to stop");
    }
}

#[test]
fn what_is_not_finite_is_an_error_and_no_black_picture() {
    let workshop = workshop();
    let mut weights = tensors("flux-tiny/transformer/diffusion_pytorch_model.safetensors");
    let bias = weights["proj_out.bias"].affine(0.0, f64::NAN).expect("a tensor");
    weights.insert("proj_out.bias".to_owned(), bias);
    workshop.replace("transformer", weights);
    match workshop.denoised(&request(), &mut Unobserved) {
        Err(StageError::NotFinite { component, step: 1 }) => assert_eq!(component, "transformer"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tensor_that_is_missing_is_named() {
    let workshop = workshop();
    workshop.replace("transformer", HashMap::<String, Tensor>::new());
    match workshop.denoised(&request(), &mut Unobserved) {
        Err(StageError::Missing { component, .. }) => assert_eq!(component, "transformer"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let workshop = workshop();
    let request = request();
    let stages = workshop.model.stages(&request);
    let denoise = &stages[1];
    let nothing = StageInput::default();
    let refused = |plan, rung, request: &ImageRequest, input: &StageInput| {
        let result = workshop.run(plan, rung, request, input, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{result:?}");
    };
    refused(denoise, 0, &request, &nothing);
    refused(&stages[2], 0, &request, &nothing);
    let lone = workshop.model.lone_stage(StageKind::EncodeImage, 64, 64);
    refused(&lone, 0, &request, &nothing);

    // Text of another length, and a latent of another size.
    let StageOutput::Text(text) = workshop
        .run(&stages[0], 0, &request, &nothing, &mut Unobserved)
        .expect("text")
    else {
        panic!("no text")
    };
    let shorter = ImageRequest {
        max_sequence_length: 32,
        ..request.clone()
    };
    refused(
        denoise,
        0,
        &shorter,
        &StageInput {
            text: Some(text.clone()),
            latent: None,
        },
    );
    let latent = workshop.denoised(&request, &mut Unobserved).expect("a latent");
    let wider = ImageRequest {
        width: 96,
        ..request.clone()
    };
    refused(
        denoise,
        0,
        &wider,
        &StageInput {
            text: Some(text),
            latent: Some(latent.clone()),
        },
    );
    refused(
        &stages[2],
        99,
        &request,
        &StageInput {
            text: None,
            latent: Some(latent),
        },
    );
}

#[test]
fn a_latent_that_lies_about_its_size_is_refused() {
    let workshop = workshop();
    let plan = workshop.model.lone_stage(StageKind::Decode, 64, 64);
    for shape in [
        vec![1, 0, 1 << 60, 1 << 60],
        vec![1, 16, 0, 8],
        vec![1, 16, 8, 8],
        vec![16, 8, 8],
        vec![],
    ] {
        let latent = pipelines::HostTensor {
            dtype: pipelines::HostType::F32,
            shape,
            data: Vec::new().into(),
        };
        let input = StageInput {
            text: None,
            latent: Some(latent),
        };
        let result = workshop.run(&plan, 0, &request(), &input, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{result:?}");
    }
}

#[test]
fn stages_name_what_they_need() {
    let workshop = workshop();
    let text_alone = request();
    let names = |request: &ImageRequest| -> Vec<(StageKind, Vec<String>)> {
        let stages = workshop.model.stages(request);
        let of = |c: &[residency::Component]| c.iter().map(|component| component.name.clone()).collect();
        stages
            .iter()
            .map(|stage| (stage.kind, of(&stage.components)))
            .collect()
    };
    let encoders = vec!["text_encoder".to_owned(), "text_encoder_2".to_owned()];
    let one = |name: &str| vec![name.to_owned()];
    assert_eq!(
        names(&text_alone),
        [
            (StageKind::EncodeText, encoders.clone()),
            (StageKind::Denoise, one("transformer")),
            (StageKind::Decode, one("vae"))
        ]
    );
    let image = InitImage {
        width: 64,
        height: 64,
        rgb: vec![0; 64 * 64 * 3].into(),
    };
    let from_image = ImageRequest {
        init_image: Some(image),
        strength: 0.5,
        preview: true,
        ..text_alone.clone()
    };
    assert_eq!(
        names(&from_image),
        [
            (StageKind::EncodeText, encoders),
            (StageKind::EncodeImage, one("vae")),
            (
                StageKind::Denoise,
                vec!["transformer".to_owned(), "vae".to_owned()]
            ),
            (StageKind::Decode, one("vae"))
        ]
    );
    assert_eq!(workshop.model.stages(&from_image)[2].steps, 2);
    for stage in workshop.model.stages(&from_image) {
        assert!(!stage.rungs.is_empty() && stage.rungs.iter().all(|rung| rung.scratch.0 > 0));
        assert!(
            stage
                .rungs
                .windows(2)
                .all(|pair| pair[1].scratch < pair[0].scratch),
            "{:?}",
            stage.rungs
        );
    }
}

#[test]
fn the_text_key_is_of_the_tokens() {
    let workshop = workshop();
    let key = |prompt: &str, tokens: u32| {
        let request = ImageRequest {
            prompt: prompt.to_owned(),
            max_sequence_length: tokens,
            ..request()
        };
        workshop.model.text_key(&request).expect("a key")
    };
    assert_eq!(key("a red circle", 48), key("a  red circle ", 48));
    assert_ne!(key("a red circle", 48), key("a red square", 48));
    assert_ne!(key("a red circle", 48), key("a red circle", 32));
}

#[test]
fn every_wrong_field_is_named() {
    let workshop = workshop();
    let image = InitImage {
        width: 32,
        height: 64,
        rgb: vec![0; 5].into(),
    };
    let wrong = ImageRequest {
        prompt: "x".repeat(100_000),
        width: 63,
        height: 8192,
        steps: 0,
        guidance: f32::NAN,
        max_sequence_length: 513,
        init_image: Some(image),
        strength: 0.0,
        ..request()
    };
    let problems = workshop.model.validate(&wrong).expect_err("all is wrong");
    let fields: Vec<&str> = problems.iter().map(|problem| problem.field.as_str()).collect();
    let expected = [
        "width",
        "height",
        "steps",
        "guidance",
        "max_sequence_length",
        "prompt",
        "init_image",
        "strength",
    ];
    assert_eq!(fields, expected);

    let image = InitImage {
        width: 64,
        height: 64,
        rgb: vec![0; 64 * 64 * 3].into(),
    };
    let too_weak = ImageRequest {
        init_image: Some(image),
        strength: 1e-9,
        ..request()
    };
    // The reference truncates: even the weakest leaves the last step.
    assert!(workshop.model.validate(&too_weak).is_ok());
    assert_eq!(workshop.model.stages(&too_weak)[2].steps, 1);
}

#[test]
fn guidance_counts_in_dev_and_not_in_schnell() {
    for (kind, counts) in [("dev", true), ("schnell", false)] {
        let folder = folder(kind);
        let workshop = Workshop::open(folder.path());
        let denoised = |guidance| {
            let request = ImageRequest {
                guidance,
                steps: 1,
                ..request()
            };
            on_cpu(&workshop.denoised(&request, &mut Unobserved).expect("a latent"))
        };
        let same = crate::numbers::distance(&denoised(1.0), &denoised(5.0)) == 0.0;
        assert_eq!(same, !counts, "{kind}");
    }
}
