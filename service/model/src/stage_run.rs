//! One run of a stage: its inputs, and its observer.

use std::sync::Arc;

use gpu::ComponentTensors;
use serde::{Deserialize, Serialize};

use crate::errors::StageError;
use crate::host::HostTensor;
use crate::media::Piece;
use crate::plan::{StagePlan, Values};
use crate::request::Request;

/// Receives a stage's progress and results, and cancels it.
pub trait Observer {
    /// Reports that step `n` of `of` is done.
    fn step(&mut self, n: u32, of: u32);
    /// Whether a preview is wanted now (throttled by the implementation).
    fn wants_preview(&mut self) -> bool;
    /// Receives a preview: RGB, 8 bits each.
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>);
    /// Receives the next piece of the result. A slow stage delivers pieces as they are ready: they are progress too.
    fn deliver(&mut self, piece: Piece);
    /// Polled between steps and between slow layers: `true` makes the stage fail with [`StageError::Cancelled`].
    fn cancelled(&self) -> bool;
    /// Ends a stage that is cancelled.
    ///
    /// # Errors
    /// [`StageError::Cancelled`].
    fn check_cancelled(&self) -> Result<(), StageError> {
        match self.cancelled() {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        }
    }
    /// Sends the other card that runs the stage what it needs to write to this one, and waits for the same of it.
    ///
    /// # Errors
    /// [`StageError::BadInput`] if no other card runs the stage; [`StageError::Cancelled`] once it has ended.
    fn meet(&mut self, _offer: &[u8]) -> Result<Vec<u8>, StageError> {
        Err(StageError::BadInput("no other card runs this stage".to_owned()))
    }
    /// Reports how many of the passes over its blocks the stage has left out ([`Request::step_cache`]).
    fn left_out(&mut self, _passes: PassesLeftOut) {}
    /// As [`Observer::step`], for one of several stages in shared passes: `_stage` is its place among them.
    fn step_of(&mut self, _stage: usize, n: u32, of: u32) {
        self.step(n, of);
    }
    /// As [`Observer::cancelled`], for one of several stages in shared passes: a cancelled stage leaves them, and the others
    /// continue.
    fn is_cancelled(&self, _stage: usize) -> bool {
        self.cancelled()
    }
}

/// Passes over the blocks of a model that a stage has left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassesLeftOut {
    pub left_out: u32,
    /// All passes, those included.
    pub of: u32,
}

/// An observer that discards everything and never cancels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
}

/// Inputs of one run of a stage.
#[derive(Clone, Copy)]
pub struct StageRun<'a> {
    pub plan: &'a StagePlan,
    /// Index into [`StagePlan::rungs`].
    pub rung: usize,
    /// The request, with the seed of the item.
    pub request: &'a Request,
    /// The stage's input values.
    pub values: &'a Values,
    /// Looks up the tensors of a component by name.
    pub tensors: &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    /// Device of the tensors, and of the computation.
    pub device: &'a candle_core::Device,
    /// The part of this card, from 0, where [`Request::cards`] cards run the stage together; `None`: it runs alone.
    pub part: Option<u32>,
}

impl StageRun<'_> {
    /// The layers of whose weights its rung keeps copies ([`Rung::copies`](crate::Rung::copies)).
    pub fn copied(&self) -> &[String] {
        self.plan.rungs.get(self.rung).map_or(&[], |rung| &rung.copies)
    }

    /// A value by name, or `None` if the stage does not take it.
    ///
    /// # Errors
    /// As [`StageRun::value`], if the stage takes it.
    pub fn value_if_taken(&self, name: &str) -> Result<Option<&HostTensor>, StageError> {
        let is_taken = self.plan.takes.iter().any(|taken| taken.name == name);
        is_taken.then(|| self.value(name)).transpose()
    }

    /// An input value by name.
    ///
    /// # Errors
    /// [`StageError::BadInput`] if it is missing, or of another shape than planned.
    pub fn value(&self, name: &str) -> Result<&HostTensor, StageError> {
        let value = self.values.get(name);
        let value = value.ok_or_else(|| {
            StageError::BadInput(format!("{} takes {name}, which is not there", self.plan.name))
        })?;
        let taken = self.plan.takes.iter().find(|taken| taken.name == name);
        match taken {
            Some(taken) if taken.shape != value.shape => Err(StageError::BadInput(format!(
                "{name} of shape {:?} where {:?} is expected",
                value.shape, taken.shape
            ))),
            _ => Ok(value),
        }
    }
}
