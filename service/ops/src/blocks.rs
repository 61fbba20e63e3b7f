//! Blocks of positions of a map whose numbers become the channels of one position, averaged in groups; and the inverse, in
//! which the channels of a position are repeated over the positions of a block. They are shortcuts over layers that resize a
//! map (`AvgDown3D` and `DupUp3D` of diffusers' `AutoencoderKLWan`).
//!
//! The numbers of a block are in the order channel, frame, row, column.

use candle_core::{Result, Tensor};

use crate::place::{apart_from, with_rows, write_rows};

/// The dimensions of one of these operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockShape {
    /// Frames, rows, columns and channels of the map of blocks, the finer one.
    pub(crate) fine: [usize; 4],
    /// Of the coarser one.
    pub(crate) coarse: [usize; 4],
    /// Frames of a block, and rows and columns.
    pub(crate) block: [usize; 2],
    /// Channels of a block's numbers that one number stands for: averaged, or repeated.
    pub(crate) group: usize,
}

/// Averages blocks of `block[0]` frames and `block[1]` rows and columns of `x` `[t, h, w, c]` to `out` `[t / frames, h / rows, w /
/// columns, d]`, each number over `c` times the size of a block `/ d` numbers of the block. Where frames are too few for whole
/// blocks there are zeros before the first. `x` may be a part of a map, along frames and rows; `out` is contiguous.
///
/// # Errors
/// When shapes do not fit.
pub fn average_blocks(x: &Tensor, block: [usize; 2], out: &Tensor) -> Result<()> {
    let (fine, coarse): ([usize; 4], [usize; 4]) = (x.dims4()?.into(), out.dims4()?.into());
    let numbers = fine[3] * block[0] * block[1] * block[1];
    let fits = coarse[0] == fine[0].div_ceil(block[0].max(1))
        && [1, 2].iter().all(|&axis| coarse[axis] * block[1] == fine[axis])
        && coarse[3] > 0
        && numbers.is_multiple_of(coarse[3])
        && numbers > 0
        && x.dtype() == out.dtype()
        && out.is_contiguous();
    if !fits {
        candle_core::bail!("blocks of {block:?} of {fine:?} averaged to {coarse:?}");
    }
    let shape = BlockShape {
        fine,
        coarse,
        block,
        group: numbers / coarse[3],
    };
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::average_blocks(x, &shape, out);
    }
    let BlockShape {
        fine,
        coarse,
        block: [frames, sides],
        group,
    } = shape;
    let missing = coarse[0] * frames - fine[0];
    let (size, share) = (frames * sides * sides, 1.0 / group as f32);
    with_rows(&apart_from(x, out)?, fine[3], |x| {
        write_rows(out, coarse[3], |position, numbers| {
            let (line, column) = (position / coarse[2], position % coarse[2]);
            let (frame, row) = (line / coarse[1], line % coarse[1]);
            // The channels of each position of the block; none before the first frame.
            let positions: Vec<Option<&[f32]>> = (0..size)
                .map(|of_block| {
                    let [t, y, z] = [
                        of_block / sides / sides,
                        of_block / sides % sides,
                        of_block % sides,
                    ];
                    let frame = (frame * frames + t).checked_sub(missing)?;
                    let line = frame * fine[1] + row * sides + y;
                    Some(x.row(line * fine[2] + column * sides + z))
                })
                .collect();
            for (index, number) in numbers.iter_mut().enumerate() {
                let of_group = (index * group..(index + 1) * group).map(|place| {
                    let channels = positions[place % size];
                    channels.map_or(0.0, |channels| channels[place / size])
                });
                *number = of_group.sum::<f32>() * share;
            }
        })
    })
}

/// Adds the channels of `x` `[t, h, w, c]`, repeated over blocks of `block[0]` frames and `block[1]` rows and columns, to `out`
/// `[.., .., w * columns, d]`, a part of the map of blocks that begins at the frame and row `from`. Each number stands for `d` times
/// the size of a block `/ c` numbers of its block. `x` is contiguous; `out` may be a part along rows.
///
/// # Errors
/// When shapes do not fit.
pub fn add_repeated(x: &Tensor, block: [usize; 2], from: [usize; 2], out: &Tensor) -> Result<()> {
    let (coarse, fine): ([usize; 4], [usize; 4]) = (x.dims4()?.into(), out.dims4()?.into());
    let numbers = fine[3] * block[0] * block[1] * block[1];
    let fits = from[0] + fine[0] <= coarse[0] * block[0]
        && from[1] + fine[1] <= coarse[1] * block[1]
        && fine[2] == coarse[2] * block[1]
        && coarse[3] > 0
        && numbers > 0
        && numbers.is_multiple_of(coarse[3])
        && x.dtype() == out.dtype()
        && x.is_contiguous();
    if !fits {
        candle_core::bail!("{coarse:?} in blocks of {block:?} from {from:?} added to {fine:?}");
    }
    let shape = BlockShape {
        fine,
        coarse,
        block,
        group: numbers / coarse[3],
    };
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::add_repeated(x, &shape, from, out);
    }
    let BlockShape {
        fine,
        coarse,
        block: [frames, sides],
        group,
    } = shape;
    let size = frames * sides * sides;
    with_rows(&apart_from(x, out)?, coarse[3], |x| {
        write_rows(out, fine[2] * fine[3], |line, numbers| {
            let (frame, row) = (from[0] + line / fine[1], from[1] + line % fine[1]);
            let line = frame / frames * coarse[1] + row / sides;
            let of_block = (frame % frames * sides + row % sides) * sides;
            for (column, numbers) in numbers.chunks_mut(fine[3]).enumerate() {
                let channels = x.row(line * coarse[2] + column / sides);
                let place = of_block + column % sides;
                for (index, number) in numbers.iter_mut().enumerate() {
                    *number += channels[(index * size + place) / group];
                }
            }
        })
    })
}

/// Moves the numbers of squares of `patch` rows and columns of frames `x` `[t, h, w, c]` into the channels of one position
/// of `out` `[t, h / patch, w / patch, c patch patch]`: channel by channel, column by column, and row by row within a
/// column (`patchify` of diffusers' `AutoencoderKLWan`). Both may be a part of a map, along frames and rows.
///
/// # Errors
/// When shapes do not fit.
pub fn patched(x: &Tensor, patch: usize, out: &Tensor) -> Result<()> {
    let shape = patch_shape(x, patch, out)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::patched(x, &shape, out);
    }
    let BlockShape { fine, coarse, .. } = shape;
    with_rows(&apart_from(x, out)?, fine[2] * fine[3], |x| {
        write_rows(out, coarse[2] * coarse[3], |line, numbers| {
            let first = line * patch;
            for (column, numbers) in numbers.chunks_mut(coarse[3]).enumerate() {
                for (index, number) in numbers.iter_mut().enumerate() {
                    let (channel, of_patch) = (index / (patch * patch), index % (patch * patch));
                    let column = column * patch + of_patch / patch;
                    *number = x.row(first + of_patch % patch)[column * fine[3] + channel];
                }
            }
        })
    })
}

/// The inverse of [`patched`]: `x` is `[t, h, w, c patch patch]`, `out` the frames `[t, h patch, w patch, c]`.
///
/// # Errors
/// When shapes do not fit.
pub fn unpatched(x: &Tensor, patch: usize, out: &Tensor) -> Result<()> {
    let shape = patch_shape(out, patch, x)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::unpatched(x, &shape, out);
    }
    let BlockShape { fine, coarse, .. } = shape;
    with_rows(&apart_from(x, out)?, coarse[2] * coarse[3], |x| {
        write_rows(out, fine[2] * fine[3], |line, numbers| {
            let positions = x.row(line / patch);
            for (column, numbers) in numbers.chunks_mut(fine[3]).enumerate() {
                let position = &positions[column / patch * coarse[3]..];
                let of_patch = column % patch * patch + line % patch;
                for (channel, number) in numbers.iter_mut().enumerate() {
                    *number = position[channel * patch * patch + of_patch];
                }
            }
        })
    })
}

/// The dimensions of frames and of their patches.
fn patch_shape(frames: &Tensor, patch: usize, patches: &Tensor) -> Result<BlockShape> {
    let (fine, coarse): ([usize; 4], [usize; 4]) = (frames.dims4()?.into(), patches.dims4()?.into());
    let [count, rows, columns, channels] = coarse;
    let fits = fine[..3] == [count, rows * patch, columns * patch]
        && channels == fine[3] * patch * patch
        && frames.elem_count() > 0
        && frames.dtype() == patches.dtype();
    if !fits {
        candle_core::bail!("squares of {patch} of {fine:?} beside {coarse:?}");
    }
    Ok(BlockShape {
        fine,
        coarse,
        block: [1, patch],
        group: 1,
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// The numbers of blocks as channels, with zeros before the first frame: views and permutations of whole tensors.
    fn blocks_of(x: &Tensor, [frames, sides]: [usize; 2]) -> Result<Tensor> {
        let (t, h, w, c) = x.dims4()?;
        let missing = t.div_ceil(frames) * frames - t;
        let x = x.pad_with_zeros(0, missing, 0)?;
        let (t, h, w) = ((t + missing) / frames, h / sides, w / sides);
        let x = x.reshape(vec![t, frames, h, sides, w, sides, c])?;
        let x = x.permute(vec![0, 2, 4, 6, 1, 3, 5])?.contiguous()?;
        x.reshape((t, h, w, c * frames * sides * sides))
    }

    const CASES: [([usize; 4], [usize; 2], usize); 6] = [
        ([4, 4, 6, 8], [2, 2], 16),
        ([1, 4, 6, 8], [2, 2], 16),
        ([3, 2, 2, 4], [2, 2], 4),
        ([2, 4, 2, 8], [1, 2], 8),
        ([2, 3, 5, 8], [1, 1], 8),
        ([4, 2, 4, 16], [2, 2], 64),
    ];

    #[test]
    fn blocks_are_averaged_as_views_of_whole_maps_are() -> Result<()> {
        for (dims, block, outputs) in CASES {
            for (dtype, most) in [(DType::F32, 1e-6), (DType::BF16, BF16_OPERATION)] {
                let x = random(&dims, 1)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let numbers = blocks_of(&x, block)?;
                let (t, h, w, count) = numbers.dims4()?;
                let expected = numbers
                    .reshape(vec![t, h, w, outputs, count / outputs])?
                    .mean(4)?;
                let out =
                    here(&Tensor::zeros((t, h, w, outputs), DType::F32, &Device::Cpu)?).to_dtype(dtype)?;
                // The map is a part of a larger one.
                let larger = here(&Tensor::cat(&[&x, &x, &x], 1)?).to_dtype(dtype)?;
                average_blocks(&larger.narrow(1, dims[1], dims[1])?, block, &out)?;
                let found = out.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                assert_close(&found, &expected, most)?;
            }
        }
        Ok(())
    }

    #[test]
    fn repeated_channels_are_the_inverse_of_averaged_ones() -> Result<()> {
        for (dims, block, inputs) in CASES {
            let [t, h, w, c] = dims;
            if t % block[0] != 0 {
                continue;
            }
            let coarse = [t / block[0], h / block[1], w / block[1], inputs];
            for (dtype, most) in [(DType::F32, 1e-6), (DType::BF16, BF16_OPERATION)] {
                let x = random(&coarse, 1)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let before = random(&dims, 2)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
                // Numbers in the order of a block, then at their places.
                let size = block[0] * block[1] * block[1];
                let group = c * size / inputs;
                let repeated = x
                    .unsqueeze(4)?
                    .broadcast_as(vec![coarse[0], coarse[1], coarse[2], inputs, group])?;
                let shape = vec![coarse[0], coarse[1], coarse[2], c, block[0], block[1], block[1]];
                let repeated = repeated.contiguous()?.reshape(shape)?;
                let repeated = repeated
                    .permute(vec![0, 4, 1, 5, 2, 6, 3])?
                    .contiguous()?
                    .reshape(&dims)?;
                let expected = (&before + repeated)?;
                for from in [[0, 0], [block[0] - 1, 1]] {
                    let (frames, rows) = (t - from[0], h - from[1]);
                    let of = |map: &Tensor| map.narrow(0, from[0], frames)?.narrow(1, from[1], rows);
                    let out = of(&here(&before).to_dtype(dtype)?.copy()?)?;
                    add_repeated(&here(&x).to_dtype(dtype)?, block, from, &out)?;
                    let found = out.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
                    assert_close(&found, &of(&expected)?.contiguous()?, most)?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn frames_become_patches_and_patches_become_frames() -> Result<()> {
        for (patch, channels) in [(1, 3), (2, 3), (2, 8), (4, 2)] {
            for dtype in [DType::F32, DType::BF16] {
                let [t, h, w] = [2, 3, 5];
                let dims = [t, h * patch, w * patch, channels];
                let frames = random(&dims, 1)?.to_dtype(dtype)?;
                let squares = frames.reshape(vec![t, h, patch, w, patch, channels])?;
                let squares = squares.permute(vec![0, 1, 3, 5, 4, 2])?.contiguous()?;
                let patches = squares.reshape((t, h, w, channels * patch * patch))?;
                let host = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous();
                let blank = |dims: &[usize]| -> Result<Tensor> {
                    here(&Tensor::zeros(dims, DType::F32, &Device::Cpu)?).to_dtype(dtype)
                };
                // Both are parts of larger maps.
                let of_patches = blank(&[t, h + 2, w, channels * patch * patch])?;
                let part = of_patches.narrow(1, 1, h)?;
                let larger = here(&Tensor::cat(&[&frames, &frames], 1)?);
                patched(&larger.narrow(1, h * patch, h * patch)?, patch, &part)?;
                assert_close(&host(&part)?, &host(&patches)?, 0.0)?;
                let of_frames = blank(&[t, h * patch + 3, w * patch, channels])?;
                let back = of_frames.narrow(1, 2, h * patch)?;
                unpatched(&part, patch, &back)?;
                assert_close(&host(&back)?, &host(&frames)?, 0.0)?;
                let beside = [of_frames.narrow(1, 0, 2)?, of_frames.narrow(1, h * patch + 2, 1)?];
                for beside in beside {
                    let sum = host(&beside)?.abs()?.sum_all()?.to_scalar::<f32>()?;
                    assert_eq!(sum, 0.0, "rows beside the part");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let fine = here(&random(&[2, 4, 4, 8], 1)?);
        let of = |dims: [usize; 4]| random(&dims, 1).map(|map| here(&map));
        for (block, dims) in [
            ([2, 2], [1, 2, 2, 7]),
            ([2, 2], [2, 2, 2, 8]),
            ([1, 3], [2, 1, 1, 8]),
            ([2, 2], [1, 2, 1, 8]),
        ] {
            assert!(
                average_blocks(&fine, block, &of(dims)?).is_err(),
                "{block:?} {dims:?}"
            );
        }
        for (block, dims, from) in [
            ([2, 2], [1, 2, 2, 7], [0, 0]),
            ([1, 3], [2, 1, 1, 8], [0, 0]),
            ([2, 2], [1, 2, 1, 8], [0, 0]),
            ([2, 2], [1, 2, 2, 8], [1, 0]),
            ([2, 2], [1, 2, 2, 8], [0, 1]),
        ] {
            let added = add_repeated(&of(dims)?, block, from, &fine);
            assert!(added.is_err(), "{block:?} {dims:?} {from:?}");
        }
        for (patch, dims) in [(2, [2, 2, 2, 16]), (2, [1, 2, 2, 32]), (3, [2, 1, 1, 72])] {
            assert!(patched(&fine, patch, &of(dims)?).is_err(), "{patch} {dims:?}");
            assert!(unpatched(&of(dims)?, patch, &fine).is_err(), "{patch} {dims:?}");
        }
        Ok(())
    }
}
