//! Behaviour of stages other than numerics: progress, previews, cancellation, invalid input, memos of texts.

use pipelines::{
    HostTensor, HostType, Image, Medium, Observer, Piece, Request, StageError, Unobserved, Values, Video,
};

use crate::given::{folder, from_picture, open, request};
use crate::open_model::{Delivered, F32};

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

#[test]
fn steps_and_previews_are_reported() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let mut watcher = Watcher::default();
    let request = from_picture();
    opened.latent(&request, &mut watcher).expect("a latent");
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
        steps: 40,
        ..request()
    };
    let latent = opened.latent(&request, &mut watcher).expect("a latent");
    let small = crate::open_model::on_cpu(&latent)
        .avg_pool2d(2)
        .expect("a small latent");
    let numbers = crate::numbers::numbers(&small);
    let small = HostTensor {
        dtype: HostType::F32,
        shape: small.dims().to_vec(),
        data: numbers
            .iter()
            .flat_map(|n| n.to_le_bytes())
            .collect::<Vec<u8>>()
            .into(),
    };
    // A quarter of the picture has sides that are invalid for a request.
    let half = Request {
        medium: Medium::Image(Image::of(40, 24)),
        ..request.clone()
    };
    let mut decode = opened.stage(&request, "decode");
    decode.takes[0].shape = small.shape.clone();
    let values = Values::from([("latent".to_owned(), small)]);
    let mut delivered = Delivered::default();
    let result = opened.run(&decode, 0, &half, &values, &mut delivered);
    result.expect("a picture");
    let rgb = &delivered.0[0].data;
    let apart = |preview: &[u8]| -> f64 {
        let sum: u64 = preview
            .iter()
            .zip(rgb)
            .map(|(a, b)| u64::from(a.abs_diff(*b)))
            .sum();
        sum as f64 / rgb.len() as f64
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
fn equal_tokens_have_equal_text_memos() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let key = |prompt: &str, max_sequence_length: u32| {
        let request = Request {
            prompt: prompt.to_owned(),
            max_sequence_length,
            ..request()
        };
        opened.stage(&request, "encode_text").memo.expect("a memo")
    };
    assert_eq!(key("a cat", 512), key("a cat", 100));
    assert_ne!(key("a cat", 512), key("a hat", 512));
    assert_ne!(key("a cat", 512), key("a cat", 8));
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
    // The buffers are those of the longer text.
    let (_, longer) = stages(&guided(Some(&"a square ".repeat(60)), 4.0));
    assert!(longer.rungs[0].scratch > denoise_of_two.rungs[0].scratch);
    assert_ne!(longer.shape, denoise_of_two.shape);

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
fn a_negative_prompt_that_no_encoder_knows_is_refused_where_it_has_an_effect() {
    let folder = folder();
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
}

#[test]
fn bad_input_is_refused() {
    let folder = folder();
    let opened = open(folder.path(), &F32);
    let denoise = opened.stage(&request(), "denoise");
    let tokens = denoise.takes[0].shape[0];
    let value = |name: &str, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let tensor = HostTensor {
            dtype: HostType::F32,
            shape: shape.to_vec(),
            data: vec![0; 4 * count].into(),
        };
        Values::from([(name.to_owned(), tensor)])
    };
    for values in [
        Values::new(),
        value("caption", &[tokens, 31]),
        value("caption", &[tokens + 1, 32]),
        value("caption", &[1, tokens, 32]),
    ] {
        let result = opened.run(&denoise, 0, &request(), &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))));
    }
    let decode = opened.stage(&request(), "decode");
    let film = Request {
        medium: Medium::Video(Video::default()),
        ..request()
    };
    assert!(opened.model.plan(&film).is_err());
    let values = value("latent", &decode.takes[0].shape);
    let result = opened.run(&decode, 0, &film, &values, &mut Unobserved);
    assert!(matches!(result, Err(StageError::BadInput(_))));
    for values in [Values::new(), value("latent", &[1, 16, 6, 8])] {
        let result = opened.run(&decode, 0, &request(), &values, &mut Unobserved);
        assert!(matches!(result, Err(StageError::BadInput(_))));
    }
}

#[test]
fn sampling_continues_from_a_supplied_latent() {
    // A kept latent replaces an encoded picture, without a random draw.
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
