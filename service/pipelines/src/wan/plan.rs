//! The stages of a request. Two transformers are two stages, so that only one of them is on the card: the latent and what the
//! solver remembers go from the first to the second.

use std::ops::Range;

use model::plan::{names, only_value, rungs_of};
use model::{Flops, Memo, Passes};
use residency::Bytes;

use super::model::{Kind, SECOND, TEXT_ENCODER, TRANSFORMER, VAE, WanModel};
use super::shape::is_of_text;
use super::times::TokenCounts;
use super::transformer::denoise_scratch;
use crate::attention::AttentionPrecision;
use crate::autoencoders::wan::{Chunking, decode_ladder, encode_ladder};
use crate::sampling::{Conditions, Denoiser, Prompts};
use crate::unipc::{Grid, Schedule, UniPcLatent};
use crate::{InitImage, Medium, PreviewNeed, Request, Role, Rung, StagePlan, ValueShape, Video};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const ENCODE_IMAGE: &str = "encode_image";
pub(super) const DENOISE: &str = "denoise";
pub(super) const DENOISE_LOW: &str = "denoise_low_noise";
pub(super) const DECODE: &str = "decode";

/// Names of the text encoder's states, `[1, tokens, text_dim]`, without padding.
const TEXT: &str = "text";
const NEGATIVE_TEXT: &str = "negative_text";
/// Name of the encoded picture in the transformer's scale: f32 `[1, channels, latents, h, w]`.
pub(super) const START: &str = "start";
/// Name of a film's latent in the transformer's scale: f32 `[1, channels, latents, h, w]`.
pub(super) const LATENT: &str = "latent";
/// What one transformer leaves for the other, f32 tokens each: the latent, the corrected one before it, and two clean ones.
pub(super) const STATE: [&str; 4] = ["sampled", "corrected", "clean", "clean_before"];

/// Counts of prompt tokens are rounded up to multiples of this, so that prompts of similar length share learned peaks.
const TOKENS_AT_A_TIME: usize = 32;

/// Most tokens of a film under each of two texts that are computed in one pass. A pass of 14 B over so many takes 1 s on an H100, and
/// its blocks are copied in half of that.
const MOST_TOGETHER: usize = 16_384;

/// The steps of one transformer.
pub(super) struct Part {
    pub(super) stage: &'static str,
    pub(super) component: &'static str,
    pub(super) steps: Range<usize>,
    pub(super) is_last: bool,
    /// Scale of the difference between both predictions.
    pub(super) guidance: f64,
}

/// How the predictions of a step under both prompts are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassOrder {
    /// In one pass.
    Together,
    /// One after the other, or the only one.
    OneByOne,
}

/// The names of a request's encodings.
pub(super) fn texts(request: &Request) -> Prompts<&'static str> {
    Prompts::of(request, TEXT, NEGATIVE_TEXT)
}

impl WanModel {
    /// The schedule of a request.
    pub(super) fn schedule(&self, request: &Request) -> Schedule {
        Schedule::new(Grid::Diffusers, request.steps, self.scheduler.flow_shift)
    }

    /// The transformers that a request runs, each with its steps, of which there is at least one.
    pub(super) fn parts_of(&self, request: &Request) -> Vec<Part> {
        let schedule = self.schedule(request);
        let steps = schedule.steps();
        let boundary = self.boundary.map_or(f64::NEG_INFINITY, |ratio| ratio * 1000.0);
        let high = schedule
            .times
            .iter()
            .take_while(|time| f64::from(**time) >= boundary);
        let high = high.count();
        let guidance = f64::from(request.true_guidance);
        let of_low = match request.guidance {
            0.0 => guidance,
            of_low => f64::from(of_low),
        };
        let parts = [
            (DENOISE, TRANSFORMER, 0..high, guidance),
            (DENOISE_LOW, SECOND, high..steps, of_low),
        ];
        let parts = parts.into_iter().filter(|(_, _, steps, _)| !steps.is_empty());
        parts
            .map(|(stage, component, range, guidance)| Part {
                stage,
                component,
                is_last: range.end == steps,
                steps: range,
                guidance,
            })
            .collect()
    }

    /// The ways to compute a step's predictions, the best first. Both in one pass fill a card better, and blocks that are streamed
    /// come once for both; neither matters where a pass computes for longer than its blocks are copied.
    pub(super) fn ways(&self, request: &Request, video: &Video) -> &'static [PassOrder] {
        match request.negative() {
            // Of two cards each computes one.
            Some(_) if request.cards == 1 && self.tokens(video).all() <= MOST_TOGETHER => {
                &[PassOrder::Together, PassOrder::OneByOne]
            }
            _ => &[PassOrder::OneByOne],
        }
    }

    /// Height and width of a film's latents.
    pub(super) fn sides(&self, video: &Video) -> (usize, usize) {
        self.vae.latent_sides(video.width, video.height)
    }

    /// Shape of `latents` latent frames of a film.
    pub(super) fn latent_shape(&self, video: &Video, latents: usize) -> Vec<usize> {
        let (h, w) = self.sides(video);
        vec![1, self.vae.z_dim, latents, h, w]
    }

    /// Tokens of a film.
    pub(super) fn tokens(&self, video: &Video) -> TokenCounts {
        let (h, w) = self.sides(video);
        let of_frame = (h / 2) * (w / 2);
        let all = self.vae.latents(video.frames as usize) * of_frame;
        let first = match (self.kind, &video.init_image) {
            (Kind::TextOrPicture, Some(_)) => of_frame,
            _ => 0,
        };
        TokenCounts {
            first,
            sampled: all - first,
        }
    }

    /// Frames of the film that a picture is encoded as: alone, or with zeros after it.
    pub(super) fn frames_to_encode(&self, video: &Video) -> usize {
        match self.kind {
            Kind::Picture => video.frames as usize,
            Kind::Text | Kind::TextOrPicture => 1,
        }
    }

    /// The film whose decode takes these values; `None` if there is none.
    pub(super) fn video_of(&self, values: &[ValueShape]) -> Option<Video> {
        let &[1, channels, latents, h, w] = only_value(values, LATENT)? else {
            return None;
        };
        let is_of_model = channels == self.vae.z_dim && latents > 0 && h % 2 == 0 && w % 2 == 0;
        let side = |cells: usize| u32::try_from(cells.checked_mul(self.vae.factor())?).ok();
        let (width, height) = (side(w)?, side(h)?);
        let defaults = self.parts.defaults.video().ok()?;
        is_of_model.then_some(Video {
            width,
            height,
            frames: u32::try_from(self.vae.frames(latents)).ok()?,
            // Decoding does not read the picture.
            init_image: (self.kind == Kind::Picture).then(|| InitImage::of_size((width, height))),
            init_video: None,
            ..defaults.clone()
        })
    }

    /// The stages of a valid request.
    pub(super) fn stages(&self, request: &Request, video: &Video, tokens: &Prompts<usize>) -> Vec<StagePlan> {
        let mut stages = vec![self.encode_text_stage(request, tokens)];
        if let Some(image) = &video.init_image {
            stages.push(self.encode_image_stage(video, image));
        }
        for part in self.parts_of(request) {
            stages.push(self.denoise_stage(request, video, tokens, &part));
        }
        stages.push(self.decode_stage(video));
        stages
    }

    fn encode_text_stage(&self, request: &Request, tokens: &Prompts<usize>) -> StagePlan {
        let longest = tokens.iter().copied().max().unwrap_or_default();
        let rounded = longest.next_multiple_of(TOKENS_AT_A_TIME);
        let scratch = self.text.scratch(rounded, self.parts.dtype())
            + self
                .parts
                .components
                .dequantizing(TEXT_ENCODER, rounded, |_| true);
        let flops = self.parts.components.flops_of_products(TEXT_ENCODER, |_| rounded);
        StagePlan {
            shape: format!("t{rounded}{}", self.parts.components.as_multiplied(TEXT_ENCODER)),
            gives: texts(request).iter().map(|&name| name.to_owned()).collect(),
            memo: Some(Memo::of(Request {
                // A longer limit gives the same tokens.
                max_sequence_length: longest as u32,
                ..request.of_prompt(Medium::Video(Video::default()))
            })),
            passes: Passes {
                in_step: tokens.iter().count() as u32,
                flops,
            },
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    fn encode_image_stage(&self, video: &Video, image: &InitImage) -> StagePlan {
        let frames = self.frames_to_encode(video);
        let ladder = encode_ladder(&self.vae, self.sides(video), frames, self.parts.dtype());
        let read = Video {
            width: video.width,
            height: video.height,
            frames: frames as u32,
            init_image: Some(image.clone()),
            ..Video::default()
        };
        StagePlan {
            shape: format!("{}x{} {frames} frames", video.width, video.height),
            gives: names(&[START]),
            memo: Some(Memo::of(Request::of(Medium::Video(read), 1, 0.0, 1))),
            reads_media: true,
            ..StagePlan::of(
                ENCODE_IMAGE,
                Role::Encode,
                [VAE],
                rungs_of(ladder, self.dequantizing_of_vae()),
            )
        }
    }

    fn denoise_stage(
        &self,
        request: &Request,
        video: &Video,
        tokens: &Prompts<usize>,
        part: &Part,
    ) -> StagePlan {
        let counts = self.tokens(video);
        let (passes, ways) = (tokens.iter().count(), self.ways(request, video));
        let batch = self.batch(ways[0], passes);
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: part.component,
            width: self.transformer.width(),
            is_modulator: |_| false,
        };
        let rungs_of_way = |way: PassOrder| {
            let scratch = self.denoise_bytes(request, counts, (way, passes));
            let rows = self.batch(way, passes) * counts.all();
            let scratch = denoiser.scratch(scratch, rows, request.steps, request);
            let mut rungs = denoiser.stage(part.stage, request, scratch).rungs;
            if let (Some(rung), PassOrder::Together) = (rungs.first_mut(), way) {
                rung.label = "both passes at once".to_owned();
            }
            rungs
        };
        // The ways of each rung in turn: adapters are read from the machine's memory where neither way has room for them.
        let by_way: Vec<Vec<Rung>> = ways.iter().map(|way| rungs_of_way(*way)).collect();
        let most = by_way.iter().map(Vec::len).max().unwrap_or_default();
        let rungs =
            (0..most).flat_map(|rung| by_way.iter().filter_map(move |rungs| rungs.get(rung).cloned()));
        let rungs: Vec<Rung> = rungs.collect();
        let text = self.transformer.text_dim;
        let encodings = texts(request);
        let encodings = encodings.iter().zip(tokens.iter());
        let mut takes: Vec<ValueShape> = encodings
            .map(|(name, tokens)| ValueShape::new(name, vec![1, *tokens, text]))
            .collect();
        if video.init_image.is_some() {
            let latents = self.vae.latents(self.frames_to_encode(video));
            takes.push(ValueShape::new(START, self.latent_shape(video, latents)));
        }
        if part.steps.start > 0 {
            let shape = vec![1, counts.sampled, self.transformer.token_width()];
            takes.extend(STATE.map(|name| ValueShape::new(name, shape.clone())));
        }
        let is_learned = request.preview && video.init_image.is_some();
        let has_colours = is_learned || request.preview && self.vae.colours().is_some();
        StagePlan {
            shape: format!(
                "{}x{} {} frames t{} p{passes}{}{}",
                video.width,
                video.height,
                video.frames,
                request.max_sequence_length,
                self.parts.components.as_multiplied(part.component),
                if request.has_curves() { " curve" } else { "" },
            ),
            steps: part.steps.len() as u32,
            takes,
            gives: match part.is_last {
                true => names(&[LATENT]),
                false => names(&STATE),
            },
            passes: Passes {
                in_step: (passes / batch) as u32 / request.cards.max(1),
                flops: self.flops(part.component, counts.all(), request) * batch as u64,
            },
            // Previews have the colours of the picture that the film begins with, else the published ones.
            preview: has_colours.then_some(PreviewNeed::NOTHING),
            reads_media: is_learned,
            ..StagePlan {
                rungs,
                ..denoiser.stage(part.stage, request, Bytes::ZERO)
            }
        }
    }

    /// Items of a pass.
    pub(super) fn batch(&self, way: PassOrder, passes: usize) -> usize {
        match way {
            PassOrder::Together => passes,
            PassOrder::OneByOne => 1,
        }
    }

    /// Activation bytes of the steps of a request.
    fn denoise_bytes(
        &self,
        request: &Request,
        counts: TokenCounts,
        (way, passes): (PassOrder, usize),
    ) -> u64 {
        let dtype = self.parts.dtype();
        let numbers = counts.sampled * self.transformer.token_width();
        let kept = match (way, passes) {
            (PassOrder::OneByOne, 2) => Conditions::<()>::kept_bytes(numbers, dtype),
            _ => 0,
        };
        let exchanged = match request.cards {
            0 | 1 => 0,
            _ => ops::Exchange::allocated(Conditions::<()>::kept_bytes(numbers, dtype)),
        };
        let rows = request.max_sequence_length as usize;
        let items = (self.batch(way, passes), counts);
        // Where strengths change, keys and values are computed anew in each step, beside those of the step before.
        let anew = match request.has_curves() {
            true => {
                let shape = self.transformer.blocks();
                shape.texts_bytes(self.transformer.num_layers, passes * rows, dtype)
            }
            false => 0,
        };
        denoise_scratch(&self.transformer, items, (passes, rows), request.steps, dtype)
            + UniPcLatent::bytes(numbers, dtype)
            + kept
            + exchanged
            + anew
    }

    /// Floating-point operations of a pass over the blocks under one text.
    fn flops(&self, component: &str, tokens: usize, request: &Request) -> Flops {
        let rows_of = |weight: &str| match weight.starts_with("blocks.") && !is_of_text(weight) {
            true => tokens,
            false => 0,
        };
        let text = request.max_sequence_length as usize;
        self.parts.components.flops_of_products(component, rows_of)
            + self.transformer.num_layers as u64 * self.transformer.blocks().flops_of_attention(tokens, text)
    }

    fn decode_stage(&self, video: &Video) -> StagePlan {
        let latents = self.vae.latents(video.frames as usize);
        let ladder = decode_ladder(&self.vae, self.sides(video), latents, self.parts.dtype());
        StagePlan {
            shape: format!("{}x{} {latents} latents", video.width, video.height),
            takes: vec![ValueShape::new(LATENT, self.latent_shape(video, latents))],
            per_item: true,
            ..StagePlan::of(
                DECODE,
                Role::Decode,
                [VAE],
                rungs_of(ladder, self.dequantizing_of_vae()),
            )
        }
    }

    /// Convolutions are dequantized in any format, independent of tokens.
    fn dequantizing_of_vae(&self) -> Bytes {
        self.parts.components.dequantizing(VAE, 0, |_| true)
    }

    /// Shapes that a stage will ask cuDNN for.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        let (Ok(video), Ok(tokens)) = (request.video(), self.text_tokens(request)) else {
            return Vec::new();
        };
        let (sides, dtype) = (self.sides(video), self.parts.dtype());
        if sides.0 * sides.1 == 0 {
            return Vec::new();
        }
        match stage {
            ENCODE_TEXT => {
                let mut lengths: Vec<usize> = tokens.iter().copied().collect();
                lengths.dedup();
                lengths
                    .iter()
                    .map(|tokens| self.text.planned(*tokens, dtype))
                    .collect()
            }
            ENCODE_IMAGE => {
                let frames = self.frames_to_encode(video);
                self.vae.planned_to_encode(sides, frames, Chunking::Whole, dtype)
            }
            DENOISE | DENOISE_LOW => {
                let batch = self.batch(self.ways(request, video)[0], tokens.iter().count());
                let text = request.max_sequence_length as usize;
                let blocks = self.transformer.blocks();
                let as_asked = (dtype, AttentionPrecision::asked(request));
                blocks.planned(batch, self.tokens(video).all(), text, as_asked)
            }
            _ => {
                let latents = self.vae.latents(video.frames as usize);
                self.vae.planned_to_decode(sides, latents, Chunking::Whole, dtype)
            }
        }
    }
}
