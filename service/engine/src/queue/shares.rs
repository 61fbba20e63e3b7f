//! Fair shares: accounts first, then the clients of each account by the names that they give themselves. A name can be changed at
//! will, so a new name has a part of its account's share alone. The virtual time of either is the card time that its jobs took, divided
//! by their weights; who has least is next.

use std::collections::BTreeMap;

use crate::job::{JobOptions, Priority};

/// A warm job may start before a cold one whose account or client has had this much less card time at the most.
pub(super) const AFFINITY_WINDOW_MS: f64 = 10_000.0;

/// Most accounts, and clients of an account, that are remembered without a job.
const MOST_REMEMBERED: usize = 1_000;

impl Priority {
    /// The divisor of the card time that is charged to the client.
    pub(super) fn weight(self) -> f64 {
        match self {
            Priority::Low => 0.25,
            Priority::Normal => 1.0,
            Priority::High => 4.0,
        }
    }
}

/// Virtual times of accounts and their clients.
#[derive(Default)]
pub(super) struct Shares {
    accounts: Level,
    clients: BTreeMap<String, Level>,
}

/// Virtual times of those that have jobs, or that recently had more than their share.
#[derive(Default)]
struct Level {
    members: BTreeMap<String, Share>,
    /// Least virtual time of members with jobs; it does not decrease while there are any. A new member starts there.
    floor: f64,
}

#[derive(Default)]
struct Share {
    virtual_ms: f64,
    jobs: u32,
}

impl Shares {
    /// A client has one more job. Virtual times rise to the floor: idle time is not credited.
    pub(super) fn arrive(&mut self, of: &JobOptions) {
        self.accounts.arrive(&of.account);
        let clients = self.clients.entry(of.account.clone()).or_default();
        clients.arrive(&of.client);
    }

    /// A client has one job less. It is remembered as long as it is ahead of its share.
    pub(super) fn leave(&mut self, of: &JobOptions) {
        self.accounts.leave(&of.account);
        if let Some(clients) = self.clients.get_mut(&of.account) {
            clients.leave(&of.client);
            if clients.members.is_empty() {
                self.clients.remove(&of.account);
            }
        }
    }

    /// Charges an account and its client for card time of a job.
    pub(super) fn charge(&mut self, of: &JobOptions, card_ms: f64) {
        let virtual_ms = card_ms / of.priority.weight();
        self.accounts.charge(&of.account, virtual_ms);
        if let Some(clients) = self.clients.get_mut(&of.account) {
            clients.charge(&of.client, virtual_ms);
        }
    }

    pub(super) fn of_account(&self, account: &str) -> f64 {
        self.accounts.virtual_ms(account)
    }

    /// The virtual time of a client among those of its account.
    pub(super) fn of_client(&self, account: &str, client: &str) -> f64 {
        let clients = self.clients.get(account);
        clients.map_or(0.0, |clients| clients.virtual_ms(client))
    }

    pub(super) fn len(&self) -> usize {
        self.accounts.members.len() + self.clients.len()
    }
}

impl Level {
    fn arrive(&mut self, name: &str) {
        let floor = self.floor;
        let share = self.members.entry(name.to_owned()).or_default();
        if share.jobs == 0 {
            share.virtual_ms = share.virtual_ms.max(floor);
        }
        share.jobs += 1;
    }

    fn leave(&mut self, name: &str) {
        if let Some(share) = self.members.get_mut(name) {
            share.jobs = share.jobs.saturating_sub(1);
        }
        self.settle();
    }

    fn charge(&mut self, name: &str, virtual_ms: f64) {
        if let Some(share) = self.members.get_mut(name) {
            share.virtual_ms += virtual_ms;
        }
        self.settle();
    }

    fn virtual_ms(&self, name: &str) -> f64 {
        self.members
            .get(name)
            .map_or(self.floor, |share| share.virtual_ms)
    }

    /// Bounds the members without jobs: a client may send any number of names. Those that are least ahead are forgotten.
    fn forget_some(&mut self) {
        let idle = self.members.iter().filter(|(_, share)| share.jobs == 0);
        let mut idle: Vec<(f64, String)> = idle
            .map(|(name, share)| (share.virtual_ms, name.clone()))
            .collect();
        let Some(too_many) = idle.len().checked_sub(MOST_REMEMBERED).filter(|more| *more > 0) else {
            return;
        };
        idle.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, name) in idle.into_iter().take(too_many) {
            self.members.remove(&name);
        }
    }

    fn settle(&mut self) {
        let active = self.members.values().filter(|share| share.jobs > 0);
        match active.map(|share| share.virtual_ms).min_by(f64::total_cmp) {
            Some(least) => {
                self.floor = self.floor.max(least);
                let floor = self.floor;
                self.members
                    .retain(|_, share| share.jobs > 0 || share.virtual_ms > floor);
                self.forget_some();
            }
            None => *self = Level::default(), // nobody has a job: all virtual times start again
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(account: &str, client: &str, priority: Priority) -> JobOptions {
        JobOptions {
            client: client.to_owned(),
            account: account.to_owned(),
            priority,
            ..JobOptions::default()
        }
    }

    fn named(client: &str) -> JobOptions {
        of("", client, Priority::Normal)
    }

    fn ms(shares: &Shares, client: &str) -> f64 {
        shares.of_client("", client)
    }

    #[test]
    fn a_new_or_returning_client_starts_at_the_least_virtual_time() {
        let mut shares = Shares::default();
        shares.arrive(&named("a"));
        shares.charge(&named("a"), 1000.0);
        shares.arrive(&named("b"));
        assert_eq!(ms(&shares, "b"), 1000.0);
        shares.leave(&named("b"));
        shares.charge(&named("a"), 1000.0);
        shares.arrive(&named("b"));
        assert_eq!(ms(&shares, "b"), 2000.0);
    }

    #[test]
    fn a_client_that_returns_keeps_its_virtual_time_while_others_wait() {
        let mut shares = Shares::default();
        shares.arrive(&named("a"));
        shares.arrive(&named("b"));
        shares.charge(&named("a"), 5000.0);
        shares.leave(&named("a"));
        shares.arrive(&named("a"));
        assert_eq!((ms(&shares, "a"), ms(&shares, "b")), (5000.0, 0.0));
        shares.leave(&named("a"));
        shares.leave(&named("b"));
        assert_eq!(shares.len(), 0);
    }

    #[test]
    fn a_high_priority_is_charged_a_quarter_of_the_card_time() {
        let mut shares = Shares::default();
        let (high, low) = (of("", "a", Priority::High), of("", "b", Priority::Low));
        shares.arrive(&high);
        shares.arrive(&low);
        shares.charge(&high, 400.0);
        shares.charge(&low, 400.0);
        assert_eq!((ms(&shares, "a"), ms(&shares, "b")), (100.0, 1600.0));
    }

    #[test]
    fn names_without_jobs_are_remembered_in_bounded_number() {
        let mut shares = Shares::default();
        shares.arrive(&named("waits"));
        for number in 0..3 * MOST_REMEMBERED {
            let client = named(&format!("name {number}"));
            shares.arrive(&client);
            shares.charge(&client, 1.0 + number as f64);
            shares.leave(&client);
        }
        assert_eq!(shares.clients[""].members.len(), MOST_REMEMBERED + 1);
        assert!(
            ms(&shares, "name 2999") > ms(&shares, "name 1"),
            "who is most ahead is remembered"
        );
    }

    #[test]
    fn a_new_name_starts_without_card_time_and_its_account_does_not() {
        let mut shares = Shares::default();
        let account = |account: &str, client: &str| of(account, client, Priority::Normal);
        shares.arrive(&account("x", "first"));
        shares.arrive(&account("y", "only"));
        shares.charge(&account("x", "first"), 3000.0);
        shares.leave(&account("x", "first"));
        shares.arrive(&account("x", "second"));
        assert_eq!(shares.of_client("x", "second"), 0.0);
        assert_eq!((shares.of_account("x"), shares.of_account("y")), (3000.0, 0.0));
        shares.leave(&account("x", "second"));
        shares.leave(&account("y", "only"));
        assert_eq!(shares.len(), 0);
    }
}
