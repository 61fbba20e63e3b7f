//! What the models of the catalogue need of a card, as the planner counts it, and how they run on one.
//!
//! The sizes are data: the planner makes them from the published shapes of each model, and a test compares (`planned.rs`). What follows
//! from them on a card, the planner itself decides, on a ledger of that card with nothing on it.

use std::sync::LazyLock;

use figment::Figment;
use figment::providers::{Format as _, Toml};
use gpu::{BlockSize, Uses, parts_of_blocks};
use model::Preset;
use residency::{
    Bytes, Component, ComponentId, Ledger, Millis, Policy, StageNeed, Verdict, part_after, plan,
};
use serde::Deserialize;

use super::Room;

/// The bytes of one model in one precision, on cards that compute in one dtype.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sizes {
    /// Short name.
    pub(super) model: String,
    pub(super) preset: String,
    /// Whether they are of cards that compute in f32.
    pub(super) is_f32: bool,
    pub(super) components: Vec<ComponentSizes>,
    /// The stages of the default request; of stages with equal needs, one.
    pub(super) stages: Vec<StageSizes>,
    /// The default request, then smaller ones, the closest to it first.
    pub(super) requests: Vec<RequestSizes>,
}

/// The bytes of a component.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ComponentSizes {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Its blocks in the order of their places; equal neighbours are one entry.
    #[serde(default)]
    pub(super) blocks: Vec<EqualBlocks>,
}

/// Blocks of the same sizes that follow each other.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EqualBlocks {
    pub(super) count: usize,
    pub(super) bytes: u64,
    pub(super) in_ring: u64,
    /// Whether a stage uses them once, and not in each step.
    #[serde(default)]
    pub(super) once: bool,
}

/// The needs of a stage beside the bytes of its components.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StageSizes {
    pub(super) name: String,
    pub(super) components: Vec<String>,
    /// How often it goes over the blocks of its components.
    pub(super) passes: u32,
    /// Working memory of each way to run it, in the order in which they are tried.
    pub(super) scratch: Vec<u64>,
}

/// A request, and the least that it needs of a card.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RequestSizes {
    /// `960x544`, `97 frames`, `30 s`; empty for the default.
    pub(super) label: String,
    pub(super) extent: Extent,
    pub(super) least: u64,
}

/// Size and length of what is generated, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Extent {
    pub pixels: Option<u64>,
    pub frames: Option<u32>,
    pub seconds: Option<f32>,
}

impl Extent {
    /// This extent, with what it lacks from another.
    fn or(self, other: Extent) -> Extent {
        Extent {
            pixels: self.pixels.or(other.pixels),
            frames: self.frames.or(other.frames),
            seconds: self.seconds.or(other.seconds),
        }
    }

    fn is_within(self, other: Extent) -> bool {
        self.pixels <= other.pixels && self.frames <= other.frames && self.seconds <= other.seconds
    }
}

/// What a model needs of a card in one precision.
#[derive(Clone, Debug)]
pub struct Needs {
    weights: Bytes,
    stages: Vec<StageWays>,
    requests: Vec<RequestSizes>,
}

/// A stage, once for each way to run it.
#[derive(Clone, Debug)]
struct StageWays(Vec<StageNeed>);

/// How the default request of a model runs on a card with nothing else on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// In each step all weights that it uses are on the card.
    Whole,
    /// This many bytes of weights are copied to the card in each step.
    Streamed { each_step: Bytes },
}

impl Fit {
    /// Bytes of weights that are copied to the card in each step.
    pub fn streamed(self) -> Bytes {
        match self {
            Fit::Whole => Bytes::ZERO,
            Fit::Streamed { each_step } => each_step,
        }
    }
}

impl Needs {
    /// The needs with these sizes.
    pub(super) fn of(sizes: &Sizes) -> Needs {
        let components: Vec<Component> = sizes.components.iter().map(component).collect();
        let ways = |stage: &StageSizes| {
            let of_stage = components.iter().filter(|c| stage.components.contains(&c.name));
            let need = StageNeed {
                name: stage.name.clone(),
                components: of_stage.cloned().collect(),
                scratch: Bytes::ZERO,
                headroom: Bytes::ZERO,
                later: Vec::new(),
                model: Vec::new(),
                passes: stage.passes,
            };
            let way = |scratch: &u64| StageNeed {
                scratch: Bytes(*scratch),
                ..need.clone()
            };
            StageWays(stage.scratch.iter().map(way).collect())
        };
        Needs {
            weights: components.iter().map(|component| component.bytes).sum(),
            stages: sizes.stages.iter().map(ways).collect(),
            requests: sizes.requests.clone(),
        }
    }

    /// The least that a card must have for it with all weights on it that a stage uses.
    pub fn whole(&self) -> Bytes {
        self.most_of_stages(StageNeed::peak)
    }

    /// The least that a card must have for it with as much as possible streamed.
    pub fn least(&self) -> Bytes {
        self.most_of_stages(StageNeed::least_peak)
    }

    /// Bytes that are copied to a card in each step if it has the least.
    pub fn streamed_at_least(&self) -> Bytes {
        let room = Room {
            bytes: self.least(),
            ..Room::default()
        };
        self.on(&room).map_or(Bytes::ZERO, Fit::streamed)
    }

    fn most_of_stages(&self, peak: fn(&StageNeed) -> Bytes) -> Bytes {
        let least = |stage: &StageWays| stage.0.iter().map(peak).min();
        self.stages.iter().filter_map(least).max().unwrap_or(Bytes::ZERO)
    }

    /// How it runs on a card; `None` where it never does.
    pub fn on(&self, room: &Room) -> Option<Fit> {
        let ledger = Ledger::new(room.bytes, Bytes::ZERO);
        let mut each_step = Bytes::ZERO;
        for stage in &self.stages {
            each_step = each_step.max(stage.streamed_on(&ledger)?);
        }
        Some(match each_step {
            Bytes::ZERO => Fit::Whole,
            each_step => Fit::Streamed { each_step },
        })
    }

    /// The smaller request closest to the default that runs on a card, with its place among them.
    pub(super) fn smaller_on(&self, room: &Room) -> Option<(usize, &str)> {
        let mut smaller = self.requests.iter().enumerate().skip(1);
        let (index, request) = smaller.find(|(_, request)| Bytes(request.least) <= room.bytes)?;
        Some((index, &request.label))
    }

    /// Whether a request of this extent runs on a card, as far as one that is no smaller is known to.
    pub(super) fn runs_on(&self, asked: Extent, room: &Room) -> bool {
        let default = self
            .requests
            .first()
            .map_or(Extent::default(), |request| request.extent);
        let asked = asked.or(default);
        let mut running = self
            .requests
            .iter()
            .filter(|request| Bytes(request.least) <= room.bytes);
        running.any(|request| asked.is_within(request.extent))
    }

    /// Bytes of all components.
    pub fn weights(&self) -> Bytes {
        self.weights
    }
}

impl StageWays {
    /// Bytes that are copied to the card in each of several passes, in the first way that runs; `None` where none does.
    fn streamed_on(&self, ledger: &Ledger) -> Option<Bytes> {
        self.0.iter().find_map(|need| {
            let Verdict::Run { moves } = plan(ledger, need, Policy::default(), Millis(0)) else {
                return None;
            };
            let streamed = need
                .components
                .iter()
                .map(|component| component.size_of(part_after(ledger, &moves, component)).streamed);
            Some(match need.passes > 1 {
                true => streamed.sum(),
                false => Bytes::ZERO,
            })
        })
    }
}

fn component(sizes: &ComponentSizes) -> Component {
    let blocks = sizes.blocks.iter().flat_map(|equal| {
        let block = BlockSize {
            uses: if equal.once { Uses::Once } else { Uses::EachPass },
            bytes: Bytes(equal.bytes),
            in_ring: Bytes(equal.in_ring),
        };
        std::iter::repeat_n(block, equal.count)
    });
    let blocks: Vec<BlockSize> = blocks.collect();
    Component {
        id: ComponentId::new(sizes.name.as_str()),
        name: sizes.name.clone(),
        bytes: Bytes(sizes.bytes),
        reload_seconds: 0.0,
        parts: parts_of_blocks(Bytes(sizes.bytes), &blocks),
    }
}

/// The sizes of all models, as they are in the file.
pub(super) fn all_sizes() -> &'static [Sizes] {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        sizes: Vec<Sizes>,
    }
    static ALL: LazyLock<Vec<Sizes>> = LazyLock::new(|| {
        let file: Result<File, _> = Figment::from(Toml::string(include_str!("sizes.toml"))).extract();
        match file {
            Ok(file) => file.sizes,
            Err(problem) => {
                tracing::error!(%problem, "the sizes of the catalogue cannot be read"); // a test rules it out
                Vec::new()
            }
        }
    });
    &ALL
}

/// The needs of a model; `None` for one without sizes.
pub(super) fn needs_of(model: &str, preset: Preset, is_f32: bool) -> Option<&'static Needs> {
    static ALL: LazyLock<Vec<(&Sizes, Needs)>> = LazyLock::new(|| {
        all_sizes()
            .iter()
            .map(|sizes| (sizes, Needs::of(sizes)))
            .collect()
    });
    let is_it = |(sizes, _): &&(&Sizes, Needs)| {
        sizes.model == model && sizes.preset == preset.as_str() && sizes.is_f32 == is_f32
    };
    ALL.iter().find(is_it).map(|(_, needs)| needs)
}
