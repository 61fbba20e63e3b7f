//! Folders that tests may modify, and models with their components on the device of the tests. Shared by the parity tests of
//! all families.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use gpu::{ComponentTensors, CpuCard, CpuSettings, Gpu, QuantizedWeight, Weight};
use pipelines::Model;

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
