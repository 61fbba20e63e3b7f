//! The results of kept jobs as files: a folder for each job, a file for each result and each latent.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use engine::job::{Latent, LatentInfo};
use model::Values;

use super::records::{KeptLatent, KeptResult};
use crate::chunks::{CHUNK_BYTES, Chunk};

/// The folder of one job's results while they are made.
pub(super) struct Folder {
    path: PathBuf,
    results: BTreeMap<(u32, String, String), (File, KeptResult)>,
    latents: Vec<KeptLatent>,
}

impl Folder {
    /// An empty folder: what an earlier run of the job left is removed.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn create(path: PathBuf) -> io::Result<Folder> {
        remove(&path)?;
        gpu::create_private_folder(&path)?;
        Ok(Folder {
            path,
            results: BTreeMap::new(),
            latents: Vec::new(),
        })
    }

    /// Writes a chunk to its place.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(super) fn add(&mut self, chunk: &Chunk) -> io::Result<()> {
        // A film may be sent as frames and as a file: each is a result of its own.
        let key = (chunk.item, chunk.track.clone(), chunk.media_type.to_string());
        if !self.results.contains_key(&key) {
            let name = format!("result-{}", self.results.len());
            let file = gpu::open_private(&self.path.join(&name))?;
            let result = KeptResult {
                file: name,
                item: chunk.item,
                track: chunk.track.clone(),
                media_type: chunk.media_type.to_string(),
                head: None,
                bytes: chunk.total_bytes,
            };
            self.results.insert(key.clone(), (file, result));
        }
        let Some((file, result)) = self.results.get_mut(&key) else {
            return Ok(()); // it is there: inserted above
        };
        if chunk.head.is_some() {
            result.head.clone_from(&chunk.head);
        }
        file.write_all_at(&chunk.data, chunk.offset)
    }

    /// Writes a latent.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(super) fn add_latent(&mut self, item: u32, latent: &Latent) -> io::Result<()> {
        let name = format!("latent-{}", self.latents.len());
        let file = gpu::open_private(&self.path.join(&name))?;
        let bytes = rmp_serde::to_vec_named(&latent.values).map_err(io::Error::other)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        self.latents.push(KeptLatent {
            file: name,
            item,
            info: latent.info.clone(),
        });
        Ok(())
    }

    /// Waits until all is on the disk.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(super) fn finish(self) -> io::Result<(Vec<KeptResult>, Vec<KeptLatent>)> {
        let mut results = Vec::with_capacity(self.results.len());
        for (file, result) in self.results.into_values() {
            file.sync_all()?;
            results.push(result);
        }
        File::open(&self.path)?.sync_all()?;
        if let Some(above) = self.path.parent() {
            File::open(above)?.sync_all()?;
        }
        results.sort_by(|a, b| {
            let number = |result: &KeptResult| (result.file.len(), result.file.clone());
            number(a).cmp(&number(b))
        });
        Ok((results, self.latents))
    }
}

/// A part of a kept result; `None` beyond its end.
///
/// # Errors
/// When the file cannot be read, or is shorter than it was.
pub(super) fn chunk_at(folder: &Path, result: &KeptResult, offset: u64) -> io::Result<Option<Chunk>> {
    let left = result.bytes.saturating_sub(offset);
    if left == 0 && offset > 0 {
        return Ok(None);
    }
    let mut data = vec![0; left.min(CHUNK_BYTES as u64) as usize];
    let file = gpu::open_regular(&folder.join(&result.file))?;
    file.read_exact_at(&mut data, offset)?;
    Ok(Some(Chunk {
        item: result.item,
        track: result.track.clone(),
        media_type: result.media_type.clone().into(),
        total_bytes: result.bytes,
        offset,
        is_last: offset + data.len() as u64 == result.bytes,
        data: Bytes::from(data),
        head: if offset == 0 { result.head.clone() } else { None },
    }))
}

/// A kept latent with its tensors.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn latent_of(folder: &Path, info: &LatentInfo, file: &str) -> io::Result<Latent> {
    let most = info.bytes.0.saturating_mul(2).saturating_add(1 << 20);
    let bytes = gpu::read_bounded(&folder.join(file), most)?;
    let values: Values = rmp_serde::from_slice(&bytes).map_err(io::Error::other)?;
    Ok(Latent {
        info: info.clone(),
        values,
    })
}

/// Removes the folder of a job, if it is there.
///
/// # Errors
/// When the disk refuses.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(problem) if problem.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Removes the folders of jobs that the journal does not know. The number of them.
///
/// # Errors
/// When the folder cannot be read.
pub(super) fn remove_unknown(all: &Path, is_known: impl Fn(&str) -> bool) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(all)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_str().is_some_and(&is_known) {
            remove(&entry.path())?;
            removed += 1;
        }
    }
    Ok(removed)
}
