//! One run of a stage, as families compute it.

use candle_core::{DType, Device, Tensor};

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
        (self.model.parts().components.dtype(), self.run.device)
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

/// The values of a stage that returns one value.
pub(crate) fn named(name: &str, value: HostTensor) -> Values {
    Values::from([(name.to_owned(), value)])
}

/// The error for a stage that a family does not have.
pub(crate) fn unknown(name: &str) -> StageError {
    StageError::BadInput(format!("there is no stage {name}"))
}
