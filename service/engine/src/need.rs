//! The need of one step of a job on a card: one type for the queue and for the worker.

use std::sync::Arc;

use gpu::{CardDescription, CardKind};
use model::{Rung, StagePlan};
use residency::{Bytes, Component, ComponentId, StageNeed};

use crate::messages::{Order, Work};

/// The need of a step on a card: components, rungs and headroom.
#[derive(Clone, Debug)]
pub struct Need {
    /// Name of the stage, or `load`, `restore`.
    pub name: Arc<str>,
    pub components: Vec<Component>,
    /// `None` for a load.
    pub plan: Option<StagePlan>,
    /// Bytes of the card that stay free while it runs, if that is more than the card's own headroom.
    pub headroom: Bytes,
    /// Components that later stages of the job need.
    pub later: Vec<ComponentId>,
    /// All components of the model, sorted: see [`StageNeed::model`].
    pub model: Vec<ComponentId>,
}

impl Need {
    /// The need of a stage; `components` are all components of its model.
    pub(crate) fn of_stage(
        plan: StagePlan,
        all: &[Component],
        later: Vec<ComponentId>,
        headroom: Bytes,
    ) -> Need {
        Need {
            name: plan.name.as_str().into(),
            components: named(&plan.components, all),
            plan: Some(plan),
            headroom,
            later,
            model: ids_of(all),
        }
    }

    /// The need without rungs that make no sense on this card. On the processor, components that a rung leaves in the machine's
    /// memory would take the card's own memory, and no ledger would count them; and it keeps no copies of weights.
    #[must_use]
    pub(crate) fn on_card(mut self, card: &CardDescription) -> Need {
        if let Some(plan) = self.plan.as_mut().filter(|_| card.kind == CardKind::Cpu) {
            plan.rungs
                .retain(|rung| rung.from_host.is_empty() && rung.copies.is_empty());
        }
        self
    }

    /// Adds the components of another stage of the same base, which runs in the same pass: each once.
    pub(crate) fn add_components_of(&mut self, other: Need) {
        for component in other.components {
            if self.components.iter().any(|own| own.name == component.name) {
                continue;
            }
            if let Some(plan) = &mut self.plan {
                plan.components.push(component.name.clone());
            }
            self.components.push(component);
        }
        for (own, others) in [(&mut self.later, other.later), (&mut self.model, other.model)] {
            own.extend(others);
            own.sort_unstable();
            own.dedup();
        }
    }

    /// The need of an order.
    pub fn of_order(order: &Order) -> Need {
        let (name, components, plan) = match &order.work {
            Work::Load(components) => ("load", components, None),
            Work::Stage(work) => (work.plan.name.as_str(), &work.components, Some(work.plan.clone())),
        };
        Need {
            name: name.into(),
            components: components.clone(),
            plan,
            headroom: order.headroom,
            later: match &order.work {
                Work::Load(_) => Vec::new(),
                Work::Stage(work) => work.later.clone(),
            },
            model: order.components.clone(),
        }
    }

    /// The ways to run it; none for a load.
    pub fn rungs(&self) -> &[Rung] {
        self.plan.as_ref().map_or(&[], |plan| &plan.rungs)
    }

    /// Key under which its measured peak is stored; empty for a load.
    pub(crate) fn shape(&self) -> String {
        let plan = self.plan.as_ref();
        plan.map(|plan| plan.shape.clone()).unwrap_or_default()
    }

    /// Scratch of one way to run it; zero for a load.
    pub(crate) fn scratch(&self, rung: usize) -> Bytes {
        self.rungs().get(rung).map_or(Bytes::ZERO, |rung| rung.scratch)
    }

    /// Scratch of the exact rung that needs the least, or of any if there is no exact one.
    pub(crate) fn least_scratch(&self) -> Bytes {
        let exact = self.rungs().iter().filter(|rung| !rung.approximate);
        let least = exact.map(|rung| rung.scratch).min();
        least
            .or_else(|| self.rungs().iter().map(|rung| rung.scratch).min())
            .unwrap_or(Bytes::ZERO)
    }

    /// The demand on the ledger with this scratch, with all components resident.
    pub(crate) fn with_scratch(&self, scratch: Bytes) -> StageNeed {
        StageNeed {
            name: self.name.to_string(),
            components: self.components.clone(),
            scratch,
            headroom: self.headroom,
            later: self.later.clone(),
            model: self.model.clone(),
            passes: self.passes(),
        }
    }

    /// How often it goes over the blocks of its components. What is loaded for later stages is worth what it costs.
    pub(crate) fn passes(&self) -> u32 {
        self.plan.as_ref().map_or(u32::MAX, passes_of)
    }

    /// The components that must be resident for one way to run it.
    pub(crate) fn components_on(&self, rung: usize) -> Vec<Component> {
        let from_host = self.rungs().get(rung).map_or(&[][..], |rung| &rung.from_host);
        let resident = self.components.iter().filter(|c| !from_host.contains(&c.name));
        resident.cloned().collect()
    }

    /// The demand on the ledger of one way to run it, with its scratch or another.
    pub fn on_rung(&self, rung: usize, scratch: Option<Bytes>) -> StageNeed {
        StageNeed {
            components: self.components_on(rung),
            ..self.with_scratch(scratch.unwrap_or_else(|| self.scratch(rung)))
        }
    }

    /// The demand of the exact way that needs the least memory, or of any if there is no exact one.
    pub(crate) fn least(&self) -> StageNeed {
        let all = 0..self.rungs().len();
        let is_exact = |rung: &usize| !self.rungs()[*rung].approximate;
        let peak = |rung: &usize| self.on_rung(*rung, None).peak();
        let exact = all.clone().filter(is_exact).min_by_key(peak);
        let least = exact.or_else(|| all.min_by_key(peak));
        least.map_or_else(|| self.with_scratch(Bytes::ZERO), |rung| self.on_rung(rung, None))
    }
}

/// The identities of these components, sorted.
pub(crate) fn ids_of(components: &[Component]) -> Vec<ComponentId> {
    let mut ids: Vec<ComponentId> = components.iter().map(|c| c.id.clone()).collect();
    ids.sort_unstable();
    ids
}

/// The components of these names.
pub(crate) fn named(names: &[String], all: &[Component]) -> Vec<Component> {
    let found = names
        .iter()
        .filter_map(|name| all.iter().find(|component| component.name == *name));
    found.cloned().collect()
}

/// Passes of a stage over all blocks of its components, in all of its steps.
pub(crate) fn passes_of(plan: &StagePlan) -> u32 {
    plan.steps.max(1).saturating_mul(plan.passes.in_step.max(1))
}

#[cfg(test)]
mod tests {
    use model::{Passes, Role};

    use super::*;

    #[test]
    fn a_cpu_card_has_no_rung_that_reads_components_from_host_memory_or_keeps_copies() {
        let rung = |from_host: &[&str], copies: &[&str]| Rung {
            label: String::new(),
            scratch: Bytes::mib(1),
            approximate: false,
            from_host: from_host.iter().map(|&name| name.to_owned()).collect(),
            copies: copies.iter().map(|&name| name.to_owned()).collect(),
        };
        let plan = StagePlan {
            name: "denoise".to_owned(),
            role: Role::Sample,
            components: vec!["adapter".to_owned()],
            rungs: vec![rung(&[], &["layer"]), rung(&[], &[]), rung(&["adapter"], &[])],
            shape: String::new(),
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: true,
            memo: None,
            section: None,
            shared: None,
            passes: Passes::default(),
            reads_media: false,
            preview: None,
        };
        let rungs_on = |kind: CardKind| {
            let card = CardDescription {
                id: String::new(),
                kind,
                name: String::new(),
                total: Bytes::gib(1),
                compute_capability: None,
                compute_dtype: "f32".to_owned(),
                peers: gpu::Peers::none(),
            };
            let need = Need::of_stage(plan.clone(), &[], Vec::new(), Bytes::ZERO);
            need.on_card(&card).rungs().len()
        };
        assert_eq!(rungs_on(CardKind::Cpu), 1);
        assert_eq!(rungs_on(CardKind::Cuda), 3);
    }
}
