//! Freed memory of the service process, which is returned to the system. Crate `residency` books the workers' memory.

use std::time::Duration;

use residency::Bytes;

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(5);
/// Bytes freed since the last trim above which the heaps are trimmed again. Small amounts add up, as pages that are partly in
/// use stay with the process.
const TRIM_THRESHOLD: Bytes = Bytes::mib(4);

/// Starts the task that returns freed memory to the system. A picture, a latent or a frame lives for a moment on one of many
/// threads, and the C library keeps what such threads have freed for later threads.
pub(crate) fn start_trimming() {
    gpu::allocator::return_large();
    tokio::spawn(async {
        let mut looks = tokio::time::interval(INTERVAL);
        let mut freed = Bytes::ZERO;
        loop {
            looks.tick().await;
            let most = gpu::allocator::peak_since_mark();
            let live = gpu::allocator::mark();
            tracing::debug!(%live, %most, "memory that the service has allocated");
            freed += most - live;
            if freed > TRIM_THRESHOLD {
                freed = Bytes::ZERO;
                let trimmed = tokio::task::spawn_blocking(gpu::allocator::return_free).await;
                if let Err(panic) = trimmed {
                    tracing::warn!(%panic, "freed memory could not be given back");
                }
            }
        }
    });
}
