//! Which units of a track have been delivered.

use std::ops::Range;

use pipelines::MediaFormat;

/// What has been delivered of a track, in any order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Coverage {
    pub(super) format: MediaFormat,
    /// Disjoint, ascending, not adjacent.
    covered: Vec<Range<u64>>,
}

impl Coverage {
    /// Nothing of a track of this format.
    pub(super) fn of(format: MediaFormat) -> Coverage {
        Coverage {
            format,
            covered: Vec::new(),
        }
    }

    /// The parts of a range that have not been delivered; they are from now on.
    pub(super) fn add(&mut self, units: Range<u64>) -> Vec<Range<u64>> {
        let mut new = Vec::new();
        let mut from = units.start;
        for known in &self.covered {
            if known.start >= units.end {
                break;
            }
            if from < known.start {
                new.push(from..known.start);
            }
            from = from.max(known.end);
        }
        if from < units.end {
            new.push(from..units.end);
        }
        self.covered.extend(new.iter().cloned());
        self.covered.sort_by_key(|range| range.start);
        self.covered.dedup_by(|next, before| {
            let adjacent = next.start == before.end;
            if adjacent {
                before.end = next.end;
            }
            adjacent
        });
        new
    }

    /// Whether all of the track has been delivered.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.covered.as_slice(), [all] if *all == (0..self.format.units()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track() -> Coverage {
        Coverage::of(MediaFormat::Video {
            width: 2,
            height: 2,
            frames: 20,
            frames_per_second: 30.0,
        })
    }

    #[test]
    fn what_is_delivered_again_is_left_out() {
        let mut track = track();
        let mut new = |units| track.add(units).first().cloned();
        assert_eq!(new(10..20), Some(10..20));
        assert_eq!(new(5..15), Some(5..10));
        assert_eq!(new(12..14), None);
        assert!(!track.is_whole());
        let mut new = |units| track.add(units).first().cloned();
        assert_eq!(new(0..20), Some(0..5));
        assert!(track.is_whole());
        assert!(track.add(Range { start: 3, end: 3 }).is_empty());
    }

    /// All ways to deliver three ranges of six units.
    #[test]
    fn every_unit_is_new_once() {
        let format = MediaFormat::Video {
            width: 2,
            height: 2,
            frames: 6,
            frames_per_second: 30.0,
        };
        let ranges: Vec<Range<u64>> = (0..6)
            .flat_map(|start| (start + 1..7).map(move |end| start..end))
            .collect();
        for first in &ranges {
            for second in &ranges {
                for third in &ranges {
                    let mut track = Coverage::of(format);
                    let (mut times, mut seen) = ([0; 6], [false; 6]);
                    for range in [first, second, third] {
                        range.clone().for_each(|unit| seen[unit as usize] = true);
                        for new in track.add(range.clone()) {
                            new.for_each(|unit| times[unit as usize] += 1);
                        }
                    }
                    assert_eq!(times, seen.map(i32::from), "{first:?} {second:?} {third:?}");
                    assert_eq!(track.is_whole(), seen.iter().all(|seen| *seen));
                }
            }
        }
    }
}
