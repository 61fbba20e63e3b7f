//! Bounds on the open resources of clients: connections, calls, bytes that arrive and bytes that are not read. They hold for any
//! behaviour of a client, such as requests that it never finishes and answers that it never reads.

mod accept;
mod calls_layer;
mod entrance;
mod line;
mod sent;
mod uploads;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use calls::Budget;
use config::LimitSettings;
use tokio::net::TcpListener;

pub use accept::Tls;
use accept::{Terms, accepted};
pub(crate) use calls_layer::{Limited, client_of};
use entrance::Entrance;
use sent::Readers;

use crate::access::Gate;

/// The bounds of one service.
pub(crate) struct Limits {
    entrance: Arc<Entrance>,
    handshake: Duration,
    /// Whether a new connection must make a call with a token in time.
    gate: Gate,
    calls: Arc<Budget>,
    /// Calls that need no token and have none.
    public_calls: Arc<Budget>,
    /// Public calls whose answers have no end of their own.
    endless_public_calls: Arc<Budget>,
    /// Calls to look at jobs and cards, or to cancel, beyond `calls`.
    spare_calls: Arc<Budget>,
    uploads: Arc<Budget>,
    upload_idle: Duration,
    /// Bytes of the longest message that any method takes whole.
    longest_message: u64,
    readers: Readers,
    /// Readers of answers to calls without the token.
    public_readers: Readers,
}

/// Most of the spare calls at a time, of all clients and of one.
const SPARE_CALLS: u64 = 64;
const SPARE_CALLS_PER_CLIENT: u64 = SPARE_CALLS / 4;
/// Most calls without the token at a time, of all clients and of one: health probes, and tools that list the services.
const PUBLIC_CALLS: u64 = 32;
const PUBLIC_CALLS_PER_CLIENT: u64 = 8;
/// Most of these calls without an end of their own: half, so that the other half is free again soon even if one client
/// has all of these.
const ENDLESS_PUBLIC_CALLS: u64 = PUBLIC_CALLS / 2;
const ENDLESS_PUBLIC_CALLS_PER_CLIENT: u64 = PUBLIC_CALLS_PER_CLIENT / 2;
/// How long the request of a call without the token may take as a whole, and its answer may stay unread.
const PUBLIC_CALL: Duration = Duration::from_secs(30);
/// Most newcomers, as a part of all connections: half. Two hundred clients that come at once each find a place.
const NEWCOMERS_PART: u64 = 2;

impl Limits {
    pub(crate) fn new(
        settings: &LimitSettings,
        gate: Gate,
        uploads: Arc<Budget>,
        longest_message: u64,
    ) -> Arc<Limits> {
        let connections = Budget::with_places_kept(settings.connections, settings.connections_per_client);
        let newcomers = usize::try_from(settings.connections / NEWCOMERS_PART).unwrap_or(usize::MAX);
        Arc::new(Limits {
            entrance: Entrance::new(connections, newcomers),
            handshake: settings.handshake,
            gate,
            calls: Budget::with_places_kept(settings.calls, settings.calls_per_client),
            public_calls: Budget::with_places_kept(PUBLIC_CALLS, PUBLIC_CALLS_PER_CLIENT),
            endless_public_calls: Budget::with_places_kept(
                ENDLESS_PUBLIC_CALLS,
                ENDLESS_PUBLIC_CALLS_PER_CLIENT,
            ),
            spare_calls: Budget::with_places_kept(SPARE_CALLS, SPARE_CALLS_PER_CLIENT),
            uploads,
            upload_idle: settings.upload_idle,
            longest_message,
            readers: Readers::new(settings.unread),
            public_readers: Readers::new(settings.unread.min(PUBLIC_CALL)),
        })
    }

    /// The connections of a listener, in TLS where there are certificates for it.
    pub(super) fn accept(&self, listener: TcpListener, tls: Option<Tls>) -> accept::Connections {
        let terms = Terms {
            handshake: self.handshake,
            gate: self.gate.clone(),
            tls,
        };
        accepted(listener, self.entrance.clone(), terms)
    }
}

/// A panic while it is locked leaves the value valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
