//! SAYS. The public protocol as Rust types, generated from `proto/`.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::unwrap_used)]

/// The public API, `proto/moored/v1`.
pub mod v1 {
    tonic::include_proto!("moored.v1");

    /// Descriptors, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/moored.v1.bin"));
}
