//! Cache of opened models. They hold no weights, so they are kept until their files change.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use hashlink::LruCache;
use model::{AdapterFile, Model, ModelError, ModelOpener, Precision, Quantization};
use residency::{Component, ComponentId};

use crate::messages::ModelLocation;
use crate::stamps::{PathStamps, Stamps};

/// Capacity of the cache. Opening a model again costs milliseconds. Beyond it, the model that was used longest ago is forgotten and
/// no other: orders for the others may name versions of files that have been replaced since.
const CAPACITY: usize = 64;

/// Open models by path, quantization, and adapters.
pub(super) struct Models {
    families: Box<dyn ModelOpener>,
    dtype: DType,
    opened: LruCache<OpenedKey, CachedModel>,
}

type OpenedKey = (PathBuf, Quantization, Vec<AdapterFile>);

struct CachedModel {
    latest: Version,
    stamps: Stamps,
    /// The version before its files were replaced: components of it may still be resident.
    earlier: Option<Version>,
}

/// One version of a model, as it was opened.
struct Version {
    model: Arc<dyn Model>,
    /// Identities of its components, as orders named them.
    identities: BTreeSet<ComponentId>,
}

impl std::fmt::Debug for Models {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Models")
            .field(
                "opened",
                &self.opened.iter().map(|(key, _)| key).collect::<Vec<_>>(),
            )
            .finish_non_exhaustive()
    }
}

impl Models {
    pub(super) fn new(families: Box<dyn ModelOpener>, dtype: DType) -> Models {
        Models {
            families,
            dtype,
            opened: LruCache::new(CAPACITY),
        }
    }

    /// An open model, if none of its files has changed.
    fn current(&mut self, key: &OpenedKey) -> Option<Arc<dyn Model>> {
        let known = self.opened.get(key)?;
        known
            .stamps
            .are_current()
            .then(|| Arc::clone(&known.latest.model))
    }

    /// Records that these identities of components, from an order, belong to the current files of a model.
    pub(super) fn checked(&mut self, location: &ModelLocation, components: &[Component]) {
        if let Some(known) = self.opened.get_mut(&model_key_of(location)) {
            let ids = components.iter().map(|component| component.id.clone());
            known.latest.identities.extend(ids);
        }
    }

    /// The version of a model to which these identities belong. Its files may have been replaced since.
    pub(super) fn opened_as(
        &self,
        location: &ModelLocation,
        components: &[Component],
    ) -> Option<Arc<dyn Model>> {
        let known = self.opened.peek(&model_key_of(location))?;
        let mut versions = std::iter::once(&known.latest).chain(&known.earlier);
        let version =
            versions.find(|version| components.iter().all(|c| version.identities.contains(&c.id)))?;
        Some(Arc::clone(&version.model))
    }

    /// The model at a path: from the cache, if none of its files has changed.
    pub(super) fn open(&mut self, location: &ModelLocation) -> Result<Arc<dyn Model>, ModelError> {
        let (path, quantization) = (&location.path, &location.quantization);
        let model_key = model_key_of(location);
        if let Some(known) = self.current(&model_key) {
            return Ok(known);
        }
        let around = PathStamps::of(path);
        let model = match location.adapters.is_empty() {
            true => {
                let precision = Precision {
                    dtype: self.dtype,
                    quantization: quantization.clone(),
                };
                self.families.open(path, &precision)?
            }
            false => {
                let base = ModelLocation {
                    adapters: Vec::new(),
                    ..location.clone()
                };
                self.open(&base)?.with_adapters(&location.adapters)?
            }
        };
        let earlier = self.opened.remove(&model_key).map(|known| known.latest);
        let opened = CachedModel {
            stamps: Stamps::of(around, &*model),
            latest: Version {
                model: Arc::clone(&model),
                identities: BTreeSet::new(),
            },
            earlier,
        };
        self.opened.insert(model_key, opened);
        Ok(model)
    }
}

fn model_key_of(location: &ModelLocation) -> OpenedKey {
    let (path, quantization) = (location.path.clone(), location.quantization.clone());
    (path, quantization, location.adapters.clone())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use pipelines::instant::Instant;

    use super::*;

    /// A file of a model in a folder.
    fn write(folder: &std::path::Path, name: &str) -> ModelLocation {
        let path = folder.join(format!("{name}.instant.json"));
        let component = format!(r#"{{"name": "transformer", "bytes": 1048576, "identity": "{name}"}}"#);
        std::fs::write(
            &path,
            format!(r#"{{"name": "{name}", "components": [{component}]}}"#),
        )
        .unwrap();
        ModelLocation {
            key: name.to_owned(),
            path,
            quantization: Quantization::NONE,
            adapters: Vec::new(),
            kept: Vec::new(),
            identities: Vec::new(),
        }
    }

    #[test]
    fn the_base_of_an_adapter_is_kept_open_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let mut models = Models::new(
            Box::new(pipelines::FamilyList::new(vec![Box::new(Instant)])),
            DType::F32,
        );
        let base = write(folder.path(), "base");
        let path = folder.path().join("ink.safetensors");
        std::fs::write(&path, r#"{"identity": "ink", "bytes": 1024}"#).unwrap();
        let adapted = ModelLocation {
            adapters: vec![AdapterFile {
                name: "ink".to_owned(),
                path,
                kind: pipelines::AdapterKind::Lora,
                ignores_unknown: false,
            }],
            ..base.clone()
        };
        let with_ink = models.open(&adapted).unwrap();
        assert_eq!(with_ink.components().len(), 2);
        let kept = models.current(&model_key_of(&base)).unwrap();
        assert_eq!(kept.components().len(), 1);
        assert!(Arc::ptr_eq(&models.open(&base).unwrap(), &kept));
    }

    #[test]
    fn a_full_cache_forgets_the_least_recently_used_model_alone() {
        let folder = tempfile::tempdir().unwrap();
        let mut models = Models::new(
            Box::new(pipelines::FamilyList::new(vec![Box::new(Instant)])),
            DType::F32,
        );
        let used = write(folder.path(), "used");
        let unused = write(folder.path(), "unused");
        for location in [&unused, &used] {
            models.open(location).unwrap();
        }
        for number in 0..CAPACITY {
            models
                .open(&write(folder.path(), &format!("other-{number}")))
                .unwrap();
            models.open(&used).unwrap();
        }
        assert!(models.opened_as(&used, &[]).is_some());
        assert!(models.opened_as(&unused, &[]).is_none());
        assert_eq!(models.opened.len(), CAPACITY);
    }
}
