//! Activation memory of the walk through half an autoencoder, layer by layer as [`super::half`] and [`super::resnet`]
//! walk.

use candle_core::DType;
use ops::Onto;

use super::kernels::{Kernels, Resize};
use super::pass::{Map, Pass, StripSize};
use super::resnet::shortcut_rows;
use super::table::{Layer, Layers};

/// Tracks live bytes layer by layer, and the layers that were passed.
pub(super) struct Account {
    kernels: Kernels,
    size: StripSize,
    pub(super) dtype: DType,
    /// The map after the layers that were passed.
    map: Map,
    /// Bytes of the memory of this map, which may be part of a larger map.
    held: usize,
    pub(super) peak: usize,
    pub(super) seen: Vec<PlannedLayer>,
}

/// A layer for which cuDNN may have a plan.
#[derive(Clone, Copy)]
pub(super) enum PlannedLayer {
    /// A convolution, with the number of rows of its strips.
    Convolution(Pass, usize),
    /// Attention over a map, frame by frame.
    Attention(Map),
}

/// Bytes that a convolution takes in addition to the maps that it reads and writes.
struct Taken {
    in_strips: bool,
    /// The filter, the buffer of strips, and strips of results.
    held: usize,
    /// A strip of results.
    strip: usize,
    /// Workspace of a card during the convolution: when overwriting, or accumulating.
    new: usize,
    onto: usize,
}

impl Account {
    /// Account of the layers of a half that processes this map in strips of `size`.
    pub(super) fn of(layers: &Layers, map: Map, size: StripSize, dtype: DType) -> Account {
        let mut account = Account {
            kernels: layers.kernels,
            size,
            dtype,
            map,
            held: 0,
            peak: 0,
            seen: Vec::new(),
        };
        account.held = account.bytes(map);
        for (_, layer) in &layers.list {
            account.pass(*layer);
        }
        account
    }

    fn pass(&mut self, layer: Layer) {
        match layer {
            // On the smallest maps only: its memory is never the peak.
            Layer::OfPositions { .. } => {}
            Layer::Convolution {
                channels,
                enlarged,
                halved,
            } => self.convolve(channels.1, (enlarged, halved), false),
            Layer::Resnet {
                channels,
                in_place: false,
            } => self.resnet(channels.1),
            Layer::Resnet {
                channels,
                in_place: true,
            } => self.resnet_in_place(channels.1),
            Layer::Attention { .. } => self.attention(),
            Layer::Last { channels } => {
                let pass = self.normed(self.map, channels.1);
                let taken = self.take(pass, self.strips_apart());
                self.note(self.held + self.bytes(pass.to) + taken.held + taken.new);
                self.become_map(pass.to);
            }
        }
    }

    fn note(&mut self, alive: usize) {
        self.peak = self.peak.max(alive);
    }

    fn bytes(&self, map: Map) -> usize {
        map.channels * map.sides.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    fn become_map(&mut self, map: Map) {
        self.map = map;
        self.held = self.bytes(map);
    }

    /// Dtypes narrower than f32 imply a card: the CPU computes in f32.
    fn on_card(&self) -> bool {
        self.dtype.size_in_bytes() < 4
    }

    /// Strips of results of a convolution that does not write to a new map of rows.
    fn strips_apart(&self) -> usize {
        match self.size {
            StripSize::LatentRows { .. } => 0,
            StripSize::Bytes(_) => 1,
        }
    }

    /// A normed convolution of a map.
    fn normed(&self, from: Map, channels: usize) -> Pass {
        Pass::new(self.kernels, from, channels, (Resize::NONE, Resize::NONE), true)
    }

    /// A convolution with `strips` strips of results.
    fn take(&mut self, pass: Pass, strips: usize) -> Taken {
        let number = self.dtype.size_in_bytes();
        let rows = self.size.rows(&pass, strips, self.dtype, !self.on_card());
        self.seen.push(PlannedLayer::Convolution(pass, rows));
        let (buffer, strip) = (pass.buffer(rows), pass.strip(rows));
        let bytes = |shape: [usize; 4]| shape.iter().product::<usize>() * number;
        let positions = |shape: [usize; 4]| shape[..3].iter().product::<usize>();
        let workspace = |onto: Onto| match self.on_card() {
            true => {
                let positions = (positions(buffer), positions(strip));
                ops::convolve_scratch(positions, pass.channels(), pass.taps(), number, onto)
            }
            false => 0,
        };
        let of_buffer = if pass.is_plain { 0 } else { bytes(buffer) };
        Taken {
            in_strips: rows < pass.to.sides[0],
            held: pass.filter_numbers() * number + of_buffer + strips * bytes(strip),
            strip: bytes(strip),
            new: workspace(Onto::Nothing),
            onto: workspace(Onto::Itself),
        }
    }

    /// A convolution of the map into a new one.
    fn convolve(&mut self, channels: usize, resized: (Resize, Resize), is_normed: bool) {
        let pass = Pass::new(self.kernels, self.map, channels, resized, is_normed);
        let taken = self.take(pass, 0);
        self.note(self.held + self.bytes(pass.to) + taken.held + taken.new);
        self.become_map(pass.to);
    }

    fn resnet(&mut self, channels: usize) {
        let (from, outer) = (self.map, self.held);
        self.convolve(channels, (Resize::NONE, Resize::NONE), true);
        let inner = self.held;
        let is_shortened = from.channels != channels;
        match self.size {
            StripSize::LatentRows { .. } => self.add_in_rows(outer, inner, is_shortened),
            StripSize::Bytes(_) => {
                if is_shortened {
                    let product = self.shortcut_product();
                    self.note(outer + 2 * inner + product);
                }
                let taken = self.take(self.normed(self.map, channels), 1);
                self.note(2 * inner + taken.held + taken.new);
            }
        }
    }

    /// The second convolution of a block onto the outer map, or with the shortcut's strips over the inner one.
    fn add_in_rows(&mut self, outer: usize, inner: usize, is_shortened: bool) {
        let taken = self.take(self.normed(self.map, self.map.channels), 0);
        self.note(outer + inner + taken.held);
        let inner = if taken.in_strips { inner } else { 0 };
        if !is_shortened {
            return self.note(outer + inner + taken.held + taken.onto);
        }
        let product = if self.on_card() { taken.strip } else { 0 };
        self.note(outer + inner + taken.held + taken.strip + product);
        let outer = if taken.in_strips { outer } else { 0 };
        self.note(outer + inner + taken.held + taken.strip + taken.onto);
    }

    /// The product of a strip of a shortcut on a card, before its bias.
    fn shortcut_product(&self) -> usize {
        if !self.on_card() {
            return 0;
        }
        let Map { channels, sides } = self.map;
        let [height, frames, width] = sides;
        let most = self.size.bytes(false);
        let rows = shortcut_rows(&[height, frames, width, channels], self.dtype, most);
        self.bytes(self.map) / height * rows
    }

    /// A block in the memory of its level's first map, where that has twice its channels.
    fn resnet_in_place(&mut self, channels: usize) {
        let from = self.map;
        let is_whole = self.held == self.bytes(from);
        let is_first = is_whole && from.channels == 2 * channels;
        if !is_first && (is_whole || from.channels != channels) {
            return self.resnet(channels);
        }
        let first = self.take(self.normed(from, channels), 1 + usize::from(is_first));
        // The product of the shortcut, before its bias.
        let product = if is_first && self.on_card() {
            first.strip
        } else {
            0
        };
        self.note(self.held + first.held + first.new.max(product));
        self.map.channels = channels;
        let second = self.take(self.normed(self.map, channels), 1);
        self.note(self.held + second.held + second.new);
    }

    fn attention(&mut self) {
        self.seen.push(PlannedLayer::Attention(self.map));
        let [height, frames, width] = self.map.sides;
        let of_frame = height * width;
        // Scores where cuDNN has no plan, or a product. The CPU has a block of scores per thread.
        let besides = match self.on_card() {
            true => ops::attention_workspace(1, of_frame, frames * of_frame).max(self.held),
            false => 0,
        };
        // The map, its normalized copy, and three projections.
        self.note(5 * self.held + besides);
    }
}
