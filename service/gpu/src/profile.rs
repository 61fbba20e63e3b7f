//! Allocator profiles: how a card's memory is managed, under one name.

use std::fmt;
use std::str::FromStr;

use residency::{Bytes, Policy};
use serde::{Deserialize, Serialize};

use crate::card::CardKind;

/// An NVIDIA card below this is short of memory for what is run on it.
const SMALL_CARD: Bytes = Bytes::gib(12);
/// An NVIDIA card from this on holds a whole pipeline beside its activations.
const LARGE_CARD: Bytes = Bytes::gib(40);

/// The names that profiles go by. [`MemoryProfile::of`] says what each sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileName {
    /// Throughput on a large card: memory that a stage has used stays for the next, loads are staged widely.
    Inference,
    /// What suits most cards.
    Balanced,
    /// A small card: little stays behind, and one large component is kept at a time.
    Constrained,
    /// Components that are stored small and expand in short bursts: little slack, small chunks.
    QuantizationHeavy,
}

/// What a profile comes to on one card. The worker gets it with its first frame; system memory and simulated
/// cards have no use for all but the slack limit, which the planner applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryProfile {
    /// Release threshold of the activation pool: reserved bytes that a synchronisation leaves with it. `None`
    /// keeps everything until a trim.
    pub release_threshold: Option<Bytes>,
    /// Slack above which an idle card is trimmed.
    pub slack_limit: Bytes,
    /// Pinned memory that loads go through, in all.
    pub staging_bytes: Bytes,
    /// How much of it one read and one copy take. Divides `staging_bytes`.
    pub staging_chunk: Bytes,
}

/// No such profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no profile: write inference, balanced, constrained or quantization-heavy")]
pub struct ProfileError {
    /// What was written.
    pub given: String,
}

impl ProfileName {
    /// Every profile.
    pub const ALL: [ProfileName; 4] = [
        ProfileName::Inference,
        ProfileName::Balanced,
        ProfileName::Constrained,
        ProfileName::QuantizationHeavy,
    ];

    /// The profile of a card that is given none: by its size, but for system memory, where all is balanced.
    pub fn suggested(kind: CardKind, total: Bytes) -> ProfileName {
        match kind {
            CardKind::Cpu => ProfileName::Balanced,
            _ if total < SMALL_CARD => ProfileName::Constrained,
            _ if total >= LARGE_CARD => ProfileName::Inference,
            _ => ProfileName::Balanced,
        }
    }

    /// How room is made under this profile.
    pub fn policy(self) -> Policy {
        match self {
            ProfileName::Constrained => Policy::Exclusive,
            ProfileName::Inference | ProfileName::Balanced | ProfileName::QuantizationHeavy => Policy::Shared,
        }
    }

    /// As it is written in configuration.
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
    /// What a profile comes to on a card of this capacity.
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
    /// `releases above 72.0 GiB, trims above 512.0 MiB of slack, stages 128.0 MiB in chunks of 4.0 MiB`.
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
