use residency::{
    Alternative, Bytes, Component, DriverTruth, Fallback, Fits, Ledger, Millis, Policy, ReservationId,
    fallbacks, peak_of,
};

use crate::given::{card_with, component, stage, truth};

fn alternative(
    label: &str,
    fidelity: u32,
    components: &[&Component],
    scratch_gib: u64,
) -> Alternative<String> {
    let small = stage(&[], Bytes::gib(1));
    let stages = vec![small.clone(), stage(components, Bytes::gib(scratch_gib)), small];
    Alternative {
        change: label.into(),
        fidelity,
        stages,
    }
}

fn offered(ledger: &Ledger, alternatives: &[Alternative<String>]) -> Vec<(String, Fits)> {
    let fallbacks = fallbacks(ledger, alternatives, Policy::Shared, Millis(0));
    fallbacks.into_iter().map(|f| (f.change, f.fits)).collect()
}

#[test]
fn fallbacks_are_ordered_by_fidelity_and_report_their_saving() {
    let (full, half, quarter) = (
        component("full", 23),
        component("half", 12),
        component("quarter", 6),
    );
    let ledger = card_with(&[&component("other", 10)]);
    let alternatives = [
        alternative("4-bit", 1, &[&quarter], 4),
        alternative("as asked", 3, &[&full], 4),
        alternative("8-bit", 2, &[&half, &half], 4),
    ];
    let gib = Bytes::gib;
    let eight = Fallback {
        change: "8-bit".into(),
        peak: gib(16),
        fits: Fits::AfterEvictions,
        saved: gib(11),
    };
    let four = Fallback {
        change: "4-bit".into(),
        peak: gib(10),
        fits: Fits::Now,
        saved: gib(17),
    };
    assert_eq!(
        fallbacks(&ledger, &alternatives, Policy::Shared, Millis(0)),
        [eight, four]
    );
}

#[test]
fn fallbacks_may_wait_for_our_memory_but_not_for_foreign_memory() {
    let (busy, new) = (component("busy", 10), component("new", 12));
    let mut ledger = card_with(&[&busy]);
    ledger.lease(&stage(&[&busy], Bytes::ZERO), Millis(0)).unwrap();
    let asked = [alternative("smaller", 1, &[&new], 6)];
    assert_eq!(
        offered(&ledger, &asked),
        [("smaller".into(), Fits::AfterEvictions)]
    );
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(1),
        ..truth(&ledger)
    });
    assert_eq!(offered(&ledger, &asked), []);

    let mut reserved = card_with(&[]);
    let small = [alternative("small", 1, &[&component("small", 2)], 2)];
    let id = ReservationId::new("game");
    reserved.reserve(id.clone(), "a game".into(), Bytes::gib(12));
    assert_eq!(offered(&reserved, &asked), [], "a reservation may last for a day");
    assert_eq!(offered(&reserved, &small), [("small".into(), Fits::Now)]);
    reserved.release_reservation(&id);
    assert_eq!(offered(&reserved, &asked), [("smaller".into(), Fits::Now)]);
}

#[test]
fn an_alternative_with_a_stage_that_never_fits_is_left_out() {
    let huge = component("huge", 30);
    assert_eq!(
        offered(&card_with(&[]), &[alternative("huge", 1, &[&huge], 0)]),
        []
    );
    assert_eq!(offered(&card_with(&[]), &[]), []);
    assert_eq!(peak_of(&[]), Bytes::ZERO);
}
