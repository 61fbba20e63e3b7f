//! Memory of a card that the process of another card writes into, while both compute parts of one stage.
//!
//! Reference: interprocess communication of the CUDA driver API (`cuIpcGetMemHandle`, `cuIpcOpenMemHandle`).

use std::ffi::c_char;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};

use super::activations::Outside;

/// What the driver allocates at a time.
const GRANULE: u64 = 2 << 20;

/// Bytes by which another process opens shared memory.
pub const SHARED_HANDLE_BYTES: usize = 64;

/// Memory of a card that another process can open. It counts among the activations of its stream.
#[derive(Debug)]
pub struct SharedMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    _counted: Outside,
}

impl SharedMemory {
    /// The bytes that the card gives for memory of `bytes` bytes.
    pub fn allocated(bytes: u64) -> u64 {
        bytes.next_multiple_of(GRANULE)
    }

    /// Memory of `bytes` bytes, all zero, for work on this stream.
    ///
    /// # Errors
    /// Errors of the driver, a lack of memory among them.
    pub fn new(stream: &CudaStream, bytes: u64) -> Result<SharedMemory, DriverError> {
        let context = Arc::clone(stream.context());
        context.bind_to_thread()?;
        let bytes = SharedMemory::allocated(bytes);
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) }.result()?;
        let memory = SharedMemory {
            context,
            address,
            _counted: Outside::count(stream, bytes),
        };
        // SAFETY: the memory was allocated just now, with this length; the call returns when it is written.
        unsafe { sys::cuMemsetD8_v2(address, 0, bytes as usize) }.result()?;
        // SAFETY: no pointer is passed.
        unsafe { sys::cuCtxSynchronize() }.result()?;
        Ok(memory)
    }

    /// Its address on this card.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes by which another process opens it.
    ///
    /// # Errors
    /// Errors of the driver: some systems allow none.
    pub fn handle(&self) -> Result<[u8; SHARED_HANDLE_BYTES], DriverError> {
        self.context.bind_to_thread()?;
        let mut handle = sys::CUipcMemHandle {
            reserved: [0; SHARED_HANDLE_BYTES],
        };
        // SAFETY: the handle outlives the call, and the address is that of an allocation.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) }.result()?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let bound = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, and freed once. The driver waits for this process's work on it.
        let freed = bound.and_then(|()| unsafe { sys::cuMemFree_v2(self.address) }.result());
        if let Err(error) = freed {
            tracing::error!(%error, "memory that was shared with another card cannot be freed");
        }
    }
}

/// Memory of another card, opened by the process of this one.
#[derive(Debug)]
pub struct OpenedMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
}

impl OpenedMemory {
    /// Opens the memory that another process shares under this handle, for writing from this card.
    ///
    /// # Errors
    /// Errors of the driver: cards that do not reach each other among them.
    pub fn open(stream: &CudaStream, handle: [u8; SHARED_HANDLE_BYTES]) -> Result<OpenedMemory, DriverError> {
        let context = Arc::clone(stream.context());
        context.bind_to_thread()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| byte as c_char),
        };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` outlives the call; a handle that is none is an error.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }.result()?;
        Ok(OpenedMemory { context, address })
    }

    /// Its address, as this card reaches it.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        let bound = self.context.bind_to_thread();
        // SAFETY: opened by `open`, and closed once. The driver waits for this process's work on it.
        let closed = bound.and_then(|()| unsafe { sys::cuIpcCloseMemHandle(self.address) }.result());
        if let Err(error) = closed {
            tracing::warn!(%error, "memory of another card cannot be closed");
        }
    }
}

/// A number in the machine's memory that a card reads and writes too, zero at first.
#[derive(Debug)]
pub struct SharedNumber {
    context: Arc<CudaContext>,
    here: *mut u32,
    there: sys::CUdeviceptr,
}

impl SharedNumber {
    /// A number for kernels of this context.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(context: &Arc<CudaContext>) -> Result<SharedNumber, DriverError> {
        context.bind_to_thread()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut here = std::ptr::null_mut();
        // SAFETY: `here` outlives the call.
        unsafe { sys::cuMemHostAlloc(&raw mut here, size_of::<u32>(), flags) }.result()?;
        let mut number = SharedNumber {
            context: Arc::clone(context),
            here: here.cast(),
            there: 0,
        };
        number.set(0);
        // SAFETY: the pointers are to data that outlives the call, and to the allocation.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut number.there, here, 0) }.result()?;
        Ok(number)
    }

    /// Its address for kernels.
    pub fn address(&self) -> u64 {
        self.there
    }

    /// What it is now.
    pub fn get(&self) -> u32 {
        // SAFETY: the allocation lives as long as this, and the card writes whole numbers.
        unsafe { self.here.read_volatile() }
    }

    /// Makes it another one.
    pub fn set(&self, number: u32) {
        // SAFETY: as above.
        unsafe { self.here.write_volatile(number) };
    }
}

impl Drop for SharedNumber {
    fn drop(&mut self) {
        let bound = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, and freed once. The driver waits for work on it.
        let freed = bound.and_then(|()| unsafe { sys::cuMemFreeHost(self.here.cast()) }.result());
        if let Err(error) = freed {
            tracing::warn!(%error, "a number that was shared with a card cannot be freed");
        }
    }
}
