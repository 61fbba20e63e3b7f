//! `/v1/music/generations`: tracks. OpenAI's API has no form for them; this one is ours.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use calls::{Asked, AskedTrack, Encoding, OfMedium, Service};
use engine::job::Call;
use http::header::CONTENT_TYPE;
use model::Sampling;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::errors::{ErrorBody, Failure};
use crate::forms::{Sent, lenient, model_of, prompt_of};
use crate::results::{base64, gathered, now};
use crate::routes::Client;

/// A request for tracks.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct MusicRequest {
    /// What is heard: style, instruments, mood.
    prompt: String,
    /// What is sung; left out: nothing.
    lyrics: Option<String>,
    /// A model of `/v1/models`.
    model: Option<String>,
    /// Length; left out: the model's default.
    #[schema(minimum = 0, maximum = 3600)]
    #[serde(deserialize_with = "lenient")]
    seconds: Option<f32>,
    /// How many tracks.
    #[schema(minimum = 1, maximum = 64)]
    #[serde(deserialize_with = "lenient")]
    n: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    steps: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    guidance: Option<f32>,
    #[serde(deserialize_with = "lenient")]
    seed: Option<u64>,
    output_format: Option<SoundFormat>,
    /// `b64_json`, or `file`: the first track itself is the answer.
    response_format: Option<TrackAnswer>,
}

/// The format of sound files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SoundFormat {
    #[default]
    Wav,
    Flac,
}

/// How a track is in the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TrackAnswer {
    #[default]
    B64Json,
    File,
}

/// Tracks.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tracks {
    /// Unix seconds.
    created: u64,
    data: Vec<TrackOut>,
    output_format: SoundFormat,
    /// Of the first track; number i of several has this plus i.
    seed: u64,
}

/// A track.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TrackOut {
    b64_json: String,
}

/// Tracks from a prompt.
#[utoipa::path(post, path = "/v1/music/generations", tag = "music", operation_id = "generate_music", request_body = MusicRequest,
    responses((status = 200, content((Tracks = "application/json"), (Vec<u8> = "audio/wav"), (Vec<u8> = "audio/flac"))), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn generate(
    State(service): State<Service>,
    client: Client,
    Sent(request): Sent<MusicRequest>,
) -> Result<Response, Failure> {
    let format = request.output_format.unwrap_or_default();
    let asked = Asked {
        call: Call::GenerateAudio,
        model: model_of(request.model.as_deref()),
        prompt: prompt_of(&request.prompt)?,
        count: request.n.unwrap_or(1),
        sampling: Sampling {
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed,
            ..Sampling::default()
        },
        encoding: Some(match format {
            SoundFormat::Wav => Encoding::Wav,
            SoundFormat::Flac => Encoding::Flac,
        }),
        options: Some(client.options()),
        of_medium: OfMedium::Audio(AskedTrack {
            lyrics: request.lyrics.unwrap_or_default(),
            seconds: request.seconds.unwrap_or(0.0),
            ..AskedTrack::default()
        }),
        ..Asked::default()
    };
    let started = service.generation.generate(asked, &client.caller).await;
    let started = started
        .map_err(|error| Failure::from(error).with_fields_named(&[("count", "n"), ("model.", "model")]))?;
    let (files, report) = gathered(started.events).await?;
    if request.response_format.unwrap_or_default() == TrackAnswer::File
        && let Some(first) = files.files().next()
    {
        let kind = [(CONTENT_TYPE, first.media_type.clone())];
        return Ok((kind, first.data.clone().freeze()).into_response());
    }
    let data = files.files().map(|file| TrackOut {
        b64_json: base64(&file.data),
    });
    let tracks = Tracks {
        created: now(),
        data: data.collect(),
        output_format: format,
        seed: report.seed,
    };
    Ok(Json(tracks).into_response())
}
