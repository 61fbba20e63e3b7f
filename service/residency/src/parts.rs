//! How much of a component is on the card: all of it, or a part, while the rest of its blocks is streamed through slots.
//!
//! A *block* is a piece of a component that a stage uses for a moment, in a known order: a layer of a transformer. A component
//! whose blocks are known can be on the card in several *parts*. Each leaves more blocks to be streamed, and needs less memory:
//! the blocks that stay, all that is in no block, and the slots through which the others pass.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, Component};

/// A part of a component, by its place in [`Parts`]: 0 is the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Part(pub u32);

impl Part {
    /// All of the component: nothing is streamed.
    pub const WHOLE: Part = Part(0);
}

/// Sizes of one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSize {
    /// Bytes on the card: what stays, and the slots.
    pub bytes: Bytes,
    /// Bytes that cross the link in each pass over the blocks.
    pub streamed: Bytes,
    /// Bytes that cross the link once in a stage: of blocks that are used once, whatever the number of its passes.
    pub streamed_once: Bytes,
}

impl PartSize {
    /// Bytes of all blocks that are streamed, whether once or in each pass.
    pub fn all_streamed(&self) -> Bytes {
        self.streamed + self.streamed_once
    }
}

/// The parts of a component other than the whole, each with fewer bytes on the card than the one before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parts(Arc<[PartSize]>);

impl Parts {
    /// The parts of a component of `whole` bytes. Those that save nothing over an earlier one are left out; `kept` gets the
    /// index of each that is not.
    pub fn new(
        whole: Bytes,
        sizes: impl IntoIterator<Item = PartSize>,
        mut kept: impl FnMut(usize),
    ) -> Parts {
        let mut least = whole;
        let mut smaller = Vec::new();
        for (index, size) in sizes.into_iter().enumerate() {
            if size.bytes < least {
                least = size.bytes;
                smaller.push(size);
                kept(index);
            }
        }
        Parts(smaller.into())
    }

    /// The sizes of all parts but the whole, the largest first.
    pub fn sizes(&self) -> &[PartSize] {
        &self.0
    }
}

impl Component {
    /// The sizes of a part; those of the smallest for a part that does not exist.
    pub fn size_of(&self, part: Part) -> PartSize {
        let whole = PartSize {
            bytes: self.bytes,
            ..PartSize::default()
        };
        let sizes = self.parts.sizes();
        match (part.0 as usize).checked_sub(1) {
            None => whole,
            Some(index) => sizes.get(index).or(sizes.last()).copied().unwrap_or(whole),
        }
    }

    /// Bytes on the card of a part.
    pub fn bytes_of(&self, part: Part) -> Bytes {
        self.size_of(part).bytes
    }

    /// The part with the fewest bytes on the card.
    pub fn least(&self) -> Part {
        Part(self.parts.sizes().len() as u32)
    }

    /// The largest part of at most `bytes` bytes on the card; `None` if the smallest has more.
    pub fn largest_within(&self, bytes: Bytes) -> Option<Part> {
        if self.bytes <= bytes {
            return Some(Part::WHOLE);
        }
        let sizes = self.parts.sizes();
        let first = sizes.partition_point(|size| size.bytes > bytes);
        (first < sizes.len()).then_some(Part(first as u32 + 1))
    }
}
