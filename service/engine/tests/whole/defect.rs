//! What can be broken on purpose, and which invariant has to notice. Nothing of this is in the product.

use std::fmt;

/// A defect that the harness wraps around the product.
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

/// What has to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariant {
    /// No picture, and no success, comes of what a worker says that is dead.
    NothingOfTheDeadCounts,
    /// A card that does nothing has nothing leased.
    NoOrphanLease,
    /// Every ledger that is published adds up to the card.
    AccountsAddUp,
    /// A card that does nothing holds what its ledger says, to the byte.
    BooksAreTheCards,
    /// A worker has one order at a time, and no ticket is used twice.
    OneOrderAtATime,
    /// What is pinned stays.
    NothingPinnedLeaves,
    /// Each job that somebody listens to ends once, and no call is left without an answer.
    EveryJobEndsOnce,
    /// Pictures are those that the model paints when nothing fails.
    PicturesAreRight,
    /// After everything is unloaded, the card is as empty as before.
    FreeToTheByte,
    /// When nobody wants anything, the queue keeps nothing.
    TheQueueRests,
    /// When nothing fails any more, every card is ready again.
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

/// An invariant that did not hold: enough to see it again.
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
