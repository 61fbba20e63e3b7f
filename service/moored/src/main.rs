//! SERVES. The program: it wires the service together, runs it and its workers, and has the command line.

mod credentials;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod examine;
mod examine_access;
mod locks;
mod memory;
mod preload;
mod process;
mod program;
mod serve;
mod service_unit;
mod shutdown;
mod telemetry;

use std::process::ExitCode;

/// Counts every allocation: on a CPU card this measures activation memory.
#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn main() -> ExitCode {
    media::panics::bound_reports(telemetry::report_panic);
    gpu::allocator::share_heaps(2);
    cli::run(&program::Moored)
}
