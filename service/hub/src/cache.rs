//! The hub cache, in the layout of the other programs that share it: contents in `blobs/`, by name; `snapshots/COMMIT/` with links
//! to them; branches and tags in `refs/`; locks in `.locks/`. Functions that are not `async` block on the disk: async code calls them by
//! [`Disk`].

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hf_hub::{Cache, CacheRepo};
use residency::Bytes;

use super::checksum::Oid;
use crate::disk::{self, Disk};
use crate::listing::repo;
use crate::reference::{Reference, is_commit};
use crate::selection::INDEX;
use crate::{LONGEST_REF, PullError};

/// Interval between attempts to take a lock that another program holds.
const LOCK_POLL: Duration = Duration::from_millis(200);
/// Bytes that a pull leaves free on the disk.
const MARGIN: Bytes = Bytes::mib(256);

/// One model in the cache. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ModelCache {
    root: PathBuf,
    /// `models--owner--name`.
    folder_name: String,
    model: Reference,
    /// Paths of the cache layout, by hf-hub.
    layout: Arc<CacheRepo>,
}

/// The lock of a content; dropping it releases it.
#[derive(Debug)]
pub(crate) struct Lock {
    file: Option<File>,
}

impl Lock {
    /// The lock of an open file; `None` while others have it, and where it was removed.
    fn of(file: File) -> std::io::Result<Option<Lock>> {
        match file.try_lock() {
            // Some programs remove the lock file when they release it: a removed file excludes nobody.
            Ok(()) => Ok(file
                .metadata()
                .is_ok_and(|locked| locked.nlink() > 0)
                .then_some(Lock { file: Some(file) })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(problem)) => Err(problem),
        }
    }
}

/// Opens the file of a lock, or makes it. No link is followed: what it names may be anybody's, and nothing to write to.
fn lock_file(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    options
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            disk::close(file);
        }
    }
}

impl ModelCache {
    pub(crate) fn new(root: &Path, model: &Reference) -> ModelCache {
        let repo = repo(&model.id, &model.revision);
        ModelCache {
            root: root.to_owned(),
            folder_name: repo.folder_name(),
            model: model.clone(),
            layout: Arc::new(Cache::new(root.to_owned()).repo(repo)),
        }
    }

    /// The model's folder in the cache, with all of its revisions.
    fn folder(&self) -> PathBuf {
        self.root.join(&self.folder_name)
    }

    /// Path of a content, whether it is in the cache or not.
    pub(crate) fn blob(&self, oid: &Oid) -> PathBuf {
        self.layout.blob_path(oid.name())
    }

    /// Path of a content while it is downloaded.
    pub(crate) fn partial(&self, oid: &Oid) -> PathBuf {
        self.layout.blob_path(&format!("{}.incomplete", oid.name()))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Whether a content is complete in the cache. Its checksum was verified when it was downloaded, so its size suffices.
    pub(crate) fn has(&self, oid: &Oid, size: u64) -> bool {
        length(&self.blob(oid)) == Some(size)
    }

    /// Bytes of it that are downloaded already.
    pub(crate) fn bytes_of_partial(&self, oid: &Oid, size: u64) -> u64 {
        length(&self.partial(oid))
            .filter(|length| *length <= size)
            .unwrap_or(0)
    }

    /// The commit that the cache has for the revision, if any.
    pub(crate) fn commit(&self) -> Option<String> {
        if self.model.is_commit() {
            return Some(self.model.revision.clone());
        }
        let refs = self.root.join(&self.folder_name).join("refs");
        let commit = gpu::text_bounded(&refs.join(&self.model.revision), LONGEST_REF).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// The commits of which any file is in the cache.
    pub(crate) fn commits(&self) -> Vec<String> {
        let snapshots = children(&self.root.join(&self.folder_name).join("snapshots"));
        let names = snapshots.iter().filter_map(|path| path.file_name()?.to_str());
        let mut commits: Vec<String> = names.filter(|name| is_commit(name)).map(str::to_owned).collect();
        commits.sort();
        commits
    }

    /// Waits for the lock of a content, against this program and others.
    pub(crate) async fn lock(&self, disk: &Disk, oid: &Oid) -> Result<Lock, PullError> {
        let folder = self.root.join(".locks").join(&self.folder_name);
        let path = folder.join(format!("{}.lock", oid.name()));
        loop {
            let (folder, path) = (folder.clone(), path.clone());
            let attempt = move || {
                create_folder(&folder)?;
                let locked = lock_file(&path).and_then(Lock::of);
                locked.map_err(|problem| failed(&path, &problem))
            };
            match disk.short(attempt).await? {
                Some(lock) => return Ok(lock),
                None => tokio::time::sleep(LOCK_POLL).await,
            }
        }
    }

    /// Refuses a download that the disk has no space for.
    pub(crate) fn check_room(&self, bytes: u64) -> Result<(), PullError> {
        if bytes == 0 {
            return Ok(());
        }
        create_folder(&self.root)?;
        let free = fs4::available_space(&self.root).map_err(|problem| failed(&self.root, &problem))?;
        let needed = Bytes(bytes.saturating_add(MARGIN.0));
        if needed.0 <= free {
            return Ok(());
        }
        Err(PullError::DiskFull {
            needed,
            free: Bytes(free),
            folder: self.root.display().to_string(),
        })
    }

    /// Completes the snapshot of a commit whose contents are all in the cache. The index is linked last, so that nobody
    /// finds an incomplete pipeline.
    pub(crate) fn link<'a>(
        &self,
        commit: &str,
        files: impl Iterator<Item = (&'a str, &'a Oid)>,
    ) -> Result<PathBuf, PullError> {
        let snapshot = self.snapshot(commit);
        let (last, first): (Vec<_>, Vec<_>) = files.partition(|(path, _)| *path == INDEX);
        for (path, oid) in first.into_iter().chain(last) {
            let link = snapshot.join(path);
            create_folder(link.parent().unwrap_or(&snapshot))?;
            let up = "../".repeat(path.split('/').count() + 1);
            let target = PathBuf::from(format!("{up}blobs/{}", oid.name()));
            make_link(&target, &link).map_err(|problem| failed(&link, &problem))?;
        }
        // A ref that is right already is not written: others may be reading it, and the cache may be read-only for us.
        if !self.model.is_commit() && self.commit().as_deref() != Some(commit) {
            let named = self.layout.create_ref(commit);
            named.map_err(|problem| failed(&snapshot, &problem))?;
        }
        Ok(snapshot)
    }
}

/// Bytes that a model takes in a cache: all of its revisions, partial downloads included; of one file, its contents.
pub(crate) fn size(root: &Path, model: &Reference) -> Option<u64> {
    let folder = ModelCache::new(root, model).folder();
    if let Some(file) = &model.file {
        let contents = contents_of(&folder, file);
        return (!contents.is_empty()).then(|| contents.iter().filter_map(|path| length(path)).sum());
    }
    let contents = children(&folder.join("blobs"));
    folder
        .is_dir()
        .then(|| contents.iter().filter_map(|path| length(path)).sum())
}

/// Removes a model from a cache. Its refs and snapshots are removed first, so that nobody finds an incomplete pipeline.
pub(crate) fn remove(root: &Path, model: &Reference) -> Result<(), PullError> {
    let folder = ModelCache::new(root, model).folder();
    if let Some(file) = &model.file {
        return remove_file(&folder, file);
    }
    for part in ["refs", "snapshots"] {
        match std::fs::remove_dir_all(folder.join(part)) {
            Err(problem) if problem.kind() != ErrorKind::NotFound => return Err(failed(&folder, &problem)),
            _ => {}
        }
    }
    std::fs::remove_dir_all(&folder).map_err(|problem| failed(&folder, &problem))
}

/// The contents of a file of a repository in its snapshots, each once.
fn contents_of(repository: &Path, file: &str) -> BTreeSet<PathBuf> {
    let snapshots = children(&repository.join("snapshots")).into_iter();
    let contents = snapshots.filter_map(|snapshot| std::fs::canonicalize(snapshot.join(file)).ok());
    contents.filter(|content| content.is_file()).collect()
}

/// Removes a file from all snapshots of a repository, its contents where no other file has them, and the repository with
/// its last file. Contents elsewhere, to which another program has linked, are not ours to remove.
fn remove_file(repository: &Path, file: &str) -> Result<(), PullError> {
    let gone = contents_of(repository, file);
    let snapshots = children(&repository.join("snapshots"));
    for link in snapshots.iter().map(|snapshot| snapshot.join(file)) {
        match std::fs::remove_file(&link) {
            Err(problem) if problem.kind() != ErrorKind::NotFound => return Err(failed(&link, &problem)),
            _ => {}
        }
    }
    let files = snapshots
        .iter()
        .flat_map(|snapshot| files_of(snapshot).into_iter().map(|file| snapshot.join(file)));
    let left: BTreeSet<PathBuf> = files
        .filter_map(|file| std::fs::canonicalize(file).ok())
        .collect();
    let blobs = repository.join("blobs");
    let is_partial = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extension == "incomplete")
    };
    if left.is_empty() && !children(&blobs).iter().any(is_partial) {
        return std::fs::remove_dir_all(repository).map_err(|problem| failed(repository, &problem));
    }
    let blobs = std::fs::canonicalize(&blobs).unwrap_or(blobs);
    let unused = gone
        .difference(&left)
        .filter(|content| content.starts_with(&blobs));
    for content in unused {
        std::fs::remove_file(content).map_err(|problem| failed(content, &problem))?;
    }
    Ok(())
}

/// Depth to which folders of a snapshot are scanned.
const DEPTH: usize = 8;

/// The files of a snapshot that are in the cache, as paths within it.
pub(crate) fn files_of(snapshot: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![(snapshot.to_owned(), DEPTH)];
    while let Some((folder, depth)) = folders.pop() {
        for path in children(&folder) {
            if path.is_dir() {
                folders.extend(depth.checked_sub(1).map(|depth| (path, depth)));
            } else if path.is_file() {
                let relative = path.strip_prefix(snapshot).ok().and_then(Path::to_str);
                files.extend(relative.map(str::to_owned));
            }
        }
    }
    files
}

/// Makes a symbolic link atomically, and replaces an existing file.
fn make_link(target: &Path, link: &Path) -> std::io::Result<()> {
    if std::fs::read_link(link).is_ok_and(|there| there == target) {
        return Ok(());
    }
    let beside = link.with_extension(format!("{}.link", uuid::Uuid::new_v4().simple()));
    std::os::unix::fs::symlink(target, &beside)?;
    std::fs::rename(&beside, link)
}

fn length(path: &Path) -> Option<u64> {
    path.metadata()
        .ok()
        .filter(std::fs::Metadata::is_file)
        .map(|found| found.len())
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Makes a folder of a repository. One that is a link is refused: it leads out of the cache.
pub(crate) fn create_folder(folder: &Path) -> Result<(), PullError> {
    if folder.is_symlink() {
        let problem = std::io::Error::other("it is a symbolic link, which is not written through: remove it");
        return Err(failed(folder, &problem));
    }
    std::fs::create_dir_all(folder).map_err(|problem| failed(folder, &problem))
}

/// The error of a file or folder in the cache.
pub(crate) fn failed(path: &Path, problem: &std::io::Error) -> PullError {
    failed_at(path, problem, 0)
}

/// As [`failed`], when `left` bytes were still to be written.
pub(crate) fn failed_at(path: &Path, problem: &std::io::Error, left: u64) -> PullError {
    match problem.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => PullError::DiskFull {
            needed: Bytes(left.saturating_add(MARGIN.0)),
            free: Bytes(fs4::available_space(path).unwrap_or(0)),
            folder: path.parent().unwrap_or(path).display().to_string(),
        },
        _ => PullError::Disk {
            path: path.display().to_string(),
            problem: problem.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache, and the path of the lock of a content in it.
    fn cache_with_lock(root: &Path) -> (ModelCache, Oid, PathBuf) {
        let cache = ModelCache::new(root, &"me/mine".parse().unwrap());
        let oid = Oid::git_blob("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0").unwrap();
        let folder = root.join(".locks/models--me--mine");
        let path = folder.join(format!("{}.lock", oid.name()));
        (cache, oid, path)
    }

    #[tokio::test]
    async fn a_lock_file_that_was_removed_is_created_and_locked_again() {
        let root = tempfile::tempdir().unwrap();
        let (cache, oid, path) = cache_with_lock(root.path());
        let disk = Disk::of(root.path());
        drop(cache.lock(&disk, &oid).await.unwrap());
        let opened = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(Lock::of(opened).unwrap().is_none(), "it excludes nobody");
        let _ours = cache.lock(&disk, &oid).await.unwrap();
        let there = File::open(&path).expect("what is locked has a name");
        assert!(there.try_lock().is_err(), "nobody else gets it");
    }

    #[tokio::test]
    async fn a_lock_that_is_a_link_is_refused_and_what_it_names_is_kept() {
        let root = tempfile::tempdir().unwrap();
        let (cache, oid, path) = cache_with_lock(root.path());
        let named = root.path().join("named");
        std::fs::write(&named, "mine").unwrap();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&named, &path).unwrap();
        let refused = cache.lock(&Disk::of(root.path()), &oid).await;
        assert!(matches!(refused, Err(PullError::Disk { .. })));
        assert_eq!(std::fs::read(&named).unwrap(), b"mine");
    }

    /// A pipe without a reader simulates a disk that does not answer: opening it blocks.
    #[test]
    fn a_lock_on_a_disk_that_does_not_answer_keeps_no_other_work_waiting() {
        let root = tempfile::tempdir().unwrap();
        let (cache, oid, path) = cache_with_lock(root.path());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let (worked, works) = std::sync::mpsc::channel();
        let disk = Disk::of(root.path());
        let service = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let locking = cache.lock(&disk, &oid);
                tokio::pin!(locking);
                let first = futures::poll!(&mut locking);
                let _ = worked.send(first.is_pending());
                locking.await
            })
        });
        let goes_on = works.recv_timeout(Duration::from_secs(20));
        // Now the disk answers, so that blocked threads end, also after a failure of the test.
        let answer = File::open(&path);
        assert_eq!(goes_on, Ok(true));
        drop(answer);
        drop(service.join().unwrap());
    }
}
