//! Blocks that have a place of their own on the card and are left to the first pass over them. From the moment at which a stage takes the
//! component, a thread reads them in the order of their use, all in one read, while the stage computes with those before them: the card's
//! own thread would read one block, wait for its last lane, queue its work, and only then begin the next. The lanes are one thread's at a
//! time, so nothing is read between stages, in which other components come to the card. Where other blocks of the component pass through
//! the ring, the card's own thread reads both, in the order of their use.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use residency::Bytes;

use super::staging::{Follows, lost};
use super::streaming::{FileSource, ReadTo};
use crate::blocks::BlockPlace;
use crate::load::LoadError;
use crate::reader;

/// Tensors of blocks that have a place and are not there yet.
pub(super) type Unread = BTreeMap<BlockPlace, Vec<ReadTo>>;

/// The blocks of one component that are still to come. Dropped, it reads no more.
pub(super) struct Arriving {
    shared: Arc<Shared>,
    files: Arc<FileSource>,
    reader: Mutex<Option<JoinHandle<()>>>,
}

/// What the reading thread and those who wait for it share.
struct Shared {
    arrivals: Mutex<Arrivals>,
    /// A block was queued, or the thread has ended.
    changed: Condvar,
    /// The thread is to end early: the stage is over, or the component leaves the card.
    is_stopped: AtomicBool,
    /// Waits for the copies of all lanes, in the order in which they are queued.
    copies: Arc<CudaStream>,
}

#[derive(Default)]
struct Arrivals {
    /// Blocks that are not queued whole.
    unread: BTreeMap<BlockPlace, UnreadBlock>,
    /// Blocks whose copies are queued, with the event after the last of them, until somebody waits for it.
    queued: BTreeMap<BlockPlace, CudaEvent>,
    /// Whether a thread was started that has not ended its read.
    is_reading: bool,
    /// Why the last read ended early, until somebody who waits is told.
    failed: Option<LoadError>,
}

struct UnreadBlock {
    tensors: Vec<ReadTo>,
    /// Bytes of which no copy is queued in the read that is under way.
    left: Bytes,
    arrived: CudaEvent,
}

impl UnreadBlock {
    fn bytes(&self) -> Bytes {
        self.tensors
            .iter()
            .map(|tensor| tensor.source.bytes_on_card())
            .sum()
    }
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arriving").finish_non_exhaustive()
    }
}

impl Arriving {
    /// The blocks `unread`, of which nothing is read yet.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        unread: Unread,
        files: Arc<FileSource>,
    ) -> Result<Arriving, LoadError> {
        let block = |(place, tensors): (BlockPlace, Vec<ReadTo>)| {
            let block = UnreadBlock {
                tensors,
                left: Bytes::ZERO,
                arrived: context.new_event(None)?,
            };
            Ok((place, block))
        };
        let unread: Result<_, DriverError> = unread.into_iter().map(block).collect();
        let arrivals = Arrivals {
            unread: unread.map_err(lost)?,
            ..Arrivals::default()
        };
        Ok(Arriving {
            shared: Arc::new(Shared {
                arrivals: Mutex::new(arrivals),
                changed: Condvar::new(),
                is_stopped: AtomicBool::new(false),
                copies: context.new_stream().map_err(lost)?,
            }),
            files,
            reader: Mutex::new(None),
        })
    }

    /// Whether blocks are still to be read.
    pub(super) fn has_unread(&self) -> bool {
        !self.shared.arrivals().unread.is_empty()
    }

    /// Whether no stage has to wait for a block any more.
    pub(super) fn is_over(&self) -> bool {
        let arrivals = self.shared.arrivals();
        arrivals.unread.is_empty() && arrivals.queued.is_empty()
    }

    /// Begins to read all blocks, on a thread of its own.
    ///
    /// # Errors
    /// [`LoadError::Lost`] if the system has no thread.
    pub(super) fn begin(&self) -> Result<(), LoadError> {
        self.begin_with(&mut self.shared.arrivals())
    }

    fn begin_with(&self, arrivals: &mut Arrivals) -> Result<(), LoadError> {
        if arrivals.is_reading || arrivals.unread.is_empty() {
            return Ok(());
        }
        let (shared, files) = (Arc::clone(&self.shared), Arc::clone(&self.files));
        let thread = std::thread::Builder::new().name("moored-arrive".to_owned());
        let thread = thread.spawn(move || shared.read(&files, None)).map_err(|error| {
            LoadError::Lost(format!("no thread can be started to read blocks with: {error}"))
        })?;
        arrivals.is_reading = true;
        // The thread before it, if any, has ended its read.
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Has `then` wait for a block, and returns when its copies are queued. If nobody reads it, a thread begins to.
    ///
    /// # Errors
    /// Those of the read.
    pub(super) fn wait_for(&self, place: BlockPlace, then: &CudaStream) -> Result<(), LoadError> {
        let mut arrivals = self.shared.arrivals();
        loop {
            if let Some(arrived) = arrivals.queued.remove(&place) {
                return then.wait(&arrived).map_err(lost);
            }
            if !arrivals.unread.contains_key(&place) {
                return Ok(());
            }
            if let Some(error) = arrivals.failed.take() {
                return Err(error);
            }
            if self.shared.is_stopped.load(Relaxed) {
                return Err(LoadError::Cancelled);
            }
            self.begin_with(&mut arrivals)?;
            arrivals = self
                .shared
                .changed
                .wait(arrivals)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads a block, unless it was read, and has `then` wait for it. For components of which other blocks are read for each pass: whoever
    /// computes reads both, in the order of their use.
    ///
    /// # Errors
    /// Those of the read.
    pub(super) fn read_one(&self, place: BlockPlace, then: &CudaStream) -> Result<(), LoadError> {
        let is_unread = self.shared.arrivals().unread.contains_key(&place);
        if is_unread {
            self.shared.read(&self.files, Some(place));
        }
        self.wait_for(place, then)
    }

    /// Has `then` wait for all blocks that are still to come.
    ///
    /// # Errors
    /// Those of the read.
    pub(super) fn wait_for_all(&self, then: &CudaStream) -> Result<(), LoadError> {
        let places: Vec<BlockPlace> = {
            let arrivals = self.shared.arrivals();
            arrivals
                .unread
                .keys()
                .chain(arrivals.queued.keys())
                .copied()
                .collect()
        };
        places
            .into_iter()
            .try_for_each(|place| self.wait_for(place, then))
    }

    /// Ends the read that is under way, if any: no stage wants the blocks now. The next one that does begins again, and is told nothing of
    /// what was wrong before.
    pub(super) fn pause(&self) {
        self.end_read();
        self.shared.is_stopped.store(false, Relaxed);
        if let Some(error) = self.shared.arrivals().failed.take() {
            tracing::info!(%error, "blocks that no stage waits for could not be read");
        }
    }

    /// Reads no more, and waits until no copy is under way: the places may be freed then.
    ///
    /// # Errors
    /// The card is lost: copies may be under way.
    pub(super) fn stop(&self) -> Result<(), DriverError> {
        self.end_read();
        self.shared.copies.synchronize()
    }

    fn end_read(&self) {
        self.shared.is_stopped.store(true, Relaxed);
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(_)) = reader.map(JoinHandle::join) {
            tracing::error!("a thread that reads blocks has panicked");
        }
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!(%error, "copies of blocks may be under way on a card that is lost");
        }
    }
}

impl Shared {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        // Each of its changes is whole, even if what came after it panicked.
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the blocks that are not queued, or one of them.
    fn read(&self, files: &FileSource, only: Option<BlockPlace>) {
        let ending = Ending(self);
        let blocks: Unread = {
            let mut arrivals = self.arrivals();
            let wanted = arrivals
                .unread
                .iter_mut()
                .filter(|(place, _)| only.is_none_or(|only| only == **place));
            wanted
                .map(|(place, block)| {
                    block.left = block.bytes();
                    (*place, block.tensors.clone())
                })
                .collect()
        };
        let following = Following {
            shared: self,
            block_of: blocks
                .iter()
                .flat_map(|(place, tensors)| {
                    let names = tensors.iter().map(|tensor| tensor.source.name.as_str());
                    names.map(|name| (name, *place))
                })
                .collect(),
        };
        let tensors: Vec<&ReadTo> = blocks.values().flatten().collect();
        let mut go_on = |_| match self.is_stopped.load(Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let read = files.read_with(&tensors, &following, &mut go_on);
        let is_last = |arrivals: &Arrivals| arrivals.unread.len() <= 1;
        let checked = read.and_then(|()| match is_last(&self.arrivals()) {
            true => reader::check_unchanged(&files.files),
            false => Ok(()),
        });
        let mut arrivals = self.arrivals();
        let ended = checked.and_then(|()| {
            // The last block is there once its files are known to be as they were.
            blocks
                .keys()
                .try_for_each(|place| self.queued(&mut arrivals, *place))
        });
        if let Err(error) = ended
            && !matches!(error, LoadError::Cancelled)
        {
            arrivals.failed = Some(error);
        }
        drop(arrivals);
        drop(ending);
    }

    /// All copies of a block are queued.
    fn queued(&self, arrivals: &mut Arrivals, place: BlockPlace) -> Result<(), LoadError> {
        if let Some(block) = arrivals.unread.get(&place) {
            // Before it counts as queued: a block without its event would be waited for by nobody.
            block.arrived.record(&self.copies).map_err(lost)?;
        }
        if let Some(block) = arrivals.unread.remove(&place) {
            arrivals.queued.insert(place, block.arrived);
        }
        Ok(())
    }
}

/// The end of a read, however it ends: whoever waits for a block has to look again.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut arrivals = self.0.arrivals();
        arrivals.is_reading = false;
        if std::thread::panicking() {
            let why = "a thread that reads blocks has panicked".to_owned();
            arrivals.failed = Some(LoadError::Lost(why));
        }
        drop(arrivals);
        self.0.changed.notify_all();
    }
}

/// Notes which blocks are queued, while lanes queue their copies.
struct Following<'a> {
    shared: &'a Shared,
    block_of: HashMap<&'a str, BlockPlace>,
}

impl Follows for Following<'_> {
    fn queued(&self, pieces: &[(&str, u64)], before: &CudaEvent) -> Result<(), LoadError> {
        let mut arrivals = self.shared.arrivals();
        self.shared.copies.wait(before).map_err(lost)?;
        let mut is_changed = false;
        for (tensor, bytes) in pieces {
            let Some(place) = self.block_of.get(tensor) else {
                continue;
            };
            let Some(block) = arrivals.unread.get_mut(place) else {
                continue;
            };
            block.left -= Bytes(*bytes);
            // The last of all waits until the files are checked.
            if block.left == Bytes::ZERO && arrivals.unread.len() > 1 {
                self.shared.queued(&mut arrivals, *place)?;
                is_changed = true;
            }
        }
        drop(arrivals);
        if is_changed {
            self.shared.changed.notify_all();
        }
        Ok(())
    }
}
