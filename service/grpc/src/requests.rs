//! Converts requests of the protocol to calls of the service. Numbers of enums that are not known were refused before ([`asked`]).

use std::time::Duration;

use api::{Enums, UnknownNumber, v1};
use calls::{
    Asked, AskedAdapter, AskedControl, AskedDecode, AskedEncode, AskedFormats, AskedLoad, AskedOptions,
    AskedReservation, AskedTask, AskedTrack, Caller, Encoding, LatentDescription, MediaDescription, ModelRef,
    OfMedium, PictureInput, Planned, invalid,
};
use engine::Error;
use engine::job::{Call, Priority};
use futures::{Stream, StreamExt as _};
use model::{MediaFormat, RequestError, Sampler, Sampling, StrengthPoint};
use residency::Bytes;
use tonic::{Request, Status, Streaming};
use transport::caller_within;

use crate::status::status_of;

/// The message of a request.
///
/// # Errors
/// When it has a number that is none of its enum's, with the path of its field.
pub(crate) fn asked<T: Enums>(request: Request<T>) -> Result<T, Status> {
    let asked = request.into_inner();
    known(&asked).map_err(|error| status_of(&error))?;
    Ok(asked)
}

/// The messages of a request that is a stream. Each is checked as those of [`asked`].
pub(crate) fn messages_of<T: Enums>(
    request: Request<Streaming<T>>,
) -> impl Stream<Item = Result<T, Status>> + Unpin {
    request.into_inner().map(|message| {
        let message = message?;
        known(&message).map_err(|error| status_of(&error))?;
        Ok(message)
    })
}

/// Refuses a message with numbers that are none of their enums': this version cannot do what they stand for.
///
/// # Errors
/// [`Error::Invalid`] with all such fields.
pub(crate) fn known(message: &impl Enums) -> Result<(), Error> {
    let mut found = Vec::new();
    message.unknown_numbers("", &mut found);
    let refusals = found.into_iter().map(|UnknownNumber { field, number }| {
        let problem = format!(
            "{number} is no value that this version knows: use one that the API lists, or update the service"
        );
        RequestError::new(field, problem)
    });
    let refusals: Vec<RequestError> = refusals.collect();
    match refusals.is_empty() {
        true => Ok(()),
        false => Err(Error::Invalid(refusals)),
    }
}

/// The caller of a request: its address, and how long it waits.
pub(crate) fn caller_of<T>(request: &Request<T>) -> Caller {
    let timeout = request
        .metadata()
        .get("grpc-timeout")
        .and_then(|value| value.to_str().ok())
        .and_then(timeout_of);
    caller_within(request.extensions(), timeout)
}

/// `grpc-timeout`: at most eight digits and a unit.
fn timeout_of(header: &str) -> Option<Duration> {
    let unit = header.chars().last()?;
    let digits = header.strip_suffix(unit).filter(|digits| digits.len() <= 8)?;
    let number: u32 = digits.parse().ok()?;
    let unit = match unit {
        'H' => Duration::from_secs(3600),
        'M' => Duration::from_secs(60),
        'S' => Duration::from_secs(1),
        'm' => Duration::from_millis(1),
        'u' => Duration::from_micros(1),
        'n' => Duration::from_nanos(1),
        _ => return None,
    };
    Some(unit * number)
}

/// A reference to a model. Every field may be empty.
pub(crate) fn model_in(model: Option<v1::ModelRef>) -> ModelRef {
    let model = model.unwrap_or_default();
    let formats = model.quantization.unwrap_or_default();
    ModelRef {
        id: model.id,
        revision: model.revision,
        formats: AskedFormats {
            preset: formats.preset,
            components: formats.components.into_iter().collect(),
        },
        adapters: model.adapters.into_iter().map(adapter_in).collect(),
    }
}

fn adapter_in(adapter: v1::Adapter) -> AskedAdapter {
    let points = adapter.curve.into_iter();
    AskedAdapter {
        id: adapter.id,
        strength: adapter.strength,
        text_strength: adapter.text_strength,
        curve: points.map(|point| (point.position, point.strength)).collect(),
        ignore_unknown: adapter.ignore_unknown,
    }
}

fn picture_in(picture: v1::PictureInput) -> PictureInput {
    PictureInput {
        data: picture.data,
        media_id: picture.media_id,
    }
}

fn control_in(control: v1::Control) -> AskedControl {
    AskedControl {
        id: control.id,
        image: picture_in(control.image.unwrap_or_default()),
        scale: control.scale,
        start: control.start,
        end: control.end,
        mode: control.mode,
    }
}

/// Options of a job.
pub(crate) fn options_in(options: v1::JobOptions) -> AskedOptions {
    AskedOptions {
        client_id: options.client_id,
        priority: priority_in(options.priority),
        patience: options.patience_ms.map(Duration::from_millis),
        allow_low_memory: options.allow_low_memory,
        headroom: Bytes(options.headroom_bytes.unwrap_or(0)),
        card: options.card,
        idempotency_key: options.idempotency_key,
        detach: options.detach,
    }
}

fn priority_in(priority: i32) -> Priority {
    match v1::Priority::try_from(priority).unwrap_or_default() {
        v1::Priority::Low => Priority::Low,
        v1::Priority::High => Priority::High,
        v1::Priority::Normal | v1::Priority::Unspecified => Priority::Normal,
    }
}

/// A request with the fields that those of all media have under the same names, and these.
macro_rules! asked {
    ($request:ident, $($field:ident: $value:expr),* $(,)?) => {
        Asked {
            model: model_in($request.model),
            prompt: $request.prompt,
            sampling: api::sampling_in!(Sampling, $request),
            count: $request.count,
            init_latent: named($request.init_latent_id),
            init_media: named($request.init_media_id),
            keep_latent: $request.keep_latent,
            latent_only: $request.latent_only,
            omit_metadata: $request.omit_metadata,
            options: $request.options.map(options_in),
            $($field: $value,)*
            ..Asked::default()
        }
    };
}

/// `None` for an empty id.
fn named(id: String) -> Option<String> {
    Some(id).filter(|id| !id.is_empty())
}

fn sampler_in(sampler: i32) -> Option<Sampler> {
    match v1::Sampler::try_from(sampler).unwrap_or_default() {
        v1::Sampler::Unspecified => None,
        v1::Sampler::Euler => Some(Sampler::Euler),
        v1::Sampler::EulerAncestral => Some(Sampler::EulerAncestral),
        v1::Sampler::Dpmpp2mKarras => Some(Sampler::Dpmpp2mKarras),
    }
}

/// A request for pictures.
pub(crate) fn image_in(request: v1::GenerateImageRequest) -> Asked {
    let (sampler, fp8_attention) = (sampler_in(request.sampler), request.fp8_attention);
    let encoding = match v1::OutputFormat::try_from(request.output).unwrap_or_default() {
        v1::OutputFormat::RawRgb => Encoding::Raw,
        v1::OutputFormat::Png | v1::OutputFormat::Unspecified => Encoding::Png,
    };
    let mut asked = asked! {
        request,
        call: Call::GenerateImage,
        width: request.width,
        height: request.height,
        init_image: request.init_image,
        mask: request.mask.map(picture_in),
        references: request.references.into_iter().map(picture_in).collect(),
        controls: request.controls.into_iter().map(control_in).collect(),
        preview_interval_ms: request.preview_interval_ms,
        encoding: Some(encoding),
        of_medium: OfMedium::Image,
    };
    asked.sampling.sampler = sampler;
    asked.sampling.fp8_attention = fp8_attention;
    asked
}

/// A request for films.
pub(crate) fn film_in(request: v1::GenerateVideoRequest) -> Asked {
    let (fp8_attention, cards) = (request.fp8_attention, request.cards);
    let mut asked = asked! {
        request,
        call: Call::GenerateVideo,
        width: request.width,
        height: request.height,
        init_image: request.init_image,
        preview_interval_ms: request.preview_interval_ms,
        encoding: Some(film_encoding_in(request.output)),
        of_medium: OfMedium::Video {
            frames: request.frames,
            frames_per_second: request.frames_per_second,
            seconds: request.seconds,
            frames_at_a_time: request.frames_at_a_time,
            end_image: request.end_image.map(picture_in),
        },
    };
    asked.sampling.fp8_attention = fp8_attention;
    asked.sampling.cards = cards;
    asked
}

/// A request for tracks.
pub(crate) fn track_in(mut request: v1::GenerateAudioRequest) -> Asked {
    let of_medium = OfMedium::Audio(take_track(&mut request));
    let encoding = match v1::AudioFormat::try_from(request.output).unwrap_or_default() {
        v1::AudioFormat::Unspecified => None,
        v1::AudioFormat::RawS16le => Some(Encoding::Raw),
        v1::AudioFormat::Flac => Some(Encoding::Flac),
        v1::AudioFormat::WavAndFlac => Some(Encoding::WavAndFlac),
        v1::AudioFormat::Wav => Some(Encoding::Wav),
    };
    asked! {
        request,
        call: Call::GenerateAudio,
        encoding: encoding,
        of_medium: of_medium,
    }
}

/// The encoding of a film.
pub(crate) fn film_encoding_in(asked: i32) -> Encoding {
    match v1::FilmFormat::try_from(asked).unwrap_or_default() {
        v1::FilmFormat::Mp4 => Encoding::Mp4,
        v1::FilmFormat::RawFramesAndMp4 => Encoding::FramesAndMp4,
        v1::FilmFormat::Unspecified | v1::FilmFormat::RawFrames => Encoding::Raw,
    }
}

/// Takes the fields of tracks out of a request.
fn take_track(request: &mut v1::GenerateAudioRequest) -> AskedTrack {
    let v1::GenerateAudioRequest {
        lyrics,
        tracks,
        reference_media_id,
        key,
        time_signature,
        language,
        strengths,
        ..
    } = request;
    AskedTrack {
        lyrics: std::mem::take(lyrics),
        seconds: request.seconds,
        task: task_in(request.task),
        tracks: std::mem::take(tracks),
        window_start_seconds: request.window_start_seconds,
        window_end_seconds: request.window_end_seconds,
        reference_media: named(std::mem::take(reference_media_id)),
        beats_per_minute: request.beats_per_minute,
        key: std::mem::take(key),
        time_signature: std::mem::take(time_signature),
        language: std::mem::take(language),
        strengths: std::mem::take(strengths).into_iter().map(strength_in).collect(),
    }
}

fn strength_in(point: v1::StrengthAt) -> StrengthPoint {
    StrengthPoint {
        seconds: point.seconds,
        strength: point.strength,
    }
}

fn task_in(task: i32) -> AskedTask {
    match v1::AudioTask::try_from(task).unwrap_or_default() {
        v1::AudioTask::Unspecified => AskedTask::TextToMusic,
        v1::AudioTask::Repaint => AskedTask::Repaint,
        v1::AudioTask::Cover => AskedTask::Cover,
        v1::AudioTask::Extract => AskedTask::Extract,
        v1::AudioTask::Lego => AskedTask::Lego,
        v1::AudioTask::Complete => AskedTask::Complete,
    }
}

/// A picture to be encoded.
pub(crate) fn encode_in(request: v1::EncodeImageRequest) -> AskedEncode {
    AskedEncode {
        model: model_in(request.model),
        image: request.image.unwrap_or_default(),
        width: request.width,
        height: request.height,
        seed: request.seed,
        options: request.options.map(options_in),
    }
}

/// A latent to be decoded.
pub(crate) fn decode_in(request: v1::DecodeLatentRequest) -> AskedDecode {
    AskedDecode {
        model: model_in(request.model),
        latent_id: request.latent_id,
        raw: request.output == v1::OutputFormat::RawRgb as i32,
        film: film_encoding_in(request.film_output),
        options: request.options.map(options_in),
    }
}

/// The description of an uploaded latent.
pub(crate) fn latent_in(info: v1::LatentInfo) -> LatentDescription {
    let tensors = info.tensors.into_iter();
    LatentDescription {
        decoder_id: info.vae_id,
        dtype: info.dtype,
        shape: info.shape,
        tensors: tensors.map(|tensor| (tensor.name, tensor.shape)).collect(),
    }
}

/// The description of uploaded media.
pub(crate) fn media_in(info: v1::MediaInfo) -> MediaDescription {
    use v1::media_info::Format;
    MediaDescription {
        media_type: info.media_type,
        format: info.format.map(|format| match format {
            Format::Image(v1::ImageFormat { width, height }) => MediaFormat::Image { width, height },
            Format::Video(v1::VideoFormat {
                width,
                height,
                frames,
                frames_per_second,
                // A film to start from is frames alone.
                sound: _,
            }) => MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
                sound: None,
            },
            Format::Audio(v1::AudioTrackFormat {
                samples_per_second,
                channels,
                samples,
            }) => MediaFormat::Audio {
                samples_per_second,
                channels,
                samples,
            },
        }),
    }
}

/// A model to be loaded.
pub(crate) fn load_in(request: v1::LoadRequest) -> AskedLoad {
    AskedLoad {
        model: model_in(request.model),
        components: request.components,
        replace: request.replace.map(|old| model_in(Some(old))),
        prove: request.prove,
        options: request.options.map(options_in),
    }
}

/// The request to plan; a request for a picture if there is none.
pub(crate) fn planned_in(request: Option<v1::plan_request::Request>) -> Planned {
    use v1::plan_request::Request as Named;
    let asked = match request.unwrap_or(Named::Generate(v1::GenerateImageRequest::default())) {
        Named::Generate(image) => image_in(image),
        Named::Video(film) => film_in(film),
        Named::Audio(track) => track_in(track),
        Named::Model(model) => return Planned::Model(model_in(Some(model))),
    };
    Planned::Request(Box::new(asked))
}

/// A reservation of memory.
///
/// # Errors
/// When the time is no duration.
pub(crate) fn reservation_in(request: v1::ReserveRequest) -> Result<AskedReservation, Error> {
    Ok(AskedReservation {
        bytes: Bytes(request.bytes),
        ttl: ttl_in(request.ttl)?,
        card: request.card,
        label: request.label,
        reservation_id: request.reservation_id,
        process_id: request.process_id,
    })
}

/// A time to live.
///
/// # Errors
/// When it is no duration.
pub(crate) fn ttl_in(asked: Option<prost_types::Duration>) -> Result<Option<Duration>, Error> {
    let Some(asked) = asked else { return Ok(None) };
    // The conversion negates negative numbers, and the least number has no positive counterpart.
    let is_negative = asked.seconds < 0 || asked.nanos < 0;
    let duration = (!is_negative).then(|| Duration::try_from(asked).ok()).flatten();
    let wrong = || {
        let (seconds, nanos) = (asked.seconds, asked.nanos);
        invalid(
            "ttl",
            format!(
                "{seconds} s and {nanos} ns is no time to live: set a positive duration, or leave it out for the default"
            ),
        )
    };
    duration.map(Some).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_enums_that_are_not_known_are_refused_by_their_fields() {
        let options = |priority| {
            Some(v1::JobOptions {
                priority,
                ..v1::JobOptions::default()
            })
        };
        let image = |output, priority| v1::GenerateImageRequest {
            output,
            options: options(priority),
            ..v1::GenerateImageRequest::default()
        };
        let fields = |refused: Result<(), Error>| match refused {
            Ok(()) => Vec::new(),
            Err(Error::Invalid(fields)) => fields.into_iter().map(|wrong| wrong.field).collect(),
            Err(other) => panic!("{other}"),
        };
        assert!(fields(known(&image(2, 3))).is_empty());
        assert_eq!(fields(known(&image(-1, 99))), ["output", "options.priority"]);
        let decode = v1::DecodeLatentRequest {
            film_output: 77,
            ..v1::DecodeLatentRequest::default()
        };
        assert_eq!(fields(known(&decode)), ["film_output"]);
        let track = v1::GenerateAudioRequest {
            task: 99,
            ..v1::GenerateAudioRequest::default()
        };
        let plan = v1::PlanRequest {
            request: Some(v1::plan_request::Request::Audio(track.clone())),
            ..v1::PlanRequest::default()
        };
        assert_eq!(fields(known(&plan)), ["audio.task"]);
        let segment = v1::AudioSegment {
            start: 9,
            track: Some(track),
        };
        let message = v1::StreamAudioRequest {
            message: Some(v1::stream_audio_request::Message::Segment(segment)),
        };
        assert_eq!(fields(known(&message)), ["segment.track.task", "segment.start"]);
    }

    #[test]
    fn a_film_is_sampled_on_as_many_cards_as_it_says() {
        for cards in [None, Some(0), Some(2)] {
            let request = v1::GenerateVideoRequest {
                cards,
                ..v1::GenerateVideoRequest::default()
            };
            assert_eq!(film_in(request).sampling.cards, cards);
        }
    }

    #[test]
    fn timeouts_are_read_in_every_unit() {
        assert_eq!(timeout_of("5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout_of("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(timeout_of("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(timeout_of("x"), None);
        assert_eq!(timeout_of(""), None);
        assert_eq!(
            timeout_of("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        assert_eq!(timeout_of("9999999999999999999S"), None);
    }

    #[test]
    fn a_time_to_live_that_is_no_duration_is_refused_with_a_remedy() {
        let duration = |seconds, nanos| prost_types::Duration { seconds, nanos };
        assert_eq!(ttl_in(Some(duration(2, 0))), Ok(Some(Duration::from_secs(2))));
        assert_eq!(ttl_in(None), Ok(None));
        for wrong in [duration(-1, 0), duration(0, -1), duration(i64::MIN, 0)] {
            let refused = ttl_in(Some(wrong)).unwrap_err().to_string();
            assert!(
                refused.starts_with("ttl: ") && refused.contains("leave it out"),
                "{refused}"
            );
        }
    }
}
