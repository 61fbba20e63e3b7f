//! Behaviour of stages other than numerics: progress, previews, cancellation, invalid input, memos of texts and of references,
//! and refusals of requests.

use pipelines::{
    HostTensor, HostType, Image, InitImage, Medium, Observer, Piece, Request, StageError, Unobserved, Values,
    Video,
};

use crate::device::tolerances;
use crate::given::{
    base_folder, folder, from_picture, of_autoencoder, open, picture, request, with_references,
};
use crate::numbers::{distance, numbers};
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

/// The same request with other reference pictures.
fn referring_to(references: Vec<InitImage>) -> Request {
    let image = Image {
        references,
        ..Image::of(80, 48)
    };
    Request {
        medium: Medium::Image(image),
        ..request()
    }
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
fn a_preview_approximates_the_result() {
    // The prediction of the second to last step is close to the result: its preview resembles the picture at half its
    // size.
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let mut watcher = Watcher::default();
    let request = Request {
        preview: true,
        steps: 80,
        ..request()
    };
    let latent = opened.latent(&request, &mut watcher).expect("a latent");
    let small = of_autoencoder(&on_cpu(&latent));
    let small = small.avg_pool2d(2).expect("a small latent");
    let picture = opened.picture(&small).squeeze(0);
    let row_major = picture.and_then(|x| x.permute((1, 2, 0)));
    let row_major = row_major.and_then(|x| x.contiguous()).expect("a picture");
    let result = numbers(&row_major);
    let apart = |preview: &[u8]| -> f64 {
        assert_eq!(preview.len(), result.len());
        let pairs = preview.iter().zip(&result);
        let sum: f64 = pairs
            .map(|(byte, float)| (f64::from(*byte) - 255.0 * f64::from(*float)).abs())
            .sum();
        sum / result.len() as f64
    };
    let (first, last) = (
        apart(&watcher.previews[0].2),
        apart(&watcher.previews.last().expect("previews").2),
    );
    println!("the first preview is {first:.1} of 255 apart, the last {last:.1}");
    assert!(last < 4.0 && last < first / 3.0, "{first} {last}");
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
fn the_memo_of_a_text_is_of_the_text_and_of_its_length_alone() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let key = |request: Request| opened.stage(&request, "encode_text").memo.expect("a memo");
    let of = |prompt: &str, max_sequence_length: u32| Request {
        prompt: prompt.to_owned(),
        max_sequence_length,
        ..request()
    };
    let sampled_otherwise = Request {
        seed: 8,
        steps: 2,
        ..with_references()
    };
    assert_eq!(key(sampled_otherwise), key(request()));
    assert_ne!(key(of("a cat", 64)), key(of("a hat", 64)));
    // The rows of padding are read too.
    assert_ne!(key(of("a cat", 64)), key(of("a cat", 65)));
    let latent = |max_sequence_length: u32| {
        let request = of("a cat", max_sequence_length);
        on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
    };
    assert!(distance(&latent(65), &latent(64)) > tolerances().pipeline);
}

#[test]
fn a_negative_prompt_is_in_the_text_memo_and_in_the_plan_where_it_has_an_effect() {
    let folder = base_folder();
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
    assert_ne!(text_of_two.memo, stages(&guided(Some(""), 4.0)).0.memo);
    // Whatever the scale, the encodings are the same.
    assert_eq!(text_of_two.memo, stages(&guided(Some("a square"), 2.0)).0.memo);
    assert_eq!(denoise_of_two.takes.len(), denoise.takes.len() + 1);
    assert!(denoise_of_two.rungs[0].scratch > denoise.rungs[0].scratch);
    assert_ne!(denoise_of_two.shape, denoise.shape);
    // Texts have one length, whatever they are.
    let (_, longer) = stages(&guided(Some(&"a square ".repeat(60)), 4.0));
    assert_eq!(longer, denoise_of_two);

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
fn a_text_that_no_encoder_knows_is_refused_where_it_has_an_effect() {
    let folder = base_folder();
    let file = folder.path().join("tokenizer/tokenizer_config.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let tokens = &mut tokenizer["added_tokens_decoder"];
    tokens["5000"] = tokens["317"].clone();
    tokens["5000"]["content"] = "<unknown>".into();
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let opened = open(folder.path(), &F32);
    let guided = |true_guidance: f32| Request {
        negative_prompt: Some("an <unknown> thing".to_owned()),
        true_guidance,
        ..request()
    };
    let refused = opened.model.plan(&guided(4.0)).unwrap_err();
    assert_eq!(refused[0].field, "negative_prompt");
    assert!(opened.model.plan(&guided(1.0)).is_ok());
    let prompted = Request {
        prompt: "an <unknown> thing".to_owned(),
        ..request()
    };
    let refused = opened.model.plan(&prompted).unwrap_err();
    assert_eq!(refused[0].field, "prompt");
}

#[test]
fn bad_input_is_refused() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let request = with_references();
    let denoise = opened.stage(&request, "denoise");
    let takes: Vec<(&str, &[usize])> = denoise
        .takes
        .iter()
        .map(|taken| (taken.name.as_str(), taken.shape.as_slice()))
        .collect();
    let expected: [(&str, &[usize]); 3] = [
        ("caption", &[1, 64, 72]),
        ("reference_0", &[1, 32, 6, 4]),
        ("reference_1", &[1, 32, 4, 5]),
    ];
    assert_eq!(takes, expected);
    let whole: Values = takes
        .iter()
        .map(|&(name, shape)| (name.to_owned(), zeros(shape)))
        .collect();
    for &(name, shape) in &takes {
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
    let latent = |shape: &[usize]| Values::from([("latent".to_owned(), zeros(shape))]);
    let values = latent(&decode.takes[0].shape);
    let result = opened.run(&decode, 0, &film, &values, &mut Unobserved);
    assert!(matches!(result, Err(StageError::BadInput(_))));
    // The second is the autoencoder's, before it is cut into patches.
    for values in [Values::new(), latent(&[1, 8, 6, 10])] {
        let result = opened.run(&decode, 0, &request, &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))));
    }
}

#[test]
fn sampling_continues_from_a_supplied_latent() {
    // A kept latent replaces an encoded picture, and is a reference as that would be.
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

#[test]
fn the_memo_of_a_reference_is_of_its_picture_alone() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let (one, other) = (picture(64, 96), picture(80, 64));
    let request = referring_to(vec![one.clone(), other.clone()]);
    let names: Vec<String> = opened
        .stages(&request)
        .into_iter()
        .map(|plan| plan.name)
        .collect();
    assert_eq!(
        names,
        [
            "encode_text",
            "encode_reference_0",
            "encode_reference_1",
            "denoise",
            "decode"
        ]
    );
    let memo = |request: &Request, number: usize| {
        let stage = opened.stage(request, &format!("encode_reference_{number}"));
        assert!(!stage.per_item && stage.takes.is_empty());
        stage.memo.expect("a memo")
    };
    let changed = Request {
        prompt: "a cat".to_owned(),
        seed: 8,
        steps: 2,
        medium: Medium::Image(Image {
            init_image: Some(picture(48, 32)),
            references: vec![other.clone(), one.clone()],
            ..Image::of(48, 32)
        }),
        ..request.clone()
    };
    assert_eq!(memo(&changed, 1), memo(&request, 0));
    assert_eq!(memo(&changed, 0), memo(&request, 1));
    assert_ne!(memo(&request, 0), memo(&request, 1));
    let inverted = InitImage {
        rgb: one.rgb.iter().map(|byte| !byte).collect(),
        ..one.clone()
    };
    assert_ne!(
        memo(&referring_to(vec![inverted, other.clone()]), 0),
        memo(&request, 0)
    );

    // As the memo says, so are the values.
    let encoded = |request: &Request, number: usize| {
        let stage = opened.stage(request, &format!("encode_reference_{number}"));
        let given = opened.run(&stage, 0, request, &Values::new(), &mut Unobserved);
        let mut given = given.expect("a latent");
        given.remove(&format!("reference_{number}")).expect("a latent")
    };
    assert_eq!(encoded(&changed, 1), encoded(&request, 0));
    assert_eq!(encoded(&changed, 0), encoded(&request, 1));
}

#[test]
fn references_and_their_order_change_the_picture() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let latent = |references: &[InitImage]| {
        let request = referring_to(references.to_vec());
        on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
    };
    let (one, other) = (picture(64, 96), picture(80, 64));
    let both = latent(&[one.clone(), other.clone()]);
    for (what, others) in [
        ("none", vec![]),
        ("one", vec![one.clone()]),
        ("swapped", vec![other, one]),
    ] {
        let apart = distance(&latent(&others), &both);
        println!("{what}: {apart:.2e} apart");
        assert!(apart > 10.0 * tolerances().pipeline, "{what}: {apart:e}");
    }
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
    assert!(opened.model.plan(&request()).is_ok());
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
        ("guidance", with(|request| request.guidance = -1.0)),
        (
            "max_sequence_length",
            with(|request| request.max_sequence_length = 513),
        ),
        // It is distilled.
        (
            "negative_prompt",
            with(|request| request.negative_prompt = Some(String::new())),
        ),
        ("true_guidance", with(|request| request.true_guidance = 4.0)),
        ("references", referring_to(vec![InitImage::of_size((72, 64))])),
    ] {
        assert_eq!(refusal(&opened, &request).0, field);
    }
    let (_, problem) = refusal(&opened, &with(|request| request.guidance = 3.5));
    assert!(
        problem.contains("distilled") && problem.contains("set it to 0"),
        "{problem}"
    );
}

#[test]
fn requests_of_a_base_model_are_refused_by_field() {
    let folder = base_folder();
    let opened = open(folder.path(), &F32);
    let guided = Request {
        negative_prompt: Some("a square".to_owned()),
        true_guidance: 4.0,
        ..request()
    };
    assert!(opened.model.plan(&guided).is_ok());
    let with = |change: fn(&mut Request)| {
        let mut request = guided.clone();
        change(&mut request);
        request
    };
    for (field, request) in [
        ("true_guidance", with(|request| request.true_guidance = f32::NAN)),
        (
            "negative_prompt",
            with(|request| request.negative_prompt = Some("x".repeat(100_000))),
        ),
        ("guidance", with(|request| request.guidance = 4.0)),
    ] {
        assert_eq!(refusal(&opened, &request).0, field);
    }
    let (_, problem) = refusal(&opened, &with(|request| request.guidance = 4.0));
    assert!(problem.contains("its guidance is true_guidance"), "{problem}");
}

#[test]
fn eight_references_are_taken_and_small_ones_are_not() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let several = |count: usize| referring_to(vec![InitImage::of_size((64, 64)); count]);
    assert_eq!(opened.model.most_references(), 8);
    let plan = opened.model.plan(&several(8)).expect("a valid request");
    assert_eq!(plan.len(), 8 + 3);
    let (field, problem) = refusal(&opened, &several(9));
    assert_eq!(field, "references");
    assert!(problem.contains("are 9; this model takes 8"), "{problem}");

    for (width, height) in [(63, 64), (64, 48), (64, 513)] {
        let refused = opened.model.reference_fit(width, height);
        let refused = refused.expect_err("a picture that is too small or too narrow");
        assert_eq!(refused.field, "references", "{width}x{height}");
    }
    let fit = opened.model.reference_fit(64, 79).expect("a size");
    assert_eq!((fit.scaled, fit.size), ((64, 79), (64, 64)));
}
