//! How a job's events reach those who listen: a mailbox each, that a slow reader cannot make grow without bound.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, mpsc};

use super::request::Request;
use crate::job::{JobEvent, JobEventKind, JobId};
use crate::library::Entry;

/// A job that was submitted. Dropping it cancels the job, unless it was detached or others listen.
#[derive(Debug)]
pub struct Job {
    /// Its name.
    pub id: JobId,
    /// The entry that it uses.
    pub entry: Arc<Entry>,
    /// Whether an idempotency key joined it to a job that was there already.
    pub joined: bool,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) listener: u64,
    pub(super) requests: mpsc::WeakUnboundedSender<Request>,
}

impl Job {
    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<JobEvent> {
        loop {
            let changed = self.mailbox.changed.notified();
            {
                let mut contents = self.mailbox.lock();
                if let Some(event) = contents.events.pop_front() {
                    return Some(event);
                }
                if contents.closed {
                    return None;
                }
            }
            changed.await;
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(requests) = self.requests.upgrade() {
            // A queue that has ended has cancelled the job already.
            let _ = requests.send(Request::Left {
                job: self.id.clone(),
                listener: self.listener,
            });
        }
    }
}

/// Events that one listener has not read yet.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    contents: Mutex<Contents>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Contents {
    events: VecDeque<JobEvent>,
    closed: bool,
}

impl Mailbox {
    /// Adds an event. One that may be coalesced takes the place of an unread one that it says more of: of the same
    /// kind and subject, with no event between them that is never lost. So every component's load, and every picture's
    /// steps in each of its stages, is read to its end, however slowly; and for each event that is never lost, at the
    /// most one of every kind and subject is unread.
    pub(super) fn push(&self, event: JobEvent) {
        let mut contents = self.lock();
        if is_coalescible(&event.kind) {
            let unread = contents.events.iter().enumerate().rev();
            let outdated = unread
                .take_while(|(_, unread)| is_coalescible(&unread.kind))
                .find(|(_, unread)| are_of_one_thing(&unread.kind, &event.kind))
                .map(|(index, _)| index);
            if let Some(index) = outdated {
                contents.events.remove(index);
            }
        }
        contents.events.push_back(event);
        drop(contents);
        self.changed.notify_one();
    }

    /// No event comes any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// A listener that panicked in between left the contents whole: every change is one call.
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two events are of the same kind, and of the same component or picture where they are of one.
fn are_of_one_thing(earlier: &JobEventKind, later: &JobEventKind) -> bool {
    use JobEventKind::{Loading, Preview, Step};
    match (earlier, later) {
        (Loading { component: a, .. }, Loading { component: b, .. }) => a.id == b.id,
        (Step { picture: a, .. }, Step { picture: b, .. })
        | (Preview { picture: a, .. }, Preview { picture: b, .. }) => a == b,
        _ => std::mem::discriminant(earlier) == std::mem::discriminant(later),
    }
}

/// Whether the latest of its kind says all that the earlier ones said.
pub(super) fn is_coalescible(kind: &JobEventKind) -> bool {
    match kind {
        JobEventKind::Queued { .. }
        | JobEventKind::Waiting { .. }
        | JobEventKind::Loading { .. }
        | JobEventKind::Step { .. }
        | JobEventKind::Preview { .. } => true,
        JobEventKind::Accepted { .. }
        | JobEventKind::Evicting { .. }
        | JobEventKind::Retrying { .. }
        | JobEventKind::Stage { .. }
        | JobEventKind::Picture { .. }
        | JobEventKind::Latent { .. }
        | JobEventKind::Done(_)
        | JobEventKind::Failed(_) => false,
    }
}
