//! Files that only their owner may read.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The rights of others in the mode of a file.
const OF_OTHERS: u32 = 0o077;

/// Writes a whole file that only its owner may read. Whoever reads it meanwhile reads the old one, or the new one.
pub(crate) fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    match fs::remove_file(&new) {
        Err(problem) if problem.kind() != io::ErrorKind::NotFound => return Err(problem),
        _ => {} // a file left over from an attempt that was interrupted, perhaps with other rights
    }
    let mut file = gpu::open_private(&new)?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// Refuses a secret file that others may read or change.
pub(crate) fn check_private(path: &Path) -> io::Result<()> {
    match fs::metadata(path)?.permissions().mode() & OF_OTHERS {
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
