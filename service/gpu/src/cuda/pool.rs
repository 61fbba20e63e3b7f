//! Device memory pools. The bytes used and reserved by a pool are the driver's own figures.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result::{self, mem_pool};
use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};
use residency::Bytes;

use crate::tensors::Pinning;
use sys::CUmemPool_attribute_enum as Attribute;

/// A memory pool of a card: one per component, so that its memory is freed as a whole. Never the device's current
/// pool.
///
/// Reference: the stream-ordered memory allocator of the CUDA driver API (`cuMemPool*`).
#[derive(Debug)]
pub(super) struct Pool {
    handle: sys::CUmemoryPool,
}

// SAFETY: a pool is a handle to an object that the driver synchronizes; any thread may use it.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// An empty pool on the context's card. It keeps its memory until it is trimmed.
    pub(super) fn new(context: &CudaContext) -> Result<Pool, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: plain data, for which zero means default.
        let mut wanted: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        wanted.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = context.cu_device();
        // SAFETY: `wanted` describes a pool of device memory and lives through the call.
        let handle = unsafe { mem_pool::create(&raw const wanted) }?;
        let pool = Pool { handle };
        pool.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        Ok(pool)
    }

    /// Bytes allocated from the pool.
    pub(super) fn used(&self) -> Result<Bytes, DriverError> {
        self.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Bytes that the pool reserves on the card, allocated or not.
    pub(super) fn reserved(&self) -> Result<Bytes, DriverError> {
        self.get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// Returns unused memory to the card. Without a prior synchronization, recently freed memory still counts as
    /// allocated.
    pub(super) fn trim(&self) -> Result<(), DriverError> {
        // SAFETY: the pool is alive as long as `self`.
        unsafe { mem_pool::trim_to(self.handle, 0) }
    }

    /// Allocates `bytes` (at least one) in the order of `stream`. The caller owns the pointer.
    pub(super) fn allocate(&self, bytes: u64, stream: &CudaStream) -> Result<sys::CUdeviceptr, DriverError> {
        // SAFETY: pool and stream are alive, and of one context. Uninitialized memory is the caller's concern.
        unsafe { mem_pool::alloc_async(self.handle, bytes.max(1) as usize, stream.cu_stream()) }
    }

    /// Maps memory for `bytes`, from which the next allocations in the order of `stream` are served: one driver call
    /// for all of them. If there is no contiguous memory nothing happens, and each allocation maps its own.
    pub(super) fn map(&self, bytes: u64, stream: &CudaStream) -> Result<(), DriverError> {
        match self.allocate(bytes, stream) {
            // SAFETY: allocated just now, and unused.
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
        // SAFETY: the pool is ours and unused. With live allocations the driver defers its destruction.
        if let Err(error) = unsafe { mem_pool::destroy(self.handle) } {
            tracing::error!(%error, "a memory pool cannot be destroyed");
        }
    }
}

/// Frees memory from [`Pool::allocate`], in the order of `stream`.
///
/// # Safety
/// The pointer is from [`Pool::allocate`], is not freed elsewhere, and its uses precede this in `stream`.
pub(super) unsafe fn free(pointer: sys::CUdeviceptr, stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: the caller's promise.
    unsafe { result::free_async(pointer, stream.cu_stream()) }
}

/// Whether this address is allocated.
pub(super) fn is_allocated(pointer: sys::CUdeviceptr) -> bool {
    let mut size = 0_usize;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    // SAFETY: the attribute is a `size_t`, and an address that the driver does not know is only an error.
    let known = unsafe { sys::cuPointerGetAttribute((&raw mut size).cast(), attribute, pointer) };
    known.result().is_ok() && size > 0
}

/// Whether the card has `bytes` of contiguous memory: it is allocated, never mapped, and freed.
pub(super) fn has_in_one_piece(context: &CudaContext, bytes: Bytes) -> Result<bool, DriverError> {
    const GRANULE: u64 = 2 << 20; // allocation granularity of physical memory on a card
    context.bind_to_thread()?;
    let wanted = super::region::properties(context);
    let mut handle = 0;
    let size = bytes.0.max(1).next_multiple_of(GRANULE) as usize;
    // SAFETY: both pointers are to data that outlives the call.
    match unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const wanted, 0) }.result() {
        Ok(()) => {
            // SAFETY: the handle was created just now and is not mapped.
            unsafe { sys::cuMemRelease(handle) }.result()?;
            Ok(true)
        }
        Err(error) if is_out_of_memory(error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the error is a lack of memory only, after which the process is healthy.
pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// Page-locked host memory, which the card reads by DMA. Not write-combined: the CPU fills it from files and may read
/// it back.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    bytes: NonNull<u8>,
    length: usize,
    /// The region that it is a part of; `None` if allocated by the driver.
    region: Option<Arc<PinnedRegion>>,
}

// SAFETY: it owns its memory, which is the process's and not a thread's.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// `count` zeroed buffers of `length` bytes, a multiple of 4096: parts of one region that is pinned in one call,
    /// or separate allocations if that fails. `threads` fault its pages in.
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
            bytes: unsafe { region.address().add(number * length) },
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

    /// The whole buffer, for writing.
    ///
    /// # Safety
    /// No copy from it is in flight.
    pub(super) unsafe fn fill(&mut self) -> &mut [u8] {
        // SAFETY: the memory is ours, of this length and initialised; the caller's promise keeps the card out of it.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), self.length) }
    }

    /// Enqueues a copy of a part of it to the card on `stream`, asynchronously.
    ///
    /// # Safety
    /// `to` is an allocation that is large enough; the part is neither written nor dropped before the copy is done.
    pub(super) unsafe fn copy_to(
        &self,
        part: Range<usize>,
        to: sys::CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        debug_assert!(part.end <= self.length);
        let begin = part.start.min(self.length);
        let length = part.end.min(self.length) - begin;
        // SAFETY: the address is within the memory, or one past its end.
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
        // SAFETY: allocated by `alone`, and freed once. The driver waits for a copy in flight.
        if let Err(error) = unsafe { result::free_host(self.bytes.as_ptr().cast()) } {
            tracing::error!(%error, "pinned memory cannot be freed");
        }
    }
}

/// Memory of an allocation of the process that the driver has pinned where it is.
#[derive(Debug)]
pub(super) struct PinnedInPlace {
    context: Arc<CudaContext>,
    begin: NonNull<c_void>,
}

// SAFETY: it is an address, which is never read or written through.
unsafe impl Send for PinnedInPlace {}
// SAFETY: as above.
unsafe impl Sync for PinnedInPlace {}

impl Pinning for PinnedInPlace {}

impl PinnedInPlace {
    /// Pins `bytes` bytes at an address; `None` if the driver refuses.
    ///
    /// # Safety
    /// The memory stays allocated for as long as this value exists.
    pub(super) unsafe fn new(
        context: &Arc<CudaContext>,
        begin: *const u8,
        bytes: usize,
    ) -> Option<PinnedInPlace> {
        let begin = NonNull::new(begin.cast_mut().cast::<c_void>()).filter(|_| bytes > 0)?;
        // SAFETY: the caller's promise.
        let register = || unsafe { sys::cuMemHostRegister_v2(begin.as_ptr(), bytes, 0) }.result();
        match context.bind_to_thread().and_then(|()| register()) {
            Ok(()) => Some(PinnedInPlace {
                context: Arc::clone(context),
                begin,
            }),
            Err(error) => {
                tracing::debug!(%error, bytes, "memory of the process cannot be pinned: it is copied as it is");
                None
            }
        }
    }
}

impl Drop for PinnedInPlace {
    fn drop(&mut self) {
        // Copies from it may be queued, and its memory is about to be freed.
        let waited = self.context.synchronize();
        // SAFETY: registered by `new`, and unregistered once.
        let freed = waited.and_then(|()| unsafe { sys::cuMemHostUnregister(self.begin.as_ptr()) }.result());
        if let Err(error) = freed {
            tracing::error!(%error, "memory of the process stays pinned");
        }
    }
}

/// Memory of this process that the driver has pinned. This takes a sixth of the time of an allocation by the driver:
/// the system provides huge pages of 2 MiB if available, faulted in by several threads.
#[derive(Debug)]
pub(super) struct PinnedRegion(UnpinnedRegion);

impl PinnedRegion {
    /// `length` zeroed bytes for this thread's current context; `None` if the system or the driver refuses.
    pub(super) fn new(length: usize, threads: usize) -> Option<PinnedRegion> {
        UnpinnedRegion::new(length, threads)?.pinned()
    }

    /// Address of the first byte.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.0.bytes
    }

    /// Bytes that are pinned.
    pub(super) fn length(&self) -> usize {
        self.0.length
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        // SAFETY: registered when it was made, and unregistered once; its memory is unmapped after it. The driver waits for a copy in
        // flight.
        if let Err(error) = unsafe { sys::cuMemHostUnregister(self.0.bytes.as_ptr().cast()) }.result() {
            tracing::error!(%error, "pinned memory cannot be freed");
            // Memory that the card may still read stays mapped.
            self.0.mapped.1 = 0;
        }
    }
}

/// Memory of this process, in huge pages where there are some, all of them present.
#[derive(Debug)]
pub(super) struct UnpinnedRegion {
    length: usize,
    /// Address and bytes of the mapping.
    mapped: (NonNull<c_void>, usize),
    /// The first byte, at a multiple of 2 MiB.
    bytes: NonNull<u8>,
}

// SAFETY: it owns its memory, which is the process's and not a thread's.
unsafe impl Send for UnpinnedRegion {}
// SAFETY: never read or written through directly; its parts are, each by its own owner.
unsafe impl Sync for UnpinnedRegion {}

impl UnpinnedRegion {
    const HUGE: usize = 2 << 20;
    const PAGE: usize = 4096;

    /// `length` zeroed bytes, which `threads` fault in; `None` if the system refuses.
    pub(super) fn new(length: usize, threads: usize) -> Option<UnpinnedRegion> {
        if !cfg!(target_os = "linux") || length == 0 {
            return None;
        }
        let whole = length + UnpinnedRegion::HUGE;
        // SAFETY: a new mapping at an address of the system's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        let at = NonNull::new(at).filter(|at| at.as_ptr() != libc::MAP_FAILED)?;
        let before = at.as_ptr().addr().next_multiple_of(UnpinnedRegion::HUGE) - at.as_ptr().addr();
        // SAFETY: it is within the mapping, which is longer by as much as an alignment can take.
        let bytes = unsafe { at.cast::<u8>().add(before) };
        let mapped = (at, whole);
        // Small pages work too.
        // SAFETY: the range is within the mapping, and the call is only advice.
        unsafe { libc::madvise(bytes.as_ptr().cast(), length, libc::MADV_HUGEPAGE) };
        let part = length
            .div_ceil(threads.max(1))
            .next_multiple_of(UnpinnedRegion::HUGE);
        std::thread::scope(|scope| {
            for begin in (0..length).step_by(part) {
                let (first, end) = (
                    bytes.as_ptr().expose_provenance() + begin,
                    (begin + part).min(length) - begin,
                );
                scope.spawn(move || {
                    for offset in (0..end).step_by(UnpinnedRegion::PAGE) {
                        // SAFETY: a byte of the mapping, in a part that no other thread touches.
                        unsafe {
                            std::ptr::with_exposed_provenance_mut::<u8>(first + offset).write_volatile(0)
                        };
                    }
                });
            }
        });
        Some(UnpinnedRegion {
            length,
            mapped,
            bytes,
        })
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// The same memory, pinned for this thread's current context; `None` if the driver refuses.
    pub(super) fn pinned(self) -> Option<PinnedRegion> {
        // SAFETY: the range is mapped, and stays so until it is unregistered.
        let pinned = unsafe { sys::cuMemHostRegister_v2(self.bytes.as_ptr().cast(), self.length, 0) };
        match pinned.result() {
            Ok(()) => Some(PinnedRegion(self)),
            Err(error) => {
                tracing::debug!(%error, "memory of the process cannot be pinned: the driver allocates its own");
                None
            }
        }
    }
}

impl Drop for UnpinnedRegion {
    fn drop(&mut self) {
        let (at, length) = self.mapped;
        if length > 0 {
            // SAFETY: mapped by `new`, unmapped once, and no part of it is alive.
            unsafe { libc::munmap(at.as_ptr(), length) };
        }
    }
}
