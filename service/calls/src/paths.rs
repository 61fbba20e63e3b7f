//! Paths in messages to clients: relative to the folders of models; of others only the last name. Who may generate need not know how the
//! machine is laid out, and the log has the whole.

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

/// The text with the folders of models cut from its paths, and of other paths all but the last name.
pub fn relative(text: &str) -> String {
    without_folders(&within(text, FOLDERS.get().map_or(&[], Vec::as_slice)))
}

/// The text with the last name of each absolute path in place of the path.
fn without_folders(text: &str) -> String {
    let mut told = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((start, end)) = first_path(rest) {
        told.push_str(&rest[..start]);
        let names = rest[start..end].trim_end_matches('/');
        told.push_str(names.rsplit('/').next().unwrap_or_default());
        rest = &rest[end..];
    }
    told + rest
}

/// Where the first absolute path of a text begins and ends. URLs and names such as `owner/model` are none.
fn first_path(text: &str) -> Option<(usize, usize)> {
    let mut slashes = text.match_indices('/').map(|(at, _)| at);
    let start = slashes.find(|&at| {
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].chars().next();
        let begins = match before {
            None => true,
            Some(':') => after != Some('/'),
            Some('/') => text[..at].ends_with("://"), // a URL of a file
            Some(before) => !before.is_alphanumeric() && !"._-~@+%})]".contains(before),
        };
        begins && after.is_some_and(|after| !after.is_whitespace() && !ENDS.contains(&after))
    })?;
    let rest = &text[start..];
    let quote = text[..start]
        .chars()
        .next_back()
        .filter(|before| QUOTES.contains(before));
    // In quotes a path may have spaces; elsewhere a space ends it.
    let quoted = quote.and_then(|quote| rest.find(quote));
    let length = quoted.unwrap_or_else(|| {
        let end = rest.find(|letter: char| letter.is_whitespace() || ENDS.contains(&letter));
        let path = &rest[..end.unwrap_or(rest.len())];
        path.trim_end_matches([':', '.', '!', '?']).len()
    });
    Some((start, start + length))
}

const QUOTES: [char; 3] = ['"', '\'', '`'];
/// What ends a path that is not in quotes.
const ENDS: [char; 12] = ['"', '\'', '`', '(', ')', '[', ']', '<', '>', ',', ';', '|'];

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

    #[test]
    fn of_another_path_only_the_last_name_is_told() {
        for (text, told) in [
            ("/srv/secret/box/a.json: damaged", "a.json: damaged"),
            ("cannot read /srv/a.json.", "cannot read a.json."),
            ("open \"/srv/my box/a b.json\": no", "open \"a b.json\": no"),
            ("file=/srv/a,/srv/b;/srv/c/", "file=a,b;c"),
            ("(/srv/a) [/b/c] `/d/e`", "(a) [c] `e`"),
            ("model:/srv/a", "model:a"),
            ("file:///etc/passwd", "file://passwd"),
            ("//srv/a", "a"),
            ("/", "/"),
            (
                "a / b, 1/2, and/or, n/a, 60 / s",
                "a / b, 1/2, and/or, n/a, 60 / s",
            ),
            (
                "pull owner/name@main from https://hub.example/owner/name?x=/y",
                "pull owner/name@main from https://hub.example/owner/name?x=y",
            ),
            ("../a/b ./c/d ~/e", "../a/b ./c/d ~/e"),
            ("grün/日本 /日本/箱", "grün/日本 箱"),
        ] {
            assert_eq!(without_folders(text), told);
        }
    }

    #[test]
    fn no_folder_stays_in_any_text() {
        bolero::check!()
            .with_type::<(String, String)>()
            .for_each(|(before, after)| {
                let text = format!("{before} /secret-folder/file {after}");
                assert!(!without_folders(&text).contains("/secret-folder/"), "{text:?}");
            });
    }
}
