//! Files that are encoded while their pieces arrive, for all streams that send them: a film as MP4, a track as FLAC.

use std::sync::{Arc, PoisonError, Weak};

use engine::Error;
use gpu::Timeline;
use media::EncodedFile;
use media::Recipe;
use media::films::{FilmFile, FilmFormat};
use media::tracks::{TrackFile, TrackFormat};
use model::{MediaFormat, Piece};

use crate::budget::{Client, Taken};
use crate::chunks::Output;
use crate::encodings::{Encodings, refused};
use crate::errors::internal;
use crate::threads::ENCODING;

/// Identifies a file: the job, the result and the encoding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FileOf {
    pub(crate) job: String,
    pub(crate) item: u32,
    pub(crate) seed: u64,
    pub(crate) track: String,
    pub(crate) output: Output,
}

/// A file that is encoded while its pieces arrive, for all streams that send it.
#[derive(Debug)]
pub(crate) struct SharedFile {
    of: FileOf,
    /// Locked by a thread while it encodes, even if the stream that asked for it has gone.
    state: Arc<tokio::sync::Mutex<State>>,
}

struct State {
    unfinished: Option<Unfinished>,
    whole: Option<Arc<EncodedFile>>,
    recipe: Option<Recipe>,
    /// Bytes that are held.
    taken: Taken,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("whole", &self.whole).finish()
    }
}

/// A file that is not complete yet.
enum Unfinished {
    Film(Box<FilmFile>),
    Track(Box<TrackFile>),
}

impl Unfinished {
    fn new(format: &MediaFormat, recipe: Option<&Recipe>) -> Result<Unfinished, Error> {
        if let Some(film) = FilmFormat::of(format) {
            let film = FilmFile::new(film).map_err(internal)?;
            return Ok(Unfinished::Film(Box::new(film)));
        }
        let track = TrackFormat::of(format).ok_or_else(|| internal("neither a film nor a track"))?;
        let track = TrackFile::new(track, recipe).map_err(internal)?;
        Ok(Unfinished::Track(Box::new(track)))
    }

    /// Encodes a piece, and charges the encoded bytes.
    fn add(&mut self, piece: &Piece, taken: &mut Taken) -> Result<(), Error> {
        match self {
            Unfinished::Film(film) => {
                let bytes = film.add(piece.first, &piece.data).map_err(internal)?;
                taken.grow(bytes).map_err(refused)
            }
            Unfinished::Track(track) => {
                track.add(piece.first, &piece.data).map_err(internal)?;
                taken.set(track.bytes()).map_err(refused)
            }
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Unfinished::Film(film) => film.is_complete(),
            Unfinished::Track(track) => track.is_complete(),
        }
    }

    fn finish(self, recipe: Option<&Recipe>) -> Result<EncodedFile, Error> {
        match self {
            Unfinished::Film(film) => film.finish(recipe).map_err(internal),
            Unfinished::Track(track) => track.finish().map_err(internal),
        }
    }
}

impl Encodings {
    /// The file that other streams encode already, or a new one, which counts against this client.
    pub(crate) fn file(
        &self,
        of: FileOf,
        format: &MediaFormat,
        client: Client,
    ) -> Result<Arc<SharedFile>, Error> {
        // A panic while the lock was held leaves the list valid.
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|each| each.strong_count() > 0);
        let found = files.iter().filter_map(Weak::upgrade).find(|file| file.of == of);
        if let Some(file) = found {
            return Ok(file);
        }
        let recipe = of.output.recipe_of(of.seed);
        let state = State {
            unfinished: Some(Unfinished::new(format, recipe.as_ref())?),
            whole: None,
            recipe,
            taken: self.bound.nothing(client),
        };
        let file = Arc::new(SharedFile {
            of,
            state: Arc::new(tokio::sync::Mutex::new(state)),
        });
        files.push(Arc::downgrade(&file));
        Ok(file)
    }
}

impl SharedFile {
    /// Encodes the part of a piece that no stream has added yet.
    pub(crate) async fn add(&self, piece: Piece) -> Result<(), Error> {
        let mut state = self.state.clone().lock_owned().await;
        let added = ENCODING.run(move || {
            let timeline = Timeline::begin("encode a file");
            let State {
                unfinished,
                whole,
                recipe,
                taken,
            } = &mut *state;
            let Some(file) = unfinished else { return Ok(()) };
            file.add(&piece, taken)?;
            drop(piece);
            if file.is_complete()
                && let Some(file) = unfinished.take()
            {
                let file = file.finish(recipe.as_ref())?;
                *whole = Some(Arc::new(file));
            }
            timeline.end();
            Ok(())
        });
        added.await?
    }

    /// The whole file, once every piece was added.
    pub(crate) async fn whole(&self) -> Result<Arc<EncodedFile>, Error> {
        let whole = self.state.lock().await.whole.clone();
        whole.ok_or_else(|| internal("a file that is not whole"))
    }
}
