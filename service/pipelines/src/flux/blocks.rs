//! The transformer's blocks. All token tensors are `[1, tokens, width]` in the dtype of the card.

use candle_core::Tensor;
use gpu::{ComponentTensors, MissingTensor};

use super::config::TransformerConfig;
use super::linear::Linear;
use super::positions::Rotations;

/// Of every norm in the transformer.
const EPS: f64 = 1e-6;

/// One projection of tokens to queries, keys and values, with norms of queries and keys by head.
struct Projection {
    query: Linear,
    key: Linear,
    value: Linear,
    query_norm: Tensor,
    key_norm: Tensor,
    heads: usize,
}

impl Projection {
    /// `names` are those of the query, key and value projections and of the two norms.
    fn new(
        tensors: &ComponentTensors,
        block: &str,
        names: [&str; 5],
        config: &TransformerConfig,
    ) -> Result<Projection, MissingTensor> {
        let width = config.width();
        let linear = |name: &str| Linear::new(tensors, &format!("{block}.attn.{name}"), width, width);
        let norm = |name: &str| {
            tensors.shaped(
                &format!("{block}.attn.{name}.weight"),
                &[config.attention_head_dim],
            )
        };
        Ok(Projection {
            query: linear(names[0])?,
            key: linear(names[1])?,
            value: linear(names[2])?,
            query_norm: norm(names[3])?,
            key_norm: norm(names[4])?,
            heads: config.num_attention_heads,
        })
    }

    /// Queries, keys and values, `[1, tokens, heads, head_width]` each.
    fn forward(&self, x: &Tensor) -> candle_core::Result<[Tensor; 3]> {
        let (batch, tokens, width) = x.dims3()?;
        let by_head = |x: Tensor| x.reshape((batch, tokens, self.heads, width / self.heads));
        // One after the other, so that what was projected goes before the next is.
        let query = by_head(self.query.forward(x)?)?;
        let query = normed(query, &self.query_norm)?;
        let key = by_head(self.key.forward(x)?)?;
        let key = normed(key, &self.key_norm)?;
        Ok([query, key, by_head(self.value.forward(x)?)?])
    }
}

/// The norm of queries or keys; takes them, so that they go.
fn normed(x: Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    ops::rms_norm(&x, weight, EPS)
}

/// Attention over all tokens: `[1, tokens, heads, head_width]` thrice to `[1, tokens, width]`.
fn attend([query, key, value]: [Tensor; 3], rotations: &Rotations) -> candle_core::Result<Tensor> {
    let scale = (query.dim(3)? as f64).powf(-0.5);
    // Each takes what was before it, so that there are three of them, and four while one is made.
    let turned = |x: Tensor| ops::rope(&x.transpose(1, 2)?, &rotations.cos, &rotations.sin);
    let by_head = |x: Tensor| x.transpose(1, 2)?.contiguous();
    let (query, key, value) = (turned(query)?, turned(key)?, by_head(value)?);
    ops::composed_attention(&query, &key, &value, scale, None, false)?
        .transpose(1, 2)?
        .flatten_from(2)
}

/// `FeedForward` with the tanh approximation of GELU.
struct FeedForward {
    up: Linear,
    down: Linear,
}

impl FeedForward {
    fn new(
        tensors: &ComponentTensors,
        name: &str,
        config: &TransformerConfig,
    ) -> Result<Self, MissingTensor> {
        let (width, inner) = (config.width(), config.feed_forward_width());
        Ok(FeedForward {
            up: Linear::new(tensors, &format!("{name}.net.0.proj"), width, inner)?,
            down: Linear::new(tensors, &format!("{name}.net.2"), inner, width)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let up = self.up.forward(x)?;
        let raised = ops::gelu_tanh(&up)?;
        drop(up);
        self.down.forward(&raised)
    }
}

/// A projection of the conditioning to `parts` vectors of the hidden width: the linear layer of the
/// adaptive norms. It depends on the step alone, so all steps go through it at once.
pub(super) struct Modulator {
    linear: Linear,
    parts: usize,
}

impl Modulator {
    pub(super) fn new(
        tensors: &ComponentTensors,
        name: &str,
        width: usize,
        parts: usize,
    ) -> Result<Modulator, MissingTensor> {
        Ok(Modulator {
            linear: Linear::new(tensors, &format!("{name}.linear"), width, parts * width)?,
            parts,
        })
    }

    /// `activated` is SiLU of the conditioning, `[steps, width]`; one `[steps, width]` a part.
    pub(super) fn forward(&self, activated: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        self.linear.forward(activated)?.chunk(self.parts, 1)
    }
}

/// One stream of a double block: everything that text and picture have each for themselves.
struct Stream {
    modulator: Modulator,
    projection: Projection,
    output: Linear,
    feed_forward: FeedForward,
}

/// The modulation of one stream: shift, scale and gate around attention, then around the feed-forward.
type StreamModulation = Vec<Tensor>;

/// Rows `step` of modulations of all steps, `[1, width]` each.
fn at_step(parts: &[Tensor], step: usize) -> candle_core::Result<Vec<Tensor>> {
    parts.iter().map(|part| part.narrow(0, step, 1)).collect()
}

impl Stream {
    /// The residual of attention, and the feed-forward behind it.
    fn close(&self, x: &Tensor, attended: &Tensor, modulation: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = ops::gated_add(x, &self.output.forward(attended)?, &modulation[2])?;
        let normed = ops::modulated_layer_norm(&x, &modulation[4], &modulation[3], EPS)?;
        ops::gated_add(&x, &self.feed_forward.forward(&normed)?, &modulation[5])
    }
}

/// `FluxTransformerBlock`: text and picture with weights of their own and one attention.
pub(super) struct DoubleBlock {
    picture: Stream,
    text: Stream,
}

impl DoubleBlock {
    pub(super) fn new(
        tensors: &ComponentTensors,
        name: &str,
        config: &TransformerConfig,
    ) -> Result<DoubleBlock, MissingTensor> {
        let stream = |norm: &str, projections: [&str; 5], output: &str, feed_forward: &str| {
            Ok(Stream {
                modulator: Modulator::new(tensors, &format!("{name}.{norm}"), config.width(), 6)?,
                projection: Projection::new(tensors, name, projections, config)?,
                output: Linear::new(
                    tensors,
                    &format!("{name}.attn.{output}"),
                    config.width(),
                    config.width(),
                )?,
                feed_forward: FeedForward::new(tensors, &format!("{name}.{feed_forward}"), config)?,
            })
        };
        let of_text = [
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "norm_added_q",
            "norm_added_k",
        ];
        Ok(DoubleBlock {
            picture: stream(
                "norm1",
                ["to_q", "to_k", "to_v", "norm_q", "norm_k"],
                "to_out.0",
                "ff",
            )?,
            text: stream("norm1_context", of_text, "to_add_out", "ff_context")?,
        })
    }

    /// Modulations of all steps: of the picture, then of the text.
    pub(super) fn modulate(
        &self,
        activated: &Tensor,
    ) -> candle_core::Result<(StreamModulation, StreamModulation)> {
        Ok((
            self.picture.modulator.forward(activated)?,
            self.text.modulator.forward(activated)?,
        ))
    }

    /// Picture and text after the block.
    pub(super) fn forward(
        &self,
        picture: &Tensor,
        text: &Tensor,
        (of_picture, of_text): &(StreamModulation, StreamModulation),
        step: usize,
        rotations: &Rotations,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let (of_picture, of_text) = (at_step(of_picture, step)?, at_step(of_text, step)?);
        let normed_picture = ops::modulated_layer_norm(picture, &of_picture[1], &of_picture[0], EPS)?;
        let normed_text = ops::modulated_layer_norm(text, &of_text[1], &of_text[0], EPS)?;
        let [pq, pk, pv] = self.picture.projection.forward(&normed_picture)?;
        let [tq, tk, tv] = self.text.projection.forward(&normed_text)?;
        drop((normed_picture, normed_text));
        let joined = |text: Tensor, picture: Tensor| Tensor::cat(&[text, picture], 1);
        let joint = [joined(tq, pq)?, joined(tk, pk)?, joined(tv, pv)?];
        let attended = attend(joint, rotations)?;
        let (text_tokens, picture_tokens) = (text.dim(1)?, picture.dim(1)?);
        let attended_text = attended.narrow(1, 0, text_tokens)?;
        let attended_picture = attended.narrow(1, text_tokens, picture_tokens)?;
        Ok((
            self.picture.close(picture, &attended_picture, &of_picture)?,
            self.text.close(text, &attended_text, &of_text)?,
        ))
    }
}

/// `FluxSingleTransformerBlock`: attention and feed-forward side by side over text and picture together.
pub(super) struct SingleBlock {
    modulator: Modulator,
    projection: Projection,
    up: Linear,
    output: Linear,
}

impl SingleBlock {
    pub(super) fn new(
        tensors: &ComponentTensors,
        name: &str,
        config: &TransformerConfig,
    ) -> Result<SingleBlock, MissingTensor> {
        let (width, inner) = (config.width(), config.feed_forward_width());
        let projections = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        Ok(SingleBlock {
            modulator: Modulator::new(tensors, &format!("{name}.norm"), width, 3)?,
            projection: Projection::new(tensors, name, projections, config)?,
            up: Linear::new(tensors, &format!("{name}.proj_mlp"), width, inner)?,
            output: Linear::new(tensors, &format!("{name}.proj_out"), width + inner, width)?,
        })
    }

    /// Modulations of all steps.
    pub(super) fn modulate(&self, activated: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        self.modulator.forward(activated)
    }

    /// Text and picture, one behind the other, after the block.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        modulation: &[Tensor],
        step: usize,
        rotations: &Rotations,
    ) -> candle_core::Result<Tensor> {
        let modulation = at_step(modulation, step)?;
        let normed = ops::modulated_layer_norm(x, &modulation[1], &modulation[0], EPS)?;
        let attended = attend(self.projection.forward(&normed)?, rotations)?;
        let up = self.up.forward(&normed)?;
        drop(normed);
        let raised = ops::gelu_tanh(&up)?;
        drop(up);
        let both = Tensor::cat(&[attended, raised], 2)?;
        let output = self.output.forward(&both)?;
        drop(both);
        ops::gated_add(x, &output, &modulation[2])
    }
}
