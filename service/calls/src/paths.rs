//! Paths in messages to clients: relative to the folders of models.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folders of models, each with a `/` at its end, the longest first. It is set once, when the service starts, and static
/// because messages are made in many places.
static FOLDERS: OnceLock<Vec<String>> = OnceLock::new();

/// Sets the folders, and the targets of those that are links.
pub fn set_folders(folders: impl IntoIterator<Item = PathBuf>) {
    let _ = FOLDERS.set(prefixes(folders)); // a second service in one process is a test's, or the demo's
}

#[expect(clippy::disallowed_methods, reason = "once, before the service listens")]
fn prefixes(folders: impl IntoIterator<Item = PathBuf>) -> Vec<String> {
    let with_target = |folder: PathBuf| [folder.canonicalize().ok(), Some(folder)];
    let folders = folders.into_iter().flat_map(with_target).flatten();
    let mut prefixes: Vec<String> = folders
        .filter(|folder| folder.is_absolute() && folder.as_path() != Path::new("/"))
        .map(|folder| format!("{}/", folder.display().to_string().trim_end_matches('/')))
        .collect();
    prefixes.sort_by_key(|prefix| std::cmp::Reverse(prefix.len()));
    prefixes.dedup();
    prefixes
}

/// The text with the folders of models cut from its paths.
pub fn relative(text: &str) -> String {
    within(text, FOLDERS.get().map_or(&[], Vec::as_slice))
}

fn within(text: &str, folders: &[String]) -> String {
    let mut told = text.to_owned();
    for folder in folders {
        told = told.replace(folder.as_str(), "");
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_to_the_folders_of_models() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().canonicalize().unwrap().join("models");
        std::fs::create_dir_all(target.join("more")).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let folders = prefixes([link.clone(), target.join("more"), "/".into(), "here".into()]);
        for (path, told) in [
            (link.join("a/config.json"), "a/config.json"),
            (target.join("a/config.json"), "a/config.json"),
            (target.join("more/b.gguf"), "b.gguf"),
            ("/elsewhere/c".into(), "/elsewhere/c"),
        ] {
            let text = format!("{} is damaged", path.display());
            assert_eq!(within(&text, &folders), format!("{told} is damaged"));
        }
    }
}
