//! Attention on the CPU, in blocks: the scores of 64 queries over some hundred keys at a time, which stay in the L1
//! and L2 caches, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Nothing is transposed or
//! concatenated, and the score matrix is never materialized.
//!
//! Within a block, queries are the vectorized axis: scores are `[keys, queries]` and sums `[width, queries]`, so that
//! the softmax of all queries runs in parallel, and products read keys and values in place.

#![allow(unsafe_code)] // Tasks that write one storage.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::Mask;
use crate::disjoint::{Disjoint, end_of};
use crate::loops::{Processor, by_processor, vectorised};
use crate::place::apart_from;
use crate::product::{COLUMNS, Product, multiply};
use crate::rows::exp_by;

/// Maximum of queries per block.
const QUERIES: usize = 64;
/// Maximum of keys per block: whole tiles of a product.
const KEYS: usize = 120;
/// Queries are padded to vectors of this many.
const VECTOR: usize = COLUMNS;
/// Initial maximum of the scores: low but finite, so that its difference to itself is zero.
const LOWEST: f32 = -1e30;

/// [`super::attention`] on the CPU. The result does not depend on the number of threads; its last digits may differ
/// between processors, as those of [`multiply`].
pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    mask: Mask<'_>,
    out: &Tensor,
) -> Result<()> {
    let (batch, queries, heads, _) = q.dims4()?;
    let keys = k.dim(1)?;
    let wide = |x: &Tensor| -> Result<Tensor> {
        let x = apart_from(x, out)?.to_dtype(DType::F32)?;
        let is_in_rows = x.dims().last() == Some(&1) || x.layout().stride().last() == Some(&1);
        if is_in_rows { Ok(x) } else { x.contiguous() }
    };
    let (q, k, v) = (wide(q)?, wide(k)?, wide(v)?);
    let bias = match mask {
        Mask::Bias(bias) => {
            let bias = apart_from(bias, out)?.to_dtype(DType::F32)?;
            Some(bias.broadcast_as((batch, heads, queries, keys))?)
        }
        _ => None,
    };
    let lengths = match mask {
        Mask::Lengths { keys, .. } => keys.to_vec1::<u32>()?,
        _ => Vec::new(),
    };
    let seen = match mask {
        Mask::None | Mask::Bias(_) | Mask::Lengths { .. } => KeyBounds {
            before: usize::MAX,
            after: usize::MAX,
        },
        Mask::Causal => KeyBounds {
            before: usize::MAX,
            after: 0,
        },
        Mask::Window { before, after } => KeyBounds { before, after },
    };
    let guards = [&q, &k, &v].map(|x| x.storage_and_layout());
    let [q, k, v] = &guards;
    let bias = bias.as_ref().map(|bias| bias.storage_and_layout());
    let operands = Operands {
        q: Operand::of(&q.0, q.1)?,
        k: Operand::of(&k.0, k.1)?,
        v: Operand::of(&v.0, v.1)?,
        bias: bias
            .as_ref()
            .map(|(storage, layout)| Operand::of(storage, layout))
            .transpose()?,
        lengths: &lengths,
        seen,
        scale: scale as f32,
    };
    out.inplace_op1(&operands)
}

/// Bounds of the keys that a query attends to, by position.
#[derive(Clone, Copy)]
struct KeyBounds {
    before: usize,
    after: usize,
}

impl KeyBounds {
    /// The keys, out of `keys`, that the query at this position attends to.
    fn of_query(self, query: usize, keys: usize) -> std::ops::Range<usize> {
        let last = query.saturating_add(self.after).saturating_add(1).min(keys);
        query.saturating_sub(self.before).min(last)..last
    }
}

/// A strided tensor of four axes, with every element within `numbers`.
struct Operand<'a> {
    numbers: &'a [f32],
    start: usize,
    strides: [usize; 4],
    dims: [usize; 4],
}

impl<'a> Operand<'a> {
    fn of(storage: &'a Storage, layout: &Layout) -> Result<Operand<'a>> {
        let Storage::Cpu(CpuStorage::F32(numbers)) = storage else {
            candle_core::bail!("an f32 tensor on the CPU is expected")
        };
        Ok(Operand {
            numbers,
            start: layout.start_offset(),
            strides: strides_within(layout, numbers.len())?,
            dims: four(layout.dims())?,
        })
    }

    /// Offset of a row along the last axis.
    fn row(&self, at: [usize; 3]) -> usize {
        self.start
            + at.iter()
                .zip(self.strides)
                .map(|(i, stride)| i * stride)
                .sum::<usize>()
    }
}

fn four(of_axes: &[usize]) -> Result<[usize; 4]> {
    of_axes
        .try_into()
        .map_err(|_| candle_core::Error::Msg(format!("four axes are expected, not {of_axes:?}")))
}

/// Strides of a tensor whose elements are all within a storage of `count`.
fn strides_within(layout: &Layout, count: usize) -> Result<[usize; 4]> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let axes = dims.iter().copied().zip(strides.iter().copied());
    let end = end_of(layout.start_offset(), axes, 1);
    if layout.shape().elem_count() > 0 && end.is_none_or(|end| end > count) {
        candle_core::bail!("a tensor of shape {dims:?} and strides {strides:?} over {count} numbers");
    }
    four(strides)
}

/// Whether no two elements of a tensor share an address.
fn is_apart(layout: &Layout) -> bool {
    let mut axes: Vec<(usize, usize)> = layout
        .stride()
        .iter()
        .copied()
        .zip(layout.dims().iter().copied())
        .filter(|&(_, dim)| dim > 1)
        .collect();
    axes.sort_unstable();
    let mut extent = 1;
    for (stride, dim) in axes {
        if stride < extent {
            return false;
        }
        extent += stride * (dim - 1);
    }
    true
}

struct Operands<'a> {
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    bias: Option<Operand<'a>>,
    lengths: &'a [u32],
    seen: KeyBounds,
    scale: f32,
}

/// Queries `first..first + count` of one head of one batch item.
#[derive(Clone, Copy)]
struct Block {
    batch: usize,
    head: usize,
    first: usize,
    count: usize,
    /// `count`, rounded up to whole vectors.
    lanes: usize,
}

impl InplaceOp1 for Operands<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match storage {
            CpuStorage::F32(numbers) => self.write(numbers, layout, |v| v),
            CpuStorage::F16(numbers) => self.write(numbers, layout, f16::from_f32),
            CpuStorage::BF16(numbers) => self.write(numbers, layout, bf16::from_f32),
            _ => candle_core::bail!("attention to f32, f16 or bf16 is expected"),
        }
    }
}

impl Operands<'_> {
    fn write<T: Copy + Send>(
        &self,
        numbers: &mut [T],
        layout: &Layout,
        narrow: impl Fn(f32) -> T + Sync,
    ) -> Result<()> {
        let strides = strides_within(layout, numbers.len())?;
        if !is_apart(layout) {
            candle_core::bail!("attention to a tensor of which numbers share their places");
        }
        let [batch, queries, heads, width] = self.q.dims;
        if batch * queries * heads * width == 0 {
            return Ok(());
        }
        let blocks = queries.div_ceil(QUERIES);
        let queries_of_block = queries.div_ceil(blocks).next_multiple_of(VECTOR);
        let blocks = queries.div_ceil(queries_of_block);
        let target = Disjoint::of(numbers);
        let start = layout.start_offset();
        (0..batch * heads * blocks).into_par_iter().for_each(|task| {
            let first = task % blocks * queries_of_block;
            let count = queries_of_block.min(queries - first);
            let block = Block {
                batch: task / blocks / heads,
                head: task / blocks % heads,
                first,
                count,
                lanes: count.next_multiple_of(VECTOR),
            };
            SCRATCH.with_borrow_mut(|scratch| {
                let room = Room::of(scratch, block.lanes, width);
                let (sums, totals) = self.attend(block, room);
                for query in 0..count {
                    let factor = if totals[query] > 0.0 {
                        1.0 / totals[query]
                    } else {
                        0.0
                    };
                    let at = [block.batch, first + query, block.head];
                    let begin = start
                        + at.iter()
                            .zip(strides)
                            .map(|(i, stride)| i * stride)
                            .sum::<usize>();
                    for column in 0..width {
                        let number = narrow(sums[column * block.lanes + query] * factor);
                        // SAFETY: within the storage (`strides_within`), and no other task's: blocks have
                        // disjoint queries, and no two elements of the result share an address (`is_apart`).
                        unsafe { target.at(begin + column * strides[3]).write(number) };
                    }
                }
            });
        });
        Ok(())
    }

    /// The weighted sums of values `[width, lanes]` of a block, and the sums of weights `[lanes]`.
    fn attend<'a>(&self, block: Block, room: Room<'a>) -> (&'a [f32], &'a [f32]) {
        let Room {
            queries,
            scores,
            sums,
            highest,
            totals,
            factors,
        } = room;
        let lanes = block.lanes;
        let [_, keys, key_heads, width] = self.k.dims;
        self.gather(block, queries);
        highest.fill(LOWEST);
        totals.fill(0.0);
        sums.fill(0.0);
        let key_head = block.head / (self.q.dims[2] / key_heads);
        let keys = match self.lengths.get(block.batch) {
            Some(&length) => keys.min(length as usize),
            None => keys,
        };
        let first = self.seen.of_query(block.first, keys).start;
        let end = self.seen.of_query(block.first + block.count - 1, keys).end;
        for first in (first..end).step_by(KEYS) {
            let count = KEYS.min(end - first);
            let scores = &mut scores[..count * lanes];
            let at = [block.batch, first, key_head];
            let key = &self.k.numbers[self.k.row(at)..];
            let value = &self.v.numbers[self.v.row(at)..];
            multiply(Product {
                rows: count,
                columns: lanes,
                depth: width,
                out: scores,
                out_stride: lanes,
                adds: false,
                left: key,
                left_strides: [self.k.strides[1], 1],
                right: queries,
                right_stride: lanes,
            });
            self.mask(block, first, count, scores);
            if weigh(scores, lanes, highest, totals, factors) {
                correct(sums, lanes, factors);
            }
            multiply(Product {
                rows: width,
                columns: lanes,
                depth: count,
                out: sums,
                out_stride: lanes,
                adds: true,
                left: value,
                left_strides: [1, self.v.strides[1]],
                right: scores,
                right_stride: lanes,
            });
        }
        (sums, totals)
    }

    /// The scaled queries of a block, `[width, lanes]`, zero-padded.
    fn gather(&self, block: Block, queries: &mut [f32]) {
        queries.fill(0.0);
        for query in 0..block.count {
            let begin = self.q.row([block.batch, block.first + query, block.head]);
            let row = &self.q.numbers[begin..][..self.q.dims[3]];
            for (to, &from) in queries[query..].iter_mut().step_by(block.lanes).zip(row) {
                *to = from * self.scale;
            }
        }
    }

    /// Adds the bias to scores `[count, lanes]` over keys from `first` on, and masks keys that are not attended to.
    fn mask(&self, block: Block, first: usize, count: usize, scores: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for query in 0..block.count {
                let begin = bias.row([block.batch, block.head, block.first + query]);
                for key in 0..count {
                    let bias = bias.numbers[begin + (first + key) * bias.strides[3]];
                    scores[key * block.lanes + query] += bias;
                }
            }
        }
        let whole = self.seen.before == usize::MAX && self.seen.after == usize::MAX;
        let all_keys = self.k.dims[1];
        for query in (0..block.count).filter(|_| !whole) {
            let seen = self.seen.of_query(block.first + query, all_keys);
            for key in (first..first + count).filter(|key| !seen.contains(key)) {
                scores[(key - first) * block.lanes + query] = f32::NEG_INFINITY;
            }
        }
    }
}

thread_local! {
    /// Thread-local workspace, reused from block to block.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The workspace of a block, split into its buffers.
struct Room<'a> {
    /// `[width, lanes]`
    queries: &'a mut [f32],
    /// `[KEYS, lanes]`
    scores: &'a mut [f32],
    /// `[width, lanes]`
    sums: &'a mut [f32],
    /// `[lanes]`, like the next two.
    highest: &'a mut [f32],
    totals: &'a mut [f32],
    factors: &'a mut [f32],
}

impl Room<'_> {
    fn of(scratch: &mut Vec<f32>, lanes: usize, width: usize) -> Room<'_> {
        scratch.resize(lanes * (2 * width + KEYS + 3), 0.0);
        let (queries, rest) = scratch.split_at_mut(width * lanes);
        let (scores, rest) = rest.split_at_mut(KEYS * lanes);
        let (sums, rest) = rest.split_at_mut(width * lanes);
        let (highest, rest) = rest.split_at_mut(lanes);
        let (totals, factors) = rest.split_at_mut(lanes);
        Room {
            queries,
            scores,
            sums,
            highest,
            totals,
            factors,
        }
    }
}

by_processor! {
    /// Turns scores `[keys, lanes]` into weights, `exp(score - maximum)`, and updates the running maximum and the
    /// sums of weights. Earlier sums must be multiplied by `factors`; returns whether any of them is not 1.
    fn weigh(
        scores: &mut [f32],
        lanes: usize,
        highest: &mut [f32],
        totals: &mut [f32],
        factors: &mut [f32],
    ) -> bool = weigh_by
}

#[inline(always)]
fn weigh_by<P: Processor>(
    scores: &mut [f32],
    lanes: usize,
    highest: &mut [f32],
    totals: &mut [f32],
    factors: &mut [f32],
) -> bool {
    let exp = |x: f32| exp_by(x, P::multiply_add);
    let mut rose = false;
    for first in (0..lanes).step_by(VECTOR) {
        let range = first..first + VECTOR;
        let mut high = [LOWEST; VECTOR];
        high.copy_from_slice(&highest[range.clone()]);
        for row in scores.chunks_exact(lanes) {
            for (high, &score) in high.iter_mut().zip(&row[range.clone()]) {
                *high = if score > *high { score } else { *high };
            }
        }
        let mut total = [0f32; VECTOR];
        for i in 0..VECTOR {
            let factor = exp(highest[first + i] - high[i]);
            rose |= high[i] > highest[first + i];
            factors[first + i] = factor;
            highest[first + i] = high[i];
            total[i] = totals[first + i] * factor;
        }
        for row in scores.chunks_exact_mut(lanes) {
            let row = &mut row[range.clone()];
            for i in 0..VECTOR {
                let weight = exp(row[i] - high[i]);
                row[i] = weight;
                total[i] += weight;
            }
        }
        totals[range].copy_from_slice(&total);
    }
    rose
}

vectorised! {
    /// Multiplies sums `[width, lanes]` by factors `[lanes]`.
    fn correct(sums: &mut [f32], lanes: usize, factors: &[f32]) {
        for row in sums.chunks_exact_mut(lanes) {
            for (sum, &factor) in row.iter_mut().zip(factors) {
                *sum *= factor;
            }
        }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
