//! The simulated card: its accounts always sum up to the capacity, faults are injected as configured, and its
//! settings round-trip.

use std::collections::HashMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::DType;
use gpu::{
    ByteRange, DeviceSpec, FaultAction, Gpu, GpuError, LoadError, LoadPlan, ManualClock, MemoryProfile,
    OpenError, ProfileName, ScratchGuard, SimulatedAccounts, SimulatedCard, SimulatedClock,
    SimulatedSettings, SimulatedWorld, Stored, TensorSource, exact_bytes, open, parse_bytes,
    simulated_scratch,
};
use proptest::prelude::*;
use residency::{Bytes, Component, ComponentId, Holder, Owner, Part, PartSize, Parts};

struct Bench {
    card: SimulatedCard,
    world: SimulatedWorld,
    clock: ManualClock,
}

fn bench_of(settings: &str, generation: u64) -> Bench {
    let (world, clock) = (SimulatedWorld::new(), ManualClock::default());
    let settings = settings.parse().unwrap();
    let card = SimulatedCard::new(settings, generation, world.clone(), Arc::new(clock.clone()));
    Bench { card, world, clock }
}

fn bench(settings: &str) -> Bench {
    bench_of(settings, 1)
}

fn id(name: &str) -> ComponentId {
    ComponentId::new(name)
}

impl Bench {
    fn load(&mut self, name: &str, bytes: Bytes) -> Result<(), LoadError> {
        let component = Component {
            id: id(name),
            name: name.to_owned(),
            bytes,
            reload_seconds: 0.0,
            parts: residency::Parts::default(),
        };
        self.card
            .load(&component, &LoadPlan::synthetic(bytes), Part::WHOLE, &mut |_| {
                ControlFlow::Continue(())
            })
    }

    fn free(&mut self) -> Bytes {
        self.card.memory().unwrap().free
    }
}

fn sum(accounts: &SimulatedAccounts) -> Bytes {
    let foreign: Bytes = accounts.foreign.iter().map(|h| h.bytes).sum();
    accounts.components
        + accounts.scratch
        + accounts.slack
        + accounts.workspaces
        + accounts.context
        + foreign
        + accounts.lagging
        + accounts.free
}

#[test]
fn a_load_takes_its_transfer_time_and_can_be_cancelled() {
    let mut b = bench("8GiB,speed=1GiB/s,context=512MiB");
    b.load("a", Bytes::gib(2)).unwrap();
    assert_eq!(b.clock.now_ms(), 2000);
    assert_eq!(b.free(), Bytes::gib(6) - Bytes::mib(512));

    let mut reported = Vec::new();
    let component = Component {
        id: id("b"),
        name: "b".to_owned(),
        bytes: Bytes::gib(1),
        reload_seconds: 0.0,
        parts: residency::Parts::default(),
    };
    let outcome = b.card.load(
        &component,
        &LoadPlan::synthetic(Bytes::gib(1)),
        Part::WHOLE,
        &mut |p| {
            reported.push(p.done);
            if p.done >= Bytes::mib(512) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    );
    assert!(matches!(outcome, Err(LoadError::Cancelled)));
    assert_eq!(b.clock.now_ms(), 2500);
    assert!(reported.windows(2).all(|w| w[1] - w[0] <= Bytes::mib(64)));
    assert_eq!(b.free(), Bytes::gib(6) - Bytes::mib(512));
    assert!(matches!(b.card.tensors(&id("b")), Err(GpuError::NotLoaded(_))));
}

#[test]
fn a_load_is_as_slow_as_the_slower_of_link_and_disk() {
    for (speeds, ms) in [
        ("speed=4GiB/s,disk=1GiB/s", 2000),
        ("speed=1GiB/s,disk=4GiB/s", 2000),
        ("disk=4GiB/s", 500),
    ] {
        let mut b = bench(&format!("8GiB,{speeds}"));
        b.load("a", Bytes::gib(2)).unwrap();
        assert_eq!(b.clock.now_ms(), ms, "{speeds}");
    }
}

#[test]
fn freeing_memory_takes_the_configured_time() {
    let mut b = bench("4GiB,slack=keep,release=300ms");
    b.load("a", Bytes::gib(1)).unwrap();
    drop(b.card.use_scratch(Bytes::gib(1)).unwrap());
    assert_eq!(b.clock.now_ms(), 0);
    b.card.unload(&id("a")).unwrap();
    assert_eq!((b.clock.now_ms(), b.free()), (300, Bytes::gib(3)));
    assert_eq!(b.card.trim().unwrap(), Bytes::gib(1));
    assert_eq!((b.clock.now_ms(), b.free()), (600, Bytes::gib(4)));
}

#[test]
fn the_largest_allocation_bounds_scratch_in_fragmented_memory() {
    let mut b = bench("8GiB,largest=1GiB");
    let enough = Bytes::gib(4);
    assert_eq!(b.card.largest_allocation(enough).unwrap(), Bytes::gib(1));
    assert_eq!(b.card.largest_allocation(Bytes::mib(5)).unwrap(), Bytes::mib(5));
    let refused = b.card.use_scratch(Bytes::gib(2)).unwrap_err();
    assert_eq!((refused.needed, refused.free), (Bytes::gib(2), Bytes::gib(1)));
    let pieces: Vec<ScratchGuard> = (0..8)
        .map(|_| b.card.use_scratch(Bytes::gib(1)).unwrap())
        .collect();
    assert_eq!(b.card.largest_allocation(enough).unwrap(), Bytes::ZERO);
    drop(pieces);
    assert_eq!(
        bench("2GiB").card.largest_allocation(enough).unwrap(),
        Bytes::gib(2)
    );
}

#[test]
fn without_remapping_an_allocation_needs_a_hole_and_is_told_of_the_largest() {
    let mut b = bench("4GiB,remaps=no");
    for (name, mib) in [
        ("a", 1024),
        ("gap", 512),
        ("b", 1536),
        ("second gap", 512),
        ("c", 512),
    ] {
        b.load(name, Bytes::mib(mib)).unwrap();
    }
    for gap in ["gap", "second gap"] {
        b.card.unload(&id(gap)).unwrap();
    }
    assert_eq!(b.free(), Bytes::gib(1));
    assert_eq!(b.card.largest_allocation(Bytes::gib(1)).unwrap(), Bytes::mib(512));
    let told = b.load("d", Bytes::mib(768)).unwrap_err().to_string();
    assert_eq!(
        told,
        "out of memory while loading: 768.0 MiB needed in one piece, 1.0 GiB free, at most 512.0 MiB of them in one piece"
    );
    let told = b.card.use_scratch(Bytes::mib(768)).unwrap_err().to_string();
    assert_eq!(
        told,
        "out of memory: 768.0 MiB needed, 1.0 GiB free, at most 512.0 MiB of them in one piece"
    );
    b.card.unload(&id("b")).unwrap();
    b.card.use_scratch(Bytes::mib(2560)).unwrap();
}

#[test]
fn without_remapping_a_component_has_an_allocation_for_each_block() {
    let mut b = bench("1000,remaps=no,lag=50ms");
    let size = |streamed: u64| PartSize {
        bytes: Bytes(600 - 100 * streamed + 200),
        streamed: Bytes(100 * streamed),
        streamed_once: Bytes::ZERO,
    };
    let component = Component {
        id: id("a"),
        name: "a".to_owned(),
        bytes: Bytes(600),
        reload_seconds: 0.0,
        parts: Parts::new(Bytes(600), (1..=6).map(size), |_| {}),
    };
    let plan = LoadPlan::synthetic(Bytes(600));
    let mut go_on = |_| ControlFlow::Continue(());
    b.card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
    let allocations = |b: &mut Bench| -> Vec<(u64, u64)> {
        let layout = b.card.memory().unwrap().layout.unwrap();
        let used = layout.used().iter().filter(|range| range.owner != Owner::Late);
        used.map(|range| (range.at, range.bytes.0)).collect()
    };
    let whole = allocations(&mut b);
    assert_eq!(
        whole,
        [(0, 100), (100, 100), (200, 100), (300, 300)],
        "blocks, and those that leave together"
    );
    b.load("b", Bytes(400)).unwrap();
    b.card.resize(&component, Part(2), &mut go_on).unwrap();
    // The ring takes a part of what was given up; the rest is late.
    assert_eq!(
        allocations(&mut b),
        [(0, 100), (100, 100), (200, 200), (600, 400)]
    );
    assert_eq!((b.free(), b.card.accounts().lagging), (Bytes::ZERO, Bytes(200)));
    b.clock.advance_ms(50);
    assert_eq!(b.free(), Bytes(200));
    // What cannot grow is as it was before.
    let scratch = b.card.use_scratch(Bytes(60)).unwrap();
    let before = allocations(&mut b);
    let refused = b.card.resize(&component, Part::WHOLE, &mut go_on).unwrap_err();
    assert!(matches!(refused, LoadError::OutOfMemory { .. }), "{refused}");
    assert_eq!(allocations(&mut b), before);
    drop(scratch);
    b.clock.advance_ms(50);
    b.card.resize(&component, Part::WHOLE, &mut go_on).unwrap();
    assert_eq!(
        allocations(&mut b).iter().map(|(_, bytes)| bytes).sum::<u64>(),
        1000
    );
}

#[test]
fn a_load_that_does_not_fit_is_refused_with_its_figures() {
    let mut b = bench("4GiB,foreign=3GiB");
    let outcome = b.load("a", Bytes::gib(2));
    assert!(
        matches!(outcome, Err(LoadError::OutOfMemory { needed, free }) if needed == Bytes::gib(2) && free == Bytes::gib(1))
    );
    b.world.hold("another process", None, Bytes::ZERO);
    b.load("a", Bytes::gib(2)).unwrap();
    let handle = b.card.tensors(&id("a")).unwrap();
    assert!(matches!(b.card.unload(&id("a")), Err(GpuError::StillInUse(_, 1))));
    drop(handle);
    let unloaded = b.card.unload(&id("a")).unwrap();
    assert_eq!((unloaded.booked, unloaded.freed), (Bytes::gib(2), Bytes::gib(2)));
}

#[test]
fn freed_bytes_become_free_after_the_configured_lag() {
    let mut b = bench("4GiB,lag=200ms");
    b.load("a", Bytes::gib(3)).unwrap();
    assert_eq!(b.card.unload(&id("a")).unwrap().freed, Bytes::ZERO);
    assert_eq!(b.free(), Bytes::gib(1));
    b.clock.advance_ms(199);
    assert_eq!(b.free(), Bytes::gib(1));
    b.clock.advance_ms(1);
    assert_eq!(b.free(), Bytes::gib(4));
}

#[test]
fn foreign_demand_is_met_as_memory_becomes_free() {
    let mut b = bench("4GiB");
    b.load("a", Bytes::gib(3)).unwrap();
    b.world.hold("greedy", Some(77), Bytes::gib(2));
    let truth = b.card.memory().unwrap();
    assert_eq!(truth.free, Bytes::ZERO);
    assert_eq!(
        truth.holders,
        [Holder {
            name: "greedy".to_owned(),
            pid: Some(77),
            bytes: Bytes::gib(1)
        }]
    );
    b.card.unload(&id("a")).unwrap();
    assert_eq!(b.free(), Bytes::gib(2));
    b.world.hold_from(500, "greedy", None, Bytes::ZERO);
    b.world.hold_from(800, "late", None, Bytes::gib(3));
    assert_eq!(b.free(), Bytes::gib(2));
    b.clock.advance_ms(500);
    assert_eq!(b.free(), Bytes::gib(4));
    b.clock.advance_ms(300);
    assert_eq!(b.free(), Bytes::gib(1));
}

#[test]
fn the_world_file_sets_foreign_holders() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut b = bench(&format!("4GiB,world={}", file.path().display()));
    assert_eq!(b.free(), Bytes::gib(4));
    writeln!(file, "python 1GiB\ntrainer 4711 512MiB\nnonsense").unwrap();
    let truth = b.card.memory().unwrap();
    assert_eq!(truth.free, Bytes::mib(2560));
    assert_eq!(truth.holders[1].pid, Some(4711));
    file.as_file().set_len(0).unwrap();
    assert_eq!(b.free(), Bytes::gib(4));
}

#[test]
fn scratch_is_measured_kept_and_trimmed() {
    let mut b = bench("1GiB,slack=keep,workspaces=24MiB");
    let before = b.card.use_scratch(Bytes::mib(100)).unwrap();
    b.card.begin_stage();
    drop(b.card.use_scratch(Bytes::mib(300)).unwrap());
    assert_eq!(b.card.stage_peak(), Bytes::mib(400));
    assert_eq!(b.card.accounts().slack, Bytes::mib(300));
    let all = b.card.use_scratch(Bytes::mib(900)).unwrap();
    assert_eq!(b.card.accounts().free, Bytes::ZERO);
    let short = b.card.use_scratch(Bytes(1)).unwrap_err();
    assert_eq!((short.needed, short.free), (Bytes(1), Bytes::ZERO));
    drop((before, all));
    // Slack is no room for a component until it is trimmed.
    assert!(b.load("a", Bytes::mib(500)).is_err());
    assert_eq!(b.card.trim().unwrap(), Bytes::mib(1000));
    b.load("a", Bytes::mib(500)).unwrap();
}

#[test]
fn scratch_of_no_bytes_holds_no_range() {
    let mut b = bench("1GiB,slack=keep,remaps=no");
    let empty = b.card.use_scratch(Bytes::ZERO).unwrap();
    let used = b.card.use_scratch(Bytes::mib(1)).unwrap();
    drop(empty);
    assert_eq!(
        (b.card.accounts().scratch, b.card.accounts().slack),
        (used.bytes(), Bytes::ZERO)
    );
    let layout = b.card.memory().unwrap().layout.unwrap();
    let mut in_use = layout.used().iter().filter(|range| range.owner == Owner::Scratch);
    assert_eq!(in_use.next().map(|range| range.bytes), Some(used.bytes()));
}

#[test]
fn simulated_scratch_is_allocated_on_the_card_of_the_thread() {
    assert!(simulated_scratch(Bytes::gib(1)).unwrap().is_none());
    let mut b = bench("1GiB");
    b.card.begin_stage();
    let guard = simulated_scratch(Bytes::mib(600)).unwrap().unwrap();
    assert_eq!(b.card.memory().unwrap().scratch, guard.bytes());
    assert!(simulated_scratch(Bytes::mib(600)).is_err());
    drop(guard);
    drop(b);
    assert!(simulated_scratch(Bytes(1)).unwrap().is_none());
}

#[test]
fn injected_load_failures_leave_nothing_allocated() {
    let mut b = bench("4GiB,fail-load=1,fail-load=3:io,fail-load=4:damaged,speed=1GiB/s");
    assert!(matches!(
        b.load("a", Bytes::gib(2)),
        Err(LoadError::OutOfMemory { .. })
    ));
    assert_eq!(b.clock.now_ms(), 1000, "halfway");
    assert_eq!(b.free(), Bytes::gib(4));
    b.load("a", Bytes::gib(2)).unwrap();
    assert!(matches!(b.load("b", Bytes::gib(1)), Err(LoadError::Io { .. })));
    assert!(matches!(
        b.load("b", Bytes::gib(1)),
        Err(LoadError::Damaged { .. })
    ));
    assert_eq!(b.free(), Bytes::gib(2));
    b.load("b", Bytes::gib(1)).unwrap();
}

#[test]
fn faults_are_injected_at_their_place_and_in_their_generations() {
    let settings = "1GiB,die-at=denoise:2,hang-at=load,lose-at=decode:1,die-generations=2";
    for generation in [0, 1, 2] {
        let mut b = bench_of(settings, generation);
        assert_eq!(b.card.fault_at("denoise"), None);
        assert_eq!(b.card.fault_at("denoise"), Some(FaultAction::Die));
        assert_eq!(b.card.fault_at("denoise"), None);
        assert_eq!(b.card.fault_at("load"), Some(FaultAction::Hang));
        b.card.memory().unwrap();
        assert_eq!(b.card.fault_at("decode"), Some(FaultAction::Lose));
        assert!(matches!(b.card.memory(), Err(GpuError::Lost(_))));
        assert!(matches!(b.load("a", Bytes(1)), Err(LoadError::Lost(_))));
    }
    let mut b = bench_of(settings, 3);
    for place in ["denoise", "denoise", "load", "decode"] {
        assert_eq!(b.card.fault_at(place), None);
    }
}

#[test]
fn real_tensors_live_on_a_simulated_card() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&1.5f32.to_le_bytes()).unwrap();
    let plan = LoadPlan::Files(vec![TensorSource::full(
        "w",
        &file.path().into(),
        [ByteRange { offset: 0, length: 4 }],
        Stored::F32,
        vec![1],
        DType::F32,
    )]);
    let mut b = bench("1GiB");
    let component = Component {
        id: id("a"),
        name: "vae".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 0.0,
        parts: residency::Parts::default(),
    };
    b.card
        .load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(b.card.memory().unwrap().components, Bytes(4));
    let tensor = b.card.tensors(&component.id).unwrap().shaped("w", &[1]).unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.5]);
    assert_eq!(b.card.unload(&component.id).unwrap().freed, Bytes(4));
}

fn profile() -> MemoryProfile {
    MemoryProfile::of(ProfileName::Balanced, Bytes::gib(1))
}

#[test]
fn invalid_settings_are_refused_with_the_allowed_values() {
    let cases = [
        ("sim:", "the capacity"),
        ("sim:many", "GiB"),
        ("sim:1GiB,speed=fast", "speed"),
        ("sim:1GiB,disk=slow", "disk"),
        ("sim:1GiB,compute=fast", "150TFLOP/s"),
        ("sim:1GiB,compute=99999999TFLOP/s", "150TFLOP/s"),
        ("sim:1GiB,capability=new", "8.9"),
        ("sim:1GiB,colour=red", "fail-load="),
        ("sim:1GiB,lag", "lag="),
        ("sim:1GiB,lag=9", "200ms"),
        ("sim:1GiB,fail-load=0", "3:oom"),
        ("sim:1GiB,die-at=:2", "denoise:2"),
        ("sim:1GiB,die-at=denoise:x", "denoise:2"),
        ("sim:1GiB,slack=no", "slack=keep"),
        ("sim:1GiB,remaps=yes", "remaps=no"),
        ("sim:1GiB,peers=all", "peers=no"),
        ("sim:1GiB,foreign=2GiB", "exceed"),
        ("sim:0", "too little"),
        ("cpu:24", "too little"),
        ("gpu", "sim:24GiB"),
        ("cpu:", "24GiB"),
        ("cuda:x", "cuda:1"),
    ];
    for (text, word) in cases {
        let error = text.parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn devices_open_by_name() {
    let names = [
        ("cpu:1GiB", "cpu"),
        ("sim:24GiB,index=1", "sim:1"),
        ("sim:2GiB", "sim:0"),
        ("sim:2GiB,capability=8.9", "sim:0"),
        ("cpu", "cpu"),
    ];
    for (text, expected) in names {
        let device: DeviceSpec = text.parse().unwrap();
        assert_eq!(device.to_string(), text);
        let json = serde_json::to_string(&device).unwrap();
        assert_eq!(json, format!("{text:?}"));
        assert_eq!(serde_json::from_str::<DeviceSpec>(&json).unwrap(), device);
        let mut card = open(&device, 1, &profile()).unwrap();
        assert_eq!(card.describe().id, expected);
        assert_eq!(card.describe(), &device.describe().unwrap());
        assert_eq!(card.describe().compute_dtype, "f32");
        assert_eq!(card.memory().unwrap().total, card.describe().total);
    }
    let slow: DeviceSpec = "sim:1.5GiB,lag=2s,speed=1GB/s,compute=2TFLOP/s".parse().unwrap();
    let written = "sim:1536MiB,speed=1000000000B/s,compute=2000000000000FLOP/s,lag=2000ms";
    assert_eq!(slow.to_string(), written);
    let cuda: DeviceSpec = "cuda".parse().unwrap();
    assert_eq!(cuda.to_string(), "cuda:0");
    if cfg!(not(feature = "cuda")) {
        let error = open(&cuda, 1, &profile()).unwrap_err();
        assert!(matches!(error, OpenError::NoCuda { .. }));
        assert!(error.to_string().contains("this build has no CUDA: cuda:0"));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Load(u8, u64),
    Cancel(u8, u64),
    Unload(u8),
    Scratch(u64),
    DropScratch(prop::sample::Index),
    Trim,
    Foreign(u8, u64),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u8..4, 0u64..700).prop_map(|(name, bytes)| Op::Load(name, bytes)),
        (0u8..4, 0u64..700).prop_map(|(name, bytes)| Op::Cancel(name, bytes)),
        (0u8..4).prop_map(Op::Unload),
        (0u64..400).prop_map(Op::Scratch),
        any::<prop::sample::Index>().prop_map(Op::DropScratch),
        Just(Op::Trim),
        (0u8..2, 0u64..900).prop_map(|(name, bytes)| Op::Foreign(name, bytes)),
        (0u64..120).prop_map(Op::Wait),
    ]
}

/// An independent model of the card's bytes, each in one account.
#[derive(Default)]
struct Shadow {
    components: HashMap<u8, u64>,
    slack: u64,
    lagging: Vec<(u64, u64)>,
    wanted: Vec<(u8, u64)>,
}

const CAPACITY: u64 = 1000;
const FIXED: u64 = 70;

impl Shadow {
    /// Components, scratch, slack, lagging, foreign, free.
    fn accounts(&mut self, scratch: &[ScratchGuard], now: u64) -> [u64; 6] {
        self.lagging.retain(|(due, _)| *due > now);
        let components: u64 = self.components.values().sum();
        let scratch: u64 = scratch.iter().map(|g| g.bytes().0).sum();
        let lagging: u64 = self.lagging.iter().map(|(_, b)| b).sum();
        let left = CAPACITY - FIXED - components - scratch - self.slack - lagging;
        let foreign = left.min(self.wanted.iter().map(|(_, b)| b).sum());
        [components, scratch, self.slack, lagging, foreign, left - foreign]
    }

    fn release(&mut self, bytes: u64, lag: u64, now: u64) {
        if lag > 0 {
            self.lagging.push((now + lag, bytes));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_in_one_account(
        ops in prop::collection::vec(op(), 1..60),
        lag in prop_oneof![Just(0u64), Just(50)],
        keeps in any::<bool>(),
        remaps in any::<bool>(),
    ) {
        let keep = if keeps { ",slack=keep" } else { "" };
        let how = if remaps { "" } else { ",remaps=no" };
        let mut b = bench(&format!("1000,context=50,workspaces=20,lag={lag}ms{keep}{how}"));
        let mut shadow = Shadow::default();
        let mut scratch: Vec<ScratchGuard> = Vec::new();
        for op in ops {
            let now = b.clock.now_ms();
            let free = shadow.accounts(&scratch, now)[5];
            let truth = b.card.memory().unwrap();
            // Where memory is not remapped, an allocation also needs a hole, or slack side by side.
            let hole = truth.layout.as_ref().map_or(free, |layout| layout.largest_hole().0);
            let slack = truth.layout.iter().flat_map(|layout| layout.used());
            let slack = slack.filter(|range| range.owner == Owner::Slack).map(|range| range.bytes.0);
            let slack = if remaps { free + shadow.slack } else { slack.max().unwrap_or(0).max(hole) };
            match op {
                Op::Load(name, bytes) => {
                    let fits = bytes <= hole && !shadow.components.contains_key(&name);
                    prop_assert_eq!(b.load(&name.to_string(), Bytes(bytes)).is_ok(), fits);
                    if fits {
                        shadow.components.insert(name, bytes);
                    }
                }
                Op::Cancel(name, bytes) => {
                    let component = Component {
                        id: id(&name.to_string()), name: String::new(), bytes: Bytes(bytes), reload_seconds: 0.0,
                        parts: residency::Parts::default(),
                    };
                    let plan = LoadPlan::synthetic(Bytes(bytes));
                    prop_assert!(b.card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Break(())).is_err());
                }
                Op::Unload(name) => {
                    let known = shadow.components.remove(&name);
                    let outcome = b.card.unload(&id(&name.to_string())).ok();
                    prop_assert_eq!(outcome.map(|u| u.booked.0), known);
                    if let Some(bytes) = known {
                        shadow.release(bytes, lag, now);
                    }
                }
                Op::Scratch(bytes) => {
                    let guard = b.card.use_scratch(Bytes(bytes)).ok();
                    prop_assert_eq!(guard.is_some(), bytes <= slack);
                    if guard.is_some() {
                        let left = shadow.slack.saturating_sub(bytes);
                        // In one piece, it is all of slack or all of free memory.
                        let is_kept = remaps || b.card.accounts().slack == Bytes(left);
                        shadow.slack = if is_kept { left } else { shadow.slack };
                    }
                    scratch.extend(guard);
                }
                Op::DropScratch(which) if !scratch.is_empty() => {
                    let guard = scratch.swap_remove(which.index(scratch.len()));
                    match keeps {
                        true => shadow.slack += guard.bytes().0,
                        false => shadow.release(guard.bytes().0, lag, now),
                    }
                }
                Op::DropScratch(_) => {}
                Op::Trim => {
                    let slack = std::mem::take(&mut shadow.slack);
                    prop_assert_eq!(b.card.trim().unwrap().0, slack);
                    shadow.release(slack, lag, now);
                }
                Op::Foreign(name, bytes) => {
                    b.world.hold(&name.to_string(), None, Bytes(bytes));
                    shadow.wanted.retain(|(n, _)| *n != name);
                    shadow.wanted.push((name, bytes));
                }
                Op::Wait(milliseconds) => b.clock.advance_ms(milliseconds),
            }
            let accounts = b.card.accounts();
            prop_assert_eq!(sum(&accounts), Bytes(CAPACITY));
            let foreign: Bytes = accounts.foreign.iter().map(|h| h.bytes).sum();
            let found = [
                accounts.components.0, accounts.scratch.0, accounts.slack.0, accounts.lagging.0, foreign.0,
                accounts.free.0,
            ];
            prop_assert_eq!(found, shadow.accounts(&scratch, b.clock.now_ms()));
            let truth = b.card.memory().unwrap();
            prop_assert_eq!(truth.free, accounts.free);
            prop_assert_eq!(truth.layout.is_none(), remaps);
            if let Some(layout) = truth.layout {
                prop_assert_eq!(layout.holes().map(|hole| hole.bytes).sum::<Bytes>(), accounts.free);
                let of = |owner: &dyn Fn(&Owner) -> bool| -> Bytes {
                    let used = layout.used().iter().filter(|range| owner(&range.owner));
                    used.map(|range| range.bytes).sum()
                };
                prop_assert_eq!(of(&|owner| owner.component().is_some()), accounts.components);
                prop_assert_eq!(of(&|owner| *owner == Owner::Scratch), accounts.scratch);
                prop_assert_eq!(of(&|owner| *owner == Owner::Slack), accounts.slack);
                prop_assert_eq!(of(&|owner| *owner == Owner::Late), accounts.lagging);
                prop_assert_eq!(of(&|owner| *owner == Owner::Foreign), foreign);
            }
        }
    }

    #[test]
    fn simulated_settings_round_trip(
        sizes in prop::collection::vec(any::<u64>(), 6),
        numbers in prop::collection::vec(0u64..5, 6),
        slack in any::<bool>(),
    ) {
        let mut settings = SimulatedSettings::new(Bytes(sizes[0]));
        settings.link = Bytes(sizes[1]);
        settings.disk = Bytes(sizes[2]);
        settings.flops = sizes[5];
        settings.context = Bytes(sizes[2] % (sizes[0] / 4 + 1));
        settings.workspaces = Bytes(sizes[3] % (sizes[0] / 4 + 1));
        settings.foreign = Bytes(sizes[4] % (sizes[0] / 4 + 1));
        settings.lag_ms = sizes[5];
        settings.release_ms = sizes[5] / 2;
        settings.largest = (sizes[5] % 2 == 0).then_some(Bytes(sizes[3]));
        settings.keeps_slack = slack;
        settings.remaps = sizes[5] % 3 != 0;
        settings.has_peers = sizes[4] % 3 != 0;
        settings.index = numbers[0] as u32;
        settings.die_generations = numbers[1];
        for (i, how) in [gpu::LoadFailure::OutOfMemory, gpu::LoadFailure::Io, gpu::LoadFailure::Damaged]
            .into_iter().enumerate().take(numbers[2] as usize)
        {
            settings.fail_loads.push(gpu::FailLoad { nth: i as u64 + 1, how });
        }
        for (i, action) in [FaultAction::Die, FaultAction::Hang, FaultAction::Lose]
            .into_iter().enumerate().take(numbers[3] as usize)
        {
            settings.faults.push(gpu::Fault { action, place: "encode_text".to_owned(), nth: i as u64 + 1 });
        }
        if numbers[4] > 2 {
            settings.world = Some("/tmp/world.txt".into());
        }
        let device = DeviceSpec::Simulated(settings);
        prop_assert_eq!(device.to_string().parse::<DeviceSpec>().unwrap(), device);
    }

    #[test]
    fn sizes_round_trip(bytes in any::<u64>(), shift in 0u32..50) {
        let bytes = Bytes((bytes >> shift) << (shift % 31));
        prop_assert_eq!(parse_bytes(&exact_bytes(bytes)).unwrap(), bytes);
    }

    #[test]
    fn no_text_makes_the_parsers_panic(text in "(sim:|cpu:|cuda:)?[0-9a-zA-Z.,=:/ -]{0,40}") {
        let _ = text.parse::<DeviceSpec>();
        let _ = parse_bytes(&text);
    }
}
