//! Allocator profiles: named settings of a card's memory management.

use std::fmt;
use std::str::FromStr;

use residency::{Bytes, Policy};
use serde::{Deserialize, Serialize};

use crate::card::CardKind;

/// NVIDIA cards below this capacity default to `constrained`.
const SMALL_CARD: Bytes = Bytes::gib(12);
/// NVIDIA cards from this capacity on default to `inference`: they hold a whole pipeline and its activations.
const LARGE_CARD: Bytes = Bytes::gib(40);

/// Name of a profile. [`MemoryProfile::of`] defines the settings of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileName {
    /// Throughput on a large card: stages leave their memory reserved for the next, loads have a large staging
    /// buffer.
    Inference,
    /// The default for most cards.
    Balanced,
    /// A small card: little slack, and one large component at a time.
    Constrained,
    /// Components that are small in storage and expand in short bursts: little slack, small chunks.
    QuantizationHeavy,
}

/// Settings of a profile on one card. Sent to the worker in its first frame; system memory and simulated cards use
/// the slack limit only, which the planner applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryProfile {
    /// Bytes of memory that activations keep at the end of a stage. `None` keeps everything until a trim.
    pub release_threshold: Option<Bytes>,
    /// An idle card with more slack than this is trimmed.
    pub slack_limit: Bytes,
    /// Pinned staging memory in all.
    pub staging_bytes: Bytes,
    /// Bytes of one read and one copy. Divides `staging_bytes`.
    pub staging_chunk: Bytes,
}

/// An unknown profile name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no profile: write inference, balanced, constrained or quantization-heavy")]
pub struct ProfileError {
    pub given: String,
}

impl ProfileName {
    /// The four profiles.
    pub const ALL: [ProfileName; 4] = [
        ProfileName::Inference,
        ProfileName::Balanced,
        ProfileName::Constrained,
        ProfileName::QuantizationHeavy,
    ];

    /// Default profile of a card, by its capacity; `balanced` for system memory.
    pub fn suggested(kind: CardKind, total: Bytes) -> ProfileName {
        match kind {
            CardKind::Cpu => ProfileName::Balanced,
            _ if total < SMALL_CARD => ProfileName::Constrained,
            _ if total >= LARGE_CARD => ProfileName::Inference,
            _ => ProfileName::Balanced,
        }
    }

    /// Eviction policy of this profile.
    pub fn policy(self) -> Policy {
        match self {
            ProfileName::Constrained => Policy::Exclusive,
            ProfileName::Inference | ProfileName::Balanced | ProfileName::QuantizationHeavy => Policy::Shared,
        }
    }

    /// Name in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            ProfileName::Inference => "inference",
            ProfileName::Balanced => "balanced",
            ProfileName::Constrained => "constrained",
            ProfileName::QuantizationHeavy => "quantization-heavy",
        }
    }
}

impl MemoryProfile {
    /// Settings of a profile on a card of this capacity.
    pub fn of(name: ProfileName, total: Bytes) -> MemoryProfile {
        let (release_percent, slack_mib, staging_mib, chunk_mib) = match name {
            ProfileName::Inference => (90, 512, 128, 4),
            ProfileName::Balanced => (80, 512, 128, 4),
            ProfileName::QuantizationHeavy => (75, 128, 64, 2),
            ProfileName::Constrained => (70, 64, 32, 2),
        };
        MemoryProfile {
            release_threshold: Some(Bytes(total.0 / 100 * release_percent)),
            slack_limit: Bytes::mib(slack_mib),
            staging_bytes: Bytes::mib(staging_mib),
            staging_chunk: Bytes::mib(chunk_mib),
        }
    }
}

impl fmt::Display for ProfileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ProfileName {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<ProfileName, ProfileError> {
        ProfileName::ALL
            .into_iter()
            .find(|name| name.as_str() == text)
            .ok_or_else(|| ProfileError {
                given: text.to_owned(),
            })
    }
}

impl fmt::Display for MemoryProfile {
    /// For display: `releases above 72.0 GiB, trims above 512.0 MiB of slack, stages 128.0 MiB in chunks of 4.0 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.release_threshold {
            Some(bytes) => write!(f, "releases above {bytes}")?,
            None => f.write_str("releases nothing by itself")?,
        }
        write!(
            f,
            ", trims above {} of slack, stages {} in chunks of {}",
            self.slack_limit, self.staging_bytes, self.staging_chunk
        )
    }
}
