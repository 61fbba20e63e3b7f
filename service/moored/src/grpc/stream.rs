//! A job's events as a stream: pixels are encoded away from the async threads and cut into chunks.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use engine::job::{JobEvent, JobEventKind};
use engine::queue::Job;
use futures::Stream;
use gpu::Timeline;
use pipelines::{MediaFormat, Piece};
use tonic::Status;

use super::convert::{Converted, convert, event};
use super::encodings::{Encoded, Encodings};
use super::limits::Client;
use super::status::status_of;
use crate::pictures::{self, Recipe};
use crate::proto::v1;
use crate::proto::v1::artifact::Format;
use crate::proto::v1::event::Event as Kind;
use crate::wav;

/// Bytes of one artifact or latent chunk. A stream that is not read holds a few of them.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

pub(super) type EventStream = Pin<Box<dyn Stream<Item = Result<v1::Event, Status>> + Send>>;

/// How results are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Pixels or samples, not encoded.
    #[default]
    Raw,
    /// A picture as PNG; other media raw.
    Png,
    /// A track as WAV; other media raw.
    Wav,
}

/// How the results of a job are sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Output {
    pub(super) encoding: Encoding,
    /// Written into the PNG, and sent as metadata; its seed is replaced by each picture's.
    pub(super) recipe: Recipe,
    pub(super) omit_metadata: bool,
}

/// Encodes results for one client.
pub(super) struct Encoder {
    pub(super) encodings: Arc<Encodings>,
    pub(super) client: Client,
}

/// The events of a job until its end. Dropping the stream drops the job, which cancels it.
pub(super) fn events_of(
    mut job: Job,
    model: v1::ResolvedModel,
    output: Output,
    encoder: Encoder,
) -> EventStream {
    Box::pin(async_stream::try_stream! {
        while let Some(happened) = job.next().await {
            match convert(&happened, &model) {
                Converted::Event(kind) => yield event(&job.id, happened.at_ms, *kind),
                Converted::Failed(error) => Err(status_of(&error))?,
                Converted::Media => {
                    let at_ms = happened.at_ms;
                    let encoded = encode(happened, &output, &encoder).await?;
                    for kind in encoded.chunks().iter().cloned() {
                        yield event(&job.id, at_ms, kind);
                    }
                }
            }
        }
    })
}

/// The chunks of one event: of this stream alone, or shared with others.
enum Sending {
    Own(Vec<Kind>),
    Shared(Arc<Encoded>),
}

impl Sending {
    fn chunks(&self) -> &[Kind] {
        match self {
            Sending::Own(chunks) => chunks,
            Sending::Shared(encoded) => encoded.chunks(),
        }
    }
}

async fn encode(happened: JobEvent, output: &Output, encoder: &Encoder) -> Result<Sending, Status> {
    let internal = |why: String| status_of(&engine::Error::Internal(why));
    match happened.kind {
        JobEventKind::Preview {
            step,
            item,
            width,
            height,
            rgb,
        } => {
            let encoded = tokio::task::spawn_blocking(move || pictures::preview_jpeg(width, height, &rgb));
            let jpeg = encoded.await.map_err(|panic| internal(panic.to_string()))?;
            let jpeg = jpeg.map_err(internal)?.into();
            Ok(Sending::Own(vec![Kind::Preview(v1::Preview {
                jpeg,
                step,
                item,
            })]))
        }
        JobEventKind::Piece { item, seed, piece } if output.keeps(&piece) => {
            artifact(item, seed, piece, output)
                .map(Sending::Own)
                .map_err(internal)
        }
        JobEventKind::Piece { item, seed, piece } => {
            let shared = encoder
                .encodings
                .encode(item, seed, piece, output, encoder.client);
            shared.await.map(Sending::Shared)
        }
        _ => Ok(Sending::Own(Vec::new())),
    }
}

impl Output {
    /// Whether a piece is sent as it is, without a copy.
    fn keeps(&self, piece: &Piece) -> bool {
        match (&piece.format, self.encoding) {
            (MediaFormat::Image { .. }, Encoding::Png) => false,
            (MediaFormat::Audio { .. }, Encoding::Wav) => piece.first > 0,
            _ => true,
        }
    }

    /// Output without a recipe.
    pub(super) fn without_recipe(encoding: Encoding) -> Output {
        Output {
            encoding,
            recipe: Recipe::default(),
            omit_metadata: true,
        }
    }
}

/// A piece of a result as chunks of its artifact.
pub(super) fn artifact(index: u32, seed: u64, piece: Piece, output: &Output) -> Result<Vec<Kind>, String> {
    let timeline = Timeline::begin("encode a result");
    let recipe = Recipe {
        seed,
        ..output.recipe.clone()
    };
    let kept = (!output.omit_metadata).then_some(&recipe);
    let (is_first, is_last) = (piece.first == 0, piece.is_last());
    let whole = piece.format.bytes().ok_or("a result of too many bytes")?;
    let (media_type, file, total) = match (piece.format, output.encoding) {
        (MediaFormat::Image { width, height }, Encoding::Png) => {
            let file = bytes::Bytes::from(pictures::png(width, height, &piece.data, kept)?);
            let total = file.len() as u64;
            ("image/png", file, total)
        }
        (
            MediaFormat::Audio {
                samples_per_second,
                channels,
                ..
            },
            Encoding::Wav,
        ) => {
            let header = wav::header(samples_per_second, channels, whole)?;
            let total = whole + header.len() as u64;
            let file = match is_first {
                true => [&header[..], &piece.data].concat().into(),
                false => piece.data,
            };
            ("audio/wav", file, total)
        }
        (format, _) => (raw_media_type(&format), piece.data, whole),
    };
    let mut first =
        is_first.then(|| Ok::<_, String>((metadata(seed, &piece.format, kept)?, format_out(&piece.format))));
    let mut chunks = Vec::with_capacity(file.len().div_ceil(CHUNK_BYTES));
    for start in (0..file.len()).step_by(CHUNK_BYTES) {
        let end = (start + CHUNK_BYTES).min(file.len());
        let (metadata, format) = first.take().transpose()?.unzip();
        chunks.push(Kind::Artifact(v1::Artifact {
            index,
            media_type: media_type.to_owned(),
            metadata: metadata.unwrap_or_default(),
            chunk: file.slice(start..end),
            total_bytes: total,
            last: is_last && end == file.len(),
            track: piece.track.clone(),
            format,
        }));
    }
    timeline.end();
    Ok(chunks)
}

/// Media type of units as they are.
pub(super) fn raw_media_type(format: &MediaFormat) -> &'static str {
    match format {
        MediaFormat::Image { .. } => "image/x-raw-rgb",
        MediaFormat::Video { .. } => "video/x-raw-rgb",
        MediaFormat::Audio { .. } => "audio/x-raw-s16le",
    }
}

pub(super) fn format_out(format: &MediaFormat) -> Format {
    match *format {
        MediaFormat::Image { width, height } => Format::Image(v1::ImageFormat { width, height }),
        MediaFormat::Video {
            width,
            height,
            frames,
            frames_per_second,
        } => Format::Video(v1::VideoFormat {
            width,
            height,
            frames,
            frames_per_second,
        }),
        MediaFormat::Audio {
            samples_per_second,
            channels,
            samples,
        } => Format::Audio(v1::AudioTrackFormat {
            samples_per_second,
            channels,
            samples,
        }),
    }
}

fn metadata(
    seed: u64,
    format: &MediaFormat,
    recipe: Option<&Recipe>,
) -> Result<HashMap<String, String>, String> {
    let mut metadata = HashMap::from([("seed".to_owned(), seed.to_string())]);
    if let MediaFormat::Image { width, height } | MediaFormat::Video { width, height, .. } = format {
        metadata.insert("width".to_owned(), width.to_string());
        metadata.insert("height".to_owned(), height.to_string());
    }
    if let Some(recipe) = recipe {
        metadata.insert("prompt".to_owned(), recipe.prompt.clone());
        metadata.insert("model".to_owned(), recipe.model_key.clone());
        metadata.insert(
            "recipe".to_owned(),
            serde_json::to_string(recipe).map_err(|e| e.to_string())?,
        );
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunks_of_a_large_picture_add_up_to_its_file() {
        let rgb = bytes::Bytes::from(vec![5_u8; 1024 * 1024 * 3]);
        let output = Output::without_recipe(Encoding::Raw);
        let kinds = artifact(2, 9, Piece::image(1024, 1024, rgb.clone()), &output).unwrap();
        assert_eq!(kinds.len(), (3 << 20) / CHUNK_BYTES);
        let mut joined = Vec::new();
        for (i, kind) in kinds.iter().enumerate() {
            let Kind::Artifact(artifact) = kind else {
                panic!("{kind:?}")
            };
            assert_eq!((artifact.index, artifact.total_bytes), (2, rgb.len() as u64));
            assert_eq!(artifact.last, i + 1 == kinds.len());
            assert_eq!(artifact.metadata.is_empty(), i > 0);
            assert!(
                !artifact.metadata.contains_key("prompt"),
                "metadata was to be left out"
            );
            joined.extend_from_slice(&artifact.chunk);
        }
        assert_eq!(joined, rgb);
    }

    #[test]
    fn pieces_of_a_track_add_up_to_one_wav_file() {
        let format = MediaFormat::Audio {
            samples_per_second: 48_000,
            channels: 2,
            samples: 5,
        };
        let piece = |first, samples: usize| Piece {
            track: "drums".into(),
            format,
            first,
            data: vec![first as u8; 4 * samples].into(),
        };
        let mut file = Vec::new();
        for (piece, last) in [(piece(0, 3), false), (piece(3, 2), true)] {
            let output = Output::without_recipe(Encoding::Wav);
            let kinds = artifact(0, 1, piece, &output).unwrap();
            let [Kind::Artifact(chunk)] = &kinds[..] else {
                panic!("{kinds:?}")
            };
            assert_eq!(
                (chunk.last, chunk.track.as_str(), chunk.total_bytes),
                (last, "drums", 64)
            );
            assert_eq!(chunk.format.is_some(), !last);
            file.extend_from_slice(&chunk.chunk);
        }
        assert_eq!(
            (file.len(), &file[..4], &file[8..12]),
            (64, &b"RIFF"[..], &b"WAVE"[..])
        );
        assert_eq!(file[44..], [[0; 4].repeat(3), [3; 4].repeat(2)].concat());
    }
}
