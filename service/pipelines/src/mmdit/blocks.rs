//! The transformer's blocks. They compute in [`Buffers`], allocated once per request: a step allocates nothing.
//!
//! FLUX.1, FLUX.2 and Qwen-Image build them differently ([`Design`]): `FluxTransformerBlock` and `FluxSingleTransformerBlock`,
//! `Flux2TransformerBlock` and `Flux2SingleTransformerBlock`, `QwenImageTransformerBlock` in diffusers.
//!
//! Between two layers there is one fused pass: the residual, and the norm and modulation of the next layer. So a block
//! begins with normalized rows, and ends by normalizing for the next block.

use candle_core::{DType, Result, Tensor};
use gpu::MissingTensor;
use ops::{Angles, Epilogue, LayerTo, Nonlinearity, Pairs, QkNorm, Scratch};

use super::buffers::{Added, Buffers, EPS, Next, Part, Share};
use super::layout::{DiffusersStream, SPLIT_LAST};
use super::shape::{BlocksShape, Design};
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::rotary::Rotations;

/// A layer of a block: FLUX.2's have no biases.
fn layer(
    tensors: &AdaptedTensors<'_>,
    name: &str,
    (inputs, outputs): (usize, usize),
    shape: &BlocksShape,
) -> std::result::Result<Linear, MissingTensor> {
    match shape.design.has_biases() {
        true => Linear::new(tensors, name, inputs, outputs),
        false => Linear::without_bias(tensors, name, inputs, outputs),
    }
}

/// The norms of each head of queries and of keys.
struct HeadNorms {
    query: Tensor,
    key: Tensor,
}

impl HeadNorms {
    fn new(
        tensors: &AdaptedTensors<'_>,
        block: &str,
        names: [&str; 2],
        shape: &BlocksShape,
    ) -> std::result::Result<HeadNorms, MissingTensor> {
        let norm = |name: &str| tensors.shaped(&format!("{block}.attn.{name}.weight"), &[shape.head]);
        Ok(HeadNorms {
            query: norm(names[0])?,
            key: norm(names[1])?,
        })
    }

    /// Normalizes and rotates the queries and keys of a part.
    fn apply(&self, part: &Part, angles: Angles<'_>) -> Result<()> {
        let norm = QkNorm::PerHead {
            q: &self.query,
            k: &self.key,
            eps: EPS,
        };
        ops::qk_norm_rope(&part.query, &part.key, norm, Some(angles), Pairs::Neighbours)
    }
}

/// The query, key and value projections of a part.
struct Projections([Linear; 3]);

impl Projections {
    fn new(
        tensors: &AdaptedTensors<'_>,
        block: &str,
        names: [&str; 3],
        shape: &BlocksShape,
    ) -> std::result::Result<Projections, MissingTensor> {
        let sizes = (shape.width(), shape.width());
        let linear = |name: &str| layer(tensors, &format!("{block}.attn.{name}"), sizes, shape);
        Ok(Projections([
            linear(names[0])?,
            linear(names[1])?,
            linear(names[2])?,
        ]))
    }

    /// The layers with their outputs in the joint buffer.
    fn to<'a>(&'a self, part: &'a Part) -> Result<[LayerTo<'a>; 3]> {
        let Projections([query, key, value]) = self;
        Ok([query.to(&part.query)?, key.to(&part.key)?, value.to(&part.value)?])
    }
}

/// A feed-forward: `FeedForward` with the tanh approximation of GELU, or `Flux2FeedForward`, which is gated by SiLU.
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
        let [up, down] = shape.design.feed_forward();
        Ok(FeedForward {
            up: layer(
                tensors,
                &format!("{name}.{up}"),
                (width, shape.raised_width()),
                shape,
            )?,
            down: layer(tensors, &format!("{name}.{down}"), (inner, width), shape)?,
        })
    }

    /// From the normalized rows to the branch.
    fn forward(&self, part: &Part, as_codes: bool, scratch: &Scratch) -> Result<()> {
        let normed = part.normed(as_codes);
        match &part.gated {
            None => self
                .up
                .forward_into(normed, Epilogue::GeluTanh, &part.inner, scratch)?,
            Some(gated) => {
                self.up
                    .forward_into(normed, Epilogue::None, &gated.both, scratch)?;
                ops::glu(&gated.gate, &gated.raised, Nonlinearity::Silu, &part.inner)?;
            }
        }
        self.down
            .forward_into(&part.inner, Epilogue::None, &part.branch, scratch)
    }
}

/// The linear layer of adaptive norms: projects the conditioning to `parts` vectors of the hidden width. It depends
/// on the step alone, so all steps are projected at once.
pub(crate) struct Modulator {
    linear: Linear,
    parts: usize,
}

impl Modulator {
    /// The modulator with the tensors of this layer.
    ///
    /// # Errors
    /// When it is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlocksShape,
        parts: usize,
    ) -> std::result::Result<Modulator, MissingTensor> {
        let sizes = (shape.width(), parts * shape.width());
        Ok(Modulator {
            linear: layer(tensors, name, sizes, shape)?,
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
    /// `None` where all blocks share one.
    modulator: Option<Modulator>,
    projections: Projections,
    norms: HeadNorms,
    output: Linear,
    feed_forward: FeedForward,
}

/// The modulation of one stream: shift, scale and gate around attention, then around the feed-forward.
pub(super) type StreamModulation = Vec<Tensor>;

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
        self.projections.0.iter().chain(feed_forward)
    }

    /// The norm before the projections.
    fn next(&self, modulation: &StreamModulation, row: usize) -> Result<Next> {
        next_of(modulation, row, &self.projections.0)
    }

    /// Queries, keys and values of a part, normalized and rotated, into the joint buffer.
    fn project(&self, part: &Part, as_codes: bool, angles: Angles<'_>, scratch: &Scratch) -> Result<()> {
        let layers = self.projections.to(part)?;
        ops::linears_into(part.normed(as_codes), &layers, Epilogue::None, scratch)?;
        self.norms.apply(part, angles)
    }

    /// Adds attention to the residual, runs the feed-forward, and adds `added` to the first rows; normalizes each share of the
    /// part for its `next`.
    fn close(
        &self,
        (part, shares): (&Part, &[Share]),
        modulation: &StreamModulation,
        (next, added): (&[&Next], &[Added<'_>]),
        scratch: &Scratch,
    ) -> Result<()> {
        let gate = |number: usize, share: &Share| modulation[number].narrow(0, share.row, 1);
        self.output
            .forward_into(&part.attended, Epilogue::None, &part.branch, scratch)?;
        let as_codes = take_codes([&self.feed_forward.up], modulation[3].dtype())?;
        for share in shares {
            let inside = next_of(&modulation[3..], share.row, [&self.feed_forward.up])?;
            share.rows.pass_on(&gate(2, share)?, &inside)?;
        }
        self.feed_forward.forward(part, as_codes, scratch)?;
        part.add(added)?;
        for (share, next) in shares.iter().zip(next) {
            share.rows.pass_on(&gate(5, share)?, next)?;
        }
        Ok(())
    }
}

/// Text and picture with separate weights and joint attention.
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
        let stream = |names: &DiffusersStream| {
            let modulator = || Modulator::new(tensors, &format!("{name}.{}", names.modulation), shape, 6);
            let output = format!("{name}.attn.{}", names.output);
            Ok(Stream {
                modulator: match shape.design {
                    Design::Flux1 | Design::QwenImage => Some(modulator()?),
                    Design::Flux2 => None,
                },
                projections: Projections::new(tensors, name, names.projections, shape)?,
                norms: HeadNorms::new(tensors, name, names.norms, shape)?,
                output: layer(tensors, &output, (shape.width(), shape.width()), shape)?,
                feed_forward: FeedForward::new(tensors, &format!("{name}.{}", names.feed_forward), shape)?,
            })
        };
        let [picture, text] = shape.design.streams();
        Ok(DoubleBlock {
            picture: stream(picture)?,
            text: stream(text)?,
        })
    }

    /// Linear layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.picture.layers().chain(self.text.layers())
    }

    /// Modulations of all steps by its own modulators: of the picture, then of the text.
    pub(super) fn modulate(
        &self,
        activated: &Tensor,
    ) -> Result<Option<(StreamModulation, StreamModulation)>> {
        let (Some(picture), Some(text)) = (&self.picture.modulator, &self.text.modulator) else {
            return Ok(None);
        };
        Ok(Some((picture.forward(activated)?, text.forward(activated)?)))
    }

    /// The norms at the beginning of the block: of each share of the picture, then of the text in this step.
    pub(super) fn first(
        &self,
        (of_picture, of_text): &(StreamModulation, StreamModulation),
        (shares, step): (&[Share], usize),
    ) -> Result<(Vec<Next>, Next)> {
        let of_shares = shares
            .iter()
            .map(|share| self.picture.next(of_picture, share.row));
        Ok((of_shares.collect::<Result<_>>()?, self.text.next(of_text, step)?))
    }

    /// Runs the block over normalized rows, and normalizes them for `next`: each share of the picture, and the text. `added`
    /// goes to the first rows of the picture.
    pub(super) fn forward(
        &self,
        buffers: &Buffers,
        modulation: &(StreamModulation, StreamModulation),
        (shares, step): (&[Share], usize),
        rotations: &Rotations,
        next: (&[&Next], &Next),
        added: &[Added<'_>],
    ) -> Result<()> {
        let (picture, text) = (buffers.picture()?, buffers.text()?);
        let dtype = picture.hidden.dtype();
        let picture_as_codes = take_codes(&self.picture.projections.0, dtype)?;
        let text_as_codes = take_codes(&self.text.projections.0, dtype)?;
        let scratch = buffers.scratch();
        let turned = rotations.rows(buffers.text, picture.hidden.dim(1)?)?;
        self.picture
            .project(&picture, picture_as_codes, turned.angles(), scratch)?;
        let turned = rotations.rows(0, buffers.text)?;
        self.text
            .project(&text, text_as_codes, turned.angles(), scratch)?;
        buffers.attend(&buffers.whole()?)?;
        self.picture
            .close((&picture, shares), &modulation.0, (next.0, added), scratch)?;
        let of_text = [Share {
            rows: buffers.text()?,
            row: step,
        }];
        self.text
            .close((&text, &of_text), &modulation.1, (&[next.1], &[]), scratch)
    }
}

/// The first layers of a single block.
enum SingleInput {
    /// Queries, keys and values, and the inside of the feed-forward.
    Separate {
        projections: Box<Projections>,
        up: Linear,
    },
    /// All of them in one.
    Fused(Linear),
}

/// Attention and feed-forward in parallel over text and picture together.
pub(super) struct SingleBlock {
    /// `None` where all blocks share one.
    modulator: Option<Modulator>,
    input: SingleInput,
    norms: HeadNorms,
    output: SingleOutput,
}

/// The last layer of a single block, from the attention and the inside of the feed-forward.
enum SingleOutput {
    /// One layer over both.
    Joined(Linear),
    /// A layer over each, whose results are added.
    Split { attended: Linear, inner: Linear },
}

impl SingleOutput {
    fn layers(&self) -> impl Iterator<Item = &Linear> {
        let [first, second] = match self {
            SingleOutput::Joined(layer) => [Some(layer), None],
            SingleOutput::Split { attended, inner } => [Some(attended), Some(inner)],
        };
        first.into_iter().chain(second)
    }

    /// From the attention and the inside of the feed-forward of these rows to their branch. Queries, keys and values are
    /// overwritten.
    fn forward(&self, rows: &Part, scratch: &Scratch) -> Result<()> {
        let (attended, inner) = match self {
            SingleOutput::Joined(layer) => {
                return layer.forward_into(&rows.wide, Epilogue::None, &rows.branch, scratch);
            }
            SingleOutput::Split { attended, inner } => (attended, inner),
        };
        let width = rows.branch.dim(2)?;
        let of_attention = rows.wide.narrow(2, 0, width)?;
        attended.forward_into(&of_attention, Epilogue::None, &rows.branch, scratch)?;
        let of_inner = rows.joint.narrow(2, 0, width)?;
        inner.forward_into(&rows.inner, Epilogue::None, &of_inner, scratch)?;
        ops::add_residual(&rows.branch, &of_inner, None)
    }
}

impl SingleBlock {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlocksShape,
    ) -> std::result::Result<SingleBlock, MissingTensor> {
        let (width, inner) = (shape.width(), shape.feed_forward_width());
        let streams = shape.design.streams();
        let linear =
            |part: &str, inputs, outputs| layer(tensors, &format!("{name}.{part}"), (inputs, outputs), shape);
        let (modulator, input, output) = match shape.design {
            Design::Flux1 | Design::QwenImage => (
                Some(Modulator::new(tensors, &format!("{name}.norm.linear"), shape, 3)?),
                SingleInput::Separate {
                    projections: Box::new(Projections::new(tensors, name, streams[0].projections, shape)?),
                    up: linear("proj_mlp", width, inner)?,
                },
                "proj_out",
            ),
            Design::Flux2 => {
                let outputs = 3 * width + shape.raised_width();
                let fused = linear("attn.to_qkv_mlp_proj", width, outputs)?;
                (None, SingleInput::Fused(fused), "attn.to_out")
            }
        };
        let output = match shape.splits_last_layers {
            false => SingleOutput::Joined(linear(output, width + inner, width)?),
            true => {
                let (both, sizes) = (format!("{name}.{output}"), [width, inner]);
                let [attended, inner_out] = SPLIT_LAST.map(|part| format!("{name}.{part}"));
                SingleOutput::Split {
                    attended: Linear::of_columns(tensors, &attended, (&both, sizes, 0), width)?,
                    inner: Linear::of_columns(tensors, &inner_out, (&both, sizes, 1), width)?,
                }
            }
        };
        Ok(SingleBlock {
            modulator,
            input,
            norms: HeadNorms::new(tensors, name, streams[0].norms, shape)?,
            output,
        })
    }

    /// Linear layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.first_layers().chain(self.output.layers())
    }

    fn first_layers(&self) -> impl Iterator<Item = &Linear> {
        let (separate, last) = match &self.input {
            SingleInput::Separate { projections, up } => (&projections.0[..], up),
            SingleInput::Fused(fused) => (&[][..], fused),
        };
        separate.iter().chain([last])
    }

    /// Modulations of all steps by its own modulator.
    pub(super) fn modulate(&self, activated: &Tensor) -> Result<Option<Vec<Tensor>>> {
        let modulator = self.modulator.as_ref();
        modulator
            .map(|modulator| modulator.forward(activated))
            .transpose()
    }

    /// The norm at the beginning of the block.
    pub(super) fn first(&self, modulation: &[Tensor], step: usize) -> Result<Next> {
        next_of(modulation, step, self.first_layers())
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
        match &self.input {
            SingleInput::Separate { projections, up } => {
                let layers = projections.to(&whole)?;
                ops::linears_into(whole.normed(as_codes), &layers, Epilogue::None, scratch)?;
                // The codes of a part are not a view of the codes of the whole.
                let of = if as_codes { &whole } else { rows };
                up.forward_into(of.normed(as_codes), Epilogue::GeluTanh, &of.inner, scratch)?;
            }
            SingleInput::Fused(fused) => {
                fused.forward_into(whole.normed(as_codes), Epilogue::None, &whole.joint, scratch)?;
                if let Some(gated) = &rows.gated {
                    ops::glu(&gated.gate, &gated.raised, Nonlinearity::Silu, &rows.inner)?;
                }
            }
        }
        self.norms.apply(&whole, rotations.angles())?;
        buffers.attend(rows)?;
        self.output.forward(rows, scratch)?;
        if !added.is_empty() {
            buffers.picture()?.add(added)?;
        }
        rows.pass_on(&modulation[2].narrow(0, step, 1)?, next)
    }
}
