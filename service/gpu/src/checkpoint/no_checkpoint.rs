//! Files that people have in place of a checkpoint, recognized by their first bytes. Each message says what to do.

use super::{MAX_HEADER_BYTES, Problem};

/// Bytes of a file that are looked at.
pub(super) const BEGINNING: u64 = 512;

/// Characters of a text that are quoted.
const QUOTED: usize = 60;

/// First bytes of packed files.
const PACKED: [(&[u8], &str); 5] = [
    (b"\x1f\x8b", "gzip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!", "RAR"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ", "xz"),
];

/// What to do about a file that begins as a pointer of git-lfs, whatever kind of file it replaces; `None` if it is no pointer.
pub fn git_lfs_pointer(beginning: &[u8]) -> Option<&'static str> {
    beginning
        .starts_with(b"version https://git-lfs.github.com/spec/")
        .then_some("it is a pointer of git-lfs, which stands for the file: run `git lfs pull` in its folder")
}

/// What is wrong with a file that begins so; `None` if it may be a checkpoint.
pub(super) fn problem(beginning: &[u8]) -> Option<Problem> {
    let again = "download it again";
    if beginning.is_empty() {
        return Some(Problem::Incomplete(format!("it has 0 bytes: {again}")));
    }
    if let Some(problem) = git_lfs_pointer(beginning) {
        return Some(Problem::Incomplete(problem.to_owned()));
    }
    if beginning.len() >= 64 && beginning.iter().all(|&byte| byte == 0) {
        return Some(Problem::Incomplete(format!(
            "it begins with zeros, as a file does whose download has not finished: {again}"
        )));
    }
    if let Some((_, kind)) = PACKED.iter().find(|(magic, _)| beginning.starts_with(magic)) {
        return Some(Problem::Unsupported(format!(
            "it is packed ({kind}): unpack it first"
        )));
    }
    let text = text(beginning)?;
    let lower = text.to_ascii_lowercase();
    if ["<!doctype", "<html", "<?xml", "<head"]
        .iter()
        .any(|tag| lower.starts_with(tag))
    {
        return Some(Problem::Unsupported(format!(
            "it is a web page that was saved in place of the file, such as one to log in: {again} while logged in"
        )));
    }
    let quoted: String = text.chars().take(QUOTED).collect();
    Some(Problem::Unsupported(format!(
        "it is a text, which begins with {quoted:?}, and no safetensors, GGUF or .pth file: {again}"
    )))
}

/// The beginning as text; `None` if it is no text, or if it is short enough to be the header of a checkpoint.
fn text(beginning: &[u8]) -> Option<&str> {
    let magic = *beginning.first_chunk::<8>()?;
    if magic.starts_with(b"GGUF") || magic.starts_with(b"PK") || u64::from_le_bytes(magic) <= MAX_HEADER_BYTES
    {
        return None;
    }
    // The last character may be cut off.
    let text = match std::str::from_utf8(beginning) {
        Ok(text) => text,
        Err(error) if error.valid_up_to() + 4 > beginning.len() => {
            std::str::from_utf8(&beginning[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let is_text = |letter: char| !letter.is_control() || letter.is_whitespace();
    text.chars()
        .all(is_text)
        .then(|| text.trim_start_matches('\u{feff}').trim_start())
}
