//! What the walk of rows through the layers computes with: tensors (`tensors.rs`), or their sizes alone (`sketch.rs`), from
//! which memory and shapes are predicted. There is one walk for both, so that the prediction is of what is computed.

use model::StageError;
use ops::{Onto, Steps};

pub(super) type Outcome<T> = std::result::Result<T, StageError>;

/// Frames, rows, columns and channels of a map.
pub(super) type Sides = [usize; 4];

/// How positions are read.
pub(super) struct Reading<'a, N> {
    /// A norm of the channels of each position, and whether SiLU follows.
    pub(super) normed: Option<(&'a N, bool)>,
    /// Whether rows and columns are enlarged by two, to the nearest position.
    pub(super) is_enlarged: bool,
}

/// Blocks of positions that become one, or that one becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) frames: usize,
    /// Rows and columns.
    pub(super) sides: usize,
    /// Channels of the result.
    pub(super) outputs: usize,
}

/// Operations on maps `[frames, rows, columns, channels]`. Parts of maps share their memory.
pub(super) trait Arithmetic {
    type Map: Clone;
    /// A convolution with its bias.
    type Layer;
    /// The weight of a norm.
    type Norm;

    fn sides(&self, map: &Self::Map) -> Outcome<Sides>;
    /// A map to be overwritten.
    fn blank(&self, sides: Sides) -> Outcome<Self::Map>;
    fn zeros(&self, sides: Sides) -> Outcome<Self::Map>;
    /// `count` positions from `first` on along an axis.
    fn part(&self, map: &Self::Map, axis: usize, first: usize, count: usize) -> Outcome<Self::Map>;
    /// Frames `first`, `first + 2` and so on.
    fn every_second_frame(&self, map: &Self::Map, first: usize) -> Outcome<Self::Map>;
    /// Reads the region of a map that begins at this row (after enlarging) into `out`, with all frames and columns.
    fn read(
        &self,
        map: &Self::Map,
        reading: &Reading<'_, Self::Norm>,
        row: usize,
        out: &Self::Map,
    ) -> Outcome<()>;
    fn copy(&self, map: &Self::Map, out: &Self::Map) -> Outcome<()>;
    fn add(&self, map: &Self::Map, out: &Self::Map) -> Outcome<()>;
    /// Over frames, rows and columns, or over rows and columns of each frame, as the layer's weight has them.
    fn convolve(&self, layer: &Self::Layer, map: &Self::Map, steps: &Steps, out: &Self::Map) -> Outcome<()>;
    /// A convolution of single positions.
    fn of_positions(&self, layer: &Self::Layer, map: &Self::Map, out: &Self::Map, onto: Onto) -> Outcome<()>;
    /// Attention of each frame over itself, with one head. The channels of `projected` are queries, keys and values.
    fn attend(&self, projected: &Self::Map, out: &Self::Map) -> Outcome<()>;
    /// [`ops::average_blocks`].
    fn average_blocks(&self, map: &Self::Map, blocks: Blocks, out: &Self::Map) -> Outcome<()>;
    /// [`ops::add_repeated`], from this frame and row of the repeated map on.
    fn add_repeated(&self, map: &Self::Map, blocks: Blocks, from: [usize; 2], out: &Self::Map)
    -> Outcome<()>;
    /// Reads frames with patches of this side beside each other as channels, columns before rows.
    fn patched(&self, frames: &Self::Map, patch: usize) -> Outcome<Self::Map>;
    /// Writes channels to the positions of patches: the inverse.
    fn unpatch(&self, map: &Self::Map, patch: usize, frames: &Self::Map) -> Outcome<()>;
    /// Bytes of a number.
    fn number(&self) -> usize;
    /// Most bytes of a piece of a map.
    fn bytes_of_piece(&self) -> usize;

    /// Rows of a piece of a map with these sides, at least one.
    fn rows_of_piece(&self, [frames, _, columns, channels]: Sides) -> usize {
        let of_row = frames * columns * channels * self.number();
        (self.bytes_of_piece() / of_row.max(1)).max(1)
    }

    /// # Errors
    /// [`StageError::Cancelled`].
    fn check_cancelled(&self) -> Outcome<()>;
}
