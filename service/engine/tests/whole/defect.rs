//! Defects that can be injected, and the invariant that has to detect each. None of this is in the product.

use std::fmt;

/// A defect that the harness adds around the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    TheDeadAreHeard,
    TheDeadAreHeardOfLoads,
    LosesALease,
    ForgetsAByte,
    KeepsWhatItUnloads,
    KeepsAFailedLoad,
    OrdersTwice,
    ForgetsPins,
    HangsForEver,
    PaintsSomethingElse,
    EndsTwice,
    AnswersWithoutUnloading,
    LeavesAJobBehind,
    NeverComesBack,
}

/// The invariants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariant {
    /// No picture, and no success, comes from a stale worker.
    NothingOfTheDeadCounts,
    /// An idle card has no leases.
    NoOrphanLease,
    /// Every published ledger sums up to the capacity.
    AccountsAddUp,
    /// An idle card holds exactly the bytes of its ledger.
    BooksAreTheCards,
    /// A worker has one order at a time, and no ticket is reused.
    OneOrderAtATime,
    /// Pinned components are not evicted.
    NothingPinnedLeaves,
    /// Each job with a listener ends once, and every call is answered.
    EveryJobEndsOnce,
    /// Pictures equal those of a run without faults.
    PicturesAreRight,
    /// After everything is unloaded, the card is as empty as before.
    FreeToTheByte,
    /// Without jobs, the queue holds no state.
    TheQueueRests,
    /// After the last fault, every card becomes ready again.
    CardsComeBack,
}

impl Defect {
    pub(crate) fn hears_the_dead(self) -> bool {
        matches!(self, Defect::TheDeadAreHeard | Defect::TheDeadAreHeardOfLoads)
    }

    pub(crate) const ALL: [(Defect, Invariant); 14] = [
        (Defect::TheDeadAreHeard, Invariant::NothingOfTheDeadCounts),
        (Defect::TheDeadAreHeardOfLoads, Invariant::NothingOfTheDeadCounts),
        (Defect::LosesALease, Invariant::NoOrphanLease),
        (Defect::ForgetsAByte, Invariant::AccountsAddUp),
        (Defect::KeepsWhatItUnloads, Invariant::BooksAreTheCards),
        (Defect::KeepsAFailedLoad, Invariant::BooksAreTheCards),
        (Defect::OrdersTwice, Invariant::OneOrderAtATime),
        (Defect::ForgetsPins, Invariant::NothingPinnedLeaves),
        (Defect::HangsForEver, Invariant::EveryJobEndsOnce),
        (Defect::PaintsSomethingElse, Invariant::PicturesAreRight),
        (Defect::EndsTwice, Invariant::EveryJobEndsOnce),
        (Defect::AnswersWithoutUnloading, Invariant::FreeToTheByte),
        (Defect::LeavesAJobBehind, Invariant::TheQueueRests),
        (Defect::NeverComesBack, Invariant::CardsComeBack),
    ];
}

/// A violated invariant, with enough to reproduce it.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    pub(crate) seed: u64,
    pub(crate) what: String,
    pub(crate) schedule: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?} at seed {}: {}", self.invariant, self.seed, self.what)?;
        for line in &self.schedule {
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }
}
