//! Tiles in space, blended where they overlap: the reference's `tiled_decode` and `tiled_encode`, which it runs for
//! each tile in time with `enable_tiling`. Each tile has its own statistics and attention, so the result differs.

use candle_core::{Result, Tensor};

use crate::autoencoder_kl::Cut;
use model::StageError;

/// Computes the outputs of one tile `[t, h, w, c]`.
pub(super) type OfTile<'a> = &'a dyn Fn(Tensor) -> std::result::Result<Tensor, StageError>;

/// Splits a map `[t, h, w, c]` into tiles of `size_in` rows and columns, which become tiles of `size_out`, and joins
/// those without their overlap of a quarter. A map no larger than a tile is one.
pub(super) fn in_tiles(
    map: &Tensor,
    (size_in, size_out): (usize, usize),
    of_tile: OfTile<'_>,
) -> std::result::Result<Tensor, StageError> {
    let (_, height, width, _) = map.dims4()?;
    if height <= size_in && width <= size_in {
        return of_tile(map.clone());
    }
    let Cut { step, kept, blended } = Cut::of(size_in, size_out);
    if step == 0 || kept == 0 {
        return Err(StageError::BadInput(format!(
            "tiles of {size_in} are too small to overlap"
        )));
    }
    let mut joined: Option<Tensor> = None;
    // Of the row above, only the rows for blending are kept.
    let mut above: Vec<Tensor> = Vec::new();
    for (row, top) in (0..height).step_by(step).enumerate() {
        let mut bottoms = Vec::with_capacity(width.div_ceil(step));
        let mut left: Option<Tensor> = None;
        for (column, start) in (0..width).step_by(step).enumerate() {
            let rows = map.narrow(1, top, size_in.min(height - top))?;
            let tile = of_tile(copy(&rows.narrow(2, start, size_in.min(width - start))?)?)?;
            if let Some(above) = above.get(column) {
                blend(above, &tile, 1, blended)?;
            }
            if let Some(left) = &left {
                blend(left, &tile, 2, blended)?;
            }
            bottoms.push(copy(&last(&tile, 1, blended)?)?);
            left = Some(copy(&last(&tile, 2, blended)?)?);
            let (frames, rows, columns, channels) = tile.dims4()?;
            let joined = match &joined {
                Some(joined) => joined,
                None => {
                    let sides = [height, width].map(|size| joined_size(size, size_in, size_out));
                    let shape = [frames, sides[0], sides[1], channels];
                    joined.insert(ops::blank(&shape, tile.dtype(), tile.device())?)
                }
            };
            let (rows, columns) = (kept.min(rows), kept.min(columns));
            let place = joined.narrow(1, row * kept, rows)?;
            ops::copy_rows(
                &tile.narrow(1, 0, rows)?.narrow(2, 0, columns)?,
                &place.narrow(2, column * kept, columns)?,
            )?;
        }
        above = bottoms;
    }
    joined.ok_or_else(|| StageError::BadInput("a map of nothing".to_owned()))
}

/// Size of the joined outputs along an axis.
fn joined_size(size: usize, size_in: usize, size_out: usize) -> usize {
    let Cut { step, kept, .. } = Cut::of(size_in, size_out);
    let of_tile = |start: usize| (size_in.min(size - start) * size_out / size_in).min(kept);
    (0..size).step_by(step).map(of_tile).sum()
}

/// A contiguous copy of a view.
pub(super) fn copy(window: &Tensor) -> Result<Tensor> {
    let copy = ops::blank(window.dims(), window.dtype(), window.device())?;
    ops::copy_rows(window, &copy)?;
    Ok(copy)
}

/// The last `count` positions along an axis.
fn last(tile: &Tensor, axis: usize, count: usize) -> Result<Tensor> {
    let count = count.min(tile.dim(axis)?);
    tile.narrow(axis, tile.dim(axis)? - count, count)
}

/// `blend_v` (axis 1) and `blend_h` (axis 2): blends the first positions of `tile` with the last of `before`.
fn blend(before: &Tensor, tile: &Tensor, axis: usize, extent: usize) -> Result<()> {
    let extent = extent.min(before.dim(axis)?).min(tile.dim(axis)?);
    if extent == 0 {
        return Ok(());
    }
    let (before, tile) = (last(before, axis, extent)?, tile.narrow(axis, 0, extent)?);
    for frame in 0..tile.dim(0)? {
        let of = |map: &Tensor| map.narrow(0, frame, 1)?.squeeze(0);
        ops::blend(&of(&before)?, &of(&tile)?, axis == 1)?;
    }
    Ok(())
}
