//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::{AttentionShape, MaskShape, Planned};

use super::buffers::row_width;
use super::model::{AceStepModel, TEXT_ENCODER};
use super::padded::padded_length;
use super::plan::{DECODE, DENOISE, ENCODE_REFERENCE, ENCODE_SOURCE, ENCODE_TEXT};
use super::sound::{samples_at, samples_of_timbre};
use crate::autoencoders::oobleck::{decode_ladder, encode_ladder};
use crate::rounds::is_in_rounds;
use crate::{Audio, Medium, Request};

impl AceStepModel {
    /// cuDNN shapes of a stage on a card, in order of use, on its first rung.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Medium::Audio(audio) = &request.medium else {
            return Vec::new();
        };
        let (rate, hop) = (self.vae.sampling_rate, self.vae.hop().max(1));
        match stage {
            ENCODE_TEXT => {
                let is_quantized = self.parts.components.is_quantized(TEXT_ENCODER);
                let prompt = self.prompt(request, audio).ok();
                let planned = prompt.and_then(|prompt| {
                    self.text
                        .planned(prompt.text.len(), is_quantized, self.parts.dtype())
                });
                planned.into_iter().collect()
            }
            ENCODE_SOURCE => match &audio.init_audio {
                Some(clip) => self.planned_to_encode(samples_at(clip, rate).next_multiple_of(hop)),
                None => Vec::new(),
            },
            ENCODE_REFERENCE if audio.reference.is_some() => self.planned_to_encode(samples_of_timbre(rate)),
            DENOISE => self.planned_to_denoise(request, audio),
            DECODE => {
                let (frames, dtype) = (self.frames(audio), self.parts.dtype());
                let ladder = decode_ladder(&self.vae, frames, dtype);
                let first = ladder.first().map(|(windows, _)| *windows);
                first.map_or(Vec::new(), |windows| {
                    self.vae.planned_to_decode(frames, windows, dtype)
                })
            }
            _ => Vec::new(),
        }
    }

    fn planned_to_encode(&self, samples: usize) -> Vec<Planned> {
        let dtype = self.parts.dtype();
        let ladder = encode_ladder(&self.vae, samples, dtype);
        let first = ladder.first().map(|(windows, _)| *windows);
        first.map_or(Vec::new(), |windows| {
            self.vae.planned_to_encode(samples, windows, dtype)
        })
    }

    /// Attention of each kind of layer to all tokens and to a window of them, then to conditions.
    fn planned_to_denoise(&self, request: &Request, audio: &Audio) -> Vec<Planned> {
        let Ok(prompt) = self.prompt(request, audio) else {
            return Vec::new();
        };
        let layer = &self.transformer.layer;
        let tokens = self.transformer.tokens(self.frames(audio));
        let by_head = (layer.num_attention_heads, layer.head_dim);
        let rows = (row_width(layer), row_width(layer));
        let of_tokens = |tokens, mask| AttentionShape {
            heads_kv: layer.num_key_value_heads,
            ..AttentionShape::of_rows(tokens, by_head, rows, self.parts.dtype(), mask)
        };
        // Of one request, and of as many as may share a pass.
        let most = match is_in_rounds(request) {
            true => request.slots as usize,
            false => 1,
        };
        let mut shapes: Vec<AttentionShape> = Vec::new();
        for i in 0..self.transformer.num_hidden_layers {
            let mask = match layer.window(i, tokens) {
                Some(window) => MaskShape::Window {
                    before: window,
                    after: window,
                },
                None => MaskShape::None,
            };
            for batch in 1..=most {
                let shape = AttentionShape {
                    batch,
                    ..of_tokens(tokens, mask.clone())
                };
                if !shapes.contains(&shape) {
                    shapes.push(shape);
                }
            }
        }
        let conditions = self.attended(request, &prompt);
        let conditions: Vec<usize> = conditions.into_iter().map(|(_, tokens)| tokens).collect();
        let of_keys = |keys: usize, shape: AttentionShape| {
            let row = layer.keys();
            let strides = [keys * row, row, layer.head_dim];
            AttentionShape {
                keys,
                k: strides,
                v: strides,
                ..shape
            }
        };
        for keys in conditions.iter().copied() {
            // Requests with one condition attend to it as one.
            for batch in 1..=most {
                shapes.push(of_keys(keys, of_tokens(batch * tokens, MaskShape::None)));
            }
        }
        // Those of several attend each to a row of its own.
        for keys in conditions.into_iter().map(padded_length) {
            for batch in 2..=most {
                let shape = AttentionShape {
                    batch,
                    ..of_tokens(tokens, MaskShape::Lengths)
                };
                let shape = of_keys(keys, shape);
                if !shapes.contains(&shape) {
                    shapes.push(shape);
                }
            }
        }
        shapes.into_iter().map(Planned::Attention).collect()
    }
}
