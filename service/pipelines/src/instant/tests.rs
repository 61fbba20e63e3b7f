use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant as Moment};

use candle_core::{DType, Device};
use gpu::{ComponentTensors, LoadPlan};
use residency::Bytes;

use super::*;
use crate::family::{Observer, StageError, StageInput, StageOutput, Unobserved};
use crate::quantization::Preset;
use crate::request::{ImageRequest, InitImage};

const PRECISION: Precision = Precision::full(DType::F32);

fn sample(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/instant");
    tests.join(format!("{name}.instant.json"))
}

fn open(path: &Path) -> Arc<dyn Model> {
    Instant
        .open(path, &PRECISION)
        .unwrap()
        .expect("it is of this family")
}

fn request(model: &dyn Model) -> ImageRequest {
    let defaults = model.defaults();
    ImageRequest {
        prompt: "a red cube".into(),
        width: defaults.width,
        height: defaults.height,
        steps: defaults.steps,
        guidance: defaults.guidance,
        seed: 1,
        max_sequence_length: 8,
        init_image: None,
        strength: 1.0,
        preview: false,
    }
}

fn run(
    model: &dyn Model,
    kind: StageKind,
    request: &ImageRequest,
    input: &StageInput,
    observer: &mut dyn Observer,
) -> Result<StageOutput, StageError> {
    let plan = model
        .stages(request)
        .into_iter()
        .find(|plan| plan.kind == kind)
        .unwrap();
    let tensors = |_: &str| Ok(Arc::new(ComponentTensors::default()));
    model.run(&plan, 0, request, input, &tensors, &Device::Cpu, observer)
}

/// All stages, and the picture's first pixel.
fn first_pixel(model: &dyn Model, request: &ImageRequest) -> [u8; 3] {
    let mut input = StageInput::default();
    for plan in model.stages(request) {
        match run(model, plan.kind, request, &input, &mut Unobserved).unwrap() {
            StageOutput::Text(text) => input.text = Some(text),
            StageOutput::Latent(latent) => {
                assert_eq!(latent.shape, model.latent_shape(request.width, request.height));
                input.latent = Some(latent);
            }
            StageOutput::Picture { width, height, rgb } => {
                assert_eq!((width, height), (request.width, request.height));
                assert_eq!(rgb.len(), (width * height * 3) as usize);
                return [rgb[0], rgb[1], rgb[2]];
            }
        }
    }
    panic!("no picture")
}

#[test]
fn the_models_that_ship_with_the_tests_open_and_share_what_is_the_same() {
    let full = open(&sample("flux-full"));
    let other = open(&sample("flux-other"));
    for (ours, theirs) in full.components().iter().zip(other.components()) {
        assert_eq!(ours.id == theirs.id, ours.name != "transformer", "{}", ours.name);
        assert_eq!(full.load_plan(&ours.name), Some(&LoadPlan::Synthetic(ours.bytes)));
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
fn a_folder_with_a_description_is_a_model_and_other_paths_are_not() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Instant.open(folder.path(), &PRECISION).unwrap().is_none());
    assert!(
        Instant
            .open(Path::new("/nowhere/model.safetensors"), &PRECISION)
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
    let error = Instant.open(folder.path(), &PRECISION).err().unwrap();
    assert!(error.to_string().contains("sratch"), "{error}");
    assert!(
        Instant
            .open(Path::new("/nowhere/x.instant.json"), &PRECISION)
            .is_err()
    );
}

#[test]
fn scratch_grows_with_the_picture_and_falls_with_the_rungs() {
    let model = open(&sample("flux-full"));
    let large = model.lone_stage(StageKind::Decode, 1024, 1024);
    assert_eq!(large.rungs[0].scratch, Bytes::gib(3));
    let labels: Vec<&str> = large.rungs.iter().map(|r| r.label.as_str()).collect();
    assert_eq!(labels, ["whole", "strips of 16", "tiles of 64"]);
    assert!(large.rungs.is_sorted_by(|a, b| a.scratch > b.scratch));
    assert_eq!(
        large.rungs.iter().map(|r| r.approximate).collect::<Vec<_>>(),
        [false, false, true]
    );
    assert_eq!(
        model.lone_stage(StageKind::Decode, 512, 512).rungs[0].scratch,
        Bytes::mib(768)
    );
}

#[test]
fn every_field_of_a_request_counts() {
    let model = open(&sample("small"));
    let plain = request(&*model);
    let colour = first_pixel(&*model, &plain);
    assert_eq!(colour, first_pixel(&*model, &plain));
    let variants: [fn(&mut ImageRequest); 4] = [
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
    let grey = bytes::Bytes::from(vec![128; 64 * 64 * 3]);
    let mut from_image = plain.clone();
    from_image.init_image = Some(InitImage {
        width: 64,
        height: 64,
        rgb: grey,
    });
    from_image.strength = 0.01;
    let near = first_pixel(&*model, &from_image);
    assert!(
        near.iter().all(|byte| byte.abs_diff(128) <= 2),
        "{near:?} is near the image"
    );
    let kinds: Vec<StageKind> = model.stages(&from_image).iter().map(|plan| plan.kind).collect();
    assert_eq!(
        kinds,
        [
            StageKind::EncodeText,
            StageKind::EncodeImage,
            StageKind::Denoise,
            StageKind::Decode
        ]
    );
}

#[test]
fn what_cannot_be_generated_is_named_field_by_field() {
    let model = open(&sample("small"));
    assert_eq!(model.validate(&request(&*model)), Ok(()));
    let mut wrong = request(&*model);
    (wrong.width, wrong.steps, wrong.guidance) = (60, 0, f32::NAN);
    wrong.init_image = Some(InitImage {
        width: 64,
        height: 64,
        rgb: vec![0; 3].into(),
    });
    let fields: Vec<String> = model
        .validate(&wrong)
        .unwrap_err()
        .into_iter()
        .map(|e| e.field)
        .collect();
    assert_eq!(fields, ["width", "steps", "guidance", "init_image"]);
}

#[test]
fn steps_end_where_the_api_says() {
    let model = open(&sample("small"));
    for (steps, fits) in [(1, true), (200, true), (201, false), (1000, false)] {
        let asked = ImageRequest {
            steps,
            ..request(&*model)
        };
        assert_eq!(model.validate(&asked).is_ok(), fits, "{steps}");
    }
}

#[test]
fn a_description_that_is_a_list_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("instant.json");
    // What serde would take for a name and no components.
    std::fs::write(&file, r#"["x", []]"#).unwrap();
    let error = Instant.open(folder.path(), &PRECISION).err().unwrap();
    assert!(
        matches!(&error, ModelError::Damaged { path, .. } if *path == file),
        "{error}"
    );
}

#[test]
fn a_slow_model_takes_its_time_and_is_cancelled_within_a_step() {
    /// Cancels when it is asked for the third time, and counts the steps.
    #[derive(Default)]
    struct Impatient {
        asked: Cell<u32>,
        steps: u32,
    }
    impl Observer for Impatient {
        fn step(&mut self, n: u32, _of: u32) {
            self.steps = n;
        }
        fn wants_preview(&mut self) -> bool {
            false
        }
        fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
        fn cancelled(&self) -> bool {
            self.asked.set(self.asked.get() + 1);
            self.asked.get() >= 3
        }
    }
    let slow = open(&sample("slow"));
    let request = ImageRequest {
        steps: 2,
        ..request(&*slow)
    };
    let nothing = StageInput::default();
    let Ok(StageOutput::Text(text)) = run(&*slow, StageKind::EncodeText, &request, &nothing, &mut Unobserved)
    else {
        panic!("no text")
    };
    let input = StageInput {
        text: Some(text),
        latent: None,
    };
    let began = Moment::now();
    let result = run(&*slow, StageKind::Denoise, &request, &input, &mut Unobserved);
    assert!(result.is_ok() && began.elapsed() >= Duration::from_millis(100));

    // Steps so long that nothing on this machine outlasts one.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slower.instant.json");
    let description = std::fs::read_to_string(sample("slow")).unwrap();
    let slower = description.replace(r#""steps_ms": 50,"#, r#""steps_ms": 60000,"#);
    assert_ne!(slower, description);
    std::fs::write(&file, slower).unwrap();
    let mut observer = Impatient::default();
    let result = run(&*open(&file), StageKind::Denoise, &request, &input, &mut observer);
    assert!(matches!(result, Err(StageError::Cancelled)));
    assert_eq!(observer.steps, 0, "in the first step of a minute");
}

fn open_in(path: &Path, formats: &[(&str, &str)]) -> Result<Arc<dyn Model>, ModelError> {
    let quantization = Quantization::of(Preset::Full, formats.iter().copied()).unwrap();
    let precision = Precision {
        quantization,
        ..PRECISION
    };
    let model = Instant.open(path, &precision)?;
    Ok(model.expect("it is of this family"))
}

#[test]
fn a_quantized_component_takes_its_part_and_goes_by_another_name() {
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
            Some(&LoadPlan::Synthetic(held.bytes))
        );
        assert_ne!(held.id, plain.id);
        assert_eq!(model.format_of("transformer").unwrap().to_string(), format);
        assert_eq!(of(&*model, "vae"), of(&*full, "vae"), "the rest is shared");
    }
}

#[test]
fn a_format_is_refused_for_what_is_not_there_or_is_stored_quantized() {
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
    // What a family has and this model has not: a preset names it all the same.
    assert!(open_in(&file, &[("text_encoder_2", "nf4")]).is_ok());

    std::fs::write(&file, description.replace("Q4_K", "Q4_X")).unwrap();
    let error = Instant.open(&file, &PRECISION).err().unwrap();
    assert!(error.to_string().contains("Q4_X"), "{error}");
}
