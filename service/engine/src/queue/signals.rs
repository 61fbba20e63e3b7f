//! What workers say, and what follows from it for the job that they say it of.

use pipelines::{RequestError, StageKind, StageOutput};
use residency::Bytes;
use tokio::time::Instant;

use super::actor::{Actor, TICK};
use super::cards::{Errand, InFlight};
use super::intake::{VAE, content_of};
use super::placing::text_cache_key;
use super::record::{JobRecord, Phase, Refusal, StepKind};
use super::swap::check_proof;
use super::{CardSignal, Signal};
use crate::error::{Error, Shortfall};
use crate::job::{JobEventKind, JobWork, StageReport};
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
            return; // the dead say nothing
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
        let picture = step.picture;
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
                    name: step.kind.name(),
                    index: job.cursor as u32 + 1,
                    of: job.steps.len() as u32,
                    chunking,
                    cached: false,
                    card: card_id,
                    picture,
                }
            }
            Progress::Step { n, of } => {
                (job.step_done, job.steps_of_stage) = (n, of);
                JobEventKind::Step { n, of, picture }
            }
            Progress::Preview {
                step,
                width,
                height,
                rgb,
            } => JobEventKind::Preview {
                step,
                picture,
                width,
                height,
                rgb,
            },
            Progress::Retrying { reason, message } => JobEventKind::Retrying {
                reason,
                message,
                stage: step.kind.name(),
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
        gpu::Timeline::tell("order, there and back", running.need.name, took);
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
            let key = (job.entry.key.clone(), running.need.name, plan.shape.clone());
            self.learned
                .stage_completed(key, open.model.family(), plan, &card, &completed);
        }
        for name in &completed.resident_already {
            if !job.report.resident_already.contains(name) {
                job.report.resident_already.push(name.clone());
            }
        }
        if completed.approximate {
            let words = format!("{} in {}", step.kind.name(), completed.chunking);
            if !job.report.approximations.contains(&words) {
                job.report.approximations.push(words);
            }
        }
        job.report.stages.push(StageReport {
            name: step.kind.name(),
            run: std::time::Duration::from_millis(completed.run_ms),
            moves: std::time::Duration::from_millis(completed.move_ms),
            wait: std::mem::take(&mut job.waited),
            peak_scratch: completed.peak_scratch,
            peak_bytes: completed.peak_bytes,
            predicted_scratch: completed.predicted_scratch,
            chunking: completed.chunking,
            attention: completed.attention,
            cached: false,
            picture: step.picture,
            card: card.id.clone(),
        });
        self.take_output(job, &card.compute_dtype, completed.output, now)?;
        job.cursor += 1;
        job.begun = true;
        job.keeps = Some(index);
        job.patience = None;
        job.refusals.clear();
        job.never_on.clear();
        job.low_memory = false;
        Ok(())
    }

    fn take_output(
        &mut self,
        job: &mut JobRecord,
        dtype: &str,
        output: Option<StageOutput>,
        now: Instant,
    ) -> Result<(), Error> {
        let Some(step) = job.step() else { return Ok(()) };
        match (step.kind, output) {
            (StepKind::Load | StepKind::Restore, None) => {}
            (StepKind::Stage(StageKind::EncodeText), Some(StageOutput::Text(text))) => {
                if let Some(key) = text_cache_key(job, dtype) {
                    self.texts.put(key, text.clone());
                }
                job.text = Some(text);
            }
            (StepKind::Stage(StageKind::EncodeImage), Some(StageOutput::Latent(latent)))
                if matches!(job.work, JobWork::Generate(_)) =>
            {
                job.init = Some(latent);
            }
            (
                StepKind::Stage(StageKind::EncodeImage | StageKind::Denoise),
                Some(StageOutput::Latent(latent)),
            ) => {
                let vae = vae_of(job, dtype);
                let id = self
                    .latents
                    .put_leased(latent, vae, job.id.clone(), job.keeps_latents(), now);
                job.latents.insert(step.picture, id);
                if job.keeps_latents() {
                    self.tell_of_latent(job, step.picture, now);
                }
            }
            (StepKind::Stage(StageKind::Decode), Some(StageOutput::Picture { width, height, rgb })) => {
                if job.is_load() {
                    check_proof(job, width, height, &rgb)?;
                    self.forget_latent(job, step.picture, now);
                    return Ok(());
                }
                let (picture, seed) = (step.picture, job.seed().wrapping_add(u64::from(step.picture)));
                job.emit(
                    now,
                    JobEventKind::Picture {
                        picture,
                        seed,
                        width,
                        height,
                        rgb,
                    },
                );
                self.forget_latent(job, step.picture, now);
            }
            (kind, _) => {
                return Err(Error::Internal(format!(
                    "{} gave something else than it should",
                    kind.name()
                )));
            }
        }
        Ok(())
    }

    fn forget_latent(&mut self, job: &mut JobRecord, picture: u32, now: Instant) {
        if let Some(id) = job.latents.remove(&picture) {
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
                if let (Some(plan), Some(open)) = (&running.need.plan, job.models.get(&card.compute_dtype)) {
                    self.learned
                        .out_of_memory(open.model.family(), plan, card, usable);
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
                field: running.need.name.to_owned(),
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
        gpu::Timeline::tell("order, there and back", running.need.name, took);
        let card_ms = took.as_secs_f64() * 1000.0;
        self.shares
            .charge(&job.options.client, job.options.priority, card_ms);
        job.enter(Phase::Queued, now);
        if let Some(ending) = job.ending.take() {
            return self.end(job, Err(ending), now);
        }
        job.deaths += 1;
        let stage = running.need.name;
        if job.deaths > 1 {
            self.learned
                .died(&job.entry.key, &running.need.shape(), &job.id, now);
            let error = Error::WorkerDied {
                card,
                stage: stage.to_owned(),
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

/// What a job's latents belong to.
fn vae_of(job: &JobRecord, dtype: &str) -> String {
    let vae = job
        .models
        .get(dtype)
        .and_then(|open| open.components.iter().find(|c| c.name == VAE));
    vae.map(|c| content_of(&c.id).to_owned()).unwrap_or_default()
}
