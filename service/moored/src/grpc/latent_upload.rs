//! The upload of a latent, in chunks.

use api::v1;
use engine::Error;
use futures::StreamExt as _;
use pipelines::{HostTensor, HostType, Values};
use residency::Bytes;
use tonic::{Status, Streaming};

use super::status::{invalid, short, status_of};

/// Most tensors of a latent, and dimensions of each. The longest film has 500 sections, each a tensor.
const MOST_TENSORS: usize = 512;
const MOST_DIMENSIONS: usize = 8;

/// Reads all chunks, of so many bytes at the most: the values, and the identity of what decodes them.
pub(super) async fn receive_latent(
    mut chunks: Streaming<v1::LatentChunk>,
    most: Bytes,
) -> Result<(Values, String), Status> {
    let mut info: Option<v1::LatentInfo> = None;
    let mut data = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if info.is_none()
            && let Some(first) = chunk.info
        {
            check(&first).map_err(|problem| status_of(&problem))?;
            info = Some(first);
        }
        if (data.len() + chunk.chunk.len()) as u64 > most.0 {
            let problem = format!("is larger than {most}, which all latents may take: raise queue.latents");
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

/// Bounds the description of a latent, which is kept beside its values.
fn check(info: &v1::LatentInfo) -> Result<(), Error> {
    short("info.vae_id", &info.vae_id)?;
    short("info.dtype", &info.dtype)?;
    if info.tensors.len() > MOST_TENSORS {
        let problem = format!("has {} tensors; {MOST_TENSORS} are the most", info.tensors.len());
        return Err(invalid("info.tensors", problem));
    }
    let shapes = info
        .tensors
        .iter()
        .map(|tensor| &tensor.shape)
        .chain([&info.shape]);
    for shape in shapes {
        if shape.len() > MOST_DIMENSIONS {
            let problem = format!("has {} dimensions; {MOST_DIMENSIONS} are the most", shape.len());
            return Err(invalid("info.shape", problem));
        }
    }
    let mut names = info.tensors.iter().map(|tensor| &tensor.name);
    names.try_for_each(|name| short("info.tensors.name", name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_of_a_latent_is_bounded() {
        let tensor = |name: &str, dimensions| v1::TensorInfo {
            name: name.to_owned(),
            shape: vec![1; dimensions],
        };
        let (long, good) = ("x".repeat(10_000), v1::LatentInfo::default());
        let wrong = [
            v1::LatentInfo {
                vae_id: long.clone(),
                ..good.clone()
            },
            v1::LatentInfo {
                dtype: long.clone(),
                ..good.clone()
            },
            v1::LatentInfo {
                shape: vec![1; 100],
                ..good.clone()
            },
            v1::LatentInfo {
                tensors: vec![tensor(&long, 1)],
                ..good.clone()
            },
            v1::LatentInfo {
                tensors: vec![tensor("a", 100)],
                ..good.clone()
            },
            v1::LatentInfo {
                tensors: vec![tensor("a", 1); MOST_TENSORS + 1],
                ..good.clone()
            },
        ];
        for info in wrong {
            assert!(
                check(&info).is_err(),
                "{} tensors, {} characters",
                info.tensors.len(),
                info.vae_id.len()
            );
        }
        for tensors in [
            vec![tensor("video", 5), tensor("sound", 3)],
            vec![tensor("section", 5); 500],
        ] {
            assert!(
                check(&v1::LatentInfo {
                    tensors,
                    ..good.clone()
                })
                .is_ok()
            );
        }
    }
}
