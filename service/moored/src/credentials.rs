//! The credentials of the service that starts, and its refusal to start without them where other machines reach it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use access::{TokenError, TokenStore, Tokens};
use calls::Service;
use config::{ServiceSettings, bounded};
use tokio::sync::watch;

use crate::serve::ServeError;

/// What a service lacks that other machines reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lacks {
    Tls,
    Tokens,
    Both,
}

impl Lacks {
    pub(crate) fn problem(self) -> &'static str {
        match self {
            Lacks::Tls => "the service has no certificate: others could read tokens and pictures on the way",
            Lacks::Tokens => "the service has no tokens: everybody there could use it",
            Lacks::Both => {
                "the service has neither a certificate nor tokens: everybody there could use it, and read what others send"
            }
        }
    }

    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Lacks::Tls => {
                "then set service.own_certificate = true (or service.certificate, service.certificate_key). Behind a proxy or a tunnel with \
                 TLS of its own: service.allow_without_tls = true"
            }
            Lacks::Tokens => {
                "`moored token make NAME` makes one alone, and service.token_file names a file with one. Where everybody may use the \
                 service: service.allow_without_tokens = true"
            }
            Lacks::Both => {
                "then set service.own_certificate = true. To do without: service.allow_without_tls = true (behind a proxy or a tunnel), and \
                 service.allow_without_tokens = true or a service.token_file"
            }
        }
    }
}

/// Refuses an address that other machines reach, without TLS or tokens, unless the configuration says so.
pub(crate) fn check_exposure(service: &ServiceSettings, needs_token: bool) -> Result<(), ServeError> {
    let address = service.listen;
    let lacks_tls = service.certificates.is_none() && !service.allow_without_tls;
    let lacks_tokens = !needs_token && !service.allow_without_tokens;
    let lacks = match (lacks_tls, lacks_tokens) {
        _ if address.ip().is_loopback() => return Ok(()),
        (false, false) => return Ok(()),
        (true, false) => Lacks::Tls,
        (false, true) => Lacks::Tokens,
        (true, true) => Lacks::Both,
    };
    Err(ServeError::Exposed { address, lacks })
}

/// The tokens of which calls must carry one, now and whenever they change.
pub(crate) fn tokens_of(service: &ServiceSettings) -> Result<watch::Receiver<Tokens>, ServeError> {
    if let Some(own) = &service.own_token {
        return Ok(watch::channel(Tokens::of_one(own.reveal())).1);
    }
    let (store, file) = (TokenStore::of(&service.state), service.token_file.clone());
    let files = std::iter::once(store.file()).chain(file.clone()).collect();
    // Tokens that were asked for once are asked for until the service ends, whatever happens to the file. A file that cannot be read
    // asks for them too.
    let were_needed = AtomicBool::new(false);
    let read = move || {
        let of_file = read_token(file.as_deref()).map_err(TokenError::OfFile)?;
        let tokens = Tokens::read(&store, of_file.as_deref());
        let are_needed = tokens.as_ref().map_or(true, |tokens| tokens.are_needed);
        let were_needed = were_needed.fetch_or(are_needed, Ordering::Relaxed);
        let mut tokens = tokens?;
        tokens.are_needed |= were_needed;
        Ok::<_, TokenError>(tokens)
    };
    let meanwhile = |last: &Tokens| (!last.are_needed).then(Tokens::of_nobody);
    Ok(access::follow("the tokens", files, read, meanwhile)?)
}

/// Ends the jobs of tokens that are withdrawn, and resumes those from before a restart of the others. It returns when the tokens are followed no more.
pub(crate) async fn end_withdrawn(mut tokens: watch::Receiver<Tokens>, service: Service) {
    let mut before = tokens.borrow_and_update().clone();
    if before.are_needed {
        let accounts: BTreeSet<String> = before
            .names()
            .iter()
            .map(|name| calls::account_of_token(name))
            .collect();
        for account in service.accounts_of_held_jobs() {
            // Jobs from before a restart may be of a token that was withdrawn meanwhile.
            if calls::is_of_token(&account) && !accounts.contains(&account) {
                service.withdraw(account).await;
            }
        }
    }
    service.resume();
    while tokens.changed().await.is_ok() {
        let now = tokens.borrow_and_update().clone();
        for name in access::withdrawn(&before, &now) {
            tracing::info!(token = name, "a token was withdrawn, and its jobs end");
            service.withdraw(calls::account_of_token(&name)).await;
        }
        before = now;
    }
}

/// The certificates of new connections, now and whenever they change.
pub(crate) fn tls_of(service: &ServiceSettings) -> Result<Option<transport::Tls>, ServeError> {
    let Some(certificates) = service.certificates.clone() else {
        return Ok(None);
    };
    if service.own_certificate {
        access::make_own(&service.state, &config::host_name())?;
    }
    tracing::info!(fingerprint = %certificates.fingerprint()?, certificate = %certificates.certificate.display(), "connections are encrypted");
    let files = certificates.files();
    let read = move || certificates.read();
    Ok(Some(access::follow("the certificates", files, read, |_| None)?))
}

/// A shorter token could be guessed.
const LEAST_TOKEN_CHARACTERS: usize = 16;

/// The token in a file.
pub(crate) fn read_token(file: Option<&Path>) -> Result<Option<String>, String> {
    let unusable =
        |file: &Path, problem: String| format!("the token file {} cannot be used: {problem}", file.display());
    let read = |file: &Path| {
        let read = access::check_given(file).and_then(|()| bounded::token(file));
        read.map_err(|problem| unusable(file, problem.to_string()))
    };
    let token = file.map(read).transpose()?;
    match (&token, file) {
        (Some(token), Some(file)) if token.len() < LEAST_TOKEN_CHARACTERS => Err(format!(
            "the token in {} is shorter than {LEAST_TOKEN_CHARACTERS} characters",
            file.display()
        )),
        _ => Ok(token),
    }
}
