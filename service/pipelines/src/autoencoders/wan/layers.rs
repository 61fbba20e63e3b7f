//! The layers, as they take the rows of a map that there are, and give those that follow from them.
//!
//! A convolution over rows needs the row after the one that it computes, so it is a row late: it keeps the last two rows of
//! its input (a halo) until the next ones come. Convolutions in time keep the last two frames of their input, from one latent
//! to the next (a cache). Each row enters a convolution once: it is normalized into a buffer beside the cached frames, and the
//! last frames of the buffer become the cache. A result depends on the same numbers, added in the same order, whatever pieces
//! the rows come in.

use ops::{Onto, Steps};

use super::arithmetic::{Arithmetic, Outcome, Reading};
use super::pieces::Pieces;

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
    pub(super) halos: [Option<M>; 2],
    pub(super) pieces: Pieces<M>,
    /// Rows that were computed.
    pub(super) written: usize,
}

impl<M> State<M> {
    pub(super) fn of(caches: Vec<M>) -> State<M> {
        State {
            caches,
            halos: [None, None],
            pieces: Pieces::none(),
            written: 0,
        }
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
    /// Whether it sees frames before its own.
    pub(super) in_time: bool,
}

impl<L, N> Causal<L, N> {
    /// Frames of its input that it remembers.
    pub(super) fn cached(&self) -> usize {
        if self.in_time { CACHED } else { 0 }
    }
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
        let cached = self.cached();
        let buffer = a.blank([cached + frames, all, columns, channels])?;
        if let Some(halo) = halo {
            a.copy(&halo, &a.part(&buffer, 1, 0, kept)?)?;
        }
        let entered = a.part(&buffer, 1, kept, count)?;
        let cache = match self.in_time {
            true => Some(a.part(&state.caches[which], 1, first, count)?),
            false => None,
        };
        if let Some(cache) = &cache {
            a.copy(cache, &a.part(&entered, 0, 0, cached)?)?;
        }
        let reading = Reading {
            normed: self.norm.as_ref().map(|norm| (norm, true)),
            is_enlarged: false,
        };
        a.read(&map, &reading, 0, &a.part(&entered, 0, cached, frames)?)?;
        drop(map);
        if let Some(cache) = &cache {
            a.copy(&a.part(&entered, 0, frames, cached)?, cache)?;
        }
        // With fewer rows before, the first row is among the results.
        let (above, below) = (usize::from(kept < 2), usize::from(is_last));
        if !is_last {
            let last = 2.min(all);
            let halo = a.blank([cached + frames, last, columns, channels])?;
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
