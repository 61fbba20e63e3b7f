//! Encoded results, shared: a picture or a film that several streams send is encoded once and counts once against the limits.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use engine::Error;
use gpu::Timeline;
use pipelines::{MediaFormat, Piece};
use tokio::sync::OnceCell;
use tonic::Status;

use super::limits::{Budget, Client, Exceeded, Taken};
use super::status::{client_limit, status_of};
use super::stream::{Output, Part, artifact};
use crate::films::{EncodedFilm, FilmFile, FilmFormat};
use crate::proto::v1::event::Event as Kind;

/// The encoded results that a stream still sends.
pub(crate) struct Encodings {
    bound: Arc<Budget>,
    recent: Mutex<Vec<Weak<Encoded>>>,
    films: Mutex<Vec<Weak<SharedFilm>>>,
}

/// One encoded result.
pub(super) struct Encoded {
    index: u32,
    seed: u64,
    /// Kept alive, because pieces are compared by address.
    piece: Piece,
    output: Output,
    chunks: OnceCell<(Vec<Kind>, Taken)>,
}

impl Encoded {
    fn is_of(&self, index: u32, seed: u64, piece: &Piece, output: &Output) -> bool {
        let of = |piece: &Piece| (piece.data.as_ptr(), piece.data.len(), piece.first, piece.format);
        (self.index, self.seed) == (index, seed)
            && of(&self.piece) == of(piece)
            && self.piece.track == piece.track
            && self.output == *output
    }

    /// The chunks; copies of them share their bytes.
    pub(super) fn chunks(&self) -> &[Kind] {
        self.chunks.get().map_or(&[], |(chunks, _)| chunks)
    }
}

impl Encodings {
    pub(super) fn new(bound: Arc<Budget>) -> Encodings {
        Encodings {
            bound,
            recent: Mutex::default(),
            films: Mutex::default(),
        }
    }

    /// The encoded result. The first caller encodes it, and it counts against that caller's client.
    pub(super) async fn encode(
        &self,
        index: u32,
        seed: u64,
        piece: Piece,
        output: &Output,
        client: Client,
    ) -> Result<Arc<Encoded>, Status> {
        let encoded = self.find_or_begin(index, seed, piece, output);
        let (shared, bound) = (encoded.clone(), self.bound.clone());
        let encode = || async move {
            let work = tokio::task::spawn_blocking(move || {
                artifact(
                    shared.index,
                    shared.seed,
                    shared.piece.clone(),
                    &shared.output,
                    Part::WHOLE,
                )
            });
            let chunks = work.await.map_err(internal)?.map_err(internal)?;
            let taken = bound.take(client, bytes_of(&chunks)).map_err(refused)?;
            Ok::<_, Status>((chunks, taken))
        };
        encoded.chunks.get_or_try_init(encode).await?;
        Ok(encoded)
    }

    fn find_or_begin(&self, index: u32, seed: u64, piece: Piece, output: &Output) -> Arc<Encoded> {
        // A panic while the lock was held leaves the list valid.
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        recent.retain(|each| {
            let each = each.upgrade();
            if let Some(encoded) = &each
                && encoded.is_of(index, seed, &piece, output)
            {
                found = Some(encoded.clone());
            }
            each.is_some()
        });
        found.unwrap_or_else(|| {
            let encoded = Arc::new(Encoded {
                index,
                seed,
                piece,
                output: output.clone(),
                chunks: OnceCell::new(),
            });
            recent.push(Arc::downgrade(&encoded));
            encoded
        })
    }
}

/// Which film of which job, and how it is sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FilmOf {
    pub(super) job: String,
    pub(super) item: u32,
    pub(super) seed: u64,
    pub(super) track: String,
    pub(super) output: Output,
}

/// A film that is encoded while its pieces come, for all streams that send it.
#[derive(Debug)]
pub(super) struct SharedFilm {
    of: FilmOf,
    /// Held by a thread as long as it encodes: also where the stream that asked for it has gone.
    state: Arc<tokio::sync::Mutex<FilmState>>,
}

struct FilmState {
    file: Option<FilmFile>,
    whole: Option<Arc<EncodedFilm>>,
    /// Bytes that are encoded.
    taken: Taken,
}

impl std::fmt::Debug for FilmState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilmState").field("whole", &self.whole).finish()
    }
}

impl Encodings {
    /// The film that others encode already, or a new one, which counts against this client.
    pub(super) fn film(
        &self,
        of: FilmOf,
        format: &MediaFormat,
        client: Client,
    ) -> Result<Arc<SharedFilm>, Status> {
        // A panic while the lock was held leaves the list valid.
        let mut films = self.films.lock().unwrap_or_else(PoisonError::into_inner);
        films.retain(|each| each.strong_count() > 0);
        let found = films.iter().filter_map(Weak::upgrade).find(|film| film.of == of);
        if let Some(film) = found {
            return Ok(film);
        }
        let format = FilmFormat::of(format).ok_or_else(|| internal("no film"))?;
        let state = FilmState {
            file: Some(FilmFile::new(format).map_err(internal)?),
            whole: None,
            taken: self.bound.nothing(client),
        };
        let film = Arc::new(SharedFilm {
            of,
            state: Arc::new(tokio::sync::Mutex::new(state)),
        });
        films.push(Arc::downgrade(&film));
        Ok(film)
    }
}

impl SharedFilm {
    /// Encodes the frames of a piece that no stream has brought yet.
    pub(super) async fn add(&self, piece: Piece) -> Result<(), Status> {
        let mut state = self.state.clone().lock_owned().await;
        let recipe = self.of.output.recipe_of(self.of.seed);
        let work = tokio::task::spawn_blocking(move || {
            let timeline = Timeline::begin("encode a film");
            let FilmState { file, whole, taken } = &mut *state;
            let Some(film) = file else { return Ok(()) };
            let bytes = film.add(piece.first, &piece.data).map_err(internal)?;
            drop(piece);
            taken.grow(bytes).map_err(refused)?;
            if film.is_complete()
                && let Some(film) = file.take()
            {
                *whole = Some(Arc::new(film.finish(recipe.as_ref()).map_err(internal)?));
            }
            timeline.end();
            Ok(())
        });
        work.await.map_err(internal)?
    }

    /// The whole film, once every piece was added.
    pub(super) async fn whole(&self) -> Result<Arc<EncodedFilm>, Status> {
        let whole = self.state.lock().await.whole.clone();
        whole.ok_or_else(|| internal("a film that is not whole"))
    }
}

fn internal(why: impl ToString) -> Status {
    status_of(&Error::Internal(why.to_string()))
}

fn bytes_of(chunks: &[Kind]) -> u64 {
    let bytes = |chunk: &Kind| match chunk {
        Kind::Artifact(artifact) => artifact.chunk.len() as u64,
        _ => 0,
    };
    chunks.iter().map(bytes).sum()
}

fn refused(exceeded: Exceeded) -> Status {
    client_limit(match exceeded {
        Exceeded::Client(bound) => format!(
            "unread results of this client take more than {} in all: read them as they come, or raise \
             limits.results_per_client",
            residency::Bytes(bound)
        ),
        Exceeded::All(bound) => format!(
            "unread results take more than {} in all: try again, or raise limits.results",
            residency::Bytes(bound)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::stream::Encoding;

    fn picture() -> Piece {
        Piece::image(64, 64, vec![5; 64 * 64 * 3])
    }

    fn first_chunk(encoded: &Encoded) -> *const u8 {
        let [Kind::Artifact(chunk), ..] = encoded.chunks() else {
            panic!("no artifact")
        };
        chunk.chunk.as_ptr()
    }

    #[tokio::test]
    async fn streams_of_one_picture_share_its_bytes_which_count_once() {
        let bound = Budget::new(1 << 20, 1 << 20);
        let encodings = Encodings::new(bound.clone());
        let (output, piece) = (Output::without_recipe(Encoding::Png), picture());
        let one = encodings
            .encode(0, 7, piece.clone(), &output, None)
            .await
            .unwrap();
        let taken = bound.taken();
        assert!(taken > 0);
        let two = encodings
            .encode(0, 7, piece.clone(), &output, None)
            .await
            .unwrap();
        assert_eq!(first_chunk(&one), first_chunk(&two));
        assert_eq!(bound.taken(), taken);
        let other_seed = encodings.encode(0, 8, piece, &output, None).await.unwrap();
        let other_piece = encodings.encode(0, 7, picture(), &output, None).await.unwrap();
        assert_ne!(first_chunk(&one), first_chunk(&other_seed));
        assert_ne!(first_chunk(&one), first_chunk(&other_piece));
        drop((one, two, other_seed, other_piece));
        assert_eq!(bound.taken(), 0);
    }

    #[tokio::test]
    async fn unread_results_of_one_client_are_bounded() {
        let encodings = Encodings::new(Budget::new(1 << 20, 4 * 64 * 64));
        let output = Output::without_recipe(Encoding::Png);
        let mut unread = Vec::new();
        let refusal = loop {
            match encodings.encode(0, 7, picture(), &output, None).await {
                Ok(encoded) => unread.push(encoded),
                Err(refusal) => break refusal,
            }
            assert!(unread.len() < 1000, "nothing is refused");
        };
        assert_eq!(refusal.code(), tonic::Code::ResourceExhausted);
        assert!(
            refusal.message().contains("limits.results_per_client"),
            "{refusal}"
        );
        assert!(!unread.is_empty());
    }
}
