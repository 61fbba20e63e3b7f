//! `moored doctor`: checks of this machine, the configuration and the models.

use api::v1;
use config::Config;
use serde_json::json;

use crate::Program;
use crate::connection::Connection;
use crate::{CliError, screen};

/// The result of one check.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Whether all is well.
    pub well: bool,
    /// The checked thing, in a word: `card`, `state`, `model`.
    pub what: &'static str,
    /// The finding, in words.
    pub found: String,
}

/// Checks the cards, the state folder, the folder of downloads, the models and the service. Fails when a check does.
pub(super) async fn run(program: &dyn Program, config: Config, as_json: bool) -> Result<(), CliError> {
    let mut findings = program.examine(config.clone()).await;
    findings.push(service(&config).await);
    for finding in &findings {
        if as_json {
            screen::json(&json!({"check": finding.what, "well": finding.well, "found": finding.found}))?;
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
    let connection = match Connection::open(&config.client).await {
        Ok(connection) => connection,
        Err(CliError::Unreachable { .. }) => {
            let found = format!(
                "none runs at {} (not needed for this check)",
                config.client.endpoint
            );
            return Finding {
                well: true,
                what: "service",
                found,
            };
        }
        Err(problem) => {
            return Finding {
                well: false,
                what: "service",
                found: problem.to_string(),
            };
        }
    };
    match connection
        .server()
        .get_server_info(v1::GetServerInfoRequest {})
        .await
    {
        Ok(info) => {
            let info = info.into_inner();
            let own = env!("CARGO_PKG_VERSION");
            let found = format!("version {} at {}", info.version, config.client.endpoint);
            Finding {
                well: info.version == own,
                what: "service",
                found,
            }
        }
        Err(status) if status.code() == tonic::Code::Unauthenticated => Finding {
            well: false,
            what: "service",
            found: format!(
                "{} asks for a token: name its file with --token-file or MOORED_TOKEN_FILE",
                config.client.endpoint
            ),
        },
        Err(status) => Finding {
            well: false,
            what: "service",
            found: status.message().to_owned(),
        },
    }
}
