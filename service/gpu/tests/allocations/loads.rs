//! With the counting allocator installed: bytes by our own counters.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use candle_core::DType;
use gpu::{CheckpointFile, CpuCard, CpuSettings, Gpu, LoadPlan, allocator};
use residency::{Bytes, Component, ComponentId, Part};

/// Bookkeeping of the test harness and of the card, in addition to the measured bytes.
const NOISE: Bytes = Bytes::mib(1);

fn near(found: Bytes, expected: Bytes) -> bool {
    found - expected <= NOISE && expected - found <= NOISE
}

/// A checkpoint of brain floats, `count` in each of 50 tensors.
fn checkpoint(count: usize) -> tempfile::NamedTempFile {
    let bytes = count * 2;
    let entries: Vec<String> = (0..50)
        .map(|i| {
            let (begin, end) = (i * bytes, (i + 1) * bytes);
            format!(r#""t{i}":{{"dtype":"BF16","shape":[{count}],"data_offsets":[{begin},{end}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    for _ in 0..50 {
        file.write_all(&vec![0x3f; bytes]).unwrap();
    }
    file.flush().unwrap();
    file
}

#[test]
fn allocated_bytes_are_counted_through_load_stage_and_unload() {
    let _alone = crate::alone();
    assert!(allocator::installed());
    let file = checkpoint(2 << 20);
    let mut card = CpuCard::new(CpuSettings::default()).unwrap();
    let before = card.memory().unwrap();
    assert_eq!(before.scratch, Bytes::ZERO, "{before:?}");

    let read = CheckpointFile::open(file.path()).unwrap();
    let sources = read
        .tensors()
        .map(|(name, _)| read.source(name, name, DType::F32).unwrap())
        .collect();
    let plan = LoadPlan::Files(sources);
    let id = ComponentId::new("c");
    let component = Component {
        id: id.clone(),
        name: "c".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 0.0,
        parts: residency::Parts::default(),
    };
    let mut times = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
            .unwrap();
        let loaded = began.elapsed();
        let truth = card.memory().unwrap();
        assert_eq!(truth.components, plan.bytes());
        assert_eq!(truth.scratch, Bytes::ZERO, "{truth:?}");
        assert!(near(truth.context, before.context), "{truth:?}");

        let began = Instant::now();
        let unloaded = card.unload(&id).unwrap();
        times.push((loaded, began.elapsed()));
        assert_eq!(unloaded.freed, unloaded.booked);
        assert_eq!(card.memory().unwrap().components, Bytes::ZERO);
    }
    let speed = read.size().0 as f64 / times.iter().map(|t| t.0.as_secs_f64()).fold(f64::MAX, f64::min) / 1e9;
    println!(
        "load and unload of {} in a file: {times:?}, {speed:.2} GB/s of the file",
        read.size()
    );

    // A tensor that is still referenced is not freed, and the unload reports it.
    card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let kept = card.tensors(&id).unwrap().get("t7").unwrap();
    let unloaded = card.unload(&id).unwrap();
    let one = Bytes(8 << 20);
    assert!(near(unloaded.booked - unloaded.freed, one), "{unloaded:?}");
    let truth = card.memory().unwrap();
    assert!(near(truth.context - before.context, one), "{truth:?}");
    drop(kept);

    // Memory that the process keeps between stages, such as opened models, is not scratch.
    let earlier = vec![1u8; 3 << 20];
    let truth = card.memory().unwrap();
    assert_eq!(truth.scratch, Bytes::ZERO, "{truth:?}");
    assert!(near(truth.context - before.context, Bytes::mib(3)), "{truth:?}");

    // A stage's scratch and peak are its own, whatever lived before, and its scratch ends with it.
    card.begin_stage();
    let first = vec![1u8; 40 << 20];
    drop(std::hint::black_box(first));
    let second = vec![1u8; 10 << 20];
    let truth = card.memory().unwrap();
    assert!(near(truth.scratch, Bytes::mib(10)), "{truth:?}");
    assert!(near(truth.context - before.context, Bytes::mib(3)), "{truth:?}");
    let peak = card.stage_peak();
    assert!(near(peak, Bytes::mib(40)), "{peak}");
    let truth = card.memory().unwrap();
    assert_eq!(truth.scratch, Bytes::ZERO, "{truth:?}");
    assert!(near(truth.context - before.context, Bytes::mib(13)), "{truth:?}");
    drop(std::hint::black_box((earlier, second)));
    card.begin_stage();
    let peak = card.stage_peak();
    assert!(near(peak, Bytes::ZERO), "{peak}");

    // Never more than there is, and cheap enough for the hot path.
    let began = Instant::now();
    for _ in 0..1000 {
        let truth = card.memory().unwrap();
        let others: Bytes = truth.holders.iter().map(|h| h.bytes).sum();
        let sum = truth.components + truth.scratch + truth.context + truth.free + others;
        assert_eq!(sum, truth.total, "{truth:?}");
    }
    println!("a remembered reading: {:?}", began.elapsed() / 1000);
    let mut fresh: Vec<_> = (0..9)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(55));
            let began = Instant::now();
            card.memory().unwrap();
            began.elapsed()
        })
        .collect();
    fresh.sort();
    println!(
        "a fresh reading: {:?} typically, {:?} at worst",
        fresh[4], fresh[8]
    );
    println!("a trim gave back {}", card.trim().unwrap());
}
