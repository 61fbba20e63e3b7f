//! Settings of a simulated card, as one line of text.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use residency::Bytes;

use crate::card::CardSpeeds;
use crate::faults::{Fault, FaultAction};
use crate::size::{SizeError, exact_bytes, parse_bytes};

/// Capacity, speed and faults of a simulated card. As text: `24GiB`, then options after commas:
/// `24GiB,speed=24GB/s,compute=150TFLOP/s,lag=200ms,fail-load=3,die-at=denoise:2,hang-at=decode:1,foreign=4GiB`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedSettings {
    pub capacity: Bytes,
    /// `index`: ordinal in its id; default `sim:0`.
    pub index: u32,
    /// `speed`: bytes per second of the link, for loads and streamed blocks; 0 for instant.
    pub link: Bytes,
    /// `disk`: bytes per second at which files are read; 0 for instant. What reaches the card comes at the speed of the slower of
    /// both, as that of a model larger than the machine's memory does.
    pub disk: Bytes,
    /// `compute`: floating-point operations per second; 0 for instant.
    pub flops: u64,
    /// `capability`: the compute capability that the card says it has; none otherwise.
    pub capability: Option<(u32, u32)>,
    /// `context`: bytes of the process's context on the card.
    pub context: Bytes,
    /// `workspaces`: bytes of library workspaces.
    pub workspaces: Bytes,
    /// `slack=keep`: freed scratch stays reserved until a trim.
    pub keeps_slack: bool,
    /// `lag`: milliseconds until freed bytes are shown as free.
    pub lag_ms: u64,
    /// `release`: milliseconds, blocking, that freeing a component or a trim takes.
    pub release_ms: u64,
    /// `largest`: maximum of a single activation allocation, however much is free.
    pub largest: Option<Bytes>,
    /// `remaps=no`: memory is not remapped, so that each allocation needs free addresses in one piece ([`residency::Layout`]).
    pub remaps: bool,
    /// `peers=no`: it cannot write to the memory of other cards, which stages on two cards need.
    pub has_peers: bool,
    /// `foreign`: bytes held by other processes from the start.
    pub foreign: Bytes,
    /// `world`: a file of foreign holders, read with each memory reading; see [`super::SimulatedWorld::follow`].
    pub world: Option<PathBuf>,
    /// `fail-load`: which loads fail, and how. May be repeated.
    pub fail_loads: Vec<FailLoad>,
    /// `die-at`, `hang-at`, `lose-at`, `poison-at`, `leak-at`, `escape-at`: faults to inject. May be repeated.
    pub faults: Vec<Fault>,
    /// `die-generations`: number of generations of the card, from the first, in which faults happen, so that a
    /// restarted worker lives. Default 1; 0 for never.
    pub die_generations: u64,
}

/// A load failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailLoad {
    /// The `nth` load of a process, from 1.
    pub nth: u64,
    pub how: LoadFailure,
}

/// Kind of a load failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFailure {
    /// `oom`: out of memory, halfway.
    #[default]
    OutOfMemory,
    /// `io`: the file cannot be read.
    Io,
    /// `damaged`: the file contradicts its header.
    Damaged,
}

/// Settings that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// An invalid size.
    #[error("{what} of a simulated card: {source}")]
    Size {
        /// `capacity`, or the option.
        what: String,
        source: SizeError,
    },
    /// An unknown option.
    #[error(
        "a simulated card has no option {given:?}; there are speed=, disk=, compute=, capability=, lag=, release=, largest=, foreign=, context=, workspaces=, \
         slack=keep, remaps=no, peers=no, fail-load=, die-at=, hang-at=, lose-at=, poison-at=, leak-at=, escape-at=, \
         die-generations=, world=, index="
    )]
    UnknownOption { given: String },
    /// An invalid value of a known option.
    #[error("{option}={given} of a simulated card is not understood: write {expected}")]
    Value {
        option: String,
        given: String,
        /// The allowed values, for the message.
        expected: &'static str,
    },
    /// Context, workspaces and foreign memory exceed the capacity.
    #[error("context, workspaces and foreign memory of a simulated card exceed its capacity of {capacity}")]
    NoRoom { capacity: Bytes },
}

impl SimulatedSettings {
    /// A card of this capacity, instant and without faults.
    pub fn new(capacity: Bytes) -> SimulatedSettings {
        SimulatedSettings {
            capacity,
            index: 0,
            link: Bytes::ZERO,
            disk: Bytes::ZERO,
            flops: 0,
            capability: None,
            context: Bytes::ZERO,
            workspaces: Bytes::ZERO,
            keeps_slack: false,
            lag_ms: 0,
            release_ms: 0,
            largest: None,
            remaps: true,
            has_peers: true,
            foreign: Bytes::ZERO,
            world: None,
            fail_loads: Vec::new(),
            faults: Vec::new(),
            die_generations: 1,
        }
    }

    /// How fast the card is; what is instant is unknown, as nothing can be predicted from it.
    pub fn speeds(&self) -> CardSpeeds {
        let slower = [self.link, self.disk]
            .into_iter()
            .filter(|speed| *speed > Bytes::ZERO);
        CardSpeeds {
            link: slower.min(),
            flops: (self.flops > 0).then_some(self.flops),
        }
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), SettingsError> {
        let wrong = |expected| SettingsError::Value {
            option: option.to_owned(),
            given: value.to_owned(),
            expected,
        };
        let size = |text: &str| {
            parse_bytes(text).map_err(|source| SettingsError::Size {
                what: option.to_owned(),
                source,
            })
        };
        match option {
            "speed" => self.link = size(value.strip_suffix("/s").unwrap_or(value))?,
            "disk" => self.disk = size(value.strip_suffix("/s").unwrap_or(value))?,
            "compute" => {
                self.flops = flops(value).ok_or_else(|| wrong("a speed such as 150TFLOP/s or 800GFLOP/s"))?;
            }
            "context" => self.context = size(value)?,
            "workspaces" => self.workspaces = size(value)?,
            "foreign" => self.foreign = size(value)?,
            "lag" => {
                self.lag_ms = milliseconds(value).ok_or_else(|| wrong("a time such as 200ms or 2s"))?;
            }
            "release" => {
                self.release_ms = milliseconds(value).ok_or_else(|| wrong("a time such as 200ms or 2s"))?;
            }
            "capability" => {
                let numbers = value.split_once('.');
                let parsed =
                    numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
                self.capability = Some(parsed.ok_or_else(|| wrong("two numbers, as in 8.9"))?);
            }
            "largest" => self.largest = Some(size(value)?),
            "slack" if value == "keep" => self.keeps_slack = true,
            "slack" => return Err(wrong("slack=keep")),
            "remaps" if value == "no" => self.remaps = false,
            "remaps" => return Err(wrong("remaps=no")),
            "peers" if value == "no" => self.has_peers = false,
            "peers" => return Err(wrong("peers=no")),
            "world" if value.is_empty() => return Err(wrong("the path of a file")),
            "world" => self.world = Some(PathBuf::from(value)),
            "index" => self.index = value.parse().map_err(|_| wrong("a number"))?,
            "die-generations" => {
                self.die_generations = value.parse().map_err(|_| wrong("a number of processes"))?;
            }
            "fail-load" => {
                let failure =
                    fail_load(value).ok_or_else(|| wrong("which load, as in 3, 3:oom, 3:io or 3:damaged"))?;
                self.fail_loads.push(failure);
            }
            _ => {
                let action = FaultAction::of_option(option).ok_or_else(|| SettingsError::UnknownOption {
                    given: option.to_owned(),
                })?;
                self.faults
                    .push(Fault::at(action, value).ok_or_else(|| wrong(Fault::EXPECTED))?);
            }
        }
        Ok(())
    }
}

/// Floating-point operations per second, as in `150TFLOP/s`.
fn flops(text: &str) -> Option<u64> {
    let number = text.strip_suffix("/s").unwrap_or(text).strip_suffix("FLOP")?;
    let scales = [
        ("T", 1_000_000_000_000),
        ("G", 1_000_000_000),
        ("M", 1_000_000),
        ("", 1),
    ];
    let (number, scale) = scales
        .iter()
        .find_map(|(unit, scale)| Some((number.strip_suffix(unit)?, scale)))?;
    number.parse::<u64>().ok()?.checked_mul(*scale)
}

fn milliseconds(text: &str) -> Option<u64> {
    if let Some(number) = text.strip_suffix("ms") {
        return number.parse().ok();
    }
    text.strip_suffix('s')?.parse::<u64>().ok()?.checked_mul(1000)
}

fn count(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&nth| nth > 0)
}

fn fail_load(text: &str) -> Option<FailLoad> {
    let (nth, how) = text.split_once(':').unwrap_or((text, "oom"));
    let how = match how {
        "oom" => LoadFailure::OutOfMemory,
        "io" => LoadFailure::Io,
        "damaged" => LoadFailure::Damaged,
        _ => return None,
    };
    Some(FailLoad {
        nth: count(nth)?,
        how,
    })
}

impl FromStr for SimulatedSettings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<SimulatedSettings, SettingsError> {
        let mut parts = text.split(',');
        let capacity = parts.next().unwrap_or_default();
        let capacity = parse_bytes(capacity).map_err(|source| SettingsError::Size {
            what: "the capacity".to_owned(),
            source,
        })?;
        let mut settings = SimulatedSettings::new(capacity);
        for part in parts {
            let (option, value) = part.split_once('=').ok_or_else(|| SettingsError::UnknownOption {
                given: part.to_owned(),
            })?;
            settings.set(option.trim(), value.trim())?;
        }
        if settings.context + settings.workspaces + settings.foreign > capacity {
            return Err(SettingsError::NoRoom { capacity });
        }
        Ok(settings)
    }
}

impl fmt::Display for SimulatedSettings {
    /// The text that [`FromStr`] parses; defaults are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&exact_bytes(self.capacity))?;
        if self.index != 0 {
            write!(f, ",index={}", self.index)?;
        }
        for (option, speed) in [("speed", self.link), ("disk", self.disk)] {
            if speed != Bytes::ZERO {
                write!(f, ",{option}={}/s", exact_bytes(speed))?;
            }
        }
        if self.flops != 0 {
            write!(f, ",compute={}FLOP/s", self.flops)?;
        }
        if let Some((major, minor)) = self.capability {
            write!(f, ",capability={major}.{minor}")?;
        }
        for (option, bytes) in [
            ("context", self.context),
            ("workspaces", self.workspaces),
            ("foreign", self.foreign),
        ] {
            if bytes != Bytes::ZERO {
                write!(f, ",{option}={}", exact_bytes(bytes))?;
            }
        }
        if self.keeps_slack {
            f.write_str(",slack=keep")?;
        }
        if self.lag_ms != 0 {
            write!(f, ",lag={}ms", self.lag_ms)?;
        }
        if self.release_ms != 0 {
            write!(f, ",release={}ms", self.release_ms)?;
        }
        if let Some(largest) = self.largest {
            write!(f, ",largest={}", exact_bytes(largest))?;
        }
        if !self.remaps {
            f.write_str(",remaps=no")?;
        }
        if !self.has_peers {
            f.write_str(",peers=no")?;
        }
        if let Some(world) = &self.world {
            write!(f, ",world={}", world.display())?;
        }
        for fail in &self.fail_loads {
            let how = match fail.how {
                LoadFailure::OutOfMemory => "",
                LoadFailure::Io => ":io",
                LoadFailure::Damaged => ":damaged",
            };
            write!(f, ",fail-load={}{how}", fail.nth)?;
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
