//! Identities of components: the content hash once it is known, and while no old identity is in use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::Error;
use engine::library::{Entry, Library, OpenModel};
use gpu::{CardDescription, CardKind, CheckpointFile, LoadPlan};
use model::{Model, ModelError, ModelFile, Precision, Preset, Quantization, provisional_identity};
use pipelines::{Family, FamilyList};
use residency::{Bytes, Component};

use crate::idle_model::IdleModel;

/// A family: a folder with `transformer` and `vae`, one file each, is a model.
struct Folders;

impl Family for Folders {
    fn name(&self) -> &'static str {
        "folder"
    }
    fn open(
        &self,
        path: &Path,
        _file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        if !path.join("vae").exists() {
            return Ok(None);
        }
        let file = |name: &str| ModelFile::at(&path.join(name)).unwrap();
        let formats = precision.quantization.formats(&["transformer"]);
        let component = |name: &str| Component {
            id: provisional_identity(path, &[file(name)], name, precision.dtype, formats.of(name)),
            name: name.into(),
            bytes: Bytes(1),
            reload_seconds: 0.0,
            parts: residency::Parts::default(),
        };
        let model = ["transformer", "vae"]
            .into_iter()
            .fold(IdleModel::new(precision), |model, name| {
                model.with(component(name), LoadPlan::synthetic(Bytes(1)), file(name))
            });
        Ok(Some(Arc::new(model)))
    }
}

fn library(cache: Option<PathBuf>) -> Library {
    Library::new(FamilyList::new(vec![Box::new(Folders)]), cache)
}

fn card(dtype: &str) -> CardDescription {
    CardDescription {
        id: "cpu".into(),
        kind: CardKind::Cpu,
        name: String::new(),
        total: Bytes::gib(1),
        compute_capability: None,
        compute_dtype: dtype.into(),
        peers: gpu::Peers::none(),
    }
}

fn model(folder: &Path, name: &str, transformer: &[u8], vae: &[u8]) -> Entry {
    let path = folder.join(name);
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("transformer"), transformer).unwrap();
    fs::write(path.join("vae"), vae).unwrap();
    Entry {
        key: name.into(),
        id: name.into(),
        revision: String::new(),
        path,
        quantization: model::Quantization::NONE,
        adapters: Vec::new(),
    }
}

/// A model whose transformer is a sparse file of this size.
fn model_with_hole(folder: &Path, name: &str, bytes: u64) -> Entry {
    let entry = model(folder, name, b"", b"vae");
    let transformer = fs::File::options()
        .write(true)
        .open(entry.path.join("transformer"));
    transformer.and_then(|file| file.set_len(bytes)).unwrap();
    entry
}

fn ids(open: &OpenModel) -> Vec<String> {
    open.components.iter().map(|c| c.id.to_string()).collect()
}

#[test]
fn identity_depends_on_content_and_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(None);
    let (a, b) = (
        model(folder.path(), "a", b"one", b"vae"),
        model(folder.path(), "b", b"two", b"vae"),
    );
    let (open_a, open_b) = (
        library.open(&a, &card("f32")).unwrap(),
        library.open(&b, &card("f32")).unwrap(),
    );
    let (ids_a, ids_b) = (ids(&open_a), ids(&open_b));
    assert_ne!(ids_a[0], ids_b[0]);
    assert_eq!(ids_a[1], ids_b[1], "one VAE");
    assert!(ids_a[1].len() == 20 && ids_a[1].ends_with(":f32"), "{}", ids_a[1]);
    let other = ids(&library.open(&a, &card("bf16")).unwrap());
    assert_eq!(other[1], ids_a[1].replace(":f32", ":bf16"));

    model(folder.path(), "a", b"three", b"vae");
    let changed = ids(&library.open(&a, &card("f32")).unwrap());
    assert!(
        changed[0] != ids_a[0] && changed[1] == ids_a[1],
        "a file that has changed is read again"
    );
}

/// A preset names no component: the family decides which ones it quantizes.
#[test]
fn identity_depends_on_the_format_that_the_family_gives_a_component() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(None);
    let full = model(folder.path(), "a", b"one", b"vae");
    let eight_bits = full.quantized(Quantization::preset(Preset::EightBit));
    let ids_of = |entry: &Entry| ids(&library.open(entry, &card("f32")).unwrap());
    let (of_full, of_eight_bits) = (ids_of(&full), ids_of(&eight_bits));
    assert_eq!(of_eight_bits[0], format!("{}:int8-convrot", of_full[0]));
    assert_eq!(of_eight_bits[1], of_full[1], "the VAE is not large");
}

#[test]
fn components_in_the_same_file_have_different_identities() {
    let folder = tempfile::tempdir().unwrap();
    let entry = model(folder.path(), "a", b"same", b"same");
    let ids = ids(&library(None).open(&entry, &card("f32")).unwrap());
    assert_ne!(ids[0], ids[1]);
}

#[test]
fn large_files_are_identified_by_path_until_hashed_and_unused() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("identities.json");
    const LARGE: u64 = (256 << 20) + 1;
    let entry = model_with_hole(folder.path(), "a", LARGE);
    let first = library(Some(cache.clone()));
    // Hashing the previous file is slow unless it is aborted: in any schedule, the hash is found after the check.
    let endless = model_with_hole(folder.path(), "endless", 1 << 36);
    first.open(&endless, &card("f32")).unwrap();
    let open = first.open(&entry, &card("f32")).unwrap();
    assert!(ids(&open)[0].starts_with("path:") && first.is_hashing());
    model(folder.path(), "endless", b"", b"vae");
    first.open(&endless, &card("f32")).unwrap();
    let waited = std::time::Instant::now();
    // Looked up in the cache only: another library that opens it might find the hash first.
    let is_known =
        || fs::read_to_string(&cache).is_ok_and(|known| known.contains(&format!(r#""size":{LARGE},"#)));
    while !is_known() {
        assert!(waited.elapsed().as_secs() < 300);
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    // The same files with another component in another format, while the large one is on a card: it is one component.
    let vae_of_int8 = Quantization::of(Preset::Full, [("vae", "int8")]).unwrap();
    let other = entry.quantized(vae_of_int8);
    let open_other = first.open(&other, &card("f32")).unwrap();
    assert_eq!(ids(&open_other)[0], ids(&open)[0]);
    assert_ne!(ids(&open_other)[1], ids(&open)[1]);
    let large = open.components[0].id.clone();
    first.adopt(&|id| *id == large);
    assert!(first.is_hashing(), "not while it is in use");
    let vae = open.components[1].id.clone();
    first.adopt(&|id| *id == vae);
    assert!(!first.is_hashing(), "whatever else of the models is");
    let both = [&entry, &other].map(|entry| first.components(entry, "f32").unwrap()[0].id.clone());
    assert_eq!(both[0], both[1]);
    let known = first.components(&entry, "f32").unwrap();
    assert!(known[0].id.0.ends_with(":f32"), "{}", known[0].id);

    let second = library(Some(cache.clone()));
    let open = second.open(&entry, &card("f32")).unwrap();
    assert_eq!(open.components[0].id, known[0].id, "remembered");
    fs::write(&cache, b"not json").unwrap();
    let third = library(Some(cache));
    let endless = model_with_hole(folder.path(), "endless", 1 << 36);
    third.open(&endless, &card("f32")).unwrap();
    assert!(ids(&third.open(&entry, &card("f32")).unwrap())[0].starts_with("path:"));
}

#[test]
fn a_path_that_is_not_a_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let entry = Entry {
        key: "x".into(),
        id: "x".into(),
        revision: String::new(),
        path: folder.path().into(),
        quantization: model::Quantization::NONE,
        adapters: Vec::new(),
    };
    assert!(matches!(
        library(None).open(&entry, &card("f32")),
        Err(Error::ModelUnsupported(_))
    ));
    let entry = model(folder.path(), "a", b"one", b"vae");
    assert!(matches!(
        library(None).open(&entry, &card("int3")),
        Err(Error::Internal(_))
    ));
}

#[test]
fn a_key_matches_its_model_and_no_model_with_a_longer_name() {
    let entry = |id: &str| Entry::new(id.into(), "r".into(), PathBuf::new(), Quantization::NONE);
    for (key, is_of_it) in [
        ("a@r+full", true),
        ("a@r+text_encoder_2=nf4,transformer=nf4", true),
        ("a@r+b+full", false),
        ("a+full", false),
        ("ab@r+full", false),
    ] {
        assert_eq!(entry("a").is_of_same_model(key), is_of_it, "{key}");
    }
}

#[test]
fn unused_models_are_closed_and_models_in_use_stay_open() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(None);
    let first = model(folder.path(), "first", b"one", b"vae");
    let in_use = library.open(&first, &card("f32")).unwrap();
    let second = model(folder.path(), "second", b"two", b"vae");
    let closed = Arc::downgrade(&library.open(&second, &card("f32")).unwrap().model);
    let before = library.location(&second, "f32").identities;
    assert_eq!(before.len(), 2, "both go by their content");
    let others: Vec<_> = (0..100)
        .map(|i| {
            let entry = model(folder.path(), &format!("other {i}"), b"three", b"vae");
            Arc::downgrade(&library.open(&entry, &card("f32")).unwrap().model)
        })
        .collect();
    let open = others.iter().filter(|model| model.strong_count() > 0).count();
    assert!((32..=64).contains(&open), "{open}");
    assert_eq!(closed.strong_count(), 0);
    assert!(Arc::strong_count(&in_use.model) > 1 && library.components(&first, "f32").is_some());
    // A worker still gets the earlier identities of a closed model's components.
    assert_eq!(library.location(&second, "f32").identities, before);
    assert_eq!(
        ids(&library.open(&second, &card("f32")).unwrap())[1],
        ids(&in_use)[1]
    );
}
