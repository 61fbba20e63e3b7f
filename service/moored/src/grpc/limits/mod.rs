//! Bounds on what clients have open: connections, calls, bytes that arrive and bytes that are not read. They hold whatever a
//! client sends, leaves unfinished or does not read.

mod accept;
mod budget;
mod calls;
mod claims;
mod entrance;
mod methods;
mod sent;
mod uploads;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

use accept::{Handshake, accepted};
pub(crate) use budget::{Budget, Client, Exceeded, Taken, client_at};
pub(super) use calls::Limited;
use claims::Claims;
use entrance::Entrance;
pub(super) use methods::SESSION_MESSAGE_BYTES;
use sent::Readers;
pub(super) use uploads::too_long_message;

use super::auth::Token;
use super::encodings::Encodings;
use super::media::MediaStore;
use crate::config;

/// The bounds of one service.
pub(crate) struct Limits {
    entrance: Arc<Entrance>,
    handshake: Duration,
    /// Whose calls count.
    token: Token,
    calls: Arc<Budget>,
    /// Calls that need no token and have none.
    public_calls: Arc<Budget>,
    /// Of them, those that last as long as their clients like.
    endless_public_calls: Arc<Budget>,
    /// Calls to look at jobs and cards, or to cancel, beyond `calls`.
    spare_calls: Arc<Budget>,
    uploads: Arc<Budget>,
    upload_idle: Duration,
    /// Bytes of results that are encoded and not read.
    results: Arc<Budget>,
    /// Media that clients upload for later requests.
    media: Arc<Budget>,
    readers: Readers,
    /// Of answers to calls without the token.
    public_readers: Readers,
    pub(super) holds: Claims,
    pub(super) reservations: Claims,
}

/// Most of the spare calls at a time.
const SPARE_CALLS: u64 = 64;
/// Most calls without the token at a time, of all clients and of one: probes of health, and tools that ask what there is.
const PUBLIC_CALLS: u64 = 32;
const PUBLIC_CALLS_PER_CLIENT: u64 = 8;
/// Of them, those that last as long as their clients like: half, so that the rest is free again soon, whoever has all of these.
const ENDLESS_PUBLIC_CALLS: u64 = PUBLIC_CALLS / 2;
const ENDLESS_PUBLIC_CALLS_PER_CLIENT: u64 = PUBLIC_CALLS_PER_CLIENT / 2;
/// How long the request of a call without the token may take as a whole, and its answer may stay unread.
const PUBLIC_CALL: Duration = Duration::from_secs(30);
/// Connections that have made no call yet are so many of those that have: a quarter.
const NEWCOMERS_PART: u64 = 4;

impl Limits {
    pub(crate) fn new(settings: &config::LimitSettings, token: Token) -> Arc<Limits> {
        let connections = Budget::with_places_kept(settings.connections, settings.connections_per_client);
        let newcomers = usize::try_from(settings.connections / NEWCOMERS_PART).unwrap_or(usize::MAX);
        Arc::new(Limits {
            entrance: Entrance::new(connections, newcomers),
            handshake: settings.handshake,
            token,
            calls: Budget::with_places_kept(settings.calls, settings.calls_per_client),
            public_calls: Budget::with_places_kept(PUBLIC_CALLS, PUBLIC_CALLS_PER_CLIENT),
            endless_public_calls: Budget::with_places_kept(
                ENDLESS_PUBLIC_CALLS,
                ENDLESS_PUBLIC_CALLS_PER_CLIENT,
            ),
            spare_calls: Budget::new(SPARE_CALLS, SPARE_CALLS),
            uploads: Budget::new(settings.uploads.0, settings.uploads_per_client.0),
            upload_idle: settings.upload_idle,
            results: Budget::new(settings.results.0, settings.results_per_client.0),
            media: Budget::new(settings.media.0, settings.media_per_client.0),
            readers: Readers::new(settings.unread),
            public_readers: Readers::new(settings.unread.min(PUBLIC_CALL)),
            holds: Claims::new("holds", settings.holds_per_client),
            reservations: Claims::new("reservations", settings.reservations_per_client),
        })
    }

    /// Encoded results, within these bounds.
    pub(crate) fn encodings(&self) -> Arc<Encodings> {
        Arc::new(Encodings::new(self.results.clone()))
    }

    /// A store of media within these bounds, which expire when they are not used for `ttl`.
    pub(crate) fn media(&self, ttl: Duration) -> Arc<MediaStore> {
        MediaStore::new(self.media.clone(), ttl)
    }

    /// The bound on pictures that are decoded for requests, which is that on media: both are a client's, and wait for its jobs.
    pub(super) fn picture_bytes(&self) -> Arc<Budget> {
        self.media.clone()
    }

    /// The bound on messages of sessions that are not looked at yet, which is that on requests under way.
    pub(super) fn message_bytes(&self) -> Arc<Budget> {
        self.uploads.clone()
    }

    /// The bound on sound of sessions, which is that on results: both are made and not read.
    pub(super) fn sound_bytes(&self) -> Arc<Budget> {
        self.results.clone()
    }

    /// The connections of a listener.
    pub(super) fn accept(&self, listener: TcpListener) -> accept::Connections {
        let handshake = Handshake {
            limit: self.handshake,
            needs_call: self.token.is_set(),
        };
        accepted(listener, self.entrance.clone(), handshake)
    }
}
