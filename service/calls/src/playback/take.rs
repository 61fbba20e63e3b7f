//! The samples of one segment, as its pieces arrive.

use model::{Covered, MediaFormat, Piece};

/// A track of 16-bit samples, whose pieces arrive in any order.
#[derive(Debug)]
pub(super) struct Take {
    channels: usize,
    /// Samples for each channel.
    length: u64,
    /// Channels interleaved; zeros where no piece has arrived.
    samples: Vec<i16>,
    come: Covered,
}

impl Take {
    /// An empty take of a track; `None` for another medium, for an empty one, and for one too long for memory.
    pub(super) fn of(format: &MediaFormat) -> Option<Take> {
        let &MediaFormat::Audio {
            channels, samples, ..
        } = format
        else {
            return None;
        };
        let channels = channels as usize;
        let all = usize::try_from(samples).ok()?.checked_mul(channels)?;
        (all > 0).then(|| Take {
            channels,
            length: samples,
            samples: vec![0; all],
            come: Covered::default(),
        })
    }

    /// Adds a piece; false if it is not of this track.
    pub(super) fn add(&mut self, piece: &Piece) -> bool {
        let Some(units) = piece.units() else { return false };
        let Some(place) = usize::try_from(piece.first)
            .ok()
            .and_then(|first| first.checked_mul(self.channels))
        else {
            return false;
        };
        let numbers = piece.data.chunks_exact(2).map(|bytes| match *bytes {
            [low, high] => i16::from_le_bytes([low, high]),
            _ => 0,
        });
        let Some(places) = self.samples.get_mut(place..place + piece.data.len() / 2) else {
            return false;
        };
        for (place, number) in places.iter_mut().zip(numbers) {
            *place = number;
        }
        self.come.add(piece.first..piece.first + units);
        true
    }

    /// Samples for each channel.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn is_whole(&self) -> bool {
        self.come.is_whole(self.length)
    }

    /// Number of consecutive samples that have arrived from a place on.
    pub(super) fn there_from(&self, place: u64) -> u64 {
        self.come.end_from(place).saturating_sub(place)
    }

    /// A sample of a channel; 0 where there is none.
    pub(super) fn sample(&self, place: u64, channel: usize) -> i16 {
        let place = usize::try_from(place)
            .ok()
            .and_then(|place| place.checked_mul(self.channels));
        let place = place.and_then(|place| place.checked_add(channel));
        place
            .and_then(|place| self.samples.get(place))
            .copied()
            .unwrap_or(0)
    }
}
