//! Memory of stages and encoders on the CPU, against the prediction. The counter is the process's, so that one test runs at a
//! time.
// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::expect_used, clippy::print_stdout)]

mod ace_step;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod flux;
mod flux2;
mod hunyuan;
#[path = "../open_model/mod.rs"]
mod open_model;
mod ovi;
#[path = "../processor_time/mod.rs"]
mod processor_time;
mod qwen_image;
mod qwen_vl;
mod sdxl;
mod wan;
mod z_image;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};
use gpu::{ComponentTensors, allocator};
use pipelines::noise::Generator;

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

/// Held by the test that measures.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Peak bytes that `work` allocates in addition to those allocated before it.
fn peak_of<R>(work: impl FnOnce() -> R) -> u64 {
    let before = allocator::mark();
    drop(work());
    allocator::peak_since_mark().0 - before.0
}

fn random(shape: &[usize], generator: &mut Generator) -> Tensor {
    let gain = (shape.last().copied().unwrap_or(1) as f32).powf(-0.5);
    let numbers = generator.normal(shape.iter().product()).into_iter();
    let numbers: Vec<f32> = numbers.map(|number| number * gain).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).expect("a tensor")
}

/// A component with random weights of these names and shapes.
fn made_up(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> ComponentTensors {
    let mut generator = Generator::new(1);
    let shapes = shapes.into_iter();
    let tensors = shapes.map(|(name, shape)| (name, random(&shape, &mut generator)));
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

/// Asserts that the prediction is sufficient and not much too large, apart from packing buffers of threads, which small
/// products do not use.
fn assert_close(what: &str, taken: u64, predicted: u64) {
    let threads = candle_core::utils::get_num_threads() as u64;
    let figures = format!("{what}: {taken} bytes taken, {predicted} predicted, {threads} threads");
    assert!(taken <= predicted, "{figures}");
    assert!(
        predicted <= taken * 2 + (8 << 20) + threads * (5 << 19),
        "{figures}"
    );
    println!("{figures}");
}
