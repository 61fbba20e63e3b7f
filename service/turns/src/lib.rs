//! BLOCKS. Turns of work on threads that may block: a bounded number at a time, of which one owner has only its share. Work that has
//! begun keeps its turn until it ends, even if its caller has left: a disk that does not answer holds so many threads and no more.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;

/// Owners whose shares are kept before those without work are dropped.
const REMEMBERED: usize = 256;

/// Turns at a time, of all owners and of each. Cheap to clone.
#[derive(Debug)]
pub struct Turns<Owner> {
    all: Arc<Semaphore>,
    share: usize,
    owners: Arc<Mutex<HashMap<Owner, Arc<Semaphore>>>>,
}

impl<Owner> Clone for Turns<Owner> {
    fn clone(&self) -> Turns<Owner> {
        Turns {
            all: self.all.clone(),
            share: self.share,
            owners: self.owners.clone(),
        }
    }
}

/// A thread for some work.
#[derive(Debug)]
pub struct Turn {
    _own: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl<Owner: Eq + Hash> Turns<Owner> {
    /// `count` turns at a time, of which one owner has at most `share`.
    pub fn new(count: usize, share: usize) -> Turns<Owner> {
        Turns {
            all: Arc::new(Semaphore::new(count)),
            share,
            owners: Arc::default(),
        }
    }

    /// A turn, when there is one.
    pub async fn next(&self) -> Turn {
        Turn {
            _own: None,
            _of_all: permit(self.all.clone()).await,
        }
    }

    /// A turn of an owner, when it has one. An owner's turns are one after another, so that it does not keep others from theirs.
    pub async fn next_of(&self, owner: Owner) -> Turn {
        // The owner's own share first, so that work that waits for it takes no turn from others.
        let own = permit(self.share_of(owner)).await;
        Turn {
            _own: own,
            ..self.next().await
        }
    }

    fn share_of(&self, owner: Owner) -> Arc<Semaphore> {
        // A panic while it is locked leaves the map valid.
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if owners.len() >= REMEMBERED {
            owners.retain(|_, share| Arc::strong_count(share) > 1);
        }
        let share = owners
            .entry(owner)
            .or_insert_with(|| Arc::new(Semaphore::new(self.share)));
        share.clone()
    }

    /// All turns that are free now.
    pub fn all_free(&self) -> Vec<Turn> {
        let permits = std::iter::from_fn(|| self.all.clone().try_acquire_owned().ok());
        let turn = |permit| Turn {
            _own: None,
            _of_all: Some(permit),
        };
        permits.map(turn).collect()
    }

    /// How many turns are free.
    pub fn free(&self) -> usize {
        self.all.available_permits()
    }
}

/// A permit; the semaphores are never closed.
async fn permit(semaphore: Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    semaphore.acquire_owned().await.ok()
}

impl Turn {
    /// Runs work on a thread that may block. The turn lasts until the work has ended, also where the caller has gone.
    ///
    /// # Errors
    /// When the work panics.
    pub async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let done = tokio::task::spawn_blocking(move || {
            let _until_done = self;
            work()
        });
        done.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn owners_without_work_are_forgotten() {
        let turns = Turns::new(2, 1);
        for number in 0..2 * REMEMBERED {
            turns.next_of(number).await.run(|| ()).await.unwrap();
        }
        assert!(turns.owners.lock().unwrap().len() <= REMEMBERED);
        assert_eq!(turns.free(), 2);
    }

    #[tokio::test]
    async fn an_owner_leaves_turns_to_others_and_a_panic_gives_its_turn_back() {
        let turns = Turns::new(3, 2);
        let own = [turns.next_of("a").await, turns.next_of("a").await];
        assert_eq!(turns.next_of("b").await.run(|| 7).await.unwrap(), 7);
        let mut third = std::pin::pin!(turns.next_of("a"));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(third.as_mut().poll(&mut context).is_pending());
        drop(own);
        drop(third.await);
        let broken = turns.next_of("a").await;
        let broken: Result<(), _> = broken.run(|| std::panic::resume_unwind(Box::new("broken"))).await;
        assert!(broken.is_err());
        assert_eq!(turns.free(), 3);
    }
}
