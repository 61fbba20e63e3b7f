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
use super::standing::Known;
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

/// What is to leave.
pub(super) enum Leaving<'a> {
    Everything,
    /// An entry, with the components that it has on cards of one dtype.
    Entry {
        key: &'a str,
        components: &'a [Component],
    },
    /// Entries that nobody has used for long.
    Idle(&'a BTreeSet<String>),
}

impl Leaving<'_> {
    fn has(&self, entry: &str) -> bool {
        match self {
            Leaving::Everything => true,
            Leaving::Entry { key, .. } => *key == entry,
            Leaving::Idle(keys) => keys.contains(entry),
        }
    }

    /// Whether these are the same model under another name, that is asked to leave by this one.
    fn is(&self, others: &[Component]) -> bool {
        let Leaving::Entry { components, .. } = self else {
            return false;
        };
        let ids = |components: &[Component]| -> BTreeSet<ComponentId> {
            components.iter().map(|c| c.id.clone()).collect()
        };
        ids(components) == ids(others)
    }
}

impl PendingUnload {
    fn leaving(&self, dtype: &str) -> Leaving<'_> {
        match &self.entry {
            None => Leaving::Everything,
            Some((entry, models)) => Leaving::Entry {
                key: &entry.key,
                components: models.get(dtype).map_or(&[], |open| &open.components),
            },
        }
    }

    fn takes(&self, entry: &str) -> bool {
        self.entry.as_ref().is_none_or(|(own, _)| own.key == entry)
    }

    pub(super) fn job_ended(&mut self, id: &JobId) {
        self.waits_for.remove(id);
    }

    /// Whether somebody has to be watched for losing interest.
    pub(super) fn is_asked_for(&self) -> bool {
        !self.reply.is_closed()
    }

    fn concerns(&self, job: &JobRecord) -> bool {
        self.entry.as_ref().is_none_or(|(own, _)| job.concerns(&own.key))
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
        let mut outstanding = 0;
        for index in 0..self.cards.len() {
            let card = &self.cards[index];
            let leaving = self.unloads[position].leaving(&card.description.compute_dtype);
            let residents = card.ledger.residents().map(|r| &r.component);
            let concerned = residents.filter(|c| match leaving {
                Leaving::Everything | Leaving::Idle(_) => true,
                Leaving::Entry { components, .. } => components.iter().any(|own| own.id == c.id),
            });
            let (leave, keep) = self.who_may_leave(&leaving, concerned.cloned().collect(), index);
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

    /// Which of the components may leave a card; the others with the reason why they stay.
    pub(super) fn who_may_leave(
        &self,
        leaving: &Leaving<'_>,
        residents: Vec<Component>,
        index: usize,
    ) -> (Vec<ComponentId>, Vec<Kept>) {
        let card = &self.cards[index].description;
        let (mut leave, mut keep) = (Vec::new(), Vec::new());
        for component in residents {
            match self.why_it_stays(leaving, &component.id, index) {
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

    fn why_it_stays(&self, leaving: &Leaving<'_>, id: &ComponentId, index: usize) -> Option<String> {
        let dtype = &self.cards[index].description.compute_dtype;
        let users = self
            .claims
            .known()
            .filter(|(_, known)| known.components(dtype).iter().any(|c| c.id == *id));
        let mut shared = None;
        for (key, known) in users {
            let is_own = leaving.has(key);
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
            let is_whole = || !leaving.is(known.components(dtype)) && self.stays_whole(key, known, index);
            if !is_own && (self.claims.is_pinned(key) || holder.is_some() || in_use() || is_whole()) {
                shared.get_or_insert_with(|| format!("shared with {key}"));
            }
        }
        shared
    }

    /// Whether a card has all of an entry, which nobody wants to leave: it would have to come back in part.
    fn stays_whole(&self, key: &str, known: &Known, index: usize) -> bool {
        let card = &self.cards[index];
        let mut own = known.components(&card.description.compute_dtype).iter();
        own.all(|c| card.ledger.is_resident(&c.id)) && !self.unloads.iter().any(|unload| unload.takes(key))
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

    /// Entries that nobody has used for long leave the cards, those of the same time together: none keeps what it
    /// shares for another of them.
    pub(super) fn unload_idle_entries(&mut self, now: Instant) {
        if self.next_idle_unload().is_some_and(|at| at <= now) {
            let idle = self
                .unused()
                .filter(|(_, known)| self.leaves_at(known, known.last_used).is_some_and(|at| at <= now));
            let idle: BTreeSet<String> = idle.map(|(key, _)| key.clone()).collect();
            for key in &idle {
                self.claims.asked(key, now); // asked once, then again after as long
            }
            for index in 0..self.cards.len() {
                self.send_idle_away(&idle, index, now);
            }
        }
        self.forget_entries();
    }

    fn send_idle_away(&mut self, idle: &BTreeSet<String>, index: usize, now: Instant) {
        let card = &self.cards[index];
        if !card.is_ready() {
            return;
        }
        let dtype = &card.description.compute_dtype;
        let known = idle.iter().filter_map(|key| self.claims.get(key));
        let mut residents: Vec<Component> = known
            .flat_map(|known| known.components(dtype))
            .filter(|c| card.ledger.is_resident(&c.id))
            .cloned()
            .collect();
        residents.sort_by(|a, b| a.id.cmp(&b.id));
        residents.dedup_by(|a, b| a.id == b.id);
        let (components, _) = self.who_may_leave(&Leaving::Idle(idle), residents, index);
        if !components.is_empty() {
            let id = self.number();
            let command = Command::Unload { id, components };
            self.cards[index].errand(id, Errand::KeepAlive, command, now);
        }
    }

    pub(super) fn next_idle_unload(&self) -> Option<Instant> {
        let asked_or_used = |known: &Known| known.asked.unwrap_or(known.last_used).max(known.last_used);
        self.unused()
            .filter_map(|(_, known)| self.leaves_at(known, asked_or_used(known)))
            .min()
    }

    /// When an entry that nobody uses leaves: its own keep-alive after `since`, or once there has been no job at all for
    /// so long that everything leaves.
    fn leaves_at(&self, known: &Known, since: Instant) -> Option<Instant> {
        let settings = &self.settings;
        let keep_alive = settings.keep_alive_of.get(&known.entry.id);
        let keep_alive = keep_alive.copied().unwrap_or(settings.keep_alive);
        let own = keep_alive.map(|keep_alive| since + keep_alive);
        let last_use = self.claims.known().map(|(_, known)| known.last_used).max();
        let with_all = settings
            .unload_when_idle
            .filter(|_| self.jobs.is_empty())
            .map(|idle| since.max(last_use.unwrap_or(since)) + idle);
        own.into_iter().chain(with_all).min()
    }

    /// Entries that no job is of.
    fn unused(&self) -> impl Iterator<Item = (&String, &Known)> {
        let known = self.claims.known();
        known.filter(|(key, _)| !self.jobs.values().any(|job| job.concerns(key)))
    }

    fn forget_entries(&mut self) {
        let (jobs, cards) = (&self.jobs, &self.cards);
        self.dirty |= self.claims.forget(|key, known| {
            jobs.values().any(|job| job.concerns(key))
                || cards
                    .iter()
                    .any(|card| card.ledger.residents().any(|r| known.names(&r.component.id)))
        });
    }
}
