//! What depends on the times of steps alone: their embedding, the modulations of all blocks, and that of the last norm.

use candle_core::{DType, Device, Result, Tensor};
use gpu::MissingTensor;
use ops::Nonlinearity;

use super::blocks::Block;
use super::buffers::{Buffers, Next, Part};
use super::modulation::{BlockModulation, Modulations, Tables};
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::mmdit::{SINUSOIDS, TwoLayers};

/// Tokens of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Tokens of a picture that the film begins with, which are seen and not sampled.
    pub first: usize,
    /// Tokens that are sampled.
    pub sampled: usize,
}

impl TokenCounts {
    /// The number of all tokens.
    pub fn all(&self) -> usize {
        self.first + self.sampled
    }

    /// The parts of buffers that have a time of their own: the picture's tokens, if there are any, and the sampled ones.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn parts(&self, buffers: &Buffers) -> Result<Vec<Part>> {
        let sampled = buffers.part(self.first, self.sampled)?;
        Ok(match self.first {
            0 => vec![sampled],
            first => vec![buffers.part(0, first)?, sampled],
        })
    }
}

/// The embedded times of all steps, and zero after them.
pub struct Times {
    /// `[steps + 1, width]`.
    embedded: Tensor,
    /// `[steps + 1, 6 width]`.
    projected: Tensor,
}

/// The layers that times pass through, and the tables that are added to them.
pub(crate) struct TimeLayers {
    embedder: TwoLayers,
    projection: Linear,
    tables: Tables,
    /// Shift and scale of the last norm, `[1, 2, width]`.
    last_table: Tensor,
}

/// The modulations of one step.
pub(crate) struct StepModulations {
    /// Of the sampled tokens.
    sampled: Modulations,
    /// Of a picture's tokens, whose time is zero; `None` without a picture.
    first: Option<Modulations>,
    /// Shift and scale of the last norm, `[1, width]` each.
    last: [Tensor; 2],
}

impl TimeLayers {
    /// The layers of a transformer of so many blocks, with the tensors whose names begin with `place`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        place: &str,
        blocks: usize,
        width: usize,
    ) -> std::result::Result<TimeLayers, MissingTensor> {
        let embedder = format!("{place}condition_embedder.time_embedder");
        let projection = format!("{place}condition_embedder.time_proj");
        let tables = (0..blocks).map(|block| format!("{place}blocks.{block}.scale_shift_table"));
        Ok(TimeLayers {
            embedder: TwoLayers::new(tensors, &embedder, (SINUSOIDS, width), Nonlinearity::Silu)?,
            projection: Linear::new(tensors, &projection, width, 6 * width)?,
            tables: Tables::new(tensors, tables, width)?,
            last_table: tensors.shaped(&format!("{place}scale_shift_table"), &[1, 2, width])?,
        })
    }

    /// The embedded times of the steps, and of zero after them, by their sinusoids, `[steps + 1, 256]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn times(&self, sinusoids: &Tensor) -> Result<Times> {
        let embedded = self.embedder.forward(sinusoids)?;
        let activated = embedded.copy()?;
        ops::activate(&activated, Nonlinearity::Silu)?;
        Ok(Times {
            projected: self.projection.forward(&activated)?,
            embedded,
        })
    }

    /// Memory for the modulations of a step over these tokens.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn modulations(
        &self,
        counts: TokenCounts,
        (dtype, device): (DType, &Device),
    ) -> Result<StepModulations> {
        let of_blocks = || self.tables.modulations((dtype, device));
        let vector = || Tensor::zeros((1, self.last_table.dim(2)?), dtype, device);
        Ok(StepModulations {
            sampled: of_blocks()?,
            first: (counts.first > 0).then(of_blocks).transpose()?,
            last: [vector()?, vector()?],
        })
    }

    /// Sets the modulations to those of a step, from 0.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn set(&self, modulations: &StepModulations, times: &Times, step: usize) -> Result<()> {
        let projected = &times.projected;
        self.tables
            .set(&modulations.sampled, &projected.narrow(0, step, 1)?)?;
        if let Some(first) = &modulations.first {
            let zero = projected.dim(0)? - 1;
            self.tables.set(first, &projected.narrow(0, zero, 1)?)?;
        }
        let time = times.embedded.narrow(0, step, 1)?;
        for (part, vector) in modulations.last.iter().enumerate() {
            ops::copy_rows(&self.last_table.narrow(1, part, 1)?.squeeze(0)?, vector)?;
            ops::add_residual(vector, &time, None)?;
        }
        Ok(())
    }
}

impl StepModulations {
    /// Those of a block, for each part of [`TokenCounts::parts`].
    ///
    /// # Errors
    /// When there is no such block.
    pub(crate) fn of_block(&self, number: usize) -> Result<Vec<BlockModulation>> {
        let of_parts = self.first.iter().chain([&self.sampled]);
        of_parts.map(|part| part.of_block(number)).collect()
    }

    /// The norms of the parts at the beginning of a block, whose number this is, or after the last one. `rows` are its normalized rows.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn norms<'b>(
        &self,
        number: usize,
        block: Option<&'b Block>,
        rows: &Tensor,
    ) -> Result<Vec<Next<'b>>> {
        let Some(block) = block else {
            let [shift, scale] = &self.last;
            let of_parts = self.first.iter().chain([&self.sampled]);
            let last = of_parts.map(|_| Next {
                affine: None,
                modulation: Some((shift.clone(), scale.clone())),
                as_codes: false,
            });
            return Ok(last.collect());
        };
        let modulations = self.of_block(number)?;
        modulations.iter().map(|part| block.first(part, rows)).collect()
    }
}
