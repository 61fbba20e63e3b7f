//! Applies claims to a ledger: the worker's, and the supervisor's copy of it.

use std::collections::{BTreeMap, BTreeSet};

use residency::{Bytes, ComponentId, HoldId, Ledger, PinId, ReservationId};

use crate::messages::Standing;

/// Claims by their identities.
#[derive(PartialEq)]
struct ClaimSet {
    pins: BTreeMap<PinId, BTreeSet<ComponentId>>,
    holds: BTreeMap<HoldId, BTreeSet<ComponentId>>,
    reservations: BTreeMap<ReservationId, (String, Bytes)>,
}

impl ClaimSet {
    fn of_ledger(ledger: &Ledger) -> ClaimSet {
        let reservations = ledger.reservations();
        let reservations = reservations.map(|(id, label, bytes)| (id.clone(), (label.to_owned(), bytes)));
        ClaimSet {
            pins: sets(ledger.pins().map(|(id, components)| (id.clone(), components))),
            holds: sets(ledger.holds().map(|(id, components)| (id.clone(), components))),
            reservations: reservations.collect(),
        }
    }

    fn of(standing: &Standing) -> ClaimSet {
        let (pins, holds) = (standing.pins.iter(), standing.holds.iter());
        let reservations = standing.reservations.iter();
        let reservations =
            reservations.map(|(id, label, bytes)| (ReservationId::new(id.as_str()), (label.clone(), *bytes)));
        ClaimSet {
            pins: sets(pins.map(|(id, components)| (PinId::new(id.as_str()), &components[..]))),
            holds: sets(holds.map(|(id, components)| (HoldId::new(id.as_str()), &components[..]))),
            reservations: reservations.collect(),
        }
    }
}

/// The components of each pin, or of each hold.
fn sets<'a, I: Ord>(
    claims: impl Iterator<Item = (I, &'a [ComponentId])>,
) -> BTreeMap<I, BTreeSet<ComponentId>> {
    let sets = claims.map(|(id, components)| (id, components.iter().cloned().collect()));
    sets.collect()
}

impl Standing {
    /// Whether a ledger has exactly these claims.
    pub(crate) fn is_applied_to(&self, ledger: &Ledger) -> bool {
        ClaimSet::of(self) == ClaimSet::of_ledger(ledger)
    }

    /// Replaces the claims of a ledger by these. Unchanged ones keep their state: a reservation remembers
    /// how much of it is in use.
    pub(crate) fn apply_to(&self, ledger: &mut Ledger) {
        let (was, now) = (ClaimSet::of_ledger(ledger), ClaimSet::of(self));
        for gone in was.pins.keys().filter(|id| !now.pins.contains_key(id)) {
            ledger.unpin(gone);
        }
        for (id, components) in now.pins {
            if was.pins.get(&id) != Some(&components) {
                ledger.pin(id, components.into_iter().collect());
            }
        }
        for gone in was.holds.keys().filter(|id| !now.holds.contains_key(id)) {
            ledger.release_hold(gone);
        }
        for (id, components) in now.holds {
            if was.holds.get(&id) != Some(&components) {
                ledger.hold(id, components.into_iter().collect());
            }
        }
        for gone in was
            .reservations
            .keys()
            .filter(|id| !now.reservations.contains_key(id))
        {
            ledger.release_reservation(gone);
        }
        for (id, booked) in now.reservations {
            if was.reservations.get(&id) != Some(&booked) {
                let (label, bytes) = booked;
                ledger.reserve(id, label, bytes);
            }
        }
        if let (true, Some(foreign)) = (was.reservations.is_empty(), self.foreign_before) {
            ledger.reserved_beside(foreign);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use residency::DriverTruth;

    fn standing(pins: &[&str], hold: &[&str], reserved_gib: u64) -> Standing {
        let ids = |names: &[&str]| names.iter().map(|name| ComponentId::new(*name)).collect();
        Standing {
            pins: vec![("pin".to_owned(), ids(pins))],
            holds: vec![("hold".to_owned(), ids(hold))],
            reservations: vec![("room".to_owned(), "training".to_owned(), Bytes::gib(reserved_gib))],
            foreign_before: None,
        }
    }

    #[test]
    fn new_claims_replace_those_of_a_ledger() {
        let mut ledger = Ledger::new(Bytes::gib(24), Bytes::ZERO);
        let first = standing(&["a", "b"], &["b", "a", "b"], 4);
        assert!(!first.is_applied_to(&ledger));
        first.apply_to(&mut ledger);
        assert!(first.is_applied_to(&ledger));
        assert_eq!(ledger.usable(), Bytes::gib(20));
        let second = standing(&["b", "c"], &["c"], 6);
        assert!(!second.is_applied_to(&ledger));
        second.apply_to(&mut ledger);
        assert!(second.is_applied_to(&ledger));
        assert_eq!(ledger.usable(), Bytes::gib(18));
        Standing::default().apply_to(&mut ledger);
        assert!(Standing::default().is_applied_to(&ledger));
        assert_eq!(ledger.usable(), Bytes::gib(24));
    }

    #[test]
    fn a_new_ledger_knows_how_much_of_a_reservation_is_in_use() {
        for (foreign_gib, untaken_gib) in [(0, 4), (2, 4), (5, 1), (6, 0), (9, 0)] {
            let mut ledger = Ledger::new(Bytes::gib(24), Bytes::ZERO);
            ledger.reconcile(&DriverTruth {
                total: Bytes::gib(24),
                free: Bytes::gib(24 - foreign_gib),
                ..DriverTruth::default()
            });
            let before = Standing {
                foreign_before: Some(Bytes::gib(2)),
                ..standing(&[], &[], 4)
            };
            before.apply_to(&mut ledger);
            assert_eq!(
                ledger.usable(),
                Bytes::gib(24 - foreign_gib - untaken_gib),
                "{foreign_gib}"
            );
        }
    }

    #[test]
    fn an_unchanged_reservation_keeps_its_count_of_bytes_in_use() {
        let mut ledger = Ledger::new(Bytes::gib(24), Bytes::ZERO);
        standing(&[], &[], 4).apply_to(&mut ledger);
        let foreign = DriverTruth {
            total: Bytes::gib(24),
            free: Bytes::gib(21),
            ..DriverTruth::default()
        };
        ledger.reconcile(&foreign); // 3 GiB are in use by others
        assert_eq!(
            ledger.usable(),
            Bytes::gib(20),
            "21 free, 1 of the reservation is left"
        );
        standing(&["a"], &[], 4).apply_to(&mut ledger);
        assert_eq!(ledger.usable(), Bytes::gib(20), "it is the same reservation");
    }
}
