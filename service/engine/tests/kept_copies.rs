//! Kept copies of components quantized at load: written once their content hash is known, read instead of the
//! checkpoint, and ignored if invalid.
#![allow(clippy::unwrap_used)]

mod idle_model;

use std::cell::RefCell;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use candle_core::{DType, Device};
use engine::card::{Card, CardSettings, Flow, Link, SystemClock};
use engine::library::{Entry, Library};
use engine::messages::{Command, Event, Order, Outcome, Ticket, Work};
use gpu::{
    ByteRange, CardDescription, ComponentTensors, CpuCard, CpuSettings, FaultAction, Gpu, GpuError,
    KeptFolder, LoadError, LoadPlan, LoadProgress, Stored, Target, TensorSource, Unloaded,
};
use idle_model::IdleModel;
use pipelines::{
    Catalogue, Family, Model, ModelError, ModelFile, Precision, Preset, Quantization, provisional_identity,
};
use residency::{Bytes, Component, ComponentId, DriverTruth, Policy};

const ROWS: usize = 96;
const COLUMNS: usize = 64;

/// A family: a file of f32 is a transformer with one weight.
struct Weights;

impl Family for Weights {
    fn name(&self) -> &'static str {
        "weight"
    }
    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let target = precision.quantization.formats(&["transformer"]).of("transformer");
        let target = target.map_or(Target::Full(precision.dtype), Target::Quantized);
        let range = ByteRange {
            offset: 0,
            length: (4 * ROWS * COLUMNS) as u64,
        };
        let file: Arc<Path> = path.into();
        let opened = ModelFile::at(path).unwrap();
        let shape = vec![ROWS, COLUMNS];
        let source = TensorSource::full("w", &file, [range], Stored::F32, shape, precision.dtype);
        let plan = LoadPlan::Files(vec![TensorSource { target, ..source }]);
        let formats = precision.quantization.formats(&["transformer"]);
        let component = Component {
            id: provisional_identity(
                path,
                std::slice::from_ref(&opened),
                "transformer",
                precision.dtype,
                formats.of("transformer"),
            ),
            name: "transformer".into(),
            bytes: plan.bytes(),
            reload_seconds: 0.0,
        };
        Ok(Some(Arc::new(
            IdleModel::new(precision).with(component, plan, opened),
        )))
    }
}

fn catalogue() -> Catalogue {
    Catalogue::new(vec![Box::new(Weights)])
}

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

fn card() -> CpuCard {
    CpuCard::new(CpuSettings { capacity: None }).unwrap()
}

fn library(folder: &Path) -> Library {
    let kept = KeptFolder::open(folder.join("kept"), Bytes::mib(1)).unwrap();
    Library::new(catalogue(), None).with_copies(kept)
}

/// Waits until an entry has this many copies, and returns them.
fn copies(library: &Library, entry: &Entry, number: usize) -> Vec<(String, PathBuf)> {
    let (started, dtype) = (Instant::now(), card().describe().compute_dtype.clone());
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
    let dtype = card().describe().compute_dtype.clone();
    for asked in [&four, &full] {
        first.open(asked, card().describe()).unwrap();
        assert_eq!(first.location(asked, &dtype).kept, []);
        first.keep_soon(asked, &dtype);
    }
    let kept = copies(&first, &four, 1);
    assert_eq!(kept[0].0, "transformer");
    assert!(kept[0].1.is_file());
    first.open(&eight, card().describe()).unwrap();
    assert_eq!(copies(&first, &eight, 0), [], "another format has no copy");
    assert_eq!(copies(&first, &full, 0), [], "what is not quantized needs none");
    first.stop_keeping();
    let files = || fs::read_dir(folder.path().join("kept")).unwrap().count();
    assert_eq!(files(), 1);

    // Another library finds it, by the content of another path.
    let second = library(folder.path());
    let same = entry(&b, "nf4");
    second.open(&same, card().describe()).unwrap();
    assert_eq!(copies(&second, &same, 1), kept);
    // An invalid copy is removed.
    fs::write(&kept[0].1, b"no copy").unwrap();
    let third = library(folder.path());
    third.open(&same, card().describe()).unwrap();
    assert_eq!(copies(&third, &same, 0), []);
    assert_eq!(files(), 0);
}

#[test]
fn a_checkpoint_changed_after_hashing_is_not_copied_under_the_old_hash() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let dtype = card().describe().compute_dtype.clone();
    let (changed, other) = (checkpoint(folder.path(), "a"), checkpoint(folder.path(), "b"));
    let changed = entry(&changed, "nf4");
    library.open(&changed, card().describe()).unwrap();
    fs::write(&changed.path, vec![0; 4 * ROWS * COLUMNS]).unwrap();
    // With a coarse clock the change time would equal that of the first write.
    let later = SystemTime::now() + Duration::from_secs(5);
    let file = fs::File::options().write(true).open(&changed.path).unwrap();
    file.set_modified(later).unwrap();
    let other = entry(&other, "int8");
    library.open(&other, card().describe()).unwrap();
    for asked in [&changed, &other] {
        library.keep_soon(asked, &dtype);
    }
    copies(&library, &other, 1); // one after the other
    assert_eq!(copies(&library, &changed, 0), []);
    assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), 1);
    // The changed file is opened again, and copied.
    library.open(&changed, card().describe()).unwrap();
    library.keep_soon(&changed, &dtype);
    copies(&library, &changed, 1);
}

#[test]
fn a_missing_or_damaged_copy_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let dtype = card().describe().compute_dtype.clone();
    let asked = entry(&checkpoint(folder.path(), "a"), "nf4");
    library.open(&asked, card().describe()).unwrap();
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
        library.open(&last, card().describe()).unwrap();
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
    library.open(&asked, card().describe()).unwrap();
    library.stop_keeping();
    library.keep_soon(&asked, &card().describe().compute_dtype);
    drop(library);
    assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), 0);
}

/// A CPU card that records the files that it loads from, and fails on some.
struct Watched {
    card: CpuCard,
    files: Rc<RefCell<Vec<PathBuf>>>,
    unreadable: Option<PathBuf>,
}

impl Gpu for Watched {
    fn describe(&self) -> &CardDescription {
        self.card.describe()
    }
    fn device(&self) -> &Device {
        self.card.device()
    }
    fn compute_dtype(&self) -> DType {
        self.card.compute_dtype()
    }
    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        self.card.memory()
    }
    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let LoadPlan::Files(sources) = plan else { panic!() };
        let file = sources[0].files().next().unwrap().to_path_buf();
        self.files.borrow_mut().push(file.clone());
        if self.unreadable.as_ref() == Some(&file) {
            return Err(LoadError::Io {
                file,
                source: std::io::Error::other("the disk is broken"),
            });
        }
        self.card.load(component, plan, progress)
    }
    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        self.card.tensors(id)
    }
    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        self.card.unload(id)
    }
    fn trim(&mut self) -> Result<Bytes, GpuError> {
        self.card.trim()
    }
    fn begin_stage(&mut self) {
        self.card.begin_stage();
    }
    fn stage_peak(&mut self) -> Bytes {
        self.card.stage_peak()
    }
    fn fault_at(&mut self, place: &str) -> Option<FaultAction> {
        self.card.fault_at(place)
    }
}

#[derive(Default)]
struct Ends(Vec<Outcome>);

impl Link for Ends {
    fn emit(&mut self, event: Event) {
        if let Event::Finished { outcome, .. } = event {
            self.0.push(outcome);
        }
    }
    fn cancelled(&self, _ticket: Ticket) -> bool {
        false
    }
}

/// Loads an entry from the library's location, and returns the files.
fn files_of_load(library: &Library, entry: &Entry, unreadable: Option<&Path>) -> Vec<PathBuf> {
    let files = Rc::new(RefCell::new(Vec::new()));
    let watched = Watched {
        card: card(),
        files: files.clone(),
        unreadable: unreadable.map(Path::to_owned),
    };
    let dtype = watched.describe().compute_dtype.clone();
    let open = library.open(entry, watched.describe()).unwrap();
    let settings = CardSettings {
        headroom: Bytes::ZERO,
        ..CardSettings::default()
    };
    let clock = Box::new(SystemClock::new());
    let mut card = Card::new(Box::new(watched), catalogue(), settings, clock).unwrap();
    let order = Order {
        ticket: Ticket(1),
        job: "a load".into(),
        model: library.location(entry, &dtype),
        work: Work::Load(open.components),
        policy: Policy::Shared,
        allow_low_memory: false,
        headroom: Bytes::ZERO,
        sharing: Vec::new(),
    };
    let mut ends = Ends::default();
    assert_eq!(
        card.handle(Command::Run(Box::new(order)), &mut ends),
        Flow::Continue
    );
    assert!(matches!(ends.0[..], [Outcome::Completed(_)]), "{:?}", ends.0);
    files.take()
}

#[test]
fn a_worker_reads_the_copy_and_falls_back_to_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path());
    let path = checkpoint(folder.path(), "a");
    let asked = entry(&path, "nf4");
    assert_eq!(files_of_load(&library, &asked, None), [path.as_path()]);
    library.keep_soon(&asked, &card().describe().compute_dtype);
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
