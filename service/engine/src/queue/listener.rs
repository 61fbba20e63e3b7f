//! Events of a job for its listeners: each has a mailbox, which is bounded for a slow reader. Most events are
//! coalesced. Pieces of results cannot be: a listener with too many unread bytes of them is dropped. Pieces that the service encodes
//! (`encoding`) are not the client's to read, and do not count.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::Piece;
use residency::Bytes;
use tokio::sync::{Notify, mpsc};

use super::core::Input;
use super::encoding::{PiecesToEncode, ToEncode, Unencoded};
use crate::error::Error;
use crate::job::{JobEvent, JobEventKind, JobId};
use crate::library::Entry;

/// A submitted job. Dropping it cancels the job, unless the job is detached or has other listeners.
#[derive(Debug)]
pub struct Job {
    /// Id of the job.
    pub id: JobId,
    /// The entry that it uses.
    pub entry: Arc<Entry>,
    /// Whether an idempotency key joined it to an existing job.
    pub joined: bool,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) listener: u64,
    pub(super) inputs: mpsc::WeakUnboundedSender<Input>,
}

/// A listener's registration: a [`Job`] without the channel back to the core.
pub(super) struct Joined {
    pub(super) id: JobId,
    pub(super) entry: Arc<Entry>,
    pub(super) joined: bool,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) listener: u64,
}

impl Joined {
    pub(super) fn handle(self, inputs: mpsc::WeakUnboundedSender<Input>) -> Job {
        Job {
            id: self.id,
            entry: self.entry,
            joined: self.joined,
            mailbox: self.mailbox,
            listener: self.listener,
            inputs,
        }
    }
}

impl Job {
    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<JobEvent> {
        loop {
            let changed = self.mailbox.changed.notified();
            {
                let mut contents = self.mailbox.lock();
                if let Some(event) = contents.events.pop_front() {
                    contents.take_off(piece_bytes(&event.kind));
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

impl Job {
    /// Takes the pieces of the job for the service to encode; `instead`: the client gets none of them. Pieces that have come already
    /// are among them. To be called once.
    pub fn encode(&mut self, instead: bool) -> PiecesToEncode {
        self.mailbox.begin_encoding(instead);
        PiecesToEncode::new(self.mailbox.clone(), self.inputs.clone())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(inputs) = self.inputs.upgrade() {
            // A queue that has ended has cancelled the job already.
            let _ = inputs.send(Input::Left {
                job: self.id.clone(),
                listener: self.listener,
            });
        }
    }
}

/// Bytes of results of one account's jobs that some listener has not read yet, each piece counted once.
#[derive(Debug)]
pub(super) struct Unread {
    bytes: AtomicU64,
    bound: Bytes,
}

/// The bytes of a piece, which count for as long as any holder has them.
struct Counted {
    data: bytes::Bytes,
    account: Arc<Unread>,
}

impl Unread {
    pub(super) fn new(bound: Bytes) -> Unread {
        Unread {
            bytes: AtomicU64::new(0),
            bound,
        }
    }

    /// Returns the same bytes. They count from here on, until the last holder drops them.
    pub(super) fn count(self: &Arc<Unread>, data: bytes::Bytes) -> bytes::Bytes {
        self.bytes.fetch_add(data.len() as u64, Relaxed);
        bytes::Bytes::from_owner(Counted {
            data,
            account: self.clone(),
        })
    }

    /// Whether the unread bytes without this piece exceed twice the bound. The piece is counted already.
    fn is_exceeded_twice(&self, piece: Bytes) -> bool {
        let others = self.bytes.load(Relaxed).saturating_sub(piece.0);
        others > self.bound.0.saturating_mul(2)
    }

    fn is_exceeded(&self) -> bool {
        Bytes(self.bytes.load(Relaxed)) > self.bound
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.account.bytes.fetch_sub(self.data.len() as u64, Relaxed);
    }
}

/// Events that one listener has not read yet.
#[derive(Debug)]
pub(super) struct Mailbox {
    contents: Mutex<Contents>,
    changed: Notify,
    to_encode_changed: Notify,
    /// Unread bytes of the listener's account.
    account: Arc<Unread>,
    unencoded: Arc<Unencoded>,
}

#[derive(Debug, Default)]
struct Contents {
    events: VecDeque<JobEvent>,
    /// Bytes of the pieces among the events, without those that the listener missed.
    unread: Bytes,
    /// Bytes of the pieces that it missed. These are before all others.
    missed: Bytes,
    /// Bound on the unread bytes; a single piece may exceed it.
    bound: Bytes,
    closed: bool,
    /// Where the service encodes the pieces.
    to_encode: Option<ToEncode>,
}

impl Contents {
    /// Counts a piece among the events as read.
    fn take_off(&mut self, bytes: Bytes) {
        if bytes <= self.missed {
            self.missed -= bytes;
        } else {
            self.unread -= bytes;
        }
    }
}

impl Mailbox {
    pub(super) fn new(bound: Bytes, account: Arc<Unread>, unencoded: Arc<Unencoded>) -> Mailbox {
        let contents = Contents {
            bound,
            ..Contents::default()
        };
        Mailbox {
            contents: Mutex::new(contents),
            changed: Notify::new(),
            to_encode_changed: Notify::new(),
            account,
            unencoded,
        }
    }

    /// Gives the pieces that come, and those that have come, to an encoder.
    fn begin_encoding(&self, instead: bool) {
        let mut contents = self.lock();
        let mut to_encode = ToEncode::new(instead);
        for event in std::mem::take(&mut contents.events) {
            let is_moved = match &event.kind {
                JobEventKind::Piece { item, seed, piece } => {
                    to_encode.push(*item, *seed, piece.clone(), &self.unencoded);
                    instead
                }
                _ => false,
            };
            if is_moved {
                contents.take_off(piece_bytes(&event.kind));
            } else {
                contents.events.push_back(event);
            }
        }
        contents.to_encode = Some(to_encode);
    }

    /// Has something done with what waits to be encoded. Returns its result, and whether nothing more comes.
    pub(super) fn with_encoder<T>(&self, work: impl FnOnce(&mut ToEncode) -> Option<T>) -> (Option<T>, bool) {
        let mut contents = self.lock();
        let result = contents.to_encode.as_mut().and_then(work);
        (result, contents.closed)
    }

    /// Notified when a piece was added that is to be encoded, and when no more come.
    pub(super) fn to_encode_changed(&self) -> &Notify {
        &self.to_encode_changed
    }

    /// Whether the service encodes what is delivered.
    pub(super) fn is_encoded(&self) -> bool {
        self.lock().to_encode.as_ref().is_some_and(ToEncode::is_read)
    }

    /// Whether the client gets what the service makes of the pieces, and not these.
    pub(super) fn is_encoded_instead(&self) -> bool {
        self.lock()
            .to_encode
            .as_ref()
            .is_some_and(|to_encode| to_encode.instead)
    }

    /// Adds a piece for the encoder, if there is one.
    pub(super) fn push_to_encode(&self, item: u32, seed: u64, piece: &Piece) {
        if let Some(to_encode) = &mut self.lock().to_encode {
            to_encode.push(item, seed, piece.clone(), &self.unencoded);
        }
        self.to_encode_changed.notify_one();
    }

    /// Adds an event from before the listener joined, before any other event. The replay keeps it too, so it takes no
    /// memory and does not count as unread.
    pub(super) fn push_missed(&self, event: JobEvent) {
        let mut contents = self.lock();
        contents.missed += piece_bytes(&event.kind);
        contents.events.push_back(event);
        drop(contents);
        self.changed.notify_one();
    }

    /// Adds an event. An event that may be coalesced replaces an unread one of the same kind and subject, if no event that is never
    /// lost is between them. So a slow reader too gets the last event of each component's load, and of each item's
    /// steps in every stage; and for each event that is never lost, at most one event of every kind and subject is unread.
    ///
    /// False: the reader is too slow. Its unread events are dropped, and only an error is left for it.
    pub(super) fn push(&self, event: JobEvent) -> bool {
        let mut contents = self.lock();
        let bytes = piece_bytes(&event.kind);
        let own = contents.unread > Bytes::ZERO && contents.unread + bytes > contents.bound;
        // The first piece of a listener may exceed the bound of its account, up to twice the bound in other unread bytes.
        let may_begin = contents.unread == Bytes::ZERO && !self.account.is_exceeded_twice(bytes);
        let of_all = self.account.is_exceeded() && !may_begin;
        if bytes > Bytes::ZERO && (own || of_all) {
            let unread = std::mem::take(&mut contents.unread);
            let limit = if own { contents.bound } else { self.account.bound };
            let unread = unread.max(bytes);
            let error = Error::SlowReader { unread, limit };
            contents.events = VecDeque::from([JobEvent {
                at_ms: event.at_ms,
                kind: JobEventKind::Failed(error),
            }]);
            contents.closed = true;
            if let Some(to_encode) = &mut contents.to_encode {
                to_encode.leave();
            }
            drop(contents);
            self.changed.notify_one();
            self.to_encode_changed.notify_one();
            return false;
        }
        contents.unread += bytes;
        if is_coalescible(&event.kind) {
            let unread = contents.events.iter().enumerate().rev();
            let outdated = unread
                .take_while(|(_, unread)| is_coalescible(&unread.kind))
                .find(|(_, unread)| have_same_subject(&unread.kind, &event.kind))
                .map(|(index, _)| index);
            if let Some(index) = outdated {
                contents.events.remove(index);
            }
        }
        contents.events.push_back(event);
        drop(contents);
        self.changed.notify_one();
        true
    }

    /// No further event follows.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
        self.to_encode_changed.notify_one();
    }

    /// The contents are valid even after a panic of a listener, as every change is one call.
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of the piece of an event; zero for other events.
pub(super) fn piece_bytes(kind: &JobEventKind) -> Bytes {
    match kind {
        JobEventKind::Piece { piece, .. } => Bytes(piece.data.len() as u64),
        _ => Bytes::ZERO,
    }
}

/// Whether two events have the same kind and, if they concern a component or an item, the same one.
fn have_same_subject(earlier: &JobEventKind, later: &JobEventKind) -> bool {
    use JobEventKind::{Loading, Preview, Step};
    match (earlier, later) {
        (Loading { component: a, .. }, Loading { component: b, .. }) => a.id == b.id,
        (Step { item: a, .. }, Step { item: b, .. }) | (Preview { item: a, .. }, Preview { item: b, .. }) => {
            a == b
        }
        _ => std::mem::discriminant(earlier) == std::mem::discriminant(later),
    }
}

/// Whether the latest event of this kind replaces the earlier ones.
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
        | JobEventKind::Piece { .. }
        | JobEventKind::Latent { .. }
        | JobEventKind::Done(_)
        | JobEventKind::Failed(_) => false,
    }
}
