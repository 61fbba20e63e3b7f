//! The certificate of the service, its key, and the authorities of its clients' certificates.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rcgen::{CertificateParams, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest as _, Sha256};

use crate::files::{check_given, write_private};
use crate::hex::{bytes_of, digits_of};

/// Name of the certificate that the service makes for itself, in its state folder.
pub const OWN_CERTIFICATE: &str = "certificate.pem";
/// Name of its key.
pub const OWN_KEY: &str = "certificate-key.pem";
/// Most bytes of a file of certificates.
const MOST_BYTES: u64 = 4 << 20;

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// A file cannot be read.
    #[error("{} cannot be used: {problem}", file.display())]
    File { file: PathBuf, problem: String },
    /// The certificate and its key do not go together, or are of a kind that is not known.
    #[error("the certificate {} and its key {} cannot be used: {problem}", certificate.display(), key.display())]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        problem: String,
    },
    /// No certificate could be made.
    #[error("no certificate can be made in {}: {problem}", folder.display())]
    NotMade { folder: PathBuf, problem: String },
    /// Of the service's own certificate and its key, one file is there.
    #[error(
        "{} is not there, and {} is: put back the lost file from a copy. A new certificate would have another fingerprint, which no client \
         that pins it trusts. To have a new one all the same, remove {} and tell the clients its fingerprint",
        lost.display(), left.display(), left.display()
    )]
    Half { lost: PathBuf, left: PathBuf },
    /// There is no thread that looks at the files.
    #[error("the certificates cannot be watched: {0}")]
    Watch(#[from] std::io::Error),
}

/// The files by which the service speaks TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificates {
    /// PEM: the certificate of the service, and those between it and its authority.
    pub certificate: PathBuf,
    /// PEM: its key.
    pub key: PathBuf,
    /// PEM: authorities, of one of which clients must show a certificate; `None`: they need none.
    pub client_authorities: Option<PathBuf>,
}

impl Certificates {
    /// All files.
    pub fn files(&self) -> Vec<PathBuf> {
        let own = [self.certificate.clone(), self.key.clone()];
        own.into_iter().chain(self.client_authorities.clone()).collect()
    }

    /// Reads them into the settings of new connections.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn read(&self) -> Result<Arc<ServerConfig>, CertificatesError> {
        let chain = certificates_in(&self.certificate)?;
        check_given(&self.key).map_err(|problem| unusable(&self.key, problem))?;
        let key = key_in_pem(&text_of(&self.key)?).map_err(|problem| unusable(&self.key, problem))?;
        let pair = |problem: rustls::Error| CertificatesError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            problem: problem.to_string(),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(pair)?;
        let builder = match &self.client_authorities {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates_in(file)? {
                    roots.add(authority).map_err(|problem| unusable(file, problem))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|problem| unusable(file, problem))?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// The fingerprint of the service's certificate.
    ///
    /// # Errors
    /// When its file cannot be used.
    pub fn fingerprint(&self) -> Result<Fingerprint, CertificatesError> {
        let chain = certificates_in(&self.certificate)?;
        let first = chain
            .first()
            .ok_or_else(|| unusable(&self.certificate, NO_CERTIFICATE))?;
        Ok(Fingerprint::of(first))
    }
}

const NO_CERTIFICATE: &str = "it holds no certificate in PEM form";

fn unusable(file: &Path, problem: impl ToString) -> CertificatesError {
    CertificatesError::File {
        file: file.to_owned(),
        problem: problem.to_string(),
    }
}

fn text_of(file: &Path) -> Result<Vec<u8>, CertificatesError> {
    gpu::read_bounded(file, MOST_BYTES).map_err(|problem| unusable(file, problem))
}

fn certificates_in(file: &Path) -> Result<Vec<CertificateDer<'static>>, CertificatesError> {
    certificates_in_pem(&text_of(file)?).map_err(|problem| unusable(file, problem))
}

/// The certificates in a text in PEM form, in order.
///
/// # Errors
/// For people, when it is damaged or holds none.
pub fn certificates_in_pem(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(read) if read.is_empty() => Err(NO_CERTIFICATE.to_owned()),
        read => read.map_err(|problem| problem.to_string()),
    }
}

/// The private key in a text in PEM form.
///
/// # Errors
/// For people, when it is damaged or holds none.
pub fn key_in_pem(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|problem| problem.to_string())
}

/// Makes a certificate of the service's own in its state folder, signed by itself, unless there is one. It does not expire (rcgen's
/// default): clients know it by its fingerprint, which a new one would change. So none is made where one of its two files is lost.
///
/// # Errors
/// When it cannot be made, one of its two files is lost, or others may read the key that is there.
pub fn make_own(state: &Path, host: &str) -> Result<Certificates, CertificatesError> {
    let own = Certificates {
        certificate: state.join(OWN_CERTIFICATE),
        key: state.join(OWN_KEY),
        client_authorities: None,
    };
    let is_there = |file: &Path| file.try_exists().map_err(|problem| unusable(file, problem));
    let lost = |lost: &Path, left: &Path| CertificatesError::Half {
        lost: lost.to_owned(),
        left: left.to_owned(),
    };
    match (is_there(&own.certificate)?, is_there(&own.key)?) {
        (true, true) => {
            check_given(&own.key).map_err(|problem| unusable(&own.key, problem))?;
            return Ok(own);
        }
        (false, true) => return Err(lost(&own.certificate, &own.key)),
        (true, false) => return Err(lost(&own.key, &own.certificate)),
        (false, false) => {}
    }
    let failed = |problem: String| CertificatesError::NotMade {
        folder: state.to_owned(),
        problem,
    };
    let names = ["localhost", host, "127.0.0.1", "::1"].map(str::to_owned);
    let names: Vec<String> = names.into_iter().filter(|name| !name.is_empty()).collect();
    let mut asked = CertificateParams::new(names).map_err(|problem| failed(problem.to_string()))?;
    asked.distinguished_name.push(DnType::CommonName, "moored");
    asked.is_ca = IsCa::ExplicitNoCa;
    let key = KeyPair::generate().map_err(|problem| failed(problem.to_string()))?;
    let made = asked
        .self_signed(&key)
        .map_err(|problem| failed(problem.to_string()))?;
    let written = write_private(&own.key, key.serialize_pem().as_bytes())
        .and_then(|()| write_private(&own.certificate, made.pem().as_bytes()));
    written.map_err(|problem| {
        let _ = std::fs::remove_file(&own.key); // a key alone would be half of a pair that nobody has seen
        failed(problem.to_string())
    })?;
    Ok(own)
}

/// The SHA-256 of a certificate, by which a client recognises it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate.
    pub fn of(certificate: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", digits_of(&self.0))
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    /// As it is shown, or as `openssl x509 -fingerprint -sha256` prints it: pairs of digits with colons.
    fn from_str(text: &str) -> Result<Fingerprint, String> {
        let wrong = || {
            format!(
                "{text:?} is no SHA-256 fingerprint: write sha256: and 64 digits (0-9, a-f), as the service prints it"
            )
        };
        let lower = text.trim().to_ascii_lowercase();
        let digits: String = lower.strip_prefix("sha256:").unwrap_or(&lower).replace(':', "");
        bytes_of(&digits).map(Fingerprint).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_certificate_of_its_own_is_made_once_and_its_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let made = make_own(folder.path(), "box").unwrap();
        let fingerprint = made.fingerprint().unwrap();
        assert_eq!(
            make_own(folder.path(), "box").unwrap().fingerprint().unwrap(),
            fingerprint
        );
        made.read().unwrap();
        let mode = std::fs::metadata(&made.key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::set_permissions(&made.key, std::fs::Permissions::from_mode(0o604)).unwrap();
        let refused = make_own(folder.path(), "box").unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
    }

    #[test]
    fn no_new_certificate_takes_the_place_of_one_of_which_a_file_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let made = make_own(folder.path(), "box").unwrap();
        let fingerprint = made.fingerprint().unwrap();
        for lost in [&made.certificate, &made.key] {
            let kept = std::fs::read(lost).unwrap();
            std::fs::remove_file(lost).unwrap();
            let refused = make_own(folder.path(), "box").unwrap_err();
            assert!(matches!(refused, CertificatesError::Half { .. }), "{refused}");
            assert!(refused.to_string().contains("fingerprint"), "{refused}");
            write_private(lost, &kept).unwrap();
            let again = make_own(folder.path(), "box").unwrap();
            assert_eq!(again.fingerprint().unwrap(), fingerprint);
        }
        std::fs::remove_file(&made.certificate).unwrap();
        std::fs::remove_file(&made.key).unwrap();
        let new = make_own(folder.path(), "box").unwrap();
        assert_ne!(new.fingerprint().unwrap(), fingerprint);
    }

    #[test]
    fn a_key_that_others_may_read_is_refused_whoever_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let given = make_own(folder.path(), "").unwrap();
        std::fs::set_permissions(&given.key, std::fs::Permissions::from_mode(0o604)).unwrap();
        let refused = given.read().unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
    }

    #[test]
    fn files_that_do_not_go_together_are_refused() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let good = make_own(one.path(), "").unwrap();
        let mixed = Certificates {
            key: make_own(other.path(), "").unwrap().key,
            ..good.clone()
        };
        assert!(matches!(mixed.read(), Err(CertificatesError::Pair { .. })));
        let swapped = Certificates {
            certificate: good.key.clone(),
            ..good.clone()
        };
        let told = swapped.read().unwrap_err().to_string();
        assert!(told.contains(NO_CERTIFICATE), "{told}");
        let of_clients = Certificates {
            client_authorities: Some(good.certificate.clone()),
            ..good
        };
        of_clients.read().unwrap();
    }

    #[test]
    fn a_fingerprint_is_read_as_it_is_shown_and_as_openssl_prints_it() {
        let of = Fingerprint::of(b"certificate");
        let shown = of.to_string();
        assert_eq!(shown.parse(), Ok(of));
        let digits = shown.trim_start_matches("sha256:").to_uppercase();
        let pairs: Vec<String> = digits
            .as_bytes()
            .chunks(2)
            .map(|two| String::from_utf8_lossy(two).into())
            .collect();
        assert_eq!(pairs.join(":").parse(), Ok(of));
        for wrong in ["", "sha256:", "ab", &digits[1..], &format!("{digits}0"), "é"] {
            assert!(wrong.parse::<Fingerprint>().is_err(), "{wrong}");
        }
    }
}
