//! What `moored doctor` says of access: who may use the service, what crosses the network in the clear, and which files others may read.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use access::{Credentials, Role, TokenRecord, TokenStore};
use cli::Finding;
use config::{ClientSettings, Config, ServiceSettings};

use crate::credentials::{check_exposure, read_token};

/// The findings about access, in the order in which they are shown.
pub(crate) fn access(config: &Config) -> Vec<Finding> {
    let service = &config.service;
    let tokens = tokens(service);
    // What cannot be read is no reason to believe that nobody is asked for a token.
    let are_needed = tokens.as_ref().map_or(true, Option::is_some);
    let mut findings = vec![
        Finding::of("listen", exposure(service, are_needed)),
        Finding::of("tls", tls(service)),
        Finding::of(
            "tokens",
            tokens.map(|found| {
                found.unwrap_or_else(|| "none: everybody who reaches the service may use it".to_owned())
            }),
        ),
    ];
    findings.extend(state(&service.state));
    findings.extend(kept(&config.client));
    findings
}

/// Who reaches the service, and by what it is guarded.
fn exposure(service: &ServiceSettings, needs_token: bool) -> Result<String, String> {
    check_exposure(service, needs_token).map_err(|problem| problem.to_string())?;
    let address = service.listen;
    if address.ip().is_loopback() {
        return Ok(format!("{address}: programs of this machine reach it"));
    }
    let guarded = match (service.certificates.is_some(), needs_token) {
        (true, true) => "they need TLS and a token",
        (true, false) => "they need TLS and no token, as service.allow_without_tokens says",
        (false, true) => {
            "they need a token, and without a proxy or a tunnel others read it, as service.allow_without_tls says"
        }
        (false, false) => "they need nothing, and others read what they send, as the configuration says",
    };
    Ok(format!("{address}: other machines reach it, and {guarded}"))
}

fn tls(service: &ServiceSettings) -> Result<String, String> {
    let Some(certificates) = &service.certificates else {
        return Ok("off".to_owned());
    };
    let is_there = |file: &Path| file.try_exists().unwrap_or(true);
    if service.own_certificate && !is_there(&certificates.certificate) && !is_there(&certificates.key) {
        return Ok("its own certificate, which is made at the first start".to_owned());
    }
    certificates.read().map_err(|problem| problem.to_string())?;
    let fingerprint = certificates
        .fingerprint()
        .map_err(|problem| problem.to_string())?;
    let of_clients = match &certificates.client_authorities {
        Some(file) => format!("; clients show a certificate of {}", file.display()),
        None => String::new(),
    };
    Ok(format!(
        "{}, fingerprint {fingerprint}{of_clients}",
        certificates.certificate.display()
    ))
}

/// The tokens in words; `None` where none are asked for.
fn tokens(service: &ServiceSettings) -> Result<Option<String>, String> {
    let of_file = read_token(service.token_file.as_deref())?;
    // Where the folder is none, that is a finding of its own.
    let kept = match service.state.is_dir() {
        true => TokenStore::of(&service.state)
            .read()
            .map_err(|problem| problem.to_string())?,
        false => None,
    };
    if of_file.is_none() && kept.is_none() {
        return Ok(None);
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let kept = kept.unwrap_or_default();
    let (expired, valid): (Vec<&TokenRecord>, Vec<&TokenRecord>) = kept
        .iter()
        .partition(|token| token.expires.is_some_and(|expires| expires <= now));
    let mut roles: BTreeMap<Role, usize> = BTreeMap::new();
    for token in &valid {
        *roles.entry(token.role).or_default() += 1;
    }
    let mut words: Vec<String> = roles
        .iter()
        .map(|(role, count)| format!("{count} {role}"))
        .collect();
    words.extend(of_file.map(|_| "service.token_file administers".to_owned()));
    if !expired.is_empty() {
        words.push(format!("{} expired", expired.len()));
    }
    if words.is_empty() {
        return Err(
            "all were withdrawn, and nobody may use the service: `moored serve --init` makes one".to_owned(),
        );
    }
    Ok(Some(words.join(", ")))
}

/// Whether others may look into the state folder, or change what is in it.
fn state(folder: &Path) -> Option<Finding> {
    let mode = folder.metadata().ok()?.permissions().mode();
    let told = |may: &str| {
        format!(
            "others may {may} {}: take that right away (chmod 700 {})",
            folder.display(),
            folder.display()
        )
    };
    match mode & 0o077 {
        0 => None, // the finding of the folder itself is enough
        rights if rights & 0o022 != 0 => Some(Finding::bad("private", told("write in"))),
        _ => Some(Finding::good("private", told("look into"))),
    }
}

/// What this user keeps of services.
fn kept(client: &ClientSettings) -> Option<Finding> {
    let file = client.credentials.as_deref()?;
    match Credentials::read(file) {
        Ok(kept) => match kept.endpoints().count() {
            0 => None,
            1 => Some(Finding::good(
                "kept",
                format!("a token for one service, in {}", file.display()),
            )),
            several => Some(Finding::good(
                "kept",
                format!("tokens for {several} services, in {}", file.display()),
            )),
        },
        Err(problem) => Some(Finding::bad("kept", format!("{}: {problem}", file.display()))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::time::Duration;

    use access::Allowance;

    use super::*;

    fn config(state: &Path, listen: &str, own_certificate: bool) -> Config {
        let text = |path: &Path| path.display().to_string();
        let flags = vec![
            ("service.state".to_owned(), Some(text(state).into())),
            (
                "client.credentials".to_owned(),
                Some(text(&state.join("credentials.json")).into()),
            ),
            ("service.listen".to_owned(), Some(listen.into())),
            ("service.own_certificate".to_owned(), Some(own_certificate.into())),
        ];
        Config::load(None, flags).unwrap()
    }

    const HERE: &str = "127.0.0.1:50051";
    const BEYOND: &str = "0.0.0.0:50051";

    /// What was found of a thing, and whether it is well.
    fn found(findings: &[Finding], what: &str) -> (bool, String) {
        let finding = findings.iter().find(|finding| finding.what == what);
        finding.map_or((true, String::new()), |finding| {
            (finding.well, finding.found.clone())
        })
    }

    #[test]
    fn a_service_of_this_machine_alone_is_well_without_credentials() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        let findings = access(&config(folder.path(), HERE, false));
        assert!(findings.iter().all(|finding| finding.well), "{findings:?}");
        assert!(found(&findings, "listen").1.contains("this machine"));
        assert_eq!(found(&findings, "tls").1, "off");
        assert!(found(&findings, "tokens").1.starts_with("none"));
        assert_eq!(found(&findings, "private").1, "");
    }

    #[test]
    fn what_lets_others_in_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let bare = access(&config(folder.path(), BEYOND, false));
        assert!(!found(&bare, "listen").0, "{bare:?}");
        let store = TokenStore::of(folder.path());
        let make = |name: &str, role, lasts, now| {
            store.make(name, role, Allowance::default(), lasts, now).unwrap();
        };
        make("ann", Role::Generate, None, SystemTime::now());
        make("ben", Role::Observe, Some(Duration::from_secs(1)), UNIX_EPOCH);
        access::make_own(folder.path(), "").unwrap();
        let guarded = access(&config(folder.path(), BEYOND, true));
        let (well, listen) = found(&guarded, "listen");
        assert!(well && listen.contains("TLS and a token"), "{listen}");
        assert!(found(&guarded, "tls").1.contains("sha256:"));
        assert_eq!(
            found(&guarded, "tokens"),
            (true, "1 generate, 1 expired".to_owned())
        );
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o770)).unwrap();
        std::fs::set_permissions(store.file(), Permissions::from_mode(0o644)).unwrap();
        std::fs::set_permissions(folder.path().join(access::OWN_KEY), Permissions::from_mode(0o604)).unwrap();
        let readable = access(&config(folder.path(), HERE, true));
        for what in ["tokens", "tls", "private"] {
            let (well, told) = found(&readable, what);
            assert!(!well && told.contains("chmod"), "{what}: {told}");
        }
    }

    #[test]
    fn a_service_that_nobody_may_use_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::of(folder.path());
        let now = SystemTime::now();
        store
            .make("ann", Role::Generate, Allowance::default(), None, now)
            .unwrap();
        store.withdraw("ann").unwrap();
        let (well, told) = found(&access(&config(folder.path(), HERE, false)), "tokens");
        assert!(!well && told.contains("--init"), "{told}");
    }
}
