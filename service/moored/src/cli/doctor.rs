//! `moored doctor`: what could go wrong, found before it does.

use std::sync::Arc;

use engine::library::Library;
use residency::Bytes;
use serde_json::json;

use super::connection::Connection;
use super::{CliError, screen};
use crate::config::Config;
use crate::models::Models;
use crate::proto::v1;

/// One thing that was looked at.
struct Finding {
    well: bool,
    what: &'static str,
    found: String,
}

/// Looks at the cards, the state folder, the models and the service. Fails when something is wrong.
pub(super) async fn run(config: Config, as_json: bool) -> Result<(), CliError> {
    let mut findings = Vec::new();
    for device in &config.cards.devices {
        findings.push(match device.describe() {
            Ok(card) => Finding {
                well: true,
                what: "card",
                found: format!("{} ({}), {}", card.id, card.name, card.total),
            },
            Err(error) => Finding {
                well: false,
                what: "card",
                found: format!("{device}: {error}"),
            },
        });
    }
    findings.push(state_folder(&config));
    findings.extend(models(&config).await);
    findings.push(service(&config).await);
    for finding in &findings {
        if as_json {
            screen::json(&json!({"check": finding.what, "well": finding.well, "found": finding.found}))?;
        } else {
            let mark = if finding.well { "ok " } else { "BAD" };
            screen::text(&format!("{mark}  {:<8} {}", finding.what, finding.found))?;
        }
    }
    match findings.iter().filter(|finding| !finding.well).count() {
        0 => Ok(()),
        wrong => Err(CliError::Usage(format!("{wrong} thing(s) to mend"))),
    }
}

fn state_folder(config: &Config) -> Finding {
    let folder = &config.service.state;
    let probe = folder.join(".probe");
    let tried = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&probe, b"x"))
        .and_then(|()| std::fs::remove_file(&probe));
    match tried {
        Ok(()) => Finding {
            well: true,
            what: "state",
            found: folder.display().to_string(),
        },
        Err(problem) => {
            let found = format!(
                "{}: {problem}; service.state names another folder",
                folder.display()
            );
            Finding {
                well: false,
                what: "state",
                found,
            }
        }
    }
}

async fn models(config: &Config) -> Vec<Finding> {
    let models = Models::new(config.models.clone());
    let library = Arc::new(Library::new(pipelines::catalogue(), None));
    let Some(card) = config
        .cards
        .devices
        .first()
        .and_then(|device| device.describe().ok())
    else {
        return Vec::new();
    };
    let look = move || {
        let mut findings = Vec::new();
        for folder in models.folders() {
            if !folder.is_dir() {
                let found = format!("{} is no folder (models.folders)", folder.display());
                findings.push(Finding {
                    well: false,
                    what: "models",
                    found,
                });
            }
        }
        for model in models.list().iter() {
            let reference = v1::ModelRef {
                id: model.id.clone(),
                revision: model.revision.clone(),
                ..Default::default()
            };
            let opened = models
                .resolve(Some(&reference))
                .and_then(|entry| library.open(&entry, &card));
            findings.push(match opened {
                Ok(open) => {
                    let bytes: Bytes = open.components.iter().map(|c| c.bytes).sum();
                    let found = format!("{} ({}, {bytes} on the card)", model.id, open.model.family());
                    Finding {
                        well: true,
                        what: "model",
                        found,
                    }
                }
                Err(error) => Finding {
                    well: false,
                    what: "model",
                    found: format!("{}: {error}", model.id),
                },
            });
        }
        if findings.is_empty() {
            let found = "none found: set models.folders".to_owned();
            findings.push(Finding {
                well: false,
                what: "models",
                found,
            });
        }
        findings
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

async fn service(config: &Config) -> Finding {
    let connection = match Connection::open(&config.client).await {
        Ok(connection) => connection,
        Err(_) => {
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
        Err(status) => Finding {
            well: false,
            what: "service",
            found: status.message().to_owned(),
        },
    }
}
