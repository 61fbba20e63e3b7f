//! The components of an open model, as a planner needs them.

use std::path::PathBuf;

use candle_core::DType;
use gpu::{BlockPlace, LoadPlan, Target, TensorSource, Uses, WeightFormat};
use residency::{Bytes, Component};

use crate::{Flops, Formats, ModelFile, digest_of_names, provisional_identity};

/// Predicted bytes per second of a reload, until measured.
const RELOAD_BYTES_PER_SECOND: f64 = 4e9;

/// One component as files: its load plan and its identity.
#[derive(Debug, Clone)]
pub struct ComponentFiles {
    /// The component's folder or file, for messages.
    pub place: PathBuf,
    /// Sources of all tensors.
    pub plan: LoadPlan,
    /// All files whose content identifies the component.
    pub files: Vec<ModelFile>,
}

impl ComponentFiles {
    /// The component with further tensors, of other files.
    pub fn with(mut self, further: ComponentFiles) -> ComponentFiles {
        match (&mut self.plan, further.plan) {
            (LoadPlan::Files(sources), LoadPlan::Files(further)) => sources.extend(further),
            (LoadPlan::Files(_) | LoadPlan::Synthetic(_), _) => {}
        }
        self.files.extend(further.files);
        self.files.sort();
        self
    }
}

/// All components of a model, by name.
#[derive(Clone, Debug)]
pub struct ComponentSet {
    components: Vec<Component>,
    /// Of each component, its load plan, and the files whose content identifies it.
    loads: Vec<(LoadPlan, Vec<ModelFile>)>,
    dtype: DType,
    formats: Formats,
}

impl ComponentSet {
    /// From names and files, computed in `dtype`.
    pub fn new<'a>(
        named: impl IntoIterator<Item = (&'a str, ComponentFiles)>,
        dtype: DType,
        formats: Formats,
    ) -> ComponentSet {
        let mut set = ComponentSet {
            components: Vec::new(),
            loads: Vec::new(),
            dtype,
            formats,
        };
        for (name, files) in named {
            set.push(name, files);
        }
        set
    }

    /// Adds a component.
    pub fn push(&mut self, name: &str, files: ComponentFiles) {
        let bytes = files.plan.bytes();
        let format = self.formats.of(name);
        let loaded = format!("{name}:{}", digest_of_names(&files.plan));
        let component = Component {
            id: provisional_identity(&files.place, &files.files, &loaded, self.dtype, format),
            name: name.to_owned(),
            bytes,
            reload_seconds: bytes.0 as f64 / RELOAD_BYTES_PER_SECOND,
            parts: files.plan.parts(),
        };
        self.push_open(component, files.plan, files.files);
    }

    /// Says to which blocks the tensors of a component belong, by their names: they may be streamed. Does nothing without such a
    /// component.
    pub fn in_blocks(&mut self, name: &str, block_of: impl Fn(&str) -> Option<BlockPlace>) {
        if let Some(index) = self.index(name) {
            let plan = &mut self.loads[index].0;
            plan.in_blocks(block_of);
            self.components[index].parts = plan.parts();
        }
    }

    /// Adds a component that has an identity.
    pub fn push_open(&mut self, component: Component, plan: LoadPlan, files: Vec<ModelFile>) {
        self.components.push(component);
        self.loads.push((plan, files));
    }

    /// The computation dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The formats to which components are quantized at load.
    pub fn formats(&self) -> &Formats {
        &self.formats
    }

    /// All components, in order.
    pub fn all(&self) -> &[Component] {
        &self.components
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.components
            .iter()
            .position(|component| component.name == name)
    }

    /// Load plan of a component.
    pub fn load_plan(&self, name: &str) -> Option<&LoadPlan> {
        Some(&self.loads[self.index(name)?].0)
    }

    /// The files whose content identifies a component.
    pub fn files_of(&self, name: &str) -> Vec<ModelFile> {
        let index = self.index(name);
        index.map(|index| self.loads[index].1.clone()).unwrap_or_default()
    }

    /// The tensors of a component that is read from files.
    pub fn sources(&self, name: &str) -> &[TensorSource] {
        match self.load_plan(name) {
            Some(LoadPlan::Files(sources)) => sources,
            Some(LoadPlan::Synthetic(_)) | None => &[],
        }
    }

    /// Whether a component has a tensor of this name.
    pub fn has_tensor(&self, component: &str, tensor: &str) -> bool {
        self.sources(component).iter().any(|source| source.name == tensor)
    }

    /// Predicted scratch of the quantized layers of a component for `tokens` tokens: layers run one at a time, so it
    /// is that of the largest layer for which `is_run` holds.
    pub fn dequantizing(&self, name: &str, tokens: usize, is_run: impl Fn(&str) -> bool) -> Bytes {
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

    /// Floating-point operations of a pass over a component's blocks: of the products of its weights with the rows that
    /// `rows_of` says of each, by name. What its blocks share between passes does not count.
    pub fn flops_of_products(&self, name: &str, rows_of: impl Fn(&str) -> usize) -> Flops {
        let of_weight = |source: &TensorSource| match source.block {
            Some(block) if block.uses == Uses::EachPass && source.shape.len() > 1 => {
                let numbers = source.shape.iter().product::<usize>() as u64;
                let all = 2 * numbers * rows_of(&source.name) as u64;
                let is_fp8 = match source.target {
                    Target::Quantized(format) => ops::is_multiplied_in_fp8(format),
                    Target::Full(_) => false,
                };
                let fp8 = if is_fp8 { all } else { 0 };
                Flops { all, fp8 }
            }
            Some(_) | None => Flops::default(),
        };
        let all = self.sources(name).iter().map(of_weight);
        all.fold(Flops::default(), |sum, each| sum + each)
    }

    /// Whether any weight of a component is quantized.
    pub fn is_quantized(&self, name: &str) -> bool {
        self.has_layer(name, |_| true)
    }

    /// Whether a component has layers that cards may multiply in fp8, so that rows need codes.
    pub fn is_multiplied_in_fp8(&self, name: &str) -> bool {
        self.has_layer(name, ops::is_multiplied_in_fp8)
    }

    fn has_layer(&self, name: &str, is_such: impl Fn(WeightFormat) -> bool) -> bool {
        self.sources(name).iter().any(|source| match source.target {
            Target::Quantized(format) => is_such(format),
            Target::Full(_) => false,
        })
    }

    /// Suffix of a stage's shape for a component with products in fp8, whose scratch differs from that of
    /// dequantized weights: of weights in fp8, or of others that become fp8 for it.
    pub fn as_multiplied(&self, name: &str) -> &'static str {
        let is_fp8 = |format| matches!(format, WeightFormat::Fp8(_));
        match (
            self.is_multiplied_in_fp8(name),
            self.has_layer(name, |format| {
                ops::is_multiplied_in_fp8(format) && !is_fp8(format)
            }),
        ) {
            (false, _) => "",
            (true, false) => " fp8",
            (true, true) => " to fp8",
        }
    }
}
