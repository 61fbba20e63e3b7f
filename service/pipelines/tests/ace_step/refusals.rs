//! Refusals of requests that a model cannot serve, and of checkpoints that do not fit together.

use candle_core::DType;
use pipelines::{
    Audio, AudioTask, MediaFormat, Medium, Precision, Request, RequestError, StrengthPoint, families,
};

use crate::given::{edit, folder, new_track, of_source, open, request};
use crate::open_model::{F32, OpenModel};

/// The refusals of a request, by field.
fn refused(opened: &OpenModel, request: &Request) -> Vec<RequestError> {
    opened.model.plan(request).err().unwrap_or_default()
}

fn audio(request: &mut Request) -> &mut Audio {
    match &mut request.medium {
        Medium::Audio(audio) => audio,
        other => panic!("{}", other.name()),
    }
}

#[test]
fn requests_out_of_bounds_are_refused_with_their_field() {
    let (turbo, base) = (folder(false), folder(true));
    let (turbo, base) = (open(turbo.path(), &F32), open(base.path(), &F32));
    let repaint = |start_seconds, end_seconds| {
        of_source(AudioTask::Repaint {
            start_seconds,
            end_seconds,
        })
    };
    let extract = |track: &str| {
        of_source(AudioTask::Extract {
            track: track.to_owned(),
        })
    };
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = new_track();
        change(&mut request);
        request
    };
    let clip = |change: &dyn Fn(&mut MediaFormat)| {
        let mut request = of_source(AudioTask::Cover);
        if let Some(clip) = &mut audio(&mut request).init_audio {
            change(&mut clip.format);
        }
        request
    };
    let cases: Vec<(Request, &str, &str)> = vec![
        (with(&|r| audio(r).seconds = 0.0), "seconds", "0.1 to 600"),
        (with(&|r| audio(r).seconds = f32::NAN), "seconds", "NaN"),
        (with(&|r| audio(r).seconds = 601.0), "seconds", "601"),
        (with(&|r| r.steps = 0), "steps", "is 0"),
        (with(&|r| r.guidance = 7.0), "guidance", "distilled"),
        (
            with(&|r| audio(r).beats_per_minute = Some(0)),
            "beats_per_minute",
            "is 0",
        ),
        (with(&|r| audio(r).key = "C\nmajor".into()), "key", "one line"),
        (
            with(&|r| audio(r).lyrics = "la ".repeat(20_000)),
            "lyrics",
            "60000 bytes",
        ),
        (
            with(&|r| audio(r).task = AudioTask::Cover),
            "init_media_id",
            "is missing, and cover",
        ),
        (extract("vocals"), "task", "take a base model"),
        (repaint(1.0, 0.0), "window_start_seconds", "is 1"),
        (repaint(f32::NAN, 0.0), "window_start_seconds", "NaN"),
        (repaint(0.5, 0.25), "window_end_seconds", "more than 0.5"),
        (repaint(0.5, 3.0), "window_end_seconds", "up to 1.00"),
        (
            Request {
                strength: 0.5,
                ..repaint(0.5, 1.0)
            },
            "strength",
            "repaint takes 1",
        ),
        (
            clip(&|format| {
                if let MediaFormat::Audio { channels, .. } = format {
                    *channels = 8;
                }
            }),
            "init_media_id",
            "8 channels",
        ),
        (
            with(&|r| {
                audio(r).reference = audio(&mut of_source(AudioTask::Cover)).init_audio.take();
                if let Some(clip) = &mut audio(r).reference {
                    clip.data = clip.data.slice(..3);
                }
            }),
            "reference_media_id",
            "3 bytes",
        ),
    ];
    let strengths = |task: AudioTask, points: &[(f32, f32)]| {
        let mut request = of_source(task);
        audio(&mut request).strengths = points
            .iter()
            .map(|&(seconds, strength)| StrengthPoint { seconds, strength })
            .collect();
        request
    };
    let of_points = |points: &[(f32, f32)]| strengths(AudioTask::TextToMusic, points);
    let without_source =
        with(&|r| audio(r).strengths = audio(&mut of_points(&[(0.0, 1.0)])).strengths.clone());
    let many: Vec<(f32, f32)> = (0..4097).map(|at| (at as f32, 0.5)).collect();
    let cases: Vec<(Request, &str, &str)> = [
        (with(&|r| r.slots = 0), "slots", "1 to 16"),
        (with(&|r| r.slots = 17), "slots", "is 17"),
        (
            with(&|r| audio(r).decode_from_seconds = -1.0),
            "decode_from_seconds",
            "is -1",
        ),
        (
            with(&|r| audio(r).decode_from_seconds = f32::NAN),
            "decode_from_seconds",
            "NaN",
        ),
        (without_source, "strengths", "without a source (init_media_id)"),
        (
            strengths(AudioTask::Cover, &[(0.0, 1.0)]),
            "strengths",
            "with cover",
        ),
        (of_points(&[(0.0, 1.1)]), "strengths", "1.1"),
        (of_points(&[(0.0, f32::NAN)]), "strengths", "NaN"),
        (of_points(&[(f32::INFINITY, 0.5)]), "strengths", "inf"),
        (of_points(&[(1.0, 0.5), (0.5, 1.0)]), "strengths", "order them"),
        (of_points(&[(0.0, 0.0), (1.0, 0.0)]), "strengths", "0 everywhere"),
        (of_points(&[(0.0, 0.0), (1.0, 1e-30)]), "strengths", "leaves none"),
        (of_points(&many), "strengths", "4097 points"),
    ]
    .into_iter()
    .chain(cases)
    .collect();
    for (request, field, word) in &cases {
        let problems = refused(&turbo, request);
        let found = problems.iter().find(|problem| problem.field == *field);
        let found = found.unwrap_or_else(|| panic!("{field}: {problems:?}"));
        assert!(found.problem.contains(word), "{found}");
    }
    for (request, field, word) in [
        (extract("theremin"), "tracks", "vocals"),
        (
            of_source(AudioTask::Complete { tracks: Vec::new() }),
            "tracks",
            "are 0",
        ),
    ] {
        let problems = refused(&base, &request);
        let [problem] = &problems[..] else {
            panic!("{problems:?}")
        };
        assert!(
            problem.field == field && problem.problem.contains(word),
            "{problem}"
        );
    }
    for accepted in [
        extract("Vocals"),
        new_track(),
        repaint(0.0, 0.0),
        repaint(0.5, f32::INFINITY),
        of_points(&[(0.0, 0.0), (0.5, 1.0), (0.5, 0.25)]),
        with(&|r| (r.slots, audio(r).decode_from_seconds) = (16, 1000.0)),
    ] {
        let problems = refused(&base, &accepted);
        assert_eq!(problems, [], "{accepted:?}");
    }
}

#[test]
fn f16_is_refused_with_the_reason() {
    let folder = folder(false);
    let error = families().open(folder.path(), &Precision::full(DType::F16));
    let error = error.err().expect("a refusal").to_string();
    assert!(error.contains("f16") && error.contains("bf16 and f32"), "{error}");
}

#[test]
fn components_that_do_not_fit_are_refused() {
    for (component, key, value, word) in [
        ("vae", "decoder_input_channels", 5.into(), "tensor"),
        ("transformer", "patch_size", 0.into(), "patches of 0"),
        ("transformer", "attention_bias", true.into(), "biases"),
        ("transformer", "in_channels", 13.into(), "13 channels"),
        (
            "audio_tokenizer",
            "fsq_input_num_quantizers",
            2.into(),
            "2 quantizers",
        ),
        (
            "condition_encoder",
            "hidden_size",
            serde_json::Value::from(u64::MAX),
            "beyond the supported maximum",
        ),
    ] {
        let folder = folder(false);
        edit(&folder.path().join(component).join("config.json"), key, value);
        let error = families().open(folder.path(), &F32);
        let error = error.err().expect("a refusal").to_string();
        assert!(error.contains(word), "{key}: {error}");
    }
}

#[test]
fn a_checkpoint_without_tokenizer_makes_no_covers() {
    let folder = folder(false);
    std::fs::remove_dir_all(folder.path().join("audio_tokenizer")).expect("a folder");
    let opened = open(folder.path(), &F32);
    assert!(refused(&opened, &new_track()).is_empty());
    let problems = refused(&opened, &of_source(AudioTask::Cover));
    assert!(
        problems.len() == 1 && problems[0].problem.contains("audio_tokenizer"),
        "{problems:?}"
    );
}

#[test]
fn fallbacks_are_shorter_and_a_request_is_derived_from_a_latent_shape() {
    let folder = folder(false);
    let opened = open(folder.path(), &F32);
    let model = &opened.model;
    let seconds: Vec<String> = model
        .smaller(&new_track())
        .into_iter()
        .map(|(label, _)| label)
        .collect();
    assert_eq!(seconds, ["0.7 s", "0.5 s", "0.2 s"]);
    assert!(model.smaller(&of_source(AudioTask::Cover)).is_empty());
    assert_eq!(refused(&opened, &model.smallest()), []);
    assert_eq!(refused(&opened, &model.defaults()), []);
    for seconds in [0.1, 1.0, 1.97, 60.0] {
        let asked = request(Audio {
            seconds,
            ..Audio::default()
        });
        let taken = opened.stage(&asked, "decode").takes;
        let again = model.request_of(&taken).expect("a request");
        assert_eq!(opened.stage(&again, "decode").takes, taken, "{seconds}");
    }
}
