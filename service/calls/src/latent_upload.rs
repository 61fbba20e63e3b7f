//! The upload of a latent, in chunks.

use engine::Error;
use model::{HostTensor, HostType, Values};
use residency::Bytes;

use crate::errors::{invalid, short, too_many};

/// Most tensors of a latent, and dimensions of each. The longest film has 500 sections, each a tensor.
const MOST_TENSORS: usize = 512;
const MOST_DIMENSIONS: usize = 8;

/// A client's description of a latent that it uploads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatentDescription {
    /// Identity of its decoder.
    pub decoder_id: String,
    pub dtype: String,
    /// Shape of a single tensor without a name.
    pub shape: Vec<u32>,
    /// Names and shapes of several tensors, in the order of their data.
    pub tensors: Vec<(String, Vec<u32>)>,
}

/// A latent that is being uploaded.
pub struct LatentUpload {
    most: Bytes,
    description: Option<LatentDescription>,
    data: Vec<u8>,
}

impl LatentUpload {
    /// An upload of at most `most` bytes.
    pub(crate) fn new(most: Bytes) -> LatentUpload {
        LatentUpload {
            most,
            description: None,
            data: Vec::new(),
        }
    }

    /// Adds a chunk; the first describes the latent.
    ///
    /// # Errors
    /// When it has more bytes than all latents may take, or its description is too long.
    pub fn add(&mut self, description: Option<LatentDescription>, chunk: &[u8]) -> Result<(), Error> {
        if self.description.is_none()
            && let Some(first) = description
        {
            check(&first)?;
            self.description = Some(first);
        }
        if (self.data.len() + chunk.len()) as u64 > self.most.0 {
            let most = self.most;
            let problem = format!("is larger than {most}, which all latents may take: raise queue.latents");
            return Err(invalid("chunk", problem));
        }
        self.data.extend_from_slice(chunk);
        Ok(())
    }

    /// The tensors and the identity of their decoder, after the last chunk.
    ///
    /// # Errors
    /// When there is no description, it is of another dtype or contradicts itself, or numbers are not finite.
    pub(crate) fn finish(self) -> Result<(Values, String), Error> {
        let description = self
            .description
            .ok_or_else(|| invalid("info", "is missing: send it with the first chunk"))?;
        if description.dtype != "f32" {
            let problem = format!("{:?} is not supported: send the latent as f32", description.dtype);
            return Err(invalid("info.dtype", problem));
        }
        if let Some((_, first)) = description.tensors.first()
            && !description.shape.is_empty()
            && description.shape != *first
        {
            let problem = format!(
                "is {:?}, and the first of its tensors is {first:?}: leave it out, or send the same",
                description.shape
            );
            return Err(invalid("info.shape", problem));
        }
        if !are_finite(&self.data) {
            let problem =
                "has numbers that are not finite (NaN, infinity): no decoder makes anything of them";
            return Err(invalid("chunk", problem));
        }
        let mut data = bytes::Bytes::from(self.data);
        let mut values = Values::new();
        // A single tensor needs no name.
        let tensors = match description.tensors.is_empty() {
            true => vec![(String::new(), description.shape)],
            false => description.tensors,
        };
        let last = tensors.len() - 1;
        for (index, (name, shape)) in tensors.into_iter().enumerate() {
            let shape: Vec<usize> = shape.iter().map(|&side| side as usize).collect();
            let numbers = shape
                .iter()
                .try_fold(4_usize, |bytes, side| bytes.checked_mul(*side));
            let bytes = numbers
                .filter(|bytes| index < last && *bytes <= data.len())
                .unwrap_or(data.len());
            let tensor = HostTensor {
                dtype: HostType::F32,
                shape,
                data: data.split_to(bytes),
            };
            if values.insert(name.clone(), tensor).is_some() {
                let problem = format!("has two tensors of the name {name:?}");
                return Err(invalid("info.tensors", problem));
            }
        }
        Ok((values, description.decoder_id))
    }
}

/// Whether all numbers of f32 are finite.
fn are_finite(data: &[u8]) -> bool {
    data.as_chunks()
        .0
        .iter()
        .all(|bytes| f32::from_le_bytes(*bytes).is_finite())
}

/// Bounds the description of a latent, which is kept beside its values.
fn check(info: &LatentDescription) -> Result<(), Error> {
    short("info.vae_id", &info.decoder_id)?;
    short("info.dtype", &info.dtype)?;
    if info.tensors.len() > MOST_TENSORS {
        return Err(invalid(
            "info.tensors",
            too_many(info.tensors.len(), "tensors", MOST_TENSORS),
        ));
    }
    let shapes = info.tensors.iter().map(|(_, shape)| shape).chain([&info.shape]);
    for shape in shapes {
        if shape.len() > MOST_DIMENSIONS {
            return Err(invalid(
                "info.shape",
                too_many(shape.len(), "dimensions", MOST_DIMENSIONS),
            ));
        }
    }
    let mut names = info.tensors.iter().map(|(name, _)| name);
    names.try_for_each(|name| short("info.tensors.name", name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_tensors_of_one_name_are_refused() {
        let tensor = || ("a".to_owned(), vec![1]);
        let description = LatentDescription {
            dtype: "f32".to_owned(),
            tensors: vec![tensor(), tensor()],
            ..LatentDescription::default()
        };
        let mut upload = LatentUpload::new(Bytes(100));
        upload.add(Some(description), &[0; 8]).unwrap();
        let refused = upload.finish().unwrap_err().to_string();
        assert!(refused.contains("two tensors"), "{refused}");
    }

    fn refused(shape: Vec<u32>, tensors: Vec<(String, Vec<u32>)>, numbers: &[f32]) -> Option<String> {
        let description = LatentDescription {
            dtype: "f32".to_owned(),
            shape,
            tensors,
            ..LatentDescription::default()
        };
        let mut upload = LatentUpload::new(Bytes(100));
        let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        upload.add(Some(description), &data).unwrap();
        upload.finish().err().map(|error| error.to_string())
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let told = refused(vec![2], Vec::new(), &[1.0, wrong]).unwrap();
            assert!(told.contains("chunk") && told.contains("not finite"), "{told}");
        }
        assert_eq!(refused(vec![2], Vec::new(), &[f32::MAX, f32::MIN_POSITIVE]), None);
    }

    #[test]
    fn a_shape_that_contradicts_the_tensors_is_refused() {
        let tensors = || vec![("a".to_owned(), vec![1]), ("b".to_owned(), vec![2])];
        let told = refused(vec![3], tensors(), &[0.0; 3]).unwrap();
        assert!(told.contains("info.shape"), "{told}");
        assert_eq!(refused(vec![1], tensors(), &[0.0; 3]), None);
        assert_eq!(refused(Vec::new(), tensors(), &[0.0; 3]), None);
    }

    #[test]
    fn the_description_of_a_latent_is_bounded() {
        let tensor = |name: &str, dimensions| (name.to_owned(), vec![1; dimensions]);
        let (long, good) = ("x".repeat(10_000), LatentDescription::default());
        let wrong = [
            LatentDescription {
                decoder_id: long.clone(),
                ..good.clone()
            },
            LatentDescription {
                dtype: long.clone(),
                ..good.clone()
            },
            LatentDescription {
                shape: vec![1; 100],
                ..good.clone()
            },
            LatentDescription {
                tensors: vec![tensor(&long, 1)],
                ..good.clone()
            },
            LatentDescription {
                tensors: vec![tensor("a", 100)],
                ..good.clone()
            },
            LatentDescription {
                tensors: vec![tensor("a", 1); MOST_TENSORS + 1],
                ..good.clone()
            },
        ];
        for info in wrong {
            assert!(
                check(&info).is_err(),
                "{} tensors, {} characters",
                info.tensors.len(),
                info.decoder_id.len()
            );
        }
        for tensors in [
            vec![tensor("video", 5), tensor("sound", 3)],
            vec![tensor("section", 5); 500],
        ] {
            assert!(
                check(&LatentDescription {
                    tensors,
                    ..good.clone()
                })
                .is_ok()
            );
        }
    }
}
