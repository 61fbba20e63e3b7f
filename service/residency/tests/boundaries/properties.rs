use proptest::collection::vec;
use proptest::prelude::*;
use residency::{
    Bytes, Component, ComponentId, DriverTruth, HoldId, Ledger, Millis, Move, Part, PartSize, Parts, PinId,
    Policy, ReservationId, Resident, StageNeed, Verdict, plan, plan_low_memory,
};

const TOTAL: Bytes = Bytes(10_000);
const NOW: Millis = Millis(1_000);

#[derive(Clone, Debug)]
struct Given {
    residents: Vec<(u64, u8, u32)>,
    foreign: u64,
    slack: u64,
    headroom: u64,
    reserved: u64,
    new: Vec<u64>,
    reused: usize,
    scratch: u64,
    policy: Policy,
    /// Whether components have parts.
    in_blocks: bool,
    passes: u32,
}

fn given() -> impl Strategy<Value = Given> {
    let residents = vec((1..1_500u64, 0..8u8, 0..1_000u32), 0..12);
    let others = (0..2_000u64, 0..2_000u64, 0..1_000u64, 0..1_500u64);
    let need = (vec(1..3_000u64, 0..4), 0..3usize, 0..3_000u64);
    let policy = prop_oneof![Just(Policy::Shared), Just(Policy::Exclusive)];
    (residents, others, need, policy, any::<bool>(), 1..3_u32).prop_map(
        |(
            residents,
            (foreign, slack, headroom, reserved),
            (new, reused, scratch),
            policy,
            in_blocks,
            passes,
        )| Given {
            residents,
            foreign,
            slack,
            headroom,
            reserved,
            new,
            reused,
            scratch,
            policy,
            in_blocks,
            passes,
        },
    )
}

fn component(name: String, bytes: u64, milliseconds: u32) -> Component {
    let reload_seconds = f64::from(milliseconds) / 1_000.0;
    Component {
        id: ComponentId::new(name.clone()),
        name,
        bytes: Bytes(bytes),
        reload_seconds,
        parts: Parts::default(),
    }
}

/// A component of eight blocks. A part has two slots of a block.
fn in_blocks(component: Component) -> Component {
    let block = component.bytes.0 / 8;
    let size = |streamed: u64| PartSize {
        bytes: Bytes(component.bytes.0 - block * streamed + 2 * block),
        streamed: Bytes(block * streamed),
        streamed_once: Bytes::ZERO,
    };
    Component {
        parts: Parts::new(component.bytes, (1..=8).map(size), |_| {}),
        ..component
    }
}

/// A card as generated, and the stage asked of it. The second figure of a resident says whether it is leased, pinned, held.
fn build(given: &Given) -> (Ledger, StageNeed, DriverTruth) {
    let mut ledger = Ledger::new(TOTAL, Bytes(given.headroom));
    let mut here = Vec::new();
    let mut sum = Bytes::ZERO;
    for (n, &(bytes, how, ms)) in given.residents.iter().enumerate() {
        let c = component(format!("r{n}"), bytes, ms);
        let c = if given.in_blocks { in_blocks(c) } else { c };
        // Some are there in a part only.
        let part = if n.is_multiple_of(3) {
            Part(ms % 7).min(c.least())
        } else {
            Part::WHOLE
        };
        if sum + c.bytes_of(part) > Bytes(6_000) {
            break;
        }
        sum += c.bytes_of(part);
        ledger.begin_load(&c, part, Millis(0)).unwrap();
        ledger.complete_load(&c.id, Millis(0)).unwrap();
        match how {
            0 => drop(
                ledger
                    .lease(&need_of(std::slice::from_ref(&c), 0), Millis(0))
                    .unwrap(),
            ),
            1 => ledger.pin(PinId::new(&*c.id.0), vec![c.id.clone()]),
            2 => ledger.hold(HoldId::new("h"), vec![c.id.clone()]),
            _ => {}
        }
        here.push(c);
    }
    let rest = TOTAL - sum - Bytes(given.foreign) - Bytes(given.slack);
    let truth = DriverTruth {
        total: TOTAL,
        free: rest,
        components: sum,
        slack: Bytes(given.slack),
        ..DriverTruth::default()
    };
    ledger.reconcile(&truth);
    if given.reserved > 0 {
        ledger.reserve(ReservationId::new("r"), "r".into(), Bytes(given.reserved));
    }
    let mut wanted: Vec<Component> = here.into_iter().take(given.reused).collect();
    wanted.extend(
        given
            .new
            .iter()
            .enumerate()
            .map(|(n, &bytes)| component(format!("n{n}"), bytes, 1))
            .map(|c| if given.in_blocks { in_blocks(c) } else { c }),
    );
    let need = StageNeed {
        passes: given.passes,
        ..need_of(&wanted, given.scratch)
    };
    (ledger, need, truth)
}

fn need_of(components: &[Component], scratch: u64) -> StageNeed {
    StageNeed {
        name: "denoise".into(),
        components: components.to_vec(),
        scratch: Bytes(scratch),
        headroom: Bytes::ZERO,
        later: Vec::new(),
        model: Vec::new(),
        passes: 2,
    }
}

fn evicted(moves: &[Move]) -> Vec<&Component> {
    moves
        .iter()
        .filter_map(|m| if let Move::Evict(c) = m { Some(c) } else { None })
        .collect()
}

/// Carries a plan out on a card whose driver reports the true free bytes at once.
fn carry_out(ledger: &mut Ledger, mut truth: DriverTruth, moves: &[Move]) -> Result<(), TestCaseError> {
    for each in moves {
        match each {
            Move::Evict(c) => {
                let bytes = ledger.resident(&c.id).map_or(Bytes::ZERO, Resident::bytes);
                prop_assert!(ledger.begin_evict(&c.id).is_ok());
                prop_assert!(ledger.complete_evict(&c.id, NOW).is_ok());
                truth.components -= bytes;
                truth.free += bytes;
            }
            Move::Trim => {
                truth.free += truth.slack;
                truth.slack = Bytes::ZERO;
            }
            Move::Load(c, part) => {
                let bytes = c.bytes_of(*part);
                prop_assert!(bytes <= truth.free, "component pools take from the driver only");
                prop_assert!(ledger.begin_load(c, *part, NOW).is_ok());
                prop_assert!(ledger.complete_load(&c.id, NOW).is_ok());
                truth.components += bytes;
                truth.free -= bytes;
            }
            Move::Resize(c, part) => {
                let before = ledger.resident(&c.id).map_or(Bytes::ZERO, Resident::bytes);
                let then = c.bytes_of(*part);
                prop_assert!(
                    then - before <= truth.free,
                    "a part grows into the driver's memory only"
                );
                prop_assert!(ledger.begin_resize(c, *part).is_ok());
                prop_assert!(ledger.complete_resize(&c.id, NOW).is_ok());
                truth.components = truth.components + then - before;
                truth.free = truth.free + before - then;
            }
        }
        prop_assert_eq!(ledger.accounts().sum(), TOTAL);
        ledger.reconcile(&truth);
        prop_assert_eq!(ledger.accounts().sum(), TOTAL);
        prop_assert_eq!(ledger.late(), Bytes::ZERO);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]

    /// A carried-out plan is enough: the stage gets its lease, and headroom and reservations are untouched.
    #[test]
    fn a_carried_out_plan_makes_the_lease_possible(given in given()) {
        let (mut ledger, need, truth) = build(&given);
        if let Verdict::Run { moves } = plan(&ledger, &need, given.policy, NOW) {
            carry_out(&mut ledger, truth, &moves)?;
            prop_assert!(ledger.usable() >= need.scratch);
            prop_assert!(ledger.lease(&need, NOW).is_ok());
            prop_assert_eq!(ledger.accounts().sum(), TOTAL);
        }
    }

    /// A plan evicts only idle components, and under `shared` none that could have stayed.
    #[test]
    fn a_plan_evicts_no_more_than_needed(given in given()) {
        let (ledger, need, _) = build(&given);
        if let Verdict::Run { moves } = plan(&ledger, &need, Policy::Shared, NOW) {
            for each in &moves {
                if let Move::Resize(c, part) = each
                    && ledger.resident(&c.id).is_some_and(|r| c.bytes_of(*part) < r.bytes())
                {
                    let here = ledger.resident(&c.id);
                    prop_assert!(here.is_some_and(|r| r.is_idle() || r.leases == 0 && r.part != Part::WHOLE));
                }
            }
            let victims = evicted(&moves);
            for c in &victims {
                prop_assert!(ledger.resident(&c.id).is_some_and(|r| r.is_idle()));
                prop_assert!(!need.components.iter().any(|needed| needed.id == c.id));
            }
            let loads = need.components.iter().filter(|c| ledger.resident(&c.id).is_none());
            let wanted = loads.map(|c| c.bytes).sum::<Bytes>() + need.scratch;
            let freed: Bytes = victims.iter().map(|c| c.bytes).sum();
            let usable = ledger.usable();
            if usable > Bytes::ZERO && !given.in_blocks {
                prop_assert!(victims.iter().all(|c| usable + freed - c.bytes < wanted));
            }
        }
    }

    /// Waits are for bytes missing after all idle components are evicted; a low-memory plan is short by exactly that.
    #[test]
    fn a_wait_and_a_low_memory_plan_report_the_same_shortage(given in given()) {
        let (mut ledger, need, truth) = build(&given);
        let low = plan_low_memory(&ledger, &need, given.policy, NOW);
        match plan(&ledger, &need, given.policy, NOW) {
            Verdict::Run { moves } => {
                prop_assert_eq!(low.short, Bytes::ZERO);
                prop_assert_eq!(low.moves, moves);
            }
            Verdict::Wait { short, .. } => {
                prop_assert_eq!(low.short, short);
                let evictions: Vec<Move> = low.moves.iter().filter(|m| matches!(m, Move::Evict(_) | Move::Resize(..))).cloned().collect();
                let evictions: Vec<Move> = evictions.into_iter().filter(|m| match m {
                    Move::Resize(c, part) => ledger.resident(&c.id).is_some_and(|r| c.bytes_of(*part) < r.bytes()),
                    _ => true,
                }).collect();
                carry_out(&mut ledger, truth, &evictions)?;
                let others = ledger.residents().filter(|r| !need.components.iter().any(|c| c.id == r.component.id));
                prop_assert!(others.into_iter().all(|r| !r.is_idle()), "all that may leave has left");
            }
            Verdict::Never { needed, capacity } => prop_assert!(needed > capacity && low.short > Bytes::ZERO),
        }
    }

    /// For any driver figures, the accounts sum up to the capacity, and reconciling twice changes nothing.
    #[test]
    fn accounts_sum_up_to_the_capacity_for_any_driver_figures(given in given(), figures in vec(0..12_000u64, 6), evict in any::<bool>()) {
        let (mut ledger, need, _) = build(&given);
        let idle = ledger.residents().find(|r| r.is_idle()).map(|r| r.component.id.clone());
        if evict && let Some(idle) = idle {
            prop_assert!(ledger.begin_evict(&idle).is_ok());
            prop_assert!(ledger.complete_evict(&idle, NOW).is_ok());
        }
        for c in &need.components {
            let _refused = ledger.begin_load(c, Part::WHOLE, NOW);
        }
        let bytes = |n: usize| Bytes(figures[n]);
        let truth = DriverTruth {
            total: TOTAL,
            free: bytes(0),
            components: bytes(1),
            scratch: bytes(2),
            slack: bytes(3),
            workspaces: bytes(4),
            context: bytes(5),
            holders: Vec::new(),
        };
        ledger.reconcile(&truth);
        prop_assert_eq!(ledger.accounts().sum(), TOTAL);
        let once = ledger.clone();
        ledger.reconcile(&truth);
        prop_assert_eq!(ledger, once);
    }
}
