//! Runs a stage under its lease, with retries when it runs out of memory.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use gpu::{ComponentTensors, LoadError, Timeline};
use model::{Kept, Model, Observer, PassesLeftOut, Piece, Role, Rung, StageError, Values};
use ops::AttentionPaths;
use residency::{Bytes, MemorySummary, Millis};

use super::attempt::Halt;
use super::moves::MoveError;
use super::{Card, Clock, Link, canary};
use crate::messages::{
    Completed, Event, Failure, Outcome, Progress, StageMemory, StageWork, Ticket, Together,
};
use crate::need::Need;

/// Maximum bytes of a piece sent to the supervisor, unless one unit exceeds it.
const PIECE_BYTES: usize = 16 << 20;

/// A stage to run, with its inputs, and those that share its passes.
pub(super) struct StageAttempt<'a> {
    /// The order's own stage is the first.
    pub(super) stages: Vec<(Ticket, &'a StageWork)>,
    /// The part of this card, where another runs the stage with it.
    pub(super) together: Option<Together>,
    pub(super) need: &'a Need,
    pub(super) model: &'a dyn Model,
}

impl StageAttempt<'_> {
    /// The rung of this index.
    fn rung(&self, rung: usize) -> Option<&Rung> {
        self.need.rungs().get(rung)
    }

    fn label(&self, rung: usize) -> &str {
        self.rung(rung).map_or("", |rung| rung.label.as_str())
    }

    /// Reports progress to all jobs of the stage.
    fn report(&self, progress: &Progress, link: &mut dyn Link) {
        for (ticket, _) in &self.stages {
            link.emit(Event::Progress {
                ticket: *ticket,
                progress: progress.clone(),
            });
        }
    }
}

/// The values of each stage of an attempt, or its error.
type StageResults = Vec<Result<Values, StageError>>;

/// Failure of one run of a stage.
enum StageFailure {
    Error(StageError),
    /// It panicked, with this message.
    Panic(String),
}

impl Card {
    /// Runs stages whose components are resident, and returns their outcomes, with the report filled in. Out of memory: retries
    /// after a trim, then on smaller rungs, if those give the same result. A stage that another card runs too is not retried here: the
    /// other one is in the midst of it, and both have to begin again.
    pub(super) fn run_stage(
        &mut self,
        run: &StageAttempt<'_>,
        first_rung: usize,
        mut report: Completed,
        link: &mut dyn Link,
    ) -> Result<Vec<Outcome>, Halt> {
        let (mut rung, mut trimmed) = (first_rung, false);
        let started = self.clock.micros();
        let progress = Progress::Started {
            chunking: run.label(rung).to_owned(),
            memory: self.ledger.summary(),
        };
        run.report(&progress, link);
        loop {
            if run.stages.iter().all(|(ticket, _)| link.cancelled(*ticket)) {
                return Err(Halt::cancelled());
            }
            match self.run_once(run, rung, &mut report, link)? {
                Ok(given) => {
                    report.run_ms = self.clock.micros().saturating_sub(started) / 1000;
                    return self.outcomes(given, report);
                }
                Err(StageFailure::Error(error)) if ran_out_of_memory(&error) => {
                    let next = match (run.together, trimmed) {
                        (Some(_), _) => None,
                        (None, true) => next_rung(run, rung),
                        (None, false) => Some(rung),
                    };
                    let Some(next) = next else {
                        return Err(self.out_of_memory(run.need, rung));
                    };
                    let freed = self.trim_slack(link)?;
                    let message = retry_message(run, rung, next, freed);
                    tracing::warn!(stage = &*run.need.name, message, "out of memory in a stage");
                    let progress = Progress::Retrying {
                        reason: "OUT_OF_MEMORY".to_owned(),
                        message,
                    };
                    run.report(&progress, link);
                    (rung, trimmed) = (next, true);
                }
                Err(failed) => return Err(self.stage_failed(failed)),
            }
        }
    }

    /// The outcomes of stages that have run. They share one report, but only the first has the seconds of the loads.
    fn outcomes(&mut self, given: StageResults, mut report: Completed) -> Result<Vec<Outcome>, Halt> {
        let mut outcomes = Vec::with_capacity(given.len());
        for values in given {
            outcomes.push(match values {
                Ok(values) => {
                    let completed = Completed {
                        values,
                        ..report.clone()
                    };
                    Outcome::Completed(Box::new(completed))
                }
                Err(error) => match self.stage_failed(StageFailure::Error(error)) {
                    Halt::With(outcome) => *outcome,
                    lost @ Halt::Lost(_) => return Err(lost),
                },
            });
            report.load_seconds.clear();
        }
        Ok(outcomes)
    }

    /// Runs the stages once, on one rung. When it returns, the lease has ended and no tensor of the run is alive.
    fn run_once(
        &mut self,
        run: &StageAttempt<'_>,
        rung: usize,
        report: &mut Completed,
        link: &mut dyn Link,
    ) -> Result<Result<StageResults, StageFailure>, Halt> {
        let stage = run.need.on_rung(rung, None);
        let mut timeline = Timeline::begin("run");
        // Not handles of what is not whole on the card: blocks change while the stage runs, and host memory is given back.
        let is_whole = self.parts_of(run.need).next().is_none()
            && run.rung(rung).is_none_or(|rung| rung.from_host.is_empty());
        let keeps = run.stages.len() > 1 && is_whole;
        let taken = |card: &Card| match keeps {
            true => card.kept_for(run.need, stage.scratch),
            false => Bytes::ZERO,
        };
        self.drop_kept_where_tight(stage.scratch, taken(self))?;
        let on_host = self.components_on_host(run, rung, link)?;
        let taken = taken(self);
        let largest_block = self.defragment(stage.scratch, taken, link)?;
        self.reserve_where_tight(stage.scratch, taken, link)?;
        let room = self.ledger.usable();
        let before = self.ledger.summary();
        let lease = self
            .ledger
            .lease(&stage, self.clock.now())
            .map_err(Halt::internal)?;
        self.publish(link);
        let at_rest = self.own_bytes() - self.ledger.accounts().scratch;
        self.inject_fault(&run.need.name)?;
        self.gpu.begin_stage();
        let flops = run.need.plan.as_ref().map_or(0, |plan| {
            plan.passes.flops.on_card(self.gpu.describe().has_fp8_products())
        });
        self.gpu.expect_passes_of(flops);
        timeline.part("see that scratch can be had");
        let paths = AttentionPaths::now();
        let mut kept = match keeps {
            true => self.take_kept(run.need),
            false => Kept::default(),
        };
        let result = self.compute(run, rung, &on_host, (&mut kept, report), link);
        match keeps && result.is_ok() {
            true => self.hold_kept(run.need, kept, stage.scratch),
            false => drop(kept),
        }
        report.attention = AttentionPaths::since(paths);
        report.attention_in_fp8 = AttentionPaths::now().in_fp8 > paths.in_fp8;
        timeline.part("compute");
        let peak = self.gpu.stage_peak();
        self.ledger
            .release(lease, self.clock.now())
            .map_err(Halt::internal)?;
        self.reconcile_after_change()?;
        self.has_asked = true;
        let memory = StageMemory {
            before,
            after: self.ledger.summary(),
            largest_block,
        };
        log_memory(&run.need.name, &memory);
        report.memory = Some(memory);
        self.publish(link);
        timeline.part("measure the peak, ask the driver");
        if let Some(rung) = run.rung(rung) {
            report.chunking.clone_from(&rung.label);
            report.approximate = rung.approximate;
        }
        report.room = room;
        report.predicted_scratch = stage.scratch;
        report.peak_scratch = peak;
        report.peak_bytes = at_rest + peak;
        Ok(result)
    }

    /// Makes a stage's scratch available as one allocation, without what it takes of what is kept. The driver's free memory is in one
    /// piece where it remaps; slack is memory that activations have kept. Where the stage would depend on it, slack is
    /// returned first. A remaining shortage is logged, and the stage finds out whether it needs that much. Returns the largest
    /// block that the driver would give, at most `scratch`; `None` if slack and free memory each are enough.
    fn defragment(
        &mut self,
        scratch: Bytes,
        taken: Bytes,
        link: &mut dyn Link,
    ) -> Result<Option<Bytes>, MoveError> {
        let accounts = self.ledger.accounts();
        let scratch = scratch - taken;
        if scratch <= accounts.slack - taken && scratch <= self.ledger.largest_hole() {
            return Ok(None);
        }
        let mut largest = self.gpu.largest_allocation(scratch)?;
        if largest >= scratch {
            return Ok(Some(largest));
        }
        if accounts.slack > Bytes::ZERO {
            self.trim_slack(link)?;
            largest = self.gpu.largest_allocation(scratch)?;
        }
        if largest < scratch {
            let free = self.ledger.accounts().free;
            tracing::warn!(%scratch, %largest, %free, "memory for a stage is not there in one piece");
        }
        Ok(Some(largest))
    }

    /// Reserves a stage's scratch as one block, without what it takes of what is kept, if less than the same amount would stay free:
    /// then nothing has to be moved where the stage allocates in the order of its prediction.
    fn reserve_where_tight(
        &mut self,
        scratch: Bytes,
        taken: Bytes,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        let accounts = self.ledger.accounts();
        let further = scratch - taken;
        if (accounts.free + accounts.slack) - scratch >= further {
            return Ok(());
        }
        if accounts.slack > Bytes::ZERO {
            self.trim_slack(link)?;
        }
        self.gpu.reserve_scratch(scratch)?;
        self.reconcile_after_change()
    }

    /// Runs the family's computation. A panic ends the stage only: tensors are dropped during unwinding.
    fn compute(
        &mut self,
        run: &StageAttempt<'_>,
        rung: usize,
        on_host: &[(String, Arc<ComponentTensors>)],
        (kept, report): (&mut Kept, &mut Completed),
        link: &mut dyn Link,
    ) -> Result<StageResults, StageFailure> {
        let Some((first, _)) = run.stages.split_first() else {
            return Ok(StageResults::new());
        };
        let gpu = &*self.gpu;
        let tensors = |name: &str| -> Result<Arc<ComponentTensors>, StageError> {
            if let Some((_, tensors)) = on_host.iter().find(|(on_host, _)| on_host == name) {
                return Ok(Arc::clone(tensors));
            }
            let component = run.need.components.iter().find(|c| c.name == name);
            let component = component
                .ok_or_else(|| StageError::BadInput(format!("{name} is not among the stage's components")))?;
            gpu.tensors(&component.id)
                .map_err(|error| StageError::BadInput(error.to_string()))
        };
        let mut watch = Watch {
            tickets: run.stages.iter().map(|(ticket, _)| *ticket).collect(),
            link,
            clock: &*self.clock,
            preview_interval: u64::from(first.1.preview_interval_ms),
            last_preview: None,
            last_step: 0,
            left_out: None,
            delivered: Bytes::ZERO,
            together: run.together,
            timeline: Timeline::begin("compute"),
        };
        let stages = run
            .stages
            .iter()
            .enumerate()
            .map(|(number, (_, work))| model::StageRun {
                // With the rungs of this card, of which `rung` is one.
                plan: match (number, &run.need.plan) {
                    (0, Some(plan)) => plan,
                    _ => &work.plan,
                },
                rung,
                request: &work.request,
                values: &work.values,
                tensors: &tensors,
                device: gpu.device(),
                part: run.together.map(|together| together.part),
            });
        let stages: Vec<_> = stages.collect();
        let mathematics = || match &stages[..] {
            [alone] => Ok(vec![Ok(run.model.run(alone, &mut watch)?)]),
            shared => run.model.run_shared(shared, kept, &mut watch),
        };
        // The closure's state is either read-only or, like the link, consistent at any point.
        let given = catch_unwind(AssertUnwindSafe(mathematics));
        report.passes_left_out = watch.left_out;
        match given {
            Ok(Ok(given)) if given.len() == stages.len() => Ok(given),
            Ok(Ok(given)) => {
                let (given, stages) = (given.len(), stages.len());
                let problem = format!("{stages} stages in shared passes gave {given} results");
                Err(StageFailure::Panic(problem))
            }
            Ok(Err(error)) => Err(StageFailure::Error(error)),
            Err(panic) => Err(StageFailure::Panic(panic_message(&*panic))),
        }
    }

    /// Converts a failure to the attempt's outcome. If the card may be at fault, runs the canary.
    fn stage_failed(&mut self, failed: StageFailure) -> Halt {
        match failed {
            StageFailure::Error(StageError::Cancelled) => Halt::cancelled(),
            StageFailure::Error(StageError::NotFinite { component, step }) => {
                Halt::failed(Failure::NotFinite { component, step })
            }
            StageFailure::Error(StageError::BadInput(message)) => Halt::failed(Failure::BadInput(message)),
            StageFailure::Error(StageError::Weights(LoadError::Lost(reason))) => Halt::Lost(reason),
            StageFailure::Error(error @ (StageError::Missing { .. } | StageError::Weights(_))) => {
                Halt::failed(Failure::Model {
                    message: error.to_string(),
                })
            }
            StageFailure::Error(error @ (StageError::Tensor(_) | StageError::OutOfMemory { .. })) => {
                self.internal_unless_lost(error.to_string())
            }
            StageFailure::Panic(words) => self.internal_unless_lost(format!("the stage panicked: {words}")),
        }
    }

    fn internal_unless_lost(&mut self, message: String) -> Halt {
        tracing::error!(message, "a stage failed");
        match canary::compute(self.gpu.device(), self.gpu.compute_dtype()) {
            Ok(()) => Halt::internal(message),
            Err(reason) => Halt::Lost(format!("{message}; then the card failed a computation: {reason}")),
        }
    }
}

fn log_memory(stage: &str, memory: &StageMemory) {
    let reserved = |at: &MemorySummary| at.accounts.components + at.accounts.scratch + at.accounts.slack;
    let StageMemory { before, after, .. } = memory;
    tracing::debug!(
        stage,
        free_before = %before.accounts.free, reserved_before = %reserved(before),
        free_after = %after.accounts.free, reserved_after = %reserved(after),
        "memory of the card"
    );
}

/// The next rung with a smaller prediction. Sampling is not restarted on another rung: it fails.
fn next_rung(run: &StageAttempt<'_>, rung: usize) -> Option<usize> {
    match run.need.plan.as_ref()?.role {
        Role::Sample => None,
        Role::Encode | Role::Decode => {
            let needed = run.rung(rung)?.scratch;
            let rungs = run.need.rungs();
            (rung + 1..rungs.len()).find(|&next| rungs[next].scratch < needed)
        }
    }
}

fn retry_message(run: &StageAttempt<'_>, rung: usize, next: usize, freed: Bytes) -> String {
    if rung == next {
        return format!(
            "out of memory ({}): {freed} handed back, trying once more",
            run.label(rung)
        );
    }
    format!("out of memory ({}): trying {}", run.label(rung), run.label(next))
}

/// Whether the error is a lack of memory: as families report it, or as an error of the tensor library.
fn ran_out_of_memory(error: &StageError) -> bool {
    match error {
        StageError::OutOfMemory { .. } => true,
        StageError::Tensor(error) => model::is_out_of_memory(error),
        StageError::Cancelled
        | StageError::NotFinite { .. }
        | StageError::BadInput(_)
        | StageError::Weights(_)
        | StageError::Missing { .. } => false,
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without words")
        .to_owned()
}

/// The observer of a running stage.
struct Watch<'a> {
    /// Tickets of the stages that run, the order's own first.
    tickets: Vec<Ticket>,
    link: &'a mut dyn Link,
    clock: &'a dyn Clock,
    /// Minimum milliseconds between previews; 0 for none.
    preview_interval: u64,
    last_preview: Option<Millis>,
    last_step: u32,
    /// Passes that its own stage has left out.
    left_out: Option<PassesLeftOut>,
    /// Bytes of the pieces that it has delivered.
    delivered: Bytes,
    together: Option<Together>,
    /// Timeline of its steps.
    timeline: Timeline,
}

impl Watch<'_> {
    /// Reports progress of the order's own stage.
    fn report(&mut self, progress: Progress) {
        self.report_of(0, progress);
    }

    fn report_of(&mut self, stage: usize, progress: Progress) {
        if let Some(&ticket) = self.tickets.get(stage) {
            self.link.emit(Event::Progress { ticket, progress });
        }
    }
}

impl Observer for Watch<'_> {
    fn step(&mut self, n: u32, of: u32) {
        self.timeline.part("step, with what is between");
        self.report(Progress::Step { n, of });
        self.last_step = n;
    }

    fn step_of(&mut self, stage: usize, n: u32, of: u32) {
        if stage == 0 {
            return self.step(n, of);
        }
        self.report_of(stage, Progress::Step { n, of });
    }

    fn meet(&mut self, offer: &[u8]) -> Result<Vec<u8>, StageError> {
        let Some(&ticket) = self.tickets.first().filter(|_| self.together.is_some()) else {
            return Err(StageError::BadInput("no other card runs this stage".to_owned()));
        };
        self.check_cancelled()?;
        let offer = bytes::Bytes::copy_from_slice(offer);
        self.link.emit(Event::Offer { ticket, offer });
        let others = self.link.next_offer(ticket).ok_or(StageError::Cancelled)?;
        self.timeline.part("meet the other card");
        Ok(others.into())
    }

    fn left_out(&mut self, passes: PassesLeftOut) {
        self.left_out = Some(passes);
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
            self.delivered += Bytes(piece.data.len() as u64);
            self.report(Progress::Piece(piece));
            if let Some(&ticket) = self.tickets.first() {
                self.link.wait_until_taken(ticket, self.delivered);
            }
        }
    }

    fn cancelled(&self) -> bool {
        self.tickets.iter().all(|ticket| self.link.cancelled(*ticket))
    }

    fn is_cancelled(&self, stage: usize) -> bool {
        let ticket = self.tickets.get(stage);
        ticket.is_some_and(|ticket| self.link.cancelled(*ticket))
    }
}
