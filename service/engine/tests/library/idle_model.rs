//! A model with components, whose stages compute nothing, for tests of components.

use std::sync::Arc;

use gpu::LoadPlan;
use model::{
    Image, Medium, Model, ModelFile, ModelParts, Observer, Precision, Reads, Request, RequestError,
    StageError, StagePlan, StageRun, ValueShape, Values,
};
use residency::Component;

pub(crate) struct IdleModel {
    parts: ModelParts,
    /// What happens while a stage runs. Without it stages fail.
    meanwhile: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl IdleModel {
    pub(crate) fn new(precision: &Precision) -> IdleModel {
        let defaults = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        IdleModel {
            parts: ModelParts::new("idle", defaults, &["transformer"], precision),
            meanwhile: None,
        }
    }

    /// With something that happens while a stage runs.
    pub(crate) fn meanwhile(mut self, happens: Arc<dyn Fn() + Send + Sync>) -> IdleModel {
        self.meanwhile = Some(happens);
        self
    }

    /// With a further component, which is one file.
    pub(crate) fn with(mut self, component: Component, plan: LoadPlan, file: ModelFile) -> IdleModel {
        self.parts.push(component, plan, vec![file]);
        self
    }
}

impl Model for IdleModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
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
        let happens = self.meanwhile.as_ref().ok_or(StageError::Cancelled)?;
        happens();
        Ok(Values::new())
    }
}
