//! One attempt at an order: opens the model, reconciles with the driver, makes moves until the plan has none left,
//! and runs the stage.

use std::path::Path;
use std::sync::Arc;

use gpu::{LoadPlan, Timeline};
use model::{Model, ModelError, ModelFile, Values};
use ops::Planned;
use residency::{Bytes, Component, ComponentId, Move, WaitCause};

use super::moves::{MoveError, Source, replaced_while_read};
use super::stage::StageAttempt;
use super::{Card, Flow, Link};
use crate::admission::{Admission, choose_rung, choose_rung_low_memory, not_resident_yet};
use crate::messages::{Completed, Event, Failure, Order, Outcome, Progress, Shortage, StageWork, Work};
use crate::need::Need;

/// Maximum of plans per attempt: moves may free less than planned, because other processes allocate or freed bytes
/// are late.
const MAX_PLANS: usize = 4;

/// Why an attempt ended early.
#[derive(Debug)]
pub(super) enum Halt {
    /// The attempt ended with this outcome; the card is healthy.
    With(Box<Outcome>),
    /// The card is lost.
    Lost(String),
}

impl Halt {
    pub(super) fn failed(failure: Failure) -> Halt {
        Halt::With(Box::new(Outcome::Failed(failure)))
    }

    pub(super) fn internal(message: impl ToString) -> Halt {
        Halt::failed(Failure::Internal(message.to_string()))
    }

    pub(super) fn cancelled() -> Halt {
        Halt::With(Box::new(Outcome::Cancelled))
    }
}

impl From<MoveError> for Halt {
    fn from(error: MoveError) -> Halt {
        match error {
            MoveError::Cancelled => Halt::cancelled(),
            MoveError::NoRoom => Halt::internal("memory that the plan counted on was taken"),
            MoveError::Model(message) => Halt::failed(Failure::Model { message }),
            MoveError::Replaced(message) => Halt::failed(Failure::Replaced { message }),
            MoveError::Refused(message) => Halt::internal(message),
            MoveError::Lost(reason) => Halt::Lost(reason),
        }
    }
}

impl Card {
    /// Runs one attempt, and emits exactly one outcome, and one for each stage that shares its passes, unless the card is lost.
    pub(super) fn run(&mut self, order: &Order, link: &mut dyn Link) -> Flow {
        let need = Need::of_order(order);
        let span = tracing::info_span!("order", job = order.job, stage = &*need.name);
        let _entered = span.enter();
        link.emit(Event::Progress {
            ticket: order.ticket,
            progress: Progress::Begun,
        });
        // So that the supervisor knows of it, whatever the order does to this process. Of an order that was sent ahead it may not
        // know: the card does not wait for the frames of the order before. After a death none is sent ahead for the jobs of both.
        if !order.is_ahead {
            link.flush();
        }
        let outcomes = match self.attempt(order, &need, link) {
            Ok(outcomes) => outcomes,
            Err(Halt::With(outcome)) => vec![*outcome; 1 + order.sharing.len()],
            Err(Halt::Lost(reason)) => {
                tracing::error!(reason, "the card is lost");
                return Flow::Lost(reason);
            }
        };
        self.publish(link);
        // The order's own outcome is the last, as the card is free after it.
        for (ticket, outcome) in order
            .tickets()
            .zip(outcomes)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
        {
            link.emit(Event::Finished { ticket, outcome });
        }
        Flow::Continue
    }

    /// The outcome of the order, and of each stage that shares its passes.
    fn attempt(&mut self, order: &Order, need: &Need, link: &mut dyn Link) -> Result<Vec<Outcome>, Halt> {
        // Only an order that was sent ahead begins where the one before ends.
        self.has_asked &= order.is_ahead;
        if order.tickets().all(|ticket| link.cancelled(ticket)) {
            return Err(Halt::cancelled());
        }
        if matches!(order.work, Work::Stage(_)) && need.rungs().is_empty() {
            let problem = "a stage without a way to run it".to_owned();
            return Err(Halt::failed(Failure::BadInput(problem)));
        }
        let mut timeline = Timeline::begin(need.name.to_string());
        let model = self.model_of(order, need)?;
        timeline.part("open the model");
        if let Work::Stage(work) = &order.work {
            self.plan_ahead(&*model, &order.job, work);
            timeline.part("have plans made");
        }
        let resident_already = need.components.iter().filter(|c| self.ledger.is_resident(&c.id));
        let resident_already = resident_already.map(|c| c.name.clone()).collect();

        let started = self.clock.micros();
        let mut load_seconds = Vec::new();
        let rung = self.make_moves(order, need, &*model, &mut load_seconds, link)?;
        let move_ms = self.clock.micros().saturating_sub(started) / 1000;
        timeline.part("plan and move");

        let completed = Completed {
            values: Values::new(),
            chunking: String::new(),
            approximate: false,
            passes_left_out: None,
            attention_in_fp8: false,
            resident_already,
            move_ms,
            run_ms: 0,
            room: self.ledger.usable(),
            predicted_scratch: Bytes::ZERO,
            peak_scratch: Bytes::ZERO,
            peak_bytes: self.own_bytes(),
            memory: None,
            attention: String::new(),
            load_seconds,
        };
        let outcomes = match &order.work {
            // A load starts when its components are resident, and has nothing left to do then.
            Work::Load(_) => {
                link.emit(Event::Progress {
                    ticket: order.ticket,
                    progress: Progress::Started {
                        chunking: String::new(),
                        memory: self.ledger.summary(),
                    },
                });
                vec![Outcome::Completed(Box::new(completed))]
            }
            Work::Stage(work) => {
                let own = (order.ticket, &**work);
                let sharing = order
                    .sharing
                    .iter()
                    .map(|sharing| (sharing.ticket, &sharing.work));
                let run = StageAttempt {
                    stages: std::iter::once(own).chain(sharing).collect(),
                    together: order.together,
                    need,
                    model: &*model,
                };
                let parts: Vec<Component> = self.parts_of(need).cloned().collect();
                let ended = self.run_stage(&run, rung, completed, link);
                let outcomes = self.check_parts(&parts, &*model, ended, link)?;
                timeline.part("run");
                outcomes
            }
        };
        timeline.end();
        Ok(outcomes)
    }

    /// The components of a stage of which blocks are read while it runs.
    pub(super) fn parts_of<'a>(&self, need: &'a Need) -> impl Iterator<Item = &'a Component> {
        let is_part = |c: &&Component| self.ledger.is_resident(&c.id) && !self.is_read(&c.id);
        need.components.iter().filter(is_part)
    }

    /// Whether all of a component is on the card, and nothing of it is read any more.
    fn is_read(&self, id: &ComponentId) -> bool {
        self.ledger.is_whole(id) && !self.gpu.has_unread(id)
    }

    /// The outcomes of a stage that read these components while it ran. If their files were replaced meanwhile, what it read is of no
    /// one version, whether it could be read or not. Components whose files are not as they were leave the card: a later stage has to
    /// open them anew.
    fn check_parts(
        &mut self,
        parts: &[Component],
        model: &dyn Model,
        ended: Result<Vec<Outcome>, Halt>,
        link: &mut dyn Link,
    ) -> Result<Vec<Outcome>, Halt> {
        if parts.is_empty() || matches!(ended, Err(Halt::Lost(_))) {
            return ended;
        }
        let is_replaced = |c: &&Component| !model.files_of(&c.name).iter().all(ModelFile::is_current);
        let replaced = parts.iter().find(is_replaced);
        let mut is_unread = replaced.is_some();
        let mut check = |outcome: Outcome| {
            is_unread |= matches!(outcome, Outcome::Failed(Failure::Model { .. }));
            let depends_on_files = matches!(
                outcome,
                Outcome::Completed(_) | Outcome::Failed(Failure::Model { .. } | Failure::NotFinite { .. })
            );
            match replaced.filter(|_| depends_on_files) {
                Some(component) => Outcome::Failed(Failure::Replaced {
                    message: replaced_while_read(&component.name),
                }),
                None => outcome,
            }
        };
        let ended = match ended {
            Ok(outcomes) => Ok(outcomes.into_iter().map(check).collect()),
            Err(Halt::With(outcome)) => Err(Halt::With(Box::new(check(*outcome)))),
            Err(lost @ Halt::Lost(_)) => Err(lost),
        };
        if is_unread {
            for component in parts {
                let is_free = |r: &residency::Resident| r.leases == 0;
                if self.ledger.resident(&component.id).is_some_and(is_free) {
                    self.evict(component, None, link)?;
                }
            }
        }
        ended
    }

    /// The model of an order, of the versions that it names. If its files have been replaced since, the order goes on with
    /// the earlier version, as long as all of its components are resident.
    fn model_of(&mut self, order: &Order, need: &Need) -> Result<Arc<dyn Model>, Halt> {
        let opened = self.open(order);
        let refused = match opened.and_then(|model| check(order, need, &*model).map(|()| model)) {
            Ok(model) => {
                self.models.checked(&order.model, &need.components);
                return Ok(model);
            }
            Err(refused) => refused,
        };
        let is_read = need.components.iter().all(|c| self.is_read(&c.id));
        let held = self.models.opened_as(&order.model, &need.components);
        let held = held.filter(|_| is_read).ok_or(refused)?;
        let (job, model) = (&order.job, &order.model.key);
        tracing::info!(
            job,
            model,
            "the files of its model were replaced: the job continues with the resident components"
        );
        Ok(held)
    }

    fn open(&mut self, order: &Order) -> Result<Arc<dyn Model>, Halt> {
        self.models.open(&order.model).map_err(|error| {
            tracing::warn!(job = order.job, model = order.model.key, %error, "a model cannot be opened");
            let message = error.to_string();
            Halt::failed(match error {
                ModelError::NotAPipeline { .. } | ModelError::Unsupported { .. } => {
                    Failure::Unsupported { message }
                }
                ModelError::Damaged { .. }
                | ModelError::Incomplete { .. }
                | ModelError::Quantization { .. }
                | ModelError::Adapter { .. } => Failure::Model { message },
            })
        })
    }

    /// Starts background compilation of the plans of this stage and later ones, while weights are loaded. A job's first order on this
    /// card does it for all of them: a stage of a few milliseconds would wait for the list of shapes alone.
    fn plan_ahead(&mut self, model: &dyn Model, job: &str, work: &StageWork) {
        if !self.gpu.device().is_cuda() || !self.listed.takes(job, work) {
            return;
        }
        let of_stage = model.planned(&work.plan.name, &work.request);
        let later = work.later_request.iter().flat_map(|request| {
            let stages = work.later_stages.iter();
            stages.flat_map(|stage| model.planned(stage, request))
        });
        let planned: Vec<Planned> = of_stage.into_iter().chain(later).collect();
        ops::make_plans(self.gpu.device(), &planned);
    }

    /// Makes moves until a plan has none left, and returns that plan's rung.
    fn make_moves(
        &mut self,
        order: &Order,
        need: &Need,
        model: &dyn Model,
        load_seconds: &mut Vec<(ComponentId, f64)>,
        link: &mut dyn Link,
    ) -> Result<usize, Halt> {
        for _ in 0..MAX_PLANS {
            if !std::mem::take(&mut self.has_asked) {
                self.reconcile()?;
                self.publish(link);
            }
            let (rung, moves) = self.admit(order, need)?;
            if moves.is_empty() {
                return Ok(rung);
            }
            match self.carry_out(&moves, order, model, load_seconds, link) {
                Ok(()) => {}
                Err(MoveError::NoRoom) => {
                    self.trim_slack(link)?;
                    // A shortage is detected by the next plan, except in a low-memory plan.
                    let late = self.ledger.late();
                    if order.allow_low_memory && late > Bytes::ZERO {
                        return Err(self.wait(need, rung, late, WaitCause::LateEviction));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        let last = need.rungs().len().saturating_sub(1);
        Err(self.out_of_memory(need, last))
    }

    /// The rung to run and the moves before it; or the outcome if there is none.
    fn admit(&self, order: &Order, need: &Need) -> Result<(usize, Vec<Move>), Halt> {
        let now = self.clock.now();
        let admission = choose_rung(&self.ledger, need, order.policy, now);
        if let Admission::Run { rung, moves } = admission {
            return Ok((rung, moves));
        }
        if order.allow_low_memory
            && let Some(low) = choose_rung_low_memory(&self.ledger, need, order.policy, now)
        {
            tracing::warn!(job = order.job, stage = &*need.name, short = %low.short, "admitted although memory is short");
            return Ok((low.rung, low.moves));
        }
        match admission {
            Admission::Run { rung, moves } => Ok((rung, moves)),
            Admission::Wait { rung, short, cause } => Err(self.wait(need, rung, short, cause)),
            Admission::Never { needed, capacity } => {
                Err(Halt::With(Box::new(Outcome::Never { needed, capacity })))
            }
        }
    }

    fn wait(&self, need: &Need, rung: usize, short: Bytes, cause: WaitCause) -> Halt {
        let shortage = Shortage {
            short,
            needed: not_resident_yet(&self.ledger, &need.components_on(rung), need.scratch(rung)),
            usable: self.ledger.usable(),
            cause,
            holders: self.ledger.holders(),
        };
        Halt::With(Box::new(Outcome::Wait(shortage)))
    }

    /// Out of memory despite admission.
    pub(super) fn out_of_memory(&self, need: &Need, rung: usize) -> Halt {
        Halt::failed(Failure::OutOfMemory {
            stage: need.name.to_string(),
            needed: need.on_rung(rung, None).peak(),
            usable: self.ledger.usable(),
            holders: self.ledger.holders(),
        })
    }

    fn carry_out(
        &mut self,
        moves: &[Move],
        order: &Order,
        model: &dyn Model,
        load_seconds: &mut Vec<(ComponentId, f64)>,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        let ticket = order.ticket;
        for each in moves {
            if link.cancelled(ticket) {
                return Err(MoveError::Cancelled);
            }
            match each {
                Move::Evict(component) => {
                    self.evict(component, Some(ticket), link)?;
                }
                Move::Trim => {
                    self.trim_slack(link)?;
                }
                Move::Resize(component, part) => {
                    self.resize(component, *part, Some(ticket), link)?;
                }
                Move::Load(component, part) => {
                    let plan = model.load_plan(&component.name).ok_or_else(|| {
                        MoveError::Model(format!("the model has no component {}", component.name))
                    })?;
                    let kept = order.model.kept.iter();
                    let copy = kept
                        .filter(|(name, _)| *name == component.name)
                        .find_map(|(_, path)| from_copy(path, plan));
                    let source = Source {
                        plan,
                        copy: copy.as_ref(),
                        files: &model.files_of(&component.name),
                        before_a_stage: matches!(order.work, Work::Stage(_)),
                    };
                    let loaded = self.load(component, *part, &source, ticket, link)?;
                    // What all of it would take, by what was read.
                    let share = loaded.bytes.0 as f64 / component.bytes.0.max(1) as f64;
                    load_seconds.push((
                        component.id.clone(),
                        loaded.seconds / share.max(f64::MIN_POSITIVE),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Bytes on the card allocated by us, without slack.
    pub(super) fn own_bytes(&self) -> Bytes {
        let accounts = self.ledger.accounts();
        accounts.components + accounts.scratch + accounts.workspaces + accounts.context
    }
}

/// The plan that reads a kept copy instead, if there is a valid one.
fn from_copy(path: &Path, plan: &LoadPlan) -> Option<LoadPlan> {
    gpu::kept_plan(path, plan)
        .inspect_err(|error| tracing::warn!(%error, "a kept copy is not used: its checkpoint is"))
        .ok()
}

fn changed(order: &Order, problem: &str) -> Halt {
    let key = &order.model.key;
    Halt::failed(Failure::Replaced {
        message: format!("{key} has changed since the job was accepted: {problem}"),
    })
}

/// Whether a component's files are the versions that its identity was computed from. A resident component with the identity
/// of other versions holds other weights.
fn check_version(order: &Order, component: &Component, model: &dyn Model) -> Result<(), Halt> {
    let files = model.files_of(&component.name);
    let mut own = model.components().iter();
    let Some(own) = own.find(|own| own.name == component.name && !files.is_empty()) else {
        return Ok(()); // without files there are no versions, and the caller reports a name that is not there
    };
    let by_content = order.model.identities.iter();
    let by_content = by_content.filter(|(content, _)| *content == component.id);
    let is_this = own.id == component.id || by_content.into_iter().any(|(_, files)| *files == own.id);
    if is_this && files.iter().all(ModelFile::is_current) {
        return Ok(());
    }
    Err(changed(
        order,
        &format!("the files of its {} were replaced", component.name),
    ))
}

/// Checks that the order matches this version of the model. The supervisor opened the same files, but maybe at another time:
/// names and bytes of the order's components must equal the model's. Their identities are the supervisor's alone.
fn check(order: &Order, need: &Need, model: &dyn Model) -> Result<(), Halt> {
    let changed = |message: String| changed(order, &message);
    for component in &need.components {
        check_version(order, component, model)?;
        let plan = model
            .load_plan(&component.name)
            .ok_or_else(|| changed(format!("it has no component {}", component.name)))?;
        if plan.bytes() != component.bytes {
            let (name, was, is) = (&component.name, component.bytes, plan.bytes());
            return Err(changed(format!(
                "its {name} had {} bytes and has {}",
                was.0, is.0
            )));
        }
    }
    Ok(())
}
