//! A checkpoint that is overwritten: components of its earlier version are never taken for those of the new one.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use engine::card::Card;
use engine::library::{Entry, Library, OpenModel};
use engine::messages::{Command, Failure, Outcome, Work};
use gpu::{
    CardDescription, ComponentTensors, CpuCard, Gpu, GpuError, LoadError, LoadPlan, LoadProgress, Unloaded,
};
use model::{Quantization, Rung};
use residency::{Bytes, Component, ComponentId, Part};

use crate::loads::{self, Ends, card, carry_out, cpu};
use crate::one_tensor::families;
use crate::watched::{Watch, Watched};

/// More than is hashed when a model is opened.
const LARGE: u64 = (256 << 20) + 4;

/// How a file becomes another.
#[derive(Clone, Copy, Debug)]
enum Replaced {
    InPlace,
    /// The time of writing is set back.
    InPlaceUnnoticed,
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
    let bytes = &weight.to_le_bytes()[..size.min(4) as usize];
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds);
    file.set_modified(time).unwrap();
}

fn replace(path: &Path, how: Replaced, weight: f32, size: u64) {
    match how {
        Replaced::InPlace => write(path, weight, size, 1),
        Replaced::InPlaceUnnoticed => {
            // Times of change are as coarse as the kernel's clock.
            let changed = || std::os::unix::fs::MetadataExt::ctime_nsec(&fs::metadata(path).unwrap());
            let before = changed();
            while changed() == before {
                write(path, weight, size, 0);
            }
        }
        Replaced::ByRename => {
            let beside = path.with_extension("new");
            write(&beside, weight, size, 0); // of the same time and size: another file all the same
            fs::rename(beside, path).unwrap();
        }
    }
}

/// When a file becomes another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    BeforeItIsRead,
    AfterItWasRead,
    /// As that, and the card's answer to an unload is an error.
    AndUnloadsFail,
}

fn entry(path: &Path) -> Entry {
    Entry::new("model".into(), String::new(), path.to_owned(), Quantization::NONE)
}

/// Replaces a file while it is read.
struct Meanwhile {
    replace: Option<Box<dyn FnMut()>>,
    /// Before its first byte is read, and not after the last.
    is_early: bool,
    /// Whether the card's answer to an unload is an error.
    unloads_fail: bool,
}

impl Watch<CpuCard> for Meanwhile {
    fn load(
        &mut self,
        card: &mut CpuCard,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        self.replace_if(self.is_early);
        card.load(component, plan, part, progress)?;
        self.replace_if(!self.is_early);
        Ok(())
    }
    fn read_on_host(
        &mut self,
        card: &mut CpuCard,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        self.replace_if(self.is_early);
        let read = card.read_on_host(plan, progress)?;
        self.replace_if(!self.is_early);
        Ok(read)
    }
    fn unload(&mut self, card: &mut CpuCard, id: &ComponentId) -> Result<Unloaded, GpuError> {
        let unloaded = card.unload(id)?;
        match self.unloads_fail {
            true => Err(GpuError::Truth("the driver does not answer".into())),
            false => Ok(unloaded),
        }
    }
}

impl Meanwhile {
    fn replace_if(&mut self, is_time: bool) {
        if let Some(replace) = self.replace.as_mut().filter(|_| is_time) {
            replace();
        }
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

impl Bench {
    fn new(size: u64) -> Bench {
        Bench::with(size, When::AfterItWasRead, |_| None)
    }

    fn with(size: u64, when: When, replace: impl FnOnce(PathBuf) -> Option<Box<dyn FnMut()>>) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        write(&path, 1.0, size, 0);
        let watched = Watched {
            card: cpu(),
            watch: Meanwhile {
                replace: replace(path.clone()),
                is_early: when == When::BeforeItIsRead,
                unloads_fail: when == When::AndUnloadsFail,
            },
        };
        Bench {
            path,
            library: Library::new(families(&[1]), Some(folder.path().join("identities.json"))),
            _folder: folder,
            description: watched.describe().clone(),
            card: card(watched, families(&[1])),
            tickets: 0,
        }
    }

    fn open(&self) -> OpenModel {
        self.library.open(&entry(&self.path), &self.description).unwrap()
    }

    /// Has the worker load the components of a model, at the library's current location.
    fn load(&mut self, open: &OpenModel) -> Ends {
        self.run(Work::Load(open.components.clone()))
    }

    /// Has the worker run a stage that reads a model's components from the machine's memory.
    fn run_from_host(&mut self, open: &OpenModel) -> Ends {
        let rung = Rung {
            from_host: open.components.iter().map(|c| c.name.clone()).collect(),
            ..Rung::whole(Bytes::ZERO)
        };
        self.run(loads::stage(open, rung))
    }

    fn run(&mut self, work: Work) -> Ends {
        self.tickets += 1;
        let dtype = &self.description.compute_dtype;
        let model = self.library.location(&entry(&self.path), dtype);
        loads::run(&mut self.card, self.tickets, model, work)
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
fn a_resident_component_is_not_reused_for_a_replaced_file() {
    for how in [Replaced::InPlace, Replaced::InPlaceUnnoticed, Replaced::ByRename] {
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

            // Components of the file's earlier version take memory, and can be unloaded like any other.
            let components = vec![first.components[0].id.clone()];
            let ends = carry_out(&mut bench.card, Command::Unload { id: 1, components });
            assert_eq!(ends.resident, [second.components[0].id.clone()]);
        }
    }
}

#[test]
fn a_component_identified_by_content_is_read_again_after_a_replacement() {
    for how in [Replaced::InPlace, Replaced::InPlaceUnnoticed, Replaced::ByRename] {
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
fn an_order_for_a_replaced_version_is_refused() {
    for (size, how) in [
        (4, Replaced::ByRename),
        (4, Replaced::InPlace),
        (LARGE, Replaced::ByRename),
    ] {
        let mut bench = Bench::new(size);
        let first = bench.open();
        replace(&bench.path, how, 2.0, size);
        // Also if another caller has opened it since.
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
fn an_order_for_a_replaced_version_uses_its_resident_components() {
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
        carry_out(&mut bench.card, Command::Unload { id: 1, components });
        let ends = bench.load(&first);
        assert!(refusal(&ends).contains("were replaced"), "{size} {how:?}");
    }
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_is_not_kept() {
    let mut bench = Bench::with(4, When::AfterItWasRead, |path| {
        Some(Box::new(move || replace(&path, Replaced::ByRename, 2.0, 4)))
    });
    let first = bench.open();
    let ends = bench.load(&first);
    assert!(refusal(&ends).contains("were replaced while they were read"));
    assert_eq!(ends.resident, []);
}

#[test]
fn a_load_that_cannot_be_taken_back_leaves_the_ledger_at_rest() {
    let mut replaced = false;
    let mut bench = Bench::with(4, When::AndUnloadsFail, |path| {
        Some(Box::new(move || {
            if !std::mem::replace(&mut replaced, true) {
                replace(&path, Replaced::InPlace, 2.0, 4);
            }
        }))
    });
    let first = bench.open();
    let ends = bench.load(&first);
    assert!(
        matches!(ends.outcome, Some(Outcome::Failed(_))),
        "{:?}",
        ends.outcome
    );
    assert_eq!(ends.resident, []);
    replace(&bench.path, Replaced::ByRename, 1.0, 4);
    write(&bench.path, 1.0, 4, 0);
    let again = bench.open();
    assert_eq!(resident_already(&bench.load(&again)), [""; 0]);
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_into_the_machines_memory_is_not_used() {
    let mut bench = Bench::with(4, When::AfterItWasRead, |path| {
        Some(Box::new(move || replace(&path, Replaced::ByRename, 2.0, 4)))
    });
    let first = bench.open();
    let ends = bench.run_from_host(&first);
    assert!(refusal(&ends).contains("were replaced while they were read"));
}

#[test]
fn a_file_that_is_cut_off_while_it_is_read_is_not_called_damaged() {
    for from_host in [false, true] {
        let mut bench = Bench::with(4, When::BeforeItIsRead, |path| {
            Some(Box::new(move || replace(&path, Replaced::ByRename, 2.0, 2)))
        });
        let first = bench.open();
        let ends = match from_host {
            true => bench.run_from_host(&first),
            false => bench.load(&first),
        };
        assert!(refusal(&ends).contains("were replaced while they were read"));
        assert_eq!(ends.resident, []);
    }
}
