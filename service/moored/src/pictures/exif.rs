//! The few lines of Exif that hold a recipe in JPEG and WebP: as other tools write it in `UserComment`, and as ours in
//! `MakerNote`.

/// Little endian, then 42, then where the first directory is (TIFF 6.0, section 2).
const HEADER: [u8; 8] = *b"II*\0\x08\0\0\0";
const EXIF_DIRECTORY: u16 = 0x8769;
const MAKER_NOTE: u16 = 0x927c;
const USER_COMMENT: u16 = 0x9286;
const LONG: u16 = 4;
const UNDEFINED: u16 = 7;
/// What our note begins with.
const OURS: &[u8] = b"moored\0";
/// Bytes of a directory with so many entries: their number, the entries, and where the next directory is.
const fn directory_bytes(entries: usize) -> usize {
    2 + 12 * entries + 4
}

/// Exif with a recipe as JSON, and in the form of other tools.
pub(super) fn write(json: &str, parameters: &str) -> Vec<u8> {
    let note = [OURS, json.as_bytes()].concat();
    // A1111 has big endian here, whatever the order of the file.
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
            (MAKER_NOTE, UNDEFINED, note.len(), data),
            (USER_COMMENT, UNDEFINED, comment.len(), data + note.len()),
        ],
    );
    out.extend(note);
    out.extend(comment);
    out
}

/// Entries: tag, type, count, and the value or where it is.
fn directory(out: &mut Vec<u8>, entries: &[(u16, u16, usize, usize)]) {
    let long = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    out.extend(u16::try_from(entries.len()).unwrap_or(u16::MAX).to_le_bytes());
    for (tag, kind, count, value) in entries {
        out.extend(tag.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend(long(*count));
        out.extend(long(*value));
    }
    out.extend([0; 4]); // no directory follows
}

/// The JSON in Exif of ours.
pub(super) fn read(exif: &[u8]) -> Option<String> {
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    if !exif.starts_with(&HEADER[..4]) {
        return None;
    }
    let first = long(exif, 4)?;
    let (_, inner) = entry(exif, first, EXIF_DIRECTORY)?;
    let (length, at) = entry(exif, inner, MAKER_NOTE)?;
    let note = exif.get(at..at.checked_add(length)?)?.strip_prefix(OURS)?;
    String::from_utf8(note.to_vec()).ok()
}

/// Count and value of an entry.
fn entry(exif: &[u8], directory: usize, tag: u16) -> Option<(usize, usize)> {
    let count = usize::from(short(exif, directory)?);
    let places = (0..count).map(|index| directory + 2 + 12 * index);
    let found = places.into_iter().find(|at| short(exif, *at) == Some(tag))?;
    Some((long(exif, found + 4)?, long(exif, found + 8)?))
}

fn short(exif: &[u8], at: usize) -> Option<u16> {
    let bytes = exif.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn long(exif: &[u8], at: usize) -> Option<usize> {
    let bytes = exif.get(at..at.checked_add(4)?)?;
    usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_cut_is_not() {
        let exif = write("{\"prompt\": \"🟥\"}", "🟥\nSteps: 4");
        assert_eq!(read(&exif).unwrap(), "{\"prompt\": \"🟥\"}");
        assert_eq!(
            read(&[b"Exif\0\0", &exif[..]].concat()).unwrap(),
            "{\"prompt\": \"🟥\"}"
        );
        for length in 0..exif.len() - 40 {
            let _ = read(&exif[..length]); // no panic
        }
        assert_eq!(read(b"II*\0\xff\xff\xff\xff"), None);
        assert_eq!(read(b"MM\0*"), None);
    }
}
