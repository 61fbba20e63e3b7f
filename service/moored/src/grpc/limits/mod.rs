//! Bounds on what clients have open: connections, calls, bytes that arrive and bytes that are not read. They hold whatever a
//! client sends, leaves unfinished or does not read.

mod accept;
mod budget;
mod calls;
mod claims;
mod sent;
mod uploads;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

pub(super) use accept::accepted;
pub(crate) use budget::{Budget, Client, Exceeded, Taken};
pub(super) use calls::Limited;
use claims::Claims;
use sent::Readers;

use super::encodings::Encodings;
use super::media::MediaStore;
use crate::config;

/// The bounds of one service.
pub(crate) struct Limits {
    connections: Arc<Budget>,
    handshake: Duration,
    calls: Arc<Budget>,
    /// Calls to look at jobs and cards, or to cancel, beyond `calls`.
    spare_calls: Arc<Budget>,
    uploads: Arc<Budget>,
    upload_idle: Duration,
    /// Bytes of results that are encoded and not read.
    results: Arc<Budget>,
    /// Media that clients upload for later requests.
    media: Arc<Budget>,
    readers: Readers,
    pub(super) holds: Claims,
    pub(super) reservations: Claims,
}

/// Most of the spare calls at a time.
const SPARE_CALLS: u64 = 64;

impl Limits {
    pub(crate) fn new(settings: &config::LimitSettings) -> Arc<Limits> {
        Arc::new(Limits {
            connections: Budget::new(settings.connections, settings.connections),
            handshake: settings.handshake,
            calls: Budget::new(settings.calls, settings.calls_per_client),
            spare_calls: Budget::new(SPARE_CALLS, SPARE_CALLS),
            uploads: Budget::new(settings.uploads.0, settings.uploads_per_client.0),
            upload_idle: settings.upload_idle,
            results: Budget::new(settings.results.0, settings.results_per_client.0),
            media: Budget::new(settings.media.0, settings.media_per_client.0),
            readers: Readers::new(settings.unread),
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

    /// The bound on sound of sessions, which is that on results: both are made and not read.
    pub(super) fn sound_bytes(&self) -> Arc<Budget> {
        self.results.clone()
    }

    /// The connections of a listener.
    pub(super) fn accept(&self, listener: TcpListener) -> accept::Connections {
        accepted(listener, self.connections.clone(), self.handshake)
    }
}
