//! NVIDIA cards as seen by the driver's management library (NVML). No CUDA context is created, so the supervisor may
//! call this, and it takes no memory of a card.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError as DriverError;
use nvml_wrapper::{Device, Nvml};
use residency::{Bytes, Holder};

use crate::card::{CardDescription, CardKind, Peers};
use crate::cuda_settings::{CudaSettings, CudaWhich};
use crate::holders::{CardProcess, foreign_holders, process_name};

/// A card, or a MIG slice of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlCard {
    /// Ordinal in PCI bus order, from 0.
    pub index: u32,
    /// `GPU-...`, or `MIG-...` for a slice.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Memory that programs can allocate, without the driver's own reserve.
    pub total: Bytes,
    /// CUDA compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// The link to the host; `None` if unknown, as in some virtual machines.
    pub link: Option<PcieLink>,
    pub mig: Mig,
}

/// A PCI Express link. An idle card often lowers its link's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// Current generation and lanes.
    pub current: (u32, u32),
    /// Maximum generation and lanes of card and slot.
    pub max: (u32, u32),
}

/// Multi-Instance GPU (MIG) mode of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mig {
    /// The card does not support MIG.
    Unsupported,
    /// MIG is off.
    Off,
    /// This is a MIG slice.
    Slice,
}

/// Memory of a card, by NVML's accounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlMemory {
    /// Memory that programs can allocate.
    pub total: Bytes,
    pub free: Bytes,
    /// Allocated by programs.
    pub used: Bytes,
    /// The driver's own reserve; not included in the other figures.
    pub reserved: Bytes,
}

/// A failed NVML query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// The library or the driver is missing.
    #[error(
        "the NVIDIA driver cannot be asked ({problem}): `nvidia-smi` must work where this runs; a container needs the \
         NVIDIA runtime (`--gpus all`) with the `utility` and `compute` capabilities"
    )]
    Unavailable { problem: String },
    /// The driver works and lists no card.
    #[error("the NVIDIA driver shows no card here; a container is given cards with `--gpus all`")]
    NoCards,
    /// No card has this name.
    #[error("there is no card {which} among {there}")]
    NotFound {
        which: String,
        /// Names of the existing cards.
        there: String,
    },
    /// A UUID prefix that several cards share.
    #[error("{which} may be any of {matching}: write more of the UUID")]
    Ambiguous {
        which: String,
        /// Names of the matching cards.
        matching: String,
    },
    /// A query failed.
    #[error("the NVIDIA driver does not report {what}: {problem}")]
    Question { what: &'static str, problem: String },
}

/// All visible cards; a card in MIG mode is represented by its slices.
///
/// # Errors
/// [`NvmlError::Unavailable`], [`NvmlError::NoCards`], or [`NvmlError::Question`].
pub fn cards() -> Result<Vec<NvmlCard>, NvmlError> {
    let listed = listed()?;
    if listed.is_empty() {
        return Err(NvmlError::NoCards);
    }
    Ok(listed)
}

/// Describes a card without creating a CUDA context.
///
/// # Errors
/// As [`NvmlCard::open`].
pub fn describe(settings: &CudaSettings) -> Result<CardDescription, NvmlError> {
    let card = NvmlCard::open(&settings.which)?;
    let dtype = settings.compute_dtype(card.compute_capability);
    Ok(CardDescription {
        compute_dtype: dtype.as_str().to_owned(),
        ..card.describe()
    })
}

impl NvmlCard {
    /// Finds a card by ordinal or UUID prefix.
    ///
    /// # Errors
    /// As [`cards`], and [`NvmlError::NotFound`] or [`NvmlError::Ambiguous`].
    pub fn open(which: &CudaWhich) -> Result<NvmlCard, NvmlError> {
        pick(which, cards()?)
    }

    /// `GPU-...`, or `MIG-...` for a slice.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Description of the card, with its default computation dtype.
    pub fn describe(&self) -> CardDescription {
        let dtype = CudaSettings::new(CudaWhich::Ordinal(self.index)).compute_dtype(self.compute_capability);
        CardDescription {
            id: self.uuid.clone(),
            kind: CardKind::Cuda,
            name: self.name.clone(),
            total: self.total,
            compute_capability: Some(self.compute_capability),
            compute_dtype: dtype.as_str().to_owned(),
            peers: Peers::Only(self.peers().unwrap_or_else(|problem| {
                tracing::debug!(%problem, card = self.uuid, "cards that reach each other are unknown");
                BTreeSet::new()
            })),
        }
    }

    /// UUIDs of the other cards to whose memory this one can write by itself. The driver names none for slices, nor under WSL.
    fn peers(&self) -> Result<BTreeSet<String>, NvmlError> {
        let (library, own) = (library()?, self.device()?);
        let is_peer = |other: &Device<'_>| {
            let status = own.p2p_status(other, P2pCapabilitiesIndex::Write);
            matches!(status, Ok(P2pStatus::Ok))
        };
        // A card that this process may not use is no peer.
        let cards = (0..count_of(library)?).filter_map(|index| library.device_by_index(index).ok());
        let peers = cards.filter(is_peer).filter_map(|peer| peer.uuid().ok());
        Ok(peers.filter(|uuid| *uuid != self.uuid).collect())
    }

    /// Current memory figures.
    ///
    /// # Errors
    /// [`NvmlError::NotFound`] if the card is gone, [`NvmlError::Question`] if it does not respond.
    pub fn memory(&self) -> Result<NvmlMemory, NvmlError> {
        memory_of(&self.device()?)
    }

    /// Processes with a context on the card. In containers the ids are the host's, or the list is empty; under MIG
    /// and WSL bytes are unknown, or the list is empty: [`foreign_holders`] handles that.
    ///
    /// # Errors
    /// As [`NvmlCard::memory`].
    pub fn processes(&self) -> Result<Vec<CardProcess>, NvmlError> {
        let device = self.device()?;
        let mut found = Vec::new();
        for listed in [
            device.running_compute_processes(),
            device.running_graphics_processes(),
        ] {
            match listed {
                Ok(processes) => found.extend(processes),
                // A list that this card does not support is empty.
                Err(DriverError::NotSupported | DriverError::FailedToLoadSymbol(_)) => {}
                Err(problem) => return Err(question("its processes")(problem)),
            }
        }
        let processes = found.into_iter().map(|process| CardProcess {
            pid: process.pid,
            bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
                UsedGpuMemory::Unavailable => None,
            },
        });
        Ok(processes.collect())
    }

    /// Bytes that the driver attributes to this process; `None` if unknown, or if the list is of another PID
    /// namespace.
    pub fn own_bytes(&self) -> Option<Bytes> {
        let own = std::process::id();
        self.processes()
            .ok()?
            .into_iter()
            .filter(|process| process.pid == own)
            .filter_map(|process| process.bytes)
            .max()
    }

    /// Holders of `foreign` bytes, from the point of view of a process with a context on this card.
    pub fn holders(&self, foreign: Bytes) -> Vec<Holder> {
        let processes = self.processes().unwrap_or_else(|problem| {
            tracing::debug!(%problem, card = self.uuid, "holders of memory stay unnamed");
            Vec::new()
        });
        foreign_holders(foreign, &processes, &[std::process::id()], process_name)
    }

    /// Whether a display is driven by it, as on a desktop; false if the driver does not say.
    pub fn drives_display(&self) -> bool {
        let active = self.device().map(|device| device.is_display_active());
        matches!(active, Ok(Ok(true)))
    }

    fn device(&self) -> Result<Device<'static>, NvmlError> {
        match library()?.device_by_uuid(self.uuid.as_str()) {
            Ok(device) => Ok(device),
            Err(DriverError::NotFound) => Err(NvmlError::NotFound {
                which: self.uuid.clone(),
                there: names(&cards()?),
            }),
            Err(problem) => Err(question("about a card")(problem)),
        }
    }
}

/// Version of the driver, such as `580.65.06`.
///
/// # Errors
/// [`NvmlError::Unavailable`] or [`NvmlError::Question`].
pub fn driver_version() -> Result<String, NvmlError> {
    library()?.sys_driver_version().map_err(question("its version"))
}

/// The library, opened once: opening it queries every card.
fn library() -> Result<&'static Nvml, NvmlError> {
    static LIBRARY: OnceLock<Nvml> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let opened = Nvml::init().map_err(|problem| NvmlError::Unavailable {
        problem: problem.to_string(),
    })?;
    Ok(LIBRARY.get_or_init(|| opened))
}

fn count_of(library: &Nvml) -> Result<u32, NvmlError> {
    library
        .device_count()
        .map_err(question("how many cards there are"))
}

fn listed() -> Result<Vec<NvmlCard>, NvmlError> {
    let library = library()?;
    let mut found = Vec::new();
    for index in 0..count_of(library)? {
        let device = match library.device_by_index(index) {
            Ok(device) => device,
            // A card that this container or user has no access to, or that is broken: the others work.
            Err(
                problem @ (DriverError::NoPermission | DriverError::GpuLost | DriverError::InsufficientPower),
            ) => {
                tracing::warn!(index, %problem, "the driver lists a card and does not let it be used");
                continue;
            }
            Err(problem) => return Err(question("about a card")(problem)),
        };
        let divided = device.mig_mode().map(|mode| mode.current == 1);
        match divided {
            Ok(true) => {
                let slots = device.mig_device_count().unwrap_or(0);
                // Unused slots return not found.
                for slice in (0..slots).filter_map(|slot| device.mig_device_by_index(slot).ok()) {
                    found.push(card_of(found.len(), &slice, &device, Mig::Slice)?);
                }
            }
            Ok(false) => found.push(card_of(found.len(), &device, &device, Mig::Off)?),
            Err(_) => found.push(card_of(found.len(), &device, &device, Mig::Unsupported)?),
        }
    }
    Ok(found)
}

/// `whole` is the card that `device` is a slice of, or `device` itself.
fn card_of(index: usize, device: &Device<'_>, whole: &Device<'_>, mig: Mig) -> Result<NvmlCard, NvmlError> {
    let capability = whole
        .cuda_compute_capability()
        .map_err(question("the compute capability of a card"))?;
    let positive = |number: i32| u32::try_from(number).unwrap_or(0);
    Ok(NvmlCard {
        index: u32::try_from(index).unwrap_or(u32::MAX),
        uuid: device.uuid().map_err(question("the UUID of a card"))?,
        name: device.name().map_err(question("the name of a card"))?,
        total: memory_of(device)?.total,
        compute_capability: (positive(capability.major), positive(capability.minor)),
        link: link_of(whole),
        mig,
    })
}

fn link_of(device: &Device<'_>) -> Option<PcieLink> {
    Some(PcieLink {
        current: (
            device.current_pcie_link_gen().ok()?,
            device.current_pcie_link_width().ok()?,
        ),
        max: (
            device.max_pcie_link_gen().ok()?,
            device.max_pcie_link_width().ok()?,
        ),
    })
}

fn memory_of(device: &Device<'_>) -> Result<NvmlMemory, NvmlError> {
    let memory = device.memory_info().map_err(question("the memory of a card"))?;
    Ok(NvmlMemory {
        total: Bytes(memory.total) - Bytes(memory.reserved),
        free: Bytes(memory.free),
        used: Bytes(memory.used),
        reserved: Bytes(memory.reserved),
    })
}

fn pick(which: &CudaWhich, cards: Vec<NvmlCard>) -> Result<NvmlCard, NvmlError> {
    let there = names(&cards);
    let mut matching: Vec<NvmlCard> = cards
        .into_iter()
        .filter(|card| which.matches(card.index, &card.uuid))
        .collect();
    match (matching.len(), matching.pop()) {
        (1, Some(card)) => Ok(card),
        (_, None) => Err(NvmlError::NotFound {
            which: which.to_string(),
            there,
        }),
        (_, Some(last)) => {
            matching.push(last);
            Err(NvmlError::Ambiguous {
                which: which.to_string(),
                matching: names(&matching),
            })
        }
    }
}

fn names(cards: &[NvmlCard]) -> String {
    let names: Vec<String> = cards
        .iter()
        .map(|card| format!("{} {} ({})", card.index, card.uuid, card.name))
        .collect();
    names.join(", ")
}

fn question(what: &'static str) -> impl Fn(DriverError) -> NvmlError {
    move |problem| NvmlError::Question {
        what,
        problem: problem.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(index: u32, uuid: &str) -> NvmlCard {
        NvmlCard {
            index,
            uuid: uuid.to_owned(),
            name: "NVIDIA X".to_owned(),
            total: Bytes::gib(24),
            compute_capability: (8, 9),
            link: None,
            mig: Mig::Off,
        }
    }

    #[test]
    fn a_card_is_found_by_ordinal_or_by_a_unique_prefix_of_its_uuid() {
        let cards = || vec![card(0, "GPU-1a2b"), card(1, "GPU-1acc")];
        let found = |which: &str| pick(&which.parse().unwrap(), cards()).map(|card| card.index);
        assert_eq!(found("1"), Ok(1));
        assert_eq!(found("gpu-1A2"), Ok(0));
        assert!(
            matches!(found("GPU-1a"), Err(NvmlError::Ambiguous { matching, .. }) if matching.contains("GPU-1acc"))
        );
        assert!(matches!(found("2"), Err(NvmlError::NotFound { there, .. }) if there.contains("GPU-1a2b")));
        assert!(matches!(found("GPU-1a2bc"), Err(NvmlError::NotFound { .. })));
    }
}
