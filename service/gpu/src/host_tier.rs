//! The budget of the machine's memory for streamed blocks, and the blocks of components that left the card: the place between the card
//! and the disk. Pure bookkeeping, without a card.

use residency::{Bytes, ComponentId};

use crate::load::LoadError;

/// Something that holds memory of the machine.
pub(crate) trait HoldsMemory {
    fn bytes(&self) -> Bytes;
}

/// Blocks of components that left the card, within a budget that those on the card share. `T` holds the memory of one component.
#[derive(Debug)]
pub(crate) struct HostTier<T> {
    /// The most that all components may hold together, on the card or not; `None`: whatever is available.
    pub(crate) limit: Option<Bytes>,
    /// The oldest first.
    kept: Vec<(ComponentId, T)>,
}

impl<T> Default for HostTier<T> {
    fn default() -> HostTier<T> {
        HostTier {
            limit: None,
            kept: Vec::new(),
        }
    }
}

impl<T: HoldsMemory> HostTier<T> {
    /// Keeps the blocks of a component that leaves the card. Where the budget has no room beside the `in_use` bytes of others, the
    /// oldest go.
    pub(crate) fn keep(&mut self, id: ComponentId, blocks: T, in_use: Bytes) {
        self.forget(&id);
        if blocks.bytes() == Bytes::ZERO {
            return;
        }
        self.kept.push((id, blocks));
        while self.limit.is_some_and(|limit| in_use + self.bytes() > limit) && self.drop_oldest() {}
    }

    /// The blocks of a component that comes back, which are no longer kept.
    pub(crate) fn take(&mut self, id: &ComponentId) -> Option<T> {
        let at = self.kept.iter().position(|(kept, _)| kept == id)?;
        Some(self.kept.remove(at).1)
    }

    /// Frees the blocks of a component.
    pub(crate) fn forget(&mut self, id: &ComponentId) {
        self.kept.retain(|(kept, _)| kept != id);
    }

    /// What is kept, the oldest first.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (&ComponentId, &T)> {
        self.kept.iter().map(|(id, blocks)| (id, blocks))
    }

    /// Bytes of all that is kept.
    pub(crate) fn bytes(&self) -> Bytes {
        self.kept.iter().map(|(_, blocks)| blocks.bytes()).sum()
    }

    /// Makes sure that so many bytes more can be taken from the machine beside the `in_use` bytes of components on the card, of
    /// which `available` are left by the system (`None`: it does not say). What is kept goes first, the oldest before others.
    ///
    /// # Errors
    /// [`LoadError::HostMemory`].
    pub(crate) fn make_room(
        &mut self,
        needed: Bytes,
        in_use: Bytes,
        available: Option<Bytes>,
    ) -> Result<(), LoadError> {
        let kept_before = self.bytes();
        loop {
            let freed = kept_before - self.bytes();
            let by_limit = self.limit.map(|limit| limit - (in_use + self.bytes()));
            let by_system = available.map(|available| available + freed);
            let room = by_limit.into_iter().chain(by_system).min();
            match room {
                Some(room) if needed > room => {
                    if !self.drop_oldest() {
                        return Err(LoadError::HostMemory {
                            needed,
                            available: room,
                        });
                    }
                }
                Some(_) | None => return Ok(()),
            }
        }
    }

    /// Frees what is kept, the oldest first, until `short` bytes are free or nothing is kept.
    pub(crate) fn relieve(&mut self, short: Bytes) {
        let target = self.bytes() - short;
        while short > Bytes::ZERO && self.bytes() > target && self.drop_oldest() {}
    }

    fn drop_oldest(&mut self) -> bool {
        let is_there = !self.kept.is_empty();
        if is_there {
            self.kept.remove(0);
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl HoldsMemory for Bytes {
        fn bytes(&self) -> Bytes {
            *self
        }
    }

    fn id(name: &str) -> ComponentId {
        ComponentId::new(name)
    }

    fn with(limit: Option<u64>, kept: &[(&str, u64)]) -> HostTier<Bytes> {
        let mut tier = HostTier {
            limit: limit.map(Bytes),
            ..HostTier::default()
        };
        for (name, bytes) in kept {
            tier.keep(id(name), Bytes(*bytes), Bytes::ZERO);
        }
        tier
    }

    fn names(tier: &HostTier<Bytes>) -> Vec<&str> {
        tier.kept().map(|(id, _)| &*id.0).collect()
    }

    #[test]
    fn what_leaves_the_card_is_kept_until_it_comes_back_or_the_budget_is_full() {
        let mut tier = with(Some(10), &[("a", 4), ("b", 4)]);
        assert_eq!(tier.take(&id("a")), Some(Bytes(4)));
        assert_eq!(tier.take(&id("a")), None);
        tier.keep(id("c"), Bytes(5), Bytes(1));
        assert_eq!(names(&tier), ["b", "c"]);
        tier.keep(id("d"), Bytes(1), Bytes(1));
        assert_eq!(names(&tier), ["c", "d"], "the oldest has gone");
        tier.keep(id("e"), Bytes(11), Bytes::ZERO);
        assert_eq!(names(&tier), [""; 0], "more than the budget is not kept");
        tier.keep(id("f"), Bytes::ZERO, Bytes::ZERO);
        assert_eq!(names(&tier), [""; 0], "what holds nothing is not kept");
    }

    #[test]
    fn what_is_kept_makes_room_for_what_is_needed() {
        let mut tier = with(Some(10), &[("a", 4), ("b", 4)]);
        tier.make_room(Bytes(2), Bytes::ZERO, None).unwrap();
        assert_eq!(names(&tier), ["a", "b"]);
        tier.make_room(Bytes(3), Bytes::ZERO, Some(Bytes(100))).unwrap();
        assert_eq!(names(&tier), ["b"]);
        // The system has less than the budget allows, and what was kept is available again.
        let mut tier = with(None, &[("a", 4), ("b", 4)]);
        tier.make_room(Bytes(5), Bytes(50), Some(Bytes(1))).unwrap();
        assert_eq!(names(&tier), ["b"]);
        let refused = tier.make_room(Bytes(6), Bytes(50), Some(Bytes(1)));
        assert!(matches!(
            refused,
            Err(LoadError::HostMemory {
                needed: Bytes(6),
                available: Bytes(5)
            })
        ));
        assert_eq!(names(&tier), [""; 0]);
    }

    #[test]
    fn others_that_are_short_of_memory_get_what_is_kept() {
        let mut tier = with(None, &[("a", 4), ("b", 4), ("c", 4)]);
        tier.relieve(Bytes::ZERO);
        assert_eq!(names(&tier), ["a", "b", "c"]);
        tier.relieve(Bytes(5));
        assert_eq!(names(&tier), ["c"]);
        tier.relieve(Bytes(50));
        assert_eq!(names(&tier), [""; 0]);
    }
}
