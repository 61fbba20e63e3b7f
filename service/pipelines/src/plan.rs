//! What a family says of a request before it runs: its stages, what each takes and gives, and the ways to run it.

use std::collections::BTreeMap;

use residency::Bytes;
use serde::{Deserialize, Serialize};

use crate::host::HostTensor;

/// Host tensors by name: what stages take and give.
pub type Values = BTreeMap<String, HostTensor>;

/// What a stage is for: all that a queue and a card need to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Makes values of what the client brings: a prompt, a picture.
    Encode,
    /// Generates: the part that costs most, and is not begun again in smaller pieces.
    Sample,
    /// Makes of values what the client asked for.
    Decode,
}

/// One way to run a stage. A later rung of the ladder needs less memory than the one before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// `whole`, `strips of 16`, `tiles of 64`.
    pub label: String,
    /// Predicted activation bytes at the peak.
    pub scratch: Bytes,
    /// Whether the result differs from the whole's by more than rounding.
    pub approximate: bool,
}

impl Rung {
    /// The only rung of a stage that is not cut into pieces.
    pub(crate) fn whole(scratch: Bytes) -> Rung {
        Rung {
            label: "whole".to_owned(),
            scratch,
            approximate: false,
        }
    }
}

/// Names of components or values.
pub(crate) fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// A value by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueShape {
    /// Its name among the values of the job.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl ValueShape {
    /// Of a name and a shape.
    pub fn new(name: &str, shape: Vec<usize>) -> ValueShape {
        ValueShape {
            name: name.to_owned(),
            shape,
        }
    }
}

/// The shape of the only value, if it goes by this name, or by none as clients may bring it.
pub(crate) fn only_value<'a>(values: &'a [ValueShape], name: &str) -> Option<&'a [usize]> {
    match values {
        [only] if only.name == name || only.name.is_empty() => Some(&only.shape),
        _ => None,
    }
}

/// One stage of a request: a function over named values, and the ways to run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// The family's name for it, by which clients see it: `encode_text`, `denoise`, `decode`.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Names of the components that must be resident.
    pub components: Vec<String>,
    /// At least one; the best first.
    pub rungs: Vec<Rung>,
    /// What the peak depends on besides the model, e.g. `1024x1024 t512`: the key of what is learned.
    pub shape: String,
    /// Steps within the stage, for progress; 1 where there are none.
    pub steps: u32,
    /// The values that it is computed from, beside the request.
    pub takes: Vec<ValueShape>,
    /// Names of the values that it makes.
    pub gives: Vec<String>,
    /// Whether it runs for each of several items, or once for all of them.
    pub per_item: bool,
    /// Identity of what it gives: the same memo and the same components give the same values, which may be kept for other
    /// jobs. `None`: they are this job's alone.
    pub memo: Option<String>,
}
