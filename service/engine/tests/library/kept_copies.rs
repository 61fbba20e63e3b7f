//! Kept copies of components quantized at load: written once their content hash is known, read instead of the
//! checkpoint, and ignored if invalid.

use std::cell::RefCell;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use engine::library::{Entry, Library};
use engine::messages::Outcome;
use gpu::{CpuCard, Gpu, KeptFolder, LoadError, LoadPlan, LoadProgress};
use model::{Preset, Quantization};
use residency::{Bytes, Component, Part};

use crate::loads::{card, cpu, load};
use crate::one_tensor::families;
use crate::watched::{Watch, Watched};

const ROWS: usize = 96;
const COLUMNS: usize = 64;

fn entry(path: &Path, format: &str) -> Entry {
    let quantization = Quantization::of(Preset::Full, [("transformer", format)]).unwrap();
    Entry::new("model".into(), String::new(), path.to_owned(), quantization)
}

fn checkpoint(folder: &Path, name: &str) -> PathBuf {
    let numbers = (0..ROWS * COLUMNS).map(|n| (n as f32 * 0.37).sin());
    let path = folder.join(name);
    fs::write(&path, numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    path
}

fn library(folder: &Path) -> Library {
    let kept = KeptFolder::open(folder.join("kept"), Bytes::mib(1)).unwrap();
    Library::new(families(&[ROWS, COLUMNS]), None).with_copies(kept)
}

/// Waits until an entry has this many copies, and returns them.
fn copies(library: &Library, entry: &Entry, number: usize) -> Vec<(String, PathBuf)> {
    let (started, dtype) = (Instant::now(), cpu().describe().compute_dtype.clone());
    loop {
        let kept = library.location(entry, &dtype).kept;
        if kept.len() == number {
            return kept;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{kept:?}");
        std::thread::yield_now();
    }
}

#[test]
fn kept_copies_are_found_by_content() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (checkpoint(folder.path(), "a"), checkpoint(folder.path(), "b"));
    let first = library(folder.path());
    let (four, eight, full) = (entry(&a, "nf4"), entry(&a, "int8"), entry(&a, "full"));
    let dtype = cpu().describe().compute_dtype.clone();
    for asked in [&four, &full] {
        first.open(asked, cpu().describe()).unwrap();
        assert_eq!(first.location(asked, &dtype).kept, []);
        first.keep_soon(asked, &dtype);
    }
    let kept = copies(&first, &four, 1);
    assert_eq!(kept[0].0, "transformer");
    assert!(kept[0].1.is_file());
    first.open(&eight, cpu().describe()).unwrap();
    assert_eq!(copies(&first, &eight, 0), [], "another format has no copy");
    assert_eq!(copies(&first, &full, 0), [], "what is not quantized needs none");
    first.stop_keeping();
    let files = || fs::read_dir(folder.path().join("kept")).unwrap().count();
    assert_eq!(files(), 1);

    // Another library finds it, by the content of another path.
    let second = library(folder.path());
    let same = entry(&b, "nf4");
    second.open(&same, cpu().describe()).unwrap();
    assert_eq!(copies(&second, &same, 1), kept);
    // An invalid copy is removed.
    fs::write(&kept[0].1, b"no copy").unwrap();
    let third = library(folder.path());
    third.open(&same, cpu().describe()).unwrap();
    assert_eq!(copies(&third, &same, 0), []);
    assert_eq!(files(), 0);
}

#[test]
fn a_checkpoint_changed_after_hashing_is_not_copied_under_the_old_hash() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let dtype = cpu().describe().compute_dtype.clone();
    let (changed, other) = (checkpoint(folder.path(), "a"), checkpoint(folder.path(), "b"));
    let changed = entry(&changed, "nf4");
    library.open(&changed, cpu().describe()).unwrap();
    fs::write(&changed.path, vec![0; 4 * ROWS * COLUMNS]).unwrap();
    // With a coarse clock the change time would equal that of the first write.
    let later = SystemTime::now() + Duration::from_secs(5);
    let file = fs::File::options().write(true).open(&changed.path).unwrap();
    file.set_modified(later).unwrap();
    let other = entry(&other, "int8");
    library.open(&other, cpu().describe()).unwrap();
    for asked in [&changed, &other] {
        library.keep_soon(asked, &dtype);
    }
    copies(&library, &other, 1); // one after the other
    assert_eq!(copies(&library, &changed, 0), []);
    assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), 1);
    // The changed file is opened again, and copied.
    library.open(&changed, cpu().describe()).unwrap();
    library.keep_soon(&changed, &dtype);
    copies(&library, &changed, 1);
}

#[test]
fn a_missing_or_damaged_copy_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let dtype = cpu().describe().compute_dtype.clone();
    let asked = entry(&checkpoint(folder.path(), "a"), "nf4");
    library.open(&asked, cpu().describe()).unwrap();
    library.keep_soon(&asked, &dtype);
    let copy = copies(&library, &asked, 1)[0].1.clone();
    let whole = fs::read(&copy).unwrap();
    let again = || {
        let started = Instant::now();
        while fs::read(&copy).ok().as_ref() != Some(&whole) {
            assert!(started.elapsed() < Duration::from_secs(30));
            library.keep_soon(&asked, &dtype);
            std::thread::yield_now();
        }
    };
    // When the last request is done, no work is under way.
    let at_rest = |format| {
        let last = entry(&asked.path, format);
        library.open(&last, cpu().describe()).unwrap();
        library.keep_soon(&last, &dtype);
        copies(&library, &last, 1);
    };
    fs::remove_file(&copy).unwrap();
    again();
    at_rest("int8");
    fs::write(&copy, b"no copy any more").unwrap();
    again();
    at_rest("fp8");
    fs::remove_dir_all(folder.path().join("kept")).unwrap();
    again();
}

#[test]
fn no_copies_are_written_after_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let asked = entry(&checkpoint(folder.path(), "a"), "nf4");
    library.open(&asked, cpu().describe()).unwrap();
    library.stop_keeping();
    library.keep_soon(&asked, &cpu().describe().compute_dtype);
    drop(library);
    assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), 0);
}

/// Records the files that are loaded from, and fails on one.
struct Files {
    read: Rc<RefCell<Vec<PathBuf>>>,
    unreadable: Option<PathBuf>,
}

impl Watch<CpuCard> for Files {
    fn load(
        &mut self,
        card: &mut CpuCard,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let LoadPlan::Files(sources) = plan else { panic!() };
        let file = sources[0].files().next().unwrap().to_path_buf();
        self.read.borrow_mut().push(file.clone());
        if self.unreadable.as_ref() == Some(&file) {
            return Err(LoadError::Io {
                file,
                source: std::io::Error::other("the disk is broken"),
            });
        }
        card.load(component, plan, part, progress)
    }
}

/// Loads an entry from the library's location, and returns the files.
fn files_of_load(library: &Library, entry: &Entry, unreadable: Option<&Path>) -> Vec<PathBuf> {
    let files = Rc::new(RefCell::new(Vec::new()));
    let watched = Watched {
        card: cpu(),
        watch: Files {
            read: files.clone(),
            unreadable: unreadable.map(Path::to_owned),
        },
    };
    let dtype = watched.describe().compute_dtype.clone();
    let open = library.open(entry, watched.describe()).unwrap();
    let mut card = card(watched, families(&[ROWS, COLUMNS]));
    let ends = load(&mut card, 1, library.location(entry, &dtype), open.components);
    assert!(
        matches!(ends.outcome, Some(Outcome::Completed(_))),
        "{:?}",
        ends.outcome
    );
    files.take()
}

#[test]
fn a_worker_reads_the_copy_and_falls_back_to_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let path = checkpoint(folder.path(), "a");
    let asked = entry(&path, "nf4");
    assert_eq!(files_of_load(&library, &asked, None), [path.as_path()]);
    library.keep_soon(&asked, &cpu().describe().compute_dtype);
    let copy = copies(&library, &asked, 1)[0].1.clone();
    assert_eq!(files_of_load(&library, &asked, None), [copy.as_path()]);
    let both = [copy.as_path(), path.as_path()];
    assert_eq!(files_of_load(&library, &asked, Some(&copy)), both);
    fs::write(&copy, b"no copy any more").unwrap();
    assert_eq!(files_of_load(&library, &asked, None), [path.as_path()]);
    fs::remove_file(&copy).unwrap();
    assert_eq!(files_of_load(&library, &asked, None), [path.as_path()]);
    assert_eq!(copies(&library, &asked, 0), []);
}
