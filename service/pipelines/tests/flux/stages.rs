//! Behaviour of stages other than numerics: steps, previews, cancellation, and errors.

use std::cell::Cell;

use gpu::ComponentTensors;
use pipelines::flux::FluxModel;
use pipelines::{
    Audio, HostTensor, HostType, Image, InitImage, Medium, Memo, Model, Observer, Piece, Request, Role,
    StageError, StagePlan, Unobserved, ValueShape, Values, Video,
};

use crate::given::{black, folder, from_image, open, request, sized};
use crate::numbers::{resident, tensors};
use crate::open_model::{Delivered, OpenModel, on_cpu};

/// Records calls, wants every preview, and cancels after a number of checks.
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
    fn deliver(&mut self, piece: Piece) {
        panic!("{:?} before the decode", piece.format);
    }
    fn cancelled(&self) -> bool {
        self.asked.set(self.asked.get() + 1);
        self.cancel_at.is_some_and(|at| self.asked.get() >= at)
    }
}

fn opened() -> OpenModel<FluxModel> {
    open(folder("dev").path())
}

#[test]
fn steps_and_previews_are_reported() {
    let opened = opened();
    let mut notes = Notes::default();
    let plain = opened.latent(&request(), &mut notes).expect("a latent");
    assert_eq!(notes.steps, [(1, 4), (2, 4), (3, 4), (4, 4)]);
    assert!(notes.previews.is_empty());

    let with_previews = Request {
        preview: true,
        ..request()
    };
    let mut notes = Notes::default();
    let watched = opened.latent(&with_previews, &mut notes).expect("a latent");
    assert_eq!(
        notes.previews,
        [(32, 32, 32 * 32 * 3); 3],
        "half the size, and none of the last step"
    );
    assert_eq!(plain, watched, "who watches changes nothing");
}

#[test]
fn every_cancellation_check_ends_the_stage() {
    let opened = opened();
    let mut notes = Notes::default();
    opened.latent(&request(), &mut notes).expect("a latent");
    // At least four steps of four blocks, and a check before each step.
    let questions = notes.asked.get();
    assert!(questions > 4 * 5, "{questions}");
    for at in 1..=questions {
        let mut notes = Notes {
            cancel_at: Some(at),
            ..Notes::default()
        };
        let result = opened.latent(&request(), &mut notes);
        assert!(
            matches!(result, Err(StageError::Cancelled)),
            "question {at}: {result:?}"
        );
        assert_eq!(notes.asked.get(), at, "it goes on after it was told to stop");
    }
}

#[test]
fn a_result_that_is_not_finite_is_an_error() {
    let opened = opened();
    let mut weights = tensors("flux-tiny/transformer/diffusion_pytorch_model.safetensors");
    let bias = weights["proj_out.bias"].affine(0.0, f64::NAN).expect("a tensor");
    weights.insert("proj_out.bias".to_owned(), bias);
    opened.replace("transformer", resident(&weights));
    match opened.latent(&request(), &mut Unobserved) {
        Err(StageError::NotFinite { component, step: 1 }) => assert_eq!(component, "transformer"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let opened = opened();
    opened.replace("transformer", ComponentTensors::default());
    match opened.latent(&request(), &mut Unobserved) {
        Err(StageError::Missing { component, .. }) => assert_eq!(component, "transformer"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn inputs_of_another_shape_are_refused() {
    let opened = opened();
    let request = request();
    let [encode_text, denoise, decode] = &opened.stages(&request)[..] else {
        panic!("other stages")
    };
    let refused = |plan: &StagePlan, rung, request: &Request, values: &Values, words: &str| match opened.run(
        plan,
        rung,
        request,
        values,
        &mut Unobserved,
    ) {
        Err(StageError::BadInput(problem)) => assert!(problem.contains(words), "{words}: {problem}"),
        other => panic!("{words}: {other:?}"),
    };
    let nothing = Values::new();
    refused(denoise, 0, &request, &nothing, "takes pooled");
    refused(decode, 0, &request, &nothing, "takes latent");
    let encode_image = opened.stage(&from_image(black(64, 64), 0.5), "encode_image");
    refused(&encode_image, 0, &request, &nothing, "no image to encode");
    let unknown = StagePlan {
        name: "upscale".to_owned(),
        ..decode.clone()
    };
    refused(&unknown, 0, &request, &nothing, "no stage upscale");

    // Text of another length, and a latent of another size.
    let text = opened.run(encode_text, 0, &request, &nothing, &mut Unobserved);
    let text = text.expect("text");
    let shorter = Request {
        max_sequence_length: 32,
        ..request.clone()
    };
    let denoise_shorter = opened.stage(&shorter, "denoise");
    refused(&denoise_shorter, 0, &shorter, &text, "sequence of shape [1, 48");
    let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
    let wider = Request {
        from_values: true,
        ..sized(96, 64)
    };
    let denoise_wider = opened.stage(&wider, "denoise");
    refused(&denoise_wider, 0, &wider, &values, "latent of shape");
    refused(&denoise_wider, 0, &wider, &text, "takes latent");
    let decode_wider = opened.stage(&wider, "decode");
    refused(&decode_wider, 0, &wider, &values, "latent of shape");
    refused(decode, 99, &request, &values, "no rung 99");
}

#[test]
fn a_latent_whose_shape_contradicts_its_data_is_refused() {
    let opened = opened();
    let plan = opened.stage(&request(), "decode");
    let expected = plan.takes[0].shape.clone();
    for shape in [
        vec![1, 0, 1 << 60, 1 << 60],
        vec![1, 16, 0, 8],
        vec![1, 16, 8, 8],
        vec![16, 8, 8],
        vec![],
        expected,
    ] {
        let latent = HostTensor {
            dtype: HostType::F32,
            shape,
            data: Vec::new().into(),
        };
        let values = Values::from([("latent".to_owned(), latent)]);
        let result = opened.run(&plan, 0, &request(), &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{result:?}");
    }
}

#[test]
fn stages_name_their_components() {
    let opened = opened();
    let needs = |request: &Request| -> Vec<(String, Role, Vec<String>)> {
        let stages = opened.stages(request).into_iter();
        stages
            .map(|stage| (stage.name, stage.role, stage.components))
            .collect()
    };
    let stage = |name: &str, role, components: &[&str]| {
        let components = components.iter().map(|&name| name.to_owned()).collect();
        (name.to_owned(), role, components)
    };
    assert_eq!(
        needs(&request()),
        [
            stage("encode_text", Role::Encode, &["text_encoder", "text_encoder_2"]),
            stage("denoise", Role::Sample, &["transformer"]),
            stage("decode", Role::Decode, &["vae"]),
        ]
    );
    let watched = Request {
        preview: true,
        ..from_image(black(64, 64), 0.5)
    };
    assert_eq!(
        needs(&watched),
        [
            stage("encode_text", Role::Encode, &["text_encoder", "text_encoder_2"]),
            stage("encode_image", Role::Encode, &["vae"]),
            stage("denoise", Role::Sample, &["transformer", "vae"]),
            stage("decode", Role::Decode, &["vae"]),
        ]
    );
    assert_eq!(opened.stage(&watched, "denoise").steps, 2);
    for stage in opened.stages(&watched) {
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
fn each_stage_takes_values_that_earlier_stages_give() {
    let opened = opened();
    let brought = Request {
        from_values: true,
        ..request()
    };
    for (request, takes_of_denoise) in [
        (request(), &["pooled", "sequence"][..]),
        (from_image(black(64, 64), 0.5), &["pooled", "sequence", "latent"]),
        (brought, &["pooled", "sequence", "latent"]),
    ] {
        let denoise = opened.stage(&request, "denoise");
        let taken: Vec<&str> = denoise.takes.iter().map(|value| value.name.as_str()).collect();
        assert_eq!(taken, takes_of_denoise);
        let mut values = match request.from_values {
            true => opened
                .sampled(&self::request(), &mut Unobserved)
                .expect("a latent"),
            false => Values::new(),
        };
        for plan in opened.stages(&request) {
            assert_eq!(plan.per_item, plan.name != "encode_text");
            for ValueShape { name, shape } in &plan.takes {
                assert_eq!(&values[name].shape, shape, "{name} that {} takes", plan.name);
            }
            let given = opened.run(&plan, 0, &request, &values, &mut Unobserved);
            values.extend(given.expect("a stage"));
        }
    }
}

#[test]
fn a_kept_latent_runs_only_the_remaining_schedule() {
    let opened = opened();
    let kept = opened.sampled(&request(), &mut Unobserved).expect("a latent");
    let brought = Request {
        from_values: true,
        strength: 0.5,
        ..request()
    };
    let names: Vec<String> = opened
        .stages(&brought)
        .into_iter()
        .map(|stage| stage.name)
        .collect();
    assert_eq!(names, ["encode_text", "denoise", "decode"]);
    let denoise = opened.stage(&brought, "denoise");
    assert_eq!((denoise.steps, opened.stage(&request(), "denoise").steps), (2, 4));
    let mut notes = Notes::default();
    let again = opened
        .run(&denoise, 0, &brought, &kept, &mut notes)
        .expect("a latent");
    assert_eq!(notes.steps, [(1, 2), (2, 2)]);
    assert_ne!(again["latent"], kept["latent"]);

    // With a supplied latent, a picture is not encoded.
    let beside = Request {
        from_values: true,
        ..from_image(black(64, 64), 0.5)
    };
    assert_eq!(opened.stages(&beside), opened.stages(&brought));
    let same = opened
        .run(&denoise, 0, &beside, &kept, &mut Unobserved)
        .expect("a latent");
    assert_eq!(same, again);

    // Without a starting point, strength is ignored.
    let from_noise = Request {
        strength: 0.5,
        ..request()
    };
    assert_eq!(opened.stages(&from_noise), opened.stages(&request()));
}

#[test]
fn a_request_is_derived_from_the_shape_of_a_latent() {
    let opened = opened();
    let wide = sized(96, 48);
    let plan = opened.stage(&wide, "decode");
    let found = opened
        .model
        .request_of(&plan.takes)
        .expect("a latent of this model");
    let defaults = opened.model.defaults();
    assert_eq!(
        found,
        Request {
            medium: wide.medium.clone(),
            ..defaults
        }
    );
    assert_eq!(opened.stage(&found, "decode"), plan);

    let encoded = &opened.stage(&wide, "denoise").takes;
    let shaped = |shape: &[usize]| vec![ValueShape::new("latent", shape.to_vec())];
    let channels = plan.takes[0].shape[1];
    for other in [
        Vec::new(),
        encoded.clone(),
        [plan.takes.clone(), plan.takes.clone()].concat(),
        shaped(&[1, channels + 1, 8, 8]),
        shaped(&[2, channels, 8, 8]),
        shaped(&[1, channels, 8]),
        shaped(&[1, channels, 8, usize::MAX]),
        vec![ValueShape::new("sequence", plan.takes[0].shape.clone())],
    ] {
        assert_eq!(opened.model.request_of(&other), None, "{other:?}");
    }
    // Impossible sizes are refused by the plan.
    for (h, w, fields) in [
        (0, 8, &["height"][..]),
        (7, 8, &["height"]),
        (1026, 1026, &["width", "height"]),
    ] {
        let odd = opened
            .model
            .request_of(&shaped(&[1, channels, h, w]))
            .expect("a latent");
        assert_eq!(wrong_fields(&opened, &odd), fields, "{h}x{w}");
    }
}

#[test]
fn smaller_requests_are_valid_and_smaller() {
    let opened = opened();
    let init = InitImage {
        rgb: (0..3 * 128 * 64).map(|byte| (byte % 251) as u8).collect(),
        ..black(128, 64)
    };
    let brought = Request {
        from_values: true,
        ..sized(128, 64)
    };
    for request in [sized(128, 64), from_image(init, 0.5), brought] {
        let smaller = opened.model.smaller(&request);
        let labels: Vec<&str> = smaller.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, ["96x48", "64x32", "32x16"]);
        let mut most = opened.stage(&request, "decode").rungs[0].scratch;
        for (label, smaller) in smaller {
            let (width, height) = smaller.medium.size().expect("a picture");
            assert_eq!(label, format!("{width}x{height}"));
            let scratch = opened.stage(&smaller, "decode").rungs[0].scratch;
            assert!(scratch < most, "{label}");
            most = scratch;
            assert_eq!(names(&opened, &smaller), names(&opened, &request), "{label}");
            let rest = Request {
                medium: request.medium.clone(),
                ..smaller
            };
            assert_eq!(rest, request, "nothing but the size differs");
        }
    }
    assert!(opened.model.smaller(&sized(16, 16)).is_empty());
}

/// Names of the stages of a request.
fn names(opened: &OpenModel<FluxModel>, request: &Request) -> Vec<String> {
    opened
        .stages(request)
        .into_iter()
        .map(|stage| stage.name)
        .collect()
}

#[test]
fn the_smallest_request_runs_through_all_stages_in_one_step() {
    for kind in ["dev", "schnell"] {
        let folder = folder(kind);
        let opened = open(folder.path());
        let smallest = opened.model.smallest();
        assert_eq!(smallest.medium, Medium::Image(Image::of(16, 16)));
        assert_eq!(opened.stage(&smallest, "denoise").steps, 1);
        let values = opened.sampled(&smallest, &mut Unobserved).expect("a latent");
        let mut delivered = Delivered::default();
        let decode = opened.stage(&smallest, "decode");
        opened
            .run(&decode, 0, &smallest, &values, &mut delivered)
            .expect("a picture");
        let [piece] = &delivered.0[..] else {
            panic!("{} pieces", delivered.0.len())
        };
        assert!(piece.is_last() && smallest.medium.is_made_as(&piece.format));
    }
}

#[test]
fn the_text_memo_depends_on_the_prompt_and_its_longest_length() {
    let opened = opened();
    let memo = |prompt: &str, tokens: u32| {
        let request = Request {
            prompt: prompt.to_owned(),
            max_sequence_length: tokens,
            ..request()
        };
        let memo = opened.stage(&request, "encode_text").memo;
        memo.expect("a memo")
    };
    assert_eq!(memo("a red circle", 48), memo("a red circle", 48));
    assert_ne!(memo("a red circle", 48), memo("a red square", 48));
    assert_ne!(memo("a red circle", 48), memo("a red circle", 32));

    // No other field affects the memo, and no other stage has one.
    let other = Request {
        seed: 8,
        steps: 3,
        guidance: 1.0,
        ..from_image(black(96, 48), 0.5)
    };
    let memos = |request: &Request| -> Vec<Option<Memo>> {
        let stages = opened.stages(request).into_iter();
        stages.map(|stage| stage.memo).collect()
    };
    let (of_one, of_other) = (memos(&request()), memos(&other));
    assert!(of_one[0].is_some() && of_one[0] == of_other[0]);
    assert!(of_one[1..].iter().chain(&of_other[1..]).all(Option::is_none));
}

#[test]
fn a_negative_prompt_is_in_the_text_memo_and_in_the_plan_where_it_has_an_effect() {
    let opened = opened();
    let guided = |negative: Option<&str>, true_guidance: f32| Request {
        negative_prompt: negative.map(str::to_owned),
        true_guidance,
        ..request()
    };
    let text = |request: &Request| opened.stage(request, "encode_text");
    let plain = text(&request());
    for off in [guided(Some("a square"), 1.0), guided(None, 4.0)] {
        assert_eq!(text(&off), plain);
        assert_eq!(opened.stage(&off, "denoise"), opened.stage(&request(), "denoise"));
    }
    let one = guided(Some("a square"), 4.0);
    assert_ne!(text(&one).memo, plain.memo);
    assert_ne!(text(&one).memo, text(&guided(Some(""), 4.0)).memo);
    // Whatever the scale, the encodings are the same.
    assert_eq!(text(&one).memo, text(&guided(Some("a square"), 2.0)).memo);

    let (denoise, before) = (opened.stage(&one, "denoise"), opened.stage(&request(), "denoise"));
    assert_eq!(denoise.takes.len(), before.takes.len() + 2);
    assert!(denoise.rungs[0].scratch > before.rungs[0].scratch);
    assert!(opened.model.plan(&guided(Some("x"), f32::NAN)).is_err());
}

#[test]
fn a_negative_prompt_that_no_encoder_knows_is_refused_where_it_has_an_effect() {
    let folder = folder("schnell");
    let file = folder.path().join("tokenizer_2/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let tokens = tokenizer["added_tokens"].as_array_mut().unwrap();
    let mut added = tokens[0].clone();
    (added["id"], added["content"]) = (5000.into(), "<unknown>".into());
    tokens.push(added);
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let opened = open(folder.path());
    let guided = |true_guidance: f32| Request {
        negative_prompt: Some("an <unknown> thing".to_owned()),
        true_guidance,
        max_sequence_length: 16,
        ..request()
    };
    assert_eq!(wrong_fields(&opened, &guided(4.0)), ["negative_prompt"]);
    assert!(opened.model.plan(&guided(1.0)).is_ok());
}

/// Names of the fields that planning rejects.
fn wrong_fields(opened: &OpenModel<FluxModel>, request: &Request) -> Vec<String> {
    let problems = opened.model.plan(request).expect_err("something is wrong");
    problems.into_iter().map(|problem| problem.field).collect()
}

#[test]
fn every_wrong_field_is_named() {
    let opened = opened();
    let image = InitImage {
        rgb: vec![0; 5].into(),
        ..black(32, 64)
    };
    let wrong = Request {
        prompt: "x".repeat(100_000),
        steps: 0,
        guidance: f32::NAN,
        max_sequence_length: 513,
        strength: 0.0,
        medium: Medium::Image(Image {
            width: 63,
            height: 8192,
            init_image: Some(image),
            ..Image::default()
        }),
        ..request()
    };
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
    assert_eq!(wrong_fields(&opened, &wrong), expected);

    let too_weak = from_image(black(64, 64), 1e-9);
    // The reference truncates: even the smallest strength leaves the last step.
    assert_eq!(opened.stage(&too_weak, "denoise").steps, 1);

    // Strength is validated for every starting point.
    for strength in [0.0, -0.5, 1.5, f32::NAN] {
        let brought = Request {
            from_values: true,
            strength,
            ..request()
        };
        assert_eq!(wrong_fields(&opened, &brought), ["strength"], "{strength}");
    }
}

#[test]
fn a_request_of_another_medium_is_refused() {
    let opened = opened();
    let film = Medium::Video(Video {
        width: 64,
        height: 64,
        frames: 5,
        frames_per_second: 24.0,
        ..Video::default()
    });
    let track = Medium::Audio(Audio {
        seconds: 1.0,
        ..Audio::default()
    });
    for (medium, name) in [(film, "video"), (track, "audio")] {
        let other = Request { medium, ..request() };
        let problems = opened.model.plan(&other).expect_err("another medium");
        let [problem] = &problems[..] else {
            panic!("{problems:?}")
        };
        assert_eq!(problem.field, "model");
        assert!(problem.problem.contains(name), "{problem}");
        assert!(opened.model.planned("denoise", &other).is_empty());
        let decode = opened.stage(&request(), "decode");
        let values = opened.sampled(&request(), &mut Unobserved).expect("a latent");
        let result = opened.run(&decode, 0, &other, &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{result:?}");
    }
}

#[test]
fn guidance_changes_dev_and_not_schnell() {
    for (kind, counts) in [("dev", true), ("schnell", false)] {
        let folder = folder(kind);
        let opened = open(folder.path());
        let denoised = |guidance| {
            let request = Request {
                guidance,
                steps: 1,
                ..request()
            };
            on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
        };
        let same = crate::numbers::distance(&denoised(1.0), &denoised(5.0)) == 0.0;
        assert_eq!(same, !counts, "{kind}");
    }
}
