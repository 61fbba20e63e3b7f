//! ADMITS. The credentials of the service, as files: its certificates, and the tokens of those who may use it. Both are read again
//! when they change.

mod certificates;
mod files;
mod following;
mod tokens;

pub use certificates::{Certificates, CertificatesError, Fingerprint, OWN_CERTIFICATE, OWN_KEY, make_own};
pub use following::follow;
pub use tokens::{
    Allowance, Holder, MOST_NAME_CHARACTERS, Role, Secret, TOKEN_FILE_NAME, TokenError, TokenRecord, TokenStore, Tokens,
};
