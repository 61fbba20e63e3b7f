//! Detection of hung workers: by learned intervals between reports, and by cancellations that are not answered.

use std::time::Duration;

use engine::job::{JobEventKind, JobSpec};
use engine::messages::{Command, Order, Progress};
use engine::queue::{Job, Queue, Settings};
use residency::Bytes;
use tokio::time::Instant;

use crate::fixture::{image_of, load, picture};
use crate::worker::{
    Wire, Worker, at_rest, cancelled_by, completed, end, events, needs, one_card_with, settle, stage_of,
};

const FLOOR: u64 = 10;
const LIMIT: u64 = 120;

async fn watched() -> (Queue, Worker) {
    one_card_with(Settings {
        stall_floor: Duration::from_secs(FLOOR),
        stall_limit: Duration::from_secs(LIMIT),
        ..Settings::default()
    })
    .await
}

/// Takes orders and completes them until one is of this stage.
async fn until_stage(worker: &mut Worker, stage: &str) -> Order {
    loop {
        let order = worker.order().await;
        if stage_of(&order) == stage {
            return order;
        }
        worker.complete(&order);
    }
}

async fn step(worker: &Worker, order: &Order, n: u32, after_ms: u64) {
    tokio::time::sleep(Duration::from_millis(after_ms)).await;
    worker.progress(order.ticket, Progress::Step { n, of: 4 });
}

/// Runs a picture whose steps take this long each, to its end.
async fn run_picture_job(queue: &Queue, worker: &mut Worker, step_ms: u64) {
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = until_stage(worker, "denoise").await;
    let resident = worker.begin(&order).unwrap();
    for n in 1..=4 {
        step(worker, &order, n, step_ms).await;
    }
    worker.deliver(&order);
    worker.finish(order.ticket, completed(&order, resident));
    worker.work(1).await;
    end(&mut job).await.unwrap();
}

/// A picture job with two steps done.
async fn two_steps(queue: &Queue, worker: &mut Worker, spec: JobSpec, step_ms: u64) -> (Job, Order) {
    let job = queue.submit(spec).await.unwrap();
    let order = until_stage(worker, "denoise").await;
    worker.begin(&order).unwrap();
    for n in 1..=2 {
        step(worker, &order, n, step_ms).await;
    }
    (job, order)
}

/// Seconds of silence until the timeout, and the reported reason.
async fn silent_for(worker: &mut Worker) -> (u64, String) {
    let before = Instant::now();
    let reason = loop {
        match tokio::time::timeout(Duration::from_secs(3600), worker.commands.recv()).await {
            Ok(Some(Wire::Recycle(reason))) => break reason,
            Ok(Some(Wire::Command(Command::Standing(_)))) => {}
            _ => panic!("it is to be killed"),
        }
    };
    (before.elapsed().as_secs(), reason)
}

#[tokio::test(start_paused = true)]
async fn known_steps_time_out_after_ten_times_their_duration() {
    let (queue, mut worker) = watched().await;
    run_picture_job(&queue, &mut worker, 3_000).await;
    let (mut job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), 3_000).await;
    let (seconds, reason) = silent_for(&mut worker).await;
    assert_eq!(seconds, 30, "{reason}");
    for part in [
        "denoise",
        "30s",
        "10 times the 3s between two steps",
        "10s",
        "120s",
    ] {
        assert!(reason.contains(part), "{reason}");
    }
    worker.die_of(&format!("recycled: {reason}"));
    worker.ready();
    let order = until_stage(&mut worker, "denoise").await;
    worker.complete(&order);
    worker.work(1).await;
    let told = events(&mut job).await.into_iter().find_map(|event| match event {
        JobEventKind::Retrying { reason, message, .. } if reason == "WORKER_DIED" => Some(message),
        _ => None,
    });
    assert!(
        told.is_some_and(|told| told.contains(&reason)),
        "the client hears which limit it was"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_step_timeout_has_a_minimum() {
    let (queue, mut worker) = watched().await;
    run_picture_job(&queue, &mut worker, 50).await;
    let (_job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), 50).await;
    assert_eq!(silent_for(&mut worker).await.0, FLOOR);
}

#[tokio::test(start_paused = true)]
async fn the_step_timeout_has_a_maximum() {
    let (queue, mut worker) = watched().await;
    run_picture_job(&queue, &mut worker, 50_000).await;
    let (_job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), 50_000).await;
    assert_eq!(silent_for(&mut worker).await.0, LIMIT);
}

#[tokio::test(start_paused = true)]
async fn unknown_stages_and_first_steps_have_the_maximum_timeout() {
    let (queue, mut worker) = watched().await;
    let (job, order) = two_steps(&queue, &mut worker, picture("a", "me", "a cat"), 50).await;
    let (seconds, reason) = silent_for(&mut worker).await;
    assert_eq!(seconds, LIMIT, "no step of this model was ever seen to its end");
    assert!(
        reason.contains("120s") && reason.contains("not known"),
        "{reason}"
    );
    drop((job, order));
    settle().await;
    while worker.try_next().is_some() {} // commands to end the order, which it ignores
    worker.die();
    worker.ready();
    run_picture_job(&queue, &mut worker, 50).await;
    let _job = queue.submit(picture("a", "me", "a dog")).await.unwrap();
    let order = until_stage(&mut worker, "denoise").await;
    worker.begin(&order).unwrap();
    assert_eq!(
        silent_for(&mut worker).await.0,
        LIMIT,
        "the first step may have kernels to load"
    );
}

#[tokio::test(start_paused = true)]
async fn timeouts_are_learned_per_shape() {
    let (queue, mut worker) = watched().await;
    run_picture_job(&queue, &mut worker, 50).await;
    let mut larger = picture("a", "me", "a dog");
    image_of(&mut larger).width = 1280;
    let (_job, _) = two_steps(&queue, &mut worker, larger, 50).await;
    assert_eq!(silent_for(&mut worker).await.0, LIMIT);
}

#[tokio::test(start_paused = true)]
async fn work_after_the_last_step_counts_towards_the_timeout() {
    let (queue, mut worker) = watched().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = until_stage(&mut worker, "denoise").await;
    let resident = worker.begin(&order).unwrap();
    for n in 1..=4 {
        step(&worker, &order, n, 10).await;
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    worker.deliver(&order);
    worker.finish(order.ticket, completed(&order, resident));
    worker.work(1).await;
    end(&mut job).await.unwrap();
    let (_job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), 10).await;
    assert_eq!(silent_for(&mut worker).await.0, 60);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_that_was_too_short_is_relaxed_for_the_next_attempt() {
    let (queue, mut worker) = watched().await;
    run_picture_job(&queue, &mut worker, 50).await;
    let (mut job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), 50).await;
    let (_, reason) = silent_for(&mut worker).await;
    worker.die_of(&reason);
    worker.ready();
    let order = until_stage(&mut worker, "denoise").await;
    let resident = worker.begin(&order).unwrap();
    for n in 1..=4 {
        step(&worker, &order, n, 35_000).await; // the machine is busy with something else
    }
    worker.deliver(&order);
    worker.finish(order.ticket, completed(&order, resident));
    worker.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_stage_without_steps_times_out_after_ten_times_its_duration_in_this_worker() {
    let (queue, mut worker) = watched().await;
    let decode = |worker: &mut Worker, order: &Order| worker.begin(order).unwrap();
    let slow = |order: &Order, resident| match completed(order, resident) {
        engine::messages::Outcome::Completed(mut report) => {
            report.run_ms = 2_000;
            engine::messages::Outcome::Completed(report)
        }
        other => other,
    };
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = until_stage(&mut worker, "decode").await;
    let resident = decode(&mut worker, &order);
    worker.deliver(&order);
    worker.finish(order.ticket, slow(&order, resident));
    end(&mut job).await.unwrap();

    let mut job = queue.submit(picture("a", "me", "a dog")).await.unwrap();
    let order = until_stage(&mut worker, "decode").await;
    decode(&mut worker, &order);
    let (seconds, reason) = silent_for(&mut worker).await;
    assert_eq!(seconds, 20);
    assert!(
        reason.contains("decode") && reason.contains("10 times the 2s"),
        "{reason}"
    );
    worker.die();
    worker.ready();
    let order = until_stage(&mut worker, "decode").await;
    decode(&mut worker, &order);
    assert_eq!(
        silent_for(&mut worker).await.0,
        LIMIT,
        "its first in a fresh worker may take longer"
    );
    worker.die();
    assert!(end(&mut job).await.is_err());
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn load_timeouts_depend_on_the_cards_throughput() {
    let (queue, mut worker) = watched().await;
    let mut job = queue.submit(load("a", "me", &["text_encoder_2"])).await.unwrap();
    worker.work(1).await; // 4 GiB in 4 s, as its report says
    end(&mut job).await.unwrap();
    let _job = queue.submit(load("b", "me", &["vae"])).await.unwrap();
    let order = worker.order().await;
    let component = needs(&order).0[0].clone();
    let begun = |done| Progress::Loading {
        component: component.clone(),
        done,
    };
    tokio::time::sleep(Duration::from_secs(60)).await;
    worker.progress(order.ticket, begun(Bytes::ZERO)); // the time before the first byte is not known
    tokio::time::sleep(Duration::from_secs(9)).await;
    worker.progress(order.ticket, begun(Bytes::mib(1)));
    let (seconds, reason) = silent_for(&mut worker).await;
    assert_eq!(seconds, 10, "1 GiB takes a second here");
    assert!(
        reason.contains("load") && reason.contains("10 times the 1s"),
        "{reason}"
    );
    worker.die();
    worker.ready();
    let order = worker.order().await;
    worker.progress(order.ticket, begun(Bytes::ZERO));
    assert_eq!(silent_for(&mut worker).await.0, 40, "the next has more time");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_times_out_after_three_steps_or_two_seconds() {
    for (step_ms, seconds) in [(50, 2), (3_000, 9)] {
        let (queue, mut worker) = watched().await;
        run_picture_job(&queue, &mut worker, step_ms).await;
        let (mut job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a dog"), step_ms).await;
        queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
        assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
        let before = Instant::now();
        let reason = worker.recycled().await;
        assert_eq!(before.elapsed().as_secs(), seconds, "{reason}");
        assert!(
            reason.contains("cancelled denoise") && reason.contains(&format!("{seconds}s")),
            "{reason}"
        );
        worker.die();
        assert_eq!(end(&mut job).await, Err(cancelled_by("ann")));
        worker.ready();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_of_unknown_steps_times_out_after_three_of_them() {
    let (queue, mut worker) = watched().await;
    let (job, _) = two_steps(&queue, &mut worker, picture("a", "me", "a cat"), 4_000).await;
    queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
    assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    let before = Instant::now();
    worker.recycled().await;
    assert_eq!(before.elapsed().as_secs(), 12);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_a_long_first_step_waits_for_its_end() {
    let (queue, mut worker) = watched().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = until_stage(&mut worker, "denoise").await;
    worker.begin(&order).unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
    assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    tokio::time::sleep(Duration::from_secs(LIMIT / 2)).await;
    assert!(worker.try_next().is_none(), "the worker is not recycled");
    worker.finish(order.ticket, engine::messages::Outcome::Cancelled);
    assert_eq!(end(&mut job).await, Err(cancelled_by("ann")));
    at_rest(&queue).await;
}
