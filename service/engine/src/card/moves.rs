//! Moves: loads, evictions and trims. Each is bracketed by ledger entries and followed by a reading of the driver's
//! figures.

use std::ops::ControlFlow;

use gpu::{FaultAction, GpuError, LoadError, LoadPlan, LoadProgress, Timeline, Unloaded};
use model::ModelFile;
use residency::{Bytes, Component, Ledger, LedgerError, Millis, Part, Resident, should_trim};

use super::{Card, Link, millis};
use crate::messages::{Event, Progress, Ticket};

/// Why a move was not made. The ledger is unchanged.
#[derive(Debug)]
pub(super) enum MoveError {
    /// The attempt was cancelled.
    Cancelled,
    /// Other processes allocated memory, or freed bytes are late: the plan is stale.
    NoRoom,
    /// The files cannot be read.
    Model(String),
    /// The files were replaced while they were read.
    Replaced(String),
    /// The move is not allowed in the ledger's state.
    Refused(String),
    Lost(String),
}

impl MoveError {
    pub(super) fn replaced_while_read(component: &str) -> MoveError {
        MoveError::Replaced(replaced_while_read(component))
    }

    /// The error of files that could not be read. Files that are replaced meanwhile are not damaged.
    pub(super) fn of_read(error: LoadError, component: &str, files: &[ModelFile]) -> MoveError {
        match MoveError::from(error) {
            MoveError::Model(_) if !files.iter().all(ModelFile::is_current) => {
                MoveError::replaced_while_read(component)
            }
            error @ (MoveError::Model(_)
            | MoveError::Cancelled
            | MoveError::NoRoom
            | MoveError::Replaced(_)
            | MoveError::Refused(_)
            | MoveError::Lost(_)) => error,
        }
    }
}

/// The words for files that are not the versions any more that a component was read from.
pub(super) fn replaced_while_read(component: &str) -> String {
    format!("the files of {component} were replaced while they were read")
}

/// Where a component is read from.
pub(super) struct Source<'a> {
    pub(super) plan: &'a LoadPlan,
    /// A copy that is read instead, if it can be read.
    pub(super) copy: Option<&'a LoadPlan>,
    /// The versions of the files that the plan was made from.
    pub(super) files: &'a [ModelFile],
    /// Whether a stage goes over the component next, so that blocks may be left to it.
    pub(super) before_a_stage: bool,
}

/// A load that has ended.
pub(super) struct Loaded {
    pub(super) seconds: f64,
    /// Bytes that it brought.
    pub(super) bytes: Bytes,
}

impl From<GpuError> for MoveError {
    fn from(error: GpuError) -> MoveError {
        match error {
            GpuError::NotLoaded(_) | GpuError::StillInUse(..) | GpuError::Truth(_) => {
                MoveError::Refused(error.to_string())
            }
            // Leaked bytes end the worker: only a new process recovers them.
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
            | LedgerError::UnknownLease(_) => MoveError::Refused(error.to_string()),
        }
    }
}

impl From<LoadError> for MoveError {
    fn from(error: LoadError) -> MoveError {
        match error {
            LoadError::Cancelled => MoveError::Cancelled,
            LoadError::OutOfMemory { .. } | LoadError::Fragmented { .. } => MoveError::NoRoom,
            LoadError::StillInUse(_) => MoveError::Refused(error.to_string()),
            LoadError::Io { .. }
            | LoadError::Damaged { .. }
            | LoadError::HostMemory { .. }
            | LoadError::Incomplete { .. }
            | LoadError::NotFinite { .. }
            | LoadError::UnsupportedTensor { .. }
            | LoadError::Unsupported(_) => MoveError::Model(error.to_string()),
            LoadError::Lost(reason) => MoveError::Lost(reason),
        }
    }
}

impl Card {
    /// Reconciles the ledger with the driver's figures. Required before every plan.
    pub(super) fn reconcile(&mut self) -> Result<(), MoveError> {
        let truth = self.gpu.memory()?;
        self.ledger.reconcile(&truth);
        self.ledger.record_host(self.gpu.on_host());
        Ok(())
    }

    /// Like [`Card::reconcile`], after a completed change: a failure to read the figures does not undo it.
    pub(super) fn reconcile_after_change(&mut self) -> Result<(), MoveError> {
        match self.reconcile() {
            Err(MoveError::Lost(reason)) => Err(MoveError::Lost(reason)),
            Err(error) => {
                tracing::warn!(?error, "the card's figures could not be read");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Loads a component, or a part of it. A kept copy is read if there is one; if that fails, the component is loaded by its plan.
    pub(super) fn load(
        &mut self,
        component: &Component,
        part: Part,
        source: &Source<'_>,
        ticket: Ticket,
        link: &mut dyn Link,
    ) -> Result<Loaded, MoveError> {
        let started = self.clock.micros();
        self.drop_kept();
        let mut timeline = Timeline::begin("bring a component in");
        self.ledger.begin_load(component, part, self.clock.now())?;
        let shown = moved(component, component.bytes_of(part));
        self.publish(link);
        self.inject_fault("load")?;
        let mut from = if source.copy.is_some() {
            "kept copy"
        } else {
            "checkpoint"
        };
        let loaded = {
            let interval = millis(self.settings.progress_interval);
            let mut reports = LoadReports {
                ticket,
                component: &shown,
                link: &mut *link,
                interval,
                last: None,
            };
            reports.report(Bytes::ZERO, self.clock.now());
            let clock = &*self.clock;
            let mut load = |plan: &LoadPlan| {
                let mut on = |progress: LoadProgress| reports.on(progress, clock.now());
                match source.before_a_stage {
                    true => self.gpu.load_for_a_stage(component, plan, part, &mut on),
                    false => self
                        .gpu
                        .load(component, plan, part, &mut on)
                        .map(|()| Bytes::ZERO),
                }
            };
            match source.copy.map(&mut load) {
                None => load(source.plan),
                Some(Err(
                    error @ (LoadError::Io { .. } | LoadError::Damaged { .. } | LoadError::Incomplete { .. }),
                )) => {
                    tracing::warn!(component = component.name, %error, "a kept copy cannot be read: its checkpoint is");
                    from = "checkpoint";
                    load(source.plan)
                }
                Some(loaded) => loaded,
            }
        };
        timeline.part("load");
        let left = match loaded {
            Ok(left) => left,
            Err(error) => {
                self.ledger.abort_load(&component.id)?;
                self.reconcile_after_change()?;
                self.publish(link);
                match error {
                    LoadError::Cancelled => {
                        tracing::info!(component = component.name, id = %component.id, "a load was cancelled");
                    }
                    _ => {
                        tracing::warn!(component = component.name, id = %component.id, %error, "a load failed");
                    }
                }
                return Err(MoveError::of_read(error, &component.name, source.files));
            }
        };
        if !source.files.iter().all(ModelFile::is_current) {
            return Err(self.take_back(component, link)?);
        }
        self.ledger.complete_load(&component.id, self.clock.now())?;
        self.reconcile_after_change()?;
        timeline.part("ask the driver");
        let seconds = self.clock.micros().saturating_sub(started) as f64 / 1e6;
        tracing::info!(component = component.name, id = %component.id, bytes = %shown.bytes, of = %component.bytes, %left, seconds, from, "loaded");
        let progress = Progress::Loading {
            done: shown.bytes,
            component: shown,
        };
        link.emit(Event::Progress { ticket, progress });
        self.publish(link);
        let bytes = component.bytes_of(part) - left;
        Ok(Loaded { seconds, bytes })
    }

    /// Keeps another part of a component on the card. If more of it cannot be read, it leaves the card, and the next plan loads it
    /// as if it had not been there.
    pub(super) fn resize(
        &mut self,
        component: &Component,
        part: Part,
        ticket: Option<Ticket>,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        self.drop_kept();
        let started = self.clock.micros();
        let before = self
            .ledger
            .resident(&component.id)
            .map_or(Bytes::ZERO, Resident::bytes);
        let after = component.bytes_of(part);
        self.ledger.begin_resize(component, part)?;
        self.publish(link);
        self.inject_fault("load")?;
        let shown = moved(component, after - before);
        let resized = {
            let mut reports = ticket.map(|ticket| LoadReports {
                ticket,
                component: &shown,
                link: &mut *link,
                interval: millis(self.settings.progress_interval),
                last: None,
            });
            let clock = &*self.clock;
            self.gpu
                .resize(component, part, &mut |progress| match &mut reports {
                    Some(reports) => reports.on(progress, clock.now()),
                    None => ControlFlow::Continue(()),
                })
        };
        match resized {
            Ok(()) => self.ledger.complete_resize(&component.id, self.clock.now())?,
            Err(_) => self.ledger.abort_resize(&component.id)?,
        }
        self.reconcile_after_change()?;
        self.publish(link);
        match resized {
            Ok(()) => {
                let seconds = self.clock.micros().saturating_sub(started) as f64 / 1e6;
                tracing::info!(
                    component = component.name, id = %component.id, %before, %after, of = %component.bytes, seconds,
                    "another part is kept"
                );
                Ok(())
            }
            Err(
                error @ (LoadError::Cancelled
                | LoadError::OutOfMemory { .. }
                | LoadError::Fragmented { .. }
                | LoadError::StillInUse(_)
                | LoadError::Lost(_)),
            ) => Err(error.into()),
            Err(error) => {
                tracing::warn!(component = component.name, %error, "more of a component cannot be read: it is loaded anew");
                self.evict(component, ticket, link)?;
                Err(MoveError::NoRoom)
            }
        }
    }

    /// Unloads a component whose files were replaced while they were read, as its weights do not match its identity.
    fn take_back(&mut self, component: &Component, link: &mut dyn Link) -> Result<MoveError, MoveError> {
        let unloaded = self.gpu.unload(&component.id);
        // Also if the card reports an error: the ledger must not wait for a load that has ended.
        self.ledger.abort_load(&component.id)?;
        self.reconcile_after_change()?;
        self.publish(link);
        unloaded?;
        Ok(MoveError::replaced_while_read(&component.name))
    }

    /// Evicts a component, for an order or without one, and verifies it by the driver's figures.
    pub(super) fn evict(
        &mut self,
        component: &Component,
        ticket: Option<Ticket>,
        link: &mut dyn Link,
    ) -> Result<Unloaded, MoveError> {
        self.drop_kept();
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
            // The component is not on the card either way; the driver's figures show what happened to its bytes.
            Err(error @ (GpuError::NotLoaded(_) | GpuError::Truth(_))) => {
                tracing::error!(component = component.name, %error, "an unload could not be verified");
                Unloaded {
                    booked: component.bytes,
                    freed: Bytes::ZERO,
                }
            }
        };
        self.ledger.complete_evict(&component.id, self.clock.now())?;
        self.reconcile_after_change()?;
        let late = self.ledger.late();
        tracing::info!(
            component = component.name, id = %component.id, booked = %unloaded.booked, freed = %unloaded.freed, %late,
            "unloaded"
        );
        self.publish(link);
        Ok(unloaded)
    }

    /// Returns slack to the driver. The result is the number of bytes.
    pub(super) fn trim_slack(&mut self, link: &mut dyn Link) -> Result<Bytes, MoveError> {
        self.drop_kept();
        // Memory that other processes allocated meanwhile must not count as trimmed.
        self.reconcile_after_change()?;
        let trimmed = self.gpu.trim()?;
        self.ledger.complete_trim(trimmed, self.clock.now());
        self.reconcile_after_change()?;
        self.publish(link);
        Ok(trimmed)
    }

    /// Waits for late bytes until `done`, or until the timeout.
    pub(super) fn await_late(
        &mut self,
        until: Millis,
        done: impl Fn(&Ledger) -> bool,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        while self.ledger.late() > Bytes::ZERO && !done(&self.ledger) && self.clock.now() < until {
            self.clock.sleep(self.settings.poll_while_late);
            self.reconcile_after_change()?;
            self.publish(link);
        }
        Ok(())
    }

    /// Carries out the fault that is injected at this point, if any.
    pub(super) fn inject_fault(&mut self, place: &str) -> Result<(), MoveError> {
        match self.gpu.fault_at(place) {
            // A lost or poisoned card reports errors by itself from here on.
            None | Some(FaultAction::Lose | FaultAction::Poison | FaultAction::Leak) => Ok(()),
            Some(FaultAction::Hang) => {
                self.faults.hang(place);
                Ok(())
            }
            Some(FaultAction::Escape) => {
                self.faults.escape(place);
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

    /// The janitor, run on a card that has been idle for a while.
    pub(super) fn run_janitor(&mut self, link: &mut dyn Link) -> Result<(), MoveError> {
        self.drop_kept();
        self.on_host.clear();
        self.gpu.relieve_host();
        if should_trim(&self.ledger, self.settings.slack_limit)
            && self.ledger.accounts().slack > self.untrimmable_slack
        {
            let trimmed = self.trim_slack(link)?;
            let left = self.ledger.accounts().slack;
            let stays = left > self.settings.slack_limit;
            self.untrimmable_slack = if stays { left } else { Bytes::ZERO };
            tracing::info!(%trimmed, %left, "the janitor trimmed an idle card");
        }
        Ok(())
    }
}

/// A component with the bytes that a move brings, for reports.
fn moved(component: &Component, bytes: Bytes) -> Component {
    Component {
        bytes,
        ..component.clone()
    }
}

/// Progress events of one load: the first, the last, and some in between, rate-limited.
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
        // The last event is sent when the ledger has the component as resident.
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
