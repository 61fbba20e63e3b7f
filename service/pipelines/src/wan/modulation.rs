//! The modulations of all blocks in a step: what a time is projected to, plus the table of each block. They are computed before
//! the blocks run, for each distinct time of the step: never for each token.

use candle_core::{DType, Device, Result, Tensor};
use gpu::MissingTensor;

use crate::adapters::AdaptedTensors;

/// Vectors of a block: shift, scale and gate around attention, then around the feed-forward.
const OF_BLOCK: usize = 6;

/// The learned tables of all blocks, by vector: `[blocks, width]` each.
pub(crate) struct Tables(Vec<Tensor>);

impl Tables {
    /// The tables under `{block}.{table}`, `[1, 6, width]` each.
    ///
    /// # Errors
    /// The first table that is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        names: impl Iterator<Item = String>,
        width: usize,
    ) -> std::result::Result<Tables, MissingTensor> {
        let tables = names.map(|name| tensors.shaped(&name, &[1, OF_BLOCK, width]));
        Ok(Tables(tables.collect::<std::result::Result<_, _>>()?))
    }

    fn width(&self) -> Result<usize> {
        self.0.first().map_or(Ok(0), |table| table.dim(2))
    }

    /// Memory for the modulations of a step.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn modulations(&self, (dtype, device): (DType, &Device)) -> Result<Modulations> {
        let shape = (OF_BLOCK, self.0.len(), self.width()?);
        Ok(Modulations(Tensor::zeros(shape, dtype, device)?))
    }

    /// Bytes of [`Tables::modulations`].
    pub(crate) fn bytes(blocks: usize, width: usize, dtype: DType) -> u64 {
        (OF_BLOCK * blocks * width * dtype.size_in_bytes()) as u64
    }

    /// Sets the modulations to those of a time that is projected to `projected`, `[1, 6 width]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn set(&self, modulations: &Modulations, projected: &Tensor) -> Result<()> {
        let width = self.width()?;
        for (block, table) in self.0.iter().enumerate() {
            let of_block = modulations.0.narrow(1, block, 1)?.squeeze(1)?;
            ops::copy_rows(&table.squeeze(0)?, &of_block)?;
        }
        for vector in 0..OF_BLOCK {
            let of_blocks = modulations.0.narrow(0, vector, 1)?.squeeze(0)?;
            let of_time = projected.narrow(1, vector * width, width)?;
            ops::add_residual(&of_blocks, &of_time, None)?;
        }
        Ok(())
    }
}

/// The modulations of all blocks at one time, `[6, blocks, width]`.
#[derive(Clone, Debug)]
pub(crate) struct Modulations(Tensor);

impl Modulations {
    /// Those of one block.
    ///
    /// # Errors
    /// When there is no such block.
    pub(crate) fn of_block(&self, block: usize) -> Result<BlockModulation> {
        Ok(BlockModulation(self.0.narrow(1, block, 1)?))
    }
}

/// The modulation of a block at one time, `[6, 1, width]`.
#[derive(Clone, Debug)]
pub(crate) struct BlockModulation(Tensor);

impl BlockModulation {
    fn vector(&self, number: usize) -> Result<Tensor> {
        self.0.narrow(0, number, 1)?.squeeze(0)
    }

    /// Shift and scale before attention.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn before_attention(&self) -> Result<(Tensor, Tensor)> {
        Ok((self.vector(0)?, self.vector(1)?))
    }

    /// The gate of attention.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn attention_gate(&self) -> Result<Tensor> {
        self.vector(2)
    }

    /// Shift and scale before the feed-forward.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn before_feed_forward(&self) -> Result<(Tensor, Tensor)> {
        Ok((self.vector(3)?, self.vector(4)?))
    }

    /// The gate of the feed-forward.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn feed_forward_gate(&self) -> Result<Tensor> {
        self.vector(5)
    }
}
