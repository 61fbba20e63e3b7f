//! Settings of an NVIDIA card, as one line of text. Compiled in every build, so that such a name can be parsed
//! without CUDA.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use residency::Bytes;

use crate::faults::{Fault, FaultAction};
use crate::size::{exact_bytes, parse_bytes};

/// An NVIDIA card. As text: `0`, `1` or `GPU-8f2c...`, with `=20GiB` where we may not have all of its memory, then
/// options after commas: `0=20GiB,dtype=f16,poison-at=denoise:2,die-at=load:1,hang-at=decode,die-generations=2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSettings {
    pub which: CudaWhich,
    /// The most of its memory that we take, context included; all of it by default.
    pub limit: Option<Bytes>,
    /// `dtype`: computation dtype; see [`CudaSettings::compute_dtype`].
    pub dtype: Option<CudaDtype>,
    /// `poison-at`, `leak-at`, `die-at`, `hang-at`: faults to inject, for tests. May be repeated.
    pub faults: Vec<Fault>,
    /// `die-generations`: number of worker generations of the card, from the first, in which faults happen. Default
    /// 1; 0 for never.
    pub die_generations: u64,
}

/// How a card is identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaWhich {
    /// Ordinal in the driver's order (PCI bus order), from 0.
    Ordinal(u32),
    /// UUID, `GPU-` or `MIG-` and hexadecimal digits, or a unique prefix of it.
    Uuid(String),
}

/// Computation dtype on an NVIDIA card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaDtype {
    Bf16,
    F16,
    F32,
}

/// Settings of an NVIDIA card that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaSettingsError {
    /// Neither an ordinal nor a UUID.
    #[error(
        "{given:?} names no NVIDIA card: write cuda, cuda:1, cuda:1=20GiB to take that much of it, or cuda:GPU- with its UUID (`nvidia-smi -L` lists them)"
    )]
    Which { given: String },
    /// An unknown option.
    #[error(
        "an NVIDIA card has no option {given:?}; there are dtype=, poison-at=, leak-at=, die-at=, hang-at=, die-generations="
    )]
    UnknownOption { given: String },
    /// An invalid value of a known option.
    #[error("{option}={given} of an NVIDIA card is not understood: write {expected}")]
    Value {
        option: String,
        given: String,
        /// The allowed values, for the message.
        expected: &'static str,
    },
}

impl CudaSettings {
    /// Default settings.
    pub fn new(which: CudaWhich) -> CudaSettings {
        CudaSettings {
            which,
            limit: None,
            dtype: None,
            faults: Vec::new(),
            die_generations: 1,
        }
    }

    /// Computation dtype: the setting if there is one, else `bf16`, or `f16` before compute capability 8.0, which has no
    /// bf16 arithmetic.
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
                // `lose-at` exists on simulated cards only: a real card is lost by a real error.
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
    /// Whether the card with this ordinal and UUID matches. A UUID prefix may match several cards.
    pub fn matches(&self, ordinal: u32, uuid: &str) -> bool {
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
        let first = parts.next().unwrap_or_default();
        let (which, limit) = first
            .split_once('=')
            .map_or((first, None), |(which, limit)| (which, Some(limit)));
        let mut settings = CudaSettings::new(which.trim().parse()?);
        if let Some(limit) = limit {
            let bytes = parse_bytes(limit.trim())
                .ok()
                .filter(|bytes| *bytes > Bytes::ZERO);
            settings.limit = Some(bytes.ok_or_else(|| CudaSettingsError::Value {
                option: which.trim().to_owned(),
                given: limit.to_owned(),
                expected: "the memory that may be used of it, such as 20GiB",
            })?);
        }
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
    /// The text that [`FromStr`] parses; defaults are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.which)?;
        if let Some(limit) = self.limit {
            write!(f, "={}", exact_bytes(limit))?;
        }
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
