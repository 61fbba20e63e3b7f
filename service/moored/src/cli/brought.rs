//! Tracks that a request is about: read from files, and brought to the service before it.

use std::path::Path;

use bytes::Bytes;

use super::CliError;
use super::arguments::Settings;
use super::connection::Connection;
use super::request::{Asked, read_media};
use api::v1;
use media::tracks;

/// Bytes of a message.
const CHUNK_BYTES: usize = 1 << 18;

/// The tracks of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Brought {
    source: Option<TrackData>,
    reference: Option<TrackData>,
}

/// The file of a track.
#[derive(Clone, Debug)]
struct TrackData {
    media_type: &'static str,
    data: Bytes,
}

/// Tracks that are in the service.
pub(super) struct Handles(Vec<String>);

impl Brought {
    /// Those that the options of a track name.
    ///
    /// # Errors
    /// When a file cannot be read, or is no track that is read.
    pub(super) fn of(settings: &Settings) -> Result<Brought, CliError> {
        let track = |path: Option<&Path>| path.map(TrackData::read).transpose();
        Ok(Brought {
            source: track(settings.init.as_deref())?,
            reference: track(settings.reference.first().map(AsRef::as_ref))?,
        })
    }

    /// Brings them, and names them in the request.
    pub(super) async fn bring(
        &self,
        connection: &Connection,
        request: &mut Asked,
    ) -> Result<Handles, CliError> {
        let mut handles = Vec::new();
        if let Asked::Audio(audio) = request {
            let places = [
                (&self.source, &mut audio.init_media_id),
                (&self.reference, &mut audio.reference_media_id),
            ];
            for (track, place) in places {
                if let Some(track) = track {
                    place.clone_from(&track.bring(connection).await?);
                    handles.push(place.clone());
                }
            }
        }
        Ok(Handles(handles))
    }
}

impl TrackData {
    fn read(path: &Path) -> Result<TrackData, CliError> {
        let data = read_media(path)?;
        let media_type = tracks::media_type(&data).map_err(|problem| CliError::file(path, problem))?;
        Ok(TrackData { media_type, data })
    }

    async fn bring(&self, connection: &Connection) -> Result<String, CliError> {
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
        Ok(put.into_inner().id)
    }
}

impl Handles {
    /// Gives them up. What fails here expires.
    pub(super) async fn release(self, connection: &Connection) {
        for media_id in self.0 {
            let request = v1::ReleaseMediaRequest { media_id };
            let _ = connection.generation().release_media(request).await;
        }
    }
}
