//! Tensors as bytes: what passes between the processes.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Dtype of a [`HostTensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
}

/// A tensor in host memory: little-endian, row-major, contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTensor {
    /// Dtype.
    pub dtype: HostType,
    /// Shape.
    pub shape: Vec<usize>,
    /// `shape` numbers of `dtype`.
    pub data: Bytes,
}
