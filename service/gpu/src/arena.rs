//! An allocator of activations: addresses of one range, backed by memory in chunks that can be moved to other addresses.
//!
//! Tensors of a stage differ in size, and each is freed before the next is allocated. An allocator that cannot move memory
//! leaves free blocks that the next tensor does not fit, and asks the driver for more: half as much again, in the decode of a
//! film. Here free memory is always usable: neighbours are joined at once, and where no block is long enough, chunks in which
//! nothing is allocated are mapped where they make one.
//!
//! Pure bookkeeping. [`Backing`] is the driver, or a test. All work that uses the memory is in one stream's order: freed
//! memory may be allocated again at once, and moved to another address after the stream was waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use residency::Bytes;

/// Alignment of allocations, in bytes.
pub(crate) const ALIGNMENT: u64 = 512;

/// Bytes of memory that are mapped at once. A multiple of a card's granularity.
pub(crate) const CHUNK: u64 = 16 << 20;

/// Allocations from this size on have addresses of their own, so that chunks of large ones become free as a whole.
const LARGE: u64 = 1 << 20;

/// Addresses of small allocations: a share of all.
const SMALL_SHARE: u64 = 8;

/// Memory that backs the addresses. Slots are parts of [`CHUNK`] bytes, by number.
pub(crate) trait Backing {
    type Error;

    /// Allocates a chunk and maps it at a slot that has none.
    fn create(&mut self, slot: u64) -> Result<(), Self::Error>;

    /// Maps the chunk of a slot at another slot, which has none.
    fn remap(&mut self, from: u64, to: u64) -> Result<(), Self::Error>;

    /// Frees the chunk of a slot.
    fn release(&mut self, slot: u64) -> Result<(), Self::Error>;

    /// Makes mapped slots accessible. Called once for neighbours, after they were mapped.
    fn open(&mut self, slots: Range<u64>) -> Result<(), Self::Error>;

    /// Waits for the work of the stream.
    fn wait(&mut self) -> Result<(), Self::Error>;

    /// The error of a lack of memory.
    fn out_of_memory() -> Self::Error;

    /// Whether the driver lacked memory only.
    fn lacks_memory(error: &Self::Error) -> bool;
}

/// The allocator. Offsets are in bytes, from the first address.
pub(crate) struct Arena<B> {
    backing: B,
    /// Slots that have a chunk.
    mapped: BTreeSet<u64>,
    small: Side,
    large: Side,
    used: u64,
    used_peak: u64,
    mapped_peak: u64,
    moved: u64,
    limit: Limit,
}

/// The most bytes that are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    /// Beyond this, chunks are moved first.
    pub(crate) wanted: Bytes,
    /// An allocation that needs more fails.
    pub(crate) most: Bytes,
}

impl Limit {
    /// As much as the driver gives.
    pub(crate) const NONE: Limit = Limit {
        wanted: Bytes(u64::MAX),
        most: Bytes(u64::MAX),
    };
}

/// Addresses of small allocations, or of large ones.
struct Side {
    addresses: Range<u64>,
    /// Allocated ranges: bytes by offset.
    taken: BTreeMap<u64, u64>,
    /// Free ranges that are backed by memory: bytes by offset. No two are neighbours.
    ready: BTreeMap<u64, u64>,
    /// The same, as bytes and offset.
    by_size: BTreeSet<(u64, u64)>,
}

impl Side {
    fn new(addresses: Range<u64>) -> Side {
        Side {
            addresses,
            taken: BTreeMap::new(),
            ready: BTreeMap::new(),
            by_size: BTreeSet::new(),
        }
    }

    /// Adds a free range that is backed by memory, and joins it with its neighbours.
    fn add_ready(&mut self, offset: u64, bytes: u64) {
        let (mut begin, mut end) = (offset, offset + bytes);
        if let Some((&before, &length)) = self.ready.range(..offset).next_back()
            && before + length == begin
        {
            self.remove_ready(before);
            begin = before;
        }
        if let Some(length) = self.remove_ready(end) {
            end += length;
        }
        self.ready.insert(begin, end - begin);
        self.by_size.insert((end - begin, begin));
    }

    fn remove_ready(&mut self, offset: u64) -> Option<u64> {
        let bytes = self.ready.remove(&offset)?;
        self.by_size.remove(&(bytes, offset));
        Some(bytes)
    }

    /// Takes a part out of the free range in which it lies.
    fn take_ready(&mut self, part: Range<u64>) {
        let Some((&begin, &length)) = self.ready.range(..=part.start).next_back() else {
            return;
        };
        let end = begin + length;
        self.remove_ready(begin);
        if begin < part.start {
            self.add_ready(begin, part.start - begin);
        }
        if part.end < end {
            self.add_ready(part.end, end - part.end);
        }
    }

    /// The shortest free range that is long enough.
    fn best_fit(&self, bytes: u64) -> Option<u64> {
        self.by_size.range((bytes, 0)..).next().map(|&(_, offset)| offset)
    }

    /// Ranges of addresses between allocations, mapped or not.
    fn gaps(&self) -> impl Iterator<Item = Range<u64>> {
        let begins = std::iter::once(self.addresses.start)
            .chain(self.taken.iter().map(|(offset, bytes)| offset + bytes));
        let ends = self
            .taken
            .keys()
            .copied()
            .chain(std::iter::once(self.addresses.end));
        begins
            .zip(ends)
            .map(|(begin, end)| begin..end)
            .filter(|gap| !gap.is_empty())
    }

    /// Slots in which nothing is allocated and that have a chunk. Those of the shortest free ranges come first, so that long ones
    /// stay.
    fn idle_slots(&self) -> impl Iterator<Item = u64> {
        self.by_size
            .iter()
            .flat_map(|&(bytes, offset)| offset.div_ceil(CHUNK)..(offset + bytes) / CHUNK)
    }
}

/// Slots that a range of addresses touches.
fn slots_of(range: &Range<u64>) -> Range<u64> {
    range.start / CHUNK..range.end.div_ceil(CHUNK)
}

impl<B: Backing> Arena<B> {
    /// An arena of this many bytes of addresses, a multiple of [`CHUNK`], without memory.
    pub(crate) fn new(backing: B, addresses: u64) -> Arena<B> {
        let border = (addresses / SMALL_SHARE).next_multiple_of(CHUNK);
        Arena {
            backing,
            mapped: BTreeSet::new(),
            small: Side::new(0..border),
            large: Side::new(border..addresses.max(border)),
            used: 0,
            used_peak: 0,
            mapped_peak: 0,
            moved: 0,
            limit: Limit::NONE,
        }
    }

    /// Bytes that are allocated.
    pub(crate) fn used(&self) -> Bytes {
        Bytes(self.used)
    }

    /// Bytes that are mapped, allocated or not.
    pub(crate) fn mapped(&self) -> Bytes {
        Bytes(self.mapped.len() as u64 * CHUNK)
    }

    /// Maximum of allocated bytes since [`Arena::forget_peak`].
    pub(crate) fn used_peak(&self) -> Bytes {
        Bytes(self.used_peak)
    }

    /// Maximum of mapped bytes since [`Arena::forget_peak`].
    pub(crate) fn mapped_peak(&self) -> Bytes {
        Bytes(self.mapped_peak)
    }

    /// Bytes that were mapped at another address since [`Arena::forget_peak`].
    pub(crate) fn moved(&self) -> Bytes {
        Bytes(self.moved)
    }

    pub(crate) fn forget_peak(&mut self) {
        self.used_peak = self.used;
        self.mapped_peak = self.mapped().0;
        self.moved = 0;
    }

    /// Bounds the bytes that are mapped from now on. What is mapped stays.
    pub(crate) fn limit(&mut self, limit: Limit) {
        self.limit = limit;
    }

    /// Allocates bytes. Returns their offset.
    ///
    /// # Errors
    /// That of the driver; [`Backing::out_of_memory`] beyond the limit. Nothing is allocated then.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64, B::Error> {
        let bytes = rounded(bytes);
        let is_large = bytes >= LARGE;
        let offset = match self.side(is_large).best_fit(bytes) {
            Some(offset) => offset,
            None => self.make_room(bytes, is_large)?,
        };
        let side = self.side(is_large);
        side.take_ready(offset..offset + bytes);
        side.taken.insert(offset, bytes);
        self.used += bytes;
        self.used_peak = self.used_peak.max(self.used);
        Ok(offset)
    }

    /// Frees an allocation; `false` if there is none at this offset.
    pub(crate) fn free(&mut self, offset: u64) -> bool {
        let is_large = offset >= self.large.addresses.start;
        let side = self.side(is_large);
        let Some(bytes) = side.taken.remove(&offset) else {
            return false;
        };
        side.add_ready(offset, bytes);
        self.used -= bytes;
        true
    }

    /// Maps memory so that one allocation of these bytes needs no more.
    ///
    /// # Errors
    /// As of [`Arena::allocate`].
    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<(), B::Error> {
        let bytes = rounded(bytes);
        let is_large = bytes >= LARGE;
        if self.side(is_large).best_fit(bytes).is_none() {
            self.make_room(bytes, is_large)?;
        }
        Ok(())
    }

    /// Frees chunks in which nothing is allocated until at most `keep` bytes are mapped, and returns the bytes freed: first those of small
    /// allocations, so that large free ranges stay whole. Waits for the stream if there are any.
    ///
    /// # Errors
    /// That of the driver.
    pub(crate) fn trim(&mut self, keep: Bytes) -> Result<Bytes, B::Error> {
        let excess = (self.mapped() - keep).0.div_ceil(CHUNK) as usize;
        let idle = self.small.idle_slots().chain(self.large.idle_slots());
        let idle: Vec<u64> = idle.take(excess).collect();
        if !idle.is_empty() {
            self.backing.wait()?;
        }
        for &slot in &idle {
            self.forget_slot(slot);
            self.backing.release(slot)?;
        }
        Ok(Bytes(idle.len() as u64 * CHUNK))
    }

    fn side(&mut self, is_large: bool) -> &mut Side {
        if is_large {
            &mut self.large
        } else {
            &mut self.small
        }
    }

    /// Up to `count` slots outside of `besides` that have a chunk and in which nothing is allocated.
    fn idle_slots(&self, besides: &Range<u64>, count: usize) -> Vec<u64> {
        let all = self.large.idle_slots().chain(self.small.idle_slots());
        all.filter(|slot| !besides.contains(slot)).take(count).collect()
    }

    /// Maps memory where the fewest chunks make a free range of these bytes. Returns its offset.
    fn make_room(&mut self, bytes: u64, is_large: bool) -> Result<u64, B::Error> {
        let (offset, missing) = self
            .cheapest_place(bytes, is_large)
            .ok_or_else(B::out_of_memory)?;
        let place = slots_of(&(offset..offset + bytes));
        let mapped = self.mapped.len() as u64;
        let chunks_until = |limit: Bytes| (limit.0 / CHUNK).saturating_sub(mapped) as usize;
        // What is created meanwhile is in the place itself: these stay the same.
        let movable = self.idle_slots(&place, missing.len());
        let wanted = chunks_until(self.limit.wanted).min(missing.len());
        let created = missing.len() - movable.len().min(missing.len() - wanted);
        if created > chunks_until(self.limit.most) {
            return Err(B::out_of_memory());
        }
        let (mut filled, failed) = self.create(missing.get(..created).unwrap_or_default());
        // Where the driver lacks memory, chunks are moved instead.
        let rest = missing.get(filled..).unwrap_or_default();
        let moved = match failed.filter(|error| !B::lacks_memory(error)) {
            Some(error) => Err(error),
            None if movable.len() < rest.len() => Err(B::out_of_memory()),
            None => self.remap(&movable, rest, &mut filled),
        };
        // What was mapped before an error is free memory, which the next allocation may use.
        self.open(missing.get(..filled).unwrap_or_default())?;
        self.mapped_peak = self.mapped_peak.max(self.mapped().0);
        moved.map(|()| offset)
    }

    /// Creates chunks at slots until one fails. Returns their number, and the error.
    fn create(&mut self, slots: &[u64]) -> (usize, Option<B::Error>) {
        for (count, &slot) in slots.iter().enumerate() {
            if let Err(error) = self.backing.create(slot) {
                return (count, Some(error));
            }
            self.mapped.insert(slot);
        }
        (slots.len(), None)
    }

    /// Moves chunks in which nothing is allocated to other slots, and counts them.
    fn remap(&mut self, from: &[u64], to: &[u64], filled: &mut usize) -> Result<(), B::Error> {
        if !to.is_empty() {
            self.backing.wait()?;
        }
        for (&from, &to) in from.iter().zip(to) {
            self.forget_slot(from);
            self.backing.remap(from, to)?;
            self.mapped.insert(to);
            self.moved += CHUNK;
            *filled += 1;
        }
        Ok(())
    }

    /// Makes slots that were mapped just now accessible, and adds them to the free ranges: nothing is allocated in them.
    fn open(&mut self, slots: &[u64]) -> Result<(), B::Error> {
        for run in slots.chunk_by(|one, next| one + 1 == *next) {
            let (Some(&first), Some(&last)) = (run.first(), run.last()) else {
                continue;
            };
            let begin = first * CHUNK;
            let is_large = begin >= self.large.addresses.start;
            self.side(is_large).add_ready(begin, (last + 1 - first) * CHUNK);
            self.backing.open(first..last + 1)?;
        }
        Ok(())
    }

    /// Removes a slot in which nothing is allocated from the books.
    fn forget_slot(&mut self, slot: u64) {
        let begin = slot * CHUNK;
        let is_large = begin >= self.large.addresses.start;
        self.side(is_large).take_ready(begin..begin + CHUNK);
        self.mapped.remove(&slot);
    }

    /// Where a free range of these bytes takes the fewest chunks more: its offset, and the slots without a chunk.
    fn cheapest_place(&self, bytes: u64, is_large: bool) -> Option<(u64, Vec<u64>)> {
        let side = if is_large { &self.large } else { &self.small };
        let missing_in = |place: Range<u64>| {
            let slots = slots_of(&place);
            (slots.end - slots.start) as usize - self.mapped.range(slots).count()
        };
        let mut best: Option<(usize, u64)> = None;
        for gap in side.gaps().filter(|gap| gap.end - gap.start >= bytes) {
            let ready = side.ready.range(gap.clone()).map(|(&offset, _)| offset);
            for offset in std::iter::once(gap.start).chain(ready) {
                if offset + bytes > gap.end {
                    break;
                }
                let missing = missing_in(offset..offset + bytes);
                if best.is_none_or(|(fewest, _)| missing < fewest) {
                    best = Some((missing, offset));
                }
            }
        }
        let (_, offset) = best?;
        let slots = slots_of(&(offset..offset + bytes));
        Some((offset, slots.filter(|slot| !self.mapped.contains(slot)).collect()))
    }
}

/// Bytes of an allocation.
fn rounded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const ADDRESSES: u64 = 4096 * CHUNK;

    #[derive(Debug, PartialEq, Eq)]
    enum Failed {
        OutOfMemory,
        Lost,
    }

    /// A driver that has some chunks, and knows which slots work of the stream may still use.
    #[derive(Default)]
    struct Driver {
        chunks: u64,
        /// Number of the chunk of each slot.
        at: HashMap<u64, u64>,
        open: HashSet<u64>,
        next: u64,
        waits: u64,
        in_use: HashSet<u64>,
        lost: bool,
    }

    impl Backing for Driver {
        type Error = Failed;

        fn create(&mut self, slot: u64) -> Result<(), Failed> {
            if self.lost {
                return Err(Failed::Lost);
            }
            if self.at.len() as u64 >= self.chunks {
                return Err(Failed::OutOfMemory);
            }
            self.next += 1;
            assert!(
                self.at.insert(slot, self.next).is_none(),
                "slot {slot} had a chunk"
            );
            Ok(())
        }

        fn remap(&mut self, from: u64, to: u64) -> Result<(), Failed> {
            assert!(
                !self.in_use.contains(&from),
                "slot {from} may be used by work that was not waited for"
            );
            let chunk = self.at.remove(&from).expect("a chunk to move");
            self.open.remove(&from);
            assert!(self.at.insert(to, chunk).is_none(), "slot {to} had a chunk");
            Ok(())
        }

        fn release(&mut self, slot: u64) -> Result<(), Failed> {
            assert!(
                !self.in_use.contains(&slot),
                "slot {slot} may be used by work that was not waited for"
            );
            self.at.remove(&slot).expect("a chunk to free");
            self.open.remove(&slot);
            Ok(())
        }

        fn open(&mut self, slots: Range<u64>) -> Result<(), Failed> {
            for slot in slots {
                assert!(self.at.contains_key(&slot));
                self.open.insert(slot);
            }
            Ok(())
        }

        fn wait(&mut self) -> Result<(), Failed> {
            self.waits += 1;
            self.in_use.clear();
            Ok(())
        }

        fn out_of_memory() -> Failed {
            Failed::OutOfMemory
        }

        fn lacks_memory(error: &Failed) -> bool {
            *error == Failed::OutOfMemory
        }
    }

    fn arena(chunks: u64) -> Arena<Driver> {
        let driver = Driver {
            chunks,
            ..Driver::default()
        };
        Arena::new(driver, ADDRESSES)
    }

    /// Allocates, and uses the memory by work of the stream.
    fn used(arena: &mut Arena<Driver>, bytes: u64) -> Result<u64, Failed> {
        let offset = arena.allocate(bytes)?;
        for slot in slots_of(&(offset..offset + bytes)) {
            assert!(
                arena.backing.open.contains(&slot),
                "slot {slot} is not accessible"
            );
            arena.backing.in_use.insert(slot);
        }
        Ok(offset)
    }

    #[test]
    fn a_trim_frees_the_chunks_of_small_allocations_first() {
        let mut arena = arena(8);
        let large = used(&mut arena, 3 * CHUNK).unwrap();
        let small = used(&mut arena, 512).unwrap();
        assert!(arena.free(large) && arena.free(small));
        assert_eq!(arena.trim(Bytes(3 * CHUNK)).unwrap(), Bytes(CHUNK));
        let created = arena.backing.next;
        used(&mut arena, 3 * CHUNK).unwrap();
        assert_eq!(arena.backing.next, created, "the large range was whole");
    }

    #[test]
    fn tensors_that_grow_in_turn_take_no_more_memory_than_is_in_use() {
        let mut arena = arena(u64::MAX);
        let most = 3008 << 20;
        arena.limit(Limit {
            wanted: Bytes(most),
            most: Bytes(most),
        });
        let mut before = None;
        for mib in [
            400, 500, 610, 700, 830, 900, 1010, 1100, 1210, 1300, 1400, 1500, 1300, 900, 1450, 700, 1500,
        ] {
            let next = used(&mut arena, mib << 20).expect("what is in use is less than the limit");
            if let Some(before) = before.replace(next) {
                assert!(arena.free(before));
            }
        }
        assert!(arena.mapped().0 <= most);
        assert!(arena.moved() > Bytes::ZERO);
    }

    #[test]
    fn free_neighbours_are_one_block() {
        let mut arena = arena(12);
        let parts: Vec<u64> = (0..3)
            .map(|_| used(&mut arena, 4 * CHUNK).expect("there is memory"))
            .collect();
        for part in [parts[0], parts[2], parts[1]] {
            assert!(arena.free(part));
        }
        assert_eq!(used(&mut arena, 12 * CHUNK), Ok(parts[0]));
        assert_eq!(arena.backing.waits, 0, "nothing had to move");
    }

    #[test]
    fn a_reserved_block_is_allocated_without_the_driver() {
        let mut arena = arena(8);
        arena.reserve(8 * CHUNK).expect("there is memory");
        assert_eq!((arena.mapped(), arena.used()), (Bytes(8 * CHUNK), Bytes::ZERO));
        arena.backing.lost = true;
        assert!(used(&mut arena, 8 * CHUNK).is_ok());
    }

    #[test]
    fn beyond_the_limit_nothing_is_allocated_and_nothing_is_lost() {
        let mut arena = arena(u64::MAX);
        arena.limit(Limit {
            wanted: Bytes(2 * CHUNK),
            most: Bytes(4 * CHUNK),
        });
        let first = used(&mut arena, 3 * CHUNK).expect("the limit is 4 chunks");
        assert_eq!(used(&mut arena, 2 * CHUNK), Err(Failed::OutOfMemory));
        assert_eq!(
            (arena.used(), arena.mapped()),
            (Bytes(3 * CHUNK), Bytes(3 * CHUNK))
        );
        assert!(arena.free(first));
        assert!(used(&mut arena, 4 * CHUNK).is_ok());
    }

    #[test]
    fn an_error_of_the_driver_that_is_no_lack_of_memory_is_returned() {
        let mut arena = arena(8);
        arena.backing.lost = true;
        assert_eq!(used(&mut arena, CHUNK), Err(Failed::Lost));
    }

    #[test]
    fn what_is_not_allocated_cannot_be_freed() {
        let mut arena = arena(8);
        let offset = used(&mut arena, 1000).expect("there is memory");
        assert!(!arena.free(offset + ALIGNMENT));
        assert!(arena.free(offset));
        assert!(!arena.free(offset));
    }

    #[test]
    fn a_trim_waits_and_gives_back_what_is_not_allocated() {
        let mut arena = arena(8);
        let small = used(&mut arena, 1000).expect("there is memory");
        let large = used(&mut arena, 4 * CHUNK).expect("there is memory");
        assert!(arena.free(large));
        assert_eq!(arena.trim(Bytes(3 * CHUNK)), Ok(Bytes(2 * CHUNK)));
        assert_eq!(arena.trim(Bytes::ZERO), Ok(Bytes(2 * CHUNK)));
        assert_eq!(arena.mapped(), Bytes(CHUNK), "one has the small allocation");
        assert!(arena.free(small));
        assert_eq!(arena.trim(Bytes::ZERO), Ok(Bytes(CHUNK)));
        assert!(arena.backing.at.is_empty());
    }

    #[derive(Clone, Debug)]
    enum Act {
        Allocate(u64),
        Free(usize),
        Reserve(u64),
        Trim(u64),
        Wait,
    }

    fn act() -> impl Strategy<Value = Act> {
        let bytes = prop_oneof![1..4096_u64, 1..(4_u64 << 20), 1..8 * CHUNK];
        prop_oneof![
            5 => bytes.prop_map(Act::Allocate),
            4 => any::<usize>().prop_map(Act::Free),
            1 => (1..8 * CHUNK).prop_map(Act::Reserve),
            1 => (0..16_u64).prop_map(|chunks| Act::Trim(chunks * CHUNK)),
            1 => Just(Act::Wait),
        ]
    }

    proptest! {
        /// Allocations overlap nowhere and keep their memory; mapped bytes stay within the limit and what the driver has; an
        /// allocation fails only where chunks without any allocation are too few for it.
        #[test]
        fn memory_is_whole_and_within_its_limit(
            acts in vec(act(), 1..120),
            chunks in 1..40_u64,
            wanted in 0..40_u64,
            most in 1..40_u64,
        ) {
            let mut arena = arena(chunks);
            let limit = Limit { wanted: Bytes(wanted.min(most) * CHUNK), most: Bytes(most * CHUNK) };
            arena.limit(limit);
            let mut live: Vec<(u64, u64, Vec<u64>)> = Vec::new();
            for act in acts {
                match act {
                    Act::Allocate(bytes) => {
                        let free = chunks.min(most) as usize - arena.mapped.len()
                            + arena.idle_slots(&(0..0), usize::MAX).len();
                        match used(&mut arena, bytes) {
                            Ok(offset) => {
                                let slots = slots_of(&(offset..offset + bytes));
                                let backed = slots.map(|slot| arena.backing.at[&slot]).collect();
                                live.push((offset, bytes, backed));
                            }
                            Err(error) => {
                                prop_assert_eq!(error, Failed::OutOfMemory);
                                prop_assert!((free as u64) * CHUNK < bytes.next_multiple_of(CHUNK) + CHUNK);
                            }
                        }
                    }
                    Act::Free(which) if !live.is_empty() => {
                        let (offset, _, _) = live.swap_remove(which % live.len());
                        prop_assert!(arena.free(offset));
                    }
                    Act::Free(_) => {}
                    Act::Reserve(bytes) => {
                        let used = arena.used();
                        let _ = arena.reserve(bytes);
                        prop_assert_eq!(arena.used(), used);
                    }
                    Act::Trim(keep) => {
                        let before = arena.mapped();
                        let freed = arena.trim(Bytes(keep)).expect("the driver is there");
                        prop_assert_eq!(arena.mapped() + freed, before);
                    }
                    Act::Wait => arena.backing.wait().expect("the driver is there"),
                }
                prop_assert!(arena.mapped.len() as u64 <= chunks.min(most));
                prop_assert_eq!(arena.mapped.len(), arena.backing.at.len());
                let mut ranges: Vec<_> = live.iter().map(|(at, bytes, _)| (*at, at + rounded(*bytes))).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                let sum: u64 = live.iter().map(|(_, bytes, _)| rounded(*bytes)).sum();
                prop_assert_eq!(arena.used(), Bytes(sum));
                for (offset, bytes, backed) in &live {
                    let now: Vec<u64> =
                        slots_of(&(*offset..offset + bytes)).map(|slot| arena.backing.at[&slot]).collect();
                    prop_assert_eq!(&now, backed);
                }
            }
            for (offset, _, _) in live {
                prop_assert!(arena.free(offset));
            }
            arena.trim(Bytes::ZERO).expect("the driver is there");
            prop_assert!(arena.backing.at.is_empty());
            prop_assert!(arena.small.ready.is_empty() && arena.large.ready.is_empty());
        }
    }
}
