//! Files of credentials with any change are read or refused, and nobody is let in by a change.

#![allow(clippy::unwrap_used)] // a test

#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;

use std::time::SystemTime;

use access::{Allowance, Credential, Credentials, Fingerprint, Role, TokenStore, Tokens, make_own};
use edits::{Edit, edited};

#[test]
fn any_file_of_tokens_is_read_safely() {
    let folder = tempfile::tempdir().unwrap();
    let store = TokenStore::of(folder.path());
    let now = SystemTime::now();
    let allowance = Allowance {
        jobs: Some(2),
        models: ["tiny".to_owned()].into(),
        ..Allowance::default()
    };
    let (secret, _) = store.make("alice", Role::Generate, allowance, None, now).unwrap();
    let good = std::fs::read(store.file()).unwrap();
    bolero::check!()
        .with_iterations(500)
        .with_type::<Vec<Edit>>()
        .for_each(|edits| {
            std::fs::write(store.file(), edited(good.clone(), edits)).unwrap();
            if let Ok(tokens) = Tokens::read(&store, None) {
                assert!(tokens.are_needed);
                assert!(tokens.holder_of("", now).is_err());
                let _ = tokens.holder_of(secret.reveal(), now);
            }
        });
}

#[test]
fn any_certificate_is_read_safely() {
    let folder = tempfile::tempdir().unwrap();
    let mut own = make_own(folder.path(), "box").unwrap();
    own.client_authorities = Some(folder.path().join("authorities.pem"));
    let files = [own.certificate.clone(), own.key.clone(), own.certificate.clone()];
    let good = files.map(|file| std::fs::read(file).unwrap());
    bolero::check!()
        .with_iterations(300)
        .with_type::<(u8, Vec<Edit>)>()
        .for_each(|(which, edits)| {
            let changed = usize::from(*which) % good.len();
            for (at, (file, contents)) in own.files().iter().zip(&good).enumerate() {
                let contents = match at == changed {
                    true => edited(contents.clone(), edits),
                    false => contents.clone(),
                };
                std::fs::write(file, contents).unwrap();
            }
            let _ = (own.read(), own.fingerprint());
        });
}

#[test]
fn any_file_of_credentials_is_read_safely() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credentials.json");
    let credential = Credential {
        token: "secret".to_owned(),
        fingerprint: Fingerprint::of(b"certificate").to_string(),
    };
    Credentials::keep(&file, "https://box:443", Some(credential)).unwrap();
    let good = std::fs::read(&file).unwrap();
    bolero::check!()
        .with_iterations(500)
        .with_type::<Vec<Edit>>()
        .for_each(|edits| {
            std::fs::write(&file, edited(good.clone(), edits)).unwrap();
            let Ok(read) = Credentials::read(&file) else {
                return;
            };
            for endpoint in read.endpoints() {
                let kept = read.of(endpoint).unwrap();
                let _ = kept.fingerprint.parse::<Fingerprint>();
            }
        });
}
