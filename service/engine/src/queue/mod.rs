//! The queue of the supervisor: jobs, waiting, fair shares, patience, latents, standing claims.
//!
//! The `core` takes inputs and returns effects, without IO and without a lock; one task, the `shell`, passes the inputs in and
//! carries the effects out. Each turn ends with a look at which job can start where, on the ledgers that workers publish; a
//! worker plans again and may answer that memory is short after all.
//!
//! A file owns state (`cards`, `claims`, `encoding`, `ended`, `latents`, `learned`, `listener`, `memos`, `record`, `recycles`, `replay`, `shares`,
//! `swap`, `unloads`, `watchdog`) or decides over a `view::View` and changes nothing (`decide`, `leaving`, `offers`, `order`,
//! `passes`, `placing`, `stage_time`, `status`, `swaps`, `together`). Only `core` sees two owners. `observer`, `reductions`, `report`, `request` and `steps` are values.
//!
//! # Terms
//! *Queued* is after other jobs of this service: it is bounded by the deadline and spends no patience. *Waiting* is for memory
//! that is late or that other programs hold: it is bounded by patience. The *fair order* is that in which jobs would start
//! if all of them fitted; starting a job out of it *overtakes* those before it, each at most so often.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod ahead;
mod cards;
mod claims;
mod core;
mod decide;
mod encoding;
mod ended;
mod latents;
mod learned;
mod leaving;
mod listener;
mod memos;
mod observer;
mod offers;
mod order;
mod passes;
mod placing;
mod record;
mod recycles;
mod reductions;
mod replay;
mod report;
mod request;
mod shared_bound;
mod shared_store;
mod shares;
mod shell;
mod stage_time;
mod status;
mod steps;
mod swap;
mod swaps;
mod together;
mod unloads;
mod view;
mod watchdog;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpu::CardDescription;
use model::{Quantization, RequestError, Role, Values};
use residency::{Bytes, Patience, Policy};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use self::core::{Call, Core, Input};
use cards::ReservationRequest;
pub use claims::{KeptClaims, KeptHold, KeptReservation, Reserver};
pub use encoding::{PieceToEncode, PiecesToEncode, Waits};
pub use learned::KeptLearned;
pub use listener::Job;
pub use observer::{Happening, ObservedJob, Observer, Observers};
use reductions::{open_reductions, open_upgrades};
pub use report::{
    CardState, CardStatus, JobInfo, PlanReport, PlannedStage, ReservationStatus, StageVerdict, StatusReport,
    Streamed, UnloadReport,
};
use request::{OpenModels, Reply, Submission};
pub use shared_bound::{Exceeded, SharedBound};
use shell::Shell;
use unloads::EntryToUnload;

use crate::error::Error;
use crate::job::{JobId, JobSpec, JobWork, Latent, LatentInfo, Reach, Run};
use crate::library::{Entry, Library};
use crate::messages::{Command, Event};
use crate::moved::Reserved;

/// Settings of the queue.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Most jobs in the queue; more are refused.
    pub max_jobs: usize,
    /// Most jobs of one client, by its name.
    pub max_jobs_per_client: usize,
    /// Most bytes of init images of all jobs together; a single job may exceed it.
    pub input_bytes: Bytes,
    /// Most bytes of init images of a single job: one command to a worker holds no more.
    pub job_input_bytes: Bytes,
    /// How often a job may be overtaken.
    pub overtaking_bound: u32,
    /// Patience for late and foreign memory of jobs that set none.
    pub patience: Patience,
    /// Longest patience of a job; a longer one counts as this. A job that waits and has been overtaken as often as
    /// allowed keeps a card idle, so patience must be bounded.
    pub longest_patience: Duration,
    /// Eviction policy; `None`: one large component at a time for models that exceed a card as a whole, else only the
    /// evictions that a stage needs.
    pub policy: Option<Policy>,
    /// Bytes of a card that are never planned into.
    pub headroom: Bytes,
    /// Bound on values of stages that are cached for other jobs: encoded prompts.
    pub text_cache: Bytes,
    /// Bound on the results that are kept for clients that join a job by its idempotency key: those of one running job, and those of
    /// all ended jobs with their inputs.
    pub replay: Bytes,
    /// Bound on the unread results of one listener, in bytes; beyond it the listener is dropped.
    pub unread_pictures: Bytes,
    /// Bound on the unread results of all jobs of one account, in bytes. Each piece counts once for any number of listeners: see
    /// [`JobOptions::account`](crate::job::JobOptions::account).
    pub unread_of_account: Bytes,
    /// Bound on the pieces of results that the service has not encoded yet, in bytes: beyond it stages that deliver more wait. A stage
    /// may be some 64 MiB beyond it.
    pub unencoded: Bytes,
    /// Bound on latents in bytes; one account may use seven eighths of it.
    pub latents: Bytes,
    /// How long a latent is kept after its last use.
    pub latent_ttl: Duration,
    /// How many ended jobs are listed.
    pub ended_kept: usize,
    /// Longest time without a report of a running stage; the worker is recycled after it.
    pub stall_limit: Duration,
    /// Shortest limit between two reports where the usual time is known: the limit is ten times the usual time, between
    /// this and `stall_limit`.
    pub stall_floor: Duration,
    /// How long a cancel may go unanswered where no step of the stage has been measured; else three steps are waited for.
    pub cancel_limit: Duration,
    /// Time after which unused entries are unloaded; `None`: only if their memory is needed.
    pub keep_alive: Option<Duration>,
    /// Keep-alive of the models with these ids, in place of `keep_alive`.
    pub keep_alive_of: BTreeMap<String, Option<Duration>>,
    /// Time without any job after which all components are unloaded that are neither pinned nor held.
    pub unload_when_idle: Option<Duration>,
    /// Who is told what happens.
    pub observers: Observers,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            max_jobs: 256,
            max_jobs_per_client: 192,
            input_bytes: Bytes::gib(1),
            job_input_bytes: Bytes(u64::MAX),
            overtaking_bound: 3,
            patience: Patience::default(),
            longest_patience: Duration::from_secs(600),
            policy: None,
            headroom: Bytes::mib(512),
            text_cache: Bytes::mib(256),
            unread_pictures: Bytes::mib(256),
            replay: Bytes::mib(256),
            unread_of_account: Bytes::mib(512),
            unencoded: Bytes::mib(128),
            latents: Bytes::mib(512),
            latent_ttl: Duration::from_secs(600),
            ended_kept: 100,
            stall_limit: Duration::from_secs(120),
            stall_floor: Duration::from_secs(10),
            cancel_limit: Duration::from_secs(90),
            keep_alive: None,
            keep_alive_of: BTreeMap::new(),
            unload_when_idle: None,
            observers: Observers::default(),
        }
    }
}

/// The connection to a card's worker.
pub trait CardPort: Send + 'static {
    /// Sends the worker a command. One that cannot be delivered is lost, and [`Signal::Lost`] follows.
    fn send(&mut self, command: Command);
    /// Kills the worker; [`Signal::Lost`] follows.
    fn recycle(&mut self, reason: &str);
}

/// An event at a card.
#[derive(Clone, Debug)]
pub enum Signal {
    /// An event of its worker.
    Event(Event),
    /// Its worker is gone.
    Lost {
        /// Message for display.
        reason: String,
        /// Time until another is started.
        restarts_in: Duration,
    },
    /// Its worker is gone, but its process does not end: no other can be started.
    Stuck {
        /// Message for display.
        reason: String,
    },
}

/// A signal of a card's worker.
#[derive(Clone, Debug)]
pub struct CardSignal {
    /// Index among the slots.
    pub card: usize,
    /// Number of that card's worker process, from 1. Messages of an earlier one after its loss are ignored.
    pub generation: u64,
    /// The signal.
    pub signal: Signal,
}

/// A card that the queue may use.
pub struct CardSlot {
    /// Description of the card.
    pub description: CardDescription,
    /// Port to its worker.
    pub port: Box<dyn CardPort>,
}

/// A handle to the queue. When the last one is dropped the queue ends, and all its jobs with it.
#[derive(Clone)]
pub struct Queue {
    inputs: mpsc::UnboundedSender<Input>,
    status: watch::Receiver<Arc<StatusReport>>,
    library: Arc<Library>,
    reach: Reach,
}

impl Queue {
    /// The same queue for a call that may use what is within this reach alone: jobs to cancel, latents, holds.
    pub fn within(&self, reach: Reach) -> Queue {
        Queue {
            reach,
            ..self.clone()
        }
    }

    /// Starts the queue's task on the current runtime.
    pub fn start(
        settings: Settings,
        library: Arc<Library>,
        cards: Vec<CardSlot>,
        signals: mpsc::UnboundedReceiver<CardSignal>,
    ) -> Queue {
        let (inputs, received) = mpsc::unbounded_channel();
        let (descriptions, ports) = cards
            .into_iter()
            .map(|slot| (slot.description, slot.port))
            .unzip();
        let now = Instant::now();
        let mut core = Core::new(settings, library.clone(), descriptions, now);
        let (published, status) = watch::channel(Arc::new(core.take_status(now)));
        let shell = Shell {
            core,
            library: library.clone(),
            ports,
            status: published,
            inputs: inputs.downgrade(),
        };
        tokio::spawn(shell.run(received, signals));
        Queue {
            inputs,
            status,
            library,
            reach: Reach::All,
        }
    }

    /// Puts a job into the queue.
    ///
    /// # Errors
    /// All errors that are known before the job runs: invalid fields, a model that cannot be opened, an unknown latent,
    /// a full queue.
    pub async fn submit(&self, spec: JobSpec) -> Result<Job, Error> {
        let submission = self.prepare(spec).await?;
        let inputs = self.inputs.downgrade();
        // The core makes the handle: if the caller is gone, the handle is dropped, and its job is left.
        self.call(move |core, now| Ok(core.submit(submission, now)?.handle(inputs)))
            .await?
    }

    /// As [`Queue::submit`]. A job that is detached by it has a second handle, for who keeps its results.
    ///
    /// # Errors
    /// Those of [`Queue::submit`].
    pub async fn submit_kept(&self, spec: JobSpec) -> Result<(Job, Option<Job>), Error> {
        let submission = self.prepare(spec).await?;
        let inputs = self.inputs.downgrade();
        self.call(move |core, now| {
            let (own, keeper) = core.submit_kept(submission, now)?;
            let keeper = keeper.map(|keeper| keeper.handle(inputs.clone()));
            Ok((own.handle(inputs), keeper))
        })
        .await?
    }

    /// Listens to a job in the queue from now on.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub async fn listen(&self, id: &str) -> Result<Job, Error> {
        let (id, reach, inputs) = (id.to_owned(), self.reach.clone(), self.inputs.downgrade());
        self.call(move |core, _| Ok(core.listen_to(&id, &reach)?.handle(inputs)))
            .await?
    }

    /// Cancels a job for a client: a queued or waiting job at once, a running one as soon as its worker has stopped.
    /// False: it had ended.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub async fn cancel(&self, id: &str, client: String) -> Result<bool, Error> {
        let (id, reach) = (id.to_owned(), self.reach.clone());
        self.call(move |core, now| core.cancel(&id, client, false, &reach, now))
            .await?
    }

    /// Cancels all jobs of an account, detached ones too, and releases its holds, since its token was withdrawn.
    pub async fn withdraw(&self, account: String) {
        let _ = self.call(move |core, now| core.withdraw(&account, now)).await; // a queue that has ended has no jobs
    }

    /// As [`Queue::cancel`], and releases the latents of the job: those that it has made, those that it makes until its
    /// worker has stopped, and those of a job that has ended already.
    ///
    /// # Errors
    /// [`Error::JobNotFound`]; the latents of a job that is forgotten are released all the same.
    pub async fn discard(&self, id: &str, client: String) -> Result<bool, Error> {
        let (id, reach) = (id.to_owned(), self.reach.clone());
        self.call(move |core, now| core.cancel(&id, client, true, &reach, now))
            .await?
    }

    /// The jobs in the queue, oldest first, and on request those that have ended recently, the latest first.
    pub async fn jobs(&self, include_ended: bool) -> Vec<JobInfo> {
        self.call(move |core, now| core.infos(include_ended, now))
            .await
            .unwrap_or_default()
    }

    /// The plan of a job, on a card or (`card` empty) on the card that would be chosen.
    ///
    /// # Errors
    /// As [`Queue::submit`], and [`Error::CardNotReady`]; [`Error::Invalid`] when there is no such card.
    pub async fn plan(&self, spec: JobSpec, card: &str) -> Result<PlanReport, Error> {
        let report = self.plan_as_asked(spec.clone(), card).await?;
        let is_short = report.stages.iter().any(|stage| stage.shortfall.is_some());
        if !is_short && spec.entry.quantization == Quantization::NONE {
            return Ok(report);
        }
        // Planned again: if memory is short, with the model's smaller formats, else with its larger ones.
        let mut submission = self.prepare(spec).await?;
        let (cards, library) = (self.card_descriptions(), self.library.clone());
        let path = submission.spec.entry.path.clone();
        let account = submission.spec.options.account.clone();
        let submission = self.library.aside_for(&account, &path, move || {
            let (entry, models) = (&submission.spec.entry, &submission.models);
            let (reductions, upgrades) = match is_short {
                true => (open_reductions(&library, entry, models, &cards), Vec::new()),
                false => (Vec::new(), open_upgrades(&library, entry, models, &cards)),
            };
            (submission.reductions, submission.upgrades) = (Some(reductions), upgrades);
            Ok(submission)
        });
        self.report_of(submission.await?, card).await
    }

    /// As [`Queue::plan`], without alternatives: no other format of the model is opened, and no smaller request planned.
    ///
    /// # Errors
    /// Those of [`Queue::plan`].
    pub async fn plan_as_asked(&self, spec: JobSpec, card: &str) -> Result<PlanReport, Error> {
        self.report_of(self.prepare(spec).await?, card).await
    }

    async fn report_of(&self, submission: Submission, card: &str) -> Result<PlanReport, Error> {
        let card = card.to_owned();
        self.call(move |core, now| core.plan_report(submission, &card, now))
            .await?
    }

    /// Unloads an entry (or everything) from all cards, after the jobs that use it have ended; a client may force that, which
    /// cancels those jobs. Jobs that are submitted meanwhile start after the unload.
    ///
    /// # Errors
    /// When the model is not in use and cannot be opened, or a worker fails at it.
    pub async fn unload(
        &self,
        entry: Option<Arc<Entry>>,
        forced_by: Option<String>,
    ) -> Result<UnloadReport, Error> {
        let entry = match entry {
            Some(entry) => Some(self.entry_to_unload(entry).await?),
            None => None,
        };
        self.ask(move |core, reply, now| core.unload(entry, forced_by, reply, now))
            .await?
    }

    /// An entry with its components. An entry in use is taken as it is: its files are not read, as they may be gone or may not answer.
    async fn entry_to_unload(&self, entry: Arc<Entry>) -> Result<EntryToUnload, Error> {
        let key = entry.key.clone();
        if let Some(known) = self.call(move |core, _| core.known_to_unload(&key)).await? {
            return Ok(known);
        }
        // Its components may be on a card as those of another entry. Only its files show that.
        let models = self.open(entry.clone()).await?;
        self.call(move |core, _| core.opened_to_unload(&entry, &models))
            .await
    }

    /// Pins an entry: once loaded, it stays on its card until it is unpinned. Returns the keys of all pinned entries.
    ///
    /// # Errors
    /// When the model cannot be opened.
    pub async fn pin(&self, entry: Arc<Entry>) -> Result<Vec<String>, Error> {
        let models = self.open(entry.clone()).await?;
        self.call(move |core, now| core.pin(&entry, &models, now)).await
    }

    /// Ends a pin, also of an entry whose files are gone. Returns the keys of all entries that are still pinned.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub async fn unpin(&self, key: &str) -> Result<Vec<String>, Error> {
        let key = key.to_owned();
        self.call(move |core, now| core.unpin(&key, now)).await
    }

    /// Entries that have components on cards, jobs, pins or holds: they are known although their files may be gone.
    pub async fn known_entries(&self) -> Vec<Arc<Entry>> {
        self.call(|core, _| core.known_entries())
            .await
            .unwrap_or_default()
    }

    /// Keeps an entry for a client, for a time. The same client asking again renews its hold.
    ///
    /// # Errors
    /// When the model cannot be opened.
    pub async fn hold(&self, entry: Arc<Entry>, client: String, ttl: Duration) -> Result<String, Error> {
        let models = self.open(entry.clone()).await?;
        let owner = claims::Holding {
            client,
            account: self.reach.account().to_owned(),
        };
        self.call(move |core, now| core.hold(&entry, &models, owner, ttl, now))
            .await
    }

    /// Ends a hold. False: there was none, or it had expired.
    pub async fn release_hold(&self, id: &str) -> bool {
        let (id, reach) = (id.to_owned(), self.reach.clone());
        let released = self.call(move |core, now| core.release_hold(&id, &reach, now));
        released.await.unwrap_or(false)
    }

    /// Returns slack of a card (empty: of every card) to the driver. The result is the number of bytes.
    ///
    /// # Errors
    /// [`Error::CardNotReady`]; [`Error::Invalid`] when there is no such card.
    pub async fn trim(&self, card: &str) -> Result<Bytes, Error> {
        let card = card.to_owned();
        self.ask(move |core, reply, now| core.trim(&card, reply, now))
            .await?
    }

    /// Makes room for another program on a card (empty: the one with the most room) and keeps it free for a time.
    ///
    /// # Errors
    /// As [`Queue::trim`], and [`Error::MemoryTaken`] when idle memory is not enough: it offers the available bytes.
    pub async fn reserve(
        &self,
        card: &str,
        bytes: Bytes,
        ttl: Duration,
        by: Reserver,
    ) -> Result<Reserved, Error> {
        let request = ReservationRequest {
            by,
            bytes,
            ttl,
            renews: String::new(),
        };
        let card = card.to_owned();
        self.ask(move |core, reply, now| core.reserve(&card, request, reply, now))
            .await?
    }

    /// Renews a reservation for a time, with another size unless `bytes` is zero. Additional bytes are made free
    /// first.
    ///
    /// # Errors
    /// As [`Queue::reserve`]; [`Error::Invalid`] when there is no such reservation, or it has expired.
    pub async fn renew_reservation(&self, id: &str, bytes: Bytes, ttl: Duration) -> Result<Reserved, Error> {
        let request = ReservationRequest {
            by: Reserver::default(),
            bytes,
            ttl,
            renews: id.to_owned(),
        };
        self.ask(move |core, reply, now| core.renew_reservation(request, reply, now))
            .await?
    }

    /// Ends the workers of a card (empty: of all cards) for a client, and starts new ones. A worker finishes its order first; with `force`
    /// it does not, and the order is tried again on the new worker. Returns when the new ones are ready, with the ids of their cards.
    ///
    /// # Errors
    /// [`Error::CardNotReady`]; [`Error::Invalid`] when there is no such card.
    pub async fn recycle(&self, card: &str, client: String, force: bool) -> Result<Vec<String>, Error> {
        let card = card.to_owned();
        self.ask(move |core, reply, now| core.recycle(&card, &client, force, reply, now))
            .await?
    }

    /// Ends a reservation. False: there was none, or it had expired.
    pub async fn release_reservation(&self, id: &str) -> bool {
        let id = id.to_owned();
        let released = self.call(move |core, now| core.release_reservation(&id, now));
        released.await.unwrap_or(false)
    }

    /// A latent with its tensors.
    ///
    /// # Errors
    /// [`Error::LatentNotFound`].
    pub async fn latent(&self, id: &str) -> Result<Latent, Error> {
        let (id, reach) = (id.to_owned(), self.reach.clone());
        self.call(move |core, now| core.latent(&id, &reach, now)).await?
    }

    /// Puts a client's latent into the store. A single tensor needs no name.
    ///
    /// # Errors
    /// [`Error::LatentWithoutDecoder`] when no decoder is named; [`Error::LatentMismatch`] when the bytes are not those of
    /// tensors of these shapes, or exceed what one account may have; [`Error::MemoryTaken`] while jobs lease the latents in the store, and
    /// [`Error::ClientLimit`] while those of the account do.
    pub async fn put_latent(
        &self,
        values: Values,
        decoder_id: String,
        account: String,
    ) -> Result<LatentInfo, Error> {
        self.call(move |core, now| core.put_latent(values, decoder_id, account, now))
            .await?
    }

    /// Puts a latent back that was in the store before: with its id, for its account. One that is there already stays as it is.
    ///
    /// # Errors
    /// [`Error::ClientLimit`] while other latents leave no room for it.
    pub async fn restore_latent(&self, latent: Latent, account: String, made_by: JobId) -> Result<(), Error> {
        self.call(move |core, now| core.restore_latent(latent, account, made_by, now))
            .await?
    }

    /// The pins, holds and reservations.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub async fn claims(&self) -> Result<KeptClaims, Error> {
        self.call(|core, now| core.kept_claims(now)).await
    }

    /// Puts a hold back that was there before, with its id.
    ///
    /// # Errors
    /// When the model cannot be opened.
    pub async fn restore_hold(&self, hold: KeptHold) -> Result<(), Error> {
        let models = self.open(hold.entry.clone()).await?;
        self.call(move |core, now| core.restore_hold(hold, &models, now))
            .await
    }

    /// Puts reservations back that were there before, with their ids. Those of cards that are not there any more are left out.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub async fn restore_reservations(&self, reservations: Vec<KeptReservation>) -> Result<(), Error> {
        self.call(move |core, now| core.restore_reservations(reservations, now))
            .await
    }

    /// What was learned of earlier jobs: peaks of activations, times of stages, speeds of loads.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub async fn learned(&self) -> Result<KeptLearned, Error> {
        self.call(|core, _| core.kept_learned()).await
    }

    /// Takes over what was learned before.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub async fn restore_learned(&self, learned: KeptLearned) -> Result<(), Error> {
        self.call(move |core, _| core.restore_learned(learned)).await
    }

    /// Releases a latent. A job that leases it keeps it until the job has ended. False: there was none, or it had expired.
    pub async fn release_latent(&self, id: &str) -> bool {
        let (id, reach) = (id.to_owned(), self.reach.clone());
        let released = self.call(move |core, _| core.release_latent(&id, &reach));
        released.await.unwrap_or(false)
    }

    /// The status, published when it changes, at most ten times a second. The channel closes when the queue's task has
    /// ended.
    pub fn status(&self) -> watch::Receiver<Arc<StatusReport>> {
        self.status.clone()
    }

    /// The status as of now: after a job's last event it no longer shows the job on its card.
    pub async fn status_now(&self) -> Arc<StatusReport> {
        let now = self.call(|core, now| Arc::new(core.view(now).status_report()));
        now.await.unwrap_or_else(|_| self.status.borrow().clone())
    }

    /// Refuses new jobs from this call on, before the future is polled, so that a caller may log it at once. Jobs that are left at
    /// the deadline are cancelled; the future resolves when no job is left.
    pub fn drain(&self, deadline: Instant) -> impl Future<Output = ()> + use<> {
        let drained = self.ask(move |core, reply, _| core.drain(deadline, reply));
        async move {
            let _ = drained.await; // a queue that has ended is drained
        }
    }

    /// Numbers of all objects that the queue keeps, by kind. At rest, only those remain that are meant to. For tests.
    #[doc(hidden)]
    pub async fn census(&self) -> Vec<(&'static str, usize)> {
        self.call(|core, _| core.census()).await.unwrap_or_default()
    }

    /// Has the core do something, and answer at once.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Core, Instant) -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.ask(move |core, reply, now| {
            let _ = reply.send(call(core, now)); // the caller may have left
        })
        .await
    }

    /// Asks the core to do something, before it returns. The future resolves to the core's answer when that is done.
    fn ask<T: Send + 'static, Ask: FnOnce(&mut Core, Reply<T>, Instant) + Send + 'static>(
        &self,
        ask: Ask,
    ) -> impl Future<Output = Result<T, Error>> + use<T, Ask> {
        let (reply, answer) = oneshot::channel();
        let call: Call = Box::new(move |core, now| ask(core, reply, now));
        let asked = self.inputs.send(Input::Call(call));
        async move {
            asked.map_err(|_| Error::ShuttingDown)?;
            answer.await.map_err(|_| Error::ShuttingDown)
        }
    }

    /// Opens an entry for every kind of card, on a blocking thread: headers are read, small files hashed.
    async fn open(&self, entry: Arc<Entry>) -> Result<OpenModels, Error> {
        let cards = self.card_descriptions();
        let library = self.library.clone();
        let path = entry.path.clone();
        let open = move || open_for(&library, &entry, &cards);
        self.library.aside(&path, open).await
    }

    async fn prepare(&self, spec: JobSpec) -> Result<Submission, Error> {
        prepare(&self.library, spec, self.card_descriptions()).await
    }

    fn card_descriptions(&self) -> Vec<CardDescription> {
        self.status
            .borrow()
            .cards
            .iter()
            .map(|c| c.description.clone())
            .collect()
    }
}

/// Opens a specification's model for every kind of card and has the family validate the request, on a blocking thread.
async fn prepare(
    library: &Arc<Library>,
    spec: JobSpec,
    cards: Vec<CardDescription>,
) -> Result<Submission, Error> {
    let (reader, path) = (library.clone(), spec.entry.path.clone());
    let account = spec.options.account.clone();
    let prepare = move || {
        let models = open_for(&reader, &spec.entry, &cards)?;
        let Some(any) = models.values().next() else {
            return Err(Error::CardNotReady("there is no card".into()));
        };
        let mut old = None;
        if let JobWork::Load {
            components,
            replace,
            prove,
        } = &spec.work
        {
            let invalid = |field: &str, problem: &str| {
                let (field, problem) = (field.to_owned(), problem.to_owned());
                Err(Error::Invalid(vec![RequestError { field, problem }]))
            };
            if (*prove || replace.is_some()) && !components.is_empty() {
                return invalid("components", "must be empty: a proof takes the whole model");
            }
            if let Some(replaced) = replace {
                if replaced.key == spec.entry.key {
                    return invalid("replace", "is the model itself; name another");
                }
                old = Some((replaced.clone(), open_for(&reader, replaced, &cards)?));
            }
        }
        let proof = match &spec.work {
            JobWork::Load { replace, prove, .. } if *prove || replace.is_some() => Some(Run {
                call: crate::job::Call::Load,
                request: any.model.smallest(),
                count: 1,
                start: None,
                until: Role::Decode,
                keep_latent: false,
                preview_interval_ms: 0,
            }),
            JobWork::Load { .. } | JobWork::Run(_) => None,
        };
        let run = match &spec.work {
            JobWork::Run(run) => Some(run),
            JobWork::Load { .. } => proof.as_ref(),
        };
        let mut plans = BTreeMap::new();
        for (dtype, open) in &models {
            let plan = run.map(|run| open.model.plan(&run.request)).transpose();
            let plan = plan.map_err(Error::Invalid)?.unwrap_or_default();
            if let Some(run) = run
                && steps::needed(&plan, run).is_empty()
            {
                let problem = format!("{} has no stage for {}", open.model.family(), run.call.as_str());
                return Err(Error::Invalid(vec![RequestError::new("model", problem)]));
            }
            plans.insert(dtype.clone(), plan);
        }
        Ok(Submission {
            spec,
            models,
            old,
            plans,
            proof,
            reductions: None,
            upgrades: Vec::new(),
        })
    };
    library.aside_for(&account, &path, prepare).await
}

fn open_for(library: &Library, entry: &Entry, cards: &[CardDescription]) -> Result<OpenModels, Error> {
    let mut models = OpenModels::new();
    for card in cards {
        if !models.contains_key(&card.compute_dtype) {
            models.insert(card.compute_dtype.clone(), library.open(entry, card)?);
        }
    }
    Ok(models)
}
