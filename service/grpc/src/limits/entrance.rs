//! Places of connections. A connection without a call (or without a call with the token, if there is a token) is a newcomer, in a
//! small pool of its own. So newcomers, however many, take no place of a client that has shown its token.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;
use std::time::Duration;

use calls::{Budget, Client, Exceeded, Taken};
use tokio::time::Instant;

use super::lock;

/// The time that every newcomer has for its first call, whatever the number of newcomers. Connections beyond the places of the
/// pool wait to be accepted.
const FIRST_CALL: Duration = Duration::from_millis(500);

/// An address floods the service when it has one in so many places of the pool. Its connections get no time for a first call, and a new
/// one closes its own oldest.
const FLOOD_PART: usize = 8;
/// An address with fewer connections than this does not flood the service, however small the pool is.
const LEAST_FLOOD: usize = 8;

/// The newcomers, and the places of known clients.
#[derive(Debug)]
pub(crate) struct Entrance {
    known: Arc<Budget>,
    most_newcomers: usize,
    /// In the order of arrival.
    newcomers: Mutex<Vec<Weak<Place>>>,
}

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct Place {
    entrance: Arc<Entrance>,
    client: Client,
    came: Instant,
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

    /// A place for a connection. If the pool of newcomers is full, one of them is closed and its client is returned: among addresses
    /// without known connections, the oldest newcomer of the client that has most.
    ///
    /// # Errors
    /// When every newcomer still has time for its first call: the time at which the first of them will not.
    pub(super) fn enter(
        self: &Arc<Entrance>,
        client: Client,
    ) -> Result<(Arc<Place>, Option<Client>), Instant> {
        let mut newcomers = lock(&self.newcomers);
        let there: Vec<Arc<Place>> = newcomers.iter().filter_map(Weak::upgrade).collect();
        let full = there.len() >= self.most_newcomers;
        let count_of = |client| there.iter().filter(|place| place.client == client).count();
        let floods = |client| count_of(client) >= (self.most_newcomers / FLOOD_PART).max(LEAST_FLOOD);
        let leaves = match full && floods(client) {
            true => there.iter().find(|place| place.client == client),
            false => full.then(|| self.to_leave(&there)).flatten(),
        };
        let begun_at = leaves.filter(|leaves| !floods(leaves.client));
        let begun_at = begun_at.map(|leaves| leaves.came + FIRST_CALL);
        if let Some(ready) = begun_at.filter(|ready| *ready > Instant::now()) {
            return Err(ready);
        }
        let place = Arc::new(Place {
            entrance: self.clone(),
            client,
            came: Instant::now(),
            known: Mutex::default(),
            public_calls: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            waker: Mutex::default(),
        });
        newcomers.retain(|each| each.strong_count() > 0 && leaves.is_none_or(|leaves| !is(each, leaves)));
        newcomers.push(Arc::downgrade(&place));
        drop(newcomers);
        if let Some(leaves) = leaves {
            leaves.close();
        }
        Ok((place, leaves.map(|leaves| leaves.client)))
    }

    /// Which newcomer makes room for another.
    fn to_leave<'a>(&self, there: &'a [Arc<Place>]) -> Option<&'a Arc<Place>> {
        let is_stranger = |place: &&Arc<Place>| !self.known.has(place.client);
        let mut counts: HashMap<Client, usize> = HashMap::new();
        for place in there.iter().filter(is_stranger) {
            *counts.entry(place.client).or_default() += 1;
        }
        let most = counts.values().copied().max();
        let of_the_most = |place: &&Arc<Place>| counts.get(&place.client).copied() == most;
        match most {
            Some(_) => there.iter().find(of_the_most),
            None => there.first(),
        }
    }

    #[cfg(test)]
    pub(super) fn newcomers(&self) -> usize {
        let newcomers = lock(&self.newcomers);
        newcomers.iter().filter(|each| each.strong_count() > 0).count()
    }
}

fn is(weak: &Weak<Place>, place: &Arc<Place>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(place))
}

impl Place {
    pub(super) fn client(&self) -> Client {
        self.client
    }

    /// Turns a newcomer's place into a known client's, for as long as the connection lasts.
    ///
    /// # Errors
    /// When known clients have as many connections as they may.
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

    #[tokio::test(start_paused = true)]
    async fn an_address_that_floods_makes_room_for_others_at_once_and_keeps_nobody_waiting() {
        let entrance = Entrance::new(Budget::new(2, 1), 64);
        let flood: Vec<_> = (0..500)
            .map(|_| {
                entrance
                    .enter(client(9))
                    .expect("its own oldest leaves at once")
                    .0
            })
            .collect();
        assert!(is_closed(&flood[0]) && !is_closed(&flood[499]));
        let mut others = Vec::new();
        for of in 10..20 {
            let (place, left) = entrance.enter(client(of)).expect("nobody waits for it");
            assert_eq!(left, Some(client(9)));
            others.push(place);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn newcomers_make_room_for_each_other_and_take_nothing_from_known_connections() {
        let entrance = Entrance::new(Budget::new(2, 1), 3);
        let enter = async |of: u8| loop {
            match entrance.enter(client(of)) {
                Ok((place, left)) => break (place, left.flatten()),
                Err(ready) => tokio::time::sleep_until(ready).await,
            }
        };
        let (known, _) = enter(1).await;
        known.admit().unwrap();
        let newcomers = [enter(2).await.0, enter(3).await.0, enter(3).await.0];
        let began = Instant::now();
        assert_eq!(entrance.enter(client(4)).err(), Some(began + FIRST_CALL));
        let (other, left) = enter(4).await;
        assert_eq!(left, client(3), "the client with most of them");
        assert_eq!(began.elapsed(), FIRST_CALL, "each had the time for a call");
        let closed = newcomers.each_ref().map(|each| is_closed(each));
        assert_eq!(closed, [false, true, false], "and of that the oldest");
        // Several newcomers may share the address of a known connection: newcomers at other addresses are closed instead.
        let (same, _) = enter(1).await;
        let mut many = Vec::new();
        for of in 10..60 {
            many.push(enter(of).await);
        }
        assert!(is_closed(&other) && !is_closed(&known) && !is_closed(&same));
        let (last, _) = enter(5).await;
        assert_eq!(last.admit(), Ok(()));
        assert_eq!(last.admit(), Ok(()), "it is one already");
        assert_eq!(same.admit(), Err(Exceeded::Client(1)));
        drop(known);
        assert_eq!(same.admit(), Ok(()));
    }
}
