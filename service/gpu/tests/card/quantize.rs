//! Quantization on the card during a load: the bytes equal those of the CPU, and temporary memory is freed whatever
//! the outcome of the load.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use gpu::{
    ByteRange, ComponentTensors, CpuCard, CpuSettings, Gpu, GpuError, LoadError, LoadPlan, SourcePiece,
    Stored, Target, TensorSource, Weight, WeightFormat, rows_and_columns,
};
use half::{bf16, f16};
use residency::{Bytes, Part};

use super::{NOISE, cancelled_leaves_nothing, card, component};

const STORED: [Stored; 4] = [Stored::F32, Stored::F16, Stored::Bf16, Stored::F64];

/// Vectors, single numbers, units that end early, odd counts of bytes, more dimensions than two, rows of many and of
/// single numbers, and weights of several chunks in each width.
const SHAPES: [&[usize]; 16] = [
    &[1],
    &[1, 65],
    &[3, 5],
    &[5, 1],
    &[1, 63],
    &[257, 1031],
    &[2, 64],
    &[33, 4096],
    &[1000, 1],
    &[64, 64, 3],
    &[100_003],
    &[7, 129],
    &[1, 1],
    &[9, 500_001],
    &[4096, 1024],
    &[2049, 3072],
];

/// Kinds of elements in every other weight, by [`number`]; the others have all kinds in turn.
const KINDS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 0];

/// The same numbers each time, without a pattern.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// A number of one of several kinds: as weights are; zeros of both signs; halves between codes of int8; halves between
/// floats of 8 bits, some of them below the smallest normal one; too small for a normal float; very large ones; and
/// halves between values of nf4. Where halves are meant every 64th number is the one that makes them so.
fn number(kind: usize, i: usize, stored: Stored, random: &mut Random) -> f32 {
    let any = random.next();
    let (smallest, largest) = match stored {
        Stored::F16 => (6e-8, 6e4),
        // A rotation adds up to 256 of them.
        _ => (2e-44, 1e36),
    };
    let is_largest = i.is_multiple_of(64);
    match kind % 7 {
        0 => any * 0.05,
        1 => 0.0f32.copysign(any),
        2 if is_largest => 127.0,
        2 => (any * 126.0).round() + 0.5,
        3 if is_largest => 448.0,
        3 => ((any * 16.0).round() * 2.0 + 1.0) / 16.0 * 2f32.powi(i as i32 % 12 - 6),
        4 => any * 30.0 * smallest,
        5 => any * largest,
        _ if is_largest => 1.0,
        _ => {
            let (lower, table) = ((any.abs() * 15.0) as usize, gpu::nf4_table());
            (table[lower.min(14)] + table[lower.min(14) + 1]) * 0.5
        }
    }
}

fn write_number(to: &mut Vec<u8>, x: f32, stored: Stored) {
    match stored {
        Stored::F32 => to.extend(x.to_le_bytes()),
        Stored::F64 => to.extend(f64::from(x).to_le_bytes()),
        Stored::F16 => to.extend(f16::from_f32(x).to_le_bytes()),
        Stored::Bf16 => to.extend(bf16::from_f32(x).to_le_bytes()),
        other => panic!("{other:?} is not quantized"),
    }
}

/// A file with the numbers of all shapes, the first after a byte that belongs to none.
fn file_of(shapes: &[&[usize]], stored: Stored) -> tempfile::NamedTempFile {
    let (mut bytes, mut random) = (vec![0], Random(0x9E37_79B9_7F4A_7C15));
    for (tensor, shape) in shapes.iter().enumerate() {
        for i in 0..shape.iter().product() {
            let kind = if tensor % 2 == 0 {
                i / 64
            } else {
                KINDS[tensor / 2]
            };
            write_number(&mut bytes, number(kind, i, stored, &mut random), stored);
        }
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    file
}

/// Each shape of such a file in this format, in two pieces that may meet within a unit; and the first once more as it is.
fn plan(file: &Path, shapes: &[&[usize]], stored: Stored, format: WeightFormat) -> LoadPlan {
    let width = stored.width() as u64;
    let mut offset = 1;
    let mut sources = Vec::new();
    for (number, shape) in shapes.iter().enumerate() {
        let length = shape.iter().product::<usize>() as u64 * width;
        let cut = length / width / 3 * width;
        let piece = |offset, length| SourcePiece::File {
            file: file.into(),
            range: ByteRange { offset, length },
        };
        sources.push(TensorSource {
            name: format!("tensor.{number}"),
            pieces: vec![piece(offset, cut), piece(offset + cut, length - cut)],
            stored,
            shape: shape.to_vec(),
            target: Target::Quantized(format.for_columns(rows_and_columns(shape).1)),
            block: None,
        });
        offset += length;
    }
    let mut full = sources[0].clone();
    full.name = "full".to_owned();
    full.target = Target::Full(DType::F32);
    sources.push(full);
    LoadPlan::Files(sources)
}

fn go_on(_: gpu::LoadProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn bytes_of(tensors: &ComponentTensors, name: &str) -> Vec<u8> {
    let tensor = match tensors.weight(name).unwrap() {
        Weight::Quantized(quantized) => quantized.bytes,
        Weight::Full(tensor) => {
            let numbers = tensor.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
            let numbers = numbers.to_vec1::<f32>().unwrap();
            return numbers.into_iter().flat_map(f32::to_le_bytes).collect();
        }
    };
    tensor.to_device(&Device::Cpu).unwrap().to_vec1().unwrap()
}

#[test]
fn the_card_and_the_cpu_quantize_to_the_same_bytes() {
    let Some(mut card) = card() else { return };
    for stored in STORED {
        let file = file_of(&SHAPES, stored);
        for format in WeightFormat::MADE_AT_LOAD {
            let plan = plan(file.path(), &SHAPES, stored, format);
            let component = component("c", &plan);
            card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
            assert_eq!(card.memory().unwrap().components, component.bytes);
            let mut system = CpuCard::new(CpuSettings::default()).unwrap();
            system.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
            let (here, right) = (
                card.tensors(&component.id).unwrap(),
                system.tensors(&component.id).unwrap(),
            );
            for name in right.names() {
                let (here, right) = (bytes_of(&here, name), bytes_of(&right, name));
                let differs = here.iter().zip(&right).position(|(a, b)| a != b);
                assert!(
                    here.len() == right.len() && differs.is_none(),
                    "{name} from {stored:?} in {format}: {} bytes of {}, other from byte {differs:?}",
                    here.len(),
                    right.len()
                );
            }
            drop(here);
            let unloaded = card.unload(&component.id).unwrap();
            assert_eq!(
                (unloaded.booked, unloaded.freed),
                (component.bytes, component.bytes)
            );
        }
    }
}

#[test]
fn a_tensor_that_is_not_finite_is_named_and_nothing_stays_allocated() {
    let Some(mut card) = card() else { return };
    let shapes: [&[usize]; 3] = [&[64, 64], &[300, 4099], &[5, 5]];
    let first = 64 * 64;
    let whole = first + 300 * 4099;
    for stored in STORED {
        for (wrong, at) in [
            (f32::NAN, first),
            (f32::INFINITY, first + 500_000),
            (f32::NEG_INFINITY, whole - 1),
        ] {
            let file = file_of(&shapes, stored);
            let mut bytes = std::fs::read(file.path()).unwrap();
            let mut number = Vec::new();
            write_number(&mut number, wrong, stored);
            let at = 1 + at * stored.width();
            let right: Vec<u8> = bytes
                .splice(at..at + number.len(), number.iter().copied())
                .collect();
            std::fs::write(file.path(), &bytes).unwrap();
            for format in WeightFormat::MADE_AT_LOAD {
                let plan = plan(file.path(), &shapes, stored, format);
                let component = component("c", &plan);
                let before = card.memory().unwrap().free;
                match card.load(&component, &plan, Part::WHOLE, &mut go_on) {
                    Err(LoadError::NotFinite { tensor }) => assert_eq!(tensor, "tensor.1"),
                    other => panic!("{wrong} from {stored:?} in {format}: {other:?}"),
                }
                assert!(matches!(card.tensors(&component.id), Err(GpuError::NotLoaded(_))));
                assert!(before - card.memory().unwrap().free <= NOISE);
            }
            // The reported tensor belongs to that load only.
            bytes.splice(at..at + right.len(), right);
            std::fs::write(file.path(), &bytes).unwrap();
            let plan = plan(file.path(), &shapes, stored, WeightFormat::Nf4);
            let component = component("c", &plan);
            card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
            card.unload(&component.id).unwrap();
        }
    }
}

#[test]
fn rows_longer_than_a_piece_are_refused_before_any_allocation() {
    let Some(mut card) = card() else { return };
    let shapes: [&[usize]; 1] = [&[2, 3 << 20]];
    let file = file_of(&shapes, Stored::F32);
    let before = card.memory().unwrap().free;
    for format in WeightFormat::MADE_AT_LOAD {
        let plan = plan(file.path(), &shapes, Stored::F32, format);
        let component = component("c", &plan);
        let outcome = card.load(&component, &plan, Part::WHOLE, &mut go_on);
        if matches!(format, WeightFormat::Nf4 | WeightFormat::Nf4Double) {
            outcome.unwrap();
            card.unload(&component.id).unwrap();
        } else {
            assert!(matches!(outcome, Err(LoadError::Unsupported(_))), "{outcome:?}");
        }
        assert!(before - card.memory().unwrap().free <= NOISE);
    }
}

#[test]
fn a_cancelled_load_that_quantizes_leaves_no_memory_allocated() {
    let Some(mut card) = card() else { return };
    let shapes: [&[usize]; 3] = [&[4096, 4096], &[4096, 4096], &[4096, 4096]];
    let file = file_of(&shapes, Stored::Bf16);
    for format in WeightFormat::MADE_AT_LOAD {
        let plan = plan(file.path(), &shapes, Stored::Bf16, format);
        // The last call is at the end, when all is there.
        cancelled_leaves_nothing(&mut *card, &plan, &[0, 1]);
    }
}

#[test]
fn a_load_quantizes_with_little_workspace() {
    let Some(mut card) = card() else { return };
    let shapes: [&[usize]; 3] = [&[4096, 4096], &[4096, 4096], &[2049, 3072]];
    let file = file_of(&shapes, Stored::Bf16);
    for format in WeightFormat::MADE_AT_LOAD {
        let plan = plan(file.path(), &shapes, Stored::Bf16, format);
        let component = component("c", &plan);
        let numbers = |card: &mut dyn Gpu| -> Vec<Vec<u8>> {
            card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
            let tensors = card.tensors(&component.id).unwrap();
            let numbers = ["tensor.0", "tensor.1", "tensor.2"].map(|name| bytes_of(&tensors, name));
            drop(tensors);
            card.unload(&component.id).unwrap();
            numbers.into()
        };
        let expected = numbers(&mut *card);
        // All other memory is allocated: what is left is less than the workspace of all lanes.
        let left = plan.bytes() + Bytes::mib(100);
        let mut others = Vec::new();
        loop {
            let most = (card.memory().unwrap().free - left).0.min(1 << 30) as usize;
            if most == 0 {
                break;
            }
            others.push(Tensor::zeros(most, DType::U8, card.device()).unwrap());
            card.device().synchronize().unwrap();
        }
        assert_eq!(numbers(&mut *card), expected, "{format}");
        drop(others);
        card.trim().unwrap();
    }
}

#[test]
fn two_hundred_loads_in_all_formats_leak_no_byte() {
    let Some(mut card) = card() else { return };
    let shapes: [&[usize]; 4] = [&[512, 512], &[77, 333], &[1, 65], &[2, 64]];
    let file = file_of(&shapes, Stored::Bf16);
    let mut cycle = |format: WeightFormat| {
        let plan = plan(file.path(), &shapes, Stored::Bf16, format);
        let component = component("c", &plan);
        card.load(&component, &plan, Part::WHOLE, &mut go_on).unwrap();
        card.unload(&component.id).unwrap();
        card.trim().unwrap();
        let memory = card.memory().unwrap();
        assert_eq!(memory.components, Bytes::ZERO);
        (memory.free, memory.workspaces)
    };
    // The first cycle includes the memory that the driver keeps for itself.
    let (free, workspaces) = WeightFormat::MADE_AT_LOAD.map(&mut cycle)[4];
    for number in 0..200 {
        let (free_now, workspaces_now) = cycle(WeightFormat::MADE_AT_LOAD[number % 5]);
        assert_eq!(workspaces_now, workspaces, "cycle {number}");
        assert!(
            free - free_now == Bytes::ZERO,
            "{} are gone after cycle {number}",
            free - free_now
        );
    }
}
