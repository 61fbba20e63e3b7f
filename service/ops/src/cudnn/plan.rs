//! An execution plan: compiled code for one graph of one shape on one kind of card.

use std::ffi::c_void;

use super::descriptor::{Descriptor, Value, kind};
use super::{Failure, Library, Outcome};

/// Attributes of plans, by cuDNN's numbering.
const HANDLE: i32 = 400;
const CONFIGURATION: i32 = 401;
const WORKSPACE: i32 = 402;
const TEXT: i32 = 405;
#[cfg(test)]
const PROPERTIES: i32 = 407;

/// The card that plans are compiled for.
pub(super) enum CompileTarget {
    /// The card of a handle.
    Card(*mut c_void),
    /// A described card, which need not be present.
    #[cfg(test)]
    Described(Descriptor),
}

impl CompileTarget {
    /// The attribute of a graph for this target.
    pub(super) fn of_graph(&self) -> Option<(i32, Value<'_>)> {
        match self {
            CompileTarget::Card(handle) => Some((800, Value::Handle(*handle))),
            #[cfg(test)]
            CompileTarget::Described(_) => None,
        }
    }

    /// The device properties, if described.
    pub(super) fn properties(&self) -> Option<&Descriptor> {
        match self {
            CompileTarget::Card(_) => None,
            #[cfg(test)]
            CompileTarget::Described(properties) => Some(properties),
        }
    }

    /// Sets the target of a plan.
    fn set_on(&self, plan: &Descriptor) -> Outcome<()> {
        match self {
            CompileTarget::Card(handle) => plan.set(HANDLE, Value::Handle(*handle)),
            #[cfg(test)]
            CompileTarget::Described(properties) => plan.set(PROPERTIES, Value::Descriptors(&[properties])),
        }
    }
}

/// An executable plan.
pub(crate) struct Plan {
    // Dropped in this order.
    plan: Descriptor,
    kept: Kept,
    library: &'static Library,
    workspace: usize,
}

// SAFETY: its descriptors are finalized, so no thread changes them; whoever runs it has a handle for itself alone, and the last owner
// destroys it.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// The descriptors of a plan, dropped last to first.
struct Kept(Vec<Descriptor>);

impl Drop for Kept {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

impl Plan {
    /// Compiles the plan of an engine configuration. This is the slow part.
    ///
    /// # Errors
    /// Errors of cuDNN; and when its workspace exceeds `most` bytes.
    pub(super) fn of(
        library: &'static Library,
        target: &CompileTarget,
        configuration: Descriptor,
        most: usize,
    ) -> Outcome<Plan> {
        let plan = Descriptor::new(library, kind::PLAN)?;
        plan.set(CONFIGURATION, Value::Descriptors(&[&configuration]))?;
        // A described card was passed to the heuristics.
        if target.of_graph().is_some() {
            target.set_on(&plan)?;
        }
        plan.finalise()?;
        Plan::finished(library, plan, vec![configuration], most)
    }

    /// Loads a plan from its serialized text.
    ///
    /// # Errors
    /// When it is of another version of cuDNN or another card, or damaged.
    pub(super) fn load(
        library: &'static Library,
        target: &CompileTarget,
        text: &[u8],
        most: usize,
    ) -> Outcome<Plan> {
        let plan = Descriptor::new(library, kind::PLAN)?;
        target.set_on(&plan)?;
        plan.set(TEXT, Value::Text(text))?;
        plan.finalise()?;
        Plan::finished(library, plan, Vec::new(), most)
    }

    fn finished(
        library: &'static Library,
        plan: Descriptor,
        kept: Vec<Descriptor>,
        most: usize,
    ) -> Outcome<Plan> {
        let workspace = usize::try_from(plan.number(WORKSPACE)?).unwrap_or(usize::MAX);
        if workspace > most {
            return Err(Failure::refused(
                "its engines take more memory than there is for them",
            ));
        }
        Ok(Plan {
            plan,
            kept: Kept(kept),
            library,
            workspace,
        })
    }

    /// Keeps descriptors alive as long as the plan.
    pub(super) fn keep(&mut self, mut descriptors: Vec<Descriptor>) {
        descriptors.append(&mut self.kept.0);
        self.kept.0 = descriptors;
    }

    /// The serialized plan, including compiled kernels.
    pub(super) fn text(&self) -> Outcome<Vec<u8>> {
        self.plan.text(TEXT)
    }

    /// Workspace of a run in bytes.
    pub(super) fn workspace(&self) -> usize {
        self.workspace
    }

    /// Whether it was compiled here, rather than loaded.
    #[cfg(test)]
    pub(super) fn is_new(&self) -> bool {
        !self.kept.0.is_empty()
    }

    /// Enqueues the plan on the handle's stream. `at` has the address of each tensor that is not virtual, on the card
    /// or, for scalars, on the host; those are read before this returns. The caller ensures that the addresses point
    /// to operands of the plan's shape, aligned to 16 bytes, that live until the work on the stream is done, and that
    /// `workspace` points to as many bytes as the plan needs.
    ///
    /// # Errors
    /// Errors of cuDNN.
    pub(super) fn run(&self, handle: *mut c_void, at: &[(i64, u64)], workspace: u64) -> Outcome<()> {
        let numbers: Vec<i64> = at.iter().map(|(number, _)| *number).collect();
        let addresses: Vec<*mut c_void> = at.iter().map(|(_, address)| *address as *mut c_void).collect();
        let pack = Descriptor::with(
            self.library,
            kind::VARIANT_PACK,
            &[
                (1001, Value::Addresses(&addresses)),
                (1000, Value::Numbers(&numbers)),
                (1003, Value::Addresses(&[workspace as *mut c_void])),
            ],
        )?;
        self.plan.execute(handle, &pack)
    }
}
