//! When a worker counts as hung: it sends no report for much longer than its work has ever taken, or it does not end a
//! cancelled stage.
//!
//! It measures the time between two reports of an order. The limit is learned from the intervals of steps and of pieces of a
//! result, from the durations of stages without either, and from the bytes a second of loads on that card. Work without
//! measurements has the whole `stall_limit`, and so has work that may take long once: the first step of a stage, with
//! kernels to load, and the moves before it.

use std::time::Duration;

use residency::Bytes;
use tokio::time::Instant;

use super::Settings;
use super::cards::{CardRecord, Health, InFlight};
use super::learned::{KnownPace, PaceKey, StageKey, TooSlow, Took};
use crate::messages::{Completed, Progress, Ticket, must_wait};
use crate::need::Need;

/// The limit between two reports is this many times the usual time.
const SILENCE_FACTOR: u32 = 10;
/// A cancel is answered within so many steps...
const CANCEL_STEPS: u32 = 3;
/// ...or within this, if that is longer. Where no step has been measured, `cancel_limit` holds.
const CANCEL_FLOOR: Duration = Duration::from_secs(2);
/// Factor by which a learned limit is raised once it has ended a worker, as it may have been too strict.
const RELAX_FACTOR: u32 = 4;

/// The activity of an order, by its worker's last report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Doing {
    /// Evictions, opening of files, another attempt: the duration is not known.
    #[default]
    Preparing,
    /// A component of so many bytes is being loaded.
    Loading(Bytes),
    /// The stage runs and has not completed a step.
    Stage,
    /// The stage runs and has completed steps.
    Steps,
}

/// The pace of one order.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Of a stage: its key and its number of steps.
    stage: Option<(StageKey, u32)>,
    chunking: String,
    doing: Doing,
    last_step: Option<Instant>,
    /// The longest time between two steps so far.
    longest: Option<Duration>,
    /// The time between steps, learned from earlier orders of the stage.
    learned: Option<Duration>,
    allowance: Option<Allowance>,
}

/// How long a worker may be silent, and the reason.
#[derive(Clone, Debug, PartialEq)]
struct Allowance {
    limit: Duration,
    /// The reason: words for the usual time, and that time.
    usual: Option<(&'static str, Duration)>,
}

impl Pace {
    pub(super) fn of(model_key: &str, need: &Need) -> Pace {
        let stage = need.plan.as_ref().map(|plan| {
            let key = (model_key.to_owned(), need.name.clone(), plan.shape.clone());
            (key, plan.steps)
        });
        Pace {
            stage,
            ..Pace::default()
        }
    }

    /// Records a report of the worker on its order.
    pub(super) fn record(&mut self, progress: &Progress, now: Instant) {
        match progress {
            Progress::Evicting(_) => self.doing = Doing::Preparing,
            Progress::Loading { component, done } => {
                self.doing = if *done < component.bytes {
                    Doing::Loading(component.bytes)
                } else {
                    Doing::Preparing
                };
            }
            Progress::Started { chunking, .. } => {
                self.chunking.clone_from(chunking);
                self.doing = Doing::Stage;
            }
            Progress::Step { .. } | Progress::Piece(_) => {
                if let Some(last) = self.last_step.replace(now) {
                    self.longest = self.longest.max(Some(now.duration_since(last)));
                }
                self.doing = Doing::Steps;
            }
            Progress::Begun | Progress::Preview { .. } => {}
            // Another rung: the earlier measurements are not its pace.
            Progress::Retrying { .. } => {
                (self.doing, self.last_step, self.longest) = (Doing::Preparing, None, None);
            }
        }
    }

    /// The stage has waited for its supervisor, and goes on.
    fn goes_on(&mut self, now: Instant) {
        self.last_step = self.last_step.map(|_| now);
    }

    /// The pace to learn from a stage that ran to its end on a card: the longest silence after its first step. The silence after
    /// its last report counts too, as the card may lag what was reported; that silence alone says nothing about a step.
    pub(super) fn taught(&self, card: usize, completed: &Completed, now: Instant) -> Option<(PaceKey, Took)> {
        let key = self.key_in(&completed.chunking, card)?;
        let end = self.last_step.map(|last| now.duration_since(last));
        let between = self.longest.zip(end).map(|(longest, end)| longest.max(end));
        let took = match between {
            Some(between) => Took::BetweenSteps(between),
            None if self.has_steps() => return None,
            None => Took::Whole(Duration::from_millis(completed.run_ms)),
        };
        Some((key, took))
    }

    /// Key under which its stage's pace is learned on a card, at the current rung.
    pub(super) fn key(&self, card: usize) -> Option<PaceKey> {
        self.key_in(&self.chunking, card)
    }

    fn key_in(&self, chunking: &str, card: usize) -> Option<PaceKey> {
        let ((model_key, stage, shape), _) = self.stage.clone()?;
        Some(((model_key, stage, format!("{shape} {chunking}")), card))
    }

    fn has_steps(&self) -> bool {
        self.stage.as_ref().is_some_and(|(_, steps)| *steps > 1)
    }

    fn step(&self) -> Option<Duration> {
        self.learned.max(self.longest)
    }

    /// The usual time of the order's current activity, with words for it; `None`: not known.
    fn usual(&self, known: &KnownPace) -> Option<(&'static str, Duration)> {
        match self.doing {
            Doing::Preparing => None,
            Doing::Loading(bytes) => {
                let seconds = bytes.0 as f64 / known.bytes_per_second?;
                let usual = Duration::try_from_secs_f64(seconds).ok()?;
                Some(("that this component takes to load", usual))
            }
            Doing::Stage => {
                let whole = known.whole.filter(|_| !self.has_steps())?;
                Some(("that this stage takes", whole))
            }
            Doing::Steps => {
                let between = known.between_steps?.max(self.longest.unwrap_or_default());
                Some(("between two steps", between))
            }
        }
    }
}

impl InFlight {
    /// Records a report of the worker on this order.
    pub(super) fn record_progress(&mut self, progress: &Progress, now: Instant) {
        self.last_report = now;
        self.pace.record(progress, now);
        if let Progress::Piece(piece) = progress {
            self.delivered += Bytes(piece.data.len() as u64);
        }
    }

    /// Lets it deliver more. If it waited for that, its silence begins now.
    pub(super) fn take_pieces(&mut self, now: Instant) {
        if self.waits_for_others() {
            self.last_report = now;
            self.pace.goes_on(now);
        }
        self.taken = self.delivered;
    }

    /// Records that it offers the other part of its stage something. Returns card and ticket of that one.
    pub(super) fn offers(&mut self, now: Instant) -> Option<(usize, Ticket)> {
        self.last_report = now;
        let joint = self.joint.as_mut()?;
        joint.offered += 1;
        Some(joint.other)
    }

    /// The other part of its stage offers it something. If it waited for that, its silence begins now.
    pub(super) fn meets(&mut self, now: Instant) {
        if self.waits_for_offer() {
            self.last_report = now;
            self.pace.goes_on(now);
        }
        if let Some(joint) = &mut self.joint {
            joint.met += 1;
        }
    }

    /// Whether it waits for an offer of the other part of its stage.
    pub(super) fn waits_for_offer(&self) -> bool {
        let joint = self.joint.as_ref();
        joint.is_some_and(|joint| joint.offered > joint.met)
    }

    /// Whether it waits until its pieces are taken, or for the offer of the other card that runs its stage: it is silent for that
    /// reason. The other one is not, as only one of the two can have offered more.
    fn waits_for_others(&self) -> bool {
        must_wait(self.delivered, self.taken) || self.waits_for_offer()
    }

    /// Updates how long the worker may be silent, from the measured pace.
    pub(super) fn allow_silence(&mut self, known: &KnownPace, settings: &Settings) {
        let (floor, longest) = (settings.stall_floor, settings.stall_limit);
        let pace = &mut self.pace;
        pace.learned = known.between_steps;
        let usual = pace.usual(known);
        let limit = usual.map_or(longest, |(_, usual)| {
            (usual * SILENCE_FACTOR).max(floor).min(longest)
        });
        pace.allowance = Some(Allowance { limit, usual });
    }

    /// The work at which the worker is too slow, and the usual time to learn for it from now on: if a learned limit ended the worker,
    /// the next attempt must get more time.
    pub(super) fn too_slow(
        &self,
        card: usize,
        settings: &Settings,
        now: Instant,
    ) -> Option<(TooSlow, Duration)> {
        if self.usual().is_none() || self.is_cancel_overdue(settings, now) {
            return None;
        }
        let what = match self.pace.doing {
            Doing::Loading(bytes) => TooSlow::Load(bytes),
            Doing::Preparing | Doing::Stage | Doing::Steps => TooSlow::Stage(self.pace.key(card)?),
        };
        Some((what, self.silence(settings) * RELAX_FACTOR / SILENCE_FACTOR))
    }

    /// Records why its worker is considered hung: it was silent, unless a cancel is overdue.
    pub(super) fn note_silence(&mut self, settings: &Settings, now: Instant) {
        self.silent = (!self.is_cancel_overdue(settings, now)).then(|| self.silence(settings));
    }

    /// How long a cancel may go unanswered.
    fn grace(&self, settings: &Settings) -> Duration {
        let steps = self.pace.step().map(|step| step * CANCEL_STEPS);
        steps.map_or(settings.cancel_limit, |steps| steps.max(CANCEL_FLOOR))
    }

    fn usual(&self) -> Option<(&'static str, Duration)> {
        self.pace.allowance.as_ref().and_then(|allowance| allowance.usual)
    }

    fn silence(&self, settings: &Settings) -> Duration {
        let allowance = self.pace.allowance.as_ref();
        allowance.map_or(settings.stall_limit, |allowance| allowance.limit)
    }

    fn is_cancel_overdue(&self, settings: &Settings, now: Instant) -> bool {
        self.cancelled.is_some_and(|at| at + self.grace(settings) <= now)
    }
}

impl CardRecord {
    /// When the worker is considered hung.
    pub(super) fn hung_at(&self, settings: &Settings) -> Option<Instant> {
        if self.is_recycled() || self.health != Health::Ready {
            return None;
        }
        let running = self.in_flight.as_ref().map(|running| {
            let silent = running.last_report + running.silence(settings);
            let silent = (!running.waits_for_others()).then_some(silent);
            let cancelled = running.cancelled.map(|at| at + running.grace(settings));
            silent.into_iter().chain(cancelled).min()
        });
        running.unwrap_or_else(|| {
            let since = self
                .request_pending_since
                .filter(|_| !self.pending_requests.is_empty());
            since.map(|since| since + settings.stall_limit)
        })
    }

    /// The limit that the worker has exceeded, and words for it.
    pub(super) fn exceeded_limit(&self, settings: &Settings, now: Instant) -> (Duration, String) {
        let (floor, longest) = (settings.stall_floor, settings.stall_limit);
        let Some(running) = &self.in_flight else {
            return (
                longest,
                format!("it did not answer a request within the stall limit of {longest:?}"),
            );
        };
        let (stage, grace) = (&running.need.name, running.grace(settings));
        if running.is_cancel_overdue(settings, now) {
            let steps = running.pace.step().map_or_else(
                || "as no step of it has been measured".to_owned(),
                |step| format!("{CANCEL_STEPS} steps of {step:?}, at least {CANCEL_FLOOR:?}"),
            );
            return (
                grace,
                format!("it did not end a cancelled {stage} within {grace:?} ({steps})"),
            );
        }
        let limit = running.silence(settings);
        let why = match running.usual() {
            None => "the stall limit, as it is not known yet how long it takes".to_owned(),
            Some((what, usual)) => {
                format!(
                    "{SILENCE_FACTOR} times the {usual:?} {what}, at least {floor:?} and at most {longest:?}"
                )
            }
        };
        (
            limit,
            format!("it sent no report of {stage} for {limit:?} ({why})"),
        )
    }
}
