//! Independent tiles, blended where they overlap: what diffusers computes under `enable_tiling`. Each tile has
//! its own statistics and its own attention, so the result is not the whole's, at any overlap.

use candle_core::{Result, Tensor};

use crate::family::StageError;

/// `tile_overlap_factor`.
const OVERLAP: f64 = 0.25;

/// Turns one tile of a map into the same place of the other.
type OfTile<'a> = &'a dyn Fn(&Tensor) -> std::result::Result<Tensor, StageError>;

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

/// Tiles of `size_in` of the map become tiles of `size_out`, of which all but the overlap is kept.
fn in_tiles(
    map: &Tensor,
    size_in: usize,
    size_out: usize,
    of_tile: OfTile<'_>,
) -> std::result::Result<Tensor, StageError> {
    let (_, _, height, width) = map.dims4()?;
    if height <= size_in && width <= size_in {
        return of_tile(map);
    }
    let step = (size_in as f64 * (1.0 - OVERLAP)) as usize;
    let blended = (size_out as f64 * OVERLAP) as usize;
    let kept = size_out - blended;
    if step == 0 || kept == 0 {
        return Err(StageError::BadInput(format!(
            "tiles of {size_in} are too small to overlap"
        )));
    }
    // Of the row above, only the rows that the next one is blended with are kept.
    let mut above: Vec<Tensor> = Vec::new();
    let mut rows = Vec::with_capacity(height.div_ceil(step));
    for top in (0..height).step_by(step) {
        let mut row = Vec::with_capacity(width.div_ceil(step));
        let mut bottoms = Vec::with_capacity(width.div_ceil(step));
        let mut left: Option<Tensor> = None;
        for (column, start) in (0..width).step_by(step).enumerate() {
            let piece = map.narrow(2, top, size_in.min(height - top))?;
            let piece = piece.narrow(3, start, size_in.min(width - start))?.contiguous()?;
            let mut tile = of_tile(&piece)?;
            if let Some(above) = above.get(column) {
                tile = blend(above, &tile, 2, blended)?;
            }
            if let Some(left) = &left {
                tile = blend(left, &tile, 3, blended)?;
            }
            bottoms.push(last(&tile, 2, blended)?);
            left = Some(last(&tile, 3, blended)?);
            row.push(
                tile.narrow(2, 0, kept.min(tile.dim(2)?))?
                    .narrow(3, 0, kept.min(tile.dim(3)?))?
                    .force_contiguous()?,
            );
        }
        rows.push(Tensor::cat(&row, 3)?);
        above = bottoms;
    }
    Ok(Tensor::cat(&rows, 2)?)
}

/// The last `count` rows (axis 2) or columns (axis 3).
fn last(tile: &Tensor, axis: usize, count: usize) -> Result<Tensor> {
    let count = count.min(tile.dim(axis)?);
    // A copy of these alone: `copy` would take along all that the tile has.
    tile.narrow(axis, tile.dim(axis)? - count, count)?
        .force_contiguous()
}

/// `blend_v` (axis 2) and `blend_h` (axis 3): the first rows of `tile` go over from the last of `before`.
fn blend(before: &Tensor, tile: &Tensor, axis: usize, extent: usize) -> Result<Tensor> {
    let size = tile.dim(axis)?;
    let extent = extent.min(before.dim(axis)?).min(size);
    if extent == 0 {
        return Ok(tile.clone());
    }
    let shares: Vec<f32> = (0..extent).map(|index| index as f32 / extent as f32).collect();
    let shape = if axis == 2 {
        (1, 1, extent, 1)
    } else {
        (1, 1, 1, extent)
    };
    let shares = Tensor::from_vec(shares, shape, tile.device())?.to_dtype(tile.dtype())?;
    let before = last(before, axis, extent)?;
    let first = tile.narrow(axis, 0, extent)?;
    let first = (&before + (first - &before)?.broadcast_mul(&shares)?)?;
    Tensor::cat(&[&first, &tile.narrow(axis, extent, size - extent)?], axis)
}
