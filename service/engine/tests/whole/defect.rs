//! Defects that can be injected, and the invariant that has to detect each. None of this is in the product.

use std::fmt;

/// A defect that the harness adds around the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    AcceptsStaleAnswers,
    AcceptsStaleLoads,
    LosesALease,
    ForgetsAByte,
    KeepsWhatItUnloads,
    KeepsAFailedLoad,
    OrdersTwice,
    ForgetsPins,
    HangsForEver,
    GeneratesAnotherPicture,
    EndsTwice,
    AnswersWithoutUnloading,
    LeavesAJobBehind,
    NeverComesBack,
    LeavesAPartAlone,
}

/// The invariants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariant {
    /// No picture, and no success, comes from a stale worker.
    NoStaleResultCounts,
    /// An idle card has no leases.
    NoOrphanLease,
    /// Every published ledger sums up to the capacity.
    AccountsAddUp,
    /// An idle card holds exactly the bytes of its ledger.
    LedgerEqualsCard,
    /// A worker has one order at a time, and at most one more that was sent ahead, and no ticket is reused.
    OneOrderAtATime,
    /// Pinned components are not evicted.
    PinnedComponentsStay,
    /// Each job with a listener ends once, and every call is answered.
    EveryJobEndsOnce,
    /// Pictures equal those of a run without faults.
    PicturesEqualReference,
    /// After everything is unloaded, the card is as empty as before.
    UnloadFreesAllBytes,
    /// Without jobs, the queue holds no state.
    IdleQueueHoldsNoState,
    /// A part of a stage on two cards has its counterpart, unless that has completed or this one is ending.
    PartsRunTogether,
    /// After the last fault, every card becomes ready again.
    CardsBecomeReadyAgain,
}

impl Defect {
    pub(crate) fn accepts_stale_answers(self) -> bool {
        matches!(self, Defect::AcceptsStaleAnswers | Defect::AcceptsStaleLoads)
    }

    pub(crate) const ALL: [(Defect, Invariant); 15] = [
        (Defect::AcceptsStaleAnswers, Invariant::NoStaleResultCounts),
        (Defect::AcceptsStaleLoads, Invariant::NoStaleResultCounts),
        (Defect::LosesALease, Invariant::NoOrphanLease),
        (Defect::ForgetsAByte, Invariant::AccountsAddUp),
        (Defect::KeepsWhatItUnloads, Invariant::LedgerEqualsCard),
        (Defect::KeepsAFailedLoad, Invariant::LedgerEqualsCard),
        (Defect::OrdersTwice, Invariant::OneOrderAtATime),
        (Defect::ForgetsPins, Invariant::PinnedComponentsStay),
        (Defect::HangsForEver, Invariant::EveryJobEndsOnce),
        (Defect::GeneratesAnotherPicture, Invariant::PicturesEqualReference),
        (Defect::EndsTwice, Invariant::EveryJobEndsOnce),
        (Defect::AnswersWithoutUnloading, Invariant::UnloadFreesAllBytes),
        (Defect::LeavesAJobBehind, Invariant::IdleQueueHoldsNoState),
        (Defect::NeverComesBack, Invariant::CardsBecomeReadyAgain),
        (Defect::LeavesAPartAlone, Invariant::PartsRunTogether),
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
