//! Detached jobs outlive the service. Each is in the journal from its acceptance until its results are forgotten: after a restart it runs
//! again, and what it has made can be fetched for a time.
//!
//! A job that is kept has a listener of its own, the *keeper*, which encodes and writes its results as a client would. So the queue
//! knows nothing of the journal, and a result is encoded once for both. See docs/design/0007-journal-of-jobs.md.

mod claims;
mod fetch;
mod keeper;
mod records;
mod results;
mod resume;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::CancelledBy;
use engine::Error;
use engine::JobState;
use engine::job::{JobId, JobSpec, JobWork, Reach};
use engine::queue::{Job, JobInfo, Queue};
use journal::{Changes, Journal, JournalError};
use model::LeftOut;
use residency::Bytes;
use tokio::sync::watch;

use self::records::{ENDED, JOBS, KeptEnd, KeptJob, STATE, Time, work_of};
use crate::budget::Client;
use crate::chunks::Output;
use crate::encodings::Encodings;
use crate::jobs::ListedEnd;
use crate::resolved::ResolvedModel;
use crate::threads::Turns;

/// How often what has expired is removed, and what was learned is written.
const INTERVAL: Duration = Duration::from_secs(60);
/// Time after a start in which nothing expires: until then the clock of a machine without a battery may be wrong.
const GRACE: Duration = Duration::from_secs(600);
/// Most jobs whose results are kept.
const MOST_ENDED: usize = 1_000;
/// Name of what was learned, among the state.
const LEARNED: &str = "learned";

/// Threads that wait for the journal's disk.
static DISK: LazyLock<Turns> = LazyLock::new(|| Turns::new(8));

/// How detached jobs are kept.
#[derive(Clone, Debug)]
pub struct KeepSettings {
    /// The folder of results.
    pub folder: PathBuf,
    /// How long the results of a job can be fetched after its end.
    pub results_for: Duration,
    /// Most bytes of results; the oldest of the account that has most are removed beyond it.
    pub most_bytes: Bytes,
    /// Most jobs from before a restart that are in the queue at a time.
    pub resumed_at_once: usize,
}

/// A job that has ended, and how long its results can still be fetched.
#[derive(Clone, Debug)]
pub(crate) struct KeptInfo {
    pub info: JobInfo,
    pub end: ListedEnd,
}

/// The jobs that outlive the service. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Kept(Arc<Inner>);

struct Inner {
    journal: Journal,
    settings: KeepSettings,
    queue: Queue,
    encodings: Arc<Encodings>,
    index: Mutex<Index>,
    /// Counts changes of the index, for those who wait for one.
    changes: watch::Sender<u64>,
    started: tokio::time::Instant,
    /// True once the service is shutting down.
    stopping: watch::Receiver<bool>,
    /// Claims that are still to be put back, and are part of what is kept.
    unrestored: Mutex<engine::queue::KeptClaims>,
}

/// What is known of the jobs without a look at the disk.
#[derive(Default)]
struct Index {
    last_number: u64,
    open: BTreeMap<JobId, OpenJob>,
    ended: BTreeMap<JobId, Arc<KeptEnd>>,
    /// Refused jobs whose record may be in the journal all the same.
    refused: Vec<JobId>,
}

/// A job under way.
#[derive(Clone, Debug)]
struct OpenJob {
    /// As a list shows it while it is held.
    info: JobInfo,
    is_held: bool,
    number: u64,
    key: String,
    /// Empty without a key: nothing asks for it.
    work: String,
    model: ResolvedModel,
    left_out: Vec<LeftOut>,
}

impl OpenJob {
    fn of(id: &JobId, job: &KeptJob, is_held: bool) -> OpenJob {
        let key = job.spec.options.idempotency_key.clone();
        let work = match key.is_empty() {
            true => String::new(),
            false => work_of(&job.spec),
        };
        OpenJob {
            info: job.info(id),
            is_held,
            number: job.number,
            key,
            work,
            model: job.model.clone(),
            left_out: job.output.left_out.clone(),
        }
    }
}

/// A job that is to outlive the service.
pub(crate) struct Detached {
    pub(crate) spec: JobSpec,
    pub(crate) output: Output,
    pub(crate) model: ResolvedModel,
    /// Whose results its encoded results count against.
    pub(crate) client: Client,
}

/// What is kept of the ended jobs of one account.
#[derive(Default)]
struct OfAccount<'a> {
    /// Of all their results.
    bytes: u64,
    /// The oldest last.
    jobs: Vec<(&'a JobId, &'a KeptEnd)>,
}

/// What becomes of a job that is submitted with a key.
pub(crate) enum ByKey {
    /// Nothing has the key.
    New,
    /// The job has ended, and its results are there.
    Ended(JobId),
}

impl Kept {
    /// Reads the journal, and waits for the disk. Jobs from before are held until [`Kept::start`].
    ///
    /// # Errors
    /// [`Error::NotKept`].
    pub(crate) fn open(
        journal: Journal,
        settings: KeepSettings,
        queue: Queue,
        encodings: Arc<Encodings>,
        stopping: watch::Receiver<bool>,
    ) -> Result<Kept, Error> {
        let (jobs, ended) = (journal.all::<KeptJob>(JOBS), journal.all::<KeptEnd>(ENDED));
        let (jobs, ended) = (jobs.map_err(not_kept)?, ended.map_err(not_kept)?);
        let last = jobs.iter().map(|(_, job)| job.number).max();
        let last = last.max(ended.iter().map(|(_, end)| end.number).max());
        let held = jobs.iter().map(|(id, job)| {
            let id: JobId = id.as_str().into();
            (id.clone(), OpenJob::of(&id, job, true))
        });
        let index = Index {
            last_number: last.unwrap_or_default(),
            open: held.collect(),
            ended: ended
                .into_iter()
                .map(|(id, end)| (id.as_str().into(), Arc::new(end)))
                .collect(),
            refused: Vec::new(),
        };
        gpu::create_private_folder(&settings.folder).map_err(|problem| not_kept_on_disk(&problem))?;
        let is_known = |name: &str| index.ended.contains_key(name);
        match results::remove_unknown(&settings.folder, is_known) {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "results of jobs that did not end are removed"),
            Err(problem) => {
                tracing::warn!(%problem, "results of jobs that are not in the journal could not be removed")
            }
        }
        if !index.open.is_empty() {
            tracing::info!(
                jobs = index.open.len(),
                "jobs from before the restart are held, and run again"
            );
        }
        Ok(Kept(Arc::new(Inner {
            journal,
            settings,
            queue,
            encodings,
            index: Mutex::new(index),
            changes: watch::Sender::new(0),
            started: tokio::time::Instant::now(),
            unrestored: Mutex::default(),
            stopping,
        })))
    }

    /// Puts back what was learned and claimed, submits the jobs from before again, and removes what expires, until the service ends.
    pub(crate) fn start(&self) {
        let kept = self.clone();
        tokio::spawn(async move {
            let resume = async {
                kept.restore_learned().await;
                tokio::join!(kept.resume_all(), kept.restore_claims());
            };
            tokio::select! {
                () = resume => {}
                () = kept.stopping() => {}
            }
        });
        let kept = self.clone();
        tokio::spawn(async move {
            let maintain = async {
                loop {
                    tokio::time::sleep(INTERVAL).await;
                    kept.remove_expired().await;
                    kept.save_learned().await;
                }
            };
            tokio::select! {
                () = maintain => {}
                () = kept.stopping() => {}
            }
        });
    }

    /// Takes a job of the queue into the journal, before its client hears that it is accepted. When this returns, it outlives the service.
    ///
    /// # Errors
    /// [`Error::NotKept`]: the job is cancelled then.
    pub(crate) async fn take(
        &self,
        job: Job,
        keeper: Job,
        detached: Detached,
        instead: impl Fn() -> Option<String> + Send + 'static,
    ) -> Result<Job, Error> {
        let Detached {
            spec,
            output,
            model,
            client,
        } = detached;
        let as_file = output.as_file_of(&spec.work);
        if let Err(error) = self.accept(&job.id, spec, &output, &model).await {
            let service = "the service, as it cannot keep the job".to_owned();
            drop(self.0.queue.discard(&job.id, service).await);
            return Err(error);
        }
        self.keep(keeper, (output, as_file), client, instead, None);
        Ok(job)
    }

    async fn accept(
        &self,
        id: &JobId,
        mut spec: JobSpec,
        output: &Output,
        model: &ResolvedModel,
    ) -> Result<(), Error> {
        let start = match start_of(&spec) {
            Some(latent) => Some(self.0.queue.latent(latent).await?),
            None => None,
        };
        spec.options.id = Some(id.clone());
        let number = {
            let mut index = self.index();
            index.last_number += 1;
            index.last_number
        };
        let job = KeptJob {
            number,
            spec,
            output: output.clone(),
            model: model.clone(),
            accepted: Time::now(),
            begun: 0,
            start,
        };
        let key = id.clone();
        let written = self.on_disk(move |kept| {
            let open = OpenJob::of(&key, &job, false);
            kept.journal.write(Changes::default().put(JOBS, &key, &job)?)?;
            Ok(open)
        });
        match written.await {
            Ok(open) => {
                self.index().open.insert(id.clone(), open);
                self.changed();
                Ok(())
            }
            Err(error) => {
                self.index().refused.push(id.clone());
                Err(error)
            }
        }
    }

    /// Whether a key is that of a job that is kept. A job that is held is submitted first: the queue joins it then.
    ///
    /// # Errors
    /// [`Error::KeyReused`] for other work.
    pub(crate) async fn by_key(&self, spec: &JobSpec) -> Result<ByKey, Error> {
        let (key, account) = (&spec.options.idempotency_key, &spec.options.account);
        if key.is_empty() {
            return Ok(ByKey::New);
        }
        let found = {
            let index = self.index();
            let held = index
                .open
                .iter()
                .find(|(_, open)| open.is_held && open.key == *key && open.info.account == *account);
            let held = held.map(|(id, open)| (id.clone(), open.work.clone(), true));
            let ended = index
                .ended
                .iter()
                .find(|(_, end)| end.key == *key && end.info.account == *account);
            let ended = ended.map(|(id, end)| (id.clone(), end.work.clone(), false));
            held.or(ended)
        };
        let Some((id, work, is_held)) = found else {
            return Ok(ByKey::New);
        };
        if work != work_of(spec) {
            return Err(Error::KeyReused(key.clone()));
        }
        if is_held {
            self.resume(&id, None).await;
            return Ok(ByKey::New);
        }
        Ok(ByKey::Ended(id))
    }

    /// Whether a job is among those that are kept.
    pub(crate) fn knows(&self, id: &JobId) -> bool {
        let index = self.index();
        index.open.contains_key(id) || index.ended.contains_key(id)
    }

    /// Jobs that are held, in the order of acceptance.
    pub(crate) fn held(&self) -> Vec<JobInfo> {
        let index = self.index();
        let mut held: Vec<&OpenJob> = index.open.values().filter(|open| open.is_held).collect();
        held.sort_by_key(|open| open.number);
        let held = held.into_iter().enumerate().map(|(place, open)| JobInfo {
            position: u32::try_from(place).unwrap_or(u32::MAX),
            ..open.info.clone()
        });
        held.collect()
    }

    /// Jobs that have ended, the latest first.
    pub(crate) fn ended(&self) -> Vec<KeptInfo> {
        let index = self.index();
        let mut ended: Vec<&Arc<KeptEnd>> = index.ended.values().collect();
        ended.sort_by_key(|end| std::cmp::Reverse(end.number));
        let now = Time::now();
        let ended = ended.into_iter().map(|end| KeptInfo {
            info: end.info.clone(),
            end: self.listed_end(end.ended.until(now)),
        });
        ended.collect()
    }

    fn listed_end(&self, ago: Duration) -> ListedEnd {
        ListedEnd {
            ago,
            results_for: self.0.settings.results_for.saturating_sub(ago),
        }
    }

    /// Ends the held jobs of an account: its token was withdrawn.
    pub(crate) async fn withdraw(&self, account: &str) {
        for held in self.held().into_iter().filter(|held| held.account == account) {
            let error = Error::Cancelled(CancelledBy::Withdrawn);
            if let Err(error) = self.end_held(&held.id, error).await {
                tracing::warn!(job = %held.id, %error, "the end of a job of a withdrawn token is not written");
            }
        }
    }

    /// Ends a job that is held: true. False: it has ended. `None`: there is neither within reach.
    ///
    /// # Errors
    /// [`Error::NotKept`]: it is still held.
    pub(crate) async fn cancel(
        &self,
        id: &str,
        client: String,
        reach: &Reach,
    ) -> Result<Option<bool>, Error> {
        let open = {
            let index = self.index();
            let ended = index.ended.get(id);
            if ended.is_some_and(|end| reach.has(&end.info.account)) {
                return Ok(Some(false));
            }
            let open = index.open.get(id);
            let open = open.filter(|open| reach.has(&open.info.account));
            open.map(|open| open.info.id.clone())
        };
        let Some(id) = open else { return Ok(None) };
        let error = Error::Cancelled(CancelledBy::Call { client });
        Ok(self.end_held(&id, error).await?.then_some(true))
    }

    /// Ends a job that is held. False: it is not.
    async fn end_held(&self, id: &JobId, error: Error) -> Result<bool, Error> {
        let Some(open) = self.take_held(id) else {
            return Ok(false);
        };
        let ended = self.end_without_results(id, open, error).await;
        if ended.is_err() {
            self.hold_again(id);
        }
        ended.map(|()| true)
    }

    /// Takes a job out of those that are held; `None`: it is not held.
    fn take_held(&self, id: &JobId) -> Option<OpenJob> {
        let mut index = self.index();
        let open = index.open.get_mut(id).filter(|open| open.is_held)?;
        open.is_held = false;
        Some(open.clone())
    }

    fn hold_again(&self, id: &JobId) {
        if let Some(open) = self.index().open.get_mut(id) {
            open.is_held = true;
        }
    }

    /// Reads a latent of a job that has ended, and puts it back into the store. False: there is none that is within reach.
    ///
    /// # Errors
    /// [`Error::NotKept`] where it cannot be read, and where the store has no room.
    pub(crate) async fn restore_latent(&self, latent: &str, reach: &Reach) -> Result<bool, Error> {
        let found = {
            let index = self.index();
            let mut ends = index.ended.iter().filter(|(_, end)| reach.has(&end.info.account));
            ends.find_map(|(id, end)| {
                let kept = end.latents.iter().find(|kept| kept.info.id == latent)?;
                Some((id.clone(), end.info.account.clone(), kept.clone()))
            })
        };
        let Some((job, account, kept)) = found else {
            return Ok(false);
        };
        let folder = self.folder(&job);
        let latent = self
            .on_disk(move |_| results::latent_of(&folder, &kept.info, &kept.file).map_err(storage))
            .await?;
        self.0.queue.restore_latent(latent, account, job).await?;
        Ok(true)
    }

    /// Forgets a latent that its client has released. False: there was none.
    pub(crate) async fn forget_latent(&self, latent: &str, reach: &Reach) -> bool {
        self.forget_latents(reach, |_, id| id == latent).await
    }

    /// Forgets the latents of a job.
    pub(crate) async fn forget_latents_of(&self, job: &str, reach: &Reach) {
        self.forget_latents(reach, |of, _| of == job).await;
    }

    async fn forget_latents(&self, reach: &Reach, is_meant: impl Fn(&str, &str) -> bool) -> bool {
        let changed = {
            let index = self.index();
            let ends = index.ended.iter().filter(|(_, end)| reach.has(&end.info.account));
            let with = ends.filter(|(id, end)| end.latents.iter().any(|kept| is_meant(id, &kept.info.id)));
            let changed = with.map(|(id, end)| {
                let mut end = KeptEnd::clone(end);
                let (released, left) = std::mem::take(&mut end.latents)
                    .into_iter()
                    .partition::<Vec<_>, _>(|kept| is_meant(id, &kept.info.id));
                end.latents = left;
                (id.clone(), end, released)
            });
            changed.collect::<Vec<_>>()
        };
        let is_any = !changed.is_empty();
        for (id, end, released) in changed {
            let (key, folder) = (id.clone(), self.folder(&id));
            let written = self.on_disk(move |kept| {
                kept.journal.write(Changes::default().put(ENDED, &key, &end)?)?;
                for latent in released {
                    if let Err(problem) = std::fs::remove_file(folder.join(&latent.file)) {
                        tracing::warn!(job = %key, %problem, "the file of a released latent is not removed");
                    }
                }
                Ok(Arc::new(end))
            });
            match written.await {
                Ok(end) => drop(self.index().ended.insert(id, end)),
                Err(error) => tracing::warn!(job = %id, %error, "a released latent is still kept"),
            }
        }
        is_any
    }

    /// Forgets what an ended job has left: its end, results and latents. False: there is none within reach.
    ///
    /// # Errors
    /// [`Error::NotKept`]: it is still kept.
    pub(crate) async fn forget(&self, job: &str, reach: &Reach) -> Result<bool, Error> {
        let id = {
            let index = self.index();
            let end = index.ended.get_key_value(job);
            end.filter(|(_, end)| reach.has(&end.info.account))
                .map(|(id, _)| id.clone())
        };
        match id {
            Some(id) => self.remove_end(&id).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Resolves when the service is shutting down.
    async fn stopping(&self) {
        let mut stopping = self.0.stopping.clone();
        drop(stopping.wait_for(|is_stopping| *is_stopping).await);
    }

    /// Writes what was learned.
    pub(crate) async fn save_learned(&self) {
        let Ok(learned) = self.0.queue.learned().await else {
            return; // the queue has ended
        };
        let written = self.on_disk(move |kept| {
            kept.journal
                .write(Changes::default().put(STATE, LEARNED, &learned)?)
        });
        if let Err(error) = written.await {
            tracing::warn!(%error, "what was learned is not written");
        }
    }

    async fn restore_learned(&self) {
        match self.on_disk(|kept| kept.journal.get(STATE, LEARNED)).await {
            Ok(Some(learned)) => drop(self.0.queue.restore_learned(learned).await),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "what was learned before cannot be read"),
        }
    }

    /// Removes results whose time is over, and the oldest of the account with the most where there are too many.
    async fn remove_expired(&self) {
        let refused = self.index().refused.clone();
        for id in refused {
            let key = id.clone();
            if self
                .on_disk(move |kept| kept.journal.write(Changes::default().remove(JOBS, &key)))
                .await
                .is_ok()
            {
                self.index().refused.retain(|refused| *refused != id);
            }
        }
        for id in self.expired(Time::now()) {
            if let Err(error) = self.remove_end(&id).await {
                tracing::warn!(job = %id, %error, "results that have expired could not be removed");
                return;
            }
        }
    }

    /// Removes the end of a job, with its results.
    async fn remove_end(&self, id: &JobId) -> Result<(), Error> {
        let (key, folder) = (id.clone(), self.folder(id));
        let removed = self.on_disk(move |kept| {
            kept.journal.write(Changes::default().remove(ENDED, &key))?;
            results::remove(&folder).map_err(storage)
        });
        removed.await?;
        self.index().ended.remove(id);
        Ok(())
    }

    fn expired(&self, now: Time) -> Vec<JobId> {
        let index = self.index();
        let settings = &self.0.settings;
        let mut left: Vec<(&JobId, &KeptEnd)> = index.ended.iter().map(|(id, end)| (id, &**end)).collect();
        let mut expired = Vec::new();
        if self.0.started.elapsed() >= GRACE {
            left.retain(|(id, end)| {
                let is_over = end.ended.until(now) >= settings.results_for;
                if is_over {
                    expired.push((*id).clone());
                }
                !is_over
            });
        }
        let mut accounts: BTreeMap<&str, OfAccount<'_>> = BTreeMap::new();
        left.sort_by_key(|(_, end)| std::cmp::Reverse(end.number));
        let (mut bytes, mut count) = (0, left.len());
        for (id, end) in left {
            let own = accounts.entry(&end.info.account).or_default();
            own.bytes += end.bytes();
            bytes += end.bytes();
            own.jobs.push((id, end));
        }
        while bytes > settings.most_bytes.0 || count > MOST_ENDED {
            let with_jobs = accounts.values_mut().filter(|own| !own.jobs.is_empty());
            let Some(most) = with_jobs.max_by_key(|own| own.bytes) else {
                break;
            };
            if let Some((id, oldest)) = most.jobs.pop() {
                most.bytes -= oldest.bytes();
                bytes -= oldest.bytes();
                count -= 1;
                expired.push(id.clone());
            }
        }
        expired
    }

    /// Ends a job that is not in the queue.
    async fn end_without_results(&self, id: &JobId, open: OpenJob, error: Error) -> Result<(), Error> {
        let info = JobInfo {
            state: match error {
                Error::Cancelled(_) => JobState::Cancelled,
                _ => JobState::Failed,
            },
            error: Some(error.clone()),
            ..open.info.clone()
        };
        self.write_end(id, end_of(&open, info, Err(error), Vec::new(), Vec::new()))
            .await
    }

    /// Replaces the record of a job by that of its end.
    async fn write_end(&self, id: &JobId, end: KeptEnd) -> Result<(), Error> {
        let key = id.clone();
        let end = self
            .on_disk(move |kept| {
                let changes = Changes::default().remove(JOBS, &key).put(ENDED, &key, &end)?;
                kept.journal.write(changes)?;
                Ok(Arc::new(end))
            })
            .await?;
        {
            let mut index = self.index();
            index.open.remove(id);
            index.ended.insert(id.clone(), end);
        }
        self.changed();
        Ok(())
    }

    fn folder(&self, id: &JobId) -> PathBuf {
        self.0.settings.folder.join(&**id)
    }

    /// Carries something out that waits for the disk.
    async fn on_disk<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Inner) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, Error> {
        let inner = self.0.clone();
        DISK.run(move || act(&inner)).await?.map_err(not_kept)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.0.changes.send_modify(|count| *count += 1);
    }
}

fn end_of(
    open: &OpenJob,
    info: JobInfo,
    outcome: Result<engine::job::JobReport, Error>,
    results: Vec<records::KeptResult>,
    latents: Vec<records::KeptLatent>,
) -> KeptEnd {
    KeptEnd {
        number: open.number,
        info,
        key: open.key.clone(),
        work: open.work.clone(),
        model: open.model.clone(),
        left_out: open.left_out.clone(),
        ended: Time::now(),
        outcome,
        results,
        latents,
    }
}

/// The latent that a job starts from.
fn start_of(spec: &JobSpec) -> Option<&str> {
    match &spec.work {
        JobWork::Run(run) => run.start.as_ref().map(|start| start.latent.as_str()),
        JobWork::Load { .. } => None,
    }
}

fn not_kept(error: JournalError) -> Error {
    Error::NotKept(error.to_string())
}

fn not_kept_on_disk(problem: &std::io::Error) -> Error {
    Error::NotKept(problem.to_string())
}

fn storage(problem: std::io::Error) -> JournalError {
    JournalError::Storage(problem.to_string())
}
