//! Claims on a card: pins, holds, reservations, unloads.

use engine::messages::*;
use gpu::SimulatedClock;
use residency::*;

use crate::support::*;

fn id(text: &str) -> ComponentId {
    ComponentId::new(text)
}

fn names(list: &[(Component, gpu::Unloaded)]) -> Vec<&str> {
    list.iter()
        .map(|(component, _)| component.name.as_str())
        .collect()
}

/// A bench of 200 MiB with all four components of a model (170 MiB) on it.
fn full_bench(folder: &tempfile::TempDir) -> (Bench, std::path::PathBuf) {
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("200MiB");
    let order = bench.load(&path, &["transformer", "text_encoder", "text_encoder_2", "vae"]);
    bench.completed(order);
    (bench, path)
}

#[test]
fn claims_are_replaced_in_full() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    bench.handle(Command::Standing(Standing {
        pins: vec![("m".to_owned(), vec![id("instant:m-vae"), id("instant:later")])],
        holds: vec![
            ("h".into(), vec![id("instant:m-transformer")]),
            ("i".into(), vec![id("instant:m-vae")]),
        ],
        reservations: vec![("r".into(), "blender".into(), Bytes::mib(10))],
        ..Standing::default()
    }));
    let ledger = bench.card.ledger();
    assert!(ledger.resident(&id("instant:m-vae")).unwrap().pinned);
    assert_eq!(ledger.resident(&id("instant:m-transformer")).unwrap().held, 1);
    assert_eq!(
        ledger.pins().map(|(_, ids)| ids.len()).sum::<usize>(),
        2,
        "what is not there yet is pinned when it comes"
    );
    assert_eq!(ledger.usable(), Bytes::mib(20));

    bench.handle(Command::Standing(Standing {
        pins: vec![("m".to_owned(), vec![id("instant:m-transformer")])],
        holds: vec![("h".into(), vec![id("instant:m-text_encoder")])],
        reservations: vec![("s".into(), "krita".into(), Bytes::mib(5))],
        ..Standing::default()
    }));
    let ledger = bench.card.ledger();
    let vae = ledger.resident(&id("instant:m-vae")).unwrap();
    assert!(!vae.pinned && vae.held == 0);
    let transformer = ledger.resident(&id("instant:m-transformer")).unwrap();
    assert!(transformer.pinned && transformer.held == 0);
    assert_eq!(ledger.resident(&id("instant:m-text_encoder")).unwrap().held, 1);
    assert_eq!(ledger.usable(), Bytes::mib(25));

    bench.handle(Command::Standing(Standing::default()));
    assert!(bench.card.ledger().residents().all(Resident::is_idle));
    assert_eq!(bench.card.ledger().usable(), Bytes::mib(30));
}

#[test]
fn a_repeated_claim_keeps_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    let standing = Standing {
        pins: vec![],
        holds: vec![("h".into(), vec![id("instant:m-vae")])],
        reservations: vec![("r".into(), "blender".into(), Bytes::mib(20))],
        ..Standing::default()
    };
    bench.handle(Command::Standing(standing.clone()));
    bench.world.hold("blender", Some(41), Bytes::mib(15));
    bench.tick_after(250);
    assert_eq!(
        bench.card.ledger().usable(),
        Bytes::mib(10),
        "5 of the 20 are still to be taken"
    );
    bench.handle(Command::Standing(standing));
    assert_eq!(bench.card.ledger().usable(), Bytes::mib(10));
    assert_eq!(
        bench.card.ledger().resident(&id("instant:m-vae")).unwrap().held,
        1
    );
}

#[test]
fn an_unload_reports_freed_bytes_and_why_components_stayed() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    bench.handle(Command::Standing(Standing {
        pins: vec![("m".to_owned(), vec![id("instant:m-vae")])],
        holds: vec![("h".into(), vec![id("instant:m-text_encoder")])],
        reservations: vec![],
        ..Standing::default()
    }));
    let all = [
        "m-transformer",
        "m-text_encoder",
        "m-text_encoder_2",
        "m-vae",
        "m-vae",
        "unknown",
    ];
    let components = all.iter().map(|name| id(&format!("instant:{name}"))).collect();
    let Answer::Unloaded { freed, kept, short } = bench.answer(Command::Unload { id: 9, components }) else {
        panic!("no answer to an unload")
    };
    assert_eq!(names(&freed), ["text_encoder_2", "transformer"]);
    assert!(
        freed
            .iter()
            .all(|(c, u)| u.booked == c.bytes && u.freed == c.bytes)
    );
    let kept: Vec<(&str, &str)> = kept
        .iter()
        .map(|(c, why)| (c.name.as_str(), why.as_str()))
        .collect();
    assert_eq!(kept, [("text_encoder", "held"), ("vae", "pinned")]);
    assert_eq!(short, Bytes::ZERO);
    assert_eq!(bench.card.ledger().accounts().free, Bytes::mib(170));
}

#[test]
fn room_is_made_by_evicting_idle_components() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    let Answer::Unloaded { freed, kept, short } = bench.answer(Command::MakeRoom {
        id: 1,
        bytes: Bytes::mib(60),
    }) else {
        panic!("no answer")
    };
    assert_eq!(short, Bytes::ZERO);
    assert!(kept.is_empty() && !freed.is_empty());
    assert!(bench.card.ledger().accounts().free >= Bytes::mib(60));
}

#[test]
fn room_is_made_partially_if_the_full_amount_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    let Answer::Unloaded { freed, short, .. } = bench.answer(Command::MakeRoom {
        id: 2,
        bytes: Bytes::mib(500),
    }) else {
        panic!("no answer")
    };
    assert!(
        freed.is_empty(),
        "nothing leaves for what the card can never give"
    );
    assert_eq!(short, Bytes::mib(470));

    bench.handle(Command::Standing(Standing {
        holds: vec![("h".into(), vec![id("instant:m-transformer")])],
        ..Standing::default()
    }));
    let Answer::Unloaded { freed, kept, short } = bench.answer(Command::MakeRoom {
        id: 1,
        bytes: Bytes::mib(150),
    }) else {
        panic!("no answer")
    };
    assert_eq!(freed.len(), 3);
    assert_eq!(
        kept.iter()
            .map(|(c, why)| (&*c.name, why.as_str()))
            .collect::<Vec<_>>(),
        [("transformer", "held")]
    );
    assert_eq!(short, Bytes::mib(50));
}

#[test]
fn room_is_measured_by_the_drivers_free_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("200MiB,slack=keep");
    bench.run_stage(&path, "decode");
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::mib(64));
    let Answer::Unloaded { freed, short, .. } = bench.answer(Command::MakeRoom {
        id: 1,
        bytes: Bytes::mib(190),
    }) else {
        panic!("no answer")
    };
    assert!(freed.is_empty(), "slack was enough");
    assert_eq!(short, Bytes::ZERO);
    assert_eq!(bench.card.ledger().accounts().free, Bytes::mib(190));
}

#[test]
fn a_pinned_component_is_never_evicted_for_a_stage() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, _) = full_bench(&folder);
    let other = write_model(folder.path(), "other", "");
    bench.handle(Command::Standing(Standing {
        pins: vec![("m".to_owned(), vec![id("instant:m-transformer")])],
        ..Standing::default()
    }));
    assert!(matches!(
        bench.run_stage(&other, "denoise"),
        Outcome::Never { .. }
    ));
    bench.handle(Command::Standing(Standing {
        holds: vec![("h".into(), vec![id("instant:m-transformer")])],
        ..Standing::default()
    }));
    let Outcome::Wait(shortage) = bench.run_stage(&other, "denoise") else {
        panic!("it waits for the hold")
    };
    assert_eq!(shortage.cause, WaitCause::Leases);
    assert_eq!(bench.resident().len(), 4);
}

#[test]
fn a_trim_reports_the_returned_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "m", "");
    let mut bench = bench("200MiB,slack=keep");
    bench.run_stage(&path, "decode");
    assert_eq!(
        bench.answer(Command::Trim { id: 1 }),
        Answer::Trimmed(Bytes::mib(64))
    );
    assert_eq!(
        bench.answer(Command::Trim { id: 2 }),
        Answer::Trimmed(Bytes::ZERO)
    );
}

#[test]
fn the_janitor_trims_idle_cards_only() {
    let mut bench = bench("64GiB,slack=keep");
    bench.run_stage(&sample("flux-full"), "decode");
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::gib(3));
    bench.tick_after(1900);
    assert!(
        !bench.calls().contains(&"trim".to_owned()),
        "not idle for long enough"
    );
    bench.run_stage(&sample("flux-full"), "decode");
    bench.tick_after(1900);
    assert!(
        !bench.calls().contains(&"trim".to_owned()),
        "the stage made it busy again"
    );
    bench.tick_after(100);
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::ZERO);
    for _ in 0..10 {
        bench.tick_after(2000);
    }
    assert_eq!(
        bench.calls().iter().filter(|c| *c == "trim").count(),
        1,
        "nothing to trim, nothing trimmed"
    );
    assert_eq!(bench.resident(), ["instant:flux-vae"], "components stay");
}

#[test]
fn foreign_changes_are_published_once_within_a_poll_interval() {
    let mut bench = bench("64GiB");
    bench.card.announce(&mut bench.link);
    let ledger = bench.card.ledger().clone();
    assert!(
        matches!(&bench.link.events[..], [Event::Ready { attention, ledger: said, .. }] if attention == "cpu loops" && **said == ledger)
    );
    let before = bench.link.events.len();
    bench.world.hold("blender", Some(41), Bytes::gib(8));
    bench.tick_after(100);
    assert_eq!(bench.link.events.len(), before, "not yet");
    bench.tick_after(150);
    let Some(Event::Snapshot(ledger)) = bench.link.events.last() else {
        panic!("no snapshot")
    };
    assert_eq!(ledger.accounts().foreign, Bytes::gib(8));
    let published = bench.link.events.len();
    bench.tick_after(250);
    assert_eq!(
        bench.link.events.len(),
        published,
        "nothing changed, nothing is said"
    );
}

#[test]
fn making_room_waits_for_evicted_bytes_to_become_free() {
    let mut bench = bench("40GiB,lag=300ms");
    let order = bench.load(&sample("flux-full"), &["transformer", "text_encoder_2", "vae"]);
    bench.completed(order);
    let bytes = Bytes::gib(20);
    let Answer::Unloaded { freed, short, .. } = bench.answer(Command::MakeRoom { id: 1, bytes }) else {
        panic!("no answer")
    };
    assert_eq!(short, Bytes::ZERO);
    assert!(
        !freed.is_empty() && freed.iter().all(|(_, u)| u.freed == u.booked),
        "{freed:?}"
    );
    assert!(bench.card.ledger().accounts().free >= bytes);
    assert!(bench.clock.now_ms() <= 325, "{}", bench.clock.now_ms());
}

#[test]
fn make_room_evicts_nothing_if_late_bytes_are_enough() {
    let mut bench = bench("40GiB,lag=3s");
    let order = bench.load(&sample("flux-full"), &["transformer", "vae"]);
    bench.completed(order);
    let components = vec![id("instant:flux-full-transformer")];
    bench.handle(Command::Unload { id: 1, components });
    assert!(
        bench.card.ledger().late() > Bytes::ZERO,
        "two seconds were not enough"
    );
    let bytes = Bytes::gib(39);
    let Answer::Unloaded { freed, short, .. } = bench.answer(Command::MakeRoom { id: 2, bytes }) else {
        panic!("no answer")
    };
    assert_eq!((freed, short), (vec![], Bytes::ZERO));
    assert_eq!(bench.resident(), ["instant:flux-vae"]);
}

#[test]
fn making_room_stops_waiting_for_bytes_that_never_become_free() {
    for (lag, bytes, waited) in [("3600s", 20, 5000), ("3600s", 39, 0)] {
        let mut bench = bench(&format!("40GiB,lag={lag}"));
        let order = bench.load(&sample("flux-full"), &["transformer", "vae"]);
        bench.completed(order);
        bench.handle(Command::Standing(Standing {
            pins: vec![("m".to_owned(), vec![id("instant:flux-vae")])],
            reservations: vec![("r".into(), "blender".into(), Bytes::gib(2))],
            ..Standing::default()
        }));
        let bytes = Bytes::gib(bytes);
        let Answer::Unloaded { short, .. } = bench.answer(Command::MakeRoom { id: 1, bytes }) else {
            panic!("no answer")
        };
        assert!(short > Bytes::ZERO);
        assert_eq!(bench.clock.now_ms(), waited);
    }
}

#[test]
fn an_unload_waits_briefly_for_the_driver_to_show_freed_bytes() {
    for (lag, waited, confirmed) in [(0, 0, true), (300, 300, true), (60_000, 2000, false)] {
        let mut bench = bench(&format!("40GiB,lag={lag}ms"));
        let order = bench.load(&sample("flux-full"), &["transformer", "vae"]);
        bench.completed(order);
        let components = vec![id("instant:flux-full-transformer"), id("instant:flux-vae")];
        let Answer::Unloaded { freed, .. } = bench.answer(Command::Unload { id: 1, components }) else {
            panic!("no answer")
        };
        assert_eq!(freed.len(), 2);
        for (component, unloaded) in freed {
            assert_eq!(unloaded.booked, component.bytes);
            let shown = if confirmed { component.bytes } else { Bytes::ZERO };
            assert_eq!(unloaded.freed, shown, "after a lag of {lag}");
        }
        assert_eq!(bench.clock.now_ms(), waited);
    }
}

#[test]
fn late_trimmed_slack_is_not_foreign() {
    let mut bench = bench("40GiB,slack=keep,lag=600ms");
    bench.run_stage(&sample("flux-full"), "decode");
    let answer = bench.answer(Command::Trim { id: 1 });
    assert_eq!(answer, Answer::Trimmed(Bytes::gib(3)));
    let ledger = bench.card.ledger();
    assert_eq!(ledger.late(), Bytes::gib(3));
    let accounts = ledger.accounts();
    assert_eq!(
        (accounts.slack, accounts.foreign, accounts.unexplained),
        (Bytes::ZERO, Bytes::ZERO, Bytes::gib(3))
    );
    bench.tick_after(600);
    let ledger = bench.card.ledger();
    assert_eq!(
        (ledger.late(), ledger.accounts().unexplained),
        (Bytes::ZERO, Bytes::ZERO)
    );
}
