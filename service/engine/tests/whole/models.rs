//! Models that do not all fit, and the pictures that they paint when nothing fails.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use engine::library::Entry;
use gpu::ComponentTensors;
use pipelines::{
    Catalogue, ImageRequest, InitImage, Model, Observer, Precision, StageInput, StageKind, StageOutput,
};

const MIB: u64 = 1 << 20;

/// Pictures are so small that thousands of them cost nothing.
pub(crate) const SIDE: u32 = 16;

pub(crate) const NAMES: [&str; 5] = ["plain", "other", "greedy", "faulty", "panicky"];

/// The files, as long as this lives.
pub(crate) struct Models {
    folder: tempfile::TempDir,
    /// Paints what is expected; all models paint alike.
    painter: Arc<dyn Model>,
}

/// Writes a model of 170 MiB. `plain` and `other` share their text encoders.
fn write(folder: &Path, name: &str, more: &str) {
    let own = |kind: &str| format!("{name}-{kind}");
    let shared = |kind: &str| match name {
        "plain" | "other" => format!("shared-{kind}"),
        _ => own(kind),
    };
    let component = |kind: &str, mib: u64, identity: String| {
        format!(
            r#"{{"name":"{kind}","bytes":{},"identity":"{identity}"}}"#,
            mib * MIB
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

pub(crate) fn catalogue() -> Catalogue {
    Catalogue::new(vec![Box::new(pipelines::instant::Instant)])
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
        let painter = catalogue().open(&plain, &precision).unwrap();
        Models { folder, painter }
    }

    pub(crate) fn entry(&self, name: &str) -> Arc<Entry> {
        Arc::new(Entry {
            key: name.into(),
            id: name.into(),
            revision: String::new(),
            path: self.folder.path().join(format!("{name}.instant.json")),
            quantization: pipelines::Quantization::NONE,
        })
    }

    /// The picture that a request leads to.
    pub(crate) fn paint(&self, request: &ImageRequest) -> bytes::Bytes {
        let run = |kind: StageKind, input: StageInput| {
            let plan = self.painter.lone_stage(kind, SIDE, SIDE);
            let stages = self.painter.stages(request);
            let plan = stages
                .into_iter()
                .find(|stage| stage.kind == kind)
                .unwrap_or(plan);
            let tensors = |_: &str| Ok(Arc::new(ComponentTensors::default()));
            let output = self.painter.run(
                &plan,
                0,
                request,
                &input,
                &tensors,
                &Device::Cpu,
                &mut NobodyWatches,
            );
            output.unwrap()
        };
        let StageOutput::Text(text) = run(StageKind::EncodeText, StageInput::default()) else {
            panic!("text is encoded to text")
        };
        let encoded = request
            .init_image
            .as_ref()
            .map(|_| run(StageKind::EncodeImage, StageInput::default()));
        let init = match encoded {
            Some(StageOutput::Latent(latent)) => Some(latent),
            _ => None,
        };
        let input = StageInput {
            text: Some(text),
            latent: init,
        };
        let StageOutput::Latent(latent) = run(StageKind::Denoise, input) else {
            panic!("denoising makes a latent")
        };
        let input = StageInput {
            text: None,
            latent: Some(latent),
        };
        match run(StageKind::Decode, input) {
            StageOutput::Picture { rgb, .. } => rgb,
            other => panic!("decoding makes a picture, not {other:?}"),
        }
    }
}

pub(crate) fn request(prompt: &str, steps: u32, seed: u64, from_image: bool) -> ImageRequest {
    let image = InitImage {
        width: SIDE,
        height: SIDE,
        rgb: vec![40; (SIDE * SIDE * 3) as usize].into(),
    };
    ImageRequest {
        prompt: prompt.into(),
        width: SIDE,
        height: SIDE,
        steps,
        guidance: 3.5,
        seed,
        max_sequence_length: 16,
        init_image: from_image.then_some(image),
        strength: 0.6,
        preview: false,
    }
}

struct NobodyWatches;

impl Observer for NobodyWatches {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn cancelled(&self) -> bool {
        false
    }
}
