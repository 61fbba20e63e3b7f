//! A job's events as a stream: pixels are encoded away from the async threads and cut into chunks.

use std::collections::HashMap;
use std::pin::Pin;

use bytes::Bytes;
use engine::job::{JobEvent, JobEventKind};
use engine::queue::Job;
use futures::Stream;
use gpu::Timeline;
use tonic::Status;

use super::convert::{Converted, convert, event};
use super::status::status_of;
use crate::pictures::{self, Recipe};
use crate::proto::v1;
use crate::proto::v1::event::Event as Kind;

/// Bytes of one artifact or latent chunk.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

pub(super) type EventStream = Pin<Box<dyn Stream<Item = Result<v1::Event, Status>> + Send>>;

/// How pictures are sent.
#[derive(Clone, Debug)]
pub(super) struct Output {
    pub(super) raw: bool,
    /// Goes into the PNG and, as text, beside it; the seed is each picture's own.
    pub(super) recipe: Recipe,
    pub(super) omit_metadata: bool,
}

/// The events of a job until its end. Dropping the stream drops the job, which cancels it.
pub(super) fn events_of(mut job: Job, model: v1::ResolvedModel, output: Output) -> EventStream {
    Box::pin(async_stream::try_stream! {
        while let Some(happened) = job.next().await {
            match convert(&happened, &model) {
                Converted::Event(kind) => yield event(&job.id, happened.at_ms, *kind),
                Converted::Failed(error) => Err(status_of(&error))?,
                Converted::Pixels => {
                    let at_ms = happened.at_ms;
                    for kind in encode(happened, output.clone()).await? {
                        yield event(&job.id, at_ms, kind);
                    }
                }
            }
        }
    })
}

async fn encode(happened: JobEvent, output: Output) -> Result<Vec<Kind>, Status> {
    let encoded = tokio::task::spawn_blocking(move || match happened.kind {
        JobEventKind::Preview {
            step,
            picture,
            width,
            height,
            rgb,
        } => {
            let jpeg = pictures::preview_jpeg(width, height, &rgb)?.into();
            Ok(vec![Kind::Preview(v1::Preview { jpeg, step, picture })])
        }
        JobEventKind::Picture {
            picture,
            seed,
            width,
            height,
            rgb,
        } => artifact(picture, seed, width, height, rgb, output),
        _ => Ok(Vec::new()),
    });
    let internal = |why: String| status_of(&engine::Error::Internal(why));
    encoded
        .await
        .map_err(|panic| internal(panic.to_string()))?
        .map_err(internal)
}

fn artifact(
    index: u32,
    seed: u64,
    width: u32,
    height: u32,
    rgb: Bytes,
    output: Output,
) -> Result<Vec<Kind>, String> {
    let recipe = Recipe {
        seed,
        width,
        height,
        ..output.recipe
    };
    let mut metadata = HashMap::from([
        ("width".to_owned(), width.to_string()),
        ("height".to_owned(), height.to_string()),
        ("seed".to_owned(), seed.to_string()),
    ]);
    let timeline = Timeline::begin("encode a picture");
    let kept = (!output.omit_metadata).then_some(&recipe);
    if let Some(recipe) = kept {
        metadata.insert("prompt".to_owned(), recipe.prompt.clone());
        metadata.insert("model".to_owned(), recipe.model_key.clone());
        metadata.insert(
            "recipe".to_owned(),
            serde_json::to_string(recipe).map_err(|e| e.to_string())?,
        );
    }
    let (media_type, file) = if output.raw {
        ("image/x-raw-rgb", rgb)
    } else {
        (
            "image/png",
            Bytes::from(pictures::png(width, height, &rgb, kept)?),
        )
    };
    let total = file.len();
    let mut chunks = Vec::with_capacity(total.div_ceil(CHUNK_BYTES));
    for start in (0..total).step_by(CHUNK_BYTES) {
        let end = (start + CHUNK_BYTES).min(total);
        chunks.push(Kind::Artifact(v1::Artifact {
            index,
            media_type: media_type.to_owned(),
            metadata: if start == 0 {
                std::mem::take(&mut metadata)
            } else {
                HashMap::new()
            },
            chunk: file.slice(start..end),
            total_bytes: total as u64,
            last: end == total,
        }));
    }
    timeline.end();
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_picture_is_cut_and_adds_up() {
        let rgb = Bytes::from(vec![5_u8; 1024 * 1024 * 3]);
        let output = Output {
            raw: true,
            recipe: Recipe::default(),
            omit_metadata: true,
        };
        let kinds = artifact(2, 9, 1024, 1024, rgb.clone(), output).unwrap();
        assert_eq!(kinds.len(), 3);
        let mut joined = Vec::new();
        for (i, kind) in kinds.iter().enumerate() {
            let Kind::Artifact(artifact) = kind else {
                panic!("{kind:?}")
            };
            assert_eq!((artifact.index, artifact.total_bytes), (2, rgb.len() as u64));
            assert_eq!(artifact.last, i == 2);
            assert_eq!(artifact.metadata.is_empty(), i > 0);
            assert!(
                !artifact.metadata.contains_key("prompt"),
                "metadata was to be left out"
            );
            joined.extend_from_slice(&artifact.chunk);
        }
        assert_eq!(joined, rgb);
    }
}
