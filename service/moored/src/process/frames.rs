//! Frames: a message with its length in front, over a pipe.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use prost::Message;
use tokio_util::codec::{Decoder, Encoder, LengthDelimitedCodec};

/// No message between the two is longer: a 4096 x 4096 picture with its latent fits many times.
const LONGEST_FRAME_BYTES: usize = 1 << 30;

/// A frame that is not what the protocol says. Both ends are one build, so this is a fault of ours or a
/// process that was cut off in the middle of a frame.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The pipe.
    #[error("the pipe to the other process failed: {0}")]
    Pipe(#[from] io::Error),
    /// The bytes.
    #[error("a frame cannot be read: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// A field that must be there.
    #[error("a frame lacks {0}")]
    Lacks(&'static str),
    /// The ledger's own form.
    #[error("a ledger cannot be read: {0}")]
    Ledger(#[from] serde_json::Error),
}

/// Reads frames of one type and writes frames of another.
pub(crate) struct Frames<In> {
    lengths: LengthDelimitedCodec,
    read: std::marker::PhantomData<fn() -> In>,
}

impl<In> Frames<In> {
    pub(crate) fn new() -> Frames<In> {
        Frames {
            lengths: LengthDelimitedCodec::builder()
                .max_frame_length(LONGEST_FRAME_BYTES)
                .new_codec(),
            read: std::marker::PhantomData,
        }
    }
}

impl<In: Message + Default> Decoder for Frames<In> {
    type Item = In;
    type Error = FrameError;

    fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<In>, FrameError> {
        match self.lengths.decode(buffer)? {
            // Freezing shares the buffer: pictures are not copied.
            Some(frame) => Ok(Some(In::decode(frame.freeze())?)),
            None => Ok(None),
        }
    }
}

impl<In, Out: Message> Encoder<Out> for Frames<In> {
    type Error = FrameError;

    fn encode(&mut self, message: Out, buffer: &mut BytesMut) -> Result<(), FrameError> {
        Ok(self
            .lengths
            .encode(Bytes::from(message.encode_to_vec()), buffer)?)
    }
}

/// One frame as bytes, for the worker's blocking writer.
pub(crate) fn to_bytes(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut frame = Vec::with_capacity(4 + length);
    frame.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    message.encode_raw(&mut frame);
    frame
}

/// Reads one frame from a blocking pipe; `None` when the other end has closed it between frames.
pub(crate) fn read_blocking<In: Message + Default>(
    pipe: &mut impl io::Read,
) -> Result<Option<In>, FrameError> {
    let mut length = [0_u8; 4];
    match pipe.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => pipe.read_exact(&mut length[1..])?,
    }
    let length = (&length[..]).get_u32() as usize;
    if length > LONGEST_FRAME_BYTES {
        return Err(FrameError::Pipe(io::Error::new(
            io::ErrorKind::InvalidData,
            "a frame of over 1 GiB",
        )));
    }
    let mut frame = vec![0_u8; length];
    pipe.read_exact(&mut frame)?;
    Ok(Some(In::decode(Bytes::from(frame))?))
}
