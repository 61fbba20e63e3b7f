//! `moored doctor`: checks of this machine, the configuration and the models.

use api::v1;
use config::{ClientSettings, Config};
use serde_json::json;

use crate::Program;
use crate::connection::Connection;
use crate::{CliError, available, screen};

/// The result of one check.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Whether all is well.
    pub well: bool,
    /// The checked thing, in a word: `card`, `state`, `model`.
    pub what: &'static str,
    /// The finding, in words.
    pub found: String,
    /// What was tried to find it, in words, each with its outcome. `--json` shows it.
    pub tried: Vec<(String, String)>,
}

impl Finding {
    /// All is well.
    pub fn good(what: &'static str, found: impl Into<String>) -> Finding {
        Finding {
            well: true,
            what,
            found: found.into(),
            tried: Vec::new(),
        }
    }

    /// Something is wrong.
    pub fn bad(what: &'static str, found: impl ToString) -> Finding {
        Finding {
            well: false,
            what,
            found: found.to_string(),
            tried: Vec::new(),
        }
    }

    /// What was found, where a check may fail.
    pub fn of(what: &'static str, found: Result<String, String>) -> Finding {
        match found {
            Ok(found) => Finding::good(what, found),
            Err(problem) => Finding::bad(what, problem),
        }
    }
}

/// Checks the cards, the state folder, the folder of downloads, the models and the service. Fails when a check does.
pub(super) async fn run(program: &dyn Program, config: Config, as_json: bool) -> Result<(), CliError> {
    let mut findings = program.examine(config.clone()).await;
    findings.extend(available::finding(program, &config));
    findings.push(service(&config).await);
    for finding in &findings {
        if as_json {
            let mut shown = json!({"check": finding.what, "well": finding.well, "found": finding.found});
            if !finding.tried.is_empty() {
                let tried = finding.tried.iter();
                shown["tried"] = tried
                    .map(|(what, outcome)| json!({"what": what, "outcome": outcome}))
                    .collect();
            }
            screen::json(&shown)?;
        } else {
            let mark = if finding.well { "ok " } else { "BAD" };
            screen::text(&format!("{mark}  {:<9} {}", finding.what, finding.found))?;
        }
    }
    match findings.iter().filter(|finding| !finding.well).count() {
        0 => Ok(()),
        1 => Err(CliError::Failed("1 problem found".to_owned())),
        wrong => Err(CliError::Failed(format!("{wrong} problems found"))),
    }
}

async fn service(config: &Config) -> Finding {
    let found = version_of_service(&config.client).await;
    Finding::of("service", found)
}

/// The version of the service at the configured address, where it is of this version.
async fn version_of_service(client: &ClientSettings) -> Result<String, String> {
    let endpoint = &client.endpoint;
    let connection = match Connection::open(client).await {
        Ok(connection) => connection,
        Err(CliError::Unreachable { .. }) => {
            return Ok(format!("none runs at {endpoint} (not needed for this check)"));
        }
        Err(problem) => return Err(problem.to_string()),
    };
    let mut server = connection.server();
    let asked = server.get_server_info(v1::GetServerInfoRequest {}).await;
    let info = asked.map_err(|status| match status.code() {
        tonic::Code::Unauthenticated => {
            format!("{endpoint} asks for a token: name its file with --token-file or MOORED_TOKEN_FILE")
        }
        _ => status.message().to_owned(),
    })?;
    let (of_service, own) = (info.into_inner().version, env!("CARGO_PKG_VERSION"));
    let found = format!("version {of_service} at {endpoint}");
    match of_service == own {
        true => Ok(found),
        false => Err(format!(
            "{found}, and this program has {own}: start the service again with the newer program, or call it with its own"
        )),
    }
}
