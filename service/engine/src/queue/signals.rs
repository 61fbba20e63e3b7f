//! What workers say, and what follows from it for the job that they say it of.

use pipelines::{Piece, RequestError, Role, Values};
use residency::Bytes;
use tokio::time::Instant;

use super::actor::{Actor, TICK};
use super::cards::{Errand, InFlight};
use super::intake::content_of;
use super::placing::memo_key;
use super::record::{JobRecord, Phase, Refusal};
use super::steps::{Step, StepKind};
use super::{CardSignal, Signal};
use crate::error::{Error, Shortfall};
use crate::job::{JobEventKind, StageReport};
use crate::messages::{Answer, Completed, Event, Failure, Outcome, Progress, Shortage, Ticket};

impl Actor {
    pub(super) fn on_signal(&mut self, signal: CardSignal, now: Instant) {
        let CardSignal {
            card: index,
            generation,
            signal,
        } = signal;
        if self
            .cards
            .get(index)
            .is_none_or(|card| !card.listens_to(generation) && !card.is_replaced_by(generation))
        {
            return; // a stale generation is ignored
        }
        if self.cards[index].is_replaced_by(generation) {
            self.lost(
                index,
                self.cards[index].generation,
                "another took its place",
                std::time::Duration::ZERO,
                now,
            );
        }
        match signal {
            Signal::Lost { reason, restarts_in } => self.lost(index, generation, &reason, restarts_in, now),
            Signal::Event(Event::Ready { card, attention }) => {
                self.cards[index].ready(generation, card, attention);
                self.stand(index, true);
                self.replan = true;
            }
            Signal::Event(Event::Snapshot(ledger)) => {
                self.cards[index].snapshot(ledger, now);
                self.replan = true;
            }
            Signal::Event(Event::Progress { ticket, progress }) => {
                self.progress(index, ticket, progress, now)
            }
            Signal::Event(Event::Finished { ticket, outcome }) => self.finished(index, ticket, outcome, now),
            Signal::Event(Event::Answer { id, answer }) => {
                let errand = self.cards[index].errands.remove(&id);
                if let Some(errand) = errand {
                    self.cards[index].is_free_again(now);
                    self.answered(index, errand, answer, now);
                }
            }
        }
        self.dirty = true;
    }

    fn answered(&mut self, index: usize, errand: Errand, answer: Answer, now: Instant) {
        match errand {
            Errand::Unload { unload, .. } => self.unloaded(unload, index, answer),
            Errand::Trim { trim } => self.trimmed(trim, answer),
            Errand::Reserve(wanted) => self.room_made(index, wanted, answer, now),
            Errand::Swap { job, .. } => self.sent_away(&job, index, answer, now),
            Errand::KeepAlive => {}
        }
        self.replan = true;
    }

    fn progress(&mut self, index: usize, ticket: Ticket, progress: Progress, now: Instant) {
        let card = &mut self.cards[index];
        let card_id = card.description.id.clone();
        let Some(running) = card.in_flight.as_mut().filter(|running| running.ticket == ticket) else {
            return;
        };
        running.hear(&progress, now);
        self.allow_silence(index);
        let running = self.cards[index].in_flight.as_ref();
        let Some(job) = running
            .and_then(|running| running.job.as_ref())
            .and_then(|id| self.jobs.get_mut(id))
        else {
            return;
        };
        let Some(step) = job.step() else { return };
        let item = step.item;
        let event = match progress {
            Progress::Evicting(component) => JobEventKind::Evicting {
                component,
                card: card_id,
            },
            Progress::Loading { component, done } => JobEventKind::Loading {
                component,
                done,
                card: card_id,
            },
            Progress::Started { chunking } => {
                job.patience = None;
                JobEventKind::Stage {
                    name: job.name_of(step),
                    index: job.cursor as u32 + 1,
                    of: job.steps.len() as u32,
                    chunking,
                    cached: false,
                    card: card_id,
                    item,
                }
            }
            Progress::Step { n, of } => {
                (job.step_done, job.steps_of_stage) = (n, of);
                JobEventKind::Step { n, of, item }
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
                if let Some(event) = delivered(job, item, piece) {
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
        let Some(running) = self.cards[index]
            .in_flight
            .take_if(|running| running.ticket == ticket)
        else {
            return;
        };
        self.replan = true;
        self.cards[index].is_free_again(now);
        if let Outcome::Completed(completed) = &outcome {
            self.learned.loads_completed(&completed.load_seconds);
            self.learn_pace(index, &running, completed, now);
        }
        let Some(mut job) = running.job.as_ref().and_then(|id| self.jobs.remove(id)) else {
            if !matches!(outcome, Outcome::Completed(_)) {
                tracing::warn!(?outcome, "a pinned model could not be brought back");
            }
            return;
        };
        if let Outcome::Completed(completed) = &outcome
            && !completed.load_seconds.is_empty()
        {
            let dtype = &self.cards[index].description.compute_dtype;
            self.library.keep_soon(&job.entry, dtype);
        }
        let took = now.duration_since(running.sent);
        gpu::Timeline::tell("order, there and back", &running.need.name, took);
        let card_ms = took.as_secs_f64() * 1000.0;
        if !matches!(outcome, Outcome::Wait(_) | Outcome::Never { .. }) {
            self.shares
                .charge(&job.options.client, job.options.priority, card_ms);
        }
        job.enter(Phase::Queued, now);
        let result = match outcome {
            Outcome::Completed(completed) => self.completed(&mut job, index, &running, *completed, now),
            Outcome::Wait(shortage) => {
                self.refused(&mut job, index, shortage, now);
                Ok(())
            }
            Outcome::Never { .. } => {
                job.never_on.insert(index);
                Ok(())
            }
            Outcome::Cancelled => Err(Error::Cancelled),
            Outcome::Failed(failure) => Err(self.failed(&job, index, &running, failure)),
        };
        let result = match job.ending.take() {
            Some(ending) => Err(ending),
            None => result,
        };
        match result {
            Ok(()) if job.cursor < job.steps.len() => {
                self.jobs.insert(job.id.clone(), job);
            }
            Err(Error::OutOfMemory(shortfall)) => {
                job.out_of_memory = Some(shortfall);
                self.jobs.insert(job.id.clone(), job);
            }
            result => self.end(job, result, now),
        }
    }

    fn refused(&mut self, job: &mut JobRecord, index: usize, shortage: Shortage, now: Instant) {
        if self.gives_way(job) {
            return; // asked again when the old entry has left
        }
        if job.low_memory {
            tracing::warn!(job = %job.id, "a worker did not risk what the job allows");
        }
        let refusal = Refusal {
            snapshot: self.cards[index].snapshots,
            until: now + TICK,
            shortage,
        };
        job.refusals.insert(index, refusal);
    }

    /// A step ran to its end: what it taught, what it made, what comes next.
    fn completed(
        &mut self,
        job: &mut JobRecord,
        index: usize,
        running: &InFlight,
        completed: Completed,
        now: Instant,
    ) -> Result<(), Error> {
        let Some(step) = job.step() else { return Ok(()) };
        let card = self.cards[index].description.clone();
        if let (Some(plan), Some(open)) = (&running.need.plan, job.models.get(&card.compute_dtype)) {
            let (need, name) = (&running.need, running.need.name.clone());
            let key = (job.entry.key.clone(), name, plan.shape.clone());
            self.learned
                .stage_completed(key, open.model.family(), need, &card, &completed);
        }
        for name in &completed.resident_already {
            if !job.report.resident_already.contains(name) {
                job.report.resident_already.push(name.clone());
            }
        }
        if completed.approximate {
            let words = format!("{} in {}", job.name_of(step), completed.chunking);
            if !job.report.approximations.contains(&words) {
                job.report.approximations.push(words);
            }
        }
        job.report.stages.push(StageReport {
            name: job.name_of(step),
            run: std::time::Duration::from_millis(completed.run_ms),
            moves: std::time::Duration::from_millis(completed.move_ms),
            wait: std::mem::take(&mut job.waited),
            peak_scratch: completed.peak_scratch,
            peak_bytes: completed.peak_bytes,
            predicted_scratch: completed.predicted_scratch,
            chunking: completed.chunking,
            attention: completed.attention,
            cached: false,
            item: step.item,
            card: card.id.clone(),
        });
        self.take_values(job, step, &card.compute_dtype, completed.values, now)?;
        job.cursor += 1;
        job.begun = true;
        job.keeps = Some(index);
        job.patience = None;
        job.refusals.clear();
        job.never_on.clear();
        job.low_memory = false;
        Ok(())
    }

    /// What a stage gave goes where later steps find it: for all items, for its own, or into the store where a client may
    /// ask for it.
    fn take_values(
        &mut self,
        job: &mut JobRecord,
        step: Step,
        dtype: &str,
        values: Values,
        now: Instant,
    ) -> Result<(), Error> {
        let StepKind::Stage(index) = step.kind else {
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
        if let Some(key) = memo_key(job, index, dtype) {
            self.memos.put(key, values.clone());
        }
        if !per_item {
            job.values.extend(values);
            return Ok(());
        }
        if role == Role::Decode && !job.decodes_later(step.item) {
            check_delivered(job, step)?;
        }
        let (kept, own): (Values, Values) = values
            .into_iter()
            .partition(|(name, _)| job.belongs_in_store(step, name));
        let of_item = job.item_values.entry(step.item).or_default();
        of_item.retain(|name, _| !kept.contains_key(name)); // what is given again is another value
        of_item.extend(own);
        job.forget_untaken(step.item);
        if !kept.is_empty() {
            self.keep_values(job, step, dtype, kept, now);
        } else if !job.decodes_later(step.item) && role == Role::Decode {
            self.forget_latent(job, step.item, now);
        }
        Ok(())
    }

    fn keep_values(&mut self, job: &mut JobRecord, step: Step, dtype: &str, kept: Values, now: Instant) {
        if let Some(id) = job.latents.get(&step.item) {
            self.latents.extend_leased(id, kept);
            return;
        }
        let (decoder, keeps) = (decoder_of(job, dtype), job.keeps_latents());
        let id = self.latents.put_leased(kept, decoder, job.id.clone(), keeps, now);
        job.latents.insert(step.item, id);
        if keeps {
            self.tell_of_latent(job, step.item, now);
        }
    }

    fn forget_latent(&mut self, job: &mut JobRecord, item: u32, now: Instant) {
        if let Some(id) = job.latents.remove(&item) {
            self.latents.release(&id, now);
        }
    }

    fn failed(&mut self, job: &JobRecord, index: usize, running: &InFlight, failure: Failure) -> Error {
        match failure {
            Failure::OutOfMemory {
                stage,
                needed,
                usable,
                holders,
            } => {
                let card = &self.cards[index].description;
                if let Some(open) = job.models.get(&card.compute_dtype) {
                    self.learned
                        .out_of_memory(open.model.family(), &running.need, card, usable);
                }
                let shortfall = Shortfall {
                    stage,
                    free: usable,
                    holders,
                    ..self.shortfall(index, &running.need, needed)
                };
                Error::OutOfMemory(Box::new(shortfall))
            }
            Failure::NotFinite { component, step } => Error::NotFinite { component, step },
            Failure::Model { message } => Error::ModelDamaged(message),
            Failure::BadInput(problem) => Error::Invalid(vec![RequestError {
                field: running.need.name.to_string(),
                problem,
            }]),
            Failure::Internal(problem) => Error::Internal(problem),
        }
    }

    /// A worker is gone. What ran on it is tried once more; what was asked of it is answered as well as can be.
    fn lost(
        &mut self,
        index: usize,
        generation: u64,
        reason: &str,
        restarts_in: std::time::Duration,
        now: Instant,
    ) {
        let headroom = self.settings.headroom;
        let card = &mut self.cards[index];
        let residents: Vec<_> = card.ledger.residents().map(|r| r.component.clone()).collect();
        card.lost(generation, restarts_in, headroom, now);
        let running = card.in_flight.take();
        let errands = std::mem::take(&mut card.errands);
        tracing::warn!(card = %card.description.id, generation, reason, "the worker is lost");
        for errand in errands.into_values() {
            let answer = match &errand {
                // A process that is gone has given all of its memory back.
                Errand::Unload { components, .. } | Errand::Swap { components, .. } => {
                    let gone = residents.iter().filter(|c| components.contains(&c.id));
                    let freed = |c: &residency::Component| gpu::Unloaded {
                        booked: c.bytes,
                        freed: c.bytes,
                    };
                    let freed = gone.map(|c| (c.clone(), freed(c))).collect();
                    Answer::Unloaded {
                        freed,
                        kept: Vec::new(),
                        short: Bytes::ZERO,
                    }
                }
                Errand::Trim { .. } | Errand::Reserve(_) | Errand::KeepAlive => {
                    Answer::Failed(format!("the worker was lost: {reason}"))
                }
            };
            self.answered(index, errand, answer, now);
        }
        if let Some(running) = running {
            self.died_of(index, running, reason, now);
        }
        for job in self.jobs.values_mut().filter(|job| job.keeps == Some(index)) {
            job.keeps = None;
        }
        self.replan = true;
    }

    fn died_of(&mut self, index: usize, running: InFlight, reason: &str, now: Instant) {
        let card = self.cards[index].description.id.clone();
        let Some(mut job) = running.job.as_ref().and_then(|id| self.jobs.remove(id)) else {
            return;
        };
        let took = now.duration_since(running.sent);
        gpu::Timeline::tell("order, there and back", &running.need.name, took);
        let card_ms = took.as_secs_f64() * 1000.0;
        self.shares
            .charge(&job.options.client, job.options.priority, card_ms);
        job.enter(Phase::Queued, now);
        if let Some(ending) = job.ending.take() {
            return self.end(job, Err(ending), now);
        }
        job.deaths += 1;
        let stage = running.need.name.clone();
        if job.deaths > 1 {
            self.learned
                .died(&job.entry.key, &running.need.shape(), &job.id, now);
            let error = Error::WorkerDied {
                card,
                stage: stage.to_string(),
                deaths: job.deaths,
            };
            return self.end(job, Err(error), now);
        }
        let message = format!("the worker of {card} was lost ({reason}); {stage} starts again");
        job.emit(
            now,
            JobEventKind::Retrying {
                reason: "WORKER_DIED".into(),
                message,
                stage,
            },
        );
        job.begun = true; // it goes before those that have not begun
        self.jobs.insert(job.id.clone(), job);
    }
}

/// What a job's latents belong to: the first component that decodes.
fn decoder_of(job: &JobRecord, dtype: &str) -> String {
    let decode = job.plan(dtype).iter().find(|stage| stage.role == Role::Decode);
    let components = decode.map_or(Vec::new(), |stage| job.components(&stage.components, dtype));
    let decoder = components.first();
    decoder
        .map(|component| content_of(&component.id).to_owned())
        .unwrap_or_default()
}

/// Takes down how far a track has come, and makes of a piece what the client has not got yet: a stage that is run again
/// delivers from the beginning. What belongs to a proof nobody gets.
fn delivered(job: &mut JobRecord, item: u32, piece: Piece) -> Option<JobEventKind> {
    let Some(units) = piece.units() else {
        tracing::warn!(job = %job.id, format = ?piece.format, "a stage delivered what is no piece of its result");
        return None;
    };
    let (track, first, format) = (piece.track.clone(), piece.first, piece.format);
    let (_, done) = *job.delivered.entry((item, track.clone())).or_insert((format, 0));
    if first > done {
        tracing::warn!(job = %job.id, first, done, "a stage left out a part of its result");
        return None;
    }
    let piece = piece.from_unit(done)?;
    job.delivered.insert((item, track), (format, first + units));
    let seed = job.seed().wrapping_add(u64::from(item));
    (!job.is_load()).then_some(JobEventKind::Piece { item, seed, piece })
}

/// Whether all of an item has been delivered, in the format that was asked for.
fn check_delivered(job: &JobRecord, step: Step) -> Result<(), Error> {
    let of_item = job.delivered.iter().filter(|((item, _), _)| *item == step.item);
    let tracks: Vec<_> = of_item.map(|(_, delivered)| delivered).collect();
    let asked = job.run().map(|run| &run.request.medium);
    let is_whole = |(format, units): &&(pipelines::MediaFormat, u64)| {
        *units == format.units() && asked.is_some_and(|asked| asked.is_made_as(format))
    };
    if !tracks.is_empty() && tracks.iter().all(is_whole) {
        return Ok(());
    }
    let (key, stage) = (&job.entry.key, job.name_of(step));
    let asked = asked.map_or("result", |asked| asked.name());
    let told =
        format!("{stage} of {key} delivered {tracks:?}, which is not the whole {asked} that was asked for");
    Err(match job.is_load() {
        true => Error::ModelDamaged(format!("{key} did not prove itself: {told}")),
        false => Error::Internal(told),
    })
}
