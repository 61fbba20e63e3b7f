use residency::{
    Accounts, Bytes, ComponentId, DriverTruth, HoldId, Holder, LATE_AT_MOST_MS, Ledger, LedgerError, Millis,
    Part, PinId, ReservationId, ResidentState,
};

use crate::given::{card_with, component, evict, load, stage, truth, use_at};

const T0: Millis = Millis(0);

#[test]
fn a_new_ledger_is_all_free() {
    let ledger = Ledger::new(Bytes::gib(24), Bytes::gib(1));
    assert_eq!(
        ledger.accounts(),
        Accounts {
            free: Bytes::gib(24),
            ..Accounts::default()
        }
    );
    assert_eq!(ledger.usable(), Bytes::gib(23));
}

#[test]
fn headroom_larger_than_the_card_leaves_nothing_usable() {
    assert_eq!(Ledger::new(Bytes::gib(1), Bytes::gib(2)).usable(), Bytes::ZERO);
}

#[test]
fn a_load_is_booked_before_the_driver_shows_it_and_counted_once_after() {
    let (mut ledger, t5) = (Ledger::new(Bytes::gib(24), Bytes::ZERO), component("t5", 9));
    ledger.begin_load(&t5, Part::WHOLE, T0).unwrap();
    assert_eq!(ledger.usable(), Bytes::gib(15));
    // Half of it has arrived: the other half is still booked.
    let half = DriverTruth {
        components: Bytes::gib(4),
        free: Bytes::gib(20),
        ..truth(&ledger)
    };
    ledger.reconcile(&half);
    assert_eq!(ledger.accounts().components, Bytes::gib(9));
    assert_eq!(ledger.usable(), Bytes::gib(15));
    ledger.complete_load(&t5.id, T0).unwrap();
    ledger.reconcile(&truth(&ledger));
    assert_eq!(ledger.usable(), Bytes::gib(15));
}

#[test]
fn a_load_of_exactly_the_free_bytes_fits_and_of_one_byte_more_does_not() {
    let mut ledger = Ledger::new(Bytes::gib(24), Bytes::ZERO);
    let mut c = component("c", 24);
    c.bytes += Bytes(1);
    let refused = LedgerError::NoRoom {
        needed: c.bytes,
        available: Bytes::gib(24),
    };
    assert_eq!(ledger.begin_load(&c, Part::WHOLE, T0), Err(refused));
    c.bytes = Bytes::gib(24);
    assert_eq!(ledger.begin_load(&c, Part::WHOLE, T0), Ok(()));
    assert_eq!(
        ledger.begin_load(&c, Part::WHOLE, T0),
        Err(LedgerError::AlreadyThere(c.id))
    );
}

#[test]
fn entries_out_of_order_are_refused() {
    let (mut ledger, c) = (card_with(&[]), component("c", 1));
    let unknown = Err(LedgerError::Unknown(c.id.clone()));
    assert_eq!(ledger.complete_load(&c.id, T0), unknown);
    assert_eq!(ledger.abort_load(&c.id), unknown);
    assert_eq!(ledger.begin_evict(&c.id), unknown);
    assert_eq!(ledger.complete_evict(&c.id, T0), unknown);
    let wrong = |state| {
        Err(LedgerError::WrongState {
            id: c.id.clone(),
            state,
        })
    };
    ledger.begin_load(&c, Part::WHOLE, T0).unwrap();
    assert_eq!(ledger.begin_evict(&c.id), wrong(ResidentState::Loading));
    ledger.complete_load(&c.id, T0).unwrap();
    assert_eq!(ledger.abort_load(&c.id), wrong(ResidentState::Resident));
    assert_eq!(ledger.complete_evict(&c.id, T0), wrong(ResidentState::Resident));
    ledger.begin_evict(&c.id).unwrap();
    assert!(!ledger.is_resident(&c.id));
    ledger.abort_evict(&c.id).unwrap();
    assert!(ledger.is_resident(&c.id));
}

#[test]
fn an_aborted_load_is_late_until_the_driver_shows_its_bytes() {
    let (mut ledger, c) = (card_with(&[]), component("c", 9));
    ledger.begin_load(&c, Part::WHOLE, T0).unwrap();
    ledger.abort_load(&c.id).unwrap();
    assert_eq!((ledger.late(), ledger.usable()), (Bytes::gib(9), Bytes::gib(15)));
    ledger.reconcile(&truth(&ledger));
    assert_eq!((ledger.late(), ledger.usable()), (Bytes::ZERO, Bytes::gib(24)));
}

#[test]
fn evicted_bytes_are_late_until_they_are_free_or_slack() {
    let c = component("c", 9);
    let mut ledger = card_with(&[&c]);
    evict(&mut ledger, &c, T0);
    assert_eq!((ledger.late(), ledger.usable()), (Bytes::gib(9), Bytes::gib(15)));
    let still = |pool, slack, free| DriverTruth {
        components: pool,
        slack,
        free,
        ..truth(&ledger.clone())
    };
    // The bytes appear in turn in the component pool's figures, nowhere, partly as slack, as free.
    let steps = [
        (still(Bytes::gib(9), Bytes::ZERO, Bytes::gib(15)), 9),
        (still(Bytes::ZERO, Bytes::ZERO, Bytes::gib(15)), 9),
        (still(Bytes::ZERO, Bytes::gib(4), Bytes::gib(15)), 5),
        (still(Bytes::ZERO, Bytes::gib(4), Bytes::gib(20)), 0),
    ];
    for (driver, late) in steps {
        ledger.reconcile(&driver);
        assert_eq!(ledger.late(), Bytes::gib(late));
        assert_eq!(ledger.accounts().unexplained, Bytes::gib(late));
        assert_eq!(ledger.accounts().foreign, Bytes::ZERO);
        assert_eq!(ledger.usable(), Bytes::gib(24 - late));
    }
}

#[test]
fn memory_that_was_foreign_before_an_eviction_is_not_late() {
    let c = component("c", 9);
    let mut ledger = card_with(&[&c]);
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(5),
        ..truth(&ledger)
    });
    assert_eq!(ledger.accounts().foreign, Bytes::gib(10));
    evict(&mut ledger, &c, T0);
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(14),
        ..truth(&ledger)
    });
    assert_eq!(
        (ledger.late(), ledger.accounts().foreign),
        (Bytes::ZERO, Bytes::gib(10))
    );
}

#[test]
fn late_bytes_become_foreign_when_they_never_come_back() {
    let c = component("c", 9);
    let mut ledger = card_with(&[&c]);
    evict(&mut ledger, &c, Millis(1_000));
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(15),
        ..truth(&ledger)
    });
    let over = Millis(1_000 + LATE_AT_MOST_MS);
    assert_eq!(ledger.write_off_late(Millis(over.0 - 1)), Bytes::ZERO);
    assert_eq!(ledger.late(), Bytes::gib(9));
    assert_eq!(ledger.write_off_late(over), Bytes::gib(9));
    assert_eq!(ledger.write_off_late(over), Bytes::ZERO);
    assert_eq!(
        (ledger.late(), ledger.accounts().foreign),
        (Bytes::ZERO, Bytes::gib(9))
    );
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(15),
        ..truth(&ledger)
    });
    assert_eq!(
        (ledger.late(), ledger.accounts().foreign),
        (Bytes::ZERO, Bytes::gib(9))
    );
}

#[test]
fn written_off_bytes_are_not_late_again_after_the_next_eviction() {
    let (a, b) = (component("a", 9), component("b", 4));
    let mut ledger = card_with(&[&a, &b]);
    evict(&mut ledger, &a, T0);
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(11),
        ..truth(&ledger)
    });
    assert_eq!(ledger.write_off_late(Millis(LATE_AT_MOST_MS)), Bytes::gib(9));
    evict(&mut ledger, &b, T0);
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(15),
        ..truth(&ledger)
    });
    assert_eq!(
        (ledger.late(), ledger.accounts().foreign),
        (Bytes::ZERO, Bytes::gib(9))
    );
}

#[test]
fn bytes_in_our_pools_that_no_component_explains_are_a_leak() {
    let mut ledger = card_with(&[]);
    ledger.reconcile(&DriverTruth {
        components: Bytes::gib(2),
        free: Bytes::gib(22),
        ..truth(&ledger)
    });
    assert_eq!(ledger.accounts().unexplained, Bytes::gib(2));
    assert_eq!(
        (ledger.late(), ledger.accounts().foreign),
        (Bytes::ZERO, Bytes::ZERO)
    );
}

#[test]
fn contradictory_figures_still_sum_up_to_the_capacity() {
    let mut ledger = card_with(&[]);
    let ten = Bytes::gib(10);
    let driver = DriverTruth {
        free: ten,
        scratch: ten,
        slack: ten,
        context: ten,
        ..truth(&ledger)
    };
    ledger.reconcile(&driver);
    assert_eq!(ledger.accounts().sum(), Bytes::gib(24));
    assert_eq!(ledger.accounts().free, Bytes::ZERO);
}

#[test]
fn a_lease_books_scratch_until_the_driver_shows_it() {
    let c = component("c", 4);
    let mut ledger = card_with(&[&c]);
    let lease = ledger.lease(&stage(&[&c, &c], Bytes::gib(6)), T0).unwrap();
    assert_eq!(
        ledger.resident(&c.id).unwrap().leases,
        1,
        "named twice, leased once"
    );
    assert_eq!(ledger.usable(), Bytes::gib(14));
    for seen in [0, 2, 6] {
        let scratch = Bytes::gib(seen);
        ledger.reconcile(&DriverTruth {
            scratch,
            free: Bytes::gib(20 - seen),
            ..truth(&ledger)
        });
        assert_eq!(
            (ledger.usable(), ledger.accounts().scratch),
            (Bytes::gib(14), Bytes::gib(6))
        );
    }
    // The stage allocates more than it booked: the excess cannot be planned with either.
    ledger.reconcile(&DriverTruth {
        scratch: Bytes::gib(8),
        free: Bytes::gib(12),
        ..truth(&ledger)
    });
    assert_eq!(ledger.usable(), Bytes::gib(12));
    ledger.reconcile(&DriverTruth {
        scratch: Bytes::gib(5),
        free: Bytes::gib(15),
        ..truth(&ledger)
    });
    assert_eq!(ledger.usable(), Bytes::gib(12), "it may want as much again");
    assert_eq!(ledger.begin_evict(&c.id), Err(LedgerError::Leased(c.id.clone())));
    ledger.release(lease, T0).unwrap();
    assert_eq!(ledger.release(lease, T0), Err(LedgerError::UnknownLease(lease)));
    assert_eq!(ledger.usable(), Bytes::gib(20));
    assert_eq!(
        ledger.accounts().slack,
        Bytes::gib(8),
        "pools keep what they have had"
    );
    assert_eq!(ledger.begin_evict(&c.id), Ok(()));
}

#[test]
fn a_lease_that_is_refused_leaves_no_trace() {
    let (here, gone) = (component("here", 1), component("gone", 1));
    let mut ledger = card_with(&[&here]);
    let before = ledger.clone();
    let refused = ledger.lease(&stage(&[&here, &gone], Bytes::gib(1)), T0);
    assert_eq!(refused, Err(LedgerError::NotResident(gone.id)));
    assert_eq!(ledger, before);
}

#[test]
fn a_pin_applies_to_a_later_load_and_again_after_an_eviction() {
    let c = component("c", 1);
    let mut ledger = card_with(&[]);
    ledger.pin(PinId::new("pin"), vec![c.id.clone()]);
    load(&mut ledger, &c, T0);
    let is_pinned = |ledger: &Ledger| ledger.resident(&c.id).is_some_and(|r| r.pinned);
    assert!(is_pinned(&ledger));
    evict(&mut ledger, &c, T0);
    load(&mut ledger, &c, T0);
    assert!(is_pinned(&ledger));
    assert!(ledger.unpin(&PinId::new("pin")));
    assert!(!ledger.unpin(&PinId::new("pin")));
    assert!(!is_pinned(&ledger));
}

#[test]
fn holds_are_counted_replaced_and_released() {
    let (a, b) = (component("a", 1), component("b", 1));
    let mut ledger = card_with(&[&a]);
    let held = |ledger: &Ledger, id: &ComponentId| ledger.resident(id).unwrap().held;
    let (mine, yours) = (HoldId::new("mine"), HoldId::new("yours"));
    ledger.hold(mine.clone(), vec![a.id.clone(), b.id.clone(), a.id.clone()]);
    ledger.hold(yours.clone(), vec![a.id.clone()]);
    load(&mut ledger, &b, T0);
    assert_eq!((held(&ledger, &a.id), held(&ledger, &b.id)), (2, 1));
    assert!(!ledger.resident(&b.id).unwrap().is_idle());
    assert!(ledger.release_hold(&yours));
    ledger.hold(mine.clone(), vec![a.id.clone()]);
    assert_eq!((held(&ledger, &a.id), held(&ledger, &b.id)), (1, 0));
    assert!(ledger.release_hold(&mine) && !ledger.release_hold(&mine));
    assert_eq!(held(&ledger, &a.id), 0);
}

#[test]
fn a_reservation_is_not_usable_whether_it_was_taken_or_not() {
    let mut ledger = card_with(&[]);
    let id = ReservationId::new("game");
    ledger.reserve(id.clone(), "a game".into(), Bytes::gib(8));
    assert_eq!(ledger.usable(), Bytes::gib(16));
    for taken in [3, 8] {
        ledger.reconcile(&DriverTruth {
            free: Bytes::gib(24 - taken),
            ..truth(&ledger)
        });
        assert_eq!(ledger.usable(), Bytes::gib(16), "{taken} GiB taken");
    }
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(14),
        ..truth(&ledger)
    });
    assert_eq!(ledger.usable(), Bytes::gib(14), "it took more than it reserved");
    ledger.reconcile(&truth(&ledger));
    assert_eq!(
        ledger.usable(),
        Bytes::gib(16),
        "it gave back, and may take again"
    );
    assert!(ledger.release_reservation(&id));
    assert_eq!(ledger.usable(), Bytes::gib(24));
    assert!(!ledger.release_reservation(&id));
}

#[test]
fn freed_foreign_memory_does_not_hide_use_of_a_reservation() {
    let mut ledger = card_with(&[]);
    let others = |gib: u64| DriverTruth {
        free: Bytes::gib(24 - gib),
        ..truth(&card_with(&[]))
    };
    ledger.reconcile(&others(5));
    ledger.reserve(ReservationId::new("r"), "r".into(), Bytes::gib(8));
    for (gib, usable) in [(5, 11), (2, 14), (10, 14)] {
        ledger.reconcile(&others(gib));
        assert_eq!(ledger.usable(), Bytes::gib(usable));
    }
}

#[test]
fn the_end_of_one_reservation_does_not_touch_another() {
    let mut ledger = card_with(&[]);
    let (a, b) = (ReservationId::new("a"), ReservationId::new("b"));
    ledger.reserve(a.clone(), "a".into(), Bytes::gib(4));
    ledger.reserve(b.clone(), "b".into(), Bytes::gib(6));
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(20),
        ..truth(&ledger)
    });
    assert_eq!(ledger.usable(), Bytes::gib(14));
    assert!(ledger.release_reservation(&a));
    assert_eq!(
        ledger.usable(),
        Bytes::gib(14),
        "4 GiB are foreign, 6 GiB still reserved"
    );
    assert!(ledger.release_reservation(&b));
    assert_eq!(ledger.usable(), Bytes::gib(20));
}

#[test]
fn trimmed_slack_is_late_and_not_foreign() {
    let mut ledger = card_with(&[]);
    let shown = |slack, free| DriverTruth {
        total: Bytes::gib(24),
        slack: Bytes::gib(slack),
        free: Bytes::gib(free),
        ..DriverTruth::default()
    };
    ledger.reconcile(&shown(4, 20));
    ledger.complete_trim(Bytes::gib(9), T0); // no more than there was
    for (driver, late) in [(shown(0, 20), 4), (shown(0, 22), 2), (shown(0, 24), 0)] {
        ledger.reconcile(&driver);
        let accounts = ledger.accounts();
        assert_eq!(
            (ledger.late(), accounts.unexplained),
            (Bytes::gib(late), Bytes::gib(late))
        );
        assert_eq!((accounts.foreign, accounts.slack), (Bytes::ZERO, Bytes::ZERO));
        assert_eq!(accounts.sum(), ledger.total());
    }
}

#[test]
fn holders_are_listed_by_name_with_their_bytes() {
    let (a, b, c) = (component("a", 1), component("b", 2), component("c", 3));
    let mut ledger = card_with(&[&a, &b, &c]);
    ledger.lease(&stage(&[&a], Bytes::gib(1)), T0).unwrap();
    ledger.pin(PinId::new("pin"), vec![b.id.clone()]);
    ledger.reserve(ReservationId::new("r"), "a game".into(), Bytes::gib(5));
    let python = Holder {
        name: "python".into(),
        pid: Some(42),
        bytes: Bytes::gib(2),
    };
    let driver = DriverTruth {
        free: Bytes::gib(15),
        holders: vec![python.clone()],
        ..truth(&ledger)
    };
    ledger.reconcile(&driver);
    let named = |name: &str, gib| Holder {
        name: name.into(),
        pid: None,
        bytes: Bytes::gib(gib),
    };
    let expected = [
        python,
        named("other processes", 1),
        named("reserved for a game", 2), // 3 of 5 were taken: they are foreign
        named("a (in use)", 1),
        named("b (pinned)", 2),
        named("activations of running stages", 1),
    ];
    assert_eq!(ledger.holders(), expected);
}

#[test]
fn a_load_whose_memory_another_process_took_is_booked_as_far_as_it_can_be() {
    let (mut ledger, c) = (card_with(&[]), component("c", 20));
    ledger.begin_load(&c, Part::WHOLE, T0).unwrap();
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(10),
        components: Bytes::gib(5),
        ..truth(&ledger)
    });
    assert_eq!(
        (ledger.accounts().components, ledger.accounts().foreign),
        (Bytes::gib(15), Bytes::gib(9))
    );
    assert_eq!(ledger.accounts().sum(), Bytes::gib(24));
    ledger.abort_load(&c.id).unwrap();
    assert_eq!(
        (ledger.late(), ledger.accounts().sum()),
        (Bytes::gib(15), Bytes::gib(24))
    );
}

#[test]
fn a_snapshot_survives_serialization() {
    let (a, b) = (component("a", 1), component("b", 2));
    let mut ledger = card_with(&[&a, &b]);
    use_at(&mut ledger, &a, 3, Millis(5));
    ledger.lease(&stage(&[&a], Bytes::gib(1)), Millis(6)).unwrap();
    ledger.pin(PinId::new("pin"), vec![b.id.clone()]);
    ledger.hold(HoldId::new("h"), vec![a.id.clone()]);
    ledger.reserve(ReservationId::new("r"), "r".into(), Bytes::gib(1));
    let text = serde_json::to_string(&ledger).unwrap();
    assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
}
