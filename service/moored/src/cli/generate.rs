//! `moored generate` and `moored plan`.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use residency::Bytes;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::arguments::{Formats, Generate, PriorityChoice};
use super::connection::{Connection, when_of};
use super::pull::WhenMissing;
use super::show::Show;
use super::{CliError, screen};
use crate::config::Client;
use crate::pictures::{self, Recipe};
use crate::proto::v1;
use crate::proto::v1::event::Event as Kind;

/// Paints, and writes what was painted.
pub(super) async fn run(client: &Client, options: Generate, json: bool) -> Result<(), CliError> {
    let request = request_of(&options)?;
    let to_stdout = options.out == "-";
    if to_stdout && std::io::stdout().is_terminal() {
        return Err(CliError::Usage(
            "a picture is not written to a terminal: redirect it, or use -o FILE".to_owned(),
        ));
    }
    if to_stdout && options.count > 1 {
        return Err(CliError::Usage(
            "standard output takes one picture: use -o FOLDER for several".to_owned(),
        ));
    }
    let connection = Connection::open(client).await?;
    let mut show = if json && to_stdout {
        Show::silent()
    } else {
        Show::new(json)
    };
    let when_missing = WhenMissing {
        pull: options.pull,
        json: json && !to_stdout,
    };
    let attempt = async || paint(&connection, request.clone(), &mut show).await;
    let asked = request.model.as_ref();
    let painted = when_missing.retry(&connection, asked, attempt).await?;
    for (index, picture) in &painted.pictures {
        if to_stdout {
            std::io::stdout().write_all(picture)?;
            continue;
        }
        let path = path_of(&options.out, *index, options.count);
        write(&path, picture)?;
        if json {
            screen::json(&json!({"event": "written", "picture": index, "path": path.display().to_string()}))?;
        } else {
            screen::text(&path.display().to_string())?;
        }
    }
    if !json {
        screen::note(&summary(&painted.done));
        if let Some(attention) = attention(&painted.done.stages) {
            screen::note(&format!("attention: {attention}"));
        }
    }
    Ok(())
}

/// What would be done.
pub(super) async fn plan(client: &Client, options: Generate, json: bool) -> Result<(), CliError> {
    let request = v1::PlanRequest {
        generate: Some(request_of(&options)?),
        card: options.card.clone().unwrap_or_default(),
    };
    let connection = Connection::open(client).await?;
    let when_missing = WhenMissing {
        pull: options.pull,
        json,
    };
    let attempt = async || Ok(connection.residency().plan(request.clone()).await?);
    let generate = request.generate.as_ref();
    let asked = generate.and_then(|generate| generate.model.as_ref());
    let plan = when_missing.retry(&connection, asked, attempt).await?;
    let plan = plan.into_inner();
    if json {
        return screen::json(&plan_json(&plan));
    }
    let rows = plan.stages.iter().map(|stage| {
        let scratch = if stage.scratch_learned {
            "measured"
        } else {
            "predicted"
        };
        vec![
            stage.name.clone(),
            Bytes(stage.component_bytes).to_string(),
            format!("{} ({scratch})", Bytes(stage.scratch_bytes)),
            stage.chunking.clone(),
            stage.verdict.clone(),
            stage.moves.join(", "),
        ]
    });
    screen::table(
        &["stage", "components", "scratch", "chunking", "verdict", "moves"],
        rows.collect(),
    )?;
    for shortfall in plan.stages.iter().filter_map(|stage| stage.shortfall.as_ref()) {
        for fallback in &shortfall.fallbacks {
            screen::text(&format!(
                "{} would fit {} ({})",
                fallback.label,
                when_of(fallback),
                Bytes(fallback.peak_bytes)
            ))?;
        }
    }
    let when = if plan.runs_now {
        "runs now"
    } else {
        "does not run now"
    };
    screen::text(&format!(
        "on {}: {when}; {:.2} s of moves first",
        plan.card, plan.predicted_move_seconds
    ))
}

/// What a generate call gave.
pub(super) struct Painted {
    /// Files by index.
    pub(super) pictures: BTreeMap<u32, Vec<u8>>,
    pub(super) done: v1::Done,
}

/// Sends a request and follows it to its end. Ctrl-C drops the stream, which cancels the job.
pub(super) async fn paint(
    connection: &Connection,
    request: v1::GenerateImageRequest,
    show: &mut Show,
) -> Result<Painted, CliError> {
    // Before the job exists, and one listener for all of it: a Ctrl-C between two events is not lost.
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut events = connection
        .generation()
        .generate_image(request)
        .await?
        .into_inner();
    let mut painted = Painted {
        pictures: BTreeMap::new(),
        done: v1::Done::default(),
    };
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = interrupted.recv() => {
                show.end();
                return Err(CliError::Usage("cancelled".to_owned()));
            }
        };
        let Some(event) = event else { break };
        let event = event.inspect_err(|_| show.end())?;
        show.event(&event)?;
        match event.event {
            Some(Kind::Artifact(artifact)) => {
                painted
                    .pictures
                    .entry(artifact.index)
                    .or_default()
                    .extend_from_slice(&artifact.chunk);
            }
            Some(Kind::Done(done)) => painted.done = done,
            _ => {}
        }
    }
    show.end();
    Ok(painted)
}

/// A request from options, over the recipe of `--from`.
fn request_of(options: &Generate) -> Result<v1::GenerateImageRequest, CliError> {
    let recipe = options.from.as_deref().map(recipe_of).transpose()?;
    let prompt = match (&options.prompt, &recipe) {
        (Some(prompt), _) if prompt != "-" => prompt.clone(),
        (None, Some(recipe)) => recipe.prompt.clone(),
        (Some(_), _) | (None, None) => prompt_from_stdin()?,
    };
    let recipe = recipe.unwrap_or_default();
    let zero = |value: u32| (value > 0).then_some(value);
    let from_recipe = options.from.is_some();
    let init_image = options.init.as_deref().map(read).transpose()?.unwrap_or_default();
    if init_image.is_empty() && recipe.strength.is_some() {
        return Err(CliError::Usage(
            "that picture was made from another: name it with --init to repeat it".to_owned(),
        ));
    }
    let model = match &options.model {
        None if options.formats.is_empty() => Formats::of_key(&recipe.model_key).of(&recipe.model),
        None => options.formats.of(&recipe.model),
        Some(model) => options.formats.of(model),
    }?;
    Ok(v1::GenerateImageRequest {
        model: Some(model),
        prompt,
        width: options.width.or(zero(recipe.width)).unwrap_or(0),
        height: options.height.or(zero(recipe.height)).unwrap_or(0),
        steps: options.steps.or(zero(recipe.steps)).unwrap_or(0),
        guidance: options.guidance.or(from_recipe.then_some(recipe.guidance)),
        seed: options.seed.or(from_recipe.then_some(recipe.seed)),
        max_sequence_length: options
            .max_sequence_length
            .or(zero(recipe.max_sequence_length))
            .unwrap_or(0),
        count: options.count,
        init_image: init_image.into(),
        strength: options.strength.or(recipe.strength),
        output: v1::OutputFormat::Png.into(),
        omit_metadata: options.no_metadata,
        options: Some(v1::JobOptions {
            client_id: options.client.clone().unwrap_or_default(),
            priority: match options.priority {
                PriorityChoice::Low => v1::Priority::Low,
                PriorityChoice::Normal => v1::Priority::Normal,
                PriorityChoice::High => v1::Priority::High,
            }
            .into(),
            patience_ms: options
                .patience
                .map(|p| u64::try_from(p.as_millis()).unwrap_or(u64::MAX)),
            allow_low_memory: options.allow_low_memory,
            card: options.card.clone().unwrap_or_default(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

fn prompt_from_stdin() -> Result<String, CliError> {
    if std::io::stdin().is_terminal() {
        return Err(CliError::Usage(
            "a prompt is missing: write it behind `generate`, or pipe it in".to_owned(),
        ));
    }
    let mut prompt = String::new();
    std::io::stdin().read_to_string(&mut prompt)?;
    match prompt.trim() {
        "" => Err(CliError::Usage("standard input holds no prompt".to_owned())),
        trimmed => Ok(trimmed.to_owned()),
    }
}

fn recipe_of(path: &Path) -> Result<Recipe, CliError> {
    pictures::recipe_of(&read(path)?).map_err(|problem| CliError::File {
        path: path.display().to_string(),
        problem,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(path).map_err(|problem| CliError::File {
        path: path.display().to_string(),
        problem: problem.to_string(),
    })
}

/// Writes a file, making its folder.
pub(super) fn write(path: &Path, contents: &[u8]) -> Result<(), CliError> {
    let failed = |problem: std::io::Error| CliError::File {
        path: path.display().to_string(),
        problem: problem.to_string(),
    };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::write(path, contents).map_err(failed)
}

/// One picture goes where `-o` says; several are numbered beside it, or in the folder that it names.
fn path_of(out: &str, index: u32, count: u32) -> PathBuf {
    let path = Path::new(out);
    let is_folder = path.is_dir() || out.ends_with('/') || path.extension().is_none();
    if is_folder {
        return path.join(format!("{index:04}.png"));
    }
    if count <= 1 {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{index:04}.png"))
}

/// The times of a finished job in a line.
pub(super) fn summary(done: &v1::Done) -> String {
    let mut parts = Vec::new();
    for stage in &done.stages {
        let mut part = if stage.cached {
            format!("{} cached", stage.name)
        } else {
            format!("{} {}", stage.name, seconds(stage.run_ms))
        };
        if stage.move_ms > 0 {
            part += &format!(" (+{} loading)", seconds(stage.move_ms));
        }
        if stage.wait_ms > 0 {
            part += &format!(" (+{} waiting)", seconds(stage.wait_ms));
        }
        parts.push(part);
    }
    let mut line = format!(
        "seed {}, {}: {}",
        done.seed,
        seconds(done.total_ms),
        parts.join(", ")
    );
    for approximation in &done.approximations {
        line += &format!("\napproximate: {approximation}");
    }
    line
}

/// What computed attention, with the stages it did so in where they are not all alike.
fn attention(stages: &[v1::StageReport]) -> Option<String> {
    let mut paths: Vec<(&str, Vec<&str>)> = Vec::new();
    for stage in stages.iter().filter(|stage| !stage.attention.is_empty()) {
        let known = paths.iter().position(|(path, _)| *path == stage.attention);
        let at = known.unwrap_or_else(|| {
            paths.push((&stage.attention, Vec::new()));
            paths.len() - 1
        });
        if !paths[at].1.contains(&stage.name.as_str()) {
            paths[at].1.push(&stage.name);
        }
    }
    match &paths[..] {
        [] => None,
        [(path, _)] => Some((*path).to_owned()),
        several => {
            let named = several
                .iter()
                .map(|(path, stages)| format!("{} by {path}", stages.join(", ")));
            Some(named.collect::<Vec<_>>().join("; "))
        }
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.2} s", milliseconds as f64 / 1000.0)
}

fn plan_json(plan: &v1::PlanResponse) -> serde_json::Value {
    let stages: Vec<_> = plan
        .stages
        .iter()
        .map(|stage| {
            json!({
                "name": stage.name, "verdict": stage.verdict, "chunking": stage.chunking,
                "approximate": stage.approximate, "component_bytes": stage.component_bytes,
                "scratch_bytes": stage.scratch_bytes, "scratch_learned": stage.scratch_learned,
                "resident_already": stage.resident_already, "moves": stage.moves,
                "components": stage.components.iter()
                    .map(|c| json!({"id": c.id, "name": c.name, "bytes": c.bytes})).collect::<Vec<_>>(),
                "shortfall": stage.shortfall.as_ref().map(|s| json!({
                    "needed_bytes": s.needed_bytes, "free_bytes": s.free_bytes, "capacity_bytes": s.capacity_bytes,
                    "fallbacks": s.fallbacks.iter().map(|f| json!({"label": f.label,
                        "peak_bytes": f.peak_bytes, "fits_now": f.fits_now})).collect::<Vec<_>>(),
                })),
            })
        })
        .collect();
    json!({
        "model": plan.model.clone().unwrap_or_default().key, "card": plan.card, "runs_now": plan.runs_now,
        "predicted_move_seconds": plan.predicted_move_seconds, "stages": stages,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_went_different_ways_are_named() {
        let stage = |name: &str, attention: &str| v1::StageReport {
            name: name.to_owned(),
            attention: attention.to_owned(),
            ..Default::default()
        };
        let mut stages = vec![stage("load", ""), stage("denoise", "cudnn 9.19.0")];
        assert_eq!(attention(&stages[..1]), None);
        assert_eq!(attention(&stages).as_deref(), Some("cudnn 9.19.0"));
        stages.extend([stage("denoise", "cudnn 9.19.0"), stage("decode", "own kernels")]);
        assert_eq!(
            attention(&stages).as_deref(),
            Some("denoise by cudnn 9.19.0; decode by own kernels")
        );
    }

    #[test]
    fn pictures_go_where_they_are_told() {
        assert_eq!(path_of("a.png", 0, 1), Path::new("a.png"));
        assert_eq!(path_of("b/a.png", 2, 3), Path::new("b/a-0002.png"));
        assert_eq!(path_of("folder", 1, 2), Path::new("folder/0001.png"));
        assert_eq!(path_of("folder/", 0, 1), Path::new("folder/0000.png"));
    }
}
