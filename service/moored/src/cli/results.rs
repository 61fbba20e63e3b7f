//! Results as they arrive, and as files: pictures, films, tracks.

use std::collections::BTreeMap;

use bytes::Bytes;
use pipelines::Covered;

use crate::pictures;
use crate::proto::v1;
use crate::proto::v1::artifact::Format;

/// One result of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrived {
    media_type: String,
    format: Option<Format>,
    total_bytes: u64,
    /// By offset, in any order. No place is taken for what has not come: sizes and offsets are what the service says.
    chunks: BTreeMap<u64, Bytes>,
    covered: Covered,
    /// Where a chunk belongs that does not say so.
    next: u64,
}

/// Results by item and track.
#[derive(Clone, Debug, Default)]
pub(super) struct Results(BTreeMap<(u32, String), Arrived>);

impl Results {
    /// Puts a chunk in its place.
    ///
    /// # Errors
    /// A message for people, when it is there already, or beyond the end of its result.
    pub(super) fn add(&mut self, chunk: v1::Artifact) -> Result<(), String> {
        let of = format!("result {}", chunk.index);
        let result = self.0.entry((chunk.index, chunk.track)).or_default();
        if result.covered.is_empty() {
            result.media_type = chunk.media_type;
            result.format = chunk.format;
            result.total_bytes = chunk.total_bytes;
        }
        let start = chunk.offset.unwrap_or(result.next);
        let end = start.saturating_add(chunk.chunk.len() as u64);
        if result.total_bytes > 0 && end > result.total_bytes {
            return Err(format!("{of} has more than its {} bytes", result.total_bytes));
        }
        let added = result.covered.add_once(start..end);
        added.map_err(|twice| format!("{of} is damaged: {twice}"))?;
        if !chunk.chunk.is_empty() {
            result.chunks.insert(start, chunk.chunk);
        }
        result.next = end;
        Ok(())
    }

    /// Item, track and result, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, &Arrived)> {
        let results = self.0.iter();
        results.map(|((item, track), result)| (*item, track.as_str(), result))
    }
}

impl Arrived {
    /// The file: raw frames become an animated PNG; an MP4, a picture and a track are files already.
    ///
    /// # Errors
    /// A message for people, when bytes are missing.
    pub(super) fn file(&self) -> Result<Vec<u8>, String> {
        let came: u64 = self.chunks.values().map(|chunk| chunk.len() as u64).sum();
        let is_whole = self.covered.is_whole(if self.total_bytes > 0 {
            self.total_bytes
        } else {
            came
        });
        if came == 0 || !is_whole {
            return Err("the result is not complete: a part of it did not come".to_owned());
        }
        let data = self.chunks.values().flatten().copied().collect::<Vec<u8>>();
        match (&self.format, self.media_type.as_str()) {
            (Some(Format::Video(film)), "video/x-raw-rgb") => pictures::animated_png(
                (film.width, film.height),
                film.frames,
                film.frames_per_second,
                &data,
            ),
            (_, media_type) if is_of_type(&data, media_type) => Ok(data),
            (_, media_type) => Err(format!(
                "the service sent other bytes than {media_type}: is it moored that answers there?"
            )),
        }
    }
}

/// Whether a file begins as its media type does; of types that are not known, any does.
fn is_of_type(file: &[u8], media_type: &str) -> bool {
    let at = |offset: usize, mark: &[u8]| file.get(offset..).is_some_and(|rest| rest.starts_with(mark));
    match media_type {
        "image/png" | "image/apng" => at(0, b"\x89PNG\r\n\x1a\n"),
        "image/jpeg" => at(0, b"\xff\xd8\xff"),
        "image/webp" => at(0, b"RIFF") && at(8, b"WEBP"),
        "video/mp4" => at(4, b"ftyp"),
        "audio/wav" | "audio/x-wav" => at(0, b"RIFF") && at(8, b"WAVE"),
        "audio/flac" => at(0, b"fLaC"),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(offset: Option<u64>, chunk: &[u8]) -> v1::Artifact {
        v1::Artifact {
            media_type: "video/x-test".to_owned(),
            total_bytes: 6,
            chunk: chunk.to_vec().into(),
            offset,
            ..Default::default()
        }
    }

    fn file(chunks: &[v1::Artifact]) -> Result<Vec<u8>, String> {
        let mut results = Results::default();
        for chunk in chunks {
            results.add(chunk.clone())?;
        }
        let (_, _, result) = results.iter().next().unwrap();
        result.file()
    }

    #[test]
    fn chunks_are_joined_at_their_offsets() {
        let shuffled = [
            chunk(Some(4), b"ef"),
            chunk(Some(0), b"ab"),
            chunk(Some(2), b"cd"),
        ];
        assert_eq!(file(&shuffled).unwrap(), b"abcdef");
        let in_order = [chunk(None, b"abc"), chunk(None, b"def")];
        assert_eq!(
            file(&in_order).unwrap(),
            b"abcdef",
            "of a service that does not say where"
        );
    }

    #[test]
    fn repeated_missing_and_surplus_chunks_are_refused() {
        let refused = |chunks: &[v1::Artifact]| file(chunks).unwrap_err();
        assert!(refused(&[chunk(Some(0), b"abcd"), chunk(Some(3), b"def")]).contains("twice"));
        assert!(refused(&[chunk(Some(0), b"ab"), chunk(Some(4), b"ef")]).contains("not complete"));
        assert!(refused(&[chunk(Some(4), b"efg")]).contains("more than its 6 bytes"));
        assert!(refused(&[chunk(Some(u64::MAX), b"a")]).contains("more than its 6 bytes"));
    }

    #[test]
    fn no_announced_size_takes_memory() {
        for offset in [u64::MAX, u64::MAX - 1, 10 << 30] {
            let far = v1::Artifact {
                total_bytes: 0,
                ..chunk(Some(offset), b"a")
            };
            assert!(file(&[far]).is_err(), "{offset}");
        }
        let announced = v1::Artifact {
            total_bytes: 1 << 60,
            ..chunk(None, b"a")
        };
        assert!(file(&[announced]).unwrap_err().contains("not complete"));
    }

    #[test]
    fn a_picture_of_other_bytes_is_refused() {
        let picture = v1::Artifact {
            media_type: "image/png".to_owned(),
            ..chunk(None, b"GIF89a")
        };
        assert!(file(&[picture]).unwrap_err().contains("other bytes"));
    }
}
