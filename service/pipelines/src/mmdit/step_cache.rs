//! Passes that are left out: the first-block cache.

use std::cell::RefCell;

use candle_core::{DType, Device, Result, Tensor};
use ops::Gate;

use super::buffers::{Next, Part};
use crate::{PassesLeftOut, Request};

/// What a sampling keeps of the last pass that it computed, under one condition, to leave out passes that hardly differ from it.
///
/// The first block of every pass is computed. If what it adds to the residual of the wanted rows has changed less than asked since the
/// last pass that was computed in full, relative to it, the other blocks are left out: they are taken to add what they added then.
/// This is the `FirstBlockCacheConfig` of diffusers, without a bound on how many passes are left out in a row: since a change is
/// measured from the last pass that was computed, it grows until one is computed again.
pub(crate) struct StepCache {
    /// The change up to which a pass is left out.
    most: f64,
    /// What the first block added, `[batch, rows, width]`.
    of_first: Tensor,
    /// What all other blocks added.
    of_others: Tensor,
    /// The residual before the first block, then after it.
    before: Tensor,
    /// -1 for each column.
    minus: Tensor,
    is_filled: bool,
    passes: PassesLeftOut,
}

/// The cache of the condition under which a pass predicts; `None`: every pass is computed.
pub(crate) type CacheOfPass<'a> = Option<&'a RefCell<StepCache>>;

impl StepCache {
    /// A cache for passes whose wanted rows are `[batch, rows, width]`; `None` if the request leaves nothing out.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn of(
        request: &Request,
        shape: (usize, usize, usize),
        (dtype, device): (DType, &Device),
    ) -> Result<Option<StepCache>> {
        if request.step_cache <= 0.0 {
            return Ok(None);
        }
        let rows = || Tensor::zeros(shape, dtype, device);
        let minus = Tensor::full(-1.0_f32, (1, shape.2), &Device::Cpu)?;
        Ok(Some(StepCache {
            most: request.step_cache.into(),
            of_first: rows()?,
            of_others: rows()?,
            before: rows()?,
            minus: minus.to_dtype(dtype)?.to_device(device)?,
            is_filled: false,
            passes: PassesLeftOut::default(),
        }))
    }

    /// Predicted bytes of the caches of a request, for `conditions` conditions with so many wanted rows of this width.
    pub(crate) fn bytes(
        request: &Request,
        conditions: u32,
        (rows, width): (usize, usize),
        dtype: DType,
    ) -> u64 {
        if request.step_cache <= 0.0 {
            return 0;
        }
        let one = ops::allocated(rows * width * dtype.size_in_bytes());
        let minus = ops::allocated(width * dtype.size_in_bytes());
        u64::from(conditions) * (3 * one + minus)
    }

    /// The passes that were left out so far.
    pub(crate) fn passes(&self) -> PassesLeftOut {
        self.passes
    }

    /// A pass begins: its wanted rows are embedded.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn begin(&mut self, wanted: &Part) -> Result<()> {
        self.passes.of += 1;
        ops::copy_rows(&wanted.hidden, &self.before)
    }

    /// The first block is computed. If the others are left out, completes the wanted rows, normalized for `last`, and returns `true`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn leaves_out(&mut self, wanted: &Part, last: &Next) -> Result<bool> {
        let hidden = &wanted.hidden;
        if self.is_filled && ops::relative_change(hidden, &self.before, &self.of_first)? <= self.most {
            ops::add_residual(hidden, &self.of_others, None)?;
            wanted.enter(last)?;
            self.passes.left_out += 1;
            return Ok(true);
        }
        self.keep_change(hidden, &self.of_first)?;
        ops::copy_rows(hidden, &self.before)?;
        Ok(false)
    }

    /// All blocks are computed.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn end(&mut self, wanted: &Part) -> Result<()> {
        self.keep_change(&wanted.hidden, &self.of_others)?;
        self.is_filled = true;
        Ok(())
    }

    /// Writes what was added to the residual since it was `before`.
    fn keep_change(&self, hidden: &Tensor, to: &Tensor) -> Result<()> {
        ops::copy_rows(hidden, to)?;
        ops::add_residual(to, &self.before, Some(Gate::from(&self.minus)))
    }
}
