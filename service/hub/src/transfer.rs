//! The download of one file: resumed where it was interrupted, hashed while it arrives, and renamed to its name only when
//! its checksum is the announced one. hf-hub's own download neither verifies nor stops with its caller, so this uses its
//! client alone.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::{CONTENT_RANGE, RANGE};
use tokio::time::{Instant, timeout};

use super::checksum::Summing;
use crate::PullError;
use crate::cache::{ModelCache, create_folder, failed, failed_at};
use crate::disk::{self, Disk};
use crate::listing::{HubSession, RepoFile, SILENCE, words};
use crate::meter::Meter;
use crate::reference::Reference;

/// Bytes that are buffered before they are written.
const WRITE_BYTES: usize = 256 << 10;
/// Consecutive attempts without a new byte after which a download fails.
const FRUITLESS_ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// How often a content with a wrong checksum is downloaded again.
const FRESH_STARTS: u32 = 1;

/// Source and destination of one file.
pub(crate) struct Transfer<'a> {
    pub(crate) session: &'a HubSession,
    pub(crate) cache: &'a ModelCache,
    pub(crate) disk: &'a Disk,
    pub(crate) model: &'a Reference,
    pub(crate) commit: &'a str,
    pub(crate) file: &'a RepoFile,
    pub(crate) meter: &'a Meter,
}

/// How an attempt failed.
enum Failure {
    /// Trying again may help.
    Transient(String),
    /// As [`Failure::Transient`], and the received bytes do not count as progress, as they arrived too slowly.
    Slow(String),
    Final(PullError),
}

impl Transfer<'_> {
    /// Downloads the file into the cache, if it is not there.
    #[allow(clippy::disallowed_methods)] // it waits on threads that may block
    pub(crate) async fn run(&self) -> Result<(), PullError> {
        let RepoFile { size, oid, .. } = self.file;
        let blob = self.cache.blob(oid);
        if let Some(folder) = blob.parent().map(Path::to_owned) {
            self.disk.short(move || create_folder(&folder)).await?;
        }
        let _lock = self.cache.lock(self.disk, oid).await?;
        let (cache, wanted, bytes) = (self.cache.clone(), oid.clone(), *size);
        if self.disk.short(move || Ok(cache.has(&wanted, bytes))).await? {
            self.meter.found(*size);
            return Ok(());
        }
        let mut fresh_starts = 0;
        loop {
            let partial = self.cache.partial(oid);
            let partial = Partial::open(self.disk.clone(), partial, self.file.clone()).await?;
            self.meter.found(partial.length);
            let partial = self.complete(partial).await?;
            let path = partial.path.clone();
            if partial.finish().await? {
                let rename = move || std::fs::rename(&path, &blob).map_err(|problem| failed(&blob, &problem));
                return self.disk.short(rename).await;
            }
            // The partial file may have been damaged: once more, from the start.
            self.meter.lost(*size);
            let remove = move || std::fs::remove_file(&path).map_err(|problem| failed(&path, &problem));
            self.disk.short(remove).await?;
            if fresh_starts == FRESH_STARTS {
                return Err(PullError::Checksum {
                    file: self.file.path.clone(),
                });
            }
            fresh_starts += 1;
        }
    }

    /// Repeats attempts until the last byte has arrived.
    async fn complete(&self, mut partial: Partial) -> Result<Partial, PullError> {
        let mut fruitless = 0;
        while partial.length < self.file.size {
            let before = partial.length;
            let mut is_slow = false;
            let problem = match self.attempt(&mut partial).await {
                Ok(()) => "the response ended too early".to_owned(),
                Err(Failure::Transient(problem)) => problem,
                Err(Failure::Slow(problem)) => {
                    is_slow = true;
                    problem
                }
                Err(Failure::Final(error)) => {
                    partial.flush().await?;
                    return Err(error);
                }
            };
            partial.flush().await?;
            if partial.length == self.file.size {
                break;
            }
            fruitless = if partial.length > before && !is_slow {
                0
            } else {
                fruitless + 1
            };
            tracing::debug!(
                file = self.file.path,
                at = partial.length,
                problem,
                "a transfer was cut"
            );
            if fruitless == FRUITLESS_ATTEMPTS {
                return Err(PullError::Cut {
                    file: self.file.path.clone(),
                    problem,
                });
            }
            tokio::time::sleep(FIRST_PAUSE * 2_u32.pow(fruitless)).await;
        }
        Ok(partial)
    }

    /// Requests the missing bytes, and stores what arrives.
    async fn attempt(&self, partial: &mut Partial) -> Result<(), Failure> {
        let url = self.session.url(&self.model.id, self.commit, &self.file.path);
        let mut request = self.session.client().get(url);
        if partial.length > 0 {
            request = request.header(RANGE, format!("bytes={}-", partial.length));
        }
        let answered = timeout(SILENCE, request.send()).await;
        let mut answer = answered
            .map_err(|_| Failure::Transient("no answer".to_owned()))?
            .map_err(|problem| Failure::Transient(words(problem)))?;
        let status = answer.status();
        let starts_at = match status {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT => {
                let range = answer
                    .headers()
                    .get(CONTENT_RANGE)
                    .and_then(|range| range.to_str().ok());
                range.and_then(start_of).unwrap_or(u64::MAX)
            }
            StatusCode::RANGE_NOT_SATISFIABLE => u64::MAX,
            // A signed URL may have expired: the next request to the hub gets another.
            _ if !self.session.is_hub(answer.url()) => return Err(Failure::Transient(status.to_string())),
            _ => {
                let refused = self.session.refusal(self.model, status, answer.headers());
                return Err(refused.map_or_else(|| Failure::Transient(status.to_string()), Failure::Final));
            }
        };
        if starts_at != partial.length {
            // The response does not continue the partial file: start over.
            self.meter.lost(partial.length);
            partial.start_over().await.map_err(Failure::Final)?;
            if starts_at != 0 {
                return Err(Failure::Transient(
                    "the response starts at another byte than requested".to_owned(),
                ));
            }
        }
        let mut pace = Pace::begin();
        loop {
            let chunk = timeout(SILENCE, answer.chunk()).await;
            let chunk = chunk
                .map_err(|_| Failure::Transient(format!("no data for {} s", SILENCE.as_secs())))?
                .map_err(|problem| Failure::Transient(words(problem)))?;
            let Some(chunk) = chunk else { return Ok(()) };
            let room = usize::try_from(self.file.size - partial.length).unwrap_or(usize::MAX);
            let taken = &chunk[..chunk.len().min(room)];
            partial.take(taken).await.map_err(Failure::Final)?;
            self.meter.fetched(taken.len() as u64, &self.file.path);
            if !pace.goes_on(taken.len() as u64, Instant::now()) {
                return Err(Failure::Slow(format!(
                    "less than {LEAST_BYTES} bytes came in {} s",
                    WINDOW.as_secs()
                )));
            }
            if taken.len() < chunk.len() {
                return Ok(()); // more than was announced: the checksum will say
            }
        }
    }
}

/// Within this time...
const WINDOW: Duration = Duration::from_secs(60);
/// ...so many bytes must arrive, or another download gets the place: slow hubs would hold all places.
const LEAST_BYTES: u64 = 64 << 10;

/// The rate at which bytes arrive.
struct Pace {
    since: Instant,
    bytes: u64,
}

impl Pace {
    fn begin() -> Pace {
        Pace {
            since: Instant::now(),
            bytes: 0,
        }
    }

    /// Counts received bytes; false if they arrive too slowly.
    fn goes_on(&mut self, bytes: u64, now: Instant) -> bool {
        self.bytes += bytes;
        if now.duration_since(self.since) < WINDOW {
            return true;
        }
        let is_enough = self.bytes >= LEAST_BYTES;
        (self.since, self.bytes) = (now, 0);
        is_enough
    }
}

/// The first byte of `bytes 5-9/10`.
fn start_of(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// Flags that open a file without following a link and without waiting for a pipe's other end.
fn no_link() -> i32 {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    flags.bits() as i32
}

/// A partially downloaded file.
struct Partial {
    disk: Disk,
    path: PathBuf,
    file: RepoFile,
    /// Bytes so far, those that are not written yet included.
    length: u64,
    waiting: Vec<u8>,
    /// `None` while a blocking thread writes to it, and after a failed write.
    written: Option<(File, Summing)>,
}

impl Partial {
    /// Opens the partial file of an earlier pull, and hashes it.
    #[allow(clippy::disallowed_methods)] // it waits on threads that may block
    async fn open(disk: Disk, path: PathBuf, file: RepoFile) -> Result<Partial, PullError> {
        let own = disk.clone();
        let opened = disk.long(move || {
            let open = || -> std::io::Result<Partial> {
                let mut options = OpenOptions::new();
                let mut there = options
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .custom_flags(no_link())
                    .open(&path)?;
                if !there.metadata()?.is_file() {
                    return Err(std::io::Error::other("it is no regular file: remove it"));
                }
                if there.metadata()?.len() > file.size {
                    there.set_len(0)?;
                }
                let mut sum = Summing::start(&file.oid, file.size);
                let mut length = 0;
                let mut buffer = vec![0; 1 << 20];
                loop {
                    let read = there.read(&mut buffer)?;
                    if read == 0 {
                        break;
                    }
                    sum.add(&buffer[..read]);
                    length += read as u64;
                }
                Ok(Partial {
                    disk: own,
                    path: path.clone(),
                    file: file.clone(),
                    length,
                    waiting: Vec::new(),
                    written: Some((there, sum)),
                })
            };
            open().map_err(|problem| failed(&path, &problem))
        });
        opened.await
    }

    async fn take(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        self.waiting.extend_from_slice(bytes);
        self.length += bytes.len() as u64;
        if self.waiting.len() < WRITE_BYTES {
            return Ok(());
        }
        self.flush().await
    }

    /// Writes the buffered bytes on a blocking thread.
    async fn flush(&mut self) -> Result<(), PullError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let Some((mut there, mut sum)) = self.written.take() else {
            return Ok(()); // an earlier write failed, and its error was returned
        };
        let bytes = std::mem::take(&mut self.waiting);
        let path = self.path.clone();
        let left = self.file.size.saturating_sub(self.length) + bytes.len() as u64;
        let written = self.disk.long(move || {
            there
                .write_all(&bytes)
                .map_err(|problem| failed_at(&path, &problem, left))?;
            sum.add(&bytes);
            Ok((there, sum))
        });
        self.written = Some(written.await?);
        Ok(())
    }

    #[allow(clippy::disallowed_methods)] // it waits on threads that may block
    async fn start_over(&mut self) -> Result<(), PullError> {
        self.waiting.clear();
        self.length = 0;
        let (path, before) = (self.path.clone(), self.written.take());
        let empty = move || {
            drop(before);
            let mut options = OpenOptions::new();
            let emptied = options
                .write(true)
                .create(true)
                .truncate(true)
                .custom_flags(no_link())
                .open(&path);
            emptied.map_err(|problem| failed(&path, &problem))
        };
        let emptied = self.disk.long(empty).await?;
        self.written = Some((emptied, Summing::start(&self.file.oid, self.file.size)));
        Ok(())
    }

    /// Whether the checksum is the announced one; if so, the file has been synced to the disk.
    async fn finish(mut self) -> Result<bool, PullError> {
        self.flush().await?;
        let Some((there, sum)) = self.written.take() else {
            return Ok(false);
        };
        let (path, oid) = (self.path.clone(), self.file.oid.clone());
        let finish = move || {
            if !sum.is(&oid) {
                return Ok(false);
            }
            there.sync_all().map_err(|problem| failed(&path, &problem))?;
            Ok(true)
        };
        self.disk.long(finish).await
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Some(written) = self.written.take() {
            disk::close(written);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_drip_are_too_slow() {
        let mut pace = Pace::begin();
        let begin = pace.since;
        let drips = (1..=60).map(|second| pace.goes_on(1, begin + Duration::from_secs(second)));
        assert_eq!(drips.filter(|goes_on| !goes_on).count(), 1, "once a minute");
        let mut pace = Pace::begin();
        let begin = pace.since;
        assert!((1..=600).all(|second| pace.goes_on(2000, begin + Duration::from_secs(second))));
    }
}
