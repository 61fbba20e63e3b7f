//! A global allocator with counters. On a GPU the memory pool reports what it has allocated; system memory has no
//! such account, and without one the activation memory of a stage would be a guess.
//!
//! The binary installs it:
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;
//! ```
//! All functions here return zero in a process that has not installed it. The counters are relaxed atomics: each is
//! exact by itself, and comparing two of them is not meaningful. An allocation costs one atomic addition and one load
//! more than without, two nanoseconds uncontended.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use residency::Bytes;

/// Bytes allocated now.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// Maximum of `LIVE` since [`mark`].
static PEAK: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// Bytes allocated less bytes freed by this thread. Const and without a destructor, so that the allocator may use
    /// it at any time, including thread exit.
    static NET: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator with counters. See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn record_allocated(bytes: usize) {
    let bytes = bytes as i64;
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    // Usually below the peak: then the cache line is only read.
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
    count_for_thread(bytes);
}

fn record_freed(bytes: usize) {
    let bytes = bytes as i64;
    LIVE.fetch_sub(bytes, Relaxed);
    count_for_thread(-bytes);
}

fn count_for_thread(change: i64) {
    // Fails only after the thread's storage was destroyed, when its counter is no longer read.
    let _ = NET.try_with(|net| net.set(net.get().wrapping_add(change)));
}

// SAFETY: every call is forwarded to `System` with unchanged arguments, and its result is returned unchanged;
// counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            record_allocated(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) };
        record_freed(layout.size());
    }

    // Forwarded, since the default implementation would write zeros over pages that are zero already.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc_zeroed`'s contract, which is `System`'s.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            record_allocated(layout.size());
        }
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        if !moved.is_null() {
            if new_size >= layout.size() {
                record_allocated(new_size - layout.size());
            } else {
                record_freed(layout.size() - new_size);
            }
        }
        moved
    }
}

fn bytes(counter: i64) -> Bytes {
    Bytes(u64::try_from(counter).unwrap_or(0))
}

/// Whether the allocator is installed in this process. (A Rust program has allocated before it can call this.)
pub fn installed() -> bool {
    LIVE.load(Relaxed) > 0
}

/// Bytes allocated now; zero if the allocator is not installed.
pub fn live() -> Bytes {
    bytes(LIVE.load(Relaxed))
}

/// Starts a measurement for [`peak_since_mark`] and returns the bytes allocated now. There is one mark per process,
/// as there is one card per worker.
pub fn mark() -> Bytes {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    bytes(live)
}

/// Maximum of allocated bytes since [`mark`], including bytes allocated before it.
pub fn peak_since_mark() -> Bytes {
    bytes(PEAK.load(Relaxed).max(LIVE.load(Relaxed)))
}

/// After this call, every large allocation is mapped from the system, at the cost of a page fault per 4 KiB, and unmapped when
/// it is freed. Otherwise the C library raises its bound with each large allocation that is freed, and keeps later ones in a
/// heap for each thread. For a process that computes little.
pub fn return_large() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it sets a number of the C library, which takes its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

/// After this call, all threads share at most `heaps` heaps. Otherwise the C library makes a heap for each thread, which keeps
/// the memory that the thread has freed.
///
/// To be called before other threads exist. With several heaps, [`return_free`] leaves up to 64 MiB of free memory at the end
/// of each heap but the first, once much was freed at a time.
pub fn share_heaps(heaps: i32) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it sets a number of the C library, which takes its own lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, heaps);
    }
}

/// Smallest allocation that [`return_large`] concerns: the C library's initial bound.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Returns pages of freed memory to the system, also pages between allocations. It looks through all heaps, so call it rarely:
/// when more was freed than is worth keeping.
pub fn return_free() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it gives back pages in which nothing is allocated, under the C library's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes that this thread has allocated less those that it has freed; may be negative. The difference of two readings
/// is the net allocation between them on this thread, independent of other threads.
pub(crate) fn thread_net() -> i64 {
    NET.try_with(Cell::get).unwrap_or(0)
}
