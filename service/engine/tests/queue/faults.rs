//! Faults: workers that die or hang, failed stages, deadlines, cancellation, shutdown.

use std::time::Duration;

use engine::JobState;
use engine::job::JobEventKind;
use engine::messages::{Answer, Command, Event, Failure, Outcome};
use engine::queue::{CardState, Job, Queue, Settings};
use engine::{CancelledBy, Error};
use gpu::CardSpeeds;
use residency::{Accounts, Bytes};
use tokio::time::Instant;

use crate::fixture::{CARD, REDUCTIONS, SAMPLE_FLOPS, entry, load, picture};
use crate::worker::{
    Wire, at_rest, cancelled_by, completed, end, events, one_card, one_card_with, one_cpu_with, settle,
    stage_of, start,
};

/// In tests of cancels and deadlines.
const CANCEL_LIMIT: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn a_stage_is_retried_once_after_its_worker_dies() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    let dead = worker.order().await;
    worker.die();
    settle().await;
    worker.finish(dead.ticket, completed(&dead, Vec::new())); // the event of a lost worker is ignored
    worker.say(worker.announcement());
    assert!(worker.receives_no_command().await);
    let mut queued = queue.submit(load("b", "me", &["vae"])).await.unwrap();
    worker.ready();
    let again = worker.order().await;
    assert!(stage_of(&again) == "denoise" && again.ticket != dead.ticket);
    worker.complete(&again);
    worker.work(1).await;
    worker.work(1).await;
    end(&mut queued).await.unwrap();
    let seen = events(&mut job).await;
    let retries = seen.iter().filter(|event| {
        matches!(event, JobEventKind::Retrying { reason, stage, .. } if reason == "WORKER_DIED" && **stage == *"denoise")
    });
    assert_eq!(retries.count(), 1);
    assert!(matches!(seen.last(), Some(JobEventKind::Done(_))));
    at_rest(&queue).await;
}

/// What a stage took on one card counts on another by the speeds of both. A card that stays away for long is expected to stay away.
#[tokio::test(start_paused = true)]
async fn a_job_waits_for_its_lost_card_rather_than_run_on_a_slow_one_unless_the_card_stays_away() {
    let teraflops = |count: u64| CardSpeeds {
        link: None,
        flops: Some(count * 1_000_000_000_000),
    };
    for (speed_of_other, moves, comes_back) in [(100, true, true), (1, false, true), (1, false, false)] {
        let (queue, mut workers) = start(Settings::default(), 2);
        for (worker, speed) in workers.iter_mut().zip([100, speed_of_other]) {
            worker.speeds = teraflops(speed);
            worker.ready();
        }
        settle().await;
        let (mut other, mut fast) = (workers.remove(1), workers.remove(0));
        let mut first = queue.submit(picture("a", "me", "a cat")).await.unwrap();
        while fast.try_work().await {}
        end(&mut first).await.unwrap();
        let mut job = queue.submit(picture("a", "me", "a dog")).await.unwrap();
        loop {
            let order = fast.order().await;
            if stage_of(&order) == "denoise" {
                break;
            }
            fast.complete(&order);
        }
        fast.die();
        settle().await;
        assert_eq!(other.try_work().await, moves);
        match comes_back {
            true => fast.ready(),
            false => tokio::time::sleep(Duration::from_secs(60)).await,
        }
        while other.try_work().await || fast.try_work().await {}
        end(&mut job).await.unwrap();
        at_rest(&queue).await;
    }
}

/// A CPU that is ready takes no stage that is done sooner on a GPU that still starts.
#[tokio::test(start_paused = true)]
async fn a_new_stage_waits_for_a_card_that_starts_rather_than_run_on_a_slow_one() {
    let (queue, mut workers) = start(Settings::default(), 2);
    let (mut slow, mut fast) = (workers.remove(1), workers.remove(0));
    slow.speeds.flops = Some(SAMPLE_FLOPS / 1000);
    slow.ready();
    settle().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    assert!(!slow.try_work().await);
    fast.ready();
    while fast.try_work().await {}
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_learned_before_a_restart_sends_no_stage_to_a_slow_card_while_the_fast_one_starts() {
    let cards = || async {
        let (queue, mut workers) = start(Settings::default(), 2);
        workers[1].speeds.flops = Some(SAMPLE_FLOPS / 1000);
        workers[0].speeds.flops = Some(SAMPLE_FLOPS * 10);
        (queue, workers.remove(1), workers.remove(0))
    };
    let (queue, _, mut fast) = cards().await;
    fast.ready();
    settle().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    while fast.try_work().await {}
    end(&mut job).await.unwrap();
    let learned = queue.learned().await.unwrap();

    let (queue, mut slow, mut fast) = cards().await;
    queue.restore_learned(learned).await.unwrap();
    slow.ready();
    settle().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    assert!(!slow.try_work().await);
    fast.ready();
    while fast.try_work().await {}
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

async fn accounts(queue: &Queue) -> Accounts {
    queue.status_now().await.cards[0].ledger.accounts()
}

#[tokio::test(start_paused = true)]
async fn the_ready_event_of_a_worker_has_its_own_and_foreign_bytes() {
    let (queue, mut workers) = start(Settings::default(), 1);
    let worker = &mut workers[0];
    (worker.context, worker.foreign) = (Bytes::gib(1), Bytes::gib(20));
    worker.ready(); // and no snapshot follows
    settle().await;
    let status = queue.status_now().await;
    assert_eq!(status.cards[0].state, CardState::Ready);
    let found = accounts(&queue).await;
    assert_eq!(
        (found.context, found.foreign, found.free),
        (Bytes::gib(1), Bytes::gib(20), Bytes::gib(3))
    );
    let plan = queue.plan(load("a", "me", &["transformer"]), "").await.unwrap();
    assert!(!plan.fits, "12 GiB beside 20 of others");
}

#[tokio::test(start_paused = true)]
async fn the_start_cost_of_the_last_worker_is_booked_until_the_next_is_ready() {
    let (queue, mut worker) = one_card().await;
    worker.die();
    settle().await;
    assert_eq!(accounts(&queue).await.free, CARD, "it took nothing");
    worker.context = Bytes::gib(3);
    worker.ready();
    let mut job = queue.submit(load("a", "me", &["transformer"])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    worker.die();
    settle().await;
    let status = queue.status_now().await;
    assert_eq!(status.cards[0].state, CardState::Restarting);
    let found = accounts(&queue).await;
    assert_eq!((found.context, found.components), (Bytes::gib(3), Bytes::ZERO));
    assert_eq!(found.free, CARD - Bytes::gib(3));
    assert_eq!(found.sum(), CARD);
    // Beside the next worker's context there is no room for 22 GiB: that is known before it is ready.
    let mut job = queue.submit(load("large", "me", &["transformer"])).await.unwrap();
    let refused = tokio::time::timeout(Duration::from_secs(1), end(&mut job)).await;
    assert!(matches!(refused, Ok(Err(Error::NeverFits(_)))), "{refused:?}");
    worker.context = Bytes::gib(1);
    worker.ready();
    settle().await;
    let found = accounts(&queue).await;
    assert_eq!(
        (found.context, found.free),
        (Bytes::gib(1), CARD - Bytes::gib(1)),
        "the truth"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_used_part_of_a_reservation_is_not_reserved_again_for_the_next_worker() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(2));
    let asked = queue.clone();
    let reserved = tokio::spawn(async move {
        let (bytes, ttl) = (Bytes::gib(10), Duration::from_secs(3600));
        asked.reserve("", bytes, ttl, "blender".into()).await
    });
    let Wire::Command(Command::MakeRoom { id, .. }) = worker.next().await else {
        panic!()
    };
    let answer = Answer::Unloaded {
        freed: Vec::new(),
        kept: Vec::new(),
        short: Bytes::ZERO,
    };
    worker.say(Event::Answer { id, answer });
    reserved.await.unwrap().unwrap();
    assert!(worker.receives_no_command().await);
    worker.set_foreign(Bytes::gib(9)); // 7 of the 10 are taken
    settle().await;
    let usable = async || queue.status_now().await.cards[0].ledger.usable();
    assert_eq!(usable().await, Bytes::gib(24 - 9 - 3));
    for _ in 0..2 {
        worker.die();
        settle().await;
        worker.die(); // before it is ready
        settle().await;
        worker.ready();
        assert!(worker.receives_no_command().await);
        assert_eq!(usable().await, Bytes::gib(24 - 9 - 3));
    }
}

fn replaced() -> Outcome {
    Outcome::Failed(Failure::Replaced {
        message: "the files of its transformer were replaced".to_owned(),
    })
}

fn changes(events: &[JobEventKind]) -> usize {
    let changes = events.iter().filter(
        |event| matches!(event, JobEventKind::Retrying { reason, message, .. } if reason == "MODEL_CHANGED" && message.contains("transformer")),
    );
    changes.count()
}

#[tokio::test(start_paused = true)]
async fn a_job_restarts_once_with_the_new_files_of_its_model() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    let order = worker.order().await;
    assert_eq!(stage_of(&order), "denoise");
    worker.finish(order.ticket, replaced());
    // The prompt was encoded already, by a component that is the same; nothing of the picture was made.
    let again = worker.order().await;
    assert!(stage_of(&again) == "denoise" && again.ticket != order.ticket);
    worker.complete(&again);
    worker.work(1).await;
    let seen = events(&mut job).await;
    assert_eq!(changes(&seen), 1);
    assert!(matches!(seen.last(), Some(JobEventKind::Done(_))));

    let mut job = queue.submit(picture("a", "me", "a dog")).await.unwrap();
    for _ in 0..2 {
        let order = worker.order().await;
        assert_eq!(stage_of(&order), "encode_text");
        worker.finish(order.ticket, replaced());
    }
    let seen = events(&mut job).await;
    assert_eq!(changes(&seen), 1);
    let Some(JobEventKind::Failed(error @ Error::ModelChanged(_))) = seen.last() else {
        panic!("{seen:?}")
    };
    let told = error.to_string();
    assert!(
        told.contains("were replaced") && told.contains("submit the request again"),
        "{told}"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_model_was_replaced_after_its_sampling_fails_and_keeps_its_latent() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    worker.work(1).await;
    let order = worker.order().await;
    assert_eq!(stage_of(&order), "decode");
    worker.finish(order.ticket, replaced());
    let seen = events(&mut job).await;
    assert_eq!(changes(&seen), 0);
    assert!(
        seen.iter()
            .any(|event| matches!(event, JobEventKind::Latent { .. }))
    );
    assert!(matches!(
        seen.last(),
        Some(JobEventKind::Failed(Error::ModelChanged(_)))
    ));
    assert!(worker.receives_no_command().await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_may_be_cancelled_while_its_model_is_opened_anew() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = worker.order().await;
    worker.finish(order.ticket, replaced());
    queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
    assert_eq!(end(&mut job).await, Err(cancelled_by("ann")));
    assert!(worker.receives_no_command().await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn deaths_count_by_stage() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    for stage in ["encode_text", "denoise", "decode"] {
        let order = worker.order().await;
        assert_eq!(stage_of(&order), stage);
        worker.die();
        settle().await;
        worker.ready();
        let again = worker.order().await;
        assert_eq!(stage_of(&again), stage);
        worker.complete(&again);
    }
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

async fn die_twice(worker: &mut crate::worker::Worker, stage: &str) {
    for _ in 0..2 {
        let mut order = worker.order().await;
        while stage_of(&order) != stage {
            worker.complete(&order);
            order = worker.order().await;
        }
        worker.die();
        settle().await;
        worker.ready();
    }
}

#[tokio::test(start_paused = true)]
async fn deaths_of_workers_that_had_not_begun_a_job_do_not_count_against_it() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    for _ in 0..3 {
        worker.order_not_begun().await;
        worker.die();
        settle().await;
        worker.ready();
    }
    for _ in 0..3 {
        worker.work(1).await;
    }
    end(&mut job).await.unwrap();
    let mut never = queue.submit(load("b", "me", &["vae"])).await.unwrap();
    for _ in 0..9 {
        worker.order_not_begun().await;
        worker.die();
        settle().await;
        worker.ready();
    }
    let ended = end(&mut never).await;
    assert!(
        matches!(ended, Err(Error::WorkerDied { deaths: 9, .. })),
        "it may be its order: {ended:?}"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_second_worker_death_fails_the_job_and_two_such_jobs_block_similar_ones() {
    let (queue, mut worker) = one_card().await;
    for prompt in ["one", "two"] {
        let mut job = queue.submit(picture("a", "me", prompt)).await.unwrap();
        die_twice(&mut worker, "denoise").await;
        let card = "sim:0".to_owned();
        let expected = Error::WorkerDied {
            card,
            stage: "denoise".into(),
            deaths: 2,
        };
        assert_eq!(end(&mut job).await, Err(expected));
    }
    assert!(matches!(
        queue.submit(picture("a", "me", "three")).await,
        Err(Error::WorkerDied { .. })
    ));
    let mut other = queue.submit(picture("b", "me", "three")).await.unwrap();
    for _ in 0..3 {
        worker.work(1).await;
    }
    end(&mut other).await.unwrap();
    tokio::time::sleep(Duration::from_secs(601)).await;
    let job = queue.submit(picture("a", "me", "four")).await.unwrap();
    queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
    let order = worker.order().await;
    worker.finish(order.ticket, Outcome::Cancelled);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_decode_that_fails_keeps_its_latent_and_a_retry_starts_at_the_decode() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    die_twice(&mut worker, "decode").await;
    let seen = events(&mut job).await;
    let denoised = seen
        .iter()
        .filter(|e| matches!(e, JobEventKind::Stage { name, .. } if **name == *"denoise"))
        .count();
    assert_eq!(denoised, 1, "the sampling is paid for once");
    let [
        ..,
        JobEventKind::Latent { info, item: 0 },
        JobEventKind::Failed(_),
    ] = &seen[..]
    else {
        panic!("{seen:?}")
    };
    assert!(queue.latent(&info.id).await.is_ok());

    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.work(1).await;
    let order = worker.order().await;
    let (stage, needed, usable) = ("decode".to_owned(), Bytes::gib(3), Bytes::gib(2));
    let failure = Failure::OutOfMemory {
        stage,
        needed,
        usable,
        holders: Vec::new(),
    };
    worker.finish(order.ticket, Outcome::Failed(failure));
    let seen = events(&mut job).await;
    let [
        ..,
        JobEventKind::Latent { .. },
        JobEventKind::Failed(Error::OutOfMemory(shortfall)),
    ] = &seen[..]
    else {
        panic!("{seen:?}")
    };
    assert_eq!((shortfall.needed, shortfall.free), (needed, usable));
    let instead: Vec<&str> = shortfall.fallbacks.iter().map(|f| &*f.change.label).collect();
    assert_eq!(instead[..4], REDUCTIONS, "{instead:?}");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_hung_worker_is_recycled() {
    let stall_limit = Duration::from_secs(20);
    let (queue, mut worker) = one_card_with(Settings {
        stall_limit,
        ..Settings::default()
    })
    .await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    worker.order().await;
    let before = Instant::now();
    assert!(matches!(worker.next().await, Wire::Recycle(_)));
    assert_eq!(before.elapsed().as_secs(), 20);
    worker.die();
    worker.ready();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_order_is_reported_as_such_and_not_tried_again_on_a_cpu() {
    let settings = Settings {
        stall_limit: Duration::from_secs(20),
        ..Settings::default()
    };
    for (is_cpu, attempts) in [(true, 1), (false, 2)] {
        let (queue, mut worker) = match is_cpu {
            true => one_cpu_with(settings.clone()).await,
            false => one_card_with(settings.clone()).await,
        };
        let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
        for _ in 0..attempts {
            worker.order().await;
            assert!(matches!(worker.next().await, Wire::Recycle(_)));
            worker.die();
            worker.ready();
        }
        let ended = end(&mut job).await.unwrap_err();
        assert!(matches!(ended, Error::WorkerSilent { .. }), "{ended}");
        let told = ended.to_string();
        assert!(
            told.contains("no sign for 20 s") && told.contains("queue.stall_limit"),
            "{told}"
        );
        at_rest(&queue).await;
    }
}

/// A queued job, a waiting one, and a running one.
async fn three(deadline: Option<Duration>) -> (engine::queue::Queue, crate::worker::Worker, [Job; 3]) {
    let (queue, mut worker) = one_card_with(Settings {
        cancel_limit: CANCEL_LIMIT,
        ..Settings::default()
    })
    .await;
    worker.set_foreign(Bytes::gib(16));
    settle().await;
    let at = deadline.map(|after| Instant::now() + after);
    let with = |mut spec: engine::job::JobSpec| {
        spec.options.deadline = at;
        spec.options.patience = Some(Duration::from_secs(60));
        spec
    };
    let running = queue.submit(with(load("b", "r", &["vae"]))).await.unwrap();
    settle().await;
    let waiting = queue
        .submit(with(load("a", "w", &["transformer"])))
        .await
        .unwrap();
    let queued = queue.submit(with(load("b", "q", &["vae"]))).await.unwrap();
    settle().await;
    let states: Vec<_> = queue.jobs(false).await.iter().map(|job| job.state).collect();
    assert_eq!(states, [JobState::Running, JobState::Waiting, JobState::Queued]);
    (queue, worker, [running, waiting, queued])
}

#[tokio::test(start_paused = true)]
async fn jobs_are_cancelled_in_every_state() {
    let (queue, mut worker, [mut running, mut waiting, mut queued]) = three(None).await;
    let order = worker.order().await;
    for job in [&mut queued, &mut waiting] {
        assert!(queue.cancel(&job.id, "ann".to_owned()).await.unwrap());
        let before = Instant::now();
        assert_eq!(end(job).await, Err(cancelled_by("ann")));
        assert!(before.elapsed().as_millis() == 0, "at once");
        assert!(!queue.cancel(&job.id, "ann".to_owned()).await.unwrap());
    }
    assert!(queue.cancel(&running.id, "ann".to_owned()).await.unwrap());
    let Wire::Command(Command::Cancel(ticket)) = worker.next().await else {
        panic!()
    };
    assert_eq!(ticket, order.ticket);
    let before = Instant::now();
    assert!(
        matches!(worker.next().await, Wire::Recycle(_)),
        "it does not let go"
    );
    assert_eq!(
        before.elapsed().as_secs(),
        CANCEL_LIMIT.as_secs(),
        "no step of it has been measured"
    );
    worker.die();
    assert_eq!(end(&mut running).await, Err(cancelled_by("ann")));
    assert_eq!(
        queue.cancel("job-none", "ann".to_owned()).await,
        Err(Error::JobNotFound("job-none".into()))
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_list_of_jobs_says_who_cancelled_a_job_and_how() {
    let (queue, mut worker, [running, mut waiting, queued]) = three(None).await;
    let order = worker.order().await;
    queue.cancel(&waiting.id, "bob@desk".to_owned()).await.unwrap();
    assert_eq!(end(&mut waiting).await, Err(cancelled_by("bob@desk")));
    drop(queued);
    settle().await;
    let asking = queue.clone();
    let unload =
        tokio::spawn(async move { asking.unload(Some(entry("b")), Some("ann@box".to_owned())).await });
    settle().await;
    worker.finish(order.ticket, Outcome::Cancelled);
    for _ in 0..3 {
        settle().await;
        if let Some(Wire::Command(Command::Unload { id, components })) = worker.try_next() {
            worker.unload(id, &components);
        }
    }
    let report = unload.await.unwrap().unwrap();
    assert_eq!(report.cancelled_jobs, std::slice::from_ref(&running.id));
    let told: Vec<_> = queue
        .jobs(true)
        .await
        .into_iter()
        .map(|job| (job.state, job.error))
        .collect();
    let by = |client: &str| Some(cancelled_by(client));
    let left = Some(Error::Cancelled(CancelledBy::Left));
    let unloaded = CancelledBy::Unload {
        entry: Some("b".to_owned()),
        client: "ann@box".to_owned(),
    };
    assert_eq!(
        told,
        [
            (JobState::Cancelled, Some(Error::Cancelled(unloaded.clone()))),
            (JobState::Cancelled, left),
            (JobState::Cancelled, by("bob@desk")),
        ]
    );
    assert_eq!(unloaded.to_string(), "cancelled: ann@box unloaded b by force");
    assert_eq!(cancelled_by("bob@desk").to_string(), "cancelled by bob@desk");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn deadlines_end_jobs_in_every_state() {
    let (queue, mut worker, jobs) = three(Some(Duration::from_secs(2))).await;
    let order = worker.order().await;
    let Wire::Command(Command::Cancel(_)) = worker.next().await else {
        panic!()
    };
    worker.finish(order.ticket, Outcome::Cancelled);
    let states = [JobState::Running, JobState::Waiting, JobState::Queued];
    for (mut job, state) in jobs.into_iter().zip(states) {
        assert_eq!(end(&mut job).await, Err(Error::Deadline { state }));
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_refuses_new_jobs_waits_and_then_cancels() {
    let (queue, mut worker) = one_card().await;
    let mut first = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    let order = worker.order().await;
    let mut second = queue.submit(load("b", "me", &["vae"])).await.unwrap();
    let drain = queue.drain(Instant::now() + Duration::from_secs(5));
    // Before the drain is polled.
    assert_eq!(
        queue.submit(load("a", "me", &["vae"])).await.err(),
        Some(Error::ShuttingDown)
    );
    let drain = tokio::spawn(drain);
    worker.complete(&order);
    end(&mut first).await.unwrap();
    let order = worker.order().await;
    assert!(!drain.is_finished());
    let Wire::Command(Command::Cancel(_)) = worker.next().await else {
        panic!()
    };
    worker.finish(order.ticket, Outcome::Cancelled);
    assert_eq!(end(&mut second).await, Err(Error::ShuttingDown));
    drain.await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn jobs_end_with_the_queue() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    worker.order().await;
    drop(queue);
    assert_eq!(end(&mut job).await, Err(Error::ShuttingDown));
}

#[tokio::test(start_paused = true)]
async fn a_new_worker_gets_the_claims_and_reloads_pinned_components_first() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    queue.pin(entry("a")).await.unwrap();
    assert!(worker.receives_no_command().await);
    // The status is updated within a second.
    let attention = async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        queue.status().borrow().cards[0].attention.clone()
    };
    assert_eq!(attention().await, "own kernels: for a test");
    worker.die();
    let mut waiting = queue.submit(load("b", "me", &["vae"])).await.unwrap();
    settle().await;
    assert_eq!(attention().await, "", "nobody computes");
    worker.standing = Default::default();
    worker.ready();
    let order = worker.order().await;
    assert_eq!(worker.standing.pins[0].1.len(), 3);
    assert!(order.job.contains("restore") && crate::worker::needs(&order).0.len() == 1);
    worker.complete(&order);
    worker.work(1).await;
    end(&mut waiting).await.unwrap();
    let status = queue.status();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let card = status.borrow().cards[0].clone();
    assert_eq!(
        (card.state, card.generation, card.restarts),
        (CardState::Ready, 2, 1)
    );
    assert_eq!(card.attention, "own kernels: for a test");
    worker.say(Event::Finished {
        ticket: order.ticket,
        outcome: Outcome::Cancelled,
    }); // an old ticket
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn queued_jobs_are_refused_after_similar_jobs_killed_workers() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for prompt in ["one", "two", "three"] {
        jobs.push(queue.submit(picture("a", "me", prompt)).await.unwrap());
    }
    for job in &mut jobs[..2] {
        die_twice(&mut worker, "denoise").await;
        assert!(matches!(end(job).await, Err(Error::WorkerDied { deaths: 2, .. })));
    }
    assert!(matches!(end(&mut jobs[2]).await, Err(Error::WorkerDied { .. })));
    let (unload, ()) = tokio::join!(queue.unload(Some(entry("a")), None), settle());
    assert!(unload.is_ok(), "nothing is there");
    let forgiven = queue.submit(picture("a", "me", "four")).await.unwrap();
    drop(forgiven);
    let order = worker.order().await;
    worker.finish(order.ticket, Outcome::Cancelled);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_may_answer_wait_to_a_low_memory_order() {
    let (queue, mut worker) = one_card().await;
    let mut spec = load("a", "me", &["transformer"]);
    spec.options.allow_low_memory = true;
    let mut job = queue.submit(spec).await.unwrap();
    let mut asked = 0;
    for second in 0..20 {
        while let Some(Wire::Command(Command::Run(order))) = worker.try_next() {
            asked += 1;
            let (short, usable) = (Bytes::gib(4), Bytes::gib(8));
            let shortage = engine::messages::Shortage {
                short,
                needed: short,
                usable,
                cause: residency::WaitCause::LateEviction,
                holders: Vec::new(),
            };
            if second < 19 {
                worker.finish(order.ticket, Outcome::Wait(shortage));
            } else {
                worker.complete(&order);
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!((15..=25).contains(&asked), "{asked}");
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn commands_sent_during_a_long_stage_do_not_count_as_a_hang() {
    let stall_limit = Duration::from_secs(20);
    let (queue, mut worker) = one_card_with(Settings {
        stall_limit,
        ..Settings::default()
    })
    .await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    let order = worker.order().await;
    let asking = queue.clone();
    let trim = tokio::spawn(async move { asking.trim("").await });
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        worker.progress(order.ticket, engine::messages::Progress::Step { n: 1, of: 2 });
    }
    let Some(Wire::Command(Command::Trim { id })) = worker.try_next() else {
        panic!()
    };
    worker.complete(&order);
    end(&mut job).await.unwrap();
    assert!(worker.receives_no_command().await, "it is not killed");
    worker.say(Event::Answer {
        id,
        answer: engine::messages::Answer::Trimmed(Bytes::ZERO),
    });
    assert_eq!(trim.await.unwrap(), Ok(Bytes::ZERO));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_outcome_of_a_stale_attempt_is_ignored() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    let first = worker.order().await;
    worker.die();
    worker.ready();
    let second = worker.order().await;
    worker.finish(first.ticket, completed(&first, Vec::new()));
    assert!(worker.receives_no_command().await && queue.jobs(false).await[0].state == JobState::Running);
    worker.complete(&second);
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}
