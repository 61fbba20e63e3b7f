//! Cards that do not remap memory: each allocation needs a hole of its size.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use residency::{
    Bytes, Component, ComponentId, DriverTruth, HoldId, Layout, Ledger, Millis, Move, NoHole, Owner, Part,
    PartSize, Parts, PinId, Policy, Range, Resident, StageNeed, Verdict, WaitCause, plan, plan_low_memory,
};

use crate::given::{component, in_blocks, load, stage, use_at};

const NOW: Millis = Millis(60_000);
const GIB: u64 = 1 << 30;

/// What lies on a card, from address zero on.
enum Spot<'a> {
    /// So many half GiB.
    Free(u64),
    Others(u64),
    Of(&'a Component),
}
use Spot::{Free, Of, Others};

fn card(spots: &[Spot<'_>]) -> Ledger {
    let half = |n: u64| Bytes(n * GIB / 2);
    let (mut at, mut foreign) = (0, Bytes::ZERO);
    let bytes_of = |spot: &Spot<'_>| match spot {
        Free(n) | Others(n) => half(*n),
        Of(c) => c.bytes,
    };
    let mut layout = Layout::new(spots.iter().map(bytes_of).sum());
    let mut ledger = Ledger::new(spots.iter().map(bytes_of).sum(), Bytes::ZERO);
    for spot in spots {
        let bytes = bytes_of(spot);
        match spot {
            Free(_) => {}
            Others(_) => {
                foreign += bytes;
                let owner = Owner::Foreign;
                layout.fill(&Range { at, bytes, owner });
            }
            Of(c) => {
                load(&mut ledger, c, Millis(0));
                let mut next = at;
                for (number, bytes) in c.allocations_of(Part::WHOLE) {
                    let id = c.id.clone();
                    let owner = Owner::Component { id, number };
                    layout.fill(&Range {
                        at: next,
                        bytes,
                        owner,
                    });
                    next += bytes.0;
                }
            }
        }
        at += bytes.0;
    }
    reconcile(&mut ledger, layout);
    ledger
}

/// The driver reports this layout.
fn reconcile(ledger: &mut Ledger, layout: Layout) {
    let of = |owner: &dyn Fn(&Owner) -> bool| -> Bytes {
        let used = layout.used().iter().filter(|range| owner(&range.owner));
        used.map(|range| range.bytes).sum()
    };
    ledger.reconcile(&DriverTruth {
        total: ledger.total(),
        free: layout.holes().map(|hole| hole.bytes).sum(),
        components: of(&|owner| owner.component().is_some()),
        scratch: of(&|owner| *owner == Owner::Scratch),
        slack: of(&|owner| *owner == Owner::Slack),
        layout: Some(layout),
        ..DriverTruth::default()
    });
}

fn half_gib(n: u64) -> Bytes {
    Bytes(n * GIB / 2)
}

fn verdict(ledger: &Ledger, components: &[&Component], scratch: Bytes) -> Verdict {
    plan(ledger, &stage(components, scratch), Policy::Shared, NOW)
}

fn evictions(of: &[&Component]) -> Verdict {
    let moves = of.iter().map(|&c| Move::Evict(c.clone())).collect();
    Verdict::Run { moves }
}

#[test]
fn what_lies_between_holes_is_evicted_and_not_what_is_cheapest() {
    let mut cheap = component("cheap", 1);
    cheap.reload_seconds = 0.1;
    let (between, large) = (component("between", 1), component("large", 8));
    // Two GiB are free, in four holes.
    let ledger = card(&[
        Free(1),
        Of(&large),
        Free(1),
        Of(&between),
        Free(1),
        Others(2),
        Of(&cheap),
        Others(1),
        Free(1),
    ]);
    assert_eq!(
        verdict(&ledger, &[&large], half_gib(1)),
        evictions(&[]),
        "a hole is large enough"
    );
    assert_eq!(verdict(&ledger, &[&large], half_gib(3)), evictions(&[&between]));
    let remapped = Ledger::clone(&ledger);
    let mut truth = DriverTruth {
        total: remapped.total(),
        free: Bytes::gib(2),
        components: Bytes::gib(10),
        ..DriverTruth::default()
    };
    truth.layout = None;
    let mut remapped = remapped;
    remapped.reconcile(&truth);
    assert_eq!(
        verdict(&remapped, &[&large], half_gib(3)),
        evictions(&[]),
        "free bytes are as good wherever they are"
    );
}

#[test]
fn the_cheapest_window_wins_and_more_expensive_ones_stay() {
    let (mut a, mut b, c) = (component("a", 1), component("b", 1), component("c", 3));
    (a.reload_seconds, b.reload_seconds) = (2.0, 2.0);
    // a and b are four seconds together, and c is three alone.
    let ledger = card(&[Of(&a), Free(1), Of(&b), Others(1), Of(&c), Free(4)]);
    assert_eq!(verdict(&ledger, &[], half_gib(5)), evictions(&[&c]));
    let mut used = ledger.clone();
    use_at(&mut used, &c, 9, NOW);
    reconcile(&mut used, ledger.layout().unwrap().clone());
    assert_eq!(
        verdict(&used, &[], half_gib(5)),
        evictions(&[&a, &b]),
        "c is likely to be needed again"
    );
}

#[test]
fn a_component_in_the_way_of_its_own_stage_is_loaded_elsewhere() {
    let own = component("own", 1);
    let ledger = card(&[Free(3), Of(&own), Free(3)]);
    let moves = vec![Move::Evict(own.clone()), Move::Load(own.clone(), Part::WHOLE)];
    assert_eq!(verdict(&ledger, &[&own], half_gib(5)), Verdict::Run { moves });
}

#[test]
fn a_component_of_blocks_gives_up_only_as_many_as_a_hole_needs() {
    let (streamed, pinned) = (in_blocks("streamed", 10), component("pinned", 2));
    let mut ledger = card(&[Of(&streamed), Of(&pinned), Free(3)]);
    ledger.pin(PinId::new("pin"), vec![pinned.id.clone()]);
    let Verdict::Run { moves } = verdict(&ledger, &[&pinned], Bytes::gib(3)) else {
        panic!("it fits")
    };
    let [Move::Resize(c, part)] = &moves[..] else {
        panic!("{moves:?}")
    };
    assert_eq!(c.id, streamed.id);
    // A hole of three blocks, and one block more for the ring of two and what is left of the first hole.
    assert!(c.bytes_of(*part) >= Bytes::gib(6), "{moves:?}");
    let mut layout = ledger.layout().unwrap().clone();
    layout.hold(c, *part).unwrap();
    assert!(layout.largest_hole() >= Bytes::gib(3));
}

#[test]
fn a_part_is_as_large_as_the_holes_allow() {
    let (large, pinned) = (in_blocks("large", 40), component("pinned", 1));
    // Blocks of 4 GiB: two bytes that are split serve none.
    let mut ledger = card(&[Free(21), Of(&pinned), Free(21)]);
    ledger.pin(PinId::new("pin"), vec![pinned.id.clone()]);
    let need = stage(&[&large], Bytes::ZERO);
    let Verdict::Run { moves } = plan(&ledger, &need, Policy::Shared, NOW) else {
        panic!("it fits")
    };
    let [Move::Load(c, part)] = &moves[..] else {
        panic!("{moves:?}")
    };
    // The ring of two blocks in one hole, and two blocks in the other: not all are streamed.
    assert_eq!(c.bytes_of(*part), Bytes::gib(16));
}

#[test]
fn waits_and_refusals_say_what_splits_the_space() {
    let (a, b) = (component("a", 1), component("b", 1));
    let spots = || [Free(4), Of(&a), Free(4), Others(1), Free(4)];
    let apart = |ledger: &Ledger, scratch| verdict(ledger, &[&b], scratch);
    let wait = |halves: u64, cause| {
        let short = half_gib(halves);
        Verdict::Wait { short, cause }
    };
    // Leased, and held: after its release there are five GiB in one piece, less one for b.
    let mut leased = card(&spots());
    leased.lease(&stage(&[&a], Bytes::ZERO), NOW).unwrap();
    assert_eq!(apart(&leased, half_gib(6)), wait(2, WaitCause::Leases));
    let mut held = card(&spots());
    held.hold(HoldId::new("h"), vec![a.id.clone()]);
    assert_eq!(apart(&held, half_gib(6)), wait(2, WaitCause::Leases));
    // Nothing of ours is in the way.
    assert_eq!(apart(&card(&spots()), half_gib(11)), wait(1, WaitCause::Foreign));
    // A pin does not end by itself, but other programs do.
    let mut pinned = card(&spots());
    pinned.pin(PinId::new("pin"), vec![a.id.clone()]);
    assert_eq!(apart(&pinned, half_gib(6)), wait(2, WaitCause::Foreign));
    let never = Verdict::Never {
        needed: half_gib(10),
        capacity: half_gib(9),
    };
    assert_eq!(apart(&pinned, half_gib(10)), never);
}

#[test]
fn what_was_freed_and_is_late_is_waited_for() {
    let a = component("a", 1);
    let mut ledger = card(&[Free(1), Of(&a), Free(1)]);
    ledger.begin_evict(&a.id).unwrap();
    ledger.complete_evict(&a.id, NOW).unwrap();
    let mut layout = ledger.layout().unwrap().clone();
    for mut range in layout.free_component(&a.id) {
        range.owner = Owner::Late;
        layout.fill(&range);
    }
    reconcile(&mut ledger, layout);
    let late = WaitCause::LateEviction;
    let (short, cause) = (half_gib(1), late);
    assert_eq!(verdict(&ledger, &[], half_gib(2)), Verdict::Wait { short, cause });
}

#[test]
fn slack_joins_a_hole_after_a_trim() {
    let mut layout = Layout::new(Bytes::gib(3));
    let mut ledger = Ledger::new(Bytes::gib(3), Bytes::ZERO);
    let (at, _) = layout.take_scratch(Bytes::gib(1)).unwrap();
    layout.return_scratch(at, true);
    reconcile(&mut ledger, layout);
    assert_eq!(
        verdict(&ledger, &[], Bytes::gib(1)),
        evictions(&[]),
        "the pool has it"
    );
    let moves = vec![Move::Trim];
    assert_eq!(verdict(&ledger, &[], Bytes::gib(3)), Verdict::Run { moves });
}

/// A history of a card, and what a stage asks of it then.
#[derive(Clone, Debug)]
struct History {
    sizes: Vec<(u64, bool, u32)>,
    /// Components that come, in a part, or go; 99: other programs take so many bytes.
    turns: Vec<(usize, u32, u64)>,
    /// Of each component: 0 leased, 1 pinned, 2 held.
    claims: Vec<u8>,
    wanted: Vec<usize>,
    scratch: u64,
    slack: u64,
    passes: u32,
}

fn history() -> impl Strategy<Value = History> {
    let sizes = vec((20..250_u64, any::<bool>(), 1_000..9_000_u32), 7);
    let turns = vec(
        (
            prop_oneof![8 => 0..7_usize, 1 => Just(99_usize)],
            0..9_u32,
            0..300_u64,
        ),
        0..24,
    );
    let ask = (
        vec(0..7_usize, 0..3),
        0..700_u64,
        prop_oneof![Just(0), 1..120_u64],
        1..3_u32,
    );
    (sizes, turns, vec(0..12_u8, 7), ask).prop_map(
        |(sizes, turns, claims, (wanted, scratch, slack, passes))| History {
            sizes,
            turns,
            claims,
            wanted,
            scratch,
            slack,
            passes,
        },
    )
}

const TOTAL: Bytes = Bytes(1_000);

fn components_of(history: &History) -> Vec<Component> {
    let one = |(n, &(bytes, is_in_blocks, ms)): (usize, &(u64, bool, u32))| {
        let block = bytes / 6;
        let size = |streamed: u64| PartSize {
            bytes: Bytes(bytes - block * streamed + 2 * block),
            streamed: Bytes(block * streamed),
            streamed_once: Bytes::ZERO,
        };
        let parts = Parts::new(Bytes(bytes), (1..=6).map(size), |_| {});
        Component {
            id: ComponentId::new(format!("c{n}")),
            name: format!("c{n}"),
            bytes: Bytes(bytes),
            reload_seconds: f64::from(ms) / 1_000.0,
            parts: if is_in_blocks { parts } else { Parts::default() },
        }
    };
    history.sizes.iter().enumerate().map(one).collect()
}

fn built(history: &History) -> (Ledger, StageNeed) {
    let components = components_of(history);
    let (mut layout, mut parts) = (Layout::new(TOTAL), vec![None; components.len()]);
    if let Ok((at, _)) = layout.take_scratch(Bytes(history.slack)) {
        layout.return_scratch(at, true);
    }
    for &(n, part, foreign) in &history.turns {
        let Some(component) = components.get(n) else {
            layout.set_foreign(Bytes(foreign));
            continue;
        };
        let part = Part(part).min(component.least());
        if parts[n] == Some(part) {
            layout.free_component(&component.id);
            parts[n] = None;
        } else if layout.hold(component, part).is_ok() {
            parts[n] = Some(part);
        }
    }
    let mut ledger = Ledger::new(TOTAL, Bytes::ZERO);
    for (component, part) in components.iter().zip(&parts) {
        let Some(part) = part else { continue };
        ledger.begin_load(component, *part, Millis(0)).unwrap();
        ledger.complete_load(&component.id, Millis(0)).unwrap();
    }
    reconcile(&mut ledger, layout);
    for (component, claim) in components.iter().zip(&history.claims) {
        match claim {
            0 if ledger.is_resident(&component.id) => {
                ledger
                    .lease(&stage(&[component], Bytes::ZERO), Millis(0))
                    .unwrap();
            }
            1 => ledger.pin(PinId::new(&*component.id.0), vec![component.id.clone()]),
            2 => ledger.hold(HoldId::new(component.name.as_str()), vec![component.id.clone()]),
            _ => {}
        }
    }
    let wanted: Vec<&Component> = history.wanted.iter().map(|n| &components[*n]).collect();
    let need = StageNeed {
        passes: history.passes,
        ..stage(&wanted, Bytes(history.scratch))
    };
    (ledger, need)
}

fn carry_out(layout: &mut Layout, moves: &[Move], scratch: Bytes) -> Result<(), NoHole> {
    for each in moves {
        match each {
            Move::Evict(c) => drop(layout.free_component(&c.id)),
            Move::Trim => drop(layout.free(|range| range.owner == Owner::Slack)),
            Move::Load(c, part) | Move::Resize(c, part) => layout.hold(c, *part)?,
        }
    }
    layout.take_scratch(scratch).map(|_| ())
}

/// Whether a stage fits after the evictions of a subset of these, with its components in these parts.
fn fits_without(
    ledger: &Ledger,
    need: &StageNeed,
    gone: &[&Resident],
    part_of: &dyn Fn(&Component) -> Part,
) -> bool {
    let mut layout = ledger.layout().unwrap().clone();
    let stays = |r: &&Resident| !gone.iter().any(|gone| gone.component.id == r.component.id);
    let named = |id: &ComponentId| need.components.iter().any(|c| c.id == *id);
    let others: Bytes = ledger
        .residents()
        .filter(stays)
        .filter(|r| !named(&r.component.id))
        .map(Resident::bytes)
        .sum();
    let ids: BTreeSet<&ComponentId> = need.components.iter().map(|c| &c.id).collect();
    let own: Bytes = ids
        .iter()
        .map(|id| {
            let c = need.components.iter().find(|c| c.id == **id).unwrap();
            c.bytes_of(part_of(c))
        })
        .sum();
    if others + own + need.scratch + ledger.accounts().foreign > TOTAL {
        return false;
    }
    let evictions = gone.iter().map(|r| Move::Evict(r.component.clone()));
    let loads = need.components.iter().map(|c| Move::Load(c.clone(), part_of(c)));
    let (shrinks, loads): (Vec<Move>, Vec<Move>) = loads.partition(|m| match m {
        Move::Load(c, part) => ledger
            .resident(&c.id)
            .is_some_and(|r| stays(&r) && c.bytes_of(*part) < r.bytes()),
        Move::Evict(_) | Move::Resize(..) | Move::Trim => false,
    });
    let moves: Vec<Move> = evictions
        .chain(shrinks)
        .chain([Move::Trim])
        .chain(loads)
        .collect();
    carry_out(&mut layout, &moves, need.scratch).is_ok()
}

fn subsets<'a>(of: &'a [&'a Resident]) -> impl Iterator<Item = Vec<&'a Resident>> {
    (0..1_u32 << of.len()).map(|chosen| {
        let each = of.iter().enumerate().filter(move |(n, _)| chosen >> n & 1 == 1);
        each.map(|(_, r)| *r).collect()
    })
}

fn whole_of(ledger: &Ledger, c: &Component) -> Part {
    ledger
        .resident(&c.id)
        .filter(|r| r.leases > 0)
        .map_or(Part::WHOLE, |r| r.part)
}

fn least_of(ledger: &Ledger, c: &Component) -> Part {
    match ledger.resident(&c.id) {
        Some(r) if r.leases > 0 => r.part.min(c.least()),
        Some(r) if (r.pinned || r.held > 0) && r.part == Part::WHOLE => Part::WHOLE,
        Some(_) | None => c.least(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3_000) })]

    /// After the moves of a plan each allocation has found a hole, the stage's activations among them, and only idle components left.
    #[test]
    fn planned_stages_find_their_holes(history in history(), exclusive in any::<bool>()) {
        let (ledger, need) = built(&history);
        let policy = if exclusive { Policy::Exclusive } else { Policy::Shared };
        if let Verdict::Run { moves } = plan(&ledger, &need, policy, NOW) {
            let mut layout = ledger.layout().unwrap().clone();
            prop_assert_eq!(carry_out(&mut layout, &moves, need.scratch), Ok(()), "{:?}", moves);
            let is_own = |r: &Resident| need.components.iter().any(|c| c.id == r.component.id);
            for each in &moves {
                let (gone, shrinks) = match each {
                    Move::Evict(c) => (ledger.resident(&c.id), false),
                    Move::Resize(c, _) => (ledger.resident(&c.id), true),
                    Move::Load(..) | Move::Trim => (None, false),
                };
                if let Some(r) = gone {
                    prop_assert!(r.leases == 0);
                    prop_assert!(r.is_idle() || is_own(r) || shrinks && r.part != Part::WHOLE);
                }
            }
            let low = plan_low_memory(&ledger, &need, policy, NOW);
            prop_assert_eq!((low.moves, low.short), (moves, Bytes::ZERO));
        }
    }

    /// A stage waits only if its holes are not there after all evictions, with its own components where they are or loaded
    /// elsewhere; it is refused if and only if nothing but pins is in the way. (Fewer evictions may happen to do where all do not, since
    /// what is loaded then lies elsewhere: such packings are not looked for.)
    #[test]
    fn waits_and_refusals_are_unavoidable(history in history()) {
        let (ledger, need) = built(&history);
        let verdict = plan(&ledger, &need, Policy::Shared, NOW);
        if matches!(verdict, Verdict::Run { .. }) {
            return Ok(());
        }
        let idle: Vec<&Resident> = ledger.residents().filter(|r| r.is_idle()).collect();
        let named = |r: &&Resident| need.components.iter().any(|c| c.id == r.component.id);
        let others = idle.iter().copied().filter(|r| !named(r)).collect();
        for gone in [others, idle] {
            for part_of in [&whole_of as &dyn Fn(&Ledger, &Component) -> Part, &least_of] {
                let part_of = |c: &Component| part_of(&ledger, c);
                prop_assert!(!fits_without(&ledger, &need, &gone, &part_of), "{:?} would do: {:?}", gone, verdict);
            }
        }
        let low = plan_low_memory(&ledger, &need, Policy::Shared, NOW);
        prop_assert!(low.short > Bytes::ZERO);
        let mut free = ledger.layout().unwrap().clone();
        let is_pinned = |id: &ComponentId| ledger.resident(id).is_some_and(|r| r.pinned);
        free.free(|range| range.owner.component().is_none_or(|id| !is_pinned(id)));
        let loads = need.components.iter().map(|c| Move::Load(c.clone(), least_of(&ledger, c)));
        let possible = carry_out(&mut free, &loads.collect::<Vec<_>>(), need.scratch);
        match verdict {
            Verdict::Never { .. } => prop_assert!(possible.is_err(), "{:?}", verdict),
            Verdict::Wait { short, .. } => {
                prop_assert_eq!(possible, Ok(()), "{:?}", verdict);
                prop_assert_eq!(low.short, short);
            }
            Verdict::Run { .. } => {}
        }
    }

    /// Where bytes suffice, what leaves for a hole is the cheapest that there is, and a stage waits only if nothing that may leave
    /// would do: all subsets are tried.
    #[test]
    fn a_hole_is_made_at_the_lowest_cost(mut history in history()) {
        history.wanted.clear();
        history.sizes.iter_mut().for_each(|(_, is_in_blocks, _)| *is_in_blocks = false);
        let (ledger, mut need) = built(&history);
        need.scratch = need.scratch.min(ledger.usable());
        let verdict = plan(&ledger, &need, Policy::Shared, NOW);
        let moves = if let Verdict::Run { moves } = &verdict { moves.as_slice() } else { &[] };
        let cost = |gone: &[&Resident]| gone.iter().map(|r| r.component.reload_seconds).sum::<f64>();
        let gone: Vec<&Resident> = moves.iter().filter_map(|m| match m {
            Move::Evict(c) => ledger.resident(&c.id),
            Move::Load(..) | Move::Resize(..) | Move::Trim => None,
        }).collect();
        let idle: Vec<&Resident> = ledger.residents().filter(|r| r.is_idle()).collect();
        for other in subsets(&idle) {
            if fits_without(&ledger, &need, &other, &|_| Part::WHOLE) {
                // An eviction itself takes some milliseconds.
                let runs = matches!(verdict, Verdict::Run { .. });
                prop_assert!(runs && cost(&gone) <= cost(&other) + 0.1, "{:?} would do: {:?}", other, verdict);
            }
        }
    }

    /// A layout never gives an address twice, gives the smallest hole that is large enough, and refuses only where there is none.
    #[test]
    fn layouts_agree_with_a_map_of_bytes(history in history()) {
        let components = components_of(&history);
        let mut layout = Layout::new(TOTAL);
        for &(n, part, foreign) in &history.turns {
            let before = layout.clone();
            match components.get(n) {
                None => layout.set_foreign(Bytes(foreign)),
                Some(c) => {
                    let wanted = c.allocations_of(Part(part));
                    prop_assert_eq!(wanted.iter().map(|(_, b)| *b).sum::<Bytes>(), c.bytes_of(Part(part)));
                    if let Err(no_hole) = layout.hold(c, Part(part)) {
                        prop_assert!(no_hole.needed > no_hole.largest);
                        prop_assert_eq!(&layout, &before);
                    } else {
                        let has: Bytes = layout.used().iter().filter(|r| r.owner.component() == Some(&c.id)).map(|r| r.bytes).sum();
                        prop_assert_eq!(has, c.bytes_of(Part(part)));
                    }
                }
            }
            let mut map = vec![false; TOTAL.0 as usize];
            for range in layout.used() {
                for byte in &mut map[range.at as usize..(range.at + range.bytes.0) as usize] {
                    prop_assert!(!*byte, "twice");
                    *byte = true;
                }
            }
            let holes: Vec<usize> = map.split(|used| *used).map(<[bool]>::len).filter(|length| *length > 0).collect();
            prop_assert!(layout.holes().map(|hole| hole.bytes.0 as usize).eq(holes.iter().copied()));
            let wanted = Bytes(history.scratch.max(1));
            let best = holes.iter().copied().filter(|hole| *hole as u64 >= wanted.0).min();
            let placed = layout.clone().place(wanted, Owner::Scratch);
            let hole = placed.ok().and_then(|at| layout.holes().find(|hole| hole.at == at));
            prop_assert_eq!(hole.map(|hole| hole.bytes.0 as usize), best);
        }
    }
}
