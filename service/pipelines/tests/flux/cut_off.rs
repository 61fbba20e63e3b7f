//! Files of a model that are cut off: each format, at every tenth of its length, is refused when the model is opened.

use std::path::{Path, PathBuf};

use pipelines::{ModelError, families};

use crate::given::copy_of;
use crate::open_model::F32;

/// All files in a folder.
fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.path()) {
        match path.is_dir() {
            true => files.extend(files_in(&path)),
            false => files.push(path),
        }
    }
    files.sort();
    files
}

/// Cuts a file off at every tenth of its length and asserts that `model` is refused, then writes it whole again.
fn assert_refused(model: &Path, file: &Path) {
    let whole = std::fs::read(file).expect("a file");
    for tenth in 0..10 {
        std::fs::write(file, &whole[..whole.len() * tenth / 10]).expect("a file");
        let opened = families().open(model, &F32);
        assert!(
            opened.is_err(),
            "{} was read with {tenth} tenths of it",
            file.display()
        );
    }
    std::fs::write(file, whole).expect("a file");
    families().open(model, &F32).expect("a whole model");
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused() {
    let folder = copy_of(&["flux-tiny"]);
    let index = crate::checkpoints::shard(folder.path());
    let unread = |file: &PathBuf| file.components().any(|part| part.as_os_str() == "expected");
    let files: Vec<PathBuf> = files_in(folder.path())
        .into_iter()
        .filter(|file| !unread(file))
        .collect();
    assert!(files.contains(&index));
    let endings = ["safetensors", "json", "txt"];
    for ending in endings {
        assert!(
            files
                .iter()
                .any(|file| file.extension().is_some_and(|of| of == ending)),
            "{ending}"
        );
    }
    for file in files {
        assert_refused(folder.path(), &file);
    }
    let single = copy_of(&["flux-tiny", "flux-tiny-bfl"]);
    let file = single.path().join("flux-tiny.safetensors");
    assert_refused(&file, &file);
}

#[test]
fn each_kind_of_file_that_is_no_checkpoint_has_its_own_message() {
    let beside = copy_of(&["flux-tiny-bfl"]);
    crate::open_model::copy(
        &crate::numbers::fixtures().join("flux-tiny"),
        &beside.path().join("base"),
    );
    let file = beside.path().join("flux-tiny.safetensors");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 23802932552\n";
    for (bytes, told) in [
        (&b""[..], "is not complete: it has 0 bytes"),
        (pointer.as_bytes(), "is not complete: it is a pointer of git-lfs"),
        (&[0; 4096], "is not complete: it begins with zeros"),
        (
            b"<!DOCTYPE html><html><body>Log in</body></html>",
            "is not supported: it is a web page",
        ),
        (
            b"{\"error\": \"Unauthorized\"}",
            "is not supported: it is a text, which begins with \"{\\\"error",
        ),
        (b"Entry not found", "is not supported: it is a text"),
        (
            b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03 and so on",
            "is not supported: it is packed (gzip)",
        ),
        (
            b"PK\x03\x04 and no end of an archive",
            "is not complete: its archive has no end",
        ),
    ] {
        std::fs::write(&file, bytes).expect("a file");
        let error = families()
            .open(&file, &F32)
            .map(|_| ())
            .expect_err("no model")
            .to_string();
        assert!(error.contains(told), "{error} lacks {told}");
    }
    let unfinished = beside.path().join("flux-tiny.safetensors.incomplete");
    std::fs::write(&unfinished, "").expect("a file");
    let error = families().open(&unfinished, &F32).map(|_| ());
    assert!(matches!(error, Err(ModelError::Incomplete { .. })), "{error:?}");
}
