//! The parts that open models of all families have.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::DType;
use gpu::LoadPlan;
use residency::Component;

use crate::adapter::AdapterReport;
use crate::component_set::ComponentSet;
use crate::{ModelFile, Precision, Request};

/// Text files that were read, by path, with the hashes of their contents.
pub type ReadFiles = BTreeMap<PathBuf, [u8; 32]>;

/// Names of files, and of a folder, that only the pipeline as a whole and its sampling depend on.
const OF_SAMPLING: [&str; 3] = ["model_index.json", "moored.json", "scheduler"];

/// The parts that every open model has, whatever it computes. [`Model`](crate::Model) uses them to answer planners' questions
/// about its components.
#[derive(Clone, Debug)]
pub struct ModelParts {
    /// The family's name: `flux`.
    pub family: &'static str,
    /// The default request; its medium is the one that the model generates.
    pub defaults: Request,
    /// The components with most of the bytes, which presets quantize.
    pub large: Vec<&'static str>,
    pub components: ComponentSet,
    /// Reports of the adapters that are attached to the components.
    pub adapters: Vec<AdapterReport>,
    /// The text files that were read when these adapters were attached.
    pub read_of_adapters: ReadFiles,
    /// The text files that were read when the model was opened. [`FamilyList::open`](crate::ModelOpener::open) sets them.
    read: Arc<OnceLock<ReadFiles>>,
}

impl ModelParts {
    /// The parts of a checkpoint without adapters.
    pub fn of_components(
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
            adapters: Vec::new(),
            read_of_adapters: ReadFiles::new(),
            read: Arc::default(),
        }
    }

    /// The dtype that the model computes in.
    pub fn dtype(&self) -> DType {
        self.components.dtype()
    }

    /// Sets the text files that were read when the model was opened.
    pub fn set_read(&self, read: ReadFiles) {
        self.read.get_or_init(|| read);
    }

    /// Hash of the configurations that a stage with these components may depend on: all text files that were read, except those
    /// of the other components, and except those of the pipeline as a whole and of its schedule, which belong to sampling.
    pub fn configuration_of(&self, components: &[String]) -> [u8; 32] {
        let others = self
            .components
            .all()
            .iter()
            .map(|component| component.name.as_str());
        let others: Vec<&str> = others
            .filter(|name| !components.iter().any(|own| own == name))
            .collect();
        let is_of_others = |path: &Path| {
            let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
            let file = path.file_name().unwrap_or_default();
            others.iter().any(|other| folder == *other)
                || OF_SAMPLING.iter().any(|name| folder == *name || file == *name)
        };
        let mut hash = blake3::Hasher::new();
        let read = self.read.get().into_iter().flatten();
        for (path, content) in read.chain(&self.read_of_adapters) {
            if !is_of_others(path) {
                // The folder of the model is not part of the hash.
                hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
                hash.update(content);
            }
        }
        *hash.finalize().as_bytes()
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
