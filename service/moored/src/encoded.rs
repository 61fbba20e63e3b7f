//! A file that is made here, in parts, of which no copy is made: a film as MP4, a track as FLAC.

use bytes::Bytes;

/// A whole file.
#[derive(Debug)]
pub(crate) struct EncodedFile {
    parts: Vec<Bytes>,
    bytes: u64,
}

impl EncodedFile {
    /// A file of these parts, in their order.
    pub(crate) fn of(parts: Vec<Bytes>) -> EncodedFile {
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        EncodedFile { parts, bytes }
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next bytes of the file from where the reader stands, at most so many; `None` at the end.
    pub(crate) fn read(&self, at: &mut FilePosition, most: usize) -> Option<Bytes> {
        let mut chunk = Vec::new();
        while let Some(part) = self.parts.get(at.part) {
            let end = part.len().min(at.byte + most - chunk.len());
            chunk.extend_from_slice(&part[at.byte..end]);
            at.byte = end;
            if end == part.len() {
                (at.part, at.byte) = (at.part + 1, 0);
            }
            if chunk.len() == most {
                break;
            }
        }
        (!chunk.is_empty()).then(|| chunk.into())
    }
}

/// Where a reader of an [`EncodedFile`] stands.
#[derive(Debug, Default)]
pub(crate) struct FilePosition {
    part: usize,
    byte: usize,
}
