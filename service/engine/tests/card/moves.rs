//! Moves: which, in which order, and the state after a failure.

use engine::messages::*;
use residency::*;

use crate::support::*;

const FULL: &str = "instant:flux-full-transformer";
const CLIP: &str = "instant:clip-l";
const T5: &str = "instant:t5-xxl";
const VAE: &str = "instant:flux-vae";

#[test]
fn a_stage_loads_its_components_and_a_second_one_moves_nothing() {
    let mut bench = bench("48GiB");
    let order = bench.stage(&sample("flux-full"), "encode_text");
    let completed = bench.completed(order);
    assert_eq!(completed.resident_already, Vec::<String>::new());
    assert_eq!(completed.load_seconds.len(), 2);
    assert_eq!(completed.chunking, "whole");
    assert_eq!(completed.predicted_scratch, completed.peak_scratch);
    assert_eq!(bench.resident(), [CLIP, T5]);

    let calls = bench.calls();
    let order = bench.stage(&sample("flux-full"), "encode_text");
    let completed = bench.completed(order);
    assert_eq!(completed.resident_already, ["text_encoder", "text_encoder_2"]);
    assert_eq!(bench.calls(), calls, "nothing was moved");
}

#[test]
fn evictions_precede_loads_and_each_move_is_announced_first() {
    let mut bench = bench("32GiB");
    bench.run_stage(&sample("flux-full"), "encode_text");
    let before = bench.progress().len();
    bench.run_stage(&sample("flux-full"), "denoise");
    assert_eq!(bench.resident(), [CLIP, FULL]);
    let expected = [
        format!("load {CLIP}"),
        format!("load {T5}"),
        format!("unload {T5}"),
        format!("load {FULL}"),
    ];
    assert_eq!(bench.calls(), expected);
    let said: Vec<String> = bench.progress()[before..]
        .iter()
        .map(|p| match p {
            Progress::Evicting(c) => format!("evicting {}", c.name),
            Progress::Loading { component, done } if *done == component.bytes => {
                format!("loaded {}", component.name)
            }
            Progress::Loading { component, .. } => format!("loading {}", component.name),
            Progress::Started { chunking, .. } => format!("started {chunking}"),
            Progress::Step { n, of } => format!("{n}/{of}"),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        "evicting text_encoder_2",
        "loading transformer",
        "loaded transformer",
        "started whole",
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ];
    assert_eq!(said, expected);
}

#[test]
fn snapshots_show_each_move_under_way_and_the_lease() {
    let mut bench = bench("32GiB");
    bench.run_stage(&sample("flux-full"), "encode_text");
    bench.link.events.clear();
    bench.run_stage(&sample("flux-full"), "denoise");
    let mut shown: Vec<String> = Vec::new();
    for event in &bench.link.events {
        let Event::Snapshot(ledger) = event else { continue };
        let state = |r: &Resident| match (r.state, r.leases) {
            (ResidentState::Loading | ResidentState::Resizing, _) => {
                Some(format!("loading {}", r.component.name))
            }
            (ResidentState::Evicting, _) => Some(format!("evicting {}", r.component.name)),
            (ResidentState::Resident, 0) => None,
            (ResidentState::Resident, _) => Some(format!("in use {}", r.component.name)),
        };
        shown.extend(ledger.residents().filter_map(state));
    }
    assert_eq!(
        shown,
        [
            "evicting text_encoder_2",
            "loading transformer",
            "in use transformer"
        ]
    );
    assert!(
        matches!(bench.link.events[bench.link.events.len() - 2], Event::Snapshot(_)),
        "then the end"
    );
}

#[test]
fn alternating_models_share_equal_components() {
    let mut bench = bench("34GiB");
    for name in ["flux-full", "flux-other", "flux-full"] {
        for kind in ["encode_text", "denoise", "decode"] {
            let outcome = bench.run_stage(&sample(name), kind);
            assert!(
                matches!(outcome, Outcome::Completed(_)),
                "{name} {kind:?}: {outcome:?}"
            );
        }
    }
    let loads = |what: &str| {
        bench
            .calls()
            .iter()
            .filter(|c| **c == format!("load {what}"))
            .count()
    };
    assert_eq!(loads(VAE), 1, "the VAE that both share was loaded once");
    assert_eq!(loads(CLIP), 1);
}

#[test]
fn exclusive_policy_leaves_one_large_component_and_no_slack() {
    let mut bench = bench("48GiB,slack=keep");
    bench.run_stage(&sample("flux-full"), "encode_text");
    let mut order = bench.stage(&sample("flux-full"), "denoise");
    order.policy = Policy::Exclusive;
    bench.completed(order);
    assert_eq!(bench.resident(), [CLIP, FULL]);
    assert!(bench.calls().contains(&"trim".to_owned()));
}

#[test]
fn load_progress_is_rate_limited_and_includes_first_and_last() {
    let mut bench = bench("32GiB,speed=1GiB/s");
    let order = bench.load(&sample("flux-full"), &["text_encoder_2"]);
    let completed = bench.completed(order);
    let (_, seconds) = &completed.load_seconds[0];
    assert!((8.8..9.0).contains(seconds), "{seconds} s");
    assert!((8800..9000).contains(&completed.move_ms));
    let done: Vec<u64> = bench
        .progress()
        .iter()
        .filter(|p| !matches!(p, Progress::Started { .. }))
        .map(|p| match p {
            Progress::Loading { done, .. } => done.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(done[0], 0);
    assert_eq!(*done.last().unwrap(), (8.9 * 1024.0) as u64 * MIB);
    assert!(done.is_sorted());
    // Progress every 32 MiB would be 31 ms apart: every second event is dropped.
    assert!((140..180).contains(&done.len()), "{} reports", done.len());
}

#[test]
fn a_plain_load_loads_components_and_runs_no_stage() {
    let mut bench = bench("32GiB");
    let order = bench.load(&sample("flux-full"), &["vae", "text_encoder"]);
    let completed = bench.completed(order);
    assert!(completed.values.is_empty());
    assert_eq!(completed.chunking, "");
    assert_eq!(bench.resident(), [CLIP, VAE]);
    assert!(!bench.calls().contains(&"trim".to_owned()));
    assert!(
        !bench
            .progress()
            .iter()
            .any(|p| matches!(p, Progress::Step { .. }))
    );
}

#[test]
fn foreign_memory_is_waited_for_without_a_move() {
    let mut bench = bench("32GiB");
    bench.run_stage(&sample("flux-full"), "encode_text");
    let calls = bench.calls();
    bench.world.hold("blender", Some(41), Bytes::gib(20));
    let Outcome::Wait(shortage) = bench.run_stage(&sample("flux-full"), "denoise") else {
        panic!("it waits")
    };
    assert_eq!(shortage.cause, WaitCause::Foreign);
    assert_eq!(
        shortage.holders[0],
        Holder {
            name: "blender".into(),
            pid: Some(41),
            bytes: Bytes::gib(20)
        }
    );
    let peak = Bytes((22.2 * 1024.0) as u64 * MIB) + Bytes::mib(1536);
    assert_eq!(shortage.needed, peak);
    assert_eq!(bench.calls(), calls, "no move was made");
    assert_eq!(bench.resident(), [CLIP, T5]);

    bench.world.hold("blender", None, Bytes::ZERO);
    assert!(matches!(
        bench.run_stage(&sample("flux-full"), "denoise"),
        Outcome::Completed(_)
    ));
}

#[test]
fn a_stage_that_exceeds_the_card_is_refused_without_evictions() {
    let mut bench = bench("32GiB,context=1GiB");
    bench.run_stage(&sample("flux-full"), "encode_text");
    let calls = bench.calls();
    let outcome = bench.run_stage(&sample("huge"), "denoise");
    let (needed, capacity) = (Bytes::gib(40) + Bytes::mib(1536), Bytes::gib(31));
    assert_eq!(outcome, Outcome::Never { needed, capacity });
    let mut order = bench.stage(&sample("huge"), "denoise");
    order.allow_low_memory = true;
    assert!(
        matches!(bench.run(order), Outcome::Never { .. }),
        "weights that exceed the card are no low memory"
    );
    assert_eq!(bench.calls(), calls);
}

#[test]
fn low_memory_is_admitted_only_if_requested() {
    let folder = tempfile::tempdir().unwrap();
    // The decode really needs half of the prediction.
    let model = write_model(
        folder.path(),
        "frugal",
        &format!(r#","real_scratch":{{"decode":{}}}"#, 32 * MIB),
    );
    let mut bench = bench("50MiB");
    let mut order = bench.stage(&model, "decode");
    if let Work::Stage(work) = &mut order.work {
        work.plan.rungs.truncate(1);
    }
    let mut again = order.clone();
    assert!(matches!(bench.run(order), Outcome::Never { .. }));
    again.allow_low_memory = true;
    again.ticket = Ticket(77);
    let completed = bench.completed(again);
    assert_eq!(completed.predicted_scratch, Bytes::mib(64));
    assert_eq!(completed.peak_scratch, Bytes::mib(32));
    assert_eq!(completed.room, Bytes::mib(40));
}

#[test]
fn a_cancelled_load_is_rolled_back_and_finished_evictions_remain() {
    let mut bench = bench("32GiB");
    bench.run_stage(&sample("flux-full"), "encode_text");
    let order = bench.stage(&sample("flux-full"), "denoise");
    bench.link.cancel_in.set(Some(20));
    assert_eq!(bench.run(order), Outcome::Cancelled);
    bench.link.cancel_in.set(None);
    assert_eq!(bench.resident(), [CLIP]);
    assert!(
        bench
            .progress()
            .iter()
            .any(|p| matches!(p, Progress::Loading { .. }))
    );
    assert!(matches!(
        bench.run_stage(&sample("flux-full"), "denoise"),
        Outcome::Completed(_)
    ));
}

#[test]
fn an_order_cancelled_before_it_starts_moves_nothing() {
    let mut bench = bench("32GiB");
    let order = bench.stage(&sample("flux-full"), "encode_text");
    bench.link.cancel_in.set(Some(0));
    assert_eq!(bench.run(order), Outcome::Cancelled);
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn a_failed_load_is_rolled_back_and_can_be_retried() {
    let mut bench = bench("32GiB,fail-load=2:io,fail-load=3:damaged");
    let Outcome::Failed(Failure::Model { message }) = bench.run_stage(&sample("flux-full"), "encode_text")
    else {
        panic!("the second load fails")
    };
    assert!(message.contains("cannot read"), "{message}");
    assert_eq!(bench.resident(), [CLIP], "what was loaded before it stands");
    let outcome = bench.run_stage(&sample("flux-full"), "encode_text");
    assert!(matches!(outcome, Outcome::Failed(Failure::Model { message }) if message.contains("damaged")));
    assert!(matches!(
        bench.run_stage(&sample("flux-full"), "encode_text"),
        Outcome::Completed(_)
    ));
}

#[test]
fn a_load_that_runs_out_of_memory_is_replanned() {
    let mut bench = bench("32GiB,fail-load=1");
    let order = bench.stage(&sample("flux-full"), "encode_text");
    let completed = bench.completed(order);
    assert_eq!(completed.load_seconds.len(), 2);
}

#[test]
fn a_load_that_keeps_running_out_of_memory_fails() {
    let every: String = (1..20).map(|n| format!(",fail-load={n}")).collect();
    let mut bench = bench(&format!("32GiB{every}"));
    let outcome = bench.run_stage(&sample("flux-full"), "encode_text");
    assert!(matches!(outcome, Outcome::Failed(Failure::OutOfMemory { stage, .. }) if stage == "encode_text"));
    assert_eq!(bench.resident(), Vec::<String>::new());
}

#[test]
fn late_bytes_are_waited_for() {
    let mut bench = bench("31500MiB,lag=200ms");
    let order = bench.load(&sample("flux-full"), &["text_encoder", "text_encoder_2"]);
    bench.completed(order);
    let Outcome::Wait(shortage) = bench.run_stage(&sample("flux-full"), "denoise") else {
        panic!("they are late")
    };
    assert_eq!(shortage.cause, WaitCause::LateEviction);
    assert_eq!(
        bench.resident(),
        [CLIP],
        "the eviction stands, the load had no room"
    );
    assert_eq!(
        bench.card.time_until_tick().as_millis(),
        25,
        "late bytes are looked for more often"
    );

    let published = bench.link.events.len();
    bench.tick_after(100);
    assert_eq!(
        bench.link.events.len(),
        published,
        "nothing changed, nothing is said"
    );
    bench.tick_after(100);
    assert_eq!(bench.card.ledger().late(), Bytes::ZERO);
    assert!(
        matches!(bench.link.events.last(), Some(Event::Snapshot(_))),
        "whoever waits is told"
    );
    assert!(matches!(
        bench.run_stage(&sample("flux-full"), "denoise"),
        Outcome::Completed(_)
    ));
}

#[test]
fn a_load_that_fits_does_not_wait_for_late_bytes() {
    let mut bench = bench("32GiB,lag=200ms");
    let order = bench.load(&sample("flux-full"), &["text_encoder", "text_encoder_2"]);
    bench.completed(order);
    let outcome = bench.run_stage(&sample("flux-full"), "denoise");
    assert!(
        matches!(outcome, Outcome::Wait(s) if s.cause == WaitCause::LateEviction && s.needed < Bytes::gib(2))
    );
    assert_eq!(
        bench.resident(),
        [CLIP, FULL],
        "only the activations have to wait"
    );
    bench.tick_after(200);
    let order = bench.stage(&sample("flux-full"), "denoise");
    assert_eq!(bench.completed(order).resident_already, ["transformer"]);
}

#[test]
fn low_memory_waits_for_late_bytes_if_weights_do_not_fit_without_them() {
    let mut bench = bench("31500MiB,lag=200ms");
    let order = bench.load(&sample("flux-full"), &["text_encoder", "text_encoder_2"]);
    bench.completed(order);
    let mut order = bench.stage(&sample("flux-full"), "denoise");
    order.allow_low_memory = true;
    assert!(matches!(bench.run(order), Outcome::Wait(s) if s.cause == WaitCause::LateEviction));
}

#[test]
fn a_missing_damaged_or_changed_model_fails_only_its_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    let order = bench.stage(&path, "decode");
    let retried = |n: u64| Order {
        ticket: Ticket(100 + n),
        ..order.clone()
    };

    std::fs::write(&path, "{").unwrap();
    let outcome = bench.run(retried(1));
    assert!(
        matches!(outcome, Outcome::Failed(Failure::Model { message }) if message.contains("it ends too early"))
    );

    write_model(folder.path(), "m", "");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(&(10 * MIB).to_string(), "12345678")).unwrap();
    let outcome = bench.run(retried(2));
    assert!(
        matches!(outcome, Outcome::Failed(Failure::Replaced { message }) if message.contains("has changed"))
    );

    write_model(folder.path(), "m", "");
    assert!(matches!(bench.run(retried(3)), Outcome::Completed(_)));

    std::fs::remove_file(&path).unwrap();
    assert!(
        matches!(bench.run(retried(4)), Outcome::Completed(_)),
        "all that it needs is resident"
    );
    bench.unload_all();
    assert!(matches!(
        bench.run(retried(6)),
        Outcome::Failed(Failure::Model { .. })
    ));

    let notes = folder.path().join("notes.txt");
    std::fs::write(&notes, "no model").unwrap();
    let mut other = retried(5);
    other.model.path = notes;
    let outcome = bench.run(other);
    assert!(
        matches!(outcome, Outcome::Failed(Failure::Unsupported { .. })),
        "{outcome:?}"
    );
}
