//! The command line: commands and options.

mod formats;
mod generation;
mod hints;
mod play;

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

pub(super) use formats::Formats;
pub(super) use generation::{
    FetchOutput, JobSettings, MediumChoice, OutputArguments, PriorityChoice, Prompts, SamplingArguments,
    Settings, time,
};
pub(super) use play::{Play, TaskChoice};

use crate::{cards, token};
use config::{Flags, name_and_value};

/// Generate pictures, films and music on your GPU, shared by ComfyUI, Griptape Nodes, scripts and this command.
#[derive(Debug, Parser)]
#[command(name = "moored", version, propagate_version = true)]
#[command(
    after_help = "Start here: `moored demo`, then `moored models --available`, which shows what fits your card."
)]
pub(super) struct Arguments {
    #[command(flatten)]
    common: GlobalOptions,
    #[command(subcommand)]
    pub(super) command: Command,
}

// Options that may stand before a command and after it.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Global options")]
struct GlobalOptions {
    /// The service to talk to [env: MOORED_ENDPOINT]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// File with the token that the service asks for [env: MOORED_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<String>,
    /// SHA-256 fingerprint of the service's certificate, by which alone https:// is trusted [env: MOORED_FINGERPRINT]
    #[arg(long, value_name = "SHA256")]
    fingerprint: Option<String>,
    /// Send the token even over an unencrypted connection to another machine [env: MOORED_INSECURE_TOKEN=1]
    #[arg(long)]
    insecure_token: bool,
    /// Configuration file [env: MOORED_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set one setting, as `moored config` lists them, e.g. --set queue.max_jobs=64
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Print one JSON object per line, for scripts
    #[arg(long)]
    json: bool,
    /// Print results and errors only
    #[arg(short, long)]
    quiet: bool,
    /// Print more; -vv: everything
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
}

/// Options of [`GlobalOptions`] that concern the connection to a service.
const OF_CONNECTIONS: [&str; 4] = ["endpoint", "token_file", "fingerprint", "insecure_token"];

impl GlobalOptions {
    /// Both, in their order; the error is the name of an option that stands in both and may be used only once.
    fn and(self, after: GlobalOptions) -> Result<GlobalOptions, &'static str> {
        fn one<T>(
            name: &'static str,
            before: Option<T>,
            after: Option<T>,
        ) -> Result<Option<T>, &'static str> {
            match (before, after) {
                (Some(_), Some(_)) => Err(name),
                (before, after) => Ok(before.or(after)),
            }
        }
        Ok(GlobalOptions {
            config: one("--config", self.config, after.config)?,
            set: [self.set, after.set].concat(),
            endpoint: one("--endpoint", self.endpoint, after.endpoint)?,
            token_file: one("--token-file", self.token_file, after.token_file)?,
            fingerprint: one("--fingerprint", self.fingerprint, after.fingerprint)?,
            insecure_token: self.insecure_token || after.insecure_token,
            json: self.json || after.json,
            quiet: self.quiet || after.quiet,
            verbose: self.verbose.saturating_add(after.verbose),
        })
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Generate with a model by name: downloads it if it is missing, starts a service if none runs
    Run(Run),
    /// Generate a picture, film or track with a running service
    Generate(Generate),
    /// Generate a film with a running service: from text, or from a picture with --init
    Film(Generate),
    /// Generate music with a running service: from text and lyrics, or from a track with --task and --source
    Play(Play),
    /// Try it out: generate twelve small pictures, a film and a sound with the models that are included
    Demo(Demo),
    /// Start the service
    Serve(Serve),
    /// List the models that are here; with --available those that can be downloaded by a short name
    #[command(visible_alias = "list")]
    Models {
        /// List the models that can be downloaded by a short name, and which of them fit this card
        #[arg(long)]
        available: bool,
        /// List the adapters: LoRA (--lora) and ControlNets (--control)
        #[arg(long, conflicts_with = "available")]
        adapters: bool,
    },
    /// Show a model: sizes, formats, defaults, licence
    Info {
        /// A model of the service, a short name (`moored models --available`), or OWNER/NAME
        model: String,
    },
    /// Download a model from the hub
    Pull {
        /// A short name, OWNER/NAME, OWNER/NAME@REVISION, or OWNER/NAME:FILE for one file: a transformer or a LoRA
        model: String,
        /// Show what would be downloaded, and how much, without downloading it
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove a downloaded model from this machine's hub cache
    Rm {
        /// A short name, OWNER/NAME, or OWNER/NAME:FILE for one file
        model: String,
        /// Do not ask for confirmation
        #[arg(short, long)]
        yes: bool,
    },
    /// Show the cards: components in memory, free memory, and the running job
    #[command(visible_alias = "ps")]
    Status(Status),
    /// Load a model into memory
    Load(Load),
    /// Unload a model
    Unload(Unload),
    /// Keep a model in memory
    Pin(Pin),
    /// Show what a request would need and do, without running it
    Plan(Plan),
    /// Free the memory that an idle card keeps for its next stage
    Trim(cards::Trim),
    /// Keep memory of a card free for another program
    Reserve(cards::Reserve),
    /// End a reservation
    Release(cards::Release),
    /// Restart a card's worker process, which frees all of its memory
    Recycle(cards::Recycle),
    /// List the jobs of all clients
    Jobs {
        /// Include jobs that have ended
        #[arg(long)]
        all: bool,
    },
    /// Get what a detached job has made, once it has ended
    Fetch {
        /// Its id, as `moored generate --detach` prints it and `moored jobs --all` lists it
        job: String,
        #[command(flatten)]
        output: FetchOutput,
    },
    /// Cancel a job
    Cancel {
        /// Its id, as `moored jobs` lists it
        job: String,
    },
    /// Give an agent the tools of the service: the Model Context Protocol over standard input and output
    Mcp,
    /// Make, list and withdraw tokens of the service of this machine, and keep tokens of other services
    Token(token::Token),
    /// Show the configuration in force, and where each value comes from
    Config {
        /// Print the commented defaults instead: a file to start from
        #[arg(long)]
        defaults: bool,
        /// Print the path of the configuration file, even if there is none yet
        #[arg(long, conflicts_with = "defaults")]
        path: bool,
    },
    /// Check this machine, the configuration and the models
    Doctor,
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    Man {
        /// Folder for them; without one, the page of `moored` goes to standard output
        folder: Option<PathBuf>,
    },
    /// One card's process, started by the service
    #[command(hide = true)]
    Worker,
}

impl Command {
    /// Tables of the settings that the command reads besides `[log]`; `None`: all.
    fn tables(&self) -> Option<&'static [&'static str]> {
        match self {
            Command::Generate(_)
            | Command::Film(_)
            | Command::Play(_)
            | Command::Plan(_)
            | Command::Status(_)
            | Command::Load(_)
            | Command::Unload(_)
            | Command::Pin(_)
            | Command::Trim(_)
            | Command::Reserve(_)
            | Command::Release(_)
            | Command::Recycle(_)
            | Command::Jobs { .. }
            | Command::Mcp
            | Command::Fetch { .. }
            | Command::Cancel { .. } => Some(&["client"]),
            Command::Models { .. } => Some(&["client", "hub", "models", "cards"]),
            Command::Info { .. } => Some(&["client", "hub"]),
            Command::Pull { .. } | Command::Rm { .. } => Some(&["hub"]),
            Command::Token(token::Token { action }) => match action {
                token::Action::Make(_) | token::Action::List(_) | token::Action::Withdraw { .. } => {
                    Some(&["service"])
                }
                token::Action::Use(_) | token::Action::Forget => Some(&["client"]),
            },
            Command::Completions { .. } | Command::Man { .. } => Some(&[]),
            Command::Run(_)
            | Command::Demo(_)
            | Command::Serve(_)
            | Command::Config { .. }
            | Command::Doctor
            | Command::Worker => None,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct Serve {
    /// Address to listen on, or a port of this machine alone
    #[arg(long, visible_alias = "port", value_name = "ADDRESS")]
    listen: Option<String>,
    /// A card: auto, cpu, cpu:16GiB, cuda:0, sim:24GiB; may be repeated
    #[arg(long = "device", value_name = "DEVICE")]
    devices: Vec<String>,
    /// A folder to look for models in; may be repeated
    #[arg(long = "models", value_name = "FOLDER")]
    models: Vec<String>,
    /// ComfyUI's folder, whose models and adapters are to be found too; may be repeated
    #[arg(long = "comfyui", value_name = "FOLDER")]
    comfyui: Vec<String>,
    /// How memory is freed: shared (evict only as much as the next stage needs) or exclusive (keep one large component at a time)
    #[arg(long)]
    policy: Option<String>,
    /// Folder for the service's own files: locks, hashes, compiled plans
    #[arg(long, value_name = "FOLDER")]
    state: Option<String>,
    /// Make a certificate and a first token for other machines, print them, and end
    #[arg(long)]
    pub(super) init: bool,
    /// Stop when standard input is closed, that is, when the program that started this one has ended
    #[arg(long)]
    pub(super) end_with_stdin: bool,
}

#[derive(Debug, Args)]
pub(super) struct Generate {
    /// The prompt; read from standard input when it is left out or "-"
    pub(super) prompt: Option<String>,
    /// A model of the service, a short name, or OWNER/NAME [default: the service's for pictures, films or music]
    #[arg(short, long, value_name = "ID")]
    pub(super) model: Option<String>,
    /// Download the model if it is missing, without asking
    #[arg(long)]
    pub(super) pull: bool,
    #[command(flatten)]
    pub(super) prompts: Prompts,
    #[command(flatten)]
    pub(super) settings: Settings,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

#[derive(Debug, Args)]
pub(super) struct Run {
    /// A short name (`moored models --available`), OWNER/NAME, OWNER/NAME:FILE, or a model of the service
    pub(super) model: String,
    /// The prompt; read from standard input when it is left out or "-"
    pub(super) prompt: Option<String>,
    /// Download the model without asking, also if it will not fit this card
    #[arg(long, visible_alias = "yes")]
    pub(super) pull: bool,
    /// Card for the service, if one is started: auto, cpu, cuda:0
    #[arg(long, default_value = "auto")]
    pub(super) device: String,
    #[command(flatten)]
    pub(super) prompts: Prompts,
    #[command(flatten)]
    pub(super) settings: Settings,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

#[derive(Debug, Args)]
pub(super) struct Plan {
    /// The prompt; read from standard input when it is left out or "-"
    pub(super) prompt: Option<String>,
    /// A model of the service, a short name, or OWNER/NAME [default: the service's for pictures, films or music]
    #[arg(short, long, value_name = "ID")]
    pub(super) model: Option<String>,
    #[command(flatten)]
    pub(super) settings: Settings,
}

#[derive(Debug, Args)]
pub(super) struct Demo {
    /// Folder for the pictures, the film and the sound
    #[arg(long, value_name = "DIR", default_value = "moored-demo")]
    pub(super) out: PathBuf,
    /// Seed of the first picture
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// The card to use: auto (an NVIDIA card if there is one that this build can drive), cpu, cuda:0
    #[arg(long, default_value = "auto")]
    pub(super) device: String,
    /// Overwrite the pictures of an earlier run
    #[arg(short, long)]
    pub(super) force: bool,
}

#[derive(Debug, Args)]
pub(super) struct Status {
    /// Keep running, and redraw at each change
    #[arg(short, long)]
    pub(super) watch: bool,
}

#[derive(Debug, Args)]
pub(super) struct Load {
    /// The model
    pub(super) model: String,
    /// Only these components
    #[arg(long = "component", value_name = "NAME", conflicts_with_all = ["replace", "prove"])]
    pub(super) components: Vec<String>,
    /// The model that it replaces: that one is unloaded once the new one has generated a tiny test image, and kept if that
    /// fails. Name its precision too: MODEL+4-bit, or as `moored status` prints it
    #[arg(long, value_name = "MODEL")]
    pub(super) replace: Option<String>,
    /// Test the model by generating one tiny picture (always done with --replace)
    #[arg(long)]
    pub(super) prove: bool,
    /// Download the model if it is missing, without asking
    #[arg(long)]
    pub(super) pull: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
}

#[derive(Debug, Args)]
pub(super) struct Unload {
    /// The model; --all for every model
    pub(super) model: Option<String>,
    /// Every model
    #[arg(long, conflicts_with = "model")]
    pub(super) all: bool,
    /// Cancel the jobs that use it instead of waiting for them
    #[arg(long)]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
}

#[derive(Debug, Args)]
pub(super) struct Pin {
    /// The model
    pub(super) model: String,
    /// Unpin it: it may be unloaded again
    #[arg(long)]
    pub(super) off: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
}

impl Arguments {
    /// Parses the command line of this process; `long_version` is the text of `--version`. clap's global options would drop those
    /// before a command where there are some after it, so each command has them once more.
    pub(super) fn read(long_version: &'static str) -> Arguments {
        let matches = whole_command()
            .long_version(long_version)
            .try_get_matches()
            .unwrap_or_else(|mistake| hints::with_hint(mistake).exit());
        Arguments::of(&matches).unwrap_or_else(|mistake| mistake.exit())
    }

    fn of(matches: &ArgMatches) -> Result<Arguments, clap::Error> {
        let mut arguments = Arguments::from_arg_matches(matches)?;
        let mut before = matches;
        while let Some((_, after)) = before.subcommand() {
            let common = GlobalOptions::from_arg_matches(after)?;
            let both = std::mem::take(&mut arguments.common).and(common);
            arguments.common = both.map_err(|name| {
                let problem =
                    format!("{name} is given twice, before the command and after it: leave one out");
                whole_command().error(ErrorKind::ArgumentConflict, problem)
            })?;
            before = after;
        }
        arguments
            .check()
            .map_err(|problem| whole_command().error(ErrorKind::ArgumentConflict, problem))?;
        Ok(arguments)
    }

    /// Refuses options that the command ignores.
    fn check(&self) -> Result<(), String> {
        let common = &self.common;
        let talks = self
            .command
            .tables()
            .is_none_or(|tables| tables.contains(&"client"));
        let is_own = matches!(self.command, Command::Demo(_) | Command::Serve(_));
        for (option, given, own) in [
            ("--endpoint", common.endpoint.is_some(), is_own),
            ("--insecure-token", common.insecure_token, is_own),
            ("--fingerprint", common.fingerprint.is_some(), is_own),
            (
                "--token-file",
                common.token_file.is_some(),
                matches!(self.command, Command::Demo(_)),
            ),
        ] {
            if given && (own || !talks) {
                return Err(format!("{option} has no effect on this command: leave it out"));
            }
        }
        let Some(tables) = self.command.tables() else {
            return Ok(());
        };
        for set in &common.set {
            let (name, _) = name_and_value(set);
            let table = name.split('.').next().unwrap_or_default();
            let table = table.trim_matches(['"', '\'']);
            if TABLES.contains(&table) && table != "log" && !tables.contains(&table) {
                return Err(format!(
                    "{name} is a setting of the service and has no effect on this command: give it to `moored serve`"
                ));
            }
        }
        Ok(())
    }

    /// How much is printed.
    pub(super) fn verbosity(&self) -> Verbosity {
        match (self.common.quiet, self.common.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, 1) => Verbosity::Verbose,
            (false, _) => Verbosity::All,
        }
    }

    /// Whether output is JSON.
    pub(super) fn json(&self) -> bool {
        self.common.json
    }

    /// The configuration file and the settings that flags set.
    pub(super) fn layers(&self) -> (Option<PathBuf>, Flags) {
        let mut flags = Flags::new();
        if self.common.insecure_token {
            flags.push(("client.insecure_token".to_owned(), Some(true.into())));
        }
        let mut text = |name: &str, value: &Option<String>| {
            if let Some(value) = value {
                flags.push((name.to_owned(), Some(value.clone().into())));
            }
        };
        text("client.endpoint", &self.common.endpoint);
        text("client.fingerprint", &self.common.fingerprint);
        match &self.command {
            Command::Serve(serve) => {
                text("service.token_file", &self.common.token_file);
                text("service.listen", &serve.listen.as_deref().map(address_of));
                text("service.state", &serve.state);
                text("cards.policy", &serve.policy);
                if !serve.devices.is_empty() {
                    flags.push(("cards.devices".to_owned(), Some(serve.devices.clone().into())));
                }
                if !serve.models.is_empty() {
                    flags.push(("models.folders".to_owned(), Some(serve.models.clone().into())));
                }
                if !serve.comfyui.is_empty() {
                    flags.push(("models.comfyui".to_owned(), Some(serve.comfyui.clone().into())));
                }
            }
            Command::Demo(Demo { device, .. }) => {
                flags.push(("cards.devices".to_owned(), Some(vec![device.clone()].into())))
            }
            Command::Token(token::Token { action }) => {
                if let token::Action::Make(token::Make { of, .. })
                | token::Action::List(of)
                | token::Action::Withdraw { of, .. } = action
                {
                    text("service.state", &of.state);
                }
            }
            Command::Run(Run { device, .. }) => {
                text("client.token_file", &self.common.token_file);
                if device != "auto" {
                    flags.push(("cards.devices".to_owned(), Some(vec![device.clone()].into())));
                }
            }
            _ => text("client.token_file", &self.common.token_file),
        }
        for setting in &self.common.set {
            // A setting without a value is reported with all other mistakes.
            let (name, value) = name_and_value(setting);
            // Parsed like an environment variable: a number, a list or a table where it looks like one, else text.
            let value = value.map(|value| value.parse().unwrap_or_else(|never| match never {}));
            flags.push((name.to_owned(), value));
        }
        (self.common.config.clone(), flags)
    }
}

/// An address to listen on; a port alone is one of loopback.
fn address_of(listen: &str) -> String {
    match listen.parse::<u16>() {
        Ok(port) => format!("127.0.0.1:{port}"),
        Err(_) => listen.to_owned(),
    }
}

/// Tables of the configuration.
const TABLES: [&str; 9] = [
    "service",
    "models",
    "hub",
    "cards",
    "queue",
    "limits",
    "quantization",
    "client",
    "log",
];

/// How much a command prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verbosity {
    /// Results and errors.
    Quiet,
    /// Progress and a summary too.
    Normal,
    /// What the program does.
    Verbose,
    /// Everything.
    All,
}

/// The command line with the common options after each command too; those that a command ignores are not in its help.
pub(super) fn whole_command() -> clap::Command {
    Arguments::command().mut_subcommands(|command| {
        let name = command.get_name().to_owned();
        let mut hidden: Vec<&str> = Vec::new();
        if ["serve", "demo", "pull", "rm", "completions", "man"].contains(&name.as_str()) {
            hidden.extend(
                OF_CONNECTIONS
                    .iter()
                    .filter(|option| name != "serve" || **option != "token_file"),
            );
        }
        if !["serve", "demo", "run", "config", "doctor", "worker"].contains(&name.as_str()) {
            hidden.push("set");
        }
        // A number below 0 is a value, which its option refuses, and no option.
        with_common(command.allow_negative_numbers(true), &hidden)
    })
}

/// A command with the common options, and its own commands with them.
fn with_common(command: clap::Command, hidden: &[&str]) -> clap::Command {
    let command = command.mut_subcommands(|command| with_common(command, hidden));
    let command = GlobalOptions::augment_args(command);
    hidden.iter().fold(command, |command, option| {
        command.mut_arg(option, |option| option.hide(true))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::of(&whole_command().try_get_matches_from(line.split(' '))?)
    }

    #[test]
    fn the_command_line_is_consistent() {
        whole_command().debug_assert();
    }

    #[test]
    fn numbers_and_times_that_no_request_takes_are_refused_by_their_option() {
        for (arguments, words) in [
            ("generate x --steps -3", "'-3' for '--steps"),
            ("generate x -n 0", "'0' for '--count"),
            ("film x --frames 0", "'0' for '--frames"),
            ("film x --fps 0", "--fps <FPS>': a number above 0"),
            ("film x --frames-at-a-time 0", "'0' for '--frames-at-a-time"),
            ("play x --seconds -1", "--seconds <SECONDS>': a number above 0"),
            ("generate x --patience soon", "such as 30s, 5m, 2h"),
            ("reserve 1GiB --for soon", "such as 30s, 5m, 2h"),
        ] {
            let refused = read(&format!("moored {arguments}")).unwrap_err().to_string();
            assert!(refused.contains(words), "{arguments}: {refused}");
        }
        read("moored generate x --guidance -1 --seed -1").unwrap_err();
        read("moored generate x --guidance -1").unwrap();
    }

    #[test]
    fn options_before_and_after_a_command_count_in_their_order() {
        let line = "moored --set a=1 --json --endpoint x --set b=2 config --set a=3 --config file";
        let (file, flags) = read(line).unwrap().layers();
        let flags: Vec<String> = flags
            .iter()
            .map(|(name, value)| format!("{name}={:?}", value.as_ref().and_then(|value| value.to_u128())))
            .collect();
        assert_eq!(flags[1..], ["a=Some(1)", "b=Some(2)", "a=Some(3)"]);
        assert_eq!(file, Some(PathBuf::from("file")));
        assert!(read(line).unwrap().json());
    }

    #[test]
    fn an_option_both_before_and_after_a_command_is_refused() {
        for option in ["--endpoint", "--config", "--token-file"] {
            let told = read(&format!("moored {option} a status {option} b"))
                .unwrap_err()
                .to_string();
            assert!(told.contains(option) && told.contains("twice"), "{told}");
        }
        let told = read("moored --token-file a demo").unwrap_err().to_string();
        assert!(told.contains("--token-file"), "{told}");
    }

    #[test]
    fn options_that_a_command_ignores_are_refused() {
        for line in [
            "moored serve --endpoint x",
            "moored pull me/mine --endpoint x",
            "moored status --set queue.max_jobs=1",
            "moored generate --set cards.policy=shared a",
            "moored plan a -o b",
            "moored token make alice --endpoint x",
            "moored generate a --steps 0",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
        for line in [
            "moored status --set client.endpoint=x",
            "moored pull me/mine --set hub.cache=x",
            "moored serve --token-file x --set queue.max_jobs=1",
            "moored -v generate -v a",
            "moored token make alice --json",
            "moored token use file --endpoint https://box",
        ] {
            assert!(read(line).is_ok(), "{line}");
        }
        assert_eq!(read("moored -v status -v").unwrap().verbosity(), Verbosity::All);
    }
}
