//! Small changes to files, by which readers of foreign bytes are tried. Shared by the tests of all crates that have such readers.
//!
//! A target is a test with bolero's `check!()`: here it runs for a second on random changes, and `cargo bolero test NAME` has a
//! fuzzer (libFuzzer, AFL) look for more, which needs a nightly compiler. `BOLERO_RANDOM_ITERATIONS` sets how many files are tried,
//! and `BOLERO_RANDOM_SEED` repeats one that failed.
#![allow(dead_code)] // Each crate takes what it needs.

use bolero::TypeGenerator;

/// Maximum of changes per file: with more, the first check refuses nearly all files, and later code is not reached.
const MAX_EDITS: usize = 2;

/// A change to a file.
#[derive(Clone, Debug, TypeGenerator)]
pub(crate) enum Edit {
    /// One byte is another.
    Byte(u16, u8),
    /// One bit is another.
    Bit(u16, u8),
    /// A number of 4 or 8 bytes, where small ones and the largest are tried most.
    Number(u16, Number, bool),
    /// Bytes are left out.
    Remove(u16, u8),
    /// Bytes are put between.
    Insert(u16, [u8; 3]),
    /// A part is there twice.
    Repeat(u16, u8),
    /// A part takes the place of another.
    Copy(u16, u16, u8),
    /// The rest is missing.
    Cut(u16),
}

#[derive(Clone, Debug, TypeGenerator)]
pub(crate) enum Number {
    Small(u8),
    Largest(u8),
    Power(u8),
    Any(u64),
}

impl Number {
    fn value(&self) -> u64 {
        match *self {
            Number::Small(value) => value.into(),
            Number::Largest(less) => u64::MAX - u64::from(less),
            Number::Power(exponent) => 1 << (exponent % 64),
            Number::Any(value) => value,
        }
    }
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let length = bytes.len();
        if length == 0 {
            return;
        }
        let end = |at: usize, count: u8| (at + usize::from(count)).min(length);
        match *self {
            Edit::Byte(at, value) => bytes[usize::from(at) % length] = value,
            Edit::Bit(at, bit) => bytes[usize::from(at) % length] ^= 1 << (bit % 8),
            Edit::Number(at, ref number, wide) => {
                let at = usize::from(at) % length;
                let value = number.value().to_le_bytes();
                let count = if wide { 8 } else { 4 }.min(length - at);
                bytes[at..at + count].copy_from_slice(&value[..count]);
            }
            Edit::Remove(at, count) => {
                let at = usize::from(at) % length;
                bytes.drain(at..end(at, count));
            }
            Edit::Insert(at, value) => {
                let at = usize::from(at) % length;
                bytes.splice(at..at, value);
            }
            Edit::Repeat(at, count) => {
                let at = usize::from(at) % length;
                let part = bytes[at..end(at, count)].to_vec();
                bytes.splice(at..at, part);
            }
            Edit::Copy(from, to, count) => {
                let (from, to) = (usize::from(from) % length, usize::from(to) % length);
                let count = (end(from, count) - from).min(length - to);
                bytes.copy_within(from..from + count, to);
            }
            Edit::Cut(at) => bytes.truncate(usize::from(at) % length),
        }
    }
}

/// The bytes with the first of these changes.
pub(crate) fn edited(mut bytes: Vec<u8>, edits: &[Edit]) -> Vec<u8> {
    for edit in edits.iter().take(MAX_EDITS) {
        edit.apply(&mut bytes);
    }
    bytes
}

/// Changes to one of several files.
#[derive(Clone, Debug, TypeGenerator)]
pub(crate) struct Changes {
    file: u8,
    edits: Vec<Edit>,
}

impl Changes {
    /// Most bytes that describe one: enough for as many changes as are made.
    pub(crate) const MAX_LEN: usize = 128;

    /// One of these files, changed.
    pub(crate) fn of(&self, files: &[Vec<u8>]) -> Vec<u8> {
        edited(files[usize::from(self.file) % files.len()].clone(), &self.edits)
    }
}
