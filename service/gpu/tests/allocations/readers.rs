//! Whatever bytes a checkpoint has: reading its header neither panics nor hangs, asks for no more memory than a
//! small file can be worth, and answers no range outside the file.
//!
//! `BOLERO_RANDOM_ITERATIONS` sets how many files are tried of each kind, and `BOLERO_RANDOM_SEED` repeats one that
//! failed.

use std::fs::OpenOptions;
use std::io::{Cursor, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bolero::{TypeGenerator, check};
use gpu::{CheckpointFile, allocator};
use residency::Bytes;

use crate::edits::{Edit, edited};

/// Files that are tried of each kind: some seconds in all.
const ITERATIONS: usize = 10_000;
/// The most that a file of some kilobytes may cost.
const MAX_MEMORY: Bytes = Bytes::mib(64);

/// Where a file is changed.
#[derive(Clone, Debug, TypeGenerator)]
enum Place {
    Anywhere,
    /// Of an archive, its end.
    Directory,
    /// Of an archive, the pickle, with the rest kept sound.
    Pickle,
}

/// Reads a file of these bytes and checks the invariants of any file. Returns whether it was accepted.
fn check_file(path: &Path, bytes: &[u8]) -> bool {
    // Written over rather than made anew, which file systems are slow at.
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    let before = allocator::mark();
    let read = CheckpointFile::open(path);
    let peak = allocator::peak_since_mark();
    assert!(
        peak <= before + MAX_MEMORY,
        "{} bytes cost {:?} of memory",
        bytes.len(),
        peak - before
    );
    let Ok(read) = read else {
        return false;
    };
    for (name, entry) in read.tensors() {
        let end = entry.range.offset.checked_add(entry.range.length).unwrap();
        assert!(
            end <= bytes.len() as u64,
            "{name} ends at {end} of {}",
            bytes.len()
        );
        let (in_block, width) = entry.stored.block();
        let blocks = entry.elements() / in_block;
        assert_eq!((blocks * width) as u64, entry.range.length, "{name}");
        let rows = entry.shape.first().copied().unwrap_or(0);
        if let Some(last) = rows.checked_sub(1).and_then(|row| entry.rows(row, 1)) {
            assert_eq!(last.range.offset + last.range.length, end, "{name}");
        }
    }
    true
}

#[test]
fn arbitrary_files_are_read_safely() {
    let _alone = crate::alone();
    assert!(allocator::installed());
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    for name in [
        "tiny.safetensors",
        "tiny.gguf",
        "tiny.pth",
        "nested.pth",
        "transposed.pth",
        "code.pth",
    ] {
        let seed = std::fs::read(fixtures.join(name)).unwrap();
        let accepted = AtomicUsize::new(0);
        let tried = AtomicUsize::new(0);
        let parts = name.ends_with(".pth").then(|| entries(&seed));
        check!()
            .with_iterations(ITERATIONS)
            .with_max_len(256)
            .with_type::<(Place, Vec<Edit>)>()
            .for_each(|(place, edits)| {
                let edit = |bytes: Vec<u8>| edited(bytes, edits);
                let bytes = match (place, &parts) {
                    (Place::Directory, Some(_)) => {
                        let (front, directory) = seed.split_at(seed.len() - seed.len().min(1200));
                        [front, &edit(directory.to_vec())].concat()
                    }
                    (Place::Pickle, Some(parts)) => {
                        let edited = |(name, bytes): &(String, Vec<u8>)| {
                            let bytes = bytes.clone();
                            let is_pickle = name.ends_with("data.pkl");
                            (name.clone(), if is_pickle { edit(bytes) } else { bytes })
                        };
                        archive(&parts.iter().map(edited).collect::<Vec<_>>())
                    }
                    _ => edit(seed.clone()),
                };
                tried.fetch_add(1, Relaxed);
                accepted.fetch_add(usize::from(check_file(&path, &bytes)), Relaxed);
            });
        // Both outcomes must occur: otherwise the code after the checks was not reached.
        eprintln!(
            "{name}: {} of {} accepted",
            accepted.load(Relaxed),
            tried.load(Relaxed)
        );
    }

    // Bytes of no file, after each way in which a file begins.
    let starts: [&[u8]; 4] = [
        b"",
        b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0",
        b"PK\x03\x04",
        b"PK\x05\x06",
    ];
    check!()
        .with_iterations(ITERATIONS)
        .with_max_len(2048)
        .with_type::<(u8, Vec<u8>)>()
        .for_each(|(start, rest)| {
            let start = starts[usize::from(*start) % starts.len()];
            check_file(&path, &[start, rest].concat());
        });

    // Any pickle in a sound archive, opcodes preferred.
    const OPCODES: &[u8] =
        b".\x80\x95(012qr\x94hjN\x88\x89JKM\x8a\x8bG\x8cUXT\x8dCB\x8e)\x85\x86\x87t]\x8fl\x91aeu}dsbcR\x93Q";
    check!()
        .with_iterations(ITERATIONS)
        .with_max_len(1024)
        .with_type::<Vec<(bool, u8)>>()
        .for_each(|program| {
            let byte = |&(opcode, byte): &(bool, u8)| match opcode {
                true => OPCODES[usize::from(byte) % OPCODES.len()],
                false => byte % 8,
            };
            let pickle: Vec<u8> = program.iter().map(byte).collect();
            let storage = ("a/data/0".to_owned(), vec![0; 24]);
            check_file(&path, &archive(&[("a/data.pkl".to_owned(), pickle), storage]));
        });
}

/// The entries of an archive.
fn entries(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).unwrap();
    let count = archive.len();
    let entry = |index| {
        let mut entry = archive.by_index(index).unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.name().unwrap().into_owned(), bytes)
    };
    (0..count).map(entry).collect()
}

/// An archive of these entries.
fn archive(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        writer.start_file(name.as_str(), options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}
