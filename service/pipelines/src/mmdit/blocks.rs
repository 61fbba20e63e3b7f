//! The transformer's blocks. They compute in [`Buffers`], allocated once per request: a step allocates nothing.
//!
//! Between two layers there is one fused pass: the residual, and the norm and modulation of the next layer. So a block
//! begins with normalized rows, and ends by normalizing for the next block.

use candle_core::{DType, Result, Tensor};
use gpu::MissingTensor;
use ops::{Angles, Epilogue, Mask, Pairs, QkNorm, Scratch};

use super::buffers::{Added, Buffers, EPS, Next, Part, attends_for_some};
use super::shape::BlocksShape;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::rotary::Rotations;

/// The query, key and value projections of one stream, with per-head norms of queries and keys.
struct Projection {
    query: Linear,
    key: Linear,
    value: Linear,
    query_norm: Tensor,
    key_norm: Tensor,
}

impl Projection {
    /// `names` are those of the query, key and value projections and of the two norms.
    fn new(
        tensors: &AdaptedTensors<'_>,
        block: &str,
        names: [&str; 5],
        shape: &BlocksShape,
    ) -> std::result::Result<Projection, MissingTensor> {
        let width = shape.width();
        let linear = |name: &str| Linear::new(tensors, &format!("{block}.attn.{name}"), width, width);
        let norm = |name: &str| tensors.shaped(&format!("{block}.attn.{name}.weight"), &[shape.head]);
        Ok(Projection {
            query: linear(names[0])?,
            key: linear(names[1])?,
            value: linear(names[2])?,
            query_norm: norm(names[3])?,
            key_norm: norm(names[4])?,
        })
    }

    fn layers(&self) -> [&Linear; 3] {
        [&self.query, &self.key, &self.value]
    }

    /// Queries, keys and values of a part, normalized and rotated, into the joint buffer.
    fn forward(&self, part: &Part, as_codes: bool, angles: Angles<'_>, scratch: &Scratch) -> Result<()> {
        let layers = [
            self.query.to(&part.query)?,
            self.key.to(&part.key)?,
            self.value.to(&part.value)?,
        ];
        ops::linears_into(part.normed(as_codes), &layers, Epilogue::None, scratch)?;
        let norm = QkNorm::PerHead {
            q: &self.query_norm,
            k: &self.key_norm,
            eps: EPS,
        };
        ops::qk_norm_rope(&part.query, &part.key, norm, Some(angles), Pairs::Neighbours)
    }
}

/// Attention of the needed rows to all tokens.
fn attend(all: &Part, needed: &Part) -> Result<()> {
    let scale = (all.query.dim(3)? as f64).powf(-0.5);
    let of = match attends_for_some(all.query.dim(1)?, needed.query.dim(1)?) {
        true => needed,
        false => all,
    };
    ops::attention(&of.query, &all.key, &all.value, scale, Mask::None, &of.attended)
}

/// `FeedForward` with the tanh approximation of GELU.
struct FeedForward {
    up: Linear,
    down: Linear,
}

impl FeedForward {
    fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlocksShape,
    ) -> std::result::Result<Self, MissingTensor> {
        let (width, inner) = (shape.width(), shape.feed_forward_width());
        Ok(FeedForward {
            up: Linear::new(tensors, &format!("{name}.net.0.proj"), width, inner)?,
            down: Linear::new(tensors, &format!("{name}.net.2"), inner, width)?,
        })
    }
}

/// The linear layer of adaptive norms: projects the conditioning to `parts` vectors of the hidden width. It depends
/// on the step alone, so all steps are projected at once.
pub(crate) struct Modulator {
    linear: Linear,
    parts: usize,
}

impl Modulator {
    /// The modulator with the tensors of `{name}.linear`.
    ///
    /// # Errors
    /// When it is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        width: usize,
        parts: usize,
    ) -> std::result::Result<Modulator, MissingTensor> {
        Ok(Modulator {
            linear: Linear::new(tensors, &format!("{name}.linear"), width, parts * width)?,
            parts,
        })
    }

    /// `activated` is SiLU of the conditioning, `[steps, width]`; returns one `[steps, width]` per part.
    ///
    /// # Errors
    /// Errors of the layer.
    pub(crate) fn forward(&self, activated: &Tensor) -> Result<Vec<Tensor>> {
        self.linear.forward(activated)?.chunk(self.parts, 1)
    }
}

/// One stream of a double block: the layers that text and picture have separately.
struct Stream {
    modulator: Modulator,
    projection: Projection,
    output: Linear,
    feed_forward: FeedForward,
}

/// The modulation of one stream: shift, scale and gate around attention, then around the feed-forward.
type StreamModulation = Vec<Tensor>;

/// Row `step` of the modulations of all steps, `[1, width]` each.
fn at_step(parts: &[Tensor], step: usize) -> Result<Vec<Tensor>> {
    parts.iter().map(|part| part.narrow(0, step, 1)).collect()
}

/// Shift and scale, adjacent in `parts`, as the norm before `layers`.
fn next_of<'a>(parts: &[Tensor], step: usize, layers: impl IntoIterator<Item = &'a Linear>) -> Result<Next> {
    Ok(Next {
        shift: parts[0].narrow(0, step, 1)?,
        scale: parts[1].narrow(0, step, 1)?,
        as_codes: take_codes(layers, parts[0].dtype())?,
    })
}

/// Whether all layers have native fp8 products.
fn take_codes<'a>(layers: impl IntoIterator<Item = &'a Linear>, dtype: DType) -> Result<bool> {
    for layer in layers {
        if !layer.takes_codes(dtype)? {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Stream {
    fn layers(&self) -> impl Iterator<Item = &Linear> {
        let feed_forward = [&self.output, &self.feed_forward.up, &self.feed_forward.down];
        self.projection.layers().into_iter().chain(feed_forward)
    }

    /// The norm before the projections.
    fn next(&self, modulation: &StreamModulation, step: usize) -> Result<Next> {
        next_of(modulation, step, self.projection.layers())
    }

    /// Adds attention to the residual, runs the feed-forward, and adds `added` to the first rows; normalizes for
    /// `next`.
    fn close(
        &self,
        part: &Part,
        modulation: &StreamModulation,
        step: usize,
        (next, added): (&Next, &[Added<'_>]),
        scratch: &Scratch,
    ) -> Result<()> {
        let gates = at_step(modulation, step)?;
        let FeedForward { up, down } = &self.feed_forward;
        self.output
            .forward_into(&part.attended, Epilogue::None, &part.branch, scratch)?;
        let inside = next_of(&modulation[3..], step, [up])?;
        part.pass_on(&gates[2], &inside)?;
        up.forward_into(
            part.normed(inside.as_codes),
            Epilogue::GeluTanh,
            &part.inner,
            scratch,
        )?;
        down.forward_into(&part.inner, Epilogue::None, &part.branch, scratch)?;
        part.add(added)?;
        part.pass_on(&gates[5], next)
    }
}

/// `FluxTransformerBlock`: text and picture with separate weights and joint attention.
pub(super) struct DoubleBlock {
    picture: Stream,
    text: Stream,
}

impl DoubleBlock {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlocksShape,
    ) -> std::result::Result<DoubleBlock, MissingTensor> {
        let stream = |norm: &str, projections: [&str; 5], output: &str, feed_forward: &str| {
            Ok(Stream {
                modulator: Modulator::new(tensors, &format!("{name}.{norm}"), shape.width(), 6)?,
                projection: Projection::new(tensors, name, projections, shape)?,
                output: Linear::new(
                    tensors,
                    &format!("{name}.attn.{output}"),
                    shape.width(),
                    shape.width(),
                )?,
                feed_forward: FeedForward::new(tensors, &format!("{name}.{feed_forward}"), shape)?,
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

    /// Linear layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.picture.layers().chain(self.text.layers())
    }

    /// Modulations of all steps: of the picture, then of the text.
    pub(super) fn modulate(&self, activated: &Tensor) -> Result<(StreamModulation, StreamModulation)> {
        Ok((
            self.picture.modulator.forward(activated)?,
            self.text.modulator.forward(activated)?,
        ))
    }

    /// The norms at the beginning of the block: of the picture, then of the text.
    pub(super) fn first(
        &self,
        (of_picture, of_text): &(StreamModulation, StreamModulation),
        step: usize,
    ) -> Result<(Next, Next)> {
        Ok((
            self.picture.next(of_picture, step)?,
            self.text.next(of_text, step)?,
        ))
    }

    /// Runs the block over normalized rows, and normalizes them for `next`: picture and text. `added` goes to the
    /// first rows of the picture.
    pub(super) fn forward(
        &self,
        buffers: &Buffers,
        modulation: &(StreamModulation, StreamModulation),
        step: usize,
        rotations: &Rotations,
        next: (&Next, &Next),
        added: &[Added<'_>],
    ) -> Result<()> {
        let (picture, text, whole) = (buffers.picture()?, buffers.text()?, buffers.whole()?);
        let (of_picture, of_text) = self.first(modulation, step)?;
        let scratch = buffers.scratch();
        let turned = rotations.rows(buffers.text, picture.hidden.dim(1)?)?;
        self.picture
            .projection
            .forward(&picture, of_picture.as_codes, turned.angles(), scratch)?;
        let turned = rotations.rows(0, buffers.text)?;
        self.text
            .projection
            .forward(&text, of_text.as_codes, turned.angles(), scratch)?;
        attend(&whole, &whole)?;
        self.picture
            .close(&picture, &modulation.0, step, (next.0, added), scratch)?;
        self.text
            .close(&text, &modulation.1, step, (next.1, &[]), scratch)
    }
}

/// `FluxSingleTransformerBlock`: attention and feed-forward in parallel over text and picture together.
pub(super) struct SingleBlock {
    modulator: Modulator,
    projection: Projection,
    up: Linear,
    output: Linear,
}

impl SingleBlock {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlocksShape,
    ) -> std::result::Result<SingleBlock, MissingTensor> {
        let (width, inner) = (shape.width(), shape.feed_forward_width());
        let projections = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        Ok(SingleBlock {
            modulator: Modulator::new(tensors, &format!("{name}.norm"), width, 3)?,
            projection: Projection::new(tensors, name, projections, shape)?,
            up: Linear::new(tensors, &format!("{name}.proj_mlp"), width, inner)?,
            output: Linear::new(tensors, &format!("{name}.proj_out"), width + inner, width)?,
        })
    }

    /// Linear layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.projection
            .layers()
            .into_iter()
            .chain([&self.up, &self.output])
    }

    /// Modulations of all steps.
    pub(super) fn modulate(&self, activated: &Tensor) -> Result<Vec<Tensor>> {
        self.modulator.forward(activated)
    }

    /// The norm at the beginning of the block.
    pub(super) fn first(&self, modulation: &[Tensor], step: usize) -> Result<Next> {
        let layers = self.projection.layers().into_iter().chain([&self.up]);
        next_of(modulation, step, layers)
    }

    /// Runs the block over normalized rows; `rows` of them are needed afterwards, and are normalized for `next`.
    /// Layers whose results only those rows need skip the others: after the last block the text is not needed. `added`
    /// goes to the first rows of the picture.
    pub(super) fn forward(
        &self,
        buffers: &Buffers,
        modulation: &[Tensor],
        step: usize,
        rotations: &Rotations,
        (rows, next): (&Part, &Next),
        added: &[Added<'_>],
    ) -> Result<()> {
        let whole = buffers.whole()?;
        let as_codes = self.first(modulation, step)?.as_codes;
        let scratch = buffers.scratch();
        self.projection
            .forward(&whole, as_codes, rotations.angles(), scratch)?;
        // The codes of a part are not a view of the codes of the whole.
        let up = if as_codes { &whole } else { rows };
        self.up
            .forward_into(up.normed(as_codes), Epilogue::GeluTanh, &up.inner, scratch)?;
        attend(&whole, rows)?;
        self.output
            .forward_into(&rows.wide, Epilogue::None, &rows.branch, scratch)?;
        if !added.is_empty() {
            buffers.picture()?.add(added)?;
        }
        rows.pass_on(&modulation[2].narrow(0, step, 1)?, next)
    }
}
