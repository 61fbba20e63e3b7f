//! Connections: a bound on their number, and a timeout of their handshake.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::budget::{Budget, Taken};

/// Pause before the next attempt when the system has no descriptor or memory for a connection.
const PAUSE: Duration = Duration::from_millis(250);
/// Least time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes that an HTTP/2 client sends first: the preface, and the head of its SETTINGS frame.
const HANDSHAKE_BYTES: usize = 24 + 9;

pub(in crate::grpc) type Connections = Pin<Box<dyn Stream<Item = io::Result<LimitedConnection>> + Send>>;

/// The connections of a listener; the stream never ends.
pub(in crate::grpc) fn accepted(
    listener: TcpListener,
    bound: Arc<Budget>,
    handshake: Duration,
) -> Connections {
    Box::pin(async_stream::stream! {
        let (mut full, mut out) = (LogInterval::default(), LogInterval::default());
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(problem) if is_of_one_connection(&problem) => continue,
                Err(problem) => {
                    if out.allow() {
                        tracing::error!(%problem, "no connection can be accepted; clients wait until that is over (`ulimit -n` bounds open files)");
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            match bound.take(Some(address.ip()), 1) {
                Ok(taken) => yield Ok(LimitedConnection::new(stream, address, handshake, taken)),
                Err(_) => if full.allow() {
                    tracing::warn!(client = %address.ip(), "a connection was closed: there are as many as limits.connections allows");
                }
            }
        }
    })
}

/// Whether an error of `accept` concerns that connection alone.
fn is_of_one_connection(problem: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted, TimedOut};
    matches!(
        problem.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted | TimedOut
    )
}

/// Limits how often something is logged: the time of its last line.
#[derive(Default)]
struct LogInterval(Option<Instant>);

impl LogInterval {
    /// Whether a line may be logged now, which starts the next interval.
    fn allow(&mut self) -> bool {
        let is_due = self.0.is_none_or(|last| last.elapsed() >= LOG_INTERVAL);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// A connection that counts against the bound, and is closed when its HTTP/2 handshake takes too long.
#[derive(Debug)]
pub(in crate::grpc) struct LimitedConnection<S = TcpStream> {
    stream: S,
    info: TcpConnectInfo,
    /// Deadline of the handshake; `None` once it has come.
    deadline: Option<Pin<Box<Sleep>>>,
    missing: usize,
    _taken: Taken,
}

impl LimitedConnection {
    fn new(stream: TcpStream, address: SocketAddr, handshake: Duration, taken: Taken) -> LimitedConnection {
        // Without it every small answer waits 40 ms for an acknowledgement. An error means that the connection is closed.
        let _ = stream.set_nodelay(true);
        let info = TcpConnectInfo {
            local_addr: stream.local_addr().ok(),
            remote_addr: Some(address),
        };
        LimitedConnection::over(stream, info, handshake, taken)
    }
}

impl<S> LimitedConnection<S> {
    fn over(stream: S, info: TcpConnectInfo, handshake: Duration, taken: Taken) -> LimitedConnection<S> {
        LimitedConnection {
            stream,
            info,
            deadline: Some(Box::pin(tokio::time::sleep(handshake))),
            missing: HANDSHAKE_BYTES,
            _taken: taken,
        }
    }
}

impl<S> Connected for LimitedConnection<S> {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.info.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let Some(deadline) = &mut self.deadline else {
            return read;
        };
        if read.is_pending() {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the client sent no HTTP/2 preface");
            return deadline.as_mut().poll(context).map(|()| Err(late()));
        }
        self.missing = self.missing.saturating_sub(buffer.filled().len() - before);
        if self.missing == 0 {
            self.deadline = None;
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn connection(
        bound: &Arc<Budget>,
    ) -> (
        tokio::io::DuplexStream,
        LimitedConnection<tokio::io::DuplexStream>,
    ) {
        let (client, server) = tokio::io::duplex(1024);
        let info = TcpConnectInfo {
            local_addr: None,
            remote_addr: None,
        };
        let taken = bound.take(None, 1).unwrap();
        (client, LimitedConnection::over(server, info, LIMIT, taken))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_complete_preface_is_closed() {
        let bound = Budget::new(9, 9);
        for said in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
            let (mut client, mut server) = connection(&bound);
            client.write_all(said).await.unwrap();
            let began = Instant::now();
            let mut read = Vec::new();
            let end = server.read_to_end(&mut read).await.unwrap_err();
            assert_eq!((end.kind(), read), (io::ErrorKind::TimedOut, said.to_vec()));
            assert_eq!(began.elapsed(), LIMIT);
        }
        assert_eq!(bound.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_be_idle_after_its_handshake() {
        let bound = Budget::new(9, 9);
        let (mut client, mut server) = connection(&bound);
        client.write_all(&[7; HANDSHAKE_BYTES]).await.unwrap();
        let mut said = [0; HANDSHAKE_BYTES];
        server.read_exact(&mut said).await.unwrap();
        let more = tokio::time::timeout(LIMIT * 1000, server.read_u8()).await;
        assert!(more.is_err(), "{more:?}");
    }

    #[tokio::test]
    async fn connections_beyond_the_bound_are_closed_and_later_ones_are_taken() {
        use futures::StreamExt as _;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let bound = Budget::new(1, 1);
        let mut connections = accepted(listener, bound.clone(), LIMIT);
        let _first_client = TcpStream::connect(address).await.unwrap();
        let first = connections.next().await.unwrap().unwrap();
        let mut second_client = TcpStream::connect(address).await.unwrap();
        let mut nothing = [0];
        let closed = tokio::select! {
            _ = connections.next() => panic!("a second one was taken"),
            read = second_client.read(&mut nothing) => read,
        };
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
        drop(first);
        let _third_client = TcpStream::connect(address).await.unwrap();
        assert!(connections.next().await.unwrap().is_ok());
    }
}
