//! Events of workers, and their effects on jobs.

use std::time::Duration;

use gpu::{CardDescription, CardKind};
use model::{PassesLeftOut, RequestError, Role, Values};
use residency::{Bytes, Component, ComponentId, Part};
use tokio::time::Instant;

use super::{Core, Effect, TICK};
use crate::error::{Error, Shortfall};
use crate::job::{JobEventKind, JobId, StageReport};
use crate::messages::{Answer, Completed, Event, Failure, Outcome, Progress, Shortage, Ticket};
use crate::queue::cards::{Death, InFlight, PendingRequest};
use crate::queue::latents::Maker;
use crate::queue::observer::Happening;
use crate::queue::record::{Refusal, State};
use crate::queue::steps::{JobStep, JobStepKind};
use crate::queue::{CardSignal, Signal};

/// Most deaths of workers that had not begun the order of a step: it may be the order itself that such a worker cannot read.
const MOST_DEATHS_BEFORE: u32 = 8;

impl Core {
    pub(super) fn on_signal(&mut self, signal: CardSignal, now: Instant) {
        let CardSignal {
            card: index,
            generation,
            signal,
        } = signal;
        let Some(card) = self.cards.get(index) else {
            return;
        };
        if let Signal::Stuck { reason } = &signal {
            // A lost worker: its other events are ignored.
            if !card.is_ready() {
                self.cards[index].problem.clone_from(reason);
                self.dirty = true;
            }
            return;
        }
        if !card.accepts_events_of(generation) && !card.is_replaced_by(generation) {
            return; // a stale generation is ignored
        }
        if card.is_replaced_by(generation) {
            self.lost(
                index,
                card.generation,
                "another worker was started for the card",
                Duration::ZERO,
                now,
            );
        }
        match signal {
            Signal::Stuck { .. } => {} // taken above
            Signal::Lost { reason, restarts_in } => self.lost(index, generation, &reason, restarts_in, now),
            Signal::Event(Event::Ready {
                card,
                attention,
                speeds,
                ledger,
            }) => {
                self.cards[index].ready(generation, card, (attention, speeds), ledger, now);
                self.send_claims(index, true, now);
                self.recycled(index);
                self.replan = true;
            }
            Signal::Event(Event::Snapshot(ledger)) => {
                self.cards[index].snapshot(ledger, now);
                self.replan = true;
            }
            Signal::Event(Event::Progress { ticket, progress }) => {
                self.progress(index, ticket, progress, now)
            }
            Signal::Event(Event::Offer { ticket, offer }) => self.offered(index, ticket, offer, now),
            Signal::Event(Event::Finished { ticket, outcome }) => self.finished(index, ticket, outcome, now),
            Signal::Event(Event::Answer { id, answer }) => {
                let pending = self.cards[index].pending_requests.remove(&id);
                if let Some(pending) = pending {
                    self.cards[index].restart_request_clock(now);
                    self.answered(index, pending, answer, now);
                }
            }
        }
        self.dirty = true;
    }

    fn answered(&mut self, index: usize, pending: PendingRequest, answer: Answer, now: Instant) {
        if let Answer::Unloaded { freed, .. } = &answer {
            let card = &self.cards[index].description.id;
            let happening = Happening::Unloaded { card, freed };
            self.settings.observers.tell(&happening);
        }
        match pending {
            PendingRequest::Unload { unload, .. } => self.unloaded(unload, index, answer),
            PendingRequest::Trim { trim } => self.trimmed(trim, answer),
            PendingRequest::Reserve { request, reply } => self.room_made(index, request, reply, answer, now),
            PendingRequest::Swap { job, .. } => self.unloaded_for_swap(&job, index, answer, now),
            PendingRequest::KeepAlive => {}
        }
        self.replan = true;
    }

    fn progress(&mut self, index: usize, ticket: Ticket, progress: Progress, now: Instant) {
        let card = &mut self.cards[index];
        let card_id = card.description.id.clone();
        let running = card.in_flight.as_mut();
        let Some((running, id)) = running.and_then(|running| {
            let id = running.job_of(ticket).cloned();
            (running.ticket == ticket || id.is_some()).then_some((running, id))
        }) else {
            return;
        };
        running.has_begun = true;
        running.record_progress(&progress, now);
        let worker = (index, card.generation);
        let known = self.learned.pace(worker, running.pace.key(index).as_ref());
        running.allow_silence(&known, &self.settings);
        // Of a second part its job hears what moves on the card alone: steps and previews are those of the first.
        let is_move = matches!(progress, Progress::Evicting(_) | Progress::Loading { .. });
        if running.assists() && (!is_move || running.cancelled.is_some()) {
            return;
        }
        let Some(job) = id.and_then(|id| self.jobs.get_mut(&id)) else {
            return;
        };
        let Some(step) = job.step() else { return };
        let item = step.item;
        let event = match progress {
            Progress::Begun => return,
            Progress::Evicting(component) => JobEventKind::Evicting {
                component,
                card: card_id,
            },
            Progress::Loading { component, done } => JobEventKind::Loading {
                component,
                done,
                card: card_id,
            },
            Progress::Started { chunking, memory } => {
                job.attempt.patience = None;
                let (index, of) = job.place_of_step();
                JobEventKind::Stage {
                    name: job.name_of(step),
                    index,
                    of,
                    chunking,
                    cached: false,
                    card: card_id,
                    item,
                    memory: Some(memory),
                    section: job.stage(step).and_then(|stage| stage.section),
                }
            }
            Progress::Step { n, of } => {
                job.steps_done = (n, of);
                let section = job.stage(step).and_then(|stage| stage.section);
                JobEventKind::Step { n, of, item, section }
            }
            Progress::Preview {
                step,
                width,
                height,
                rgb,
            } => JobEventKind::Preview {
                step,
                item,
                width,
                height,
                rgb,
            },
            Progress::Piece(piece) => {
                for event in job.deliver(item, &piece) {
                    job.emit(now, event);
                }
                return;
            }
            Progress::Retrying { reason, message } => JobEventKind::Retrying {
                reason,
                message,
                stage: job.name_of(step),
            },
        };
        job.emit(now, event);
    }

    fn finished(&mut self, index: usize, ticket: Ticket, outcome: Outcome, now: Instant) {
        let card = &mut self.cards[index];
        let ended = card.take_ended(ticket, now);
        let is_whole = ended.is_some();
        let running = card.in_flight.as_mut();
        let Some(mut running) = ended.or_else(|| running.and_then(|running| running.share_of(ticket))) else {
            return;
        };
        self.replan = true;
        card.restart_request_clock(now);
        self.end_unneeded_order(index, now);
        let card = &self.cards[index];
        if let Outcome::Completed(completed) = &outcome
            && is_whole
        {
            let (worker, taught) = (
                (index, card.generation),
                running.pace.taught(index, completed, now),
            );
            self.learned
                .order_completed(worker, &running.need.components, &completed.load_seconds, taught);
            self.observe_loads(index, &completed.load_seconds);
        }
        if running.assists() {
            return self.second_part_ended(index, &running, outcome, now);
        }
        let is_charged = !matches!(outcome, Outcome::Wait(_) | Outcome::Never { .. });
        self.end_second_part(&running, is_charged, now);
        let Some(id) = running.job.clone().filter(|id| self.jobs.contains_key(id)) else {
            if !matches!(outcome, Outcome::Completed(_)) {
                tracing::warn!(?outcome, "a pinned model could not be loaded again");
            }
            return;
        };
        let ending = self.let_go(&id, &running, is_charged, now);
        if ending.is_none()
            && let Some(fault) = self.fault_of(&id, index, &mut running, &outcome)
        {
            return self.run_parts_again(&id, &running, fault, now);
        }
        if running.was_shared() && ending.is_none() && is_to_run_alone(&outcome) {
            return self.run_alone(&id, &outcome);
        }
        if let Outcome::Failed(Failure::Replaced { message }) = &outcome
            && ending.is_none()
            && self.reopen(&id, message, now)
        {
            return;
        }
        let result = match outcome {
            Outcome::Completed(completed) => self.completed(&id, index, &running, *completed, now),
            Outcome::Wait(shortage) => {
                self.refused(&id, index, shortage, now);
                return self.fail_if(&id, ending, now);
            }
            Outcome::Never { .. } => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.attempt.never_on.insert(index);
                }
                return self.fail_if(&id, ending, now);
            }
            Outcome::Cancelled => Err(Error::Internal(
                "the worker cancelled a stage without a request".to_owned(),
            )),
            Outcome::Failed(failure) => Err(self.failed(&id, index, &running, failure)),
        };
        match ending.map_or(result, Err) {
            Ok(()) => self.advance(&id, now),
            Err(error) => self.fail_of(&id, error, now),
        }
    }

    /// A job's stage has failed. Where memory was short, it ends once the alternatives are known.
    pub(super) fn fail_of(&mut self, id: &JobId, error: Error, now: Instant) {
        match error {
            Error::OutOfMemory(shortfall) => {
                if let Some(job) = self.jobs.get_mut(id) {
                    job.enter(State::OutOfMemory(shortfall), now);
                }
            }
            error => self.fail(id, error, now),
        }
    }

    fn observe_loads(&self, index: usize, load_seconds: &[(ComponentId, f64)]) {
        let card = &self.cards[index];
        for (id, seconds) in load_seconds {
            let resident = card.ledger.resident(id);
            self.settings.observers.tell(&Happening::Loaded {
                card: &card.description.id,
                bytes: resident.map_or(Bytes::ZERO, |resident| resident.bytes()),
                lasted: Duration::try_from_secs_f64(*seconds).unwrap_or_default(),
            });
        }
    }

    /// Has a job of a failed shared pass run again, alone: the fault may be another job's.
    fn run_alone(&mut self, id: &JobId, outcome: &Outcome) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.attempt.alone = !matches!(outcome, Outcome::Cancelled);
        tracing::debug!(job = %id, ?outcome, "a stage that shared passes is run again alone");
    }

    fn fail_if(&mut self, id: &JobId, ending: Option<Error>, now: Instant) {
        if let Some(ending) = ending {
            self.fail(id, ending, now);
        }
    }

    /// Detaches a job from its ended order and queues it again. Returns the error that the job is to end with, if there is one.
    fn let_go(&mut self, id: &JobId, running: &InFlight, is_charged: bool, now: Instant) -> Option<Error> {
        let took = now.duration_since(running.sent);
        gpu::Timeline::log("round trip of an order", &running.need.name, took);
        let job = self.jobs.get_mut(id)?;
        if is_charged {
            let card_ms = took.as_secs_f64() * 1000.0 / f64::from(running.jobs);
            self.shares.charge(&job.options, card_ms);
        }
        match std::mem::replace(&mut job.state, State::queued()) {
            State::Running { ending } => ending,
            State::Queued { .. } | State::Waiting { .. } | State::Reopening | State::OutOfMemory(_) => None,
        }
    }

    pub(super) fn refused(&mut self, id: &JobId, index: usize, shortage: Shortage, now: Instant) {
        let snapshot = self.cards[index].snapshots;
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.displace_replaced() {
            return; // asked again when the old entry has left
        }
        if job.attempt.low_memory {
            tracing::warn!(job = %job.id, "a worker answered wait to an order with low memory allowed");
        }
        let refusal = Refusal {
            snapshot,
            until: now + TICK,
            shortage,
        };
        job.attempt.refusals.insert(index, refusal);
    }

    /// A stage ran to its end: records how long a pass of it takes with all components on the card, if they were.
    fn learn_pass_time(
        &mut self,
        id: &JobId,
        index: usize,
        running: &InFlight,
        completed: &Completed,
        now: Instant,
    ) {
        let Some(job) = self.jobs.get(id).filter(|_| !running.was_shared()) else {
            return;
        };
        let Some(key) = job.stage_key(job.cursor) else {
            return;
        };
        let (ledger, need) = (&self.cards[index].ledger, &running.need);
        let is_whole = |c: &Component| {
            ledger
                .resident(&c.id)
                .is_some_and(|here| here.part == Part::WHOLE)
        };
        if need.components.iter().all(is_whole) {
            let seconds = completed.run_ms as f64 / 1000.0 / f64::from(need.passes());
            self.learned.passed(key, index, seconds);
        }
        let Some(job) = self.jobs.get(id) else { return };
        if let Some(time) = self.view(now).pass_time(job, job.cursor, index, need) {
            self.learned.ran_in(index, &need.components, time);
        }
    }

    /// A step ran to its end: records its measurements, takes its values, and goes on to the next step.
    fn completed(
        &mut self,
        id: &JobId,
        index: usize,
        running: &InFlight,
        completed: Completed,
        now: Instant,
    ) -> Result<(), Error> {
        self.learn_pass_time(id, index, running, &completed, now);
        let card = &self.cards[index].description;
        let Some(job) = self.jobs.get_mut(id) else {
            return Ok(());
        };
        let Some(step) = job.step() else { return Ok(()) };
        if !completed.load_seconds.is_empty() {
            self.effects.push(Effect::KeepCopies {
                entry: job.entry.clone(),
                compute_dtype: card.compute_dtype.clone(),
            });
        }
        if let (Some(plan), Some(open)) = (&running.need.plan, job.models.get(&card.compute_dtype)) {
            let (need, name) = (&running.need, running.need.name.clone());
            let key = (job.entry.key.clone(), name, plan.shape.clone());
            self.learned
                .stage_completed(key, open.model.family(), need, (index, card), &completed);
        }
        // Those of a shared pass are of all its jobs.
        let is_own = |name: &String| !running.was_shared() || job.has_component(name);
        let (resident, _): (Vec<&String>, Vec<&String>) =
            completed.resident_already.iter().partition(|name| is_own(name));
        for name in resident {
            if !job.report.resident_already.contains(name) {
                job.report.resident_already.push(name.clone());
            }
        }
        let mut approximations = Vec::new();
        if completed.approximate {
            approximations.push(format!("{} in {}", job.name_of(step), completed.chunking));
        }
        if let Some(PassesLeftOut {
            left_out: left_out @ 1..,
            of,
        }) = completed.passes_left_out
        {
            approximations.push(format!("{} without {left_out} of {of} passes", job.name_of(step)));
        }
        if completed.attention_in_fp8 {
            approximations.push(format!("{} with attention in fp8", job.name_of(step)));
        }
        for words in approximations {
            if !job.report.approximations.contains(&words) {
                job.report.approximations.push(words);
            }
        }
        let dtype = card.compute_dtype.clone();
        let card = match running.second_part() {
            Some((other, _)) => format!("{} and {}", card.id, self.cards[other].description.id),
            None => card.id.clone(),
        };
        let report = StageReport {
            name: job.name_of(step),
            run: Duration::from_millis(completed.run_ms),
            moves: Duration::from_millis(completed.move_ms),
            wait: std::mem::take(&mut job.waited),
            peak_scratch: completed.peak_scratch,
            peak_bytes: completed.peak_bytes,
            predicted_scratch: completed.predicted_scratch,
            chunking: completed.chunking,
            attention: completed.attention,
            passes_left_out: completed.passes_left_out,
            memory: completed.memory,
            cached: false,
            item: step.item,
            card,
        };
        job.stage_done(report, now);
        if !completed.approximate {
            self.remember_values(id, step, &dtype, &completed.values);
        }
        self.take_values(id, step, &dtype, completed.values, now)?;
        let Some(job) = self.jobs.get_mut(id) else {
            return Ok(());
        };
        job.go_to(job.cursor + 1);
        job.begun = true;
        job.state = match job.shared_pass(job.cursor) {
            Some(_) => State::queued(), // other jobs may join the pass first
            None => State::queued_on(index),
        };
        Ok(())
    }

    /// Caches the values of a stage with a memo for other jobs. Only exact values: the other jobs may have the memory for these.
    fn remember_values(&mut self, id: &JobId, step: JobStep, dtype: &str, values: &Values) {
        if let JobStepKind::Stage(index) = step.kind
            && let Some(key) = self.jobs.get(id).and_then(|job| job.memo_key(index, dtype))
        {
            self.memos.put(key, values.clone());
        }
    }

    /// Puts the values of a stage where later steps find them: for all items, for the stage's own item, or in the store, from which
    /// clients can get them.
    fn take_values(
        &mut self,
        id: &JobId,
        step: JobStep,
        dtype: &str,
        values: Values,
        now: Instant,
    ) -> Result<(), Error> {
        let Some(job) = self.jobs.get_mut(id) else {
            return Ok(());
        };
        let JobStepKind::Stage(index) = step.kind else {
            return Ok(());
        };
        let Some(stage) = job.plan(dtype).get(index) else {
            return Ok(());
        };
        let (role, per_item) = (stage.role, stage.per_item);
        if let Some(missing) = stage.gives.iter().find(|name| !values.contains_key(*name)) {
            let problem = format!("{} did not give {missing}", stage.name);
            return Err(Error::Internal(problem));
        }
        if !per_item {
            job.values.extend(values);
            return Ok(());
        }
        if role == Role::Decode && !job.decodes_later(step.item) {
            job.check_delivered(step)?;
        }
        let (kept, own): (Values, Values) = values
            .into_iter()
            .partition(|(name, _)| job.belongs_in_store(step, name));
        let of_item = job.item_values.entry(step.item).or_default();
        of_item.retain(|name, _| !kept.contains_key(name)); // a value of the same name replaces the old one
        of_item.extend(own);
        job.forget_untaken(step.item);
        if !kept.is_empty() {
            self.keep_values(id, step, dtype, kept, now);
        } else if !job.decodes_later(step.item)
            && role == Role::Decode
            && let Some(latent) = job.latents.remove(&step.item)
        {
            self.latents.release(&latent, now);
        }
        Ok(())
    }

    /// Puts values of an item into the store, under a lease of the job.
    fn keep_values(&mut self, id: &JobId, step: JobStep, dtype: &str, kept: Values, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let keeps = job.keeps_latents();
        let approximation = job.run().and_then(|run| run.request.approximation_of_latent());
        match job.latents.get(&step.item) {
            Some(latent) => self.latents.extend_leased(latent, kept),
            None => {
                let maker = Maker {
                    job: id.clone(),
                    account: job.options.account.clone(),
                };
                let decoder = job.decoder_id(dtype);
                let latent = self.latents.put_leased(kept, decoder, maker, keeps, now);
                self.latents.mark_approximate(&latent, approximation);
                job.latents.insert(step.item, latent);
            }
        }
        if keeps {
            self.emit_latent(id, step.item, now);
        }
    }

    pub(super) fn failed(&mut self, id: &JobId, index: usize, running: &InFlight, failure: Failure) -> Error {
        match failure {
            Failure::OutOfMemory {
                stage,
                needed,
                usable,
                holders,
            } => {
                let card = &self.cards[index];
                let dtype = &card.description.compute_dtype;
                let model = self.jobs.get(id).and_then(|job| job.models.get(dtype));
                if let Some(open) = model {
                    self.learned
                        .out_of_memory(open.model.family(), &running.need, &card.description, usable);
                }
                let shortfall = Shortfall {
                    stage,
                    free: usable,
                    holders,
                    ..card.shortfall(&running.need, needed)
                };
                Error::OutOfMemory(Box::new(shortfall))
            }
            Failure::NotFinite { component, step } => Error::NotFinite { component, step },
            Failure::Model { message } => Error::ModelDamaged(message),
            Failure::Replaced { message } => Error::ModelChanged(message),
            Failure::Unsupported { message } => Error::ModelUnsupported(message),
            Failure::BadInput(problem) => Error::Invalid(vec![RequestError {
                field: running.need.name.to_string(),
                problem,
            }]),
            Failure::Internal(problem) => Error::Internal(problem),
        }
    }

    /// A worker has ended. Jobs that ran on it are tried once more, and requests to it are answered as far as possible.
    fn lost(&mut self, index: usize, generation: u64, reason: &str, restarts_in: Duration, now: Instant) {
        let headroom = self.settings.headroom;
        let card = &mut self.cards[index];
        let is_asked_for = card.is_retiring();
        let residents: Vec<_> = card.ledger.residents().map(|r| r.component.clone()).collect();
        card.lost(generation, reason, restarts_in, headroom, now);
        let orders: Vec<InFlight> = card
            .in_flight
            .take()
            .into_iter()
            .chain(card.ahead.take())
            .collect();
        let pending_requests = std::mem::take(&mut card.pending_requests);
        tracing::warn!(card = %card.description.id, generation, reason, "the worker is lost");
        self.settings.observers.tell(&Happening::WorkerLost {
            card: &card.description.id,
            was_asked_for: is_asked_for,
        });
        for pending in pending_requests.into_values() {
            let answer = match &pending {
                // A process that has ended has returned all of its memory.
                PendingRequest::Unload { components, .. } | PendingRequest::Swap { components, .. } => {
                    let gone = residents.iter().filter(|c| components.contains(&c.id));
                    let unloaded = |c: &residency::Component| gpu::Unloaded {
                        booked: c.bytes,
                        freed: c.bytes,
                    };
                    let freed = gone.map(|c| (c.clone(), unloaded(c))).collect();
                    Answer::Unloaded {
                        freed,
                        kept: Vec::new(),
                        short: Bytes::ZERO,
                    }
                }
                PendingRequest::Trim { .. } | PendingRequest::Reserve { .. } | PendingRequest::KeepAlive => {
                    Answer::Failed(format!("the worker was lost: {reason}"))
                }
            };
            self.answered(index, pending, answer, now);
        }
        for order in &orders {
            let death = self.death_of(index, order, is_asked_for, reason);
            if order.assists() {
                self.second_part_lost(order, death, now);
                continue;
            }
            self.end_second_part(order, death.has_begun, now);
            for id in order.all_jobs() {
                self.died_of((id, order), death.clone(), now);
            }
        }
        for job in self
            .jobs
            .values_mut()
            .filter(|job| job.kept_card() == Some(index))
        {
            job.give_up_card();
        }
        self.replan = true;
    }

    /// A worker died while it had an order. That counts against the job if the worker had begun it, unless a client asked to end the
    /// worker. A worker that has died takes no order, and neither does one whose death is not known yet.
    fn died_of(&mut self, (id, running): (&JobId, &InFlight), death: Death, now: Instant) {
        if !self.jobs.contains_key(id) {
            return;
        }
        if let Some(ending) = self.let_go(id, running, death.has_begun, now) {
            return self.fail(id, ending, now);
        }
        self.after_death(id, running, death, now);
    }

    fn death_of(&self, index: usize, running: &InFlight, is_asked_for: bool, reason: &str) -> Death {
        let CardDescription { id: card, kind, .. } = self.cards[index].description.clone();
        Death {
            card,
            kind,
            reason: reason.to_owned(),
            is_asked_for,
            has_begun: running.has_begun || running.silent.is_some(),
            silent: running.silent,
        }
    }

    /// A job whose order was lost with a worker tries its stage again, unless too many died of it.
    pub(super) fn after_death(&mut self, id: &JobId, running: &InFlight, death: Death, now: Instant) {
        let Death {
            card,
            kind,
            reason,
            is_asked_for,
            has_begun,
            silent,
        } = death;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let attempt = &mut job.attempt;
        attempt.alone |= has_begun && running.was_shared();
        match has_begun {
            true => attempt.deaths += u32::from(!is_asked_for),
            false => attempt.deaths_before += u32::from(!is_asked_for),
        }
        let deaths = attempt.deaths + attempt.deaths_before;
        let stage = running.need.name.clone();
        // A CPU does not hang: an order that was silent there for the whole limit was slow, and would be slow again.
        let is_slow = kind == CardKind::Cpu && silent.is_some_and(|limit| limit >= self.settings.stall_limit);
        if attempt.deaths > 1 || attempt.deaths_before > MOST_DEATHS_BEFORE || is_slow {
            self.learned.died(&job.entry.key, &running.need.shape(), id, now);
            let stage = stage.to_string();
            let error = match silent {
                Some(limit) => Error::WorkerSilent { card, stage, limit },
                None => Error::WorkerDied { card, stage, deaths },
            };
            return self.fail(id, error, now);
        }
        let message = format!("the worker of {card} was lost ({reason}); {stage} starts again");
        job.begun = true; // it goes before those that have not begun
        job.emit(
            now,
            JobEventKind::Retrying {
                reason: if is_asked_for {
                    "WORKER_RECYCLED"
                } else {
                    "WORKER_DIED"
                }
                .into(),
                message,
                stage,
            },
        );
    }
}

/// Whether a stage that shared passes is to be run again, alone: it did not end by a fault of its own, as far as the outcome tells. Files
/// that are damaged or replaced may be adapters of another job.
fn is_to_run_alone(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Wait(_)
        | Outcome::Never { .. }
        | Outcome::Cancelled
        | Outcome::Failed(
            Failure::OutOfMemory { .. }
            | Failure::Internal(_)
            | Failure::Model { .. }
            | Failure::Replaced { .. }
            | Failure::Unsupported { .. },
        ) => true,
        Outcome::Completed(_) | Outcome::Failed(Failure::NotFinite { .. } | Failure::BadInput(_)) => false,
    }
}
