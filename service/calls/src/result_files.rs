//! Files that are made of a job's pieces: a film as MP4, a track as FLAC. They are made by a task of their own, as fast as the service
//! encodes and whether or not the client reads: what waits for the encoder is not what a client has left unread.

use std::collections::HashMap;
use std::sync::Arc;

use engine::Error;
use engine::queue::{PieceToEncode, PiecesToEncode};
use model::{Covered, MediaFormat, Piece, SOUND_OF_FILM};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::chunks::{AsFile, Output, file_chunks};
use crate::errors::internal;
use crate::results::{Chunks, ResultEncoder, add_once};
use crate::shared_files::{FileOf, SharedFile};

/// The files of a job on the way to one client.
pub(crate) struct ResultFiles {
    job: String,
    output: Output,
    as_file: AsFile,
    encoder: ResultEncoder,
    /// What has come of each result, by item and track.
    come: HashMap<(u32, String), (MediaFormat, Covered)>,
    /// The files, by item and track; `None` where nothing more is made of one: it is complete, or one beside the pieces could not be
    /// made.
    files: HashMap<(u32, String), Option<Arc<SharedFile>>>,
}

/// The files of a job that a task makes. Dropping it ends the task after the piece under way.
pub(crate) struct FilesInTheMaking {
    made: mpsc::UnboundedReceiver<Result<Chunks, Error>>,
    _task: AbortOnDropHandle<()>,
}

impl FilesInTheMaking {
    /// The next complete file, or the error that ends the making; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunks, Error>> {
        self.made.recv().await
    }
}

impl ResultFiles {
    pub(crate) fn new(job: String, output: Output, as_file: AsFile, encoder: ResultEncoder) -> ResultFiles {
        ResultFiles {
            job,
            output,
            as_file,
            encoder,
            come: HashMap::new(),
            files: HashMap::new(),
        }
    }

    /// Makes the files of these pieces. Files that nobody takes wait: their bytes count as unread results.
    pub(crate) fn make(mut self, mut pieces: PiecesToEncode) -> FilesInTheMaking {
        let (sender, made) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            while let Some(next) = pieces.next().await {
                let PieceToEncode {
                    item,
                    seed,
                    piece,
                    waits: _until_encoded,
                } = next;
                let file = match self.add(item, seed, piece).await {
                    Ok(None) => continue,
                    Ok(Some(file)) => Ok(file),
                    Err(error) => Err(error),
                };
                let is_end = file.is_err();
                // An error of the channel means that the client has gone.
                if sender.send(file).is_err() || is_end {
                    return;
                }
            }
        });
        FilesInTheMaking {
            made,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Adds a piece to the file that has it, and returns the chunks of the file once it is complete.
    ///
    /// # Errors
    /// When the piece is not of the result, or its file has no room. A file beside the pieces is left out then.
    pub(crate) async fn add(&mut self, item: u32, seed: u64, piece: Piece) -> Result<Option<Chunks>, Error> {
        let come = self.come.entry((item, piece.track.clone()));
        let (_, covered) = come.or_insert_with(|| (piece.format, Covered::default()));
        add_once(covered, &piece)?;
        let key = (item, self.output.encoding.track_of_file(&piece.track));
        match self.add_to_file(item, seed, piece).await {
            Err(refused) if self.as_file == AsFile::Beside => {
                tracing::debug!(%refused, "a result is sent without its file");
                self.files.insert(key, None);
                Ok(None)
            }
            added => added,
        }
    }

    async fn add_to_file(&mut self, item: u32, seed: u64, piece: Piece) -> Result<Option<Chunks>, Error> {
        let track = self.output.encoding.track_of_file(&piece.track);
        let key = (item, track.clone());
        let file = match self.files.get(&key) {
            Some(Some(file)) => file.clone(),
            Some(None) => return Ok(None),
            None => {
                let of = FileOf {
                    job: self.job.clone(),
                    item,
                    seed,
                    track: track.clone(),
                    output: self.output.clone(),
                };
                let file = self.encoder.encodings.file(of, self.encoder.client);
                self.files.insert(key.clone(), Some(file.clone()));
                file
            }
        };
        file.add(piece, self.encoder.client).await?;
        let Some(format) = self.whole(item, &track) else {
            return Ok(None);
        };
        self.files.insert(key, None);
        let whole = file.whole().await?;
        let chunks = file_chunks(item, seed, track, format, &self.output, whole);
        Ok(Some(chunks.map_err(internal)?))
    }

    /// The format of a result that is whole, with its sound if it has any.
    fn whole(&self, item: u32, track: &str) -> Option<MediaFormat> {
        let result = |track: &str| {
            let (format, covered) = self.come.get(&(item, track.to_owned()))?;
            covered.is_whole(format.units()).then_some(*format)
        };
        let format = result(track)?;
        match format.sound() {
            Some(_) => result(SOUND_OF_FILM).map(|_| format),
            None => Some(format),
        }
    }
}
