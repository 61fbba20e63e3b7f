//! Something that segments are made with, and what replaces it: proven once a segment that was made with it has come.

/// The current version, and those before it until it is proven.
#[derive(Debug)]
pub(crate) struct Versions<T> {
    proven: T,
    /// With the numbers of the segments that brought them, ascending.
    pending: Vec<(u32, T)>,
}

impl<T> Versions<T> {
    pub(crate) fn new(first: T) -> Versions<T> {
        Versions {
            proven: first,
            pending: Vec::new(),
        }
    }

    /// What segments are made with now.
    pub(crate) fn now(&self) -> &T {
        self.pending.last().map_or(&self.proven, |(_, version)| version)
    }

    /// The last that is proven.
    pub(crate) fn proven(&self) -> &T {
        &self.proven
    }

    /// The segment that brought it; 0 once it is proven.
    pub(crate) fn number(&self) -> u32 {
        self.pending.last().map_or(0, |(number, _)| *number)
    }

    /// Replaces it, until that fails.
    pub(crate) fn replace(&mut self, number: u32, version: T) {
        self.pending.push((number, version));
    }

    /// A segment came that was made with the version of this number. Whether that proves it: those before it are given up.
    pub(crate) fn prove(&mut self, number: u32) -> bool {
        let Some(place) = self.pending.iter().position(|(known, _)| *known == number) else {
            return false;
        };
        if let Some((_, version)) = self.pending.drain(..=place).next_back() {
            self.proven = version;
        }
        true
    }

    /// The segment that brought a version does not come: the one before it is there again, unless it was proven by another.
    pub(crate) fn fail(&mut self, number: u32) -> bool {
        let known = self.pending.len();
        self.pending.retain(|(brought, _)| *brought != number);
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
