//! ASKS. The command line: its commands are clients of a service, like any other client. Tasks that need the service's own
//! code are done by the [`Program`] that the command line is part of.

mod adapter;
mod arguments;
mod available;
mod cards;
mod connection;
mod demo;
mod destination;
mod doctor;
mod exit;
mod fetch;
mod files;
mod generate;
mod init;
mod interrupt;
mod local;
mod mcp;
mod models;
mod names;
mod picture;
mod pinned;
mod program;
mod pull;
mod pull_messages;
mod reports;
mod request;
mod residency;
mod results;
mod run;
mod screen;
mod shell;
mod show;
mod status;
mod token;
mod track_uploads;
mod wire;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use config::{Config, DEFAULT_FILTER, DEFAULTS};
use tokio::sync::oneshot;
use wording::one_line;

use arguments::{Arguments, Command, Verbosity};
pub use doctor::Finding;
use exit::Exit;
use interrupt::Second;
pub use program::{Ended, LocalModel, Program, Ready, ServiceProblem};

/// Timeout of ending threads when a command ends.
const LAST_THREADS: Duration = Duration::from_secs(1);

/// Why a command failed, for people.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] config::Mistakes),
    /// The service could not start, or failed while running.
    #[error("{0}")]
    Serve(#[from] ServiceProblem),
    /// The service cannot be reached.
    #[error(
        "no service answers at {endpoint}: {problem}\n  start one with `moored serve`, or name another with \
         `--endpoint` or MOORED_ENDPOINT; `moored run MODEL PROMPT` needs none"
    )]
    Unreachable { endpoint: String, problem: String },
    /// Something between here and the service, or in its place, failed.
    #[error(transparent)]
    Wire(#[from] wire::WireError),
    /// The connection ended in the middle of a call.
    #[error(
        "the connection to {endpoint} was lost before the job ended; see whether the service still runs (`moored status`, \
         and its log){}", or_certificate(.endpoint)
    )]
    Lost { endpoint: String },
    /// The token would be sent unencrypted.
    #[error(
        "the token was not sent: the connection to {endpoint} is not encrypted, and it is another machine\n  use an https:// \
         address (`moored serve --init` where the service runs), or a tunnel: ssh -L 50051:127.0.0.1:50051 HOST; \
         --insecure-token or MOORED_INSECURE_TOKEN=1 sends it all the same"
    )]
    InsecureToken { endpoint: String },
    /// The service refused the request.
    #[error("{0}")]
    Refused(Box<connection::Refusal>),
    /// A model could not be pulled.
    #[error(transparent)]
    Pull(#[from] hub::PullError),
    /// A file could not be read or written.
    #[error("{path}: {problem}")]
    File { path: String, problem: String },
    /// A file is there already.
    #[error("{0} is there already: --force overwrites it, -o FILE names another")]
    Exists(String),
    /// There is no such model.
    #[error("{}", one_line(.0))]
    NoModel(String),
    /// The arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// The command failed for another reason.
    #[error("{}", one_line(.0))]
    Failed(String),
    /// The planned request can never run on this card.
    #[error("{}", one_line(.0))]
    DoesNotFit(String),
    /// The planned request cannot run now.
    #[error("{}", one_line(.0))]
    NotNow(String),
    /// Ctrl-C, or SIGTERM.
    #[error("{0}")]
    Interrupted(String),
    /// Output could not be written.
    #[error("output failed: {0}")]
    Output(#[from] std::io::Error),
}

/// What else ends a connection in TLS: in TLS 1.3 a client learns of it only by the end.
fn or_certificate(endpoint: &str) -> &'static str {
    match endpoint.starts_with("https://") {
        true => {
            ", and whether it asks clients for a certificate (MOORED_CERTIFICATE, MOORED_CERTIFICATE_KEY)"
        }
        false => "",
    }
}

impl CliError {
    /// A file that cannot be read or written.
    fn file(path: &Path, problem: impl ToString) -> CliError {
        CliError::File {
            path: path.display().to_string(),
            problem: problem.to_string(),
        }
    }
}

impl From<tonic::Status> for CliError {
    fn from(status: tonic::Status) -> CliError {
        connection::lost(&status)
            .unwrap_or_else(|| CliError::Refused(Box::new(connection::Refusal::of(&status))))
    }
}

/// Parses the arguments and runs the command.
pub fn run(program: &'static dyn Program) -> ExitCode {
    let arguments = Arguments::read(program.version());
    if matches!(arguments.command, Command::Worker) {
        program.work();
    }
    let json = arguments.json();
    let done = dispatch(program, arguments);
    program.flush_log();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::Output(problem)) if problem.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            screen::fail(&error, json);
            ExitCode::from(Exit::of(&error) as u8)
        }
    }
}

fn dispatch(program: &'static dyn Program, arguments: Arguments) -> Result<(), CliError> {
    let verbosity = arguments.verbosity();
    screen::set_verbosity(verbosity);
    match &arguments.command {
        Command::Config { defaults: true, .. } => return screen::lines(DEFAULTS.trim_end()),
        Command::Completions { shell } => return shell::completions(*shell),
        Command::Man { folder } => return shell::manual(folder.as_deref()),
        _ => {}
    }
    let json = arguments.json();
    let (file, flags) = arguments.layers();
    let mut config = Config::load(file, flags)?;
    config.log.filter = Some(filter_of(&arguments.command, &config, verbosity));
    program.start_log(&config.log);
    if let Command::Config { path, .. } = arguments.command {
        return reports::configuration(&config, path, json);
    }
    // Threads of blocking work end soon after a burst: an idle service has as many as it began with.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_keep_alive(Duration::from_secs(1))
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async move {
        let client = &config.client;
        match &arguments.command {
            Command::Serve(_) => {} // it stops by itself
            Command::Run(_) | Command::Demo(_) => interrupt::listen(program, Second::IsForTheService)?,
            _ => interrupt::listen(program, Second::Exits)?,
        }
        match arguments.command {
            Command::Serve(options) if options.init => init::run(&config, json),
            Command::Serve(options) => {
                let stop = options.end_with_stdin.then(end_of_stdin);
                Ok(program.serve(config, None, stop).await?)
            }
            // These clear up before they end on a signal.
            Command::Run(options) => run::run(program, config, options, json).await,
            Command::Demo(options) => demo::run(program, config, options, json).await,
            Command::Generate(options) => generate::run(client, options, json).await,
            Command::Film(options) => generate::film(client, options, json).await,
            Command::Play(options) => generate::run(client, options.into_generate(), json).await,
            other => interrupt::or(ask(program, &config, other, json)).await,
        }
    });
    // A thread that waits for a file system that does not answer ends with the process.
    runtime.shutdown_timeout(LAST_THREADS);
    ended
}

/// The commands that may be dropped at any time.
async fn ask(
    program: &'static dyn Program,
    config: &Config,
    command: Command,
    json: bool,
) -> Result<(), CliError> {
    let client = &config.client;
    match command {
        Command::Doctor => doctor::run(program, config.clone(), json).await,
        Command::Plan(options) => generate::plan(client, config.cards.headroom, options, json).await,
        Command::Status(options) => status::run(client, options, json).await,
        Command::Models { available: true, .. } => available::list(program, config, json).await,
        Command::Models { adapters: true, .. } => models::list_adapters(client, json).await,
        Command::Models { .. } => models::list(program, config, json).await,
        Command::Info { model } => models::info(config, &model, json).await,
        Command::Pull { model, dry_run } => {
            pull::run(program, config.hub.clone(), &model, dry_run, json).await
        }
        Command::Rm { model, yes } => models::remove(config, &model, yes, json).await,
        Command::Load(options) => residency::load(client, options, json).await,
        Command::Unload(options) => residency::unload(client, options, json).await,
        Command::Pin(options) => residency::pin(client, options, json).await,
        Command::Trim(options) => cards::trim(client, options, json).await,
        Command::Reserve(options) => cards::reserve(client, options, json).await,
        Command::Release(options) => cards::release(client, options, json).await,
        Command::Recycle(options) => cards::recycle(client, options, json).await,
        Command::Jobs { all } => residency::jobs(client, all, json).await,
        Command::Fetch { job, output } => fetch::run(client, job, &output, json).await,
        Command::Cancel { job } => residency::cancel(client, job, json).await,
        Command::Mcp => mcp::run(client).await,
        Command::Token(options) => token::run(config, options, json),
        Command::Serve(_)
        | Command::Run(_)
        | Command::Demo(_)
        | Command::Generate(_)
        | Command::Film(_)
        | Command::Play(_)
        | Command::Config { .. }
        | Command::Worker
        | Command::Completions { .. }
        | Command::Man { .. } => Ok(()), // done by the callers
    }
}

/// The log filter: `info` for a service, `warn` for other commands, unless options or settings say otherwise.
fn filter_of(command: &Command, config: &Config, verbosity: Verbosity) -> String {
    let level = match verbosity {
        Verbosity::Quiet => "error",
        Verbosity::Normal => match &config.log.filter {
            Some(filter) => filter.as_str(),
            None if matches!(command, Command::Serve(_)) => DEFAULT_FILTER,
            None => "warn",
        },
        Verbosity::Verbose if matches!(command, Command::Serve(_)) => "debug",
        Verbosity::Verbose => "info",
        Verbosity::All => "debug",
    };
    level.to_owned()
}

/// Resolves when standard input is closed.
fn end_of_stdin() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    // A thread of its own: a blocked read would delay the end of the runtime.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()); // an error ends it as well
        drop(sender);
    });
    receiver
}

/// Whole milliseconds.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The sum of numbers from a service. It saturates, as the numbers are not trusted.
fn total_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}
