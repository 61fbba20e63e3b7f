//! Work on threads that may block. All work of a call takes a turn of a bounded pool, in which one client has only its share. Work
//! does not begin when its caller has gone, and long work checks at intervals whether it is cancelled.

use std::sync::LazyLock;

use engine::Error;
use media::{CancelToken, Cancelled};
use turns::Turn;

use crate::budget::Client;
use crate::errors::internal;

/// Most pictures and tracks that are decoded at a time.
const DECODED_AT_ONCE: usize = 4;
/// Most threads that wait for files of the machine at a time: a folder that does not answer holds these and no others.
const READING: usize = 64;

/// Results that are encoded for clients.
pub(crate) static ENCODING: LazyLock<Turns> = LazyLock::new(|| Turns::new(processors()));
/// Plans and headers: short computations.
pub(crate) static PLANNING: LazyLock<Turns> = LazyLock::new(|| Turns::new(processors()));
/// Scans of folders for models and adapters.
pub(crate) static FILES: LazyLock<Turns> = LazyLock::new(|| Turns::new(READING));

/// Processors of this machine, and two at least: work of one client leaves a turn for another's.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).max(2)
}

/// Whose share of the turns some work takes: a kind of work of a client by its address.
pub(crate) type Owner = (&'static str, Client);

/// Turns of work on threads, with owners. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Turns(turns::Turns<Owner>);

impl Turns {
    /// `count` turns at a time, of which one owner has at most half.
    pub(crate) fn new(count: usize) -> Turns {
        Turns(turns::Turns::new(count, (count / 2).max(1)))
    }

    /// The turns of decoding: one per processor, but at most `DECODED_AT_ONCE`, since each may take half a GiB meanwhile.
    pub(crate) fn of_decoding() -> Turns {
        Turns::new(processors().min(DECODED_AT_ONCE))
    }

    /// As [`Turns::run_of`], without an owner.
    ///
    /// # Errors
    /// [`Error::Internal`] where it panics.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        run_in_turn(self.0.next().await, |_| work()).await
    }

    /// Runs work when it is its turn. An owner's turns are one after another, so that it does not keep others from theirs.
    /// Dropping the future cancels work that waits, and signals work that runs.
    ///
    /// # Errors
    /// [`Error::Internal`] where it panics.
    pub(crate) async fn run_of<T: Send + 'static>(
        &self,
        owner: Owner,
        work: impl FnOnce(&CancelToken) -> T + Send + 'static,
    ) -> Result<T, Error> {
        run_in_turn(self.0.next_of(owner).await, work).await
    }

    /// All turns, until the result is dropped: nothing is begun meanwhile.
    #[cfg(test)]
    pub(crate) fn all_turns(&self) -> Vec<Turn> {
        self.0.all_free()
    }
}

async fn run_in_turn<T: Send + 'static>(
    turn: Turn,
    work: impl FnOnce(&CancelToken) -> T + Send + 'static,
) -> Result<T, Error> {
    let (cancel, cancel_on_drop) = CancelToken::new();
    let done = turn.run(move || cancel.check().map(|()| work(&cancel)));
    // Kept while this waits.
    let done = done.await.map_err(internal)?;
    drop(cancel_on_drop);
    done.map_err(|Cancelled| Error::Internal("work that is cancelled".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::{Arc, mpsc};

    use super::*;
    use crate::budget::client_at;

    const ONE: Owner = ("tracks", None);
    const OTHER: Owner = ("pictures", None);

    #[tokio::test]
    async fn long_work_ends_when_its_caller_goes_and_waiting_work_never_begins() {
        let turns = Turns::new(2);
        let (began, has_begun) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        let long = |number: usize| {
            let (turns, began, ended) = (turns.clone(), began.clone(), ended.clone());
            tokio::spawn(async move {
                let work = move |cancel: &CancelToken| {
                    let _ = began.send(number);
                    while cancel.check().is_ok() {
                        std::thread::yield_now();
                    }
                    let _ = ended.send(number);
                };
                turns.run_of(ONE, work).await
            })
        };
        let callers: Vec<_> = (0..50).map(long).collect();
        // One turn is left for others, however many wait.
        assert_eq!(turns.run_of(OTHER, |_| 7).await, Ok(7));
        let first = loop {
            match has_begun.try_recv() {
                Ok(first) => break first,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        for caller in callers.into_iter().rev() {
            caller.abort();
            assert!(caller.await.is_err(), "it has no result");
        }
        assert_eq!(turns.run_of(ONE, |_| 8).await, Ok(8));
        assert_eq!(has_ended.iter().next(), Some(first));
        assert!(has_begun.try_recv().is_err(), "no other one has begun");
    }

    #[tokio::test]
    async fn large_pictures_of_one_client_do_not_hold_up_the_small_one_of_another() {
        const SIDE: u32 = 4096;
        const MANY: usize = 8;
        let client = |last: u8| ("pictures", client_at(format!("10.0.0.{last}:1").parse().unwrap()));
        let picture = |side: u32| {
            let grey = vec![7; 3 * (side * side) as usize];
            bytes::Bytes::from(media::pictures::png(side, side, &grey, None).unwrap())
        };
        let (large, small) = (picture(SIDE), picture(16));
        let turns = Turns::of_decoding();
        let share = (processors().min(DECODED_AT_ONCE) / 2).max(1);
        let begun = Arc::new(AtomicUsize::new(0));
        let many = (0..MANY).map(|_| {
            let (turns, begun, large) = (turns.clone(), begun.clone(), large.clone());
            tokio::spawn(async move {
                let decode = move |cancel: &CancelToken| {
                    begun.fetch_add(1, Relaxed);
                    media::pictures::decode(&large, None, cancel).map(|pixels| pixels.rgb.len())
                };
                turns.run_of(client(1), decode).await
            })
        });
        let many: Vec<_> = many.collect();
        while begun.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        let before = begun.load(Relaxed);
        let turn = turns.0.next_of(client(2)).await;
        // Counted when it has its turn: its thread may begin later.
        let turns_before = begun.load(Relaxed) - before;
        let decode = move |cancel: &CancelToken| {
            media::pictures::decode(&small, None, cancel).map(|pixels| pixels.rgb.len())
        };
        let decoded = run_in_turn(turn, decode).await.unwrap();
        assert_eq!(decoded.ok(), Some(3 * 16 * 16));
        assert!(
            turns_before <= share,
            "{turns_before} of {MANY} large ones were before it"
        );
        for large in many {
            let decoded = large.await.unwrap().unwrap();
            assert_eq!(decoded.ok(), Some(3 * (SIDE * SIDE) as usize));
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_gives_the_turn_back() {
        let turns = Turns::new(1);
        let broken = turns.run(|| std::panic::resume_unwind(Box::new("broken"))).await;
        assert!(matches!(broken, Err::<(), _>(Error::Internal(_))));
        assert_eq!(turns.run(|| 1).await, Ok(1));
    }
}
