//! What a model keeps on a card from one shared pass for the next.

use std::any::Any;
use std::fmt;

/// State that a model keeps between shared passes, so that the next does not make it anew: handles of weights, and tensors that are equal
/// in all steps. It is a cache: the card that owns it drops it whenever its memory or its components are wanted, and a pass
/// computes the same without it.
#[derive(Default)]
pub struct Kept(Option<Box<dyn Any>>);

impl Kept {
    /// Takes out what is kept; `None` if it is nothing, or of another type, which is dropped.
    pub fn take<T: Any>(&mut self) -> Option<T> {
        self.0.take()?.downcast().ok().map(|kept| *kept)
    }

    /// Keeps this, in the place of anything else.
    pub fn put<T: Any>(&mut self, kept: T) {
        self.0 = Some(Box::new(kept));
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = if self.is_empty() { "nothing" } else { "something" };
        f.debug_tuple("Kept").field(&words).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_taken_once_and_only_as_what_it_is() {
        let mut kept = Kept::default();
        assert_eq!((kept.take::<u8>(), kept.is_empty()), (None, true));
        kept.put(7_u8);
        assert!(!kept.is_empty());
        assert_eq!((kept.take::<u8>(), kept.take::<u8>()), (Some(7), None));
        kept.put(7_u8);
        assert_eq!((kept.take::<u16>(), kept.is_empty()), (None, true));
    }
}
