//! Bounds on what clients can make grow: lifetimes of jobs, and the memory that they hold.

use std::time::Duration;

use engine::JobState;
use engine::job::{JobEventKind, JobSpec, Reach};
use engine::messages::Command;
use engine::queue::{Job, Queue, Settings};
use engine::{CancelledBy, Error, JobBound};
use model::InitImage;
use residency::Bytes;
use tokio::time::Instant;

use crate::fixture::{brought, entry, image_of, load, picture, run_of};
use crate::worker::{Wire, Worker, at_rest, end, events, one_card, one_card_with};

/// A load with a key and a deadline in this many seconds (0: none).
fn keyed(seconds: u64, detach: bool) -> JobSpec {
    let mut spec = load("a", "me", &[]);
    spec.options.idempotency_key = "key".into();
    spec.options.detach = detach;
    spec.options.deadline = (seconds > 0).then(|| Instant::now() + Duration::from_secs(seconds));
    spec
}

#[tokio::test(start_paused = true)]
async fn a_detached_job_ignores_deadlines() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(keyed(2, true)).await.unwrap();
    let mut joined = queue.submit(keyed(1, false)).await.unwrap();
    worker.work(5_000).await;
    assert_eq!((end(&mut job).await, end(&mut joined).await), (Ok(()), Ok(())));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_latest_deadline_of_joined_clients_counts() {
    for (deadlines, work_ms, ends) in [
        ([2, 10], 5_000, Ok(())),
        ([10, 2], 5_000, Ok(())),
        ([2, 0], 5_000, Ok(())),
        ([0, 2], 5_000, Ok(())),
        ([2, 4], 5_000, Err(JobState::Running)),
    ] {
        let (queue, mut worker) = one_card().await;
        let mut first = queue.submit(keyed(deadlines[0], false)).await.unwrap();
        let mut second = queue.submit(keyed(deadlines[1], false)).await.unwrap();
        worker.work(work_ms).await;
        let expected = ends.map_err(|state| Error::Deadline { state });
        assert_eq!(end(&mut first).await, expected, "{deadlines:?}");
        assert_eq!(end(&mut second).await, expected, "{deadlines:?}");
    }
}

/// Bytes of a picture.
const PICTURE_BYTES: u64 = 3 * 1024 * 1024;

/// A job of four pictures.
fn four_pictures() -> JobSpec {
    let mut spec = picture("a", "me", "cats");
    let generate = run_of(&mut spec);
    generate.count = 4;
    spec.options.idempotency_key = "key".into();
    spec
}

/// A queue that allows two unread pictures.
async fn two_unread() -> (Queue, Worker) {
    one_card_with(Settings {
        unread_pictures: Bytes(2 * PICTURE_BYTES),
        ..Settings::default()
    })
    .await
}

async fn pictures(job: &mut Job) -> usize {
    let all = events(job).await;
    let pictures = all.iter().filter(|e| matches!(e, JobEventKind::Piece { .. }));
    pictures.count()
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_does_not_read_is_closed_and_its_job_cancelled() {
    let (queue, mut worker) = two_unread().await;
    let mut job = queue.submit(four_pictures()).await.unwrap();
    for _ in 0..7 {
        worker.work(1).await; // the text, and three pictures
    }
    assert!(worker.receives_no_command().await, "nobody reads the fourth");
    let seen = events(&mut job).await;
    assert!(
        matches!(seen[..], [JobEventKind::Failed(Error::SlowReader { .. })]),
        "{seen:?}"
    );
    let ended = queue.jobs(true).await;
    assert_eq!((ended.len(), ended[0].state), (1, JobState::Cancelled));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn closing_a_slow_listener_does_not_affect_others_or_joiners() {
    let (queue, mut worker) = two_unread().await;
    let mut idle = queue.submit(four_pictures()).await.unwrap();
    let mut reader = queue.submit(four_pictures()).await.unwrap();
    let reading = tokio::spawn(async move { pictures(&mut reader).await });
    for _ in 0..7 {
        worker.work(1).await;
    }
    let mut late = queue.submit(four_pictures()).await.unwrap();
    for _ in 0..2 {
        worker.work(1).await;
    }
    assert_eq!((reading.await.unwrap(), pictures(&mut late).await), (4, 4));
    assert!(matches!(end(&mut idle).await, Err(Error::SlowReader { .. })));
    let mut afterwards = queue.submit(four_pictures()).await.unwrap();
    assert_eq!(pictures(&mut afterwards).await, 4);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_detached_job_continues_without_slow_listeners() {
    let (queue, mut worker) = two_unread().await;
    let mut spec = four_pictures();
    spec.options.detach = true;
    let mut job = queue.submit(spec).await.unwrap();
    for _ in 0..9 {
        worker.work(1).await;
    }
    assert!(matches!(end(&mut job).await, Err(Error::SlowReader { .. })));
    assert_eq!(queue.jobs(true).await[0].state, JobState::Done);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_result_is_too_large_to_be_kept_cannot_be_joined() {
    let (queue, mut worker) = one_card_with(Settings {
        replay: Bytes(2 * PICTURE_BYTES),
        ..Settings::default()
    })
    .await;
    let mut job = queue.submit(four_pictures()).await.unwrap();
    let reading = tokio::spawn(async move { pictures(&mut job).await });
    for _ in 0..5 {
        worker.work(1).await; // the text, and two pictures
    }
    let early = queue.submit(four_pictures()).await;
    assert!(early.is_ok(), "two are kept");
    drop(early);
    for _ in 0..2 {
        worker.work(1).await;
    }
    assert_eq!(
        queue.submit(four_pictures()).await.err(),
        Some(Error::TooLargeToJoin("key".into()))
    );
    for _ in 0..2 {
        worker.work(1).await;
    }
    assert_eq!(reading.await.unwrap(), 4, "who listened all along has everything");
    let again = queue.submit(four_pictures()).await.unwrap();
    assert!(!again.joined, "nothing of it was kept: it is a job of its own");
    drop(again);
    let order = worker.order().await;
    worker.finish(order.ticket, engine::messages::Outcome::Cancelled);
    at_rest(&queue).await;
}

/// An image to image job with an input of this many bytes.
fn of_image(bytes: usize) -> JobSpec {
    let mut spec = picture("a", "me", "a cat");
    image_of(&mut spec).init_image = Some(InitImage {
        width: 1024,
        height: 1024,
        rgb: vec![0; bytes].into(),
    });
    spec
}

#[tokio::test(start_paused = true)]
async fn the_queue_limits_the_bytes_of_inputs() {
    let (queue, mut worker) = one_card_with(Settings {
        input_bytes: Bytes(100),
        job_input_bytes: Bytes(300),
        ..Settings::default()
    })
    .await;
    let mut first = queue.submit(of_image(60)).await.unwrap();
    let second = queue.submit(of_image(40)).await.unwrap();
    assert!(matches!(
        queue.submit(of_image(1)).await,
        Err(Error::InputsFull { kept: Bytes(100), .. })
    ));
    let others = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    drop(second);
    drop(others);
    for _ in 0..4 {
        worker.work(1).await;
    }
    end(&mut first).await.unwrap();
    let too_large = queue.submit(of_image(400)).await.map(drop);
    assert!(
        matches!(&too_large, Err(Error::Invalid(problems)) if problems[0].problem.contains("a worker takes")),
        "{too_large:?}"
    );
    let alone = queue.submit(of_image(200)).await;
    assert!(alone.is_ok(), "one job is never too many");
    drop(alone);
    let order = worker.order().await;
    worker.finish(order.ticket, engine::messages::Outcome::Cancelled);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn an_unknown_card_is_refused_at_once() {
    let (queue, mut worker) = one_card().await;
    let (ttl, bytes) = (Duration::from_secs(10), Bytes::gib(1));
    let refusals = [
        queue.plan(picture("a", "me", ""), "sim:9").await.err(),
        queue.trim("sim:9").await.err(),
        queue.reserve("sim:9", bytes, ttl, "game".into()).await.err(),
    ];
    for refusal in refusals {
        let Some(Error::Invalid(problems)) = refusal else {
            panic!("{refusal:?}")
        };
        assert_eq!(problems[0].field, "card");
        assert!(problems[0].problem.contains("sim:9") && problems[0].problem.contains("sim:0"));
    }
    worker.die();
    assert!(matches!(queue.trim("sim:0").await, Err(Error::CardNotReady(_))));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_unread_results_of_one_account_are_bounded_together() {
    let (queue, mut worker) = one_card_with(Settings {
        unread_of_account: Bytes(3 * PICTURE_BYTES),
        ..Settings::default()
    })
    .await;
    let of_account = |name: &str, account: &str| {
        let mut spec = picture("a", name, name);
        spec.options.account = account.into();
        run_of(&mut spec).count = 2;
        spec
    };
    // Under whatever names: two jobs of an address leave two pictures each unread, the second of the second is too many.
    let mut first = queue.submit(of_account("one", "10.0.0.1")).await.unwrap();
    let mut second = queue.submit(of_account("two", "10.0.0.1")).await.unwrap();
    let mut other = queue.submit(of_account("three", "10.0.0.2")).await.unwrap();
    while worker.try_work().await {}
    assert!(matches!(end(&mut second).await, Err(Error::SlowReader { .. })));
    assert_eq!((pictures(&mut first).await, pictures(&mut other).await), (2, 2));
    let mut again = queue.submit(of_account("four", "10.0.0.1")).await.unwrap();
    while worker.try_work().await {}
    assert_eq!(pictures(&mut again).await, 2, "what was read counts no more");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn many_jobs_that_leave_one_result_each_unread_are_bounded_too() {
    let (queue, mut worker) = one_card_with(Settings {
        unread_of_account: Bytes(2 * PICTURE_BYTES),
        ..Settings::default()
    })
    .await;
    let mut jobs = Vec::new();
    for number in 0..12 {
        let mut spec = picture("a", &format!("name-{number}"), &format!("{number}"));
        spec.options.account = "10.0.0.1".into();
        jobs.push(queue.submit(spec).await.unwrap());
        while worker.try_work().await {}
    }
    let mut kept = 0;
    for mut job in jobs {
        match end(&mut job).await {
            Ok(_) => kept += 1,
            Err(error) => assert!(matches!(error, Error::SlowReader { .. }), "{error}"),
        }
    }
    assert!((3..=6).contains(&kept), "{kept} of 12 were kept");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn places_of_the_queue_are_bounded_by_client_and_address_and_the_last_are_kept_for_others() {
    let (queue, _worker) = one_card_with(Settings {
        max_jobs: 16,
        max_jobs_per_client: 8,
        ..Settings::default()
    })
    .await;
    let mut jobs = Vec::new();
    let mut submit = async |client: &str, address: &str| {
        let mut spec = picture("a", client, &format!("{}", jobs.len()));
        spec.options.account = address.into();
        match queue.submit(spec).await {
            Ok(job) => {
                jobs.push(job);
                Ok(())
            }
            Err(Error::TooManyJobs(bound)) => Err(Some(bound)),
            Err(Error::QueueFull { limit: 16 }) => Err(None),
            Err(other) => panic!("{other}"),
        }
    };
    for _ in 0..8 {
        assert_eq!(submit("greedy", "10.0.0.1").await, Ok(()));
    }
    let of_client = JobBound::Client {
        client: "greedy".into(),
        limit: 8,
    };
    assert_eq!(submit("greedy", "10.0.0.1").await, Err(Some(of_client)));
    for name in 0..6 {
        assert_eq!(submit(&format!("name {name}"), "10.0.0.1").await, Ok(()));
    }
    let of_address = JobBound::Address {
        address: "10.0.0.1".into(),
        limit: 14,
    };
    assert_eq!(submit("another name", "10.0.0.1").await, Err(Some(of_address)));
    assert_eq!(
        submit("greedy", "10.0.0.2").await,
        Ok(()),
        "a place was kept, and the name is another client there"
    );
    let kept = JobBound::Kept { places: 2 };
    assert_eq!(submit("b", "10.0.0.2").await, Err(Some(kept)));
    assert_eq!(submit("c", "10.0.0.3").await, Ok(()));
    assert_eq!(submit("d", "10.0.0.4").await, Err(None), "all places are taken");
}

#[tokio::test(start_paused = true)]
async fn clients_that_vanish_each_second_for_an_hour_leave_nothing() {
    const SECOND: Duration = Duration::from_secs(1);
    let (queue, mut worker) = one_card().await;
    // A worker that goes on with what it has begun, whoever has left meanwhile.
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let works = tokio::spawn(async move {
        loop {
            let wire = tokio::select! {
                wire = worker.commands.recv() => wire.unwrap(),
                _ = &mut stopped => return worker,
            };
            match worker.taken(wire) {
                Some(Wire::Command(Command::Run(order))) => {
                    tokio::time::sleep(Duration::from_millis(150)).await;
                    worker.complete(&order);
                }
                Some(Wire::Command(_)) | None => {}
                Some(Wire::Recycle(reason)) => panic!("{reason}"),
            }
        }
    });
    for number in 0..3600_u32 {
        let account = format!("10.0.{}.{}", number / 200, number % 200);
        let mut spec = picture("a", &format!("client {number}"), &format!("{number}"));
        spec.options.account.clone_from(&account);
        // How far each has come when it leaves.
        match number % 6 {
            0 => drop(queue.submit(spec).await.unwrap()),
            1 => {
                let job = queue.submit(spec).await.unwrap();
                tokio::time::sleep(Duration::from_millis(100)).await;
                drop(job);
            }
            2 => {
                spec.options.idempotency_key = format!("key {number}");
                let job = queue.submit(spec).await.unwrap();
                tokio::time::sleep(SECOND * 2).await;
                drop(job); // it was never read
            }
            3 => {
                let own = queue.within(Reach::Own(account));
                own.hold(entry("a"), format!("client {number}"), SECOND * 60)
                    .await
                    .unwrap();
            }
            4 => {
                let latent = queue.put_latent(brought(), "path:/a#vae".into(), account);
                latent.await.unwrap();
            }
            _ => {
                let mut job = queue.submit(spec).await.unwrap();
                job.next().await;
                drop(job);
            }
        }
        tokio::time::sleep(SECOND).await;
    }
    tokio::time::sleep(Settings::default().latent_ttl + SECOND).await;
    at_rest(&queue).await;
    let status = queue.status_now().await;
    assert_eq!((status.latents, status.latent_bytes), (0, Bytes::ZERO));
    for card in &status.cards {
        assert!(card.reservations.is_empty(), "{card:?}");
    }
    let ended = queue.jobs(true).await.len();
    assert!(ended <= Settings::default().ended_kept, "{ended}");
    stop.send(()).unwrap();
    let standing = works.await.unwrap().standing;
    assert!(standing.holds.is_empty(), "{standing:?}");
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_token_has_no_jobs_and_no_holds_and_others_keep_theirs() {
    let (queue, mut worker) = one_card().await;
    let of = |account: &str, prompt: &str, detach| {
        let mut spec = picture("a", "me", prompt);
        spec.options.account = account.to_owned();
        spec.options.detach = detach;
        queue.submit(spec)
    };
    let mut running = of("alice", "1", true).await.unwrap();
    let order = worker.order().await;
    let mut waiting = of("alice", "2", false).await.unwrap();
    let mut other = of("bob", "3", false).await.unwrap();
    let minute = Duration::from_secs(60);
    let hold = async |account: &str| {
        let own = queue.within(Reach::Own(account.to_owned()));
        (own.hold(entry("a"), "me".into(), minute).await.unwrap(), own)
    };
    let ((held, alice), (held_by_bob, bob)) = (hold("alice").await, hold("bob").await);
    queue.withdraw("alice".to_owned()).await;
    let withdrawn = Error::Cancelled(CancelledBy::Withdrawn);
    assert_eq!(end(&mut waiting).await, Err(withdrawn.clone()));
    assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    worker.complete(&order);
    assert_eq!(end(&mut running).await, Err(withdrawn), "detached or not");
    assert!(!alice.release_hold(&held).await && bob.release_hold(&held_by_bob).await);
    for _ in 0..3 {
        worker.work(10).await;
    }
    assert_eq!(end(&mut other).await, Ok(()));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn without_a_place_for_a_job_its_key_still_joins_it() {
    let (queue, mut worker) = one_card().await;
    let of = |key: &str| {
        let mut spec = picture("a", "me", "a cat");
        spec.options.account = "alice".to_owned();
        spec.options.idempotency_key = key.to_owned();
        spec
    };
    let mut first = queue.submit(of("key")).await.unwrap();
    let mut again = of("key");
    again.options.most_jobs = Some(0);
    let mut joined = queue.submit(again.clone()).await.unwrap();
    assert!(joined.joined);
    let mut another = of("another key");
    another.options.most_jobs = Some(0);
    let refused = queue.submit(another).await.unwrap_err();
    assert!(
        matches!(&refused, Error::TokenLimit { limit, .. } if limit == "jobs"),
        "{refused}"
    );
    for _ in 0..3 {
        worker.work(10).await;
    }
    assert_eq!((end(&mut first).await, end(&mut joined).await), (Ok(()), Ok(())));
    let ended = queue.submit(again).await.unwrap();
    assert!(ended.joined, "and what it has made, once it has ended");
}
