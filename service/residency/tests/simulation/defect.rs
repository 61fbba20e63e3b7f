//! Defects that can be injected, and the invariant that has to detect each. None of this is in the product.

/// A defect that the harness adds around the product.
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
    PlannerForgetsHoles,
    PlannerJoinsNothing,
    PlannerRefusesForLeases,
}

/// Invariants that have to hold on every turn.
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
    RefusalsAreForGood,
}

impl Defect {
    pub(crate) const ALL: [(Defect, Invariant); 18] = [
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
        (Defect::PlannerForgetsHoles, Invariant::PlansSuffice),
        (Defect::PlannerJoinsNothing, Invariant::WhatFitsIsPlanned),
        (Defect::PlannerRefusesForLeases, Invariant::RefusalsAreForGood),
    ];
}

/// A violated invariant, with enough to reproduce it.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    pub(crate) seed: u64,
    pub(crate) turn: u64,
    pub(crate) what: String,
}
