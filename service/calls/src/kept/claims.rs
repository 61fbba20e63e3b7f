//! Pins, holds and reservations over a restart. They are written whenever one changes, and put back once the service is there again.

use std::time::Duration;

use engine::queue::{KeptClaims, KeptHold, KeptReservation};
use journal::Changes;
use serde::{Deserialize, Serialize};

use super::Kept;
use super::records::{STATE, Time};
use crate::other_process::OtherProcess;
use crate::runs::load_for;

/// Name of the claims, among the state.
const CLAIMS: &str = "claims";
/// Client name of the jobs that load pinned models again.
const CLIENT: &str = "moored (pins)";
/// The claims, and when they were written: their remaining times are counted from then.
#[derive(Default, Serialize, Deserialize)]
struct Written {
    at: Time,
    claims: KeptClaims,
}

impl Kept {
    /// Writes the claims as they are now. A failure is logged: the claims stand all the same, until the service ends.
    pub(crate) async fn save_claims(&self) {
        let Ok(mut claims) = self.0.queue.claims().await else {
            return; // the queue has ended
        };
        {
            // What is still to be put back is not lost by a claim that is made meanwhile.
            let left = self.unrestored();
            claims.pins.extend(left.pins.iter().cloned());
            claims.holds.extend(left.holds.iter().cloned());
            claims.reservations.extend(left.reservations.iter().cloned());
        }
        let written = Written {
            at: Time::now(),
            claims,
        };
        let done = self.on_disk(move |kept| {
            kept.journal
                .write(Changes::default().put(STATE, CLAIMS, &written)?)
        });
        if let Err(error) = done.await {
            tracing::warn!(%error, "pins, holds and reservations are not written: they end with the service");
        }
    }

    /// Puts back the claims from before, and loads the pinned models.
    pub(super) async fn restore_claims(&self) {
        let written = match self
            .on_disk(|kept| kept.journal.get::<Written>(STATE, CLAIMS))
            .await
        {
            Ok(written) => written.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "pins, holds and reservations from before cannot be read");
                return;
            }
        };
        let claims = left_of(written.claims, written.at.until(Time::now()));
        if claims == KeptClaims::default() {
            return;
        }
        self.unrestored().clone_from(&claims);
        let reservations = self.watched(claims.reservations);
        drop(self.0.queue.restore_reservations(reservations).await);
        self.unrestored().reservations.clear();
        for hold in claims.holds {
            let key = hold.entry.key.clone();
            if let Err(error) = self.0.queue.restore_hold(hold).await {
                tracing::warn!(model = key, %error, "a hold from before the restart is given up");
            }
        }
        self.unrestored().holds.clear();
        let pins = claims.pins;
        for entry in &pins {
            if let Err(error) = self.0.queue.pin(entry.clone()).await {
                tracing::warn!(model = entry.key, %error, "a pin from before the restart is given up");
            }
        }
        self.unrestored().pins.clear();
        self.save_claims().await;
        for entry in pins {
            let key = entry.key.clone();
            if let Err(error) = load_for(CLIENT, entry, &self.0.queue).await {
                tracing::warn!(model = key, %error, "a model that was pinned before the restart is not loaded");
            }
        }
    }

    /// Reservations whose processes are there still. Each ends with its process.
    fn watched(&self, reservations: Vec<KeptReservation>) -> Vec<KeptReservation> {
        let mut standing = Vec::new();
        for reservation in reservations {
            match reservation.by.process.map(OtherProcess::open) {
                None => {}
                Some(Ok(process)) => {
                    let (queue, id) = (self.0.queue.clone(), reservation.id.clone());
                    tokio::spawn(async move { process.release_at_its_end(&queue, &id).await });
                }
                Some(Err(_)) => continue,
            }
            standing.push(reservation);
        }
        standing
    }

    fn unrestored(&self) -> std::sync::MutexGuard<'_, KeptClaims> {
        self.0
            .unrestored
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The claims that are left after a time.
fn left_of(claims: KeptClaims, passed: Duration) -> KeptClaims {
    let holds = claims.holds.into_iter().filter_map(|hold| {
        let left = hold.left.checked_sub(passed).filter(|left| !left.is_zero())?;
        Some(KeptHold { left, ..hold })
    });
    let reservations = claims.reservations.into_iter().filter_map(|reservation| {
        let left = reservation
            .left
            .checked_sub(passed)
            .filter(|left| !left.is_zero())?;
        Some(KeptReservation { left, ..reservation })
    });
    KeptClaims {
        pins: claims.pins,
        holds: holds.collect(),
        reservations: reservations.collect(),
    }
}
