//! Folders, models and requests to begin with.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pipelines::ace_step::AceStepModel;
use pipelines::{
    AdapterFile, AdapterKind, AdapterUse, Audio, AudioTask, Clip, HostTensor, MediaFormat, Medium, Precision,
    Request, StrengthCurve, Values,
};
use tempfile::TempDir;

use crate::numbers::fixtures;
use crate::open_model::{Delivered, OpenModel, copy};

/// Samples per second of the fixtures.
pub(crate) const RATE: u32 = 8000;

/// A folder of the pipeline that a test may modify: of a turbo model, or of a base one with the same weights.
pub(crate) fn folder(is_base: bool) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    copy(&fixtures().join("ace-tiny"), folder.path());
    if is_base {
        edit(
            &folder.path().join("transformer/config.json"),
            "is_turbo",
            false.into(),
        );
        edit(
            &folder.path().join("transformer/config.json"),
            "model_version",
            "base".into(),
        );
    }
    folder
}

/// Writes a value into a JSON file.
pub(crate) fn edit(path: &Path, key: &str, value: serde_json::Value) {
    let text = std::fs::read_to_string(path).expect("a file");
    let mut whole: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    whole[key] = value;
    std::fs::write(path, whole.to_string()).expect("a file");
}

/// An ACE-Step model with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("ace-step", path, precision)
}

impl OpenModel {
    /// Decodes a latent to 16-bit levels.
    pub(crate) fn decoded(&self, request: &Request, latent: &HostTensor, rung: usize) -> Vec<i16> {
        let plan = self.stage(request, "decode");
        let values = Values::from([("latent".to_owned(), latent.clone())]);
        let mut delivered = Delivered::default();
        self.run(&plan, rung, request, &values, &mut delivered)
            .expect("a track");
        let mut levels = Vec::new();
        let mut next = 0;
        for piece in &delivered.0 {
            assert_eq!(piece.first, next);
            next += piece.units().expect("whole samples");
            let pairs = piece.data.as_chunks::<2>().0.iter();
            levels.extend(pairs.map(|pair| i16::from_le_bytes(*pair)));
        }
        assert!(delivered.0.last().expect("pieces").is_last());
        levels
    }
}

/// The track of the fixtures with `samples` samples: `track` of the script.
pub(crate) fn track(samples: u64, number: u64) -> Clip {
    let level = |at: u64, channel: u64| {
        let level = (at * 7919 + (channel + number) * 104_729) * (at % 97 + 3) % 40_001;
        level as i64 - 20_000
    };
    let data = (0..samples).flat_map(|at| [level(at, 0), level(at, 1)].map(|level| level as i16));
    let bytes: Vec<u8> = data.flat_map(i16::to_le_bytes).collect();
    Clip {
        format: MediaFormat::Audio {
            samples_per_second: RATE,
            channels: 2,
            samples,
        },
        data: bytes.into(),
    }
}

/// A LoRA of every linear layer of the transformer, of a rank, in the names of diffusers.
pub(crate) struct Lora {
    pub(crate) name: &'static str,
    pub(crate) rank: usize,
    /// What its numbers are made of; every number is NaN for 0.
    pub(crate) seed: usize,
}

/// A model with these adapters, all components resident; the folder has the files of the adapters.
pub(crate) fn open_with(base: &Path, loras: &[Lora]) -> (TempDir, OpenModel) {
    let files = TempDir::new().expect("a folder");
    let weights = base.join("transformer/diffusion_pytorch_model.safetensors");
    let weights = candle_core::safetensors::load(weights, &Device::Cpu).expect("the transformer");
    let of_lora = |lora: &Lora| {
        let mut factors = HashMap::new();
        for (number, (name, weight)) in weights.iter().collect::<BTreeMap<_, _>>().into_iter().enumerate() {
            let (Some(layer), &[outputs, inputs]) = (name.strip_suffix(".weight"), weight.dims()) else {
                continue;
            };
            let mut factor = |part: &str, shape: [usize; 2]| {
                let of = |at: usize| match lora.seed {
                    0 => f32::NAN,
                    seed => 0.15 * ((at * 7919 + number * 31 + seed * 104_729) as f32 * 0.37).sin(),
                };
                let numbers: Vec<f32> = (0..shape[0] * shape[1]).map(of).collect();
                let numbers = Tensor::from_vec(numbers, &shape, &Device::Cpu).expect("numbers");
                factors.insert(format!("transformer.{layer}.lora_{part}.weight"), numbers);
            };
            factor("A", [lora.rank, inputs]);
            factor("B", [outputs, lora.rank]);
        }
        assert!(factors.len() > 40, "{}", factors.len());
        let path = files.path().join(format!("{}.safetensors", lora.name));
        candle_core::safetensors::save(&factors, &path).expect("a file");
        AdapterFile {
            name: lora.name.to_owned(),
            path,
            kind: AdapterKind::Lora,
            ignores_unknown: false,
        }
    };
    let model = AceStepModel::open(base, &Precision::full(DType::F32))
        .expect("a sound model")
        .expect("ACE-Step");
    let adapters: Vec<AdapterFile> = loras.iter().map(of_lora).collect();
    let model = model.adapted(&adapters).expect("adapters");
    (files, OpenModel::of(Arc::new(model)))
}

/// A request's adapters, each with its strength.
pub(crate) fn uses(adapters: &[(&str, f32)]) -> Vec<AdapterUse> {
    let one = |&(name, strength): &(&str, f32)| AdapterUse {
        name: name.to_owned(),
        strength: StrengthCurve::constant(strength).expect("a strength"),
        text_strength: 0.0,
    };
    adapters.iter().map(one).collect()
}

/// A small request.
pub(crate) fn request(audio: Audio) -> Request {
    Request {
        prompt: "a small red cat with a large hat".to_owned(),
        seed: 7,
        ..Request::of(Medium::Audio(audio), 2, 1.0, 256)
    }
}

/// A small request for a new track.
pub(crate) fn new_track() -> Request {
    request(Audio {
        seconds: 1.0,
        ..Audio::default()
    })
}

/// A small request for a task on a source of a second.
pub(crate) fn of_source(task: AudioTask) -> Request {
    request(Audio {
        seconds: 1.0,
        init_audio: Some(track(u64::from(RATE), 0)),
        task,
        ..Audio::default()
    })
}
