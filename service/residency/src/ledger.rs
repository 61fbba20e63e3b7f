//! The ledger: double entry over one card's memory. Every byte is in exactly one account.
//!
//! Two sources feed it. *Bookings* (loads, evictions, leases) move bytes between accounts at once, pessimistically:
//! bytes about to be allocated count as allocated, bytes being freed count as gone until the driver shows them as
//! free. *Reconciling* replaces the accounts by the driver's figures: bookings that the driver does not show yet stay
//! subtracted from the free bytes, and bytes that no booking explains become `foreign` or `unexplained`.

mod claims;
mod moves;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::host::HostMemory;
use crate::nouns::{Bytes, Component, ComponentId, DriverTruth, Holder, Millis};
use crate::parts::Part;
use crate::resident::{Resident, ResidentState};

pub(crate) use claims::Claim;
pub use claims::{HoldId, PinId, ReservationId};
pub use moves::{LeaseId, LedgerError};

/// Timeout in milliseconds after which late bytes (freed by us, not shown as free by the driver) are written off as
/// foreign.
pub const LATE_AT_MOST_MS: u64 = 30_000;

/// All accounts of a card. Invariant: their sum is the capacity of the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounts {
    /// Components that are loading, resident or being evicted.
    pub components: Bytes,
    /// Activations: the sum of the leases' bookings, or the driver's figure if it is larger.
    pub scratch: Bytes,
    /// Reserved by our pools and unused. Activations can use it at once, components after a trim.
    pub slack: Bytes,
    /// Workspaces of libraries, and the padding of component pools to the driver's granularity.
    pub workspaces: Bytes,
    /// Fixed cost of the process's context on the card.
    pub context: Bytes,
    /// Held by other processes.
    pub foreign: Bytes,
    /// Bytes in our pools, or freed by us, that belong to no component: late bytes and leaks.
    pub unexplained: Bytes,
    /// Free, less bookings that are not visible in the driver's figures yet.
    pub free: Bytes,
}

/// All accounts of a card at one moment, with their sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySummary {
    /// Capacity of the card: the sum of the accounts.
    pub total: Bytes,
    pub accounts: Accounts,
    /// Bytes that a plan may use without evicting: [`Ledger::usable`].
    pub usable: Bytes,
}

impl Accounts {
    /// The sum of all accounts.
    pub fn sum(&self) -> Bytes {
        let ours = self.components + self.scratch + self.slack + self.workspaces + self.context;
        ours + self.foreign + self.unexplained + self.free
    }
}

/// Double entry over one card. A plain value without interior mutability: it is serialized as a snapshot, and plans
/// are made on snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    total: Bytes,
    headroom: Bytes,
    book: Accounts,
    residents: BTreeMap<ComponentId, Resident>,
    leases: BTreeMap<LeaseId, moves::Lease>,
    next_lease: u64,
    /// Components of each pin, sorted.
    pins: BTreeMap<PinId, Vec<ComponentId>>,
    /// Components of each hold, sorted.
    holds: BTreeMap<HoldId, Vec<ComponentId>>,
    reservations: BTreeMap<ReservationId, claims::Reservation>,
    /// Foreign bytes at the time of the first reservation: growth beyond this counts as use of a reservation.
    foreign_before_reservations: Bytes,
    /// Freed by us and not shown as free by the driver: part of `book.unexplained`.
    late: Bytes,
    late_since: Option<Millis>,
    /// Unattributed bytes (foreign or leaked) when last nothing was late: the excess over this is late.
    unattributed_baseline: Bytes,
    holders: Vec<Holder>,
    host: HostMemory,
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
            pins: BTreeMap::new(),
            holds: BTreeMap::new(),
            reservations: BTreeMap::new(),
            foreign_before_reservations: Bytes::ZERO,
            late: Bytes::ZERO,
            late_since: None,
            unattributed_baseline: Bytes::ZERO,
            holders: Vec::new(),
            host: HostMemory::default(),
        }
    }

    /// Replaces the accounts by the driver's figures, with the bookings on top. Called after every move and every
    /// stage.
    ///
    /// Figures that contradict each other (readings taken at different moments) are truncated to the capacity of the
    /// card, the least certain first: free, then slack, workspaces, context, scratch.
    ///
    /// The driver shows activations as one sum. Where stages run side by side, a stage that exceeds its booking
    /// therefore hides bytes that another has booked and not allocated yet; the booking grows as soon as the excess
    /// is visible.
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
        let unattributed = rest + leaked;
        self.late = self.late.min(unattributed - self.unattributed_baseline);
        if self.late == Bytes::ZERO {
            self.unattributed_baseline = unattributed;
            self.late_since = None;
        }
        let late_at_driver = self.late - leaked;
        book.unexplained = leaked + late_at_driver;
        book.foreign = rest - late_at_driver;

        book.components = visible - leaked;
        book.claim_components(booked - visible);
        let overrun = book.scratch - self.booked_scratch();
        if let Some(mut newest) = self.leases.last_entry() {
            newest.get_mut().scratch += overrun; // a stage has exceeded its booking
        }
        book.claim_scratch(self.booked_scratch() - book.scratch);

        self.book = book;
        self.holders = truth.holders.clone();
        self.foreign_before_reservations = self.foreign_before_reservations.min(book.foreign);
    }

    /// Replaces the record of the machine's memory that the card's components hold.
    pub fn record_host(&mut self, host: HostMemory) {
        self.host = host;
    }

    /// The machine's memory that the card's components hold.
    pub fn host(&self) -> &HostMemory {
        &self.host
    }

    /// All accounts.
    pub fn accounts(&self) -> Accounts {
        self.book
    }

    /// All accounts, for reports.
    pub fn summary(&self) -> MemorySummary {
        MemorySummary {
            total: self.total,
            accounts: self.book,
            usable: self.usable(),
        }
    }

    /// Capacity of the card.
    pub fn total(&self) -> Bytes {
        self.total
    }

    /// Bytes that are never planned into.
    pub fn headroom(&self) -> Bytes {
        self.headroom
    }

    /// Bytes that a plan may use without evicting: free and slack, less headroom, less bookings that are not visible
    /// yet, less unused reservations.
    pub fn usable(&self) -> Bytes {
        self.within_reach() - self.spoken_for()
    }

    /// Free and slack, before headroom and reservations.
    pub(crate) fn within_reach(&self) -> Bytes {
        self.book.free + self.book.slack
    }

    /// Headroom and unused reservations.
    pub(crate) fn spoken_for(&self) -> Bytes {
        self.headroom + self.untaken()
    }

    /// The most that a stage can have: the card less context, workspaces, headroom and leaked bytes. Pins are not
    /// subtracted, as a stage may need pinned components.
    pub fn capacity(&self) -> Bytes {
        let lost = self.book.unexplained - self.late;
        self.total - self.book.context - self.book.workspaces - self.headroom - lost
    }

    /// Bytes freed by us (components and slack) that the driver does not show as free yet.
    pub fn late(&self) -> Bytes {
        self.late
    }

    /// Writes off bytes that have been late for [`LATE_AT_MOST_MS`]: they count as foreign from here on. Returns how many
    /// were written off.
    pub fn write_off_late(&mut self, now: Millis) -> Bytes {
        if self.late == Bytes::ZERO {
            return Bytes::ZERO;
        }
        let since = *self.late_since.get_or_insert(now);
        if now.since(since) < LATE_AT_MOST_MS {
            return Bytes::ZERO;
        }
        let late = std::mem::take(&mut self.late);
        self.late_since = None;
        self.book.unexplained -= late;
        self.book.foreign += late;
        self.unattributed_baseline += late;
        late
    }

    /// All residents, ordered by identity.
    pub fn residents(&self) -> impl Iterator<Item = &Resident> {
        self.residents.values()
    }

    /// A resident by its component's identity, if bytes are booked for it.
    pub fn resident(&self, id: &ComponentId) -> Option<&Resident> {
        self.residents.get(id)
    }

    /// Whether a component is loaded, whole or in a part.
    pub fn is_resident(&self, id: &ComponentId) -> bool {
        self.residents
            .get(id)
            .is_some_and(|r| r.state == ResidentState::Resident)
    }

    /// All components that have bytes booked on the card or hold memory of the machine.
    pub fn on_card_or_host(&self) -> impl Iterator<Item = &Component> {
        let on_card = self.residents.values().map(|r| &r.component);
        let on_host = self.host.components.iter();
        let on_host = on_host.filter(|(id, _)| !self.residents.contains_key(*id));
        on_card.chain(on_host.map(|(_, share)| &share.component))
    }

    /// Whether a component is loaded, and all of it is on the card.
    pub fn is_whole(&self, id: &ComponentId) -> bool {
        self.is_resident(id) && self.residents.get(id).is_some_and(|r| r.part == Part::WHOLE)
    }

    /// Holders of memory that is not evictable, with the reason: other processes, reservations, and our own
    /// components that are busy, pinned or held.
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
                let name = match reservation.label.as_str() {
                    "" => "reserved".to_owned(),
                    label => format!("reserved for {label}"),
                };
                holders.push(ours(name, bytes));
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
                ResidentState::Loading | ResidentState::Resizing => "loading",
                ResidentState::Evicting => "being evicted",
                ResidentState::Resident if resident.leases > 0 => "in use",
                ResidentState::Resident if resident.pinned => "pinned",
                ResidentState::Resident if resident.held > 0 => "held",
                ResidentState::Resident => continue,
            };
            holders.push(ours(
                format!("{} ({why})", resident.component.name),
                resident.bytes(),
            ));
        }
        let scratch = self.booked_scratch();
        if scratch > Bytes::ZERO {
            holders.push(ours("activations of running stages".into(), scratch));
        }
        holders
    }

    /// Bytes of all booked components, visible to the driver or not.
    pub(crate) fn booked(&self) -> Bytes {
        self.residents.values().map(Resident::bytes).sum()
    }

    /// Scratch of all leases, visible to the driver or not.
    pub(crate) fn booked_scratch(&self) -> Bytes {
        self.leases.values().map(|l| l.scratch).sum()
    }
}

impl Accounts {
    /// Books bytes for components: from free, then from slack. Returns the bytes that could not be booked.
    fn claim_components(&mut self, bytes: Bytes) -> Bytes {
        let from_free = bytes.min(self.free);
        let from_slack = (bytes - from_free).min(self.slack);
        self.free -= from_free;
        self.slack -= from_slack;
        self.components += from_free + from_slack;
        bytes - from_free - from_slack
    }

    /// Books bytes for activations: from slack, then from free. Returns the bytes that could not be booked.
    fn claim_scratch(&mut self, bytes: Bytes) -> Bytes {
        let from_slack = bytes.min(self.slack);
        let from_free = (bytes - from_slack).min(self.free);
        self.slack -= from_slack;
        self.free -= from_free;
        self.scratch += from_slack + from_free;
        bytes - from_slack - from_free
    }
}

/// Text of an identifier that a client or another program chose.
pub(crate) type Name = Arc<str>;
