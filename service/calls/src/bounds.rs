//! Bounds on the resources that one client, and all clients together, may use at a time.

use std::sync::Arc;

use config::LimitSettings;

use crate::allowance::Allowances;
use crate::budget::Budget;
use crate::claims::Claims;

/// The bounds, and the amounts in use. The last eighth of each bound is kept for clients that use nothing of it. Cheap to clone.
#[derive(Clone)]
pub struct Bounds {
    /// Bytes of requests that are being received. The protocol layers count the requests themselves.
    pub(crate) uploads: Arc<Budget>,
    /// Bytes of encoded results that clients have not read, and of sound of sessions that clients have not read.
    pub(crate) results: Arc<Budget>,
    /// Bytes of uploaded media, and of pictures that are decoded for requests and wait for their jobs.
    pub(crate) media: Arc<Budget>,
    pub(crate) holds: Arc<Claims>,
    pub(crate) reservations: Arc<Claims>,
    /// What tokens may do in a minute.
    pub(crate) allowances: Arc<Allowances>,
}

impl Bounds {
    /// The bounds of a configuration, with nothing in use.
    pub fn new(settings: &LimitSettings) -> Bounds {
        Bounds {
            uploads: Budget::with_places_kept(settings.uploads.0, settings.uploads_per_client.0),
            results: Budget::with_places_kept(settings.results.0, settings.results_per_client.0),
            media: Budget::with_places_kept(settings.media.0, settings.media_per_client.0),
            holds: Arc::new(Claims::new("holds", settings.holds_per_client)),
            reservations: Arc::new(Claims::new("reservations", settings.reservations_per_client)),
            allowances: Arc::default(),
        }
    }
}
