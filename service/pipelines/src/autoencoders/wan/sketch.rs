//! The arithmetic of maps of which only the sizes are there: it counts their bytes, and lists the shapes for which cuDNN is
//! asked.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use candle_core::DType;
use ops::{AttentionShape, MaskShape, Onto, Planned, Steps};

use super::arithmetic::{Arithmetic, Blocks, Outcome, Reading, Sides};
use super::table::Source;
use crate::autoencoders::pass::StripSize;

/// Counts bytes of maps.
pub(super) struct Sketch {
    dtype: DType,
    pieces: StripSize,
    bytes: Rc<Bytes>,
    /// `None` where only the bytes are of interest.
    planned: Option<RefCell<Vec<Planned>>>,
}

#[derive(Default)]
struct Bytes {
    alive: Cell<usize>,
    peak: Cell<usize>,
}

impl Bytes {
    /// Notes that more bytes are taken for a moment.
    fn note(&self, more: usize) {
        self.peak.set(self.peak.get().max(self.alive.get() + more));
    }
}

/// A map, or a part of one, whose bytes count as long as a part of it is there.
#[derive(Clone)]
pub(super) struct Sketched {
    sides: Sides,
    _whole: Rc<Held>,
}

struct Held {
    size: usize,
    bytes: Rc<Bytes>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let alive = &self.bytes.alive;
        alive.set(alive.get().saturating_sub(self.size));
    }
}

/// The shape of a weight.
pub(super) struct Shape(Vec<usize>);

impl Source for &Sketch {
    type Layer = Shape;
    type Norm = ();

    fn layer(&mut self, _name: &str, shape: &[usize]) -> Outcome<Shape> {
        Ok(Shape(shape.to_vec()))
    }

    fn of_last_frame(&mut self, _name: &str, shape: &[usize; 5]) -> Outcome<Shape> {
        let &[outputs, inputs, _, rows, columns] = shape;
        Ok(Shape(vec![outputs, inputs, rows, columns]))
    }

    fn norm(&mut self, _name: &str, _shape: &[usize]) -> Outcome<()> {
        Ok(())
    }
}

impl Sketch {
    pub(super) fn new(dtype: DType, pieces: StripSize) -> Sketch {
        Sketch {
            dtype,
            pieces,
            bytes: Rc::default(),
            planned: None,
        }
    }

    /// One that lists shapes.
    pub(super) fn of_shapes(dtype: DType, pieces: StripSize) -> Sketch {
        Sketch {
            planned: Some(RefCell::default()),
            ..Sketch::new(dtype, pieces)
        }
    }

    /// The most bytes that were alive at once.
    pub(super) fn peak(&self) -> usize {
        self.bytes.peak.get()
    }

    /// The shapes in order of use, each once.
    pub(super) fn planned(self) -> Vec<Planned> {
        self.planned.map(RefCell::into_inner).unwrap_or_default()
    }

    /// Notes that this many bytes are taken beside the maps for a moment.
    pub(super) fn note(&self, more: usize) {
        self.bytes.note(more);
    }

    /// Dtypes narrower than f32 imply a card: the CPU computes in f32.
    fn on_card(&self) -> bool {
        self.dtype.size_in_bytes() < 4
    }

    fn plan(&self, shape: impl FnOnce() -> Option<Planned>) {
        let Some(planned) = &self.planned else {
            return;
        };
        let mut planned = planned.borrow_mut();
        if let Some(shape) = shape().filter(|shape| !planned.contains(shape)) {
            planned.push(shape);
        }
    }

    /// Filter and workspace of a convolution.
    fn note_convolution(&self, weight: &[usize], positions: (usize, usize), onto: Onto) {
        let number = self.dtype.size_in_bytes();
        let taps: usize = weight[2..].iter().product();
        let (outputs, inputs) = (weight[0], weight[1]);
        let filter = if taps > 1 {
            taps * inputs * outputs * number
        } else {
            0
        };
        let workspace = match self.on_card() {
            true => ops::convolve_scratch(positions, (inputs, outputs), taps, number, onto),
            false => 0,
        };
        self.note(filter + workspace);
    }
}

fn positions(sides: Sides) -> usize {
    sides[..3].iter().product()
}

impl Arithmetic for Sketch {
    type Map = Sketched;
    type Layer = Shape;
    type Norm = ();

    fn sides(&self, map: &Sketched) -> Outcome<Sides> {
        Ok(map.sides)
    }

    fn blank(&self, sides: Sides) -> Outcome<Sketched> {
        let size = sides.iter().product::<usize>() * self.dtype.size_in_bytes();
        let bytes = Rc::clone(&self.bytes);
        bytes.alive.set(bytes.alive.get() + size);
        bytes.note(0);
        Ok(Sketched {
            sides,
            _whole: Rc::new(Held { size, bytes }),
        })
    }

    fn zeros(&self, sides: Sides) -> Outcome<Sketched> {
        self.blank(sides)
    }

    fn part(&self, map: &Sketched, axis: usize, _first: usize, count: usize) -> Outcome<Sketched> {
        let mut part = map.clone();
        part.sides[axis] = count;
        Ok(part)
    }

    fn every_second_frame(&self, map: &Sketched, _first: usize) -> Outcome<Sketched> {
        self.part(map, 0, 0, map.sides[0] / 2)
    }

    fn read(&self, _map: &Sketched, _how: &Reading<'_, ()>, _row: usize, _out: &Sketched) -> Outcome<()> {
        Ok(())
    }

    fn copy(&self, _map: &Sketched, _out: &Sketched) -> Outcome<()> {
        Ok(())
    }

    fn add(&self, _map: &Sketched, _out: &Sketched) -> Outcome<()> {
        Ok(())
    }

    fn convolve(&self, layer: &Shape, map: &Sketched, steps: &Steps, out: &Sketched) -> Outcome<()> {
        let at = (positions(map.sides), positions(out.sides));
        self.note_convolution(&layer.0, at, Onto::Nothing);
        self.plan(|| Planned::convolution(&map.sides, &layer.0, steps, self.dtype));
        Ok(())
    }

    fn of_positions(&self, layer: &Shape, map: &Sketched, out: &Sketched, onto: Onto) -> Outcome<()> {
        let at = (positions(map.sides), positions(out.sides));
        self.note_convolution(&layer.0, at, onto);
        Ok(())
    }

    fn attend(&self, projected: &Sketched, out: &Sketched) -> Outcome<()> {
        let [_, rows, columns, channels] = out.sides;
        let tokens = rows * columns;
        if self.on_card() {
            self.note(ops::attention_workspace(1, tokens, tokens));
        }
        let of = |row: usize| [tokens * row, row, row];
        let row = projected.sides[3];
        self.plan(|| {
            let (head, rows) = ((1, channels), (row, channels));
            Some(Planned::Attention(AttentionShape {
                q: of(row),
                k: of(row),
                v: of(row),
                out: of(channels),
                ..AttentionShape::of_rows(tokens, head, rows, self.dtype, MaskShape::None)
            }))
        });
        Ok(())
    }

    fn average_blocks(&self, _map: &Sketched, _blocks: Blocks, _out: &Sketched) -> Outcome<()> {
        Ok(())
    }

    fn add_repeated(
        &self,
        _map: &Sketched,
        _blocks: Blocks,
        _from: [usize; 2],
        _out: &Sketched,
    ) -> Outcome<()> {
        Ok(())
    }

    fn patched(&self, frames: &Sketched, patch: usize) -> Outcome<Sketched> {
        if patch == 1 {
            return Ok(frames.clone());
        }
        let [count, height, width, channels] = frames.sides;
        self.blank([count, height / patch, width / patch, channels * patch * patch])
    }

    fn unpatch(&self, _map: &Sketched, _patch: usize, _frames: &Sketched) -> Outcome<()> {
        Ok(())
    }

    fn number(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    fn bytes_of_piece(&self) -> usize {
        self.pieces.bytes(!self.on_card())
    }

    fn check_cancelled(&self) -> Outcome<()> {
        Ok(())
    }
}
