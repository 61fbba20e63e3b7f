//! Moves: components in and out, slack back to the driver. Each is bracketed by ledger entries and followed by the
//! driver's figures.

use std::ops::ControlFlow;

use gpu::{FaultAction, GpuError, LoadError, LoadPlan, LoadProgress, Timeline, Unloaded};
use residency::{Bytes, Component, Ledger, LedgerError, Millis, Move, idle_moves};

use super::{Card, Link, millis};
use crate::messages::{Event, Progress, Ticket};

/// Why a move was not made. The ledger is as if it had never been begun.
#[derive(Debug)]
pub(super) enum MoveError {
    /// Nobody wants it any more.
    Cancelled,
    /// Others were faster, or bytes that were freed are late: the plan is out of date.
    NoRoom,
    /// The files are not what they were, or cannot be read.
    Model(String),
    /// It should not have been asked for.
    Refused(String),
    /// The card is lost.
    Lost(String),
}

impl From<GpuError> for MoveError {
    fn from(error: GpuError) -> MoveError {
        match error {
            GpuError::NotLoaded(_) | GpuError::StillInUse(..) | GpuError::Truth(_) => {
                MoveError::Refused(error.to_string())
            }
            // Bytes that will not come back end the worker: the last rung of the ladder.
            GpuError::Leaked { .. } => MoveError::Lost(error.to_string()),
            GpuError::Lost(reason) => MoveError::Lost(reason),
        }
    }
}

impl From<LedgerError> for MoveError {
    fn from(error: LedgerError) -> MoveError {
        match error {
            LedgerError::NoRoom { .. } => MoveError::NoRoom,
            LedgerError::AlreadyThere(_)
            | LedgerError::Unknown(_)
            | LedgerError::NotResident(_)
            | LedgerError::WrongState { .. }
            | LedgerError::Leased(_)
            | LedgerError::Pinned(_)
            | LedgerError::UnknownLease(_) => MoveError::Refused(error.to_string()),
        }
    }
}

impl From<LoadError> for MoveError {
    fn from(error: LoadError) -> MoveError {
        match error {
            LoadError::Cancelled => MoveError::Cancelled,
            LoadError::OutOfMemory { .. } => MoveError::NoRoom,
            LoadError::Io { .. }
            | LoadError::Damaged { .. }
            | LoadError::NotFinite { .. }
            | LoadError::Unsupported(_) => MoveError::Model(error.to_string()),
            LoadError::Lost(reason) => MoveError::Lost(reason),
        }
    }
}

impl Card {
    /// Lays the driver's figures under the ledger. No plan is made without them.
    pub(super) fn reconcile(&mut self) -> Result<(), MoveError> {
        let truth = self.gpu.memory()?;
        self.ledger.reconcile(&truth);
        Ok(())
    }

    /// The same after something that was done: figures that cannot be had for once do not undo it.
    pub(super) fn look_again(&mut self) -> Result<(), MoveError> {
        match self.reconcile() {
            Err(MoveError::Lost(reason)) => Err(MoveError::Lost(reason)),
            Err(error) => {
                tracing::warn!(?error, "the card's figures could not be read");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Brings a component in and says how many seconds that took. A copy is read first, where there is one; if that fails
    /// the component comes from where its plan says.
    pub(super) fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        copy: Option<&LoadPlan>,
        ticket: Ticket,
        link: &mut dyn Link,
    ) -> Result<f64, MoveError> {
        let started = self.clock.micros();
        let mut timeline = Timeline::begin("bring a component in");
        self.ledger.begin_load(component, self.clock.now())?;
        self.publish(link);
        self.suffer("load")?;
        let mut from = if copy.is_some() { "kept copy" } else { "checkpoint" };
        let loaded = {
            let interval = millis(self.settings.progress_interval);
            let mut reports = LoadReports {
                ticket,
                component,
                link: &mut *link,
                interval,
                last: None,
            };
            reports.report(Bytes::ZERO, self.clock.now());
            let clock = &*self.clock;
            let mut load = |plan: &LoadPlan| {
                self.gpu
                    .load(component, plan, &mut |progress| reports.on(progress, clock.now()))
            };
            match copy.map(&mut load) {
                None => load(plan),
                Some(Err(error @ (LoadError::Io { .. } | LoadError::Damaged { .. }))) => {
                    tracing::warn!(component = component.name, %error, "a kept copy cannot be read: its checkpoint is");
                    from = "checkpoint";
                    load(plan)
                }
                Some(loaded) => loaded,
            }
        };
        timeline.part("load");
        if let Err(error) = loaded {
            self.ledger.abort_load(&component.id)?;
            self.look_again()?;
            self.publish(link);
            tracing::warn!(component = component.name, id = %component.id, %error, "a load came to nothing");
            return Err(error.into());
        }
        self.ledger.complete_load(&component.id, self.clock.now())?;
        self.look_again()?;
        timeline.part("ask the driver");
        let seconds = self.clock.micros().saturating_sub(started) as f64 / 1e6;
        tracing::info!(component = component.name, id = %component.id, bytes = %component.bytes, seconds, from, "loaded");
        let progress = Progress::Loading {
            component: component.clone(),
            done: component.bytes,
        };
        link.emit(Event::Progress { ticket, progress });
        self.publish(link);
        Ok(seconds)
    }

    /// Takes a component out, for an order or without one, and sees it through to the driver.
    pub(super) fn evict(
        &mut self,
        component: &Component,
        ticket: Option<Ticket>,
        link: &mut dyn Link,
    ) -> Result<Unloaded, MoveError> {
        self.ledger.begin_evict(&component.id)?;
        if let Some(ticket) = ticket {
            link.emit(Event::Progress {
                ticket,
                progress: Progress::Evicting(component.clone()),
            });
        }
        self.publish(link);
        let unloaded = match self.gpu.unload(&component.id) {
            Ok(unloaded) => unloaded,
            Err(error @ GpuError::StillInUse(..)) => {
                self.ledger.abort_evict(&component.id)?;
                self.publish(link);
                tracing::error!(component = component.name, %error, "an unload was refused");
                return Err(error.into());
            }
            Err(error @ (GpuError::Leaked { .. } | GpuError::Lost(_))) => return Err(error.into()),
            // It is not there any more, either way; the figures below say what became of its bytes.
            Err(error @ (GpuError::NotLoaded(_) | GpuError::Truth(_))) => {
                tracing::error!(component = component.name, %error, "an unload could not be verified");
                Unloaded {
                    booked: component.bytes,
                    freed: Bytes::ZERO,
                }
            }
        };
        self.ledger.complete_evict(&component.id, self.clock.now())?;
        self.look_again()?;
        let late = self.ledger.late();
        tracing::info!(
            component = component.name, id = %component.id, booked = %unloaded.booked, freed = %unloaded.freed, %late,
            "unloaded"
        );
        self.publish(link);
        Ok(unloaded)
    }

    /// Hands slack back to the driver and says how much that was.
    pub(super) fn hand_back_slack(&mut self, link: &mut dyn Link) -> Result<Bytes, MoveError> {
        // What others took meanwhile must not pass for what is given back here.
        self.look_again()?;
        let trimmed = self.gpu.trim()?;
        self.ledger.complete_trim(trimmed, self.clock.now());
        self.look_again()?;
        self.publish(link);
        Ok(trimmed)
    }

    /// Waits for bytes that are late, until there is no more to wait for as `done` sees it, or the time is over.
    pub(super) fn await_late(
        &mut self,
        until: Millis,
        done: impl Fn(&Ledger) -> bool,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        while self.ledger.late() > Bytes::ZERO && !done(&self.ledger) && self.clock.now() < until {
            self.clock.sleep(self.settings.poll_while_late);
            self.look_again()?;
            self.publish(link);
        }
        Ok(())
    }

    /// Carries out what must go wrong at this place, on a simulated card that says so.
    pub(super) fn suffer(&mut self, place: &str) -> Result<(), MoveError> {
        match self.gpu.fault_at(place) {
            // A card that is lost or poisoned answers so by itself from here on.
            None | Some(FaultAction::Lose | FaultAction::Poison | FaultAction::Leak) => Ok(()),
            Some(FaultAction::Hang) => {
                self.faults.hang(place);
                Ok(())
            }
            Some(FaultAction::Die) => {
                self.faults.die(place);
                Err(MoveError::Lost(format!(
                    "it died at {place}, as its settings say"
                )))
            }
        }
    }

    /// The janitor, on a card that has been idle for a while.
    pub(super) fn tidy(&mut self, link: &mut dyn Link) -> Result<(), MoveError> {
        for each in idle_moves(&self.ledger, self.clock.now(), self.idle_policy()) {
            match each {
                Move::Evict(component) => {
                    self.evict(&component, None, link)?;
                }
                Move::Trim if self.ledger.accounts().slack > self.stubborn_slack => {
                    let trimmed = self.hand_back_slack(link)?;
                    let left = self.ledger.accounts().slack;
                    let stays = left > self.settings.slack_limit;
                    self.stubborn_slack = if stays { left } else { Bytes::ZERO };
                    tracing::info!(%trimmed, %left, "the janitor trimmed an idle card");
                }
                // The janitor's plan has no loads.
                Move::Trim | Move::Load(_) => {}
            }
        }
        Ok(())
    }
}

/// Reports on one load: the first, the last, and not too many between.
struct LoadReports<'a> {
    ticket: Ticket,
    component: &'a Component,
    link: &'a mut dyn Link,
    interval: u64,
    last: Option<Millis>,
}

impl LoadReports<'_> {
    fn on(&mut self, progress: LoadProgress, now: Millis) -> ControlFlow<()> {
        let due = self.last.is_none_or(|last| now.since(last) >= self.interval);
        // The last report is sent when the ledger has it in full.
        if due && progress.done < self.component.bytes {
            self.report(progress.done, now);
        }
        if self.link.cancelled(self.ticket) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    fn report(&mut self, done: Bytes, now: Millis) {
        self.last = Some(now);
        let progress = Progress::Loading {
            component: self.component.clone(),
            done,
        };
        self.link.emit(Event::Progress {
            ticket: self.ticket,
            progress,
        });
    }
}
