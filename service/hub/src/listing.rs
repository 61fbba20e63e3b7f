//! Requests to the hub: the files of a revision, and the reasons of refused requests.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::time::Duration;

use config::HubSettings;
use hf_hub::api::tokio::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use reqwest::header::{HeaderMap, RANGE};
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::time::timeout;

use super::checksum::Oid;
use crate::PullError;
use crate::error::shown;
use crate::reference::{Reference, is_commit, is_part};

/// Timeout of a response, and of each chunk of it.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);
/// Timeout of the one request of a check.
const PATIENCE: Duration = Duration::from_secs(5);
/// Attempts of a request before the hub counts as unreachable.
const ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(300);
/// Bytes that a listing or a configuration may have.
const LARGEST_TEXT_BYTES: usize = 16 << 20;
/// Longest path, in bytes, that a file of a pipeline may have.
const LONGEST_PATH: usize = 200;

/// One file of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepoFile {
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) oid: Oid,
}

/// A revision on the hub.
#[derive(Clone, Debug)]
pub(crate) struct RepositoryListing {
    pub(crate) commit: String,
    pub(crate) files: Vec<RepoFile>,
    /// The base model that the repository's page names.
    pub(crate) base: Option<Reference>,
}

/// Whether a hub is asked with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Login {
    Anonymous,
    Token,
}

/// Sends requests to one hub, with one token.
pub(crate) struct HubSession {
    api: Api,
    endpoint: String,
    anonymous: bool,
}

impl HubSession {
    pub(crate) fn open(settings: &HubSettings) -> Result<HubSession, PullError> {
        let token = settings.token.read();
        let anonymous = token.is_none();
        // hf-hub looks for a token beside its cache, and logs that. This folder has none: the configuration finds the token,
        // and the cache is `ModelCache`'s.
        let api = ApiBuilder::from_cache(Cache::new(settings.cache.join("hub")))
            .with_endpoint(settings.endpoint.clone())
            .with_token(token)
            .with_progress(false)
            .with_user_agent("moored", env!("CARGO_PKG_VERSION"))
            .build();
        let api = api.map_err(|problem| match problem {
            // No token has such characters, and no request could carry them.
            ApiError::InvalidHeaderValue(_) => PullError::TokenRefused {
                endpoint: settings.endpoint.clone(),
            },
            problem => PullError::Unreachable {
                endpoint: settings.endpoint.clone(),
                problem: problem.to_string(),
            },
        })?;
        Ok(HubSession {
            api,
            endpoint: settings.endpoint.clone(),
            anonymous,
        })
    }

    pub(crate) fn client(&self) -> &reqwest::Client {
        self.api.client()
    }

    /// Asks the hub once whether it answers and, where there is a token, whether it accepts that.
    pub(crate) async fn check(&self) -> Result<Login, PullError> {
        let login = match self.anonymous {
            true => Login::Anonymous,
            false => Login::Token,
        };
        let ask = match login {
            Login::Anonymous => self.client().head(&self.endpoint),
            Login::Token => self.client().get(format!("{}/api/whoami-v2", self.endpoint)),
        };
        match timeout(PATIENCE, ask.send()).await {
            Ok(Ok(answer)) if answer.status() == StatusCode::UNAUTHORIZED && login == Login::Token => {
                Err(PullError::TokenRefused {
                    endpoint: self.endpoint.clone(),
                })
            }
            Ok(Ok(answer)) if answer.status().is_server_error() => {
                Err(self.unclear(answer.status().to_string()))
            }
            Ok(Ok(_)) => Ok(login),
            Ok(Err(problem)) => Err(self.unreachable(words(problem))),
            Err(_) => Err(self.unreachable(format!("no answer within {} s", PATIENCE.as_secs()))),
        }
    }

    /// Whether a URL is the hub's own, rather than one that it redirected to.
    pub(crate) fn is_hub(&self, url: &reqwest::Url) -> bool {
        let own = reqwest::Url::parse(&self.endpoint);
        own.is_ok_and(|own| own.origin() == url.origin())
    }

    /// URL of a file of a commit.
    pub(crate) fn url(&self, id: &str, commit: &str, path: &str) -> String {
        self.api.repo(repo(id, commit)).url(path)
    }

    /// The files of a revision with their sizes and checksums.
    pub(crate) async fn list(&self, model: &Reference) -> Result<RepositoryListing, PullError> {
        let repo = self.api.repo(repo(&model.id, &model.revision));
        let ask = || repo.info_request().query(&[("blobs", "true")]);
        let answer = self.answer(model, ask).await?;
        let told: Told = serde_json::from_slice(&self.text(answer).await?)
            .map_err(|problem| self.unclear(format!("with an invalid list of files: {problem}")))?;
        if !is_commit(&told.sha) {
            return Err(self.unclear(format!("with {:?}, which is no commit hash", told.sha)));
        }
        let is_bare = |told: &Sibling| told.size.is_none() && told.lfs.is_none();
        if !told.siblings.is_empty() && told.siblings.iter().all(is_bare) {
            return Err(self.unclear("with a list of files without sizes and checksums".to_owned()));
        }
        let files = told.siblings.into_iter().filter_map(RepoFile::of);
        Ok(RepositoryListing {
            base: base_of(&told.card_data),
            commit: told.sha,
            files: files.collect(),
        })
    }

    /// A small file, read into memory.
    pub(crate) async fn read(
        &self,
        model: &Reference,
        commit: &str,
        path: &str,
    ) -> Result<Vec<u8>, PullError> {
        let url = self.url(&model.id, commit, path);
        let answer = self.answer(model, || self.client().get(&url)).await?;
        self.text(answer).await
    }

    /// The names of the tensors of a file in safetensors, by its header alone; none from a hub that sends no parts of files.
    pub(crate) async fn tensor_names(
        &self,
        model: &Reference,
        commit: &str,
        path: &str,
    ) -> Result<Vec<String>, PullError> {
        let url = self.url(&model.id, commit, path);
        let part = async |start: u64, bytes: u64| {
            let range = format!("bytes={start}-{}", start + bytes - 1);
            let ask = || self.client().get(&url).header(RANGE, &range);
            let answer = self.answer(model, ask).await?;
            match answer.status() {
                StatusCode::PARTIAL_CONTENT => self.text(answer).await.map(Some),
                _ => Ok(None),
            }
        };
        let damaged =
            || PullError::NotAPipeline(format!("{path} of {} has no header of safetensors", model.id));
        let Some(length) = part(0, 8).await? else {
            return Ok(Vec::new());
        };
        let length: [u8; 8] = length.try_into().map_err(|_| damaged())?;
        let length = u64::from_le_bytes(length);
        if length == 0 || length > LARGEST_TEXT_BYTES as u64 {
            return Err(damaged());
        }
        let header: BTreeMap<String, IgnoredAny> =
            serde_json::from_slice(&part(8, length).await?.unwrap_or_default()).map_err(|_| damaged())?;
        Ok(header.into_keys().collect())
    }

    async fn answer(
        &self,
        model: &Reference,
        ask: impl Fn() -> reqwest::RequestBuilder,
    ) -> Result<Response, PullError> {
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let problem = match timeout(SILENCE, ask().send()).await {
                Ok(Ok(answer)) if answer.status().is_success() => return Ok(answer),
                Ok(Ok(answer)) => match self.refusal(model, answer.status(), answer.headers()) {
                    Some(refusal) => return Err(refusal),
                    None => self.unclear(answer.status().to_string()),
                },
                Ok(Err(problem)) => self.unreachable(words(problem)),
                Err(_) => self.unreachable(format!("no answer within {} s", SILENCE.as_secs())),
            };
            if attempt == ATTEMPTS {
                return Err(problem);
            }
            tokio::time::sleep(pause).await;
            attempt += 1;
            pause *= 2;
        }
    }

    async fn text(&self, mut answer: Response) -> Result<Vec<u8>, PullError> {
        let mut text = Vec::new();
        loop {
            match timeout(SILENCE, answer.chunk()).await {
                Ok(Ok(Some(_))) if text.len() > LARGEST_TEXT_BYTES => {
                    return Err(self.unclear("with a response that is too large".to_owned()));
                }
                Ok(Ok(Some(chunk))) => text.extend_from_slice(&chunk),
                Ok(Ok(None)) => return Ok(text),
                Ok(Err(problem)) => return Err(self.unreachable(words(problem))),
                Err(_) => return Err(self.unreachable("its response stopped".to_owned())),
            }
        }
    }

    /// The error that a status stands for; `None`: the request may succeed when it is repeated.
    pub(crate) fn refusal(
        &self,
        model: &Reference,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Option<PullError> {
        let header = |name: &str| {
            headers
                .get(name)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default()
        };
        let (id, endpoint, anonymous) = (model.id.clone(), self.endpoint.clone(), self.anonymous);
        let gated = || PullError::Gated {
            endpoint: endpoint.clone(),
            id: id.clone(),
            anonymous,
        };
        let no_such_model = || PullError::NoSuchModel {
            endpoint: endpoint.clone(),
            id: id.clone(),
            anonymous,
        };
        Some(match (status.as_u16(), header("x-error-code")) {
            (_, "GatedRepo") => gated(),
            (_, "RepoNotFound") => no_such_model(),
            (_, "RevisionNotFound") => PullError::NoSuchRevision {
                id: id.clone(),
                revision: model.revision.clone(),
            },
            // Without a token the hub answers 401 for models that do not exist, too.
            (401, _) if anonymous => no_such_model(),
            (401, _) => PullError::TokenRefused { endpoint },
            (403, _) => gated(),
            (404, _) => no_such_model(),
            (429, _) => self.unclear("that there were too many requests (429)".to_owned()),
            (500.., _) | (408, _) => return None,
            (_, _) => {
                let said = header("x-error-message");
                let colon = if said.is_empty() { "" } else { ": " };
                self.unclear(format!("{status}{colon}{said}"))
            }
        })
    }

    fn unreachable(&self, problem: String) -> PullError {
        PullError::Unreachable {
            endpoint: self.endpoint.clone(),
            problem: shown(&problem),
        }
    }

    fn unclear(&self, problem: String) -> PullError {
        PullError::Answer {
            endpoint: self.endpoint.clone(),
            problem: shown(&problem),
        }
    }
}

/// A repository of a model at a revision.
pub(crate) fn repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned())
}

/// The id of the repository whose folder in a hub cache has this name: `models--owner--name`.
pub fn id_of_folder(name: &str) -> Option<String> {
    Some(name.strip_prefix("models--")?.replacen("--", "/", 1))
}

/// The innermost reason, without the URL: signed URLs are long, and secret.
pub(crate) fn words(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    match error.source() {
        Some(_) => cause.to_string(),
        None => error.to_string(),
    }
}

/// The hub's response about a revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    sha: String,
    siblings: Vec<Sibling>,
    #[serde(default)]
    card_data: serde_json::Value,
}

/// The repository that a model's page names as its base, or the first of several.
fn base_of(card: &serde_json::Value) -> Option<Reference> {
    let named = card.get("base_model")?;
    let named = named.as_str().or_else(|| named.get(0)?.as_str())?;
    Reference::new(named, "").ok()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: Option<u64>,
}

impl RepoFile {
    /// `None` for a file without size or checksum, and for one whose name is not safe in paths, in URLs and in a terminal: no
    /// pipeline is read from these.
    fn of(told: Sibling) -> Option<RepoFile> {
        if told.rfilename.len() > LONGEST_PATH || !told.rfilename.split('/').all(is_part) {
            return None;
        }
        let (size, oid) = match told.lfs {
            Some(lfs) => (lfs.size.or(told.size)?, Oid::sha256(&lfs.sha256)?),
            None => (told.size?, Oid::git_blob(&told.blob_id?)?),
        };
        Some(RepoFile {
            path: told.rfilename,
            size,
            oid,
        })
    }
}
