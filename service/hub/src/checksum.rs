//! Names of contents, which are their checksums, and their verification.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Name of a content, on the hub and in the cache.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Oid {
    /// Large files: the SHA-256 of the content.
    Sha256(String),
    /// Small ones: git's name of the content, a SHA-1.
    GitBlob(String),
}

impl Oid {
    pub(crate) fn sha256(hex: &str) -> Option<Oid> {
        is_hex(hex, 64).then(|| Oid::Sha256(hex.to_ascii_lowercase()))
    }

    pub(crate) fn git_blob(hex: &str) -> Option<Oid> {
        is_hex(hex, 40).then(|| Oid::GitBlob(hex.to_ascii_lowercase()))
    }

    /// Name of its file in the cache.
    pub(crate) fn name(&self) -> &str {
        match self {
            Oid::Sha256(name) | Oid::GitBlob(name) => name,
        }
    }
}

/// Whether the text is hexadecimal, of this length.
pub(crate) fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The checksum of a content that is still being read.
pub(crate) enum Summing {
    Sha256(Sha256),
    Sha1(Sha1),
}

impl Summing {
    pub(crate) fn start(oid: &Oid, size: u64) -> Summing {
        match oid {
            Oid::Sha256(_) => Summing::Sha256(Sha256::new()),
            Oid::GitBlob(_) => Summing::Sha1(Sha1::new().chain_update(format!("blob {size}\0"))),
        }
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        match self {
            Summing::Sha256(sum) => sum.update(bytes),
            Summing::Sha1(sum) => sum.update(bytes),
        }
    }

    /// Whether the checksum of the added bytes is `oid`.
    pub(crate) fn is(self, oid: &Oid) -> bool {
        let digest = match self {
            Summing::Sha256(sum) => sum.finalize().to_vec(),
            Summing::Sha1(sum) => sum.finalize().to_vec(),
        };
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        hex == oid.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_named_as_in_git_and_git_lfs() {
        let sums = |oid: &Oid, content: &[u8]| {
            let mut sum = Summing::start(oid, content.len() as u64);
            sum.add(content);
            sum.is(oid)
        };
        // `printf hello | git hash-object --stdin`, `printf hello | sha256sum`.
        let blob = Oid::git_blob("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0").unwrap();
        let large = Oid::sha256("2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824").unwrap();
        for oid in [blob, large] {
            assert!(sums(&oid, b"hello"));
            assert!(!sums(&oid, b"hellO"));
        }
        assert_eq!(Oid::sha256("../../etc/passwd"), None);
        assert_eq!(Oid::git_blob("abc"), None);
    }
}
