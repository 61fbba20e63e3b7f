use residency::{Bytes, KEYS_REMEMBERED, RUNS_REMEMBERED, RunOutcome, ScratchBook, ScratchKey};

const PREDICTED: Bytes = Bytes::gib(4);

fn key(shape: &str) -> ScratchKey {
    ScratchKey {
        family: "flux".into(),
        stage: "denoise".into(),
        shape: shape.into(),
        ..ScratchKey::default()
    }
}

/// A success in so much room that the room proves little.
fn success() -> RunOutcome {
    RunOutcome::Succeeded { room: Bytes::gib(20) }
}

#[test]
fn the_family_prediction_is_used_until_a_run_succeeded() {
    let mut book = ScratchBook::new();
    assert_eq!(book.estimate(&key("1"), PREDICTED), PREDICTED);
    for outcome in [
        RunOutcome::Failed,
        RunOutcome::Cancelled,
        RunOutcome::OutOfMemory { room: PREDICTED },
    ] {
        book.learn(&key("1"), Bytes::gib(30), outcome);
        assert_eq!(book, ScratchBook::new(), "{outcome:?} teaches nothing");
    }
    book.learn(&key("1"), Bytes::gib(2), success());
    assert_eq!(
        book.estimate(&key("1"), PREDICTED),
        Bytes::gib(2) + Bytes::mib(64) + Bytes::mib(16)
    );
    assert_eq!(book.estimate(&key("2"), PREDICTED), PREDICTED);
}

#[test]
fn estimates_fall_when_the_last_runs_needed_less() {
    let mut book = ScratchBook::new();
    book.learn(&key("1"), Bytes::gib(8), success());
    let high = book.estimate(&key("1"), PREDICTED);
    for _ in 1..RUNS_REMEMBERED {
        book.learn(&key("1"), Bytes::gib(1), success());
        assert_eq!(book.estimate(&key("1"), PREDICTED), high);
    }
    book.learn(&key("1"), Bytes::gib(1), success());
    assert!(book.estimate(&key("1"), PREDICTED) < Bytes::gib(2));
    assert_eq!(book.peaks(&key("1")).count(), RUNS_REMEMBERED);
}

#[test]
fn a_stage_that_ran_once_is_not_refused_in_the_same_room() {
    let mut book = ScratchBook::new();
    // It was predicted to need 4 GiB and needed 5, in 5 GiB of room: no margin would fit in there.
    let room = Bytes::gib(5);
    let estimate = |book: &ScratchBook| book.estimate(&key("1"), PREDICTED);
    book.learn(&key("1"), Bytes::gib(5), RunOutcome::Succeeded { room });
    assert_eq!(estimate(&book), room);
    // A hundred runs in more room do not withdraw the proof.
    (0..100).for_each(|_| book.learn(&key("1"), Bytes::gib(5), success()));
    assert_eq!(estimate(&book), room);
    // Running out of memory in more room than that does.
    let out_of_memory = |room| RunOutcome::OutOfMemory { room };
    book.learn(&key("1"), Bytes::gib(5), out_of_memory(room - Bytes(1)));
    assert_eq!(estimate(&book), room, "in less room it proves nothing");
    book.learn(&key("1"), Bytes::gib(5), out_of_memory(room));
    assert!(estimate(&book) > room);
    assert!(
        estimate(&book) < Bytes::gib(6),
        "and does not inflate the estimate"
    );
}

#[test]
fn a_success_on_an_overdrawn_card_proves_no_room() {
    let mut book = ScratchBook::new();
    book.learn(
        &key("1"),
        Bytes::gib(5),
        RunOutcome::Succeeded { room: Bytes::ZERO },
    );
    assert!(book.estimate(&key("1"), PREDICTED) > Bytes::gib(5));
}

#[test]
fn the_key_updated_longest_ago_is_evicted_first() {
    let mut book = ScratchBook::new();
    let teach = |book: &mut ScratchBook, n: usize| book.learn(&key(&n.to_string()), Bytes(1), success());
    (0..KEYS_REMEMBERED).for_each(|n| teach(&mut book, n));
    teach(&mut book, 0);
    teach(&mut book, KEYS_REMEMBERED);
    let known = (0..=KEYS_REMEMBERED).filter(|n| book.peaks(&key(&n.to_string())).next().is_some());
    assert_eq!(known.count(), KEYS_REMEMBERED);
    assert_eq!(book.peaks(&key("1")).count(), 0);
    assert_eq!(book.peaks(&key("0")).count(), 2);
}

#[test]
fn the_margin_is_added_to_peaks_and_never_compounds() {
    let mut book = ScratchBook::new();
    let peak = Bytes::mib(4);
    for _ in 0..3 * RUNS_REMEMBERED {
        book.learn(&key("1"), peak, success());
        let estimate = book.estimate(&key("1"), PREDICTED);
        assert_eq!(estimate, peak + Bytes(peak.0 / 32) + Bytes::mib(16));
        // The last estimate is not a prediction of the family, in case a caller passes it as one.
        assert_eq!(book.estimate(&key("1"), estimate), estimate);
    }
}
