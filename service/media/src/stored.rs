//! The recipe in a file of any kind.

use crate::{Recipe, films, pictures, tracks};

/// Reads the recipe from a picture, an MP4 or a track that moored saved.
///
/// # Errors
/// A message for people, when the file has none, or a damaged one.
pub fn recipe_of(file: &[u8]) -> Result<Recipe, String> {
    let text = if films::is_mp4(file) {
        films::recipe_of(file).map(str::to_owned)
    } else if tracks::is_track(file) {
        tracks::recipe_of(file)
    } else {
        pictures::recipe_text(file)?
    };
    let text =
        text.ok_or("has no moored settings; --from needs a picture, a film or a track saved by moored")?;
    serde_json::from_str(&text).map_err(|e| format!("its settings cannot be read: {e}"))
}
