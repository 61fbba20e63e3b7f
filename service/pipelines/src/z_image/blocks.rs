//! The transformer's blocks: diffusers' `ZImageTransformerBlock`. They compute in [`ZImageBuffers`], so that a step
//! allocates nothing.
//!
//! A block begins with normalized rows, and ends by normalizing for the next block.

use candle_core::{DType, Device, Result, Tensor};
use gpu::MissingTensor;
use ops::{Angles, Epilogue, Nonlinearity, Pairs, QkNorm};

use super::buffers::{Close, Next, Part, ZImageBuffers};
use super::config::TransformerConfig;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;

/// Epsilon of the norms of queries and keys.
const QK_EPS: f64 = 1e-5;

/// A transformer block.
pub(super) struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Tensor,
    key_norm: Tensor,
    /// The feed-forward is `lower(silu(gate x) * (raise x))`: `w2`, `w1`, `w3`.
    gate: Linear,
    raise: Linear,
    lower: Linear,
    /// Weights of the norms before attention and feed-forward, `[dim]` each.
    norms: [Tensor; 2],
    /// Weights of the norms of their outputs.
    branch_norms: [Tensor; 2],
    /// Projects to scale and gate of attention, then of the feed-forward.
    modulator: Option<Linear>,
}

/// The modulation of a block in every step, `[steps, dim]` each: scale and gate of attention, scale and gate of the
/// feed-forward. For an unmodulated block: gates of one, `[1, dim]`.
#[derive(Clone)]
pub(super) enum Modulations {
    /// Modulated by the timestep.
    OfSteps(Vec<Tensor>),
    /// Not modulated.
    None {
        /// Ones, `[1, dim]`.
        gate: Tensor,
    },
}

impl Modulations {
    fn at(&self, part: usize, step: usize) -> Result<Option<Tensor>> {
        match self {
            Modulations::OfSteps(parts) => parts[part].narrow(0, step, 1).map(Some),
            Modulations::None { .. } => Ok(None),
        }
    }
}

impl Block {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        is_modulated: bool,
        config: &TransformerConfig,
    ) -> std::result::Result<Block, MissingTensor> {
        let (width, inner) = (config.dim, config.feed_forward_width());
        let linear = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.{part}"), from, to)
        };
        let norm = |part: &str, width: usize| tensors.shaped(&format!("{name}.{part}.weight"), &[width]);
        let modulator = || {
            let name = format!("{name}.adaLN_modulation.0");
            Linear::new(tensors, &name, config.timestep_width(), 4 * width)
        };
        Ok(Block {
            query: linear("attention.to_q", width, width)?,
            key: linear("attention.to_k", width, width)?,
            value: linear("attention.to_v", width, width)?,
            output: linear("attention.to_out.0", width, width)?,
            query_norm: norm("attention.norm_q", config.head())?,
            key_norm: norm("attention.norm_k", config.head())?,
            gate: linear("feed_forward.w1", width, inner)?,
            raise: linear("feed_forward.w3", width, inner)?,
            lower: linear("feed_forward.w2", inner, width)?,
            norms: [norm("attention_norm1", width)?, norm("ffn_norm1", width)?],
            branch_norms: [norm("attention_norm2", width)?, norm("ffn_norm2", width)?],
            modulator: is_modulated.then(modulator).transpose()?,
        })
    }

    /// Linear layers that run over tokens.
    pub(super) fn layers(&self) -> [&Linear; 7] {
        let [query, key, value] = self.projections();
        let [gate, raise] = self.first_layers();
        [query, key, value, &self.output, gate, raise, &self.lower]
    }

    fn projections(&self) -> [&Linear; 3] {
        [&self.query, &self.key, &self.value]
    }

    fn first_layers(&self) -> [&Linear; 2] {
        [&self.gate, &self.raise]
    }

    /// Modulations of all steps, from embeddings of their times `[steps, timestep width]`.
    pub(super) fn modulate(&self, times: &Tensor) -> Result<Modulations> {
        match &self.modulator {
            Some(modulator) => Ok(Modulations::OfSteps(modulator.forward(times)?.chunk(4, 1)?)),
            None => Block::unmodulated(self.branch_norms[0].dim(0)?, times.dtype(), times.device()),
        }
    }

    /// The modulations of an unmodulated block.
    pub(super) fn unmodulated(width: usize, dtype: DType, device: &Device) -> Result<Modulations> {
        let ones = Tensor::ones((1, width), dtype, &Device::Cpu)?;
        Ok(Modulations::None {
            gate: ones.to_device(device)?,
        })
    }

    /// The norm before attention (0) or feed-forward (1).
    fn next(&self, modulations: &Modulations, half: usize, step: usize, dtype: DType) -> Result<Next> {
        let layers = match half {
            0 => &self.projections()[..],
            _ => &self.first_layers(),
        };
        let mut as_codes = true;
        for layer in layers {
            as_codes &= layer.takes_codes(dtype)?;
        }
        Ok(Next::Block {
            weight: self.norms[half].clone(),
            scale: modulations.at(2 * half, step)?,
            as_codes,
        })
    }

    fn close(&self, modulations: &Modulations, half: usize, step: usize) -> Result<Close> {
        let (gate, is_tanh) = match (modulations.at(2 * half + 1, step)?, modulations) {
            (None, Modulations::None { gate }) => (gate.clone(), false),
            (Some(gate), _) => (gate, true),
            (None, Modulations::OfSteps(_)) => candle_core::bail!("a block has no gate"),
        };
        Ok(Close {
            norm: self.branch_norms[half].clone(),
            gate,
            is_tanh,
        })
    }

    /// The norm at the beginning of the block.
    pub(super) fn first(&self, modulations: &Modulations, step: usize, dtype: DType) -> Result<Next> {
        self.next(modulations, 0, step, dtype)
    }

    /// Runs the block over `rows`, which are normalized; `needed` of them are used afterwards, and are normalized
    /// for `next`. Layers whose results only those need skip the others: after the last block the text and all
    /// padding are not used.
    pub(super) fn forward(
        &self,
        buffers: &ZImageBuffers,
        (rows, needed): (&Part, &Part),
        modulations: &Modulations,
        step: usize,
        angles: Angles<'_>,
        next: &Next,
    ) -> Result<()> {
        let (scratch, dtype) = (buffers.scratch(), rows.hidden.dtype());
        let mut as_codes = true;
        for layer in self.projections() {
            as_codes &= layer.takes_codes(dtype)?;
        }
        let projections = [
            self.query.to(&rows.query)?,
            self.key.to(&rows.key)?,
            self.value.to(&rows.value)?,
        ];
        ops::linears_into(rows.normed(as_codes), &projections, Epilogue::None, scratch)?;
        let norm = QkNorm::PerHead {
            q: &self.query_norm,
            k: &self.key_norm,
            eps: QK_EPS,
        };
        ops::qk_norm_rope(&rows.query, &rows.key, norm, Some(angles), Pairs::Neighbours)?;
        let operands = [&rows.query, &rows.key, &rows.value];
        rows.attention.attend(operands, &rows.attended)?;
        self.output
            .forward_into(&needed.attended, Epilogue::None, &needed.branch, scratch)?;
        let inside = self.next(modulations, 1, step, dtype)?;
        needed.pass_on(&self.close(modulations, 0, step)?, &inside)?;
        let halves = [self.gate.to(&needed.gate)?, self.raise.to(&needed.raised)?];
        let normed = needed.normed(matches!(inside, Next::Block { as_codes: true, .. }));
        ops::linears_into(normed, &halves, Epilogue::None, scratch)?;
        ops::glu(&needed.gate, &needed.raised, Nonlinearity::Silu, &needed.gated)?;
        self.lower
            .forward_into(&needed.gated, Epilogue::None, &needed.branch, scratch)?;
        needed.pass_on(&self.close(modulations, 1, step)?, next)
    }
}
