//! The status of the queue, in one value.

use std::collections::BTreeMap;
use std::sync::Arc;

use residency::ComponentId;

use super::record::{JobRecord, State};
use super::report::{CardStatus, JobInfo, StatusReport};
use super::view::View;

impl View<'_> {
    pub(super) fn status_report(&self) -> StatusReport {
        let cards = self.cards.iter().enumerate().map(|(index, card)| CardStatus {
            description: card.description.clone(),
            attention: card.attention.clone(),
            state: card.state(),
            generation: card.generation,
            restarts: card.restarts,
            problem: card.problem.clone(),
            ledger: card.ledger.clone(),
            ledger_now: card.ledger_now(self.now),
            job: card.in_flight.as_ref().and_then(|running| running.job.clone()),
            reservations: self.claims.reservations(index, self.now),
            streamed: self.streamed_on(index),
        });
        let mut users: BTreeMap<ComponentId, Vec<String>> = BTreeMap::new();
        for (key, known) in self.claims.known() {
            for id in known.ids() {
                let keys = users.entry(id.clone()).or_default();
                if !keys.contains(key) {
                    keys.push(key.clone());
                }
            }
        }
        StatusReport {
            cards: cards.collect(),
            jobs: self.infos(),
            latents: self.latents.len(),
            latent_bytes: self.latents.bytes(),
            texts: self.memos.len(),
            text_bytes: self.memos.bytes(),
            pinned: self.claims.pinned(),
            users: Arc::new(users),
        }
    }

    /// The jobs in the queue, oldest first.
    pub(super) fn infos(&self) -> Vec<JobInfo> {
        let mut live: Vec<&JobRecord> = self.jobs.values().collect();
        live.sort_unstable_by_key(|job| job.arrival);
        live.into_iter().map(|job| self.info(job)).collect()
    }

    /// A job as lists show it.
    pub(super) fn info(&self, job: &JobRecord) -> JobInfo {
        let card = job.last_card.and_then(|index| self.cards.get(index));
        let position = match job.state {
            State::Queued { position, .. } => position,
            State::Waiting { .. } | State::Reopening | State::Running { .. } | State::OutOfMemory(_) => None,
        };
        JobInfo {
            id: job.id.clone(),
            account: job.options.account.clone(),
            client: job.options.client.clone(),
            priority: job.options.priority,
            state: job.state.listed(),
            call: job.call(),
            model_key: job.entry.key.clone(),
            card: card.map(|card| card.description.id.clone()).unwrap_or_default(),
            stage: job.stage_name(),
            step: job.steps_done.0,
            steps: job.steps_done.1,
            position: position.unwrap_or(0),
            age: self.now.duration_since(job.accepted),
            error: None,
            makes: job.work.makes(),
        }
    }
}
