//! Requests to replace workers.

use std::collections::BTreeSet;

use super::request::Reply;
use crate::error::Error;

/// A request to replace workers, until the new ones are ready.
pub(super) struct PendingRecycle {
    /// Cards, by index, whose new workers are not ready yet.
    waiting: BTreeSet<usize>,
    /// Ids of the cards whose new workers are ready.
    done: Vec<String>,
    reply: Reply<Result<Vec<String>, Error>>,
}

impl PendingRecycle {
    pub(super) fn new(cards: BTreeSet<usize>, reply: Reply<Result<Vec<String>, Error>>) -> PendingRecycle {
        PendingRecycle {
            waiting: cards,
            done: Vec::new(),
            reply,
        }
    }

    /// A card has a new worker; true if it was the last one.
    pub(super) fn ready(&mut self, card: usize, id: &str) -> bool {
        if self.waiting.remove(&card) {
            self.done.push(id.to_owned());
        }
        self.waiting.is_empty()
    }

    /// Whether the client that asked still waits.
    pub(super) fn is_asked_for(&self) -> bool {
        !self.reply.is_closed()
    }

    pub(super) fn reply(self) {
        let _ = self.reply.send(Ok(self.done)); // the caller may have left
    }
}
