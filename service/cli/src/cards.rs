//! `moored trim`, `reserve`, `release`, `recycle`: a card's memory, and its worker.

use api::v1;
use clap::Args;
use config::ClientSettings;
use residency::Bytes;
use serde_json::json;

use crate::arguments::time;
use crate::connection::Connection;
use crate::{CliError, screen};

#[derive(Debug, Args)]
pub(super) struct Trim {
    /// The card [default: every card]
    pub(super) card: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Reserve {
    /// How much, such as 8GiB; with --renew, it may be left out
    #[arg(required_unless_present = "renew")]
    pub(super) bytes: Option<String>,
    /// For how long: up to 24h
    #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = time)]
    pub(super) ttl: humantime::Duration,
    /// What it is for; shown by `moored status`
    #[arg(long, default_value = "")]
    pub(super) label: String,
    /// The card [default: the one with the most free memory]
    #[arg(long, conflicts_with = "renew")]
    pub(super) card: Option<String>,
    /// The process that it is for: the reservation ends with it at the latest
    #[arg(long, value_name = "PID", conflicts_with = "renew")]
    pub(super) process: Option<u32>,
    /// Renew this reservation instead of making another
    #[arg(long, value_name = "ID")]
    pub(super) renew: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Release {
    /// The reservation's id, as `moored reserve` printed it and `moored status` lists it
    pub(super) id: String,
}

#[derive(Debug, Args)]
pub(super) struct Recycle {
    /// The card [default: every card]
    pub(super) card: Option<String>,
    /// Do not wait for running jobs: they are retried on the new process
    #[arg(long)]
    pub(super) force: bool,
}

pub(super) async fn trim(client: &ClientSettings, options: Trim, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let card = options.card.unwrap_or_default();
    let freed = residency.trim(v1::TrimRequest { card }).await?.into_inner();
    match json {
        true => screen::message(&freed),
        false => screen::text(&format!("freed {}", Bytes(freed.freed_bytes))),
    }
}

pub(super) async fn reserve(client: &ClientSettings, options: Reserve, json: bool) -> Result<(), CliError> {
    let bytes = match &options.bytes {
        Some(text) => gpu::parse_bytes(text).map_err(|problem| CliError::Usage(problem.to_string()))?,
        None => Bytes::ZERO,
    };
    let request = v1::ReserveRequest {
        bytes: bytes.0,
        ttl: prost_types::Duration::try_from(*options.ttl).ok(),
        label: options.label,
        card: options.card.unwrap_or_default(),
        reservation_id: options.renew.unwrap_or_default(),
        process_id: options.process.unwrap_or(0),
    };
    let mut residency = Connection::open(client).await?.residency();
    let reserved = residency.reserve(request).await?.into_inner();
    if json {
        return screen::message(&reserved);
    }
    let names = reserved
        .evicted
        .iter()
        .filter_map(|freed| Some(freed.component.as_ref()?.name.as_str()));
    let names: Vec<&str> = names.collect();
    if !names.is_empty() {
        screen::text(&format!("unloaded {}", names.join(", ")))?;
    }
    screen::text(&format!(
        "{}: {} of {} stay free for {}",
        reserved.reservation_id,
        Bytes(reserved.bytes),
        reserved.card,
        options.ttl
    ))
}

pub(super) async fn release(client: &ClientSettings, options: Release, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let reservation_id = options.id.clone();
    let request = v1::ReleaseReservationRequest { reservation_id };
    let released = residency
        .release_reservation(request)
        .await?
        .into_inner()
        .released;
    match (json, released) {
        (true, _) => screen::json(&json!({"released": released})),
        (false, true) => screen::text(&format!("released {}", options.id)),
        (false, false) => Err(CliError::Usage(format!(
            "there is no reservation {}, or it has expired; `moored status` lists them",
            options.id
        ))),
    }
}

pub(super) async fn recycle(client: &ClientSettings, options: Recycle, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let request = v1::RecycleRequest {
        card: options.card.unwrap_or_default(),
        force: options.force,
        client_id: client.name.clone(),
    };
    let cards = residency.recycle(request).await?.into_inner().cards;
    match json {
        true => screen::json(&json!({"cards": cards})),
        false => screen::text(&format!("a new worker process serves {}", cards.join(", "))),
    }
}
