//! References in clients' requests, in plain types: a model with its formats and adapters, pictures, ControlNets.

use std::collections::BTreeMap;

use bytes::Bytes;

/// A model as a client names it. Every field may be empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRef {
    /// Id, or key with revision, formats and adapters; empty for the default model.
    pub id: String,
    /// First digits of a commit, a branch or a tag; empty for the current one.
    pub revision: String,
    pub formats: AskedFormats,
    /// LoRAs, in the order in which they are attached.
    pub adapters: Vec<AskedAdapter>,
}

impl ModelRef {
    /// A model by its id alone.
    pub fn named(id: impl Into<String>) -> ModelRef {
        ModelRef {
            id: id.into(),
            ..ModelRef::default()
        }
    }
}

/// The formats in which the weights of a model are to be held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AskedFormats {
    /// Name of a preset, `auto`, or empty.
    pub preset: String,
    /// Formats of single components, by name: they override the preset's.
    pub components: BTreeMap<String, String>,
}

impl AskedFormats {
    /// Whether no formats are named.
    pub fn is_open(&self) -> bool {
        *self == AskedFormats::default()
    }
}

/// A LoRA as a request uses it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AskedAdapter {
    pub id: String,
    /// For all steps; `None`: 1, or the curve.
    pub strength: Option<f32>,
    /// For the text encoders; `None`: as at the first step.
    pub text_strength: Option<f32>,
    /// Points of position (0 to 1 of the steps) and strength, in place of one strength.
    pub curve: Vec<(f32, f32)>,
    /// Tensors for layers that the model lacks are ignored.
    pub ignore_unknown: bool,
}

/// A picture of a request: a file, or the id of uploaded media.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PictureInput {
    /// PNG, JPEG or WebP.
    pub data: Option<Bytes>,
    pub media_id: String,
}

impl From<Bytes> for PictureInput {
    fn from(data: Bytes) -> PictureInput {
        PictureInput {
            data: Some(data),
            ..PictureInput::default()
        }
    }
}

/// A ControlNet of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AskedControl {
    pub id: String,
    pub image: PictureInput,
    /// `None`: 1.
    pub scale: Option<f32>,
    /// Position of the first step that it guides, 0 to 1; `None`: 0.
    pub start: Option<f32>,
    /// Position of the last; `None`: 1.
    pub end: Option<f32>,
    /// The mode of a union ControlNet.
    pub mode: Option<u32>,
}
