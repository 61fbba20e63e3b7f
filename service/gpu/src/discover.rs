//! Device names: parsing, discovery and opening.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use residency::Bytes;
use serde::{Deserialize, Serialize};

use crate::card::{CardDescription, Gpu, GpuError};
use crate::cpu::{CpuCard, CpuSettings};
use crate::cuda_settings::{CudaSettings, CudaSettingsError, CudaWhich};
use crate::profile::MemoryProfile;
use crate::simulated::{RealClock, SettingsError, SimulatedCard, SimulatedSettings, SimulatedWorld};
use crate::size::{SizeError, exact_bytes, parse_bytes};

/// A card as named in the configuration: `cpu`, `cpu:16GiB`, `cuda`, `cuda:1`, `cuda:GPU-8f2c...` with
/// [`CudaSettings`], or `sim:` with [`SimulatedSettings`]. Display and parsing are inverse; it is serialized as this
/// text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceSpec {
    Cpu {
        /// Limit on the memory used; all system memory if `None`.
        capacity: Option<Bytes>,
    },
    Simulated(SimulatedSettings),
    Cuda(CudaSettings),
}

/// A named card, or automatic discovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// `auto`: all NVIDIA cards, or system memory if there are none or this build has no CUDA.
    Auto,
    Card(DeviceSpec),
}

/// The result of resolving device choices on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// Resolved cards; NVIDIA cards by their full UUIDs.
    pub devices: Vec<DeviceSpec>,
    /// Why `auto` fell back to system memory, for display; `None` if it did not.
    pub fallback: Option<String>,
}

/// A device name that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceSpecError {
    /// An unknown kind of card.
    #[error("{given:?} is no device: write auto, cpu, cpu:16GiB, cuda, cuda:0, or sim:24GiB")]
    Unknown { given: String },
    /// Less memory than any model needs: a number alone is bytes.
    #[error(
        "{given} has {capacity} of memory, too little for anything: write its size with a unit, as in sim:24GiB"
    )]
    Tiny { given: String, capacity: Bytes },
    /// An invalid capacity of `cpu`.
    #[error("the capacity of cpu: {0}")]
    Capacity(#[from] SizeError),
    /// Invalid settings of a simulated card.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Invalid settings of an NVIDIA card.
    #[error(transparent)]
    Cuda(#[from] CudaSettingsError),
}

/// A card that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This build has no CUDA.
    #[error(
        "this build has no CUDA: {device} needs one made with `cargo build --release --features cuda`; cpu and sim: \
         work here"
    )]
    NoCuda {
        /// The device as configured.
        device: String,
    },
    /// The driver does not list the card.
    #[error("cannot find {device}: {problem}")]
    NotFound {
        /// The device as configured.
        device: String,
        /// The driver's message and the remedy.
        problem: String,
    },
    /// The card does not respond.
    #[error("cannot open {device}: {source}")]
    Card {
        /// The device as configured.
        device: String,
        source: GpuError,
    },
}

impl DeviceSpec {
    /// Describes the card without opening it: allocates nothing and creates no CUDA context, so the supervisor may
    /// call it.
    ///
    /// # Errors
    /// [`OpenError`] as [`open`], and [`OpenError::NotFound`].
    pub fn describe(&self) -> Result<CardDescription, OpenError> {
        match self {
            DeviceSpec::Cpu { capacity } => CpuCard::describe_unopened(CpuSettings { capacity: *capacity })
                .map_err(|source| OpenError::Card {
                    device: self.to_string(),
                    source,
                }),
            DeviceSpec::Simulated(settings) => Ok(SimulatedCard::describe_unopened(settings)),
            DeviceSpec::Cuda(settings) => describe_cuda(settings),
        }
    }

    /// Whether the card drives a display: other programs of a desktop need its memory too.
    pub fn drives_display(&self) -> bool {
        match self {
            DeviceSpec::Cpu { .. } | DeviceSpec::Simulated(_) => false,
            DeviceSpec::Cuda(settings) => cuda_drives_display(settings),
        }
    }

    /// The same card under a stable name: NVIDIA cards by their full UUIDs.
    ///
    /// # Errors
    /// As [`DeviceSpec::describe`].
    pub fn resolved(&self) -> Result<DeviceSpec, OpenError> {
        let DeviceSpec::Cuda(settings) = self else {
            return Ok(self.clone());
        };
        let which = CudaWhich::Uuid(describe_cuda(settings)?.id);
        Ok(DeviceSpec::Cuda(CudaSettings {
            which,
            ..settings.clone()
        }))
    }
}

impl DeviceChoice {
    /// Resolves several choices, in their order.
    ///
    /// # Errors
    /// As [`DeviceSpec::describe`], for a named card; `auto` never fails.
    pub fn resolve(choices: &[DeviceChoice]) -> Result<Discovered, OpenError> {
        let mut discovered = Discovered {
            devices: Vec::new(),
            fallback: None,
        };
        for choice in choices {
            match choice {
                DeviceChoice::Card(device) => discovered.devices.push(device.resolved()?),
                DeviceChoice::Auto => match all_cuda() {
                    Ok(found) => discovered.devices.extend(found),
                    Err(why) => {
                        discovered.devices.push(DeviceSpec::Cpu { capacity: None });
                        discovered.fallback = Some(why);
                    }
                },
            }
        }
        Ok(discovered)
    }
}

#[cfg(feature = "cuda")]
fn describe_cuda(settings: &CudaSettings) -> Result<CardDescription, OpenError> {
    let mut description = crate::nvml::describe(settings).map_err(|problem| OpenError::NotFound {
        device: format!("cuda:{settings}"),
        problem: problem.to_string(),
    })?;
    if let Some(limit) = settings.limit {
        description.total = description.total.min(limit);
    }
    Ok(description)
}

#[cfg(not(feature = "cuda"))]
fn describe_cuda(settings: &CudaSettings) -> Result<CardDescription, OpenError> {
    Err(OpenError::NoCuda {
        device: format!("cuda:{settings}"),
    })
}

#[cfg(feature = "cuda")]
fn cuda_drives_display(settings: &CudaSettings) -> bool {
    crate::nvml::NvmlCard::open(&settings.which).is_ok_and(|card| card.drives_display())
}

#[cfg(not(feature = "cuda"))]
fn cuda_drives_display(_: &CudaSettings) -> bool {
    false
}

#[cfg(feature = "cuda")]
fn all_cuda() -> Result<Vec<DeviceSpec>, String> {
    let cards = crate::nvml::cards().map_err(|problem| problem.to_string())?;
    let named = |card: crate::nvml::NvmlCard| DeviceSpec::Cuda(CudaSettings::new(CudaWhich::Uuid(card.uuid)));
    Ok(cards.into_iter().map(named).collect())
}

#[cfg(not(feature = "cuda"))]
fn all_cuda() -> Result<Vec<DeviceSpec>, String> {
    Err("this build has no CUDA".to_owned())
}

/// Opens a card, on the thread that will own it. `generation` counts the worker processes of this card from 1 and
/// decides which faults are injected. The profile applies to NVIDIA cards only.
///
/// # Errors
/// [`OpenError::NoCuda`] if this build has no CUDA, [`OpenError::Card`] if the card does not respond.
pub fn open(
    device: &DeviceSpec,
    generation: u64,
    profile: &MemoryProfile,
) -> Result<Box<dyn Gpu>, OpenError> {
    let failed = |source| OpenError::Card {
        device: device.to_string(),
        source,
    };
    match device {
        DeviceSpec::Cpu { capacity } => {
            let card = CpuCard::new(CpuSettings { capacity: *capacity }).map_err(failed)?;
            Ok(Box::new(card))
        }
        DeviceSpec::Simulated(settings) => Ok(Box::new(SimulatedCard::new(
            settings.clone(),
            generation,
            SimulatedWorld::new(),
            Arc::new(RealClock::default()),
        ))),
        DeviceSpec::Cuda(settings) => open_cuda(settings, generation, profile),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(
    settings: &CudaSettings,
    generation: u64,
    profile: &MemoryProfile,
) -> Result<Box<dyn Gpu>, OpenError> {
    match crate::cuda::CudaCard::new(settings, profile, generation) {
        Ok(card) => Ok(Box::new(card)),
        Err(source) => Err(OpenError::Card {
            device: format!("cuda:{settings}"),
            source,
        }),
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(
    settings: &CudaSettings,
    _generation: u64,
    _profile: &MemoryProfile,
) -> Result<Box<dyn Gpu>, OpenError> {
    Err(OpenError::NoCuda {
        device: format!("cuda:{settings}"),
    })
}

impl FromStr for DeviceChoice {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<DeviceChoice, DeviceSpecError> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            card => Ok(DeviceChoice::Card(card.parse()?)),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Card(device) => device.fmt(f),
        }
    }
}

/// A card with less holds nothing.
const LEAST_CAPACITY: Bytes = Bytes(1 << 20);

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<DeviceSpec, DeviceSpecError> {
        if let Some(options) = text.strip_prefix("cuda,") {
            return Ok(DeviceSpec::Cuda(format!("0,{options}").parse()?));
        }
        let spec = DeviceSpec::parsed(text)?;
        match &spec {
            DeviceSpec::Cpu {
                capacity: Some(capacity),
            }
            | DeviceSpec::Simulated(SimulatedSettings { capacity, .. })
                if *capacity < LEAST_CAPACITY =>
            {
                Err(DeviceSpecError::Tiny {
                    given: text.to_owned(),
                    capacity: *capacity,
                })
            }
            _ => Ok(spec),
        }
    }
}

impl DeviceSpec {
    fn parsed(text: &str) -> Result<DeviceSpec, DeviceSpecError> {
        match text
            .split_once(':')
            .map_or((text, None), |(kind, rest)| (kind, Some(rest)))
        {
            ("cpu", None) => Ok(DeviceSpec::Cpu { capacity: None }),
            ("cpu", Some(capacity)) => Ok(DeviceSpec::Cpu {
                capacity: Some(parse_bytes(capacity)?),
            }),
            ("sim", Some(settings)) => Ok(DeviceSpec::Simulated(settings.parse()?)),
            ("cuda", None) => Ok(DeviceSpec::Cuda(CudaSettings::new(CudaWhich::Ordinal(0)))),
            ("cuda", Some(settings)) => Ok(DeviceSpec::Cuda(settings.parse()?)),
            _ => Err(DeviceSpecError::Unknown {
                given: text.to_owned(),
            }),
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
            DeviceSpec::Cuda(settings) => write!(f, "cuda:{settings}"),
        }
    }
}
