//! Independent tiles, blended where they overlap, as diffusers computes with `enable_tiling`. Each tile has its own
//! statistics and attention, so the result differs from that of the whole map for any overlap.

use candle_core::{Result, Tensor};
use ops::MapReading;

use model::StageError;

/// diffusers' `tile_overlap_factor`.
const OVERLAP: f64 = 0.25;

/// Computes the output tile of one input tile `[h, w, c]`.
type OfTile<'a> = &'a dyn Fn(Tensor) -> std::result::Result<Tensor, StageError>;

/// `AutoencoderKL.tiled_decode` with a `tile_latent_min_size` of `tile`. A latent no larger than a tile is
/// decoded whole.
pub(super) fn decode_tiles(
    latent: &Tensor,
    tile: usize,
    factor: usize,
    decode: OfTile<'_>,
) -> std::result::Result<Tensor, StageError> {
    in_tiles(latent, tile, tile * factor, decode)
}

/// `AutoencoderKL._tiled_encode` with a `tile_latent_min_size` of `tile`. A picture no larger than a tile is
/// encoded whole.
pub(super) fn encode_tiles(
    picture: &Tensor,
    tile: usize,
    factor: usize,
    encode: OfTile<'_>,
) -> std::result::Result<Tensor, StageError> {
    in_tiles(picture, tile * factor, tile, encode)
}

/// Step, extent and blending of tiles, in output units except where noted.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    /// Distance between tiles, in input units.
    pub(crate) step: usize,
    pub(crate) kept: usize,
    pub(crate) blended: usize,
}

impl Cut {
    pub(crate) fn of(size_in: usize, size_out: usize) -> Cut {
        let blended = (size_out as f64 * OVERLAP) as usize;
        Cut {
            step: (size_in as f64 * (1.0 - OVERLAP)) as usize,
            kept: size_out - blended,
            blended,
        }
    }
}

/// Positions of the edges of finished tiles that are kept for blending: of the row above, of this row, and of the
/// previous tile, for a tile size and a total width in output units.
pub(crate) fn edges(size: usize, width: usize) -> usize {
    let blended = Cut::of(size, size).blended;
    let beside = width.div_ceil((size - blended).max(1)) * size;
    (2 * beside + size) * blended
}

/// Splits the map into tiles of `size_in`, which become tiles of `size_out`, and joins those without their overlap.
fn in_tiles(
    map: &Tensor,
    size_in: usize,
    size_out: usize,
    of_tile: OfTile<'_>,
) -> std::result::Result<Tensor, StageError> {
    let (height, width, _) = map.dims3()?;
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
            let piece = map.narrow(0, top, size_in.min(height - top))?;
            let piece = copy(&piece.narrow(1, start, size_in.min(width - start))?)?;
            let tile = of_tile(piece)?;
            if let Some(above) = above.get(column) {
                blend(above, &tile, 0, blended)?;
            }
            if let Some(left) = &left {
                blend(left, &tile, 1, blended)?;
            }
            bottoms.push(copy(&last(&tile, 0, blended)?)?);
            let joined = match &joined {
                Some(joined) => joined,
                None => joined.insert(blank_for(map, (size_in, size_out), &tile)?),
            };
            let (rows, columns, _) = tile.dims3()?;
            let place =
                joined
                    .narrow(0, row * kept, kept.min(rows))?
                    .narrow(1, column * kept, kept.min(columns))?;
            let whole = tile
                .narrow(0, 0, kept.min(rows))?
                .narrow(1, 0, kept.min(columns))?;
            ops::apply_norm(&whole, &MapReading::PLAIN, [0; 3], &place)?;
            left = Some(copy(&last(&tile, 1, blended)?)?);
        }
        above = bottoms;
    }
    joined.ok_or_else(|| StageError::BadInput("a map of nothing".to_owned()))
}

/// The joined output: the kept part of each tile, along each axis.
fn blank_for(map: &Tensor, (size_in, size_out): (usize, usize), tile: &Tensor) -> Result<Tensor> {
    let (height, width, _) = map.dims3()?;
    let Cut { step, kept, .. } = Cut::of(size_in, size_out);
    let joined = |size: usize| -> usize {
        let of_tile = |start: usize| (size_in.min(size - start) * size_out / size_in).min(kept);
        (0..size).step_by(step).map(of_tile).sum()
    };
    let shape = [joined(height), joined(width), tile.dim(2)?];
    ops::blank(&shape, tile.dtype(), tile.device())
}

/// A contiguous copy of a view.
fn copy(window: &Tensor) -> Result<Tensor> {
    let copy = ops::blank(window.dims(), window.dtype(), window.device())?;
    ops::apply_norm(window, &MapReading::PLAIN, [0; 3], &copy)?;
    Ok(copy)
}

/// The last `count` rows (axis 0) or columns (axis 1).
fn last(tile: &Tensor, axis: usize, count: usize) -> Result<Tensor> {
    let count = count.min(tile.dim(axis)?);
    tile.narrow(axis, tile.dim(axis)? - count, count)
}

/// diffusers' `blend_v` (axis 0) and `blend_h` (axis 1): blends the first rows of `tile` with the last of `before`.
fn blend(before: &Tensor, tile: &Tensor, axis: usize, extent: usize) -> Result<()> {
    let extent = extent.min(before.dim(axis)?).min(tile.dim(axis)?);
    if extent == 0 {
        return Ok(());
    }
    ops::blend(
        &last(before, axis, extent)?,
        &tile.narrow(axis, 0, extent)?,
        axis == 0,
    )
}
