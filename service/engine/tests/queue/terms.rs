//! Demands of jobs, clients and operators on a card: memory that stays free, previews, renewed reservations, new
//! workers; and the default eviction policy.

use std::time::Duration;

use engine::job::JobEventKind;
use engine::messages::{Answer, Command, Event, Order, Work};
use engine::queue::{Queue, Settings, Signal};
use engine::{ChangedTo, Error};
use residency::{Bytes, Policy};

use crate::fixture::{entry, load, picture, run_of, with_formats};
use crate::worker::{Wire, Worker, at_rest, end, events, one_card, one_card_with, settle, stage_of};

/// Takes orders up to this stage, and completes those before it.
async fn order_of(worker: &mut Worker, stage: &str) -> Order {
    loop {
        let order = worker.order().await;
        if stage_of(&order) == stage {
            return order;
        }
        worker.complete(&order);
    }
}

fn names(order: &Order) -> Vec<&str> {
    let Work::Stage(work) = &order.work else {
        panic!("a load")
    };
    let mut names: Vec<&str> = work.components.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    names
}

async fn make_resident(queue: &Queue, worker: &mut Worker, name: &str) {
    let mut job = queue.submit(load(name, "me", &[])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn previews_need_spare_memory_and_never_decide_whether_a_job_fits() {
    // The transformer takes 12 or 22 GiB, the stage 1, its previews 2 more.
    for (model, sends, expected) in [
        ("a", 100, vec!["transformer", "vae"]),
        ("large", 0, vec!["transformer"]),
    ] {
        let (queue, mut worker) = one_card().await;
        let mut spec = picture(model, "me", "a cat");
        run_of(&mut spec).request.preview = true;
        run_of(&mut spec).preview_interval_ms = 100;
        let mut job = queue.submit(spec).await.unwrap();
        let order = order_of(&mut worker, "denoise").await;
        let Work::Stage(work) = &order.work else {
            panic!("a load")
        };
        assert_eq!((names(&order), work.preview_interval_ms), (expected, sends));
        worker.complete(&order);
        worker.work(1).await;
        end(&mut job).await.unwrap();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_keeps_as_much_of_the_card_free_as_it_asks_for() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "a cat");
    spec.options.headroom = Bytes::gib(8);
    let mut job = queue.submit(spec.clone()).await.unwrap();
    let order = order_of(&mut worker, "denoise").await;
    assert_eq!(order.headroom, Bytes::gib(8));
    worker.begin(&order).unwrap();
    let left: Vec<String> = worker
        .ledger
        .residents()
        .map(|r| r.component.name.clone())
        .collect();
    assert_eq!(
        left,
        ["transformer"],
        "the text encoder would have fitted beside it"
    );
    worker.complete(&order);
    worker.work(1).await;
    end(&mut job).await.unwrap();

    spec.options.headroom = Bytes::gib(12);
    let mut job = queue.submit(spec).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!("13 GiB beside 12 do not fit 24")
    };
    assert_eq!(shortfall.capacity, Bytes::gib(12));
    assert!(shortfall.needed > shortfall.capacity);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_policy_is_exclusive_for_a_model_that_exceeds_the_card_unless_set() {
    for (set, model, expected) in [
        (None, "a", Policy::Shared),
        (None, "large", Policy::Exclusive),
        (Some(Policy::Shared), "large", Policy::Shared),
        (Some(Policy::Exclusive), "a", Policy::Exclusive),
    ] {
        let (queue, mut worker) = one_card_with(Settings {
            policy: set,
            ..Settings::default()
        })
        .await;
        let mut job = queue.submit(picture(model, "me", "a cat")).await.unwrap();
        for _ in 0..3 {
            let order = worker.order().await;
            assert_eq!(order.policy, expected, "{model} where {set:?} is set");
            worker.complete(&order);
        }
        end(&mut job).await.unwrap();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_names_the_pins_that_are_in_the_way() {
    let (queue, mut worker) = one_card().await;
    make_resident(&queue, &mut worker, "a").await;
    queue.pin(entry("a")).await.unwrap();
    settle().await;
    let mut job = queue.submit(load("large", "me", &["transformer"])).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!("22 GiB do not fit beside 17 that are pinned")
    };
    let last = shortfall.fallbacks.last().map(|fallback| &fallback.change.to);
    assert_eq!(last, Some(&ChangedTo::Unpinned(vec!["a".into()])));
    queue.unpin("a").await.unwrap();
    let mut job = queue.submit(load("large", "me", &["transformer"])).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_offers_more_accurate_formats_that_fit() {
    let (queue, _worker) = one_card().await;
    let four_bits = [("text_encoder_2", "nf4"), ("transformer", "nf4")];
    let upgrades = async |model: &str| {
        let plan = queue
            .plan(with_formats(picture(model, "me", ""), &four_bits), "")
            .await;
        let upgrades = plan.unwrap().upgrades;
        let offered = upgrades.iter().map(|upgrade| match &upgrade.change.to {
            ChangedTo::Quantization(quantization) => quantization.to_string(),
            other => panic!("{other:?}"),
        });
        offered.collect::<Vec<String>>()
    };
    assert_eq!(upgrades("a").await, ["full", "8-bit"]);
    let plan = queue.plan(picture("a", "me", ""), "").await.unwrap();
    assert_eq!(plan.upgrades, [], "nothing is better than what is stored");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_reservation_is_renewed_by_its_id_and_grows_by_the_missing_bytes() {
    let (queue, mut worker) = one_card().await;
    let room = async |worker: &mut Worker, expected: Bytes| {
        let Wire::Command(Command::MakeRoom { id, bytes }) = worker.next().await else {
            panic!("room is to be made")
        };
        assert_eq!(bytes, expected);
        let answer = Answer::Unloaded {
            freed: Vec::new(),
            kept: Vec::new(),
            short: Bytes::ZERO,
        };
        worker.say(Event::Answer { id, answer });
    };
    let minute = Duration::from_secs(60);
    let asking = queue.clone();
    let first = tokio::spawn(async move { asking.reserve("", Bytes::gib(6), minute, "game".into()).await });
    room(&mut worker, Bytes::gib(6)).await;
    let first = first.await.unwrap().unwrap();
    let reserved = async || {
        settle().await;
        let status = queue.status_now().await;
        let reservations = status.cards[0].reservations.iter();
        reservations
            .map(|r| (r.by.label.clone(), r.bytes))
            .collect::<Vec<_>>()
    };

    tokio::time::sleep(minute - Duration::from_secs(5)).await;
    let same = queue
        .renew_reservation(&first.id, Bytes::ZERO, minute)
        .await
        .unwrap();
    assert_eq!((&same.id, same.bytes), (&first.id, Bytes::gib(6)));
    tokio::time::sleep(minute - Duration::from_secs(5)).await;
    assert_eq!(
        reserved().await,
        [("game".to_owned(), Bytes::gib(6))],
        "renewed, not doubled"
    );

    let (asking, id) = (queue.clone(), first.id.clone());
    let more = tokio::spawn(async move { asking.renew_reservation(&id, Bytes::gib(8), minute).await });
    room(&mut worker, Bytes::gib(2)).await;
    assert_eq!(more.await.unwrap().unwrap().bytes, Bytes::gib(8));
    queue
        .renew_reservation(&first.id, Bytes::gib(1), minute)
        .await
        .unwrap();
    assert_eq!(reserved().await, [("game".to_owned(), Bytes::gib(1))]);

    tokio::time::sleep(minute).await;
    assert_eq!(reserved().await, []);
    let expired = queue.renew_reservation(&first.id, Bytes::gib(1), minute).await;
    assert!(matches!(expired, Err(Error::Invalid(problems)) if problems[0].field == "reservation_id"));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_grows_while_its_worker_restarts_is_refused_and_the_next_worker_takes_jobs() {
    let (queue, mut worker) = one_card().await;
    let minute = Duration::from_secs(60);
    let asking = queue.clone();
    let first = tokio::spawn(async move { asking.reserve("", Bytes::gib(2), minute, "game".into()).await });
    let Wire::Command(Command::MakeRoom { id, .. }) = worker.next().await else {
        panic!("room is to be made")
    };
    let answer = Answer::Unloaded {
        freed: Vec::new(),
        kept: Vec::new(),
        short: Bytes::ZERO,
    };
    worker.say(Event::Answer { id, answer });
    let first = first.await.unwrap().unwrap();
    worker.die();
    settle().await;

    let more = queue.renew_reservation(&first.id, Bytes::gib(8), minute).await;
    assert!(matches!(more, Err(Error::CardNotReady(_))), "{more:?}");

    worker.ready();
    let _job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    worker.order().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_is_replaced_on_request_once_it_has_finished_its_order() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    let order = worker.order().await;
    let asking = queue.clone();
    let recycled = tokio::spawn(async move { asking.recycle("sim:0", "ann".to_owned(), false).await });
    assert!(worker.receives_no_command().await, "its stage goes on");
    worker.complete(&order);
    worker.recycled().await;
    worker.die();
    settle().await;
    assert!(!recycled.is_finished(), "the new worker is not ready yet");
    worker.ready();
    assert_eq!(recycled.await.unwrap(), Ok(vec!["sim:0".to_owned()]));
    worker.work(1).await;
    worker.work(1).await;
    end(&mut job).await.unwrap();
    assert!(matches!(
        queue.recycle("sim:9", "ann".to_owned(), false).await,
        Err(Error::Invalid(_))
    ));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_replacement_is_forgotten_when_its_client_has_left_and_no_worker_starts() {
    let (queue, mut worker) = one_card().await;
    let asking = queue.clone();
    let recycled = tokio::spawn(async move { asking.recycle("", "ann".to_owned(), true).await });
    worker.recycled().await;
    worker.die();
    recycled.abort();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn the_status_says_why_no_worker_serves_a_card() {
    let (queue, mut worker) = one_card().await;
    let problem = async || {
        settle().await;
        queue.status_now().await.cards[0].problem.clone()
    };
    assert_eq!(problem().await, "");
    worker.die_of("signal 9");
    assert_eq!(problem().await, "signal 9");
    let reason = "it is stuck in the driver".to_owned();
    worker.signal(
        worker.generation,
        Signal::Stuck {
            reason: reason.clone(),
        },
    );
    assert_eq!(problem().await, reason);
    worker.ready();
    assert_eq!(problem().await, "");
    worker.signal(worker.generation - 1, Signal::Stuck { reason });
    assert_eq!(problem().await, "", "that was its predecessor");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_forced_replacement_does_not_count_against_the_job_that_runs() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &[])).await.unwrap();
    for _ in 0..3 {
        worker.order().await;
        let asking = queue.clone();
        let recycled = tokio::spawn(async move { asking.recycle("", "ann".to_owned(), true).await });
        worker.recycled().await;
        worker.die();
        worker.ready();
        recycled.await.unwrap().unwrap();
    }
    worker.work(1).await;
    let told = events(&mut job).await;
    let retried = |kind: &JobEventKind| matches!(kind, JobEventKind::Retrying { reason, .. } if reason == "WORKER_RECYCLED");
    assert_eq!(told.iter().filter(|kind| retried(kind)).count(), 3);
    assert!(matches!(told.last(), Some(JobEventKind::Done(_))), "{told:?}");
    at_rest(&queue).await;
}
