//! A model with components and without stages, for tests of components.

use gpu::LoadPlan;
use model::{
    Image, Medium, Model, ModelFile, ModelParts, Observer, Precision, Reads, Request, RequestError,
    StageError, StagePlan, StageRun, ValueShape, Values,
};
use residency::Component;

pub(crate) struct IdleModel(ModelParts);

impl IdleModel {
    pub(crate) fn new(precision: &Precision) -> IdleModel {
        let defaults = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        IdleModel(ModelParts::new("idle", defaults, &["transformer"], precision))
    }

    /// With a further component, which is one file.
    pub(crate) fn with(mut self, component: Component, plan: LoadPlan, file: ModelFile) -> IdleModel {
        self.0.push(component, plan, vec![file]);
        self
    }
}

impl Model for IdleModel {
    fn parts(&self) -> &ModelParts {
        &self.0
    }
    fn reads(&self) -> Reads {
        Reads::NOTHING
    }
    fn stages_of(&self, _request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
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
