//! Bounds on what one client, and all of them, may have of the service at a time.

use std::sync::Arc;

use config::LimitSettings;

use crate::budget::Budget;
use crate::claims::Claims;

/// What is taken of the bounds; the last eighth of each is for clients that have none. Cheap to clone.
#[derive(Clone)]
pub struct Bounds {
    /// Bytes of requests under way. The doors count the requests that arrive.
    pub(crate) uploads: Arc<Budget>,
    /// Bytes of results that are encoded and not read; sound of sessions, which is made and not read either.
    pub(crate) results: Arc<Budget>,
    /// Bytes of media; pictures that are decoded for requests, which are a client's too, and wait for its jobs.
    pub(crate) media: Arc<Budget>,
    pub(crate) holds: Arc<Claims>,
    pub(crate) reservations: Arc<Claims>,
}

impl Bounds {
    /// Nothing is taken yet.
    pub fn new(settings: &LimitSettings) -> Bounds {
        Bounds {
            uploads: Budget::with_places_kept(settings.uploads.0, settings.uploads_per_client.0),
            results: Budget::with_places_kept(settings.results.0, settings.results_per_client.0),
            media: Budget::with_places_kept(settings.media.0, settings.media_per_client.0),
            holds: Arc::new(Claims::new("holds", settings.holds_per_client)),
            reservations: Arc::new(Claims::new("reservations", settings.reservations_per_client)),
        }
    }
}
