//! Models with common components, and their effects on each other: learned peaks, unloads.

use std::sync::Arc;
use std::time::Duration;

use engine::job::{JobSpec, JobWork};
use engine::library::Entry;
use engine::messages::{Command, Order, Outcome, Work};
use engine::queue::{Queue, Settings, UnloadReport};
use residency::Bytes;

use crate::fixture::{entry, load, picture, with_adapters};
use crate::worker::{
    Wire, Worker, at_rest, completed, end, one_card, one_card_with, settle, stage_of, start,
};

/// Runs a picture job, and returns the scratch with which the denoising was ordered.
async fn scratch_of_denoise(queue: &Queue, worker: &mut Worker, name: &str) -> Bytes {
    scratch_of_job(queue, worker, picture(name, "me", "a cat")).await
}

async fn scratch_of_job(queue: &Queue, worker: &mut Worker, spec: JobSpec) -> Bytes {
    let mut job = queue.submit(spec).await.unwrap();
    let mut scratch = Bytes::ZERO;
    loop {
        let order: Order = worker.order().await;
        if let (Work::Stage(stage), "denoise") = (&order.work, stage_of(&order)) {
            scratch = stage.plan.rungs[0].scratch;
        }
        worker.complete(&order);
        if stage_of(&order) == "decode" {
            break;
        }
    }
    end(&mut job).await.unwrap();
    settle().await;
    scratch
}

#[tokio::test(start_paused = true)]
async fn learned_peaks_apply_only_to_models_of_the_same_size() {
    let (queue, mut worker) = one_card().await;
    let (predicted, learned) = (Bytes::gib(1), Bytes::mib(512) + Bytes::mib(16) + Bytes::mib(16));
    assert_eq!(scratch_of_denoise(&queue, &mut worker, "small").await, predicted);
    assert_eq!(scratch_of_denoise(&queue, &mut worker, "small").await, learned);
    let plan = queue.plan(picture("a", "me", "a cat"), "").await.unwrap();
    assert!(
        !plan.stages[1].scratch_learned,
        "a small model says nothing of a large one"
    );
    assert_eq!(scratch_of_denoise(&queue, &mut worker, "a").await, predicted);
    assert_eq!(
        scratch_of_denoise(&queue, &mut worker, "b").await,
        learned,
        "another training of the same model needs the same"
    );
    at_rest(&queue).await;
}

/// A stage may allocate per step: a short job must not teach a long one too small a peak.
#[tokio::test(start_paused = true)]
async fn learned_peaks_apply_only_to_the_same_number_of_steps() {
    let (queue, mut worker) = one_card().await;
    let predicted = scratch_of_denoise(&queue, &mut worker, "a").await;
    let of_steps = |steps| {
        let mut spec = picture("a", "me", "a cat");
        if let JobWork::Run(generate) = &mut spec.work {
            generate.request.steps = steps;
        }
        spec
    };
    assert_eq!(scratch_of_job(&queue, &mut worker, of_steps(5)).await, predicted);
    assert_ne!(scratch_of_job(&queue, &mut worker, of_steps(4)).await, predicted);
    at_rest(&queue).await;
}

async fn resident(queue: &Queue, worker: &mut Worker, entry: Arc<Entry>) {
    let mut spec = load("a", "loader", &[]);
    spec.entry = entry;
    let mut job = queue.submit(spec).await.unwrap();
    worker.work(1).await;
    end(&mut job).await.unwrap();
    settle().await;
}

/// Unloads, with a worker that complies.
async fn unload(queue: &Queue, worker: &mut Worker, entry: Option<Arc<Entry>>) -> UnloadReport {
    let asking = queue.clone();
    let unload = tokio::spawn(async move { asking.unload(entry, None).await });
    settle().await;
    while let Some(wire) = worker.try_next() {
        let Wire::Command(Command::Unload { id, components }) = wire else {
            panic!()
        };
        worker.unload(id, &components);
        settle().await;
    }
    unload.await.unwrap().unwrap()
}

fn names(report: &UnloadReport) -> (Vec<&str>, Vec<(&str, String)>) {
    let freed = report.freed.iter().map(|f| f.component.name.as_str());
    let kept = report.kept.iter();
    let kept = kept.map(|k| (k.component.name.as_str(), k.reason.to_string()));
    (freed.collect(), kept.collect())
}

#[tokio::test(start_paused = true)]
async fn an_unload_keeps_components_of_another_complete_model() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, entry("small")).await;
    let report = unload(&queue, &mut worker, Some(entry("a"))).await;
    let (freed, kept) = names(&report);
    assert_eq!(
        (freed.len(), kept),
        (2, vec![("text_encoder_2", "shared with small".to_owned())])
    );
    let report = unload(&queue, &mut worker, Some(entry("small"))).await;
    assert_eq!(
        (report.freed.len(), report.kept.len()),
        (3, 0),
        "nobody else is whole"
    );

    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, entry("small")).await;
    let report = unload(&queue, &mut worker, None).await;
    assert_eq!((report.freed.len(), report.kept.len()), (5, 0), "everything");
    at_rest(&queue).await;
}

/// Whoever unloads a model does not want it kept for a request with adapters that has ended.
#[tokio::test(start_paused = true)]
async fn an_unload_of_a_model_frees_it_though_it_was_used_with_adapters_too() {
    let (queue, mut worker) = one_card().await;
    let adapted = with_adapters(picture("a", "me", "a cat"), &["style"]).entry;
    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, Arc::clone(&adapted)).await;
    let report = unload(&queue, &mut worker, Some(entry("a"))).await;
    assert_eq!((report.freed.len(), names(&report).1), (3, Vec::new()));
    let report = unload(&queue, &mut worker, Some(Arc::clone(&adapted))).await;
    assert_eq!(names(&report), (vec!["adapter:style:transformer"], Vec::new()));

    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, Arc::clone(&adapted)).await;
    let report = unload(&queue, &mut worker, Some(adapted)).await;
    assert_eq!(
        (report.freed.len(), report.kept.len()),
        (1, 3),
        "the model itself is whole without the adapter"
    );
    unload(&queue, &mut worker, None).await;
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn unloading_two_models_at_once_frees_shared_components() {
    let (queue, mut worker) = one_card().await;
    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, entry("small")).await;
    let mut running = queue.submit(load("small", "me", &[])).await.unwrap();
    let order = worker.order().await;
    let asking = queue.clone();
    let second = tokio::spawn(async move { asking.unload(Some(entry("small")), None).await });
    settle().await;
    let report = unload(&queue, &mut worker, Some(entry("a"))).await;
    assert_eq!(
        names(&report).1,
        [("text_encoder_2", "shared with small".to_owned())],
        "a job uses it"
    );
    worker.complete(&order);
    end(&mut running).await.unwrap();
    let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
        panic!()
    };
    worker.unload(id, &components);
    assert_eq!(second.await.unwrap().unwrap().freed.len(), 3);
    assert_eq!(worker.ledger.residents().count(), 0);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_model_can_be_unloaded_by_any_of_its_names() {
    let (queue, mut worker) = one_card().await;
    let again = Arc::new(Entry {
        key: "again".into(),
        ..(*entry("a")).clone()
    });
    resident(&queue, &mut worker, entry("a")).await;
    resident(&queue, &mut worker, again.clone()).await;
    let report = unload(&queue, &mut worker, Some(again)).await;
    assert_eq!((report.freed.len(), report.kept.len()), (3, 0));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn unused_components_are_unloaded_after_their_keep_alive_even_if_shared() {
    let keep_alive = Some(Duration::from_secs(30));
    let (queue, mut worker) = one_card_with(Settings {
        keep_alive,
        ..Settings::default()
    })
    .await;
    resident(&queue, &mut worker, entry("a")).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let again = Arc::new(Entry {
        key: "again".into(),
        ..(*entry("a")).clone()
    });
    resident(&queue, &mut worker, again).await;
    resident(&queue, &mut worker, entry("small")).await;
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert!(
        worker.receives_no_command().await,
        "one of its names was used lately"
    );
    for expected in [2, 3] {
        let Wire::Command(Command::Unload { id, components }) = worker.next().await else {
            panic!()
        };
        assert_eq!(
            components.len(),
            expected,
            "both names first, then the other model"
        );
        worker.unload(id, &components);
    }
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(worker.receives_no_command().await && worker.ledger.residents().count() == 0);
    at_rest(&queue).await;
}

/// Runs a picture on the card that the hint names, whose stages take so long each.
async fn picture_on(queue: &Queue, worker: &mut Worker, card: &str, run_ms: u64) {
    let mut spec = picture("a", "me", card);
    spec.options.card_hint = card.into();
    let mut job = queue.submit(spec).await.unwrap();
    for _ in 0..3 {
        let order = worker.order().await;
        let resident = worker.begin(&order).unwrap();
        worker.deliver(&order);
        let Outcome::Completed(mut done) = completed(&order, resident) else {
            panic!()
        };
        done.run_ms = run_ms;
        worker.finish(order.ticket, Outcome::Completed(done));
    }
    end(&mut job).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn of_two_idle_cards_the_one_that_computes_faster_is_taken() {
    for fast in [0, 1] {
        let (queue, mut workers) = start(Settings::default(), 2);
        for worker in &mut workers {
            worker.ready();
        }
        for (card, worker) in workers.iter_mut().enumerate() {
            let run_ms = if card == fast { 100 } else { 60_000 };
            picture_on(&queue, worker, &format!("sim:{card}"), run_ms).await;
        }
        let _job = queue.submit(picture("a", "me", "a new prompt")).await.unwrap();
        workers[fast].order().await;
        assert!(workers[1 - fast].receives_no_command().await);
    }
}
