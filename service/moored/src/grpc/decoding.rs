//! Threads that decode clients' pictures.

use std::sync::Arc;

use engine::Error;
use tokio::sync::Semaphore;

use crate::threads::on_thread;

/// Most pictures that are decoded at a time: each may take half a GiB meanwhile.
const DECODED_AT_ONCE: usize = 4;

/// Decodes a few pictures at a time, whoever sent them. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Decoding(Arc<Semaphore>);

impl Decoding {
    /// As many at a time as there are processors, and no more than a few.
    pub(crate) fn new() -> Decoding {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        Decoding(Arc::new(Semaphore::new(processors.min(DECODED_AT_ONCE))))
    }

    /// Decodes when it is its turn. A call that is dropped meanwhile keeps its turn to the end of the decoding.
    ///
    /// # Errors
    /// [`Error::Internal`] where it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        decode: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.0.clone().acquire_owned().await;
        let turn = turn.map_err(|closed| Error::Internal(closed.to_string()))?;
        on_thread(move || {
            let decoded = decode();
            drop(turn);
            decoded
        })
        .await
    }

    /// All turns, until the result is dropped: nothing is decoded meanwhile.
    #[cfg(test)]
    pub(super) fn all_turns(&self) -> tokio::sync::OwnedSemaphorePermit {
        let count = self.0.available_permits() as u32;
        self.0.clone().try_acquire_many_owned(count).unwrap()
    }
}
