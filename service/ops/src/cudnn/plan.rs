//! A plan: compiled code for one graph of one shape on one kind of card.

use std::ffi::c_void;

use super::descriptor::{Descriptor, Value, kind};
use super::{Failure, Library, Outcome};

/// Attributes of a plan, by cuDNN's numbers.
const HANDLE: i32 = 400;
const CONFIGURATION: i32 = 401;
const WORKSPACE: i32 = 402;
const TEXT: i32 = 405;
#[cfg(test)]
const PROPERTIES: i32 = 407;

/// What plans are made for.
pub(super) enum Target {
    /// The card of a handle.
    Card(*mut c_void),
    /// A card that is described, and need not be there.
    #[cfg(test)]
    Described(Descriptor),
}

impl Target {
    /// What a graph is told.
    pub(super) fn of_graph(&self) -> Option<(i32, Value<'_>)> {
        match self {
            Target::Card(handle) => Some((800, Value::Handle(*handle))),
            #[cfg(test)]
            Target::Described(_) => None,
        }
    }

    /// The description.
    pub(super) fn properties(&self) -> Option<&Descriptor> {
        match self {
            Target::Card(_) => None,
            #[cfg(test)]
            Target::Described(properties) => Some(properties),
        }
    }

    /// Tells a plan.
    fn tell(&self, plan: &Descriptor) -> Outcome<()> {
        match self {
            Target::Card(handle) => plan.set(HANDLE, Value::Handle(*handle)),
            #[cfg(test)]
            Target::Described(properties) => plan.set(PROPERTIES, Value::Descriptors(&[properties])),
        }
    }
}

/// A plan, ready to run.
pub(crate) struct Plan {
    // Dropped in this order.
    plan: Descriptor,
    kept: Kept,
    library: &'static Library,
    workspace: usize,
}

/// What a plan is made of, the last first to be dropped.
struct Kept(Vec<Descriptor>);

impl Drop for Kept {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

impl Plan {
    /// The plan of an engine's configuration. This is what takes time: kernels are compiled.
    ///
    /// # Errors
    /// Those of cuDNN; and where it takes more than `most` bytes beside its operands.
    pub(super) fn of(
        library: &'static Library,
        target: &Target,
        configuration: Descriptor,
        most: usize,
    ) -> Outcome<Plan> {
        let plan = Descriptor::new(library, kind::PLAN)?;
        plan.set(CONFIGURATION, Value::Descriptors(&[&configuration]))?;
        // A card that is described was told to the heuristics.
        if target.of_graph().is_some() {
            target.tell(&plan)?;
        }
        plan.finalise()?;
        Plan::finished(library, plan, vec![configuration], most)
    }

    /// A plan that was kept as text.
    ///
    /// # Errors
    /// When it is of another version of cuDNN, of another card, or damaged.
    pub(super) fn load(
        library: &'static Library,
        target: &Target,
        text: &[u8],
        most: usize,
    ) -> Outcome<Plan> {
        let plan = Descriptor::new(library, kind::PLAN)?;
        target.tell(&plan)?;
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

    /// Keeps what the plan was made of as long as the plan.
    pub(super) fn keep(&mut self, mut descriptors: Vec<Descriptor>) {
        descriptors.append(&mut self.kept.0);
        self.kept.0 = descriptors;
    }

    /// The plan as it can be kept, compiled kernels with it.
    pub(super) fn text(&self) -> Outcome<Vec<u8>> {
        self.plan.text(TEXT)
    }

    /// Bytes that a run takes beside its operands.
    pub(super) fn workspace(&self) -> usize {
        self.workspace
    }

    /// Whether it was made here, rather than loaded.
    #[cfg(test)]
    pub(super) fn is_new(&self) -> bool {
        !self.kept.0.is_empty()
    }

    /// Queues the plan on the handle's stream. Of each tensor that is not between operations it is told the address, on
    /// the card or for scalars on the host; those are read before this returns. The caller sees to it that what is at
    /// the addresses has the shape that the plan was made for, is aligned to 16 bytes, and lives until the stream has
    /// come past it, and that `workspace` leads to as many bytes as the plan says.
    ///
    /// # Errors
    /// Those of cuDNN.
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
