//! A card whose loads and unloads a test observes or replaces.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::{DType, Device};
use gpu::{
    CardDescription, CardSpeeds, ComponentTensors, FaultAction, Gpu, GpuError, LoadError, LoadPlan,
    LoadProgress, Unloaded,
};
use residency::{Bytes, Component, ComponentId, DriverTruth, Part};

/// A test's handling of the calls of a card.
pub(crate) trait Watch<G: Gpu> {
    /// Loads a component, or does something else.
    fn load(
        &mut self,
        card: &mut G,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        card.load(component, plan, part, progress)
    }

    /// Reads a component into the machine's memory, or does something else.
    fn read_on_host(
        &mut self,
        card: &mut G,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        card.read_on_host(plan, progress)
    }

    /// Unloads a component, or does something else.
    fn unload(&mut self, card: &mut G, id: &ComponentId) -> Result<Unloaded, GpuError> {
        card.unload(id)
    }

    /// Sees the card after a call that may have changed its memory: `load vae`, `read 10 MiB`, `unload vae`, `trim`,
    /// `reserve 64 MiB`.
    fn after(&mut self, _card: &G, _call: String) {}

    /// Sees the card after a reading of its memory.
    fn after_reading(&mut self, _card: &G) {}
}

/// A card and its observer.
pub(crate) struct Watched<G, W> {
    pub(crate) card: G,
    pub(crate) watch: W,
}

impl<G: Gpu, W: Watch<G>> Gpu for Watched<G, W> {
    fn describe(&self) -> &CardDescription {
        self.card.describe()
    }
    fn device(&self) -> &Device {
        self.card.device()
    }
    fn compute_dtype(&self) -> DType {
        self.card.compute_dtype()
    }
    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        let truth = self.card.memory();
        self.watch.after_reading(&self.card);
        truth
    }
    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let result = self.watch.load(&mut self.card, component, plan, part, progress);
        self.watch.after(&self.card, format!("load {}", component.id));
        result
    }
    fn resize(
        &mut self,
        component: &Component,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let result = self.card.resize(component, part, progress);
        self.watch.after(&self.card, format!("resize {}", component.id));
        result
    }
    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        self.card.tensors(id)
    }
    fn read_on_host(
        &mut self,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        let result = self.watch.read_on_host(&mut self.card, plan, progress);
        let failed = result.as_ref().err().map(|error| format!(": {error}"));
        let call = format!("read {}{}", plan.bytes(), failed.unwrap_or_default());
        self.watch.after(&self.card, call);
        result
    }
    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        let result = self.watch.unload(&mut self.card, id);
        self.watch.after(&self.card, format!("unload {id}"));
        result
    }
    fn trim(&mut self) -> Result<Bytes, GpuError> {
        let result = self.card.trim();
        self.watch.after(&self.card, "trim".to_owned());
        result
    }
    fn reserve_scratch(&mut self, bytes: Bytes) -> Result<(), GpuError> {
        let result = self.card.reserve_scratch(bytes);
        self.watch.after(&self.card, format!("reserve {bytes}"));
        result
    }
    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        self.card.largest_allocation(enough)
    }
    fn begin_stage(&mut self) {
        self.card.begin_stage();
    }
    fn expect_passes_of(&mut self, flops: u64) {
        self.card.expect_passes_of(flops);
    }
    fn speeds(&self) -> CardSpeeds {
        self.card.speeds()
    }
    fn stage_peak(&mut self) -> Bytes {
        self.card.stage_peak()
    }
    fn fault_at(&mut self, place: &str) -> Option<FaultAction> {
        self.card.fault_at(place)
    }
}
