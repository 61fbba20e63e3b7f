//! An encoded file in parts: a film as MP4, a track as FLAC. Large parts are read without a copy.

use bytes::Bytes;

/// A whole file.
#[derive(Debug)]
pub struct EncodedFile {
    parts: Vec<Bytes>,
    bytes: u64,
}

impl EncodedFile {
    /// A file of these parts, in their order.
    pub fn of(parts: Vec<Bytes>) -> EncodedFile {
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        EncodedFile { parts, bytes }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next bytes of the file from the reader's position, at most `most`; `None` at the end.
    pub fn read(&self, at: &mut FilePosition, most: usize) -> Option<Bytes> {
        let first = self.next(at, most)?;
        if first.len() == most || at.part == self.parts.len() {
            return (!first.is_empty()).then_some(first);
        }
        // Small parts are joined, as each chunk is sent as one message.
        let mut chunk = first.to_vec();
        while chunk.len() < most
            && let Some(next) = self.next(at, most - chunk.len())
        {
            chunk.extend_from_slice(&next);
        }
        (!chunk.is_empty()).then(|| chunk.into())
    }

    /// The next bytes of the part at the reader's position, at most `most`, not copied; `None` after the last part.
    fn next(&self, at: &mut FilePosition, most: usize) -> Option<Bytes> {
        let part = self.parts.get(at.part)?;
        let (start, end) = (at.byte, part.len().min(at.byte.saturating_add(most)));
        match end == part.len() {
            true => (at.part, at.byte) = (at.part + 1, 0),
            false => at.byte = end,
        }
        Some(part.slice(start..end))
    }
}

/// The position of a reader of an [`EncodedFile`].
#[derive(Debug, Default)]
pub struct FilePosition {
    part: usize,
    byte: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_that_lie_in_one_part_are_not_copied_and_small_parts_are_joined() {
        let large = Bytes::from(vec![1; 10]);
        let parts = vec![large.clone(), vec![2; 2].into(), vec![3; 3].into()];
        let file = EncodedFile::of(parts);
        let mut at = FilePosition::default();
        let chunks: Vec<Bytes> = std::iter::from_fn(|| file.read(&mut at, 4)).collect();
        let expected: [&[u8]; 4] = [&[1; 4], &[1; 4], &[1, 1, 2, 2], &[3; 3]];
        assert_eq!(chunks, expected);
        assert_eq!(chunks[1].as_ptr(), large[4..].as_ptr(), "it is copied");
    }
}
