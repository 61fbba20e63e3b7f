//! Models that the card has opened. They hold no weights, so they are kept until their files change.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::FileStamp;
use pipelines::{Catalogue, Model, ModelError, Precision, Quantization};

use crate::messages::ModelLocation;

/// How many are kept. Opening one again costs milliseconds.
const MOST: usize = 256;

/// Opened models by path, and by what they are quantized to.
pub(super) struct Models {
    catalogue: Catalogue,
    dtype: DType,
    opened: HashMap<(PathBuf, Quantization), Opened>,
}

struct Opened {
    model: Arc<dyn Model>,
    /// Of the files that it was opened from, in [`stamps`]' order.
    stamps: Vec<Option<FileStamp>>,
}

impl std::fmt::Debug for Models {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Models")
            .field("opened", &self.opened.keys())
            .finish_non_exhaustive()
    }
}

impl Models {
    pub(super) fn new(catalogue: Catalogue, dtype: DType) -> Models {
        Models {
            catalogue,
            dtype,
            opened: HashMap::new(),
        }
    }

    /// The model at a path: the one that was opened before, as long as none of its files has changed.
    pub(super) fn open(&mut self, location: &ModelLocation) -> Result<Arc<dyn Model>, ModelError> {
        let (path, quantization) = (&location.path, &location.quantization);
        let shelf = (path.clone(), quantization.clone());
        if let Some(known) = self.opened.get(&shelf)
            && known.stamps == stamps(path, &*known.model)
        {
            return Ok(Arc::clone(&known.model));
        }
        self.opened.remove(&shelf);
        let precision = Precision {
            dtype: self.dtype,
            quantization: quantization.clone(),
        };
        let model = self.catalogue.open(path, &precision)?;
        if self.opened.len() >= MOST {
            self.opened.clear();
        }
        let stamps = stamps(path, &*model);
        self.opened.insert(
            shelf,
            Opened {
                model: Arc::clone(&model),
                stamps,
            },
        );
        Ok(model)
    }
}

/// Stamps of all that a model was opened from: the path itself, what lies in it if it is a folder, and the files of its
/// components. What cannot be read has none.
fn stamps(path: &Path, model: &dyn Model) -> Vec<Option<FileStamp>> {
    let mut inside: Vec<PathBuf> = std::fs::read_dir(path)
        .map(|entries| entries.filter_map(Result::ok).map(|entry| entry.path()).collect())
        .unwrap_or_default();
    inside.sort_unstable();
    let weights = model.components().iter().flat_map(|c| model.files_of(&c.name));
    let own = std::iter::once(path.to_owned()).chain(inside);
    own.chain(weights.map(|file| file.to_path_buf()))
        .map(|file| stamp(&file))
        .collect()
}

fn stamp(file: &Path) -> Option<FileStamp> {
    File::open(file).and_then(|file| FileStamp::of(&file)).ok()
}
