//! SAYS. The public protocol as Rust types, generated from `proto/`.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::unwrap_used)]

mod enums;
mod json;

pub use enums::{Enums, UnknownNumber};

/// The public API, `proto/moored/v1`.
pub mod v1 {
    tonic::include_proto!("moored.v1");

    /// Descriptors, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/moored.v1.bin"));
}

/// The fields of sampling, moved out of a request, as the struct `$sampling`, which has them under the same names, all of them optional.
#[macro_export]
macro_rules! sampling_in {
    ($sampling:path, $request:ident) => {{
        let named = |number: u32| (number > 0).then_some(number);
        $sampling {
            steps: named($request.steps),
            guidance: $request.guidance,
            negative_prompt: $request.negative_prompt,
            true_guidance: $request.true_guidance,
            step_cache: $request.step_cache,
            seed: $request.seed,
            max_sequence_length: named($request.max_sequence_length),
            strength: $request.strength,
            ..Default::default()
        }
    }};
}

/// A request with these fields of sampling, and no others.
#[macro_export]
macro_rules! sampling_out {
    ($request:path, $sampling:expr) => {{
        let sampling = $sampling;
        $request {
            steps: sampling.steps.unwrap_or(0),
            guidance: sampling.guidance,
            negative_prompt: sampling.negative_prompt,
            true_guidance: sampling.true_guidance,
            step_cache: sampling.step_cache,
            seed: sampling.seed,
            max_sequence_length: sampling.max_sequence_length.unwrap_or(0),
            strength: sampling.strength,
            ..Default::default()
        }
    }};
}
