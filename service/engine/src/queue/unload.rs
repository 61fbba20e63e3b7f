//! Taking entries off cards: on request, after the jobs that use them, or when nobody has used them for long.

use std::collections::BTreeSet;
use std::sync::Arc;

use residency::{Bytes, Component, ComponentId};
use tokio::time::Instant;

use super::actor::Actor;
use super::cards::Errand;
use super::record::JobRecord;
use super::report::{Freed, Kept, UnloadReport};
use super::request::{OpenModels, Reply};
use crate::error::Error;
use crate::job::JobId;
use crate::library::Entry;
use crate::messages::{Answer, Command};

/// An unload that is waited for.
pub(super) struct PendingUnload {
    id: u64,
    /// None: everything.
    entry: Option<(Arc<Entry>, OpenModels)>,
    waits_for: BTreeSet<JobId>,
    /// Workers that have not answered; none as long as nothing was sent.
    outstanding: Option<usize>,
    report: UnloadReport,
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
    pub(super) fn job_ended(&mut self, id: &JobId) {
        self.waits_for.remove(id);
    }

    /// Whether somebody has to be watched for losing interest.
    pub(super) fn is_asked_for(&self) -> bool {
        !self.reply.is_closed()
    }

    fn concerns(&self, job: &JobRecord) -> bool {
        self.entry
            .as_ref()
            .is_none_or(|(entry, _)| entry.key == job.entry.key)
    }
}

impl Actor {
    pub(super) fn unload(
        &mut self,
        entry: Option<(Arc<Entry>, OpenModels)>,
        force: bool,
        reply: Reply<Result<UnloadReport, Error>>,
        now: Instant,
    ) {
        self.learned
            .forgive(entry.as_ref().map(|(entry, _)| entry.key.as_str()));
        let entry = entry.map(|(entry, models)| {
            let models = self.refreshed(&entry, &models);
            (entry, models)
        });
        let mut pending = PendingUnload {
            id: self.number(),
            entry,
            waits_for: BTreeSet::new(),
            outstanding: None,
            report: UnloadReport::default(),
            failure: None,
            reply,
        };
        let users = self
            .jobs
            .values()
            .filter(|job| pending.concerns(job))
            .map(|job| job.id.clone());
        pending.waits_for = users.collect();
        if force {
            pending.report.cancelled_jobs = pending.waits_for.iter().cloned().collect();
        }
        let cancelled = pending.report.cancelled_jobs.clone();
        self.unloads.push(pending);
        for id in cancelled {
            self.stop(&id, Error::Cancelled, now);
        }
        self.replan = true;
    }

    /// Jobs that came after an unload of their entry start after it.
    pub(super) fn is_behind_an_unload(&self, job: &JobRecord) -> bool {
        let before = self.unloads.iter().filter(|unload| unload.concerns(job));
        before
            .into_iter()
            .any(|unload| !unload.waits_for.contains(&job.id))
    }

    /// Sends unloads whose jobs have ended, and forgets those that nobody waits for any more.
    pub(super) fn unload_what_can_be(&mut self, now: Instant) {
        let before = self.unloads.len();
        self.unloads.retain(PendingUnload::is_asked_for);
        self.replan |= self.unloads.len() != before;
        for position in 0..self.unloads.len() {
            let unload = &self.unloads[position];
            if unload.outstanding.is_none() && unload.waits_for.is_empty() {
                self.send_unload(position, now);
            }
        }
        self.answer_unloads();
    }

    fn send_unload(&mut self, position: usize, now: Instant) {
        let id = self.unloads[position].id;
        let entry = self.unloads[position]
            .entry
            .as_ref()
            .map(|(entry, _)| entry.key.clone());
        let mut outstanding = 0;
        for index in 0..self.cards.len() {
            let residents = self.residents_of(position, index);
            let (leave, keep) = self.who_may_leave(entry.as_deref(), residents, index);
            self.unloads[position].report.kept.extend(keep);
            if !leave.is_empty() && self.cards[index].is_ready() {
                let errand = self.number();
                let command = Command::Unload {
                    id: errand,
                    components: leave.clone(),
                };
                let waiting = Errand::Unload {
                    unload: id,
                    components: leave,
                };
                self.cards[index].errand(errand, waiting, command, now);
                outstanding += 1;
            }
        }
        self.unloads[position].outstanding = Some(outstanding);
    }

    fn residents_of(&self, position: usize, index: usize) -> Vec<Component> {
        let card = &self.cards[index];
        let residents = card.ledger.residents().map(|r| r.component.clone());
        match &self.unloads[position].entry {
            None => residents.collect(),
            Some((_, models)) => {
                let open = models.get(&card.description.compute_dtype);
                let own = open.map_or(&[][..], |open| &open.components);
                residents
                    .filter(|c| own.iter().any(|own| own.id == c.id))
                    .collect()
            }
        }
    }

    /// Which components of an entry (none: of all) may leave a card; the others with the reason why they stay.
    fn who_may_leave(
        &self,
        entry: Option<&str>,
        residents: Vec<Component>,
        index: usize,
    ) -> (Vec<ComponentId>, Vec<Kept>) {
        let card = &self.cards[index].description;
        let (mut leave, mut keep) = (Vec::new(), Vec::new());
        for component in residents {
            match self.why_it_stays(entry, &component.id, &card.compute_dtype) {
                Some(reason) => keep.push(Kept {
                    component,
                    card: card.id.clone(),
                    reason,
                }),
                None => leave.push(component.id),
            }
        }
        (leave, keep)
    }

    fn why_it_stays(&self, entry: Option<&str>, id: &ComponentId, dtype: &str) -> Option<String> {
        let users = self
            .claims
            .known()
            .filter(|(_, known)| known.components(dtype).iter().any(|c| c.id == *id));
        let mut shared = None;
        for (key, _) in users {
            let is_own = entry.is_none_or(|entry| entry == key);
            let holder = self.claims.holder(key);
            let in_use = || {
                self.jobs
                    .values()
                    .any(|job| job.entry.key == *key && !self.is_behind_an_unload(job))
            };
            if is_own && self.claims.is_pinned(key) {
                return Some("pinned".to_owned());
            }
            if let Some(holder) = holder.filter(|_| is_own) {
                return Some(format!("held by {holder}"));
            }
            if !is_own && (self.claims.is_pinned(key) || holder.is_some() || in_use()) {
                shared.get_or_insert_with(|| format!("shared with {key}"));
            }
        }
        shared
    }

    pub(super) fn unloaded(&mut self, id: u64, index: usize, answer: Answer) {
        let card = self.cards[index].description.id.clone();
        let Some(unload) = self.unloads.iter_mut().find(|unload| unload.id == id) else {
            return;
        };
        unload.outstanding = unload.outstanding.map(|count| count.saturating_sub(1));
        match answer {
            Answer::Unloaded { freed, kept, .. } => {
                let freed = freed.into_iter().map(|(component, unloaded)| Freed {
                    component,
                    card: card.clone(),
                    booked: unloaded.booked,
                    freed: unloaded.freed,
                });
                unload.report.freed.extend(freed);
                let kept = kept.into_iter();
                let kept = kept.map(|(component, reason)| Kept {
                    component,
                    card: card.clone(),
                    reason,
                });
                unload.report.kept.extend(kept);
            }
            Answer::Trimmed(_) => unload.failure = Some("a worker trimmed when it was to unload".into()),
            Answer::Failed(problem) => unload.failure = Some(problem),
        }
    }

    fn answer_unloads(&mut self) {
        let done = self
            .unloads
            .extract_if(.., |unload| unload.outstanding == Some(0));
        for unload in done.collect::<Vec<_>>() {
            let result = unload
                .failure
                .map_or(Ok(unload.report), |problem| Err(Error::Internal(problem)));
            let _ = unload.reply.send(result); // whoever asked may have left
            self.replan = true;
        }
    }

    pub(super) fn trim(&mut self, card: &str, reply: Reply<Result<Bytes, Error>>, now: Instant) {
        let wanted = |index: &usize| {
            self.cards[*index].is_ready() && (card.is_empty() || self.cards[*index].description.id == card)
        };
        let wanted: Vec<usize> = (0..self.cards.len()).filter(wanted).collect();
        if wanted.is_empty() {
            let _ = reply.send(Err(self.not_ready(card)));
            return;
        }
        let trim = self.number();
        let pending = PendingTrim {
            outstanding: wanted.len(),
            freed: Bytes::ZERO,
            failure: None,
            reply,
        };
        self.trims.insert(trim, pending);
        for index in wanted {
            let id = self.number();
            self.cards[index].errand(id, Errand::Trim { trim }, Command::Trim { id }, now);
        }
    }

    pub(super) fn trimmed(&mut self, id: u64, answer: Answer) {
        let Some(mut trim) = self.trims.remove(&id) else {
            return;
        };
        trim.outstanding -= 1;
        match answer {
            Answer::Trimmed(bytes) => trim.freed += bytes,
            Answer::Unloaded { .. } => trim.failure = Some("a worker unloaded when it was to trim".into()),
            Answer::Failed(problem) => trim.failure = Some(problem),
        }
        if trim.outstanding > 0 {
            self.trims.insert(id, trim);
            return;
        }
        let result = trim
            .failure
            .map_or(Ok(trim.freed), |problem| Err(Error::Internal(problem)));
        let _ = trim.reply.send(result); // whoever asked may have left
    }

    /// Entries that nobody has used for long leave the cards.
    pub(super) fn unload_idle_entries(&mut self, now: Instant) {
        let idle: Vec<String> = self
            .idle_entries()
            .filter(|(_, at)| *at <= now)
            .map(|(key, _)| key)
            .collect();
        for key in idle {
            self.claims.used(&key, now); // asked once, then again after as long
            for index in 0..self.cards.len() {
                let card = &self.cards[index];
                if !card.is_ready() {
                    continue;
                }
                let dtype = &card.description.compute_dtype;
                let known = self
                    .claims
                    .get(&key)
                    .map_or(&[][..], |known| known.components(dtype));
                let residents = known
                    .iter()
                    .filter(|c| card.ledger.is_resident(&c.id))
                    .cloned()
                    .collect();
                let (leave, _) = self.who_may_leave(Some(&key), residents, index);
                if !leave.is_empty() {
                    let id = self.number();
                    let command = Command::Unload {
                        id,
                        components: leave,
                    };
                    self.cards[index].errand(id, Errand::KeepAlive, command, now);
                }
            }
        }
        self.forget_entries();
    }

    pub(super) fn next_idle_unload(&self) -> Option<Instant> {
        self.idle_entries().map(|(_, at)| at).min()
    }

    fn idle_entries(&self) -> impl Iterator<Item = (String, Instant)> {
        let keep_alive = self.settings.keep_alive;
        let unused = self
            .claims
            .known()
            .filter(|(key, _)| !self.jobs.values().any(|job| job.entry.key == **key));
        unused.filter_map(move |(key, known)| Some((key.clone(), known.last_used + keep_alive?)))
    }

    fn forget_entries(&mut self) {
        let (jobs, cards) = (&self.jobs, &self.cards);
        self.claims.forget(|key, known| {
            jobs.values().any(|job| job.entry.key == key)
                || cards
                    .iter()
                    .any(|card| card.ledger.residents().any(|r| known.names(&r.component.id)))
        });
    }
}
