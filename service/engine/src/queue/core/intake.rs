//! Jobs are recorded, joined, listed, cancelled and left here.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use model::{RequestError, Role, Values};
use residency::{Bytes, ComponentId, Policy};
use tokio::time::Instant;

use super::Core;
use crate::error::{CancelledBy, Error, JobBound};
use crate::job::{JobEvent, JobEventKind, JobId, JobOptions, JobReport, JobSpec, JobWork, Latent, Reach};
use crate::library::{Entry, OpenModel};
use crate::queue::Settings;
use crate::queue::core::Effect;
use crate::queue::latents::shapes_of;
use crate::queue::listener::{Joined, Mailbox, Unread};
use crate::queue::record::{Attempt, JobRecord, State, content_of, input_bytes};
use crate::queue::reductions::Reductions;
use crate::queue::replay::Replay;
use crate::queue::report::{JobInfo, PlanReport};
use crate::queue::request::{OpenModels, Submission};
use crate::queue::shared_bound::{Exceeded, SharedBound};
use crate::queue::steps::{JobSteps, decodable, steps_of, steps_of_load};
use crate::queue::swap::Swap;

/// After which time a job may find a place among those of its token.
const RETRY_JOBS: Duration = Duration::from_secs(2);

impl Core {
    /// As [`Core::submit`]. A job that is detached by this submission gets a second listener, for who keeps its results: it hears what
    /// the first one does.
    pub(in crate::queue) fn submit_kept(
        &mut self,
        submission: Submission,
        now: Instant,
    ) -> Result<(Joined, Option<Joined>), Error> {
        let spec = submission.spec.clone();
        let key = &spec.options.idempotency_key;
        let was_detached = self
            .live_by_key(&spec.options)
            .and_then(|id| self.jobs.get(&id))
            .is_some_and(|job| job.detached);
        let own = self.submit(submission, now)?;
        let keeper = match self.jobs.get(&own.id).is_some_and(|job| job.detached) && !was_detached {
            true if own.joined && !key.is_empty() => Some(self.join_live(&own.id.clone(), &spec, now)?),
            true => self.listen_to(&own.id.clone(), &Reach::All).ok(),
            false => None,
        };
        Ok((own, keeper))
    }

    /// Adds a listener to a job in the queue. It hears nothing of what was before.
    pub(in crate::queue) fn listen_to(&mut self, id: &str, reach: &Reach) -> Result<Joined, Error> {
        let listener = self.number();
        let account = self.jobs.get(id).map(|job| job.options.account.clone());
        let mailbox = self.mailbox(&account.unwrap_or_default());
        let job = self
            .jobs
            .get_mut(id)
            .filter(|job| reach.has(&job.options.account));
        let job = job.ok_or_else(|| Error::JobNotFound(id.to_owned()))?;
        Ok(listen(job, listener, mailbox, true))
    }

    /// The job in the queue that has the key of these options.
    fn live_by_key(&self, options: &JobOptions) -> Option<JobId> {
        let is_it = |other: &JobOptions| {
            !options.idempotency_key.is_empty()
                && other.idempotency_key == options.idempotency_key
                && other.account == options.account
        };
        let live = self.jobs.values().find(|job| is_it(&job.options));
        live.map(|job| job.id.clone())
    }

    pub(in crate::queue) fn submit(&mut self, submission: Submission, now: Instant) -> Result<Joined, Error> {
        if self.drain.is_some() {
            return Err(Error::ShuttingDown);
        }
        let JobOptions {
            idempotency_key: key,
            account,
            id,
            ..
        } = &submission.spec.options;
        if let Some(id) = self.live_by_key(&submission.spec.options) {
            return self.join_live(&id, &submission.spec, now);
        }
        if !key.is_empty() && self.ended.by_key(account, key).is_some() {
            return self.join_ended(&submission.spec);
        }
        if id.as_ref().is_some_and(|id| self.jobs.contains_key(id)) {
            return Err(Error::Internal("a job was submitted twice".to_owned()));
        }
        self.check_places(&submission.spec.options)?;
        if matches!(&submission.spec.work, JobWork::Run(run) if run.request.lacks_media_data()) {
            let problem = "a request came without the data of its media, and can only be planned";
            return Err(Error::Internal(problem.to_owned()));
        }
        self.check_input_bytes(&submission.spec.work)?;
        let mut job = self.record(submission, now)?;
        let view = self.view(now);
        if let Some(error) = view
            .refusal_of_cards(&job)
            .or_else(|| view.refusal_after_deaths(&job))
        {
            return Err(error);
        }
        self.lease_input(&mut job, now)?;
        self.claims.learn(&job.entry, &job.models, now);
        if let Some(swap) = &job.swap {
            self.claims.learn(&swap.old, &swap.old_models, now);
        }
        self.shares.arrive(&job.options);
        let mailbox = self.mailbox(&job.options.account);
        let handle = listen(&mut job, self.number(), mailbox, false);
        job.emit(now, JobEventKind::Accepted { joined: false });
        tracing::info!(
            job = %job.id, client = job.options.client, call = job.call().as_str(), model = job.entry.key, "accepted",
        );
        self.jobs.insert(job.id.clone(), job);
        self.replan = true;
        Ok(handle)
    }

    /// The files of a job's model were replaced. The job begins again with the new files, once, if nothing of its result
    /// was made with the old ones. False: it cannot.
    pub(super) fn reopen(&mut self, id: &JobId, problem: &str, now: Instant) -> bool {
        let cards = self.cards.iter().map(|card| card.description.clone());
        let Some(job) = self.jobs.get_mut(id).filter(|job| job.may_begin_again()) else {
            return false;
        };
        job.reopened = true;
        job.enter(State::Reopening, now);
        let message = format!("{problem}; it begins again with the files that are there now");
        tracing::info!(job = %id, message, "a model was replaced");
        let stage = job.stage_name();
        job.emit(
            now,
            JobEventKind::Retrying {
                reason: "MODEL_CHANGED".to_owned(),
                message,
                stage,
            },
        );
        let spec = JobSpec {
            options: job.options.clone(),
            entry: job.entry.clone(),
            work: job.work.clone(),
        };
        self.effects.push(Effect::Reopen {
            job: id.clone(),
            spec: Box::new(spec),
            cards: cards.collect(),
        });
        true
    }

    pub(super) fn reopened(&mut self, id: &JobId, submission: Result<Submission, Error>, now: Instant) {
        if !self.jobs.contains_key(id) {
            return; // it has ended meanwhile
        }
        let opened = match submission.and_then(|submission| self.record(submission, now)) {
            Ok(opened) => opened,
            Err(error) => return self.fail(id, error, now),
        };
        self.claims.learn(&opened.entry, &opened.models, now);
        if let Some(job) = self.jobs.get_mut(id) {
            job.begin_again(opened, now);
        }
        self.replan = true;
    }

    /// Bounds the number of jobs in the queue: of all, of one address and of one client there. The last places are kept for addresses that
    /// have no job. On a transport without addresses, only clients are bounded.
    fn check_places(&self, options: &JobOptions) -> Result<(), Error> {
        let Settings {
            max_jobs,
            max_jobs_per_client,
            ..
        } = self.settings;
        let (client, address) = (&options.client, &options.account);
        let of_client = self.count(|others| others.account == *address && others.client == *client);
        let of_address = match address.is_empty() {
            true => of_client,
            false => self.count(|others| others.account == *address),
        };
        let places = SharedBound::new(max_jobs as u64);
        let has_place = places.check(self.jobs.len() as u64, of_address as u64, 1);
        if let Some(most) = options.most_jobs.filter(|most| of_address as u64 >= *most) {
            return Err(Error::TokenLimit {
                limit: "jobs".into(),
                problem: format!(
                    "the {address} has {of_address} jobs in the queue, and may have {most}: wait until one has ended, or cancel one"
                ),
                retry_after: Some(RETRY_JOBS),
            });
        }
        let bound = match (has_place, of_client >= max_jobs_per_client) {
            (Err(Exceeded::All), _) => return Err(Error::QueueFull { limit: max_jobs }),
            (_, true) => JobBound::Client {
                client: client.clone(),
                limit: max_jobs_per_client,
            },
            (Err(Exceeded::Account), false) if !address.is_empty() => JobBound::Address {
                address: address.clone(),
                limit: places.of_account() as usize,
            },
            (Err(Exceeded::Account | Exceeded::Kept), false) => JobBound::Kept {
                places: places.kept as usize,
            },
            (Ok(()), false) => return Ok(()),
        };
        Err(Error::TooManyJobs(bound))
    }

    fn count(&self, are_meant: impl Fn(&JobOptions) -> bool) -> usize {
        self.jobs.values().filter(|job| are_meant(&job.options)).count()
    }

    /// Refuses a job whose init images exceed what one command to a worker can hold. Also refuses a job while the init images of
    /// other jobs leave no room for its own.
    fn check_input_bytes(&self, work: &JobWork) -> Result<(), Error> {
        let (own, others) = (input_bytes(work), self.jobs.values());
        let most = self.settings.job_input_bytes;
        if own > most {
            let problem = format!(
                "has {own} of pictures, films and sound once they are decoded, and a worker takes {most} at the most: send a \
                 shorter or smaller one"
            );
            return Err(Error::Invalid(vec![RequestError::new("request", problem)]));
        }
        let kept = others.map(|job| input_bytes(&job.work)).sum::<Bytes>();
        if own > Bytes::ZERO && kept > Bytes::ZERO && kept + own > self.settings.input_bytes {
            let limit = self.settings.input_bytes;
            return Err(Error::InputsFull { kept, limit });
        }
        Ok(())
    }

    /// The plan of a submission on a card, or on the card that would be chosen.
    pub(in crate::queue) fn plan_report(
        &mut self,
        submission: Submission,
        card: &str,
        now: Instant,
    ) -> Result<PlanReport, Error> {
        let job = self.record(submission, now)?;
        self.view(now).plan_report(&job, card)
    }

    /// The record of a submission, not in the queue yet.
    fn record(&mut self, submission: Submission, now: Instant) -> Result<JobRecord, Error> {
        let Submission {
            spec,
            models,
            old,
            plans,
            proof,
            reductions,
            upgrades,
        } = submission;
        let JobSpec { options, entry, work } = spec;
        let models = self.refreshed(&entry, &models);
        let mut report = JobReport::default();
        let start_values = match &work {
            JobWork::Run(run) => match &run.start {
                Some(start) => {
                    self.latents.check(&start.latent, &options.reach)?;
                    let Latent { info, values } = self.latents.get(&start.latent, now)?;
                    if start.role == Role::Decode {
                        report
                            .approximations
                            .extend(info.approximation.map(Cow::into_owned));
                    }
                    named_as_decoded(values, &plans)
                }
                None => Values::new(),
            },
            JobWork::Load { .. } => Values::new(),
        };
        let swap = old.map(|(old, opened)| {
            let opened = self.refreshed(&old, &opened);
            Box::new(Swap::new(old, opened))
        });
        let (arrival, unread) = (self.number(), self.unread_of(&options.account));
        let replay = match options.idempotency_key.is_empty() {
            true => Replay::NotJoinable,
            false => Replay::within(self.settings.replay),
        };
        let mut job = JobRecord {
            id: options.id.clone().unwrap_or_else(new_id),
            arrival,
            detached: options.detach,
            steps: JobSteps::default(),
            options,
            entry,
            work,
            models,
            reductions: reductions.map_or(Reductions::Unknown, Reductions::Known),
            upgrades,
            plans,
            accepted: now,
            cursor: 0,
            values: Values::new(),
            item_values: BTreeMap::new(),
            start_values,
            delivered: BTreeMap::new(),
            proof,
            swap,
            memo_keys: RefCell::default(),
            latents: BTreeMap::new(),
            told: BTreeSet::new(),
            input_latent: None,
            state: State::queued(),
            reopened: false,
            attempt: Attempt::default(),
            last_card: None,
            begun: false,
            overtaken: 0,
            waited: Duration::ZERO,
            releases_latents: false,
            report,
            steps_done: (0, 0),
            listeners: BTreeMap::new(),
            unread,
            replay,
            observers: self.settings.observers.clone(),
        };
        // In the order for the card with the most memory, as the job's card is not known yet.
        let largest = (0..self.cards.len()).max_by_key(|&card| self.cards[card].ledger.capacity());
        let policy = largest.map_or_else(Policy::default, |card| self.view(now).policy(&job, card));
        let plan = job.plans.values().next().map_or(&[][..], Vec::as_slice);
        let steps = match &job.work {
            JobWork::Run(run) => steps_of(plan, run, policy),
            JobWork::Load { .. } => steps_of_load(plan, job.proof.as_ref(), job.swap.is_some(), policy),
        };
        job.steps = JobSteps::new(steps, &job.plans);
        Ok(job)
    }

    /// An entry's components with their current identities. Hashes that have been found since replace the old
    /// identities here, except those that a job, a claim or a card still uses.
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

    /// Checks that the latent of a client fits this model's decoder and the shapes of the request, and leases it until the job
    /// ends.
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
                "latent {id} is of decoder {}, and {key} decodes by another",
                info.decoder_id
            )));
        }
        let found = shapes_of(&job.start_values);
        let expected = decodable(plan);
        if !expected.iter().all(|value| found.contains(value)) {
            let shapes = |values: Vec<&model::ValueShape>| -> Vec<String> {
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

    fn join_live(&mut self, id: &JobId, spec: &JobSpec, now: Instant) -> Result<Joined, Error> {
        let listener = self.number();
        let mailbox = self.mailbox(&spec.options.account);
        let Some(job) = self.jobs.get_mut(id) else {
            return Err(Error::JobNotFound(id.to_string()));
        };
        if job.entry.key != spec.entry.key || job.work != spec.work {
            return Err(Error::KeyReused(spec.options.idempotency_key.clone()));
        }
        if job.replay.events().is_none() {
            return Err(Error::TooLargeToJoin(spec.options.idempotency_key.clone()));
        }
        let handle = listen(job, listener, mailbox, true);
        job.joined_by(&spec.options);
        let at_ms = now.duration_since(job.accepted).as_millis() as u64;
        let missed = job.replay.events().unwrap_or_default();
        replay(&handle.mailbox, at_ms, missed);
        Ok(handle)
    }

    fn join_ended(&mut self, spec: &JobSpec) -> Result<Joined, Error> {
        let (listener, key) = (self.number(), &spec.options.idempotency_key);
        let mailbox = self.mailbox(&spec.options.account);
        let same = |retained: &&crate::queue::ended::Retained| {
            retained.model_key == spec.entry.key && retained.work == spec.work
        };
        let retained = self
            .ended
            .by_key(&spec.options.account, key)
            .filter(same)
            .ok_or_else(|| Error::KeyReused(key.clone()))?;
        let at_ms = retained.events.last().map_or(0, |event| event.at_ms);
        replay(&mailbox, at_ms, &retained.events);
        mailbox.close();
        let (id, entry) = (retained.id.clone(), spec.entry.clone());
        Ok(Joined {
            id,
            entry,
            joined: true,
            mailbox,
            listener,
        })
    }

    /// A mailbox for one more listener of an account.
    fn mailbox(&mut self, account: &str) -> Arc<Mailbox> {
        let unread = self.unread_of(account);
        Arc::new(Mailbox::new(
            self.settings.unread_pictures,
            unread,
            self.unencoded.clone(),
        ))
    }

    fn unread_of(&mut self, account: &str) -> Arc<Unread> {
        self.unread.retain(|_, unread| unread.strong_count() > 0);
        let known = self.unread.get(account).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let unread = Arc::new(Unread::new(self.settings.unread_of_account));
            self.unread.insert(account.to_owned(), Arc::downgrade(&unread));
            unread
        })
    }

    pub(super) fn left(&mut self, id: &JobId, listener: u64, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.listeners.remove(&listener);
        if job.listeners.is_empty() && !job.detached {
            self.stop(id, Error::Cancelled(CancelledBy::Left), now);
        }
    }

    pub(in crate::queue) fn cancel(
        &mut self,
        id: &str,
        client: String,
        release_latents: bool,
        reach: &Reach,
        now: Instant,
    ) -> Result<bool, Error> {
        if release_latents {
            self.latents.give_up_made_by(id, reach);
            self.dirty = true;
        }
        let job = self
            .jobs
            .get_mut(id)
            .filter(|job| reach.has(&job.options.account));
        if let Some(job) = job {
            job.releases_latents |= release_latents;
            let id = job.id.clone();
            self.stop(&id, Error::Cancelled(CancelledBy::Call { client }), now);
            return Ok(true);
        }
        if self.ended.knows(id, reach) {
            return Ok(false);
        }
        Err(Error::JobNotFound(id.to_owned()))
    }

    /// Cancels all jobs of an account, and releases its holds: its token was withdrawn.
    pub(in crate::queue) fn withdraw(&mut self, account: &str, now: Instant) {
        let own = self.jobs.values().filter(|job| job.options.account == account);
        let own: Vec<JobId> = own.map(|job| job.id.clone()).collect();
        for id in own {
            self.stop(&id, Error::Cancelled(CancelledBy::Withdrawn), now);
        }
        self.claims.release_holds_of(account);
        self.claims_changed(now);
    }

    /// The jobs in the queue, oldest first, and on request those that have ended recently, the latest first.
    pub(in crate::queue) fn infos(&self, include_ended: bool, now: Instant) -> Vec<JobInfo> {
        let ended = self.ended.infos().filter(|_| include_ended).cloned();
        self.view(now).infos().into_iter().chain(ended).collect()
    }
}

fn new_id() -> JobId {
    format!("job-{}", &uuid::Uuid::new_v4().simple().to_string()[..16]).into()
}

/// Adds a listener to a job.
fn listen(job: &mut JobRecord, listener: u64, mailbox: Arc<Mailbox>, joined: bool) -> Joined {
    job.listeners.insert(listener, mailbox.clone());
    Joined {
        id: job.id.clone(),
        entry: job.entry.clone(),
        joined,
        mailbox,
        listener,
    }
}

/// Sends the events so far to a listener that joins late.
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

/// Renames values to the names that decoding uses: a single value without a name becomes the only one that is decoded.
fn named_as_decoded(mut values: Values, plans: &BTreeMap<String, Vec<model::StagePlan>>) -> Values {
    let plan = plans.values().next().map_or(&[][..], Vec::as_slice);
    if let [only] = decodable(plan)[..]
        && let Some(unnamed) = values.remove("")
    {
        values.insert(only.name.clone(), unnamed);
    }
    values
}
