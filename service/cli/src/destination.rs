//! The places where results are written: files, which appear whole or not at all, and pipes and devices, which take bytes as they
//! come. What would fail when a result is written is found before it is computed.

use std::collections::BTreeSet;
use std::fs::{File, FileType, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use crate::CliError;

/// Bytes that are written to try a folder: a disk without room for a picture counts as full.
const TRIED_BYTES: usize = 1 << 20;
/// Most bytes of a name on the file systems of Linux.
const LONGEST_NAME_BYTES: usize = 255;

/// Whether a path names something that is written to as it stands: a pipe or a device.
pub(super) fn is_stream(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|there| !there.is_file() && !there.is_dir())
}

/// Whether a path is another name of standard output.
pub(super) fn is_stdout(path: &str) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].contains(&path)
}

/// Checks that files can be written, before anything is computed for them.
///
/// # Errors
/// When one is there and `force` does not overwrite it, or when a folder, the disk or a name takes none.
pub(super) fn check_files(paths: impl Iterator<Item = PathBuf>, force: bool) -> Result<(), CliError> {
    let mut tried = BTreeSet::new();
    for path in paths {
        let target = check_name(&path, force)?;
        let folder = target.parent().unwrap_or(Path::new(""));
        if tried.insert(folder.to_owned()) {
            check_folder(folder)?;
        }
    }
    Ok(())
}

/// The file that would be written for a path.
fn check_name(path: &Path, force: bool) -> Result<PathBuf, CliError> {
    if is_stream(path) {
        return Err(CliError::file(
            path,
            "it is a pipe or a device, which takes one result: name it alone",
        ));
    }
    match path.symlink_metadata() {
        Ok(_) if path.is_dir() => Err(CliError::file(path, "it is a folder: name a file")),
        Ok(_) if !force => Err(CliError::Exists(path.display().to_string())),
        Ok(_) => Ok(target_of(path)),
        // Where its folder is missing too, only the length of the name is known to be wrong.
        Err(problem) if problem.kind() == ErrorKind::NotFound => {
            let name = path.file_name().unwrap_or_default();
            match name.len() > LONGEST_NAME_BYTES {
                true => Err(CliError::file(path, Errno::NAMETOOLONG)),
                false => Ok(path.to_owned()),
            }
        }
        Err(problem) => Err(CliError::file(path, problem)),
    }
}

/// Checks that a file can be written in a folder, or in the nearest one that is there.
///
/// # Errors
/// When the folder or the disk takes none.
pub(super) fn check_folder(folder: &Path) -> Result<(), CliError> {
    let folder = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    match folder.metadata() {
        Ok(there) if there.is_dir() => {
            let tried = Part::write(&folder.join("moored"), &[0; TRIED_BYTES]);
            // Nobody asked for the file that was tried: the folder takes none.
            tried.map(drop).map_err(|error| match error {
                CliError::File { problem, .. } => CliError::file(folder, problem),
                other => other,
            })
        }
        Ok(_) => Err(CliError::file(folder, "it is no folder")),
        Err(problem) if problem.kind() == ErrorKind::NotFound => match folder.parent() {
            Some(above) => check_folder(above),
            None => Ok(()),
        },
        Err(problem) => Err(CliError::file(folder, problem)),
    }
}

/// A pipe or a device, open. Held from the check to the last write: the reader of a pipe sees its end when it is closed.
///
/// # Errors
/// When nobody reads the pipe, or bytes of a file do not belong there.
pub(super) fn stream(path: &Path) -> Result<File, CliError> {
    let fails = |problem| CliError::file(path, problem);
    let kind = path.metadata().map_err(fails)?.file_type();
    if let Some(problem) = problem_of(kind) {
        return Err(CliError::file(path, problem));
    }
    // A pipe without a reader is waited for where it is opened, and so it is not opened that way.
    let opened = OpenOptions::new()
        .write(true)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed())
        .open(path);
    let file = opened.map_err(|problem| match problem.raw_os_error() {
        Some(code) if code == Errno::NXIO.raw_os_error() && kind.is_fifo() => CliError::file(
            path,
            "no program reads this pipe: start its reader first, then this command",
        ),
        _ => fails(problem),
    })?;
    let flags = fcntl_getfl(&file).map_err(|problem| fails(problem.into()))?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|problem| fails(problem.into()))?;
    Ok(file)
}

/// Why nothing is written to what is at a path.
fn problem_of(kind: FileType) -> Option<&'static str> {
    if kind.is_block_device() {
        return Some("it is a disk, and would lose what is on it: name a file");
    }
    kind.is_socket()
        .then_some("it is a socket, which takes no files: name a file, or a pipe that a program reads")
}

/// Writes a file, and makes its folder. Only `force` overwrites a file.
pub(super) fn write(path: &Path, contents: &[u8], force: bool) -> Result<(), CliError> {
    if is_stream(path) {
        return write_to(&stream(path)?, path, contents);
    }
    match force {
        true => {
            let target = target_of(path);
            Part::write(&target, contents)?.name(&target)
        }
        false => Part::write(path, contents)?.name_unless_taken(path),
    }
}

/// Writes to a pipe or a device.
pub(super) fn write_to(mut stream: &File, path: &Path, contents: &[u8]) -> Result<(), CliError> {
    let written = stream.write_all(contents).and_then(|()| stream.flush());
    written.map_err(|problem| CliError::file(path, problem))
}

/// A file that has been written and has no name yet: a full disk leaves neither a part of a file nor an old one emptied. It
/// lies beside the file that it becomes, since a file keeps its file system when it is renamed. Dropped, it is removed.
pub(super) struct Part(PathBuf);

impl Part {
    /// Writes it beside a file, and makes the folder of both.
    pub(super) fn write(path: &Path, contents: &[u8]) -> Result<Part, CliError> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|problem| CliError::file(folder, problem))?;
        }
        let beside = beside(path);
        let failed = |problem| CliError::file(path, problem);
        let _ = std::fs::remove_file(&beside); // left by a killed process with the same id
        let created = OpenOptions::new().write(true).create_new(true).open(&beside);
        let mut file = created.map_err(failed)?;
        let part = Part(beside);
        file.write_all(contents).map_err(failed)?;
        Ok(part)
    }

    /// Renames it to its final name, and replaces a file of that name.
    fn name(&self, path: &Path) -> Result<(), CliError> {
        std::fs::rename(&self.0, path).map_err(|problem| CliError::file(path, problem))
    }

    /// Renames it to its final name, unless a file of that name exists.
    pub(super) fn name_unless_taken(&self, path: &Path) -> Result<(), CliError> {
        rename_unless_there(&self.0, path).map_err(|problem| match problem.kind() {
            ErrorKind::AlreadyExists => CliError::Exists(path.display().to_string()),
            _ => CliError::file(path, problem),
        })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // it is gone if it was renamed; else the error of the write is reported
    }
}

/// A name beside a file, of this process alone.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let end = format!(".{}.part", std::process::id());
    let room = LONGEST_NAME_BYTES.saturating_sub(end.len() + 1);
    let fitting = name
        .char_indices()
        .take_while(|(at, letter)| at + letter.len_utf8() <= room);
    let name: String = fitting.map(|(_, letter)| letter).collect();
    path.with_file_name(format!(".{name}{end}"))
}

/// The file that a path names: a link is followed, as it is when a file is overwritten in place.
fn target_of(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Renames a file, unless a file of that name exists.
fn rename_unless_there(from: &Path, to: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // The file system lacks this call. Here two commands at the same moment could both find the name free.
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_err() => std::fs::rename(from, to),
        Err(Errno::INVAL | Errno::NOSYS) => Err(ErrorKind::AlreadyExists.into()),
        Err(problem) => Err(problem.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn what_would_fail_at_the_end_is_refused_before() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let check = |name: &str, force| check_files(std::iter::once(at(name)), force);
        let longest = format!("{}.png", "ü".repeat(125));
        std::fs::create_dir(at("folder.png")).unwrap();
        std::fs::write(at("file.png"), b"old").unwrap();
        std::os::unix::fs::symlink("nowhere", at("link.png")).unwrap();
        mknodat(CWD, at("pipe.png"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let _listener = UnixListener::bind(at("socket.png")).unwrap();

        for name in ["new.png", "new/folder/a.png", &longest] {
            check(name, false).unwrap();
        }
        write(&at(&longest), b"x", false).unwrap();
        for name in ["file.png", "link.png"] {
            assert!(matches!(check(name, false), Err(CliError::Exists(_))), "{name}");
            check(name, true).unwrap();
        }
        let too_long = format!("{}.png", "x".repeat(300));
        for name in [
            "folder.png",
            "file.png/a.png",
            &too_long,
            "pipe.png",
            "socket.png",
        ] {
            for force in [false, true] {
                let refused = check(name, force);
                assert!(matches!(refused, Err(CliError::File { .. })), "{name}");
            }
        }
        check(&format!("new/{too_long}"), false).unwrap_err();
        for name in ["pipe.png", "socket.png"] {
            assert!(matches!(stream(&at(name)), Err(CliError::File { .. })), "{name}");
        }
        assert_eq!(std::fs::read(at("file.png")).unwrap(), b"old");
    }

    #[test]
    fn a_folder_that_takes_no_file_is_named() {
        let refused = check_folder(Path::new("/proc"));
        assert!(matches!(refused, Err(CliError::File { path, .. }) if path == "/proc"));
    }

    #[test]
    fn the_target_of_a_link_is_overwritten_by_a_file_that_was_written_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (links, files) = (folder.path().join("links"), folder.path().join("files"));
        std::fs::create_dir(&links).unwrap();
        std::fs::create_dir(&files).unwrap();
        let (link, file) = (links.join("a.png"), files.join("b.png"));
        std::fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        // A folder in place of the part is in the way there alone.
        std::fs::create_dir(beside(&link)).unwrap();
        write(&link, b"new", true).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_dir(&files).unwrap().count(), 1, "no part stays");
        std::fs::create_dir(beside(&std::fs::canonicalize(&file).unwrap())).unwrap();
        assert!(write(&link, b"newer", true).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
    }
}
