//! Places of connections. One that has made no call yet (none with the token, where there is one) is a newcomer's, in a small
//! pool of its own: however many newcomers there are, they take no place of a client that has shown its token.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::budget::{Budget, Client, Exceeded, Taken};

/// The newcomers, and the places of those that are known.
#[derive(Debug)]
pub(in crate::grpc) struct Entrance {
    known: Arc<Budget>,
    most_newcomers: usize,
    /// In the order in which they came.
    newcomers: Mutex<Vec<Weak<Place>>>,
}

/// The place of one connection.
#[derive(Debug)]
pub(in crate::grpc) struct Place {
    entrance: Arc<Entrance>,
    client: Client,
    /// Taken by its first call that counts.
    known: Mutex<Option<Taken>>,
    /// Calls without a token that are open.
    public_calls: AtomicU64,
    is_closed: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Entrance {
    pub(super) fn new(known: Arc<Budget>, most_newcomers: usize) -> Arc<Entrance> {
        Arc::new(Entrance {
            known,
            most_newcomers: most_newcomers.max(1),
            newcomers: Mutex::default(),
        })
    }

    /// A place for a connection. Where there are as many newcomers as there may be, the oldest of the client that has most of them
    /// is closed, and its client is returned.
    pub(super) fn enter(self: &Arc<Entrance>, client: Client) -> (Arc<Place>, Option<Client>) {
        let place = Arc::new(Place {
            entrance: self.clone(),
            client,
            known: Mutex::default(),
            public_calls: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            waker: Mutex::default(),
        });
        let mut newcomers = lock(&self.newcomers);
        let there: Vec<Arc<Place>> = newcomers.iter().filter_map(Weak::upgrade).collect();
        let full = there.len() >= self.most_newcomers;
        let leaves = full.then(|| oldest_of_the_most(&there)).flatten();
        newcomers.retain(|each| each.strong_count() > 0 && leaves.is_none_or(|leaves| !is(each, leaves)));
        newcomers.push(Arc::downgrade(&place));
        drop(newcomers);
        if let Some(leaves) = leaves {
            leaves.close();
        }
        (place, leaves.map(|leaves| leaves.client))
    }

    #[cfg(test)]
    pub(super) fn newcomers(&self) -> usize {
        let newcomers = lock(&self.newcomers);
        newcomers.iter().filter(|each| each.strong_count() > 0).count()
    }
}

/// The first place of the client that has most of them.
fn oldest_of_the_most(places: &[Arc<Place>]) -> Option<&Arc<Place>> {
    let mut counts: std::collections::HashMap<Client, usize> = std::collections::HashMap::new();
    for place in places {
        *counts.entry(place.client).or_default() += 1;
    }
    let most = counts.values().copied().max()?;
    places
        .iter()
        .find(|place| counts.get(&place.client) == Some(&most))
}

fn is(weak: &Weak<Place>, place: &Arc<Place>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(place))
}

impl Place {
    pub(super) fn client(&self) -> Client {
        self.client
    }

    /// Makes a newcomer's place one of a known client, which it stays.
    ///
    /// # Errors
    /// When these have as many connections as they may.
    pub(super) fn admit(self: &Arc<Place>) -> Result<(), Exceeded> {
        let mut known = lock(&self.known);
        if known.is_none() {
            *known = Some(self.entrance.known.take(self.client, 1)?);
            lock(&self.entrance.newcomers).retain(|each| !is(each, self));
        }
        Ok(())
    }

    pub(super) fn is_known(&self) -> bool {
        lock(&self.known).is_some()
    }

    /// Counts a call without a token until the result is dropped: a connection is in use meanwhile.
    pub(super) fn public_call(self: &Arc<Place>) -> PublicCall {
        self.public_calls.fetch_add(1, Ordering::Relaxed);
        PublicCall(self.clone())
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.public_calls.load(Ordering::Relaxed) > 0
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the connection must end; else the task is woken when it must.
    pub(super) fn poll_closed(&self, waker: &Waker) -> bool {
        let mut own = lock(&self.waker);
        if !own.as_ref().is_some_and(|own| own.will_wake(waker)) {
            *own = Some(waker.clone());
        }
        drop(own);
        self.is_closed.load(Ordering::Acquire)
    }
}

/// A call without a token.
#[derive(Debug)]
pub(super) struct PublicCall(Arc<Place>);

impl Drop for PublicCall {
    fn drop(&mut self) {
        self.0.public_calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A panic while it is locked leaves the value valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn client(last: u8) -> Client {
        Some(IpAddr::from([127, 0, 0, last]))
    }

    fn is_closed(place: &Place) -> bool {
        place.poll_closed(Waker::noop())
    }

    #[test]
    fn newcomers_make_room_for_each_other_and_take_nothing_from_known_connections() {
        let entrance = Entrance::new(Budget::new(2, 1), 3);
        let (known, _) = entrance.enter(client(1));
        known.admit().unwrap();
        let newcomers: Vec<_> = [2, 3, 3].map(|of| entrance.enter(client(of)).0).into();
        let (other, left) = entrance.enter(client(4));
        assert_eq!(left, Some(client(3)), "the client with most of them");
        let closed: Vec<bool> = newcomers.iter().map(|each| is_closed(each)).collect();
        assert_eq!(closed, [false, true, false], "and of that the oldest");
        // Each with an address of its own: the oldest leaves, and whoever comes last has time for a call.
        let many: Vec<_> = (10..200).map(|of| entrance.enter(client(of)).0).collect();
        assert!(is_closed(&other) && !is_closed(&known));
        assert_eq!(entrance.newcomers(), 3);
        let (last, _) = entrance.enter(client(5));
        assert_eq!(last.admit(), Ok(()));
        assert_eq!(last.admit(), Ok(()), "it is one already");
        let (more, _) = entrance.enter(client(1));
        assert_eq!(more.admit(), Err(Exceeded::Client(1)));
        drop((many, known));
        assert_eq!(more.admit(), Ok(()));
    }
}
