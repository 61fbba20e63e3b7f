use residency::{Millis, Patience, Wait, WaitCause};

const START: Millis = Millis(1_000);

#[test]
fn default_budgets_match_the_field_reports() {
    assert_eq!(
        Patience::default(),
        Patience {
            after_eviction_ms: 5_000,
            foreign_ms: 7_000
        }
    );
}

#[test]
fn each_budget_is_spent_to_the_millisecond() {
    let budgets = [
        (WaitCause::LateEviction, 5_000),
        (WaitCause::Foreign, 7_000),
        (WaitCause::Reservation, 7_000),
    ];
    for (cause, ms) in budgets {
        let wait = Wait::new(START, cause, &Patience::default());
        assert_eq!((wait.left(START), wait.is_over(START)), (ms, false));
        assert_eq!(
            (wait.left(START.after(ms - 1)), wait.is_over(START.after(ms - 1))),
            (1, false)
        );
        assert_eq!(
            (wait.left(START.after(ms)), wait.is_over(START.after(ms))),
            (0, true)
        );
    }
}

#[test]
fn waiting_for_our_own_stages_spends_nothing() {
    let mut wait = Wait::new(START, WaitCause::Leases, &Patience::default());
    let later = START.after(3_600_000);
    assert_eq!((wait.left(later), wait.is_over(later)), (7_000, false));
    wait.update(later, WaitCause::Foreign);
    assert_eq!(wait.left(later), 7_000);
    let none = Patience {
        after_eviction_ms: 0,
        foreign_ms: 0,
    };
    assert!(!Wait::new(START, WaitCause::Leases, &none).is_over(later));
    assert!(Wait::new(START, WaitCause::Foreign, &none).is_over(START));
}

#[test]
fn a_change_of_cause_does_not_refill_a_budget() {
    let mut wait = Wait::new(START, WaitCause::LateEviction, &Patience::default());
    wait.update(START.after(4_000), WaitCause::Foreign);
    assert_eq!(wait.left(START.after(5_000)), 6_000);
    wait.update(START.after(6_000), WaitCause::LateEviction);
    assert_eq!(wait.left(START.after(6_000)), 1_000);
    wait.update(START.after(6_500), WaitCause::LateEviction);
    assert!(!wait.is_over(START.after(6_999)));
    assert!(wait.is_over(START.after(7_000)));
    wait.update(START.after(7_000), WaitCause::Reservation);
    assert_eq!(wait.left(START.after(7_000)), 5_000);
}

#[test]
fn a_clock_that_steps_back_spends_no_budget() {
    let mut wait = Wait::new(START, WaitCause::Foreign, &Patience::default());
    wait.update(START.after(1_000), WaitCause::Foreign);
    wait.update(START, WaitCause::Foreign);
    assert_eq!(wait.left(START.after(1_000)), 6_000);
}
