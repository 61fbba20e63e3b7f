//! Settings of the hub: its URL, its cache and its token.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::bounded;

/// The hub that models are pulled from, and the cache that they are pulled into.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Base URL, without a trailing slash.
    pub endpoint: String,
    pub cache: PathBuf,
    /// Whether clients may have the service pull models.
    pub pull: bool,
    pub token: HubToken,
    /// Whether downloads are forbidden.
    pub offline: bool,
}

/// Source of the hub's token. Read for each pull, so that a login needs no restart, and never displayed.
#[derive(Clone)]
pub struct HubToken {
    given: Option<String>,
    file: Option<PathBuf>,
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubToken")
            .field("given", &self.given.is_some())
            .field("file", &self.file)
            .finish()
    }
}

impl HubSettings {
    /// Whether the endpoint is an HTTP URL with only a host and a path. It is shown to clients and in the log, so it must have no
    /// password.
    pub fn has_url(&self) -> bool {
        url::Url::parse(&self.endpoint).is_ok_and(|url| {
            let is_bare = url.username().is_empty() && url.password().is_none();
            let ends = url.query().is_none() && url.fragment().is_none();
            matches!(url.scheme(), "http" | "https") && url.has_host() && is_bare && ends
        })
    }
}

impl HubToken {
    /// This token, or else the one in a file.
    pub fn new(given: Option<String>, file: Option<PathBuf>) -> HubToken {
        HubToken { given, file }
    }

    /// The file with the token, if one is named.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The token, if there is one. A file must have it in one line. A token from the environment is used as it is; the hub's client refuses
    /// one with several lines.
    pub fn read(&self) -> Option<String> {
        let from_file = || bounded::token(self.file.as_ref()?).ok();
        let token = self.given.clone().or_else(from_file)?.trim().to_owned();
        Some(token).filter(|token| !token.is_empty())
    }
}
