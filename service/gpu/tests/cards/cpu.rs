//! System memory as a card: what is read, converted, refused, cancelled and returned.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Tensor};
use gpu::{
    ByteRange, CheckpointFile, CpuCard, CpuSettings, Gpu, GpuError, LoadError, LoadPlan, LoadProgress,
    SourcePiece, Stored, TensorSource,
};
use half::{bf16, f16};
use residency::{Bytes, Component, ComponentId, Part};

fn card() -> CpuCard {
    CpuCard::new(CpuSettings::default()).unwrap()
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

fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.flush().unwrap();
    file
}

fn source(file: &Path, name: &str, stored: Stored, shape: &[usize], target: DType) -> TensorSource {
    let length = (shape.iter().product::<usize>() * stored.width()) as u64;
    let range = ByteRange { offset: 0, length };
    TensorSource::full(name, &file.into(), [range], stored, shape.to_vec(), target)
}

fn pieces(file: &Path, ranges: &[ByteRange]) -> Vec<SourcePiece> {
    let piece = |range: &ByteRange| SourcePiece::File {
        file: file.into(),
        range: *range,
    };
    ranges.iter().map(piece).collect()
}

fn go_on(_: LoadProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn load_one(card: &mut CpuCard, source: TensorSource) -> Result<Tensor, LoadError> {
    let name = source.name.clone();
    let plan = LoadPlan::Files(vec![source]);
    let component = component("c", &plan);
    card.load(&component, &plan, Part::WHOLE, &mut go_on)?;
    let tensor = card.tensors(&component.id).unwrap().get(&name).unwrap();
    card.unload(&component.id).unwrap();
    Ok(tensor)
}

/// The value of each stored dtype as f32, computed independently.
fn samples(stored: Stored) -> (Vec<u8>, Vec<f32>) {
    let values = [
        0.0f32,
        -0.0,
        1.0,
        -2.5,
        65504.0,
        6e-8,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    match stored {
        Stored::F32 => (
            values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            values.to_vec(),
        ),
        Stored::F64 => (
            values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
            values.to_vec(),
        ),
        Stored::F16 => {
            let halves: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
            let means = halves.iter().map(|h| h.to_f32()).collect();
            (halves.iter().flat_map(|h| h.to_le_bytes()).collect(), means)
        }
        Stored::Bf16 => {
            let halves: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
            let means = halves.iter().map(|h| h.to_f32()).collect();
            (halves.iter().flat_map(|h| h.to_le_bytes()).collect(), means)
        }
        Stored::U8 => ((0..=255).collect(), (0..=255u8).map(f32::from).collect()),
        Stored::I32 => panic!("read as a single number only"),
        Stored::I64 => {
            let whole = [0i64, 1, -1, 1 << 20];
            (
                whole.iter().flat_map(|v| v.to_le_bytes()).collect(),
                whole.iter().map(|v| *v as f32).collect(),
            )
        }
        Stored::F8E4M3 => {
            let codes: Vec<u8> = (0..=255).collect();
            let value = |code: &u8| {
                let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
                let size = match (exponent, code & 7) {
                    (15, 7) => f32::NAN,
                    (0, _) => mantissa * 2f32.powi(-9),
                    _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
                };
                size.copysign(if *code < 128 { 1.0 } else { -1.0 })
            };
            let means = codes.iter().map(value).collect();
            (codes, means)
        }
        Stored::F8E5M2 => {
            let codes: Vec<u8> = (0..=255).collect();
            let value = |code: &u8| {
                let (exponent, mantissa) = (i32::from(code >> 2 & 31), f32::from(code & 3));
                let size = match (exponent, code & 3) {
                    (31, 0) => f32::INFINITY,
                    (31, _) => f32::NAN,
                    (0, _) => mantissa * 2f32.powi(-16),
                    _ => (4.0 + mantissa) * 2f32.powi(exponent - 17),
                };
                size.copysign(if *code < 128 { 1.0 } else { -1.0 })
            };
            let means = codes.iter().map(value).collect();
            (codes, means)
        }
        Stored::I8 | Stored::F8E8M0 | Stored::Gguf(_) => (Vec::new(), Vec::new()), // read as bytes only
    }
}

fn same(found: f32, expected: f32) -> bool {
    found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
}

#[test]
fn every_stored_dtype_becomes_f32_and_nan_stays_nan() {
    for stored in [
        Stored::F32,
        Stored::F64,
        Stored::F16,
        Stored::Bf16,
        Stored::U8,
        Stored::I64,
        Stored::F8E4M3,
        Stored::F8E5M2,
    ] {
        let (bytes, means) = samples(stored);
        let file = file_of(&bytes);
        for target in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let source = source(file.path(), "w", stored, &[means.len()], target);
            let tensor = load_one(&mut card(), source).unwrap();
            assert_eq!(tensor.dtype(), target);
            let found = tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            for (found, mean) in found.iter().zip(&means) {
                let expected = match target {
                    DType::BF16 => bf16::from_f32(*mean).to_f32(),
                    DType::F16 => f16::from_f32(*mean).to_f32(),
                    _ => *mean,
                };
                assert!(
                    same(*found, expected),
                    "{stored:?} as {target:?}: {found} for {expected}"
                );
            }
        }
    }
}

#[test]
fn integers_stay_integers_and_floats_never_become_integers() {
    let file = file_of(&7i64.to_le_bytes());
    let number = load_one(
        &mut card(),
        source(file.path(), "n", Stored::I64, &[], DType::I64),
    )
    .unwrap();
    assert_eq!(number.to_scalar::<i64>().unwrap(), 7);
    let refused = load_one(
        &mut card(),
        source(file.path(), "n", Stored::F32, &[2], DType::U8),
    );
    assert!(matches!(refused, Err(LoadError::Unsupported(problem)) if problem.contains("tensor n")));
}

#[test]
fn ranges_are_concatenated_in_order() {
    let numbers: Vec<u8> = (0..6u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let file = file_of(&numbers);
    let mut source = source(file.path(), "w", Stored::F32, &[4], DType::F32);
    let swapped = [16, 0].map(|offset| ByteRange { offset, length: 8 });
    source.pieces = pieces(file.path(), &swapped);
    let tensor = load_one(&mut card(), source).unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [4.0, 5.0, 0.0, 1.0]);
}

/// A tensor of several reads, in which every number encodes its place.
#[test]
fn tensors_of_several_reads_are_complete() {
    let count = 9_000_001;
    let numbers: Vec<u8> = (0..count)
        .flat_map(|i| bf16::from_f32((i % 251) as f32).to_le_bytes())
        .collect();
    let file = file_of(&numbers);
    let tensor = load_one(
        &mut card(),
        source(file.path(), "w", Stored::Bf16, &[count], DType::F32),
    )
    .unwrap();
    let found = tensor.to_vec1::<f32>().unwrap();
    assert!(found.iter().enumerate().all(|(i, v)| *v == (i % 251) as f32));
}

#[test]
fn progress_is_reported_at_least_every_64_mib_and_at_both_ends() {
    let count = 50_000_000;
    let file = file_of(&vec![0; count * 2]);
    let plan = LoadPlan::Files(vec![source(file.path(), "w", Stored::Bf16, &[count], DType::F32)]);
    let component = component("c", &plan);
    let mut reported = Vec::new();
    let mut card = card();
    card.load(&component, &plan, Part::WHOLE, &mut |p| {
        assert_eq!(p.total, plan.bytes());
        reported.push(p.done);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(
        (reported[0], *reported.last().unwrap()),
        (Bytes::ZERO, plan.bytes())
    );
    assert!(
        reported
            .windows(2)
            .all(|w| w[0] <= w[1] && w[1] - w[0] <= Bytes::mib(64)),
        "{reported:?}"
    );
}

#[test]
fn a_cancelled_load_leaves_nothing() {
    let count = 20_000_000;
    let file = file_of(&vec![0; count * 2]);
    let plan = LoadPlan::Files(vec![source(file.path(), "w", Stored::Bf16, &[count], DType::F32)]);
    let component = component("c", &plan);
    let mut card = card();
    for stop_at in [Bytes::ZERO, Bytes(1), plan.bytes()] {
        let outcome = card.load(&component, &plan, Part::WHOLE, &mut |p| match p.done >= stop_at {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        assert!(matches!(outcome, Err(LoadError::Cancelled)));
        assert!(matches!(card.tensors(&component.id), Err(GpuError::NotLoaded(_))));
        assert_eq!(card.memory().unwrap().components, Bytes::ZERO);
    }
    card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
}

#[test]
fn files_that_changed_are_reported_as_damaged() {
    let file = file_of(&[0; 64]);
    let long = source(file.path(), "w", Stored::F32, &[17], DType::F32);
    assert!(
        matches!(load_one(&mut card(), long), Err(LoadError::Damaged { problem, .. }) if problem.contains("w"))
    );

    // Cut short after the checks, while it is read.
    let whole = source(file.path(), "w", Stored::F32, &[16], DType::F32);
    let plan = LoadPlan::Files(vec![whole.clone()]);
    let outcome = card().load(&component("c", &plan), &plan, Part::WHOLE, &mut |_| {
        file.as_file().set_len(8).unwrap();
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(LoadError::Damaged { .. })), "{outcome:?}");

    // Written over with as many bytes.
    file.as_file().set_len(64).unwrap();
    let outcome = card().load(&component("c", &plan), &plan, Part::WHOLE, &mut |_| {
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).unwrap();
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(LoadError::Damaged { problem, .. }) if problem.contains("changed")));

    let mut lying = whole.clone();
    lying.shape = vec![15];
    assert!(matches!(
        load_one(&mut card(), lying),
        Err(LoadError::Unsupported(_))
    ));
    let mut huge = whole.clone();
    let beyond = ByteRange {
        offset: u64::MAX - 4,
        length: 64,
    };
    huge.pieces = pieces(file.path(), &[beyond]);
    assert!(matches!(
        load_one(&mut card(), huge),
        Err(LoadError::Unsupported(_))
    ));
    let mut gone = whole;
    let range = ByteRange {
        offset: 0,
        length: gone.pieces.iter().map(SourcePiece::length).sum(),
    };
    gone.pieces = pieces(Path::new("/nowhere/w.safetensors"), &[range]);
    assert!(matches!(load_one(&mut card(), gone), Err(LoadError::Io { .. })));
}

#[test]
fn a_component_in_use_is_not_unloaded_and_an_unknown_one_is_named() {
    let file = file_of(&[0; 64]);
    let plan = LoadPlan::Files(vec![source(file.path(), "w", Stored::F32, &[16], DType::F32)]);
    let component = component("c", &plan);
    let mut card = card();
    assert!(matches!(card.unload(&component.id), Err(GpuError::NotLoaded(_))));
    card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
    assert!(matches!(
        card.load(&component, &plan, Part::WHOLE, &mut go_on),
        Err(LoadError::Unsupported(_))
    ));
    let handles = [
        card.tensors(&component.id).unwrap(),
        card.tensors(&component.id).unwrap(),
    ];
    assert!(matches!(
        card.unload(&component.id),
        Err(GpuError::StillInUse(_, 2))
    ));
    assert_eq!(card.memory().unwrap().components, Bytes(64));
    drop(handles);
    assert_eq!(card.unload(&component.id).unwrap().booked, Bytes(64));
    assert_eq!(card.memory().unwrap().components, Bytes::ZERO);
}

#[test]
fn the_configured_capacity_limits_loads() {
    let mut card = CpuCard::new(CpuSettings {
        capacity: Some(Bytes::mib(1)),
    })
    .unwrap();
    assert_eq!(card.describe().total, Bytes::mib(1));
    assert_eq!(card.memory().unwrap().total, Bytes::mib(1));
    let file = file_of(&vec![0; 2 << 20]);
    let plan = LoadPlan::Files(vec![source(file.path(), "w", Stored::U8, &[2 << 20], DType::U8)]);
    let outcome = card.load(&component("c", &plan), &plan, Part::WHOLE, &mut go_on);
    assert!(matches!(outcome, Err(LoadError::OutOfMemory { needed, .. }) if needed == Bytes::mib(2)));
    let outcome = card.load(
        &component("c", &plan),
        &LoadPlan::synthetic(Bytes(1)),
        Part::WHOLE,
        &mut go_on,
    );
    assert!(matches!(outcome, Err(LoadError::Unsupported(_))));
}

#[test]
fn a_checkpoint_is_loaded_from_its_header_to_its_tensors() {
    let data: Vec<u8> = (0..24u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![6, 4], &data).unwrap();
    let file = file_of(&safetensors::serialize([("fused", view)], None).unwrap());
    let read = CheckpointFile::open(file.path()).unwrap();
    let mut source = read.source("fused", "second", DType::F32).unwrap();
    let rows = read.get("fused").unwrap().rows(2, 2).unwrap();
    (source.pieces, source.shape) = (pieces(file.path(), &[rows.range]), rows.shape);
    let tensor = load_one(&mut card(), source).unwrap();
    assert_eq!(
        tensor.to_vec2::<f32>().unwrap(),
        [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]
    );
}
