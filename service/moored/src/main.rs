//! SERVES. The binary: command line, configuration, supervisor and worker processes, telemetry.

mod cli;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod locks;
mod memory;
mod preload;
mod process;
mod serve;
mod telemetry;

use std::process::ExitCode;

/// Counts every allocation: on a CPU card this measures activation memory.
#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn main() -> ExitCode {
    media::panics::bound_reports();
    gpu::allocator::share_heaps(2);
    cli::run()
}
