//! Models in several quantizations: each is an entry of its own, which shares what is the same, and a refusal names those
//! that would fit.

use std::time::Duration;

use engine::job::JobSpec;
use engine::messages::{Answer, Command, Event, Work};
use engine::queue::{Queue, Settings};
use engine::{Error, Fallback, Shortfall};
use residency::{Bytes, Fits};

use crate::fixture::{REDUCTIONS, load, picture, with_formats};
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
    told.map(|f| (f.label.as_str(), f.peak, f.saved)).collect()
}

/// Loads, and says how many bytes came in by how many orders' components.
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
async fn a_refusal_names_the_quantizations_that_fit_the_most_faithful_first() {
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

    // As told: it comes in.
    let eight_bits = with_formats(
        load("large", "me", &[]),
        &[("text_encoder_2", "int8"), ("transformer", "int8")],
    );
    loaded(&queue, &mut worker, eight_bits.clone()).await;
    // Now it is resident, so that a smaller one may have to take its place.
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    assert_eq!(shortfall.fallbacks[0].fits, Fits::Now, "it is there already");
    assert_eq!(shortfall.fallbacks[1].fits, Fits::AfterEvictions);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn what_would_not_fit_beside_others_or_is_no_smaller_is_not_named() {
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

    // From what is mixed already: nothing is made more faithful again.
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
async fn with_several_cards_a_refusal_names_what_would_fit_on_any() {
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
        &[("text_encoder_2", "int8"), ("transformer", "int8")],
    );
    loaded(&queue, &mut workers[1], eight_bits).await;

    // Of what one who prefers a card asks for, what fits there.
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

#[tokio::test(start_paused = true)]
async fn what_is_reserved_for_others_is_not_offered() {
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
async fn a_plan_says_of_quantizations_what_a_refusal_says() {
    let (queue, _worker) = one_card().await;
    let shortfall = refusal(&queue, load("large", "me", &[])).await;
    let plan = queue.plan(load("large", "me", &[]), "").await.unwrap();
    let planned = plan.stages[0].shortfall.clone().unwrap();
    assert_eq!(planned.fallbacks, shortfall.fallbacks);
    let fits = queue.plan(picture("a", "me", "a cat"), "").await.unwrap();
    assert!(fits.stages.iter().all(|stage| stage.shortfall.is_none()));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_held_up_by_cards_that_are_busy() {
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
async fn a_job_that_leaves_while_its_refusal_is_made_leaves_nothing_behind() {
    let (queue, mut worker) = one_card().await;
    drop(queue.submit(load("large", "me", &[])).await.unwrap());
    settle().await;
    assert!(worker.is_idle().await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn one_encoder_in_two_formats_is_two_components_and_the_vae_is_one() {
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
