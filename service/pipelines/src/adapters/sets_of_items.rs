//! Which of several sets of adapters each item of a batch has.

use std::ops::Range;

/// The sets of the items of a batch, by number: runs of items next to each other with one set, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetsOfItems(Vec<(Range<usize>, usize)>);

impl SetsOfItems {
    /// The set of each item, in order.
    pub(crate) fn of(sets: impl IntoIterator<Item = usize>) -> SetsOfItems {
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for (item, set) in sets.into_iter().enumerate() {
            match runs.last_mut() {
                Some((items, last)) if *last == set => items.end = item + 1,
                _ => runs.push((item..item + 1, set)),
            }
        }
        SetsOfItems(runs)
    }

    /// The first set for so many items: that of a component with one set.
    pub(crate) fn first_of(items: usize) -> SetsOfItems {
        SetsOfItems::of(std::iter::repeat_n(0, items))
    }

    /// The set that all items have; `None` if they have several.
    pub(crate) fn only(&self) -> Option<usize> {
        match &self.0[..] {
            [] => Some(0),
            [(_, set)] => Some(*set),
            _ => None,
        }
    }

    /// The runs of items, each with its set.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.0.iter().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_next_to_each_other_with_one_set_are_one_run() {
        let runs = |sets: &[usize]| SetsOfItems::of(sets.iter().copied()).runs().collect::<Vec<_>>();
        assert_eq!(runs(&[2, 2, 0, 1, 1]), [(0..2, 2), (2..3, 0), (3..5, 1)]);
        let only = |sets: &[usize]| SetsOfItems::of(sets.iter().copied()).only();
        assert_eq!(
            [only(&[3, 3]), only(&[0, 1]), only(&[])],
            [Some(3), None, Some(0)]
        );
        assert_eq!(SetsOfItems::first_of(3).only(), Some(0));
    }
}
