//! Things that go wrong on purpose, at a place and a time that a test names.

use std::collections::HashMap;
use std::fmt;

/// Something that goes wrong at a place. As text: `die-at=denoise:2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What goes wrong.
    pub action: FaultAction,
    /// The name of a stage, `load`, or `unload`.
    pub place: String,
    /// The how manieth time that the process comes there, from 1.
    pub nth: u64,
}

/// What a worker must do because the settings of its card say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// End the process at once, as a crash does.
    Die,
    /// Never come back.
    Hang,
    /// The card is lost: from here on it answers so by itself.
    Lose,
    /// A kernel touches an illegal address, after which the driver refuses everything. A simulated card is lost.
    Poison,
    /// Somebody keeps a tensor of the component that leaves: at `unload`, and nowhere else.
    Leak,
}

impl FaultAction {
    /// The option that asks for it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            FaultAction::Die => "die-at",
            FaultAction::Hang => "hang-at",
            FaultAction::Lose => "lose-at",
            FaultAction::Poison => "poison-at",
            FaultAction::Leak => "leak-at",
        }
    }

    /// The action that an option of this name asks for.
    pub(crate) fn of_option(option: &str) -> Option<FaultAction> {
        [
            FaultAction::Die,
            FaultAction::Hang,
            FaultAction::Lose,
            FaultAction::Poison,
            FaultAction::Leak,
        ]
        .into_iter()
        .find(|action| action.option() == option)
    }
}

impl Fault {
    /// What [`Fault::at`] reads, for messages.
    pub(crate) const EXPECTED: &'static str = "a stage and which time, as in denoise:2";

    /// Reads where and when: `denoise`, or `denoise:2`.
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

/// The faults of one card, and how often its process has passed each place.
#[derive(Debug)]
pub(crate) struct FaultSchedule {
    faults: Vec<Fault>,
    /// Whether faults still happen in this process.
    live: bool,
    passed: HashMap<String, u64>,
}

impl FaultSchedule {
    /// Faults happen in the first `die_generations` processes of a card; `generation` counts from 1 (0 counts
    /// as 1).
    pub(crate) fn new(faults: Vec<Fault>, generation: u64, die_generations: u64) -> FaultSchedule {
        FaultSchedule {
            faults,
            live: generation.max(1) <= die_generations,
            passed: HashMap::new(),
        }
    }

    /// Notes that the process comes to a place, and says what goes wrong there this time.
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
