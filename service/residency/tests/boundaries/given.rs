//! Cards, components and stages to begin with.

use residency::{
    Bytes, Component, ComponentId, DriverTruth, Ledger, Millis, Part, PartSize, Parts, StageNeed,
};

/// A component of `gib` GiB that takes a second per GiB to reload.
pub(crate) fn component(name: &str, gib: u64) -> Component {
    let id = ComponentId::new(name);
    Component {
        id,
        name: name.into(),
        bytes: Bytes::gib(gib),
        reload_seconds: gib as f64,
        parts: Parts::default(),
    }
}

/// As [`component`], of ten blocks of a tenth each. A part has two slots of a block.
pub(crate) fn in_blocks(name: &str, gib: u64) -> Component {
    let whole = Bytes::gib(gib);
    let size = |streamed: u64| PartSize {
        bytes: Bytes(whole.0 / 10 * (10 - streamed + 2)),
        streamed: Bytes(whole.0 / 10 * streamed),
        streamed_once: Bytes::ZERO,
    };
    Component {
        parts: Parts::new(whole, (1..=10).map(size), |_| {}),
        ..component(name, gib)
    }
}

pub(crate) fn stage(components: &[&Component], scratch: Bytes) -> StageNeed {
    StageNeed {
        name: "denoise".into(),
        components: components.iter().map(|&c| c.clone()).collect(),
        scratch,
        headroom: Bytes::ZERO,
        later: Vec::new(),
        model: Vec::new(),
        passes: 2,
    }
}

/// A ledger over 24 GiB without headroom, with these components resident since 0.
pub(crate) fn card_with(components: &[&Component]) -> Ledger {
    let mut ledger = Ledger::new(Bytes::gib(24), Bytes::ZERO);
    for c in components {
        load(&mut ledger, c, Millis(0));
    }
    ledger.reconcile(&truth(&ledger));
    ledger
}

pub(crate) fn load(ledger: &mut Ledger, c: &Component, now: Millis) {
    ledger.begin_load(c, Part::WHOLE, now).unwrap();
    ledger.complete_load(&c.id, now).unwrap();
}

pub(crate) fn evict(ledger: &mut Ledger, c: &Component, now: Millis) {
    ledger.begin_evict(&c.id).unwrap();
    ledger.complete_evict(&c.id, now).unwrap();
}

/// Uses it `times` times, the last time at `now`.
pub(crate) fn use_at(ledger: &mut Ledger, c: &Component, times: u32, now: Millis) {
    for _ in 0..times {
        let lease = ledger.lease(&stage(&[c], Bytes::ZERO), now).unwrap();
        ledger.release(lease, now).unwrap();
    }
}

/// A driver that agrees with the books: booked bytes of components are allocated, all else is free.
pub(crate) fn truth(ledger: &Ledger) -> DriverTruth {
    let components: Bytes = ledger.residents().map(residency::Resident::bytes).sum();
    DriverTruth {
        total: ledger.total(),
        free: ledger.total() - components,
        components,
        ..DriverTruth::default()
    }
}
