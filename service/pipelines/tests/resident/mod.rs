//! Folders that tests may modify, and models with their components on the device of the tests. Shared by the parity tests of
//! all families.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use gpu::{ComponentTensors, CpuCard, CpuSettings, Gpu, QuantizedWeight, Weight};
use pipelines::{HostTensor, Model, Observer, Piece, Request, StageError, StagePlan, StageRun, Values};

use crate::device::{here, test_device};

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

/// All components of a model by name, loaded with the CPU card and put on the device of the tests.
pub(crate) fn components_of(model: &dyn Model) -> HashMap<String, Arc<ComponentTensors>> {
    let mut card = CpuCard::new(CpuSettings::default()).expect("a card");
    let mut components = HashMap::new();
    for component in model.components() {
        let plan = model.load_plan(&component.name).expect("a plan");
        assert_eq!(plan.bytes(), component.bytes, "{}", component.name);
        card.load(component, plan, &mut |_| ControlFlow::Continue(()))
            .expect("a load");
        let mut tensors = card.tensors(&component.id).expect("tensors");
        if !test_device().is_cpu() {
            tensors = Arc::new(moved(&tensors));
        }
        components.insert(component.name.clone(), tensors);
    }
    components
}

/// Runs one stage over those of the values that it takes, without the data of media that it does not read, and checks that it
/// used only its named components and gave its named values.
pub(crate) fn run_stage(
    (model, components): (&dyn Model, &HashMap<String, Arc<ComponentTensors>>),
    (plan, rung): (&StagePlan, usize),
    request: &Request,
    values: &Values,
    observer: &mut dyn Observer,
) -> Result<Values, StageError> {
    let tensors = |name: &str| {
        assert!(plan.components.iter().any(|named| named == name), "{name}");
        Ok(Arc::clone(&components[name]))
    };
    let taken = plan.takes.iter().filter_map(|taken| {
        let value = values.get(&taken.name)?;
        Some((taken.name.clone(), value.clone()))
    });
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
    };
    let result = model.run(&stage, observer);
    if let Ok(given) = &result {
        assert!(
            given.keys().eq(plan.gives.iter()),
            "{}: {:?}",
            plan.name,
            given.keys()
        );
    }
    result
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
