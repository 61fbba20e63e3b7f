//! Results as they arrive, and as files: pictures, films, tracks.

use std::collections::BTreeMap;

use crate::pictures;
use crate::proto::v1;
use crate::proto::v1::artifact::Format;

/// One result of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrived {
    media_type: String,
    format: Option<Format>,
    data: Vec<u8>,
}

/// Results by item and track.
#[derive(Clone, Debug, Default)]
pub(super) struct Results(BTreeMap<(u32, String), Arrived>);

impl Results {
    /// Appends a chunk to its result.
    pub(super) fn add(&mut self, chunk: v1::Artifact) {
        let result = self.0.entry((chunk.index, chunk.track)).or_default();
        if result.data.is_empty() {
            (result.media_type, result.format) = (chunk.media_type, chunk.format);
        }
        result.data.extend_from_slice(&chunk.chunk);
    }

    /// Item, track and result, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, &Arrived)> {
        let results = self.0.iter();
        results.map(|((item, track), result)| (*item, track.as_str(), result))
    }
}

impl Arrived {
    /// The file: a film becomes an animated PNG; a picture and a track are files already.
    ///
    /// # Errors
    /// A message for people, when frames are missing.
    pub(super) fn file(&self) -> Result<Vec<u8>, String> {
        match (&self.format, self.media_type.as_str()) {
            (Some(Format::Video(film)), "video/x-raw-rgb") => pictures::animated_png(
                (film.width, film.height),
                film.frames,
                film.frames_per_second,
                &self.data,
            ),
            _ => Ok(self.data.clone()),
        }
    }
}
