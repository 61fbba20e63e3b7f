//! Compiles kernels for all supported cards into one file that is embedded in the binary: machine code if this nvcc
//! supports the architecture, so that nothing is compiled on a user's machine, and PTX for future cards. Shared by
//! the build scripts of the crates with kernels.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compute capabilities with machine code.
const CARDS: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Compute capability of the PTX: the oldest that is supported.
const LEAST: u32 = 75;

/// With the feature `cuda`, compiles `source` to a `.fatbin` file with its name, in cargo's output folder. Rebuilt
/// when it or kernels beside it change.
pub(crate) fn compile(source: &str) -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../gpu/nvcc.rs");
    // Not the folder: a change of the Rust files beside the kernels must not recompile them.
    let folder = Path::new(source).parent().ok_or("a source without a folder")?;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let ending = path.extension().unwrap_or_default();
        if ending == "cu" || ending == "cuh" {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    println!("cargo:rerun-if-env-changed=NVCC");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    let nvcc = nvcc();
    let known = String::from_utf8(run(&nvcc, source, ["--list-gpu-arch".into()])?)?;
    let knows = |capability: u32| {
        known
            .split_whitespace()
            .any(|a| a == format!("compute_{capability}"))
    };
    let name = Path::new(source).with_extension("fatbin");
    let name = name.file_name().ok_or("a source without a name")?;
    let to = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?).join(name);
    // Arithmetic is rounded after each operation, as on the CPU: no fused multiply-add.
    let mut arguments: Vec<OsString> = ["-fatbin", "-O3", "-fmad=false", "-std=c++17", "--threads=0"]
        .map(OsString::from)
        .into();
    for capability in CARDS.into_iter().filter(|&c| knows(c)) {
        arguments.push(format!("-gencode=arch=compute_{capability},code=sm_{capability}").into());
    }
    arguments.push(format!("-gencode=arch=compute_{LEAST},code=compute_{LEAST}").into());
    arguments.extend(["-o".into(), to.into(), source.into()]);
    run(&nvcc, source, arguments)?;
    Ok(())
}

/// `$NVCC`, the nvcc of `$CUDA_HOME`, or the one in `$PATH`.
fn nvcc() -> OsString {
    let of_toolkit = || {
        let nvcc = PathBuf::from(std::env::var_os("CUDA_HOME")?).join("bin/nvcc");
        nvcc.is_file().then(|| nvcc.into_os_string())
    };
    std::env::var_os("NVCC")
        .or_else(of_toolkit)
        .unwrap_or_else(|| "nvcc".into())
}

/// Runs nvcc, and returns its standard output.
fn run(
    nvcc: &OsStr,
    source: &str,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let shown = nvcc.to_string_lossy();
    let output = Command::new(nvcc).args(arguments).output().map_err(|error| {
        format!("{shown} cannot be run ({error}): set NVCC, or eval \"$(scripts/cuda-environment)\"")
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{shown} failed on {source} ({}):\n{said}", output.status).into());
    }
    Ok(output.stdout)
}
