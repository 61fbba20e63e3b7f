//! Tensors in host memory, serializable between processes.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Dtype of a [`HostTensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// A tensor in host memory: little-endian, row-major, contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTensor {
    pub dtype: HostType,
    pub shape: Vec<usize>,
    /// The elements of `shape`, in `dtype`.
    pub data: Bytes,
}
