//! Bounds on the sizes of files that users name, and tokens in files.

use std::io::{Error, ErrorKind};
use std::path::Path;

/// Most bytes of a picture, a film or a track, and of a file with a recipe.
pub const MEDIA_BYTES: u64 = 2 << 30;
/// Most bytes of a text: prompts, lyrics.
pub const TEXT_BYTES: u64 = 16 << 20;
/// Most bytes of a certificate or a configuration.
pub const SETTING_BYTES: u64 = 4 << 20;
/// Most bytes of a token.
const TOKEN_BYTES: u64 = 4 << 10;

/// The token in a file: one line.
///
/// # Errors
/// As [`gpu::text_bounded`], and for several lines.
pub fn token(path: &Path) -> std::io::Result<String> {
    let text = gpu::text_bounded(path, TOKEN_BYTES)?;
    let token = text.trim();
    if token.contains(char::is_control) {
        let problem = "it has several lines, and a token is one: keep one line";
        return Err(Error::new(ErrorKind::InvalidData, problem));
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, " one-token-of-one-line\r\n").unwrap();
        assert_eq!(token(&file).unwrap(), "one-token-of-one-line");
        std::fs::write(&file, "first\nsecond\n").unwrap();
        assert!(token(&file).unwrap_err().to_string().contains("keep one line"));
        std::fs::write(&file, "x".repeat(5 << 10)).unwrap();
        assert!(token(&file).is_err(), "it is too long");
    }
}
