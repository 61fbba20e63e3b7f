//! Files that only their owner may read.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

/// The rights of others in the mode of a file.
const OF_OTHERS: u32 = 0o077;
/// The right of the file's group to read it.
const READ_BY_GROUP: u32 = 0o040;
/// The id of the user `root`.
const ROOT: u32 = 0;

/// Writes a whole file that only its owner may read. Whoever reads it meanwhile reads the old one, or the new one. It is written beside the
/// old one under a name that nobody can know before, so that what others have put there is neither followed nor overwritten.
pub(crate) fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut beside = tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".new")
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(folder)?; // it is removed unless it is renamed
    beside.write_all(contents)?;
    beside.as_file().sync_all()?;
    beside.persist(path)?;
    File::open(folder)?.sync_all() // a token that was withdrawn stays so after a power cut
}

/// Refuses a secret file that others may read or change.
///
/// # Errors
/// The operating system's error; [`io::ErrorKind::PermissionDenied`] with what to do.
pub fn check_private(path: &Path) -> io::Result<()> {
    check(path, fs::metadata(path)?.permissions().mode() & OF_OTHERS)
}

/// As [`check_private`], for secrets that the administrator of the machine gives to a service: a file of root may be read by its group.
///
/// # Errors
/// As [`check_private`].
pub fn check_given(path: &Path) -> io::Result<()> {
    let there = fs::metadata(path)?;
    check(path, rights_of_others(there.mode(), there.uid()))
}

/// The rights that others have and must not have in a file that was given to a service.
fn rights_of_others(mode: u32, owner: u32) -> u32 {
    match owner {
        ROOT => mode & OF_OTHERS & !READ_BY_GROUP,
        _ => mode & OF_OTHERS,
    }
}

fn check(path: &Path, rights: u32) -> io::Result<()> {
    match rights {
        0 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "other users may read or change it: take that right away (chmod 600 {})",
                path.display()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_put_beside_a_file_is_neither_followed_nor_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let (file, planted) = (folder.path().join("tokens.json"), folder.path().join("planted"));
        let beside = folder.path().join("tokens.json.new");
        fs::write(&planted, b"theirs").unwrap();
        std::os::unix::fs::symlink(&planted, &beside).unwrap();
        write_private(&file, b"ours").unwrap();
        assert_eq!(fs::read(&planted).unwrap(), b"theirs");
        assert!(beside.is_symlink(), "it is not ours to remove");
        fs::remove_file(&beside).unwrap();
        fs::create_dir(&beside).unwrap();
        write_private(&file, b"ours again").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"ours again");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        let names = fs::read_dir(folder.path()).unwrap();
        assert_eq!(names.count(), 3, "nothing else stays");
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("folder");
        fs::create_dir(&file).unwrap();
        assert!(write_private(&file, b"ours").is_err(), "a folder is in its place");
        assert!(write_private(&folder.path().join("gone").join("file"), b"ours").is_err());
        let names = fs::read_dir(folder.path()).unwrap();
        assert_eq!(names.count(), 1, "nothing else stays");
    }

    #[test]
    fn a_given_secret_is_its_owners_or_of_root_and_of_its_group() {
        for (mode, owner, is_private) in [
            (0o600, 1000, true),
            (0o400, 1000, true),
            (0o640, 1000, false),
            (0o604, 1000, false),
            (0o620, 1000, false),
            (0o640, ROOT, true),
            (0o440, ROOT, true),
            (0o660, ROOT, false),
            (0o644, ROOT, false),
            (0o444, ROOT, false),
        ] {
            let rights = rights_of_others(0o100_000 | mode, owner);
            assert_eq!(rights == 0, is_private, "{mode:o} of {owner}");
        }
    }
}
