//! Encoded results, shared: a result that several streams send is encoded once and counts once against the
//! limits. Files that are made of pieces are in `shared_files.rs`.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use engine::Error;
use model::Piece;
use tokio::sync::OnceCell;

use crate::budget::{Budget, Client, Exceeded, Taken};
use crate::chunks::{Chunk, Output, png_chunks};
use crate::errors::internal;
use crate::shared_files::SharedFile;
use crate::threads::ENCODING;

/// The encoded results that a stream still sends.
pub(crate) struct Encodings {
    pub(crate) bound: Arc<Budget>,
    recent: Mutex<Vec<Weak<Encoded>>>,
    pub(crate) files: Mutex<Vec<Weak<SharedFile>>>,
}

/// One encoded result.
pub(crate) struct Encoded {
    index: u32,
    seed: u64,
    /// Kept alive, because pieces are compared by address.
    piece: Piece,
    output: Output,
    chunks: OnceCell<(Vec<Chunk>, Taken)>,
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
    pub(crate) fn chunks(&self) -> &[Chunk] {
        self.chunks.get().map_or(&[], |(chunks, _)| chunks)
    }
}

impl Encodings {
    pub(crate) fn new(bound: Arc<Budget>) -> Encodings {
        Encodings {
            bound,
            recent: Mutex::default(),
            files: Mutex::default(),
        }
    }

    /// The encoded result. The first caller encodes it, and it counts against that caller's client.
    pub(crate) async fn encode(
        &self,
        index: u32,
        seed: u64,
        piece: Piece,
        output: &Output,
        client: Client,
    ) -> Result<Arc<Encoded>, Error> {
        let encoded = self.find_or_begin(index, seed, piece, output);
        let (shared, bound) = (encoded.clone(), self.bound.clone());
        let encode = || async move {
            let chunks = ENCODING.run_of(("results", client), move |_| {
                png_chunks(shared.index, shared.seed, &shared.piece, &shared.output)
            });
            let chunks = chunks.await?.map_err(internal)?;
            let taken = bound.take(client, bytes_of(&chunks)).map_err(refused)?;
            Ok::<_, Error>((chunks, taken))
        };
        encoded.chunks.get_or_try_init(encode).await?;
        Ok(encoded)
    }

    fn find_or_begin(&self, index: u32, seed: u64, piece: Piece, output: &Output) -> Arc<Encoded> {
        // A panic while the lock was held leaves the list valid.
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|each| each.strong_count() > 0);
        let found = recent
            .iter()
            .filter_map(Weak::upgrade)
            .find(|each| each.is_of(index, seed, &piece, output));
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

fn bytes_of(chunks: &[Chunk]) -> u64 {
    chunks.iter().map(|chunk| chunk.data.len() as u64).sum()
}

pub(crate) fn refused(exceeded: Exceeded) -> Error {
    Error::ClientLimit(exceeded.words("unread results", "read them as they come", "limits.results"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunks::Encoding;

    fn picture() -> Piece {
        Piece::image(64, 64, vec![5; 64 * 64 * 3])
    }

    fn first_chunk(encoded: &Encoded) -> *const u8 {
        encoded.chunks()[0].data.as_ptr()
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
        assert!(
            matches!(&refusal, Error::ClientLimit(words) if words.contains("limits.results_per_client")),
            "{refusal}"
        );
        assert!(!unread.is_empty());
    }
}
