//! Behaviour of stages other than numerics: progress, previews, cancellation, invalid input, memos of texts and of pictures,
//! and refusals of requests.

use candle_core::Tensor;
use pipelines::{
    HostTensor, HostType, Image, InitImage, Medium, Observer, Piece, Request, StageError, Unobserved, Values,
    Video,
};

use crate::device::tolerances;
use crate::given::{
    EDIT_PLUS, folder, folder_of, from_picture, guided, open, picture, request, seen, with_references,
};
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};

/// Counts steps, wants every preview, and cancels after a number of steps.
#[derive(Default)]
struct Watcher {
    steps: Vec<(u32, u32)>,
    previews: Vec<(u32, u32, Vec<u8>)>,
    cancel_after: Option<usize>,
}

impl Observer for Watcher {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        self.previews.push((width, height, rgb));
    }
    fn deliver(&mut self, piece: Piece) {
        panic!("{:?} before the decode", piece.format);
    }
    fn cancelled(&self) -> bool {
        self.cancel_after.is_some_and(|most| self.steps.len() >= most)
    }
}

/// Zeros of this shape.
fn zeros(shape: &[usize]) -> HostTensor {
    let count: usize = shape.iter().product();
    HostTensor {
        dtype: HostType::F32,
        shape: shape.to_vec(),
        data: vec![0; 4 * count].into(),
    }
}

/// A request that edits these pictures.
fn editing(references: Vec<InitImage>) -> Request {
    let image = Image {
        seen: seen(&references),
        references,
        ..Image::of(80, 48)
    };
    Request {
        medium: Medium::Image(image),
        ..request()
    }
}

fn latent(opened: &OpenModel, request: &Request) -> Tensor {
    on_cpu(&opened.latent(request, &mut Unobserved).expect("a latent"))
}

#[test]
fn steps_and_previews_are_reported() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let mut watcher = Watcher::default();
    opened.latent(&from_picture(), &mut watcher).expect("a latent");
    // Five steps at a strength of 0.8 begin at the second; the last has no preview, the picture follows.
    assert_eq!(watcher.steps, [(1, 4), (2, 4), (3, 4), (4, 4)]);
    assert_eq!(watcher.previews.len(), 3);
    for (width, height, rgb) in &watcher.previews {
        assert_eq!((*width, *height), (40, 24));
        assert_eq!(rgb.len(), 3 * 40 * 24);
    }
}

#[test]
fn a_cancelled_request_ends_between_steps() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let mut watcher = Watcher {
        cancel_after: Some(1),
        ..Watcher::default()
    };
    let result = opened.latent(&request(), &mut watcher);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(watcher.steps.len(), 1);
}

#[test]
fn a_negative_prompt_is_in_the_text_memo_and_in_the_plan_where_it_has_an_effect() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let guided = |negative: Option<&str>, true_guidance: f32| Request {
        negative_prompt: negative.map(str::to_owned),
        true_guidance,
        ..request()
    };
    let stages = |request: &Request| {
        let stage = |name| opened.stage(request, name);
        (stage("encode_text"), stage("denoise"))
    };
    let (text, denoise) = stages(&request());
    assert_eq!(text.gives, ["caption"]);
    for off in [guided(Some("a square"), 1.0), guided(None, 4.0)] {
        assert_eq!(stages(&off), (text.clone(), denoise.clone()));
    }
    let (text_of_two, denoise_of_two) = stages(&guided(Some("a square"), 4.0));
    assert_eq!(text_of_two.gives, ["caption", "negative_caption"]);
    assert_ne!(text_of_two.memo, text.memo);
    assert_ne!(text_of_two.memo, stages(&guided(Some(" "), 4.0)).0.memo);
    // Whatever the scale, the encodings are the same.
    assert_eq!(text_of_two.memo, stages(&guided(Some("a square"), 2.0)).0.memo);
    assert_eq!(denoise_of_two.takes.len(), denoise.takes.len() + 1);
    assert!(denoise_of_two.rungs[0].scratch > denoise.rungs[0].scratch);
    assert_ne!(denoise_of_two.shape, denoise.shape);

    let long = Request {
        negative_prompt: Some("a square ".repeat(60)),
        true_guidance: 4.0,
        max_sequence_length: 32,
        ..request()
    };
    let left_out = opened.model.left_out(&long);
    let left_out: Vec<&str> = left_out.iter().map(|text| &*text.field).collect();
    assert_eq!(left_out, ["negative_prompt"]);
}

#[test]
fn the_pictures_that_are_edited_are_in_the_identity_of_the_text_and_encoded_once() {
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    let (one, other) = (picture(64, 96), picture(96, 64));
    let request = editing(vec![one.clone(), other.clone()]);
    let plans = opened.stages(&request);
    let names: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    let expected = [
        "encode_picture_0",
        "encode_picture_1",
        "encode_text",
        "encode_reference_0",
        "encode_reference_1",
        "denoise",
        "decode",
    ];
    assert_eq!(names, expected);
    let memo = |request: &Request, name: &str| {
        let stage = opened.stage(request, name);
        assert!(!stage.per_item);
        stage.memo.expect("a memo")
    };
    let swapped = Request {
        prompt: "a cat".to_owned(),
        seed: 8,
        ..editing(vec![other.clone(), one.clone()])
    };
    for of in ["encode_picture", "encode_reference"] {
        let (first, second) = (format!("{of}_0"), format!("{of}_1"));
        assert_eq!(memo(&swapped, &second), memo(&request, &first));
        assert_eq!(memo(&swapped, &first), memo(&request, &second));
        assert_ne!(memo(&request, &first), memo(&request, &second));
    }
    let text = opened.stage(&request, "encode_text");
    let taken: Vec<&str> = text.takes.iter().map(|taken| taken.name.as_str()).collect();
    assert_eq!(taken, ["picture_0", "picture_1"]);
    assert_eq!(text.takes[0].shape[1], 64);

    let both = latent(&opened, &request);
    for (what, others) in [("one", vec![one.clone()]), ("swapped", vec![other, one])] {
        let apart = distance(&latent(&opened, &editing(others)), &both);
        println!("{what}: {apart:.2e} apart");
        assert!(apart > 10.0 * tolerances().pipeline, "{what}: {apart:e}");
    }
}

#[test]
fn bad_input_is_refused() {
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    let request = with_references();
    let denoise = opened.stage(&request, "denoise");
    let whole: Values = denoise
        .takes
        .iter()
        .map(|taken| (taken.name.clone(), zeros(&taken.shape)))
        .collect();
    assert_eq!(whole.len(), 4);
    for taken in &denoise.takes {
        let (name, shape) = (taken.name.as_str(), taken.shape.as_slice());
        let mut missing = whole.clone();
        missing.remove(name);
        let mut larger = shape.to_vec();
        larger[2] += 1;
        for other in [&larger, &shape[1..].to_vec()] {
            let mut others = whole.clone();
            others.insert(name.to_owned(), zeros(other));
            let result = opened.run(&denoise, 0, &request, &others, &mut Unobserved);
            assert!(matches!(result, Err(StageError::BadInput(_))), "{name} {other:?}");
        }
        let result = opened.run(&denoise, 0, &request, &missing, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{name}");
    }
    let decode = opened.stage(&request, "decode");
    let film = Request {
        medium: Medium::Video(Video::default()),
        ..request.clone()
    };
    assert!(opened.model.plan(&film).is_err());
    let values = |shape: &[usize]| Values::from([("latent".to_owned(), zeros(shape))]);
    let result = opened.run(
        &decode,
        0,
        &film,
        &values(&decode.takes[0].shape),
        &mut Unobserved,
    );
    assert!(matches!(result, Err(StageError::BadInput(_))));
    for values in [Values::new(), values(&[1, 4, 3, 5])] {
        let result = opened.run(&decode, 0, &request, &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))));
    }
    // A picture whose pixels are not there.
    let without = editing(vec![InitImage::of_size((64, 64))]);
    for name in ["encode_picture_0", "encode_reference_0"] {
        let stage = opened.stage(&without, name);
        let result = opened.run(&stage, 0, &without, &Values::new(), &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))), "{name}");
    }
}

#[test]
fn sampling_continues_from_a_supplied_latent() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let request = Request {
        from_values: true,
        strength: 0.5,
        steps: 4,
        ..request()
    };
    let plans = opened.stages(&request);
    let names: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    assert_eq!(names, ["encode_text", "denoise", "decode"]);
    assert_eq!(plans[1].steps, 2);
    let given = opened.run(&plans[0], 0, &request, &Values::new(), &mut Unobserved);
    let mut values = given.expect("an encoding");
    let result = opened.run(&plans[1], 0, &request, &values, &mut Unobserved);
    assert!(
        matches!(result, Err(StageError::BadInput(_))),
        "nothing was brought"
    );
    let latent = opened.latent(&crate::given::request(), &mut Unobserved);
    values.insert("latent".to_owned(), latent.expect("a latent"));
    let mut watcher = Watcher::default();
    let given = opened.run(&plans[1], 0, &request, &values, &mut watcher);
    assert_eq!(given.expect("a latent").len(), 1);
    assert_eq!(watcher.steps, [(1, 2), (2, 2)]);
}

/// The field of the only problem of a request, and the problem.
fn refusal(opened: &OpenModel, request: &Request) -> (String, String) {
    let problems = opened.model.plan(request).expect_err("a refusal");
    let [problem] = problems.as_slice() else {
        panic!("{problems:?}")
    };
    (problem.field.clone(), problem.problem.clone())
}

#[test]
fn requests_out_of_bounds_are_refused_by_field() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    assert!(opened.model.plan(&guided()).is_ok());
    let with = |change: fn(&mut Request)| {
        let mut request = request();
        change(&mut request);
        request
    };
    let narrow = Request {
        medium: Medium::Image(Image::of(40, 48)),
        ..request()
    };
    for (field, request) in [
        ("width", narrow),
        ("steps", with(|request| request.steps = 0)),
        ("guidance", with(|request| request.guidance = 3.5)),
        (
            "max_sequence_length",
            with(|request| request.max_sequence_length = 513),
        ),
        ("true_guidance", with(|request| request.true_guidance = f32::NAN)),
        ("references", editing(vec![picture(64, 64)])),
    ] {
        assert_eq!(refusal(&opened, &request).0, field);
    }
    let (_, problem) = refusal(&opened, &with(|request| request.guidance = 3.5));
    assert!(problem.contains("its guidance is true_guidance"), "{problem}");
}

#[test]
fn as_many_pictures_are_edited_as_the_model_was_trained_with() {
    for (class, most) in [("QwenImageEditPipeline", 1), (EDIT_PLUS, 3)] {
        let folder = folder_of(class);
        let opened = open(folder.path(), &F32);
        let several = |count: usize| editing(vec![InitImage::of_size((64, 64)); count]);
        let plan = opened.model.plan(&several(most)).expect("a valid request");
        assert_eq!(plan.len(), 2 * most + 3);
        for wrong in [0, most + 1] {
            assert_eq!(refusal(&opened, &several(wrong)).0, "references", "{class}");
        }
        let long = Request {
            prompt: "a red circle ".repeat(2000),
            ..several(1)
        };
        let (field, problem) = refusal(&opened, &long);
        assert_eq!(field, "prompt");
        assert!(problem.contains("at most"), "{problem}");
    }
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    let unseen = Request {
        medium: Medium::Image(Image {
            references: vec![InitImage::of_size((64, 64))],
            ..Image::of(80, 48)
        }),
        ..request()
    };
    let (field, problem) = refusal(&opened, &unseen);
    assert_eq!(field, "references");
    assert!(problem.contains("sees them"), "{problem}");
    for (width, height) in [(0, 64), (64, 0), (4000, 32)] {
        let refused = opened.model.reference_fit(width, height);
        let refused = refused.expect_err("a picture of no size, or too narrow");
        assert_eq!(refused.field, "references", "{width}x{height}");
    }
}

#[test]
fn every_prompt_that_is_planned_is_short_enough_to_be_run() {
    let folder = folder_of(EDIT_PLUS);
    let opened = open(folder.path(), &F32);
    let of_words = |words: usize| Request {
        prompt: "a".repeat(words),
        ..editing(vec![picture(64, 64)])
    };
    let is_planned = |words: &usize| opened.model.plan(&of_words(*words)).is_ok();
    let most = (3000..4100)
        .rev()
        .find(is_planned)
        .expect("a prompt that is planned");
    let longest = of_words(most);
    let mut values = Values::new();
    for plan in opened.stages(&longest).iter().take(2) {
        let given = opened.run(plan, 0, &longest, &values, &mut Unobserved);
        values.extend(given.unwrap_or_else(|error| panic!("{}: {error}", plan.name)));
    }
    assert!(values.contains_key("caption"));
}
