//! Compiles the kernels of the feature `cuda` that dequantize, and that fp8 is multiplied with.
#![allow(clippy::print_stdout)] // what cargo is told by

#[path = "../gpu/nvcc.rs"]
mod nvcc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    nvcc::compile("src/cuda/kernels.cu")
}
