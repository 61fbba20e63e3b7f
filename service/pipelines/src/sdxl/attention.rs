//! Attention of the UNet: diffusers' `Transformer2DModel` with linear projections, of `BasicTransformerBlock`s with GEGLU. A map
//! `[items, h, w, c]` is its tokens `[items, h w, c]` in memory.

use std::cell::OnceCell;

use candle_core::{Result, Tensor};
use gpu::{BlockPlace, MissingTensor, WeightStream};
use model::StageError;
use ops::{
    Epilogue, Mask, Nonlinearity, Scratch, add_residual, linears_into, norm_modulate, residual_norm_modulate,
};

use super::resnet::{After, group_norm, normalized};
use crate::adapters::AdaptedTensors;
use crate::layer_norm::LayerNorm;
use crate::linear::Linear;
use crate::maps::GroupNorm;

type Found<T> = std::result::Result<T, MissingTensor>;

/// Epsilon of the group norm before attention, which is not that of residual blocks.
const GROUP_EPSILON: f64 = 1e-6;

/// Epsilon of the norms within the layers.
const EPSILON: f64 = 1e-5;

/// Widths of the hidden states that a row of the widest buffer has: both halves of GEGLU, of four widths each.
pub(super) const WIDEST: usize = 8;

/// Layers of attention at one place of the UNet.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    norm: GroupNorm,
    proj_in: Linear,
    layers: Vec<AttentionLayer>,
    proj_out: Linear,
    shape: Shape,
}

/// Dimensions of an attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    channels: usize,
    heads: usize,
}

/// `BasicTransformerBlock`.
#[derive(Clone, Debug)]
struct AttentionLayer {
    norm1: LayerNorm,
    own: Projections,
    norm2: LayerNorm,
    text: Projections,
    norm3: LayerNorm,
    widen: Linear,
    narrow: Linear,
}

/// The projections of one attention.
#[derive(Clone, Debug)]
struct Projections {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
}

impl Projections {
    fn new(tensors: &AdaptedTensors<'_>, name: &str, width: usize, inputs: usize) -> Found<Projections> {
        let of = |part: &str, inputs| Linear::without_bias(tensors, &format!("{name}.{part}"), inputs, width);
        Ok(Projections {
            query: of("to_q", width)?,
            key: of("to_k", inputs)?,
            value: of("to_v", inputs)?,
            out: Linear::new(tensors, &format!("{name}.to_out.0"), width, width)?,
        })
    }

    fn all(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.out]
    }
}

/// Memory that all layers of an attention share.
struct Buffers {
    /// `[rows, c]`: the residual stream.
    sum: Tensor,
    /// `[rows, c]`: the normalized input of the next product, or what an attention gives.
    normed: Tensor,
    /// `[rows * WIDEST * c]`: queries, keys and values, or both halves of the feed-forward.
    wide: Tensor,
}

impl Buffers {
    /// The first numbers of the widest buffer as rows.
    fn rows(&self, rows: usize, columns: usize) -> Result<Tensor> {
        self.wide.narrow(0, 0, rows * columns)?.reshape((rows, columns))
    }
}

impl AttentionLayer {
    fn new(tensors: &AdaptedTensors<'_>, name: &str, width: usize, text: usize) -> Found<AttentionLayer> {
        let norm = |part: &str| LayerNorm::new(tensors, &format!("{name}.{part}"), width, EPSILON);
        let linear =
            |part: &str, inputs, outputs| Linear::new(tensors, &format!("{name}.{part}"), inputs, outputs);
        Ok(AttentionLayer {
            norm1: norm("norm1")?,
            own: Projections::new(tensors, &format!("{name}.attn1"), width, width)?,
            norm2: norm("norm2")?,
            text: Projections::new(tensors, &format!("{name}.attn2"), width, text)?,
            norm3: norm("norm3")?,
            widen: linear("ff.net.0.proj", width, WIDEST * width)?,
            narrow: linear("ff.net.2", WIDEST / 2 * width, width)?,
        })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_attention = self.own.all().into_iter().chain(self.text.all());
        of_attention.chain([&self.widen, &self.narrow])
    }

    /// Keys and values `[items * text, 2 c]` of the text.
    fn keys_and_values(&self, states: &Tensor, channels: usize, scratch: &Scratch) -> Result<Tensor> {
        let both = ops::blank(&[states.dim(0)?, 2 * channels], states.dtype(), states.device())?;
        let [key, value] = [0, 1].map(|i| both.narrow(1, i * channels, channels));
        let (key, value) = (key?, value?);
        let layers = [self.text.key.to(&key)?, self.text.value.to(&value)?];
        linears_into(states, &layers, Epilogue::None, scratch)?;
        Ok(both)
    }

    /// Adds the layer to the residual stream of `items` items, whose normalized rows are ready. `of_text` is keys and values of the
    /// text, `next` the norm that follows.
    fn forward(
        &self,
        buffers: &Buffers,
        of_text: &Tensor,
        (items, shape): (usize, Shape),
        next: Option<&LayerNorm>,
        scratch: &Scratch,
    ) -> Result<()> {
        let Shape { channels, heads } = shape;
        let Buffers { sum, normed, .. } = buffers;
        let rows = sum.dim(0)?;
        let (tokens, head) = (rows / items, channels / heads);
        let scale = 1.0 / (head as f64).sqrt();
        let seen = normed.reshape((items, tokens, heads, head))?;

        let fused = buffers.rows(rows, 3 * channels)?;
        let [query, key, value] = [0, 1, 2].map(|i| fused.narrow(1, i * channels, channels));
        let (query, key, value) = (query?, key?, value?);
        let own = &self.own;
        let layers = [own.query.to(&query)?, own.key.to(&key)?, own.value.to(&value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        let by_head = fused.reshape((items, tokens, 3 * heads, head))?;
        let [query, key, value] = [0, 1, 2].map(|i| by_head.narrow(2, i * heads, heads));
        ops::attention(&query?, &key?, &value?, scale, Mask::None, &seen)?;
        let branch = buffers.rows(rows, channels)?;
        own.out.forward_into(normed, Epilogue::None, &branch, scratch)?;
        residual_norm_modulate(sum, &branch, None, self.norm2.as_norm(), None, normed)?;

        let text = &self.text;
        text.query
            .forward_into(normed, Epilogue::None, &branch, scratch)?;
        let words = of_text.dim(0)? / items;
        let by_head = of_text.reshape((items, words, 2 * heads, head))?;
        let [key, value] = [0, 1].map(|i| by_head.narrow(2, i * heads, heads));
        let query = branch.reshape((items, tokens, heads, head))?;
        ops::attention(&query, &key?, &value?, scale, Mask::None, &seen)?;
        text.out.forward_into(normed, Epilogue::None, &branch, scratch)?;
        residual_norm_modulate(sum, &branch, None, self.norm3.as_norm(), None, normed)?;

        let inner = WIDEST / 2 * channels;
        let both = buffers.rows(rows, 2 * inner)?;
        self.widen.forward_into(normed, Epilogue::None, &both, scratch)?;
        let (up, gate) = (both.narrow(1, 0, inner)?, both.narrow(1, inner, inner)?);
        ops::glu(&gate, &up, Nonlinearity::Gelu, &up)?;
        self.narrow.forward_into(&up, Epilogue::None, normed, scratch)?;
        match next {
            Some(next) => residual_norm_modulate(sum, normed, None, next.as_norm(), None, normed),
            None => add_residual(sum, normed, None),
        }
    }
}

/// What the layers of an attention need beside their map.
pub(super) struct Surroundings<'a> {
    /// The states of the text, `[items * tokens, cross_attention_dim]`.
    pub(super) states: &'a Tensor,
    /// What each layer makes of them, by its streamed block: the first pass of a stage writes it.
    pub(super) of_text: &'a [OnceCell<Tensor>],
    pub(super) stream: &'a WeightStream,
    pub(super) scratch: &'a Scratch,
}

impl Attention {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        (channels, heads, depth): (usize, usize, usize),
        text: usize,
        groups: usize,
    ) -> Found<Attention> {
        let square = |part: &str| Linear::new(tensors, &format!("{name}.{part}"), channels, channels);
        let layer =
            |i| AttentionLayer::new(tensors, &format!("{name}.transformer_blocks.{i}"), channels, text);
        Ok(Attention {
            norm: group_norm(
                tensors,
                &format!("{name}.norm"),
                channels,
                (groups, GROUP_EPSILON),
            )?,
            proj_in: square("proj_in")?,
            layers: (0..depth).map(layer).collect::<Found<_>>()?,
            proj_out: square("proj_out")?,
            shape: Shape { channels, heads },
        })
    }

    /// The layers with matrices.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_layers = self.layers.iter().flat_map(AttentionLayer::linears);
        [&self.proj_in, &self.proj_out].into_iter().chain(of_layers)
    }

    /// Adds the attention to the map, in place. The first of its layers is the streamed block of number `block`. `go_on` is
    /// called before each layer.
    ///
    /// # Errors
    /// Errors of `go_on` and of the device.
    pub(super) fn forward(
        &self,
        map: &Tensor,
        around: &Surroundings<'_>,
        block: usize,
        go_on: &mut dyn FnMut() -> std::result::Result<(), StageError>,
    ) -> std::result::Result<(), StageError> {
        let (items, height, width, channels) = map.dims4()?;
        let rows = items * height * width;
        let blank = |shape: &[usize]| ops::blank(shape, map.dtype(), map.device());
        let normed = normalized(map, &self.norm, After::Nothing)?.reshape((rows, channels))?;
        let buffers = Buffers {
            sum: blank(&[rows, channels])?,
            normed,
            wide: blank(&[rows * WIDEST * channels])?,
        };
        let Buffers { sum, normed, .. } = &buffers;
        self.proj_in
            .forward_into(normed, Epilogue::None, sum, around.scratch)?;
        if let Some(first) = self.layers.first() {
            norm_modulate(sum, first.norm1.as_norm(), None, normed)?;
        }
        let next = self.layers.iter().skip(1).map(|layer| Some(&layer.norm1));
        for (number, (layer, next)) in self.layers.iter().zip(next.chain([None])).enumerate() {
            go_on()?;
            around.stream.enter(BlockPlace::each_pass(block + number))?;
            let kept = &around.of_text[block + number];
            let of_text = match kept.get() {
                Some(of_text) => of_text,
                None => {
                    let of_text = layer.keys_and_values(around.states, channels, around.scratch)?;
                    kept.get_or_init(|| of_text)
                }
            };
            let sizes = (items, self.shape);
            layer.forward(&buffers, of_text, sizes, next, around.scratch)?;
        }
        self.proj_out
            .forward_into(sum, Epilogue::None, normed, around.scratch)?;
        ops::add_rows(&normed.reshape((items, height, width, channels))?, map)?;
        Ok(())
    }
}
