//! The fusion model: a transformer for the film and one for its sound, block by block, each of which reads the hidden states of
//! the other one (Low et al. 2025).
//!
//! In a block the tokens of each branch attend to each other first. Then each branch attends to its text and to the other branch,
//! as that was after this attention, with one query: unrotated to the text, rotated to the other branch. Frames of sound are
//! rotated by their time alone, at the rate of frames of the film.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use ops::Epilogue;

use super::branch::{Branch, BranchBuffers, keys_values};
use super::config::{FusionConfig, MAX_POSITIONS};
use super::fusion::Place;
use super::layout::{AUDIO, VIDEO};
use super::sound_embedding::{self, SoundEmbedding};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::SINUSOIDS;
use crate::rotary::{Rotations, Rounded, rotations};
use crate::sinusoids::precise_sinusoids;
use crate::wan::blocks::KeysValues;
use crate::wan::modulation::Tables;
use crate::wan::{TokenCounts, patches_last};

/// Name of the component.
pub(crate) const TRANSFORMER: &str = "transformer";

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// The fusion model over resident tensors. It holds handles only, but for a copy of the embedding of patches, with its inputs in
/// the order of the outputs.
pub struct FusionTransformer {
    config: FusionConfig,
    patches: Linear,
    frames: SoundEmbedding,
    video: Branch,
    audio: Branch,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
    /// Of a branch's tokens to each other.
    attention: AttentionPrecision,
}

/// The sizes of a film with its sound, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilmTokens {
    /// Latent frames, and rows and columns of tokens in each.
    pub film: [usize; 3],
    /// Whether the first latent frame is that of a clean picture, for which no velocity is predicted.
    pub begins_with_picture: bool,
    /// Latent frames of the sound.
    pub sound: usize,
}

impl FilmTokens {
    fn video(&self) -> TokenCounts {
        let [frames, rows, columns] = self.film;
        let of_frame = rows * columns;
        let first = if self.begins_with_picture { of_frame } else { 0 };
        TokenCounts {
            first,
            sampled: frames * of_frame - first,
        }
    }

    fn audio(&self) -> TokenCounts {
        TokenCounts {
            first: 0,
            sampled: self.sound,
        }
    }

    /// Tokens of both branches.
    pub fn all(&self) -> [usize; 2] {
        [self.video().all(), self.sound]
    }
}

/// The embedded times of all steps.
pub struct Times([crate::wan::Times; 2]);

/// The keys and values of the texts of a condition in every block, those of the film and of the sound: the same in all steps.
pub struct Texts(Vec<[KeysValues; 2]>);

/// Buffers of a request's steps.
pub struct StepBuffers {
    video: BranchBuffers,
    audio: BranchBuffers,
    /// Rotations of the tokens of the film and of its sound.
    rotations: [Rotations; 2],
    /// Keys and values of the sound, for the film.
    of_audio: Place,
    /// The embedded picture that the film begins with, `[1, first, width]`.
    picture: Option<Tensor>,
}

impl FusionTransformer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape; errors of the device.
    pub fn new(config: &FusionConfig, tensors: &ComponentTensors) -> Result<FusionTransformer, StageError> {
        let tensors = &AdaptedTensors::from(tensors);
        let (width, channels) = (config.video.dim, config.video.in_dim);
        let read = || -> Result<_, MissingTensor> {
            let weight = format!("{VIDEO}.patch_embedding.weight");
            let transformer = FusionTransformer {
                // Replaced below.
                patches: Linear::of(tensors.shaped(&weight, &[width, channels, 1, 2, 2])?, None),
                frames: SoundEmbedding::new(tensors, AUDIO, config)?,
                video: Branch::new(tensors, VIDEO, &config.video, config.token_width())?,
                audio: Branch::new(tensors, AUDIO, &config.audio, config.audio.out_dim)?,
                config: config.clone(),
                stream: tensors.stream(),
                attention: AttentionPrecision::Full,
            };
            let weight = tensors.shaped(&weight, &[width, channels, 1, 2, 2])?;
            let bias = tensors.shaped(&format!("{VIDEO}.patch_embedding.bias"), &[width])?;
            Ok((transformer, weight, bias))
        };
        let (transformer, weight, bias) = read().map_err(StageError::missing_in(TRANSFORMER))?;
        Ok(FusionTransformer {
            patches: Linear::of(patches_last(&weight, &[channels])?, Some(bias)),
            ..transformer
        })
    }

    /// The same transformer, with attention of a branch's tokens to each other as asked.
    pub(super) fn with_attention(self, attention: AttentionPrecision) -> FusionTransformer {
        FusionTransformer { attention, ..self }
    }

    /// The embedded times of the steps, in training steps.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn times(&self, times: &[f32], (dtype, device): (DType, &Device)) -> Result<Times, StageError> {
        let all: Vec<f32> = times.iter().copied().chain([0.0]).collect();
        let sinusoids = precise_sinusoids(&all, SINUSOIDS, dtype, device)?;
        Ok(Times([
            self.video.times(&sinusoids)?,
            self.audio.times(&sinusoids)?,
        ]))
    }

    /// The keys and values of the states of texts, `[1, tokens, text_dim]`, that of the film and that of the sound. `go_on` is
    /// called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`; when a streamed block cannot be read.
    pub fn texts(
        &self,
        [video, audio]: [&Tensor; 2],
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Texts, StageError> {
        let (video, audio) = (self.video.embedded_text(video)?, self.audio.embedded_text(audio)?);
        let branches = [&self.video, &self.audio];
        Ok(Texts(keys_values(
            branches,
            [&video, &audio],
            &self.stream,
            go_on,
        )?))
    }

    /// Buffers of steps over these tokens. `picture` are the tokens of the picture that a film begins with, `[1, first, 4
    /// channels]`.
    ///
    /// # Errors
    /// Errors of the device; [`StageError::BadInput`] for more frames than the model has positions.
    pub fn step_buffers(
        &self,
        tokens: &FilmTokens,
        picture: Option<&Tensor>,
        (dtype, device): (DType, &Device),
    ) -> Result<StepBuffers, StageError> {
        let on = (dtype, device);
        if tokens
            .film
            .iter()
            .chain([&tokens.sound])
            .any(|side| *side > MAX_POSITIONS)
        {
            return Err(StageError::BadInput(format!(
                "{:?} and {} positions where {MAX_POSITIONS} are the most",
                tokens.film, tokens.sound
            )));
        }
        // The tokens of either branch go through layers of the other one, too.
        let layers = || self.video.layers().chain(self.audio.layers());
        let of_film = self.config.token_width();
        let video = self.video.buffers(tokens.video(), layers(), of_film, on)?;
        let of_sound = self.config.audio.out_dim;
        let audio = self.audio.buffers(tokens.audio(), layers(), of_sound, on)?;
        let [video, audio] = [video, audio].map(|buffers| buffers.with_attention(self.attention));
        Ok(StepBuffers {
            of_audio: Place::new(&self.config.audio.blocks(), tokens.sound, &video.velocity)?,
            video,
            audio,
            rotations: [
                self.film_rotations(tokens.film, device)?,
                self.sound_rotations(tokens.sound, device)?,
            ],
            picture: picture.map(|picture| self.patches.forward(picture)).transpose()?,
        })
    }

    /// Rotations of the tokens of a film.
    fn film_rotations(
        &self,
        [frames, rows, columns]: [usize; 3],
        device: &Device,
    ) -> candle_core::Result<Rotations> {
        let mut positions = Vec::with_capacity(frames * rows * columns);
        for frame in 0..frames as u32 {
            for row in 0..rows as u32 {
                positions.extend((0..columns as u32).map(|column| [frame, row, column]));
            }
        }
        let axes = self.config.video.blocks().axes();
        rotations(&positions, axes, THETA, Rounded::Results, device)
    }

    /// Rotations of frames of sound: pairs of the axis of time by the frame's time, and the others by nothing.
    fn sound_rotations(&self, frames: usize, device: &Device) -> candle_core::Result<Rotations> {
        let shape = self.config.audio.blocks();
        let ([time, ..], pairs) = (shape.axes(), shape.head / 2);
        let factor = self.config.audio.temporal_rope_scaling_factor;
        let mut cos = Vec::with_capacity(frames * pairs);
        let mut sin = Vec::with_capacity(frames * pairs);
        for frame in 0..frames {
            let at = frame as f64 * factor;
            let turned = turns_at(at, time, THETA);
            let still = std::iter::repeat_n((0.0, 1.0), pairs - time / 2);
            for (s, c) in turned.into_iter().chain(still) {
                cos.push(c);
                sin.push(s);
            }
        }
        Ok(Rotations {
            cos: Tensor::from_vec(cos, (frames, pairs), device)?,
            sin: Tensor::from_vec(sin, (frames, pairs), device)?,
        })
    }

    /// The velocities of the film, `[1, sampled, 4 channels]`, and of its sound, `[1, frames, channels]`, at these latents of the
    /// same shapes in step `step` (from 0), under the texts of a condition. The block `skipped` is left out. They are in the step
    /// buffers, valid until the next pass. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub fn velocity<'a>(
        &self,
        [film, sound]: [&Tensor; 2],
        (times, step): (&Times, usize),
        texts: &Texts,
        skipped: Option<usize>,
        buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<[&'a Tensor; 2], StageError> {
        let StepBuffers {
            video,
            audio,
            rotations: [of_film, of_sound],
            ..
        } = buffers;
        self.video.set_time(&times.0[0], step, video)?;
        self.audio.set_time(&times.0[1], step, audio)?;
        self.embed(film, sound, buffers)?;
        let count = self.video.blocks.len();
        let after = |block: usize| {
            (block..count)
                .find(|next| Some(*next) != skipped)
                .unwrap_or(count)
        };
        let video = self.video.enter(after(0), video, of_film)?;
        let audio = self.audio.enter(after(0), audio, of_sound)?;
        for (block, [of_video, of_audio]) in texts.0.iter().enumerate() {
            go_on()?;
            // Blocks are brought in order, whether they run or not.
            self.stream.enter(BlockPlace::each_pass(block))?;
            if skipped == Some(block) {
                continue;
            }
            audio.own_attention(block)?;
            video.own_attention(block)?;
            // What a branch reads of the other one is from before the other's further attention.
            let seen_by_video = self.video.blocks[block].other.keys_values(
                &audio.whole.hidden,
                &buffers.of_audio,
                of_sound,
                buffers.audio.buffers.scratch(),
            )?;
            let seen_by_audio = self.audio.blocks[block].other.keys_values(
                &video.whole.hidden,
                &Place::of_part(&video.whole),
                of_film,
                buffers.video.buffers.scratch(),
            )?;
            let next = after(block + 1);
            audio.rest(block, (of_audio, &seen_by_audio), next)?;
            video.rest(block, (of_video, &seen_by_video), next)?;
        }
        video.close()?;
        audio.close()?;
        Ok([&buffers.video.velocity, &buffers.audio.velocity])
    }

    /// Embeds the latents, and the picture before the film.
    fn embed(&self, film: &Tensor, sound: &Tensor, buffers: &StepBuffers) -> candle_core::Result<()> {
        let counts = buffers.video.counts;
        let video = &buffers.video.buffers;
        let sampled = video.part(counts.first, counts.sampled)?;
        self.patches
            .forward_into(film, Epilogue::None, &sampled.hidden, video.scratch())?;
        if let Some(picture) = &buffers.picture {
            ops::copy_rows(picture, &video.part(0, counts.first)?.hidden)?;
        }
        self.frames.forward(sound, &buffers.audio.buffers.whole()?.hidden)
    }
}

/// Sines and cosines of the pairs of an axis at a time between positions, in f64.
fn turns_at(at: f64, width: usize, theta: f64) -> Vec<(f32, f32)> {
    let turn = |pair: usize| {
        let angle = at * theta.powf(-((2 * pair) as f64) / width as f64);
        let (sin, cos) = angle.sin_cos();
        (sin as f32, cos as f32)
    };
    (0..width / 2).map(turn).collect()
}

/// Predicted activation bytes of `steps` steps over these tokens, under so many conditions of a text each. Not included are the
/// latents, the scratch of quantized layers, and the codes of rows for native fp8 products.
pub fn denoise_scratch(
    config: &FusionConfig,
    tokens: &FilmTokens,
    conditions: usize,
    steps: u32,
    dtype: DType,
) -> u64 {
    let number = dtype.size_in_bytes();
    let branches = [
        (&config.video, tokens.video(), config.token_width()),
        (&config.audio, tokens.audio(), config.audio.out_dim),
    ];
    let of_branch = |(branch, counts, token): (&super::config::BranchConfig, TokenCounts, usize)| {
        let shape = branch.blocks();
        let times = (steps as usize + 1) * 7 * branch.dim;
        let texts = conditions * branch.text_len;
        let embedded = texts * (branch.text_dim + 2 * branch.dim);
        let velocity = counts.sampled * token;
        let picture = counts.first * branch.dim;
        shape.buffers_bytes(counts.all(), dtype)
            + shape.rotations_bytes(counts.all())
            + shape.texts_bytes(branch.num_layers, texts, dtype)
            + 2 * Tables::bytes(branch.num_layers, branch.dim, dtype)
            + ((times + embedded + velocity + picture) * number) as u64
    };
    let of_both: u64 = branches.into_iter().map(of_branch).sum();
    let patches = config.token_width() * config.video.dim;
    of_both
        + Place::bytes(&config.audio.blocks(), tokens.sound, number)
        + sound_embedding::scratch(config, tokens.sound, dtype)
        + ((patches + (steps as usize + 1) * SINUSOIDS) * number) as u64
        + LIBRARIES
}
