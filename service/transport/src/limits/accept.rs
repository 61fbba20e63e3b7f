//! Connections: a bound on their number, and a timeout of their handshake.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use calls::{LogInterval, Who, client_at};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tokio_rustls::rustls::ServerConfig;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::entrance::{Entrance, Place};
use super::line::Line;
use crate::access::Gate;

/// Pause before the next attempt when the system has no descriptor or memory for a connection.
const PAUSE: Duration = Duration::from_millis(250);
/// Least time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes that an HTTP/2 client sends first: the preface, and the head of its SETTINGS frame.
const HANDSHAKE_BYTES: usize = 24 + 9;

pub(crate) type Connections = Pin<Box<dyn Stream<Item = io::Result<LimitedConnection>> + Send>>;

/// The handshake that a new connection must complete in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handshake {
    pub(super) limit: Duration,
    /// Whether the handshake includes a call with the token, not only the beginning of HTTP/2.
    pub(super) needs_call: bool,
}

/// The certificates of new connections, as they are now; without them connections are not encrypted.
pub type Tls = watch::Receiver<Arc<ServerConfig>>;

/// What is asked of new connections. It may change at any time, and holds for those that come later.
pub(super) struct Terms {
    pub(super) handshake: Duration,
    pub(super) gate: Gate,
    pub(super) tls: Option<Tls>,
}

impl Terms {
    fn handshake(&self) -> Handshake {
        Handshake {
            limit: self.handshake,
            needs_call: self.gate.needs_token(),
        }
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.tls.as_ref().map(|tls| tls.borrow().clone())
    }
}

/// The connections of a listener; the stream never ends.
pub(super) fn accepted(listener: TcpListener, entrance: Arc<Entrance>, terms: Terms) -> Connections {
    Box::pin(async_stream::stream! {
        let (mut full, mut out) = (LogInterval::default(), LogInterval::default());
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(problem) if is_of_one_connection(&problem) => continue,
                Err(problem) => {
                    if out.allow(LOG_INTERVAL) {
                        tracing::error!(%problem, "no connection can be accepted; clients wait until that is over (`ulimit -n` bounds open files)");
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let (place, left) = entrance.enter(client_at(address));
            if let Some(Some(Who::Address(client))) = left && full.allow(LOG_INTERVAL) {
                tracing::warn!(%client, "a connection without a call was closed to make room for a new one: half as many as limits.connections are kept");
            }
            yield Ok(LimitedConnection::new(stream, address, &terms, place));
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

/// A connection with a place. It is closed if its handshake takes too long or another connection gets its place.
pub(crate) struct LimitedConnection<S = Line> {
    stream: S,
    info: ConnectionInfo,
    handshake: Handshake,
    /// Deadline of the handshake; `None` once the handshake is complete.
    deadline: Option<Pin<Box<Sleep>>>,
    missing: usize,
}

/// Data of a connection for its calls.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionInfo {
    pub(super) tcp: TcpConnectInfo,
    pub(super) place: Arc<Place>,
}

impl LimitedConnection {
    fn new(stream: TcpStream, address: SocketAddr, terms: &Terms, place: Arc<Place>) -> LimitedConnection {
        // Without it every small answer waits 40 ms for an acknowledgement. An error means that the connection is closed.
        let _ = stream.set_nodelay(true);
        let tcp = TcpConnectInfo {
            local_addr: stream.local_addr().ok(),
            remote_addr: Some(address),
        };
        let line = Line::over(stream, terms.tls());
        LimitedConnection::over(line, ConnectionInfo { tcp, place }, terms.handshake())
    }
}

impl<S> LimitedConnection<S> {
    fn over(stream: S, info: ConnectionInfo, handshake: Handshake) -> LimitedConnection<S> {
        LimitedConnection {
            stream,
            info,
            handshake,
            deadline: Some(Box::pin(tokio::time::sleep(handshake.limit))),
            missing: HANDSHAKE_BYTES,
        }
    }

    /// Why the connection must end now, if it must.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        if self.info.place.poll_closed(context.waker()) {
            let problem = "another connection has its place: it made no call that counts";
            return Poll::Ready(io::Error::new(io::ErrorKind::ConnectionAborted, problem));
        }
        let (needs_call, is_known) = (self.handshake.needs_call, self.info.place.is_known());
        if self.missing == 0 && (is_known || !needs_call) {
            self.deadline = None;
        }
        let Some(deadline) = &mut self.deadline else {
            return Poll::Pending;
        };
        while deadline.as_mut().poll(context).is_ready() {
            if self.missing > 0 || !self.info.place.is_in_use() {
                let problem = match self.missing {
                    0 => "the client made no call with the token",
                    _ => "the client sent no HTTP/2 preface",
                };
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, problem));
            }
            deadline.as_mut().reset(Instant::now() + self.handshake.limit);
        }
        Poll::Pending
    }
}

impl<S> Connected for LimitedConnection<S> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        self.info.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Checked even while the client keeps sending, as frames alone are no calls.
        if let Poll::Ready(end) = self.poll_end(context) {
            return Poll::Ready(Err(end));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.missing = self.missing.saturating_sub(buffer.filled().len() - before);
        read
    }
}

/// The end is checked on writes too: a client that does not read causes no reads.
impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(end) = self.poll_end(context) {
            return Poll::Ready(Err(end));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(end) = self.poll_end(context) {
            return Poll::Ready(Err(end));
        }
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

    use calls::Budget;

    const LIMIT: Duration = Duration::from_secs(10);
    const OPEN: Handshake = Handshake {
        limit: LIMIT,
        needs_call: false,
    };
    const TOKEN: Handshake = Handshake {
        limit: LIMIT,
        needs_call: true,
    };

    /// The terms of a service without tokens and TLS.
    fn open() -> Terms {
        Terms {
            handshake: LIMIT,
            gate: Gate::open(),
            tls: None,
        }
    }

    fn entrance() -> Arc<Entrance> {
        Entrance::new(Budget::new(9, 9), 9)
    }

    fn connection(
        entrance: &Arc<Entrance>,
        handshake: Handshake,
    ) -> (
        tokio::io::DuplexStream,
        LimitedConnection<tokio::io::DuplexStream>,
    ) {
        let (client, server) = tokio::io::duplex(1024);
        let tcp = TcpConnectInfo {
            local_addr: None,
            remote_addr: None,
        };
        let (place, _) = entrance.enter(None);
        let info = ConnectionInfo { tcp, place };
        (client, LimitedConnection::over(server, info, handshake))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_complete_preface_is_closed() {
        let entrance = entrance();
        for said in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
            let (mut client, mut server) = connection(&entrance, OPEN);
            client.write_all(said).await.unwrap();
            let began = Instant::now();
            let mut read = Vec::new();
            let end = server.read_to_end(&mut read).await.unwrap_err();
            assert_eq!((end.kind(), read), (io::ErrorKind::TimedOut, said.to_vec()));
            assert_eq!(began.elapsed(), LIMIT);
        }
        assert_eq!(entrance.newcomers(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_be_idle_after_its_handshake() {
        let entrance = entrance();
        for (handshake, calls) in [(OPEN, false), (TOKEN, true)] {
            let (mut client, mut server) = connection(&entrance, handshake);
            client.write_all(&[7; HANDSHAKE_BYTES]).await.unwrap();
            let mut said = [0; HANDSHAKE_BYTES];
            server.read_exact(&mut said).await.unwrap();
            if calls {
                server.info.place.admit(None).unwrap();
            }
            let more = tokio::time::timeout(LIMIT * 1000, server.read_u8()).await;
            assert!(more.is_err(), "{more:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_call_with_the_token_is_closed_even_if_it_sends() {
        let entrance = entrance();
        let (mut client, mut server) = connection(&entrance, TOKEN);
        let public = server.info.place.public_call();
        let sends = tokio::spawn(async move {
            while client.write_all(&[7; HANDSHAKE_BYTES]).await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let began = Instant::now();
        let mut read = vec![0; 1 << 20];
        let meanwhile = tokio::time::timeout(LIMIT * 3, server.read_exact(&mut read)).await;
        assert!(meanwhile.is_err(), "a call of health is open: {meanwhile:?}");
        drop(public);
        let end = server.read_exact(&mut read).await.unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() <= LIMIT * 4, "{:?}", began.elapsed());
        drop(server);
        sends.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_many_addresses_keep_no_other_waiting() {
        use futures::StreamExt as _;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = accepted(listener, Entrance::new(Budget::new(9, 9), 4), open());
        let from = async |last: u8| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
            socket.connect(address).await.unwrap()
        };
        let began = Instant::now();
        let mut open = Vec::new();
        for last in 2..42 {
            open.push((from(last).await, connections.next().await.unwrap().unwrap()));
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        let (_, newest) = open.last_mut().unwrap();
        newest.info.place.admit(newest.info.place.client()).unwrap();
    }

    #[tokio::test]
    async fn the_oldest_connection_without_a_call_makes_room_for_a_new_one() {
        use futures::StreamExt as _;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let entrance = Entrance::new(Budget::new(1, 1), 1);
        let mut connections = accepted(listener, entrance, open());
        let _clients = [
            TcpStream::connect(address).await.unwrap(),
            TcpStream::connect(address).await.unwrap(),
        ];
        let mut first = connections.next().await.unwrap().unwrap();
        let read = tokio::spawn(async move { first.read_u8().await });
        let second = connections.next().await.unwrap().unwrap();
        let end = read.await.unwrap().unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionAborted);
        second.info.place.admit(second.info.place.client()).unwrap();
        let _third_client = TcpStream::connect(address).await.unwrap();
        let third = connections.next().await.unwrap().unwrap();
        assert!(
            third.info.place.admit(third.info.place.client()).is_err(),
            "the known one stays"
        );
    }
}
