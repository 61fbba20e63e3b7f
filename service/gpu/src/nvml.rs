//! NVIDIA cards as the driver's management library (NVML) shows them: nothing here makes a CUDA context, so the
//! supervisor may ask, and what it asks costs a card no byte.

use std::sync::OnceLock;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError as DriverError;
use nvml_wrapper::{Device, Nvml};
use residency::{Bytes, Holder};

use crate::card::{CardDescription, CardKind};
use crate::cuda_settings::{CudaSettings, CudaWhich};
use crate::holders::{CardProcess, foreign_holders, process_name};

/// A card, or a slice of one where MIG divides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlCard {
    /// Its number among the cards, in the order of the PCI bus, from 0.
    pub index: u32,
    /// `GPU-...`, or `MIG-...` for a slice.
    pub uuid: String,
    /// The product's name.
    pub name: String,
    /// What programs can have of its memory: the driver's own reserve is not in it.
    pub total: Bytes,
    /// CUDA compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// The link to the host; `None` where the driver does not say, as in some virtual machines.
    pub link: Option<PcieLink>,
    /// What MIG has to do with it.
    pub mig: Mig,
}

/// A PCI Express link. An idle card often runs its link below what it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// Generation and lanes as they are now.
    pub current: (u32, u32),
    /// The most that card and slot can.
    pub max: (u32, u32),
}

/// Whether a card is divided (Multi-Instance GPU).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mig {
    /// The card cannot be divided.
    Unsupported,
    /// It is not.
    Off,
    /// This is a slice of one.
    Slice,
}

/// Memory of a card as NVML counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlMemory {
    /// What programs can have.
    pub total: Bytes,
    /// What nobody has.
    pub free: Bytes,
    /// What programs have.
    pub used: Bytes,
    /// What the driver keeps for itself; it is in none of the others.
    pub reserved: Bytes,
}

/// What NVML cannot tell.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// No library, or no driver behind it.
    #[error(
        "the NVIDIA driver cannot be asked ({problem}): `nvidia-smi` must work where this runs; a container needs the \
         NVIDIA runtime (`--gpus all`) with the `utility` and `compute` capabilities"
    )]
    Unavailable {
        /// What it said.
        problem: String,
    },
    /// The driver works and shows no card.
    #[error("the NVIDIA driver shows no card here; a container is given cards with `--gpus all`")]
    NoCards,
    /// No card is called so.
    #[error("there is no card {which} among {there}")]
    NotFound {
        /// What was asked for.
        which: String,
        /// What there is.
        there: String,
    },
    /// The beginning of a UUID that several cards have.
    #[error("{which} may be any of {matching}: write more of the UUID")]
    Ambiguous {
        /// What was asked for.
        which: String,
        /// Which cards begin so.
        matching: String,
    },
    /// One question failed.
    #[error("the NVIDIA driver does not tell {what}: {problem}")]
    Question {
        /// What was asked.
        what: &'static str,
        /// What it said.
        problem: String,
    },
}

/// All cards that this process may see; slices in the place of a card that MIG divides.
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

/// A card as it is named to users, without a CUDA context.
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
    /// The one card that is meant.
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

    /// The card as it is named to users, computing in what is usual for it.
    pub fn describe(&self) -> CardDescription {
        let dtype = CudaSettings::new(CudaWhich::Ordinal(self.index)).compute_dtype(self.compute_capability);
        CardDescription {
            id: self.uuid.clone(),
            kind: CardKind::Cuda,
            name: self.name.clone(),
            total: self.total,
            compute_capability: Some(self.compute_capability),
            compute_dtype: dtype.as_str().to_owned(),
        }
    }

    /// Its memory now.
    ///
    /// # Errors
    /// [`NvmlError::NotFound`] if it is gone, [`NvmlError::Question`] if it does not answer.
    pub fn memory(&self) -> Result<NvmlMemory, NvmlError> {
        memory_of(&self.device()?)
    }

    /// Processes with a context on it. In containers these are the host's ids, or none; under MIG and WSL they come
    /// without bytes, or not at all: [`foreign_holders`] sorts that out.
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
                // A list that this card does not keep is empty.
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

    /// What the driver books to this process; `None` where it does not say, or lists the processes of another
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

    /// Who holds `foreign` bytes, asked from the process that has a context on this card.
    pub fn holders(&self, foreign: Bytes) -> Vec<Holder> {
        let processes = self.processes().unwrap_or_else(|problem| {
            tracing::debug!(%problem, card = self.uuid, "holders of memory stay unnamed");
            Vec::new()
        });
        foreign_holders(foreign, &processes, &[std::process::id()], process_name)
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

/// The driver's version: `580.65.06`.
///
/// # Errors
/// [`NvmlError::Unavailable`] or [`NvmlError::Question`].
pub fn driver_version() -> Result<String, NvmlError> {
    library()?.sys_driver_version().map_err(question("its version"))
}

/// The library, opened once: each start of it looks at every card.
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

fn listed() -> Result<Vec<NvmlCard>, NvmlError> {
    let library = library()?;
    let count = library
        .device_count()
        .map_err(question("how many cards there are"))?;
    let mut found = Vec::new();
    for index in 0..count {
        let device = match library.device_by_index(index) {
            Ok(device) => device,
            // A card of the machine that this container or user was not given, or that is broken: the others work.
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
                // Slots that are not in use answer that they are not found.
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

/// `whole` is the card that `device` is a slice of, or itself.
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
        .filter(|card| which.names(card.index, &card.uuid))
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
    fn a_card_is_found_by_number_or_by_as_much_of_its_uuid_as_tells_it_from_others() {
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
