//! Compiles the protocol files, without protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let public = [
        "model",
        "events",
        "errors",
        "generation",
        "residency",
        "jobs",
        "server",
        "hub",
    ]
    .map(|name| format!("{root}/moored/v1/{name}.proto"));
    let descriptors = protox::compile(&public, [root])?;
    let reflection = std::path::PathBuf::from(std::env::var("OUT_DIR")?).join("moored.v1.bin");
    std::fs::write(&reflection, prost_types_bytes(&descriptors))?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;

    let private = protox::compile([format!("{root}/moored/worker/worker.proto")], [root])?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .bytes(".")
        .compile_fds(private)?;
    Ok(())
}

/// The descriptors as gRPC reflection serves them.
fn prost_types_bytes(descriptors: &prost_types::FileDescriptorSet) -> Vec<u8> {
    use prost::Message as _;
    descriptors.encode_to_vec()
}
