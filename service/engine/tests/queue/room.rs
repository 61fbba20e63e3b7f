//! Memory: patience, unloads, holds, and room for other programs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use engine::JobState;
use engine::job::{JobEvent, JobEventKind};
use engine::library::Entry;
use engine::messages::{Answer, Command, Outcome, Shortage, Work};
use engine::queue::{Job, Queue, Settings};
use engine::{CancelledBy, ChangedTo, Error};
use residency::{Bytes, ComponentId, WaitCause};

use crate::fixture::{COUNTED, OPENINGS_COUNTED, REDUCTIONS, entry, load, picture};
use crate::worker::{Wire, Worker, at_rest, end, events, one_card, one_card_with, settle};

/// Times in milliseconds of its waiting events, and its end.
async fn ticks(job: &mut Job) -> (Vec<u64>, &'static str, JobEventKind) {
    let (mut at, mut why) = (Vec::new(), "");
    loop {
        let JobEvent { at_ms, kind } = job.next().await.expect("it ends");
        match kind {
            JobEventKind::Waiting { cause, .. } => {
                at.push(at_ms);
                why = cause;
            }
            JobEventKind::Done(_) | JobEventKind::Failed(_) => return (at, why, kind),
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn patience_for_foreign_memory_lasts_seven_seconds_and_reports_twice_a_second() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(16));
    let mut job = queue.submit(load("a", "me", &["transformer"])).await.unwrap();
    let (at, why, last) = ticks(&mut job).await;
    let every_half: Vec<u64> = (0..14).map(|n| n * 500).collect();
    assert_eq!((at, why), (every_half, "foreign"));
    let JobEventKind::Failed(Error::MemoryTaken(shortfall)) = last else {
        panic!("{last:?}")
    };
    assert_eq!(
        (shortfall.needed, shortfall.free),
        (Bytes::gib(12), Bytes::gib(8))
    );
    assert_eq!(shortfall.holders[0].name, "other processes");
    assert!(worker.receives_no_command().await);
    at_rest(&queue).await;
}

/// A card whose memory was evicted and is not shown as free yet.
async fn late_eviction() -> (Queue, Worker) {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("b", "me", &["transformer"])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    settle().await;
    let id = ComponentId::new("path:/b#transformer@F32");
    worker.ledger.begin_evict(&id).unwrap();
    worker.ledger.complete_evict(&id, worker.now()).unwrap();
    worker.publish(); // gone, and not shown as free
    settle().await;
    (queue, worker)
}

#[tokio::test(start_paused = true)]
async fn patience_for_a_late_eviction_lasts_five_seconds() {
    let (queue, _worker) = late_eviction().await;
    let mut spec = load("a", "me", &[]);
    let mut job = queue.submit(spec.clone()).await.unwrap();
    let (at, why, last) = ticks(&mut job).await;
    assert_eq!((at.len(), why), (10, "late_eviction"));
    assert!(matches!(last, JobEventKind::Failed(Error::MemoryTaken(_))));
    spec.options.patience = Some(Duration::from_secs(1));
    let mut job = queue.submit(spec).await.unwrap();
    assert_eq!(ticks(&mut job).await.0.len(), 2, "a job's own patience");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_order_names_the_components_that_its_job_needs_later() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let mut needed = Vec::new();
    for _ in 0..3 {
        let order = worker.order().await;
        let Work::Stage(stage) = &order.work else { panic!() };
        let later: Vec<&str> = stage.later.iter().map(|id| &*id.0).collect();
        needed.push(later.join(" "));
        worker.complete(&order);
    }
    end(&mut job).await.unwrap();
    let (transformer, vae) = ("path:/a#transformer@F32", "path:/a#vae@F32");
    assert_eq!(needed, [&format!("{transformer} {vae}"), vae, ""]);
}

#[tokio::test(start_paused = true)]
async fn an_order_has_what_later_stages_read_of_the_request() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let mut later = Vec::new();
    for _ in 0..3 {
        let order = worker.order().await;
        let Work::Stage(stage) = &order.work else { panic!() };
        let size = stage
            .later_request
            .as_ref()
            .and_then(|request| request.medium.size());
        // A size is none of what the text encoder reads.
        later.push((stage.later_stages.join(" "), size, stage.request.medium.size()));
        worker.complete(&order);
    }
    end(&mut job).await.unwrap();
    let whole = Some(later[1].2.expect("what is denoised has a size"));
    assert_ne!(later[0].2, whole);
    let (first, second) = ("decode denoise".to_owned(), "decode".to_owned());
    assert_eq!(later[0], (first, whole, later[0].2));
    assert_eq!(later[1], (second, whole, whole));
    assert_eq!((&*later[2].0, later[2].1), ("", None));
}

#[tokio::test(start_paused = true)]
async fn requested_patience_is_capped() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(16));
    for asked in [Duration::from_secs(86_400), Duration::MAX] {
        let mut spec = load("a", "patient", &["transformer"]);
        spec.options.patience = Some(asked);
        let mut patient = queue.submit(spec).await.unwrap();
        let small = queue.submit(load("b", "other", &["vae"])).await.unwrap();
        worker.work(1).await;
        let before = tokio::time::Instant::now();
        assert!(matches!(end(&mut patient).await, Err(Error::MemoryTaken(_))));
        assert_eq!(before.elapsed().as_secs().div_ceil(60), 10);
        drop(small);
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_that_exceeds_the_card_suggests_components() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("large", "me", &[])).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!()
    };
    assert_eq!(shortfall.stage, "load");
    assert_eq!(
        (shortfall.needed, shortfall.capacity),
        (Bytes::gib(27), Bytes::gib(24))
    );
    let told = shortfall.fallbacks[REDUCTIONS.len()..]
        .iter()
        .map(|f| (f.change.label.as_str(), f.peak, f.saved));
    let expected = [
        ("components transformer, vae", Bytes::gib(23), Bytes::gib(4)),
        ("components text_encoder_2", Bytes::gib(4), Bytes::gib(23)),
    ];
    assert_eq!(told.collect::<Vec<_>>(), expected);
    let plan = queue.plan(load("large", "me", &[]), "").await.unwrap();
    assert_eq!(
        plan.stages[0].shortfall.as_ref().map(|s| &s.fallbacks),
        Some(&shortfall.fallbacks)
    );

    let mut job = queue
        .submit(load("large", "me", &["transformer", "vae"]))
        .await
        .unwrap();
    worker.work(1).await;
    assert_eq!(end(&mut job).await, Ok(()), "as told");
    worker.set_foreign(Bytes::gib(1));
    settle().await;
    let mut spec = load("a", "me", &[]);
    spec.options.patience = Some(Duration::from_secs(1));
    let mut fits = queue.submit(spec.clone()).await.unwrap();
    worker.work(1).await;
    assert_eq!(end(&mut fits).await, Ok(()), "what fits is not split");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiting_job_starts_as_soon_as_it_fits() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(16));
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    tokio::time::sleep(Duration::from_millis(1210)).await;
    assert_eq!(queue.jobs(false).await[0].state, JobState::Waiting);
    assert!(worker.try_next().is_none());
    worker.set_foreign(Bytes::gib(2));
    settle().await;
    let Some(Wire::Command(Command::Run(order))) = worker.try_next() else {
        panic!("at once")
    };
    worker.complete(&order);
    worker.work(1).await;
    let seen = events(&mut job).await;
    let Some(JobEventKind::Done(report)) = seen.last() else {
        panic!()
    };
    assert_eq!(report.stages[1].wait.as_millis() / 10, 121);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_allows_low_memory_waits_for_late_bytes() {
    let (queue, mut worker) = late_eviction().await;
    let mut spec = load("a", "me", &[]);
    spec.options.allow_low_memory = true;
    let before = tokio::time::Instant::now();
    let mut job = queue.submit(spec).await.unwrap();
    let order = worker.order().await;
    assert!(order.allow_low_memory && before.elapsed().as_secs() == 5);
    worker.finish(order.ticket, Outcome::Cancelled); // which nobody asked for
    assert!(matches!(end(&mut job).await, Err(Error::Internal(_))));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_allows_low_memory_runs_at_once_when_nothing_is_expected_to_be_freed() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(16));
    let mut spec = load("a", "me", &["transformer"]);
    spec.options.allow_low_memory = true;
    let mut job = queue.submit(spec).await.unwrap();
    let before = tokio::time::Instant::now();
    let order = worker.order().await;
    assert!(order.allow_low_memory && before.elapsed().as_secs() == 0);
    worker.deliver(&order);
    worker.finish(order.ticket, crate::worker::completed(&order, Vec::new()));
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_order_answered_with_wait_is_sent_again_within_the_same_patience() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &["transformer"])).await.unwrap();
    let mut asked = 0;
    loop {
        tokio::select! {
            biased;
            seen = ticks(&mut job) => {
                assert!(matches!(seen.2, JobEventKind::Failed(Error::MemoryTaken(_))));
                break;
            }
            order = worker.order() => {
                asked += 1;
                let (short, usable) = (Bytes::gib(4), Bytes::gib(8));
                let shortage =
                    Shortage { short, needed: short, usable, cause: WaitCause::Foreign, holders: Vec::new() };
                worker.finish(order.ticket, Outcome::Wait(shortage));
            }
        }
    }
    assert!((13..=15).contains(&asked), "{asked}");
    at_rest(&queue).await;
}

async fn resident(queue: &Queue, worker: &mut Worker, name: &str) {
    let mut job = queue.submit(load(name, "loader", &[])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    settle().await;
}

/// Answers the next unload, and returns its components.
async fn answer_unload(worker: &mut Worker) -> usize {
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    assert!(worker.receives_no_command().await, "nothing starts before it");
    worker.unload(id, &components);
    components.len()
}

#[tokio::test(start_paused = true)]
async fn an_unload_waits_for_running_jobs_and_blocks_later_ones() {
    let (queue, mut worker) = one_card().await;
    let mut first = queue.submit(load("a", "me", &[])).await.unwrap();
    let order = worker.order().await;
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(Some(entry("a")), None).await });
    settle().await;
    let mut later = queue.submit(load("a", "me", &[])).await.unwrap();
    settle().await;
    worker.complete(&order);
    end(&mut first).await.unwrap();
    assert_eq!(answer_unload(&mut worker).await, 3);
    let report = unload.await.unwrap().unwrap();
    assert_eq!(
        (report.freed.len(), report.kept.len(), report.cancelled_jobs.len()),
        (3, 0, 0)
    );
    assert_eq!(
        report.freed.iter().map(|f| f.freed).sum::<Bytes>(),
        Bytes::gib(17)
    );
    worker.work(1).await;
    end(&mut later).await.unwrap();

    let mut running = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = worker.order().await;
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(None, Some("ann".to_owned())).await });
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!()
    };
    assert_eq!(ticket, order.ticket);
    worker.finish(ticket, Outcome::Cancelled);
    let by = CancelledBy::Unload {
        entry: None,
        client: "ann".to_owned(),
    };
    assert_eq!(end(&mut running).await, Err(Error::Cancelled(by)));
    answer_unload(&mut worker).await;
    assert_eq!(
        unload.await.unwrap().unwrap().cancelled_jobs,
        [running.id.clone()]
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn shared_pinned_and_held_components_are_not_unloaded() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    assert_eq!(queue.pin(entry("b")).await.unwrap(), ["b"]);
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(Some(entry("a")), None).await });
    assert_eq!(answer_unload(&mut worker).await, 2);
    let report = unload.await.unwrap().unwrap();
    let kept: Vec<_> = report
        .kept
        .iter()
        .map(|k| (k.component.name.as_str(), k.reason.to_string()))
        .collect();
    assert_eq!(kept, [("text_encoder_2", "shared with b".to_owned())]);

    let report = queue.unload(Some(entry("b")), None).await.unwrap();
    assert_eq!(report.kept[0].reason.to_string(), "pinned");
    queue.unpin("b").await.unwrap();
    queue
        .hold(entry("b"), "me".into(), Duration::from_secs(60))
        .await
        .unwrap();
    let report = queue.unload(Some(entry("b")), None).await.unwrap();
    assert_eq!(report.kept[0].reason.to_string(), "held by me");
    tokio::time::sleep(Duration::from_secs(61)).await;
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(Some(entry("b")), None).await });
    assert_eq!(answer_unload(&mut worker).await, 1);
    assert!(unload.await.unwrap().unwrap().kept.is_empty());
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_model_whose_files_were_removed_is_still_unpinned_and_unloaded() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    queue.pin(entry("a")).await.unwrap();
    let gone = Arc::new(Entry {
        path: "/models/broken".into(),
        ..Entry::clone(&entry("a"))
    });
    assert!(queue.pin(gone.clone()).await.is_err(), "it cannot be opened");
    assert_eq!(queue.known_entries().await.len(), 1);
    assert!(queue.unpin(&gone.key).await.unwrap().is_empty());
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(Some(gone), None).await });
    assert_eq!(answer_unload(&mut worker).await, 3);
    assert_eq!(unload.await.unwrap().unwrap().freed.len(), 3);
    let unknown = Arc::new(Entry {
        key: "unknown".into(),
        path: "/models/broken".into(),
        ..Entry::clone(&entry("a"))
    });
    let refused = queue.unload(Some(unknown), None).await;
    assert!(matches!(refused, Err(Error::ModelDamaged(_))), "{refused:?}");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_unload_opens_a_model_only_where_none_of_its_name_is_in_use() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    let elsewhere = Entry {
        path: COUNTED.into(),
        ..Entry::clone(&entry("a"))
    };
    let (asking, in_use) = (queue.clone(), Arc::new(elsewhere.clone()));
    let unload = tokio::spawn(async move { asking.unload(Some(in_use), None).await });
    assert_eq!(answer_unload(&mut worker).await, 3);
    assert_eq!(unload.await.unwrap().unwrap().freed.len(), 3);
    assert_eq!(OPENINGS_COUNTED.load(Ordering::Relaxed), 0);

    // Under a name that is not in use it may have components that are.
    let other = Entry {
        key: "other".into(),
        ..elsewhere
    };
    let report = queue.unload(Some(Arc::new(other)), None).await.unwrap();
    assert!(report.freed.is_empty());
    assert_eq!(OPENINGS_COUNTED.load(Ordering::Relaxed), 1);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn expired_holds_are_released_on_workers() {
    let (queue, mut worker) = one_card().await;
    let hold = queue
        .hold(entry("a"), "me".into(), Duration::from_secs(10))
        .await
        .unwrap();
    assert!(worker.receives_no_command().await);
    assert_eq!(worker.standing.holds[0].1.len(), 3);
    tokio::time::sleep(Duration::from_secs(8)).await;
    let renewed = queue
        .hold(entry("a"), "me".into(), Duration::from_secs(10))
        .await
        .unwrap();
    assert_eq!(renewed, hold);
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(worker.receives_no_command().await);
    assert_eq!(worker.standing.holds.len(), 1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(worker.receives_no_command().await);
    assert!(worker.standing.holds.is_empty() && !queue.release_hold(&hold).await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_after_a_hold_is_queued_and_spends_no_patience() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    let hold = queue
        .hold(entry("a"), "me".into(), Duration::from_secs(3600))
        .await
        .unwrap();
    assert!(worker.receives_no_command().await);
    let mut job = queue.submit(load("b", "other", &["transformer"])).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(queue.jobs(false).await[0].state, JobState::Queued);
    for _ in 0..6 {
        let mut small = queue.submit(load("a", "me", &["vae"])).await.unwrap();
        worker.work(1).await;
        end(&mut small).await.unwrap();
    }
    assert!(queue.release_hold(&hold).await);
    worker.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn making_room_for_other_programs_blocks_orders() {
    let (queue, mut worker) = one_card().await;
    let asking = queue.clone();
    let reserve = tokio::spawn(async move {
        asking
            .reserve("", Bytes::gib(6), Duration::from_secs(60), "game".into())
            .await
    });
    let Wire::Command(Command::MakeRoom { id, bytes }) = worker.next().await else {
        panic!()
    };
    assert_eq!(bytes, Bytes::gib(6));
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    assert!(worker.receives_no_command().await);
    let freed = vec![];
    worker.say(engine::messages::Event::Answer {
        id,
        answer: Answer::Unloaded {
            freed,
            kept: Vec::new(),
            short: Bytes::ZERO,
        },
    });
    let reserved = reserve.await.unwrap().unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    assert_eq!(
        worker.standing.reservations,
        [(reserved.id.clone(), "game".to_owned(), Bytes::gib(6))]
    );
    settle().await;
    let mut big = queue.submit(load("a", "me", &[])).await.unwrap();
    worker.work(1).await;
    end(&mut big).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let status = queue.status().borrow().clone();
    assert_eq!(status.cards[0].reservations[0].by.label, "game");
    assert!(queue.release_reservation(&reserved.id).await);

    let mut refused = async |wanted: Bytes, short: Bytes| {
        let asking = queue.clone();
        let reserve = tokio::spawn(async move {
            asking
                .reserve("sim:0", wanted, Duration::from_secs(60), "".into())
                .await
        });
        let Wire::Command(Command::MakeRoom { id, .. }) = worker.next().await else {
            panic!()
        };
        let answer = Answer::Unloaded {
            freed: Vec::new(),
            kept: Vec::new(),
            short,
        };
        worker.say(engine::messages::Event::Answer { id, answer });
        reserve.await.unwrap().unwrap_err()
    };
    let Error::MemoryTaken(shortfall) = refused(Bytes::gib(22), Bytes::gib(2)).await else {
        panic!("there are 20 GiB")
    };
    let offered = shortfall.fallbacks.iter().map(|fallback| &fallback.change.to);
    assert!(offered.eq([&ChangedTo::Bytes(Bytes::gib(20))]));
    let Error::NeverFits(shortfall) = refused(Bytes::gib(60), Bytes::gib(40)).await else {
        panic!("the card has 24 GiB")
    };
    assert!(shortfall.capacity <= Bytes::gib(24));

    let asking = queue.clone();
    let trim = tokio::spawn(async move { asking.trim("").await });
    let Wire::Command(Command::Trim { id }) = worker.next().await else {
        panic!()
    };
    worker.say(engine::messages::Event::Answer {
        id,
        answer: Answer::Trimmed(Bytes::mib(3)),
    });
    assert_eq!(trim.await.unwrap(), Ok(Bytes::mib(3)));
    assert!(matches!(queue.trim("sim:9").await, Err(Error::Invalid(_))));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn unused_entries_are_unloaded_after_their_keep_alive() {
    let keep_alive = Some(Duration::from_secs(30));
    let (queue, mut worker) = one_card_with(Settings {
        keep_alive,
        ..Settings::default()
    })
    .await;
    resident(&queue, &mut worker, "a").await;
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert!(worker.receives_no_command().await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let Some(Wire::Command(Command::Unload { id, components })) = worker.try_next() else {
        panic!()
    };
    worker.unload(id, &components);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(worker.receives_no_command().await);
    assert!(queue.status().borrow().users.is_empty());
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn patience_is_not_spent_while_own_jobs_block() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(14));
    let mut big = queue.submit(load("a", "me", &["transformer"])).await.unwrap();
    settle().await;
    let mut small = queue.submit(load("b", "me", &["text_encoder_2"])).await.unwrap();
    let order = worker.order().await;
    worker.begin(&order).unwrap();
    let components = crate::worker::needs(&order).0.to_vec();
    let need = residency::StageNeed {
        name: "load".into(),
        components,
        scratch: Bytes::ZERO,
        headroom: Bytes::ZERO,
        later: Vec::new(),
        model: Vec::new(),
        passes: u32::MAX,
    };
    let lease = worker.ledger.lease(&need, worker.now()).unwrap();
    worker.set_foreign(Bytes::gib(12));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(queue.jobs(false).await[0].state, JobState::Queued);
    worker.ledger.release(lease, worker.now()).unwrap();
    worker.set_foreign(Bytes::gib(14));
    worker.deliver(&order);
    worker.finish(order.ticket, crate::worker::completed(&order, Vec::new()));
    end(&mut small).await.unwrap();
    let before = tokio::time::Instant::now();
    assert!(matches!(end(&mut big).await, Err(Error::MemoryTaken(_))));
    assert_eq!(before.elapsed().as_secs(), 6, "what was left of seven");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_model_may_override_the_keep_alive() {
    let (queue, mut worker) = one_card_with(Settings {
        keep_alive: Some(Duration::from_secs(30)),
        keep_alive_of: [
            ("a".to_owned(), None),
            ("b".to_owned(), Some(Duration::from_secs(5))),
        ]
        .into(),
        ..Settings::default()
    })
    .await;
    for (name, part) in [("a", "transformer"), ("b", "vae"), ("c", "transformer")] {
        let mut job = queue.submit(load(name, "loader", &[part])).await.unwrap();
        worker.work(1).await;
        end(&mut job).await.unwrap();
        settle().await;
    }
    for (seconds, leaves) in [(6, "vae"), (25, "transformer")] {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let Some(Wire::Command(Command::Unload { id, components })) = worker.try_next() else {
            panic!("{leaves} stays")
        };
        let names: Vec<&str> = components
            .iter()
            .filter_map(|id| worker.ledger.resident(id))
            .map(|resident| resident.component.name.as_str())
            .collect();
        assert_eq!(names, [leaves]);
        worker.unload(id, &components);
        settle().await;
    }
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(worker.receives_no_command().await, "a stays");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn everything_is_unloaded_after_a_long_idle_time() {
    let (queue, mut worker) = one_card_with(Settings {
        unload_when_idle: Some(Duration::from_secs(60)),
        ..Settings::default()
    })
    .await;
    let mut job = queue.submit(load("a", "loader", &["transformer"])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    tokio::time::sleep(Duration::from_secs(50)).await;
    let mut job = queue.submit(load("b", "loader", &["vae"])).await.unwrap();
    tokio::time::sleep(Duration::from_secs(100)).await;
    worker.work(1).await; // there was a job all the time
    end(&mut job).await.unwrap();
    tokio::time::sleep(Duration::from_secs(59)).await;
    assert!(worker.receives_no_command().await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let Some(Wire::Command(Command::Unload { id, components })) = worker.try_next() else {
        panic!()
    };
    assert_eq!(components.len(), 2);
    worker.unload(id, &components);
    settle().await;
    at_rest(&queue).await;
}
