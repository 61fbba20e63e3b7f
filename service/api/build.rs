//! Compiles the protocol files, without protoc.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

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
    let reflection = PathBuf::from(std::env::var("OUT_DIR")?).join("moored.v1.bin");
    std::fs::write(&reflection, descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
