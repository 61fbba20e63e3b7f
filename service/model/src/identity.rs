//! A component's provisional identity, until its content has been hashed: the versions of its files.

use std::io;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use gpu::{CheckpointFile, FileStamp, LoadPlan, WeightFormat};
use residency::ComponentId;

/// A file that a component is read from, as it was when its model was opened.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelFile {
    /// The path at which the file was found.
    pub path: Arc<Path>,
    /// The version of the file that was opened.
    pub stamp: FileStamp,
}

impl ModelFile {
    /// The file at a path, as it is now.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn at(path: &Path) -> io::Result<ModelFile> {
        let stamp = FileStamp::at(path)?;
        Ok(ModelFile {
            path: path.into(),
            stamp,
        })
    }

    /// The file whose header was read.
    pub fn of(file: &CheckpointFile) -> ModelFile {
        ModelFile {
            path: Arc::clone(file.path()),
            stamp: *file.stamp(),
        }
    }

    /// Whether the file at the path is still this version.
    pub fn is_current(&self) -> bool {
        FileStamp::at(&self.path).is_ok_and(|now| now == self.stamp)
    }
}

/// The identity of a component until the hash of its content is known: its path, and a digest of its files' stamps, so that
/// other bytes at the same path are another component. `format` is the format to which it is quantized at load.
pub fn provisional_identity(
    path: &Path,
    files: &[ModelFile],
    component_name: &str,
    dtype: DType,
    format: Option<WeightFormat>,
) -> ComponentId {
    let (path, dtype) = (path.display(), dtype.as_str());
    let mut digest = blake3::Hasher::new();
    for file in files {
        digest.update(format!("{:?}", file.stamp).as_bytes());
    }
    let digest = digest.finalize().to_hex();
    let version = &digest[..16];
    ComponentId::new(match format {
        None => format!("path:{path}#{component_name}~{version}@{dtype}"),
        Some(format) => format!("path:{path}#{component_name}~{version}@{dtype}:{format}"),
    })
}

/// A digest of the names of the tensors that are loaded. With another base, the same LoRA file has tensors for other layers.
pub fn digest_of_names(plan: &LoadPlan) -> String {
    let mut digest = blake3::Hasher::new();
    if let LoadPlan::Files(sources) = plan {
        for source in sources {
            digest.update(source.name.as_bytes());
            digest.update(b"\n");
        }
    }
    digest.finalize().to_hex()[..16].to_owned()
}
