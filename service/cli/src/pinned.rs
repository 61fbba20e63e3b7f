//! Connections to a service whose certificate is known by its fingerprint. No authority and no name is asked for: the certificate is the
//! one, or it is not.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use access::Fingerprint;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, OtherError, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

const HTTPS_PORT: u16 = 443;

/// The certificate is another one than that which is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its fingerprint is {found}, and {pinned} is expected")]
pub(crate) struct OtherCertificate {
    pub(crate) found: Fingerprint,
    pub(crate) pinned: Fingerprint,
}

/// Compares the certificate of a server with a fingerprint. The signatures of the handshake are verified as usual: they show that the server
/// has the key.
#[derive(Debug)]
struct Expected {
    pinned: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Expected {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _between: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (found, pinned) = (Fingerprint::of(certificate), self.pinned);
        match found == pinned {
            true => Ok(ServerCertVerified::assertion()),
            false => {
                Err(CertificateError::Other(OtherError(Arc::new(OtherCertificate { found, pinned }))).into())
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Dials in TLS.
#[derive(Clone)]
pub(crate) struct PinnedConnector(TlsConnector);

impl PinnedConnector {
    /// One that takes this certificate alone, and shows one of its own (certificate and key in PEM) where the server asks for it.
    pub(crate) fn new(pinned: Fingerprint, own: Option<(&[u8], &[u8])>) -> Result<PinnedConnector, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|problem| problem.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Expected { pinned, provider }));
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let (chain, key) = (
                    access::certificates_in_pem(certificate)?,
                    access::key_in_pem(key)?,
                );
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|problem| problem.to_string())?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(PinnedConnector(TlsConnector::from(Arc::new(config))))
    }
}

impl Service<Uri> for PinnedConnector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, io::Error>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let stream = TcpStream::connect((host.as_str(), uri.port_u16().unwrap_or(HTTPS_PORT))).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            Ok(TokioIo::new(connector.connect(name, stream).await?))
        })
    }
}
