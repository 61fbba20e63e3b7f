//! Files that are replaced while blocks of them are streamed: on a card that copies mapped pages no read fails by it.

use std::fs::{self, FileTimes};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use engine::card::Card;
use engine::library::{Entry, Library};
use engine::messages::{Command, Failure, Outcome, Standing};
use gpu::{
    BlockPlace, ByteRange, CheckpointFile, CpuCard, CpuSettings, Gpu as _, LoadPlan, Stored, TensorSource,
};
use model::{Model, ModelError, ModelFile, Precision, Quantization, Rung, provisional_identity};
use pipelines::{Family, FamilyList};
use residency::{Bytes, Component};

use crate::idle_model::IdleModel;
use crate::loads::{self, Ends};

const BLOCKS: usize = 8;
const BLOCK_BYTES: u64 = 64 << 10;
/// The weights of the model do not fit.
const CARD: Bytes = Bytes(5 * BLOCK_BYTES);

/// A file is a transformer of blocks. While a stage runs, something happens to it.
struct Blocks(fn(&Path));

impl Family for Blocks {
    fn name(&self) -> &'static str {
        "blocks"
    }
    fn open(
        &self,
        path: &Path,
        _file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let file = ModelFile::at(path).unwrap();
        let sources = (0..BLOCKS).map(|number| {
            let range = ByteRange {
                offset: number as u64 * BLOCK_BYTES,
                length: BLOCK_BYTES,
            };
            let shape = vec![BLOCK_BYTES as usize / 64, 16];
            let (name, dtype) = (number.to_string(), precision.dtype);
            let source = TensorSource::full(&name, &file.path, [range], Stored::F32, shape, dtype);
            TensorSource {
                block: Some(BlockPlace::each_pass(number)),
                ..source
            }
        });
        let plan = LoadPlan::Files(sources.collect());
        let of = std::slice::from_ref(&file);
        let component = Component {
            id: provisional_identity(path, of, "transformer", precision.dtype, None),
            name: "transformer".into(),
            bytes: plan.bytes(),
            reload_seconds: 0.0,
            parts: plan.parts(),
        };
        let (path, happens) = (path.to_owned(), self.0);
        let model = IdleModel::new(precision).with(component, plan, file);
        Ok(Some(Arc::new(model.meanwhile(Arc::new(move || happens(&path))))))
    }
}

fn families(happens: fn(&Path)) -> FamilyList {
    FamilyList::new(vec![Box::new(Blocks(happens))])
}

/// Runs a stage on a part of the model, which may be pinned.
fn run(happens: fn(&Path), is_pinned: bool) -> Ends {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    fs::write(&path, vec![0; BLOCKS * BLOCK_BYTES as usize]).unwrap();
    let library = Library::new(families(happens), None);
    let gpu = CpuCard::new(CpuSettings { capacity: Some(CARD) }).unwrap();
    let description = gpu.describe().clone();
    let mut card: Card = loads::card(gpu, families(happens));
    let entry = Entry::new("model".into(), String::new(), path.clone(), Quantization::NONE);
    let open = library.open(&entry, &description).unwrap();
    let pins = match is_pinned {
        true => vec![("model".to_owned(), vec![open.components[0].id.clone()])],
        false => Vec::new(),
    };
    loads::carry_out(
        &mut card,
        Command::Standing(Standing {
            pins,
            ..Standing::default()
        }),
    );
    let model = library.location(&entry, &description.compute_dtype);
    let ends = loads::run(&mut card, 1, model, loads::stage(&open, Rung::whole(Bytes::ZERO)));
    let residents = card.ledger().residents().map(|r| r.component.id.clone());
    assert_eq!(residents.collect::<Vec<_>>(), ends.resident);
    assert_eq!(
        card.ledger().pins().count(),
        usize::from(is_pinned),
        "it is still to be pinned"
    );
    ends
}

/// Overwrites a number, and sets the time of writing back.
fn overwrite(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let written = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(&1.0_f32.to_le_bytes(), 0).unwrap();
    file.set_times(FileTimes::new().set_modified(written)).unwrap();
}

#[test]
fn a_stage_that_streams_ends_well_over_the_files_that_it_began_with() {
    for is_pinned in [false, true] {
        let ends = run(|_| {}, is_pinned);
        assert!(
            matches!(ends.outcome, Some(Outcome::Completed(_))),
            "{:?}",
            ends.outcome
        );
        assert_eq!(ends.resident.len(), 1, "a part stays");
    }
}

#[test]
fn what_was_streamed_from_files_that_changed_meanwhile_is_no_result() {
    let touch = |path: &Path| {
        let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_times(times)
            .unwrap();
    };
    let remove = |path: &Path| fs::remove_file(path).unwrap();
    for happens in [overwrite, touch, remove] as [fn(&Path); 3] {
        for is_pinned in [false, true] {
            let ends = run(happens, is_pinned);
            let Some(Outcome::Failed(Failure::Replaced { message })) = &ends.outcome else {
                panic!("{:?}", ends.outcome)
            };
            assert!(message.contains("transformer"), "{message}");
            assert_eq!(ends.resident, [], "a later stage opens the files anew");
        }
    }
}
