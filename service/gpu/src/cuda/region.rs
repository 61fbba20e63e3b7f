//! Device memory of a component that can be on the card in part: a range of addresses in which pieces are backed by memory one by
//! one. Each piece is given back to the driver on its own, and addresses of the others do not change.
//!
//! Reference: virtual memory management of the CUDA driver API (`cuMemCreate`, `cuMemMap`).

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};
use residency::Bytes;

/// A range of addresses of a card, parts of which are backed by memory.
#[derive(Debug)]
pub(super) struct Region {
    context: Arc<CudaContext>,
    base: sys::CUdeviceptr,
    length: u64,
    granule: u64,
    /// Memory and bytes of each piece, by its offset.
    pieces: BTreeMap<u64, (sys::CUmemGenericAllocationHandle, u64)>,
}

impl Region {
    /// Reserves addresses for pieces of these lengths, one after the other, and returns the offset of each. No memory is allocated.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        lengths: &[u64],
    ) -> Result<(Region, Vec<u64>), DriverError> {
        context.bind_to_thread()?;
        let wanted = properties(context);
        let mut granule = 0_usize;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to data that outlives the call.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const wanted, least) }.result()?;
        let granule = (granule as u64).max(1);
        let mut length = 0;
        let offset = |bytes: &u64| {
            let offset = length;
            length += bytes.next_multiple_of(granule);
            offset
        };
        let offsets = lengths.iter().map(offset).collect();
        let length = length.max(granule);
        let mut base = 0;
        // SAFETY: `base` outlives the call; the addresses are of the driver's choice.
        unsafe { sys::cuMemAddressReserve(&raw mut base, length as usize, 0, 0, 0) }.result()?;
        let region = Region {
            context: Arc::clone(context),
            base,
            length,
            granule,
            pieces: BTreeMap::new(),
        };
        Ok((region, offsets))
    }

    /// Address of an offset.
    pub(super) fn at(&self, offset: u64) -> sys::CUdeviceptr {
        self.base + offset
    }

    /// Bytes of memory that it has.
    pub(super) fn allocated(&self) -> Bytes {
        Bytes(self.pieces.values().map(|(_, bytes)| bytes).sum())
    }

    /// Backs a piece of `bytes` bytes at an offset of [`Region::new`] by memory; does nothing if it is.
    pub(super) fn allocate(&mut self, offset: u64, bytes: u64) -> Result<(), DriverError> {
        if bytes == 0 || self.pieces.contains_key(&offset) {
            return Ok(());
        }
        self.context.bind_to_thread()?;
        let bytes = bytes.next_multiple_of(self.granule);
        let wanted = properties(&self.context);
        let mut handle = 0;
        // SAFETY: both pointers are to data that outlives the call.
        unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const wanted, 0) }.result()?;
        let address = self.base + offset;
        // SAFETY: the addresses are reserved by `new` and not mapped; the memory was created just now.
        let mapped = unsafe { sys::cuMemMap(address, bytes as usize, 0, handle, 0) }.result();
        let access = sys::CUmemAccessDesc {
            location: wanted.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped just now, and the description outlives the call.
        let open = || unsafe { sys::cuMemSetAccess(address, bytes as usize, &raw const access, 1) }.result();
        if let Err(error) = mapped.and_then(|()| open()) {
            // SAFETY: a range that is not mapped is only an error; the handle is released once.
            unsafe {
                let _ = sys::cuMemUnmap(address, bytes as usize);
                let _ = sys::cuMemRelease(handle);
            }
            return Err(error);
        }
        self.pieces.insert(offset, (handle, bytes));
        Ok(())
    }

    /// Gives the memory of a piece back. No work that uses it may be under way.
    pub(super) fn free(&mut self, offset: u64) -> Result<(), DriverError> {
        let Some((handle, bytes)) = self.pieces.remove(&offset) else {
            return Ok(());
        };
        self.context.bind_to_thread()?;
        // SAFETY: mapped by `allocate`, and unmapped once; the caller promises that nothing uses it.
        unsafe { sys::cuMemUnmap(self.base + offset, bytes as usize) }.result()?;
        // SAFETY: created by `allocate`, and released once.
        unsafe { sys::cuMemRelease(handle) }.result()
    }

    /// Gives all memory and the addresses back. No work that uses it may be under way.
    pub(super) fn close(mut self) -> Result<(), DriverError> {
        let offsets: Vec<u64> = self.pieces.keys().copied().collect();
        for offset in offsets {
            self.free(offset)?;
        }
        // SAFETY: reserved by `new`, nothing is mapped in it, and it is freed once: `close` takes the region.
        unsafe { sys::cuMemAddressFree(self.base, self.length as usize) }.result()
    }
}

/// Memory of a context's card.
pub(super) fn properties(context: &CudaContext) -> sys::CUmemAllocationProp {
    // SAFETY: plain data, for which zero means default.
    let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = context.cu_device();
    wanted
}
