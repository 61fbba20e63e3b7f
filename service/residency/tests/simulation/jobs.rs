//! The jobs of clients in the simulation.

use std::collections::BTreeSet;

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use residency::{Bytes, Component, ComponentId, Millis, PartSize, Parts, ScratchKey, StageNeed, Wait};

pub(crate) const STAGES: [&str; 3] = ["encode_text", "denoise", "decode"];

/// A stage of a kind of job: its predicted need, and its actual allocation.
pub(crate) struct Stage {
    pub(crate) need: StageNeed,
    pub(crate) key: ScratchKey,
    pub(crate) predicted: Bytes,
    pub(crate) peak: Bytes,
    pub(crate) successes: u64,
    /// The least room in which it completed, and has not failed in since.
    pub(crate) ran_in: Option<Bytes>,
}

/// A kind of job: its stages.
pub(crate) struct Kind {
    pub(crate) stages: Vec<Stage>,
}

/// One job of some kind.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Arrival order.
    pub(crate) id: u64,
    pub(crate) kind: usize,
    pub(crate) stage: usize,
    pub(crate) overtaken: u32,
    pub(crate) low_memory: bool,
    pub(crate) attempts: u32,
    pub(crate) wait: Option<Wait>,
}

/// Parts of a component: each leaves an eighth more of it to be streamed, through slots of a ninth.
fn parts(whole: Bytes) -> Parts {
    let size = |streamed: u64| PartSize {
        bytes: Bytes(whole.0 / 8 * (8 - streamed) + whole.0 / 9),
        streamed: Bytes(whole.0 / 8 * streamed),
        streamed_once: Bytes::ZERO,
    };
    Parts::new(whole, (1..=8).map(size), |_| {})
}

/// Components with odd sizes, a few of them large. Every other one has parts.
pub(crate) fn components(rng: &mut ChaCha8Rng, total: Bytes) -> Vec<Component> {
    let some = |n: usize| {
        let share = if n < 3 {
            rng.random_range(0.2..0.6)
        } else {
            rng.random_range(0.002..0.2)
        };
        let bytes = Bytes((total.0 as f64 * share) as u64 | 1);
        let reload_seconds = bytes.0 as f64 / 40e9 * rng.random_range(0.5..4.0);
        Component {
            id: ComponentId::new(format!("{n}")),
            name: STAGES[n % 3].into(),
            bytes,
            reload_seconds,
            parts: if n.is_multiple_of(2) {
                parts(bytes)
            } else {
                Parts::default()
            },
        }
    };
    (0..10).map(some).collect()
}

pub(crate) fn kinds(rng: &mut ChaCha8Rng, components: &[Component], total: Bytes) -> Vec<Kind> {
    (0..6)
        .map(|kind| {
            let mut stages = stages(rng, kind, components, total);
            let all = stages.iter().flat_map(|stage| &stage.need.components);
            let model: BTreeSet<ComponentId> = all.map(|c| c.id.clone()).collect();
            for stage in &mut stages {
                stage.need.model = model.iter().cloned().collect();
            }
            Kind { stages }
        })
        .collect()
}

fn stages(rng: &mut ChaCha8Rng, kind: usize, components: &[Component], total: Bytes) -> Vec<Stage> {
    let count = rng.random_range(1..=3);
    let stage = |&name: &&str| {
        let many = rng.random_range(1..=3);
        let mut wanted: Vec<Component> = components.choose_multiple(rng, many).cloned().collect();
        if rng.random_bool(0.1) {
            wanted.push(wanted[0].clone()); // named twice, counted once
        }
        let peak = Bytes((total.0 as f64 * rng.random_range(0.01..0.3)) as u64);
        let predicted = Bytes((peak.0 as f64 * rng.random_range(0.7..1.6)) as u64);
        let key = ScratchKey {
            family: kind.to_string(),
            stage: name.into(),
            ..ScratchKey::default()
        };
        let need = StageNeed {
            name: name.into(),
            components: wanted,
            scratch: predicted,
            headroom: Bytes::ZERO,
            later: Vec::new(),
            model: Vec::new(),
            passes: if rng.random_bool(0.5) { 1 } else { 28 },
        };
        Stage {
            need,
            key,
            predicted,
            peak,
            successes: 0,
            ran_in: None,
        }
    };
    STAGES[..count].iter().map(stage).collect()
}

impl Job {
    pub(crate) fn new(id: u64, kind: usize, low_memory: bool) -> Job {
        Job {
            id,
            kind,
            stage: 0,
            overtaken: 0,
            low_memory,
            attempts: 0,
            wait: None,
        }
    }

    /// Whether it has lost patience by now.
    pub(crate) fn is_out_of_patience(&self, now: Millis) -> bool {
        self.wait.is_some_and(|wait| wait.is_over(now))
    }
}
