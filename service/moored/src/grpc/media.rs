//! Media that clients bring for later requests: a picture, a film, a track. They stay in host memory, counted against
//! their client, until nobody has used them for some time or they are released.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use engine::Error;
use futures::StreamExt as _;
use pipelines::{Clip, MediaFormat};
use tokio::time::Instant;
use tonic::{Status, Streaming};

use super::limits::{Budget, Client, Exceeded, Taken};
use super::status::{client_limit, invalid, short, status_of};
use super::stream::{format_out, raw_media_type};
use crate::pictures;
use crate::proto::v1;
use crate::proto::v1::artifact::Format as OfArtifact;
use crate::proto::v1::media_info::Format;
use crate::wav;

/// Media of a client, as requests use it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Media {
    /// An encoded picture: PNG, JPEG or WebP.
    Picture(Bytes),
    /// A film or a track.
    Clip(Clip),
}

/// The media of all clients, by id.
pub(crate) struct MediaStore {
    bound: Arc<Budget>,
    ttl: Duration,
    kept: Mutex<HashMap<String, Kept>>,
}

struct Kept {
    media: Media,
    until: Instant,
    /// Bytes counted against the client until the media is removed.
    _taken: Taken,
}

impl MediaStore {
    /// A store within these bounds, whose media expire when they are not used for `ttl`.
    pub(crate) fn new(bound: Arc<Budget>, ttl: Duration) -> Arc<MediaStore> {
        Arc::new(MediaStore {
            bound,
            ttl,
            kept: Mutex::default(),
        })
    }

    /// Receives media in chunks, and counts the bytes as they arrive.
    pub(super) async fn receive(
        self: &Arc<MediaStore>,
        mut chunks: Streaming<v1::MediaChunk>,
        client: Client,
    ) -> Result<v1::MediaInfo, Status> {
        let mut taken = self.bound.nothing(client);
        let mut info: Option<v1::MediaInfo> = None;
        let mut data = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if info.is_none() {
                info = chunk.info;
            }
            taken.grow(chunk.chunk.len() as u64).map_err(refused)?;
            data.extend_from_slice(&chunk.chunk);
        }
        data.shrink_to_fit(); // what is held is what is counted
        let data = Bytes::from(data);
        let info = info.ok_or_else(|| status_of(&invalid("info", "is missing on the first chunk")))?;
        let media = tokio::task::spawn_blocking(move || read(&info, data)).await;
        let media = media
            .map_err(|panic| status_of(&Error::Internal(panic.to_string())))?
            .map_err(|problem| status_of(&problem))?;
        Ok(self.put(media, taken))
    }

    fn put(self: &Arc<MediaStore>, media: Media, taken: Taken) -> v1::MediaInfo {
        let id = format!("media-{}", uuid::Uuid::new_v4().simple());
        let info = self.info(&id, &media);
        let until = Instant::now() + self.ttl;
        self.lock().insert(
            id.clone(),
            Kept {
                media,
                until,
                _taken: taken,
            },
        );
        tokio::spawn(expire(Arc::downgrade(self), id, until));
        info
    }

    /// Media by its id; that is a use.
    ///
    /// # Errors
    /// When it was never there, has expired, or was released.
    pub(super) fn get(&self, field: &str, id: &str) -> Result<Media, Error> {
        short(field, id)?;
        let now = Instant::now();
        let mut all = self.lock();
        let kept = all.get_mut(id).filter(|kept| now < kept.until);
        let kept = kept.ok_or_else(|| {
            invalid(
                field,
                format!("there is no media {id:?}: it has expired, was released, or was brought to another service; bring it again"),
            )
        })?;
        kept.until = now + self.ttl;
        Ok(kept.media.clone())
    }

    /// Removes media before it expires; false when there was none. Jobs that use it keep it.
    pub(super) fn release(&self, id: &str) -> bool {
        self.lock().remove(id).is_some()
    }

    fn info(&self, id: &str, media: &Media) -> v1::MediaInfo {
        let (media_type, format, bytes) = match media {
            Media::Picture(data) => (pictures::media_type(data), None, data.len()),
            Media::Clip(clip) => (
                raw_media_type(&clip.format),
                Some(described(&clip.format)),
                clip.data.len(),
            ),
        };
        v1::MediaInfo {
            id: id.to_owned(),
            media_type: media_type.to_owned(),
            format,
            bytes: bytes as u64,
            expires_in_ms: u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// A panic while it is locked leaves the map valid.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops media that is not used until its time is over.
async fn expire(store: Weak<MediaStore>, id: String, mut until: Instant) {
    loop {
        tokio::time::sleep_until(until).await;
        let Some(store) = store.upgrade() else { return };
        let mut all = store.lock();
        match all.get(&id) {
            None => return,
            Some(kept) if kept.until > Instant::now() => until = kept.until,
            Some(_) => {
                all.remove(&id);
                return;
            }
        }
    }
}

/// Media as its description says.
fn read(info: &v1::MediaInfo, data: Bytes) -> Result<Media, Error> {
    let wrong = |problem: String| invalid("chunk", problem);
    match (info.media_type.as_str(), info.format) {
        ("image/png" | "image/jpeg" | "image/webp", _) => {
            pictures::decode(&data, None).map_err(|problem| wrong(problem.to_string()))?;
            Ok(Media::Picture(data))
        }
        ("audio/wav", _) => {
            let (format, samples) = wav::read(&data).map_err(wrong)?;
            clip(format, data.slice(samples))
        }
        (
            "video/x-raw-rgb",
            Some(Format::Video(v1::VideoFormat {
                width,
                height,
                frames,
                frames_per_second,
            })),
        ) => clip(
            MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
            },
            data,
        ),
        (
            "audio/x-raw-s16le",
            Some(Format::Audio(v1::AudioTrackFormat {
                samples_per_second,
                channels,
                samples,
            })),
        ) => clip(
            MediaFormat::Audio {
                samples_per_second,
                channels,
                samples,
            },
            data,
        ),
        ("video/x-raw-rgb" | "audio/x-raw-s16le", _) => Err(invalid(
            "info.format",
            format!(
                "is needed for {}: `video` or `audio`, as in an artifact",
                info.media_type
            ),
        )),
        (other, _) => Err(invalid(
            "info.media_type",
            format!(
                "{:?} is none of image/png, image/jpeg, image/webp, video/x-raw-rgb, audio/wav, audio/x-raw-s16le",
                other.chars().take(64).collect::<String>()
            ),
        )),
    }
}

fn clip(format: MediaFormat, data: Bytes) -> Result<Media, Error> {
    let needed = format.bytes().filter(|bytes| *bytes > 0);
    if needed != Some(data.len() as u64) {
        let needed = needed.map_or("none".to_owned(), |bytes| bytes.to_string());
        return Err(invalid(
            "chunk",
            format!("has {} bytes in all where the format has {needed}", data.len()),
        ));
    }
    Ok(Media::Clip(Clip { format, data }))
}

/// A format as an artifact has it too.
fn described(format: &MediaFormat) -> Format {
    match format_out(format) {
        OfArtifact::Image(image) => Format::Image(image),
        OfArtifact::Video(video) => Format::Video(video),
        OfArtifact::Audio(track) => Format::Audio(track),
    }
}

fn refused(exceeded: Exceeded) -> Status {
    client_limit(match exceeded {
        Exceeded::Client(bound) => format!(
            "media of this client has more than {} in all: release some, or raise limits.media_per_client",
            residency::Bytes(bound)
        ),
        Exceeded::All(bound) => format!(
            "media of all clients has more than {} in all: try again later, or raise limits.media",
            residency::Bytes(bound)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(bound: u64) -> Arc<MediaStore> {
        MediaStore::new(Budget::new(bound, bound), Duration::from_secs(10))
    }

    fn track(samples: u64) -> Media {
        let format = MediaFormat::Audio {
            samples_per_second: 8000,
            channels: 1,
            samples,
        };
        clip(format, vec![0; 2 * samples as usize].into()).unwrap()
    }

    fn put(store: &Arc<MediaStore>, media: Media, bytes: u64) -> String {
        store.put(media, store.bound.take(None, bytes).unwrap()).id
    }

    #[tokio::test(start_paused = true)]
    async fn media_leaves_when_it_was_not_used_for_its_time_and_gives_its_bytes_back() {
        let store = store(100);
        let used = put(&store, track(20), 40);
        let unused = put(&store, track(20), 40);
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(store.get("init_media_id", &used).unwrap(), track(20));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(store.get("init_media_id", &unused).is_err());
        assert_eq!(store.bound.taken(), 40, "the unused one is gone from memory");
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(store.bound.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn released_media_is_gone_at_once() {
        let store = store(100);
        let id = put(&store, track(20), 40);
        assert!(store.release(&id));
        assert!(!store.release(&id));
        assert!(store.get("init_media_id", &id).is_err());
        assert_eq!(store.bound.taken(), 0);
    }

    #[test]
    fn descriptions_that_do_not_fit_the_bytes_are_refused() {
        let info = |media_type: &str, format| v1::MediaInfo {
            media_type: media_type.to_owned(),
            format,
            ..Default::default()
        };
        let film = |frames| {
            Some(Format::Video(v1::VideoFormat {
                width: 2,
                height: 2,
                frames,
                frames_per_second: 8.0,
            }))
        };
        let bytes = |count: usize| Bytes::from(vec![0; count]);
        assert!(read(&info("video/x-raw-rgb", film(3)), bytes(36)).is_ok());
        let wrong = [
            (info("video/x-raw-rgb", film(3)), bytes(35)),
            (info("video/x-raw-rgb", film(0)), bytes(0)),
            (info("video/x-raw-rgb", film(u32::MAX)), bytes(36)),
            (info("video/x-raw-rgb", None), bytes(36)),
            (info("audio/x-raw-s16le", film(3)), bytes(36)),
            (info("video/mp4", film(3)), bytes(36)),
            (info("image/png", None), bytes(36)),
            (info("image", None), bytes(36)),
            (info("audio/wav", None), bytes(36)),
        ];
        for (info, data) in wrong {
            assert!(read(&info, data).is_err(), "{info:?}");
        }
    }

    #[test]
    fn a_wav_file_is_read_as_its_samples() {
        let samples = [1_u8, 2, 3, 4, 5, 6, 7, 8];
        let file = [wav::header(8000, 2, 8).unwrap(), samples.to_vec()].concat();
        let info = v1::MediaInfo {
            media_type: "audio/wav".to_owned(),
            ..Default::default()
        };
        let Media::Clip(clip) = read(&info, file.into()).unwrap() else {
            panic!("a track is a clip")
        };
        assert_eq!(clip.data.as_ref(), samples);
        let expected = MediaFormat::Audio {
            samples_per_second: 8000,
            channels: 2,
            samples: 2,
        };
        assert_eq!(clip.format, expected);
    }
}
