//! Workers are replaced on request.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::Core;
use crate::error::Error;
use crate::queue::recycles::PendingRecycle;
use crate::queue::request::Reply;

impl Core {
    pub(in crate::queue) fn recycle(
        &mut self,
        card: &str,
        client: &str,
        force: bool,
        reply: Reply<Result<Vec<String>, Error>>,
        now: Instant,
    ) {
        let asked: BTreeSet<usize> = self.view(now).ready_cards(card).into_iter().collect();
        if asked.is_empty() {
            let _ = reply.send(Err(self.view(now).not_ready(card)));
            return;
        }
        for &index in &asked {
            self.cards[index].retire(client);
            if force {
                self.cards[index].recycle_retiring();
            }
        }
        self.recycles.push(PendingRecycle::new(asked, reply));
        self.dirty = true;
    }

    /// Workers that are to be replaced end once they have nothing left to do, whether or not the client that asked still waits.
    pub(super) fn recycle_retired_workers(&mut self) {
        self.recycles.retain(PendingRecycle::is_asked_for);
        for card in &mut self.cards {
            if card.is_retired() {
                card.recycle_retiring();
            }
        }
    }

    pub(super) fn recycled(&mut self, index: usize) {
        let id = self.cards[index].description.id.clone();
        let mut done = Vec::new();
        for position in (0..self.recycles.len()).rev() {
            if self.recycles[position].ready(index, &id) {
                done.push(self.recycles.remove(position));
            }
        }
        done.into_iter().for_each(PendingRecycle::reply);
    }
}
