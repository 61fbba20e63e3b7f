//! An NVIDIA card: what is loaded, converted, refused, cancelled, leaked and returned, by the driver's own figures.
//! These tests need a card, so they are run where one is: `tests/gpu/parity`, one at a time.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

#[path = "card/quantize.rs"]
mod quantize;

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Device};
use gpu::{
    BlockPlace, ByteRange, ComponentTensors, CpuCard, CpuSettings, DeviceSpec, Gpu, GpuError, LoadError,
    LoadPlan, MemoryProfile, ProfileName, Stored, TensorSource,
};
use residency::{Bytes, Component, ComponentId, Part};

/// Tolerance for another process, or a driver that maps in pieces, between two readings.
const NOISE: Bytes = Bytes::mib(4);

/// `None`, with a message, if the tests run without a card: they are part of every CUDA build.
fn card() -> Option<Box<dyn Gpu>> {
    if std::env::var_os("MOORED_TEST_DEVICE").is_none_or(|device| device != "cuda") {
        eprintln!("no card is meant to be here: MOORED_TEST_DEVICE is not cuda");
        return None;
    }
    let device: DeviceSpec = "cuda".parse().unwrap();
    let profile = MemoryProfile::of(ProfileName::Balanced, Bytes::gib(80));
    Some(gpu::open(&device, 1, &profile).unwrap())
}

fn component(name: &str, plan: &LoadPlan) -> Component {
    Component {
        id: ComponentId::new(name),
        name: name.to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 1.0,
        parts: residency::Parts::default(),
    }
}

/// A file of `count` f32 numbers, each different from its neighbours.
fn file_of_numbers(count: usize) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let numbers: Vec<u8> = (0..count)
        .flat_map(|i| ((i % 65_521) as f32 / 7.0 - 4000.0).to_le_bytes())
        .collect();
    file.write_all(&numbers).unwrap();
    file
}

fn source(file: &Path, name: &str, offset: u64, shape: &[usize], target: DType) -> TensorSource {
    let length = (shape.iter().product::<usize>() * 4) as u64;
    let range = ByteRange { offset, length };
    TensorSource::full(name, &file.into(), [range], Stored::F32, shape.to_vec(), target)
}

/// Tensors of many sizes: one number, odd ones, and several that fill more than a slot of the ring.
fn plan(file: &Path, target: DType) -> LoadPlan {
    let shapes: [&[usize]; 6] = [&[1], &[3], &[1021, 1031], &[7, 5, 3], &[9_000_001], &[4096, 4096]];
    let mut offset = 0;
    let mut sources = Vec::new();
    for (number, shape) in shapes.into_iter().enumerate() {
        sources.push(source(file, &format!("tensor.{number}"), offset, shape, target));
        offset += (shape.iter().product::<usize>() * 4) as u64;
    }
    LoadPlan::Files(sources)
}

const NUMBERS: usize = 40 << 20;

#[test]
fn a_load_copies_every_number_and_an_unload_frees_every_byte() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(NUMBERS);
    for target in [DType::F32, DType::BF16, DType::F16] {
        let plan = plan(file.path(), target);
        let component = component("c", &plan);
        let before = card.memory().unwrap();
        for _ in 0..3 {
            card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
                .unwrap();
            let there = card.memory().unwrap();
            assert_eq!(there.components, component.bytes);
            assert!(before.free - there.free >= component.bytes);

            assert_like_the_system(card.as_ref(), &component, &plan);
            let unloaded = card.unload(&component.id).unwrap();
            assert_eq!(
                (unloaded.booked, unloaded.freed),
                (component.bytes, component.bytes)
            );
        }
        card.trim().unwrap();
        let after = card.memory().unwrap();
        assert_eq!(after.components, Bytes::ZERO);
        assert!(
            before.free - after.free <= NOISE,
            "{} are gone",
            before.free - after.free
        );
    }
}

/// The numbers of a tensor, as f32, bit by bit.
fn bits(tensor: candle_core::Tensor) -> Vec<u32> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    let numbers = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let numbers = numbers.to_vec1::<f32>().unwrap();
    numbers.into_iter().map(f32::to_bits).collect()
}

/// Every number of a component on the card is the one that is loaded into system memory.
fn assert_like_the_system(card: &dyn Gpu, component: &Component, plan: &LoadPlan) {
    let mut system = CpuCard::new(CpuSettings::default()).unwrap();
    system
        .load(component, plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let here = card.tensors(&component.id).unwrap();
    let right = system.tensors(&component.id).unwrap();
    for name in right.names() {
        let (here, right) = (here.get(name).unwrap(), right.get(name).unwrap());
        let dtype = right.dtype();
        assert_eq!(here.dtype(), dtype, "{name}");
        assert!(bits(here) == bits(right), "{name} as {dtype:?}");
    }
}

#[test]
fn small_tensors_of_any_dtype_share_a_slot_of_the_ring() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(NUMBERS);
    let before = card.memory().unwrap();
    let targets = [DType::BF16, DType::F32, DType::F16];
    let mut offset = 0;
    // Odd sizes that begin anywhere in a slot, and now and then a large one that fills the rest of the slot.
    let sources = (0..1200_usize).map(|number| {
        let count = match number % 97 {
            0 => 3_000_017,
            other => 1 + other * 131 % 2003,
        };
        let name = format!("tensor.{number}");
        let source = source(file.path(), &name, offset, &[count], targets[number % 3]);
        offset = (offset + 4 * count as u64) % (4 * (NUMBERS as u64 - 4_000_000));
        source
    });
    let plan = LoadPlan::Files(sources.collect());
    let component = component("small", &plan);
    for _ in 0..2 {
        card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(card.memory().unwrap().components, component.bytes);
        assert_like_the_system(card.as_ref(), &component, &plan);
        assert_eq!(card.unload(&component.id).unwrap().freed, component.bytes);
    }
    card.trim().unwrap();
    let after = card.memory().unwrap();
    assert!(before.free - after.free <= NOISE);
}

#[test]
fn a_cancelled_load_leaves_nothing() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(NUMBERS);
    let plan = plan(file.path(), DType::F32);
    cancelled_leaves_nothing(&mut *card, &plan, &[0, 1, 2]);
}

/// Cancels a load at each of these calls of its progress.
fn cancelled_leaves_nothing(card: &mut dyn Gpu, plan: &LoadPlan, calls: &[i32]) {
    let component = component("c", plan);
    let before = card.memory().unwrap().free;
    for calls in calls {
        let mut left = *calls;
        let outcome = card.load(&component, plan, Part::WHOLE, &mut |_| {
            left -= 1;
            if left < 0 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        assert!(matches!(outcome, Err(LoadError::Cancelled)), "{outcome:?}");
        assert!(matches!(card.tensors(&component.id), Err(GpuError::NotLoaded(_))));
        assert!(before - card.memory().unwrap().free <= NOISE);
    }
}

#[test]
fn a_failed_load_leaves_no_memory_allocated() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(1 << 20);
    let before = card.memory().unwrap().free;
    let short = plan(file.path(), DType::F32);
    let outcome = card.load(&component("c", &short), &short, Part::WHOLE, &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(LoadError::Damaged { .. })), "{outcome:?}");

    let sparse = tempfile::NamedTempFile::new().unwrap();
    sparse.as_file().set_len(400 << 30).unwrap();
    let large = LoadPlan::Files(vec![source(sparse.path(), "large", 0, &[100 << 30], DType::F32)]);
    let outcome = card.load(&component("c", &large), &large, Part::WHOLE, &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(
        matches!(outcome, Err(LoadError::OutOfMemory { .. })),
        "{outcome:?}"
    );
    assert!(before - card.memory().unwrap().free <= NOISE);
}

#[test]
fn leaked_tensors_are_named() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(NUMBERS);
    let plan = plan(file.path(), DType::BF16);
    let component = component("c", &plan);
    card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let tensors = card.tensors(&component.id).unwrap();
    assert!(matches!(
        card.unload(&component.id),
        Err(GpuError::StillInUse(_, 1))
    ));
    let kept = tensors.get("tensor.4").unwrap();
    drop(tensors);
    match card.unload(&component.id) {
        Err(GpuError::Leaked { bytes, tensors, .. }) => {
            assert_eq!(tensors, ["tensor.4"]);
            assert!(bytes >= Bytes(2 * 9_000_001));
        }
        other => panic!("{other:?}"),
    }
    drop(kept);
}

#[test]
fn scratch_is_measured_and_slack_is_trimmed() {
    let Some(mut card) = card() else { return };
    card.trim().unwrap();
    card.begin_stage();
    let block = candle_core::Tensor::zeros(256 << 20, DType::U8, card.device()).unwrap();
    assert_eq!(card.memory().unwrap().scratch, Bytes::mib(256));
    drop(block);
    let peak = card.stage_peak();
    assert!(peak >= Bytes::mib(256) && peak <= Bytes::mib(264), "{peak}");
    let slack = card.memory().unwrap().slack;
    assert!(slack >= Bytes::mib(256), "the pool keeps what it has: {slack}");
    assert!(card.trim().unwrap() >= Bytes::mib(256));
    assert!(card.memory().unwrap().slack <= Bytes::mib(32));
    card.begin_stage();
    assert!(
        card.stage_peak() <= Bytes::mib(1),
        "a peak is forgotten with its stage"
    );
}

#[test]
fn no_memory_is_allocated_while_a_stream_captures() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};

    let Some(card) = card() else { return };
    let Device::Cuda(device) = card.device() else {
        panic!("a CUDA device")
    };
    let stream = device.cuda_stream();
    stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    let made = stream.alloc_zeros::<f32>(1000);
    let ended = stream.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    assert!(made.is_err() && ended.is_ok());
    stream.alloc_zeros::<f32>(1000).unwrap();
}

#[test]
fn the_largest_allocation_is_found_by_probing() {
    let Some(mut card) = card() else { return };
    let free = card.memory().unwrap().free;
    assert_eq!(
        card.largest_allocation(Bytes::gib(1)).unwrap(),
        Bytes::gib(1).min(free)
    );
    let largest = card.largest_allocation(Bytes(u64::MAX)).unwrap();
    assert!(
        largest <= free && largest >= Bytes(free.0 / 10 * 9),
        "{largest} of {free}"
    );
    assert!(
        free - card.memory().unwrap().free <= NOISE,
        "a probe keeps nothing"
    );
}

/// Twelve blocks of two weights and a bias, and an embedder that is in none.
fn plan_in_blocks(file: &Path, target: DType) -> LoadPlan {
    let (mut offset, mut sources) = (0, Vec::new());
    let mut add = |name: String, shape: &[usize], block: Option<BlockPlace>| {
        let made = source(file, &name, offset, shape, target);
        offset += (shape.iter().product::<usize>() * 4) as u64;
        sources.push(TensorSource { block, ..made });
    };
    add("embedder".to_owned(), &[100, 64], None);
    for number in 0..12 {
        let block = BlockPlace::each_pass(number);
        let rows = if number < 5 { 512 } else { 256 };
        add(format!("{number}.up"), &[rows, 1024], Some(block));
        add(format!("{number}.bias"), &[rows], Some(block));
        add(format!("{number}.down"), &[1024, rows], Some(block));
    }
    LoadPlan::Files(sources)
}

/// Goes over all blocks several times, and holds every number of each against the right one.
fn assert_streams(card: &dyn Gpu, component: &Component, right: &ComponentTensors) {
    let here = card.tensors(&component.id).unwrap();
    let stream = here.stream();
    let orders: [&[usize]; 3] = [
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        &[7, 2, 11, 0, 1], // another order than is expected
    ];
    for number in orders.into_iter().flatten() {
        stream.enter(BlockPlace::each_pass(*number)).unwrap();
        for name in ["up", "bias", "down"].map(|part| format!("{number}.{part}")) {
            let (here, right) = (here.get(&name).unwrap(), right.get(&name).unwrap());
            assert!(bits(here) == bits(right), "{name}");
        }
    }
    assert!(bits(here.get("embedder").unwrap()) == bits(right.get("embedder").unwrap()));
}

/// As it is stored, blocks are copied from the file; in another dtype, from a copy that is made.
#[test]
fn a_part_streams_every_number_grows_and_shrinks_and_leaves_no_byte() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(NUMBERS);
    for target in [DType::F32, DType::BF16] {
        let plan = plan_in_blocks(file.path(), target);
        let parts = plan.parts();
        let component = Component {
            parts: parts.clone(),
            ..component("c", &plan)
        };
        let mut system = CpuCard::new(CpuSettings::default()).unwrap();
        let mut go_on = |_| ControlFlow::Continue(());
        system.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
        let right = system.tensors(&component.id).unwrap();
        let before = card.memory().unwrap();
        let least = component.least();
        assert!(least.0 > 5);
        card.load(&component, &plan, Part(3), &mut go_on).unwrap();
        for part in [Part(3), least, Part(2), Part::WHOLE, Part(1), least] {
            card.resize(&component, part, &mut go_on).unwrap();
            assert_eq!(card.memory().unwrap().components, component.bytes_of(part));
            assert_streams(card.as_ref(), &component, &right);
        }
        let held = card.tensors(&component.id).unwrap();
        let refused = card.resize(&component, Part::WHOLE, &mut go_on);
        assert!(matches!(refused, Err(LoadError::StillInUse(1))), "{refused:?}");
        drop(held);
        assert_streams(card.as_ref(), &component, &right);
        let unloaded = card.unload(&component.id).unwrap();
        assert_eq!(unloaded.freed, component.bytes_of(least));
        card.trim().unwrap();
        let after = card.memory().unwrap();
        assert_eq!(after.components, Bytes::ZERO);
        assert!(before.free - after.free <= NOISE);
    }
}

const LARGE_BLOCKS: usize = 12;

/// Blocks of 40 MiB in f32: more than a load reads before it leaves the rest to the first pass.
fn plan_in_large_blocks(file: &Path, target: DType) -> LoadPlan {
    let shape = [5120, 1024];
    let bytes = (shape[0] * shape[1] * 4) as u64;
    let weight = |number: usize| {
        let name = format!(
            "{}.{}",
            number / 2,
            if number.is_multiple_of(2) { "up" } else { "down" }
        );
        let made = source(file, &name, number as u64 * bytes, &shape, target);
        let block = Some(BlockPlace::each_pass(number / 2));
        TensorSource { block, ..made }
    };
    LoadPlan::Files((0..2 * LARGE_BLOCKS).map(weight).collect())
}

/// Whether the weights of a block are those of the file, as `right` has them.
fn is_there(here: &ComponentTensors, right: &ComponentTensors, number: usize) -> bool {
    let is_equal = |name: String| bits(here.get(&name).unwrap()) == bits(right.get(&name).unwrap());
    ["up", "down"]
        .into_iter()
        .all(|part| is_equal(format!("{number}.{part}")))
}

#[test]
fn blocks_that_are_left_to_the_first_pass_arrive_in_any_order_and_leave_no_byte() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(2 * LARGE_BLOCKS * 5120 * 1024);
    let mut go_on = |_| ControlFlow::Continue(());
    for target in [DType::F32, DType::BF16] {
        let plan = plan_in_large_blocks(file.path(), target);
        let component = Component {
            parts: plan.parts().clone(),
            ..component("c", &plan)
        };
        let mut system = CpuCard::new(CpuSettings::default()).unwrap();
        system.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
        let right = system.tensors(&component.id).unwrap();
        let before = card.memory().unwrap();
        // In their order, in another, one alone, and none: the component leaves while they arrive.
        let orders: [&[usize]; 4] = [
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
            &[11, 3, 10, 0, 9, 8, 7, 1, 2, 4, 5, 6],
            &[8],
            &[],
        ];
        for order in orders {
            let left = card
                .load_for_a_stage(&component, &plan, Part::WHOLE, &mut go_on)
                .unwrap();
            assert_eq!(
                left > Bytes::ZERO,
                target == DType::F32,
                "{left} of {}",
                component.bytes
            );
            assert_eq!(card.memory().unwrap().components, component.bytes);
            let here = card.tensors(&component.id).unwrap(); // they begin to arrive
            for number in order {
                here.stream().enter(BlockPlace::each_pass(*number)).unwrap();
                assert!(is_there(&here, &right, *number), "{number} of {order:?}");
            }
            if order.len() == LARGE_BLOCKS {
                assert!(here.stream().is_whole() && !card.has_unread(&component.id));
            }
            drop(here);
            let slack = card.memory().unwrap().slack;
            let unloaded = card.unload(&component.id).unwrap();
            assert_eq!(unloaded.freed, component.bytes);
            assert_eq!(card.memory().unwrap().slack, slack, "an unload takes nothing");
        }
        card.trim().unwrap();
        let after = card.memory().unwrap();
        assert_eq!(after.components, Bytes::ZERO);
        assert!(before.free - after.free <= NOISE);
    }
}

#[test]
fn a_file_that_changes_while_its_blocks_arrive_is_told_to_whoever_waits_for_them() {
    let Some(mut card) = card() else { return };
    let file = file_of_numbers(2 * LARGE_BLOCKS * 5120 * 1024);
    let mut go_on = |_| ControlFlow::Continue(());
    let plan = plan_in_large_blocks(file.path(), DType::F32);
    let component = Component {
        parts: plan.parts().clone(),
        ..component("c", &plan)
    };
    let left = card
        .load_for_a_stage(&component, &plan, Part::WHOLE, &mut go_on)
        .unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    assert!(left > Bytes::ZERO);
    let here = card.tensors(&component.id).unwrap();
    let mut entered = (0..LARGE_BLOCKS).map(|number| here.stream().enter(BlockPlace::each_pass(number)));
    let refused = entered.find_map(Result::err);
    assert!(matches!(refused, Some(LoadError::Damaged { .. })), "{refused:?}");
    // It is read anew, and refused again.
    let last = here.stream().enter(BlockPlace::each_pass(LARGE_BLOCKS - 1));
    assert!(matches!(last, Err(LoadError::Damaged { .. })), "{last:?}");
    drop(here);
    assert_eq!(card.unload(&component.id).unwrap().freed, component.bytes);
    assert_eq!(card.memory().unwrap().components, Bytes::ZERO);
}
