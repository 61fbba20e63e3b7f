//! How fast weights are quantized by the processor, in GB/s of brain floats: the arithmetic on one core, with all in
//! its cache, and a load from the page cache on all of them.
//!
//! ```sh
//! cargo run --release -p gpu --example quantize
//! ```

#![allow(clippy::print_stdout)] // it prints a table

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use gpu::{
    ByteRange, CpuCard, CpuSettings, Gpu, LoadPlan, SourcePiece, Stored, Target, TensorSource, WeightFormat,
    quantize,
};
use half::bf16;
use residency::{Component, ComponentId, Part};

type Failure = Box<dyn std::error::Error>;

/// One weight on one core, and the weights of the load.
const SMALL: [usize; 2] = [32, 3072];
const LARGE: [usize; 2] = [3072, 12288];
const WEIGHTS: usize = 6;
const REPEATS: usize = 5;

/// Bytes of brain floats.
fn giga_bytes(shape: [usize; 2]) -> f64 {
    (2 * shape[0] * shape[1]) as f64 / 1e9
}

/// The shortest time of several, in seconds.
fn best(mut once: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let begin = Instant::now();
        once()?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn numbers(shape: [usize; 2]) -> Vec<bf16> {
    let number = |i: usize| {
        let bits = (i as u32).wrapping_mul(2_654_435_761);
        bf16::from_f32((bits ^ bits >> 15) as i32 as f32 * 1e-11)
    };
    (0..shape[0] * shape[1]).map(number).collect()
}

/// Seconds of a load of weights that all come from one place in a file.
fn load_seconds(file: &Path, range: ByteRange, target: Target) -> Result<f64, Failure> {
    let file: Arc<Path> = file.into();
    let source = |i: usize| TensorSource {
        name: i.to_string(),
        pieces: vec![SourcePiece::File {
            file: Arc::clone(&file),
            range,
        }],
        stored: Stored::Bf16,
        shape: LARGE.to_vec(),
        target,
        block: None,
    };
    let plan = LoadPlan::Files((0..WEIGHTS).map(source).collect());
    let component = Component {
        id: ComponentId::new("weights"),
        name: "weights".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 1.0,
        parts: residency::Parts::default(),
    };
    let mut card = CpuCard::new(CpuSettings::default())?;
    best(|| {
        card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))?;
        card.unload(&component.id)?;
        Ok(())
    })
}

fn main() -> Result<(), Failure> {
    let small: Vec<f32> = numbers(SMALL).iter().map(|x| x.to_f32()).collect();
    let mut file = tempfile::NamedTempFile::new()?;
    let bytes: Vec<u8> = numbers(LARGE).iter().flat_map(|x| x.to_le_bytes()).collect();
    file.write_all(&bytes)?;
    let range = ByteRange {
        offset: 0,
        length: bytes.len() as u64,
    };
    drop(bytes);
    let cores = std::thread::available_parallelism()?;
    println!("{cores} cores");
    println!("{:12} {:>18} {:>18}", "format", "one core, GB/s", "load, GB/s");
    for format in WeightFormat::MADE_AT_LOAD {
        const TIMES: usize = 100;
        let seconds = best(|| {
            for _ in 0..TIMES {
                std::hint::black_box(quantize(
                    format,
                    std::hint::black_box(&small),
                    SMALL[0],
                    SMALL[1],
                )?);
            }
            Ok(())
        })?;
        let one = TIMES as f64 * giga_bytes(SMALL) / seconds;
        let load =
            WEIGHTS as f64 * giga_bytes(LARGE) / load_seconds(file.path(), range, Target::Quantized(format))?;
        println!("{:12} {one:18.2} {load:18.2}", format.to_string());
    }
    Ok(())
}
