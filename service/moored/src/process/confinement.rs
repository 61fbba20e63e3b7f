//! What a worker may do: it reads files of strangers, and whoever takes it over by one must find nothing there. The worker confines
//! itself, before it has another thread and before it reads a command: threads that exist already could not be confined by
//! Landlock. Denied calls fail, they do not end the process. Why it is so: docs/design/0009-confined-workers.md.

#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod files;
mod places;
pub(crate) mod tries;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use places::Places;

/// The variable that names the folder of NVIDIA's control daemon (MPS), by which programs share a card, and the folder where none does.
#[cfg(target_os = "linux")]
const MPS: (&str, &str) = ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps");

/// How far a worker is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Strictness {
    /// Not at all.
    None,
    /// Some system calls are denied, and all files stay open to it.
    Calls,
    /// System calls and files.
    All,
}

impl Strictness {
    /// The next strictness to try, where a card does not start with this one. After the last one the first is tried again.
    pub(crate) fn less(self) -> Strictness {
        match self {
            Strictness::All => Strictness::Calls,
            Strictness::Calls => Strictness::None,
            Strictness::None => Strictness::All,
        }
    }
}

impl fmt::Display for Strictness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strictness::None => "not confined",
            Strictness::Calls => "system calls alone",
            Strictness::All => "system calls and files",
        })
    }
}

/// What one worker may do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Confinement {
    pub(crate) strictness: Strictness,
    /// Whether the worker refuses to start where the kernel lacks a part of it.
    pub(crate) is_required: bool,
    /// Whether it drives an NVIDIA card, whose libraries need more.
    pub(crate) drives_nvidia: bool,
    /// Folders and files that it may read, beside those of the system.
    pub(crate) read: Vec<PathBuf>,
    /// Folders that it may write in, which are made if they are missing.
    pub(crate) write: Vec<PathBuf>,
    /// What it may not read, wherever that is: tokens, keys, the state of the service.
    pub(crate) never: Vec<PathBuf>,
    /// Where the service listens: tests try to connect to it.
    pub(crate) service: SocketAddr,
}

/// What holds for a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    /// The version of Landlock's interface by which files are confined.
    pub(crate) landlock: Option<i32>,
    /// Folders and files of models that it may read.
    pub(crate) places: usize,
    /// Whether system calls are denied.
    pub(crate) denies_calls: bool,
    /// What the kernel lacks, in words.
    pub(crate) lacks: Vec<String>,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(version) = self.landlock {
            parts.push(format!(
                "reads {} folders of models and the system's libraries (Landlock, version {version})",
                self.places
            ));
        }
        if self.denies_calls {
            parts.push("opens no sockets, runs no programs, reaches no other process (seccomp)".to_owned());
        }
        if parts.is_empty() {
            parts.push("not confined".to_owned());
        }
        parts.extend(self.lacks.iter().cloned());
        f.write_str(&parts.join("; "))
    }
}

/// Confines this process, which has no other thread yet. Where the kernel lacks a part, the rest is done, and the answer says so.
///
/// # Errors
/// When the confinement is required and the kernel lacks a part of it. For people.
pub(crate) fn apply(confinement: &Confinement) -> Result<Held, String> {
    let mut held = Held::default();
    if confinement.strictness == Strictness::None {
        return Ok(held);
    }
    #[cfg(target_os = "linux")]
    {
        if confinement.strictness == Strictness::All {
            match files::confine(confinement) {
                Ok((version, places)) => (held.landlock, held.places) = (Some(version), places),
                Err(problem) => held.lacks.push(format!("files are not confined: {problem}")),
            }
        }
        match calls::deny(confinement.drives_nvidia) {
            Ok(()) => held.denies_calls = true,
            Err(problem) => held.lacks.push(format!("system calls are not denied: {problem}")),
        }
    }
    #[cfg(not(target_os = "linux"))]
    held.lacks.push("this system cannot confine processes".to_owned());
    if confinement.is_required && !held.lacks.is_empty() {
        return Err(format!(
            "the worker cannot be confined, as service.confine_workers = \"always\" asks: {}. With \"auto\" it starts all the same",
            held.lacks.join("; ")
        ));
    }
    Ok(held)
}

/// A path with all places cut out that must not be read: the path itself, where it contains none of them, else what is beside them. All
/// paths are without links.
fn without(path: &Path, never: &[PathBuf]) -> Vec<PathBuf> {
    if never.iter().any(|never| path.starts_with(never)) {
        return Vec::new();
    }
    if !never.iter().any(|never| never.starts_with(path)) {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| match entry.path().canonicalize() {
            // What a link here leads to is not below this path, and may be what must not be read.
            Ok(target) if target == entry.path() => without(&target, never),
            _ => Vec::new(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_not_be_read_is_cut_out_of_the_folders_around_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["models/a", "state/secrets", "state/plans", "deep/er/state"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        std::fs::write(root.join("state/token"), "x").unwrap();
        std::os::unix::fs::symlink(root.join("state"), root.join("link")).unwrap();
        let never = [
            root.join("state/secrets"),
            root.join("state/token"),
            root.join("deep/er/state"),
        ];
        let mut left = without(&root, &never);
        left.sort();
        assert_eq!(left, [root.join("models"), root.join("state/plans")]);
        assert_eq!(without(&root.join("models"), &never), [root.join("models")]);
        assert_eq!(without(&root.join("state/token"), &never), Vec::<PathBuf>::new());
    }
}
