//! The tools: what each takes, who may call it, and the call that it makes.

use access::Role;
use calls::{Asked, AskedOptions, AskedTrack, Encoding, OfMedium, Planned, Service, policy_name};
use engine::Error;
use engine::job::Call;
use model::{Medium, Sampler, Sampling};
use rmcp::handler::server::tool::schema_for_input;
use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock, JsonObject, Tool, ToolAnnotations};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use transport::check_role;

use super::results::{awaited, begun, failed, failed_with};
use super::{Asker, resources};
use crate::forms::model_of;

/// Name of an agent in the list of jobs.
const AGENT: &str = "mcp";
/// Time between previews, of which the last is shown for a film.
const PREVIEW_INTERVAL_MS: u32 = 2_000;

/// A tool, by its name and who may call it.
struct Row {
    name: &'static str,
    role: Role,
    words: &'static str,
    changes: bool,
}

const ROWS: [Row; 9] = [
    Row::makes("generate_image", "Makes pictures from a prompt."),
    Row::makes(
        "edit_image",
        "Makes pictures from a picture and a prompt: an editing model takes it as a reference; with strength or a mask, it is what is changed.",
    ),
    Row::makes(
        "generate_video",
        "Makes a film from a prompt, with its sound where the model makes it, and from a first picture where one is given.",
    ),
    Row::makes(
        "generate_music",
        "Makes a track from a prompt, and from lyrics where they are given.",
    ),
    Row::makes(
        "get_result",
        "Waits for a job that was begun with wait false, and returns what it has made.",
    ),
    Row::makes("cancel_job", "Ends a job."),
    Row::reads(
        "list_models",
        "The models that can be named, what each makes, and its defaults.",
    ),
    Row::reads("status", "The memory of each card, what is in it, and the jobs."),
    Row {
        role: Role::Generate,
        ..Row::reads(
            "what_fits",
            "What a model needs and whether it would run now: stages, bytes, moves, and what would have to wait.",
        )
    },
];

impl Row {
    const fn makes(name: &'static str, words: &'static str) -> Row {
        Row {
            name,
            role: Role::Generate,
            words,
            changes: true,
        }
    }

    const fn reads(name: &'static str, words: &'static str) -> Row {
        Row {
            name,
            role: Role::Observe,
            words,
            changes: false,
        }
    }
}

/// What pictures are made of.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ImageArguments {
    /// What the picture shows, or how it is changed.
    prompt: String,
    /// For edit_image: the address of a result (moored://jobs/JOB/0), a data: address, or a picture in base64.
    image: Option<String>,
    /// For edit_image: white where the picture is to be changed; given as the image is.
    mask: Option<String>,
    /// For edit_image: how strongly to change the picture, over 0 up to 1.
    strength: Option<f32>,
    /// A name of list_models; left out: the default model.
    model: Option<String>,
    /// Pixels; left out: the model's default.
    width: Option<u32>,
    /// Pixels; left out: the model's default.
    height: Option<u32>,
    /// How many pictures; left out: 1.
    count: Option<u32>,
    /// Denoising steps; left out: the model's default.
    steps: Option<u32>,
    /// The same seed makes the same picture.
    seed: Option<u64>,
    /// What the picture is led away from, of models that take it.
    negative_prompt: Option<String>,
    /// How noise is removed, of models with several samplers (SDXL): euler, euler_ancestral or dpmpp_2m_karras; left out: as the
    /// model says.
    #[schemars(with = "Option<String>")]
    sampler: Option<Sampler>,
}

/// What a film is made of.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct VideoArguments {
    /// What is seen and heard.
    prompt: String,
    /// The first picture: the address of a result, a data: address, or base64.
    image: Option<String>,
    /// A name of list_models.
    model: Option<String>,
    /// Length; left out: the model's default.
    seconds: Option<f32>,
    /// Pixels; left out: the model's default.
    width: Option<u32>,
    /// Pixels; left out: the model's default.
    height: Option<u32>,
    /// Denoising steps; left out: the model's default.
    steps: Option<u32>,
    /// The same seed makes the same film.
    seed: Option<u64>,
    /// False: return at once with the id of the job; left out: wait for the film.
    wait: Option<bool>,
}

/// What a track is made of.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MusicArguments {
    /// What is heard: style, instruments, mood.
    prompt: String,
    /// What is sung; left out: nothing.
    lyrics: Option<String>,
    /// A name of list_models.
    model: Option<String>,
    /// Length; left out: the model's default.
    seconds: Option<f32>,
    /// Denoising steps; left out: the model's default.
    steps: Option<u32>,
    /// The same seed makes the same track.
    seed: Option<u64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct JobArguments {
    /// The id of a job.
    job: String,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ModelArguments {
    /// A name of list_models, with a format where one is wanted (owner/name+4-bit); left out: the default model.
    model: Option<String>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct NoArguments {}

/// The tools that the asker may call.
pub(super) fn list(asker: &Asker) -> Vec<Tool> {
    let may = |row: &&Row| check(row, asker).is_ok();
    let tools = ROWS.iter().filter(may).map(|row| {
        let tool = Tool::new(row.name, row.words, schema(row.name));
        let annotations = ToolAnnotations::new()
            .read_only(!row.changes)
            .destructive(row.name == "cancel_job")
            .open_world(false);
        tool.with_annotations(annotations)
    });
    tools.collect()
}

fn schema(name: &str) -> std::sync::Arc<JsonObject> {
    let schema = match name {
        "generate_image" | "edit_image" => schema_for_input::<ImageArguments>(),
        "generate_video" => schema_for_input::<VideoArguments>(),
        "generate_music" => schema_for_input::<MusicArguments>(),
        "get_result" | "cancel_job" => schema_for_input::<JobArguments>(),
        "what_fits" => schema_for_input::<ModelArguments>(),
        _ => schema_for_input::<NoArguments>(),
    };
    schema.unwrap_or_default() // each is an object, as a test holds
}

fn check(row: &Row, asker: &Asker) -> Result<(), String> {
    let holder = asker
        .admitted
        .as_ref()
        .and_then(|admitted| admitted.holder.as_ref());
    let checked = holder.map_or(Ok(()), |holder| check_role(row.name, row.role, holder));
    checked.map_err(|refusal| refusal.to_string())
}

/// Calls a tool.
///
/// # Errors
/// Where there is no such tool, or its arguments are not those that it takes.
pub(super) async fn call(
    service: &Service,
    request: CallToolRequestParams,
    asker: &Asker,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let name = request.name.as_ref();
    let row = ROWS.iter().find(|row| row.name == name);
    let row = row.ok_or_else(|| {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        let problem = format!("there is no tool {name:?}: there are {}", names.join(", "));
        ErrorData::invalid_params(problem, None)
    })?;
    if let Err(problem) = check(row, asker) {
        return Ok(failed_with(problem));
    }
    let arguments = request.arguments.unwrap_or_default();
    match name {
        "generate_image" | "edit_image" => {
            let arguments: ImageArguments = read(arguments)?;
            if (name == "edit_image") != arguments.image.is_some() {
                let problem = match name {
                    "edit_image" => "image is missing: give the picture to edit",
                    _ => "image is taken by edit_image alone",
                };
                return Err(ErrorData::invalid_params(problem, None));
            }
            generated(
                service,
                asked_image(service, arguments, asker).await,
                true,
                asker,
                context,
            )
            .await
        }
        "generate_video" => {
            let arguments: VideoArguments = read(arguments)?;
            let wait = arguments.wait.unwrap_or(true);
            generated(
                service,
                asked_video(service, arguments, asker).await,
                wait,
                asker,
                context,
            )
            .await
        }
        "generate_music" => generated(service, Ok(asked_music(read(arguments)?)), true, asker, context).await,
        "get_result" => {
            let JobArguments { job } = read(arguments)?;
            Ok(match service.jobs.fetch(&job, &asker.caller) {
                Ok(started) => awaited(service, started, asker, context).await,
                Err(error) => failed(error.into()),
            })
        }
        "cancel_job" => {
            let JobArguments { job } = read(arguments)?;
            let cancelled = service
                .jobs
                .cancel(&job, AGENT.to_owned(), true, &asker.caller)
                .await;
            Ok(match cancelled {
                Ok(true) => told(
                    &json!({"job": job, "cancelled": true}),
                    format!("The job {job} was cancelled."),
                ),
                Ok(false) => told(
                    &json!({"job": job, "cancelled": false}),
                    format!("The job {job} had ended."),
                ),
                Err(error) => failed(error.into()),
            })
        }
        "list_models" => Ok(told_or_failed(models(service, asker).await)),
        "what_fits" => Ok(told_or_failed(what_fits(service, read(arguments)?, asker).await)),
        _ => Ok(told_or_failed(Ok(status(service).await))),
    }
}

fn read<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, ErrorData> {
    let read = serde_path_to_error::deserialize(Value::Object(arguments));
    read.map_err(|problem| ErrorData::invalid_params(problem.to_string(), None))
}

/// A result that a program reads, and the same as text.
fn told(value: &Value, words: String) -> CallToolResult {
    let mut result = CallToolResult::success(vec![ContentBlock::text(words)]);
    result.structured_content = Some(value.clone());
    result
}

fn told_or_failed(value: Result<Value, Error>) -> CallToolResult {
    match value {
        Ok(value) => told(&value, value.to_string()),
        Err(error) => failed(error.into()),
    }
}

fn options() -> Option<AskedOptions> {
    Some(AskedOptions {
        client_id: AGENT.to_owned(),
        // Its result is a resource.
        detach: true,
        ..AskedOptions::default()
    })
}

async fn asked_image(service: &Service, arguments: ImageArguments, asker: &Asker) -> Result<Asked, String> {
    let mut asked = Asked {
        call: Call::GenerateImage,
        model: model_of(arguments.model.as_deref()),
        prompt: arguments.prompt,
        width: arguments.width.unwrap_or(0),
        height: arguments.height.unwrap_or(0),
        count: arguments.count.unwrap_or(1),
        sampling: Sampling {
            steps: arguments.steps,
            seed: arguments.seed,
            negative_prompt: arguments.negative_prompt,
            sampler: arguments.sampler,
            strength: arguments.strength,
            ..Sampling::default()
        },
        encoding: Some(Encoding::Png),
        options: options(),
        of_medium: OfMedium::Image,
        ..Asked::default()
    };
    if let Some(mask) = &arguments.mask {
        let mask = resources::picture(service, "mask", mask, asker).await?;
        asked.mask = Some(mask.into());
    }
    if let Some(image) = &arguments.image {
        let image = resources::picture(service, "image", image, asker).await?;
        match asked.mask.is_some() || asked.sampling.strength.is_some() {
            true => asked.init_image = Some(image),
            false => asked.references = vec![image.into()],
        }
    }
    Ok(asked)
}

async fn asked_video(service: &Service, arguments: VideoArguments, asker: &Asker) -> Result<Asked, String> {
    let init_image = match &arguments.image {
        Some(image) => Some(resources::picture(service, "image", image, asker).await?),
        None => None,
    };
    Ok(Asked {
        call: Call::GenerateVideo,
        model: model_of(arguments.model.as_deref()),
        prompt: arguments.prompt,
        width: arguments.width.unwrap_or(0),
        height: arguments.height.unwrap_or(0),
        sampling: Sampling {
            steps: arguments.steps,
            seed: arguments.seed,
            ..Sampling::default()
        },
        init_image,
        preview_interval_ms: PREVIEW_INTERVAL_MS,
        encoding: Some(Encoding::Mp4),
        options: options(),
        of_medium: OfMedium::Video {
            frames: 0,
            frames_per_second: 0.0,
            seconds: arguments.seconds.unwrap_or(0.0),
            frames_at_a_time: 0,
            end_image: None,
        },
        ..Asked::default()
    })
}

fn asked_music(arguments: MusicArguments) -> Asked {
    Asked {
        call: Call::GenerateAudio,
        model: model_of(arguments.model.as_deref()),
        prompt: arguments.prompt,
        count: 1,
        sampling: Sampling {
            steps: arguments.steps,
            seed: arguments.seed,
            ..Sampling::default()
        },
        encoding: Some(Encoding::Flac),
        options: options(),
        of_medium: OfMedium::Audio(AskedTrack {
            lyrics: arguments.lyrics.unwrap_or_default(),
            seconds: arguments.seconds.unwrap_or(0.0),
            ..AskedTrack::default()
        }),
        ..Asked::default()
    }
}

async fn generated(
    service: &Service,
    asked: Result<Asked, String>,
    wait: bool,
    asker: &Asker,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let asked = match asked {
        Ok(asked) => asked,
        Err(problem) => return Ok(failed_with(problem)),
    };
    if asked.prompt.trim().is_empty() {
        return Err(ErrorData::invalid_params(
            "prompt is missing: say what is to be made",
            None,
        ));
    }
    Ok(match service.generation.generate(asked, &asker.caller).await {
        Ok(started) if wait => awaited(service, started, asker, context).await,
        Ok(started) => begun(&started),
        Err(error) => failed(error.into()),
    })
}

async fn models(service: &Service, asker: &Asker) -> Result<Value, Error> {
    let listing = service.card_memory.list_models(false, &asker.caller).await?;
    let models = listing.models.iter().filter_map(|listed| {
        let details = listed.details.as_ref().ok()?;
        let defaults = &details.defaults;
        let (makes, size) = match &defaults.medium {
            Medium::Image(image) => ("image", json!({"width": image.width, "height": image.height})),
            Medium::Video(film) => (
                "video",
                json!({"width": film.width, "height": film.height, "frames": film.frames,
                    "frames_per_second": film.frames_per_second}),
            ),
            Medium::Audio(track) => ("audio", json!({"seconds": track.seconds})),
        };
        let formats = details.choices.iter().map(|(preset, bytes)| json!({"format": preset.as_str(), "bytes": bytes}));
        Some(json!({
            "id": listed.id, "makes": makes, "family": details.family, "is_default": listed.is_default,
            "resident": !details.resident.is_empty(), "steps": defaults.steps, "size": size, "formats": formats.collect::<Vec<_>>(),
        }))
    });
    Ok(json!({"models": models.collect::<Vec<_>>()}))
}

async fn status(service: &Service) -> Value {
    let status = service.card_memory.status().await;
    let cards = status.report.cards.iter().map(|card| {
        let accounts = card.ledger.accounts();
        let residents = card.ledger.residents().map(|resident| {
            json!({"component": resident.component.name, "bytes": resident.bytes().0, "pinned": resident.pinned})
        });
        json!({
            "id": card.description.id, "name": card.description.name, "ready": card.state.is_ready(), "problem": card.problem,
            "total_bytes": card.ledger.total().0, "free_bytes": accounts.free.0, "foreign_bytes": accounts.foreign.0,
            "policy": policy_name(status.policy), "components": residents.collect::<Vec<_>>(),
        })
    });
    let jobs = status.report.jobs.iter().map(|job| {
        json!({"id": job.id.to_string(), "client": job.client, "state": job.state.as_str(), "model": job.model_key,
            "stage": &*job.stage, "step": job.step, "steps": job.steps, "ahead": job.position})
    });
    json!({"cards": cards.collect::<Vec<_>>(), "jobs": jobs.collect::<Vec<_>>()})
}

async fn what_fits(service: &Service, arguments: ModelArguments, asker: &Asker) -> Result<Value, Error> {
    let planned = Planned::Model(model_of(arguments.model.as_deref()));
    let plan = service.card_memory.plan(planned, "", &asker.caller).await?;
    let report = &plan.report;
    let stages = report.stages.iter().map(|stage| {
        json!({"stage": &*stage.name, "verdict": stage.verdict.as_str(), "component_bytes": stage.component_bytes.0, "scratch_bytes": stage.scratch.0})
    });
    Ok(json!({
        "model": plan.model.key, "card": report.card, "runs_now": report.runs_now, "fits": report.fits,
        "predicted_move_seconds": report.predicted_move_seconds, "stages": stages.collect::<Vec<_>>(),
    }))
}
