//! Which card is meant, and opening it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use residency::Bytes;
use serde::{Deserialize, Serialize};

use crate::card::{CardDescription, Gpu, GpuError};
use crate::cpu::{CpuCard, CpuSettings};
use crate::simulated::{RealClock, SettingsError, SimulatedCard, SimulatedSettings, SimulatedWorld};
use crate::size::{SizeError, exact_bytes, parse_bytes};

/// A card as it is named in configuration: `cpu`, `cpu:16GiB`, `cuda`, `cuda:1`, or `sim:` with
/// [`SimulatedSettings`]. What is displayed parses to the same, and it is serialised as that text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceSpec {
    /// System memory.
    Cpu {
        /// The most that may be used; all there is where it is `None`.
        capacity: Option<Bytes>,
    },
    /// A simulated card.
    Simulated(SimulatedSettings),
    /// An NVIDIA card, by its number in the driver's order.
    Cuda {
        /// From 0.
        ordinal: u32,
    },
}

/// A name of a card that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceSpecError {
    /// No such sort of card.
    #[error("{given:?} is no device: write cpu, cpu:16GiB, cuda, cuda:0, or sim:24GiB")]
    Unknown {
        /// What was written.
        given: String,
    },
    /// The capacity is no size.
    #[error("the capacity of cpu: {0}")]
    Capacity(#[from] SizeError),
    /// The simulated card's settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

/// A card that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This build cannot drive such a card.
    #[error(
        "this build has no CUDA: {device} needs the build with the `cuda` feature; cpu and sim: work here"
    )]
    NoCuda {
        /// The device that was asked for, as it was written.
        device: String,
    },
    /// The card does not answer.
    #[error("cannot open {device}: {source}")]
    Card {
        /// The device that was asked for, as it was written.
        device: String,
        /// What it said.
        source: GpuError,
    },
}

impl DeviceSpec {
    /// What the card is called and how large it is, without opening it: nothing is allocated and no context
    /// is made, so that the supervisor may ask.
    ///
    /// # Errors
    /// [`OpenError`] as [`open`].
    pub fn describe(&self) -> Result<CardDescription, OpenError> {
        match self {
            DeviceSpec::Cpu { capacity } => CpuCard::describe_unopened(CpuSettings { capacity: *capacity })
                .map_err(|source| OpenError::Card {
                    device: self.to_string(),
                    source,
                }),
            DeviceSpec::Simulated(settings) => Ok(SimulatedCard::describe_unopened(settings)),
            DeviceSpec::Cuda { .. } => Err(OpenError::NoCuda {
                device: self.to_string(),
            }),
        }
    }
}

/// Opens a card, on the thread that will own it. `generation` is the how manieth worker process this is for
/// the card, from 1: faults of simulated cards depend on it.
///
/// # Errors
/// [`OpenError::NoCuda`] if this build cannot drive it, [`OpenError::Card`] if it does not answer.
pub fn open(device: &DeviceSpec, generation: u64) -> Result<Box<dyn Gpu>, OpenError> {
    match device {
        DeviceSpec::Cpu { capacity } => match CpuCard::new(CpuSettings { capacity: *capacity }) {
            Ok(card) => Ok(Box::new(card)),
            Err(source) => Err(OpenError::Card {
                device: device.to_string(),
                source,
            }),
        },
        DeviceSpec::Simulated(settings) => Ok(Box::new(SimulatedCard::new(
            settings.clone(),
            generation,
            SimulatedWorld::new(),
            Arc::new(RealClock::default()),
        ))),
        DeviceSpec::Cuda { .. } => Err(OpenError::NoCuda {
            device: device.to_string(),
        }),
    }
}

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<DeviceSpec, DeviceSpecError> {
        let unknown = || DeviceSpecError::Unknown {
            given: text.to_owned(),
        };
        match text
            .split_once(':')
            .map_or((text, None), |(kind, rest)| (kind, Some(rest)))
        {
            ("cpu", None) => Ok(DeviceSpec::Cpu { capacity: None }),
            ("cpu", Some(capacity)) => Ok(DeviceSpec::Cpu {
                capacity: Some(parse_bytes(capacity)?),
            }),
            ("sim", Some(settings)) => Ok(DeviceSpec::Simulated(settings.parse()?)),
            ("cuda", None) => Ok(DeviceSpec::Cuda { ordinal: 0 }),
            ("cuda", Some(ordinal)) => Ok(DeviceSpec::Cuda {
                ordinal: ordinal.parse().map_err(|_| unknown())?,
            }),
            _ => Err(unknown()),
        }
    }
}

impl TryFrom<String> for DeviceSpec {
    type Error = DeviceSpecError;

    fn try_from(text: String) -> Result<DeviceSpec, DeviceSpecError> {
        text.parse()
    }
}

impl From<DeviceSpec> for String {
    fn from(device: DeviceSpec) -> String {
        device.to_string()
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Cpu { capacity: None } => f.write_str("cpu"),
            DeviceSpec::Cpu {
                capacity: Some(bytes),
            } => write!(f, "cpu:{}", exact_bytes(*bytes)),
            DeviceSpec::Simulated(settings) => write!(f, "sim:{settings}"),
            DeviceSpec::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}
