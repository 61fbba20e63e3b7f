//! What happens in the queue, as it is told to who counts or traces it. Nothing in the queue depends on it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use residency::{Bytes, Component};

use crate::error::Error;
use crate::job::{Call, JobEventKind, JobId, JobReport, StageReport};

/// Is told what happens in the queue. It is called on the queue's task: it returns at once, and asks the queue nothing.
pub trait Observer: fmt::Debug + Send + Sync {
    /// Something has happened, now.
    fn happened(&self, happening: &Happening<'_>);
}

/// A job, as observers know it.
#[derive(Clone, Copy, Debug)]
pub struct ObservedJob<'a> {
    pub id: &'a JobId,
    pub call: Call,
    /// The model in its formats: `owner/name+4-bit`.
    pub model: &'a str,
    /// The client's name.
    pub client: &'a str,
    /// The client's trace that it is a part of (`traceparent` of W3C Trace Context); empty: none.
    pub trace: &'a str,
    /// Time since it was accepted.
    pub age: Duration,
}

/// Something that has happened.
#[derive(Debug)]
pub enum Happening<'a> {
    /// An event of a job, as its clients get it.
    Event {
        job: ObservedJob<'a>,
        event: &'a JobEventKind,
    },
    /// A job no longer waits for memory.
    Waited {
        job: ObservedJob<'a>,
        /// What it waited for: `late_eviction`, `foreign`, `leases`, `reservation`.
        cause: &'static str,
        lasted: Duration,
    },
    /// A stage is done.
    Stage {
        job: ObservedJob<'a>,
        report: &'a StageReport,
    },
    /// A job has ended.
    Ended {
        job: ObservedJob<'a>,
        report: &'a JobReport,
        result: Result<(), &'a Error>,
    },
    /// A component was loaded.
    Loaded {
        card: &'a str,
        /// Bytes of it that are on the card.
        bytes: Bytes,
        lasted: Duration,
    },
    /// Components were unloaded, with the bytes that the driver shows as free since.
    Unloaded {
        card: &'a str,
        freed: &'a [(Component, gpu::Unloaded)],
    },
    /// A card's worker is gone. `was_asked_for`: it was replaced on request.
    WorkerLost { card: &'a str, was_asked_for: bool },
}

/// All observers of a queue.
#[derive(Clone, Debug, Default)]
pub struct Observers(pub Vec<Arc<dyn Observer>>);

impl Observers {
    pub(super) fn tell(&self, happening: &Happening<'_>) {
        for observer in &self.0 {
            observer.happened(happening);
        }
    }
}
