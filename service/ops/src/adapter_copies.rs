//! Of which weights copies with low-rank terms are kept.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// Of which weights a stage keeps copies with the terms of adapters, in memory that is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterCopies {
    /// Of none: the terms are added in every step.
    Never,
    /// Of weights that are multiplied in full precision: results are the same to the bit.
    #[default]
    Exact,
    /// Also of weights that are multiplied in fp8 or in int8. In fp8 the copy is rounded with its terms, which are added in bf16 without
    /// one; a copy of a weight in int8 is in full precision, and so are the rows that it is multiplied by. The error is at most that of the
    /// format, but the result depends on whether memory was free.
    Always,
}

static COPIES: OnceLock<AdapterCopies> = OnceLock::new();

/// Sets [`AdapterCopies`] for the process, before anything is planned or computed. The first call counts; without one it is
/// [`AdapterCopies::Exact`].
pub fn set_adapter_copies(copies: AdapterCopies) {
    let _ = COPIES.set(copies);
}

/// [`AdapterCopies`] of the process.
#[must_use]
pub fn adapter_copies() -> AdapterCopies {
    COPIES.get().copied().unwrap_or_default()
}
