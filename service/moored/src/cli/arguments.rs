//! What can be written on the command line.

use std::collections::HashMap;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};

use super::{CliError, cards};
use crate::config::Flags;
use crate::proto::v1;

/// Diffusion models, moored in GPU memory and shared by every frontend.
#[derive(Debug, Parser)]
#[command(name = "moored", version, propagate_version = true)]
pub(super) struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// What can be said before a command and behind it.
#[derive(Debug, Default, Args)]
struct Common {
    /// Configuration file [env: MOORED_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Any setting by name, e.g. --set queue.max_jobs=64
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// The service to talk to [env: MOORED_ENDPOINT]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// File with the bearer token [env: MOORED_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<String>,
    /// One JSON object a line, for scripts
    #[arg(long)]
    json: bool,
}

impl Common {
    /// Both, in their order; the name of what was said twice and can be said once.
    fn and(self, behind: Common) -> Result<Common, &'static str> {
        fn one<T>(
            name: &'static str,
            before: Option<T>,
            behind: Option<T>,
        ) -> Result<Option<T>, &'static str> {
            match (before, behind) {
                (Some(_), Some(_)) => Err(name),
                (before, behind) => Ok(before.or(behind)),
            }
        }
        Ok(Common {
            config: one("--config", self.config, behind.config)?,
            set: [self.set, behind.set].concat(),
            endpoint: one("--endpoint", self.endpoint, behind.endpoint)?,
            token_file: one("--token-file", self.token_file, behind.token_file)?,
            json: self.json || behind.json,
        })
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run the service
    Serve(Serve),
    /// Paint a picture through a running service
    Generate(Generate),
    /// Start a service with the shipped model, paint a set of pictures, and end it
    Demo(Demo),
    /// The cards: what is resident, what is free, what runs
    Status(Status),
    /// The models that can be named
    Models,
    /// Fetch a model from the hub to this machine; what is here already is not fetched again
    Pull {
        /// OWNER/NAME, or OWNER/NAME@REVISION
        model: String,
    },
    /// Bring a model in, ahead of use
    Load(Load),
    /// Take a model out
    Unload(Unload),
    /// Keep a model in
    Pin(Pin),
    /// What a request would need and do, without doing it
    Plan(Generate),
    /// Give memory that is kept for the next stage back to the driver
    Trim(cards::Trim),
    /// Keep memory of a card free for another program
    Reserve(cards::Reserve),
    /// Give up a reservation
    Release(cards::Release),
    /// Replace a card's worker process, which gives all of its memory back
    Recycle(cards::Recycle),
    /// The jobs of all clients
    Jobs {
        /// Also those that have ended
        #[arg(long)]
        all: bool,
    },
    /// End a job
    Cancel {
        /// Its id, as `moored jobs` lists it
        job: String,
    },
    /// The configuration in force, and where each value comes from
    Config {
        /// Print the commented defaults instead: a file to start from
        #[arg(long)]
        defaults: bool,
    },
    /// Check this machine, the configuration and the models
    Doctor,
    /// One card's process, started by the service
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, Args)]
pub(super) struct Serve {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// A card: auto, cpu, cpu:16GiB, cuda:0, sim:24GiB; may be repeated
    #[arg(long = "device", value_name = "DEVICE")]
    devices: Vec<String>,
    /// A folder to look for models in; may be repeated
    #[arg(long = "models", value_name = "FOLDER")]
    models: Vec<String>,
    /// How room is made: shared or exclusive
    #[arg(long)]
    policy: Option<String>,
    /// Folder for locks and hashes
    #[arg(long, value_name = "FOLDER")]
    state: Option<String>,
    /// Drain and end when standard input is closed, i.e. when the program that started this one is gone
    #[arg(long)]
    pub(super) end_with_stdin: bool,
}

#[derive(Debug, Args)]
pub(super) struct Generate {
    /// The prompt; from standard input when it is left out or "-"
    pub(super) prompt: Option<String>,
    /// The model [default: the service's]
    #[arg(short, long, value_name = "ID")]
    pub(super) model: Option<String>,
    /// Fetch the model from the hub if the service has not got it, without asking
    #[arg(long)]
    pub(super) pull: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
    /// Where to write: a file, a folder, or - for standard output [default: moored.png, moored.apng or moored.wav]
    #[arg(short, long, value_name = "PATH")]
    pub(super) out: Option<String>,
    /// What to generate [default: what the other options are of, else a picture]
    #[arg(long, value_enum)]
    pub(super) medium: Option<MediumChoice>,
    /// Pixels across
    #[arg(short = 'W', long)]
    pub(super) width: Option<u32>,
    /// Pixels down
    #[arg(short = 'H', long)]
    pub(super) height: Option<u32>,
    /// Of a film: frames in all
    #[arg(long)]
    pub(super) frames: Option<u32>,
    /// Of a film: frames a second
    #[arg(long)]
    pub(super) fps: Option<f32>,
    /// Of a track: its length
    #[arg(long)]
    pub(super) seconds: Option<f32>,
    /// Of a track: what is sung
    #[arg(long, value_name = "TEXT")]
    pub(super) lyrics: Option<String>,
    /// Denoising steps
    #[arg(short, long)]
    pub(super) steps: Option<u32>,
    /// Guidance scale
    #[arg(short, long)]
    pub(super) guidance: Option<f32>,
    /// Seed; item i uses seed + i [default: random]
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// How many pictures, films or tracks
    #[arg(short = 'n', long, default_value_t = 1)]
    pub(super) count: u32,
    /// T5 tokens
    #[arg(long, value_name = "TOKENS")]
    pub(super) max_sequence_length: Option<u32>,
    /// Image to image: the picture to start from
    #[arg(long, value_name = "PICTURE")]
    pub(super) init: Option<PathBuf>,
    /// Image to image: how much of the schedule runs, over 0 to 1
    #[arg(long)]
    pub(super) strength: Option<f32>,
    /// Repeat a picture of ours from its metadata; other options change it
    #[arg(long, value_name = "PICTURE")]
    pub(super) from: Option<PathBuf>,
    /// Leave prompt, seed and settings out of the PNG
    #[arg(long)]
    pub(super) no_metadata: bool,
    /// Start although memory is short
    #[arg(long)]
    pub(super) allow_low_memory: bool,
    /// How long to wait for memory that others hold, e.g. 10s
    #[arg(long, value_name = "TIME")]
    pub(super) patience: Option<humantime::Duration>,
    /// Share of the card
    #[arg(long, value_enum, default_value_t = PriorityChoice::Normal)]
    pub(super) priority: PriorityChoice,
    /// Who asks, for fair shares
    #[arg(long, value_name = "NAME")]
    pub(super) client: Option<String>,
    /// Prefer this card
    #[arg(long)]
    pub(super) card: Option<String>,
}

/// What is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum MediumChoice {
    /// A picture, written as PNG
    Image,
    /// A film, written as animated PNG
    Video,
    /// A track, written as WAV
    Audio,
}

impl MediumChoice {
    /// Where it is written unless something else is said.
    pub(super) fn default_file(self) -> &'static str {
        match self {
            MediumChoice::Image => "moored.png",
            MediumChoice::Video => "moored.apng",
            MediumChoice::Audio => "moored.wav",
        }
    }
}

/// How a model's weights are held.
#[derive(Debug, Default, Args)]
pub(super) struct Formats {
    /// How weights are held: full, 8-bit or 4-bit [default: full, which is as they are stored]; MODEL+4-bit is the same
    #[arg(long, value_name = "PRESET")]
    quantization: Option<String>,
    /// How one component is held (full, int8, fp8, nf4, nf4-double), over the preset; may be repeated
    #[arg(long = "format", value_name = "COMPONENT=FORMAT", value_parser = component_and_format)]
    formats: Vec<(String, String)>,
}

fn component_and_format(text: &str) -> Result<(String, String), String> {
    let (component, format) = text
        .split_once('=')
        .filter(|(component, format)| !component.is_empty() && !format.is_empty())
        .ok_or("write a component and its format, such as transformer=nf4")?;
    Ok((component.to_owned(), format.to_owned()))
}

impl Formats {
    /// Those of an entry's key, as a picture of ours has it.
    pub(super) fn of_key(key: &str) -> Formats {
        let formats = key.rsplit_once('+').map_or("", |(_, formats)| formats);
        let named = formats.split(',').filter_map(|each| each.split_once('='));
        Formats {
            quantization: None,
            formats: named
                .map(|(component, format)| (component.to_owned(), format.to_owned()))
                .collect(),
        }
    }

    /// Whether nothing is asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.quantization.is_none() && self.formats.is_empty()
    }

    /// A model of this id, held so.
    ///
    /// # Errors
    /// When a component is named twice.
    pub(super) fn of(&self, id: &str) -> Result<v1::ModelRef, CliError> {
        let mut components = HashMap::new();
        for (component, format) in &self.formats {
            if let Some(other) = components.insert(component.clone(), format.clone()) {
                return Err(CliError::Usage(format!(
                    "--format names {component} twice, as {other} and as {format}"
                )));
            }
        }
        let quantization = v1::Quantization {
            preset: self.quantization.clone().unwrap_or_default(),
            components,
        };
        Ok(v1::ModelRef {
            id: id.to_owned(),
            quantization: (!self.is_empty()).then_some(quantization),
            ..Default::default()
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum PriorityChoice {
    Low,
    Normal,
    High,
}

#[derive(Debug, Args)]
pub(super) struct Demo {
    /// Folder for the pictures
    #[arg(long, value_name = "DIR", default_value = "moored-demo")]
    pub(super) out: PathBuf,
    /// Seed of the first picture
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// The card to paint on
    #[arg(long, default_value = "cpu")]
    pub(super) device: String,
}

#[derive(Debug, Args)]
pub(super) struct Status {
    /// Go on, redrawing at each change
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
    /// The model whose place it takes: that one leaves when the new one is proven, and comes back if that fails. One that
    /// is held in other formats is named by them too: MODEL+4-bit, or as `moored status` prints it
    #[arg(long, value_name = "MODEL")]
    pub(super) replace: Option<String>,
    /// Prove it: make the smallest picture and throw it away (--replace does so anyway)
    #[arg(long)]
    pub(super) prove: bool,
    /// Fetch the model from the hub if the service has not got it, without asking
    #[arg(long)]
    pub(super) pull: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
}

#[derive(Debug, Args)]
pub(super) struct Unload {
    /// The model; every model with --all
    #[arg(required_unless_present = "all")]
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
    /// Take the pin off
    #[arg(long)]
    pub(super) off: bool,
    #[command(flatten)]
    pub(super) formats: Formats,
}

impl Arguments {
    /// What was written on the command line. clap's own options for all commands would drop what comes before a command where there is
    /// something behind it, so each command has them once more.
    pub(super) fn read() -> Arguments {
        let matches = whole_command().get_matches();
        Arguments::of(&matches).unwrap_or_else(|mistake| mistake.exit())
    }

    fn of(matches: &ArgMatches) -> Result<Arguments, clap::Error> {
        let mut arguments = Arguments::from_arg_matches(matches)?;
        if let Some((_, behind)) = matches.subcommand() {
            let behind = Common::from_arg_matches(behind)?;
            let both = std::mem::take(&mut arguments.common).and(behind);
            arguments.common = both.map_err(|name| {
                let problem =
                    format!("{name} is there twice, before the command and behind it: leave one out");
                whole_command().error(ErrorKind::ArgumentConflict, problem)
            })?;
        }
        if let (Command::Demo(_), Some(_)) = (&arguments.command, &arguments.common.token_file) {
            let problem = "--token-file is of no use for demo, whose service is its own: leave it out";
            return Err(whole_command().error(ErrorKind::ArgumentConflict, problem));
        }
        Ok(arguments)
    }

    /// Whether scripts read what is printed.
    pub(super) fn json(&self) -> bool {
        self.common.json
    }

    /// The configuration file and the settings that flags set.
    pub(super) fn layers(&self) -> (Option<PathBuf>, Flags) {
        let mut flags = Flags::new();
        let mut text = |name: &str, value: &Option<String>| {
            if let Some(value) = value {
                flags.push((name.to_owned(), Some(value.clone().into())));
            }
        };
        text("client.endpoint", &self.common.endpoint);
        match &self.command {
            Command::Serve(serve) => {
                text("service.token_file", &self.common.token_file);
                text("service.listen", &serve.listen);
                text("service.state", &serve.state);
                text("cards.policy", &serve.policy);
                if !serve.devices.is_empty() {
                    flags.push(("cards.devices".to_owned(), Some(serve.devices.clone().into())));
                }
                if !serve.models.is_empty() {
                    flags.push(("models.folders".to_owned(), Some(serve.models.clone().into())));
                }
            }
            Command::Demo(demo) => {
                flags.push(("cards.devices".to_owned(), Some(vec![demo.device.clone()].into())))
            }
            _ => text("client.token_file", &self.common.token_file),
        }
        for setting in &self.common.set {
            // One without a value is told of with all other mistakes.
            let (name, value) = setting
                .split_once('=')
                .map_or((setting.as_str(), None), |(name, value)| {
                    // As a variable is read: a number, a list or a table where it looks like one, else text.
                    (name, Some(value.parse().unwrap_or_else(|never| match never {})))
                });
            flags.push((name.to_owned(), value));
        }
        (self.common.config.clone(), flags)
    }
}

/// The command line with the common options behind each command too.
fn whole_command() -> clap::Command {
    Arguments::command().mut_subcommands(Common::augment_args)
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
    fn what_is_said_before_a_command_and_behind_it_counts_in_its_order() {
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
    fn what_can_be_said_once_is_refused_twice_and_nothing_is_dropped() {
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
    fn formats_are_read_off_a_key() {
        let told = |key: &str| {
            Formats::of_key(key)
                .of("a")
                .unwrap()
                .quantization
                .map(|q| q.components)
        };
        let both = told("me/a+b@1+text_encoder_2=nf4,transformer=int8").unwrap();
        assert_eq!((both.len(), both["transformer"].as_str()), (2, "int8"));
        assert_eq!((told("me/a+full"), told("a")), (None, None));
    }
}
