//! Tokens: who may use the service, in which role and how much.
//!
//! A token is 256 random bits, so a fast hash keeps it: nobody can guess it from its SHA-256, and a slow hash would be paid at every call.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use crate::files::{check_private, write_private};
use crate::hex::{bytes_of, digits_of};

/// Name of the file with the tokens, in the state folder.
const FILE: &str = "tokens.json";
/// Name of the file that is locked while tokens are changed.
const LOCK: &str = "tokens.lock";
/// The version of the file's form.
const VERSION: u32 = 1;
/// Most bytes of the file: thousands of tokens.
const MOST_BYTES: u64 = 4 << 20;
/// Name of the token of `service.token_file`. No other token may have it.
pub const TOKEN_FILE_NAME: &str = "token_file";
/// Most characters of a token's name.
pub const MOST_NAME_CHARACTERS: usize = 64;
/// What a token begins with, so that programs that look for secrets in texts recognise it.
const PREFIX: &str = "moored_";

/// What a token may do. Each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Look at cards, models and jobs.
    Observe,
    /// Generate, and load models for it.
    Generate,
    /// Everything: unload, pin, reserve, pull, cancel jobs of others.
    Administer,
}

impl Role {
    /// All, from the least to the most.
    pub const ALL: [Role; 3] = [Role::Observe, Role::Generate, Role::Administer];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Observe => "observe",
            Role::Generate => "generate",
            Role::Administer => "administer",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Role, String> {
        let found = Role::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| format!("{text:?} is no role: write observe, generate or administer"))
    }
}

/// How much a token may do; what is `None` is not bounded by the token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Allowance {
    /// Jobs that wait or run at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jobs: Option<u64>,
    /// Pixels of pictures and of the frames of films, a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pixels_per_minute: Option<u64>,
    /// Seconds of films and tracks, a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_minute: Option<u64>,
    /// Bytes of pictures, films, tracks and latents that it sends, a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_minute: Option<u64>,
    /// Ids of the models that it may use; empty: all.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub models: BTreeSet<String>,
}

/// A token as it is kept: without the token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRecord {
    pub name: String,
    pub role: Role,
    /// SHA-256 of the token, in hexadecimal.
    sha256: String,
    /// Seconds since 1970.
    pub made: u64,
    /// Seconds since 1970; `None`: it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<u64>,
    #[serde(default)]
    pub allowance: Allowance,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    tokens: Vec<TokenRecord>,
}

/// A token in the clear, which is shown once.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)") // the configuration that it is in may be printed
    }
}

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// [`TokenError::NotRandom`].
    pub fn new() -> Result<Secret, TokenError> {
        let mut bytes = [0; 32];
        let random = rustls::crypto::ring::default_provider().secure_random;
        random.fill(&mut bytes).map_err(|_| TokenError::NotRandom)?;
        Ok(Secret(format!("{PREFIX}{}", digits_of(&bytes)).into()))
    }

    /// The token.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Why tokens cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read or written.
    #[error("the tokens in {} cannot be used: {problem}", file.display())]
    File { file: PathBuf, problem: String },
    /// There is a token of this name.
    #[error(
        "there is a token named {0:?}: choose another name, or withdraw that one (`moored token withdraw`)"
    )]
    Exists(String),
    /// There is no token of this name.
    #[error("there is no token named {0:?}: `moored token list` lists them")]
    NotFound(String),
    /// The name is none.
    #[error("the name {name:?} {problem}")]
    Name { name: String, problem: String },
    /// The system gives no random bytes.
    #[error("the system gives no random bytes for a token: try again")]
    NotRandom,
    /// The token of `service.token_file` cannot be used: why, for people.
    #[error("{0}")]
    OfFile(String),
    /// There is no thread that looks at the file.
    #[error("the tokens cannot be watched: {0}")]
    Watch(#[from] std::io::Error),
}

/// The tokens of one service, in its state folder.
#[derive(Clone, Debug)]
pub struct TokenStore {
    folder: PathBuf,
}

impl TokenStore {
    /// The store in a state folder.
    pub fn of(state: &Path) -> TokenStore {
        TokenStore {
            folder: state.to_owned(),
        }
    }

    /// The file with the tokens.
    pub fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Whether tokens have ever been made, and so are asked for.
    ///
    /// # Errors
    /// When it cannot be seen: whoever cannot look must not take it that there are none.
    pub fn is_there(&self) -> Result<bool, TokenError> {
        let file = self.file();
        file.try_exists().map_err(|problem| TokenError::File {
            file,
            problem: problem.to_string(),
        })
    }

    /// All tokens, by name; `None` where none has ever been made.
    ///
    /// # Errors
    /// When the file cannot be used, or others may read it.
    pub fn read(&self) -> Result<Option<Vec<TokenRecord>>, TokenError> {
        let file = self.file();
        let failed = |problem: &dyn fmt::Display| TokenError::File {
            file: file.clone(),
            problem: problem.to_string(),
        };
        match check_private(&file) {
            Err(problem) if problem.kind() == ErrorKind::NotFound => return Ok(None),
            checked => checked.map_err(|problem| failed(&problem))?,
        }
        let text = gpu::text_bounded(&file, MOST_BYTES).map_err(|problem| failed(&problem))?;
        let kept: Kept = serde_json::from_str(&text).map_err(|problem| failed(&problem))?;
        match kept.version {
            VERSION => Ok(Some(kept.tokens)),
            other => Err(failed(&format!(
                "they are of version {other}, and this program knows {VERSION}: use a newer one"
            ))),
        }
    }

    /// Makes a token and keeps its hash.
    ///
    /// # Errors
    /// When there is one of this name, the name is none, or the file cannot be used.
    pub fn make(
        &self,
        name: &str,
        role: Role,
        allowance: Allowance,
        lasts: Option<Duration>,
        now: SystemTime,
    ) -> Result<(Secret, TokenRecord), TokenError> {
        check_name(name)?;
        let secret = Secret::new()?;
        let record = TokenRecord {
            name: name.to_owned(),
            role,
            sha256: digits_of(&digest(secret.reveal())),
            made: seconds(now),
            expires: lasts.map(|lasts| seconds(now).saturating_add(lasts.as_secs())),
            allowance,
        };
        self.change(|tokens| {
            if tokens.iter().any(|token| token.name == name) {
                return Err(TokenError::Exists(name.to_owned()));
            }
            tokens.push(record.clone());
            tokens.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(())
        })?;
        Ok((secret, record))
    }

    /// Forgets a token: calls that carry it are refused from then on.
    ///
    /// # Errors
    /// When there is none of this name, or the file cannot be used.
    pub fn withdraw(&self, name: &str) -> Result<(), TokenError> {
        self.change(|tokens| {
            let before = tokens.len();
            tokens.retain(|token| token.name != name);
            match tokens.len() < before {
                true => Ok(()),
                false => Err(TokenError::NotFound(name.to_owned())),
            }
        })
    }

    /// Changes the file while no other process does.
    fn change(
        &self,
        change: impl FnOnce(&mut Vec<TokenRecord>) -> Result<(), TokenError>,
    ) -> Result<(), TokenError> {
        let failed = |problem: std::io::Error| TokenError::File {
            file: self.file(),
            problem: problem.to_string(),
        };
        gpu::create_private_folder(&self.folder).map_err(failed)?;
        let lock: File = gpu::open_private(&self.folder.join(LOCK)).map_err(failed)?;
        lock.lock().map_err(failed)?; // until it is closed, at the end of this function
        let mut tokens = self.read()?.unwrap_or_default();
        change(&mut tokens)?;
        let kept = Kept {
            version: VERSION,
            tokens,
        };
        let text = serde_json::to_string_pretty(&kept).map_err(|problem| failed(problem.into()))?;
        write_private(&self.file(), text.as_bytes()).map_err(failed)
    }
}

fn check_name(name: &str) -> Result<(), TokenError> {
    let problem = match () {
        () if name.is_empty() => {
            Some("is empty: write a name, such as that of a person or a program".to_owned())
        }
        () if name == TOKEN_FILE_NAME => {
            Some("is that of the token of service.token_file: choose another one".to_owned())
        }
        () if name.chars().count() > MOST_NAME_CHARACTERS => Some(format!(
            "has more than {MOST_NAME_CHARACTERS} characters: choose a shorter one"
        )),
        () => wording::name_problem(name),
    };
    match problem {
        None => Ok(()),
        Some(problem) => Err(TokenError::Name {
            name: wording::one_line(name).into_owned(),
            problem,
        }),
    }
}

/// Who makes a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The name of its token.
    pub name: String,
    pub role: Role,
    pub allowance: Allowance,
}

impl Holder {
    /// A number for its name, by which what it uses is counted.
    pub fn number(&self) -> u128 {
        let bytes = digest(&self.name);
        bytes
            .iter()
            .take(16)
            .fold(0, |number, byte| number << 8 | u128::from(*byte))
    }
}

/// What is kept of a token that was shown, to look it up again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of a token.
    pub fn of(token: &str) -> TokenHash {
        TokenHash(digest(token))
    }
}

/// A token that counts.
#[derive(Clone, Debug)]
struct Valid {
    sha256: [u8; 32],
    expires: Option<u64>,
    holder: Arc<Holder>,
}

/// The tokens of a service as it asks for them.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    /// Whether calls must carry one. A list may be empty: then nobody is let in.
    pub are_needed: bool,
    valid: Vec<Valid>,
}

impl Tokens {
    /// The names of all.
    pub fn names(&self) -> BTreeSet<String> {
        let names = self.valid.iter().map(|valid| valid.holder.name.clone());
        names.collect()
    }

    /// Tokens are asked for, and none is valid.
    pub fn of_nobody() -> Tokens {
        Tokens {
            are_needed: true,
            valid: Vec::new(),
        }
    }

    /// One token, which may do everything.
    pub fn of_one(token: &str) -> Tokens {
        Tokens {
            are_needed: true,
            valid: vec![Valid {
                sha256: digest(token),
                expires: None,
                holder: Arc::new(Holder {
                    name: TOKEN_FILE_NAME.to_owned(),
                    role: Role::Administer,
                    allowance: Allowance::default(),
                }),
            }],
        }
    }

    /// The tokens of a store, and the one of `service.token_file`.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn read(store: &TokenStore, of_file: Option<&str>) -> Result<Tokens, TokenError> {
        let kept = store.read()?;
        let mut tokens = of_file.map(Tokens::of_one).unwrap_or_default();
        tokens.are_needed |= kept.is_some();
        for record in kept.unwrap_or_default() {
            let sha256 = bytes_of(&record.sha256).ok_or_else(|| TokenError::File {
                file: store.file(),
                problem: format!(
                    "the hash of {:?} is none: withdraw that token and make it again",
                    record.name
                ),
            })?;
            tokens.valid.push(Valid {
                sha256,
                expires: record.expires,
                holder: Arc::new(Holder {
                    name: record.name,
                    role: record.role,
                    allowance: record.allowance,
                }),
            });
        }
        Ok(tokens)
    }

    /// Whose token this is.
    ///
    /// # Errors
    /// When it is nobody's, or has expired: the reason, for people.
    pub fn holder_of(&self, token: &str, now: SystemTime) -> Result<Arc<Holder>, &'static str> {
        self.holder_by(&TokenHash::of(token), now)
    }

    /// Whose token has this hash.
    ///
    /// # Errors
    /// As [`Tokens::holder_of`].
    pub fn holder_by(&self, hash: &TokenHash, now: SystemTime) -> Result<Arc<Holder>, &'static str> {
        let TokenHash(sha256) = hash;
        // Every hash is looked at in the same way, so that the time of an answer tells nothing of them.
        let mut place = u64::MAX;
        for (at, valid) in (0..).zip(&self.valid) {
            place.conditional_assign(&at, valid.sha256.ct_eq(sha256));
        }
        let found = usize::try_from(place)
            .ok()
            .and_then(|place| self.valid.get(place));
        match found {
            None => Err("the token is wrong, or was withdrawn"),
            Some(valid) if valid.expires.is_some_and(|expires| expires <= seconds(now)) => {
                Err("the token has expired: ask for another one")
            }
            Some(valid) => Ok(valid.holder.clone()),
        }
    }
}

/// The names of tokens that there were, and that there are no more.
pub fn withdrawn(before: &Tokens, now: &Tokens) -> BTreeSet<String> {
    &before.names() - &now.names()
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn store() -> (tempfile::TempDir, TokenStore, SystemTime) {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::of(&folder.path().join("state"));
        (folder, store, UNIX_EPOCH + 20_000 * DAY)
    }

    #[test]
    fn a_token_is_known_until_it_expires_or_is_withdrawn() {
        let (_folder, store, now) = store();
        assert!(!Tokens::read(&store, None).unwrap().are_needed);
        let make = |name: &str, lasts| {
            store
                .make(name, Role::Generate, Allowance::default(), lasts, now)
                .unwrap()
        };
        let (alice, _) = make("alice", None);
        let (bob, _) = make("bob", Some(DAY));
        let tokens = Tokens::read(&store, None).unwrap();
        let name = |tokens: &Tokens, secret: &Secret, now| {
            tokens
                .holder_of(secret.reveal(), now)
                .map(|holder| holder.name.clone())
        };
        assert_eq!(name(&tokens, &alice, now).as_deref(), Ok("alice"));
        assert_eq!(name(&tokens, &bob, now).as_deref(), Ok("bob"));
        assert_eq!(name(&tokens, &alice, now + DAY).as_deref(), Ok("alice"));
        assert!(name(&tokens, &bob, now + DAY).unwrap_err().contains("expired"));
        for wrong in [
            "",
            "moored_",
            &alice.reveal()[1..],
            &alice.reveal().to_uppercase(),
        ] {
            assert!(tokens.holder_of(wrong, now).is_err());
        }
        let before = tokens;
        store.withdraw("alice").unwrap();
        let tokens = Tokens::read(&store, None).unwrap();
        assert_eq!(withdrawn(&before, &tokens), BTreeSet::from(["alice".to_owned()]));
        assert!(withdrawn(&tokens, &before).is_empty());
        store.withdraw("bob").unwrap();
        let tokens = Tokens::read(&store, None).unwrap();
        assert!(
            tokens.are_needed,
            "nobody is let in once the last one is withdrawn"
        );
        assert!(name(&tokens, &alice, now).is_err());
        assert!(matches!(store.withdraw("bob"), Err(TokenError::NotFound(_))));
    }

    #[test]
    fn a_file_that_cannot_be_seen_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::of(folder.path());
        assert!(!store.is_there().unwrap());
        std::os::unix::fs::symlink(FILE, store.file()).unwrap(); // a link to itself
        assert!(store.is_there().is_err());
    }

    #[test]
    fn the_token_of_the_file_administers_and_its_name_is_taken() {
        let (_folder, store, now) = store();
        let tokens = Tokens::read(&store, Some("0123456789abcdef")).unwrap();
        let holder = tokens.holder_of("0123456789abcdef", now).unwrap();
        assert_eq!(
            (holder.role, holder.name.as_str()),
            (Role::Administer, TOKEN_FILE_NAME)
        );
        for wrong in [
            "",
            TOKEN_FILE_NAME,
            "a\u{1b}[31m",
            &"x".repeat(MOST_NAME_CHARACTERS + 1),
        ] {
            let made = store.make(wrong, Role::Observe, Allowance::default(), None, now);
            assert!(matches!(made, Err(TokenError::Name { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn the_file_holds_no_token_and_only_its_owner_may_read_it() {
        let (_folder, store, now) = store();
        let allowance = Allowance {
            jobs: Some(2),
            models: BTreeSet::from(["tiny".to_owned()]),
            ..Allowance::default()
        };
        let (secret, record) = store.make("alice", Role::Generate, allowance, None, now).unwrap();
        let text = std::fs::read_to_string(store.file()).unwrap();
        assert!(!text.contains(&secret.reveal()[PREFIX.len()..]));
        assert!(!format!("{secret:?}").contains(secret.reveal()));
        assert_eq!(secret.reveal().len(), PREFIX.len() + 64);
        assert_eq!(store.read().unwrap(), Some(vec![record]));
        assert!(matches!(
            store.make("alice", Role::Observe, Allowance::default(), None, now),
            Err(TokenError::Exists(_))
        ));
        let mode = std::fs::metadata(store.file()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::set_permissions(store.file(), std::fs::Permissions::from_mode(0o644)).unwrap();
        let refused = store.read().unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
    }

    #[test]
    fn a_file_of_another_version_or_form_is_refused() {
        let (_folder, store, now) = store();
        store
            .make("alice", Role::Generate, Allowance::default(), None, now)
            .unwrap();
        let good = std::fs::read_to_string(store.file()).unwrap();
        for (old, new) in [
            ("\"version\": 1", "\"version\": 2"),
            ("generate", "rule"),
            ("\"name\"", "\"title\""),
            ("\"sha256\": \"", "\"sha256\": \"x"),
        ] {
            write_private(&store.file(), good.replace(old, new).as_bytes()).unwrap();
            assert!(Tokens::read(&store, None).is_err(), "{new}");
        }
    }
}
