//! FLUX's transformer: diffusers' `FluxTransformer2DModel`, by the names of its tensors.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};

use super::blocks::{DoubleBlock, Modulator, SingleBlock};
use super::config::TransformerConfig;
use super::linear::Linear;
use super::positions::{Rotations, positions, rotations};
use crate::StageError;

/// Width of the sinusoidal embedding of timesteps and guidance.
const SINUSOIDS: usize = 256;

/// The transformer over tensors that are on a card. It holds handles only: making one costs no memory.
pub struct Transformer {
    config: TransformerConfig,
    picture_in: Linear,
    text_in: Linear,
    timestep: TwoLayers,
    guidance: Option<TwoLayers>,
    pooled: TwoLayers,
    double: Vec<DoubleBlock>,
    single: Vec<SingleBlock>,
    last_modulator: Modulator,
    last: Linear,
}

/// What is the same in every step of a request, computed once: embedded text, rotations, and the
/// modulation of every block for every step (a quarter of the weights, needed only here).
pub struct Conditioning {
    text: Tensor,
    rotations: Rotations,
    double: Vec<(Vec<Tensor>, Vec<Tensor>)>,
    single: Vec<Vec<Tensor>>,
    last: Vec<Tensor>,
}

/// What a request gives the transformer beside the latent.
pub struct Prompted<'a> {
    /// T5's last hidden states, `[1, tokens, joint_attention_dim]`.
    pub sequence: &'a Tensor,
    /// CLIP's pooled output, `[1, pooled_projection_dim]`.
    pub pooled: &'a Tensor,
    /// Guidance scale; ignored without an embedding for it.
    pub guidance: f32,
    /// Rows of picture tokens: a sixteenth of the picture's height.
    pub rows: usize,
    /// Columns of picture tokens.
    pub columns: usize,
}

/// Linear, SiLU, linear.
struct TwoLayers {
    first: Linear,
    second: Linear,
}

impl TwoLayers {
    fn new(
        tensors: &ComponentTensors,
        name: &str,
        inputs: usize,
        width: usize,
    ) -> Result<TwoLayers, MissingTensor> {
        let name = format!("time_text_embed.{name}_embedder");
        Ok(TwoLayers {
            first: Linear::new(tensors, &format!("{name}.linear_1"), inputs, width)?,
            second: Linear::new(tensors, &format!("{name}.linear_2"), width, width)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.second.forward(&ops::silu(&self.first.forward(x)?)?)
    }
}

impl Transformer {
    /// Takes the tensors out of a component and checks their shapes.
    ///
    /// # Errors
    /// The first that is missing or of another shape.
    pub fn new(config: &TransformerConfig, tensors: &ComponentTensors) -> Result<Transformer, MissingTensor> {
        let width = config.width();
        let guidance = config
            .guidance_embeds
            .then(|| TwoLayers::new(tensors, "guidance", SINUSOIDS, width))
            .transpose()?;
        let double = (0..config.num_layers)
            .map(|i| DoubleBlock::new(tensors, &format!("transformer_blocks.{i}"), config))
            .collect::<Result<_, _>>()?;
        let single = (0..config.num_single_layers)
            .map(|i| SingleBlock::new(tensors, &format!("single_transformer_blocks.{i}"), config))
            .collect::<Result<_, _>>()?;
        Ok(Transformer {
            picture_in: Linear::new(tensors, "x_embedder", config.in_channels, width)?,
            text_in: Linear::new(tensors, "context_embedder", config.joint_attention_dim, width)?,
            timestep: TwoLayers::new(tensors, "timestep", SINUSOIDS, width)?,
            guidance,
            pooled: TwoLayers::new(tensors, "text", config.pooled_projection_dim, width)?,
            double,
            single,
            last_modulator: Modulator::new(tensors, "norm_out", width, 2)?,
            last: Linear::new(tensors, "proj_out", width, config.in_channels)?,
            config: config.clone(),
        })
    }

    /// Computes what every step shares. `times` are the timesteps, from 0 to 1 (the sigmas), one a step.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn condition(&self, prompted: &Prompted<'_>, times: &[f32]) -> candle_core::Result<Conditioning> {
        let Prompted {
            sequence,
            pooled,
            guidance,
            rows,
            columns,
        } = *prompted;
        let (device, dtype) = (sequence.device(), sequence.dtype());
        let embedded = |thousandths: Vec<f32>| sinusoids(&thousandths, device)?.to_dtype(dtype);
        let mut vector = self
            .timestep
            .forward(&embedded(times.iter().map(|t| t * 1000.0).collect())?)?;
        if let Some(layers) = &self.guidance {
            vector = vector.broadcast_add(&layers.forward(&embedded(vec![guidance * 1000.0])?)?)?;
        }
        vector = vector.broadcast_add(&self.pooled.forward(&pooled.to_dtype(dtype)?)?)?;
        let activated = ops::silu(&vector)?;
        let places = positions(sequence.dim(1)?, rows, columns);
        Ok(Conditioning {
            text: self.text_in.forward(sequence)?,
            rotations: rotations(&places, self.config.axes_dims_rope, device)?,
            double: self
                .double
                .iter()
                .map(|block| block.modulate(&activated))
                .collect::<Result<_, _>>()?,
            single: self
                .single
                .iter()
                .map(|block| block.modulate(&activated))
                .collect::<Result<_, _>>()?,
            last: self.last_modulator.forward(&activated)?,
        })
    }

    /// The velocity at `latent` `[1, rows * columns, in_channels]` in step `step` (from 0), of the same
    /// shape. `go_on` is asked before every block.
    ///
    /// # Errors
    /// Those of candle, and what `go_on` gives.
    pub fn velocity(
        &self,
        latent: &Tensor,
        conditioning: &Conditioning,
        step: usize,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let mut picture = self.picture_in.forward(latent)?;
        let mut text = conditioning.text.clone();
        for (block, modulation) in self.double.iter().zip(&conditioning.double) {
            go_on()?;
            (picture, text) = block.forward(&picture, &text, modulation, step, &conditioning.rotations)?;
        }
        let (text_tokens, picture_tokens) = (text.dim(1)?, picture.dim(1)?);
        let mut joint = Tensor::cat(&[text, picture], 1)?;
        for (block, modulation) in self.single.iter().zip(&conditioning.single) {
            go_on()?;
            joint = block.forward(&joint, modulation, step, &conditioning.rotations)?;
        }
        let picture = joint.narrow(1, text_tokens, picture_tokens)?;
        // Scale before shift here (`AdaLayerNormContinuous`), shift before scale in every block.
        let scale = conditioning.last[0].narrow(0, step, 1)?;
        let shift = conditioning.last[1].narrow(0, step, 1)?;
        Ok(self
            .last
            .forward(&ops::modulated_layer_norm(&picture, &scale, &shift, 1e-6)?)?)
    }
}

/// `Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)`: cosines, then sines, `[values, 256]`
/// in f32. The angles are rounded to f32 as the reference rounds them: at 3,500 (a guidance of 3.5) that
/// is 1e-4. The frequencies are rounded correctly; torch's depend on the machine in their last bit, which
/// moves a whole model's output by 1.5e-5.
fn sinusoids(values: &[f32], device: &Device) -> candle_core::Result<Tensor> {
    let half = SINUSOIDS / 2;
    let minus_ln_of_period = -(10_000f64.ln()) as f32;
    let frequencies: Vec<f32> = (0..half)
        .map(|i| f64::from(minus_ln_of_period * i as f32 / half as f32).exp() as f32)
        .collect();
    let numbers: Vec<f32> = values
        .iter()
        .flat_map(|value| {
            let cosines = frequencies.iter().map(move |frequency| (value * frequency).cos());
            cosines.chain(frequencies.iter().map(move |frequency| (value * frequency).sin()))
        })
        .collect();
    Tensor::from_vec(numbers, (values.len(), SINUSOIDS), device)
}

/// A latent `[1, channels, 2 rows, 2 columns]` as tokens `[1, rows * columns, 4 * channels]`:
/// `FluxPipeline._pack_latents`.
///
/// # Errors
/// When a side is odd.
pub fn pack(latent: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = latent.dims4()?;
    if height % 2 != 0 || width % 2 != 0 {
        candle_core::bail!("a latent of {height} x {width} does not divide into squares of two");
    }
    latent
        .reshape((batch, channels, height / 2, 2, width / 2, 2))?
        .permute((0, 2, 4, 1, 3, 5))?
        .reshape((batch, (height / 2) * (width / 2), channels * 4))
}

/// Tokens as a latent again: `FluxPipeline._unpack_latents`.
///
/// # Errors
/// When there are not `rows * columns` tokens.
pub fn unpack(tokens: &Tensor, rows: usize, columns: usize) -> candle_core::Result<Tensor> {
    let (batch, _, width) = tokens.dims3()?;
    tokens
        .reshape((batch, rows, columns, width / 4, 2, 2))?
        .permute((0, 3, 1, 4, 2, 5))?
        .reshape((batch, width / 4, rows * 2, columns * 2))
}

/// Bytes that matrix products pack their operands into, and what else does not depend on the request.
const LIBRARIES: u64 = 4 << 20;

/// Predicted activation bytes of a step over `text` and `picture` tokens, and of the modulation of
/// `steps` steps.
///
/// Counted in tokens times the hidden width, with the picture's share `p` of the tokens. Every block holds its input.
/// Then, in a card's narrow dtype, where operations are composed and norms, rotations and activations go part by part:
///
/// - attending, both kinds: the normed input (single), queries, keys and values, and what [`ops::attention_scratch`]
///   has: 5 and that; while one is projected 4 and its product with and without bias;
/// - the feed-forward of a double block: attended (1), and of the picture alone: after attention, normed, raised, and
///   as much again (the product without the bias, or what the activation gives): 2 + 10 p;
/// - the end of a single block: normed, attended, 4 and 4 as above: 11; or attended and raised (5) twice over: 11.
///
/// On the CPU, in f32, operations hold no copies, and the widest is the same.
pub fn denoise_scratch(
    config: &TransformerConfig,
    text: usize,
    picture: usize,
    steps: u32,
    dtype: DType,
) -> u64 {
    let (tokens, width) = ((text + picture) as u64, config.width() as u64);
    let number = dtype.size_in_bytes() as u64;
    let unit = tokens * width * number;
    let of_picture = text.max(picture) as u64 * width * number;
    let fed_forward = (2 * unit + 10 * of_picture).max(11 * unit);
    // Where the dtype is narrower than f32, parts of norms, rotations and activations are held in f32, thrice.
    let widened = if number < 4 {
        3 * (tokens * width * 4 * 4).min(ops::PART_BYTES as u64)
    } else {
        0
    };
    let attending = ops::attention_scratch(
        config.num_attention_heads,
        text + picture,
        text + picture,
        config.attention_head_dim,
        dtype.size_in_bytes(),
    ) as u64;
    let of_step = (fed_forward + widened).max(5 * unit + attending.max(3 * unit + widened));
    let rotations = tokens * config.attention_head_dim as u64 * 4;
    let modulations = (config.num_layers * 12 + config.num_single_layers * 3 + 2) as u64;
    let modulations = modulations * width * u64::from(steps) * number;
    // The latent, its velocity and their sum in f32, and the embedded text.
    let latents =
        picture as u64 * config.in_channels as u64 * (5 * 4 + number) + text as u64 * width * number;
    of_step + rotations + modulations + latents + LIBRARIES
}
