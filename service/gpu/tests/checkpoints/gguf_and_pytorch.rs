//! GGUF and PyTorch files: files of the reference writers are read back, and every kind of damage is an error that
//! states the problem.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::DType;
use gpu::{CheckpointFile, GgufType, LoadError, Stored};
use half::{bf16, f16};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn fixture_bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

fn open_bytes(bytes: &[u8]) -> Result<CheckpointFile, LoadError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.flush().unwrap();
    CheckpointFile::open(file.path())
}

/// Asserts an error `Damaged` with these words.
#[track_caller]
fn damaged(bytes: &[u8], words: &str) {
    match open_bytes(bytes) {
        Err(error @ (LoadError::Damaged { .. } | LoadError::Incomplete { .. })) => {
            assert!(error.to_string().contains(words), "{error} lacks {words:?}");
        }
        other => panic!("not refused as damaged ({words}): {other:?}"),
    }
}

/// Asserts an error `Unsupported` or `UnsupportedTensor` with these words.
#[track_caller]
fn unsupported(bytes: &[u8], words: &str) {
    match open_bytes(bytes) {
        Err(error @ (LoadError::Unsupported(_) | LoadError::UnsupportedTensor { .. })) => {
            let message = error.to_string();
            assert!(message.contains(words), "{message} lacks {words:?}");
        }
        other => panic!("not refused as unsupported ({words}): {other:?}"),
    }
}

/// How a fixture's expectation calls a type.
fn name_of(stored: Stored) -> String {
    match stored {
        Stored::Gguf(kind) => kind.as_str().to_owned(),
        plain => format!("{plain:?}"),
    }
}

/// The numbers of a tensor that has no blocks.
fn values(stored: Stored, bytes: &[u8]) -> Vec<f64> {
    let value = |chunk: &[u8]| match stored {
        Stored::F32 => f32::from_le_bytes(chunk.try_into().unwrap()).into(),
        Stored::F16 => f16::from_le_bytes(chunk.try_into().unwrap()).into(),
        Stored::Bf16 => bf16::from_le_bytes(chunk.try_into().unwrap()).into(),
        Stored::F64 => f64::from_le_bytes(chunk.try_into().unwrap()),
        Stored::U8 => chunk[0].into(),
        Stored::I8 => (chunk[0] as i8).into(),
        Stored::F8E4M3 => gpu::e4m3_to_f32(chunk[0]).into(),
        Stored::F8E5M2 => gpu::e5m2_to_f32(chunk[0]).into(),
        Stored::F8E8M0 => gpu::e8m0_to_f32(chunk[0]).into(),
        Stored::I64 => i64::from_le_bytes(chunk.try_into().unwrap()) as f64,
        Stored::I32 => i32::from_le_bytes(chunk.try_into().unwrap()).into(),
        Stored::Gguf(_) => panic!("blocks have no values here"),
    };
    bytes.chunks_exact(stored.width()).map(value).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares a file with the tensors passed to its writer.
fn compare(name: &str) -> CheckpointFile {
    let expected: BTreeMap<String, BTreeMap<String, Value>> =
        serde_json::from_slice(&fixture_bytes("expected.json")).unwrap();
    let expected = &expected[name];
    let bytes = fixture_bytes(name);
    let read = CheckpointFile::open(&fixture(name)).unwrap();
    let names: Vec<&str> = read.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, expected.keys().map(String::as_str).collect::<Vec<_>>());
    for (name, entry) in read.tensors() {
        let expected = &expected[name];
        assert_eq!(expected["stored"], name_of(entry.stored), "{name}");
        assert_eq!(expected["shape"], serde_json::json!(entry.shape), "{name}");
        let at = entry.range.offset as usize;
        let own = &bytes[at..at + entry.range.length as usize];
        assert_eq!(expected["hex"], hex(own), "{name}");
        if let Some(numbers) = expected.get("values") {
            assert_eq!(*numbers, serde_json::json!(values(entry.stored, own)), "{name}");
        }
    }
    read
}

#[test]
fn safetensors_files_are_read_back_as_written() {
    let read = compare("tiny.safetensors");
    assert_eq!(read.metadata()["made"], "for tests");
}

#[test]
fn gguf_files_are_read_back_as_written() {
    let read = compare("tiny.gguf");
    let metadata = read.metadata();
    for (key, text) in [
        ("general.architecture", "flux"),
        ("number.uint8", "7"),
        ("number.int8", "-7"),
        ("number.uint16", "7"),
        ("number.int16", "-7"),
        ("number.uint32", "7"),
        ("number.int32", "-7"),
        ("number.uint64", "7"),
        ("number.int64", "-7"),
        ("number.float32", "0.25"),
        ("number.float64", "-0.125"),
        ("truth", "true"),
        ("text", "plain, und auch Größe"),
    ] {
        assert_eq!(metadata[key], text, "{key}");
    }
    assert!(!metadata.contains_key("array.numbers"));
    let types = read.tensors().filter_map(|(_, entry)| match entry.stored {
        Stored::Gguf(kind) => Some(kind),
        _ => None,
    });
    let types: Vec<GgufType> = types.collect();
    // These are in the fixtures of stored formats, which `pipelines` reads.
    let elsewhere = ["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"];
    let written = GgufType::ALL
        .iter()
        .filter(|kind| !elsewhere.contains(&kind.as_str()));
    assert!(written.into_iter().all(|kind| types.contains(kind)));
    let source = read.source("plain.F16", "w", DType::F32).unwrap();
    assert_eq!((source.stored, source.shape), (Stored::F16, vec![2, 3, 5]));
}

#[test]
fn gguf_version_2_is_read_and_unsupported_versions_are_named() {
    let mut bytes = fixture_bytes("tiny.gguf");
    bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
    assert!(open_bytes(&bytes).unwrap().get("block.Q6_K").is_some());
    for version in [1u32, 4] {
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        unsupported(&bytes, &format!("GGUF of version {version}"));
    }
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    unsupported(&bytes, "big-endian");
}

#[test]
fn state_dicts_are_read_back_as_written() {
    let read = compare("tiny.pth");
    assert!(read.metadata().is_empty());
    // Tied weights are one run of bytes under two names.
    assert_eq!(
        read.get("embed.weight").unwrap().range,
        read.get("head.weight").unwrap().range
    );
    compare("nested.pth");
    compare("module.pth");
}

#[test]
fn the_format_is_detected_by_the_first_bytes_and_not_by_the_name() {
    let folder = tempfile::tempdir().unwrap();
    for (from, to) in [
        ("tiny.pth", "a.gguf"),
        ("tiny.gguf", "b.safetensors"),
        ("tiny.safetensors", "c.pth"),
    ] {
        let path = folder.path().join(to);
        std::fs::copy(fixture(from), &path).unwrap();
        assert!(
            CheckpointFile::open(&path).unwrap().tensors().count() > 2,
            "{from}"
        );
    }
    // A header of 640 bytes begins as a pickle of protocol 2 does.
    let header = format!("{:640}", "{}");
    let mut bytes = 640u64.to_le_bytes().to_vec();
    assert_eq!(bytes[..2], [0x80, 2]);
    bytes.extend_from_slice(header.as_bytes());
    assert_eq!(open_bytes(&bytes).unwrap().tensors().count(), 0);
}

#[test]
fn rows_are_sliced_at_block_boundaries_only() {
    let read = CheckpointFile::open(&fixture("tiny.gguf")).unwrap();
    let whole = read.get("block.Q4_K").unwrap();
    let last = whole.rows(1, 2).unwrap();
    assert_eq!(last.shape, [2, 512]);
    assert_eq!(
        (last.range.offset, last.range.length),
        (whole.range.offset + 288, 576)
    );
    assert!(whole.rows(2, 2).is_none());
    // 12 rows of 64 in blocks of 256: there is no such thing as the bytes of one row.
    let reshaped = read.get("reshaped.Q4_K").unwrap();
    assert_eq!(reshaped.range.length, 3 * 144);
    assert!(reshaped.rows(0, 1).is_none());
    let bytes = CheckpointFile::open(&fixture("tiny.safetensors")).unwrap();
    let whole = bytes.get("block.F8E4M3").unwrap();
    let last = whole.rows(2, 1).unwrap();
    assert_eq!(
        (last.range.offset, last.range.length),
        (whole.range.offset + 10, 5)
    );
}

#[test]
fn pickles_other_than_state_dicts_are_refused_with_the_reason() {
    for (file, words) in [
        ("transposed.pth", "tensor w are not in row-major order"),
        (
            "int32.pth",
            "tensor w is stored as int32; what is read is float32",
        ),
        (
            "code.pth",
            r#"asks for "math.floor", which no state dict needs, and nothing is executed"#,
        ),
        (
            "legacy.pth",
            "bare pickle, as PyTorch wrote before 1.6: load it in PyTorch and save",
        ),
    ] {
        unsupported(&fixture_bytes(file), words);
    }
}

/// A file truncated at any length is refused.
#[test]
fn truncated_files_are_refused() {
    for name in ["tiny.safetensors", "tiny.gguf", "tiny.pth", "nested.pth"] {
        let bytes = fixture_bytes(name);
        for length in 0..bytes.len() {
            if name == "tiny.gguf" && length + 32 > bytes.len() {
                // The writer pads after the last tensor too, and the padding may be missing.
                continue;
            }
            match open_bytes(&bytes[..length]) {
                Err(LoadError::Damaged { .. } | LoadError::Incomplete { .. }) => {}
                other => panic!("{name}, {length} of {} bytes: {other:?}", bytes.len()),
            }
        }
    }
}

/// A builder of GGUF files.
#[derive(Default)]
struct Gguf {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: usize,
    counts: Option<(u64, u64)>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Gguf {
    fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Gguf {
        self.keys
            .push([&text(name), &kind.to_le_bytes()[..], value].concat());
        self
    }

    /// Dimensions as the file has them, fastest first.
    fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Gguf {
        let mut info = text(name);
        info.extend((dimensions.len() as u32).to_le_bytes());
        info.extend(dimensions.iter().flat_map(|n| n.to_le_bytes()));
        info.extend(kind.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.tensors.push(info);
        self
    }

    fn original_shape(self, name: &str, shape: &[i32]) -> Gguf {
        let mut value = 5u32.to_le_bytes().to_vec();
        value.extend((shape.len() as u64).to_le_bytes());
        value.extend(shape.iter().flat_map(|n| n.to_le_bytes()));
        self.key(&format!("comfy.gguf.orig_shape.{name}"), 9, &value)
    }

    fn data(mut self, bytes: usize) -> Gguf {
        self.data = bytes;
        self
    }

    fn counts(mut self, tensors: u64, keys: u64) -> Gguf {
        self.counts = Some((tensors, keys));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let (tensors, keys) = self
            .counts
            .unwrap_or((self.tensors.len() as u64, self.keys.len() as u64));
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }
}

const F32: u32 = 0;
const Q4_K: u32 = 12;

#[test]
fn contradictory_gguf_headers_are_refused_with_the_reason() {
    let new = Gguf::default;
    let good = || new().tensor("w", &[4, 2], F32, 0).data(32);
    assert_eq!(
        open_bytes(&good().bytes()).unwrap().get("w").unwrap().shape,
        [2, 4]
    );

    damaged(&good().data(31).bytes(), "w ends 1 bytes after the end");
    damaged(
        &good().counts(u64::MAX, 0).bytes(),
        "claims 18446744073709551615 tensors",
    );
    damaged(
        &good().counts(1, 1 << 40).bytes(),
        "claims 1099511627776 metadata keys",
    );
    // Room for all of them does not help.
    let roomy = || Gguf::default().data(8 << 20);
    damaged(
        &roomy().counts((1 << 18) + 1, 0).bytes(),
        "tensors, and 262144 are allowed",
    );
    damaged(
        &roomy().counts(0, (1 << 18) + 1).bytes(),
        "keys, and 262144 are allowed",
    );
    // Zeros follow: empty names, scalars of F32 at 0.
    damaged(&good().counts(2, 0).bytes(), "overlaps");
    damaged(&good().counts(3, 0).bytes(), "is there twice");
    damaged(&good().tensor("w", &[1], F32, 0).bytes(), "w is there twice");
    damaged(
        &good().tensor("x", &[4, 2], F32, 0).bytes(),
        "overlaps the one before it",
    );
    damaged(
        &new().tensor("w", &[1], F32, 8).data(32).bytes(),
        "no multiple of 32",
    );
    damaged(&new().tensor("w", &[1], F32, u64::MAX - 31).bytes(), "w ends");
    damaged(&new().tensor("w", &[1; 9], F32, 0).bytes(), "w has 9 dimensions");
    for dimensions in [
        &[u64::MAX][..],
        &[1 << 32, 1 << 32],
        &[0, 1 << 62, 4],
        &[1 << 62, 1, 1],
    ] {
        damaged(
            &new().tensor("w", dimensions, F32, 0).data(64).bytes(),
            "impossible shape",
        );
    }
    damaged(
        &new().tensor("w", &[255, 256], Q4_K, 0).data(1 << 16).bytes(),
        "rows of 255, which do not divide into blocks of 256",
    );
    damaged(&new().tensor("w", &[], Q4_K, 0).data(256).bytes(), "rows of 1");
    let mut not_text = good().bytes();
    let at = 24 + 8;
    assert_eq!(not_text[at], b'w');
    not_text[at] = 0xff;
    damaged(&not_text, "not UTF-8");
}

#[test]
fn malformed_gguf_metadata_is_refused() {
    let new = Gguf::default;
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    damaged(
        &new().key("k", 8, &u64::MAX.to_le_bytes()).bytes(),
        "ends after the end of the file",
    );
    damaged(&new().key("k", 9, &array(0, u64::MAX)).bytes(), "numbers");
    damaged(&new().key("k", 9, &array(12, 1 << 61)).bytes(), "numbers");
    damaged(&new().key("k", 9, &array(8, 1 << 30)).bytes(), "strings");
    damaged(&new().key("k", 9, &array(9, 1 << 30)).bytes(), "arrays");
    damaged(&new().key("k", 9, &array(13, 0)).bytes(), "type 13");
    damaged(&new().key("k", 77, &[0; 8]).bytes(), "type 77");
    damaged(
        &new().key("k", 0, &[1]).key("k", 0, &[2]).bytes(),
        "the key k twice",
    );
    damaged(&new().key("k", 9, &array(9, 1).repeat(200)).bytes(), "4 deep");
    for value in [0u32, 3, 48] {
        damaged(
            &new().key("general.alignment", 4, &value.to_le_bytes()).bytes(),
            "not a power of two",
        );
    }
    damaged(
        &new().key("general.alignment", 0, &[32]).bytes(),
        "not a power of two in u32",
    );
    let key = |value: u32| new().key("general.alignment", 4, &value.to_le_bytes());
    let aligned = key(8)
        .tensor("w", &[1], F32, 0)
        .tensor("x", &[1], F32, 8)
        .data(64);
    assert_eq!(open_bytes(&aligned.bytes()).unwrap().tensors().count(), 2);
    damaged(&key(1 << 31).tensor("w", &[1], F32, 0).data(64).bytes(), "w ends");
}

#[test]
fn original_shapes_must_have_the_same_element_count() {
    let with = |shape: &[i32]| {
        let file = Gguf::default().tensor("w", &[256, 2], Q4_K, 0).data(288);
        file.original_shape("w", shape).bytes()
    };
    let entry = |bytes: &[u8]| open_bytes(bytes).unwrap().get("w").unwrap().clone();
    assert_eq!(entry(&with(&[32, 1, 16])).shape, [32, 1, 16]);
    damaged(&with(&[2, 255]), "another number of elements");
    damaged(&with(&[2, 512]), "another number of elements");
    damaged(&with(&[i32::MAX; 8]), "another number of elements");
    damaged(&with(&[-2, -256]), "has the dimension -2");
    damaged(&with(&[1; 9]), "has 9 dimensions");
}

#[test]
fn an_unsupported_type_is_named_with_its_tensor() {
    for (number, name) in [
        (21, "IQ3_S"),
        (34, "TQ1_0"),
        (4, "type 4"),
        (u32::MAX, "type 4294967295"),
    ] {
        let file = Gguf::default()
            .tensor("fine", &[1], F32, 0)
            .tensor("odd", &[256], number, 32)
            .data(512);
        let words =
            format!("tensor odd is stored as {name}; what is read is F32, F16, BF16, F64, I8, I64, Q4_0");
        unsupported(&file.bytes(), &words);
    }
}

fn plain() -> zip::write::SimpleFileOptions {
    zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored)
}

/// The bytes of an archive as `torch.save` writes it, with this pickle and these storages.
fn archive(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    archive_of(&[&[("a/data.pkl", pickle)], storages].concat(), plain())
}

fn archive_of(entries: &[(&str, &[u8])], options: zip::write::SimpleFileOptions) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        writer.start_file(*name, options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn short_text(text: &str) -> Vec<u8> {
    [&[0x8c, text.len() as u8], text.as_bytes()].concat()
}

fn int(number: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &number.to_le_bytes()].concat()
}

/// A call that makes a tensor of floats from storage 0.
fn tensor(offset: i64, shape: &[i64], strides: &[i64], length: i64) -> Vec<u8> {
    let tuple = |numbers: &[i64]| {
        let items: Vec<u8> = numbers.iter().flat_map(|n| int(*n)).collect();
        [b"(", &items[..], b"t"].concat()
    };
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n(("[..],
        &short_text("storage"),
        b"ctorch\nFloatStorage\n",
        &short_text("0"),
        &short_text("cpu"),
        &int(length),
        b"tQ",
        &int(offset),
        &tuple(shape),
        &tuple(strides),
        b"\x89NtR",
    ]
    .concat()
}

/// A dict of one tensor, `w`.
fn dict(tensor: &[u8]) -> Vec<u8> {
    [b"\x80\x02}", &short_text("w")[..], tensor, b"s."].concat()
}

fn with_tensor(offset: i64, shape: &[i64], strides: &[i64], length: i64) -> Vec<u8> {
    archive(
        &dict(&tensor(offset, shape, strides, length)),
        &[("a/data/0", &[0; 24])],
    )
}

#[test]
fn tensors_that_exceed_their_storage_are_refused() {
    let good = open_bytes(&with_tensor(2, &[2, 2], &[2, 1], 6)).unwrap();
    let entry = good.get("w").unwrap();
    assert_eq!(
        (entry.shape.as_slice(), entry.range.length),
        ([2, 2].as_slice(), 16)
    );
    // A dimension of 1 may have any stride; an empty tensor has no strides.
    assert!(open_bytes(&with_tensor(0, &[1, 6], &[77, 1], 6)).is_ok());
    assert!(open_bytes(&with_tensor(0, &[0, 6], &[77, 77], 6)).is_ok());

    damaged(
        &with_tensor(3, &[2, 2], &[2, 1], 6),
        "takes 16 bytes from number 3 of its storage on",
    );
    damaged(&with_tensor(i64::MAX, &[2, 2], &[2, 1], 6), "of its storage on");
    damaged(&with_tensor(-1, &[2], &[1], 6), "begins nowhere");
    damaged(
        &with_tensor(0, &[2], &[1], 7),
        "a storage of 7 numbers of 4 bytes",
    );
    damaged(&with_tensor(0, &[2], &[1], i64::MAX), "numbers of 4 bytes");
    damaged(&with_tensor(0, &[2], &[1], -6), "no storage");
    damaged(&with_tensor(0, &[2, 1], &[1], 6), "strides that do not fit");
    damaged(&with_tensor(0, &[-2], &[1], 6), "a shape that is none");
    damaged(&with_tensor(0, &[1; 65], &[1; 65], 6), "a shape that is none");
    damaged(
        &with_tensor(0, &[1 << 32, 1 << 32], &[1 << 32, 1], 6),
        "impossible shape",
    );
    damaged(
        &with_tensor(0, &[0, i64::MAX, 4], &[4, 4, 1], 6),
        "impossible shape",
    );
    unsupported(&with_tensor(0, &[2, 3], &[1, 2], 6), "not in row-major order");
    unsupported(&with_tensor(0, &[2, 3], &[0, 1], 6), "not in row-major order");

    let whole = tensor(0, &[6], &[1], 6);
    damaged(&archive(&dict(&whole), &[]), r#"lacks the entry "a/data/0""#);
    let twice = [
        b"\x80\x02}(",
        &short_text("w")[..],
        &whole,
        &short_text("w"),
        &whole,
        b"u.",
    ]
    .concat();
    damaged(&archive(&twice, &[("a/data/0", &[0; 24])]), "w is there twice");
    let numbered = [b"\x80\x02}", &int(5)[..], &whole, b"s."].concat();
    unsupported(&archive(&numbered, &[("a/data/0", &[0; 24])]), "no text");
}

#[test]
fn malformed_pickles_are_refused() {
    let refused = |pickle: &[u8], words: &str| damaged(&archive(pickle, &[]), words);
    let foreign = |pickle: &[u8], words: &str| unsupported(&archive(pickle, &[]), words);
    assert_eq!(
        open_bytes(&archive(b"\x80\x02}.", &[]))
            .unwrap()
            .tensors()
            .count(),
        0
    );

    foreign(b"\x80\x02cos\nsystem\n(X\x02\0\0\0lstR.", r#""os.system""#);
    foreign(b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", r#""posix.system""#);
    foreign(b"\x80\x02ctorch\nload\n.", r#""torch.load""#);
    foreign(b"\x80\x02cbuiltins\neval\n.", r#""builtins.eval""#);
    foreign(b"\x80\x02ccollections\nOrderedDict\n\x81.", "opcode 0x81");
    foreign(b"(ios\nsystem\n.", "opcode 0x69");
    foreign(b"\x80\x06}.", "protocol 6");
    foreign(b"\x80\x02K\x01.", "no dict of tensors");
    foreign(
        b"\x80\x02}\x8c\x01aK\x01s.",
        "has no tensors, nor has one under state_dict, model, module",
    );
    foreign(b"\x80\x02K\x01}b.", "no dict");
    refused(b"", "ends in the middle");
    refused(b"\x80\x02}", "ends in the middle");
    refused(b"\x80\x02.", "not there");
    refused(b"\x80\x02}K\x01s.", "not there");
    refused(b"\x80\x02}(K\x01s.", "not there");
    refused(b"\x80\x02}(K\x01u.", "a key without a value");
    refused(b"\x80\x02K\x01K\x01K\x01s.", "no dict");
    refused(b"\x80\x02}t.", "did not begin");
    refused(b"\x80\x02h\x07.", "did not remember");
    refused(b"\x80\x02X\xff\xff\xff\x7fab.", "ends in the middle");
    refused(
        b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffab.",
        "ends in the middle",
    );
    refused(b"\x80\x02\x8c\x01\xff.", "not UTF-8");
    refused(b"\x80\x02ctorch", "middle of a name");
    refused(b"\x80\x02K\x01Q.", "no storage");
    refused(b"\x80\x02K\x01)R.", "no function");
    refused(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        "arguments that it does not take",
    );
    refused(
        b"\x80\x02ctorch._utils\n_rebuild_parameter\nK\x01\x85R.",
        "arguments",
    );
    refused(b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "arguments");
}

#[test]
fn the_values_of_a_pickle_are_bounded() {
    let refused = |middle: &[u8], count: usize, words: &str| {
        let pickle = [b"\x80\x02", &middle.repeat(count)[..], b"."].concat();
        damaged(&archive(&pickle, &[]), words);
    };
    refused(b"(", 1001, "nests more than 1000 deep");
    refused(b"N0", (1 << 20) + 1, "makes more than 1048576 values");
    let noted = [b"\x80\x02N", &b"\x94".repeat((1 << 20) + 1)[..], b"."].concat();
    damaged(&archive(&noted, &[]), "remembers more than 1048576 values");
    let copies = [b"\x80\x02N", &b"2".repeat(1 << 20)[..], b"."].concat();
    damaged(&archive(&copies, &[]), "stacks more than 1048576 values");
    // Tuples in tuples, and a dict that holds itself, need no recursion.
    let deep = [b"\x80\x02)", &b"\x85".repeat(1 << 19)[..], b"}."].concat();
    assert!(open_bytes(&archive(&deep, &[])).is_ok());
    let own = b"\x80\x02}q\x00\x8c\x05modelh\x00s.";
    unsupported(&archive(own, &[]), "has no tensors");
}

#[test]
fn archives_not_written_by_torch_are_refused() {
    let pickle = dict(&tensor(0, &[6], &[1], 6));
    let storage = ("a/data/0", &[0u8; 24][..]);
    let with = |more: &[(&str, &[u8])]| archive(&pickle, &[&[storage], more].concat());
    assert!(open_bytes(&with(&[("a/byteorder", b"little")])).is_ok());
    unsupported(&with(&[("a/byteorder", b"big")]), "byte order is not little");
    unsupported(&with(&[("a/constants.pkl", b"")]), "TorchScript");
    damaged(&with(&[("b/data.pkl", b"")]), "two data.pkl");
    unsupported(&archive_of(&[("a/x", b"")], plain()), "without data.pkl");
    unsupported(&archive_of(&[], plain()), "without data.pkl");

    // As archives of more than 4 GiB are written.
    let wide = archive_of(&[("a/data.pkl", &pickle), storage], plain().large_file(true));
    assert_eq!(open_bytes(&wide).unwrap().get("w").unwrap().range.length, 24);

    // The writer has no compression here: the directory is changed by hand.
    let bytes = with(&[]);
    let directory = |name: &str| {
        let found = bytes
            .windows(name.len())
            .rposition(|window| window == name.as_bytes());
        found.unwrap() - 46
    };
    let change = |at: usize, value: &[u8]| {
        let mut changed = bytes.clone();
        changed[at..at + value.len()].copy_from_slice(value);
        changed
    };
    let entry = directory("a/data/0");
    assert_eq!(bytes[entry..entry + 4], *b"PK\x01\x02");
    unsupported(&change(entry + 10, &[8, 0]), "compressed or encrypted");
    unsupported(&change(entry + 8, &[1]), "compressed or encrypted");
    damaged(&change(entry + 20, &[25]), "two lengths");
    damaged(
        &change(entry + 20, &[200, 0, 0, 0, 200]),
        "behind the archive's data",
    );
    // Both entries at the place of the first.
    damaged(&change(entry + 42, &[0, 0, 0, 0]), "overlaps the one before it");
    damaged(&change(directory("a/data.pkl") + 20, &u32::MAX.to_le_bytes()), "");
}

/// The end of an archive in 64 bits: its end record, where that is, and the end record in 32 bits that refers to it.
fn wide_end(at: u64, entries: u64, directory: u64) -> Vec<u8> {
    let long = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    [
        &b"PK\x06\x06"[..],
        &long(&[44]),
        &[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &long(&[entries, entries, at - directory, directory]),
        b"PK\x06\x07\0\0\0\0",
        &long(&[at]),
        &[1, 0, 0, 0],
        b"PK\x05\x06\0\0\0\0",
        &[0xFF; 12],
        &[0, 0],
    ]
    .concat()
}

#[test]
fn directories_are_bounded_before_they_are_allocated() {
    let damaged = |file: &std::fs::File, length: u64, end: &[u8], words: &str| {
        file.set_len(length).unwrap();
        file.write_all_at(end, length).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let error = CheckpointFile::open(Path::new(&path)).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
    };
    // Holes, but for both ends.
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(b"PK\x03\x04", 0).unwrap();
    let (length, directory) = (1u64 << 40, 1u64 << 39);
    file.write_all_at(b"PK\x01\x02", directory).unwrap();
    let end = wide_end(length, 1 << 33, directory);
    damaged(&file, length, &end, "claims a directory of more than is allowed");
    let end = wide_end(length, 1, directory);
    damaged(&file, length, &end, "claims a directory of more than is allowed");
    let end = wide_end(length, 1 << 33, length - 46);
    damaged(&file, length, &end, "claims a directory of more than is allowed");
    let mut elsewhere = wide_end(length, 1 << 33, directory);
    elsewhere[64..72].copy_from_slice(&(length - 4096).to_le_bytes());
    damaged(&file, length, &elsewhere, "does not end as torch.save ends one");
    // One that comes before another, which is well.
    let well = archive(&dict(&tensor(0, &[6], &[1], 6)), &[("a/data/0", &[0; 24])]);
    let both = [
        wide_end(length, 1 << 33, directory),
        well[well.len() - 22..].to_vec(),
    ]
    .concat();
    damaged(&file, length, &both, "claims a directory of more than is allowed");
}

#[test]
fn long_names_in_a_file_are_truncated_in_messages() {
    let name = "ä".repeat(1 << 20);
    let file = Gguf::default().tensor(&name, &[1], 15, 0).data(32);
    let message = open_bytes(&file.bytes()).unwrap_err().to_string();
    assert!(message.len() < 5000, "{}", message.len());
    assert!(
        message.contains("tensor ää") && message.contains("is stored as Q8_K"),
        "{message}"
    );
}

#[test]
fn storages_that_share_bytes_are_refused() {
    let both = [
        b"\x80\x02}(",
        &short_text("v")[..],
        &tensor(0, &[6], &[1], 6),
        &short_text("w"),
        &tensor(0, &[6], &[1], 6),
        b"u.",
    ]
    .concat();
    // The second tensor's storage is number 1.
    let at = both
        .windows(3)
        .rposition(|window| window == [0x8c, 1, b'0'])
        .unwrap();
    let mut both = both;
    both[at + 2] = b'1';
    let bytes = archive(&both, &[("a/data/0", &[0; 24]), ("a/data/1", &[0; 24])]);
    assert_eq!(open_bytes(&bytes).unwrap().tensors().count(), 2);
    let place = |name: &str| {
        let found = bytes
            .windows(8)
            .rposition(|window| window == name.as_bytes())
            .unwrap();
        found - 46 + 42
    };
    let mut changed = bytes.clone();
    let (first, second) = (place("a/data/0"), place("a/data/1"));
    changed.copy_within(first..first + 4, second);
    damaged(&changed, "overlaps the one before it");
}
