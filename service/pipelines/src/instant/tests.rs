use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant as Moment};

use candle_core::{DType, Device};
use gpu::{ComponentTensors, LoadPlan};
use residency::Bytes;

use super::*;
use crate::Preset;
use crate::{Clip, InitImage, Request};
use crate::{Kept, MAX_SLOTS, Memo, Quantization};
use crate::{MediaFormat, Piece, SOUND_OF_FILM};
use crate::{Observer, StageError, StageRun, Unobserved};
use crate::{Role, StagePlan, ValueShape, Values};

const PRECISION: Precision = Precision::full(DType::F32);

fn sample(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/instant");
    tests.join(format!("{name}.instant.json"))
}

fn open(path: &Path) -> Arc<dyn Model> {
    Instant
        .open(path, None, &PRECISION)
        .unwrap()
        .expect("it is of this family")
}

/// Components and scratch of test models.
const BODY: &str = r#""components": [
    {"name": "transformer", "bytes": 4096, "identity": "t"},
    {"name": "vae", "bytes": 4096, "identity": "v"}],
    "scratch": {"denoise": 1048576, "decode": 4194304}"#;

/// A model of this medium, with additional fields.
fn described(medium: &str, more: &str) -> Arc<dyn Model> {
    let folder = tempfile::tempdir().unwrap();
    let description = format!(r#"{{"name": "{medium}", "medium": "{medium}", {BODY}{more}}}"#);
    std::fs::write(folder.path().join("instant.json"), description).unwrap();
    open(folder.path())
}

/// A model of videos of 10 frames of 64 x 32 pixels.
fn of_films() -> Arc<dyn Model> {
    let defaults = r#", "defaults": {"width": 64, "height": 32, "frames": 10, "frames_per_second": 12.0}"#;
    described("video", defaults)
}

/// A model of tracks of 2.5 seconds.
fn of_tracks() -> Arc<dyn Model> {
    described("audio", r#", "defaults": {"seconds": 2.5}"#)
}

/// A model of each medium.
fn of_all_media() -> [Arc<dyn Model>; 3] {
    [open(&sample("small")), of_films(), of_tracks()]
}

fn request(model: &dyn Model) -> Request {
    Request {
        prompt: "a red cube".into(),
        seed: 1,
        max_sequence_length: 8,
        ..model.defaults()
    }
}

/// The default request for a picture of this size.
fn sized(model: &dyn Model, width: u32, height: u32) -> Request {
    Request {
        medium: Medium::Image(Image::of(width, height)),
        ..request(model)
    }
}

/// The same request, from a grey picture.
fn from_grey(request: &Request, shade: u8, strength: f32) -> Request {
    let mut request = Request {
        strength,
        ..request.clone()
    };
    let (width, height) = request.medium.size().unwrap();
    let grey = Some(InitImage {
        width,
        height,
        rgb: vec![shade; (3 * width * height) as usize].into(),
    });
    match &mut request.medium {
        Medium::Image(image) => image.init_image = grey,
        Medium::Video(video) => video.init_image = grey,
        Medium::Audio(_) => panic!("a track has no pixels"),
    }
    request
}

fn stage(model: &dyn Model, request: &Request, name: &str) -> StagePlan {
    let mut stages = model.plan(request).unwrap().into_iter();
    stages.find(|plan| plan.name == name).unwrap()
}

fn names(model: &dyn Model, request: &Request) -> Vec<String> {
    let stages = model.plan(request).unwrap().into_iter();
    stages.map(|plan| plan.name).collect()
}

/// Names of the fields that planning rejects.
fn wrong_fields(model: &dyn Model, request: &Request) -> Vec<String> {
    let problems = model.plan(request).unwrap_err().into_iter();
    problems.map(|problem| problem.field).collect()
}

/// Runs one stage over the values that it takes; checks that it gives the planned values.
fn run(
    model: &dyn Model,
    plan: &StagePlan,
    request: &Request,
    values: &Values,
    observer: &mut dyn Observer,
) -> Result<Values, StageError> {
    let taken = plan.takes.iter().filter_map(|taken| {
        let value = values.get(&taken.name)?;
        Some((taken.name.clone(), value.clone()))
    });
    let stage = StageRun {
        plan,
        rung: 0,
        request,
        values: &taken.collect(),
        tensors: &|_: &str| Ok(Arc::new(ComponentTensors::default())),
        device: &Device::Cpu,
        part: None,
    };
    let given = model.run(&stage, observer)?;
    let mut named: Vec<&String> = plan.gives.iter().collect();
    named.sort();
    assert!(given.keys().eq(named), "{} gave {:?}", plan.name, given.keys());
    Ok(given)
}

/// Records pieces and steps, and cancels after a number of pieces.
#[derive(Default)]
struct Notes {
    pieces: Vec<Piece>,
    steps: Vec<(u32, u32)>,
    cancel_after: Option<usize>,
}

impl Observer for Notes {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, piece: Piece) {
        self.pieces.push(piece);
    }
    fn cancelled(&self) -> bool {
        self.cancel_after
            .is_some_and(|pieces| self.pieces.len() >= pieces)
    }
}

/// Runs all stages: the final values, and the delivered pieces.
fn through_stages(model: &dyn Model, request: &Request) -> (Values, Vec<Piece>) {
    let (mut values, mut notes) = (Values::new(), Notes::default());
    for plan in model.plan(request).unwrap() {
        assert!(notes.pieces.is_empty(), "pieces before {}", plan.name);
        for ValueShape { name, shape } in &plan.takes {
            assert_eq!(&values[name].shape, shape, "{name} that {} takes", plan.name);
        }
        values.extend(run(model, &plan, request, &values, &mut notes).unwrap());
    }
    let steps = stage(model, request, "denoise").steps;
    assert!(
        notes
            .steps
            .iter()
            .copied()
            .eq((1..=steps).map(|step| (step, steps)))
    );
    (values, notes.pieces)
}

/// Joins pieces, and checks that they are in order, without gaps, and complete.
fn joined(pieces: &[Piece]) -> (MediaFormat, Vec<u8>) {
    let format = pieces.first().expect("a piece").format;
    let (mut units, mut data) = (0, Vec::new());
    for piece in pieces {
        assert_eq!(
            (piece.format, piece.first, piece.track.as_str()),
            (format, units, "")
        );
        units += piece.units().expect("whole units within the format");
        data.extend_from_slice(&piece.data);
        assert_eq!(piece.is_last(), units == format.units());
    }
    assert_eq!(units, format.units());
    assert_eq!(Some(data.len() as u64), format.bytes());
    (format, data)
}

/// Runs all stages, and returns the picture's first pixel.
fn first_pixel(model: &dyn Model, request: &Request) -> [u8; 3] {
    let (_, pieces) = through_stages(model, request);
    let (format, rgb) = joined(&pieces);
    let (width, height) = request.medium.size().unwrap();
    assert_eq!(format, MediaFormat::Image { width, height });
    assert_eq!(pieces.len(), 1, "a picture is one piece");
    [rgb[0], rgb[1], rgb[2]]
}

#[test]
fn the_sample_models_open_and_share_equal_components() {
    let full = open(&sample("flux-full"));
    let other = open(&sample("flux-other"));
    for (ours, theirs) in full.components().iter().zip(other.components()) {
        assert_eq!(ours.id == theirs.id, ours.name != "transformer", "{}", ours.name);
        assert_eq!(full.load_plan(&ours.name), Some(&LoadPlan::synthetic(ours.bytes)));
    }
    assert_eq!(&*full.components()[0].id.0, "instant:flux-full-transformer");
    assert_eq!(open(&sample("huge")).components()[0].bytes, Bytes::gib(40));
    assert!(
        open(&sample("small"))
            .components()
            .iter()
            .all(|c| c.bytes <= Bytes::mib(4))
    );
    assert!(full.files_of("vae").is_empty());
}

#[test]
fn only_a_folder_with_a_description_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Instant.open(folder.path(), None, &PRECISION).unwrap().is_none());
    assert!(
        Instant
            .open(Path::new("/nowhere/model.safetensors"), None, &PRECISION)
            .unwrap()
            .is_none()
    );
    std::fs::copy(sample("small"), folder.path().join("instant.json")).unwrap();
    assert_eq!(open(folder.path()).family(), "instant");
    std::fs::write(
        folder.path().join("instant.json"),
        r#"{"name":"x","components":[],"sratch":{}}"#,
    )
    .unwrap();
    let error = Instant.open(folder.path(), None, &PRECISION).err().unwrap();
    assert!(error.to_string().contains("sratch"), "{error}");
    assert!(
        Instant
            .open(Path::new("/nowhere/x.instant.json"), None, &PRECISION)
            .is_err()
    );
}

#[test]
fn scratch_grows_with_the_picture_and_falls_with_the_rungs() {
    let model = open(&sample("flux-full"));
    let large = stage(&*model, &sized(&*model, 1024, 1024), "decode");
    assert_eq!(large.rungs[0].scratch, Bytes::gib(3));
    let labels: Vec<&str> = large.rungs.iter().map(|r| r.label.as_str()).collect();
    assert_eq!(labels, ["whole", "strips of 16", "tiles of 64"]);
    assert!(large.rungs.is_sorted_by(|a, b| a.scratch > b.scratch));
    assert_eq!(
        large.rungs.iter().map(|r| r.approximate).collect::<Vec<_>>(),
        [false, false, true]
    );
    assert_eq!(
        stage(&*model, &sized(&*model, 512, 512), "decode").rungs[0].scratch,
        Bytes::mib(768)
    );
}

#[test]
fn every_field_of_a_request_changes_the_result() {
    let model = open(&sample("small"));
    let plain = request(&*model);
    let colour = first_pixel(&*model, &plain);
    assert_eq!(colour, first_pixel(&*model, &plain));
    let variants: [fn(&mut Request); 4] = [
        |r| r.prompt = "a blue cube".into(),
        |r| r.seed = 2,
        |r| r.steps = 5,
        |r| r.guidance = 1.0,
    ];
    for change in variants {
        let mut changed = plain.clone();
        change(&mut changed);
        assert_ne!(colour, first_pixel(&*model, &changed));
    }
    let from_image = from_grey(&plain, 128, 0.01);
    let near = first_pixel(&*model, &from_image);
    assert!(
        near.iter().all(|byte| byte.abs_diff(128) <= 2),
        "{near:?} is near the image"
    );
    assert_eq!(
        names(&*model, &from_image),
        ["encode_text", "encode_image", "denoise", "decode"]
    );
    let roles: Vec<Role> = model
        .plan(&from_image)
        .unwrap()
        .iter()
        .map(|plan| plan.role)
        .collect();
    assert_eq!(roles, [Role::Encode, Role::Encode, Role::Sample, Role::Decode]);
}

#[test]
fn a_video_runs_through_all_stages_and_is_delivered_in_pieces() {
    let model = of_films();
    let request = request(&*model);
    assert_eq!(names(&*model, &request), ["encode_text", "denoise", "decode"]);
    let (values, pieces) = through_stages(&*model, &request);
    assert!(pieces.len() > 1, "{} pieces", pieces.len());
    let (format, rgb) = joined(&pieces);
    let expected = MediaFormat::Video {
        width: 64,
        height: 32,
        frames: 10,
        frames_per_second: 12.0,
        sound: None,
    };
    assert_eq!(format, expected);
    assert!(request.medium.is_made_as(&format));
    let reds: Vec<u8> = rgb
        .chunks(format.unit_bytes() as usize)
        .map(|frame| frame[0])
        .collect();
    let redder: Vec<u8> = (0..10).map(|frame: u8| reds[0].wrapping_add(frame)).collect();
    assert_eq!(reds, redder, "the frames follow one another");
    assert_eq!(values["latent"].shape, [1, 4, 10, 4, 8]);

    let from_image = from_grey(&request, 128, 0.01);
    assert_eq!(
        names(&*model, &from_image),
        ["encode_text", "encode_image", "denoise", "decode"]
    );
    let (_, rgb) = joined(&through_stages(&*model, &from_image).1);
    assert!(
        rgb[..3].iter().all(|byte| byte.abs_diff(128) <= 2),
        "{:?}",
        &rgb[..3]
    );
}

#[test]
fn the_sound_of_a_video_is_decoded_after_its_frames() {
    let defaults = r#", "sound": true, "defaults": {"width": 64, "height": 32, "frames": 10, "frames_per_second": 12.0}"#;
    for (more, latent) in [("", "latent"), (r#", "sections": 2"#, "latent_2")] {
        let model = described("video", &format!("{defaults}{more}"));
        let request = request(&*model);
        let plans = model.plan(&request).unwrap();
        let last = plans.last().unwrap();
        assert_eq!((last.name.as_str(), last.role), ("decode_sound", Role::Decode));
        assert_eq!(last.takes[0].name, latent);
        let (mut values, mut notes) = (Values::new(), Notes::default());
        for plan in &plans {
            values.extend(run(&*model, plan, &request, &values, &mut notes).unwrap());
        }
        let (sound, frames): (Vec<Piece>, Vec<Piece>) = notes
            .pieces
            .into_iter()
            .partition(|piece| piece.track == SOUND_OF_FILM);
        let told = frames[0].format.sound().unwrap();
        // 10 frames of 12 a second are 5/6 of a second.
        assert_eq!((told.samples_per_second, told.samples), (48_000, 40_000));
        assert!(sound.len() > 1 && sound.iter().all(|piece| piece.format == told.track()));
        let units: Vec<u64> = sound.iter().map(|piece| piece.units().unwrap()).collect();
        assert_eq!(units.iter().sum::<u64>(), told.samples);
        let formats = [("", frames[0].format), (SOUND_OF_FILM, sound[0].format)];
        assert!(request.medium.is_made_of(formats.into_iter()));
    }
    assert_eq!(
        names(&*of_films(), &request(&*of_films())).last().unwrap(),
        "decode"
    );
}

#[test]
fn a_track_runs_through_all_stages_and_is_delivered_in_pieces() {
    let model = of_tracks();
    let mut request = request(&*model);
    for (seconds, tenths) in [(2.5, 25), (0.1, 1), (1.26, 13)] {
        request.medium = Medium::Audio(Audio {
            seconds,
            ..Audio::default()
        });
        assert_eq!(names(&*model, &request), ["encode_text", "denoise", "decode"]);
        let (values, pieces) = through_stages(&*model, &request);
        assert!(pieces.len() > 1, "{} pieces", pieces.len());
        let (format, samples) = joined(&pieces);
        let expected = MediaFormat::Audio {
            samples_per_second: 48_000,
            channels: 2,
            samples: 4_800 * tenths,
        };
        assert_eq!(format, expected);
        assert!(request.medium.is_made_as(&format));
        let frames = samples.as_chunks::<4>().0;
        assert!(frames.iter().all(|frame| *frame == frames[0]), "one tone");
        assert_eq!(values["latent"].shape, [1, 4, tenths as usize]);
    }
}

#[test]
fn a_slow_decode_can_be_cancelled_between_pieces() {
    // Steps longer than any test.
    let slow =
        r#", "steps_ms": 60000, "defaults": {"width": 64, "height": 32, "frames": 10, "seconds": 2.5}"#;
    for (quick, medium) in [(of_films(), "video"), (of_tracks(), "audio")] {
        let request = request(&*quick);
        let (values, pieces) = through_stages(&*quick, &request);
        let mut notes = Notes {
            cancel_after: Some(1),
            ..Notes::default()
        };
        let model = described(medium, slow);
        let plan = stage(&*model, &request, "decode");
        let result = run(&*model, &plan, &request, &values, &mut notes);
        assert!(matches!(result, Err(StageError::Cancelled)));
        assert_eq!(notes.pieces, pieces[..1]);
    }
}

#[test]
fn a_request_is_derived_from_the_shape_of_a_latent() {
    for model in of_all_media() {
        let mut request = request(&*model);
        match &mut request.medium {
            Medium::Image(image) => (image.width, image.height) = (96, 48),
            Medium::Video(video) => (video.width, video.height, video.frames) = (96, 48, 7),
            Medium::Audio(audio) => audio.seconds = 12.3,
        }
        let (values, _) = through_stages(&*model, &request);
        let latent = ValueShape::new("latent", values["latent"].shape.clone());
        let found = model.request_of(std::slice::from_ref(&latent)).unwrap();
        let expected = Request {
            medium: request.medium.clone(),
            ..model.defaults()
        };
        assert_eq!(found, expected);
        let decode = stage(&*model, &found, "decode");
        assert_eq!(decode, stage(&*model, &request, "decode"));
        assert_eq!(decode.takes, std::slice::from_ref(&latent));

        let with = |shape: Vec<usize>| vec![ValueShape::new("latent", shape)];
        let mut other_channels = latent.shape.clone();
        other_channels[1] += 1;
        let others = [
            Vec::new(),
            vec![latent.clone(), latent.clone()],
            vec![ValueShape::new("sequence", latent.shape.clone())],
            with(other_channels),
            with(vec![1, 4]),
            with(vec![1, 4, 2, 8, 8, 8]),
        ];
        for other in others {
            assert_eq!(model.request_of(&other), None, "{other:?}");
        }
    }
}

#[test]
fn a_latent_of_another_medium_has_no_request() {
    let models = of_all_media();
    for (i, model) in models.iter().enumerate() {
        for (k, other) in models.iter().enumerate() {
            let takes = stage(&**other, &request(&**other), "decode").takes;
            assert_eq!(model.request_of(&takes).is_some(), i == k);
        }
    }
}

#[test]
fn smaller_requests_are_valid_and_smaller() {
    let [pictures, films, tracks] = of_all_media();
    let picture = request(&*pictures);
    let film = request(&*films);
    let sides = ["48x48", "32x32", "16x16"];
    let of_film = ["48x16", "32x16", "7 frames", "5 frames", "2 frames"];
    for (model, request, expected) in [
        (&pictures, picture.clone(), &sides[..]),
        (&pictures, from_grey(&picture, 7, 0.5), &sides),
        (&films, film.clone(), &of_film),
        (&films, from_grey(&film, 7, 0.5), &of_film),
        (&tracks, request(&*tracks), &["1.8 s", "1.2 s", "0.6 s"]),
    ] {
        let smaller = model.smaller(&request);
        let labels: Vec<&str> = smaller.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, expected);
        let scratch = |request: &Request| stage(&**model, request, "decode").rungs[0].scratch;
        for (label, smaller) in smaller {
            assert_eq!(names(&**model, &smaller), names(&**model, &request), "{label}");
            let is_of_other_size = label.contains('x');
            let has_picture = request.medium.init_image().is_some();
            assert_eq!(smaller.lacks_media_data(), has_picture && is_of_other_size);
            assert!(scratch(&smaller) < scratch(&request), "{label}");
            joined(&through_stages(&**model, &smaller).1);
            let rest = Request {
                medium: request.medium.clone(),
                ..smaller
            };
            assert_eq!(rest, request, "nothing but the size differs");
        }
    }
}

#[test]
fn a_request_is_planned_alike_without_the_data_of_its_clip() {
    let [_, films, tracks] = of_all_media();
    for model in [films, tracks] {
        let mut whole = request(&*model);
        let (_, pieces) = through_stages(&*model, &whole);
        let (format, data) = joined(&pieces);
        let clip = Some(Clip {
            format,
            data: data.into(),
        });
        match &mut whole.medium {
            Medium::Video(video) => video.init_video = clip,
            Medium::Audio(audio) => audio.init_audio = clip,
            Medium::Image(_) => panic!("a picture is no clip"),
        }
        let formats_alone = whole.without_media_data();
        assert!(formats_alone.lacks_media_data() && !whole.lacks_media_data());
        assert_eq!(model.plan(&formats_alone), model.plan(&whole));
    }
}

#[test]
fn the_smallest_request_runs_through_all_stages_in_one_step() {
    for model in of_all_media() {
        let smallest = model.smallest();
        assert_eq!(smallest.medium.name(), model.defaults().medium.name());
        assert_eq!(stage(&*model, &smallest, "denoise").steps, 1);
        let (_, pieces) = through_stages(&*model, &smallest);
        assert!(smallest.medium.is_made_as(&joined(&pieces).0));
        assert_eq!(model.smaller(&smallest), [], "smaller than the smallest");
    }
}

#[test]
fn a_request_of_another_medium_is_refused() {
    let models = of_all_media();
    for (i, model) in models.iter().enumerate() {
        for (k, other) in models.iter().enumerate() {
            let mut asked = request(&**other);
            if i == k {
                assert!(model.plan(&asked).is_ok());
                continue;
            }
            asked.steps = 0; // other problems do not matter then
            assert_eq!(wrong_fields(&**model, &asked), ["model"]);
        }
    }
}

#[test]
fn a_kept_latent_runs_only_the_remaining_steps() {
    for model in of_all_media() {
        let plain = request(&*model);
        let (kept, _) = through_stages(&*model, &plain);
        let brought = Request {
            seed: 2,
            from_values: true,
            strength: 0.5,
            ..plain.clone()
        };
        assert_eq!(names(&*model, &brought), ["encode_text", "denoise", "decode"]);
        let denoise = stage(&*model, &brought, "denoise");
        assert_eq!((denoise.steps, stage(&*model, &plain, "denoise").steps), (2, 4));
        let taken: Vec<&str> = denoise.takes.iter().map(|value| value.name.as_str()).collect();
        assert_eq!(taken, ["pooled", "sequence", "latent"]);
        let mut notes = Notes::default();
        let again = run(&*model, &denoise, &brought, &kept, &mut notes).unwrap();
        assert_eq!(notes.steps, [(1, 2), (2, 2)]);
        assert_ne!(again["latent"], kept["latent"]);

        let mut without = kept.clone();
        without.remove("latent");
        let refused = run(&*model, &denoise, &brought, &without, &mut Unobserved);
        assert!(matches!(refused, Err(StageError::BadInput(_))));
        let mut of_another_size = kept.clone();
        of_another_size.get_mut("latent").unwrap().shape.push(1);
        let refused = run(&*model, &denoise, &brought, &of_another_size, &mut Unobserved);
        assert!(matches!(refused, Err(StageError::BadInput(_))));
    }
}

#[test]
fn the_text_memo_depends_on_prompt_and_length() {
    let model = open(&sample("small"));
    let memos = |request: &Request| -> Vec<Option<Memo>> {
        let stages = model.plan(request).unwrap().into_iter();
        stages.map(|plan| plan.memo).collect()
    };
    let plain = request(&*model);
    let of_plain = memos(&plain);
    assert!(of_plain[0].is_some() && of_plain[1..].iter().all(Option::is_none));
    let elsewhere = Request {
        seed: 2,
        steps: 1,
        ..sized(&*model, 96, 48)
    };
    assert_eq!(memos(&elsewhere)[0], of_plain[0]);
    let longer = Request {
        max_sequence_length: 9,
        ..plain.clone()
    };
    let other = Request {
        prompt: "a blue cube".into(),
        ..plain
    };
    assert!(memos(&longer)[0] != of_plain[0] && memos(&other)[0] != of_plain[0]);
}

#[test]
fn invalid_fields_are_refused_by_name() {
    let model = open(&sample("small"));
    assert!(model.plan(&request(&*model)).is_ok());
    let mut wrong = request(&*model);
    (wrong.steps, wrong.guidance) = (0, f32::NAN);
    wrong.medium = Medium::Image(Image {
        width: 60,
        height: 64,
        init_image: Some(InitImage {
            width: 64,
            height: 64,
            rgb: vec![0; 3].into(),
        }),
        ..Image::default()
    });
    assert_eq!(
        wrong_fields(&*model, &wrong),
        ["width", "steps", "guidance", "init_image"]
    );
    // Strength is validated for every starting point.
    for strength in [0.0, 1.5, f32::NAN] {
        let plain = Request {
            strength,
            ..request(&*model)
        };
        assert!(model.plan(&plain).is_ok());
        assert_eq!(
            wrong_fields(&*model, &from_grey(&plain, 0, strength)),
            ["strength"]
        );
        let brought = Request {
            from_values: true,
            ..plain
        };
        assert_eq!(wrong_fields(&*model, &brought), ["strength"]);
    }

    let model = of_films();
    let mut wrong = request(&*model);
    wrong.medium = Medium::Video(Video {
        width: 64,
        height: 8208,
        frames: 0,
        frames_per_second: f32::INFINITY,
        ..Video::default()
    });
    assert_eq!(
        wrong_fields(&*model, &wrong),
        ["height", "frames", "frames_per_second"]
    );
    let model = of_tracks();
    for seconds in [0.0, 601.0, f32::NAN] {
        let mut wrong = request(&*model);
        wrong.medium = Medium::Audio(Audio {
            seconds,
            ..Audio::default()
        });
        assert_eq!(wrong_fields(&*model, &wrong), ["seconds"], "{seconds}");
    }
}

#[test]
fn steps_beyond_the_limit_are_refused() {
    let model = open(&sample("small"));
    for (steps, fits) in [(1, true), (200, true), (201, false), (1000, false)] {
        let asked = Request {
            steps,
            ..request(&*model)
        };
        assert_eq!(model.plan(&asked).is_ok(), fits, "{steps}");
    }
}

#[test]
fn a_description_that_is_a_list_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("instant.json");
    // serde would accept it as a name and no components.
    std::fs::write(&file, r#"["x", []]"#).unwrap();
    let error = Instant.open(folder.path(), None, &PRECISION).err().unwrap();
    assert!(
        matches!(&error, ModelError::Damaged { path, .. } if *path == file),
        "{error}"
    );
}

#[test]
fn a_slow_model_can_be_cancelled_within_a_step() {
    /// Cancels at the third poll, and counts the steps.
    #[derive(Default)]
    struct CancelsAtThirdPoll {
        asked: Cell<u32>,
        steps: u32,
    }
    impl Observer for CancelsAtThirdPoll {
        fn step(&mut self, n: u32, _of: u32) {
            self.steps = n;
        }
        fn wants_preview(&mut self) -> bool {
            false
        }
        fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
        fn deliver(&mut self, _piece: Piece) {}
        fn cancelled(&self) -> bool {
            self.asked.set(self.asked.get() + 1);
            self.asked.get() >= 3
        }
    }
    let slow = open(&sample("slow"));
    let request = Request {
        steps: 2,
        ..request(&*slow)
    };
    let encode_text = stage(&*slow, &request, "encode_text");
    let text = run(&*slow, &encode_text, &request, &Values::new(), &mut Unobserved).unwrap();
    let denoise = stage(&*slow, &request, "denoise");
    let began = Moment::now();
    let result = run(&*slow, &denoise, &request, &text, &mut Unobserved);
    assert!(result.is_ok() && began.elapsed() >= Duration::from_millis(100));

    // Steps longer than any test.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slower.instant.json");
    let description = std::fs::read_to_string(sample("slow")).unwrap();
    let slower = description.replace(r#""steps_ms": 50,"#, r#""steps_ms": 60000,"#);
    assert_ne!(slower, description);
    std::fs::write(&file, slower).unwrap();
    let mut observer = CancelsAtThirdPoll::default();
    let result = run(&*open(&file), &denoise, &request, &text, &mut observer);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(observer.steps, 0, "in the first step of a minute");
}

fn open_in(path: &Path, formats: &[(&str, &str)]) -> Result<Arc<dyn Model>, ModelError> {
    let quantization = Quantization::of(Preset::Full, formats.iter().copied()).unwrap();
    let precision = Precision {
        quantization,
        ..PRECISION
    };
    let model = Instant.open(path, None, &precision)?;
    Ok(model.expect("it is of this family"))
}

#[test]
fn a_quantized_component_has_fewer_bytes_and_another_identity() {
    let sample = sample("small");
    let full = open(&sample);
    let of = |model: &dyn Model, name: &str| {
        let mut components = model.components().iter();
        components.find(|c| c.name == name).cloned().unwrap()
    };
    let plain = of(&*full, "transformer");
    assert_eq!(full.format_of("transformer"), None);
    for (format, bytes) in [
        ("int8", 2_097_152),
        ("fp8", 2_097_152),
        ("nf4", 1_179_648),
        ("nf4-double", 1_081_856),
    ] {
        let model = open_in(&sample, &[("transformer", format)]).unwrap();
        let held = of(&*model, "transformer");
        assert_eq!(held.bytes, Bytes(bytes), "{format}");
        assert_eq!(
            model.load_plan("transformer"),
            Some(&LoadPlan::synthetic(held.bytes))
        );
        assert_ne!(held.id, plain.id);
        assert_eq!(model.format_of("transformer").unwrap().to_string(), format);
        assert_eq!(of(&*model, "vae"), of(&*full, "vae"), "the rest is shared");
    }
}

#[test]
fn a_format_is_refused_for_an_unknown_or_stored_quantized_component() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stored.instant.json");
    let description = r#"{"name": "stored", "components": [
        {"name": "transformer", "bytes": 4096, "identity": "t", "stored": "Q4_K"},
        {"name": "vae", "bytes": 4096, "identity": "v"}]}"#;
    std::fs::write(&file, description).unwrap();
    let model = open(&file);
    let formats = ["transformer", "vae"].map(|name| model.format_of(name).map(|f| f.to_string()));
    assert_eq!(formats, [Some("Q4_K".to_owned()), None]);
    assert_eq!(model.components()[0].bytes, Bytes(4096));

    let refused = |formats: &[(&str, &str)]| match open_in(&file, formats) {
        Err(ModelError::Quantization { component, problem }) => (component, problem),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{formats:?} was taken"),
    };
    let (component, problem) = refused(&[("transformer", "nf4")]);
    assert!(
        component == "transformer" && problem.contains("Q4_K"),
        "{problem}"
    );
    let (component, problem) = refused(&[("unet", "nf4")]);
    assert!(
        component == "unet" && problem.contains("transformer"),
        "{problem}"
    );
    let (component, _) = refused(&[("text_encoder_2", "nf4")]);
    assert_eq!(component, "text_encoder_2", "this model lacks it");

    std::fs::write(&file, description.replace("Q4_K", "Q4_X")).unwrap();
    let error = Instant.open(&file, None, &PRECISION).err().unwrap();
    assert!(error.to_string().contains("Q4_X"), "{error}");
}

/// A request of the same kind that is sampled in rounds.
fn in_slots(model: &dyn Model, slots: u32) -> Request {
    Request {
        slots,
        ..request(model)
    }
}

#[test]
fn a_request_with_slots_is_sampled_in_rounds_that_give_the_same() {
    for model in of_all_media() {
        let whole = through_stages(&*model, &request(&*model));
        let asked = in_slots(&*model, 3);
        let plans = model.plan(&asked).unwrap();
        let rounds: Vec<&StagePlan> = plans.iter().filter(|plan| plan.name == "denoise").collect();
        assert_eq!(
            rounds.iter().map(|plan| plan.steps).collect::<Vec<_>>(),
            [1, 1, 2]
        );
        let (mut values, mut notes) = (Values::new(), Notes::default());
        for plan in &plans {
            for ValueShape { name, shape } in &plan.takes {
                assert_eq!(&values[name].shape, shape, "{name} that {} takes", plan.name);
            }
            let request = match plan.reads_media {
                true => asked.clone(),
                false => asked.without_media_data(),
            };
            values.extend(run(&*model, plan, &request, &values, &mut notes).unwrap());
        }
        assert_eq!(notes.steps, [(1, 4), (2, 4), (3, 4), (4, 4)], "of all steps");
        assert_eq!(values["latent"], whole.0["latent"]);
        assert_eq!(notes.pieces, whole.1);
        for plan in rounds {
            let shared = plan.shared.as_ref().unwrap();
            assert_eq!((shared.slots, shared.scratch_each), (3, plan.rungs[0].scratch));
            let other = Request {
                seed: 9,
                steps: 2,
                prompt: "a blue cube".into(),
                ..asked.clone()
            };
            assert_eq!(stage(&*model, &other, "denoise").shared.unwrap().key, shared.key);
        }
        assert_eq!(stage(&*model, &request(&*model), "denoise").shared, None);
        for slots in [0, MAX_SLOTS + 1] {
            assert_eq!(wrong_fields(&*model, &in_slots(&*model, slots)), ["slots"]);
        }
    }
}

/// Records the steps of each stage in shared passes, and cancels one of them after its first step.
#[derive(Default)]
struct Slots {
    steps: Vec<(usize, u32, u32)>,
    cancel: Option<usize>,
}

impl Observer for Slots {
    fn step(&mut self, _n: u32, _of: u32) {
        panic!("a step of nobody");
    }
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn step_of(&mut self, stage: usize, n: u32, of: u32) {
        self.steps.push((stage, n, of));
    }
    fn is_cancelled(&self, stage: usize) -> bool {
        self.cancel == Some(stage) && self.steps.iter().any(|(other, _, _)| *other == stage)
    }
}

/// Two requests of tracks, at their first and their second round of two.
fn two_slots(model: &dyn Model) -> [(StagePlan, Request, Values); 2] {
    [(1, 0), (2, 1)].map(|(seed, round)| {
        let asked = Request {
            seed,
            ..in_slots(model, 2)
        };
        let plans = model.plan(&asked).unwrap();
        let mut values = run(model, &plans[0], &asked, &Values::new(), &mut Unobserved).unwrap();
        for plan in &plans[1..=round] {
            values.extend(run(model, plan, &asked, &values, &mut Unobserved).unwrap());
        }
        (plans[1 + round].clone(), asked, values)
    })
}

fn run_shared(
    model: &dyn Model,
    stages: &[(StagePlan, Request, Values)],
    observer: &mut dyn Observer,
) -> Result<Vec<Result<Values, StageError>>, StageError> {
    let stages: Vec<StageRun<'_>> = stages
        .iter()
        .map(|(plan, request, values)| StageRun {
            plan,
            rung: 0,
            request,
            values,
            tensors: &|_: &str| Ok(Arc::new(ComponentTensors::default())),
            device: &Device::Cpu,
            part: None,
        })
        .collect();
    model.run_shared(&stages, &mut Kept::default(), observer)
}

#[test]
fn rounds_of_two_requests_share_passes_and_return_the_same_values_as_alone() {
    let model = of_tracks();
    let stages = two_slots(&*model);
    let mut notes = Slots::default();
    let given = run_shared(&*model, &stages, &mut notes).unwrap();
    assert_eq!(notes.steps, [(0, 1, 4), (1, 3, 4), (0, 2, 4), (1, 4, 4)]);
    for ((plan, request, values), given) in stages.iter().zip(given) {
        let alone = run(&*model, plan, request, values, &mut Unobserved).unwrap();
        assert_eq!(given.unwrap(), alone);
    }

    let too_many = [&stages[..], &stages[..1]].concat();
    let mut of_another_size = stages.clone();
    let longer = described("audio", r#", "defaults": {"seconds": 5.0}"#);
    of_another_size[1].0 = stage(&*longer, &in_slots(&*longer, 2), "denoise");
    let mut alone = stages.clone();
    alone[0].0.shared = None;
    for wrong in [&too_many[..], &of_another_size, &alone] {
        let refused = run_shared(&*model, wrong, &mut Unobserved);
        assert!(matches!(refused, Err(StageError::BadInput(_))));
    }
}

#[test]
fn a_request_in_a_shared_pass_is_cancelled_or_fails_alone() {
    let model = of_tracks();
    let stages = two_slots(&*model);
    for cancelled in [0, 1] {
        let mut notes = Slots {
            cancel: Some(cancelled),
            ..Slots::default()
        };
        let given = run_shared(&*model, &stages, &mut notes).unwrap();
        assert!(matches!(given[cancelled], Err(StageError::Cancelled)));
        assert!(given[1 - cancelled].is_ok());
        assert_eq!(notes.steps.len(), 3, "the other goes on");
    }
    let faulty = described(
        "audio",
        r#", "defaults": {"seconds": 2.5}, "not_finite_at_step": 3"#,
    );
    let given = run_shared(&*faulty, &stages, &mut Unobserved).unwrap();
    assert!(given[0].is_ok());
    assert!(matches!(given[1], Err(StageError::NotFinite { step: 3, .. })));
}

#[test]
fn a_track_is_decoded_from_the_place_that_is_asked_for() {
    let model = of_tracks();
    let plain = request(&*model);
    let pieces = through_stages(&*model, &plain).1;
    for (seconds, first) in [(0.0, 0), (0.6, 0), (0.7, 1), (2.4, 3), (2.6, 0)] {
        let mut asked = plain.clone();
        if let Medium::Audio(audio) = &mut asked.medium {
            audio.decode_from_seconds = seconds;
        }
        let found = through_stages(&*model, &asked).1;
        let expected = [&pieces[first..], &pieces[..first]].concat();
        assert_eq!(found, expected, "{seconds}");
    }
    for seconds in [-1.0, f32::NAN, f32::INFINITY] {
        let mut asked = plain.clone();
        if let Medium::Audio(audio) = &mut asked.medium {
            audio.decode_from_seconds = seconds;
        }
        assert_eq!(wrong_fields(&*model, &asked), ["decode_from_seconds"]);
    }
}
