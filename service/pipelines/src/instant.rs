//! The `instant` family: models that consist of a JSON file. They allocate memory on a simulated card and generate
//! one colour, or one tone, for tests of everything around a model.
//!
//! ```json
//! { "name": "small",
//!   "components": [ { "name": "transformer", "bytes": 4194304, "identity": "small-transformer" } ],
//!   "scratch": { "encode_text": 1048576, "denoise": 2097152, "decode": 8388608 },
//!   "steps_ms": 0,
//!   "defaults": { "steps": 4, "width": 1024, "height": 1024 } }
//! ```
//!
//! Components with equal identities are one component, in any files, if they have the same format. `bytes` are those
//! of bf16; a component that is quantized at load takes the corresponding fraction. With `"stored": "Q4_K"` a
//! component is stored quantized: its bytes are taken as configured. Scratch figures are for a picture of the default
//! size. Faults for tests: `real_scratch` (a stage's actual scratch, if different from the prediction),
//! `not_finite_at_step`, `panic_at` (a stage's name, or `smaller`: when smaller requests are asked for, which is in the
//! queue's own task).
//!
//! An adapter is a JSON file too, with `bytes` and `identity`: it adds red.
//!
//! With `"medium": "video"` it generates frames, with `"audio"` samples of two channels, in a few pieces; `steps_ms`
//! then also applies between pieces. Defaults may have `frames`, `frames_per_second` and `seconds`. With `"sections": 3`
//! a video is sampled and decoded in as many sections, the last part of the film first, as FramePack does: each decode
//! leaves its first frame's colour for the next, which checks the colour. With `"sound": true` a video has sound, as long as its
//! frames, which a stage of its own decodes after them (`decode_sound`).
//!
//! A request with more than one slot is sampled in rounds, unless it has sections. The first round finds the colour, the others
//! take it from the state of the round before. Rounds of several requests in one pass take its time once.

mod colour;
mod content;
mod model;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{CheckpointFile, Fp8Scales, GgufType, WeightFormat};
use residency::Bytes;
use serde::{Deserialize, Deserializer};

use crate::Formats;
use crate::family::Family;
use crate::files::{damaged, read_json};
use crate::{Audio, Image, Medium, Request, Video};
use crate::{Model, ModelError, Precision};

use self::model::InstantModel;

/// Suffix of a model's file.
const FILE_ENDING: &str = ".instant.json";

/// Name of the file inside of a model's folder.
const FILE_IN_FOLDER: &str = "instant.json";

/// Names of its stages.
const ENCODE_TEXT: &str = "encode_text";
const ENCODE_IMAGE: &str = "encode_image";
const DENOISE: &str = "denoise";
const DECODE: &str = "decode";
const DECODE_SOUND: &str = "decode_sound";

/// Name of the value from sampling to decoding. The number of a section follows it.
const LATENT: &str = "latent";

/// Name of the value from one round of sampling to the next. The number of steps done follows it.
const SAMPLING: &str = "sampling";

/// Name of the value that the decode of a section passes to the next.
const LEFT: &str = "left";

/// Name of the family.
const FAMILY: &str = "instant";

/// The `instant` family.
#[derive(Clone, Copy, Debug, Default)]
pub struct Instant;

impl Family for Instant {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn file_endings(&self) -> &'static [&'static str] {
        &[FILE_ENDING]
    }

    fn open(
        &self,
        path: &Path,
        _file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let Some(file) = description_of(path) else {
            return Ok(None);
        };
        let description: Description = read_json(&file)?;
        if let Some(unknown) = description
            .components
            .iter()
            .find(|c| !NAMES.contains(&c.name.as_str()))
        {
            let problem = format!("{} is none of {}", unknown.name, NAMES.join(", "));
            return Err(damaged(&file, problem));
        }
        let formats = precision.quantization.formats(&description.large());
        check(&formats, &description)?;
        tracing::debug!(model = description.name, file = %file.display(), "an instant model was opened");
        Ok(Some(Arc::new(InstantModel::new(description, precision))))
    }
}

/// Rejects formats of components that do not exist, or are stored quantized.
fn check(formats: &Formats, description: &Description) -> Result<(), ModelError> {
    for (component, _) in formats.iter() {
        let described = description.components.iter().find(|c| c.name == component);
        match described.map(|c| c.stored) {
            Some(None) => {}
            Some(Some(stored)) => return Err(ModelError::stored_quantized(component, stored)),
            None => return Err(ModelError::no_such_component(component, &NAMES)),
        }
    }
    Ok(())
}

/// Components that stages use.
const NAMES: [&str; 4] = ["text_encoder", "text_encoder_2", "transformer", "vae"];

/// The description file of the model at a path, if the path is of this family.
fn description_of(path: &Path) -> Option<PathBuf> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    if name.ends_with(FILE_ENDING) {
        return Some(path.to_owned());
    }
    let inside = path.join(FILE_IN_FOLDER);
    inside.is_file().then_some(inside)
}

/// Content of a model's file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    name: String,
    #[serde(default)]
    medium: DescribedMedium,
    components: Vec<DescribedComponent>,
    #[serde(default)]
    scratch: StageBytes,
    #[serde(default)]
    real_scratch: StageBytes,
    #[serde(default)]
    steps_ms: u64,
    /// Floating-point operations of a step of sampling at the default size, which a simulated card may take time for.
    #[serde(default)]
    step_flops: u64,
    #[serde(default)]
    sections: Option<NonZeroU32>,
    /// Whether a video has sound.
    #[serde(default)]
    sound: bool,
    #[serde(default)]
    defaults: DescribedDefaults,
    #[serde(default)]
    not_finite_at_step: Option<u32>,
    #[serde(default)]
    panic_at: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedComponent {
    name: String,
    bytes: Bytes,
    identity: String,
    #[serde(default, deserialize_with = "stored_format")]
    stored: Option<WeightFormat>,
    /// Number of blocks of equal size of which it consists, so that it can be on a card in part; 0: it has none.
    #[serde(default)]
    blocks: u32,
}

/// Content of an adapter's file: `{ "bytes": 1024, "identity": "red" }`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedAdapter {
    bytes: Bytes,
    identity: String,
}

/// A format by its displayed name, including those that can only be stored.
fn stored_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<WeightFormat>, D::Error> {
    let name = String::deserialize(deserializer)?;
    let scales = [Fp8Scales::None, Fp8Scales::Tensor].map(WeightFormat::Fp8);
    let mut known = WeightFormat::MADE_AT_LOAD
        .into_iter()
        .chain(scales)
        .chain(GgufType::ALL.map(WeightFormat::Gguf));
    let found = known.find(|format| format.to_string() == name);
    let unknown = || serde::de::Error::custom(format!("{name:?} is no format that weights are stored in"));
    found.map(Some).ok_or_else(unknown)
}

/// Activation bytes of each stage.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StageBytes {
    encode_text: Option<Bytes>,
    /// Defaults to that of the decode.
    encode_image: Option<Bytes>,
    denoise: Option<Bytes>,
    decode: Option<Bytes>,
}

impl StageBytes {
    fn of(&self, stage: &str) -> Option<Bytes> {
        match stage {
            ENCODE_TEXT => self.encode_text,
            ENCODE_IMAGE => self.encode_image.or(self.decode),
            DENOISE => self.denoise,
            _ => self.decode,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DescribedDefaults {
    steps: u32,
    guidance: f32,
    max_sequence_length: u32,
    width: u32,
    height: u32,
    frames: u32,
    frames_per_second: f32,
    seconds: f32,
}

impl Default for DescribedDefaults {
    fn default() -> DescribedDefaults {
        DescribedDefaults {
            steps: 4,
            guidance: 3.5,
            max_sequence_length: 512,
            width: 1024,
            height: 1024,
            frames: 25,
            frames_per_second: 25.0,
            seconds: 10.0,
        }
    }
}

/// Medium of the model.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DescribedMedium {
    #[default]
    Image,
    Video,
    Audio,
}

impl DescribedMedium {
    fn name(self) -> &'static str {
        match self {
            DescribedMedium::Image => "image",
            DescribedMedium::Video => "video",
            DescribedMedium::Audio => "audio",
        }
    }
}

/// Components that presets quantize, where a model has them.
const LARGE: [&str; 2] = ["transformer", "text_encoder_2"];

impl Description {
    /// The large components of the model.
    fn large(&self) -> Vec<&'static str> {
        let is_there = |name: &&'static str| self.components.iter().any(|c| c.name == **name);
        LARGE.into_iter().filter(is_there).collect()
    }

    fn defaults(&self) -> Request {
        let described = &self.defaults;
        Request::of(
            self.medium_of_defaults(),
            described.steps,
            described.guidance,
            described.max_sequence_length,
        )
    }

    fn medium_of_defaults(&self) -> Medium {
        let &DescribedDefaults { width, height, .. } = &self.defaults;
        match self.medium {
            DescribedMedium::Image => Medium::Image(Image::of(width, height)),
            DescribedMedium::Video => Medium::Video(Video {
                width,
                height,
                frames: self.defaults.frames,
                frames_per_second: self.defaults.frames_per_second,
                ..Video::default()
            }),
            DescribedMedium::Audio => Medium::Audio(Audio {
                seconds: self.defaults.seconds,
                ..Audio::default()
            }),
        }
    }
}
