//! Quantized models: each quantization is an entry, entries share equal components, and a refusal lists the
//! quantizations that would fit.

use std::time::Duration;

use engine::job::JobSpec;
use engine::messages::{Answer, Command, Event, Work};
use engine::queue::{Queue, Settings};
use engine::{Error, Fallback, Shortfall};
use model::Image;
use residency::{Bytes, Fits};

use crate::fixture::{REDUCTIONS, image_of, load, picture, with_formats};
use crate::worker::{Wire, Worker, at_rest, end, one_card, settle, start};

async fn refusal(queue: &Queue, spec: JobSpec) -> Shortfall {
    let mut job = queue.submit(spec).await.unwrap();
    match end(&mut job).await {
        Err(Error::NeverFits(shortfall) | Error::MemoryTaken(shortfall)) => *shortfall,
        other => panic!("{other:?}"),
    }
}

fn told(fallbacks: &[Fallback]) -> Vec<(&str, Bytes, Bytes)> {
    let told = fallbacks.iter();
    told.map(|f| (f.change.label.as_str(), f.peak, f.saved)).collect()
}

/// Runs a load, and returns the bytes loaded and the orders' components.
async fn loaded(queue: &Queue, worker: &mut Worker, spec: JobSpec) -> Vec<String> {
    let mut job = queue.submit(spec).await.unwrap();
    let order = worker.order().await;
    let Work::Load(components) = &order.work else {
        panic!("{order:?}")
    };
    let ids = components.iter().map(|c| c.id.to_string()).collect();
    worker.complete(&order);
    end(&mut job).await.unwrap();
    settle().await;
    ids
}

#[tokio::test(start_paused = true)]
async fn a_refusal_lists_fitting_quantizations_most_accurate_first() {
    let (queue, mut worker) = one_card().await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let quarter = |n: u64| Bytes(n << 28);
    let expected = [
        (REDUCTIONS[0], Bytes::gib(14), Bytes::gib(13)),
        (REDUCTIONS[1], Bytes::gib(14), Bytes::gib(13)),
        (REDUCTIONS[2], quarter(30), quarter(78)),
        (REDUCTIONS[3], quarter(30), quarter(78)),
    ];
    assert_eq!(told(&shortfall.fallbacks)[..4], expected);
    assert_eq!(shortfall.fallbacks[0].fits, Fits::Now);

    // It is loaded as requested.
    let eight_bits = with_formats(
        load("large", "me", &[]),
        &[
            ("text_encoder_2", "int8-convrot"),
            ("transformer", "int8-convrot"),
        ],
    );
    loaded(&queue, &mut worker, eight_bits.clone()).await;
    // It is resident now, so that a smaller one may have to replace it.
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    assert_eq!(shortfall.fallbacks[0].fits, Fits::Now, "it is there already");
    assert_eq!(shortfall.fallbacks[1].fits, Fits::AfterEvictions);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn quantizations_that_do_not_fit_or_are_not_smaller_are_not_listed() {
    let (queue, mut worker) = one_card().await;
    worker.set_foreign(Bytes::gib(15)); // 9 are left
    settle().await;
    let mut spec = load("a", "me", &[]); // 17, or 9 in 8 bits, or 5 in 4
    spec.options.patience = Some(Duration::from_secs(1));
    let before = tokio::time::Instant::now();
    let shortfall = refusal(&queue, spec.clone()).await;
    assert_eq!(
        before.elapsed().as_secs(),
        1,
        "patience, and no time for what is told"
    );
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(labels[..4], REDUCTIONS);
    worker.set_foreign(Bytes::gib(16));
    settle().await;
    let shortfall = refusal(&queue, spec.clone()).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(labels[..2], REDUCTIONS[2..]);

    // From a mixed quantization: no component becomes more accurate.
    let mixed = with_formats(spec, &[("transformer", "int8"), ("vae", "nf4")]);
    let shortfall = refusal(&queue, mixed).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(
        labels[..2],
        [
            "quantization text_encoder_2=nf4,transformer=nf4,vae=nf4",
            "quantization text_encoder_2=nf4-double,transformer=nf4-double,vae=nf4"
        ]
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_lists_alternatives_that_fit_on_any_of_several_cards() {
    let (queue, mut workers) = start(Settings::default(), 2);
    for worker in &mut workers {
        worker.ready();
    }
    workers[0].set_foreign(Bytes::gib(14)); // 10 are left: enough for 4 bits alone
    settle().await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(labels[..4], REDUCTIONS);
    assert_eq!(
        labels[4..]
            .iter()
            .filter(|label| label.starts_with("components"))
            .count(),
        labels.len() - 4
    );
    let eight_bits = with_formats(
        load("large", "me", &[]),
        &[
            ("text_encoder_2", "int8-convrot"),
            ("transformer", "int8-convrot"),
        ],
    );
    loaded(&queue, &mut workers[1], eight_bits).await;

    // With a preferred card, the list is for that card.
    let mut here = load("large", "me", &[]);
    here.options.card_hint = "sim:0".into();
    let shortfall = refusal(&queue, here).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(labels[..2], REDUCTIONS[2..]);
    at_rest(&queue).await;
}

/// A refusal is about every card of the box: what a worker that is still starting will have counts.
#[tokio::test(start_paused = true)]
async fn a_refusal_lists_alternatives_that_fit_on_a_card_that_is_starting() {
    let (queue, mut workers) = start(Settings::default(), 2);
    workers[0].ready();
    workers[0].set_foreign(Bytes::gib(14)); // 10 are left: enough for 4 bits alone
    settle().await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(labels[..4], REDUCTIONS);
}

#[tokio::test(start_paused = true)]
async fn reserved_memory_is_not_offered_in_a_refusal() {
    let (queue, mut worker) = one_card().await;
    let asking = queue.clone();
    let an_hour = Duration::from_secs(3600);
    let reserve =
        tokio::spawn(async move { asking.reserve("", Bytes::gib(14), an_hour, "game".into()).await });
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
    // The worker's ledger has it from its next command on.
    loaded(&queue, &mut worker, load("small", "me", &["vae"])).await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let labels: Vec<&str> = told(&shortfall.fallbacks)
        .iter()
        .map(|(label, ..)| *label)
        .collect();
    assert_eq!(
        labels[..2],
        REDUCTIONS[2..],
        "8 bits would wait for the reservation"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_lists_the_same_quantizations_as_a_refusal() {
    let (queue, _worker) = one_card().await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let plan = queue.plan(load("large", "me", &[]), "").await.unwrap();
    let planned = plan.stages[0].shortfall.clone().unwrap();
    assert_eq!(planned.fallbacks, shortfall.fallbacks);
    let fits = queue.plan(picture("a", "me", "a cat"), "").await.unwrap();
    assert!(fits.stages.iter().all(|stage| stage.shortfall.is_none()));
}

#[tokio::test(start_paused = true)]
async fn alternatives_are_the_same_for_all_short_stages_and_are_sought_only_on_request() {
    let (queue, _worker) = one_card().await;
    let mut spec = picture("a", "me", "a wall");
    *image_of(&mut spec) = Image::of(8192, 8192);
    let plan = queue.plan(spec.clone(), "").await.unwrap();
    let short: Vec<&Shortfall> = plan
        .stages
        .iter()
        .filter_map(|stage| stage.shortfall.as_ref())
        .collect();
    let [sampling, decoding] = short[..] else {
        panic!("{short:?}")
    };
    assert_eq!(
        told(&sampling.fallbacks).last().map(|(label, ..)| *label),
        Some("2048x2048")
    );
    assert_eq!(sampling.fallbacks, decoding.fallbacks);
    let plan = queue.plan_as_asked(spec, "").await.unwrap();
    let mut short = plan.stages.iter().filter_map(|stage| stage.shortfall.as_ref());
    assert!(short.all(|shortfall| shortfall.fallbacks.is_empty()));
    assert!(!plan.fits);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_does_not_wait_for_busy_cards() {
    let (queue, mut worker) = one_card().await;
    let mut busy = queue.submit(load("a", "me", &["vae"])).await.unwrap();
    let order = worker.order().await;
    let shortfall = refusal(&queue, load("large", "other", &[])).await;
    assert_eq!(told(&shortfall.fallbacks)[0].0, REDUCTIONS[0]);
    worker.complete(&order);
    end(&mut busy).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_cancelled_during_its_refusal_leaves_nothing() {
    let (queue, mut worker) = one_card().await;
    drop(queue.submit(load("large", "me", &[])).await.unwrap());
    settle().await;
    assert!(worker.receives_no_command().await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn components_are_shared_by_format() {
    let (queue, mut worker) = one_card().await;
    let full = loaded(&queue, &mut worker, load("small", "me", &[])).await;
    let quantized = with_formats(load("small", "me", &[]), &[("text_encoder_2", "nf4")]);
    let quantized = loaded(&queue, &mut worker, quantized).await;
    let same: Vec<bool> = full.iter().zip(&quantized).map(|(a, b)| a == b).collect();
    assert_eq!(same, [false, true, true], "{full:?} {quantized:?}");
    let card = &queue.status_now().await.cards[0];
    let residents = card.ledger.residents().map(|r| r.component.bytes);
    let booked: Bytes = residents.sum();
    assert_eq!(booked, Bytes::gib(4 + 1 + 2 + 1), "T5 twice, all else once");
    at_rest(&queue).await;
}
