//! Compiles the kernels of the feature `cuda` that quantize what is loaded.
#![allow(clippy::print_stdout)] // what cargo is told by

mod nvcc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    nvcc::compile("src/cuda/quantize.cu")
}
