//! The bytes of a connection: plain, or in TLS. The handshake of TLS runs where the connection is first read or written, so that it keeps
//! no other connection waiting and lies within the time limit of its own.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

/// A connection below HTTP/2.
pub(crate) enum Line<S = TcpStream> {
    Plain(S),
    /// The handshake of TLS is not complete.
    Greeting(Box<Accept<S>>),
    Encrypted(Box<TlsStream<S>>),
    /// The handshake of TLS failed: nothing more comes or goes.
    Failed,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Line<S> {
    /// A connection, in TLS where there are certificates for it.
    pub(super) fn over(stream: S, tls: Option<Arc<ServerConfig>>) -> Line<S> {
        match tls {
            None => Line::Plain(stream),
            Some(config) => Line::Greeting(Box::new(TlsAcceptor::from(config).accept(stream))),
        }
    }

    /// Completes the handshake.
    fn poll_greeted(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Line::Greeting(accept) = self {
            // A handshake that has ended, well or not, must not be polled again.
            let greeted = ready!(Pin::new(accept).poll(context));
            let (line, ended) = match greeted {
                Ok(encrypted) => (Line::Encrypted(Box::new(encrypted)), Ok(())),
                Err(problem) => (Line::Failed, Err(problem)),
            };
            *self = line;
            ended?;
        }
        Poll::Ready(Ok(()))
    }
}

/// Does the same with the stream of either kind, once the handshake is complete.
macro_rules! of_either {
    ($self:ident, $context:ident, $stream:ident => $done:expr) => {{
        let line = $self.get_mut();
        ready!(line.poll_greeted($context))?;
        match line {
            Line::Plain(stream) => {
                let $stream = Pin::new(stream);
                $done
            }
            Line::Encrypted(stream) => {
                let $stream = Pin::new(stream.as_mut());
                $done
            }
            // The handshake is complete by now, or has failed.
            Line::Greeting(_) | Line::Failed => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }};
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Line<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        of_either!(self, context, stream => stream.poll_read(context, buffer))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Line<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        of_either!(self, context, stream => stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        of_either!(self, context, stream => stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true // both kinds are
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_either!(self, context, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_either!(self, context, stream => stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn after_a_failed_handshake_a_connection_has_errors_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let tls = access::make_own(folder.path(), "").unwrap().read().unwrap();
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let mut line = Line::over(server, Some(tls));
        client
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        let first = line.read_u8().await.unwrap_err();
        assert_ne!(
            first.kind(),
            io::ErrorKind::NotConnected,
            "why it failed: {first}"
        );
        // hyper still shuts a connection down whose reading has failed.
        assert!(line.shutdown().await.is_err());
        assert!(line.flush().await.is_err());
        assert!(line.write_all(b"more").await.is_err());
        assert!(line.read_u8().await.is_err());
    }
}
