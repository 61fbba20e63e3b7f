//! How long planning takes over a full card: prints `{"p50_us": .., "p99_us": ..}` for 10,000 plans over 1,000 components.
//!
//! Each plan is made three times and the fastest counts, so that a busy machine's scheduler is not what is measured.
#![allow(clippy::print_stdout, reason = "printing figures is what it is for")]

use std::hint::black_box;
use std::time::Instant;

use residency::{
    Bytes, Component, ComponentId, DriverTruth, Ledger, LedgerError, Millis, Part, Parts, Policy, StageNeed,
    Verdict, plan,
};

const COMPONENTS: u64 = 1_000;
const PLANS: u64 = 10_000;
const TIMES: u32 = 3;

fn component(n: u64) -> Component {
    let bytes = Bytes::mib(20 + n * 7919 % 120);
    // As long as the real ones: a hash of 64 digits, quantization, dtype.
    let id = ComponentId::new(format!(
        "{:064x}:none:bf16",
        n.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    ));
    Component {
        id,
        name: "transformer".into(),
        bytes,
        reload_seconds: bytes.0 as f64 / 40e9,
        parts: Parts::default(),
    }
}

/// A card that its thousand components fill to the last byte but 1 GiB, some of them used more lately than others.
fn full_card() -> Result<Ledger, LedgerError> {
    let components: Vec<Component> = (0..COMPONENTS).map(component).collect();
    let sum: Bytes = components.iter().map(|c| c.bytes).sum();
    let total = sum + Bytes::gib(1);
    let mut ledger = Ledger::new(total, Bytes::mib(256));
    for c in &components {
        ledger.begin_load(c, Part::WHOLE, Millis(0))?;
        ledger.complete_load(&c.id, Millis(0))?;
    }
    for (n, c) in components.iter().enumerate() {
        let need = StageNeed {
            name: "denoise".into(),
            components: vec![c.clone()],
            scratch: Bytes::ZERO,
            headroom: Bytes::ZERO,
            later: Vec::new(),
            model: Vec::new(),
            passes: 2,
        };
        for _ in 0..n % 5 {
            let lease = ledger.lease(&need, Millis(n as u64 * 37 % 600_000))?;
            ledger.release(lease, Millis(600_000))?;
        }
    }
    ledger.reconcile(&DriverTruth {
        total,
        free: Bytes::gib(1),
        components: sum,
        ..DriverTruth::default()
    });
    Ok(ledger)
}

fn main() -> Result<(), LedgerError> {
    let ledger = full_card()?;
    let mut micros = Vec::with_capacity(PLANS as usize);
    let mut evictions = 0;
    for n in 0..PLANS {
        // Three residents, one newcomer, and scratch: between none and half of the residents have to leave.
        let components = vec![
            component(n % 1000),
            component(n * 3 % 1000),
            component(1000 + n),
            component(n * 7 % 1000),
        ];
        let need = StageNeed {
            name: "denoise".into(),
            components,
            scratch: Bytes::mib(n * 13 % 40_000),
            headroom: Bytes::ZERO,
            later: Vec::new(),
            model: Vec::new(),
            passes: 2,
        };
        let policy = if n % 2 == 0 {
            Policy::Shared
        } else {
            Policy::Exclusive
        };
        let mut fastest = f64::INFINITY;
        let mut moves_made = 0;
        for _ in 0..TIMES {
            let started = Instant::now();
            let verdict = black_box(plan(
                black_box(&ledger),
                black_box(&need),
                policy,
                Millis(700_000),
            ));
            fastest = fastest.min(started.elapsed().as_secs_f64() * 1e6);
            if let Verdict::Run { moves } = verdict {
                moves_made = moves.len() - 1;
            }
        }
        micros.push(fastest);
        evictions += moves_made;
    }
    micros.sort_by(f64::total_cmp);
    let at = |share: f64| micros[((micros.len() - 1) as f64 * share) as usize];
    let (p50, p99, worst) = (at(0.5), at(0.99), at(1.0));
    println!(
        r#"{{"components": {COMPONENTS}, "plans": {PLANS}, "p50_us": {p50:.1}, "p99_us": {p99:.1}, "max_us": {worst:.1}, "moves_beside_loads": {evictions}}}"#
    );
    Ok(())
}
