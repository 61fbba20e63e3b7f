//! Blocks that have a place of their own on the card and are left to the first pass over them. Once a stage has taken the
//! component, a thread reads them in the order of their use, all in one read, while the stage computes with those before them: the card's
//! own thread would read one block, wait for its last copy to be queued, queue its work, and only then begin the next. The lanes that
//! copy to a card serve one thread at a time, so nothing is read between stages, when other components come to the card. Where other blocks of
//! the component pass through the ring, the card's own thread reads both, in the order of their use.
//!
//! [`Arriving`] decides who waits for which block. How blocks are read is behind [`ReadsBlocks`], so that the waits are tested without a
//! card.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use residency::Bytes;

use crate::blocks::BlockPlace;
use crate::load::LoadError;

/// Blocks that are not there yet.
pub(crate) type Unread<B> = BTreeMap<BlockPlace, B>;

/// Takes note that copies of so many bytes of these blocks are queued. Its first argument makes events that are recorded later come after
/// these copies.
pub(crate) type Told<'a> =
    &'a (dyn Fn(&dyn Fn() -> Result<(), LoadError>, &[(BlockPlace, Bytes)]) -> Result<(), LoadError> + Sync);

/// How blocks are read, and waited for on the card.
pub(crate) trait ReadsBlocks: Send + Sync + 'static {
    /// What is read of a block.
    type Block: Clone + Send;
    /// Happens when all copies before it are over.
    type Event: Send;
    /// A queue of work of the card, which can wait for events.
    type Stream;

    /// Bytes of a block.
    fn bytes(&self, block: &Self::Block) -> Bytes;

    /// Queues the copies of these blocks, in the order of their places, and tells of each part that is queued. Ends early when `go_on`
    /// breaks: then no copy is under way.
    ///
    /// # Errors
    /// [`LoadError::Cancelled`] if it ended early; errors of the files and of the card.
    fn read(
        &self,
        blocks: &Unread<Self::Block>,
        told: Told<'_>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), LoadError>;

    /// Checks that the files are as they were.
    ///
    /// # Errors
    /// [`LoadError::Damaged`] if they are not.
    fn check(&self) -> Result<(), LoadError>;

    /// Records an event after all copies that are queued now.
    ///
    /// # Errors
    /// The card is lost.
    fn record(&self, event: &Self::Event) -> Result<(), LoadError>;

    /// Has what is queued later on `then` wait for an event.
    ///
    /// # Errors
    /// The card is lost.
    fn wait(&self, then: &Self::Stream, event: &Self::Event) -> Result<(), LoadError>;

    /// Waits until no copy is under way.
    ///
    /// # Errors
    /// The card is lost.
    fn settle(&self) -> Result<(), LoadError>;

    /// Starts the thread that reads.
    ///
    /// # Errors
    /// The system has no thread.
    fn start(&self, read: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
        let thread = std::thread::Builder::new().name("moored-arrive".to_owned());
        thread.spawn(read)
    }
}

/// The blocks of one component that are still to come. Dropped, it reads no more.
pub(crate) struct Arriving<R: ReadsBlocks> {
    shared: Arc<Shared<R>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the reading thread and those who wait for it share.
struct Shared<R: ReadsBlocks> {
    reads: R,
    arrivals: Mutex<Arrivals<R>>,
    /// A block was queued, or a read has ended.
    changed: Condvar,
    /// The read is to end early: the stage is over, or the component leaves the card.
    is_stopped: AtomicBool,
}

struct Arrivals<R: ReadsBlocks> {
    /// Blocks that are not queued whole.
    unread: BTreeMap<BlockPlace, UnreadBlock<R>>,
    /// Blocks whose copies are queued, with the event after the last of them, until somebody waits for it.
    queued: BTreeMap<BlockPlace, R::Event>,
    /// Whether a thread was started that has not ended its read.
    is_reading: bool,
    /// Why the last read ended early, until somebody who waits is told.
    failed: Option<LoadError>,
}

struct UnreadBlock<R: ReadsBlocks> {
    block: R::Block,
    /// Bytes of which no copy is queued in the read that is under way.
    left: Bytes,
    arrived: R::Event,
}

impl<R: ReadsBlocks> std::fmt::Debug for Arriving<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arriving").finish_non_exhaustive()
    }
}

impl<R: ReadsBlocks> Arriving<R> {
    /// These blocks, of which nothing is read yet, each with an event of its own.
    pub(crate) fn new(reads: R, blocks: impl IntoIterator<Item = (BlockPlace, R::Block, R::Event)>) -> Self {
        let unread = blocks.into_iter().map(|(place, block, arrived)| {
            let left = Bytes::ZERO;
            (place, UnreadBlock { block, left, arrived })
        });
        Arriving {
            shared: Arc::new(Shared {
                reads,
                arrivals: Mutex::new(Arrivals {
                    unread: unread.collect(),
                    queued: BTreeMap::new(),
                    is_reading: false,
                    failed: None,
                }),
                changed: Condvar::new(),
                is_stopped: AtomicBool::new(false),
            }),
            thread: Mutex::new(None),
        }
    }

    /// Whether blocks are still to be read.
    pub(crate) fn has_unread(&self) -> bool {
        !self.shared.arrivals().unread.is_empty()
    }

    /// Whether no stage has to wait for a block any more.
    pub(crate) fn is_over(&self) -> bool {
        let arrivals = self.shared.arrivals();
        arrivals.unread.is_empty() && arrivals.queued.is_empty()
    }

    /// Begins to read all blocks, on a thread of its own.
    pub(crate) fn begin(&self) {
        self.begin_with(&mut self.shared.arrivals());
    }

    /// Returns whether a thread reads what is unread.
    fn begin_with(&self, arrivals: &mut Arrivals<R>) -> bool {
        if arrivals.is_reading || arrivals.unread.is_empty() {
            return true;
        }
        let shared = Arc::clone(&self.shared);
        let thread = match self.shared.reads.start(move || shared.read(None)) {
            Ok(thread) => thread,
            Err(error) => {
                tracing::warn!(%error, "no thread can be started to read blocks with: whoever waits reads them");
                return false;
            }
        };
        arrivals.is_reading = true;
        // The thread before it, if any, has ended its read.
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        true
    }

    /// Has `then` wait for a block, and returns when its copies are queued. If nobody reads it, a thread begins to; this one reads it if
    /// the system has no other.
    ///
    /// # Errors
    /// Those of the read.
    pub(crate) fn wait_for(&self, place: BlockPlace, then: &R::Stream) -> Result<(), LoadError> {
        let mut arrivals = self.shared.arrivals();
        loop {
            if let Some(arrived) = arrivals.queued.remove(&place) {
                return self.shared.reads.wait(then, &arrived);
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
            if self.begin_with(&mut arrivals) {
                let changed = self.shared.changed.wait(arrivals);
                arrivals = changed.unwrap_or_else(PoisonError::into_inner);
            } else {
                drop(arrivals);
                self.shared.read(Some(place));
                arrivals = self.shared.arrivals();
            }
        }
    }

    /// Reads a block, unless it was read, and has `then` wait for it. For components of which other blocks are read for each pass: whoever
    /// computes reads both, in the order of their use.
    ///
    /// # Errors
    /// Those of the read.
    pub(crate) fn read_one(&self, place: BlockPlace, then: &R::Stream) -> Result<(), LoadError> {
        let is_unread = self.shared.arrivals().unread.contains_key(&place);
        if is_unread {
            self.shared.read(Some(place));
        }
        self.wait_for(place, then)
    }

    /// Has `then` wait for all blocks that are still to come.
    ///
    /// # Errors
    /// Those of the read.
    pub(crate) fn wait_for_all(&self, then: &R::Stream) -> Result<(), LoadError> {
        let places: Vec<BlockPlace> = {
            let arrivals = self.shared.arrivals();
            let all = arrivals.unread.keys().chain(arrivals.queued.keys());
            all.copied().collect()
        };
        places
            .into_iter()
            .try_for_each(|place| self.wait_for(place, then))
    }

    /// Ends the read that is under way, if any: no stage wants the blocks now. The next one that does begins again, and is told nothing of
    /// what was wrong before.
    pub(crate) fn pause(&self) {
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
    pub(crate) fn stop(&self) -> Result<(), LoadError> {
        self.end_read();
        self.shared.reads.settle()
    }

    fn end_read(&self) {
        self.shared.is_stopped.store(true, Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(_)) = thread.map(JoinHandle::join) {
            tracing::error!("a thread that reads blocks has panicked");
        }
    }
}

impl<R: ReadsBlocks> Drop for Arriving<R> {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!(%error, "copies of blocks may be under way on a card that is lost");
        }
    }
}

impl<R: ReadsBlocks> Shared<R> {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals<R>> {
        // Each of its changes is whole, even if what came after it panicked.
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the blocks that are not queued, or one of them.
    fn read(&self, only: Option<BlockPlace>) {
        let ending = Ending(self);
        let blocks: Unread<R::Block> = {
            let mut arrivals = self.arrivals();
            let wanted = arrivals
                .unread
                .iter_mut()
                .filter(|(place, _)| only.is_none_or(|only| only == **place));
            wanted
                .map(|(place, unread)| {
                    unread.left = self.reads.bytes(&unread.block);
                    (*place, unread.block.clone())
                })
                .collect()
        };
        let mut go_on = || match self.is_stopped.load(Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let told = |follow: &dyn Fn() -> Result<(), LoadError>, parts: &[(BlockPlace, Bytes)]| {
            self.count(follow, parts)
        };
        let read = self.reads.read(&blocks, &told, &mut go_on);
        let is_last = |arrivals: &Arrivals<R>| arrivals.unread.len() <= 1;
        let checked = read.and_then(|()| match is_last(&self.arrivals()) {
            true => self.reads.check(),
            false => Ok(()),
        });
        let mut arrivals = self.arrivals();
        let ended = checked.and_then(|()| {
            // The last block is there once its files are known to be as they were.
            let mut places = blocks.keys();
            places.try_for_each(|place| self.queue(&mut arrivals, *place))
        });
        if let Err(error) = ended
            && !matches!(error, LoadError::Cancelled)
        {
            arrivals.failed = Some(error);
        }
        drop(arrivals);
        drop(ending);
    }

    /// Takes note of what is queued.
    fn count(
        &self,
        follow: &dyn Fn() -> Result<(), LoadError>,
        parts: &[(BlockPlace, Bytes)],
    ) -> Result<(), LoadError> {
        let mut arrivals = self.arrivals();
        // Nothing that is queued meanwhile comes before it: the event of a block is after all of its parts.
        follow()?;
        let mut is_changed = false;
        for (place, bytes) in parts {
            let Some(unread) = arrivals.unread.get_mut(place) else {
                continue;
            };
            unread.left -= *bytes;
            // The last of all waits until the files are checked.
            if unread.left == Bytes::ZERO && arrivals.unread.len() > 1 {
                self.queue(&mut arrivals, *place)?;
                is_changed = true;
            }
        }
        drop(arrivals);
        if is_changed {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// All copies of a block are queued.
    fn queue(&self, arrivals: &mut Arrivals<R>, place: BlockPlace) -> Result<(), LoadError> {
        if let Some(unread) = arrivals.unread.get(&place) {
            // Before it counts as queued: a block without its event would be waited for by nobody.
            self.reads.record(&unread.arrived)?;
        }
        if let Some(unread) = arrivals.unread.remove(&place) {
            arrivals.queued.insert(place, unread.arrived);
        }
        Ok(())
    }
}

/// The end of a read, however it ends: whoever waits for a block has to look again.
struct Ending<'a, R: ReadsBlocks>(&'a Shared<R>);

impl<R: ReadsBlocks> Drop for Ending<'_, R> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::time::Duration;

    use super::*;

    const BLOCKS: usize = 5;
    /// Bytes of a block, of which each part is one.
    const PARTS: u64 = 4;

    /// Reads a part whenever a test lets it, and counts what is under way.
    struct Fake {
        allowed: Mutex<Receiver<Part>>,
        /// Copies that are queued.
        queued: AtomicUsize,
        reads: AtomicUsize,
        is_lost: AtomicBool,
        has_no_thread: AtomicBool,
    }

    /// What comes of the next part of a read.
    enum Part {
        Queued,
        Failed,
        Panicked,
    }

    /// Copies that were queued when it was recorded.
    type Event = AtomicUsize;

    impl ReadsBlocks for Arc<Fake> {
        type Block = u64;
        type Event = Event;
        /// The most copies that it has waited for.
        type Stream = AtomicUsize;

        fn bytes(&self, block: &u64) -> Bytes {
            Bytes(*block)
        }

        fn read(
            &self,
            blocks: &Unread<u64>,
            told: Told<'_>,
            go_on: &mut dyn FnMut() -> ControlFlow<()>,
        ) -> Result<(), LoadError> {
            self.reads.fetch_add(1, Relaxed);
            let allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
            for (place, bytes) in blocks {
                for _ in 0..*bytes {
                    let part = loop {
                        if go_on().is_break() {
                            return Err(LoadError::Cancelled);
                        }
                        if let Ok(part) = allowed.recv_timeout(Duration::from_millis(1)) {
                            break part;
                        }
                    };
                    match part {
                        Part::Queued => self.queued.fetch_add(1, Relaxed),
                        Part::Failed => return Err(LoadError::Lost("the test says so".to_owned())),
                        Part::Panicked => panic!("the test says so"),
                    };
                    told(&|| Ok(()), &[(*place, Bytes(1))])?;
                }
            }
            Ok(())
        }

        fn check(&self) -> Result<(), LoadError> {
            match self.is_lost.load(Relaxed) {
                true => Err(LoadError::Lost("changed".to_owned())),
                false => Ok(()),
            }
        }

        fn record(&self, event: &Event) -> Result<(), LoadError> {
            event.store(self.queued.load(Relaxed), Relaxed);
            Ok(())
        }

        fn wait(&self, then: &AtomicUsize, event: &Event) -> Result<(), LoadError> {
            then.fetch_max(event.load(Relaxed), Relaxed);
            Ok(())
        }

        fn settle(&self) -> Result<(), LoadError> {
            Ok(())
        }

        fn start(&self, read: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
            match self.has_no_thread.load(Relaxed) {
                true => Err(std::io::ErrorKind::WouldBlock.into()),
                false => std::thread::Builder::new().spawn(read),
            }
        }
    }

    fn block(number: usize) -> BlockPlace {
        BlockPlace::each_pass(number)
    }

    /// Blocks that arrive as a test allows.
    struct Bench {
        arriving: Arriving<Arc<Fake>>,
        fake: Arc<Fake>,
        allow: SyncSender<Part>,
        stream: AtomicUsize,
    }

    fn bench() -> Bench {
        let (allow, allowed) = sync_channel(1000);
        let fake = Arc::new(Fake {
            allowed: Mutex::new(allowed),
            queued: AtomicUsize::new(0),
            reads: AtomicUsize::new(0),
            is_lost: AtomicBool::new(false),
            has_no_thread: AtomicBool::new(false),
        });
        let blocks = (0..BLOCKS).map(|number| (block(number), PARTS, Event::new(0)));
        Bench {
            arriving: Arriving::new(Arc::clone(&fake), blocks),
            fake,
            allow,
            stream: AtomicUsize::new(0),
        }
    }

    impl Bench {
        fn allow(&self, parts: u64) {
            for _ in 0..parts {
                self.allow.send(Part::Queued).unwrap();
            }
        }

        fn wait_for(&self, number: usize) -> Result<(), LoadError> {
            self.arriving.wait_for(block(number), &self.stream)
        }

        /// Copies that the stream waits for.
        fn waited_for(&self) -> u64 {
            self.stream.load(Relaxed) as u64
        }
    }

    #[test]
    fn a_stream_waits_for_all_parts_of_a_block_and_for_no_block_after_it() {
        let bench = bench();
        bench.arriving.begin();
        for number in 0..BLOCKS {
            assert!(!bench.arriving.is_over());
            bench.allow(PARTS);
            bench.wait_for(number).unwrap();
            assert_eq!(bench.waited_for(), PARTS * (number as u64 + 1));
        }
        assert!(bench.arriving.is_over() && !bench.arriving.has_unread());
        bench.wait_for(2).unwrap();
        assert_eq!(bench.fake.reads.load(Relaxed), 1, "all were one read");
    }

    #[test]
    fn a_block_that_is_wanted_first_comes_in_its_turn_and_those_before_it_are_there() {
        let bench = bench();
        bench.allow(PARTS * 4);
        bench.wait_for(3).unwrap();
        assert!(bench.waited_for() >= PARTS * 4, "a wait begins the read");
        for number in 0..3 {
            bench.wait_for(number).unwrap();
        }
        assert!(bench.arriving.has_unread());
        bench.allow(PARTS);
        bench.arriving.wait_for_all(&bench.stream).unwrap();
        assert!(bench.arriving.is_over());
    }

    #[test]
    fn a_read_that_is_paused_goes_on_with_what_is_left() {
        let bench = bench();
        bench.arriving.begin();
        let paused_at = PARTS * 2 + 1;
        bench.allow(paused_at);
        while bench.fake.queued.load(Relaxed) < paused_at as usize {
            std::thread::yield_now();
        }
        bench.arriving.pause();
        // The two blocks that were whole are there, and the one of which a part was read is read whole.
        for number in 0..2 {
            bench.wait_for(number).unwrap();
        }
        assert!(bench.waited_for() <= paused_at && bench.arriving.has_unread());
        for more in 1..=3 {
            bench.allow(PARTS);
            bench.wait_for(1 + more as usize).unwrap();
            assert_eq!(bench.waited_for(), paused_at + PARTS * more);
        }
        assert!(bench.arriving.is_over());
        assert_eq!(bench.fake.reads.load(Relaxed), 2);
    }

    #[test]
    fn one_block_alone_is_read_by_whoever_wants_it() {
        let bench = bench();
        bench.allow(PARTS * 2);
        for number in [3, 1, 3] {
            bench.arriving.read_one(block(number), &bench.stream).unwrap();
        }
        assert_eq!(bench.waited_for(), PARTS * 2);
        assert_eq!(bench.fake.reads.load(Relaxed), 2);
    }

    #[test]
    fn where_there_is_no_thread_whoever_waits_reads() {
        let bench = bench();
        bench.fake.has_no_thread.store(true, Relaxed);
        bench.arriving.begin();
        bench.allow(PARTS);
        bench.wait_for(2).unwrap();
        assert_eq!(bench.waited_for(), PARTS, "that block alone");
        bench.allow.send(Part::Failed).unwrap();
        assert!(matches!(bench.wait_for(0), Err(LoadError::Lost(_))));
        bench.allow(PARTS * 4);
        bench.arriving.wait_for_all(&bench.stream).unwrap();
        assert!(bench.arriving.is_over());
    }

    #[test]
    fn an_error_is_told_to_whoever_waits_and_the_next_read_begins_anew() {
        for part in [Part::Failed, Part::Panicked] {
            let bench = bench();
            bench.allow(PARTS);
            bench.allow.send(part).unwrap();
            bench.wait_for(0).unwrap();
            assert!(matches!(bench.wait_for(1), Err(LoadError::Lost(_))));
            bench.allow(PARTS * 4);
            bench.wait_for(4).unwrap();
        }
    }

    #[test]
    fn an_error_that_nobody_waited_for_is_not_told_to_the_next_stage() {
        let bench = bench();
        bench.arriving.begin();
        bench.allow.send(Part::Failed).unwrap();
        while bench.arriving.shared.arrivals().is_reading {
            std::thread::yield_now();
        }
        bench.arriving.pause();
        bench.allow(PARTS * BLOCKS as u64);
        bench.wait_for(0).unwrap();
    }

    #[test]
    fn the_last_block_is_not_there_before_its_files_were_checked() {
        let bench = bench();
        bench.fake.is_lost.store(true, Relaxed);
        bench.allow(PARTS * BLOCKS as u64);
        for number in 0..BLOCKS - 1 {
            bench.wait_for(number).unwrap();
        }
        assert!(matches!(bench.wait_for(BLOCKS - 1), Err(LoadError::Lost(_))));
        assert!(bench.arriving.has_unread());
    }

    #[test]
    fn a_read_that_is_stopped_is_not_waited_for_for_ever() {
        let bench = bench();
        bench.arriving.begin();
        bench.allow(2);
        bench.arriving.stop().unwrap();
        assert!(matches!(bench.wait_for(0), Err(LoadError::Cancelled)));
    }
}
