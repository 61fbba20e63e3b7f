//! Memory of activations: an [`Arena`] for the stream that computes.
//!
//! The tensor library allocates by `cuMemAllocAsync` and `cuMemFreeAsync`, and takes no other allocator. This crate defines both
//! functions: a program is linked with them before it is linked with the driver's library. For a stream that has an arena they
//! allocate from it, and for any other they call the driver's. Libraries of NVIDIA find the driver's own.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};
use residency::Bytes;

use super::{pool, region};
use crate::arena::{Arena, Backing, CHUNK, Limit};

/// Addresses of an arena, in multiples of a card's memory: chunks that are moved leave addresses without memory.
const ADDRESSES_PER_BYTE: u64 = 4;

/// The activations of a card.
#[derive(Debug)]
pub(super) struct Activations(Arc<OfStream>);

/// The arena of a stream, and its addresses.
struct OfStream {
    stream: sys::CUstream,
    addresses: Range<sys::CUdeviceptr>,
    arena: Mutex<Arena<Chunks>>,
    /// Bytes that stages have on the card outside of the arena.
    outside: AtomicU64,
    /// Their maximum since it was last forgotten.
    outside_peak: AtomicU64,
}

// SAFETY: the stream is a handle that the driver synchronizes; it is kept alive by the arena's chunks.
unsafe impl Send for OfStream {}
// SAFETY: as above.
unsafe impl Sync for OfStream {}

impl std::fmt::Debug for OfStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfStream")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl OfStream {
    fn arena(&self) -> MutexGuard<'_, Arena<Chunks>> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outside(&self) -> Bytes {
        Bytes(self.outside.load(Ordering::Relaxed))
    }
}

/// Counts memory that a stage has on the card outside of the arena among the activations of a stream, until it is dropped.
#[derive(Debug)]
pub(super) struct Outside {
    of: Option<Arc<OfStream>>,
    bytes: u64,
}

impl Outside {
    /// Counts these bytes. A stream without an arena counts nothing.
    pub(super) fn count(stream: &CudaStream, bytes: u64) -> Outside {
        let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
        let of = streams.iter().find(|of| of.stream == stream.cu_stream()).cloned();
        if let Some(of) = &of {
            let now = of.outside.fetch_add(bytes, Ordering::Relaxed) + bytes;
            of.outside_peak.fetch_max(now, Ordering::Relaxed);
        }
        Outside { of, bytes }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(of) = &self.of {
            of.outside.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// Streams that have an arena.
static STREAMS: RwLock<Vec<Arc<OfStream>>> = RwLock::new(Vec::new());

impl Activations {
    /// An arena without memory, for what is allocated on this stream from now on.
    pub(super) fn of(
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
    ) -> Result<Activations, DriverError> {
        context.bind_to_thread()?;
        let memory = context.total_mem()? as u64;
        let length = (memory * ADDRESSES_PER_BYTE).next_multiple_of(CHUNK);
        let mut base = 0;
        // SAFETY: `base` outlives the call; the addresses are of the driver's choice.
        unsafe { sys::cuMemAddressReserve(&raw mut base, length as usize, CHUNK as usize, 0, 0) }.result()?;
        let chunks = Chunks {
            context: Arc::clone(context),
            stream: Arc::clone(stream),
            base,
            handles: HashMap::new(),
        };
        let of_stream = Arc::new(OfStream {
            stream: stream.cu_stream(),
            addresses: base..base + length,
            arena: Mutex::new(Arena::new(chunks, length)),
            outside: AtomicU64::new(0),
            outside_peak: AtomicU64::new(0),
        });
        let mut streams = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
        streams.push(Arc::clone(&of_stream));
        Ok(Activations(of_stream))
    }

    /// Bytes that are allocated.
    pub(super) fn used(&self) -> Bytes {
        self.0.arena().used() + self.0.outside()
    }

    /// Bytes of the card's memory that it has, allocated or not.
    pub(super) fn reserved(&self) -> Bytes {
        self.0.arena().mapped() + self.0.outside()
    }

    /// Bytes of the card's memory that its addresses have.
    pub(super) fn mapped(&self) -> Bytes {
        self.0.arena().mapped()
    }

    /// Maxima since [`Activations::forget_peak`].
    pub(super) fn peak(&self) -> Peak {
        let arena = self.0.arena();
        let outside = Bytes(self.0.outside_peak.load(Ordering::Relaxed));
        Peak {
            used: arena.used_peak() + outside,
            reserved: arena.mapped_peak() + outside,
            moved: arena.moved(),
        }
    }

    pub(super) fn forget_peak(&self) {
        self.0.arena().forget_peak();
        let now = self.0.outside();
        self.0.outside_peak.store(now.0, Ordering::Relaxed);
    }

    /// Bounds the memory that it has from now on.
    pub(super) fn limit(&self, limit: Limit) {
        self.0.arena().limit(limit);
    }

    /// Gives memory in which nothing is allocated back to the card, down to `keep`. Returns the bytes.
    pub(super) fn trim(&self, keep: Bytes) -> Result<Bytes, DriverError> {
        self.0.arena().trim(keep)
    }

    /// Takes memory from the card for one allocation of `bytes`. Does nothing where the card lacks it: each allocation takes its
    /// own then.
    pub(super) fn reserve(&self, bytes: Bytes) -> Result<(), DriverError> {
        match self.0.arena().reserve(bytes.0) {
            Err(error) if pool::is_out_of_memory(error) => Ok(()),
            other => other,
        }
    }
}

impl Drop for Activations {
    fn drop(&mut self) {
        let mut arena = self.0.arena();
        let trimmed = arena.trim(Bytes::ZERO);
        if let Err(error) = trimmed {
            tracing::error!(%error, "memory of activations cannot be freed");
            return;
        }
        // Tensors that are still alive keep their memory, and its addresses.
        if arena.used() > Bytes::ZERO {
            return;
        }
        drop(arena);
        let mut streams = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|of| !Arc::ptr_eq(of, &self.0));
        let addresses = &self.0.addresses;
        // SAFETY: reserved by `of`, nothing is mapped in them, and they are freed once.
        let freed =
            unsafe { sys::cuMemAddressFree(addresses.start, (addresses.end - addresses.start) as usize) };
        if let Err(error) = freed.result() {
            tracing::error!(%error, "addresses of activations cannot be freed");
        }
    }
}

/// Maxima of the bytes of activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peak {
    pub(super) used: Bytes,
    pub(super) reserved: Bytes,
    /// Bytes that were mapped at another address, in sum.
    pub(super) moved: Bytes,
}

/// Chunks of a card's memory, by slot.
struct Chunks {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    base: sys::CUdeviceptr,
    handles: HashMap<u64, sys::CUmemGenericAllocationHandle>,
}

impl Chunks {
    fn at(&self, slot: u64) -> sys::CUdeviceptr {
        self.base + slot * CHUNK
    }

    /// Maps a chunk, or frees it if that fails.
    fn map(&mut self, handle: sys::CUmemGenericAllocationHandle, slot: u64) -> Result<(), DriverError> {
        // SAFETY: the addresses are reserved, and the arena maps a slot that has no chunk; the handle is alive.
        let mapped = unsafe { sys::cuMemMap(self.at(slot), CHUNK as usize, 0, handle, 0) }.result();
        if mapped.is_err() {
            // SAFETY: the handle is mapped nowhere, and is released once.
            unsafe { sys::cuMemRelease(handle) }.result()?;
        } else {
            self.handles.insert(slot, handle);
        }
        mapped
    }

    fn unmap(&mut self, slot: u64) -> Result<sys::CUmemGenericAllocationHandle, DriverError> {
        self.context.bind_to_thread()?;
        let handle = self
            .handles
            .remove(&slot)
            .ok_or(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE))?;
        // SAFETY: the slot is mapped; the arena has waited for the stream, and nothing is allocated there.
        unsafe { sys::cuMemUnmap(self.at(slot), CHUNK as usize) }.result()?;
        Ok(handle)
    }
}

impl Backing for Chunks {
    type Error = DriverError;

    fn create(&mut self, slot: u64) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        let wanted = region::properties(&self.context);
        let mut handle = 0;
        // SAFETY: both pointers are to data that outlives the call.
        unsafe { sys::cuMemCreate(&raw mut handle, CHUNK as usize, &raw const wanted, 0) }.result()?;
        self.map(handle, slot)
    }

    fn remap(&mut self, from: u64, to: u64) -> Result<(), DriverError> {
        let handle = self.unmap(from)?;
        self.map(handle, to)
    }

    fn release(&mut self, slot: u64) -> Result<(), DriverError> {
        let handle = self.unmap(slot)?;
        // SAFETY: created by `create`, mapped nowhere, and released once.
        unsafe { sys::cuMemRelease(handle) }.result()
    }

    fn open(&mut self, slots: Range<u64>) -> Result<(), DriverError> {
        let access = sys::CUmemAccessDesc {
            location: region::properties(&self.context).location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let length = ((slots.end - slots.start) * CHUNK) as usize;
        // SAFETY: all of these slots are mapped, and the description outlives the call.
        unsafe { sys::cuMemSetAccess(self.at(slots.start), length, &raw const access, 1) }.result()
    }

    fn wait(&mut self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    fn out_of_memory() -> DriverError {
        DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn lacks_memory(error: &DriverError) -> bool {
        pool::is_out_of_memory(*error)
    }
}

/// `cuMemAllocAsync` of the driver API: allocates `bytes` in the order of `stream`.
///
/// # Safety
/// As of the driver's function: `pointer` can be written, and `stream` is alive.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemAllocAsync(
    pointer: *mut sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> sys::CUresult {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    let Some(of_stream) = streams.iter().find(|of| of.stream == stream) else {
        drop(streams);
        let Some(allocate) = DRIVER.allocate else {
            return sys::CUresult::CUDA_ERROR_NOT_FOUND;
        };
        // SAFETY: the caller's promise.
        return unsafe { allocate(pointer, bytes, stream) };
    };
    // The graph would keep the address, and run when the memory belongs to something else.
    if is_capturing(stream) {
        return sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    let allocated = of_stream.arena().allocate(bytes as u64);
    match allocated {
        Ok(offset) => {
            // SAFETY: the caller's promise.
            unsafe { pointer.write(of_stream.addresses.start + offset) };
            sys::CUresult::CUDA_SUCCESS
        }
        Err(error) => error.0,
    }
}

/// Whether what a stream is given becomes a graph, to run later.
fn is_capturing(stream: sys::CUstream) -> bool {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive, and the call writes one number.
    let asked = unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result();
    asked.is_ok() && status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// `cuMemFreeAsync` of the driver API: frees an allocation in the order of `stream`.
///
/// # Safety
/// As of the driver's function: `pointer` was allocated and is freed once, and `stream` is alive.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemFreeAsync(
    pointer: sys::CUdeviceptr,
    stream: sys::CUstream,
) -> sys::CUresult {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    let Some(of_stream) = streams.iter().find(|of| of.addresses.contains(&pointer)) else {
        drop(streams);
        let Some(free) = DRIVER.free else {
            return sys::CUresult::CUDA_ERROR_NOT_FOUND;
        };
        // SAFETY: the caller's promise.
        return unsafe { free(pointer, stream) };
    };
    let freed = of_stream.arena().free(pointer - of_stream.addresses.start);
    if freed {
        sys::CUresult::CUDA_SUCCESS
    } else {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE
    }
}

type Allocate = unsafe extern "C" fn(*mut sys::CUdeviceptr, usize, sys::CUstream) -> sys::CUresult;
type Free = unsafe extern "C" fn(sys::CUdeviceptr, sys::CUstream) -> sys::CUresult;

/// The driver's own functions.
struct Driver {
    allocate: Option<Allocate>,
    free: Option<Free>,
}

static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
    // SAFETY: the symbol has the type that the driver API documents; a null pointer is `None`.
    allocate: unsafe { std::mem::transmute::<*mut c_void, Option<Allocate>>(next(c"cuMemAllocAsync")) },
    // SAFETY: as above.
    free: unsafe { std::mem::transmute::<*mut c_void, Option<Free>>(next(c"cuMemFreeAsync")) },
});

/// Address of a symbol in the libraries after the program; null if there is none.
fn next(symbol: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero, and the call only looks for it.
    unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) }
}
