//! Peak of a CUDA device's memory pool.
#![allow(unsafe_code)] // The driver's attributes.

use std::mem::MaybeUninit;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{result, sys};

/// Peak of bytes that `work` allocated on this device.
pub(crate) fn peak_of<R>(device: &Device, work: impl FnOnce() -> R) -> (u64, R) {
    device.synchronize().expect("a device that answers");
    let pool = pool();
    let used = attribute(pool, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    let mut none = 0u64;
    // SAFETY: the pool is the device's own; the attribute is a 64-bit number, and writing 0 resets it.
    unsafe {
        result::mem_pool::set_attribute(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            (&raw mut none).cast(),
        )
    }
    .expect("a pool that can be measured");
    let result = work();
    device.synchronize().expect("a device that answers");
    let peak = attribute(pool, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
    (peak.saturating_sub(used), result)
}

fn pool() -> sys::CUmemoryPool {
    let mut pool = MaybeUninit::uninit();
    // SAFETY: the driver fills in the current pool of device 0, which is the one that the tests opened.
    unsafe {
        sys::cuDeviceGetMemPool(pool.as_mut_ptr(), 0)
            .result()
            .expect("a pool");
        pool.assume_init()
    }
}

fn attribute(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute) -> u64 {
    let mut value = 0u64;
    // SAFETY: the pool is the device's own, and these attributes are numbers of 64 bits.
    unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()) }
        .expect("a pool that can be measured");
    value
}
