//! A model that has components and runs nothing, for tests of what becomes of the components.

use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use gpu::{ComponentTensors, LoadPlan};
use pipelines::{
    Defaults, ImageRequest, Model, Observer, RequestError, StageError, StageInput, StageKind, StageOutput,
    StagePlan,
};
use residency::Component;

pub(crate) struct IdleModel {
    pub(crate) components: Vec<Component>,
    /// The file of each component.
    pub(crate) files: Vec<Arc<Path>>,
    /// Of the first.
    pub(crate) plan: Option<LoadPlan>,
}

impl Model for IdleModel {
    fn family(&self) -> &'static str {
        "idle"
    }
    fn defaults(&self) -> Defaults {
        Defaults {
            steps: 1,
            guidance: 0.0,
            max_sequence_length: 1,
            width: 16,
            height: 16,
        }
    }
    fn components(&self) -> &[Component] {
        &self.components
    }
    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        let first = self.components.first()?;
        self.plan.as_ref().filter(|_| first.name == component_name)
    }
    fn files_of(&self, component_name: &str) -> Vec<Arc<Path>> {
        let own = self.components.iter().zip(&self.files);
        own.filter(|(component, _)| component.name == component_name)
            .map(|(_, file)| file.clone())
            .collect()
    }
    fn validate(&self, _request: &ImageRequest) -> Result<(), Vec<RequestError>> {
        Ok(())
    }
    fn stages(&self, _request: &ImageRequest) -> Vec<StagePlan> {
        Vec::new()
    }
    fn lone_stage(&self, kind: StageKind, _width: u32, _height: u32) -> StagePlan {
        StagePlan {
            kind,
            components: Vec::new(),
            rungs: Vec::new(),
            shape: String::new(),
            steps: 1,
        }
    }
    fn text_key(&self, _request: &ImageRequest) -> Result<String, RequestError> {
        Ok(String::new())
    }
    fn latent_shape(&self, _width: u32, _height: u32) -> Vec<usize> {
        Vec::new()
    }
    fn run(
        &self,
        _plan: &StagePlan,
        _rung: usize,
        _request: &ImageRequest,
        _input: &StageInput,
        _tensors: &dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
        _device: &Device,
        _observer: &mut dyn Observer,
    ) -> Result<StageOutput, StageError> {
        Err(StageError::Cancelled)
    }
}
