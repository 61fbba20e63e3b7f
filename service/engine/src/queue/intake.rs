//! What handles ask for: jobs are recorded, joined, listed and cancelled here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pipelines::{HostTensor, ImageRequest, StageKind, StagePlan};
use residency::{Bytes, Component, ComponentId};
use tokio::time::Instant;

use super::actor::Actor;
use super::listener::{Job, Mailbox};
use super::record::{JobRecord, Phase, StepKind, input_bytes, size_of_latent, steps_of};
use super::reductions::Reductions;
use super::report::JobInfo;
use super::request::{OpenModels, Request, Submission};
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
                tensor,
                vae_id,
                reply,
            } => {
                let _ = reply.send(self.latents.put(tensor, vae_id, now));
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
            text_key,
            reductions,
        } = submission;
        let JobSpec { options, entry, work } = spec;
        let models = self.refreshed(&entry, &models);
        let init = match &work {
            JobWork::Decode { latent } => Some(self.latents.get(latent, now)?.tensor),
            JobWork::Generate(generate) => {
                let latent = generate.init_latent.as_ref().map(|id| self.latents.get(id, now));
                latent.transpose()?.map(|latent| latent.tensor)
            }
            JobWork::Encode { .. } | JobWork::Load { .. } => None,
        };
        let canary = match &work {
            JobWork::Load { replace, prove, .. } if *prove || replace.is_some() => {
                models.values().next().map(|open| open.model.canary_request())
            }
            _ => None,
        };
        let swap = old.map(|(old, opened)| {
            let opened = self.refreshed(&old, &opened);
            Box::new(Swap::new(old, opened, now))
        });
        let plans = plans_of(&work, &models, init.as_ref(), canary.as_ref());
        let arrival = self.number();
        let retained = (!options.idempotency_key.is_empty()).then(Vec::new);
        Ok(JobRecord {
            id: format!("job-{}", &uuid::Uuid::new_v4().simple().to_string()[..16]).into(),
            arrival,
            detached: options.detach,
            steps: steps_of(&work, self.settings.policy),
            options,
            entry,
            work,
            models,
            reductions: reductions.map_or(Reductions::Unknown, Reductions::Known),
            plans,
            text_key,
            accepted: now,
            cursor: 0,
            text: None,
            init,
            canary,
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
                    stage: need.name.to_owned(),
                    deaths,
                });
            }
        }
        Ok(())
    }

    /// A latent that a client names must be of this model's VAE and of the right shape; it stays while the job does.
    fn lease_input(&mut self, job: &mut JobRecord, now: Instant) -> Result<(), Error> {
        let id = match &job.work {
            JobWork::Decode { latent } => latent.clone(),
            JobWork::Generate(generate) => match &generate.init_latent {
                Some(id) => id.clone(),
                None => return Ok(()),
            },
            JobWork::Encode { .. } | JobWork::Load { .. } => return Ok(()),
        };
        let info = self.latents.info(&id, now)?;
        let same_vae = job.models.values().any(|open| {
            let identities = open
                .components
                .iter()
                .chain(open.model.components())
                .filter(|c| c.name == VAE);
            identities
                .into_iter()
                .any(|c| content_of(&c.id) == info.vae_id || *c.id.0 == *info.vae_id)
        });
        if !same_vae {
            let key = &job.entry.key;
            return Err(Error::LatentMismatch(format!(
                "latent {id} belongs to VAE {}, not to that of {key}",
                info.vae_id
            )));
        }
        let (width, height) = job.size();
        let expected = job
            .models
            .values()
            .next()
            .map(|open| open.model.latent_shape(width, height));
        if expected.as_ref().is_some_and(|expected| *expected != info.shape) {
            let (expected, found) = (expected.unwrap_or_default(), &info.shape);
            return Err(Error::LatentMismatch(format!(
                "latent {id} is {found:?}, and {expected:?} is asked for"
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
            stage: job.step().map_or("", |step| step.kind.name()),
            step: job.step_done,
            steps: job.steps_of_stage,
            position: position.unwrap_or(0),
            age: now.duration_since(job.accepted),
            error: None,
        }
    }
}

/// Name of the component that latents belong to.
pub(super) const VAE: &str = "vae";

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

fn plans_of(
    work: &JobWork,
    models: &OpenModels,
    init: Option<&HostTensor>,
    canary: Option<&ImageRequest>,
) -> BTreeMap<String, Vec<StagePlan>> {
    let plans = models.iter().map(|(dtype, open)| {
        let mut plans = match work {
            JobWork::Generate(generate) => open.model.stages(&generate.request),
            JobWork::Encode { request } => {
                vec![
                    open.model
                        .lone_stage(StageKind::EncodeImage, request.width, request.height),
                ]
            }
            JobWork::Decode { .. } => {
                let (width, height) = init.map_or((0, 0), size_of_latent);
                vec![open.model.lone_stage(StageKind::Decode, width, height)]
            }
            JobWork::Load { .. } => canary.map_or(Vec::new(), |request| open.model.stages(request)),
        };
        for component in plans.iter_mut().flat_map(|plan| &mut plan.components) {
            rename(component, &open.components);
        }
        (dtype.clone(), plans)
    });
    plans.collect()
}

/// Puts in the identity that a component is known by.
pub(super) fn rename(component: &mut Component, known: &[Component]) {
    if let Some(known) = known.iter().find(|known| known.name == component.name) {
        component.id = known.id.clone();
    }
}

impl JobRecord {
    /// Whether a step is the one that a kind of stage belongs to.
    pub(super) fn is_at(&self, index: usize, kind: StageKind) -> bool {
        self.steps
            .get(index)
            .is_some_and(|step| step.kind == StepKind::Stage(kind))
    }
}
