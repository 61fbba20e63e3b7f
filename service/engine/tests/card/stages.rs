//! Stages: progress, previews, and failures.

use std::path::Path;

use engine::card::CardSettings;
use engine::messages::*;
use model::HostTensor;
use residency::*;

use crate::support::*;

fn retries(bench: &Bench) -> usize {
    bench
        .progress()
        .iter()
        .filter(|p| matches!(p, Progress::Retrying { .. }))
        .count()
}

#[test]
fn a_picture_is_determined_by_prompt_and_seed() {
    let mut bench = bench("1GiB");
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut generate = |prompt: &str, seed: u64| {
        let mut request = request(&*bench.open(&path));
        (request.prompt, request.seed) = (prompt.into(), seed);
        let order = bench.stage_of(&path, "encode_text", request.clone());
        let text = bench.completed(order).values;
        let mut order = bench.stage_of(&path, "denoise", request.clone());
        if let Work::Stage(work) = &mut order.work {
            work.values = text;
        }
        let latent = bench.completed(order).values;
        let mut order = bench.stage_of(&path, "decode", request);
        if let Work::Stage(work) = &mut order.work {
            work.values = latent;
        }
        bench.link.events.clear();
        bench.completed(order);
        let pieces = bench
            .progress()
            .into_iter()
            .filter_map(|progress| match progress {
                Progress::Piece(piece) => Some(piece),
                _ => None,
            });
        let pieces: Vec<_> = pieces.collect();
        let [piece] = &pieces[..] else {
            panic!("{pieces:?}")
        };
        assert_eq!((piece.is_last(), piece.data.len()), (true, 64 * 64 * 3));
        piece.data.clone()
    };
    let first = generate("a red cube", 1);
    assert_eq!(first, generate("a red cube", 1));
    assert_ne!(first, generate("a red cube", 2));
    assert_ne!(first, generate("a blue cube", 1));
}

/// An order for the sampling whose transformer stays in the machine's memory.
fn from_host(bench: &mut Bench, path: &Path) -> Order {
    let mut order = bench.stage(path, "denoise");
    if let Work::Stage(work) = &mut order.work {
        work.plan.rungs[0].from_host = vec!["transformer".to_owned()];
    }
    order
}

fn reads(bench: &Bench) -> Vec<String> {
    let calls = bench.calls().into_iter();
    calls.filter(|call| call.starts_with("read")).collect()
}

#[test]
fn a_component_in_host_memory_is_read_once_until_the_card_is_idle() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    for _ in 0..3 {
        let order = from_host(&mut bench, &path);
        bench.completed(order);
    }
    assert_eq!(reads(&bench), ["read 100.0 MiB"], "for all stages");
    assert!(bench.resident().is_empty());
    bench.tick_after(10_000);
    let order = from_host(&mut bench, &path);
    bench.completed(order);
    assert_eq!(reads(&bench).len(), 2, "an idle card keeps nothing for itself");
}

#[test]
fn a_component_larger_than_the_bound_is_not_kept_in_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let settings = CardSettings {
        headroom: Bytes::ZERO,
        on_host: Bytes::mib(99),
        ..CardSettings::default()
    };
    let mut bench = bench_with("1GiB", settings);
    for _ in 0..2 {
        let order = from_host(&mut bench, &path);
        bench.completed(order);
    }
    assert_eq!(reads(&bench).len(), 2);
}

#[test]
fn reading_into_the_machines_memory_is_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    let mut cancelled = 0;
    for polls in 0..8 {
        let order = from_host(&mut bench, &path);
        bench.link.cancel_in.set(Some(polls));
        let outcome = bench.run(order);
        bench.link.cancel_in.set(None);
        let reads = reads(&bench);
        if reads.last().is_some_and(|call| call.ends_with("was cancelled")) {
            assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
            cancelled += 1;
        }
    }
    assert_eq!(cancelled, 1, "{:?}", reads(&bench));
}

#[test]
fn out_of_memory_is_retried_once_and_then_on_smaller_rungs() {
    let folder = tempfile::tempdir().unwrap();
    // Predicted 64 whole and 32 in strips; really 160 and 80: only strips fit into 110.
    let greedy = write_model(
        folder.path(),
        "greedy",
        &format!(r#","real_scratch":{{"decode":{}}}"#, 160 * MIB),
    );
    let mut bench = bench("120MiB");
    let order = bench.stage(&greedy, "decode");
    let completed = bench.completed(order);
    assert_eq!(completed.chunking, "strips of 16");
    assert!(!completed.approximate);
    assert_eq!(completed.predicted_scratch, Bytes::mib(32));
    assert_eq!(completed.peak_scratch, Bytes::mib(80));
    assert_eq!(completed.peak_bytes, Bytes::mib(90));
    let messages: Vec<String> = bench
        .progress()
        .into_iter()
        .filter_map(|p| match p {
            Progress::Retrying { reason, message } => {
                assert_eq!(reason, "OUT_OF_MEMORY");
                Some(message)
            }
            _ => None,
        })
        .collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(messages[0].contains("trying once more") && messages[1].contains("trying strips of 16"));
}

#[test]
fn a_rung_without_a_smaller_prediction_is_not_tried() {
    let folder = tempfile::tempdir().unwrap();
    let greedy = write_model(
        folder.path(),
        "greedy",
        &format!(r#","real_scratch":{{"decode":{}}}"#, 160 * MIB),
    );
    let mut bench = bench("120MiB");
    let mut order = bench.stage(&greedy, "decode");
    if let Work::Stage(work) = &mut order.work {
        work.plan.rungs[1].scratch = work.plan.rungs[0].scratch;
    }
    assert_eq!(bench.completed(order).chunking, "tiles of 64");
}

#[test]
fn out_of_memory_on_the_last_rung_names_the_holders() {
    let folder = tempfile::tempdir().unwrap();
    let glutton = write_model(
        folder.path(),
        "glutton",
        &format!(r#","real_scratch":{{"decode":{}}}"#, 4096 * MIB),
    );
    let mut bench = bench("200MiB");
    bench.world.hold("blender", Some(41), Bytes::mib(50));
    let Outcome::Failed(Failure::OutOfMemory {
        stage,
        needed,
        usable,
        holders,
    }) = bench.run_stage(&glutton, "decode")
    else {
        panic!("it cannot fit")
    };
    assert_eq!(stage, "decode");
    assert_eq!(needed, Bytes::mib(10 + 16), "the last rung's peak");
    assert_eq!(usable, Bytes::mib(140));
    assert_eq!(holders[0].name, "blender");
    assert_eq!(retries(&bench), 3, "the same again, strips, tiles");
    assert_eq!(bench.resident(), ["instant:glutton-vae"]);
}

#[test]
fn denoising_is_retried_only_once() {
    let folder = tempfile::tempdir().unwrap();
    let greedy = write_model(
        folder.path(),
        "greedy",
        &format!(r#","real_scratch":{{"denoise":{}}}"#, 4096 * MIB),
    );
    let mut bench = bench("200MiB");
    let outcome = bench.run_stage(&greedy, "denoise");
    assert!(matches!(outcome, Outcome::Failed(Failure::OutOfMemory { stage, .. }) if stage == "denoise"));
    assert_eq!(retries(&bench), 1);
}

#[test]
fn slack_is_trimmed_before_a_stage_is_retried() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let other = write_model(folder.path(), "n", "");
    // "decode" leaves 64 MiB of slack, which components cannot use without a trim.
    let mut bench = bench("180MiB,slack=keep");
    assert!(matches!(bench.run_stage(&path, "decode"), Outcome::Completed(_)));
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::mib(64));
    let outcome = bench.run_stage(&other, "denoise");
    assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
}

#[test]
fn a_stage_that_depends_on_slack_has_it_returned_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("180MiB,slack=keep");
    bench.run_stage(&path, "decode");
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::mib(64));
    let order = bench.stage(&path, "decode");
    let memory = bench
        .completed(order)
        .memory
        .expect("a stage tells of the card's memory");
    assert_eq!(
        memory.largest_block, None,
        "slack and free memory are each enough"
    );
    assert_eq!(memory.before.accounts.components, Bytes::mib(10));
    assert_eq!(
        (memory.before.accounts.scratch, memory.before.accounts.slack),
        (Bytes::ZERO, Bytes::mib(64))
    );
    for summary in [memory.before, memory.after] {
        assert_eq!(summary.accounts.sum(), summary.total);
    }

    // 46 MiB are free then, so that 64 are there only together with pieces of slack.
    let load = bench.load(&path, &["text_encoder", "text_encoder_2"]);
    bench.completed(load);
    let order = bench.stage(&path, "decode");
    let completed = bench.completed(order);
    let memory = completed.memory.unwrap();
    assert_eq!(memory.before.accounts.slack, Bytes::ZERO, "given back");
    assert_eq!(memory.largest_block, Some(completed.predicted_scratch));
}

#[test]
fn a_stage_reserves_its_scratch_where_little_else_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    for (card, reserves) in [
        ("1GiB", false),
        ("180MiB,slack=keep", false),
        ("130MiB,slack=keep", true),
    ] {
        let mut bench = bench(card);
        bench.run_stage(&path, "decode");
        // The second stage finds slack of the first.
        bench.run_stage(&path, "decode");
        let calls = bench.calls();
        let reserved = calls.iter().filter(|call| *call == "reserve 64.0 MiB").count();
        assert_eq!(reserved, if reserves { 2 } else { 0 }, "{card}: {calls:?}");
        if reserves {
            let last = calls
                .iter()
                .rposition(|call| call.starts_with("reserve"))
                .unwrap();
            assert_eq!(calls[last - 1], "trim", "slack is returned first: {calls:?}");
        }
    }
}

#[test]
fn the_report_of_a_stage_has_the_largest_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB,largest=40MiB");
    let order = bench.stage(&path, "decode");
    let completed = bench.completed(order);
    assert_eq!(
        completed.chunking, "strips of 16",
        "64 MiB are not there in one piece"
    );
    assert_eq!(
        completed.memory.unwrap().largest_block,
        Some(Bytes::mib(32)),
        "all that strips need"
    );
}

#[test]
fn a_smaller_rung_is_preferred_to_an_eviction() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("150MiB");
    let order = bench.load(&path, &["transformer"]);
    bench.run(order);
    let order = bench.stage(&path, "decode");
    let completed = bench.completed(order);
    assert_eq!(completed.chunking, "strips of 16");
    assert_eq!(bench.resident().len(), 2, "the transformer stays");
}

#[test]
fn a_panic_ends_the_stage_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = write_model(folder.path(), "faulty", r#","panic_at":"denoise""#);
    let mut bench = bench("1GiB");
    let Outcome::Failed(Failure::Internal(message)) = bench.run_stage(&faulty, "denoise") else {
        panic!("it panics")
    };
    assert!(message.contains("panicked"), "{message}");
    assert!(
        matches!(bench.run_stage(&faulty, "decode"), Outcome::Completed(_)),
        "the card goes on"
    );
    bench.unload_all();
    assert_eq!(
        bench.resident(),
        Vec::<String>::new(),
        "no tensor was left behind"
    );
}

#[test]
fn a_result_that_is_not_finite_names_component_and_step() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = write_model(folder.path(), "faulty", r#","not_finite_at_step":3"#);
    let mut bench = bench("1GiB");
    let outcome = bench.run_stage(&faulty, "denoise");
    let expected = Failure::NotFinite {
        component: "transformer".into(),
        step: 3,
    };
    assert_eq!(outcome, Outcome::Failed(expected));
    assert_eq!(retries(&bench), 0);
}

#[test]
fn invalid_input_is_refused() {
    let mut bench = bench("1GiB");
    let mut order = bench.stage(&sample("small"), "decode");
    if let Work::Stage(work) = &mut order.work {
        let odd = HostTensor {
            dtype: model::HostType::F32,
            shape: vec![1, 2],
            data: vec![0; 8].into(),
        };
        work.values.insert("latent".into(), odd);
    }
    assert!(matches!(bench.run(order), Outcome::Failed(Failure::BadInput(_))));
    let mut order = bench.stage(&sample("small"), "decode");
    if let Work::Stage(work) = &mut order.work {
        work.plan.rungs.clear();
    }
    assert!(matches!(bench.run(order), Outcome::Failed(Failure::BadInput(_))));
}

#[test]
fn a_stage_is_cancelled_between_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    bench.run_stage(&path, "denoise");
    let order = bench.stage(&path, "denoise");
    let steps = |bench: &Bench| {
        bench
            .progress()
            .iter()
            .filter(|p| matches!(p, Progress::Step { .. }))
            .count()
    };
    let before = steps(&bench);
    // The checks come before the start, before the stage, before its first, second and third step.
    bench.link.cancel_in.set(Some(5));
    assert_eq!(bench.run(order), Outcome::Cancelled);
    assert_eq!(steps(&bench) - before, 2);
    assert_eq!(bench.resident().len(), 1);
}

#[test]
fn previews_are_rate_limited_as_requested() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    let previews = |bench: &mut Bench, interval: u32| {
        let mut wanted = request(&*bench.open(&path));
        (wanted.preview, wanted.steps) = (true, 10);
        let mut order = bench.stage_of(&path, "denoise", wanted);
        if let Work::Stage(work) = &mut order.work {
            work.preview_interval_ms = interval;
        }
        let before = bench.progress().len();
        bench.completed(order);
        let all = bench.progress()[before..].to_vec();
        let steps = all.iter().filter_map(|p| match p {
            Progress::Preview {
                step,
                width: 8,
                height: 8,
                rgb,
            } if rgb.len() == 192 => Some(*step),
            _ => None,
        });
        steps.collect::<Vec<u32>>()
    };
    assert_eq!(previews(&mut bench, 0), Vec::<u32>::new());
    // The clock is stopped: after the first, no preview is due.
    assert_eq!(previews(&mut bench, 100), [1]);
    assert_eq!(
        bench.resident(),
        ["instant:m-transformer", "instant:m-vae"],
        "the decoder is resident beside it"
    );
}

#[test]
fn learned_peaks_do_not_change_the_real_demand() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    for kind in ["encode_text", "denoise", "decode"] {
        let mut order = bench.stage(&path, kind);
        let Work::Stage(work) = &mut order.work else {
            panic!("it is a stage")
        };
        let needed = work.plan.rungs[0].scratch;
        work.plan.rungs[0].scratch += Bytes::mib(16);
        let completed = bench.completed(order);
        assert_eq!(completed.predicted_scratch, needed + Bytes::mib(16));
        assert_eq!(completed.peak_scratch, needed);
    }
}

#[test]
fn a_load_is_reported_as_started_once_its_components_are_resident() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("1GiB");
    for _ in 0..2 {
        bench.link.events.clear();
        let order = bench.load(&path, &["vae"]);
        bench.completed(order);
        let starts: Vec<Progress> = bench.progress().into_iter().filter(is_start).collect();
        assert!(matches!(&starts[..], [Progress::Started { chunking, .. }] if chunking.is_empty()));
        assert!(
            bench.progress().last().is_some_and(is_start),
            "what it brings in comes first"
        );
    }

    let mut bench = bench_with("100MiB", engine::card::CardSettings::default());
    let order = bench.load(&path, &["transformer"]);
    assert!(matches!(bench.run(order), Outcome::Never { .. }));
    assert!(!bench.progress().iter().any(is_start), "it never began");
}

fn is_start(progress: &Progress) -> bool {
    matches!(progress, Progress::Started { .. })
}
