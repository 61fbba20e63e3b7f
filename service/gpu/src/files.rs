//! Files as they are on disk: what tells one version from another, and which are opened at all.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What tells one version of a file from another without reading it: device, inode, size and the time of writing.
/// The inode's time of change is no part of it, as noting that a file was used changes that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    /// Its length in bytes.
    pub size: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl FileStamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// What the system said.
    pub fn of(file: &File) -> io::Result<FileStamp> {
        file.metadata().map(FileStamp::from)
    }

    /// The stamp of what is at a path now. Nothing is opened: a pipe would wait for its other end.
    ///
    /// # Errors
    /// What the system said.
    pub fn at(path: &Path) -> io::Result<FileStamp> {
        fs::metadata(path).map(FileStamp::from)
    }
}

impl From<Metadata> for FileStamp {
    fn from(facts: Metadata) -> FileStamp {
        FileStamp {
            device: facts.dev(),
            inode: facts.ino(),
            size: facts.size(),
            modified_s: facts.mtime(),
            modified_ns: facts.mtime_nsec(),
        }
    }
}

/// Opens a regular file to read it. A pipe would wait for a writer for ever, and a device may have no end.
///
/// # Errors
/// What the system said; [`io::ErrorKind::InvalidInput`] for what is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        let problem = "it is no regular file (a pipe, a device or a folder)";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    File::open(path)
}
