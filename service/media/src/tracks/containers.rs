//! Data around tracks in files, and the formats that are not read, recognised by their first bytes: an error can name the type of
//! a file.

use super::TrackError;

/// Bytes of the head and of the foot of an ID3v2 tag, and the flag that says that there is a foot (ID3v2.4.0, section 3.1).
const ID3_HEAD_BYTES: usize = 10;
const ID3_HAS_FOOT: u8 = 0x10;
/// Within so many first bytes an Ogg file names its codec.
const OGG_HEAD_BYTES: usize = 64;

/// A file without the ID3v2 tags at its start.
pub(super) fn without_id3(mut file: &[u8]) -> &[u8] {
    while let Some(&[b'I', b'D', b'3', _, _, flags, ref length @ ..]) = file.first_chunk::<ID3_HEAD_BYTES>() {
        let length = length
            .iter()
            .fold(0, |sum, &byte| sum << 7 | usize::from(byte & 0x7f));
        let foot = match flags & ID3_HAS_FOOT {
            0 => 0,
            _ => ID3_HEAD_BYTES,
        };
        file = file.get(ID3_HEAD_BYTES + length + foot..).unwrap_or_default();
    }
    file
}

/// Why a file that is neither WAV nor FLAC is not read.
pub(super) fn refusal(file: &[u8]) -> TrackError {
    match foreign(file) {
        _ if file.is_empty() => TrackError::NoBytes,
        Some(name) => TrackError::Foreign(name),
        None => TrackError::Unknown,
    }
}

fn foreign(file: &[u8]) -> Option<&'static str> {
    let content = without_id3(file);
    let at = |place: usize, marker: &[u8]| content.get(place..).is_some_and(|rest| rest.starts_with(marker));
    let head = &content[..content.len().min(OGG_HEAD_BYTES)];
    let has = |marker: &[u8]| head.windows(marker.len()).any(|part| part == marker);
    let is_ogg = at(0, b"OggS");
    let known = [
        (is_ogg && has(b"OpusHead"), "Opus in an Ogg"),
        (is_ogg && has(b"\x7fFLAC"), "FLAC in an Ogg"),
        (is_ogg && has(b"\x01vorbis"), "Vorbis in an Ogg"),
        (is_ogg, "an Ogg"),
        (at(4, b"ftypM4A"), "an M4A"),
        (at(4, b"ftyp"), "an MP4 or its like"),
        (at(0, b"FORM") && at(8, b"AIFC"), "an AIFF-C"),
        (at(0, b"FORM") && at(8, b"AIFF"), "an AIFF"),
        (
            at(0, b"RIFX"),
            "a WAV with its bytes in the order of big-endian machines",
        ),
        (at(0, b"caff"), "a CAF"),
        (at(0, b"wvpk"), "a WavPack"),
        (at(0, b"MAC "), "a Monkey's Audio"),
        (at(0, b"\x30\x26\xb2\x75"), "a WMA"),
        (at(0, b"\x1aE\xdf\xa3"), "a WebM or Matroska"),
        (at(0, b"#!AMR"), "an AMR"),
        // A frame of MPEG audio begins with eleven set bits; layer 0 is AAC.
        (is_mpeg(content, |layer| layer == 0), "an AAC"),
        (is_mpeg(content, |layer| layer != 0), "an MP3"),
        (file.starts_with(b"ID3"), "an MP3"),
    ];
    known.iter().find(|(is_it, _)| *is_it).map(|(_, name)| *name)
}

fn is_mpeg(file: &[u8], is_layer: impl Fn(u8) -> bool) -> bool {
    matches!(file, [0xff, second, ..] if second & 0xe0 == 0xe0 && *second != 0xff && is_layer(second >> 1 & 3))
}
