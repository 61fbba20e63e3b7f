//! The plan of a request: its stages, their inputs and outputs, and their rungs.

use std::collections::BTreeMap;
use std::ops::{Add, Mul};

use residency::Bytes;
use serde::{Deserialize, Serialize};

use crate::errors::StageError;
use crate::host::HostTensor;
use crate::memo::Memo;

/// Host tensors by name: inputs and outputs of stages.
pub type Values = BTreeMap<String, HostTensor>;

/// Role of a stage, as the queue and the card distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes values from the client's input: a prompt, a picture.
    Encode,
    /// Generates: the most expensive part, which is not restarted with less memory.
    Sample,
    /// Computes the result from values.
    Decode,
}

/// One way to run a stage. Later rungs need less memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// For reports: `whole`, `strips of 16`, `tiles of 64`.
    pub label: String,
    /// Predicted activation bytes at the peak.
    pub scratch: Bytes,
    /// Whether the result differs from the first rung's by more than rounding.
    pub approximate: bool,
    /// Names of components that need not be resident. They stay in host memory, and a layer's tensors are copied to the card
    /// when the layer runs. This is slower than evicting others for them, so it is tried later.
    pub from_host: Vec<String>,
    /// Names of layers of which it keeps a copy of the weight as steps read it: with the terms of adapters, or in the order of a
    /// filter. This is faster, and takes memory that is free: nothing is evicted, streamed or waited for it.
    #[serde(default)]
    pub copies: Vec<String>,
}

impl Rung {
    /// An exact rung with all components resident.
    pub fn new(label: impl Into<String>, scratch: Bytes) -> Rung {
        Rung {
            label: label.into(),
            scratch,
            approximate: false,
            from_host: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// The only rung of a stage that cannot be chunked.
    pub fn whole(scratch: Bytes) -> Rung {
        Rung::new("whole", scratch)
    }

    /// The same rung with copies of the weights of these layers, which take `further` bytes of scratch.
    pub fn with_copies(&self, layers: Vec<String>, further: Bytes) -> Rung {
        Rung {
            label: WITH_COPIES.to_owned(),
            scratch: self.scratch + further,
            copies: layers,
            ..self.clone()
        }
    }

    /// The same rung with these adapters in host memory, and with `further` bytes of scratch for the copies of their tensors.
    pub fn with_from_host(&self, adapters: Vec<String>, further: Bytes) -> Rung {
        Rung {
            label: FROM_HOST.to_owned(),
            scratch: self.scratch + further,
            from_host: adapters,
            ..self.clone()
        }
    }
}

/// Label of a rung that keeps copies of weights.
const WITH_COPIES: &str = "copies of weights";

/// Label of a rung that reads adapters from the machine's memory.
const FROM_HOST: &str = "adapters from the machine's memory";

/// The rungs of these ways to run a stage, the best first, each with less memory than the one before it. A way that saves less
/// than 2% is left out.
pub fn ladder<T: Copy>(ways: impl IntoIterator<Item = T>, rung_of: impl Fn(T) -> Rung) -> Vec<(T, Rung)> {
    let mut ladder: Vec<(T, Rung)> = Vec::new();
    for way in ways {
        let rung = rung_of(way);
        let saves = |last: &Rung| rung.scratch.0 + last.scratch.0 / 50 < last.scratch.0;
        if ladder.last().is_none_or(|(_, last)| saves(last)) {
            ladder.push((way, rung));
        }
    }
    ladder
}

/// The rungs of a ladder, with `beside` bytes added to the scratch of each.
pub fn rungs_of<T>(ladder: Vec<(T, Rung)>, beside: Bytes) -> Vec<Rung> {
    let rungs = ladder.into_iter().map(|(_, rung)| Rung {
        scratch: rung.scratch + beside,
        ..rung
    });
    rungs.collect()
}

/// The way to run a stage that belongs to the rung of this number.
///
/// # Errors
/// [`StageError::BadInput`] if there is no such rung.
pub fn of_rung<T: Copy>(rungs: &[(T, Rung)], rung: usize) -> Result<T, StageError> {
    let chosen = rungs.get(rung).map(|(way, _)| *way);
    chosen.ok_or_else(|| StageError::BadInput(format!("there is no rung {rung}; there are {}", rungs.len())))
}

/// Names of components or values.
pub fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Name and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueShape {
    pub name: String,
    pub shape: Vec<usize>,
}

impl ValueShape {
    /// A value with this name and shape.
    pub fn new(name: &str, shape: Vec<usize>) -> ValueShape {
        ValueShape {
            name: name.to_owned(),
            shape,
        }
    }
}

/// The shape of a single value if it has this name. Its name may be empty, as clients may send it.
pub fn only_value<'a>(values: &'a [ValueShape], name: &str) -> Option<&'a [usize]> {
    match values {
        [only] if only.name == name || only.name.is_empty() => Some(&only.shape),
        _ => None,
    }
}

/// One stage of a request: a function over named values, with its rungs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// The family's name of the stage, visible to clients: `encode_text`, `denoise`, `decode`.
    pub name: String,
    pub role: Role,
    /// Names of the components that must be resident.
    pub components: Vec<String>,
    /// At least one, the best first.
    pub rungs: Vec<Rung>,
    /// The parameters on which the peak depends besides the model, e.g. `1024x1024 t512`: part of the key of learned
    /// peaks.
    pub shape: String,
    /// Number of steps, for progress; 1 if there are none.
    pub steps: u32,
    /// Input values, in addition to the request.
    pub takes: Vec<ValueShape>,
    /// Names of the output values.
    pub gives: Vec<String>,
    /// Whether it runs once per item, rather than once per request.
    pub per_item: bool,
    /// The part of the request that the stage reads, where other jobs may take its values
    /// ([`identity_of_values`](crate::identity_of_values)).
    /// `None`: the values are specific to this job. A stage that runs once per item is never cached.
    pub memo: Option<Memo>,
    /// Needs of previews of its state, in addition to the stage's own; `None`: the stage sends no previews. Whether the stage
    /// fits does not depend on them: without this memory it runs without previews.
    pub preview: Option<PreviewNeed>,
    /// The stage's section among the stages of its name, where a result is made section by section.
    pub section: Option<Section>,
    /// How the stage shares passes of the model with stages of other requests; `None`: it runs alone.
    pub shared: Option<SharedPass>,
    /// How much its steps compute, as far as the family says.
    pub passes: Passes,
    /// Whether the stage reads the pictures, films and tracks of the request; otherwise it gets their formats and sizes,
    /// without data.
    pub reads_media: bool,
}

/// How a stage goes over the blocks of its components, and how much it computes on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// Passes over all blocks in each step.
    pub in_step: u32,
    /// Operations of one pass, in products and attention; none where the family does not say.
    pub flops: Flops,
}

/// Floating-point operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flops {
    pub all: u64,
    /// Those of them in products that a card does in fp8, if it multiplies so.
    pub fp8: u64,
}

impl Flops {
    /// As many operations in the dtype of a card as take the time of these: products in fp8 are twice as fast.
    pub fn on_card(self, has_fp8_products: bool) -> u64 {
        self.all - if has_fp8_products { self.fp8 / 2 } else { 0 }
    }

    /// What each of so many cards computes of them.
    #[must_use]
    pub fn shared_by(self, cards: u64) -> Flops {
        Flops {
            all: self.all / cards.max(1),
            fp8: self.fp8 / cards.max(1),
        }
    }
}

impl From<u64> for Flops {
    fn from(all: u64) -> Flops {
        Flops { all, fp8: 0 }
    }
}

impl Add<u64> for Flops {
    type Output = Flops;

    fn add(self, others: u64) -> Flops {
        Flops {
            all: self.all + others,
            ..self
        }
    }
}

impl Mul<u64> for Flops {
    type Output = Flops;

    fn mul(self, times: u64) -> Flops {
        Flops {
            all: self.all * times,
            fp8: self.fp8 * times,
        }
    }
}

impl Add for Flops {
    type Output = Flops;

    fn add(self, other: Flops) -> Flops {
        Flops {
            all: self.all + other.all,
            fp8: self.fp8 + other.fp8,
        }
    }
}

impl Default for Passes {
    fn default() -> Passes {
        Passes::of(Flops::default())
    }
}

impl Passes {
    /// One pass in each step, of so many operations.
    pub fn of(flops: impl Into<Flops>) -> Passes {
        Passes {
            in_step: 1,
            flops: flops.into(),
        }
    }
}

/// Makes a stage run together with stages of other requests to the same model, in shared passes ([`Model::run_shared`]).
///
/// [`Model::run_shared`]: crate::Model::run_shared
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPass {
    /// Stages with equal keys can share a pass, if they have at most [`MAX_SETS`] sets of adapters together.
    pub key: String,
    /// The set of adapters that the stage computes with, with their strengths: equal sets have equal texts. Empty: none.
    pub adapters: String,
    /// Most stages in a pass, this one included.
    pub slots: u32,
    /// Activation bytes of this stage if it is not the first of the pass.
    pub scratch_each: Bytes,
    /// Further activation bytes of the stage's set of adapters in a pass of several sets.
    pub scratch_of_set: Bytes,
    /// By layer, the bytes of a copy of its weight with the terms of a set: the layers that the stage's own set changes. A pass of
    /// which some set changes a layer keeps one for each set. Empty where none are kept.
    pub copies: BTreeMap<String, Bytes>,
}

/// Most different sets of adapters in a pass, of which having none is one.
pub const MAX_SETS: usize = 4;

impl SharedPass {
    /// Number of different sets of adapters of these stages.
    pub fn sets<'a>(stages: impl IntoIterator<Item = &'a SharedPass>) -> usize {
        SharedPass::of_each_set(stages).len()
    }

    /// A stage of each different set of adapters of these, by the set.
    fn of_each_set<'a>(
        stages: impl IntoIterator<Item = &'a SharedPass>,
    ) -> BTreeMap<&'a str, &'a SharedPass> {
        let by_set = stages.into_iter().map(|pass| (pass.adapters.as_str(), pass));
        by_set.collect()
    }
}

/// A section of a result, which is sampled and decoded on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Number of the section, from 1, in order of sampling.
    pub number: u32,
    /// Number of sections.
    pub of: u32,
}

/// Needs of previews, in addition to those of the stage that sends them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreviewNeed {
    /// Names of components that must be resident.
    pub components: Vec<String>,
    /// Activation bytes on top of the stage's.
    pub scratch: Bytes,
}

impl PreviewNeed {
    /// Previews that need no component and no memory in addition to the stage's own: they are sent wherever it runs.
    pub const NOTHING: PreviewNeed = PreviewNeed {
        components: Vec::new(),
        scratch: Bytes::ZERO,
    };
}

impl StagePlan {
    /// A stage of one step, which runs once per request, takes and returns no values, and reads no media. A family changes the
    /// fields that differ.
    pub fn of(
        name: &str,
        role: Role,
        components: impl IntoIterator<Item: Into<String>>,
        rungs: Vec<Rung>,
    ) -> StagePlan {
        StagePlan {
            name: name.to_owned(),
            role,
            components: components.into_iter().map(Into::into).collect(),
            rungs,
            shape: String::new(),
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: false,
            memo: None,
            preview: None,
            section: None,
            shared: None,
            passes: Passes::default(),
            reads_media: false,
        }
    }

    /// The stage with the memory of its previews added; unchanged where they need none.
    #[must_use]
    pub fn with_previews(mut self) -> StagePlan {
        if let Some(preview) = &self.preview
            && *preview != PreviewNeed::NOTHING
        {
            let missing = preview
                .components
                .iter()
                .filter(|name| !self.components.contains(name));
            let missing: Vec<String> = missing.cloned().collect();
            self.components.extend(missing);
            for rung in &mut self.rungs {
                rung.scratch += preview.scratch;
            }
            self.shape.push_str(" preview");
        }
        self
    }

    /// The stage in passes that it shares with others: with the memory of each other one ([`SharedPass::scratch_each`]), and where they
    /// have several sets of adapters with that of each set ([`SharedPass::scratch_of_set`]). Its rungs are its first one that needs
    /// neither copies nor adapters in the machine's memory, which are read for one request, and before it that one with the copies of
    /// all sets, if they keep any. Unchanged without others. The components of others are not added.
    #[must_use]
    pub fn shared_with(mut self, others: &[&SharedPass]) -> StagePlan {
        if others.is_empty() {
            return self;
        }
        let mut further: Bytes = others.iter().map(|pass| pass.scratch_each).sum();
        self.shape.push_str(&format!(" x{}", others.len() + 1));
        let all = self.shared.iter().chain(others.iter().copied());
        let sets = SharedPass::of_each_set(all);
        if sets.len() > 1 {
            further += sets.values().map(|pass| pass.scratch_of_set).sum::<Bytes>();
            self.shape.push_str(&format!(" of {} sets", sets.len()));
        }
        let copies: BTreeMap<&String, Bytes> = sets
            .values()
            .flat_map(|pass| pass.copies.iter().map(|(layer, bytes)| (layer, *bytes)))
            .collect();
        let of_set: Bytes = copies.values().copied().sum();
        let mut rungs = self.rungs.into_iter();
        let whole = rungs.find(|rung| rung.copies.is_empty() && rung.from_host.is_empty());
        self.rungs = match whole {
            None => Vec::new(),
            Some(mut whole) => {
                whole.scratch += further;
                let layers: Vec<String> = copies.into_keys().cloned().collect();
                let with_copies = (!layers.is_empty())
                    .then(|| whole.with_copies(layers, Bytes(of_set.0 * sets.len() as u64)));
                with_copies.into_iter().chain([whole]).collect()
            }
        };
        self
    }
}
