//! Rows that are kept for later ones of the same latent.

use std::collections::VecDeque;

use super::arithmetic::{Arithmetic, Blocks, Outcome};
use super::layers::{Rows, State};

/// Rows that wait to be added to later ones, in order.
pub(super) struct Pieces<M>(VecDeque<(usize, M)>);

impl<M> Pieces<M> {
    pub(super) fn none() -> Pieces<M> {
        Pieces(VecDeque::new())
    }
}

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
    pub(super) fn whole<A: Arithmetic<Map = M>>(&mut self, a: &A, rows: Rows<M>) -> Outcome<Option<M>> {
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

/// The rows after those that were not used before, and the index of the first of all.
pub(super) fn with_halo<A: Arithmetic>(
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
pub(super) fn rest<A: Arithmetic>(a: &A, map: &A::Map, first: usize) -> Outcome<A::Map> {
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
