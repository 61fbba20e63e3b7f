//! Scheduling: fair shares, affinity, overtaking, joining, slow readers.

use std::time::Duration;

use engine::Error;
use engine::JobState;
use engine::job::{JobEventKind, Priority};
use engine::messages::{Command, Progress};
use engine::queue::{Job, Queue, Settings};
use residency::Bytes;

use crate::fixture::{load, picture};
use crate::worker::{Wire, Worker, at_rest, end, events, one_card, one_card_with, settle};

async fn submit_all(queue: &Queue, count: usize, spec: impl Fn(usize) -> engine::job::JobSpec) -> Vec<Job> {
    let mut jobs = Vec::new();
    for index in 0..count {
        jobs.push(queue.submit(spec(index)).await.unwrap());
    }
    jobs
}

/// Runs all orders, each in `ms`, and returns their clients.
async fn serve(worker: &mut Worker, orders: usize, ms: u64) -> Vec<String> {
    let mut served = Vec::new();
    for _ in 0..orders {
        served.push(worker.work(ms).await.0);
    }
    served
}

fn count(served: &[String], jobs: &[Job]) -> usize {
    served
        .iter()
        .filter(|id| jobs.iter().any(|job| *job.id == ***id))
        .count()
}

#[tokio::test(start_paused = true)]
async fn clients_get_fair_shares_for_any_order_and_number_of_jobs() {
    let (queue, mut worker) = one_card().await;
    let vae = |client| move |_| load("a", client, &["vae"]);
    let many = submit_all(&queue, 30, vae("many")).await;
    let few = submit_all(&queue, 10, vae("few")).await;
    let urgent = submit_all(&queue, 40, |_| {
        let mut spec = load("a", "urgent", &["vae"]);
        spec.options.priority = Priority::High;
        spec
    });
    let urgent = urgent.await;
    let served = serve(&mut worker, 31, 100).await;
    let got = (
        count(&served, &many),
        count(&served, &few),
        count(&served, &urgent),
    );
    assert!(
        (4..=7).contains(&got.0) && (4..=7).contains(&got.1) && (19..=23).contains(&got.2),
        "{got:?}"
    );
    serve(&mut worker, 49, 100).await;
    drop((many, few, urgent));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_new_name_for_each_job_gets_no_more_than_the_share_of_the_account() {
    let (queue, mut worker) = one_card().await;
    let at = |address: &str, name: String| {
        let mut spec = load("a", &name, &["vae"]);
        spec.options.account = address.to_owned();
        spec
    };
    let many = submit_all(&queue, 20, |n| at("10.0.0.1", format!("name {n}"))).await;
    let one = submit_all(&queue, 8, |_| at("10.0.0.2", "me".to_owned())).await;
    let served = serve(&mut worker, 16, 100).await;
    let got = (count(&served, &many), count(&served, &one));
    assert!((7..=9).contains(&got.0) && (7..=8).contains(&got.1), "{got:?}");
    serve(&mut worker, 12, 100).await;
    drop((many, one));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_names_of_an_account_share_what_it_has() {
    let (queue, mut worker) = one_card().await;
    let of = |name: &'static str| {
        move |_| {
            let mut spec = load("a", name, &["vae"]);
            spec.options.account = "10.0.0.1".to_owned();
            spec
        }
    };
    let many = submit_all(&queue, 20, of("many")).await;
    let few = submit_all(&queue, 5, of("few")).await;
    let other = submit_all(&queue, 10, |_| load("a", "other", &["vae"])).await;
    let served = serve(&mut worker, 16, 100).await;
    let got = (
        count(&served, &many),
        count(&served, &few),
        count(&served, &other),
    );
    assert!(
        (3..=5).contains(&got.0) && (3..=5).contains(&got.1) && (7..=9).contains(&got.2),
        "{got:?}"
    );
    serve(&mut worker, 19, 100).await;
    drop((many, few, other));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_new_client_gets_its_share_without_arrears() {
    let (queue, mut worker) = one_card().await;
    let vae = |client| move |_| load("a", client, &["vae"]);
    let old = submit_all(&queue, 20, vae("old")).await;
    serve(&mut worker, 10, 100).await;
    let new = submit_all(&queue, 10, vae("new")).await;
    let served = serve(&mut worker, 8, 100).await;
    assert!(
        (3..=5).contains(&count(&served, &new)),
        "{}",
        count(&served, &new)
    );
    serve(&mut worker, 12, 100).await;
    drop((old, new));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_warm_job_overtakes_a_cold_one_up_to_the_bound() {
    for bound in [0, 3] {
        let (queue, mut worker) = one_card_with(Settings {
            overtaking_bound: bound,
            ..Settings::default()
        })
        .await;
        let mut first = queue.submit(load("a", "me", &[])).await.unwrap();
        let order = worker.order().await;
        let cold = queue.submit(load("b", "me", &["transformer"])).await.unwrap();
        let warm = submit_all(&queue, 6, |_| load("a", "me", &[])).await;
        worker.complete(&order);
        end(&mut first).await.unwrap();
        let served = serve(&mut worker, 7, 10).await;
        let place = served.iter().position(|id| **id == *cold.id).unwrap();
        assert_eq!(place, bound as usize, "{served:?}");
        drop((cold, warm));
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn jobs_that_fit_overtake_a_waiting_job_up_to_the_bound() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(16));
    let mut big = queue.submit(load("a", "big", &["transformer"])).await.unwrap();
    let small = submit_all(&queue, 6, |_| load("b", "small", &["vae"])).await;
    let served = serve(&mut worker, 3, 100).await;
    assert_eq!(count(&served, &small), 3);
    settle().await;
    assert!(worker.receives_no_command().await, "the fourth does not");
    worker.set_foreign(Bytes::ZERO);
    assert_eq!(*worker.work(100).await.0, *big.id);
    end(&mut big).await.unwrap();
    serve(&mut worker, 3, 100).await;
    drop(small);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_runs_keeps_its_card_between_its_stages() {
    let (queue, mut worker) = one_card().await;
    let mut long = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = worker.order().await;
    let mut other = queue.submit(load("b", "other", &["vae"])).await.unwrap();
    worker.complete(&order);
    assert_eq!(*worker.work(5000).await.0, *long.id);
    assert_eq!(*worker.work(5000).await.0, *long.id);
    assert_eq!(*worker.work(10).await.0, *other.id);
    end(&mut long).await.unwrap();
    let seen = events(&mut other).await;
    let queued = JobEventKind::Queued {
        position: 0,
        estimate: None,
    };
    assert!(seen.contains(&queued), "{seen:?}");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_idempotency_key_joins_a_current_or_recent_job() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "a cat");
    spec.options.idempotency_key = "key".into();
    let mut first = queue.submit(spec.clone()).await.unwrap();
    worker.work(10).await;
    let order = worker.order().await;
    let mut second = queue.submit(spec.clone()).await.unwrap();
    assert!(second.joined && second.id == first.id);
    let mut other = spec.clone();
    other.entry = crate::fixture::entry("b");
    assert_eq!(
        queue.submit(other).await.err(),
        Some(Error::KeyReused("key".into()))
    );
    worker.complete(&order);
    worker.work(10).await;
    let (first_seen, second_seen) = (events(&mut first).await, events(&mut second).await);
    let kept = |events: &[JobEventKind]| -> Vec<JobEventKind> {
        let lasting = |e: &&JobEventKind| {
            matches!(
                e,
                JobEventKind::Stage { .. } | JobEventKind::Piece { .. } | JobEventKind::Done(_)
            )
        };
        events.iter().filter(lasting).cloned().collect()
    };
    assert_eq!(second_seen[0], JobEventKind::Accepted { joined: true });
    assert_eq!(kept(&first_seen), kept(&second_seen));

    let mut of_another = spec.clone();
    of_another.options.account = "10.0.0.9".into();
    let of_another = queue.submit(of_another).await.unwrap();
    assert!(!of_another.joined, "keys of one address are not those of another");
    let order = worker.order().await;
    drop(of_another);
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!("it is cancelled");
    };
    worker.finish(order.ticket, engine::messages::Outcome::Cancelled);
    assert_eq!(ticket, order.ticket);
    let mut third = queue.submit(spec.clone()).await.unwrap();
    assert!(third.joined);
    assert_eq!(kept(&events(&mut third).await), kept(&first_seen));
    tokio::time::sleep(Duration::from_secs(61)).await;
    let mut fourth = queue.submit(spec).await.unwrap();
    assert!(!fourth.joined, "it is forgotten by now");
    worker.work(10).await;
    worker.work(10).await;
    end(&mut fourth).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_is_cancelled_with_its_last_listener_unless_detached() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "a cat");
    spec.options.idempotency_key = "key".into();
    let first = queue.submit(spec.clone()).await.unwrap();
    let second = queue.submit(spec.clone()).await.unwrap();
    let order = worker.order().await;
    drop(first);
    assert!(worker.receives_no_command().await, "one still listens");
    drop(second);
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!()
    };
    assert_eq!(ticket, order.ticket);
    worker.finish(ticket, engine::messages::Outcome::Cancelled);
    at_rest(&queue).await;
    assert_eq!(queue.jobs(true).await[0].state, JobState::Cancelled);

    spec.options.idempotency_key = "other".into();
    spec.options.detach = true;
    drop(queue.submit(spec).await.unwrap());
    for _ in 0..3 {
        worker.work(10).await;
    }
    at_rest(&queue).await;
    assert_eq!(queue.jobs(true).await[0].state, JobState::Done);
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_gets_coalesced_steps_and_all_other_events() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    let order = worker.order().await;
    worker.begin(&order).unwrap();
    for n in 1..=1000 {
        worker.progress(order.ticket, Progress::Step { n, of: 1000 });
    }
    worker.deliver(&order);
    worker.finish(order.ticket, crate::worker::completed(&order, Vec::new()));
    worker.work(1).await;
    let seen = events(&mut job).await;
    let steps: Vec<_> = seen
        .iter()
        .filter(|e| matches!(e, JobEventKind::Step { .. }))
        .collect();
    assert_eq!(
        steps,
        [&JobEventKind::Step {
            n: 1000,
            of: 1000,
            item: 0,
            section: None
        }]
    );
    assert_eq!(
        seen.iter()
            .filter(|e| matches!(e, JobEventKind::Stage { .. }))
            .count(),
        3
    );
    assert_eq!(
        seen.iter()
            .filter(|e| matches!(e, JobEventKind::Piece { .. }))
            .count(),
        1
    );
    at_rest(&queue).await;
}
