//! Fair shares: each client's virtual time is the card time that its jobs took, divided by their weights. The client
//! with the least virtual time is next.

use std::collections::BTreeMap;

use crate::job::Priority;

/// A warm job may start before a cold one whose client has had this much less card time at the most.
pub(super) const AFFINITY_WINDOW_MS: f64 = 10_000.0;

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

/// Virtual times of clients that have jobs, or that recently had more than their share.
#[derive(Default)]
pub(super) struct Shares {
    clients: BTreeMap<String, Share>,
    /// Least virtual time of clients with jobs; it does not decrease while there are any. A new client starts there.
    floor: f64,
}

#[derive(Default)]
struct Share {
    virtual_ms: f64,
    jobs: u32,
}

impl Shares {
    /// A client has one more job. Its virtual time rises to the floor: idle time is not credited.
    pub(super) fn arrive(&mut self, client: &str) {
        let floor = self.floor;
        let share = self.clients.entry(client.to_owned()).or_default();
        if share.jobs == 0 {
            share.virtual_ms = share.virtual_ms.max(floor);
        }
        share.jobs += 1;
    }

    /// A client has one job less. It is remembered as long as it is ahead of its share.
    pub(super) fn leave(&mut self, client: &str) {
        if let Some(share) = self.clients.get_mut(client) {
            share.jobs = share.jobs.saturating_sub(1);
        }
        self.settle();
    }

    /// Charges a client for card time of a job.
    pub(super) fn charge(&mut self, client: &str, priority: Priority, card_ms: f64) {
        if let Some(share) = self.clients.get_mut(client) {
            share.virtual_ms += card_ms / priority.weight();
        }
        self.settle();
    }

    pub(super) fn virtual_ms(&self, client: &str) -> f64 {
        self.clients
            .get(client)
            .map_or(self.floor, |share| share.virtual_ms)
    }

    pub(super) fn len(&self) -> usize {
        self.clients.len()
    }

    fn settle(&mut self) {
        let active = self.clients.values().filter(|share| share.jobs > 0);
        match active.map(|share| share.virtual_ms).min_by(f64::total_cmp) {
            Some(least) => {
                self.floor = self.floor.max(least);
                let floor = self.floor;
                self.clients
                    .retain(|_, share| share.jobs > 0 || share.virtual_ms > floor);
            }
            None => *self = Shares::default(), // no client has a job: all virtual times start again
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_or_returning_client_starts_at_the_least_virtual_time() {
        let mut shares = Shares::default();
        shares.arrive("a");
        shares.charge("a", Priority::Normal, 1000.0);
        shares.arrive("b");
        assert_eq!(shares.virtual_ms("b"), 1000.0);
        shares.leave("b");
        shares.charge("a", Priority::Normal, 1000.0);
        shares.arrive("b");
        assert_eq!(shares.virtual_ms("b"), 2000.0);
    }

    #[test]
    fn a_client_that_returns_keeps_its_virtual_time_while_others_wait() {
        let mut shares = Shares::default();
        shares.arrive("a");
        shares.arrive("b");
        shares.charge("a", Priority::Normal, 5000.0);
        shares.leave("a");
        shares.arrive("a");
        assert_eq!((shares.virtual_ms("a"), shares.virtual_ms("b")), (5000.0, 0.0));
        shares.leave("a");
        shares.leave("b");
        assert_eq!(shares.len(), 0);
    }

    #[test]
    fn a_high_priority_is_charged_a_quarter_of_the_card_time() {
        let mut shares = Shares::default();
        shares.arrive("a");
        shares.arrive("b");
        shares.charge("a", Priority::High, 400.0);
        shares.charge("b", Priority::Low, 400.0);
        assert_eq!((shares.virtual_ms("a"), shares.virtual_ms("b")), (100.0, 1600.0));
    }
}
