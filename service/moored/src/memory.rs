//! The service's own memory: what was used goes back to the system. Of the worker's, residency decides.

use std::time::Duration;

use residency::Bytes;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(5);
/// More than this was freed since the last look: it is worth the walk through the heaps.
const WORTH_A_TRIM: Bytes = Bytes::mib(16);

/// From now on memory that was freed is given back. A picture, a latent or a frame lives for a moment on one of many threads, and the
/// C library keeps what such threads have freed for the threads to come.
pub(crate) fn give_back() {
    gpu::allocator::return_large();
    tokio::spawn(async {
        let mut looks = tokio::time::interval(INTERVAL);
        loop {
            looks.tick().await;
            let most = gpu::allocator::peak_since_mark();
            let live = gpu::allocator::mark();
            if most > live + WORTH_A_TRIM {
                let trimmed = tokio::task::spawn_blocking(gpu::allocator::return_free).await;
                if let Err(panic) = trimmed {
                    tracing::warn!(%panic, "freed memory could not be given back");
                }
            }
        }
    });
}
