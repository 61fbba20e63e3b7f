//! `/v1/videos`: films, as OpenAI's clients ask for them: a job that is asked about until it is complete, and its content.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest as _, Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use calls::{Asked, AskedOptions, Encoding, ListedJob, OfMedium, Service};
use engine::Error;
use engine::job::Call;
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use http::{HeaderMap, Method};
use model::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::errors::{ErrorBody, ErrorWords, Failure};
use crate::forms::{Form, Sent, decoded, lenient, model_of, prompt_of, size_of};
use crate::jobs::{created, film, films, progress};
use crate::ranges::ranged;
use crate::results::{gathered, now};
use crate::routes::Client;

/// Films of a page, and the most.
const PAGE: usize = 20;
const LONGEST_PAGE: usize = 100;
/// The field with the picture to start from.
const REFERENCE: &str = "input_reference";
/// Fields of the service's own requests, as they are called here.
const NAMES: [(&str, &str); 4] = [
    ("init_image", REFERENCE),
    ("width", "size"),
    ("height", "size"),
    ("model.", "model"),
];
/// How long a delete waits for the end of a film that runs.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A request for a film, as JSON or as a form, in which `input_reference` may be a picture to start from.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct VideoRequest {
    /// What is seen and heard.
    prompt: String,
    /// A model of `/v1/models`. Left out, and for OpenAI's own names: the default model.
    model: Option<String>,
    /// Length: a number, or a text with one.
    #[schema(value_type = Option<String>)]
    #[serde(deserialize_with = "lenient")]
    seconds: Option<f32>,
    /// `1280x720`; left out: the model's default.
    size: Option<String>,
    negative_prompt: Option<String>,
    #[serde(deserialize_with = "lenient")]
    steps: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    guidance: Option<f32>,
    #[serde(alias = "cfg_scale", deserialize_with = "lenient")]
    true_guidance: Option<f32>,
    /// Leaves out passes that change less than this, such as 0.08; models that take none refuse it.
    #[serde(deserialize_with = "lenient")]
    step_cache: Option<f32>,
    /// Attention in fp8, on cards that have it: faster, and not quite the same result; models that take none refuse it.
    #[serde(deserialize_with = "lenient")]
    fp8_attention: Option<bool>,
    /// On how many cards of the service the film is sampled together, 1 or 2: each computes a part of it; models that take one refuse 2.
    #[serde(deserialize_with = "lenient")]
    cards: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    seed: Option<u64>,
    /// A picture to start from, as a `data:` address or base64; or an object with it as `image_url`.
    #[schema(value_type = Option<String>)]
    input_reference: Option<Value>,
    /// Frames, in place of `seconds`.
    #[serde(deserialize_with = "lenient")]
    frames: Option<u32>,
}

/// The same as a form.
#[derive(ToSchema)]
#[allow(dead_code)] // it describes the form
pub(crate) struct VideoForm {
    /// A picture to start from, in PNG, JPEG or WebP; or as text, a `data:` address.
    #[schema(value_type = Option<String>, format = Binary)]
    input_reference: Option<Bytes>,
    #[serde(flatten)]
    fields: VideoRequest,
}

/// A film that is made, or was.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Video {
    id: String,
    object: &'static str,
    model: String,
    /// `queued`, `in_progress`, `completed`, `failed`.
    status: &'static str,
    /// Of 100.
    progress: u32,
    /// `1280x720`.
    size: String,
    /// Length in seconds, as a text.
    seconds: String,
    /// Unix seconds.
    created_at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_at: Option<u64>,
    /// When its content is no longer there.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<u64>,
    error: Option<ErrorWords>,
}

/// A list of films.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Videos {
    object: &'static str,
    data: Vec<Video>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// What was deleted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Which films are listed.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default)]
pub(crate) struct Page {
    /// The film before the first of the page.
    after: Option<String>,
    /// Left out: 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<usize>,
    /// By time; left out: `desc`.
    order: Option<Order>,
}

/// The order of films, by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    Asc,
    Desc,
}

/// Which of what belongs to a film is sent.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default)]
pub(crate) struct Content {
    /// `video`: nothing else is made.
    variant: Option<String>,
}

fn video_out(job: &ListedJob) -> Video {
    let (status, progress) = progress(job);
    let created_at = created(job);
    let info = &job.info;
    let makes = info.makes.unwrap_or_default();
    // As `/v1/models` has it, without its revision, formats and adapters.
    let model = info.model_key.split(['@', '+', '&']).next().unwrap_or_default();
    Video {
        id: info.id.to_string(),
        object: "video",
        model: model.to_owned(),
        size: format!("{}x{}", makes.width, makes.height),
        seconds: format!("{}", (makes.seconds * 100.0).round() / 100.0),
        status,
        progress,
        created_at,
        completed_at: (status == "completed").then_some(created_at + info.age.as_secs()),
        expires_at: job.end.map(|end| now() + end.results_for.as_secs()),
        error: info.error.clone().map(|error| *Failure::from(error).words),
    }
}

/// Begins a film. It goes on when the client leaves, and after a restart of the service.
#[utoipa::path(post, path = "/v1/videos", tag = "videos",
    operation_id = "create_video",
    request_body(content((VideoRequest = "application/json"), (VideoForm = "multipart/form-data"))),
    responses((status = 200, body = Video), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn create(
    State(service): State<Service>,
    client: Client,
    request: Request,
) -> Result<Json<Video>, Failure> {
    let (request, start) = read(request).await?;
    let (width, height) = size_of(request.size.as_deref())?;
    let seconds = request.seconds.unwrap_or(0.0);
    let asked = Asked {
        call: Call::GenerateVideo,
        model: model_of(request.model.as_deref()),
        prompt: prompt_of(&request.prompt)?,
        width,
        height,
        sampling: Sampling {
            steps: request.steps,
            guidance: request.guidance,
            negative_prompt: request.negative_prompt,
            true_guidance: request.true_guidance,
            step_cache: request.step_cache,
            fp8_attention: request.fp8_attention,
            cards: request.cards,
            seed: request.seed,
            ..Sampling::default()
        },
        init_image: start,
        encoding: Some(Encoding::Mp4),
        options: Some(AskedOptions {
            detach: true,
            ..client.options()
        }),
        of_medium: OfMedium::Video {
            frames: request.frames.unwrap_or(0),
            frames_per_second: 0.0,
            seconds: if request.frames.is_some() { 0.0 } else { seconds },
            frames_at_a_time: 0,
            end_image: None,
        },
        ..Asked::default()
    };
    let started = service.generation.generate(asked, &client.caller).await;
    let started = started.map_err(|error| Failure::from(error).with_fields_named(&NAMES))?;
    let job = film(&service, started.job.as_ref(), &client.caller).await?;
    Ok(Json(video_out(&job)))
}

/// A request in either form.
async fn read(request: Request) -> Result<(VideoRequest, Option<Bytes>), Failure> {
    let kind = request.headers().get(CONTENT_TYPE);
    let is_form = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"multipart/"));
    if !is_form {
        let Sent(mut request): Sent<VideoRequest> = Sent::from_request(request, &()).await?;
        let start = match request.input_reference.take() {
            None | Some(Value::Null) => None,
            Some(given) => {
                let text = given.as_str().or_else(|| given.get("image_url")?.as_str());
                let text = text.ok_or_else(|| {
                    Failure::field(
                        REFERENCE,
                        "is no picture: send it as a data: address, ids of files are not known here",
                    )
                })?;
                Some(decoded(REFERENCE, text)?)
            }
        };
        return Ok((request, start));
    }
    let mut form = Form::read(request, &[REFERENCE]).await?;
    let request = form.fields()?;
    Ok((request, form.files(REFERENCE).pop()))
}

/// Films, the newest first.
#[utoipa::path(get, path = "/v1/videos", tag = "videos", operation_id = "list_videos", params(Page),
    responses((status = 200, body = Videos), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn list(
    State(service): State<Service>,
    client: Client,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Json<Videos>, Failure> {
    let Query(page) = page?;
    let mut jobs = films(&service, &client.caller).await;
    if page.order != Some(Order::Asc) {
        jobs.reverse();
    }
    let first = match &page.after {
        Some(after) => {
            let last = jobs.iter().position(|job| job.info.id.to_string() == *after);
            // From the beginning again, a client that goes through all pages would never end.
            1 + last.ok_or_else(|| {
                let problem = format!("there is no film {after} any more: begin again without it");
                Failure::field("after", problem)
            })?
        }
        None => 0,
    };
    let count = page.limit.unwrap_or(PAGE);
    if !(1..=LONGEST_PAGE).contains(&count) {
        return Err(Failure::field(
            "limit",
            format!("{count} is not from 1 to {LONGEST_PAGE}"),
        ));
    }
    let data: Vec<Video> = jobs.iter().skip(first).take(count).map(video_out).collect();
    Ok(Json(Videos {
        object: "list",
        first_id: data.first().map(|video| video.id.clone()),
        last_id: data.last().map(|video| video.id.clone()),
        has_more: first + data.len() < jobs.len(),
        data,
    }))
}

/// A film.
#[utoipa::path(get, path = "/v1/videos/{id}", tag = "videos", operation_id = "get_video", params(("id" = String, Path)),
    responses((status = 200, body = Video), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn one(
    State(service): State<Service>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Video>, Failure> {
    let Path(id) = id?;
    Ok(Json(video_out(&film(&service, &id, &client.caller).await?)))
}

/// The film itself, as MP4 with its sound. Before it is complete, the answer waits for it.
#[utoipa::path(get, path = "/v1/videos/{id}/content", tag = "videos", operation_id = "get_video_content", params(("id" = String, Path), Content),
    responses((status = 200, content_type = "video/mp4", body = Vec<u8>), (status = 206, description = "The range that was asked for",
            content_type = "video/mp4", body = Vec<u8>), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn content(
    State(service): State<Service>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
    content: Result<Query<Content>, QueryRejection>,
    method: Method,
    head: HeaderMap,
) -> Result<Response, Failure> {
    let (Path(id), Query(content)) = (id?, content?);
    if let Some(variant) = content.variant.filter(|variant| variant != "video") {
        let problem = format!("{variant:?} is not made here: leave it out for the film itself");
        return Err(Failure::field("variant", problem));
    }
    let started = service.jobs.fetch(&id, &client.caller)?;
    let (files, _) = gathered(started.events).await?;
    let film = files.files().find(|file| file.media_type == "video/mp4");
    let film = film.ok_or_else(|| Error::JobNotFound(id.clone()))?;
    let fields = [
        (CONTENT_TYPE, "video/mp4".to_owned()),
        (CONTENT_DISPOSITION, format!("attachment; filename=\"{id}.mp4\"")),
    ];
    Ok((fields, ranged(film.data.clone().freeze(), &method, &head)).into_response())
}

/// Ends a film, or forgets one that is complete.
#[utoipa::path(delete, path = "/v1/videos/{id}", tag = "videos", operation_id = "delete_video", params(("id" = String, Path)),
    responses((status = 200, body = Deleted), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn delete(
    State(service): State<Service>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Deleted>, Failure> {
    let Path(id) = id?;
    let job = film(&service, &id, &client.caller).await?;
    let jobs = &service.jobs;
    if !job.info.state.has_ended() {
        // Its end is written before it can be forgotten.
        let ended = jobs.fetch(&id, &client.caller)?;
        jobs.cancel(&id, client.name.clone(), true, &client.caller)
            .await?;
        let _ = tokio::time::timeout(END_LIMIT, gathered(ended.events)).await; // it ends as cancelled
    }
    let deleted = jobs.forget(&id, &client.caller).await?;
    Ok(Json(Deleted {
        id,
        object: "video.deleted",
        deleted,
    }))
}
