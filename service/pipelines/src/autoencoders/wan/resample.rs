//! The layers that resize a map.

use ops::Steps;

use super::arithmetic::{Arithmetic, Outcome, Reading};
use super::layers::{CACHED, Rows, State};
use super::pieces::{rest, with_halo};

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
