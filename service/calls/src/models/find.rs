//! Finds listed models by the names of requests: an id, a key with formats, a short name, the last part of an id.

use std::path::PathBuf;

use engine::Error;
use engine::library::Entry;
use gpu::WeightFormat;
use hub::catalogue;
use model::{FULL, Families, Preset, Quantization};

use super::names::{self, Named as _};
use super::{Found, adapters};
use crate::errors::invalid;
use crate::references::{AskedFormats, ModelRef};

/// The entries that match a reference. Only the entries are compared, as their files may be gone.
pub enum Meant {
    /// Entries with this id or key, these formats and adapters, and the revision if one is named.
    AsNamed(ModelRef),
    /// As `AsNamed`, in any formats.
    AnyFormats(ModelRef),
}

impl Meant {
    /// Whether this entry is one of them.
    pub fn is(&self, entry: &Entry) -> bool {
        let (Meant::AsNamed(model) | Meant::AnyFormats(model)) = self;
        let formats = quantization_of(&model.formats);
        let has_formats = || match self {
            Meant::AsNamed(_) => formats.is_ok_and(|formats| formats == entry.quantization),
            Meant::AnyFormats(_) => true,
        };
        let is_named =
            || entry.id == model.id && has_formats() && adapters::are_named(&entry.adapters, &model.adapters);
        // A key includes formats and adapters: a reference that adds more of them contradicts itself.
        let is_key = || is_key(&entry.key, &model.id) && model.formats.is_open() && model.adapters.is_empty();
        entry.revision.starts_with(&model.revision) && (is_named() || is_key())
    }
}

/// Whether `asked` is this key. The first digits of the revision suffice, as tables show it: `owner/name@b28b7af6+full`.
pub(super) fn is_key(key: &str, asked: &str) -> bool {
    let parts = |key: &'_ str| -> Option<(String, String, String)> {
        let (name, rest) = key.split_once('@')?;
        let (revision, formats) = rest.split_once('+')?;
        Some((name.to_owned(), revision.to_owned(), formats.to_owned()))
    };
    let is_short = || {
        let ((name, revision, formats), (of, short, with)) = (parts(key)?, parts(asked)?);
        Some(name == of && formats == with && !short.is_empty() && revision.starts_with(&short))
    };
    key == asked || is_short().unwrap_or(false)
}

pub(super) fn quantization_of(asked: &AskedFormats) -> Result<Quantization, Error> {
    let preset = Preset::named(&asked.preset).ok_or_else(|| {
        let known = Preset::ALL.map(Preset::as_str).join(", ");
        let instead = match asked.preset.parse::<WeightFormat>() {
            Ok(format) => {
                format!("; {format} is a format, to be asked for by component: transformer={format}")
            }
            Err(_) => String::new(),
        };
        invalid(
            "model.quantization.preset",
            format!("{:?} is none of {known}{instead}", asked.preset),
        )
    })?;
    let formats = asked.components.iter();
    let formats = formats.map(|(component, format)| (component.as_str(), format.as_str()));
    Quantization::of(preset, formats).map_err(|(component, error)| {
        let problem = format!("for {component}: {error}, nor {FULL}");
        invalid("model.quantization.components", problem)
    })
}

/// Name, revision and formats of a reference that names an entry by its key; an inner `None` where its id is a model's
/// name as it is, an outer one where there is no such model.
pub(super) fn named_by_key<'a>(
    listing: &[Found],
    model: &'a ModelRef,
) -> Option<Option<(&'a str, &'a str, &'a str)>> {
    if find(listing, &model.id, &model.revision).is_some() {
        return Some(None);
    }
    let (name, formats) = model.id.rsplit_once('+')?;
    if name.is_empty() || find(listing, name, &model.revision).is_some() {
        return Some(Some((name, &model.revision, formats)));
    }
    let (name, revision) = name.rsplit_once('@')?;
    find(listing, name, revision).map(|_| Some((name, revision, formats)))
}

/// Whether `name` may mean one of these ids, as in [`super::Models::has`]. Revisions are not checked, as they are not known here.
pub fn is_among(families: &dyn Families, ids: &[String], name: &str) -> bool {
    let listing: Vec<Found> = (ids.iter().cloned())
        .map(|id| Found::at(families, id, PathBuf::new()))
        .collect();
    names_in_key(name).any(|name| {
        let plain = without_revision(name);
        let stem = families.single_file_stem(&plain);
        [Some(name), Some(&plain), stem]
            .into_iter()
            .flatten()
            .any(|name| find(&listing, name, "").is_some() || names::ambiguous(&listing, name).is_some())
    })
}

/// Candidates for the name of a model in a key, the likeliest first: the whole key, without adapters, and without formats.
pub(super) fn names_in_key(key: &str) -> impl Iterator<Item = &str> {
    let (base, _) = Entry::adapters_in_key(key);
    let without_formats = base.rsplit_once('+').map(|(name, _)| name);
    [Some(key), Some(base), without_formats].into_iter().flatten()
}

/// `owner/name@main` as `owner/name`, and `owner/name@main:file` as `owner/name:file`.
fn without_revision(name: &str) -> String {
    match name.split_once('@') {
        Some((id, rest)) => format!("{id}{}", rest.find(':').map_or("", |at| &rest[at..])),
        None => name.to_owned(),
    }
}

/// [`find`], where the id may include the revision: `owner/name@main`, of one file `owner/name@main:file` too.
pub(super) fn find_named(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    let of_file = || {
        let file: hub::Reference = id.parse().ok()?;
        let is_with_revision = file.file.is_some() && revision.is_empty() && id.contains('@');
        is_with_revision.then(|| find(listing, &file.listed_id(), &file.revision))?
    };
    let by_name = || {
        let (name, named) = id.rsplit_once('@')?;
        find(listing, name, named).filter(|found| found.revision.starts_with(revision))
    };
    find(listing, id, revision).or_else(of_file).or_else(by_name)
}

/// The model with this id, the only one whose id ends in this name, or the one with this short name. Backslashes of a Windows
/// path are read as slashes.
pub(super) fn find(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    names::spellings(id).find_map(|id| find_spelled(listing, &id, revision))
}

fn find_spelled(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    let fits = |m: &&Found| {
        revision.is_empty() || m.revision.starts_with(revision) || m.refs.iter().any(|name| name == revision)
    };
    if let Some(found) = listing.iter().filter(fits).find(|m| m.id == id) {
        return Some(found.clone());
    }
    if let Some(found) = listing.iter().filter(fits).find(|m| names::is_called(*m, id)) {
        return Some(found.clone());
    }
    let is_last = |whole: &str| whole.rsplit('/').next() == Some(id);
    let mut by_name = listing
        .iter()
        .filter(fits)
        .filter(|m| is_last(&m.id) || m.id_with_ending().is_some_and(|whole| is_last(&whole)));
    match (by_name.next(), by_name.next()) {
        (Some(only), None) => Some(only.clone()),
        (Some(_), Some(_)) => None,
        (None, _) => {
            let id = catalogue::id_of(id)?;
            listing.iter().filter(fits).find(|m| m.id == id).cloned()
        }
    }
}
