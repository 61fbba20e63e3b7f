//! SERVES. The binary: command line, configuration, gRPC, supervisor and worker processes, telemetry.

mod bounded;
mod cli;
mod config;
mod durations;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod grpc;
mod host;
mod locks;
mod memory;
mod models;
mod preload;
mod process;
mod pull_messages;
mod serve;
mod sessions;
mod telemetry;
mod threads;

use std::process::ExitCode;

/// Counts every allocation: on a CPU card this measures activation memory.
#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn main() -> ExitCode {
    media::panics::bound_reports(telemetry::report_panic);
    gpu::allocator::share_heaps(2);
    cli::run()
}
