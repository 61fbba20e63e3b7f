//! SERVES. The binary: command line, configuration, gRPC, supervisor and worker processes, telemetry.

mod bounded;
mod catalogue;
mod cli;
mod config;
mod durations;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod encoded;
mod films;
mod grpc;
mod host;
mod hub;
mod locks;
mod memory;
mod models;
mod panics;
mod pictures;
mod preload;
mod process;
mod proto;
mod serve;
mod sessions;
mod shown;
mod telemetry;
mod threads;
mod tracks;

use std::process::ExitCode;

/// Counts every allocation: on a CPU card this measures activation memory.
#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn main() -> ExitCode {
    panics::bound_reports();
    gpu::allocator::share_heaps(2);
    cli::run()
}
