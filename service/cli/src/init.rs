//! `moored serve --init`: what a service needs before other machines may use it.

use std::time::SystemTime;

use access::{Allowance, Role, TokenStore};
use config::Config;
use serde_json::json;

use crate::{CliError, screen};

/// Name of the first token.
const FIRST: &str = "administrator";

/// Makes a certificate and a first token where there are none, and prints how to go on.
pub(super) fn run(config: &Config, as_json: bool) -> Result<(), CliError> {
    let state = &config.service.state;
    gpu::create_private_folder(state).map_err(|problem| CliError::file(state, problem))?;
    let failed = |problem: access::CertificatesError| CliError::Failed(problem.to_string());
    let certificates = access::make_own(state, &config::host_name()).map_err(failed)?;
    let fingerprint = certificates.fingerprint().map_err(failed)?;
    let store = TokenStore::of(state);
    // Where all were withdrawn, nobody could use the service.
    let secret = match store.read()?.is_none_or(|tokens| tokens.is_empty()) {
        false => None,
        true => {
            let now = SystemTime::now();
            let (secret, _) = store.make(FIRST, Role::Administer, Allowance::default(), None, now)?;
            Some(secret)
        }
    };
    if as_json {
        return screen::json(&json!({
            "certificate": certificates.certificate,
            "fingerprint": fingerprint.to_string(),
            "token": secret.as_ref().map(access::Secret::reveal),
        }));
    }
    screen::text(&format!("certificate  {}", certificates.certificate.display()))?;
    screen::text(&format!("fingerprint  {fingerprint}"))?;
    match &secret {
        Some(secret) => screen::text(&format!(
            "token        {}  (administers; it is not shown again)",
            secret.reveal()
        ))?,
        None => screen::text("token        there are some already (`moored token list`)")?,
    }
    screen::text("")?;
    screen::text("serve   moored serve --listen 0.0.0.0:50051 --set service.own_certificate=true")?;
    screen::text(&format!(
        "use     moored token use FILE --endpoint https://{}:50051 --fingerprint {fingerprint}",
        config::host_name()
    ))
}
