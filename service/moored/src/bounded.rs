//! Files that somebody names, read within a bound: a device may have no end, and a pipe may have no writer.

use std::io::{Error, ErrorKind, Read as _};
use std::path::Path;

/// Most bytes of a picture, a film or a track, and of a file with a recipe.
pub(crate) const MEDIA_BYTES: u64 = 2 << 30;
/// Most bytes of a text: prompts, lyrics.
pub(crate) const TEXT_BYTES: u64 = 16 << 20;
/// Most bytes of a certificate or a token.
pub(crate) const SETTING_BYTES: u64 = 4 << 20;

/// All of a regular file.
///
/// # Errors
/// What the system said; [`ErrorKind::InvalidInput`] for what is no regular file, [`ErrorKind::FileTooLarge`] beyond the bound.
pub(crate) fn read(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut read = Vec::new();
    gpu::open_regular(path)?
        .take(most.saturating_add(1))
        .read_to_end(&mut read)?;
    if read.len() as u64 > most {
        let problem = format!(
            "it has more than {}, the most that is read",
            residency::Bytes(most)
        );
        return Err(Error::new(ErrorKind::FileTooLarge, problem));
    }
    Ok(read)
}

/// All of a text.
///
/// # Errors
/// As [`read`], and for what is no UTF-8.
pub(crate) fn text(path: &Path, most: u64) -> std::io::Result<String> {
    String::from_utf8(read(path, most)?)
        .map_err(|problem| Error::new(ErrorKind::InvalidData, problem.utf8_error()))
}

/// The token in a file: one line.
///
/// # Errors
/// As [`text`], and for several lines.
pub(crate) fn token(path: &Path) -> std::io::Result<String> {
    let text = text(path, SETTING_BYTES)?;
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
    fn only_regular_files_are_read_and_within_the_bound() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"12345");
        assert_eq!(read(&file, 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(
            read(Path::new("/dev/zero"), 5).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(read(&pipe, 5).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_token_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, " one-token-of-one-line\r\n").unwrap();
        assert_eq!(token(&file).unwrap(), "one-token-of-one-line");
        std::fs::write(&file, "first\nsecond\n").unwrap();
        assert!(token(&file).unwrap_err().to_string().contains("keep one line"));
    }
}
