//! The text of the recipe in a picture.

use std::io::Cursor;

use image::{ImageDecoder as _, ImageReader};

use super::encode::RECIPE_KEYWORD;
use super::exif;

/// More than any recipe that moored writes: prompts and lyrics are bounded.
const LONGEST_RECIPE_BYTES: usize = 4 << 20;

/// The JSON of the recipe in a PNG, JPEG or WebP; `None` where there is none.
///
/// # Errors
/// A message for people, when the file or the text in it is damaged.
pub(crate) fn recipe_text(file: &[u8]) -> Result<Option<String>, String> {
    if !matches!(image::guess_format(file), Ok(image::ImageFormat::Png)) {
        let reader = ImageReader::new(Cursor::new(file)).with_guessed_format();
        let mut decoder = reader
            .map_err(|problem| problem.to_string())?
            .into_decoder()
            .map_err(|problem| {
                format!("cannot be read: recipes are in PNG, JPEG, WebP, MP4, WAV and FLAC files ({problem})")
            })?;
        let exif = decoder.exif_metadata().ok().flatten().unwrap_or_default();
        return Ok(exif::read(&exif));
    }
    let mut reader = png::Decoder::new(Cursor::new(file))
        .read_info()
        .map_err(|e| format!("it is no PNG: {e}"))?;
    let _ = reader.finish(); // text chunks may stand after the pixels
    let mut texts = reader.info().utf8_text.iter();
    let Some(mut chunk) = texts.find(|chunk| chunk.keyword == RECIPE_KEYWORD).cloned() else {
        return Ok(None);
    };
    // A few compressed megabytes could become gigabytes.
    chunk
        .decompress_text_with_limit(LONGEST_RECIPE_BYTES)
        .map_err(|problem| {
            format!("has a recipe that is damaged, or longer than any of moored: {problem}")
        })?;
    chunk.get_text().map(Some).map_err(|e| e.to_string())
}
