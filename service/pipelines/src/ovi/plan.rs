//! The stages of a request: each has only the components that it needs. The decode of the sound comes first, since it is short.

use model::plan::{names, rungs_of};
use model::{Flops, Memo, Passes};
use residency::Bytes;

use super::layout::{AUDIO, is_of_text};
use super::model::{AUDIO_VAE, OviModel, TEXT_ENCODER, TRANSFORMER, VAE, VOCODER};
use super::prompts::Texts;
use super::sampling::latent_bytes;
use super::transformer::{FilmTokens, denoise_scratch};
use crate::autoencoders::mmaudio::{MmAudioConfig, decode_scratch, vocoder::vocode_scratch};
use crate::autoencoders::wan::{decode_ladder, encode_ladder};
use crate::sampling::passes_in_step;
use crate::text::tokenizers::TokenizeError;
use crate::{Medium, Request, Role, Rung, StagePlan, ValueShape, Video};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const ENCODE_IMAGE: &str = "encode_image";
pub(super) const DENOISE: &str = "denoise";
pub(super) const DECODE_SOUND: &str = "decode_sound";
pub(super) const DECODE: &str = "decode";

/// Names of the texts' states among the values, `[1, tokens, d_model]` each: the prompt, and the negative prompts of the film
/// and of the sound.
pub(super) const TEXT: &str = "text";
pub(super) const NEGATIVES: [&str; 2] = ["negative_text", "negative_sound_text"];
/// Name of the start picture's latent, in the transformer's scale: f32 `[1, channels, 1, h, w]`.
pub(super) const START: &str = "start";
/// Name of a film's latent: f32 `[1, channels, frames, h, w]`.
pub(super) const LATENT: &str = "latent";
/// Name of the latent of its sound: f32 `[1, frames, channels]`.
pub(super) const SOUND: &str = "sound_latent";

/// Counts of prompt tokens are rounded up to multiples of this, so that prompts of similar length share learned peaks.
const TOKENS_AT_A_TIME: usize = 32;

/// Numbers of tokens of the texts of a request.
struct TextTokens {
    prompt: usize,
    negative: Option<[usize; 2]>,
}

impl OviModel {
    /// Tokens of a film and its sound.
    pub(super) fn film_tokens(&self, video: &Video) -> FilmTokens {
        let (h, w) = self.sides(video);
        FilmTokens {
            film: [self.vae.latents(video.frames as usize), h / 2, w / 2],
            begins_with_picture: video.init_image.is_some(),
            sound: OviModel::sound_latents(video.frames),
        }
    }

    fn text_tokens(&self, request: &Request) -> Result<TextTokens, TokenizeError> {
        let texts = Texts::of(request, self.variant);
        let count = |text: &str| self.tokens(request, text).map(|ids| ids.len());
        Ok(TextTokens {
            prompt: count(&texts.prompt)?,
            negative: match &texts.negative {
                Some([film, sound]) => Some([count(film)?, count(sound)?]),
                None => None,
            },
        })
    }

    /// The stages of a valid request.
    pub(super) fn stages(&self, request: &Request, video: &Video) -> Result<Vec<StagePlan>, TokenizeError> {
        let tokens = self.text_tokens(request)?;
        let mut stages = vec![self.encode_text_stage(request, &tokens)];
        stages.extend(video.init_image.is_some().then(|| self.encode_image_stage(video)));
        stages.push(self.denoise_stage(request, video, &tokens));
        stages.extend([self.decode_sound_stage(video), self.decode_stage(video)]);
        Ok(stages)
    }

    fn encode_text_stage(&self, request: &Request, tokens: &TextTokens) -> StagePlan {
        let (components, dtype) = (&self.parts.components, self.parts.dtype());
        let all = || std::iter::once(tokens.prompt).chain(tokens.negative.into_iter().flatten());
        let most = all().max().unwrap_or_default().next_multiple_of(TOKENS_AT_A_TIME);
        let scratch = self.text.scratch(most, dtype) + components.dequantizing(TEXT_ENCODER, most, |_| true);
        let mut gives = names(&[TEXT]);
        gives.extend(tokens.negative.iter().flat_map(|_| names(&NEGATIVES)));
        let flops = |_: &str| all().sum();
        StagePlan {
            shape: format!("t{most}{}", components.as_multiplied(TEXT_ENCODER)),
            gives,
            memo: Some(Memo::of(request.of_prompt(Medium::Video(Video::default())))),
            passes: Passes::of(components.flops_of_products(TEXT_ENCODER, flops)),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    fn encode_image_stage(&self, video: &Video) -> StagePlan {
        let ladder = encode_ladder(&self.vae, self.sides(video), 1, self.parts.dtype());
        let read = Video {
            width: video.width,
            height: video.height,
            init_image: video.init_image.clone(),
            ..Video::default()
        };
        StagePlan {
            shape: format!("{}x{}", video.width, video.height),
            gives: names(&[START]),
            memo: Some(Memo::of(Request::of(Medium::Video(read), 1, 0.0, 1))),
            reads_media: true,
            ..StagePlan::of(
                ENCODE_IMAGE,
                Role::Encode,
                [VAE],
                rungs_of(ladder, self.dequantizing(VAE)),
            )
        }
    }

    /// Shape of `frames` latent frames of a film.
    pub(super) fn latent_shape(&self, video: &Video, frames: usize) -> Vec<usize> {
        let (h, w) = self.sides(video);
        vec![1, self.vae.z_dim, frames, h, w]
    }

    /// The latents of a film and of its sound.
    fn latents(&self, video: &Video) -> [ValueShape; 2] {
        let frames = self.vae.latents(video.frames as usize);
        let sound = vec![
            1,
            OviModel::sound_latents(video.frames),
            self.transformer.audio.in_dim,
        ];
        [
            ValueShape::new(LATENT, self.latent_shape(video, frames)),
            ValueShape::new(SOUND, sound),
        ]
    }

    fn denoise_stage(&self, request: &Request, video: &Video, texts: &TextTokens) -> StagePlan {
        let (components, dtype) = (&self.parts.components, self.parts.dtype());
        let (config, tokens) = (&self.transformer, self.film_tokens(video));
        let conditions = passes_in_step(request);
        let [film, sound] = tokens.all();
        let mut scratch = Bytes(
            denoise_scratch(config, &tokens, conditions as usize, request.steps, dtype)
                + latent_bytes(config, &tokens, dtype),
        );
        // Layers of either branch run over the tokens of the other one, too; both branches have a scratch.
        scratch += components.dequantizing(TRANSFORMER, film.max(sound), |_| true);
        scratch += components.dequantizing(TRANSFORMER, sound, |_| true);
        if components.is_multiplied_in_fp8(TRANSFORMER) {
            scratch += Bytes(ops::CodesOfRows::bytes(film + sound, config.video.dim));
        }
        let text = |name: &str, tokens: usize| ValueShape::new(name, vec![1, tokens, self.text.d_model]);
        let mut takes = vec![text(TEXT, texts.prompt)];
        if let Some(negative) = texts.negative {
            takes.extend(
                NEGATIVES
                    .iter()
                    .zip(negative)
                    .map(|(name, tokens)| text(name, tokens)),
            );
        }
        if video.init_image.is_some() {
            takes.push(ValueShape::new(START, self.latent_shape(video, 1)));
        }
        StagePlan {
            shape: format!(
                "{}x{} {film} and {sound} tokens{}{}",
                video.width,
                video.height,
                if tokens.begins_with_picture {
                    " from a picture"
                } else {
                    ""
                },
                components.as_multiplied(TRANSFORMER),
            ),
            steps: request.steps,
            per_item: true,
            takes,
            gives: names(&[LATENT, SOUND]),
            passes: Passes {
                in_step: conditions,
                flops: self.flops_of_pass(&tokens),
            },
            ..StagePlan::of(DENOISE, Role::Sample, [TRANSFORMER], vec![Rung::whole(scratch)])
        }
    }

    /// Operations of a pass over both branches.
    fn flops_of_pass(&self, tokens: &FilmTokens) -> Flops {
        let config = &self.transformer;
        let [film, sound] = tokens.all();
        let rows = |name: &str| match (
            is_of_text(name),
            name.contains("_fusion."),
            name.starts_with(AUDIO),
        ) {
            (true, ..) => 0,
            // They run over the tokens of the other branch.
            (false, true, true) | (false, false, false) => film,
            (false, true, false) | (false, false, true) => sound,
        };
        let products = self.parts.components.flops_of_products(TRANSFORMER, rows);
        let shape = config.video.blocks();
        let (blocks, text) = (config.video.num_layers as u64, config.video.text_len);
        let of = |own: usize, other: usize| blocks * shape.flops_of_attention(own, text + other);
        products + of(film, sound) + of(sound, film)
    }

    fn decode_sound_stage(&self, video: &Video) -> StagePlan {
        let dtype = self.parts.dtype();
        let [_, latent] = self.latents(video);
        let frames = OviModel::sound_latents(video.frames);
        let mel = MmAudioConfig::FRAMES * frames;
        // The spectrogram is there while the vocoder runs, and its track at the end.
        let spectrogram = ops::allocated(mel * self.vocoder.num_mels * size_of::<f32>());
        let vocoder = vocode_scratch(&self.vocoder, mel, dtype) + Bytes(spectrogram);
        let scratch = decode_scratch(&self.audio_vae, frames, dtype).max(vocoder);
        StagePlan {
            shape: format!("{frames} latents"),
            takes: vec![latent],
            per_item: true,
            ..StagePlan::of(
                DECODE_SOUND,
                Role::Decode,
                [AUDIO_VAE, VOCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    fn decode_stage(&self, video: &Video) -> StagePlan {
        let [latent, _] = self.latents(video);
        let latents = self.vae.latents(video.frames as usize);
        let ladder = decode_ladder(&self.vae, self.sides(video), latents, self.parts.dtype());
        StagePlan {
            shape: format!("{}x{} {latents} latents", video.width, video.height),
            takes: vec![latent],
            per_item: true,
            ..StagePlan::of(
                DECODE,
                Role::Decode,
                [VAE],
                rungs_of(ladder, self.dequantizing(VAE)),
            )
        }
    }

    /// Convolutions are dequantized in any format, independent of tokens.
    fn dequantizing(&self, component: &str) -> Bytes {
        self.parts.components.dequantizing(component, 0, |_| true)
    }
}
