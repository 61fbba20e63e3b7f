//! Errors of the connection between a client and the service: TLS, a proxy, or a server of another kind. They are
//! detected by the types of an error and its sources, never by its text.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use h2::Reason;
use rustls::{AlertDescription, CertificateError, InvalidMessage};
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::header::CONTENT_TYPE;
use tonic::codegen::http::{Request, Response, StatusCode};
use tonic::transport::Channel;

use crate::exit::Exit;
use crate::pinned::OtherCertificate;

/// Prefix of the content type of every gRPC answer.
const GRPC: &str = "application/grpc";

/// An answer over HTTP that is none of the service's.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {0}")]
struct Foreign(StatusCode);

/// A channel whose foreign answers are errors. gRPC would take a proxy's page for a message, and report only that the message
/// cannot be decoded.
#[derive(Clone)]
pub(super) struct Answers(Channel);

impl Answers {
    pub(super) fn of(channel: Channel) -> Answers {
        Answers(channel)
    }
}

impl Service<Request<Body>> for Answers {
    type Response = Response<Body>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let content = answer.headers().get(CONTENT_TYPE);
            let is_grpc = content.is_some_and(|content| content.as_bytes().starts_with(GRPC.as_bytes()));
            match is_grpc && answer.status() == StatusCode::OK {
                true => Ok(answer),
                false => Err(Foreign(answer.status()).into()),
            }
        })
    }
}

/// Why no answer of the service itself arrives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    /// The certificate is not trusted, or belongs to another name.
    #[error(
        "the certificate of {endpoint} is not trusted: {problem}\n  client.ca_file or MOORED_CA_FILE names the PEM file of its \
         authority, --fingerprint the SHA-256 of a certificate that the service has made itself (`moored token use` keeps it); the \
         address has to name the machine as its certificate does"
    )]
    Certificate { endpoint: String, problem: String },
    /// The certificate is another one than that which is pinned.
    #[error(
        "the certificate of {endpoint} is not the expected one: {other}\n  if the service got a new certificate, ask who runs it for the \
         new fingerprint; else something in between answers in its place"
    )]
    OtherCertificate {
        endpoint: String,
        other: OtherCertificate,
    },
    /// There is no TLS.
    #[error(
        "{endpoint} answers without TLS\n  write http:// instead of https://, or the address of the proxy that has the certificate"
    )]
    NoTls { endpoint: String },
    /// The server speaks HTTP/1.
    #[error(
        "{endpoint} does not speak HTTP/2, which moored needs\n  is this the service's address? A proxy in front of it has to take \
         HTTP/2 (nginx: `http2` in `listen`)"
    )]
    NotHttp2 { endpoint: String },
    /// A call was ended from the other side, but not by the service.
    #[error(
        "the call was cut between here and the service at {endpoint} (HTTP/2: {reason:?})\n  a proxy in between may have a time limit (nginx: \
         grpc_read_timeout), or the service behind it has ended; `moored status` shows whether it still runs"
    )]
    Cut { endpoint: String, reason: Reason },
    /// A proxy or a web server answered.
    #[error("{endpoint} answers HTTP {}: {}", .status.as_u16(), advice(*.status))]
    Foreign { endpoint: String, status: StatusCode },
}

/// The meaning of a proxy's answer, and a remedy.
fn advice(status: StatusCode) -> &'static str {
    match status {
        StatusCode::PAYLOAD_TOO_LARGE => {
            "a proxy in front of the service does not take a request as large as this\n  raise its limit (nginx: \
             `client_max_body_size 0;`)"
        }
        StatusCode::BAD_GATEWAY => {
            "a proxy does not reach the service behind it\n  see whether the service runs there, and whether the proxy speaks \
             HTTP/2 to it (nginx: `grpc_pass`)"
        }
        StatusCode::GATEWAY_TIMEOUT => {
            "the service did not answer a proxy in time\n  see whether the service still runs, and raise the proxy's time limit \
             (nginx: `grpc_read_timeout`)"
        }
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
            "a proxy in front of the service takes no more calls now\n  try again in a while"
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            "a proxy in front of the service does not let this client in\n  it has rules of its own, beside the service's token: \
             ask who runs it"
        }
        _ => {
            "a web server, not moored\n  is this the service's address? A proxy in front of it has to hand gRPC on (nginx: \
             `grpc_pass`)"
        }
    }
}

impl WireError {
    /// The failure of the connection to this endpoint, by an error; `None`: the error is of another kind.
    pub(super) fn of(error: &(dyn Error + 'static), endpoint: &str) -> Option<WireError> {
        let endpoint = || endpoint.to_owned();
        let mut source = Some(error);
        while let Some(error) = source {
            if let Some(Foreign(status)) = error.downcast_ref() {
                let (endpoint, status) = (endpoint(), *status);
                return Some(WireError::Foreign { endpoint, status });
            }
            if let Some(found) = rustls_error(error).and_then(|tls| WireError::of_tls(tls, endpoint())) {
                return Some(found);
            }
            if let Some(found) = error
                .downcast_ref()
                .and_then(|h2| WireError::of_h2(h2, endpoint()))
            {
                return Some(found);
            }
            source = error.source();
        }
        None
    }

    fn of_tls(error: &rustls::Error, endpoint: String) -> Option<WireError> {
        Some(match error {
            rustls::Error::InvalidCertificate(CertificateError::Other(other))
                if other.0.is::<OtherCertificate>() =>
            {
                let other = *other.0.downcast_ref()?;
                WireError::OtherCertificate { endpoint, other }
            }
            rustls::Error::InvalidCertificate(problem) => WireError::Certificate {
                endpoint,
                problem: match problem {
                    CertificateError::UnknownIssuer => "no trusted authority has signed it".to_owned(),
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                        "it is of another name".to_owned()
                    }
                    CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                        "it has expired".to_owned()
                    }
                    other => other.to_string(),
                },
            },
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
                WireError::NoTls { endpoint }
            }
            rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
                WireError::NotHttp2 { endpoint }
            }
            _ => return None,
        })
    }

    fn of_h2(error: &h2::Error, endpoint: String) -> Option<WireError> {
        let reason = error.reason()?;
        // The received bytes cannot be HTTP/2 frames.
        let is_unreadable = matches!(reason, Reason::FRAME_SIZE_ERROR | Reason::PROTOCOL_ERROR);
        if error.is_library() && is_unreadable {
            return Some(WireError::NotHttp2 { endpoint });
        }
        (error.is_reset() && error.is_remote()).then_some(WireError::Cut { endpoint, reason })
    }

    /// The name of the reason in JSON.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            WireError::Certificate { .. } | WireError::OtherCertificate { .. } | WireError::NoTls { .. } => {
                "TLS"
            }
            WireError::NotHttp2 { .. } => "NOT_HTTP2",
            WireError::Cut { .. } => "CONNECTION_LOST",
            WireError::Foreign { .. } => "PROXY",
        }
    }

    pub(super) fn exit(&self) -> Exit {
        match self {
            WireError::Foreign { status, .. } => match *status {
                StatusCode::PAYLOAD_TOO_LARGE => Exit::WrongRequest,
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Exit::Token,
                StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Exit::TryAgain,
                _ => Exit::NoService,
            },
            WireError::Certificate { .. }
            | WireError::OtherCertificate { .. }
            | WireError::NoTls { .. }
            | WireError::NotHttp2 { .. }
            | WireError::Cut { .. } => Exit::NoService,
        }
    }
}

/// The TLS error in an error; it is wrapped in an IO error.
fn rustls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let inside = error.downcast_ref().and_then(std::io::Error::get_ref);
    inside
        .and_then(|inside| inside.downcast_ref())
        .or_else(|| error.downcast_ref())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use h2::server::SendResponse;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::CliError;
    use crate::connection::Connection;
    use api::v1;
    use config::ClientSettings;

    /// A server that does this with its one connection.
    async fn server<F: Future<Output = ()> + Send>(
        answer: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            answer(stream).await;
        });
        address
    }

    /// A server of HTTP/2 that does this with its one call.
    async fn http2(answer: impl FnOnce(&mut SendResponse<bytes::Bytes>) + Send + 'static) -> SocketAddr {
        server(async move |stream| {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
            answer(&mut respond);
            while connection.accept().await.is_some() {}
        })
        .await
    }

    /// The error of a command there.
    async fn error_of(url: String) -> CliError {
        let client = ClientSettings {
            endpoint: url,
            token: None,
            token_file: None,
            ca_file: None,
            fingerprint: None,
            certificate: None,
            credentials: None,
            insecure_token: false,
            at_box: None,
            name: "ann".to_owned(),
        };
        let call = async {
            let mut changes = Connection::open(&client)
                .await?
                .residency()
                .watch_status(v1::WatchStatusRequest::default())
                .await?
                .into_inner();
            Ok::<_, CliError>(changes.message().await?)
        };
        call.await.unwrap_err()
    }

    fn answer(status: u16, content: &str) -> Response<()> {
        let answer = Response::builder().status(status).header(CONTENT_TYPE, content);
        answer.body(()).unwrap()
    }

    #[tokio::test]
    async fn a_proxys_answer_is_explained() {
        for (status, words, code) in [
            (413, "client_max_body_size", Exit::WrongRequest),
            (502, "see whether the service runs", Exit::NoService),
            (504, "grpc_read_timeout", Exit::NoService),
            (503, "try again in a while", Exit::TryAgain),
            (403, "rules of its own", Exit::Token),
            (200, "is this the service's address", Exit::NoService),
        ] {
            let address = http2(move |respond| {
                let mut page = respond.send_response(answer(status, "text/html"), false).unwrap();
                page.send_data("<html>no</html>".into(), true).unwrap();
            });
            let error = error_of(format!("http://{}", address.await)).await;
            assert!(error.to_string().contains(&format!("HTTP {status}: ")), "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(Exit::of(&error), code, "{status}");
        }
    }

    #[tokio::test]
    async fn a_stream_reset_by_a_proxy_is_explained() {
        let address = http2(|respond| {
            let mut events = respond
                .send_response(answer(200, "application/grpc"), false)
                .unwrap();
            events.send_reset(Reason::INTERNAL_ERROR);
        });
        let error = error_of(format!("http://{}", address.await)).await;
        assert!(error.to_string().contains("grpc_read_timeout"), "{error}");
        assert_eq!(Exit::of(&error), Exit::NoService);
    }

    #[tokio::test]
    async fn an_http_1_server_is_detected() {
        let address = server(async |mut stream| {
            let mut preface = [0; 24];
            stream.read_exact(&mut preface).await.unwrap();
            let page = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(page.as_bytes()).await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await; // until the client has gone
        });
        let error = error_of(format!("http://{}", address.await)).await;
        assert!(error.to_string().contains("does not speak HTTP/2"), "{error}");
    }

    #[tokio::test]
    async fn a_server_without_tls_is_detected() {
        let address = server(async |mut stream| {
            let page = "HTTP/1.1 400 Bad Request\r\n\r\n";
            stream.write_all(page.as_bytes()).await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await; // until the client has gone
        });
        let error = error_of(format!("https://{}", address.await)).await;
        assert!(error.to_string().contains("answers without TLS"), "{error}");
    }
}
