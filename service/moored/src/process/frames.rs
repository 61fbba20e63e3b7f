//! Frames: the length of a message in bytes (32 bits, big-endian), then the message in postcard, over a pipe.

use std::io;
use std::marker::PhantomData;

use bytes::BytesMut;
use postcard::ser_flavors::Size;
use residency::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::codec::Decoder;

/// Most bytes of a message: a 4096 x 4096 picture with its latent takes far less.
const LONGEST_FRAME_BYTES: usize = 1 << 30;

/// Most bytes of the pictures, films and sounds of a request: the rest of a frame is for the values that stages compute of them.
pub(crate) const MOST_INPUT_BYTES: Bytes = Bytes(LONGEST_FRAME_BYTES as u64 / 4 * 3);

/// An invalid frame. Both ends are one build, so this is a bug of ours or a process that was killed in the middle of
/// a frame.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The pipe failed.
    #[error("the pipe to the other process failed: {0}")]
    Pipe(#[from] io::Error),
    /// The bytes do not decode, or the message does not encode.
    #[error("a frame cannot be read or written: {0}")]
    Malformed(#[from] postcard::Error),
    /// The message is shorter than its frame.
    #[error("a frame goes on for {0} bytes after its message")]
    Surplus(usize),
    /// The frame exceeds the maximum length.
    #[error("a frame of {0} bytes, where {LONGEST_FRAME_BYTES} are the most")]
    TooLarge(usize),
}

/// Bytes of a frame's length.
const LENGTH_BYTES: usize = size_of::<u32>();

/// Reads frames of one type from a pipe that is read asynchronously.
pub(crate) struct Frames<In>(PhantomData<fn() -> In>);

impl<In> Frames<In> {
    pub(crate) fn new() -> Frames<In> {
        Frames(PhantomData)
    }
}

impl<In: DeserializeOwned> Decoder for Frames<In> {
    type Item = In;
    type Error = FrameError;

    fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<In>, FrameError> {
        let Some(&length) = buffer.first_chunk() else {
            return Ok(None);
        };
        let end = LENGTH_BYTES + checked(length)?;
        if buffer.len() < end {
            buffer.reserve(end - buffer.len());
            return Ok(None);
        }
        message_of(&buffer.split_to(end)[LENGTH_BYTES..]).map(Some)
    }
}

/// Writes one frame. Blobs go to `pipe` as they are, each in one piece. Nothing is written of a message that is too
/// large.
pub(crate) fn write(message: &impl Serialize, pipe: &mut impl io::Write) -> Result<(), FrameError> {
    pipe.write_all(&length_of(message)?)?;
    // The message serializes, as its size was computed, so this is an error of the pipe, which postcard does not report.
    postcard::to_io(message, pipe).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
    Ok(())
}

/// As [`write()`], into memory of its size: for a pipe that is written asynchronously.
pub(crate) fn in_memory(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let length = length_of(message)?;
    let mut frame = Vec::with_capacity(LENGTH_BYTES + checked(length)?);
    frame.extend_from_slice(&length);
    Ok(postcard::to_io(message, frame)?)
}

/// The length of a message, as its frame begins.
fn length_of(message: &impl Serialize) -> Result<[u8; LENGTH_BYTES], FrameError> {
    let bytes = postcard::serialize_with_flavor(message, Size::default())?;
    let length = u32::try_from(bytes).map_err(|_| FrameError::TooLarge(bytes))?;
    let length = length.to_be_bytes();
    checked(length)?;
    Ok(length)
}

/// Reads one frame from a blocking pipe; `None` when the other end has closed it between frames.
pub(crate) fn read<In: DeserializeOwned>(pipe: &mut impl io::Read) -> Result<Option<In>, FrameError> {
    let mut length = [0_u8; LENGTH_BYTES];
    match pipe.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => pipe.read_exact(&mut length[1..])?,
    }
    let mut frame = vec![0_u8; checked(length)?];
    pipe.read_exact(&mut frame)?;
    message_of(&frame).map(Some)
}

/// A frame's length, if it may be that long.
fn checked(length: [u8; LENGTH_BYTES]) -> Result<usize, FrameError> {
    match u32::from_be_bytes(length) as usize {
        length if length > LONGEST_FRAME_BYTES => Err(FrameError::TooLarge(length)),
        length => Ok(length),
    }
}

/// The message in the bytes of a frame. A blob is copied once, in one piece.
fn message_of<In: DeserializeOwned>(frame: &[u8]) -> Result<In, FrameError> {
    let (message, rest) = postcard::take_from_bytes(frame)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(FrameError::Surplus(rest.len()))
    }
}

#[cfg(test)]
pub(super) mod tests;
