//! Work on threads that may block.

use engine::Error;

/// Runs work on a thread that may block. Once begun, it goes on to its end, also where nobody waits for it any more.
///
/// # Errors
/// [`Error::Internal`] where it panics.
pub(crate) async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|panic| Error::Internal(panic.to_string()))
}
