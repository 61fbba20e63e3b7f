//! Notifications of watchers: expiry, and every load and picture of a job.

use std::time::Duration;

use engine::job::JobEventKind;
use engine::messages::{Answer, Command, Event, Progress};
use engine::queue::{Settings, StatusReport};
use residency::Bytes;

use crate::fixture::{brought, entry, load, picture, run_of};
use crate::worker::{
    Wire, at_rest, cancelled_by, completed, end, events, needs, one_card, one_card_with, settle, stage_of,
};

#[tokio::test(start_paused = true)]
async fn watchers_are_notified_of_expiry() {
    let (queue, mut worker) = one_card_with(Settings {
        latent_ttl: Duration::from_secs(20),
        ..Settings::default()
    })
    .await;
    let mut status = queue.status();
    queue
        .put_latent(brought(), "vae".into(), String::new())
        .await
        .unwrap();
    let asking = queue.clone();
    let reserve = tokio::spawn(async move {
        let ttl = Duration::from_secs(40);
        asking.reserve("", Bytes::gib(6), ttl, "game".into()).await
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
    reserve.await.unwrap().unwrap();
    queue
        .hold(entry("a"), "me".into(), Duration::from_secs(60))
        .await
        .unwrap();
    settle().await;

    let counts = |status: &StatusReport| {
        (
            status.latents,
            status.cards[0].reservations.len(),
            status.users.len(),
        )
    };
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(counts(&status.borrow_and_update()), (1, 1, 3));
    // The worker is silent meanwhile: the notifications are due to time.
    for told in [(0, 1, 3), (0, 0, 3), (0, 0, 0)] {
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(status.has_changed().unwrap(), "{told:?}");
        assert_eq!(counts(&status.borrow_and_update()), told);
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn watchers_are_notified_when_a_model_is_completely_unloaded() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    settle().await;
    queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
    let order = worker.order().await;
    worker.finish(order.ticket, engine::messages::Outcome::Cancelled);
    assert_eq!(end(&mut job).await, Err(cancelled_by("ann")));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(queue.status().borrow().users.is_empty());
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_sees_the_final_progress_of_every_load() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(load("a", "me", &[])).await.unwrap();
    let order = worker.order().await;
    let components = needs(&order).0.to_vec();
    for component in &components {
        for part in 1..=100 {
            let done = Bytes(component.bytes.0 / 100 * part);
            let component = component.clone();
            worker.progress(order.ticket, Progress::Loading { component, done });
        }
        let (component, done) = (component.clone(), component.bytes);
        worker.progress(order.ticket, Progress::Loading { component, done });
    }
    worker.deliver(&order);
    worker.finish(order.ticket, completed(&order, Vec::new()));
    settle().await;
    let seen = events(&mut job).await;
    let loads: Vec<_> = seen
        .iter()
        .filter_map(|event| match event {
            JobEventKind::Loading { component, done, .. } => Some((component.name.as_str(), *done)),
            _ => None,
        })
        .collect();
    let whole: Vec<_> = components.iter().map(|c| (c.name.as_str(), c.bytes)).collect();
    assert_eq!(loads, whole, "the last of each, and no more");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_sees_the_last_step_of_every_picture() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "two cats");
    let generate = run_of(&mut spec);
    generate.count = 2;
    let mut job = queue.submit(spec).await.unwrap();
    worker.work(1).await;
    for _ in 0..4 {
        let order = worker.order().await;
        worker.begin(&order).unwrap();
        let of = if stage_of(&order) == "decode" { 7 } else { 40 };
        for n in 1..=of {
            worker.progress(order.ticket, Progress::Step { n, of });
            let (width, height, rgb) = (1, 1, vec![0, 0, n as u8].into());
            let preview = Progress::Preview {
                step: n,
                width,
                height,
                rgb,
            };
            worker.progress(order.ticket, preview);
        }
        worker.deliver(&order);
        worker.finish(order.ticket, completed(&order, Vec::new()));
        settle().await;
    }
    let seen = events(&mut job).await;
    let mut stage = String::new();
    let (mut steps, mut previews) = (Vec::new(), Vec::new());
    for event in &seen {
        match event {
            JobEventKind::Stage { name, .. } => stage = name.to_string(),
            JobEventKind::Step { n, item, .. } => steps.push((*item, stage.clone(), *n)),
            JobEventKind::Preview { step, item, .. } => previews.push((*item, stage.clone(), *step)),
            _ => {}
        }
    }
    let last = [
        (0, "denoise", 40),
        (0, "decode", 7),
        (1, "denoise", 40),
        (1, "decode", 7),
    ];
    let last = last.map(|(item, stage, n)| (item, stage.to_owned(), n));
    assert_eq!((&steps[..], &previews[..]), (&last[..], &last[..]));
    at_rest(&queue).await;
}
