//! Stages that two cards run together, each on its thread.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use engine::card::CardThread;
use engine::messages::*;

use crate::support::*;
use crate::thread::{LONG, outcome, start};

/// The order of one part of a stage of the `small` model.
fn part(bench: &mut Bench, part: u32, seed: u64) -> Order {
    let path = sample("small");
    let request = model::Request {
        cards: 2,
        seed,
        ..request(&*bench.open(&path))
    };
    Order {
        together: Some(Together { part, of: 2 }),
        ..bench.stage_of(&path, "denoise", request)
    }
}

fn offer(events: &Receiver<Event>) -> (Ticket, bytes::Bytes) {
    loop {
        if let Event::Offer { ticket, offer } = events.recv_timeout(LONG).unwrap() {
            return (ticket, offer);
        }
    }
}

/// Two cards that have an order for a part each, with what they offer.
fn meeting(seeds: [u64; 2]) -> [(CardThread, Receiver<Event>, Ticket, bytes::Bytes); 2] {
    let mut bench = bench("32GiB");
    [0, 1].map(|number: u32| {
        let (thread, events) = start("32GiB");
        let order = part(&mut bench, number, seeds[number as usize]);
        let own = order.ticket;
        thread.send(Command::Run(Box::new(order)));
        let (ticket, offer) = offer(&events);
        assert_eq!(ticket, own);
        (thread, events, ticket, offer)
    })
}

#[test]
fn each_part_is_told_its_place_and_gets_what_the_other_offers() {
    let [one, other] = meeting([7, 7]);
    assert_eq!(
        (&*one.3, &*other.3),
        (&b"part 0 with seed 7"[..], &b"part 1 with seed 7"[..])
    );
    for ((thread, _, ticket, _), offer) in [(&one, &other.3), (&other, &one.3)] {
        let (ticket, offer) = (*ticket, offer.clone());
        thread.send(Command::Offer { ticket, offer });
    }
    let given = [&one, &other].map(|(_, events, ..)| match outcome(events) {
        Outcome::Completed(completed) => completed.values,
        other => panic!("{other:?}"),
    });
    assert_eq!(given[0], given[1]);
}

#[test]
fn a_part_that_meets_another_stage_notices_it() {
    let [one, other] = meeting([7, 8]);
    let (thread, events, ticket, _) = &one;
    let (ticket, offer) = (*ticket, other.3.clone());
    thread.send(Command::Offer { ticket, offer });
    assert!(matches!(outcome(events), Outcome::Failed(Failure::BadInput(_))));
}

#[test]
fn a_part_that_waits_for_the_other_can_be_cancelled() {
    let [one, other] = meeting([7, 7]);
    let (thread, events, ticket, _) = &one;
    // What is for others ends no wait.
    let offer = other.3.clone();
    thread.send(Command::Offer {
        ticket: Ticket(u64::MAX),
        offer,
    });
    let early = events.recv_timeout(Duration::from_millis(50));
    assert!(!matches!(early, Ok(Event::Finished { .. })), "it waits");
    thread.send(Command::Cancel(*ticket));
    assert_eq!(outcome(events), Outcome::Cancelled);
    let mut bench = bench("32GiB");
    thread.send(Command::Run(Box::new(bench.stage(&sample("small"), "denoise"))));
    assert!(
        matches!(outcome(events), Outcome::Completed(_)),
        "the card is free"
    );
}

#[test]
fn a_stage_that_runs_alone_meets_nobody() {
    let mut bench = bench("32GiB");
    let order = part(&mut bench, 0, 7);
    let alone = Order {
        together: None,
        ..order
    };
    assert!(matches!(bench.run(alone), Outcome::Failed(Failure::BadInput(_))));
}

/// The other card is in the midst of the stage: both begin again.
#[test]
fn a_part_that_runs_out_of_memory_is_not_retried_by_its_card() {
    let folder = tempfile::tempdir().unwrap();
    let greedy = format!(r#","real_scratch":{{"denoise":{}}}"#, 600 * MIB);
    let path = write_model(folder.path(), "greedy", &greedy);
    for (together, retries) in [(None, 1), (Some(Together { part: 0, of: 2 }), 0)] {
        let mut bench = bench("512MiB");
        let order = Order {
            together,
            ..bench.stage(&path, "denoise")
        };
        let failed = bench.run(order);
        assert!(
            matches!(failed, Outcome::Failed(Failure::OutOfMemory { .. })),
            "{failed:?}"
        );
        let retrying = |progress: &&Progress| matches!(progress, Progress::Retrying { .. });
        assert_eq!(bench.progress().iter().filter(retrying).count(), retries);
        bench.check();
    }
}
