//! Names of models and adapters. Each listed item can be named in a request, and no item is hidden by another of the same name.

use std::path::Path;

/// A model or an adapter, which requests can name.
pub(super) trait Named {
    /// Its name in lists.
    fn id(&self) -> &str;
    fn set_id(&mut self, id: String);
    /// The commit of an item in a hub cache; else empty.
    fn revision(&self) -> &str {
        ""
    }
    fn path(&self) -> &Path;
    /// A file's name without the extension of its kind; `None` for a name without that extension.
    fn stem<'a>(&self, name: &'a str) -> Option<&'a str>;

    /// Its name with the extension of its file; `None` for a folder, and for an item with a configured name.
    fn id_with_ending(&self) -> Option<String> {
        let name = self.path().file_name()?.to_str()?;
        let before = self.id().strip_suffix(self.stem(name)?)?;
        (before.is_empty() || before.ends_with('/')).then(|| format!("{before}{name}"))
    }
}

/// The found items, in their order. Two files whose names differ only in the extension (`twin.gguf`,
/// `twin.safetensors`) keep their extensions in their names; of two with one file name the first counts.
pub(super) fn distinct<T: Named>(found: impl Iterator<Item = T>) -> Vec<T> {
    let mut listed: Vec<T> = Vec::new();
    for each in found {
        let is_same = |other: &T| {
            (other.id(), other.revision()) == (each.id(), each.revision())
                && other.id_with_ending() == each.id_with_ending()
        };
        if !listed.iter().any(is_same) {
            listed.push(each);
        }
    }
    let is_shared: Vec<bool> = listed
        .iter()
        .map(|each| {
            let others = listed.iter().filter(|other| other.id() == each.id());
            others.filter(|other| other.revision() == each.revision()).count() > 1
        })
        .collect();
    let mut distinct: Vec<T> = Vec::new();
    for (mut each, is_shared) in listed.into_iter().zip(is_shared) {
        if let Some(whole) = each.id_with_ending().filter(|_| is_shared) {
            each.set_id(whole);
        }
        let is_same = |other: &T| (other.id(), other.revision()) == (each.id(), each.revision());
        if !distinct.iter().any(is_same) {
            distinct.push(each);
        }
    }
    distinct
}

/// Spellings of a name, the likeliest first: as it is, and with slashes for the backslashes of a Windows path.
pub(super) fn spellings(asked: &str) -> impl Iterator<Item = String> {
    let is_windows = asked.contains('\\');
    let of_windows = is_windows.then(|| asked.replace('\\', "/"));
    std::iter::once(asked.to_owned()).chain(of_windows)
}

/// Whether an item has this name, as it is listed or with the extension of its file.
pub(super) fn is_called<T: Named>(each: &T, name: &str) -> bool {
    each.id() == name || each.id_with_ending().is_some_and(|whole| whole == name)
}

/// The names of all items that an ambiguous name could mean: files that differ in their extensions, or in their folders.
pub(super) fn meanings<T: Named>(listed: &[T], asked: &str) -> Vec<String> {
    let last = |name: &str| name.rsplit('/').next().unwrap_or(name).to_owned();
    let could_mean = |each: &&T, name: &str| {
        let id = each.id();
        let stem = each.stem(id).unwrap_or(id);
        [id, stem].into_iter().any(|own| own == name || last(own) == name)
    };
    let meant = spellings(asked).find_map(|name| {
        let meant: Vec<String> = listed
            .iter()
            .filter(|each| could_mean(each, &name))
            .map(|each| each.id().to_owned())
            .collect();
        (!meant.is_empty()).then_some(meant)
    });
    let mut meant = meant.unwrap_or_default();
    meant.dedup();
    meant
}

/// The error for an ambiguous name; `None` if the name is not ambiguous.
pub(super) fn ambiguous<T: Named>(listed: &[T], asked: &str) -> Option<String> {
    match &meanings(listed, asked)[..] {
        [] | [_] => None,
        several => Some(format!(
            "{asked:?} could be {}: write one of them",
            several.join(" or ")
        )),
    }
}
