//! The tracks of a request: read from files, and uploaded to the service before the request is sent.

use std::path::Path;
use std::time::{Duration, Instant};

use api::v1;
use bytes::Bytes;
use media::tracks;

use crate::CliError;
use crate::arguments::Settings;
use crate::connection::Connection;
use crate::request::{Asked, read_media};

/// Bytes of a message.
const CHUNK_BYTES: usize = 1 << 18;

/// The tracks of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestTracks {
    source: Option<TrackData>,
    reference: Option<TrackData>,
}

/// The file of a track.
#[derive(Clone, Debug)]
struct TrackData {
    media_type: &'static str,
    data: Bytes,
}

/// The tracks as they are in the service, until nobody has used them for some time.
#[derive(Default)]
pub(super) struct Uploads {
    source: String,
    reference: String,
    /// How long they stay while nobody uses them.
    lifetime: Duration,
    /// When the tracks are uploaded again, as they may expire soon after that time. `None`: they are not in the service.
    renewed_at: Option<Instant>,
}

impl RequestTracks {
    /// The tracks that the options name.
    ///
    /// # Errors
    /// When a file cannot be read, or is no track in a supported format.
    pub(super) fn of(settings: &Settings) -> Result<RequestTracks, CliError> {
        let track = |path: Option<&Path>| path.map(TrackData::read).transpose();
        Ok(RequestTracks {
            source: track(settings.init.as_deref())?,
            reference: track(settings.reference.first().map(AsRef::as_ref))?,
        })
    }

    /// Names the tracks in a request. Tracks that are not in the service are uploaded first.
    pub(super) async fn name_in(
        &self,
        request: &mut Asked,
        uploads: &mut Uploads,
        connection: &Connection,
    ) -> Result<(), CliError> {
        let Asked::Audio(audio) = request else {
            return Ok(());
        };
        if uploads
            .renewed_at
            .is_none_or(|renewed_at| renewed_at <= Instant::now())
        {
            uploads.release(connection).await;
            let places = [
                (&self.source, &mut uploads.source),
                (&self.reference, &mut uploads.reference),
            ];
            for (track, place) in places {
                if let Some(track) = track {
                    let info = track.upload(connection).await?;
                    *place = info.id;
                    uploads.lifetime = Duration::from_millis(info.expires_in_ms);
                }
            }
        }
        audio.init_media_id.clone_from(&uploads.source);
        audio.reference_media_id.clone_from(&uploads.reference);
        uploads.renewed_at = Some(Instant::now() + uploads.lifetime / 2);
        Ok(())
    }
}

impl TrackData {
    fn read(path: &Path) -> Result<TrackData, CliError> {
        let data = read_media(path)?;
        let media_type = tracks::media_type(&data).map_err(|problem| CliError::file(path, problem))?;
        Ok(TrackData { media_type, data })
    }

    async fn upload(&self, connection: &Connection) -> Result<v1::MediaInfo, CliError> {
        let mut info = Some(v1::MediaInfo {
            media_type: self.media_type.to_owned(),
            ..Default::default()
        });
        let data = self.data.clone();
        let chunks = (0..data.len())
            .step_by(CHUNK_BYTES)
            .map(move |start| v1::MediaChunk {
                info: info.take(),
                chunk: data.slice(start..(start + CHUNK_BYTES).min(data.len())),
            });
        let mut generation = connection.generation();
        let put = generation.put_media(futures::stream::iter(chunks)).await?;
        connection.stay(put.metadata());
        Ok(put.into_inner())
    }
}

impl Uploads {
    /// Releases the uploaded tracks. If that fails, they expire later.
    pub(super) async fn release(&mut self, connection: &Connection) {
        self.renewed_at = None;
        for media_id in [&mut self.source, &mut self.reference].map(std::mem::take) {
            if !media_id.is_empty() {
                let request = v1::ReleaseMediaRequest { media_id };
                let _ = connection.generation().release_media(request).await;
            }
        }
    }
}
