//! A storage on the CPU that several tasks write at once, with the checks that their parts are disjoint.

#![allow(unsafe_code)] // Tasks that write one storage.

/// The elements of a storage, for tasks that use disjoint elements: no task reads or writes an element that another writes.
pub(crate) struct Disjoint<T>(*mut T);

// SAFETY: it is made of a storage that is borrowed exclusively. The code that writes to one of its places proves there that the
// place is within the storage, and that no other task uses it.
unsafe impl<T: Send> Send for Disjoint<T> {}
// SAFETY: the same.
unsafe impl<T: Send> Sync for Disjoint<T> {}

impl<T> Disjoint<T> {
    /// The elements of a storage, which outlives it.
    pub(crate) fn of(numbers: &mut [T]) -> Disjoint<T> {
        Disjoint(numbers.as_mut_ptr())
    }

    /// The place of an element.
    pub(crate) fn at(&self, element: usize) -> *mut T {
        self.0.wrapping_add(element)
    }
}

/// The place after the last element of rows of `width` elements. The rows are along axes of these lengths and strides, from
/// `start` on. `None` if the place overflows.
pub(crate) fn end_of(
    start: usize,
    axes: impl IntoIterator<Item = (usize, usize)>,
    width: usize,
) -> Option<usize> {
    axes.into_iter()
        .try_fold(start, |last, (length, stride)| {
            last.checked_add(length.saturating_sub(1).checked_mul(stride)?)
        })?
        .checked_add(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_overflows_is_none() {
        const MOST: usize = usize::MAX;
        assert_eq!(end_of(2, [(3, 10), (4, 5)], 5), Some(2 + 20 + 15 + 5));
        assert_eq!(end_of(2, [(0, 10)], 0), Some(2));
        assert_eq!(end_of(0, [(2, MOST)], 0), Some(MOST));
        // The end of each overflows: wrapped around to zero, it would be a small number.
        for (start, axes, width) in [
            (MOST, [(1, 1), (1, 1)], 1),
            (1, [(2, MOST), (1, 1)], 0),
            (0, [(3, MOST / 2 + 2), (1, 1)], 1),
            (0, [(MOST, 4), (MOST, 4)], 1),
        ] {
            assert_eq!(end_of(start, axes, width), None, "{start} {axes:?} {width}");
        }
    }
}
