//! Stages that two cards run together.

use std::time::Duration;

use engine::Error;
use engine::job::{JobEventKind, JobReport, JobSpec};
use engine::messages::{Command, Event, Failure, Order, Outcome, Progress, Shortage, Ticket, Together, Work};
use engine::queue::{Job, Queue, Settings};
use gpu::{CardDescription, CardKind, Peers};
use residency::{Bytes, WaitCause};

use crate::fixture::{load, picture, run_of};
use crate::worker::{
    Wire, Worker, at_rest, cancelled_by, completed, description, end, events, settle, stage_of, start_on,
};

/// A picture that is sampled on two cards.
fn on_two(client: &str, prompt: &str) -> JobSpec {
    let mut spec = picture("a", client, prompt);
    run_of(&mut spec).request.cards = 2;
    spec
}

fn small(client: &str) -> JobSpec {
    load("small", client, &["vae"])
}

fn settings() -> Settings {
    Settings {
        headroom: Bytes::ZERO,
        ..Settings::default()
    }
}

async fn cards<const N: usize>(descriptions: [CardDescription; N]) -> (Queue, [Worker; N]) {
    let (queue, workers) = start_on(settings(), descriptions.to_vec());
    let Ok(mut workers) = <[Worker; N]>::try_from(workers) else {
        panic!()
    };
    workers.iter_mut().for_each(Worker::ready);
    settle().await;
    (queue, workers)
}

async fn two_cards() -> (Queue, [Worker; 2]) {
    cards([description(0), description(1)]).await
}

/// The two orders of a stage, which each worker is sent one of. The worker of the first part is the first from now on.
async fn both(workers: &mut [Worker; 2]) -> [Order; 2] {
    let [one, other] = workers;
    let mut orders = [one.order().await, other.order().await];
    if orders[0].together.is_some_and(|together| together.part == 1) {
        workers.swap(0, 1);
        orders.swap(0, 1);
    }
    check_parts([&orders[0], &orders[1]]);
    orders
}

fn check_parts(orders: [&Order; 2]) {
    let parts = orders.map(|order| order.together);
    assert_eq!(parts, [0, 1].map(|part| Some(Together { part, of: 2 })));
    let [one, other] = orders;
    assert_eq!((stage_of(one), stage_of(other)), ("denoise", "denoise"));
    assert_eq!(one.job, other.job);
    assert_ne!(one.ticket, other.ticket);
}

/// A job whose text is encoded, with both orders of its sampling.
async fn sampling(queue: &Queue, workers: &mut [Worker; 2]) -> (Job, [Order; 2]) {
    let job = queue.submit(on_two("me", "a cat")).await.unwrap();
    workers[0].work(1).await;
    (job, both(workers).await)
}

async fn cancel_of(worker: &mut Worker) -> Ticket {
    match worker.next().await {
        Wire::Command(Command::Cancel(ticket)) => ticket,
        Wire::Command(other) => panic!("a cancel was expected, not {other:?}"),
        Wire::Recycle(reason) => panic!("a cancel was expected, not the end: {reason}"),
    }
}

/// Completes both parts, the first one last, and the decode after it.
async fn finish(workers: &mut [Worker; 2], orders: &[Order; 2]) {
    workers[1].complete(&orders[1]);
    settle().await;
    workers[0].complete(&orders[0]);
    settle().await;
    assert_eq!(workers[0].work(1).await.1, "decode");
}

/// Works all orders off: these jobs are done then, and nothing is left of them.
async fn all_end(queue: &Queue, workers: &mut [Worker; 2], jobs: impl IntoIterator<Item = &mut Job>) {
    while workers[0].try_work().await | workers[1].try_work().await {}
    for job in jobs {
        end(job).await.unwrap();
    }
    at_rest(queue).await;
}

fn internal(what: &str) -> Outcome {
    Outcome::Failed(Failure::Internal(what.to_owned()))
}

fn retries(events: &[JobEventKind]) -> Vec<(&str, &str)> {
    let retries = events.iter().filter_map(|event| match event {
        JobEventKind::Retrying { reason, message, .. } => Some((reason.as_str(), message.as_str())),
        _ => None,
    });
    retries.collect()
}

fn report(events: &[JobEventKind]) -> &JobReport {
    match events.last() {
        Some(JobEventKind::Done(report)) => report,
        other => panic!("the job ended with {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_stage_starts_on_both_cards_and_its_job_goes_on_by_the_first_part() {
    let (queue, mut workers) = two_cards().await;
    let mut spec = on_two("me", "a cat");
    run_of(&mut spec).request.preview = true;
    run_of(&mut spec).preview_interval_ms = 100;
    let mut job = queue.submit(spec).await.unwrap();
    workers[0].work(1).await;
    let orders = both(&mut workers).await;
    let intervals = orders.each_ref().map(|order| match &order.work {
        Work::Stage(work) => (
            work.request.cards,
            work.preview_interval_ms,
            work.plan.preview.is_some(),
        ),
        Work::Load(_) => panic!(),
    });
    assert_eq!(
        intervals,
        [(2, 100, true), (2, 0, false)],
        "one of them makes previews"
    );
    workers[1].begin(&orders[1]).unwrap();
    loop {
        match job.next().await.unwrap().kind {
            JobEventKind::Loading { card, .. } if card == "sim:1" => break,
            _ => {}
        }
    }
    workers[0].begin(&orders[0]).unwrap();
    for part in [1, 0] {
        let n = 1 + part as u32;
        workers[part].progress(orders[part].ticket, Progress::Step { n, of: 4 });
    }
    settle().await;
    let status = queue.status_now().await;
    assert!(
        status
            .cards
            .iter()
            .all(|card| card.job.as_deref() == Some(&*job.id))
    );
    workers[0].finish(orders[0].ticket, completed(&orders[0], Vec::new()));
    assert_eq!(
        cancel_of(&mut workers[1]).await,
        orders[1].ticket,
        "it is not needed any more"
    );
    workers[0].work(1).await;
    let seen = events(&mut job).await;
    workers[1].finish(orders[1].ticket, completed(&orders[1], Vec::new()));
    let stages = seen.iter().filter_map(|event| match event {
        JobEventKind::Stage { name, card, .. } => Some((&**name, card.as_str())),
        _ => None,
    });
    let stages: Vec<_> = stages.collect();
    assert_eq!(stages, [("denoise", "sim:0"), ("decode", "sim:0")]);
    let steps = seen.iter().filter_map(|event| match event {
        JobEventKind::Step { n, .. } => Some(*n),
        _ => None,
    });
    assert_eq!(steps.collect::<Vec<_>>(), [1], "those of the first part");
    let reported = report(&seen)
        .stages
        .iter()
        .map(|stage| (&*stage.name, stage.card.as_str()));
    let reported: Vec<_> = reported.collect();
    assert_eq!(reported[1], ("denoise", "sim:0 and sim:1"));
    assert_eq!(reported[2], ("decode", "sim:0"));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn offers_of_each_part_reach_the_other() {
    let (queue, mut workers) = two_cards().await;
    let (mut job, orders) = sampling(&queue, &mut workers).await;
    for (from, text) in [(0, "one"), (1, "two"), (1, "three"), (0, "four")] {
        let (ticket, offer) = (orders[from].ticket, bytes::Bytes::from(text));
        workers[from].say(Event::Offer { ticket, offer });
        let Wire::Command(Command::Offer { ticket, offer }) = workers[1 - from].next().await else {
            panic!("the other is told")
        };
        assert_eq!((ticket, &*offer), (orders[1 - from].ticket, text.as_bytes()));
    }
    let (ticket, offer) = (Ticket(u64::MAX), bytes::Bytes::from("stale"));
    workers[0].say(Event::Offer { ticket, offer });
    assert!(workers[1].receives_no_command().await);
    finish(&mut workers, &orders).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_of_one_card_is_as_it_was() {
    let (queue, mut workers) = two_cards().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    for stage in ["encode_text", "denoise", "decode"] {
        let order = workers[0].order().await;
        assert_eq!((stage_of(&order), order.together), (stage, None));
        assert!(workers[1].receives_no_command().await);
        workers[0].complete(&order);
    }
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_waits_for_its_second_card_holds_the_first() {
    let (queue, mut workers) = two_cards().await;
    let mut long = queue.submit(small("other")).await.unwrap();
    let busy = workers[0].order().await;
    let mut job = queue.submit(on_two("me", "a cat")).await.unwrap();
    workers[1].work(1).await; // the text, where there is room
    let mut short = Vec::new();
    for client in ["x", "y", "z"] {
        short.push(queue.submit(small(client)).await.unwrap());
        assert!(workers[1].receives_no_command().await, "it is held for the job");
    }
    let listed = queue.jobs(false).await;
    let waiting = listed.iter().find(|listed| listed.id == job.id).unwrap();
    assert_eq!((waiting.state, waiting.position), (engine::JobState::Queued, 0));
    workers[0].complete(&busy);
    let orders = both(&mut workers).await;
    assert_eq!(orders[0].job, *job.id);
    finish(&mut workers, &orders).await;
    all_end(
        &queue,
        &mut workers,
        short.iter_mut().chain([&mut job, &mut long]),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_job_keeps_its_card_between_stages_while_it_waits_for_the_second() {
    let (queue, mut workers) = two_cards().await;
    let mut spec = on_two("me", "a cat");
    run_of(&mut spec).count = 2;
    let mut job = queue.submit(spec).await.unwrap();
    workers[0].work(1).await;
    let orders = both(&mut workers).await;
    workers[1].complete(&orders[1]);
    workers[0].complete(&orders[0]);
    let decode = workers[0].order().await;
    let mut beside = queue.submit(small("x")).await.unwrap();
    let long = workers[1].order().await;
    assert_eq!(
        stage_of(&long),
        "load",
        "the second card is free while the first decodes"
    );
    let mut later = queue.submit(small("y")).await.unwrap();
    workers[0].complete(&decode);
    assert!(workers[0].receives_no_command().await, "the job holds its card");
    workers[1].complete(&long);
    let orders = both(&mut workers).await;
    finish(&mut workers, &orders).await;
    end(&mut job).await.unwrap();
    all_end(&queue, &mut workers, [&mut beside, &mut later]).await;
}

#[tokio::test(start_paused = true)]
async fn two_jobs_that_wait_for_a_second_card_do_not_wait_for_each_other() {
    let (queue, mut workers) = two_cards().await;
    let mut jobs = [
        queue.submit(on_two("x", "a cat")).await.unwrap(),
        queue.submit(on_two("y", "a dog")).await.unwrap(),
    ];
    let (encode, of_second) = (workers[0].order().await, workers[1].order().await);
    workers[1].complete(&of_second);
    assert!(
        workers[1].receives_no_command().await,
        "the second job waits, and holds a card"
    );
    workers[0].complete(&encode);
    let orders = both(&mut workers).await;
    assert_eq!(orders[0].job, *jobs[0].id, "the earlier one goes first");
    workers[1].complete(&orders[1]);
    workers[0].complete(&orders[0]);
    let decode = workers[0].order().await;
    assert_eq!(decode.job, *jobs[0].id);
    assert!(workers[1].receives_no_command().await);
    workers[0].complete(&decode);
    let orders = both(&mut workers).await;
    assert_eq!(orders[0].job, *jobs[1].id);
    finish(&mut workers, &orders).await;
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_stage_is_run_again_once_when_its_second_part_fails() {
    for ends_well in [true, false] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, orders) = sampling(&queue, &mut workers).await;
        workers[1].finish(orders[1].ticket, internal("no peer access"));
        assert_eq!(cancel_of(&mut workers[0]).await, orders[0].ticket);
        assert!(
            workers[1].receives_no_command().await,
            "the first part has not stopped"
        );
        workers[0].finish(orders[0].ticket, Outcome::Cancelled);
        let again = both(&mut workers).await;
        assert!(again[0].ticket != orders[0].ticket && again[1].ticket != orders[1].ticket);
        if ends_well {
            finish(&mut workers, &again).await;
        } else {
            workers[1].finish(again[1].ticket, internal("no peer access"));
            cancel_of(&mut workers[0]).await;
            workers[0].finish(again[0].ticket, Outcome::Cancelled);
        }
        let seen = events(&mut job).await;
        let why = "denoise failed on sim:1, one of its two cards (a fault of the service: no peer access); it starts again";
        assert_eq!(retries(&seen), [("PART_FAILED", why)]);
        match seen.last() {
            Some(JobEventKind::Done(_)) => assert!(ends_well),
            Some(JobEventKind::Failed(error)) => {
                assert!(!ends_well);
                assert_eq!(*error, Error::Internal("no peer access".to_owned()));
            }
            other => panic!("{other:?}"),
        }
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stage_is_run_again_once_when_the_worker_of_its_second_part_dies() {
    for ends_well in [true, false] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, orders) = sampling(&queue, &mut workers).await;
        workers[1].die();
        assert_eq!(cancel_of(&mut workers[0]).await, orders[0].ticket);
        workers[0].finish(orders[0].ticket, Outcome::Cancelled);
        assert!(
            workers[0].receives_no_command().await,
            "it does not run on one card"
        );
        let mut short = queue.submit(small("x")).await.unwrap();
        workers[0].work(1).await; // nothing is held for a worker that may stay away
        end(&mut short).await.unwrap();
        workers[1].ready();
        let again = both(&mut workers).await;
        if ends_well {
            finish(&mut workers, &again).await;
        } else {
            workers[1].die();
            cancel_of(&mut workers[0]).await;
            workers[0].finish(again[0].ticket, Outcome::Cancelled);
        }
        let seen = events(&mut job).await;
        let why = "the worker of sim:1 was lost (killed); denoise starts again";
        assert_eq!(retries(&seen), [("WORKER_DIED", why)]);
        match seen.last() {
            Some(JobEventKind::Done(_)) => assert!(ends_well),
            Some(JobEventKind::Failed(Error::WorkerDied { card, deaths, .. })) => {
                let of_second = format!("sim:{}", workers[1].card);
                assert_eq!((ends_well, card, *deaths), (false, &of_second, 2));
            }
            other => panic!("{other:?}"),
        }
        workers[1].ready();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_death_of_both_workers_counts_once() {
    for first in [0, 1] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, _) = sampling(&queue, &mut workers).await;
        workers[first].die();
        workers[1 - first].die();
        settle().await;
        for worker in &mut workers {
            while worker.try_next().is_some() {}
            worker.ready();
        }
        let again = both(&mut workers).await;
        finish(&mut workers, &again).await;
        let seen = events(&mut job).await;
        assert_eq!(retries(&seen).len(), 1);
        report(&seen);
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_second_part_is_stopped_when_the_worker_of_the_first_dies() {
    let (queue, mut workers) = two_cards().await;
    let (mut job, orders) = sampling(&queue, &mut workers).await;
    workers[0].die();
    assert_eq!(cancel_of(&mut workers[1]).await, orders[1].ticket);
    workers[1].finish(orders[1].ticket, internal("its counterpart is gone"));
    assert!(workers[1].receives_no_command().await);
    workers[0].ready();
    let again = both(&mut workers).await;
    finish(&mut workers, &again).await;
    let seen = events(&mut job).await;
    assert_eq!(retries(&seen).len(), 1, "the death alone counts");
    report(&seen);
    at_rest(&queue).await;
}

fn shortage() -> Outcome {
    Outcome::Wait(Shortage {
        short: Bytes::gib(1),
        needed: Bytes::gib(13),
        usable: Bytes::gib(12),
        cause: WaitCause::Foreign,
        holders: Vec::new(),
    })
}

#[tokio::test(start_paused = true)]
async fn a_card_that_says_wait_releases_both_as_often_as_it_does() {
    let (queue, mut workers) = two_cards().await;
    let (mut job, mut orders) = sampling(&queue, &mut workers).await;
    for (round, who) in [1, 0, 1, 1, 0].into_iter().enumerate() {
        workers[who].finish(orders[who].ticket, shortage());
        let other = 1 - who;
        assert_eq!(cancel_of(&mut workers[other]).await, orders[other].ticket);
        workers[other].finish(orders[other].ticket, Outcome::Cancelled);
        assert!(workers[0].receives_no_command().await && workers[1].receives_no_command().await);
        if round < 2 {
            // No job is overtaken more often than the bound allows.
            let mut short = queue.submit(small("x")).await.unwrap();
            let worked = workers[other].try_work().await || workers[who].try_work().await;
            assert!(worked, "who waits for memory holds no card");
            end(&mut short).await.unwrap();
        }
        workers[who].publish();
        orders = both(&mut workers).await;
    }
    finish(&mut workers, &orders).await;
    let seen = events(&mut job).await;
    assert!(
        seen.iter()
            .any(|event| matches!(event, JobEventKind::Waiting { cause, .. } if *cause == "foreign"))
    );
    assert_eq!(retries(&seen), [], "nothing was lost");
    report(&seen);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_never_of_one_of_two_cards_refuses_the_job() {
    for who in [0, 1] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, orders) = sampling(&queue, &mut workers).await;
        let (needed, capacity) = (Bytes::gib(30), Bytes::gib(24));
        workers[who].finish(orders[who].ticket, Outcome::Never { needed, capacity });
        cancel_of(&mut workers[1 - who]).await;
        workers[1 - who].finish(orders[1 - who].ticket, Outcome::Cancelled);
        assert!(matches!(end(&mut job).await, Err(Error::NeverFits(_))));
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_part_ends_the_job_when_it_fails_and_is_tried_again_when_it_runs_out_of_memory() {
    let (queue, mut workers) = two_cards().await;
    let (mut job, orders) = sampling(&queue, &mut workers).await;
    let out_of_memory = Failure::OutOfMemory {
        stage: "denoise".to_owned(),
        needed: Bytes::gib(2),
        usable: Bytes::gib(1),
        holders: Vec::new(),
    };
    workers[0].finish(orders[0].ticket, Outcome::Failed(out_of_memory));
    assert_eq!(cancel_of(&mut workers[1]).await, orders[1].ticket);
    workers[1].finish(orders[1].ticket, Outcome::Cancelled);
    let again = both(&mut workers).await;
    workers[0].finish(again[0].ticket, internal("broken"));
    cancel_of(&mut workers[1]).await;
    workers[1].finish(again[1].ticket, Outcome::Cancelled);
    let seen = events(&mut job).await;
    assert_eq!(retries(&seen).len(), 1);
    let ended = JobEventKind::Failed(Error::Internal("broken".to_owned()));
    assert_eq!(seen.last(), Some(&ended));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_job_stops_both_cards() {
    for first_to_stop in [0, 1] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, orders) = sampling(&queue, &mut workers).await;
        queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
        for (worker, order) in workers.iter_mut().zip(&orders) {
            assert_eq!(cancel_of(worker).await, order.ticket);
        }
        for card in [first_to_stop, 1 - first_to_stop] {
            workers[card].finish(orders[card].ticket, Outcome::Cancelled);
            assert!(workers[0].receives_no_command().await && workers[1].receives_no_command().await);
        }
        assert_eq!(end(&mut job).await, Err(cancelled_by("ann")));
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_stops_both_cards() {
    let (queue, mut workers) = two_cards().await;
    let (job, orders) = sampling(&queue, &mut workers).await;
    drop(job);
    for (worker, order) in workers.iter_mut().zip(&orders) {
        assert_eq!(cancel_of(worker).await, order.ticket);
        worker.finish(order.ticket, Outcome::Cancelled);
    }
    at_rest(&queue).await;
}

/// A part that waits for the other's offer is silent for that reason; the other one is not.
#[tokio::test(start_paused = true)]
async fn of_two_parts_the_one_hangs_that_the_other_waits_for() {
    for waits in [0, 1] {
        let (queue, mut workers) = two_cards().await;
        let (mut job, orders) = sampling(&queue, &mut workers).await;
        for (worker, order) in workers.iter_mut().zip(&orders) {
            worker.begin(order).unwrap();
        }
        let (ticket, offer) = (orders[waits].ticket, bytes::Bytes::from("where are you"));
        workers[waits].say(Event::Offer { ticket, offer });
        let hangs = 1 - waits;
        assert!(matches!(
            workers[hangs].next().await,
            Wire::Command(Command::Offer { .. })
        ));
        tokio::time::sleep(settings().stall_limit + Duration::from_secs(1)).await;
        let reason = workers[hangs].recycled().await;
        assert!(reason.contains("sent no report of denoise"), "{reason}");
        assert!(
            workers[waits].receives_no_command().await,
            "it is not taken for hung"
        );
        workers[hangs].die();
        assert_eq!(cancel_of(&mut workers[waits]).await, ticket);
        workers[waits].finish(ticket, Outcome::Cancelled);
        workers[hangs].ready();
        let again = both(&mut workers).await;
        finish(&mut workers, &again).await;
        end(&mut job).await.unwrap();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_part_that_ends_without_the_exchange_that_the_first_waits_for_has_failed() {
    let (queue, mut workers) = two_cards().await;
    let (mut job, orders) = sampling(&queue, &mut workers).await;
    let (ticket, offer) = (orders[0].ticket, bytes::Bytes::from("where are you"));
    workers[0].say(Event::Offer { ticket, offer });
    settle().await;
    assert!(matches!(
        workers[1].next().await,
        Wire::Command(Command::Offer { .. })
    ));
    workers[1].complete(&orders[1]);
    assert_eq!(cancel_of(&mut workers[0]).await, ticket);
    workers[0].finish(ticket, Outcome::Cancelled);
    let again = both(&mut workers).await;
    workers[1].complete(&again[1]);
    settle().await;
    let (ticket, offer) = (again[0].ticket, bytes::Bytes::from("and now"));
    workers[0].say(Event::Offer { ticket, offer });
    assert_eq!(cancel_of(&mut workers[0]).await, ticket);
    workers[0].finish(ticket, Outcome::Cancelled);
    assert!(matches!(end(&mut job).await, Err(Error::Internal(_))));
    at_rest(&queue).await;
}

fn of_kind(card: usize, kind: CardKind, capability: (u32, u32)) -> CardDescription {
    CardDescription {
        kind,
        compute_capability: Some(capability),
        ..description(card)
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_of_two_cards_is_refused_where_no_two_could_run_it() {
    let cuda = |card, capability| of_kind(card, CardKind::Cuda, capability);
    let cpu = |card| of_kind(card, CardKind::Cpu, (0, 0));
    for (cards, found) in [
        (vec![description(0)], "one card that can run it"),
        (vec![cuda(0, (8, 9)), cpu(1)], "one card that can run it"),
        (vec![cpu(0), cpu(1)], "no card that can run it with another"),
        (
            vec![cuda(0, (8, 9)), cuda(1, (9, 0))],
            "no two cards of one kind that can run it",
        ),
    ] {
        let (queue, mut workers) = start_on(settings(), cards);
        workers.iter_mut().for_each(Worker::ready);
        settle().await;
        let refused = queue.submit(on_two("me", "a cat")).await.err().unwrap();
        let expected = format!(
            "cards: is 2, and this service has {found}: leave it out, or start the service with two cards of one kind"
        );
        assert_eq!(refused.to_string(), expected);
        let planned = queue.plan(on_two("me", "a cat"), "").await.err().unwrap();
        assert_eq!(planned, refused);
        at_rest(&queue).await;
    }
    let (queue, _workers) = cards([description(0), description(1), cpu(2)]).await;
    let mut spec = on_two("me", "a cat");
    spec.options.card_hint = "sim:2".into();
    let refused = queue.submit(spec).await.err().unwrap().to_string();
    assert!(
        refused.contains("no other card is of the kind of sim:2"),
        "{refused}"
    );
}

fn reaching(card: usize, others: &[usize]) -> CardDescription {
    let ids = others.iter().map(|other| description(*other).id);
    CardDescription {
        peers: Peers::Only(ids.collect()),
        ..description(card)
    }
}

/// Each of two cards writes to the memory of the other: one direction is not enough.
#[tokio::test(start_paused = true)]
async fn a_request_of_two_cards_is_refused_where_they_do_not_reach_each_other() {
    for reached in [&[][..], &[1][..]] {
        let (queue, _workers) = cards([reaching(0, reached), reaching(1, &[])]).await;
        let refused = queue.submit(on_two("me", "a cat")).await.err().unwrap();
        assert_eq!(
            refused.to_string(),
            "cards: is 2, and this service has no two cards that reach each other's memory: leave it out"
        );
        at_rest(&queue).await;
    }
    let (queue, _workers) = cards([reaching(0, &[1]), reaching(1, &[0]), reaching(2, &[])]).await;
    let mut spec = on_two("me", "a cat");
    spec.options.card_hint = "sim:2".into();
    let refused = queue.submit(spec).await.err().unwrap().to_string();
    assert!(
        refused.contains("no other card of its kind reaches the memory of sim:2"),
        "{refused}"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn of_three_cards_the_two_that_reach_each_other_are_taken() {
    let (queue, [_alone, one, other]) = cards([reaching(0, &[]), reaching(1, &[2]), reaching(2, &[1])]).await;
    let mut workers = [one, other];
    let (mut job, orders) = sampling(&queue, &mut workers).await;
    finish(&mut workers, &orders).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_card_that_a_client_names_has_the_first_part() {
    let (queue, [mut one, mut other]) = two_cards().await;
    let mut spec = on_two("me", "a cat");
    spec.options.card_hint = "sim:1".into();
    let mut job = queue.submit(spec).await.unwrap();
    other.work(1).await;
    let orders = [other.order().await, one.order().await];
    check_parts([&orders[0], &orders[1]]);
    one.complete(&orders[1]);
    other.complete(&orders[0]);
    other.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_card_that_starts_counts_and_holds_nothing() {
    let (queue, workers) = start_on(settings(), vec![description(0), description(1)]);
    let Ok(mut workers) = <[Worker; 2]>::try_from(workers) else {
        panic!()
    };
    workers[0].ready();
    settle().await;
    let mut job = queue.submit(on_two("me", "a cat")).await.unwrap();
    workers[0].work(1).await;
    assert!(workers[0].receives_no_command().await);
    let mut short = queue.submit(small("x")).await.unwrap();
    workers[0].work(1).await;
    end(&mut short).await.unwrap();
    workers[1].ready();
    let orders = both(&mut workers).await;
    finish(&mut workers, &orders).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn two_cards_of_one_kind_are_taken() {
    let cuda = |card, capability| of_kind(card, CardKind::Cuda, capability);
    let (queue, mut workers) = cards([cuda(0, (8, 9)), cuda(1, (9, 0)), cuda(2, (8, 9))]).await;
    let mut job = queue.submit(on_two("me", "a cat")).await.unwrap();
    workers[0].work(1).await;
    let [one, other, third] = &mut workers;
    let orders = [one.order().await, third.order().await];
    check_parts([&orders[0], &orders[1]]);
    let mut beside = queue.submit(small("x")).await.unwrap();
    other.work(1).await;
    end(&mut beside).await.unwrap();
    third.complete(&orders[1]);
    one.complete(&orders[0]);
    one.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

/// The processors are free and there are two of them, but they exchange nothing by themselves.
#[tokio::test(start_paused = true)]
async fn processors_are_not_taken() {
    let cpu = |card| of_kind(card, CardKind::Cpu, (8, 9));
    let cuda = |card| of_kind(card, CardKind::Cuda, (8, 9));
    let (queue, [mut one, mut other, third, fourth]) = cards([cpu(0), cpu(1), cuda(2), cuda(3)]).await;
    let mut job = queue.submit(on_two("me", "a cat")).await.unwrap();
    let mut workers = [third, fourth];
    workers[0].work(1).await;
    let orders = both(&mut workers).await;
    finish(&mut workers, &orders).await;
    end(&mut job).await.unwrap();
    assert!(one.receives_no_command().await && other.receives_no_command().await);
    at_rest(&queue).await;
}

/// A job whose model is on the card goes before one whose model is not: but not before one that holds the card.
#[tokio::test(start_paused = true)]
async fn a_job_that_holds_a_card_is_not_overtaken_by_one_whose_model_is_there() {
    let (queue, mut workers) = two_cards().await;
    let mut all = vec![queue.submit(picture("b", "me", "a cat")).await.unwrap()];
    for _ in 0..3 {
        workers[0].work(1).await;
    }
    settle().await;
    let on_card = |mut spec: JobSpec, card: &str| {
        spec.options.card_hint = card.into();
        spec
    };
    all.push(queue.submit(on_card(small("other"), "sim:1")).await.unwrap());
    let busy = workers[1].order().await;
    all.push(
        queue
            .submit(on_card(on_two("me", "a cat"), "sim:0"))
            .await
            .unwrap(),
    );
    all.push(queue.submit(picture("b", "me", "a cat")).await.unwrap());
    assert!(workers[0].receives_no_command().await);
    workers[1].complete(&busy);
    let orders = both(&mut workers).await;
    assert_eq!(
        orders[0].job, *all[2].id,
        "its text is known, and it has not begun"
    );
    finish(&mut workers, &orders).await;
    all_end(&queue, &mut workers, &mut all).await;
}

/// Which of two clients goes next, when one had a second of two cards and the other one and a half of one.
#[tokio::test(start_paused = true)]
async fn the_time_of_both_cards_is_charged() {
    let (queue, mut workers) = two_cards().await;
    let mut all = vec![queue.submit(on_two("x", "a cat")).await.unwrap()];
    workers[0].work(1).await;
    let orders = both(&mut workers).await;
    for client in ["y", "blocker", "x", "y"] {
        all.push(queue.submit(small(client)).await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    workers[1].complete(&orders[1]);
    workers[0].complete(&orders[0]);
    let (of_y, decode) = (workers[1].order().await, workers[0].order().await);
    assert_eq!(of_y.job, *all[1].id);
    workers[0].complete(&decode);
    let blocker = workers[0].order().await;
    assert_eq!(blocker.job, *all[2].id);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    workers[1].complete(&of_y);
    let next = workers[1].order().await;
    assert_eq!(next.job, *all[4].id, "it is y's turn");
    workers[1].complete(&next);
    workers[0].complete(&blocker);
    all_end(&queue, &mut workers, &mut all).await;
}
