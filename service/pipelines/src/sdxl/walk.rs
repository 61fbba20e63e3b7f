//! The walk of maps through the UNet, by their sizes: its memory, the shapes that cuDNN plans, and its operations.

use candle_core::DType;
use model::Flops;
use ops::{AttentionShape, MaskShape, Onto, Planned, Steps};

use super::attention::WIDEST;
use super::config::UnetConfig;
use super::convolution::{AROUND, HALVING};
use super::table::{Layer, Named};
use crate::adapters::ConvolutionRanks;
use crate::checkpoint::ComponentSet;
use crate::resident;

/// Sizes of what the UNet computes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Latents: one, or one under each of two conditions.
    pub items: usize,
    /// Rows and columns of a latent.
    pub sides: [usize; 2],
    /// Tokens of an item's text.
    pub text: usize,
}

/// A layer with the sides of its map, before and after it.
struct Visited {
    named: Named,
    before: [usize; 2],
    after: [usize; 2],
}

impl UnetConfig {
    /// The layers in order, over a latent of these sides.
    fn visited(&self, sides: [usize; 2]) -> Vec<Visited> {
        let mut kept: Vec<[usize; 2]> = Vec::new();
        let mut now = sides;
        let visit = |named: Named| {
            let before = now;
            match named.layer {
                Layer::Keep => kept.push(now),
                Layer::Halve { .. } => now = now.map(|side| side.div_ceil(2)),
                Layer::Double { .. } => now = kept.last().copied().unwrap_or(now),
                Layer::Resnet { skip, .. } if skip > 0 => {
                    kept.pop();
                }
                Layer::Resnet { .. } | Layer::Attention { .. } => {}
            }
            Visited {
                named,
                before,
                after: now,
            }
        };
        self.layers().into_iter().map(visit).collect()
    }

    /// Bytes of the keys and values that the layers of attention keep of texts with this many tokens in all.
    pub fn text_bytes(&self, tokens: usize, dtype: DType) -> u64 {
        let width = |named: Named| match named.layer {
            Layer::Attention { channels, depth, .. } => 2 * channels * depth,
            _ => 0,
        };
        let widths: usize = self.layers().into_iter().map(width).sum();
        (widths * tokens * dtype.size_in_bytes()) as u64
    }

    /// Predicted activation bytes of a prediction, but for [`UnetConfig::text_bytes`].
    pub fn scratch(&self, sizes: Sizes, dtype: DType) -> u64 {
        self.scratch_with(sizes, dtype, &ConvolutionRanks::default())
    }

    /// As [`UnetConfig::scratch`], with terms of adapters on convolutions.
    pub(super) fn scratch_with(&self, sizes: Sizes, dtype: DType, ranks: &ConvolutionRanks<'_>) -> u64 {
        let mut account = Account::new(sizes, dtype, ranks);
        let finest = self.finest();
        account.map = account.bytes(self.in_channels, sizes.sides);
        let both = (sizes.sides, sizes.sides);
        account.convolve("conv_in", (self.in_channels, finest), both, 9);
        for Visited { named, before, after } in self.visited(sizes.sides) {
            account.visit(&named, (before, after));
        }
        account.note(account.map);
        account.convolve("conv_out", (finest, self.out_channels), both, 9);
        let of_text = sizes.items * sizes.text * self.cross_attention_dim;
        let embedded = sizes.items * (self.projection_class_embeddings_input_dim + 4 * self.time_width());
        // On a CPU also the buffers in which threads pack the operands of convolutions.
        let packing = resident::packing_bytes(dtype);
        (account.peak + (of_text + embedded) * dtype.size_in_bytes()) as u64 + packing
    }

    /// Shapes of a prediction for which cuDNN is used, each once, in order of use. `ranks` are those of terms of adapters on
    /// convolutions.
    pub(super) fn planned(&self, sizes: Sizes, dtype: DType, ranks: &ConvolutionRanks<'_>) -> Vec<Planned> {
        let mut all = Vec::new();
        let mut add = |shape: Option<Planned>| {
            if let Some(shape) = shape.filter(|shape| !all.contains(shape)) {
                all.push(shape);
            }
        };
        // The convolution of a layer, and those of its terms.
        let convolution =
            |name: &str, (from, to): (usize, usize), [height, width]: [usize; 2], steps: &Steps| {
                let map = [sizes.items, height, width, from];
                let own = Planned::convolution(&map, &[to, from, 3, 3], steps, dtype);
                let terms = ranks
                    .of(name)
                    .map(|rank| Planned::convolution_alone(&map, &[rank, from, 3, 3], steps, dtype));
                std::iter::once(own).chain(terms).collect::<Vec<_>>()
            };
        let finest = self.finest();
        let first = convolution("conv_in", (self.in_channels, finest), sizes.sides, &AROUND);
        first.into_iter().for_each(&mut add);
        for Visited { named, before, after } in self.visited(sizes.sides) {
            match named.layer {
                Layer::Keep => {}
                Layer::Halve { channels } => convolution(&named.name, (channels, channels), before, &HALVING)
                    .into_iter()
                    .for_each(&mut add),
                Layer::Double { channels } => convolution(&named.name, (channels, channels), after, &AROUND)
                    .into_iter()
                    .for_each(&mut add),
                Layer::Resnet {
                    channels: (from, to), ..
                } => {
                    let part = |part: &str| format!("{}.{part}", named.name);
                    let both = convolution(&part("conv1"), (from, to), after, &AROUND).into_iter();
                    both.chain(convolution(&part("conv2"), (to, to), after, &AROUND))
                        .for_each(&mut add);
                }
                Layer::Attention { channels, heads, .. } => {
                    let tokens = after[0] * after[1];
                    let own = AttentionShape {
                        batch: sizes.items,
                        ..AttentionShape::of_rows(
                            tokens,
                            (heads, channels / heads),
                            (3 * channels, channels),
                            dtype,
                            MaskShape::None,
                        )
                    };
                    let rows = |tokens: usize, row: usize| [tokens * row, row, channels / heads];
                    let text = AttentionShape {
                        keys: sizes.text,
                        q: rows(tokens, channels),
                        k: rows(sizes.text, 2 * channels),
                        v: rows(sizes.text, 2 * channels),
                        ..own.clone()
                    };
                    add(Some(Planned::Attention(own)));
                    add(Some(Planned::Attention(text)));
                }
            }
        }
        let last = convolution("conv_out", (finest, self.out_channels), sizes.sides, &AROUND);
        last.into_iter().for_each(&mut add);
        all
    }

    /// Operations of a prediction, in the products of a component's weights and in attention.
    pub(super) fn flops(&self, components: &ComponentSet, name: &str, sizes: Sizes) -> Flops {
        let visited = self.visited(sizes.sides);
        let rows_of = |tensor: &str| {
            let of = visited.iter().find(|visited| {
                let rest = tensor.strip_prefix(visited.named.name.as_str());
                !visited.named.name.is_empty() && rest.is_some_and(|rest| rest.starts_with('.'))
            });
            let positions = of.map_or(0, |visited| visited.after[0] * visited.after[1]);
            let rows = if tensor.contains(".attn2.to_k.") || tensor.contains(".attn2.to_v.") {
                sizes.text
            } else if tensor.contains(".time_emb_proj.") {
                1
            } else {
                positions
            };
            sizes.items * rows
        };
        let attention = visited.iter().map(|visited| match visited.named.layer {
            Layer::Attention { channels, depth, .. } => {
                let tokens = visited.after[0] * visited.after[1];
                4 * sizes.items * depth * tokens * (tokens + sizes.text) * channels
            }
            _ => 0,
        });
        let attention: usize = attention.sum();
        components.flops_of_products(name, rows_of) + attention as u64
    }
}

/// Live bytes layer by layer.
struct Account<'a> {
    sizes: Sizes,
    ranks: &'a ConvolutionRanks<'a>,
    /// Bytes of a number.
    number: usize,
    /// Bytes of the map after the layers that were passed, and whether it is one of those that are kept.
    map: usize,
    is_kept: bool,
    kept: Vec<usize>,
    peak: usize,
}

impl<'a> Account<'a> {
    fn new(sizes: Sizes, dtype: DType, ranks: &'a ConvolutionRanks<'a>) -> Account<'a> {
        Account {
            sizes,
            ranks,
            number: dtype.size_in_bytes(),
            map: 0,
            is_kept: false,
            kept: Vec::new(),
            peak: 0,
        }
    }

    fn bytes(&self, channels: usize, [height, width]: [usize; 2]) -> usize {
        self.sizes.items * height * width * channels * self.number
    }

    /// Notes the bytes of the map, of those that are kept, and of `further`.
    fn note(&mut self, further: usize) {
        let map = if self.is_kept { 0 } else { self.map };
        self.peak = self.peak.max(self.kept.iter().sum::<usize>() + map + further);
    }

    /// Bytes of a filter in use and of the workspace of its convolution. Dtypes narrower than f32 imply a card.
    fn workspace(
        &self,
        channels: (usize, usize),
        (before, after): ([usize; 2], [usize; 2]),
        taps: usize,
        onto: Onto,
    ) -> usize {
        let positions = |[height, width]: [usize; 2]| self.sizes.items * height * width;
        let filter = if taps > 1 {
            channels.0 * channels.1 * taps * self.number
        } else {
            0
        };
        let workspace = match self.number < 4 {
            true => ops::convolve_scratch(
                (positions(before), positions(after)),
                channels,
                taps,
                self.number,
                onto,
            ),
            false => 0,
        };
        filter + workspace
    }

    /// Bytes of the largest term of a convolution of this name: the map of as many channels as its rank, then the filter down and
    /// the workspace, or the map that is added and the workspace of its product.
    fn term(
        &self,
        name: &str,
        (from, to): (usize, usize),
        (before, after): ([usize; 2], [usize; 2]),
        taps: usize,
    ) -> usize {
        let of_rank = |rank: usize| {
            let down = self.workspace((from, rank), (before, after), taps, Onto::Nothing);
            let up = self.workspace((rank, to), (after, after), 1, Onto::Nothing);
            self.bytes(rank, after) + down.max(self.bytes(to, after) + up)
        };
        self.ranks.of(name).map(of_rank).max().unwrap_or(0)
    }

    fn become_map(&mut self, bytes: usize) {
        self.map = bytes;
        self.is_kept = false;
    }

    /// A convolution of this name of the map into a new one.
    fn convolve(
        &mut self,
        name: &str,
        channels: (usize, usize),
        sides: ([usize; 2], [usize; 2]),
        taps: usize,
    ) {
        let out = self.bytes(channels.1, sides.1);
        let workspace = self.workspace(channels, sides, taps, Onto::Nothing);
        self.note(out + workspace.max(self.term(name, channels, sides, taps)));
        self.become_map(out);
    }

    fn visit(&mut self, Named { name, layer, .. }: &Named, (before, after): ([usize; 2], [usize; 2])) {
        match *layer {
            Layer::Keep => {
                self.kept.push(self.map);
                self.is_kept = true;
            }
            Layer::Halve { channels } => self.convolve(name, (channels, channels), (before, after), 9),
            Layer::Double { channels } => {
                let large = self.bytes(channels, after);
                self.note(large);
                self.become_map(large);
                self.convolve(name, (channels, channels), (after, after), 9);
            }
            Layer::Resnet { channels, skip } => self.resnet(name, channels, skip, after),
            Layer::Attention {
                channels,
                heads,
                depth: _,
            } => {
                let text = self.sizes.text;
                let tokens = after[0] * after[1];
                let rows = self.bytes(channels, after);
                let scores = match self.number < 4 {
                    true => ops::attention_workspace(heads, tokens, tokens.max(text)),
                    false => 0,
                };
                // On a CPU, GEGLU copies the buffer that its halves share with its result, for each of them.
                let copied = if self.number < 4 { 0 } else { 2 * WIDEST * rows };
                self.note((2 + WIDEST) * rows + scores.max(copied));
            }
        }
    }

    fn resnet(&mut self, name: &str, (from, to): (usize, usize), skip: usize, sides: [usize; 2]) {
        let input = self.bytes(from, sides);
        if skip > 0 {
            self.note(input);
            self.kept.pop();
            self.become_map(input);
        }
        let (inner, both) = (self.bytes(to, sides), (sides, sides));
        let of = |part: &str, channels: (usize, usize), taps: usize, onto: Onto| {
            let term = self.term(&format!("{name}.{part}"), channels, both, taps);
            term.max(self.workspace(channels, both, taps, onto))
        };
        let conv1 = input + inner + of("conv1", (from, to), 9, Onto::Nothing);
        let conv2 = 2 * inner + of("conv2", (to, to), 9, Onto::Nothing);
        let shortcut = inner + of("conv_shortcut", (from, to), 1, Onto::Itself);
        self.note(conv1.max(conv2));
        if from != to {
            self.note(shortcut);
        }
        self.become_map(inner);
    }
}
