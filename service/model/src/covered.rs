//! The parts of a result that have arrived, when its pieces come in any order.

use std::ops::Range;

/// Ranges of a result, in units or bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    /// Disjoint, ascending, not adjacent.
    ranges: Vec<Range<u64>>,
}

/// A part of a result that has arrived before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("from {start} to {end} it came twice")]
pub struct Twice {
    start: u64,
    end: u64,
}

impl Covered {
    /// Adds a range, and returns its parts that were missing.
    pub fn add(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut new = Vec::new();
        let mut from = range.start;
        for known in &self.ranges {
            if known.start >= range.end {
                break;
            }
            if from < known.start {
                new.push(from..known.start);
            }
            from = from.max(known.end);
        }
        if from < range.end {
            new.push(from..range.end);
        }
        self.ranges.extend(new.iter().cloned());
        self.ranges.sort_by_key(|range| range.start);
        self.ranges.dedup_by(|next, before| {
            let adjacent = next.start == before.end;
            if adjacent {
                before.end = next.end;
            }
            adjacent
        });
        new
    }

    /// Adds a range that is missing as a whole.
    ///
    /// # Errors
    /// When a part of it has been added before; then nothing is added.
    pub fn add_once(&mut self, range: Range<u64>) -> Result<(), Twice> {
        let mut common = self
            .ranges
            .iter()
            .map(|known| known.start.max(range.start)..known.end.min(range.end));
        if let Some(Range { start, end }) = common.find(|common| !common.is_empty()) {
            return Err(Twice { start, end });
        }
        self.add(range);
        Ok(())
    }

    /// The end of the part that has arrived without a gap from `place` on: `place` itself if nothing has arrived there.
    pub fn end_from(&self, place: u64) -> u64 {
        let holds = self.ranges.iter().find(|range| range.contains(&place));
        holds.map_or(place, |range| range.end)
    }

    /// Whether nothing has been added.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether all of a result of this length has been added.
    pub fn is_whole(&self, length: u64) -> bool {
        matches!(self.ranges.as_slice(), [all] if *all == (0..length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_whole_when_each_part_came_once_in_any_order() {
        let mut covered = Covered::default();
        for (start, end) in [(6, 9), (0, 2), (4, 6), (2, 4)] {
            assert!(!covered.is_whole(9));
            covered.add_once(start..end).unwrap();
        }
        assert!(covered.is_whole(9) && !covered.is_whole(10));
    }

    #[test]
    fn an_overlapping_range_is_refused_and_changes_nothing() {
        let mut covered = Covered::default();
        covered.add_once(2..5).unwrap();
        for (start, end) in [(2, 5), (0, 3), (4, 6), (3, 4), (0, 9)] {
            assert!(covered.add_once(start..end).is_err(), "{start} to {end}");
        }
        covered.add_once(0..2).unwrap();
        covered.add_once(5..6).unwrap();
        covered.add_once(3..3).unwrap();
        assert!(covered.is_whole(6));
    }

    #[test]
    fn only_new_parts_of_a_range_are_returned() {
        let mut covered = Covered::default();
        let mut new = |range| covered.add(range).first().cloned();
        assert_eq!(new(10..20), Some(10..20));
        assert_eq!(new(5..15), Some(5..10));
        assert_eq!(new(12..14), None);
        assert!(!covered.is_whole(20));
        let mut new = |range| covered.add(range).first().cloned();
        assert_eq!(new(0..20), Some(0..5));
        assert!(covered.is_whole(20));
        assert!(covered.add(Range { start: 3, end: 3 }).is_empty());
    }

    /// All ways to add three ranges of six units.
    #[test]
    fn each_unit_is_returned_as_new_once() {
        let ranges: Vec<Range<u64>> = (0..6)
            .flat_map(|start| (start + 1..7).map(move |end| start..end))
            .collect();
        for first in &ranges {
            for second in &ranges {
                for third in &ranges {
                    let mut covered = Covered::default();
                    let (mut times, mut seen) = ([0; 6], [false; 6]);
                    for range in [first, second, third] {
                        range.clone().for_each(|unit| seen[unit as usize] = true);
                        for new in covered.add(range.clone()) {
                            new.for_each(|unit| times[unit as usize] += 1);
                        }
                    }
                    assert_eq!(times, seen.map(i32::from), "{first:?} {second:?} {third:?}");
                    assert_eq!(covered.is_whole(6), seen.iter().all(|seen| *seen));
                }
            }
        }
    }
}
