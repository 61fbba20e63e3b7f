//! The parts of sampling that all families share: memory, steps under two conditions, and the latent between steps.

use std::cell::RefCell;

use candle_core::{DType, Device, Tensor};
use ops::{Finite, euler};
use residency::Bytes;

use crate::adapters::{AdapterSet, UsedAs};
use crate::mmdit::{CacheOfPass, StepCache};
use crate::start::Kept;
use crate::{LeftOut, ModelParts, PassesLeftOut, Request, Role, StageError, StagePlan};

/// The transformer of a sampling.
pub(crate) struct Denoiser<'a> {
    pub(crate) parts: &'a ModelParts,
    pub(crate) adapters: &'a AdapterSet,
    /// Name of its component.
    pub(crate) name: &'a str,
    /// Width of its hidden states.
    pub(crate) width: usize,
    /// Whether a tensor is the weight of a modulator, which steps do not use.
    pub(crate) is_modulator: fn(&str) -> bool,
}

impl Denoiser<'_> {
    /// Predicted activation bytes of `steps` steps over `tokens` tokens: those of the `buffers`, the scratch of quantized layers
    /// and of adapters, and the codes of rows for native fp8 products.
    pub(crate) fn scratch(&self, buffers: u64, tokens: usize, steps: u32, request: &Request) -> Bytes {
        let (components, adapters) = (&self.parts.components, self.adapters);
        let dequantizing = |tokens, of_modulators: bool| {
            let layers = |name: &str| (self.is_modulator)(name) == of_modulators;
            components.dequantizing(self.name, tokens, layers)
        };
        let of_adapters = adapters.scratch(self.name, tokens, components.dtype());
        let mut scratch = Bytes(buffers) + dequantizing(tokens, false).max(of_adapters);
        if components.is_multiplied_in_fp8(self.name) {
            scratch += Bytes(ops::CodesOfRows::bytes(tokens, self.width));
        }
        // Modulators run before the buffers are allocated, and, where strengths change, again in each step while the buffers
        // are allocated.
        let of_modulators = dequantizing(steps as usize, true);
        match request.has_curves() {
            true => scratch + of_modulators,
            false => scratch.max(of_modulators),
        }
    }

    /// The stage that runs the steps of a request once per item, with this scratch, and with the adapters' components for the
    /// transformer.
    pub(crate) fn stage(&self, name: &str, request: &Request, scratch: Bytes) -> StagePlan {
        self.stage_with_copies(name, request, scratch, |_| 0)
    }

    /// As [`Denoiser::stage`], with copies of weights with the terms of adapters where memory is free. `rows_of` says how many rows
    /// the layer of a weight has in a step: the copies are of those with many.
    pub(crate) fn stage_with_copies(
        &self,
        name: &str,
        request: &Request,
        scratch: Bytes,
        rows_of: impl Fn(&str) -> usize,
    ) -> StagePlan {
        let (components, adapters) = (&self.parts.components, self.adapters);
        let beside = adapters.beside(&[self.name], &request.adapters, UsedAs::Steps);
        let uses = &request.adapters;
        let of = (self.name, components);
        let with_copies = adapters.rung_with_copies(of, uses, scratch, rows_of);
        let others = adapters.rungs(self.name, uses, scratch, components.dtype());
        let rungs = with_copies.into_iter().chain(others).collect();
        StagePlan {
            per_item: true,
            ..StagePlan::of(name, Role::Sample, beside, rungs)
        }
    }
}

/// Floating-point operations of attention in so many layers: every token attends to every other, in heads of this width together.
pub(crate) fn flops_of_attention(layers: usize, tokens: usize, width: usize) -> u64 {
    4 * layers as u64 * (tokens as u64).pow(2) * width as u64
}

/// Passes over the blocks in a step: one for each condition that a step predicts under.
pub(crate) fn passes_in_step(request: &Request) -> u32 {
    1 + u32::from(request.negative().is_some())
}

/// What of a request's sampling its peak depends on, besides sizes: for the shape of its stage.
pub(crate) fn shape_of_sampling(request: &Request) -> String {
    let parts = [
        (request.has_curves(), " curve"),
        (request.negative().is_some(), " n"),
        (request.step_cache > 0.0, " cache"),
    ];
    let those = parts.into_iter().filter(|(is_so, _)| *is_so);
    those.map(|(_, part)| part).collect()
}

/// A value for the prompt of a request, and one for its negative prompt where that has an effect
/// ([`Request::negative`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompts<T> {
    pub(crate) prompt: T,
    pub(crate) negative: Option<T>,
}

impl<'a> Prompts<(&'static str, &'a str)> {
    /// The texts of a request, each with the name of its field.
    pub(crate) fn texts(request: &'a Request) -> Self {
        Prompts {
            prompt: ("prompt", &request.prompt),
            negative: request.negative().map(|text| ("negative_prompt", text)),
        }
    }

    /// The ends of these texts of a request that are not read, of which `tokens` counts the tokens.
    pub(crate) fn left_out(&self, request: &Request, tokens: impl Fn(&str) -> Option<usize>) -> Vec<LeftOut> {
        let of_text = self.iter().filter_map(|(field, text)| {
            let left_out = LeftOut::of_prompt(tokens(text), request)?;
            Some(LeftOut {
                field: (*field).into(),
                ..left_out
            })
        });
        of_text.collect()
    }
}

impl<T> Prompts<T> {
    /// The values that the request needs: that of the negative prompt only where it has an effect.
    pub(crate) fn of(request: &Request, prompt: T, negative: T) -> Prompts<T> {
        Prompts {
            prompt,
            negative: request.negative().map(|_| negative),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.prompt).chain(&self.negative)
    }

    /// The same for values of another type.
    pub(crate) fn map<U>(&self, mut change: impl FnMut(&T) -> U) -> Prompts<U> {
        Prompts {
            prompt: change(&self.prompt),
            negative: self.negative.as_ref().map(change),
        }
    }

    pub(crate) fn as_ref(&self) -> Prompts<&T> {
        Prompts {
            prompt: &self.prompt,
            negative: self.negative.as_ref(),
        }
    }

    /// Applies `change` to each value.
    ///
    /// # Errors
    /// The first error of `change`.
    pub(crate) fn try_map<U, E>(self, mut change: impl FnMut(T) -> Result<U, E>) -> Result<Prompts<U>, E> {
        Ok(Prompts {
            prompt: change(self.prompt)?,
            negative: self.negative.map(change).transpose()?,
        })
    }
}

/// The conditions under which the steps of a request predict: that of the prompt, and that of a negative prompt.
///
/// A step predicts under one condition after the other, in the same buffers: two conditions take twice the time, and little memory
/// ([`Conditions::kept_bytes`]). Both predictions are combined as `negative + scale * (prompt - negative)` in f32, where the
/// scale is [`Request::true_guidance`]. That is what diffusers' FLUX pipelines do with their `true_cfg_scale`. `ZImagePipeline`
/// computes `prompt + guidance * (prompt - negative)`, which is the same with a scale of `1 + guidance`. Qwen-Image's goes on from
/// there, and Z-Image's may ([`Length`]).
pub(crate) struct Conditions<C> {
    conditions: Prompts<C>,
    /// The prediction under the negative prompt, kept while that under the prompt is computed in the same buffers.
    kept: Option<Tensor>,
    scale: f64,
    length: Length,
    /// The caches of passes, where the request leaves some out.
    caches: Option<Prompts<RefCell<StepCache>>>,
    /// Whether the next step is guided: else it predicts under the prompt alone.
    is_guided: bool,
}

/// The length of the combination of both predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Length {
    /// As it is.
    Free,
    /// That of the prediction under the prompt, token by token, as in diffusers' `QwenImagePipeline`.
    OfPrompt,
    /// At most this many lengths of the prediction under the prompt, over all tokens, as with the `cfg_normalization` of
    /// diffusers' `ZImagePipeline`.
    AtMost(f64),
}

impl Length {
    /// Bytes of a combination that was made in host memory, where a prediction has `numbers` numbers.
    pub(crate) fn bytes(self, numbers: usize, dtype: DType) -> u64 {
        match self {
            Length::Free => 0,
            Length::OfPrompt | Length::AtMost(_) => (numbers * dtype.size_in_bytes()) as u64,
        }
    }
}

impl<C> Conditions<C> {
    /// The conditions of a request. Predictions have this shape, and the dtype and device of the transformer.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new(
        conditions: Prompts<C>,
        request: &Request,
        shape: (usize, usize, usize),
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<Conditions<C>> {
        let kept = conditions.negative.as_ref();
        let kept = kept.map(|_| Tensor::zeros(shape, dtype, device)).transpose()?;
        Ok(Conditions {
            conditions,
            kept,
            scale: request.true_guidance.into(),
            length: Length::Free,
            caches: None,
            is_guided: true,
        })
    }

    /// The same conditions, whose combined predictions have this length. Unless that is free they are combined in f32 in host
    /// memory: a prediction has a thousandth of the numbers that a step computes.
    pub(crate) fn of_length(self, length: Length) -> Conditions<C> {
        Conditions { length, ..self }
    }

    /// The same conditions, with the caches of a request that leaves passes out. The wanted rows of a pass have this shape.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn with_caches(
        self,
        request: &Request,
        shape: (usize, usize, usize),
        on: (DType, &Device),
    ) -> candle_core::Result<Conditions<C>> {
        let cache = |_: &C| StepCache::of(request, shape, on);
        let caches = self.conditions.as_ref().try_map(cache)?;
        let caches = match caches {
            Prompts {
                prompt: Some(prompt),
                negative,
            } => Some(Prompts {
                prompt: RefCell::new(prompt),
                negative: negative.flatten().map(RefCell::new),
            }),
            Prompts { prompt: None, .. } => None,
        };
        Ok(Conditions { caches, ..self })
    }

    /// The passes that were left out so far; `None` if the request leaves none out.
    pub(crate) fn left_out(&self) -> Option<PassesLeftOut> {
        let caches = self.caches.as_ref()?.iter().map(|cache| cache.borrow().passes());
        let sum = |all: PassesLeftOut, one: PassesLeftOut| PassesLeftOut {
            left_out: all.left_out + one.left_out,
            of: all.of + one.of,
        };
        caches.reduce(sum)
    }

    /// The same conditions, for a step that is guided, or predicts under the prompt alone.
    pub(crate) fn guided(&mut self, is_guided: bool) -> &Conditions<C> {
        self.is_guided = is_guided;
        self
    }

    /// Bytes that a second condition keeps, where a prediction has `numbers` numbers.
    pub(crate) fn kept_bytes(numbers: usize, dtype: DType) -> u64 {
        (numbers * dtype.size_in_bytes()) as u64
    }

    /// Puts others in the place of all conditions.
    pub(crate) fn replace(&mut self, conditions: Prompts<C>) {
        self.conditions = conditions;
    }

    /// All conditions, to be changed.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut C> {
        std::iter::once(&mut self.conditions.prompt).chain(&mut self.conditions.negative)
    }

    /// The prediction of a step: `predict` computes it under one condition, with the cache of its passes, in buffers that the next
    /// call overwrites.
    ///
    /// # Errors
    /// Errors of `predict`, and of the device.
    pub(crate) fn predict<'a>(
        &'a self,
        mut predict: impl FnMut(&C, CacheOfPass<'_>) -> Result<&'a Tensor, StageError>,
    ) -> Result<Prediction<'a>, StageError> {
        let caches = self.caches.as_ref();
        let negative = match (&self.conditions.negative, &self.kept) {
            (Some(negative), Some(kept)) if self.is_guided => {
                let cache = caches.and_then(|caches| caches.negative.as_ref());
                ops::copy_rows(predict(negative, cache)?, kept)?;
                Some(kept)
            }
            _ => None,
        };
        let prompt = predict(&self.conditions.prompt, caches.map(|caches| &caches.prompt))?;
        match negative {
            None => Ok(Prediction::of(prompt)),
            Some(kept) if self.length == Length::Free => Ok(Prediction::guided(prompt, kept, self.scale)),
            Some(kept) => {
                let combined = combined(prompt, kept, self.scale, self.length)?;
                let combined = combined.to_dtype(kept.dtype())?.to_device(kept.device())?;
                ops::copy_rows(&combined, kept)?;
                Ok(Prediction::of(kept))
            }
        }
    }
}

/// The combination of two predictions `[1, tokens, width]`, of this length; f32 in host memory.
fn combined(prompt: &Tensor, negative: &Tensor, scale: f64, length: Length) -> candle_core::Result<Tensor> {
    let on_host = |tensor: &Tensor| -> candle_core::Result<Vec<f32>> {
        let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        tensor.flatten_all()?.to_vec1()
    };
    let (of_prompt, mut combined) = (on_host(prompt)?, on_host(negative)?);
    for (number, prompt) in combined.iter_mut().zip(&of_prompt) {
        *number += scale as f32 * (prompt - *number);
    }
    let (together, most) = match length {
        Length::Free => return Tensor::from_vec(combined, prompt.shape(), &Device::Cpu),
        Length::OfPrompt => (prompt.dim(2)?.max(1), None),
        Length::AtMost(most) => (combined.len().max(1), Some(most)),
    };
    let of = |numbers: &[f32]| numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for (numbers, of_prompt) in combined
        .chunks_exact_mut(together)
        .zip(of_prompt.chunks_exact(together))
    {
        let (found, wanted) = (of(numbers), of(of_prompt) * most.unwrap_or(1.0));
        let is_right = most.is_some() && found <= wanted;
        // What is zero has no direction, and stays.
        if found > 0.0 && !is_right {
            let by = (wanted / found) as f32;
            numbers.iter_mut().for_each(|number| *number *= by);
        }
    }
    Tensor::from_vec(combined, prompt.shape(), &Device::Cpu)
}

/// The prediction of a step, valid until the next one: the combination of the transformer's outputs under each condition,
/// `[1, tokens, width]` in its dtype.
pub(crate) struct Prediction<'a> {
    prompt: &'a Tensor,
    /// Factor of the prediction: 1, or -1 where the velocity is its negative.
    by: f64,
    /// The prediction under the negative prompt, and the scale of the difference.
    negative: Option<(&'a Tensor, f64)>,
}

impl<'a> Prediction<'a> {
    /// The prediction under one condition alone.
    pub(crate) fn of(prompt: &'a Tensor) -> Prediction<'a> {
        Prediction {
            prompt,
            by: 1.0,
            negative: None,
        }
    }

    /// The combination `negative + scale * (prompt - negative)` of predictions under two conditions.
    pub(crate) fn guided(prompt: &'a Tensor, negative: &'a Tensor, scale: f64) -> Prediction<'a> {
        Prediction {
            prompt,
            by: 1.0,
            negative: Some((negative, scale)),
        }
    }

    /// The negated prediction, for a transformer that predicts from noise to picture: the velocity of the schedule is the negative of that.
    pub(crate) fn negated(self) -> Self {
        let by = -self.by;
        Prediction { by, ..self }
    }

    /// Adds the prediction times `by` to the latent. With two conditions these are two additions, so the combination needs no
    /// separate buffer.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn add_to(
        &self,
        latent: &Tensor,
        by: f64,
        (seen, finite): (&Tensor, &Finite),
    ) -> candle_core::Result<()> {
        let by = by * self.by;
        let Some((negative, scale)) = self.negative else {
            return euler(latent, self.prompt, by, seen, finite);
        };
        euler(latent, negative, by * (1.0 - scale), seen, finite)?;
        euler(latent, self.prompt, by * scale, seen, finite)
    }

    /// The latent plus the prediction times `by`, f32 in host memory.
    fn added_to(&self, latent: &Tensor, by: f64) -> candle_core::Result<Tensor> {
        let on_host = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32);
        let prompt = on_host(self.prompt)?;
        let combined = match self.negative {
            None => prompt,
            Some((negative, scale)) => {
                let negative = on_host(negative)?;
                (&negative + ((prompt - &negative)? * scale)?)?
            }
        };
        on_host(latent)? + (combined * (by * self.by))?
    }
}

/// The latent of a sampling, from step to step of its schedule.
pub(crate) struct SampledLatent {
    /// f32, on the device.
    latent: Tensor,
    /// The latent in the dtype of the transformer, which reads it. A separate tensor, since both are written.
    seen: Tensor,
    /// The unmasked part of the latent.
    kept: Option<Kept>,
    /// The sigmas of all steps that are run, and the final 0.
    sigmas: Vec<f32>,
    finite: Finite,
}

impl SampledLatent {
    /// The latent that a sampling starts from, f32 in host memory, arranged as the transformer reads it.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new(
        start: &Tensor,
        sigmas: Vec<f32>,
        kept: Option<Kept>,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<SampledLatent> {
        let start = start.contiguous()?;
        Ok(SampledLatent {
            seen: start.to_dtype(dtype)?.copy()?.to_device(device)?,
            latent: start.to_device(device)?,
            kept,
            sigmas,
            finite: Finite::new(device)?,
        })
    }

    /// Steps that are run.
    pub(crate) fn steps(&self) -> usize {
        self.sigmas.len().saturating_sub(1)
    }

    /// The sigmas of all steps that are run, and the final 0.
    pub(crate) fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// The latent in the dtype of the transformer, which reads it.
    pub(crate) fn seen(&self) -> &Tensor {
        &self.seen
    }

    /// The latent, f32 in host memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn on_host(&self) -> candle_core::Result<Tensor> {
        self.latent.to_device(&Device::Cpu)
    }

    /// The latent, f32 on the device.
    pub(crate) fn on_device(&self) -> &Tensor {
        &self.latent
    }

    /// As [`SampledLatent::end_of`], on the device.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn end_on_device(
        &self,
        step: usize,
        velocity: &Prediction<'_>,
    ) -> candle_core::Result<Tensor> {
        let end = self.latent.copy()?;
        let seen = self.seen.copy()?;
        let finite = Finite::new(end.device())?;
        velocity.add_to(&end, f64::from(-self.sigmas[step + 1]), (&seen, &finite))?;
        Ok(end)
    }

    /// Makes step `step`, from 0, by the velocity that the transformer of this name predicts.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; errors of the device.
    pub(crate) fn advance(
        &mut self,
        step: usize,
        velocity: &Prediction<'_>,
        transformer: &str,
    ) -> Result<(), StageError> {
        let (sigma, next) = (self.sigmas[step], self.sigmas[step + 1]);
        velocity.add_to(&self.latent, f64::from(next - sigma), (&self.seen, &self.finite))?;
        // Checking for finiteness synchronizes with the card, on purpose: a reported step has completed, and a cancelled one is
        // the last. The card idles for the microseconds until the next step is enqueued.
        if !self.finite.is_finite()? {
            return Err(StageError::NotFinite {
                component: transformer.to_owned(),
                step: step as u32 + 1,
            });
        }
        if let Some(kept) = &self.kept {
            self.replace(&kept.blended(&self.latent, next)?)?;
        }
        Ok(())
    }

    /// Continues with another latent, f32 in host memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn replace(&mut self, latent: &Tensor) -> candle_core::Result<()> {
        let device = self.seen.device().clone();
        self.seen = latent.to_dtype(self.seen.dtype())?.copy()?.to_device(&device)?;
        self.latent = latent.to_device(&device)?;
        Ok(())
    }

    /// The latent at the end of sampling, f32 in host memory, if the velocity of the step that was just made stays the same to
    /// the end.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn end_of(&self, step: usize, velocity: &Prediction<'_>) -> candle_core::Result<Tensor> {
        velocity.added_to(&self.latent, f64::from(-self.sigmas[step + 1]))
    }
}
