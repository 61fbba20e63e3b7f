//! DECIDES. Pure arithmetic over a ledger of one card's memory: no IO, no async, no clock, no tensors.
//!
//! # Contents
//! - [`Ledger`]: double entry. Every byte of the card is in exactly one account, and the driver's figures are
//!   authoritative: moves and leases *book*, [`Ledger::reconcile`] replaces the accounts by the driver's figures.
//! - [`plan()`]: which [`Move`]s make room for a stage ([`Verdict::Run`]), which claim it has to wait for
//!   ([`Verdict::Wait`]), or that the card is too small ([`Verdict::Never`]). Further plans: [`plan_low_memory`] for
//!   requests that accept a shortage, [`make_room`] for other programs, [`should_trim`] for the janitor.
//! - [`ScratchBook`]: learned scratch peaks. [`Wait`]: wait budgets as a state. [`fallbacks`]: alternatives that
//!   would fit. [`predicted_move_seconds`]: the cost by which a stage is placed on one of several cards.
//!
//! # Terms
//! A *component* is loaded, leased, pinned and evicted as one, whole or in a *part*: then the rest of its *blocks* is streamed
//! while a stage runs ([`Parts`]). A *stage* needs components and *scratch* (activation
//! memory). A *lease* belongs to a running stage; a *hold* to a client; a *pin* lasts until unpinned; a *reservation*
//! belongs to another program. *Slack* is reserved by our pools and unused. *Usable* is free and slack, less *headroom*
//! and unused reservations. *Late* bytes were freed by us and are not shown as free by the driver yet. *Foreign* bytes
//! are held by other processes.
//!
//! # One stage, start to end
//! ```
//! use residency::*;
//!
//! let now = Millis(0);
//! let mut ledger = Ledger::new(Bytes::gib(24), Bytes::mib(512));
//! let vae = Component {
//!     id: ComponentId::new("vae@bf16"),
//!     name: "vae".into(),
//!     bytes: Bytes::mib(160),
//!     reload_seconds: 0.02,
//!     parts: Parts::default(),
//! };
//! let need = StageNeed { name: "decode".into(), components: vec![vae], scratch: Bytes::gib(3), headroom: Bytes::ZERO, later: vec![], model: vec![], passes: 1 };
//!
//! let Verdict::Run { moves } = plan(&ledger, &need, Policy::Shared, now) else { panic!("it fits") };
//! for each in moves {
//!     match each {
//!         Move::Load(c, part) => {
//!             ledger.begin_load(&c, part, now)?; // then bytes are copied, then:
//!             ledger.complete_load(&c.id, now)?;
//!         }
//!         Move::Evict(c) => {
//!             ledger.begin_evict(&c.id)?;
//!             ledger.complete_evict(&c.id, now)?;
//!         }
//!         Move::Resize(c, part) => {
//!             ledger.begin_resize(&c, part)?; // then blocks are freed or copied, then:
//!             ledger.complete_resize(&c.id, now)?;
//!         }
//!         Move::Trim => {} // the card does it, and reconciling shows it
//!     }
//! }
//! let lease = ledger.lease(&need, now)?; // the stage runs
//! ledger.release(lease, now)?;
//! assert_eq!(ledger.accounts().sum(), Bytes::gib(24));
//! # Ok::<(), LedgerError>(())
//! ```
//!
//! # Absent by design
//! Clocks (the caller passes the time), randomness, hash-ordered iteration, threads, and any knowledge of families,
//! drivers or clients.
#![deny(unsafe_code)]

mod fallback;
mod host;
mod ledger;
mod nouns;
mod parts;
mod patience;
mod plan;
mod resident;
mod scratch;

pub use fallback::{Alternative, Fallback, Fits, fallbacks, peak_of};
pub use host::{HostMemory, HostShare};
pub use ledger::{
    Accounts, HoldId, LATE_AT_MOST_MS, LeaseId, Ledger, LedgerError, MemorySummary, PinId, ReservationId,
};
pub use nouns::{Bytes, Component, ComponentId, DriverTruth, Holder, Millis, StageNeed};
pub use parts::{Part, PartSize, Parts};
pub use patience::{Patience, Wait};
pub use plan::{
    LowMemory, Move, Policy, Verdict, WaitCause, freed_by, large_from, make_room, part_after, plan,
    plan_low_memory, predicted_move_seconds, should_trim,
};
pub use resident::{HEAT_HALF_LIFE_MS, Resident, ResidentState};
pub use scratch::{KEYS_REMEMBERED, RUNS_REMEMBERED, RunOutcome, ScratchBook, ScratchKey};
