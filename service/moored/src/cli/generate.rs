//! `moored generate` and `moored plan`.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use residency::Bytes;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::arguments::{Formats, Generate, MediumChoice, PriorityChoice};
use super::connection::{Connection, when_of};
use super::pull::WhenMissing;
use super::results::Results;
use super::show::Show;
use super::{CliError, screen};
use crate::config::Client;
use crate::pictures::{self, Recipe};
use crate::proto::v1;
use crate::proto::v1::event::Event as Kind;
use crate::proto::v1::plan_request::Request as Asked;

/// Generates, and writes what was generated.
pub(super) async fn run(client: &Client, options: Generate, json: bool) -> Result<(), CliError> {
    let medium = medium_of(&options);
    let request = request_of(&options, medium)?;
    let out = options.out.as_deref().unwrap_or_else(|| medium.default_file());
    let to_stdout = out == "-";
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
    let attempt = async || generate(&connection, request.clone(), &mut show).await;
    let generated = when_missing
        .retry(&connection, model_of(&request), attempt)
        .await?;
    for (item, track, result) in generated.results.iter() {
        let file = result.file().map_err(CliError::Usage)?;
        if to_stdout {
            std::io::stdout().write_all(&file)?;
            continue;
        }
        let path = path_of(out, item, track, options.count, result.ending());
        write(&path, &file)?;
        if json {
            screen::json(&json!({"event": "written", "picture": item, "path": path.display().to_string()}))?;
        } else {
            screen::text(&path.display().to_string())?;
        }
    }
    if !json {
        screen::note(&summary(&generated.done));
        if let Some(attention) = attention(&generated.done.stages) {
            screen::note(&format!("attention: {attention}"));
        }
    }
    Ok(())
}

/// Refuses options that say nothing of what is generated.
fn check_options(options: &Generate, medium: MediumChoice) -> Result<(), CliError> {
    let of_film = [
        ("--frames", options.frames.is_some()),
        ("--fps", options.fps.is_some()),
    ];
    let of_track = [
        ("--seconds", options.seconds.is_some()),
        ("--lyrics", options.lyrics.is_some()),
    ];
    let seen = [
        ("--width", options.width.is_some()),
        ("--height", options.height.is_some()),
        ("--init", options.init.is_some()),
    ];
    let (others, what) = match medium {
        MediumChoice::Image => ([&of_film[..], &of_track[..]].concat(), "a picture"),
        MediumChoice::Video => (of_track.to_vec(), "a film"),
        MediumChoice::Audio => ([&of_film[..], &seen[..]].concat(), "a track"),
    };
    match others.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(CliError::Usage(format!(
            "{option} does not apply to {what}: leave it out, or choose another --medium"
        ))),
        None => Ok(()),
    }
}

/// What is generated: what the options say, else a picture.
fn medium_of(options: &Generate) -> MediumChoice {
    let ending = options.out.as_deref().map(Path::new).and_then(Path::extension);
    match options.medium {
        Some(medium) => medium,
        None if options.frames.is_some() || options.fps.is_some() => MediumChoice::Video,
        None if options.seconds.is_some() || options.lyrics.is_some() => MediumChoice::Audio,
        None if ending.is_some_and(|ending| ending == "wav") => MediumChoice::Audio,
        None if ending.is_some_and(|ending| ending == "apng") => MediumChoice::Video,
        None => MediumChoice::Image,
    }
}

fn model_of(request: &Asked) -> Option<&v1::ModelRef> {
    match request {
        Asked::Generate(image) => image.model.as_ref(),
        Asked::Video(video) => video.model.as_ref(),
        Asked::Audio(audio) => audio.model.as_ref(),
    }
}

/// What would be done.
pub(super) async fn plan(client: &Client, options: Generate, json: bool) -> Result<(), CliError> {
    let asked = request_of(&options, medium_of(&options))?;
    let request = v1::PlanRequest {
        request: Some(asked.clone()),
        card: options.card.clone().unwrap_or_default(),
    };
    let connection = Connection::open(client).await?;
    let when_missing = WhenMissing {
        pull: options.pull,
        json,
    };
    let attempt = async || Ok(connection.residency().plan(request.clone()).await?);
    let plan = when_missing.retry(&connection, model_of(&asked), attempt).await?;
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
pub(super) struct Generated {
    pub(super) results: Results,
    pub(super) done: v1::Done,
}

/// Sends a request and follows it to its end. Ctrl-C drops the stream, which cancels the job.
pub(super) async fn generate(
    connection: &Connection,
    request: Asked,
    show: &mut Show,
) -> Result<Generated, CliError> {
    // Before the job exists, and one listener for all of it: a Ctrl-C between two events is not lost.
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut generation = connection.generation();
    let events = match request {
        Asked::Generate(image) => generation.generate_image(image).await,
        Asked::Video(video) => generation.generate_video(video).await,
        Asked::Audio(audio) => generation.generate_audio(audio).await,
    };
    let mut events = events?.into_inner();
    let mut generated = Generated {
        results: Results::default(),
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
            Some(Kind::Artifact(chunk)) => generated.results.add(chunk),
            Some(Kind::Done(done)) => generated.done = done,
            _ => {}
        }
    }
    show.end();
    Ok(generated)
}

/// A request from options, over the recipe of `--from`.
fn request_of(options: &Generate, medium: MediumChoice) -> Result<Asked, CliError> {
    check_options(options, medium)?;
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
    let job = v1::JobOptions {
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
    };
    let (width, height) = (
        options.width.or(zero(recipe.width)).unwrap_or(0),
        options.height.or(zero(recipe.height)).unwrap_or(0),
    );
    let steps = options.steps.or(zero(recipe.steps)).unwrap_or(0);
    let guidance = options.guidance.or(from_recipe.then_some(recipe.guidance));
    let seed = options.seed.or(from_recipe.then_some(recipe.seed));
    let tokens = options.max_sequence_length.or(zero(recipe.max_sequence_length));
    let (max_sequence_length, strength) = (tokens.unwrap_or(0), options.strength.or(recipe.strength));
    let (model, count, omit_metadata) = (Some(model), options.count, options.no_metadata);
    Ok(match medium {
        MediumChoice::Image => Asked::Generate(v1::GenerateImageRequest {
            model,
            prompt,
            width,
            height,
            steps,
            guidance,
            seed,
            max_sequence_length,
            count,
            init_image: init_image.into(),
            strength,
            output: v1::OutputFormat::Png.into(),
            omit_metadata,
            options: Some(job),
            ..Default::default()
        }),
        MediumChoice::Video => Asked::Video(v1::GenerateVideoRequest {
            model,
            prompt,
            width,
            height,
            frames: options.frames.or(recipe.frames).unwrap_or(0),
            frames_per_second: options.fps.or(recipe.frames_per_second).unwrap_or(0.0),
            steps,
            guidance,
            seed,
            max_sequence_length,
            count,
            init_image: init_image.into(),
            strength,
            omit_metadata,
            options: Some(job),
            ..Default::default()
        }),
        MediumChoice::Audio => Asked::Audio(v1::GenerateAudioRequest {
            model,
            prompt,
            lyrics: options.lyrics.clone().unwrap_or(recipe.lyrics),
            seconds: options.seconds.or(recipe.seconds).unwrap_or(0.0),
            steps,
            guidance,
            seed,
            max_sequence_length,
            count,
            strength,
            omit_metadata,
            options: Some(job),
            ..Default::default()
        }),
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

/// One result goes where `-o` says; several are numbered beside it, or in the folder that it names. Tracks of one item are
/// named.
fn path_of(out: &str, item: u32, track: &str, count: u32, ending: &str) -> PathBuf {
    let path = Path::new(out);
    let track = if track.is_empty() {
        String::new()
    } else {
        format!("-{track}")
    };
    let is_folder = path.is_dir() || out.ends_with('/') || path.extension().is_none();
    if is_folder {
        return path.join(format!("{item:04}{track}.{ending}"));
    }
    if count <= 1 && track.is_empty() {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let number = if count <= 1 {
        String::new()
    } else {
        format!("-{item:04}")
    };
    path.with_file_name(format!("{stem}{number}{track}.{extension}"))
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
        let path = |out, item, count| path_of(out, item, "", count, "png");
        assert_eq!(path("a.png", 0, 1), Path::new("a.png"));
        assert_eq!(path("b/a.png", 2, 3), Path::new("b/a-0002.png"));
        assert_eq!(path("folder", 1, 2), Path::new("folder/0001.png"));
        assert_eq!(path("folder/", 0, 1), Path::new("folder/0000.png"));
        assert_eq!(path_of("a.wav", 0, "drums", 1, "wav"), Path::new("a-drums.wav"));
        assert_eq!(
            path_of("songs/", 3, "drums", 4, "wav"),
            Path::new("songs/0003-drums.wav")
        );
    }
}
