//! Device memory by pool: what a pool has in use and in reserve is the driver's own account of it.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result::{self, mem_pool};
use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};
use residency::Bytes;

use sys::CUmemPool_attribute_enum as Attribute;

/// A memory pool of a card: one for each component, so that what a component takes comes back whole. The device's
/// current pool, where activations live, is never one of these.
///
/// Reference: the stream-ordered memory allocator of the CUDA driver API (`cuMemPool*`).
#[derive(Debug)]
pub(super) struct Pool {
    handle: sys::CUmemoryPool,
    ours: bool,
}

// SAFETY: a pool is a handle that the driver guards by itself; any thread may use it.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// An empty pool on the card of this context. It keeps what it has until it is trimmed.
    pub(super) fn new(context: &CudaContext) -> Result<Pool, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: plain data, for which zeros mean: nothing special.
        let mut wanted: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        wanted.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = context.cu_device();
        // SAFETY: `wanted` describes a pool of device memory and lives through the call.
        let handle = unsafe { mem_pool::create(&raw const wanted) }?;
        let pool = Pool { handle, ours: true };
        pool.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        Ok(pool)
    }

    /// The pool that activations come from. `release_threshold`: what it keeps over a synchronisation.
    pub(super) fn of_activations(
        context: &CudaContext,
        release_threshold: Option<Bytes>,
    ) -> Result<Pool, DriverError> {
        context.bind_to_thread()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` outlives the call, and the device is the context's.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut handle, context.cu_device()) }.result()?;
        let pool = Pool { handle, ours: false };
        let threshold = release_threshold.map_or(u64::MAX, |bytes| bytes.0);
        pool.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, threshold)?;
        Ok(pool)
    }

    /// Bytes that are allocated from it.
    pub(super) fn used(&self) -> Result<Bytes, DriverError> {
        self.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Bytes that it has of the card, allocated or not.
    pub(super) fn reserved(&self) -> Result<Bytes, DriverError> {
        self.get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// The most that was allocated since [`Pool::forget_peak`].
    pub(super) fn peak(&self) -> Result<Bytes, DriverError> {
        self.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }

    /// Begins a new peak at what is allocated now.
    pub(super) fn forget_peak(&self) -> Result<(), DriverError> {
        self.set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0) // the only value that it can be set to
    }

    /// Hands what is not allocated back to the card. Without a synchronisation before it, what was freed lately still
    /// counts as allocated.
    pub(super) fn trim(&self) -> Result<(), DriverError> {
        // SAFETY: the pool is alive as long as `self`.
        unsafe { mem_pool::trim_to(self.handle, 0) }
    }

    /// Allocates `bytes` (one at least), to be used in the order of `stream`. Whoever gets the pointer frees it.
    pub(super) fn allocate(&self, bytes: u64, stream: &CudaStream) -> Result<sys::CUdeviceptr, DriverError> {
        // SAFETY: pool and stream are alive, and of one context. That the memory has no content yet is the caller's.
        unsafe { mem_pool::alloc_async(self.handle, bytes.max(1) as usize, stream.cu_stream()) }
    }

    /// Maps memory for `bytes`, which the next allocations in the order of `stream` are cut from: one call where each of
    /// them would have been one. Without memory in one piece nothing happens, and they map what they need by themselves.
    pub(super) fn map(&self, bytes: u64, stream: &CudaStream) -> Result<(), DriverError> {
        match self.allocate(bytes, stream) {
            // SAFETY: allocated just now, and used by nobody.
            Ok(pointer) => unsafe { free(pointer, stream) },
            Err(error) if is_out_of_memory(error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn get(&self, attribute: Attribute) -> Result<Bytes, DriverError> {
        let mut value = 0_u64;
        // SAFETY: all attributes that are asked for here are 64-bit.
        unsafe { mem_pool::get_attribute(self.handle, attribute, (&raw mut value).cast()) }?;
        Ok(Bytes(value))
    }

    fn set(&self, attribute: Attribute, value: u64) -> Result<(), DriverError> {
        let mut value = value;
        // SAFETY: as for `get`.
        unsafe { mem_pool::set_attribute(self.handle, attribute, (&raw mut value).cast()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        // SAFETY: it is ours and nobody uses it any more. With allocations left the driver defers the end.
        if let Err(error) = unsafe { mem_pool::destroy(self.handle) } {
            tracing::error!(%error, "a memory pool cannot be destroyed");
        }
    }
}

/// Frees what [`Pool::allocate`] gave, in the order of `stream`.
///
/// # Safety
/// The pointer is one of those, is not freed otherwise, and what uses it comes before in `stream`.
pub(super) unsafe fn free(pointer: sys::CUdeviceptr, stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: the caller's promise.
    unsafe { result::free_async(pointer, stream.cu_stream()) }
}

/// Whether something is still allocated at this address.
pub(super) fn is_allocated(pointer: sys::CUdeviceptr) -> bool {
    let mut size = 0_usize;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    // SAFETY: the attribute is a `size_t`, and an address of which the driver knows nothing is an error only.
    let known = unsafe { sys::cuPointerGetAttribute((&raw mut size).cast(), attribute, pointer) };
    known.result().is_ok() && size > 0
}

/// Whether the card has `bytes` in one piece: they are taken, never mapped, and given back.
pub(super) fn has_in_one_piece(context: &CudaContext, bytes: Bytes) -> Result<bool, DriverError> {
    const GRANULE: u64 = 2 << 20; // what physical memory of a card is handed out in
    context.bind_to_thread()?;
    // SAFETY: plain data, for which zeros mean: nothing special.
    let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = context.cu_device();
    let mut handle = 0;
    let size = bytes.0.max(1).next_multiple_of(GRANULE) as usize;
    // SAFETY: both pointers are to data that outlives the call.
    match unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const wanted, 0) }.result() {
        Ok(()) => {
            // SAFETY: the handle was made just now and is mapped nowhere.
            unsafe { sys::cuMemRelease(handle) }.result()?;
            Ok(true)
        }
        Err(error) if is_out_of_memory(error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether memory is all that was missing: then the process is well.
pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// Page-locked memory of the system, which the card reads by itself. Not write-combined: the CPU fills it from files
/// and may read what it wrote.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    bytes: NonNull<u8>,
    length: usize,
    /// What it is a part of; without, it is the driver's own.
    region: Option<Arc<PinnedRegion>>,
}

// SAFETY: it owns its memory, which is the process's and not a thread's.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// So many buffers of `length` bytes, a multiple of 4096, with zeros: parts of one region that is locked in one call, or
    /// where that cannot be had each by itself. `threads` have the system find the memory.
    pub(super) fn several(
        context: &CudaContext,
        count: usize,
        length: usize,
        threads: usize,
    ) -> Result<Vec<PinnedBuffer>, DriverError> {
        context.bind_to_thread()?;
        let Some(region) = PinnedRegion::new(count * length, threads) else {
            return (0..count).map(|_| PinnedBuffer::alone(context, length)).collect();
        };
        let region = Arc::new(region);
        let part = |number: usize| PinnedBuffer {
            // SAFETY: the region is as long as all parts.
            bytes: unsafe { region.bytes.add(number * length) },
            length,
            region: Some(Arc::clone(&region)),
        };
        Ok((0..count).map(part).collect())
    }

    /// `length` bytes, zeroed by the system.
    fn alone(context: &CudaContext, length: usize) -> Result<PinnedBuffer, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a plain allocation.
        let bytes = unsafe { result::malloc_host(length, 0) }?;
        let bytes =
            NonNull::new(bytes.cast::<u8>()).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        Ok(PinnedBuffer {
            bytes,
            length,
            region: None,
        })
    }

    /// All of it, to be filled.
    ///
    /// # Safety
    /// No copy from it is under way.
    pub(super) unsafe fn fill(&mut self) -> &mut [u8] {
        // SAFETY: the memory is ours, of this length and initialised; the caller's promise keeps the card out of it.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), self.length) }
    }

    /// Copies a part of it to the card, in the order of `stream`, and does not wait for it.
    ///
    /// # Safety
    /// `to` is an allocation with room for it; the part is neither written nor dropped before the copy is done.
    pub(super) unsafe fn copy_to(
        &self,
        part: Range<usize>,
        to: sys::CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        debug_assert!(part.end <= self.length);
        let begin = part.start.min(self.length);
        let length = part.end.min(self.length) - begin;
        // SAFETY: it begins within the memory, or just behind it.
        let from: *const c_void = unsafe { self.bytes.as_ptr().add(begin) }.cast();
        // SAFETY: the caller's promise; the source is ours and long enough.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, length, stream.cu_stream()) }.result()
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.region.is_some() {
            return;
        }
        // SAFETY: allocated by `alone`, and freed once. A copy that is under way is waited for by the driver.
        if let Err(error) = unsafe { result::free_host(self.bytes.as_ptr().cast()) } {
            tracing::error!(%error, "pinned memory cannot be freed");
        }
    }
}

/// Memory of this process that the driver has locked. It takes a sixth of the time that the driver takes to allocate as much:
/// the system finds it in pages of 2 MiB, where it has those, by several threads.
#[derive(Debug)]
struct PinnedRegion {
    /// What the system mapped: its address and bytes.
    mapped: (NonNull<c_void>, usize),
    /// The first byte that is locked, at a multiple of 2 MiB.
    bytes: NonNull<u8>,
}

// SAFETY: it owns its memory, which is the process's and not a thread's.
unsafe impl Send for PinnedRegion {}
// SAFETY: nobody reads or writes through it; its parts do, each its own.
unsafe impl Sync for PinnedRegion {}

/// The system's calls, with the numbers of Linux.
mod system {
    use std::ffi::{c_int, c_void};

    pub(super) const READ_AND_WRITE: c_int = 3;
    pub(super) const PRIVATE_AND_ANONYMOUS: c_int = 0x22;
    pub(super) const HUGE_PAGES: c_int = 14;

    unsafe extern "C" {
        pub(super) fn mmap(
            at: *mut c_void,
            length: usize,
            protection: c_int,
            flags: c_int,
            file: c_int,
            offset: i64,
        ) -> *mut c_void;
        pub(super) fn madvise(at: *mut c_void, length: usize, advice: c_int) -> c_int;
        pub(super) fn munmap(at: *mut c_void, length: usize) -> c_int;
    }
}

impl PinnedRegion {
    const HUGE: usize = 2 << 20;
    const PAGE: usize = 4096;

    /// `length` bytes of zeros for the context of this thread; `None` where system or driver do not do so.
    fn new(length: usize, threads: usize) -> Option<PinnedRegion> {
        if !cfg!(target_os = "linux") || length == 0 {
            return None;
        }
        let whole = length + PinnedRegion::HUGE;
        // SAFETY: a new mapping at an address of the system's choice.
        let at = unsafe {
            system::mmap(
                std::ptr::null_mut(),
                whole,
                system::READ_AND_WRITE,
                system::PRIVATE_AND_ANONYMOUS,
                -1,
                0,
            )
        };
        // -1 says that there is none.
        let at = NonNull::new(at).filter(|at| at.as_ptr().addr() != usize::MAX)?;
        let before = at.as_ptr().addr().next_multiple_of(PinnedRegion::HUGE) - at.as_ptr().addr();
        // SAFETY: it is within the mapping, which is longer by as much as an alignment can take.
        let bytes = unsafe { at.cast::<u8>().add(before) };
        let mapped = (at, whole);
        // Small pages do as well.
        // SAFETY: the range is within the mapping, and only advice is given.
        unsafe { system::madvise(bytes.as_ptr().cast(), length, system::HUGE_PAGES) };
        let part = length
            .div_ceil(threads.max(1))
            .next_multiple_of(PinnedRegion::HUGE);
        std::thread::scope(|scope| {
            for begin in (0..length).step_by(part) {
                let (first, end) = (
                    bytes.as_ptr().expose_provenance() + begin,
                    (begin + part).min(length) - begin,
                );
                scope.spawn(move || {
                    for offset in (0..end).step_by(PinnedRegion::PAGE) {
                        // SAFETY: a byte of the mapping, in a part that no other thread touches.
                        unsafe {
                            std::ptr::with_exposed_provenance_mut::<u8>(first + offset).write_volatile(0)
                        };
                    }
                });
            }
        });
        // SAFETY: the range is mapped, and stays so until it is unregistered.
        let locked = unsafe { sys::cuMemHostRegister_v2(bytes.as_ptr().cast(), length, 0) }.result();
        if let Err(error) = locked {
            tracing::debug!(%error, "memory of the process cannot be locked: the driver allocates its own");
            // SAFETY: nobody has it.
            unsafe { system::munmap(at.as_ptr(), whole) };
            return None;
        }
        Some(PinnedRegion { mapped, bytes })
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        // SAFETY: registered by `new`, and unregistered once. A copy that is under way is waited for by the driver.
        if let Err(error) = unsafe { sys::cuMemHostUnregister(self.bytes.as_ptr().cast()) }.result() {
            // Whatever the card may still read stays mapped.
            return tracing::error!(%error, "pinned memory cannot be freed");
        }
        let (at, length) = self.mapped;
        // SAFETY: mapped by `new`, unmapped once, and no part of it is left.
        unsafe { system::munmap(at.as_ptr(), length) };
    }
}
