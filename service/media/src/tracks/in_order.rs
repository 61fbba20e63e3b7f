//! Pieces of a track in any order, passed on in the order of its samples.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{TrackError, TrackFormat};

/// The pieces of a track that wait for those before them.
pub(crate) struct InOrder {
    format: TrackFormat,
    /// The first sample that was not passed on yet.
    next: u64,
    /// Pieces that begin later than that, by their first sample.
    waiting: BTreeMap<u64, Bytes>,
}

impl InOrder {
    pub(crate) fn new(format: TrackFormat) -> InOrder {
        InOrder {
            format,
            next: 0,
            waiting: BTreeMap::new(),
        }
    }

    /// Adds samples from number `first` on: 16 bits, little-endian, channels interleaved. Returns all that follow those that were
    /// returned before, without a gap. Samples that were added before are skipped.
    ///
    /// # Errors
    /// When these are not whole samples of the track.
    pub(crate) fn add(&mut self, first: u64, samples: &Bytes) -> Result<Vec<Bytes>, TrackError> {
        let unit_bytes = self.format.unit_bytes();
        let bytes = samples.len() as u64;
        let end = first.saturating_add(bytes / unit_bytes);
        if !bytes.is_multiple_of(unit_bytes) || end > self.format.samples {
            return Err(TrackError::NotSamples { first, bytes });
        }
        if end > self.next {
            self.waiting.entry(first).or_insert_with(|| samples.clone());
        }
        let mut ready = Vec::new();
        while let Some(entry) = self.waiting.first_entry()
            && *entry.key() <= self.next
        {
            let (first, samples) = entry.remove_entry();
            let there = ((self.next - first) * unit_bytes) as usize;
            if there < samples.len() {
                let new = samples.slice(there..);
                self.next += new.len() as u64 / unit_bytes;
                ready.push(new);
            }
        }
        Ok(ready)
    }

    /// Bytes of the pieces that wait.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting.values().map(|samples| samples.len() as u64).sum()
    }

    /// Whether every sample was passed on.
    pub(crate) fn is_complete(&self) -> bool {
        self.next == self.format.samples
    }
}
