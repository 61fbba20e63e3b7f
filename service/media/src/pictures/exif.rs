//! The few lines of Exif that hold a recipe in JPEG and WebP: in `UserComment` for other tools, and in our
//! `MakerNote`. The Python client writes the same bytes (`client-py/src/moored/_saving.py`).

/// Big endian, then 42, then the offset of the first directory (TIFF 6.0, section 2). Readers disagree whether UTF-16 in
/// `UserComment` is always big endian, or has the byte order of the file. In a big endian file both are right.
const HEADER: [u8; 8] = *b"MM\0*\0\0\0\x08";
const EXIF_DIRECTORY: u16 = 0x8769;
const MAKER_NOTE: u16 = 0x927c;
const USER_COMMENT: u16 = 0x9286;
const LONG: u16 = 4;
const UNDEFINED: u16 = 7;
/// Prefix of our `MakerNote`.
const OURS: &[u8] = b"moored\0";
/// Most bytes of Exif in a JPEG: a segment's length has 16 bits and counts itself, and `Exif\0\0` stands before the data.
pub(super) const JPEG_LIMIT_BYTES: usize = 0xffff - 2 - 6;

/// Bytes of a directory with so many entries: their number, the entries, and the offset of the next directory.
const fn directory_bytes(entries: usize) -> usize {
    2 + 12 * entries + 4
}

/// Exif with a recipe as JSON, and as other tools read it.
pub(super) fn write(json: &str, parameters: &str) -> Vec<u8> {
    let note = [OURS, json.as_bytes()].concat();
    let comment: Vec<u8> = b"UNICODE\0"
        .iter()
        .copied()
        .chain(parameters.encode_utf16().flat_map(u16::to_be_bytes))
        .collect();
    let inner = HEADER.len() + directory_bytes(1);
    let data = inner + directory_bytes(2);
    let mut out = HEADER.to_vec();
    directory(&mut out, &[(EXIF_DIRECTORY, LONG, 1, inner)]);
    directory(
        &mut out,
        &[
            // After the comment, whose length is even: TIFF requires values at even offsets.
            (MAKER_NOTE, UNDEFINED, note.len(), data + comment.len()),
            (USER_COMMENT, UNDEFINED, comment.len(), data),
        ],
    );
    out.extend(comment);
    out.extend(note);
    out
}

/// Entries: tag, type, count, and the value or its offset.
fn directory(out: &mut Vec<u8>, entries: &[(u16, u16, usize, usize)]) {
    let long = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
    out.extend(u16::try_from(entries.len()).unwrap_or(u16::MAX).to_be_bytes());
    for (tag, kind, count, value) in entries {
        out.extend(tag.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend(long(*count));
        out.extend(long(*value));
    }
    out.extend([0; 4]); // no directory follows
}

/// The JSON in our `MakerNote`, in either byte order: a tool that rewrote the file may have chosen the other.
pub(super) fn read(exif: &[u8]) -> Option<String> {
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let tiff = Tiff {
        bytes: exif,
        big_endian: exif.starts_with(b"MM\0*"),
    };
    if !tiff.big_endian && !exif.starts_with(b"II*\0") {
        return None;
    }
    let (_, inner) = tiff.entry(tiff.long(4)?, EXIF_DIRECTORY)?;
    let (length, at) = tiff.entry(inner, MAKER_NOTE)?;
    let note = exif.get(at..at.checked_add(length)?)?.strip_prefix(OURS)?;
    String::from_utf8(note.to_vec()).ok()
}

struct Tiff<'a> {
    bytes: &'a [u8],
    big_endian: bool,
}

impl Tiff<'_> {
    /// Count and value of an entry.
    fn entry(&self, directory: usize, tag: u16) -> Option<(usize, usize)> {
        let count = usize::from(self.short(directory)?);
        let mut places = (0..count).map(|index| directory + 2 + 12 * index);
        let found = places.find(|at| self.short(*at) == Some(tag))?;
        Some((self.long(found + 4)?, self.long(found + 8)?))
    }

    fn short(&self, at: usize) -> Option<u16> {
        let bytes: [u8; 2] = self.bytes.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(match self.big_endian {
            true => u16::from_be_bytes(bytes),
            false => u16::from_le_bytes(bytes),
        })
    }

    fn long(&self, at: usize) -> Option<usize> {
        let bytes: [u8; 4] = self.bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
        let number = match self.big_endian {
            true => u32::from_be_bytes(bytes),
            false => u32::from_le_bytes(bytes),
        };
        usize::try_from(number).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::Changes;

    const JSON: &str = "{\"prompt\": \"🟥\"}";

    #[test]
    fn a_note_round_trips_and_truncated_exif_does_not_panic() {
        let exif = write(JSON, "🟥\nSteps: 4");
        assert_eq!(read(&exif).unwrap(), JSON);
        assert_eq!(read(&[b"Exif\0\0", &exif[..]].concat()).unwrap(), JSON);
        for length in 0..exif.len() {
            assert_eq!(read(&exif[..length]), None);
        }
        assert_eq!(read(b"MM\0*\xff\xff\xff\xff"), None);
        assert_eq!(read(b"II*\0\xff\xff\xff\xff"), None);
        assert_eq!(read(b"MM*\0"), None);
    }

    #[test]
    fn exif_in_the_other_byte_order_is_read() {
        let mut exif = b"II*\0\x08\0\0\0".to_vec();
        let note = [OURS, JSON.as_bytes()].concat();
        let length = u8::try_from(note.len()).unwrap();
        exif.extend(b"\x01\0\x69\x87\x04\0\x01\0\0\0\x1a\0\0\0\0\0\0\0");
        exif.extend(b"\x01\0\x7c\x92\x07\0");
        exif.extend([length, 0, 0, 0, 44, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(exif.len(), 44);
        exif.extend(note);
        assert_eq!(read(&exif).unwrap(), JSON);
    }

    /// For any bytes of Exif, the note is a part of them, or is not found.
    #[test]
    fn any_exif_is_read_safely() {
        let ours = write(JSON, "Steps: 4");
        let files = [[b"Exif\0\0", &ours[..]].concat(), ours];
        bolero::check!()
            .with_iterations(10_000)
            .with_max_len(Changes::MAX_LEN)
            .with_type::<Changes>()
            .for_each(|changes| {
                let exif = changes.of(&files);
                if let Some(note) = read(&exif) {
                    let is_there = exif
                        .windows(note.len().max(1))
                        .any(|part| part == note.as_bytes());
                    assert!(note.is_empty() || is_there);
                }
            });
    }
}
