//! Compiles the protocol files, without protoc; with the feature `cuda`, says where the program finds NVIDIA's libraries.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        for folder in cuda_libraries() {
            println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{folder}");
        }
    }
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
    Ok(())
}

/// Where the CUDA runtime is looked for after LD_LIBRARY_PATH: as NVIDIA's wheels install it beside a program that pip has
/// installed, whichever Python that was, and where the toolkit puts it.
fn cuda_libraries() -> impl Iterator<Item = String> {
    let pythons = (10..=14).flat_map(|minor| {
        // The second is Debian's, outside of virtual environments.
        ["site-packages", "dist-packages"]
            .into_iter()
            .flat_map(move |packages| {
                // CUDA's own, and both forms of cuDNN, which is loaded when it is there.
                ["cu13", "cudnn", "cudnn_jit"]
                    .map(|of| format!("$ORIGIN/../lib/python3.{minor}/{packages}/nvidia/{of}/lib"))
            })
    });
    pythons.chain(["/usr/local/cuda/lib64".to_owned()])
}

/// The descriptors as gRPC reflection serves them.
fn prost_types_bytes(descriptors: &prost_types::FileDescriptorSet) -> Vec<u8> {
    use prost::Message as _;
    descriptors.encode_to_vec()
}
