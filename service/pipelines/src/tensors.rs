//! Copies of tensors between card and host.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use crate::{HostTensor, HostType, StageError};

/// Copies a tensor to the host; dtypes other than f32, f16 and bf16 are converted to f32.
pub(crate) fn to_host(tensor: &Tensor) -> Result<HostTensor, StageError> {
    let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
    let (dtype, data) = match tensor.dtype() {
        DType::BF16 => (
            HostType::Bf16,
            bytes(&flat.to_vec1::<bf16>()?, |number| number.to_le_bytes()),
        ),
        DType::F16 => (
            HostType::F16,
            bytes(&flat.to_vec1::<f16>()?, |number| number.to_le_bytes()),
        ),
        _ => (
            HostType::F32,
            bytes(&flat.to_dtype(DType::F32)?.to_vec1::<f32>()?, |n| n.to_le_bytes()),
        ),
    };
    Ok(HostTensor {
        dtype,
        shape: tensor.dims().to_vec(),
        data: data.into(),
    })
}

fn bytes<T: Copy, const N: usize>(numbers: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; N * numbers.len()];
    // Over whole slices, which compiles to one copy: the frames that a section leaves for the next have 61 MB.
    for (place, &number) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(numbers) {
        *place = to_bytes(number);
    }
    bytes
}

/// Copies a host tensor to a card, in `dtype`. The tensor may come from a client, so it is validated.
pub(crate) fn from_host(
    tensor: &HostTensor,
    name: &str,
    dtype: DType,
    device: &Device,
) -> Result<Tensor, StageError> {
    let width = match tensor.dtype {
        HostType::F32 => 4,
        HostType::F16 | HostType::Bf16 => 2,
    };
    let expected = tensor
        .shape
        .iter()
        .try_fold(width, |product: usize, &side| product.checked_mul(side));
    if expected != Some(tensor.data.len()) {
        let problem = format!(
            "{name} of shape {:?} has {} bytes",
            tensor.shape,
            tensor.data.len()
        );
        return Err(StageError::BadInput(problem));
    }
    let shape = tensor.shape.as_slice();
    // The dtype is converted on the host, where no kernel has to be loaded for it.
    let host = &Device::Cpu;
    let here = match tensor.dtype {
        HostType::F32 => Tensor::from_vec(numbers(&tensor.data, f32::from_le_bytes), shape, host),
        HostType::F16 => Tensor::from_vec(numbers(&tensor.data, f16::from_le_bytes), shape, host),
        HostType::Bf16 => Tensor::from_vec(numbers(&tensor.data, bf16::from_le_bytes), shape, host),
    };
    Ok(here?.to_dtype(dtype)?.to_device(device)?)
}

fn numbers<T, const N: usize>(data: &[u8], from_bytes: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>()
        .0
        .iter()
        .map(|&chunk| from_bytes(chunk))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_tensors_round_trip() -> Result<(), StageError> {
        let tensor = Tensor::new(&[[1.5f32, -2.0, 0.25], [3.0, 1e-3, -7.5]], &Device::Cpu)?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let tensor = tensor.to_dtype(dtype)?;
            let back = from_host(&to_host(&tensor)?, "it", dtype, &Device::Cpu)?.to_dtype(DType::F32)?;
            assert_eq!(
                back.to_vec2::<f32>()?,
                tensor.to_dtype(DType::F32)?.to_vec2::<f32>()?
            );
        }
        Ok(())
    }

    #[test]
    fn a_shape_that_contradicts_the_data_is_refused() {
        for shape in [vec![3], vec![usize::MAX, usize::MAX], vec![2, 2]] {
            let tensor = HostTensor {
                dtype: HostType::F32,
                shape,
                data: vec![0; 8].into(),
            };
            let result = from_host(&tensor, "latent", DType::F32, &Device::Cpu);
            assert!(matches!(result, Err(StageError::BadInput(_))));
        }
    }
}
