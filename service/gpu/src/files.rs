//! Files on disk: how one version is distinguished from another, and which files are opened at all.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use residency::Bytes;
use serde::{Deserialize, Serialize};

/// What distinguishes one version of a file from another without reading it: device, inode, size, the time of writing, and the
/// inode's time of change, which no program can set back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    /// The file's length in bytes.
    pub size: u64,
    modified_s: i64,
    modified_ns: i64,
    /// 0 in stamps from versions that did not store it: such a stamp equals that of no file.
    #[serde(default)]
    changed_s: i64,
    #[serde(default)]
    changed_ns: i64,
}

impl FileStamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn of(file: &File) -> io::Result<FileStamp> {
        file.metadata().map(FileStamp::from)
    }

    /// The stamp of the file that is at a path now. Nothing is opened: opening a pipe would wait for its other end.
    ///
    /// # Errors
    /// The operating system's error.
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
            changed_s: facts.ctime(),
            changed_ns: facts.ctime_nsec(),
        }
    }
}

/// Makes a folder that only this user may open, whatever the umask, and the folders above it, in which only this user may write. An
/// existing folder is not changed.
///
/// # Errors
/// The operating system's error; [`io::ErrorKind::PermissionDenied`] for an existing folder in which every user may write: they
/// could put their files in place of ours.
pub fn create_private_folder(folder: &Path) -> io::Result<()> {
    if let Some(above) = folder.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(above)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(problem) if problem.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {
            match fs::metadata(folder)?.permissions().mode() & WRITTEN_BY_ALL {
                0 => Ok(()),
                _ => Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "every user may write in it: name a folder of your own, or take that right away (chmod o-w)",
                )),
            }
        }
        made => made,
    }
}

/// The right of all users to write, in the mode of a file.
const WRITTEN_BY_ALL: u32 = 0o002;

/// Opens a file to write it, or makes one that only this user may read, whatever the umask. Nothing is written through a link.
///
/// # Errors
/// The operating system's error.
pub fn open_private(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK; // a pipe would wait for its other end
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    options.custom_flags(flags.bits() as i32).open(path)
}

/// Opens a regular file to read it. A pipe would wait for a writer for ever, and a device may have no end.
///
/// # Errors
/// The operating system's error; [`io::ErrorKind::InvalidInput`] for a pipe, a device or a folder.
pub fn open_regular(path: &Path) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        let problem = "it is no regular file (a pipe, a device or a folder)";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    File::open(path)
}

/// All of a regular file at a path that a user names.
///
/// # Errors
/// As [`open_regular`]; [`io::ErrorKind::FileTooLarge`] for more than `most` bytes.
pub fn read_bounded(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    all_of(open_regular(path)?, most)
}

/// All of a text at a path that a user names.
///
/// # Errors
/// As [`read_bounded`]; [`io::ErrorKind::InvalidData`] for text that is not UTF-8.
pub fn text_bounded(path: &Path, most: u64) -> io::Result<String> {
    all_text_of(open_regular(path)?, most)
}

/// All of a text that comes from a reader.
///
/// # Errors
/// The reader's error; those of [`text_bounded`] for a text that is too long or not UTF-8.
pub fn all_text_of(from: impl Read, most: u64) -> io::Result<String> {
    String::from_utf8(all_of(from, most)?)
        .map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem.utf8_error()))
}

/// Refuses longer data instead of cutting it off: the caller would take the part for the whole.
fn all_of(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    from.take(most.saturating_add(1)).read_to_end(&mut read)?;
    match read.len() as u64 > most {
        true => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {}, the most that is read", Bytes(most)),
        )),
        false => Ok(read),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_folders_and_files_are_closed_to_others_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("above/state");
        create_private_folder(&own).unwrap();
        create_private_folder(&own).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&own), 0o700);
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = create_private_folder(&own).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
        create_private_folder(&own).unwrap();
        let file = own.join("file");
        open_private(&file).unwrap();
        assert_eq!(mode(&file), 0o600);
        let link = own.join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(open_private(&link).is_err(), "a link was followed");
    }

    #[test]
    fn only_regular_files_are_read_and_within_the_bound() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read_bounded(&file, 5).unwrap(), b"12345");
        assert_eq!(
            read_bounded(&file, 4).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge
        );
        assert_eq!(
            read_bounded(Path::new("/dev/zero"), 5).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(
            read_bounded(&pipe, 5).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(all_text_of(&b"12345"[..], 5).unwrap(), "12345");
        let longer = all_text_of(&b"12345"[..], 4).unwrap_err();
        assert_eq!(longer.kind(), io::ErrorKind::FileTooLarge);
        fs::write(&file, b"\xff").unwrap();
        assert_eq!(
            text_bounded(&file, 5).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
