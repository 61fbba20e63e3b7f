//! The card on its thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engine::card::{Card, CardError, CardSettings, CardThread, SystemClock, ThreadEnd, spawn};
use engine::messages::*;
use gpu::*;
use residency::ComponentId;

use crate::support::*;

/// Timeout of waits in these tests.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn start(card: &str) -> (CardThread, Receiver<Event>) {
    let settings: SimulatedSettings = card.parse().unwrap();
    let (sender, events) = channel();
    let card = move || {
        let clock = Arc::new(RealClock::default());
        let card = SimulatedCard::new(settings, 1, SimulatedWorld::new(), clock);
        let settings = CardSettings {
            poll: Duration::from_millis(5),
            ..CardSettings::default()
        };
        Card::new(Box::new(card), families(), settings, Box::new(SystemClock::new()))
    };
    let thread = spawn(card, move |event| drop(sender.send(event))).unwrap();
    assert!(matches!(events.recv_timeout(LONG).unwrap(), Event::Ready { card, .. } if card.id == "sim:0"));
    (thread, events)
}

pub(crate) fn outcome(events: &Receiver<Event>) -> Outcome {
    loop {
        if let Event::Finished { outcome, .. } = events.recv_timeout(LONG).unwrap() {
            return outcome;
        }
    }
}

fn until(events: &Receiver<Event>, is_it: impl Fn(&Progress) -> bool) {
    let is_it = |event: &Event| matches!(event, Event::Progress { progress, .. } if is_it(progress));
    while !is_it(&events.recv_timeout(LONG).unwrap()) {}
}

#[test]
fn orders_run_and_a_shutdown_ends_the_thread() {
    let (thread, events) = start("32GiB");
    let mut bench = bench("32GiB");
    assert!(thread.send(Command::Run(Box::new(bench.stage(&sample("small"), "denoise")))));
    assert!(matches!(outcome(&events), Outcome::Completed(_)));
    assert!(thread.send(Command::Shutdown));
    assert!(matches!(thread.join(), ThreadEnd::Shutdown));
}

#[test]
fn running_and_queued_orders_can_be_cancelled_concurrently() {
    let (thread, events) = start("32GiB");
    let mut bench = bench("32GiB");
    // The step takes longer than the test: the cancellation must take effect within it.
    let folder = tempfile::tempdir().unwrap();
    let slow = write_model(folder.path(), "slow", r#","steps_ms":600000"#);
    let (running, queued) = (bench.stage(&slow, "denoise"), bench.stage(&slow, "denoise"));
    let (first, second) = (running.ticket, queued.ticket);
    thread.send(Command::Cancel(first)); // It was not sent yet: nobody is cancelled.
    thread.send(Command::Run(Box::new(running)));
    thread.send(Command::Run(Box::new(queued)));
    until(&events, |progress| matches!(progress, Progress::Started { .. }));
    let commands = thread.commands();
    commands.send(Command::Cancel(first));
    commands.send(Command::Cancel(second));
    assert_eq!(outcome(&events), Outcome::Cancelled);
    assert_eq!(outcome(&events), Outcome::Cancelled);
    thread.send(Command::Run(Box::new(bench.stage(&sample("small"), "denoise"))));
    assert!(matches!(outcome(&events), Outcome::Completed(_)));
}

#[test]
fn a_slow_load_can_be_cancelled_concurrently() {
    // The load takes minutes: the cancellation must end it.
    let (thread, events) = start("32GiB,speed=128MiB/s");
    let mut bench = bench("32GiB");
    let order = bench.load(&sample("flux-full"), &["transformer"]);
    let ticket = order.ticket;
    thread.send(Command::Run(Box::new(order)));
    until(&events, |progress| matches!(progress, Progress::Loading { .. }));
    thread.send(Command::Cancel(ticket));
    assert_eq!(outcome(&events), Outcome::Cancelled);
}

#[test]
fn a_lost_card_ends_the_thread() {
    let (thread, events) = start("32GiB,lose-at=denoise:1");
    let mut bench = bench("32GiB");
    thread.send(Command::Run(Box::new(bench.stage(&sample("small"), "denoise"))));
    assert!(matches!(thread.join(), ThreadEnd::Lost(_)));
    assert!(!events.iter().any(|event| matches!(event, Event::Finished { .. })));
}

#[test]
fn a_card_that_fails_to_open_is_never_ready() {
    let (sender, events) = channel::<Event>();
    let broken = || Err(CardError::Gpu(GpuError::NotLoaded(ComponentId::new("canary"))));
    let thread = spawn(broken, move |event| drop(sender.send(event))).unwrap();
    assert!(matches!(thread.join(), ThreadEnd::NeverReady(CardError::Gpu(_))));
    assert!(events.recv().is_err(), "nothing was said");
}

#[test]
fn the_thread_ends_when_all_senders_are_dropped() {
    let (thread, events) = start("32GiB");
    assert!(matches!(thread.join(), ThreadEnd::Shutdown));
    drop(events);
}
