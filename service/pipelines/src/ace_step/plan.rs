//! The stages of a request: components, values and needs of each.
//!
//! | stage | components | gives |
//! |---|---|---|
//! | `encode_text` | `text_encoder` | states of the caption, embedded lyrics |
//! | `encode_source` | `vae` | moments of the source, where a task has one |
//! | `encode_reference` | `vae` | moments of the track whose timbre is taken |
//! | `encode_condition` | `condition_encoder` | the condition that the transformer attends to, and silence |
//! | `quantize_source` | `audio_tokenizer`, `audio_token_detokenizer` | of a cover: the source decoded from its tokens |
//! | `denoise` | `transformer` | the latent; of a request with slots in rounds, where each round but the last returns its state |
//! | `decode` | `vae` | the track, piece by piece |

use candle_core::DType;
use model::LeftOut;
use model::plan::{names, rungs_of};
use model::{Memo, Passes};
use residency::Bytes;

use super::buffers::{denoise_scratch, request_scratch};
use super::condition::ConditionEncoder;
use super::model::{AceStepModel, CONDITION_ENCODER, DETOKENIZER, TEXT_ENCODER, TOKENIZER, TRANSFORMER, VAE};
use super::padded::bytes_of_rows;
use super::prompts::{MAX_LYRIC_TOKENS, caption, lyrics, seconds_of};
use super::sound::{samples_at, samples_of_timbre};
use super::tasks::{first_step_of, keeps_source, starts_from_source};
use super::tokens::{AudioDetokenizer, AudioTokenizer};
use super::transformer::{is_in_steps, is_modulator};
use crate::autoencoders::oobleck::{decode_ladder, encode_ladder};
use crate::rounds::{Round, is_in_rounds, shared_pass};
use crate::sampling::Denoiser;
use crate::text::tokenizers::TokenizeError;
use crate::{Audio, AudioTask, Clip, Medium, Request, RequestError, Role, Rung, StagePlan, ValueShape};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const ENCODE_SOURCE: &str = "encode_source";
pub(super) const ENCODE_REFERENCE: &str = "encode_reference";
pub(super) const ENCODE_CONDITION: &str = "encode_condition";
pub(super) const QUANTIZE_SOURCE: &str = "quantize_source";
pub(super) const DENOISE: &str = "denoise";
pub(super) const DECODE: &str = "decode";

/// Names of values. `[tokens, width]` of the text encoder:
pub(super) const TEXT: &str = "text";
pub(super) const LYRICS: &str = "lyrics";
/// The caption of a new track, with which a cover of less strength is mixed.
pub(super) const PLAIN_TEXT: &str = "plain_text";
/// Mean and deviation, f32 `[2, frames, channels]`.
pub(super) const SOURCE: &str = "source";
pub(super) const REFERENCE: &str = "reference";
/// `[tokens, width]` of the condition encoder.
pub(super) const CONDITION: &str = "condition";
pub(super) const PLAIN_CONDITION: &str = "plain_condition";
pub(super) const NO_CONDITION: &str = "no_condition";
/// `[frames, channels]`.
pub(super) const SILENCE: &str = "silence";
pub(super) const HINT: &str = "hint";
/// f32 `[1, frames, channels]`.
pub(super) const LATENT: &str = "latent";
/// Names of the values that a round passes to the next; the number of steps done follows the name. Both have the shape of the
/// latent: the latent at the noise of those steps, and for a guided request the running differences of its velocities.
pub(super) const SAMPLING: &str = "sampling";
pub(super) const GUIDANCE: &str = "guidance";

/// Prompts of similar length share their learned peaks.
const MULTIPLE: usize = 32;

/// The tokens of a request.
pub(super) struct Prompt {
    pub(super) text: Vec<u32>,
    pub(super) lyrics: Vec<u32>,
    /// The tokens of the plain text that a cover of less strength is mixed with.
    pub(super) plain_text: Option<Vec<u32>>,
}

impl Prompt {
    /// Tokens of a condition of a text.
    fn attended(&self, text: &[u32]) -> usize {
        self.lyrics.len() + 1 + text.len()
    }
}

/// A request with only this medium, for a stage that reads nothing else.
fn of_audio(audio: Audio) -> Request {
    Request::of(Medium::Audio(audio), 1, 0.0, 1)
}

/// The clip's format without its data: the format has the length.
fn without_data(clip: &Clip) -> Clip {
    Clip {
        format: clip.format,
        data: bytes::Bytes::new(),
    }
}

impl AceStepModel {
    /// Latent frames of a track of the requested seconds.
    pub(super) fn frames_of_seconds(&self, audio: &Audio) -> usize {
        ((seconds_of(audio) * self.frames_per_second()).ceil() as usize).max(1)
    }

    /// Latent frames of a clip, rounded up to whole frames.
    pub(super) fn frames_of_clip(&self, clip: &Clip) -> usize {
        let hop = self.vae.hop().max(1);
        let samples = samples_at(clip, self.vae.sampling_rate).next_multiple_of(hop);
        self.vae.frames(samples)
    }

    /// Latent frames of a request's result: those of its source, if it has one.
    pub(super) fn frames(&self, audio: &Audio) -> usize {
        match &audio.init_audio {
            Some(clip) => self.frames_of_clip(clip),
            None => self.frames_of_seconds(audio),
        }
    }

    /// Latent frames of the track whose timbre is taken.
    pub(super) fn frames_of_timbre(&self) -> usize {
        self.vae.frames(samples_of_timbre(self.vae.sampling_rate))
    }

    /// Whether steps are guided: predicted with a condition and without one.
    pub(super) fn is_guided(&self, request: &Request) -> bool {
        !self.transformer.is_turbo() && request.guidance > 1.0
    }

    /// Seconds of a request's result, as its caption states them: those of its source, if it has one.
    fn seconds(&self, audio: &Audio) -> f64 {
        match &audio.init_audio {
            Some(clip) => {
                samples_at(clip, self.vae.sampling_rate) as f64 / f64::from(self.vae.sampling_rate.max(1))
            }
            None => seconds_of(audio),
        }
    }

    /// The tokens of a request.
    pub(super) fn prompt(&self, request: &Request, audio: &Audio) -> Result<Prompt, TokenizeError> {
        let seconds = self.seconds(audio);
        let most = request.max_sequence_length as usize;
        let text = |task: &AudioTask| {
            let text = caption(&request.prompt, audio, task, seconds);
            self.known(self.tokenizer.encode_text(&text, most)?)
        };
        let is_mixed = audio.task == AudioTask::Cover && request.strength < 1.0;
        Ok(Prompt {
            text: text(&audio.task)?,
            lyrics: self.known(self.tokenizer.encode_text(&lyrics(audio), MAX_LYRIC_TOKENS)?)?,
            plain_text: is_mixed.then(|| text(&AudioTask::TextToMusic)).transpose()?,
        })
    }

    /// The part of a request that [`AceStepModel::prompt`] reads. It has no windows and strengths of the source.
    fn text_memo(&self, request: &Request, audio: &Audio) -> Memo {
        let task = match audio.task.clone() {
            AudioTask::Repaint { .. } => AudioTask::Repaint {
                start_seconds: 0.0,
                end_seconds: 0.0,
            },
            AudioTask::Lego { track, .. } => AudioTask::Lego {
                track,
                start_seconds: 0.0,
                end_seconds: 0.0,
            },
            other => other,
        };
        let read = Audio {
            seconds: audio.seconds,
            lyrics: audio.lyrics.clone(),
            init_audio: audio.init_audio.as_ref().map(without_data),
            task,
            beats_per_minute: audio.beats_per_minute,
            key: audio.key.clone(),
            time_signature: audio.time_signature.clone(),
            language: audio.language.clone(),
            ..Audio::default()
        };
        Memo::of(Request {
            // The stage reads only whether the strength is below 1: then a cover is mixed.
            strength: if request.strength < 1.0 { 0.5 } else { 1.0 },
            ..request.of_prompt(Medium::Audio(read))
        })
    }

    /// The part of a request without a reference that the condition stage reads: its length, and whether it is guided.
    fn condition_memo(&self, request: &Request, audio: &Audio) -> Memo {
        Memo::of(Request {
            guidance: if self.is_guided(request) { 2.0 } else { 0.0 },
            ..of_audio(Audio {
                seconds: audio.seconds,
                init_audio: audio.init_audio.as_ref().map(without_data),
                ..Audio::default()
            })
        })
    }

    /// Tokens that the text encoder knows.
    fn known(&self, ids: Vec<u32>) -> Result<Vec<u32>, TokenizeError> {
        self.tokenizer
            .check_known(&ids, TEXT_ENCODER, self.text.vocab_size)?;
        Ok(ids)
    }

    /// The ends of the caption and the lyrics that are not read.
    pub(super) fn texts_left_out(&self, request: &Request, audio: &Audio) -> Vec<LeftOut> {
        let text = caption(&request.prompt, audio, &audio.task, self.seconds(audio));
        let most = request.max_sequence_length as usize;
        let prompt = self.tokenizer.left_out_of_text(&text, most);
        let sung = self.tokenizer.left_out_of_text(&lyrics(audio), MAX_LYRIC_TOKENS);
        let sung = sung.ok().filter(|tokens| *tokens > 0).map(|tokens| LeftOut {
            field: "lyrics".into(),
            tokens,
            limit: MAX_LYRIC_TOKENS,
            set_by: None,
        });
        LeftOut::of_prompt(prompt.ok(), request)
            .into_iter()
            .chain(sung)
            .collect()
    }

    /// The stages of a valid request.
    pub(super) fn stages(
        &self,
        request: &Request,
        audio: &Audio,
    ) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let prompt = self.prompt(request, audio);
        let prompt = prompt.map_err(|error| vec![RequestError::new("prompt", error.to_string())])?;
        let mut stages = vec![self.text_stage(&prompt, self.text_memo(request, audio))];
        let source = audio.init_audio.as_ref().filter(|_| !request.from_values);
        if let Some(clip) = source {
            let samples = samples_at(clip, self.vae.sampling_rate).next_multiple_of(self.vae.hop().max(1));
            let read = Audio {
                init_audio: Some(clip.clone()),
                ..Audio::default()
            };
            stages.push(self.encode_stage((ENCODE_SOURCE, SOURCE), read, samples));
        }
        if let Some(clip) = &audio.reference {
            let samples = samples_of_timbre(self.vae.sampling_rate);
            let read = Audio {
                reference: Some(clip.clone()),
                ..Audio::default()
            };
            stages.push(self.encode_stage((ENCODE_REFERENCE, REFERENCE), read, samples));
        }
        stages.push(self.condition_stage(request, audio, &prompt));
        if audio.task == AudioTask::Cover {
            stages.extend(self.quantize_stage(audio));
        }
        stages.extend(self.denoise_stages(request, audio, &prompt));
        stages.push(self.decode_stage(audio));
        Ok(stages)
    }

    /// A value of the text encoder.
    fn of_text(&self, name: &str, ids: &[u32]) -> ValueShape {
        ValueShape::new(name, vec![ids.len(), self.text.hidden_size])
    }

    fn text_stage(&self, prompt: &Prompt, memo: Memo) -> StagePlan {
        let dtype = self.parts.dtype();
        let longest = prompt
            .text
            .len()
            .max(prompt.plain_text.as_ref().map_or(0, Vec::len));
        let tokens = longest.next_multiple_of(MULTIPLE);
        let is_quantized = self.parts.components.is_quantized(TEXT_ENCODER);
        let rows = prompt.lyrics.len().next_multiple_of(MULTIPLE) + 4 * tokens;
        let scratch = self.text.scratch(tokens, is_quantized, dtype)
            + self.parts.components.dequantizing(TEXT_ENCODER, tokens, |_| true)
            + Bytes((rows * self.text.hidden_size * dtype.size_in_bytes()) as u64);
        let plain = prompt.plain_text.as_ref().map(|_| PLAIN_TEXT);
        let mut gives: Vec<&str> = [LYRICS, TEXT].into_iter().chain(plain).collect();
        gives.sort_unstable();
        StagePlan {
            shape: format!("t{tokens}{}", self.parts.components.as_multiplied(TEXT_ENCODER)),
            gives: names(&gives),
            memo: Some(memo),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    /// The stage that encodes a clip, the only one in the medium `read`.
    fn encode_stage(&self, (name, gives): (&str, &str), read: Audio, samples: usize) -> StagePlan {
        let ladder = encode_ladder(&self.vae, samples, self.parts.dtype());
        StagePlan {
            shape: format!("{samples} samples"),
            gives: names(&[gives]),
            memo: Some(Memo::of(of_audio(read))),
            reads_media: true,
            ..StagePlan::of(name, Role::Encode, [VAE], rungs_of(ladder, Bytes::ZERO))
        }
    }

    /// Moments of `frames` frames.
    fn moments(&self, name: &str, frames: usize) -> ValueShape {
        ValueShape::new(name, vec![2, frames, self.vae.decoder_input_channels])
    }

    fn condition_stage(&self, request: &Request, audio: &Audio, prompt: &Prompt) -> StagePlan {
        let dtype = self.parts.dtype();
        let plain = prompt.plain_text.as_ref();
        let mut takes = vec![
            self.of_text(TEXT, &prompt.text),
            self.of_text(LYRICS, &prompt.lyrics),
        ];
        takes.extend(plain.map(|ids| self.of_text(PLAIN_TEXT, ids)));
        let timbre = self.frames_of_timbre();
        let has_reference = audio.reference.is_some();
        takes.extend(has_reference.then(|| self.moments(REFERENCE, timbre)));
        let mut gives = vec![CONDITION, SILENCE];
        gives.extend(plain.map(|_| PLAIN_CONDITION));
        gives.extend(self.is_guided(request).then_some(NO_CONDITION));
        gives.sort_unstable();
        let longest = prompt.text.len().max(plain.map_or(0, Vec::len));
        let (text, lyrics) = (
            longest.next_multiple_of(MULTIPLE),
            prompt.lyrics.len().next_multiple_of(MULTIPLE),
        );
        let scratch = Bytes(ConditionEncoder::scratch(
            &self.condition,
            (text, lyrics, timbre),
            dtype,
        )) + self
            .parts
            .components
            .dequantizing(CONDITION_ENCODER, lyrics.max(timbre), |_| true);
        // The sample of a reference depends on the seed.
        let memo = (!has_reference).then(|| self.condition_memo(request, audio));
        StagePlan {
            shape: format!(
                "t{text} l{lyrics}{}",
                self.parts.components.as_multiplied(CONDITION_ENCODER)
            ),
            takes,
            gives: names(&gives),
            per_item: has_reference,
            memo,
            ..StagePlan::of(
                ENCODE_CONDITION,
                Role::Encode,
                [CONDITION_ENCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    fn quantize_stage(&self, audio: &Audio) -> Option<StagePlan> {
        let (tokens, dtype) = (self.tokens.as_ref()?, self.parts.dtype());
        let frames = self.frames(audio);
        let scratch = AudioTokenizer::scratch(&tokens.tokenizer, frames, dtype)
            .max(AudioDetokenizer::scratch(&tokens.detokenizer, frames, dtype));
        let dequantizing = [TOKENIZER, DETOKENIZER]
            .map(|component| self.parts.components.dequantizing(component, frames, |_| true));
        let scratch = Bytes(scratch) + dequantizing[0].max(dequantizing[1]);
        Some(StagePlan {
            shape: format!(
                "{frames} frames{}",
                self.parts.components.as_multiplied(TOKENIZER)
            ),
            takes: vec![self.moments(SOURCE, frames), self.silence(frames)],
            gives: names(&[HINT]),
            per_item: true,
            ..StagePlan::of(
                QUANTIZE_SOURCE,
                Role::Encode,
                [TOKENIZER, DETOKENIZER],
                vec![Rung::whole(scratch)],
            )
        })
    }

    fn silence(&self, frames: usize) -> ValueShape {
        ValueShape::new(SILENCE, vec![frames, self.vae.decoder_input_channels])
    }

    /// The latent of `frames` frames.
    pub(super) fn latent(&self, frames: usize) -> ValueShape {
        self.like_latent(LATENT, frames)
    }

    fn like_latent(&self, name: &str, frames: usize) -> ValueShape {
        ValueShape::new(name, vec![1, frames, self.vae.decoder_input_channels])
    }

    /// The conditions of the steps: names, and numbers of tokens.
    pub(super) fn attended(&self, request: &Request, prompt: &Prompt) -> Vec<(&'static str, usize)> {
        let conditions = [
            Some((CONDITION, prompt.attended(&prompt.text))),
            self.is_guided(request).then_some((NO_CONDITION, 1)),
            prompt
                .plain_text
                .as_ref()
                .map(|ids| (PLAIN_CONDITION, prompt.attended(ids))),
        ];
        conditions.into_iter().flatten().collect()
    }

    /// The values that a round of sampling takes and returns.
    fn values_of_round(
        &self,
        round: &Round,
        request: &Request,
        audio: &Audio,
        prompt: &Prompt,
    ) -> (Vec<ValueShape>, Vec<String>) {
        let (frames, width) = (self.frames(audio), self.transformer.condition_width());
        let conditions = self.attended(request, prompt).into_iter();
        let mut takes: Vec<ValueShape> = conditions
            .map(|(name, tokens)| ValueShape::new(name, vec![tokens, width]))
            .collect();
        takes.push(self.silence(frames));
        if round.is_first() || keeps_source(audio) {
            let is_encoded = audio.init_audio.is_some() && !request.from_values;
            takes.extend(is_encoded.then(|| self.moments(SOURCE, frames)));
            takes.extend(request.from_values.then(|| self.latent(frames)));
        }
        let hint = || ValueShape::new(HINT, vec![frames, self.vae.decoder_input_channels]);
        takes.extend((audio.task == AudioTask::Cover).then(hint));
        let state = [SAMPLING, GUIDANCE];
        let state = &state[..if self.is_guided(request) { 2 } else { 1 }];
        let begins = state.iter().filter_map(|name| round.begins_with(name));
        takes.extend(begins.map(|name| self.like_latent(&name, frames)));
        let mut gives: Vec<String> = state.iter().filter_map(|name| round.leaves(name)).collect();
        if gives.is_empty() {
            gives.push(LATENT.to_owned());
        }
        gives.sort_unstable();
        (takes, gives)
    }

    /// The sampling: of most requests one stage, of those with slots a stage for each round.
    fn denoise_stages(&self, request: &Request, audio: &Audio, prompt: &Prompt) -> Vec<StagePlan> {
        let dtype = self.parts.dtype();
        let frames = self.frames(audio);
        let steps = request.steps.saturating_sub(first_step_of(request, audio));
        let rounds = Round::all(request, steps);
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: TRANSFORMER,
            width: self.transformer.layer.hidden_size,
            is_modulator,
        };
        let attended: Vec<usize> = self
            .attended(request, prompt)
            .iter()
            .map(|(_, tokens)| tokens.next_multiple_of(MULTIPLE))
            .collect();
        let tokens = self.transformer.tokens(frames);
        let rows = |requests: usize| (requests * tokens).max(attended.iter().copied().max().unwrap_or(0));
        // In shared passes each request has the modulations of all its steps, and of the one that a pass computes.
        let modulated = match is_in_rounds(request) {
            true => steps + 1,
            false => steps,
        };
        // There conditions are padded too, where they differ.
        let padded = match is_in_rounds(request) {
            true => bytes_of_rows(&self.transformer, &attended, dtype),
            false => 0,
        };
        let buffers = padded + denoise_scratch(&self.transformer, frames, &attended, modulated, dtype);
        let each = padded + request_scratch(&self.transformer, frames, &attended, modulated, dtype);
        let scratch = denoiser.scratch(buffers, rows(1), modulated, request);
        let of_two = denoiser.scratch(buffers + each, rows(2), modulated, request);
        let multiplied = self.parts.components.as_multiplied(TRANSFORMER);
        let key = format!("{frames} frames {dtype:?}{multiplied}");
        let all_rows = rows(request.slots as usize);
        let of_set = self
            .adapters
            .scratch_of_set(TRANSFORMER, &request.adapters, all_rows, dtype);
        // In shared passes a copy of a weight counts against the terms in the rows of all steps, for which it is made once. A request that
        // runs alone gives the same bits with copies as without, so it has them only where each step would make one.
        let rows_in = |rows: usize| move |name: &str| if is_in_steps(name) { rows } else { 0 };
        let of_transformer = (TRANSFORMER, &self.parts.components);
        let copies = self.adapters.copies_in_passes(
            of_transformer,
            &request.adapters,
            rows_in(all_rows * steps as usize),
        );
        let shared = shared_pass(request, key, (of_two - scratch, of_set), copies);
        let stage = |round: &Round| {
            let (takes, gives) = self.values_of_round(round, request, audio, prompt);
            StagePlan {
                shape: format!(
                    "{frames} frames c{}{multiplied}{}{}",
                    attended.iter().sum::<usize>(),
                    if request.has_curves() { " curve" } else { "" },
                    if starts_from_source(request, audio) {
                        " start"
                    } else {
                        ""
                    },
                ),
                steps: round.steps.end - round.steps.start,
                takes,
                gives,
                shared: shared.clone(),
                passes: Passes {
                    in_step: 1 + u32::from(self.is_guided(request)),
                    flops: self.parts.components.flops_of_products(TRANSFORMER, |_| tokens),
                },
                ..denoiser.stage_with_copies(DENOISE, request, scratch, rows_in(tokens))
            }
        };
        rounds.iter().map(stage).collect()
    }

    fn decode_stage(&self, audio: &Audio) -> StagePlan {
        let frames = self.frames(audio);
        let ladder = decode_ladder(&self.vae, frames, self.parts.dtype());
        StagePlan {
            shape: format!("{frames} frames"),
            takes: vec![self.latent(frames)],
            per_item: true,
            ..StagePlan::of(DECODE, Role::Decode, [VAE], rungs_of(ladder, Bytes::ZERO))
        }
    }
}

/// Dtypes in which the family computes: f16 overflows within the layers.
pub(super) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}
