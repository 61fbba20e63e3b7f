//! What models keep on the card between shared passes: a cache of activations, and of handles of components.

use model::Kept;
use residency::{Bytes, ComponentId};

use super::Card;
use super::moves::MoveError;
use crate::need::Need;

/// What a model has kept, until its next shared pass.
///
/// Its bytes count as slack, which a trim returns. So it is dropped before anything that needs slack or a component: before a trim, a
/// load, another part, an unload, and before a stage that could lack its memory; and where the card is idle for a while.
#[derive(Debug)]
pub(super) struct KeptOfPass {
    /// The components of the pass, in order: only a pass with exactly these takes it.
    components: Vec<ComponentId>,
    kept: Kept,
    /// At most so many bytes: the scratch of the pass that left it.
    most: Bytes,
}

impl Card {
    /// Takes what the last shared pass with these components has kept.
    pub(super) fn take_kept(&mut self, need: &Need) -> Kept {
        let components = components_of(need);
        let is_own = |kept: &mut KeptOfPass| kept.components == components;
        self.kept
            .take_if(is_own)
            .map_or_else(Kept::default, |own| own.kept)
    }

    /// Holds what a shared pass with so much scratch has left, if it has left anything.
    pub(super) fn hold_kept(&mut self, need: &Need, kept: Kept, most: Bytes) {
        if !kept.is_empty() {
            self.kept = Some(KeptOfPass {
                components: components_of(need),
                kept,
                most,
            });
        }
    }

    /// Drops what is kept, whose bytes are slack already.
    pub(super) fn drop_kept(&mut self) {
        self.kept = None;
    }

    /// Bytes of what is kept that a shared pass with so much scratch takes: they are slack by the ledger, and part of its scratch.
    pub(super) fn kept_for(&self, need: &Need, scratch: Bytes) -> Bytes {
        let components = components_of(need);
        let own = self.kept.as_ref().filter(|kept| kept.components == components);
        own.map_or(Bytes::ZERO, |kept| kept.most.min(scratch))
    }

    /// Drops what is kept where a stage of so much scratch could lack its memory. It takes `taken` of that from what is kept.
    pub(super) fn drop_kept_where_tight(&mut self, scratch: Bytes, taken: Bytes) -> Result<(), MoveError> {
        let accounts = self.ledger.accounts();
        let is_tight = |kept: &KeptOfPass| accounts.free + accounts.slack < scratch + (kept.most - taken);
        if self.kept.as_ref().is_some_and(is_tight) {
            self.drop_kept();
            self.reconcile_after_change()?;
        }
        Ok(())
    }
}

fn components_of(need: &Need) -> Vec<ComponentId> {
    let mut components: Vec<ComponentId> = need.components.iter().map(|c| c.id.clone()).collect();
    components.sort_unstable();
    components
}
