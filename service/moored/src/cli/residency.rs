//! `moored models`, `load`, `unload`, `pin`, `jobs`, `cancel`.

use futures::StreamExt as _;
use residency::Bytes;
use serde_json::json;

use super::arguments::{Load, Pin, Unload};
use super::connection::Connection;
use super::show::Show;
use super::{CliError, screen};
use crate::config::Client;
use crate::proto::v1;

fn reference(id: &str) -> Option<v1::ModelRef> {
    Some(v1::ModelRef {
        id: id.to_owned(),
        ..Default::default()
    })
}

pub(super) async fn models(client: &Client, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let listed = residency
        .list_models(v1::ListModelsRequest {})
        .await?
        .into_inner()
        .models;
    if json {
        for model in listed {
            screen::json(&json!({
                "id": model.id, "revision": model.revision, "family": model.family, "problem": model.problem,
                "default": model.is_default, "pinned": model.pinned, "resident": model.resident,
                "bytes": model.components.iter().map(|c| c.bytes).sum::<u64>(),
            }))?;
        }
        return Ok(());
    }
    if listed.is_empty() {
        return screen::text(
            "no models: add a folder with `moored serve --models FOLDER` or in models.folders",
        );
    }
    let rows = listed.into_iter().map(|model| {
        let bytes: u64 = model.components.iter().map(|c| c.bytes).sum();
        let mut notes = Vec::new();
        if model.is_default {
            notes.push("default".to_owned());
        }
        if model.pinned {
            notes.push("pinned".to_owned());
        }
        if !model.resident.is_empty() {
            notes.push(format!("resident: {}", model.resident.join(", ")));
        }
        notes.extend(Some(model.problem).filter(|problem| !problem.is_empty()));
        vec![
            model.id,
            model.revision,
            model.family,
            Bytes(bytes).to_string(),
            notes.join("; "),
        ]
    });
    screen::table(
        &["model", "revision", "family", "on the card", ""],
        rows.collect(),
    )
}

pub(super) async fn load(client: &Client, options: Load, json: bool) -> Result<(), CliError> {
    let connection = Connection::open(client).await?;
    let what = match &options.components[..] {
        [] => options.model.clone(),
        some => format!("{} of {}", some.join(", "), options.model),
    };
    bring_in(&connection, &options.model, options.components, json).await?;
    if json {
        Ok(())
    } else {
        screen::text(&format!("{what} is resident"))
    }
}

/// Loads, showing how far it is.
async fn bring_in(
    connection: &Connection,
    model: &str,
    components: Vec<String>,
    json: bool,
) -> Result<(), CliError> {
    let request = v1::LoadRequest {
        model: reference(model),
        components,
        options: None,
    };
    let mut events = connection.residency().load(request).await?.into_inner();
    let mut show = Show::new(json);
    while let Some(event) = events.next().await {
        let event = event.inspect_err(|_| show.end())?;
        show.event(&event)?;
    }
    show.end();
    Ok(())
}

pub(super) async fn unload(client: &Client, options: Unload, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let request = v1::UnloadRequest {
        model: options.model.as_deref().and_then(reference),
        force: options.force,
    };
    let done = residency.unload(request).await?.into_inner();
    let name = |component: &Option<v1::Component>| component.clone().unwrap_or_default().name;
    if json {
        return screen::json(&json!({
            "freed": done.freed.iter().map(|f| json!({"component": name(&f.component), "card": f.card,
                "booked_bytes": f.booked_bytes, "freed_bytes": f.freed_bytes})).collect::<Vec<_>>(),
            "kept": done.kept.iter().map(|k| json!({"component": name(&k.component), "card": k.card,
                "reason": k.reason})).collect::<Vec<_>>(),
            "cancelled_jobs": done.cancelled_jobs,
        }));
    }
    for freed in &done.freed {
        screen::text(&format!(
            "freed {} from {}: {}",
            name(&freed.component),
            freed.card,
            Bytes(freed.freed_bytes)
        ))?;
    }
    for kept in &done.kept {
        screen::text(&format!(
            "kept {} on {}: {}",
            name(&kept.component),
            kept.card,
            kept.reason
        ))?;
    }
    let total: u64 = done.freed.iter().map(|f| f.freed_bytes).sum();
    screen::text(&format!("{} freed in all", Bytes(total)))
}

pub(super) async fn pin(client: &Client, options: Pin, json: bool) -> Result<(), CliError> {
    let connection = Connection::open(client).await?;
    let request = v1::PinRequest {
        model: reference(&options.model),
        unpin: options.off,
    };
    let pinned = connection.residency().pin(request).await?.into_inner().pinned;
    if !options.off {
        // Pinned first, so that nothing evicts what has just come in.
        bring_in(&connection, &options.model, Vec::new(), json).await?;
    }
    if json {
        return screen::json(&json!({ "pinned": pinned }));
    }
    let all = if pinned.is_empty() {
        "nothing".to_owned()
    } else {
        pinned.join(", ")
    };
    screen::text(&format!("pinned: {all}"))
}

pub(super) async fn jobs(client: &Client, all: bool, json: bool) -> Result<(), CliError> {
    let mut jobs = Connection::open(client).await?.jobs();
    let listed = jobs
        .list(v1::ListJobsRequest { include_ended: all })
        .await?
        .into_inner()
        .jobs;
    if json {
        for job in listed {
            screen::json(&job_json(&job))?;
        }
        return Ok(());
    }
    if listed.is_empty() {
        return screen::text("no jobs");
    }
    let rows = listed.into_iter().map(|job| {
        let progress = if job.steps > 1 {
            format!(" {}/{}", job.step, job.steps)
        } else {
            String::new()
        };
        vec![
            job.id,
            job.client_id,
            job.kind,
            job.state,
            job.model_key,
            job.card,
            format!("{}{progress}", job.stage),
            format!("{:.1} s", job.age_ms as f64 / 1000.0),
            job.error,
        ]
    });
    screen::table(
        &[
            "job", "client", "call", "state", "model", "card", "stage", "age", "",
        ],
        rows.collect(),
    )
}

/// A job for scripts.
pub(super) fn job_json(job: &v1::JobInfo) -> serde_json::Value {
    json!({
        "id": job.id, "client": job.client_id, "kind": job.kind, "state": job.state, "model": job.model_key,
        "card": job.card, "stage": job.stage, "step": job.step, "steps": job.steps,
        "queue_position": job.queue_position, "age_ms": job.age_ms, "error": job.error,
    })
}

pub(super) async fn cancel(client: &Client, job: String, json: bool) -> Result<(), CliError> {
    let mut jobs = Connection::open(client).await?.jobs();
    let cancelled = jobs
        .cancel(v1::CancelJobRequest { job_id: job })
        .await?
        .into_inner()
        .cancelled;
    if json {
        return screen::json(&json!({ "cancelled": cancelled }));
    }
    screen::text(if cancelled {
        "cancelled"
    } else {
        "it had ended already"
    })
}
