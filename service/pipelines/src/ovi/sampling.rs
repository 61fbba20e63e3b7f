//! The steps of a sampling: the film and its sound by a solver each, under the prompt and under negative prompts of their own.

use candle_core::{DType, Device, Tensor};
use ops::copy_rows;

use super::config::FusionConfig;
use super::transformer::{FilmTokens, FusionTransformer, TRANSFORMER};
use crate::StageError;
use crate::sampling::Prediction;
use crate::unipc::{Schedule, UniPcLatent};
use crate::wan::tokens::{latent_of_tokens, tokens_of};

/// How much the prompt counts against the negative prompts, for the film and for the sound; and the block that passes under the
/// negative prompts leave out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    pub film: f64,
    pub sound: f64,
    pub skipped: Option<usize>,
}

/// What a sampling starts from: f32 in host memory.
pub struct Start<'a> {
    /// Noise of the film, `[channels, frames, h, w]`.
    pub film: &'a Tensor,
    /// Noise of the sound, `[frames, channels]`.
    pub sound: &'a Tensor,
    /// The latent of the picture that the film begins with, `[channels, 1, h, w]`, in place of the noise.
    pub picture: Option<&'a Tensor>,
}

/// The states of texts, `[1, tokens, text_dim]` each.
pub struct PromptStates<'a> {
    pub prompt: &'a Tensor,
    /// The negative prompts of the film and of the sound; `None` if steps predict under the prompt alone.
    pub negative: Option<[&'a Tensor; 2]>,
}

/// Reports of a sampling.
pub trait Progress {
    /// Called before every block.
    ///
    /// # Errors
    /// [`StageError::Cancelled`].
    fn go_on(&mut self) -> Result<(), StageError>;

    /// Called after each of `steps` steps, from 1.
    fn step(&mut self, step: usize, steps: usize);
}

/// The latents of a film, `[channels, frames, h, w]`, and of its sound, `[frames, channels]`, f32 in host memory.
///
/// # Errors
/// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for shapes that do not match; errors of the
/// device.
pub fn sample(
    transformer: &FusionTransformer,
    start: &Start<'_>,
    texts: &PromptStates<'_>,
    (schedule, guidance): (&Schedule, &Guidance),
    (dtype, device): (DType, &Device),
    progress: &mut dyn Progress,
) -> Result<[Tensor; 2], StageError> {
    let on = (dtype, device);
    let (_, frames, h, w) = start.film.dims4()?;
    let film = [frames, h / 2, w / 2];
    let picture = start.picture.map(tokens_of).transpose()?;
    let sampled = match picture {
        Some(_) => tokens_of(&start.film.narrow(1, 1, frames - 1)?.contiguous()?)?,
        None => tokens_of(start.film)?,
    };
    let here = |tensor: &Tensor| tensor.to_dtype(dtype)?.contiguous()?.to_device(device);
    let tokens = FilmTokens {
        film,
        begins_with_picture: picture.is_some(),
        sound: start.sound.dim(0)?,
    };
    let steps = schedule.steps();
    let mut of_texts = |[film, sound]: [&Tensor; 2]| {
        let (film, sound) = (here(film)?, here(sound)?);
        transformer.texts([&film, &sound], &mut || progress.go_on())
    };
    let wanted = of_texts([texts.prompt; 2])?;
    let unwanted = texts.negative.map(&mut of_texts).transpose()?;
    let times = transformer.times(&schedule.times, on)?;
    let picture_here = picture.as_ref().map(here).transpose()?;
    let buffers = transformer.step_buffers(&tokens, picture_here.as_ref(), on)?;
    drop(picture_here);
    let new = |start: &Tensor| UniPcLatent::new(start, schedule.clone(), on);
    let mut latents = [new(&sampled)?, new(&start.sound.unsqueeze(0)?)?];
    let blank = |latent: &UniPcLatent| Tensor::zeros(latent.seen().shape(), dtype, device);
    let kept = [blank(&latents[0])?, blank(&latents[1])?];
    for step in 0..steps {
        let mut velocity = |texts, skipped| {
            let seen = [latents[0].seen(), latents[1].seen()];
            let mut go_on = || progress.go_on();
            transformer.velocity(seen, (&times, step), texts, skipped, &buffers, &mut go_on)
        };
        if let Some(unwanted) = &unwanted {
            let velocities = velocity(unwanted, guidance.skipped)?;
            for (velocity, kept) in velocities.into_iter().zip(&kept) {
                copy_rows(velocity, kept)?;
            }
        }
        let velocities = velocity(&wanted, None)?;
        let scales = [guidance.film, guidance.sound];
        let parts = velocities.into_iter().zip(&kept).zip(scales);
        for (latent, ((velocity, negative), scale)) in latents.iter_mut().zip(parts) {
            let prediction = match unwanted {
                Some(_) => Prediction::guided(velocity, negative, scale),
                None => Prediction::of(velocity),
            };
            latent.advance(step, &prediction, TRANSFORMER)?;
        }
        progress.step(step + 1, steps);
    }
    let [video, audio] = latents;
    let video = latent_of_tokens(&video.on_host()?, (film[1], film[2]))?;
    let video = match start.picture {
        Some(picture) => Tensor::cat(&[picture, &video], 1)?,
        None => video,
    };
    Ok([video, audio.on_host()?.squeeze(0)?])
}

/// Bytes on the card for the latents of a sampling over these tokens, and for the velocities under the negative prompts.
pub(super) fn latent_bytes(config: &FusionConfig, tokens: &FilmTokens, dtype: DType) -> u64 {
    let [film, sound] = tokens.all();
    let numbers = [film * config.token_width(), sound * config.audio.in_dim];
    let of = |numbers: usize| UniPcLatent::bytes(numbers, dtype) + (numbers * dtype.size_in_bytes()) as u64;
    numbers.map(of).iter().sum()
}
