//! The walk of rows through the layers of a half, one latent after the other.

use std::mem;

use model::StageError;

use super::arithmetic::{Arithmetic, Outcome};
use super::layers::{CACHED, Rows, State};
use super::pieces::keep_averaged;
use super::table::Layer;

/// What a half remembers of the latents before, and the rows of the present one on their way.
pub(super) struct Stream<'a, L, N, M> {
    layers: &'a [Layer<L, N>],
    states: Vec<State<M>>,
    is_first_latent: bool,
    /// Whether a latent was begun and not finished: what is remembered belongs to no latent then.
    is_broken: bool,
}

/// Takes the rows of the last map.
pub(super) type Sink<'s, M> = &'s mut dyn FnMut(Rows<M>) -> Outcome<()>;

impl<'a, L, N, M: Clone> Stream<'a, L, N, M> {
    /// For maps of this height, width and number of channels.
    pub(super) fn new<A: Arithmetic<Layer = L, Norm = N, Map = M>>(
        a: &A,
        layers: &'a [Layer<L, N>],
        [height, width, channels]: [usize; 3],
    ) -> Outcome<Stream<'a, L, N, M>> {
        let mut sides = [CACHED, height, width, channels];
        let mut states = Vec::with_capacity(layers.len());
        for layer in layers {
            let mut caches = Vec::new();
            match layer {
                Layer::Causal(layer) => {
                    if layer.in_time {
                        caches.push(a.zeros(sides)?);
                    }
                    sides[3] = layer.outputs;
                }
                Layer::Resnet(layer) => {
                    for layer in [&layer.first, &layer.second] {
                        if layer.in_time {
                            caches.push(a.zeros(sides)?);
                        }
                        sides[3] = layer.outputs;
                    }
                }
                Layer::Enlarge(layer) => {
                    if layer.time.is_some() {
                        caches.push(a.zeros(sides)?);
                    }
                    sides = [CACHED, 2 * sides[1], 2 * sides[2], layer.outputs];
                }
                Layer::Halve(layer) => {
                    sides = [CACHED, sides[1] / 2, sides[2] / 2, sides[3]];
                    if layer.time.is_some() {
                        caches.push(a.zeros([1, sides[1], sides[2], sides[3]])?);
                    }
                }
                Layer::OfPositions(_)
                | Layer::Attention(_)
                | Layer::Keep(_)
                | Layer::Add { .. }
                | Layer::AddRepeated { .. } => {}
            }
            states.push(State::of(caches));
        }
        Ok(Stream {
            layers,
            states,
            is_first_latent: true,
            is_broken: false,
        })
    }

    /// Whether no latent has passed.
    pub(super) fn is_first_latent(&self) -> bool {
        self.is_first_latent
    }

    /// Passes the rows of the frames of one latent through all layers. `pieces` gives them in order.
    ///
    /// # Errors
    /// [`StageError::BadInput`] after a latent that was not finished; errors of the layers and of `sink`.
    pub(super) fn next<A: Arithmetic<Layer = L, Norm = N, Map = M>>(
        &mut self,
        a: &A,
        pieces: &mut dyn Iterator<Item = Outcome<Rows<M>>>,
        sink: Sink<'_, M>,
    ) -> Outcome<()> {
        if mem::replace(&mut self.is_broken, true) {
            return Err(StageError::BadInput(
                "a latent was not finished: the film begins again".to_owned(),
            ));
        }
        for piece in pieces {
            self.push(a, 0, piece?, sink)?;
        }
        self.is_first_latent = false;
        self.is_broken = false;
        Ok(())
    }

    fn push<A: Arithmetic<Layer = L, Norm = N, Map = M>>(
        &mut self,
        a: &A,
        index: usize,
        rows: Rows<M>,
        sink: Sink<'_, M>,
    ) -> Outcome<()> {
        a.check_cancelled()?;
        let (layers, is_first) = (self.layers, self.is_first_latent);
        let Some(layer) = layers.get(index) else {
            return sink(rows);
        };
        let state = &mut self.states[index];
        let results = match layer {
            Layer::OfPositions(layer) => Some(Rows {
                map: layer.forward(a, &rows.map)?,
                ..rows
            }),
            Layer::Causal(layer) => layer.forward(a, state, 0, rows)?,
            Layer::Resnet(layer) => layer.forward(a, state, rows)?,
            Layer::Attention(layer) => layer.forward(a, state, rows)?,
            Layer::Halve(layer) => layer.forward(a, state, rows, is_first)?,
            Layer::Keep(blocks) => {
                keep_averaged(a, state, *blocks, &rows)?;
                Some(rows)
            }
            Layer::Add { kept_by } => {
                self.states[*kept_by].pieces.add_to(a, &rows)?;
                Some(rows)
            }
            Layer::AddRepeated { kept_by, blocks } => {
                let dropped = if is_first { blocks.frames - 1 } else { 0 };
                let kept = &mut self.states[*kept_by].pieces;
                kept.add_repeated_to(a, *blocks, dropped, &rows)?;
                Some(rows)
            }
            Layer::Enlarge(layer) => {
                let enlarged = layer.take(a, state, rows, is_first)?;
                let (first, until) = enlarged.results;
                // Pieces of about equal numbers of rows.
                let pieces = (until - first).div_ceil(a.rows_of_piece(enlarged.row));
                let rows = (until - first).div_ceil(pieces.max(1));
                for first in (first..until).step_by(rows.max(1)) {
                    let piece = (first, rows.min(until - first));
                    let rows = layer.results(a, &enlarged, piece)?;
                    self.push(a, index + 1, rows, sink)?;
                }
                None
            }
        };
        match results {
            Some(rows) => self.push(a, index + 1, rows, sink),
            None => Ok(()),
        }
    }
}

/// The stream of an arithmetic's maps.
pub(super) type StreamOf<'a, A> =
    Stream<'a, <A as Arithmetic>::Layer, <A as Arithmetic>::Norm, <A as Arithmetic>::Map>;
