//! Valid and invalid headers, and that no header causes a panic.

use std::collections::HashMap;
use std::io::Write;

use gpu::{CheckpointFile, FileStamp, LoadError, Stored};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};

/// Writes length, header and data as passed, valid or not.
fn raw_file(length: u64, header: &[u8], data: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&length.to_le_bytes()).unwrap();
    file.write_all(header).unwrap();
    file.write_all(data).unwrap();
    file.flush().unwrap();
    file
}

fn with_header(header: &str, data_bytes: usize) -> tempfile::NamedTempFile {
    raw_file(header.len() as u64, header.as_bytes(), &vec![0; data_bytes])
}

fn valid_bytes() -> Vec<u8> {
    let a = vec![1u8; 2 * 3 * 4];
    let b = vec![2u8; 5 * 2];
    let c = vec![3u8; 8];
    let views = vec![
        (
            "block.0.weight",
            TensorView::new(Dtype::F32, vec![2, 3], &a).unwrap(),
        ),
        ("block.0.bias", TensorView::new(Dtype::BF16, vec![5], &b).unwrap()),
        ("step", TensorView::new(Dtype::I64, vec![], &c).unwrap()),
    ];
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize(views, Some(metadata)).unwrap()
}

#[test]
fn a_file_of_the_reference_implementation_is_read() {
    let bytes = valid_bytes();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let read = CheckpointFile::open(file.path()).unwrap();

    assert_eq!(read.size().0, bytes.len() as u64);
    assert_eq!(read.metadata()["format"], "pt");
    assert_eq!(read.tensors().count(), 3);
    let bias = read.get("block.0.bias").unwrap();
    assert_eq!(
        (bias.stored, bias.shape.as_slice()),
        (Stored::Bf16, [5].as_slice())
    );
    let at = bias.range.offset as usize;
    assert_eq!(&bytes[at..at + bias.range.length as usize], &[2u8; 10]);
    assert_eq!(read.get("step").unwrap().elements(), 1);
    assert!(read.get("nothing").is_none());
    assert_eq!(read.stamp(), &FileStamp::at(file.path()).unwrap());

    file.write_all(b"more").unwrap();
    assert_ne!(read.stamp(), &FileStamp::at(file.path()).unwrap());
}

#[test]
fn a_header_of_more_tensors_than_any_model_has_is_refused() {
    let header = |tensors: usize| {
        let entries =
            (0..tensors).map(|i| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#));
        format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
    };
    let open = |tensors| CheckpointFile::open(with_header(&header(tensors), 0).path());
    assert_eq!(open(200_000).unwrap().tensors().count(), 200_000);
    let refused = open(200_001).unwrap_err().to_string();
    assert!(refused.contains("more than 200000 tensors"), "{refused}");
}

#[test]
fn rows_are_slices_of_the_first_dimension() {
    let file = with_header(r#"{"w":{"dtype":"F16","shape":[6,4],"data_offsets":[0,48]}}"#, 48);
    let read = CheckpointFile::open(file.path()).unwrap();
    let whole = read.get("w").unwrap();
    let middle = whole.rows(2, 3).unwrap();
    assert_eq!(middle.shape, [3, 4]);
    assert_eq!(
        (middle.range.offset, middle.range.length),
        (whole.range.offset + 16, 24)
    );
    assert!(whole.rows(4, 3).is_none());
    assert!(whole.rows(usize::MAX, 2).is_none());
}

/// Each contradiction, and a word of the expected message.
#[test]
fn contradictory_headers_are_refused_with_the_reason() {
    let cases: &[(&str, usize, &str)] = &[
        ("[]", 0, "begin with {"),
        ("{", 0, "parsed"),
        (r#"{"w":1}"#, 0, "in w"),
        (
            r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            4,
            "in w",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            4,
            "w ends 4 bytes after",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            4,
            "w has 4 bytes",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}"#,
            8,
            "w begins at 8",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            6,
            "last 2 bytes",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
            6,
            "2 bytes before tensor w",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#,
            4,
            "impossible",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[0,9223372036854775807,4],"data_offsets":[0,0]}}"#,
            0,
            "impossible",
        ),
        (
            r#"{"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                "w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
            12,
            "w overlaps",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                "w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            8,
            "w is there twice",
        ),
    ];
    for (header, data_bytes, word) in cases {
        let file = with_header(header, *data_bytes);
        match CheckpointFile::open(file.path()) {
            Err(error @ (LoadError::Damaged { .. } | LoadError::Incomplete { .. })) => {
                assert!(
                    error.to_string().contains(word),
                    "{header}: {error} lacks {word:?}"
                );
            }
            other => panic!("{header}: {other:?}"),
        }
    }
}

#[test]
fn an_unsupported_dtype_is_named_with_its_tensor() {
    let file = with_header(r#"{"q":{"dtype":"F4","shape":[4],"data_offsets":[0,4]}}"#, 4);
    let error = CheckpointFile::open(file.path()).unwrap_err();
    assert!(error.to_string().ends_with("tensor q is stored as F4"), "{error}");
    assert!(matches!(
        error,
        LoadError::UnsupportedTensor { tensor, stored, readable: None, .. } if tensor == "q" && stored == "F4"
    ));
}

#[test]
fn false_lengths_cause_no_allocation() {
    let cases = [
        (u64::MAX, "more than the 100000000"),
        (100_000_001, "more than the 100000000"),
        (99_999_999, "claims more bytes than the file has"),
        (3, "claims more bytes than the file has"),
        (0, "begin with {"),
    ];
    for (length, word) in cases {
        let file = raw_file(length, b"{}", b"");
        let error = CheckpointFile::open(file.path()).unwrap_err();
        assert!(matches!(
            error,
            LoadError::Damaged { .. } | LoadError::Incomplete { .. }
        ));
        assert!(error.to_string().contains(word), "{length}: {error}");
    }
    let mut short = tempfile::NamedTempFile::new().unwrap();
    short.write_all(b"1234567").unwrap();
    assert!(matches!(
        CheckpointFile::open(short.path()),
        Err(LoadError::Incomplete { .. })
    ));
    let utf = raw_file(3, b"{\xff}", b"");
    assert!(
        CheckpointFile::open(utf.path())
            .unwrap_err()
            .to_string()
            .contains("UTF-8")
    );
    let gone = CheckpointFile::open("/nowhere/at/all".as_ref());
    assert!(matches!(gone, Err(LoadError::Io { .. })));
}

#[test]
fn a_file_without_tensors_is_accepted() {
    let file = with_header("{}  ", 0);
    assert_eq!(CheckpointFile::open(file.path()).unwrap().tensors().count(), 0);
    let nothing = with_header(
        r#"{"__metadata__":null,"e":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#,
        0,
    );
    assert_eq!(
        CheckpointFile::open(nothing.path())
            .unwrap()
            .get("e")
            .unwrap()
            .elements(),
        0
    );
}

/// Checks that accepted ranges are within the file.
fn check_ranges(bytes: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let Ok(read) = CheckpointFile::open(file.path()) else {
        return;
    };
    for (name, entry) in read.tensors() {
        let end = entry.range.offset.checked_add(entry.range.length).unwrap();
        assert!(
            end <= bytes.len() as u64,
            "{name} ends at {end} of {}",
            bytes.len()
        );
        assert_eq!(
            entry.elements() as u64 * entry.stored.width() as u64,
            entry.range.length,
            "{name}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bytes of length and header are overwritten, removed and inserted.
    #[test]
    fn mutated_headers_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
    ) {
        let mut bytes = valid_bytes();
        let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (index, byte, how) in edits {
            let at = index.index(header_end.min(bytes.len()));
            match how {
                0 => bytes[at] = byte,
                // Digits are where a header is most plausibly wrong.
                1 => bytes[at] = b"0123456789"[byte as usize % 10],
                2 => { bytes.remove(at); }
                _ => bytes.insert(at, byte),
            }
        }
        check_ranges(&bytes);
    }

    /// Headers of the right grammar with any numbers at all.
    #[test]
    fn headers_with_arbitrary_numbers_are_validated(
        tensors in prop::collection::vec(
            (prop::collection::vec(prop_oneof![0u64..5, any::<u64>()], 0..4), 0u64..40, 0u64..40,
             prop::sample::select(vec!["F32", "BF16", "U8", "I64", "X9"])),
            0..4,
        ),
        data in 0usize..40,
    ) {
        let parts: Vec<String> = tensors.iter().enumerate().map(|(i, (shape, begin, end, dtype))| {
            format!(r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
        }).collect();
        let header = format!("{{{}}}", parts.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        check_ranges(&bytes);
    }
}
