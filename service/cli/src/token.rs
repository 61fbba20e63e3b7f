//! `moored token`: the tokens of the service of this machine, and those that this user keeps of other services.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use access::{Allowance, Credential, Credentials, Role, TokenError, TokenRecord, TokenStore};
use clap::{Args, Subcommand};
use config::{Address, ClientSettings, Config, bounded};
use serde_json::{Value, json};

use crate::arguments::time;
use crate::{CliError, connection, screen};

#[derive(Debug, Args)]
pub(super) struct Token {
    #[command(subcommand)]
    pub(super) action: Action,
}

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// Make a token for the service of this machine, and print it once
    Make(Make),
    /// List the tokens of the service of this machine
    List(OfState),
    /// Withdraw a token: calls with it are refused from now on
    Withdraw {
        /// Its name
        name: String,
        #[command(flatten)]
        of: OfState,
    },
    /// Keep a token for the service at --endpoint: it is sent there and nowhere else
    Use(Use),
    /// Forget the token that is kept for the service at --endpoint
    Forget,
}

/// The service of this machine.
#[derive(Debug, Args)]
pub(super) struct OfState {
    /// The service's state folder [default: service.state]
    #[arg(long, value_name = "FOLDER")]
    pub(super) state: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Make {
    /// Whose token it is: a person or a program
    name: String,
    /// What it may do: observe (look), generate (and load models for it), administer (everything)
    #[arg(long, default_value = "generate")]
    role: Role,
    /// After which time it expires, such as 30d [default: never]
    #[arg(long, value_name = "TIME", value_parser = time)]
    expires: Option<humantime::Duration>,
    /// Most jobs that wait or run at a time
    #[arg(long, value_name = "NUMBER")]
    jobs: Option<u64>,
    /// Most pixels a minute, of pictures and of the frames of films
    #[arg(long, value_name = "NUMBER")]
    pixels: Option<u64>,
    /// Most seconds of films and tracks a minute
    #[arg(long, value_name = "NUMBER")]
    seconds: Option<u64>,
    /// Most bytes a minute that it sends as pictures, films, tracks and latents, such as 512MiB
    #[arg(long, value_name = "SIZE")]
    bytes: Option<String>,
    /// A model that it may use; may be repeated [default: all]
    #[arg(long = "model", value_name = "ID")]
    models: Vec<String>,
    #[command(flatten)]
    pub(super) of: OfState,
}

#[derive(Debug, Args)]
pub(super) struct Use {
    /// The file with the token; "-" reads standard input
    file: PathBuf,
}

impl From<TokenError> for CliError {
    fn from(error: TokenError) -> CliError {
        match error {
            TokenError::File { .. } => CliError::Failed(error.to_string()),
            TokenError::Exists(_) | TokenError::NotFound(_) | TokenError::Name { .. } => {
                CliError::Usage(error.to_string())
            }
            TokenError::NotRandom | TokenError::OfFile(_) | TokenError::Watch(_) => {
                CliError::Failed(error.to_string())
            }
        }
    }
}

/// Runs one of its commands.
pub(super) fn run(config: &Config, token: Token, as_json: bool) -> Result<(), CliError> {
    let store = || TokenStore::of(&config.service.state);
    match token.action {
        Action::Make(options) => make(&store(), options, as_json),
        Action::List(_) => list(&store(), as_json),
        Action::Withdraw { name, .. } => {
            store().withdraw(&name)?;
            match as_json {
                true => screen::json(&json!({"withdrawn": name})),
                false => screen::text(&format!(
                    "withdrawn {name}; a running service refuses it within a second or two"
                )),
            }
        }
        Action::Use(options) => keep(&config.client, Some(&options.file), as_json),
        Action::Forget => keep(&config.client, None, as_json),
    }
}

impl Make {
    fn allowance(&self) -> Result<Allowance, CliError> {
        let bytes = self.bytes.as_deref().map(gpu::parse_bytes).transpose();
        let bytes = bytes.map_err(|problem| CliError::Usage(format!("--bytes: {problem}")))?;
        Ok(Allowance {
            jobs: self.jobs,
            pixels_per_minute: self.pixels,
            seconds_per_minute: self.seconds,
            bytes_per_minute: bytes.map(|bytes| bytes.0),
            models: self.models.iter().cloned().collect::<BTreeSet<_>>(),
        })
    }
}

fn make(store: &TokenStore, options: Make, as_json: bool) -> Result<(), CliError> {
    let allowance = options.allowance()?;
    let was_asked_for = store.is_there()?;
    let (secret, record) = store.make(
        &options.name,
        options.role,
        allowance,
        options.expires.map(Duration::from),
        SystemTime::now(),
    )?;
    if as_json {
        let mut value = shown(&record);
        value["token"] = secret.reveal().into();
        return screen::json(&value);
    }
    screen::text(secret.reveal())?;
    screen::note(&format!(
        "{}; it is not shown again. A service that runs knows it within a second or two",
        sentence(&record)
    ));
    if !was_asked_for {
        screen::note("it is the first: from now on every client of this service needs a token");
    }
    Ok(())
}

fn list(store: &TokenStore, as_json: bool) -> Result<(), CliError> {
    let tokens = store.read()?.unwrap_or_default();
    if as_json {
        return tokens.iter().try_for_each(|record| screen::json(&shown(record)));
    }
    if tokens.is_empty() {
        return screen::text("no tokens");
    }
    tokens
        .iter()
        .try_for_each(|record| screen::text(&sentence(record)))
}

/// A token in words: name, role, limits, expiry.
fn sentence(record: &TokenRecord) -> String {
    let Allowance {
        jobs,
        pixels_per_minute,
        seconds_per_minute,
        bytes_per_minute,
        models,
    } = &record.allowance;
    let limits = [
        jobs.map(|jobs| format!("{jobs} jobs")),
        pixels_per_minute.map(|pixels| format!("{pixels} pixels a minute")),
        seconds_per_minute.map(|seconds| format!("{seconds} seconds a minute")),
        bytes_per_minute.map(|bytes| format!("{} a minute", residency::Bytes(bytes))),
        (!models.is_empty()).then(|| models.iter().cloned().collect::<Vec<_>>().join(", ")),
        record.expires.map(|expires| match expires <= seconds_now() {
            true => format!("expired {}", date(expires)),
            false => format!("until {}", date(expires)),
        }),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    match limits.is_empty() {
        true => format!("{}: {}", record.name, record.role),
        false => format!("{}: {}, {}", record.name, record.role, limits.join(", ")),
    }
}

/// A token without its hash.
fn shown(record: &TokenRecord) -> Value {
    json!({
        "name": record.name,
        "role": record.role,
        "made": date(record.made),
        "expires": record.expires.map(date),
        "limits": record.allowance,
    })
}

fn date(seconds: u64) -> String {
    let time = UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds))
        .unwrap_or(UNIX_EPOCH);
    humantime::format_rfc3339_seconds(time).to_string()
}

fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Keeps the token in a file for the endpoint, or forgets the one that is kept.
fn keep(client: &ClientSettings, from: Option<&Path>, as_json: bool) -> Result<(), CliError> {
    let address = Address::of(&client.endpoint).map_err(CliError::Usage)?;
    connection::check_fingerprint(&address, client.fingerprint)?;
    let endpoint = address.url;
    let Some(file) = &client.credentials else {
        let problem = "there is no home folder for tokens: set client.credentials to a file".to_owned();
        return Err(CliError::Usage(problem));
    };
    let credential = from.map(token_in).transpose()?.map(|token| Credential {
        token,
        fingerprint: client
            .fingerprint
            .map(|fingerprint| fingerprint.to_string())
            .unwrap_or_default(),
    });
    let is_kept = credential.is_some();
    let was_there =
        Credentials::keep(file, &endpoint, credential).map_err(|problem| CliError::file(file, problem))?;
    match (as_json, is_kept, was_there) {
        (true, ..) => screen::json(&json!({"endpoint": endpoint, "kept": is_kept})),
        (false, true, _) => screen::text(&format!("kept for {endpoint}, in {}", file.display())),
        (false, false, true) => screen::text(&format!("forgotten: the token of {endpoint}")),
        (false, false, false) => Err(CliError::Usage(format!("no token is kept for {endpoint}"))),
    }
}

fn token_in(file: &Path) -> Result<String, CliError> {
    if file != Path::new("-") {
        return bounded::token(file).map_err(|problem| CliError::file(file, problem));
    }
    let mut text = String::new();
    std::io::stdin()
        .take(bounded::SETTING_BYTES)
        .read_to_string(&mut text)?;
    match text.trim() {
        "" => Err(CliError::Usage("standard input has no token".to_owned())),
        token => Ok(token.to_owned()),
    }
}
