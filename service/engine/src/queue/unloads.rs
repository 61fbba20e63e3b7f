//! Unloads and trims that clients wait for.

use std::collections::{BTreeMap, BTreeSet};

use residency::{Bytes, Component};

use super::leaving::Leaving;
use super::record::JobRecord;
use super::report::UnloadReport;
use super::request::Reply;
use crate::error::Error;
use crate::job::JobId;
use crate::messages::Answer;
use crate::moved::{Freed, Kept};

/// An entry to unload.
pub(super) struct EntryToUnload {
    pub(super) key: String,
    /// By compute dtype.
    pub(super) components: BTreeMap<String, Vec<Component>>,
}

/// An unload for which a client waits.
pub(super) struct PendingUnload {
    pub(super) id: u64,
    /// None: everything.
    pub(super) entry: Option<EntryToUnload>,
    pub(super) waits_for: BTreeSet<JobId>,
    /// Workers that have not answered; none as long as nothing was sent.
    pub(super) outstanding: Option<usize>,
    pub(super) report: UnloadReport,
    failure: Option<String>,
    reply: Reply<Result<UnloadReport, Error>>,
}

/// A trim of several cards.
pub(super) struct PendingTrim {
    outstanding: usize,
    freed: Bytes,
    failure: Option<String>,
    reply: Reply<Result<Bytes, Error>>,
}

impl PendingUnload {
    pub(super) fn new(
        id: u64,
        entry: Option<EntryToUnload>,
        reply: Reply<Result<UnloadReport, Error>>,
    ) -> PendingUnload {
        PendingUnload {
            id,
            entry,
            waits_for: BTreeSet::new(),
            outstanding: None,
            report: UnloadReport::default(),
            failure: None,
            reply,
        }
    }

    /// Whether nothing has been sent yet and no job is waited for.
    pub(super) fn is_due(&self) -> bool {
        self.outstanding.is_none() && self.waits_for.is_empty()
    }

    /// The residents of a card that belong to the entries to unload.
    pub(super) fn concerned<'a>(
        &self,
        residents: impl Iterator<Item = &'a Component>,
        dtype: &str,
    ) -> Vec<Component> {
        let concerned = residents.filter(|c| match self.leaving(dtype) {
            Leaving::Everything | Leaving::Idle(_) => true,
            Leaving::Entry { components, .. } => components.iter().any(|own| own.id == c.id),
        });
        concerned.cloned().collect()
    }

    /// A worker's answer.
    pub(super) fn answered(&mut self, card: &str, answer: Answer) {
        self.outstanding = self.outstanding.map(|count| count.saturating_sub(1));
        match answer {
            Answer::Unloaded { freed, kept, .. } => {
                self.report.freed.extend(Freed::on(card, freed));
                self.report.kept.extend(Kept::on(card, kept));
            }
            Answer::Trimmed(_) => self.failure = Some("a worker trimmed when it was to unload".into()),
            Answer::Failed(problem) => self.failure = Some(problem),
        }
    }

    /// Replies to the caller, once all workers have answered.
    pub(super) fn reply(self) {
        let result = self
            .failure
            .map_or(Ok(self.report), |problem| Err(Error::Internal(problem)));
        let _ = self.reply.send(result); // the caller may have left
    }

    /// Whether a job that uses the entry came after this unload.
    pub(super) fn is_before(&self, job: &JobRecord) -> bool {
        self.concerns(job) && !self.waits_for.contains(&job.id)
    }

    pub(super) fn leaving(&self, dtype: &str) -> Leaving<'_> {
        match &self.entry {
            None => Leaving::Everything,
            Some(entry) => Leaving::Entry {
                key: &entry.key,
                components: entry.components.get(dtype).map_or(&[], Vec::as_slice),
            },
        }
    }

    pub(super) fn takes(&self, entry: &str) -> bool {
        self.entry.as_ref().is_none_or(|own| own.key == entry)
    }

    pub(super) fn job_ended(&mut self, id: &JobId) {
        self.waits_for.remove(id);
    }

    /// Whether the caller still waits for the reply.
    pub(super) fn is_asked_for(&self) -> bool {
        !self.reply.is_closed()
    }

    pub(super) fn concerns(&self, job: &JobRecord) -> bool {
        self.entry.as_ref().is_none_or(|own| job.concerns(&own.key))
    }
}

impl PendingTrim {
    pub(super) fn new(outstanding: usize, reply: Reply<Result<Bytes, Error>>) -> PendingTrim {
        PendingTrim {
            outstanding,
            freed: Bytes::ZERO,
            failure: None,
            reply,
        }
    }

    /// A worker's answer. False: other workers have not answered yet.
    pub(super) fn answered(&mut self, answer: Answer) -> bool {
        self.outstanding -= 1;
        match answer {
            Answer::Trimmed(bytes) => self.freed += bytes,
            Answer::Unloaded { .. } => self.failure = Some("a worker unloaded when it was to trim".into()),
            Answer::Failed(problem) => self.failure = Some(problem),
        }
        self.outstanding == 0
    }

    /// Replies to the caller.
    pub(super) fn reply(self) {
        let result = self
            .failure
            .map_or(Ok(self.freed), |problem| Err(Error::Internal(problem)));
        let _ = self.reply.send(result); // the caller may have left
    }
}
