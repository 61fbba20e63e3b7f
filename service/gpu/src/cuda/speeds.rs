//! How fast a card is: copies of pinned memory and products of matrices, timed for some milliseconds when the card is opened.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use cudarc::driver::{CudaStream, DriverError, result};
use residency::Bytes;

use super::activations::Activations;
use super::pool;
use super::staging::Staging;
use crate::card::CardSpeeds;

/// Bytes that are copied in a measurement, at most: 2 ms at 16 GB/s.
const COPIED: usize = 32 << 20;
/// Measurements of the link, of which the fastest counts: an idle link is slow at first.
const MEASUREMENTS: usize = 3;
/// No further measurement of the link begins after this time.
const LINK_LIMIT: Duration = Duration::from_millis(25);

/// Side of the matrices that are multiplied: large enough to keep every multiprocessor busy.
const SIDE: usize = 4096;
/// Time for the products that are timed. A first one that takes longer is the only one.
const PRODUCTS_LIMIT: Duration = Duration::from_millis(20);

/// Measures the speeds of a card. What cannot be measured is unknown: an error that matters recurs where it does.
pub(super) fn measure(
    staging: &Staging,
    activations: &Activations,
    (device, dtype): (&Device, DType),
    stream: &CudaStream,
) -> CardSpeeds {
    let link = link(staging, stream).unwrap_or_else(|error| {
        tracing::debug!(%error, "the speed of the link cannot be measured");
        None
    });
    let flops = products(device, dtype, stream).unwrap_or_else(|error| {
        tracing::debug!(%error, "the speed of products cannot be measured");
        None
    });
    if let Err(error) = activations.trim(Bytes::ZERO) {
        tracing::debug!(%error, "the memory of the measurement stays with the pool");
    }
    CardSpeeds { link, flops }
}

/// Bytes a second of copies from pinned memory.
fn link(staging: &Staging, stream: &CudaStream) -> Result<Option<Bytes>, DriverError> {
    let chunk = staging.chunk();
    // SAFETY: it is written before it is read, which nothing does.
    let to = unsafe { result::malloc_async(stream.cu_stream(), chunk) }?;
    let measured = fastest_copies(staging, to, stream);
    let done = stream.synchronize();
    // SAFETY: allocated above, and all copies to it are over, or the stream is lost.
    let freed = unsafe { pool::free(to, stream) };
    let fastest = measured?;
    done.and(freed)?;
    Ok(fastest.map(|speed| Bytes(speed as u64)))
}

fn fastest_copies(
    staging: &Staging,
    to: cudarc::driver::sys::CUdeviceptr,
    stream: &CudaStream,
) -> Result<Option<f64>, DriverError> {
    let (chunk, all) = (staging.chunk(), Instant::now());
    let mut fastest: Option<f64> = None;
    for _ in 0..MEASUREMENTS {
        stream.synchronize()?;
        let (began, mut copied) = (Instant::now(), 0);
        for buffer in staging.pinned().take((COPIED / chunk).max(1)) {
            // SAFETY: the allocation has the bytes of a chunk, as each buffer has; both outlive the copy, which is waited for.
            unsafe { buffer.copy_to(0..chunk, to, stream) }?;
            copied += chunk;
        }
        stream.synchronize()?;
        let speed = copied as f64 / began.elapsed().as_secs_f64().max(1e-9);
        fastest = Some(fastest.map_or(speed, |known| known.max(speed)));
        if all.elapsed() > LINK_LIMIT {
            break;
        }
    }
    Ok(fastest)
}

/// Floating-point operations a second of products in a dtype. Uses no kernel of the tensor library, which the driver would have to
/// compile.
fn products(device: &Device, dtype: DType, stream: &CudaStream) -> candle_core::Result<Option<u64>> {
    let wait = || stream.synchronize().map_err(candle_core::Error::wrap);
    let zeros = Tensor::zeros((SIDE, SIDE), dtype, device)?;
    // What the library loads for a first product is no part of the time, but where that one is slow all the same.
    let timed = |count: u32| -> candle_core::Result<Duration> {
        wait()?;
        let began = Instant::now();
        for _ in 0..count {
            zeros.matmul(&zeros)?;
        }
        wait()?;
        Ok(began.elapsed() / count)
    };
    let first = timed(1)?;
    let each = match PRODUCTS_LIMIT.as_nanos() / first.as_nanos().max(1) {
        0 => first,
        count => timed(count.min(8) as u32)?,
    };
    let operations = 2.0 * (SIDE as f64).powi(3);
    Ok(Some((operations / each.as_secs_f64().max(1e-9)) as u64))
}
