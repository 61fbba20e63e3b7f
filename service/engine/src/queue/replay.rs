//! Events of a job for those who submit it again by its idempotency key.

use residency::Bytes;

use super::listener::{is_coalescible, piece_bytes};
use crate::job::JobEvent;

/// The events so far that a later listener would miss.
#[derive(Debug, Default)]
pub(super) enum Replay {
    /// The job has no key: no client can join it.
    #[default]
    NotJoinable,
    /// All events, with the bytes of their pieces and the bound on these.
    Kept {
        events: Vec<JobEvent>,
        bytes: Bytes,
        bound: Bytes,
    },
    /// The pieces exceeded the bound: no events are kept, and no client can join any more.
    TooLarge,
}

impl Replay {
    /// For a job with a key.
    pub(super) fn within(bound: Bytes) -> Replay {
        Replay::Kept {
            events: Vec::new(),
            bytes: Bytes::ZERO,
            bound,
        }
    }

    /// Keeps an event that cannot be coalesced.
    pub(super) fn keep(&mut self, event: &JobEvent) {
        let Replay::Kept { events, bytes, bound } = self else {
            return;
        };
        if is_coalescible(&event.kind) {
            return;
        }
        *bytes += piece_bytes(&event.kind);
        if *bytes > *bound {
            *self = Replay::TooLarge;
        } else {
            events.push(event.clone());
        }
    }

    /// The events that a listener missed that joins now; `None` if they were not kept.
    pub(super) fn events(&self) -> Option<&[JobEvent]> {
        match self {
            Replay::Kept { events, .. } => Some(events),
            Replay::NotJoinable | Replay::TooLarge => None,
        }
    }
}
