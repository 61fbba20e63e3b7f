//! Everything that the queue knows, in one value.

use std::collections::BTreeMap;
use std::sync::Arc;

use residency::ComponentId;
use tokio::time::Instant;

use super::actor::Actor;
use super::report::{CardStatus, StatusReport};

impl Actor {
    pub(super) fn status_report(&self, now: Instant) -> StatusReport {
        let cards = self.cards.iter().enumerate().map(|(index, card)| CardStatus {
            description: card.description.clone(),
            attention: card.attention.clone(),
            state: card.state_name(),
            generation: card.generation,
            restarts: card.restarts,
            ledger: card.ledger.clone(),
            ledger_now: card.ledger_now(now),
            job: card.in_flight.as_ref().and_then(|running| running.job.clone()),
            reservations: self.claims.reservations(index, now),
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
            jobs: self.infos(false, now),
            latents: self.latents.len(),
            latent_bytes: self.latents.bytes(),
            texts: self.memos.len(),
            text_bytes: self.memos.bytes(),
            pinned: self.claims.pinned(),
            users: Arc::new(users),
        }
    }

    /// How many of everything there are.
    pub(super) fn census(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("jobs", self.jobs.len()),
            (
                "orders",
                self.cards.iter().filter(|card| card.in_flight.is_some()).count(),
            ),
            ("errands", self.cards.iter().map(|card| card.errands.len()).sum()),
            ("restores", self.cards.iter().map(|card| card.restore.len()).sum()),
            ("unloads", self.unloads.len()),
            ("trims", self.trims.len()),
            ("clients", self.shares.len()),
            (
                "listeners",
                self.jobs.values().map(|job| job.listeners.len()).sum(),
            ),
            ("latent leases", self.latents.leases()),
        ]
    }
}
