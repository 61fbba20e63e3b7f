//! The layers, as they take the rows of a map that there are, and give those that follow from them.
//!
//! A convolution over rows needs the row after the one that it computes, so it is a row late: it keeps the last two rows of
//! its input (a halo) until the next ones come. Convolutions in time keep the last two frames of their input, from one latent
//! to the next (a cache). Each row enters a convolution once: it is normalized into a buffer beside the cached frames, and the
//! last frames of the buffer become the cache. A result depends on the same numbers, added in the same order, whatever pieces
//! the rows come in.

use std::collections::VecDeque;

use ops::{Onto, Steps};

use super::arithmetic::{Arithmetic, Blocks, Outcome, Reading};

/// Taps of a convolution in time before the current frame.
pub(super) const CACHED: usize = 2;

/// Some rows of all frames of a map.
pub(super) struct Rows<M> {
    pub(super) map: M,
    /// Index of the first.
    pub(super) first: usize,
    /// Whether they are the last of the map.
    pub(super) is_last: bool,
}

/// What a layer remembers.
pub(super) struct State<M> {
    /// Frames for the next latent.
    pub(super) caches: Vec<M>,
    /// Rows for the next ones of the same latent.
    halos: [Option<M>; 2],
    pub(super) pieces: Pieces<M>,
    /// Rows that were computed.
    written: usize,
}

impl<M> State<M> {
    pub(super) fn of(caches: Vec<M>) -> State<M> {
        State {
            caches,
            halos: [None, None],
            pieces: Pieces(VecDeque::new()),
            written: 0,
        }
    }
}

/// Rows that wait to be added to later ones, in order.
pub(super) struct Pieces<M>(VecDeque<(usize, M)>);

impl<M: Clone> Pieces<M> {
    pub(super) fn push(&mut self, rows: Rows<M>) {
        self.0.push_back((rows.first, rows.map));
    }

    /// Calls `each` with the pieces that become rows from `first` until `until` when every row becomes `times`, and with the
    /// rows of each; then drops what is not needed any more.
    fn take<A: Arithmetic<Map = M>>(
        &mut self,
        a: &A,
        times: usize,
        (first, until): (usize, usize),
        mut each: impl FnMut(&M, usize, (usize, usize)) -> Outcome<()>,
    ) -> Outcome<()> {
        for (begin, map) in &self.0 {
            let [_, rows, ..] = a.sides(map)?;
            let begin = begin * times;
            let (from, to) = (first.max(begin), until.min(begin + rows * times));
            if from < to {
                each(map, begin, (from, to))?;
            }
        }
        while let Some((begin, map)) = self.0.front() {
            let [_, rows, ..] = a.sides(map)?;
            if (begin + rows) * times > until {
                break;
            }
            self.0.pop_front();
        }
        Ok(())
    }

    /// Adds the rows to those of `out`.
    pub(super) fn add_to<A: Arithmetic<Map = M>>(&mut self, a: &A, out: &Rows<M>) -> Outcome<()> {
        let [_, rows, ..] = a.sides(&out.map)?;
        self.take(a, 1, (out.first, out.first + rows), |map, begin, (from, to)| {
            let added = a.part(map, 1, from - begin, to - from)?;
            a.add(&added, &a.part(&out.map, 1, from - out.first, to - from)?)
        })
    }

    /// Adds the repeated rows to those of `out`. `dropped` is the number of frames that are left out.
    pub(super) fn add_repeated_to<A: Arithmetic<Map = M>>(
        &mut self,
        a: &A,
        blocks: Blocks,
        dropped: usize,
        out: &Rows<M>,
    ) -> Outcome<()> {
        let [_, rows, ..] = a.sides(&out.map)?;
        let times = blocks.sides;
        self.take(
            a,
            times,
            (out.first, out.first + rows),
            |map, begin, (from, to)| {
                let target = a.part(&out.map, 1, from - out.first, to - from)?;
                a.add_repeated(map, blocks, [dropped, from - begin], &target)
            },
        )
    }

    /// The whole map, once its last rows have come.
    fn whole<A: Arithmetic<Map = M>>(&mut self, a: &A, rows: Rows<M>) -> Outcome<Option<M>> {
        let is_last = rows.is_last;
        if is_last && self.0.is_empty() {
            return Ok(Some(rows.map));
        }
        let [frames, count, width, channels] = a.sides(&rows.map)?;
        let height = rows.first + count;
        self.push(rows);
        if !is_last {
            return Ok(None);
        }
        let whole = a.blank([frames, height, width, channels])?;
        for (first, map) in self.0.drain(..) {
            let [_, count, ..] = a.sides(&map)?;
            a.copy(&map, &a.part(&whole, 1, first, count)?)?;
        }
        Ok(Some(whole))
    }
}

/// A convolution of single positions.
#[derive(Clone, Debug)]
pub(super) struct OfPositions<L> {
    pub(super) layer: L,
    pub(super) outputs: usize,
}

impl<L> OfPositions<L> {
    pub(super) fn forward<A: Arithmetic<Layer = L>>(&self, a: &A, map: &A::Map) -> Outcome<A::Map> {
        let [frames, rows, columns, _] = a.sides(map)?;
        let out = a.blank([frames, rows, columns, self.outputs])?;
        a.of_positions(&self.layer, map, &out, Onto::Nothing)?;
        Ok(out)
    }
}

/// A convolution of three frames, rows and columns (`WanCausalConv3d`), with a norm and SiLU before it or without.
#[derive(Clone, Debug)]
pub(super) struct Causal<L, N> {
    pub(super) norm: Option<N>,
    pub(super) layer: L,
    pub(super) outputs: usize,
}

impl<L, N> Causal<L, N> {
    pub(super) fn forward<A: Arithmetic<Layer = L, Norm = N>>(
        &self,
        a: &A,
        state: &mut State<A::Map>,
        which: usize,
        rows: Rows<A::Map>,
    ) -> Outcome<Option<Rows<A::Map>>> {
        let Rows { map, first, is_last } = rows;
        let [frames, count, columns, channels] = a.sides(&map)?;
        let halo = state.halos[which].take();
        let kept = match &halo {
            Some(halo) => a.sides(halo)?[1],
            None => 0,
        };
        let (begin, all) = (first - kept, kept + count);
        let buffer = a.blank([CACHED + frames, all, columns, channels])?;
        if let Some(halo) = halo {
            a.copy(&halo, &a.part(&buffer, 1, 0, kept)?)?;
        }
        let entered = a.part(&buffer, 1, kept, count)?;
        let cache = a.part(&state.caches[which], 1, first, count)?;
        a.copy(&cache, &a.part(&entered, 0, 0, CACHED)?)?;
        let reading = Reading {
            normed: self.norm.as_ref().map(|norm| (norm, true)),
            is_enlarged: false,
        };
        a.read(&map, &reading, 0, &a.part(&entered, 0, CACHED, frames)?)?;
        drop(map);
        a.copy(&a.part(&entered, 0, frames, CACHED)?, &cache)?;
        // With fewer rows before, the first row is among the results.
        let (above, below) = (usize::from(kept < 2), usize::from(is_last));
        if !is_last {
            let last = 2.min(all);
            let halo = a.blank([CACHED + frames, last, columns, channels])?;
            a.copy(&a.part(&buffer, 1, all - last, last)?, &halo)?;
            state.halos[which] = Some(halo);
        }
        let results = (above + all + below).saturating_sub(2);
        if results == 0 {
            return Ok(None);
        }
        let out = a.blank([frames, results, columns, self.outputs])?;
        let steps = Steps {
            before: [0, above, 1],
            after: [0, below, 1],
            ..Steps::EACH
        };
        a.convolve(&self.layer, &buffer, &steps, &out)?;
        Ok(Some(Rows {
            map: out,
            first: begin + 1 - above,
            is_last,
        }))
    }
}

/// `WanResidualBlock`.
#[derive(Clone, Debug)]
pub(super) struct Resnet<L, N> {
    pub(super) first: Causal<L, N>,
    pub(super) second: Causal<L, N>,
    /// Where the number of channels changes.
    pub(super) shortcut: Option<OfPositions<L>>,
}

impl<L, N> Resnet<L, N> {
    pub(super) fn forward<A: Arithmetic<Layer = L, Norm = N>>(
        &self,
        a: &A,
        state: &mut State<A::Map>,
        rows: Rows<A::Map>,
    ) -> Outcome<Option<Rows<A::Map>>> {
        let outer = match &self.shortcut {
            Some(shortcut) => shortcut.forward(a, &rows.map)?,
            None => rows.map.clone(),
        };
        state.pieces.push(Rows { map: outer, ..rows });
        let Some(inner) = self.first.forward(a, state, 0, rows)? else {
            return Ok(None);
        };
        let Some(out) = self.second.forward(a, state, 1, inner)? else {
            return Ok(None);
        };
        state.pieces.add_to(a, &out)?;
        Ok(Some(out))
    }
}

/// `WanAttentionBlock`, which needs whole frames.
#[derive(Clone, Debug)]
pub(super) struct Attention<L, N> {
    pub(super) norm: N,
    pub(super) project: OfPositions<L>,
    pub(super) out: L,
}

impl<L, N> Attention<L, N> {
    pub(super) fn forward<A: Arithmetic<Layer = L, Norm = N>>(
        &self,
        a: &A,
        state: &mut State<A::Map>,
        rows: Rows<A::Map>,
    ) -> Outcome<Option<Rows<A::Map>>> {
        let Some(map) = state.pieces.whole(a, rows)? else {
            return Ok(None);
        };
        let normed = a.blank(a.sides(&map)?)?;
        let reading = Reading {
            normed: Some((&self.norm, false)),
            is_enlarged: false,
        };
        a.read(&map, &reading, 0, &normed)?;
        let projected = self.project.forward(a, &normed)?;
        a.attend(&projected, &normed)?;
        a.of_positions(&self.out, &normed, &map, Onto::Itself)?;
        Ok(Some(Rows {
            map,
            first: 0,
            is_last: true,
        }))
    }
}

/// `WanResample` of a decoder: twice the rows and columns, and with a convolution in time twice the frames of all latents but
/// the first.
#[derive(Clone, Debug)]
pub(super) struct Enlarge<L> {
    pub(super) time: Option<L>,
    pub(super) space: L,
    pub(super) outputs: usize,
}

/// The rows that are enlarged.
pub(super) struct Enlarged<M> {
    /// Rows of the map before it was enlarged, with the index of the first. Frames that become two have twice the channels.
    sources: Vec<(usize, M)>,
    /// Frames that each frame of the sources becomes.
    times: usize,
    /// Sides of a piece of one row.
    pub(super) row: [usize; 4],
    /// Results that there are.
    pub(super) results: (usize, usize),
    /// Rows of the enlarged map that there are, and whether they are all.
    until: usize,
    is_last: bool,
}

impl<L> Enlarge<L> {
    /// Takes rows, and says which results follow.
    pub(super) fn take<A: Arithmetic<Layer = L>>(
        &self,
        a: &A,
        state: &mut State<A::Map>,
        rows: Rows<A::Map>,
        is_first_latent: bool,
    ) -> Outcome<Enlarged<A::Map>> {
        let Rows { map, first, is_last } = rows;
        let [frames, count, columns, _] = a.sides(&map)?;
        let (map, times) = match &self.time {
            Some(time) if !is_first_latent => {
                let cache = a.part(&state.caches[0], 1, first, count)?;
                (in_time(a, time, &cache, map)?, 2)
            }
            _ => (map, 1),
        };
        let until = 2 * (first + count);
        let results = (state.written, if is_last { until } else { until - 1 });
        let mut sources = Vec::new();
        if let Some(halo) = state.halos[0].take() {
            sources.push((first - 1, halo));
        }
        state.written = if is_last { 0 } else { results.1 };
        if !is_last {
            let [frames, _, columns, channels] = a.sides(&map)?;
            let halo = a.blank([frames, 1, columns, channels])?;
            a.copy(&a.part(&map, 1, count - 1, 1)?, &halo)?;
            state.halos[0] = Some(halo);
        }
        sources.push((first, map));
        Ok(Enlarged {
            sources,
            times,
            row: [frames * times, 1, 2 * columns, self.outputs],
            results,
            until,
            is_last,
        })
    }

    /// The results from `first` on.
    pub(super) fn results<A: Arithmetic<Layer = L>>(
        &self,
        a: &A,
        enlarged: &Enlarged<A::Map>,
        (first, count): (usize, usize),
    ) -> Outcome<Rows<A::Map>> {
        let [frames, _, columns, outputs] = enlarged.row;
        let is_last = enlarged.is_last && first + count == enlarged.results.1;
        let (above, below) = (usize::from(first == 0), usize::from(is_last));
        let (low, high) = (first + above - 1, first + count + 1 - below);
        debug_assert!(high <= enlarged.until, "rows that have not come");
        let channels = match enlarged.sources.first() {
            Some((_, source)) => a.sides(source)?[3] / enlarged.times,
            None => 0,
        };
        let buffer = a.blank([frames, high - low, columns, channels])?;
        let reading = Reading {
            normed: None,
            is_enlarged: true,
        };
        for (begin, source) in &enlarged.sources {
            let begin = 2 * begin;
            let end = begin + 2 * a.sides(source)?[1];
            let (from, to) = (low.max(begin), high.min(end));
            if from >= to {
                continue;
            }
            for frame in 0..enlarged.times {
                let source = a.part(source, 3, frame * channels, channels)?;
                let target = match enlarged.times {
                    1 => buffer.clone(),
                    _ => a.every_second_frame(&buffer, frame)?,
                };
                let target = a.part(&target, 1, from - low, to - from)?;
                a.read(&source, &reading, from - begin, &target)?;
            }
        }
        let out = a.blank([frames, count, columns, outputs])?;
        let steps = Steps {
            before: [0, above, 1],
            after: [0, below, 1],
            ..Steps::EACH
        };
        a.convolve(&self.space, &buffer, &steps, &out)?;
        Ok(Rows {
            map: out,
            first,
            is_last,
        })
    }
}

/// A convolution of three frames of each position, to twice the channels: two frames of each.
fn in_time<A: Arithmetic>(a: &A, layer: &A::Layer, cache: &A::Map, map: A::Map) -> Outcome<A::Map> {
    let [frames, count, columns, channels] = a.sides(&map)?;
    let buffer = a.blank([CACHED + frames, count, columns, channels])?;
    a.copy(cache, &a.part(&buffer, 0, 0, CACHED)?)?;
    a.copy(&map, &a.part(&buffer, 0, CACHED, frames)?)?;
    drop(map);
    a.copy(&a.part(&buffer, 0, frames, CACHED)?, cache)?;
    let out = a.blank([frames, count, columns, 2 * channels])?;
    a.convolve(layer, &buffer, &Steps::EACH, &out)?;
    Ok(out)
}

/// `WanResample` of an encoder: half the rows and columns, and with a convolution in time half the frames of all latents but
/// the first.
#[derive(Clone, Debug)]
pub(super) struct Halve<L> {
    pub(super) space: L,
    pub(super) time: Option<L>,
}

impl<L> Halve<L> {
    pub(super) fn forward<A: Arithmetic<Layer = L>>(
        &self,
        a: &A,
        state: &mut State<A::Map>,
        rows: Rows<A::Map>,
        is_first_latent: bool,
    ) -> Outcome<Option<Rows<A::Map>>> {
        let is_last = rows.is_last;
        let (map, first) = with_halo(a, &mut state.halos[0], rows)?;
        let [frames, count, columns, channels] = a.sides(&map)?;
        let results = if is_last { count / 2 } else { (count - 1) / 2 };
        if !is_last {
            state.halos[0] = Some(rest(a, &map, 2 * results)?);
        }
        if results == 0 {
            return Ok(None);
        }
        let steps = Steps {
            before: [0; 3],
            after: [0, usize::from(is_last), 1],
            strides: [1, 2, 2],
        };
        let sides = |frames| [frames, results, columns / 2, channels];
        let first = first / 2;
        let map = match &self.time {
            None => {
                let out = a.blank(sides(frames))?;
                a.convolve(&self.space, &map, &steps, &out)?;
                out
            }
            Some(time) => {
                let cache = a.part(&state.caches[0], 1, first, results)?;
                let buffer = a.blank(sides(1 + frames))?;
                let halved = a.part(&buffer, 0, 1, frames)?;
                a.convolve(&self.space, &map, &steps, &halved)?;
                drop(map);
                a.copy(&cache, &a.part(&buffer, 0, 0, 1)?)?;
                a.copy(&a.part(&buffer, 0, frames, 1)?, &cache)?;
                if is_first_latent {
                    halved
                } else {
                    let out = a.blank(sides(frames / 2))?;
                    let steps = Steps {
                        strides: [2, 1, 1],
                        ..Steps::EACH
                    };
                    a.convolve(time, &buffer, &steps, &out)?;
                    out
                }
            }
        };
        Ok(Some(Rows { map, first, is_last }))
    }
}

/// The rows after those that were not used before, and the index of the first of all.
fn with_halo<A: Arithmetic>(
    a: &A,
    halo: &mut Option<A::Map>,
    rows: Rows<A::Map>,
) -> Outcome<(A::Map, usize)> {
    let Some(halo) = halo.take() else {
        return Ok((rows.map, rows.first));
    };
    let [frames, count, columns, channels] = a.sides(&rows.map)?;
    let [_, kept, ..] = a.sides(&halo)?;
    let joined = a.blank([frames, kept + count, columns, channels])?;
    a.copy(&halo, &a.part(&joined, 1, 0, kept)?)?;
    a.copy(&rows.map, &a.part(&joined, 1, kept, count)?)?;
    Ok((joined, rows.first - kept))
}

/// A copy of the rows from `first` on.
fn rest<A: Arithmetic>(a: &A, map: &A::Map, first: usize) -> Outcome<A::Map> {
    let [frames, count, columns, channels] = a.sides(map)?;
    let rest = a.blank([frames, count - first, columns, channels])?;
    a.copy(&a.part(map, 1, first, count - first)?, &rest)?;
    Ok(rest)
}

/// Keeps rows for the end of a block (`AvgDown3D`): averaged where the block resizes its map.
pub(super) fn keep_averaged<A: Arithmetic>(
    a: &A,
    state: &mut State<A::Map>,
    blocks: Blocks,
    rows: &Rows<A::Map>,
) -> Outcome<()> {
    let rows = Rows {
        map: rows.map.clone(),
        ..*rows
    };
    let is_last = rows.is_last;
    let (map, first) = with_halo(a, &mut state.halos[0], rows)?;
    let [frames, count, columns, _] = a.sides(&map)?;
    let results = count / blocks.sides;
    if !is_last && results * blocks.sides < count {
        state.halos[0] = Some(rest(a, &map, results * blocks.sides)?);
    }
    if results == 0 {
        return Ok(());
    }
    let frames = frames.div_ceil(blocks.frames);
    let out = a.blank([frames, results, columns / blocks.sides, blocks.outputs])?;
    a.average_blocks(&a.part(&map, 1, 0, results * blocks.sides)?, blocks, &out)?;
    state.pieces.push(Rows {
        map: out,
        first: first / blocks.sides,
        is_last,
    });
    Ok(())
}
