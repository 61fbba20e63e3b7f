//! One task per card: it starts the worker process, carries frames, reaps it, and starts the next.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use calls::WorkerPids;
use engine::messages::{Command, Event};
use engine::queue::{CardPort, CardSignal, CardSlot, Signal};
use futures::StreamExt as _;
use gpu::{CardDescription, Timeline};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::codec::FramedRead;

use super::confinement::{Held, Places, Strictness};
use super::frames::{self, FrameError, Frames};
use super::inputs::RecentInputs;
use super::{Configuration, FromWorker, WorkerSettings};

/// Backoff between two starts: doubled from the first to the last while workers end before [`BACK_OFF_RESET_UPTIME`].
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
const LAST_BACK_OFF: Duration = Duration::from_secs(10);
/// Uptime after which the backoff is reset.
const BACK_OFF_RESET_UPTIME: Duration = Duration::from_secs(60);
/// Timeout of a worker's start, up to a passed canary.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Grace period after `Shutdown` before a worker is killed.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Capacity of the pipes of a worker: the most that Linux allows every user.
const PIPE_BYTES: usize = 1 << 20;

/// Time to wait for the exit status of a lost worker before it is reported without one.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A request to the task of one card.
enum Request {
    Send(Box<Command>),
    Recycle(String),
}

/// The queue's end of a card's task.
struct Port {
    requests: mpsc::UnboundedSender<Request>,
}

impl CardPort for Port {
    fn send(&mut self, command: Command) {
        // A send fails only when the task has ended, and it ends only with the service.
        let _ = self.requests.send(Request::Send(Box::new(command)));
    }

    fn recycle(&mut self, reason: &str) {
        let _ = self.requests.send(Request::Recycle(reason.to_owned()));
    }
}

/// A worker process that waits for the configuration of its card: loading the libraries of NVIDIA takes long, and cards
/// are discovered meanwhile. It ends when this is dropped.
pub(crate) struct EarlyWorker(Option<Child>);

impl EarlyWorker {
    /// Starts it. If that fails, the task of its card tries again, and reports the error.
    pub(crate) fn start(caches: &Caches) -> EarlyWorker {
        EarlyWorker(spawn(caches).ok())
    }

    /// Takes the process out of `self`.
    pub(crate) fn take(&mut self) -> EarlyWorker {
        EarlyWorker(self.0.take())
    }
}

/// Where the libraries of a confined worker keep what they have compiled. In the user's own folder, what a worker that was taken over
/// writes would be run by other programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caches(pub(crate) Option<PathBuf>);

/// How the workers of one card are started.
pub(crate) struct Workers {
    pub(crate) settings: WorkerSettings,
    pub(crate) places: Places,
    pub(crate) caches: Caches,
    /// The first one, if it was started early.
    pub(crate) early: EarlyWorker,
}

/// Starts the task of one card, which takes the early worker or starts one, and starts another whenever it ends, until the
/// queue drops the slot or the service ends: then the task ends once its worker has.
pub(crate) fn start_card(
    card: usize,
    description: CardDescription,
    workers: Workers,
    signals: mpsc::UnboundedSender<CardSignal>,
    pids: WorkerPids,
    ending: watch::Receiver<bool>,
) -> (CardSlot, JoinHandle<()>) {
    let (requests, receiver) = mpsc::unbounded_channel();
    let card_task = CardTask {
        card,
        strictness: workers.settings.confinement.strictness,
        settings: workers.settings,
        places: workers.places,
        caches: workers.caches,
        is_ready: false,
        signals,
        requests: receiver,
        generation: 0,
        early: workers.early,
        pids,
        ending,
    };
    let task = tokio::spawn(card_task.run());
    let slot = CardSlot {
        description,
        port: Box::new(Port { requests }),
    };
    (slot, task)
}

/// State of the task of one card.
struct CardTask {
    card: usize,
    settings: WorkerSettings,
    /// How far the next worker is confined.
    strictness: Strictness,
    places: Places,
    caches: Caches,
    /// Whether the worker of now has been ready.
    is_ready: bool,
    signals: mpsc::UnboundedSender<CardSignal>,
    requests: mpsc::UnboundedReceiver<Request>,
    generation: u64,
    /// The worker of generation 1, if it was started early.
    early: EarlyWorker,
    pids: WorkerPids,
    /// True once the service ends.
    ending: watch::Receiver<bool>,
}

/// Why a worker is no longer used.
enum End {
    /// It failed, and another is started. The reason is empty when it closed its pipe: its exit status says why.
    Died(String),
    /// The service stops.
    ServiceStopping,
}

impl CardTask {
    async fn run(mut self) {
        let mut back_off = FIRST_BACK_OFF;
        loop {
            self.generation += 1;
            let started = Instant::now();
            let (end, worker) = self.run_worker().await;
            let reason = match end {
                End::ServiceStopping => return self.stop_worker(worker).await,
                End::Died(reason) => reason,
            };
            self.confine_less_if_it_did_not_start();
            if started.elapsed() >= BACK_OFF_RESET_UPTIME {
                back_off = FIRST_BACK_OFF;
            }
            if let Some(unreaped) = self.reap(worker, reason, back_off).await {
                return self.stop_worker(Some(unreaped)).await;
            }
            tokio::select! {
                () = tokio::time::sleep(back_off) => {}
                () = ended(&mut self.ending) => return,
            }
            back_off = (back_off * 2).min(LAST_BACK_OFF);
            // Requests to the lost worker are answered by `Lost`, not by its successor.
            while let Ok(request) = self.requests.try_recv() {
                drop(request);
            }
            if self.requests.is_closed() {
                return;
            }
        }
    }

    /// A driver may need what a confined worker is denied. A worker that was never ready has had no order yet, so no checkpoint has a
    /// say in this.
    fn confine_less_if_it_did_not_start(&mut self) {
        let confinement = &self.settings.confinement;
        let may_be_less = confinement.drives_nvidia
            && !confinement.is_required
            && confinement.strictness != Strictness::None;
        if self.is_ready || !may_be_less {
            return;
        }
        self.strictness = self.strictness.less();
        tracing::warn!(
            card = self.card,
            confined = %self.strictness,
            "the worker did not start, perhaps because it is confined: the next one is confined otherwise (service.confine_workers = \"always\" keeps it so)"
        );
    }

    /// Reports a lost worker to the queue, then waits until its process has exited: its successor cannot open the card
    /// before. A process that is stuck in the driver may never exit, so the queue does not wait for it. Returns the process
    /// if the service ends first.
    async fn reap(&mut self, worker: Option<Child>, reason: String, back_off: Duration) -> Option<Child> {
        let (reason, worker) = match worker {
            None => (reason, None),
            Some(mut worker) => match tokio::time::timeout(EXIT_TIMEOUT, worker.wait()).await {
                Ok(status) => (with_status(&reason, status), None),
                Err(_) => {
                    let lives = std::io::Error::other("its process has not ended yet");
                    (with_status(&reason, Err(lives)), Some(worker))
                }
            },
        };
        tracing::warn!(card = self.card, generation = self.generation, %reason, ?back_off, "the worker ended");
        self.signal(Signal::Lost {
            reason,
            restarts_in: back_off,
        });
        let unreaped = match worker {
            None => None,
            Some(worker) => self.wait_for_exit(worker).await,
        };
        if unreaped.is_none() {
            self.pids.set(self.card, None);
        }
        unreaped
    }

    /// Waits for the exit of a worker, and kills it after a grace period. Returns the process if the service ends first.
    async fn wait_for_exit(&mut self, mut worker: Child) -> Option<Child> {
        for grace in [SHUTDOWN_GRACE, SHUTDOWN_GRACE] {
            tokio::select! {
                _ = worker.wait() => return None,
                () = ended(&mut self.ending) => return Some(worker),
                () = tokio::time::sleep(grace) => {
                    let _ = worker.start_kill(); // it may have ended already
                }
            }
        }
        let reason = format!(
            "the worker (process {}) was killed and does not end: it is stuck in the driver. The card is out of service until \
             it does; other cards go on. Reset the card, or restart the machine",
            worker.id().unwrap_or(0)
        );
        tracing::error!(card = self.card, reason);
        self.signal(Signal::Stuck { reason });
        tokio::select! {
            _ = worker.wait() => None,
            () = ended(&mut self.ending) => Some(worker),
        }
    }

    /// Waits for the exit of a worker when the service ends, and kills it after a grace period.
    async fn stop_worker(&self, worker: Option<Child>) {
        let Some(mut worker) = worker else { return };
        for _ in 0..2 {
            if tokio::time::timeout(SHUTDOWN_GRACE, worker.wait()).await.is_ok() {
                return self.pids.set(self.card, None);
            }
            let _ = worker.start_kill(); // it may have ended already
        }
        tracing::error!(
            card = self.card,
            pid = worker.id(),
            "the worker was killed and does not end: its memory stays taken"
        );
    }

    /// Runs one worker until it is no longer used. Its process, which is returned, may not have exited.
    async fn run_worker(&mut self) -> (End, Option<Child>) {
        let child = match self.early.0.take() {
            Some(early) => Ok(early),
            None => spawn(&self.caches),
        };
        let mut child = match child {
            Ok(child) => child,
            Err(problem) => {
                return (
                    End::Died(format!("the worker cannot be started: {problem}")),
                    None,
                );
            }
        };
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return (End::Died("the worker has no pipes".to_owned()), Some(child));
        };
        widen(&stdin);
        widen(&stdout);
        self.pids.set(self.card, child.id());
        self.is_ready = false;
        let end = self.carry(stdin, stdout, &mut child).await;
        (end, Some(child))
    }

    /// Carries frames both ways until one side ends. A task of its own writes: a worker that does not read must not
    /// delay the request to replace it.
    async fn carry(&mut self, stdin: ChildStdin, stdout: ChildStdout, child: &mut Child) -> End {
        let configuration = self.configuration().await;
        let (commands, mut writing) = start_writer(stdin, configuration);
        let mut from_worker = FramedRead::new(stdout, Frames::<FromWorker>::new());
        let start_limit = tokio::time::sleep(START_LIMIT);
        tokio::pin!(start_limit);
        let mut timeline = Timeline::begin("worker, as its supervisor sees it");
        let end = loop {
            tokio::select! {
                // What a worker has reported before it died is passed on before its loss.
                biased;
                request = self.requests.recv() => match request {
                    None => break End::ServiceStopping,
                    Some(Request::Send(command)) => {
                        if self.is_confined_by_files() && self.places.lacks(&command).await {
                            break End::Died("it is started again, so that it may read a model elsewhere".to_owned());
                        }
                        let _ = commands.send(command); // the end of the writer is handled below
                    }
                    Some(Request::Recycle(reason)) => break End::Died(format!("recycled: {reason}")),
                },
                event = from_worker.next() => match event {
                    None => break End::Died(String::new()),
                    Some(Err(problem)) => break End::Died(problem.to_string()),
                    Some(Ok(FromWorker::Refused(why))) => break End::Died(why),
                    Some(Ok(FromWorker::Confined(held))) => self.note(&held),
                    Some(Ok(FromWorker::Tried(_))) => {}
                    Some(Ok(FromWorker::Event(event))) => {
                        if matches!(event, Event::Ready { .. }) {
                            self.is_ready = true;
                            timeline.part("from its start until it is ready");
                        }
                        self.pass_on(event, child);
                    }
                },
                written = &mut writing => {
                    let problem = written.map_or_else(|panic| panic.to_string(), |end| match end {
                        Ok(()) => "nothing is written to it any more".to_owned(),
                        Err(problem) => problem.to_string(),
                    });
                    break End::Died(problem);
                }
                () = ended(&mut self.ending) => break End::ServiceStopping,
                () = &mut start_limit, if !self.is_ready => {
                    break End::Died(format!("it was not ready within {} s", START_LIMIT.as_secs()));
                }
            }
        };
        writing.abort(); // which closes the worker's standard input
        if matches!(&end, End::Died(reason) if !reason.is_empty()) {
            let _ = child.start_kill(); // it may have ended already
        }
        end
    }

    /// The first frame to a worker.
    async fn configuration(&mut self) -> Configuration {
        let mut settings = self.settings.clone();
        settings.confinement.strictness = self.strictness;
        if self.is_confined_by_files() {
            settings.confinement.read = self.places.grant().await;
        }
        Configuration {
            generation: self.generation,
            settings,
            is_trial: false,
        }
    }

    fn is_confined_by_files(&self) -> bool {
        self.strictness == Strictness::All
    }

    /// Logs how a worker is confined. Where files are not, it could read this process's memory by them, unless that is closed too.
    fn note(&self, held: &Held) {
        let asked = self.settings.confinement.strictness != Strictness::None;
        if asked && held.landlock.is_none() {
            close_own_memory();
        }
        match asked && !held.lacks.is_empty() {
            true => {
                tracing::warn!(card = self.card, generation = self.generation, %held, "the worker is confined in part")
            }
            false => {
                tracing::info!(card = self.card, generation = self.generation, %held, "confinement of the worker")
            }
        }
    }

    fn pass_on(&self, event: Event, child: &Child) {
        if let Event::Ready { card, attention, .. } = &event {
            tracing::info!(card = %card.id, generation = self.generation, pid = child.id(), attention, "the worker is ready");
        }
        self.signal(Signal::Event(event));
    }

    fn signal(&self, signal: Signal) {
        let _ = self.signals.send(CardSignal {
            card: self.card,
            generation: self.generation,
            signal,
        });
    }
}

/// Writes the configuration and then commands to the worker, until the pipe fails or the sender is dropped.
fn start_writer(
    mut stdin: ChildStdin,
    configuration: Configuration,
) -> (
    mpsc::UnboundedSender<Box<Command>>,
    JoinHandle<Result<(), FrameError>>,
) {
    let (commands, mut received) = mpsc::unbounded_channel::<Box<Command>>();
    let writing = tokio::spawn(async move {
        stdin.write_all(&frames::in_memory(&configuration)?).await?;
        let mut inputs = RecentInputs::default();
        while let Some(command) = received.recv().await {
            stdin
                .write_all(&frames::in_memory(&inputs.send(command))?)
                .await?;
        }
        Ok(())
    });
    (commands, writing)
}

/// Lets a pipe hold more than the usual 64 KiB, so that the values of a stage, which are some MB, pass in a few pieces: each
/// wakes one process and puts the other to sleep. Where the system allows no more, it stays as it is.
fn widen(pipe: &impl AsFd) {
    if let Err(error) = rustix::pipe::fcntl_setpipe_size(pipe, PIPE_BYTES) {
        tracing::debug!(%error, "the pipe of a worker stays as small as it is");
    }
}

/// Closes the memory and the variables of this process to other processes of the same user, debuggers among them.
fn close_own_memory() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        tracing::warn!(%error, "the service's memory stays open to processes of the same user");
    }
}

/// Starts this binary as a worker. It has a process group of its own, so that a Ctrl-C in the terminal
/// reaches the supervisor alone, which then drains.
pub(super) fn spawn(caches: &Caches) -> std::io::Result<Child> {
    let mut worker = tokio::process::Command::new(std::env::current_exe()?);
    worker.env_clear().envs(config::variables_of_workers());
    if let Some(folder) = &caches.0 {
        worker.env("CUDA_CACHE_PATH", folder);
    }
    worker
        .arg("worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Resolves when the service ends.
async fn ended(ending: &mut watch::Receiver<bool>) {
    let _ = ending.wait_for(|ended| *ended).await; // an error means that the sender is gone, which ends the service too
}

/// Why a worker ended, and how its process did.
fn with_status(reason: &str, status: std::io::Result<ExitStatus>) -> String {
    let status = status.map_or_else(|problem| problem.to_string(), describe);
    match reason {
        "" => status,
        reason => format!("{reason} ({status})"),
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit status".to_owned(),
    }
}
