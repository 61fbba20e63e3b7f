//! The command line. `serve` and `worker` are the service; the others are clients of one, as any other would
//! be; `demo` is both.

mod arguments;
mod cards;
mod connection;
mod demo;
mod doctor;
mod generate;
mod picture;
mod pull;
mod reports;
mod residency;
mod results;
mod screen;
mod show;
mod status;

use std::process::ExitCode;
use std::time::Duration;

use tokio::sync::oneshot;

use arguments::{Arguments, Command};

use crate::config::{Config, DEFAULTS};
use crate::{process, serve, telemetry};

/// What threads may take to end at the end of a command.
const LAST_THREADS: Duration = Duration::from_secs(1);

/// Why a command failed, for people.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Config(#[from] crate::config::Mistakes),
    /// The service could not start, or failed while running.
    #[error(transparent)]
    Serve(#[from] serve::ServeError),
    /// The service cannot be reached.
    #[error(
        "no service answers at {endpoint}: {problem}\n  start one with `moored serve`, or name another with \
         `--endpoint` or MOORED_ENDPOINT"
    )]
    Unreachable { endpoint: String, problem: String },
    /// The service refused the request.
    #[error("{0}")]
    Refused(Box<connection::Refusal>),
    /// A model could not be pulled.
    #[error(transparent)]
    Pull(#[from] crate::hub::PullError),
    /// A file could not be read or written.
    #[error("{path}: {problem}")]
    File { path: String, problem: String },
    /// The arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// Output could not be written.
    #[error("output failed: {0}")]
    Output(#[from] std::io::Error),
}

impl From<tonic::Status> for CliError {
    fn from(status: tonic::Status) -> CliError {
        CliError::Refused(Box::new(connection::Refusal::of(&status)))
    }
}

/// Parses the arguments and runs the command.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::read();
    if matches!(arguments.command, Command::Worker) {
        process::worker::run();
    }
    let json = arguments.json();
    match dispatch(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::Output(problem)) if problem.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            screen::fail(&error, json);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: Arguments) -> Result<(), CliError> {
    let (file, flags) = arguments.layers();
    if let Command::Config { defaults: true } = arguments.command {
        return screen::text(DEFAULTS.trim_end());
    }
    let config = Config::load(file, flags)?;
    telemetry::start(&config.log);
    if let Command::Config { .. } = arguments.command {
        return reports::configuration(&config, arguments.json());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let json = arguments.json();
    let ended = runtime.block_on(async move {
        match arguments.command {
            Command::Serve(options) => {
                telemetry::tell_age("start the service");
                let stop = options.end_with_stdin.then(end_of_stdin);
                Ok(serve::run(config, None, stop).await?)
            }
            Command::Demo(options) => demo::run(config, options, json).await,
            Command::Doctor => doctor::run(config, json).await,
            Command::Generate(options) => generate::run(&config.client, options, json).await,
            Command::Plan(options) => generate::plan(&config.client, options, json).await,
            Command::Status(options) => status::run(&config.client, options, json).await,
            Command::Models => residency::models(&config.client, json).await,
            Command::Pull { model } => pull::run(config.hub, &model, json).await,
            Command::Load(options) => residency::load(&config.client, options, json).await,
            Command::Unload(options) => residency::unload(&config.client, options, json).await,
            Command::Pin(options) => residency::pin(&config.client, options, json).await,
            Command::Trim(options) => cards::trim(&config.client, options, json).await,
            Command::Reserve(options) => cards::reserve(&config.client, options, json).await,
            Command::Release(options) => cards::release(&config.client, options, json).await,
            Command::Recycle(options) => cards::recycle(&config.client, options, json).await,
            Command::Jobs { all } => residency::jobs(&config.client, all, json).await,
            Command::Cancel { job } => residency::cancel(&config.client, job, json).await,
            Command::Config { .. } | Command::Worker => Ok(()), // done above
        }
    });
    // A thread that waits for a file system that does not answer ends with the process.
    runtime.shutdown_timeout(LAST_THREADS);
    ended
}

/// Resolves when standard input is closed.
fn end_of_stdin() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    // A thread of its own: a blocked read would hold up the runtime's end.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()); // an error ends it as well
        drop(sender);
    });
    receiver
}
