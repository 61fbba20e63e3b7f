//! The toy family of docs/ADDING_A_FAMILY.md, opened, planned, loaded and run by the engine's code for all families; and the
//! guide itself, which explains each method of the two traits.

#![allow(clippy::unwrap_used, clippy::expect_used)] // What tests share is outside of them.

#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../open_model/mod.rs"]
mod open_model;
mod toy;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use pipelines::{
    FamilyList, Image, InitImage, Medium, ModelError, Observer, Piece, Preset, Quantization, Request, Role,
    StageError, ValueShape, Values, identity_of_values,
};
use tempfile::TempDir;

use crate::open_model::{Delivered, F32, OpenModel};
use crate::toy::Toy;

/// Writes a model file: a table that distinguishes prompts, and its colours.
fn write_model(folder: &Path) -> PathBuf {
    let path = folder.join("gradient.toy.safetensors");
    let numbers = |count: usize, factor: f32| (0..count).map(|n| (n as f32 * factor).sin().abs()).collect();
    let tensor = |numbers: Vec<f32>, shape: &[usize]| Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
    let tensors = HashMap::from([
        ("text_encoder.table", tensor(numbers(256 * 8, 0.37), &[256, 8])),
        ("transformer.weight", tensor(numbers(3 * 8, 0.2), &[3, 8])),
        ("vae.bias", tensor(vec![0.0, 0.1, 0.2], &[3])),
    ]);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    path
}

fn families() -> FamilyList {
    FamilyList::new(vec![Box::new(Toy)])
}

/// An open model with its components loaded, and the folder of its file.
fn toy() -> (OpenModel, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let model = families().open(&write_model(folder.path()), &F32).unwrap();
    (OpenModel::of(model), folder)
}

fn request(prompt: &str, seed: u64, size: (u32, u32)) -> Request {
    Request {
        prompt: prompt.to_owned(),
        seed,
        ..Request::of(Medium::Image(Image::of(size.0, size.1)), 3, 1.0, 77)
    }
}

/// Runs all stages of a request, each on the last of its rungs or on its first, and returns the picture.
fn picture(toy: &OpenModel, request: &Request, is_last_rung: bool) -> Piece {
    let (mut values, mut delivered) = (Values::new(), Delivered::default());
    for plan in toy.stages(request) {
        let rung = if is_last_rung { plan.rungs.len() - 1 } else { 0 };
        let given = toy.run(&plan, rung, request, &values, &mut delivered).unwrap();
        values.extend(given);
    }
    assert_eq!(delivered.0.len(), 1);
    delivered.0.remove(0)
}

#[test]
fn a_request_runs_through_its_stages() {
    let (toy, _folder) = toy();
    let request = request("dawn", 7, (64, 32));
    let stages = toy.stages(&request);
    let roles: Vec<(&str, Role)> = stages.iter().map(|stage| (&*stage.name, stage.role)).collect();
    let expected = [
        ("encode_text", Role::Encode),
        ("denoise", Role::Sample),
        ("decode", Role::Decode),
    ];
    assert_eq!(roles, expected);

    let first = picture(&toy, &request, false);
    assert!(request.medium.is_made_as(&first.format) && first.is_last());
    assert_eq!(
        picture(&toy, &request, false).data,
        first.data,
        "the same request, the same bytes"
    );
    assert_eq!(picture(&toy, &request, true).data, first.data, "strips are exact");
    for other in [
        self::request("dusk", 7, (64, 32)),
        self::request("dawn", 8, (64, 32)),
    ] {
        assert_ne!(picture(&toy, &other, false).data, first.data);
    }
    let smallest = toy.model.smallest();
    assert!(
        smallest
            .medium
            .is_made_as(&picture(&toy, &smallest, false).format)
    );
}

/// The part of a request that a stage reads decides whose values it may take.
#[test]
fn a_prompt_is_encoded_once_for_all_sizes() {
    let (toy, _folder) = toy();
    let identity_of = |request: &Request| {
        let plan = toy.stages(request);
        let ids = |names: &[String]| names.to_vec();
        let of_stage = |stage: usize| identity_of_values(&*toy.model, &plan, stage, &ids);
        assert_eq!(of_stage(1), None, "a sample is its job's own");
        of_stage(0).expect("an encoding that may be shared")
    };
    let small = identity_of(&request("dawn", 7, (64, 32)));
    assert_eq!(identity_of(&request("dawn", 8, (128, 128))), small);
    assert_ne!(identity_of(&request("dusk", 7, (64, 32))), small);
}

#[test]
fn unsupported_tasks_and_inputs_are_refused_by_name() {
    let (toy, folder) = toy();
    let wrong = Request {
        steps: 0,
        slots: 2,
        ..request("dawn", 7, (60, 4096))
    };
    let problems = toy.model.plan(&wrong).unwrap_err();
    let fields: Vec<&str> = problems.iter().map(|problem| &*problem.field).collect();
    assert_eq!(fields, ["width", "height", "steps", "slots"]);
    let unread = Request {
        negative_prompt: Some("dusk".to_owned()),
        from_values: true,
        medium: Medium::Image(Image {
            init_image: Some(InitImage::of_size((60, 32))),
            ..Image::of(60, 32)
        }),
        ..request("dawn", 7, (60, 32))
    };
    let problems = toy.model.plan(&unread).unwrap_err();
    let said: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let expected = [
        "width: must be a multiple of 8 from 8 to 2048",
        "negative_prompt: is not taken by this model: leave it out, or name a model that takes it",
        "init_latent_id: is not taken by this model: leave it out, or name a model that takes it",
        "init_image: is not taken by this model: leave it out, or name a model that takes it",
    ];
    assert_eq!(said, expected);

    let other = folder.path().join("other.safetensors");
    std::fs::copy(folder.path().join("gradient.toy.safetensors"), &other).unwrap();
    let refused = families().open(&other, &F32).map(|_| ());
    assert!(
        matches!(refused, Err(ModelError::NotAPipeline { .. })),
        "{refused:?}"
    );

    let quantized = pipelines::Precision {
        quantization: Quantization::of(Preset::Full, [("transformer", "nf4")]).unwrap(),
        ..F32
    };
    let path = folder.path().join("gradient.toy.safetensors");
    let refused = families().open(&path, &quantized).map(|_| ());
    assert!(
        matches!(refused, Err(ModelError::Quantization { .. })),
        "{refused:?}"
    );
    let by_preset = pipelines::Precision {
        quantization: Quantization::preset(Preset::FourBit),
        ..F32
    };
    assert!(
        families().open(&path, &by_preset).is_ok(),
        "a preset quantizes what is large: nothing here"
    );

    let cut = folder.path().join("cut.toy.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&cut, &whole[..whole.len() - 4]).unwrap();
    let refused = families().open(&cut, &F32).map(|_| ());
    assert!(
        matches!(refused, Err(ModelError::Incomplete { .. })),
        "{refused:?}"
    );
}

/// Cancels after one step.
struct Impatient(u32);

impl Observer for Impatient {
    fn step(&mut self, n: u32, _of: u32) {
        self.0 = n;
    }
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        self.0 > 0
    }
}

#[test]
fn a_cancel_takes_effect_between_steps() {
    let (toy, _folder) = toy();
    let request = request("dawn", 7, (64, 64));
    let mut observer = Impatient(0);
    let stages = toy.stages(&request);
    let text = toy
        .run(&stages[0], 0, &request, &Values::new(), &mut observer)
        .unwrap();
    let stopped = toy.run(&stages[1], 0, &request, &text, &mut observer);
    assert!(matches!(stopped, Err(StageError::Cancelled)));
    assert_eq!(observer.0, 1);
}

#[test]
fn latents_name_their_request_and_large_requests_have_smaller_ones() {
    let (toy, _folder) = toy();
    let large = request("dawn", 7, (256, 128));
    let latent = toy.stages(&large).remove(2).takes;
    let again = toy.model.request_of(&latent).expect("a request");
    assert_eq!(again.medium, large.medium);
    assert_eq!(toy.model.request_of(&[ValueShape::new("latent", vec![3])]), None);
    let smaller = toy.model.smaller(&large);
    assert_eq!(smaller[0].0, "128x64");
    let scratch = |request: &Request| toy.stages(request)[2].rungs[0].scratch;
    assert!(scratch(&smaller[0].1) < scratch(&large));
}

/// The guide names each method of the traits, so that a new one is explained there.
#[test]
fn the_guide_explains_every_method() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_to_string(root.join("../../docs/ADDING_A_FAMILY.md")).unwrap();
    let mut methods = 0;
    for (name, file) in [
        ("Family", "src/family.rs"),
        ("Model", "../model/src/model.rs"),
        ("Observer", "../model/src/stage_run.rs"),
    ] {
        let source = std::fs::read_to_string(root.join(file)).unwrap();
        let (_, after) = source
            .split_once(&format!("\npub trait {name} {{"))
            .or_else(|| source.split_once(&format!("\npub trait {name}:")))
            .unwrap();
        let (body, _) = after.split_once("\n}\n").unwrap();
        for line in body.lines() {
            let Some(declared) = line.strip_prefix("    fn ") else {
                continue;
            };
            let (method, _) = declared.split_once(['(', '<']).unwrap();
            assert!(
                guide.contains(&format!("`{method}`")),
                "docs/ADDING_A_FAMILY.md does not explain {name}::{method}"
            );
            methods += 1;
        }
    }
    assert!(methods > 40, "{methods} methods were found");
}
