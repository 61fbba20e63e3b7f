//! Cache of opened models. They hold no weights, so they are kept until their files change.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use pipelines::{AdapterFile, Catalogue, Model, ModelError, Precision, Quantization};

use crate::messages::ModelLocation;
use crate::stamps::{Around, Stamps};

/// Capacity of the cache. Opening a model again costs milliseconds.
const CAPACITY: usize = 64;

/// Open models by path, quantization, and adapters.
pub(super) struct Models {
    catalogue: Catalogue,
    dtype: DType,
    opened: HashMap<ModelKey, CachedModel>,
}

type ModelKey = (PathBuf, Quantization, Vec<AdapterFile>);

struct CachedModel {
    model: Arc<dyn Model>,
    stamps: Stamps,
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

    /// An open model, if none of its files has changed.
    fn current(&self, key: &ModelKey) -> Option<Arc<dyn Model>> {
        let known = self.opened.get(key)?;
        known.stamps.are_current().then(|| Arc::clone(&known.model))
    }

    /// The model at a path: from the cache, if none of its files has changed.
    pub(super) fn open(&mut self, location: &ModelLocation) -> Result<Arc<dyn Model>, ModelError> {
        let (path, quantization) = (&location.path, &location.quantization);
        let shelf = (path.clone(), quantization.clone(), location.adapters.clone());
        if let Some(known) = self.current(&shelf) {
            return Ok(known);
        }
        self.opened.remove(&shelf);
        let precision = Precision {
            dtype: self.dtype,
            quantization: quantization.clone(),
        };
        let around = Around::of(path);
        let base = (path.clone(), quantization.clone(), Vec::new());
        let mut model = match self.current(&base) {
            Some(base) => base,
            None => self.catalogue.open(path, &precision)?,
        };
        if !location.adapters.is_empty() {
            model = model.with_adapters(&location.adapters)?;
        }
        if self.opened.len() >= CAPACITY {
            self.opened.clear();
        }
        let stamps = Stamps::of(around, &*model);
        self.opened.insert(
            shelf,
            CachedModel {
                model: Arc::clone(&model),
                stamps,
            },
        );
        Ok(model)
    }
}
