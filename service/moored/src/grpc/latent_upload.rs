//! A latent that a client brings, chunk by chunk.

use futures::StreamExt as _;
use pipelines::{HostTensor, HostType};
use tonic::{Status, Streaming};

use super::status::{invalid, status_of};
use crate::proto::v1;

/// Largest latent that a client may bring: 4096 x 4096 pixels in f32, sixteen channels.
const LARGEST_LATENT_BYTES: usize = 16 * 512 * 512 * 4;

/// Reads all chunks: the numbers, and the identity of the VAE that they belong to.
pub(super) async fn receive_latent(
    mut chunks: Streaming<v1::LatentChunk>,
) -> Result<(HostTensor, String), Status> {
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
    let shape: Vec<usize> = info.shape.iter().map(|&n| n as usize).collect();
    let tensor = HostTensor {
        dtype: HostType::F32,
        shape,
        data: data.into(),
    };
    Ok((tensor, info.vae_id))
}
