//! A stage under its lease, and what is tried when its memory is not enough.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use gpu::{ComponentTensors, Timeline};
use pipelines::{AttentionPaths, Model, Observer, Piece, Role, StageError, Values};
use residency::{Bytes, Millis};

use super::attempt::{Halt, Need};
use super::moves::MoveError;
use super::{Card, Clock, Link, canary};
use crate::messages::{Completed, Event, Failure, Progress, StageWork, Ticket};

/// Bytes of a piece that leaves the card's process at once, unless one unit has more.
const PIECE_BYTES: usize = 16 << 20;

/// A stage that is to run, and with what.
pub(super) struct Attempted<'a> {
    pub(super) ticket: Ticket,
    pub(super) work: &'a StageWork,
    pub(super) need: Need<'a>,
    pub(super) model: &'a dyn Model,
}

/// How one run of a stage failed.
enum Failed {
    /// As the stage says.
    Error(StageError),
    /// It panicked, with these words.
    Panic(String),
}

impl Card {
    /// Runs a stage for which everything is resident, and fills in the report. Out of memory: once more after a trim,
    /// then, where the result is the same in smaller pieces, down the ladder.
    pub(super) fn run_stage(
        &mut self,
        run: &Attempted<'_>,
        first_rung: usize,
        report: &mut Completed,
        link: &mut dyn Link,
    ) -> Result<(), Halt> {
        let Attempted {
            ticket,
            work,
            ref need,
            ..
        } = *run;
        let (mut rung, mut trimmed) = (first_rung, false);
        let started = self.clock.micros();
        let chunking = work
            .plan
            .rungs
            .get(rung)
            .map(|r| r.label.clone())
            .unwrap_or_default();
        link.emit(Event::Progress {
            ticket,
            progress: Progress::Started { chunking },
        });
        loop {
            if link.cancelled(ticket) {
                return Err(Halt::cancelled());
            }
            match self.run_once(run, rung, report, link)? {
                Ok(values) => {
                    report.values = values;
                    report.run_ms = self.clock.micros().saturating_sub(started) / 1000;
                    return Ok(());
                }
                Err(Failed::Error(error)) if ran_out_of_memory(&error) => {
                    let next = if trimmed {
                        next_rung(work, rung)
                    } else {
                        Some(rung)
                    };
                    let Some(next) = next else {
                        return Err(self.out_of_memory(need, rung));
                    };
                    let freed = self.hand_back_slack(link)?;
                    let message = retry_message(work, rung, next, freed);
                    tracing::warn!(stage = need.name, message, "out of memory in a stage");
                    let progress = Progress::Retrying {
                        reason: "OUT_OF_MEMORY".to_owned(),
                        message,
                    };
                    link.emit(Event::Progress { ticket, progress });
                    (rung, trimmed) = (next, true);
                }
                Err(failed) => return Err(self.stage_failed(failed)),
            }
        }
    }

    /// One run at one rung. When it returns, nothing is leased and no tensor of it is left.
    fn run_once(
        &mut self,
        run: &Attempted<'_>,
        rung: usize,
        report: &mut Completed,
        link: &mut dyn Link,
    ) -> Result<Result<Values, Failed>, Halt> {
        let stage = run.need.at(rung);
        let mut timeline = Timeline::begin("run");
        self.gather(stage.scratch, link)?;
        let room = self.ledger.usable();
        let lease = self
            .ledger
            .lease(&stage, self.clock.now())
            .map_err(Halt::internal)?;
        self.publish(link);
        self.log_memory(run.need.name, "before");
        let at_rest = self.ours() - self.ledger.accounts().scratch;
        self.suffer(run.need.name)?;
        self.gpu.begin_stage();
        timeline.part("see that scratch can be had");
        let before = AttentionPaths::now();
        let result = self.compute(run, rung, link);
        report.attention = AttentionPaths::since(before);
        timeline.part("compute");
        let peak = self.gpu.stage_peak();
        self.ledger
            .release(lease, self.clock.now())
            .map_err(Halt::internal)?;
        self.look_again()?;
        self.log_memory(run.need.name, "after");
        self.publish(link);
        timeline.part("measure the peak, ask the driver");
        if let Some(rung) = run.work.plan.rungs.get(rung) {
            report.chunking.clone_from(&rung.label);
            report.approximate = rung.approximate;
        }
        report.room = room;
        report.predicted_scratch = stage.scratch;
        report.peak_scratch = peak;
        report.peak_bytes = at_rest + peak;
        Ok(result)
    }

    /// Sees to it that a stage's scratch can be had in one piece, where the driver is to supply it: slack that lies
    /// between is handed back. What is still missing then shows in the log, and the stage finds out what it needs of it.
    fn gather(&mut self, scratch: Bytes, link: &mut dyn Link) -> Result<(), MoveError> {
        let slack = self.ledger.accounts().slack;
        if scratch <= slack {
            return Ok(()); // the pool has it
        }
        let mut largest = self.gpu.largest_allocation(scratch)?;
        if largest < scratch && slack > Bytes::ZERO {
            self.hand_back_slack(link)?;
            largest = self.gpu.largest_allocation(scratch)?;
        }
        let free = self.ledger.accounts().free;
        tracing::info!(%scratch, %largest, %free, "the largest allocation that would succeed");
        if largest < scratch {
            tracing::warn!(%scratch, %largest, %free, "memory for a stage is not there in one piece");
        }
        Ok(())
    }

    /// The family's mathematics, observed. A panic ends the stage only: tensors are dropped on its way up.
    fn compute(&mut self, run: &Attempted<'_>, rung: usize, link: &mut dyn Link) -> Result<Values, Failed> {
        let Attempted {
            ticket, work, model, ..
        } = *run;
        let gpu = &*self.gpu;
        let plan = &work.plan;
        let tensors = |name: &str| -> Result<Arc<ComponentTensors>, StageError> {
            let component = work.components.iter().find(|c| c.name == name);
            let component = component
                .ok_or_else(|| StageError::BadInput(format!("{name} is not among the stage's components")))?;
            gpu.tensors(&component.id)
                .map_err(|error| StageError::BadInput(error.to_string()))
        };
        let mut watch = Watch {
            ticket,
            link,
            clock: &*self.clock,
            preview_interval: u64::from(work.preview_interval_ms),
            last_preview: None,
            last_step: 0,
            timeline: Timeline::begin("compute"),
        };
        let stage = pipelines::StageRun {
            plan,
            rung,
            request: &work.request,
            values: &work.values,
            tensors: &tensors,
            device: gpu.device(),
        };
        let mathematics = || model.run(&stage, &mut watch);
        // What the closure touches is either read only or, like the link, has no state that half a step could break.
        match catch_unwind(AssertUnwindSafe(mathematics)) {
            Ok(result) => result.map_err(Failed::Error),
            Err(panic) => Err(Failed::Panic(words_of(&*panic))),
        }
    }

    /// Turns a failure into the attempt's answer. Where it may be the card's fault, the card is asked to prove itself.
    fn stage_failed(&mut self, failed: Failed) -> Halt {
        match failed {
            Failed::Error(StageError::Cancelled) => Halt::cancelled(),
            Failed::Error(StageError::NotFinite { component, step }) => {
                Halt::failed(Failure::NotFinite { component, step })
            }
            Failed::Error(StageError::BadInput(message)) => Halt::failed(Failure::BadInput(message)),
            Failed::Error(error @ StageError::Missing { .. }) => Halt::failed(Failure::Model {
                message: error.to_string(),
            }),
            Failed::Error(error @ (StageError::Tensor(_) | StageError::OutOfMemory { .. })) => {
                self.internal_unless_lost(error.to_string())
            }
            Failed::Panic(words) => self.internal_unless_lost(format!("the stage panicked: {words}")),
        }
    }

    fn internal_unless_lost(&mut self, message: String) -> Halt {
        tracing::error!(message, "a stage failed");
        match canary::compute(self.gpu.device(), self.gpu.compute_dtype()) {
            Ok(()) => Halt::internal(message),
            Err(reason) => Halt::Lost(format!("{message}; then the card failed a computation: {reason}")),
        }
    }

    fn log_memory(&self, stage: &str, when: &str) {
        let accounts = self.ledger.accounts();
        let allocated = accounts.components + accounts.scratch;
        let reserved = allocated + accounts.slack;
        tracing::info!(stage, when, free = %accounts.free, %allocated, %reserved, "memory of the card");
    }
}

/// The next rung that is predicted to need less. Sampling is not cut into pieces, nor begun again for less: it ends here.
fn next_rung(work: &StageWork, rung: usize) -> Option<usize> {
    match work.plan.role {
        Role::Sample => None,
        Role::Encode | Role::Decode => {
            let needed = work.plan.rungs.get(rung)?.scratch;
            (rung + 1..work.plan.rungs.len()).find(|&next| work.plan.rungs[next].scratch < needed)
        }
    }
}

fn retry_message(work: &StageWork, rung: usize, next: usize, freed: Bytes) -> String {
    let label = |rung: usize| work.plan.rungs.get(rung).map_or("", |r| r.label.as_str());
    if rung == next {
        return format!(
            "out of memory ({}): {freed} handed back, trying once more",
            label(rung)
        );
    }
    format!("out of memory ({}): trying {}", label(rung), label(next))
}

/// Whether memory is what was missing. Families say so; where one let the tensor library's own error through, that does.
fn ran_out_of_memory(error: &StageError) -> bool {
    match error {
        StageError::OutOfMemory { .. } => true,
        StageError::Tensor(error) => pipelines::is_out_of_memory(error),
        StageError::Cancelled
        | StageError::NotFinite { .. }
        | StageError::BadInput(_)
        | StageError::Missing { .. } => false,
    }
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without words")
        .to_owned()
}

/// What a running stage sees of the world.
struct Watch<'a> {
    ticket: Ticket,
    link: &'a mut dyn Link,
    clock: &'a dyn Clock,
    /// Least milliseconds between previews; 0: none.
    preview_interval: u64,
    last_preview: Option<Millis>,
    last_step: u32,
    /// Of its steps.
    timeline: Timeline,
}

impl Watch<'_> {
    fn report(&mut self, progress: Progress) {
        self.link.emit(Event::Progress {
            ticket: self.ticket,
            progress,
        });
    }
}

impl Observer for Watch<'_> {
    fn step(&mut self, n: u32, of: u32) {
        self.timeline.part("step, with what is between");
        self.report(Progress::Step { n, of });
        self.last_step = n;
    }

    fn wants_preview(&mut self) -> bool {
        let now = self.clock.now();
        self.preview_interval > 0
            && self
                .last_preview
                .is_none_or(|last| now.since(last) >= self.preview_interval)
    }

    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        self.last_preview = Some(self.clock.now());
        let step = self.last_step;
        self.report(Progress::Preview {
            step,
            width,
            height,
            rgb: rgb.into(),
        });
    }

    fn deliver(&mut self, piece: Piece) {
        for piece in piece.cut(PIECE_BYTES) {
            self.report(Progress::Piece(piece));
        }
    }

    fn cancelled(&self) -> bool {
        self.link.cancelled(self.ticket)
    }
}
