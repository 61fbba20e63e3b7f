use residency::{Bytes, Candidate, Ledger, Millis, Policy, choose, predicted_move_seconds};

use crate::given::{card_with, component, stage};

const NOW: Millis = Millis(0);

fn seconds(ledger: &Ledger, gib: u64) -> f64 {
    predicted_move_seconds(
        ledger,
        &stage(&[&component("c", gib)], Bytes::ZERO),
        Policy::Shared,
        NOW,
    )
}

#[test]
fn a_warm_card_moves_nothing_and_a_full_one_evicts_too() {
    let c = component("c", 10);
    assert_eq!(seconds(&card_with(&[&c]), 10), 0.0);
    assert_eq!(seconds(&card_with(&[]), 10), 10.0);
    let full = seconds(&card_with(&[&component("other", 20)]), 10);
    assert!((10.01..10.1).contains(&full), "{full}");
    assert_eq!(seconds(&card_with(&[]), 25), f64::INFINITY);
}

#[test]
fn moves_after_a_wait_are_counted() {
    let mut ledger = card_with(&[&component("busy", 20)]);
    ledger
        .lease(&stage(&[&component("busy", 20)], Bytes::ZERO), NOW)
        .unwrap();
    assert_eq!(seconds(&ledger, 10), 10.0);
}

#[test]
fn a_warm_card_is_preferred_until_its_queue_outweighs_the_saved_moves() {
    let c = component("c", 10);
    let (warm, cold, small) = (
        card_with(&[&c]),
        card_with(&[]),
        Ledger::new(Bytes::gib(8), Bytes::ZERO),
    );
    let stages = [stage(&[&c], Bytes::gib(1))];
    let pick = |work_ahead_seconds: f64| {
        let candidates = [
            Candidate {
                ledger: &small,
                work_ahead_seconds: 0.0,
            },
            Candidate {
                ledger: &cold,
                work_ahead_seconds: 0.0,
            },
            Candidate {
                ledger: &warm,
                work_ahead_seconds,
            },
        ];
        choose(&candidates, &stages, Policy::Shared, NOW)
    };
    assert_eq!(pick(9.9), Some(2));
    assert_eq!(pick(10.0), Some(1), "the first of equals");
    assert_eq!(pick(10.1), Some(1));
    let only_small = [Candidate {
        ledger: &small,
        work_ahead_seconds: 0.0,
    }];
    assert_eq!(choose(&only_small, &stages, Policy::Shared, NOW), None);
    assert_eq!(choose(&[], &stages, Policy::Shared, NOW), None);
}
