//! `/v1/images/generations` and `/v1/images/edits`, as OpenAI's clients send them: whole, or as a stream of partial pictures.

use std::convert::Infallible;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::sse::{Event as SentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use calls::{Asked, Encoding, Event, EventKind, OfMedium, Service, Started};
use engine::Error;
use engine::job::{Call, JobEventKind};
use futures::{Stream, StreamExt as _};
use http::StatusCode;
use http::header::ALLOW;
use model::{MediaFormat, Sampler, Sampling};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::errors::{ErrorBody, Failure};
use crate::forms::{Form, Sent, lenient, model_of, prompt_of, size_of};
use crate::results::{Gathered, OutputFormat, base64, gathered, now};
use crate::routes::Client;

/// Most partial pictures of a stream.
const MOST_PARTIALS: u32 = 3;
/// Time between previews of which partial pictures are taken.
const PREVIEW_INTERVAL_MS: u32 = 100;
/// Fields of the service's own requests, as they are called here.
const NAMES: [(&str, &str); 6] = [
    ("init_image", "image"),
    ("references", "image"),
    ("count", "n"),
    ("width", "size"),
    ("height", "size"),
    ("model.", "model"),
];
/// Most pictures of a request.
pub(crate) const MOST_PICTURES: u32 = 64;

/// A request for pictures. Fields of OpenAI's API that a local model has no use for (`quality`, `background`, `style`, `moderation`,
/// `user`) are taken and left out.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct ImageRequest {
    /// What the picture shows.
    pub(crate) prompt: String,
    /// A model of `/v1/models`; with a format: `owner/name+4-bit`. Left out, and for OpenAI's own names: the default model.
    pub(crate) model: Option<String>,
    /// How many pictures.
    #[schema(minimum = 1, maximum = 64)]
    #[serde(deserialize_with = "lenient")]
    pub(crate) n: Option<u32>,
    /// `1024x1024`, or `auto`: the model's default.
    pub(crate) size: Option<String>,
    pub(crate) output_format: Option<OutputFormat>,
    /// `b64_json`, or `url`, which is a `data:` address.
    pub(crate) response_format: Option<ResponseFormat>,
    /// Answer by server-sent events.
    #[serde(deserialize_with = "lenient")]
    pub(crate) stream: Option<bool>,
    /// Partial pictures of a stream, 0 to 3.
    #[schema(maximum = 3)]
    #[serde(deserialize_with = "lenient")]
    pub(crate) partial_images: Option<u32>,
    /// What the picture is led away from; it needs `true_guidance` over 1.
    pub(crate) negative_prompt: Option<String>,
    /// Denoising steps.
    #[serde(deserialize_with = "lenient")]
    pub(crate) steps: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    pub(crate) guidance: Option<f32>,
    /// Classifier-free guidance: twice the time for each step.
    #[serde(alias = "cfg_scale", deserialize_with = "lenient")]
    pub(crate) true_guidance: Option<f32>,
    /// Of models that are sampled in several ways (SDXL): `euler`, `euler_ancestral` or `dpmpp_2m_karras`; others refuse it.
    #[schema(value_type = Option<String>)]
    #[serde(deserialize_with = "lenient")]
    pub(crate) sampler: Option<Sampler>,
    /// Leaves out passes that change less than this, such as 0.08; models that take none refuse it.
    #[serde(deserialize_with = "lenient")]
    pub(crate) step_cache: Option<f32>,
    /// Attention in fp8, on cards that have it: faster, and not quite the same result; models that take none refuse it.
    #[serde(deserialize_with = "lenient")]
    pub(crate) fp8_attention: Option<bool>,
    #[serde(deserialize_with = "lenient")]
    pub(crate) seed: Option<u64>,
    /// Of edits: how strongly to change the picture, over 0 up to 1.
    #[serde(deserialize_with = "lenient")]
    pub(crate) strength: Option<f32>,
}

/// How a picture is in the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    #[default]
    B64Json,
    Url,
}

/// Pictures.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Images {
    /// Unix seconds.
    created: u64,
    data: Vec<Image>,
    output_format: OutputFormat,
    /// `1024x1024`.
    size: String,
    usage: Usage,
    /// Of the first picture; number i of several has this plus i.
    seed: u64,
}

/// A picture, as `b64_json` or as `url`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Image {
    B64Json(String),
    Url(String),
}

/// Tokens: none are counted here.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct Usage {
    total_tokens: u64,
    input_tokens: u64,
    output_tokens: u64,
    input_tokens_details: TokenDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct TokenDetails {
    image_tokens: u64,
    text_tokens: u64,
}

impl ImageRequest {
    fn asked(&self, client: &Client) -> Result<Asked, Failure> {
        let (width, height) = size_of(self.size.as_deref())?;
        let count = self.n.unwrap_or(1);
        if !(1..=MOST_PICTURES).contains(&count) {
            return Err(Failure::field(
                "n",
                format!("{count} is not from 1 to {MOST_PICTURES}"),
            ));
        }
        let partials = self.partials()?;
        Ok(Asked {
            call: Call::GenerateImage,
            model: model_of(self.model.as_deref()),
            prompt: prompt_of(&self.prompt)?,
            width,
            height,
            count,
            sampling: Sampling {
                steps: self.steps,
                guidance: self.guidance,
                negative_prompt: self.negative_prompt.clone(),
                true_guidance: self.true_guidance,
                sampler: self.sampler,
                step_cache: self.step_cache,
                fp8_attention: self.fp8_attention,
                cards: None,
                seed: self.seed,
                max_sequence_length: None,
                strength: self.strength,
            },
            preview_interval_ms: if partials > 0 { PREVIEW_INTERVAL_MS } else { 0 },
            encoding: Some(Encoding::Png),
            options: Some(client.options()),
            of_medium: OfMedium::Image,
            ..Asked::default()
        })
    }

    fn partials(&self) -> Result<u32, Failure> {
        let partials = self.partial_images.unwrap_or(0);
        if partials > MOST_PARTIALS {
            let problem = format!("{partials} is not from 0 to {MOST_PARTIALS}");
            return Err(Failure::field("partial_images", problem));
        }
        Ok(if self.stream == Some(true) { partials } else { 0 })
    }
}

/// Pictures from a prompt.
#[utoipa::path(post, path = "/v1/images/generations", tag = "images", operation_id = "generate_images", request_body = ImageRequest,
    responses((status = 200, description = "With `stream`: server-sent events `image_generation.partial_image` and `.completed`.",
            content((Images = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn generate(
    State(service): State<Service>,
    client: Client,
    Sent(request): Sent<ImageRequest>,
) -> Result<Response, Failure> {
    let asked = request.asked(&client)?;
    let started = service.generation.generate(asked, &client.caller).await;
    let started = started.map_err(|error| Failure::from(error).with_fields_named(&NAMES))?;
    answer("image_generation", &request, started).await
}

/// What may be done at this path: some clients ask before they connect.
#[utoipa::path(options, path = "/v1/images/generations", tag = "images", operation_id = "image_methods", responses((status = 204)))]
pub(crate) async fn options() -> impl IntoResponse {
    (StatusCode::NO_CONTENT, [(ALLOW, "POST, OPTIONS")])
}

/// A form with pictures to edit.
#[derive(ToSchema)]
#[allow(dead_code)] // it describes the form
pub(crate) struct EditForm {
    /// One picture or several, in PNG, JPEG or WebP: what an editing model takes as references. With `mask` or `strength`, the first
    /// is what is changed.
    #[schema(value_type = Vec<String>, format = Binary)]
    image: Vec<Bytes>,
    /// A PNG of the same size: transparent where the picture is to be changed.
    #[schema(value_type = Option<String>, format = Binary)]
    mask: Option<Bytes>,
    #[serde(flatten)]
    fields: ImageRequest,
}

/// Pictures from pictures and a prompt.
#[utoipa::path(post, path = "/v1/images/edits", tag = "images", operation_id = "edit_images",
    request_body(content = EditForm, content_type = "multipart/form-data"),
    responses((status = 200, description = "With `stream`: server-sent events `image_edit.partial_image` and `.completed`.",
            content((Images = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn edit(
    State(service): State<Service>,
    client: Client,
    form: Request,
) -> Result<Response, Failure> {
    let mut form = Form::read(form, &["image", "mask"]).await?;
    let request: ImageRequest = form.fields()?;
    let images = form.files("image");
    if images.is_empty() {
        return Err(Failure::field("image", "is missing: send a picture to edit"));
    }
    let mask = match form.files("mask").pop() {
        Some(mask) => Some(white_where_transparent(mask).await?),
        None => None,
    };
    let has_mask = mask.is_some();
    let plain = request.asked(&client)?;
    let from_first = Asked {
        init_image: images.first().cloned(),
        ..plain.clone()
    };
    let mut images = images.into_iter();
    let init_image = (has_mask || request.strength.is_some())
        .then(|| images.next())
        .flatten();
    let asked = Asked {
        init_image,
        references: images.map(Into::into).collect(),
        mask: mask.map(Into::into),
        ..plain
    };
    let started = match service.generation.generate(asked, &client.caller).await {
        // No editing model: it starts from the picture.
        Err(Error::Invalid(fields))
            if !has_mask && fields.iter().any(|wrong| wrong.field.starts_with("references")) =>
        {
            service.generation.generate(from_first, &client.caller).await
        }
        started => started,
    };
    let started = started.map_err(|error| Failure::from(error).with_fields_named(&NAMES))?;
    answer("image_edit", &request, started).await
}

/// OpenAI's masks are transparent where the picture changes; ours are white there.
async fn white_where_transparent(mask: Bytes) -> Result<Bytes, Failure> {
    let made = tokio::task::spawn_blocking(move || media::pictures::mask_of_transparency(&mask)).await;
    let made = made.map_err(|panic| Error::Internal(panic.to_string()))?;
    made.map(Bytes::from)
        .map_err(|problem| Failure::field("mask", problem))
}

async fn answer(kind: &'static str, request: &ImageRequest, started: Started) -> Result<Response, Failure> {
    let format = request.output_format.unwrap_or_default();
    if request.stream == Some(true) {
        let sent = streamed(kind, format, request.partials()?, started);
        return Ok(Sse::new(sent).keep_alive(KeepAlive::default()).into_response());
    }
    let (files, report) = gathered(started.events).await?;
    let mut data = Vec::new();
    let mut size = String::new();
    for file in files.files() {
        size = size_in_words(file.format.as_ref());
        let encoded = format.of_png(file.data.clone().freeze()).await?;
        let text = base64(&encoded);
        data.push(match request.response_format.unwrap_or_default() {
            ResponseFormat::B64Json => Image::B64Json(text),
            ResponseFormat::Url => Image::Url(format!("data:{};base64,{text}", format.media_type())),
        });
    }
    let images = Images {
        created: now(),
        data,
        output_format: format,
        size,
        usage: Usage::default(),
        seed: report.seed,
    };
    Ok(Json(images).into_response())
}

fn size_in_words(format: Option<&MediaFormat>) -> String {
    match format {
        Some(MediaFormat::Image { width, height } | MediaFormat::Video { width, height, .. }) => {
            format!("{width}x{height}")
        }
        Some(MediaFormat::Audio { .. }) | None => String::new(),
    }
}

/// The events of a stream: some previews, each picture once it is complete, or an error.
fn streamed(
    kind: &'static str,
    format: OutputFormat,
    partials: u32,
    started: Started,
) -> impl Stream<Item = Result<SentEvent, Infallible>> + Send {
    let mut events = started.events;
    async_stream::stream! {
        let (mut files, mut shown, mut steps) = (Gathered::default(), 0, 0);
        while let Some(event) = events.next().await {
            let sent = match event {
                Ok(Event { kind: EventKind::Job(JobEventKind::Step { of, .. }), .. }) => {
                    steps = of;
                    continue;
                }
                Ok(Event { kind: EventKind::Preview { step, item: 0, jpeg }, .. })
                    // Spread over the steps: number k of n comes after k of n + 1 parts of them.
                    if shown < partials && step * (partials + 1) >= (shown + 1) * steps =>
                {
                    shown += 1;
                    Ok(json!({
                        "type": format!("{kind}.partial_image"),
                        "b64_json": base64(&jpeg),
                        "partial_image_index": shown - 1,
                        "created_at": now(),
                        "output_format": "jpeg",
                    }))
                }
                Ok(Event { kind: EventKind::Chunk(chunk), .. }) => {
                    let Some(item) = files.add(chunk) else { continue };
                    let Some(file) = files.item(item) else { continue };
                    let size = size_in_words(file.format.as_ref());
                    let encoded = format.of_png(file.data.clone().freeze()).await;
                    encoded.map(|encoded| json!({
                        "type": format!("{kind}.completed"),
                        "b64_json": base64(&encoded),
                        "created_at": now(),
                        "size": size,
                        "quality": "auto",
                        "background": "opaque",
                        "output_format": format,
                        "usage": Usage::default(),
                    }))
                }
                Ok(Event { .. }) => continue,
                Err(error) => Err(error),
            };
            let is_over = sent.is_err();
            let body = sent.unwrap_or_else(|error| {
                json!({"type": "error", "error": Failure::from(error).words})
            });
            let name = body.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
            yield Ok(SentEvent::default().event(name).data(body.to_string()));
            if is_over {
                break;
            }
        }
    }
}
