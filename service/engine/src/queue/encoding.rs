//! Pieces of results that the service itself encodes, such as the frames of an MP4. They do not count as unread by the client, and no
//! client can hold them up: a stage that delivers more than is encoded waits between two pieces.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use model::Piece;
use residency::Bytes;
use tokio::sync::mpsc;

use super::core::Input;
use super::listener::Mailbox;

/// Bytes of the pieces that wait to be encoded, of all jobs.
#[derive(Debug, Default)]
pub(super) struct Unencoded(AtomicU64);

impl Unencoded {
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.0.load(Relaxed))
    }
}

/// A piece to encode. Its bytes count as not encoded until it is dropped.
#[derive(Debug)]
pub struct PieceToEncode {
    /// Number of the item.
    pub item: u32,
    /// Seed of the item.
    pub seed: u64,
    pub piece: Piece,
    /// Returned with the piece, and so dropped with it or after it.
    pub waits: Waits,
}

/// The bytes of a piece that waits to be encoded. Dropping it lets the stage deliver more.
#[derive(Debug)]
pub struct Waits {
    bytes: u64,
    unencoded: Arc<Unencoded>,
    /// `None` as long as nobody has taken the piece: the core itself drops it then.
    inputs: Option<mpsc::WeakUnboundedSender<Input>>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.unencoded.0.fetch_sub(self.bytes, Relaxed);
        tell_the_core(self.inputs.as_ref());
    }
}

/// Has the core look again which stages may deliver more.
fn tell_the_core(inputs: Option<&mpsc::WeakUnboundedSender<Input>>) {
    if let Some(inputs) = inputs.and_then(mpsc::WeakUnboundedSender::upgrade) {
        let _ = inputs.send(Input::Encoded); // a queue that has ended has no stages
    }
}

/// The pieces in a mailbox that wait for its encoder.
#[derive(Debug)]
pub(super) struct ToEncode {
    /// Whether the client gets the file alone, not the pieces too.
    pub(super) instead: bool,
    pieces: VecDeque<PieceToEncode>,
    /// Whether the encoder takes no more.
    has_left: bool,
}

impl ToEncode {
    pub(super) fn new(instead: bool) -> ToEncode {
        ToEncode {
            instead,
            pieces: VecDeque::new(),
            has_left: false,
        }
    }

    pub(super) fn push(&mut self, item: u32, seed: u64, piece: Piece, unencoded: &Arc<Unencoded>) {
        if self.has_left {
            return;
        }
        let bytes = piece.data.len() as u64;
        unencoded.0.fetch_add(bytes, Relaxed);
        let waits = Waits {
            bytes,
            unencoded: unencoded.clone(),
            inputs: None,
        };
        self.pieces.push_back(PieceToEncode {
            item,
            seed,
            piece,
            waits,
        });
    }

    /// Forgets what waits, and takes no more.
    pub(super) fn leave(&mut self) {
        self.has_left = true;
        self.pieces.clear();
    }

    /// Whether the service encodes what is delivered.
    pub(super) fn is_read(&self) -> bool {
        !self.has_left
    }
}

/// The pieces of a job that the service encodes. They come whether or not the client reads. Dropping it forgets those that wait.
#[derive(Debug)]
pub struct PiecesToEncode {
    mailbox: Arc<Mailbox>,
    inputs: mpsc::WeakUnboundedSender<Input>,
}

impl PiecesToEncode {
    pub(super) fn new(mailbox: Arc<Mailbox>, inputs: mpsc::WeakUnboundedSender<Input>) -> PiecesToEncode {
        PiecesToEncode { mailbox, inputs }
    }

    /// The next piece; `None` after the last one.
    pub async fn next(&mut self) -> Option<PieceToEncode> {
        loop {
            let added = self.mailbox.to_encode_changed().notified();
            let (next, is_closed) = self
                .mailbox
                .with_encoder(|to_encode| to_encode.pieces.pop_front());
            if let Some(mut next) = next {
                next.waits.inputs = Some(self.inputs.clone());
                return Some(next);
            }
            if is_closed {
                return None;
            }
            added.await;
        }
    }
}

impl Drop for PiecesToEncode {
    fn drop(&mut self) {
        self.mailbox.with_encoder(|to_encode| {
            to_encode.leave();
            None::<()>
        });
        tell_the_core(Some(&self.inputs));
    }
}
