//! What of a result is there, when its pieces come in any order.

use std::collections::BTreeMap;

/// Ranges of a result, each part of it at most once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans {
    /// Ends by starts; no two touch.
    spans: BTreeMap<u64, u64>,
}

/// A part of a result that was there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("from {start} to {end} it came twice")]
pub(crate) struct Twice {
    start: u64,
    end: u64,
}

impl Spans {
    /// Adds a range, from `start` to before `end`.
    ///
    /// # Errors
    /// When a part of it was there already; then nothing is added.
    pub(crate) fn add(&mut self, start: u64, end: u64) -> Result<(), Twice> {
        if start >= end {
            return Ok(());
        }
        let twice = |start, end| Err(Twice { start, end });
        let before = self
            .spans
            .range(..=start)
            .next_back()
            .map(|(start, end)| (*start, *end));
        let behind = self
            .spans
            .range(start..)
            .next()
            .map(|(start, end)| (*start, *end));
        if let Some((_, there)) = before
            && there > start
        {
            return twice(start, there.min(end));
        }
        if let Some((there, _)) = behind
            && there < end
        {
            return twice(there, end);
        }
        let start = match before {
            Some((earlier, there)) if there == start => earlier,
            _ => start,
        };
        let end = match behind {
            Some((there, later)) if there == end => {
                self.spans.remove(&there);
                later
            }
            _ => end,
        };
        self.spans.insert(start, end);
        Ok(())
    }

    /// Whether nothing is there yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether all of a result of this length is there.
    pub(crate) fn are_whole(&self, length: u64) -> bool {
        self.spans.len() == 1 && self.spans.get(&0) == Some(&length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_whole_when_each_part_came_once_in_any_order() {
        let mut spans = Spans::default();
        for (start, end) in [(6, 9), (0, 2), (4, 6), (2, 4)] {
            assert!(!spans.are_whole(9));
            spans.add(start, end).unwrap();
        }
        assert!(spans.are_whole(9) && !spans.are_whole(10));
    }

    #[test]
    fn what_came_already_is_refused_and_changes_nothing() {
        let mut spans = Spans::default();
        spans.add(2, 5).unwrap();
        for (start, end) in [(2, 5), (0, 3), (4, 6), (3, 4), (0, 9)] {
            assert!(spans.add(start, end).is_err(), "{start} to {end}");
        }
        spans.add(0, 2).unwrap();
        spans.add(5, 6).unwrap();
        spans.add(3, 3).unwrap();
        assert!(spans.are_whole(6));
    }
}
