//! Which NVIDIA card is meant, and what is set about it, in one line of text. In every build, so that a name
//! can be read without CUDA.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;

use crate::faults::{Fault, FaultAction};

/// An NVIDIA card. As text: `0`, `1` or `GPU-8f2c...`, then options behind commas:
/// `0,dtype=f16,poison-at=denoise:2,die-at=load:1,hang-at=decode,die-generations=2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSettings {
    /// The card.
    pub which: CudaWhich,
    /// `dtype`: what pipelines compute in; see [`CudaSettings::compute_dtype`].
    pub dtype: Option<CudaDtype>,
    /// `poison-at`, `leak-at`, `die-at`, `hang-at`: what goes wrong where, for tests. May be given several times.
    pub faults: Vec<Fault>,
    /// `die-generations`: faults happen in this many first processes of the card only. 1 unless told; 0 is never.
    pub die_generations: u64,
}

/// How a card is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaWhich {
    /// By its number in the driver's order (that of the PCI bus), from 0.
    Ordinal(u32),
    /// By its UUID, `GPU-` or `MIG-` and hexadecimal digits, or the beginning of it that no other card has.
    Uuid(String),
}

/// What pipelines compute in on an NVIDIA card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaDtype {
    /// `bf16`.
    Bf16,
    /// `f16`.
    F16,
    /// `f32`.
    F32,
}

/// An NVIDIA card that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaSettingsError {
    /// Neither number nor UUID.
    #[error(
        "{given:?} names no NVIDIA card: write cuda, cuda:1, or cuda:GPU- with its UUID (`nvidia-smi -L` lists them)"
    )]
    Which {
        /// What was written.
        given: String,
    },
    /// There is no such option.
    #[error(
        "an NVIDIA card has no option {given:?}; there are dtype=, poison-at=, leak-at=, die-at=, hang-at=, die-generations="
    )]
    UnknownOption {
        /// What was written.
        given: String,
    },
    /// The option is there, its value is not one.
    #[error("{option}={given} of an NVIDIA card is not understood: write {expected}")]
    Value {
        /// The option.
        option: String,
        /// What was written.
        given: String,
        /// What is allowed.
        expected: &'static str,
    },
}

impl CudaSettings {
    /// A card with nothing set.
    pub fn new(which: CudaWhich) -> CudaSettings {
        CudaSettings {
            which,
            dtype: None,
            faults: Vec::new(),
            die_generations: 1,
        }
    }

    /// What pipelines compute in: what is set, else `bf16`, and `f16` on cards before compute capability 8.0, which
    /// have no bf16 arithmetic.
    pub fn compute_dtype(&self, compute_capability: (u32, u32)) -> DType {
        match self.dtype {
            Some(CudaDtype::Bf16) => DType::BF16,
            Some(CudaDtype::F16) => DType::F16,
            Some(CudaDtype::F32) => DType::F32,
            None if compute_capability < (8, 0) => DType::F16,
            None => DType::BF16,
        }
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), CudaSettingsError> {
        let wrong = |expected| CudaSettingsError::Value {
            option: option.to_owned(),
            given: value.to_owned(),
            expected,
        };
        match option {
            "dtype" => {
                let dtype = CudaDtype::ALL.into_iter().find(|dtype| dtype.as_str() == value);
                self.dtype = Some(dtype.ok_or_else(|| wrong("bf16, f16 or f32"))?);
            }
            "die-generations" => {
                self.die_generations = value.parse().map_err(|_| wrong("a number of processes"))?;
            }
            _ => {
                // A real card is not lost by saying so.
                let action = FaultAction::of_option(option)
                    .filter(|action| *action != FaultAction::Lose)
                    .ok_or_else(|| CudaSettingsError::UnknownOption {
                        given: option.to_owned(),
                    })?;
                self.faults
                    .push(Fault::at(action, value).ok_or_else(|| wrong(Fault::EXPECTED))?);
            }
        }
        Ok(())
    }
}

impl CudaWhich {
    /// Whether this UUID is meant. A prefix that is shorter than a whole UUID may match several cards.
    pub fn names(&self, ordinal: u32, uuid: &str) -> bool {
        match self {
            CudaWhich::Ordinal(number) => *number == ordinal,
            CudaWhich::Uuid(prefix) => uuid
                .get(..prefix.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(prefix)),
        }
    }
}

impl CudaDtype {
    const ALL: [CudaDtype; 3] = [CudaDtype::Bf16, CudaDtype::F16, CudaDtype::F32];

    fn as_str(self) -> &'static str {
        match self {
            CudaDtype::Bf16 => "bf16",
            CudaDtype::F16 => "f16",
            CudaDtype::F32 => "f32",
        }
    }
}

impl FromStr for CudaWhich {
    type Err = CudaSettingsError;

    fn from_str(text: &str) -> Result<CudaWhich, CudaSettingsError> {
        if let Ok(ordinal) = text.parse() {
            return Ok(CudaWhich::Ordinal(ordinal));
        }
        let digits = text.get(4..).unwrap_or_default();
        let is_uuid = text
            .get(..4)
            .is_some_and(|kind| kind.eq_ignore_ascii_case("GPU-") || kind.eq_ignore_ascii_case("MIG-"))
            && !digits.is_empty()
            && digits.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        if !is_uuid {
            return Err(CudaSettingsError::Which {
                given: text.to_owned(),
            });
        }
        Ok(CudaWhich::Uuid(format!(
            "{}{}",
            text[..4].to_ascii_uppercase(),
            digits.to_ascii_lowercase()
        )))
    }
}

impl FromStr for CudaSettings {
    type Err = CudaSettingsError;

    fn from_str(text: &str) -> Result<CudaSettings, CudaSettingsError> {
        let mut parts = text.split(',');
        let which = parts.next().unwrap_or_default().trim();
        let mut settings = CudaSettings::new(which.parse()?);
        for part in parts {
            let (option, value) = part
                .split_once('=')
                .ok_or_else(|| CudaSettingsError::UnknownOption {
                    given: part.to_owned(),
                })?;
            settings.set(option.trim(), value.trim())?;
        }
        Ok(settings)
    }
}

impl fmt::Display for CudaWhich {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaWhich::Ordinal(ordinal) => write!(f, "{ordinal}"),
            CudaWhich::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

impl fmt::Display for CudaSettings {
    /// The text that [`FromStr`] reads back; what was not set is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.which)?;
        if let Some(dtype) = self.dtype {
            write!(f, ",dtype={}", dtype.as_str())?;
        }
        for fault in &self.faults {
            write!(f, ",{fault}")?;
        }
        if self.die_generations != 1 {
            write!(f, ",die-generations={}", self.die_generations)?;
        }
        Ok(())
    }
}
