//! The worker process: it owns one card, and ends when its supervisor does.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::mpsc;

use engine::card::{
    Card, CardCommands, CardError, CardSettings, CardThread, Events, Faults, ProcessFaults, SystemClock,
    ThreadEnd,
};
use engine::messages::Event;
use gpu::{DeviceSpec, GpuError, OpenError, Timeline};

use super::confinement::{self, Confinement, Strictness, tries};
use super::frames::{self, FrameError};
use super::inputs::{RecentInputs, SentCommand};
use super::{Configuration, FromWorker};
use crate::locks;
use crate::telemetry;

/// Exit codes.
const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;

/// Runs until the supervisor shuts it down, or has ended. A worker ends without destructors and exit handlers: those of its
/// libraries would touch a card that may be lost, or run beside a thread that computes.
pub(crate) fn run() -> ! {
    // On a card in system memory, weights and activations of hundreds of MiB are allocated and freed: freed memory must be returned to
    // the system. The threads compute, and allocate little besides.
    gpu::allocator::share_heaps(1);
    let code = serve().unwrap_or_else(|problem| {
        tracing::error!(%problem, "the worker ends");
        FAILURE
    });
    end(code)
}

/// Writes the rest of the log, then ends this process: without destructors nothing else would write it.
fn end(code: i32) -> ! {
    telemetry::flush();
    gpu::end_process(code)
}

fn serve() -> Result<i32, FrameError> {
    let output = take_output()?;
    let mut timeline = Timeline::begin("worker process");
    let mut pipe = std::io::stdin();
    let Some(configuration) = frames::read::<Configuration>(&mut pipe)? else {
        return Ok(SUCCESS);
    };
    let closed = close_inherited(&configuration.settings.confinement, &output);
    // The lock is a file of the state folder, which the worker cannot read later.
    let lock = match configuration.is_trial {
        true => Ok(None),
        false => lock(configuration.settings.lock_file.as_deref()),
    };
    // Before the first other thread, of which the log has one.
    let confined = closed.and_then(|()| confinement::apply(&configuration.settings.confinement));
    telemetry::start(&configuration.settings.log);
    timeline.part("wait for its configuration");
    telemetry::log_start_time("worker process");
    let events = start_writer(output);
    let refuse = |why: String| {
        let _ = events.send(Frame::Of(Box::new(FromWorker::Refused(why)))); // an error means that the supervisor is gone
    };
    match confined {
        Ok(held) => drop(events.send(Frame::Of(Box::new(FromWorker::Confined(held))))),
        Err(why) => {
            refuse(why);
            return Ok(flush_then_fail(&events));
        }
    }
    if configuration.is_trial {
        return Ok(try_all(configuration.settings.confinement, &events));
    }
    let _lock = match lock {
        Ok(lock) => lock,
        Err(why) => {
            refuse(why);
            return Ok(flush_then_fail(&events));
        }
    };
    let thread = start_card(configuration, events.clone())?;
    let commands = thread.commands();
    std::thread::spawn(move || pass_on(&commands));
    match thread.join() {
        ThreadEnd::Shutdown => return Ok(SUCCESS),
        ThreadEnd::NeverReady(error) => refuse(error.to_string()),
        ThreadEnd::Lost(why) => {
            tracing::error!(%why, "the card is lost");
            refuse(why);
        }
        ThreadEnd::Panicked => refuse("the card's thread panicked".to_owned()),
    }
    Ok(flush_then_fail(&events))
}

/// Closes what those who started the service left open.
///
/// # Errors
/// When that is required and the system cannot. For people.
fn close_inherited(confinement: &Confinement, output: &File) -> Result<(), String> {
    if confinement.strictness == Strictness::None {
        return Ok(());
    }
    match gpu::close_inherited(output.as_fd()) {
        Err(error) if confinement.is_required => Err(format!(
            "descriptors that were left open to the worker cannot be closed: {error}"
        )),
        _ => Ok(()),
    }
}

/// Tries what a hostile checkpoint would, and tells what was refused: on another thread, as a card has.
fn try_all(confinement: Confinement, events: &mpsc::Sender<Frame>) -> i32 {
    let tried = std::thread::spawn(move || tries::try_all(&confinement)).join();
    let _ = events.send(Frame::Of(Box::new(FromWorker::Tried(tried.unwrap_or_default()))));
    flush(events);
    SUCCESS
}

/// Carries out injected faults in a worker.
#[derive(Debug)]
struct WorkerFaults(Confinement);

impl Faults for WorkerFaults {
    fn die(&self, place: &str) {
        ProcessFaults.die(place);
    }

    fn hang(&self, place: &str) {
        ProcessFaults.hang(place);
    }

    fn escape(&self, place: &str) {
        for tried in tries::try_all(&self.0) {
            tracing::error!(place, what = tried.what, outcome = %tried.outcome, "an injected fault tries to escape");
        }
    }
}

/// The pipe to the supervisor, moved away from standard output, which is the log from here on: the supervisor would read
/// a library's output there as a frame.
fn take_output() -> std::io::Result<File> {
    let pipe = std::io::stdout().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdout(std::io::stderr())?;
    Ok(File::from(pipe))
}

/// Passes commands from the pipe to the card thread, until the supervisor is gone. The process ends then, even in the
/// middle of a stage.
fn pass_on(commands: &CardCommands) {
    let mut pipe = std::io::stdin();
    let mut inputs = RecentInputs::default();
    let fail = |problem: &dyn Error| -> ! {
        tracing::error!(%problem, "a command cannot be read");
        end(FAILURE)
    };
    loop {
        match frames::read::<SentCommand>(&mut pipe) {
            Ok(Some(sent)) => match inputs.receive(sent) {
                Ok(command) => drop(commands.send(*command)),
                Err(problem) => fail(&problem),
            },
            Ok(None) => end(SUCCESS),
            Err(problem) => fail(&problem),
        }
    }
}

fn lock(path: Option<&Path>) -> Result<Option<std::fs::File>, String> {
    let Some(path) = path else {
        return Ok(None);
    };
    match locks::take(path) {
        Ok(Ok(file)) => Ok(Some(file)),
        Ok(Err(pid)) => Err(format!(
            "worker process {pid} still holds the card; it ends, or needs `kill -9 {pid}`"
        )),
        Err(problem) => Err(problem.to_string()),
    }
}

/// A message to the writer thread.
enum Frame {
    Of(Box<FromWorker>),
    /// Answered when all frames before it are written.
    Flush(mpsc::Sender<()>),
}

/// Frames leave through a thread of their own, so that the card thread waits for the pipe alone at the beginning of an order that
/// was not sent ahead.
fn start_writer(pipe: File) -> mpsc::Sender<Frame> {
    let (sender, receiver) = mpsc::channel::<Frame>();
    std::thread::spawn(move || {
        let mut pipe = BufWriter::new(pipe);
        for frame in receiver {
            match frame {
                Frame::Of(message) => {
                    match frames::write(&*message, &mut pipe).and_then(|()| Ok(pipe.flush()?)) {
                        Ok(()) => {}
                        Err(FrameError::Pipe(_)) => end(SUCCESS),
                        Err(problem) => {
                            tracing::error!(%problem, "the worker cannot write a frame");
                            end(FAILURE);
                        }
                    }
                }
                Frame::Flush(done) => drop(done.send(())),
            }
        }
    });
    sender
}

/// Waits until all frames are written.
fn flush(events: &mpsc::Sender<Frame>) {
    let (done, written) = mpsc::channel();
    let _ = events.send(Frame::Flush(done));
    let _ = written.recv(); // an error means that the writer has ended
}

/// Waits until all frames are written; the exit code of a failure.
fn flush_then_fail(events: &mpsc::Sender<Frame>) -> i32 {
    flush(events);
    FAILURE
}

fn start_card(configuration: Configuration, events: mpsc::Sender<Frame>) -> Result<CardThread, FrameError> {
    let Configuration {
        generation, settings, ..
    } = configuration;
    pipelines::keep_plans_in(&settings.plans_folder);
    pipelines::set_fp8_products(settings.fp8_products);
    pipelines::set_int8_products(settings.int8_products);
    let confinement = settings.confinement;
    let open = move || {
        if matches!(settings.device, DeviceSpec::Cuda(_)) {
            // Loads them while the driver starts; the result is cached.
            std::thread::spawn(pipelines::libraries);
        }
        let memory = &settings.memory;
        let gpu = gpu::open(&settings.device, generation, memory).map_err(|error| match error {
            OpenError::Card { source, .. } => CardError::Gpu(source),
            OpenError::NoCuda { .. } | OpenError::NotFound { .. } => {
                CardError::Gpu(GpuError::Lost(error.to_string()))
            }
        })?;
        let settings = CardSettings {
            headroom: settings.headroom,
            host_limit: settings.host_memory,
            slack_limit: memory.slack_limit,
            ..CardSettings::default()
        };
        let card = Card::new(gpu, pipelines::families(), settings, Box::new(SystemClock::new()))?;
        Ok(card.with_faults(Box::new(WorkerFaults(confinement))))
    };
    Ok(engine::card::spawn(open, ToSupervisor(events))?)
}

/// Passes the events of the card's thread to the writer.
struct ToSupervisor(mpsc::Sender<Frame>);

impl Events for ToSupervisor {
    fn send(&self, event: Event) {
        let _ = self.0.send(Frame::Of(Box::new(FromWorker::Event(event)))); // the writer ends the process when the pipe is gone
    }

    fn flush(&self) {
        flush(&self.0);
    }
}
