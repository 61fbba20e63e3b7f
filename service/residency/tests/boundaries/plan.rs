use residency::{
    Bytes, Component, ComponentId, DriverTruth, HoldId, Ledger, Millis, Move, Part, PinId, Policy,
    ReservationId, StageNeed, Verdict, WaitCause, large_from, make_room, plan, plan_low_memory,
    predicted_move_seconds, should_trim,
};

use crate::given::{card_with, component, evict, in_blocks, load, stage, truth, use_at};

const NOW: Millis = Millis(60_000);

fn evict_of(c: &Component) -> Move {
    Move::Evict(c.clone())
}

fn load_of(c: &Component) -> Move {
    Move::Load(c.clone(), Part::WHOLE)
}

fn run(moves: impl Into<Vec<Move>>) -> Verdict {
    Verdict::Run { moves: moves.into() }
}

fn wait(gib: u64, cause: WaitCause) -> Verdict {
    Verdict::Wait {
        short: Bytes::gib(gib),
        cause,
    }
}

fn shared(ledger: &Ledger, components: &[&Component], scratch_gib: u64) -> Verdict {
    plan(
        ledger,
        &stage(components, Bytes::gib(scratch_gib)),
        Policy::Shared,
        NOW,
    )
}

#[test]
fn a_stage_that_fits_to_the_byte_runs_and_one_byte_more_never_does() {
    let (ledger, c) = (card_with(&[]), component("c", 20));
    assert_eq!(shared(&ledger, &[&c], 4), run([load_of(&c)]));
    let more = stage(&[&c], Bytes::gib(4) + Bytes(1));
    let never = Verdict::Never {
        needed: Bytes::gib(24) + Bytes(1),
        capacity: Bytes::gib(24),
    };
    assert_eq!(plan(&ledger, &more, Policy::Shared, NOW), never);
}

#[test]
fn resident_and_repeated_components_are_counted_once() {
    let (a, b) = (component("a", 12), component("b", 8));
    let ledger = card_with(&[&a]);
    assert_eq!(shared(&ledger, &[&a, &b, &a, &b], 4), run([load_of(&b)]));
    assert_eq!(shared(&card_with(&[&a, &b]), &[&a, &b], 4), run([]));
}

#[test]
fn loads_keep_the_order_of_the_stage() {
    let [z, a, m] = ["z", "a", "m"].map(|name| component(name, 1));
    assert_eq!(
        shared(&card_with(&[]), &[&z, &a, &m], 0),
        run([load_of(&z), load_of(&a), load_of(&m)])
    );
}

#[test]
fn headroom_is_never_planned_into() {
    let ledger = Ledger::new(Bytes::gib(24), Bytes::gib(1));
    let c = component("c", 20);
    let never = Verdict::Never {
        needed: Bytes::gib(24),
        capacity: Bytes::gib(23),
    };
    assert_eq!(shared(&ledger, &[&c], 4), never);
    assert_eq!(shared(&ledger, &[&c], 3), run([load_of(&c)]));
}

#[test]
fn the_cheapest_component_to_reload_is_evicted_first() {
    let mut a = component("a", 8);
    let (b, new) = (component("b", 8), component("new", 8));
    a.reload_seconds = 1.0;
    let ledger = card_with(&[&a, &b]);
    assert_eq!(shared(&ledger, &[&new], 4), run([evict_of(&a), load_of(&new)]));
}

#[test]
fn frequently_or_recently_used_components_stay() {
    let (a, b, new) = (component("a", 8), component("b", 8), component("new", 8));
    let mut ledger = card_with(&[&a, &b]);
    use_at(&mut ledger, &a, 5, NOW);
    use_at(&mut ledger, &b, 1, NOW);
    assert_eq!(shared(&ledger, &[&new], 4), run([evict_of(&b), load_of(&new)]));
    // Much later b is used again, and the weight of a's many uses has decayed.
    let later = Millis(NOW.0 + 6 * residency::HEAT_HALF_LIFE_MS);
    use_at(&mut ledger, &b, 1, later);
    ledger.reconcile(&truth(&ledger));
    let verdict = plan(&ledger, &stage(&[&new], Bytes::gib(4)), Policy::Shared, later);
    assert_eq!(verdict, run([evict_of(&a), load_of(&new)]));
}

#[test]
fn components_needed_later_are_evicted_last() {
    let (mut sampled, decoder, new) = (component("a", 8), component("b", 8), component("new", 8));
    sampled.reload_seconds = 100.0;
    let ledger = card_with(&[&sampled, &decoder]);
    let decode = |later: &[&Component]| StageNeed {
        later: later.iter().map(|c| c.id.clone()).collect(),
        ..stage(&[&new], Bytes::gib(4))
    };
    let verdict = |later: &[&Component]| plan(&ledger, &decode(later), Policy::Shared, NOW);
    assert_eq!(verdict(&[]), run([evict_of(&decoder), load_of(&new)]));
    assert_eq!(verdict(&[&decoder]), run([evict_of(&sampled), load_of(&new)]));
    assert_eq!(
        verdict(&[&sampled, &decoder]),
        run([evict_of(&decoder), load_of(&new)]),
        "one of them has to go"
    );
}

#[test]
fn no_more_is_evicted_than_needed() {
    let (mut small, mut large, new) = (
        component("small", 2),
        component("large", 16),
        component("new", 18),
    );
    (small.reload_seconds, large.reload_seconds) = (0.1, 16.0);
    let ledger = card_with(&[&small, &large]);
    // The small component is cheaper and not enough; with the large one evicted it can stay.
    assert_eq!(
        shared(&ledger, &[&new], 4),
        run([evict_of(&large), load_of(&new)])
    );
}

#[test]
fn exclusive_evicts_all_large_components_and_trims_before_loading() {
    assert_eq!(large_from(Bytes::gib(24)), Bytes::gib(1));
    assert_eq!(large_from(Bytes::gib(8)), Bytes::mib(512));
    let (transformer, vae) = (component("transformer", 12), component("vae", 1));
    let mut small = component("small", 1);
    small.bytes -= Bytes(1);
    let mut ledger = card_with(&[&transformer, &small]);
    ledger.reconcile(&DriverTruth {
        slack: Bytes::gib(2),
        free: Bytes::gib(9),
        ..truth(&ledger)
    });
    let decode = stage(&[&vae], Bytes::gib(2));
    let exclusive = |ledger: &Ledger| plan(ledger, &decode, Policy::Exclusive, NOW);
    assert_eq!(
        exclusive(&ledger),
        run([evict_of(&transformer), Move::Trim, load_of(&vae)])
    );
    assert_eq!(plan(&ledger, &decode, Policy::Shared, NOW), run([load_of(&vae)]));
    // A pinned component is left alone: the stage fits anyway.
    ledger.pin(PinId::new("pin"), vec![transformer.id.clone()]);
    assert_eq!(exclusive(&ledger), run([Move::Trim, load_of(&vae)]));
}

#[test]
fn slack_is_usable_and_trimmed_only_where_a_load_needs_it() {
    let (mut ledger, c) = (card_with(&[]), component("c", 10));
    let slack = |free| DriverTruth {
        slack: Bytes::gib(24 - free),
        free: Bytes::gib(free),
        ..DriverTruth::default()
    };
    ledger.reconcile(&slack(9));
    assert_eq!(shared(&ledger, &[&c], 14), run([Move::Trim, load_of(&c)]));
    assert_eq!(shared(&ledger, &[], 24), run([]));
    ledger.reconcile(&slack(10));
    assert_eq!(shared(&ledger, &[&c], 14), run([load_of(&c)]));
    ledger = Ledger::new(Bytes::gib(24), Bytes(1)); // has to stay free at the driver
    ledger.reconcile(&slack(10));
    assert_eq!(shared(&ledger, &[&c], 1), run([Move::Trim, load_of(&c)]));
}

#[test]
fn slack_stays_where_an_eviction_is_enough() {
    let (a, new) = (component("a", 8), component("new", 20));
    let mut ledger = card_with(&[&a]);
    ledger.reconcile(&DriverTruth {
        slack: Bytes::gib(2),
        free: Bytes::gib(14),
        ..truth(&ledger)
    });
    assert_eq!(shared(&ledger, &[&new], 0), run([evict_of(&a), load_of(&new)]));
    assert_eq!(shared(&ledger, &[&new], 3), run([evict_of(&a), load_of(&new)]));
}

#[test]
fn a_wait_names_the_claim_whose_release_would_be_enough() {
    let (a, b, new) = (component("a", 8), component("b", 8), component("new", 20));
    let mut ledger = card_with(&[&a, &b]);
    let lease = ledger.lease(&stage(&[&a], Bytes::gib(2)), NOW).unwrap();
    // 6 are free, b is idle with 8; a and its scratch are busy with 10.
    assert_eq!(shared(&ledger, &[&new], 0), wait(6, WaitCause::Leases));
    let larger = component("larger", 23);
    assert_eq!(
        shared(&ledger, &[&larger], 0),
        wait(9, WaitCause::Leases),
        "the component and its scratch"
    );
    ledger.release(lease, NOW).unwrap();
    ledger.reconcile(&truth(&ledger));
    evict(&mut ledger, &a, NOW);
    assert_eq!(shared(&ledger, &[&new], 0), wait(4, WaitCause::LateEviction));
    ledger.reconcile(&truth(&ledger));
    ledger.reserve(ReservationId::new("r"), "r".into(), Bytes::gib(10));
    assert_eq!(shared(&ledger, &[&new], 0), wait(6, WaitCause::Reservation));
    ledger.release_reservation(&ReservationId::new("r"));
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(6),
        ..truth(&ledger)
    });
    assert_eq!(shared(&ledger, &[&new], 0), wait(6, WaitCause::Foreign));
}

#[test]
fn a_held_component_is_waited_for_like_a_busy_one() {
    let (a, new) = (component("a", 16), component("new", 16));
    let mut ledger = card_with(&[&a]);
    ledger.hold(HoldId::new("h"), vec![a.id.clone()]);
    assert_eq!(shared(&ledger, &[&new], 0), wait(8, WaitCause::Leases));
    assert_eq!(shared(&ledger, &[&a], 8), run([]), "its own stage runs on it");
}

#[test]
fn a_loading_component_is_waited_for_and_not_loaded_twice() {
    let (mut ledger, c) = (card_with(&[]), component("c", 8));
    ledger.begin_load(&c, Part::WHOLE, NOW).unwrap();
    assert_eq!(shared(&ledger, &[&c], 8), wait(0, WaitCause::Leases));
    ledger.complete_load(&c.id, NOW).unwrap();
    assert_eq!(shared(&ledger, &[&c], 8), run([]));
    ledger.begin_evict(&c.id).unwrap();
    assert_eq!(shared(&ledger, &[&c], 8), wait(0, WaitCause::Leases));
}

#[test]
fn capacity_excludes_context_pins_and_leaks_but_not_idle_components() {
    let (pinned, leased, new) = (
        component("pinned", 6),
        component("leased", 6),
        component("new", 10),
    );
    let mut ledger = card_with(&[&pinned, &leased]);
    ledger.pin(PinId::new("pin"), vec![pinned.id.clone()]);
    ledger.lease(&stage(&[&leased], Bytes::ZERO), NOW).unwrap();
    let leak_and_context = |ledger: &Ledger, foreign: u64| DriverTruth {
        components: Bytes::gib(13),
        context: Bytes::gib(1),
        free: Bytes::gib(10 - foreign),
        ..truth(ledger)
    };
    ledger.reconcile(&leak_and_context(&ledger, 3));
    let never = Verdict::Never {
        needed: Bytes::gib(17),
        capacity: Bytes::gib(16),
    };
    assert_eq!(shared(&ledger, &[&new], 7), never);
    assert_eq!(shared(&ledger, &[&new], 6), wait(9, WaitCause::Foreign));
    assert_eq!(
        shared(&ledger, &[&new, &pinned], 6),
        wait(9, WaitCause::Foreign),
        "a pin of its own"
    );
    ledger.reconcile(&leak_and_context(&ledger, 0));
    assert_eq!(shared(&ledger, &[&new], 6), wait(6, WaitCause::Leases));
}

#[test]
fn late_bytes_cause_a_wait_and_no_refusal() {
    let (a, new) = (component("a", 20), component("new", 24));
    let mut ledger = card_with(&[&a]);
    evict(&mut ledger, &a, NOW);
    assert_eq!(shared(&ledger, &[&new], 0), wait(20, WaitCause::LateEviction));
}

#[test]
fn a_stage_without_demand_runs_on_an_overdrawn_card() {
    let c = component("c", 8);
    let mut ledger = Ledger::new(Bytes::gib(24), Bytes::gib(16));
    load(&mut ledger, &c, NOW);
    ledger.reconcile(&DriverTruth {
        free: Bytes::gib(1),
        ..truth(&ledger)
    });
    assert_eq!(shared(&ledger, &[&c], 0), run([]));
    assert_eq!(
        plan(&ledger, &stage(&[&c], Bytes(0)), Policy::Exclusive, NOW),
        run([])
    );
}

#[test]
fn low_memory_evicts_all_idle_components_and_reports_the_shortage() {
    let (a, b, new) = (component("a", 8), component("b", 8), component("new", 20));
    let mut ledger = card_with(&[&a, &b]);
    ledger.pin(PinId::new("pin"), vec![a.id.clone()]);
    let plan =
        |ledger: &Ledger, scratch| plan_low_memory(ledger, &stage(&[&new], scratch), Policy::Shared, NOW);
    let short = plan(&ledger, Bytes::gib(1));
    assert_eq!(
        (short.short, short.moves),
        (Bytes::gib(5), vec![evict_of(&b), load_of(&new)])
    );
    ledger.unpin(&PinId::new("pin"));
    let ordinary = plan(&ledger, Bytes::ZERO);
    assert_eq!(ordinary.short, Bytes::ZERO);
    assert_eq!(run(ordinary.moves), shared(&ledger, &[&new], 0));
}

#[test]
fn room_for_other_programs_is_free_at_the_driver() {
    let a = component("a", 8);
    let mut ledger = card_with(&[&a]);
    assert_eq!(make_room(&ledger, Bytes::gib(16), NOW), run([]));
    assert_eq!(make_room(&ledger, Bytes::gib(17), NOW), run([evict_of(&a)]));
    ledger.reconcile(&DriverTruth {
        slack: Bytes::gib(1),
        free: Bytes::gib(15),
        ..truth(&ledger)
    });
    assert_eq!(make_room(&ledger, Bytes::gib(16), NOW), run([Move::Trim]));
    ledger.pin(PinId::new("pin"), vec![a.id.clone()]);
    let never = Verdict::Never {
        needed: Bytes::gib(17),
        capacity: Bytes::gib(16),
    };
    assert_eq!(make_room(&ledger, Bytes::gib(17), NOW), never);
}

#[test]
fn the_janitor_trims_above_its_limit_and_while_nothing_runs_or_moves() {
    let (c, limit) = (component("c", 1), Bytes::mib(512));
    let mut ledger = card_with(&[&c]);
    let with_slack = |ledger: &mut Ledger, slack: Bytes| {
        let shown = DriverTruth {
            slack,
            free: Bytes::gib(23) - slack,
            ..truth(ledger)
        };
        ledger.reconcile(&shown);
        should_trim(ledger, limit)
    };
    let above = limit + Bytes(1);
    assert!(!with_slack(&mut ledger, limit));
    assert!(with_slack(&mut ledger, above));
    let lease = ledger.lease(&stage(&[&c], Bytes::ZERO), NOW).unwrap();
    assert!(!with_slack(&mut ledger, above), "a stage runs");
    ledger.release(lease, NOW).unwrap();
    ledger.begin_evict(&c.id).unwrap();
    assert!(!with_slack(&mut ledger, above), "a component is leaving");
    ledger.abort_evict(&c.id).unwrap();
    assert!(with_slack(&mut ledger, above));
}

fn seconds(ledger: &Ledger, gib: u64) -> f64 {
    let need = stage(&[&component("c", gib)], Bytes::ZERO);
    predicted_move_seconds(ledger, &need, Policy::Shared, NOW)
}

#[test]
fn a_warm_card_moves_nothing_and_a_full_one_evicts_too() {
    let c = component("c", 10);
    assert_eq!(seconds(&card_with(&[&c]), 10), 0.0);
    assert_eq!(seconds(&card_with(&[]), 10), 10.0);
    let full = seconds(&card_with(&[&component("other", 20)]), 10);
    assert!((10.01..10.1).contains(&full), "{full}");
    assert_eq!(seconds(&card_with(&[]), 25), f64::INFINITY);
}

#[test]
fn moves_after_a_wait_are_counted() {
    let busy = component("busy", 20);
    let mut ledger = card_with(&[&busy]);
    ledger.lease(&stage(&[&busy], Bytes::ZERO), NOW).unwrap();
    assert_eq!(seconds(&ledger, 10), 10.0);
}

#[test]
fn serialized_names_are_snake_case() {
    let text = |value: &Verdict| serde_json::to_string(value).unwrap();
    assert_eq!(
        text(&wait(0, WaitCause::LateEviction)),
        r#"{"wait":{"short":0,"cause":"late_eviction"}}"#
    );
    assert_eq!(text(&run([Move::Trim])), r#"{"run":{"moves":["trim"]}}"#);
    assert_eq!(serde_json::to_string(&Policy::default()).unwrap(), r#""shared""#);
}

#[test]
fn a_component_of_no_bytes_is_planned_like_any_other() {
    let empty = Component {
        bytes: Bytes::ZERO,
        ..component("empty", 1)
    };
    let gone = ComponentId::new("gone");
    let ledger = card_with(&[]);
    assert_eq!(shared(&ledger, &[&empty], 24), run([load_of(&empty)]));
    assert!(ledger.resident(&gone).is_none());
}

/// A stage that goes over its blocks this often.
fn passes(components: &[&Component], scratch_gib: u64, passes: u32) -> StageNeed {
    StageNeed {
        passes,
        ..stage(components, Bytes::gib(scratch_gib))
    }
}

#[test]
fn a_component_that_is_too_large_gets_what_the_card_has_and_streams_the_rest() {
    let (large, text) = (in_blocks("large", 40), component("text", 6));
    let ledger = card_with(&[&text]);
    // 24 GiB, of which the stage needs 2: five blocks of 4 GiB would fit beside nothing else, two of them are slots.
    let verdict = plan(&ledger, &passes(&[&large], 2, 28), Policy::Shared, NOW);
    assert_eq!(
        verdict,
        run([evict_of(&text), Move::Load(large.clone(), Part(5))])
    );
    assert_eq!(large.bytes_of(Part(5)), Bytes::gib(20));
    // A single pass takes nothing of others.
    let verdict = plan(&ledger, &passes(&[&large], 2, 1), Policy::Shared, NOW);
    assert_eq!(verdict, run([Move::Load(large.clone(), Part(6))]));
    assert_eq!(large.bytes_of(Part(6)), Bytes::gib(16));
}

#[test]
fn a_single_pass_streams_rather_than_evict_others() {
    let (encoder, transformer) = (in_blocks("encoder", 10), component("transformer", 20));
    let ledger = card_with(&[&transformer]);
    let verdict = |times| plan(&ledger, &passes(&[&encoder], 1, times), Policy::Shared, NOW);
    assert_eq!(verdict(1), run([Move::Load(encoder.clone(), Part(7))]));
    assert_eq!(verdict(2), run([evict_of(&transformer), load_of(&encoder)]));
}

#[test]
fn a_part_shrinks_by_what_another_stage_lacks_and_grows_again() {
    let (model, other) = (in_blocks("model", 20), component("other", 8));
    let mut ledger = card_with(&[&model]);
    let moves = [Move::Resize(model.clone(), Part(4)), load_of(&other)];
    assert_eq!(
        shared(&ledger, &[&other], 4),
        run(moves),
        "4 GiB are free, and 12 are wanted"
    );
    ledger.begin_resize(&model, Part(4)).unwrap();
    assert_eq!(
        ledger.accounts().components,
        Bytes::gib(20),
        "booked until they are free"
    );
    ledger.complete_resize(&model.id, NOW).unwrap();
    ledger.reconcile(&truth(&ledger));
    assert_eq!(ledger.accounts().components, Bytes::gib(12));
    assert_eq!(
        plan(&ledger, &passes(&[&model], 4, 28), Policy::Shared, NOW),
        run([Move::Resize(model.clone(), Part::WHOLE)])
    );
}

#[test]
fn a_pinned_component_that_is_whole_stays_whole_and_a_leased_part_does_not_change() {
    let (model, other) = (in_blocks("model", 20), component("other", 8));
    let mut ledger = card_with(&[&model]);
    ledger.pin(PinId::new("pin"), vec![model.id.clone()]);
    assert!(matches!(shared(&ledger, &[&other], 4), Verdict::Never { .. }));
    ledger.unpin(&PinId::new("pin"));
    let lease = ledger.lease(&stage(&[&model], Bytes::ZERO), NOW).unwrap();
    assert!(matches!(
        ledger.begin_resize(&model, Part(4)),
        Err(residency::LedgerError::Leased(_))
    ));
    assert!(matches!(shared(&ledger, &[&other], 4), Verdict::Wait { .. }));
    ledger.release(lease, NOW).unwrap();
    assert!(matches!(shared(&ledger, &[&other], 4), Verdict::Run { .. }));
}

#[test]
fn pins_and_holds_do_not_count_for_stages_of_their_own_model() {
    let (encoder, transformer, vae) = (
        component("t5", 16),
        component("transformer", 20),
        component("vae", 2),
    );
    let model = [&encoder, &transformer, &vae].map(|c| c.id.clone());
    let mut model = model.to_vec();
    model.sort_unstable();
    let of_model = |components: &[&Component]| StageNeed {
        model: model.clone(),
        ..passes(components, 2, 28)
    };
    let claims: [fn(&mut Ledger, &[ComponentId]); 2] = [
        |ledger, model| ledger.hold(HoldId::new("h"), model.to_vec()),
        |ledger, model| ledger.pin(PinId::new("pin"), model.to_vec()),
    ];
    for claim in claims {
        let other = component("other", 1);
        let mut ledger = card_with(&[&transformer, &other]);
        claim(&mut ledger, &model);
        // Others leave first, and then what is claimed.
        let verdict = plan(&ledger, &of_model(&[&vae]), Policy::Shared, NOW);
        assert_eq!(verdict, run([evict_of(&other), load_of(&vae)]));
        let verdict = plan(&ledger, &of_model(&[&encoder]), Policy::Shared, NOW);
        let moves = [evict_of(&transformer), load_of(&encoder)];
        assert_eq!(verdict, run(moves), "what is claimed is enough by itself");
        // Nobody else may take it.
        let verdict = shared(&ledger, &[&encoder], 2);
        assert!(!matches!(verdict, Verdict::Run { .. }), "{verdict:?}");
    }
    // A hold that keeps more than the model of the stage is of others too.
    let mut ledger = card_with(&[&transformer]);
    let more = model.iter().cloned().chain([ComponentId::new("more")]);
    ledger.hold(HoldId::new("h"), more.collect());
    let verdict = plan(&ledger, &of_model(&[&encoder]), Policy::Shared, NOW);
    assert_eq!(verdict, wait(14, WaitCause::Leases));
}

#[test]
fn a_claimed_component_that_is_streamed_gives_up_blocks_for_other_models() {
    let (large, other) = (in_blocks("large", 40), component("other", 10));
    let mut ledger = card_with(&[]);
    ledger.begin_load(&large, Part(5), NOW).unwrap();
    ledger.complete_load(&large.id, NOW).unwrap();
    ledger.pin(PinId::new("pin"), vec![large.id.clone()]);
    ledger.reconcile(&truth(&ledger));
    let smaller = [Move::Resize(large.clone(), Part(7)), load_of(&other)];
    assert_eq!(large.bytes_of(Part(7)), Bytes::gib(12));
    assert_eq!(shared(&ledger, &[&other], 0), run(smaller));
    let never = Verdict::Never {
        needed: Bytes::gib(17),
        capacity: Bytes::gib(16),
    };
    assert_eq!(large.bytes_of(large.least()), Bytes::gib(8));
    assert_eq!(shared(&ledger, &[&other], 7), never);
    // A pinned encoder stays as it is while something else can leave, although it is read in a single pass.
    let text = in_blocks("text", 10);
    let mut ledger = card_with(&[&text, &other]);
    ledger.pin(PinId::new("pin"), vec![text.id.clone()]);
    let of_text = |passes_over| plan(&ledger, &passes(&[&text], 8, passes_over), Policy::Shared, NOW);
    assert_eq!(of_text(1), run([evict_of(&other)]));
    assert_eq!(of_text(28), run([evict_of(&other)]));
}

#[test]
fn a_few_bytes_more_move_no_blocks() {
    let mut small = in_blocks("small", 10);
    small.parts = residency::Parts::new(
        small.bytes,
        (0..50).map(|n| residency::PartSize {
            bytes: Bytes::gib(9) - Bytes::mib(100 * n),
            ..residency::PartSize::default()
        }),
        |_| {},
    );
    let mut ledger = Ledger::new(Bytes::gib(8), Bytes::ZERO);
    ledger.begin_load(&small, Part(14), NOW).unwrap();
    ledger.complete_load(&small.id, NOW).unwrap();
    assert!(ledger.usable() > Bytes::mib(200));
    assert_eq!(
        plan(&ledger, &passes(&[&small], 0, 28), Policy::Shared, NOW),
        run([])
    );
}

#[test]
fn only_what_fits_in_no_part_never_fits() {
    let model = in_blocks("model", 200);
    let Verdict::Never { needed, capacity } = shared(&card_with(&[]), &[&model], 1) else {
        panic!("two slots of 20 GiB do not fit");
    };
    assert_eq!((needed, capacity), (Bytes::gib(41), Bytes::gib(24)));
}
