//! A model with components and without stages, for tests of components.

use gpu::LoadPlan;
use pipelines::{
    Formats, Image, Medium, Model, ModelFile, Observer, Request, RequestError, StageError, StagePlan,
    StageRun, ValueShape, Values,
};
use residency::Component;

pub(crate) struct IdleModel {
    pub(crate) components: Vec<Component>,
    pub(crate) formats: Formats,
    /// The file of each component.
    pub(crate) files: Vec<ModelFile>,
    /// Load plan of the first component.
    pub(crate) plan: Option<LoadPlan>,
}

impl Model for IdleModel {
    fn family(&self) -> &'static str {
        "idle"
    }
    fn defaults(&self) -> Request {
        Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1)
    }
    fn components(&self) -> &[Component] {
        &self.components
    }
    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        let first = self.components.first()?;
        self.plan.as_ref().filter(|_| first.name == component_name)
    }
    fn large_components(&self) -> &[&str] {
        &["transformer"]
    }

    fn formats(&self) -> &Formats {
        &self.formats
    }

    fn files_of(&self, component_name: &str) -> Vec<ModelFile> {
        let own = self.components.iter().zip(&self.files);
        own.filter(|(component, _)| component.name == component_name)
            .map(|(_, file)| file.clone())
            .collect()
    }
    fn plan(&self, _request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        Ok(Vec::new())
    }
    fn request_of(&self, _values: &[ValueShape]) -> Option<Request> {
        None
    }
    fn smaller(&self, _request: &Request) -> Vec<(String, Request)> {
        Vec::new()
    }
    fn smallest(&self) -> Request {
        self.defaults()
    }
    fn run(&self, _stage: &StageRun<'_>, _observer: &mut dyn Observer) -> Result<Values, StageError> {
        Err(StageError::Cancelled)
    }
}
