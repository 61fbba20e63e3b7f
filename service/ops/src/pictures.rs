//! Conversion between channels-last maps and the input and output of models: f32 planes, and 8-bit images.

use candle_core::{DType, Device, Result, Tensor};

use crate::place::{apart_from, with_rows, write_rows};
use crate::rows::with_numbers;

/// An uninitialized tensor (zeros on the CPU), to be overwritten completely.
///
/// # Errors
/// When memory is exhausted, or the dtype is not f32, f16 or bf16.
pub fn blank(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(card) = device {
        return crate::cuda::unwritten(shape, dtype, card);
    }
    Tensor::zeros(shape, dtype, device)
}

/// f32 planes `[1, c, h, w]` to a map `[h, w, c]` of this dtype: `x * factor + summand`.
///
/// # Errors
/// When the shape is not of this form.
pub fn planes_to_map(planes: &Tensor, (factor, summand): (f64, f64), dtype: DType) -> Result<Tensor> {
    let (batch, channels, height, width) = planes.dims4()?;
    if batch != 1 || planes.dtype() != DType::F32 {
        candle_core::bail!(
            "planes of {:?} in {:?} where [1, c, h, w] in f32 are expected",
            planes.dims(),
            planes.dtype()
        );
    }
    let planes = planes.contiguous()?;
    #[cfg(feature = "cuda")]
    if planes.device().is_cuda() {
        return crate::cuda::planes_to_map(&planes, (factor, summand), dtype);
    }
    let map = Tensor::zeros((height, width, channels), dtype, planes.device())?;
    let (positions, factor, summand) = (height * width, factor as f32, summand as f32);
    with_numbers(&planes, |planes| {
        write_rows(&map, channels, |position, numbers| {
            for (channel, number) in numbers.iter_mut().enumerate() {
                *number = planes[channel * positions + position] * factor + summand;
            }
        })
    })?;
    Ok(map)
}

/// A map `[h, w, c]` to f32 planes `[1, c, h, w]`, and whether all elements are finite. Synchronizes on a card.
///
/// # Errors
/// When the shape is not of this form.
pub fn map_to_planes(map: &Tensor) -> Result<(Tensor, bool)> {
    let (height, width, channels) = map.dims3()?;
    let map = map.contiguous()?;
    #[cfg(feature = "cuda")]
    if map.device().is_cuda() {
        return crate::cuda::map_to_planes(&map);
    }
    let planes = Tensor::zeros((1, channels, height, width), DType::F32, map.device())?;
    let is_finite = with_numbers(&map, |numbers| {
        write_rows(&planes, width, |row, line| {
            let (channel, row) = (row / height, row % height);
            let from = numbers[row * width * channels..]
                .iter()
                .skip(channel)
                .step_by(channels);
            line.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        })?;
        Ok(all_finite(numbers))
    })?;
    Ok((planes, is_finite))
}

/// `0 * x` is zero exactly if `x` is finite.
fn all_finite(numbers: &[f32]) -> bool {
    numbers
        .chunks(4096)
        .all(|part| part.iter().map(|number| number * 0.0).sum::<f32>() == 0.0)
}

/// A map `[h, w, c]` of -1 to 1 to bytes in that order (`VaeImageProcessor.postprocess`), and whether all elements
/// are finite. Values are clamped; halves are rounded to even, as numpy does. Synchronizes on a card.
///
/// # Errors
/// When the shape is not of this form.
pub fn map_to_bytes(map: &Tensor) -> Result<(Vec<u8>, bool)> {
    map.dims3()?;
    let map = map.contiguous()?;
    #[cfg(feature = "cuda")]
    if map.device().is_cuda() {
        return crate::cuda::map_to_bytes(&map);
    }
    with_numbers(&map, |numbers| {
        let byte = |value: &f32| {
            let level = (value / 2.0 + 0.5).clamp(0.0, 1.0);
            (level * 255.0).round_ties_even() as u8
        };
        Ok((numbers.iter().map(byte).collect(), all_finite(numbers)))
    })
}

/// An 8-bit image to a map `[height, width, channels]` of -1 to 1 (`VaeImageProcessor.preprocess`).
///
/// # Errors
/// When the byte count does not match the shape.
pub fn bytes_to_map(bytes: &[u8], shape: [usize; 3], dtype: DType, device: &Device) -> Result<Tensor> {
    if bytes.len() != shape.iter().product::<usize>() || bytes.is_empty() {
        candle_core::bail!(
            "{} bytes where a picture of shape {shape:?} is expected",
            bytes.len()
        );
    }
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        let bytes = Tensor::from_slice(bytes, bytes.len(), device)?;
        return crate::cuda::bytes_to_map(&bytes, &shape, dtype);
    }
    let numbers: Vec<f32> = bytes
        .iter()
        .map(|byte| 2.0 * (f32::from(*byte) / 255.0) - 1.0)
        .collect();
    Tensor::from_vec(numbers, shape.as_slice(), device)?.to_dtype(dtype)
}

/// Blends from `before` to `x`, two views `[h, w, c]` of one shape and dtype, into `x`: the weight of `x` is the row
/// index (or column index) over the number of rows (columns), from 0.
///
/// # Errors
/// When shapes do not match.
pub fn blend(before: &Tensor, x: &Tensor, by_row: bool) -> Result<()> {
    let (rows, columns, channels) = x.dims3()?;
    if before.dims() != x.dims() || before.dtype() != x.dtype() {
        candle_core::bail!("{:?} blended with {:?}", before.dims(), x.dims());
    }
    if x.elem_count() == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::blend(before, x, by_row);
    }
    let before = apart_from(before, x)?;
    let width = columns * channels;
    with_rows(&before, width, |before| {
        write_rows(x, width, |row, numbers| {
            for (place, (number, before)) in numbers.iter_mut().zip(before.row(row)).enumerate() {
                let share = match by_row {
                    true => row as f32 / rows as f32,
                    false => (place / channels) as f32 / columns as f32,
                };
                *number = before + (*number - before) * share;
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random};

    #[test]
    fn planes_and_maps_round_trip() -> Result<()> {
        let planes = random(&[1, 5, 7, 9], 1)?;
        let expected = planes
            .squeeze(0)?
            .permute((1, 2, 0))?
            .affine(2.0, 0.25)?
            .contiguous()?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let map = planes_to_map(&here(&planes), (2.0, 0.25), dtype)?;
            assert_eq!(map.dtype(), dtype);
            let most = if dtype == DType::F32 { 0.0 } else { 6e-3 };
            let host = map.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            assert_close(&host, &expected, most)?;
            let (back, is_finite) = map_to_planes(&map)?;
            assert_close(&back, &host.permute((2, 0, 1))?.unsqueeze(0)?.contiguous()?, 0.0)?;
            assert!(is_finite);
        }
        Ok(())
    }

    #[test]
    fn a_value_that_is_not_finite_is_reported() -> Result<()> {
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 17, 41] {
                let mut numbers = vec![f32::MAX; 42];
                numbers[place] = strange;
                let map = here(&Tensor::from_vec(numbers, (2, 7, 3), &Device::Cpu)?);
                assert!(!map_to_planes(&map)?.1 && !map_to_bytes(&map)?.1);
            }
        }
        Ok(())
    }

    #[test]
    fn bytes_are_rounded_half_to_even_as_numpy_does() -> Result<()> {
        // Every byte, the midpoints, and values out of range.
        let exact: Vec<u8> = (0..=255).cycle().take(3 * 256).collect();
        for dtype in [DType::F32, DType::BF16] {
            let map = bytes_to_map(&exact, [16, 16, 3], dtype, crate::testing::test_device())?;
            if dtype == DType::F32 {
                assert_eq!(map_to_bytes(&map)?, (exact.clone(), true));
            }
            let (planes, _) = map_to_planes(&map)?;
            let first = planes.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
            assert!((first[1] - (2.0 * (3.0 / 255.0) - 1.0)).abs() < 4e-3);
        }
        let numbers: Vec<f32> = (-40..=1060).map(|i| i as f32 / 1020.0 * 2.0 - 1.0).collect();
        let count = numbers.len();
        let expected: Vec<u8> = numbers
            .iter()
            .map(|value| ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8)
            .collect();
        let map = here(&Tensor::from_vec(numbers, (1, count, 1), &Device::Cpu)?);
        assert_eq!(map_to_bytes(&map)?, (expected, true));
        assert!(bytes_to_map(&exact, [16, 16, 1], DType::F32, &Device::Cpu).is_err());
        Ok(())
    }

    #[test]
    fn views_are_blended_in_place() -> Result<()> {
        let (before, x) = (random(&[6, 9, 3], 1)?, random(&[8, 7, 3], 2)?);
        for by_row in [true, false] {
            let (before, x) = (here(&before), here(&x).copy()?);
            let from = before.narrow(0, 2, 4)?.narrow(1, 3, 5)?;
            let to = x.narrow(0, 1, 4)?.narrow(1, 0, 5)?;
            let host = |t: &Tensor| t.to_device(&Device::Cpu)?.contiguous();
            let (a, b) = (host(&from)?, host(&to)?);
            let steps = if by_row { 4 } else { 5 };
            let shares: Vec<f32> = (0..steps).map(|i| i as f32 / steps as f32).collect();
            let shape = if by_row { (steps, 1, 1) } else { (1, steps, 1) };
            let shares = Tensor::from_vec(shares, shape, &Device::Cpu)?;
            let expected = (&a + (b - &a)?.broadcast_mul(&shares)?)?;
            let beside = host(&x.narrow(1, 5, 2)?)?;
            blend(&from, &to, by_row)?;
            assert_close(&host(&to)?, &expected, 1e-7)?;
            assert_close(&host(&x.narrow(1, 5, 2)?)?, &beside, 0.0)?;
        }
        Ok(())
    }
}
