//! Where everything lies on a card that does not remap memory.
//!
//! Most drivers give each page an address of its own choice: free bytes are as good wherever they are. Where they cannot, an allocation
//! needs a *hole*, free addresses in one piece, that is as large as itself. A [`Layout`] is the whole of such a card: the driver has one
//! and reports it, and the planner carries its moves out on a copy before it decides on them. Both place as common allocators do: in
//! the smallest hole that is large enough.

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, Component, ComponentId};
use crate::parts::Part;

/// The number of the allocation through which streamed blocks pass.
const RING: u32 = u32::MAX;

/// Who uses a range of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// The process itself, until it ends: its context, and workspaces of libraries.
    Fixed,
    /// Other processes.
    Foreign,
    /// Nobody: it was freed, and the driver cannot give it yet.
    Late,
    /// Activations of a running stage.
    Scratch,
    /// The activation pool, which keeps it for later stages.
    Slack,
    /// One of the allocations of a component.
    Component { id: ComponentId, number: u32 },
}

impl Owner {
    /// The component that it belongs to.
    pub fn component(&self) -> Option<&ComponentId> {
        match self {
            Owner::Component { id, .. } => Some(id),
            Owner::Fixed | Owner::Foreign | Owner::Late | Owner::Scratch | Owner::Slack => None,
        }
    }
}

/// Addresses in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub at: u64,
    pub bytes: Bytes,
    pub owner: Owner,
}

impl Range {
    fn end(&self) -> u64 {
        self.at + self.bytes.0
    }
}

/// Nothing free is large enough for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} are needed in one piece, and the largest free piece has {largest}")]
pub struct NoHole {
    pub needed: Bytes,
    pub largest: Bytes,
}

impl NoHole {
    /// Bytes that the largest hole lacks.
    pub(crate) fn short(self) -> Bytes {
        self.needed - self.largest
    }
}

impl Component {
    /// The allocations of a part of it, by number: what is in no block, each block that stays, and the ring through
    /// which the others pass. A component without blocks is one allocation. Blocks that are streamed first come last, so that a part that
    /// shrinks leaves holes that join.
    pub fn allocations_of(&self, part: Part) -> Vec<(u32, Bytes)> {
        let least = self.least().0;
        let part = part.0.min(least);
        let streamed = |part: u32| self.size_of(Part(part)).all_streamed();
        let mut all = vec![(0, self.bytes - streamed(least))];
        all.extend(
            (part + 1..=least)
                .rev()
                .map(|n| (n, streamed(n) - streamed(n - 1))),
        );
        let stays = self.bytes - streamed(part);
        all.push((RING, self.bytes_of(Part(part)) - stays));
        all.retain(|(_, bytes)| *bytes > Bytes::ZERO);
        all
    }
}

/// All addresses of a card, from zero: ranges in use, and holes between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    total: Bytes,
    /// Ordered by address; no two overlap.
    used: Vec<Range>,
}

/// Free addresses between two ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    pub at: u64,
    pub bytes: Bytes,
    /// The number of ranges before it.
    index: usize,
}

impl Layout {
    /// A card of `total` bytes, all of them free.
    pub fn new(total: Bytes) -> Layout {
        Layout {
            total,
            used: Vec::new(),
        }
    }

    /// The ranges in use, ordered by address.
    pub fn used(&self) -> &[Range] {
        &self.used
    }

    /// The holes, ordered by address.
    pub fn holes(&self) -> impl DoubleEndedIterator<Item = Hole> {
        (0..=self.used.len()).filter_map(|index| {
            let at = index.checked_sub(1).map_or(0, |before| self.used[before].end());
            let end = self.used.get(index).map_or(self.total.0, |range| range.at);
            let bytes = Bytes(end) - Bytes(at);
            (bytes > Bytes::ZERO).then_some(Hole { at, bytes, index })
        })
    }

    /// The largest allocation that would succeed.
    pub fn largest_hole(&self) -> Bytes {
        self.holes().map(|hole| hole.bytes).max().unwrap_or(Bytes::ZERO)
    }

    /// Allocates in the smallest hole that is large enough, and of equal ones in the first. Returns the address.
    ///
    /// # Errors
    /// [`NoHole`]; nothing is allocated then.
    pub fn place(&mut self, bytes: Bytes, owner: Owner) -> Result<u64, NoHole> {
        if bytes == Bytes::ZERO {
            return Ok(0);
        }
        let fitting = self.holes().filter(|hole| hole.bytes >= bytes);
        let Some(hole) = fitting.min_by_key(|hole| hole.bytes) else {
            return Err(NoHole {
                needed: bytes,
                largest: self.largest_hole(),
            });
        };
        let at = hole.at;
        self.used.insert(hole.index, Range { at, bytes, owner });
        Ok(at)
    }

    /// Makes a component's allocations those of a part: frees the others, then allocates what is missing.
    ///
    /// # Errors
    /// [`NoHole`]; nothing has changed then.
    pub fn hold(&mut self, component: &Component, part: Part) -> Result<(), NoHole> {
        let mut missing = component.allocations_of(part);
        let mut then = self.clone();
        then.used.retain(|range| match &range.owner {
            Owner::Component { id, number } if *id == component.id => {
                let here = missing
                    .iter()
                    .position(|wanted| *wanted == (*number, range.bytes));
                here.map(|here| missing.remove(here)).is_some()
            }
            _ => true,
        });
        for (number, bytes) in missing {
            let id = component.id.clone();
            then.place(bytes, Owner::Component { id, number })?;
        }
        *self = then;
        Ok(())
    }

    /// Allocates activations: in what the activation pool keeps, or else in a hole. Returns the address, and whether the pool had it.
    ///
    /// # Errors
    /// [`NoHole`]; nothing is allocated then.
    pub fn take_scratch(&mut self, bytes: Bytes) -> Result<(u64, bool), NoHole> {
        let kept = self.used.iter().enumerate();
        let kept =
            kept.filter(|(_, range)| range.owner == Owner::Slack && range.bytes >= bytes.max(Bytes(1)));
        let smallest = kept.min_by_key(|(_, range)| range.bytes).map(|(index, _)| index);
        let Some(index) = smallest else {
            return Ok((self.place(bytes, Owner::Scratch)?, false));
        };
        let at = self.used[index].at;
        self.used[index].at += bytes.0;
        self.used[index].bytes -= bytes;
        let owner = Owner::Scratch;
        self.used.insert(index, Range { at, bytes, owner });
        self.used.retain(|range| range.bytes > Bytes::ZERO);
        Ok((at, true))
    }

    /// Activations leave, to the driver or to what the pool keeps. Returns the bytes.
    pub fn return_scratch(&mut self, at: u64, keeps: bool) -> Bytes {
        let here = |range: &&mut Range| range.at == at && range.owner == Owner::Scratch;
        let Some(range) = self.used.iter_mut().find(here) else {
            return Bytes::ZERO;
        };
        let bytes = range.bytes;
        range.owner = Owner::Slack;
        if !keeps {
            self.free(|range| range.at == at);
        }
        // The pool joins what lies side by side.
        self.used.dedup_by(|later, range| {
            let joins = range.owner == Owner::Slack && later.owner == Owner::Slack && range.end() == later.at;
            if joins {
                range.bytes += later.bytes;
            }
            joins
        });
        bytes
    }

    /// Frees ranges, and returns them.
    pub fn free(&mut self, is_meant: impl Fn(&Range) -> bool) -> Vec<Range> {
        let (freed, used) = std::mem::take(&mut self.used).into_iter().partition(is_meant);
        self.used = used;
        freed
    }

    /// Frees all of a component, and returns it.
    pub fn free_component(&mut self, component: &ComponentId) -> Vec<Range> {
        self.free(|range| range.owner.component() == Some(component))
    }

    /// Allocates what is free of a range, and returns it.
    pub fn fill(&mut self, range: &Range) -> Vec<Range> {
        let within = |hole: Hole| {
            let at = hole.at.max(range.at);
            let bytes = Bytes((hole.at + hole.bytes.0).min(range.end())) - Bytes(at);
            let owner = range.owner.clone();
            (bytes > Bytes::ZERO).then_some(Range { at, bytes, owner })
        };
        let filled: Vec<Range> = self.holes().filter_map(within).collect();
        for range in &filled {
            let index = self.used.partition_point(|other| other.at < range.at);
            self.used.insert(index, range.clone());
        }
        filled
    }

    /// Makes the bytes of other processes so many. They take the last free addresses, and give the first of theirs back.
    pub fn set_foreign(&mut self, bytes: Bytes) {
        let theirs = |range: &&mut Range| range.owner == Owner::Foreign;
        let held: Bytes = self.used.iter_mut().filter(theirs).map(|range| range.bytes).sum();
        let mut excess = held - bytes;
        for range in self.used.iter_mut().filter(theirs) {
            let back = excess.min(range.bytes);
            range.at += back.0;
            range.bytes -= back;
            excess -= back;
        }
        self.used.retain(|range| range.bytes > Bytes::ZERO);
        let mut wanted = bytes - held;
        while wanted > Bytes::ZERO {
            let last = self.holes().next_back();
            let Some(hole) = last else { break };
            let bytes = wanted.min(hole.bytes);
            let at = hole.at + (hole.bytes - bytes).0;
            let owner = Owner::Foreign;
            self.used.insert(hole.index, Range { at, bytes, owner });
            wanted -= bytes;
        }
    }
}
