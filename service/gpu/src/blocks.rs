//! The blocks of a component: which of its tensors a stage uses for a moment, in which order, and where they are while they pass.
//!
//! A family says of each tensor to which block it belongs ([`BlockPlace`]). From it follow the parts in which the component can
//! be on a card ([`parts_of`]), and where everything is in each of them ([`Placement`]): what stays, and for each streamed block its
//! place in the *ring*, the memory through which streamed blocks pass. All of this is arithmetic: it is tested without a card.

use std::collections::{BTreeMap, HashSet};

use residency::{Bytes, Part, PartSize, Parts};

use crate::load::TensorSource;

/// Alignment of tensors in a block and of blocks in the ring: that of the driver's allocations.
pub(crate) const ALIGNMENT: u64 = 512;

/// A tensor that is smaller than the largest of its block by this factor stays on the card: a copy costs more time than its bytes
/// do.
const SMALL_BY: u64 = 256;

/// Largest blocks that the ring holds: one that is used while the next arrives.
pub(crate) const RING_BLOCKS: u64 = 2;

/// How often a stage uses the blocks of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Uses {
    /// Once: what is computed from them serves all steps.
    Once,
    /// In each pass over them: once for a prompt, or in every step.
    EachPass,
}

/// The block of a tensor: a stage goes over the blocks of a pass in the order of their numbers, once or in each pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockPlace {
    pub uses: Uses,
    /// Number of the block in its pass, from 0.
    pub number: usize,
}

impl BlockPlace {
    /// The block of this number among those that are used once.
    pub fn once(number: usize) -> BlockPlace {
        let uses = Uses::Once;
        BlockPlace { uses, number }
    }

    /// The block of this number among those of each step.
    pub fn each_pass(number: usize) -> BlockPlace {
        let uses = Uses::EachPass;
        BlockPlace { uses, number }
    }
}

/// Sizes of a block, from which the parts of its component follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    pub uses: Uses,
    /// Bytes of its tensors.
    pub bytes: Bytes,
    /// Bytes of them in the ring, where each begins at a multiple of the alignment.
    pub in_ring: Bytes,
}

/// The parts of a component of `whole` bytes with these blocks, which are in the order of their places.
pub fn parts_of_blocks(whole: Bytes, blocks: &[BlockSize]) -> Parts {
    let order = streaming_order(blocks);
    Parts::new(whole, sizes_of_levels(whole, blocks, &order), |_| {})
}

/// Sizes of the blocks of these tensors, in the order of their places.
pub(crate) fn block_sizes(sources: &[TensorSource]) -> Vec<BlockSize> {
    sizes_of_large(sources, &large_of(sources))
}

/// The parts in which a component of these tensors can be on a card.
pub(crate) fn parts_of(sources: &[TensorSource]) -> Parts {
    let whole = sources.iter().map(TensorSource::bytes_on_card).sum();
    parts_of_blocks(whole, &block_sizes(sources))
}

/// The large tensors of each block, by index.
type Large = BTreeMap<BlockPlace, Vec<usize>>;

fn large_of(sources: &[TensorSource]) -> Large {
    let mut blocks = Large::new();
    for (index, source) in sources.iter().enumerate() {
        // What has one dimension is small, and a norm is often read by the block before its own.
        if let Some(place) = source.block
            && source.shape.len() > 1
        {
            blocks.entry(place).or_default().push(index);
        }
    }
    let bytes = |tensor: &usize| sources[*tensor].bytes_on_card().0;
    for tensors in blocks.values_mut() {
        let largest = tensors.iter().map(bytes).max().unwrap_or(0);
        tensors.retain(|tensor| bytes(tensor) * SMALL_BY >= largest && bytes(tensor) > 0);
    }
    blocks.retain(|_, tensors| !tensors.is_empty());
    blocks
}

fn sizes_of_large(sources: &[TensorSource], large: &Large) -> Vec<BlockSize> {
    let size = |(place, tensors): (&BlockPlace, &Vec<usize>)| {
        let bytes = |tensor: &usize| sources[*tensor].bytes_on_card();
        BlockSize {
            uses: place.uses,
            bytes: tensors.iter().map(bytes).sum(),
            in_ring: Bytes(StreamedBlock::of(*place, tensors, sources).bytes),
        }
    };
    large.iter().map(size).collect()
}

/// All blocks, by index, in the order in which they are streamed as the part on the card gets smaller. Blocks that are used once
/// come first; those of every step are spread over the pass, so that each arrives while blocks that stay are computed.
fn streaming_order(blocks: &[BlockSize]) -> Vec<usize> {
    let mut order = Vec::with_capacity(blocks.len());
    for uses in [Uses::Once, Uses::EachPass] {
        let pass: Vec<usize> = (0..blocks.len())
            .filter(|block| blocks[*block].uses == uses)
            .collect();
        let bytes: Vec<u64> = pass.iter().map(|block| blocks[*block].bytes.0).collect();
        order.extend(spread(&bytes).into_iter().map(|block| pass[block]));
    }
    order
}

/// The sizes of all levels of streaming, each with one block of this order more than the one before it.
fn sizes_of_levels(whole: Bytes, blocks: &[BlockSize], order: &[usize]) -> Vec<PartSize> {
    let (mut size, mut ring) = (PartSize::default(), Ring::default());
    let level = |block: &usize| {
        let block = blocks[*block];
        match block.uses {
            Uses::Once => size.streamed_once += block.bytes,
            Uses::EachPass => size.streamed += block.bytes,
        }
        ring.add(block.uses, block.in_ring);
        size.bytes = whole - size.all_streamed() + ring.bytes();
        size
    };
    order.iter().map(level).collect()
}

/// The ring of some streamed blocks: it has space for two of the largest, and for no more than the blocks of a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    largest: Bytes,
    once: Bytes,
    each_pass: Bytes,
}

impl Ring {
    fn add(&mut self, uses: Uses, in_ring: Bytes) {
        self.largest = self.largest.max(in_ring);
        match uses {
            Uses::Once => self.once += in_ring,
            Uses::EachPass => self.each_pass += in_ring,
        }
    }

    fn bytes(self) -> Bytes {
        Bytes(RING_BLOCKS * self.largest.0).min(self.once.max(self.each_pass))
    }
}

/// All blocks of a pass, of these bytes each, in the order in which they are streamed. Each beginning of it spreads the streamed bytes
/// evenly over the pass, so that the link is as busy at each moment as at others: all blocks count as taking the same time, so one of
/// twice the bytes is taken half as often. Points of the van der Corput sequence pick them: each beginning of that is spread evenly.
fn spread(bytes: &[u64]) -> Vec<usize> {
    let count = bytes.len();
    let share = |bytes: &u64| 1.0 / bytes.max(&1).to_owned() as f64;
    let all: f64 = bytes.iter().map(share).sum();
    let mut end = 0.0;
    let ends: Vec<f64> = bytes
        .iter()
        .map(|bytes| {
            end += share(bytes) / all;
            end
        })
        .collect();
    let bits = (count * POINTS_PER_BLOCK).next_power_of_two().trailing_zeros();
    let mut is_streamed = vec![false; count];
    let mut order = Vec::with_capacity(count);
    let points = (0..1_u32 << bits).map(|number| f64::from(number.reverse_bits()) / 2_f64.powi(32));
    // From the middle on: the first block of a pass can arrive only while the last of the pass before it is computed.
    let picked = points.map(|point| ends.partition_point(|end| *end <= (point + 0.5) % 1.0));
    // Blocks that no point picks come last.
    for block in picked.chain(0..count) {
        if block < count && !is_streamed[block] {
            is_streamed[block] = true;
            order.push(block);
        }
    }
    order
}

/// Points that pick the streamed blocks, for each block.
const POINTS_PER_BLOCK: usize = 16;

/// A block that passes through the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamedBlock {
    pub(crate) place: BlockPlace,
    /// Its tensors, by index, with their places in the block.
    pub(crate) tensors: Vec<(usize, u64)>,
    pub(crate) bytes: u64,
    /// Its place in the ring.
    pub(crate) at: u64,
}

impl StreamedBlock {
    fn of(place: BlockPlace, tensors: &[usize], sources: &[TensorSource]) -> StreamedBlock {
        let mut bytes = 0;
        let placed = |tensor: &usize| {
            let at = bytes;
            bytes += sources[*tensor].bytes_on_card().0.next_multiple_of(ALIGNMENT);
            (*tensor, at)
        };
        let tensors = tensors.iter().map(placed).collect();
        StreamedBlock {
            place,
            tensors,
            bytes,
            at: 0,
        }
    }
}

/// Where the tensors of a component are in one of its parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The streamed blocks, in the order of their use.
    pub(crate) streamed: Vec<StreamedBlock>,
    /// Bytes of the ring.
    pub(crate) ring_bytes: u64,
}

impl Placement {
    /// Where these tensors are in a part.
    pub(crate) fn of(sources: &[TensorSource], part: Part) -> Placement {
        let Some(index) = (part.0 as usize).checked_sub(1) else {
            return Placement::default();
        };
        let whole: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
        let large = large_of(sources);
        let sizes = sizes_of_large(sources, &large);
        let (order, mut kept) = (streaming_order(&sizes), Vec::new());
        Parts::new(whole, sizes_of_levels(whole, &sizes, &order), |index| {
            kept.push(index)
        });
        let Some(level) = kept.get(index).or(kept.last()) else {
            return Placement::default();
        };
        let places: Vec<BlockPlace> = large.keys().copied().collect();
        let streamed: Vec<BlockPlace> = order[..=*level].iter().map(|block| places[*block]).collect();
        Placement::with(sources, &large, &streamed)
    }

    fn with(sources: &[TensorSource], large: &Large, streamed: &[BlockPlace]) -> Placement {
        let mut in_order = streamed.to_vec();
        in_order.sort_unstable();
        let block = |place: BlockPlace| Some(StreamedBlock::of(place, large.get(&place)?, sources));
        let mut blocks: Vec<StreamedBlock> = in_order.into_iter().filter_map(block).collect();
        let mut ring = Ring::default();
        for block in &blocks {
            ring.add(block.place.uses, Bytes(block.bytes));
        }
        let ring_bytes = ring.bytes().0;
        let (mut uses, mut next) = (Uses::Once, 0);
        for block in &mut blocks {
            if block.place.uses != uses || next + block.bytes > ring_bytes {
                (uses, next) = (block.place.uses, 0);
            }
            block.at = next;
            next += block.bytes;
        }
        Placement {
            streamed: blocks,
            ring_bytes,
        }
    }

    /// Where all blocks would be if all of them were streamed.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn of_all(sources: &[TensorSource]) -> Placement {
        let large = large_of(sources);
        let all: Vec<BlockPlace> = large.keys().copied().collect();
        Placement::with(sources, &large, &all)
    }

    /// Whether a block passes through the ring.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn streams(&self, place: BlockPlace) -> bool {
        self.streamed.iter().any(|block| block.place == place)
    }

    /// The indices of the tensors that stay.
    pub(crate) fn staying(&self, sources: &[TensorSource]) -> Vec<usize> {
        let streamed: HashSet<usize> = self
            .streamed
            .iter()
            .flat_map(|block| &block.tensors)
            .map(|(tensor, _)| *tensor)
            .collect();
        (0..sources.len())
            .filter(|tensor| !streamed.contains(tensor))
            .collect()
    }

    /// Bytes on the card: what stays, and the ring.
    pub(crate) fn bytes_on_card(&self, sources: &[TensorSource]) -> Bytes {
        let staying = self.staying(sources).into_iter();
        staying
            .map(|tensor| sources[tensor].bytes_on_card())
            .sum::<Bytes>()
            + Bytes(self.ring_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use candle_core::DType;

    use super::*;
    use crate::load::Stored;

    /// Blocks of two weights and a bias, of which the first half are twice as large; modulation of each; and an embedder.
    fn sources(blocks: usize) -> Vec<TensorSource> {
        let file: Arc<Path> = Path::new("model.safetensors").into();
        let tensor = |name: String, rows: usize| {
            let block = name
                .strip_prefix("blocks.")
                .and_then(|rest| rest.split('.').next());
            let number = block.and_then(|number| number.parse().ok());
            let place = match name.ends_with("norm.weight") {
                true => BlockPlace::once,
                false => BlockPlace::each_pass,
            };
            TensorSource {
                block: number.map(place),
                ..TensorSource::full(name, &file, [], Stored::Bf16, vec![rows, 512], DType::BF16)
            }
        };
        let mut all = vec![tensor("embedder.weight".to_owned(), 8)];
        for block in 0..blocks {
            let rows = if block < blocks / 2 { 2048 } else { 1024 };
            all.push(tensor(format!("blocks.{block}.up.weight"), rows));
            all.push(tensor(format!("blocks.{block}.up.bias"), 1));
            all.push(tensor(format!("blocks.{block}.down.weight"), rows));
            all.push(tensor(format!("blocks.{block}.norm.weight"), rows / 2));
        }
        all
    }

    #[test]
    fn every_part_has_fewer_bytes_on_the_card_and_what_it_says() {
        let sources = sources(20);
        let parts = parts_of(&sources);
        assert!(parts.sizes().len() > 30, "{}", parts.sizes().len());
        let mut before = u64::MAX;
        for (number, size) in parts.sizes().iter().enumerate() {
            let placement = Placement::of(&sources, Part(number as u32 + 1));
            assert_eq!(placement.bytes_on_card(&sources), size.bytes);
            assert!(size.bytes.0 < before);
            before = size.bytes.0;
            let streamed: u64 = placement.streamed.iter().map(|block| block.bytes).sum();
            assert_eq!(size.all_streamed().0, streamed);
            let whole: u64 = sources.iter().map(|source| source.bytes_on_card().0).sum();
            assert_eq!(size.bytes.0, whole - streamed + placement.ring_bytes);
        }
        let last = parts.sizes().last().unwrap();
        // The ring, the embedder and the biases are left.
        assert_eq!(last.bytes.0, 2 * 2 * 2048 * 1024 + 8 * 1024 + 20 * 1024);
        assert_eq!(Placement::of(&sources, Part::WHOLE), Placement::default());
    }

    #[test]
    fn a_larger_part_has_all_that_a_smaller_one_has() {
        let sources = sources(13);
        let count = parts_of(&sources).sizes().len() as u32;
        let of = |part: u32| {
            let placement = Placement::of(&sources, Part(part));
            placement
                .streamed
                .iter()
                .map(|block| block.place)
                .collect::<Vec<_>>()
        };
        for part in 1..count {
            let (fewer, more) = (of(part), of(part + 1));
            assert!(
                fewer.iter().all(|block| more.contains(block)),
                "{fewer:?} {more:?}"
            );
        }
    }

    #[test]
    fn blocks_lie_within_the_ring_and_neighbours_do_not_overlap() {
        let sources = sources(20);
        for part in 1..=parts_of(&sources).sizes().len() as u32 {
            let placement = Placement::of(&sources, Part(part));
            for block in &placement.streamed {
                assert!(block.at + block.bytes <= placement.ring_bytes);
                assert_eq!(block.at % ALIGNMENT, 0);
            }
        }
    }

    #[test]
    fn streamed_bytes_are_spread_over_the_pass() {
        for count in 2..80_usize {
            // The first half twice as large.
            let half = count / 2;
            let bytes: Vec<u64> = (0..count)
                .map(|block| if block < half { 20 } else { 10 })
                .collect();
            let order = spread(&bytes);
            let mut all = order.clone();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count));
            // While enough of both are left, each half has as many bytes as its share of the time.
            for some in 1..=count / 3 {
                let of = |is_in: &dyn Fn(usize) -> bool| -> u64 {
                    let blocks = order[..some].iter().filter(|block| is_in(**block));
                    blocks.map(|block| bytes[*block]).sum()
                };
                let (first, second) = (of(&|block| block < half), of(&|block| block >= half));
                let even = (first + second) * half as u64 / count as u64;
                assert!(
                    first.abs_diff(even) <= 40,
                    "{count} {some}: {first} of {}",
                    first + second
                );
                let quarter = of(&|block| block < half / 2);
                assert!(
                    quarter.abs_diff(even / 2) <= 40,
                    "{count} {some}: {quarter} of {}",
                    first + second
                );
            }
        }
    }
}
