//! Results cut into chunks, each with its offset: the encodings of results, and the data of their chunks.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use engine::job::JobWork;
use gpu::Timeline;
use hub::catalogue::Makes;
use media::tracks::{TrackFormat, wav_header};
use media::{EncodedFile, FilePosition, Recipe, pictures};
use model::{LeftOut, MediaFormat, Piece, SOUND_OF_FILM};
use serde::{Deserialize, Serialize};

/// Bytes of one chunk of a result or a latent. A stream that is not read holds a few of them.
pub const CHUNK_BYTES: usize = 256 << 10;

/// Bytes of a result on their way to a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Number of the item.
    pub item: u32,
    /// Name of the track; empty for the only one.
    pub track: String,
    pub media_type: Cow<'static, str>,
    /// Bytes of the whole result.
    pub total_bytes: u64,
    /// Offset of these bytes in the result.
    pub offset: u64,
    pub data: Bytes,
    /// Whether it is the last chunk of the result.
    pub is_last: bool,
    /// Present in the first chunk of a result.
    pub head: Option<ChunkHead>,
}

/// Data about a whole result, sent with its first chunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkHead {
    pub metadata: HashMap<String, String>,
    pub format: MediaFormat,
}

/// The encoding in which results are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encoding {
    /// Pixels or samples, not encoded; the sound of a film as WAV.
    #[default]
    Raw,
    /// A picture as PNG; other media raw.
    Png,
    /// A track as WAV; other media raw.
    Wav,
    /// A track as FLAC, once it is complete; other media raw.
    Flac,
    /// A film as MP4 with its sound, once it is complete; a track as WAV; a picture raw.
    Mp4,
    /// A film raw and its sound as WAV, and then both as MP4; a track as WAV; a picture raw.
    FramesAndMp4,
    /// A track as WAV, and then as FLAC; other media raw.
    WavAndFlac,
}

/// Whether a result is sent as one file that is made of all its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsFile {
    No,
    Instead,
    /// As a file after the pieces. If the file cannot be made, that is no error: the client has the pieces.
    Beside,
}

impl Encoding {
    /// Whether results of this medium are sent as files.
    pub(crate) fn as_file_of(self, makes: Makes) -> AsFile {
        match (self, makes) {
            (Encoding::Mp4, Makes::Video) | (Encoding::Flac, Makes::Audio) => AsFile::Instead,
            (Encoding::FramesAndMp4, Makes::Video) | (Encoding::WavAndFlac, Makes::Audio) => AsFile::Beside,
            _ => AsFile::No,
        }
    }

    /// The track whose file has this one: the sound of a film is in the file of its frames.
    pub(crate) fn track_of_file(self, track: &str) -> String {
        match self {
            Encoding::Mp4 | Encoding::FramesAndMp4 => String::new(),
            Encoding::Raw | Encoding::Png | Encoding::Wav | Encoding::Flac | Encoding::WavAndFlac => {
                track.to_owned()
            }
        }
    }
}

/// How the results of a job are sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Output {
    pub(crate) encoding: Encoding,
    /// Written into the file, and sent as metadata; its seed is replaced by each item's.
    pub(crate) recipe: Recipe,
    pub(crate) omit_metadata: bool,
    /// The ends of the request's texts that the model does not read.
    pub(crate) left_out: Vec<LeftOut>,
}

impl Output {
    /// Whether the results of this work are sent as files that are made of many pieces.
    pub(crate) fn as_file_of(&self, work: &JobWork) -> AsFile {
        match work {
            JobWork::Run(run) => self.encoding.as_file_of(Makes::of(&run.request.medium)),
            JobWork::Load { .. } => AsFile::No,
        }
    }

    /// Output without a recipe.
    pub(crate) fn without_recipe(encoding: Encoding) -> Output {
        Output {
            encoding,
            recipe: Recipe::default(),
            omit_metadata: true,
            left_out: Vec::new(),
        }
    }

    /// The recipe of an item; `None` where it is left out.
    pub(crate) fn recipe_of(&self, seed: u64) -> Option<Recipe> {
        let recipe = || Recipe {
            seed,
            ..self.recipe.clone()
        };
        (!self.omit_metadata).then(recipe)
    }
}

/// The data that all chunks of a result share, made once, and what is sent before its first piece.
pub(crate) struct Envelope {
    item: u32,
    track: String,
    media_type: &'static str,
    total_bytes: u64,
    /// The header of the file; empty where it has none.
    header: Bytes,
    /// For the first chunk.
    head: Option<ChunkHead>,
}

impl Envelope {
    /// The envelope of a result of this format whose pieces are sent as they arrive.
    ///
    /// # Errors
    /// For people: when the result has too many bytes, or its recipe cannot be written.
    pub(crate) fn of_pieces(
        item: u32,
        seed: u64,
        track: String,
        format: MediaFormat,
        output: &Output,
    ) -> Result<Envelope, String> {
        let recipe = output.recipe_of(seed);
        let is_wav = match output.encoding {
            Encoding::Wav | Encoding::Mp4 | Encoding::FramesAndMp4 | Encoding::WavAndFlac => true,
            // Beside raw frames too: a file of the film can be made of both.
            Encoding::Raw | Encoding::Png | Encoding::Flac => track == SOUND_OF_FILM,
        };
        let header = match TrackFormat::of(&format).filter(|_| is_wav) {
            Some(track) => Some(wav_header(track, recipe.as_ref())?),
            None => None,
        };
        let (media_type, header) = match header {
            Some(header) => ("audio/wav", Bytes::from(header)),
            None => (raw_media_type(&format), Bytes::new()),
        };
        let units = format.bytes().ok_or("a result of too many bytes")?;
        Ok(Envelope {
            item,
            track,
            media_type,
            total_bytes: units + header.len() as u64,
            header,
            head: Some(head(seed, format, recipe.as_ref())?),
        })
    }

    /// A piece of the result as chunks, after the header where it is the first that is sent.
    pub(crate) fn chunks(&mut self, piece: &Piece, is_last: bool) -> Vec<Chunk> {
        let mut chunks = Vec::with_capacity(1 + piece.data.len().div_ceil(CHUNK_BYTES));
        if self.head.is_some() && !self.header.is_empty() {
            chunks.push(self.chunk(0, self.header.clone(), false));
        }
        let place = self.header.len() as u64 + piece.first * piece.format.unit_bytes();
        chunks.extend(self.cut(place, &piece.data, is_last));
        chunks
    }

    /// Bytes at this offset of the result as chunks.
    fn cut(&mut self, offset: u64, data: &Bytes, is_last: bool) -> impl Iterator<Item = Chunk> {
        (0..data.len()).step_by(CHUNK_BYTES).map(move |start| {
            let end = (start + CHUNK_BYTES).min(data.len());
            let is_last = is_last && end == data.len();
            self.chunk(offset + start as u64, data.slice(start..end), is_last)
        })
    }

    fn chunk(&mut self, offset: u64, data: Bytes, is_last: bool) -> Chunk {
        Chunk {
            item: self.item,
            track: self.track.clone(),
            media_type: self.media_type.into(),
            total_bytes: self.total_bytes,
            offset,
            data,
            is_last,
            head: self.head.take(),
        }
    }
}

/// The chunks of a picture as PNG.
pub(crate) fn png_chunks(
    item: u32,
    seed: u64,
    picture: &Piece,
    output: &Output,
) -> Result<Vec<Chunk>, String> {
    let MediaFormat::Image { width, height } = picture.format else {
        return Err("no picture".to_owned());
    };
    let timeline = Timeline::begin("encode a result");
    let recipe = output.recipe_of(seed);
    let file = Bytes::from(pictures::png(width, height, &picture.data, recipe.as_ref())?);
    let mut envelope = Envelope {
        item,
        track: picture.track.clone(),
        media_type: "image/png",
        total_bytes: file.len() as u64,
        header: Bytes::new(),
        head: Some(head(seed, picture.format, recipe.as_ref())?),
    };
    let chunks = envelope.cut(0, &file, true).collect();
    timeline.end();
    Ok(chunks)
}

/// The chunks of a film's or a track's file.
pub(crate) fn file_chunks(
    item: u32,
    seed: u64,
    track: String,
    format: MediaFormat,
    output: &Output,
    file: Arc<EncodedFile>,
) -> Result<Box<dyn Iterator<Item = Chunk> + Send>, String> {
    let recipe = output.recipe_of(seed);
    let mut envelope = Envelope {
        item,
        track,
        media_type: match format {
            MediaFormat::Audio { .. } => "audio/flac",
            MediaFormat::Image { .. } | MediaFormat::Video { .. } => "video/mp4",
        },
        total_bytes: file.bytes(),
        header: Bytes::new(),
        head: Some(head(seed, format, recipe.as_ref())?),
    };
    let (mut position, mut offset) = (FilePosition::default(), 0);
    Ok(Box::new(std::iter::from_fn(move || {
        let chunk = file.read(&mut position, CHUNK_BYTES)?;
        let start = offset;
        offset += chunk.len() as u64;
        Some(envelope.chunk(start, chunk, offset == file.bytes()))
    })))
}

/// Media type of raw units.
pub(crate) fn raw_media_type(format: &MediaFormat) -> &'static str {
    match format {
        MediaFormat::Image { .. } => "image/x-raw-rgb",
        MediaFormat::Video { .. } => "video/x-raw-rgb",
        MediaFormat::Audio { .. } => "audio/x-raw-s16le",
    }
}

/// The head for the first chunk of a result.
fn head(seed: u64, format: MediaFormat, recipe: Option<&Recipe>) -> Result<ChunkHead, String> {
    let mut metadata = HashMap::from([("seed".to_owned(), seed.to_string())]);
    if let MediaFormat::Image { width, height } | MediaFormat::Video { width, height, .. } = format {
        metadata.insert("width".to_owned(), width.to_string());
        metadata.insert("height".to_owned(), height.to_string());
    }
    if let Some(recipe) = recipe {
        metadata.insert("prompt".to_owned(), recipe.prompt.clone());
        metadata.insert("model".to_owned(), recipe.model_key.clone());
        metadata.insert(
            "recipe".to_owned(),
            serde_json::to_string(recipe).map_err(|e| e.to_string())?,
        );
    }
    Ok(ChunkHead { metadata, format })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunks_of_a_large_picture_add_up_to_its_file() {
        let rgb = bytes::Bytes::from(vec![5_u8; 1024 * 1024 * 3]);
        let output = Output::without_recipe(Encoding::Raw);
        let picture = Piece::image(1024, 1024, rgb.clone());
        let mut envelope = Envelope::of_pieces(2, 9, String::new(), picture.format, &output).unwrap();
        let chunks = envelope.chunks(&picture, true);
        assert_eq!(chunks.len(), (3 << 20) / CHUNK_BYTES);
        let mut joined = Vec::new();
        for (i, chunk) in chunks.iter().enumerate() {
            assert_eq!((chunk.item, chunk.total_bytes), (2, rgb.len() as u64));
            assert_eq!(chunk.is_last, i + 1 == chunks.len());
            assert_eq!(chunk.head.is_none(), i > 0);
            let names_prompt = |head: &ChunkHead| head.metadata.contains_key("prompt");
            assert!(
                !chunk.head.as_ref().is_some_and(names_prompt),
                "metadata was to be left out"
            );
            joined.extend_from_slice(&chunk.data);
        }
        assert_eq!(joined, rgb);
    }

    #[test]
    fn pieces_of_a_track_add_up_to_one_wav_file() {
        let format = MediaFormat::Audio {
            samples_per_second: 48_000,
            channels: 2,
            samples: 5,
        };
        let piece = |first, samples: usize| Piece {
            track: "drums".into(),
            format,
            first,
            data: vec![first as u8; 4 * samples].into(),
        };
        // The header is sent first, whichever piece arrives first.
        for pieces in [[piece(0, 3), piece(3, 2)], [piece(3, 2), piece(0, 3)]] {
            let mut file = [0; 64];
            let output = Output::without_recipe(Encoding::Wav);
            let mut envelope = Envelope::of_pieces(0, 1, "drums".into(), format, &output).unwrap();
            let [first, last] = pieces;
            let mut chunks = envelope.chunks(&first, false);
            chunks.extend(envelope.chunks(&last, true));
            let count = chunks.len();
            for (number, chunk) in (1..).zip(chunks) {
                assert_eq!((chunk.track.as_str(), chunk.total_bytes), ("drums", 64));
                assert_eq!(
                    (chunk.head.is_some(), chunk.is_last),
                    (number == 1, number == count)
                );
                let place = chunk.offset as usize;
                file[place..place + chunk.data.len()].copy_from_slice(&chunk.data);
            }
            assert_eq!((&file[..4], &file[8..12]), (&b"RIFF"[..], &b"WAVE"[..]));
            assert_eq!(file[44..], [[0; 4].repeat(3), [3; 4].repeat(2)].concat());
        }
    }
}
