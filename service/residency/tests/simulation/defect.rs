//! What can be broken on purpose, and which invariant has to notice. Nothing of this is in the product.

/// A defect that the harness wraps around the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    PlannerEvictsLeased,
    PlannerEvictsPinned,
    PlannerEvictsHeld,
    LedgerForgetsAByte,
    LedgerForgetsAnEviction,
    LeaseBooksNoScratch,
    QueueIdles,
    QueueStopsAtTheFirst,
    QueueIgnoresTheBound,
    StartsWithoutAComponent,
    LosesALease,
    KeepsAComponentAtRest,
    EstimatesOnlyGrow,
    PlannerWaitsForNothing,
    PlannerForgetsToTrim,
}

/// What has to hold on every turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariant {
    BytesAreConserved,
    NothingLeasedIsEvicted,
    NothingPinnedIsEvicted,
    NothingHeldIsPlannedAway,
    NoCardIdles,
    StagesHaveTheirComponents,
    AdmittedStagesFit,
    OvertakingIsBounded,
    NoOrphanLease,
    RestIsEmpty,
    RanOnceRunsAgain,
    WhatFitsIsPlanned,
    PlansSuffice,
}

impl Defect {
    pub(crate) const ALL: [(Defect, Invariant); 15] = [
        (Defect::PlannerEvictsLeased, Invariant::NothingLeasedIsEvicted),
        (Defect::PlannerEvictsPinned, Invariant::NothingPinnedIsEvicted),
        (Defect::PlannerEvictsHeld, Invariant::NothingHeldIsPlannedAway),
        (Defect::LedgerForgetsAByte, Invariant::BytesAreConserved),
        (Defect::LedgerForgetsAnEviction, Invariant::BytesAreConserved),
        (Defect::LeaseBooksNoScratch, Invariant::AdmittedStagesFit),
        (Defect::QueueIdles, Invariant::NoCardIdles),
        (Defect::QueueStopsAtTheFirst, Invariant::NoCardIdles),
        (Defect::QueueIgnoresTheBound, Invariant::OvertakingIsBounded),
        (
            Defect::StartsWithoutAComponent,
            Invariant::StagesHaveTheirComponents,
        ),
        (Defect::LosesALease, Invariant::NoOrphanLease),
        (Defect::KeepsAComponentAtRest, Invariant::RestIsEmpty),
        (Defect::EstimatesOnlyGrow, Invariant::RanOnceRunsAgain),
        (Defect::PlannerWaitsForNothing, Invariant::WhatFitsIsPlanned),
        (Defect::PlannerForgetsToTrim, Invariant::PlansSuffice),
    ];
}

/// An invariant that did not hold: enough to see it again.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    pub(crate) seed: u64,
    pub(crate) turn: u64,
    pub(crate) what: String,
}
