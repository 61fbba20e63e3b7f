//! The components of a model that is open: what a planner asks of them.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use gpu::{LoadPlan, Target, TensorSource, WeightFormat};
use residency::{Bytes, Component};

use super::components::ComponentFiles;
use crate::{Precision, provisional_identity};

/// Bytes a second that a reload is predicted to take until it was measured.
const RELOAD_BYTES_PER_SECOND: f64 = 4e9;

/// All components of a model, by name.
#[derive(Debug)]
pub(crate) struct ComponentSet {
    components: Vec<Component>,
    files: Vec<ComponentFiles>,
    dtype: DType,
}

impl ComponentSet {
    /// From names and files.
    pub(crate) fn new<'a>(
        named: impl IntoIterator<Item = (&'a str, ComponentFiles)>,
        precision: &Precision,
    ) -> ComponentSet {
        let mut set = ComponentSet {
            components: Vec::new(),
            files: Vec::new(),
            dtype: precision.dtype,
        };
        for (name, files) in named {
            let bytes = files.plan.bytes();
            set.components.push(Component {
                id: provisional_identity(&files.place, name, precision),
                name: name.to_owned(),
                bytes,
                reload_seconds: bytes.0 as f64 / RELOAD_BYTES_PER_SECOND,
            });
            set.files.push(files);
        }
        set
    }

    /// All.
    pub(crate) fn all(&self) -> &[Component] {
        &self.components
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.components
            .iter()
            .position(|component| component.name == name)
    }

    /// How it is read.
    pub(crate) fn load_plan(&self, name: &str) -> Option<&LoadPlan> {
        Some(&self.files[self.index(name)?].plan)
    }

    /// The files whose content it depends on.
    pub(crate) fn files_of(&self, name: &str) -> Vec<Arc<Path>> {
        let index = self.index(name);
        index
            .map(|index| self.files[index].files.clone())
            .unwrap_or_default()
    }

    fn sources(&self, name: &str) -> &[TensorSource] {
        match self.load_plan(name) {
            Some(LoadPlan::Files(sources)) => sources,
            Some(LoadPlan::Synthetic(_)) | None => &[],
        }
    }

    /// Activation bytes that the quantized layers of a component take beside what the mathematics does, over so many
    /// tokens: one layer is run at a time, and the largest of those whose names are chosen counts.
    pub(crate) fn dequantizing(&self, name: &str, tokens: usize, is_run: fn(&str) -> bool) -> Bytes {
        let of_layer = |source: &TensorSource| match source.target {
            Target::Quantized(format) => {
                let (rows, columns) = gpu::rows_and_columns(&source.shape);
                Some(ops::linear_scratch(format, rows, columns, tokens, self.dtype))
            }
            Target::Full(_) => None,
        };
        let run = self.sources(name).iter().filter(|source| is_run(&source.name));
        Bytes(run.filter_map(of_layer).max().unwrap_or_default())
    }

    /// Whether any weight of a component is held quantized.
    pub(crate) fn is_quantized(&self, name: &str) -> bool {
        let is_quantized = |source: &TensorSource| matches!(source.target, Target::Quantized(_));
        self.sources(name).iter().any(is_quantized)
    }

    /// Whether a component has layers in fp8, which cards may multiply as they are.
    pub(crate) fn holds_fp8(&self, name: &str) -> bool {
        let is_fp8 = |source: &TensorSource| matches!(source.target, Target::Quantized(WeightFormat::Fp8(_)));
        self.sources(name).iter().any(is_fp8)
    }

    /// What a stage's shape says of a component whose fp8 is multiplied as it is: that takes other memory than int8 of as
    /// many bytes.
    pub(crate) fn as_multiplied(&self, name: &str) -> &'static str {
        match self.holds_fp8(name) {
            true => " fp8",
            false => "",
        }
    }
}
