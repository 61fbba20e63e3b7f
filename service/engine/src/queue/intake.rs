//! What handles ask for: jobs are recorded, joined, listed and cancelled here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pipelines::{Role, Values};
use residency::{Bytes, ComponentId};
use tokio::time::Instant;

use super::actor::Actor;
use super::latents::shapes_of;
use super::listener::{Job, Mailbox};
use super::record::{JobRecord, Phase, input_bytes};
use super::reductions::Reductions;
use super::report::JobInfo;
use super::request::{OpenModels, Request, Submission};
use super::steps::{Step, StepKind, decodable, steps_of};
use super::swap::Swap;
use crate::error::Error;
use crate::job::{JobEvent, JobEventKind, JobId, JobReport, JobSpec, JobWork};
use crate::library::{Entry, OpenModel};

impl Actor {
    pub(super) fn on_request(&mut self, request: Request, now: Instant) {
        // A reply that cannot be delivered concerns nobody: whoever asked has left.
        match request {
            Request::Submit { submission, reply } => {
                let _ = reply.send(self.submit(*submission, now));
            }
            Request::Reductions { job, reductions } => self.reductions_opened(&job, reductions),
            Request::Left { job, listener } => self.left(&job, listener, now),
            Request::Cancel {
                release_latents,
                job,
                reply,
            } => {
                let _ = reply.send(self.cancel(&job, release_latents, now));
            }
            Request::Status { reply } => {
                let _ = reply.send(Arc::new(self.status_report(now)));
            }
            Request::Jobs { include_ended, reply } => {
                let _ = reply.send(self.infos(include_ended, now));
            }
            Request::Plan {
                submission,
                card,
                reply,
            } => {
                let _ = reply.send(self.plan_report(*submission, &card, now));
            }
            Request::Unload { entry, force, reply } => self.unload(entry, force, reply, now),
            Request::Pin {
                entry,
                models,
                unpin,
                reply,
            } => {
                let _ = reply.send(self.pin(&entry, &models, unpin, now));
            }
            Request::Hold {
                entry,
                models,
                client,
                ttl,
                reply,
            } => {
                let _ = reply.send(self.hold(&entry, &models, client, ttl, now));
            }
            Request::ReleaseHold { id, reply } => {
                let _ = reply.send(self.release_hold(&id, now));
            }
            Request::Trim { card, reply } => self.trim(&card, reply, now),
            Request::Reserve {
                card,
                bytes,
                ttl,
                label,
                reply,
            } => {
                self.reserve(&card, bytes, ttl, label, reply, now);
            }
            Request::ReleaseReservation { id, reply } => {
                let _ = reply.send(self.release_reservation(&id, now));
            }
            Request::Latent { id, reply } => {
                let _ = reply.send(self.latents.get(&id, now));
            }
            Request::PutLatent {
                values,
                decoder_id,
                reply,
            } => {
                let _ = reply.send(self.latents.put(values, decoder_id, now));
                self.dirty = true;
            }
            Request::ReleaseLatent { id, reply } => {
                let _ = reply.send(self.latents.give_up(&id));
                self.dirty = true;
            }
            Request::Census { reply } => drop(reply.send(self.census())),
            Request::Drain { deadline, reply } => self.drain(deadline, reply),
        }
    }

    fn submit(&mut self, submission: Submission, now: Instant) -> Result<Job, Error> {
        if self.is_draining() {
            return Err(Error::ShuttingDown);
        }
        let key = &submission.spec.options.idempotency_key;
        if !key.is_empty() {
            let live = self
                .jobs
                .values()
                .find(|job| job.options.idempotency_key == *key)
                .map(|job| job.id.clone());
            if let Some(id) = live {
                return self.join_live(&id, &submission.spec, now);
            }
            if self.ended.by_key(key).is_some() {
                return self.join_ended(&submission.spec);
            }
        }
        if self.jobs.len() >= self.settings.max_jobs {
            return Err(Error::QueueFull {
                limit: self.settings.max_jobs,
            });
        }
        self.refuse_heavy(&submission.spec.work)?;
        let mut job = self.record(submission, now)?;
        self.refuse_deadly(&job)?;
        self.lease_input(&mut job, now)?;
        self.claims.learn(&job.entry, &job.models, now);
        if let Some(swap) = &job.swap {
            self.claims.learn(&swap.old, &swap.old_models, now);
        }
        self.shares.arrive(&job.options.client);
        let handle = self.listen(&mut job, false);
        job.emit(now, JobEventKind::Accepted { joined: false });
        self.jobs.insert(job.id.clone(), job);
        self.replan = true;
        Ok(handle)
    }

    /// A job is refused while the init images of those before it leave no room for its own.
    fn refuse_heavy(&self, work: &JobWork) -> Result<(), Error> {
        let (own, others) = (input_bytes(work), self.jobs.values());
        let kept = others.map(|job| input_bytes(&job.work)).sum::<Bytes>();
        if own > Bytes::ZERO && kept > Bytes::ZERO && kept + own > self.settings.input_bytes {
            return Err(Error::QueueFull {
                limit: self.jobs.len(),
            });
        }
        Ok(())
    }

    /// A job as it would be submitted, on nobody's list yet.
    pub(super) fn record(&mut self, submission: Submission, now: Instant) -> Result<JobRecord, Error> {
        let Submission {
            spec,
            models,
            old,
            plans,
            proof,
            reductions,
        } = submission;
        let JobSpec { options, entry, work } = spec;
        let models = self.refreshed(&entry, &models);
        let brought = match &work {
            JobWork::Run(run) => match &run.start {
                Some(start) => {
                    let values = self.latents.get(&start.latent, now)?.values;
                    named_as_decoded(values, &plans)
                }
                None => Values::new(),
            },
            JobWork::Load { .. } => Values::new(),
        };
        let swap = old.map(|(old, opened)| {
            let opened = self.refreshed(&old, &opened);
            Box::new(Swap::new(old, opened, now))
        });
        let plan = plans.values().next().map_or(&[][..], Vec::as_slice);
        let steps = match &work {
            JobWork::Run(run) => steps_of(plan, run, self.settings.policy),
            JobWork::Load { .. } => {
                let load = Step {
                    kind: StepKind::Load,
                    item: 0,
                };
                let proven = proof
                    .iter()
                    .flat_map(|run| steps_of(plan, run, self.settings.policy));
                std::iter::once(load).chain(proven).collect()
            }
        };
        let arrival = self.number();
        let retained = (!options.idempotency_key.is_empty()).then(Vec::new);
        Ok(JobRecord {
            id: format!("job-{}", &uuid::Uuid::new_v4().simple().to_string()[..16]).into(),
            arrival,
            detached: options.detach,
            steps,
            options,
            entry,
            work,
            models,
            reductions: reductions.map_or(Reductions::Unknown, Reductions::Known),
            plans,
            accepted: now,
            cursor: 0,
            values: Values::new(),
            item_values: BTreeMap::new(),
            brought,
            delivered: BTreeMap::new(),
            proof,
            swap,
            latents: BTreeMap::new(),
            told: BTreeSet::new(),
            input_latent: None,
            phase: Phase::Queued,
            keeps: None,
            last_card: None,
            begun: false,
            overtaken: 0,
            deaths: 0,
            patience: None,
            waiting_since: None,
            waited: Duration::ZERO,
            refusals: BTreeMap::new(),
            never_on: BTreeSet::new(),
            low_memory: false,
            ending: None,
            out_of_memory: None,
            releases_latents: false,
            report: JobReport::default(),
            step_done: 0,
            steps_of_stage: 0,
            position: None,
            listeners: BTreeMap::new(),
            retained,
        })
    }

    /// An entry's components under the identities that they go by now. This is the moment to change over to hashes
    /// that have been found, as far as nothing goes by the old identities.
    pub(super) fn refreshed(&mut self, entry: &Entry, models: &OpenModels) -> OpenModels {
        self.library.adopt(&|id| self.is_named(id));
        let refreshed = models.iter().map(|(dtype, open)| {
            let components = self.library.components(entry, dtype);
            let components = components.unwrap_or_else(|| open.components.clone());
            (
                dtype.clone(),
                OpenModel {
                    model: open.model.clone(),
                    components,
                },
            )
        });
        refreshed.collect()
    }

    fn is_named(&self, id: &ComponentId) -> bool {
        let mut of_jobs = self
            .jobs
            .values()
            .flat_map(|job| job.models.values())
            .flat_map(|open| &open.components);
        let mut known = self.claims.known();
        self.cards.iter().any(|card| card.ledger.resident(id).is_some())
            || of_jobs.any(|component| component.id == *id)
            || self.jobs.values().any(|job| job.replaces(id))
            || known.any(|(key, known)| {
                (self.claims.is_pinned(key) || self.claims.holder(key).is_some()) && known.names(id)
            })
    }

    /// A job that has not begun is refused if others like it have killed their workers.
    pub(super) fn refuse_deadly(&self, job: &JobRecord) -> Result<(), Error> {
        if job.begun || !self.learned.knows_deadly() {
            return Ok(());
        }
        for (dtype, index) in job
            .plans
            .keys()
            .flat_map(|dtype| (0..job.steps.len()).map(move |i| (dtype, i)))
        {
            let Some(need) = job.need(index, dtype) else {
                continue;
            };
            if let Some(deaths) = self.learned.refuses(&job.entry.key, &need.shape()) {
                let card = "every card that tried".to_owned();
                return Err(Error::WorkerDied {
                    card,
                    stage: need.name.to_string(),
                    deaths,
                });
            }
        }
        Ok(())
    }

    /// Values that a client names must be what this model decodes, and of the shapes that the request asks for; they stay
    /// while the job does.
    fn lease_input(&mut self, job: &mut JobRecord, now: Instant) -> Result<(), Error> {
        let JobWork::Run(run) = &job.work else {
            return Ok(());
        };
        let Some(id) = run.start.as_ref().map(|start| start.latent.clone()) else {
            return Ok(());
        };
        let info = self.latents.info(&id, now)?;
        let plan = job.plans.values().next().map_or(&[][..], Vec::as_slice);
        let decodes = plan.iter().filter(|stage| stage.role == Role::Decode);
        let decoders: Vec<&String> = decodes.flat_map(|stage| &stage.components).collect();
        let same_decoder = job.models.values().any(|open| {
            let mut identities = open
                .components
                .iter()
                .chain(open.model.components())
                .filter(|c| decoders.contains(&&c.name));
            identities.any(|c| content_of(&c.id) == info.decoder_id || *c.id.0 == *info.decoder_id)
        });
        if !same_decoder {
            let key = &job.entry.key;
            return Err(Error::LatentMismatch(format!(
                "latent {id} belongs to VAE {}, not to that of {key}",
                info.decoder_id
            )));
        }
        let found = shapes_of(&job.brought);
        let expected = decodable(plan);
        if !expected.iter().all(|value| found.contains(value)) {
            let shapes = |values: Vec<&pipelines::ValueShape>| -> Vec<String> {
                values
                    .into_iter()
                    .map(|value| format!("{:?}", value.shape))
                    .collect()
            };
            let (expected, found) = (
                shapes(expected).join(", "),
                shapes(found.iter().collect()).join(", "),
            );
            return Err(Error::LatentMismatch(format!(
                "latent {id} is {found}, and {expected} is asked for"
            )));
        }
        self.latents.lease(&id, now)?;
        job.input_latent = Some(id);
        Ok(())
    }

    fn listen(&mut self, job: &mut JobRecord, joined: bool) -> Job {
        let listener = self.number();
        let mailbox = Arc::new(Mailbox::new(self.settings.unread_pictures));
        job.listeners.insert(listener, mailbox.clone());
        let requests = self.own_requests.clone();
        Job {
            id: job.id.clone(),
            entry: job.entry.clone(),
            joined,
            mailbox,
            listener,
            requests,
        }
    }

    fn join_live(&mut self, id: &JobId, spec: &JobSpec, now: Instant) -> Result<Job, Error> {
        let key = &spec.options.idempotency_key;
        let Some(mut job) = self.jobs.remove(id) else {
            return Err(Error::JobNotFound(id.to_string()));
        };
        let handle = if job.entry.key == spec.entry.key && job.work == spec.work {
            let handle = self.listen(&mut job, true);
            job.joined_by(&spec.options);
            let at_ms = now.duration_since(job.accepted).as_millis() as u64;
            replay(
                &handle.mailbox,
                at_ms,
                job.retained.as_deref().unwrap_or_default(),
            );
            Ok(handle)
        } else {
            Err(Error::KeyReused(key.clone()))
        };
        self.jobs.insert(id.clone(), job);
        handle
    }

    fn join_ended(&mut self, spec: &JobSpec) -> Result<Job, Error> {
        let (listener, key) = (self.number(), &spec.options.idempotency_key);
        let same = |retained: &&super::ending::Retained| {
            retained.model_key == spec.entry.key && retained.work == spec.work
        };
        let retained = self
            .ended
            .by_key(key)
            .filter(same)
            .ok_or_else(|| Error::KeyReused(key.clone()))?;
        let mailbox = Arc::new(Mailbox::new(self.settings.unread_pictures));
        let at_ms = retained.events.last().map_or(0, |event| event.at_ms);
        replay(&mailbox, at_ms, &retained.events);
        mailbox.close();
        let requests = self.own_requests.clone();
        let (id, entry) = (retained.id.clone(), spec.entry.clone());
        Ok(Job {
            id,
            entry,
            joined: true,
            mailbox,
            listener,
            requests,
        })
    }

    fn left(&mut self, id: &JobId, listener: u64, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.listeners.remove(&listener);
        if job.listeners.is_empty() && !job.detached {
            self.stop(id, Error::Cancelled, now);
        }
    }

    fn cancel(&mut self, id: &str, release_latents: bool, now: Instant) -> Result<bool, Error> {
        if release_latents {
            self.latents.give_up_made_by(id);
            self.dirty = true;
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.releases_latents |= release_latents;
            let id = job.id.clone();
            self.stop(&id, Error::Cancelled, now);
            return Ok(true);
        }
        if self.ended.knows(id) {
            return Ok(false);
        }
        Err(Error::JobNotFound(id.to_owned()))
    }

    /// Jobs in the order of their arrival.
    pub(super) fn infos(&self, include_ended: bool, now: Instant) -> Vec<JobInfo> {
        let mut live: Vec<&JobRecord> = self.jobs.values().collect();
        live.sort_unstable_by_key(|job| job.arrival);
        let live = live.into_iter().map(|job| self.info(job, job.position, now));
        let ended = self.ended.infos().filter(|_| include_ended).cloned();
        live.chain(ended).collect()
    }

    pub(super) fn info(&self, job: &JobRecord, position: Option<u32>, now: Instant) -> JobInfo {
        let card = job.last_card.and_then(|index| self.cards.get(index));
        JobInfo {
            id: job.id.clone(),
            client: job.options.client.clone(),
            priority: job.options.priority,
            state: job.phase.name(),
            kind: job.kind_name(),
            model_key: job.entry.key.clone(),
            card: card.map(|card| card.description.id.clone()).unwrap_or_default(),
            stage: job.stage_name(),
            step: job.step_done,
            steps: job.steps_of_stage,
            position: position.unwrap_or(0),
            age: now.duration_since(job.accepted),
            error: None,
        }
    }
}

/// An identity without its dtype and format: a latent fits the same VAE on every card, however it is held there.
pub(super) fn content_of(id: &ComponentId) -> &str {
    let parts = if id.0.starts_with("path:") {
        id.0.rsplit_once('@')
    } else {
        id.0.split_once(':')
    };
    parts.map_or(&*id.0, |(content, _)| content)
}

/// What somebody who joins late has missed.
fn replay(mailbox: &Mailbox, at_ms: u64, events: &[JobEvent]) {
    mailbox.push(JobEvent {
        at_ms,
        kind: JobEventKind::Accepted { joined: true },
    });
    let missed = events
        .iter()
        .filter(|event| !matches!(event.kind, JobEventKind::Accepted { .. }));
    for event in missed {
        mailbox.push_missed(event.clone());
    }
}

/// Values as decoding names them: one that came without a name is the only one that is decoded.
fn named_as_decoded(mut values: Values, plans: &BTreeMap<String, Vec<pipelines::StagePlan>>) -> Values {
    let plan = plans.values().next().map_or(&[][..], Vec::as_slice);
    if let [only] = decodable(plan)[..]
        && let Some(unnamed) = values.remove("")
    {
        values.insert(only.name.clone(), unnamed);
    }
    values
}
