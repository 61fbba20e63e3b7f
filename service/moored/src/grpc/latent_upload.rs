//! A latent that a client brings, chunk by chunk.

use futures::StreamExt as _;
use pipelines::{HostTensor, HostType, Values};
use tonic::{Status, Streaming};

use super::status::{invalid, status_of};
use crate::proto::v1;

/// Largest latent that a client may bring: 4096 x 4096 pixels in f32, sixteen channels.
const LARGEST_LATENT_BYTES: usize = 16 * 512 * 512 * 4;

/// Reads all chunks: the values, and the identity of what decodes them.
pub(super) async fn receive_latent(
    mut chunks: Streaming<v1::LatentChunk>,
) -> Result<(Values, String), Status> {
    let mut info: Option<v1::LatentInfo> = None;
    let mut data = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if info.is_none() {
            info = chunk.info;
        }
        if data.len() + chunk.chunk.len() > LARGEST_LATENT_BYTES {
            let problem = format!("is larger than {} MiB", LARGEST_LATENT_BYTES >> 20);
            return Err(status_of(&invalid("chunk", problem)));
        }
        data.extend_from_slice(&chunk.chunk);
    }
    let info = info.ok_or_else(|| status_of(&invalid("info", "is missing on the first chunk")))?;
    if info.dtype != "f32" {
        return Err(status_of(&invalid(
            "info.dtype",
            format!("{:?} is not f32", info.dtype),
        )));
    }
    let sides = |shape: &[u32]| shape.iter().map(|&n| n as usize).collect::<Vec<usize>>();
    let mut data = bytes::Bytes::from(data);
    let mut values = Values::new();
    // One tensor alone may go without a name.
    let alone = [v1::TensorInfo {
        name: String::new(),
        shape: info.shape.clone(),
    }];
    let tensors = if info.tensors.is_empty() {
        &alone
    } else {
        &info.tensors[..]
    };
    for (index, tensor) in tensors.iter().enumerate() {
        let shape = sides(&tensor.shape);
        let numbers = shape
            .iter()
            .try_fold(4_usize, |bytes, side| bytes.checked_mul(*side));
        let is_last = index + 1 == tensors.len();
        let bytes = numbers
            .filter(|bytes| !is_last && *bytes <= data.len())
            .unwrap_or(data.len());
        let tensor_data = data.split_to(bytes);
        let tensor_of_values = HostTensor {
            dtype: HostType::F32,
            shape,
            data: tensor_data,
        };
        values.insert(tensor.name.clone(), tensor_of_values);
    }
    Ok((values, info.vae_id))
}
