//! A disk in memory that fails at any write and loses its power, for tests of what outlives the service.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;

use crate::Backend;

/// A disk writes so many bytes as a whole.
const SECTOR_BYTES: usize = 512;

/// A change that the disk has not been told to keep yet.
#[derive(Clone, Debug)]
enum Pending {
    Write(u64, Vec<u8>),
    Length(u64),
}

impl Pending {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Pending::Length(length) => bytes.resize(*length as usize, 0),
            Pending::Write(at, data) => {
                let end = *at as usize + data.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*at as usize..end].copy_from_slice(data);
            }
        }
    }
}

/// A disk whose unsynchronized writes are lost with its power: each as a whole, or all but its first sectors, or not at all.
#[derive(Debug, Default)]
struct Contents {
    kept: Vec<u8>,
    pending: Vec<Pending>,
    seen: Vec<u8>,
    /// Changes until one fails; `None`: none does.
    until_failure: Option<u32>,
}

/// The disk. Copies are the same disk.
#[derive(Clone, Debug, Default)]
pub struct Disk(Arc<Mutex<Contents>>);

impl Disk {
    fn change(&self, change: Pending) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check()?;
        change.apply(&mut disk.seen);
        disk.pending.push(change);
        Ok(())
    }

    /// The power is gone: what was not synchronized is lost, as a whole or in part or not at all, as `fate` decides. It works again then.
    pub fn cut(&self, mut fate: u64) {
        let mut disk = self.lock();
        for pending in std::mem::take(&mut disk.pending) {
            fate = fate.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let reached = match (fate >> 33) % 3 {
                0 => continue,
                1 => pending,
                _ => match pending {
                    Pending::Write(at, mut data) => {
                        let sectors = data.len().div_ceil(SECTOR_BYTES);
                        data.truncate((fate >> 40) as usize % sectors.max(1) * SECTOR_BYTES);
                        Pending::Write(at, data)
                    }
                    length => length,
                },
            };
            let mut kept = std::mem::take(&mut disk.kept);
            reached.apply(&mut kept);
            disk.kept = kept;
        }
        disk.seen = disk.kept.clone();
        disk.until_failure = None;
    }

    /// From so many changes on, every change fails, as on a full disk.
    pub fn fail_after(&self, changes: u32) {
        self.lock().until_failure = Some(changes);
    }

    /// Changes succeed again.
    pub fn works_again(&self) {
        self.lock().until_failure = None;
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A journal's way to it.
    pub fn backend(&self) -> Backend {
        let store = self.clone();
        Arc::new(move || Ok(Box::new(store.clone())))
    }
}

impl Contents {
    fn check(&mut self) -> io::Result<()> {
        match &mut self.until_failure {
            Some(0) => Err(io::Error::other("the disk is full")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let disk = self.lock();
        let bytes = disk.seen.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.change(Pending::Length(length))
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check()?;
        disk.pending.clear();
        disk.kept = disk.seen.clone();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Pending::Write(offset, data.to_vec()))
    }
}
