//! Media that clients upload for later requests: a picture, a film, a track. They stay in host memory, counted against
//! their client, until nobody has used them for some time or they are released.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use engine::Error;
use engine::job::Reach;
use media::CancelToken;
use media::pictures;
use media::tracks::{self, TrackError, TrackFormat};
use model::{Clip, MediaFormat};
use tokio::time::Instant;

use crate::budget::{Budget, Client, Exceeded, Taken};
use crate::chunks::raw_media_type;
use crate::errors::{invalid, short};
use crate::threads::Turns;

/// Least bytes that each counts, as its entry and the task that expires it take memory too.
const LEAST_BYTES: u64 = 4 << 10;

/// Media of a client, as requests use it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Media {
    /// An encoded picture: PNG, JPEG or WebP.
    Picture(Bytes),
    /// A film or a track.
    Clip(Clip),
}

/// A client's description of media that it uploads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MediaDescription {
    /// `image/png`, `audio/wav`, …
    pub media_type: String,
    /// For raw pixels and samples: their format, which they do not contain.
    pub format: Option<MediaFormat>,
}

/// Stored media.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptMedia {
    pub id: String,
    pub media_type: &'static str,
    /// Format of a film or a track.
    pub format: Option<MediaFormat>,
    pub bytes: u64,
    /// Time without a use after which it is dropped.
    pub ttl: Duration,
}

/// The media of all clients, by id.
pub(crate) struct MediaStore {
    bound: Arc<Budget>,
    ttl: Duration,
    kept: Mutex<HashMap<String, Kept>>,
}

struct Kept {
    media: Media,
    /// Whose it is.
    account: String,
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

    /// Begins the upload of media.
    pub(crate) fn upload(
        self: &Arc<MediaStore>,
        client: Client,
        account: String,
        decoding: &Turns,
    ) -> MediaUpload {
        MediaUpload {
            store: self.clone(),
            client,
            account,
            decoding: decoding.clone(),
            taken: self.bound.nothing(client),
            description: None,
            data: Vec::new(),
        }
    }

    fn put(
        self: &Arc<MediaStore>,
        media: Media,
        account: String,
        mut taken: Taken,
    ) -> Result<KeptMedia, Error> {
        taken.at_least(LEAST_BYTES).map_err(refused)?;
        let id = format!("media-{}", uuid::Uuid::new_v4().simple());
        let kept = self.described(&id, &media);
        let until = Instant::now() + self.ttl;
        self.lock().insert(
            id.clone(),
            Kept {
                media,
                account,
                until,
                _taken: taken,
            },
        );
        tokio::spawn(expire(Arc::downgrade(self), id, until));
        Ok(kept)
    }

    /// Media by its id. This renews its time to live.
    ///
    /// # Errors
    /// When it was never there, has expired, was released, or is out of reach.
    pub(crate) fn get(&self, field: &str, id: &str, reach: &Reach) -> Result<Media, Error> {
        short(field, id)?;
        let now = Instant::now();
        let mut all = self.lock();
        let kept = all
            .get_mut(id)
            .filter(|kept| now < kept.until && reach.has(&kept.account));
        let kept = kept.ok_or_else(|| {
            invalid(
                field,
                format!("there is no media {id:?}: it has expired, was released, or was uploaded to another service; upload it again"),
            )
        })?;
        kept.until = now + self.ttl;
        Ok(kept.media.clone())
    }

    /// A track by its id. This renews its time to live.
    ///
    /// # Errors
    /// As [`MediaStore::get`], and when the media is no track.
    pub(crate) fn track(&self, field: &str, id: &str, reach: &Reach) -> Result<Clip, Error> {
        match self.get(field, id, reach)? {
            Media::Clip(clip) if matches!(clip.format, MediaFormat::Audio { .. }) => Ok(clip),
            Media::Clip(_) | Media::Picture(_) => Err(invalid(
                field,
                "is media of another kind: name the id of an uploaded track",
            )),
        }
    }

    /// Removes media before it expires; false when there was none. Jobs that use the media keep them.
    pub(crate) fn release(&self, id: &str, reach: &Reach) -> bool {
        let mut all = self.lock();
        let is_there = all.get(id).is_some_and(|kept| reach.has(&kept.account));
        is_there && all.remove(id).is_some()
    }

    fn described(&self, id: &str, media: &Media) -> KeptMedia {
        let (media_type, format, bytes) = match media {
            Media::Picture(data) => (pictures::media_type(data), None, data.len()),
            Media::Clip(clip) => (raw_media_type(&clip.format), Some(clip.format), clip.data.len()),
        };
        KeptMedia {
            id: id.to_owned(),
            media_type,
            format,
            bytes: bytes as u64,
            ttl: self.ttl,
        }
    }

    /// A panic while it is locked leaves the map valid.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Media that are being uploaded. Each chunk counts against the client as it arrives.
pub struct MediaUpload {
    store: Arc<MediaStore>,
    client: Client,
    account: String,
    decoding: Turns,
    taken: Taken,
    description: Option<MediaDescription>,
    data: Vec<u8>,
}

impl MediaUpload {
    /// Adds a chunk; the first describes the media.
    ///
    /// # Errors
    /// When the client, or all of them, may have no more.
    pub fn add(&mut self, description: Option<MediaDescription>, chunk: &[u8]) -> Result<(), Error> {
        if self.description.is_none() {
            self.description = description;
        }
        self.taken.grow(chunk.len() as u64).map_err(refused)?;
        self.data.extend_from_slice(chunk);
        Ok(())
    }

    /// Decodes the uploaded bytes, and stores the media.
    ///
    /// # Errors
    /// When it is not what its description says, or takes too many bytes.
    pub async fn finish(mut self) -> Result<KeptMedia, Error> {
        self.data.shrink_to_fit(); // so that the bytes in memory are those that are counted
        let data = Bytes::from(self.data);
        let description = self
            .description
            .ok_or_else(|| invalid("info", "is missing: send it with the first chunk"))?;
        let (media, taken) =
            read_on_thread(description, data, self.taken, self.client, &self.decoding).await?;
        self.store.put(media, self.account, taken)
    }
}

/// Drops media whose time to live is over.
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

/// Kinds of decoding, each with its own share of the turns of a client.
pub(crate) const PICTURES: &str = "pictures";
const TRACKS: &str = "tracks";

/// Why media are refused.
#[derive(Debug)]
enum MediaRefusal {
    Invalid(Error),
    /// Decoded, the media exceed the bound of a client, or of all clients.
    NoRoom(Exceeded),
}

impl From<Error> for MediaRefusal {
    fn from(problem: Error) -> MediaRefusal {
        MediaRefusal::Invalid(problem)
    }
}

impl From<TrackError> for MediaRefusal {
    fn from(problem: TrackError) -> MediaRefusal {
        MediaRefusal::Invalid(invalid("chunk", problem.to_string()))
    }
}

/// As [`read`], on a thread that may block, when it is the client's turn; tracks do not keep a client's pictures from theirs.
async fn read_on_thread(
    info: MediaDescription,
    data: Bytes,
    mut taken: Taken,
    client: Client,
    decoding: &Turns,
) -> Result<(Media, Taken), Error> {
    let kind = match info.media_type.starts_with("image/") {
        true => PICTURES,
        false => TRACKS,
    };
    let work = move |cancel: &CancelToken| {
        let media = read(&info, data, &mut taken, cancel)?;
        Ok::<_, MediaRefusal>((media, taken))
    };
    let read = decoding.run_of((kind, client), work).await;
    read?.map_err(|refusal| match refusal {
        MediaRefusal::Invalid(problem) => problem,
        MediaRefusal::NoRoom(exceeded) => refused(exceeded),
    })
}

/// Decodes media as its description says. `taken` has the received bytes. The decoded bytes are charged in addition while
/// they are made, and in place of the received ones afterwards.
fn read(
    info: &MediaDescription,
    data: Bytes,
    taken: &mut Taken,
    cancel: &CancelToken,
) -> Result<Media, MediaRefusal> {
    let wrong = |problem: String| invalid("chunk", problem);
    let mut decoded = 0;
    let mut room = |bytes| {
        decoded += bytes;
        taken.grow(bytes).map_err(MediaRefusal::NoRoom)
    };
    let media = match (info.media_type.as_str(), info.format) {
        ("image/png" | "image/jpeg" | "image/webp", _) => {
            pictures::decode(&data, None, cancel).map_err(|problem| wrong(problem.to_string()))?;
            Ok(Media::Picture(data))
        }
        // The file itself shows which of the two it is.
        ("audio/wav" | "audio/flac", _) => match tracks::media_type(&data).map_err(MediaRefusal::from)? {
            "audio/flac" => tracks::read_flac(&data, cancel, &mut room),
            _ => tracks::read_wav(&data, cancel, &mut room),
        }
        .map(Media::Clip),
        ("video/x-raw-rgb", Some(format @ MediaFormat::Video { .. }))
        | ("audio/x-raw-s16le", Some(format @ MediaFormat::Audio { .. })) => Ok(clip(format, data)?),
        ("video/x-raw-rgb" | "audio/x-raw-s16le", _) => Err(invalid(
            "info.format",
            format!(
                "is needed for {}: set `video` or `audio`, as in an artifact",
                info.media_type
            ),
        )
        .into()),
        (other, _) => Err(invalid(
            "info.media_type",
            format!(
                "{:?} is none of image/png, image/jpeg, image/webp, video/x-raw-rgb, audio/wav, audio/flac, \
                 audio/x-raw-s16le",
                other.chars().take(64).collect::<String>()
            ),
        )
        .into()),
    }?;
    if decoded > 0 {
        taken.set(decoded).map_err(MediaRefusal::NoRoom)?;
    }
    Ok(media)
}

fn clip(format: MediaFormat, data: Bytes) -> Result<Media, Error> {
    if let Some(track) = TrackFormat::of(&format) {
        track
            .check()
            .map_err(|problem| invalid("info.audio", problem.to_string()))?;
    }
    let needed = format.bytes().filter(|bytes| *bytes > 0);
    if needed != Some(data.len() as u64) {
        let needed = needed.map_or("none".to_owned(), |bytes| bytes.to_string());
        return Err(invalid(
            "chunk",
            format!(
                "has {} bytes in all where the format has {needed}: send all bytes of the format that info describes",
                data.len()
            ),
        ));
    }
    Ok(Media::Clip(Clip { format, data }))
}

/// The error of a client that exceeds the bound on media.
pub(crate) fn refused(exceeded: Exceeded) -> Error {
    Error::ClientLimit(exceeded.words("media", "release some", "limits.media"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(bound: u64) -> Arc<MediaStore> {
        MediaStore::new(Budget::new(bound, bound), Duration::from_secs(10))
    }

    /// Media with an unlimited budget.
    fn read(info: &MediaDescription, data: Bytes) -> Result<Media, MediaRefusal> {
        let mut taken = Budget::new(u64::MAX, u64::MAX).nothing(None);
        let cancel = CancelToken::default();
        super::read(info, data, &mut taken, &cancel)
    }

    #[tokio::test]
    async fn short_media_count_as_much_as_their_entries_take() {
        let store = store(3 * LEAST_BYTES);
        for _ in 0..3 {
            put(&store, track(1), 2);
        }
        let refused = store
            .put(track(1), String::new(), store.bound.nothing(None))
            .unwrap_err();
        assert!(refused.to_string().contains("limits.media"), "{refused}");
        assert_eq!(store.lock().len(), 3);
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
        let taken = store.bound.take(None, bytes).unwrap();
        store.put(media, "alice".to_owned(), taken).unwrap().id
    }

    #[tokio::test(start_paused = true)]
    async fn unused_media_expires_and_releases_its_bytes() {
        let store = store(10_000);
        let used = put(&store, track(20), 5_000);
        let unused = put(&store, track(20), 5_000);
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(store.get("init_media_id", &used, &Reach::All).unwrap(), track(20));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(store.get("init_media_id", &unused, &Reach::All).is_err());
        assert_eq!(store.bound.taken(), 5_000, "the unused one is gone from memory");
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(store.bound.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn released_media_is_gone_at_once() {
        let store = store(10_000);
        let id = put(&store, track(20), 5_000);
        assert!(store.release(&id, &Reach::All));
        assert!(!store.release(&id, &Reach::All));
        assert!(store.get("init_media_id", &id, &Reach::All).is_err());
        assert_eq!(store.bound.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn media_of_another_account_is_not_there() {
        let store = store(10_000);
        let id = put(&store, track(20), 5_000);
        let (own, other) = (Reach::Own("alice".to_owned()), Reach::Own("bob".to_owned()));
        let told = |id: &str| store.get("init_media_id", id, &other).unwrap_err().to_string();
        assert_eq!(
            told(&id).replace(&id, ""),
            told("media-none").replace("media-none", "")
        );
        assert!(!store.release(&id, &other));
        assert!(store.get("init_media_id", &id, &own).is_ok());
        assert!(store.release(&id, &own));
    }

    #[test]
    fn descriptions_that_do_not_fit_the_bytes_are_refused() {
        let info = |media_type: &str, format| MediaDescription {
            media_type: media_type.to_owned(),
            format,
        };
        let film = |frames| {
            Some(MediaFormat::Video {
                width: 2,
                height: 2,
                frames,
                frames_per_second: 8.0,
                sound: None,
            })
        };
        let sound = |samples_per_second, channels, samples| {
            Some(MediaFormat::Audio {
                samples_per_second,
                channels,
                samples,
            })
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
            (info("audio/flac", None), bytes(36)),
            (info("audio/x-raw-s16le", sound(48_000, 8, 1)), bytes(16)),
            (info("audio/x-raw-s16le", sound(7500, 1, 8)), bytes(16)),
            (info("audio/x-raw-s16le", sound(8000, 0, 8)), bytes(16)),
            (info("audio/x-raw-s16le", sound(8000, 1, 0)), bytes(0)),
        ];
        assert!(read(&info("audio/x-raw-s16le", sound(8000, 1, 8)), bytes(16)).is_ok());
        for (info, data) in wrong {
            assert!(read(&info, data).is_err(), "{info:?}");
        }
    }

    /// A second of silence as FLAC, 8 kHz.
    fn silence() -> Bytes {
        let format = tracks::TrackFormat {
            samples_per_second: 8000,
            channels: 2,
            samples: 8000,
        };
        let mut file = tracks::TrackFile::new(format, None).unwrap();
        file.add(0, &vec![0; 32_000].into()).unwrap();
        let file = file.finish().unwrap();
        file.read(&mut Default::default(), usize::MAX / 2).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pictures_and_tracks_wait_for_their_turn_to_be_decoded() {
        let decoding = Turns::of_decoding();
        let picture = Bytes::from(pictures::png(1, 1, &[1, 2, 3], None).unwrap());
        let reading = |media_type: &str, data: Bytes| {
            let info = MediaDescription {
                media_type: media_type.to_owned(),
                ..Default::default()
            };
            let taken = Budget::new(u64::MAX, u64::MAX).nothing(None);
            read_on_thread(info, data, taken, None, &decoding)
        };
        for (media_type, data) in [("image/png", picture), ("audio/flac", silence())] {
            let turns = decoding.all_turns();
            let mut waiting = Box::pin(reading(media_type, data));
            // The test's clock does not advance while a thread works, so this time passes only if none does.
            let early = tokio::time::timeout(Duration::from_secs(1), &mut waiting).await;
            assert!(early.is_err(), "{media_type} is decoded before its turn");
            drop(turns);
            waiting.await.unwrap();
        }
    }

    #[test]
    fn decoded_tracks_count_by_their_samples_and_are_bounded_while_they_are_decoded() {
        let (file, info) = (
            silence(),
            MediaDescription {
                media_type: "audio/flac".to_owned(),
                ..Default::default()
            },
        );
        assert!(file.len() < 1000, "silence takes next to nothing");
        let came = file.len() as u64;
        let bound = Budget::new(40_000, 40_000);
        let mut taken = bound.take(None, came).unwrap();
        let cancel = CancelToken::default();
        let read = super::read(&info, file.clone(), &mut taken, &cancel).unwrap();
        assert!(matches!(&read, Media::Clip(clip) if clip.data.len() == 32_000));
        assert_eq!(bound.taken(), 32_000);
        drop(taken);
        let small = Budget::new(20_000, 20_000);
        let mut taken = small.take(None, came).unwrap();
        let refused = super::read(&info, file, &mut taken, &cancel);
        assert!(matches!(
            refused,
            Err(MediaRefusal::NoRoom(Exceeded::Client(20_000)))
        ));
        drop(taken);
        assert_eq!(small.taken(), 0);
    }
}
