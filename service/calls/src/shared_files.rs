//! Files that are encoded while their pieces arrive, for all streams that send them: a film as MP4, a track as FLAC.

use std::sync::{Arc, PoisonError, Weak};

use engine::Error;
use gpu::Timeline;
use media::EncodedFile;
use media::Recipe;
use media::films::{FilmFile, FilmFormat, FilmSound};
use media::tracks::{TrackFile, TrackFormat};
use model::Piece;

use crate::budget::{Client, Taken};
use crate::chunks::Output;
use crate::encodings::{Encodings, refused};
use crate::errors::internal;
use crate::threads::ENCODING;

/// The kind of work that encodes files, with its own share of the turns of a client.
const FILES: &str = "files";

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
    /// Bytes that are held.
    taken: Taken,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("whole", &self.whole).finish()
    }
}

/// The parts of a file that is not complete yet, each begun by its first piece. Frames and sound come in any order.
#[derive(Default)]
struct Unfinished {
    frames: Option<Box<FilmFile>>,
    /// Whether the frames have sound with them.
    has_sound: bool,
    sound: Option<Box<FilmSound>>,
    track: Option<Box<TrackFile>>,
}

impl Unfinished {
    /// Encodes a piece, and charges the encoded bytes.
    fn add(&mut self, piece: &Piece, of: &FileOf, taken: &mut Taken) -> Result<(), Error> {
        if let Some(format) = FilmFormat::of(&piece.format) {
            let frames = begun(&mut self.frames, || FilmFile::new(format))?;
            frames.add(piece.first, &piece.data).map_err(internal)?;
            self.has_sound = piece.format.sound().is_some();
        } else {
            let format = TrackFormat::of(&piece.format);
            let format = format.ok_or_else(|| internal("neither a film nor a track"))?;
            if of.track == piece.track {
                let recipe = of.output.recipe_of(of.seed);
                let track = begun(&mut self.track, || TrackFile::new(format, recipe.as_ref()))?;
                track.add(piece.first, &piece.data).map_err(internal)?;
            } else {
                let sound = begun(&mut self.sound, || FilmSound::new(format))?;
                sound.add(piece.first, &piece.data).map_err(internal)?;
            }
        }
        let bytes = [
            self.frames.as_ref().map(|frames| frames.bytes()),
            self.sound.as_ref().map(|sound| sound.bytes()),
            self.track.as_ref().map(|track| track.bytes()),
        ];
        taken.set(bytes.into_iter().flatten().sum()).map_err(refused)
    }

    fn is_complete(&self) -> bool {
        let has_sound = || {
            let sound = self.sound.as_ref();
            !self.has_sound || sound.is_some_and(|sound| sound.is_complete())
        };
        let track = self.track.as_ref();
        let frames = self.frames.as_ref();
        track.is_some_and(|track| track.is_complete())
            || (frames.is_some_and(|frames| frames.is_complete()) && has_sound())
    }

    fn finish(self, recipe: Option<&Recipe>) -> Result<EncodedFile, Error> {
        match (self.frames, self.track) {
            (Some(frames), _) => {
                let sound = self.sound.filter(|_| self.has_sound);
                frames.finish(sound.map(|sound| *sound), recipe).map_err(internal)
            }
            (None, Some(track)) => track.finish().map_err(internal),
            (None, None) => Err(internal("a file without a part")),
        }
    }
}

/// A part of a file, which is begun where it is not there yet.
fn begun<T, E: std::fmt::Display>(
    part: &mut Option<Box<T>>,
    begin: impl FnOnce() -> Result<T, E>,
) -> Result<&mut T, Error> {
    Ok(match part {
        Some(part) => part,
        none => none.insert(Box::new(begin().map_err(internal)?)),
    })
}

impl Encodings {
    /// The file that other streams encode already, or a new one, which counts against this client.
    pub(crate) fn file(&self, of: FileOf, client: Client) -> Arc<SharedFile> {
        // A panic while the lock was held leaves the list valid.
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|each| each.strong_count() > 0);
        let found = files.iter().filter_map(Weak::upgrade).find(|file| file.of == of);
        if let Some(file) = found {
            return file;
        }
        let state = State {
            unfinished: Some(Unfinished::default()),
            whole: None,
            taken: self.bound.nothing(client),
        };
        let file = Arc::new(SharedFile {
            of,
            state: Arc::new(tokio::sync::Mutex::new(state)),
        });
        files.push(Arc::downgrade(&file));
        file
    }
}

impl SharedFile {
    /// Encodes the part of a piece that no stream has added yet, in a turn of this client.
    pub(crate) async fn add(&self, piece: Piece, client: Client) -> Result<(), Error> {
        let mut state = self.state.clone().lock_owned().await;
        let of = self.of.clone();
        let added = ENCODING.run_of((FILES, client), move |_| {
            let timeline = Timeline::begin("encode a file");
            let State {
                unfinished,
                whole,
                taken,
            } = &mut *state;
            let Some(file) = unfinished else { return Ok(()) };
            file.add(&piece, &of, taken)?;
            drop(piece);
            if file.is_complete()
                && let Some(file) = unfinished.take()
            {
                let file = file.finish(of.output.recipe_of(of.seed).as_ref())?;
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
