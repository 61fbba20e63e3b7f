//! Folders that tests may modify, and models with their components on the device of the tests. Shared by the parity tests of
//! all families.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, CpuCard, CpuSettings, Gpu, QuantizedWeight, Weight};
use pipelines::{
    HostTensor, Model, Observer, PassesLeftOut, Piece, Precision, Request, Role, StageError, StagePlan,
    StageRun, Values, families,
};

use residency::{Component, Part};

use crate::device::{here, test_device};

/// Precision of the fixtures.
pub(crate) const F32: Precision = Precision::full(DType::F32);

/// Copies a folder with all that is in it.
pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder").flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// A component on the device of the tests.
fn moved(tensors: &ComponentTensors) -> ComponentTensors {
    let weights = tensors.names().map(|name| {
        let weight = match tensors.weight(name).expect("a tensor") {
            Weight::Full(tensor) => Weight::Full(here(&tensor)),
            Weight::Quantized(quantized) => Weight::Quantized(QuantizedWeight {
                bytes: here(&quantized.bytes),
                ..quantized
            }),
        };
        (name.to_owned(), weight)
    });
    ComponentTensors::of_weights(weights.collect())
}

/// All components of a model by name, loaded with the CPU card, each in a part, and put on the device of the tests.
fn components_of<M: Model + ?Sized>(
    model: &M,
    part_of: &dyn Fn(&Component) -> Part,
) -> HashMap<String, Arc<ComponentTensors>> {
    let mut card = CpuCard::new(CpuSettings::default()).expect("a card");
    let mut components = HashMap::new();
    for component in model.components() {
        let plan = model.load_plan(&component.name).expect("a plan");
        assert_eq!(plan.bytes(), component.bytes, "{}", component.name);
        let part = part_of(component);
        card.load(component, plan, part, &mut |_| ControlFlow::Continue(()))
            .expect("a load");
        let mut tensors = card.tensors(&component.id).expect("tensors");
        if !test_device().is_cpu() {
            tensors = Arc::new(moved(&tensors));
        }
        components.insert(component.name.clone(), tensors);
    }
    components
}

/// A model with all components resident.
pub(crate) struct OpenModel<M: ?Sized = dyn Model> {
    pub(crate) model: Arc<M>,
    components: RefCell<HashMap<String, Arc<ComponentTensors>>>,
}

impl OpenModel {
    /// Opens a model of a family, loads it with the CPU card and puts it on the device of the tests.
    pub(crate) fn open(family: &str, path: &Path, precision: &Precision) -> OpenModel {
        let model = families().open(path, precision).expect("a sound model");
        assert_eq!(model.family(), family);
        OpenModel::of(model)
    }
}

impl<M: Model + ?Sized> OpenModel<M> {
    /// With the components of a model resident.
    pub(crate) fn of(model: Arc<M>) -> OpenModel<M> {
        OpenModel {
            components: RefCell::new(components_of(&*model, &|_| Part::WHOLE)),
            model,
        }
    }

    /// With the components of a model on the card in these parts, and the rest of their blocks streamed.
    pub(crate) fn in_parts(model: Arc<M>, part_of: &dyn Fn(&Component) -> Part) -> OpenModel<M> {
        OpenModel {
            components: RefCell::new(components_of(&*model, part_of)),
            model,
        }
    }

    /// Replaces the tensors of a component.
    pub(crate) fn replace(&self, name: &str, tensors: ComponentTensors) {
        let mut components = self.components.borrow_mut();
        components.insert(name.to_owned(), Arc::new(tensors));
    }

    /// The tensors of a component.
    pub(crate) fn tensors(&self, name: &str) -> Arc<ComponentTensors> {
        Arc::clone(&self.components.borrow()[name])
    }

    /// Runs one stage over those of the values that it takes, without the data of media that it does not read, and checks that
    /// it used only its named components and gave its named values.
    pub(crate) fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &Request,
        values: &Values,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        self.run_part(None, (plan, rung), request, values, observer)
    }

    /// The same, for this part of the stage where two run it together.
    pub(crate) fn run_part(
        &self,
        part: Option<u32>,
        (plan, rung): (&StagePlan, usize),
        request: &Request,
        values: &Values,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        let tensors = |name: &str| {
            assert!(plan.components.iter().any(|named| named == name), "{name}");
            Ok(self.tensors(name))
        };
        let taken = plan.takes.iter().filter_map(|taken| {
            let value = values.get(&taken.name)?;
            Some((taken.name.clone(), value.clone()))
        });
        let request = plan.request_for(request);
        let without_data = request.without_media_data();
        let stage = StageRun {
            plan,
            rung,
            request: match plan.reads_media {
                true => request,
                false => &without_data,
            },
            values: &taken.collect(),
            tensors: &tensors,
            device: test_device(),
            part,
        };
        let result = self.model.run(&stage, observer);
        if let Ok(given) = &result {
            let mut named: Vec<&String> = plan.gives.iter().collect();
            named.sort();
            assert!(given.keys().eq(named), "{} gave {:?}", plan.name, given.keys());
        }
        result
    }

    /// The stages of a valid request, with the memory of the previews that it asks for.
    pub(crate) fn stages(&self, request: &Request) -> Vec<StagePlan> {
        let plan = self.model.plan(request).expect("a valid request");
        plan.into_iter().map(StagePlan::with_previews).collect()
    }

    /// The stage with this name of a valid request.
    pub(crate) fn stage(&self, request: &Request, name: &str) -> StagePlan {
        let mut stages = self.stages(request).into_iter();
        stages.find(|stage| stage.name == name).expect("a stage")
    }

    /// Runs all stages but the decodes, and returns all values.
    pub(crate) fn sampled(
        &self,
        request: &Request,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        let mut values = Values::new();
        for plan in self.stages(request) {
            if plan.role != Role::Decode {
                let given = self.run(&plan, 0, request, &values, observer)?;
                values.extend(given);
            }
        }
        Ok(values)
    }

    /// Runs all stages but the decodes, and returns the final latent.
    pub(crate) fn latent(
        &self,
        request: &Request,
        observer: &mut dyn Observer,
    ) -> Result<HostTensor, StageError> {
        let mut values = self.sampled(request, observer)?;
        Ok(values.remove("latent").expect("a latent"))
    }
}

/// A host tensor of f32 as a tensor.
pub(crate) fn on_cpu(tensor: &HostTensor) -> Tensor {
    let numbers = tensor.data.as_chunks::<4>().0.iter();
    let numbers: Vec<f32> = numbers.map(|&bytes| f32::from_le_bytes(bytes)).collect();
    Tensor::from_vec(numbers, tensor.shape.as_slice(), &Device::Cpu).expect("a tensor")
}

/// Records delivered pieces.
#[derive(Default)]
pub(crate) struct Delivered(pub(crate) Vec<Piece>);

impl Observer for Delivered {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, piece: Piece) {
        self.0.push(piece);
    }
    fn cancelled(&self) -> bool {
        false
    }
}

/// Takes down how many passes were left out.
#[derive(Default)]
pub(crate) struct CountsPasses(pub(crate) Option<PassesLeftOut>);

impl Observer for CountsPasses {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
    fn left_out(&mut self, passes: PassesLeftOut) {
        self.0 = Some(passes);
    }
}

/// A request with passes that diffusers' first-block cache leaves out: an entry of `expected/step_cache.json`.
#[derive(serde::Deserialize)]
pub(crate) struct StepCacheCase {
    pub(crate) name: String,
    step_cache: f32,
    pub(crate) steps: u32,
    pub(crate) seed: u64,
    pub(crate) width: u32,
    pub(crate) height: u32,
    prompt: String,
    #[serde(default)]
    negative_prompt: Option<String>,
    #[serde(default)]
    true_guidance: f32,
    passes: u32,
    computed: u32,
}

impl StepCacheCase {
    /// A request of the case's size and steps, with its prompts and its step cache.
    pub(crate) fn of(&self, request: Request) -> Request {
        let request = Request {
            prompt: self.prompt.clone(),
            step_cache: self.step_cache,
            ..request
        };
        match &self.negative_prompt {
            None => request,
            Some(negative) => Request {
                negative_prompt: Some(negative.clone()),
                true_guidance: self.true_guidance,
                ..request
            },
        }
    }

    /// What the reference left out.
    pub(crate) fn left_out(&self) -> PassesLeftOut {
        PassesLeftOut {
            left_out: self.passes - self.computed,
            of: self.passes,
        }
    }
}

/// Wants every preview.
pub(crate) struct WantsPreviews;

impl Observer for WantsPreviews {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
}
