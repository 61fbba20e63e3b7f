//! Models that do not all fit, and their expected pictures.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use engine::library::Entry;
use gpu::ComponentTensors;
use model::{Image, InitImage, Medium, Model, Observer, Piece, Precision, Request, StageRun, Values};
use pipelines::FamilyList;

const MIB: u64 = 1 << 20;

/// Pictures are tiny, so that thousands of them cost nothing.
pub(crate) const SIDE: u32 = 16;

pub(crate) const NAMES: [&str; 5] = ["plain", "other", "greedy", "faulty", "panicky"];

/// The files, deleted on drop.
pub(crate) struct Models {
    folder: tempfile::TempDir,
    /// A model that computes expected pictures; all models give the same.
    reference_model: Arc<dyn Model>,
}

/// Writes a model of 170 MiB. `plain` and `other` share their text encoders. The transformers of `other` and `greedy`, and the
/// larger text encoder, can be on a card in part.
fn write(folder: &Path, name: &str, more: &str) {
    let own = |kind: &str| format!("{name}-{kind}");
    let shared = |kind: &str| match name {
        "plain" | "other" => format!("shared-{kind}"),
        _ => own(kind),
    };
    let component = |kind: &str, mib: u64, identity: String| {
        format!(
            r#"{{"name":"{kind}","bytes":{},"identity":"{identity}","blocks":{}}}"#,
            mib * MIB,
            match kind {
                "transformer" if name == "other" || name == "greedy" => 10,
                "text_encoder_2" => 8,
                _ => 0,
            }
        )
    };
    let components = [
        component("transformer", 100, own("transformer")),
        component("text_encoder", 20, shared("text_encoder")),
        component("text_encoder_2", 40, shared("text_encoder_2")),
        component("vae", 10, own("vae")),
    ];
    let scratch = format!(
        r#"{{"encode_text":{},"denoise":{},"decode":{}}}"#,
        4 * MIB,
        8 * MIB,
        64 * MIB
    );
    let text = format!(
        r#"{{"name":"{name}","components":[{}],"scratch":{scratch}{more},"defaults":{{"width":{SIDE},"height":{SIDE}}}}}"#,
        components.join(",")
    );
    std::fs::write(folder.join(format!("{name}.instant.json")), text).unwrap();
}

pub(crate) fn families() -> FamilyList {
    FamilyList::new(vec![Box::new(pipelines::instant::Instant)])
}

impl Models {
    pub(crate) fn write() -> Models {
        let folder = tempfile::tempdir().unwrap();
        let greedy = format!(
            r#","real_scratch":{{"encode_text":{},"decode":{}}}"#,
            60 * MIB,
            300 * MIB
        );
        for (name, more) in [
            ("plain", ""),
            ("other", ""),
            ("greedy", &greedy),
            ("faulty", r#","not_finite_at_step":3"#),
            ("panicky", r#","panic_at":"decode""#),
        ] {
            write(folder.path(), name, more);
        }
        let precision = Precision::full(DType::F32);
        let plain = folder.path().join("plain.instant.json");
        let reference_model = families().open(&plain, &precision).unwrap();
        Models {
            folder,
            reference_model,
        }
    }

    pub(crate) fn entry(&self, name: &str) -> Arc<Entry> {
        Arc::new(Entry {
            key: name.into(),
            id: name.into(),
            revision: String::new(),
            path: self.folder.path().join(format!("{name}.instant.json")),
            quantization: model::Quantization::NONE,
            adapters: Vec::new(),
        })
    }

    /// The expected picture of a request.
    pub(crate) fn expected_picture(&self, request: &Request) -> bytes::Bytes {
        // The result is the same on any number of cards.
        let request = &Request {
            cards: 1,
            ..request.clone()
        };
        let (mut values, mut painted) = (Values::new(), LastPiece::default());
        for plan in self.reference_model.plan(request).unwrap() {
            let tensors = |_: &str| Ok(Arc::new(ComponentTensors::default()));
            let stage = StageRun {
                plan: &plan,
                rung: 0,
                request,
                values: &values,
                tensors: &tensors,
                device: &Device::Cpu,
                part: None,
            };
            let given = self.reference_model.run(&stage, &mut painted).unwrap();
            values.extend(given);
        }
        painted.0.unwrap().data
    }
}

pub(crate) fn request(prompt: &str, steps: u32, seed: u64, from_image: bool) -> Request {
    let image = InitImage {
        width: SIDE,
        height: SIDE,
        rgb: vec![40; (SIDE * SIDE * 3) as usize].into(),
    };
    let image = Image {
        init_image: from_image.then_some(image),
        ..Image::of(SIDE, SIDE)
    };
    Request {
        prompt: prompt.into(),
        seed,
        strength: 0.6,
        ..Request::of(Medium::Image(image), steps, 3.5, 16)
    }
}

/// The delivered pieces of a stage.
#[derive(Default)]
struct LastPiece(Option<Piece>);

impl Observer for LastPiece {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, piece: Piece) {
        self.0 = Some(piece);
    }
    fn cancelled(&self) -> bool {
        false
    }
}
