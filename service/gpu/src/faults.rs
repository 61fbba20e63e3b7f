//! Fault injection: faults at a place and time that a test names.

use std::collections::HashMap;
use std::fmt;

/// A fault to inject. As text: `die-at=denoise:2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub action: FaultAction,
    /// The name of a stage, `load`, or `unload`.
    pub place: String,
    /// The `nth` time that the process reaches the place, from 1.
    pub nth: u64,
}

/// The kind of a fault, which the worker carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// End the process at once, as a crash does.
    Die,
    /// Block forever.
    Hang,
    /// The card is lost: from here on all its operations fail.
    Lose,
    /// A kernel accesses an illegal address, after which every driver call fails. On a simulated card the same as
    /// `Lose`.
    Poison,
    /// A tensor of the component stays allocated: at `unload` only.
    Leak,
    /// The worker tries what one that a hostile checkpoint has taken over would, and logs what was refused.
    Escape,
}

impl FaultAction {
    /// Name of the option that requests it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            FaultAction::Die => "die-at",
            FaultAction::Hang => "hang-at",
            FaultAction::Lose => "lose-at",
            FaultAction::Poison => "poison-at",
            FaultAction::Leak => "leak-at",
            FaultAction::Escape => "escape-at",
        }
    }

    /// The action of an option's name.
    pub(crate) fn of_option(option: &str) -> Option<FaultAction> {
        [
            FaultAction::Die,
            FaultAction::Hang,
            FaultAction::Lose,
            FaultAction::Poison,
            FaultAction::Leak,
            FaultAction::Escape,
        ]
        .into_iter()
        .find(|action| action.option() == option)
    }
}

impl Fault {
    /// The syntax that [`Fault::at`] parses, for messages.
    pub(crate) const EXPECTED: &'static str = "a stage and which time, as in denoise:2";

    /// Parses a place and an optional count: `denoise`, or `denoise:2`.
    pub(crate) fn at(action: FaultAction, text: &str) -> Option<Fault> {
        let (place, nth) = text.split_once(':').unwrap_or((text, "1"));
        let named = !place.is_empty() && place.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let nth = nth.parse().ok().filter(|&nth| nth > 0)?;
        named.then(|| Fault {
            action,
            place: place.to_owned(),
            nth,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}:{}", self.action.option(), self.place, self.nth)
    }
}

/// The faults of one card, and how often its process has reached each place.
#[derive(Debug)]
pub(crate) struct FaultSchedule {
    faults: Vec<Fault>,
    /// Whether faults are active in this generation.
    live: bool,
    passed: HashMap<String, u64>,
}

impl FaultSchedule {
    /// Faults are active in the first `die_generations` generations; `generation` counts from 1 (0 counts as 1).
    pub(crate) fn new(faults: Vec<Fault>, generation: u64, die_generations: u64) -> FaultSchedule {
        FaultSchedule {
            faults,
            live: generation.max(1) <= die_generations,
            passed: HashMap::new(),
        }
    }

    /// Counts one arrival at a place and returns the fault to inject now.
    pub(crate) fn at(&mut self, place: &str) -> Option<FaultAction> {
        let passed = self.passed.entry(place.to_owned()).or_default();
        *passed += 1;
        let nth = *passed;
        self.faults
            .iter()
            .find(|fault| self.live && fault.place == place && fault.nth == nth)
            .map(|fault| fault.action)
    }
}
