//! The order of frames and sound in a film's file: about a second of frames, then the sound of that second, so that a player reads
//! the file from its start to its end.

use std::ops::Range;

/// Consecutive samples of one track.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chunk {
    pub(super) track: Track,
    pub(super) samples: Range<usize>,
}

/// A track of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Track {
    Frames,
    Sound,
}

/// How many samples a track has, and how many of them a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) samples: usize,
    pub(super) per_second: f64,
}

/// The chunks of a file, in their order.
pub(super) fn chunks_of(frames: Extent, sound: Option<Extent>) -> Vec<Chunk> {
    let of = |track, samples| Chunk { track, samples };
    let Some(sound) = sound else {
        return vec![of(Track::Frames, 0..frames.samples)];
    };
    let at_once = (frames.per_second.ceil() as usize).max(1);
    let (mut chunks, mut heard) = (Vec::new(), 0);
    for start in (0..frames.samples).step_by(at_once) {
        let end = (start + at_once).min(frames.samples);
        chunks.push(of(Track::Frames, start..end));
        let until = match end == frames.samples {
            true => sound.samples,
            false => (end as f64 / frames.per_second * sound.per_second).ceil() as usize,
        };
        let until = until.min(sound.samples);
        if until > heard {
            chunks.push(of(Track::Sound, heard..until));
            heard = until;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_of_frames_is_followed_by_its_sound() {
        let frames = |samples| Extent {
            samples,
            per_second: 24.0,
        };
        assert_eq!(chunks_of(frames(49), None).len(), 1);
        let sound = Extent {
            samples: 99,
            per_second: 46.875,
        };
        let chunks = chunks_of(frames(49), Some(sound));
        let said: Vec<_> = chunks
            .into_iter()
            .map(|chunk| (chunk.track, chunk.samples))
            .collect();
        let expected = [
            (Track::Frames, 0..24),
            (Track::Sound, 0..47),
            (Track::Frames, 24..48),
            (Track::Sound, 47..94),
            (Track::Frames, 48..49),
            (Track::Sound, 94..99),
        ];
        assert_eq!(said, expected);
        // Sound that is shorter or longer than the frames.
        for (samples, last) in [(20, 0..20), (500, 94..500)] {
            let chunks = chunks_of(frames(49), Some(Extent { samples, ..sound }));
            let sound = chunks.iter().rfind(|chunk| chunk.track == Track::Sound);
            assert_eq!(sound.unwrap().samples, last);
        }
    }
}
