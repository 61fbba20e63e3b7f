//! Orders that a worker gets while it still has another.

use std::time::Duration;

use engine::Error;
use engine::job::JobEventKind;
use engine::messages::{Command, Order, Outcome, Shortage};
use engine::queue::{Job, Queue, Settings};
use residency::{Bytes, WaitCause};
use tokio::time::Instant;

use crate::fixture::picture;
use crate::passes::{in_rounds, rounds};
use crate::worker::{
    Wire, Worker, at_rest, cancelled_by, end, events, one_card, one_card_with, settle, stage_of,
};

/// How long a cancel may go unanswered.
const CANCEL_LIMIT: Duration = Duration::from_secs(3);

/// A card on which stages of jobs in `slots` rounds take a few milliseconds, as is known from one of them.
async fn quick(slots: u32) -> (Queue, Worker) {
    let settings = Settings {
        cancel_limit: CANCEL_LIMIT,
        ..Settings::default()
    };
    let (queue, mut worker) = one_card_with(settings).await;
    worker.run_ms = 5;
    let mut job = queue.submit(in_rounds(slots, "me", "one")).await.unwrap();
    while worker.try_work().await {}
    end(&mut job).await.unwrap();
    (queue, worker)
}

/// A job whose decode is under way, and one whose last pass was sent meanwhile.
async fn decode_and_pass() -> (Queue, Worker, [Job; 2], [Order; 2]) {
    let (queue, mut worker) = quick(2).await;
    let first = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    let alone = worker.order().await;
    let second = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    settle().await;
    worker.complete(&alone);
    let shared = worker.order().await;
    let both = [(first.id.to_string(), 9), (second.id.to_string(), 1)];
    assert_eq!(rounds(&shared), both);
    assert!(
        worker.receives_no_command().await,
        "the pass is of both jobs, and neither has another stage"
    );
    worker.complete(&shared);
    let decode = worker.order().await;
    assert_eq!((stage_of(&decode), &*decode.job), ("decode", &*first.id));
    assert!(!decode.is_ahead);
    let pass = worker.order().await;
    assert_eq!(rounds(&pass), [(second.id.to_string(), 9)]);
    assert!(pass.is_ahead, "it was sent while the decode runs");
    (queue, worker, [first, second], [decode, pass])
}

#[tokio::test(start_paused = true)]
async fn the_next_pass_is_sent_while_a_decode_runs() {
    let (queue, mut worker, jobs, orders) = decode_and_pass().await;
    for order in &orders {
        worker.complete(order);
    }
    while worker.try_work().await {}
    for mut job in jobs {
        end(&mut job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_full_pass_goes_before_a_decode_which_is_sent_while_it_runs() {
    let (queue, mut worker) = quick(2).await;
    let mut jobs = vec![queue.submit(in_rounds(2, "me", "one")).await.unwrap()];
    let alone = worker.order().await;
    for _ in 0..3 {
        jobs.push(queue.submit(in_rounds(2, "me", "one")).await.unwrap());
    }
    settle().await;
    worker.complete(&alone);
    let mut order = worker.order().await;
    let id = |n: usize| jobs[n].id.to_string();
    assert_eq!(rounds(&order), [(id(0), 9), (id(1), 1)]);
    let mut seen = Vec::new();
    // Passes of two, each with the decode of the job that has left the one before.
    for _ in 0..2 {
        worker.complete(&order);
        order = worker.order().await;
        seen.push((stage_of(&order), 1 + order.sharing.len(), order.is_ahead));
        let decode = worker.order().await;
        seen.push((stage_of(&decode), 1 + decode.sharing.len(), decode.is_ahead));
        worker.complete(&order);
        settle().await;
        order = decode;
    }
    assert_eq!(
        seen,
        [
            ("denoise", 2, false),
            ("decode", 1, true),
            ("denoise", 2, true),
            ("decode", 1, true)
        ]
    );
    worker.complete(&order);
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn after_a_death_no_order_is_sent_ahead_and_only_the_one_that_had_begun_counts_it() {
    let (queue, mut worker, [mut first, mut second], _) = decode_and_pass().await;
    worker.die();
    settle().await;
    worker.ready();
    let decode = worker.order().await;
    assert_eq!((stage_of(&decode), &*decode.job), ("decode", &*first.id));
    assert!(
        worker.receives_no_command().await,
        "nothing is sent behind a stage that a worker died of"
    );
    worker.die();
    settle().await;
    assert!(matches!(
        end(&mut first).await,
        Err(Error::WorkerDied { deaths: 2, .. })
    ));
    worker.ready();
    let pass = worker.order().await;
    assert_eq!(rounds(&pass), [(second.id.to_string(), 9)]);
    assert!(!pass.is_ahead);
    worker.complete(&pass);
    while worker.try_work().await {}
    end(&mut second).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_order_waits_can_be_cancelled() {
    let (queue, mut worker, [mut first, mut second], [decode, pass]) = decode_and_pass().await;
    queue.cancel(&second.id, "ann".to_owned()).await.unwrap();
    let told = worker.next().await;
    assert!(matches!(told, Wire::Command(Command::Cancel(ticket)) if ticket == pass.ticket));
    worker.complete(&decode);
    end(&mut first).await.unwrap();
    worker.finish(pass.ticket, Outcome::Cancelled);
    assert_eq!(end(&mut second).await, Err(cancelled_by("ann")));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_time_limit_of_a_cancel_begins_when_the_order_does() {
    let (queue, mut worker, [mut first, mut second], [decode, _]) = decode_and_pass().await;
    queue.cancel(&second.id, "ann".to_owned()).await.unwrap();
    worker.next().await;
    tokio::time::sleep(2 * CANCEL_LIMIT).await;
    assert!(
        worker.receives_no_command().await,
        "the decode may take this long"
    );
    worker.complete(&decode);
    end(&mut first).await.unwrap();
    let before = Instant::now();
    let reason = worker.recycled().await;
    assert_eq!(before.elapsed().as_secs(), CANCEL_LIMIT.as_secs(), "{reason}");
    assert!(reason.contains("did not end a cancelled denoise"), "{reason}");
    worker.die();
    assert_eq!(end(&mut second).await, Err(cancelled_by("ann")));
    worker.ready();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_order_that_no_longer_fits_when_it_begins_waits_for_memory_and_is_sent_again() {
    let (queue, mut worker, [mut first, mut second], [decode, pass]) = decode_and_pass().await;
    worker.complete(&decode);
    end(&mut first).await.unwrap();
    let (short, usable) = (Bytes::gib(4), Bytes::gib(8));
    let shortage = Shortage {
        short,
        needed: short,
        usable,
        cause: WaitCause::Foreign,
        holders: Vec::new(),
    };
    worker.finish(pass.ticket, Outcome::Wait(shortage));
    let again = worker.order().await;
    assert!(!again.is_ahead && again.ticket != pass.ticket);
    worker.complete(&again);
    while worker.try_work().await {}
    let events = events(&mut second).await;
    assert!(
        events
            .iter()
            .any(|event| matches!(event, JobEventKind::Waiting { .. }))
    );
    assert!(matches!(events.last(), Some(JobEventKind::Done(_))));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn another_clients_turn_is_not_taken_by_an_order_that_is_sent_ahead() {
    let (queue, mut worker) = quick(2).await;
    let mut first = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    let alone = worker.order().await;
    settle().await;
    worker.complete(&alone);
    let last = worker.order().await;
    let mut other = queue.submit(picture("a", "you", "one")).await.unwrap();
    let mut second = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    settle().await;
    worker.complete(&last);
    let decode = worker.order().await;
    assert_eq!((stage_of(&decode), &*decode.job), ("decode", &*first.id));
    assert!(
        worker.receives_no_command().await,
        "it is the other client's turn"
    );
    worker.complete(&decode);
    let next = worker.order().await;
    assert_eq!(&*next.job, &*other.id);
    worker.complete(&next);
    while worker.try_work().await {}
    for job in [&mut first, &mut second, &mut other] {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_behind_a_stage_of_unknown_or_long_time() {
    let (queue, mut worker) = one_card().await;
    for run_ms in [5, 100] {
        worker.run_ms = run_ms;
        let mut jobs = Vec::new();
        for _ in 0..3 {
            jobs.push(queue.submit(in_rounds(2, "me", "one")).await.unwrap());
        }
        loop {
            settle().await;
            let Some(Wire::Command(Command::Run(order))) = worker.try_next() else {
                break;
            };
            let is_first = run_ms == 5 && order.sharing.is_empty() && stage_of(&order) == "encode_text";
            assert!(!is_first || worker.receives_no_command().await);
            assert!(!(run_ms == 100 && order.is_ahead), "{order:?}");
            worker.complete(&order);
            worker.run_ms = 100;
        }
        for job in &mut jobs {
            end(job).await.unwrap();
        }
    }
    at_rest(&queue).await;
}
