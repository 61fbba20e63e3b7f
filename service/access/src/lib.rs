//! ADMITS. Credentials, as files: the certificates of a service, the tokens of those who may use it, and what a client keeps of services. The
//! files of a service are read again when they change.

mod certificates;
mod credentials;
mod files;
mod following;
mod hex;
mod tokens;

pub use certificates::{
    Certificates, CertificatesError, Fingerprint, OWN_CERTIFICATE, OWN_KEY, certificates_in_pem, key_in_pem,
    make_own,
};
pub use credentials::{Credential, Credentials};
pub use files::{check_given, check_private};
pub use following::follow;
pub use tokens::{
    Allowance, Holder, MOST_NAME_CHARACTERS, Role, Secret, TOKEN_FILE_NAME, TokenError, TokenHash,
    TokenRecord, TokenStore, Tokens, withdrawn,
};
