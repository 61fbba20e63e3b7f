//! Euler steps on a latent.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};

use crate::place::{with_rows, write_rows};

/// Accumulates whether all values seen were finite.
#[derive(Debug)]
pub struct Finite {
    /// u32 `[1]` on a card, nonzero once a value was not finite.
    flag: Option<Tensor>,
    is_not: AtomicBool,
}

impl Finite {
    /// A new accumulator, in the state finite.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Device) -> Result<Finite> {
        Ok(Finite {
            flag: match device {
                Device::Cpu => None,
                _ => Some(Tensor::zeros(1, DType::U32, device)?),
            },
            is_not: AtomicBool::new(false),
        })
    }

    /// Whether all values were finite. On a card this synchronizes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn is_finite(&self) -> Result<bool> {
        match &self.flag {
            Some(flag) => Ok(flag.to_vec1::<u32>()? == [0]),
            None => Ok(!self.is_not.load(Ordering::Relaxed)),
        }
    }

    /// The flag on the card.
    #[cfg(feature = "cuda")]
    pub(crate) fn flag(&self) -> Result<&Tensor> {
        let missing = || candle_core::Error::Msg("the flag of finiteness is on another device".to_owned());
        self.flag.as_ref().ok_or_else(missing)
    }
}

/// `latent += velocity * by`, in f32, in place, as `FlowMatchEulerDiscreteScheduler.step` does. `seen` is set to the
/// result in its own dtype, which is that of the velocity, as the next step's input; `finite` is updated. All three
/// are contiguous and have the same shape.
///
/// # Errors
/// When shapes or dtypes do not match.
pub fn euler(latent: &Tensor, velocity: &Tensor, by: f64, seen: &Tensor, finite: &Finite) -> Result<()> {
    let all = [latent, velocity, seen];
    let fits = all.iter().all(|x| x.is_contiguous() && x.dims() == latent.dims())
        && latent.dtype() == DType::F32
        && seen.dtype() == velocity.dtype();
    if !fits {
        candle_core::bail!(
            "a step of {:?} {:?} by {:?} {:?} to {:?} {:?}",
            latent.dims(),
            latent.dtype(),
            velocity.dims(),
            velocity.dtype(),
            seen.dims(),
            seen.dtype()
        );
    }
    #[cfg(feature = "cuda")]
    if latent.device().is_cuda() {
        return crate::cuda::euler(latent, velocity, by as f32, seen, finite);
    }
    let width = latent.dim(candle_core::D::Minus1)?;
    with_rows(velocity, width, |velocity| {
        write_rows(latent, width, |row, numbers| {
            for (number, velocity) in numbers.iter_mut().zip(velocity.row(row)) {
                *number += velocity * by as f32;
                if !number.is_finite() {
                    finite.is_not.store(true, Ordering::Relaxed);
                }
            }
        })
    })?;
    with_rows(latent, width, |latent| {
        write_rows(seen, width, |row, numbers| {
            numbers.copy_from_slice(latent.row(row))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random, test_device};

    #[test]
    fn an_euler_step_updates_the_latent_and_its_copy() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (before, velocity) = (random(&[2, 37, 5], 1)?, random(&[2, 37, 5], 2)?.to_dtype(dtype)?);
            let expected = (&before + (velocity.to_dtype(DType::F32)? * -0.25)?)?;
            let (latent, seen) = (here(&before).copy()?, here(&velocity).copy()?);
            let finite = Finite::new(test_device())?;
            euler(&latent, &here(&velocity), -0.25, &seen, &finite)?;
            assert_close(&latent, &expected, 1e-6)?;
            assert_close(&seen, &expected.to_dtype(dtype)?, 1e-6)?;
            assert!(finite.is_finite()?);
        }
        Ok(())
    }

    #[test]
    fn a_value_that_is_not_finite_sets_the_flag_permanently() -> Result<()> {
        let mut numbers = vec![0f32; 600];
        numbers[517] = f32::INFINITY;
        let velocity = here(&Tensor::from_vec(numbers, (1, 600), &Device::Cpu)?);
        let still = here(&Tensor::zeros((1, 600), DType::F32, &Device::Cpu)?);
        let (latent, seen) = (still.copy()?, still.copy()?);
        let finite = Finite::new(test_device())?;
        euler(&latent, &still, 1.0, &seen, &finite)?;
        assert!(finite.is_finite()?);
        euler(&latent, &velocity, 1.0, &seen, &finite)?;
        assert!(!finite.is_finite()?);
        euler(&latent, &still, 1.0, &seen, &finite)?;
        assert!(!finite.is_finite()?);
        Ok(())
    }

    #[test]
    fn shapes_and_dtypes_that_do_not_fit_are_refused() -> Result<()> {
        let x = here(&random(&[1, 6], 1)?);
        let finite = Finite::new(test_device())?;
        assert!(euler(&x, &x.narrow(1, 0, 3)?, 1.0, &x.copy()?, &finite).is_err());
        assert!(euler(&x, &x.copy()?, 1.0, &x.to_dtype(DType::BF16)?, &finite).is_err());
        Ok(())
    }
}
