//! All blocks of a transformer, and one pass through them.

use std::cell::RefCell;

use candle_core::{DType, Result, Tensor};
use gpu::{MissingTensor, WeightStream};

use super::blocks::{DoubleBlock, Modulator, SingleBlock, StreamModulation};
use super::buffers::{Added, Apart, Buffers, Layers, Next, Part};
use super::shape::{BlocksShape, Design};
use super::step_cache::CacheOfPass;
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::Rotations;

/// The blocks over resident tensors. They hold handles only, and allocate nothing.
pub(crate) struct Blocks {
    pub(crate) shape: BlocksShape,
    double: Vec<DoubleBlock>,
    single: Vec<SingleBlock>,
    /// The modulators of all blocks, where blocks have none of their own.
    shared: Option<SharedModulators>,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

/// The modulators that all blocks of a kind share: `Flux2Modulation`.
struct SharedModulators {
    picture: Modulator,
    text: Modulator,
    single: Modulator,
}

impl SharedModulators {
    fn new(
        shape: &BlocksShape,
        tensors: &AdaptedTensors<'_>,
    ) -> std::result::Result<SharedModulators, MissingTensor> {
        let modulator = |name: &str, parts| Modulator::new(tensors, name, shape, parts);
        Ok(SharedModulators {
            picture: modulator("double_stream_modulation_img.linear", 6)?,
            text: modulator("double_stream_modulation_txt.linear", 6)?,
            single: modulator("single_stream_modulation.linear", 3)?,
        })
    }
}

/// The modulation of every block for every step. In FLUX.1 it comes from a quarter of the weights, which are only used here; in
/// FLUX.2 all blocks of a kind have the same.
pub(crate) struct Modulations {
    double: Vec<(StreamModulation, StreamModulation)>,
    single: Vec<Vec<Tensor>>,
}

/// A block, by its place among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockPlace {
    Double(usize),
    Single(usize),
}

/// Additions to the blocks of a pass, and observers of their results.
pub(crate) trait BlockHook {
    /// The terms that are added to the residual of the generated tokens after a block.
    fn added(&self, _block: BlockPlace) -> Vec<Added<'_>> {
        Vec::new()
    }

    /// Called after every block, when the residual is complete.
    ///
    /// # Errors
    /// Errors of the hook.
    fn after_block(&mut self, _block: BlockPlace, _buffers: &Buffers) -> std::result::Result<(), StageError> {
        Ok(())
    }
}

/// No additions and no observers.
pub(crate) struct NoHook;

impl BlockHook for NoHook {}

/// Inputs of one pass through the blocks.
pub(crate) struct Pass<'a> {
    /// Buffers whose residual streams are embedded already.
    pub(crate) buffers: &'a Buffers,
    pub(crate) modulations: &'a Modulations,
    /// The rotations of all tokens: text, then generated tokens.
    pub(crate) rotations: &'a Rotations,
    /// The row of the modulations.
    pub(crate) step: usize,
    /// Rows of the pictures that take another one. For designs without single blocks.
    pub(crate) apart: Option<Apart>,
    /// The rows that are needed after the last block.
    pub(crate) wanted: &'a Part,
    /// The norm of these rows.
    pub(crate) last: &'a Next,
    /// Leaves out the blocks after the first where little changes.
    pub(crate) cache: CacheOfPass<'a>,
}

impl Blocks {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(
        shape: BlocksShape,
        tensors: &AdaptedTensors<'_>,
    ) -> std::result::Result<Blocks, MissingTensor> {
        let double =
            (0..shape.double).map(|i| DoubleBlock::new(tensors, &format!("transformer_blocks.{i}"), &shape));
        let single = (0..shape.single)
            .map(|i| SingleBlock::new(tensors, &format!("single_transformer_blocks.{i}"), &shape));
        Ok(Blocks {
            shape,
            double: double.collect::<std::result::Result<_, _>>()?,
            single: single.collect::<std::result::Result<_, _>>()?,
            shared: match shape.design {
                Design::Flux1 | Design::QwenImage => None,
                Design::Flux2 => Some(SharedModulators::new(&shape, tensors)?),
            },
            stream: tensors.stream(),
        })
    }

    /// The modulations of `vector`, SiLU of the conditioning of each step, `[steps, width]`.
    ///
    /// # Errors
    /// When shapes do not match; when a streamed block cannot be read.
    pub(crate) fn modulate(&self, vector: &Tensor) -> std::result::Result<Modulations, StageError> {
        if let Some(SharedModulators {
            picture,
            text,
            single,
        }) = &self.shared
        {
            let double = (picture.forward(vector)?, text.forward(vector)?);
            return Ok(Modulations {
                double: vec![double; self.double.len()],
                single: vec![single.forward(vector)?; self.single.len()],
            });
        }
        let enter = |number: usize| self.stream.enter(gpu::BlockPlace::once(number));
        let mut modulations = Modulations {
            double: Vec::with_capacity(self.double.len()),
            single: Vec::with_capacity(self.single.len()),
        };
        for (number, block) in self.double.iter().enumerate() {
            enter(number)?;
            modulations.double.extend(block.modulate(vector)?);
        }
        for (number, block) in self.single.iter().enumerate() {
            enter(self.double.len() + number)?;
            modulations.single.extend(block.modulate(vector)?);
        }
        Ok(modulations)
    }

    /// Buffers of steps for a batch of items, with these token counts of text and of each item. `further` layers compute in
    /// them too.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn buffers<'a>(
        &'a self,
        counts: (usize, usize, usize),
        further: impl IntoIterator<Item = &'a Linear>,
        on: (DType, &candle_core::Device),
    ) -> Result<Buffers> {
        self.buffers_beside(0, counts, further, on)
    }

    /// The same, with space for the keys and values of `others` tokens of another card.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn buffers_beside<'a>(
        &'a self,
        others: usize,
        (batch, text, generated): (usize, usize, usize),
        further: impl IntoIterator<Item = &'a Linear>,
        on: (DType, &candle_core::Device),
    ) -> Result<Buffers> {
        let double = self.double.iter().flat_map(DoubleBlock::layers);
        let single = self.single.iter().flat_map(SingleBlock::layers);
        let all: Vec<&Linear> = double.chain(single).chain(further).collect();
        let mut take_codes = false;
        for layer in &all {
            take_codes |= layer.takes_codes(on.0)?;
        }
        let layers = Layers {
            take_codes,
            scratch_bytes: largest_scratch(all, batch * (text + generated), on.0),
        };
        Buffers::new(&self.shape, (batch, text, generated), others, layers, on)
    }

    /// Runs all blocks, or the first alone if the cache of the pass leaves out the others. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle, of `go_on`, and of `beside`.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_>,
        beside: &mut dyn BlockHook,
        go_on: &mut dyn FnMut() -> std::result::Result<(), StageError>,
    ) -> std::result::Result<(), StageError> {
        let &Pass {
            buffers,
            modulations,
            rotations,
            step,
            apart,
            wanted,
            last,
            cache,
        } = pass;
        let mut cache = cache.map(RefCell::borrow_mut);
        if let Some(cache) = &mut cache {
            cache.begin(wanted)?;
        }
        // Whether all blocks after the first of a pass are left out.
        let mut is_left_out = |is_first: bool| match &mut cache {
            Some(cache) if is_first => cache.leaves_out(wanted, last),
            _ => Ok(false),
        };
        let (text, whole) = (buffers.text()?, buffers.whole()?);
        let shares = buffers.shares(step, apart)?;
        let rows = (shares.as_slice(), step);
        let single_at = |i: usize| match (self.single.get(i), modulations.single.get(i)) {
            (Some(block), Some(modulation)) => block.first(modulation, step).map(Some),
            _ => Ok(None),
        };
        for (i, (block, modulation)) in self.double.iter().zip(&modulations.double).enumerate() {
            go_on()?;
            self.stream.enter(gpu::BlockPlace::each_pass(i))?;
            if i == 0 {
                let (of_shares, of_text) = block.first(modulation, rows)?;
                for (share, next) in shares.iter().zip(&of_shares) {
                    share.rows.enter(next)?;
                }
                text.enter(&of_text)?;
            }
            let next_double = self.double.get(i + 1).zip(modulations.double.get(i + 1));
            let place = BlockPlace::Double(i);
            let added = beside.added(place);
            match (next_double, single_at(0)?) {
                (Some((next, modulations)), _) => {
                    let (of_shares, of_text) = next.first(modulations, rows)?;
                    let of_shares: Vec<&Next> = of_shares.iter().collect();
                    let next = (of_shares.as_slice(), &of_text);
                    block.forward(buffers, modulation, rows, rotations, next, &added)?;
                }
                (None, of_single) => {
                    let next = of_single.as_ref().unwrap_or(last);
                    let next = (vec![next; shares.len()], next);
                    let next = (next.0.as_slice(), next.1);
                    block.forward(buffers, modulation, rows, rotations, next, &added)?;
                }
            }
            beside.after_block(place, buffers)?;
            if is_left_out(i == 0)? {
                return Ok(());
            }
        }
        for (i, (block, modulation)) in self.single.iter().zip(&modulations.single).enumerate() {
            go_on()?;
            self.stream
                .enter(gpu::BlockPlace::each_pass(self.double.len() + i))?;
            if i == 0 && self.double.is_empty() {
                whole.enter(&block.first(modulation, step)?)?;
            }
            let place = BlockPlace::Single(i);
            let added = beside.added(place);
            match single_at(i + 1)? {
                Some(next) => {
                    block.forward(buffers, modulation, step, rotations, (&whole, &next), &added)?;
                }
                None => block.forward(buffers, modulation, step, rotations, (wanted, last), &added)?,
            }
            beside.after_block(place, buffers)?;
            if is_left_out(i == 0 && self.double.is_empty())? {
                return Ok(());
            }
        }
        if let Some(cache) = &mut cache {
            cache.end(wanted)?;
        }
        Ok(())
    }
}
