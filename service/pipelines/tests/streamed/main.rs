//! Components in parts, over all families: whatever is streamed, every value and every piece has the same bytes as that of the
//! whole model.

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

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use pipelines::{
    Image, Medium, Model, Precision, Preset, Quantization, Request, Role, StageError, Values, families,
};
use residency::{Component, Part};

use crate::all_families::CASES;
use crate::open_model::{Delivered, OpenModel};

/// Everything that the stages of a request give.
#[derive(Debug, PartialEq)]
struct Given {
    values: Values,
    pieces: Vec<String>,
}

fn given(opened: &OpenModel, request: &Request) -> Result<Given, StageError> {
    let (mut values, mut delivered) = (Values::new(), Delivered::default());
    for stage in opened.model.plan(request).expect("a valid request") {
        let new = opened.run(&stage, 0, request, &values, &mut delivered)?;
        values.extend(new);
        assert!(stage.role != Role::Decode || !delivered.0.is_empty());
    }
    let pieces = delivered.0.iter().map(|piece| format!("{piece:?}")).collect();
    Ok(Given { values, pieces })
}

/// The model of pictures that the program is shipped with.
fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")
}

/// A model in full precision or in a preset.
fn open(path: &Path, preset: Preset) -> Arc<dyn Model> {
    let precision = Precision {
        dtype: DType::F32,
        quantization: Quantization::preset(preset),
    };
    families().open(path, &precision).expect("a sound model")
}

/// Names of the components that have parts.
fn streamable(model: &dyn Model) -> Vec<String> {
    let all = model.components().iter();
    let streamable = all.filter(|component| !component.parts.sizes().is_empty());
    streamable.map(|component| component.name.clone()).collect()
}

/// A way to choose the part of each component.
type PartOf = fn(&Component) -> Part;

/// Parts of all components: the first that streams, one in the middle, the smallest.
const PARTS: [(&str, PartOf); 3] = [
    ("first", |c| Part(1).min(c.least())),
    ("middle", |c| Part(c.least().0.div_ceil(2))),
    ("least", Component::least),
];

#[test]
fn what_is_streamed_gives_the_bytes_of_what_is_resident() {
    if !device::test_device().is_cpu() {
        return; // a card streams in its own way: its test is in `gpu/tests/card.rs`
    }
    let models = CASES.iter().map(|case| {
        let folder = case.folder();
        (case.name, case.model_in(&folder), (case.request)(), Some(folder))
    });
    // That of the fixtures has a text encoder of two layers, which two slots hold.
    let of_prompt = all_families::of(Medium::Image(Image::of(64, 64)));
    let shipped = ("shipped", shipped(), of_prompt, None);
    for (name, path, request, _folder) in models.chain([shipped]) {
        for preset in [Preset::Full, Preset::EightBit, Preset::FourBit] {
            let model = open(&path, preset);
            let whole = given(&OpenModel::of(Arc::clone(&model)), &request).expect(name);
            let names = streamable(&*model);
            assert!(
                names.iter().any(|each| each == "transformer" || each == "unet"),
                "{name}: {names:?}"
            );
            for (label, part_of) in PARTS {
                let opened = OpenModel::in_parts(Arc::clone(&model), &part_of);
                let streams = names.iter().any(|each| !opened.tensors(each).stream().is_whole());
                assert!(streams, "{name} {label}");
                let streamed = given(&opened, &request);
                let streamed = streamed.unwrap_or_else(|e| panic!("{name} {preset:?} {label}: {e}"));
                assert!(streamed == whole, "{name} {preset:?} {label} differs");
            }
        }
    }
}

#[test]
fn encoders_of_text_are_streamed_too() {
    let streamable_of = |name: &str, preset: Preset| {
        let case = CASES.iter().find(|each| each.name == name);
        let folder = case.map(all_families::Case::folder);
        let path = folder
            .as_ref()
            .map_or_else(shipped, |folder| folder.path().to_owned());
        streamable(&*open(&path, preset))
    };
    assert_eq!(
        streamable_of("shipped", Preset::Full),
        ["transformer", "text_encoder_2"]
    );
    assert_eq!(
        streamable_of("framepack", Preset::Full),
        ["transformer", "text_encoder"]
    );
    assert_eq!(
        streamable_of("flux2", Preset::Full),
        ["transformer", "text_encoder"]
    );
    assert_eq!(
        streamable_of("qwen-image", Preset::Full),
        ["transformer", "text_encoder"]
    );
    assert_eq!(
        streamable_of("qwen-image-edit", Preset::Full),
        ["transformer", "text_encoder", "vision"]
    );
    assert_eq!(streamable_of("z-image", Preset::Full), ["transformer"]);
    assert_eq!(
        streamable_of("z-image", Preset::FourBit),
        ["transformer", "text_encoder"]
    );
    assert_eq!(
        streamable_of("wan-two", Preset::Full),
        ["transformer", "transformer_2", "text_encoder"]
    );
    assert_eq!(streamable_of("ace-step", Preset::Full), ["transformer"]);
    assert_eq!(streamable_of("sdxl", Preset::Full), ["unet"]);
}
