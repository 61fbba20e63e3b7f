//! Values that are kept for other jobs, over all families: whatever a request, a precision or a configuration changes, a stage
//! either gives values of another identity, or the same values.

#![allow(clippy::expect_used, clippy::unwrap_used)] // What tests share is outside of them.

#[path = "../all_families/mod.rs"]
mod all_families;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../autoencoders/formula.rs"]
#[allow(dead_code)] // Each binary takes what it needs.
mod formula;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
#[path = "../tiny_ovi/mod.rs"]
mod tiny_ovi;

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use candle_core::DType;
use pipelines::{
    Audio, Field, Medium, Model, Precision, Preset, Quantization, Request, Sampler, StageError, Unobserved,
    Values, families, identity_of_values,
};
use serde_json::Value;

use crate::all_families::{CASES, Case, picture, track};
use crate::open_model::{F32, OpenModel};

/// Each field of a request changed, by name.
fn other_requests(request: &Request) -> Vec<(String, Request)> {
    let mut others: Vec<(String, Request)> = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut Request)| {
        let mut other = request.clone();
        change(&mut other);
        others.push((name.to_owned(), other));
    };
    add("prompt", &|r| r.prompt = "a large blue hat".to_owned());
    add("steps", &|r| r.steps = 3);
    add("guidance", &|r| r.guidance = 4.0);
    add("negative_prompt", &|r| {
        (r.negative_prompt, r.true_guidance) = (Some("a square".to_owned()), 3.0);
    });
    add("sampler", &|r| r.sampler = Some(Sampler::Dpmpp2mKarras));
    add("seed", &|r| r.seed = 8);
    add("max_sequence_length", &|r| r.max_sequence_length = 48);
    add("strength", &|r| r.strength = 1.0);
    add("step_cache", &|r| r.step_cache = 0.1);
    add("fp8_attention", &|r| r.fp8_attention = true);
    add("cards", &|r| r.cards = 2);
    add("slots", &|r| r.slots = 2);
    match &request.medium {
        Medium::Image(_) => {
            add("size", &|r| {
                if let Medium::Image(image) = &mut r.medium {
                    (image.width, image.height) = (96, 48);
                }
            });
            add("reference", &|r| {
                if let Medium::Image(image) = &mut r.medium
                    && let Some(reference) = image.references.first_mut()
                {
                    *reference = picture(64, 11);
                }
            });
            add("seen", &|r| {
                if let Medium::Image(image) = &mut r.medium
                    && let Some(seen) = image.seen.first_mut()
                {
                    *seen = picture(64, 11);
                }
            });
            add("order of references", &|r| {
                if let Medium::Image(image) = &mut r.medium {
                    image.references.reverse();
                    image.seen.reverse();
                }
            });
        }
        Medium::Video(_) => {
            add("length", &|r| {
                if let Medium::Video(video) = &mut r.medium {
                    video.frames = 73;
                }
            });
            add("start", &|r| {
                if let Medium::Video(video) = &mut r.medium {
                    video.init_image = Some(picture(64, 11));
                }
            });
            add("end", &|r| {
                if let Medium::Video(video) = &mut r.medium
                    && video.init_image.is_some()
                {
                    video.end_image = Some(picture(64, 12));
                }
            });
        }
        Medium::Audio(_) => {
            let mut audio = |name: &str, change: &dyn Fn(&mut Audio)| {
                add(name, &|r| {
                    if let Medium::Audio(audio) = &mut r.medium {
                        change(audio);
                    }
                });
            };
            audio("seconds", &|a| a.seconds = 2.0);
            audio("lyrics", &|a| a.lyrics = "la la".to_owned());
            audio("tempo", &|a| a.beats_per_minute = Some(96));
            audio("key", &|a| a.key = "C major".to_owned());
            audio("metre", &|a| a.time_signature = "3".to_owned());
            audio("language", &|a| a.language = "de".to_owned());
            audio("decode_from_seconds", &|a| a.decode_from_seconds = 0.5);
            audio("source", &|a| {
                if let Some(clip) = &mut a.init_audio {
                    clip.data = clip.data.iter().map(|byte| byte ^ 1).collect::<Vec<u8>>().into();
                }
            });
            audio("longer source", &|a| {
                if a.init_audio.is_some() {
                    *a = track(a.task.clone(), Some(16_000));
                }
            });
        }
    }
    others
}

/// The numbers, truths and short texts of a JSON document, by their pointers, each with another value.
fn changed_leaves(document: &Value) -> Vec<(String, Value)> {
    fn visit(place: String, value: &Value, into: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields {
                    visit(
                        format!("{place}/{}", name.replace('~', "~0").replace('/', "~1")),
                        field,
                        into,
                    );
                }
            }
            Value::Array(items) if items.len() <= 4 => {
                for (index, item) in items.iter().enumerate() {
                    visit(format!("{place}/{index}"), item, into);
                }
            }
            Value::Number(number) => into.push((
                place,
                match number.as_i64() {
                    Some(whole) => (whole + 1).into(),
                    None => (number.as_f64().unwrap_or(1.0) * 1.25).into(),
                },
            )),
            Value::Bool(truth) => into.push((place, (!truth).into())),
            Value::Array(_) | Value::String(_) | Value::Null => {}
        }
    }
    let mut leaves = Vec::new();
    visit(String::new(), document, &mut leaves);
    leaves
}

/// The configurations of a model: JSON files of a few kilobytes.
fn configurations(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(configurations(&path));
        } else if path.extension().is_some_and(|ending| ending == "json")
            && entry.metadata().unwrap().len() < 8 << 10
        {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The values of a stage, by the stage's name, with the identity under which other jobs may take them.
type Kept = BTreeMap<String, (String, Values)>;

/// The identities of the stages of a request, by name; `None` where the model refuses it.
fn identities(model: &dyn Model, request: &Request) -> Option<BTreeMap<String, String>> {
    let plan = model.plan(request).ok()?;
    let identify = |names: &[String]| {
        let of = |name: &String| {
            model
                .components()
                .iter()
                .find(|component| component.name == *name)
        };
        names
            .iter()
            .map(|name| of(name).expect("a component").id.0.to_string())
            .collect()
    };
    let identity = |index: usize| identity_of_values(model, &plan, index, &identify);
    let named = plan.iter().enumerate();
    Some(
        named
            .filter_map(|(index, stage)| Some((stage.name.clone(), identity(index)?)))
            .collect(),
    )
}

/// The values of all stages that other jobs may take; `None` where a stage fails.
fn kept(opened: &OpenModel, request: &Request) -> Option<Kept> {
    let identities = identities(&*opened.model, request)?;
    let plan = opened.model.plan(request).ok()?;
    let mut values = Values::new();
    let mut kept = Kept::new();
    for stage in plan.iter().filter(|stage| identities.contains_key(&stage.name)) {
        let given: Result<Values, StageError> = opened.run(stage, 0, request, &values, &mut Unobserved);
        let given = given.ok()?;
        values.extend(given.clone());
        kept.insert(stage.name.clone(), (identities[&stage.name].clone(), given));
    }
    Some(kept)
}

impl Case {
    /// Compares the values kept by a changed model or request with those kept by the first.
    fn check(&self, change: &str, before: &Kept, opened: &Arc<dyn Model>, request: &Request) {
        let Some(identities) = identities(&**opened, request) else {
            return;
        };
        let has_same = |name: &String| {
            let known = before.get(name).map(|(identity, _)| identity);
            known.is_some() && known == identities.get(name)
        };
        if !identities.keys().any(has_same) {
            return;
        }
        let Some(after) = kept(&OpenModel::of(Arc::clone(opened)), request) else {
            return;
        };
        for (name, (identity, values)) in &after {
            let Some((known, same)) = before.get(name) else {
                continue;
            };
            assert!(
                identity != known || values == same,
                "{}: {change} changes what {name} gives, and not its identity",
                self.name
            );
        }
    }
}

/// Checks all cases, as many at a time as there are processors: each takes seconds of one.
fn for_each_case(check: impl Fn(&Case) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(case) = CASES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(case);
                }
            });
        }
    });
}

#[test]
fn whatever_changes_the_values_of_a_stage_changes_their_identity() {
    for_each_case(|case| {
        let folder = case.folder();
        let open = |precision: &Precision| families().open(&case.model_in(&folder), precision);
        let model = open(&F32).expect("a model");
        let opened = OpenModel::of(Arc::clone(&model));
        let request = (case.request)();
        model.plan(&request).expect(case.name);
        let before = kept(&opened, &request).expect("stages that run");
        assert!(!before.is_empty(), "{} keeps nothing", case.name);

        for (field, other) in other_requests(&request) {
            case.check(&field, &before, &model, &other);
        }
        let quantized = Quantization::of(Preset::Full, [(case.quantized, "int8")]).expect("a format");
        let precision = Precision {
            dtype: DType::F32,
            quantization: quantized,
        };
        case.check("int8", &before, &open(&precision).expect("a model"), &request);

        for path in configurations(folder.path()) {
            let text = fs::read_to_string(&path).unwrap();
            let document: Value = serde_json::from_str(&text).unwrap();
            for (place, value) in changed_leaves(&document) {
                let mut changed = document.clone();
                *changed.pointer_mut(&place).unwrap() = value;
                fs::write(&path, changed.to_string()).unwrap();
                if let Ok(model) = open(&F32) {
                    case.check(
                        &format!("{place} of {}", path.display()),
                        &before,
                        &model,
                        &request,
                    );
                }
            }
            fs::write(&path, text).unwrap();
        }
    });
}

#[test]
fn fields_that_sampling_alone_reads_change_no_identity_of_encoded_text() {
    for case in &CASES {
        let folder = case.folder();
        let model = families().open(&case.model_in(&folder), &F32).expect("a model");
        let request = (case.request)();
        let before = identities(&*model, &request).expect(case.name);
        for (field, other) in other_requests(&request) {
            let is_refused = field == "sampler" && !model.reads().has(Field::Sampler);
            if ["steps", "sampler", "seed"].contains(&field.as_str()) && !is_refused {
                assert_eq!(
                    identities(&*model, &other).as_ref(),
                    Some(&before),
                    "{}: {field}",
                    case.name
                );
            }
        }
        let schedule = folder.path().join("scheduler/scheduler_config.json");
        if let Ok(text) = fs::read_to_string(&schedule) {
            fs::write(&schedule, format!("{text}\n")).unwrap();
            let other = families().open(&case.model_in(&folder), &F32).expect("a model");
            assert_eq!(identities(&*other, &request), Some(before), "{}", case.name);
        }
    }
}
