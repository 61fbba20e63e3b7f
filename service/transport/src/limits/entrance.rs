//! Places of connections. A connection without a call (or without a call with the token, if there is a token) is a newcomer, in a
//! small pool of its own. So newcomers, however many, take no place of a client that has shown its token.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use calls::{Budget, Client, Exceeded, Taken};

use super::lock;

/// So many newcomers of an address that has known connections do not count when a place is needed.
const ALLOWED_OF_KNOWN: usize = 8;

/// The newcomers, and the places of known clients.
#[derive(Debug)]
pub(crate) struct Entrance {
    known: Arc<Budget>,
    /// Known connections by address, without a bound of their own: their number is `known`'s.
    addresses: Arc<Budget>,
    most_newcomers: usize,
    /// In the order of arrival.
    newcomers: Mutex<Vec<Weak<Place>>>,
}

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct Place {
    entrance: Arc<Entrance>,
    client: Client,
    /// Taken by its first call that counts: of the client, and of its address.
    known: Mutex<Option<[Taken; 2]>>,
    /// Calls without a token that are open.
    public_calls: AtomicU64,
    is_closed: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Entrance {
    pub(super) fn new(known: Arc<Budget>, most_newcomers: usize) -> Arc<Entrance> {
        Arc::new(Entrance {
            known,
            addresses: Budget::new(u64::MAX, u64::MAX),
            most_newcomers: most_newcomers.max(1),
            newcomers: Mutex::default(),
        })
    }

    /// A place for a connection. If the pool of newcomers is full, one of them is closed and its client is returned: the oldest of the
    /// client that has most. A connection never waits for one of another address, so nobody is kept out by the number of others.
    pub(super) fn enter(self: &Arc<Entrance>, client: Client) -> (Arc<Place>, Option<Client>) {
        let mut newcomers = lock(&self.newcomers);
        let there: Vec<Arc<Place>> = newcomers.iter().filter_map(Weak::upgrade).collect();
        let is_full = there.len() >= self.most_newcomers;
        let leaves = is_full.then(|| self.to_leave(&there, client)).flatten();
        let place = Arc::new(Place {
            entrance: self.clone(),
            client,
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
        (place, leaves.map(|leaves| leaves.client))
    }

    /// Which newcomer makes room for one of this client.
    fn to_leave<'a>(&self, there: &'a [Arc<Place>], coming: Client) -> Option<&'a Arc<Place>> {
        let mut counts = HashMap::from([(coming, 1_usize)]);
        for place in there {
            *counts.entry(place.client).or_default() += 1;
        }
        for (client, count) in &mut counts {
            if self.addresses.has(*client) {
                *count = count.saturating_sub(ALLOWED_OF_KNOWN);
            }
        }
        let count = |place: &&Arc<Place>| counts.get(&place.client).copied();
        let most = there.iter().filter_map(|place| count(&place)).max();
        there.iter().find(|place| count(place) == most)
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

    /// Turns a newcomer's place into a known client's, for as long as the connection lasts. Clients with tokens are told apart by these,
    /// also where all of them come from the address of one proxy.
    ///
    /// # Errors
    /// When known clients have as many connections as they may.
    pub(super) fn admit(self: &Arc<Place>, client: Client) -> Result<(), Exceeded> {
        let mut known = lock(&self.known);
        if known.is_none() {
            let (known_clients, addresses) = (&self.entrance.known, &self.entrance.addresses);
            *known = Some([known_clients.take(client, 1)?, addresses.take(self.client, 1)?]);
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

    use calls::Who;

    use super::*;

    fn client(last: u8) -> Client {
        Some(IpAddr::from([127, 0, 0, last]).into())
    }

    fn is_closed(place: &Place) -> bool {
        place.poll_closed(Waker::noop())
    }

    #[test]
    fn an_address_that_floods_makes_room_for_others() {
        let entrance = Entrance::new(Budget::new(2, 1), 64);
        let flood: Vec<_> = (0..500).map(|_| entrance.enter(client(9)).0).collect();
        assert!(is_closed(&flood[0]) && !is_closed(&flood[499]));
        let mut others = Vec::new();
        for of in 10..20 {
            let (place, left) = entrance.enter(client(of));
            assert_eq!(left, Some(client(9)));
            others.push(place);
        }
        assert!(others.iter().all(|other| !is_closed(other)));
    }

    #[test]
    fn an_address_with_a_known_connection_floods_nobody_either() {
        let entrance = Entrance::new(Budget::new(2, 1), 64);
        let (known, _) = entrance.enter(client(1));
        known.admit(client(1)).unwrap();
        let (other, _) = entrance.enter(client(2));
        let flood: Vec<_> = (0..500).map(|_| entrance.enter(client(1)).0).collect();
        assert!(!is_closed(&other) && !is_closed(&known) && is_closed(&flood[0]));
    }

    #[test]
    fn newcomers_make_room_for_each_other_and_take_nothing_from_known_connections() {
        let entrance = Entrance::new(Budget::new(2, 1), 3);
        let enter = |of: u8| {
            let (place, left) = entrance.enter(client(of));
            (place, left.flatten())
        };
        let (known, _) = enter(1);
        known.admit(client(1)).unwrap();
        let newcomers = [enter(2).0, enter(3).0, enter(3).0];
        let (other, left) = enter(4);
        assert_eq!(left, client(3), "the client with most of them");
        let closed = newcomers.each_ref().map(|each| is_closed(each));
        assert_eq!(closed, [false, true, false], "and of that the oldest");
        // Several newcomers may share the address of a known connection: newcomers at other addresses are closed instead.
        let (same, _) = enter(1);
        let mut many = Vec::new();
        for of in 10..60 {
            many.push(enter(of));
        }
        assert!(is_closed(&other) && !is_closed(&known) && !is_closed(&same));
        let (last, _) = enter(5);
        assert_eq!(last.admit(client(5)), Ok(()));
        assert_eq!(last.admit(client(5)), Ok(()), "it is one already");
        assert_eq!(same.admit(client(1)), Err(Exceeded::Client(1)));
        drop(known);
        assert_eq!(same.admit(client(1)), Ok(()));
    }

    #[test]
    fn connections_of_a_token_are_counted_together_and_apart_from_others_of_its_address() {
        let entrance = Entrance::new(Budget::new(9, 1), 9);
        let (alice, bob) = (Some(Who::Token(1)), Some(Who::Token(2)));
        let at = |of: u8| entrance.enter(client(of)).0;
        let (first, second, other, elsewhere) = (at(1), at(1), at(1), at(2));
        assert_eq!(first.admit(alice), Ok(()));
        assert_eq!(second.admit(alice), Err(Exceeded::Client(1)));
        assert_eq!(
            elsewhere.admit(alice),
            Err(Exceeded::Client(1)),
            "from another address too"
        );
        assert_eq!(other.admit(bob), Ok(()), "behind the same proxy");
    }
}
