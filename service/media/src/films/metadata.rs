//! The metadata of a film's file: its recipe, and the program that wrote it.

use shiguredo_mp4::boxes::UnknownBox;
use shiguredo_mp4::{BoxHeader, BoxSize, BoxType, Encode as _};

use super::FilmError;
use super::mp4::failed;
use crate::Recipe;

/// Metadata in the form of iTunes: the comment of a film, and the program that wrote it, as other tools show them.
const COMMENT: &[u8; 4] = b"\xa9cmt";
const TOOL: &[u8; 4] = b"\xa9too";
/// Path of the boxes that contain them.
const METADATA: [&[u8; 4]; 4] = [b"moov", b"udta", b"meta", b"ilst"];
/// Type of a value in metadata: UTF-8.
const TEXT: u32 = 1;

/// A box of a type that the library does not know.
pub(super) fn opaque(kind: &[u8; 4], payload: Vec<u8>) -> UnknownBox {
    let box_type = BoxType::Normal(*kind);
    UnknownBox {
        box_type,
        box_size: BoxSize::with_payload_size(box_type, payload.len() as u64),
        payload,
    }
}

/// The metadata of a film: its recipe as JSON, and the program that made it.
pub(super) fn metadata(recipe: &Recipe) -> Result<UnknownBox, FilmError> {
    let bytes = |kind: &[u8; 4], payload: Vec<u8>| opaque(kind, payload).encode_to_vec().map_err(failed);
    let text = |kind: &[u8; 4], text: &str| {
        // The type of the value, and a locale that is open.
        let value = [&TEXT.to_be_bytes()[..], &[0; 4], text.as_bytes()].concat();
        bytes(kind, bytes(b"data", value)?)
    };
    let json = serde_json::to_string(recipe).map_err(|problem| FilmError::Container(problem.to_string()))?;
    let items = [
        text(COMMENT, &json)?,
        text(TOOL, &format!("moored {}", recipe.version))?,
    ];
    // Version and flags; then the handler: iTunes' metadata.
    let handler = [&[0; 8][..], b"mdirappl", &[0; 9]].concat();
    let meta = [
        vec![0; 4],
        bytes(b"hdlr", handler)?,
        bytes(b"ilst", items.concat())?,
    ];
    Ok(opaque(b"udta", bytes(b"meta", meta.concat())?))
}

/// The recipe in the metadata of a film; `None` where it has none.
pub fn recipe_of(file: &[u8]) -> Option<&str> {
    let inside = METADATA.iter().try_fold(file, |content, kind| {
        let inside = find(content, kind)?;
        // Metadata has a version and flags in front.
        if *kind == b"meta" {
            inside.get(4..)
        } else {
            Some(inside)
        }
    })?;
    let value = find(find(inside, COMMENT)?, b"data")?;
    std::str::from_utf8(value.get(8..)?).ok()
}

/// The payload of the first box of a kind among boxes.
fn find<'a>(mut boxes: &'a [u8], kind: &[u8; 4]) -> Option<&'a [u8]> {
    while !boxes.is_empty() {
        let (header, payload) = BoxHeader::decode_header_and_payload(boxes).ok()?;
        if header.box_type == BoxType::Normal(*kind) {
            return Some(payload);
        }
        boxes = boxes.get(header.external_size() + payload.len()..)?;
    }
    None
}
