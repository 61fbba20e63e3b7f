//! The card on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engine::card::{Card, CardError, CardThread, End, Settings, SystemClock, spawn};
use engine::messages::*;
use gpu::*;
use residency::ComponentId;

use crate::support::*;

/// Nothing that is waited for takes as long, unless it never comes.
const LONG: Duration = Duration::from_secs(60);

fn start(card: &str) -> (CardThread, Receiver<Event>) {
    let settings: SimulatedSettings = card.parse().unwrap();
    let (sender, events) = channel();
    let card = move || {
        let clock = Arc::new(RealClock::default());
        let card = SimulatedCard::new(settings, 1, SimulatedWorld::new(), clock);
        let settings = Settings {
            poll: Duration::from_millis(5),
            ..Settings::default()
        };
        Card::new(
            Box::new(card),
            catalogue(),
            settings,
            Box::new(SystemClock::new()),
        )
    };
    let thread = spawn(card, move |event| drop(sender.send(event))).unwrap();
    assert!(matches!(events.recv_timeout(LONG).unwrap(), Event::Ready { card, .. } if card.id == "sim:0"));
    assert!(matches!(events.recv_timeout(LONG).unwrap(), Event::Snapshot(_)));
    (thread, events)
}

fn outcome(events: &Receiver<Event>) -> Outcome {
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
    assert!(matches!(thread.join(), End::Shutdown));
}

#[test]
fn a_running_stage_and_a_queued_one_are_cancelled_beside_the_thread() {
    let (thread, events) = start("32GiB");
    let mut bench = bench("32GiB");
    // Nobody waits for the end of one step: a cancel takes effect within it, or the test fails.
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
fn a_slow_load_is_cancelled_beside_the_thread() {
    // Minutes of it: nobody waits for its end.
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
    assert!(matches!(thread.join(), End::Lost(_)));
    assert!(!events.iter().any(|event| matches!(event, Event::Finished { .. })));
}

#[test]
fn a_card_that_cannot_be_made_never_gets_ready() {
    let (sender, events) = channel::<Event>();
    let broken = || Err(CardError::Gpu(GpuError::NotLoaded(ComponentId::new("canary"))));
    let thread = spawn(broken, move |event| drop(sender.send(event))).unwrap();
    assert!(matches!(thread.join(), End::NeverReady(CardError::Gpu(_))));
    assert!(events.recv().is_err(), "nothing was said");
}

#[test]
fn nobody_left_to_command_it_ends_the_thread() {
    let (thread, events) = start("32GiB");
    assert!(matches!(thread.join(), End::Shutdown));
    drop(events);
}
