//! Swaps of models. `a` and `b` have 17 GiB with their common T5 and do not fit together; `small` fits beside either.

use std::collections::BTreeSet;
use std::time::Duration;

use engine::Error;
use engine::JobState;
use engine::job::{JobEventKind, JobReport, JobWork};
use engine::messages::{Command, Failure, Order, Outcome, Shortage};
use engine::queue::{Job, Queue, Settings};
use residency::{Bytes, WaitCause};
use tokio::time::Instant;

use crate::fixture::{entry, load, picture, swap};
use crate::worker::{
    Wire, Worker, at_rest, cancelled_by, completed, end, events, one_card, settle, stage_of, start,
};

/// Scripted fate of an order.
enum Fate {
    Well,
    /// Its components are loaded, then it ends like this.
    Ends(Outcome),
    Dies,
    /// It fails: memory is foreign for a moment.
    Waits,
    /// It runs until it is cancelled.
    Cancelled,
}

/// Scripts a worker until a job has ended, and returns the job's events. `fate` decides each order.
async fn play(
    queue: &Queue,
    worker: &mut Worker,
    mut job: Job,
    mut fate: impl FnMut(&Order) -> Fate,
) -> Vec<JobEventKind> {
    let id = job.id.clone();
    let listening = tokio::spawn(async move { events(&mut job).await });
    for _ in 0..1000 {
        settle().await;
        match worker.try_next() {
            Some(Wire::Command(Command::Run(order))) => match fate(&order) {
                Fate::Well => worker.complete(&order),
                Fate::Ends(outcome) => {
                    let outcome = worker.begin(&order).err().unwrap_or(outcome);
                    worker.finish(order.ticket, outcome);
                }
                Fate::Dies => {
                    worker.die();
                    settle().await;
                    worker.ready();
                }
                Fate::Waits => worker.finish(order.ticket, Outcome::Wait(taken())),
                Fate::Cancelled => {
                    worker.begin(&order).unwrap();
                    queue.cancel(&id, "ann".to_owned()).await.unwrap();
                }
            },
            Some(Wire::Command(Command::Unload { id, components })) => worker.unload(id, &components),
            Some(Wire::Command(Command::Cancel(ticket))) => worker.finish(ticket, Outcome::Cancelled),
            Some(_) => panic!("that was not to be expected"),
            None if listening.is_finished() => return listening.await.unwrap(),
            None => {}
        }
    }
    panic!("it does not end");
}

async fn resident(queue: &Queue, worker: &mut Worker, name: &str) {
    let job = queue.submit(load(name, "me", &[])).await.unwrap();
    play(queue, worker, job, |_| Fate::Well).await;
}

/// Names of the resident components, e.g. `a transformer`.
fn on_card(worker: &Worker) -> BTreeSet<String> {
    let name = |id: &str| {
        id.trim_start_matches("path:/")
            .replace('#', " ")
            .replace("@F32", "")
    };
    worker
        .ledger
        .residents()
        .map(|r| name(&r.component.id.0))
        .collect()
}

fn whole(name: &str) -> BTreeSet<String> {
    [
        format!("{name} transformer"),
        format!("{name} vae"),
        "t5 text_encoder_2".into(),
    ]
    .into()
}

fn report(seen: &[JobEventKind]) -> &JobReport {
    match seen.last() {
        Some(JobEventKind::Done(report)) => report,
        other => panic!("{other:?}"),
    }
}

fn restorings(seen: &[JobEventKind]) -> usize {
    let is_one = |event: &&JobEventKind| matches!(event, JobEventKind::Retrying { reason, stage, .. } if reason == "RESTORING" && **stage == *"restore");
    seen.iter().filter(is_one).count()
}

fn stages(seen: &[JobEventKind]) -> Vec<&str> {
    report(seen).stages.iter().map(|stage| &*stage.name).collect()
}

fn pins(worker: &Worker) -> impl Iterator<Item = &residency::ComponentId> {
    worker.standing.pins.iter().flat_map(|(_, ids)| ids)
}

fn pinned_by_worker(worker: &Worker) -> BTreeSet<String> {
    pins(worker).map(|id| id.0.to_string()).collect()
}

/// Model `a` is resident, pinned, and held by a client.
async fn kept_a() -> (Queue, Worker, String) {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    queue.pin(entry("a")).await.unwrap();
    let hold = queue
        .hold(entry("a"), "client".into(), Duration::from_secs(3600))
        .await
        .unwrap();
    settle().await;
    assert!(worker.receives_no_command().await);
    (queue, worker, hold)
}

async fn pinned(queue: &Queue) -> Vec<String> {
    queue.status_now().await.pinned.clone()
}

#[tokio::test(start_paused = true)]
async fn a_swap_that_exceeds_the_card_is_offered_formats_that_fit_without_the_old_model() {
    let (queue, _worker, _hold) = kept_a().await;
    let mut spec = swap("b", "a", "me");
    spec.options.headroom = Bytes::gib(8); // 17 GiB beside it are more than the card
    let mut job = queue.submit(spec).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!("it exceeds the card")
    };
    let labels = shortfall
        .fallbacks
        .iter()
        .map(|fallback| fallback.change.label.as_str());
    let parts: Vec<&str> = labels.filter(|label| label.starts_with("components")).collect();
    assert_eq!(
        parts,
        ["components transformer, text_encoder_2", "components vae"]
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_swap_keeps_the_old_model_until_the_new_one_is_proven_if_both_fit() {
    let (queue, mut worker, hold) = kept_a().await;
    let job = queue.submit(swap("small", "a", "me")).await.unwrap();
    let mut order = worker.order().await;
    for stage in ["load", "encode_text", "denoise", "decode"] {
        assert_eq!(stage_of(&order), stage);
        assert!(on_card(&worker).is_superset(&whole("a")));
        assert!(
            worker
                .standing
                .holds
                .iter()
                .any(|(id, ids)| id.contains("swap") && ids.len() == 2)
        );
        worker.complete(&order);
        if stage == "decode" {
            break;
        }
        order = worker.order().await;
    }
    let seen = play(&queue, &mut worker, job, |_| panic!("nothing is left to do")).await;
    assert_eq!(
        stages(&seen),
        ["load", "encode_text", "denoise", "decode", "unload"]
    );
    let freed: Vec<_> = report(&seen)
        .freed
        .iter()
        .map(|f| (&*f.component.name, f.freed))
        .collect();
    assert_eq!(freed, [("transformer", Bytes::gib(12)), ("vae", Bytes::gib(1))]);
    assert!(report(&seen).kept.is_empty() && restorings(&seen) == 0);
    assert!(
        !seen
            .iter()
            .any(|event| matches!(event, JobEventKind::Piece { .. } | JobEventKind::Latent { .. }))
    );
    assert_eq!(on_card(&worker), whole("small"));
    assert_eq!(pinned(&queue).await, ["small"]);
    assert!(worker.receives_no_command().await);
    assert!(pins(&worker).all(|id| worker.ledger.is_resident(id)));
    let [(held, ids)] = &worker.standing.holds[..] else {
        panic!()
    };
    assert!(*held == hold && ids.len() == 3 && ids.iter().all(|id| worker.ledger.is_resident(id)));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_swap_unloads_the_old_model_first_if_both_do_not_fit() {
    let (queue, mut worker, _) = kept_a().await;
    let job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!("the old one leaves first")
    };
    assert_eq!(components.len(), 2, "what they share stays");
    assert_eq!(pinned(&queue).await, ["a"], "its pin is not off");
    worker.unload(id, &components);
    let mut orders = Vec::new();
    let seen = play(&queue, &mut worker, job, |order| {
        orders.push(stage_of(order));
        Fate::Well
    })
    .await;
    assert_eq!(orders, ["load", "encode_text", "denoise", "decode"]);
    assert_eq!(
        stages(&seen),
        ["unload", "load", "encode_text", "denoise", "decode"]
    );
    assert_eq!(
        (on_card(&worker), pinned(&queue).await),
        (whole("b"), vec!["b".to_owned()])
    );
    assert!(worker.receives_no_command().await && pinned_by_worker(&worker).len() == 3);
    at_rest(&queue).await;
}

fn not_finite() -> Outcome {
    let component = "transformer".to_owned();
    Outcome::Failed(Failure::NotFinite { component, step: 1 })
}

fn damaged() -> Outcome {
    let message = "it is damaged".to_owned();
    Outcome::Failed(Failure::Model { message })
}

fn out_of_memory() -> Outcome {
    Outcome::Failed(Failure::OutOfMemory {
        stage: "denoise".into(),
        needed: Bytes::gib(3),
        usable: Bytes::gib(2),
        holders: Vec::new(),
    })
}

/// Foreign memory, in the worker's ledger.
fn taken() -> Shortage {
    Shortage {
        short: Bytes::gib(1),
        needed: Bytes::gib(1),
        usable: Bytes::ZERO,
        cause: WaitCause::Foreign,
        holders: Vec::new(),
    }
}

/// A proof with a picture of another size than requested.
fn another_picture(order: &Order) -> Outcome {
    let Outcome::Completed(mut report) = completed(order, Vec::new()) else {
        panic!()
    };
    report.values.clear();
    Outcome::Completed(report)
}

type Failing = (&'static str, fn(&Order) -> Fate, fn(&Error) -> bool);

const FAILURES: [Failing; 7] = [
    (
        "load",
        |_| Fate::Ends(damaged()),
        |e| matches!(e, Error::ModelDamaged(_)),
    ),
    ("load", |_| Fate::Cancelled, |e| *e == cancelled_by("ann")),
    (
        "encode_text",
        |_| Fate::Ends(not_finite()),
        |e| matches!(e, Error::NotFinite { .. }),
    ),
    (
        "denoise",
        |_| Fate::Ends(out_of_memory()),
        |e| matches!(e, Error::OutOfMemory(_)),
    ),
    (
        "denoise",
        |_| Fate::Dies,
        |e| matches!(e, Error::WorkerDied { deaths: 2, .. }),
    ),
    ("denoise", |_| Fate::Cancelled, |e| *e == cancelled_by("ann")),
    (
        "decode",
        |order| Fate::Ends(another_picture(order)),
        |e| matches!(e, Error::ModelDamaged(_)),
    ),
];

#[tokio::test(start_paused = true)]
async fn a_failed_swap_restores_the_old_model() {
    for new in ["small", "b"] {
        for (number, (stage, fate, is_expected)) in FAILURES.iter().enumerate() {
            let what = format!("{new}, failure {number} in {stage}");
            let (queue, mut worker, hold) = kept_a().await;
            let job = queue.submit(swap(new, "a", "me")).await.unwrap();
            let mut orders = Vec::new();
            let seen = play(&queue, &mut worker, job, |order| {
                orders.push((stage_of(order), order.model.key.clone()));
                let own = order.model.key == new && stage_of(order) == *stage;
                if own { fate(order) } else { Fate::Well }
            })
            .await;
            let Some(JobEventKind::Failed(error)) = seen.last() else {
                panic!("{what}: {seen:?}")
            };
            assert!(is_expected(error), "{what}: {error:?}");
            assert_eq!(on_card(&worker), whole("a"), "{what}: {orders:?}");
            let died = matches!(error, Error::WorkerDied { .. });
            let left = new == "b" || died; // a worker's death takes all with it
            assert_eq!(restorings(&seen), usize::from(left), "{what}: {seen:?}");
            if !left {
                assert!(!orders.iter().any(|(_, key)| key == "a"), "{what}: it never left");
            }
            assert_eq!(pinned(&queue).await, ["a"], "{what}");
            assert!(worker.receives_no_command().await);
            assert_eq!(pinned_by_worker(&worker).len(), 3, "{what}");
            let [(held, _)] = &worker.standing.holds[..] else {
                panic!("{what}")
            };
            assert_eq!(*held, hold);
            at_rest(&queue).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_restore_after_out_of_memory_is_completed() {
    for interruption in ["a death", "memory taken meanwhile"] {
        let (queue, mut worker, _) = kept_a().await;
        let job = queue.submit(swap("b", "a", "me")).await.unwrap();
        let mut interrupted = false;
        let seen = play(&queue, &mut worker, job, |order| {
            match (order.model.key.as_str(), stage_of(order)) {
                ("b", "denoise") => Fate::Ends(out_of_memory()),
                ("a", _) if !std::mem::replace(&mut interrupted, true) => match interruption {
                    "a death" => Fate::Dies,
                    _ => Fate::Waits,
                },
                _ => Fate::Well,
            }
        })
        .await;
        assert!(interrupted, "{interruption}");
        let last = seen.last();
        assert!(
            matches!(last, Some(JobEventKind::Failed(Error::OutOfMemory(_)))),
            "{interruption}: {last:?}"
        );
        assert_eq!(on_card(&worker), whole("a"), "{interruption}");
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn cancelling_a_swap_during_the_unload_restores_the_old_model() {
    let (queue, mut worker, _) = kept_a().await;
    let job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    assert!(queue.cancel(&job.id, "ann".to_owned()).await.unwrap());
    worker.unload(id, &components);
    let mut orders = Vec::new();
    let seen = play(&queue, &mut worker, job, |order| {
        orders.push(order.model.key.clone());
        Fate::Well
    })
    .await;
    assert!(orders == ["a"] && restorings(&seen) == 1);
    assert!(matches!(
        seen.last(),
        Some(JobEventKind::Failed(Error::Cancelled(_)))
    ));
    assert_eq!(on_card(&worker), whole("a"));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_during_a_swap_restores_the_old_model() {
    let (queue, mut worker, _) = kept_a().await;
    let mut spec = swap("b", "a", "me");
    spec.options.deadline = Some(Instant::now() + Duration::from_secs(5));
    let job = queue.submit(spec).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    worker.unload(id, &components);
    let order = worker.order().await;
    worker.begin(&order).unwrap();
    drop(job);
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!()
    };
    worker.finish(ticket, Outcome::Cancelled);
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!("what came in leaves again")
    };
    worker.unload(id, &components);
    let restore = worker.order().await;
    tokio::time::sleep(Duration::from_secs(10)).await; // past the deadline, with nobody there
    worker.complete(&restore);
    assert!(worker.receives_no_command().await);
    assert_eq!(on_card(&worker), whole("a"));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn jobs_of_the_old_model_queue_during_a_swap_without_spending_patience() {
    let (queue, mut worker, _) = kept_a().await;
    let job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    let waiting = queue.submit(picture("a", "you", "a cat")).await.unwrap();
    settle().await;
    worker.unload(id, &components);
    worker.set_foreign(Bytes::gib(10)); // the swap has to wait in the middle
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(worker.try_next().is_none());
    }
    let states: Vec<_> = queue
        .jobs(false)
        .await
        .into_iter()
        .map(|job| (job.call.as_str(), job.state))
        .collect();
    assert_eq!(
        states,
        [("Load", JobState::Waiting), ("GenerateImage", JobState::Queued)]
    );
    worker.set_foreign(Bytes::ZERO);
    let mut orders = Vec::new();
    let whose = |order: &Order| match order.job == *waiting.id {
        true => "waits",
        false => "swap",
    };
    let swapped = play(&queue, &mut worker, job, |order| {
        orders.push((whose(order), stage_of(order)));
        match orders.len() {
            1 => Fate::Ends(damaged()),
            _ => Fate::Well,
        }
    });
    swapped.await;
    assert!(
        orders.starts_with(&[("swap", "load"), ("swap", "load")]),
        "first the old model is back: {orders:?}"
    );
    let seen = play(&queue, &mut worker, waiting, |_| Fate::Well).await;
    assert!(
        seen.iter()
            .all(|event| !matches!(event, JobEventKind::Waiting { .. }))
    );
    assert_eq!(
        report(&seen).resident_already.len(),
        3,
        "nothing of it had to be loaded"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_swap_unloads_the_old_model_when_the_worker_reports_a_shortage() {
    let (queue, mut worker, _) = kept_a().await;
    let job = queue.submit(swap("small", "a", "me")).await.unwrap();
    let order = worker.order().await;
    worker.set_foreign(Bytes::gib(6)); // which the queue did not know
    let Err(outcome) = worker.begin(&order) else {
        panic!("it does not fit")
    };
    worker.finish(order.ticket, outcome);
    let seen = play(&queue, &mut worker, job, |_| Fate::Well).await;
    assert_eq!(
        stages(&seen),
        ["unload", "load", "encode_text", "denoise", "decode"]
    );
    assert_eq!(on_card(&worker), whole("small"));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_restore_does_not_hide_the_first_failure() {
    let (queue, mut worker, _) = kept_a().await;
    let job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let seen = play(&queue, &mut worker, job, |order| match order.model.key.as_str() {
        "b" => Fate::Ends(not_finite()),
        _ => Fate::Ends(damaged()),
    })
    .await;
    assert!(matches!(
        seen.last(),
        Some(JobEventKind::Failed(Error::NotFinite { .. }))
    ));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_death_during_a_swap_loses_no_model() {
    // The generation in which it dies: 0 unloads the old model, 1 unloads the new one, 2 restores the old one.
    for moment in 0..3 {
        let (queue, mut worker, _) = kept_a().await;
        let job = queue.submit(swap("b", "a", "me")).await.unwrap();
        let (mut unloads, mut died) = (0, false);
        let mut job = Some(job);
        let mut listening = None;
        for _ in 0..200 {
            if let Some(mut job) = job.take() {
                listening = Some(tokio::spawn(async move { events(&mut job).await }));
            }
            settle().await;
            let mut dies = false;
            match worker.try_next() {
                Some(Wire::Command(Command::Unload { id, components })) => {
                    dies = !died && unloads == moment;
                    unloads += 1;
                    if !dies {
                        worker.unload(id, &components);
                    }
                }
                Some(Wire::Command(Command::Run(order))) if order.model.key == "b" => {
                    let outcome = worker.begin(&order).err().unwrap_or_else(damaged);
                    worker.finish(order.ticket, outcome);
                }
                Some(Wire::Command(Command::Run(order))) => {
                    dies = !died && moment == 2;
                    if !dies {
                        worker.complete(&order);
                    }
                }
                _ => {}
            }
            if dies {
                died = true;
                worker.die();
                settle().await;
                worker.ready();
            }
        }
        let seen = listening.unwrap().await.unwrap();
        assert!(died, "moment {moment} came");
        assert!(
            matches!(seen.last(), Some(JobEventKind::Failed(Error::ModelDamaged(_)))),
            "{seen:?}"
        );
        assert_eq!(
            (on_card(&worker), restorings(&seen)),
            (whole("a"), 1),
            "moment {moment}"
        );
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_aborts_a_swap() {
    let (queue, mut worker, _) = kept_a().await;
    let mut job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    worker.unload(id, &components);
    let order = worker.order().await;
    worker.finish(order.ticket, damaged());
    let order = worker.order().await;
    assert_eq!(order.model.key, "a");
    let drain = tokio::spawn(queue.drain(Instant::now()));
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!()
    };
    worker.finish(ticket, Outcome::Cancelled);
    drain.await.unwrap();
    assert!(matches!(end(&mut job).await, Err(Error::ModelDamaged(_))));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_may_be_proven_without_a_replacement() {
    let (queue, mut worker, _) = kept_a().await;
    let mut spec = load("small", "me", &[]);
    spec.work = JobWork::Load {
        components: Vec::new(),
        replace: None,
        prove: true,
    };
    let job = queue.submit(spec.clone()).await.unwrap();
    let seen = play(&queue, &mut worker, job, |_| Fate::Well).await;
    assert_eq!(stages(&seen), ["load", "encode_text", "denoise", "decode"]);
    let job = queue.submit(spec).await.unwrap();
    let seen = play(&queue, &mut worker, job, |order| match stage_of(order) {
        "decode" => Fate::Ends(another_picture(order)),
        _ => Fate::Well,
    })
    .await;
    assert!(matches!(
        seen.last(),
        Some(JobEventKind::Failed(Error::ModelDamaged(_)))
    ));
    assert!(on_card(&worker).is_superset(&whole("a")));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn replacing_a_model_that_is_not_resident_only_proves_the_new_one() {
    let (queue, mut worker) = one_card().await;
    queue.pin(entry("a")).await.unwrap();
    let job = queue.submit(swap("b", "a", "me")).await.unwrap();
    let seen = play(&queue, &mut worker, job, |_| Fate::Well).await;
    assert_eq!(stages(&seen), ["load", "encode_text", "denoise", "decode"]);
    assert_eq!(
        (on_card(&worker), pinned(&queue).await),
        (whole("b"), vec!["b".to_owned()])
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_swap_runs_on_the_old_models_card_and_unloads_it_everywhere() {
    let settings = Settings {
        headroom: Bytes::ZERO,
        ..Settings::default()
    };
    let (queue, workers) = start(settings, 2);
    let [mut first, mut second]: [Worker; 2] = workers.try_into().ok().unwrap();
    first.ready();
    second.ready();
    settle().await;
    let mut spec = load("a", "me", &[]);
    spec.options.card_hint = "sim:1".into();
    let job = queue.submit(spec).await.unwrap();
    play(&queue, &mut second, job, |_| Fate::Well).await;
    let mut spec = load("a", "me", &["vae"]);
    spec.options.card_hint = "sim:0".into();
    let job = queue.submit(spec).await.unwrap();
    play(&queue, &mut first, job, |_| Fate::Well).await;
    let mut job = queue.submit(swap("small", "a", "me")).await.unwrap();
    for _ in 0..4 {
        second.work(1).await;
    }
    for worker in [&mut first, &mut second] {
        let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
            panic!()
        };
        worker.unload(id, &components);
    }
    let seen = events(&mut job).await;
    let cards: Vec<_> = report(&seen)
        .freed
        .iter()
        .map(|freed| freed.card.as_str())
        .collect();
    assert_eq!(cards, ["sim:0", "sim:1", "sim:1"]);
    assert_eq!(
        (on_card(&first), on_card(&second)),
        (BTreeSet::new(), whole("small"))
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_invalid_swap_is_refused() {
    let (queue, _worker) = one_card().await;
    let mut part = swap("b", "a", "me");
    if let JobWork::Load { components, .. } = &mut part.work {
        components.push("vae".into());
    }
    for (spec, field) in [(part, "components"), (swap("a", "a", "me"), "replace")] {
        let Err(Error::Invalid(problems)) = queue.submit(spec).await else {
            panic!()
        };
        assert_eq!(problems[0].field, field);
    }
    assert!(matches!(
        queue.submit(swap("a", "broken", "me")).await,
        Err(Error::ModelDamaged(_))
    ));
    let mut job = queue.submit(swap("large", "a", "me")).await.unwrap();
    assert!(matches!(end(&mut job).await, Err(Error::NeverFits(_))));
    at_rest(&queue).await;
}

/// Scripts a swap of `old` for `new` and returns its orders; the worker dies in its first `dies_in`.
async fn orders_of_swap(
    queue: &Queue,
    worker: &mut Worker,
    new: &str,
    old: &str,
    dies_in: &str,
) -> Vec<&'static str> {
    let job = queue.submit(swap(new, old, "me")).await.unwrap();
    let (mut orders, mut has_died) = (Vec::new(), false);
    let seen = play(queue, worker, job, |order| {
        orders.push(stage_of(order));
        if stage_of(order) == dies_in && !std::mem::replace(&mut has_died, true) {
            return Fate::Dies;
        }
        Fate::Well
    })
    .await;
    let encoded: Vec<bool> = report(&seen)
        .stages
        .iter()
        .filter(|stage| *stage.name == *"encode_text")
        .map(|stage| stage.cached)
        .collect();
    assert_eq!(encoded, [!orders.contains(&"encode_text")], "told in the report");
    orders
}

#[tokio::test(start_paused = true)]
async fn a_proof_uses_cached_text_only_of_encoders_that_were_resident() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, "a").await;
    let worker = &mut worker;
    let whole_proof = ["load", "encode_text", "denoise", "decode"];
    let known_text = ["load", "denoise", "decode"];
    let nowhere = "";

    let first = orders_of_swap(&queue, worker, "small", "a", nowhere).await;
    assert_eq!(first, whole_proof, "nobody has encoded it before");
    let second = orders_of_swap(&queue, worker, "a", "small", nowhere).await;
    assert_eq!(second, known_text, "the same encoders have");

    let in_a_new_worker = orders_of_swap(&queue, worker, "small", "a", "load").await;
    assert_eq!(in_a_new_worker[0], "load");
    assert_eq!(
        in_a_new_worker[1..],
        whole_proof,
        "the encoders came in again after its death"
    );

    worker.die();
    settle().await;
    worker.ready();
    settle().await;
    let fresh = orders_of_swap(&queue, worker, "a", "small", nowhere).await;
    assert_eq!(fresh, whole_proof, "the encoders came in for the swap");
    at_rest(&queue).await;
}
