//! When streamed blocks are copied into the ring: pure bookkeeping, without a card.
//!
//! A stage enters its blocks in order. Of each it is known which follows, so that blocks are copied ahead as far as the ring has
//! room: into bytes that no block needs any more that is used or on its way.

use crate::blocks::{StreamedBlock, Uses};

/// Where a block is that has bytes in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its copy is queued, and it has not been used.
    Coming,
    /// The work that is queued now uses it.
    Used,
    /// The work that uses it is queued.
    Done,
}

/// A copy to be queued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) block: usize,
    /// Blocks whose use must be over before.
    pub(crate) after: Vec<usize>,
}

/// What to do when a stage comes to a block, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// The block whose use ends here.
    pub(crate) left: Option<usize>,
    pub(crate) copies: Vec<Copy>,
    /// The block whose copy the work that is queued next waits for.
    pub(crate) entered: Option<usize>,
}

/// The copies of the streamed blocks of a component.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Bytes of each block in the ring.
    places: Vec<std::ops::Range<u64>>,
    /// The block that follows each.
    next: Vec<usize>,
    ring: Vec<(usize, State)>,
    /// The block that is expected after all that are on their way.
    expected: Option<usize>,
}

impl Schedule {
    /// The schedule of these blocks, in the order of their use.
    pub(crate) fn of(blocks: &[StreamedBlock]) -> Schedule {
        let places = blocks
            .iter()
            .map(|block| block.at..block.at + block.bytes)
            .collect();
        Schedule::new(places, following(blocks))
    }

    /// A schedule of blocks with these places in the ring, and the block that follows each.
    pub(crate) fn new(places: Vec<std::ops::Range<u64>>, next: Vec<usize>) -> Schedule {
        Schedule {
            places,
            next,
            ring: Vec::new(),
            expected: None,
        }
    }

    /// The stage comes to a streamed block, or to one that stays on the card (`None`).
    pub(crate) fn enter(&mut self, block: Option<usize>) -> Turn {
        let mut turn = Turn::default();
        for (held, state) in &mut self.ring {
            if *state == State::Used && Some(*held) != block {
                *state = State::Done;
                turn.left = Some(*held);
            }
        }
        if let Some(block) = block {
            self.bring(block, &mut turn);
        }
        self.copy_ahead(&mut turn);
        turn
    }

    fn bring(&mut self, block: usize, turn: &mut Turn) {
        turn.entered = Some(block);
        let is_known = |(held, state): &&mut (usize, State)| *held == block && *state != State::Done;
        if let Some((_, state)) = self.ring.iter_mut().find(is_known) {
            *state = State::Used;
            return;
        }
        // Another one was expected: what is on its way for it is overwritten.
        for (_, state) in &mut self.ring {
            if *state == State::Coming {
                *state = State::Done;
            }
        }
        let copy = self.copy_of(block);
        turn.copies.push(copy);
        self.ring.push((block, State::Used));
        self.expected = self.next.get(block).copied();
    }

    fn copy_ahead(&mut self, turn: &mut Turn) {
        while let Some(block) = self.expected {
            let is_in_the_way =
                |(held, state): &(usize, State)| *state != State::Done && self.overlap(*held, block);
            if self.ring.iter().any(is_in_the_way) {
                return;
            }
            let copy = self.copy_of(block);
            turn.copies.push(copy);
            self.ring.push((block, State::Coming));
            self.expected = self.next.get(block).copied();
        }
    }

    /// The copy of a block; those whose bytes it overwrites leave the ring.
    fn copy_of(&mut self, block: usize) -> Copy {
        let after = self.ring.iter().map(|(held, _)| *held);
        let after: Vec<usize> = after.filter(|held| self.overlap(*held, block)).collect();
        self.ring.retain(|(held, _)| !after.contains(held));
        Copy { block, after }
    }

    fn overlap(&self, one: usize, other: usize) -> bool {
        match (self.places.get(one), self.places.get(other)) {
            (Some(one), Some(other)) => one.start < other.end && other.start < one.end,
            _ => false,
        }
    }
}

/// The block that is expected after each: the next of its pass; after the last, the first of the pass that is repeated.
fn following(blocks: &[StreamedBlock]) -> Vec<usize> {
    let repeated = blocks.iter().position(|block| block.place.uses == Uses::EachPass);
    let next = |index: usize| match index + 1 < blocks.len() {
        true => index + 1,
        false => repeated.unwrap_or(0),
    };
    (0..blocks.len()).map(next).collect()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// A ring of two slots, and blocks that take turns in them.
    fn in_two_slots(count: usize) -> Schedule {
        let places = (0..count as u64).map(|block| (block % 2) * 10..(block % 2) * 10 + 10);
        Schedule::new(places.collect(), (1..count).chain([0]).collect())
    }

    #[test]
    fn the_next_block_is_copied_while_one_is_used() {
        let mut schedule = in_two_slots(4);
        let first = schedule.enter(Some(0));
        let copy = |block, after: &[usize]| Copy {
            block,
            after: after.to_vec(),
        };
        assert_eq!(first.copies, [copy(0, &[]), copy(1, &[])]);
        assert_eq!((first.left, first.entered), (None, Some(0)));
        let second = schedule.enter(Some(1));
        assert_eq!((second.left, second.entered), (Some(0), Some(1)));
        assert_eq!(second.copies, [copy(2, &[0])]);
        // A block that stays on the card ends the use of the one before it, so that its slot is filled.
        let resident = schedule.enter(None);
        assert_eq!((resident.left, resident.entered), (Some(1), None));
        assert_eq!(resident.copies, [copy(3, &[1])]);
        assert_eq!(schedule.enter(Some(2)).copies, []);
        let last = schedule.enter(Some(3));
        assert_eq!(last.copies, [copy(0, &[2])], "the first block of the next pass");
    }

    #[test]
    fn a_block_that_was_not_expected_is_copied_when_it_is_entered() {
        let mut schedule = in_two_slots(5);
        schedule.enter(Some(0));
        let turn = schedule.enter(Some(3));
        assert_eq!(
            turn.copies[0],
            Copy {
                block: 3,
                after: vec![1]
            }
        );
        assert_eq!(turn.entered, Some(3));
        assert_eq!(turn.copies[1].block, 4);
    }

    proptest! {
        /// Whatever is entered, a copy waits for all whose bytes it overwrites, none of them is used or expected any more, and what
        /// is entered was copied since its bytes were last overwritten.
        #[test]
        fn no_copy_overwrites_what_is_needed(
            sizes in vec(1..10_u64, 2..12),
            entered in vec((0..12_usize, 0..4_u32), 1..200),
        ) {
            let largest = sizes.iter().max().copied().unwrap_or(0);
            let (mut at, mut places) = (0, Vec::new());
            for size in &sizes {
                if at + size > 2 * largest {
                    at = 0;
                }
                places.push(at..at + size);
                at += size;
            }
            let count = sizes.len();
            let mut schedule = Schedule::new(places.clone(), (1..count).chain([0]).collect());
            // The block whose bytes are at each place, and whether its use is over.
            let mut bytes: Vec<Option<usize>> = vec![None; 2 * largest as usize];
            let mut over = vec![true; count];
            let mut following = 0;
            for (number, kind) in entered {
                let block = match kind {
                    0 => None,
                    1 => Some(number % count), // another than expected
                    _ => Some(following),
                };
                let turn = schedule.enter(block);
                if let Some(left) = turn.left {
                    over[left] = true;
                }
                for copy in &turn.copies {
                    for place in places[copy.block].clone() {
                        if let Some(held) = bytes[place as usize] {
                            prop_assert!(over[held] || copy.after.contains(&held));
                            prop_assert!(over[held], "{held} is used or on its way");
                        }
                        bytes[place as usize] = Some(copy.block);
                    }
                }
                prop_assert_eq!(turn.entered, block);
                if let Some(block) = block {
                    for place in places[block].clone() {
                        prop_assert_eq!(bytes[place as usize], Some(block));
                    }
                    over[block] = false;
                    following = (block + 1) % count;
                }
            }
        }
    }
}
