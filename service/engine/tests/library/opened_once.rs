//! An open model is not opened again: neither for another name of its formats, nor with another adapter.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use engine::library::{Entry, Library};
use gpu::{CardDescription, CardKind, CheckpointFile};
use pipelines::instant::Instant;
use pipelines::{
    AdapterFile, AdapterKind, Family, FamilyList, Model, ModelError, Precision, Preset, Quantization,
};
use residency::Bytes;

/// The family `instant`, which counts how often it opens a model.
struct Counted(Arc<AtomicUsize>);

impl Family for Counted {
    fn name(&self) -> &'static str {
        Instant.name()
    }
    fn file_endings(&self) -> &'static [&'static str] {
        Instant.file_endings()
    }
    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Instant.open(path, file, precision)
    }
}

fn card() -> CardDescription {
    CardDescription {
        id: "cpu".into(),
        kind: CardKind::Cpu,
        name: String::new(),
        total: Bytes::gib(1),
        compute_capability: None,
        compute_dtype: "f32".into(),
        peers: gpu::Peers::none(),
    }
}

/// A library that has opened nothing, its counter, and a model.
fn library(folder: &Path) -> (Arc<Library>, Arc<AtomicUsize>, Entry) {
    let opened = Arc::new(AtomicUsize::new(0));
    let families = FamilyList::new(vec![Box::new(Counted(opened.clone()))]);
    let path = folder.join("base.instant.json");
    let component = r#"{"name": "transformer", "bytes": 1048576, "identity": "base"}"#;
    fs::write(
        &path,
        format!(r#"{{"name": "base", "components": [{component}]}}"#),
    )
    .unwrap();
    let entry = Entry::new("base".into(), String::new(), path, Quantization::NONE);
    (Arc::new(Library::new(families, None)), opened, entry)
}

#[tokio::test]
async fn the_formats_of_a_model_are_named_without_opening_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let (library, opened, entry) = library(folder.path());
    let formats = Quantization::of(Preset::Full, [("transformer", "nf4")]).unwrap();
    let asked = Arc::new(entry.quantized(formats));
    for _ in 0..3 {
        let named = library.canonical(asked.clone(), card()).await.unwrap();
        assert_eq!(named.key, "base+4-bit");
        assert_eq!(opened.load(Ordering::Relaxed), 1);
    }
    // A file that has been replaced is another model.
    let text = fs::read_to_string(&entry.path).unwrap();
    fs::write(&entry.path, format!("{text}\n")).unwrap();
    library.canonical(asked, card()).await.unwrap();
    assert_eq!(opened.load(Ordering::Relaxed), 2);
}

#[test]
fn adapters_share_the_open_base() {
    let folder = tempfile::tempdir().unwrap();
    let (library, opened, entry) = library(folder.path());
    for name in ["ink", "oil"] {
        let path = folder.path().join(format!("{name}.safetensors"));
        fs::write(&path, format!(r#"{{"identity": "{name}", "bytes": 1024}}"#)).unwrap();
        let file = AdapterFile {
            name: name.to_owned(),
            path,
            kind: AdapterKind::Lora,
            ignores_unknown: false,
        };
        let adapted = entry.with_adapters(vec![file]);
        assert_eq!(library.open(&adapted, &card()).unwrap().components.len(), 2);
    }
    assert_eq!(library.open(&entry, &card()).unwrap().components.len(), 1);
    assert_eq!(opened.load(Ordering::Relaxed), 1);
}
