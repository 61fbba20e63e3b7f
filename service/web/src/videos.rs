//! `/v1/videos`: films, as OpenAI's clients ask for them: a job that is asked about until it is complete, and its content.

use axum::Json;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{FromRequest as _, Multipart, Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use calls::{Asked, AskedOptions, Encoding, ListedJob, OfMedium, Service};
use engine::Error;
use engine::job::Call;
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use model::Sampling;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::errors::{ErrorBody, ErrorWords, Failure};
use crate::forms::{Form, model_of, size_of};
use crate::jobs::{created, film, films, progress};
use crate::results::{gathered, now};
use crate::routes::Client;

/// Films of a page, and the most.
const PAGE: usize = 20;
const LONGEST_PAGE: usize = 100;

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
    seconds: Option<Seconds>,
    /// `1280x720`; left out: the model's default.
    size: Option<String>,
    negative_prompt: Option<String>,
    steps: Option<u32>,
    guidance: Option<f32>,
    #[serde(alias = "cfg_scale")]
    true_guidance: Option<f32>,
    seed: Option<u64>,
    /// Frames, in place of `seconds`.
    frames: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Seconds {
    Number(f32),
    Text(String),
}

impl Seconds {
    fn value(&self) -> Result<f32, Failure> {
        match self {
            Seconds::Number(seconds) => Ok(*seconds),
            Seconds::Text(text) => text
                .trim()
                .parse()
                .map_err(|_| Failure::field("seconds", format!("{text:?} is no number"))),
        }
    }
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
#[serde(default)]
pub(crate) struct Page {
    /// The film before the first of the page.
    after: Option<String>,
    /// 1 to 100; left out: 20.
    limit: Option<usize>,
    /// `asc` or `desc`, by time; left out: `desc`.
    order: Option<String>,
}

fn video_out(job: &ListedJob) -> Video {
    let (status, progress) = progress(job);
    let created_at = created(job);
    let info = &job.info;
    Video {
        id: info.id.to_string(),
        object: "video",
        model: info.model_key.clone(),
        status,
        progress,
        created_at,
        completed_at: (status == "completed").then_some(created_at + info.age.as_secs()),
        expires_at: job.end.map(|end| now() + end.results_for.as_secs()),
        error: info.error.clone().map(|error| Failure::from(error).words),
    }
}

/// Begins a film. It goes on when the client leaves, and after a restart of the service.
#[utoipa::path(post, path = "/v1/videos", tag = "videos",
    request_body(content((VideoRequest = "application/json"), (VideoRequest = "multipart/form-data"))),
    responses((status = 200, body = Video), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn create(
    State(service): State<Service>,
    client: Client,
    request: Request,
) -> Result<Json<Video>, Failure> {
    let (request, start) = read(request).await?;
    let (width, height) = size_of(request.size.as_deref())?;
    let seconds = request.seconds.as_ref().map_or(Ok(0.0), Seconds::value)?;
    let asked = Asked {
        call: Call::GenerateVideo,
        model: model_of(request.model.as_deref()),
        prompt: request.prompt,
        width,
        height,
        sampling: Sampling {
            steps: request.steps,
            guidance: request.guidance,
            negative_prompt: request.negative_prompt,
            true_guidance: request.true_guidance,
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
    let started = service.generation.generate(asked, &client.caller).await?;
    let job = film(&service, started.job.as_ref()).await?;
    Ok(Json(video_out(&job)))
}

/// A request in either form.
async fn read(request: Request) -> Result<(VideoRequest, Option<Bytes>), Failure> {
    let kind = request.headers().get(CONTENT_TYPE);
    let is_form = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"multipart/"));
    if !is_form {
        let read: Result<Json<VideoRequest>, JsonRejection> = Json::from_request(request, &()).await;
        return Ok((read?.0, None));
    }
    let multipart = Multipart::from_request(request, &()).await;
    let multipart = multipart.map_err(|rejection| Failure::field("body", rejection.body_text()))?;
    let mut form = Form::read(multipart).await?;
    let request = VideoRequest {
        prompt: form.text("prompt").unwrap_or_default(),
        model: form.text("model"),
        seconds: form.text("seconds").map(Seconds::Text),
        size: form.text("size"),
        negative_prompt: form.text("negative_prompt"),
        steps: form.value("steps")?,
        guidance: form.value("guidance")?,
        true_guidance: form.value("true_guidance")?,
        seed: form.value("seed")?,
        frames: form.value("frames")?,
    };
    Ok((request, form.files("input_reference").pop()))
}

/// Films, the newest first.
#[utoipa::path(get, path = "/v1/videos", tag = "videos", params(Page), responses((status = 200, body = Videos)))]
pub(crate) async fn list(
    State(service): State<Service>,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Json<Videos>, Failure> {
    let Query(page) = page?;
    let mut jobs = films(&service).await;
    if page.order.as_deref() != Some("asc") {
        jobs.reverse();
    }
    let first = match &page.after {
        Some(after) => jobs
            .iter()
            .position(|job| job.info.id.to_string() == *after)
            .map_or(0, |at| at + 1),
        None => 0,
    };
    let count = page.limit.unwrap_or(PAGE).clamp(1, LONGEST_PAGE);
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
#[utoipa::path(get, path = "/v1/videos/{id}", tag = "videos", params(("id" = String, Path)),
    responses((status = 200, body = Video), (status = 404, body = ErrorBody)))]
pub(crate) async fn one(
    State(service): State<Service>,
    Path(id): Path<String>,
) -> Result<Json<Video>, Failure> {
    Ok(Json(video_out(&film(&service, &id).await?)))
}

/// The film itself, as MP4 with its sound. Before it is complete, the answer waits for it.
#[utoipa::path(get, path = "/v1/videos/{id}/content", tag = "videos", params(("id" = String, Path)),
    responses((status = 200, content_type = "video/mp4"), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn content(
    State(service): State<Service>,
    client: Client,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let started = service.jobs.fetch(&id, &client.caller)?;
    let (files, _) = gathered(started.events).await?;
    let film = files.files().find(|file| file.media_type == "video/mp4");
    let film = film.ok_or_else(|| Error::JobNotFound(id.clone()))?;
    let head = [
        (CONTENT_TYPE, "video/mp4".to_owned()),
        (CONTENT_DISPOSITION, format!("attachment; filename=\"{id}.mp4\"")),
    ];
    Ok((head, film.data.clone().freeze()).into_response())
}

/// Ends a film, or forgets one that is complete.
#[utoipa::path(delete, path = "/v1/videos/{id}", tag = "videos", params(("id" = String, Path)),
    responses((status = 200, body = Deleted), (status = 404, body = ErrorBody)))]
pub(crate) async fn delete(
    State(service): State<Service>,
    client: Client,
    Path(id): Path<String>,
) -> Result<Json<Deleted>, Failure> {
    let job = film(&service, &id).await?;
    let deleted = match job.info.state.has_ended() {
        true => service.jobs.forget(&id, &client.caller).await?,
        false => {
            service
                .jobs
                .cancel(&id, client.name.clone(), true, &client.caller)
                .await?
        }
    };
    Ok(Json(Deleted {
        id,
        object: "video.deleted",
        deleted,
    }))
}
