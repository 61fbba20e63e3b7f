//! The events of a job as its client gets them: pixels and samples are encoded on blocking threads, and sent in chunks. Files that are
//! made of many pieces are in `result_files.rs`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use engine::Error;
use engine::job::{JobEvent, JobEventKind, JobId};
use engine::queue::Job;
use futures::Stream;
use media::pictures;
use model::{Covered, LeftOut, MediaFormat, Piece};

use crate::budget::Client;
use crate::chunks::{AsFile, Chunk, Encoding, Envelope, Output};
use crate::encodings::Encodings;
use crate::errors::internal;
use crate::resolved::ResolvedModel;
use crate::result_files::{FilesInTheMaking, ResultFiles};
use crate::threads::ENCODING;

/// Something that happened to a job.
#[derive(Debug)]
pub struct Event {
    /// Milliseconds since the job was submitted.
    pub at_ms: u64,
    pub kind: EventKind,
}

/// The kind of an event.
#[derive(Debug)]
pub enum EventKind {
    /// Anything but an error, a picture, a film or sound.
    Job(JobEventKind),
    /// A preview as JPEG.
    Preview {
        step: u32,
        item: u32,
        jpeg: Bytes,
    },
    Chunk(Chunk),
}

/// A queued job, and its events.
pub struct Started {
    pub job: JobId,
    pub model: ResolvedModel,
    /// The ends of the request's texts that the model does not read.
    pub left_out: Vec<LeftOut>,
    /// Events until the job's end or error. Dropping the stream cancels the job.
    pub events: Events,
}

/// The events of a job.
pub type Events = Pin<Box<dyn Stream<Item = Result<Event, Error>> + Send>>;

/// Chunks of one event, made as they are sent.
pub(crate) type Chunks = Box<dyn Iterator<Item = Chunk> + Send>;

/// Encodes results for one client.
#[derive(Clone)]
pub(crate) struct ResultEncoder {
    pub(crate) encodings: Arc<Encodings>,
    pub(crate) client: Client,
}

/// What a job's stream does next.
enum Next {
    Event(JobEvent),
    /// A file is complete.
    File(Result<Chunks, Error>),
    End,
}

/// The events of a job until its end. Where no form of the model fits the card, `instead` names a model that does.
pub(crate) fn started(
    mut job: Job,
    model: ResolvedModel,
    output: Output,
    as_file: AsFile,
    encoder: ResultEncoder,
    instead: impl Fn() -> Option<String> + Send + 'static,
) -> Started {
    let (id, left_out) = (job.id.clone(), output.left_out.clone());
    let mut files = (as_file != AsFile::No).then(|| {
        let files = ResultFiles::new(id.to_string(), output.clone(), as_file, encoder.clone());
        files.make(job.encode(as_file == AsFile::Instead))
    });
    let mut results = ResultStream::new(output, encoder);
    let events = async_stream::try_stream! {
        let mut now_ms = 0;
        loop {
            // The pieces first: a file that is beside them follows them.
            let next = tokio::select! {
                biased;
                event = job.next() => event.map_or(Next::End, Next::Event),
                Some(file) = next_file(&mut files) => Next::File(file),
            };
            let JobEvent { at_ms, kind } = match next {
                Next::Event(event) => event,
                Next::File(file) => {
                    for chunk in file? {
                        yield Event { at_ms: now_ms, kind: EventKind::Chunk(chunk) };
                    }
                    continue;
                }
                Next::End => break,
            };
            now_ms = at_ms;
            match kind {
                JobEventKind::Failed(error) => {
                    // What was complete before it failed is a result all the same.
                    if !matches!(error, Error::Cancelled(_) | Error::SlowReader { .. }) {
                        while let Some(Ok(file)) = next_file(&mut files).await {
                            for chunk in file {
                                yield Event { at_ms, kind: EventKind::Chunk(chunk) };
                            }
                        }
                    }
                    Err(with_instead(error, &instead))?;
                }
                JobEventKind::Done(report) => {
                    while let Some(file) = next_file(&mut files).await {
                        for chunk in file? {
                            yield Event { at_ms, kind: EventKind::Chunk(chunk) };
                        }
                    }
                    yield Event { at_ms, kind: EventKind::Job(JobEventKind::Done(report)) };
                }
                JobEventKind::Preview { step, item, width, height, rgb } => {
                    let encoded = ENCODING.run(move || pictures::preview_jpeg(width, height, rgb)).await;
                    let jpeg = encoded?.map_err(internal)?.into();
                    yield Event { at_ms, kind: EventKind::Preview { step, item, jpeg } };
                }
                JobEventKind::Piece { item, seed, piece } => {
                    for chunk in results.piece(item, seed, piece).await? {
                        yield Event { at_ms, kind: EventKind::Chunk(chunk) };
                    }
                }
                kind => yield Event { at_ms, kind: EventKind::Job(kind) },
            }
        }
    };
    Started {
        job: id,
        model,
        left_out,
        events: Box::pin(events),
    }
}

/// The next file of a job; `None` where there is no further one.
async fn next_file(files: &mut Option<FilesInTheMaking>) -> Option<Result<Chunks, Error>> {
    files.as_mut()?.next().await
}

/// The error of a job. Where no form of its model fits the card, a model that fits is added.
fn with_instead(error: Error, instead: impl Fn() -> Option<String>) -> Error {
    match error {
        Error::NeverFits(mut shortfall) if shortfall.fallbacks.is_empty() => {
            shortfall.instead = instead();
            Error::NeverFits(shortfall)
        }
        error => error,
    }
}

/// The pieces of a job on the way to one client.
struct ResultStream {
    output: Output,
    encoder: ResultEncoder,
    /// The received parts of each result, by item and track.
    come: HashMap<(u32, String), ReceivedResult>,
}

/// The parts of one result that have arrived.
#[derive(Default)]
struct ReceivedResult {
    /// In units.
    covered: Covered,
    /// Where its pieces are sent as they arrive.
    envelope: Option<Envelope>,
}

impl ReceivedResult {
    /// The envelope of the result, which its first piece begins.
    fn envelope(
        &mut self,
        item: u32,
        seed: u64,
        first: &Piece,
        output: &Output,
    ) -> Result<&mut Envelope, Error> {
        Ok(match &mut self.envelope {
            Some(envelope) => envelope,
            none => {
                let envelope = Envelope::of_pieces(item, seed, first.track.clone(), first.format, output);
                none.insert(envelope.map_err(internal)?)
            }
        })
    }
}

/// Adds a piece to what has come of its result. True: that is whole now.
///
/// # Errors
/// When it is no whole units, or some of them have come already.
pub(crate) fn add_once(covered: &mut Covered, piece: &Piece) -> Result<bool, Error> {
    let units = piece
        .units()
        .ok_or_else(|| internal("a piece that is no whole units"))?;
    let added = covered.add_once(piece.first..piece.first + units);
    added.map_err(|twice| internal(format!("a result: {twice}")))?;
    Ok(covered.is_whole(piece.format.units()))
}

impl ResultStream {
    fn new(output: Output, encoder: ResultEncoder) -> ResultStream {
        ResultStream {
            output,
            encoder,
            come: HashMap::new(),
        }
    }

    /// Adds a piece of a result. Pieces arrive in any order, each unit once.
    async fn piece(&mut self, item: u32, seed: u64, piece: Piece) -> Result<Chunks, Error> {
        let come = self.come.entry((item, piece.track.clone())).or_default();
        let is_last = add_once(&mut come.covered, &piece)?;
        match (&piece.format, self.output.encoding) {
            (MediaFormat::Image { .. }, Encoding::Png) => {
                let ResultEncoder { encodings, client } = &self.encoder;
                let encoded = encodings.encode(item, seed, piece, &self.output, *client).await?;
                let count = encoded.chunks().len();
                Ok(Box::new(
                    (0..count).filter_map(move |index| encoded.chunks().get(index).cloned()),
                ))
            }
            _ => {
                let envelope = come.envelope(item, seed, &piece, &self.output)?;
                let chunks = envelope.chunks(&piece, is_last);
                Ok(Box::new(chunks.into_iter()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hub::catalogue::Makes;
    use media::Recipe;
    use model::{SOUND_OF_FILM, Sound};

    use super::*;
    use crate::budget::Budget;

    const FILM: MediaFormat = MediaFormat::Video {
        width: 32,
        height: 16,
        frames: 6,
        frames_per_second: 8.0,
        sound: None,
    };

    /// Frames of a film, each of one grey.
    fn frames(numbers: std::ops::Range<u64>) -> Piece {
        let grey = |number| vec![40 * number as u8; 3 * 32 * 16];
        Piece {
            track: String::new(),
            format: FILM,
            first: numbers.start,
            data: numbers.flat_map(grey).collect::<Vec<_>>().into(),
        }
    }

    /// The pieces and the files of a job.
    struct Results {
        as_file: AsFile,
        pieces: ResultStream,
        files: ResultFiles,
    }

    impl Results {
        async fn piece(&mut self, item: u32, seed: u64, piece: Piece) -> Result<Vec<Chunk>, Error> {
            let mut sent = Vec::new();
            if self.as_file != AsFile::Instead {
                sent.extend(self.pieces.piece(item, seed, piece.clone()).await?);
            }
            if self.as_file != AsFile::No
                && let Some(file) = self.files.add(item, seed, piece).await?
            {
                sent.extend(file);
            }
            Ok(sent)
        }
    }

    fn results(encoding: Encoding, encodings: &Arc<Encodings>) -> Results {
        let encoder = ResultEncoder {
            encodings: encodings.clone(),
            client: None,
        };
        let output = Output {
            encoding,
            recipe: Recipe::default(),
            omit_metadata: false,
            left_out: Vec::new(),
        };
        let as_file = encoding.as_file_of(Makes::Video);
        Results {
            as_file,
            pieces: ResultStream::new(output.clone(), encoder.clone()),
            files: ResultFiles::new("job".to_owned(), output, as_file, encoder),
        }
    }

    /// The chunks that a stream sends of these pieces.
    async fn sent(results: &mut Results, pieces: &[std::ops::Range<u64>]) -> Vec<Chunk> {
        let mut sent = Vec::new();
        for piece in pieces {
            sent.extend(results.piece(0, 7, frames(piece.clone())).await.unwrap());
        }
        sent
    }

    fn joined(chunks: &[Chunk]) -> Vec<u8> {
        let mut file = vec![0; chunks[0].total_bytes as usize];
        for chunk in chunks {
            let place = chunk.offset as usize;
            file[place..place + chunk.data.len()].copy_from_slice(&chunk.data);
        }
        file
    }

    #[tokio::test]
    async fn frames_may_come_in_any_order_and_the_last_chunk_is_marked() {
        let encodings = Arc::new(Encodings::new(Budget::new(1 << 20, 1 << 20)));
        let mut stream = results(Encoding::Raw, &encodings);
        let chunks = sent(&mut stream, &[4..6, 0..1, 1..4]).await;
        let said: Vec<_> = chunks
            .iter()
            .map(|chunk| (chunk.offset, chunk.is_last, chunk.head.is_some()))
            .collect();
        let bytes = 3 * 32 * 16;
        assert_eq!(
            said,
            [(4 * bytes, false, true), (0, false, false), (bytes, true, false)]
        );
        let expected: Vec<u8> = (0..6).flat_map(|n| vec![40 * n as u8; bytes as usize]).collect();
        assert_eq!(joined(&chunks), expected);
        let mut twice = results(Encoding::Raw, &encodings);
        sent(&mut twice, &[0..3]).await;
        let refused = twice.piece(0, 7, frames(2..4)).await.err().unwrap();
        assert!(matches!(refused, Error::Internal(_)), "{refused}");
    }

    #[tokio::test]
    async fn a_film_as_mp4_is_sent_when_it_is_complete_and_is_encoded_once_for_all_streams() {
        let bound = Budget::new(1 << 20, 1 << 20);
        let encodings = Arc::new(Encodings::new(bound.clone()));
        let (mut one, mut other) = (
            results(Encoding::Mp4, &encodings),
            results(Encoding::Mp4, &encodings),
        );
        assert_eq!(sent(&mut one, &[3..6, 0..2]).await, []);
        let taken = bound.taken();
        assert!(taken > 0, "what is encoded counts");
        assert_eq!(sent(&mut other, &[3..6, 0..2]).await, []);
        assert_eq!(bound.taken(), taken, "once");
        let file = sent(&mut one, &[2..3]).await;
        assert_eq!(file[0].media_type, "video/mp4");
        assert_eq!(file[0].head.as_ref().unwrap().metadata["seed"], "7");
        assert!(file.last().unwrap().is_last);
        let made = joined(&file);
        assert_eq!(media::recipe_of(&made).unwrap().seed, 7);
        assert_eq!(joined(&sent(&mut other, &[2..3]).await), made);
        drop((one, other));
        assert_eq!(bound.taken(), 0, "nothing is left");
    }

    #[tokio::test]
    async fn a_film_is_sent_as_frames_and_then_as_mp4_where_both_are_requested() {
        let encodings = Arc::new(Encodings::new(Budget::new(1 << 20, 1 << 20)));
        let mut stream = results(Encoding::FramesAndMp4, &encodings);
        let chunks = sent(&mut stream, &[3..6, 0..3]).await;
        let (raw, file): (Vec<_>, Vec<_>) = chunks
            .into_iter()
            .partition(|chunk| chunk.media_type == "video/x-raw-rgb");
        let expected: Vec<u8> = (0..6).flat_map(|n| vec![40 * n as u8; 3 * 32 * 16]).collect();
        assert_eq!(joined(&raw), expected);
        assert!(raw.last().unwrap().is_last && file.last().unwrap().is_last);
        assert!(file[0].head.is_some());
        assert_eq!(media::recipe_of(&joined(&file)).unwrap().seed, 7);
        // Where there is no room for the file, the frames are sent all the same.
        let encodings = Arc::new(Encodings::new(Budget::new(100, 100)));
        let mut stream = results(Encoding::FramesAndMp4, &encodings);
        assert_eq!(joined(&sent(&mut stream, &[3..6, 0..3]).await), expected);
    }

    const SOUND: Sound = Sound {
        samples_per_second: 48_000,
        channels: 1,
        samples: 36_000,
    };

    /// Frames and sound of a film, in this order of pieces: ranges of frames, or of samples.
    async fn sent_with_sound(results: &mut Results, pieces: &[(&str, std::ops::Range<u64>)]) -> Vec<Chunk> {
        let MediaFormat::Video { width, height, .. } = FILM else {
            unreachable!()
        };
        let mut sent = Vec::new();
        for (track, units) in pieces {
            let mut piece = frames(units.start.min(5)..units.end.min(6));
            match *track {
                SOUND_OF_FILM => {
                    piece.format = SOUND.track();
                    piece.first = units.start;
                    piece.data = vec![3; 2 * (units.end - units.start) as usize].into();
                    piece.track = SOUND_OF_FILM.to_owned();
                }
                _ => {
                    piece.format = MediaFormat::Video {
                        width,
                        height,
                        frames: 6,
                        frames_per_second: 8.0,
                        sound: Some(SOUND),
                    }
                }
            }
            sent.extend(results.piece(0, 7, piece).await.unwrap());
        }
        sent
    }

    #[tokio::test]
    async fn frames_and_sound_are_one_file_whichever_come_first() {
        let bound = Budget::new(1 << 20, 1 << 20);
        let encodings = Arc::new(Encodings::new(bound.clone()));
        let orders = [
            [("", 0..6), ("sound", 0..9000), ("sound", 9000..36_000)],
            [("sound", 9000..36_000), ("", 0..6), ("sound", 0..9000)],
            [("sound", 0..9000), ("sound", 9000..36_000), ("", 0..6)],
        ];
        let mut files = Vec::new();
        for order in &orders {
            let mut stream = results(Encoding::Mp4, &encodings);
            let before = sent_with_sound(&mut stream, &order[..2]).await;
            assert_eq!(before, [], "nothing is sent before all is there");
            let file = sent_with_sound(&mut stream, &order[2..]).await;
            assert!(
                file.iter()
                    .all(|chunk| chunk.media_type == "video/mp4" && chunk.track.is_empty())
            );
            let head = file[0].head.as_ref().unwrap();
            assert_eq!(head.format.sound(), Some(SOUND));
            files.push(joined(&file));
            drop(stream);
            assert_eq!(bound.taken(), 0, "nothing is left");
        }
        assert!(files.iter().all(|file| *file == files[0]));
        // Beside the file both are sent as they come.
        for order in &orders {
            let mut stream = results(Encoding::FramesAndMp4, &encodings);
            let sent = sent_with_sound(&mut stream, order).await;
            let of = |media_type: &str| {
                let own = sent.iter().filter(|chunk| chunk.media_type == media_type);
                own.cloned().collect::<Vec<_>>()
            };
            assert_eq!(joined(&of("video/x-raw-rgb")).len(), 6 * 3 * 32 * 16);
            assert!(joined(&of("audio/wav")).starts_with(b"RIFF"));
            assert_eq!(joined(&of("video/mp4")), files[0]);
            assert!(sent.last().unwrap().media_type == "video/mp4");
        }
    }

    #[tokio::test]
    async fn encoded_films_are_bounded() {
        let encodings = Arc::new(Encodings::new(Budget::new(100, 100)));
        let mut stream = results(Encoding::Mp4, &encodings);
        let refused = stream.piece(0, 7, frames(0..6)).await.err().unwrap();
        assert!(
            matches!(&refused, Error::ClientLimit(words) if words.contains("limits.results_per_client")),
            "{refused}"
        );
    }
}
