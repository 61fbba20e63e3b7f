//! The stages of a request. FramePack's are, section by section, one that samples and one that decodes: each section can be
//! seen as soon as it is sampled, and a later failure loses no finished section.

use model::plan::{names, only_value, rungs_of};
use model::{Memo, Passes};
use residency::Bytes;

use super::model::{CLIP, HunyuanModel, LLAMA, TRANSFORMER, VAE, VISION, black};
use super::sections::{LatentFrame, Sections};
use super::transformer::{TokenCounts, denoise_scratch, negative_scratch};
use crate::autoencoders::hunyuan::{decode_ladder, encode_ladder};
use crate::mmdit::{StepCache, flops_of_pass, is_modulator, rows_of};
use crate::sampling::{Denoiser, Prompts, passes_in_step};
use crate::shared_stage::{CARDS, Half};
use crate::text::tokenizers::{TemplatedIds, TokenizeError};
use crate::{Medium, PreviewNeed, Request, Role, Rung, Section, StagePlan, ValueShape, Video};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const ENCODE_VISION: &str = "encode_vision";
pub(super) const ENCODE_IMAGE: &str = "encode_image";
pub(super) const ENCODE_END: &str = "encode_end";
pub(super) const DENOISE: &str = "denoise";
pub(super) const DECODE: &str = "decode";

/// Name of LLaMA's states among the values, `[1, tokens, text_embed_dim]`.
pub(super) const TEXT: &str = "text";
/// Name of CLIP's pooled output, `[1, pooled_projection_dim]`.
pub(super) const POOLED: &str = "pooled";
/// Name of the picture encoder's states, `[1, tokens, image_proj_dim]`.
pub(super) const VISION_STATES: &str = "vision";
/// Name of the start picture's latent, in the transformer's scale: f32 `[1, channels, 1, height / 8, width / 8]`.
pub(super) const START: &str = "start";
/// Name of the latent of the picture that the film ends with, as [`START`].
pub(super) const END: &str = "end";
/// Name of a film's latent: f32 `[1, channels, frames, height / 8, width / 8]`.
pub(super) const LATENT: &str = "latent";
/// Name of the overlapping frames that the decode of a section passes to the next: `[frames, height, width, 3]` in the dtype of
/// maps.
pub(super) const LEFT: &str = "left";

/// Counts of prompt tokens are rounded up to multiples of this, so that prompts of similar length share learned peaks.
const TOKENS_AT_A_TIME: usize = 32;

/// The names of a request's encodings: LLaMA's states, and CLIP's pooled output.
pub(super) fn encodings(request: &Request) -> Prompts<(&'static str, &'static str)> {
    Prompts::of(request, (TEXT, POOLED), ("negative_text", "negative_pooled"))
}

/// Name of a section's latent, by its number in order of sampling, from 0.
pub(super) fn latent_of_section(section: usize) -> String {
    format!("{LATENT}_{}", section + 1)
}

impl HunyuanModel {
    /// The token ids of a request's texts, in the template.
    pub(super) fn prompt_ids(&self, request: &Request) -> Result<Prompts<TemplatedIds>, TokenizeError> {
        let most = request.max_sequence_length as usize;
        Prompts::texts(request).try_map(|(_, text)| {
            let prompt = self.llama_tokenizer.encode_video_prompt(text, most)?;
            self.llama_tokenizer
                .check_known(&prompt.ids, LLAMA, self.llama.vocab_size)?;
            Ok(prompt)
        })
    }

    /// Counts of tokens of a sampling with `text` tokens of text.
    pub(super) fn tokens(&self, text: usize, video: &Video) -> TokenCounts {
        let (h, w) = self.sides(video);
        let in_patches = |cells: usize| h.div_ceil(cells) * w.div_ceil(cells);
        match (&self.framepack, self.sections(video)) {
            (Some(framepack), Some(sections)) => TokenCounts {
                text,
                vision: framepack.vision.tokens(),
                seen: 4 * in_patches(8) + in_patches(4) + 2 * in_patches(2),
                sampled: sections.window * in_patches(2),
                ..TokenCounts::default()
            },
            _ => TokenCounts {
                text,
                sampled: self.vae.latents(video.frames as usize) * in_patches(2),
                ..TokenCounts::default()
            },
        }
    }

    /// Counts of tokens that each card computes in the sampling of a request, the larger first.
    pub(super) fn tokens_of_cards(&self, text: usize, request: &Request, video: &Video) -> Vec<TokenCounts> {
        let all = self.tokens(text, video);
        match request.cards as usize {
            CARDS => Half::BOTH.map(|half| all.half(half)).to_vec(),
            _ => vec![all],
        }
    }

    /// The most that one card computes of a sampling.
    fn tokens_of_card(&self, text: usize, request: &Request, video: &Video) -> TokenCounts {
        let of_cards = self.tokens_of_cards(text, request, video);
        of_cards.into_iter().next().unwrap_or_default()
    }

    /// Latent frames that one decode of a film takes.
    pub(super) fn decoded_at_once(&self, video: &Video) -> usize {
        match self.sections(video) {
            Some(sections) => (0..sections.count)
                .map(|section| sections.decoded(section).len())
                .max()
                .unwrap_or_default(),
            None => self.vae.latents(video.frames as usize),
        }
    }

    /// The film whose decode takes these values; `None` if there is none.
    pub(super) fn video_of(&self, values: &[ValueShape]) -> Option<Video> {
        let channels = self.vae.latent_channels;
        let (latents, h, w) = match self.order() {
            None => {
                let &[1, found, latents, h, w] = only_value(values, LATENT)? else {
                    return None;
                };
                (found == channels).then_some((latents, h, w))?
            }
            Some(_) => {
                let mut sides = None;
                let mut latents = 0;
                for section in 0..values.len() {
                    let name = latent_of_section(section);
                    let value = values.iter().find(|value| value.name == name)?;
                    let &[1, found, of_section, h, w] = value.shape.as_slice() else {
                        return None;
                    };
                    if found != channels || sides.is_some_and(|sides| sides != (h, w)) {
                        return None;
                    }
                    sides = Some((h, w));
                    latents += of_section;
                }
                let (h, w) = sides?;
                (latents, h, w)
            }
        };
        let frames = u32::try_from(self.vae.frames(latents)).ok()?;
        let side = |cells: usize| u32::try_from(cells.checked_mul(self.vae.factor())?).ok();
        let (width, height) = (side(w)?, side(h)?);
        let defaults = self.parts.defaults.video().ok()?;
        let video = Video {
            width,
            height,
            frames,
            // Decoding does not read the picture.
            init_image: self.order().map(|_| black(width, height)),
            end_image: None,
            init_video: None,
            ..defaults.clone()
        };
        let is_whole = self.order().is_none()
            || self
                .sections(&video)
                .is_some_and(|sections| sections.count == values.len());
        is_whole.then_some(video)
    }

    /// The stages of a valid request.
    pub(super) fn stages(&self, request: &Request, video: &Video) -> Result<Vec<StagePlan>, TokenizeError> {
        let prompts = self.prompt_ids(request)?;
        let tokens = &prompts.map(|prompt| self.tokens_of_card(prompt.used(), request, video));
        let mut stages = vec![self.encode_text_stage(request, &prompts)?];
        let Some(sections) = self.sections(video) else {
            stages.push(self.denoise_stage(request, video, tokens, None));
            stages.push(self.decode_stage(video, None));
            return Ok(stages);
        };
        stages.extend([
            self.encode_vision_stage(video),
            self.encode_image_stage(video, ENCODE_IMAGE, START),
        ]);
        if sections.sees_end(0) {
            stages.push(self.encode_image_stage(video, ENCODE_END, END));
        }
        for section in 0..sections.count {
            stages.push(self.denoise_stage(request, video, tokens, Some((sections, section))));
            stages.push(self.decode_stage(video, Some((sections, section))));
        }
        Ok(stages)
    }

    fn encode_text_stage(
        &self,
        request: &Request,
        prompts: &Prompts<TemplatedIds>,
    ) -> Result<StagePlan, TokenizeError> {
        for (_, text) in Prompts::texts(request).iter() {
            let clip = self.clip_tokenizer.encode(text)?;
            self.clip_tokenizer
                .check_known(&clip, CLIP, self.clip.vocab_size)?;
        }
        let dtype = self.parts.dtype();
        let rounded = |prompt: &TemplatedIds| prompt.ids.len().next_multiple_of(TOKENS_AT_A_TIME);
        let tokens = prompts.iter().map(rounded).max().unwrap_or_default();
        let of_all: usize = prompts.iter().map(rounded).sum();
        let pooled = self.clip_tokenizer.length();
        let scratch = (self.llama.scratch(tokens, dtype)
            + self.parts.components.dequantizing(LLAMA, tokens, |_| true))
        .max(self.clip.scratch(pooled, dtype) + self.parts.components.dequantizing(CLIP, pooled, |_| true));
        Ok(StagePlan {
            shape: format!("t{tokens}{}", self.parts.components.as_multiplied(LLAMA)),
            gives: encodings(request)
                .iter()
                .flat_map(|&(text, pooled)| names(&[pooled, text]))
                .collect(),
            memo: Some(Memo::of(request.of_prompt(Medium::Video(Video::default())))),
            passes: Passes::of(self.parts.components.flops_of_products(LLAMA, |_| of_all)),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [LLAMA, CLIP],
                vec![Rung::whole(scratch)],
            )
        })
    }

    fn encode_vision_stage(&self, video: &Video) -> StagePlan {
        let vision = self.framepack.as_ref().map(|framepack| &framepack.vision);
        let scratch = vision.map_or(Bytes::ZERO, |vision| vision.scratch(self.parts.dtype()));
        let read = Video {
            init_image: video.init_image.clone(),
            ..Video::default()
        };
        StagePlan {
            gives: names(&[VISION_STATES]),
            memo: Some(Memo::of(Request::of(Medium::Video(read), 1, 0.0, 1))),
            reads_media: true,
            ..StagePlan::of(ENCODE_VISION, Role::Encode, [VISION], vec![Rung::whole(scratch)])
        }
    }

    fn encode_image_stage(&self, video: &Video, name: &str, gives: &str) -> StagePlan {
        let ladder = encode_ladder(&self.vae, self.sides(video), 1, self.parts.dtype());
        let rungs = rungs_of(ladder, self.dequantizing_of_vae());
        StagePlan {
            shape: format!("{}x{}", video.width, video.height),
            gives: names(&[gives]),
            per_item: true,
            reads_media: true,
            ..StagePlan::of(name, Role::Encode, [VAE], rungs)
        }
    }

    fn denoise_stage(
        &self,
        request: &Request,
        video: &Video,
        of_prompts: &Prompts<TokenCounts>,
        section: Option<(Sections, usize)>,
    ) -> StagePlan {
        let dtype = self.parts.dtype();
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: TRANSFORMER,
            width: self.transformer.width(),
            is_modulator,
        };
        let tokens = &longest(of_prompts);
        let mut buffers = denoise_scratch(&self.transformer, tokens, request.steps, dtype);
        let mut texts = format!("t{}", of_prompts.prompt.text.next_multiple_of(TOKENS_AT_A_TIME));
        if let Some(negative) = &of_prompts.negative {
            buffers += negative_scratch(&self.transformer, negative, request.steps, dtype);
            texts.push_str(&format!(" n{}", negative.text.next_multiple_of(TOKENS_AT_A_TIME)));
        }
        let cached = (tokens.sampled, self.transformer.width());
        buffers += StepCache::bytes(request, passes_in_step(request), cached, dtype);
        let scratch = denoiser.scratch(buffers, tokens.all(), request.steps, request);
        let named = encodings(request);
        let encoded = named.iter().zip(of_prompts.iter());
        let mut takes: Vec<ValueShape> = encoded
            .flat_map(|(&(text, pooled), tokens)| {
                let states = vec![1, tokens.text, self.transformer.text_embed_dim];
                let of_clip = vec![1, self.transformer.pooled_projection_dim];
                [ValueShape::new(text, states), ValueShape::new(pooled, of_clip)]
            })
            .collect();
        let gives = match section {
            None => LATENT.to_owned(),
            Some((sections, section)) => {
                let vision = vec![1, tokens.vision, self.transformer.image_proj_dim];
                takes.push(ValueShape::new(VISION_STATES, vision));
                takes.push(ValueShape::new(START, self.latent_shape(video, 1)));
                let end = sections.sees_end(section);
                takes.extend(end.then(|| ValueShape::new(END, self.latent_shape(video, 1))));
                let context = sections.context(section);
                let seen = context.full.iter().map(|(frame, _)| frame);
                let seen = seen.chain(&context.half.0).chain(&context.quarter.0);
                takes.extend(self.latents_of(video, sections, seen));
                latent_of_section(section)
            }
        };
        StagePlan {
            shape: format!(
                "{}x{} {} frames {texts}{}{}{}",
                video.width,
                video.height,
                tokens.sampled,
                self.parts.components.as_multiplied(TRANSFORMER),
                if request.has_curves() { " curve" } else { "" },
                if request.step_cache > 0.0 { " cache" } else { "" },
            ),
            steps: request.steps,
            takes,
            gives: vec![gives],
            passes: Passes {
                in_step: passes_in_step(request),
                flops: flops_of_pass(
                    &self.transformer.blocks(),
                    &self.parts.components,
                    TRANSFORMER,
                    (
                        tokens.text + tokens.vision,
                        tokens.seen + tokens.sampled + tokens.others,
                    ),
                )
                .shared_by(u64::from(request.cards)),
            },
            preview: request.preview.then_some(PreviewNeed::NOTHING),
            section: section.map(of_film),
            // Previews have the colours of the picture that the film begins with.
            reads_media: request.preview,
            ..denoiser.stage_with_copies(
                DENOISE,
                request,
                scratch,
                rows_of((tokens.text + tokens.vision, tokens.seen + tokens.sampled)),
            )
        }
    }

    /// Shape of `frames` latent frames of a film.
    pub(super) fn latent_shape(&self, video: &Video, frames: usize) -> Vec<usize> {
        let (h, w) = self.sides(video);
        vec![1, self.vae.latent_channels, frames, h, w]
    }

    /// Latent frames of a section's value: those of the section, and the start picture where it is next to them in the film.
    pub(super) fn frames_of_section(sections: &Sections, section: usize) -> usize {
        sections.window + usize::from(sections.holds_start(section))
    }

    /// The latents of sections to which these frames belong.
    fn latents_of<'a>(
        &self,
        video: &Video,
        sections: Sections,
        frames: impl Iterator<Item = &'a LatentFrame>,
    ) -> Vec<ValueShape> {
        let mut of: Vec<usize> = frames
            .filter_map(|frame| match frame {
                LatentFrame::Of { section, .. } => Some(*section),
                LatentFrame::Zero | LatentFrame::Start | LatentFrame::End => None,
            })
            .collect();
        of.sort_unstable();
        of.dedup();
        let value = |section: usize| {
            let frames = HunyuanModel::frames_of_section(&sections, section);
            ValueShape::new(&latent_of_section(section), self.latent_shape(video, frames))
        };
        of.into_iter().map(value).collect()
    }

    fn decode_stage(&self, video: &Video, section: Option<(Sections, usize)>) -> StagePlan {
        let (takes, gives, latents) = match section {
            None => {
                let latents = self.vae.latents(video.frames as usize);
                let latent = ValueShape::new(LATENT, self.latent_shape(video, latents));
                (vec![latent], Vec::new(), latents)
            }
            Some((sections, section)) => {
                let decoded = sections.decoded(section);
                let mut takes = self.latents_of(video, sections, decoded.iter());
                let (width, height) = (video.width as usize, video.height as usize);
                let left = ValueShape::new(LEFT, vec![sections.overlap(), height, width, 3]);
                takes.extend((section > 0).then_some(left));
                let leaves = section + 1 < sections.count;
                let gives = leaves.then(|| LEFT.to_owned()).into_iter().collect();
                (takes, gives, decoded.len())
            }
        };
        let ladder = decode_ladder(&self.vae, self.sides(video), latents, self.parts.dtype());
        let rungs = rungs_of(ladder, self.dequantizing_of_vae());
        StagePlan {
            shape: format!("{}x{} {latents} latents", video.width, video.height),
            takes,
            gives,
            per_item: true,
            section: section.map(of_film),
            ..StagePlan::of(DECODE, Role::Decode, [VAE], rungs)
        }
    }

    /// Convolutions are dequantized in any format, independent of tokens.
    fn dequantizing_of_vae(&self) -> Bytes {
        self.parts.components.dequantizing(VAE, 0, |_| true)
    }
}

/// The counts of tokens for which buffers are: those with the longest text.
pub(super) fn longest(of_prompts: &Prompts<TokenCounts>) -> TokenCounts {
    let text = of_prompts.iter().map(|tokens| tokens.text).max();
    TokenCounts {
        text: text.unwrap_or_default(),
        ..of_prompts.prompt
    }
}

/// A section as the queue and clients count it.
fn of_film((sections, section): (Sections, usize)) -> Section {
    Section {
        number: section as u32 + 1,
        of: sections.count as u32,
    }
}
