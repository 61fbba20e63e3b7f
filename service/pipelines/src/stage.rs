//! One run of a stage, as families compute it.

use candle_core::{DType, Device, Tensor};

use crate::adapters::AttachedAdapters;
use crate::sampling::{Conditions, Prediction, SampledLatent};
use crate::shared_stage::OtherCard;
use crate::tensors::from_host;
use crate::{HostTensor, Model, Observer, StageError, StageRun, Values};

/// A stage of one request, with a family's model.
pub(crate) struct Stage<'a, M> {
    pub(crate) model: &'a M,
    /// Inputs of the stage.
    pub(crate) run: StageRun<'a>,
    /// Receives progress and results.
    pub(crate) observer: &'a mut dyn Observer,
}

impl<'a, M: Model> Stage<'a, M> {
    pub(crate) fn new(model: &'a M, run: &StageRun<'a>, observer: &'a mut dyn Observer) -> Stage<'a, M> {
        Stage {
            model,
            run: *run,
            observer,
        }
    }

    /// The dtype and the device in which the model computes.
    pub(crate) fn on(&self) -> (DType, &'a Device) {
        (self.model.parts().dtype(), self.run.device)
    }

    /// A value of the stage on the device, in the dtype of the model.
    pub(crate) fn value(&self, name: &str) -> Result<Tensor, StageError> {
        let (dtype, device) = self.on();
        from_host(self.run.value(name)?, name, dtype, device)
    }

    /// A value of the stage in host memory, f32.
    pub(crate) fn host_value(&self, name: &str) -> Result<Tensor, StageError> {
        from_host(self.run.value(name)?, name, DType::F32, &Device::Cpu)
    }
}

impl<M> Stage<'_, M> {
    /// Makes step `step`, from 0, of a sampling by the velocity that the transformer of this name predicts, and reports it. Returns
    /// the latent that is shown as a preview, f32 in host memory, if one is wanted.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; errors of the device.
    pub(crate) fn advance(
        &mut self,
        step: usize,
        latent: &mut SampledLatent,
        velocity: &Prediction<'_>,
        by: (&str, &AttachedAdapters),
    ) -> Result<Option<Tensor>, StageError> {
        let may_show = self.make_step(step, latent, velocity, by)?;
        let is_shown = may_show && self.observer.wants_preview();
        Ok(is_shown.then(|| latent.end_of(step, velocity)).transpose()?)
    }
}

impl<M> Stage<'_, M> {
    /// As [`Stage::advance`], of a latent of whose `tokens` another card has the other half. It is the whole latent that is shown.
    ///
    /// # Errors
    /// As there; [`StageError::Cancelled`].
    pub(crate) fn advance_beside(
        &mut self,
        other: &OtherCard,
        (step, tokens): (usize, usize),
        latent: &mut SampledLatent,
        velocity: &Prediction<'_>,
        by: (&str, &AttachedAdapters),
    ) -> Result<Option<Tensor>, StageError> {
        // A card whose other one has died would wait for it here, and could not be cancelled.
        other.wait_for_work(&*self.observer)?;
        if !self.make_step(step, latent, velocity, by)? {
            return Ok(None);
        }
        // Each card knows for itself whether it shows the step, so both gather it.
        let whole = other.gathered(&latent.end_on_device(step, velocity)?, tokens)?;
        if !self.observer.wants_preview() {
            return Ok(None);
        }
        other.wait_for_work(&*self.observer)?;
        Ok(Some(whole.to_device(&Device::Cpu)?))
    }

    /// Makes a step and reports it. Returns whether its state may be shown.
    fn make_step(
        &mut self,
        step: usize,
        latent: &mut SampledLatent,
        velocity: &Prediction<'_>,
        (transformer, adapters): (&str, &AttachedAdapters),
    ) -> Result<bool, StageError> {
        let steps = latent.steps();
        let advanced = latent.advance(step, velocity, transformer);
        advanced.map_err(|error| adapters.named_as_cause(error))?;
        self.observer.step(step as u32 + 1, steps as u32);
        Ok(self.run.request.preview && step + 1 < steps)
    }

    /// Reports the passes that a sampling under these conditions left out, if the request asks for that.
    pub(crate) fn report_left_out<C>(&mut self, conditions: &Conditions<C>) {
        if let Some(passes) = conditions.left_out() {
            self.observer.left_out(passes);
        }
    }
}

/// The values of a stage that returns one value.
pub(crate) fn named(name: &str, value: HostTensor) -> Values {
    Values::from([(name.to_owned(), value)])
}

/// The error for a stage that a family does not have.
pub(crate) fn unknown(name: &str) -> StageError {
    StageError::BadInput(format!("there is no stage {name}"))
}
