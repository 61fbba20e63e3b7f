//! A checkpoint that is overwritten: what was read from it before is never taken for what it holds now.
#![allow(clippy::unwrap_used)]

mod idle_model;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use candle_core::{DType, Device};
use engine::card::{Card, CardSettings, Flow, Link, SystemClock};
use engine::library::{Entry, Library, OpenModel};
use engine::messages::{Command, Event, Failure, Order, Outcome, StageWork, Ticket, Work};
use gpu::{
    ByteRange, CardDescription, ComponentTensors, CpuCard, CpuSettings, FaultAction, Gpu, GpuError,
    LoadError, LoadPlan, LoadProgress, Stored, TensorSource, Unloaded,
};
use idle_model::IdleModel;
use pipelines::{
    Catalogue, Family, Model, ModelError, ModelFile, Precision, Quantization, Role, Rung, StagePlan, Values,
    provisional_identity,
};
use residency::{Bytes, Component, ComponentId, DriverTruth, Policy};

/// More than is hashed when a model is opened.
const LARGE: u64 = (256 << 20) + 4;

/// A file whose first number is the weight of a transformer, however large it is.
struct FirstNumber;

impl Family for FirstNumber {
    fn name(&self) -> &'static str {
        "first number"
    }
    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let file = ModelFile::at(path).unwrap();
        let range = ByteRange { offset: 0, length: 4 };
        let source = TensorSource::full("w", &file.path, [range], Stored::F32, vec![1], precision.dtype);
        let plan = LoadPlan::Files(vec![source]);
        let formats = precision.quantization.formats(&["transformer"]);
        let component = Component {
            id: provisional_identity(
                path,
                std::slice::from_ref(&file),
                "transformer",
                precision.dtype,
                formats.of("transformer"),
            ),
            name: "transformer".into(),
            bytes: plan.bytes(),
            reload_seconds: 0.0,
        };
        Ok(Some(Arc::new(
            IdleModel::new(precision).with(component, plan, file),
        )))
    }
}

fn catalogue() -> Catalogue {
    Catalogue::new(vec![Box::new(FirstNumber)])
}

/// How a file becomes another.
#[derive(Clone, Copy, Debug)]
enum Replaced {
    InPlace,
    ByRename,
}

/// Writes a checkpoint of a size, with a weight. Each is written a second later than any before it, as times of change may
/// be coarse.
fn write(path: &Path, weight: f32, size: u64, seconds: u64) {
    let file = fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.set_len(size).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &weight.to_le_bytes(), 0).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds);
    file.set_modified(time).unwrap();
}

fn replace(path: &Path, how: Replaced, weight: f32, size: u64) {
    match how {
        Replaced::InPlace => write(path, weight, size, 1),
        Replaced::ByRename => {
            let beside = path.with_extension("new");
            write(&beside, weight, size, 0); // of the same time and size: another file all the same
            fs::rename(beside, path).unwrap();
        }
    }
}

fn entry(path: &Path) -> Entry {
    Entry::new("model".into(), String::new(), path.to_owned(), Quantization::NONE)
}

/// A processor that replaces a file while it is read, if it is told to.
struct Reader {
    card: CpuCard,
    meanwhile: Option<Box<dyn FnMut()>>,
}

impl Gpu for Reader {
    fn describe(&self) -> &CardDescription {
        self.card.describe()
    }
    fn device(&self) -> &Device {
        self.card.device()
    }
    fn compute_dtype(&self) -> DType {
        DType::F32
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
        self.card.load(component, plan, progress)?;
        if let Some(meanwhile) = &mut self.meanwhile {
            meanwhile();
        }
        Ok(())
    }
    fn read_on_host(
        &mut self,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        let read = self.card.read_on_host(plan, progress)?;
        if let Some(meanwhile) = &mut self.meanwhile {
            meanwhile();
        }
        Ok(read)
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

/// The two halves over one file.
struct Bench {
    _folder: tempfile::TempDir,
    path: PathBuf,
    library: Library,
    card: Card,
    description: CardDescription,
    tickets: u64,
}

#[derive(Default)]
struct Ends {
    outcome: Option<Outcome>,
    resident: Vec<ComponentId>,
}

impl Link for Ends {
    fn emit(&mut self, event: Event) {
        match event {
            Event::Finished { outcome, .. } => self.outcome = Some(outcome),
            Event::Snapshot(ledger) => {
                self.resident = ledger.residents().map(|r| r.component.id.clone()).collect();
            }
            _ => {}
        }
    }
    fn cancelled(&self, _ticket: Ticket) -> bool {
        false
    }
}

impl Bench {
    fn new(size: u64) -> Bench {
        Bench::with(size, |_| None)
    }

    fn with(size: u64, meanwhile: impl FnOnce(PathBuf) -> Option<Box<dyn FnMut()>>) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        write(&path, 1.0, size, 0);
        let reader = Reader {
            card: CpuCard::new(CpuSettings { capacity: None }).unwrap(),
            meanwhile: meanwhile(path.clone()),
        };
        let description = reader.describe().clone();
        let settings = CardSettings {
            headroom: Bytes::ZERO,
            ..CardSettings::default()
        };
        let clock = Box::new(SystemClock::new());
        Bench {
            path,
            library: Library::new(catalogue(), Some(folder.path().join("identities.json"))),
            _folder: folder,
            card: Card::new(Box::new(reader), catalogue(), settings, clock).unwrap(),
            description,
            tickets: 0,
        }
    }

    fn open(&self) -> OpenModel {
        self.library.open(&entry(&self.path), &self.description).unwrap()
    }

    /// Has the worker bring in what a model names, as the library says where it is now.
    fn load(&mut self, open: &OpenModel) -> Ends {
        self.run(Work::Load(open.components.clone()))
    }

    /// Has the worker run a stage that reads what a model names from the machine's memory.
    fn run_from_host(&mut self, open: &OpenModel) -> Ends {
        let names: Vec<String> = open.components.iter().map(|c| c.name.clone()).collect();
        let rung = Rung {
            label: "from the machine's memory".into(),
            scratch: Bytes::ZERO,
            approximate: false,
            from_host: names.clone(),
        };
        let plan = StagePlan {
            name: "denoise".into(),
            role: Role::Sample,
            components: names,
            rungs: vec![rung],
            shape: String::new(),
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: true,
            memo: None,
            section: None,
            shared: None,
            reads_media: false,
            preview: None,
        };
        self.run(Work::Stage(Box::new(StageWork {
            plan,
            components: open.components.clone(),
            behind: Vec::new(),
            later: Vec::new(),
            request: open.model.defaults(),
            values: Values::new(),
            preview_interval_ms: 0,
        })))
    }

    fn run(&mut self, work: Work) -> Ends {
        self.tickets += 1;
        let order = Order {
            ticket: Ticket(self.tickets),
            job: "an order".into(),
            model: self
                .library
                .location(&entry(&self.path), &self.description.compute_dtype),
            work,
            policy: Policy::Shared,
            allow_low_memory: false,
            headroom: Bytes::ZERO,
            sharing: Vec::new(),
        };
        let mut ends = Ends::default();
        let flow = self.card.handle(Command::Run(Box::new(order)), &mut ends);
        assert_eq!(flow, Flow::Continue);
        ends
    }
}

fn resident_already(ends: &Ends) -> &[String] {
    match &ends.outcome {
        Some(Outcome::Completed(completed)) => &completed.resident_already,
        other => panic!("{other:?}"),
    }
}

fn refusal(ends: &Ends) -> &str {
    match &ends.outcome {
        Some(Outcome::Failed(Failure::Replaced { message })) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_was_read_from_a_file_is_not_taken_for_what_replaced_it() {
    for how in [Replaced::InPlace, Replaced::ByRename] {
        for size in [4, LARGE] {
            let mut bench = Bench::new(size);
            let first = bench.open();
            assert_eq!(resident_already(&bench.load(&first)), [""; 0]);
            let again = bench.open();
            assert_eq!(resident_already(&bench.load(&again)), ["transformer"], "{size}");

            replace(&bench.path, how, 2.0, size);
            let second = bench.open();
            assert_ne!(first.components[0].id, second.components[0].id, "{how:?} {size}");
            let ends = bench.load(&second);
            assert_eq!(resident_already(&ends), [""; 0], "{how:?} {size}");
            assert!(ends.resident.contains(&second.components[0].id));

            // What the file held before takes memory, and may leave like anything else.
            let components = vec![first.components[0].id.clone()];
            let mut ends = Ends::default();
            let unload = Command::Unload { id: 1, components };
            assert_eq!(bench.card.handle(unload, &mut ends), Flow::Continue);
            assert_eq!(ends.resident, [second.components[0].id.clone()]);
        }
    }
}

#[test]
fn a_component_that_goes_by_its_content_is_read_anew_as_well() {
    for how in [Replaced::InPlace, Replaced::ByRename] {
        let mut bench = Bench::new(LARGE);
        bench.open();
        let started = Instant::now();
        while bench.library.is_hashing() {
            assert!(started.elapsed() < Duration::from_secs(300));
            bench.library.adopt(&|_| false);
            std::thread::yield_now();
        }
        let first = bench.open();
        assert!(!first.components[0].id.0.starts_with("path:"));
        assert_eq!(resident_already(&bench.load(&first)), [""; 0]);
        replace(&bench.path, how, 2.0, LARGE);
        let second = bench.open();
        assert_eq!(resident_already(&bench.load(&second)), [""; 0], "{how:?}");
    }
}

#[test]
fn an_order_for_a_version_that_is_gone_is_refused() {
    for (size, how) in [
        (4, Replaced::ByRename),
        (4, Replaced::InPlace),
        (LARGE, Replaced::ByRename),
    ] {
        let mut bench = Bench::new(size);
        let first = bench.open();
        replace(&bench.path, how, 2.0, size);
        // Whether or not somebody else has opened it since.
        let ends = bench.load(&first);
        assert!(refusal(&ends).contains("were replaced"), "{size} {how:?}");
        let second = bench.open();
        let ends = bench.load(&first);
        assert!(refusal(&ends).contains("has changed"), "{size} {how:?}");
        assert_eq!(resident_already(&bench.load(&second)), [""; 0]);
        let ends = bench.load(&first);
        assert!(refusal(&ends).contains("were replaced"), "{size} {how:?}");
    }
}

#[test]
fn an_order_for_a_version_that_is_gone_goes_on_with_what_is_resident_of_it() {
    for (size, how) in [
        (4, Replaced::ByRename),
        (4, Replaced::InPlace),
        (LARGE, Replaced::ByRename),
    ] {
        let mut bench = Bench::new(size);
        let first = bench.open();
        bench.load(&first);
        replace(&bench.path, how, 2.0, size);
        assert_eq!(
            resident_already(&bench.load(&first)),
            ["transformer"],
            "{size} {how:?}"
        );
        // Also when the new version is there beside it; each has its own weights.
        let second = bench.open();
        assert_eq!(resident_already(&bench.load(&second)), [""; 0], "{size} {how:?}");
        assert_eq!(
            resident_already(&bench.load(&first)),
            ["transformer"],
            "{size} {how:?}"
        );
        assert_eq!(
            resident_already(&bench.load(&second)),
            ["transformer"],
            "{size} {how:?}"
        );
        let components = vec![first.components[0].id.clone()];
        let mut ends = Ends::default();
        let unload = Command::Unload { id: 1, components };
        assert_eq!(bench.card.handle(unload, &mut ends), Flow::Continue);
        let ends = bench.load(&first);
        assert!(refusal(&ends).contains("were replaced"), "{size} {how:?}");
    }
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_is_not_kept() {
    let mut bench = Bench::with(4, |path| {
        Some(Box::new(move || replace(&path, Replaced::ByRename, 2.0, 4)))
    });
    let first = bench.open();
    let ends = bench.load(&first);
    assert!(refusal(&ends).contains("were replaced while they were read"));
    assert_eq!(ends.resident, []);
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_into_the_machines_memory_is_not_used() {
    let mut bench = Bench::with(4, |path| {
        Some(Box::new(move || replace(&path, Replaced::ByRename, 2.0, 4)))
    });
    let first = bench.open();
    let ends = bench.run_from_host(&first);
    assert!(refusal(&ends).contains("were replaced while they were read"));
}
