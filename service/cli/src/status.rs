//! `moored status`: the cards as they are, as a picture.

use std::io::IsTerminal as _;

use api::v1;
use futures::StreamExt as _;
use serde_json::json;

use super::arguments::Status;
use super::connection::Connection;
use super::picture::{Canvas, picture};
use super::residency::job_json;
use super::{CliError, screen};
use config::ClientSettings;

/// Shows the cards and the jobs; with `--watch` again and again.
pub(super) async fn run(client: &ClientSettings, options: Status, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    if !options.watch {
        let status = residency.get_status(v1::GetStatusRequest {}).await?.into_inner();
        return show(&status, json);
    }
    let mut changes = residency
        .watch_status(v1::WatchStatusRequest { interval_ms: 250 })
        .await?
        .into_inner();
    while let Some(status) = changes.next().await {
        let status = status?;
        if !json && std::io::stdout().is_terminal() {
            screen::redraw(&picture(&status, Canvas::of_stdout()))?;
        } else {
            show(&status, json)?;
        }
    }
    Ok(())
}

fn show(status: &v1::Status, json: bool) -> Result<(), CliError> {
    if json {
        screen::json(&status_json(status))
    } else {
        screen::drawing(&picture(status, Canvas::of_stdout()))
    }
}

fn status_json(status: &v1::Status) -> serde_json::Value {
    let cards: Vec<_> = status
        .cards
        .iter()
        .map(|card| {
            let m = card.memory.unwrap_or_default();
            json!({
                "id": card.id, "name": card.name, "kind": card.kind, "state": card.state, "job": card.job_id,
                "worker_pid": card.worker_pid, "worker_restarts": card.worker_restarts, "policy": card.policy,
                "attention": card.attention,
                "memory": {"total": m.total, "components": m.components, "scratch": m.scratch, "slack": m.slack,
                    "workspaces": m.workspaces, "context": m.context, "foreign": m.foreign,
                    "unexplained": m.unexplained, "free": m.free, "usable": m.usable},
                "residents": card.residents.iter().map(|r| {
                    let c = r.component.clone().unwrap_or_default();
                    json!({"id": c.id, "name": c.name, "bytes": c.bytes, "state": r.state, "leases": r.leases,
                        "pinned": r.pinned, "held": r.held, "idle_ms": r.idle_ms, "entries": r.entries})
                }).collect::<Vec<_>>(),
                "holders": card.holders.iter().map(|h| json!({"name": h.name, "pid": h.pid, "bytes": h.bytes}))
                    .collect::<Vec<_>>(),
                "reservations": card.reservations.iter().map(|r| json!({"id": r.id, "label": r.label,
                    "bytes": r.bytes, "expires_in_ms": r.expires_in_ms, "process_id": r.process_id})).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "cards": cards, "jobs": status.jobs.iter().map(job_json).collect::<Vec<_>>(),
        "latents": status.latents, "latent_bytes": status.latent_bytes,
        "text_encodings": status.text_encodings, "text_encoding_bytes": status.text_encoding_bytes,
        "uptime_ms": status.uptime_ms,
    })
}
