//! `moored load`, `unload`, `pin`, `jobs`, `cancel`.

use std::collections::BTreeSet;

use api::v1;
use config::ClientSettings;
use futures::StreamExt as _;
use residency::Bytes;
use serde_json::json;

use crate::arguments::{Formats, Load, Pin, Unload};
use crate::connection::Connection;
use crate::names::short_key;
use crate::pull::WhenMissing;
use crate::show::Show;
use crate::{CliError, connection, screen, total_of};

pub(super) async fn load(client: &ClientSettings, mut options: Load, json: bool) -> Result<(), CliError> {
    options.formats.settle(client).await?;
    let (old, components, prove) = (
        options.replace.clone(),
        options.components.join(", "),
        options.prove,
    );
    let request = v1::LoadRequest {
        model: Some(options.formats.of(&options.model)?),
        replace: {
            let old = options.replace.as_deref();
            old.map(|old| Formats::default().of(old)).transpose()?
        },
        components: options.components,
        prove: options.prove,
        options: Some(named(client)),
    };
    let connection = Connection::open(client).await?.about(request.model.as_ref());
    let when_missing = WhenMissing {
        pull: options.pull,
        json,
    };
    let attempt = async || load_and_show(&connection, request.clone(), json).await;
    let asked = request.model.as_ref();
    let done = when_missing.retry(&connection, asked, attempt).await?;
    if json {
        return Ok(());
    }
    left(&done.freed, &done.kept)?;
    let model = done.model.map_or(options.model, |model| model.key);
    screen::text(&match (&*components, old) {
        ("", Some(old)) => format!("{model} is proven and resident in place of {old}"),
        ("", None) if prove => format!("{model} is proven and resident"),
        ("", None) => format!("{model} is resident"),
        (some, _) => format!("{some} of {model} is resident"),
    })
}

/// The options of a job under the client's name.
fn named(client: &ClientSettings) -> v1::JobOptions {
    v1::JobOptions {
        client_id: client.name.clone(),
        ..Default::default()
    }
}

/// Loads, and shows the progress.
async fn load_and_show(
    connection: &Connection,
    request: v1::LoadRequest,
    json: bool,
) -> Result<v1::Done, CliError> {
    let mut events = connection.residency().load(request).await?.into_inner();
    let mut show = Show::new(json);
    let mut done = None;
    while let Some(event) = events.next().await {
        let event = event.inspect_err(|_| show.end())?;
        show.event(&event)?;
        if let Some(v1::event::Event::Done(last)) = event.event {
            done = Some(last);
        }
    }
    show.end();
    done.ok_or_else(connection::cut)
}

pub(super) async fn unload(client: &ClientSettings, mut options: Unload, json: bool) -> Result<(), CliError> {
    options.formats.settle(client).await?;
    if options.model.is_none() && !options.all {
        return Err(CliError::Usage(
            "name the model to unload, or --all for every model".to_owned(),
        ));
    }
    let what = options.model.clone();
    let request = v1::UnloadRequest {
        model: {
            let model = options.model.as_deref();
            model.map(|model| options.formats.of(model)).transpose()?
        },
        force: options.force,
        client_id: client.name.clone(),
    };
    let connection = Connection::open(client).await?.about(request.model.as_ref());
    let mut residency = connection.residency();
    let done = residency.unload(request).await?.into_inner();
    // A component that is kept only because another model shares it needs no remedy.
    let is_claimed = |kept: &v1::KeptComponent| matches!(kept.cause.as_str(), "pinned" | "held");
    let stays = done.freed.is_empty() && done.kept.iter().any(is_claimed);
    let only_kept = || match stays {
        true => Err(CliError::Failed(
            "nothing was unloaded: `moored pin MODEL --off` unpins a model, and holds end by themselves"
                .to_owned(),
        )),
        false => Ok(()),
    };
    if json {
        screen::message(&done)?;
        return only_kept();
    }
    left(&done.freed, &done.kept)?;
    let total = total_of(done.freed.iter().map(|f| f.freed_bytes));
    screen::text(&format!("{} freed in all", Bytes(total)))?;
    // No entry of this name was in memory. The model may be in memory in another format.
    if let Some(model) = what.filter(|_| done.freed.is_empty() && done.kept.is_empty()) {
        let status = residency.get_status(v1::GetStatusRequest {}).await?.into_inner();
        let residents = status.cards.into_iter().flat_map(|card| card.residents);
        let entries: BTreeSet<String> = residents.flat_map(|resident| resident.entries).collect();
        if !entries.is_empty() {
            let entries: Vec<String> = entries.iter().map(|key| short_key(key)).collect();
            screen::text(&format!(
                "{model} was not in memory as it is named here; what is: {}",
                entries.join(", ")
            ))?;
        }
    }
    only_kept()
}

/// Prints a line for each freed and each kept component.
fn left(freed: &[v1::FreedComponent], kept: &[v1::KeptComponent]) -> Result<(), CliError> {
    let name = |component: &Option<v1::Component>| component.clone().unwrap_or_default().name;
    for freed in freed {
        screen::text(&format!(
            "freed {} from {}: {}",
            name(&freed.component),
            freed.card,
            Bytes(freed.freed_bytes)
        ))?;
    }
    for kept in kept {
        let reason = match kept.cause.as_str() {
            "shared" => format!("shared with {}", short_key(&kept.by)),
            _ => kept.reason.clone(),
        };
        screen::text(&format!(
            "kept {} on {}: {reason}",
            name(&kept.component),
            kept.card
        ))?;
    }
    Ok(())
}

pub(super) async fn pin(client: &ClientSettings, mut options: Pin, json: bool) -> Result<(), CliError> {
    options.formats.settle(client).await?;
    let model = options.formats.of(&options.model)?;
    let connection = Connection::open(client).await?.about(Some(&model));
    let request = v1::PinRequest {
        model: Some(model.clone()),
        unpin: options.off,
    };
    let pinned = connection.residency().pin(request).await?.into_inner().pinned;
    if !options.off {
        // Pinned first, so that it is not evicted once it is loaded.
        let request = v1::LoadRequest {
            model: Some(model),
            options: Some(named(client)),
            ..Default::default()
        };
        load_and_show(&connection, request, json).await?;
    }
    if json {
        return screen::json(&json!({ "pinned": pinned }));
    }
    let pinned: Vec<String> = pinned.iter().map(|key| short_key(key)).collect();
    let all = pinned.join(", ");
    screen::text(&match (options.off, pinned.is_empty()) {
        (false, _) => format!("pinned: {all}"),
        (true, true) => format!("{} is not pinned any more; nothing else is", options.model),
        (true, false) => format!("{} is not pinned any more; still pinned: {all}", options.model),
    })
}

pub(super) async fn jobs(client: &ClientSettings, all: bool, json: bool) -> Result<(), CliError> {
    let mut jobs = Connection::open(client).await?.jobs();
    let listed = jobs
        .list(v1::ListJobsRequest { include_ended: all })
        .await?
        .into_inner()
        .jobs;
    if json {
        for job in listed {
            screen::message(&job)?;
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
            short_key(&job.model_key),
            job.card,
            format!("{}{progress}", job.stage),
            format!("{:.1} s", job.age_ms as f64 / 1000.0),
            kept_for(job.results_for_ms),
            job.error,
        ]
    });
    screen::table(
        &[
            "job", "client", "call", "state", "model", "card", "stage", "took", "kept for", "",
        ],
        rows.collect(),
    )
}

/// How long the results of a job can still be fetched: `23h 59m`.
fn kept_for(milliseconds: Option<u64>) -> String {
    let minutes = milliseconds.map(|left| std::time::Duration::from_secs(left / 60_000 * 60));
    match minutes {
        None => String::new(),
        Some(minutes) if minutes.is_zero() => "< 1m".to_owned(),
        Some(minutes) => humantime::format_duration(minutes).to_string(),
    }
}

pub(super) async fn cancel(client: &ClientSettings, job: String, json: bool) -> Result<(), CliError> {
    let mut jobs = Connection::open(client).await?.jobs();
    let cancelled = jobs
        .cancel(v1::CancelJobRequest {
            job_id: job,
            release_latents: false,
            client_id: client.name.clone(),
        })
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
