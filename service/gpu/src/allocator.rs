//! A global allocator that counts. On a GPU a pool knows what it handed out; in system memory nobody does
//! unless the allocator counts, and without that the activation memory of a stage would be a guess.
//!
//! The binary installs it:
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;
//! ```
//! Everything here answers zero in a process that did not. The counters are relaxed atomics: each is exact
//! by itself, and nobody may conclude from one on the other. An allocation costs one atomic addition and one
//! load more than without, two nanoseconds where there is no contention.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use residency::Bytes;

/// Bytes that are allocated now.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// The most that `LIVE` has been since [`mark`].
static PEAK: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// Allocated less freed by this thread. Const and without a destructor, so that the allocator may touch
    /// it at any time, also while the thread ends.
    static NET: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator with counters. See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn grown(bytes: usize) {
    let bytes = bytes as i64;
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    // Nearly always below the peak: the cache line is then only read.
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
    count_for_thread(bytes);
}

fn shrunk(bytes: usize) {
    let bytes = bytes as i64;
    LIVE.fetch_sub(bytes, Relaxed);
    count_for_thread(-bytes);
}

fn count_for_thread(change: i64) {
    // Fails only where the thread's storage is gone already: nobody will ask for that thread again.
    let _ = NET.try_with(|net| net.set(net.get().wrapping_add(change)));
}

// SAFETY: every call goes to `System` with the arguments as they came, and its answer is returned as it is;
// counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            grown(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) };
        shrunk(layout.size());
    }

    // Passed on rather than left to the default, which would write zeros over pages that are zero already.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc_zeroed`'s contract, which is `System`'s.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grown(layout.size());
        }
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        if !moved.is_null() {
            if new_size >= layout.size() {
                grown(new_size - layout.size());
            } else {
                shrunk(layout.size() - new_size);
            }
        }
        moved
    }
}

fn bytes(counter: i64) -> Bytes {
    Bytes(u64::try_from(counter).unwrap_or(0))
}

/// Whether this process counts. A Rust program has allocated before it can ask.
pub fn installed() -> bool {
    LIVE.load(Relaxed) > 0
}

/// Bytes that are allocated now; zero where the allocator is not installed.
pub fn live() -> Bytes {
    bytes(LIVE.load(Relaxed))
}

/// Starts a measurement: from here on [`peak_since_mark`] counts. Answers what is allocated now. There is
/// one mark per process, as there is one card per worker.
pub fn mark() -> Bytes {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    bytes(live)
}

/// The most bytes that were allocated at once since [`mark`], with all that was there before it.
pub fn peak_since_mark() -> Bytes {
    bytes(PEAK.load(Relaxed).max(LIVE.load(Relaxed)))
}

/// Bytes that this thread has allocated less those that it has freed; may be negative. The difference of two
/// readings is what happened between them on this thread, whatever other threads did meanwhile.
pub(crate) fn thread_net() -> i64 {
    NET.try_with(Cell::get).unwrap_or(0)
}
