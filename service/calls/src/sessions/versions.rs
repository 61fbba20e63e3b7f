//! Versions of something that segments are made with: a version is proven once a segment that was made with it is complete.

/// The current version, and those before it until it is proven.
#[derive(Debug)]
pub(crate) struct Versions<T> {
    proven: T,
    /// Versions that are not proven, with the numbers of the segments that introduced them, ascending.
    pending: Vec<(u32, T)>,
}

impl<T> Versions<T> {
    pub(crate) fn new(first: T) -> Versions<T> {
        Versions {
            proven: first,
            pending: Vec::new(),
        }
    }

    /// The version that segments are made with now.
    pub(crate) fn now(&self) -> &T {
        self.pending.last().map_or(&self.proven, |(_, version)| version)
    }

    /// The last that is proven.
    pub(crate) fn proven(&self) -> &T {
        &self.proven
    }

    /// The number of the segment that introduced the current version; 0 once it is proven.
    pub(crate) fn number(&self) -> u32 {
        self.pending.last().map_or(0, |(number, _)| *number)
    }

    /// Introduces a version, which [`Versions::fail`] removes again.
    pub(crate) fn replace(&mut self, number: u32, version: T) {
        self.pending.push((number, version));
    }

    /// A segment is complete that was made with the version of this number. Returns whether that proves the version; earlier ones
    /// are dropped then.
    pub(crate) fn prove(&mut self, number: u32) -> bool {
        let Some(place) = self.pending.iter().position(|(known, _)| *known == number) else {
            return false;
        };
        if let Some((_, version)) = self.pending.drain(..=place).next_back() {
            self.proven = version;
        }
        true
    }

    /// The segment that introduced a version failed: the version before it is current again, unless another segment proved the newer
    /// one. Returns whether a version was removed.
    pub(crate) fn fail(&mut self, number: u32) -> bool {
        let known = self.pending.len();
        self.pending.retain(|(introduced, _)| *introduced != number);
        self.pending.len() < known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_version_restores_the_last_proven_one() {
        let mut versions = Versions::new("a");
        versions.replace(2, "b");
        versions.replace(3, "c");
        assert_eq!((*versions.now(), versions.number()), ("c", 3));
        assert!(versions.fail(2));
        assert_eq!(*versions.now(), "c");
        assert!(versions.fail(3) && !versions.fail(3));
        assert_eq!((*versions.now(), versions.number()), ("a", 0));
    }

    #[test]
    fn a_segment_made_with_a_version_proves_it() {
        let mut versions = Versions::new("a");
        versions.replace(2, "b");
        versions.replace(3, "c");
        assert!(versions.prove(2));
        assert_eq!((*versions.now(), versions.number()), ("c", 3));
        assert!(!versions.prove(2), "once");
        assert!(versions.fail(3));
        assert_eq!(*versions.now(), "b");
    }
}
