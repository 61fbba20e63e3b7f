//! The ledger: double entry over one card's memory. Every byte is in exactly one account.
//!
//! Two sources feed it. *Bookings* (loads, evictions, leases) move bytes between accounts at once, pessimistically:
//! what is about to be taken counts as taken, what is being given back counts as gone until the driver shows it.
//! *Reconciling* lays the driver's figures under the bookings: claims that the driver does not show yet stay
//! subtracted from what is free, and whatever nobody of ours explains is named `foreign` or `unexplained`.

mod claims;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, ComponentId, DriverTruth, Holder, Millis};
use crate::resident::{Resident, ResidentState};

pub use claims::{Expired, HoldId, ReservationId};
pub use moves::{LeaseId, LedgerError};

/// Bytes given back that the driver has not shown as free after this long are somebody else's by now.
pub const LATE_AT_MOST_MS: u64 = 30_000;

/// All accounts of a card. Their sum is the card, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounts {
    /// Components: loading, resident, being evicted.
    pub components: Bytes,
    /// Activations: booked by leases, or more where the driver shows more.
    pub scratch: Bytes,
    /// Reserved by our pools, used by nothing. Activations may have it at once, components after a trim.
    pub slack: Bytes,
    /// Workspaces of libraries.
    pub workspaces: Bytes,
    /// Fixed costs of the process on the card.
    pub context: Bytes,
    /// Held by others.
    pub foreign: Bytes,
    /// Ours as far as anybody can tell, and no component's: given back but not shown as free yet, or leaked.
    pub unexplained: Bytes,
    /// Free, less what is booked and not visible yet.
    pub free: Bytes,
}

impl Accounts {
    /// The sum of all accounts.
    pub fn sum(&self) -> Bytes {
        let ours = self.components + self.scratch + self.slack + self.workspaces + self.context;
        ours + self.foreign + self.unexplained + self.free
    }
}

/// Double entry over one card. It is a plain value: snapshots of it travel, and plans are made on snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    total: Bytes,
    headroom: Bytes,
    book: Accounts,
    residents: BTreeMap<ComponentId, Resident>,
    leases: BTreeMap<LeaseId, moves::Lease>,
    next_lease: u64,
    pins: BTreeSet<ComponentId>,
    holds: BTreeMap<HoldId, claims::Hold>,
    reservations: BTreeMap<ReservationId, claims::Reservation>,
    /// Foreign bytes that were there before anybody took what was reserved.
    foreign_before_reservations: Bytes,
    /// Freed by us, not shown as free by the driver: part of `book.unexplained`.
    late: Bytes,
    late_since: Option<Millis>,
    /// Bytes that nobody of ours explained when nothing was late: what exceeds them now is late.
    nobodys_before: Bytes,
    holders: Vec<Holder>,
}

impl Ledger {
    /// A ledger over an empty card of `total` bytes, of which `headroom` bytes are never planned into.
    pub fn new(total: Bytes, headroom: Bytes) -> Ledger {
        Ledger {
            total,
            headroom,
            book: Accounts {
                free: total,
                ..Accounts::default()
            },
            residents: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease: 0,
            pins: BTreeSet::new(),
            holds: BTreeMap::new(),
            reservations: BTreeMap::new(),
            foreign_before_reservations: Bytes::ZERO,
            late: Bytes::ZERO,
            late_since: None,
            nobodys_before: Bytes::ZERO,
            holders: Vec::new(),
        }
    }

    /// Lays the driver's figures under the bookings: after every move and every stage.
    ///
    /// Figures that contradict each other (readings taken at different moments) are cut to the size of the card, the
    /// least certain first: what the driver calls free, then slack, workspaces, context, scratch.
    ///
    /// The driver shows activations in one sum. Where stages run side by side, one that needs more than it booked
    /// therefore hides what another has booked and not taken yet; as soon as it shows, the booking follows.
    pub fn reconcile(&mut self, truth: &DriverTruth) {
        if truth.total > Bytes::ZERO {
            self.total = truth.total;
        }
        let mut left = self.total;
        let mut cut = |bytes: Bytes| {
            let part = bytes.min(left);
            left -= part;
            part
        };
        let visible = cut(truth.components);
        let mut book = Accounts {
            scratch: cut(truth.scratch),
            context: cut(truth.context),
            workspaces: cut(truth.workspaces),
            slack: cut(truth.slack),
            free: cut(truth.free),
            ..Accounts::default()
        };
        let rest = left;

        let booked = self.booked();
        let leaked = visible - booked;
        let nobodys = rest + leaked;
        self.late = self.late.min(nobodys - self.nobodys_before);
        if self.late == Bytes::ZERO {
            self.nobodys_before = nobodys;
            self.late_since = None;
        }
        let late_at_the_driver = self.late - leaked;
        book.unexplained = leaked + late_at_the_driver;
        book.foreign = rest - late_at_the_driver;

        book.components = visible - leaked;
        book.claim_components(booked - visible);
        let overrun = book.scratch - self.booked_scratch();
        if let Some(mut newest) = self.leases.last_entry() {
            newest.get_mut().scratch += overrun; // it has shown that it needs more than was booked for it
        }
        book.claim_scratch(self.booked_scratch() - book.scratch);

        self.book = book;
        self.holders = truth.holders.clone();
        self.foreign_before_reservations = self.foreign_before_reservations.min(book.foreign);
    }

    /// All accounts, right now.
    pub fn accounts(&self) -> Accounts {
        self.book
    }

    /// The size of the card.
    pub fn total(&self) -> Bytes {
        self.total
    }

    /// Bytes that are never planned into.
    pub fn headroom(&self) -> Bytes {
        self.headroom
    }

    /// Changes the bytes that are never planned into.
    pub fn set_headroom(&mut self, headroom: Bytes) {
        self.headroom = headroom;
    }

    /// What a plan may use without evicting: free and slack, less headroom, less what is booked and not visible yet,
    /// less reservations that nobody has taken yet.
    pub fn usable(&self) -> Bytes {
        self.within_reach() - self.spoken_for()
    }

    /// Free and slack, before headroom and reservations.
    pub(crate) fn within_reach(&self) -> Bytes {
        self.book.free + self.book.slack
    }

    /// Headroom and reservations not taken yet.
    pub(crate) fn spoken_for(&self) -> Bytes {
        self.headroom + self.untaken()
    }

    /// What a stage can have at best: the card less context, workspaces, headroom and bytes that nothing explains.
    /// Pins are not subtracted, as a stage may need what is pinned.
    pub(crate) fn capacity(&self) -> Bytes {
        let lost = self.book.unexplained - self.late;
        self.total - self.book.context - self.book.workspaces - self.headroom - lost
    }

    /// Bytes that we gave back, components and slack, and that the driver does not show as free yet.
    pub fn late(&self) -> Bytes {
        self.late
    }

    /// Gives up on late bytes: whoever has them now is somebody else. Returns how many there were.
    pub fn write_off_late(&mut self) -> Bytes {
        let late = std::mem::take(&mut self.late);
        self.late_since = None;
        self.book.unexplained -= late;
        self.book.foreign += late;
        self.nobodys_before += late;
        late
    }

    /// Bytes booked for components that exist nowhere on the card: somebody else was faster. The load will fail.
    pub fn overbooked(&self) -> Bytes {
        self.booked() - self.book.components
    }

    /// Everything that has bytes booked, by identity.
    pub fn residents(&self) -> impl Iterator<Item = &Resident> {
        self.residents.values()
    }

    /// One component, if it has bytes booked.
    pub fn resident(&self, id: &ComponentId) -> Option<&Resident> {
        self.residents.get(id)
    }

    /// Whether all of a component is on the card.
    pub fn is_resident(&self, id: &ComponentId) -> bool {
        self.residents
            .get(id)
            .is_some_and(|r| r.state == ResidentState::Resident)
    }

    /// Who holds memory and why it does not come free: others, reservations, and what of ours is busy, pinned or held.
    pub fn holders(&self) -> Vec<Holder> {
        let ours = |name: String, bytes| Holder {
            name,
            pid: None,
            bytes,
        };
        let mut holders = self.holders.clone();
        let named: Bytes = holders.iter().map(|h| h.bytes).sum();
        let nameless = self.book.foreign - named;
        if nameless > Bytes::ZERO {
            holders.push(ours("other processes".into(), nameless));
        }
        let mut untaken = self.untaken();
        for reservation in self.reservations.values() {
            let bytes = reservation.bytes.min(untaken);
            untaken -= bytes;
            if bytes > Bytes::ZERO {
                holders.push(ours(format!("reserved for {}", reservation.label), bytes));
            }
        }
        if self.late > Bytes::ZERO {
            holders.push(ours(
                "freed, not yet shown as free by the driver".into(),
                self.late,
            ));
        }
        for resident in self.residents.values() {
            let why = match resident.state {
                ResidentState::Loading => "loading",
                ResidentState::Evicting => "being evicted",
                ResidentState::Resident if resident.leases > 0 => "in use",
                ResidentState::Resident if resident.pinned => "pinned",
                ResidentState::Resident if resident.held > 0 => "held",
                ResidentState::Resident => continue,
            };
            holders.push(ours(
                format!("{} ({why})", resident.component.name),
                resident.component.bytes,
            ));
        }
        let scratch = self.booked_scratch();
        if scratch > Bytes::ZERO {
            holders.push(ours("activations of running stages".into(), scratch));
        }
        holders
    }

    /// The next moment at which `expire` has something to say.
    pub fn next_deadline(&self) -> Option<Millis> {
        let claims = self
            .holds
            .values()
            .map(|h| h.until)
            .chain(self.reservations.values().map(|r| r.until));
        let keep_alives = self
            .residents
            .values()
            .filter(|r| !r.lapsed)
            .filter_map(|r| r.keep_alive);
        let late = self.late_since.map(|since| since.after(LATE_AT_MOST_MS));
        claims.chain(keep_alives).chain(late).min()
    }

    /// Bytes of all components that are booked, whatever the driver shows.
    pub(crate) fn booked(&self) -> Bytes {
        self.residents.values().map(|r| r.component.bytes).sum()
    }

    /// Scratch of all leases, whatever the driver shows.
    pub(crate) fn booked_scratch(&self) -> Bytes {
        self.leases.values().map(|l| l.scratch).sum()
    }
}

impl Accounts {
    /// Books bytes for components: from what is free, then from slack. Returns what could not be booked.
    fn claim_components(&mut self, bytes: Bytes) -> Bytes {
        let from_free = bytes.min(self.free);
        let from_slack = (bytes - from_free).min(self.slack);
        self.free -= from_free;
        self.slack -= from_slack;
        self.components += from_free + from_slack;
        bytes - from_free - from_slack
    }

    /// Books bytes for activations: from slack, then from what is free. Returns what could not be booked.
    fn claim_scratch(&mut self, bytes: Bytes) -> Bytes {
        let from_slack = bytes.min(self.slack);
        let from_free = (bytes - from_slack).min(self.free);
        self.slack -= from_slack;
        self.free -= from_free;
        self.scratch += from_slack + from_free;
        bytes - from_slack - from_free
    }
}

/// Text that names something a client or another program asked for.
pub(crate) type Name = Arc<str>;
