//! Injected faults of a simulated card.

use engine::card::Flow;
use engine::messages::*;
use residency::Bytes;

use crate::support::*;

#[test]
fn a_dying_card_sends_no_outcome() {
    for (place, kind) in [("denoise", "denoise"), ("load", "decode")] {
        let mut bench = bench(&format!("32GiB,die-at={place}:1"));
        let order = bench.stage(&sample("flux-full"), kind);
        let flow = bench.card.handle(Command::Run(Box::new(order)), &mut bench.link);
        assert!(matches!(flow, Flow::Lost(_)));
        assert_eq!(*bench.faults.0.borrow(), [format!("die {place}")]);
        assert!(
            !bench
                .link
                .events
                .iter()
                .any(|e| matches!(e, Event::Finished { .. }))
        );
    }
}

#[test]
fn a_card_continues_after_an_injected_hang_is_released() {
    let mut bench = bench("32GiB,hang-at=decode:2");
    for _ in 0..3 {
        assert!(matches!(
            bench.run_stage(&sample("flux-full"), "decode"),
            Outcome::Completed(_)
        ));
    }
    assert_eq!(*bench.faults.0.borrow(), ["hang decode"]);
}

#[test]
fn a_card_lost_in_a_stage_or_a_load_reports_it() {
    for place in ["denoise", "load"] {
        let mut bench = bench(&format!("32GiB,lose-at={place}:1"));
        let order = bench.stage(&sample("flux-full"), "denoise");
        let flow = bench.card.handle(Command::Run(Box::new(order)), &mut bench.link);
        assert!(matches!(flow, Flow::Lost(_)), "{flow:?}");
        assert!(
            !bench
                .link
                .events
                .iter()
                .any(|e| matches!(e, Event::Finished { .. }))
        );
        bench.clock.advance_ms(250);
        assert!(matches!(bench.card.tick(&mut bench.link), Flow::Lost(_)));
        assert!(matches!(
            bench.card.handle(Command::Trim { id: 1 }, &mut bench.link),
            Flow::Lost(_)
        ));
        let room = Command::MakeRoom {
            id: 2,
            bytes: Bytes(1),
        };
        assert!(matches!(bench.card.handle(room, &mut bench.link), Flow::Lost(_)));
    }
}

#[test]
fn leaked_memory_ends_the_card() {
    let mut bench = bench("32GiB,leak-at=unload:2");
    let loaded = bench.load(&sample("flux-full"), &["transformer", "vae"]);
    assert!(matches!(bench.run(loaded), Outcome::Completed(_)));
    let residents = bench.card.ledger().residents();
    let components: Vec<_> = residents.map(|resident| resident.component.id.clone()).collect();
    let unload = Command::Unload { id: 1, components };
    let Flow::Lost(why) = bench.card.handle(unload, &mut bench.link) else {
        panic!("it goes on with memory that is gone")
    };
    assert!(
        why.contains("left") && why.contains("behind, in as its settings say"),
        "{why}"
    );
    assert!(
        !bench
            .link
            .events
            .iter()
            .any(|e| matches!(e, Event::Answer { .. }))
    );
}
