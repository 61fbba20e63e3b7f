//! The results of a job as whole files, and pictures in the formats that are asked for.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::{Bytes, BytesMut};
use calls::{Chunk, Event, EventKind, Events};
use engine::Error;
use engine::job::{JobEventKind, JobReport};
use futures::StreamExt as _;
use media::pictures::{PictureFormat, encode_as};
use model::MediaFormat;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A file that a job has made.
#[derive(Clone, Debug, Default)]
pub(crate) struct File {
    pub(crate) media_type: String,
    pub(crate) format: Option<MediaFormat>,
    pub(crate) data: BytesMut,
}

/// The files of a job, as far as they have come: by item and track.
#[derive(Debug, Default)]
pub(crate) struct Gathered(BTreeMap<(u32, String), File>);

impl Gathered {
    /// Adds a chunk. Returns the number of its item once that is complete.
    pub(crate) fn add(&mut self, chunk: Chunk) -> Option<u32> {
        let file = self.0.entry((chunk.item, chunk.track)).or_default();
        if let Some(head) = chunk.head {
            file.media_type = chunk.media_type.into_owned();
            file.format = Some(head.format);
        }
        file.data.extend_from_slice(&chunk.data);
        chunk.is_last.then_some(chunk.item)
    }

    /// The first file of an item.
    pub(crate) fn item(&self, item: u32) -> Option<&File> {
        let of_item = self.0.range((item, String::new())..).next();
        of_item.filter(|((of, _), _)| *of == item).map(|(_, file)| file)
    }

    /// All files, in order.
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.0.values()
    }
}

/// All files of a job, and its report, once it has ended.
///
/// # Errors
/// That of the job.
pub(crate) async fn gathered(mut events: Events) -> Result<(Gathered, JobReport), Error> {
    let mut gathered = Gathered::default();
    while let Some(event) = events.next().await {
        match event? {
            Event {
                kind: EventKind::Chunk(chunk),
                ..
            } => {
                gathered.add(chunk);
            }
            Event {
                kind: EventKind::Job(JobEventKind::Done(report)),
                ..
            } => return Ok((gathered, JobReport::clone(&report))),
            Event { .. } => {}
        }
    }
    Err(Error::ShuttingDown) // a job's stream ends without its end where the service ends
}

/// The format of picture files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OutputFormat {
    #[default]
    Png,
    #[serde(alias = "jpg")]
    Jpeg,
    /// Lossless.
    Webp,
}

impl OutputFormat {
    /// Its media type.
    pub(crate) fn media_type(self) -> &'static str {
        match self {
            OutputFormat::Png => "image/png",
            OutputFormat::Jpeg => "image/jpeg",
            OutputFormat::Webp => "image/webp",
        }
    }

    /// A PNG of ours in this format, with its recipe.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub(crate) async fn of_png(self, png: Bytes) -> Result<Bytes, Error> {
        let format = match self {
            OutputFormat::Png => return Ok(png),
            OutputFormat::Jpeg => PictureFormat::Jpeg,
            OutputFormat::Webp => PictureFormat::WebP,
        };
        let encoded = tokio::task::spawn_blocking(move || encode_as(format, &png)).await;
        let encoded = encoded.map_err(|panic| Error::Internal(panic.to_string()))?;
        encoded.map(Bytes::from).map_err(Error::Internal)
    }
}

/// Bytes as JSON carries them.
pub(crate) fn base64(data: &[u8]) -> String {
    BASE64_STANDARD.encode(data)
}

/// Unix seconds.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
