//! Kept copies: a copy loads the same tensors as its plan, a mismatch is refused, no partial file remains, and a
//! folder keeps its bound.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{FileTimes, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use candle_core::{DType, Tensor};
use gpu::{
    ByteRange, CheckpointFile, CpuCard, CpuSettings, Gpu, KeepError, KeptFolder, LoadError, LoadPlan,
    SourcePiece, Stored, Target, TensorSource, Weight, WeightFormat, keep, kept_bytes, kept_plan,
};
use half::bf16;
use residency::{Bytes, Component, ComponentId, Part};
use tempfile::TempDir;

const NF4: Target = Target::Quantized(WeightFormat::Nf4);

/// A checkpoint of random brain floats, of which sources of any shape are made.
struct Checkpoint {
    folder: TempDir,
    file: Arc<Path>,
}

impl Checkpoint {
    fn new() -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        let number = |i: u32| {
            let bits = i.wrapping_mul(2_654_435_761);
            bf16::from_f32((bits ^ bits >> 15) as i32 as f32 * 1e-10).to_le_bytes()
        };
        let bytes: Vec<u8> = (0..200_000).flat_map(number).collect();
        let file: Arc<Path> = folder.path().join("checkpoint").into();
        std::fs::write(&file, bytes).unwrap();
        Checkpoint { folder, file }
    }

    fn source(&self, name: &str, shape: &[usize], target: Target) -> TensorSource {
        let length = 2 * shape.iter().product::<usize>() as u64;
        let range = ByteRange { offset: 0, length };
        let file = Arc::clone(&self.file);
        TensorSource {
            name: name.to_owned(),
            pieces: vec![SourcePiece::File { file, range }],
            stored: Stored::Bf16,
            shape: shape.to_vec(),
            target,
            block: None,
        }
    }

    /// Every format, several dtypes, odd and empty shapes, and a weight that is stored quantized.
    fn sources(&self) -> Vec<TensorSource> {
        let mut sources = vec![
            self.source("scale", &[], Target::Full(DType::F32)),
            self.source("bias", &[17], Target::Full(DType::BF16)),
            self.source("none", &[0, 5], Target::Full(DType::F16)),
            self.source("none.nf4", &[0, 5], NF4),
        ];
        for format in WeightFormat::MADE_AT_LOAD {
            let name = format!("{format}.weight");
            let target = Target::Quantized(format.for_columns(3 * 331));
            sources.push(self.source(&name, &[37, 3, 331], target));
        }
        let mut stored = self.source("stored", &[10, 8], Target::Quantized(WeightFormat::Int8));
        stored.stored = Stored::U8;
        stored.pieces = vec![SourcePiece::Inline((0..120).collect::<Vec<u8>>().into())];
        sources.push(stored);
        sources
    }

    fn plan(&self) -> LoadPlan {
        LoadPlan::Files(self.sources())
    }

    fn copy(&self) -> PathBuf {
        self.folder.path().join("copy.safetensors")
    }

    /// Files in the folder other than the checkpoint.
    fn others(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        entries
            .map(|e| e.unwrap().path())
            .filter(|p| **p != *self.file)
            .collect()
    }
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::U8 => flat.to_vec1::<u8>().unwrap(),
        // Wide enough for every bit of the others.
        _ => {
            let wide = flat.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            wide.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
    }
}

/// All tensors that a plan loads: name, representation and bytes.
fn made(plan: &LoadPlan) -> BTreeMap<String, (String, Vec<u8>)> {
    let mut card = CpuCard::new(CpuSettings::default()).unwrap();
    let component = Component {
        id: ComponentId::new("c"),
        name: "c".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 1.0,
        parts: residency::Parts::default(),
    };
    card.load(&component, plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let tensors = card.tensors(&component.id).unwrap();
    let weight = |name: &str| match tensors.weight(name).unwrap() {
        Weight::Full(t) => (format!("{:?} {:?}", t.dtype(), t.dims()), bytes_of(&t)),
        Weight::Quantized(q) => (format!("{} {:?}", q.format, q.shape), bytes_of(&q.bytes)),
    };
    tensors
        .names()
        .map(|name| (name.to_owned(), weight(name)))
        .collect()
}

fn always() -> bool {
    true
}

#[test]
fn a_copy_gives_the_same_bytes() {
    let checkpoint = Checkpoint::new();
    let plan = checkpoint.plan();
    let bytes = keep(&plan, &checkpoint.copy(), &always).unwrap();
    assert_eq!(bytes, kept_bytes(&plan).unwrap());
    assert_eq!(bytes.0, std::fs::metadata(checkpoint.copy()).unwrap().len());
    assert_eq!(checkpoint.others(), [checkpoint.copy()]);

    let from_copy = kept_plan(&checkpoint.copy(), &plan).unwrap();
    assert_eq!(from_copy.bytes(), plan.bytes());
    assert_eq!(made(&from_copy), made(&plan));
    // A copy of a copy is the same file.
    let again = checkpoint.folder.path().join("again");
    keep(&from_copy, &again, &always).unwrap();
    assert_eq!(
        std::fs::read(again).unwrap(),
        std::fs::read(checkpoint.copy()).unwrap()
    );
}

#[test]
fn a_copy_is_a_valid_safetensors_file() {
    let checkpoint = Checkpoint::new();
    keep(&checkpoint.plan(), &checkpoint.copy(), &always).unwrap();
    let bytes = std::fs::read(checkpoint.copy()).unwrap();
    let (header, _) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("bias").unwrap().dtype(), safetensors::Dtype::BF16);
    assert_eq!(
        file.tensor("stored").unwrap().data(),
        (0..120).collect::<Vec<u8>>()
    );
}

fn refused(checkpoint: &Checkpoint, plan: &LoadPlan) -> String {
    match kept_plan(&checkpoint.copy(), plan) {
        Err(LoadError::Damaged { problem, .. } | LoadError::Incomplete { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_copy_of_another_plan_is_refused() {
    let checkpoint = Checkpoint::new();
    keep(&checkpoint.plan(), &checkpoint.copy(), &always).unwrap();
    let changed = |change: &dyn Fn(&mut Vec<TensorSource>)| {
        let mut sources = checkpoint.sources();
        change(&mut sources);
        refused(&checkpoint, &LoadPlan::Files(sources))
    };
    // The sources are: scale, bias, none, none.nf4, int8-convrot.weight, int8.weight, fp8.weight, nf4.weight, nf4-double.weight, stored.
    assert!(changed(&|s| s[1].name = "other".to_owned()).contains("tensor other is missing"));
    assert!(changed(&|s| s[7].name = "other".to_owned()).contains("other tensors are quantized"));
    assert!(changed(&|s| s[1].shape = vec![1, 17]).contains("tensor bias is Bf16 [17]"));
    assert!(changed(&|s| s[1].target = Target::Full(DType::F16)).contains("F16 [17] is needed"));
    // Neither the number of bytes nor the number of rows distinguishes these.
    assert!(changed(&|s| s[5].target = Target::Quantized("fp8".parse().unwrap())).contains("format"));
    assert!(changed(&|s| s[7].shape = vec![37, 331, 3]).contains("other tensors"));
    assert!(changed(&|s| drop(s.pop())).contains("other tensors"));
    assert!(changed(&|s| drop(s.remove(1))).contains("10 tensors, and 9 are needed"));
    assert!(changed(&|s| s[7].target = Target::Full(DType::BF16)).contains("other tensors"));
}

#[test]
fn a_copy_of_another_version_is_refused() {
    let checkpoint = Checkpoint::new();
    keep(&checkpoint.plan(), &checkpoint.copy(), &always).unwrap();
    let mut bytes = std::fs::read(checkpoint.copy()).unwrap();
    let version = br#"\"layout\":2"#;
    let at = bytes.windows(version.len()).position(|w| w == version).unwrap();
    bytes[at + version.len() - 1] = b'3';
    std::fs::write(checkpoint.copy(), bytes).unwrap();
    assert!(refused(&checkpoint, &checkpoint.plan()).contains("version 3"));
}

#[test]
fn damaged_copies_are_refused() {
    let checkpoint = Checkpoint::new();
    let plan = checkpoint.plan();
    // No copy at all: a checkpoint by itself.
    std::fs::write(checkpoint.copy(), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    assert!(refused(&checkpoint, &plan).contains("moored.kept"));

    let length = keep(&plan, &checkpoint.copy(), &always).unwrap().0;
    let whole = std::fs::read(checkpoint.copy()).unwrap();
    for end in [0, 7, 8, 100, length / 2, length - 1] {
        std::fs::write(checkpoint.copy(), &whole[..end as usize]).unwrap();
        refused(&checkpoint, &plan);
    }
    for at in 0..16 {
        let mut file = OpenOptions::new().write(true).open(checkpoint.copy()).unwrap();
        file.write_all(&whole).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&[0xff]).unwrap();
        refused(&checkpoint, &plan);
    }
}

#[test]
fn a_cancelled_copy_leaves_no_file() {
    let checkpoint = Checkpoint::new();
    let plan = checkpoint.plan();
    // Whatever the number of calls before: the last call comes before the file gets its name.
    let questions = Cell::new(0);
    let count = || {
        questions.set(questions.get() + 1);
        true
    };
    keep(&plan, &checkpoint.copy(), &count).unwrap();
    std::fs::remove_file(checkpoint.copy()).unwrap();
    assert!(questions.get() >= 2);
    for stop_at in 1..=questions.get() {
        let asked = Cell::new(0);
        let go_on = || {
            asked.set(asked.get() + 1);
            // While it is written there is a file, under another name.
            assert_eq!(checkpoint.others().len(), 1);
            assert!(!checkpoint.copy().exists());
            asked.get() < stop_at
        };
        let outcome = keep(&plan, &checkpoint.copy(), &go_on);
        assert!(matches!(outcome, Err(KeepError::Cancelled)), "{outcome:?}");
        assert_eq!(checkpoint.others(), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_failed_copy_leaves_the_previous_one_in_place() {
    let checkpoint = Checkpoint::new();
    let plan = checkpoint.plan();
    keep(&plan, &checkpoint.copy(), &always).unwrap();
    let before = std::fs::read(checkpoint.copy()).unwrap();

    // A number that is not finite, near the end of the file.
    let mut file = OpenOptions::new().write(true).open(&*checkpoint.file).unwrap();
    file.seek(SeekFrom::Start(2 * 36_000)).unwrap();
    file.write_all(&bf16::NAN.to_le_bytes()).unwrap();
    let outcome = keep(&plan, &checkpoint.copy(), &always);
    let Err(KeepError::Load(LoadError::NotFinite { tensor })) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(tensor.ends_with(".weight"), "{tensor}");
    assert_eq!(checkpoint.others(), [checkpoint.copy()]);
    assert_eq!(std::fs::read(checkpoint.copy()).unwrap(), before);

    // A checkpoint that changes while it is copied.
    file.seek(SeekFrom::Start(2 * 36_000)).unwrap();
    file.write_all(&bf16::ONE.to_le_bytes()).unwrap();
    let change = || {
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        file.set_times(FileTimes::new().set_modified(long_ago)).unwrap();
        true
    };
    let outcome = keep(&plan, &checkpoint.copy(), &change);
    assert!(
        matches!(outcome, Err(KeepError::Load(LoadError::Damaged { .. }))),
        "{outcome:?}"
    );
    assert_eq!(checkpoint.others(), [checkpoint.copy()]);
    assert_eq!(std::fs::read(checkpoint.copy()).unwrap(), before);
}

#[test]
fn a_plan_that_cannot_be_copied_is_refused_with_the_reason() {
    let checkpoint = Checkpoint::new();
    let nowhere = checkpoint.folder.path().join("nowhere/copy");
    let outcome = keep(&checkpoint.plan(), &nowhere, &always);
    assert!(matches!(outcome, Err(KeepError::Write { .. })), "{outcome:?}");
    let plan = LoadPlan::synthetic(Bytes(5));
    let outcome = keep(&plan, &checkpoint.copy(), &always);
    assert!(
        matches!(outcome, Err(KeepError::Load(LoadError::Unsupported(_)))),
        "{outcome:?}"
    );
    let plan = LoadPlan::Files(vec![checkpoint.source("__metadata__", &[1], NF4)]);
    let outcome = keep(&plan, &checkpoint.copy(), &always);
    assert!(
        matches!(outcome, Err(KeepError::Load(LoadError::Unsupported(_)))),
        "{outcome:?}"
    );
    assert_eq!(checkpoint.others(), [] as [PathBuf; 0]);
}

/// Sets when a copy was last used, in seconds after a time long ago.
fn used(path: &Path, second: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + second);
    let file = std::fs::File::open(path).unwrap();
    file.set_times(FileTimes::new().set_accessed(time)).unwrap();
}

#[test]
fn a_full_folder_evicts_the_least_recently_used_copy() {
    let checkpoint = Checkpoint::new();
    let plan = checkpoint.plan();
    let one = kept_bytes(&plan).unwrap();
    let path = checkpoint.folder.path().join("kept/copies");
    let folder = KeptFolder::open(&path, Bytes(one.0 * 2 + one.0 / 2)).unwrap();
    // Other files are neither counted nor removed.
    let foreign = path.join("model.safetensors");
    std::fs::write(&foreign, vec![0; one.0 as usize * 3]).unwrap();

    assert_eq!(folder.find("a"), None);
    for (second, key) in [(10, "a"), (20, "b")] {
        let kept = folder.keep(key, &plan, &always).unwrap();
        assert_eq!(kept, folder.path_of(key));
        used(&kept, second);
    }
    // Finding one counts as using it, and leaves it the file that loads under way have opened.
    let stamp = |key| *CheckpointFile::open(&folder.path_of(key)).unwrap().stamp();
    let before = stamp("a");
    assert_eq!(folder.find("a"), Some(folder.path_of("a")));
    assert_eq!(stamp("a"), before);
    folder.keep("c", &plan, &always).unwrap();
    assert!(folder.path_of("a").exists() && folder.path_of("c").exists());
    assert_eq!(folder.find("b"), None);
    kept_plan(&folder.find("c").unwrap(), &plan).unwrap();

    // A copy that never fits evicts nothing.
    let outcome = folder.make_room(Bytes(one.0 * 3));
    assert!(matches!(outcome, Err(KeepError::TooLarge { .. })), "{outcome:?}");
    assert!(folder.path_of("a").exists() && folder.path_of("c").exists());
    let small = KeptFolder::open(&path, Bytes(one.0 - 1)).unwrap();
    let outcome = small.keep("d", &plan, &always);
    assert!(matches!(outcome, Err(KeepError::TooLarge { .. })), "{outcome:?}");

    folder.remove("a").unwrap();
    folder.remove("a").unwrap();
    assert_eq!(folder.find("a"), None);
    // A smaller bound than before.
    small.make_room(Bytes::ZERO).unwrap();
    assert_eq!(folder.find("c"), None);
    assert!(foreign.exists());
}

#[test]
fn a_copy_of_another_layout_has_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let kept = KeptFolder::open(folder.path(), Bytes(1)).unwrap();
    // The first layout hashed the key alone.
    let of_key = blake3::hash(b"a").to_hex();
    let former = folder
        .path()
        .join(format!("a-{}.kept.safetensors", &of_key[..32]));
    std::fs::write(&former, b"").unwrap();
    assert_eq!(kept.find("a"), None);
    kept.remove("a").unwrap();
    assert!(former.exists());
}

#[test]
fn unfinished_files_of_dead_processes_are_removed_and_others_stay() {
    let checkpoint = Checkpoint::new();
    let path = checkpoint.folder.path().join("kept");
    let folder = KeptFolder::open(&path, Bytes(10 << 20)).unwrap();
    let left = path.join("copy-abc.kept.part");
    let foreign = path.join("copy-abc.part");
    let to = folder.path_of("a");
    let asked = Cell::new(0);
    let go_on = || {
        std::fs::write(&left, b"half").unwrap();
        std::fs::write(&foreign, b"half").unwrap();
        // Another process starts while this one writes.
        KeptFolder::open(&path, Bytes(10 << 20)).unwrap();
        assert!(!left.exists());
        assert!(foreign.exists());
        // A file of a process that has ended since is not counted, or nothing could be kept before the next start.
        std::fs::write(&left, vec![0; 9 << 20]).unwrap();
        folder.make_room(Bytes(5 << 20)).unwrap();
        assert!(!left.exists());
        // A file that is being written is counted.
        let outcome = folder.make_room(Bytes(10 << 20));
        assert!(matches!(outcome, Err(KeepError::TooLarge { .. })), "{outcome:?}");
        asked.set(asked.get() + 1);
        true
    };
    keep(&checkpoint.plan(), &to, &go_on).unwrap();
    assert!(asked.get() > 1);
    kept_plan(&to, &checkpoint.plan()).unwrap();
}

#[test]
fn keys_map_to_distinct_file_names_inside_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let kept = KeptFolder::open(folder.path(), Bytes(1)).unwrap();
    let keys = ["", ".", "..", "../a", "a/b", "a_b", "a:b", "ü", "A", "a", "a\0b"];
    let long = "x".repeat(5000);
    let mut names: Vec<PathBuf> = keys.iter().map(|key| kept.path_of(key)).collect();
    names.push(kept.path_of(&long));
    names.push(kept.path_of(&format!("{long}y")));
    for name in &names {
        assert_eq!(name.parent(), Some(folder.path()));
        std::fs::write(name, b"").unwrap();
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), keys.len() + 2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), names.len());
}
