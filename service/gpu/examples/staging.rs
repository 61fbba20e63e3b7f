//! How fast a checkpoint reaches the card, by the size of the pinned ring and of its chunks: what the profiles' figures
//! were chosen by, and may be again on another machine.
//!
//! ```sh
//! cargo run --release -p gpu --features cuda --example staging -- [--as FORMAT] FILE.safetensors [FILE...]
//! ```
//!
//! With `--as nf4` (int8-convrot, int8, fp8, nf4-double) every matrix is quantized on its way. Rates are of what is read.

#![allow(clippy::print_stdout)] // it prints a table

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use gpu::{
    CheckpointFile, DeviceSpec, LoadPlan, MemoryProfile, ProfileName, SourcePiece, Target, TensorSource,
    WeightFormat,
};
use residency::{Bytes, Component, ComponentId, Part};

type Failure = Box<dyn std::error::Error>;

/// (chunk in KiB, ring in MiB)
const SETTINGS: [(u64, u64); 8] = [
    (1024, 32),
    (2048, 64),
    (3072, 96),
    (4096, 128),
    (4096, 192),
    (6144, 192),
    (8192, 256),
    (16384, 512),
];
const REPEATS: usize = 5;

fn main() -> Result<(), Failure> {
    let mut sources = Vec::new();
    let mut arguments = std::env::args().skip(1).peekable();
    let mut format = None;
    if arguments.next_if(|argument| argument == "--as").is_some() {
        format = Some(arguments.next().ok_or("--as: no format")?.parse()?);
    }
    for file in arguments {
        sources.extend(sources_of(Path::new(&file), format)?);
    }
    let pieces = sources.iter().flat_map(|source| &source.pieces);
    let read = Bytes(pieces.map(SourcePiece::length).sum());
    let plan = LoadPlan::Files(sources);
    let component = Component {
        id: ComponentId::new("swept"),
        name: "swept".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 0.0,
        parts: residency::Parts::default(),
    };
    println!(
        "{read} into {} in {} threads",
        plan.bytes(),
        std::thread::available_parallelism()?
    );
    println!("chunk KiB  ring MiB  best s  median s  median GB/s  unload ms");
    for (chunk_kib, ring_mib) in SETTINGS {
        let device: DeviceSpec = "cuda".parse()?;
        let profile = MemoryProfile {
            staging_bytes: Bytes::mib(ring_mib),
            staging_chunk: Bytes(chunk_kib << 10),
            ..MemoryProfile::of(ProfileName::Inference, Bytes::gib(80))
        };
        let mut card = gpu::open(&device, 1, &profile)?;
        let (mut seconds, mut unloads) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let began = Instant::now();
            card.load(&component, &plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))?;
            seconds.push(began.elapsed().as_secs_f64());
            let began = Instant::now();
            card.unload(&component.id)?;
            unloads.push(began.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        unloads.sort_by(f64::total_cmp);
        let (best, median) = (seconds[0], seconds[REPEATS / 2]);
        let rate = read.0 as f64 / median / 1e9;
        let unload = unloads[REPEATS / 2] * 1e3;
        println!("{chunk_kib:>9}  {ring_mib:>8}  {best:>6.3}  {median:>8.3}  {rate:>11.2}  {unload:>9.1}");
    }
    Ok(())
}

/// Every tensor of a file, in bf16, but for matrices where a format is given.
fn sources_of(path: &Path, format: Option<WeightFormat>) -> Result<Vec<TensorSource>, Failure> {
    let file = CheckpointFile::open(path)?;
    let names = file.tensors().map(|(name, _)| name);
    let target = candle_core::DType::BF16;
    let mut sources: Vec<TensorSource> = names.filter_map(|name| file.source(name, name, target)).collect();
    for source in &mut sources {
        if let (Some(format), true, 2) = (format, source.stored.is_float(), source.shape.len()) {
            source.target = Target::Quantized(format);
        }
    }
    Ok(sources)
}
