//! Qwen2.5-VL's vision tower (transformers' `Qwen2_5_VisionTransformerPretrainedModel`): patches of 14 pixels, blocks that
//! attend within windows of 112 pixels or to the whole picture, and a merger that makes one token of two by two patches.
//! Qwen-Image's text encoder reads its tokens.
//!
//! All precisions are computed by our own operations.

mod layout;
mod processor;
mod tower;
mod windows;

use candle_core::DType;
use gpu::BlockPlace;
use ops::{AttentionShape, MaskShape, Planned, allocated};
use residency::Bytes;
use serde::Deserialize;

use crate::checkpoint::{QuantizeRole, numbered};
use crate::files::check_sizes;

pub(crate) use layout::{files_of_own_file, own_name};
pub use processor::{QwenImageProcessor, size_of_area};
pub use tower::QwenVisionTower;
use windows::{Run, runs};

/// Channels of a picture.
const CHANNELS: usize = 3;

/// Times that a patch joins: a picture that stands still is there twice.
const TIMES: usize = 2;

/// Side of a cell in patches, which become one token.
const MERGED: usize = 2;

/// Patches of a cell.
const CELL: usize = MERGED * MERGED;

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// Epsilon of the norms.
const EPS: f64 = 1e-6;

/// Most patches of a picture: attention to all of them is quadratic. 12,845,056 pixels, the published processor's most, are
/// 65,536.
const MOST_PATCHES: usize = 1 << 16;

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the picture.
const LIBRARIES: u64 = 4 << 20;

/// Rows and columns of a picture's patches. Both are even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rows: usize,
    pub columns: usize,
}

impl Grid {
    /// Rows and columns of cells of two by two patches.
    pub fn cells(self) -> [usize; 2] {
        [self.rows / MERGED, self.columns / MERGED]
    }

    /// Number of cells: the tokens of the picture for the language model.
    pub fn tokens(self) -> usize {
        let [rows, columns] = self.cells();
        rows * columns
    }

    /// Number of patches.
    pub fn patches(self) -> usize {
        CELL * self.tokens()
    }

    /// Checks that the tower can encode a picture of this grid.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    fn check(self) -> Result<(), String> {
        let Grid { rows, columns } = self;
        let is_whole = |side: usize| (1..=MOST_PATCHES).contains(&side) && side.is_multiple_of(MERGED);
        match is_whole(rows) && is_whole(columns) && rows * columns <= MOST_PATCHES {
            true => Ok(()),
            false => Err(format!(
                "{rows} rows and {columns} columns of patches; even numbers, and at most {MOST_PATCHES} patches, are expected"
            )),
        }
    }
}

/// The tower's `vision_config`. Missing fields have the values of Qwen2.5-VL-7B.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct QwenVisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of a patch.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Width of a token for the language model.
    pub out_hidden_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Must be 2.
    pub spatial_merge_size: usize,
    /// Must be 2.
    pub temporal_patch_size: usize,
    /// Side of a window in pixels.
    pub window_size: usize,
    /// Blocks that attend to the whole picture, from 0.
    pub fullatt_block_indexes: Vec<usize>,
    /// Activation: only `silu` is supported.
    pub hidden_act: String,
}

impl Default for QwenVisionConfig {
    fn default() -> QwenVisionConfig {
        QwenVisionConfig {
            depth: 32,
            hidden_size: 1280,
            intermediate_size: 3420,
            num_heads: 16,
            out_hidden_size: 3584,
            patch_size: 14,
            spatial_merge_size: MERGED,
            temporal_patch_size: TIMES,
            window_size: 112,
            fullatt_block_indexes: vec![7, 15, 23, 31],
            hidden_act: "silu".to_owned(),
        }
    }
}

impl QwenVisionConfig {
    /// Checks that this tower is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.hidden_size,
            self.intermediate_size,
            self.out_hidden_size,
            self.patch_size,
            self.window_size,
        ];
        check_sizes(&[(&widths, 1 << 14), (&[self.depth, self.num_heads], 1 << 10)])?;
        if widths.contains(&0) || self.depth == 0 {
            return Err("blocks of no width, or none of them, in the vision tower".to_owned());
        }
        let head = self.hidden_size.checked_div(self.num_heads).unwrap_or(0);
        if head * self.num_heads != self.hidden_size || head == 0 || !head.is_multiple_of(4) {
            return Err(format!(
                "a width of {} in {} heads in the vision tower, which are turned in quarters",
                self.hidden_size, self.num_heads
            ));
        }
        if (self.spatial_merge_size, self.temporal_patch_size) != (MERGED, TIMES) {
            return Err(format!(
                "a vision tower that merges {0} by {0} patches of {1} times; {MERGED} and {TIMES} are known",
                self.spatial_merge_size, self.temporal_patch_size
            ));
        }
        if self.cells_of_window() == 0 {
            return Err(format!(
                "windows of {} pixels over patches of {}",
                self.window_size, self.patch_size
            ));
        }
        match self.hidden_act.as_str() {
            "silu" => Ok(()),
            other => Err(format!("the activation {other:?}; only silu is known")),
        }
    }

    /// Width of a head.
    fn head(&self) -> usize {
        self.hidden_size / self.num_heads.max(1)
    }

    /// Numbers of a patch of one time.
    fn patch(&self) -> usize {
        CHANNELS * self.patch_size * self.patch_size
    }

    /// Side of a window in cells.
    fn cells_of_window(&self) -> usize {
        self.window_size / MERGED / self.patch_size.max(1)
    }

    /// Whether a block attends to the whole picture.
    fn is_whole(&self, block: usize) -> bool {
        self.fullatt_block_indexes.contains(&block)
    }

    /// Runs of windows that block `block` attends within.
    fn runs_of(&self, block: usize, grid: Grid) -> Vec<Run> {
        match self.is_whole(block) {
            true => vec![Run::whole(grid)],
            false => runs(grid, self.cells_of_window()),
        }
    }

    /// Elements per patch of the first shared buffer: queries, keys and values, then the gate.
    fn first_width(&self) -> usize {
        (3 * self.hidden_size).max(self.intermediate_size)
    }

    /// Elements per patch of the second: attention output, then the gated values.
    fn second_width(&self) -> usize {
        self.hidden_size.max(self.intermediate_size)
    }

    /// Predicted peak of activations of encoding a picture: the patches and buffers, or the merger's; the workspace of
    /// attention to the whole picture where cuDNN has no plan.
    pub fn scratch(&self, grid: Grid, dtype: DType) -> Bytes {
        let (patches, size) = (grid.patches(), dtype.size_in_bytes());
        let rows = |width: usize| allocated(patches * width * size);
        let sum = allocated(patches * self.hidden_size * size_of::<f32>());
        let rotations = 2 * allocated(patches * self.head() / 2 * size_of::<f32>());
        let buffers = rows(self.hidden_size) + rows(self.first_width()) + rows(self.second_width());
        let input = rows(TIMES * self.patch());
        let merged = rows(self.hidden_size) + 2 * allocated(grid.tokens() * self.out_hidden_size * size);
        let attention = ops::attention_workspace(self.num_heads, patches, patches);
        let order = allocated(grid.tokens() * size_of::<u32>());
        Bytes(sum + rotations + buffers + order + input.max(merged + allocated(attention)) + LIBRARIES)
    }

    /// cuDNN shapes of the attentions of a picture.
    pub fn planned(&self, grid: Grid, dtype: DType) -> Vec<Planned> {
        let mut shapes: Vec<AttentionShape> = Vec::new();
        for run in (0..self.depth).flat_map(|block| self.runs_of(block, grid)) {
            let by_head = (self.num_heads, self.head());
            let widths = (3 * self.hidden_size, self.hidden_size);
            let shape = AttentionShape {
                batch: run.windows,
                ..AttentionShape::of_rows(run.patches, by_head, widths, dtype, MaskShape::None)
            };
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes.into_iter().map(Planned::Attention).collect()
    }
}

/// Linear layers may be stored quantized, and are not quantized at load: the tower has a twelfth of the language model's
/// numbers, and widths that most formats do not divide.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let is_layer = name.contains(".attn.") || name.contains(".mlp.");
    match is_layer && name.ends_with(".weight") {
        true => QuantizeRole::AsStored,
        false => QuantizeRole::Full,
    }
}

/// The block of a tensor.
pub(crate) fn block_of(name: &str) -> Option<BlockPlace> {
    let (number, _) = numbered(name, "blocks.")?;
    Some(BlockPlace::each_pass(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_tower_has_its_published_size() {
        let config = QwenVisionConfig::default();
        config.check().unwrap();
        let specs = config.specs(&|_| false);
        let count: usize = specs
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>())
            .sum();
        // .677 B.
        assert_eq!(count / 1_000_000, 676);
        let quantized = |name: &str| role(name) == QuantizeRole::AsStored;
        // Four of attention and three of the feed-forward of each block, with queries, keys and values apart; two of the merger.
        let stored = specs.iter().filter(|spec| quantized(&spec.name)).count();
        assert_eq!(stored, 32 * 7 + 2);
        let in_blocks = specs.iter().filter(|spec| block_of(&spec.name).is_some()).count();
        assert_eq!(in_blocks, specs.len() - 6);
    }

    #[test]
    fn unsupported_towers_and_grids_are_refused() {
        let of = |text: &str| serde_json::from_str::<QwenVisionConfig>(text).unwrap().check();
        for (written, told) in [
            (r#"{"num_heads": 7}"#, "heads"),
            (r#"{"temporal_patch_size": 1}"#, "merges"),
            (r#"{"window_size": 14}"#, "windows"),
            (r#"{"hidden_act": "gelu"}"#, "silu"),
            (r#"{"depth": 0}"#, "none"),
        ] {
            let refused = of(written).unwrap_err();
            assert!(refused.contains(told), "{refused}");
        }
        for (rows, columns) in [(0, 2), (3, 4), (4, 1), (512, 256)] {
            assert!(Grid { rows, columns }.check().is_err());
        }
    }
}
