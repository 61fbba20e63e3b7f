//! `moored status`: the cards as they are, as a picture.

use std::io::IsTerminal as _;

use futures::StreamExt as _;
use residency::Bytes;
use serde_json::json;

use super::arguments::Status;
use super::connection::Connection;
use super::residency::job_json;
use super::{CliError, screen};
use crate::config::Client;
use crate::proto::v1;

/// Characters across a memory bar.
const BAR_WIDTH: usize = 60;
/// Clears the screen and goes to its top.
const CLEAR: &str = "\x1b[2J\x1b[H";

pub(super) async fn run(client: &Client, options: Status, json: bool) -> Result<(), CliError> {
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
        if !json && std::io::stdout().is_terminal() {
            screen::text(CLEAR)?;
        }
        show(&status?, json)?;
    }
    Ok(())
}

fn show(status: &v1::Status, json: bool) -> Result<(), CliError> {
    if json {
        screen::json(&status_json(status))
    } else {
        screen::text(&picture(status))
    }
}

/// The status as lines of text.
pub(super) fn picture(status: &v1::Status) -> String {
    let mut lines = Vec::new();
    for card in &status.cards {
        lines.extend(card_lines(card));
        lines.push(String::new());
    }
    for job in &status.jobs {
        let progress = if job.steps > 1 {
            format!(" {}/{}", job.step, job.steps)
        } else {
            String::new()
        };
        lines.push(format!(
            "{}  {}  {} of {}  {}{progress}  {:.1} s",
            job.id,
            job.state,
            job.kind,
            job.client_id,
            job.stage,
            job.age_ms as f64 / 1000.0
        ));
    }
    if status.jobs.is_empty() {
        lines.push("no jobs".to_owned());
    }
    lines.push(format!(
        "latents {} ({}), text encodings {} ({})",
        status.latents,
        Bytes(status.latent_bytes),
        status.text_encodings,
        Bytes(status.text_encoding_bytes)
    ));
    lines.join("\n")
}

fn card_lines(card: &v1::CardStatus) -> Vec<String> {
    let memory = card.memory.unwrap_or_default();
    let restarts = match card.worker_restarts {
        0 => String::new(),
        n => format!(", worker restarted {n} time(s)"),
    };
    let mut lines = vec![
        format!(
            "{} ({}), {}, {}{restarts}",
            card.id, card.name, card.state, card.policy
        ),
        format!(
            "[{}] {} usable of {}",
            bar(&memory),
            Bytes(memory.usable),
            Bytes(memory.total)
        ),
    ];
    let accounts = shares(&memory).into_iter().filter(|(_, _, bytes)| *bytes > 0);
    lines.push(
        accounts
            .map(|(mark, name, bytes)| format!("{mark} {name} {}", Bytes(bytes)))
            .collect::<Vec<_>>()
            .join("  "),
    );
    for resident in &card.residents {
        let component = resident.component.clone().unwrap_or_default();
        let mut notes = Vec::new();
        if resident.pinned {
            notes.push("pinned".to_owned());
        }
        if resident.held {
            notes.push("held".to_owned());
        }
        if resident.leases > 0 {
            notes.push("in use".to_owned());
        } else {
            notes.push(format!("idle {:.0} s", resident.idle_ms as f64 / 1000.0));
        }
        if resident.state != "resident" {
            notes.push(resident.state.clone());
        }
        lines.push(format!(
            "  {:<16} {:>10}  {}  {}",
            component.name,
            Bytes(component.bytes).to_string(),
            resident.entries.join(", "),
            notes.join(", ")
        ));
    }
    for reservation in &card.reservations {
        lines.push(format!(
            "  reserved {} for {:?}, {:.0} s left",
            Bytes(reservation.bytes),
            reservation.label,
            reservation.expires_in_ms as f64 / 1000.0
        ));
    }
    lines
}

/// Every account with its mark in the bar, in the bar's order.
fn shares(memory: &v1::MemoryAccounts) -> [(char, &'static str, u64); 8] {
    [
        ('█', "components", memory.components),
        ('▓', "scratch", memory.scratch),
        ('▒', "slack", memory.slack),
        ('w', "workspaces", memory.workspaces),
        ('c', "context", memory.context),
        ('x', "foreign", memory.foreign),
        ('?', "unexplained", memory.unexplained),
        ('·', "free", memory.free),
    ]
}

/// A bar of [`BAR_WIDTH`] characters; what is there at all shows.
fn bar(memory: &v1::MemoryAccounts) -> String {
    let total = memory.total.max(1) as f64;
    let mut bar = String::new();
    for (mark, _, bytes) in &shares(memory)[..7] {
        let width = (*bytes as f64 / total * BAR_WIDTH as f64).round() as usize;
        let width = if *bytes > 0 { width.max(1) } else { 0 };
        bar.extend(std::iter::repeat_n(*mark, width));
    }
    let mut bar: String = bar.chars().take(BAR_WIDTH).collect();
    while bar.chars().count() < BAR_WIDTH {
        bar.push('·');
    }
    bar
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
                "memory": {"total": m.total, "components": m.components, "scratch": m.scratch, "slack": m.slack,
                    "workspaces": m.workspaces, "context": m.context, "foreign": m.foreign,
                    "unexplained": m.unexplained, "free": m.free, "usable": m.usable},
                "residents": card.residents.iter().map(|r| {
                    let c = r.component.clone().unwrap_or_default();
                    json!({"id": c.id, "name": c.name, "bytes": c.bytes, "state": r.state, "leases": r.leases,
                        "pinned": r.pinned, "held": r.held, "idle_ms": r.idle_ms, "entries": r.entries})
                }).collect::<Vec<_>>(),
                "reservations": card.reservations.iter().map(|r| json!({"id": r.id, "label": r.label,
                    "bytes": r.bytes, "expires_in_ms": r.expires_in_ms})).collect::<Vec<_>>(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_always_as_wide_and_shows_what_is_small() {
        let memory = v1::MemoryAccounts {
            total: 80 << 30,
            components: 1 << 20,
            scratch: 40 << 30,
            foreign: 39 << 30,
            ..Default::default()
        };
        let bar = bar(&memory);
        assert_eq!(bar.chars().count(), BAR_WIDTH);
        for mark in ['█', '▓', 'x'] {
            assert!(bar.contains(mark), "{bar}");
        }
    }
}
