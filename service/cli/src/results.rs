//! Results as they arrive, and as files: pictures, films, tracks.

use std::collections::BTreeMap;

use api::v1;
use api::v1::artifact::Format;
use bytes::Bytes;
use media::{films, pictures, tracks};
use model::Covered;

use crate::request::Asked;

/// Most tracks of an item.
const TRACKS_OF_ITEM: usize = 32;
/// Most bytes of a track's name.
const TRACK_NAME_BYTES: usize = 256;
/// Longest side of a picture whose size the model chooses, in pixels.
const MOST_SIDE: u32 = 16_384;
/// Bytes that a file may have beside its pixels or samples, mainly its recipe.
const FILE_BYTES: u64 = 16 << 20;
/// Chunks of fewer bytes count as short: the service itself sends 256 KiB at a time.
const SHORT_CHUNK_BYTES: usize = 64 << 10;
/// Most bytes of a result whose size the model chooses, and of all results of a call.
const RESULT_BYTES: u64 = 64 << 30;

/// Bounds on the results of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounds {
    /// Number of requested items.
    pub(super) items: u32,
    /// Width and height in pixels, and frames; 0: the model chooses.
    pub(super) asked: [u32; 3],
}

impl Bounds {
    /// The bounds of a job of which the request is not known.
    pub(super) const UNKNOWN: Bounds = Bounds {
        items: 1 << 16,
        asked: [0; 3],
    };

    /// The bounds of a request.
    pub(super) fn of(request: &Asked) -> Bounds {
        let (count, asked) = match request {
            Asked::Generate(image) => (image.count, [image.width, image.height, 1]),
            Asked::Video(video) => (video.count, [video.width, video.height, video.frames]),
            Asked::Audio(audio) => (audio.count, [0; 3]),
        };
        Bounds {
            items: count.max(1),
            asked,
        }
    }

    /// The most bytes of a result of a format: twice its pixels or samples, as an encoded file may be larger than these. A
    /// model may round a requested size up, at most to twice that size.
    fn most_bytes(&self, format: &Option<Format>) -> u64 {
        let limits = [MOST_SIDE, MOST_SIDE, u32::MAX];
        let sizes = match format {
            Some(Format::Audio(sound)) => {
                let samples = sound.samples.saturating_mul(u64::from(sound.channels.min(8)));
                return twice(samples.saturating_mul(2));
            }
            Some(Format::Video(film)) => [film.width, film.height, film.frames],
            Some(Format::Image(picture)) => [picture.width, picture.height, 1],
            None => [MOST_SIDE, MOST_SIDE, self.asked[2].max(1)],
        };
        let pixels = (sizes.into_iter().zip(self.asked).zip(limits)).map(|((has, asked), limit)| {
            let most = if asked > 0 { asked.saturating_mul(2) } else { limit };
            u64::from(has.min(most))
        });
        twice(pixels.fold(3, u64::saturating_mul))
    }
}

fn twice(raw_bytes: u64) -> u64 {
    raw_bytes
        .saturating_mul(2)
        .saturating_add(FILE_BYTES)
        .min(RESULT_BYTES)
}

/// One result of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrived {
    media_type: String,
    format: Option<Format>,
    total_bytes: u64,
    /// The most bytes that it may have, whether announced or not.
    most_bytes: u64,
    /// Chunks by offset, in any order of arrival. No memory is reserved for missing ones, as sizes and offsets of the service are not
    /// trusted.
    chunks: BTreeMap<u64, Bytes>,
    covered: Covered,
    /// Offset of a chunk that has none.
    next: u64,
}

/// Results by item and track. A service cannot add more than was requested.
#[derive(Clone, Debug, Default)]
pub(super) struct Results {
    bounds: Bounds,
    arrived: BTreeMap<(u32, String), Arrived>,
    /// Received bytes.
    bytes: u64,
}

impl Results {
    /// An empty set of results, with the bounds of a request.
    pub(super) fn within(bounds: Bounds) -> Results {
        Results {
            bounds,
            ..Results::default()
        }
    }

    /// Adds a chunk.
    ///
    /// # Errors
    /// A message for people, when the chunk was not requested, arrived before, or is beyond the end of its result.
    pub(super) fn add(&mut self, chunk: v1::Artifact) -> Result<(), String> {
        let of = format!("result {}", u64::from(chunk.index) + 1);
        if chunk.index >= self.bounds.items {
            return Err(format!(
                "the service sent {of}, and {} were asked for",
                self.bounds.items
            ));
        }
        let key = (chunk.index, chunk.track);
        if !self.arrived.contains_key(&key)
            && (key.1.len() > TRACK_NAME_BYTES || self.tracks_of(chunk.index) >= TRACKS_OF_ITEM)
        {
            return Err(format!(
                "{of} has more than {TRACKS_OF_ITEM} tracks, or one whose name is too long"
            ));
        }
        let result = self.arrived.entry(key).or_default();
        if result.covered.is_empty() {
            result.most_bytes = self.bounds.most_bytes(&chunk.format);
            if chunk.total_bytes > result.most_bytes {
                return Err(format!(
                    "{of} is announced with {} bytes, and {} are the most for what was asked",
                    chunk.total_bytes, result.most_bytes
                ));
            }
            result.media_type = chunk.media_type;
            result.format = chunk.format;
            result.total_bytes = chunk.total_bytes;
        }
        let start = chunk.offset.unwrap_or(result.next);
        let end = start.saturating_add(chunk.chunk.len() as u64);
        let most = match result.total_bytes {
            0 => result.most_bytes,
            announced => announced,
        };
        if end > most {
            return Err(format!("{of} has more than its {most} bytes"));
        }
        let added = result.covered.add_once(start..end);
        added.map_err(|twice| format!("{of} is damaged: {twice}"))?;
        self.bytes += end - start;
        if self.bytes > RESULT_BYTES {
            return Err(format!("the results have more than {RESULT_BYTES} bytes in all"));
        }
        if !chunk.chunk.is_empty() {
            // A short chunk is copied, as its bytes would keep the memory of the whole message.
            let data = match chunk.chunk.len() < SHORT_CHUNK_BYTES {
                true => Bytes::copy_from_slice(&chunk.chunk),
                false => chunk.chunk,
            };
            result.chunks.insert(start, data);
        }
        result.next = end;
        Ok(())
    }

    /// Item, track and result, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, &Arrived)> {
        let results = self.arrived.iter();
        results.map(|((item, track), result)| (*item, track.as_str(), result))
    }

    fn tracks_of(&self, item: u32) -> usize {
        let tracks = self.arrived.range((item, String::new())..);
        tracks.take_while(|((of, _), _)| *of == item).count()
    }
}

impl Arrived {
    /// The ending of its files where it is a track beside a film.
    pub(super) fn own_ending(&self) -> Option<&'static str> {
        match self.media_type.as_str() {
            "audio/wav" => Some("wav"),
            "audio/flac" => Some("flac"),
            _ => None,
        }
    }

    /// The format of it.
    pub(super) fn format(&self) -> Option<&Format> {
        self.format.as_ref()
    }

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

/// Whether a file begins as its media type does; for unknown types the answer is always yes.
fn is_of_type(file: &[u8], media_type: &str) -> bool {
    match media_type {
        "image/png" | "image/jpeg" | "image/webp" => pictures::media_type(file) == media_type,
        "video/mp4" => films::is_mp4(file),
        "audio/wav" | "audio/flac" => tracks::media_type(file).is_ok_and(|own| own == media_type),
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
        let mut results = Results::within(ONE);
        for chunk in chunks {
            results.add(chunk.clone())?;
        }
        let (_, _, result) = results.iter().next().unwrap();
        result.file()
    }

    const ONE: Bounds = Bounds {
        items: 1,
        asked: [64, 64, 1],
    };

    #[test]
    fn no_more_results_than_requested_are_accepted() {
        let refused = |chunks: &mut dyn Iterator<Item = v1::Artifact>| {
            let mut results = Results::within(ONE);
            chunks.map(|chunk| results.add(chunk)).find_map(Result::err)
        };
        let other = v1::Artifact {
            index: 1,
            ..chunk(None, b"a")
        };
        assert!(
            refused(&mut [other].into_iter())
                .unwrap()
                .contains("result 2, and 1 were asked")
        );
        let mut tracks = (0..33).map(|track| v1::Artifact {
            track: format!("{track:03}"),
            ..chunk(None, b"a")
        });
        assert!(refused(&mut tracks).unwrap().contains("more than 32 tracks"));
        let named = v1::Artifact {
            track: "a".repeat(257),
            ..chunk(None, b"a")
        };
        assert!(
            refused(&mut [named].into_iter())
                .unwrap()
                .contains("name is too long")
        );
        let announced = v1::Artifact {
            total_bytes: 1 << 30,
            ..chunk(None, b"a")
        };
        assert!(
            refused(&mut [announced].into_iter())
                .unwrap()
                .contains("are the most")
        );
        let piece = Bytes::from(vec![0; 1 << 20]);
        let mut endless = (0..1000).map(|_| v1::Artifact {
            total_bytes: 0,
            chunk: piece.clone(),
            ..chunk(None, b"")
        });
        assert!(refused(&mut endless).unwrap().contains("more than its"));
        let mut large = (0..1).map(|_| v1::Artifact {
            total_bytes: 1 << 34,
            format: Some(Format::Image(v1::ImageFormat {
                width: 1 << 30,
                height: 1 << 30,
            })),
            ..chunk(None, b"a")
        });
        assert!(refused(&mut large).unwrap().contains("are the most"));
    }

    #[test]
    fn the_results_of_a_call_have_a_bound_in_all() {
        let mut results = Results {
            bytes: RESULT_BYTES - 1,
            ..Results::within(ONE)
        };
        results.add(chunk(None, b"a")).unwrap();
        let refused = results.add(chunk(None, b"a")).unwrap_err();
        assert!(refused.contains("in all"), "{refused}");
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
            total_bytes: 1 << 24,
            ..chunk(None, b"a")
        };
        assert!(file(&[announced]).unwrap_err().contains("not complete"));
    }

    #[test]
    fn a_file_of_other_bytes_than_its_type_is_refused() {
        let wav = [&b"RIFF"[..], &[0; 4], b"WAVE"].concat();
        let files = [
            ("image/png", &b"\x89PNG\r\n\x1a\n"[..]),
            ("image/jpeg", b"\xff\xd8\xff\xe0"),
            ("image/webp", b"RIFF\0\0\0\0WEBP"),
            ("video/mp4", b"\0\0\0\x18ftyp"),
            ("audio/wav", &wav),
            ("audio/flac", b"fLaC"),
        ];
        for (media_type, _) in files {
            for (other, contents) in files {
                let sent = v1::Artifact {
                    media_type: media_type.to_owned(),
                    total_bytes: 0,
                    ..chunk(None, contents)
                };
                let got = file(&[sent]);
                assert_eq!(
                    got.is_ok(),
                    media_type == other,
                    "{other} as {media_type}: {got:?}"
                );
            }
        }
    }
}
