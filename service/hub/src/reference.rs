//! References to models of a hub.

use std::fmt;
use std::str::FromStr;

use super::checksum::is_hex;
use crate::PullError;
use crate::catalogue;

/// The default revision.
const MAIN: &str = "main";
/// Most characters of an owner or a name, by the hub's rules.
const LONGEST_PART: usize = 96;
const LONGEST_REVISION: usize = 250;
/// Endings of files that can be pulled by name.
pub(crate) const FILES: [&str; 3] = [".safetensors", ".sft", ".gguf"];

/// `owner/name`, a branch, a tag or a commit, and possibly one file. Its parts are safe in paths and in URLs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    pub id: String,
    pub revision: String,
    /// One file of the repository, an adapter or a transformer; `None` for the whole repository.
    pub file: Option<String>,
}

impl Reference {
    /// A model by its id on the hub, or by its short name, which may stand for one file of a repository.
    ///
    /// # Errors
    /// When the id or the revision is not valid on a hub.
    pub fn new(id: &str, revision: &str) -> Result<Reference, PullError> {
        let wrong = || PullError::Name {
            name: format!("{id}{}{revision}", if revision.is_empty() { "" } else { "@" }),
        };
        let known = catalogue::id_of(id);
        let (id, file) = match known.and_then(|known| known.split_once(':')) {
            Some((id, file)) => (id, Some(file)),
            None => (known.unwrap_or(id), None),
        };
        let (owner, name) = id.split_once('/').ok_or_else(wrong)?;
        let revision = if revision.is_empty() { MAIN } else { revision };
        let is_revision = revision.len() <= LONGEST_REVISION && revision.split('/').all(is_part);
        // In the cache two hyphens stand for the slash, so a name cannot have them.
        let is_name = |part: &str| is_part(part) && part.len() <= LONGEST_PART && !part.contains("--");
        if is_name(owner) && is_name(name) && is_revision {
            let whole = Reference {
                id: id.to_owned(),
                revision: revision.to_owned(),
                file: None,
            };
            return match file {
                Some(file) => whole.with_file(file),
                None => Ok(whole),
            };
        }
        Err(wrong())
    }

    /// One file of this repository.
    ///
    /// # Errors
    /// When the path is not valid in a repository, or is neither safetensors nor GGUF.
    fn with_file(self, file: &str) -> Result<Reference, PullError> {
        let is_weights = FILES.iter().any(|ending| file.ends_with(ending));
        let is_file = is_weights && file.len() <= LONGEST_REVISION && file.split('/').all(is_part);
        match is_file {
            true => Ok(Reference {
                file: Some(file.to_owned()),
                ..self
            }),
            false => Err(PullError::Name {
                name: format!("{self}:{file}"),
            }),
        }
    }

    /// The model that a request names: `owner/name`, possibly with a colon and a file, or a short name; and a revision.
    ///
    /// # Errors
    /// As [`Reference::new`].
    pub fn asked(id: &str, revision: &str) -> Result<Reference, PullError> {
        match id.split_once(':') {
            _ if catalogue::id_of(id).is_some() => Reference::new(id, revision), // the colon of a form
            Some((id, file)) => Reference::new(id, revision)?.with_file(file),
            None => Reference::new(id, revision),
        }
    }

    /// Its id without the revision, as models are listed: `owner/name`, of one file `owner/name:file`.
    pub fn listed_id(&self) -> String {
        match &self.file {
            Some(file) => format!("{}:{file}", self.id),
            None => self.id.clone(),
        }
    }

    /// The model of an entry's name (`owner/name+4-bit&ink`), if that could be on a hub.
    pub fn of_entry(name: &str) -> Option<Reference> {
        name.split(['+', '&']).next()?.parse().ok()
    }

    /// Whether the revision is a commit.
    pub(crate) fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

/// Whether the text is a full commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// Whether a name is safe as a part of a path and of a URL: no `..`, no leading dot or hyphen, no reserved character.
pub(crate) fn is_part(part: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !part.is_empty() && !part.starts_with(['.', '-']) && !part.contains("..") && part.bytes().all(plain)
}

impl FromStr for Reference {
    type Err = PullError;

    /// `owner/name` or `owner/name@revision`, and after a colon a file; a short name in place of `owner/name`.
    fn from_str(text: &str) -> Result<Reference, PullError> {
        if catalogue::id_of(text).is_some() {
            return Reference::new(text, "");
        }
        if let Some((repository, file)) = text.split_once(':') {
            return repository.parse::<Reference>()?.with_file(file);
        }
        match text.split_once('@') {
            Some((_, "")) => Err(PullError::Name {
                name: text.to_owned(),
            }),
            Some((id, revision)) => Reference::new(id, revision),
            None => Reference::new(text, ""),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            MAIN => f.write_str(&self.id)?,
            revision => write!(f, "{}@{revision}", self.id)?,
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_names_are_parsed_and_path_traversal_is_refused() {
        let read = |text: &str| text.parse::<Reference>().map(|r| (r.id, r.revision));
        let is = |id: &str, revision: &str| Ok((id.to_owned(), revision.to_owned()));
        assert_eq!(read("me/mine"), is("me/mine", "main"));
        assert_eq!(read("me/mine@refs/pr/1"), is("me/mine", "refs/pr/1"));
        assert_eq!(read("me/my-model_1.0@v1.0"), is("me/my-model_1.0", "v1.0"));
        let gguf = Reference::asked("me/mine:flux1-dev-Q4_K_S.gguf", "v1").unwrap();
        assert_eq!(gguf.to_string(), "me/mine@v1:flux1-dev-Q4_K_S.gguf");
        assert_eq!(gguf.listed_id(), "me/mine:flux1-dev-Q4_K_S.gguf");
        let of_file: Reference = "me/mine@v1:styles/ink.safetensors".parse().unwrap();
        assert_eq!(of_file.file.as_deref(), Some("styles/ink.safetensors"));
        assert_eq!(of_file.to_string(), "me/mine@v1:styles/ink.safetensors");
        let short: Reference = "ovi-1.1-960-5s".parse().unwrap();
        assert_eq!(short.listed_id(), "chetwinlow1/Ovi:model_960x960.safetensors");
        for wrong in ["me/mine:", "me/mine:../ink.safetensors", "me/mine:ink.bin"] {
            assert!(wrong.parse::<Reference>().is_err(), "{wrong}");
        }
        assert_eq!(
            read("flux-schnell@v1"),
            is("black-forest-labs/FLUX.1-schnell", "v1")
        );
        let long = format!("me/{}", "x".repeat(97));
        for wrong in [
            "mine",
            "me/",
            "/mine",
            "me/mine/more",
            "me--mine/more",
            "me/mine--more",
            "me/..",
            "../mine",
            "me/mine@",
            "me/mine@../../x",
            "me/mine@a//b",
            "me/mine@/etc",
            "me/mi ne",
            "me/mine?x",
            "me/mine#x",
            "me/mine@a%2Fb",
            "m\u{e9}/mine",
            "",
            &long,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_model_is_parsed_from_the_name_of_an_entry() {
        let id = |name: &str| Reference::of_entry(name).map(|reference| reference.to_string());
        assert_eq!(id("me/mine+4-bit").as_deref(), Some("me/mine"));
        assert_eq!(id("me/mine@v1+vae=nf4").as_deref(), Some("me/mine@v1"));
        assert_eq!(id("me/mine&ink").as_deref(), Some("me/mine"));
        assert_eq!(id("demo"), None);
        assert_eq!(
            id("flux-schnell+4-bit").as_deref(),
            Some("black-forest-labs/FLUX.1-schnell")
        );
    }

    /// For any text: a reference that is accepted is safe in paths and URLs, and its displayed form parses to the same reference.
    #[test]
    fn any_name_is_a_safe_reference_or_none() {
        const PARTS: [&str; 24] = [
            "me",
            "mine",
            "/",
            "/",
            "@",
            ":",
            "+",
            "..",
            ".",
            "-",
            "--",
            "_",
            "~",
            "%2F",
            "\\",
            "\0",
            " ",
            "\n",
            "\u{e9}",
            "?",
            "#",
            "ink.safetensors",
            "a.gguf",
            "flux-schnell",
        ];
        // A path below a folder, and the same path below an address.
        let is_safe = |text: &str| {
            let parts: Vec<_> = std::path::Path::new(text).components().collect();
            let is_below = parts
                .iter()
                .all(|part| matches!(part, std::path::Component::Normal(_)));
            let url = reqwest::Url::parse("https://hub/").and_then(|hub| hub.join(text));
            is_below
                && parts.len() == text.split('/').count()
                && url.is_ok_and(|url| url.as_str() == format!("https://hub/{text}"))
        };
        bolero::check!()
            .with_iterations(20_000)
            .with_max_len(12)
            .with_type::<Vec<u8>>()
            .for_each(|numbers| {
                let parts = numbers
                    .iter()
                    .map(|&number| PARTS[usize::from(number) % PARTS.len()]);
                let name: String = parts.take(8).collect();
                let _ = (Reference::of_entry(&name), Reference::asked(&name, &name));
                let Ok(reference) = name.parse::<Reference>() else {
                    return;
                };
                assert!(
                    is_safe(&reference.id) && reference.id.matches('/').count() == 1,
                    "{name}"
                );
                assert!(is_safe(&reference.revision), "{name}");
                assert!(reference.file.as_deref().is_none_or(is_safe), "{name}");
                assert_eq!(
                    reference.to_string().parse::<Reference>().unwrap(),
                    reference,
                    "{name}"
                );
            });
    }
}
