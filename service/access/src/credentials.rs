//! What a client keeps of services: a token and a fingerprint for each, by its address. A token goes to the address that it was kept for and
//! to no other one.

use std::collections::BTreeMap;
use std::io::Error;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::files::{check_private, write_private};

/// The version of the file's form.
const VERSION: u32 = 1;
/// Most bytes of the file.
const MOST_BYTES: u64 = 1 << 20;

/// What is kept of one service.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credential {
    pub token: String,
    /// The fingerprint of its certificate; empty: it is trusted by an authority.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
}

/// A file of credentials. The Python client reads the same.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    version: u32,
    /// By address: `https://box:50051`.
    endpoints: BTreeMap<String, Credential>,
}

impl Credentials {
    /// The credentials in a file; none where there is no file to be seen.
    ///
    /// # Errors
    /// When the file cannot be used, or others may read it.
    pub fn read(file: &Path) -> std::io::Result<Credentials> {
        // Nothing is kept where there is no file, and where this account cannot look: the home may be another one's.
        if std::fs::metadata(file).is_err() {
            return Ok(Credentials {
                version: VERSION,
                endpoints: BTreeMap::new(),
            });
        }
        check_private(file)?;
        let text = gpu::text_bounded(file, MOST_BYTES)?;
        let read: Credentials = serde_json::from_str(&text).map_err(Error::from)?;
        match read.version {
            VERSION => Ok(read),
            other => Err(Error::other(format!(
                "it is of version {other}, and this program knows {VERSION}: use a newer one"
            ))),
        }
    }

    /// What is kept for an address.
    pub fn of(&self, endpoint: &str) -> Option<&Credential> {
        self.endpoints.get(endpoint)
    }

    /// All addresses.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        self.endpoints.keys().map(String::as_str)
    }

    /// Keeps a credential for an address in a file, in place of the one there; `None` forgets it. Returns whether there was one. Other
    /// processes that change the file wait meanwhile.
    ///
    /// # Errors
    /// When the file cannot be used or written.
    pub fn keep(file: &Path, endpoint: &str, credential: Option<Credential>) -> std::io::Result<bool> {
        if let Some(folder) = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        {
            gpu::create_private_folder(folder)?;
        }
        let lock = gpu::open_private(&file.with_extension("lock"))?;
        lock.lock()?; // until it is closed, at the end of this function
        let mut kept = Credentials::read(file)?;
        let was = match credential {
            Some(credential) => kept.endpoints.insert(endpoint.to_owned(), credential).is_some(),
            None => kept.endpoints.remove(endpoint).is_some(),
        };
        let text = serde_json::to_string_pretty(&kept)?;
        write_private(file, text.as_bytes())?;
        Ok(was)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_credential_is_that_of_one_address_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("moored").join("credentials.json");
        let kept = Credential {
            token: "secret".to_owned(),
            fingerprint: String::new(),
        };
        let read = || Credentials::read(&file).unwrap();
        assert!(!Credentials::keep(&file, "https://box:1", Some(kept.clone())).unwrap());
        assert!(read().of("https://box:1") == Some(&kept));
        for other in [
            "http://box:1",
            "https://box:2",
            "https://box:1.example:1",
            "box:1",
        ] {
            assert!(read().of(other).is_none(), "{other}");
        }
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(Credentials::keep(&file, "https://box:1", None).unwrap());
        assert!(read().of("https://box:1").is_none());
        let below_a_file = Credentials::read(&file.join("credentials.json")).unwrap();
        assert_eq!(
            below_a_file.endpoints().count(),
            0,
            "what cannot be looked at holds nothing"
        );
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Credentials::read(&file).is_err());
    }

    #[test]
    fn of_programs_that_keep_at_the_same_time_none_loses_what_another_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials.json");
        let kept = |token: &str| Credential {
            token: token.to_owned(),
            fingerprint: String::new(),
        };
        std::thread::scope(|scope| {
            for program in 0..8 {
                let (file, kept) = (&file, &kept);
                scope.spawn(move || {
                    for service in 0..8 {
                        let endpoint = format!("https://box:{program}{service}");
                        Credentials::keep(file, &endpoint, Some(kept("secret"))).unwrap();
                    }
                });
            }
        });
        assert_eq!(Credentials::read(&file).unwrap().endpoints().count(), 64);
    }
}
