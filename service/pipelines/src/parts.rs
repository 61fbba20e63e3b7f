//! What open models of all families have in common.

use gpu::LoadPlan;
use residency::Component;

use crate::adapters::AdapterSet;
use crate::checkpoint::ComponentSet;
use crate::{ModelFile, Precision, Request};

/// The parts that every open model has, whatever it computes: [`Model`](crate::Model) answers from them what planners ask of
/// its components.
#[derive(Clone, Debug)]
pub struct ModelParts {
    /// The family's name: `flux`.
    pub(crate) family: &'static str,
    /// The default request; its medium is the one that the model generates.
    pub(crate) defaults: Request,
    /// The components with most of the bytes, which presets quantize.
    pub(crate) large: Vec<&'static str>,
    pub(crate) components: ComponentSet,
    /// What is attached to them.
    pub(crate) adapters: AdapterSet,
}

impl ModelParts {
    /// The parts of a checkpoint without adapters.
    pub(crate) fn of_components(
        family: &'static str,
        defaults: Request,
        large: &[&'static str],
        components: ComponentSet,
    ) -> ModelParts {
        ModelParts {
            family,
            defaults,
            large: large.to_vec(),
            components,
            adapters: AdapterSet::default(),
        }
    }

    /// The parts of a model that has no components yet, computed in this precision.
    pub fn new(
        family: &'static str,
        defaults: Request,
        large: &[&'static str],
        precision: &Precision,
    ) -> ModelParts {
        let formats = precision.quantization.formats(large);
        let components = ComponentSet::new([], precision.dtype, formats);
        ModelParts::of_components(family, defaults, large, components)
    }

    /// Adds a component, with its load plan and the files whose content identifies it.
    pub fn push(&mut self, component: Component, plan: LoadPlan, files: Vec<ModelFile>) {
        self.components.push_open(component, plan, files);
    }
}
