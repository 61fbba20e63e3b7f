//! The worker process: it owns one card, and ends when its supervisor does.

use std::io::Write as _;
use std::path::Path;
use std::sync::mpsc;

use engine::card::{Card, CardCommands, CardError, CardThread, End, Settings, SystemClock};
use gpu::{DeviceSpec, GpuError, OpenError, Timeline};
use residency::Bytes;

use super::command_frames::{Incoming, command_in};
use super::event_frames::event_out;
use super::frames::{FrameError, read_blocking, to_bytes};
use super::noun_frames::memory_in;
use crate::locks;
use crate::proto::worker as wire;
use crate::telemetry;

/// How the process ends when all went well, and when not.
const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;

/// Runs until the supervisor says so, or is gone. A worker always ends at once: whatever its libraries would do on the
/// way out, they would do to a card that may be lost, or beside a thread that computes.
pub(crate) fn run() -> ! {
    let code = serve().unwrap_or_else(|problem| {
        tracing::error!(%problem, "the worker ends");
        FAILURE
    });
    gpu::end_process(code)
}

fn serve() -> Result<i32, FrameError> {
    let mut timeline = Timeline::begin("worker process");
    let mut pipe = std::io::stdin();
    let Some(first) = read_blocking::<wire::Command>(&mut pipe)? else {
        return Ok(SUCCESS);
    };
    let Incoming::Configure(configure) = command_in(first)? else {
        return Err(FrameError::Lacks("its configuration"));
    };
    telemetry::start_worker(&configure.log);
    timeline.part("wait for its configuration");
    telemetry::tell_age("worker process");
    let events = start_writer();
    let refuse = |why: String| {
        let refused = wire::Event {
            event: Some(wire::event::Event::Refused(why)),
        };
        let _ = events.send(Frame::Event(Box::new(refused))); // a supervisor that is gone need not know
    };
    let _lock = match lock(&configure.lock_file) {
        Ok(lock) => lock,
        Err(why) => {
            refuse(why);
            return Ok(last_words(&events));
        }
    };
    let thread = start_card(configure, events.clone())?;
    let commands = thread.commands();
    std::thread::spawn(move || pass_on(&commands));
    match thread.join() {
        End::Shutdown => return Ok(SUCCESS),
        End::NeverReady(error) => refuse(error.to_string()),
        End::Lost(why) => {
            tracing::error!(%why, "the card is lost");
            refuse(why);
        }
        End::Panicked => refuse("the card's thread panicked".to_owned()),
    }
    Ok(last_words(&events))
}

/// Commands from the pipe to the card thread, until the supervisor is gone. The card thread may then be in the
/// middle of a stage: nobody waits for it.
fn pass_on(commands: &CardCommands) {
    let mut pipe = std::io::stdin();
    loop {
        match read_blocking::<wire::Command>(&mut pipe).and_then(|frame| frame.map(command_in).transpose()) {
            Ok(Some(Incoming::Command(command))) => {
                commands.send(command);
            }
            Ok(Some(Incoming::Configure(_))) => {}
            Ok(None) => gpu::end_process(SUCCESS),
            Err(problem) => {
                tracing::error!(%problem, "the supervisor cannot be understood");
                gpu::end_process(FAILURE);
            }
        }
    }
}

fn lock(path: &str) -> Result<Option<std::fs::File>, String> {
    if path.is_empty() {
        return Ok(None);
    }
    match locks::take(Path::new(path)) {
        Ok(Ok(file)) => Ok(Some(file)),
        Ok(Err(pid)) => Err(format!(
            "worker process {pid} still holds the card; it ends, or needs `kill -9 {pid}`"
        )),
        Err(problem) => Err(problem.to_string()),
    }
}

/// To the writer thread.
enum Frame {
    Event(Box<wire::Event>),
    /// Answered when all before it is written.
    Flush(mpsc::Sender<()>),
}

/// Frames leave through a thread of their own, so that the card thread never waits for the pipe.
fn start_writer() -> mpsc::Sender<Frame> {
    let (sender, receiver) = mpsc::channel::<Frame>();
    std::thread::spawn(move || {
        let mut pipe = std::io::stdout();
        for frame in receiver {
            match frame {
                Frame::Event(event) => {
                    if pipe
                        .write_all(&to_bytes(&*event))
                        .and_then(|()| pipe.flush())
                        .is_err()
                    {
                        gpu::end_process(SUCCESS);
                    }
                }
                Frame::Flush(done) => drop(done.send(())),
            }
        }
    });
    sender
}

fn last_words(events: &mpsc::Sender<Frame>) -> i32 {
    let (done, written) = mpsc::channel();
    let _ = events.send(Frame::Flush(done));
    let _ = written.recv(); // an error says that the writer has ended
    FAILURE
}

fn start_card(configure: wire::Configure, events: mpsc::Sender<Frame>) -> Result<CardThread, FrameError> {
    if !configure.plans_folder.is_empty() {
        pipelines::keep_plans_in(Path::new(&configure.plans_folder));
    }
    let open = move || {
        let lost = |why: String| CardError::Gpu(GpuError::Lost(why));
        let device: DeviceSpec = configure.device.parse().map_err(|e| lost(format!("{e}")))?;
        if matches!(device, DeviceSpec::Cuda(_)) {
            // The system loads them while the driver starts. What is not found now is not found later.
            std::thread::spawn(pipelines::libraries);
        }
        let memory = configure
            .memory
            .ok_or_else(|| lost(FrameError::Lacks("how memory is managed").to_string()))?;
        let memory = memory_in(&memory);
        let gpu = gpu::open(&device, configure.generation, &memory).map_err(|error| match error {
            OpenError::Card { source, .. } => CardError::Gpu(source),
            OpenError::NoCuda { .. } | OpenError::NotFound { .. } => lost(error.to_string()),
        })?;
        let settings = Settings {
            headroom: Bytes(configure.headroom),
            slack_limit: memory.slack_limit,
            ..Settings::default()
        };
        Card::new(
            gpu,
            pipelines::catalogue(),
            settings,
            Box::new(SystemClock::new()),
        )
    };
    let emit = move |event| {
        let _ = events.send(Frame::Event(Box::new(event_out(&event)))); // the writer ends the process when the pipe is gone
    };
    Ok(engine::card::spawn(open, emit)?)
}
