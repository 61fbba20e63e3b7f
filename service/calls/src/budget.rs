//! A bounded quantity, with one bound for each client and one for all together.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use access::Holder;
use engine::queue::{Exceeded as OfAccounts, SharedBound};
use residency::Bytes;

/// By what a client is counted: a name can be changed at will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// Where no tokens are asked for.
    Address(IpAddr),
    /// The number of its token's holder, from whichever address it calls.
    Token(u128),
}

impl From<IpAddr> for Who {
    fn from(address: IpAddr) -> Who {
        Who::Address(address)
    }
}

/// A client. `None`: a transport without addresses, and no token.
pub type Client = Option<Who>;

/// The part of an IPv6 address that identifies a client: a network usually assigns a whole /64 to one host.
const NETWORK_OF_IPV6: u128 = !(u64::MAX as u128);

/// The client at an address.
pub fn client_at(address: SocketAddr) -> Client {
    Some(network_of(address).into())
}

/// The client with a token.
pub fn client_with(holder: &Holder) -> Client {
    Some(Who::Token(holder.number()))
}

/// An address as its owner is told apart from others.
pub(crate) fn network_of(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V6(ip) if !ip.is_loopback() => {
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & NETWORK_OF_IPV6))
        }
        ip => ip,
    }
}

/// Two bounds, and the amounts in use.
#[derive(Debug)]
pub struct Budget {
    bound: SharedBound,
    taken: Mutex<AllTaken>,
}

#[derive(Debug, Default)]
struct AllTaken {
    sum: u64,
    /// Amounts by client. There are no entries of 0.
    clients: HashMap<Client, u64>,
}

/// A bound that would be exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// The bound of one client.
    Client(u64),
    /// The bound of all clients together.
    All(u64),
}

impl Exceeded {
    /// The error text for people: the bounded resource, a remedy for the client, and the setting of the bound.
    pub fn words(self, bounded: &str, remedy: &str, setting: &str) -> String {
        match self {
            Exceeded::Client(bound) => {
                let bound = Bytes(bound);
                format!(
                    "{bounded} of this client take more than {bound} in all: {remedy}, or raise {setting}_per_client"
                )
            }
            Exceeded::All(bound) => {
                let bound = Bytes(bound);
                format!(
                    "{bounded} of all clients take more than {bound} in all: try again later, or raise {setting}"
                )
            }
        }
    }
}

impl Budget {
    pub fn new(bound: u64, bound_per_client: u64) -> Arc<Budget> {
        Budget::of(SharedBound::keeping_nothing(bound, bound_per_client))
    }

    /// As [`Budget::new`], with the last eighth kept for clients that use nothing.
    pub fn with_places_kept(bound: u64, bound_per_client: u64) -> Arc<Budget> {
        Budget::of(SharedBound::of(bound, bound_per_client))
    }

    fn of(bound: SharedBound) -> Arc<Budget> {
        Arc::new(Budget {
            bound,
            taken: Mutex::default(),
        })
    }

    /// Takes an amount for a client; dropping the result returns it.
    pub fn take(self: &Arc<Budget>, client: Client, amount: u64) -> Result<Taken, Exceeded> {
        let mut taken = self.nothing(client);
        taken.grow(amount)?;
        Ok(taken)
    }

    /// A charge of 0, which may grow.
    pub fn nothing(self: &Arc<Budget>, client: Client) -> Taken {
        Taken {
            budget: self.clone(),
            client,
            amount: 0,
        }
    }

    /// Whether a client uses anything of it.
    pub fn has(&self, client: Client) -> bool {
        self.lock().clients.contains_key(&client)
    }

    /// The amount of all clients together.
    pub fn taken(&self) -> u64 {
        self.lock().sum
    }

    /// A panic while it is locked leaves the two sums at most one change apart.
    fn lock(&self) -> MutexGuard<'_, AllTaken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client's charge, which is returned when this is dropped.
#[derive(Debug)]
pub struct Taken {
    budget: Arc<Budget>,
    client: Client,
    amount: u64,
}

impl Taken {
    /// Takes more. Where a bound would be exceeded, it takes nothing and returns the error.
    pub fn grow(&mut self, more: u64) -> Result<(), Exceeded> {
        let mut all = self.budget.lock();
        let own = all.clients.get(&self.client).copied().unwrap_or(0);
        let bound = self.budget.bound;
        if let Err(exceeded) = bound.check(all.sum, own, more) {
            let is_beyond_its_own = own.saturating_add(more) > bound.of_account();
            return Err(match exceeded {
                OfAccounts::All if is_beyond_its_own => Exceeded::Client(bound.of_account()),
                OfAccounts::Account => Exceeded::Client(bound.of_account()),
                OfAccounts::All | OfAccounts::Kept => Exceeded::All(bound.all),
            });
        }
        if more > 0 {
            all.sum += more;
            all.clients.insert(self.client, own + more);
        }
        self.amount += more;
        Ok(())
    }

    /// Sets the charge to this amount: takes more or returns some.
    pub fn set(&mut self, amount: u64) -> Result<(), Exceeded> {
        match self.amount.checked_sub(amount) {
            None => self.grow(amount - self.amount),
            Some(less) => {
                self.give_back(less);
                Ok(())
            }
        }
    }

    /// Takes more if the charge is less than this.
    pub fn at_least(&mut self, amount: u64) -> Result<(), Exceeded> {
        self.grow(amount.saturating_sub(self.amount))
    }

    fn give_back(&mut self, amount: u64) {
        let mut all = self.budget.lock();
        all.sum = all.sum.saturating_sub(amount);
        let left = all
            .clients
            .get(&self.client)
            .map_or(0, |own| own.saturating_sub(amount));
        if left == 0 {
            all.clients.remove(&self.client);
        } else {
            all.clients.insert(self.client, left);
        }
        self.amount -= amount;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.give_back(self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_places_are_for_clients_that_have_none() {
        let budget = Budget::with_places_kept(16, 15);
        let client = |last: u8| Some(IpAddr::from([10, 0, 0, last]).into());
        let mut greedy = budget.take(client(1), 14).unwrap();
        assert_eq!(greedy.grow(1), Err(Exceeded::All(16)));
        let mut other = budget.take(client(2), 1).unwrap();
        assert_eq!(other.grow(1), Err(Exceeded::All(16)));
        let last = budget.take(client(3), 1);
        assert!(last.is_ok());
        assert!(budget.take(client(4), 1).is_err());
    }

    #[test]
    fn a_client_of_ipv6_has_the_whole_of_its_64() {
        let client = |address: &str| client_at(address.parse().unwrap());
        assert_eq!(client("[2001:db8::1]:1"), client("[2001:db8::ffff:1:2]:3"));
        assert_ne!(client("[2001:db8::1]:1"), client("[2001:db8:0:1::1]:1"));
        assert_eq!(client("[::ffff:10.0.0.1]:1"), client("10.0.0.1:2"));
        assert_ne!(client("10.0.0.1:2"), client("10.0.0.2:2"));
        assert_eq!(client("[::1]:5"), Some(IpAddr::V6(Ipv6Addr::LOCALHOST).into()));
    }

    #[test]
    fn both_bounds_hold_and_dropped_amounts_are_returned() {
        let budget = Budget::new(10, 6);
        let client = |last: u8| Some(IpAddr::from([10, 0, 0, last]).into());
        let mut first = budget.take(client(1), 4).unwrap();
        assert_eq!(first.grow(3), Err(Exceeded::Client(6)));
        assert_eq!(first.grow(2), Ok(()));
        let second = budget.take(client(2), 4).unwrap();
        assert_eq!(budget.take(client(3), 1).unwrap_err(), Exceeded::All(10));
        assert_eq!(first.set(3), Ok(()));
        assert_eq!((budget.taken(), first.set(7)), (7, Err(Exceeded::Client(6))));
        drop(first);
        let again = budget.take(client(1), 6).unwrap();
        drop((second, again));
        assert_eq!(budget.taken(), 0);
        assert!(
            budget.lock().clients.is_empty(),
            "clients that left are remembered"
        );
    }
}
